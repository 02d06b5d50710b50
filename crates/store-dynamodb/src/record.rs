//! Log records as items, and where they stand.
//!
//! | table | key | what it holds |
//! |---|---|---|
//! | `statehouse_operations` | `PK` = tenant`#`operation | one small item for each operation: its partition, its place among the pending, and its offset once it has one. That it can be put only once is what makes an operation happen once. |
//! | `statehouse_pending` | `partition`, `place` = stamp`#`tenant`#`operation | the record, until it has an offset, and the rows that its plan named |
//! | `statehouse_log` | `partition`, `offset` | the record, for good |
//!
//! A plan puts an operation and a pending record, in one transaction with its rows. [`crate::sequencer`] moves
//! pending records into the log.

use aws_sdk_dynamodb::types::AttributeValue;
use statehouse_store::{Fate, Position, Record, StoreError, Tenant, Time};

use crate::action::{Action, Verb};
use crate::expression::{Condition, Terms};
use crate::item::{self, Item, Key, PK};
use crate::key;

pub(crate) const PARTITION: &str = "partition";
pub(crate) const PLACE: &str = "place";
pub(crate) const OFFSET: &str = "offset";
const ATTEMPT: &str = "attempt";
const ROWS: &str = "rows";

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
}

/// The place of a record among the pending ones of its partition: in the order of stamps.
pub(crate) fn place(stamp: i64, tenant: &Tenant, operation: &str) -> String {
    format!("{}#{tenant}#{operation}", key::int(stamp))
}

/// What a plan leaves on its rows: where its record is pending. The tenant is the row's.
pub(crate) fn marker(partition: u32, stamp: i64, operation: &str) -> String {
    format!("{partition}#{}#{operation}", key::int(stamp))
}

/// Reads back what [`marker`] wrote.
pub(crate) fn parse_marker(marker: &str) -> Option<(u32, i64, &str)> {
    let mut parts = marker.splitn(3, '#');
    let (partition, stamp, operation) = (parts.next()?, parts.next()?, parts.next()?);
    Some((partition.parse().ok()?, key::parse_int(stamp)?, operation))
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

fn content(record: &Record) -> Result<Item, StoreError> {
    let place = || format!("the record of operation {}", record.operation);
    let events = serde_json::to_string(&record.events)
        .map_err(|error| StoreError::corrupt(place(), error.to_string()))?;
    let fate = match record.fate {
        Fate::Applied => "applied",
        Fate::Aborted => "aborted",
    };
    let texts = [
        ("tenant", record.tenant.as_str()),
        ("operation", &record.operation),
        ("resource", &record.resource),
        ("key", &record.key),
        ("fingerprint", &record.fingerprint),
        ("fate", fate),
        ("events", &events),
    ];
    let mut item: Item =
        texts.into_iter().map(|(name, text)| (name.to_owned(), item::string(text))).collect();
    item.insert("at".to_owned(), item::string(&record.at.to_string()));
    Ok(item)
}

/// The record in an item of the log or of the pending.
pub(crate) fn parse(item: &Item) -> Result<Record, StoreError> {
    let place =
        || format!("the log record {:?}/{:?}", item.get(PARTITION), item.get(OFFSET).or(item.get(PLACE)));
    let missing = |name: &str| StoreError::corrupt(place(), format!("attribute {name} is missing or wrong"));
    let text = |name: &str| item::plain_text(item, name).ok_or_else(|| missing(name));
    let fate = match text("fate")? {
        "applied" => Fate::Applied,
        "aborted" => Fate::Aborted,
        _ => return Err(missing("fate")),
    };
    let partition = item::integer(item, PARTITION).and_then(|partition| u32::try_from(partition).ok());
    let offset = item::integer(item, OFFSET).and_then(|offset| u64::try_from(offset).ok());
    Ok(Record {
        position: partition.zip(offset).map(|(partition, offset)| Position { partition, offset }),
        tenant: Tenant::new(text("tenant")?).map_err(|_| missing("tenant"))?,
        operation: text("operation")?.to_owned(),
        resource: text("resource")?.to_owned(),
        key: text("key")?.to_owned(),
        at: text("at")?.parse::<Time>().map_err(|_| missing("at"))?,
        fingerprint: text("fingerprint")?.to_owned(),
        fate,
        events: serde_json::from_str(text("events")?).map_err(|_| missing("events"))?,
    })
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
    Ok(Pending { place: place.to_owned(), stamp, record: parse(item)?, rows })
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

impl LogTables {
    /// The two puts of a logged plan. The operation comes first, so that its verdict is easy to find.
    pub(crate) fn enter(
        &self,
        record: &Record,
        partition: u32,
        stamp: i64,
        attempt: &str,
        rows: &[Key],
    ) -> Result<[Action; 2], StoreError> {
        let place = place(stamp, &record.tenant, &record.operation);
        let mut operation = operation_key(&record.tenant, &record.operation);
        let operation_key = operation.clone();
        operation.insert(PARTITION.to_owned(), item::number(partition.into()));
        operation.insert(PLACE.to_owned(), AttributeValue::S(place.clone()));
        operation.insert(ATTEMPT.to_owned(), AttributeValue::S(attempt.to_owned()));
        let mut pending = content(record)?;
        let pending_key = pending_key(partition, &place);
        pending.extend(pending_key.clone());

        let rows: Vec<_> = rows.iter().map(|key| (&key.table, &key.pk, &key.sk)).collect();
        let rows = serde_json::to_string(&rows)
            .map_err(|error| StoreError::corrupt("the rows of a plan", error.to_string()))?;
        let beside = weight(&pending) + rows.len() <= PENDING_BYTES_MAX;
        let with_rows = if beside { &mut pending } else { &mut operation };
        with_rows.insert(ROWS.to_owned(), AttributeValue::S(rows));

        let mut terms = Terms::default();
        let once = Condition::missing(&mut terms, PK);
        let bytes = weight(&operation);
        let operation = Action::new(&self.operations, operation_key, Verb::Put(operation), once, terms);
        let mut terms = Terms::default();
        let free = Condition::missing(&mut terms, PARTITION);
        let pending_bytes = weight(&pending);
        let pending = Action::new(&self.pending, pending_key, Verb::Put(pending), free, terms);
        Ok([operation.weighing(bytes), pending.weighing(pending_bytes)])
    }

    /// Gives a pending record its offset: three actions of one transaction.
    pub(crate) fn sequence(
        &self,
        pending: &Pending,
        partition: u32,
        offset: u64,
    ) -> Result<[Action; 3], StoreError> {
        let mut record = content(&pending.record)?;
        let key = log_key(partition, offset);
        record.extend(key.clone());
        let mut terms = Terms::default();
        let free = Condition::missing(&mut terms, OFFSET);
        let put = Action::new(&self.log, key, Verb::Put(record), free, terms);

        let mut terms = Terms::default();
        let there = Condition::exists(&mut terms, PLACE);
        let key = pending_key(partition, &pending.place);
        let delete = Action::new(&self.pending, key, Verb::Delete, there, terms);

        let mut terms = Terms::default();
        let mut clauses = crate::action::Clauses::default();
        clauses.set(&mut terms, OFFSET, AttributeValue::N(offset.to_string()));
        let open = Condition::compare(&mut terms, PLACE, "=", AttributeValue::S(pending.place.clone()));
        let open = open.and(Condition::missing(&mut terms, OFFSET));
        let key = operation_key(&pending.record.tenant, &pending.record.operation);
        let update = Action::update(&self.operations, key, &clauses, open, terms);
        Ok([put, delete, update])
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn markers_lead_to_operations_of_any_name() {
        for (stamp, operation) in [(5, "op"), (-5, "a#b#c"), (i64::MAX, "#")] {
            assert_eq!(parse_marker(&marker(7, stamp, operation)), Some((7, stamp, operation)));
        }
    }

    #[test]
    fn records_read_back() {
        let tenant = Tenant::new("acme").unwrap();
        let mut record = Record::aborted(&tenant, "op#1", Time::from_micros(7));
        let mut item = content(&record).unwrap();
        assert_eq!(parse(&item).unwrap(), record);
        item.extend(log_key(3, 9));
        record.position = Some(Position { partition: 3, offset: 9 });
        assert_eq!(parse(&item).unwrap(), record);
    }
}
