//! A08 in simulation: buyers who hold, extend, confirm and give up more than there is, and the sweeper.

use anyhow::{Result, ensure};
use serde_json::{Value as Json, json};
use statehouse_store::Value;

use crate::conformance::CaseFuture;
use crate::harness::simulation::{CallOutcome, ClientFuture, FinishedHistory, SimulatedClient, Workload};

pub(crate) const WORKLOAD: Workload = Workload {
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
    prepare: |client| {
        Box::pin(async move {
            for seat in 1..=SEATS {
                client.done("seat.create", &[], json!({"event_id": "gala", "seat_no": seat}), None).await?;
            }
            Ok(())
        })
    },
    act: |client| -> ClientFuture<'_> { Box::pin(act(client)) },
    check: |end| -> CaseFuture<'_> { Box::pin(check(end)) },
};

const SEATS: u64 = 5;

async fn act(client: &mut SimulatedClient) {
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
    if !matches!(client.call("seat_booking.hold", &[], input, None).await, CallOutcome::Refused) {
        client.memory = json!(booking);
    }
}

async fn check(end: &FinishedHistory) -> Result<()> {
    // Everything that was held is over by now.
    let table = end.sound.table("seat_bookings")?;
    let scan = statehouse_store::Scan::of(table, &end.sound.tenant);
    for row in crate::harness::store_client::scan(end.sound.house.store().as_ref(), scan).await? {
        ensure!(row.text("state") != Some("IN_PROGRESS"), "it was never swept: {row}");
    }
    Ok(())
}
