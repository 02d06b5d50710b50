//! Hotspots of `effect`: slow targets, targets that fail, and many targets at once.

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

use super::super::case::{CaseFigures, Compares, HotspotCase, Side, Trial, until};
use crate::site::request;

/// How long a target takes to answer.
const LATENCY: Duration = Duration::from_millis(5);
/// How long a target fails that recovers then.
const OUTAGE: Duration = Duration::from_millis(1_000);
/// Different targets of one effect.
const TARGETS: u64 = 16;

const CASE: HotspotCase = HotspotCase {
    archetype: "effect",
    hotspot: "",
    operation: "an effect is delivered to a target that takes 5 ms",
    compares: Compares::Switch,
    blueprint: "[effect.call]\nurl = \"https://target.example/\"\nidempotent = true\nSETTINGS\n",
    sides: [Side::settings("limits = { concurrency = 1 }"), Side::settings("limits = { concurrency = 16 }")],
    operations: 200,
    callers: 16,
    workload: |trial| Box::pin(deliver(trial, Duration::ZERO, None)),
};

pub(super) const CASES: &[HotspotCase] = &[
    HotspotCase { hotspot: "external dependency latency", ..CASE },
    HotspotCase {
        hotspot: "retry storms",
        operation: "an effect is delivered to a target that fails for a second (requests: to the target)",
        blueprint: "
[effect.call]
url          = \"https://target.example/\"
idempotent   = true
max_attempts = 1000
back_off     = { min = \"20ms\", max = \"50ms\" }
SETTINGS
",
        sides: [
            Side::settings("breaker = { failures = 1000, cool_down = \"200ms\" }")
                .named("breaker.failures = 1000"),
            Side::settings("breaker = { failures = 5, cool_down = \"200ms\" }").named("breaker.failures = 5"),
        ],
        workload: |trial| Box::pin(deliver(trial, OUTAGE, None)),
        ..CASE
    },
    HotspotCase {
        hotspot: "outbox relay backlog",
        operation: "an effect is delivered to one of 16 targets that take 5 ms",
        blueprint: "[effect.call]\nhosts = [\"*.example\"]\nidempotent = true\nSETTINGS\n",
        sides: [Side::settings("shards = 1"), Side::settings("shards = 8")],
        operations: 1_600,
        workload: |trial| Box::pin(deliver(trial, Duration::ZERO, Some(TARGETS))),
        ..CASE
    },
];

/// Targets that answer after a while, with an error at first if there is an outage.
#[derive(Debug)]
struct BenchTarget {
    outage: Duration,
    started: Stopwatch,
    requests: AtomicU64,
    delivered: AtomicU64,
}

#[async_trait]
impl Transport for BenchTarget {
    async fn send(&self, _: &OutboundRequest, clock: &dyn Clock) -> SendOutcome {
        self.requests.fetch_add(1, Ordering::Relaxed);
        clock.sleep(LATENCY).await;
        let fails = self.started.elapsed() < self.outage;
        if !fails {
            self.delivered.fetch_add(1, Ordering::Relaxed);
        }
        let status = if fails { 503 } else { 200 };
        SendOutcome::Answered(TargetResponse { status, complete: true, ..TargetResponse::default() })
    }
}

fn send(number: u64, targets: Option<u64>) -> Request {
    let mut input = json!({"key": number.to_string(), "body": {"number": number}});
    if let (Some(targets), Some(input)) = (targets, input.as_object_mut()) {
        input.insert("url".into(), format!("https://target-{}.example/", number % targets).into());
    }
    request("call.send", vec![], input)
}

/// Writes effects, and measures until all of them have been answered with success.
async fn deliver(trial: Trial, outage: Duration, targets: Option<u64>) -> Result<CaseFigures> {
    trial.fill((0..trial.operations).map(|number| send(number, targets))).await?;
    let target = Arc::new(BenchTarget {
        outage,
        started: Stopwatch::start(),
        requests: AtomicU64::new(0),
        delivered: AtomicU64::new(0),
    });
    let transport: Arc<dyn Transport> = target.clone();
    let egress = Egress { transport: Some(transport), ..Egress::default() };
    let house = trial.another(|house| house.with_egress(egress)).await?;
    let wanted = trial.operations;
    let figures = trial
        .measure(wanted, async {
            house.house.start_workers(WorkerOptions::default());
            until(|| async { Ok(target.delivered.load(Ordering::Relaxed) >= wanted) }).await
        })
        .await?;
    house.house.stop_workers().await;
    let requests = if outage.is_zero() { figures.requests } else { target.requests.load(Ordering::Relaxed) };
    Ok(CaseFigures { requests, ..figures })
}
