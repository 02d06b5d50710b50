//! Hotspots of `workflow`: one row that many callers change, a state that many callers wait for, and effects that pile up.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use anyhow::Result;
use async_trait::async_trait;
use serde_json::{Value as Json, json};
use statehouse::Request;
use statehouse::egress::{Egress, OutboundRequest, SendOutcome, TargetResponse, Transport};
use statehouse::worker::WorkerOptions;
use statehouse_store::{Clock, SystemClock};

use super::super::case::{CaseFigures, Compares, HotspotCase, Side, Trial, each, key, until};
use crate::site::{Tenancy, request};

/// The pause between two reads of a caller that asks in a loop.
const ASK_EVERY: Duration = Duration::from_millis(1);
/// How long it takes until the awaited transition is made.
const DONE_AFTER: Duration = Duration::from_millis(20);
/// The longest that a caller waits for news before it reads again.
const WAIT_MAX: Duration = Duration::from_millis(500);
/// Callers that wait for one row.
const WAITING: u64 = 16;
/// How long a target takes to answer.
const LATENCY: Duration = Duration::from_millis(5);

const CASE: HotspotCase = HotspotCase {
    archetype: "workflow",
    hotspot: "",
    operation: "one of 16 callers changes one row",
    compares: Compares::Switch,
    blueprint: r#"
[effect.call]
url        = "https://target.example/"
idempotent = true

[workflow.order]
key     = { id = "int" }
initial = "OPEN"
SETTINGS
[workflow.order.on]
touch = { from = "OPEN" }
close = { from = "OPEN", to = "CLOSED" }
"#,
    sides: [Side::settings("history = \"rows\""), Side::settings("history = \"log\"")],
    operations: 800,
    callers: 16,
    workload: |trial| Box::pin(touch(trial)),
};

pub(super) const CASES: &[HotspotCase] = &[
    HotspotCase { hotspot: "hot workflow transition rows", ..CASE },
    HotspotCase {
        hotspot: "expensive status polling",
        operation: "16 callers wait until a row is closed, which takes 20 ms",
        sides: [Side::level("read every ms", 0), Side::level("wait for the log", 1)],
        operations: 20,
        callers: 1,
        workload: |trial| Box::pin(await_closed(trial)),
        ..CASE
    },
    HotspotCase {
        hotspot: "side-effect worker backlog",
        operation: "the effect of a transition is delivered to a target that takes 5 ms",
        blueprint: r#"
[effect.call]
url        = "https://target.example/"
idempotent = true
SETTINGS

[workflow.order]
key     = { id = "int" }
initial = "OPEN"
final   = ["CLOSED"]
[workflow.order.on]
close = { from = "OPEN", to = "CLOSED", send = { call = { id = "{id}" } } }
"#,
        sides: [
            Side::settings("limits = { concurrency = 1 }"),
            Side::settings("limits = { concurrency = 16 }"),
        ],
        operations: 200,
        workload: |trial| Box::pin(deliver(trial)),
        ..CASE
    },
];

fn start(id: u64) -> Request {
    request("order.start", vec![], json!({"id": id}))
}

async fn touch(trial: Trial) -> Result<CaseFigures> {
    trial.fill([start(0)]).await?;
    trial.measure_calls(|_| request("order.touch", key(0), json!({}))).await
}

async fn is_closed(house: &Tenancy, id: u64) -> Result<bool> {
    let row = house.call("order.read", key(id), json!({})).await?;
    Ok(row.body.get("state") == Some(&Json::from("CLOSED")))
}

/// Callers that wait for one row, and another one that closes it after a while.
async fn await_closed(trial: Trial) -> Result<CaseFigures> {
    trial.fill((0..trial.operations).map(start)).await?;
    trial.house.house.start_followers();
    let waits = trial.side.level == 1;
    trial
        .measure_each(move |house, id| async move {
            let (clock, closing) = (SystemClock, house.clone());
            let close = async {
                clock.sleep(DONE_AFTER).await;
                closing.call("order.close", key(id), json!({})).await?;
                anyhow::Ok(())
            };
            let wait = each(&house, WAITING, WAITING, move |house, _| async move {
                let mut listener = house.house.tail().listen();
                while !is_closed(&house, id).await? {
                    if waits {
                        tokio::select! {
                            () = listener.news() => {}
                            () = SystemClock.sleep(WAIT_MAX) => {}
                        }
                    } else {
                        SystemClock.sleep(ASK_EVERY).await;
                    }
                }
                Ok(())
            });
            let (closed, waited) = tokio::join!(close, wait);
            closed.and(waited)
        })
        .await
}

/// A target that answers after a while.
#[derive(Debug, Default)]
struct SlowTarget(AtomicU64);

#[async_trait]
impl Transport for SlowTarget {
    async fn send(&self, _: &OutboundRequest, clock: &dyn Clock) -> SendOutcome {
        clock.sleep(LATENCY).await;
        self.0.fetch_add(1, Ordering::Relaxed);
        SendOutcome::Answered(TargetResponse { status: 200, complete: true, ..TargetResponse::default() })
    }
}

/// Makes transitions, and measures until all of their effects are delivered.
async fn deliver(trial: Trial) -> Result<CaseFigures> {
    trial.fill((0..trial.operations).map(start)).await?;
    trial.fill((0..trial.operations).map(|id| request("order.close", key(id), json!({})))).await?;
    let target = Arc::new(SlowTarget::default());
    let transport: Arc<dyn Transport> = target.clone();
    let egress = Egress { transport: Some(transport), ..Egress::default() };
    let house = trial.another(|house| house.with_egress(egress)).await?;
    let wanted = trial.operations;
    let figures = trial
        .measure(wanted, async {
            house.house.start_workers(WorkerOptions::default());
            until(|| async { Ok(target.0.load(Ordering::Relaxed) >= wanted) }).await
        })
        .await?;
    house.house.stop_workers().await;
    Ok(figures)
}
