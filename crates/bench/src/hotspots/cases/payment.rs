//! Hotspots of `payment`: charges do not wait for the provider, slow and failing providers, and operation ids.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use anyhow::Result;
use async_trait::async_trait;
use serde_json::json;
use statehouse::Request;
use statehouse::egress::{Egress, OutboundRequest, SendOutcome, TargetResponse, Transport};
use statehouse::worker::WorkerOptions;
use statehouse_store::Clock;
use statehouse_store::clock::Stopwatch;

use super::super::case::{CaseFigures, Compares, HotspotCase, Side, Trial, each, insist, until};
use crate::site::request;

/// How long the provider takes to answer, and how long one fails that recovers then.
const LATENCY: Duration = Duration::from_millis(5);
const OUTAGE: Duration = Duration::from_millis(1_000);

const CASE: HotspotCase = HotspotCase {
    archetype: "payment",
    hotspot: "",
    operation: "a payment is charged while the provider is slow",
    compares: Compares::Load,
    blueprint: "
[payment.pay]
key        = { payment_intent_id = \"text\" }
currencies = [\"EUR\"]
[payment.pay.http]
url = \"https://psp.example\"
SETTINGS
",
    sides: [Side::level("an answer takes 1 ms", 1), Side::level("an answer takes 200 ms", 200)],
    operations: 400,
    callers: 16,
    workload: |trial| Box::pin(charge(trial)),
};

pub(super) const CASES: &[HotspotCase] = &[
    HotspotCase { hotspot: "synchronous commit-path latency", ..CASE },
    HotspotCase {
        hotspot: "external provider bottleneck",
        operation: "a payment is captured by a provider that takes 5 ms",
        compares: Compares::Switch,
        sides: [
            Side::settings("limits = { concurrency = 1 }"),
            Side::settings("limits = { concurrency = 16 }"),
        ],
        operations: 200,
        workload: |trial| Box::pin(capture(trial, Duration::ZERO)),
        ..CASE
    },
    HotspotCase {
        hotspot: "retry amplification",
        operation: "a payment is captured by a provider that fails for a second (requests: to the provider)",
        compares: Compares::Switch,
        blueprint: "
[payment.pay]
key        = { payment_intent_id = \"text\" }
currencies = [\"EUR\"]
[payment.pay.http]
url          = \"https://psp.example\"
max_attempts = 1000
back_off     = { min = \"20ms\", max = \"50ms\" }
SETTINGS
",
        sides: [
            Side::settings("breaker = { failures = 1000, cool_down = \"200ms\" }")
                .named("breaker.failures = 1000"),
            Side::settings("breaker = { failures = 5, cool_down = \"200ms\" }").named("breaker.failures = 5"),
        ],
        operations: 200,
        workload: |trial| Box::pin(capture(trial, OUTAGE)),
        ..CASE
    },
    HotspotCase {
        hotspot: "idempotency-store hotspot",
        operation: "one of 16 callers charges a payment under an operation id",
        compares: Compares::Switch,
        sides: [Side::partitions("partitions = 1", 1), Side::partitions("partitions = 16", 16)],
        workload: |trial| Box::pin(charge(trial)),
        ..CASE
    },
];

/// A provider that answers after a while, and not at all at first if there is an outage.
#[derive(Debug)]
struct BenchProvider {
    latency: Duration,
    outage: Duration,
    started: Stopwatch,
    requests: AtomicU64,
    captured: AtomicU64,
}

#[async_trait]
impl Transport for BenchProvider {
    async fn send(&self, _: &OutboundRequest, clock: &dyn Clock) -> SendOutcome {
        self.requests.fetch_add(1, Ordering::Relaxed);
        clock.sleep(self.latency).await;
        let fails = self.started.elapsed() < self.outage;
        if !fails {
            self.captured.fetch_add(1, Ordering::Relaxed);
        }
        let (status, body) = if fails { (503, "") } else { (200, "{\"status\": \"captured\"}") };
        let body = body.as_bytes().to_vec();
        SendOutcome::Answered(TargetResponse { status, body, complete: true, retry_after: None })
    }
}

fn provider(latency: Duration, outage: Duration) -> Arc<BenchProvider> {
    let (requests, captured) = (AtomicU64::new(0), AtomicU64::new(0));
    Arc::new(BenchProvider { latency, outage, started: Stopwatch::start(), requests, captured })
}

fn egress(provider: &Arc<BenchProvider>) -> Egress {
    let transport: Arc<dyn Transport> = provider.clone();
    Egress { transport: Some(transport), ..Egress::default() }
}

fn created(number: u64) -> Request {
    let input = json!({"payment_intent_id": format!("p{number}"), "amount": 100, "currency": "EUR"});
    request("pay.create", vec![], input)
}

fn charged(number: u64) -> Request {
    let input = json!({"transaction_id": format!("t{number}")});
    request("pay.charge", vec![format!("p{number}").into()], input)
}

/// Measures charges while the workers send them.
async fn charge(trial: Trial) -> Result<CaseFigures> {
    trial.fill((0..trial.operations).map(created)).await?;
    let provider = provider(Duration::from_millis(trial.side.level.max(1)), Duration::ZERO);
    let house = trial.another(|house| house.with_egress(egress(&provider))).await?;
    house.house.start_workers(WorkerOptions::default());
    let (callers, operations) = (trial.callers, trial.operations);
    let calls = each(&house, callers, operations, |house, number| async move {
        insist(&house, &charged(number)).await.map(drop)
    });
    let figures = trial.measure(operations, calls).await?;
    house.house.stop_workers().await;
    Ok(figures)
}

/// Charges payments, and measures until the provider has captured all of them.
async fn capture(trial: Trial, outage: Duration) -> Result<CaseFigures> {
    trial.fill((0..trial.operations).map(created)).await?;
    trial.fill((0..trial.operations).map(charged)).await?;
    let provider = provider(LATENCY, outage);
    let house = trial.another(|house| house.with_egress(egress(&provider))).await?;
    let wanted = trial.operations;
    let figures = trial
        .measure(wanted, async {
            house.house.start_workers(WorkerOptions::default());
            until(|| async { Ok(provider.captured.load(Ordering::Relaxed) >= wanted) }).await
        })
        .await?;
    house.house.stop_workers().await;
    let requests =
        if outage.is_zero() { figures.requests } else { provider.requests.load(Ordering::Relaxed) };
    Ok(CaseFigures { requests, ..figures })
}
