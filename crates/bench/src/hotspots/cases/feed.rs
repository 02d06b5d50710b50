//! Hotspots of `feed`: authors with many followers, readers of many authors, and old posts.

use std::time::Duration;

use anyhow::Result;
use serde_json::json;
use statehouse::Request;
use statehouse_store::{Clock as _, SystemClock, Value};

use super::super::case::{CaseFigures, Compares, HotspotCase, Side, Trial, int};
use crate::site::request;

const BLUEPRINT: &str = "
[entity.post]
key    = { post_id = \"int\" }
fields = { author_id = \"int\", created_at = \"time\", body = \"text\" }
[relation.follow]
from = { follower_id = \"int\" }
to   = { followed_id = \"int\" }
[feed.home]
posts   = \"post\"
follows = \"follow\"
SETTINGS
";
const DAY: Duration = Duration::from_secs(24 * 3_600);

const CASE: HotspotCase = HotspotCase {
    archetype: "feed",
    hotspot: "",
    operation: "a post of an author with 300 followers is projected",
    compares: Compares::Switch,
    blueprint: BLUEPRINT,
    sides: [Side::settings("pull_above = 10000"), Side::settings("pull_above = 100")],
    operations: 100,
    callers: 16,
    workload: |trial| Box::pin(fan_out(trial, HotspotSquare { authors: 1, followers: 300 })),
};

pub(super) const CASES: &[HotspotCase] = &[
    HotspotCase { hotspot: "fanout on write", ..CASE },
    HotspotCase {
        hotspot: "projection lag",
        operation: "a post of one of 50 authors with 10 followers is projected",
        sides: [Side::partitions("partitions=1", 1), Side::partitions("partitions=16", 16)],
        operations: 1_000,
        workload: |trial| Box::pin(fan_out(trial, HotspotSquare { authors: 50, followers: 10 })),
        ..CASE
    },
    HotspotCase {
        hotspot: "expensive ranking/recompute",
        operation: "a page of 20 posts is read, of a feed with so many",
        compares: Compares::Load,
        sides: [Side::level("50 posts", 50), Side::level("1,000 posts", 1_000)],
        operations: 2_000,
        workload: |trial| {
            let posts = trial.side.level;
            Box::pin(pages(trial, HotspotSquare { authors: 5, followers: 1 }, posts))
        },
        ..CASE
    },
    HotspotCase {
        hotspot: "query fanout across shards",
        operation: "a page of 20 posts is read by a follower of 20 authors",
        sides: [Side::settings("pull_above = 2"), Side::settings("pull_above = 10000")],
        operations: 1_000,
        workload: |trial| Box::pin(pages(trial, HotspotSquare { authors: 20, followers: 5 }, 100)),
        ..CASE
    },
    HotspotCase {
        hotspot: "rebuild cost",
        operation: "a post is taken into account by a build; 9 of 10 posts are 60 days old",
        sides: [Side::settings("keep = \"3650d\""), Side::settings("keep = \"30d\"")],
        operations: 1_000,
        workload: |trial| Box::pin(build(trial, HotspotSquare { authors: 50, followers: 10 })),
        ..CASE
    },
];

/// Who follows whom: each author has this many followers, reader 0 among them.
#[derive(Clone, Copy)]
struct HotspotSquare {
    authors: u64,
    followers: u64,
}

impl HotspotSquare {
    async fn follow(self, trial: &Trial) -> Result<()> {
        let edges =
            (0..self.authors).flat_map(|author| (0..self.followers).map(move |reader| (reader, author)));
        trial
            .fill(
                edges
                    .map(|(reader, author)| request("follow.add", vec![int(reader), int(author)], json!({}))),
            )
            .await
    }

    /// Posts, each a second older than the one before; those that `is_old` names are two months older.
    async fn post(self, trial: &Trial, posts: u64, is_old: fn(u64) -> bool) -> Result<()> {
        let now = SystemClock.now();
        let post = |number: u64| -> Request {
            let age = Duration::from_secs(number) + if is_old(number) { DAY * 60 } else { Duration::ZERO };
            let at = Value::Time(now.minus(age)).to_json();
            let author = number % self.authors;
            request(
                "post.create",
                vec![],
                json!({"post_id": number, "author_id": author, "created_at": at, "body": "a few words"}),
            )
        };
        trial.fill((0..posts).map(post)).await
    }
}

/// Posts wait in the log until the workers start.
async fn fan_out(trial: Trial, square: HotspotSquare) -> Result<CaseFigures> {
    square.follow(&trial).await?;
    trial.project().await?;
    square.post(&trial, trial.operations, |_| false).await?;
    trial.measure_projection(trial.operations).await
}

/// Reader 0 reads the first page.
async fn pages(trial: Trial, square: HotspotSquare, posts: u64) -> Result<CaseFigures> {
    square.follow(&trial).await?;
    square.post(&trial, trial.scaled(posts), |_| false).await?;
    trial.project().await?;
    trial.measure_calls(|_| request("home.list", vec![], json!({"viewer_id": 0, "limit": 20}))).await
}

/// The first build of the feed, of which most posts may be too old.
async fn build(trial: Trial, square: HotspotSquare) -> Result<CaseFigures> {
    square.follow(&trial).await?;
    square.post(&trial, trial.operations, |number| number % 10 != 0).await?;
    trial.measure_projection(trial.operations).await
}
