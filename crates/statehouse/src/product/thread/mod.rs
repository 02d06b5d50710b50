//! A03 Append-only child object: comments, reviews, answers. Children of a parent, in the order of their coming.
//!
//! ```text
//!              append                remove
//!   (none) ────────────► VISIBLE ──────────────► REMOVED (a tombstone)
//!                        │ ▲ │ ▲                    ▲
//!                   edit └─┘ │ │ restore     remove │
//!                       hide ▼ │                    │
//!                           HIDDEN ─────────────────┘
//! ```
//! From each state `erase` leads back to nothing ([`crate::erase`]).
//!
//! **Rows.** The truth: `comments(tenant, post_id, comment_id, fields…, status, posted_at, bucket, digest, updated_at,
//! version)`. The caller that appends a child chooses its id. Beside it, the list of the parent ([`super::listing`]), which
//! has exactly those that are visible: `comments_listed(tenant, post_id, bucket, at, comment_id)` and its `_count`. Child,
//! list and count change in one plan. A row is deleted only when it is erased; one that was removed has lost its fields.
//!
//! **Invariants.**
//! - I1. There is one child for each id. *The id is the key; append expects that it is absent.* Asked again, append answers
//!   with the child that is there, if what was said then is what is said now (`digest`).
//! - I2. A child stands once in its parent's list, and is counted once, exactly while it is visible. *Guard of hide, restore
//!   and remove:* `status = the one that it leaves`.
//! - I3. What is not visible is not edited, and an edit under a version that is not the child's is refused. *Guard of edit:*
//!   `version = the one that was seen`, at which it was visible; *without a version:* `status = 'VISIBLE'`.
//! - I4. Moderation wins. *Hide asks for no version; nothing that an author does leads from HIDDEN to VISIBLE.*
//! - I5. What was removed stays so. *Nothing but an erasure leads out of REMOVED, and the id is taken until
//!   then.*
//! - I6. Nothing hidden or removed is listed or counted. *I2; and what a list names is looked up, strongly, before it is
//!   shown.*
//! - I7. An erased child is gone, and neither listed nor counted. *One plan deletes the row and, if it was visible, takes it out of list and
//!   count; guard:* `version = the one that was read`.
//!
//! **Failures.** *Duplicate child creation on retry*: I1. *Projection/search lag after append*: list and count are in the
//! plan of the child. *Delete/edit race*, *concurrent edit/delete race*: both are about one row, and an edit that comes
//! second is refused (I3); a removal that comes second wins. *Moderation/removal lag*: I6; there is no lag.
//!
//! **Hotspots.** *Hot parent append rate*: `buckets` cuts list and count of one parent in parts; children share nothing else.
//! *Hot thread reads*, *long history scans*: a page is one request for each bucket and one for its rows, however long the
//! thread is and however much of it was removed.

mod actions;
mod archetype;
mod read;
mod write;

pub use archetype::ARCHETYPE;

use std::sync::Arc;

use statehouse_store::{Row, StoreError, Table, Type, Value};

use super::listing::{self, BUCKETS_MAX, ListPosition, Listing, rows_of};
use crate::action::{ActionContext, Call, Code, Refusal};
use crate::blueprint::settings::Field;
use crate::declare::table::UPDATED_AT;
use crate::declare::{Declare, ResourceSpec, TableDef, TableSpec, row_constraints};
use crate::erase;
use crate::resource::{key_text, plural};
use crate::view_source::{RowFilter, SourceRows, ViewSource};

/// The states of a child.
const STATUSES: [&str; 3] = [VISIBLE, HIDDEN, REMOVED];
const VISIBLE: &str = "VISIBLE";
const HIDDEN: &str = "HIDDEN";
const REMOVED: &str = "REMOVED";
/// Columns of a child.
const STATUS: &str = "status";
const POSTED_AT: &str = "posted_at";
const BUCKET: &str = "bucket";
const DIGEST: &str = "digest";
/// Of a thread.
const COUNT: &str = "count";
const NEWEST: &str = "newest";
/// Inputs.
const ORDER: &str = "order";
const ORDERS: [&str; 2] = [NEWEST, OLDEST];
const OLDEST: &str = "oldest";
const REASON: &str = "reason";
const ALSO_HIDDEN: &str = "hidden";

/// One declared kind of child.
#[derive(Debug)]
struct ThreadSpec {
    /// `comment`.
    name: String,
    /// `comment_thread`.
    threads: String,
    parent: Vec<Field>,
    /// `comment_id`.
    id: Field,
    fields: Vec<Field>,
    /// The column that says whose child it is. A child that was removed keeps it, so that its events can still be erased.
    person: Option<String>,
    def: Arc<TableDef>,
    table: Arc<Table>,
    listing: Listing,
}

/// Reads `[thread.NAME]`: the children, and their threads.
pub(crate) fn declare(cx: &mut Declare<'_>) -> Option<()> {
    let name = cx.name();
    let settings = cx.settings();
    let parent = settings.key("parent");
    let fields = settings.fields_or_constrained("fields");
    let table = settings.text("table", plural(name));
    let buckets = settings.count("buckets", 4, 1..=BUCKETS_MAX);
    let require_version = settings.flag("require_version", true);
    if fields.is_empty() {
        let advice = "say what a child holds: `fields = { author = \"int\", body = \"text\" }`";
        settings.problem_with_advice("fields", format!("`thread.{name}` has no fields"), advice);
    }
    let columns: Vec<&Field> = parent.iter().chain(&fields).collect();
    let person = erase::read_person(settings, &columns);
    let constraints = row_constraints::declare(cx, &table, &fields, &[])?;
    let id = Field::required(format!("{name}_id"), Type::Text);
    let children = TableSpec::named(&table).key(&parent).partition(&id.name, id.kind);
    // A tombstone has no fields, so none of them can be required of a row.
    let children = fields
        .iter()
        .fold(children, |spec, field| spec.column(&field.name, field.kind).null())
        .states_in(STATUS, &STATUSES)
        .live(&[VISIBLE])
        .time(POSTED_AT)
        .about("what it is listed by")
        .immutable()
        .int(BUCKET)
        .hidden()
        .immutable()
        .text(DIGEST)
        .hidden()
        .immutable()
        .updated_at();
    let def = cx.build(constraints.with_indexes(children))?;
    let cut = ("buckets", buckets);
    let [rows, counts] =
        listing::tables(&format!("{table}_listed"), &parent, std::slice::from_ref(&id), cut, cut);
    let (rows, counts) = (cx.build_internal(rows)?, cx.build_internal(counts)?);
    let listing = Listing::over(rows, counts, parent.len(), buckets, buckets);
    let (table, threads) = (def.table().clone(), format!("{name}_thread"));
    let thread = Arc::new(ThreadSpec {
        name: name.to_owned(),
        threads,
        parent,
        id,
        fields,
        person: person.clone(),
        def,
        table,
        listing,
    });
    let source_rows = SourceRows::with_row(name, &thread.table).filtered(RowFilter::With(STATUS, &[VISIBLE]));
    let key = thread.parent.iter().map(|field| (field.name.clone(), field.kind)).collect();
    let actions = actions::child_actions(&thread, require_version);
    let children = ResourceSpec::of(name, &thread.def).source_rows(source_rows).events(&[
        ("appended", &["append"]),
        ("edited", &["edit"]),
        ("removed", &["remove"]),
        ("hidden", &["hide"]),
        ("restored", &["restore"]),
        ("erased", &["erase"]),
    ]);
    cx.resource(children.person(person).constrained(constraints).actions(actions));
    cx.resource(
        ResourceSpec::without_rows(&thread.threads, key, ViewSource::list_of(name))
            .table(&thread.listing.table)
            .table(&thread.listing.counts)
            .action(actions::thread_read(&thread)),
    );
    Some(())
}

impl ThreadSpec {
    fn what(&self, key: &[Value]) -> String {
        format!("{} {}", self.name, key_text(key))
    }

    /// The parent and the id in a child's key.
    fn parts<'k>(&self, key: &'k [Value]) -> (&'k [Value], &'k [Value]) {
        key.split_at(self.parent.len().min(key.len()))
    }

    /// The child that a call names, as it is.
    async fn child(&self, call: &Call, cx: &ActionContext<'_>) -> Result<Row, Refusal> {
        let row =
            rows_of(cx, &self.table, &call.tenant, [call.key.clone()]).await?.into_iter().next().flatten();
        row.ok_or_else(|| Refusal::new(Code::NotFound, format!("{} does not exist", self.what(&call.key))))
    }

    fn removed(&self, row: &Row) -> Refusal {
        let message = format!("{} was removed", self.what(row.key()));
        Refusal::new(Code::Deleted, message).at_version(Some(row))
    }
}

/// Where a child stands in its parent's list while it is visible.
fn position(row: &Row) -> Result<ListPosition, StoreError> {
    Ok(ListPosition { bucket: row.get_int(BUCKET)?, at: row.get_time(POSTED_AT)? })
}

#[cfg(test)]
mod tests {
    use crate::Blueprint;
    use crate::resource::declare;

    fn check(text: &str, expect: &str) {
        let blueprint = Blueprint::read("statehouse.toml", &format!("[thread.comment]\n{text}\n")).unwrap();
        let problems = declare(&blueprint).unwrap_err().render(false);
        assert!(problems.contains(expect), "{problems}");
    }

    #[test]
    fn declarations_are_checked() {
        let fields = "fields = { body = \"text\" }";
        check(fields, "has no parent");
        check("parent = { post_id = \"int\" }", "has no fields");
        check(&format!("parent = {{ comment_id = \"int\" }}\n{fields}"), "has a column `comment_id` already");
        check(&format!("parent = {{ post_id = \"int\" }}\n{fields}\nbuckets = 0"), "from 1 to 64");
        check(&format!("parents = {{ post_id = \"int\" }}\n{fields}"), "did you mean `parent`?");
    }
}
