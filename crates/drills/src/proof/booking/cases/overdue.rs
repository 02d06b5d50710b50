//! Bookings that keep their units when their time is up, and holders of any type.

use std::sync::Arc;

use anyhow::{Result, ensure};
use serde_json::{Value as Json, json};
use statehouse::{Answer, Blueprint, Code};
use statehouse_store::{ManualClock, Time, Value};

use super::{BLUEPRINT, LOOKS_MAX, MINUTE, check_rows, hold, id, names, offer, race, seat, told, wanted};
use crate::harness::engines::TestNamespace;
use crate::harness::store_client::{pause, same};
use crate::harness::tenant_client::{TenantClient, shows};

/// The blueprint of the other cases, with bookings that become overdue.
fn overdue_blueprint() -> String {
    format!("{BLUEPRINT}on_expiry = \"overdue\"\n")
}

async fn library(namespace: &dyn TestNamespace, seats: i64) -> Result<(TenantClient, Arc<ManualClock>)> {
    let clock = Arc::new(ManualClock::at(Time::from_millis(1_800_000_000_000)));
    let client = TenantClient::open_at(namespace, &overdue_blueprint(), clock.clone()).await?;
    offer(&client, seats).await?;
    Ok((client, clock))
}

async fn act(client: &TenantClient, action: &str, booking: &str) -> Result<Answer> {
    client.done(&format!("seat_booking.{action}"), &id(booking), json!({}), None).await
}

pub(super) async fn an_overdue_booking_keeps_its_units(namespace: &dyn TestNamespace) -> Result<()> {
    let (client, clock) = library(namespace, 4).await?;
    hold(&client, "b1", &[1, 2]).await?;
    hold(&client, "b2", &[3]).await?;
    client.refused("seat_booking.expire", &id("b1"), json!({}), None, Code::WrongState).await?;
    same("swept too early", &client.drain_workers().await?, &0)?;
    clock.advance(MINUTE * 10);
    // Before and after the server has marked it, it is the holder's.
    for swept in [0, 2] {
        client.shows("seat", &seat(1), &json!({"state": "HELD", "booking_id": "b1"})).await?;
        client.refused("seat_booking.hold", &[], wanted("b9", &[1]), None, Code::Held).await?;
        client.refused("seat_booking.extend", &id("b1"), json!({}), None, Code::Expired).await?;
        let best = json!({"booking_id": "b9", "event_id": "gala", "count": 2, "holder": "bob"});
        client.refused("seat_booking.hold", &[], best, None, Code::Held).await?;
        for action in ["retire", "delete"] {
            client.refused(&format!("seat.{action}"), &seat(1), json!({}), None, Code::Held).await?;
        }
        same("bookings that were marked", &client.drain_workers().await?, &(2 - swept))?;
    }
    client.shows("seat_booking", &id("b1"), &json!({"state": "OVERDUE", "version": 2})).await?;
    client.refused("seat_booking.expire", &id("b1"), json!({}), None, Code::WrongState).await?;
    shows(&act(&client, "cancel", "b1").await?, &json!({"state": "CANCELLED"}))?;
    client.shows("seat", &seat(1), &json!({"state": "AVAILABLE", "booking_id": null})).await?;
    shows(&act(&client, "confirm", "b2").await?, &json!({"state": "CONFIRMED"}))?;
    client.shows("seat", &seat(3), &json!({"state": "SOLD", "booking_id": "b2"})).await?;
    hold(&client, "b3", &[1, 2]).await?;
    client.store_client()?.log(4 + 7).await?;
    same("what is told", &told(&client, "b1").await?, &names(&["held", "overdue", "cancelled"]))?;
    same("what is told", &told(&client, "b2").await?, &names(&["held", "overdue", "confirmed"]))?;
    check_rows(&client).await
}

/// A booking whose time is up and that the server has not marked yet can be extended no more, and be given back or bought.
pub(super) async fn what_is_up_can_be_given_back_before_it_is_marked(
    namespace: &dyn TestNamespace,
) -> Result<()> {
    let (client, clock) = library(namespace, 2).await?;
    hold(&client, "b1", &[1]).await?;
    hold(&client, "b2", &[2]).await?;
    let mut plans = Vec::new();
    for booking in ["b1", "b2"] {
        for action in ["confirm", "cancel", "extend"] {
            plans.push(
                client.drafted(&format!("seat_booking.{action}"), &id(booking), json!({}), None).await?,
            );
        }
    }
    clock.advance(MINUTE * 10);
    plans.push(client.drafted("seat_booking.expire", &id("b1"), json!({}), None).await?);
    act(&client, "confirm", "b1").await?;
    act(&client, "cancel", "b2").await?;
    for plan in &plans {
        client.too_late(plan).await?;
    }
    same("what is left to mark", &client.drain_workers().await?, &0)?;
    client.shows("seat_booking", &id("b1"), &json!({"state": "CONFIRMED"})).await?;
    check_rows(&client).await
}

pub(super) async fn marking_and_giving_back_go_one_way(namespace: &dyn TestNamespace) -> Result<()> {
    let (client, clock) = library(namespace, 8).await?;
    for number in 1..=8 {
        let booking = format!("b{number}");
        hold(&client, &booking, &[number]).await?;
        clock.advance(MINUTE * 10);
        let action = if number % 2 == 0 { "cancel" } else { "confirm" };
        let [_, given] = race(&client, &booking, ["expire", action]).await?;
        ensure!(given, "{action} of {booking} was refused");
        let state = if number % 2 == 0 { "CANCELLED" } else { "CONFIRMED" };
        client.shows("seat_booking", &id(&booking), &json!({"state": state})).await?;
    }
    check_rows(&client).await
}

pub(super) async fn the_way_bookings_end_can_be_changed(namespace: &dyn TestNamespace) -> Result<()> {
    let clock = Arc::new(ManualClock::at(Time::from_millis(1_800_000_000_000)));
    let store = namespace.open_at(clock.clone()).await?;
    let overdue = TenantClient::over(store.clone(), &overdue_blueprint(), clock.clone()).await?;
    offer(&overdue, 4).await?;
    hold(&overdue, "b1", &[1, 2]).await?;
    clock.advance(MINUTE * 10);
    overdue.drain_workers().await?;
    // Freed at the end from now on. What is overdue is so until it is given back.
    let free = TenantClient::over(store.clone(), BLUEPRINT, clock.clone()).await?;
    free.shows("seat_booking", &id("b1"), &json!({"state": "OVERDUE"})).await?;
    free.refused("seat_booking.confirm", &id("b1"), json!({}), None, Code::WrongState).await?;
    free.refused("seat_booking.extend", &id("b1"), json!({}), None, Code::Expired).await?;
    same("swept", &free.drain_workers().await?, &0)?;
    act(&free, "cancel", "b1").await?;
    hold(&free, "b2", &[1]).await?;
    hold(&free, "b3", &[2]).await?;
    clock.advance(MINUTE * 10);
    act(&free, "expire", "b2").await?;
    // And back: a hold that is over and was not taken is its holder's again.
    let overdue = TenantClient::over(store, &overdue_blueprint(), clock.clone()).await?;
    overdue.refused("seat_booking.hold", &[], wanted("b4", &[2]), None, Code::Held).await?;
    overdue.refused("seat_booking.confirm", &id("b2"), json!({}), None, Code::Expired).await?;
    same("marked", &overdue.drain_workers().await?, &1)?;
    act(&overdue, "confirm", "b3").await?;
    check_rows(&overdue).await
}

pub(super) async fn an_overdue_booking_starts_a_reaction(namespace: &dyn TestNamespace) -> Result<()> {
    let reaction = r#"
[entity.notice]
key    = { booking_id = "text" }
fields = { holder = "text", seats = "json?" }

[on.late]
event = "seat_booking.overdue"
do    = "notice.create"
input = { booking_id = "{subject}", holder = "{row.holder}" }
"#;
    let clock = Arc::new(ManualClock::at(Time::from_millis(1_800_000_000_000)));
    let text = format!("{}{reaction}", overdue_blueprint());
    let client = TenantClient::open_at(namespace, &text, clock.clone()).await?;
    offer(&client, 2).await?;
    client.drain_workers().await?;
    hold(&client, "b1", &[1]).await?;
    hold(&client, "b2", &[2]).await?;
    act(&client, "cancel", "b2").await?;
    clock.advance(MINUTE * 10);
    for _ in 0..LOOKS_MAX {
        client.drain_workers().await?;
        if client.call("notice.read", &id("b1"), json!({}), None).await.is_ok() {
            break;
        }
        pause().await;
    }
    client.shows("notice", &id("b1"), &json!({"holder": "ann", "version": 1})).await?;
    client.refused("notice.read", &id("b2"), json!({}), None, Code::NotFound).await.map(drop)
}

pub(super) async fn a_holder_has_any_type(namespace: &dyn TestNamespace) -> Result<()> {
    let kinds = [
        ("int", json!(7), json!("ann")),
        ("float", json!(7.5), json!("ann")),
        ("bool", json!(true), json!("ann")),
        ("bytes", Value::from(vec![1, 2, 255]).to_json(), json!(7)),
        ("time", json!("2026-05-01T10:00:00.000000Z"), json!("soon")),
    ];
    let mut text = "[house]\nname = \"drill\"\n".to_owned();
    for (kind, ..) in &kinds {
        text += &format!(
            "[booking.{kind}_seat]\nkey = {{ event_id = \"text\", seat_no = \"int\" }}\nholder = \"{kind}\"\n"
        );
    }
    let client = TenantClient::open(namespace, &text).await?;
    for (kind, holder, other) in kinds {
        let (units, bookings) = (format!("{kind}_seat"), format!("{kind}_seat_booking"));
        client.done(&format!("{units}.create"), &[], json!({"event_id": "gala", "seat_no": 1}), None).await?;
        let hold =
            |holder: &Json| json!({"booking_id": "b1", "event_id": "gala", "seat_no": [1], "holder": holder});
        client.refused(&format!("{bookings}.hold"), &[], hold(&other), None, Code::InvalidInput).await?;
        let held = client.done(&format!("{bookings}.hold"), &[], hold(&holder), None).await?;
        same(kind, &held.body["holder"], &holder)?;
        client.shows(&bookings, &id("b1"), &json!({"holder": holder})).await?;
        let mut found = 0;
        for _ in 0..LOOKS_MAX {
            let page = client.done(&format!("{bookings}.list"), &[], json!({"holder": holder}), None).await?;
            found = page.body.as_array().map_or(0, Vec::len);
            if found == 1 {
                break;
            }
            pause().await;
        }
        same(&format!("bookings of a holder that is {kind}"), &found, &1)?;
    }
    Ok(())
}

/// What a blueprint cannot ask for, at its line.
pub(super) async fn settings_that_contradict_each_other_are_refused(_: &dyn TestNamespace) -> Result<()> {
    for (setting, problem) in [
        ("holds = \"redis\"\non_expiry = \"overdue\"", "a hold in Redis ends by itself"),
        ("on_expiry = \"keep\"", "`on_expiry` of `booking.seat` must be \"free\" or \"overdue\""),
        ("holder = \"json\"", "`holder` of `booking.seat` must be \"text\""),
        ("holder = 7", "`holder` of `booking.seat` must be \"text\""),
    ] {
        let text = format!("{BLUEPRINT}{setting}\n");
        let blueprint = Blueprint::read("statehouse.toml", &text)?;
        let Err(problems) = statehouse::resource::declare(&blueprint) else {
            anyhow::bail!("{setting} was accepted");
        };
        let shown = problems.render(false);
        ensure!(shown.contains(problem) && shown.contains("statehouse.toml:"), "{setting}: {shown}");
    }
    Ok(())
}
