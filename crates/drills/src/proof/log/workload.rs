//! I05 in simulation: programs that share the partitions of a group by lease, and commit what they have read with its effect.

use std::collections::BTreeMap;

use anyhow::{Context, Result};
use serde_json::{Value as Json, json};
use statehouse::Operation;
use statehouse::infra::log::PROGRESS;
use statehouse_store::{Scan, Value};

use crate::conformance::CaseFuture;
use crate::harness::simulation::{ClientFuture, FinishedHistory, SimulatedClient, Workload};
use crate::harness::store_client::{same, scan};
use crate::harness::tenant_client::TenantClient;

pub(crate) const WORKLOAD: Workload = Workload {
    archetype: "log",
    blueprint: r#"
[house]
name = "simulation"

[entity.note]
key    = { id = "int" }
fields = { n = "int" }

[entity.mark]
key    = { mark_id = "text" }
fields = { log_partition = "int", from = "int", to = "int" }

[log.audit]
of    = ["note"]
lease = "2s"
"#,
    resource: "audit",
    egress: None,
    prepare: |_| Box::pin(async { Ok(()) }),
    act: |client| -> ClientFuture<'_> { Box::pin(act(client)) },
    check: |end| -> CaseFuture<'_> { Box::pin(check(end)) },
};

const NOTES: u64 = 6;
const PARTITIONS: u64 = 2;

async fn act(client: &mut SimulatedClient) {
    let known = client.memory.clone();
    let choice = client.below(10);
    if choice < 3 {
        return write(client).await;
    }
    let Some(partition) = known["partition"].as_i64() else {
        let partition = client.below(PARTITIONS);
        let holder = json!({"holder": client.name});
        let claimed = client.read().call("audit.claim", &[partition.into()], holder, None).await;
        if let Ok(answer) = claimed {
            client.memory = json!({"partition": partition, "epoch": answer.body["epoch"]});
        }
        return;
    };
    let (key, mine) = ([partition.into()], json!({"holder": client.name, "epoch": known["epoch"]}));
    match choice {
        3 => drop(client.call("audit.renew", &key, mine, None).await),
        4 => {
            client.memory = Json::Null;
            drop(client.call("audit.release", &key, mine, None).await);
        }
        5 => settle(client, partition).await,
        _ => read(client, partition, &mine, choice == 6).await,
    }
}

/// Creates a note, or changes one.
async fn write(client: &mut SimulatedClient) {
    let (id, n) = (client.below(NOTES), client.below(100));
    let key = [id.into()];
    match client.read().call("note.read", &key, json!({}), None).await {
        Ok(note) => drop(client.call("note.patch", &key, json!({"n": n}), note.version).await),
        Err(_) => drop(client.call("note.create", &[], json!({"id": id, "n": n}), None).await),
    }
}

/// Polls, and commits the offset in one plan with a row that says from where to where; or parks the first record before.
async fn read(client: &mut SimulatedClient, partition: i64, mine: &Json, parks: bool) {
    let key = [Value::from(partition)];
    let poll = json!({"holder": mine["holder"], "epoch": mine["epoch"], "limit": 5});
    let polled = match client.read().call("audit.poll", &key, poll, None).await {
        Ok(polled) => polled.body.clone(),
        Err(_) => {
            client.memory = Json::Null;
            return;
        }
    };
    if let (true, Some(record)) = (parks, polled["records"].get(0)) {
        let mut park = mine.clone();
        park["subject"] = record["subject"].clone();
        park["log_offset"] = record["log_offset"].clone();
        park["reason"] = json!("simulated");
        drop(client.call("audit.park", &key, park, None).await);
        return;
    }
    let (from, to) = (polled["reached"].clone(), polled["through"].clone());
    if from == to {
        return;
    }
    let operation = client.operation();
    let mut commit = mine.clone();
    (commit["from"], commit["to"]) = (from.clone(), to.clone());
    let mark = json!({"mark_id": operation, "log_partition": partition, "from": from, "to": to});
    let requests = vec![
        TenantClient::request("mark.create", &[], &mark, None),
        TenantClient::request("audit.commit", &key, &commit, None),
    ];
    let under = Operation { id: Some(operation.clone()), fingerprint: operation.clone() };
    let house = client.read().house.clone();
    if house.batch(&client.read().tenant, requests, under).await.is_ok() {
        client.observations.lock().done.insert(operation);
    }
}

/// Settles the oldest parked record of a partition, if there is one.
async fn settle(client: &mut SimulatedClient, partition: i64) {
    let input = json!({"log_partition": partition, "limit": 1});
    let Ok(listed) = client.read().call("audit_parked.list", &[], input, None).await else { return };
    let Some(parked) = listed.body.get(0) else { return };
    let subject = parked["subject"].as_str().unwrap_or_default();
    let offset = parked["log_offset"].as_i64().unwrap_or_default();
    let key = [partition.into(), subject.into(), offset.into()];
    drop(client.call("audit_parked.settle", &key, json!({}), None).await);
}

async fn check(end: &FinishedHistory) -> Result<()> {
    // Exactly once: the committed ranges of each partition follow each other from the beginning to where the group is.
    let rows = |table: &str| -> Result<Scan> { Ok(Scan::of(end.sound.table(table)?, &end.sound.tenant)) };
    let store = end.sound.house.store().as_ref();
    let mut ranges: BTreeMap<i64, BTreeMap<i64, i64>> = BTreeMap::new();
    for mark in scan(store, rows("marks")?).await? {
        let int = |column: &str| mark.int(column).with_context(|| format!("no {column} in {mark}"));
        let before = ranges.entry(int("log_partition")?).or_default().insert(int("from")?, int("to")?);
        same(&format!("other ranges from the beginning of {mark}"), &before, &None)?;
    }
    for progress in scan(store, rows(PROGRESS)?).await? {
        if progress.text("consumer") != Some("audit") {
            continue;
        }
        let partition = progress.int("log_partition").context("no partition")?;
        let mut reached = 0;
        for (from, to) in ranges.remove(&partition).unwrap_or_default() {
            same(&format!("the beginning of a range in partition {partition}"), &from, &reached)?;
            reached = to;
        }
        same(&progress.to_string(), &progress.int("reached"), &Some(reached))?;
    }
    same("ranges of partitions without progress", &ranges, &BTreeMap::new())
}
