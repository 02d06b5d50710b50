//! A01 in simulation: rows that are created, patched under a version and counted.

use anyhow::{Context, Result, ensure};
use serde_json::json;
use statehouse::Code;

use crate::conformance::CaseFuture;
use crate::harness::linearize::{self, RegisterAction, RegisterCall, Written};
use crate::harness::simulation::{CallOutcome, ClientFuture, FinishedHistory, SimulatedClient, Workload};

pub(crate) const WORKLOAD: Workload = Workload {
    archetype: "entity",
    blueprint: r#"
[house]
name = "simulation"

[entity.thing]
key    = { id = "int" }
fields = { n = "int?", views = { type = "int", default = 0 } }
hot    = ["views"]

[entity.total]
key    = { id = "int" }
fields = { n = { type = "int", default = 0 }, last = "text?" }
mutate = "pessimistic"
"#,
    resource: "thing",
    egress: None,
    prepare: |client| {
        Box::pin(async move {
            client.done("total.create", &[], json!({"id": 1}), None).await?;
            Ok(())
        })
    },
    act: |client| -> ClientFuture<'_> { Box::pin(act(client)) },
    check: |end| -> CaseFuture<'_> { Box::pin(check(end)) },
};

/// Rows that clients meet at.
const KEYS: u64 = 3;

async fn act(client: &mut SimulatedClient) {
    let key = client.below(KEYS);
    match client.below(10) {
        0 | 1 => drop(read(client, key).await),
        2 => write(client, key, None).await,
        3..=6 => {
            // What it read is old by the time it writes, now and then.
            let version = read(client, key).await.unwrap_or(1);
            write(client, key, Some(version)).await;
        }
        7 => drop(client.call("total.mutate", &[1.into()], json!({"increment": {"n": 1}}), None).await),
        8 => {
            let name = client.name.clone();
            let both = json!({"increment": {"n": 1}, "set": {"last": name}});
            drop(client.call("total.mutate", &[1.into()], both, None).await);
        }
        _ => drop(client.call("thing.mutate", &[key.into()], json!({"increment": {"views": 1}}), None).await),
    }
}

/// Reads a row and returns its version.
async fn read(client: &mut SimulatedClient, key: i64) -> Option<i64> {
    let invoked = client.observations.moment();
    let read = client.read().call("thing.read", &[key.into()], json!({}), None).await;
    let observed = match &read {
        Ok(answer) => Some((answer.version?, answer.body["n"].as_i64()?)),
        Err(refusal) if refusal.code == Code::NotFound => None,
        Err(_) => return None,
    };
    let returned = Some(client.observations.moment());
    let call =
        RegisterCall { key: key.to_string(), invoked, returned, action: RegisterAction::Read { observed } };
    client.observations.lock().calls.push(call);
    observed.map(|(version, _)| version)
}

/// Writes a value that no other client writes, under a version or as a new row.
async fn write(client: &mut SimulatedClient, key: i64, expected: Option<i64>) {
    let invoked = client.observations.moment();
    let value = i64::try_from(invoked).unwrap_or(0);
    // A client that dies meanwhile has left a write with an unknown outcome.
    let index = {
        let action = RegisterAction::Write { expected, value, written: Written::Unknown };
        let calls = &mut client.observations.lock().calls;
        calls.push(RegisterCall { key: key.to_string(), invoked, returned: None, action });
        calls.len() - 1
    };
    let told = match expected {
        None => client.call("thing.create", &[], json!({"id": key, "n": value}), None).await,
        Some(_) => client.call("thing.patch", &[key.into()], json!({"n": value}), expected).await,
    };
    let written = match told {
        CallOutcome::Done(_) => Written::Applied,
        CallOutcome::Refused => Written::Refused,
        CallOutcome::Unknown | CallOutcome::Nothing => return,
    };
    let returned = Some(client.observations.moment());
    if let Some(call) = client.observations.lock().calls.get_mut(index) {
        call.returned = returned;
        call.action = RegisterAction::Write { expected, value, written };
    }
}

async fn check(end: &FinishedHistory) -> Result<()> {
    linearize::check(&end.observations.lock().calls)?;
    // Conservation: what was counted is what the log says was counted.
    let records = end.records().await?;
    let count = |event: &str| {
        records.iter().flat_map(|record| &record.events).filter(|one| one.name == event).count()
    };
    let total = end.sound.shown("total", &[1.into()], &["n", "version"]).await?;
    let counted = count("total.updated") as i64;
    ensure!(
        total == [json!(counted), json!(counted + 1)],
        "{counted} mutations are in the log, and the row says {total:?}"
    );
    let mut views = 0;
    for key in 0..KEYS {
        let key = i64::try_from(key)?;
        if let Ok(answer) = end.sound.call("thing.read", &[key.into()], json!({}), None).await {
            views += answer.body["views"].as_u64().context("no views")?;
        }
    }
    ensure!(
        views == count("thing.counted") as u64,
        "{views} views, and {} in the log",
        count("thing.counted")
    );
    Ok(())
}
