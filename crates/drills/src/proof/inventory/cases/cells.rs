//! Stocks that are cut into cells: they read as one, sell as one, and are made even.

use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use serde_json::{Value as Json, json};
use statehouse::{Answer, Code, Refusal};
use statehouse_store::log::partition_of;
use statehouse_store::{Clock, ManualClock, Row, Scan, Step, SystemClock, Time, Value};

use super::{MINUTE, id};
use crate::harness::engines::TestNamespace;
use crate::harness::proxy::{Paused, StoreProxy};
use crate::harness::store_client::{same, scan};
use crate::harness::tenant_client::{TenantClient, shows};

const BLUEPRINT: &str = r#"
[house]
name = "drill"

[inventory.part]
key       = { code = "int" }
hold_for  = "10m"
lines_max = 4
backorder = 2
cells     = 3
shards    = 2

[inventory.bolt]
key       = { code = "int" }
low       = 2
movements = "log"
cells     = 3
shards    = 2

[inventory.panel]
key       = { shelf = "text", number = "int" }
movements = "log"
cells     = 2
shards    = 1
"#;

/// A house with nothing, on a clock that stands until it is moved.
async fn workshop(namespace: &dyn TestNamespace) -> Result<(TenantClient, Arc<ManualClock>)> {
    let clock = Arc::new(ManualClock::at(Time::from_millis(1_800_000_000_000)));
    let client = TenantClient::open_at(namespace, BLUEPRINT, clock.clone()).await?;
    Ok((client, clock))
}

/// A house with so many parts in three cells.
async fn parts(namespace: &dyn TestNamespace, quantity: i64) -> Result<(TenantClient, Arc<ManualClock>)> {
    let (client, clock) = workshop(namespace).await?;
    client.done("part.restock", &part(1), json!({"quantity": quantity}), None).await?;
    Ok((client, clock))
}

fn part(code: i64) -> [Value; 1] {
    [code.into()]
}

fn wanted(reservation: &str, quantity: i64) -> Json {
    json!({"reservation_id": reservation, "lines": [{"code": 1, "quantity": quantity}]})
}

async fn reserve(
    client: &TenantClient,
    resource: &str,
    name: &str,
    quantity: i64,
) -> Result<Answer, Refusal> {
    client.call(&format!("{resource}_reservation.reserve"), &[], wanted(name, quantity), None).await
}

/// Available, reserved, sold, stocked.
async fn has(client: &TenantClient, resource: &str, expected: [i64; 4]) -> Result<()> {
    let got = client.shown(resource, &part(1), &["available", "reserved", "sold", "stocked"]).await?;
    same(&format!("the {resource}"), &got, &expected.map(Json::from).to_vec())
}

/// What is available in each cell.
async fn cells(client: &TenantClient, resource: &str) -> Result<Vec<i64>> {
    let store = client.house.store().as_ref();
    let of = async |table: &str| scan(store, Scan::of(client.table(table)?, &client.tenant)).await;
    let mut rows: Vec<Row> = of(&format!("{resource}s")).await?;
    rows.extend(of(&format!("{resource}s_cells")).await?);
    let mut found = vec![0; 3];
    for row in rows.iter().filter(|row| row.key().first() == Some(&1.into())) {
        let cell = row.int("cell").and_then(|cell| usize::try_from(cell).ok()).unwrap_or(0);
        *found.get_mut(cell).context("a cell beyond the last")? =
            row.int("available").context("a cell without a number")?;
    }
    Ok(found)
}

pub(super) async fn a_stock_of_cells_reads_as_one(namespace: &dyn TestNamespace) -> Result<()> {
    let (client, _) = parts(namespace, 8).await?;
    same("the cells", &cells(&client, "part").await?.iter().sum::<i64>(), &8)?;
    has(&client, "part", [8, 0, 0, 8]).await?;
    let answer = client.done("part.restock", &part(1), json!({"quantity": 1}), None).await?;
    same("the answer", &answer.body, &json!({"code": 1, "quantity": 1}))?;
    let found = cells(&client, "part").await?;
    ensure!(found.iter().all(|cell| (2..=4).contains(cell)), "the cells are not alike: {found:?}");
    let version = client.done("part.read", &part(1), json!({}), None).await?.version;
    reserve(&client, "part", "r1", 2).await?;
    let after = client.done("part.availability", &part(1), json!({"quantity": 10}), None).await?;
    shows(&after, &json!({"available": 7, "orderable": 9, "reserved": 2, "enough": false}))?;
    ensure!(
        after.version > version,
        "a reservation did not raise the version: {version:?}, {:?}",
        after.version
    );
    let listed = client.done("panel.list", &[], json!({"shelf": "a"}), None).await?;
    same("nothing in a list", &listed.body, &json!([]))?;
    client.done("panel.restock", &["a".into(), 1.into()], json!({"quantity": 5}), None).await?;
    let listed = client.done("panel.list", &[], json!({"shelf": "a"}), None).await?;
    same("a row of a list", &listed.body[0]["available"], &json!(5))?;
    // What a caller does not see it cannot ask for: the row of one cell.
    let hidden = json!({"by": 1, "if": "available >= 1"});
    client.refused("part.adjust", &part(1), hidden, None, Code::InvalidInput).await?;
    for action in ["read", "availability", "adjust", "return"] {
        let input = if action == "adjust" { json!({"by": 1}) } else { json!({"quantity": 1}) };
        let input = if action == "read" { json!({}) } else { input };
        client.refused(&format!("part.{action}"), &part(9), input, None, Code::NotFound).await?;
    }
    let unknown = json!({"reservation_id": "r2", "lines": [{"code": 9, "quantity": 1}]});
    client.refused("part_reservation.reserve", &[], unknown, None, Code::NotFound).await.map(drop)
}

pub(super) async fn a_reservation_takes_from_several_cells(namespace: &dyn TestNamespace) -> Result<()> {
    let (client, clock) = parts(namespace, 9).await?;
    let reserved = reserve(&client, "part", "r1", 8).await?;
    shows(&reserved, &json!({"lines": [{"code": 1, "quantity": 8}], "state": "RESERVED"}))?;
    ensure!(reserved.body.get("taken").is_none(), "the cells are shown: {}", reserved.body);
    has(&client, "part", [1, 8, 0, 9]).await?;
    let again = reserve(&client, "part", "r1", 8).await?;
    same("the same reservation", &again.body, &reserved.body)?;
    client.done("part_reservation.release", &id("r1"), json!({}), None).await?;
    has(&client, "part", [9, 0, 0, 9]).await?;
    reserve(&client, "part", "r2", 9).await?;
    let bought = json!({"lines": [{"code": 1, "quantity": 5}]});
    client.done("part_reservation.commit", &id("r2"), bought, None).await?;
    has(&client, "part", [4, 0, 5, 9]).await?;
    reserve(&client, "part", "r3", 4).await?;
    clock.advance(MINUTE * 10);
    // The next caller ends it, and says what it lacks of all cells.
    let refusal =
        reserve(&client, "part", "r4", 7).await.err().context("more was reserved than there was")?;
    ensure!(refusal.code == Code::OutOfStock && refusal.message.contains("has 6 available"), "{refusal}");
    client.shows("part_reservation", &id("r3"), &json!({"state": "EXPIRED"})).await?;
    has(&client, "part", [4, 0, 5, 9]).await
}

pub(super) async fn cells_are_ordered_beyond_what_there_is_once(namespace: &dyn TestNamespace) -> Result<()> {
    let (client, _) = parts(namespace, 3).await?;
    reserve(&client, "part", "r1", 4).await?;
    has(&client, "part", [-1, 4, 0, 3]).await?;
    reserve(&client, "part", "r2", 1).await?;
    let refusal = reserve(&client, "part", "r3", 1).await.err();
    ensure!(refusal.as_ref().is_some_and(|no| no.message.contains("has 0 available")), "{refusal:?}");
    client.refused("part.adjust", &part(1), json!({"by": -1}), None, Code::OutOfStock).await?;
    client.done("part_reservation.release", &id("r1"), json!({}), None).await?;
    has(&client, "part", [2, 1, 0, 3]).await?;
    // What was ordered is not taken out, whatever single cells have.
    client.refused("part.adjust", &part(1), json!({"by": -3}), None, Code::OutOfStock).await?;
    client.done("part.adjust", &part(1), json!({"by": -2}), None).await?;
    has(&client, "part", [0, 1, 0, 1]).await
}

/// A caller who wants some, and what happens before its plan arrives for the second time, when it has read all cells.
async fn meanwhile(
    client: &TenantClient,
    resource: &str,
    quantity: i64,
    event: impl Future<Output = Result<()>> + Send + 'static,
) -> Result<Result<Answer, Refusal>> {
    let paused = Arc::new(Paused::default());
    let store = Arc::new(StoreProxy::new(client.house.store().clone(), paused.clone()));
    let slow = TenantClient::over(store, BLUEPRINT, Arc::new(SystemClock)).await?;
    let (told, result) = tokio::sync::oneshot::channel();
    paused.before(&format!("{resource}_reservations"), 2, async move {
        drop(told.send(event.await));
    });
    let answer = reserve(&slow, resource, "slow", quantity).await;
    ensure!(paused.is_over(), "nothing came between");
    result.await??;
    Ok(answer)
}

pub(super) async fn no_refusal_is_an_artefact_of_cells(namespace: &dyn TestNamespace) -> Result<()> {
    let (client, _) = workshop(namespace).await?;
    client.done("bolt.restock", &part(1), json!({"quantity": 9}), None).await?;
    reserve(&client, "bolt", "all", 8).await?;
    let other = client.clone();
    // The caller has read that one is left, and then all of it is there.
    let event =
        async move { other.done("bolt_reservation.release", &id("all"), json!({}), None).await.map(drop) };
    let answer = meanwhile(&client, "bolt", 9, event).await?;
    ensure!(answer.is_ok(), "nine were there, and the caller was told {answer:?}");
    has(&client, "bolt", [0, 9, 0, 9]).await
}

pub(super) async fn a_cell_that_had_nothing_is_not_missed(namespace: &dyn TestNamespace) -> Result<()> {
    // Three bolts, of which the first cells lack theirs when the caller reads.
    lacked_meanwhile(namespace, 3, &[("a", 1), ("b", 1)], "b").await
}

pub(super) async fn a_cell_that_had_too_little_is_not_missed(namespace: &dyn TestNamespace) -> Result<()> {
    // The last cell has one of two, which the caller would take.
    lacked_meanwhile(namespace, 6, &[("a", 2), ("b", 2), ("c", 1)], "c").await
}

/// A caller wants two and has read that one is left, and then a reservation gives another back, in one cell.
async fn lacked_meanwhile(
    namespace: &dyn TestNamespace,
    quantity: i64,
    taken: &[(&str, i64)],
    released: &'static str,
) -> Result<()> {
    let (client, _) = workshop(namespace).await?;
    client.done("bolt.restock", &part(1), json!({"quantity": quantity}), None).await?;
    for (name, quantity) in taken {
        reserve(&client, "bolt", name, *quantity).await?;
    }
    same("the cells", &cells(&client, "bolt").await?, &vec![0, 0, 1])?;
    let other = client.clone();
    let event =
        async move { other.done("bolt_reservation.release", &id(released), json!({}), None).await.map(drop) };
    let answer = meanwhile(&client, "bolt", 2, event).await?;
    ensure!(answer.is_ok(), "two were there, and the caller was told {answer:?}");
    Ok(())
}

pub(super) async fn what_moves_between_cells_is_not_missed(namespace: &dyn TestNamespace) -> Result<()> {
    let (client, clock) = parts(namespace, 3).await?;
    reserve(&client, "part", "r1", 3).await?;
    client.done("part.adjust", &part(1), json!({"by": 4}), None).await?;
    // All of it is in cell 0; a balancer moves it while a caller reads.
    let other = client.clone();
    let event = async move {
        clock.advance(MINUTE);
        other.drain_workers().await.map(drop)
    };
    let answer = meanwhile(&client, "part", 6, event).await?;
    ensure!(answer.is_ok(), "four were there and two can be ordered: {answer:?}");
    has(&client, "part", [-2, 9, 0, 7]).await
}

pub(super) async fn cells_are_made_even(namespace: &dyn TestNamespace) -> Result<()> {
    let (client, clock) = parts(namespace, 3).await?;
    same("made even too early", &client.drain_workers().await?, &0)?;
    client.done("part.adjust", &part(1), json!({"by": 10}), None).await?;
    same("the cells", &cells(&client, "part").await?, &vec![11, 1, 1])?;
    same("made even too early", &client.drain_workers().await?, &0)?;
    clock.advance(Duration::from_secs(1));
    same("made even", &client.drain_workers().await?, &1)?;
    same("the cells", &cells(&client, "part").await?, &vec![5, 4, 4])?;
    has(&client, "part", [13, 0, 0, 13]).await?;
    // A plan that takes from several cells makes the stock due once more.
    reserve(&client, "part", "r1", 10).await?;
    clock.advance(Duration::from_secs(1));
    same("made even", &client.drain_workers().await?, &1)?;
    same("the cells", &cells(&client, "part").await?, &vec![1, 1, 1])?;
    clock.advance(MINUTE * 10);
    client.drain_workers().await?;
    has(&client, "part", [13, 0, 0, 13]).await
}

pub(super) async fn two_balancers_do_not_undo_each_other(namespace: &dyn TestNamespace) -> Result<()> {
    let (client, clock) = parts(namespace, 3).await?;
    client.done("part.restock", &part(1), json!({"quantity": 3}), None).await?;
    let version = client.done("part.read", &part(1), json!({}), None).await?.version;
    client.done("part.recount", &part(1), json!({"counted": 6}), version).await?;
    client.done("part.adjust", &part(1), json!({"by": 3}), None).await?;
    same("the cells", &cells(&client, "part").await?, &vec![5, 2, 2])?;
    clock.advance(Duration::from_secs(1));
    // Both have read the same, and one of them is slow.
    let paused = Arc::new(Paused::default());
    let store = Arc::new(StoreProxy::new(client.house.store().clone(), paused.clone()));
    let slow = TenantClient::over(store, BLUEPRINT, clock.clone()).await?;
    paused.before("parts_cells", 1, {
        let client = client.clone();
        async move { drop(client.drain_workers().await) }
    });
    slow.work(7).await?;
    ensure!(paused.is_over(), "nothing came between");
    same("the cells", &cells(&client, "part").await?, &vec![3, 3, 3])?;
    // A caller takes what is to be moved.
    client.done("part.adjust", &part(1), json!({"by": 12}), None).await?;
    clock.advance(Duration::from_secs(1));
    let paused = Arc::new(Paused::default());
    let store = Arc::new(StoreProxy::new(client.house.store().clone(), paused.clone()));
    let slow = TenantClient::over(store, BLUEPRINT, clock.clone()).await?;
    paused.before("parts_cells", 1, {
        let client = client.clone();
        async move { drop(client.call("part.adjust", &part(1), json!({"by": -12}), None).await) }
    });
    slow.work(7).await?;
    let found = cells(&client, "part").await?;
    ensure!(found.iter().all(|cell| *cell >= 0), "a cell is below zero: {found:?}");
    has(&client, "part", [9, 0, 0, 9]).await
}

pub(super) async fn stocks_of_cells_are_corrected_counted_and_moved(
    namespace: &dyn TestNamespace,
) -> Result<()> {
    let (client, _) = parts(namespace, 9).await?;
    let read = async || client.done("part.read", &part(1), json!({}), None).await;
    client.done("part.adjust", &part(1), json!({"by": -7}), None).await?;
    has(&client, "part", [2, 0, 0, 2]).await?;
    let refusal = client.refused("part.adjust", &part(1), json!({"by": -3}), None, Code::OutOfStock).await?;
    ensure!(refusal.message.contains("has 2 available"), "{refusal}");
    reserve(&client, "part", "r1", 2).await?;
    let version = read().await?.version.context("no version")?;
    let count = |counted: i64| json!({"counted": counted});
    client.refused("part.recount", &part(1), count(7), Some(version - 1), Code::VersionConflict).await?;
    client.done("part.recount", &part(1), count(7), Some(version)).await?;
    has(&client, "part", [5, 2, 0, 7]).await?;
    same("the cells", &cells(&client, "part").await?, &vec![2, 2, 1])?;
    client.refused("part.recount", &part(1), count(7), Some(version), Code::VersionConflict).await?;
    client.refused("part.recount", &part(1), count(7), None, Code::VersionRequired).await?;
    let version = read().await?.version;
    // With the two that may be ordered.
    client.done("part.recount", &part(1), count(0), version).await?;
    has(&client, "part", [-2, 2, 0, 0]).await?;
    let version = read().await?.version;
    client.done("part.recount", &part(1), count(9), version).await?;
    client.done("part_reservation.commit", &id("r1"), json!({}), None).await?;
    client.refused("part.return", &part(1), json!({"quantity": 3}), None, Code::WrongState).await?;
    client.done("part.return", &part(1), json!({"quantity": 2}), None).await?;
    has(&client, "part", [9, 0, 0, 9]).await?;
    client.done("part.transfer", &part(1), json!({"quantity": 8, "to_code": 2}), None).await?;
    has(&client, "part", [1, 0, 0, 1]).await?;
    client
        .refused("part.transfer", &part(1), json!({"quantity": 2, "to_code": 2}), None, Code::OutOfStock)
        .await?;
    client.shows("part", &part(2), &json!({"available": 8, "stocked": 8})).await?;
    let version = read().await?.version;
    client
        .refused(
            "part.restock",
            &part(1),
            json!({"quantity": 1}),
            version.map(|v| v + 1),
            Code::VersionConflict,
        )
        .await?;
    client.done("part.restock", &part(1), json!({"quantity": 1}), version).await?;
    has(&client, "part", [2, 0, 0, 2]).await
}

/// An id of a reservation that takes from this cell first.
fn id_of(client: &TenantClient, resource: &str, cell: u32, series: &str) -> String {
    let mut ids = (0..).map(|number| format!("{series}-{cell}-{number}"));
    let found = ids.find(|id| partition_of(&client.tenant, resource, id, 3) == cell);
    found.unwrap_or_default()
}

pub(super) async fn a_version_of_cells_is_judged_in_the_write(namespace: &dyn TestNamespace) -> Result<()> {
    let (client, _) = parts(namespace, 12).await?;
    for (action, input) in [
        ("recount", json!({"counted": 20})),
        ("restock", json!({"quantity": 3})),
        ("adjust", json!({"by": -1})),
        ("transfer", json!({"quantity": 1, "to_code": 2})),
    ] {
        for cell in 0..3 {
            let version = client.done("part.read", &part(1), json!({}), None).await?.version;
            let action_name = format!("part.{action}");
            let plan = client.drafted(&action_name, &part(1), input.clone(), version.map(Into::into)).await?;
            // Meanwhile one cell changes, and no other.
            let name = id_of(&client, "part", cell, action);
            reserve(&client, "part", &name, 1).await?;
            client.too_late(&plan).await?;
            client.done("part_reservation.release", &id(&name), json!({}), None).await?;
        }
    }
    has(&client, "part", [12, 0, 0, 12]).await
}

pub(super) async fn cells_that_do_not_agree_are_not_made_worse(namespace: &dyn TestNamespace) -> Result<()> {
    let (client, clock) = parts(namespace, 9).await?;
    let (store_client, table) = (client.store_client()?, client.table("parts_cells")?.clone());
    let name = id_of(&client, "part", 1, "r");
    reserve(&client, "part", &name, 1).await?;
    let draft = async |action: &str| {
        client.drafted(&format!("part_reservation.{action}"), &id(&name), json!({}), None).await
    };
    let plans = [draft("commit").await?, draft("release").await?];
    clock.advance(MINUTE * 10);
    let expire = draft("expire").await?;
    // A program writes past the actions. It should not; if it does, nothing falls below zero by it.
    let write = |reserved: i64| Step::update(&table, [1.into(), 1.into()]).set("reserved", reserved);
    store_client.apply(store_client.one(write(0))).await?;
    client.too_late(&expire).await?;
    clock.set(clock.now().minus(MINUTE * 10));
    for plan in &plans {
        client.too_late(plan).await?;
    }
    store_client.apply(store_client.one(write(1))).await.map(drop)
}

/// How many were left by each event `low` of a bolt.
async fn lows(client: &TenantClient) -> Result<Vec<i64>> {
    let events = client.scope("bolt").events("bolt").await?;
    let own = events.get("1").into_iter().flatten().filter(|change| change.name == "low");
    Ok(own.map(|change| change.data["available"].as_i64().unwrap_or(i64::MIN)).collect())
}

pub(super) async fn the_event_low_is_left_by_all_cells_together(namespace: &dyn TestNamespace) -> Result<()> {
    let (client, _) = workshop(namespace).await?;
    client.done("bolt.restock", &part(1), json!({"quantity": 9}), None).await?;
    for (name, quantity, expected) in
        [("r1", 3, vec![]), ("r2", 2, vec![]), ("r3", 2, vec![2]), ("r4", 1, vec![2])]
    {
        reserve(&client, "bolt", name, quantity).await?;
        same(&format!("after {name}"), &lows(&client).await?, &expected)?;
    }
    client.done("bolt.restock", &part(1), json!({"quantity": 6}), None).await?;
    client.done("bolt.adjust", &part(1), json!({"by": -5}), None).await?;
    same("by a correction", &lows(&client).await?, &vec![2, 2])?;
    client.done("bolt.restock", &part(1), json!({"quantity": 3}), None).await?;
    let version = client.done("bolt.read", &part(1), json!({}), None).await?.version;
    client.done("bolt.recount", &part(1), json!({"counted": 9}), version).await?;
    same("by a count", &lows(&client).await?, &vec![2, 2, 1])
}

pub(super) async fn the_event_low_of_cells_is_left_once(namespace: &dyn TestNamespace) -> Result<()> {
    let (client, _) = workshop(namespace).await?;
    client.done("bolt.restock", &part(1), json!({"quantity": 4}), None).await?;
    let other = client.clone();
    let event = async move { Ok(reserve(&other, "bolt", "quick", 2).await.map(drop)?) };
    // Both would fall to the threshold.
    meanwhile(&client, "bolt", 2, event).await??;
    same("how often it is told", &lows(&client).await?, &vec![2])?;
    has(&client, "bolt", [0, 4, 0, 4]).await
}

pub(super) async fn a_stock_can_be_cut_into_cells(namespace: &dyn TestNamespace) -> Result<()> {
    let clock = Arc::new(SystemClock);
    let whole = BLUEPRINT.replace("cells     = 3\n", "");
    let before = TenantClient::over(namespace.open().await?, &whole, clock.clone()).await?;
    before.done("part.restock", &part(1), json!({"quantity": 9}), None).await?;
    reserve(&before, "part", "r1", 4).await?;
    let client = TenantClient::over(before.house.store().clone(), BLUEPRINT, clock).await?;
    same("the cells", &cells(&client, "part").await?, &vec![5, 0, 0])?;
    has(&client, "part", [5, 4, 0, 9]).await?;
    client
        .done("part_reservation.commit", &id("r1"), json!({"lines": [{"code": 1, "quantity": 3}]}), None)
        .await?;
    for name in ["r2", "r3", "r4"] {
        reserve(&client, "part", name, 2).await?;
    }
    has(&client, "part", [0, 6, 3, 9]).await
}

pub(super) async fn many_callers_of_cells_get_what_there_is(namespace: &dyn TestNamespace) -> Result<()> {
    let store = namespace.open().await?;
    let clients = [
        TenantClient::over(store.clone(), BLUEPRINT, Arc::new(SystemClock)).await?,
        TenantClient::over(store, BLUEPRINT, Arc::new(SystemClock)).await?,
    ];
    clients[0].done("part.restock", &part(1), json!({"quantity": 10}), None).await?;
    let calls: Vec<_> = (0..16)
        .map(|caller| {
            let input = wanted(&format!("r{caller}"), 1);
            clients[caller % 2].start("part_reservation.reserve", &[], input, None)
        })
        .collect();
    let (mut got, mut refused) = (0, 0);
    for call in calls {
        match call.await? {
            Ok(_) => got += 1,
            Err(refusal) if refusal.code == Code::OutOfStock => refused += 1,
            Err(refusal) => ensure!(refusal.code == Code::Contended, "{refusal}"),
        }
    }
    // Two may be ordered beyond the ten.
    ensure!(refused == 0 || got == 12, "{refused} were told that nothing is left, and {got} of 12 got one");
    has(&clients[1], "part", [10 - got, got, 0, 10]).await
}
