//! A01 Current-value entity: one authoritative row holds the current state of a thing.
//!
//! ```text
//!            create                    delete
//!   (none) ──────────► ACTIVE ───────────────────► DELETED
//!                       │  ▲ ▲                        │
//!                       └──┘ └────────────────────────┘
//!              update, patch, mutate      restore
//! ```
//! From both states `erase` leads back to nothing ([`crate::erase`]).
//!
//! **Rows.** `profiles(tenant, key…, fields…, status, updated_at, version)`, with an index by status and time. Fields
//! that are declared `hot` stand in a row of their own, `profiles_hot(tenant, key…, hot fields…, version)`, so that
//! counting a view does not raise the version that editors hold. With `mutate = "pessimistic"` a row that was mutated
//! has a lock beside it, `profiles_lock(tenant, key…, held_by, held_until, version)`.
//!
//! **Invariants.**
//! - I1. Each version number has exactly one writer. *Guard of every update:* `version = the one that was read`.
//! - I2. No acknowledged update is lost. *I1, and the store's durability.*
//! - I3. A deleted row accepts no update. *Guard of every update:* `status = 'ACTIVE'`.
//! - I4. A write that would change nothing writes nothing. *Guard of an update under a version:* `some field differs`;
//!   of every other write decided in the draft. The version that it saw is answered.
//!   Hot fields are written without a look at them.
//! - I5. A retry under the same operation id returns the first answer. *The house's H2 and H3.*
//! - I6. With `mutate = "pessimistic"` no other caller writes the row between a mutation's reading and its writing. *Locks, L1 to
//!   L3 of [`crate::lock`].*
//! - I7. An erased row is gone with its hot fields and its lock. *One plan deletes all three; guard:* `version = the one that was read`.
//!   A write of hot fields asserts the row, so none of them comes after.
//!
//! **Optimistic or pessimistic.** A mutation that only counts needs neither: it adds where the number stands. One that
//! has to read first (`set`, `append`, or both with `increment`) is by default written under the version that it read,
//! and drafted anew when it lost, a bounded number of times. Where many callers meet at one row that costs more tries than
//! writes. The pessimistic one takes the row's lock, reads, writes and gives the lock back in the same plan; competitors
//! wait for it instead of losing to each other. While a lock is held,
//! - another mutation that reads first waits, and then takes the lock;
//! - `update`, `patch`, `delete`, `restore`, a mutation that only counts, and one that names a version carry in their plan
//!   that no caller holds the lock: they wait, and are then judged by their version as ever, so an editor who held the
//!   version from before the mutation is source_rows of the conflict;
//! - reads and hot fields are not concerned.
//!
//! I1 does not rest on locks. A mutation under a lock still carries the version that it read; a process that does not
//! know of the lock yet, because it runs an older blueprint, can make it try again and cannot make it overwrite.
//!
//! **Failures.** *Retry ambiguity on write*: I5. *Concurrent overwrite race*: I1; the loser is source_rows the current
//! version. *Stale read after update*: reads are strong unless the caller says `consistency=cached`, and then the token
//! of a write (`after`) makes the read see it. *Cache invalidation lag*: the cache follows the log, answers nothing when
//! it has lost touch, and never keeps a row that was read before a write and arrived after it ([`crate::cache`]).
//!
//! **Hotspots.** *Write contention on hot entity*: `hot = ["views"]` splits fields off; a mutation that only counts
//! needs no version and is never retried; `mutate = "pessimistic"` makes the others take turns. *Hot entity read skew*:
//! `consistency=cached`. *Cache invalidation churn*: the cache discards by the log, one row at a time, and a write of a
//! row that is not cached costs it nothing.

mod actions;
mod archetype;
pub mod handle;
mod read;
mod rules;
mod write;

pub use archetype::ARCHETYPE;

use std::sync::Arc;

use statehouse_store::Table;

use crate::blueprint::settings::Field;
use crate::declare::table::UPDATED_AT;
use crate::declare::{
    Declare, FieldLimits, ResourceSpec, SettingsReader, TableDef, TableSpec, row_constraints,
};
use crate::erase;
use crate::lock;
use crate::resource::{Resource, plural};
use crate::view_source::{RowFilter, SourceRows};

/// The states of a row.
const STATUSES: [&str; 2] = [ACTIVE, DELETED];
const ACTIVE: &str = "ACTIVE";
const DELETED: &str = "DELETED";
/// Columns that every entity has.
const STATUS: &str = "status";
/// The ways to mutate.
const OPTIMISTIC: &str = "optimistic";
const PESSIMISTIC: &str = "pessimistic";
/// The index that lists rows by status and time.
const BY_STATUS: &str = "by_status";

/// One declared entity.
#[derive(Debug)]
struct EntitySpec {
    name: String,
    fields: Vec<Field>,
    hot: Vec<Field>,
    /// The columns of the key.
    key: Vec<Field>,
    /// Whether rows have the time of their creation.
    created_at: bool,
    def: Arc<TableDef>,
    table: Arc<Table>,
    hot_table: Option<Arc<Table>>,
    /// Where rows are locked, if mutations are pessimistic.
    lock_table: Option<Arc<Table>>,
}

/// Reads `[entity.NAME]`.
pub(crate) fn declare(cx: &mut Declare<'_>) -> Option<()> {
    let name = cx.name();
    let settings = cx.settings();
    let key = settings.key_or_generated("key");
    let fields = settings.fields_or_immutable("fields");
    let table = settings.text("table", plural(name));
    let hot_names = settings.texts("hot");
    let require_version = settings.flag("require_version", true);
    let created_at = settings.flag("created_at", false);
    let mutate = settings.choice("mutate", &[OPTIMISTIC, PESSIMISTIC]);
    check_hot(settings, &hot_names, &fields);
    let is_cold = |field: &&Field| !hot_names.contains(&field.name);
    let columns: Vec<&Field> = key.iter().chain(fields.iter().filter(is_cold)).collect();
    let person = erase::read_person(settings, &columns);
    let constraints = row_constraints::declare(cx, &table, &fields, &hot_names)?;
    let (hot, fields): (Vec<Field>, Vec<Field>) =
        fields.into_iter().partition(|field| hot_names.contains(&field.name));
    let main = TableSpec::named(&table)
        .key(&key)
        .fields(&fields)
        .states_in(STATUS, &STATUSES)
        .default(ACTIVE)
        .live(&[ACTIVE])
        .updated_at()
        .index(BY_STATUS, &[STATUS], &[UPDATED_AT]);
    let main = if created_at { main.created_at().null() } else { main };
    let def = cx.build(constraints.with_indexes(main))?;
    let keyed = |suffix: &str| {
        let beside = Table::named(format!("{table}_{suffix}"));
        key.iter().fold(beside, |table, field| table.partition(&field.name, field.kind))
    };
    let hot_table = match hot.is_empty() {
        true => None,
        false => Some(cx.build_internal(Field::columns(&hot, keyed(HOT)))?),
    };
    let lock_table = match mutate {
        PESSIMISTIC => Some(cx.build_internal(lock::columns(keyed("lock")))?),
        _ => None,
    };
    let table = def.table().clone();
    let source_rows = SourceRows::with_row(name, &table).filtered(RowFilter::With(STATUS, &[ACTIVE]));
    let entity = Arc::new(EntitySpec {
        name: name.to_owned(),
        fields,
        hot,
        key: key.clone(),
        created_at,
        def,
        table,
        hot_table,
        lock_table,
    });
    let beside = entity.hot_table.iter().chain(&entity.lock_table);
    let resource = beside
        .fold(ResourceSpec::of(name, &entity.def), ResourceSpec::table)
        .source_rows(source_rows)
        .events(EVENTS)
        .person(person)
        .constrained(constraints);
    cx.resource(resource.actions(actions::actions(&entity, &key, require_version)));
    Some(())
}

/// The events of an entity, and the actions that leave them.
const EVENTS: &[(&str, &[&str])] = &[
    ("created", &["create"]),
    ("updated", &["update", "patch", "mutate"]),
    ("counted", &["mutate"]),
    ("deleted", &["delete"]),
    ("restored", &["restore"]),
    ("erased", &["erase"]),
    ("moved", &[]),
];

/// Hot fields are declared, and need not be given.
fn check_hot(settings: &mut SettingsReader<'_>, hot: &[String], fields: &[Field]) {
    for name in hot {
        match fields.iter().find(|field| field.name == *name) {
            None => settings.problem("hot", format!("`{name}` is hot and not declared in `fields`")),
            Some(field) if field.is_required() => {
                let title = format!("`{name}` is hot, so it must be optional or have a default");
                let advice = Some("its row is only written when it is first changed");
                settings.field_problem(field, title, advice);
            }
            Some(field) if field.immutable => {
                let title = format!("`{name}` is hot, so it cannot be immutable");
                settings.field_problem(field, title, None);
            }
            Some(field) if field.limits.as_ref().is_some_and(FieldLimits::needs_row) => {
                let title = format!(
                    "`{name}` is hot, so its sums are not read: `enum`, and `min` and `max` of floats, cannot be kept"
                );
                settings.field_problem(field, title, Some("take it out of `hot`"));
            }
            Some(_) => {}
        }
    }
}

/// How the name of the table of the hot fields ends.
const HOT: &str = "hot";

/// The table of the hot fields, beside this one.
fn hot_name(table: &str) -> String {
    format!("{table}_{HOT}")
}

/// The tables of an entity between which its fields go when they become hot, or are so no longer.
pub(crate) struct HotPair {
    /// The table of the rows.
    pub(crate) main: Arc<Table>,
    /// What the table of the hot fields is called.
    pub(crate) hot_name: String,
    /// The table of the hot fields, if there are any.
    pub(crate) hot: Option<Arc<Table>>,
}

/// The tables of an entity; `None` for another resource.
pub(crate) fn hot_pair(resource: &Resource) -> Option<HotPair> {
    let main = resource.tables.first().filter(|_| resource.archetype.keyword() == "entity")?.clone();
    let hot_name = hot_name(main.name());
    let hot = resource.tables.iter().find(|table| table.name() == hot_name).cloned();
    Some(HotPair { main, hot_name, hot })
}

/// How fresh a read has to be.
const CONSISTENCIES: [&str; 2] = ["strong", CACHED];
const CACHED: &str = "cached";
