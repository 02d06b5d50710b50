//! A09 in simulation: jobs that are enqueued, claimed, held, done, failed and given up, by workers that die with them.

use anyhow::{Context, Result, ensure};
use serde_json::{Value as Json, json};
use statehouse_store::{Row, Scan, Value};

use crate::conformance::CaseFuture;
use crate::harness::simulation::{CallOutcome, ClientFuture, FinishedHistory, SimulatedClient, Workload};
use crate::harness::store_client::scan;

pub(crate) const WORKLOAD: Workload = Workload {
    archetype: "schedule",
    blueprint: r#"
[house]
name = "simulation"

[schedule.job]
lease        = "1s"
max_attempts = 3
backoff      = "200ms"
backoff_max  = "1s"
shards       = 2
keep         = "1h"
keep_failed  = "1h"
"#,
    resource: "job",
    egress: None,
    prepare: |_| Box::pin(async { Ok(()) }),
    act: |client| -> ClientFuture<'_> { Box::pin(act(client)) },
    check: |end| -> CaseFuture<'_> { Box::pin(check(end)) },
};

fn queue() -> [Value; 1] {
    ["default".into()]
}

async fn act(client: &mut SimulatedClient) {
    let known = client.memory.clone();
    let (held, last) = (known["held"].as_str(), known["last"].as_str());
    let attempt = known["attempt"].clone();
    match (client.below(10), held, last) {
        (0..=2, ..) => enqueue(client).await,
        (3, _, Some(last)) => drop(client.call("job.cancel", &[last.into()], json!({}), None).await),
        (4, _, Some(last)) => drop(client.call("job.replay", &[last.into()], json!({}), None).await),
        (5, Some(held), _) => {
            let beat = json!({"jobs": [{"job_id": held, "attempt": attempt}]});
            // The client may have lost the job by now. The heartbeat is then refused, and the client continues.
            drop(client.read().call("job_queue.heartbeat", &queue(), beat, None).await);
        }
        (6, Some(held), _) => {
            client.memory["held"] = Json::Null;
            let input = json!({"attempt": attempt, "error": "it went wrong"});
            drop(client.call("job.fail", &[held.into()], input, None).await);
        }
        (_, Some(held), _) => {
            client.memory["held"] = Json::Null;
            let input = json!({"attempt": attempt, "result": {"by": client.name}});
            drop(client.call("job.complete", &[held.into()], input, None).await);
        }
        (_, None, _) => {
            let want = json!({"worker": client.name, "limit": 1});
            if let Ok(answer) = client.read().call("job_queue.claim", &queue(), want, None).await
                && let Some(job) = answer.body.get(0)
            {
                client.memory["held"] = job["job_id"].clone();
                client.memory["attempt"] = job["attempt"].clone();
            }
        }
    }
}

async fn enqueue(client: &mut SimulatedClient) {
    let job = format!("j-{}-{}", client.name, client.next);
    let mut input = json!({"job_id": job});
    match client.below(4) {
        0 => input["unique_key"] = json!("u"),
        1 | 2 => input["order_key"] = json!(format!("k{}", client.below(2))),
        _ => {}
    }
    if !matches!(client.call("job.enqueue", &[], input, None).await, CallOutcome::Refused) {
        client.memory["last"] = json!(job);
    }
}

async fn check(end: &FinishedHistory) -> Result<()> {
    // One worker afterwards completes all jobs that the clients left, also those that were claimed by a process that crashed.
    for _ in 0..LOOKS_MAX {
        let want = json!({"worker": "end", "limit": 50});
        let claimed = end.sound.done("job_queue.claim", &queue(), want, None).await?;
        let jobs = claimed.body.as_array().context("a claim answered no list")?;
        for job in jobs {
            let id = job["job_id"].as_str().context("a job without an id")?;
            end.sound.done("job.complete", &[id.into()], json!({"attempt": job["attempt"]}), None).await?;
        }
        if jobs.is_empty() && all_are_over(end).await?.is_none() {
            break;
        }
    }
    if let Some(left) = all_are_over(end).await? {
        anyhow::bail!("it cannot be claimed and is not over: {left}");
    }
    // Nothing is left on a wait list. The invariants of the archetype say the rest.
    let lines = rows(end, "job_lines").await?;
    ensure!(lines.is_empty(), "some wait for ever: {lines:?}");
    Ok(())
}

/// How often what is left is claimed.
const LOOKS_MAX: usize = 300;

async fn rows(end: &FinishedHistory, table: &str) -> Result<Vec<Row>> {
    scan(end.sound.house.store().as_ref(), Scan::of(end.sound.table(table)?, &end.sound.tenant)).await
}

/// One that is not, if there is one.
async fn all_are_over(end: &FinishedHistory) -> Result<Option<Row>> {
    let over = ["COMPLETED", "FAILED", "CANCELLED"];
    let jobs = rows(end, "jobs").await?;
    Ok(jobs.into_iter().find(|job| !job.text("state").is_some_and(|state| over.contains(&state))))
}
