//! Hotspots of `thread`: one parent with very many children, or very many readers.

use anyhow::{Context as _, Result};
use serde_json::json;
use statehouse::Request;

use super::super::case::{CaseFigures, Compares, HotspotCase, Side, Trial};
use crate::site::request;

const BLUEPRINT: &str = "
[thread.comment]
parent = { post_id = \"int\" }
fields = { body = \"text\" }
SETTINGS
";
/// Children of a page.
const PAGE: u64 = 20;

const CASE: HotspotCase = HotspotCase {
    archetype: "thread",
    hotspot: "",
    operation: "a child of one parent is appended",
    compares: Compares::Switch,
    blueprint: BLUEPRINT,
    sides: [Side::settings("buckets = 1"), Side::settings("buckets = 16")],
    operations: 5_000,
    callers: 64,
    workload: |trial| Box::pin(appends(trial)),
};

pub(super) const CASES: &[HotspotCase] = &[
    HotspotCase { hotspot: "hot parent append rate", ..CASE },
    HotspotCase {
        hotspot: "hot thread reads",
        operation: "the first 20 children are listed",
        sides: [Side::settings("buckets = 16"), Side::settings("buckets = 1")],
        operations: 2_000,
        workload: |trial| Box::pin(pages(trial, 200)),
        ..CASE
    },
    HotspotCase {
        hotspot: "long history scans",
        operation: "20 children are listed, this many behind the first",
        compares: Compares::Load,
        sides: [Side::level("0", 0), Side::level("2,000", 2_000)],
        operations: 1_000,
        callers: 16,
        workload: |trial| Box::pin(pages(trial, 2_100)),
        ..CASE
    },
];

fn append(number: u64) -> Request {
    request(
        "comment.append",
        vec![],
        json!({"post_id": 0, "comment_id": number.to_string(), "body": "some words"}),
    )
}

async fn appends(trial: Trial) -> Result<CaseFigures> {
    trial.measure_calls(append).await
}

/// Lists a page as far behind the first child as the side says, of so many children.
async fn pages(trial: Trial, children: u64) -> Result<CaseFigures> {
    let (children, depth) = (trial.scaled(children).max(2 * PAGE), trial.scaled(trial.side.level));
    trial.fill((0..children).map(append)).await?;
    let mut input = json!({"post_id": 0, "limit": PAGE});
    for _ in 0..depth / PAGE {
        let page = trial.observer.call("comment.list", vec![], input.clone()).await?;
        let next = page.next.context("the thread is too short")?;
        input = json!({"post_id": 0, "limit": PAGE, "cursor": next});
    }
    trial.measure_calls(move |_| request("comment.list", vec![], input.clone())).await
}
