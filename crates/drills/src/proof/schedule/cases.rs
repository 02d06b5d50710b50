//! A09 Future constraint + claimable run: each job claimed by one worker at a time, its result recorded once, whatever dies.

mod definitions;
mod ends;
mod lanes;
mod late;
mod races;

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::pin::Pin;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};
use async_trait::async_trait;
use serde_json::{Value as Json, json};
use statehouse::jobs::{Job, JobFailure, JobHandler, JobRunner, RunnerOptions};
use statehouse::worker::WorkerOptions;
use statehouse::{Answer, Code, Operation};
use statehouse_store::clock::SkewedClock;
use statehouse_store::faulty::{FaultyStore, Odds};
use statehouse_store::guard::now;
use statehouse_store::{
    Clock, Commit, ManualClock, Page, Plan, Query, Random, Row, Scan, Step, Store, StoreError, SystemClock,
    Time, Value,
};

use self::definitions::*;
use self::ends::*;
use self::lanes::*;
use self::late::*;
use self::races::*;
use super::{cases as schedule, invariants};
use crate::conformance::{Case, cases};
use crate::harness::drill::{Drill, DrillClock};
use crate::harness::engines::TestNamespace;
use crate::harness::proxy::{Interceptor, LostThenUnavailable, Paused, StoreProxy};
use crate::harness::store_client::{pause, same, whole_log};
use crate::harness::tenant_client::{TenantClient, shows};

pub(crate) const CASES: &[Case] = cases! {
    schedule {
        a_job_is_enqueued_claimed_and_completed(8),
        a_job_is_not_claimed_before_its_time(8),
        a_failed_job_rests_and_is_tried_again(8),
        a_dead_letter_is_replayed(8),
        a_damaged_job_is_reported_with_its_key(8),
        a_killed_workers_job_is_claimed_within_one_lease(8),
        a_worker_that_wakes_too_late_is_refused(8),
        heartbeats_hold_a_job(8),
        a_lost_heartbeat_stays_unknown_if_the_retry_is_unavailable(8),
        attempts_end_also_for_workers_that_die(8),
        cancelled_jobs_are_over(8),
        a_paused_queue_gives_nothing(8),
        priorities_come_first(8),
        a_batch_decides_each_job_by_itself(8),
        jobs_that_end_together_are_one_plan(9),
        what_is_not_kept_goes_when_it_is_done(8),
        what_handlers_end_together_ends_once(42),
        a_repeated_claim_gets_its_own_jobs(8),
        jobs_of_one_key_run_in_their_order(8),
        of_one_key_so_many_run_at_once(8),
        a_job_in_line_can_be_cancelled(8),
        a_refused_job_leaves_no_lane_behind(8),
        a_number_of_a_lane_that_is_gone_is_not_used(8),
        a_lane_that_changes_meanwhile_is_looked_at_again(8),
        a_waiting_job_is_not_overtaken(8),
        a_unique_key_has_one_job(8),
        a_unique_key_has_one_job_in_a_race(8),
        a_job_is_enqueued_together_with_other_writes(8),
        many_claimers_never_share_a_job(8),
        many_keys_keep_their_order_under_load(8),
        lost_answers_lose_and_double_nothing(8),
        a_clock_that_steps_breaks_no_claim(8),
        a_worker_whose_clock_is_wrong_claims_nothing_early(8),
        a_claim_waits_for_a_job(8),
        tenants_do_not_see_each_others_jobs(8),
        what_is_over_is_forgotten(8),
        bad_input_is_refused(8),
        a_definition_makes_its_jobs_ahead_of_their_time(9),
        each_due_time_makes_one_job_however_many_look(9),
        missed_due_times_make_one_job_or_all(9),
        a_definition_for_once_ends(9),
        cron_means_the_wall_clock_of_its_zone(9),
        a_paused_definition_takes_back_what_waits(9),
        a_definition_is_defined_anew_and_deleted(9),
        what_overlaps_is_skipped_or_stands_in_line(9),
        a_maker_whose_clock_is_ahead_makes_nothing_early(9),
        steps_are_counted_by_the_engines_clock(9),
        a_maker_that_loses_answers_makes_nothing_twice(9),
        a_paused_definition_and_its_maker_contend_on_one_row(9),
        definitions_are_made_by_the_workers_of_any_process(9),
        handlers_in_rust_do_jobs(8),
        a_tenant_with_many_jobs_does_not_hold_up_another(8),
        a_process_that_is_killed_loses_no_job(8),
        a_paused_caller_comes_too_late(8),
        a_definition_that_changed_meanwhile_stays_so(9),
        a_stale_reader_claims_and_fails_nothing(8),
        a_stale_reader_forgets_nothing(8),
        what_was_claimed_is_told_if_the_store_fails_then(8),
        what_is_late_is_found_before_a_long_queue(8),
        a_stale_reader_makes_nothing(9),
        answers_have_no_internal_fields(8),
    }
};

/// The failures of the atlas, each provoked by a case.
pub(crate) const DRILLS: &[Drill] = &[
    Drill::by_case(
        CASES,
        "due item materialized twice",
        "Several makers look at once when several due times of each definition have passed.",
        "schedule::each_due_time_makes_one_job_however_many_look",
    ),
    Drill::by_case(
        CASES,
        "due item never materialized",
        "The process that makes jobs is killed with its leases in its hands, and others come due.",
        "schedule::definitions_are_made_by_the_workers_of_any_process",
    ),
    Drill::by_case(
        CASES,
        "job claimed twice",
        "Many workers claim from one queue at once, and all that they got is compared.",
        "schedule::many_claimers_never_share_a_job",
    ),
    Drill::by_case(
        CASES,
        "run executed but result not recorded",
        "A worker sleeps for longer than its lease over jobs that it has done, and then wants to record them.",
        "schedule::a_worker_that_wakes_too_late_is_refused",
    ),
];

const BLUEPRINT: &str = r#"
[house]
name = "drill"

[schedule.job]
lease        = "30s"
max_attempts = 3
backoff      = "10s"
backoff_max  = "1m"
priorities   = 3
shards       = 2
keep         = "1h"
keep_failed  = "1d"

[schedule.task]
per_key = 2
shards  = 3

[entity.order]
key    = { id = "int" }
fields = { note = "text" }
"#;

/// How often an index is looked at before it counts as wrong.
const LOOKS_MAX: usize = 100;
const SECOND: Duration = Duration::from_secs(1);

fn standing() -> ManualClock {
    ManualClock::at(Time::from_millis(1_800_000_000_000))
}

async fn desk(namespace: &dyn TestNamespace) -> Result<(TenantClient, ManualClock)> {
    let clock = standing();
    Ok((TenantClient::open_at(namespace, BLUEPRINT, Arc::new(clock.clone())).await?, clock))
}

fn id(job: &str) -> [Value; 1] {
    [job.into()]
}

async fn enqueue(client: &TenantClient, job: &str, mut input: Json) -> Result<()> {
    input["job_id"] = json!(job);
    client.done("job.enqueue", &[], input, None).await.map(drop)
}

/// One claim of what there is: ids and attempts.
async fn claim_once(client: &TenantClient, input: Json) -> Result<Vec<(String, i64)>> {
    claim_from(client, "job", input).await
}

async fn claim_from(client: &TenantClient, resource: &str, mut input: Json) -> Result<Vec<(String, i64)>> {
    if input.get("worker").is_none() {
        input["worker"] = json!("ann");
    }
    let claimed = client.done(&format!("{resource}_queue.claim"), &id("default"), input, None).await?;
    jobs_in(&claimed.body)
}

fn jobs_in(body: &Json) -> Result<Vec<(String, i64)>> {
    let jobs = body.as_array().context("a claim answered no list")?.iter();
    jobs.map(|job| {
        let id = job["job_id"].as_str().context("a job without an id")?;
        Ok((id.to_owned(), job["attempt"].as_i64().context("a job without an attempt")?))
    })
    .collect()
}

/// Claims until there are so many, because an index may lag.
async fn claim(client: &TenantClient, limit: usize, expected: usize) -> Result<Vec<(String, i64)>> {
    claim_until(client, "job", limit, expected).await
}

async fn claim_until(
    client: &TenantClient,
    resource: &str,
    limit: usize,
    expected: usize,
) -> Result<Vec<(String, i64)>> {
    let mut jobs = Vec::new();
    for _ in 0..LOOKS_MAX {
        jobs.extend(claim_from(client, resource, json!({"limit": limit - jobs.len()})).await?);
        if jobs.len() >= expected {
            break;
        }
        pause().await;
    }
    ensure!(jobs.len() == expected, "expected {expected} jobs, claimed {jobs:?}");
    Ok(jobs)
}

/// Requires that nothing can be claimed, as often as an index might lag.
async fn claims_nothing(client: &TenantClient) -> Result<()> {
    for _ in 0..3 {
        same("what can be claimed", &claim_once(client, json!({"limit": 98})).await?, &vec![])?;
    }
    Ok(())
}

async fn complete(client: &TenantClient, job: &str, attempt: i64) -> Result<()> {
    let input = json!({"attempt": attempt, "result": {"by": attempt}});
    client.done("job.complete", &id(job), input, None).await.map(drop)
}

async fn all_rows(client: &TenantClient, table: &str) -> Result<Vec<Row>> {
    crate::harness::store_client::scan(
        client.house.store().as_ref(),
        Scan::of(client.table(table)?, &client.tenant),
    )
    .await
}

async fn a_job_is_enqueued_claimed_and_completed(namespace: &dyn TestNamespace) -> Result<()> {
    let (client, clock) = desk(namespace).await?;
    let enqueued =
        client.done("job.enqueue", &[], json!({"job_id": "a", "payload": {"to": "ann"}}), None).await?;
    same("the key", &enqueued.created.as_deref(), &Some("a"))?;
    let now = clock.now().to_string();
    shows(
        &enqueued,
        &json!({"state": "PENDING", "queue": "default", "attempt": 0, "attempts_max": 3, "run_at": now, "version": 1}),
    )?;
    client.refused("job.enqueue", &[], json!({"job_id": "a"}), None, Code::AlreadyExists).await?;
    client.refused("job.read", &id("b"), json!({}), None, Code::NotFound).await?;
    let made = client.done("job.enqueue", &[], json!({"queue": "mail"}), None).await?;
    ensure!(made.created.is_some_and(|id| id.len() == 36), "an id was to be made");
    let claimed =
        client.done("job_queue.claim", &id("default"), json!({"worker": "ann", "limit": 9}), None).await?;
    let end = clock.now().plus(SECOND * 30).to_string();
    let job = &claimed.body[0];
    same("how many", &claimed.body.as_array().map(Vec::len), &Some(1))?;
    for (name, expected) in [
        ("job_id", json!("a")),
        ("state", json!("IN_PROGRESS")),
        ("attempt", json!(1)),
        ("payload", json!({"to": "ann"})),
        ("worker", json!("ann")),
        ("run_at", json!(end)),
    ] {
        same(name, &job[name], &expected)?;
    }
    claims_nothing(&client).await?;
    for attempt in [0, 2] {
        client.refused("job.complete", &id("a"), json!({"attempt": attempt}), None, Code::NotHolder).await?;
    }
    client.refused("job.complete", &id("b"), json!({"attempt": 1}), None, Code::NotFound).await?;
    clock.advance(SECOND);
    let input = json!({"attempt": 1, "result": [1, "done"]});
    let done = client.done("job.complete", &id("a"), input.clone(), None).await?;
    shows(&done, &json!({"state": "COMPLETED", "result": [1, "done"], "attempt": 1}))?;
    let expected = json!({"state": "COMPLETED", "result": [1, "done"], "run_at": null});
    client.shows("job", &id("a"), &expected).await?;
    for action in ["complete", "fail"] {
        let action = format!("job.{action}");
        client.refused(&action, &id("a"), json!({"attempt": 1}), None, Code::WrongState).await?;
    }
    client.refused("job.cancel", &id("a"), json!({}), None, Code::WrongState).await?;
    client.refused("job.replay", &id("a"), json!({}), None, Code::WrongState).await?;
    clock.advance(SECOND * 60);
    claims_nothing(&client).await?;
    listed(&client, json!({"state": "COMPLETED"}), &["a"]).await?;
    listed(&client, json!({"state": "IN_PROGRESS"}), &[]).await?;
    let names: Vec<String> = client.events(3).await?;
    same("what the log says of results", &names.iter().filter(|name| *name == "job.completed").count(), &1)
}

async fn listed(client: &TenantClient, filter: Json, expected: &[&str]) -> Result<()> {
    let mut found = Vec::new();
    for _ in 0..LOOKS_MAX {
        let list = client.done("job.list", &[], filter.clone(), None).await?;
        let rows = list.body.as_array().context("no list")?.iter();
        found = rows.filter_map(|row| row["job_id"].as_str().map(str::to_owned)).collect::<Vec<_>>();
        if found == expected {
            return Ok(());
        }
        pause().await;
    }
    bail!("{filter}: expected {expected:?}, got {found:?}")
}

async fn a_job_is_not_claimed_before_its_time(namespace: &dyn TestNamespace) -> Result<()> {
    let (client, clock) = desk(namespace).await?;
    let at = clock.now().plus(SECOND * 20).to_string();
    enqueue(&client, "at", json!({"at": at})).await?;
    enqueue(&client, "after", json!({"after_ms": 10_000})).await?;
    enqueue(&client, "both", json!({"at": at, "after_ms": 10_000})).await?;
    for (wait, expected) in [(10, "after"), (10, "at"), (10, "both")] {
        clock.advance(SECOND * wait - Duration::from_micros(1));
        claims_nothing(&client).await?;
        clock.advance(Duration::from_micros(1));
        same("what is due", &claim(&client, 5, 1).await?, &vec![(expected.to_owned(), 1)])?;
        complete(&client, expected, 1).await?;
    }
    Ok(())
}

async fn a_failed_job_rests_and_is_tried_again(namespace: &dyn TestNamespace) -> Result<()> {
    let (client, clock) = desk(namespace).await?;
    enqueue(&client, "a", json!({})).await?;
    // At most three attempts, with rests of 5 to 10 and of 10 to 20 seconds between them.
    for (attempt, rest) in [(1, 10), (2, 20)] {
        same("the attempt", &claim(&client, 1, 1).await?, &vec![("a".to_owned(), attempt)])?;
        client.refused("job.fail", &id("a"), json!({"attempt": attempt + 1}), None, Code::NotHolder).await?;
        let failed =
            client.done("job.fail", &id("a"), json!({"attempt": attempt, "error": "no line"}), None).await?;
        shows(&failed, &json!({"state": "RETRYING", "error": "no line", "attempt": attempt}))?;
        client.refused("job.complete", &id("a"), json!({"attempt": attempt}), None, Code::WrongState).await?;
        client.refused("job.fail", &id("a"), json!({"attempt": attempt}), None, Code::WrongState).await?;
        clock.advance(SECOND * rest / 2 - Duration::from_micros(1));
        claims_nothing(&client).await?;
        clock.advance(SECOND * rest / 2 + Duration::from_micros(1));
    }
    same("the last attempt", &claim(&client, 1, 1).await?, &vec![("a".to_owned(), 3)])?;
    let failed = client.done("job.fail", &id("a"), json!({"attempt": 3, "error": "still"}), None).await?;
    shows(&failed, &json!({"state": "FAILED", "error": "still", "run_at": null}))?;
    clock.advance(SECOND * 3_600);
    claims_nothing(&client).await?;
    listed(&client, json!({"state": "FAILED"}), &["a"]).await?;
    // One that is of no use is failed at once; one that may be tried once has one attempt.
    enqueue(&client, "b", json!({})).await?;
    claim(&client, 1, 1).await?;
    let failed = client.done("job.fail", &id("b"), json!({"attempt": 1, "final": true}), None).await?;
    shows(&failed, &json!({"state": "FAILED"}))?;
    enqueue(&client, "c", json!({"attempts_max": 1})).await?;
    claim(&client, 1, 1).await?;
    shows(&client.done("job.fail", &id("c"), json!({"attempt": 1}), None).await?, &json!({"state": "FAILED"}))
}

async fn a_dead_letter_is_replayed(namespace: &dyn TestNamespace) -> Result<()> {
    let (client, clock) = desk(namespace).await?;
    for job in ["a", "b"] {
        enqueue(&client, job, json!({"payload": job, "attempts_max": 1})).await?;
    }
    client.refused("job.replay", &id("a"), json!({}), None, Code::WrongState).await?;
    for (job, attempt) in claim(&client, 2, 2).await? {
        client.done("job.fail", &id(&job), json!({"attempt": attempt}), None).await?;
    }
    let replayed = client.done("job.replay", &id("a"), json!({}), None).await?;
    let now = clock.now().to_string();
    // Its attempts go on counting, and it gets as many more as the blueprint says.
    shows(
        &replayed,
        &json!({"state": "PENDING", "attempt": 1, "attempts_max": 4, "run_at": now, "due_at": null}),
    )?;
    same("the attempt", &claim(&client, 5, 1).await?, &vec![("a".to_owned(), 2)])?;
    client.refused("job.complete", &id("a"), json!({"attempt": 1}), None, Code::NotHolder).await?;
    complete(&client, "a", 2).await?;
    // Several at once, of which one is not dead.
    let input = json!({"jobs": [{"job_id": "a"}, {"job_id": "b"}]});
    let replayed = client.done("job_queue.replay", &id("default"), input, None).await?;
    same("a", &replayed.body[0]["code"], &json!("wrong_state"))?;
    same("b", &replayed.body[1]["done"], &json!(true))?;
    same("what can be claimed", &claim(&client, 5, 1).await?, &vec![("b".to_owned(), 2)])
}

async fn a_killed_workers_job_is_claimed_within_one_lease(namespace: &dyn TestNamespace) -> Result<()> {
    let (client, clock) = desk(namespace).await?;
    enqueue(&client, "a", json!({})).await?;
    claim(&client, 1, 1).await?;
    // The worker is gone. No sweeper runs, and no event says so.
    clock.advance(SECOND * 30 - Duration::from_micros(1));
    claims_nothing(&client).await?;
    clock.advance(Duration::from_micros(1));
    same("who is next", &claim(&client, 1, 1).await?, &vec![("a".to_owned(), 2)])?;
    // A worker that wants less time, or more, says so.
    enqueue(&client, "b", json!({})).await?;
    let brief = claim_once(&client, json!({"lease_ms": 100, "limit": 1})).await?;
    same("a short lease", &brief, &vec![("b".to_owned(), 1)])?;
    clock.advance(Duration::from_millis(100));
    same("soon over", &claim(&client, 1, 1).await?, &vec![("b".to_owned(), 2)])
}

async fn a_worker_that_wakes_too_late_is_refused(namespace: &dyn TestNamespace) -> Result<()> {
    let (client, clock) = desk(namespace).await?;
    enqueue(&client, "a", json!({})).await?;
    enqueue(&client, "b", json!({})).await?;
    claim(&client, 2, 2).await?;
    // It slept for ten minutes. One of its jobs was claimed by another meanwhile, the other was not.
    clock.advance(SECOND * 600);
    let mut taken = claim_once(&client, json!({"worker": "bob", "limit": 1})).await?;
    for _ in 0..LOOKS_MAX {
        if taken.is_empty() {
            pause().await;
            taken = claim_once(&client, json!({"worker": "bob", "limit": 1})).await?;
        }
    }
    let (taken, attempt) = taken.pop().context("nothing was claimed")?;
    same("the attempt", &attempt, &2)?;
    let left = if taken == "a" { "b" } else { "a" };
    for action in ["job.complete", "job.fail"] {
        client.refused(action, &id(&taken), json!({"attempt": 1}), None, Code::NotHolder).await?;
    }
    let beat = json!({"jobs": [{"job_id": taken, "attempt": 1}]});
    let beaten = client.done("job_queue.heartbeat", &id("default"), beat, None).await?;
    same("its heartbeat", &beaten.body[0]["code"], &json!("not_holder"))?;
    complete(&client, left, 1).await?;
    complete(&client, &taken, 2).await?;
    for (job, by) in [(left, 1), (taken.as_str(), 2)] {
        client.shows("job", &id(job), &json!({"state": "COMPLETED", "result": {"by": by}})).await?;
    }
    Ok(())
}

async fn heartbeats_hold_a_job(namespace: &dyn TestNamespace) -> Result<()> {
    let (client, clock) = desk(namespace).await?;
    for job in ["a", "b"] {
        enqueue(&client, job, json!({})).await?;
    }
    claim(&client, 2, 2).await?;
    for _ in 0..3 {
        clock.advance(SECOND * 20);
        let jobs = json!([{"job_id": "a", "attempt": 1}, {"job_id": "b", "attempt": 9}, {"job_id": "c", "attempt": 1}]);
        let beat = client.done("job_queue.heartbeat", &id("default"), json!({"jobs": jobs}), None).await?;
        same("a", &beat.body[0]["done"], &json!(true))?;
        same("b", &beat.body[1]["code"], &json!("not_holder"))?;
        same("c", &beat.body[2]["code"], &json!("not_found"))?;
    }
    same("whose lease is over", &claim(&client, 5, 1).await?, &vec![("b".to_owned(), 2)])?;
    let longer = json!({"jobs": [{"job_id": "a", "attempt": 1}], "lease_ms": 3_600_000});
    client.done("job_queue.heartbeat", &id("default"), longer, None).await?;
    complete(&client, "b", 2).await?;
    clock.advance(SECOND * 3_599);
    claims_nothing(&client).await?;
    complete(&client, "a", 1).await?;
    let late = json!({"jobs": [{"job_id": "a", "attempt": 1}]});
    let late = client.done("job_queue.heartbeat", &id("default"), late, None).await?;
    same("a heart that beats on", &late.body[0]["code"], &json!("wrong_state"))?;
    clock.advance(SECOND * 3_600);
    claims_nothing(&client).await
}

async fn attempts_end_also_for_workers_that_die(namespace: &dyn TestNamespace) -> Result<()> {
    let (client, clock) = desk(namespace).await?;
    enqueue(&client, "poison", json!({"attempts_max": 2, "order_key": "k"})).await?;
    enqueue(&client, "next", json!({"order_key": "k"})).await?;
    for attempt in 1..=2 {
        same("the attempt", &claim(&client, 5, 1).await?, &vec![("poison".to_owned(), attempt)])?;
        clock.advance(SECOND * 30);
    }
    // The next claim fails it, and with that lets the next of its key run.
    same("what is left", &claim(&client, 5, 1).await?, &vec![("next".to_owned(), 1)])?;
    client.shows("job", &id("poison"), &json!({"state": "FAILED", "attempt": 2, "run_at": null})).await?;
    client
        .refused("job.complete", &id("poison"), json!({"attempt": 2}), None, Code::WrongState)
        .await
        .map(drop)
}

async fn cancelled_jobs_are_over(namespace: &dyn TestNamespace) -> Result<()> {
    let (client, clock) = desk(namespace).await?;
    for job in ["waits", "runs", "rests"] {
        enqueue(&client, job, json!({})).await?;
    }
    client.done("job.cancel", &id("waits"), json!({}), None).await?;
    for (job, attempt) in claim(&client, 5, 2).await? {
        if job == "rests" {
            client.done("job.fail", &id(&job), json!({"attempt": attempt}), None).await?;
        }
        let cancelled = client.done("job.cancel", &id(&job), json!({}), None).await?;
        shows(&cancelled, &json!({"state": "CANCELLED", "run_at": null}))?;
        client
            .refused("job.complete", &id(&job), json!({"attempt": attempt}), None, Code::WrongState)
            .await?;
    }
    client.refused("job.cancel", &id("waits"), json!({}), None, Code::WrongState).await?;
    client.refused("job.cancel", &id("nobody"), json!({}), None, Code::NotFound).await?;
    clock.advance(SECOND * 600);
    claims_nothing(&client).await
}

async fn a_paused_queue_gives_nothing(namespace: &dyn TestNamespace) -> Result<()> {
    let (client, _) = desk(namespace).await?;
    enqueue(&client, "a", json!({})).await?;
    enqueue(&client, "b", json!({"queue": "mail"})).await?;
    client.shows("job_queue", &id("default"), &json!({"paused": false})).await?;
    shows(&client.done("job_queue.pause", &id("default"), json!({}), None).await?, &json!({"paused": true}))?;
    claims_nothing(&client).await?;
    let other = client.done("job_queue.claim", &id("mail"), json!({"worker": "ann"}), None).await?;
    same("another queue", &jobs_in(&other.body)?, &vec![("b".to_owned(), 1)])?;
    let elsewhere = client.for_tenant("bond")?;
    enqueue(&elsewhere, "a", json!({})).await?;
    claim(&elsewhere, 1, 1).await?;
    client.done("job_queue.resume", &id("default"), json!({}), None).await?;
    same("what can be claimed", &claim(&client, 5, 1).await?, &vec![("a".to_owned(), 1)])
}

async fn priorities_come_first(namespace: &dyn TestNamespace) -> Result<()> {
    let (client, clock) = desk(namespace).await?;
    let mut expected = BTreeMap::new();
    for number in 0..9 {
        let (job, priority) = (format!("j{number}"), 2 - number % 3);
        enqueue(&client, &job, json!({"priority": priority})).await?;
        expected.insert(job, priority);
        clock.advance(SECOND);
    }
    let mut got = Vec::new();
    for _ in 0..3 {
        got.extend(claim(&client, 3, 3).await?.into_iter().map(|(job, _)| expected[&job]));
    }
    same("the priorities, as they were claimed", &got, &vec![0, 0, 0, 1, 1, 1, 2, 2, 2])?;
    client.refused("job.enqueue", &[], json!({"priority": 3}), None, Code::InvalidInput).await.map(drop)
}

async fn a_batch_decides_each_job_by_itself(namespace: &dyn TestNamespace) -> Result<()> {
    let (client, _) = desk(namespace).await?;
    for job in ["a", "b", "c", "d"] {
        enqueue(&client, job, json!({})).await?;
    }
    claim(&client, 4, 4).await?;
    let jobs = json!([
        {"job_id": "a", "attempt": 1, "result": 7},
        {"job_id": "b", "attempt": 2},
        {"job_id": "nobody", "attempt": 1},
        {"job_id": "c", "attempt": 1},
    ]);
    let queue = id("default");
    let call = || client.call_as("batch-1", "job_queue.complete", &queue, json!({"jobs": jobs}), None);
    let first = call().await?;
    let codes: Vec<&Json> = first.body.as_array().into_iter().flatten().map(|one| &one["code"]).collect();
    same("why not", &codes, &vec![&Json::Null, &json!("not_holder"), &json!("not_found"), &Json::Null])?;
    same("a repetition", &call().await?.body, &first.body)?;
    for (job, state) in [("a", "COMPLETED"), ("b", "IN_PROGRESS"), ("c", "COMPLETED"), ("d", "IN_PROGRESS")] {
        client.shows("job", &id(job), &json!({"state": state})).await?;
    }
    let failed =
        json!({"jobs": [{"job_id": "b", "attempt": 1, "error": "x"}, {"job_id": "a", "attempt": 1}]});
    let failed = client.done("job_queue.fail", &id("default"), failed, None).await?;
    same("b", &failed.body[0]["done"], &json!(true))?;
    same("a", &failed.body[1]["code"], &json!("wrong_state"))?;
    client.shows("job", &id("b"), &json!({"state": "RETRYING", "error": "x"})).await?;
    client.shows("job", &id("a"), &json!({"state": "COMPLETED", "result": 7})).await?;
    let many: Vec<Json> = (0..99).map(|n| json!({"job_id": format!("{n}"), "attempt": 1})).collect();
    let many = json!({"jobs": many});
    client.refused("job_queue.complete", &id("default"), many, None, Code::InvalidInput).await.map(drop)
}

async fn a_repeated_claim_gets_its_own_jobs(namespace: &dyn TestNamespace) -> Result<()> {
    let (client, _) = desk(namespace).await?;
    for job in ["a", "b", "c"] {
        enqueue(&client, job, json!({})).await?;
    }
    let call = |operation: &'static str, limit: i64| {
        let input = json!({"worker": "ann", "limit": limit});
        let client = client.clone();
        async move { client.call_as(operation, "job_queue.claim", &["default".into()], input, None).await }
    };
    let first = jobs_in(&call("op-1", 2).await?.body)?;
    same("how many", &first.len(), &2)?;
    same("a repetition", &jobs_in(&call("op-1", 2).await?.body)?, &first)?;
    match call("op-1", 1).await {
        Err(refusal) => same("another request", &refusal.code, &Code::OperationReused)?,
        Ok(answer) => bail!("another request under the id was answered {answer:?}"),
    }
    let rest = jobs_in(&call("op-2", 2).await?.body)?;
    same("what is left", &rest.len(), &1)?;
    ensure!(!first.contains(&rest[0]), "{first:?} {rest:?}");
    // A batch is for single writes.
    let request = TenantClient::request("job_queue.claim", &id("default"), &json!({"worker": "ann"}), None);
    match client.house.batch(&client.tenant, vec![request], Operation::default()).await {
        Err(refusal) if refusal.call == Some(0) => same("in a batch", &refusal.code, &Code::InvalidInput),
        other => bail!("a claim in a batch was answered {other:?}"),
    }
}

async fn a_unique_key_has_one_job(namespace: &dyn TestNamespace) -> Result<()> {
    let (client, _) = desk(namespace).await?;
    let with_key = |job: &str| json!({"job_id": job, "unique_key": "u", "attempts_max": 1});
    let taken = async |client: &TenantClient, job: &str, by: &str| -> Result<()> {
        let refusal = client.refused("job.enqueue", &[], with_key(job), None, Code::AlreadyExists).await?;
        ensure!(refusal.message.contains(by), "{refusal}");
        client.refused("job.read", &id(job), json!({}), None, Code::NotFound).await.map(drop)
    };
    client.done("job.enqueue", &[], with_key("a"), None).await?;
    taken(&client, "b", "job a").await?;
    client.for_tenant("bond")?.done("job.enqueue", &[], with_key("b"), None).await?;
    claim(&client, 1, 1).await?;
    taken(&client, "b", "IN_PROGRESS").await?;
    client.done("job.fail", &id("a"), json!({"attempt": 1}), None).await?;
    // It is over, and the key is free, also for itself.
    client.done("job.replay", &id("a"), json!({}), None).await?;
    taken(&client, "b", "job a").await?;
    claim(&client, 1, 1).await?;
    client.done("job.fail", &id("a"), json!({"attempt": 2, "final": true}), None).await?;
    client.done("job.enqueue", &[], with_key("b"), None).await?;
    client.refused("job.replay", &id("a"), json!({}), None, Code::AlreadyExists).await?;
    client.done("job.cancel", &id("b"), json!({}), None).await?;
    client.done("job.replay", &id("a"), json!({}), None).await?;
    taken(&client, "c", "job a").await
}

async fn a_job_is_enqueued_together_with_other_writes(namespace: &dyn TestNamespace) -> Result<()> {
    let (client, _) = desk(namespace).await?;
    let order = |key: i64| TenantClient::request("order.create", &[], &json!({"id": key, "note": "x"}), None);
    let job = |job: &str| TenantClient::request("job.enqueue", &[], &json!({"job_id": job}), None);
    let batch = async |requests| client.house.batch(&client.tenant, requests, Operation::default()).await;
    let written = batch(vec![order(1), job("a")]).await;
    ensure!(written.is_ok(), "{written:?}");
    same(
        "the refusal",
        &batch(vec![job("b"), order(1)]).await.map_err(|no| (no.call, no.code)).err(),
        &Some((Some(1), Code::AlreadyExists)),
    )?;
    client.refused("job.read", &id("b"), json!({}), None, Code::NotFound).await?;
    same("what can be claimed", &claim(&client, 9, 1).await?, &vec![("a".to_owned(), 1)])?;
    // The effect of a job and its completion are one plan: an attempt that lost the job has no effect.
    let done =
        |attempt: i64| TenantClient::request("job.complete", &id("a"), &json!({"attempt": attempt}), None);
    let late = batch(vec![order(2), done(7)]).await;
    same("a late effect", &late.map_err(|no| (no.call, no.code)).err(), &Some((Some(1), Code::NotHolder)))?;
    client.refused("order.read", &[2.into()], json!({}), None, Code::NotFound).await?;
    ensure!(batch(vec![order(2), done(1)]).await.is_ok(), "the effect and the completion");
    client.shows("order", &[2.into()], &json!({"note": "x"})).await
}

async fn tenants_do_not_see_each_others_jobs(namespace: &dyn TestNamespace) -> Result<()> {
    let (client, _) = desk(namespace).await?;
    let other = client.for_tenant("bond")?;
    // Names of which one begins with the other's.
    let third = client.for_tenant("acme2")?;
    for job in 0..5 {
        enqueue(&client, &format!("a{job}"), json!({"order_key": "k", "unique_key": format!("{job}")}))
            .await?;
    }
    claims_nothing(&other).await?;
    claims_nothing(&third).await?;
    enqueue(&other, "a0", json!({"order_key": "k", "unique_key": "0"})).await?;
    same("its own", &claim(&other, 9, 1).await?, &vec![("a0".to_owned(), 1)])?;
    other.refused("job.cancel", &id("a1"), json!({}), None, Code::NotFound).await?;
    same("the other's", &claim(&client, 9, 1).await?, &vec![("a0".to_owned(), 1)])?;
    complete(&other, "a0", 1).await?;
    client.shows("job", &id("a0"), &json!({"state": "IN_PROGRESS"})).await
}

async fn what_is_over_is_forgotten(namespace: &dyn TestNamespace) -> Result<()> {
    let (client, clock) = desk(namespace).await?;
    for (job, input) in [
        ("done", json!({"unique_key": "u"})),
        ("dead", json!({"attempts_max": 1})),
        ("gone", json!({"unique_key": "v"})),
        ("live", json!({})),
    ] {
        enqueue(&client, job, input).await?;
    }
    claim(&client, 9, 4).await?;
    complete(&client, "done", 1).await?;
    client.done("job.fail", &id("dead"), json!({"attempt": 1}), None).await?;
    client.done("job.cancel", &id("gone"), json!({}), None).await?;
    // Another job has its key by now.
    enqueue(&client, "heir", json!({"unique_key": "v"})).await?;
    clock.advance(SECOND * 3_600 - Duration::from_micros(1));
    same("too early", &client.drain_workers().await?, &0)?;
    clock.advance(Duration::from_micros(1));
    same("two of them", &client.drain_workers().await?, &2)?;
    for job in ["done", "gone"] {
        client.refused("job.read", &id(job), json!({}), None, Code::NotFound).await?;
    }
    let keys = all_rows(&client, "job_uniques").await?;
    same(
        "whose keys are left",
        &keys.iter().filter_map(|row| row.text("job_id")).collect::<Vec<_>>(),
        &vec!["heir"],
    )?;
    // One that is brought back to life is not forgotten.
    client.done("job.replay", &id("dead"), json!({}), None).await?;
    clock.advance(SECOND * 48 * 3_600);
    same("what lives", &client.drain_workers().await?, &0)?;
    enqueue(&client, "done", json!({"unique_key": "u"})).await
}

async fn bad_input_is_refused(namespace: &dyn TestNamespace) -> Result<()> {
    let (client, _) = desk(namespace).await?;
    for input in [
        json!({"priority": -1}),
        json!({"after_ms": -1}),
        json!({"at": "soon"}),
        json!({"attempts_max": 0}),
        json!({"order_key": 7}),
        json!({"what": 1}),
    ] {
        client.refused("job.enqueue", &[], input, None, Code::InvalidInput).await?;
    }
    let heavy = json!({"payload": "x".repeat(100_001)});
    client.refused("job.enqueue", &[], heavy, None, Code::TooLarge).await?;
    for input in [
        json!({}),
        json!({"worker": "a", "limit": 0}),
        json!({"worker": "a", "limit": 99}),
        json!({"worker": "a", "lease_ms": 1}),
    ] {
        client.refused("job_queue.claim", &id("default"), input, None, Code::InvalidInput).await?;
    }
    enqueue(&client, "a", json!({})).await?;
    claim(&client, 1, 1).await?;
    let heavy = json!({"attempt": 1, "result": "x".repeat(100_001)});
    client.refused("job.complete", &id("a"), heavy, None, Code::TooLarge).await?;
    client.refused("job.complete", &id("a"), json!({}), None, Code::InvalidInput).await?;
    // Heavy ones are claimed in several goes.
    complete(&client, "a", 1).await?;
    for job in 0..4 {
        enqueue(&client, &format!("h{job}"), json!({"payload": "x".repeat(99_000)})).await?;
    }
    let first = claim_once(&client, json!({"limit": 9})).await?.len();
    ensure!((1..4).contains(&first), "{first} heavy jobs in one claim");
    claim(&client, 9, 4 - first).await.map(drop)
}
