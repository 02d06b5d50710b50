//! Buyers of four events, more than there are seats for. They hold, and then buy, give up, walk away, or come too late.

use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use anyhow::{Context as _, Result, bail, ensure};
use serde_json::{Value as Json, json};
use statehouse::{Code, worker};
use statehouse_store::random::Random;
use statehouse_store::{Clock as _, Row, Scan, SystemClock, Tenant};

use super::{Invariant, ScenarioContext, nothing_is_lost_or_doubled, request};
use crate::proof::booking::invariants;

const EVENTS: [&str; 4] = ["ballet", "gala", "opera", "play"];
/// How long a hold lasts in the scenario; the blueprint's ten minutes are shortened to it.
pub(super) const HOLD: (&str, &str) = ("hold_for  = \"10m\"", "hold_for  = \"200ms\"");
const HOLD_FOR: Duration = Duration::from_millis(200);
/// How often the end of the last holds is looked for, and the pause between two looks.
const LOOKS_MAX: usize = 600;
const PAUSE: Duration = Duration::from_millis(50);

type TicketsAcknowledged = Arc<Mutex<Vec<String>>>;

pub(super) async fn run(context: Arc<ScenarioContext>) -> Result<Vec<Invariant>> {
    let tenant = Tenant::new("default")?;
    let acknowledged = TicketsAcknowledged::default();
    let seats = (context.size.callers * context.size.actions / 4 / EVENTS.len()).max(4);
    for event in EVENTS {
        for seat in 1..=seats {
            let operation = format!("offer-{event}-{seat}");
            let input = json!({"event_id": event, "seat_no": seat, "price": 50});
            act(&context, &tenant, &acknowledged, "seat.create", "", input, &operation).await?;
        }
    }
    context.house.start_workers(worker::WorkerOptions::default());
    context
        .callers(|context, caller, random| {
            let (tenant, acknowledged) = (tenant.clone(), acknowledged.clone());
            async move { buy(&context, &tenant, &acknowledged, caller, seats, random).await }
        })
        .await?;
    let swept = every_hold_ends(&context, &tenant).await?;
    context.house.stop_workers().await;
    let records = context.records().await?;
    let acknowledged = std::mem::take(&mut *acknowledged.lock().unwrap_or_else(PoisonError::into_inner));
    let [owners, paths] = bookings_are_sound(&context, &tenant, seats).await?;
    Ok(vec![
        owners,
        paths,
        nothing_is_lost_or_doubled(&records, &acknowledged)?,
        Invariant { holds: "every hold has ended", counted: format!("{swept} bookings") },
    ])
}

/// What one caller's buyers do, one after the other.
async fn buy(
    context: &ScenarioContext,
    tenant: &Tenant,
    acknowledged: &TicketsAcknowledged,
    caller: usize,
    seats: usize,
    mut random: Random,
) -> Result<()> {
    for number in 0..context.size.actions {
        let booking = format!("buyer-{caller}-{number}");
        let event = random.pick(&EVENTS).copied().unwrap_or_default();
        let mut wanted =
            json!({"booking_id": booking, "event_id": event, "holder": format!("caller-{caller}")});
        if random.chance(0.5) {
            let seat = 1 + random.below(seats as u64);
            wanted["seat_no"] = json!([seat]);
        } else {
            wanted["count"] = json!(1 + random.below(4));
        }
        let hold = format!("{booking}-hold");
        if act(context, tenant, acknowledged, "seat_booking.hold", "", wanted, &hold).await? {
            let then = |action: &'static str| {
                let operation = format!("{booking}-{action}");
                let action = format!("seat_booking.{action}");
                let (context, booking) = (&*context, booking.clone());
                async move { act(context, tenant, acknowledged, &action, &booking, json!({}), &operation).await }
            };
            match random.below(10) {
                // Walks away; the house frees the seats.
                0..2 => {}
                2..4 => drop(then("cancel").await?),
                4 => {
                    then("extend").await?;
                    then("confirm").await?;
                }
                // Comes too late, or just in time.
                5 => {
                    SystemClock.sleep(HOLD_FOR).await;
                    then("confirm").await?;
                }
                _ => drop(then("confirm").await?),
            }
        }
        context.done();
    }
    Ok(())
}

/// Calls an action, and says whether it was done; `false` if it was refused as it may be.
async fn act(
    context: &ScenarioContext,
    tenant: &Tenant,
    acknowledged: &TicketsAcknowledged,
    action: &str,
    key: &str,
    input: Json,
    operation: &str,
) -> Result<bool> {
    let key: Vec<_> = if key.is_empty() { Vec::new() } else { vec![key.into()] };
    match context.call(tenant, request(action, &key, input), operation).await? {
        Ok(_) => {
            acknowledged.lock().unwrap_or_else(PoisonError::into_inner).push(operation.to_owned());
            Ok(true)
        }
        Err(refusal) => match refusal.code {
            Code::Held | Code::WrongState | Code::Expired => Ok(false),
            _ => bail!("{operation}: {refusal}"),
        },
    }
}

async fn rows(context: &ScenarioContext, tenant: &Tenant, table: &str) -> Result<Vec<Row>> {
    let table = context.house.schema().table(table).with_context(|| format!("there is no table {table}"))?;
    let mut scan = Scan::of(table, tenant);
    let mut rows = Vec::new();
    loop {
        let page = context.store.scan(&scan).await?;
        rows.extend(page.rows);
        let Some(next) = page.next else { return Ok(rows) };
        scan = scan.after(next)?;
    }
}

/// Waits until the workers have swept the last hold.
async fn every_hold_ends(context: &ScenarioContext, tenant: &Tenant) -> Result<usize> {
    for _ in 0..LOOKS_MAX {
        let bookings = rows(context, tenant, "seat_bookings").await?;
        if bookings.iter().all(|row| row.text("state") != Some("IN_PROGRESS")) {
            return Ok(bookings.len());
        }
        SystemClock.sleep(PAUSE).await;
    }
    bail!(
        "bookings are still in progress long after their end; worker figures: {:?}",
        context.house.worker_figures()
    )
}

/// The invariants of bookings, and what was counted.
async fn bookings_are_sound(
    context: &ScenarioContext,
    tenant: &Tenant,
    offered: usize,
) -> Result<[Invariant; 2]> {
    invariants::check(&context.scope(tenant, "seat")).await?;
    let seats = rows(context, tenant, "seats").await?;
    ensure!(
        seats.len() == offered * EVENTS.len(),
        "{} seats were offered and {} are there",
        offered,
        seats.len()
    );
    let sold = seats.iter().filter(|seat| seat.text("state") == Some("SOLD")).count();
    let bookings = rows(context, tenant, "seat_bookings").await?;
    let expired = bookings.iter().filter(|booking| booking.text("state") == Some("EXPIRED")).count();
    Ok([
        Invariant {
            holds: "no seat is sold twice, and each booking has its seats",
            counted: format!("{sold} seats sold"),
        },
        Invariant {
            holds: "every booking went one way, and none was confirmed after its end",
            counted: format!("{} bookings, {expired} expired by the house", bookings.len()),
        },
    ])
}
