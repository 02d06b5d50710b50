//! Invariants of jobs, order keys and unique keys, checked on the stored rows and the log.

use std::collections::{BTreeMap, BTreeSet};

use anyhow::{Context, Result, ensure};
use statehouse::resource::key_text;
use statehouse_store::{Row, Value};

use crate::harness::invariants::{CheckScope, LoggedChange};
use crate::harness::store_client::same;

/// Where the log leaves a job.
#[derive(Clone, Copy, Debug, PartialEq)]
enum JobPhase {
    Live,
    Failed,
    Over,
    Deleted,
}

/// I2, I5 and I6: the log of each job is a path through its states, its attempts never decrease, and the row is in the state in
/// which the log ended. Order keys and unique keys are held by the jobs that are not over, and by no others.
pub(crate) async fn check(scope: &CheckScope<'_>) -> Result<()> {
    let jobs = scope.rows(scope.table()?).await?;
    check_log(scope, &jobs).await?;
    let live: Vec<&Row> = jobs.iter().filter(|job| phase_of(job) == Some(JobPhase::Live)).collect();
    check_order_keys(scope, &live).await?;
    check_unique_keys(scope, &live).await
}

/// The phase that a stored state belongs to.
fn phase_of(job: &Row) -> Option<JobPhase> {
    match job.text("state")? {
        "PENDING" | "IN_PROGRESS" | "RETRYING" => Some(JobPhase::Live),
        "FAILED" => Some(JobPhase::Failed),
        "COMPLETED" | "CANCELLED" => Some(JobPhase::Over),
        _ => None,
    }
}

async fn check_log(scope: &CheckScope<'_>, jobs: &[Row]) -> Result<()> {
    let mut logged = scope.events(scope.resource).await?;
    let made = jobs_of_definitions(scope).await?;
    for job in jobs {
        let key = key_text(job.key());
        let events = logged.remove(&key).unwrap_or_default();
        let (phase, attempt) = last_phase(&key, &events, made.contains(&key))?;
        // A definition that is paused or deleted withdraws its waiting job; the event of the definition is the only one.
        let is_withdrawn =
            made.contains(&key) && phase == JobPhase::Live && job.text("state") == Some("CANCELLED");
        ensure!(phase_of(job) == Some(phase) || is_withdrawn, "{job}: the log leaves it {phase:?}");
        ensure!(job.int("attempt") >= Some(attempt), "{job}: the log has attempt {attempt}");
    }
    for (key, events) in &logged {
        // With `keep = "0s"` a completed job is deleted at once, without a further event.
        let (phase, _) = last_phase(key, events, made.contains(key))?;
        ensure!([JobPhase::Over, JobPhase::Deleted].contains(&phase), "{key} is {phase:?} and is not stored");
    }
    Ok(())
}

/// The jobs that definitions have made. The event of the definition names each; the job has no event of its own then.
async fn jobs_of_definitions(scope: &CheckScope<'_>) -> Result<BTreeSet<String>> {
    let mut made = BTreeSet::new();
    for events in scope.events(&format!("{}_definition", scope.resource)).await?.values() {
        for event in events.iter().filter(|event| event.name == "made") {
            let job = event.data["row"]["last_job_id"].as_str().context("no job was made")?;
            made.insert(key_text([&Value::from(job)]));
        }
    }
    Ok(made)
}

fn last_phase(key: &str, events: &[LoggedChange], is_made: bool) -> Result<(JobPhase, i64)> {
    let mut before = is_made.then_some((JobPhase::Live, 0));
    for event in events {
        let after = match (before.map(|(phase, _)| phase), event.name.as_str()) {
            (None | Some(JobPhase::Over | JobPhase::Deleted), "enqueued") => JobPhase::Live,
            (Some(JobPhase::Live), "retrying") => JobPhase::Live,
            (Some(JobPhase::Live), "completed" | "cancelled") => JobPhase::Over,
            (Some(JobPhase::Live), "failed") => JobPhase::Failed,
            (Some(JobPhase::Failed), "replayed") => JobPhase::Live,
            (Some(JobPhase::Failed | JobPhase::Over | JobPhase::Deleted), "forgotten") => JobPhase::Deleted,
            (_, name) => anyhow::bail!("{name} of {key} at {}, after {before:?}", event.at),
        };
        let attempts = before.map_or(0, |(_, attempts)| attempts);
        let data = event.data.get("row").unwrap_or(&event.data);
        let attempt = match event.name.as_str() {
            "enqueued" => 0,
            "forgotten" => attempts,
            _ => data["attempt"].as_i64().with_context(|| format!("no attempt in {data}"))?,
        };
        let is_new = event.name == "enqueued";
        ensure!(is_new || attempt >= attempts, "{key} goes back from attempt {attempts} to {attempt}");
        before = Some((after, attempt));
    }
    before.with_context(|| format!("{key} is not in the log"))
}

/// I5: the counts of an order key are those of its jobs, and exactly the jobs on its wait list cannot be claimed.
async fn check_order_keys(scope: &CheckScope<'_>, live: &[&Row]) -> Result<()> {
    let mut expected: BTreeMap<String, (i64, i64)> = BTreeMap::new();
    let mut waiting: BTreeMap<String, String> = BTreeMap::new();
    for job in live {
        let Some(order_key) = job.text("order_key") else { continue };
        let counts = expected.entry(order_key.to_owned()).or_default();
        if job.time("run_at").is_none() {
            counts.1 += 1;
            waiting.insert(job.text("job_id").unwrap_or_default().to_owned(), order_key.to_owned());
        } else {
            counts.0 += 1;
        }
    }
    let mut listed: BTreeMap<String, String> = BTreeMap::new();
    for line in scope.rows(companion(scope, "lines")?).await? {
        let text = |column: &str| line.text(column).unwrap_or_default().to_owned();
        let twice = listed.insert(text("job_id"), text("order_key"));
        ensure!(twice.is_none(), "{line}: the job is on the list twice");
    }
    same("the jobs that wait for their order key", &listed, &waiting)?;
    let mut counts: BTreeMap<String, (i64, i64)> = BTreeMap::new();
    for lane in scope.rows(companion(scope, "lanes")?).await? {
        let int = |column: &str| lane.int(column).unwrap_or(0);
        counts
            .insert(lane.text("order_key").unwrap_or_default().to_owned(), (int("running"), int("waiting")));
    }
    counts.retain(|_, counts| *counts != (0, 0));
    same("the running and waiting jobs by order key", &counts, &expected)
}

/// I6: a unique key names the one job that is not over and holds it.
async fn check_unique_keys(scope: &CheckScope<'_>, live: &[&Row]) -> Result<()> {
    let mut holders: BTreeMap<String, String> = BTreeMap::new();
    for unique in scope.rows(companion(scope, "uniques")?).await? {
        let text = |column: &str| unique.text(column).unwrap_or_default().to_owned();
        holders.insert(text("unique_key"), text("job_id"));
    }
    for job in live.iter().filter(|job| job.bool("unique_held") == Some(true)) {
        let (key, id) = (job.text("unique_key").unwrap_or_default(), job.text("job_id"));
        ensure!(
            holders.get(key).map(String::as_str) == id,
            "{job}: its key is held by {:?}",
            holders.get(key)
        );
    }
    Ok(())
}

/// A table that is named after the resource: `job_lanes` of `job`.
fn companion<'s>(
    scope: &'s CheckScope<'_>,
    suffix: &str,
) -> Result<&'s std::sync::Arc<statehouse_store::Table>> {
    let name = format!("{}_{suffix}", scope.resource);
    scope.house.schema().table(&name).with_context(|| format!("the house has no table {name}"))
}
