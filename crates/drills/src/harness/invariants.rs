//! Invariants of an archetype's rows and log, whichever actions changed them.
//!
//! Each archetype has one checker, in `proof/<archetype>/invariants.rs`. Its cases and drills call it when nothing is
//! under way, the simulation at the end of every history, and scenarios when their callers are done.

use std::collections::BTreeMap;
use std::sync::Arc;

use anyhow::{Context, Result, ensure};
use serde_json::Value as Json;
use statehouse::house::subject_of;
use statehouse::resource::key_text;
use statehouse::{House, Resource};
use statehouse_store::{OperationStatus, Row, Scan, Store, Table, Tenant, Time, Type, Value};

use crate::conformance::CaseFuture;
use crate::harness::store_client::{scan, whole_log};

/// A checker of one archetype.
pub(crate) type InvariantCheck = for<'a> fn(&'a CheckScope<'a>) -> CaseFuture<'a>;

/// What a checker looks at: one tenant's rows of a resource and of those declared with it, and the log.
pub(crate) struct CheckScope<'a> {
    pub house: &'a House,
    /// A store without faults below the house.
    pub store: Arc<dyn Store>,
    pub tenant: &'a Tenant,
    pub resource: &'a str,
}

/// A change of a row, as the log has it.
#[derive(Debug)]
pub(crate) struct LoggedChange {
    /// The name of the event without that of the resource: `held`.
    pub name: String,
    /// The time of the record.
    pub at: Time,
    pub data: Json,
}

impl LoggedChange {
    /// A time in the row as it was after the change.
    pub(crate) fn time(&self, column: &str) -> Result<Option<Time>> {
        let text = self.data["row"][column].as_str();
        text.map(str::parse).transpose().with_context(|| format!("{column} in {}", self.data))
    }
}

impl CheckScope<'_> {
    /// A resource that is declared with the checked one: `seat_booking` for `booking`, itself for nothing.
    pub(crate) fn sibling(&self, suffix: &str) -> Result<&Resource> {
        let name =
            if suffix.is_empty() { self.resource.to_owned() } else { format!("{}_{suffix}", self.resource) };
        Ok(self.house.resource(&name)?)
    }

    /// The first table of the checked resource.
    pub(crate) fn table(&self) -> Result<&Arc<Table>> {
        self.sibling("")?.tables.first().context("a resource without a table")
    }

    /// A table whose name is that of the first one with more behind it.
    pub(crate) fn table_beside(&self, suffix: &str) -> Result<&Arc<Table>> {
        let name = format!("{}_{suffix}", self.table()?.name());
        self.house.schema().table(&name).with_context(|| format!("the house has no table {name}"))
    }

    /// All rows of a table.
    pub(crate) async fn rows(&self, table: &Arc<Table>) -> Result<Vec<Row>> {
        scan(self.store.as_ref(), Scan::of(table, self.tenant)).await
    }

    /// The logged changes of each row of a resource, by key and version, without events of some names. A version that is logged twice is an error. A record may
    /// stand in the partition of another row, so the order is that of the versions.
    pub(crate) async fn changes(
        &self,
        resource: &Resource,
        left_out: &[&str],
    ) -> Result<BTreeMap<String, BTreeMap<i64, LoggedChange>>> {
        let mut changes: BTreeMap<String, BTreeMap<i64, LoggedChange>> = BTreeMap::new();
        for record in whole_log(self.store.as_ref()).await? {
            if record.status != OperationStatus::Applied || record.tenant != *self.tenant {
                continue;
            }
            for event in &record.events {
                let Some((of, key)) = subject_of(&record, event) else { continue };
                let Some(version) = event.data["row"]["version"].as_i64().filter(|_| of == resource.name)
                else {
                    continue;
                };
                let name = event.name.split_once('.').map_or("", |(_, name)| name).to_owned();
                if left_out.contains(&&*name) {
                    continue;
                }
                let change = LoggedChange { name, at: record.at, data: event.data.clone() };
                let twice = changes.entry(key.to_owned()).or_default().insert(version, change);
                ensure!(twice.is_none(), "version {version} of {of} {key} is logged twice");
            }
        }
        Ok(changes)
    }

    /// The events of each subject of a resource, in the order of the log. All events of a subject are in one partition.
    pub(crate) async fn events(&self, resource: &str) -> Result<BTreeMap<String, Vec<LoggedChange>>> {
        let mut events: BTreeMap<String, Vec<LoggedChange>> = BTreeMap::new();
        for record in whole_log(self.store.as_ref()).await? {
            if record.status != OperationStatus::Applied || record.tenant != *self.tenant {
                continue;
            }
            for event in &record.events {
                let Some((of, key)) = subject_of(&record, event) else { continue };
                if of != resource {
                    continue;
                }
                let name = event.name.split_once('.').map_or("", |(_, name)| name).to_owned();
                let change = LoggedChange { name, at: record.at, data: event.data.clone() };
                events.entry(key.to_owned()).or_default().push(change);
            }
        }
        Ok(events)
    }

    /// The same for a resource that logs every change of its rows: the versions of each row are 1, 2, 3… and end with the one that
    /// is stored.
    pub(crate) async fn histories(
        &self,
        resource: &Resource,
        left_out: &[&str],
    ) -> Result<BTreeMap<String, Vec<LoggedChange>>> {
        let table = resource.tables.first().context("a resource without a table")?;
        let changes = self.changes(resource, left_out).await?;
        let mut stored: BTreeMap<String, i64> = BTreeMap::new();
        for row in self.rows(table).await? {
            stored.insert(key_text(row.key()), row.version());
        }
        for (key, changes) in &changes {
            let what = format!("{} {key}", resource.name);
            for (version, expected) in changes.keys().zip(1..) {
                ensure!(*version == expected, "version {expected} of {what} is not in the log: {changes:?}");
            }
            let last = changes.last_key_value().map(|(version, _)| *version);
            let is = stored.remove(key);
            ensure!(is == last, "{what} is stored at version {is:?}, and the log ends with {last:?}");
        }
        ensure!(
            stored.is_empty(),
            "rows of {} are stored that the log does not have: {stored:?}",
            resource.name
        );
        Ok(changes.into_iter().map(|(key, changes)| (key, changes.into_values().collect())).collect())
    }
}

/// Columns of a row, as the text of a key.
pub(crate) fn columns_text(row: &Row, columns: &[(String, Type)]) -> Result<String> {
    let value = |(name, _): &(String, Type)| row.get(name).with_context(|| format!("no {name} in {row}"));
    let values: Vec<&Value> = columns.iter().map(value).collect::<Result<_>>()?;
    Ok(key_text(values))
}

#[cfg(test)]
mod tests {
    use statehouse::archetypes::Archetype;
    use statehouse_store::Step;

    use super::*;
    use crate::harness::engines::{Model, TestEngine};
    use crate::harness::tenant_client::TenantClient;
    use crate::proof::PROOFS;

    #[test]
    fn every_archetype_has_a_checker_and_a_workload() {
        for proof in PROOFS {
            assert!(proof.invariants.is_some(), "{} has no checker of invariants", proof.archetype);
            assert!(proof.workload.is_some(), "{} has no simulated workload", proof.archetype);
        }
    }

    /// A checker that accepts a change which is not in the log would accept a lost or a doubled one.
    #[tokio::test]
    async fn each_checker_notices_a_change_that_is_not_in_the_log() {
        for proof in PROOFS {
            let check = proof.invariants.unwrap();
            for tampering in (proof.tamperings)() {
                let what = format!("{}: {}", proof.archetype, tampering.table);
                let blueprint = Archetype::of(tampering.specimen).unwrap().specimen_blueprint();
                let namespace = Model.namespace("invariants").unwrap();
                let client = TenantClient::open(&*namespace, &blueprint).await.unwrap();
                for (action, key, input) in tampering.calls {
                    let key: Vec<Value> = key.iter().map(|part| (*part).into()).collect();
                    client.done(action, &key, input, None).await.unwrap();
                }
                if tampering.by_workers {
                    client.drain_workers().await.unwrap();
                }
                let scope = client.scope(tampering.resource);
                check(&scope).await.unwrap_or_else(|error| panic!("{what}: {error:#}"));
                let mut rows = scope.rows(client.table(tampering.table).unwrap()).await.unwrap();
                rows.retain(|row| tampering.consumer.is_none_or(|name| row.text("consumer") == Some(name)));
                assert_eq!(rows.len(), 1, "{what}");
                let store_client = client.store_client().unwrap();
                let step = Step::update(rows[0].table(), rows[0].key().to_vec());
                let changes = tampering.changes.into_iter();
                let step = changes.fold(step, |step, (column, value)| step.set(column, value));
                store_client.apply(store_client.one(step)).await.unwrap();
                assert!(check(&scope).await.is_err(), "{what}");
            }
        }
    }
}
