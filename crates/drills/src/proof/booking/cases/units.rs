//! Units that are edited, retired, restored and deleted, beside buyers who want them.

use std::collections::BTreeSet;

use anyhow::{Result, ensure};
use serde_json::{Value as Json, json};
use statehouse::{Answer, Code};
use statehouse_store::Plan;

use super::{LOOKS_MAX, check_rows, gala, hold, id, lease_of, leased_gala, offer, seat, wanted};
use crate::harness::engines::TestNamespace;
use crate::harness::store_client::{pause, same};
use crate::harness::tenant_client::{TenantClient, shows};

async fn change(client: &TenantClient, action: &str, number: i64) -> Result<Answer> {
    let input = if action == "patch" { json!({"price": 70}) } else { json!({}) };
    client.done(&format!("seat.{action}"), &seat(number), input, None).await
}

/// A call of each action that is refused for this reason.
async fn unchanged(client: &TenantClient, number: i64, code: Code) -> Result<()> {
    for (action, input) in [("patch", json!({"price": 1})), ("retire", json!({})), ("delete", json!({}))] {
        client.refused(&format!("seat.{action}"), &seat(number), input, None, code).await?;
    }
    Ok(())
}

/// The plans of all changes of a unit, as drafted now.
async fn drafts(client: &TenantClient, number: i64) -> Result<Vec<Plan>> {
    let mut plans = Vec::new();
    for (action, input) in [("patch", json!({"price": 1})), ("retire", json!({})), ("delete", json!({}))] {
        plans.push(client.drafted(&format!("seat.{action}"), &seat(number), input, None).await?);
    }
    Ok(plans)
}

fn best(booking: &str, count: u64) -> Json {
    json!({"booking_id": booking, "event_id": "gala", "count": count, "holder": "bob"})
}

pub(super) async fn units_are_edited_retired_and_deleted(namespace: &dyn TestNamespace) -> Result<()> {
    let (client, _) = gala(namespace, 3).await?;
    let patched = change(&client, "patch", 1).await?;
    shows(&patched, &json!({"price": 70, "state": "AVAILABLE", "version": 2}))?;
    let cleared = client.done("seat.patch", &seat(1), json!({"price": null}), Some(2)).await?;
    shows(&cleared, &json!({"price": null, "version": 3}))?;
    client.refused("seat.patch", &seat(1), json!({"price": 1}), Some(2), Code::VersionConflict).await?;
    for nonsense in [json!({"price": "much"}), json!({"state": "SOLD"}), json!({"booking_id": "b1"})] {
        client.refused("seat.patch", &seat(1), nonsense, None, Code::InvalidInput).await?;
    }
    shows(&change(&client, "retire", 2).await?, &json!({"state": "RETIRED", "version": 2}))?;
    client.refused("seat.retire", &seat(2), json!({}), None, Code::WrongState).await?;
    let refusal =
        client.refused("seat_booking.hold", &[], wanted("b1", &[2]), None, Code::WrongState).await?;
    ensure!(refusal.message.contains("RETIRED"), "{refusal}");
    let input = json!({"event_id": "gala", "state": "RETIRED"});
    let listed = client.done("seat.list", &[], input, None).await?;
    same("retired seats", &listed.body.as_array().map(Vec::len), &Some(1))?;
    // Nothing but the two others is chosen.
    client.refused("seat_booking.hold", &[], best("b1", 3), None, Code::Held).await?;
    let held = client.done("seat_booking.hold", &[], best("b1", 2), None).await?;
    same("what was chosen", &held.body["units"], &json!([1, 3]))?;
    // A retired unit can be edited, restored and deleted.
    shows(&change(&client, "patch", 2).await?, &json!({"price": 70, "state": "RETIRED"}))?;
    shows(&change(&client, "restore", 2).await?, &json!({"state": "AVAILABLE", "price": 70}))?;
    client.refused("seat.restore", &seat(2), json!({}), None, Code::WrongState).await?;
    change(&client, "retire", 2).await?;
    change(&client, "delete", 2).await?;
    client.refused("seat.read", &seat(2), json!({}), None, Code::NotFound).await?;
    unchanged(&client, 2, Code::NotFound).await?;
    client.refused("seat.restore", &seat(2), json!({}), None, Code::NotFound).await?;
    client.refused("seat_booking.hold", &[], wanted("b2", &[2]), None, Code::NotFound).await?;
    // Its number is free for a new one.
    client.done("seat.create", &[], json!({"event_id": "gala", "seat_no": 2}), None).await?;
    hold(&client, "b2", &[2]).await?;
    check_rows(&client).await
}

pub(super) async fn a_unit_that_is_held_or_sold_is_not_changed(namespace: &dyn TestNamespace) -> Result<()> {
    let (client, clock) = gala(namespace, 2).await?;
    let drafted = drafts(&client, 1).await?;
    let taken = client.drafted("seat_booking.hold", &[], wanted("b9", &[2]), None).await?;
    hold(&client, "b1", &[1]).await?;
    for plan in &drafted {
        client.too_late(plan).await?;
    }
    unchanged(&client, 1, Code::Held).await?;
    client.refused("seat.restore", &seat(1), json!({}), None, Code::WrongState).await?;
    // It is over, and the server has not freed it yet.
    clock.advance(super::MINUTE * 10);
    let refusal = client.refused("seat.retire", &seat(1), json!({}), None, Code::Held).await?;
    ensure!(refusal.message.contains("b1"), "{refusal}");
    client.drain_workers().await?;
    shows(&change(&client, "patch", 1).await?, &json!({"price": 70, "booking_id": null}))?;
    hold(&client, "b2", &[1]).await?;
    client.done("seat_booking.confirm", &id("b2"), json!({}), None).await?;
    unchanged(&client, 1, Code::WrongState).await?;
    client.refused("seat.restore", &seat(1), json!({}), None, Code::WrongState).await?;
    // What was seen as free was retired meanwhile, and then deleted.
    change(&client, "retire", 2).await?;
    client.too_late(&taken).await?;
    let restore = client.drafted("seat.restore", &seat(2), json!({}), None).await?;
    change(&client, "delete", 2).await?;
    client.too_late(&taken).await?;
    client.too_late(&restore).await?;
    check_rows(&client).await
}

pub(super) async fn retiring_and_holding_have_one_winner(namespace: &dyn TestNamespace) -> Result<()> {
    let client = TenantClient::open(namespace, super::BLUEPRINT).await?;
    offer(&client, 8).await?;
    for number in 1..=8 {
        let action = if number % 2 == 0 { "seat.retire" } else { "seat.delete" };
        let gone = client.start(action, &seat(number), json!({}), None);
        let held = client.start("seat_booking.hold", &[], wanted(&format!("b{number}"), &[number]), None);
        let (gone, held) = (gone.await?, held.await?);
        ensure!(gone.is_ok() != held.is_ok(), "seat {number}: {gone:?} and {held:?}");
    }
    check_rows(&client).await
}

pub(super) async fn a_view_follows_units_that_come_and_go(namespace: &dyn TestNamespace) -> Result<()> {
    let text = format!(
        "{}\n[view.free]\nof = \"seat\"\ngroup_by = [\"state\"]\ncount = true\nsum = [\"price\"]\n",
        super::BLUEPRINT
    );
    let client = TenantClient::open(namespace, &text).await?;
    offer(&client, 4).await?;
    change(&client, "patch", 1).await?;
    change(&client, "retire", 2).await?;
    change(&client, "delete", 3).await?;
    hold(&client, "b1", &[4]).await?;
    let expected: BTreeSet<String> = [("AVAILABLE", 70), ("RETIRED", 50), ("HELD", 50)]
        .map(|(state, sum)| format!("{state} 1 {sum}"))
        .into();
    let mut found = BTreeSet::new();
    for _ in 0..LOOKS_MAX {
        client.drain_workers().await?;
        let page = client.done("free.list", &[], json!({}), None).await?;
        let groups = page.body.as_array().into_iter().flatten();
        let text = |group: &Json| {
            format!(
                "{} {} {}",
                group["state"].as_str().unwrap_or_default(),
                group["count"],
                group["sum_price"]
            )
        };
        found = groups.map(text).collect();
        if found == expected {
            return Ok(());
        }
        pause().await;
    }
    same("the view of the seats", &found, &expected)
}

pub(super) async fn a_leased_unit_is_not_changed_while_it_is_held(
    namespace: &dyn TestNamespace,
) -> Result<()> {
    let (client, holds) = leased_gala(namespace, 3, "10m").await?;
    hold(&client, "b1", &[1]).await?;
    unchanged(&client, 1, Code::Held).await?;
    let stored = client.store_client()?.row(client.table("seats")?, seat(1)).await?;
    same("the stored version", &stored.version(), &1)?;
    client.done("seat_booking.cancel", &id("b1"), json!({}), None).await?;
    shows(&change(&client, "patch", 1).await?, &json!({"price": 70}))?;
    // While a unit is retired no buyer gets a lease on it, also if the answer is late.
    let retired = client.call_as("op-1", "seat.retire", &seat(1), json!({}), None).await?;
    client.refused("seat_booking.hold", &[], wanted("b2", &[1]), None, Code::Held).await?;
    let again = client.call_as("op-1", "seat.retire", &seat(1), json!({}), None).await?;
    same("the answer of a retry", &again.body, &retired.body)?;
    client.shows("seat", &seat(1), &json!({"state": "RETIRED", "booking_id": null})).await?;
    holds.release(&[lease_of(1)], statehouse::product::booking::UNIT_CHANGE).await?;
    client.refused("seat_booking.hold", &[], wanted("b2", &[1]), None, Code::WrongState).await?;
    same("the lease that was given back", &holds.read_holds(&[lease_of(1)]).await?, &vec![None])?;
    change(&client, "retire", 2).await?;
    change(&client, "restore", 2).await?;
    hold(&client, "b3", &[2]).await?;
    change(&client, "delete", 1).await?;
    client.refused("seat_booking.hold", &[], wanted("b2", &[1]), None, Code::NotFound).await?;
    client.done("seat_booking.confirm", &id("b3"), json!({}), None).await?;
    unchanged(&client, 2, Code::Held).await?;
    holds.release(&[lease_of(2)], "b3").await?;
    unchanged(&client, 2, Code::WrongState).await?;
    let held = client.done("seat_booking.hold", &[], best("b4", 1), None).await?;
    same("what is left", &held.body["units"], &json!([3]))
}

pub(super) async fn a_unit_held_from_before_leases_can_be_retired(
    namespace: &dyn TestNamespace,
) -> Result<()> {
    use statehouse_store::Step;
    use statehouse_store::guard::{now, now_plus};
    let (client, _) = leased_gala(namespace, 4, "10m").await?;
    let (store_client, seats) = (client.store_client()?, client.table("seats")?.clone());
    for (number, until) in [(1, now()), (2, now()), (3, now()), (4, now_plus(super::MINUTE))] {
        let held = Step::update(&seats, seat(number)).set("state", "HELD").set("booking_id", "old");
        store_client.apply(store_client.one(held.set("hold_expires_at", until))).await?;
    }
    shows(&change(&client, "retire", 1).await?, &json!({"state": "RETIRED", "booking_id": null}))?;
    change(&client, "delete", 2).await?;
    change(&client, "patch", 3).await?;
    unchanged(&client, 4, Code::Held).await?;
    // A sale that was drafted before is refused.
    hold(&client, "b3", &[3]).await?;
    let confirm = client.drafted("seat_booking.confirm", &id("b3"), json!({}), None).await?;
    let retired = Step::update(&seats, seat(3))
        .set("state", "RETIRED")
        .set("booking_id", statehouse_store::Value::Null);
    store_client.apply(store_client.one(retired)).await?;
    client.too_late(&confirm).await?;
    let refusal =
        client.refused("seat_booking.confirm", &id("b3"), json!({}), None, Code::WrongState).await?;
    ensure!(refusal.message.contains("retired"), "{refusal}");
    Ok(())
}
