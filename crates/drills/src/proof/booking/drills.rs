//! The failures of A08, on any kind of unit.

use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use serde_json::{Map, Value as Json, json};
use statehouse::{Answer, Code, Resource};
use statehouse_store::faulty::Odds;
use statehouse_store::{SystemClock, Time, Value};

use super::invariants;
use crate::conformance::CaseFuture;
use crate::harness::drill::{Drill, DrillClock, DrillKind, DrillRun, action, input, insist, time_in};
use crate::harness::sample_inputs;
use crate::harness::store_client::same;
use crate::harness::tenant_client::TenantClient;
use crate::proof::booking::cases::BLUEPRINT;

const fn drill(failure: &'static str, provokes: &'static str, run: crate::harness::drill::DrillFn) -> Drill {
    let kind = DrillKind::AnyResource { blueprint: BLUEPRINT, resource: "seat", run };
    Drill { archetype: "booking", failure, provokes, largest_plan: 6, kind }
}

pub(crate) const DRILLS: &[Drill] = &[
    drill(
        "duplicate hold",
        "Many buyers want one unit at once, and a buyer whose answer was lost asks again.",
        |run| boxed(duplicate_hold(run)),
    ),
    drill(
        "expired hold not released",
        "Holds run out: one is taken by the next buyer before any sweep, one is swept while answers get lost.",
        |run| boxed(expired_hold(run)),
    ),
    drill(
        "confirm-after-expiry race",
        "The buyer confirms and the sweeper expires at the last moment before the end, at the end and after it.",
        |run| boxed(confirm_after_expiry(run)),
    ),
    drill("cancel/confirm race", "One device of a buyer cancels while another confirms.", |run| {
        boxed(cancel_and_confirm(run))
    }),
    drill(
        "stale availability after hold expiry",
        "A unit is read and listed just before the end of its hold and at it, and no sweeper runs.",
        |run| boxed(stale_availability(run)),
    ),
];

fn boxed<'a>(run: impl Future<Output = Result<()>> + Send + 'a) -> CaseFuture<'a> {
    Box::pin(run)
}

/// The resource of the bookings.
pub(crate) fn bookings(resource: &str) -> String {
    format!("{resource}_booking")
}

fn booking_action(run: &DrillRun, name: &str) -> String {
    format!("{}.{name}", bookings(&run.target.resource))
}

/// The key of a unit of the one group in which a drill takes place.
fn unit_key(resource: &Resource, number: i64) -> Vec<Value> {
    let last = resource.key.len().saturating_sub(1);
    let parts = resource.key.iter().enumerate();
    parts
        .map(|(index, (name, kind))| {
            sample_inputs::value(name, *kind, if index == last { number } else { 1 })
        })
        .collect()
}

async fn offer(run: &DrillRun, client: &TenantClient, number: i64) -> Result<()> {
    let resource = run.resource()?;
    let key = unit_key(resource, number);
    let named = resource.key.iter().zip(&key).map(|((name, _), value)| (name.clone(), value.to_json()));
    let made = input(action(resource, "create")?, number, named.collect());
    client.done(&run.action("create"), &[], made, None).await.map(drop)
}

/// Whether bookings keep their units when their time is up.
fn keeps_units(run: &DrillRun) -> Result<bool> {
    Ok(invariants::keeps_units(run.named(&bookings(&run.target.resource))?))
}

fn wanted(run: &DrillRun, booking: &str, units: &[i64], holder: i64) -> Result<Json> {
    let resource = run.resource()?;
    let last = resource.key.len().saturating_sub(1);
    let mut given = Map::new();
    for (index, (name, kind)) in resource.key.iter().enumerate() {
        let of = |number: i64| sample_inputs::value(name, *kind, number).to_json();
        let value = if index == last { units.iter().map(|unit| of(*unit)).collect() } else { of(1) };
        given.insert(name.clone(), value);
    }
    let bookings = run.named(&bookings(&resource.name))?;
    let kind = bookings.tables.first().and_then(|table| table.type_of("holder"));
    let kind = kind.context("bookings without a holder")?;
    given.insert("booking_id".into(), json!(booking));
    given.insert("holder".into(), sample_inputs::value("holder", kind, holder).to_json());
    Ok(input(action(bookings, "hold")?, 1, given))
}

async fn hold(run: &DrillRun, client: &TenantClient, booking: &str, unit: i64) -> Result<Answer> {
    client.done(&booking_action(run, "hold"), &[], wanted(run, booking, &[unit], 1)?, None).await
}

fn end_of(held: &Answer) -> Result<Time> {
    time_in(&held.body, "expires_at")
}

fn id(booking: &str) -> [Value; 1] {
    [booking.into()]
}

async fn duplicate_hold(run: &DrillRun) -> Result<()> {
    let store = run.namespace.open().await?;
    let client = run.house_over(store.clone(), Arc::new(SystemClock)).await?;
    for unit in run.rounds() {
        offer(run, &client, unit).await?;
        let buyers: Vec<_> = (0..5)
            .map(|buyer| {
                let input = wanted(run, &format!("b{unit}-{buyer}"), &[unit], buyer)?;
                Ok(client.start(&booking_action(run, "hold"), &[], input, None))
            })
            .collect::<Result<_>>()?;
        let mut holders = 0;
        for buyer in buyers {
            match buyer.await? {
                Ok(_) => holders += 1,
                Err(refusal) => ensure!(refusal.code == Code::Held, "{refusal}"),
            }
        }
        same("buyers who hold one unit", &holders, &1)?;
    }
    let unit = i64::try_from(run.rounds)? + 1;
    offer(run, &client, unit).await?;
    let faulty = run.faulty(store);
    let unlucky = run.house_over(faulty.clone(), Arc::new(SystemClock)).await?;
    faulty.set_odds(Odds { unknown_before: 0.3, unknown_after: 0.4, unavailable: 0.1, ..Odds::default() });
    let input = wanted(run, "unlucky", &[unit], 1)?;
    let held = insist(&unlucky, "buy", &booking_action(run, "hold"), &[], &input, None).await?;
    same("the booking", &held.body["booking_id"], &json!("unlucky"))?;
    Ok(())
}

async fn expired_hold(run: &DrillRun) -> Result<()> {
    let clock = DrillClock::new();
    let store = run.namespace.open_at(Arc::new(clock.clone())).await?;
    let faulty = run.faulty(store.clone());
    let client = run.house_over(faulty.clone(), Arc::new(clock.clone())).await?;
    let (resource, keeps_units) = (&run.target.resource, keeps_units(run)?);
    for round in run.rounds() {
        let (taken, swept) = (2 * round - 1, 2 * round);
        offer(run, &client, taken).await?;
        offer(run, &client, swept).await?;
        let end = end_of(&hold(run, &client, &format!("b{taken}"), taken).await?)?;
        hold(run, &client, &format!("b{swept}"), swept).await?;
        clock.reach(end.minus(Duration::from_micros(1)));
        let next = wanted(run, &format!("c{taken}"), &[taken], 2)?;
        client.refused(&booking_action(run, "hold"), &[], next.clone(), None, Code::Held).await?;
        let early = client.drain_workers_of(&bookings(resource)).await?;
        same("holds that were swept too early", &early, &0)?;
        clock.advance(Duration::from_micros(1));
        let lost = format!("b{taken}");
        if keeps_units {
            // It is given back first.
            client.refused(&booking_action(run, "hold"), &[], next.clone(), None, Code::Held).await?;
            client.done(&booking_action(run, "cancel"), &id(&lost), json!({}), None).await?;
        }
        let gone = if keeps_units { Code::WrongState } else { Code::Expired };
        client.done(&booking_action(run, "hold"), &[], next, None).await?;
        client.refused(&booking_action(run, "confirm"), &id(&lost), json!({}), None, gone).await?;
        faulty.set_odds(Odds {
            unknown_before: 0.2,
            unknown_after: 0.4,
            unavailable: 0.1,
            ..Odds::default()
        });
        for _ in 0..3 {
            // Whatever comes of it: the sweeper may die here as well.
            let _ = client.work(5).await;
        }
        faulty.set_odds(Odds::default());
        client.drain_workers().await?;
        let state = if keeps_units { "OVERDUE" } else { "EXPIRED" };
        client.shows(&bookings(resource), &id(&format!("b{swept}")), &json!({"state": state})).await?;
        client.done(&booking_action(run, "confirm"), &id(&format!("c{taken}")), json!({}), None).await?;
    }
    Ok(())
}

async fn confirm_after_expiry(run: &DrillRun) -> Result<()> {
    let clock = DrillClock::new();
    let client = run.house_at(&clock).await?;
    let (mut random, keeps_units) = (run.random(), keeps_units(run)?);
    for unit in run.rounds() {
        offer(run, &client, unit).await?;
        let booking = format!("b{unit}");
        let end = end_of(&hold(run, &client, &booking, unit).await?)?;
        let offset = random.below(3);
        clock.reach(end.minus(Duration::from_micros(1)).plus(Duration::from_micros(offset)));
        let confirms_first = random.chance(0.5);
        let start = |confirms: bool| {
            let name = booking_action(run, if confirms { "confirm" } else { "expire" });
            client.start(&name, &id(&booking), json!({}), None)
        };
        let (one, two) = (start(confirms_first), start(!confirms_first));
        let (one, two) = (one.await?.is_ok(), two.await?.is_ok());
        let (confirmed, expired) = if confirms_first { (one, two) } else { (two, one) };
        if keeps_units {
            // It is the holder's, marked or not. It is marked at its end or later, and not after it was confirmed.
            ensure!(confirmed, "a holder could not buy what it has");
            ensure!(!expired || offset > 0, "it was marked too early");
            continue;
        }
        same("confirmed and expired", &(confirmed, expired), &(offset == 0, offset > 0))?;
    }
    Ok(())
}

async fn cancel_and_confirm(run: &DrillRun) -> Result<()> {
    let client = run.house().await?;
    let resource = &run.target.resource;
    let mut random = run.random();
    for unit in run.rounds() {
        offer(run, &client, unit).await?;
        let booking = format!("b{unit}");
        hold(run, &client, &booking, unit).await?;
        let mut names = ["cancel", "confirm"];
        if random.chance(0.5) {
            names.reverse();
        }
        let calls =
            names.map(|name| client.start(&booking_action(run, name), &id(&booking), json!({}), None));
        let mut done = Vec::new();
        for (name, call) in names.into_iter().zip(calls) {
            match call.await? {
                Ok(_) => done.push(name),
                Err(refusal) => ensure!(refusal.code == Code::WrongState, "{refusal}"),
            }
        }
        let state = client.shown(&bookings(resource), &id(&booking), &["state"]).await?;
        match done.as_slice() {
            ["cancel"] => same("the state", &state, &vec![json!("CANCELLED")])?,
            ["confirm"] => same("the state", &state, &vec![json!("CONFIRMED")])?,
            // What is refundable may be confirmed first and cancelled then; not the other way round.
            other => {
                ensure!(
                    other.len() == 2 && state == [json!("CANCELLED")],
                    "{other:?} were done, and it is {state:?}"
                );
            }
        }
    }
    Ok(())
}

async fn stale_availability(run: &DrillRun) -> Result<()> {
    let clock = DrillClock::new();
    let client = run.house_at(&clock).await?;
    let (resource, keeps_units) = (run.resource()?, keeps_units(run)?);
    let after = if keeps_units { "HELD" } else { "AVAILABLE" };
    for unit in run.rounds() {
        offer(run, &client, unit).await?;
        let end = end_of(&hold(run, &client, &format!("b{unit}"), unit).await?)?;
        let key = unit_key(resource, unit);
        let group = resource.key.iter().zip(&key).take(key.len().saturating_sub(1));
        let group: Map<String, Json> =
            group.map(|((name, _), value)| (name.clone(), value.to_json())).collect();
        for (at, state) in [(end.minus(Duration::from_micros(1)), "HELD"), (end, after)] {
            clock.reach(at);
            client.shows(&resource.name, &key, &json!({"state": state})).await?;
            let mut asked = group.clone();
            asked.insert("state".into(), json!(state));
            let listed = client.done(&run.action("list"), &[], Json::Object(asked), None).await?;
            let (name, _) = resource.key.last().context("a unit without a key")?;
            let unit = key.last().map(Value::to_json);
            let found =
                listed.body.as_array().into_iter().flatten().filter(|row| Some(&row[name]) == unit.as_ref());
            same(&format!("how often it is listed as {state}"), &found.count(), &1)?;
        }
    }
    Ok(())
}
