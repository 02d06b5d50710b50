//! Hotspots of `schedule`: many jobs that are due at once, long queues and many workers.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use anyhow::{Result, ensure};
use serde_json::{Value as Json, json};
use statehouse::worker::WorkerOptions;
use statehouse_store::{Clock as _, SystemClock, Value};

use super::super::case::{CaseFigures, Compares, HotspotCase, Side, Trial, each};
use crate::site::{Tenancy, request};

/// Jobs of one claim, where the side does not say.
const CLAIMED: u64 = 10;
/// The pause of a claimer that found nothing.
const EMPTY_PAUSE: Duration = Duration::from_millis(1);
/// How long before their due time definitions are declared.
const DECLARED_BEFORE: Duration = Duration::from_millis(1_500);

const CASE: HotspotCase = HotspotCase {
    archetype: "schedule",
    hotspot: "",
    operation: "a due job is claimed and completed, by 4 claimers",
    compares: Compares::Switch,
    blueprint: "[schedule.job]\nSETTINGS\n",
    sides: [Side::level("limit = 1", 1), Side::level("limit = 98", 98)],
    operations: 2_000,
    callers: 4,
    workload: |trial| {
        let limit = trial.side.level;
        Box::pin(drain(trial, limit))
    },
};

pub(super) const CASES: &[HotspotCase] = &[
    HotspotCase { hotspot: "due-time burstiness", ..CASE },
    HotspotCase {
        hotspot: "due-time burstiness",
        operation: "of many definitions due at one moment, the job of one is claimed after that moment",
        sides: [Side::settings("look_ahead = \"0s\""), Side::settings("look_ahead = \"10s\"")],
        operations: 500,
        workload: |trial| Box::pin(definitions(trial)),
        ..CASE
    },
    HotspotCase {
        hotspot: "due bucket/index hotspot",
        operation: "a job is claimed and completed, by 8 claimers",
        sides: [Side::settings("shards = 1"), Side::settings("shards = 16")],
        callers: 8,
        workload: |trial| Box::pin(drain(trial, CLAIMED)),
        ..CASE
    },
    HotspotCase {
        hotspot: "queue backlog",
        operation: "a job is claimed and completed, while so many others wait",
        compares: Compares::Load,
        sides: [Side::level("none", 0), Side::level("10,000", 10_000)],
        workload: |trial| Box::pin(drain(trial, CLAIMED)),
        ..CASE
    },
    HotspotCase {
        hotspot: "worker burst pressure",
        operation: "a job is claimed and completed",
        compares: Compares::Load,
        sides: [Side::level("1 claimer", 1), Side::level("32 claimers", 32)],
        workload: |trial| {
            let claimers = trial.side.level;
            Box::pin(drain(trial.with_callers(claimers), CLAIMED))
        },
        ..CASE
    },
];

/// Enqueues jobs, 40 as one plan.
async fn enqueue(trial: &Trial, jobs: u64) -> Result<()> {
    let one = |number| request("job.enqueue", vec![], json!({"payload": {"number": number}}));
    let batches = (0..jobs).step_by(40).map(|first| (first..jobs.min(first + 40)).map(one).collect());
    trial.observer.fill(batches).await
}

/// Claimers take so many jobs at a time and complete them, until as many are done as there are operations. The level of a
/// side that compares loads is how many more are in the queue.
async fn drain(trial: Trial, limit: u64) -> Result<CaseFigures> {
    let more = if trial.side.level > 1_000 { trial.scaled(trial.side.level) } else { 0 };
    enqueue(&trial, trial.operations + more).await?;
    claimed(&trial, limit).await
}

/// Measures claimers until as many jobs are completed as there are operations.
async fn claimed(trial: &Trial, limit: u64) -> Result<CaseFigures> {
    let (done, wanted) = (Arc::new(AtomicU64::new(0)), trial.operations);
    let work = each(&trial.house, trial.callers, trial.callers, move |house, _| {
        let done = done.clone();
        async move {
            while done.load(Ordering::Relaxed) < wanted {
                match claim_and_complete(&house, limit).await? {
                    0 => SystemClock.sleep(EMPTY_PAUSE).await,
                    jobs => _ = done.fetch_add(jobs, Ordering::Relaxed),
                }
            }
            Ok(())
        }
    });
    trial.measure(wanted, work).await
}

/// How many jobs a claim got; they are completed as one list.
async fn claim_and_complete(house: &Tenancy, limit: u64) -> Result<u64> {
    let queue = || -> Vec<Value> { vec!["default".into()] };
    let claim = json!({"worker": "bench", "limit": limit});
    let jobs = house.list("job_queue.claim", queue(), claim).await?;
    if jobs.is_empty() {
        return Ok(0);
    }
    let part = |job: &Json| json!({"job_id": job.get("job_id"), "attempt": job.get("attempt")});
    let completed = json!({"jobs": jobs.iter().map(part).collect::<Vec<_>>()});
    let outcomes = house.list("job_queue.complete", queue(), completed).await?;
    let refused = outcomes.iter().find(|outcome| outcome.get("done") != Some(&json!(true)));
    ensure!(refused.is_none(), "not completed: {refused:?}");
    Ok(jobs.len() as u64)
}

/// Definitions that are all due at one moment. From that moment on it is measured how fast their jobs can be claimed.
async fn definitions(trial: Trial) -> Result<CaseFigures> {
    let due = SystemClock.now().plus(DECLARED_BEFORE);
    let when = json!({"when": {"at": Value::Time(due).to_json()}});
    let create = |number: u64| {
        request("job_definition.create", vec![number.to_string().as_str().into()], when.clone())
    };
    trial.fill((0..trial.operations).map(create)).await?;
    trial.house.house.start_workers(WorkerOptions::default());
    SystemClock.sleep(due.since(SystemClock.now())).await;
    let figures = claimed(&trial, 98).await?;
    trial.house.house.stop_workers().await;
    Ok(figures)
}
