//! A08 Time-bounded exclusive allocation: what each action does and refuses, and what many buyers at once may not break.

mod overdue;
mod units;

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use serde_json::{Value as Json, json};
use statehouse::house::subject_of;
use statehouse::product::booking::external_holds::{ExternalHold, ExternalHolds};
use statehouse::{Answer, Blueprint, Code, House, Refusal};
use statehouse_store::clock::SkewedClock;
use statehouse_store::guard::{now, now_plus};
use statehouse_store::{
    Clock, Commit, Ids, ManualClock, Migrate, OperationStatus, Plan, Random, Scan, Step, SystemClock, Tenant,
    Time, Value,
};
use tokio::task::JoinHandle;

use self::overdue::*;
use self::units::*;
use super::{cases as booking, invariants};
use crate::conformance::{Case, cases};
use crate::harness::case_check::skip_invariants;
use crate::harness::engines::TestNamespace;
use crate::harness::proxy::{Meanwhile, StoreProxy};
use crate::harness::store_client::{pause, same, whole_log};
use crate::harness::tenant_client::{TenantClient, shows};

pub(crate) const CASES: &[Case] = cases! {
    booking {
        a_unit_is_held_confirmed_and_sold(5),
        a_second_buyer_is_rejected(5),
        a_hold_is_all_or_nothing(5),
        a_retry_gets_its_own_hold(5),
        a_hold_that_is_over_reads_as_free(5),
        a_hold_that_is_over_can_be_taken(8),
        a_booking_has_one_name_in_the_log(5),
        no_confirmation_after_the_end(5),
        a_clock_that_steps_sells_nothing_twice(5),
        extensions_are_bounded(5),
        cancelling_frees_the_units(5),
        the_sweeper_frees_what_is_over(5),
        confirm_and_sweep_have_one_winner(5),
        cancel_and_confirm_have_one_winner(5),
        the_best_units_are_side_by_side(5),
        many_buyers_never_share_a_unit(6),
        bookings_are_listed_by_holder(5),
        bookings_of_tenants_are_apart(5),
        what_was_bought_is_not_swept(5),
        a_booking_that_was_extended_meanwhile_is_not_swept(5),
        a_hold_that_is_over_is_taken_once(8),
        rows_that_do_not_agree_are_not_made_worse(8),
        a_unit_that_is_gone_is_not_made_up(8),
        a_leased_unit_is_held_confirmed_and_sold(5),
        leased_holds_are_all_or_nothing_and_end(5),
        leases_are_extended_within_bounds(5),
        a_lost_lease_sells_nothing_twice(5),
        holds_from_before_they_were_leases_end(5),
        a_leased_booking_is_refunded_whole(5),
        many_buyers_with_leases_never_share_a_unit(5),
        units_are_edited_retired_and_deleted(5),
        a_unit_that_is_held_or_sold_is_not_changed(5),
        retiring_and_holding_have_one_winner(5),
        a_view_follows_units_that_come_and_go(9),
        a_leased_unit_is_not_changed_while_it_is_held(5),
        a_unit_held_from_before_leases_can_be_retired(5),
        an_overdue_booking_keeps_its_units(6),
        what_is_up_can_be_given_back_before_it_is_marked(5),
        marking_and_giving_back_go_one_way(5),
        the_way_bookings_end_can_be_changed(6),
        an_overdue_booking_starts_a_reaction(9),
        a_holder_has_any_type(5),
        settings_that_contradict_each_other_are_refused(1),
    }
};

pub(crate) const BLUEPRINT: &str = r#"
[house]
name = "drill"

[booking.seat]
key       = { event_id = "text", seat_no = "int" }
fields    = { price = "int?" }
details   = { email = "text?" }
hold_for  = "10m"
hold_max  = "20m"
units_max = 4
shards    = 2
"#;

/// How often an index is looked at before it counts as wrong.
const LOOKS_MAX: usize = 100;
const MINUTE: Duration = Duration::from_secs(60);

/// A house with so many seats of the gala, on a clock that stands until it is moved.
async fn gala(namespace: &dyn TestNamespace, seats: i64) -> Result<(TenantClient, Arc<ManualClock>)> {
    let clock = Arc::new(ManualClock::at(Time::from_millis(1_800_000_000_000)));
    let client = TenantClient::open_at(namespace, BLUEPRINT, clock.clone()).await?;
    offer(&client, seats).await?;
    Ok((client, clock))
}

async fn offer(client: &TenantClient, seats: i64) -> Result<()> {
    for seat in 1..=seats {
        let input = json!({"event_id": "gala", "seat_no": seat, "price": 50});
        client.done("seat.create", &[], input, None).await?;
    }
    Ok(())
}

fn seat(number: i64) -> [Value; 2] {
    ["gala".into(), number.into()]
}

fn wanted(booking: &str, seats: &[i64]) -> Json {
    json!({"booking_id": booking, "event_id": "gala", "seat_no": seats, "holder": "ann"})
}

async fn hold(client: &TenantClient, booking: &str, seats: &[i64]) -> Result<Answer> {
    client.done("seat_booking.hold", &[], wanted(booking, seats), None).await
}

fn id(booking: &str) -> [Value; 1] {
    [booking.into()]
}

async fn check_rows(client: &TenantClient) -> Result<()> {
    invariants::check(&client.scope("seat")).await
}

async fn a_unit_is_held_confirmed_and_sold(namespace: &dyn TestNamespace) -> Result<()> {
    let (client, _) = gala(namespace, 3).await?;
    client
        .refused("seat.create", &[], json!({"event_id": "gala", "seat_no": 1}), None, Code::AlreadyExists)
        .await?;
    let held = hold(&client, "b1", &[1, 2]).await?;
    same("the key", &held.created.as_deref(), &Some("b1"))?;
    shows(&held, &json!({"state": "IN_PROGRESS", "units": [1, 2], "holder": "ann", "version": 1}))?;
    client.shows("seat", &seat(1), &json!({"state": "HELD", "booking_id": "b1", "price": 50})).await?;
    client.shows("seat", &seat(3), &json!({"state": "AVAILABLE", "booking_id": null})).await?;
    let confirmed = client.done("seat_booking.confirm", &id("b1"), json!({}), None).await?;
    shows(&confirmed, &json!({"state": "CONFIRMED", "version": 2, "due_at": null}))?;
    client
        .shows("seat", &seat(2), &json!({"state": "SOLD", "booking_id": "b1", "hold_expires_at": null}))
        .await?;
    for action in ["confirm", "extend", "cancel", "expire"] {
        let action = format!("seat_booking.{action}");
        client.refused(&action, &id("b1"), json!({}), None, Code::WrongState).await?;
        client.refused(&action, &id("nobody"), json!({}), None, Code::NotFound).await?;
    }
    check_rows(&client).await
}

async fn a_second_buyer_is_rejected(namespace: &dyn TestNamespace) -> Result<()> {
    let (client, _) = gala(namespace, 2).await?;
    hold(&client, "b1", &[1]).await?;
    client.refused("seat_booking.hold", &[], wanted("b2", &[1]), None, Code::Held).await?;
    client.done("seat_booking.confirm", &id("b1"), json!({}), None).await?;
    client.refused("seat_booking.hold", &[], wanted("b2", &[1]), None, Code::WrongState).await?;
    client.refused("seat_booking.hold", &[], wanted("b2", &[9]), None, Code::NotFound).await?;
    client.refused("seat_booking.hold", &[], wanted("b1", &[2]), None, Code::AlreadyExists).await?;
    for nonsense in [json!([]), json!([1, 1]), json!([1, 2, 3, 4, 5])] {
        let input = json!({"booking_id": "b3", "event_id": "gala", "seat_no": nonsense, "holder": "ann"});
        client.refused("seat_booking.hold", &[], input, None, Code::InvalidInput).await?;
    }
    check_rows(&client).await
}

async fn a_hold_is_all_or_nothing(namespace: &dyn TestNamespace) -> Result<()> {
    let (client, _) = gala(namespace, 3).await?;
    hold(&client, "b1", &[2]).await?;
    client.refused("seat_booking.hold", &[], wanted("b2", &[1, 2, 3]), None, Code::Held).await?;
    client.shows("seat", &seat(1), &json!({"state": "AVAILABLE"})).await?;
    client.refused("seat_booking.read", &id("b2"), json!({}), None, Code::NotFound).await?;
    check_rows(&client).await
}

async fn a_retry_gets_its_own_hold(namespace: &dyn TestNamespace) -> Result<()> {
    let (client, _) = gala(namespace, 2).await?;
    let call = || client.call_as("op-1", "seat_booking.hold", &[], wanted("b1", &[1, 2]), None);
    let first = call().await?;
    let again = call().await?;
    same("the answer of a retry", &again.body, &first.body)?;
    check_rows(&client).await
}

async fn a_hold_that_is_over_reads_as_free(namespace: &dyn TestNamespace) -> Result<()> {
    let (client, clock) = gala(namespace, 2).await?;
    hold(&client, "b1", &[1]).await?;
    clock.advance(MINUTE * 10);
    client
        .shows("seat", &seat(1), &json!({"state": "AVAILABLE", "booking_id": null, "hold_expires_at": null}))
        .await?;
    let free = json!({"event_id": "gala", "state": "AVAILABLE"});
    let listed = client.done("seat.list", &[], free, None).await?;
    same("free seats", &listed.body.as_array().map(Vec::len), &Some(2))?;
    Ok(())
}

async fn a_hold_that_is_over_can_be_taken(namespace: &dyn TestNamespace) -> Result<()> {
    let (client, clock) = gala(namespace, 3).await?;
    hold(&client, "b1", &[1, 2, 3]).await?;
    clock.advance(MINUTE * 10);
    hold(&client, "b2", &[2]).await?;
    // A booking that loses a unit loses all of them, so that a booking in progress always has what it says.
    client.shows("seat_booking", &id("b1"), &json!({"state": "EXPIRED", "due_at": null})).await?;
    client.shows("seat", &seat(1), &json!({"state": "AVAILABLE"})).await?;
    client.refused("seat_booking.confirm", &id("b1"), json!({}), None, Code::Expired).await?;
    client.done("seat_booking.confirm", &id("b2"), json!({}), None).await?;
    client.store_client()?.log(6).await?;
    same("what is told of it", &told(&client, "b1").await?, &names(&["held", "expired"]))?;
    same("what is told of the other", &told(&client, "b2").await?, &names(&["held", "confirmed"]))?;
    check_rows(&client).await
}

/// The events of a booking, by the versions of its row.
async fn told(client: &TenantClient, booking: &str) -> Result<Vec<String>> {
    let records = whole_log(client.house.store().as_ref()).await?;
    let events = records.iter().flat_map(|record| record.events.iter().map(move |event| (record, event)));
    let own = events.filter(|(record, event)| subject_of(record, event) == Some(("seat_booking", booking)));
    let by_version: BTreeMap<Option<i64>, String> =
        own.map(|(_, event)| (event.data["row"]["version"].as_i64(), event.name.clone())).collect();
    Ok(by_version.into_values().collect())
}

fn names(names: &[&str]) -> Vec<String> {
    names.iter().map(|name| format!("seat_booking.{name}")).collect()
}

async fn a_booking_has_one_name_in_the_log(namespace: &dyn TestNamespace) -> Result<()> {
    let (client, clock) = gala(namespace, 1).await?;
    // What separates the parts of a key, and what escapes it.
    hold(&client, "b,1%", &[1]).await?;
    client.done("seat_booking.extend", &id("b,1%"), json!({}), None).await?;
    clock.advance(MINUTE * 11);
    client.drain_workers().await?;
    let story = names(&["held", "extended", "expired"]);
    client.store_client()?.log(4).await?;
    same("what is told of it", &told(&client, "b%2C1%25").await?, &story)
}

async fn no_confirmation_after_the_end(namespace: &dyn TestNamespace) -> Result<()> {
    let (client, clock) = gala(namespace, 2).await?;
    hold(&client, "b1", &[1]).await?;
    hold(&client, "b2", &[2]).await?;
    clock.advance(MINUTE * 10 - Duration::from_millis(1));
    client.refused("seat_booking.expire", &id("b1"), json!({}), None, Code::WrongState).await?;
    client.done("seat_booking.confirm", &id("b1"), json!({}), None).await?;
    clock.advance(Duration::from_millis(1));
    client.refused("seat_booking.confirm", &id("b2"), json!({}), None, Code::Expired).await?;
    client.refused("seat_booking.extend", &id("b2"), json!({}), None, Code::Expired).await?;
    client.done("seat_booking.expire", &id("b2"), json!({}), None).await?;
    client.shows("seat_booking", &id("b2"), &json!({"state": "EXPIRED"})).await?;
    check_rows(&client).await
}

async fn a_clock_that_steps_sells_nothing_twice(namespace: &dyn TestNamespace) -> Result<()> {
    let (client, clock) = gala(namespace, 2).await?;
    let start = clock.now();
    // Ten minutes back: the hold lasts longer, and is its holder's.
    hold(&client, "b1", &[1]).await?;
    clock.set(start.minus(MINUTE * 10));
    client.refused("seat_booking.hold", &[], wanted("b2", &[1]), None, Code::Held).await?;
    same("nothing is swept", &client.drain_workers().await?, &0)?;
    client.done("seat_booking.confirm", &id("b1"), json!({}), None).await?;
    // Ten minutes ahead: it is over, and the next buyer has the seat, also when the clock is right again.
    clock.set(start);
    hold(&client, "b3", &[2]).await?;
    clock.set(start.plus(MINUTE * 10));
    client.refused("seat_booking.confirm", &id("b3"), json!({}), None, Code::Expired).await?;
    hold(&client, "b4", &[2]).await?;
    clock.set(start);
    client.refused("seat_booking.confirm", &id("b3"), json!({}), None, Code::Expired).await?;
    client.refused("seat_booking.hold", &[], wanted("b5", &[2]), None, Code::Held).await?;
    client.done("seat_booking.confirm", &id("b4"), json!({}), None).await?;
    clock.set(start.plus(MINUTE * 60));
    same("nothing is left to sweep", &client.drain_workers().await?, &0)?;
    for (booking, state) in [("b1", "CONFIRMED"), ("b3", "EXPIRED"), ("b4", "CONFIRMED")] {
        client.shows("seat_booking", &id(booking), &json!({"state": state})).await?;
    }
    check_rows(&client).await
}

async fn extensions_are_bounded(namespace: &dyn TestNamespace) -> Result<()> {
    let (client, clock) = gala(namespace, 1).await?;
    hold(&client, "b1", &[1]).await?;
    clock.advance(MINUTE * 8);
    client.done("seat_booking.extend", &id("b1"), json!({}), None).await?;
    clock.advance(MINUTE * 8);
    // Sixteen minutes old, it would end after twenty-six.
    let refusal = client.refused("seat_booking.extend", &id("b1"), json!({}), None, Code::Expired).await?;
    ensure!(refusal.message.contains("20 min"), "{refusal}");
    client.shows("seat", &seat(1), &json!({"state": "HELD"})).await?;
    clock.advance(MINUTE * 2);
    client.shows("seat", &seat(1), &json!({"state": "AVAILABLE"})).await?;
    Ok(())
}

async fn cancelling_frees_the_units(namespace: &dyn TestNamespace) -> Result<()> {
    let (client, clock) = gala(namespace, 2).await?;
    hold(&client, "b1", &[1, 2]).await?;
    shows(
        &client.done("seat_booking.cancel", &id("b1"), json!({}), None).await?,
        &json!({"state": "CANCELLED"}),
    )?;
    hold(&client, "b2", &[1]).await?;
    // What is over and not swept can be given up as well.
    clock.advance(MINUTE * 11);
    client.done("seat_booking.cancel", &id("b2"), json!({}), None).await?;
    client.refused("seat_booking.confirm", &id("b2"), json!({}), None, Code::WrongState).await?;
    check_rows(&client).await
}

async fn the_sweeper_frees_what_is_over(namespace: &dyn TestNamespace) -> Result<()> {
    let (client, clock) = gala(namespace, 4).await?;
    let other = client.for_tenant("zeta")?;
    other.done("seat.create", &[], json!({"event_id": "gala", "seat_no": 1}), None).await?;
    hold(&client, "b1", &[1, 2]).await?;
    hold(&other, "b1", &[1]).await?;
    clock.advance(MINUTE * 5);
    hold(&client, "b2", &[3]).await?;
    same("swept too early", &client.drain_workers().await?, &0)?;
    clock.advance(MINUTE * 5);
    same("bookings of two tenants", &client.drain_workers().await?, &2)?;
    client.shows("seat_booking", &id("b1"), &json!({"state": "EXPIRED"})).await?;
    other.shows("seat_booking", &id("b1"), &json!({"state": "EXPIRED"})).await?;
    client.shows("seat_booking", &id("b2"), &json!({"state": "IN_PROGRESS"})).await?;
    client.done("seat_booking.cancel", &id("b2"), json!({}), None).await?;
    clock.advance(MINUTE * 60);
    same("swept once", &client.drain_workers().await?, &0)?;
    check_rows(&client).await?;
    check_rows(&other).await
}

/// Calls two actions of one booking at once, and returns which of them were done.
async fn race(client: &TenantClient, booking: &str, actions: [&str; 2]) -> Result<[bool; 2]> {
    let start = |action: &str| -> JoinHandle<Result<Answer, Refusal>> {
        let (client, action, key) = (client.clone(), format!("seat_booking.{action}"), id(booking));
        tokio::spawn(async move { client.call(&action, &key, json!({}), None).await })
    };
    let [first, second] = actions.map(start);
    Ok([first.await?.is_ok(), second.await?.is_ok()])
}

async fn confirm_and_sweep_have_one_winner(namespace: &dyn TestNamespace) -> Result<()> {
    let (client, clock) = gala(namespace, 8).await?;
    for number in 1..=8 {
        let booking = format!("b{number}");
        hold(&client, &booking, &[number]).await?;
        // Just before the end, at it, and after it.
        clock.advance(MINUTE * 10 - Duration::from_millis(1) + Duration::from_millis(number as u64 % 3));
        let done = race(&client, &booking, ["confirm", "expire"]).await?;
        ensure!(done[0] != done[1], "of confirm and expire {done:?} were done");
        same("whether it could be confirmed", &done[0], &(number % 3 == 0))?;
    }
    check_rows(&client).await
}

async fn cancel_and_confirm_have_one_winner(namespace: &dyn TestNamespace) -> Result<()> {
    let (client, _) = gala(namespace, 8).await?;
    for number in 1..=8 {
        let booking = format!("b{number}");
        hold(&client, &booking, &[number]).await?;
        let done = race(&client, &booking, ["cancel", "confirm"]).await?;
        ensure!(done[0] != done[1], "of cancel and confirm {done:?} were done");
    }
    check_rows(&client).await
}

async fn the_best_units_are_side_by_side(namespace: &dyn TestNamespace) -> Result<()> {
    let (client, _) = gala(namespace, 6).await?;
    hold(&client, "b1", &[2]).await?;
    let best = |booking: &str, count: u64| json!({"booking_id": booking, "event_id": "gala", "count": count, "holder": "bob"});
    let held = client.done("seat_booking.hold", &[], best("b2", 3), None).await?;
    let units: Vec<i64> =
        held.body["units"].as_array().into_iter().flatten().filter_map(Json::as_i64).collect();
    ensure!(units == [3, 4, 5] || units == [4, 5, 6], "three side by side, got {units:?}");
    // Two are left, apart from one another.
    let held = client.done("seat_booking.hold", &[], best("b3", 2), None).await?;
    same("what is left", &held.body["units"].as_array().map(Vec::len), &Some(2))?;
    for (count, says) in [(1, "has no unit that is free"), (2, "has fewer than 2 units that are free")] {
        let full = client.refused("seat_booking.hold", &[], best("b4", count), None, Code::Held).await?;
        ensure!(full.message.ends_with(says), "{full}");
    }
    check_rows(&client).await
}

async fn many_buyers_never_share_a_unit(namespace: &dyn TestNamespace) -> Result<()> {
    // A caller that lost a race pauses, so the clock has to go by itself.
    let client = TenantClient::open(namespace, BLUEPRINT).await?;
    offer(&client, 12).await?;
    let buyers = (0..24).map(|buyer| {
        let client = client.clone();
        tokio::spawn(async move {
            let booking = format!("b{buyer}");
            // Half of them name what they want, and want the same; the others take what is best.
            let input = if buyer % 2 == 0 {
                wanted(&booking, &[1 + buyer % 6, 7 + buyer % 6])
            } else {
                json!({"booking_id": booking, "event_id": "gala", "count": 1, "holder": "bob"})
            };
            let held = client.call("seat_booking.hold", &[], input, None).await;
            match held {
                Ok(_) if buyer % 3 == 0 => {
                    client.call("seat_booking.cancel", &id(&booking), json!({}), None).await
                }
                Ok(_) => client.call("seat_booking.confirm", &id(&booking), json!({}), None).await,
                refused => refused,
            }
        })
    });
    let mut bought = 0;
    for buyer in buyers.collect::<Vec<_>>() {
        match buyer.await? {
            Ok(_) => bought += 1,
            Err(refusal) => {
                let expected = [Code::Held, Code::WrongState, Code::Contended];
                ensure!(expected.contains(&refusal.code), "{refusal}");
            }
        }
    }
    ensure!(bought > 0, "no buyer bought anything");
    let records = whole_log(client.house.store().as_ref()).await?;
    ensure!(
        records.iter().all(|record| record.status == OperationStatus::Applied),
        "an operation was given up"
    );
    check_rows(&client).await
}

async fn bookings_are_listed_by_holder(namespace: &dyn TestNamespace) -> Result<()> {
    let (client, clock) = gala(namespace, 3).await?;
    for number in 1..=3 {
        hold(&client, &format!("b{number}"), &[number]).await?;
        clock.advance(Duration::from_secs(1));
    }
    // An index may lag behind the rows.
    for _ in 0..LOOKS_MAX {
        if listed(&client).await? == ["b3", "b2", "b1"] {
            return Ok(());
        }
        pause().await;
    }
    same("newest first", &listed(&client).await?, &["b3", "b2", "b1"].map(str::to_owned).to_vec())
}

/// The ids of ann's bookings, read by pages.
async fn listed(client: &TenantClient) -> Result<Vec<String>> {
    let (mut ids, mut cursor) = (Vec::new(), None);
    loop {
        let mut input = json!({"holder": "ann", "limit": 2});
        if let Some(cursor) = cursor {
            input["cursor"] = Json::String(cursor);
        }
        let page = client.done("seat_booking.list", &[], input, None).await?;
        let rows = page.body.as_array().into_iter().flatten();
        ids.extend(rows.filter_map(|row| row["booking_id"].as_str().map(str::to_owned)));
        cursor = page.next;
        if cursor.is_none() {
            return Ok(ids);
        }
    }
}

async fn bookings_of_tenants_are_apart(namespace: &dyn TestNamespace) -> Result<()> {
    let (client, _) = gala(namespace, 1).await?;
    let other = client.for_tenant("zeta")?;
    hold(&client, "b1", &[1]).await?;
    other.refused("seat_booking.read", &id("b1"), json!({}), None, Code::NotFound).await?;
    other.refused("seat_booking.confirm", &id("b1"), json!({}), None, Code::NotFound).await?;
    other.refused("seat_booking.hold", &[], wanted("b1", &[1]), None, Code::NotFound).await?;
    other.refused("seat.read", &seat(1), json!({}), None, Code::NotFound).await?;
    Ok(())
}

async fn what_was_bought_is_not_swept(namespace: &dyn TestNamespace) -> Result<()> {
    let (client, clock) = gala(namespace, 3).await?;
    for (booking, unit) in [("b1", 1), ("b2", 2), ("b3", 3)] {
        hold(&client, booking, &[unit]).await?;
    }
    client.done("seat_booking.confirm", &id("b1"), json!({}), None).await?;
    client.done("seat_booking.cancel", &id("b2"), json!({}), None).await?;
    // Long after the end that it had as a hold.
    clock.advance(MINUTE * 60);
    client.done("seat_booking.expire", &id("b3"), json!({}), None).await?;
    for booking in ["b1", "b2", "b3"] {
        for action in ["seat_booking.expire", "seat_booking.extend", "seat_booking.confirm"] {
            let refused = client.call(action, &id(booking), json!({}), None).await;
            ensure!(refused.is_err(), "{action} of {booking}, which is over: {refused:?}");
        }
    }
    client.refused("seat_booking.hold", &[], wanted("b4", &[1]), None, Code::WrongState).await?;
    client.shows("seat", &seat(1), &json!({"state": "SOLD", "booking_id": "b1"})).await?;
    check_rows(&client).await
}

async fn a_booking_that_was_extended_meanwhile_is_not_swept(namespace: &dyn TestNamespace) -> Result<()> {
    let clock = Arc::new(ManualClock::at(Time::from_millis(1_800_000_000_000)));
    let store = namespace.open_at(clock.clone()).await?;
    let client = TenantClient::over(store.clone(), BLUEPRINT, clock.clone()).await?;
    offer(&client, 4).await?;
    for (booking, unit, action) in [("b1", 1, "confirm"), ("b2", 2, "cancel"), ("b3", 3, "extend")] {
        hold(&client, booking, &[unit]).await?;
        clock.advance(MINUTE * 9);
        // The sweeper's clock is ahead: it reads the booking as due, and then the booking goes on without it.
        let ahead = SkewedClock::over(clock.clone());
        ahead.skew(3_600_000_000);
        let meanwhile = Arc::new(Meanwhile::default());
        let slow = TenantClient::over(
            Arc::new(StoreProxy::new(store.clone(), meanwhile.clone())),
            BLUEPRINT,
            Arc::new(ahead),
        );
        let slow = slow.await?;
        meanwhile.next({
            let (client, action, clock) = (client.clone(), format!("seat_booking.{action}"), clock.clone());
            async move {
                drop(client.call(&action, &id(booking), json!({}), None).await);
                clock.advance(MINUTE * 2);
            }
        });
        slow.work(7).await?;
    }
    for (booking, state) in [("b1", "CONFIRMED"), ("b2", "CANCELLED"), ("b3", "IN_PROGRESS")] {
        client.shows("seat_booking", &id(booking), &json!({"state": state})).await?;
    }
    check_rows(&client).await
}

async fn a_hold_that_is_over_is_taken_once(namespace: &dyn TestNamespace) -> Result<()> {
    let clock = Arc::new(ManualClock::at(Time::from_millis(1_800_000_000_000)));
    let store = namespace.open_at(clock.clone()).await?;
    let client = TenantClient::over(store.clone(), BLUEPRINT, clock.clone()).await?;
    offer(&client, 3).await?;
    hold(&client, "b1", &[1, 2]).await?;
    let drafted = async |client: &TenantClient, booking: &str| {
        let request = TenantClient::request("seat_booking.hold", &[], &wanted(booking, &[1]), None);
        client.house.plan(&client.tenant, request).await?.context("there is nothing to write")
    };
    let refused = async |plan: &Plan| {
        let outcome = store.commit(plan).await?;
        ensure!(matches!(outcome, Commit::Refused(_)), "a unit was taken from its holder: {outcome:?}");
        Ok(())
    };
    // For a buyer whose clock is ahead it is over; for the store it is not.
    let ahead = SkewedClock::over(clock.clone());
    ahead.skew(3_600_000_000);
    let early = TenantClient::over(store.clone(), BLUEPRINT, Arc::new(ahead)).await?;
    refused(&drafted(&early, "b2").await?).await?;
    check_rows(&client).await?;
    // It is over for two buyers, and one of them is faster.
    clock.advance(MINUTE * 10);
    let plan = drafted(&client, "b2").await?;
    hold(&client, "b3", &[1]).await?;
    refused(&plan).await?;
    check_rows(&client).await?;
    // The faster one's hold is over as well, and belongs to another buyer than the slower one saw.
    clock.advance(MINUTE * 10);
    refused(&plan).await?;
    hold(&client, "b4", &[1]).await?;
    check_rows(&client).await
}

async fn rows_that_do_not_agree_are_not_made_worse(namespace: &dyn TestNamespace) -> Result<()> {
    skip_invariants("writes rows past the actions");
    let (client, clock) = gala(namespace, 2).await?;
    let store_client = client.store_client()?;
    let (seats, bookings) = (client.table("seats")?.clone(), client.table("seat_bookings")?.clone());
    // A program writes past the actions. It should not; if it does, no third caller loses by it.
    let write = async |step: Step| store_client.apply(store_client.one(step)).await.map(drop);
    let on_seat = || Step::update(&seats, seat(1));
    let on_booking = || Step::update(&bookings, id("b1"));
    hold(&client, "b1", &[1, 2]).await?;
    let end = clock.now().plus(MINUTE * 10);
    let draft = async |action: &str| {
        client.drafted(&format!("seat_booking.{action}"), &id("b1"), json!({}), None).await
    };
    let plans = [draft("confirm").await?, draft("extend").await?, draft("cancel").await?];
    write(on_seat().set("booking_id", "other")).await?;
    for plan in &plans {
        client.too_late(plan).await?;
    }
    clock.advance(MINUTE * 10);
    client.too_late(&draft("expire").await?).await?;
    client.work(7).await?;
    // A buyer that takes the second seat would free the first.
    let rest = client.drafted("seat_booking.hold", &[], wanted("b2", &[2]), None).await?;
    client.too_late(&rest).await?;
    same("whose it is", &store_client.row(&seats, seat(1)).await?.text("booking_id"), &Some("other"))?;
    write(on_seat().set("booking_id", "b1")).await?;
    // A seat is taken over if both its row and the booking say that its time is up, and that it is theirs.
    let taken = client.drafted("seat_booking.hold", &[], wanted("b2", &[1]), None).await?;
    let later = end.plus(MINUTE);
    for (wrong, right) in [
        (on_seat().set("booking_id", "other"), on_seat().set("booking_id", "b1")),
        (on_seat().set("hold_expires_at", later), on_seat().set("hold_expires_at", end)),
        (on_booking().set("state", "CONFIRMED"), on_booking().set("state", "IN_PROGRESS")),
        (on_booking().set("expires_at", later), on_booking().set("expires_at", end)),
    ] {
        write(wrong).await?;
        client.too_late(&taken).await?;
        write(right).await?;
    }
    hold(&client, "b2", &[1]).await?;
    client.shows("seat_booking", &id("b1"), &json!({"state": "EXPIRED"})).await?;
    invariants::check_rows(&client.scope("seat")).await
}

async fn a_unit_that_is_gone_is_not_made_up(namespace: &dyn TestNamespace) -> Result<()> {
    skip_invariants("writes rows past the actions");
    let (client, clock) = gala(namespace, 5).await?;
    let (store_client, seats) = (client.store_client()?, client.table("seats")?.clone());
    // A program deletes a unit past the actions.
    let delete = async |number: i64| {
        store_client.apply(store_client.one(Step::delete(&seats, seat(number)))).await.map(drop)
    };
    let taken = async |booking: &str, number: i64| {
        client.drafted("seat_booking.hold", &[], wanted(booking, &[number]), None).await
    };
    hold(&client, "b1", &[1]).await?;
    hold(&client, "b2", &[2]).await?;
    hold(&client, "b3", &[3, 4]).await?;
    let mut plans = vec![taken("b5", 5).await?];
    for action in ["confirm", "extend", "cancel"] {
        plans.push(client.drafted(&format!("seat_booking.{action}"), &id("b1"), json!({}), None).await?);
    }
    delete(5).await?;
    delete(1).await?;
    clock.advance(MINUTE * 10);
    plans.push(client.drafted("seat_booking.expire", &id("b1"), json!({}), None).await?);
    // One takes a unit over, and one takes its neighbour, which frees it.
    plans.extend([taken("b6", 2).await?, taken("b7", 4).await?]);
    delete(2).await?;
    delete(3).await?;
    for plan in &plans {
        client.too_late(plan).await?;
    }
    client.work(7).await?;
    for number in [1, 2, 3, 5] {
        same("what is gone", &store_client.find(&seats, seat(number)).await?, &None)?;
    }
    Ok(())
}

/// What names the Redis server of the tests.
const REDIS: &str = "STATEHOUSE_TEST_REDIS";

/// A house whose holds are leases in a real Redis, under keys of its own, with so many seats.
async fn leased_gala(
    namespace: &dyn TestNamespace,
    seats: i64,
    hold_for: &str,
) -> Result<(TenantClient, Arc<dyn ExternalHolds>)> {
    let url =
        std::env::var(REDIS).with_context(|| format!("{REDIS} is not set; run scripts/verify tests"))?;
    let text = BLUEPRINT.replace("hold_for  = \"10m\"", &format!("hold_for  = \"{hold_for}\""));
    let blueprint =
        Blueprint::read("statehouse.toml", &format!("{text}holds = \"redis\"\nrefundable = true\n"))?;
    let clock = Arc::new(SystemClock);
    let ids = Ids::new(clock.clone(), Random::from_entropy());
    let holds = statehouse::engine::open_holds(&url, &format!("drill-{}", ids.next())).await?;
    let house = House::with(namespace.open().await?, &blueprint, clock, ids)?.with_holds(holds.clone());
    house.migrate(Migrate::Apply).await?;
    let client = TenantClient { house: Arc::new(house), tenant: Tenant::new("acme")? };
    offer(&client, seats).await?;
    Ok((client, holds))
}

/// The name under which a seat of the gala is held.
fn lease_of(number: i64) -> String {
    format!("{{acme/seat/gala}}/{number}")
}

async fn a_leased_unit_is_held_confirmed_and_sold(namespace: &dyn TestNamespace) -> Result<()> {
    let (client, holds) = leased_gala(namespace, 3, "10m").await?;
    hold(&client, "b1", &[1, 2]).await?;
    client.shows("seat", &seat(1), &json!({"state": "HELD", "booking_id": "b1"})).await?;
    let stored = client.store_client()?.row(client.table("seats")?, seat(1)).await?;
    same("the stored state", &stored.text("state"), &Some("AVAILABLE"))?;
    let leases = holds.read_holds(&[lease_of(1), lease_of(3)]).await?;
    same("the lease", &leases.iter().map(Option::is_some).collect::<Vec<_>>(), &vec![true, false])?;
    let free = client.done("seat.list", &[], json!({"event_id": "gala", "state": "AVAILABLE"}), None).await?;
    same("the free seats", &free.body.as_array().map(Vec::len), &Some(1))?;
    client.refused("seat_booking.hold", &[], wanted("b2", &[2]), None, Code::Held).await?;
    client.done("seat_booking.confirm", &id("b1"), json!({}), None).await?;
    client.shows("seat", &seat(1), &json!({"state": "SOLD", "booking_id": "b1"})).await?;
    // Also when the lease is gone, a unit that was sold is not held again.
    holds.release(&[lease_of(1), lease_of(2)], "b1").await?;
    client.refused("seat_booking.hold", &[], wanted("b3", &[2]), None, Code::WrongState).await?;
    same("the lease that was given back", &holds.read_holds(&[lease_of(2)]).await?, &vec![None])?;
    client.refused("seat_booking.hold", &[], wanted("b3", &[9]), None, Code::NotFound).await?;
    Ok(())
}

async fn leased_holds_are_all_or_nothing_and_end(namespace: &dyn TestNamespace) -> Result<()> {
    let (client, holds) = leased_gala(namespace, 3, "1s").await?;
    hold(&client, "b1", &[2]).await?;
    client.refused("seat_booking.hold", &[], wanted("b2", &[1, 2, 3]), None, Code::Held).await?;
    let none = holds.read_holds(&[lease_of(1), lease_of(3)]).await?;
    ensure!(none.iter().all(Option::is_none), "a refused hold left {none:?}");
    // Asking again does not prolong it.
    client.refused("seat_booking.hold", &[], wanted("b1", &[2]), None, Code::AlreadyExists).await?;
    for _ in 0..LOOKS_MAX {
        if holds.read_holds(&[lease_of(2)]).await?.iter().all(Option::is_none) {
            break;
        }
        pause().await;
    }
    client.shows("seat", &seat(2), &json!({"state": "AVAILABLE", "booking_id": null})).await?;
    hold(&client, "b2", &[2]).await?;
    for _ in 0..LOOKS_MAX {
        client.drain_workers().await?;
        if client.shown("seat_booking", &id("b1"), &["state"]).await? == [json!("EXPIRED")] {
            client.refused("seat_booking.confirm", &id("b1"), json!({}), None, Code::Expired).await?;
            return Ok(());
        }
        pause().await;
    }
    anyhow::bail!("no process expired the booking whose time was up")
}

async fn leases_are_extended_within_bounds(namespace: &dyn TestNamespace) -> Result<()> {
    let (client, holds) = leased_gala(namespace, 2, "15m").await?;
    hold(&client, "b1", &[1]).await?;
    let left = |leases: Vec<Option<ExternalHold>>| leases.into_iter().flatten().next().map(|hold| hold.left);
    // All but a minute of it passes for the lease.
    holds.extend(&[lease_of(1)], "b1", MINUTE).await?;
    client.done("seat_booking.extend", &id("b1"), json!({}), None).await?;
    let extended = left(holds.read_holds(&[lease_of(1)]).await?).context("the lease is gone")?;
    ensure!(extended > 10 * MINUTE && extended <= 15 * MINUTE, "the lease has {extended:?} left");
    holds.release(&[lease_of(1)], "b1").await?;
    client.refused("seat_booking.extend", &id("b1"), json!({}), None, Code::Expired).await?;
    hold(&client, "b2", &[2]).await?;
    client.done("seat_booking.cancel", &id("b2"), json!({}), None).await?;
    same("the lease of a cancelled booking", &holds.read_holds(&[lease_of(2)]).await?, &vec![None])?;
    hold(&client, "b3", &[2]).await.map(drop)
}

/// Redis forgets everything while two buyers are at the checkout.
async fn a_lost_lease_sells_nothing_twice(namespace: &dyn TestNamespace) -> Result<()> {
    let (client, holds) = leased_gala(namespace, 2, "10m").await?;
    hold(&client, "b1", &[1, 2]).await?;
    holds.release(&[lease_of(1), lease_of(2)], "b1").await?;
    hold(&client, "b2", &[2]).await?;
    client.done("seat_booking.confirm", &id("b2"), json!({}), None).await?;
    client.refused("seat_booking.confirm", &id("b1"), json!({}), None, Code::WrongState).await?;
    client.shows("seat", &seat(1), &json!({"state": "AVAILABLE"})).await?;
    client.shows("seat", &seat(2), &json!({"state": "SOLD", "booking_id": "b2"})).await?;
    client.shows("seat_booking", &id("b1"), &json!({"state": "IN_PROGRESS"})).await
}

async fn holds_from_before_they_were_leases_end(namespace: &dyn TestNamespace) -> Result<()> {
    let (client, _) = leased_gala(namespace, 3, "10m").await?;
    let (store_client, seats) = (client.store_client()?, client.table("seats")?.clone());
    // The units' rows still say whose they were: the buyer's own, or an expired one's.
    for (number, booking, owner, until) in [(1, "b1", "b1", now_plus(MINUTE)), (2, "b2", "old", now())] {
        hold(&client, booking, &[number]).await?;
        let held = Step::update(&seats, seat(number)).set("state", "HELD").set("booking_id", owner);
        store_client.apply(store_client.one(held.set("hold_expires_at", until))).await?;
        client.done("seat_booking.confirm", &id(booking), json!({}), None).await?;
        client.shows("seat", &seat(number), &json!({"state": "SOLD", "booking_id": booking})).await?;
    }
    // What is gone is not sold.
    hold(&client, "b3", &[3]).await?;
    store_client.apply(store_client.one(Step::delete(&seats, seat(3)))).await?;
    ensure!(client.call("seat_booking.confirm", &id("b3"), json!({}), None).await.is_err(), "it was sold");
    same("what is gone", &store_client.find(&seats, seat(3)).await?, &None)
}

async fn a_leased_booking_is_refunded_whole(namespace: &dyn TestNamespace) -> Result<()> {
    let (client, _) = leased_gala(namespace, 2, "10m").await?;
    hold(&client, "b1", &[1, 2]).await?;
    client.done("seat_booking.confirm", &id("b1"), json!({}), None).await?;
    client.done("seat_booking.cancel", &id("b1"), json!({}), None).await?;
    for number in [1, 2] {
        let stored = client.store_client()?.row(client.table("seats")?, seat(number)).await?;
        same("the stored state", &stored.text("state"), &Some("AVAILABLE"))?;
    }
    Ok(())
}

async fn many_buyers_with_leases_never_share_a_unit(namespace: &dyn TestNamespace) -> Result<()> {
    let (client, _) = leased_gala(namespace, 8, "10m").await?;
    let buyers: Vec<JoinHandle<bool>> = (0..24)
        .map(|buyer| {
            let client = client.clone();
            tokio::spawn(async move {
                let booking = format!("b{buyer}");
                let input = match buyer % 3 {
                    0 => wanted(&booking, &[buyer % 8 + 1]),
                    _ => json!({"booking_id": booking, "event_id": "gala", "count": 1, "holder": "ann"}),
                };
                let held = client.call("seat_booking.hold", &[], input, None).await.is_ok();
                held && client.call("seat_booking.confirm", &id(&booking), json!({}), None).await.is_ok()
            })
        })
        .collect();
    let mut sold = 0;
    for buyer in buyers {
        sold += usize::from(buyer.await?);
    }
    let store = client.house.store();
    let seats = store.scan(&Scan::of(client.table("seats")?, &client.tenant)).await?.rows;
    let owners: BTreeSet<&str> = seats.iter().filter_map(|row| row.text("booking_id")).collect();
    let taken = seats.iter().filter(|row| row.text("state") == Some("SOLD")).count();
    same("seats sold and their buyers", &(taken, owners.len()), &(sold, sold))?;
    ensure!(sold >= 4, "only {sold} of 8 seats were sold to 24 buyers");
    Ok(())
}
