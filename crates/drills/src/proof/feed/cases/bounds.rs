//! What has a bound: how long a post is tried, what a build may hold up, how often readers are told, what a page reads, and
//! what a feed takes in at all.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicI64, AtomicUsize, Ordering};
use std::time::Duration;

use anyhow::{Context, Result};
use async_trait::async_trait;
use serde_json::json;
use statehouse_store::clock::ManualClock;
use statehouse_store::log::partition_of;
use statehouse_store::{Clock, Commit, Page, Plan, Scan, Step, Store, StoreError, SystemClock, Time};

use super::races::CrashAfterPlans;
use super::{FeedFixture, blueprint};
use crate::harness::engines::TestNamespace;
use crate::harness::proxy::{Interceptor, StoreProxy};
use crate::harness::store_client::same;
use crate::harness::tenant_client::TenantClient;
use crate::proof::projection::cases::ProjectionFixture;

fn writes(plan: &Plan, table: &str) -> bool {
    plan.steps().iter().any(|step: &Step| step.writes() && step.table.name() == table)
}

/// A reader follows before each plan that changes readers' rows.
struct FollowBeforeCommit {
    home: FeedFixture,
    next: AtomicI64,
}

impl std::fmt::Debug for FollowBeforeCommit {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Restless")
    }
}

#[async_trait]
impl Interceptor for Arc<FollowBeforeCommit> {
    async fn commit(&self, inner: &Arc<dyn Store>, plan: &Plan) -> Result<Commit, StoreError> {
        if writes(plan, "user_feed") {
            let viewer = self.next.fetch_add(1, Ordering::SeqCst);
            let followed = self.home.follow(viewer, 10).await;
            followed.map_err(|error| StoreError::unavailable(error.to_string()))?;
        }
        inner.commit(plan).await
    }
}

pub(super) async fn a_post_goes_out_while_followers_come_all_the_time(
    namespace: &dyn TestNamespace,
) -> Result<()> {
    let store = namespace.open().await?;
    let restless = Arc::new(FollowBeforeCommit {
        home: FeedFixture::over(store.clone(), 100).await?,
        next: AtomicI64::new(100),
    });
    let quick = FeedFixture::over(store.clone(), 100).await?;
    quick.follow(1, 10).await?;
    quick.fixture.drain().await?;
    quick.post(1, 10, "new").await?;
    let slow = FeedFixture::over(Arc::new(StoreProxy::new(store.clone(), restless)), 100).await?;
    let shard = partition_of(&quick.client().tenant, "post", "1", store.partitions());
    slow.fixture.step("home", shard, 1).await?;
    // The new follower may still be ahead; the post itself is through.
    let rows = quick.rows("user_feed").await?;
    same("rows of the first reader", &rows.iter().filter(|row| row.int("viewer_id") == Some(1)).count(), &1)?;
    quick.fixture.drain().await?;
    quick.is_true().await
}

/// Scans of posts fail.
#[derive(Debug)]
struct FailingScans(AtomicBool);

#[async_trait]
impl Interceptor for Arc<FailingScans> {
    async fn scan(&self, inner: &Arc<dyn Store>, scan: &Scan) -> Result<Page, StoreError> {
        if scan.read_table().name() == "posts" && self.0.load(Ordering::SeqCst) {
            return Err(StoreError::unavailable("nothing can be seen"));
        }
        inner.scan(scan).await
    }
}

pub(super) async fn a_build_that_fails_keeps_no_reader_waiting(namespace: &dyn TestNamespace) -> Result<()> {
    let (store, blind) = (namespace.open().await?, Arc::new(FailingScans(AtomicBool::new(false))));
    let home = FeedFixture::over(Arc::new(StoreProxy::new(store.clone(), blind.clone())), 100).await?;
    home.follow(1, 10).await?;
    home.fixture.drain().await?;
    let live = home.fixture.live().await?;
    home.fixture.projection()?.rebuild().await?;
    blind.0.store(true, Ordering::SeqCst);
    // The first partition is the one whose worker builds, too.
    let tenant = home.client().tenant.clone();
    let first = |post: &i64| partition_of(&tenant, "post", &post.to_string(), store.partitions()) == 0;
    let post = (1..200).find(first).context("no post is in the first partition")?;
    home.post(post, 10, "new").await?;
    let _ = home.fixture.step("home", 0, 9).await;
    same("which generation is live", &home.fixture.live().await?, &live)?;
    let shown: Vec<i64> = home.feed(1, 9).await?.into_iter().map(|shown| shown.1).collect();
    same("what is shown meanwhile", &shown, &vec![post])?;
    blind.0.store(false, Ordering::SeqCst);
    home.equals_a_rebuild().await
}

/// Counts plans that tell readers to look into an author's list.
#[derive(Debug, Default)]
struct CountPullPlans(AtomicUsize);

#[async_trait]
impl Interceptor for Arc<CountPullPlans> {
    async fn commit(&self, inner: &Arc<dyn Store>, plan: &Plan) -> Result<Commit, StoreError> {
        self.0.fetch_add(usize::from(writes(plan, "user_feed_pulled")), Ordering::SeqCst);
        inner.commit(plan).await
    }
}

pub(super) async fn readers_are_told_once_to_look(namespace: &dyn TestNamespace) -> Result<()> {
    let (store, told) = (namespace.open().await?, Arc::new(CountPullPlans::default()));
    let doomed = CrashAfterPlans::after(1, "user_feed_work");
    let doomed = FeedFixture::over(Arc::new(StoreProxy::new(store.clone(), doomed)), 1).await?;
    let home = FeedFixture::over(Arc::new(StoreProxy::new(store.clone(), told.clone())), 1).await?;
    for viewer in 1..=2 {
        home.follow(viewer, 10).await?;
    }
    home.fixture.drain().await?;
    let shard =
        |post: i64| partition_of(&home.client().tenant, "post", &post.to_string(), store.partitions());
    let other = (2..100).find(|post| shard(*post) != shard(1)).unwrap_or(2);
    // One process dies before it has told anybody; another one tells all, for another post.
    home.post(1, 10, "pulled").await?;
    let _ = doomed.fixture.step("home", shard(1), 9).await;
    same("posts that are under way", &home.rows("user_feed_work").await?.len(), &1)?;
    home.post(other, 10, "pulled").await?;
    home.fixture.step("home", shard(other), 9).await?;
    home.fixture.drain().await?;
    same("how often readers were told", &told.0.load(Ordering::SeqCst), &1)?;
    home.is_true().await
}

pub(super) async fn a_page_is_pulled_from_many(namespace: &dyn TestNamespace) -> Result<()> {
    // More authors than are read at the same time.
    let home = FeedFixture::open(namespace, 0).await?;
    for author in 1..=34 {
        home.follow(1, author).await?;
        home.post(if author % 2 == 0 { author } else { 100 - author }, author, "pulled").await?;
    }
    home.fixture.drain().await?;
    same("rows that were pushed", &home.rows("user_feed").await?.len(), &0)?;
    same("rows that point to authors", &home.rows("user_feed_pulled").await?.len(), &34)?;
    same("how much is shown", &home.feed(1, 40).await?.len(), &34)?;
    same("page by page", &home.feed(1, 5).await?, &home.feed(1, 40).await?)?;
    home.is_true().await
}

pub(super) async fn no_reader_gets_what_could_not_be_taken_back(namespace: &dyn TestNamespace) -> Result<()> {
    let text = blueprint(100, "30d").replace(r#"follower = "int""#, r#"follower = "text""#);
    let client = TenantClient::over(namespace.open().await?, &text, Arc::new(SystemClock)).await?;
    let home = FeedFixture {
        base: SystemClock.now().minus(Duration::from_secs(3_600)),
        fixture: ProjectionFixture::of(client).await?,
    };
    let long = "x".repeat(201);
    let follow = async |action: &str, viewer: &str| {
        home.client().done(action, &[viewer.into(), 10.into()], json!({}), None).await.map(drop)
    };
    follow("follow.add", "short").await?;
    follow("follow.add", &long).await?;
    home.post(1, 10, "new").await?;
    home.fixture.drain().await?;
    let viewers = async || -> Result<Vec<String>> {
        let rows = home.rows("user_feed").await?;
        Ok(rows.iter().filter_map(|row| row.text("viewer_id")).map(str::to_owned).collect())
    };
    same("who has a row", &viewers().await?, &vec!["short".to_owned()])?;
    follow("follow.remove", &long).await?;
    follow("follow.remove", "short").await?;
    home.fixture.drain().await?;
    same("who has one after all are gone", &viewers().await?, &Vec::new())
}

pub(super) async fn old_posts_are_brought_as_far_as_declared(namespace: &dyn TestNamespace) -> Result<()> {
    let clock = Arc::new(ManualClock::at(Time::from_millis(1_800_000_000_000)));
    let text = format!("{}backfill   = \"30m\"\n", blueprint(1, "30d"));
    let home = FeedFixture::with(namespace.open_at(clock.clone()).await?, &text, clock.clone()).await?;
    // Posts of an hour ago, and of some twenty minutes ago: one author is pushed, the other one pulled.
    for viewer in 2..=3 {
        home.follow(viewer, 20).await?;
    }
    home.fixture.drain().await?;
    for (post, author) in [(1, 10), (2_400, 10), (2, 20), (2_401, 20)] {
        home.post(post, author, "before").await?;
    }
    home.fixture.drain().await?;
    home.follow(1, 10).await?;
    home.follow(1, 20).await?;
    home.fixture.drain().await?;
    let shown = async || -> Result<Vec<i64>> {
        Ok(home.feed(1, 2).await?.into_iter().map(|shown| shown.1).collect())
    };
    same("what a follow brings", &shown().await?, &vec![2_401, 2_400])?;
    // What is posted later, and says that it is older, is not shown either.
    home.post(3, 10, "late").await?;
    home.post(2_500, 10, "late").await?;
    home.fixture.drain().await?;
    same("what a post brings", &shown().await?, &vec![2_500, 2_401, 2_400])?;
    // Another follow begins anew.
    clock.advance(Duration::from_secs(20 * 60));
    for author in [10, 20] {
        home.client().done("follow.remove", &[1.into(), author.into()], json!({}), None).await?;
    }
    home.fixture.drain().await?;
    same("what is left", &shown().await?, &vec![])?;
    for author in [10, 20] {
        home.follow(1, author).await?;
    }
    home.post(3_600, 20, "new").await?;
    home.fixture.drain().await?;
    same("what another follow brings", &shown().await?, &vec![3_600])
}
