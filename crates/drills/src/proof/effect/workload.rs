//! I12 in simulation: effects that are sent, retried, asked about and resolved, to targets that lose answers.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use async_trait::async_trait;
use serde_json::json;
use statehouse::egress::{Egress, OutboundRequest, SendOutcome, TargetResponse, Transport};
use statehouse::resource::key_text;
use statehouse_store::{Clock, Random, Scan, Value};

use super::invariants;
use crate::conformance::CaseFuture;
use crate::harness::fake_targets::{TestSecrets, key_of};
use crate::harness::simulation::{CallOutcome, ClientFuture, FinishedHistory, SimulatedClient, Workload};
use crate::harness::store_client::scan;

pub(crate) const WORKLOAD: Workload = Workload {
    archetype: "effect",
    blueprint: r#"
[house]
name = "simulation"

[effect.charge]
url          = "https://psp.example/charges"
reconcile    = { url = "https://psp.example/charges/{key}", after = "200ms", max_checks = 3 }
back_off     = { min = "100ms", max = "800ms" }
max_attempts = 4
lease        = "30s"
shards       = 1
breaker      = { failures = 100 }

[effect.ledger]
url          = "https://ledger.example/entries"
idempotent   = true
back_off     = { min = "100ms", max = "800ms" }
max_attempts = 4
lease        = "30s"
shards       = 1
breaker      = { failures = 100 }
"#,
    resource: "charge",
    egress: Some(|seed| {
        let transport: Arc<dyn Transport> = Arc::new(UnreliableTargets::new(seed));
        Egress {
            transport: Some(transport),
            environment: Arc::new(TestSecrets::of(&[])),
            ..Egress::default()
        }
    }),
    prepare: |_| Box::pin(async { Ok(()) }),
    act: |client| -> ClientFuture<'_> { Box::pin(act(client)) },
    check: |end| -> CaseFuture<'_> { Box::pin(check(end)) },
};

/// How long a request or an answer is on its way.
const LATENCY_MICROS: u64 = 200_000;

/// Targets whose answers get lost. They know how often they have acted on each key.
#[derive(Debug)]
struct UnreliableTargets(Mutex<TargetState>);

#[derive(Debug)]
struct TargetState {
    random: Random,
    acted: BTreeMap<String, usize>,
}

impl UnreliableTargets {
    fn new(seed: u64) -> UnreliableTargets {
        let random = Random::seeded(seed ^ 0xeffe);
        UnreliableTargets(Mutex::new(TargetState { random, acted: BTreeMap::new() }))
    }

    fn with<T>(&self, work: impl FnOnce(&mut TargetState) -> T) -> T {
        work(&mut self.0.lock().unwrap_or_else(PoisonError::into_inner))
    }

    async fn travel(&self, clock: &dyn Clock) {
        let micros = self.with(|state| state.random.below(LATENCY_MICROS));
        clock.sleep(Duration::from_micros(micros)).await;
    }
}

fn reply(status: u16) -> SendOutcome {
    SendOutcome::Answered(TargetResponse { status, complete: true, ..TargetResponse::default() })
}

fn lost() -> SendOutcome {
    SendOutcome::Unknown { why: "the answer was lost".to_owned() }
}

#[async_trait]
impl Transport for UnreliableTargets {
    async fn send(&self, outbound: &OutboundRequest, clock: &dyn Clock) -> SendOutcome {
        let key = key_of(outbound);
        if outbound.url.path() == AUDIT_PATH {
            let times = self.with(|state| state.acted.get(&key).copied().unwrap_or(0));
            return SendOutcome::Answered(TargetResponse {
                body: times.to_string().into_bytes(),
                ..TargetResponse::default()
            });
        }
        self.travel(clock).await;
        let is_question = outbound.method == "GET";
        let draw = self.with(|state| state.random.below(10));
        let sent = self.with(|state| match (is_question, draw) {
            (true, 8) => reply(500),
            (true, 9) => lost(),
            (true, _) => reply(if state.acted.contains_key(&key) { 200 } else { 404 }),
            (false, 7) => SendOutcome::NotSent { why: "the connection was refused".to_owned() },
            (false, 8) => lost(),
            (false, 9) => reply(503),
            (false, _) => {
                let times = state.acted.entry(key).or_default();
                // The ledger does one key once; the other target acts on every request.
                let is_repetition = *times > 0 && outbound.url.host() == Some("ledger.example");
                *times += usize::from(!is_repetition);
                if draw == 6 { lost() } else { reply(200) }
            }
        });
        self.travel(clock).await;
        sent
    }
}

/// Where a target says how often it has acted on a key.
const AUDIT_PATH: &str = "/audit";

/// Few, so that clients send effects under a key that is taken.
const KEYS: u64 = 20;

async fn act(client: &mut SimulatedClient) {
    let resource = ["charge", "ledger"][usize::from(client.below(2) == 1)];
    let known = client.memory[resource].as_str().map(str::to_owned);
    let choice = client.below(8);
    if let (Some(key), true) = (known, choice > 4) {
        let action = ["cancel", "replay", "reconcile"][usize::try_from(choice - 5).unwrap_or(0)];
        let key = [Value::from(key)];
        drop(client.call(&format!("{resource}.{action}"), &key, json!({}), None).await);
        return;
    }
    let key = match client.below(3) {
        0 => format!("k{}", client.below(KEYS)),
        _ => format!("e-{}-{}", client.name, client.next),
    };
    let input = json!({"key": key, "body": {"n": 1}});
    if !matches!(client.call(&format!("{resource}.send"), &[], input, None).await, CallOutcome::Refused) {
        client.memory[resource] = json!(key);
    }
}

async fn check(end: &FinishedHistory) -> Result<()> {
    // Conservation: a target has acted once on what is delivered, and not at all on what is parked or cancelled.
    let house = &end.sound.house;
    let transport = house.egress().transport.as_ref().context("no courier")?;
    for (resource, host) in [("charge", "psp.example"), ("ledger", "ledger.example")] {
        let table = end.sound.table(&format!("{resource}s"))?;
        for row in scan(house.store().as_ref(), Scan::of(table, &end.sound.tenant)).await? {
            let mut question = OutboundRequest {
                method: "GET".parse()?,
                url: format!("https://{host}{AUDIT_PATH}").parse()?,
                headers: Default::default(),
                body: Vec::new(),
                connect_timeout: Duration::ZERO,
                timeout: Duration::ZERO,
                response_max: 0,
                allow_private: false,
            };
            let sent_key = row.text("sent_key").context("an effect without its key")?;
            question.headers.insert("idempotency-key", sent_key.parse()?);
            let SendOutcome::Answered(answer) = transport.send(&question, house.clock().as_ref()).await
            else {
                anyhow::bail!("the target of {} does not say how often it acted", key_text(row.key()));
            };
            let times: usize = String::from_utf8(answer.body)?.parse()?;
            let fits = match row.text("status") {
                Some("DELIVERED") => times == 1,
                Some("PARKED" | "CANCELLED") => times == 0,
                _ => times <= 1,
            };
            ensure!(fits, "{row}: the target has acted {times} times");
        }
    }
    invariants::check(&end.sound.scope("ledger")).await
}
