//! A16 in simulation: bidders at few lots that end soon, in several processes, an operator and the closer.

use std::time::Duration;

use anyhow::{Result, ensure};
use serde_json::{Value as Json, json};
use statehouse_store::{Clock as _, Value};

use super::invariants;
use crate::conformance::CaseFuture;
use crate::harness::simulation::{ClientFuture, FinishedHistory, SimulatedClient, Workload};

pub(crate) const WORKLOAD: Workload = Workload {
    archetype: "auction",
    blueprint: r#"
[house]
name = "simulation"

[auction.lot]
key        = { lot_id = "text" }
bidding    = "proxy"
increments = [[0, 5], [100, 25]]
buy_now    = "until_first_bid"
extend     = { within = "1s", to = "2s", until = "4s" }
runner_up  = true
fold       = 8
shards     = 2

[auction.tender]
key         = { lot_id = "text" }
bidding     = "sealed"
rejected    = "count"
fold        = 3
bid_buckets = 2
shards      = 2
"#,
    resource: "lot",
    egress: None,
    prepare: |_| Box::pin(async { Ok(()) }),
    act: |client| -> ClientFuture<'_> { Box::pin(act(client)) },
    check: |end| -> CaseFuture<'_> { Box::pin(check(end)) },
};

const LOTS: u64 = 5;
const BIDDERS: u64 = 4;

async fn act(client: &mut SimulatedClient) {
    let resource = if client.below(3) == 0 { "tender" } else { "lot" };
    let key = [Value::from(format!("l{}", client.below(LOTS)))];
    let action = |name: &str| format!("{resource}.{name}");
    match client.below(12) {
        0 | 1 => create(client, resource, &key).await,
        2 => drop(client.call(&action("close"), &key, json!({}), None).await),
        3 if resource == "lot" => {
            let input = json!({"bidder_id": "quick"});
            drop(client.call(&action("buy_now"), &key, input, None).await);
        }
        4 if client.below(4) == 0 => drop(client.call(&action("cancel"), &key, json!({}), None).await),
        5 => void(client, &action("void"), &key).await,
        _ => {
            let bidder = client.below(BIDDERS);
            let input = json!({"bidder_id": format!("b{bidder}"), "amount": 1 + client.below(300)});
            let told = client.call(&action("bid"), &key, input, None).await;
            if let crate::harness::simulation::CallOutcome::Done(answer) = told {
                client.memory = json!([key_text(&key), answer.body["bid_id"]]);
            }
        }
    }
}

fn key_text(key: &[Value]) -> String {
    statehouse::resource::key_text(key)
}

async fn create(client: &mut SimulatedClient, resource: &str, key: &[Value]) {
    let now = client.clock.now();
    // Some begin later.
    let begins = now.plus(Duration::from_millis(u64::try_from(client.below(1_500)).unwrap_or(0)));
    let lasts = Duration::from_millis(1_000 + u64::try_from(client.below(5_000)).unwrap_or(0));
    let mut input = json!({
        "lot_id": key_text(key), "ends_at": begins.plus(lasts).to_string(), "seller": "b0",
        "start_price": 1 + client.below(20),
    });
    if client.below(2) == 0 {
        input["starts_at"] = json!(begins.to_string());
    }
    if client.below(2) == 0 {
        input["reserve"] = json!(1 + client.below(200));
    }
    if resource == "lot" {
        input["buy_now"] = json!(400);
    }
    drop(client.call(&format!("{resource}.create"), &[], input, None).await);
}

/// Voids the bid that the client has placed last, if it was for this lot.
async fn void(client: &mut SimulatedClient, action: &str, key: &[Value]) {
    let known = client.memory[0].as_str() == Some(&key_text(key));
    let bid: Json = if known { client.memory[1].clone() } else { json!("none") };
    drop(client.call(action, key, json!({"bid_id": bid}), None).await);
}

async fn check(end: &FinishedHistory) -> Result<()> {
    // Everything has ended by now.
    for lots in ["lots", "tenders"] {
        let table = end.sound.table(lots)?;
        let scan = statehouse_store::Scan::of(table, &end.sound.tenant);
        for row in crate::harness::store_client::scan(end.sound.house.store().as_ref(), scan).await? {
            ensure!(row.text("state") != Some("OPEN"), "it was never closed: {row}");
        }
    }
    invariants::check(&end.sound.scope("tender")).await
}
