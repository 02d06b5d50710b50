//! The log: what was written, in the order in which it was committed.
//!
//! A plan with an [`Entry`] leaves a [`Record`] in one partition, chosen by hash of tenant, resource and key
//! (the record's *subject*). Within a partition offsets count from 1 without a gap, a record gets its offset no
//! earlier than its commit becomes certain, and plans that wrote a common row stand in the order of those writes.
//! So a reader that goes by offset never passes over a record that commits late, and never sees the versions of
//! one row out of order. Records that have no row in common stand in *some* serial order.
//!
//! The record is also the commit record: it is unique by tenant and operation id, which is what makes an
//! unknown outcome decidable (see [`crate::Store::resolve`]).
//!
//! **Plans about several subjects.** An event can have a subject of its own ([`EventTemplate::about`]). Each event is read from
//! the partition of its own subject, so one partition has all events of a subject, in the order of the writes. A plan whose
//! events belong to several partitions leaves one record in each ([`parts_of`]), all of them or none. The commit record
//! has all events, because answers and repetitions are made from it; those that belong elsewhere are stored in it as
//! *copies* ([`StoredEvent`]), and [`crate::Store::read_log`] leaves copies out. So a reader of all partitions gets each
//! event once. The records in the further partitions are stored under [`part_operation`], which no plan can be named.

use std::fmt;

use serde::{Deserialize, Serialize};

use crate::bug;
use crate::bug::Bug;
use crate::error::StoreError;
use crate::limits;
use crate::plan::Plan;
use crate::row::Tenant;
use crate::time::Time;

/// A place in the log.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct Position {
    /// Which partition, from 0.
    pub partition: u32,
    /// Which record of it, from 1.
    pub offset: u64,
}

impl fmt::Display for Position {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}:{}", self.partition, self.offset)
    }
}

/// Something that a write means, by name.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Event {
    /// For example `profile.updated`.
    pub name: String,
    /// What readers of the log need to know. An object.
    pub data: serde_json::Value,
    /// Who caused the write, as [`EventTemplate::actor`] said it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub actor: Option<String>,
}

/// An event in a plan: its data may take in a row that only the commit will know.
#[derive(Clone, Debug, PartialEq)]
pub struct EventTemplate {
    /// For example `profile.updated`.
    pub name: String,
    /// The part of the data that the caller knows.
    pub data: serde_json::Map<String, serde_json::Value>,
    /// A writing step whose row is added to the data as `row`: as the step left it, or, for a delete, as it was.
    pub row_of: Option<usize>,
    /// What the event is about, if that is not the subject of the entry. It decides which partition the event is read from.
    pub about: Option<EventSubject>,
    /// Who causes the write. It is stored beside the data, so that no answer and no reader of the data has it.
    pub actor: Option<String>,
}

/// What an event is about.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct EventSubject {
    /// The resource, for example `profile`.
    pub resource: String,
    /// The key, as text.
    pub key: String,
}

impl EventTemplate {
    /// An event without data.
    pub fn named(name: impl Into<String>) -> EventTemplate {
        EventTemplate {
            name: name.into(),
            data: serde_json::Map::new(),
            row_of: None,
            about: None,
            actor: None,
        }
    }

    /// Gives the event a subject of its own. The data does not say it; who reads the log may need it there as well.
    #[must_use]
    pub fn about(mut self, resource: impl Into<String>, key: impl Into<String>) -> EventTemplate {
        self.about = Some(EventSubject { resource: resource.into(), key: key.into() });
        self
    }

    /// Says who causes the write.
    #[must_use]
    pub fn by(mut self, actor: Option<&str>) -> EventTemplate {
        self.actor = actor.map(str::to_owned);
        self
    }

    /// Adds a field to the data.
    #[must_use]
    pub fn with(mut self, field: &str, value: impl Into<serde_json::Value>) -> EventTemplate {
        self.data.insert(field.to_owned(), value.into());
        self
    }

    /// Adds the row that a step leaves (or deletes) to the data, as `row`.
    #[must_use]
    pub fn with_row_of(mut self, step: usize) -> EventTemplate {
        self.row_of = Some(step);
        self
    }
}

/// What a plan leaves in the log.
#[derive(Clone, Debug, PartialEq)]
pub struct Entry {
    /// The resource of the subject, for example `profile`.
    pub resource: String,
    /// The key of the subject, as text.
    pub key: String,
    /// A digest of the request, by which a caller can tell a retry from another request under the same id.
    pub fingerprint: String,
    /// The events; may be empty when only the operation id is to be remembered.
    pub events: Vec<EventTemplate>,
}

impl Entry {
    /// An entry for a subject, without events yet.
    pub fn about(resource: impl Into<String>, key: impl Into<String>) -> Entry {
        Entry { resource: resource.into(), key: key.into(), fingerprint: String::new(), events: Vec::new() }
    }

    /// Adds an event.
    #[must_use]
    pub fn event(mut self, event: EventTemplate) -> Entry {
        self.events.push(event);
        self
    }

    /// Sets the digest of the request.
    #[must_use]
    pub fn fingerprint(mut self, digest: impl Into<String>) -> Entry {
        self.fingerprint = digest.into();
        self
    }
}

/// Whether the operation behind a record was applied, or fenced before it could be.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum OperationStatus {
    /// The plan was applied, and these are its events.
    Applied,
    /// [`crate::Store::resolve`] got there first: nothing was or will be applied under this operation id.
    Aborted,
}

/// One committed plan in the log.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Record {
    /// Where it stands. A record that was read from the log always has one. On an engine that numbers records only after
    /// their commit, the answer to a commit has none, and neither has the record of a repeated commit, of `resolve` or of
    /// `find_operation` until it was numbered. The latter three have none either if the plan left records in several partitions.
    pub position: Option<Position>,
    /// Where the plan's records in further partitions stand. Only the answer to a commit says it, and only with `position`.
    #[serde(default)]
    pub also_at: Vec<Position>,
    /// Whose plan it was.
    pub tenant: Tenant,
    /// The plan's operation id; unique for the tenant as long as the record is kept.
    pub operation: String,
    /// The subject's resource; empty for an aborted operation.
    pub resource: String,
    /// The subject's key; empty for an aborted operation.
    pub key: String,
    /// The engine's clock as the plan saw it.
    pub at: Time,
    /// The digest of the request, as the plan gave it.
    pub fingerprint: String,
    /// Applied or aborted.
    #[serde(rename = "fate")]
    pub status: OperationStatus,
    /// What the plan meant.
    pub events: Vec<Event>,
}

impl Record {
    /// The record of a plan, without its position. A plan without an entry gives one without a subject.
    pub fn of(plan: &Plan, at: Time, events: Vec<Event>) -> Record {
        let entry = plan.entry();
        let text = |of: fn(&Entry) -> &String| entry.map(of).cloned().unwrap_or_default();
        Record {
            position: None,
            also_at: Vec::new(),
            tenant: plan.tenant().clone(),
            operation: plan.operation().to_owned(),
            resource: text(|entry| &entry.resource),
            key: text(|entry| &entry.key),
            at,
            fingerprint: text(|entry| &entry.fingerprint),
            status: OperationStatus::Applied,
            events,
        }
    }

    /// The record that fences an operation, without its position. It goes to the partition of
    /// `partition_of(tenant, "", operation, …)`.
    pub fn aborted(tenant: &Tenant, operation: &str, at: Time) -> Record {
        Record {
            position: None,
            also_at: Vec::new(),
            tenant: tenant.clone(),
            operation: operation.to_owned(),
            resource: String::new(),
            key: String::new(),
            at,
            fingerprint: String::new(),
            status: OperationStatus::Aborted,
            events: Vec::new(),
        }
    }
}

/// Records of one partition, in order.
#[derive(Clone, Debug, PartialEq)]
pub struct LogPage {
    /// The records after the asked offset, without a gap.
    pub records: Vec<Record>,
    /// The offset of the oldest record that is kept. A reader whose next offset is below this has missed records.
    pub oldest: u64,
    /// The offset of the newest record; 0 while there is none.
    pub head: u64,
}

/// The share of a further partition in a plan's events.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LogPart {
    /// The partition.
    pub partition: u32,
    /// The subject of the first of its events, which is the subject of its record.
    pub subject: EventSubject,
    /// The places of its events among those of the entry, in order.
    pub events: Vec<usize>,
}

impl LogPart {
    /// The record of this partition, from the plan's commit record. Neither has a position yet.
    pub fn record(&self, whole: &Record) -> Result<Record, Bug> {
        let events: Option<Vec<Event>> =
            self.events.iter().map(|index| whole.events.get(*index).cloned()).collect();
        let events = events.ok_or_else(|| bug!("a part of a plan has events that its record lacks"))?;
        let EventSubject { resource, key } = self.subject.clone();
        Ok(Record { position: None, also_at: Vec::new(), resource, key, events, ..whole.clone() })
    }
}

/// The further partitions that a plan's events belong to, in ascending order; none for a plan about one subject. Refuses a
/// plan that is too large with what it leaves there: where the log has more partitions than a plan was counted for.
pub fn parts_of(plan: &Plan, partitions: u32) -> Result<Vec<LogPart>, StoreError> {
    let Some(entry) = plan.entry().filter(|_| has_several_subjects(plan)) else { return Ok(Vec::new()) };
    let own = partition_of(plan.tenant(), &entry.resource, &entry.key, partitions);
    let mut parts: Vec<LogPart> = Vec::new();
    for (index, draft) in entry.events.iter().enumerate() {
        let Some(subject) = &draft.about else { continue };
        let partition = partition_of(plan.tenant(), &subject.resource, &subject.key, partitions);
        if partition == own {
            continue;
        }
        match parts.iter_mut().find(|part| part.partition == partition) {
            Some(part) => part.events.push(index),
            None => parts.push(LogPart { partition, subject: subject.clone(), events: vec![index] }),
        }
    }
    parts.sort_by_key(|part| part.partition);
    let operations = plan.steps().len() + limits::LOG_ENTRY_OPERATIONS + parts.len();
    if operations > limits::PLAN_OPERATIONS_MAX {
        let what = format!(
            "operations in the plan of operation {} (steps, log entry, and {} further partitions of the log)",
            plan.operation(),
            parts.len()
        );
        return Err(StoreError::LimitExceeded {
            what,
            limit: limits::PLAN_OPERATIONS_MAX,
            actual: operations,
        });
    }
    Ok(parts)
}

/// Whether events of a plan have subjects of their own, so that they may belong to several partitions.
pub fn has_several_subjects(plan: &Plan) -> bool {
    plan.entry().is_some_and(|entry| entry.events.iter().any(|event| event.about.is_some()))
}

/// An event as engines store it.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct StoredEvent {
    pub(crate) name: String,
    pub(crate) data: serde_json::Value,
    /// Whether readers of the log get it from another partition. Records of former versions do not say it.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    copy: bool,
    /// Who caused the write. Records of former versions do not say it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    actor: Option<String>,
}

/// The events of a plan's commit record as text, those of further partitions marked as copies.
pub fn write_events(events: &[Event], parts: &[LogPart]) -> Result<String, serde_json::Error> {
    if parts.is_empty() {
        return serde_json::to_string(events);
    }
    let is_copy = |index: usize| parts.iter().any(|part| part.events.contains(&index));
    let stored = events.iter().enumerate().map(|(index, event)| StoredEvent {
        name: event.name.clone(),
        data: event.data.clone(),
        copy: is_copy(index),
        actor: event.actor.clone(),
    });
    serde_json::to_string(&stored.collect::<Vec<_>>())
}

/// For whom a stored record is read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RecordView {
    /// A reader of the log: without copies.
    Log,
    /// Who asks for an operation: with all events, and without a position if there are records in further partitions.
    Operation,
}

impl RecordView {
    /// A record whose events and operation id are as they were stored.
    pub fn of(self, record: Record, events: Vec<StoredEvent>) -> Record {
        let spread = events.iter().any(|event| event.copy);
        let kept = events.into_iter().filter(|event| self == RecordView::Operation || !event.copy);
        let events = kept.map(|StoredEvent { name, data, actor, .. }| Event { name, data, actor }).collect();
        let hidden = spread && self == RecordView::Operation;
        let operation = match record.position.and_then(|at| whole_operation(&record.operation, at)) {
            Some(whole) => whole.to_owned(),
            None => record.operation,
        };
        Record { position: record.position.filter(|_| !hidden), operation, events, ..record }
    }
}

/// Separates an operation id from the place of a further record.
pub const PART_SEPARATOR: char = '\u{1}';

/// The operation id under which a further record is stored, where ids are unique: with the record's own place, so that the id
/// can be used again once the commit record is forgotten, whether or not its further records are.
pub fn part_operation(operation: &str, at: Position) -> String {
    format!("{operation}{PART_SEPARATOR}{}.{}", at.partition, at.offset)
}

/// Whether a text could be what [`part_operation`] makes, and so is no operation id.
pub(crate) fn is_part_operation(operation: &str) -> bool {
    let is_number = |text: &str| !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit());
    let place = operation.rsplit_once(PART_SEPARATOR).and_then(|(_, place)| place.split_once('.'));
    place.is_some_and(|(partition, offset)| is_number(partition) && is_number(offset))
}

/// The operation id of the plan behind a record that is stored under a [`part_operation`].
fn whole_operation(stored: &str, at: Position) -> Option<&str> {
    let (operation, _) = stored.rsplit_once(PART_SEPARATOR)?;
    (part_operation(operation, at) == stored).then_some(operation)
}

/// The partition of a subject: a stable hash, part of the stored format.
pub fn partition_of(tenant: &Tenant, resource: &str, key: &str, partitions: u32) -> u32 {
    // FNV-1a over the three texts with a separator that none of them can hold, then a finalizer, because FNV's
    // low bits alone are weak for short texts.
    let mut hash: u64 = 0xcbf2_9ce4_8422_2325;
    for text in [tenant.as_str(), resource, key] {
        for byte in text.bytes().chain(std::iter::once(0)) {
            hash ^= u64::from(byte);
            hash = hash.wrapping_mul(0x0100_0000_01b3);
        }
    }
    hash ^= hash >> 33;
    hash = hash.wrapping_mul(0xff51_afd7_ed55_8ccd);
    hash ^= hash >> 33;
    // The remainder is less than a number of 32 bits.
    (hash % u64::from(partitions.max(1))) as u32
}

#[cfg(test)]
mod tests {
    use super::*;

    fn batch(keys: &[&str]) -> Plan {
        let drafts = keys.iter().map(|key| {
            EventTemplate::named("row.set").with("key", *key).about("row", *key).by(Some("key:1"))
        });
        let entry = drafts.fold(Entry::about("row", "first"), Entry::event);
        Plan::of(&Tenant::new("acme").unwrap(), "op")
            .log(entry.event(EventTemplate::named("row.own")))
            .build()
            .unwrap()
    }

    #[test]
    fn events_are_stored_once_for_readers_and_all_of_them_for_answers() {
        let keys: Vec<String> = (0..12).map(|key| key.to_string()).collect();
        let plan = batch(&keys.iter().map(String::as_str).collect::<Vec<_>>());
        let drafts = plan.entry().unwrap().events.iter();
        let events = drafts.map(|draft| crate::eval::finish_event(draft, |_| None));
        let whole = Record::of(&plan, Time::from_micros(1), events.collect());
        assert_eq!(parts_of(&plan, 1).unwrap(), []);
        let parts = parts_of(&plan, 4).unwrap();
        let own = partition_of(plan.tenant(), "row", "first", 4);
        assert!(parts.len() == 3 && parts.iter().all(|part| part.partition != own), "{parts:?}");
        let text = write_events(&whole.events, &parts).unwrap();
        let at = Some(Position { partition: own, offset: 3 });
        let stored = |view: RecordView, text: &str, position, operation: &str| {
            let record = Record { position, operation: operation.to_owned(), ..whole.clone() };
            view.of(record, serde_json::from_str(text).unwrap())
        };
        assert_eq!(stored(RecordView::Operation, &text, at, "op"), whole);
        let mut read = stored(RecordView::Log, &text, at, "op").events;
        for part in &parts {
            let record = part.record(&whole).unwrap();
            assert_eq!(record.key, record.events[0].data["key"].as_str().unwrap());
            let at = Position { partition: part.partition, offset: 7 };
            let text = write_events(&record.events, &[]).unwrap();
            let read_back = stored(RecordView::Log, &text, Some(at), &part_operation("op", at));
            assert_eq!((read_back.operation.as_str(), &read_back.events), ("op", &record.events));
            read.extend(record.events);
        }
        let names = |events: &[Event]| {
            let mut names: Vec<String> = events.iter().map(|event| event.data.to_string()).collect();
            names.sort();
            names
        };
        assert_eq!(names(&read), names(&whole.events));
        // What was stored before events could be copies.
        let old = stored(RecordView::Operation, r#"[{"name":"e","data":{}}]"#, at, "op");
        assert_eq!((old.position, old.events.len()), (at, 1));
    }

    #[test]
    fn a_plan_over_many_partitions_is_counted_with_all_of_them() {
        let keys: Vec<String> = (0..200).map(|key| key.to_string()).collect();
        let plan = batch(&keys.iter().map(String::as_str).collect::<Vec<_>>());
        assert_eq!(parts_of(&plan, 16).unwrap().len(), 15);
        let error = parts_of(&plan, 4096).unwrap_err();
        assert!(matches!(error, StoreError::LimitExceeded { limit: 100, .. }), "{error}");
    }

    #[test]
    fn partitions_are_stable_and_even() {
        let tenant = Tenant::new("acme").unwrap();
        assert_eq!(partition_of(&tenant, "profile", "1", 16), partition_of(&tenant, "profile", "1", 16));
        // Part of the stored format: if this number changes, old logs are read wrongly.
        assert_eq!(partition_of(&tenant, "profile", "42", 1 << 30), 506_087_998);
        let mut counts = [0_u32; 16];
        for key in 0..16_000 {
            counts[partition_of(&tenant, "profile", &key.to_string(), 16) as usize] += 1;
        }
        assert!(counts.iter().all(|count| (850..1150).contains(count)), "{counts:?}");
    }
}
