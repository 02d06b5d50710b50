//! Hotspots of `entity`: one row that everybody reads, or that everybody changes.

use std::time::Duration;

use anyhow::Result;
use serde_json::{Value as Json, json};
use statehouse::{Code, Expected, Request};
use statehouse_store::{Clock as _, SystemClock};

use super::super::case::{CaseFigures, Compares, HotspotCase, Side, Trial, insist, key};
use crate::site::{Tenancy, request};

const BLUEPRINT: &str = "
[entity.product]
key    = { id = \"int\" }
fields = { name = \"text\", views = { type = \"int\", default = 0 } }
SETTINGS
";
/// Rows that are read, where it is not only one.
const ROWS: u64 = 100;
/// How long the cache gets to follow the log before it is measured.
const FOLLOWING: Duration = Duration::from_millis(100);
/// One of so many operations writes, in a mixed workload.
const WRITE_EVERY: u64 = 10;

const CASE: HotspotCase = HotspotCase {
    archetype: "entity",
    hotspot: "",
    operation: "one row is read",
    compares: Compares::Switch,
    blueprint: BLUEPRINT,
    sides: [Side::level("consistency=strong", 0), Side::level("consistency=cached", 1)],
    operations: 40_000,
    callers: 64,
    workload: |trial| Box::pin(reads(trial, 1, None)),
};

/// Changes of one row by 16 callers.
const CONTENDED: HotspotCase = HotspotCase {
    hotspot: "write contention on hot entity",
    operation: "one row: 15 of 16 add to a counter, 1 of 16 reads it and changes another field of that version",
    sides: [Side::settings("").named("counter in the row"), Side::settings("hot = [\"views\"]")],
    operations: 4_000,
    callers: 16,
    workload: |trial| Box::pin(counts_beside_edits(trial)),
    ..CASE
};

pub(super) const CASES: &[HotspotCase] = &[
    HotspotCase { hotspot: "hot entity read skew", ..CASE },
    CONTENDED,
    HotspotCase {
        operation: "one row is changed by a mutation that depends on its version",
        sides: [Side::settings("mutate = \"optimistic\""), Side::settings("mutate = \"pessimistic\"")],
        operations: 1_000,
        workload: |trial| Box::pin(dependent_mutations(trial)),
        ..CONTENDED
    },
    HotspotCase {
        hotspot: "cache invalidation churn",
        operation: "one of 100 rows is read, or in 1 of 10 cases written",
        operations: 20_000,
        workload: |trial| Box::pin(reads(trial, ROWS, Some(WRITE_EVERY))),
        ..CASE
    },
];

fn create(id: u64) -> Request {
    request("product.create", vec![], json!({"id": id, "name": "a name"}))
}

fn add_view(id: u64) -> Request {
    request("product.mutate", key(id), json!({"increment": {"views": 1}}))
}

/// Reads rows, with the consistency of the side, and writes one of so many times.
async fn reads(trial: Trial, rows: u64, write_every: Option<u64>) -> Result<CaseFigures> {
    trial.fill((0..rows).map(create)).await?;
    trial.house.house.start_followers();
    SystemClock.sleep(FOLLOWING).await;
    let consistency = if trial.side.level == 1 { "cached" } else { "strong" };
    trial
        .measure_calls(move |number| match write_every {
            Some(every) if number % every == 0 => add_view(number / every % rows),
            _ => request("product.read", key(number % rows), json!({"consistency": consistency})),
        })
        .await
}

async fn counts_beside_edits(trial: Trial) -> Result<CaseFigures> {
    trial.fill([create(0)]).await?;
    trial
        .measure_each(|house, number| async move {
            if number % 16 == 0 {
                return edit(&house, number).await;
            }
            insist(&house, &add_view(0)).await.map(|_| ())
        })
        .await
}

/// Reads the row and changes it at the version that was read, again and again until no other write came between.
async fn edit(house: &Tenancy, number: u64) -> Result<()> {
    loop {
        let seen = house.call("product.read", key(0), Json::Null).await?;
        let change = request("product.patch", key(0), json!({"name": number.to_string()}));
        let expected = seen.version.map(Expected::Version);
        match house.send(Request { expected, ..change }).await {
            Ok(_) => return Ok(()),
            Err(refusal) if matches!(refusal.code, Code::VersionConflict | Code::Contended) => {}
            Err(refusal) => return Err(refusal.into()),
        }
    }
}

async fn dependent_mutations(trial: Trial) -> Result<CaseFigures> {
    trial.fill([create(0)]).await?;
    let mutate = |number: u64| {
        let input = json!({"increment": {"views": 1}, "set": {"name": number.to_string()}});
        request("product.mutate", key(0), input)
    };
    trial.measure_calls(mutate).await
}
