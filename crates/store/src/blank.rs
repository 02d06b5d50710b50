//! Blank events: what is left in the log of the events of a row that was erased.
//!
//! A record stays at its position with its operation id, its time and its fingerprint. Of each of its events about an erased row the
//! name, the subject and the version stay; all other data is replaced by `"erased": true`. The copies of events that a commit record
//! has (see [`crate::log`]) are blanked as well, because answers to repetitions are made from them.
//!
//! - B1. An event is blanked if it is about one of the subjects ([`event_subject`]), in whichever plan. *[`BlankRange::blank`], the one
//!   decision of all engines.*
//! - B2. In the partition of a subject, events from the position of the erasure on stay: they tell of the erasure, and of a row that was
//!   created under the same key since. *The position that the caller gives with the subject.* In other partitions, which have copies
//!   only, every event about the subject in the range is blanked.
//! - B3. The event that tells of an erasure stays, because readers need it and it has the key alone. *Its name ends in `.erased`.*
//! - B4. Blanking a range again changes nothing.

use std::collections::BTreeMap;
use std::sync::Arc;

use serde_json::{Map, Value as Json};

use crate::log::{EventSubject, Position, StoredEvent};
use crate::row::Tenant;
use crate::table::VERSION;

/// Marks the data of a blank event.
pub const ERASED: &str = "erased";
/// Where the data of an event has its own key, if that is not the key of the record.
pub const SUBJECT: &str = "subject";
/// Where the data of an event has the resource that its name does not tell.
pub const RESOURCE: &str = "resource";

/// The resource and the key that an event is about, in a record with this key. The resource is the first part of the name, as in
/// `profile.updated`; an event whose name has one part says the resource in its data, or is about none.
pub fn event_subject<'e>(record_key: &'e str, name: &'e str, data: &'e Json) -> Option<(&'e str, &'e str)> {
    let resource = match name.split_once('.') {
        Some((resource, _)) => resource,
        None => data.get(RESOURCE)?.as_str()?,
    };
    Some((resource, data.get(SUBJECT).and_then(Json::as_str).unwrap_or(record_key)))
}

/// Whether an event was blanked.
pub fn is_blank(data: &Json) -> bool {
    data.get(ERASED) == Some(&Json::Bool(true))
}

/// Whether an event tells that a row was erased.
pub fn tells_erasure(name: &str) -> bool {
    name.rsplit_once('.').is_some_and(|(_, what)| what == ERASED)
}

/// The rows whose events are blanked, by tenant, each with the position of the record of its erasure.
pub type BlankSubjects = BTreeMap<Tenant, BTreeMap<EventSubject, Position>>;

/// Records of one partition whose events are to be blanked if they are about certain rows.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct BlankRange {
    /// The partition.
    pub partition: u32,
    /// Records behind this offset.
    pub after: u64,
    /// Records up to this offset.
    pub through: u64,
    /// How many records are looked at, at most; never more than [`crate::limits::PAGE_MAX`].
    pub limit: usize,
    /// The rows.
    pub subjects: Arc<BlankSubjects>,
}

/// How far a range was blanked.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BlankedPage {
    /// The offset up to which it is done; `through` if no record is left.
    pub reached: u64,
    /// How many events were blanked.
    pub events: usize,
}

/// A stored record, as far as blanking it needs to know.
#[derive(Clone, Copy, Debug)]
pub struct BlankedRecord<'r> {
    /// Its tenant.
    pub tenant: &'r Tenant,
    /// Its key.
    pub key: &'r str,
    /// Its offset.
    pub offset: u64,
}

impl BlankRange {
    /// What is left of an event's data (B1 to B4); `None` if it stays as it is.
    pub fn blank(&self, record: BlankedRecord<'_>, name: &str, data: &Json) -> Option<Json> {
        let subjects = self.subjects.get(record.tenant)?;
        let (resource, key) = event_subject(record.key, name, data)?;
        let subject = EventSubject { resource: resource.to_owned(), key: key.to_owned() };
        let erased_at = subjects.get(&subject)?;
        let is_later = erased_at.partition == self.partition && record.offset >= erased_at.offset;
        if is_later || tells_erasure(name) || is_blank(data) {
            return None;
        }
        let version = data.get("row").and_then(|row| row.get(VERSION)).or_else(|| data.get(VERSION));
        let mut left = Map::from_iter([(ERASED.to_owned(), Json::Bool(true))]);
        left.extend(version.map(|version| (VERSION.to_owned(), version.clone())));
        let named = [SUBJECT, RESOURCE].into_iter().filter_map(|field| Some((field, data.get(field)?)));
        left.extend(named.map(|(field, value)| (field.to_owned(), value.clone())));
        Some(Json::Object(left))
    }

    /// The events of a record after blanking, as text, and how many were blanked; `None` if nothing changes.
    pub fn blank_stored(
        &self,
        record: BlankedRecord<'_>,
        events: &str,
    ) -> Result<Option<(String, usize)>, serde_json::Error> {
        if !self.subjects.contains_key(record.tenant) {
            return Ok(None);
        }
        let mut events: Vec<StoredEvent> = serde_json::from_str(events)?;
        let mut blanked = 0;
        for event in &mut events {
            if let Some(left) = self.blank(record, &event.name, &event.data) {
                event.data = left;
                blanked += 1;
            }
        }
        if blanked == 0 { Ok(None) } else { Ok(Some((serde_json::to_string(&events)?, blanked))) }
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn range(partition: u32) -> BlankRange {
        let subject = EventSubject { resource: "profile".into(), key: "1".into() };
        let erased_at = Position { partition: 3, offset: 7 };
        let subjects =
            BlankSubjects::from([(Tenant::new("acme").unwrap(), BTreeMap::from([(subject, erased_at)]))]);
        BlankRange { partition, after: 0, through: 9, limit: 10, subjects: Arc::new(subjects) }
    }

    fn left(partition: u32, offset: u64, key: &str, name: &str, data: &Json) -> Option<Json> {
        let tenant = Tenant::new("acme").unwrap();
        range(partition).blank(BlankedRecord { tenant: &tenant, key, offset }, name, data)
    }

    #[test]
    fn name_subject_and_version_stay() {
        let data = json!({"row": {"name": "Ann", "version": 4}, "subject": "1", "reason": "Ann asked"});
        let blank = json!({"erased": true, "version": 4, "subject": "1"});
        assert_eq!(left(3, 6, "2", "profile.updated", &data), Some(blank.clone()));
        assert!(is_blank(&blank));
        assert_eq!(left(3, 6, "2", "profile.updated", &blank), None);
        let answer = json!({"resource": "profile", "subject": "1", "answer": {"name": "Ann"}});
        let blank = json!({"erased": true, "resource": "profile", "subject": "1"});
        assert_eq!(left(5, 6, "2", "unchanged", &answer), Some(blank));
    }

    #[test]
    fn other_rows_and_later_events_stay() {
        let data = json!({"row": {"name": "Ann", "version": 4}});
        assert_eq!(left(3, 6, "2", "profile.updated", &data), None);
        assert_eq!(left(3, 6, "1", "profiles.updated", &data), None);
        assert_eq!(left(3, 6, "1", "unchanged", &json!({"answer": {}})), None);
        assert_eq!(left(3, 6, "1", "profile.erased", &json!({"of": {"user_id": 1}})), None);
        // From the erasure on in its own partition; everywhere in others, which have copies only.
        assert_eq!(left(3, 7, "1", "profile.updated", &data), None);
        assert!(left(3, 6, "1", "profile.updated", &data).is_some());
        assert!(left(4, 8, "1", "profile.updated", &data).is_some());
        let other = Tenant::new("other").unwrap();
        let record = BlankedRecord { tenant: &other, key: "1", offset: 1 };
        assert_eq!(range(3).blank(record, "profile.updated", &data), None);
    }

    #[test]
    fn copies_stay_copies() {
        let tenant = Tenant::new("acme").unwrap();
        let record = BlankedRecord { tenant: &tenant, key: "2", offset: 1 };
        let stored = r#"[{"name":"profile.updated","data":{"row":{"name":"Ann"},"subject":"1"},"copy":true},{"name":"profile.updated","data":{}}]"#;
        let (text, blanked) = range(4).blank_stored(record, stored).unwrap().unwrap();
        let expected = r#"[{"name":"profile.updated","data":{"erased":true,"subject":"1"},"copy":true},{"name":"profile.updated","data":{}}]"#;
        assert_eq!((text.as_str(), blanked), (expected, 1));
        assert_eq!(range(4).blank_stored(record, &text).unwrap(), None);
    }
}
