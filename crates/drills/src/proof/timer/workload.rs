//! I03 in simulation: timers that are set, set anew and cancelled while several scanners release them.

use anyhow::{Result, ensure};
use serde_json::json;
use statehouse_store::Value;

use crate::conformance::CaseFuture;
use crate::harness::simulation::{ClientFuture, FinishedHistory, SimulatedClient, Workload};

pub(crate) const WORKLOAD: Workload = Workload {
    archetype: "timer",
    blueprint: r#"
[house]
name = "simulation"

[timer.tick]
key    = { id = "int" }
shards = 2
missed = "all"
"#,
    resource: "tick",
    egress: None,
    prepare: |_| Box::pin(async { Ok(()) }),
    act: |client| -> ClientFuture<'_> { Box::pin(act(client)) },
    check: |end| -> CaseFuture<'_> { Box::pin(check(end)) },
};

const TIMERS: u64 = 5;

async fn act(client: &mut SimulatedClient) {
    let key = [Value::from(client.below(TIMERS))];
    let after = 100 * client.below(20);
    let input = match client.below(8) {
        0..=3 => json!({"after_ms": after}),
        4 => json!({"after_ms": after, "every_ms": 1_000}),
        5 => {
            let known = client.read().call("tick.read", &key, json!({}), None).await;
            let version = known.ok().and_then(|answer| answer.version);
            return drop(client.call("tick.set", &key, json!({"after_ms": after}), version).await);
        }
        _ => return drop(client.call("tick.cancel", &key, json!({}), None).await),
    };
    client.call("tick.set", &key, input, None).await;
}

async fn check(end: &FinishedHistory) -> Result<()> {
    // Nothing that is due is left.
    let table = end.sound.table("ticks")?;
    let scan = statehouse_store::Scan::of(table, &end.sound.tenant);
    for row in crate::harness::store_client::scan(end.sound.house.store().as_ref(), scan).await? {
        let left = row.time("due_at").is_some_and(|at| at <= end.sound.house.clock().now());
        ensure!(!left, "it is due and was not released: {row}");
    }
    Ok(())
}
