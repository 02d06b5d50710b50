//! A04 in simulation: orders that callers and timers take from state to state, with effects and jobs.

use anyhow::{Result, ensure};
use serde_json::json;
use statehouse_store::Value;

use crate::conformance::CaseFuture;
use crate::harness::simulation::{ClientFuture, FinishedHistory, SimulatedClient, Workload};

pub(crate) const WORKLOAD: Workload = Workload {
    archetype: "workflow",
    blueprint: r#"
[house]
name = "simulation"

[schedule.label]
shards = 2
keep   = "1d"

[workflow.order]
key     = { order_id = "int" }
fields  = { total = "int", payment = "text?" }
initial = "PLACED"
final   = ["DELIVERED", "CANCELLED"]
shards  = 2
[workflow.order.on]
pay     = { from = "PLACED", to = "PAID", set = ["payment"] }
ship    = { from = "PAID", to = "SHIPPED", enqueue = { label = { order = "{order_id}", paid = "{payment}" } } }
deliver = { from = "SHIPPED", to = "DELIVERED" }
refuse  = { from = "SHIPPED", to = "PAID" }
cancel  = { from = ["PLACED", "PAID"], to = "CANCELLED", if = "total < 50" }
expire  = { from = "PLACED", to = "CANCELLED", after = "2s" }
remind  = { from = "PAID", to = "PAID", after = "3s" }
"#,
    resource: "order",
    egress: None,
    prepare: |_| Box::pin(async { Ok(()) }),
    act: |client| -> ClientFuture<'_> { Box::pin(act(client)) },
    check: |end| -> CaseFuture<'_> { Box::pin(check(end)) },
};

const ORDERS: u64 = 12;
const TRANSITIONS: [&str; 5] = ["pay", "ship", "deliver", "refuse", "cancel"];

async fn act(client: &mut SimulatedClient) {
    let order = client.below(ORDERS);
    let key = [Value::from(order)];
    if client.below(4) == 0 {
        let total = client.below(100);
        client.call("order.start", &[], json!({"order_id": order, "total": total}), None).await;
        return;
    }
    let index = client.random.below(TRANSITIONS.len() as u64) as usize;
    let name = TRANSITIONS.get(index).copied().unwrap_or("pay");
    let input = match name {
        "pay" => json!({"payment": client.name, "reason": "simulated"}),
        _ => json!({}),
    };
    // A caller that has seen a version, and one that has not.
    let version = match client.below(3) {
        0 => client.read().call("order.read", &key, json!({}), None).await.ok().and_then(|row| row.version),
        _ => None,
    };
    client.call(&format!("order.{name}"), &key, input, version).await;
}

async fn check(end: &FinishedHistory) -> Result<()> {
    // Nothing that is due is left.
    let table = end.sound.table("orders")?;
    let scan = statehouse_store::Scan::of(table, &end.sound.tenant);
    for row in crate::harness::store_client::scan(end.sound.house.store().as_ref(), scan).await? {
        let left = row.time("due_at").is_some_and(|at| at <= end.sound.house.clock().now());
        ensure!(!left, "it is due, and its timer did not fire: {row}");
    }
    Ok(())
}
