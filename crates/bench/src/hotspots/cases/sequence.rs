//! Hotspots of `sequence`: one counter that everybody draws from, and many processes that want a worker id.

use std::sync::Arc;

use anyhow::Result;
use serde_json::json;
use statehouse::infra::sequence::local_ids::{RangeNumbers, TimeIds};

use super::super::case::{CaseFigures, Compares, HotspotCase, Side, Trial, each, key};
use crate::site::request;

/// Numbers of a leased range.
const RANGE: i64 = 1_000;
/// Ids that one holder draws, where leases are refreshed.
const DRAWN: u64 = 100_000;

const CASE: HotspotCase = HotspotCase {
    archetype: "sequence",
    hotspot: "",
    operation: "one of 64 callers gets a number of one counter",
    compares: Compares::Switch,
    blueprint: "
[sequence.ticket]
kind = \"counter\"
key  = { desk = \"int\" }
[sequence.order_id]
kind = \"time\"
SETTINGS
",
    sides: [Side::level("next", 0), Side::level("leased ranges of 1,000", 1)],
    operations: 10_000,
    callers: 64,
    workload: |trial| Box::pin(numbers(trial)),
};

pub(super) const CASES: &[HotspotCase] = &[
    HotspotCase { hotspot: "allocator hot spot", ..CASE },
    HotspotCase {
        hotspot: "worker-id pool contention",
        operation: "a new holder leases a worker id and draws its first id",
        compares: Compares::Load,
        sides: [Side::level("1 at a time", 1), Side::level("32 at once", 32)],
        operations: 512,
        workload: |trial| {
            let at_once = trial.side.level;
            Box::pin(first_ids(trial.with_callers(at_once)))
        },
        ..CASE
    },
    HotspotCase {
        hotspot: "lease refresh pressure",
        operation: "a holder draws an id, 4 holders",
        sides: [Side::settings("ahead = \"10ms\""), Side::settings("ahead = \"10s\"")],
        operations: 4 * DRAWN,
        callers: 4,
        workload: |trial| Box::pin(ids(trial)),
        ..CASE
    },
];

/// Draws numbers, from the store each time or from ranges that the process has leased.
async fn numbers(trial: Trial) -> Result<CaseFigures> {
    if trial.side.level == 0 {
        return trial.measure_calls(|_| request("ticket.next", key(0), json!({}))).await;
    }
    let (house, tenant) = (trial.house.house.clone(), trial.house.tenant());
    let numbers = Arc::new(RangeNumbers::new(house, tenant, "ticket", key(0), "bench", RANGE));
    trial
        .measure_each(move |_, _| {
            let numbers = numbers.clone();
            async move { Ok(numbers.next().await.map(|_| ())?) }
        })
        .await
}

async fn first_ids(trial: Trial) -> Result<CaseFigures> {
    trial
        .measure_each(|house, number| async move {
            let holder = format!("process {number}");
            TimeIds::new(house.house.clone(), house.tenant(), "order_id", &holder).next().await?;
            Ok(())
        })
        .await
}

/// Each holder draws its part of the ids, one after another.
async fn ids(trial: Trial) -> Result<CaseFigures> {
    let part = trial.operations / trial.callers;
    let work = each(&trial.house, trial.callers, trial.callers, move |house, number| async move {
        let holder = format!("process {number}");
        let ids = TimeIds::new(house.house.clone(), house.tenant(), "order_id", &holder);
        for _ in 0..part {
            ids.next().await?;
        }
        Ok(())
    });
    trial.measure(part * trial.callers, work).await
}
