//! Many callers at once, and rows that change between a reading and a write.

use std::sync::Arc;
use std::time::Duration;

use anyhow::{Result, ensure};
use serde_json::{Value as Json, json};
use statehouse::Code;
use statehouse_store::clock::SkewedClock;
use statehouse_store::{Clock, Step, SystemClock};

use super::{BLUEPRINT, MINUTE, act, has, id, mug, reserve, shop, wanted};
use crate::harness::case_check::skip_invariants;
use crate::harness::engines::TestNamespace;
use crate::harness::proxy::{Meanwhile, Paused, StoreProxy};
use crate::harness::store_client::same;
use crate::harness::tenant_client::TenantClient;

pub(super) async fn many_callers_never_oversell(namespace: &dyn TestNamespace) -> Result<()> {
    let store = namespace.open().await?;
    let clients = [
        TenantClient::over(store.clone(), BLUEPRINT, Arc::new(SystemClock)).await?,
        TenantClient::over(store, BLUEPRINT, Arc::new(SystemClock)).await?,
    ];
    for location in ["berlin", "oslo"] {
        clients[0].done("stock.restock", &mug(location), json!({"quantity": 10}), None).await?;
    }
    let calls: Vec<_> = (0..24)
        .map(|caller| {
            let lines: &[(&str, i64)] =
                if caller % 3 == 0 { &[("berlin", 2)] } else { &[("oslo", 1), ("berlin", 1)] };
            let input = wanted(&format!("r{caller}"), lines);
            clients[caller % 2].start("stock_reservation.reserve", &[], input, None)
        })
        .collect();
    let (mut berlin, mut refused) = (0, 0);
    for (caller, call) in calls.into_iter().enumerate() {
        match call.await? {
            Ok(_) => berlin += if caller % 3 == 0 { 2 } else { 1 },
            Err(refusal) if refusal.code == Code::OutOfStock => refused += 1,
            Err(refusal) => ensure!(refusal.code == Code::Contended, "{refusal}"),
        }
    }
    ensure!(refused > 0 && berlin <= 10, "{berlin} of 10 were reserved, and {refused} callers were refused");
    has(&clients[1], "berlin", [10 - berlin, berlin, 0, 10]).await
}

pub(super) async fn buying_and_expiring_have_one_winner(namespace: &dyn TestNamespace) -> Result<()> {
    let (client, clock) = shop(namespace, 8, 0).await?;
    for round in 0..6 {
        let name = format!("r{round}");
        reserve(&client, &name, &[("berlin", 1)]).await?;
        let late = round % 2 == 1;
        clock.advance(if late { MINUTE * 10 } else { MINUTE * 10 - Duration::from_micros(1) });
        let start =
            |action: &str| client.start(&format!("stock_reservation.{action}"), &id(&name), json!({}), None);
        let (bought, expired) = (start("commit"), start("expire"));
        same("who won", &(bought.await?.is_ok(), expired.await?.is_ok()), &(!late, late))?;
    }
    has(&client, "berlin", [5, 0, 3, 8]).await
}

pub(super) async fn a_count_and_a_reservation_have_one_winner(namespace: &dyn TestNamespace) -> Result<()> {
    let (client, clock) = shop(namespace, 5, 0).await?;
    let meanwhile = Arc::new(Meanwhile::default());
    let store = Arc::new(StoreProxy::new(client.house.store().clone(), meanwhile.clone()));
    let clerk = TenantClient::over(store, BLUEPRINT, clock).await?;
    meanwhile.next({
        let client = client.clone();
        async move { drop(reserve(&client, "r1", &[("berlin", 2)]).await) }
    });
    // Three were counted before two of five were reserved: the count would take the reserved ones away.
    let count = json!({"counted": 3});
    clerk.refused("stock.recount", &mug("berlin"), count.clone(), Some(1), Code::VersionConflict).await?;
    has(&client, "berlin", [3, 2, 0, 5]).await?;
    clerk.done("stock.recount", &mug("berlin"), count, Some(2)).await?;
    has(&client, "berlin", [1, 2, 0, 3]).await
}

pub(super) async fn a_reservation_that_was_bought_meanwhile_is_not_swept(
    namespace: &dyn TestNamespace,
) -> Result<()> {
    let (client, clock) = shop(namespace, 8, 0).await?;
    for (name, action) in [("r1", "commit"), ("r2", "release"), ("r3", "extend")] {
        reserve(&client, name, &[("berlin", 1)]).await?;
        clock.advance(MINUTE * 9);
        // The sweeper's clock is ahead: it reads the reservation as due, and then the reservation goes on without it.
        let ahead = SkewedClock::over(clock.clone());
        ahead.skew(3_600_000_000);
        let meanwhile = Arc::new(Meanwhile::default());
        let store = Arc::new(StoreProxy::new(client.house.store().clone(), meanwhile.clone()));
        let slow = TenantClient::over(store, BLUEPRINT, Arc::new(ahead)).await?;
        meanwhile.next({
            let (client, clock) = (client.clone(), clock.clone());
            async move {
                drop(act(&client, action, name).await);
                clock.advance(MINUTE * 2);
            }
        });
        slow.work(7).await?;
    }
    for (name, state) in [("r1", "COMMITTED"), ("r2", "RELEASED"), ("r3", "RESERVED")] {
        client.shows("stock_reservation", &id(name), &json!({"state": state})).await?;
    }
    // The same for one who buys while the clock of its process is behind.
    let paused = Arc::new(Paused::default());
    let store = Arc::new(StoreProxy::new(client.house.store().clone(), paused.clone()));
    let slow = TenantClient::over(store, BLUEPRINT, clock.clone()).await?;
    paused.before("stock_reservations", 1, {
        let client = client.clone();
        async move { drop(act(&client, "release", "r3").await) }
    });
    slow.refused("stock_reservation.commit", &id("r3"), json!({}), None, Code::WrongState).await?;
    has(&client, "berlin", [7, 0, 1, 8]).await
}

pub(super) async fn rows_that_do_not_agree_are_not_made_worse(namespace: &dyn TestNamespace) -> Result<()> {
    skip_invariants("writes rows past the actions");
    let (client, clock) = shop(namespace, 5, 0).await?;
    let store_client = client.store_client()?;
    let stocks = client.table("stocks")?.clone();
    reserve(&client, "r1", &[("berlin", 3)]).await?;
    let draft = async |action: &str| {
        client.drafted(&format!("stock_reservation.{action}"), &id("r1"), json!({}), None).await
    };
    let plans = [draft("commit").await?, draft("release").await?];
    clock.advance(MINUTE * 10);
    let expire = draft("expire").await?;
    // A program writes past the actions. It should not; if it does, nothing falls below zero by it.
    let write = |reserved: i64| Step::update(&stocks, mug("berlin")).set("reserved", reserved);
    store_client.apply(store_client.one(write(2))).await?;
    client.too_late(&expire).await?;
    clock.set(clock.now().minus(MINUTE * 10));
    for plan in &plans {
        client.too_late(plan).await?;
    }
    let row: Vec<Json> = client.shown("stock", &mug("berlin"), &["available", "reserved", "sold"]).await?;
    same("the row", &row, &vec![json!(2), json!(2), json!(0)])
}

pub(super) async fn a_movement_is_written_once(namespace: &dyn TestNamespace) -> Result<()> {
    let (client, _) = shop(namespace, 5, 0).await?;
    let plan = client.drafted("stock.adjust", &mug("berlin"), json!({"by": 1}), None).await?;
    let mut again = plan.to_builder();
    again.operation = "again".to_owned();
    client.house.store().commit(&plan).await?;
    client.too_late(&again.build()?).await?;
    has(&client, "berlin", [6, 0, 0, 6]).await
}
