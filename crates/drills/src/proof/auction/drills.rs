//! The failures of A16, on any kind of lot.

use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use serde_json::{Value as Json, json};
use statehouse::{Answer, Code, Refusal};
use statehouse_store::faulty::Odds;
use statehouse_store::{Clock as _, Time, Value};

use crate::conformance::CaseFuture;
use crate::harness::drill::{
    Drill, DrillClock, DrillKind, DrillRun, action, input, insist, is_passing, time_in,
};
use crate::harness::store_client::same;
use crate::harness::tenant_client::TenantClient;
use crate::proof::auction::cases::BLUEPRINT;

const fn drill(failure: &'static str, provokes: &'static str, run: crate::harness::drill::DrillFn) -> Drill {
    let kind = DrillKind::AnyResource { blueprint: BLUEPRINT, resource: "lot", run };
    Drill { archetype: "auction", failure, provokes, largest_plan: 9, kind }
}

pub(crate) const DRILLS: &[Drill] = &[
    drill(
        "accepted late bid",
        "A bidder bids and the closer closes at the last moment before the end, at the end and after it.",
        |run| boxed(late_bid(run)),
    ),
    drill(
        "wrong winner",
        "Bidders of two processes bid at once while answers get lost, and the lot is closed among them.",
        |run| boxed(wrong_winner(run)),
    ),
    drill(
        "duplicate close",
        "Several closers close a lot at once, one with a plan from before, and answers get lost.",
        |run| boxed(duplicate_close(run)),
    ),
    drill(
        "stale current-best read near close",
        "Two bidders read the same best bid just before the end, and one bids with a plan that was made by what it read.",
        |run| boxed(stale_read(run)),
    ),
];

fn boxed<'a>(run: impl Future<Output = Result<()>> + Send + 'a) -> CaseFuture<'a> {
    Box::pin(run)
}

/// How long a lot is open: longer than any extension that a generated blueprint declares.
const OPEN_FOR: Duration = Duration::from_secs(600);
/// Amounts are so far apart that each is above the least bid.
const STEP: i64 = 1_000_000;

/// Opens the lot of that number.
async fn open(run: &DrillRun, client: &TenantClient, number: i64, now: Time) -> Result<Vec<Value>> {
    let resource = run.resource()?;
    let key = run.key(number)?;
    let named = resource.key.iter().zip(&key).map(|((name, _), value)| (name.clone(), value.to_json()));
    let ends_at = json!(now.plus(OPEN_FOR).to_string());
    let given = named.chain([("ends_at".to_owned(), ends_at)]).collect();
    client.done(&run.action("create"), &[], input(action(resource, "create")?, number, given), None).await?;
    Ok(key)
}

fn offer(bidder: &str, amount: i64) -> Json {
    json!({"bidder_id": bidder, "amount": STEP * amount})
}

async fn end_of(run: &DrillRun, client: &TenantClient, key: &[Value]) -> Result<Time> {
    let read = client.done(&run.action("read"), key, json!({}), None).await?;
    time_in(&read.body, "ends_at")
}

async fn late_bid(run: &DrillRun) -> Result<()> {
    let clock = DrillClock::new();
    let client = run.house_at(&clock).await?;
    let mut random = run.random();
    for round in run.rounds() {
        let key = open(run, &client, round, clock.now()).await?;
        client.done(&run.action("bid"), &key, offer("first", 1), None).await?;
        let end = end_of(run, &client, &key).await?;
        let offset = random.below(3);
        clock.reach(end.minus(Duration::from_micros(1)).plus(Duration::from_micros(offset)));
        let bids_first = random.chance(0.5);
        let start = |bids: bool| match bids {
            true => client.start(&run.action("bid"), &key, offer("late", 2), None),
            false => client.start(&run.action("close"), &key, json!({}), None),
        };
        let (one, two) = (start(bids_first), start(!bids_first));
        let (one, two) = (one.await?, two.await?);
        let (bid, close) = if bids_first { (one, two) } else { (two, one) };
        let told = |told: &Result<Answer, Refusal>| told.as_ref().err().map(|refusal| refusal.code);
        let expected = match offset {
            0 => (None, Some(Code::WrongState)),
            _ => (Some(Code::Expired), None),
        };
        same("what the bidder and the closer are told", &(told(&bid), told(&close)), &expected)?;
    }
    Ok(())
}

/// Bids until it is known what came of it. Returns whether the bid was accepted.
async fn bids(
    client: &TenantClient,
    name: &str,
    operation: &str,
    key: &[Value],
    offer: Json,
) -> Result<bool> {
    match insist(client, operation, name, key, &offer, None).await {
        Ok(_) => Ok(true),
        Err(error) if format!("{error:#}").contains(Code::TooLow.name()) => Ok(false),
        Err(error) => Err(error),
    }
}

async fn wrong_winner(run: &DrillRun) -> Result<()> {
    let clock = DrillClock::new();
    let store = run.namespace.open_at(Arc::new(clock.clone())).await?;
    let faulty = run.faulty(store.clone());
    let sound = run.house_over(store, Arc::new(clock.clone())).await?;
    let unlucky = run.house_over(faulty.clone(), Arc::new(clock.clone())).await?;
    for round in run.rounds() {
        let key = open(run, &sound, round, clock.now()).await?;
        faulty.set_odds(Odds { unknown_before: 0.15, unknown_after: 0.25, ..Odds::default() });
        let bidders: Vec<_> = (1..=6)
            .map(|bidder| {
                let client = if bidder % 2 == 0 { sound.clone() } else { unlucky.clone() };
                let (key, name) = (key.clone(), run.action("bid"));
                tokio::spawn(async move {
                    let operation = format!("{round} {bidder}");
                    let offered = offer(&format!("b{bidder}"), bidder);
                    bids(&client, &name, &operation, &key, offered).await.map(|accepted| (bidder, accepted))
                })
            })
            .collect();
        let mut best = 0;
        for bidder in bidders {
            let (bidder, accepted) = bidder.await??;
            best = if accepted { best.max(bidder) } else { best };
        }
        faulty.set_odds(Odds::default());
        clock.reach(end_of(run, &sound, &key).await?);
        sound.done(&run.action("close"), &key, json!({}), None).await?;
        let read = sound.done(&run.action("read"), &key, json!({}), None).await?;
        same("the winner", &read.body["winner"]["bidder_id"], &json!(format!("b{best}")))?;
    }
    Ok(())
}

async fn duplicate_close(run: &DrillRun) -> Result<()> {
    let clock = DrillClock::new();
    let store = run.namespace.open_at(Arc::new(clock.clone())).await?;
    let faulty = run.faulty(store.clone());
    let client = run.house_over(store, Arc::new(clock.clone())).await?;
    let unlucky = run.house_over(faulty.clone(), Arc::new(clock.clone())).await?;
    let close = run.action("close");
    for round in run.rounds() {
        let key = open(run, &client, round, clock.now()).await?;
        client.done(&run.action("bid"), &key, offer("ann", 1), None).await?;
        clock.reach(end_of(run, &client, &key).await?);
        let drafted = client.drafted(&close, &key, json!({}), None).await?;
        faulty.set_odds(Odds { unknown_before: 0.2, unknown_after: 0.4, ..Odds::default() });
        let mut closers = Vec::new();
        for number in 0..4 {
            let client = if number == 0 { unlucky.clone() } else { client.clone() };
            let (close, key) = (close.clone(), key.clone());
            closers.push(tokio::spawn(async move {
                let operation = format!("close {round} {number}");
                loop {
                    let told = client.call_as(&operation, &close, &key, json!({}), None).await;
                    match told {
                        Err(refusal) if is_passing(refusal.code) => {}
                        told => return told,
                    }
                }
            }));
        }
        let mut closed = 0;
        for closer in closers {
            match closer.await? {
                Ok(_) => closed += 1,
                Err(refusal) => ensure!(refusal.code == Code::WrongState, "{refusal}"),
            }
        }
        faulty.set_odds(Odds::default());
        same("how often it was closed", &closed, &1)?;
        client.too_late(&drafted).await?;
        same("what is left to close", &client.drain_workers_of(&run.target.resource).await?, &0)?;
    }
    Ok(())
}

async fn stale_read(run: &DrillRun) -> Result<()> {
    let clock = DrillClock::new();
    let client = run.house_at(&clock).await?;
    let bid = run.action("bid");
    for round in run.rounds() {
        let key = open(run, &client, round, clock.now()).await?;
        client.done(&bid, &key, offer("first", 1), None).await?;
        let end = end_of(run, &client, &key).await?;
        clock.reach(end.minus(Duration::from_micros(1)));
        // Both have read the same best bid. One is paused before it bids.
        let stale = client.drafted(&bid, &key, offer("slow", 2), None).await?;
        let told = client.done(&bid, &key, offer("quick", 3), None).await?;
        client.too_late(&stale).await?;
        // It is told what the lot stands at, and bids by that.
        let least = told.body["min_next"].as_i64().context("no least bid")?;
        // Sealed bids do not say what the others are: the least one is that of an empty lot, and none is below it.
        if least > 1 {
            let low = json!({"bidder_id": "slow", "amount": least - 1});
            if let Err(refusal) = client.call(&bid, &key, low, None).await {
                same("the code", &refusal.code, &Code::TooLow)?;
                ensure!(refusal.message.contains(&least.to_string()), "it tells the least bid: {refusal}");
            }
        }
        client.done(&bid, &key, offer("slow", 4), None).await?;
        clock.reach(end_of(run, &client, &key).await?);
        client.done(&run.action("close"), &key, json!({}), None).await?;
        let read = client.done(&run.action("read"), &key, json!({}), None).await?;
        same("the winner", &read.body["winner"]["bidder_id"], &json!("slow"))?;
    }
    Ok(())
}
