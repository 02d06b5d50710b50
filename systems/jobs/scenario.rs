//! Callers that enqueue jobs, claim them, and complete them, give them back, cancel them, or die with them in their hands.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use anyhow::{Context as _, Result, bail, ensure};
use serde_json::{Value as Json, json};
use statehouse::{Code, worker};
use statehouse_store::random::Random;
use statehouse_store::{Clock as _, Record, Row, Scan, SystemClock, Tenant, Time};

use super::{Invariant, ScenarioContext, nothing_is_lost_or_doubled, request};

/// How long a lease lasts in the scenario; the blueprint's half minute is shortened to it.
pub(super) const LEASE: (&str, &str) = ("lease        = \"30s\"", "lease        = \"300ms\"");
/// What has an order.
const KEYS: u64 = 5;
/// How often a definition is due, and how many there are.
const EVERY_MS: i64 = 1_000;
const DEFINITIONS: usize = 3;
/// How often the end of the last jobs is looked for, and the pause between two looks.
const LOOKS_MAX: usize = 2_000;
const PAUSE: Duration = Duration::from_millis(20);

/// What callers know for sure.
#[derive(Default)]
struct JobNotes {
    acknowledged: Vec<String>,
    enqueued: BTreeSet<String>,
    /// Who claimed which attempt of which job.
    claims: BTreeMap<(String, i64), String>,
}

type Notebook = Arc<Mutex<JobNotes>>;

fn noted<T>(notes: &Notebook, note: impl FnOnce(&mut JobNotes) -> T) -> T {
    note(&mut notes.lock().unwrap_or_else(PoisonError::into_inner))
}

pub(super) async fn run(context: Arc<ScenarioContext>) -> Result<Vec<Invariant>> {
    let tenant = Tenant::new("default")?;
    let notes = Notebook::default();
    context.house.start_workers(worker::WorkerOptions::default());
    for number in 0..DEFINITIONS {
        let input = json!({"when": {"every_ms": EVERY_MS}, "missed": "all", "payload": number});
        let definition = format!("tick-{number}");
        let operation = format!("define-{number}");
        act(&context, &tenant, &notes, "job_definition.create", &definition, input, &operation).await?;
    }
    context
        .callers(|context, caller, random| {
            let (tenant, notes) = (tenant.clone(), notes.clone());
            async move { work(&context, &tenant, &notes, caller, random).await }
        })
        .await?;
    for number in 0..DEFINITIONS {
        let (definition, operation) = (format!("tick-{number}"), format!("pause-{number}"));
        act(&context, &tenant, &notes, "job_definition.pause", &definition, json!({}), &operation).await?;
    }
    every_job_ends(&context, &tenant, &notes).await?;
    context.house.stop_workers().await;
    let records = context.records().await?;
    let rows = rows(&context, &tenant).await?;
    let notes = std::mem::take(&mut *notes.lock().unwrap_or_else(PoisonError::into_inner));
    Ok(vec![
        ends_are_recorded_once(&rows, &records, &notes)?,
        Invariant {
            holds: "no attempt of a job was claimed by two workers",
            counted: format!("{} claims", notes.claims.len()),
        },
        keys_keep_their_order(&rows)?,
        due_times_make_one_job_each(&rows, &records)?,
        nothing_is_lost_or_doubled(&records, &notes.acknowledged)?,
    ])
}

/// What one caller does: enqueues a job, and looks what there is to do.
async fn work(
    context: &ScenarioContext,
    tenant: &Tenant,
    notes: &Notebook,
    caller: usize,
    mut random: Random,
) -> Result<()> {
    for number in 0..context.size.actions {
        let job = format!("job-{caller}-{number}");
        let mut input = json!({"job_id": job, "payload": number, "priority": random.below(3)});
        match random.below(10) {
            0..2 => input["after_ms"] = json!(random.below(300)),
            2..5 => input["order_key"] = json!(format!("key-{}", random.below(KEYS))),
            _ => {}
        }
        let operation = format!("{job}-enqueue");
        act(context, tenant, notes, "job.enqueue", "", input, &operation).await?;
        noted(notes, |notes| notes.enqueued.insert(job.clone()));
        if random.chance(0.05) {
            act(context, tenant, notes, "job.cancel", &job, json!({}), &format!("{job}-cancel")).await?;
        }
        let limit = 1 + random.below(4);
        let claimed =
            claim(context, tenant, notes, caller, &format!("claim-{caller}-{number}"), limit).await?;
        for (job, attempt) in claimed {
            settle(context, tenant, notes, &job, attempt, &mut random).await?;
        }
        context.done();
    }
    Ok(())
}

/// Does a job, or not.
async fn settle(
    context: &ScenarioContext,
    tenant: &Tenant,
    notes: &Notebook,
    job: &str,
    attempt: i64,
    random: &mut Random,
) -> Result<()> {
    let (action, input) = match random.below(20) {
        // Dies with it; another worker gets it when the lease is over.
        0 => return Ok(()),
        1 => ("job.fail", json!({"attempt": attempt, "error": "not today", "final": true})),
        2 => {
            // Sleeps through its lease. Another worker may have it by now.
            SystemClock.sleep(Duration::from_millis(350)).await;
            ("job.complete", json!({"attempt": attempt, "result": attempt}))
        }
        _ => ("job.complete", json!({"attempt": attempt, "result": attempt})),
    };
    let operation = format!("{job}-{attempt}-end");
    act(context, tenant, notes, action, job, input, &operation).await.map(drop)
}

async fn claim(
    context: &ScenarioContext,
    tenant: &Tenant,
    notes: &Notebook,
    caller: usize,
    operation: &str,
    limit: u64,
) -> Result<Vec<(String, i64)>> {
    let who = format!("caller-{caller}");
    let wanted = request("job_queue.claim", &["default".into()], json!({"worker": who, "limit": limit}));
    let answer = context.call(tenant, wanted, operation).await?;
    let answer = answer.map_err(|refusal| anyhow::anyhow!("{operation}: {refusal}"))?;
    let mut claimed = Vec::new();
    for job in answer.body.as_array().context("a claim answered no list")? {
        let id = job["job_id"].as_str().context("a job without an id")?.to_owned();
        let attempt = job["attempt"].as_i64().context("a job without an attempt")?;
        let before = noted(notes, |notes| notes.claims.insert((id.clone(), attempt), operation.to_owned()));
        ensure!(before.is_none(), "attempt {attempt} of {id} was claimed by {before:?} and by {operation}");
        claimed.push((id, attempt));
    }
    Ok(claimed)
}

/// Calls an action, and says whether it was done; `false` if it was refused as it may be.
async fn act(
    context: &ScenarioContext,
    tenant: &Tenant,
    notes: &Notebook,
    action: &str,
    key: &str,
    input: Json,
    operation: &str,
) -> Result<bool> {
    let key: Vec<_> = if key.is_empty() { Vec::new() } else { vec![key.into()] };
    match context.call(tenant, request(action, &key, input), operation).await? {
        Ok(_) => {
            noted(notes, |notes| notes.acknowledged.push(operation.to_owned()));
            Ok(true)
        }
        Err(refusal) => match refusal.code {
            Code::NotHolder | Code::WrongState => Ok(false),
            _ => bail!("{operation}: {refusal}"),
        },
    }
}

async fn rows(context: &ScenarioContext, tenant: &Tenant) -> Result<Vec<Row>> {
    let table = context.house.schema().table("jobs").context("there is no table of jobs")?;
    let mut scan = Scan::of(table, tenant);
    let mut rows = Vec::new();
    loop {
        let page = context.store.scan(&scan).await?;
        rows.extend(page.rows);
        let Some(next) = page.next else { return Ok(rows) };
        scan = scan.after(next)?;
    }
}

/// Works on what is left, until nothing is.
async fn every_job_ends(context: &ScenarioContext, tenant: &Tenant, notes: &Notebook) -> Result<()> {
    let live = |row: &&Row| row.time("finished_at").is_none();
    for look in 0..LOOKS_MAX {
        let claimed = claim(context, tenant, notes, 0, &format!("claim-last-{look}"), 98).await?;
        for (job, attempt) in &claimed {
            let input = json!({"attempt": attempt, "result": attempt});
            let operation = format!("{job}-{attempt}-last");
            act(context, tenant, notes, "job.complete", job, input, &operation).await?;
        }
        if claimed.is_empty() {
            if rows(context, tenant).await?.iter().find(live).is_none() {
                return Ok(());
            }
            SystemClock.sleep(PAUSE).await;
        }
    }
    let left = rows(context, tenant).await?;
    let left: Vec<String> = left.iter().filter(live).map(|row| row.to_json().to_string()).collect();
    bail!("{} jobs do not end: {left:?}", left.len())
}

fn ends_are_recorded_once(rows: &[Row], records: &[Record], notes: &JobNotes) -> Result<Invariant> {
    let mut ends: BTreeMap<&str, usize> = BTreeMap::new();
    for event in records.iter().flat_map(|record| &record.events) {
        if ["job.completed", "job.failed", "job.cancelled"].contains(&event.name.as_str()) {
            let told = event.data.get("row").unwrap_or(&event.data);
            let job = told["job_id"].as_str().context("an end without its job")?;
            *ends.entry(job).or_default() += 1;
        }
    }
    let by_id: BTreeMap<&str, &Row> =
        rows.iter().filter_map(|row| Some((row.text("job_id")?, row))).collect();
    for job in &notes.enqueued {
        let row = by_id.get(job.as_str()).with_context(|| format!("{job} was enqueued and is gone"))?;
        ensure!(row.time("finished_at").is_some(), "{job} is {:?}", row.text("state"));
        ensure!(ends.get(job.as_str()) == Some(&1), "{job} ended {:?} times", ends.get(job.as_str()));
        if row.text("state") == Some("COMPLETED") {
            let by = row.json("result").and_then(Json::as_i64);
            ensure!(
                by == row.int("attempt"),
                "{job} has the result of {by:?}, and was last claimed otherwise"
            );
        }
    }
    Ok(Invariant {
        holds: "every job is over, and its end is recorded once",
        counted: format!("{} jobs", notes.enqueued.len()),
    })
}

fn keys_keep_their_order(rows: &[Row]) -> Result<Invariant> {
    let mut runs: BTreeMap<&str, Vec<(i64, Time, Time)>> = BTreeMap::new();
    for row in rows {
        let (Some(key), Some(seq)) = (row.text("order_key"), row.int("line_seq")) else { continue };
        // One that was cancelled before anybody claimed it took no turn.
        if let (Some(start), Some(end)) = (row.time("started_at"), row.time("finished_at")) {
            runs.entry(key).or_default().push((seq, start, end));
        }
    }
    let mut counted = 0;
    for (key, mut runs) in runs {
        // A lane that was empty begins to count anew, so turns are told apart by their times.
        runs.sort_by_key(|(_, start, _)| *start);
        for (before, after) in runs.iter().zip(runs.iter().skip(1)) {
            ensure!(
                before.2 <= after.1,
                "{key}: one began at {} and the one before ended at {}",
                after.1,
                before.2
            );
            counted += 1;
        }
    }
    Ok(Invariant { holds: "jobs of one key ran one after the other", counted: format!("{counted} turns") })
}

fn due_times_make_one_job_each(rows: &[Row], records: &[Record]) -> Result<Invariant> {
    let mut made: BTreeMap<(&str, Time), usize> = BTreeMap::new();
    for row in rows {
        let (Some(definition), Some(time)) = (row.text("definition_id"), row.time("execution_time")) else {
            continue;
        };
        *made.entry((definition, time)).or_default() += 1;
    }
    let doubled = made.iter().find(|(_, jobs)| **jobs > 1);
    ensure!(doubled.is_none(), "a due time made several jobs: {doubled:?}");
    let events = records.iter().flat_map(|record| &record.events);
    let told = events.filter(|event| event.name == "job_definition.made").count();
    ensure!(told == made.len(), "{told} due times were told and {} jobs were made", made.len());
    // What was due between the first and the last is all there: none was passed over.
    let mut by_definition: BTreeMap<&str, Vec<i64>> = BTreeMap::new();
    for (definition, time) in made.keys() {
        by_definition.entry(definition).or_default().push(time.micros());
    }
    for (definition, times) in by_definition {
        for (before, after) in times.iter().zip(times.iter().skip(1)) {
            ensure!(
                after - before == EVERY_MS * 1_000,
                "{definition} was due at {before} and then at {after}"
            );
        }
    }
    Ok(Invariant {
        holds: "every due time of a definition made one job",
        counted: format!("{} due times", made.len()),
    })
}
