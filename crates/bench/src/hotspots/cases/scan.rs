//! Hotspots of `scan`: workers that share the rows of a table, and steps that each process a part of them.

use std::time::Duration;

use anyhow::{Context as _, Result};
use serde_json::{Value as Json, json};
use statehouse::{Operation, Request};
use statehouse_store::{Clock as _, SystemClock, Value};

use super::super::case::{CaseFigures, Compares, HotspotCase, Side, Trial, key};
use crate::site::{Tenancy, request};

const CASE: HotspotCase = HotspotCase {
    archetype: "scan",
    hotspot: "",
    operation: "a row is counted by one of 8 workers",
    compares: Compares::Switch,
    blueprint: "[entity.item]\nkey = { id = \"int\" }\nfields = { n = { type = \"int\", default = 0 } }\n\
                [scan.sweep]\nof = \"item\"\nlease = \"1h\"\nSETTINGS\n",
    sides: [Side::settings("ranges = 1"), Side::settings("ranges = 16")],
    operations: 2_000,
    callers: 8,
    workload: |trial| Box::pin(sweep(trial, 50, false)),
};

pub(super) const CASES: &[HotspotCase] = &[
    HotspotCase { hotspot: "frontier contention", ..CASE },
    HotspotCase {
        hotspot: "skewed range claims",
        operation: "a row is counted by one of 8 workers, from one range",
        sides: [
            Side { settings: "ranges = 1", ..Side::level("as it is", 0) },
            Side { settings: "ranges = 1", ..Side::level("split", 1) },
        ],
        workload: |trial| {
            let splits = trial.side.level == 1;
            Box::pin(sweep(trial, 50, splits))
        },
        ..CASE
    },
    HotspotCase {
        hotspot: "checkpoint lag",
        operation: "a row is counted, in steps of so many",
        sides: [
            Side { settings: "ranges = 16", ..Side::level("5", 5) },
            Side { settings: "ranges = 16", ..Side::level("80", 80) },
        ],
        workload: |trial| {
            let limit = trial.side.level;
            Box::pin(sweep(trial, limit, false))
        },
        ..CASE
    },
    HotspotCase {
        hotspot: "bursty batch materialization",
        operation: "a scan of 2,000 rows is started",
        sides: [Side::settings("ranges = 64"), Side::settings("ranges = 4")],
        operations: 50,
        callers: 1,
        workload: |trial| Box::pin(start(trial)),
        ..CASE
    },
];

async fn fill(trial: &Trial, rows: u64) -> Result<()> {
    trial.fill((0..rows).map(|id| request("item.create", Vec::new(), json!({"id": id})))).await
}

fn start_of(run: &str) -> Request {
    request("sweep.start", Vec::new(), json!({"run_id": run}))
}

async fn start(trial: Trial) -> Result<CaseFigures> {
    fill(&trial, trial.scaled(2_000)).await?;
    trial.measure_calls(|number| start_of(&number.to_string())).await
}

/// All rows are counted once, by workers that advance over so many at a time.
async fn sweep(trial: Trial, limit: u64, splits: bool) -> Result<CaseFigures> {
    fill(&trial, trial.operations).await?;
    trial.house.send(start_of("a")).await?;
    let (house, callers) = (trial.house.clone(), trial.callers);
    let workers = async move {
        let workers = (0..callers).map(|number| {
            let house = house.clone();
            tokio::spawn(async move { work(&house, number, limit, splits).await })
        });
        for worker in workers.collect::<Vec<_>>() {
            worker.await??;
        }
        Ok(())
    };
    trial.measure(trial.operations, workers).await
}

async fn work(house: &Tenancy, number: u64, limit: u64, splits: bool) -> Result<()> {
    loop {
        let claim = json!({"run_id": "a", "holder": format!("worker {number}")});
        let Ok(claimed) = house.send(request("sweep_range.claim", Vec::new(), claim)).await else {
            let scan = house.call("sweep.read", vec!["a".into()], json!({})).await?.body;
            if !splits || scan.get("state").and_then(Json::as_str) == Some("DONE") {
                return Ok(());
            }
            SystemClock.sleep(LOOK_EVERY).await;
            continue;
        };
        let mut range = SweptRange::of(&claimed.body)?;
        if splits {
            range.split(house, limit).await?;
        }
        while !range.advance(house, limit).await? {}
    }
}

/// The pause of a worker that has found no range.
const LOOK_EVERY: Duration = Duration::from_millis(1);

struct SweptRange {
    key: Vec<Value>,
    epoch: i64,
}

impl SweptRange {
    fn of(row: &Json) -> Result<SweptRange> {
        let int = |name: &str| row.get(name).and_then(Json::as_i64).with_context(|| format!("no {name}"));
        Ok(SweptRange { key: vec!["a".into(), int("range_no")?.into()], epoch: int("epoch")? })
    }

    async fn page(&self, house: &Tenancy, limit: u64) -> Result<Json> {
        Ok(house.call("sweep_range.rows", self.key.clone(), json!({"limit": limit})).await?.body)
    }

    /// Gives half of a range that does not fit into one step to another worker.
    async fn split(&mut self, house: &Tenancy, limit: u64) -> Result<()> {
        if self.page(house, limit).await?.get("end").and_then(Json::as_bool) == Some(true) {
            return Ok(());
        }
        let split = request("sweep_range.split", self.key.clone(), json!({"epoch": self.epoch}));
        if let Ok(split) = house.send(split).await {
            *self = SweptRange::of(&split.body)?;
        }
        Ok(())
    }

    /// Processes a page of a range; returns whether the range is finished.
    async fn advance(&self, house: &Tenancy, limit: u64) -> Result<bool> {
        let page = self.page(house, limit).await?;
        let part = |name: &str| page.get(name).cloned().unwrap_or_default();
        let rows = page.get("rows").and_then(Json::as_array).map_or(&[][..], Vec::as_slice);
        let (epoch, cursor) = (self.epoch, part("cursor"));
        if rows.is_empty() {
            let finish = json!({"epoch": epoch, "cursor": cursor});
            house.call("sweep_range.finish", self.key.clone(), finish).await?;
            return Ok(true);
        }
        let count = |row: &Json| {
            let id = row.get("id").and_then(Json::as_u64).unwrap_or(0);
            request("item.mutate", key(id), json!({"increment": {"n": 1}}))
        };
        let step = json!({"epoch": epoch, "cursor": cursor, "next": part("next"), "rows": rows.len()});
        let advance = request("sweep_range.advance", self.key.clone(), step);
        let batch = rows.iter().map(count).chain([advance]).collect();
        house.house.batch(house.tenant(), batch, Operation::default()).await?;
        Ok(false)
    }
}
