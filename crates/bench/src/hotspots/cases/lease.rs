//! Hotspots of `lease`: one lease that everybody wants, and many that are renewed all the time.

use std::time::Duration;

use anyhow::{Context as _, Result};
use serde_json::{Value as Json, json};
use statehouse::{Code, Operation, Request};
use statehouse_store::{Clock as _, SystemClock};

use super::super::case::{CaseFigures, Compares, HotspotCase, Side, Trial, each, key};
use crate::site::{Tenancy, request};

/// How long a holder keeps a lease that others want.
const HELD_FOR: Duration = Duration::from_millis(2);
/// The pause between two tries of a caller that asks in a loop.
const ASK_EVERY: Duration = Duration::from_millis(1);
/// The longest that a caller waits for news before it asks again.
const WAIT_MAX: Duration = Duration::from_millis(500);

const CASE: HotspotCase = HotspotCase {
    archetype: "lease",
    hotspot: "",
    operation: "one of 8 contenders acquires one lease, holds it for 2 ms and releases it",
    compares: Compares::Switch,
    blueprint: "[lease.lock]\nkey = { id = \"int\" }\nSETTINGS\n",
    sides: [Side::level("acquire every ms", 0), Side::level("wait for the log", 1)],
    operations: 200,
    callers: 8,
    workload: |trial| Box::pin(contend(trial)),
};

pub(super) const CASES: &[HotspotCase] = &[
    HotspotCase { hotspot: "hot claim key", ..CASE },
    HotspotCase {
        hotspot: "heartbeat/renew storm",
        operation: "a lease is renewed, by 16 callers",
        sides: [Side::level("one in each plan", 1), Side::level("40 in each batch", 40)],
        operations: 6_400,
        callers: 16,
        workload: |trial| Box::pin(renew(trial)),
        ..CASE
    },
    HotspotCase {
        hotspot: "lease-manager contention",
        operation: "a lease of the caller's own is acquired and released",
        compares: Compares::Load,
        sides: [Side::level("1 caller", 1), Side::level("64 callers", 64)],
        operations: 1_600,
        workload: |trial| {
            let callers = trial.side.level;
            Box::pin(own_leases(trial.with_callers(callers)))
        },
        ..CASE
    },
];

fn acquire(id: u64) -> Request {
    request("lock.acquire", key(id), json!({"holder": "bench", "duration_ms": 600_000}))
}

/// The epoch of a lease that was acquired.
fn epoch(lease: &Json) -> Result<i64> {
    lease.get("epoch").and_then(Json::as_i64).context("a lease has no epoch")
}

async fn release(house: &Tenancy, id: u64, epoch: i64) -> Result<()> {
    house.call("lock.release", key(id), json!({"holder": "bench", "epoch": epoch})).await?;
    Ok(())
}

/// Every contender wants the same lease, and either asks again and again or waits until the log has news.
async fn contend(trial: Trial) -> Result<CaseFigures> {
    trial.house.house.start_followers();
    let waits = trial.side.level == 1;
    trial
        .measure_each(move |house, _| async move {
            let mut listener = house.house.tail().listen();
            loop {
                match house.send(acquire(0)).await {
                    Ok(lease) => {
                        SystemClock.sleep(HELD_FOR).await;
                        return release(&house, 0, epoch(&lease.body)?).await;
                    }
                    Err(refusal) if matches!(refusal.code, Code::Held | Code::Contended) => {}
                    Err(refusal) => return Err(refusal.into()),
                }
                if waits {
                    // After a timeout the caller asks again, too.
                    tokio::select! {
                        () = listener.news() => {}
                        () = SystemClock.sleep(WAIT_MAX) => {}
                    }
                } else {
                    SystemClock.sleep(ASK_EVERY).await;
                }
            }
        })
        .await
}

/// Renews leases, as many in one batch as the side says.
async fn renew(trial: Trial) -> Result<CaseFigures> {
    let (operations, in_batch) = (trial.operations, trial.side.level.min(trial.operations));
    trial.fill((0..operations).map(acquire)).await?;
    let one = |id: u64| request("lock.renew", key(id), json!({"holder": "bench", "epoch": 1}));
    let work = each(&trial.house, trial.callers, operations / in_batch, move |house, number| async move {
        let requests = (number * in_batch..(number + 1) * in_batch).map(one).collect();
        let renewed = house.house.batch(house.tenant(), requests, Operation::default()).await;
        renewed.map_err(|refused| anyhow::anyhow!("not renewed: {refused:?}"))?;
        Ok(())
    });
    trial.measure(operations / in_batch * in_batch, work).await
}

async fn own_leases(trial: Trial) -> Result<CaseFigures> {
    trial
        .measure_each(|house, id| async move {
            let lease = house.send(acquire(id)).await?;
            release(&house, id, epoch(&lease.body)?).await
        })
        .await
}
