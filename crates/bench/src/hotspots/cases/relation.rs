//! Hotspots of `relation`: one end with very many edges.

use anyhow::Result;
use serde_json::json;

use super::super::case::{CaseFigures, Compares, HotspotCase, Side, Trial, int};
use crate::site::request;

const BLUEPRINT: &str = "
[relation.follow]
from = { follower = \"int\" }
to   = { followee = \"int\" }
SETTINGS
";

const CASE: HotspotCase = HotspotCase {
    archetype: "relation",
    hotspot: "",
    operation: "an edge to one target is added",
    compares: Compares::Switch,
    blueprint: BLUEPRINT,
    sides: [Side::settings("buckets = 1"), Side::settings("buckets = 16")],
    operations: 5_000,
    callers: 64,
    workload: |trial| Box::pin(edges(trial, |number| (number, 0))),
};

pub(super) const CASES: &[HotspotCase] = &[
    HotspotCase { hotspot: "celebrity skew", ..CASE },
    HotspotCase {
        hotspot: "hot relation partition",
        operation: "an edge from one source is added",
        sides: [Side::settings("out_buckets = 1"), Side::settings("out_buckets = 16")],
        workload: |trial| Box::pin(edges(trial, |number| (0, number))),
        ..CASE
    },
    HotspotCase {
        hotspot: "hot count key",
        sides: [
            Side::settings("buckets = 16\ncount_shards = 1").named("count_shards = 1"),
            Side::settings("buckets = 16\ncount_shards = 16").named("count_shards = 16"),
        ],
        ..CASE
    },
    HotspotCase {
        hotspot: "hot relation-list pages",
        operation: "a page of 20 edges is listed",
        compares: Compares::Load,
        sides: [Side::level("200 edges", 200), Side::level("4,000 edges", 4_000)],
        operations: 2_000,
        callers: 16,
        workload: |trial| Box::pin(pages(trial)),
        ..CASE
    },
];

/// Adds edges between the ends that `ends` gives for a number.
async fn edges(trial: Trial, ends: fn(u64) -> (u64, u64)) -> Result<CaseFigures> {
    let add = move |number| {
        let (from, to) = ends(number);
        request("follow.add", vec![int(from), int(to)], json!({}))
    };
    trial.measure_calls(add).await
}

/// Lists the first page of a target with as many edges as the side says.
async fn pages(trial: Trial) -> Result<CaseFigures> {
    let edges = trial.scaled(trial.side.level);
    trial.fill((0..edges).map(|from| request("follow.add", vec![int(from), int(0)], json!({})))).await?;
    trial.measure_calls(|_| request("follow_in.list", vec![], json!({"followee": 0, "limit": 20}))).await
}
