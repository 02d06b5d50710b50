//! A02 in simulation: edges that come and go, with the lists and counts at both ends.

use serde_json::json;
use statehouse_store::Value;

use crate::harness::simulation::{ClientFuture, SimulatedClient, Workload};

pub(crate) const WORKLOAD: Workload = Workload {
    archetype: "relation",
    blueprint: r#"
[house]
name = "simulation"

[relation.follow]
from         = { follower = "int" }
to           = { followee = "int" }
fields       = { note = "text?" }
buckets      = 2
"#,
    resource: "follow",
    egress: None,
    prepare: |_| Box::pin(async { Ok(()) }),
    act: |client| -> ClientFuture<'_> { Box::pin(act(client)) },
    check: |_| Box::pin(async { Ok(()) }),
};

const PEOPLE: u64 = 3;

async fn act(client: &mut SimulatedClient) {
    let edge = [Value::from(client.below(PEOPLE)), Value::from(client.below(PEOPLE))];
    match client.below(5) {
        0 | 1 => drop(client.call("follow.add", &edge, json!({}), None).await),
        2 => {
            let note = json!({"note": client.name});
            drop(client.call("follow.add", &edge, note, None).await);
        }
        _ => drop(client.call("follow.remove", &edge, json!({}), None).await),
    }
}
