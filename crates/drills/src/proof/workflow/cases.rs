//! A04 Workflow: rows go where the definition leads, once, with their history, effects and jobs.

mod definitions;
mod timers;

use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use serde_json::{Value as Json, json};
use statehouse::allow::Principal;
use statehouse::{Answer, Code, Operation};
use statehouse_store::{Clock, ManualClock, Store, Time, Value};

use self::definitions::{
    a_server_moves_no_rows, a_state_without_a_timer_fires_nothing, rows_in_removed_states_are_counted,
    rows_in_removed_states_are_moved,
};
use self::timers::{
    a_caller_and_a_timer_contend_on_one_row, a_timer_begins_anew_with_its_state, a_timer_ends_with_its_state,
    a_timer_fires_once_and_not_early, a_timer_that_was_found_before_a_change_is_judged_again,
    a_worker_whose_clock_is_ahead_fires_nothing_early,
};
use super::cases as workflow;
use crate::conformance::{Case, cases};
use crate::harness::case_check::skip_invariants;
use crate::harness::engines::TestNamespace;
use crate::harness::proxy::{Paused, StoreProxy};
use crate::harness::store_client::{pause, same};
use crate::harness::tenant_client::{TenantClient, shows};

pub(crate) const CASES: &[Case] = cases! {
    workflow {
        an_order_lives_its_life(7),
        the_history_says_who_did_what_and_why(7),
        transitions_begin_only_with_their_states(7),
        conditions_are_judged_by_the_engine(7),
        fields_are_set_by_transitions(7),
        a_key_of_an_order_is_started_once(4),
        effects_and_jobs_are_parts_of_the_transition(7),
        a_transition_between_reading_and_writing_is_noticed(7),
        a_transition_that_reads_nothing_is_judged_by_the_engine(7),
        callers_of_one_row_take_turns(7),
        a_timer_fires_once_and_not_early(7),
        a_timer_ends_with_its_state(7),
        a_timer_begins_anew_with_its_state(4),
        a_caller_and_a_timer_contend_on_one_row(7),
        a_worker_whose_clock_is_ahead_fires_nothing_early(4),
        a_timer_that_was_found_before_a_change_is_judged_again(7),
        sub_states_and_stars_stand_for_states(7),
        what_can_be_done_is_told(7),
        rows_are_listed_by_state(4),
        several_orders_change_in_one_plan(12),
        a_read_names_the_states_to_wait_for(7),
        bad_input_changes_nothing(4),
        effects_and_jobs_of_others_are_not_overwritten(7),
        rows_in_removed_states_are_counted(7),
        rows_in_removed_states_are_moved(7),
        a_server_moves_no_rows(7),
        a_state_without_a_timer_fires_nothing(4),
    }
};

pub(crate) const BLUEPRINT: &str = r#"
[house]
name = "drill"

[effect.receipt]
url = "https://mail.example/send"

[schedule.label]

[workflow.order]
key     = { order_id = "text" }
fields  = { customer = "text", total = "int", payment = "text?" }
initial = "PLACED"
final   = ["DELIVERED", "CANCELLED"]
shards  = 3
[workflow.order.on]
pay     = { from = "PLACED", to = "PAID", set = ["payment"], send = { receipt = { to = "{customer}", text = "paid {total} by {payment}", order = "{key}", n = "{seq}" } } }
ship    = { from = "PAID", to = "SHIPPED", enqueue = { label = { order = "{order_id}", state = "{state}" } } }
deliver = { from = "SHIPPED", to = "DELIVERED" }
cancel  = { from = ["PLACED", "PAID"], to = "CANCELLED", if = "total < 100000" }
refund  = { from = "PAID", to = "CANCELLED", if = "payment = input.payment", set = ["payment?"], send = { receipt = { why = "{reason}" } }, enqueue = { label = { refund = "{payment}" } } }
address = { from = ["PLACED", "PAID"], set = ["customer"] }
expire  = { from = "PLACED", to = "CANCELLED", after = "30m", send = { receipt = { expired = "{order_id}" } } }

[workflow.ticket]
key     = { id = "int" }
fields  = { priority = "int", closed_by = "text?" }
history = "log"
initial = "open.new"
final   = ["closed"]
shards  = 2
[workflow.ticket.on]
take     = { from = "open.new", to = "open.taken" }
give     = { from = "open.taken", to = "open.new" }
escalate = { from = "open.new", to = "open.new", after = "1h" }
drop     = { from = "open.*", to = "closed", if = "priority > 0" }
close    = { from = "open.*", to = "closed", set = ["closed_by"], send = { receipt = { closed = "{id}" } } }
reopen   = { from = "closed", to = "open.taken" }
park     = { from = "*", to = "parked" }
note     = { from = "*" }
unpark   = { from = "parked", to = "open.taken", after = "1m", send = { receipt = { unparked = "{id}" } } }
back     = { from = "parked", to = "open.new" }
"#;

fn standing() -> ManualClock {
    ManualClock::at(Time::from_millis(1_800_000_000_000))
}

fn order(id: &str) -> [Value; 1] {
    [id.into()]
}

fn ticket(id: i64) -> [Value; 1] {
    [id.into()]
}

async fn place(client: &TenantClient, id: &str, total: i64) -> Result<Answer> {
    let input = json!({"order_id": id, "customer": "ann", "total": total});
    client.done("order.start", &[], input, None).await
}

async fn open(client: &TenantClient, id: i64, priority: i64) -> Result<Answer> {
    client.done("ticket.start", &[], json!({"id": id, "priority": priority}), None).await
}

async fn pay(client: &TenantClient, id: &str) -> Result<Answer> {
    client.done("order.pay", &order(id), json!({"payment": "card"}), None).await
}

async fn at(namespace: &dyn TestNamespace, clock: &ManualClock) -> Result<TenantClient> {
    let clock: Arc<dyn Clock> = Arc::new(clock.clone());
    over(namespace.open_at(clock.clone()).await?, clock).await
}

async fn over(store: Arc<dyn Store>, clock: Arc<dyn Clock>) -> Result<TenantClient> {
    TenantClient::over(store, BLUEPRINT, clock).await
}

/// The history of an order, with these columns.
async fn history(client: &TenantClient, id: &str, names: &[&str]) -> Result<Vec<Vec<Json>>> {
    let answer = client.done("order.history", &order(id), json!({}), None).await?;
    let entries = answer.body["history"].as_array().context("no history")?.clone();
    Ok(entries.iter().map(|entry| names.iter().map(|name| entry[*name].clone()).collect()).collect())
}

async fn an_order_lives_its_life(namespace: &dyn TestNamespace) -> Result<()> {
    let client = TenantClient::open(namespace, BLUEPRINT).await?;
    client.refused("order.read", &order("o1"), json!({}), None, Code::NotFound).await?;
    client.refused("order.ship", &order("o1"), json!({}), None, Code::NotFound).await?;
    client.refused("ticket.take", &ticket(1), json!({}), None, Code::NotFound).await?;
    client.refused("order.history", &order("o1"), json!({}), None, Code::NotFound).await?;
    let placed = place(&client, "o1", 500).await?;
    same("the key", &placed.created.as_deref(), &Some("o1"))?;
    let new = json!({"state": "PLACED", "seq": 1, "payment": null, "last_transition": "start", "version": 1});
    shows(&placed, &new)?;
    shows(
        &pay(&client, "o1").await?,
        &json!({"state": "PAID", "seq": 2, "payment": "card", "due_at": null}),
    )?;
    client.done("order.ship", &order("o1"), json!({}), Some(2)).await?;
    let delivered = client.done("order.deliver", &order("o1"), json!({}), None).await?;
    shows(&delivered, &json!({"state": "DELIVERED", "seq": 4, "last_transition": "deliver", "version": 4}))?;
    client
        .shows("order", &order("o1"), &json!({"state": "DELIVERED", "customer": "ann", "total": 500}))
        .await?;
    let records = client.store_client()?.log(4).await?;
    let told = |name: &str| records.iter().flat_map(|record| &record.events).any(|event| event.name == name);
    for event in
        ["order.started", "order.pay", "order.ship", "order.deliver", "receipt.pending", "label.enqueued"]
    {
        ensure!(told(event), "the log has no {event}");
    }
    Ok(())
}

async fn the_history_says_who_did_what_and_why(namespace: &dyn TestNamespace) -> Result<()> {
    let clock = standing();
    let client = at(namespace, &clock).await?;
    place(&client, "o1", 500).await?;
    let started = clock.now().to_string();
    clock.advance(Duration::from_secs(60));
    let request = TenantClient::request(
        "order.pay",
        &order("o1"),
        &json!({"payment": "card", "reason": "at the till"}),
        None,
    );
    let operation = Operation::under("payment-1", &request);
    let ann = Principal { tenant: client.tenant.clone(), claims: None, actor: Some("key:ann".into()) };
    let paid = client.house.call(ann, request, operation).await?;
    shows(&paid, &json!({"last_by": "key:ann", "last_operation": "payment-1"}))?;
    let names = ["seq", "transition", "from", "to", "by", "reason", "at"];
    let entries = history(&client, "o1", &names).await?;
    let paid_at = clock.now().to_string();
    let expected = [
        vec![
            json!(1),
            json!("start"),
            json!(null),
            json!("PLACED"),
            json!(null),
            json!(null),
            json!(started),
        ],
        vec![
            json!(2),
            json!("pay"),
            json!("PLACED"),
            json!("PAID"),
            json!("key:ann"),
            json!("at the till"),
            json!(paid_at),
        ],
    ];
    same("the history", &entries, &expected.to_vec())?;
    // Page by page.
    let key = order("o1");
    let first = client.done("order.history", &key, json!({"limit": 1}), None).await?;
    same("where it goes on", &first.body["next"], &json!(1))?;
    let second = client.done("order.history", &key, json!({"limit": 1, "after_seq": 1}), None).await?;
    same("the second page", &second.body["history"][0]["transition"], &json!("pay"))?;
    let records = client.store_client()?.log(2).await?;
    let event =
        &records.iter().find(|record| record.events[0].name == "order.pay").context("no event")?.events[0];
    let told = (&event.data["from"], &event.data["reason"], &event.data["row"]["state"]);
    same("the event", &told, &(&json!("PLACED"), &json!("at the till"), &json!("PAID")))
}

async fn transitions_begin_only_with_their_states(namespace: &dyn TestNamespace) -> Result<()> {
    let client = TenantClient::open(namespace, BLUEPRINT).await?;
    place(&client, "o1", 500).await?;
    for transition in ["ship", "deliver", "refund"] {
        let action = format!("order.{transition}");
        let refusal = client.refused(&action, &order("o1"), json!({}), None, Code::WrongState).await?;
        ensure!(refusal.message.contains("order o1 is PLACED since"), "{refusal}");
        ensure!(refusal.message.contains("by `start`"), "{refusal}");
    }
    pay(&client, "o1").await?;
    let again = json!({"payment": "cash"});
    client.refused("order.pay", &order("o1"), again, None, Code::WrongState).await?;
    client.shows("order", &order("o1"), &json!({"state": "PAID", "payment": "card", "version": 2})).await?;
    client.refused("order.ship", &order("o1"), json!({}), Some(1), Code::VersionConflict).await?;
    open(&client, 1, 5).await?;
    client.refused("ticket.give", &ticket(1), json!({}), None, Code::WrongState).await?;
    client.refused("ticket.reopen", &ticket(1), json!({}), None, Code::WrongState).await?;
    client.refused("ticket.take", &ticket(1), json!({}), Some(9), Code::VersionConflict).await?;
    client.shows("ticket", &ticket(1), &json!({"state": "open.new", "version": 1})).await
}

async fn conditions_are_judged_by_the_engine(namespace: &dyn TestNamespace) -> Result<()> {
    let client = TenantClient::open(namespace, BLUEPRINT).await?;
    place(&client, "dear", 100_000).await?;
    let refusal =
        client.refused("order.cancel", &order("dear"), json!({}), None, Code::ConditionFailed).await?;
    ensure!(refusal.message.contains("total < 100000"), "{refusal}");
    place(&client, "cheap", 99_999).await?;
    let cancelled = client.done("order.cancel", &order("cheap"), json!({}), None).await?;
    shows(&cancelled, &json!({"state": "CANCELLED"}))?;
    // A condition on what the caller gives.
    pay(&client, "dear").await?;
    for payment in [json!({"payment": "cash"}), json!({})] {
        client.refused("order.refund", &order("dear"), payment, None, Code::ConditionFailed).await?;
    }
    client.done("order.refund", &order("dear"), json!({"payment": "card"}), None).await?;
    // Nothing is read before this one.
    for (id, priority) in [(1, 0), (2, 1)] {
        open(&client, id, priority).await?;
    }
    client.refused("ticket.drop", &ticket(1), json!({}), None, Code::ConditionFailed).await?;
    client.done("ticket.drop", &ticket(2), json!({}), None).await?;
    client.shows("ticket", &ticket(1), &json!({"state": "open.new", "version": 1})).await
}

async fn fields_are_set_by_transitions(namespace: &dyn TestNamespace) -> Result<()> {
    let client = TenantClient::open(namespace, BLUEPRINT).await?;
    place(&client, "o1", 500).await?;
    client.refused("order.pay", &order("o1"), json!({}), None, Code::InvalidInput).await?;
    let moved = client.done("order.address", &order("o1"), json!({"customer": "bob"}), None).await?;
    shows(&moved, &json!({"state": "PLACED", "customer": "bob", "seq": 2, "last_transition": "address"}))?;
    let entries = history(&client, "o1", &["transition", "from", "to"]).await?;
    same("the history", &entries[1], &vec![json!("address"), json!("PLACED"), json!("PLACED")])?;
    pay(&client, "o1").await?;
    // A field that may be left out keeps what it has.
    client.refused("order.refund", &order("o1"), json!({"total": 1}), None, Code::InvalidInput).await?;
    client.shows("order", &order("o1"), &json!({"payment": "card", "total": 500})).await
}

async fn a_key_of_an_order_is_started_once(namespace: &dyn TestNamespace) -> Result<()> {
    let client = TenantClient::open(namespace, BLUEPRINT).await?;
    place(&client, "o1", 500).await?;
    let other = json!({"order_id": "o1", "customer": "bob", "total": 1});
    client.refused("order.start", &[], other, None, Code::AlreadyExists).await?;
    open(&client, 1, 1).await?;
    client.refused("ticket.start", &[], json!({"id": 1, "priority": 2}), None, Code::AlreadyExists).await?;
    client.shows("order", &order("o1"), &json!({"customer": "ann", "version": 1})).await?;
    let stranger = client.for_tenant("bond")?;
    place(&stranger, "o1", 7).await?;
    stranger.shows("order", &order("o1"), &json!({"total": 7})).await
}

async fn effects_and_jobs_are_parts_of_the_transition(namespace: &dyn TestNamespace) -> Result<()> {
    let client = TenantClient::open(namespace, BLUEPRINT).await?;
    place(&client, "o1", 500).await?;
    pay(&client, "o1").await?;
    let sent = client.done("receipt.read", &["order:o1:2".into()], json!({}), None).await?;
    let body = json!({"to": "ann", "text": "paid 500 by card", "order": "o1", "n": 2});
    shows(&sent, &json!({"status": "PENDING", "body": body}))?;
    client.done("order.ship", &order("o1"), json!({}), None).await?;
    let job = client.done("label.read", &["order:o1:3".into()], json!({}), None).await?;
    shows(&job, &json!({"state": "PENDING", "payload": {"order": "o1", "state": "SHIPPED"}}))?;
    // One transition may cause both.
    place(&client, "o2", 500).await?;
    pay(&client, "o2").await?;
    let why = json!({"payment": "card", "reason": "broken"});
    client.done("order.refund", &order("o2"), why, None).await?;
    let sent = client.done("receipt.read", &["order:o2:3".into()], json!({}), None).await?;
    shows(&sent, &json!({"body": {"why": "broken"}}))?;
    let job = client.done("label.read", &["order:o2:3".into()], json!({}), None).await?;
    shows(&job, &json!({"payload": {"refund": "card"}}))?;
    // A key that cannot stand in a header is still one effect.
    place(&client, "grün, 50 %", 5).await?;
    pay(&client, "grün, 50 %").await.map(drop)
}

async fn effects_and_jobs_of_others_are_not_overwritten(namespace: &dyn TestNamespace) -> Result<()> {
    skip_invariants("effects and jobs are made by hand under the keys of transitions");
    let clock = standing();
    let client = at(namespace, &clock).await?;
    for id in ["o1", "o2"] {
        place(&client, id, 500).await?;
        let sent = json!({"key": format!("order:{id}:2"), "body": "by hand"});
        client.done("receipt.send", &[], sent, None).await?;
    }
    let paid = json!({"payment": "card"});
    let refusal = client.refused("order.pay", &order("o1"), paid, None, Code::AlreadyExists).await?;
    ensure!(refusal.message.contains("receipt order:o1:2"), "{refusal}");
    clock.advance(Duration::from_secs(3_600));
    same("what is due", &client.work_of("order").await?, &0)?;
    for id in ["o1", "o2"] {
        client.shows("order", &order(id), &json!({"state": "PLACED", "version": 1})).await?;
        let key = [Value::from(format!("order:{id}:2"))];
        client.shows("receipt", &key, &json!({"body": "by hand"})).await?;
    }
    place(&client, "o3", 500).await?;
    pay(&client, "o3").await?;
    client.done("label.enqueue", &[], json!({"job_id": "order:o3:3", "payload": "by hand"}), None).await?;
    for (action, input) in [("ship", json!({})), ("refund", json!({"payment": "card"}))] {
        let action = format!("order.{action}");
        client.refused(&action, &order("o3"), input, None, Code::AlreadyExists).await?;
    }
    client.shows("order", &order("o3"), &json!({"state": "PAID", "version": 2})).await?;
    client.shows("label", &["order:o3:3".into()], &json!({"payload": "by hand"})).await
}

/// A caller reads the row, another one changes it, and the first one commits what it has prepared.
async fn a_transition_between_reading_and_writing_is_noticed(namespace: &dyn TestNamespace) -> Result<()> {
    let store = namespace.open().await?;
    let clock: Arc<dyn Clock> = Arc::new(statehouse_store::SystemClock);
    let client = over(store.clone(), clock.clone()).await?;
    let paused = Arc::new(Paused::default());
    let slow = over(Arc::new(StoreProxy::new(store, paused.clone())), clock).await?;
    open(&client, 1, 5).await?;
    let other = client.clone();
    paused.before("tickets", 1, async move {
        // If this fails, the ticket is closed.
        drop(other.call("ticket.drop", &ticket(1), json!({}), None).await);
    });
    let close = json!({"closed_by": "late"});
    slow.refused("ticket.close", &ticket(1), close.clone(), None, Code::WrongState).await?;
    client.shows("ticket", &ticket(1), &json!({"state": "closed", "closed_by": null, "seq": 2})).await?;
    // Changed to a state from which it may be done as well: it is prepared again, with the next number.
    open(&client, 2, 5).await?;
    let other = client.clone();
    paused.before("tickets", 1, async move {
        drop(other.call("ticket.take", &ticket(2), json!({}), None).await);
    });
    let closed = slow.done("ticket.close", &ticket(2), close, None).await?;
    shows(&closed, &json!({"state": "closed", "seq": 3}))?;
    client.refused("receipt.read", &["ticket:2:2".into()], json!({}), None, Code::NotFound).await?;
    client.done("receipt.read", &["ticket:2:3".into()], json!({}), None).await.map(drop)
}

async fn a_transition_that_reads_nothing_is_judged_by_the_engine(
    namespace: &dyn TestNamespace,
) -> Result<()> {
    let client = TenantClient::open(namespace, BLUEPRINT).await?;
    open(&client, 1, 5).await?;
    // Plans that were made before others were applied.
    let take = client.drafted("ticket.take", &ticket(1), json!({}), None).await?;
    let drop_it = client.drafted("ticket.drop", &ticket(1), json!({}), None).await?;
    let reopen = client.drafted("ticket.reopen", &ticket(1), json!({}), None).await?;
    client.too_late(&reopen).await?;
    client.done("ticket.drop", &ticket(1), json!({}), None).await?;
    client.too_late(&take).await?;
    client.too_late(&drop_it).await?;
    client.done("ticket.reopen", &ticket(1), json!({}), None).await?;
    client.done("ticket.give", &ticket(1), json!({}), None).await?;
    client
        .shows("ticket", &ticket(1), &json!({"state": "open.new", "seq": 4, "last_transition": "give"}))
        .await?;
    // Under a version.
    let take = client.drafted("ticket.take", &ticket(1), json!({}), Some(4.into())).await?;
    client.done("ticket.take", &ticket(1), json!({}), Some(4)).await?;
    client.done("ticket.give", &ticket(1), json!({}), Some(5)).await?;
    client.too_late(&take).await
}

async fn callers_of_one_row_take_turns(namespace: &dyn TestNamespace) -> Result<()> {
    let client = TenantClient::open(namespace, BLUEPRINT).await?;
    for round in 0..5 {
        let id = format!("o{round}");
        place(&client, &id, 500).await?;
        open(&client, round, 5).await?;
        let mut calls = Vec::new();
        for name in ["pay", "cancel", "address", "pay", "cancel", "address"] {
            let input = match name {
                "pay" => json!({"payment": "card"}),
                "address" => json!({"customer": "bob"}),
                _ => json!({}),
            };
            calls.push(client.start(&format!("order.{name}"), &order(&id), input, None));
        }
        for name in ["take", "give", "drop", "take", "park", "back"] {
            calls.push(client.start(&format!("ticket.{name}"), &ticket(round), json!({}), None));
        }
        for call in calls {
            if let Err(refusal) = call.await? {
                ensure!(refusal.code == Code::WrongState, "{refusal}");
            }
        }
    }
    Ok(())
}

async fn sub_states_and_stars_stand_for_states(namespace: &dyn TestNamespace) -> Result<()> {
    let client = TenantClient::open(namespace, BLUEPRINT).await?;
    for id in 1..=4 {
        open(&client, id, 5).await?;
    }
    client.done("ticket.take", &ticket(1), json!({}), None).await?;
    for id in [1, 2] {
        let closed = client.done("ticket.close", &ticket(id), json!({"closed_by": "ann"}), None).await?;
        shows(&closed, &json!({"state": "closed", "closed_by": "ann"}))?;
    }
    client.refused("ticket.park", &ticket(1), json!({}), None, Code::WrongState).await?;
    client.done("ticket.park", &ticket(3), json!({}), None).await?;
    client.refused("ticket.drop", &ticket(3), json!({}), None, Code::WrongState).await?;
    shows(&client.done("ticket.back", &ticket(3), json!({}), None).await?, &json!({"state": "open.new"}))?;
    let again = client.done("ticket.park", &ticket(4), json!({}), None).await?;
    shows(&again, &json!({"state": "parked"}))
}

async fn what_can_be_done_is_told(namespace: &dyn TestNamespace) -> Result<()> {
    let client = TenantClient::open(namespace, BLUEPRINT).await?;
    place(&client, "o1", 100_000).await?;
    let can = async |id: &str| client.done("order.can", &order(id), json!({}), None).await;
    let placed = can("o1").await?;
    let told: Vec<(Json, Json)> = placed.body["transitions"]
        .as_array()
        .context("no list")?
        .iter()
        .map(|one| (one["transition"].clone(), one["allowed"].clone()))
        .collect();
    let expected =
        vec![(json!("pay"), json!(true)), (json!("cancel"), json!(false)), (json!("address"), json!(true))];
    same("what can be done", &told, &expected)?;
    shows(&placed, &json!({"state": "PLACED", "version": 1}))?;
    same("the timer", &placed.body["timer"]["transition"], &json!("expire"))?;
    pay(&client, "o1").await?;
    let paid = can("o1").await?;
    let refund = paid.body["transitions"]
        .as_array()
        .and_then(|all| all.iter().find(|one| one["transition"] == json!("refund")).cloned());
    let refund = refund.context("a refund is not told")?;
    same("what depends on the caller", &refund["allowed"], &Json::Null)?;
    same("its condition", &refund["condition"], &json!("payment = input.payment"))?;
    same("no timer", &paid.body["timer"], &Json::Null)?;
    client.refused("order.can", &order("none"), json!({}), None, Code::NotFound).await.map(drop)
}

async fn rows_are_listed_by_state(namespace: &dyn TestNamespace) -> Result<()> {
    let clock = standing();
    let client = at(namespace, &clock).await?;
    for id in 1..=3 {
        open(&client, id, 5).await?;
        clock.advance(Duration::from_secs(1));
    }
    client.done("ticket.take", &ticket(2), json!({}), None).await?;
    for (input, expected) in [
        (json!({}), vec![3, 1]),
        (json!({"state": "open.taken"}), vec![2]),
        (json!({"state": "closed"}), vec![]),
    ] {
        for tries in 0.. {
            let list = client.done("ticket.list", &[], input.clone(), None).await?;
            let rows = list.body.as_array().context("no list")?;
            let found: Vec<i64> = rows.iter().filter_map(|row| row["id"].as_i64()).collect();
            if found == expected {
                break;
            }
            ensure!(tries < 1_000, "{input}: expected {expected:?}, got {found:?}");
            pause().await;
        }
    }
    let unknown = json!({"state": "shut"});
    client.refused("ticket.list", &[], unknown, None, Code::InvalidInput).await.map(drop)
}

async fn several_orders_change_in_one_plan(namespace: &dyn TestNamespace) -> Result<()> {
    let client = TenantClient::open(namespace, BLUEPRINT).await?;
    for id in ["o1", "o2"] {
        place(&client, id, 500).await?;
    }
    pay(&client, "o2").await?;
    let request = |action: &str, id: &str, input: Json| {
        TenantClient::request(&format!("order.{action}"), &order(id), &input, None)
    };
    let paid = json!({"payment": "card"});
    // One of them cannot be done, so that nothing is.
    let both = vec![request("pay", "o1", paid.clone()), request("deliver", "o2", json!({}))];
    let refused = client.house.batch(&client.tenant, both, Operation::default()).await;
    let refusal = refused.err().context("a batch was applied in part")?;
    same("the refusal", &(refusal.code, refusal.call), &(Code::WrongState, Some(1)))?;
    client.shows("order", &order("o1"), &json!({"state": "PLACED", "seq": 1})).await?;
    let both = vec![request("pay", "o1", paid), request("ship", "o2", json!({}))];
    let done = client.house.batch(&client.tenant, both, Operation::default()).await?;
    let states: Vec<&Json> = done.iter().map(|answer| &answer.body["state"]).collect();
    same("their states", &states, &vec![&json!("PAID"), &json!("SHIPPED")])
}

async fn a_read_names_the_states_to_wait_for(namespace: &dyn TestNamespace) -> Result<()> {
    let client = TenantClient::open(namespace, BLUEPRINT).await?;
    open(&client, 1, 5).await?;
    for until in ["closed", "open.*, closed", "*"] {
        let read = client.done("ticket.read", &ticket(1), json!({"until": until}), None).await?;
        shows(&read, &json!({"state": "open.new"}))?;
    }
    for until in ["shut", "closed,", "open", "close.*"] {
        let input = json!({"until": until});
        client.refused("ticket.read", &ticket(1), input, None, Code::InvalidInput).await?;
    }
    Ok(())
}

async fn bad_input_changes_nothing(namespace: &dyn TestNamespace) -> Result<()> {
    let client = TenantClient::open(namespace, BLUEPRINT).await?;
    for input in [
        json!({}),
        json!({"order_id": "o1", "total": 1}),
        json!({"order_id": "o1", "customer": "ann", "total": "many"}),
        json!({"order_id": "o1", "customer": "ann", "total": 1, "state": "PAID"}),
        json!({"order_id": "o1", "customer": "ann", "total": 1, "reason": "x".repeat(3_000)}),
    ] {
        client.refused("order.start", &[], input, None, Code::InvalidInput).await?;
    }
    client.refused("order.read", &order("o1"), json!({}), None, Code::NotFound).await?;
    place(&client, "o1", 1).await?;
    for input in [
        json!({"payment": 7}),
        json!({"payment": "card", "total": 0}),
        json!({"payment": "card", "reason": 7}),
        json!({"payment": "card", "reason": "x".repeat(3_000)}),
    ] {
        client.refused("order.pay", &order("o1"), input, None, Code::InvalidInput).await?;
    }
    client.shows("order", &order("o1"), &json!({"version": 1, "payment": null})).await
}
