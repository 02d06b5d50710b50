//! Log records as items.
//!
//! | table | key | content |
//! |---|---|---|
//! | `statehouse_operations` | `PK` = tenant`#`operation | one small item for each operation: its partition, the sort key of its pending record, and its offset once it has one. It is put on the condition that it does not exist, so an operation is applied at most once. |
//! | `statehouse_pending` | `partition`, `place` = stamp`#`tenant`#`operation | the record until it has an offset, with the keys of the rows that its plan names |
//! | `statehouse_log` | `partition`, `offset` | the record |
//!
//! A plan puts an operation and a pending record in one transaction with its rows. [`crate::sequencer`] moves pending
//! records into the log. A plan whose events belong to several partitions puts a pending record into each of them: the
//! *commit record*, which the operation names, and a *part* in each other partition, whose sort key has a suffix.

use aws_sdk_dynamodb::types::AttributeValue;
use statehouse_store::log::{LogPart, RecordView, StoredEvent, write_events};
use statehouse_store::{OperationStatus, Position, Record, StoreError, Tenant, Time};

use crate::expression::{Condition, ExpressionPlaceholders};
use crate::item::{self, Item, ItemKey, PK};
use crate::item_write::{ItemWrite, UpdateClauses, WriteKind};
use crate::key;

pub(crate) const PARTITION: &str = "partition";
pub(crate) const SORT_KEY: &str = "place";
pub(crate) const OFFSET: &str = "offset";
const ATTEMPT: &str = "attempt";
const ROWS: &str = "rows";
/// Marks a pending record as a part.
const PART: &str = "part";
/// Ends the sort_key of a part. A sequencer that knows no parts cannot move a record whose sort_key its operation does not have.
const PART_MARK: &str = "#+";

/// The names of the log's tables on the server.
#[derive(Clone, Debug)]
pub(crate) struct LogTables {
    pub(crate) operations: String,
    pub(crate) pending: String,
    pub(crate) log: String,
}

/// Bytes of a pending record up to which it holds the keys of its plan's rows. If the record is larger, the keys are
/// in the operation, which is small.
const PENDING_BYTES_MAX: usize = 380_000;
/// Bytes of these keys up to which each of several pending records of a plan holds them.
const PART_ROWS_BYTES_MAX: usize = 2_000;

/// A stored operation.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct OperationItem {
    pub(crate) partition: u32,
    pub(crate) sort_key: String,
    /// The attempt that put it. A writer recognizes its own operation by it.
    pub(crate) attempt: String,
    /// The offset of the record, once it has one.
    pub(crate) offset: Option<u64>,
}

/// A record that has no offset yet.
#[derive(Clone, Debug)]
pub(crate) struct UnnumberedRecord {
    pub(crate) sort_key: String,
    pub(crate) stamp: i64,
    pub(crate) record: Record,
    /// The keys of the rows that the plan names; `None` if the operation holds them.
    pub(crate) rows: Option<Vec<ItemKey>>,
    /// The events as they are stored.
    events: String,
    /// Whether it is a part, which no operation names.
    pub(crate) part: bool,
}

/// What a plan puts on its rows: the partitions and the sort key of its pending records.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct LogMarker<'m> {
    /// The first is the partition of the commit record.
    pub(crate) partitions: Vec<u32>,
    pub(crate) stamp: i64,
    pub(crate) operation: &'m str,
}

impl LogMarker<'_> {
    /// The plan's sort_key among the pending of a partition; `None` if it has no record there.
    pub(crate) fn sort_key_in(&self, partition: u32, tenant: &Tenant) -> Option<String> {
        let number = self.partitions.iter().position(|of| *of == partition)?;
        let sort_key = sort_key(self.stamp, tenant, self.operation);
        Some(if number == 0 { sort_key } else { part_sort_key(&sort_key) })
    }
}

/// The sort_key of a part, from that of its plan's commit record.
fn part_sort_key(sort_key: &str) -> String {
    format!("{sort_key}{PART_MARK}")
}

/// The sort_key of a record among the pending ones of its partition: in the order of stamps.
pub(crate) fn sort_key(stamp: i64, tenant: &Tenant, operation: &str) -> String {
    format!("{}#{tenant}#{operation}", key::int(stamp))
}

/// The marker of a plan. The tenant is that of the row.
pub(crate) fn marker(partitions: &[u32], stamp: i64, operation: &str) -> String {
    let partitions: Vec<String> = partitions.iter().map(u32::to_string).collect();
    format!("{}#{}#{operation}", partitions.join(","), key::int(stamp))
}

/// Reads back what [`marker`] wrote.
pub(crate) fn parse_marker(marker: &str) -> Option<LogMarker<'_>> {
    let mut parts = marker.splitn(3, '#');
    let (partitions, stamp, operation) = (parts.next()?, parts.next()?, parts.next()?);
    let partitions = partitions.split(',').map(|partition| partition.parse().ok()).collect::<Option<_>>()?;
    Some(LogMarker { partitions, stamp: key::parse_int(stamp)?, operation })
}

/// The key of an operation.
pub(crate) fn operation_key(tenant: &Tenant, operation: &str) -> Item {
    Item::from([(PK.to_owned(), AttributeValue::S(format!("{tenant}#{operation}")))])
}

/// The key of a pending record.
pub(crate) fn pending_key(partition: u32, sort_key: &str) -> Item {
    Item::from([
        (PARTITION.to_owned(), item::number(partition.into())),
        (SORT_KEY.to_owned(), AttributeValue::S(sort_key.to_owned())),
    ])
}

/// The key of a record in the log.
pub(crate) fn log_key(partition: u32, offset: u64) -> Item {
    Item::from([
        (PARTITION.to_owned(), item::number(partition.into())),
        (OFFSET.to_owned(), AttributeValue::N(offset.to_string())),
    ])
}

/// The events of a record as they are stored.
fn events_of(record: &Record, parts: &[LogPart]) -> Result<String, StoreError> {
    let location = || format!("the record of operation {}", record.operation);
    write_events(&record.events, parts).map_err(|error| StoreError::corrupt(location(), error.to_string()))
}

fn content(record: &Record, events: &str) -> Item {
    let status = match record.status {
        OperationStatus::Applied => "applied",
        OperationStatus::Aborted => "aborted",
    };
    let texts = [
        ("tenant", record.tenant.as_str()),
        ("operation", &record.operation),
        ("resource", &record.resource),
        ("key", &record.key),
        ("fingerprint", &record.fingerprint),
        ("fate", status),
        ("events", events),
    ];
    let mut item: Item =
        texts.into_iter().map(|(name, text)| (name.to_owned(), item::string(text))).collect();
    item.insert("at".to_owned(), item::string(&record.at.to_string()));
    item
}

/// The record in an item of the log or of the pending.
pub(crate) fn parse(item: &Item, view: RecordView) -> Result<Record, StoreError> {
    let location =
        || format!("the log record {:?}/{:?}", item.get(PARTITION), item.get(OFFSET).or(item.get(SORT_KEY)));
    let missing =
        |name: &str| StoreError::corrupt(location(), format!("attribute {name} is missing or wrong"));
    let text = |name: &str| item::plain_text(item, name).ok_or_else(|| missing(name));
    let status = match text("fate")? {
        "applied" => OperationStatus::Applied,
        "aborted" => OperationStatus::Aborted,
        _ => return Err(missing("fate")),
    };
    let partition = item::integer(item, PARTITION).and_then(|partition| u32::try_from(partition).ok());
    let offset = item::integer(item, OFFSET).and_then(|offset| u64::try_from(offset).ok());
    let events: Vec<StoredEvent> = serde_json::from_str(text("events")?).map_err(|_| missing("events"))?;
    let record = Record {
        position: partition.zip(offset).map(|(partition, offset)| Position { partition, offset }),
        also_at: Vec::new(),
        tenant: Tenant::new(text("tenant")?).map_err(|_| missing("tenant"))?,
        operation: text("operation")?.to_owned(),
        resource: text("resource")?.to_owned(),
        key: text("key")?.to_owned(),
        at: text("at")?.parse::<Time>().map_err(|_| missing("at"))?,
        fingerprint: text("fingerprint")?.to_owned(),
        status,
        events: Vec::new(),
    };
    Ok(view.of(record, events))
}

/// A record of the log as blanking it needs it: tenant, key, offset, and the events as they are stored.
pub(crate) fn parse_stored(item: &Item) -> Result<(Tenant, &str, u64, &str), StoreError> {
    let wrong = |name: &str| {
        let place = format!("the log record {:?}/{:?}", item.get(PARTITION), item.get(OFFSET));
        StoreError::corrupt(place, format!("attribute {name} is missing or wrong"))
    };
    let text = |name: &str| item::plain_text(item, name).ok_or_else(|| wrong(name));
    let tenant = Tenant::new(text("tenant")?).map_err(|_| wrong("tenant"))?;
    let offset = item::integer(item, OFFSET).and_then(|offset| u64::try_from(offset).ok());
    Ok((tenant, text("key")?, offset.ok_or_else(|| wrong(OFFSET))?, text("events")?))
}

/// Whether the plan of a record in the log has records in further partitions, and this is its commit record.
pub(crate) fn has_parts(item: &Item) -> Result<bool, StoreError> {
    Ok(parse(item, RecordView::Operation)?.position.is_none())
}

/// Reads an operation.
pub(crate) fn parse_operation(item: &Item) -> Result<OperationItem, StoreError> {
    let wrong =
        || StoreError::corrupt(format!("operation {:?}", item.get(PK)), "an attribute is missing or wrong");
    Ok(OperationItem {
        partition: item::integer(item, PARTITION).and_then(|n| u32::try_from(n).ok()).ok_or_else(wrong)?,
        sort_key: item::text(item, SORT_KEY).ok_or_else(wrong)?.to_owned(),
        attempt: item::text(item, ATTEMPT).ok_or_else(wrong)?.to_owned(),
        offset: item::integer(item, OFFSET).and_then(|offset| u64::try_from(offset).ok()),
    })
}

/// Reads a pending record.
pub(crate) fn parse_pending(item: &Item) -> Result<UnnumberedRecord, StoreError> {
    let sort_key = item::text(item, SORT_KEY)
        .ok_or_else(|| StoreError::corrupt("a pending record", format!("{SORT_KEY} is missing")))?;
    let wrong = |what: &str| StoreError::corrupt(format!("the pending record {sort_key:?}"), what.to_owned());
    let stamp = sort_key
        .split('#')
        .next()
        .and_then(key::parse_int)
        .ok_or_else(|| wrong("its sort key has no stamp"))?;
    let rows = parse_rows(item).map_err(|error| wrong(&error))?;
    let events = item::plain_text(item, "events").ok_or_else(|| wrong("it has no events"))?.to_owned();
    let record = parse(item, RecordView::Operation)?;
    Ok(UnnumberedRecord {
        sort_key: sort_key.to_owned(),
        stamp,
        record,
        rows,
        events,
        part: item.contains_key(PART),
    })
}

/// The keys of rows in a pending record or an operation.
pub(crate) fn parse_rows(item: &Item) -> Result<Option<Vec<ItemKey>>, String> {
    let Some(rows) = item::text(item, ROWS) else { return Ok(None) };
    let rows: Vec<(String, String, Option<String>)> =
        serde_json::from_str(rows).map_err(|error| error.to_string())?;
    Ok(Some(rows.into_iter().map(|(table, pk, sk)| ItemKey { table, pk, sk }).collect()))
}

/// The approximate bytes of an item.
fn weight(item: &Item) -> usize {
    item.iter().map(|(name, value)| name.len() + value.as_s().map_or(20, String::len)).sum()
}

/// The log entry of a plan that is to be written.
pub(crate) struct LogWrite<'e> {
    /// The commit record.
    pub(crate) record: &'e Record,
    /// Its partition.
    pub(crate) partition: u32,
    /// The shares of further partitions.
    pub(crate) parts: &'e [LogPart],
    pub(crate) stamp: i64,
    /// Stored with the operation. The writer recognizes its own operation by it.
    pub(crate) attempt: &'e str,
    /// The keys of the rows that the plan names.
    pub(crate) rows: &'e [ItemKey],
}

impl LogTables {
    /// The puts of a logged plan: its operation, its record, and a record for each further partition. The operation is the
    /// first, so that its result has a fixed index.
    pub(crate) fn enter(&self, entering: &LogWrite<'_>) -> Result<Vec<ItemWrite>, StoreError> {
        let LogWrite { record, partition, parts, stamp, attempt, rows } = *entering;
        let sort_key = sort_key(stamp, &record.tenant, &record.operation);
        let mut operation = operation_key(&record.tenant, &record.operation);
        let operation_key = operation.clone();
        operation.insert(PARTITION.to_owned(), item::number(partition.into()));
        operation.insert(SORT_KEY.to_owned(), AttributeValue::S(sort_key.clone()));
        operation.insert(ATTEMPT.to_owned(), AttributeValue::S(attempt.to_owned()));
        let mut pending = vec![(partition, sort_key.clone(), content(record, &events_of(record, parts)?))];
        for part in parts {
            let record = part.record(record)?;
            let mut item = content(&record, &events_of(&record, &[])?);
            item.insert(PART.to_owned(), item::number(1));
            pending.push((part.partition, part_sort_key(&sort_key), item));
        }
        let rows: Vec<_> = rows.iter().map(|key| (&key.table, &key.pk, &key.sk)).collect();
        let rows = serde_json::to_string(&rows)
            .map_err(|error| StoreError::corrupt("the rows of a plan", error.to_string()))?;
        let is_short = parts.is_empty() || rows.len() <= PART_ROWS_BYTES_MAX;
        let fits = |(_, _, item): &(u32, String, Item)| weight(item) + rows.len() <= PENDING_BYTES_MAX;
        if is_short && pending.iter().all(fits) {
            for (_, _, item) in &mut pending {
                item.insert(ROWS.to_owned(), AttributeValue::S(rows.clone()));
            }
        } else {
            operation.insert(ROWS.to_owned(), AttributeValue::S(rows));
        }
        let mut terms = ExpressionPlaceholders::default();
        let once = Condition::missing(&mut terms, PK);
        let bytes = weight(&operation);
        let operation =
            ItemWrite::new(&self.operations, operation_key, WriteKind::Put(operation), once, terms);
        let puts = pending
            .into_iter()
            .map(|(partition, sort_key, item)| self.put_pending(partition, &sort_key, item));
        Ok(std::iter::once(operation.weighing(bytes)).chain(puts).collect())
    }

    /// Replaces the events of a record in the log, if it is still there.
    pub(crate) fn replace_events(&self, partition: u32, offset: u64, events: &str) -> ItemWrite {
        let mut terms = ExpressionPlaceholders::default();
        let mut clauses = UpdateClauses::default();
        clauses.set(&mut terms, "events", item::string(events));
        let there = Condition::exists(&mut terms, OFFSET);
        ItemWrite::update(&self.log, log_key(partition, offset), &clauses, there, terms)
    }

    fn put_pending(&self, partition: u32, sort_key: &str, mut item: Item) -> ItemWrite {
        let key = pending_key(partition, sort_key);
        item.extend(key.clone());
        let mut terms = ExpressionPlaceholders::default();
        let free = Condition::missing(&mut terms, PARTITION);
        let bytes = weight(&item);
        ItemWrite::new(&self.pending, key, WriteKind::Put(item), free, terms).weighing(bytes)
    }

    /// Gives a pending record its offset: three writes of one transaction, or two for a part, which no operation names.
    pub(crate) fn sequence(&self, pending: &UnnumberedRecord, partition: u32, offset: u64) -> Vec<ItemWrite> {
        let mut record = content(&pending.record, &pending.events);
        let key = log_key(partition, offset);
        record.extend(key.clone());
        let mut terms = ExpressionPlaceholders::default();
        let free = Condition::missing(&mut terms, OFFSET);
        let put = ItemWrite::new(&self.log, key, WriteKind::Put(record), free, terms);

        let mut terms = ExpressionPlaceholders::default();
        let there = Condition::exists(&mut terms, SORT_KEY);
        let key = pending_key(partition, &pending.sort_key);
        let delete = ItemWrite::new(&self.pending, key, WriteKind::Delete, there, terms);
        if pending.part {
            return vec![put, delete];
        }

        let mut terms = ExpressionPlaceholders::default();
        let mut clauses = UpdateClauses::default();
        clauses.set(&mut terms, OFFSET, AttributeValue::N(offset.to_string()));
        let open = Condition::compare(&mut terms, SORT_KEY, "=", AttributeValue::S(pending.sort_key.clone()));
        let open = open.and(Condition::missing(&mut terms, OFFSET));
        let key = operation_key(&pending.record.tenant, &pending.record.operation);
        let update = ItemWrite::update(&self.operations, key, &clauses, open, terms);
        vec![put, delete, update]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn markers_lead_to_operations_of_any_name() {
        for (partitions, stamp, operation) in
            [(vec![7], 5, "op"), (vec![3, 15, 0], -5, "a#b#c"), (vec![0], i64::MAX, "#")]
        {
            let marker = marker(&partitions, stamp, operation);
            assert_eq!(parse_marker(&marker), Some(LogMarker { partitions, stamp, operation }));
        }
    }

    #[test]
    fn a_marker_leads_to_each_partition_of_its_plan() {
        let tenant = Tenant::new("acme").unwrap();
        let text = marker(&[3, 15], 5, "op");
        let marker = parse_marker(&text).unwrap();
        let sort_key = sort_key(5, &tenant, "op");
        assert_eq!(marker.sort_key_in(3, &tenant), Some(sort_key.clone()));
        assert_eq!(marker.sort_key_in(15, &tenant), Some(part_sort_key(&sort_key)));
        assert_eq!(marker.sort_key_in(4, &tenant), None);
    }

    #[test]
    fn records_read_back() {
        let tenant = Tenant::new("acme").unwrap();
        let mut record = Record::aborted(&tenant, "op#1", Time::from_micros(7));
        let mut item = content(&record, "[]");
        assert_eq!(parse(&item, RecordView::Log).unwrap(), record);
        item.extend(log_key(3, 9));
        record.position = Some(Position { partition: 3, offset: 9 });
        assert_eq!(parse(&item, RecordView::Log).unwrap(), record);
        assert!(!has_parts(&item).unwrap());
    }
}
