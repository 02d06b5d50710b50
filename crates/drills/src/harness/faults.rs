//! A bad world around a store, and clients that get on with it by the rules of the contract.
//!
//! Clients count: each adds 1 to one of a few shared counters, again and again, through a [`FaultyStore`]. Whenever a
//! client does not know what became of an increment, it commits the same plan again, or resolves the operation; a
//! client that died is followed by one that resolves what it left open. In the end each counter must be exactly the
//! number of increments that some client knows to be applied, and the log must say the same. One more is a repetition
//! that was applied twice, one less an acknowledged write that was lost.
//!
//! A seed that provoked nothing has shown nothing: every kind of fault that was asked for must have been achieved.

use std::collections::BTreeMap;
use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};
use statehouse_store::faulty::{Achieved, Odds};
use statehouse_store::guard::column;
use statehouse_store::{
    Clock, Commit, Consistency, Entry, EventTemplate, FaultyStore, OperationStatus, Plan, Random, Resolution,
    Step, Store, StoreError, SystemClock, Table,
};
use tokio::task::JoinSet;

use crate::harness::engines::TestNamespace;
use crate::harness::sample_inputs::values::counters;
use crate::harness::store_client::StoreClient;

/// How bad the world is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FaultLevel {
    /// Delays, failures, lost answers, stale reads.
    Rough,
    /// The same, and clients die in the midst of their calls.
    Deadly,
}

/// What a run achieved.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FaultReport {
    /// Increments that are known to be applied.
    pub applied: u64,
    /// Operations that were settled as never applied.
    pub aborted: u64,
    /// The faults on the way.
    pub achieved: Achieved,
}

impl fmt::Display for FaultReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} increments applied, {} aborted; {}", self.applied, self.aborted, self.achieved)
    }
}

const CLIENTS: u64 = 6;
const EACH: u64 = 60;
const COUNTERS: u64 = 3;

/// How long a client waits for an answer before another client takes it for dead. Being wrong about that is part of
/// the test: the one who was taken for dead may still be at work.
const LIFETIME: Duration = Duration::from_millis(40);

/// How long a client waits the next time, after so many answers that did not come: on a slow server an answer takes
/// longer than a short life, and a client that starts over again and again is never done.
fn patience(silences: u32) -> Duration {
    LIFETIME * (1 << silences.min(7))
}

/// Lets clients count in a bad world, and checks that nothing was lost or done twice.
pub async fn run(namespace: &dyn TestNamespace, seed: u64, level: FaultLevel) -> Result<FaultReport> {
    let table = counters("counted")?;
    let client = StoreClient::open(namespace, &[&table]).await?;
    let inserts = (0..COUNTERS).map(|number| Step::insert(&table, [number.to_string().into()]));
    client.apply(client.plan().steps(inserts)).await?;
    let odds = match level {
        FaultLevel::Rough => Odds::rough(),
        FaultLevel::Deadly => Odds { crash_before: 0.05, crash_after: 0.05, ..Odds::rough() },
    };
    let store = Arc::new(FaultyStore::over(client.store.clone(), Arc::new(SystemClock), odds, seed));
    let mut tasks: JoinSet<Result<Vec<(u64, bool)>>> = JoinSet::new();
    for number in 0..CLIENTS {
        let client = IncrementingClient {
            store: store.clone(),
            table: table.clone(),
            client: client.clone(),
            number,
            random: Random::seeded(seed ^ (number + 1)),
        };
        tasks.spawn(client.run());
    }
    let mut counts: BTreeMap<u64, u64> = (0..COUNTERS).map(|counter| (counter, 0)).collect();
    let (mut applied, mut aborted) = (0, 0);
    while let Some(fates) = tasks.join_next().await {
        for (counter, was_applied) in fates?? {
            *counts.entry(counter).or_default() += u64::from(was_applied);
            if was_applied { applied += 1 } else { aborted += 1 }
        }
    }
    let report = FaultReport { applied, aborted, achieved: store.achieved() };
    check_counters(&client, &table, &counts).await.with_context(|| format!("seed {seed}: {report}"))?;
    check_log(&client, &counts, aborted).await.with_context(|| format!("seed {seed}: {report}"))?;
    check_achieved(level, &report).with_context(|| format!("seed {seed}"))?;
    Ok(report)
}

async fn check_counters(client: &StoreClient, table: &Arc<Table>, counts: &BTreeMap<u64, u64>) -> Result<()> {
    for (counter, count) in counts {
        let row = client.row(table, [counter.to_string().into()]).await?;
        ensure!(
            row.int("n") == i64::try_from(*count).ok() && row.version() == 1 + *count as i64,
            "{count} increments of counter {counter} are known to be applied; the row is {row:?}"
        );
    }
    Ok(())
}

async fn check_log(client: &StoreClient, counts: &BTreeMap<u64, u64>, aborted: u64) -> Result<()> {
    let expected = counts.values().sum::<u64>() + aborted;
    let mut logged: BTreeMap<u64, u64> = counts.keys().map(|counter| (*counter, 0)).collect();
    for record in client.exact_log(usize::try_from(expected)?).await? {
        if record.status == OperationStatus::Aborted {
            continue;
        }
        let counter: u64 = record.key.parse()?;
        let count = logged.entry(counter).or_default();
        *count += 1;
        // The records of a counter stand in the order of its versions, and carry them.
        let event = record.events.first().context("a record without its event")?;
        ensure!(
            event.data["row"]["n"].as_u64() == Some(*count),
            "record {count} of counter {counter} says {}",
            event.data
        );
    }
    ensure!(logged == *counts, "the log has {logged:?}, known to be applied are {counts:?}");
    Ok(())
}

fn check_achieved(level: FaultLevel, report: &FaultReport) -> Result<()> {
    let Achieved {
        delays,
        unavailable,
        unknown_before,
        unknown_after,
        crashes_before,
        crashes_after,
        stale_rows,
    } = report.achieved;
    let mut wanted = vec![delays, unavailable, unknown_before, unknown_after, stale_rows];
    if level == FaultLevel::Deadly {
        wanted.extend([crashes_before, crashes_after]);
    }
    ensure!(wanted.iter().all(|count| *count > 0), "not every kind of fault was achieved: {report}");
    Ok(())
}

/// A client at work.
struct IncrementingClient {
    store: Arc<FaultyStore>,
    table: Arc<Table>,
    client: StoreClient,
    number: u64,
    random: Random,
}

impl IncrementingClient {
    /// Increments until all turns are done; returns the counter and the fate of each operation.
    async fn run(mut self) -> Result<Vec<(u64, bool)>> {
        let mut fates = Vec::new();
        for turn in 0..EACH {
            let counter = self.random.below(COUNTERS);
            self.look_at(counter).await?;
            let step = Step::update(&self.table, [counter.to_string().into()]).set("n", column("n").add(1));
            let entry = Entry::about("counter", counter.to_string());
            let plan = Plan::of(&self.client.tenant, format!("client-{}-{turn}", self.number))
                .step(step)
                .log(entry.event(EventTemplate::named("counted").with_row_of(0)))
                .build()?;
            fates.push((counter, self.settle(&plan).await?));
        }
        Ok(fates)
    }

    /// An eventual read. It may be old, and nothing rests on it; it must not be from the future or from nowhere.
    async fn look_at(&self, counter: u64) -> Result<()> {
        let address = self.client.address(&self.table, [counter.to_string().into()])?;
        match self.store.get(&[address], Consistency::Eventual).await {
            Ok(rows) => {
                let row = rows.into_iter().next().flatten().context("a counter that exists was not found")?;
                ensure!(row.int("n") == Some(row.version() - 1), "no commit ever left {row:?}");
                Ok(())
            }
            Err(StoreError::Unavailable { .. }) => Ok(()),
            Err(error) => Err(error.into()),
        }
    }

    /// Commits a plan until its fate is certain: true if it was applied.
    async fn settle(&mut self, plan: &Plan) -> Result<bool> {
        // A bound on tries, since every one of them may fail; the odds of reaching it are nil.
        for _ in 0..1_000 {
            let answer = tokio::select! {
                answer = self.store.commit(plan) => Some(answer),
                () = SystemClock.sleep(LIFETIME) => None,
            };
            match answer {
                Some(Ok(Commit::Applied(_))) => return Ok(true),
                Some(Ok(Commit::Fenced)) => return Ok(false),
                Some(Ok(Commit::Refused(refused))) => bail!("an increment was refused: {refused:?}"),
                Some(Err(StoreError::Unavailable { .. })) => {}
                // Half of the time the same plan again, half of the time claim or learn.
                Some(Err(StoreError::OutcomeUnknown { .. })) if self.random.chance(0.5) => {}
                Some(Err(StoreError::OutcomeUnknown { .. })) | None => return self.resolve(plan).await,
                Some(Err(error)) => return Err(error.into()),
            }
        }
        bail!("operation {} was never settled", plan.operation())
    }

    async fn resolve(&self, plan: &Plan) -> Result<bool> {
        let mut silences = 0;
        for _ in 0..1_000 {
            let answer = tokio::select! {
                answer = self.store.resolve(plan.tenant(), plan.operation()) => Some(answer),
                () = SystemClock.sleep(patience(silences)) => None,
            };
            silences += u32::from(answer.is_none());
            match answer {
                Some(Ok(Resolution::Applied(_))) => return Ok(true),
                Some(Ok(Resolution::Aborted)) => return Ok(false),
                Some(Err(StoreError::Unavailable { .. } | StoreError::OutcomeUnknown { .. })) | None => {}
                Some(Err(error)) => return Err(error.into()),
            }
        }
        bail!("operation {} was never resolved", plan.operation())
    }
}
