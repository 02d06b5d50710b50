//! Processes that meet at one post, where it goes out in pieces; and what must come to an end.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use anyhow::{Result, ensure};
use async_trait::async_trait;
use serde_json::json;
use statehouse::{Expected, Operation, Request};
use statehouse_store::log::partition_of;
use statehouse_store::{Commit, Plan, Step, Store, StoreError, SystemClock};

use super::{FeedFixture, RunBefore, blueprint, meet};
use crate::harness::engines::TestNamespace;
use crate::harness::proxy::{Interceptor, StoreProxy};
use crate::harness::store_client::same;
use crate::harness::tenant_client::TenantClient;

/// A count of so many parts that a plan which demands all of them has room for few readers: posts go out in pieces.
fn crowded() -> String {
    blueprint(100, "30d").replace("count_shards = 1", "count_shards = 64")
}

/// More than fit beside the parts of such a count.
const CROWD: i64 = 34;

/// A process that dies: it lets so many plans through that write a table, and then no more. The first of those may still be
/// under way.
#[derive(Debug)]
pub(super) struct CrashAfterPlans {
    table: &'static str,
    left: AtomicUsize,
    under_way: Mutex<Option<Plan>>,
}

impl CrashAfterPlans {
    pub(super) fn after(plans: usize, table: &'static str) -> Arc<CrashAfterPlans> {
        Arc::new(CrashAfterPlans { table, left: AtomicUsize::new(plans), under_way: Mutex::default() })
    }

    /// What it had sent when it died.
    pub(super) fn under_way(&self) -> Option<Plan> {
        self.under_way.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }
}

#[async_trait]
impl Interceptor for Arc<CrashAfterPlans> {
    async fn commit(&self, inner: &Arc<dyn Store>, plan: &Plan) -> Result<Commit, StoreError> {
        let is_theirs = |step: &Step| step.writes() && step.table.name() == self.table;
        let one_less = |left: usize| left.checked_sub(1);
        if plan.steps().iter().any(is_theirs)
            && self.left.fetch_update(Ordering::SeqCst, Ordering::SeqCst, one_less).is_err()
        {
            let mut under_way = self.under_way.lock().unwrap_or_else(PoisonError::into_inner);
            under_way.get_or_insert_with(|| plan.clone());
            return Err(StoreError::unavailable("it has died"));
        }
        inner.commit(plan).await
    }
}

/// Posts so often that several wait in one partition: new ones of two authors, some of them of one.
async fn post_together(home: &FeedFixture, round: i64) -> Result<()> {
    let TenantClient { house, tenant } = home.client();
    let partitions = house.store().partitions();
    let of = |post: i64| partition_of(tenant, "post", &post.to_string(), partitions);
    let alike = (100 * round..).filter(|post| of(*post) == of(100 * round)).take(5);
    for (number, post) in (0..).zip(alike) {
        home.post(post, if number == 1 { 20 } else { 10 }, "new").await?;
    }
    Ok(())
}

/// Followers come and go between the reading for several posts and the plan that is for all of them. In the second round the
/// slow process remembers whom it brought posts to in the first.
pub(super) async fn posts_that_wait_together_and_edges_that_meet_leave_the_truth(
    namespace: &dyn TestNamespace,
) -> Result<()> {
    let few = blueprint(100, "30d");
    let first = async |home: &FeedFixture, round: i64| post_together(home, round).await;
    meet(namespace, (&few, 4), first, |home, round| async move {
        home.follow(10 + round, 10).await?;
        home.follow(10 + round, 20).await?;
        home.unfollow(round - 1, 10).await
    })
    .await
}

/// Counts plans that bring something to readers, and posts that they bring.
#[derive(Debug, Default)]
struct CountDeliveries {
    plans: AtomicUsize,
    posts: AtomicUsize,
}

#[async_trait]
impl Interceptor for Arc<CountDeliveries> {
    async fn commit(&self, inner: &Arc<dyn Store>, plan: &Plan) -> Result<Commit, StoreError> {
        let writes = |step: &&Step, table: &str| step.writes() && step.table.name() == table;
        let posts = plan.steps().iter().filter(|step| writes(step, "user_feed_entries")).count();
        if plan.steps().iter().any(|step| writes(&step, "user_feed")) {
            self.plans.fetch_add(1, Ordering::SeqCst);
            self.posts.fetch_add(posts, Ordering::SeqCst);
        }
        inner.commit(plan).await
    }
}

pub(super) async fn posts_that_wait_together_share_a_plan(namespace: &dyn TestNamespace) -> Result<()> {
    let bringing = Arc::new(CountDeliveries::default());
    let around = Arc::new(StoreProxy::new(namespace.open().await?, bringing.clone()));
    let home = FeedFixture::over(around, 100).await?;
    for (viewer, author) in [(1, 10), (2, 10), (2, 20)] {
        home.follow(viewer, author).await?;
    }
    home.fixture.drain().await?;
    post_together(&home, 1).await?;
    let live = home.fixture.live().await?;
    let ahead = home.fixture.projection()?.group(live).status().await?;
    for one in ahead.iter().filter(|one| one.records > 0) {
        home.fixture.step("home", one.partition, 9).await?;
    }
    let counted = |counter: &AtomicUsize| counter.load(Ordering::SeqCst);
    same("plans and posts", &(counted(&bringing.plans), counted(&bringing.posts)), &(1, 5))?;
    home.is_true().await?;
    // A version of a post that is known goes by itself, and those behind it wait for their turn.
    home.edit(100, json!({"body": "edited"})).await?;
    post_together(&home, 2).await?;
    home.fixture.drain().await?;
    home.is_true().await?;
    home.equals_a_rebuild().await
}

/// A process of a version that left all events of a batch in the partition of its first row. Such records are still read, and a
/// row's versions then stand in several partitions.
#[derive(Debug)]
pub(super) struct SinglePartitionWriter;

#[async_trait]
impl Interceptor for SinglePartitionWriter {
    async fn commit(&self, inner: &Arc<dyn Store>, plan: &Plan) -> Result<Commit, StoreError> {
        let mut former = plan.to_builder();
        for event in former.entry.iter_mut().flat_map(|entry| &mut entry.events) {
            event.about = None;
        }
        let former = former.build().map_err(|error| StoreError::unavailable(error.to_string()))?;
        inner.commit(&former).await
    }
}

pub(super) async fn batch(home: &FeedFixture, requests: Vec<Request>) -> Result<()> {
    let client = home.client();
    let done = client.house.batch(&client.tenant, requests, Operation::default()).await;
    Ok(done.map(drop)?)
}

pub(super) async fn first_follows_in_one_batch_come_to_an_end(namespace: &dyn TestNamespace) -> Result<()> {
    let home = FeedFixture::open(namespace, 100).await?;
    for (post, author) in [(1, 10), (2, 20), (3, 10)] {
        home.post(post, author, "before").await?;
    }
    home.fixture.drain().await?;
    let follow = |viewer: i64, author: i64| {
        TenantClient::request("follow.add", &[viewer.into(), author.into()], &json!({}), None)
    };
    batch(&home, vec![follow(1, 10), follow(2, 20)]).await?;
    for _ in 0..3 {
        home.fixture.work(9).await?;
    }
    same("whether something is left to do", &home.fixture.work(9).await?, &false)?;
    home.is_true().await?;
    home.equals_a_rebuild().await
}

pub(super) async fn pieces_and_edges_that_meet_leave_the_truth(namespace: &dyn TestNamespace) -> Result<()> {
    let first = async |home: &FeedFixture, round: i64| home.post(round, 10, "new").await.map(drop);
    meet(namespace, (&crowded(), CROWD + 4), first, |home, round| async move {
        for viewer in [round, 10 + round] {
            home.unfollow(viewer, 10).await?;
            home.follow(100 + viewer, 10).await?;
        }
        Ok(())
    })
    .await
}

pub(super) async fn versions_of_a_post_that_meet_go_out_in_their_order(
    namespace: &dyn TestNamespace,
) -> Result<()> {
    let (store, cut) = (namespace.open().await?, Arc::new(RunBefore::default()));
    let over =
        async |store: Arc<dyn Store>| FeedFixture::with(store, &crowded(), Arc::new(SystemClock)).await;
    let slow = over(Arc::new(StoreProxy::new(store.clone(), cut.clone()))).await?;
    let doomed = CrashAfterPlans::after(2, "user_feed_work");
    let doomed = over(Arc::new(StoreProxy::new(store.clone(), doomed))).await?;
    let quick = Arc::new(over(store.clone()).await?);
    let former = over(Arc::new(StoreProxy::new(store.clone(), SinglePartitionWriter))).await?;
    let (tenant, partitions) = (quick.client().tenant.clone(), store.partitions());
    let shard = |post: i64| partition_of(&tenant, "post", &post.to_string(), partitions);
    // A batch of a former version stands under its first row, so a version of the first post can be in the partition of this
    // one. Where there is one partition only, the progress of the group keeps the two apart as well.
    let beside = (2..100).find(|post| shard(*post) != shard(1)).unwrap_or(2);
    for viewer in 1..=CROWD {
        quick.follow(viewer, 10).await?;
    }
    quick.post(beside, 20, "for nobody").await?;
    quick.fixture.drain().await?;
    quick.post(1, 10, "soon gone").await?;
    // While the slow process brings the first version to its readers, another one finishes that for it, begins to take
    // the post away, and dies.
    cut.next({
        let (quick, shard) = (quick.clone(), shard(beside));
        async move {
            let any = Some(Expected::Any);
            let edit = TenantClient::request("post.patch", &[beside.into()], &json!({"body": "edited"}), any);
            let delete = TenantClient::request("post.delete", &[1.into()], &json!({}), Some(Expected::Any));
            batch(&former, vec![edit, delete]).await?;
            let _ = doomed.fixture.step("home", shard, 9).await;
            let work = quick.rows("user_feed_work").await?;
            let phases: Vec<_> = work.iter().filter_map(|row| row.text("phase")).collect();
            same("what is left to do", &phases, &vec!["TAKE"])
        }
    });
    let _ = slow.fixture.step("home", shard(1), 9).await;
    cut.has_happened(1)?;
    quick.fixture.drain().await?;
    quick.is_true().await?;
    ensure!(quick.rows("user_feed").await?.is_empty(), "rows of a deleted post are left");
    quick.equals_a_rebuild().await
}
