//! What a declared group gets of a record: the events of its resources, and the subjects that order is kept by.
//!
//! - D1. An event is delivered by its own subject, wherever it stands in its record: a group of one resource gets all of
//!   that resource's events and no others. Events of groups themselves, and events about nothing, are delivered to none.
//! - D2. A record is delivered as a whole, and has a subject for each of its delivered events. If it is parked, it is parked
//!   under each of them, and waits if something older of any of them is parked (I4).

use serde_json::{Value as Json, json};
use statehouse_store::{Event, Record, Step, Tenant, Value};

use super::parking::{self, LOG_OFFSET, ParkedRows, SUBJECT};
use super::progress::ConsumerTables;
use super::{bounded, is_applied, offset_of};
use crate::house;
use crate::resource::{Resource, visible_data};

/// Marks events of groups themselves: no group sees them, or two groups would keep each other busy for ever.
pub(super) const BOOKKEEPING: &str = "bookkeeping";

/// The events of a record that a group gets.
pub(super) struct Delivery<'r> {
    record: &'r Record,
    /// Each with its resource and key.
    events: Vec<(&'r Event, &'r str, &'r str)>,
    /// Each once, in the order of the events; never empty.
    subjects: Vec<String>,
}

impl<'r> Delivery<'r> {
    /// What a tenant's group of these resources (all, if there are none) gets of a record, if anything.
    pub(super) fn of(of: &[String], tenant: &Tenant, record: &'r Record) -> Option<Delivery<'r>> {
        if record.tenant != *tenant || !is_applied(record) {
            return None;
        }
        let is_wanted = |resource: &str| of.is_empty() || of.iter().any(|name| name == resource);
        let events: Vec<(&Event, &str, &str)> = record
            .events
            .iter()
            .filter(|event| event.data.get(BOOKKEEPING).is_none())
            .filter_map(|event| {
                house::subject_of(record, event).map(|(resource, key)| (event, resource, key))
            })
            .filter(|(_, resource, _)| is_wanted(resource))
            .collect();
        let subjects = unique(events.iter().map(|(_, resource, key)| subject_text(resource, key)));
        (!events.is_empty()).then_some(Delivery { record, events, subjects })
    }

    /// The subjects of its events.
    pub(super) fn subjects(&self) -> &[String] {
        &self.subjects
    }

    /// How a program is shown it: without the hidden columns of these resources.
    pub(super) fn shown(&self, resources: &[Resource]) -> Json {
        let event = |(event, resource, key): &(&Event, &str, &str)| {
            let subject = subject_text(resource, key);
            let data = visible_data(resources, &event.name, house::data_of(event));
            json!({"name": event.name, SUBJECT: subject, "data": data})
        };
        let events: Vec<Json> = self.events.iter().map(event).collect();
        let (resource, key) = self.events.first().map(|(_, resource, key)| (*resource, *key)).unzip();
        let record = self.record;
        json!({
            LOG_OFFSET: offset_of(record), SUBJECT: self.subjects.first(), "at": Value::Time(record.at).to_json(),
            "operation": record.operation, "resource": resource, "key": key, "events": events,
        })
    }

    /// Whether an older record of one of its subjects is parked, or this very record.
    pub(super) fn waits(&self, lot: &ParkedRows) -> bool {
        self.subjects.iter().any(|subject| lot.has(subject))
    }

    /// Whether this very record is parked.
    pub(super) fn is_parked(&self, lot: &ParkedRows) -> bool {
        self.subjects.iter().any(|subject| lot.holds(subject, offset_of(self.record)))
    }

    /// Notes that it is parked, or will be.
    pub(super) fn add_to(&self, lot: &mut ParkedRows) {
        for subject in &self.subjects {
            lot.add(subject.clone(), offset_of(self.record));
        }
    }

    /// Parks it under each of its subjects (D2).
    pub(super) fn park(
        &self,
        group: &str,
        partition: u32,
        reason: &str,
        tries: i64,
        books: &ConsumerTables,
    ) -> Vec<Step> {
        let offset = offset_of(self.record);
        let park = |subject: &String| parking::park(group, partition, subject, offset, reason, tries, books);
        self.subjects.iter().map(park).collect()
    }
}

/// A subject as text that fits into a key.
fn subject_text(resource: &str, key: &str) -> String {
    bounded(format!("{resource}/{key}"))
}

/// The subjects of a record's events, each once, in their order; that of the record, if it has none.
pub fn subjects_of(record: &Record) -> Vec<String> {
    subjects_among(record, |_| true)
}

/// The same, of some events.
pub(crate) fn subjects_among(record: &Record, is_one: impl Fn(&Event) -> bool) -> Vec<String> {
    let of = |event: &&Event| is_one(event);
    let subject = |event| house::subject_of(record, event).map(|(resource, key)| subject_text(resource, key));
    let found = unique(record.events.iter().filter(of).filter_map(subject));
    if found.is_empty() { vec![super::subject_of(record)] } else { found }
}

fn unique(texts: impl Iterator<Item = String>) -> Vec<String> {
    let mut found: Vec<String> = Vec::new();
    for text in texts {
        if !found.contains(&text) {
            found.push(text);
        }
    }
    found
}
