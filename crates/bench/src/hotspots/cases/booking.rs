//! Hotspots of `booking`: many buyers at one event, and many holds that end at once.

use anyhow::{Context as _, Result};
use serde_json::{Value as Json, json};
use statehouse::{Code, Request};

use super::super::case::{CaseFigures, Compares, HotspotCase, Side, Trial};
use crate::site::{Tenancy, request};

const BLUEPRINT: &str = "
[booking.seat]
key = { event_id = \"int\", seat_no = \"int\" }
SETTINGS
";

const CASE: HotspotCase = HotspotCase {
    archetype: "booking",
    hotspot: "",
    operation: "one of 16 buyers holds any free seat of one event",
    compares: Compares::Switch,
    blueprint: BLUEPRINT,
    sides: [Side::level("a free seat is looked for and named", 0), Side::level("count = 1", 1)],
    operations: 400,
    callers: 16,
    workload: |trial| Box::pin(any_seat(trial)),
};

pub(super) const CASES: &[HotspotCase] = &[
    HotspotCase { hotspot: "hot hold key", ..CASE },
    HotspotCase {
        hotspot: "hold storms",
        operation: "a buyer holds and buys a seat of its own at one event",
        compares: Compares::Load,
        sides: [Side::level("1 buyer", 1), Side::level("64 buyers", 64)],
        operations: 1_600,
        workload: |trial| {
            let buyers = trial.side.level;
            Box::pin(own_seats(trial.with_callers(buyers), 1))
        },
        ..CASE
    },
    HotspotCase {
        hotspot: "expiry scan pressure",
        operation: "an expired booking is swept",
        blueprint: "
[booking.seat]
key      = { event_id = \"int\", seat_no = \"int\" }
hold_for = \"1ms\"
SETTINGS
",
        sides: [Side::settings("shards = 1"), Side::settings("shards = 16")],
        operations: 4_000,
        workload: |trial| Box::pin(sweep(trial)),
        ..CASE
    },
    HotspotCase {
        hotspot: "hold-store contention",
        operation: "one of 64 buyers holds and buys a seat of its own",
        compares: Compares::Load,
        sides: [Side::level("64 events", 64), Side::level("1 event", 1)],
        operations: 3_200,
        callers: 64,
        workload: |trial| {
            let events = trial.side.level;
            Box::pin(own_seats(trial, events))
        },
        ..CASE
    },
];

fn offer(event: u64, seat: u64) -> Request {
    request("seat.create", vec![], json!({"event_id": event, "seat_no": seat}))
}

fn hold(booking: u64, event: u64, what: (&str, Json)) -> Request {
    let mut input = json!({"booking_id": booking.to_string(), "event_id": event, "holder": "a buyer"});
    if let Some(input) = input.as_object_mut() {
        input.insert(what.0.to_owned(), what.1);
    }
    request("seat_booking.hold", vec![], input)
}

/// As many seats as operations, and as many again so that no caller waits for the last one.
async fn any_seat(trial: Trial) -> Result<CaseFigures> {
    trial.fill((0..2 * trial.operations).map(|seat| offer(0, seat))).await?;
    let chooses = trial.side.level == 1;
    trial
        .measure_each(move |house, number| async move {
            loop {
                let wish = if chooses {
                    ("count", json!(1))
                } else {
                    ("seat_no", json!([free_seat(&house).await?]))
                };
                match house.send(hold(number, 0, wish)).await {
                    Ok(_) => return Ok(()),
                    Err(refusal) if matches!(refusal.code, Code::Held | Code::Contended) => {}
                    Err(refusal) => return Err(refusal.into()),
                }
            }
        })
        .await
}

/// The first seat that a list shows as free. Pages are filtered after they are read, so the first ones may be empty.
async fn free_seat(house: &Tenancy) -> Result<Json> {
    let mut input = json!({"event_id": 0, "state": "AVAILABLE", "limit": 100});
    loop {
        let page = house.call("seat.list", vec![], input).await?;
        if let Some(seat) = page.body.get(0).and_then(|seat| seat.get("seat_no")) {
            return Ok(seat.clone());
        }
        let next = page.next.context("no seat is free")?;
        input = json!({"event_id": 0, "state": "AVAILABLE", "limit": 100, "cursor": next});
    }
}

/// Each operation holds and buys a seat that no other operation wants, spread over so many events.
async fn own_seats(trial: Trial, events: u64) -> Result<CaseFigures> {
    trial.fill((0..trial.operations).map(|seat| offer(seat % events, seat))).await?;
    trial
        .measure_each(move |house, seat| async move {
            house.send(hold(seat, seat % events, ("seat_no", json!([seat])))).await?;
            let booking = seat.to_string();
            house.call("seat_booking.confirm", vec![booking.as_str().into()], Json::Null).await?;
            Ok(())
        })
        .await
}

async fn sweep(trial: Trial) -> Result<CaseFigures> {
    trial.fill((0..trial.operations).map(|seat| offer(0, seat))).await?;
    trial.fill((0..trial.operations).map(|seat| hold(seat, 0, ("seat_no", json!([seat]))))).await?;
    trial.measure_worker("seat_booking.expire", trial.operations, trial.operations).await
}
