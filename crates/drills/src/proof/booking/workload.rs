//! A08 in simulation: buyers who hold, extend, confirm and give up more than there is, and the sweeper.

use std::collections::BTreeMap;

use anyhow::{Context, Result, ensure};
use serde_json::{Value as Json, json};
use statehouse::house::subject_of;
use statehouse_store::{Time, Value};

use crate::conformance::Verdict;
use crate::harness::simulation::{Acting, Client, Course, End, Told};
use crate::proof::booking::drills::check_rows;

pub(crate) const COURSE: Course = Course {
    archetype: "booking",
    blueprint: r#"
[house]
name = "simulation"

[booking.seat]
key        = { event_id = "text", seat_no = "int" }
hold_for   = "2s"
hold_max   = "6s"
units_max  = 3
refundable = true
shards     = 2
"#,
    resource: "seat",
    prepare: |visitor| {
        Box::pin(async move {
            for seat in 1..=SEATS {
                visitor.done("seat.create", &[], json!({"event_id": "gala", "seat_no": seat}), None).await?;
            }
            Ok(())
        })
    },
    act: |client| -> Acting<'_> { Box::pin(act(client)) },
    check: |end| -> Verdict<'_> { Box::pin(check(end)) },
};

const SEATS: u64 = 5;

async fn act(client: &mut Client) {
    let known = client.memory.as_str().map(str::to_owned);
    let choice = client.below(8);
    if let (Some(booking), true) = (known, choice > 2) {
        let action = match choice {
            3 | 4 => "seat_booking.confirm",
            5 => "seat_booking.extend",
            6 => "seat_booking.expire",
            _ => "seat_booking.cancel",
        };
        if choice > 5 {
            client.memory = Json::Null;
        }
        client.call(action, &[Value::from(booking)], json!({}), None).await;
        return;
    }
    let booking = format!("b-{}-{}", client.name, client.next);
    let first = 1 + client.below(SEATS);
    let input = match choice {
        0 => json!({"booking_id": booking, "event_id": "gala", "count": 2, "holder": client.name}),
        1 => json!({"booking_id": booking, "event_id": "gala", "seat_no": [first], "holder": client.name}),
        _ => {
            let second = 1 + first % i64::try_from(SEATS).unwrap_or(1);
            json!({"booking_id": booking, "event_id": "gala", "seat_no": [first, second], "holder": client.name})
        }
    };
    // Whatever it was told: it may have it.
    if !matches!(client.call("seat_booking.hold", &[], input, None).await, Told::Refused) {
        client.memory = json!(booking);
    }
}

async fn check(end: &End) -> Result<()> {
    check_rows(&end.sound, "seat").await?;
    // Order: the log of each booking is a way through its states, in time, and has an event for each of its versions. One
    // that lost its units to another hold ends in that one's record, which may stand in another partition.
    let mut stories: BTreeMap<String, BTreeMap<i64, (String, Time, Json)>> = BTreeMap::new();
    for record in end.records().await? {
        for event in record.events.iter().filter(|event| event.name.starts_with("seat_booking.")) {
            let booking = subject_of(&record, event).map_or("", |(_, key)| key).to_owned();
            let row = event.data["row"].clone();
            let version = row["version"].as_i64().context("a booking without a version")?;
            let told = (event.name.clone(), record.at, row);
            let twice = stories.entry(booking).or_default().insert(version, told);
            ensure!(twice.is_none(), "{} is told twice of version {version}", record.key);
        }
    }
    for (booking, story) in &stories {
        let mut before: Option<(String, Time)> = None;
        for ((version, (name, at, row)), expected) in story.iter().zip(1..) {
            ensure!(*version == expected, "version {expected} of {booking} was told nobody: {story:?}");
            let until: Time = row["expires_at"].as_str().context("a booking without an end")?.parse()?;
            let in_time = before.as_ref().is_some_and(|(_, end)| at < end);
            let fits = match (before.as_ref().map(|(state, _)| state.as_str()), name.as_str()) {
                (None, "seat_booking.held") => true,
                (Some("IN_PROGRESS"), "seat_booking.extended" | "seat_booking.confirmed") => in_time,
                (Some("IN_PROGRESS"), "seat_booking.expired") => !in_time,
                (Some("IN_PROGRESS" | "CONFIRMED"), "seat_booking.cancelled") => true,
                _ => false,
            };
            ensure!(fits, "{name} of {booking} at {at}, after {before:?}");
            let state = row["state"].as_str().context("a booking without a state")?.to_owned();
            before = Some((state, until));
        }
    }
    // Everything that was held is over by now.
    let table = end.sound.table("seat_bookings")?;
    let scan = statehouse_store::Scan::of(table, &end.sound.tenant);
    for row in crate::harness::client::scan(end.sound.house.store().as_ref(), scan).await? {
        ensure!(row.text("state") != Some("IN_PROGRESS"), "it was never swept: {row}");
        let story = stories.get(row.text("booking_id").unwrap_or_default());
        let told = story.and_then(|story| story.last_key_value()).map(|(version, _)| *version);
        ensure!(told == Some(row.version()), "{row} at version {}, and the log has {told:?}", row.version());
    }
    Ok(())
}
