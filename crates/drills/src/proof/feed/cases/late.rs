//! A process dies with a plan under way. Others go on, in other partitions of the log; then it arrives. Whatever it was, the
//! feed is what posts and follows say. And what a process does that is slow in other ways: with rows that were not read at
//! one moment, or with a clock that is ahead.

use std::sync::atomic::{AtomicI64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use async_trait::async_trait;
use serde_json::{Value as Json, json};
use statehouse::{Expected, Request};
use statehouse_store::clock::ManualClock;
use statehouse_store::log::partition_of;
use statehouse_store::{
    Address, Clock, Commit, Consistency, Plan, Row, Store, StoreError, SystemClock, Time,
};

use super::races::{CrashAfterPlans, SinglePartitionWriter, batch};
use super::{FeedFixture, PendingEvent, blueprint};
use crate::harness::engines::TestNamespace;
use crate::harness::proxy::{Interceptor, Paused, StoreProxy};
use crate::harness::recorder::{Actor, WORKER, on_behalf, unattributed};
use crate::harness::store_client::same;
use crate::harness::tenant_client::TenantClient;

/// How far a post has got.
const WORK: &str = "user_feed_work";
/// What readers have.
const ROWS: &str = "user_feed";
/// What is known of posts.
const ENTRIES: &str = "user_feed_entries";
/// An author without followers.
const UNHEARD: i64 = 99;
/// More followers than one plan brings a post to.
const MANY: i64 = 46;

/// A process that lives, and how others over the same store die.
struct FeedCluster {
    store: Arc<dyn Store>,
    home: FeedFixture,
    text: String,
    /// Posts that only lead a batch to its partition.
    next: AtomicI64,
}

impl FeedCluster {
    async fn open(namespace: &dyn TestNamespace, pull_above: usize) -> Result<FeedCluster> {
        let (store, text) = (namespace.open().await?, blueprint(pull_above, "30d"));
        let home = FeedFixture::with(store.clone(), &text, Arc::new(SystemClock)).await?;
        Ok(FeedCluster { store, home, text, next: AtomicI64::new(1_000) })
    }

    async fn process<H: Interceptor + 'static>(&self, interceptor: H) -> Result<FeedFixture> {
        let store = Arc::new(StoreProxy::new(self.store.clone(), interceptor));
        FeedFixture::with(store, &self.text, Arc::new(SystemClock)).await
    }

    /// The partition of a post's own records.
    fn shard(&self, post: i64) -> u32 {
        let tenant = &self.home.client().tenant;
        partition_of(tenant, "post", &post.to_string(), self.store.partitions())
    }

    /// The partition in which something lies ahead.
    async fn ahead(&self) -> Result<u32> {
        let group = self.home.fixture.projection()?.group(self.home.fixture.live().await?);
        let ahead = group.status().await?.into_iter().find(|one| one.records > 0);
        Ok(ahead.context("nothing lies ahead")?.partition)
    }

    /// Does something in a batch whose record is not in this partition, and says in which one it is. A batch stands under
    /// its first row. Where there is one partition only, the progress of the group keeps the two apart as well.
    async fn elsewhere(&self, shard: u32, request: Request) -> Result<u32> {
        let is_elsewhere = |post: i64| self.shard(post) != shard || self.store.partitions() == 1;
        let post = loop {
            let post = self.next.fetch_add(1, Ordering::SeqCst);
            if is_elsewhere(post) {
                break post;
            }
        };
        let at = self.home.at(post.unsigned_abs());
        let input = json!({"post_id": post, "author_id": UNHEARD, "created_at": at});
        let former = self.process(SinglePartitionWriter).await?;
        batch(&former, vec![TenantClient::request("post.create", &[], &input, None), request]).await?;
        Ok(self.shard(post))
    }

    /// The same, and it is projected.
    async fn settled(&self, shard: u32, request: Request) -> Result<()> {
        let other = self.elsewhere(shard, request).await?;
        self.home.fixture.step("home", other, 9).await?;
        Ok(())
    }

    /// A process gets so many plans of a partition through that write this table. The next one is under way when it dies.
    async fn dies(&self, shard: u32, table: &'static str, plans: usize) -> Result<Plan> {
        let doomed = CrashAfterPlans::after(plans, table);
        let process = self.process(doomed.clone()).await?;
        // It may have done something before it died.
        let _ = process.fixture.step("home", shard, 9).await;
        doomed.under_way().context("nothing was under way")
    }

    /// What was under way arrives.
    async fn arrives(&self, late: &Plan) -> Result<()> {
        arrive(&self.store, late).await?;
        self.home.fixture.drain().await?;
        self.home.is_true().await
    }
}

async fn arrive(store: &Arc<dyn Store>, late: &Plan) -> Result<Commit, StoreError> {
    let actor = Actor { archetype: "feed", name: format!("{WORKER}home.project") };
    on_behalf(store, actor).commit(late).await
}

fn patch(post: i64, input: &Json) -> Request {
    TenantClient::request("post.patch", &[post.into()], input, Some(Expected::Any))
}

fn delete(post: i64) -> Request {
    TenantClient::request("post.delete", &[post.into()], &json!({}), Some(Expected::Any))
}

fn edge(action: &str, viewer: i64, author: i64) -> Request {
    TenantClient::request(action, &[viewer.into(), author.into()], &json!({}), None)
}

pub(super) async fn a_version_that_arrives_late_changes_nothing(namespace: &dyn TestNamespace) -> Result<()> {
    let cluster = FeedCluster::open(namespace, 100).await?;
    cluster.home.follow(1, 10).await?;
    cluster.home.fixture.drain().await?;
    // The first version of a post after the second, and then the third after the fourth.
    cluster.home.post(1, 10, "first").await?;
    for newer in ["second", "fourth"] {
        let late = cluster.dies(cluster.shard(1), ENTRIES, 0).await?;
        cluster.settled(cluster.shard(1), patch(1, &json!({"body": newer}))).await?;
        cluster.arrives(&late).await?;
        cluster.home.edit(1, json!({"body": "third"})).await?;
    }
    cluster.home.equals_a_rebuild().await
}

pub(super) async fn the_first_follower_misses_no_post_that_is_under_way(
    namespace: &dyn TestNamespace,
) -> Result<()> {
    let cluster = FeedCluster::open(namespace, 100).await?;
    cluster.home.fixture.drain().await?;
    // When its followers were listed there were none, nor had there ever been one.
    cluster.home.post(1, 10, "new").await?;
    let late = cluster.dies(cluster.shard(1), ENTRIES, 0).await?;
    cluster.settled(cluster.shard(1), edge("follow.add", 1, 10)).await?;
    cluster.arrives(&late).await?;
    cluster.home.equals_a_rebuild().await
}

pub(super) async fn a_follow_that_arrives_late_brings_nothing_back(
    namespace: &dyn TestNamespace,
) -> Result<()> {
    let cluster = FeedCluster::open(namespace, 100).await?;
    cluster.home.post(1, 10, "old").await?;
    cluster.home.fixture.drain().await?;
    // The reader follows no more; or the post says something else; or it is gone.
    let afterwards = [edge("follow.remove", 1, 10), patch(1, &json!({"body": "edited"})), delete(1)];
    for (viewer, request) in (1..).zip(afterwards) {
        cluster.home.follow(viewer, 10).await?;
        let shard = cluster.ahead().await?;
        let late = cluster.dies(shard, ROWS, 0).await?;
        cluster.settled(shard, request).await?;
        cluster.arrives(&late).await?;
    }
    cluster.home.equals_a_rebuild().await
}

pub(super) async fn what_a_late_unfollow_takes_is_not_anothers(namespace: &dyn TestNamespace) -> Result<()> {
    let cluster = FeedCluster::open(namespace, 100).await?;
    for author in [10, 20] {
        cluster.home.follow(1, author).await?;
    }
    cluster.home.post(1, 10, "somebody's").await?;
    cluster.home.fixture.drain().await?;
    // The post goes to another author, and no worker has taken it from its readers yet when one of them leaves the first.
    cluster.home.edit(1, json!({"author_id": 20})).await?;
    cluster.dies(cluster.shard(1), WORK, 1).await?;
    let other = cluster.elsewhere(cluster.shard(1), edge("follow.remove", 1, 10)).await?;
    let late = cluster.dies(other, ROWS, 0).await?;
    // It comes to the same reader, at the same place, from the other author.
    cluster.home.fixture.step("home", cluster.shard(1), 9).await?;
    cluster.arrives(&late).await?;
    same("how much is shown", &cluster.home.feed(1, 9).await?.len(), &1)?;
    cluster.home.equals_a_rebuild().await
}

pub(super) async fn what_came_back_is_not_taken_for_what_was_left(
    namespace: &dyn TestNamespace,
) -> Result<()> {
    let cluster = FeedCluster::open(namespace, 100).await?;
    let (home, shard) = (&cluster.home, cluster.shard(1));
    home.follow(1, 10).await?;
    home.post(1, 10, "here").await?;
    home.fixture.drain().await?;
    // The reader goes and comes back, and gets the post by an edit.
    cluster.settled(shard, edge("follow.remove", 1, 10)).await?;
    let back = cluster.elsewhere(shard, edge("follow.add", 1, 10)).await?;
    home.edit(1, json!({"body": "edited"})).await?;
    home.fixture.step("home", shard, 9).await?;
    // It leaves for another author, but not yet this reader, for whom it is then something that was left.
    home.edit(1, json!({"author_id": 20})).await?;
    cluster.dies(shard, WORK, 1).await?;
    let late = cluster.dies(back, ROWS, 0).await?;
    home.edit(1, json!({"author_id": 10})).await?;
    home.fixture.step("home", shard, 9).await?;
    cluster.arrives(&late).await?;
    same("how much is shown", &home.feed(1, 9).await?.len(), &1)?;
    home.equals_a_rebuild().await
}

/// A post of 10, whom 1 and 2 follow; 1 follows 20 as well. It goes to 20, which makes three plans: one that begins, one that
/// takes it from the readers of 10, one that brings it to those of 20.
async fn moves(cluster: &FeedCluster, post: i64) -> Result<()> {
    for (viewer, author) in [(1, 10), (2, 10), (1, 20)] {
        cluster.home.follow(viewer, author).await?;
    }
    cluster.home.post(post, 10, "moving").await?;
    cluster.home.fixture.drain().await?;
    cluster.home.edit(post, json!({"author_id": 20})).await
}

pub(super) async fn a_piece_that_arrives_after_the_last_one_changes_nothing(
    namespace: &dyn TestNamespace,
) -> Result<()> {
    let cluster = FeedCluster::open(namespace, 100).await?;
    for (post, plans, request) in [(1, 1, patch(1, &json!({"body": "edited"}))), (2, 2, delete(2))] {
        moves(&cluster, post).await?;
        let late = cluster.dies(cluster.shard(post), WORK, plans).await?;
        // The worker with a newer version finishes this one first.
        cluster.settled(cluster.shard(post), request).await?;
        cluster.arrives(&late).await?;
    }
    cluster.home.equals_a_rebuild().await
}

pub(super) async fn a_piece_of_one_version_is_none_of_the_next(namespace: &dyn TestNamespace) -> Result<()> {
    let cluster = FeedCluster::open(namespace, 100).await?;
    for (post, plans) in [(1, 1), (2, 2)] {
        moves(&cluster, post).await?;
        let late = cluster.dies(cluster.shard(post), WORK, plans).await?;
        // Another worker finishes this version, and gets just as far with the next.
        let other = cluster.elsewhere(cluster.shard(post), patch(post, &json!({"author_id": 30}))).await?;
        cluster.dies(other, WORK, 3).await?;
        cluster.arrives(&late).await?;
    }
    cluster.home.equals_a_rebuild().await
}

pub(super) async fn a_piece_that_was_passed_does_not_take_the_work_back(
    namespace: &dyn TestNamespace,
) -> Result<()> {
    let cluster = FeedCluster::open(namespace, 100).await?;
    for viewer in 1..=MANY {
        cluster.home.follow(viewer, 20).await?;
    }
    moves(&cluster, 1).await?;
    // What takes the post from the readers of 10 arrives when it has been brought to the first readers of 20, one of whom
    // follows both, and a worker has prepared the plan that brings it to the last.
    let late = cluster.dies(cluster.shard(1), WORK, 1).await?;
    let (paused, store) = (Arc::new(Paused::default()), cluster.store.clone());
    let slow = cluster.process(paused.clone()).await?;
    paused.before(WORK, 3, async move {
        let _ = arrive(&store, &late).await;
    });
    slow.fixture.step("home", cluster.shard(1), 9).await?;
    ensure!(paused.is_over(), "nothing came between");
    cluster.home.fixture.drain().await?;
    cluster.home.is_true().await?;
    cluster.home.equals_a_rebuild().await
}

/// Reads how far a post has got, lets something happen, and then reads what is known of it: a `get` is not one moment.
#[derive(Default)]
struct TornRead(Mutex<Option<PendingEvent>>);

impl std::fmt::Debug for TornRead {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Torn")
    }
}

impl TornRead {
    fn is_over(&self) -> bool {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).is_none()
    }
}

#[async_trait]
impl Interceptor for Arc<TornRead> {
    async fn get(
        &self,
        inner: &Arc<dyn Store>,
        addresses: &[Address],
        consistency: Consistency,
    ) -> Result<Vec<Option<Row>>, StoreError> {
        let early = addresses.iter().position(|address| address.table().name() == WORK);
        let event = early.and_then(|_| self.0.lock().unwrap_or_else(PoisonError::into_inner).take());
        let mut rows = inner.get(addresses, consistency).await?;
        if let (Some(early), Some(event)) = (early, event) {
            unattributed(event).await.map_err(|error| StoreError::unavailable(format!("{error:#}")))?;
            let late = inner.get(addresses, consistency).await?;
            for (index, (row, late)) in rows.iter_mut().zip(late).enumerate() {
                if index != early {
                    *row = late;
                }
            }
        }
        Ok(rows)
    }
}

pub(super) async fn work_that_was_not_seen_is_finished_first(namespace: &dyn TestNamespace) -> Result<()> {
    let cluster = Arc::new(FeedCluster::open(namespace, 100).await?);
    // The version behind it makes work of its own, or goes out in one plan.
    for (post, next) in [(1, patch(1, &json!({"author_id": 30}))), (2, delete(2))] {
        for viewer in 1..=2 {
            cluster.home.follow(viewer, 10).await?;
        }
        cluster.home.post(post, 10, "moving").await?;
        cluster.home.fixture.drain().await?;
        let shard = cluster.shard(post);
        let other = cluster.elsewhere(shard, patch(post, &json!({"author_id": 20}))).await?;
        batch(&cluster.home, vec![next]).await?;
        let torn = Arc::new(TornRead::default());
        let slow = cluster.process(torn.clone()).await?;
        let begun = {
            let cluster = cluster.clone();
            async move { cluster.dies(other, WORK, 1).await.map(drop) }
        };
        *torn.0.lock().unwrap_or_else(PoisonError::into_inner) = Some(Box::pin(begun));
        slow.fixture.step("home", shard, 9).await?;
        ensure!(torn.is_over(), "nothing came between");
        cluster.home.fixture.drain().await?;
        cluster.home.is_true().await?;
    }
    cluster.home.equals_a_rebuild().await
}

pub(super) async fn readers_are_told_by_the_first_worker(namespace: &dyn TestNamespace) -> Result<()> {
    let cluster = FeedCluster::open(namespace, 1).await?;
    for viewer in 1..=2 {
        cluster.home.follow(viewer, 10).await?;
    }
    cluster.home.fixture.drain().await?;
    // Two posts are the first of their author that are pulled.
    cluster.home.post(1, 10, "pulled").await?;
    let late = cluster.dies(cluster.shard(1), WORK, 0).await?;
    let at = cluster.home.at(2);
    let input = json!({"post_id": 2, "author_id": 10, "created_at": at, "body": "pulled"});
    cluster.settled(cluster.shard(1), TenantClient::request("post.create", &[], &input, None)).await?;
    cluster.arrives(&late).await?;
    let told: Vec<i64> = cluster.home.rows("user_feed_pulled").await?.iter().map(Row::version).collect();
    same("how often each reader was told", &told, &vec![1, 1])?;
    cluster.home.equals_a_rebuild().await
}

pub(super) async fn a_sweeper_whose_clock_is_ahead_takes_nothing_away(
    namespace: &dyn TestNamespace,
) -> Result<()> {
    let clock = Arc::new(ManualClock::at(Time::from_millis(1_800_000_000_000)));
    let (store, text) = (namespace.open_at(clock.clone()).await?, blueprint(1, "2h"));
    let home = FeedFixture::with(store.clone(), &text, clock.clone()).await?;
    for (viewer, author) in [(1, 10), (1, 20), (2, 20)] {
        home.follow(viewer, author).await?;
    }
    // One post is pushed, the other one pulled.
    for (post, author) in [(1, 10), (2, 20)] {
        home.post(post, author, "an hour old").await?;
    }
    home.fixture.drain().await?;
    let ahead = Arc::new(ManualClock::at(clock.now().plus(Duration::from_secs(3 * 3_600))));
    let hasty = FeedFixture::with(store, &text, ahead).await?;
    for _ in 0..4 {
        hasty.fixture.step_of("home.sweep", 0, 50).await?;
    }
    home.is_true().await
}
