//! The statements of a batch: each takes arrays, so that its text depends on the tables and columns alone.
//!
//! Rows are read and locked through a lateral subquery: its index lookup runs once for each key, in the order of the
//! arrays, which is the order of [`crate::order`]. The writes join their table with the arrays; that the planner
//! may not turn this into a scan of the table is seen to by the words that open the transaction
//! ([`PLANNER`]), because a plan that was made while the table was empty is kept when it is not.

use std::collections::{BTreeMap, BTreeSet};

use statehouse_store::bug;
use statehouse_store::log::{PART_SEPARATOR, RecordView, write_events};
use statehouse_store::table::{TENANT, VERSION};
use statehouse_store::{Column, Record, Row, StoreError, Table, Tenant, Time, Value};

use crate::batch::{Batch, PlacedRecord, RowChange, Slot, nothing_of};
use crate::connection::DatabaseCall;
use crate::ddl::Names;
use crate::sql::{Arg, all_columns, int_at, name, placeholder, text_at, time_at, type_name, value_at};

/// What keeps a cached plan right whatever the size of a table: only nested loops over index lookups.
pub(crate) const PLANNER: &str = "; set local plan_cache_mode = force_generic_plan; set local enable_seqscan = off; \
                                  set local enable_hashjoin = off; set local enable_mergejoin = off; \
                                  set local random_page_cost = 0";

/// Names of columns as they stand in a list.
fn list<'a>(columns: impl IntoIterator<Item = &'a str>) -> String {
    columns.into_iter().map(name).collect::<Vec<_>>().join(", ")
}

/// `unnest($1::text[], …)`: the tenant and these columns.
fn arrays<'a>(columns: impl IntoIterator<Item = &'a Column>) -> String {
    let types = std::iter::once("text").chain(columns.into_iter().map(|column| type_name(column.kind)));
    let arrays = types.enumerate().map(|(index, kind)| format!("{}::{kind}[]", placeholder(index)));
    format!("unnest({})", arrays.collect::<Vec<_>>().join(", "))
}

/// `t.tenant = k.tenant and t.id = k.id`.
fn same_key(table: &Table) -> String {
    let keys = table.key_columns().iter().map(|column| column.name.as_str());
    let parts = std::iter::once(TENANT).chain(keys).map(|key| {
        let key = name(key);
        format!("t.{key} = k.{key}")
    });
    parts.collect::<Vec<_>>().join(" and ")
}

fn key_names(table: &Table) -> impl Iterator<Item = &str> {
    std::iter::once(TENANT).chain(table.key_columns().iter().map(|column| column.name.as_str()))
}

/// A row's key: its tenant and the values of the key columns.
pub(crate) type StatementKey<'a> = (&'a Tenant, &'a [Value]);

/// One array for each key column, the tenant first.
fn key_arrays<'a>(table: &Table, keys: &[StatementKey<'a>]) -> Vec<Arg<'a>> {
    let mut args = vec![Arg::Texts(keys.iter().map(|(tenant, _)| tenant.as_str()).collect())];
    for (index, column) in table.key_columns().iter().enumerate() {
        let values = keys.iter().filter_map(|(_, key)| key.get(index)).collect();
        args.push(Arg::Many(type_name(column.kind), values));
    }
    args
}

/// Reads rows by their keys, and keeps them as they are until the transaction ends. Each answer begins with the number of
/// its key, from 1.
fn rows_by_key<'a>(names: &Names, table: &Table, keys: &[StatementKey<'a>]) -> DatabaseCall<'a> {
    let text = format!(
        "select k._place, {}\nfrom {} with ordinality as k({}, _place)\ncross join lateral (\n\
         select {}\nfrom {} as t\nwhere {}\nfor update\n) as t",
        all_columns(table, "t"),
        arrays(table.key_columns()),
        list(key_names(table)),
        all_columns(table, "t"),
        names.table(table.name()),
        same_key(table),
    );
    DatabaseCall::new(text, key_arrays(table, keys))
}

/// Locks and reads the rows that a batch looks for, a call for each table.
pub(crate) fn lock_calls<'p>(names: &Names, batch: &Batch<'p>) -> Vec<DatabaseCall<'p>> {
    let lock = |numbers: &Vec<usize>| {
        let slots = || numbers.iter().filter_map(|number| batch.slot(*number));
        let table = slots().next()?.table;
        let keys: Vec<StatementKey<'p>> = slots().map(|slot| (slot.tenant, slot.key)).collect();
        Some(rows_by_key(names, table, &keys))
    };
    batch.rows_to_read().iter().filter_map(lock).collect()
}

/// The columns of a record as [`record_at`] reads them.
pub(crate) const RECORD: &str = "l.partition, l.position, l.tenant, l.operation, l.resource, l.key, l.at, l.fingerprint, l.fate, l.events";

/// Looks up the records of operations.
pub(crate) fn records_of<'a>(
    names: &Names,
    operations: impl Iterator<Item = (&'a Tenant, &'a str)>,
) -> DatabaseCall<'a> {
    let (tenants, operations): (Vec<&str>, Vec<&str>) =
        operations.map(|(tenant, operation)| (tenant.as_str(), operation)).unzip();
    let text = format!(
        "select {RECORD}\nfrom unnest($1::text[], $2::text[]) as k(tenant, operation)\ncross join lateral (\n\
         select *\nfrom {} as l\nwhere l.tenant = k.tenant and l.operation = k.operation\nlimit 1\n) as l",
        names.log(),
    );
    DatabaseCall::new(text, vec![Arg::Texts(tenants), Arg::Texts(operations)])
}

/// Reads the columns of [`RECORD`].
pub(crate) fn record_at(
    row: &tokio_postgres::Row,
    first: usize,
    view: RecordView,
) -> Result<Record, StoreError> {
    use statehouse_store::{OperationStatus, Position, Type};
    const LOG: &str = "statehouse_log";
    let corrupt = |why: String| StoreError::corrupt(LOG, why);
    let int = |index: usize| int_at(row, first + index, LOG);
    let text = |index: usize| text_at(row, first + index, LOG);
    let status = match text(8)?.as_str() {
        "applied" => OperationStatus::Applied,
        "aborted" => OperationStatus::Aborted,
        other => return Err(corrupt(format!("a record's fate is {other:?}"))),
    };
    let Value::Json(events) = value_at(row, first + 9, Type::Json, LOG)? else {
        return Err(corrupt("a record has no events, not even none".into()));
    };
    let events = serde_json::from_value(events).map_err(|error| corrupt(error.to_string()))?;
    let record = Record {
        position: Some(Position {
            partition: u32::try_from(int(0)?).map_err(|_| corrupt("a partition is negative".into()))?,
            offset: u64::try_from(int(1)?).map_err(|_| corrupt("a position is negative".into()))?,
        }),
        also_at: Vec::new(),
        tenant: Tenant::new(text(2)?).map_err(|error| corrupt(error.to_string()))?,
        operation: text(3)?,
        resource: text(4)?,
        key: text(5)?,
        at: time_at(row, first + 6, LOG)?,
        fingerprint: text(7)?,
        status,
        events: Vec::new(),
    };
    Ok(view.of(record, events))
}

/// Reads the server's clock.
pub(crate) fn clock_call() -> DatabaseCall<'static> {
    DatabaseCall::new("select clock_timestamp()", Vec::new())
}

/// The answer of [`clock_call`].
pub(crate) fn clock_at(rows: &[tokio_postgres::Row]) -> Result<Time, StoreError> {
    let Some(row) = rows.first() else { return Err(StoreError::corrupt("the server", "it has no clock")) };
    time_at(row, 0, "clock_timestamp()")
}

/// Writes what a decided batch makes of the rows, then the log. The last call answers with the heads before.
pub(crate) fn write_calls<'b>(
    names: &Names,
    batch: &'b Batch<'_>,
    placeholders: &'b Placeholders,
) -> Vec<DatabaseCall<'b>> {
    let mut calls = Vec::new();
    let mut released = Vec::new();
    for range in batch.tables() {
        let slots = batch.slots(&range);
        let Some(table) = slots.first().map(|slot| slot.table) else { continue };
        let mut inserts: Vec<&Row> = Vec::new();
        let mut updates: Vec<&Row> = Vec::new();
        let mut assigned: BTreeSet<usize> = BTreeSet::new();
        let mut deletes: Vec<&Slot<'_>> = Vec::new();
        let mut held: Vec<&Slot<'_>> = Vec::new();
        for slot in slots {
            match slot.change() {
                RowChange::Nothing => {}
                RowChange::Insert(row) => inserts.push(row),
                RowChange::Update(row, columns) => {
                    updates.push(row);
                    assigned.extend(columns);
                }
                RowChange::Delete => deletes.push(slot),
                RowChange::Replace(row) => {
                    deletes.push(slot);
                    inserts.push(row);
                }
                RowChange::HoldAbsent => held.push(slot),
            }
        }
        if !deletes.is_empty() {
            calls.push(delete(names, table, &keys_of(&deletes)));
        }
        if !updates.is_empty() {
            calls.push(update(names, table, &updates, &assigned));
        }
        if !inserts.is_empty() {
            calls.push(insert(names, table, &inserts));
        }
        if !held.is_empty() {
            calls.push(hold(names, table, &keys_of(&held), placeholders));
            released.push(delete(names, table, &keys_of(&held)));
        }
    }
    calls.extend(released);
    if !batch.counts().is_empty() {
        calls.extend(append(names, batch.counts(), batch.records()));
    }
    calls
}

fn keys_of<'b>(slots: &[&'b Slot<'_>]) -> Vec<StatementKey<'b>> {
    slots.iter().map(|slot| (slot.tenant, slot.key)).collect()
}

/// Deletes rows.
pub(crate) fn delete<'b>(names: &Names, table: &Table, keys: &[StatementKey<'b>]) -> DatabaseCall<'b> {
    let text = format!(
        "delete from {} as t\nusing {} as k({})\nwhere {}",
        names.table(table.name()),
        arrays(table.key_columns()),
        list(key_names(table)),
        same_key(table),
    );
    DatabaseCall::new(text, key_arrays(table, keys))
}

/// Writes the assigned columns and the versions of rows that are there.
pub(crate) fn update<'b>(
    names: &Names,
    table: &Table,
    rows: &[&'b Row],
    assigned: &BTreeSet<usize>,
) -> DatabaseCall<'b> {
    let columns = table.columns();
    let set: Vec<&Column> = assigned.iter().filter_map(|index| columns.get(*index)).collect();
    let sent = table.key_columns().iter().chain(set.iter().copied());
    let version = placeholder(1 + table.key_len() + set.len());
    let arrays = arrays(sent.clone());
    let arrays = arrays.strip_suffix(')').unwrap_or(&arrays);
    let changes: Vec<String> = set
        .iter()
        .map(|column| column.name.as_str())
        .chain([VERSION])
        .map(|column| format!("{0} = k.{0}", name(column)))
        .collect();
    let text = format!(
        "update {} as t\nset {}\nfrom {arrays}, {version}::bigint[]) as k({}, {VERSION})\nwhere {}",
        names.table(table.name()),
        changes.join(", "),
        list(std::iter::once(TENANT).chain(sent.map(|column| column.name.as_str()))),
        same_key(table),
    );
    let keys: Vec<StatementKey<'b>> = rows.iter().map(|row| (row.tenant(), row.key())).collect();
    let mut args = key_arrays(table, &keys);
    let assigned = assigned.iter().filter_map(|index| Some((*index, columns.get(*index)?)));
    args.extend(assigned.map(|(index, column)| content(rows, index, column)));
    args.push(versions(rows));
    DatabaseCall::new(text, args)
}

/// Inserts rows.
pub(crate) fn insert<'b>(names: &Names, table: &Table, rows: &[&'b Row]) -> DatabaseCall<'b> {
    let columns = table.columns();
    let version = placeholder(1 + columns.len());
    let arrays = arrays(columns);
    let arrays = arrays.strip_suffix(')').unwrap_or(&arrays);
    let text = format!(
        "insert into {} ({}, {VERSION})\nselect * from {arrays}, {version}::bigint[])",
        names.table(table.name()),
        list(std::iter::once(TENANT).chain(columns.iter().map(|column| column.name.as_str()))),
    );
    let mut args = vec![Arg::Texts(rows.iter().map(|row| row.tenant().as_str()).collect())];
    args.extend(columns.iter().enumerate().map(|(index, column)| content(rows, index, column)));
    args.push(versions(rows));
    DatabaseCall::new(text, args)
}

fn content<'b>(rows: &[&'b Row], index: usize, column: &Column) -> Arg<'b> {
    Arg::Many(type_name(column.kind), rows.iter().filter_map(|row| row.values().get(index)).collect())
}

fn versions(rows: &[&Row]) -> Arg<'static> {
    Arg::Ints(rows.iter().map(|row| row.version()).collect())
}

/// What placeholders of rows hold: made once, because parameters are borrowed.
#[derive(Debug)]
pub(crate) struct Placeholders(BTreeMap<&'static str, Value>);

impl Placeholders {
    pub(crate) fn new() -> Placeholders {
        Placeholders(
            statehouse_store::Type::ALL.iter().map(|kind| (kind.name(), nothing_of(*kind))).collect(),
        )
    }
}

/// Inserts placeholders for rows whose absence is relied on; they are deleted again before the commit.
pub(crate) fn hold<'b>(
    names: &Names,
    table: &Table,
    keys: &[StatementKey<'b>],
    placeholders: &'b Placeholders,
) -> DatabaseCall<'b> {
    let required: Vec<&Column> =
        table.other_columns().iter().filter(|column| column.required && column.default.is_none()).collect();
    let sent = table.key_columns().iter().chain(required.iter().copied());
    let text = format!(
        "insert into {} ({})\nselect * from {}",
        names.table(table.name()),
        list(std::iter::once(TENANT).chain(sent.clone().map(|column| column.name.as_str()))),
        arrays(sent),
    );
    let mut args = key_arrays(table, keys);
    for column in required {
        let nothing = placeholders.0.get(column.kind.name()).into_iter();
        args.push(Arg::Many(type_name(column.kind), nothing.cycle().take(keys.len()).collect()));
    }
    DatabaseCall::new(text, args)
}

/// Locks the heads of these partitions, in their order, and appends records after them.
pub(crate) fn append<'b>(
    names: &Names,
    counts: &BTreeMap<u32, u64>,
    records: impl Iterator<Item = PlacedRecord<'b>>,
) -> [DatabaseCall<'b>; 2] {
    let partitions = || Arg::Partitions(counts.keys().copied().collect());
    let take = format!(
        "select from {} as h\nwhere h.partition = any ($1::integer[])\norder by h.partition\nfor update",
        names.heads(),
    );
    let records: Vec<PlacedRecord<'b>> = records.collect();
    // Further records are stored under their own places, which are known only here.
    let (operation, parts) = match records.iter().any(|placed| placed.is_part) {
        false => ("r.operation".to_owned(), ""),
        true => (
            format!(
                "case when r.part = 1 then {} else r.operation end",
                part_operation_of("r.operation", "r.partition", "(moved.base + r.rank)")
            ),
            ", $13::bigint[]",
        ),
    };
    let part = if parts.is_empty() { "" } else { ", part" };
    let append = format!(
        "with moved as (\nupdate {} as h\nset head = h.head + k.count\n\
         from unnest($1::integer[], $2::bigint[]) as k(partition, count)\nwhere h.partition = k.partition\n\
         returning h.partition, h.head - k.count as base\n), logged as (\n\
         insert into {} (partition, position, tenant, operation, resource, key, at, fingerprint, fate, events)\n\
         select r.partition, moved.base + r.rank, r.tenant, {operation}, r.resource, r.key, r.at, r.fingerprint, \
         r.fate, r.events::json\n\
         from unnest($3::integer[], $4::bigint[], $5::text[], $6::text[], $7::text[], $8::text[], \
         $9::timestamptz[], $10::text[], $11::text[], $12::text[]{parts}) \
         as r(partition, rank, tenant, operation, resource, key, at, fingerprint, fate, events{part})\n\
         join moved on moved.partition = r.partition\n)\nselect partition, base from moved",
        names.heads(),
        names.log(),
    );
    let texts =
        |of: fn(&'b Record) -> &'b str| Arg::Texts(records.iter().map(|placed| of(placed.record)).collect());
    let status = |record: &'b Record| match record.status {
        statehouse_store::OperationStatus::Applied => "applied",
        statehouse_store::OperationStatus::Aborted => "aborted",
    };
    let events = |placed: &PlacedRecord<'b>| {
        write_events(&placed.record.events, placed.parts).unwrap_or_else(|error| {
            // The server refuses an empty text as JSON, so nothing is committed.
            drop(bug!("events that cannot be written as JSON: {error}"));
            String::new()
        })
    };
    let count = |number: u64| i64::try_from(number).unwrap_or(i64::MAX);
    let mut args = vec![
        partitions(),
        Arg::Ints(counts.values().map(|number| count(*number)).collect()),
        Arg::Partitions(records.iter().map(|placed| placed.partition).collect()),
        Arg::Ints(records.iter().map(|placed| count(placed.rank)).collect()),
        texts(|record| record.tenant.as_str()),
        texts(|record| &record.operation),
        texts(|record| &record.resource),
        texts(|record| &record.key),
        Arg::Times(records.iter().map(|placed| placed.record.at).collect()),
        texts(|record| &record.fingerprint),
        Arg::Texts(records.iter().map(|placed| status(placed.record)).collect()),
        Arg::Written(records.iter().map(events).collect()),
    ];
    if !parts.is_empty() {
        args.push(Arg::Ints(records.iter().map(|placed| i64::from(placed.is_part)).collect()));
    }
    [DatabaseCall::new(take, vec![partitions()]), DatabaseCall::new(append, args)]
}

/// What [`statehouse_store::log::part_operation`] makes, as an expression.
pub(crate) fn part_operation_of(operation: &str, partition: &str, offset: &str) -> String {
    format!("{operation} || chr({}) || {partition} || '.' || {offset}", u32::from(PART_SEPARATOR))
}

/// The answer of the second call of [`append`]: the heads before it.
pub(crate) fn bases_at(rows: &[tokio_postgres::Row]) -> Result<BTreeMap<u32, u64>, StoreError> {
    let place = "statehouse_heads";
    let negative = |_| StoreError::corrupt(place, "a head is negative");
    rows.iter()
        .map(|row| {
            let partition = u32::try_from(int_at(row, 0, place)?).map_err(negative)?;
            Ok((partition, u64::try_from(int_at(row, 1, place)?).map_err(negative)?))
        })
        .collect()
}
