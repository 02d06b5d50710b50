//! A07 in simulation: payments that are charged, captured, refunded, cancelled and resolved at a provider that loses answers.

use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use async_trait::async_trait;
use serde_json::json;
use statehouse::egress::{Egress, OutboundRequest, SendOutcome, TargetResponse, Transport};
use statehouse_store::{Clock, Random, Scan, Value};

use super::invariants;
use super::provider::TestProvider;
use crate::conformance::CaseFuture;
use crate::harness::fake_targets::{TargetBehavior, TestSecrets};
use crate::harness::simulation::{ClientFuture, FinishedHistory, SimulatedClient, Workload};
use crate::harness::store_client::scan;

pub(crate) const WORKLOAD: Workload = Workload {
    archetype: "payment",
    blueprint: r#"
[house]
name = "simulation"

[payment.pay]
key          = { payment_intent_id = "text" }
currencies   = ["EUR"]
attempts_max = 3

[payment.pay.http]
url       = "https://psp.example"
reconcile = { after = "200ms", max_checks = 3 }
back_off  = { min = "100ms", max = "800ms" }
lease     = "30s"
breaker   = { failures = 100 }
"#,
    resource: "pay",
    egress: Some(|seed| {
        let transport: Arc<dyn Transport> = Arc::new(UnreliableProvider::new(seed));
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
/// Where the provider says how much it has moved: `/audit/PAYMENT`.
const AUDIT_PATH: &str = "/audit/";

/// A provider whose requests and answers get lost.
#[derive(Debug)]
struct UnreliableProvider {
    provider: TestProvider,
    random: Mutex<Random>,
}

impl UnreliableProvider {
    fn new(seed: u64) -> UnreliableProvider {
        let random = Mutex::new(Random::seeded(seed ^ 0x9a1d));
        UnreliableProvider { provider: TestProvider::default(), random }
    }

    fn below(&self, bound: u64) -> u64 {
        self.random.lock().unwrap_or_else(PoisonError::into_inner).below(bound)
    }

    async fn travel(&self, clock: &dyn Clock) {
        clock.sleep(Duration::from_micros(self.below(LATENCY_MICROS))).await;
    }
}

fn lost() -> SendOutcome {
    SendOutcome::Unknown { why: "the answer was lost".to_owned() }
}

#[async_trait]
impl Transport for UnreliableProvider {
    async fn send(&self, outbound: &OutboundRequest, clock: &dyn Clock) -> SendOutcome {
        if let Some(payment) = outbound.url.path().strip_prefix(AUDIT_PATH) {
            let (captured, refunded) = (self.provider.captured(payment), self.provider.refunded(payment));
            let body = json!({"captured": captured, "refunded": refunded}).to_string().into_bytes();
            return SendOutcome::Answered(TargetResponse { body, ..TargetResponse::default() });
        }
        self.travel(clock).await;
        let declined = json!({"status": "declined", "reason": "chance"}).to_string().into_bytes();
        let sent = match (outbound.method.as_str(), self.below(10)) {
            (_, 9) => lost(),
            (_, 8) => SendOutcome::NotSent { why: "the connection was refused".to_owned() },
            ("POST", 7) => {
                let response =
                    TargetResponse { status: 402, body: declined, complete: true, retry_after: None };
                SendOutcome::Answered(response)
            }
            ("GET", 7) => SendOutcome::Answered(TargetResponse { status: 500, ..TargetResponse::default() }),
            (method, draw) => match self.provider.react(outbound) {
                TargetBehavior::Answers(response) if draw != 6 || method == "GET" => {
                    SendOutcome::Answered(response)
                }
                _ => lost(),
            },
        };
        self.travel(clock).await;
        sent
    }
}

const PAYMENTS: u64 = 6;

async fn act(client: &mut SimulatedClient) {
    let id = format!("p{}", client.below(PAYMENTS));
    let key = [Value::from(id.as_str())];
    let transaction = format!("t-{}-{}", client.name, client.next);
    match client.below(10) {
        0..=1 => {
            let manual = if id.ends_with(['1', '3']) { "manual" } else { "automatic" };
            let input =
                json!({"payment_intent_id": id, "amount": 100, "currency": "EUR", "capture_method": manual});
            client.call("pay.create", &[], input, None).await;
        }
        2..=4 => drop(client.call("pay.charge", &key, json!({"transaction_id": transaction}), None).await),
        5 => {
            let amount = 1 + client.below(120);
            let input = json!({"transaction_id": transaction, "amount": amount});
            client.call("pay.capture", &key, input, None).await;
        }
        6..=7 => {
            let input = json!({"transaction_id": transaction, "amount": 1 + client.below(70)});
            client.call("pay.refund", &key, input, None).await;
        }
        8 if client.below(4) == 0 => {
            client.call("pay.cancel", &key, json!({"transaction_id": transaction}), None).await;
        }
        _ => drop(client.call("pay.reconcile", &key, json!({}), None).await),
    }
}

async fn check(end: &FinishedHistory) -> Result<()> {
    // Conservation: the provider has moved what the payments say, and at most what is still in doubt besides.
    let house = &end.sound.house;
    let transport = house.egress().transport.as_ref().context("no courier")?;
    for row in
        scan(house.store().as_ref(), Scan::of(end.sound.table("pay_intents")?, &end.sound.tenant)).await?
    {
        let id = row.key().first().and_then(Value::as_text).context("a payment without an id")?;
        let question = OutboundRequest {
            method: "GET".parse()?,
            url: format!("https://psp.example{AUDIT_PATH}{id}").parse()?,
            headers: Default::default(),
            body: Vec::new(),
            connect_timeout: Duration::ZERO,
            timeout: Duration::ZERO,
            response_max: 0,
            allow_private: false,
        };
        let SendOutcome::Answered(answer) = transport.send(&question, house.clock().as_ref()).await else {
            anyhow::bail!("the provider does not say what it did about {id}");
        };
        let moved: serde_json::Value = serde_json::from_slice(&answer.body)?;
        let int = |column: &str| row.int(column).unwrap_or_default();
        let live = row.text("live_transaction").map_or(0, |_| int("amount"));
        let captured = moved["captured"].as_i64().context("no amount")?;
        let refunded = moved["refunded"].as_i64().context("no amount")?;
        ensure!(
            (int("captured")..=int("captured") + live).contains(&captured),
            "{row}: the provider has captured {captured}"
        );
        ensure!(
            (int("refunded")..=int("refunded") + int("refunding")).contains(&refunded),
            "{row}: the provider has refunded {refunded}"
        );
    }
    invariants::check(&end.sound.scope("pay")).await
}
