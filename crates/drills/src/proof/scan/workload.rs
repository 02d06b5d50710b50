//! I04 in simulation: workers that claim ranges, count rows in one plan with the cursor, split, fail, die and pause the scan.

use anyhow::{Result, ensure};
use serde_json::{Value as Json, json};
use statehouse::Operation;
use statehouse_store::Value;

use super::worker::{self, ClaimedRange};
use crate::conformance::CaseFuture;
use crate::harness::simulation::{CallOutcome, ClientFuture, FinishedHistory, SimulatedClient, Workload};
use crate::harness::tenant_client::TenantClient;

pub(crate) const WORKLOAD: Workload = Workload {
    archetype: "scan",
    blueprint: r#"
[house]
name = "simulation"

[entity.item]
key    = { id = "int" }
fields = { n = { type = "int", default = 0 } }

[scan.sweep]
of       = "item"
ranges   = 3
lease    = "2s"
attempts = 1000
"#,
    resource: "sweep",
    egress: None,
    prepare: |client| -> CaseFuture<'_> { Box::pin(prepare(client)) },
    act: |client| -> ClientFuture<'_> { Box::pin(act(client)) },
    check: |end| -> CaseFuture<'_> { Box::pin(check(end)) },
};

const ITEMS: i64 = 12;

async fn prepare(client: &TenantClient) -> Result<()> {
    for id in 0..ITEMS {
        client.done("item.create", &[], json!({"id": id}), None).await?;
    }
    worker::start(client, "1").await.map(drop)
}

async fn act(client: &mut SimulatedClient) {
    let run = client.memory["run"].as_i64().unwrap_or(1);
    let key = [Value::from(run.to_string())];
    if client.memory["range"].is_null() {
        return match client.below(8) {
            0 => drop(client.call("sweep.pause", &key, json!({}), None).await),
            1 | 2 => drop(client.call("sweep.resume", &key, json!({}), None).await),
            3 => next_run(client, run).await,
            _ => claim(client, run).await,
        };
    }
    let range = ClaimedRange::of(&client.memory["range"]);
    match client.below(10) {
        0 => {
            let input = json!({"epoch": range.epoch});
            match client.call("sweep_range.split", &range.key, input, None).await {
                CallOutcome::Done(answer) => client.memory["range"] = answer.body,
                _ => client.memory["range"] = Json::Null,
            }
        }
        1 => {
            client.memory["range"] = Json::Null;
            let input = json!({"epoch": range.epoch, "error": "by chance"});
            client.call("sweep_range.fail", &range.key, input, None).await;
        }
        _ => step(client, &range).await,
    }
}

async fn claim(client: &mut SimulatedClient, run: i64) {
    let input = json!({"run_id": run.to_string(), "holder": client.name.as_str()});
    if let CallOutcome::Done(answer) = client.call("sweep_range.claim", &[], input, None).await {
        client.memory = json!({"run": run, "range": answer.body});
    }
}

/// Starts the next run if this one is done.
async fn next_run(client: &mut SimulatedClient, run: i64) {
    let read = client.read().call("sweep.read", &[run.to_string().into()], json!({}), None).await;
    if read.is_ok_and(|answer| answer.body["state"] == "DONE") {
        client.memory = json!({"run": run + 1, "range": null});
        client.call("sweep.start", &[], json!({"run_id": (run + 1).to_string()}), None).await;
    }
}

async fn step(client: &mut SimulatedClient, range: &ClaimedRange) {
    let Ok(page) = range.rows(client.read(), 3).await else { return };
    if page["rows"].as_array().is_some_and(Vec::is_empty) {
        client.memory["range"] = Json::Null;
        client.call("sweep_range.finish", &range.key, range.finish(&page), None).await;
        return;
    }
    let operation = client.operation();
    let under = Operation { id: Some(operation.clone()), fingerprint: operation.clone() };
    let (house, tenant) = (client.read().house.clone(), client.read().tenant.clone());
    match house.batch(&tenant, range.batch(&page), under).await {
        Ok(_) => drop(client.observations.lock().done.insert(operation)),
        // The claim may have ended. What is stored says how far the range is.
        Err(_) if client.below(2) == 0 => client.memory["range"] = Json::Null,
        Err(_) => {}
    }
}

/// Each run that is brought to its end has counted each row once.
async fn check(end: &FinishedHistory) -> Result<()> {
    let client = &end.sound;
    let mut runs = 0;
    while client.call("sweep.read", &[(runs + 1).to_string().into()], json!({}), None).await.is_ok() {
        runs += 1;
        let run = runs.to_string();
        let _ = client.call("sweep.resume", &[run.as_str().into()], json!({}), None).await;
        client.drain_workers().await?;
        worker::work(client, &run, "the last worker").await?;
        let read = client.done("sweep.read", &[run.as_str().into()], json!({}), None).await?;
        ensure!(read.body["state"] == "DONE", "run {run} does not end: {}", read.body);
        ensure!(read.body["progress"]["rows"] == ITEMS, "run {run} has other rows: {}", read.body);
    }
    for id in 0..ITEMS {
        let item = client.done("item.read", &[id.into()], json!({}), None).await?;
        ensure!(item.body["n"] == runs, "item {id} was counted {} times in {runs} runs", item.body["n"]);
    }
    Ok(())
}
