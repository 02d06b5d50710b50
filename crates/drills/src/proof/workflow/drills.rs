//! The failures of A04, on any workflow.

use std::collections::BTreeSet;
use std::sync::Arc;

use anyhow::{Context, Result, ensure};
use serde_json::{Map, Value as Json, json};
use statehouse::product::workflow::ChartTransition;
use statehouse::{Code, Refusal};
use statehouse_store::faulty::{FaultyStore, Odds};
use statehouse_store::{SystemClock, Value};

use super::cases::BLUEPRINT;
use crate::conformance::CaseFuture;
use crate::harness::drill::{self, Drill, DrillClock, DrillFn, DrillKind, DrillRun, Skipped, insist};
use crate::harness::store_client::{pause, same};
use crate::harness::tenant_client::TenantClient;

const fn drill(failure: &'static str, provokes: &'static str, run: DrillFn) -> Drill {
    let kind = DrillKind::AnyResource { blueprint: BLUEPRINT, resource: "order", run };
    Drill { archetype: "workflow", failure, provokes, largest_plan: 7, kind }
}

pub(crate) const DRILLS: &[Drill] = &[
    drill(
        "retry of same transition after commit",
        "A caller whose answers get lost repeats a transition, under its operation id and without one.",
        |run| boxed(retry(run)),
    ),
    drill(
        "invalid transition from stale state",
        "A caller calls every transition that does not begin with the state of the row, also under the version that it saw before.",
        |run| boxed(stale_state(run)),
    ),
    drill(
        "competing transitions",
        "Callers in two processes call every transition of one row at once.",
        |run| boxed(competing(run)),
    ),
    drill(
        "crash after transition but before side effect",
        "The process dies before or after the commit of a transition; effects and jobs are then looked for.",
        |run| boxed(crash(run)),
    ),
    drill(
        "stale status read",
        "A row is read in another process after each transition that was answered.",
        |run| boxed(stale_read(run)),
    ),
];

fn boxed<'a>(run: impl Future<Output = Result<()>> + Send + 'a) -> CaseFuture<'a> {
    Box::pin(run)
}

/// Starts the row of a number, and returns its key.
async fn start(run: &DrillRun, client: &TenantClient, number: i64) -> Result<Vec<Value>> {
    let (key, resource) = (run.key(number)?, run.resource()?);
    let columns = resource.key.iter().zip(&key);
    let given: Map<String, Json> =
        columns.map(|((name, _), value)| (name.clone(), value.to_json())).collect();
    let input = drill::input(drill::action(resource, "start")?, number, given);
    client.done(&run.action("start"), &[], input, None).await?;
    Ok(key)
}

/// The declared transitions that callers make, in the order of the blueprint.
fn called(run: &DrillRun) -> Result<Vec<ChartTransition>> {
    let chart = run.resource()?.state_chart.as_ref().context("it is no workflow")?;
    Ok(chart.transitions.iter().filter(|one| one.after.is_none()).cloned().collect())
}

/// What a transition has to be given.
fn input(run: &DrillRun, name: &str, number: i64) -> Result<Json> {
    Ok(drill::input(drill::action(run.resource()?, name)?, number, Map::new()))
}

async fn state(run: &DrillRun, client: &TenantClient, key: &[Value]) -> Result<(String, i64)> {
    let row = client.done(&run.action("read"), key, json!({}), None).await?;
    let state = row.body["state"].as_str().context("no state")?.to_owned();
    Ok((state, row.body["seq"].as_i64().context("no seq")?))
}

/// A transition that a new row can make: one whose condition holds for a sample.
async fn first(run: &DrillRun, client: &TenantClient) -> Result<ChartTransition> {
    let key = start(run, client, 1_000).await?;
    let (initial, _) = state(run, client, &key).await?;
    for one in called(run)?.into_iter().filter(|one| one.from.contains(&initial)) {
        let input = input(run, &one.name, 1_000)?;
        match client.call(&run.action(&one.name), &key, input, None).await {
            Ok(_) => return Ok(one),
            Err(refusal) => ensure!(refusal.code == Code::ConditionFailed, "{refusal}"),
        }
    }
    Err(Skipped("no caller can make a transition of a new row with sample values".to_owned()).into())
}

/// Whether a refusal of a transition is one that the state or a condition explains.
fn is_judged(refusal: &Refusal) -> bool {
    [Code::WrongState, Code::ConditionFailed].contains(&refusal.code)
}

async fn retry(run: &DrillRun) -> Result<()> {
    let store = run.namespace.open().await?;
    let client = run.house_over(store.clone(), Arc::new(SystemClock)).await?;
    let first = first(run, &client).await?;
    let faulty = run.faulty(store);
    let unlucky = run.house_over(faulty.clone(), Arc::new(SystemClock)).await?;
    faulty.set_odds(Odds { unknown_before: 0.3, unknown_after: 0.4, unavailable: 0.1, ..Odds::default() });
    for round in run.rounds() {
        let key = start(run, &client, round).await?;
        let (action, input) = (run.action(&first.name), input(run, &first.name, round)?);
        let operation = format!("retry-{round}");
        let done = insist(&unlucky, &operation, &action, &key, &input, None).await?;
        same("the transitions of the answer", &done.body["seq"], &json!(2))?;
        let again = insist(&unlucky, &operation, &action, &key, &input, None).await?;
        same("the answer to a repetition", &again.body, &done.body)?;
        let (after, seq) = state(run, &client, &key).await?;
        same("the transitions of the row", &seq, &2)?;
        if first.from.contains(&after) {
            continue;
        }
        // Without the operation id it is another request; the refusal names the operation that made the transition.
        let refusal = client.refused(&action, &key, input, None, Code::WrongState).await?;
        ensure!(refusal.message.contains(&operation), "{refusal}");
    }
    Ok(())
}

async fn stale_state(run: &DrillRun) -> Result<()> {
    let client = run.house().await?;
    let first = first(run, &client).await?;
    for round in run.rounds() {
        let key = start(run, &client, round).await?;
        let (seen, _) = state(run, &client, &key).await?;
        let elsewhere = called(run)?.into_iter().filter(|one| !one.from.contains(&seen));
        for one in elsewhere {
            let input = input(run, &one.name, round)?;
            client.refused(&run.action(&one.name), &key, input, None, Code::WrongState).await?;
        }
        same("a row that was refused", &state(run, &client, &key).await?, &(seen.clone(), 1))?;
        client.done(&run.action(&first.name), &key, input(run, &first.name, round)?, None).await?;
        // A caller that saw version 1 acts on an old copy, whether the transition begins with the new state or not.
        let (now, seq) = state(run, &client, &key).await?;
        for one in called(run)? {
            let input = input(run, &one.name, round)?;
            let told = client.call(&run.action(&one.name), &key, input, Some(1)).await;
            let code = told.err().map(|refusal| refusal.code);
            let judged = [Some(Code::VersionConflict), Some(Code::WrongState), Some(Code::ConditionFailed)];
            ensure!(judged.contains(&code), "{} on an old copy of {now}: {code:?}", one.name);
        }
        same("the transitions of the row", &state(run, &client, &key).await?.1, &seq)?;
    }
    Ok(())
}

async fn competing(run: &DrillRun) -> Result<()> {
    let clock = DrillClock::new();
    let clock: Arc<dyn statehouse_store::Clock> = Arc::new(clock);
    let store = run.namespace.open_at(clock.clone()).await?;
    let one = run.house_over(store.clone(), clock.clone()).await?;
    let other = run.house_over(store, clock).await?;
    for round in run.rounds() {
        let key = start(run, &one, round).await?;
        let mut calls = Vec::new();
        for transition in called(run)? {
            let input = input(run, &transition.name, round)?;
            for client in [&one, &other] {
                let call = client.start(&run.action(&transition.name), &key, input.clone(), None);
                calls.push((transition.name.clone(), call));
            }
        }
        let mut applied = Vec::new();
        for (name, call) in calls {
            match call.await? {
                Ok(answer) => {
                    same("the transition of an answer", &answer.body["last_transition"], &json!(name))?;
                    applied.push(answer.body["seq"].as_i64().context("no seq")?);
                }
                Err(refusal) => ensure!(is_judged(&refusal), "{name}: {refusal}"),
            }
        }
        let (_, seq) = state(run, &one, &key).await?;
        let distinct: BTreeSet<i64> = applied.iter().copied().collect();
        same("the numbers of the transitions", &distinct, &(2..=seq).collect())?;
        same("how many were applied", &applied.len(), &distinct.len())?;
    }
    Ok(())
}

fn deaths(faulty: &FaultyStore) -> u64 {
    faulty.achieved().crashes_before + faulty.achieved().crashes_after
}

async fn crash(run: &DrillRun) -> Result<()> {
    let store = run.namespace.open().await?;
    let client = run.house_over(store.clone(), Arc::new(SystemClock)).await?;
    let first = first(run, &client).await?;
    let faulty = run.faulty(store);
    let dying = run.house_over(faulty.clone(), Arc::new(SystemClock)).await?;
    faulty.set_odds(Odds { crash_before: 0.4, crash_after: 0.6, ..Odds::default() });
    let mut applied = 0;
    for round in run.rounds() {
        let key = start(run, &client, round).await?;
        let before = deaths(&faulty);
        let input = input(run, &first.name, round)?;
        let call = dying.start(&run.action(&first.name), &key, input, None);
        while deaths(&faulty) == before {
            ensure!(!call.is_finished(), "a caller that died had an answer: {:?}", call.await?);
            pause().await;
        }
        call.abort();
        // The invariants compare the effects and jobs with the transitions that were applied.
        let (_, seq) = state(run, &client, &key).await?;
        applied += u64::from(seq == 2);
    }
    same("transitions and commits before a crash", &faulty.achieved().crashes_after, &applied)
}

async fn stale_read(run: &DrillRun) -> Result<()> {
    let store = run.namespace.open().await?;
    let writer = run.house_over(store.clone(), Arc::new(SystemClock)).await?;
    let reader = run.house_over(store, Arc::new(SystemClock)).await?;
    let first = first(run, &writer).await?;
    for round in run.rounds() {
        let key = start(run, &writer, round).await?;
        same("a new row", &state(run, &reader, &key).await?.1, &1)?;
        let input = input(run, &first.name, round)?;
        let done = writer.done(&run.action(&first.name), &key, input, None).await?;
        let seen = reader.done(&run.action("read"), &key, json!({}), None).await?;
        same("what another process reads", &seen.body, &done.body)?;
        let can = reader.done(&run.action("can"), &key, json!({}), None).await?;
        same("the state of what can be done", &can.body["state"], &done.body["state"])?;
    }
    Ok(())
}
