//! I09 in simulation: numbers that are taken, leased and put to subjects, and spans of time for ids.

use anyhow::Result;
use serde_json::{Value as Json, json};
use statehouse_store::Value;

use super::invariants;
use crate::conformance::CaseFuture;
use crate::harness::simulation::{CallOutcome, ClientFuture, FinishedHistory, SimulatedClient, Workload};

pub(crate) const WORKLOAD: Workload = Workload {
    archetype: "sequence",
    blueprint: r#"
[house]
name = "simulation"

[sequence.ticket]
kind  = "counter"
key   = { desk = "int" }
lease = "2s"

[sequence.invoice_no]
kind = "gapless"
key  = { year = "int" }

[sequence.order_id]
kind          = "time"
worker_bits   = 2
sequence_bits = 4
ahead         = "500ms"
lease         = "2s"
"#,
    resource: "ticket",
    egress: None,
    prepare: |_| Box::pin(async { Ok(()) }),
    act: |client| -> ClientFuture<'_> { Box::pin(act(client)) },
    check: |end| -> CaseFuture<'_> { Box::pin(check(end)) },
};

const DESKS: u64 = 2;
/// Fewer than there are calls, so that many ask for a number that their subject has already.
const SUBJECTS: u64 = 60;

async fn act(client: &mut SimulatedClient) {
    let desk = [Value::from(client.below(DESKS))];
    let count = 1 + client.below(4);
    let name = client.name.clone();
    let known = client.memory.clone();
    let mine = json!({"holder": name, "epoch": known["epoch"]});
    match (client.below(10), known["worker"].as_i64()) {
        (0..=2, _) => drop(client.call("ticket.next", &desk, json!({"count": count}), None).await),
        (3, _) => {
            let input = json!({"holder": name, "count": count});
            drop(client.call("ticket.lease", &desk, input, None).await);
        }
        (4..=6, _) => {
            let subject = json!({"subject": format!("s{}", client.below(SUBJECTS))});
            drop(client.call("invoice_no.take", &[2026.into()], subject, None).await);
        }
        (7, _) => drop(client.call("order_id.next", &[0.into()], json!({"count": 20}), None).await),
        (8, Some(worker)) => {
            client.memory = Json::Null;
            drop(client.call("order_id.release", &[worker.into()], mine, None).await);
        }
        (_, Some(worker)) => drop(client.call("order_id.reserve", &[worker.into()], mine, None).await),
        (_, None) => {
            let leased = client.call("order_id.lease", &[], json!({"holder": name}), None).await;
            if let CallOutcome::Done(answer) = leased {
                client.memory = json!({"worker": answer.body["worker"], "epoch": answer.body["epoch"]});
            }
        }
    }
}

async fn check(end: &FinishedHistory) -> Result<()> {
    // The invariants of the resource of the workload are checked anyway.
    invariants::check(&end.sound.scope("invoice_no")).await?;
    invariants::check(&end.sound.scope("order_id")).await
}
