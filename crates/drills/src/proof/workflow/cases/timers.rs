//! Timers of workflows, with callers that come at the same time.

use std::sync::Arc;
use std::time::Duration;

use anyhow::Result;
use serde_json::json;
use statehouse_store::Clock;
use statehouse_store::clock::SkewedClock;

use super::{at, history, open, order, over, pay, place, standing, ticket};
use crate::harness::engines::TestNamespace;
use crate::harness::proxy::{Paused, StoreProxy};
use crate::harness::store_client::{pause, same};
use crate::harness::tenant_client::{TenantClient, shows};

pub(super) async fn a_timer_fires_once_and_not_early(namespace: &dyn TestNamespace) -> Result<()> {
    let clock = standing();
    let client = at(namespace, &clock).await?;
    let placed = place(&client, "o1", 500).await?;
    let due = clock.now().plus(Duration::from_secs(1_800));
    shows(&placed, &json!({"due_at": due.to_string()}))?;
    clock.advance(Duration::from_micros(1_799_999_999));
    same("a microsecond early", &client.drain_workers_of("order").await?, &0)?;
    clock.advance(Duration::from_micros(1));
    same("in time", &client.work_of("order").await?, &1)?;
    same("again", &client.work_of("order").await?, &0)?;
    let row =
        json!({"state": "CANCELLED", "seq": 2, "last_by": "timer", "last_operation": null, "due_at": null});
    client.shows("order", &order("o1"), &row).await?;
    let entries = history(&client, "o1", &["transition", "by"]).await?;
    same("the history", &entries[1], &vec![json!("expire"), json!("timer")])?;
    let sent = client.done("receipt.read", &["order:o1:2".into()], json!({}), None).await?;
    shows(&sent, &json!({"body": {"expired": "o1"}}))
}

pub(super) async fn a_timer_ends_with_its_state(namespace: &dyn TestNamespace) -> Result<()> {
    let clock = standing();
    let client = at(namespace, &clock).await?;
    place(&client, "o1", 500).await?;
    pay(&client, "o1").await?;
    // What keeps the state keeps its timer.
    place(&client, "o2", 500).await?;
    let due = clock.now().plus(Duration::from_secs(1_800)).to_string();
    clock.advance(Duration::from_secs(60));
    let address = client.done("order.address", &order("o2"), json!({"customer": "bob"}), None).await?;
    shows(&address, &json!({"due_at": due}))?;
    clock.advance(Duration::from_secs(3_600));
    same("what is due", &client.work_of("order").await?, &1)?;
    client.shows("order", &order("o1"), &json!({"state": "PAID"})).await?;
    client.shows("order", &order("o2"), &json!({"state": "CANCELLED", "customer": "bob"})).await
}

pub(super) async fn a_timer_begins_anew_with_its_state(namespace: &dyn TestNamespace) -> Result<()> {
    let clock = standing();
    let client = at(namespace, &clock).await?;
    open(&client, 1, 5).await?;
    let hour = Duration::from_secs(3_600);
    for step in 1..4_i64 {
        clock.advance(hour);
        same("each hour", &client.drain_workers_of("ticket").await?, &1)?;
        let due = clock.now().plus(hour).to_string();
        let row = json!({"state": "open.new", "seq": step + 1, "last_transition": "escalate", "due_at": due});
        client.shows("ticket", &ticket(1), &row).await?;
    }
    client.done("ticket.take", &ticket(1), json!({}), None).await?;
    clock.advance(hour * 3);
    same("taken", &client.drain_workers_of("ticket").await?, &0)?;
    client.done("ticket.give", &ticket(1), json!({}), None).await?;
    same("given back", &client.drain_workers_of("ticket").await?, &0)?;
    let due = clock.now().plus(hour).to_string();
    client.shows("ticket", &ticket(1), &json!({"due_at": due})).await
}

pub(super) async fn a_caller_and_a_timer_contend_on_one_row(namespace: &dyn TestNamespace) -> Result<()> {
    let clock = standing();
    let store = namespace.open_at(Arc::new(clock.clone())).await?;
    let client = over(store.clone(), Arc::new(clock.clone())).await?;
    let paused = Arc::new(Paused::default());
    let slow = over(Arc::new(StoreProxy::new(store, paused.clone())), Arc::new(clock.clone())).await?;
    // The worker has found what is due and is paused; a caller takes the row elsewhere.
    for (id, table) in [("o1", "orders"), ("1", "tickets")] {
        let call: Box<dyn FnOnce(TenantClient) -> _ + Send> = match table {
            "orders" => {
                place(&client, id, 500).await?;
                Box::new(|client: TenantClient| {
                    tokio::spawn(async move {
                        client.call("order.pay", &order("o1"), json!({"payment": "card"}), None).await
                    })
                })
            }
            _ => {
                open(&client, 1, 5).await?;
                Box::new(|client: TenantClient| {
                    tokio::spawn(async move { client.call("ticket.take", &ticket(1), json!({}), None).await })
                })
            }
        };
        clock.advance(Duration::from_secs(7_200));
        let other = client.clone();
        paused.before(table, 1, async move { drop(call(other).await) });
        while !paused.is_over() {
            slow.work_of(table.trim_end_matches('s')).await?;
            pause().await;
        }
    }
    client.shows("order", &order("o1"), &json!({"state": "PAID", "seq": 2})).await?;
    client.shows("ticket", &ticket(1), &json!({"state": "open.taken", "seq": 2})).await?;
    // Given back, it is in the state of the timer again, whose time has not come.
    open(&client, 2, 5).await?;
    clock.advance(Duration::from_secs(3_600));
    let other = client.clone();
    paused.before("tickets", 1, async move {
        drop(other.call("ticket.take", &ticket(2), json!({}), None).await);
        drop(other.call("ticket.give", &ticket(2), json!({}), None).await);
    });
    while !paused.is_over() {
        slow.work_of("ticket").await?;
        pause().await;
    }
    client
        .shows("ticket", &ticket(2), &json!({"state": "open.new", "seq": 3, "last_transition": "give"}))
        .await
}

pub(super) async fn a_worker_whose_clock_is_ahead_fires_nothing_early(
    namespace: &dyn TestNamespace,
) -> Result<()> {
    let engine = standing();
    let skewed = SkewedClock::over(Arc::new(engine.clone()));
    skewed.skew(7_200_000_000);
    let store = namespace.open_at(Arc::new(engine.clone())).await?;
    let client = over(store, Arc::new(skewed.clone())).await?;
    open(&client, 1, 5).await?;
    place(&client, "o1", 5).await?;
    same("two hours ahead", &client.drain_workers().await?, &0)?;
    skewed.skew(0);
    engine.advance(Duration::from_secs(3_600));
    same("the ticket", &client.work_of("ticket").await?, &1)?;
    same("the order", &client.work_of("order").await?, &1)
}

/// The worker has found what is due; before it writes, the row goes to another state with a timer, or has another number.
pub(super) async fn a_timer_that_was_found_before_a_change_is_judged_again(
    namespace: &dyn TestNamespace,
) -> Result<()> {
    let clock = standing();
    let store = namespace.open_at(Arc::new(clock.clone())).await?;
    let client = over(store.clone(), Arc::new(clock.clone())).await?;
    let paused = Arc::new(Paused::default());
    let slow = over(Arc::new(StoreProxy::new(store, paused.clone())), Arc::new(clock.clone())).await?;
    let work = async || {
        while !paused.is_over() {
            slow.work_of("ticket").await?;
            pause().await;
        }
        client.work_of("ticket").await
    };
    open(&client, 1, 5).await?;
    clock.advance(Duration::from_secs(3_600));
    let (other, later) = (client.clone(), clock.clone());
    paused.before("tickets", 1, async move {
        drop(other.call("ticket.park", &ticket(1), json!({}), None).await);
        later.advance(Duration::from_secs(60));
    });
    work().await?;
    let unparked = json!({"state": "open.taken", "seq": 3, "last_transition": "unpark"});
    client.shows("ticket", &ticket(1), &unparked).await?;
    open(&client, 2, 5).await?;
    client.done("ticket.park", &ticket(2), json!({}), None).await?;
    clock.advance(Duration::from_secs(60));
    let other = client.clone();
    paused.before("tickets", 1, async move {
        drop(other.call("ticket.note", &ticket(2), json!({}), None).await);
    });
    work().await?;
    let unparked = json!({"state": "open.taken", "seq": 4, "last_transition": "unpark"});
    client.shows("ticket", &ticket(2), &unparked).await?;
    let sent = client.done("receipt.read", &["ticket:2:4".into()], json!({}), None).await?;
    shows(&sent, &json!({"body": {"unparked": 2}}))
}
