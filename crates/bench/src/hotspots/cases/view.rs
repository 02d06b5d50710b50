//! Hotspots of `view`, and of `projection`, on which views stand: groups that get all rows, many groups, and rebuilds.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use anyhow::{Context as _, Result};
use serde_json::json;
use statehouse::Request;
use statehouse::worker::WorkerOptions;

use super::super::case::{CaseFigures, Compares, HotspotCase, Side, Trial, key};
use crate::site::request;

const BLUEPRINT: &str = "
[entity.item]
key    = { id = \"int\" }
fields = { team = \"int\", points = \"int\" }
[view.teams]
of       = \"item\"
group_by = [\"team\"]
count    = true
SETTINGS
";
/// Groups, where there are many.
const GROUPS: u64 = 500;
/// Rows that are counted while reads are measured.
const COUNTED: u64 = 1_000;

const CASE: HotspotCase = HotspotCase {
    archetype: "view",
    hotspot: "",
    operation: "a row that waits in the log is counted",
    compares: Compares::Load,
    blueprint: BLUEPRINT,
    sides: [Side::level("500 groups", GROUPS), Side::level("1 group", 1)],
    operations: 3_000,
    callers: 16,
    workload: |trial| {
        let groups = trial.side.level;
        Box::pin(count(trial, groups, 1))
    },
};

pub(super) const CASES: &[HotspotCase] = &[
    HotspotCase { hotspot: "fanout on write", ..CASE },
    HotspotCase {
        hotspot: "projection lag",
        operation: "a row of one of 500 groups is counted",
        compares: Compares::Switch,
        sides: [Side::level("one in each plan", 1), Side::level("40 in each batch", 40)],
        workload: |trial| {
            let in_plan = trial.side.level;
            Box::pin(count(trial, GROUPS, in_plan))
        },
        ..CASE
    },
    HotspotCase {
        hotspot: "expensive ranking/recompute",
        operation: "a group with its greatest value is read, of so many rows",
        blueprint: EXTREMES,
        sides: [Side::level("100 rows", 100), Side::level("4,000 rows", 4_000)],
        workload: |trial| {
            let rows = trial.side.level;
            Box::pin(reads(trial, rows, 1))
        },
        ..CASE
    },
    HotspotCase {
        hotspot: "query fanout across shards",
        operation: "a group of a view with these settings is read",
        sides: [
            Side::settings("").named("count"),
            Side::settings("min = [\"points\"]\nmax = [\"points\"]\nlatest = \"updated_at\"")
                .named("count, min, max, latest"),
        ],
        workload: |trial| Box::pin(reads(trial, COUNTED, 1)),
        ..CASE
    },
    HotspotCase {
        hotspot: "rebuild cost",
        operation: "a row is taken into account by a build, of so many",
        sides: [Side::level("2,000 rows", 1), Side::level("8,000 rows", 4)],
        operations: 2_000,
        workload: |trial| {
            let times = trial.side.level;
            Box::pin(build(trial.with_times_operations(times)))
        },
        ..CASE
    },
];

const EXTREMES: &str = "
[entity.item]
key    = { id = \"int\" }
fields = { team = \"int\", points = \"int\" }
[view.teams]
of       = \"item\"
group_by = [\"team\"]
max      = [\"points\"]
SETTINGS
";

pub(super) const PROJECTION_CASES: &[HotspotCase] = &[
    HotspotCase {
        archetype: "projection",
        hotspot: "projector lag",
        operation: "a row that waits in the log is counted",
        compares: Compares::Switch,
        sides: [Side::partitions("partitions=1", 1), Side::partitions("partitions=16", 16)],
        workload: |trial| Box::pin(count(trial, GROUPS, 1)),
        ..CASE
    },
    HotspotCase {
        archetype: "projection",
        hotspot: "rebuild cost",
        operation: "a group is read, while the projection is rebuilt or not",
        sides: [Side::level("no rebuild", 0), Side::level("rebuilt all the time", 1)],
        operations: 6_000,
        workload: |trial| Box::pin(reads_beside_rebuilds(trial)),
        ..CASE
    },
    HotspotCase {
        archetype: "projection",
        hotspot: "hot search/index shards",
        operation: "a row of one of so many groups is counted, 16 partitions at once",
        sides: [
            Side { partitions: Some(16), ..Side::level("500 groups", GROUPS) },
            Side { partitions: Some(16), ..Side::level("1 group", 1) },
        ],
        ..CASE
    },
    HotspotCase {
        archetype: "projection",
        hotspot: "broad query fanout",
        operation: "a page of 20 groups is listed, with so many generations kept",
        sides: [Side::level("1 generation", 1), Side::level("2 generations", 2)],
        operations: 2_000,
        workload: |trial| Box::pin(pages_of_generations(trial)),
        ..CASE
    },
];

fn create(id: u64, groups: u64) -> Request {
    request("item.create", vec![], json!({"id": id, "team": id % groups, "points": id}))
}

/// Writes rows of so many groups, so many as one plan.
async fn write(trial: &Trial, rows: u64, groups: u64, in_plan: u64) -> Result<()> {
    let plan = |first: u64| (first..rows.min(first + in_plan)).map(|id| create(id, groups)).collect();
    let plans: Vec<Vec<Request>> = (0..rows).step_by(usize::try_from(in_plan)?).map(plan).collect();
    trial.observer.fill(plans).await
}

/// Rows wait in the log until the workers start.
async fn count(trial: Trial, groups: u64, in_plan: u64) -> Result<CaseFigures> {
    trial.project().await?;
    write(&trial, trial.operations, groups, in_plan).await?;
    trial.measure_projection(trial.operations).await
}

/// Reads of one group, of so many rows in so many groups.
async fn reads(trial: Trial, rows: u64, groups: u64) -> Result<CaseFigures> {
    write(&trial, trial.scaled(rows), groups, 40).await?;
    trial.project().await?;
    trial.measure_calls(|_| request("teams.read", key(0), json!({}))).await
}

/// The first build of the view.
async fn build(trial: Trial) -> Result<CaseFigures> {
    write(&trial, trial.operations, GROUPS, 40).await?;
    trial.measure_projection(trial.operations).await
}

/// Reads of one group, while the side may rebuild the view again and again.
async fn reads_beside_rebuilds(trial: Trial) -> Result<CaseFigures> {
    write(&trial, trial.scaled(COUNTED), GROUPS, 40).await?;
    trial.project().await?;
    let over = Arc::new(AtomicBool::new(false));
    let rebuilding = (trial.side.level == 1).then(|| {
        let (house, over) = (trial.observer.house.clone(), over.clone());
        house.start_workers(WorkerOptions::default());
        tokio::spawn(async move {
            let projection = house.projections().into_iter().next().context("there is no view")?;
            while !over.load(Ordering::Relaxed) {
                if !projection.rebuild().await? {
                    tokio::task::yield_now().await;
                }
            }
            anyhow::Ok(house)
        })
    });
    let figures = trial.measure_calls(|_| request("teams.read", key(0), json!({}))).await?;
    over.store(true, Ordering::Relaxed);
    if let Some(rebuilding) = rebuilding {
        rebuilding.await??.stop_workers().await;
    }
    Ok(figures)
}

/// Pages of groups, with one generation or with that before it kept as well.
async fn pages_of_generations(trial: Trial) -> Result<CaseFigures> {
    write(&trial, trial.scaled(COUNTED), GROUPS, 40).await?;
    trial.project().await?;
    for _ in 1..trial.side.level {
        let projection = trial.observer.house.projections().into_iter().next().context("there is no view")?;
        let before = projection.state().await?.live;
        projection.rebuild().await?;
        trial.house.house.start_workers(WorkerOptions::default());
        super::super::case::until(|| async { Ok(projection.state().await?.live != before) }).await?;
        trial.house.house.stop_workers().await;
    }
    trial.measure_calls(|_| request("teams.list", vec![], json!({"limit": 20}))).await
}
