//! Drills on generated blueprints, on the model and on SQLite: none may be red.
//!
//! `STATEHOUSE_DRILL_BLUEPRINTS` is how many blueprints are drilled on each of the two engines. Without it, the gate drills
//! each pair of archetypes once on the model, and every eighth of them on SQLite. A trial is named after the number of its
//! blueprint and its pair, and its failure shows the blueprint: `--test generated -- model::generated::17_`.

#![expect(clippy::print_stdout, clippy::print_stderr, reason = "this is the main function of a test harness")]

#[path = "support/timed.rs"]
mod timed;

use std::process::ExitCode;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use libtest_mimic::{Arguments, Failed, Trial};
use statehouse_drills::engines::{Model, Sqlite, TestEngine};
use statehouse_drills::proof::generated::{GeneratedBlueprint, pair_of, pairs};
use statehouse_drills::selection;

const COUNT_VARIABLE: &str = "STATEHOUSE_DRILL_BLUEPRINTS";
/// Of the blueprints of the gate, every so many is drilled on SQLite too.
const SQLITE_EVERY: usize = 8;
/// Blueprints at a time: more than there are cores, because drills pause.
const THREADS: usize = 4;

/// What was drilled on one engine.
#[derive(Default)]
struct DrillTotals {
    blueprints: AtomicU64,
    drills: AtomicU64,
    skipped: AtomicU64,
}

fn main() -> ExitCode {
    let mut arguments = Arguments::from_args();
    arguments.test_threads.get_or_insert(THREADS);
    let count = match selection::number(COUNT_VARIABLE, 0) {
        Ok(count) => count,
        Err(error) => {
            eprintln!("{error}");
            return ExitCode::FAILURE;
        }
    };
    let (count, sqlite_every) = if count == 0 { (pairs().len() as u64, SQLITE_EVERY) } else { (count, 1) };
    let engines: [(Arc<dyn TestEngine>, usize); 2] = [(Arc::new(Model), 1), (Arc::new(Sqlite), sqlite_every)];
    let stats: Vec<Arc<DrillTotals>> = engines.iter().map(|_| Arc::default()).collect();
    let mut trials = Vec::new();
    for ((engine, every), stats) in engines.iter().zip(&stats) {
        trials.extend((0..count).step_by(*every).map(|number| trial(engine, number, stats)));
    }
    let conclusion = libtest_mimic::run(&arguments, trials);
    if !arguments.list {
        let line = |((engine, _), stats): (&(Arc<dyn TestEngine>, usize), &Arc<DrillTotals>)| {
            let count = |number: &AtomicU64| number.load(Ordering::Relaxed);
            format!(
                "{} {} blueprints with {} drills ({} skipped)",
                engine.name(),
                count(&stats.blueprints),
                count(&stats.drills),
                count(&stats.skipped)
            )
        };
        println!("generated: {}", engines.iter().zip(&stats).map(line).collect::<Vec<_>>().join(", "));
    }
    conclusion.exit_code()
}

fn trial(engine: &Arc<dyn TestEngine>, number: u64, stats: &Arc<DrillTotals>) -> Trial {
    let (one, other) = pair_of(number);
    let name = format!("{}::generated::{number}_{one}_{other}", engine.name());
    let (engine, stats) = (engine.clone(), stats.clone());
    timed::trial(name, move || drill(&*engine, number, &stats))
}

/// Drills one blueprint. On one thread, so that its number gives the same history on the model again.
fn drill(engine: &dyn TestEngine, number: u64, stats: &DrillTotals) -> Result<(), Failed> {
    let blueprint =
        GeneratedBlueprint::of_number(number).map_err(|error| Failed::from(format!("{error:#}")))?;
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    let reports = runtime.block_on(blueprint.drill(engine, number));
    if reports.is_empty() {
        return Err(Failed::from(format!("nothing is drilled:\n{}", blueprint.text)));
    }
    for report in reports {
        if let Some(red) = report.failed {
            return Err(Failed::from(format!("{}\n{}: {red}", blueprint.text, report.drill.name())));
        }
        stats.drills.fetch_add(1, Ordering::Relaxed);
        stats.skipped.fetch_add(u64::from(report.skipped.is_some()), Ordering::Relaxed);
    }
    stats.blueprints.fetch_add(1, Ordering::Relaxed);
    Ok(())
}
