//! Jobs on PostgreSQL, against queues that others have made, on the same server in the same run.
//!
//! Both sides are libraries in a process beside the server: ours in Rust, theirs in Node. graphile-worker deletes a job that
//! is done, and pg-boss marks it; ours is measured both ways (`keep = "0s"`, and the week that it keeps jobs otherwise), and
//! leaves a record of every job in the log either way.

mod rivals;

use std::collections::BTreeMap;
use std::future::pending;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use async_trait::async_trait;
use serde_json::{Value as Json, json};
use statehouse::jobs::{Job, JobFailure, JobHandler, JobRunner, RunnerOptions};
use statehouse_store::clock::Stopwatch;
use statehouse_store::{Clock as _, SystemClock};
use tokio::sync::Notify;
use tokio::task::JoinSet;

use self::rivals::{Rival, Rivals};
use crate::load::{self, LoadRound, drive, median, middle, ratio};
use crate::report;
use crate::servers::BenchServer;
use crate::site::{Site, Tenancy, request};

const BLUEPRINT: &str = "
[house]
name = \"bench\"

[schedule.job]

[schedule.task]
keep = \"0s\"
";

/// The schedules: of one the jobs that are done are kept, of the other they are deleted.
const KEPT: &str = "job";
const DELETED: &str = "task";

/// The ways of doing them.
const HANDLER: &str = "a handler in Rust";
const CLAIMS: &str = "4 that claim and complete 98 at a time";

/// Callers that enqueue.
const CALLERS: u64 = 16;
const SPAN: Duration = Duration::from_millis(1_500);
const ENQUEUE_ROUNDS: usize = 5;
/// Jobs of one drain.
const JOBS: usize = 20_000;
const DRAIN_ROUNDS: usize = 3;
/// Jobs of the first run, which is not measured.
const WARM: usize = 2_000;
/// Jobs of one plan while the queue is filled.
const FILLED: usize = 40;
/// Jobs in one claim, and those who claim at once.
const CLAIMED: usize = 98;
const CLAIMERS: usize = 4;
/// Jobs that a worker has at once.
const AT_ONCE: usize = 1_176;
/// The lease of the worker that is killed, and how many jobs it has.
const LEASE: Duration = Duration::from_secs(2);
const LOST: usize = 98;

/// Measures and prints.
pub async fn run() -> Result<()> {
    let server = BenchServer::postgres()?;
    let site = Site::at(&server.url).await?;
    let house = site.house(BLUEPRINT).await?;
    let mut rivals = Rivals::start(&server.url).await?;
    warm(&server, &house, &mut rivals).await?;
    enqueues(&house, &mut rivals).await?;
    drains(&house, &mut rivals).await?;
    rivals.stop().await?;
    recovery(&house).await?;
    if let Some(load) = load::machine() {
        report::note("load of the machine (1, 5, 15 minutes)", &load);
    }
    site.close().await;
    Ok(())
}

/// Lets every queue run once, and the server know their tables.
async fn warm(server: &BenchServer, house: &Tenancy, rivals: &mut Rivals) -> Result<()> {
    for schedule in [KEPT, DELETED] {
        fill(house, schedule, WARM).await?;
    }
    for rival in [Rival::GraphileWorker, Rival::PgBoss] {
        rivals.drain(rival, WARM).await?;
    }
    server.settle().await?;
    for schedule in [KEPT, DELETED] {
        claimer(house.clone(), schedule).await?;
    }
    server.settle().await
}

async fn enqueues(house: &Tenancy, rivals: &mut Rivals) -> Result<()> {
    let (mut ours, mut graphile, mut boss) = (Vec::new(), Vec::new(), Vec::new());
    for _ in 0..ENQUEUE_ROUNDS {
        ours.push(enqueue(house).await?);
        graphile.push(rivals.enqueue(Rival::GraphileWorker, CALLERS, SPAN).await?);
        boss.push(rivals.enqueue(Rival::PgBoss, CALLERS, SPAN).await?);
    }
    report::heading(&format!("PostgreSQL: enqueue one job per call, {CALLERS} callers"));
    report::measured("Statehouse", median(&ours)?);
    for (rival, rounds) in [(Rival::GraphileWorker, &graphile), (Rival::PgBoss, &boss)] {
        report::measured(rival.name(), median(rounds)?);
        report::ratio(&format!("Statehouse / {}", rival.name()), ratio(&ours, rounds)?, 5.0);
    }
    Ok(())
}

async fn enqueue(house: &Tenancy) -> Result<LoadRound> {
    let house = house.clone();
    drive(CALLERS, SPAN, move |caller, _| {
        let house = house.clone();
        async move {
            // No worker claims from this queue.
            house
                .call("job.enqueue", vec![], json!({"queue": "enqueued", "payload": {"number": caller}}))
                .await?;
            Ok(())
        }
    })
    .await
}

async fn drains(house: &Tenancy, rivals: &mut Rivals) -> Result<()> {
    let mut ours: BTreeMap<(&str, &str), Vec<f64>> = BTreeMap::new();
    let (mut graphile, mut boss, mut boss_workers) = (vec![], vec![], vec![]);
    for _ in 0..DRAIN_ROUNDS {
        for schedule in [DELETED, KEPT] {
            let rate = |seconds: f64| JOBS as f64 / seconds;
            ours.entry((schedule, HANDLER)).or_default().push(rate(by_handler(house, schedule).await?));
            ours.entry((schedule, CLAIMS)).or_default().push(rate(by_claims(house, schedule).await?));
        }
        graphile.push(JOBS as f64 / rivals.drain(Rival::GraphileWorker, JOBS).await?);
        boss.push(JOBS as f64 / rivals.drain(Rival::PgBoss, JOBS).await?);
        boss_workers.push(JOBS as f64 / rivals.work(JOBS).await?);
    }
    report::heading(&format!(
        "PostgreSQL: drain of {JOBS} jobs with nothing to do, every completion durable"
    ));
    for (schedule, what) in [(DELETED, "deleted when done"), (KEPT, "kept for a week")] {
        for way in [HANDLER, CLAIMS] {
            let rates = ours.get(&(schedule, way)).map(Vec::as_slice).unwrap_or_default();
            report::figure(&format!("Statehouse, {what}, {way}"), middle(rates)?, "jobs/s");
        }
    }
    for (rival, rates) in [(Rival::GraphileWorker, &graphile), (Rival::PgBoss, &boss)] {
        report::figure(rival.name(), middle(rates)?, "jobs/s");
    }
    report::figure("pg-boss, 4 of its own workers", middle(&boss_workers)?, "jobs/s");
    // Each beside the one that does the same with a job that is done.
    let faster = |schedule: &'static str, theirs: &[f64]| -> Result<f64> {
        let way = |way| ours.get(&(schedule, way)).into_iter().flatten();
        let best = way(HANDLER).zip(way(CLAIMS)).map(|(a, b)| a.max(*b));
        middle(&best.zip(theirs).map(|(ours, theirs)| ours / theirs).collect::<Vec<f64>>())
    };
    report::ratio("Statehouse, deleted, the faster way / graphile-worker", faster(DELETED, &graphile)?, 1.0);
    report::ratio(
        "Statehouse, kept, the faster way / pg-boss's own workers",
        faster(KEPT, &boss_workers)?,
        3.0,
    );
    report::ratio("Statehouse, kept, the faster way / pg-boss by hand", faster(KEPT, &boss)?, 3.0);
    Ok(())
}

async fn fill(house: &Tenancy, schedule: &str, jobs: usize) -> Result<()> {
    let batches = (0..jobs).step_by(FILLED).map(|first| {
        let numbers = first..jobs.min(first + FILLED);
        let one =
            |number| request(&format!("{schedule}.enqueue"), vec![], json!({"payload": {"number": number}}));
        numbers.map(one).collect()
    });
    house.fill(batches).await
}

/// That no job is left or still claimed.
async fn all_are_done(house: &Tenancy, schedule: &str) -> Result<()> {
    for state in ["PENDING", "IN_PROGRESS", "RETRYING"] {
        let input = json!({"state": state, "limit": 1});
        let left = house.list(&format!("{schedule}.list"), vec![], input).await?;
        ensure!(left.is_empty(), "{left:?}");
    }
    Ok(())
}

/// Counts jobs, and does nothing else.
struct Counting {
    left: AtomicUsize,
    none_left: Notify,
}

#[async_trait]
impl JobHandler for Counting {
    async fn handle(&self, _: &Job) -> Result<Json, JobFailure> {
        if self.left.fetch_sub(1, Ordering::Relaxed) == 1 {
            self.none_left.notify_one();
        }
        Ok(Json::Null)
    }
}

/// Never gets done.
struct Stuck(AtomicUsize);

#[async_trait]
impl JobHandler for Stuck {
    async fn handle(&self, _: &Job) -> Result<Json, JobFailure> {
        self.0.fetch_add(1, Ordering::Relaxed);
        pending().await
    }
}

/// How long a handler in Rust takes for all jobs, until the last completion is durable.
async fn by_handler(house: &Tenancy, schedule: &str) -> Result<f64> {
    fill(house, schedule, JOBS).await?;
    let counting = Arc::new(Counting { left: AtomicUsize::new(JOBS), none_left: Notify::new() });
    let options = RunnerOptions { at_once: AT_ONCE, ..RunnerOptions::default() };
    let watch = Stopwatch::start();
    let hands = JobRunner::start(&house.house, schedule, "default", counting.clone(), options)?;
    counting.none_left.notified().await;
    hands.stop().await;
    let seconds = watch.elapsed().as_secs_f64();
    all_are_done(house, schedule).await?;
    Ok(seconds)
}

/// How long it takes by claims and completions, as a worker in any language would make them.
async fn by_claims(house: &Tenancy, schedule: &'static str) -> Result<f64> {
    fill(house, schedule, JOBS).await?;
    let watch = Stopwatch::start();
    let mut claimers: JoinSet<Result<()>> = (0..CLAIMERS).map(|_| claimer(house.clone(), schedule)).collect();
    while let Some(ended) = claimers.join_next().await {
        ended??;
    }
    let seconds = watch.elapsed().as_secs_f64();
    all_are_done(house, schedule).await?;
    Ok(seconds)
}

async fn claimer(house: Tenancy, schedule: &str) -> Result<()> {
    let action = |name: &str| format!("{schedule}_queue.{name}");
    loop {
        let claim = json!({"worker": "bench", "limit": CLAIMED});
        let jobs = house.list(&action("claim"), vec!["default".into()], claim).await?;
        if jobs.is_empty() {
            return Ok(());
        }
        let done: Vec<Json> = jobs
            .iter()
            .map(|job| json!({"job_id": job.get("job_id"), "attempt": job.get("attempt"), "result": null}))
            .collect();
        let outcomes = house.list(&action("complete"), vec!["default".into()], json!({"jobs": done})).await?;
        let refused = outcomes.iter().find(|outcome| outcome.get("done") != Some(&json!(true)));
        ensure!(refused.is_none(), "not completed: {refused:?}");
    }
}

/// A worker is killed with jobs in its hands: how long until another one has done them all.
async fn recovery(house: &Tenancy) -> Result<()> {
    fill(house, KEPT, LOST).await?;
    let stuck = Arc::new(Stuck(AtomicUsize::new(0)));
    let options = RunnerOptions { at_once: LOST, lease: Some(LEASE), ..RunnerOptions::default() };
    let doomed = JobRunner::start(&house.house, KEPT, "default", stuck.clone(), options.clone())?;
    for _ in 0..1_000 {
        if stuck.0.load(Ordering::Relaxed) == LOST {
            break;
        }
        SystemClock.sleep(Duration::from_millis(10)).await;
    }
    ensure!(stuck.0.load(Ordering::Relaxed) == LOST, "the jobs were not claimed");
    let counting = Arc::new(Counting { left: AtomicUsize::new(LOST), none_left: Notify::new() });
    let heir = JobRunner::start(&house.house, KEPT, "default", counting.clone(), options)?;
    // For more than a lease its heart beats, and no other worker gets them.
    SystemClock.sleep(LEASE + LEASE / 4).await;
    ensure!(counting.left.load(Ordering::Relaxed) == LOST, "a job was taken from a worker that lives");
    let watch = Stopwatch::start();
    drop(doomed);
    counting.none_left.notified().await;
    heir.stop().await;
    let seconds = watch.elapsed().as_secs_f64();
    all_are_done(house, KEPT).await.context("after a worker was killed")?;
    report::heading(&format!(
        "PostgreSQL: a worker is killed with {LOST} jobs in its hands, lease {LEASE:?}"
    ));
    report::bounded("until another one has done them all", seconds / LEASE.as_secs_f64(), "leases", 1.0);
    Ok(())
}
