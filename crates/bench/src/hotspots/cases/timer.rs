//! Hotspots of `timer`: many timers of one moment, and many due times that were missed.

use std::time::Duration;

use anyhow::Result;
use serde_json::{Value as Json, json};
use statehouse_store::{Clock as _, SystemClock, Value};

use super::super::case::{CaseFigures, Compares, HotspotCase, Side, Trial, key};
use crate::site::request;

const FIRE: &str = "alarm.fire";
/// Due times of a recurring timer that were missed.
const MISSED: u64 = 30;
const EVERY: Duration = Duration::from_secs(60);

const CASE: HotspotCase = HotspotCase {
    archetype: "timer",
    hotspot: "",
    operation: "one of many timers of one moment fires",
    compares: Compares::Switch,
    blueprint: "[timer.alarm]\nkey = { id = \"int\" }\nSETTINGS\n",
    sides: [Side::settings("shards = 1"), Side::settings("shards = 16")],
    operations: 4_000,
    callers: 16,
    workload: |trial| Box::pin(fire(trial, json!({"due_at": "2020-01-01T00:00:00Z"}))),
};

pub(super) const CASES: &[HotspotCase] = &[
    HotspotCase { hotspot: "due-time bucket hotspot", ..CASE },
    HotspotCase {
        hotspot: "cron boundary burst",
        operation: "one of many recurring timers of one moment fires",
        workload: |trial| {
            Box::pin(fire(trial, json!({"due_at": "2020-01-01T00:00:00Z", "every_ms": 315_360_000_000_u64})))
        },
        ..CASE
    },
    HotspotCase {
        hotspot: "queue backlog",
        operation: "a timer that missed 30 due times is up to date",
        sides: [Side::settings("missed = \"all\""), Side::settings("missed = \"once\"")],
        operations: 400,
        workload: |trial| Box::pin(catch_up(trial)),
        ..CASE
    },
    HotspotCase {
        hotspot: "worker burst",
        operation: "a due timer fires, of so many",
        compares: Compares::Load,
        sides: [Side::level("1,000", 1), Side::level("8,000", 8)],
        operations: 1_000,
        workload: |trial| {
            let times = trial.side.level;
            Box::pin(fire(trial.with_times_operations(times), json!({"due_at": "2020-01-01T00:00:00Z"})))
        },
        ..CASE
    },
];

async fn set(trial: &Trial, input: Json) -> Result<()> {
    trial.fill((0..trial.operations).map(|id| request("alarm.set", key(id), input.clone()))).await
}

async fn fire(trial: Trial, input: Json) -> Result<CaseFigures> {
    set(&trial, input).await?;
    trial.measure_worker(FIRE, trial.operations, trial.operations).await
}

/// Timers that recur every minute and were last looked at half an hour and half a minute ago.
async fn catch_up(trial: Trial) -> Result<CaseFigures> {
    let missed = u32::try_from(MISSED)?;
    let due = SystemClock.now().minus(EVERY * (missed - 1) + EVERY / 2);
    let input = json!({"due_at": Value::Time(due).to_json(), "every_ms": EVERY.as_millis() as u64});
    set(&trial, input).await?;
    let fires = if trial.side.settings.contains("all") { MISSED } else { 1 };
    trial.measure_worker(FIRE, trial.operations * fires, trial.operations).await
}
