//! From posts and edges to rows, one bounded plan at a time.
//!
//! ```text
//!   a post:   entry, author's list, all rows                     if they fit into one plan, and no edge moves meanwhile
//!             entry, author's list, work ──► rows, work ──► … ──► rows, no more work                        otherwise
//!   posts:    entries, authors' lists, all rows of several new ones     if they fit into one plan, and no edge moves meanwhile
//!   an edge:  what the reader has of the author, against what the author's list says: the difference, some at a time
//! ```

mod edges;
mod post_work;
mod resume;

use std::collections::{BTreeMap, HashSet};
use std::sync::Arc;

use async_trait::async_trait;
use statehouse_store::guard::column;
use statehouse_store::{
    Address, Consistency, Cursor, Guard, Query, Row, Step, StoreError, Table, Time, Value, bug,
};

pub(super) use self::post_work::ShownPost;
use self::post_work::{PostLocation, PostPhase, PostWork};
use super::batch::PlanCapacity;
use super::{
    AUTHOR, CREATED_AT, CURSOR, EXPIRES_AT, FeedSpec, PHASE, POST, PREVIEW, PULL, PUSH, SINCE, STATE, WAS_AT,
    WAS_AUTHOR, WAY, fitting, key_column_in,
};
use crate::action::Refusal;
use crate::infra::log::{HandlerContext, HandlerError};
use crate::infra::projection::{
    EntryContent, FanOut, FanOutBatch, FanOutStep, FanOutTask, ProjectionEntry, Projector, SOURCE_ORDER,
    SourceChange, changes_in, entry_step,
};
use crate::product::listing::{ListItem, ShardedCount};
use crate::product::relation;

/// Steps of a plan that are left for rows of readers, beside progress, entry, author's list and work.
const STEPS_MAX: usize = 90;
/// Differences that one plan for an edge settles; each is two steps at most.
const DIFFERENCES_MAX: usize = STEPS_MAX / 2;

/// How often a post is read that changes meanwhile.
const READS_MAX: u32 = 8;

/// How often a post is refused that goes out in one plan, before it goes out in pieces.
const REFUSED_MAX: u32 = 2;

/// Some readers have no row yet that points to the author; or all have who follow.
const FILLING: &str = "FILLING";
const FULL: &str = "FULL";

/// Something in a record.
enum RecordTask {
    Post(SourceChange),
    Edge(Value, Value),
}

/// A post before and after a change.
struct PostVersions {
    before: Option<ShownPost>,
    after: Option<ShownPost>,
    /// In which list of its author the post is.
    way: Option<String>,
    /// Whether readers are to look into the author's list, instead of getting a row.
    pulls: bool,
    /// How many follow the author, if that was read.
    followers: Option<ShardedCount>,
}

#[async_trait]
impl FanOut for FeedSpec {
    async fn piece(
        &self,
        generation: i64,
        of: FanOutTask<'_>,
        reading: &HandlerContext<'_>,
    ) -> Result<FanOutStep, HandlerError> {
        let jobs = self.jobs(of, reading).await?;
        let cx = FanOutContext { feed: self, generation, reading };
        let count = jobs.len();
        let scanned = if let FanOutTask::Row(row) = of { Some(row) } else { None };
        for (number, job) in (1..).zip(jobs) {
            let piece = match job {
                RecordTask::Post(change) => cx.post(change, scanned).await?,
                RecordTask::Edge(viewer, author) => cx.edge(viewer, author).await?,
            };
            if !piece.steps.is_empty() || !piece.is_last {
                return Ok(FanOutStep { is_last: piece.is_last && number == count, ..piece });
            }
        }
        Ok(FanOutStep::last(Vec::new()))
    }

    async fn bundle(
        &self,
        generation: i64,
        of: &[FanOutTask<'_>],
        reading: &HandlerContext<'_>,
    ) -> Result<Option<FanOutBatch>, HandlerError> {
        let cx = FanOutContext { feed: self, generation, reading };
        let (mut posts, mut room) = (Vec::new(), PlanCapacity::of(&cx));
        let (mut sources, oldest) = (HashSet::new(), self.oldest(reading.now));
        for matter in of {
            // Whatever is wrong with one that comes later is said when it is its turn.
            let Ok(jobs) = self.jobs(*matter, reading).await else { break };
            let Ok([RecordTask::Post(change)]) = <[RecordTask; 1]>::try_from(jobs) else { break };
            let shown = ShownPost::of(change.content.as_ref()).filter(|shown| shown.at >= oldest);
            let Some(shown) = shown.filter(|_| sources.insert(change.source.clone())) else { break };
            if !room.takes(&shown) {
                break;
            }
            posts.push((change, shown));
        }
        cx.bundle(&posts).await
    }
}

impl FeedSpec {
    async fn jobs(
        &self,
        of: FanOutTask<'_>,
        reading: &HandlerContext<'_>,
    ) -> Result<Vec<RecordTask>, HandlerError> {
        let record = match of {
            FanOutTask::Row(row) => return Ok(vec![RecordTask::Post(self.change_of(row))]),
            FanOutTask::Record(record) => record,
        };
        let mentions = vec![self.mentions(record).map_err(HandlerError::Never)?];
        let changes = changes_in(self, reading.store, reading.tenant, mentions).await?;
        let mut jobs: Vec<RecordTask> = changes.into_iter().flatten().map(RecordTask::Post).collect();
        let table = &self.relation.table;
        for row in FeedSpec::event_rows(record, &self.follows) {
            let ends = table.key_columns().iter().map(|end| key_column_in(table, row, end));
            let ends = ends
                .collect::<Result<Vec<_>, _>>()
                .map_err(|error| HandlerError::Never(error.to_string()))?;
            let Ok([viewer, author]) = <[Value; 2]>::try_from(ends) else {
                let why = bug!("the relation {table} has another key than a follower and an author");
                return Err(StoreError::from(why).into());
            };
            for end in [&viewer, &author] {
                fitting(std::slice::from_ref(end)).map_err(HandlerError::Never)?;
            }
            jobs.push(RecordTask::Edge(viewer, author));
        }
        Ok(jobs)
    }
}

/// A listing's refusal, where a handler's would be.
#[expect(clippy::needless_pass_by_value, reason = "it is what `map_err` gives")]
fn unable(refusal: Refusal) -> HandlerError {
    HandlerError::Later(StoreError::unavailable(refusal.to_string()))
}

/// Where a row stands in its list.
fn place(row: &Row) -> Result<(Time, String), StoreError> {
    Ok((row.get_time(CREATED_AT)?, post_in(row)?.to_json().to_string()))
}

/// The post of a row, in whose key it is.
fn post_in(row: &Row) -> Result<&Value, StoreError> {
    row.get(POST).ok_or_else(|| bug!("table {} has no column {POST}", row.table()).into())
}

/// One generation of a feed, at work for one tenant.
pub(super) struct FanOutContext<'f> {
    pub feed: &'f FeedSpec,
    pub generation: i64,
    pub reading: &'f HandlerContext<'f>,
}

impl FanOutContext<'_> {
    /// A key under the generation.
    pub(super) fn key<const N: usize>(&self, rest: [Value; N]) -> Vec<Value> {
        std::iter::once(self.generation.into()).chain(rest).collect()
    }

    async fn get<const N: usize>(
        &self,
        rows: [(&Arc<Table>, Vec<Value>); N],
    ) -> Result<[Option<Row>; N], HandlerError> {
        let addresses = rows
            .into_iter()
            .map(|(table, key)| Address::new(table, self.reading.tenant, key))
            .collect::<Result<Vec<_>, _>>()?;
        let mut found = self.reading.store.get(&addresses, Consistency::Strong).await?.into_iter();
        Ok(std::array::from_fn(|_| found.next().flatten()))
    }

    /// All rows of a partition from a time on.
    async fn rows_from(
        &self,
        table: &Arc<Table>,
        key: Vec<Value>,
        from: Time,
    ) -> Result<Vec<Row>, HandlerError> {
        let query = Query::table(table, self.reading.tenant, key)?.from(from)?;
        let (mut rows, mut cursor): (Vec<Row>, Option<Cursor>) = (Vec::new(), None);
        loop {
            let query = match cursor {
                Some(cursor) => query.clone().after(cursor)?,
                None => query.clone(),
            };
            let mut page = self.reading.store.query(&query).await?;
            rows.append(&mut page.rows);
            cursor = page.next;
            if cursor.is_none() {
                return Ok(rows);
            }
        }
    }

    /// A post's row in its author's list.
    pub(super) fn listed(&self, shown: &ShownPost, way: &str) -> (&Arc<Table>, Vec<Value>) {
        let key = self.key([shown.author.clone(), way.into(), shown.at.into(), shown.post.clone()]);
        (&self.feed.lists, key)
    }

    /// A post goes into its author's list, by a step on its row there.
    pub(super) fn enlist(&self, step: Step, shown: &ShownPost, order: i64) -> Step {
        step.set(PREVIEW, shown.preview.clone())
            .set(EXPIRES_AT, self.feed.end_of(shown.at))
            .set(SOURCE_ORDER, order)
    }

    fn row_key(&self, viewer: &Value, at: Time, post: &Value) -> Vec<Value> {
        self.key([viewer.clone(), at.into(), post.clone()])
    }

    /// A post goes into a reader's rows.
    fn put(&self, viewer: &Value, shown: &ShownPost) -> Step {
        self.shown_by(Step::upsert(&self.feed.rows, self.row_key(viewer, shown.at, &shown.post)), shown)
    }

    /// What a reader's row says, by a step on it.
    fn shown_by(&self, step: Step, shown: &ShownPost) -> Step {
        step.set(AUTHOR, shown.author.clone())
            .set(PREVIEW, shown.preview.clone())
            .set(EXPIRES_AT, self.feed.end_of(shown.at))
    }

    /// Demands that the edge is the one that was listed (F1).
    fn follows(&self, item: &ListItem, author: &Value) -> Step {
        let key = item.key.iter().cloned().chain([author.clone()]);
        Step::assert(&self.feed.relation.table, key).guard(column(relation::SINCE).eq(item.at))
    }

    // Posts.

    /// What is known of a post, and what is left to do for it. The two are not read at one moment: what is left of another
    /// version than is known is read again.
    async fn current_entry(&self, source: &[Value]) -> Result<(ProjectionEntry, Option<Row>), HandlerError> {
        for _ in 0..READS_MAX {
            let rows = [(&self.feed.entries, source.to_vec()), (&self.feed.work, source.to_vec())];
            let [entry, work] = self.get(rows).await?;
            let entry = ProjectionEntry::of(entry.as_ref())?;
            let order = work.as_ref().map(|row| row.get_int(SOURCE_ORDER)).transpose()?;
            if order.is_none_or(|order| order == entry.order) {
                return Ok((entry, work));
            }
        }
        Err(HandlerError::Later(StoreError::unavailable("a post changes all the time; it is tried again")))
    }

    /// The next piece of what a version of a post makes, of which a record tells, or whose row a scan has come to.
    async fn post(
        &self,
        mut change: SourceChange,
        scanned: Option<&Row>,
    ) -> Result<FanOutStep, HandlerError> {
        let feed = self.feed;
        let text = change.source.clone();
        let source = || self.key([text.as_str().into()]);
        let (entry, work) = self.current_entry(&source()).await?;
        if let Some(row) = scanned.filter(|_| entry.version > 0 && change.supersedes(entry.order)) {
            // The post that the scan has seen may have been erased since, and another one created, whose versions are lower.
            let found = self.reading.store.get(&[row.address()], Consistency::Strong).await?;
            // Of a post that is gone the log tells.
            let Some(row) = found.into_iter().next().flatten() else {
                return Ok(FanOutStep::last(Vec::new()));
            };
            change = feed.change_of(&row);
        }
        let is_known = !change.supersedes(entry.order);
        if let Some(row) = work {
            let piece = self.resume(&entry, &row).await?;
            return Ok(FanOutStep { is_last: piece.is_last && is_known, ..piece });
        }
        if is_known {
            return Ok(FanOutStep::last(Vec::new()));
        }
        let versions = self.versions(&entry, &change).await?;
        let mut steps = self.list_steps(&entry, &change, &versions);
        // What goes out in one plan does not pass what is under way (F4).
        let alone = || Step::assert_absent(&feed.work, source());
        let Some(work) = self.work_of(&versions, change.order, &mut steps).await? else {
            steps.push(alone());
            return Ok(FanOutStep::last(steps));
        };
        if let Some(rest) = self.batch(&work, versions.after.as_ref(), versions.followers).await? {
            steps.push(alone());
            steps.extend(rest);
            return Ok(FanOutStep::last(steps));
        }
        steps.push(work.written(Step::insert(&feed.work, source())));
        Ok(FanOutStep { steps, is_last: false })
    }

    /// A post as its entry has it and as it is now, with the way in which readers get to know of either.
    async fn versions(
        &self,
        entry: &ProjectionEntry,
        change: &SourceChange,
    ) -> Result<PostVersions, HandlerError> {
        let before = ShownPost::of(entry.content.as_ref());
        let oldest = self.feed.oldest(self.reading.now);
        let after = ShownPost::of(change.content.as_ref()).filter(|shown| shown.at >= oldest);
        let listed = match &before {
            Some(shown) => self.get([self.listed(shown, PUSH), self.listed(shown, PULL)]).await?,
            None => [None, None],
        };
        let way = listed.iter().flatten().next().map(|row| row.get_text(WAY)).transpose()?;
        let way = way.map(str::to_owned);
        let same_author = |shown: &ShownPost| before.as_ref().is_some_and(|old| old.author == shown.author);
        let mut followers = None;
        let pulls = match (&after, way.as_deref()) {
            (Some(shown), Some(way)) if same_author(shown) => way == PULL,
            (Some(shown), _) => {
                followers.insert(self.follower_count(&shown.author).await?).sum() > self.feed.pull_above
            }
            (None, _) => false,
        };
        Ok(PostVersions { before, after, way, pulls, followers })
    }

    /// The entry of a post, and its place in its author's list.
    fn list_steps(
        &self,
        entry: &ProjectionEntry,
        change: &SourceChange,
        versions: &PostVersions,
    ) -> Vec<Step> {
        let new_way = if versions.pulls { PULL } else { PUSH };
        let content = change.content.as_ref();
        let key = [self.generation.into(), change.source.as_str().into()];
        let mut steps = vec![entry_step(&self.feed.entries, key, entry.version, change.order, content)];
        if let (Some(shown), Some(way)) = (&versions.before, versions.way.as_deref()) {
            let stays =
                |after: &ShownPost| after.author == shown.author && after.at == shown.at && new_way == way;
            if !versions.after.as_ref().is_some_and(stays) {
                let (table, key) = self.listed(shown, way);
                steps.push(Step::remove(table, key));
            }
        }
        if let Some(shown) = &versions.after {
            let (table, key) = self.listed(shown, new_way);
            steps.push(self.enlist(Step::upsert(table, key), shown, change.order));
        }
        steps
    }

    /// What is left to do for the readers of a post.
    async fn work_of(
        &self,
        versions: &PostVersions,
        order: i64,
        steps: &mut Vec<Step>,
    ) -> Result<Option<PostWork>, HandlerError> {
        let PostVersions { before, after, way, pulls, .. } = versions;
        let post = before.as_ref().or(after.as_ref()).map(|shown| shown.post.clone());
        let Some(post) = post else { return Ok(None) };
        // Only what was pushed has to be taken back from readers.
        let was = before.as_ref().filter(|_| way.as_deref() == Some(PUSH));
        let was = was.map(|shown| PostLocation { author: shown.author.clone(), at: shown.at });
        let leaves =
            |was: &PostLocation| after.as_ref().is_none_or(|shown| *pulls || shown.author != was.author);
        Ok(match (was, &after) {
            (Some(was), _) if leaves(&was) => {
                Some(PostWork { post, order, phase: PostPhase::Retract, cursor: None, was: Some(was) })
            }
            (was, Some(shown)) if !*pulls => {
                let was = was.filter(|was| !shown.is_at(was));
                Some(PostWork { post, order, phase: PostPhase::Deliver, cursor: None, was })
            }
            (_, Some(shown)) => self.link(shown, post, order, steps).await?,
            (_, None) => None,
        })
    }

    async fn follower_count(&self, author: &Value) -> Result<ShardedCount, HandlerError> {
        let HandlerContext { store, tenant, .. } = *self.reading;
        let author = std::slice::from_ref(author);
        let shards = self.feed.relation.inward.sharded_count(store, tenant, author).await.map_err(unable)?;
        author.iter().for_each(|author| self.feed.remembered.counted(tenant, author, &shards));
        Ok(shards)
    }

    /// The work of telling readers to look into an author's list, unless all have been told.
    async fn link(
        &self,
        shown: &ShownPost,
        post: Value,
        order: i64,
        steps: &mut Vec<Step>,
    ) -> Result<Option<PostWork>, HandlerError> {
        let key = self.key([shown.author.clone()]);
        let [author] = self.get([(&self.feed.authors, key.clone())]).await?;
        match author.as_ref().map(|row| row.get_text(STATE)).transpose()? {
            Some(FULL) => return Ok(None),
            Some(_) => {}
            None => steps.push(Step::insert(&self.feed.authors, key).set(STATE, FILLING)),
        }
        Ok(Some(PostWork { post, order, phase: PostPhase::Link, cursor: None, was: None }))
    }

    /// Whether all readers of an author were told meanwhile, for another post. Once they are, they stay so.
    async fn is_full(&self, author: &Value) -> Result<bool, HandlerError> {
        let [author] = self.get([(&self.feed.authors, self.key([author.clone()]))]).await?;
        Ok(author.as_ref().map(|row| row.get_text(STATE)).transpose()? == Some(FULL))
    }

    /// All rows of a post, if they fit into the plan that makes it, with the demand that no follower is added or removed (F2). The count
    /// of its author's followers may have been read already.
    async fn batch(
        &self,
        work: &PostWork,
        shown: Option<&ShownPost>,
        shards: Option<ShardedCount>,
    ) -> Result<Option<Vec<Step>>, HandlerError> {
        // What is given after it was taken elsewhere, and what points, goes in pieces.
        let is_all = match work.phase {
            PostPhase::Retract => shown.is_none(),
            PostPhase::Deliver => true,
            PostPhase::Link => false,
        };
        // Where followers come and go all the time, no plan would ever find all of them unchanged; pieces ask for less.
        let is_calm = self.reading.refused < REFUSED_MAX;
        let Some(author) = work.author(shown).filter(|_| is_all && is_calm) else { return Ok(None) };
        // The count is read first: what comes between it and the list is refused as well.
        let shards = match shards.filter(|_| work.phase == PostPhase::Deliver) {
            Some(shards) => shards,
            None => self.follower_count(author).await?,
        };
        let room = STEPS_MAX.saturating_sub(shards.parts()) / work.steps_each();
        if usize::try_from(shards.sum()).is_ok_and(|followers| followers > room) {
            return Ok(None);
        }
        let (items, next) = self.followers(author, room.max(1), None).await?;
        if next.is_some() || items.len() > room {
            return Ok(None);
        }
        let rows = items.iter().flat_map(|item| self.steps_for(item, work, shown));
        Ok(Some(shards.unchanged().chain(rows).collect()))
    }

    pub(super) async fn followers(
        &self,
        author: &Value,
        limit: usize,
        cursor: Option<&str>,
    ) -> Result<(Vec<ListItem>, Option<Cursor>), HandlerError> {
        let HandlerContext { store, tenant, .. } = *self.reading;
        let author = std::slice::from_ref(author);
        self.feed.relation.inward.next(store, tenant, author, limit, cursor).await.map_err(unable)
    }

    /// A post goes to one reader for the first time, if they see it.
    pub(super) fn deliver(&self, item: &ListItem, shown: &ShownPost) -> Option<Step> {
        let viewer = item.key.first()?;
        let is_seen = shown.at >= self.oldest_for(item) && fitting(std::slice::from_ref(viewer)).is_ok();
        let key = || self.row_key(viewer, shown.at, &shown.post);
        is_seen.then(|| self.shown_by(Step::insert(&self.feed.rows, key()), shown))
    }

    /// What a post changes for one reader, without the demand that they follow.
    fn steps_for(&self, item: &ListItem, work: &PostWork, shown: Option<&ShownPost>) -> Vec<Step> {
        let Some(viewer) = item.key.first() else { return Vec::new() };
        // The records of a follow whose key does not fit are parked, so nothing would ever be taken away again.
        if fitting(std::slice::from_ref(viewer)).is_err() {
            return Vec::new();
        }
        let mut steps = Vec::new();
        if let (Some(was), PostPhase::Retract | PostPhase::Deliver) = (&work.was, work.phase) {
            steps.push(Step::remove(&self.feed.rows, self.row_key(viewer, was.at, &work.post)));
        }
        match (work.phase, shown) {
            (PostPhase::Deliver, Some(shown)) if shown.at >= self.oldest_for(item) => {
                steps.push(self.put(viewer, shown));
            }
            (PostPhase::Link, Some(shown)) => {
                let key = self.key([viewer.clone(), shown.author.clone()]);
                steps.push(Step::upsert(&self.feed.pulled, key).set(SINCE, item.at));
            }
            _ => {}
        }
        steps
    }

    fn oldest_for(&self, item: &ListItem) -> Time {
        self.feed.oldest_since(item.at, self.reading.now)
    }
}
