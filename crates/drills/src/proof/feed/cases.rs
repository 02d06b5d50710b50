//! A05 Derived projection, as a feed: after everything was read, a feed is what posts and follows say, and no row is left of
//! what was deleted or unfollowed, whichever processes raced, died or rebuilt on the way.

mod bounds;
mod late;
mod races;

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::future::Future;
use std::pin::Pin;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use async_trait::async_trait;
use serde_json::{Value as Json, json};
use statehouse::worker::WorkerOptions;
use statehouse::{Code, Expected, Operation};
use statehouse_store::clock::ManualClock;
use statehouse_store::faulty::{FaultyStore, Odds};
use statehouse_store::{
    Clock, Commit, Page, Plan, Query, Random, Scan, Step, Store, StoreError, SystemClock, Time, Value,
};

use self::bounds::{
    a_build_that_fails_keeps_no_reader_waiting, a_page_is_pulled_from_many,
    a_post_goes_out_while_followers_come_all_the_time, no_reader_gets_what_could_not_be_taken_back,
    old_posts_are_brought_as_far_as_declared, readers_are_told_once_to_look,
};
use self::late::{
    a_follow_that_arrives_late_brings_nothing_back, a_piece_of_one_version_is_none_of_the_next,
    a_piece_that_arrives_after_the_last_one_changes_nothing,
    a_piece_that_was_passed_does_not_take_the_work_back, a_sweeper_whose_clock_is_ahead_takes_nothing_away,
    a_version_that_arrives_late_changes_nothing, readers_are_told_by_the_first_worker,
    the_first_follower_misses_no_post_that_is_under_way, what_a_late_unfollow_takes_is_not_anothers,
    what_came_back_is_not_taken_for_what_was_left, work_that_was_not_seen_is_finished_first,
};
use self::races::{
    first_follows_in_one_batch_come_to_an_end, pieces_and_edges_that_meet_leave_the_truth,
    posts_that_wait_together_and_edges_that_meet_leave_the_truth, posts_that_wait_together_share_a_plan,
    versions_of_a_post_that_meet_go_out_in_their_order,
};
use super::{cases as feed, invariants};
use crate::conformance::{Case, cases};
use crate::harness::case_check::skip_invariants;
use crate::harness::drill::Drill;
use crate::harness::engines::TestNamespace;
use crate::harness::proxy::{Interceptor, StoreProxy};
use crate::harness::recorder::unattributed;
use crate::harness::store_client::{pause, same, scan};
use crate::harness::tenant_client::TenantClient;
use crate::proof::projection::cases::ProjectionFixture;

pub(crate) const CASES: &[Case] = cases! {
    feed {
        a_feed_follows_posts_and_follows(9),
        a_post_that_is_moved_leaves_its_old_place(9),
        a_post_and_a_follow_that_meet_lose_nothing(9),
        an_unfollow_and_a_post_that_meet_leave_nothing(9),
        posts_that_wait_together_share_a_plan(100),
        posts_that_wait_together_and_edges_that_meet_leave_the_truth(100),
        pieces_and_edges_that_meet_leave_the_truth(100),
        versions_of_a_post_that_meet_go_out_in_their_order(100),
        first_follows_in_one_batch_come_to_an_end(20),
        a_version_that_arrives_late_changes_nothing(9),
        the_first_follower_misses_no_post_that_is_under_way(9),
        a_follow_that_arrives_late_brings_nothing_back(9),
        what_a_late_unfollow_takes_is_not_anothers(9),
        what_came_back_is_not_taken_for_what_was_left(9),
        a_piece_that_arrives_after_the_last_one_changes_nothing(9),
        a_piece_of_one_version_is_none_of_the_next(9),
        a_piece_that_was_passed_does_not_take_the_work_back(100),
        work_that_was_not_seen_is_finished_first(9),
        readers_are_told_by_the_first_worker(9),
        a_sweeper_whose_clock_is_ahead_takes_nothing_away(9),
        a_post_goes_out_while_followers_come_all_the_time(20),
        a_build_that_fails_keeps_no_reader_waiting(9),
        readers_are_told_once_to_look(9),
        a_page_is_pulled_from_many(9),
        no_reader_gets_what_could_not_be_taken_back(9),
        old_posts_are_brought_as_far_as_declared(9),
        authors_cross_the_line_in_both_directions(9),
        a_post_that_changes_its_way_is_shown_once(9),
        records_that_come_again_change_nothing(9),
        whoever_dies_the_feed_is_the_truth(20),
        readers_read_while_another_definition_is_built(9),
        a_post_goes_to_many_in_pieces(100),
        a_reader_waits_for_a_post(20),
        what_is_over_is_not_shown_and_goes(9),
        the_cursor_never_goes_back(8),
    }
};

pub(crate) const DRILLS: &[Drill] = &[
    Drill::by_case(
        CASES,
        "stale projection",
        "A reader asks with the token of a post, before and while the projector works.",
        "feed::a_reader_waits_for_a_post",
    ),
    Drill::by_case(
        CASES,
        "missing entry",
        "A follow comes between the listing of the followers and the plan that brings them a post.",
        "feed::a_post_and_a_follow_that_meet_lose_nothing",
    ),
    Drill::by_case(
        CASES,
        "duplicate entry",
        "The log is read again from its beginning, and answers to what the projector writes get lost.",
        "feed::records_that_come_again_change_nothing",
    ),
    Drill::by_case(
        CASES,
        "tombstone not propagated",
        "An unfollow comes, and is projected, between the listing of the followers and the plan that brings them a post.",
        "feed::an_unfollow_and_a_post_that_meet_leave_nothing",
    ),
    Drill::by_case(
        CASES,
        "expensive reindex after schema change",
        "A feed with another definition is built beside the live one, while readers read and authors write.",
        "feed::readers_read_while_another_definition_is_built",
    ),
    Drill::by_case(
        CASES,
        "stale ranking after source update",
        "The times and the authors of posts are changed.",
        "feed::a_post_that_is_moved_leaves_its_old_place",
    ),
];

fn blueprint(pull_above: usize, keep: &str) -> String {
    format!(
        r#"
[house]
name = "drill"

[entity.post]
key    = {{ post_id = "int" }}
fields = {{ author_id = "int", created_at = "time", body = "text?" }}

[relation.follow]
from         = {{ follower = "int" }}
to           = {{ followed = "int" }}
buckets      = 2
count_shards = 1

[feed.home]
posts      = "post"
follows    = "follow"
preview    = "body"
keep       = "{keep}"
pull_above = {pull_above}
"#
    )
}

/// A post in a feed, or that should be: its time, its number, its author and how it begins.
pub(crate) type FeedEntry = (i64, i64, i64, String);

/// Posts, follows and feeds.
struct FeedFixture {
    fixture: ProjectionFixture,
    base: Time,
}

impl FeedFixture {
    async fn open(namespace: &dyn TestNamespace, pull_above: usize) -> Result<FeedFixture> {
        FeedFixture::over(namespace.open().await?, pull_above).await
    }

    async fn over(store: Arc<dyn Store>, pull_above: usize) -> Result<FeedFixture> {
        FeedFixture::with(store, &blueprint(pull_above, "30d"), Arc::new(SystemClock)).await
    }

    async fn with(store: Arc<dyn Store>, blueprint: &str, clock: Arc<dyn Clock>) -> Result<FeedFixture> {
        let base = Time::from_millis(clock.now().micros() / 1_000).minus(Duration::from_secs(3_600));
        Ok(FeedFixture {
            fixture: ProjectionFixture::of(TenantClient::over(store, blueprint, clock).await?).await?,
            base,
        })
    }

    fn client(&self) -> &TenantClient {
        &self.fixture.client
    }

    fn at(&self, second: u64) -> Json {
        Value::Time(self.base.plus(Duration::from_secs(second))).to_json()
    }

    /// Posts, at the second that is the post's number; or says something else.
    async fn post(&self, post: i64, author: i64, body: &str) -> Result<Option<String>> {
        let at = self.at(post.unsigned_abs());
        let input = json!({"post_id": post, "author_id": author, "created_at": at, "body": body});
        let client = self.client();
        let operation = Operation::default();
        let request = TenantClient::request("post.create", &[], &input, None);
        match client.house.call(&client.tenant, request, operation).await {
            Ok(answer) => Ok(answer.token),
            Err(refusal) if refusal.code == Code::AlreadyExists => {
                match self.fixture.any_version("post.patch", post, json!({"body": body})).await {
                    Ok(()) => Ok(None),
                    Err(_) => self.fixture.any_version("post.restore", post, json!({})).await.map(|()| None),
                }
            }
            Err(refusal) => Err(refusal.into()),
        }
    }

    async fn edit(&self, post: i64, input: Json) -> Result<()> {
        self.fixture.any_version("post.patch", post, input).await
    }

    async fn delete(&self, post: i64) -> Result<()> {
        self.fixture.any_version("post.delete", post, json!({})).await
    }

    async fn follow(&self, viewer: i64, author: i64) -> Result<()> {
        self.client().done("follow.add", &[viewer.into(), author.into()], json!({}), None).await.map(drop)
    }

    async fn unfollow(&self, viewer: i64, author: i64) -> Result<()> {
        self.client().done("follow.remove", &[viewer.into(), author.into()], json!({}), None).await.map(drop)
    }

    async fn feed(&self, viewer: i64, rows: usize) -> Result<Vec<FeedEntry>> {
        feed_of(self.client(), viewer, rows).await
    }

    /// What all feeds should be, computed from posts and follows.
    async fn truth(&self) -> Result<BTreeMap<i64, Vec<FeedEntry>>> {
        truth(self.client(), Time::MIN).await
    }

    /// Requires every feed to be what posts and follows say, and no row to be left of anything else.
    async fn is_true(&self) -> Result<()> {
        let truth = self.truth().await?;
        for (viewer, expected) in &truth {
            same(&format!("the feed of {viewer}"), &self.feed(*viewer, 3).await?, expected)?;
        }
        let live = self.fixture.live().await?;
        let wanted: BTreeSet<(i64, i64, i64)> = truth
            .iter()
            .flat_map(|(viewer, posts)| posts.iter().map(|(at, post, ..)| (*viewer, *at, *post)))
            .collect();
        for row in self.rows("user_feed").await?.iter().filter(|row| row.int("generation") == Some(live)) {
            let int = |name: &str| row.int(name).unwrap_or(0);
            let at = row.time("created_at").context("a row without a time")?.micros();
            let entry = (int("viewer_id"), at, int("post_id"));
            ensure!(wanted.contains(&entry), "a row is left of something else: {}", row.to_json());
        }
        same("work that is left", &self.rows("user_feed_work").await?.len(), &0)?;
        invariants::check(&self.client().scope("home")).await
    }

    async fn rows(&self, table: &str) -> Result<Vec<statehouse_store::Row>> {
        let table = self.client().table(table)?;
        scan(self.client().house.store().as_ref(), Scan::all(table)).await
    }

    /// Drains, looks, rebuilds, and looks again.
    async fn equals_a_rebuild(&self) -> Result<()> {
        self.fixture.drain().await?;
        self.is_true().await?;
        ensure!(self.fixture.projection()?.rebuild().await?, "no build could be begun");
        self.fixture.drain().await?;
        same("whether the build is the source's", &self.fixture.state().await?.verified, &Some(true))?;
        self.is_true().await
    }
}

/// All that a reader sees, page by page.
pub(crate) async fn feed_of(client: &TenantClient, viewer: i64, rows: usize) -> Result<Vec<FeedEntry>> {
    let (mut found, mut generations) = (Vec::new(), BTreeSet::new());
    let mut input = json!({"viewer_id": viewer, "limit": rows});
    loop {
        let page = client.done("home.list", &[], input.clone(), None).await?;
        for row in page.body.as_array().into_iter().flatten() {
            generations.insert(row["generation"].as_i64());
            let int = |name: &str| row[name].as_i64().unwrap_or(0);
            let at: Time = row["created_at"].as_str().context("a row without a time")?.parse()?;
            let preview = row["post_preview"].as_str().unwrap_or_default().to_owned();
            found.push((at.micros(), int("post_id"), int("author_id"), preview));
        }
        let Some(next) = page.next else { break };
        input["cursor"] = next.into();
    }
    ensure!(generations.len() <= 1, "a feed has rows of the generations {generations:?}");
    Ok(found)
}

pub(crate) async fn truth(client: &TenantClient, oldest: Time) -> Result<BTreeMap<i64, Vec<FeedEntry>>> {
    let store = client.house.store().as_ref();
    let mut by_author: BTreeMap<i64, Vec<FeedEntry>> = BTreeMap::new();
    for row in scan(store, Scan::of(client.table("posts")?, &client.tenant)).await? {
        let int = |name: &str| row.int(name).unwrap_or(0);
        let at = row.time("created_at").context("a post without a time")?;
        if row.text("status") == Some("ACTIVE") && at > oldest {
            let body = row.text("body").unwrap_or_default().to_owned();
            by_author.entry(int("author_id")).or_default().push((
                at.micros(),
                int("post_id"),
                int("author_id"),
                body,
            ));
        }
    }
    let mut feeds: BTreeMap<i64, Vec<FeedEntry>> = BTreeMap::new();
    for row in scan(store, Scan::of(client.table("follows")?, &client.tenant)).await? {
        let int = |name: &str| row.int(name).unwrap_or(0);
        let feed = feeds.entry(int("follower")).or_default();
        if row.time("since").is_some() {
            feed.extend(by_author.get(&int("followed")).into_iter().flatten().cloned());
        }
    }
    for feed in feeds.values_mut() {
        feed.sort_by_key(|shown| std::cmp::Reverse((shown.0, shown.1)));
    }
    Ok(feeds)
}

async fn a_feed_follows_posts_and_follows(namespace: &dyn TestNamespace) -> Result<()> {
    let home = FeedFixture::open(namespace, 100).await?;
    let early = json!({"viewer_id": 1});
    home.client().refused("home.list", &[], early, None, Code::Unavailable).await?;
    for (post, author) in [(1, 10), (2, 20), (3, 10)] {
        home.post(post, author, "first").await?;
    }
    home.follow(1, 10).await?;
    home.follow(2, 10).await?;
    home.fixture.drain().await?;
    home.is_true().await?;
    // A follow brings what was posted before; a post goes to all who follow; an edit is seen.
    home.follow(1, 20).await?;
    home.post(4, 20, "second").await?;
    home.edit(1, json!({"body": "edited"})).await?;
    home.fixture.drain().await?;
    home.is_true().await?;
    same("how much the first reader has", &home.feed(1, 2).await?.len(), &4)?;
    // What is deleted or unfollowed goes, and comes back when it does.
    home.delete(3).await?;
    home.unfollow(1, 20).await?;
    home.fixture.drain().await?;
    home.is_true().await?;
    home.fixture.any_version("post.restore", 3, json!({})).await?;
    home.unfollow(2, 10).await?;
    home.follow(1, 20).await?;
    home.fixture.drain().await?;
    home.is_true().await?;
    same("a reader without follows", &home.feed(2, 2).await?, &Vec::new())?;
    home.equals_a_rebuild().await
}

async fn a_post_that_is_moved_leaves_its_old_place(namespace: &dyn TestNamespace) -> Result<()> {
    let home = FeedFixture::open(namespace, 100).await?;
    for (viewer, author) in [(1, 10), (2, 10), (2, 20)] {
        home.follow(viewer, author).await?;
    }
    for post in 1..=4 {
        home.post(post, 10, "somewhere").await?;
    }
    home.fixture.drain().await?;
    // To the front, behind all others, and to another author; also when each is read after all were made.
    home.edit(1, json!({"created_at": home.at(50)})).await?;
    home.fixture.drain().await?;
    home.is_true().await?;
    same("the first", &home.feed(1, 2).await?.first().map(|shown| shown.1), &Some(1))?;
    home.edit(4, json!({"created_at": home.at(0), "body": "last"})).await?;
    home.edit(2, json!({"author_id": 20})).await?;
    home.fixture.drain().await?;
    home.is_true().await?;
    home.edit(2, json!({"author_id": 10, "created_at": home.at(60)})).await?;
    home.edit(2, json!({"created_at": home.at(2)})).await?;
    home.unfollow(1, 10).await?;
    home.edit(3, json!({"created_at": home.at(70)})).await?;
    home.fixture.drain().await?;
    home.is_true().await?;
    home.equals_a_rebuild().await
}

/// Something that happens between two others.
type PendingEvent = Pin<Box<dyn Future<Output = Result<()>> + Send>>;

/// Lets something happen before the next plan is committed that changes readers' rows; or, if a table is named, before that
/// one is read.
#[derive(Default)]
struct RunBefore {
    before_reading: Option<&'static str>,
    event: Mutex<Option<PendingEvent>>,
    happened: Mutex<Vec<Result<()>>>,
}

impl RunBefore {
    fn next(&self, event: impl Future<Output = Result<()>> + Send + 'static) {
        *self.event.lock().unwrap_or_else(PoisonError::into_inner) = Some(Box::pin(event));
    }

    async fn happen(&self) {
        let event = self.event.lock().unwrap_or_else(PoisonError::into_inner).take();
        if let Some(event) = event {
            let outcome = unattributed(event).await;
            self.happened.lock().unwrap_or_else(PoisonError::into_inner).push(outcome);
        }
    }

    /// Requires it to have happened so many times, and well.
    fn has_happened(&self, times: usize) -> Result<()> {
        let happened = std::mem::take(&mut *self.happened.lock().unwrap_or_else(PoisonError::into_inner));
        same("how often something came between", &happened.len(), &times)?;
        happened.into_iter().collect::<Result<()>>().context("what came between")
    }
}

impl fmt::Debug for RunBefore {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Cut")
    }
}

#[async_trait]
impl Interceptor for Arc<RunBefore> {
    async fn commit(&self, inner: &Arc<dyn Store>, plan: &Plan) -> Result<Commit, StoreError> {
        let is_rows = |step: &Step| step.writes() && step.table.name() == "user_feed";
        if self.before_reading.is_none() && plan.steps().iter().any(is_rows) {
            self.happen().await;
        }
        inner.commit(plan).await
    }

    async fn query(&self, inner: &Arc<dyn Store>, query: &Query) -> Result<Page, StoreError> {
        if self.before_reading == Some(query.read_table().name()) {
            self.happen().await;
        }
        inner.query(query).await
    }
}

/// A slow process and a quick one on the same store. What the quick one does comes between what the slow one reads and what
/// it writes for a post; it also projects everything that is not in the partition which the slow one works on.
async fn meet<F, Fut>(
    namespace: &dyn TestNamespace,
    (blueprint, followers): (&str, i64),
    first: F,
    meanwhile: fn(Arc<FeedFixture>, i64) -> Fut,
) -> Result<()>
where
    F: AsyncFn(&FeedFixture, i64) -> Result<()>,
    Fut: Future<Output = Result<()>> + Send + 'static,
{
    let (store, cut) = (namespace.open().await?, Arc::new(RunBefore::default()));
    let clock = Arc::new(SystemClock);
    let around = Arc::new(StoreProxy::new(store.clone(), cut.clone()));
    let slow = FeedFixture::with(around, blueprint, clock.clone()).await?;
    let quick = Arc::new(FeedFixture::with(store.clone(), blueprint, clock).await?);
    for viewer in 1..=followers {
        quick.follow(viewer, 10).await?;
    }
    quick.post(1, 10, "before").await?;
    quick.fixture.drain().await?;
    for round in 2..=3 {
        first(&quick, round).await?;
        let live = quick.fixture.live().await?;
        let group = quick.fixture.projection()?.group(live);
        let ahead = group.status().await?;
        let busy: Vec<u32> = ahead.iter().filter(|one| one.records > 0).map(|one| one.partition).collect();
        let shard = *busy.first().context("nothing lies ahead")?;
        cut.next({
            let (quick, partitions) = (quick.clone(), store.partitions());
            async move {
                meanwhile(quick.clone(), round).await?;
                for other in (0..partitions).filter(|other| *other != shard) {
                    quick.fixture.step("home", other, 9).await?;
                }
                Ok(())
            }
        });
        slow.fixture.step("home", shard, 9).await?;
        quick.fixture.drain().await?;
        quick.is_true().await?;
    }
    cut.has_happened(2)?;
    quick.equals_a_rebuild().await
}

async fn a_post_and_a_follow_that_meet_lose_nothing(namespace: &dyn TestNamespace) -> Result<()> {
    let first = async |home: &FeedFixture, round: i64| home.post(round, 10, "new").await.map(drop);
    let few = blueprint(100, "30d");
    meet(namespace, (&few, 2), first, |home, round| async move { home.follow(10 + round, 10).await }).await
}

async fn an_unfollow_and_a_post_that_meet_leave_nothing(namespace: &dyn TestNamespace) -> Result<()> {
    let first = async |home: &FeedFixture, round: i64| home.post(round, 10, "new").await.map(drop);
    let few = blueprint(100, "30d");
    meet(namespace, (&few, 2), first, |home, round| async move { home.unfollow(round - 1, 10).await }).await
}

async fn authors_cross_the_line_in_both_directions(namespace: &dyn TestNamespace) -> Result<()> {
    let home = FeedFixture::open(namespace, 1).await?;
    home.post(1, 10, "pushed to nobody").await?;
    home.follow(1, 10).await?;
    home.follow(1, 20).await?;
    home.post(2, 10, "pushed").await?;
    home.post(3, 20, "pushed").await?;
    home.fixture.drain().await?;
    // Now too many follow for a push, and old posts stay what they were.
    home.follow(2, 10).await?;
    home.post(4, 10, "pulled").await?;
    home.post(5, 20, "pushed").await?;
    home.fixture.drain().await?;
    home.is_true().await?;
    let pushed = async |post: i64| -> Result<usize> {
        let rows = home.rows("user_feed").await?;
        Ok(rows.iter().filter(|row| row.int("post_id") == Some(post)).count())
    };
    same("rows of a pulled post", &pushed(4).await?, &0)?;
    same("rows of a post that was pushed before", &pushed(2).await?, &2)?;
    // A new follower then sees both kinds; edits, moves and deletes of either are seen.
    home.follow(3, 10).await?;
    home.post(6, 10, "pulled").await?;
    home.edit(4, json!({"body": "edited", "created_at": home.at(40)})).await?;
    home.delete(2).await?;
    home.unfollow(2, 10).await?;
    home.fixture.drain().await?;
    home.is_true().await?;
    same("a page over both kinds", &home.feed(1, 1).await?, &home.feed(1, 50).await?)?;
    // And back below the line.
    home.unfollow(3, 10).await?;
    home.post(7, 10, "pushed again").await?;
    home.delete(6).await?;
    home.follow(6, 20).await?;
    home.edit(4, json!({"author_id": 20})).await?;
    home.fixture.drain().await?;
    home.is_true().await?;
    same("rows of a post below the line", &pushed(7).await?, &1)?;
    home.equals_a_rebuild().await
}

async fn a_post_that_changes_its_way_is_shown_once(namespace: &dyn TestNamespace) -> Result<()> {
    let (store, cut) = (
        namespace.open().await?,
        RunBefore { before_reading: Some("user_feed_posts"), ..RunBefore::default() },
    );
    let cut = Arc::new(cut);
    let reader = FeedFixture::over(Arc::new(StoreProxy::new(store.clone(), cut.clone())), 1).await?;
    let home = Arc::new(FeedFixture::over(store, 1).await?);
    home.follow(1, 10).await?;
    home.post(1, 10, "pushed").await?;
    home.fixture.drain().await?;
    home.follow(2, 10).await?;
    home.post(2, 10, "pulled").await?;
    home.fixture.drain().await?;
    // The reader has the rows that were pushed in hand, and not yet the author's list, when the post goes and comes back.
    cut.next({
        let home = home.clone();
        async move {
            home.delete(1).await?;
            home.fixture.drain().await?;
            home.fixture.any_version("post.restore", 1, json!({})).await?;
            home.fixture.drain().await
        }
    });
    let shown: Vec<i64> = reader.feed(1, 9).await?.into_iter().map(|shown| shown.1).collect();
    cut.has_happened(1)?;
    same("what is shown", &shown, &vec![2, 1])?;
    home.is_true().await
}

async fn records_that_come_again_change_nothing(namespace: &dyn TestNamespace) -> Result<()> {
    let sound = namespace.open().await?;
    let faulty = Arc::new(FaultyStore::over(sound, Arc::new(SystemClock), Odds::default(), 3));
    let home = FeedFixture::over(faulty.clone(), 2).await?;
    home.fixture.drain().await?;
    for viewer in 1..=3 {
        home.follow(viewer, 10 * (1 + viewer % 2)).await?;
        home.post(viewer, 10, "one").await?;
        home.post(10 + viewer, 20, "two").await?;
    }
    home.edit(1, json!({"created_at": home.at(30)})).await?;
    home.delete(2).await?;
    home.unfollow(1, 20).await?;
    faulty.set_odds(Odds { unknown_before: 0.2, unknown_after: 0.4, unavailable: 0.05, ..Odds::default() });
    for _ in 0..15 {
        // Whatever comes of it: the process may die here as well.
        let _ = home.fixture.work(2).await;
    }
    let achieved = faulty.achieved();
    ensure!(achieved.unknown_after > 0 && achieved.unknown_before > 0, "{achieved}");
    faulty.set_odds(Odds::default());
    home.fixture.drain().await?;
    home.is_true().await?;
    let live = home.fixture.live().await?;
    let group = home.fixture.projection()?.group(live);
    let before = home.rows("user_feed").await?.len();
    for partition in 0..faulty.partitions() {
        group.seek(partition, 0).await?;
    }
    ensure!(group.status().await?.iter().any(|one| one.records > 0), "nothing lies ahead");
    home.fixture.drain().await?;
    same("rows after a replay", &home.rows("user_feed").await?.len(), &before)?;
    home.is_true().await
}

/// A random action of a random person.
async fn act(home: &FeedFixture, random: &mut Random) -> Result<()> {
    let post = 1 + i64::try_from(random.below(3))?;
    let (viewer, author) = (1 + i64::try_from(random.below(3))?, 10 * (1 + i64::try_from(random.below(2))?));
    match random.below(8) {
        0..3 => home.post(post, author, &format!("word {}", random.below(100))).await.map(drop),
        3 => home.delete(post).await.or(Ok(())),
        4 => home.edit(post, json!({"created_at": home.at(random.below(90))})).await.or(Ok(())),
        5..7 => home.follow(viewer, author).await,
        _ => home.unfollow(viewer, author).await,
    }
}

async fn whoever_dies_the_feed_is_the_truth(namespace: &dyn TestNamespace) -> Result<()> {
    let sound = namespace.open().await?;
    let quiet = FeedFixture::over(sound.clone(), 1).await?;
    let mut died = 0;
    for seed in 1..=4 {
        let faulty = Arc::new(FaultyStore::over(sound.clone(), Arc::new(SystemClock), Odds::default(), seed));
        let doomed = Arc::new(FeedFixture::over(faulty.clone(), 1).await?);
        let mut random = Random::seeded(seed);
        for _ in 0..6 {
            act(&quiet, &mut random).await?;
        }
        if seed == 3 {
            quiet.fixture.drain().await?;
            quiet.fixture.projection()?.rebuild().await?;
        }
        faulty.set_odds(Odds { crash_before: 0.05, crash_after: 0.2, ..Odds::default() });
        let process = tokio::spawn({
            let doomed = doomed.clone();
            async move {
                for _ in 0..10 {
                    let _ = doomed.fixture.work(2).await;
                }
            }
        });
        // Another process works meanwhile, on the same partitions: it takes the first one for dead.
        for _ in 0..3 {
            act(&quiet, &mut random).await?;
            let _ = quiet.fixture.work(2).await;
        }
        for _ in 0..500 {
            let achieved = faulty.achieved();
            if process.is_finished() || achieved.crashes_after + achieved.crashes_before > 0 {
                break;
            }
            pause().await;
        }
        process.abort();
        died += faulty.achieved().crashes_after + faulty.achieved().crashes_before;
    }
    ensure!(died > 0, "no process died");
    quiet.equals_a_rebuild().await
}

async fn readers_read_while_another_definition_is_built(namespace: &dyn TestNamespace) -> Result<()> {
    let store = namespace.open().await?;
    let old = FeedFixture::over(store.clone(), 2).await?;
    for viewer in 1..=3 {
        old.follow(viewer, 10).await?;
    }
    for post in 1..=4 {
        old.post(post, if post < 3 { 20 } else { 10 }, "old").await?;
    }
    old.follow(1, 20).await?;
    old.fixture.drain().await?;
    old.is_true().await?;
    let (client, over) = (old.client().clone(), Arc::new(AtomicBool::new(false)));
    let reader = tokio::spawn({
        let over = over.clone();
        async move {
            let (mut lists, mut lengths) = (0, BTreeSet::new());
            while !over.load(Ordering::SeqCst) {
                lengths.insert(feed_of(&client, 1, 2).await?.len());
                lists += 1;
            }
            Ok::<_, anyhow::Error>((lists, lengths))
        }
    });
    // The new program keeps less, which is another definition; it builds while authors edit.
    let new = FeedFixture::with(store, &blueprint(2, "20d"), Arc::new(SystemClock)).await?;
    let before = new.fixture.live().await?;
    for round in 0..200 {
        if round < 4 {
            old.edit(1 + round, json!({"body": format!("edit {round}")})).await?;
        }
        let busy = new.fixture.work(1).await?;
        old.fixture.work(1).await?;
        if !busy && new.fixture.live().await? != before {
            break;
        }
    }
    new.fixture.drain().await?;
    over.store(true, Ordering::SeqCst);
    let (lists, lengths) = reader.await??;
    ensure!(lists > 0, "no reader read");
    same("how long the feed was, whenever it was read", &lengths, &BTreeSet::from([4]))?;
    ensure!(new.fixture.live().await? > before, "nothing was built");
    new.is_true().await
}

async fn a_post_goes_to_many_in_pieces(namespace: &dyn TestNamespace) -> Result<()> {
    let store = namespace.open().await?;
    let faulty = Arc::new(FaultyStore::over(store.clone(), Arc::new(SystemClock), Odds::default(), 7));
    let home = FeedFixture::over(faulty.clone(), 1_000).await?;
    home.fixture.drain().await?;
    let followers = 130;
    for viewer in 1..=followers {
        home.follow(viewer, 10).await?;
    }
    home.fixture.drain().await?;
    home.post(1, 10, "to many").await?;
    // The projector fails again and again, between pieces and in them, and goes on where it was.
    faulty.set_odds(Odds { unknown_after: 0.2, unavailable: 0.2, ..Odds::default() });
    for _ in 0..40 {
        let _ = home.fixture.work(9).await;
    }
    faulty.set_odds(Odds::default());
    home.fixture.drain().await?;
    same("rows", &home.rows("user_feed").await?.len(), &usize::try_from(followers)?)?;
    home.is_true().await?;
    home.edit(1, json!({"created_at": home.at(9), "body": "moved"})).await?;
    home.unfollow(7, 10).await?;
    home.fixture.drain().await?;
    home.is_true().await?;
    home.delete(1).await?;
    home.fixture.drain().await?;
    same("rows that are left", &home.rows("user_feed").await?.len(), &0)
}

async fn a_reader_waits_for_a_post(namespace: &dyn TestNamespace) -> Result<()> {
    let home = FeedFixture::open(namespace, 1).await?;
    for (viewer, author) in [(1, 10), (1, 20), (2, 20)] {
        home.follow(viewer, author).await?;
    }
    home.fixture.drain().await?;
    let token = home.post(1, 10, "new").await?.context("a write without a token")?;
    let read = async |token: &str, wait_ms: i64| {
        let input = json!({"viewer_id": 1, "after": token, "wait_ms": wait_ms});
        home.client().call("home.list", &[], input, None).await
    };
    // No worker runs, so the feed cannot have it.
    let early = read(&token, 0).await;
    ensure!(early.as_ref().is_err_and(|refusal| refusal.code == Code::Unavailable), "{early:?}");
    let refused = read("nonsense", 0).await;
    ensure!(refused.as_ref().is_err_and(|refusal| refusal.code == Code::InvalidInput), "{refused:?}");
    let options = WorkerOptions {
        lease: Duration::from_millis(1_500),
        step_rows: 1,
        idle_max: Duration::from_millis(500),
        random: Random::seeded(1),
        ..WorkerOptions::default()
    };
    home.client().house.start_workers(options);
    // One author is pushed, the other one pulled.
    for (post, author) in [(2, 10), (3, 20)] {
        let token = home.post(post, author, "newer").await?.context("a write without a token")?;
        let seen = loop {
            match read(&token, 30_000).await {
                Ok(seen) => break seen,
                // A slow machine is no failure; an old feed would be.
                Err(refusal) => ensure!(refusal.code == Code::Unavailable, "{refusal}"),
            }
        };
        same("the first of what the reader sees", &seen.body[0]["post_id"], &json!(post))?;
    }
    home.client().house.stop_workers().await;
    Ok(())
}

async fn what_is_over_is_not_shown_and_goes(namespace: &dyn TestNamespace) -> Result<()> {
    let clock = Arc::new(ManualClock::at(Time::from_millis(1_800_000_000_000)));
    let store = namespace.open_at(clock.clone()).await?;
    let home = FeedFixture::with(store, &blueprint(1, "2h"), clock.clone()).await?;
    for (viewer, author) in [(1, 10), (1, 20), (2, 20)] {
        home.follow(viewer, author).await?;
    }
    // They were made an hour ago; one of them three hours ago.
    for (post, author) in [(1, 10), (2, 20), (3, 10)] {
        home.post(post, author, "soon over").await?;
    }
    let old = Value::Time(clock.now().minus(Duration::from_secs(3 * 3_600))).to_json();
    home.edit(3, json!({"created_at": old})).await?;
    home.fixture.drain().await?;
    let numbers = async || -> Result<Vec<i64>> {
        Ok(home.feed(1, 5).await?.into_iter().map(|shown| shown.1).collect())
    };
    same("what is shown", &numbers().await?, &vec![2, 1])?;
    clock.advance(Duration::from_secs(3_600));
    same("a second before their end", &numbers().await?, &vec![2, 1])?;
    clock.advance(Duration::from_millis(1_500));
    same("after the end of one", &numbers().await?, &vec![2])?;
    clock.advance(Duration::from_secs(2));
    same("after the end of both", &numbers().await?, &vec![])?;
    for _ in 0..4 {
        home.fixture.step_of("home.sweep", 0, 50).await?;
    }
    let left = (home.rows("user_feed").await?.len(), home.rows("user_feed_posts").await?.len());
    same("rows that are left", &left, &(0, 0))?;
    // What is over goes nowhere, also if it is edited; made new, it does.
    home.edit(1, json!({"body": "too late"})).await?;
    home.fixture.drain().await?;
    same("rows of what is over", &home.rows("user_feed").await?.len(), &0)?;
    let new = Value::Time(clock.now()).to_json();
    home.edit(1, json!({"created_at": new})).await?;
    home.fixture.drain().await?;
    same("what is shown again", &numbers().await?, &vec![1])
}

async fn the_cursor_never_goes_back(namespace: &dyn TestNamespace) -> Result<()> {
    skip_invariants("the feed is not built");
    let home = FeedFixture::open(namespace, 1).await?;
    let client = home.client();
    let nothing = client.done("home.read", &[1.into()], json!({}), None).await?.body;
    same(
        "before anything was seen",
        &json!([nothing["last_seen_post_id"], nothing["version"]]),
        &json!([null, 0]),
    )?;
    let seen = async |post: i64, second: u64| {
        let input = json!({"post_id": post, "created_at": home.at(second)});
        let answer = client.done("home.seen", &[1.into()], input, None).await?;
        Ok::<_, anyhow::Error>(answer.body["last_seen_post_id"].clone())
    };
    same("the first", &seen(5, 10).await?, &json!(5))?;
    same("an older one", &seen(4, 9).await?, &json!(5))?;
    same("one of the same time, before it", &seen(3, 10).await?, &json!(5))?;
    same("one of the same time, behind it", &seen(6, 10).await?, &json!(6))?;
    // Several devices at once: the newest stays.
    let mut devices = Vec::new();
    for post in 7_i64..=12 {
        let second = if post % 2 == 0 { 30 - post } else { 10 + post };
        let input = json!({"post_id": post, "created_at": home.at(second.unsigned_abs())});
        devices.push(client.start("home.seen", &[1.into()], input, None));
    }
    for device in devices {
        if let Err(refusal) = device.await? {
            ensure!(refusal.code == Code::Contended, "{refusal}");
            let newest = json!({"post_id": 8, "created_at": home.at(22)});
            client.done("home.seen", &[1.into()], newest, None).await?;
        }
    }
    same("the newest", &seen(8, 22).await?, &json!(8))?;
    // Who was paused comes too late: another device was first, or further, or the row is gone altogether.
    let reader = [Value::from(2)];
    let post = |post: i64, second: u64| json!({"post_id": post, "created_at": home.at(second)});
    let draft = async |post: Json| client.drafted("home.seen", &reader, post, None).await;
    for (drafted, meanwhile) in [(post(1, 1), post(5, 10)), (post(6, 11), post(7, 12))] {
        let late = draft(drafted).await?;
        client.done("home.seen", &reader, meanwhile, None).await?;
        client.too_late(&late).await?;
    }
    let late = draft(post(8, 20)).await?;
    let (store_client, cursor) =
        (client.store_client()?, late.steps().first().context("nothing is written")?);
    store_client.apply(store_client.one(Step::delete(&cursor.table, reader.iter().cloned()))).await?;
    client.too_late(&late).await?;
    let request = TenantClient::request("home.seen", &[1.into()], &json!({"post_id": 1}), None::<Expected>);
    let refused = client.house.call(&client.tenant, request, Operation::default()).await;
    ensure!(refused.as_ref().is_err_and(|refusal| refusal.code == Code::InvalidInput), "{refused:?}");
    Ok(())
}
