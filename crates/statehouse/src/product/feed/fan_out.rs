//! From posts and edges to rows, one bounded plan at a time.
//!
//! ```text
//!   a post:   entry, author's list, all rows                     if they fit into one plan, and no edge moves meanwhile
//!             entry, author's list, work ──► rows, work ──► … ──► rows, no more work                        otherwise
//!   posts:    entries, authors' lists, all rows of several new ones     if they fit into one plan, and no edge moves meanwhile
//!   an edge:  what the reader has of the author, against what the author's list says: the difference, some at a time
//! ```

use std::collections::{BTreeMap, HashSet};
use std::sync::Arc;

use async_trait::async_trait;
use statehouse_store::guard::column;
use statehouse_store::{
    Address, Consistency, Cursor, Guard, Query, Row, Step, StoreError, Table, Time, Value,
};

use super::bundle::Room;
use super::{
    AUTHOR, CREATED_AT, CURSOR, EXPIRES_AT, Feed, PHASE, POST, PREVIEW, PULL, PUSH, SINCE, STATE, WAS_AT,
    WAS_AUTHOR, WAY, column_in, fitting,
};
use crate::action::Refusal;
use crate::infra::log::{Reading, Unable};
use crate::infra::projection::{
    Bundle, Change, Content, Entry, Matter, Piece, Projector, Reach, SOURCE_ORDER, changes_in, entry_step,
};
use crate::product::listing::{Item, Tally};
use crate::product::relation;

/// Steps of a plan that are left for rows of readers, beside progress, entry, author's list and work.
const STEPS_MAX: usize = 90;
/// Differences that one plan for an edge settles; each is two steps at most.
const DIFFERENCES_MAX: usize = STEPS_MAX / 2;

/// How often a post is read that changes meanwhile.
const READS_MAX: u32 = 8;

/// How often a post is refused that goes out in one plan, before it goes out in pieces.
const REFUSED_MAX: u32 = 2;

/// What is going on with a post.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Phase {
    /// Readers lose it at the place where it was.
    Take,
    /// Readers get it, and lose it at the place where it was, if it is by the same author.
    Give,
    /// Readers are told to look into the author's list.
    Point,
}

impl Phase {
    const ALL: [Phase; 3] = [Phase::Take, Phase::Give, Phase::Point];

    fn name(self) -> &'static str {
        match self {
            Phase::Take => "TAKE",
            Phase::Give => "GIVE",
            Phase::Point => "POINT",
        }
    }
}

/// Some readers have no row yet that points to the author; or all have who follow.
const FILLING: &str = "FILLING";
const FULL: &str = "FULL";

/// A post where it is shown.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Shown {
    pub post: Value,
    pub author: Value,
    pub at: Time,
    pub preview: Value,
}

impl Shown {
    fn of(content: Option<&Content>) -> Option<Shown> {
        let content = content?;
        let at = content.get(CREATED_AT).and_then(Value::as_time)?;
        let (post, author) = (content.get(POST)?.clone(), content.get(AUTHOR)?.clone());
        Some(Shown { post, author, at, preview: content.get(PREVIEW).cloned().unwrap_or(Value::Null) })
    }

    fn is_at(&self, place: &Place) -> bool {
        self.author == place.author && self.at == place.at
    }
}

/// Where a post is, or was.
#[derive(Clone, Debug, PartialEq)]
struct Place {
    author: Value,
    at: Time,
}

/// What is left to do for a version of a post.
#[derive(Clone, Debug)]
struct Work {
    post: Value,
    order: i64,
    phase: Phase,
    cursor: Option<String>,
    /// Where readers had it before.
    was: Option<Place>,
}

impl Work {
    fn of(row: &Row) -> Option<Work> {
        let phase = row.text(PHASE)?;
        let was = row.time(WAS_AT).zip(row.get(WAS_AUTHOR).filter(|author| !author.is_null()));
        Some(Work {
            post: row.get(POST)?.clone(),
            order: row.int(SOURCE_ORDER)?,
            phase: Phase::ALL.into_iter().find(|known| known.name() == phase)?,
            cursor: row.text(CURSOR).map(str::to_owned),
            was: was.map(|(at, author)| Place { author: author.clone(), at }),
        })
    }

    fn written(&self, step: Step) -> Step {
        let null = || Value::Null;
        let (author, at) = match &self.was {
            Some(was) => (was.author.clone(), was.at.into()),
            None => (null(), null()),
        };
        step.set(POST, self.post.clone())
            .set(SOURCE_ORDER, self.order)
            .set(PHASE, self.phase.name())
            .set(CURSOR, self.cursor.as_deref().map_or_else(null, Value::from))
            .set(WAS_AUTHOR, author)
            .set(WAS_AT, at)
    }

    /// The author whose followers it goes to.
    fn author<'w>(&'w self, shown: Option<&'w Shown>) -> Option<&'w Value> {
        match self.phase {
            Phase::Take => self.was.as_ref().map(|was| &was.author),
            Phase::Give | Phase::Point => shown.map(|shown| &shown.author),
        }
    }

    /// Steps for each reader, besides the one that demands the edge.
    fn steps_each(&self) -> usize {
        1 + usize::from(self.phase == Phase::Give && self.was.is_some())
    }
}

/// Something in a record.
enum Job {
    Post(Change),
    Edge(Value, Value),
}

#[async_trait]
impl Reach for Feed {
    async fn piece(&self, generation: i64, of: Matter<'_>, reading: &Reading<'_>) -> Result<Piece, Unable> {
        let jobs = self.jobs(of, reading).await?;
        let desk = Desk { feed: self, generation, reading };
        let count = jobs.len();
        for (number, job) in (1..).zip(jobs) {
            let piece = match job {
                Job::Post(change) => desk.post(&change).await?,
                Job::Edge(viewer, author) => desk.edge(viewer, author).await?,
            };
            if !piece.steps.is_empty() || !piece.is_last {
                return Ok(Piece { is_last: piece.is_last && number == count, ..piece });
            }
        }
        Ok(Piece::last(Vec::new()))
    }

    async fn bundle(
        &self,
        generation: i64,
        of: &[Matter<'_>],
        reading: &Reading<'_>,
    ) -> Result<Option<Bundle>, Unable> {
        let desk = Desk { feed: self, generation, reading };
        let (mut posts, mut room) = (Vec::new(), Room::of(&desk));
        let (mut sources, oldest) = (HashSet::new(), self.oldest(reading.now));
        for matter in of {
            // Whatever is wrong with one that comes later is said when it is its turn.
            let Ok(jobs) = self.jobs(*matter, reading).await else { break };
            let Ok([Job::Post(change)]) = <[Job; 1]>::try_from(jobs) else { break };
            let shown = Shown::of(change.content.as_ref()).filter(|shown| shown.at >= oldest);
            let Some(shown) = shown.filter(|_| sources.insert(change.source.clone())) else { break };
            if !room.takes(&shown) {
                break;
            }
            posts.push((change, shown));
        }
        desk.bundle(&posts).await
    }
}

impl Feed {
    async fn jobs(&self, of: Matter<'_>, reading: &Reading<'_>) -> Result<Vec<Job>, Unable> {
        let record = match of {
            Matter::Row(row) => return Ok(vec![Job::Post(self.change_of(row))]),
            Matter::Record(record) => record,
        };
        let mentions = vec![self.mentions(record).map_err(Unable::Never)?];
        let changes = changes_in(self, reading.store, reading.tenant, mentions).await?;
        let mut jobs: Vec<Job> = changes.into_iter().flatten().map(Job::Post).collect();
        let table = &self.relation.table;
        for row in Feed::told(record, &self.follows) {
            let mut ends = table.key_columns().iter().map(|end| column_in(table, row, &end.name));
            let (Some(viewer), Some(author)) = (ends.next(), ends.next()) else { continue };
            for end in [&viewer, &author] {
                fitting(std::slice::from_ref(end)).map_err(Unable::Never)?;
            }
            jobs.push(Job::Edge(viewer, author));
        }
        Ok(jobs)
    }
}

/// A listing's refusal, where a handler's would be.
#[expect(clippy::needless_pass_by_value, reason = "it is what `map_err` gives")]
fn unable(refusal: Refusal) -> Unable {
    Unable::Later(StoreError::unavailable(refusal.to_string()))
}

/// Where a row stands in its list.
fn place(row: &Row) -> (Time, String) {
    let post = row.get(POST).map(|post| post.to_json().to_string()).unwrap_or_default();
    (row.time(CREATED_AT).unwrap_or(Time::MIN), post)
}

/// One generation of a feed, at work for one tenant.
pub(super) struct Desk<'f> {
    pub feed: &'f Feed,
    pub generation: i64,
    pub reading: &'f Reading<'f>,
}

impl Desk<'_> {
    /// A key under the generation.
    pub(super) fn key<const N: usize>(&self, rest: [Value; N]) -> Vec<Value> {
        std::iter::once(self.generation.into()).chain(rest).collect()
    }

    async fn get<const N: usize>(
        &self,
        rows: [(&Arc<Table>, Vec<Value>); N],
    ) -> Result<[Option<Row>; N], Unable> {
        let addresses = rows
            .into_iter()
            .map(|(table, key)| Address::new(table, self.reading.tenant, key))
            .collect::<Result<Vec<_>, _>>()?;
        let mut found = self.reading.store.get(&addresses, Consistency::Strong).await?.into_iter();
        Ok(std::array::from_fn(|_| found.next().flatten()))
    }

    /// All rows of a partition from a time on.
    async fn rows_from(&self, table: &Arc<Table>, key: Vec<Value>, from: Time) -> Result<Vec<Row>, Unable> {
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
    pub(super) fn listed(&self, shown: &Shown, way: &str) -> (&Arc<Table>, Vec<Value>) {
        let key = self.key([shown.author.clone(), way.into(), shown.at.into(), shown.post.clone()]);
        (&self.feed.lists, key)
    }

    /// A post goes into its author's list, by a step on its row there.
    pub(super) fn enlist(&self, step: Step, shown: &Shown, order: i64) -> Step {
        step.set(PREVIEW, shown.preview.clone())
            .set(EXPIRES_AT, self.feed.end_of(shown.at))
            .set(SOURCE_ORDER, order)
    }

    fn row_key(&self, viewer: &Value, at: Time, post: &Value) -> Vec<Value> {
        self.key([viewer.clone(), at.into(), post.clone()])
    }

    /// A post goes into a reader's rows.
    fn put(&self, viewer: &Value, shown: &Shown) -> Step {
        self.shown_by(Step::upsert(&self.feed.rows, self.row_key(viewer, shown.at, &shown.post)), shown)
    }

    /// What a reader's row says, by a step on it.
    fn shown_by(&self, step: Step, shown: &Shown) -> Step {
        step.set(AUTHOR, shown.author.clone())
            .set(PREVIEW, shown.preview.clone())
            .set(EXPIRES_AT, self.feed.end_of(shown.at))
    }

    /// Demands that the edge is the one that was listed (F1).
    fn follows(&self, item: &Item, author: &Value) -> Step {
        let key = item.key.iter().cloned().chain([author.clone()]);
        Step::assert(&self.feed.relation.table, key).guard(column(relation::SINCE).eq(item.at))
    }

    // Posts.

    /// What is known of a post, and what is left to do for it. The two are not read at one moment: what is left of another
    /// version than is known is read again.
    async fn standing(&self, source: &[Value]) -> Result<(Entry, Option<Row>), Unable> {
        for _ in 0..READS_MAX {
            let rows = [(&self.feed.entries, source.to_vec()), (&self.feed.work, source.to_vec())];
            let [entry, work] = self.get(rows).await?;
            let entry = Entry::of(entry.as_ref());
            if work.as_ref().is_none_or(|row| row.int(SOURCE_ORDER) == Some(entry.order)) {
                return Ok((entry, work));
            }
        }
        Err(Unable::Later(StoreError::unavailable("a post changes all the time; it is tried again")))
    }

    /// The next piece of what a version of a post makes.
    async fn post(&self, change: &Change) -> Result<Piece, Unable> {
        let feed = self.feed;
        let source = || self.key([change.source.as_str().into()]);
        let (entry, work) = self.standing(&source()).await?;
        let is_known = change.order <= entry.order;
        if let Some(row) = work {
            let piece = self.go_on(&entry, &row).await?;
            return Ok(Piece { is_last: piece.is_last && is_known, ..piece });
        }
        if is_known {
            return Ok(Piece::last(Vec::new()));
        }
        let before = Shown::of(entry.content.as_ref());
        let oldest = feed.oldest(self.reading.now);
        let after = Shown::of(change.content.as_ref()).filter(|shown| shown.at >= oldest);
        let listed = match &before {
            Some(shown) => self.get([self.listed(shown, PUSH), self.listed(shown, PULL)]).await?,
            None => [None, None],
        };
        let way = listed.iter().flatten().next().and_then(|row| row.text(WAY)).map(str::to_owned);
        // Only what was pushed has to be taken back from readers.
        let was = before.as_ref().filter(|_| way.as_deref() == Some(PUSH));
        let was = was.map(|shown| Place { author: shown.author.clone(), at: shown.at });
        let same_author = |shown: &Shown| before.as_ref().is_some_and(|old| old.author == shown.author);
        let mut tally = None;
        let pulls = match (&after, way.as_deref()) {
            (Some(shown), Some(way)) if same_author(shown) => way == PULL,
            (Some(shown), _) => tally.insert(self.tally(&shown.author).await?).sum() > feed.pull_above,
            (None, _) => false,
        };
        let new_way = if pulls { PULL } else { PUSH };
        let content = change.content.as_ref();
        let key = [self.generation.into(), change.source.as_str().into()];
        let mut steps = vec![entry_step(&feed.entries, key, entry.version, change.order, content)];
        if let (Some(shown), Some(way)) = (&before, way.as_deref()) {
            let stays =
                |after: &Shown| after.author == shown.author && after.at == shown.at && new_way == way;
            if !after.as_ref().is_some_and(stays) {
                let (table, key) = self.listed(shown, way);
                steps.push(Step::remove(table, key));
            }
        }
        if let Some(shown) = &after {
            let (table, key) = self.listed(shown, new_way);
            steps.push(self.enlist(Step::upsert(table, key), shown, change.order));
        }
        // What goes out in one plan does not pass what is under way (F4).
        let alone = || Step::assert_absent(&feed.work, source());
        let order = change.order;
        let post = before.as_ref().or(after.as_ref()).map(|shown| shown.post.clone());
        let Some(post) = post else {
            steps.push(alone());
            return Ok(Piece::last(steps));
        };
        let leaves = |was: &Place| after.as_ref().is_none_or(|shown| pulls || shown.author != was.author);
        let work = match (was, &after) {
            (Some(was), _) if leaves(&was) => {
                Some(Work { post, order, phase: Phase::Take, cursor: None, was: Some(was) })
            }
            (was, Some(shown)) if !pulls => {
                let was = was.filter(|was| !shown.is_at(was));
                Some(Work { post, order, phase: Phase::Give, cursor: None, was })
            }
            (_, Some(shown)) => self.point(shown, post, order, &mut steps).await?,
            (_, None) => None,
        };
        let Some(work) = work else {
            steps.push(alone());
            return Ok(Piece::last(steps));
        };
        if let Some(rest) = self.at_once(&work, after.as_ref(), tally).await? {
            steps.push(alone());
            steps.extend(rest);
            return Ok(Piece::last(steps));
        }
        steps.push(work.written(Step::insert(&feed.work, source())));
        Ok(Piece { steps, is_last: false })
    }

    async fn tally(&self, author: &Value) -> Result<Tally, Unable> {
        let Reading { store, tenant, .. } = *self.reading;
        let author = std::slice::from_ref(author);
        let tally = self.feed.relation.inward.tally(store, tenant, author).await.map_err(unable)?;
        author.iter().for_each(|author| self.feed.remembered.counted(tenant, author, &tally));
        Ok(tally)
    }

    /// The work of telling readers to look into an author's list, unless all have been told.
    async fn point(
        &self,
        shown: &Shown,
        post: Value,
        order: i64,
        steps: &mut Vec<Step>,
    ) -> Result<Option<Work>, Unable> {
        let key = self.key([shown.author.clone()]);
        let [author] = self.get([(&self.feed.authors, key.clone())]).await?;
        match author.as_ref().and_then(|row| row.text(STATE)) {
            Some(FULL) => return Ok(None),
            Some(_) => {}
            None => steps.push(Step::insert(&self.feed.authors, key).set(STATE, FILLING)),
        }
        Ok(Some(Work { post, order, phase: Phase::Point, cursor: None, was: None }))
    }

    /// Whether all readers of an author were told meanwhile, for another post. Once they are, they stay so.
    async fn is_full(&self, author: &Value) -> Result<bool, Unable> {
        let [author] = self.get([(&self.feed.authors, self.key([author.clone()]))]).await?;
        Ok(author.is_some_and(|row| row.text(STATE) == Some(FULL)))
    }

    /// All rows of a post, if they fit into the plan that makes it, with the demand that nobody comes or goes (F2). The count
    /// of its author's followers may have been read already.
    async fn at_once(
        &self,
        work: &Work,
        shown: Option<&Shown>,
        tally: Option<Tally>,
    ) -> Result<Option<Vec<Step>>, Unable> {
        // What is given after it was taken elsewhere, and what points, goes in pieces.
        let is_all = match work.phase {
            Phase::Take => shown.is_none(),
            Phase::Give => true,
            Phase::Point => false,
        };
        // Where followers come and go all the time, no plan would ever find all of them unchanged; pieces ask for less.
        let is_calm = self.reading.refused < REFUSED_MAX;
        let Some(author) = work.author(shown).filter(|_| is_all && is_calm) else { return Ok(None) };
        // The count is read first: what comes between it and the list is refused as well.
        let tally = match tally.filter(|_| work.phase == Phase::Give) {
            Some(tally) => tally,
            None => self.tally(author).await?,
        };
        let room = STEPS_MAX.saturating_sub(tally.parts()) / work.steps_each();
        if usize::try_from(tally.sum()).is_ok_and(|followers| followers > room) {
            return Ok(None);
        }
        let (items, next) = self.followers(author, room.max(1), None).await?;
        if next.is_some() || items.len() > room {
            return Ok(None);
        }
        let rows = items.iter().flat_map(|item| self.steps_for(item, work, shown));
        Ok(Some(tally.unchanged().chain(rows).collect()))
    }

    pub(super) async fn followers(
        &self,
        author: &Value,
        limit: usize,
        cursor: Option<&str>,
    ) -> Result<(Vec<Item>, Option<Cursor>), Unable> {
        let Reading { store, tenant, .. } = *self.reading;
        let author = std::slice::from_ref(author);
        self.feed.relation.inward.next(store, tenant, author, limit, cursor).await.map_err(unable)
    }

    /// A post goes to one reader for the first time, if they see it.
    pub(super) fn give(&self, item: &Item, shown: &Shown) -> Option<Step> {
        let viewer = item.key.first()?;
        let is_seen = shown.at >= self.oldest_for(item) && fitting(std::slice::from_ref(viewer)).is_ok();
        let key = || self.row_key(viewer, shown.at, &shown.post);
        is_seen.then(|| self.shown_by(Step::insert(&self.feed.rows, key()), shown))
    }

    /// What a post changes for one reader, without the demand that they follow.
    fn steps_for(&self, item: &Item, work: &Work, shown: Option<&Shown>) -> Vec<Step> {
        let Some(viewer) = item.key.first() else { return Vec::new() };
        // The records of a follow whose key does not fit are parked, so nothing would ever be taken away again.
        if fitting(std::slice::from_ref(viewer)).is_err() {
            return Vec::new();
        }
        let mut steps = Vec::new();
        if let (Some(was), Phase::Take | Phase::Give) = (&work.was, work.phase) {
            steps.push(Step::remove(&self.feed.rows, self.row_key(viewer, was.at, &work.post)));
        }
        match (work.phase, shown) {
            (Phase::Give, Some(shown)) if shown.at >= self.oldest_for(item) => {
                steps.push(self.put(viewer, shown));
            }
            (Phase::Point, Some(shown)) => {
                let key = self.key([viewer.clone(), shown.author.clone()]);
                steps.push(Step::upsert(&self.feed.pulled, key).set(SINCE, item.at));
            }
            _ => {}
        }
        steps
    }

    fn oldest_for(&self, item: &Item) -> Time {
        self.feed.oldest_since(item.at, self.reading.now)
    }

    /// The next piece of work that is under way (F4).
    async fn go_on(&self, entry: &Entry, row: &Row) -> Result<Piece, Unable> {
        let feed = self.feed;
        let same = || column(SOURCE_ORDER).eq(entry.order);
        let done = || Step::delete(&feed.work, row.key().to_vec()).guard(same());
        let shown = Shown::of(entry.content.as_ref());
        let work = Work::of(row).and_then(|work| Some((work.author(shown.as_ref())?.clone(), work)));
        let Some((author, work)) = work else { return Ok(Piece::last(vec![done()])) };
        if work.phase == Phase::Point && self.is_full(&author).await? {
            return Ok(Piece::last(vec![done()]));
        }
        // One more step for each reader demands the edge. What is taken away is taken from whoever is listed.
        let each = work.steps_each() + usize::from(work.phase != Phase::Take);
        let (items, next) = self.followers(&author, STEPS_MAX / each, work.cursor.as_deref()).await?;
        let mut steps = Vec::new();
        for item in &items {
            let for_reader = self.steps_for(item, &work, shown.as_ref());
            if work.phase != Phase::Take && !for_reader.is_empty() {
                steps.push(self.follows(item, &author));
            }
            steps.extend(for_reader);
        }
        let then = match next {
            Some(cursor) => Some(Work { cursor: Some(cursor.to_string()), ..work }),
            None => self.after(&work, shown.as_ref(), &mut steps).await?,
        };
        let is_last = then.is_none();
        steps.push(match then {
            None => done(),
            Some(then) => {
                let step = Step::update(&feed.work, row.key().to_vec());
                // A piece that was passed would take the work back; the last one has nothing behind it.
                then.written(step.guard(Guard::version(row.version())).guard(same()))
            }
        });
        Ok(Piece { steps, is_last })
    }

    /// What comes after a phase is done.
    async fn after(
        &self,
        work: &Work,
        shown: Option<&Shown>,
        steps: &mut Vec<Step>,
    ) -> Result<Option<Work>, Unable> {
        let Some(shown) = shown else { return Ok(None) };
        match work.phase {
            Phase::Give => Ok(None),
            Phase::Point => {
                let key = self.key([shown.author.clone()]);
                steps.push(Step::upsert(&self.feed.authors, key).set(STATE, FULL));
                Ok(None)
            }
            Phase::Take => {
                let [pushed, pulled] = self.get([self.listed(shown, PUSH), self.listed(shown, PULL)]).await?;
                let (post, order) = (work.post.clone(), work.order);
                if pushed.is_some() {
                    return Ok(Some(Work { post, order, phase: Phase::Give, cursor: None, was: None }));
                }
                if pulled.is_some() { self.point(shown, post, order, steps).await } else { Ok(None) }
            }
        }
    }

    // Edges.

    /// What a reader has of these posts of an author.
    async fn had_of(
        &self,
        viewer: &Value,
        author: &Value,
        wanted: &[Row],
    ) -> Result<BTreeMap<(Time, String), Row>, Unable> {
        let mut addresses = Vec::with_capacity(wanted.len());
        for row in wanted {
            let (Some(at), Some(post)) = (row.time(CREATED_AT), row.get(POST)) else { continue };
            let key = self.row_key(viewer, at, post);
            addresses.push(Address::new(&self.feed.rows, self.reading.tenant, key)?);
        }
        if addresses.is_empty() {
            return Ok(BTreeMap::new());
        }
        let rows = self.reading.store.get(&addresses, Consistency::Strong).await?;
        let of_author = rows.into_iter().flatten().filter(|row| row.get(AUTHOR) == Some(author));
        Ok(of_author.map(|row| (place(&row), row)).collect())
    }

    /// The next piece of the difference between what a reader has of an author and what is wanted (F2, F3).
    async fn edge(&self, viewer: Value, author: Value) -> Result<Piece, Unable> {
        let feed = self.feed;
        let edges = &feed.relation.table;
        let edge_key = vec![viewer.clone(), author.clone()];
        let pulled_key = self.key([viewer.clone(), author.clone()]);
        let [edge, pulls, pulled] = self
            .get([
                (edges, edge_key.clone()),
                (&feed.authors, self.key([author.clone()])),
                (&feed.pulled, pulled_key.clone()),
            ])
            .await?;
        let since = edge.as_ref().and_then(|row| row.time(relation::SINCE));
        let mut steps = vec![match &edge {
            Some(row) => Step::assert(edges, edge_key).guard(Guard::version(row.version())),
            None => Step::assert_absent(edges, edge_key),
        }];
        match (since.filter(|_| pulls.is_some()), &pulled) {
            (Some(since), Some(row)) if row.time(SINCE) == Some(since) => {}
            (Some(since), _) => steps.push(Step::upsert(&feed.pulled, pulled_key).set(SINCE, since)),
            (None, Some(_)) => steps.push(Step::remove(&feed.pulled, pulled_key)),
            (None, None) => {}
        }
        let oldest = since.map(|since| feed.oldest_since(since, self.reading.now));
        let list = self.key([author.clone(), PUSH.into()]);
        // An edge that was never there before has left nothing, so a few posts need no look at what there is.
        let mut wanted = match oldest.filter(|_| edge.as_ref().is_some_and(|row| row.version() == 1)) {
            Some(oldest) => Some(self.rows_from(&feed.lists, list.clone(), oldest).await?),
            None => None,
        };
        wanted = wanted.filter(|rows| rows.len() <= DIFFERENCES_MAX);
        let mut had = BTreeMap::new();
        if let Some(wanted) = &wanted {
            // What is there of them already is no difference any more: a record may have more to do after this.
            had = self.had_of(&viewer, &author, wanted).await?;
        } else {
            // What there is is read first: of what comes meanwhile, only what is wanted is seen.
            let rows = self.rows_from(&feed.rows, self.key([viewer.clone()]), Time::MIN).await?;
            let of_author = rows.into_iter().filter(|row| row.get(AUTHOR) == Some(&author));
            had.extend(of_author.map(|row| (place(&row), row)));
        }
        let wanted = match (wanted, oldest) {
            (Some(wanted), _) => wanted,
            (None, Some(oldest)) => self.rows_from(&feed.lists, list.clone(), oldest).await?,
            (None, None) => Vec::new(),
        };
        let mut differences: Vec<Vec<Step>> = Vec::new();
        for row in &wanted {
            let has = had.remove(&place(row));
            let preview = row.get(PREVIEW).cloned().unwrap_or(Value::Null);
            if has.is_some_and(|has: Row| has.get(PREVIEW) == Some(&preview)) {
                continue;
            }
            let (Some(at), Some(post)) = (row.time(CREATED_AT), row.get(POST)) else { continue };
            let shown = Shown { post: post.clone(), author: author.clone(), at, preview };
            let order = row.int(SOURCE_ORDER).unwrap_or(0);
            let listed = Step::assert(&feed.lists, row.key().to_vec()).guard(column(SOURCE_ORDER).eq(order));
            differences.push(vec![listed, self.put(&viewer, &shown)]);
        }
        for ((at, _), row) in &had {
            // Another author's post may have come to the very same place.
            let same = column(AUTHOR).eq(author.clone());
            let mut steps = vec![Step::remove(&feed.rows, row.key().to_vec()).guard(same)];
            // And the post itself may have come back, to somebody who still follows.
            if oldest.is_some_and(|oldest| *at >= oldest) {
                let behind = row.key().iter().skip(2).cloned();
                steps.push(Step::assert_absent(&feed.lists, list.iter().cloned().chain(behind)));
            }
            differences.push(steps);
        }
        let is_last = differences.len() <= DIFFERENCES_MAX;
        steps.extend(differences.into_iter().take(DIFFERENCES_MAX).flatten());
        // The demand alone changes nothing.
        if steps.len() == 1 {
            steps.clear();
        }
        Ok(Piece { steps, is_last })
    }
}
