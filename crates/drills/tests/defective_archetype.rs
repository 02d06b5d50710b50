//! An archetype that is broken on purpose: a lease whose `acquire` looks first and then writes, on a condition that
//! protects nothing. Drill, mutation and simulation each have to find it, and the seed that they name shows it again.

#![expect(
    clippy::unwrap_used,
    clippy::indexing_slicing,
    reason = "helpers of tests fail by panicking, as tests do"
)]

use std::sync::Arc;

use async_trait::async_trait;
use statehouse::action::{
    ActionContext, ActionHandler, Call, Code, Prepare, Prepared, Refusal, RefusedStep, Verdict,
};
use statehouse::{Blueprint, resource};
use statehouse_drills::drill::{Drill, DrillTarget};
use statehouse_drills::engines::Model;
use statehouse_drills::mutation;
use statehouse_drills::proof::DRILLS;
use statehouse_drills::simulation::{HistorySize, Workload};
use statehouse_store::guard::column;
use statehouse_store::{Address, Consistency, Guard, Table};

const BLUEPRINT: &str = r#"
[house]
name = "broken"

[lease.lock]
key      = { name = "text" }
duration = "2s"
"#;

/// Looks, and then takes.
struct CheckThenAct {
    table: Arc<Table>,
    right: Arc<dyn Prepare>,
}

#[async_trait]
impl Prepare for CheckThenAct {
    async fn prepare(&self, call: &Call, cx: &ActionContext<'_>) -> Result<Prepared, Refusal> {
        let address = Address::new(&self.table, &call.tenant, call.key.iter().cloned())?;
        let row = cx.store.get(&[address], Consistency::Strong).await?.into_iter().next().flatten();
        let taken = row.is_some_and(|row| row.time("expires_at").is_some_and(|end| end > cx.clock.now()));
        if taken {
            return Err(Refusal::new(Code::Held, "somebody holds it"));
        }
        let mut prepared = self.right.prepare(call, cx).await?;
        if let Prepared::Write(parts) = &mut prepared {
            parts.steps[0].guard = Guard::always().and(column("epoch").ge(0));
        }
        Ok(prepared)
    }

    fn refused(&self, call: &Call, refused: &RefusedStep<'_>) -> Verdict {
        self.right.refused(call, refused)
    }
}

fn target(broken: bool) -> DrillTarget {
    let blueprint = Blueprint::read("broken.toml", BLUEPRINT).unwrap();
    let mut resources = resource::declare(&blueprint).unwrap();
    let lock = &mut resources[0];
    let acquire = lock.actions.iter_mut().find(|action| action.name == "acquire").unwrap();
    if let (true, ActionHandler::Write(write)) = (broken, &mut acquire.handler) {
        let right = write.prepare.clone();
        write.prepare = Arc::new(CheckThenAct { table: lock.tables[0].clone(), right });
    }
    DrillTarget::among("broken", resources, "lock")
}

fn drill(failure: &str) -> &'static Drill {
    DRILLS.iter().copied().flatten().find(|drill| drill.failure == failure).unwrap()
}

#[tokio::test]
async fn the_drill_finds_it_and_its_seed_shows_it_again() {
    let duplicate = drill("duplicate claim");
    let right = duplicate.report(&Model, Some(&target(false)), 7).await;
    assert!(right.failed.is_none(), "{:?}", right.failed);
    let broken = target(true);
    let red = duplicate.report(&Model, Some(&broken), 7).await.failed.unwrap();
    assert!(red.why.contains("it is held by"), "{red}");
    let again = duplicate.report(&Model, Some(&broken), red.seed).await.failed.unwrap();
    assert_eq!(again.why, red.why);
    // The shortest history that was found is one round: nothing but the claims.
    assert!(red.history.len() <= 12, "{red}");
}

#[test]
fn the_mutation_finds_it() {
    let report = mutation::run_on("lease", &target(true), 2).unwrap();
    assert!(!report.is_fine());
    assert!(
        report.failing_before.iter().any(|(name, _)| name.contains("duplicate_claim")),
        "{:?}",
        report.failing_before
    );
    let survivors = report.mutants.iter().filter(|mutant| mutant.killed_by.is_none());
    let survivors: Vec<String> = survivors.map(|mutant| mutant.site.to_string()).collect();
    assert!(survivors.iter().any(|site| site.contains("epoch >= ?")), "{survivors:?}");
}

#[test]
fn the_simulation_finds_it_and_its_seed_shows_it_again() {
    let (course, broken) = (Workload::of("lease").unwrap(), target(true));
    let size = HistorySize::default();
    let found = (1..50)
        .map(|seed| course.run(Some(&broken), seed, size).unwrap())
        .find(|run| run.violation.is_some());
    let found = found.unwrap();
    let told = course.run(Some(&broken), found.seed, HistorySize { tells: true, ..size }).unwrap();
    assert_eq!((told.violation, told.trace), (found.violation, found.trace));
    assert!(!told.told.is_empty());
    assert_eq!(course.run(Some(&target(false)), found.seed, size).unwrap().violation, None);
}
