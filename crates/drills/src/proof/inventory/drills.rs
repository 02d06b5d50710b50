//! The failures of A06, on any kind of stock.

use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use serde_json::{Map, Value as Json, json};
use statehouse::Code;
use statehouse_store::faulty::Odds;
use statehouse_store::{SystemClock, Value};

use crate::conformance::CaseFuture;
use crate::harness::drill::{Drill, DrillClock, DrillKind, DrillRun, action, insist, time_in};
use crate::harness::sample_inputs;
use crate::harness::store_client::same;
use crate::harness::tenant_client::TenantClient;
use crate::proof::inventory::cases::BLUEPRINT;

const fn drill(failure: &'static str, provokes: &'static str, run: crate::harness::drill::DrillFn) -> Drill {
    let kind = DrillKind::AnyResource { blueprint: BLUEPRINT, resource: "stock", run };
    Drill { archetype: "inventory", failure, provokes, largest_plan: 6, kind }
}

pub(crate) const DRILLS: &[Drill] = &[
    drill("oversell", "Many callers at once want more than there is, each in two lines of one row.", |run| {
        Box::pin(oversell(run)) as CaseFuture<'_>
    }),
    drill(
        "double allocate",
        "A caller whose answers get lost reserves again and again; others use its reservation's id at the same time.",
        |run| Box::pin(double_allocate(run)) as CaseFuture<'_>,
    ),
    drill(
        "lost release",
        "Reservations are released several times at once; others run out, are swept while answers get lost, and are wanted by the \
         next caller before any sweep.",
        |run| Box::pin(lost_release(run)) as CaseFuture<'_>,
    ),
    drill(
        "stale availability read",
        "Another process reads right after each change, and a refused caller is told the number.",
        |run| Box::pin(stale_read(run)) as CaseFuture<'_>,
    ),
];

/// Answers get lost.
fn faults() -> Odds {
    Odds { unknown_before: 0.3, unknown_after: 0.4, unavailable: 0.1, ..Odds::default() }
}

fn reservation_action(run: &DrillRun, name: &str) -> String {
    format!("{}_reservation.{name}", run.target.resource)
}

fn id(reservation: &str) -> [Value; 1] {
    [reservation.into()]
}

/// Puts so many of a row in stock.
async fn stock(run: &DrillRun, client: &TenantClient, number: i64, quantity: i64) -> Result<()> {
    let resource = run.resource()?;
    let restock = action(resource, "restock")?;
    let sampled = |property: &statehouse::form::Property| {
        Some((property.name.clone(), sample_inputs::of_property(property, number)?))
    };
    let mut input: Map<String, Json> = restock.input.iter().filter_map(sampled).collect();
    input.insert("quantity".into(), json!(quantity));
    client.done(&run.action("restock"), &run.key(number)?, Json::Object(input), None).await.map(drop)
}

/// Two lines of one row, and so one row of a plan; or one line.
fn wanted(run: &DrillRun, reservation: &str, number: i64, quantities: &[i64]) -> Result<Json> {
    let resource = run.resource()?;
    let named = resource.key.iter().zip(run.key(number)?);
    let key: Map<String, Json> = named.map(|((name, _), value)| (name.clone(), value.to_json())).collect();
    let line = |quantity: &i64| {
        let mut line = key.clone();
        line.insert("quantity".into(), json!(quantity));
        Json::Object(line)
    };
    Ok(json!({"reservation_id": reservation, "lines": quantities.iter().map(line).collect::<Vec<_>>()}))
}

async fn reserve(
    run: &DrillRun,
    client: &TenantClient,
    reservation: &str,
    number: i64,
    quantity: i64,
) -> Result<Json> {
    let input = wanted(run, reservation, number, &[quantity])?;
    Ok(client.done(&reservation_action(run, "reserve"), &[], input, None).await?.body)
}

async fn availability(run: &DrillRun, client: &TenantClient, number: i64, name: &str) -> Result<i64> {
    let answer = client.done(&run.action("availability"), &run.key(number)?, json!({}), None).await?;
    answer.body[name].as_i64().with_context(|| format!("no {name} in {}", answer.body))
}

async fn oversell(run: &DrillRun) -> Result<()> {
    let client = run.house_over(run.namespace.open().await?, Arc::new(SystemClock)).await?;
    for number in run.rounds() {
        stock(run, &client, number, 7).await?;
        let orderable = availability(run, &client, number, "orderable").await?;
        let callers: Vec<_> = (0..orderable / 3 + 3)
            .map(|caller| {
                let input = wanted(run, &format!("r{number}-{caller}"), number, &[1, 2])?;
                Ok(client.start(&reservation_action(run, "reserve"), &[], input, None))
            })
            .collect::<Result<_>>()?;
        let (mut got, mut sold_out) = (0, false);
        for caller in callers {
            match caller.await? {
                Ok(_) => got += 3,
                Err(refusal) if refusal.code == Code::OutOfStock => sold_out = true,
                Err(refusal) => ensure!(refusal.code == Code::Contended, "{refusal}"),
            }
        }
        ensure!(got <= orderable, "{got} were reserved of {orderable}");
        // A refusal is true: less is left than a caller wanted.
        let left = availability(run, &client, number, "orderable").await?;
        same("what is left", &left, &(orderable - got))?;
        ensure!(!sold_out || left < 3, "a caller was told that it is out of stock, and {left} are left");
        let more = wanted(run, &format!("r{number}-more"), number, &[left + 1])?;
        client.refused(&reservation_action(run, "reserve"), &[], more, None, Code::OutOfStock).await?;
        if availability(run, &client, number, "available").await? > 0 {
            let all = availability(run, &client, number, "available").await?;
            let too_many = json!({"by": -all - 1});
            client
                .refused(&run.action("adjust"), &run.key(number)?, too_many, None, Code::OutOfStock)
                .await?;
        }
    }
    Ok(())
}

async fn double_allocate(run: &DrillRun) -> Result<()> {
    let store = run.namespace.open().await?;
    let client = run.house_over(store.clone(), Arc::new(SystemClock)).await?;
    let faulty = run.faulty(store);
    let unlucky = run.house_over(faulty.clone(), Arc::new(SystemClock)).await?;
    let reserve = reservation_action(run, "reserve");
    for number in run.rounds() {
        stock(run, &client, number, 10).await?;
        faulty.set_odds(faults());
        let input = wanted(run, &format!("a{number}"), number, &[2])?;
        let first = insist(&unlucky, &format!("op{number}"), &reserve, &[], &input, None).await?;
        let again = insist(&unlucky, &format!("op{number}"), &reserve, &[], &input, None).await?;
        same("the answer to a repetition", &again.body, &first.body)?;
        faulty.set_odds(Odds::default());
        // A repetition is recognized by the reservation's id, if it has the same lines.
        let more = (0..4).map(|caller| {
            let quantities: &[i64] = if caller % 2 == 0 { &[1, 1] } else { &[3] };
            Ok((
                caller,
                client.start(&reserve, &[], wanted(run, &format!("a{number}"), number, quantities)?, None),
            ))
        });
        for (caller, call) in more.collect::<Result<Vec<_>>>()? {
            match call.await? {
                Ok(answer) if caller % 2 == 0 => same("the reservation", &answer.body, &first.body)?,
                Err(refusal) if caller % 2 == 1 => same("the refusal", &refusal.code, &Code::AlreadyExists)?,
                other => anyhow::bail!("caller {caller} was answered {other:?}"),
            }
        }
        same("what is reserved", &availability(run, &client, number, "reserved").await?, &2)?;
    }
    Ok(())
}

async fn lost_release(run: &DrillRun) -> Result<()> {
    let clock = DrillClock::new();
    let store = run.namespace.open_at(Arc::new(clock.clone())).await?;
    let faulty = run.faulty(store);
    let client = run.house_over(faulty.clone(), Arc::new(clock.clone())).await?;
    let reservations = format!("{}_reservation", run.target.resource);
    for number in run.rounds() {
        stock(run, &client, number, 6).await?;
        let all = availability(run, &client, number, "orderable").await?;
        let given_back = reserve(run, &client, &format!("a{number}"), number, all).await?;
        // Several requests release at once, and one of them does.
        let name = reservation_action(run, "release");
        let releases: Vec<_> =
            (0..3).map(|_| client.start(&name, &id(&format!("a{number}")), json!({}), None)).collect();
        let mut released = 0;
        for release in releases {
            match release.await? {
                Ok(_) => released += 1,
                Err(refusal) => same("the refusal", &refusal.code, &Code::WrongState)?,
            }
        }
        same("how often it was released", &released, &1)?;
        same("what is available", &availability(run, &client, number, "orderable").await?, &all)?;
        if given_back["expires_at"].is_null() {
            continue;
        }
        let held = reserve(run, &client, &format!("b{number}"), number, all).await?;
        let end = time_in(&held, "expires_at")?;
        clock.reach(end.minus(Duration::from_micros(1)));
        let next = wanted(run, &format!("c{number}"), number, &[all])?;
        client
            .refused(&reservation_action(run, "reserve"), &[], next.clone(), None, Code::OutOfStock)
            .await?;
        same("reservations that were swept too early", &client.drain_workers_of(&reservations).await?, &0)?;
        clock.advance(Duration::from_micros(1));
        let late = id(&format!("b{number}"));
        client.refused(&reservation_action(run, "commit"), &late, json!({}), None, Code::Expired).await?;
        // The next caller gets it before any sweep of the workers.
        let got = client.done(&reservation_action(run, "reserve"), &[], next, None).await?;
        client.shows(&reservations, &late, &json!({"state": "EXPIRED"})).await?;
        clock.reach(time_in(&got.body, "expires_at")?);
        faulty.set_odds(faults());
        for _ in 0..3 {
            // Whatever comes of it: the sweeper may die here as well.
            let _ = client.work(5).await;
        }
        faulty.set_odds(Odds::default());
        client.drain_workers().await?;
        client.shows(&reservations, &id(&format!("c{number}")), &json!({"state": "EXPIRED"})).await?;
        same("what came back", &availability(run, &client, number, "orderable").await?, &all)?;
    }
    Ok(())
}

async fn stale_read(run: &DrillRun) -> Result<()> {
    let store = run.namespace.open().await?;
    let writer = run.house_over(store.clone(), Arc::new(SystemClock)).await?;
    let reader = run.house_over(store, Arc::new(SystemClock)).await?;
    for number in run.rounds() {
        stock(run, &writer, number, 9).await?;
        let before = availability(run, &reader, number, "orderable").await?;
        reserve(run, &writer, &format!("r{number}"), number, 4).await?;
        let after = availability(run, &reader, number, "orderable").await?;
        same("what another process reads", &after, &(before - 4))?;
        let too_many = wanted(run, &format!("s{number}"), number, &[after + 1])?;
        let reserve = reservation_action(run, "reserve");
        let refusal = reader.refused(&reserve, &[], too_many, None, Code::OutOfStock).await?;
        ensure!(refusal.message.contains(&format!("has {after} available")), "{refusal}");
        writer.done(&reservation_action(run, "release"), &id(&format!("r{number}")), json!({}), None).await?;
        same("what another process reads", &availability(run, &reader, number, "orderable").await?, &before)?;
    }
    Ok(())
}
