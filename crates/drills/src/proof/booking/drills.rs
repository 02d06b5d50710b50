//! The failures of A08, on any kind of unit.

use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use serde_json::{Map, Value as Json, json};
use statehouse::{Answer, Code, Resource};
use statehouse_store::faulty::Odds;
use statehouse_store::{SystemClock, Time, Value};

use crate::conformance::Verdict;
use crate::harness::client::same;
use crate::harness::drill::{Drill, DrillClock, Ground, Kind, action, input, insist, time_in};
use crate::harness::house::Visitor;
use crate::harness::specimen;
use crate::proof::booking::cases::BLUEPRINT;

const fn drill(failure: &'static str, provokes: &'static str, run: crate::harness::drill::OnGround) -> Drill {
    let kind = Kind::Ground { blueprint: BLUEPRINT, resource: "seat", run };
    Drill { archetype: "booking", failure, provokes, largest_plan: 6, kind }
}

pub(crate) const DRILLS: &[Drill] = &[
    drill(
        "duplicate hold",
        "Many buyers want one unit at once, and a buyer whose answer was lost asks again.",
        |ground| boxed(duplicate_hold(ground)),
    ),
    drill(
        "expired hold not released",
        "Holds run out: one is taken by the next buyer before any sweep, one is swept while answers get lost.",
        |ground| boxed(expired_hold(ground)),
    ),
    drill(
        "confirm-after-expiry race",
        "The buyer confirms and the sweeper expires at the last moment before the end, at the end and after it.",
        |ground| boxed(confirm_after_expiry(ground)),
    ),
    drill("cancel/confirm race", "One device of a buyer cancels while another confirms.", |ground| {
        boxed(cancel_and_confirm(ground))
    }),
    drill(
        "stale availability after hold expiry",
        "A unit is read and listed just before the end of its hold and at it, and nobody sweeps.",
        |ground| boxed(stale_availability(ground)),
    ),
];

fn boxed<'a>(run: impl Future<Output = Result<()>> + Send + 'a) -> Verdict<'a> {
    Box::pin(run)
}

/// The resource of the bookings.
pub(crate) fn bookings(resource: &str) -> String {
    format!("{resource}_booking")
}

fn booking_action(ground: &Ground, name: &str) -> String {
    format!("{}.{name}", bookings(&ground.plot.resource))
}

/// The key of a unit of the one group in which a drill takes place.
fn unit_key(resource: &Resource, number: i64) -> Vec<Value> {
    let last = resource.key.len().saturating_sub(1);
    let parts = resource.key.iter().enumerate();
    parts
        .map(|(place, (name, kind))| specimen::value(name, *kind, if place == last { number } else { 1 }))
        .collect()
}

async fn offer(ground: &Ground, visitor: &Visitor, number: i64) -> Result<()> {
    let resource = ground.resource()?;
    let key = unit_key(resource, number);
    let named = resource.key.iter().zip(&key).map(|((name, _), value)| (name.clone(), value.to_json()));
    let made = input(action(resource, "create")?, number, named.collect());
    visitor.done(&ground.action("create"), &[], made, None).await.map(drop)
}

fn wanted(ground: &Ground, booking: &str, units: &[i64], holder: &str) -> Result<Json> {
    let resource = ground.resource()?;
    let last = resource.key.len().saturating_sub(1);
    let mut given = Map::new();
    for (place, (name, kind)) in resource.key.iter().enumerate() {
        let of = |number: i64| specimen::value(name, *kind, number).to_json();
        let value = if place == last { units.iter().map(|unit| of(*unit)).collect() } else { of(1) };
        given.insert(name.clone(), value);
    }
    given.insert("booking_id".into(), json!(booking));
    given.insert("holder".into(), json!(holder));
    Ok(input(action(ground.named(&bookings(&resource.name))?, "hold")?, 1, given))
}

async fn hold(ground: &Ground, visitor: &Visitor, booking: &str, unit: i64) -> Result<Answer> {
    visitor.done(&booking_action(ground, "hold"), &[], wanted(ground, booking, &[unit], "ann")?, None).await
}

fn end_of(held: &Answer) -> Result<Time> {
    time_in(&held.body, "expires_at")
}

fn id(booking: &str) -> [Value; 1] {
    [booking.into()]
}

async fn duplicate_hold(ground: &Ground) -> Result<()> {
    let store = ground.lab.open().await?;
    let visitor = ground.house_over(store.clone(), Arc::new(SystemClock)).await?;
    for unit in ground.rounds() {
        offer(ground, &visitor, unit).await?;
        let buyers: Vec<_> = (0..5)
            .map(|buyer| {
                let input = wanted(ground, &format!("b{unit}-{buyer}"), &[unit], &format!("buyer {buyer}"))?;
                Ok(visitor.start(&booking_action(ground, "hold"), &[], input, None))
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
    let unit = i64::try_from(ground.rounds)? + 1;
    offer(ground, &visitor, unit).await?;
    let faulty = ground.faulty(store);
    let unlucky = ground.house_over(faulty.clone(), Arc::new(SystemClock)).await?;
    faulty.set_odds(Odds { unknown_before: 0.3, unknown_after: 0.4, unavailable: 0.1, ..Odds::default() });
    let input = wanted(ground, "unlucky", &[unit], "ann")?;
    let held = insist(&unlucky, "buy", &booking_action(ground, "hold"), &[], &input, None).await?;
    same("the booking", &held.body["booking_id"], &json!("unlucky"))?;
    Ok(())
}

async fn expired_hold(ground: &Ground) -> Result<()> {
    let clock = DrillClock::new();
    let store = ground.lab.open_at(Arc::new(clock.clone())).await?;
    let faulty = ground.faulty(store.clone());
    let visitor = ground.house_over(faulty.clone(), Arc::new(clock.clone())).await?;
    let resource = &ground.plot.resource;
    for round in ground.rounds() {
        let (taken, swept) = (2 * round - 1, 2 * round);
        offer(ground, &visitor, taken).await?;
        offer(ground, &visitor, swept).await?;
        let end = end_of(&hold(ground, &visitor, &format!("b{taken}"), taken).await?)?;
        hold(ground, &visitor, &format!("b{swept}"), swept).await?;
        clock.reach(end.minus(Duration::from_micros(1)));
        let next = wanted(ground, &format!("c{taken}"), &[taken], "bob")?;
        visitor.refused(&booking_action(ground, "hold"), &[], next.clone(), None, Code::Held).await?;
        let early = visitor.drain_workers_of(&bookings(resource)).await?;
        same("holds that were swept too early", &early, &0)?;
        clock.advance(Duration::from_micros(1));
        visitor.done(&booking_action(ground, "hold"), &[], next, None).await?;
        let lost = format!("b{taken}");
        visitor
            .refused(&booking_action(ground, "confirm"), &id(&lost), json!({}), None, Code::Expired)
            .await?;
        faulty.set_odds(Odds {
            unknown_before: 0.2,
            unknown_after: 0.4,
            unavailable: 0.1,
            ..Odds::default()
        });
        for _ in 0..3 {
            // Whatever comes of it: the sweeper may die here as well.
            let _ = visitor.work(5).await;
        }
        faulty.set_odds(Odds::default());
        visitor.drain_workers().await?;
        visitor.shows(&bookings(resource), &id(&format!("b{swept}")), &json!({"state": "EXPIRED"})).await?;
        visitor.done(&booking_action(ground, "confirm"), &id(&format!("c{taken}")), json!({}), None).await?;
    }
    Ok(())
}

async fn confirm_after_expiry(ground: &Ground) -> Result<()> {
    let clock = DrillClock::new();
    let visitor = ground.house_at(&clock).await?;
    let mut random = ground.random();
    for unit in ground.rounds() {
        offer(ground, &visitor, unit).await?;
        let booking = format!("b{unit}");
        let end = end_of(&hold(ground, &visitor, &booking, unit).await?)?;
        let offset = random.below(3);
        clock.reach(end.minus(Duration::from_micros(1)).plus(Duration::from_micros(offset)));
        let confirms_first = random.chance(0.5);
        let start = |confirms: bool| {
            let name = booking_action(ground, if confirms { "confirm" } else { "expire" });
            visitor.start(&name, &id(&booking), json!({}), None)
        };
        let (one, two) = (start(confirms_first), start(!confirms_first));
        let (one, two) = (one.await?.is_ok(), two.await?.is_ok());
        let (confirmed, expired) = if confirms_first { (one, two) } else { (two, one) };
        same("confirmed and expired", &(confirmed, expired), &(offset == 0, offset > 0))?;
    }
    Ok(())
}

async fn cancel_and_confirm(ground: &Ground) -> Result<()> {
    let visitor = ground.house().await?;
    let resource = &ground.plot.resource;
    let mut random = ground.random();
    for unit in ground.rounds() {
        offer(ground, &visitor, unit).await?;
        let booking = format!("b{unit}");
        hold(ground, &visitor, &booking, unit).await?;
        let mut names = ["cancel", "confirm"];
        if random.chance(0.5) {
            names.reverse();
        }
        let calls =
            names.map(|name| visitor.start(&booking_action(ground, name), &id(&booking), json!({}), None));
        let mut done = Vec::new();
        for (name, call) in names.into_iter().zip(calls) {
            match call.await? {
                Ok(_) => done.push(name),
                Err(refusal) => ensure!(refusal.code == Code::WrongState, "{refusal}"),
            }
        }
        let state = visitor.shown(&bookings(resource), &id(&booking), &["state"]).await?;
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

async fn stale_availability(ground: &Ground) -> Result<()> {
    let clock = DrillClock::new();
    let visitor = ground.house_at(&clock).await?;
    let resource = ground.resource()?;
    for unit in ground.rounds() {
        offer(ground, &visitor, unit).await?;
        let end = end_of(&hold(ground, &visitor, &format!("b{unit}"), unit).await?)?;
        let key = unit_key(resource, unit);
        let group = resource.key.iter().zip(&key).take(key.len().saturating_sub(1));
        let group: Map<String, Json> =
            group.map(|((name, _), value)| (name.clone(), value.to_json())).collect();
        for (at, state) in [(end.minus(Duration::from_micros(1)), "HELD"), (end, "AVAILABLE")] {
            clock.reach(at);
            visitor.shows(&resource.name, &key, &json!({"state": state})).await?;
            let mut asked = group.clone();
            asked.insert("state".into(), json!(state));
            let listed = visitor.done(&ground.action("list"), &[], Json::Object(asked), None).await?;
            let (name, _) = resource.key.last().context("a unit without a key")?;
            let unit = key.last().map(Value::to_json);
            let found =
                listed.body.as_array().into_iter().flatten().filter(|row| Some(&row[name]) == unit.as_ref());
            same(&format!("how often it is listed as {state}"), &found.count(), &1)?;
        }
    }
    Ok(())
}
