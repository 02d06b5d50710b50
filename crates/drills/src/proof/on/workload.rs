//! Reactions in simulation: orders are counted by customer, by servers that crash, pause and lose answers.

use anyhow::{Context, Result};
use serde_json::json;
use statehouse::infra::log::PARKED;
use statehouse_store::Scan;

use crate::conformance::CaseFuture;
use crate::harness::simulation::{ClientFuture, FinishedHistory, SimulatedClient, Workload};
use crate::harness::store_client::{same, scan};

pub(crate) const WORKLOAD: Workload = Workload {
    archetype: "on",
    blueprint: r#"
[house]
name = "simulation"

[entity.order]
key    = { id = "int" }
fields = { customer = "text" }

[entity.tally]
key    = { customer = "text" }
fields = { orders = { type = "int", default = 0 } }
require_version = false

[on.ordered]
event = "order.created"
do    = "tally.mutate"
key   = "{row.customer}"
input = { increment = { orders = 1 } }
from  = "start"
"#,
    resource: "ordered",
    egress: None,
    prepare: |_| Box::pin(async { Ok(()) }),
    act: |client| -> ClientFuture<'_> { Box::pin(act(client)) },
    check: |end| -> CaseFuture<'_> { Box::pin(check(end)) },
};

const ORDERS: u64 = 10_000;
const CUSTOMERS: u64 = 3;

/// Creates an order, or the tally of a customer. An order of a customer without a tally is parked.
async fn act(client: &mut SimulatedClient) {
    let customer = format!("customer-{}", client.below(CUSTOMERS));
    if client.below(10) == 0 {
        return drop(client.call("tally.create", &[], json!({"customer": customer}), None).await);
    }
    let order = json!({"id": client.below(ORDERS), "customer": customer});
    drop(client.call("order.create", &[], order, None).await);
}

/// Each order was counted once, or is parked.
async fn check(end: &FinishedHistory) -> Result<()> {
    let store = end.sound.house.store().as_ref();
    let rows = |table: &str| -> Result<Scan> { Ok(Scan::of(end.sound.table(table)?, &end.sound.tenant)) };
    let orders = scan(store, rows("orders")?).await?.len();
    let mut counted = 0;
    for tally in scan(store, rows("tallies")?).await? {
        counted += tally.int("orders").with_context(|| format!("no orders in {tally}"))?;
    }
    let parked = scan(store, rows(PARKED)?).await?.len();
    same("orders that were counted or are parked", &(usize::try_from(counted)? + parked), &orders)
}
