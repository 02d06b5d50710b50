//! The model store: the contract in its simplest form, in memory. The reference that every engine is held to.
//!
//! A lock around maps, and [`crate::eval::decide`]. Rows are kept in the order of their keys by comparing values, not
//! by any encoding of them; the log is a list for each partition.

use std::cmp::Ordering;
use std::collections::{BTreeMap, HashMap};
use std::fmt;
use std::ops::Bound;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use async_trait::async_trait;
use tokio::sync::watch;

use crate::blank::{BlankRange, BlankedPage, BlankedRecord};
use crate::bug;
use crate::bug::Bug;
use crate::clock::{Clock, SystemClock};
use crate::error::StoreError;
use crate::eval::{self, Decision};
use crate::limits::PAGE_MAX;
use crate::log::{LogPage, LogPart, Position, Record, partition_of, parts_of};
use crate::migration::{Difference, Migrate, SchemaChange, keep_surplus, null_rows, planned};
use crate::outcome::{Applied, Commit, Resolution};
use crate::plan::{Plan, Verb};
use crate::read::{Consistency, Direction, Page, Query};
use crate::row::{Address, Row, Tenant};
use crate::scan::{Scan, Segment, check_segments, ends_segment, scan_key};
use crate::store::{EngineRequest, ExplainRequest, Explanation, Store};
use crate::table::{Schema, Table};
use crate::time::Time;
use crate::value::Value;

/// Partitions of a log, unless the options say otherwise.
pub const PARTITIONS: u32 = 16;

/// A store in memory. Clones share one content; it is gone with the last of them.
#[derive(Clone)]
pub struct ModelStore {
    clock: Arc<dyn Clock>,
    content: Arc<Mutex<ModelContent>>,
    heads: watch::Sender<Vec<u64>>,
}

#[derive(Default)]
struct ModelContent {
    schema: Schema,
    /// By table, tenant and key.
    rows: BTreeMap<String, BTreeMap<RowLocation, Row>>,
    partitions: Vec<Partition>,
    /// By tenant and operation id: where the record stands.
    operations: HashMap<(Tenant, String), Position>,
    closed: bool,
}

#[derive(Default)]
struct Partition {
    records: Vec<KeptRecord>,
    /// How many records were forgotten.
    trimmed: u64,
}

/// A record that is kept.
#[derive(Clone)]
struct KeptRecord {
    /// With all events.
    record: Record,
    /// The places of those that readers of the log get from another partition.
    copies: Vec<usize>,
}

impl KeptRecord {
    /// What readers of the log get.
    fn in_log(&self) -> Record {
        let events = self.record.events.iter().enumerate();
        let own = events.filter(|(index, _)| !self.copies.contains(index)).map(|(_, event)| event.clone());
        Record { events: own.collect(), ..self.record.clone() }
    }

    /// What is known of the operation.
    fn of_operation(&self) -> Record {
        let position = self.record.position.filter(|_| self.copies.is_empty());
        Record { position, ..self.record.clone() }
    }
}

/// Where a row stands in its table's order.
#[derive(Clone, Debug, PartialEq)]
struct RowLocation {
    tenant: Tenant,
    key: Vec<Value>,
}

impl Eq for RowLocation {}
impl PartialOrd for RowLocation {
    fn partial_cmp(&self, other: &RowLocation) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}
impl Ord for RowLocation {
    fn cmp(&self, other: &RowLocation) -> Ordering {
        self.tenant.cmp(&other.tenant).then_with(|| compare_values(&self.key, &other.key))
    }
}

/// The order of two lists of values that are not null and have the same types.
/// The rows of a scan, from its cursor on.
fn rows_of<'r>(rows: impl Iterator<Item = &'r Row>, scan: &Scan) -> impl Iterator<Item = &'r Row> {
    rows.filter(move |row| {
        let key = scan_key(row);
        scan.tenant().is_none_or(|tenant| tenant == row.tenant())
            && scan.lower_bound().is_none_or(|above| compare_values(&key, above).is_gt())
            && scan.upper_bound().is_none_or(|through| compare_values(&key, through).is_le())
    })
}

fn compare_values<'a>(
    left: impl IntoIterator<Item = &'a Value>,
    right: impl IntoIterator<Item = &'a Value>,
) -> Ordering {
    let pairs = left.into_iter().zip(right);
    let order = |a: &Value, b: &Value| {
        a.compare(b).unwrap_or_else(|| {
            drop(bug!("the key values {a} and {b} have no order"));
            Ordering::Equal
        })
    };
    pairs.map(|(a, b)| order(a, b)).find(|order| order.is_ne()).unwrap_or(Ordering::Equal)
}

impl ModelStore {
    /// An empty store on the machine's clock.
    pub fn new() -> ModelStore {
        ModelStore::with(Arc::new(SystemClock), PARTITIONS)
    }

    /// An empty store on a clock, with a number of log partitions.
    pub fn with(clock: Arc<dyn Clock>, partitions: u32) -> ModelStore {
        let count = partitions.max(1) as usize;
        let content = ModelContent {
            partitions: std::iter::repeat_with(Partition::default).take(count).collect(),
            ..ModelContent::default()
        };
        let heads = watch::Sender::new(vec![0; count]);
        ModelStore { clock, content: Arc::new(Mutex::new(content)), heads }
    }

    /// The same content after its process has gone and come back: nothing that was acknowledged is missing.
    pub fn reopened(&self) -> ModelStore {
        self.lock().closed = false;
        self.clone()
    }

    fn lock(&self) -> MutexGuard<'_, ModelContent> {
        self.content.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn open(&self) -> Result<MutexGuard<'_, ModelContent>, StoreError> {
        let content = self.lock();
        if content.closed { Err(StoreError::unavailable("the store was closed")) } else { Ok(content) }
    }

    fn publish_heads(&self, content: &ModelContent) {
        let heads = content.partitions.iter().map(Partition::head).collect();
        self.heads.send_replace(heads);
    }
}

impl Default for ModelStore {
    fn default() -> ModelStore {
        ModelStore::new()
    }
}

impl fmt::Debug for ModelStore {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("ModelStore")
    }
}

impl Partition {
    fn head(&self) -> u64 {
        self.trimmed + self.records.len() as u64
    }
}

impl ModelContent {
    fn table(&self, table: &Table) -> Result<&BTreeMap<RowLocation, Row>, StoreError> {
        self.rows.get(table.name()).ok_or_else(|| StoreError::no_table(table.name()))
    }

    /// Refuses a column that becomes required while rows have no value for it.
    fn check_nulls(&self, change: &SchemaChange) -> Result<(), StoreError> {
        let Difference::RequireColumn(column) = &change.difference else { return Ok(()) };
        let rows = self.table(&change.table)?.values();
        let null = rows.filter(|row| row.get(&column.name).is_none_or(Value::is_null));
        let null: Vec<String> = null.map(ToString::to_string).collect();
        match column.default.is_none() && !null.is_empty() {
            true => Err(null_rows(&change.table, column, null)),
            false => Ok(()),
        }
    }

    fn row(&self, address: &Address) -> Result<Option<Row>, StoreError> {
        let location = RowLocation { tenant: address.tenant().clone(), key: address.key().to_vec() };
        Ok(self.table(address.table())?.get(&location).cloned())
    }

    fn find_operation(&self, tenant: &Tenant, operation: &str) -> Option<Record> {
        let position = self.operations.get(&(tenant.clone(), operation.to_owned()))?;
        let partition = self.partitions.get(usize::try_from(position.partition).ok()?)?;
        let index = usize::try_from(position.offset.checked_sub(partition.trimmed + 1)?).ok()?;
        partition.records.get(index).map(KeptRecord::of_operation)
    }

    /// How many partitions the log has; the store was made with a number of 32 bits.
    fn partition_count(&self) -> u32 {
        self.partitions.len() as u32
    }

    /// Appends a record and returns its position.
    fn append(&mut self, record: Record, number: u32, copies: Vec<usize>) -> Result<Position, Bug> {
        let Some(partition) = self.partitions.get_mut(number as usize) else {
            return Err(bug!("a record for partition {number}, which the log does not have"));
        };
        let position = Position { partition: number, offset: partition.head() + 1 };
        partition.records.push(KeptRecord { record: Record { position: Some(position), ..record }, copies });
        Ok(position)
    }

    /// Appends a record under its operation id, and what its plan leaves in further partitions.
    fn append_all(&mut self, record: Record, number: u32, parts: &[LogPart]) -> Result<Record, Bug> {
        let copies = parts.iter().flat_map(|part| part.events.iter().copied()).collect();
        let mut also_at = Vec::with_capacity(parts.len());
        for part in parts {
            also_at.push(self.append(part.record(&record)?, part.partition, Vec::new())?);
        }
        let position = self.append(record.clone(), number, copies)?;
        self.operations.insert((record.tenant.clone(), record.operation.clone()), position);
        Ok(Record { position: Some(position), also_at, ..record })
    }

    fn write(&mut self, plan: &Plan, rows: &[Option<Row>]) -> Result<(), StoreError> {
        for (step, result) in plan.steps().iter().zip(rows) {
            let name = step.table.name();
            let table = self.rows.get_mut(name).ok_or_else(|| StoreError::no_table(name))?;
            let location = RowLocation { tenant: plan.tenant().clone(), key: step.key.clone() };
            match (step.verb, result) {
                (Verb::Put, Some(row)) => drop(table.insert(location, row.clone())),
                (Verb::Delete, _) => drop(table.remove(&location)),
                _ => {}
            }
        }
        Ok(())
    }
}

#[async_trait]
impl Store for ModelStore {
    fn engine(&self) -> &'static str {
        "model"
    }

    fn partitions(&self) -> u32 {
        self.lock().partition_count()
    }

    async fn migrate(&self, schema: &Schema, how: Migrate) -> Result<Vec<SchemaChange>, StoreError> {
        let mut content = self.open()?;
        let changes: Vec<SchemaChange> = planned(&content.schema, schema, how)?
            .into_iter()
            .map(|(table, difference)| SchemaChange { table, difference, statements: Vec::new() })
            .collect();
        for change in &changes {
            content.check_nulls(change)?;
        }
        if how == Migrate::Show {
            return Ok(changes);
        }
        let mut tables: BTreeMap<String, Arc<Table>> =
            schema.tables().map(|table| (table.name().to_owned(), table.clone())).collect();
        if how == Migrate::Apply {
            for old in content.schema.tables() {
                let kept = match schema.table(old.name()) {
                    Some(new) => keep_surplus(old, new)?,
                    None => old.clone(),
                };
                tables.insert(old.name().to_owned(), kept);
            }
        }
        for change in &changes {
            if change.difference == Difference::DropTable {
                content.rows.remove(change.table.name());
            }
        }
        for (name, table) in &tables {
            let former = |column: &str| schema.table(name).and_then(|table| table.renamed_from(column));
            let rows = content.rows.entry(name.clone()).or_default();
            for row in rows.values_mut() {
                let columns = table.columns().iter();
                let value = |column: &str| row.get(column).or_else(|| row.get(former(column)?));
                let values = columns.map(|column| match value(&column.name) {
                    Some(value) if !(value.is_null() && column.required) => value.clone(),
                    _ => column.default.clone().unwrap_or(Value::Null),
                });
                *row = Row::new(table.clone(), row.tenant().clone(), values.collect(), row.version());
            }
        }
        content.schema =
            Schema::new(tables.into_values()).map_err(|error| StoreError::schema(error.table, error.why))?;
        Ok(changes)
    }

    async fn commit(&self, plan: &Plan) -> Result<Commit, StoreError> {
        let mut content = self.open()?;
        if plan.entry().is_some()
            && let Some(record) = content.find_operation(plan.tenant(), plan.operation())
        {
            return Ok(Commit::of_record(record));
        }
        let parts = parts_of(plan, content.partition_count())?;
        let now = self.clock.now();
        let current: Vec<Option<Row>> = plan
            .addresses()
            .map(|address| Ok(content.row(&address)?.map(|row| seen_as(row, address.table()))))
            .collect::<Result<_, StoreError>>()?;
        let effect = match eval::decide(plan, now, &current)? {
            Decision::Refuse(refused) => return Ok(Commit::Refused(refused)),
            Decision::Apply(effect) => effect,
        };
        let stored: Vec<Option<Row>> = plan
            .addresses()
            .zip(&effect.rows)
            .map(|(address, row)| {
                let old = content.row(&address)?;
                Ok(row.as_ref().map(|row| merged(row, old.as_ref(), &content.schema)))
            })
            .collect::<Result<_, StoreError>>()?;
        content.write(plan, &stored)?;
        let record = plan.entry().map(|entry| {
            let number = partition_of(plan.tenant(), &entry.resource, &entry.key, content.partition_count());
            content.append_all(Record::of(plan, now, effect.events), number, &parts)
        });
        let record = record.transpose()?;
        self.publish_heads(&content);
        let rows = if plan.returns_rows() { effect.rows } else { Vec::new() };
        Ok(Commit::Applied(Applied { record, rows, repeated: false }))
    }

    async fn resolve(&self, tenant: &Tenant, operation: &str) -> Result<Resolution, StoreError> {
        let mut content = self.open()?;
        if let Some(record) = content.find_operation(tenant, operation) {
            return Ok(Resolution::of_record(record));
        }
        let number = partition_of(tenant, "", operation, content.partition_count());
        content.append_all(Record::aborted(tenant, operation, self.clock.now()), number, &[])?;
        self.publish_heads(&content);
        Ok(Resolution::Aborted)
    }

    async fn find_operation(&self, tenant: &Tenant, operation: &str) -> Result<Option<Record>, StoreError> {
        Ok(self.open()?.find_operation(tenant, operation))
    }

    async fn get(&self, addresses: &[Address], _: Consistency) -> Result<Vec<Option<Row>>, StoreError> {
        let content = self.open()?;
        addresses
            .iter()
            .map(|address| Ok(content.row(address)?.map(|row| seen_as(row, address.table()))))
            .collect()
    }

    async fn query(&self, query: &Query) -> Result<Page, StoreError> {
        let content = self.open()?;
        let table = query.read_table();
        let content_of = |row: &Row, columns: &[&crate::table::Column]| -> Vec<Value> {
            columns.iter().filter_map(|column| row.get(&column.name).cloned()).collect()
        };
        let set = |row: &Row| {
            let mut columns = query.read_index().into_iter().flat_map(crate::table::Index::columns);
            columns.all(|column| row.get(column).is_some_and(|value| !value.is_null()))
        };
        let (partition, sort) = (query.partition_columns(), query.sort_columns());
        let mut rows: Vec<Row> = content
            .table(table)?
            .values()
            .filter(|row| query.tenant().is_none_or(|tenant| tenant == row.tenant()) && set(row))
            .filter(|row| content_of(row, &partition) == query.partition_values())
            .filter(|row| in_range(query, &content_of(row, &sort)))
            .map(|row| seen_as(row.clone(), table))
            .collect();
        rows.sort_by(|a, b| compare_values(&query.order_values(a), &query.order_values(b)));
        if query.direction() == Direction::Backward {
            rows.reverse();
        }
        if let Some(after) = query.cursor_values() {
            rows.retain(|row| {
                let order = compare_values(&query.order_values(row), after);
                if query.direction() == Direction::Forward { order.is_gt() } else { order.is_lt() }
            });
        }
        Ok(page(rows, query.page_limit(), |row| query.cursor_at(row)))
    }

    async fn scan(&self, scan: &Scan) -> Result<Page, StoreError> {
        scan.require_key_segment()?;
        let content = self.open()?;
        let rows = rows_of(content.table(scan.read_table())?.values(), scan);
        let rows = rows.map(|row| seen_as(row.clone(), scan.read_table())).collect();
        Ok(page(rows, scan.page_limit(), |row| scan.cursor_at(row)))
    }

    async fn segments(&self, scan: &Scan, max: usize) -> Result<Vec<Segment>, StoreError> {
        check_segments(max)?;
        scan.require_key_segment()?;
        let content = self.open()?;
        let rows: Vec<&Row> = rows_of(content.table(scan.read_table())?.values(), scan).collect();
        let ends = rows.iter().zip(1..).filter(|(_, n)| ends_segment(*n, rows.len(), max));
        Ok(Segment::by_keys(scan, ends.map(|(row, _)| scan_key(row)).collect()))
    }

    async fn read_log(&self, partition: u32, after: u64, limit: usize) -> Result<LogPage, StoreError> {
        let content = self.open()?;
        let Some(partition) = content.partitions.get(partition as usize) else {
            return Err(StoreError::no_partition(partition, content.partitions.len()));
        };
        let skip = usize::try_from(after.saturating_sub(partition.trimmed)).unwrap_or(usize::MAX);
        let records =
            partition.records.iter().skip(skip).take(limit.min(PAGE_MAX)).map(KeptRecord::in_log).collect();
        Ok(LogPage { records, oldest: partition.trimmed + 1, head: partition.head() })
    }

    async fn wait_log(&self, seen: &[u64], at_most: Duration) -> Result<Vec<u64>, StoreError> {
        drop(self.open()?);
        let mut heads = self.heads.subscribe();
        let news = |heads: &Vec<u64>| {
            heads.iter().enumerate().any(|(number, head)| *head > seen.get(number).copied().unwrap_or(0))
        };
        tokio::select! {
            changed = heads.wait_for(news) => {
                let heads = changed.map(|heads| heads.clone());
                return heads.map_err(|_| StoreError::unavailable("the store was closed"));
            }
            () = self.clock.sleep(at_most) => {}
        }
        Ok(self.heads.borrow().clone())
    }

    async fn trim_log(&self, partition: u32, through: u64) -> Result<(), StoreError> {
        let mut content = self.open()?;
        let count = content.partitions.len();
        let Some(list) = content.partitions.get_mut(partition as usize) else {
            return Err(StoreError::no_partition(partition, count));
        };
        let keep_from = through.min(list.head().saturating_sub(1)).saturating_sub(list.trimmed);
        let forgotten: Vec<KeptRecord> = list.records.drain(..keep_from as usize).collect();
        list.trimmed += forgotten.len() as u64;
        for KeptRecord { record, .. } in forgotten {
            let operation = (record.tenant, record.operation);
            // The records of further partitions are not what their operation is known by.
            if content.operations.get(&operation).copied() == record.position {
                content.operations.remove(&operation);
            }
        }
        Ok(())
    }

    async fn blank_events(&self, range: &BlankRange) -> Result<BlankedPage, StoreError> {
        let mut content = self.open()?;
        let count = content.partitions.len();
        let Some(list) = content.partitions.get_mut(range.partition as usize) else {
            return Err(StoreError::no_partition(range.partition, count));
        };
        let mut page = BlankedPage { reached: range.through, events: 0 };
        let in_range = list.records.iter_mut().filter(|kept| {
            let offset = kept.record.position.map_or(0, |position| position.offset);
            range.after < offset && offset <= range.through
        });
        for (looked_at, kept) in in_range.enumerate() {
            if looked_at == range.limit.clamp(1, PAGE_MAX) {
                return Ok(page);
            }
            let Record { tenant, key, position, events, .. } = &mut kept.record;
            let offset = position.map_or(0, |position| position.offset);
            let record = BlankedRecord { tenant, key, offset };
            for event in events {
                if let Some(left) = range.blank(record, &event.name, &event.data) {
                    event.data = left;
                    page.events += 1;
                }
            }
            page.reached = offset;
        }
        Ok(BlankedPage { reached: range.through, ..page })
    }

    async fn scrub(&self) -> Result<(), StoreError> {
        self.open().map(drop)
    }

    async fn now(&self) -> Result<Time, StoreError> {
        self.open().map(|_| self.clock.now())
    }

    fn explain(&self, asked: ExplainRequest<'_>) -> Explanation {
        // The model is the reference: what it is sent is the engine-neutral text.
        let text = asked.to_string();
        let purpose = "under the store's lock".into();
        let cost = match asked {
            ExplainRequest::Commit(_) | ExplainRequest::ClaimRange(..) => {
                vec![("durability".into(), "none: gone with the process".into())]
            }
            _ => Vec::new(),
        };
        Explanation { requests: vec![EngineRequest { purpose, text, parameters: Vec::new() }], cost }
    }

    async fn close(&self) {
        self.lock().closed = true;
    }
}

/// A page of the first rows of a list.
fn page(mut rows: Vec<Row>, limit: usize, cursor_at: impl Fn(&Row) -> crate::read::Cursor) -> Page {
    let more = rows.len() > limit;
    rows.truncate(limit);
    let next = rows.last().filter(|_| more).map(cursor_at);
    Page { rows, next }
}

fn in_range(query: &Query, sort: &[Value]) -> bool {
    let prefix = query.prefix_values();
    if compare_values(sort.iter().take(prefix.len()), prefix).is_ne() {
        return false;
    }
    let Some(value) = sort.get(prefix.len()) else { return true };
    let (lower, upper) = query.bounds();
    let accepts = |bound: &Bound<Value>, inside: Ordering| match bound {
        Bound::Unbounded => true,
        Bound::Included(limit) => value.compare(limit).is_some_and(|order| order == inside || order.is_eq()),
        Bound::Excluded(limit) => value.compare(limit) == Some(inside),
    };
    accepts(lower, Ordering::Greater) && accepts(upper, Ordering::Less)
}

/// A stored row in the shape of the table that the caller knows, which may have fewer columns.
fn seen_as(row: Row, table: &Arc<Table>) -> Row {
    if Arc::ptr_eq(row.table(), table) || **row.table() == **table {
        return row;
    }
    let values = table.columns().iter().map(|column| row.get(&column.name).cloned().unwrap_or(Value::Null));
    Row::new(table.clone(), row.tenant().clone(), values.collect(), row.version())
}

/// A written row in the shape of the live table: columns that the writer does not know keep their content.
fn merged(row: &Row, old: Option<&Row>, schema: &Schema) -> Row {
    let live = schema.table(row.table().name()).filter(|live| !Arc::ptr_eq(live, row.table()));
    let Some(live) = live else { return row.clone() };
    let values = live.columns().iter().map(|column| {
        let written = row.get(&column.name).or_else(|| old.and_then(|old| old.get(&column.name)));
        written.or(column.default.as_ref()).cloned().unwrap_or(Value::Null)
    });
    Row::new(live.clone(), row.tenant().clone(), values.collect(), row.version())
}
