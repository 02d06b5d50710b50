//! The limits of a plan: the weakest engine's law, on all of them.
//!
//! What can be known when a plan is built is refused then, with names and numbers ([`PlanError::Limit`]). A row
//! that grows by a write over what was stored before is known only at commit; that is
//! [`StoreError::LimitExceeded`], and nothing is written.

use std::collections::BTreeSet;
use std::sync::Arc;

use crate::error::{PlanError, StoreError};
use crate::log::{Entry, Event, EventSubject};
use crate::row::{Address, Row, Tenant};
use crate::table::{Index, Table};
use crate::value::{Value, json_weight};

/// Operations in one plan: its steps, [`LOG_ENTRY_OPERATIONS`] for the log entry, and one for each further partition of the
/// log that its events belong to ([`further_records`]). (DynamoDB: 100 actions.)
pub const PLAN_OPERATIONS_MAX: usize = 100;
/// What a log entry counts for. (DynamoDB: an item that makes the operation unique, and one that holds the record.)
pub const LOG_ENTRY_OPERATIONS: usize = 2;
/// Partitions of the log that a plan is counted for. In a log with more, a plan may turn out too large at its commit.
pub const LOG_PARTITIONS_COUNTED: usize = 16;
/// Bytes in one plan: the rows that it writes and its log records. (DynamoDB: 4 MB.)
pub const PLAN_BYTES_MAX: usize = 4_000_000;
/// Bytes in one row, or one log record, as the heaviest engine counts them. (DynamoDB: 400 KB.)
pub const ROW_BYTES_MAX: usize = 400_000;
/// Bytes in the partition part of a key or index, the tenant included. (DynamoDB: 2,048 when encoded.)
pub const PARTITION_KEY_BYTES_MAX: usize = 1_000;
/// Bytes in the sort part of a key; for an index its own sort columns and the row's key together, with the tenant
/// between them if it is across tenants. (DynamoDB: 1,024.)
pub const SORT_KEY_BYTES_MAX: usize = 500;
/// Bytes in a tenant's name.
pub const TENANT_BYTES_MAX: usize = 64;
/// Bytes in an operation id, a resource name, a subject's key or an event's name.
pub const NAME_BYTES_MAX: usize = 256;
/// Rows or records in one page.
pub const PAGE_MAX: usize = 1_000;
/// Values in one `in` list. (DynamoDB: 100 operands.)
pub const IN_VALUES_MAX: usize = 100;
/// Leaves in one guard. (DynamoDB: an expression of 4 KB and 300 operators.)
pub const GUARD_LEAVES_MAX: usize = 50;

/// What a value weighs as a part of a key. Octets may be written in hexadecimal there.
fn key_weight(value: &Value) -> usize {
    match value {
        Value::Bytes(bytes) => bytes.len() * 2,
        other => other.weight(),
    }
}

fn parts_weight<'v>(values: impl Iterator<Item = &'v Value>) -> usize {
    values.map(|value| key_weight(value) + 1).sum()
}

/// Checks the size of a row's key.
pub(crate) fn check_key(table: &Table, tenant: &str, key: &[Value]) -> Result<(), PlanError> {
    let (partition, sort) = key.split_at(table.partition_columns().len().min(key.len()));
    let checks = [
        ("partition key", tenant.len() + parts_weight(partition.iter()), PARTITION_KEY_BYTES_MAX),
        ("sort key", parts_weight(sort.iter()), SORT_KEY_BYTES_MAX),
    ];
    for (part, actual, limit) in checks {
        if actual > limit {
            return Err(PlanError::Limit { what: format!("bytes in the {part} of {table}"), limit, actual });
        }
    }
    Ok(())
}

/// Checks the size of values that stand for a part of a key: nothing larger can be stored, so nothing would be found.
pub(crate) fn check_sought(
    what: impl FnOnce() -> String,
    fixed: usize,
    values: &[Value],
    limit: usize,
) -> Result<(), PlanError> {
    let actual = fixed + parts_weight(values.iter());
    if actual > limit {
        return Err(PlanError::Limit { what: format!("bytes in the {}", what()), limit, actual });
    }
    Ok(())
}

/// A row that is weighed: whose it is, and what it holds.
struct WeighedRow<'r> {
    table: &'r Arc<Table>,
    tenant: &'r Tenant,
    /// One for each column of the table.
    values: &'r [&'r Value],
}

impl WeighedRow<'_> {
    fn key(&self) -> impl Iterator<Item = &Value> {
        self.values.iter().take(self.table.key_len()).copied()
    }

    /// What the row weighs without its entries in indexes: names and values, and the key once more.
    fn own_weight(&self) -> usize {
        let named = self.table.columns().iter().zip(self.values).filter(|(_, value)| !value.is_null());
        let values: usize = named.map(|(column, value)| column.name.len() + value.weight()).sum();
        // 100 covers the fixed part: tenant, version, the names of the key attributes.
        values + self.tenant.as_str().len() + parts_weight(self.key()) + 100
    }

    /// The two weights of the row's entry in an index; `None` while the row does not stand in it.
    fn index_weights(&self, index: &Index) -> Option<(usize, usize)> {
        let part = |name: &String| {
            let value = self.values.get(self.table.position(name)?)?;
            (!value.is_null()).then(|| key_weight(value) + 1)
        };
        let weight = |names: &[String]| names.iter().map(part).sum::<Option<usize>>();
        let (partition, sort) = (weight(&index.partition)?, weight(&index.sort)?);
        let (tenant, sort) = (self.tenant.as_str().len(), sort + parts_weight(self.key()));
        // The tenant leads the partition part, or, across tenants, the row's key.
        Some(if index.global { (partition, sort + tenant + 1) } else { (partition + tenant, sort) })
    }

    /// What that entry adds to the row's weight.
    fn entry_weight(index: &Index, (partition, sort): (usize, usize)) -> usize {
        partition + sort + 2 * index.name.len()
    }

    fn name(&self) -> String {
        let key = self.key().cloned().collect();
        Address { table: self.table.clone(), tenant: self.tenant.clone(), key }.to_string()
    }

    fn check(&self) -> Result<usize, StoreError> {
        let exceeded = |what: String, limit, actual| Err(StoreError::LimitExceeded { what, limit, actual });
        let mut weight = self.own_weight();
        for index in self.table.indexes() {
            let Some(weights @ (partition, sort)) = self.index_weights(index) else { continue };
            let parts =
                [("partition", partition, PARTITION_KEY_BYTES_MAX), ("sort", sort, SORT_KEY_BYTES_MAX)];
            if let Some((part, actual, limit)) = parts.into_iter().find(|(_, actual, limit)| actual > limit) {
                let what = format!("the {part} part of index {} for the row {}", index.name, self.name());
                return exceeded(what, limit, actual);
            }
            weight += WeighedRow::entry_weight(index, weights);
        }
        if weight > ROW_BYTES_MAX {
            return exceeded(format!("the row {}", self.name()), ROW_BYTES_MAX, weight);
        }
        Ok(weight)
    }
}

/// What a row weighs on the heaviest engine: names and values, and the keys once more for the table and each index.
pub fn row_weight(row: &Row) -> usize {
    let values: Vec<&Value> = row.values().iter().collect();
    let load = WeighedRow { table: row.table(), tenant: row.tenant(), values: &values };
    let entry = |index: &Index| {
        load.index_weights(index).map_or(0, |weights| WeighedRow::entry_weight(index, weights))
    };
    load.own_weight() + load.table.indexes().iter().map(entry).sum::<usize>()
}

/// Checks a row as it would be stored.
pub fn check_row(row: &Row) -> Result<usize, StoreError> {
    check_values(row.table(), row.tenant(), &row.values().iter().collect::<Vec<_>>())
}

/// Checks what a row would hold, a value for each column of its table.
pub(crate) fn check_values(
    table: &Arc<Table>,
    tenant: &Tenant,
    values: &[&Value],
) -> Result<usize, StoreError> {
    WeighedRow { table, tenant, values }.check()
}

/// Checks a log record as it would be stored.
pub fn check_record(operation: &str, events: &[Event]) -> Result<usize, StoreError> {
    check_events(operation, events.iter().map(event_weight))
}

/// The name of an event, and what the event weighs without.
pub(crate) fn event_weight(event: &Event) -> (&str, usize) {
    (&event.name, json_weight(&event.data) + actor_weight(event.actor.as_ref()))
}

/// What the actor of an event weighs: escaped as JSON, with its name.
pub(crate) fn actor_weight(actor: Option<&String>) -> usize {
    actor.map_or(0, |actor| json_weight(actor) + 12)
}

/// The same, from the names of its events and what they weigh without.
pub(crate) fn check_events<'e>(
    operation: &str,
    events: impl Iterator<Item = (&'e str, usize)>,
) -> Result<usize, StoreError> {
    let weight = record_weight(events);
    if weight > ROW_BYTES_MAX {
        let what = format!("the log record of operation {operation}");
        return Err(StoreError::LimitExceeded { what, limit: ROW_BYTES_MAX, actual: weight });
    }
    Ok(weight)
}

/// The most records that a log entry leaves in further partitions: one for each subject that is not the entry's, but no more
/// than there are partitions.
pub fn further_records(entry: &Entry) -> usize {
    let is_other = |about: &&EventSubject| about.resource != entry.resource || about.key != entry.key;
    let abouts = entry.events.iter().filter_map(|event| event.about.as_ref()).filter(is_other);
    abouts.collect::<BTreeSet<_>>().len().min(LOG_PARTITIONS_COUNTED - 1)
}

/// What the records of further partitions weigh at most: their events once more, and the fixed part of each.
pub(crate) fn further_weight<'e>(entry: &Entry, events: impl Iterator<Item = (&'e str, usize)>) -> usize {
    let records = further_records(entry);
    if records == 0 {
        return 0;
    }
    let others = entry.events.iter().zip(events).filter(|(draft, _)| draft.about.is_some());
    let events: usize = others.map(|(_, (name, weight))| name.len() + weight + 20).sum();
    events + records * record_weight(std::iter::empty())
}

fn record_weight<'e>(events: impl Iterator<Item = (&'e str, usize)>) -> usize {
    // The fixed part of a record is bounded by the limits of its names.
    let fixed = 4 * NAME_BYTES_MAX + TENANT_BYTES_MAX + 100;
    fixed + events.map(|(name, weight)| name.len() + weight + 20).sum::<usize>()
}

/// Checks what a whole plan writes.
pub fn check_plan_bytes(operation: &str, bytes: usize) -> Result<(), StoreError> {
    if bytes > PLAN_BYTES_MAX {
        let what = format!("the plan of operation {operation}");
        return Err(StoreError::LimitExceeded { what, limit: PLAN_BYTES_MAX, actual: bytes });
    }
    Ok(())
}
