//! A08 in simulation: buyers who hold, extend, confirm and give up more than there is, and the sweeper.

use anyhow::{Result, ensure};
use serde_json::{Value as Json, json};
use statehouse_store::Value;

use super::invariants;
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

[booking.tool]
key       = { kind = "text", number = "int" }
fields    = { condition = "int?" }
hold_for  = "2s"
hold_max  = "6s"
on_expiry = "overdue"
holder    = "int"
shards    = 2
"#,
    resource: "seat",
    egress: None,
    prepare: |client| {
        Box::pin(async move {
            for seat in 1..=SEATS {
                client.done("seat.create", &[], json!({"event_id": "gala", "seat_no": seat}), None).await?;
                client.done("tool.create", &[], json!({"kind": "saw", "number": seat}), None).await?;
            }
            Ok(())
        })
    },
    act: |client| -> ClientFuture<'_> { Box::pin(act(client)) },
    check: |end| -> CaseFuture<'_> { Box::pin(check(end)) },
};

const SEATS: u64 = 5;

async fn act(client: &mut SimulatedClient) {
    match client.below(6) {
        0 | 1 => lend(client).await,
        2 => change_unit(client).await,
        _ => buy(client).await,
    }
}

/// The house retires, restores, edits, deletes and creates units.
async fn change_unit(client: &mut SimulatedClient) {
    let number = 1 + client.below(SEATS);
    let (unit, key) = match client.below(2) {
        0 => ("seat", [Value::from("gala"), number.into()]),
        _ => ("tool", [Value::from("saw"), number.into()]),
    };
    let (action, input) = match client.below(6) {
        0 => ("retire", json!({})),
        1 if unit == "tool" => ("patch", json!({"condition": number})),
        2 => ("delete", json!({})),
        3 => {
            let input = match unit {
                "seat" => json!({"event_id": "gala", "seat_no": number}),
                _ => json!({"kind": "saw", "number": number}),
            };
            drop(client.call(&format!("{unit}.create"), &[], input, None).await);
            return;
        }
        _ => ("restore", json!({})),
    };
    drop(client.call(&format!("{unit}.{action}"), &key, input, None).await);
}

/// Tools are lent, brought back before or after they are overdue, or bought.
async fn lend(client: &mut SimulatedClient) {
    let number = client.below(4);
    let loan = format!("l-{}-{number}", client.name);
    let choice = client.below(6);
    if choice > 1 {
        let action = match choice {
            2 => "tool_booking.extend",
            3 => "tool_booking.confirm",
            4 => "tool_booking.expire",
            _ => "tool_booking.cancel",
        };
        drop(client.call(action, &[Value::from(loan)], json!({}), None).await);
        return;
    }
    let input = match choice {
        0 => json!({"booking_id": loan, "kind": "saw", "count": 1, "holder": 1}),
        _ => json!({"booking_id": loan, "kind": "saw", "number": [1 + client.below(SEATS)], "holder": 2}),
    };
    drop(client.call("tool_booking.hold", &[], input, None).await);
}

async fn buy(client: &mut SimulatedClient) {
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
    for bookings in ["seat_bookings", "tool_bookings"] {
        let table = end.sound.table(bookings)?;
        let scan = statehouse_store::Scan::of(table, &end.sound.tenant);
        for row in crate::harness::store_client::scan(end.sound.house.store().as_ref(), scan).await? {
            ensure!(row.text("state") != Some("IN_PROGRESS"), "it was never swept: {row}");
        }
    }
    invariants::check(&end.sound.scope("tool")).await
}
