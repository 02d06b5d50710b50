//! A02 Relation, edge: somebody follows somebody, likes something, has blocked someone. An edge is there or it is not.
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
//! - I3. The last intent wins, in the order in which the row takes them. *Both guards are on one row; whoever lost is drafted
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
use statehouse_store::table::Builder;
use statehouse_store::{Address, Consistency, Row, Table, Tenant, Time, Type, Value};

use super::listing::{self, BUCKETS_MAX, Listing, Place};
use crate::action::{Call, Desk, Refusal};
use crate::blueprint::Thing;
use crate::blueprint::problem::{Problem, Problems};
use crate::blueprint::settings::Field;
use crate::resource::{Resource, key_text, plural};
use crate::told::{Counts, Telling, Told};

/// Since when the edge is there; null for one that is not.
pub(super) const SINCE: &str = "since";
const OUT_BUCKET: &str = "out_bucket";
const IN_BUCKET: &str = "in_bucket";
const UPDATED_AT: &str = "updated_at";
/// Whether an edge is there, in answers.
const HAS: &str = "has";
const COUNT: &str = "count";

const BUCKETS_DEFAULT: i64 = 4;

/// One declared relation.
#[derive(Debug)]
pub(super) struct Relation {
    name: String,
    pub(super) from: Vec<Field>,
    pub(super) to: Vec<Field>,
    fields: Vec<Field>,
    pub(super) table: Arc<Table>,
    outward: Listing,
    pub(super) inward: Listing,
}

/// One end of an edge, by what is listed there.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum End {
    /// What somebody's edges lead to.
    Out,
    /// Where the edges come from that lead to something.
    In,
}

/// Reads `[relation.NAME]`: the edges, and the lists of both ends.
pub fn declare(thing: &Thing, problems: &mut Problems) -> Vec<Resource> {
    declare_all(thing, problems).map(Into::into).unwrap_or_default()
}

/// What `[relation.NAME]` declares, for what stands on it.
pub(super) fn declared(thing: &Thing, problems: &mut Problems) -> Option<Relation> {
    let before = problems.len();
    let mut settings = thing.settings.clone();
    let from = settings.key("from", problems);
    let to = settings.key("to", problems);
    let fields = settings.fields("fields", problems).unwrap_or_default();
    let table = settings.text("table", problems).unwrap_or_else(|| plural(&thing.name));
    let buckets = settings.int("buckets", problems).unwrap_or(BUCKETS_DEFAULT);
    let out_buckets = settings.int("out_buckets", problems).unwrap_or(1);
    let count_shards = settings.int("count_shards", problems).unwrap_or(buckets);
    settings.finish(problems);
    for (name, given) in [("buckets", buckets), ("out_buckets", out_buckets), ("count_shards", count_shards)]
    {
        if !(1..=BUCKETS_MAX).contains(&given) {
            let title = format!("`{name}` must be from 1 to {BUCKETS_MAX}");
            problems.add(Problem::at(settings.span_of(name), title));
        }
    }
    let (from, to) = (from?, to?);
    let mut built = |table: Builder| match table.build() {
        Ok(table) => Some(table),
        Err(error) => {
            problems.add(Problem::at(settings.span(), format!("`relation.{}`: {}", thing.name, error.why)));
            None
        }
    };
    let ends = || from.iter().chain(&to);
    // All of the key is its partition part: the edges of one end are not kept together, only its list is.
    let edges = ends().fold(Table::named(&table), |table, field| table.partition(&field.name, field.kind));
    // A tombstone has no fields, so none of them can be required of a row.
    let edges = fields.iter().fold(edges, |table, field| table.optional(&field.name, field.kind));
    let edges = edges
        .optional(SINCE, Type::Time)
        .optional(OUT_BUCKET, Type::Int)
        .optional(IN_BUCKET, Type::Int)
        .required(UPDATED_AT, Type::Time);
    let edges = built(edges)?;
    let [rows, counts] = listing::tables(&format!("{table}_out"), &from, &to);
    let outward = Listing::over(built(rows)?, built(counts)?, from.len(), out_buckets, out_buckets);
    let [rows, counts] = listing::tables(&format!("{table}_in"), &to, &from);
    let inward = Listing::over(built(rows)?, built(counts)?, to.len(), buckets, count_shards);
    if problems.len() > before {
        return None;
    }
    Some(Relation { name: thing.name.clone(), from, to, fields, table: edges, outward, inward })
}

fn declare_all(thing: &Thing, problems: &mut Problems) -> Option<[Resource; 3]> {
    let relation = Arc::new(declared(thing, problems)?);
    let resource = |name: String, key: Vec<&Field>, tables, actions, telling| Resource {
        hidden: Vec::new(),
        name,
        archetype: thing.archetype,
        key: key.into_iter().map(|field| (field.name.clone(), field.kind)).collect(),
        tables,
        actions,
        workers: Vec::new(),
        consumers: Vec::new(),
        telling,
    };
    let end = |end: End| {
        let listing = relation.listing(end);
        let tables = vec![listing.table.clone(), listing.counts.clone()];
        let key = relation.owner(end).iter().collect();
        let actions = actions::end_actions(&relation, end);
        resource(relation.end_name(end), key, tables, actions, Telling::list_of(&relation.name))
    };
    let key = relation.from.iter().chain(&relation.to).collect();
    let told = Told::with_row(&relation.name, &relation.table).counting(Counts::Having(SINCE));
    let (actions, telling) = (actions::edge_actions(&relation), Telling::Rows(Box::new(told)));
    let edge = resource(thing.name.clone(), key, vec![relation.table.clone()], actions, telling);
    Some([edge, end(End::Out), end(End::In)])
}

impl Relation {
    fn listing(&self, end: End) -> &Listing {
        match end {
            End::Out => &self.outward,
            End::In => &self.inward,
        }
    }

    /// What names the owner of a list.
    fn owner(&self, end: End) -> &[Field] {
        match end {
            End::Out => &self.from,
            End::In => &self.to,
        }
    }

    /// `follow_out` for `follow`.
    fn end_name(&self, end: End) -> String {
        match end {
            End::Out => format!("{}_out", self.name),
            End::In => format!("{}_in", self.name),
        }
    }

    fn what(&self, call: &Call) -> String {
        format!("{} {}", self.name, key_text(&call.key))
    }

    fn ends<'k>(&self, key: &'k [Value]) -> (&'k [Value], &'k [Value]) {
        key.split_at(self.from.len().min(key.len()))
    }

    /// The rows of pairs, as they are.
    async fn rows(
        &self,
        desk: &Desk<'_>,
        tenant: &Tenant,
        keys: impl IntoIterator<Item = Vec<Value>>,
    ) -> Result<Vec<Option<Row>>, Refusal> {
        let addresses = keys
            .into_iter()
            .map(|key| Address::new(&self.table, tenant, key))
            .collect::<Result<Vec<_>, _>>()?;
        Ok(desk.store.get(&addresses, Consistency::Strong).await?)
    }

    /// The edge that a call names, if it was ever there.
    async fn row(&self, call: &Call, desk: &Desk<'_>) -> Result<Option<Row>, Refusal> {
        Ok(self.rows(desk, &call.tenant, [call.key.clone()]).await?.into_iter().next().flatten())
    }
}

/// Where an edge stands in its two lists; `None` if it is not there.
fn places(row: &Row) -> Option<[Place; 2]> {
    let at: Time = row.time(SINCE)?;
    let place = |bucket: &str| Some(Place { bucket: row.int(bucket)?, at });
    Some([place(OUT_BUCKET)?, place(IN_BUCKET)?])
}

/// A row as callers see it.
fn shown(mut row: Json) -> Json {
    if let Some(fields) = row.as_object_mut() {
        let has = fields.get(SINCE).is_some_and(|since| !since.is_null());
        fields.remove(OUT_BUCKET);
        fields.remove(IN_BUCKET);
        fields.insert(HAS.into(), has.into());
    }
    row
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
        check("from = { a = \"int\" }\nto = { a = \"int\" }", "column a is declared twice");
        check("from = { a = \"int?\" }\nto = { b = \"int\" }", "must always be given");
        check(&format!("{ends}\nfields = {{ since = \"int\" }}"), "column since is declared twice");
        check(&format!("{ends}\nbuckets = 65"), "`buckets` must be from 1 to 64");
        check(&format!("{ends}\ncount_shards = 0"), "`count_shards` must be from 1 to 64");
        check(&format!("{ends}\nbucket = 3"), "did you mean `buckets`?");
    }
}
