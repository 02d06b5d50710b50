//! The event `low`: left by exactly the plan by which a stock falls to the threshold.

use std::sync::Arc;

use anyhow::{Result, ensure};
use serde_json::{Value as Json, json};
use statehouse::Code;
use statehouse_store::SystemClock;

use super::{BLUEPRINT, id, shop, ware, wares, wares_in};
use crate::harness::engines::TestNamespace;
use crate::harness::proxy::{Paused, StoreProxy};
use crate::harness::store_client::same;
use crate::harness::tenant_client::TenantClient;

/// How many were left by each event `low` of a ware, in the order of the log.
async fn lows(client: &TenantClient, code: i64) -> Result<Vec<i64>> {
    let events = client.scope("ware").events("ware").await?;
    let own = events.get(&code.to_string()).into_iter().flatten().filter(|change| change.name == "low");
    Ok(own.map(|change| change.data["available"].as_i64().unwrap_or(i64::MIN)).collect())
}

async fn reserve(client: &TenantClient, name: &str, code: i64, quantity: i64) -> Result<()> {
    client.done("ware_reservation.reserve", &[], wares(name, &[(code, quantity)]), None).await.map(drop)
}

async fn done(client: &TenantClient, action: &str, input: Json) -> Result<()> {
    client.done(&format!("ware.{action}"), &ware(1), input, None).await.map(drop)
}

pub(super) async fn the_event_low_is_left_when_stock_falls_to_the_threshold(
    namespace: &dyn TestNamespace,
) -> Result<()> {
    let (client, _) = shop(namespace, 0, 0).await?;
    wares_in(&client, 1, 9).await?;
    reserve(&client, "r1", 1, 3).await?;
    same("above the threshold", &lows(&client, 1).await?, &vec![])?;
    reserve(&client, "r2", 1, 1).await?;
    same("at the threshold", &lows(&client, 1).await?, &vec![5])?;
    let events = client.scope("ware").events("ware").await?;
    let low = events.get("1").and_then(|changes| changes.iter().find(|change| change.name == "low"));
    ensure!(low.is_some_and(|low| low.data["code"] == 1 && low.data["low"] == 5), "{low:?}");
    reserve(&client, "r3", 1, 2).await?;
    client.refused("ware_reservation.reserve", &[], wares("r4", &[(1, 7)]), None, Code::OutOfStock).await?;
    same("below the threshold", &lows(&client, 1).await?, &vec![5])?;
    // It rises above the threshold, and falls again.
    client.done("ware_reservation.release", &id("r1"), json!({}), None).await?;
    same("what is available", &client.shown("ware", &ware(1), &["available"]).await?, &vec![json!(6)])?;
    reserve(&client, "r5", 1, 6).await?;
    same("the second time", &lows(&client, 1).await?, &vec![5, 0])
}

pub(super) async fn each_way_down_leaves_the_event_low(namespace: &dyn TestNamespace) -> Result<()> {
    let (client, _) = shop(namespace, 0, 0).await?;
    wares_in(&client, 1, 6).await?;
    wares_in(&client, 2, 100).await?;
    done(&client, "adjust", json!({"by": -2})).await?;
    done(&client, "adjust", json!({"by": -1})).await?;
    done(&client, "adjust", json!({"by": 10})).await?;
    same("by a correction", &lows(&client, 1).await?, &vec![4])?;
    done(&client, "transfer", json!({"quantity": 11, "to_code": 2})).await?;
    same("by a transfer", &lows(&client, 1).await?, &vec![4, 2])?;
    wares_in(&client, 1, 10).await?;
    let version = client.done("ware.read", &ware(1), json!({}), None).await?.version;
    client.done("ware.recount", &ware(1), json!({"counted": 5}), version).await?;
    client.done("ware.recount", &ware(1), json!({"counted": 4}), version.map(|version| version + 1)).await?;
    same("by a count", &lows(&client, 1).await?, &vec![4, 2, 5])?;
    // Several rows of one plan.
    wares_in(&client, 1, 6).await?;
    done(&client, "transfer", json!({"quantity": 1, "to_code": 2})).await?;
    let both = wares("r1", &[(1, 4), (2, 110)]);
    client.done("ware_reservation.reserve", &[], both, None).await?;
    same(
        "by a reservation",
        &(lows(&client, 1).await?, lows(&client, 2).await?),
        &(vec![4, 2, 5, 5], vec![2]),
    )
}

/// A caller who reserves, and what happens before its plan arrives for the second time. The first time it is refused, because there
/// is not plenty left.
async fn meanwhile(
    client: &TenantClient,
    quantity: i64,
    event: impl Future<Output = Result<()>> + Send + 'static,
) -> Result<()> {
    let paused = Arc::new(Paused::default());
    let store = Arc::new(StoreProxy::new(client.house.store().clone(), paused.clone()));
    let slow = TenantClient::over(store, BLUEPRINT, Arc::new(SystemClock)).await?;
    let (told, result) = tokio::sync::oneshot::channel();
    paused.before("wares", 2, async move {
        drop(told.send(event.await));
    });
    reserve(&slow, "slow", 1, quantity).await?;
    ensure!(paused.is_over(), "nothing came between");
    result.await?
}

pub(super) async fn a_threshold_that_was_crossed_meanwhile_is_told_once(
    namespace: &dyn TestNamespace,
) -> Result<()> {
    let (client, _) = shop(namespace, 0, 0).await?;
    wares_in(&client, 1, 6).await?;
    let other = client.clone();
    meanwhile(&client, 2, async move { reserve(&other, "quick", 1, 1).await }).await?;
    same("how often it is told", &lows(&client, 1).await?, &vec![5])?;
    client.shows("ware", &ware(1), &json!({"available": 3, "reserved": 3})).await
}

pub(super) async fn stock_that_was_added_meanwhile_is_seen(namespace: &dyn TestNamespace) -> Result<()> {
    let (client, _) = shop(namespace, 0, 0).await?;
    wares_in(&client, 1, 5).await?;
    let other = client.clone();
    // It was below the threshold, and now the reservation crosses it.
    meanwhile(&client, 3, async move { wares_in(&other, 1, 2).await }).await?;
    same("what is told", &lows(&client, 1).await?, &vec![4])
}

pub(super) async fn stock_that_went_meanwhile_is_not_sold_twice(namespace: &dyn TestNamespace) -> Result<()> {
    let (client, _) = shop(namespace, 0, 0).await?;
    wares_in(&client, 1, 5).await?;
    let other = client.clone();
    let event = async move { reserve(&other, "quick", 1, 4).await };
    // With the three that may be ordered, four are left for it.
    let refusal = meanwhile(&client, 5, event).await.err();
    ensure!(
        refusal.as_ref().is_some_and(|why| format!("{why:#}").contains("has 4 available")),
        "{refusal:?}"
    );
    client.shows("ware", &ware(1), &json!({"available": 1, "reserved": 4})).await
}
