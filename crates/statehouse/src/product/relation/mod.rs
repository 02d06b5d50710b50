//! A02 Relation, edge: a user follows another, likes a post, has blocked a user. An edge exists or does not.
//!
//! ```text
//!             add                       remove
//!   (none) ─────────► THERE ───────────────────────► GONE (a tombstone)
//!                      │ ▲ ▲                           │
//!      add, with other └─┘ └───────────────────────────┘
//!          fields                      add
//! ```
//!
//! **Rows.** The truth: `follows(tenant, from…, to…, fields…, since, out_bucket, in_bucket, updated_at, version)`. An edge is
//! there while `since` is set; the row of one that was removed stays, so that its version never starts again. Beside it,
//! one list for each end ([`super::listing`]): `follows_out(tenant, from…, bucket, at, to…)` and
//! `follows_in(tenant, to…, bucket, at, from…)`, each with its `_count`. Row, lists and counts change in one plan.
//!
//! **Invariants.**
//! - I1. There is at most one edge for each pair. *The pair is the key.*
//! - I2. An edge that is there stands once in either list and is counted once at either end, and one that is not there,
//!   nowhere. *Guard of an add that makes it:* `since is null`; *of a remove, which has to know where it stands:*
//!   `since = the one that was read`; *of either under a version that the caller has seen:* `version = that one`.
//! - I3. The last intent wins, in the order in which the row takes them. *Both guards are on one row; the call that lost is prepared
//!   anew, on what the row is then.*
//! - I4. A write that would change nothing writes nothing: neither adding what is there nor removing what is not.
//! - I5. A repetition under its operation id changes nothing, also if the edge was removed in between. *The house's H3.*
//!
//! **Failures.** *Duplicate edge creation on retry*: I1 and I4, I5 for a late one. *Add/remove race*: I3. *Count projection
//! lag*: there is none, counts change in the plan of the edge (I2). *Stale relation list cache*: lists are read strongly,
//! and what they name is looked up before it is shown.
//!
//! **Hotspots.** *Celebrity skew*, *hot relation partition*: `buckets` cuts what arrives at one end in parts, which a list
//! reads at once and merges; `out_buckets` does so for the other end. *Hot count key*: `count_shards`, each an increment that
//! needs no version and loses no race. *Hot relation-list pages*: a page is one request for each bucket and one for its
//! rows, however long the list is.

mod actions;
mod archetype;
mod read;
mod write;

pub use archetype::ARCHETYPE;

use std::sync::Arc;

use serde_json::Value as Json;
use statehouse_store::{Row, StoreError, Table, Value};

use super::listing::{self, BUCKETS_MAX, ListPosition, Listing, rows_of};
use crate::action::{ActionContext, Call, Refusal};
use crate::blueprint::Thing;
use crate::blueprint::problem::Problems;
use crate::blueprint::settings::Field;
use crate::declare::table::UPDATED_AT;
use crate::declare::{Declare, ResourceSpec, TableDef, TableSpec};
use crate::resource::{key_text, plural};
use crate::view_source::{RowFilter, SourceRows, ViewSource};

/// Since when the edge is there; null for one that is not.
pub(super) const SINCE: &str = "since";
const OUT_BUCKET: &str = "out_bucket";
const IN_BUCKET: &str = "in_bucket";
/// Whether an edge is there, in answers.
const HAS: &str = "has";
const COUNT: &str = "count";

/// One declared relation.
#[derive(Debug)]
pub(super) struct RelationSpec {
    name: String,
    pub(super) from: Vec<Field>,
    pub(super) to: Vec<Field>,
    fields: Vec<Field>,
    def: Arc<TableDef>,
    pub(super) table: Arc<Table>,
    outward: Listing,
    pub(super) inward: Listing,
}

/// One end of an edge, by what is listed there.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum RelationEnd {
    /// What the edges of a source lead to.
    Out,
    /// Where the edges come from that lead to something.
    In,
}

/// What `[relation.NAME]` declares, for archetypes that read it.
pub(super) fn declared(thing: &Thing, problems: &mut Problems) -> Option<RelationSpec> {
    Declare::read(thing, problems, read_relation)
}

fn read_relation(cx: &mut Declare<'_>) -> Option<RelationSpec> {
    let name = cx.name();
    let settings = cx.settings();
    let from = settings.key("from");
    let to = settings.key("to");
    let fields = settings.fields("fields");
    let table = settings.text("table", plural(name));
    let buckets = settings.count("buckets", 4, 1..=BUCKETS_MAX);
    let out_buckets = settings.count("out_buckets", 1, 1..=BUCKETS_MAX);
    let count_shards = settings.count("count_shards", buckets, 1..=BUCKETS_MAX);
    // All of the key is its partition part: the edges of one end are not kept together, only its list is.
    let edges = TableSpec::named(&table).key(&from).key(&to);
    // A tombstone has no fields, so none of them can be required of a row.
    let edges = fields
        .iter()
        .fold(edges, |spec, field| spec.column(&field.name, field.kind).null())
        .time(SINCE)
        .null()
        .about("since when it is there")
        .int(OUT_BUCKET)
        .null()
        .hidden()
        .int(IN_BUCKET)
        .null()
        .hidden()
        .updated_at();
    let def = cx.build(edges)?;
    let out_cut = ("out_buckets", out_buckets);
    let [rows, counts] = listing::tables(&format!("{table}_out"), &from, &to, out_cut, out_cut);
    let (rows, counts) = (cx.build_internal(rows)?, cx.build_internal(counts)?);
    let outward = Listing::over(rows, counts, from.len(), out_buckets, out_buckets);
    let (cut, counts_cut) = (("buckets", buckets), ("count_shards", count_shards));
    let [rows, counts] = listing::tables(&format!("{table}_in"), &to, &from, cut, counts_cut);
    let (rows, counts) = (cx.build_internal(rows)?, cx.build_internal(counts)?);
    let inward = Listing::over(rows, counts, to.len(), buckets, count_shards);
    let table = def.table().clone();
    Some(RelationSpec { name: name.to_owned(), from, to, fields, def, table, outward, inward })
}

/// Reads `[relation.NAME]`: the edges, and the lists of both ends.
pub(crate) fn declare(cx: &mut Declare<'_>) -> Option<()> {
    let relation = Arc::new(read_relation(cx)?);
    let source_rows =
        SourceRows::with_row(&relation.name, &relation.table).filtered(RowFilter::Having(SINCE));
    let edges = ResourceSpec::of(&relation.name, &relation.def).source_rows(source_rows).events(&[
        ("added", &["add"]),
        ("changed", &["add"]),
        ("removed", &["remove"]),
    ]);
    cx.resource(edges.actions(actions::edge_actions(&relation)));
    for end in [RelationEnd::Out, RelationEnd::In] {
        let listing = relation.listing(end);
        let key = relation.owner(end).iter().map(|field| (field.name.clone(), field.kind)).collect();
        let telling = ViewSource::list_of(&relation.name);
        let list = ResourceSpec::without_rows(&relation.end_name(end), key, telling);
        let list = list.table(&listing.table).table(&listing.counts);
        cx.resource(list.actions(actions::end_actions(&relation, end)));
    }
    Some(())
}

impl RelationSpec {
    fn listing(&self, end: RelationEnd) -> &Listing {
        match end {
            RelationEnd::Out => &self.outward,
            RelationEnd::In => &self.inward,
        }
    }

    /// What names the owner of a list.
    fn owner(&self, end: RelationEnd) -> &[Field] {
        match end {
            RelationEnd::Out => &self.from,
            RelationEnd::In => &self.to,
        }
    }

    /// `follow_out` for `follow`.
    fn end_name(&self, end: RelationEnd) -> String {
        match end {
            RelationEnd::Out => format!("{}_out", self.name),
            RelationEnd::In => format!("{}_in", self.name),
        }
    }

    fn what(&self, call: &Call) -> String {
        format!("{} {}", self.name, key_text(&call.key))
    }

    fn ends<'k>(&self, key: &'k [Value]) -> (&'k [Value], &'k [Value]) {
        key.split_at(self.from.len().min(key.len()))
    }

    /// The edge that a call names, if it was ever there.
    async fn row(&self, call: &Call, cx: &ActionContext<'_>) -> Result<Option<Row>, Refusal> {
        Ok(rows_of(cx, &self.table, &call.tenant, [call.key.clone()]).await?.into_iter().next().flatten())
    }
}

/// Where an edge stands in its two lists; `None` if it is not there.
fn positions(row: &Row) -> Result<Option<[ListPosition; 2]>, StoreError> {
    let Some(at) = row.get_optional_time(SINCE)? else { return Ok(None) };
    let place = |bucket: &str| Ok::<_, StoreError>(ListPosition { bucket: row.get_int(bucket)?, at });
    Ok(Some([place(OUT_BUCKET)?, place(IN_BUCKET)?]))
}

impl RelationSpec {
    /// A row as callers see it.
    fn shown(&self, row: Json) -> Json {
        let mut row = self.def.visible(row);
        if let Some(fields) = row.as_object_mut() {
            let has = fields.get(SINCE).is_some_and(|since| !since.is_null());
            fields.insert(HAS.into(), has.into());
        }
        row
    }
}

#[cfg(test)]
mod tests {
    use crate::Blueprint;
    use crate::resource::declare;

    fn check(text: &str, expect: &str) {
        let blueprint = Blueprint::read("statehouse.toml", &format!("[relation.follow]\n{text}\n")).unwrap();
        let problems = declare(&blueprint).unwrap_err().render(false);
        assert!(problems.contains(expect), "{problems}");
    }

    #[test]
    fn declarations_are_checked() {
        let ends = "from = { a = \"int\" }\nto = { b = \"int\" }";
        check("from = { a = \"int\" }", "has no to");
        check("from = { a = \"int\" }\nto = { a = \"int\" }", "`a` is declared twice");
        check("from = { a = \"int?\" }\nto = { b = \"int\" }", "must always be given");
        check(&format!("{ends}\nfields = {{ since = \"int\" }}"), "has a column `since` already");
        check(&format!("{ends}\nbuckets = 65"), "`buckets` must be from 1 to 64");
        check(&format!("{ends}\ncount_shards = 0"), "`count_shards` must be from 1 to 64");
        check(&format!("{ends}\nbucket = 3"), "did you mean `buckets`?");
    }
}
