//! A06 in simulation: callers who reserve, extend, buy and release more than there is, a clerk who counts and moves, and the sweeper.

use anyhow::{Result, ensure};
use serde_json::{Value as Json, json};
use statehouse_store::{Scan, Value};

use super::invariants;
use crate::conformance::CaseFuture;
use crate::harness::simulation::{CallOutcome, ClientFuture, FinishedHistory, SimulatedClient, Workload};
use crate::harness::store_client::scan;

pub(crate) const WORKLOAD: Workload = Workload {
    archetype: "inventory",
    blueprint: r#"
[house]
name = "simulation"

[inventory.stock]
key       = { sku = "text", location = "int" }
hold_for  = "2s"
hold_max  = "6s"
lines_max = 3
low       = 2
shards    = 2

[inventory.ware]
key       = { code = "int" }
hold_for  = "2s"
backorder = 4
movements = "log"
cells     = 3
shards    = 2
"#,
    resource: "stock",
    egress: None,
    prepare: |client| {
        Box::pin(async move {
            for number in 1..=ROWS {
                client.done("stock.restock", &stock(number), json!({"quantity": 8}), None).await?;
                client.done("ware.restock", &ware(number), json!({"quantity": 4}), None).await?;
            }
            Ok(())
        })
    },
    act: |client| -> ClientFuture<'_> { Box::pin(act(client)) },
    check: |end| -> CaseFuture<'_> { Box::pin(check(end)) },
};

const ROWS: i64 = 3;

fn stock(number: i64) -> [Value; 2] {
    ["mug".into(), number.into()]
}

fn ware(number: i64) -> [Value; 1] {
    [number.into()]
}

async fn act(client: &mut SimulatedClient) {
    match client.below(8) {
        0 | 1 => keep_stock(client).await,
        2 | 3 => buy(client, "ware").await,
        _ => buy(client, "stock").await,
    }
}

/// A clerk restocks, corrects, counts, moves and takes back.
async fn keep_stock(client: &mut SimulatedClient) {
    let (number, quantity) = (1 + client.below(3), 1 + client.below(4));
    let key = stock(number);
    match client.below(6) {
        0 | 1 => drop(client.call("stock.restock", &key, json!({"quantity": quantity}), None).await),
        2 => drop(
            client.call("stock.adjust", &key, json!({"by": quantity - 3, "reason": "broken"}), None).await,
        ),
        3 => {
            let Ok(row) = client.read().call("stock.read", &key, json!({}), None).await else { return };
            let counted =
                row.body["available"].as_i64().unwrap_or(0) + row.body["reserved"].as_i64().unwrap_or(0);
            let input = json!({"counted": (counted + quantity - 2).max(0)});
            drop(client.call("stock.recount", &key, input, row.version).await);
        }
        4 => {
            let input = json!({"quantity": quantity, "to_location": 1 + number % ROWS});
            drop(client.call("stock.transfer", &key, input, None).await);
        }
        _ => drop(client.call("stock.return", &key, json!({"quantity": 1}), None).await),
    }
}

fn line(resource: &str, number: i64, quantity: i64) -> Json {
    match resource {
        "stock" => json!({"sku": "mug", "location": number, "quantity": quantity}),
        _ => json!({"code": number, "quantity": quantity}),
    }
}

async fn buy(client: &mut SimulatedClient, resource: &'static str) {
    let known = client.memory[resource].as_str().map(str::to_owned);
    let choice = client.below(10);
    if let (Some(id), true) = (known, choice > 3) {
        let (action, input) = match choice {
            4 | 5 => ("commit", json!({})),
            6 => ("commit", json!({"lines": [line(resource, 1 + client.below(3), 1)]})),
            7 => ("extend", json!({})),
            8 => ("expire", json!({})),
            _ => ("release", json!({})),
        };
        if choice != 7 {
            client.memory[resource] = Json::Null;
        }
        drop(client.call(&format!("{resource}_reservation.{action}"), &[Value::from(id)], input, None).await);
        return;
    }
    let id = format!("r-{}-{}", client.name, client.next);
    let (first, second) = (1 + client.below(3), 1 + client.below(3));
    let lines = match choice {
        0 => json!([line(resource, first, 3)]),
        // Lines of one row are added up.
        1 => json!([line(resource, first, 1), line(resource, first, 2)]),
        _ => json!([line(resource, first, 1), line(resource, second, 2)]),
    };
    let input = json!({"reservation_id": id, "lines": lines, "holder": client.name});
    // Whatever it was told: it may have it.
    if !matches!(
        client.call(&format!("{resource}_reservation.reserve"), &[], input, None).await,
        CallOutcome::Refused
    ) {
        if !client.memory.is_object() {
            client.memory = json!({});
        }
        client.memory[resource] = json!(id);
    }
}

async fn check(end: &FinishedHistory) -> Result<()> {
    // Everything that was reserved is over by now.
    for name in ["stock_reservations", "ware_reservations"] {
        let rows =
            scan(end.sound.house.store().as_ref(), Scan::of(end.sound.table(name)?, &end.sound.tenant))
                .await?;
        for row in rows {
            ensure!(row.text("state") != Some("RESERVED"), "it was never swept: {row}");
        }
    }
    invariants::check(&end.sound.scope("ware")).await
}
