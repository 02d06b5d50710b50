//! Log records as items, and where they stand.
//!
//! | table | key | what it holds |
//! |---|---|---|
//! | `statehouse_operations` | `PK` = tenant`#`operation | one small item for each operation: its partition, its place among the pending, and its offset once it has one. That it can be put only once is what makes an operation happen once. |
//! | `statehouse_pending` | `partition`, `place` = stamp`#`tenant`#`operation | the record, until it has an offset, and the rows that its plan named |
//! | `statehouse_log` | `partition`, `offset` | the record, for good |
//!
//! A plan puts an operation and a pending record, in one transaction with its rows. [`crate::sequencer`] moves
//! pending records into the log. A plan whose events belong to several partitions puts a pending record in each of them:
//! the *commit record*, to which the operation leads, and a *part* in each of the others, whose place ends in a mark.

use aws_sdk_dynamodb::types::AttributeValue;
use statehouse_store::log::{LogPart, RecordView, StoredEvent, write_events};
use statehouse_store::{OperationStatus, Position, Record, StoreError, Tenant, Time};

use crate::action::{Action, Verb};
use crate::expression::{Condition, Terms};
use crate::item::{self, Item, Key, PK};
use crate::key;

pub(crate) const PARTITION: &str = "partition";
pub(crate) const PLACE: &str = "place";
pub(crate) const OFFSET: &str = "offset";
const ATTEMPT: &str = "attempt";
const ROWS: &str = "rows";
/// Says of a pending record that it is a part.
const PART: &str = "part";
/// Ends the place of a part. A sequencer that knows no parts cannot move a record whose place its operation does not have.
const PART_MARK: &str = "#+";

/// The names of the log's tables on the server.
#[derive(Clone, Debug)]
pub(crate) struct LogTables {
    pub(crate) operations: String,
    pub(crate) pending: String,
    pub(crate) log: String,
}

/// Bytes of a pending record up to which the keys of its plan's rows stand beside it. A plan can name many rows, and
/// have a record that fills an item by itself; then the keys stand in the operation, which is small.
const PENDING_BYTES_MAX: usize = 380_000;
/// Bytes of these keys up to which they stand beside each pending record of a plan that has several.
const PART_ROWS_BYTES_MAX: usize = 2_000;

/// What is stored of an operation.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Operation {
    pub(crate) partition: u32,
    pub(crate) place: String,
    /// The attempt that put it, by which a writer knows its own.
    pub(crate) attempt: String,
    /// Where the record stands in the log, once it does.
    pub(crate) offset: Option<u64>,
}

/// A record that has no offset yet.
#[derive(Clone, Debug)]
pub(crate) struct Pending {
    pub(crate) place: String,
    pub(crate) stamp: i64,
    pub(crate) record: Record,
    /// The items of the rows that the plan named; `None` where they stand in the operation.
    pub(crate) rows: Option<Vec<Key>>,
    /// The events as they are stored.
    events: String,
    /// Whether it is a part, to which no operation leads.
    pub(crate) part: bool,
}

/// What a plan leaves on its rows: in which partitions it has records, and where they are pending.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Marker<'m> {
    /// That of the commit record first.
    pub(crate) partitions: Vec<u32>,
    pub(crate) stamp: i64,
    pub(crate) operation: &'m str,
}

impl Marker<'_> {
    /// The plan's place among the pending of a partition; `None` if it has no record there.
    pub(crate) fn place_in(&self, partition: u32, tenant: &Tenant) -> Option<String> {
        let number = self.partitions.iter().position(|of| *of == partition)?;
        let place = place(self.stamp, tenant, self.operation);
        Some(if number == 0 { place } else { part_place(&place) })
    }
}

/// The place of a part, from that of its plan's commit record.
fn part_place(place: &str) -> String {
    format!("{place}{PART_MARK}")
}

/// The place of a record among the pending ones of its partition: in the order of stamps.
pub(crate) fn place(stamp: i64, tenant: &Tenant, operation: &str) -> String {
    format!("{}#{tenant}#{operation}", key::int(stamp))
}

/// What a plan leaves on its rows: where its records are pending. The tenant is the row's.
pub(crate) fn marker(partitions: &[u32], stamp: i64, operation: &str) -> String {
    let partitions: Vec<String> = partitions.iter().map(u32::to_string).collect();
    format!("{}#{}#{operation}", partitions.join(","), key::int(stamp))
}

/// Reads back what [`marker`] wrote.
pub(crate) fn parse_marker(marker: &str) -> Option<Marker<'_>> {
    let mut parts = marker.splitn(3, '#');
    let (partitions, stamp, operation) = (parts.next()?, parts.next()?, parts.next()?);
    let partitions = partitions.split(',').map(|partition| partition.parse().ok()).collect::<Option<_>>()?;
    Some(Marker { partitions, stamp: key::parse_int(stamp)?, operation })
}

/// The key of an operation.
pub(crate) fn operation_key(tenant: &Tenant, operation: &str) -> Item {
    Item::from([(PK.to_owned(), AttributeValue::S(format!("{tenant}#{operation}")))])
}

/// The key of a pending record.
pub(crate) fn pending_key(partition: u32, place: &str) -> Item {
    Item::from([
        (PARTITION.to_owned(), item::number(partition.into())),
        (PLACE.to_owned(), AttributeValue::S(place.to_owned())),
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
    let place = || format!("the record of operation {}", record.operation);
    write_events(&record.events, parts).map_err(|error| StoreError::corrupt(place(), error.to_string()))
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
    let place =
        || format!("the log record {:?}/{:?}", item.get(PARTITION), item.get(OFFSET).or(item.get(PLACE)));
    let missing = |name: &str| StoreError::corrupt(place(), format!("attribute {name} is missing or wrong"));
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

/// Whether the plan of a record in the log has records in further partitions, and this is its commit record.
pub(crate) fn has_parts(item: &Item) -> Result<bool, StoreError> {
    Ok(parse(item, RecordView::Operation)?.position.is_none())
}

/// Reads an operation.
pub(crate) fn parse_operation(item: &Item) -> Result<Operation, StoreError> {
    let wrong = || StoreError::corrupt(format!("operation {:?}", item.get(PK)), "it is not complete");
    Ok(Operation {
        partition: item::integer(item, PARTITION).and_then(|n| u32::try_from(n).ok()).ok_or_else(wrong)?,
        place: item::text(item, PLACE).ok_or_else(wrong)?.to_owned(),
        attempt: item::text(item, ATTEMPT).unwrap_or_default().to_owned(),
        offset: item::integer(item, OFFSET).and_then(|offset| u64::try_from(offset).ok()),
    })
}

/// Reads a pending record.
pub(crate) fn parse_pending(item: &Item) -> Result<Pending, StoreError> {
    let place = item::text(item, PLACE).unwrap_or_default();
    let wrong = |what: &str| StoreError::corrupt(format!("the pending record {place:?}"), what.to_owned());
    let stamp = place.split('#').next().and_then(key::parse_int).ok_or_else(|| wrong("it has no stamp"))?;
    let rows = parse_rows(item).map_err(|error| wrong(&error))?;
    let events = item::plain_text(item, "events").ok_or_else(|| wrong("it has no events"))?.to_owned();
    let record = parse(item, RecordView::Operation)?;
    Ok(Pending { place: place.to_owned(), stamp, record, rows, events, part: item.contains_key(PART) })
}

/// The keys of rows that stand in a pending record or in an operation.
pub(crate) fn parse_rows(item: &Item) -> Result<Option<Vec<Key>>, String> {
    let Some(rows) = item::text(item, ROWS) else { return Ok(None) };
    let rows: Vec<(String, String, Option<String>)> =
        serde_json::from_str(rows).map_err(|error| error.to_string())?;
    Ok(Some(rows.into_iter().map(|(table, pk, sk)| Key { table, pk, sk }).collect()))
}

/// About how many bytes an item has.
fn weight(item: &Item) -> usize {
    item.iter().map(|(name, value)| name.len() + value.as_s().map_or(20, String::len)).sum()
}

/// What a logged plan leaves beside its rows.
pub(crate) struct Entering<'e> {
    /// The commit record.
    pub(crate) record: &'e Record,
    /// Its partition.
    pub(crate) partition: u32,
    /// The shares of further partitions.
    pub(crate) parts: &'e [LogPart],
    pub(crate) stamp: i64,
    /// By which the writer knows an operation as its own.
    pub(crate) attempt: &'e str,
    /// The items of the rows that the plan named.
    pub(crate) rows: &'e [Key],
}

impl LogTables {
    /// The puts of a logged plan: its operation, its record, and a record for each further partition. The operation comes
    /// first, so that its verdict is easy to find.
    pub(crate) fn enter(&self, entering: &Entering<'_>) -> Result<Vec<Action>, StoreError> {
        let Entering { record, partition, parts, stamp, attempt, rows } = *entering;
        let place = place(stamp, &record.tenant, &record.operation);
        let mut operation = operation_key(&record.tenant, &record.operation);
        let operation_key = operation.clone();
        operation.insert(PARTITION.to_owned(), item::number(partition.into()));
        operation.insert(PLACE.to_owned(), AttributeValue::S(place.clone()));
        operation.insert(ATTEMPT.to_owned(), AttributeValue::S(attempt.to_owned()));
        let mut pending = vec![(partition, place.clone(), content(record, &events_of(record, parts)?))];
        for part in parts {
            let record = part.record(record)?;
            let mut item = content(&record, &events_of(&record, &[])?);
            item.insert(PART.to_owned(), item::number(1));
            pending.push((part.partition, part_place(&place), item));
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
        let mut terms = Terms::default();
        let once = Condition::missing(&mut terms, PK);
        let bytes = weight(&operation);
        let operation = Action::new(&self.operations, operation_key, Verb::Put(operation), once, terms);
        let puts =
            pending.into_iter().map(|(partition, place, item)| self.put_pending(partition, &place, item));
        Ok(std::iter::once(operation.weighing(bytes)).chain(puts).collect())
    }

    fn put_pending(&self, partition: u32, place: &str, mut item: Item) -> Action {
        let key = pending_key(partition, place);
        item.extend(key.clone());
        let mut terms = Terms::default();
        let free = Condition::missing(&mut terms, PARTITION);
        let bytes = weight(&item);
        Action::new(&self.pending, key, Verb::Put(item), free, terms).weighing(bytes)
    }

    /// Gives a pending record its offset: three actions of one transaction, or two for a part, to which no operation leads.
    pub(crate) fn sequence(&self, pending: &Pending, partition: u32, offset: u64) -> Vec<Action> {
        let mut record = content(&pending.record, &pending.events);
        let key = log_key(partition, offset);
        record.extend(key.clone());
        let mut terms = Terms::default();
        let free = Condition::missing(&mut terms, OFFSET);
        let put = Action::new(&self.log, key, Verb::Put(record), free, terms);

        let mut terms = Terms::default();
        let there = Condition::exists(&mut terms, PLACE);
        let key = pending_key(partition, &pending.place);
        let delete = Action::new(&self.pending, key, Verb::Delete, there, terms);
        if pending.part {
            return vec![put, delete];
        }

        let mut terms = Terms::default();
        let mut clauses = crate::action::Clauses::default();
        clauses.set(&mut terms, OFFSET, AttributeValue::N(offset.to_string()));
        let open = Condition::compare(&mut terms, PLACE, "=", AttributeValue::S(pending.place.clone()));
        let open = open.and(Condition::missing(&mut terms, OFFSET));
        let key = operation_key(&pending.record.tenant, &pending.record.operation);
        let update = Action::update(&self.operations, key, &clauses, open, terms);
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
            assert_eq!(parse_marker(&marker), Some(Marker { partitions, stamp, operation }));
        }
    }

    #[test]
    fn a_marker_leads_to_each_partition_of_its_plan() {
        let tenant = Tenant::new("acme").unwrap();
        let text = marker(&[3, 15], 5, "op");
        let marker = parse_marker(&text).unwrap();
        let place = place(5, &tenant, "op");
        assert_eq!(marker.place_in(3, &tenant), Some(place.clone()));
        assert_eq!(marker.place_in(15, &tenant), Some(part_place(&place)));
        assert_eq!(marker.place_in(4, &tenant), None);
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
