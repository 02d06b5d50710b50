//! The log: what was written, in the order in which it was committed.
//!
//! A plan with an [`Entry`] leaves one [`Record`] in one partition, chosen by hash of tenant, resource and key
//! (the record's *subject*). Within a partition offsets count from 1 without a gap, a record gets its offset no
//! earlier than its commit becomes certain, and plans that wrote a common row stand in the order of those writes.
//! So a reader that goes by offset never passes over a record that commits late, and never sees the versions of
//! one row out of order. Records that have no row in common stand in *some* serial order.
//!
//! The record is also the commit record: it is unique by tenant and operation id, which is what makes an
//! unknown outcome decidable (see [`crate::Store::resolve`]).

use std::fmt;

use serde::{Deserialize, Serialize};

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
}

/// An event in a plan: its data may take in a row that only the commit will know.
#[derive(Clone, Debug, PartialEq)]
pub struct Draft {
    /// For example `profile.updated`.
    pub name: String,
    /// The part of the data that the caller knows.
    pub data: serde_json::Map<String, serde_json::Value>,
    /// A writing step whose row is added to the data as `row`: as the step left it, or, for a delete, as it was.
    pub row_of: Option<usize>,
}

impl Draft {
    /// An event without data.
    pub fn named(name: impl Into<String>) -> Draft {
        Draft { name: name.into(), data: serde_json::Map::new(), row_of: None }
    }

    /// Adds a field to the data.
    #[must_use]
    pub fn with(mut self, field: &str, value: impl Into<serde_json::Value>) -> Draft {
        self.data.insert(field.to_owned(), value.into());
        self
    }

    /// Adds the row that a step leaves (or deletes) to the data, as `row`.
    #[must_use]
    pub fn with_row_of(mut self, step: usize) -> Draft {
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
    pub events: Vec<Draft>,
}

impl Entry {
    /// An entry for a subject, without events yet.
    pub fn about(resource: impl Into<String>, key: impl Into<String>) -> Entry {
        Entry { resource: resource.into(), key: key.into(), fingerprint: String::new(), events: Vec::new() }
    }

    /// Adds an event.
    #[must_use]
    pub fn event(mut self, event: Draft) -> Entry {
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
pub enum Fate {
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
    /// `recorded` until it was numbered.
    pub position: Option<Position>,
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
    pub fate: Fate,
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
            tenant: plan.tenant().clone(),
            operation: plan.operation().to_owned(),
            resource: text(|entry| &entry.resource),
            key: text(|entry| &entry.key),
            at,
            fingerprint: text(|entry| &entry.fingerprint),
            fate: Fate::Applied,
            events,
        }
    }

    /// The record that fences an operation, without its position. It goes to the partition of
    /// `partition_of(tenant, "", operation, …)`.
    pub fn aborted(tenant: &Tenant, operation: &str, at: Time) -> Record {
        Record {
            position: None,
            tenant: tenant.clone(),
            operation: operation.to_owned(),
            resource: String::new(),
            key: String::new(),
            at,
            fingerprint: String::new(),
            fate: Fate::Aborted,
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
    u32::try_from(hash % u64::from(partitions.max(1))).unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::*;

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
