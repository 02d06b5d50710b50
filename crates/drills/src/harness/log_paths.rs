//! The log of a row is a path in the graph of its machine.
//!
//! The rule holds for every resource with a machine, whichever code changed its rows. Simulated histories and the standard drills of
//! machines end with it.

use std::collections::{BTreeMap, BTreeSet};

use anyhow::{Result, ensure};
use statehouse::declare::machine::DeclaredName;
use statehouse::house::subject_of;
use statehouse::{House, Resource};
use statehouse_store::{OperationStatus, Record, Store};

use crate::harness::store_client::whole_log;

/// Checks the logged events of all rows of resources with a machine.
pub(crate) async fn check_log_paths(house: &House, store: &dyn Store) -> Result<()> {
    let records = whole_log(store).await?;
    // The beginning of a path is missing where records were trimmed.
    let is_trimmed = |record: &Record| record.position.is_some_and(|position| position.offset == 1);
    let partitions: BTreeSet<u32> =
        records.iter().filter_map(|record| record.position).map(|position| position.partition).collect();
    if records.iter().filter(|record| is_trimmed(record)).count() < partitions.len() {
        return Ok(());
    }
    for resource in house.resources() {
        check_resource(resource, &records)?;
    }
    Ok(())
}

fn check_resource(resource: &Resource, records: &[Record]) -> Result<()> {
    let Some(machine) = &resource.machine else { return Ok(()) };
    let graph = machine.graph();
    if graph.states.is_empty() {
        return Ok(());
    }
    let mut reached: BTreeMap<(String, String), BTreeSet<Option<DeclaredName>>> = BTreeMap::new();
    for record in records.iter().filter(|record| record.status == OperationStatus::Applied) {
        for event in &record.events {
            let Some((of, key)) = subject_of(record, event).filter(|(of, _)| *of == resource.name) else {
                continue;
            };
            let name = event.name.split_once('.').map_or("", |(_, name)| name);
            let subject = (record.tenant.to_string(), key.to_owned());
            let before = reached.entry(subject).or_insert_with(|| BTreeSet::from([None]));
            let state = event.data["row"][graph.column.as_str()].as_str();
            let after = graph.after_event(before, name, state);
            ensure!(
                !after.is_empty(),
                "{of} {key}: after {before:?}, the event {name} with the state {state:?} is not in the graph"
            );
            *before = after;
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use serde_json::json;
    use statehouse::Blueprint;
    use statehouse::resource::declare;
    use statehouse_store::{Entry, EventTemplate, ModelStore, Plan, Tenant};

    use super::*;

    async fn verdict(events: &[(&str, &str)]) -> Result<()> {
        let blueprint = Blueprint::read("x", "[timer.alarm]\nkey = { id = \"int\" }\n").unwrap();
        let resource = declare(&blueprint).unwrap().remove(0);
        let store = ModelStore::new();
        for (number, (event, state)) in events.iter().enumerate() {
            let event = EventTemplate::named(*event).with("row", json!({"status": state}));
            let plan = Plan::of(&Tenant::new("acme").unwrap(), format!("op {number}"));
            store.commit(&plan.log(Entry::about("alarm", "1").event(event)).build().unwrap()).await.unwrap();
        }
        check_resource(&resource, &whole_log(&store).await.unwrap())
    }

    #[tokio::test]
    async fn a_step_that_is_no_edge_is_noticed() {
        let path = [
            ("alarm.set", "SET"),
            ("alarm.fired", "SET"),
            ("alarm.cancelled", "CANCELLED"),
            ("alarm.set", "SET"),
        ];
        verdict(&path).await.unwrap();
        for wrong in [
            vec![("alarm.cancelled", "CANCELLED")],
            vec![("alarm.set", "SET"), ("alarm.cancelled", "SET")],
            vec![("alarm.set", "SET"), ("alarm.cancelled", "CANCELLED"), ("alarm.fired", "FIRED")],
            vec![("alarm.set", "SET"), ("alarm.renamed", "SET")],
        ] {
            assert!(verdict(&wrong).await.is_err(), "{wrong:?}");
        }
    }
}
