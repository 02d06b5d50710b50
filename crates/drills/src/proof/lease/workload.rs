//! I02 in simulation: claimants that take a lease, act under it, renew, release, or die with it.

use std::collections::BTreeMap;

use anyhow::{Result, ensure};
use serde_json::json;
use statehouse::Operation;
use statehouse_store::Value;

use crate::conformance::CaseFuture;
use crate::harness::simulation::{CallOutcome, ClientFuture, FinishedHistory, SimulatedClient, Workload};
use crate::harness::tenant_client::TenantClient;

pub(crate) const WORKLOAD: Workload = Workload {
    archetype: "lease",
    blueprint: r#"
[house]
name = "simulation"

[lease.lock]
key      = { name = "text" }
duration = "2s"
"#,
    resource: "lock",
    egress: None,
    prepare: |_| Box::pin(async { Ok(()) }),
    act: |client| -> ClientFuture<'_> { Box::pin(act(client)) },
    check: |end| -> CaseFuture<'_> { Box::pin(check(end)) },
};

const KEYS: u64 = 2;
/// How the keys of effects begin: leases that are taken in one plan with the check of another.
const EFFECT: &str = "effect ";

async fn act(client: &mut SimulatedClient) {
    let key = [Value::from(format!("door {}", client.below(KEYS)))];
    let known = client.memory.clone();
    let held = known["key"] == json!(key[0].to_json());
    let mine = json!({"holder": client.name, "epoch": known["epoch"]});
    match client.below(8) {
        0 | 1 if held => if let CallOutcome::Done(_) = client.call("lock.renew", &key, mine, None).await {},
        2 if held => {
            client.memory = json!(null);
            client.call("lock.release", &key, mine, None).await;
        }
        3..=6 if held => effect(client, &key, &mine).await,
        _ => {
            let holder = client.name.clone();
            if let CallOutcome::Done(answer) =
                client.call("lock.acquire", &key, json!({"holder": holder}), None).await
            {
                client.memory = json!({"key": key[0].to_json(), "epoch": answer.body["epoch"]});
            }
        }
    }
}

/// Something that only the holder may do, whether it still is or not.
async fn effect(client: &mut SimulatedClient, key: &[Value], mine: &serde_json::Value) {
    let operation = client.operation();
    let other = [Value::from(format!("{EFFECT}{operation}"))];
    let requests = vec![
        TenantClient::request("lock.check", key, mine, None),
        TenantClient::request("lock.acquire", &other, &json!({"holder": client.name.as_str()}), None),
    ];
    let house = client.read().house.clone();
    let under = Operation { id: Some(operation.clone()), fingerprint: operation.clone() };
    if house.batch(&client.read().tenant, requests, under).await.is_ok() {
        client.observations.lock().done.insert(operation);
    }
}

async fn check(end: &FinishedHistory) -> Result<()> {
    // Order: what a holder does stands between its claim and the next one.
    let mut holders: BTreeMap<String, (Option<String>, Option<i64>)> = BTreeMap::new();
    let mut effects = 0_u64;
    for record in end.records().await? {
        for event in &record.events {
            let key = event.data["subject"].as_str().unwrap_or(&record.key).to_owned();
            let row = &event.data["row"];
            let seen = holders.entry(key.clone()).or_default();
            match event.name.as_str() {
                "lock.acquired" => {
                    *seen = (row["holder"].as_str().map(str::to_owned), row["epoch"].as_i64());
                    effects += u64::from(key.starts_with(EFFECT));
                }
                "lock.released" => seen.0 = None,
                "lock.checked" => {
                    let told = (event.data["holder"].as_str(), event.data["epoch"].as_i64());
                    let expected = (seen.0.as_deref(), seen.1);
                    ensure!(
                        told == expected,
                        "{} of {key} at {}: {expected:?} has it",
                        event.name,
                        record.at
                    );
                }
                _ => {}
            }
        }
    }
    // Conservation: as many effects are stored as the log has.
    let table = end.sound.table("locks")?;
    let rows = crate::harness::store_client::scan(
        end.sound.house.store().as_ref(),
        statehouse_store::Scan::of(table, &end.sound.tenant),
    );
    let stored = rows
        .await?
        .iter()
        .filter(|row| row.text("name").is_some_and(|name| name.starts_with(EFFECT)))
        .count();
    ensure!(stored as u64 == effects, "{stored} effects are stored, and {effects} in the log");
    Ok(())
}
