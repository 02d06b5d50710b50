//! A05 Derived projection, as a feed: for each reader the posts of those whom they follow, the newest first.
//!
//! ```text
//!   posts   ──► log ──► entry, and the author's list ──┬─► rows of each reader      (few followers: pushed)
//!                                                      └─► read with the feed        (many followers: pulled)
//!   follows ──► log ──► the rows of one reader that come from one author
//! ```
//!
//! **Truth.** Posts, an entity with an author and a time; follows, a relation from readers to authors. A reader's feed is
//! every active post of everybody whom they follow, that is not older than `keep`, nor older than their following by more
//! than `backfill`. Everything else here follows from that and can be thrown away; only `feed_cursor` is truth of its own.
//!
//! **Rows**, each of them under a generation ([`crate::infra::projection`]):
//! - `user_feed(viewer_id, created_at, post_id, author_id, post_preview, expires_at)`: what was pushed to readers.
//! - `user_feed_entries(source, source_order, …)`: what is known of each post.
//! - `user_feed_posts(author_id, way, created_at, post_id, …, source_order)`: the posts of an author, those that were pushed
//!   and those that are pulled apart from each other.
//! - `user_feed_pulled(viewer_id, author_id, since)`: from whom a reader's feed is pulled; `user_feed_authors(author_id,
//!   state)`: of which authors there are such rows.
//! - `user_feed_work(source, source_order, phase, cursor, …)`: how far a post has got that goes to more readers than fit into a plan.
//!
//! And without a generation `feed_cursor(viewer_id, last_seen_post_id, last_seen_created_at, last_seen_at, updated_at)`.
//!
//! **How a post goes out.** When it is first seen it is decided for good whether it is pushed or pulled, by the number of
//! followers then. So an author who crosses the line, either way, makes no work: old posts stay what they were. A pushed
//! post is put into the rows of each follower; a pulled one is only put into its author's list, and followers have a row
//! that says to look there.
//!
//! **Invariants.** Those of the pipeline, and:
//! - F1. A row is only there for a post that is, and for a reader who follows its author. *Guard of a row that is put for a
//!   post:* the edge is the one that was read, and the entry is (through `user_feed_work`, or by its version); *for a
//!   follow:* the edge's version, and `source_order` of the post in its author's list.
//! - F2. None is missing. *Followers are listed after the post has come into its author's list, and an author's list is read
//!   after the edge was made: the second reader sees the first write.* Where a post and all its rows are one plan, they are listed
//!   before; then that plan demands that no edge has come or gone (the rows of the relation's count are what they were).
//! - F3. What an edge has left is gone with it. *An unfollow compares the reader's own rows with the author's list, and takes
//!   away what is not wanted, whatever became of the posts meanwhile.*
//! - F4. A post goes out completely before the next version of it does. *While there is a row of work for it, a process that comes
//!   to the post finishes that first. Guard of every piece:* `source_order = the entry's that was read`; *of every piece but
//!   the last, so that one which was passed does not take the work back:* `version = the row's`. A row that is made anew
//!   begins with version 1 again, so that alone would not tell it from the one before. *A version that goes out in one plan
//!   demands that there is no such row, or no entry:* without an entry there is no work.
//! - F5. The cursor never goes back. *Guard:* `version = the one that was read`, and an older place changes nothing.
//! - F6. What is over is not shown. *A page begins at the oldest time that is kept;* rows beyond it are deleted in passing
//!   ([`sweep`]).
//!
//! **Failures.** *Stale projection*: the lag is known, and a page with `after`, the token of a write, waits for it. *Missing
//! entry*: F2, and the pipeline's I1. *Duplicate entry*: a row's key is the reader and the post's place; F4. *Tombstone not
//! propagated*: F1, F3; a deleted post keeps its order in its entry. *Expensive reindex after schema change*: another
//! definition is built beside the live one. *Stale ranking after source update*: a post whose time was changed leaves its
//! old place in the plan that puts it into the new one, reader by reader. One whose author was changed is taken from the
//! followers of the one before it is brought to those of the other: who follows both misses it for a moment.
//!
//! **Hotspots.** *Fanout on write*: `pull_above`; a post goes out in bounded pieces, and new ones with few followers share a
//! plan ([`bundle`]). *Projection lag*: partitions are shared
//! by processes. *Expensive ranking/recompute*: the order is the key's. *Rebuild cost*: posts that are over go nowhere.
//! *Query fanout across shards*: a page is one range read, those for who is pulled, and one for each of these, some at a time.

mod actions;
mod archetype;
mod batch;
mod fan_out;
mod read;
mod seen;
mod sweep;

pub use archetype::ARCHETYPE;

use std::ops::RangeInclusive;
use std::sync::Arc;
use std::sync::atomic::AtomicI64;
use std::time::Duration;

use serde_json::Value as Json;
use statehouse_store::table::{Column, TableBuilder};
use statehouse_store::{Bug, Record, Row, StoreError, Table, Time, Type, Value};

use self::batch::FollowerCache;
use self::sweep::FeedSweeper;
use super::relation::{self, RelationSpec};
use crate::blueprint::Thing;
use crate::declare::{Declare, ResourceSpec};
use crate::infra::projection::{
    EntryContent, EntryDelta, FanOut, GENERATION, Projector, SOURCE, SOURCE_ORDER, SourceChange,
    SourceMention, entries_table,
};
use crate::resource::{Resource, key_text};
use crate::view_source::{EventRow, SourceRows, ViewSource};

const VIEWER: &str = "viewer_id";
const AUTHOR: &str = "author_id";
const POST: &str = "post_id";
const PREVIEW: &str = "post_preview";
const CREATED_AT: &str = "created_at";
const EXPIRES_AT: &str = "expires_at";
/// Of an author's list: whether its posts were pushed or are pulled.
const WAY: &str = "way";
const PUSH: &str = "push";
const PULL: &str = "pull";
const SINCE: &str = "since";
const STATE: &str = "state";
const PHASE: &str = "phase";
const CURSOR: &str = "cursor";
const WAS_AUTHOR: &str = "was_author";
const WAS_AT: &str = "was_at";
const LAST_SEEN_POST: &str = "last_seen_post_id";
const LAST_SEEN_CREATED_AT: &str = "last_seen_created_at";
const LAST_SEEN_AT: &str = "last_seen_at";
const UPDATED_AT: &str = "updated_at";
const STATUS: &str = "status";
const ACTIVE: &str = "ACTIVE";

const TABLE_DEFAULT: &str = "user_feed";
const CURSORS_DEFAULT: &str = "feed_cursor";
const KEEP_DEFAULT: Duration = Duration::from_secs(30 * 86_400);
const PULL_ABOVE_DEFAULT: u32 = 10_000;
/// The bounds of `keep` and `backfill`.
const DURATIONS: RangeInclusive<Duration> =
    Duration::from_millis(1)..=Duration::from_secs(100 * 366 * 86_400);
/// Bytes of a key's text that fit into the keys of all rows.
const KEY_BYTES_MAX: usize = 200;
/// Letters of a preview.
const PREVIEW_LETTERS_MAX: usize = 280;

/// One declared feed.
#[derive(Debug)]
pub(super) struct FeedSpec {
    name: String,
    posts: String,
    follows: String,
    source: Arc<Table>,
    relation: RelationSpec,
    author: String,
    created: String,
    preview: Option<String>,
    keep: Duration,
    backfill: Duration,
    pull_above: i64,
    rows: Arc<Table>,
    entries: Arc<Table>,
    lists: Arc<Table>,
    pulled: Arc<Table>,
    authors: Arc<Table>,
    work: Arc<Table>,
    cursors: Arc<Table>,
    remembered: FollowerCache,
    /// The generation that a reader last found to be live; 0 before.
    last_live: AtomicI64,
}

/// Reads `[feed.NAME]`, over posts and follows that are declared elsewhere in the blueprint.
pub(crate) fn declare(cx: &mut Declare<'_>) -> Option<()> {
    let name = cx.name();
    let settings = cx.settings();
    let posts = settings.maybe_text("posts");
    let follows = settings.maybe_text("follows");
    let author = settings.text("author", AUTHOR);
    let created = settings.text("created", CREATED_AT);
    let preview = settings.maybe_text("preview");
    let keep = settings.duration("keep", KEEP_DEFAULT, DURATIONS);
    let backfill = settings.duration("backfill", keep, DURATIONS);
    let pull_above = i64::from(settings.count("pull_above", PULL_ABOVE_DEFAULT, 0..=u32::MAX));
    let table = settings.text("table", TABLE_DEFAULT);
    let cursors = settings.text("cursor_table", CURSORS_DEFAULT);
    for (setting, given, what, advice) in [
        ("posts", &posts, "whose rows are its posts", "name an entity: `posts = \"post\"`"),
        ("follows", &follows, "who follows whom", "name a relation: `follows = \"follow\"`"),
    ] {
        if given.is_none() {
            settings.problem_with_advice(setting, format!("`feed.{name}` does not say {what}"), advice);
        }
    }
    let (posts, follows) = (posts?, follows?);
    let found = sources(cx, &posts, &follows, [&author, &created], preview.as_deref())?;
    let FeedSources { source, relation, kinds } = found;
    let mut tables = Vec::new();
    for table in self::tables(&table, &cursors, kinds) {
        tables.push(cx.build_internal(table)?);
    }
    let [rows, entries, lists, pulled, authors, work, cursors] = tables.try_into().ok()?;
    let feed = Arc::new(FeedSpec {
        name: name.to_owned(),
        posts,
        follows,
        source,
        relation,
        author,
        created,
        preview,
        keep,
        backfill,
        pull_above,
        rows,
        entries,
        lists,
        pulled,
        authors,
        work,
        cursors,
        remembered: FollowerCache::default(),
        last_live: AtomicI64::new(0),
    });
    let key = vec![(VIEWER.to_owned(), kinds.viewer)];
    let resource =
        ResourceSpec::without_rows(name, key, ViewSource::derived()).events(&[("seen", &["seen"])]);
    let resource = feed.tables().iter().chain([&feed.cursors]).fold(resource, ResourceSpec::table);
    let resource = resource.actions(actions::actions(&feed)).worker(FeedSweeper::of(feed.clone()));
    cx.resource(resource.projection(feed));
    Some(())
}

/// What a feed is made of.
struct FeedSources {
    source: Arc<Table>,
    relation: RelationSpec,
    kinds: FeedKeyTypes,
}

/// The posts and the follows, or problems at the settings that name them.
fn sources(
    cx: &mut Declare<'_>,
    posts: &str,
    follows: &str,
    [author, created]: [&str; 2],
    preview: Option<&str>,
) -> Option<FeedSources> {
    let (blueprint, resources) = cx.others()?;
    let settings = cx.settings();
    let is_entity = |resource: &&Resource| resource.name == posts && resource.archetype.keyword() == "entity";
    let source = resources.iter().find(is_entity).and_then(|resource| resource.tables.first());
    settings.refuse_if(source.is_none(), "posts", format!("`{posts}` is not an entity"));
    let is_relation = |other: &&Thing| other.keyword == "relation" && other.name == follows;
    let relation = blueprint.things.iter().find(is_relation);
    // Problems of the relation itself are reported where it is declared.
    let mut elsewhere = blueprint.problems();
    let relation = relation.and_then(|thing| relation::declared(thing, &mut elsewhere));
    settings.refuse_if(relation.is_none(), "follows", format!("`{follows}` is not a relation"));
    let (source, relation) = (source?.clone(), relation?);
    let ([viewer], [to]) = (relation.from.as_slice(), relation.to.as_slice()) else {
        settings.problem("follows", format!("`{follows}` must lead from one column to one column"));
        return None;
    };
    let [post] = source.key_columns() else {
        settings.problem("posts", format!("the key of `{posts}` must be one column"));
        return None;
    };
    let columns = [("author", Some(author), to.kind), ("created", Some(created), Type::Time)];
    for (setting, name, kind) in columns.into_iter().chain([("preview", preview, Type::Text)]) {
        let Some(name) = name else { continue };
        match source.type_of(name) {
            Some(found) if found == kind => {}
            Some(found) => {
                settings.problem(setting, format!("`{name}` of `{posts}` is {found}; it must be {kind}"));
            }
            None => settings.problem(setting, format!("`{posts}` has no column `{name}`")),
        }
    }
    let kinds = FeedKeyTypes { viewer: viewer.kind, author: to.kind, post: post.kind };
    Some(FeedSources { source, relation, kinds })
}

/// The types of what names readers, authors and posts.
#[derive(Clone, Copy, Debug)]
struct FeedKeyTypes {
    viewer: Type,
    author: Type,
    post: Type,
}

fn tables(name: &str, cursors: &str, kinds: FeedKeyTypes) -> [TableBuilder; 7] {
    let FeedKeyTypes { viewer, author, post } = kinds;
    let named = |suffix: &str| Table::named(format!("{name}{suffix}")).partition(GENERATION, Type::Int);
    let shown = |table: TableBuilder| table.optional(PREVIEW, Type::Text).required(EXPIRES_AT, Type::Time);
    let rows = named("").partition(VIEWER, viewer).sort(CREATED_AT, Type::Time).sort(POST, post);
    let rows = shown(rows.required(AUTHOR, author));
    let entries = entries_table(&format!("{name}_entries"))
        .optional(POST, post)
        .optional(AUTHOR, author)
        .optional(CREATED_AT, Type::Time)
        .optional(PREVIEW, Type::Text);
    let lists = named("_posts").partition(AUTHOR, author).partition(WAY, Type::Text);
    let lists = shown(lists.sort(CREATED_AT, Type::Time).sort(POST, post)).required(SOURCE_ORDER, Type::Int);
    let pulled = named("_pulled").partition(VIEWER, viewer).sort(AUTHOR, author).required(SINCE, Type::Time);
    let authors = named("_authors").partition(AUTHOR, author).required(STATE, Type::Text);
    let work = named("_work")
        .partition(SOURCE, Type::Text)
        .required(POST, post)
        .required(SOURCE_ORDER, Type::Int)
        .required(PHASE, Type::Text)
        .optional(CURSOR, Type::Text)
        .optional(WAS_AUTHOR, author)
        .optional(WAS_AT, Type::Time);
    let cursors = Table::named(cursors)
        .partition(VIEWER, viewer)
        .required(LAST_SEEN_POST, post)
        .required(LAST_SEEN_CREATED_AT, Type::Time)
        .required(LAST_SEEN_AT, Type::Time)
        .required(UPDATED_AT, Type::Time);
    [rows, entries, lists, pulled, authors, work, cursors]
}

impl FeedSpec {
    /// The oldest time that is shown, and kept.
    fn oldest(&self, now: Time) -> Time {
        now.minus(self.keep).plus(Duration::from_micros(1))
    }

    /// Until when a post of that time is shown.
    fn end_of(&self, created: Time) -> Time {
        created.plus(self.keep)
    }

    /// The oldest time of a post that a reader sees who follows its author since then.
    fn oldest_since(&self, since: Time, now: Time) -> Time {
        self.oldest(now).max(since.minus(self.backfill))
    }

    /// What a post means whose columns are these.
    fn meaning(&self, get: &dyn Fn(&str) -> Value) -> Option<EntryContent> {
        let is_active = get(STATUS) == Value::from(ACTIVE);
        let (author, created) = (get(&self.author), get(&self.created));
        let post = self.source.key_columns().first().map(|column| get(&column.name))?;
        if !is_active || author.is_null() || created.is_null() || key_text([&author]).len() > KEY_BYTES_MAX {
            return None;
        }
        let preview = self.preview.as_deref().map(get);
        let short = |text: &str| Value::from(text.chars().take(PREVIEW_LETTERS_MAX).collect::<String>());
        let preview = preview.as_ref().and_then(Value::as_text).map(short);
        let mut content = EntryContent::from([
            (POST.to_owned(), post),
            (AUTHOR.to_owned(), author),
            (CREATED_AT.to_owned(), created),
        ]);
        content.extend(preview.map(|preview| (PREVIEW.to_owned(), preview)));
        Some(content)
    }

    fn source_key(&self, get: &dyn Fn(&str) -> Value) -> Result<String, String> {
        let key: Vec<Value> = self.source.key_columns().iter().map(|column| get(&column.name)).collect();
        fitting(&key)
    }

    /// The rows of a record that belong to a resource, as its events tell them.
    fn event_rows<'r>(
        record: &'r Record,
        resource: &'r str,
    ) -> impl Iterator<Item = &'r serde_json::Map<String, Json>> {
        let ours = move |name: &str| name.split('.').next() == Some(resource);
        let events = record.events.iter().filter(move |event| ours(&event.name));
        events.filter_map(|event| event.data.get("row")?.as_object())
    }
}

/// A key as text, if it fits into the keys of all rows.
fn fitting(key: &[Value]) -> Result<String, String> {
    let text = key_text(key);
    match text.len() {
        0..=KEY_BYTES_MAX => Ok(text),
        bytes => Err(format!("its key has {bytes} bytes; a feed takes up to {KEY_BYTES_MAX}")),
    }
}

/// A column of the key of a row in an event.
fn key_column_in(
    table: &Table,
    row: &serde_json::Map<String, Json>,
    column: &Column,
) -> Result<Value, StoreError> {
    let corrupt = |why: String| StoreError::corrupt(format!("an event about a row of {table}"), why);
    let json = row.get(&column.name).ok_or_else(|| corrupt(format!("it has no {}", column.name)))?;
    Value::from_json(json.clone(), column.kind).map_err(|why| corrupt(format!("{}: {why}", column.name)))
}

impl Projector for FeedSpec {
    fn name(&self) -> &str {
        &self.name
    }

    fn definition(&self) -> String {
        let FeedSpec { posts, follows, author, created, preview, keep, backfill, .. } = self;
        format!(
            "posts {posts} by {author} at {created} preview {} follows {follows} keep {keep:?} backfill {backfill:?}",
            preview.as_deref().unwrap_or("nothing"),
        )
    }

    fn source(&self) -> &Arc<Table> {
        &self.source
    }

    fn entries(&self) -> &Arc<Table> {
        &self.entries
    }

    fn tables(&self) -> Vec<Arc<Table>> {
        let tables = [&self.rows, &self.entries, &self.lists, &self.pulled, &self.authors, &self.work];
        tables.map(Arc::clone).to_vec()
    }

    fn truths(&self) -> Vec<Arc<Table>> {
        vec![self.source.clone(), self.relation.table.clone()]
    }

    fn wants(&self, record: &Record) -> bool {
        let names = [self.posts.as_str(), self.follows.as_str()];
        record
            .events
            .iter()
            .any(|event| event.name.split('.').next().is_some_and(|name| names.contains(&name)))
    }

    fn mentions(&self, record: &Record) -> Result<Vec<SourceMention>, String> {
        let source_rows = SourceRows::with_row(&self.posts, &self.source);
        let used = [STATUS, &self.author, &self.created].into_iter().chain(self.preview.as_deref());
        let mention = |row: EventRow<'_>| match row {
            EventRow::Whole(row, order) => {
                let get = |name: &str| source_rows.value(row, name);
                let (source, content) = (self.source_key(&get)?, self.meaning(&get));
                Ok(SourceMention::Change(SourceChange { source, order, content }))
            }
            EventRow::Partial(key, order) => {
                Ok(SourceMention::Partial { source: fitting(&key)?, key, order })
            }
            EventRow::Erased(key, version) => {
                Ok(SourceMention::Change(SourceChange::erased(fitting(&key)?, version)))
            }
        };
        source_rows.rows(record, &used.collect::<Vec<_>>()).into_iter().map(mention).collect()
    }

    fn change_of(&self, row: &Row) -> SourceChange {
        let get = |name: &str| row.get(name).cloned().unwrap_or(Value::Null);
        // What does not fit is no entry, here as in the log, where it is parked with the reason.
        let source = self.source_key(&get);
        let content = if source.is_ok() { self.meaning(&get) } else { None };
        SourceChange {
            source: source.unwrap_or_else(|_| "(too long)".to_owned()),
            order: row.version(),
            content,
        }
    }

    fn deltas(
        &self,
        _: i64,
        _: &str,
        _: Option<&EntryContent>,
        _: Option<&EntryContent>,
    ) -> Result<Vec<EntryDelta>, Bug> {
        Ok(Vec::new())
    }

    fn reach(&self) -> Option<&dyn FanOut> {
        Some(self)
    }
}

#[cfg(test)]
mod tests {
    use crate::Blueprint;
    use crate::resource::declare;

    const TRUTH: &str = r#"
[entity.post]
key    = { post_id = "int" }
fields = { author_id = "int", created_at = "time", body = "text?", title = "int?" }
[relation.follow]
from = { follower = "int" }
to   = { followed = "int" }
[relation.wide]
from = { a = "int", b = "int" }
to   = { c = "int" }
[feed.home]
"#;

    fn check(text: &str, expect: &str) {
        let blueprint = Blueprint::read("statehouse.toml", &format!("{TRUTH}{text}\n")).unwrap();
        let problems = declare(&blueprint).unwrap_err().render(false);
        assert!(problems.contains(expect), "{problems}");
    }

    #[test]
    fn declarations_are_checked() {
        let whole = "posts = \"post\"\nfollows = \"follow\"";
        check("follows = \"follow\"", "does not say whose rows are its posts");
        check("posts = \"post\"", "does not say who follows whom");
        check("posts = \"follow\"\nfollows = \"follow\"", "`follow` is not an entity");
        check("posts = \"post\"\nfollows = \"post\"", "`post` is not a relation");
        check("posts = \"post\"\nfollows = \"wide\"", "must lead from one column to one column");
        check(&format!("{whole}\nauthor = \"body\""), "`body` of `post` is text; it must be int");
        check(&format!("{whole}\ncreated = \"when\""), "`post` has no column `when`");
        check(&format!("{whole}\npreview = \"title\""), "`title` of `post` is int; it must be text");
        check(&format!("{whole}\nkeep = \"0s\""), "`keep` must be from 1ms");
        check(&format!("{whole}\npull_above = -1"), "`pull_above` must be from 0");
        check(&format!("{whole}\nkeeps = \"1d\""), "did you mean `keep`?");
    }
}
