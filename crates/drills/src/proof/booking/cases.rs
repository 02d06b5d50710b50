//! A08 Time-bounded exclusive allocation: what each action does and refuses, and what many buyers at once may not break.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use serde_json::{Value as Json, json};
use statehouse::holds::{Hold, Holds};
use statehouse::house::subject_of;
use statehouse::{Answer, Blueprint, Code, House, Refusal};
use statehouse_store::clock::SkewedClock;
use statehouse_store::guard::{now, now_plus};
use statehouse_store::{
    Clock, Commit, Ids, ManualClock, Migrate, OperationStatus, Plan, Random, Scan, Step, SystemClock, Tenant,
    Time, Value,
};
use tokio::task::JoinHandle;

use super::{cases as booking, invariants};
use crate::conformance::{Case, cases};
use crate::harness::around::{Around, Meanwhile};
use crate::harness::client::{pause, same, whole_log};
use crate::harness::engines::Lab;
use crate::harness::house::{Visitor, shows};

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
async fn gala(lab: &dyn Lab, seats: i64) -> Result<(Visitor, Arc<ManualClock>)> {
    let clock = Arc::new(ManualClock::at(Time::from_millis(1_800_000_000_000)));
    let visitor = Visitor::open_at(lab, BLUEPRINT, clock.clone()).await?;
    offer(&visitor, seats).await?;
    Ok((visitor, clock))
}

async fn offer(visitor: &Visitor, seats: i64) -> Result<()> {
    for seat in 1..=seats {
        let input = json!({"event_id": "gala", "seat_no": seat, "price": 50});
        visitor.done("seat.create", &[], input, None).await?;
    }
    Ok(())
}

fn seat(number: i64) -> [Value; 2] {
    ["gala".into(), number.into()]
}

fn wanted(booking: &str, seats: &[i64]) -> Json {
    json!({"booking_id": booking, "event_id": "gala", "seat_no": seats, "holder": "ann"})
}

async fn hold(visitor: &Visitor, booking: &str, seats: &[i64]) -> Result<Answer> {
    visitor.done("seat_booking.hold", &[], wanted(booking, seats), None).await
}

fn id(booking: &str) -> [Value; 1] {
    [booking.into()]
}

async fn check_rows(visitor: &Visitor) -> Result<()> {
    invariants::check(&visitor.scope("seat")).await
}

async fn a_unit_is_held_confirmed_and_sold(lab: &dyn Lab) -> Result<()> {
    let (visitor, _) = gala(lab, 3).await?;
    visitor
        .refused("seat.create", &[], json!({"event_id": "gala", "seat_no": 1}), None, Code::AlreadyExists)
        .await?;
    let held = hold(&visitor, "b1", &[1, 2]).await?;
    same("the key", &held.created.as_deref(), &Some("b1"))?;
    shows(&held, &json!({"state": "IN_PROGRESS", "units": [1, 2], "holder": "ann", "version": 1}))?;
    visitor.shows("seat", &seat(1), &json!({"state": "HELD", "booking_id": "b1", "price": 50})).await?;
    visitor.shows("seat", &seat(3), &json!({"state": "AVAILABLE", "booking_id": null})).await?;
    let confirmed = visitor.done("seat_booking.confirm", &id("b1"), json!({}), None).await?;
    shows(&confirmed, &json!({"state": "CONFIRMED", "version": 2, "due_at": null}))?;
    visitor
        .shows("seat", &seat(2), &json!({"state": "SOLD", "booking_id": "b1", "hold_expires_at": null}))
        .await?;
    for action in ["confirm", "extend", "cancel", "expire"] {
        let action = format!("seat_booking.{action}");
        visitor.refused(&action, &id("b1"), json!({}), None, Code::WrongState).await?;
        visitor.refused(&action, &id("nobody"), json!({}), None, Code::NotFound).await?;
    }
    check_rows(&visitor).await
}

async fn a_second_buyer_is_rejected(lab: &dyn Lab) -> Result<()> {
    let (visitor, _) = gala(lab, 2).await?;
    hold(&visitor, "b1", &[1]).await?;
    visitor.refused("seat_booking.hold", &[], wanted("b2", &[1]), None, Code::Held).await?;
    visitor.done("seat_booking.confirm", &id("b1"), json!({}), None).await?;
    visitor.refused("seat_booking.hold", &[], wanted("b2", &[1]), None, Code::WrongState).await?;
    visitor.refused("seat_booking.hold", &[], wanted("b2", &[9]), None, Code::NotFound).await?;
    visitor.refused("seat_booking.hold", &[], wanted("b1", &[2]), None, Code::AlreadyExists).await?;
    for nonsense in [json!([]), json!([1, 1]), json!([1, 2, 3, 4, 5])] {
        let input = json!({"booking_id": "b3", "event_id": "gala", "seat_no": nonsense, "holder": "ann"});
        visitor.refused("seat_booking.hold", &[], input, None, Code::InvalidInput).await?;
    }
    check_rows(&visitor).await
}

async fn a_hold_is_all_or_nothing(lab: &dyn Lab) -> Result<()> {
    let (visitor, _) = gala(lab, 3).await?;
    hold(&visitor, "b1", &[2]).await?;
    visitor.refused("seat_booking.hold", &[], wanted("b2", &[1, 2, 3]), None, Code::Held).await?;
    visitor.shows("seat", &seat(1), &json!({"state": "AVAILABLE"})).await?;
    visitor.refused("seat_booking.read", &id("b2"), json!({}), None, Code::NotFound).await?;
    check_rows(&visitor).await
}

async fn a_retry_gets_its_own_hold(lab: &dyn Lab) -> Result<()> {
    let (visitor, _) = gala(lab, 2).await?;
    let call = || visitor.call_as("op-1", "seat_booking.hold", &[], wanted("b1", &[1, 2]), None);
    let first = call().await?;
    let again = call().await?;
    same("the answer of a retry", &again.body, &first.body)?;
    check_rows(&visitor).await
}

async fn a_hold_that_is_over_reads_as_free(lab: &dyn Lab) -> Result<()> {
    let (visitor, clock) = gala(lab, 2).await?;
    hold(&visitor, "b1", &[1]).await?;
    clock.advance(MINUTE * 10);
    visitor
        .shows("seat", &seat(1), &json!({"state": "AVAILABLE", "booking_id": null, "hold_expires_at": null}))
        .await?;
    let free = json!({"event_id": "gala", "state": "AVAILABLE"});
    let listed = visitor.done("seat.list", &[], free, None).await?;
    same("free seats", &listed.body.as_array().map(Vec::len), &Some(2))?;
    Ok(())
}

async fn a_hold_that_is_over_can_be_taken(lab: &dyn Lab) -> Result<()> {
    let (visitor, clock) = gala(lab, 3).await?;
    hold(&visitor, "b1", &[1, 2, 3]).await?;
    clock.advance(MINUTE * 10);
    hold(&visitor, "b2", &[2]).await?;
    // Whoever loses a unit loses all of them, so that a booking in progress always has what it says.
    visitor.shows("seat_booking", &id("b1"), &json!({"state": "EXPIRED", "due_at": null})).await?;
    visitor.shows("seat", &seat(1), &json!({"state": "AVAILABLE"})).await?;
    visitor.refused("seat_booking.confirm", &id("b1"), json!({}), None, Code::Expired).await?;
    visitor.done("seat_booking.confirm", &id("b2"), json!({}), None).await?;
    visitor.client()?.log(6).await?;
    same("what is told of it", &told(&visitor, "b1").await?, &names(&["held", "expired"]))?;
    same("what is told of the other", &told(&visitor, "b2").await?, &names(&["held", "confirmed"]))?;
    check_rows(&visitor).await
}

/// The events of a booking, by the versions of its row.
async fn told(visitor: &Visitor, booking: &str) -> Result<Vec<String>> {
    let records = whole_log(visitor.house.store().as_ref()).await?;
    let events = records.iter().flat_map(|record| record.events.iter().map(move |event| (record, event)));
    let own = events.filter(|(record, event)| subject_of(record, event) == Some(("seat_booking", booking)));
    let by_version: BTreeMap<Option<i64>, String> =
        own.map(|(_, event)| (event.data["row"]["version"].as_i64(), event.name.clone())).collect();
    Ok(by_version.into_values().collect())
}

fn names(names: &[&str]) -> Vec<String> {
    names.iter().map(|name| format!("seat_booking.{name}")).collect()
}

async fn a_booking_has_one_name_in_the_log(lab: &dyn Lab) -> Result<()> {
    let (visitor, clock) = gala(lab, 1).await?;
    // What separates the parts of a key, and what escapes it.
    hold(&visitor, "b,1%", &[1]).await?;
    visitor.done("seat_booking.extend", &id("b,1%"), json!({}), None).await?;
    clock.advance(MINUTE * 11);
    visitor.drain_workers().await?;
    let story = names(&["held", "extended", "expired"]);
    visitor.client()?.log(4).await?;
    same("what is told of it", &told(&visitor, "b%2C1%25").await?, &story)
}

async fn no_confirmation_after_the_end(lab: &dyn Lab) -> Result<()> {
    let (visitor, clock) = gala(lab, 2).await?;
    hold(&visitor, "b1", &[1]).await?;
    hold(&visitor, "b2", &[2]).await?;
    clock.advance(MINUTE * 10 - Duration::from_millis(1));
    visitor.refused("seat_booking.expire", &id("b1"), json!({}), None, Code::WrongState).await?;
    visitor.done("seat_booking.confirm", &id("b1"), json!({}), None).await?;
    clock.advance(Duration::from_millis(1));
    visitor.refused("seat_booking.confirm", &id("b2"), json!({}), None, Code::Expired).await?;
    visitor.refused("seat_booking.extend", &id("b2"), json!({}), None, Code::Expired).await?;
    visitor.done("seat_booking.expire", &id("b2"), json!({}), None).await?;
    visitor.shows("seat_booking", &id("b2"), &json!({"state": "EXPIRED"})).await?;
    check_rows(&visitor).await
}

async fn a_clock_that_steps_sells_nothing_twice(lab: &dyn Lab) -> Result<()> {
    let (visitor, clock) = gala(lab, 2).await?;
    let start = clock.now();
    // Ten minutes back: the hold lasts longer, and is its holder's.
    hold(&visitor, "b1", &[1]).await?;
    clock.set(start.minus(MINUTE * 10));
    visitor.refused("seat_booking.hold", &[], wanted("b2", &[1]), None, Code::Held).await?;
    same("nothing is swept", &visitor.drain_workers().await?, &0)?;
    visitor.done("seat_booking.confirm", &id("b1"), json!({}), None).await?;
    // Ten minutes ahead: it is over, and whoever takes the seat then has it, also when the clock is right again.
    clock.set(start);
    hold(&visitor, "b3", &[2]).await?;
    clock.set(start.plus(MINUTE * 10));
    visitor.refused("seat_booking.confirm", &id("b3"), json!({}), None, Code::Expired).await?;
    hold(&visitor, "b4", &[2]).await?;
    clock.set(start);
    visitor.refused("seat_booking.confirm", &id("b3"), json!({}), None, Code::Expired).await?;
    visitor.refused("seat_booking.hold", &[], wanted("b5", &[2]), None, Code::Held).await?;
    visitor.done("seat_booking.confirm", &id("b4"), json!({}), None).await?;
    clock.set(start.plus(MINUTE * 60));
    same("nothing is left to sweep", &visitor.drain_workers().await?, &0)?;
    for (booking, state) in [("b1", "CONFIRMED"), ("b3", "EXPIRED"), ("b4", "CONFIRMED")] {
        visitor.shows("seat_booking", &id(booking), &json!({"state": state})).await?;
    }
    check_rows(&visitor).await
}

async fn extensions_are_bounded(lab: &dyn Lab) -> Result<()> {
    let (visitor, clock) = gala(lab, 1).await?;
    hold(&visitor, "b1", &[1]).await?;
    clock.advance(MINUTE * 8);
    visitor.done("seat_booking.extend", &id("b1"), json!({}), None).await?;
    clock.advance(MINUTE * 8);
    // Sixteen minutes old, it would end after twenty-six.
    let refusal = visitor.refused("seat_booking.extend", &id("b1"), json!({}), None, Code::Expired).await?;
    ensure!(refusal.message.contains("20 min"), "{refusal}");
    visitor.shows("seat", &seat(1), &json!({"state": "HELD"})).await?;
    clock.advance(MINUTE * 2);
    visitor.shows("seat", &seat(1), &json!({"state": "AVAILABLE"})).await?;
    Ok(())
}

async fn cancelling_frees_the_units(lab: &dyn Lab) -> Result<()> {
    let (visitor, clock) = gala(lab, 2).await?;
    hold(&visitor, "b1", &[1, 2]).await?;
    shows(
        &visitor.done("seat_booking.cancel", &id("b1"), json!({}), None).await?,
        &json!({"state": "CANCELLED"}),
    )?;
    hold(&visitor, "b2", &[1]).await?;
    // What is over and not swept can be given up as well.
    clock.advance(MINUTE * 11);
    visitor.done("seat_booking.cancel", &id("b2"), json!({}), None).await?;
    visitor.refused("seat_booking.confirm", &id("b2"), json!({}), None, Code::WrongState).await?;
    check_rows(&visitor).await
}

async fn the_sweeper_frees_what_is_over(lab: &dyn Lab) -> Result<()> {
    let (visitor, clock) = gala(lab, 4).await?;
    let other = visitor.for_tenant("zeta")?;
    other.done("seat.create", &[], json!({"event_id": "gala", "seat_no": 1}), None).await?;
    hold(&visitor, "b1", &[1, 2]).await?;
    hold(&other, "b1", &[1]).await?;
    clock.advance(MINUTE * 5);
    hold(&visitor, "b2", &[3]).await?;
    same("swept too early", &visitor.drain_workers().await?, &0)?;
    clock.advance(MINUTE * 5);
    same("bookings of two tenants", &visitor.drain_workers().await?, &2)?;
    visitor.shows("seat_booking", &id("b1"), &json!({"state": "EXPIRED"})).await?;
    other.shows("seat_booking", &id("b1"), &json!({"state": "EXPIRED"})).await?;
    visitor.shows("seat_booking", &id("b2"), &json!({"state": "IN_PROGRESS"})).await?;
    visitor.done("seat_booking.cancel", &id("b2"), json!({}), None).await?;
    clock.advance(MINUTE * 60);
    same("swept once", &visitor.drain_workers().await?, &0)?;
    check_rows(&visitor).await?;
    check_rows(&other).await
}

/// Calls two actions of one booking at once, and returns which of them were done.
async fn race(visitor: &Visitor, booking: &str, actions: [&str; 2]) -> Result<[bool; 2]> {
    let start = |action: &str| -> JoinHandle<Result<Answer, Refusal>> {
        let (visitor, action, key) = (visitor.clone(), format!("seat_booking.{action}"), id(booking));
        tokio::spawn(async move { visitor.call(&action, &key, json!({}), None).await })
    };
    let [first, second] = actions.map(start);
    Ok([first.await?.is_ok(), second.await?.is_ok()])
}

async fn confirm_and_sweep_have_one_winner(lab: &dyn Lab) -> Result<()> {
    let (visitor, clock) = gala(lab, 8).await?;
    for number in 1..=8 {
        let booking = format!("b{number}");
        hold(&visitor, &booking, &[number]).await?;
        // Just before the end, at it, and after it.
        clock.advance(MINUTE * 10 - Duration::from_millis(1) + Duration::from_millis(number as u64 % 3));
        let done = race(&visitor, &booking, ["confirm", "expire"]).await?;
        ensure!(done[0] != done[1], "of confirm and expire {done:?} were done");
        same("whether it could be confirmed", &done[0], &(number % 3 == 0))?;
    }
    check_rows(&visitor).await
}

async fn cancel_and_confirm_have_one_winner(lab: &dyn Lab) -> Result<()> {
    let (visitor, _) = gala(lab, 8).await?;
    for number in 1..=8 {
        let booking = format!("b{number}");
        hold(&visitor, &booking, &[number]).await?;
        let done = race(&visitor, &booking, ["cancel", "confirm"]).await?;
        ensure!(done[0] != done[1], "of cancel and confirm {done:?} were done");
    }
    check_rows(&visitor).await
}

async fn the_best_units_are_side_by_side(lab: &dyn Lab) -> Result<()> {
    let (visitor, _) = gala(lab, 6).await?;
    hold(&visitor, "b1", &[2]).await?;
    let best = |booking: &str, count: u64| json!({"booking_id": booking, "event_id": "gala", "count": count, "holder": "bob"});
    let held = visitor.done("seat_booking.hold", &[], best("b2", 3), None).await?;
    let units: Vec<i64> =
        held.body["units"].as_array().into_iter().flatten().filter_map(Json::as_i64).collect();
    ensure!(units == [3, 4, 5] || units == [4, 5, 6], "three side by side, got {units:?}");
    // Two are left, apart from one another.
    let held = visitor.done("seat_booking.hold", &[], best("b3", 2), None).await?;
    same("what is left", &held.body["units"].as_array().map(Vec::len), &Some(2))?;
    visitor.refused("seat_booking.hold", &[], best("b4", 1), None, Code::Held).await?;
    check_rows(&visitor).await
}

async fn many_buyers_never_share_a_unit(lab: &dyn Lab) -> Result<()> {
    // Whoever lost a race pauses, so the clock has to go by itself.
    let visitor = Visitor::open(lab, BLUEPRINT).await?;
    offer(&visitor, 12).await?;
    let buyers = (0..24).map(|buyer| {
        let visitor = visitor.clone();
        tokio::spawn(async move {
            let booking = format!("b{buyer}");
            // Half of them name what they want, and want the same; the others take what is best.
            let input = if buyer % 2 == 0 {
                wanted(&booking, &[1 + buyer % 6, 7 + buyer % 6])
            } else {
                json!({"booking_id": booking, "event_id": "gala", "count": 1, "holder": "bob"})
            };
            let held = visitor.call("seat_booking.hold", &[], input, None).await;
            match held {
                Ok(_) if buyer % 3 == 0 => {
                    visitor.call("seat_booking.cancel", &id(&booking), json!({}), None).await
                }
                Ok(_) => visitor.call("seat_booking.confirm", &id(&booking), json!({}), None).await,
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
    ensure!(bought > 0, "nobody bought anything");
    let records = whole_log(visitor.house.store().as_ref()).await?;
    ensure!(
        records.iter().all(|record| record.status == OperationStatus::Applied),
        "an operation was given up"
    );
    check_rows(&visitor).await
}

async fn bookings_are_listed_by_holder(lab: &dyn Lab) -> Result<()> {
    let (visitor, clock) = gala(lab, 3).await?;
    for number in 1..=3 {
        hold(&visitor, &format!("b{number}"), &[number]).await?;
        clock.advance(Duration::from_secs(1));
    }
    // An index may lag behind the rows.
    for _ in 0..LOOKS_MAX {
        if listed(&visitor).await? == ["b3", "b2", "b1"] {
            return Ok(());
        }
        pause().await;
    }
    same("newest first", &listed(&visitor).await?, &["b3", "b2", "b1"].map(str::to_owned).to_vec())
}

/// The ids of ann's bookings, read by pages.
async fn listed(visitor: &Visitor) -> Result<Vec<String>> {
    let (mut ids, mut cursor) = (Vec::new(), None);
    loop {
        let mut input = json!({"holder": "ann", "limit": 2});
        if let Some(cursor) = cursor {
            input["cursor"] = Json::String(cursor);
        }
        let page = visitor.done("seat_booking.list", &[], input, None).await?;
        let rows = page.body.as_array().into_iter().flatten();
        ids.extend(rows.filter_map(|row| row["booking_id"].as_str().map(str::to_owned)));
        cursor = page.next;
        if cursor.is_none() {
            return Ok(ids);
        }
    }
}

async fn bookings_of_tenants_are_apart(lab: &dyn Lab) -> Result<()> {
    let (visitor, _) = gala(lab, 1).await?;
    let other = visitor.for_tenant("zeta")?;
    hold(&visitor, "b1", &[1]).await?;
    other.refused("seat_booking.read", &id("b1"), json!({}), None, Code::NotFound).await?;
    other.refused("seat_booking.confirm", &id("b1"), json!({}), None, Code::NotFound).await?;
    other.refused("seat_booking.hold", &[], wanted("b1", &[1]), None, Code::NotFound).await?;
    other.refused("seat.read", &seat(1), json!({}), None, Code::NotFound).await?;
    Ok(())
}

async fn what_was_bought_is_not_swept(lab: &dyn Lab) -> Result<()> {
    let (visitor, clock) = gala(lab, 3).await?;
    for (booking, unit) in [("b1", 1), ("b2", 2), ("b3", 3)] {
        hold(&visitor, booking, &[unit]).await?;
    }
    visitor.done("seat_booking.confirm", &id("b1"), json!({}), None).await?;
    visitor.done("seat_booking.cancel", &id("b2"), json!({}), None).await?;
    // Long after the end that it had as a hold.
    clock.advance(MINUTE * 60);
    visitor.done("seat_booking.expire", &id("b3"), json!({}), None).await?;
    for booking in ["b1", "b2", "b3"] {
        for action in ["seat_booking.expire", "seat_booking.extend", "seat_booking.confirm"] {
            let refused = visitor.call(action, &id(booking), json!({}), None).await;
            ensure!(refused.is_err(), "{action} of {booking}, which is over: {refused:?}");
        }
    }
    visitor.refused("seat_booking.hold", &[], wanted("b4", &[1]), None, Code::WrongState).await?;
    visitor.shows("seat", &seat(1), &json!({"state": "SOLD", "booking_id": "b1"})).await?;
    check_rows(&visitor).await
}

async fn a_booking_that_was_extended_meanwhile_is_not_swept(lab: &dyn Lab) -> Result<()> {
    let clock = Arc::new(ManualClock::at(Time::from_millis(1_800_000_000_000)));
    let store = lab.open_at(clock.clone()).await?;
    let visitor = Visitor::over(store.clone(), BLUEPRINT, clock.clone()).await?;
    offer(&visitor, 4).await?;
    for (booking, unit, action) in [("b1", 1, "confirm"), ("b2", 2, "cancel"), ("b3", 3, "extend")] {
        hold(&visitor, booking, &[unit]).await?;
        clock.advance(MINUTE * 9);
        // The sweeper's clock is ahead: it reads the booking as due, and then the booking goes on without it.
        let ahead = SkewedClock::over(clock.clone());
        ahead.skew(3_600_000_000);
        let meanwhile = Arc::new(Meanwhile::default());
        let slow = Visitor::over(
            Arc::new(Around::new(store.clone(), meanwhile.clone())),
            BLUEPRINT,
            Arc::new(ahead),
        );
        let slow = slow.await?;
        meanwhile.next({
            let (visitor, action, clock) = (visitor.clone(), format!("seat_booking.{action}"), clock.clone());
            async move {
                drop(visitor.call(&action, &id(booking), json!({}), None).await);
                clock.advance(MINUTE * 2);
            }
        });
        slow.work(7).await?;
    }
    for (booking, state) in [("b1", "CONFIRMED"), ("b2", "CANCELLED"), ("b3", "IN_PROGRESS")] {
        visitor.shows("seat_booking", &id(booking), &json!({"state": state})).await?;
    }
    check_rows(&visitor).await
}

async fn a_hold_that_is_over_is_taken_once(lab: &dyn Lab) -> Result<()> {
    let clock = Arc::new(ManualClock::at(Time::from_millis(1_800_000_000_000)));
    let store = lab.open_at(clock.clone()).await?;
    let visitor = Visitor::over(store.clone(), BLUEPRINT, clock.clone()).await?;
    offer(&visitor, 3).await?;
    hold(&visitor, "b1", &[1, 2]).await?;
    let drafted = async |visitor: &Visitor, booking: &str| {
        let request = Visitor::request("seat_booking.hold", &[], &wanted(booking, &[1]), None);
        visitor.house.plan(&visitor.tenant, request).await?.context("there is nothing to write")
    };
    let refused = async |plan: &Plan| {
        let outcome = store.commit(plan).await?;
        ensure!(matches!(outcome, Commit::Refused(_)), "a unit was taken from its holder: {outcome:?}");
        Ok(())
    };
    // For a buyer whose clock is ahead it is over; for the store it is not.
    let ahead = SkewedClock::over(clock.clone());
    ahead.skew(3_600_000_000);
    let early = Visitor::over(store.clone(), BLUEPRINT, Arc::new(ahead)).await?;
    refused(&drafted(&early, "b2").await?).await?;
    check_rows(&visitor).await?;
    // It is over for two buyers, and one of them is faster.
    clock.advance(MINUTE * 10);
    let plan = drafted(&visitor, "b2").await?;
    hold(&visitor, "b3", &[1]).await?;
    refused(&plan).await?;
    check_rows(&visitor).await?;
    // The faster one's hold is over as well, and belongs to somebody else than the slower one saw.
    clock.advance(MINUTE * 10);
    refused(&plan).await?;
    hold(&visitor, "b4", &[1]).await?;
    check_rows(&visitor).await
}

async fn rows_that_do_not_agree_are_not_made_worse(lab: &dyn Lab) -> Result<()> {
    let (visitor, clock) = gala(lab, 2).await?;
    let client = visitor.client()?;
    let (seats, bookings) = (visitor.table("seats")?.clone(), visitor.table("seat_bookings")?.clone());
    // Somebody writes past the actions. Nobody should, and if somebody does, no third loses by it.
    let write = async |step: Step| client.apply(client.one(step)).await.map(drop);
    let on_seat = || Step::update(&seats, seat(1));
    let on_booking = || Step::update(&bookings, id("b1"));
    hold(&visitor, "b1", &[1, 2]).await?;
    let end = clock.now().plus(MINUTE * 10);
    let draft = async |action: &str| {
        visitor.drafted(&format!("seat_booking.{action}"), &id("b1"), json!({}), None).await
    };
    let plans = [draft("confirm").await?, draft("extend").await?, draft("cancel").await?];
    write(on_seat().set("booking_id", "other")).await?;
    for plan in &plans {
        visitor.too_late(plan).await?;
    }
    clock.advance(MINUTE * 10);
    visitor.too_late(&draft("expire").await?).await?;
    visitor.work(7).await?;
    // Whoever takes the second seat would free the first.
    let rest = visitor.drafted("seat_booking.hold", &[], wanted("b2", &[2]), None).await?;
    visitor.too_late(&rest).await?;
    same("whose it is", &client.row(&seats, seat(1)).await?.text("booking_id"), &Some("other"))?;
    write(on_seat().set("booking_id", "b1")).await?;
    // A seat is taken over if both its row and the booking say that its time is up, and that it is theirs.
    let taken = visitor.drafted("seat_booking.hold", &[], wanted("b2", &[1]), None).await?;
    let later = end.plus(MINUTE);
    for (wrong, right) in [
        (on_seat().set("booking_id", "other"), on_seat().set("booking_id", "b1")),
        (on_seat().set("hold_expires_at", later), on_seat().set("hold_expires_at", end)),
        (on_booking().set("state", "CONFIRMED"), on_booking().set("state", "IN_PROGRESS")),
        (on_booking().set("expires_at", later), on_booking().set("expires_at", end)),
    ] {
        write(wrong).await?;
        visitor.too_late(&taken).await?;
        write(right).await?;
    }
    hold(&visitor, "b2", &[1]).await?;
    visitor.shows("seat_booking", &id("b1"), &json!({"state": "EXPIRED"})).await?;
    invariants::check_rows(&visitor.scope("seat")).await
}

async fn a_unit_that_is_gone_is_not_made_up(lab: &dyn Lab) -> Result<()> {
    let (visitor, clock) = gala(lab, 5).await?;
    let (client, seats) = (visitor.client()?, visitor.table("seats")?.clone());
    // Somebody deletes a unit past the actions.
    let delete =
        async |number: i64| client.apply(client.one(Step::delete(&seats, seat(number)))).await.map(drop);
    let taken = async |booking: &str, number: i64| {
        visitor.drafted("seat_booking.hold", &[], wanted(booking, &[number]), None).await
    };
    hold(&visitor, "b1", &[1]).await?;
    hold(&visitor, "b2", &[2]).await?;
    hold(&visitor, "b3", &[3, 4]).await?;
    let mut plans = vec![taken("b5", 5).await?];
    for action in ["confirm", "extend", "cancel"] {
        plans.push(visitor.drafted(&format!("seat_booking.{action}"), &id("b1"), json!({}), None).await?);
    }
    delete(5).await?;
    delete(1).await?;
    clock.advance(MINUTE * 10);
    plans.push(visitor.drafted("seat_booking.expire", &id("b1"), json!({}), None).await?);
    // One takes a unit over, and one takes its neighbour, which frees it.
    plans.extend([taken("b6", 2).await?, taken("b7", 4).await?]);
    delete(2).await?;
    delete(3).await?;
    for plan in &plans {
        visitor.too_late(plan).await?;
    }
    visitor.work(7).await?;
    for number in [1, 2, 3, 5] {
        same("what is gone", &client.find(&seats, seat(number)).await?, &None)?;
    }
    Ok(())
}

/// What names the Redis server of the tests.
const REDIS: &str = "STATEHOUSE_TEST_REDIS";

/// A house whose holds are leases in a real Redis, under keys of its own, with so many seats.
async fn leased_gala(lab: &dyn Lab, seats: i64, hold_for: &str) -> Result<(Visitor, Arc<dyn Holds>)> {
    let url =
        std::env::var(REDIS).with_context(|| format!("{REDIS} is not set; run scripts/verify tests"))?;
    let text = BLUEPRINT.replace("hold_for  = \"10m\"", &format!("hold_for  = \"{hold_for}\""));
    let blueprint =
        Blueprint::read("statehouse.toml", &format!("{text}holds = \"redis\"\nrefundable = true\n"))?;
    let clock = Arc::new(SystemClock);
    let ids = Ids::new(clock.clone(), Random::from_entropy());
    let holds = statehouse::engine::open_holds(&url, &format!("drill-{}", ids.next())).await?;
    let house = House::with(lab.open().await?, &blueprint, clock, ids)?.with_holds(holds.clone());
    house.migrate(Migrate::Apply).await?;
    let visitor = Visitor { house: Arc::new(house), tenant: Tenant::new("acme")? };
    offer(&visitor, seats).await?;
    Ok((visitor, holds))
}

/// The name under which a seat of the gala is held.
fn lease_of(number: i64) -> String {
    format!("{{acme/seat/gala}}/{number}")
}

async fn a_leased_unit_is_held_confirmed_and_sold(lab: &dyn Lab) -> Result<()> {
    let (visitor, holds) = leased_gala(lab, 3, "10m").await?;
    hold(&visitor, "b1", &[1, 2]).await?;
    visitor.shows("seat", &seat(1), &json!({"state": "HELD", "booking_id": "b1"})).await?;
    let stored = visitor.client()?.row(visitor.table("seats")?, seat(1)).await?;
    same("the stored state", &stored.text("state"), &Some("AVAILABLE"))?;
    let leases = holds.look(&[lease_of(1), lease_of(3)]).await?;
    same("the lease", &leases.iter().map(Option::is_some).collect::<Vec<_>>(), &vec![true, false])?;
    let free =
        visitor.done("seat.list", &[], json!({"event_id": "gala", "state": "AVAILABLE"}), None).await?;
    same("the free seats", &free.body.as_array().map(Vec::len), &Some(1))?;
    visitor.refused("seat_booking.hold", &[], wanted("b2", &[2]), None, Code::Held).await?;
    visitor.done("seat_booking.confirm", &id("b1"), json!({}), None).await?;
    visitor.shows("seat", &seat(1), &json!({"state": "SOLD", "booking_id": "b1"})).await?;
    // Also when the lease is gone, a unit that was sold is not held again.
    holds.release(&[lease_of(1), lease_of(2)], "b1").await?;
    visitor.refused("seat_booking.hold", &[], wanted("b3", &[2]), None, Code::WrongState).await?;
    same("the lease that was given back", &holds.look(&[lease_of(2)]).await?, &vec![None])?;
    visitor.refused("seat_booking.hold", &[], wanted("b3", &[9]), None, Code::NotFound).await?;
    Ok(())
}

async fn leased_holds_are_all_or_nothing_and_end(lab: &dyn Lab) -> Result<()> {
    let (visitor, holds) = leased_gala(lab, 3, "1s").await?;
    hold(&visitor, "b1", &[2]).await?;
    visitor.refused("seat_booking.hold", &[], wanted("b2", &[1, 2, 3]), None, Code::Held).await?;
    let none = holds.look(&[lease_of(1), lease_of(3)]).await?;
    ensure!(none.iter().all(Option::is_none), "a refused hold left {none:?}");
    // Asking again does not prolong it.
    visitor.refused("seat_booking.hold", &[], wanted("b1", &[2]), None, Code::AlreadyExists).await?;
    for _ in 0..LOOKS_MAX {
        if holds.look(&[lease_of(2)]).await?.iter().all(Option::is_none) {
            break;
        }
        pause().await;
    }
    visitor.shows("seat", &seat(2), &json!({"state": "AVAILABLE", "booking_id": null})).await?;
    hold(&visitor, "b2", &[2]).await?;
    for _ in 0..LOOKS_MAX {
        visitor.drain_workers().await?;
        if visitor.shown("seat_booking", &id("b1"), &["state"]).await? == [json!("EXPIRED")] {
            visitor.refused("seat_booking.confirm", &id("b1"), json!({}), None, Code::Expired).await?;
            return Ok(());
        }
        pause().await;
    }
    anyhow::bail!("nobody expired the booking whose time was up")
}

async fn leases_are_extended_within_bounds(lab: &dyn Lab) -> Result<()> {
    let (visitor, holds) = leased_gala(lab, 2, "15m").await?;
    hold(&visitor, "b1", &[1]).await?;
    let left = |leases: Vec<Option<Hold>>| leases.into_iter().flatten().next().map(|hold| hold.left);
    // All but a minute of it passes for the lease.
    holds.extend(&[lease_of(1)], "b1", MINUTE).await?;
    visitor.done("seat_booking.extend", &id("b1"), json!({}), None).await?;
    let extended = left(holds.look(&[lease_of(1)]).await?).context("the lease is gone")?;
    ensure!(extended > 10 * MINUTE && extended <= 15 * MINUTE, "the lease has {extended:?} left");
    holds.release(&[lease_of(1)], "b1").await?;
    visitor.refused("seat_booking.extend", &id("b1"), json!({}), None, Code::Expired).await?;
    hold(&visitor, "b2", &[2]).await?;
    visitor.done("seat_booking.cancel", &id("b2"), json!({}), None).await?;
    same("the lease of a cancelled booking", &holds.look(&[lease_of(2)]).await?, &vec![None])?;
    hold(&visitor, "b3", &[2]).await.map(drop)
}

/// Redis forgets everything while two buyers are at the checkout.
async fn a_lost_lease_sells_nothing_twice(lab: &dyn Lab) -> Result<()> {
    let (visitor, holds) = leased_gala(lab, 2, "10m").await?;
    hold(&visitor, "b1", &[1, 2]).await?;
    holds.release(&[lease_of(1), lease_of(2)], "b1").await?;
    hold(&visitor, "b2", &[2]).await?;
    visitor.done("seat_booking.confirm", &id("b2"), json!({}), None).await?;
    visitor.refused("seat_booking.confirm", &id("b1"), json!({}), None, Code::WrongState).await?;
    visitor.shows("seat", &seat(1), &json!({"state": "AVAILABLE"})).await?;
    visitor.shows("seat", &seat(2), &json!({"state": "SOLD", "booking_id": "b2"})).await?;
    visitor.shows("seat_booking", &id("b1"), &json!({"state": "IN_PROGRESS"})).await
}

async fn holds_from_before_they_were_leases_end(lab: &dyn Lab) -> Result<()> {
    let (visitor, _) = leased_gala(lab, 3, "10m").await?;
    let (client, seats) = (visitor.client()?, visitor.table("seats")?.clone());
    // The units' rows still say whose they were: the buyer's own, or somebody's whose time is up.
    for (number, booking, owner, until) in [(1, "b1", "b1", now_plus(MINUTE)), (2, "b2", "old", now())] {
        hold(&visitor, booking, &[number]).await?;
        let held = Step::update(&seats, seat(number)).set("state", "HELD").set("booking_id", owner);
        client.apply(client.one(held.set("hold_expires_at", until))).await?;
        visitor.done("seat_booking.confirm", &id(booking), json!({}), None).await?;
        visitor.shows("seat", &seat(number), &json!({"state": "SOLD", "booking_id": booking})).await?;
    }
    // What is gone is not sold.
    hold(&visitor, "b3", &[3]).await?;
    client.apply(client.one(Step::delete(&seats, seat(3)))).await?;
    ensure!(visitor.call("seat_booking.confirm", &id("b3"), json!({}), None).await.is_err(), "it was sold");
    same("what is gone", &client.find(&seats, seat(3)).await?, &None)
}

async fn a_leased_booking_is_refunded_whole(lab: &dyn Lab) -> Result<()> {
    let (visitor, _) = leased_gala(lab, 2, "10m").await?;
    hold(&visitor, "b1", &[1, 2]).await?;
    visitor.done("seat_booking.confirm", &id("b1"), json!({}), None).await?;
    visitor.done("seat_booking.cancel", &id("b1"), json!({}), None).await?;
    for number in [1, 2] {
        let stored = visitor.client()?.row(visitor.table("seats")?, seat(number)).await?;
        same("the stored state", &stored.text("state"), &Some("AVAILABLE"))?;
    }
    Ok(())
}

async fn many_buyers_with_leases_never_share_a_unit(lab: &dyn Lab) -> Result<()> {
    let (visitor, _) = leased_gala(lab, 8, "10m").await?;
    let buyers: Vec<JoinHandle<bool>> = (0..24)
        .map(|buyer| {
            let visitor = visitor.clone();
            tokio::spawn(async move {
                let booking = format!("b{buyer}");
                let input = match buyer % 3 {
                    0 => wanted(&booking, &[buyer % 8 + 1]),
                    _ => json!({"booking_id": booking, "event_id": "gala", "count": 1, "holder": "ann"}),
                };
                let held = visitor.call("seat_booking.hold", &[], input, None).await.is_ok();
                held && visitor.call("seat_booking.confirm", &id(&booking), json!({}), None).await.is_ok()
            })
        })
        .collect();
    let mut sold = 0;
    for buyer in buyers {
        sold += usize::from(buyer.await?);
    }
    let store = visitor.house.store();
    let seats = store.scan(&Scan::of(visitor.table("seats")?, &visitor.tenant)).await?.rows;
    let owners: BTreeSet<&str> = seats.iter().filter_map(|row| row.text("booking_id")).collect();
    let taken = seats.iter().filter(|row| row.text("state") == Some("SOLD")).count();
    same("seats sold and their buyers", &(taken, owners.len()), &(sold, sold))?;
    ensure!(sold >= 4, "only {sold} of 8 seats were sold to 24 buyers");
    Ok(())
}
