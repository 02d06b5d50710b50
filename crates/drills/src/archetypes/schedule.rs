//! A09 Future constraint + claimable run: each job claimed by one worker at a time, its result recorded once, whatever dies.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::pin::Pin;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};
use async_trait::async_trait;
use serde_json::{Value as Json, json};
use statehouse::schedule::{Failure, Handler, Hands, Job, Options as HandOptions};
use statehouse::worker::Options;
use statehouse::{Answer, Code, Operation};
use statehouse_store::clock::SkewedClock;
use statehouse_store::faulty::{FaultyStore, Odds};
use statehouse_store::guard::now;
use statehouse_store::{
    Clock, Commit, ManualClock, Plan, Random, Row, Scan, Step, Store, StoreError, SystemClock, Time, Value,
};

use super::house::{Visitor, shows};
use super::schedule;
use crate::around::{Around, Hook, Paused};
use crate::client::{pause, same, whole_log};
use crate::conformance::{Case, cases};
use crate::drill::{Drill, DrillClock};
use crate::engines::Lab;

pub(super) const CASES: &[Case] = cases! {
    schedule {
        a_job_is_enqueued_claimed_and_completed(8),
        a_job_is_not_claimed_before_its_time(8),
        a_failed_job_rests_and_is_tried_again(8),
        a_dead_letter_is_replayed(8),
        a_killed_workers_job_is_claimed_within_one_lease(8),
        a_worker_that_wakes_too_late_is_refused(8),
        heartbeats_hold_a_job(8),
        attempts_end_also_for_workers_that_die(8),
        cancelled_jobs_are_over(8),
        a_paused_queue_gives_nothing(8),
        priorities_come_first(8),
        a_batch_decides_each_job_by_itself(8),
        a_repeated_claim_gets_its_own_jobs(8),
        jobs_of_one_key_run_in_their_order(8),
        of_one_key_so_many_run_at_once(8),
        a_job_in_line_can_be_cancelled(8),
        a_refused_job_leaves_no_lane_behind(8),
        a_number_of_a_lane_that_is_gone_is_not_used(8),
        a_lane_that_changes_meanwhile_is_looked_at_again(8),
        who_stands_in_line_is_not_overtaken(8),
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
        who_was_paused_comes_too_late(8),
        a_definition_that_changed_meanwhile_stays_so(9),
        who_looked_long_ago_claims_and_fails_nothing(8),
        who_looked_long_ago_forgets_nothing(8),
        who_looked_long_ago_makes_nothing(9),
    }
};

/// The failures of the atlas, each provoked by a case.
pub(super) const DRILLS: &[Drill] = &[
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

async fn desk(lab: &dyn Lab) -> Result<(Visitor, ManualClock)> {
    let clock = standing();
    Ok((Visitor::open_at(lab, BLUEPRINT, Arc::new(clock.clone())).await?, clock))
}

fn id(job: &str) -> [Value; 1] {
    [job.into()]
}

async fn enqueue(visitor: &Visitor, job: &str, mut input: Json) -> Result<()> {
    input["job_id"] = json!(job);
    visitor.done("job.enqueue", &[], input, None).await.map(drop)
}

/// One claim of what there is: ids and attempts.
async fn claim_once(visitor: &Visitor, input: Json) -> Result<Vec<(String, i64)>> {
    claim_from(visitor, "job", input).await
}

async fn claim_from(visitor: &Visitor, resource: &str, mut input: Json) -> Result<Vec<(String, i64)>> {
    if input.get("worker").is_none() {
        input["worker"] = json!("ann");
    }
    let claimed = visitor.done(&format!("{resource}_queue.claim"), &id("default"), input, None).await?;
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
async fn claim(visitor: &Visitor, limit: usize, expected: usize) -> Result<Vec<(String, i64)>> {
    claim_until(visitor, "job", limit, expected).await
}

async fn claim_until(
    visitor: &Visitor,
    resource: &str,
    limit: usize,
    expected: usize,
) -> Result<Vec<(String, i64)>> {
    let mut jobs = Vec::new();
    for _ in 0..LOOKS_MAX {
        jobs.extend(claim_from(visitor, resource, json!({"limit": limit - jobs.len()})).await?);
        if jobs.len() >= expected {
            break;
        }
        pause().await;
    }
    ensure!(jobs.len() == expected, "expected {expected} jobs, claimed {jobs:?}");
    Ok(jobs)
}

/// Requires that nothing can be claimed, as often as an index might lag.
async fn claims_nothing(visitor: &Visitor) -> Result<()> {
    for _ in 0..3 {
        same("what can be claimed", &claim_once(visitor, json!({"limit": 98})).await?, &vec![])?;
    }
    Ok(())
}

async fn complete(visitor: &Visitor, job: &str, attempt: i64) -> Result<()> {
    let input = json!({"attempt": attempt, "result": {"by": attempt}});
    visitor.done("job.complete", &id(job), input, None).await.map(drop)
}

async fn all_rows(visitor: &Visitor, table: &str) -> Result<Vec<Row>> {
    crate::client::scan(visitor.house.store().as_ref(), Scan::of(visitor.table(table)?, &visitor.tenant))
        .await
}

async fn a_job_is_enqueued_claimed_and_completed(lab: &dyn Lab) -> Result<()> {
    let (visitor, clock) = desk(lab).await?;
    let enqueued =
        visitor.done("job.enqueue", &[], json!({"job_id": "a", "payload": {"to": "ann"}}), None).await?;
    same("the key", &enqueued.created.as_deref(), &Some("a"))?;
    let now = clock.now().to_string();
    shows(
        &enqueued,
        &json!({"state": "PENDING", "queue": "default", "attempt": 0, "attempts_max": 3, "run_at": now, "version": 1}),
    )?;
    visitor.refused("job.enqueue", &[], json!({"job_id": "a"}), None, Code::AlreadyExists).await?;
    visitor.refused("job.read", &id("b"), json!({}), None, Code::NotFound).await?;
    let made = visitor.done("job.enqueue", &[], json!({"queue": "mail"}), None).await?;
    ensure!(made.created.is_some_and(|id| id.len() == 36), "an id was to be made");
    let claimed =
        visitor.done("job_queue.claim", &id("default"), json!({"worker": "ann", "limit": 9}), None).await?;
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
    claims_nothing(&visitor).await?;
    for attempt in [0, 2] {
        visitor.refused("job.complete", &id("a"), json!({"attempt": attempt}), None, Code::NotHolder).await?;
    }
    visitor.refused("job.complete", &id("b"), json!({"attempt": 1}), None, Code::NotFound).await?;
    clock.advance(SECOND);
    let input = json!({"attempt": 1, "result": [1, "done"]});
    let done = visitor.done("job.complete", &id("a"), input.clone(), None).await?;
    shows(&done, &json!({"state": "COMPLETED", "result": [1, "done"], "run_at": null, "run_shard": null}))?;
    for action in ["complete", "fail"] {
        let action = format!("job.{action}");
        visitor.refused(&action, &id("a"), json!({"attempt": 1}), None, Code::WrongState).await?;
    }
    visitor.refused("job.cancel", &id("a"), json!({}), None, Code::WrongState).await?;
    visitor.refused("job.replay", &id("a"), json!({}), None, Code::WrongState).await?;
    clock.advance(SECOND * 60);
    claims_nothing(&visitor).await?;
    listed(&visitor, json!({"state": "COMPLETED"}), &["a"]).await?;
    listed(&visitor, json!({"state": "IN_PROGRESS"}), &[]).await?;
    let names: Vec<String> = visitor.events(3).await?;
    same("what the log says of results", &names.iter().filter(|name| *name == "job.completed").count(), &1)
}

async fn listed(visitor: &Visitor, filter: Json, expected: &[&str]) -> Result<()> {
    let mut found = Vec::new();
    for _ in 0..LOOKS_MAX {
        let list = visitor.done("job.list", &[], filter.clone(), None).await?;
        let rows = list.body.as_array().context("no list")?.iter();
        found = rows.filter_map(|row| row["job_id"].as_str().map(str::to_owned)).collect::<Vec<_>>();
        if found == expected {
            return Ok(());
        }
        pause().await;
    }
    bail!("{filter}: expected {expected:?}, got {found:?}")
}

async fn a_job_is_not_claimed_before_its_time(lab: &dyn Lab) -> Result<()> {
    let (visitor, clock) = desk(lab).await?;
    let at = clock.now().plus(SECOND * 20).to_string();
    enqueue(&visitor, "at", json!({"at": at})).await?;
    enqueue(&visitor, "after", json!({"after_ms": 10_000})).await?;
    enqueue(&visitor, "both", json!({"at": at, "after_ms": 10_000})).await?;
    for (wait, expected) in [(10, "after"), (10, "at"), (10, "both")] {
        clock.advance(SECOND * wait - Duration::from_micros(1));
        claims_nothing(&visitor).await?;
        clock.advance(Duration::from_micros(1));
        same("what is due", &claim(&visitor, 5, 1).await?, &vec![(expected.to_owned(), 1)])?;
        complete(&visitor, expected, 1).await?;
    }
    Ok(())
}

async fn a_failed_job_rests_and_is_tried_again(lab: &dyn Lab) -> Result<()> {
    let (visitor, clock) = desk(lab).await?;
    enqueue(&visitor, "a", json!({})).await?;
    // At most three attempts, with rests of 5 to 10 and of 10 to 20 seconds between them.
    for (attempt, rest) in [(1, 10), (2, 20)] {
        same("the attempt", &claim(&visitor, 1, 1).await?, &vec![("a".to_owned(), attempt)])?;
        visitor.refused("job.fail", &id("a"), json!({"attempt": attempt + 1}), None, Code::NotHolder).await?;
        let failed =
            visitor.done("job.fail", &id("a"), json!({"attempt": attempt, "error": "no line"}), None).await?;
        shows(&failed, &json!({"state": "RETRYING", "error": "no line", "attempt": attempt}))?;
        visitor
            .refused("job.complete", &id("a"), json!({"attempt": attempt}), None, Code::WrongState)
            .await?;
        visitor.refused("job.fail", &id("a"), json!({"attempt": attempt}), None, Code::WrongState).await?;
        clock.advance(SECOND * rest / 2 - Duration::from_micros(1));
        claims_nothing(&visitor).await?;
        clock.advance(SECOND * rest / 2 + Duration::from_micros(1));
    }
    same("the last attempt", &claim(&visitor, 1, 1).await?, &vec![("a".to_owned(), 3)])?;
    let failed = visitor.done("job.fail", &id("a"), json!({"attempt": 3, "error": "still"}), None).await?;
    shows(&failed, &json!({"state": "FAILED", "error": "still", "run_at": null}))?;
    clock.advance(SECOND * 3_600);
    claims_nothing(&visitor).await?;
    listed(&visitor, json!({"state": "FAILED"}), &["a"]).await?;
    // One that is of no use is failed at once; one that may be tried once has one attempt.
    enqueue(&visitor, "b", json!({})).await?;
    claim(&visitor, 1, 1).await?;
    let failed = visitor.done("job.fail", &id("b"), json!({"attempt": 1, "final": true}), None).await?;
    shows(&failed, &json!({"state": "FAILED"}))?;
    enqueue(&visitor, "c", json!({"attempts_max": 1})).await?;
    claim(&visitor, 1, 1).await?;
    shows(
        &visitor.done("job.fail", &id("c"), json!({"attempt": 1}), None).await?,
        &json!({"state": "FAILED"}),
    )
}

async fn a_dead_letter_is_replayed(lab: &dyn Lab) -> Result<()> {
    let (visitor, clock) = desk(lab).await?;
    for job in ["a", "b"] {
        enqueue(&visitor, job, json!({"payload": job, "attempts_max": 1})).await?;
    }
    visitor.refused("job.replay", &id("a"), json!({}), None, Code::WrongState).await?;
    for (job, attempt) in claim(&visitor, 2, 2).await? {
        visitor.done("job.fail", &id(&job), json!({"attempt": attempt}), None).await?;
    }
    let replayed = visitor.done("job.replay", &id("a"), json!({}), None).await?;
    let now = clock.now().to_string();
    // Its attempts go on counting, and it gets as many more as the blueprint says.
    shows(
        &replayed,
        &json!({"state": "PENDING", "attempt": 1, "attempts_max": 4, "run_at": now, "due_at": null}),
    )?;
    same("the attempt", &claim(&visitor, 5, 1).await?, &vec![("a".to_owned(), 2)])?;
    visitor.refused("job.complete", &id("a"), json!({"attempt": 1}), None, Code::NotHolder).await?;
    complete(&visitor, "a", 2).await?;
    // Several at once, of which one is not dead.
    let input = json!({"jobs": [{"job_id": "a"}, {"job_id": "b"}]});
    let replayed = visitor.done("job_queue.replay", &id("default"), input, None).await?;
    same("a", &replayed.body[0]["code"], &json!("wrong_state"))?;
    same("b", &replayed.body[1]["done"], &json!(true))?;
    same("what can be claimed", &claim(&visitor, 5, 1).await?, &vec![("b".to_owned(), 2)])
}

async fn a_killed_workers_job_is_claimed_within_one_lease(lab: &dyn Lab) -> Result<()> {
    let (visitor, clock) = desk(lab).await?;
    enqueue(&visitor, "a", json!({})).await?;
    claim(&visitor, 1, 1).await?;
    // The worker is gone. No sweeper runs, and nobody is told.
    clock.advance(SECOND * 30 - Duration::from_micros(1));
    claims_nothing(&visitor).await?;
    clock.advance(Duration::from_micros(1));
    same("who is next", &claim(&visitor, 1, 1).await?, &vec![("a".to_owned(), 2)])?;
    // A worker that wants less time, or more, says so.
    enqueue(&visitor, "b", json!({})).await?;
    let brief = claim_once(&visitor, json!({"lease_ms": 100, "limit": 1})).await?;
    same("a short lease", &brief, &vec![("b".to_owned(), 1)])?;
    clock.advance(Duration::from_millis(100));
    same("soon over", &claim(&visitor, 1, 1).await?, &vec![("b".to_owned(), 2)])
}

async fn a_worker_that_wakes_too_late_is_refused(lab: &dyn Lab) -> Result<()> {
    let (visitor, clock) = desk(lab).await?;
    enqueue(&visitor, "a", json!({})).await?;
    enqueue(&visitor, "b", json!({})).await?;
    claim(&visitor, 2, 2).await?;
    // It slept for ten minutes. One of its jobs was claimed by another meanwhile, the other by nobody.
    clock.advance(SECOND * 600);
    let mut taken = claim_once(&visitor, json!({"worker": "bob", "limit": 1})).await?;
    for _ in 0..LOOKS_MAX {
        if taken.is_empty() {
            pause().await;
            taken = claim_once(&visitor, json!({"worker": "bob", "limit": 1})).await?;
        }
    }
    let (taken, attempt) = taken.pop().context("nothing was claimed")?;
    same("the attempt", &attempt, &2)?;
    let left = if taken == "a" { "b" } else { "a" };
    for action in ["job.complete", "job.fail"] {
        visitor.refused(action, &id(&taken), json!({"attempt": 1}), None, Code::NotHolder).await?;
    }
    let beat = json!({"jobs": [{"job_id": taken, "attempt": 1}]});
    let beaten = visitor.done("job_queue.heartbeat", &id("default"), beat, None).await?;
    same("its heartbeat", &beaten.body[0]["code"], &json!("not_holder"))?;
    complete(&visitor, left, 1).await?;
    complete(&visitor, &taken, 2).await?;
    for (job, by) in [(left, 1), (taken.as_str(), 2)] {
        visitor.shows("job", &id(job), &json!({"state": "COMPLETED", "result": {"by": by}})).await?;
    }
    Ok(())
}

async fn heartbeats_hold_a_job(lab: &dyn Lab) -> Result<()> {
    let (visitor, clock) = desk(lab).await?;
    for job in ["a", "b"] {
        enqueue(&visitor, job, json!({})).await?;
    }
    claim(&visitor, 2, 2).await?;
    for _ in 0..3 {
        clock.advance(SECOND * 20);
        let jobs = json!([{"job_id": "a", "attempt": 1}, {"job_id": "b", "attempt": 9}, {"job_id": "c", "attempt": 1}]);
        let beat = visitor.done("job_queue.heartbeat", &id("default"), json!({"jobs": jobs}), None).await?;
        same("a", &beat.body[0]["done"], &json!(true))?;
        same("b", &beat.body[1]["code"], &json!("not_holder"))?;
        same("c", &beat.body[2]["code"], &json!("not_found"))?;
    }
    same("whose lease is over", &claim(&visitor, 5, 1).await?, &vec![("b".to_owned(), 2)])?;
    let longer = json!({"jobs": [{"job_id": "a", "attempt": 1}], "lease_ms": 3_600_000});
    visitor.done("job_queue.heartbeat", &id("default"), longer, None).await?;
    complete(&visitor, "b", 2).await?;
    clock.advance(SECOND * 3_599);
    claims_nothing(&visitor).await?;
    complete(&visitor, "a", 1).await?;
    let late = json!({"jobs": [{"job_id": "a", "attempt": 1}]});
    let late = visitor.done("job_queue.heartbeat", &id("default"), late, None).await?;
    same("a heart that beats on", &late.body[0]["code"], &json!("wrong_state"))?;
    clock.advance(SECOND * 3_600);
    claims_nothing(&visitor).await
}

async fn attempts_end_also_for_workers_that_die(lab: &dyn Lab) -> Result<()> {
    let (visitor, clock) = desk(lab).await?;
    enqueue(&visitor, "poison", json!({"attempts_max": 2, "order_key": "k"})).await?;
    enqueue(&visitor, "next", json!({"order_key": "k"})).await?;
    for attempt in 1..=2 {
        same("the attempt", &claim(&visitor, 5, 1).await?, &vec![("poison".to_owned(), attempt)])?;
        clock.advance(SECOND * 30);
    }
    // Whoever looks next fails it, and with that lets the next of its key run.
    same("what is left", &claim(&visitor, 5, 1).await?, &vec![("next".to_owned(), 1)])?;
    visitor.shows("job", &id("poison"), &json!({"state": "FAILED", "attempt": 2, "run_at": null})).await?;
    visitor
        .refused("job.complete", &id("poison"), json!({"attempt": 2}), None, Code::WrongState)
        .await
        .map(drop)
}

async fn cancelled_jobs_are_over(lab: &dyn Lab) -> Result<()> {
    let (visitor, clock) = desk(lab).await?;
    for job in ["waits", "runs", "rests"] {
        enqueue(&visitor, job, json!({})).await?;
    }
    visitor.done("job.cancel", &id("waits"), json!({}), None).await?;
    for (job, attempt) in claim(&visitor, 5, 2).await? {
        if job == "rests" {
            visitor.done("job.fail", &id(&job), json!({"attempt": attempt}), None).await?;
        }
        let cancelled = visitor.done("job.cancel", &id(&job), json!({}), None).await?;
        shows(&cancelled, &json!({"state": "CANCELLED", "run_at": null}))?;
        visitor
            .refused("job.complete", &id(&job), json!({"attempt": attempt}), None, Code::WrongState)
            .await?;
    }
    visitor.refused("job.cancel", &id("waits"), json!({}), None, Code::WrongState).await?;
    visitor.refused("job.cancel", &id("nobody"), json!({}), None, Code::NotFound).await?;
    clock.advance(SECOND * 600);
    claims_nothing(&visitor).await
}

async fn a_paused_queue_gives_nothing(lab: &dyn Lab) -> Result<()> {
    let (visitor, _) = desk(lab).await?;
    enqueue(&visitor, "a", json!({})).await?;
    enqueue(&visitor, "b", json!({"queue": "mail"})).await?;
    visitor.shows("job_queue", &id("default"), &json!({"paused": false})).await?;
    shows(
        &visitor.done("job_queue.pause", &id("default"), json!({}), None).await?,
        &json!({"paused": true}),
    )?;
    claims_nothing(&visitor).await?;
    let other = visitor.done("job_queue.claim", &id("mail"), json!({"worker": "ann"}), None).await?;
    same("another queue", &jobs_in(&other.body)?, &vec![("b".to_owned(), 1)])?;
    let elsewhere = visitor.for_tenant("bond")?;
    enqueue(&elsewhere, "a", json!({})).await?;
    claim(&elsewhere, 1, 1).await?;
    visitor.done("job_queue.resume", &id("default"), json!({}), None).await?;
    same("what can be claimed", &claim(&visitor, 5, 1).await?, &vec![("a".to_owned(), 1)])
}

async fn priorities_come_first(lab: &dyn Lab) -> Result<()> {
    let (visitor, clock) = desk(lab).await?;
    let mut expected = BTreeMap::new();
    for number in 0..9 {
        let (job, priority) = (format!("j{number}"), 2 - number % 3);
        enqueue(&visitor, &job, json!({"priority": priority})).await?;
        expected.insert(job, priority);
        clock.advance(SECOND);
    }
    let mut got = Vec::new();
    for _ in 0..3 {
        got.extend(claim(&visitor, 3, 3).await?.into_iter().map(|(job, _)| expected[&job]));
    }
    same("the priorities, as they were claimed", &got, &vec![0, 0, 0, 1, 1, 1, 2, 2, 2])?;
    visitor.refused("job.enqueue", &[], json!({"priority": 3}), None, Code::InvalidInput).await.map(drop)
}

async fn a_batch_decides_each_job_by_itself(lab: &dyn Lab) -> Result<()> {
    let (visitor, _) = desk(lab).await?;
    for job in ["a", "b", "c", "d"] {
        enqueue(&visitor, job, json!({})).await?;
    }
    claim(&visitor, 4, 4).await?;
    let jobs = json!([
        {"job_id": "a", "attempt": 1, "result": 7},
        {"job_id": "b", "attempt": 2},
        {"job_id": "nobody", "attempt": 1},
        {"job_id": "c", "attempt": 1},
    ]);
    let queue = id("default");
    let call = || visitor.call_as("batch-1", "job_queue.complete", &queue, json!({"jobs": jobs}), None);
    let first = call().await?;
    let codes: Vec<&Json> = first.body.as_array().into_iter().flatten().map(|one| &one["code"]).collect();
    same("why not", &codes, &vec![&Json::Null, &json!("not_holder"), &json!("not_found"), &Json::Null])?;
    same("a repetition", &call().await?.body, &first.body)?;
    for (job, state) in [("a", "COMPLETED"), ("b", "IN_PROGRESS"), ("c", "COMPLETED"), ("d", "IN_PROGRESS")] {
        visitor.shows("job", &id(job), &json!({"state": state})).await?;
    }
    let failed =
        json!({"jobs": [{"job_id": "b", "attempt": 1, "error": "x"}, {"job_id": "a", "attempt": 1}]});
    let failed = visitor.done("job_queue.fail", &id("default"), failed, None).await?;
    same("b", &failed.body[0]["done"], &json!(true))?;
    same("a", &failed.body[1]["code"], &json!("wrong_state"))?;
    visitor.shows("job", &id("b"), &json!({"state": "RETRYING", "error": "x"})).await?;
    visitor.shows("job", &id("a"), &json!({"state": "COMPLETED", "result": 7})).await?;
    let many: Vec<Json> = (0..99).map(|n| json!({"job_id": format!("{n}"), "attempt": 1})).collect();
    let many = json!({"jobs": many});
    visitor.refused("job_queue.complete", &id("default"), many, None, Code::InvalidInput).await.map(drop)
}

async fn a_repeated_claim_gets_its_own_jobs(lab: &dyn Lab) -> Result<()> {
    let (visitor, _) = desk(lab).await?;
    for job in ["a", "b", "c"] {
        enqueue(&visitor, job, json!({})).await?;
    }
    let call = |operation: &'static str, limit: i64| {
        let input = json!({"worker": "ann", "limit": limit});
        let visitor = visitor.clone();
        async move { visitor.call_as(operation, "job_queue.claim", &["default".into()], input, None).await }
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
    let request = Visitor::request("job_queue.claim", &id("default"), &json!({"worker": "ann"}), None);
    match visitor.house.batch(&visitor.tenant, vec![request], Operation::default()).await {
        Err((0, refusal)) => same("in a batch", &refusal.code, &Code::InvalidInput),
        other => bail!("a claim in a batch was answered {other:?}"),
    }
}

async fn jobs_of_one_key_run_in_their_order(lab: &dyn Lab) -> Result<()> {
    let (visitor, clock) = desk(lab).await?;
    for number in 0..5 {
        // Not by their ids, and not by their priorities: by the order in which they came.
        let (job, priority) = (format!("k{}", 9 - number), number % 3);
        enqueue(&visitor, &job, json!({"order_key": "k", "priority": priority})).await?;
    }
    enqueue(&visitor, "free", json!({"order_key": "other"})).await?;
    let mut both = claim(&visitor, 9, 2).await?;
    both.sort();
    same("the first of each key", &both, &vec![("free".to_owned(), 1), ("k9".to_owned(), 1)])?;
    complete(&visitor, "free", 1).await?;
    // One that rests is still the first of its key.
    visitor.done("job.fail", &id("k9"), json!({"attempt": 1}), None).await?;
    claims_nothing(&visitor).await?;
    clock.advance(SECOND * 10);
    same("again", &claim(&visitor, 9, 1).await?, &vec![("k9".to_owned(), 2)])?;
    complete(&visitor, "k9", 2).await?;
    same("the second", &claim(&visitor, 9, 1).await?, &vec![("k8".to_owned(), 1)])?;
    // One whose worker died is, too; one that failed for good is not.
    clock.advance(SECOND * 30);
    same("the second again", &claim(&visitor, 9, 1).await?, &vec![("k8".to_owned(), 2)])?;
    visitor.done("job.fail", &id("k8"), json!({"attempt": 2, "final": true}), None).await?;
    same("the third", &claim(&visitor, 9, 1).await?, &vec![("k7".to_owned(), 1)])?;
    visitor.done("job.cancel", &id("k7"), json!({}), None).await?;
    same("the fourth", &claim(&visitor, 9, 1).await?, &vec![("k6".to_owned(), 1)])?;
    // Brought back to life, it stands at the end.
    visitor.done("job.replay", &id("k8"), json!({}), None).await?;
    for job in ["k6", "k5"] {
        complete(&visitor, job, 1).await?;
        let next = claim(&visitor, 9, 1).await?;
        same("the next", &next[0].0.as_str(), &if job == "k6" { "k5" } else { "k8" })?;
    }
    complete(&visitor, "k8", 3).await?;
    claims_nothing(&visitor).await?;
    nobody_is_left_in_line(&visitor, "job").await
}

/// Lanes and lines are gone when all their jobs are over.
async fn nobody_is_left_in_line(visitor: &Visitor, name: &str) -> Result<()> {
    for table in ["lanes", "lines"] {
        let rows = all_rows(visitor, &format!("{name}_{table}")).await?;
        ensure!(rows.is_empty(), "{table} are left: {rows:?}");
    }
    Ok(())
}

async fn of_one_key_so_many_run_at_once(lab: &dyn Lab) -> Result<()> {
    let (visitor, _) = desk(lab).await?;
    for number in 0..5 {
        let input = json!({"job_id": format!("t{number}"), "order_key": "k"});
        visitor.done("task.enqueue", &[], input, None).await?;
    }
    let names = |jobs: Vec<(String, i64)>| jobs.into_iter().map(|(job, _)| job).collect::<BTreeSet<_>>();
    let set = |jobs: &[&str]| jobs.iter().map(|job| (*job).to_owned()).collect::<BTreeSet<_>>();
    same("two of them", &names(claim_until(&visitor, "task", 9, 2).await?), &set(&["t0", "t1"]))?;
    let complete =
        async |job: &str| visitor.done("task.complete", &id(job), json!({"attempt": 1}), None).await;
    complete("t1").await?;
    same("the third", &names(claim_until(&visitor, "task", 9, 1).await?), &set(&["t2"]))?;
    complete("t0").await?;
    complete("t2").await?;
    same("the rest", &names(claim_until(&visitor, "task", 9, 2).await?), &set(&["t3", "t4"]))?;
    complete("t3").await?;
    // There is room again, for one.
    for job in ["t5", "t6"] {
        visitor.done("task.enqueue", &[], json!({"job_id": job, "order_key": "k"}), None).await?;
    }
    same("room for one", &names(claim_until(&visitor, "task", 9, 1).await?), &set(&["t5"]))?;
    for job in ["t4", "t5"] {
        complete(job).await?;
    }
    claim_until(&visitor, "task", 9, 1).await?;
    complete("t6").await?;
    nobody_is_left_in_line(&visitor, "task").await
}

async fn a_job_in_line_can_be_cancelled(lab: &dyn Lab) -> Result<()> {
    let (visitor, _) = desk(lab).await?;
    for job in ["a", "b", "c"] {
        enqueue(&visitor, job, json!({"order_key": "k"})).await?;
    }
    visitor.shows("job", &id("b"), &json!({"state": "PENDING", "run_at": null})).await?;
    visitor.done("job.cancel", &id("b"), json!({}), None).await?;
    for job in ["a", "c"] {
        same("the next", &claim(&visitor, 9, 1).await?, &vec![(job.to_owned(), 1)])?;
        complete(&visitor, job, 1).await?;
    }
    nobody_is_left_in_line(&visitor, "job").await
}

async fn a_refused_job_leaves_no_lane_behind(lab: &dyn Lab) -> Result<()> {
    let (visitor, _) = desk(lab).await?;
    enqueue(&visitor, "a", json!({})).await?;
    let again = json!({"job_id": "a", "order_key": "k"});
    visitor.refused("job.enqueue", &[], again, None, Code::AlreadyExists).await?;
    same("lanes after a refusal", &all_rows(&visitor, "job_lanes").await?.len(), &0)?;
    // In a lane that is there it leaves a gap, and nobody waits for it.
    enqueue(&visitor, "b", json!({"order_key": "k"})).await?;
    let again = json!({"job_id": "a", "order_key": "k"});
    visitor.refused("job.enqueue", &[], again, None, Code::AlreadyExists).await?;
    enqueue(&visitor, "c", json!({"order_key": "k"})).await?;
    let claimed = claim(&visitor, 9, 2).await?;
    let names: BTreeSet<&str> = claimed.iter().map(|(job, _)| job.as_str()).collect();
    same("those that are admitted", &names, &BTreeSet::from(["a", "b"]))?;
    complete(&visitor, "b", 1).await?;
    same("the next in line", &claim(&visitor, 9, 1).await?, &vec![("c".to_owned(), 1)])?;
    complete(&visitor, "c", 1).await?;
    nobody_is_left_in_line(&visitor, "job").await
}

/// Lets something happen behind the next commit, before its caller goes on.
#[derive(Default)]
struct Behind(Mutex<Option<Pin<Box<dyn Future<Output = ()> + Send>>>>);

impl fmt::Debug for Behind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Behind")
    }
}

#[async_trait]
impl Hook for Arc<Behind> {
    async fn commit(&self, inner: &Arc<dyn Store>, plan: &Plan) -> Result<Commit, StoreError> {
        let outcome = inner.commit(plan).await;
        let event = self.0.lock().unwrap_or_else(PoisonError::into_inner).take();
        if let Some(event) = event {
            event.await;
        }
        outcome
    }
}

async fn a_number_of_a_lane_that_is_gone_is_not_used(lab: &dyn Lab) -> Result<()> {
    let clock = standing();
    let store = lab.open_at(Arc::new(clock.clone())).await?;
    let visitor = Arc::new(Visitor::over(store.clone(), BLUEPRINT, Arc::new(clock.clone())).await?);
    let behind = Arc::new(Behind::default());
    let slow = Arc::new(Around::new(store, behind.clone()));
    let slow = Visitor::over(slow, BLUEPRINT, Arc::new(clock.clone())).await?;
    let key = || json!({"order_key": "k"});
    enqueue(&visitor, "a", key()).await?;
    same("the first", &claim(&visitor, 9, 1).await?, &vec![("a".to_owned(), 1)])?;
    for job in ["x", "y", "z"] {
        enqueue(&visitor, job, key()).await?;
        visitor.done("job.cancel", &id(job), json!({}), None).await?;
    }
    // It has its number, and before it stands in line the lane ends and another one begins.
    let others = visitor.clone();
    let event = async move {
        // If one of these fails, the order below is another.
        let _ = complete(&others, "a", 1).await;
        let _ = enqueue(&others, "c", json!({"order_key": "k"})).await;
    };
    *behind.0.lock().unwrap_or_else(PoisonError::into_inner) = Some(Box::pin(event));
    enqueue(&slow, "b", key()).await?;
    enqueue(&visitor, "d", key()).await?;
    for job in ["c", "b", "d"] {
        same("the next", &claim(&visitor, 9, 1).await?, &vec![(job.to_owned(), 1)])?;
        complete(&visitor, job, 1).await?;
    }
    nobody_is_left_in_line(&visitor, "job").await
}

/// What happens in a lane while somebody is paused who is about to leave it.
#[derive(Clone, Copy, Debug)]
enum Meantime {
    /// Another job comes.
    Comes,
    /// Another job ends.
    Ends,
}

async fn a_lane_that_changes_meanwhile_is_looked_at_again(lab: &dyn Lab) -> Result<()> {
    let clock = Arc::new(DrillClock::new());
    let store = lab.open_at(clock.clone()).await?;
    let paused = Arc::new(Paused::default());
    let slow = Arc::new(Around::new(store.clone(), paused.clone()));
    let visitor = Visitor::over(store, BLUEPRINT, clock.clone()).await?;
    let slow = Visitor::over(slow, BLUEPRINT, clock).await?;
    // Whoever completes a job does not look at first, and so leaves the lane with its second plan.
    for (action, plan, input) in [
        ("complete", 2, json!({"attempt": 1})),
        ("fail", 1, json!({"attempt": 1, "error": "no", "final": true})),
        ("cancel", 1, json!({})),
    ] {
        // Of a job one runs at a time, of a task two. So many are admitted before.
        for (number, (resource, before, meantime)) in [
            ("job", 1, Meantime::Comes),
            ("task", 1, Meantime::Comes),
            ("task", 2, Meantime::Comes),
            ("task", 2, Meantime::Ends),
        ]
        .into_iter()
        .enumerate()
        {
            let tenant = format!("{action}{number}");
            let (visitor, slow) = (visitor.for_tenant(&tenant)?, slow.for_tenant(&tenant)?);
            let comes = async |visitor: &Visitor, job: &str| {
                let input = json!({"job_id": job, "order_key": "k"});
                visitor.done(&format!("{resource}.enqueue"), &[], input, None).await
            };
            let ends = async |visitor: &Visitor, job: &str| {
                visitor.done(&format!("{resource}.complete"), &id(job), json!({"attempt": 1}), None).await
            };
            for job in 0..before {
                comes(&visitor, &format!("x{job}")).await?;
            }
            claim_until(&visitor, resource, 9, before).await?;
            let other = visitor.clone();
            let (action_of, job) = match meantime {
                Meantime::Comes => (format!("{resource}.enqueue"), json!({"job_id": "z", "order_key": "k"})),
                Meantime::Ends => (format!("{resource}.complete"), json!({"attempt": 1})),
            };
            paused.before(&format!("{resource}s"), plan, async move {
                let key = id("x1");
                let key = if matches!(meantime, Meantime::Ends) { &key[..] } else { &[] };
                // If this fails, there is nobody to be claimed afterwards, or somebody left.
                drop(other.done(&action_of, key, job, None).await);
            });
            slow.done(&format!("{resource}.{action}"), &id("x0"), input.clone(), None).await?;
            // Nobody is forgotten in line, and no room is lost.
            if matches!(meantime, Meantime::Comes) {
                claim_until(&visitor, resource, 9, 1).await?;
                if before == 2 {
                    ends(&visitor, "x1").await?;
                }
                ends(&visitor, "z").await?;
            }
            nobody_is_left_in_line(&visitor, resource).await.with_context(|| tenant)?;
        }
    }
    Ok(())
}

async fn who_stands_in_line_is_not_overtaken(lab: &dyn Lab) -> Result<()> {
    let store = lab.open().await?;
    let clock = Arc::new(SystemClock);
    let before = Visitor::over(store.clone(), BLUEPRINT, clock.clone()).await?;
    let wider = BLUEPRINT.replace("per_key = 2", "per_key = 3");
    let wider = Visitor::over(store, &wider, clock).await?;
    let input = |job: &str, key: &str| json!({"job_id": job, "order_key": key});
    for job in ["t0", "t1", "t2"] {
        before.done("task.enqueue", &[], input(job, "k"), None).await?;
    }
    // The blueprint has become wider: there would be room, but somebody waits for it.
    wider.done("task.enqueue", &[], input("t3", "k"), None).await?;
    wider.shows("task", &id("t3"), &json!({"state": "PENDING", "run_at": null})).await?;
    // Somebody saw room and nobody in line, and then another stood there.
    for job in ["u0", "u1"] {
        before.done("task.enqueue", &[], input(job, "l"), None).await?;
    }
    let late = wider.drafted("task.enqueue", &[], input("u3", "l"), None).await?;
    before.done("task.enqueue", &[], input("u2", "l"), None).await?;
    wider.too_late(&late).await
}

async fn a_unique_key_has_one_job(lab: &dyn Lab) -> Result<()> {
    let (visitor, _) = desk(lab).await?;
    let with_key = |job: &str| json!({"job_id": job, "unique_key": "u", "attempts_max": 1});
    let taken = async |visitor: &Visitor, job: &str, by: &str| -> Result<()> {
        let refusal = visitor.refused("job.enqueue", &[], with_key(job), None, Code::AlreadyExists).await?;
        ensure!(refusal.message.contains(by), "{refusal}");
        visitor.refused("job.read", &id(job), json!({}), None, Code::NotFound).await.map(drop)
    };
    visitor.done("job.enqueue", &[], with_key("a"), None).await?;
    taken(&visitor, "b", "job a").await?;
    visitor.for_tenant("bond")?.done("job.enqueue", &[], with_key("b"), None).await?;
    claim(&visitor, 1, 1).await?;
    taken(&visitor, "b", "IN_PROGRESS").await?;
    visitor.done("job.fail", &id("a"), json!({"attempt": 1}), None).await?;
    // It is over, and the key is free, also for itself.
    visitor.done("job.replay", &id("a"), json!({}), None).await?;
    taken(&visitor, "b", "job a").await?;
    claim(&visitor, 1, 1).await?;
    visitor.done("job.fail", &id("a"), json!({"attempt": 2, "final": true}), None).await?;
    visitor.done("job.enqueue", &[], with_key("b"), None).await?;
    visitor.refused("job.replay", &id("a"), json!({}), None, Code::AlreadyExists).await?;
    visitor.done("job.cancel", &id("b"), json!({}), None).await?;
    visitor.done("job.replay", &id("a"), json!({}), None).await?;
    taken(&visitor, "c", "job a").await
}

async fn a_unique_key_has_one_job_in_a_race(lab: &dyn Lab) -> Result<()> {
    let visitor = Visitor::open(lab, BLUEPRINT).await?;
    let mut winner: Option<String> = None;
    for round in 0..6 {
        // The one before fails; then it is replayed while others want its key.
        if let Some(job) = &winner {
            let (_, attempt) = claim(&visitor, 1, 1).await?[0].clone();
            visitor.done("job.fail", &id(job), json!({"attempt": attempt, "final": true}), None).await?;
        }
        let mut racers = Vec::new();
        for racer in 0..5 {
            let (visitor, before) = (visitor.clone(), winner.clone());
            racers.push(tokio::spawn(async move {
                let job = format!("r{round}-{racer}");
                match before.filter(|_| racer == 0) {
                    Some(before) => {
                        let done = visitor.call("job.replay", &id(&before), json!({}), None).await;
                        (before, done.map(drop))
                    }
                    None => {
                        let input = json!({"job_id": job, "unique_key": "u"});
                        let done = visitor.call("job.enqueue", &[], input, None).await;
                        (job, done.map(drop))
                    }
                }
            }));
        }
        let mut winners = Vec::new();
        for racer in racers {
            match racer.await? {
                (job, Ok(())) => winners.push(job),
                (_, Err(refusal)) if [Code::AlreadyExists, Code::Contended].contains(&refusal.code) => {}
                (job, Err(refusal)) => bail!("{job}: {refusal}"),
            }
        }
        let live = all_rows(&visitor, "jobs").await?;
        let live: Vec<&str> = live
            .iter()
            .filter(|row| row.text("state") == Some("PENDING"))
            .filter_map(|row| row.text("job_id"))
            .collect();
        same(&format!("round {round}: who is live"), &live, &winners.iter().map(String::as_str).collect())?;
        same(&format!("round {round}: winners"), &winners.len(), &1)?;
        winner = winners.pop();
    }
    Ok(())
}

async fn a_job_is_enqueued_together_with_other_writes(lab: &dyn Lab) -> Result<()> {
    let (visitor, _) = desk(lab).await?;
    let order = |key: i64| Visitor::request("order.create", &[], &json!({"id": key, "note": "x"}), None);
    let job = |job: &str| Visitor::request("job.enqueue", &[], &json!({"job_id": job}), None);
    let batch = async |requests| visitor.house.batch(&visitor.tenant, requests, Operation::default()).await;
    let written = batch(vec![order(1), job("a")]).await;
    ensure!(written.is_ok(), "{written:?}");
    same(
        "the refusal",
        &batch(vec![job("b"), order(1)]).await.map_err(|(at, no)| (at, no.code)).err(),
        &Some((1, Code::AlreadyExists)),
    )?;
    visitor.refused("job.read", &id("b"), json!({}), None, Code::NotFound).await?;
    same("what can be claimed", &claim(&visitor, 9, 1).await?, &vec![("a".to_owned(), 1)])?;
    // The effect of a job and its completion are one plan: an attempt that lost the job has no effect.
    let done = |attempt: i64| Visitor::request("job.complete", &id("a"), &json!({"attempt": attempt}), None);
    let late = batch(vec![order(2), done(7)]).await;
    same("a late effect", &late.map_err(|(at, no)| (at, no.code)).err(), &Some((1, Code::NotHolder)))?;
    visitor.refused("order.read", &[2.into()], json!({}), None, Code::NotFound).await?;
    ensure!(batch(vec![order(2), done(1)]).await.is_ok(), "the effect and the completion");
    visitor.shows("order", &[2.into()], &json!({"note": "x"})).await
}

async fn many_claimers_never_share_a_job(lab: &dyn Lab) -> Result<()> {
    let first = Visitor::open(lab, BLUEPRINT).await?;
    // Two processes, so that claimers do not only take turns.
    let second = Visitor::over(first.house.store().clone(), BLUEPRINT, Arc::new(SystemClock)).await?;
    let jobs = 60;
    for job in 0..jobs {
        enqueue(&first, &format!("j{job}"), json!({})).await?;
    }
    let workers: Vec<_> = (0..6)
        .map(|number| {
            let visitor = if number % 2 == 0 { first.clone() } else { second.clone() };
            tokio::spawn(async move {
                let (mut mine, mut quiet) = (Vec::new(), 0);
                while quiet < 5 {
                    let claimed =
                        claim_once(&visitor, json!({"worker": format!("w{number}"), "limit": 7})).await?;
                    quiet = if claimed.is_empty() { quiet + 1 } else { 0 };
                    for (job, attempt) in claimed {
                        ensure!(attempt == 1, "{job} was claimed {attempt} times");
                        complete(&visitor, &job, attempt).await?;
                        mine.push(job);
                    }
                }
                Ok(mine)
            })
        })
        .collect();
    let mut claimed = Vec::new();
    for worker in workers {
        claimed.extend(worker.await??);
    }
    same("how many were claimed", &claimed.len(), &jobs)?;
    same("how many different ones", &claimed.iter().collect::<BTreeSet<_>>().len(), &jobs)
}

async fn many_keys_keep_their_order_under_load(lab: &dyn Lab) -> Result<()> {
    let visitor = Visitor::open(lab, BLUEPRINT).await?;
    let (keys, each) = (3, 8);
    let producers: Vec<_> = (0..keys)
        .map(|key| {
            let visitor = visitor.clone();
            tokio::spawn(async move {
                for number in 0..each {
                    let (job, key) = (format!("k{key}-{number}"), format!("k{key}"));
                    enqueue(&visitor, &job, json!({"order_key": key})).await?;
                }
                Ok::<_, anyhow::Error>(())
            })
        })
        .collect();
    let workers: Vec<_> = (0..4)
        .map(|_| {
            let visitor = visitor.clone();
            tokio::spawn(async move {
                let mut quiet = 0;
                while quiet < 30 {
                    let claimed = claim_once(&visitor, json!({"limit": 3})).await?;
                    quiet = if claimed.is_empty() { quiet + 1 } else { 0 };
                    for (job, attempt) in &claimed {
                        complete(&visitor, job, *attempt).await?;
                    }
                    if claimed.is_empty() {
                        pause().await;
                    }
                }
                Ok::<_, anyhow::Error>(())
            })
        })
        .collect();
    for task in producers.into_iter().chain(workers) {
        task.await??;
    }
    let rows = all_rows(&visitor, "jobs").await?;
    same("how many", &rows.len(), &(keys * each))?;
    let mut runs: BTreeMap<&str, Vec<(Time, Time, &str)>> = BTreeMap::new();
    for row in &rows {
        let job = row.text("job_id").unwrap_or_default();
        ensure!(row.text("state") == Some("COMPLETED"), "{job} is {:?}", row.text("state"));
        let span = row.time("started_at").zip(row.time("finished_at")).context("a job without its times")?;
        runs.entry(row.text("order_key").unwrap_or_default()).or_default().push((span.0, span.1, job));
    }
    for (key, mut runs) in runs {
        runs.sort();
        for (number, (start, _, job)) in runs.iter().enumerate() {
            same("the order", job, &format!("{key}-{number}").as_str())?;
            let before = number.checked_sub(1).map(|before| runs[before].1);
            ensure!(before.is_none_or(|end| end <= *start), "{job} began at {start}, before {before:?}");
        }
    }
    nobody_is_left_in_line(&visitor, "job").await
}

async fn lost_answers_lose_and_double_nothing(lab: &dyn Lab) -> Result<()> {
    let sound = lab.open().await?;
    let faulty = Arc::new(FaultyStore::over(sound.clone(), Arc::new(SystemClock), Odds::default(), 7));
    let visitor = Visitor::over(faulty.clone(), BLUEPRINT, Arc::new(SystemClock)).await?;
    let jobs = 24;
    faulty.set_odds(Odds { unknown_before: 0.1, unknown_after: 0.2, unavailable: 0.1, ..Odds::default() });
    for number in 0..jobs {
        let mut input = json!({"job_id": format!("j{number}"), "attempts_max": 500});
        if number % 3 == 0 {
            input["order_key"] = json!(format!("k{}", number % 2));
        }
        for tries in 0.. {
            let operation = format!("enqueue-{number}");
            match visitor.call_as(&operation, "job.enqueue", &[], input.clone(), None).await {
                Ok(_) => break,
                Err(refusal) => ensure!(tries < 200 && may_pass(refusal.code), "{refusal}"),
            }
        }
    }
    // Each answer that gets lost is a worker that dies: what it claimed comes back when its short lease is over.
    let mut executed: BTreeMap<String, BTreeSet<i64>> = BTreeMap::new();
    let mut acknowledged: BTreeMap<String, i64> = BTreeMap::new();
    for turn in 0.. {
        ensure!(turn < 3_000, "only {} of {jobs} jobs were done: {acknowledged:?}", acknowledged.len());
        if acknowledged.len() == jobs {
            break;
        }
        let input = json!({"worker": "ann", "limit": 4, "lease_ms": 100});
        let Ok(claimed) = visitor.call("job_queue.claim", &id("default"), input, None).await else {
            continue;
        };
        let claimed = jobs_in(&claimed.body)?;
        if claimed.is_empty() {
            pause().await;
        }
        for (job, attempt) in claimed {
            let fresh = executed.entry(job.clone()).or_default().insert(attempt);
            ensure!(fresh, "{job} was claimed twice as attempt {attempt}");
            let input = json!({"attempt": attempt, "result": {"by": attempt}});
            match visitor.call("job.complete", &id(&job), input, None).await {
                Ok(_) => {
                    let before = acknowledged.insert(job.clone(), attempt);
                    ensure!(before.is_none(), "{job} was completed by {before:?} and by {attempt}");
                }
                // It may have been done: then nobody gets it again, and the row says so.
                Err(refusal) if refusal.code == Code::OutcomeUnknown => {
                    for _ in 0..200 {
                        let Ok(row) = visitor.call("job.read", &id(&job), json!({}), None).await else {
                            continue;
                        };
                        if row.body["state"] == json!("COMPLETED") {
                            acknowledged.insert(job.clone(), attempt);
                        }
                        break;
                    }
                }
                Err(refusal) => ensure!(
                    may_pass(refusal.code) || [Code::NotHolder, Code::WrongState].contains(&refusal.code),
                    "{refusal}"
                ),
            }
            // What was completed without an answer is not claimed again: learn it from the row.
            if let Ok(row) = visitor.call("job.read", &id(&job), json!({}), None).await
                && row.body["state"] == json!("COMPLETED")
            {
                let by = row.body["result"]["by"].as_i64().context("a result without its attempt")?;
                let known = acknowledged.entry(job.clone()).or_insert(by);
                same("whose result it is", known, &by)?;
            }
        }
        // A job that was completed by an attempt whose every answer was lost is found in the rows.
        if turn % 50 == 49 {
            for row in
                crate::client::scan(sound.as_ref(), Scan::of(visitor.table("jobs")?, &visitor.tenant)).await?
            {
                if row.text("state") == Some("COMPLETED") {
                    let job = row.text("job_id").unwrap_or_default().to_owned();
                    acknowledged.entry(job).or_insert(row.int("attempt").unwrap_or(0));
                }
            }
        }
    }
    let achieved = faulty.achieved();
    ensure!(achieved.unknown_after > 0 && achieved.unknown_before > 0, "{achieved}");
    let mut completed: BTreeMap<String, usize> = BTreeMap::new();
    for record in whole_log(sound.as_ref()).await? {
        for event in record.events.iter().filter(|event| event.name == "job.completed") {
            *completed.entry(event.data["row"]["job_id"].to_string()).or_default() += 1;
        }
    }
    same("jobs with a result in the log", &completed.len(), &jobs)?;
    ensure!(completed.values().all(|times| *times == 1), "{completed:?}");
    nobody_is_left_in_line(&Visitor::over(sound, BLUEPRINT, Arc::new(SystemClock)).await?, "job").await
}

/// What passes: somebody else, or the world, was in the way.
fn may_pass(code: Code) -> bool {
    [Code::OutcomeUnknown, Code::Unavailable, Code::Contended].contains(&code)
}

async fn a_clock_that_steps_breaks_no_claim(lab: &dyn Lab) -> Result<()> {
    let (visitor, clock) = desk(lab).await?;
    enqueue(&visitor, "a", json!({})).await?;
    claim(&visitor, 1, 1).await?;
    // Ten minutes back: the lease lasts longer, and its holder is its holder.
    let start = clock.now();
    clock.set(start.minus(SECOND * 600));
    claims_nothing(&visitor).await?;
    complete(&visitor, "a", 1).await?;
    // Ten minutes ahead: leases are over, and whoever had one is refused as soon as somebody else has it.
    clock.set(start);
    enqueue(&visitor, "b", json!({})).await?;
    claim(&visitor, 1, 1).await?;
    clock.set(start.plus(SECOND * 600));
    same("after a step ahead", &claim(&visitor, 1, 1).await?, &vec![("b".to_owned(), 2)])?;
    clock.set(start);
    visitor.refused("job.complete", &id("b"), json!({"attempt": 1}), None, Code::NotHolder).await?;
    claims_nothing(&visitor).await?;
    complete(&visitor, "b", 2).await?;
    claims_nothing(&visitor).await
}

async fn a_worker_whose_clock_is_wrong_claims_nothing_early(lab: &dyn Lab) -> Result<()> {
    let engine = standing();
    let skewed = SkewedClock::over(Arc::new(engine.clone()));
    let store = lab.open_at(Arc::new(engine.clone())).await?;
    let visitor = Visitor::over(store, BLUEPRINT, Arc::new(skewed.clone())).await?;
    enqueue(&visitor, "later", json!({"after_ms": 60_000})).await?;
    enqueue(&visitor, "now", json!({})).await?;
    // Ten minutes ahead, it sees both as due. The engine does not, and the one that is due is not held up.
    skewed.skew(600_000_000);
    same("ten minutes ahead", &claim(&visitor, 9, 1).await?, &vec![("now".to_owned(), 1)])?;
    claims_nothing(&visitor).await?;
    complete(&visitor, "now", 1).await?;
    // Ten minutes behind, it is late and loses nothing.
    skewed.skew(-600_000_000);
    engine.advance(SECOND * 60);
    claims_nothing(&visitor).await?;
    skewed.skew(0);
    same("right", &claim(&visitor, 9, 1).await?, &vec![("later".to_owned(), 1)])
}

async fn a_claim_waits_for_a_job(lab: &dyn Lab) -> Result<()> {
    let visitor = Visitor::open(lab, BLUEPRINT).await?;
    let waiting = |visitor: Visitor| {
        tokio::spawn(async move { claim_once(&visitor, json!({"limit": 5, "wait_ms": 30_000})).await })
    };
    let claim = waiting(visitor.clone());
    pause().await;
    ensure!(!claim.is_finished(), "there was nothing to claim");
    enqueue(&visitor, "a", json!({})).await?;
    same("what it waited for", &claim.await??, &vec![("a".to_owned(), 1)])?;
    // One that becomes due, by itself and by a completion.
    enqueue(&visitor, "b", json!({"after_ms": 300})).await?;
    same("what became due", &waiting(visitor.clone()).await??, &vec![("b".to_owned(), 1)])?;
    enqueue(&visitor, "c", json!({"order_key": "k"})).await?;
    enqueue(&visitor, "d", json!({"order_key": "k"})).await?;
    same("the first", &waiting(visitor.clone()).await??, &vec![("c".to_owned(), 1)])?;
    let claim = waiting(visitor.clone());
    pause().await;
    complete(&visitor, "c", 1).await?;
    same("the next", &claim.await??, &vec![("d".to_owned(), 1)])?;
    // One that waits in vain gets nothing, and no error.
    same("in vain", &claim_once(&visitor, json!({"wait_ms": 50})).await?, &vec![])
}

async fn tenants_do_not_see_each_others_jobs(lab: &dyn Lab) -> Result<()> {
    let (visitor, _) = desk(lab).await?;
    let other = visitor.for_tenant("bond")?;
    // Names of which one begins with the other's.
    let third = visitor.for_tenant("acme2")?;
    for job in 0..5 {
        enqueue(&visitor, &format!("a{job}"), json!({"order_key": "k", "unique_key": format!("{job}")}))
            .await?;
    }
    claims_nothing(&other).await?;
    claims_nothing(&third).await?;
    enqueue(&other, "a0", json!({"order_key": "k", "unique_key": "0"})).await?;
    same("its own", &claim(&other, 9, 1).await?, &vec![("a0".to_owned(), 1)])?;
    other.refused("job.cancel", &id("a1"), json!({}), None, Code::NotFound).await?;
    same("the other's", &claim(&visitor, 9, 1).await?, &vec![("a0".to_owned(), 1)])?;
    complete(&other, "a0", 1).await?;
    visitor.shows("job", &id("a0"), &json!({"state": "IN_PROGRESS"})).await
}

async fn what_is_over_is_forgotten(lab: &dyn Lab) -> Result<()> {
    let (visitor, clock) = desk(lab).await?;
    for (job, input) in [
        ("done", json!({"unique_key": "u"})),
        ("dead", json!({"attempts_max": 1})),
        ("gone", json!({"unique_key": "v"})),
        ("live", json!({})),
    ] {
        enqueue(&visitor, job, input).await?;
    }
    claim(&visitor, 9, 4).await?;
    complete(&visitor, "done", 1).await?;
    visitor.done("job.fail", &id("dead"), json!({"attempt": 1}), None).await?;
    visitor.done("job.cancel", &id("gone"), json!({}), None).await?;
    // Somebody else has its key by now.
    enqueue(&visitor, "heir", json!({"unique_key": "v"})).await?;
    clock.advance(SECOND * 3_600 - Duration::from_micros(1));
    same("too early", &visitor.drain_workers().await?, &0)?;
    clock.advance(Duration::from_micros(1));
    same("two of them", &visitor.drain_workers().await?, &2)?;
    for job in ["done", "gone"] {
        visitor.refused("job.read", &id(job), json!({}), None, Code::NotFound).await?;
    }
    let keys = all_rows(&visitor, "job_uniques").await?;
    same(
        "whose keys are left",
        &keys.iter().filter_map(|row| row.text("job_id")).collect::<Vec<_>>(),
        &vec!["heir"],
    )?;
    // One that is brought back to life is not forgotten.
    visitor.done("job.replay", &id("dead"), json!({}), None).await?;
    clock.advance(SECOND * 48 * 3_600);
    same("what lives", &visitor.drain_workers().await?, &0)?;
    enqueue(&visitor, "done", json!({"unique_key": "u"})).await
}

async fn bad_input_is_refused(lab: &dyn Lab) -> Result<()> {
    let (visitor, _) = desk(lab).await?;
    for input in [
        json!({"priority": -1}),
        json!({"after_ms": -1}),
        json!({"at": "soon"}),
        json!({"attempts_max": 0}),
        json!({"order_key": 7}),
        json!({"what": 1}),
    ] {
        visitor.refused("job.enqueue", &[], input, None, Code::InvalidInput).await?;
    }
    let heavy = json!({"payload": "x".repeat(100_001)});
    visitor.refused("job.enqueue", &[], heavy, None, Code::TooLarge).await?;
    for input in [
        json!({}),
        json!({"worker": "a", "limit": 0}),
        json!({"worker": "a", "limit": 99}),
        json!({"worker": "a", "lease_ms": 1}),
    ] {
        visitor.refused("job_queue.claim", &id("default"), input, None, Code::InvalidInput).await?;
    }
    enqueue(&visitor, "a", json!({})).await?;
    claim(&visitor, 1, 1).await?;
    let heavy = json!({"attempt": 1, "result": "x".repeat(100_001)});
    visitor.refused("job.complete", &id("a"), heavy, None, Code::TooLarge).await?;
    visitor.refused("job.complete", &id("a"), json!({}), None, Code::InvalidInput).await?;
    // Heavy ones are claimed in several goes.
    complete(&visitor, "a", 1).await?;
    for job in 0..4 {
        enqueue(&visitor, &format!("h{job}"), json!({"payload": "x".repeat(99_000)})).await?;
    }
    let first = claim_once(&visitor, json!({"limit": 9})).await?.len();
    ensure!((1..4).contains(&first), "{first} heavy jobs in one claim");
    claim(&visitor, 9, 4 - first).await.map(drop)
}

fn every(seconds: u64) -> Json {
    json!({"when": {"every_ms": seconds * 1_000}})
}

async fn define(visitor: &Visitor, definition: &str, input: Json) -> Result<Answer> {
    visitor.done("job_definition.create", &id(definition), input, None).await
}

/// The jobs of a definition that are stored: due times and states, in the order of their due times.
async fn made(visitor: &Visitor, definition: &str) -> Result<Vec<(Time, String)>> {
    let rows = all_rows(visitor, "jobs").await?;
    let mut jobs: Vec<(Time, String)> = rows
        .iter()
        .filter(|row| row.text("definition_id") == Some(definition))
        .filter_map(|row| Some((row.time("execution_time")?, row.text("state")?.to_owned())))
        .collect();
    jobs.sort();
    Ok(jobs)
}

fn times(jobs: &[(Time, String)]) -> Vec<Time> {
    jobs.iter().map(|(time, _)| *time).collect()
}

async fn a_definition_makes_its_jobs_ahead_of_their_time(lab: &dyn Lab) -> Result<()> {
    let (visitor, clock) = desk(lab).await?;
    let start = clock.now();
    let mut input = every(60);
    input["payload"] = json!({"report": 1});
    input["attempts_max"] = json!(7);
    let created = define(&visitor, "report", input).await?;
    let first = start.plus(SECOND * 60);
    shows(&created, &json!({"status": "ACTIVE", "next_time": first.to_string(), "made": 0, "revision": 1}))?;
    // Ten seconds ahead, not earlier.
    clock.advance(SECOND * 50 - Duration::from_micros(1));
    same("too early", &visitor.drain_workers().await?, &0)?;
    clock.advance(Duration::from_micros(1));
    same("ahead of its time", &visitor.drain_workers().await?, &1)?;
    claims_nothing(&visitor).await?;
    clock.advance(SECOND * 10);
    let job = format!("report@{first}.1");
    same("the job", &claim(&visitor, 5, 1).await?, &vec![(job.clone(), 1)])?;
    let expected = json!({"payload": {"report": 1}, "attempts_max": 7, "definition_id": "report", "execution_time": first.to_string()});
    visitor.shows("job", &id(&job), &expected).await?;
    complete(&visitor, &job, 1).await?;
    // Late by half a step, the next one is not: it does not drift.
    clock.advance(SECOND * 90);
    same("the next", &visitor.drain_workers().await?, &1)?;
    let second = start.plus(SECOND * 120);
    same("when", &times(&made(&visitor, "report").await?), &vec![first, second])?;
    let run = visitor.done("job_definition.run", &id("report"), json!({}), None).await?;
    shows(&run, &json!({"state": "PENDING", "definition_id": "report", "payload": {"report": 1}}))?;
    for _ in 0..LOOKS_MAX {
        let history = visitor.done("job_definition.history", &id("report"), json!({}), None).await?;
        if history.body.as_array().is_some_and(|jobs| jobs.len() == 3) {
            same("newest first", &history.body[2]["job_id"], &json!(job))?;
            same("how many can be claimed", &claim(&visitor, 5, 2).await?.len(), &2)?;
            return Ok(());
        }
        pause().await;
    }
    bail!("the history never had three jobs")
}

async fn each_due_time_makes_one_job_however_many_look(lab: &dyn Lab) -> Result<()> {
    let (visitor, clock) = desk(lab).await?;
    let start = clock.now();
    let tenants = ["acme", "bond"];
    for tenant in tenants {
        for definition in 0..5 {
            let mut input = every(60);
            input["missed"] = json!("all");
            define(&visitor.for_tenant(tenant)?, &format!("d{definition}"), input).await?;
        }
    }
    // Three due times have passed when several makers begin at once, each on every shard.
    clock.advance(SECOND * 200);
    let makers: Vec<_> = (0..4)
        .map(|_| {
            let visitor = visitor.clone();
            tokio::spawn(async move { visitor.drain_workers().await })
        })
        .collect();
    for maker in makers {
        maker.await??;
    }
    visitor.drain_workers().await?;
    for tenant in tenants {
        for definition in 0..5 {
            let jobs = made(&visitor.for_tenant(tenant)?, &format!("d{definition}")).await?;
            let expected: Vec<Time> = (1..=3).map(|step| start.plus(SECOND * 60 * step)).collect();
            same("the due times", &times(&jobs), &expected)?;
        }
    }
    let records = whole_log(visitor.house.store().as_ref()).await?;
    let events = records.iter().flat_map(|record| &record.events);
    same("what the log says", &events.filter(|event| event.name == "job_definition.made").count(), &30)
}

async fn missed_due_times_make_one_job_or_all(lab: &dyn Lab) -> Result<()> {
    let (visitor, clock) = desk(lab).await?;
    let start = clock.now();
    for missed in ["once", "all"] {
        let mut input = every(60);
        input["missed"] = json!(missed);
        define(&visitor, missed, input).await?;
        let cron = json!({"when": {"cron": "* * * * *"}, "missed": missed});
        define(&visitor, &format!("cron-{missed}"), cron).await?;
    }
    // Nobody looked for five and a half minutes.
    clock.advance(SECOND * 330);
    visitor.drain_workers().await?;
    let at = |minute: u32| start.plus(SECOND * 60 * minute);
    for (definition, expected) in [("once", vec![at(1)]), ("all", (1..=5).map(at).collect())] {
        for definition in [definition.to_owned(), format!("cron-{definition}")] {
            same(&definition, &times(&made(&visitor, &definition).await?), &expected)?;
            visitor
                .shows("job_definition", &id(&definition), &json!({"next_time": at(6).to_string()}))
                .await?;
        }
    }
    Ok(())
}

async fn a_definition_for_once_ends(lab: &dyn Lab) -> Result<()> {
    let (visitor, clock) = desk(lab).await?;
    let at = clock.now().plus(SECOND * 60);
    define(&visitor, "once", json!({"when": {"at": at.to_string()}, "queue": "mail"})).await?;
    clock.advance(SECOND * 60);
    same("made", &visitor.drain_workers().await?, &1)?;
    clock.advance(SECOND * 600);
    same("once", &visitor.drain_workers().await?, &0)?;
    same("when", &times(&made(&visitor, "once").await?), &vec![at])?;
    let expected = json!({"status": "ENDED", "next_time": null, "due_at": null, "made": 1});
    visitor.shows("job_definition", &id("once"), &expected).await?;
    visitor.refused("job_definition.pause", &id("once"), json!({}), None, Code::WrongState).await?;
    visitor.refused("job_definition.resume", &id("once"), json!({}), None, Code::WrongState).await?;
    for input in [
        json!({"when": {}}),
        json!({"when": {"cron": "* * * * *", "every_ms": 1_000}}),
        json!({"when": {"cron": "61 * * * *"}}),
        json!({"when": {"cron": "* * * * *", "zone": "Mars/Base"}}),
        json!({"when": {"every_ms": 1}}),
        json!({"when": {"cron": "0 0 30 2 *"}}),
        json!({"when": {"every_ms": 1_000}, "priority": 3}),
        json!({"when": {"every_ms": 1_000}, "overlap": "mix"}),
    ] {
        visitor.refused("job_definition.create", &id("bad"), input, None, Code::InvalidInput).await?;
    }
    visitor.refused("job_definition.read", &id("bad"), json!({}), None, Code::NotFound).await.map(drop)
}

async fn cron_means_the_wall_clock_of_its_zone(lab: &dyn Lab) -> Result<()> {
    let (visitor, clock) = desk(lab).await?;
    // Half past two in Berlin, over the night in which there is none: nothing is lost, and nothing comes twice.
    clock.set("2026-03-27T12:00:00Z".parse()?);
    let cron = json!({"when": {"cron": "30 2 * * *", "zone": "Europe/Berlin"}, "missed": "all"});
    define(&visitor, "night", cron).await?;
    clock.advance(SECOND * 3_600 * 24 * 3);
    visitor.drain_workers().await?;
    let expected = ["2026-03-28T01:30:00Z", "2026-03-29T01:00:00Z", "2026-03-30T00:30:00Z"];
    let expected = expected.iter().map(|time| Ok(time.parse()?)).collect::<Result<Vec<Time>>>()?;
    same("the due times", &times(&made(&visitor, "night").await?), &expected)
}

async fn a_paused_definition_takes_back_what_waits(lab: &dyn Lab) -> Result<()> {
    let (visitor, clock) = desk(lab).await?;
    let start = clock.now();
    for (definition, overlap) in [("free", "allow"), ("line", "queue")] {
        let mut input = every(60);
        input["overlap"] = json!(overlap);
        define(&visitor, definition, input).await?;
    }
    clock.advance(SECOND * 55);
    same("made", &visitor.drain_workers().await?, &2)?;
    let first = start.plus(SECOND * 60);
    for definition in ["free", "line"] {
        let paused = visitor.done("job_definition.pause", &id(definition), json!({}), None).await?;
        shows(&paused, &json!({"status": "PAUSED", "next_time": null, "due_at": null}))?;
        same("what waited", &made(&visitor, definition).await?, &vec![(first, "CANCELLED".to_owned())])?;
        visitor.refused("job_definition.pause", &id(definition), json!({}), None, Code::WrongState).await?;
    }
    nobody_is_left_in_line(&visitor, "job").await?;
    clock.advance(SECOND * 300);
    same("while it is paused", &visitor.drain_workers().await?, &0)?;
    claims_nothing(&visitor).await?;
    let resumed = clock.now();
    for definition in ["free", "line"] {
        visitor.done("job_definition.resume", &id(definition), json!({}), None).await?;
        visitor.refused("job_definition.resume", &id(definition), json!({}), None, Code::WrongState).await?;
    }
    clock.advance(SECOND * 60);
    same("made again", &visitor.drain_workers().await?, &2)?;
    for definition in ["free", "line"] {
        let jobs = made(&visitor, definition).await?;
        same("from then on", &times(&jobs), &vec![first, resumed.plus(SECOND * 60)])?;
    }
    // What is due already is not taken back.
    for definition in ["free", "line"] {
        visitor.done("job_definition.pause", &id(definition), json!({}), None).await?;
    }
    claim(&visitor, 5, 2).await.map(drop)
}

async fn a_definition_is_defined_anew_and_deleted(lab: &dyn Lab) -> Result<()> {
    let (visitor, clock) = desk(lab).await?;
    let start = clock.now();
    visitor.refused("job_definition.delete", &id("d"), json!({}), None, Code::NotFound).await?;
    visitor.refused("job_definition.create", &id("d"), every(60), Some(1), Code::NotFound).await?;
    define(&visitor, "d", every(60)).await?;
    visitor.refused("job_definition.create", &id("d"), every(30), Some(7), Code::VersionConflict).await?;
    clock.advance(SECOND * 55);
    visitor.drain_workers().await?;
    // The same due time again, under the new definition: the one that waited is taken back.
    let at = start.plus(SECOND * 60);
    let anew = define(&visitor, "d", json!({"when": {"at": at.to_string()}})).await?;
    shows(&anew, &json!({"status": "ACTIVE", "every_ms": null, "revision": 2}))?;
    visitor.drain_workers().await?;
    let states: Vec<String> = made(&visitor, "d").await?.into_iter().map(|(_, state)| state).collect();
    same("one of them is live", &states, &vec!["CANCELLED".to_owned(), "PENDING".to_owned()])?;
    visitor.done("job_definition.delete", &id("d"), json!({}), None).await?;
    for action in ["read", "pause", "resume", "delete", "run"] {
        let action = format!("job_definition.{action}");
        visitor.refused(&action, &id("d"), json!({}), None, Code::NotFound).await?;
    }
    clock.advance(SECOND * 600);
    same("after its end", &visitor.drain_workers().await?, &0)?;
    claims_nothing(&visitor).await?;
    let back = define(&visitor, "d", every(60)).await?;
    shows(&back, &json!({"status": "ACTIVE", "revision": 4}))
}

async fn what_overlaps_is_skipped_or_stands_in_line(lab: &dyn Lab) -> Result<()> {
    let (visitor, clock) = desk(lab).await?;
    let start = clock.now();
    for overlap in ["allow", "skip", "queue"] {
        let mut input = every(60);
        input["overlap"] = json!(overlap);
        input["missed"] = json!("all");
        define(&visitor, overlap, input).await?;
    }
    clock.advance(SECOND * 60);
    visitor.drain_workers().await?;
    let lease = json!({"limit": 9, "lease_ms": 3_600_000});
    let mut claimed = Vec::new();
    for _ in 0..LOOKS_MAX {
        claimed.extend(claim_once(&visitor, lease.clone()).await?);
        if claimed.len() >= 3 {
            break;
        }
        pause().await;
    }
    same("the first of each", &claimed.len(), &3)?;
    // The second is due while the first runs.
    clock.advance(SECOND * 60);
    visitor.drain_workers().await?;
    let at = |step: u32| start.plus(SECOND * 60 * step);
    same("skip", &times(&made(&visitor, "skip").await?), &vec![at(1)])?;
    visitor.shows("job_definition", &id("skip"), &json!({"made": 1, "skipped": 1})).await?;
    for overlap in ["allow", "queue"] {
        same(overlap, &times(&made(&visitor, overlap).await?), &vec![at(1), at(2)])?;
    }
    let second = claim(&visitor, 9, 1).await?;
    ensure!(second[0].0.starts_with("allow@"), "only what may overlap can be claimed, got {second:?}");
    complete(&visitor, &second[0].0, 1).await?;
    for (job, attempt) in &claimed {
        complete(&visitor, job, *attempt).await?;
    }
    let next = claim(&visitor, 9, 1).await?;
    same("what stood in line", &next, &vec![(format!("queue@{}.1", at(2)), 1)])?;
    complete(&visitor, &next[0].0, 1).await?;
    clock.advance(SECOND * 60);
    visitor.drain_workers().await?;
    same("skip, when the one before is over", &times(&made(&visitor, "skip").await?), &vec![at(1), at(3)])
}

async fn a_maker_whose_clock_is_ahead_makes_nothing_early(lab: &dyn Lab) -> Result<()> {
    let engine = standing();
    let skewed = SkewedClock::over(Arc::new(engine.clone()));
    let store = lab.open_at(Arc::new(engine.clone())).await?;
    let visitor = Visitor::over(store, BLUEPRINT, Arc::new(skewed.clone())).await?;
    define(&visitor, "d", every(60)).await?;
    skewed.skew(600_000_000);
    same("ten minutes ahead", &visitor.drain_workers().await?, &0)?;
    skewed.skew(-600_000_000);
    engine.advance(SECOND * 60);
    same("ten minutes behind", &visitor.drain_workers().await?, &0)?;
    skewed.skew(0);
    same("right", &visitor.drain_workers().await?, &1)?;
    // Ahead of the engine, it passes over nothing that is still to come.
    let start = engine.now();
    define(&visitor, "steps", json!({"when": {"every_ms": 60_000}, "overlap": "allow"})).await?;
    define(&visitor, "pattern", json!({"when": {"cron": "* * * * *"}, "overlap": "allow"})).await?;
    for minute in 1..=3 {
        skewed.skew(600_000_000);
        engine.set(start.plus(SECOND * 60 * minute));
        visitor.drain_workers().await?;
        skewed.skew(0);
    }
    let steps: Vec<Time> = (1..=3).map(|minute| start.plus(SECOND * 60 * minute)).collect();
    for definition in ["steps", "pattern"] {
        let made = times(&made(&visitor, definition).await?);
        ensure!(made.starts_with(&steps), "{definition} made its jobs for {made:?}, not for {steps:?}");
    }
    Ok(())
}

async fn steps_are_counted_by_the_engines_clock(lab: &dyn Lab) -> Result<()> {
    let engine = standing();
    let skewed = SkewedClock::over(Arc::new(engine.clone()));
    let store = lab.open_at(Arc::new(engine.clone())).await?;
    let visitor = Visitor::over(store, BLUEPRINT, Arc::new(skewed.clone())).await?;
    let first = engine.now().plus(SECOND * 60).to_string();
    for (definition, skew) in [("ahead", 600_000_000), ("behind", -600_000_000)] {
        skewed.skew(skew);
        let defined = define(&visitor, definition, json!({"when": {"every_ms": 60_000}})).await?;
        shows(&defined, &json!({"next_time": first}))?;
        visitor.done("job_definition.pause", &id(definition), json!({}), None).await?;
        let resumed = visitor.done("job_definition.resume", &id(definition), json!({}), None).await?;
        shows(&resumed, &json!({"next_time": first}))?;
    }
    Ok(())
}

async fn a_maker_that_loses_answers_makes_nothing_twice(lab: &dyn Lab) -> Result<()> {
    let clock = standing();
    let sound = lab.open_at(Arc::new(clock.clone())).await?;
    let faulty = Arc::new(FaultyStore::over(sound.clone(), Arc::new(SystemClock), Odds::default(), 5));
    let visitor = Visitor::over(faulty.clone(), BLUEPRINT, Arc::new(clock.clone())).await?;
    let start = clock.now();
    for (number, overlap) in ["allow", "skip", "queue", "allow", "queue", "allow"].into_iter().enumerate() {
        let mut input = every(60);
        input["missed"] = json!("all");
        input["overlap"] = json!(overlap);
        define(&visitor, &format!("d{number}"), input).await?;
    }
    clock.advance(SECOND * 200);
    faulty.set_odds(Odds { unknown_before: 0.3, unknown_after: 0.3, unavailable: 0.1, ..Odds::default() });
    for _ in 0..20 {
        // Whatever comes of it: the process may die here as well.
        let _ = visitor.work(5).await;
    }
    let achieved = faulty.achieved();
    ensure!(achieved.unknown_after > 0 && achieved.unknown_before > 0, "{achieved}");
    faulty.set_odds(Odds::default());
    visitor.drain_workers().await?;
    for number in 0..6 {
        let steps = if number == 1 { 1 } else { 3 };
        let expected: Vec<Time> = (1..=steps).map(|step| start.plus(SECOND * 60 * step)).collect();
        same("the due times", &times(&made(&visitor, &format!("d{number}")).await?), &expected)?;
    }
    Ok(())
}

async fn a_paused_definition_and_its_maker_contend_on_one_row(lab: &dyn Lab) -> Result<()> {
    let visitor = Visitor::open(lab, BLUEPRINT).await?;
    let soon = |visitor: &Visitor| visitor.house.clock().now().plus(SECOND * 5).to_string();
    for number in 0..8 {
        define(&visitor, &format!("d{number}"), json!({"when": {"at": soon(&visitor)}})).await?;
    }
    // What is made within these five seconds is ahead of its time, so a pause takes it back.
    let maker = tokio::spawn({
        let visitor = visitor.clone();
        async move { visitor.drain_workers().await }
    });
    let mut paused = Vec::new();
    for number in (0..8).rev() {
        let definition = format!("d{number}");
        match visitor.call("job_definition.pause", &id(&definition), json!({}), None).await {
            Ok(_) => paused.push(definition),
            Err(refusal) => ensure!(refusal.code == Code::WrongState, "{refusal}"),
        }
    }
    maker.await??;
    visitor.drain_workers().await?;
    for number in 0..8 {
        let definition = format!("d{number}");
        let jobs = made(&visitor, &definition).await?;
        let live = jobs.iter().filter(|(_, state)| state == "PENDING").count();
        same(&format!("{definition}, {jobs:?}"), &live, &usize::from(!paused.contains(&definition)))?;
    }
    Ok(())
}

async fn definitions_are_made_by_the_workers_of_any_process(lab: &dyn Lab) -> Result<()> {
    let store = lab.open().await?;
    let open = async || Visitor::over(store.clone(), BLUEPRINT, Arc::new(SystemClock)).await;
    let (first, second) = (open().await?, open().await?);
    let options = || Options {
        lease: Duration::from_millis(1_500),
        idle_max: Duration::from_millis(100),
        random: Random::seeded(1),
        ..Options::default()
    };
    for visitor in [&first, &second] {
        visitor.house.start_workers(options());
    }
    let due = |visitor: &Visitor| json!({"when": {"at": visitor.house.clock().now().to_string()}});
    for number in 0..4 {
        define(&first, &format!("a{number}"), due(&first)).await?;
    }
    let done = async |expected: usize| -> Result<()> {
        let mut found = Vec::new();
        for _ in 0..2_000 {
            found = all_rows(&second, "jobs").await?;
            if found.len() >= expected {
                break;
            }
            pause().await;
        }
        same("how many were made", &found.len(), &expected)
    };
    done(4).await?;
    // One process is killed with its leases in its hands; what is due then is the other's.
    drop(first);
    for number in 0..4 {
        define(&second, &format!("b{number}"), due(&second)).await?;
    }
    done(8).await?;
    second.house.stop_workers().await;
    Ok(())
}

/// A handler that notes whose jobs it did, in which order.
struct Noting {
    notes: Mutex<Vec<(String, String, i64)>>,
    takes: Duration,
}

#[async_trait]
impl Handler for Noting {
    async fn handle(&self, job: &Job) -> Result<Json, Failure> {
        let note = (job.tenant.as_str().to_owned(), job.job_id.clone(), job.attempt);
        self.notes.lock().unwrap_or_else(PoisonError::into_inner).push(note);
        match job.payload.as_str() {
            Some("fail") => Err(Failure::passing("not today")),
            Some("give up") => Err(Failure { error: "never".into(), is_final: true }),
            Some("long") => {
                SystemClock.sleep(self.takes).await;
                Ok(json!("long"))
            }
            _ => Ok(job.payload.clone()),
        }
    }
}

impl Noting {
    fn taking(takes: Duration) -> Arc<Noting> {
        Arc::new(Noting { notes: Mutex::default(), takes })
    }

    fn notes(&self) -> Vec<(String, String, i64)> {
        self.notes.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }
}

/// Waits until so many jobs of a tenant are in a state.
async fn until(visitor: &Visitor, state: &str, expected: usize) -> Result<()> {
    let mut found = 0;
    for _ in 0..2_000 {
        let rows = all_rows(visitor, "jobs").await?;
        found = rows.iter().filter(|row| row.text("state") == Some(state)).count();
        if found >= expected {
            break;
        }
        pause().await;
    }
    same(state, &found, &expected)
}

async fn handlers_in_rust_do_jobs(lab: &dyn Lab) -> Result<()> {
    let visitor = Visitor::open(lab, BLUEPRINT).await?;
    let handler = Noting::taking(Duration::from_secs(4));
    for (job, payload) in [("a", "x"), ("b", "fail"), ("c", "give up"), ("d", "long"), ("e", "y")] {
        let key = if job == "a" || job == "e" { json!("k") } else { Json::Null };
        let mut input = json!({"payload": payload});
        if !key.is_null() {
            input["order_key"] = key;
        }
        enqueue(&visitor, job, input).await?;
    }
    let options = HandOptions { lease: Some(Duration::from_millis(1_500)), ..HandOptions::default() };
    let start =
        |schedule: &str| Hands::start(&visitor.house, schedule, "default", handler.clone(), options.clone());
    ensure!(start("order").is_err() && start("nothing").is_err(), "only schedules have jobs");
    let hands = start("job")?;
    until(&visitor, "COMPLETED", 3).await?;
    hands.stop().await;
    for (job, expected) in [
        ("a", json!({"state": "COMPLETED", "result": "x", "worker": "house"})),
        ("b", json!({"state": "RETRYING", "error": "not today"})),
        ("c", json!({"state": "FAILED", "error": "never"})),
        // It took three leases, and its heart beat on.
        ("d", json!({"state": "COMPLETED", "result": "long", "attempt": 1})),
        ("e", json!({"state": "COMPLETED", "result": "y"})),
    ] {
        visitor.shows("job", &id(job), &expected).await?;
    }
    // What was stopped claims nothing more.
    enqueue(&visitor, "f", json!({})).await?;
    same("who does it", &claim(&visitor, 1, 1).await?, &vec![("f".to_owned(), 1)])?;
    nobody_is_left_in_line(&visitor, "job").await
}

async fn a_tenant_with_many_jobs_does_not_hold_up_another(lab: &dyn Lab) -> Result<()> {
    let many = Visitor::open(lab, BLUEPRINT).await?;
    let few = many.for_tenant("zeta")?;
    for job in 0..60 {
        enqueue(&many, &format!("m{job}"), json!({})).await?;
    }
    for job in 0..3 {
        enqueue(&few, &format!("f{job}"), json!({})).await?;
    }
    let handler = Noting::taking(Duration::ZERO);
    let options = HandOptions { at_once: 4, ..HandOptions::default() };
    let hands = Hands::start(&many.house, "job", "default", handler.clone(), options)?;
    until(&many, "COMPLETED", 60).await?;
    until(&few, "COMPLETED", 3).await?;
    hands.stop().await;
    let notes = handler.notes();
    same("each once", &notes.len(), &63)?;
    let last = notes.iter().rposition(|(tenant, ..)| tenant == "zeta").context("nothing of zeta was done")?;
    ensure!(last < 30, "the last of three jobs was done as number {last} of {}", notes.len());
    Ok(())
}

async fn a_process_that_is_killed_loses_no_job(lab: &dyn Lab) -> Result<()> {
    let store = lab.open().await?;
    let open = async || Visitor::over(store.clone(), BLUEPRINT, Arc::new(SystemClock)).await;
    let (first, second) = (open().await?, open().await?);
    for job in 0..20 {
        enqueue(&first, &format!("j{job}"), json!({"payload": "long", "attempts_max": 9})).await?;
    }
    let options = HandOptions {
        at_once: 6,
        lease: Some(Duration::from_secs(3)),
        idle_max: Duration::from_millis(50),
        ..HandOptions::default()
    };
    // The first never comes to an end with what it has; the second is quick.
    let slow = Noting::taking(Duration::from_secs(3_600));
    let hands = Hands::start(&first.house, "job", "default", slow.clone(), options.clone())?;
    for _ in 0..2_000 {
        if slow.notes().len() >= 6 {
            break;
        }
        pause().await;
    }
    let quick = Noting::taking(Duration::ZERO);
    let others = Hands::start(&second.house, "job", "default", quick.clone(), options)?;
    until(&second, "COMPLETED", 14).await?;
    same("what the first holds", &slow.notes().len(), &6)?;
    // Killed: its tasks end where they are, and their leases by themselves.
    drop(hands);
    until(&second, "COMPLETED", 20).await?;
    others.stop().await;
    let again: BTreeSet<String> =
        quick.notes().into_iter().filter(|(.., attempt)| *attempt == 2).map(|(_, job, _)| job).collect();
    same("what was done again", &again, &slow.notes().into_iter().map(|(_, job, _)| job).collect())
}

/// Writes past the actions. Nobody should, and if somebody does, no third loses by it.
async fn write(visitor: &Visitor, step: Step) -> Result<()> {
    let client = visitor.client()?;
    client.apply(client.one(step)).await.map(drop)
}

async fn draft(visitor: &Visitor, action: &str, name: &str, input: Json) -> Result<Plan> {
    visitor.drafted(action, &id(name), input, None).await
}

fn failed() -> Json {
    json!({"attempt": 1, "error": "no", "final": true})
}

async fn who_was_paused_comes_too_late(lab: &dyn Lab) -> Result<()> {
    let (desk, clock) = desk(lab).await?;
    let jobs = desk.table("jobs")?.clone();
    let run_at = |job: &str, at: Value| Step::update(&jobs, id(job)).set("run_at", at);
    let state = |job: &str, state: &str| Step::update(&jobs, id(job)).set("state", state);
    // It is over, by the same attempt.
    enqueue(&desk, "a", json!({})).await?;
    claim(&desk, 1, 1).await?;
    let fail = draft(&desk, "job.fail", "a", failed()).await?;
    complete(&desk, "a", 1).await?;
    desk.too_late(&fail).await?;

    // One is admitted and another stands in line, or neither is so any more.
    let visitor = desk.for_tenant("lanes")?;
    for job in ["x0", "x1"] {
        enqueue(&visitor, job, json!({"order_key": "k"})).await?;
    }
    let admitted = draft(&visitor, "job.cancel", "x0", json!({})).await?;
    let in_line = draft(&visitor, "job.cancel", "x1", json!({})).await?;
    let soon = Value::Time(clock.now());
    for (plan, wrong, right) in [
        (&admitted, run_at("x0", Value::Null), run_at("x0", soon.clone())),
        (&in_line, run_at("x1", soon), run_at("x1", Value::Null)),
        (&in_line, state("x1", "COMPLETED"), state("x1", "PENDING")),
    ] {
        write(&visitor, wrong).await?;
        visitor.too_late(plan).await?;
        write(&visitor, right).await?;
    }
    for (job, table) in [("x1", "job_lines"), ("x2", "job_lanes")] {
        if job == "x2" {
            enqueue(&visitor, job, json!({"order_key": "alone"})).await?;
        }
        let plan = draft(&visitor, "job.cancel", job, json!({})).await?;
        let gone = plan.steps().iter().find(|step| step.table.name() == table).context("no such step")?;
        write(&visitor, Step::delete(visitor.table(table)?, gone.key.iter().cloned())).await?;
        visitor.too_late(&plan).await?;
    }

    // Two who see that nobody is in the lane.
    let fresh = |job: &str| json!({"job_id": job, "order_key": "fresh"});
    let late = visitor.drafted("job.enqueue", &[], fresh("n0"), None).await?;
    visitor.done("job.enqueue", &[], fresh("n1"), None).await?;
    visitor.too_late(&late).await?;

    // There was room, or there was none.
    let task = |job: &str| json!({"job_id": job, "order_key": "k"});
    visitor.done("task.enqueue", &[], task("t0"), None).await?;
    let room = visitor.drafted("task.enqueue", &[], task("t1"), None).await?;
    visitor.done("task.enqueue", &[], task("t2"), None).await?;
    visitor.too_late(&room).await?;
    let line = visitor.drafted("task.enqueue", &[], task("t3"), None).await?;
    let lines = visitor.table("task_lines")?;
    let place = line.steps().iter().find(|step| step.table.name() == lines.name()).context("no place")?;
    let place = || place.key.iter().cloned();
    let stray = Step::insert(lines, place()).set("job_id", "other").set("not_before", now());
    write(&visitor, stray).await?;
    visitor.too_late(&line).await?;
    write(&visitor, Step::delete(lines, place())).await?;
    visitor.done("task.cancel", &id("t0"), json!({}), None).await?;
    visitor.too_late(&line).await?;

    // Somebody else has its unique key, or nobody has it, or it was brought back to life already.
    let visitor = desk.for_tenant("keys")?;
    for (job, input) in
        [("u", json!({"unique_key": "u"})), ("v", json!({"unique_key": "v"})), ("w", json!({}))]
    {
        enqueue(&visitor, job, input).await?;
        same("what was claimed", &claim(&visitor, 1, 1).await?, &vec![(job.to_owned(), 1)])?;
        visitor.done("job.fail", &id(job), failed(), None).await?;
        let replay = draft(&visitor, "job.replay", job, json!({})).await?;
        match job {
            "u" => enqueue(&visitor, "heir", json!({"unique_key": "u", "after_ms": 3_600_000})).await?,
            "v" => write(&visitor, Step::delete(visitor.table("job_uniques")?, id("v"))).await?,
            _ => drop(visitor.done("job.replay", &id(job), json!({}), None).await?),
        }
        visitor.too_late(&replay).await?;
    }
    visitor.done("job.cancel", &id("w"), json!({}), None).await?;
    // A key is free when its job was completed.
    enqueue(&visitor, "c1", json!({"unique_key": "c"})).await?;
    claim(&visitor, 1, 1).await?;
    complete(&visitor, "c1", 1).await?;
    enqueue(&visitor, "c2", json!({"unique_key": "c"})).await
}

async fn a_definition_that_changed_meanwhile_stays_so(lab: &dyn Lab) -> Result<()> {
    let (visitor, clock) = desk(lab).await?;
    let (client, jobs) = (visitor.client()?, visitor.table("jobs")?.clone());
    let define_it = async || draft(&visitor, "job_definition.create", "d", every(60)).await;
    let first = define_it().await?;
    define(&visitor, "d", every(60)).await?;
    visitor.too_late(&first).await?;
    let mut stale = vec![define_it().await?];
    for action in ["pause", "run", "delete"] {
        stale.push(draft(&visitor, &format!("job_definition.{action}"), "d", json!({})).await?);
    }
    let run = draft(&visitor, "job_definition.run", "d", json!({})).await?;
    let taken = run.steps().first().and_then(|step| step.key.first()?.as_text()).context("no job")?;
    enqueue(&visitor, taken, json!({})).await?;
    visitor.too_late(&run).await?;
    visitor.done("job_definition.pause", &id("d"), json!({}), None).await?;
    for plan in &stale {
        visitor.too_late(plan).await?;
    }
    let resume = draft(&visitor, "job_definition.resume", "d", json!({})).await?;
    visitor.done("job_definition.resume", &id("d"), json!({}), None).await?;
    visitor.too_late(&resume).await?;
    // The job that it would take back was claimed, or does not stand where it stood.
    for (definition, overlap) in [("free", "allow"), ("line", "queue")] {
        let mut input = every(60);
        input["overlap"] = json!(overlap);
        define(&visitor, definition, input).await?;
    }
    clock.advance(SECOND * 55);
    visitor.drain_workers().await?;
    let made = all_rows(&visitor, "jobs").await?;
    let state = |job: &str, state: &str| Step::update(&jobs, id(job)).set("state", state);
    for (definition, in_progress) in [("free", true), ("line", true), ("line", false)] {
        let before = made.iter().find(|row| row.text("definition_id") == Some(definition));
        let before = before.context("nothing was made")?;
        let job = before.text("job_id").context("no id")?;
        let pause = draft(&visitor, "job_definition.pause", definition, json!({})).await?;
        let wrong = match in_progress {
            true => state(job, "IN_PROGRESS"),
            false => Step::update(&jobs, id(job)).set("run_at", Value::Null),
        };
        write(&visitor, wrong).await?;
        visitor.too_late(&pause).await?;
        let at = before.get("run_at").cloned().unwrap_or(Value::Null);
        write(&visitor, state(job, "PENDING").set("run_at", at)).await?;
        same("the job", &client.row(&jobs, id(job)).await?.text("state"), &Some("PENDING"))?;
    }
    // And the definition itself is gone.
    let stale = [define_it().await?, draft(&visitor, "job_definition.run", "d", json!({})).await?];
    write(&visitor, Step::delete(visitor.table("job_definitions")?, id("d"))).await?;
    for plan in &stale {
        visitor.too_late(plan).await?;
    }
    Ok(())
}

/// Steps of all workers until one of them was paused. An index may lag.
async fn works_until_paused(slow: &Visitor, paused: &Paused) -> Result<()> {
    for _ in 0..LOOKS_MAX {
        slow.work(7).await?;
        if paused.is_over() {
            return Ok(());
        }
        pause().await;
    }
    bail!("nobody found anything to do")
}

/// A desk whose clock moves pauses by itself, and a process that is paused with a plan in its hands.
async fn slow_desk(lab: &dyn Lab) -> Result<(Visitor, Visitor, Arc<Paused>, DrillClock)> {
    let clock = DrillClock::new();
    let store = lab.open_at(Arc::new(clock.clone())).await?;
    let paused = Arc::new(Paused::default());
    let slow = Arc::new(Around::new(store.clone(), paused.clone()));
    let visitor = Visitor::over(store, BLUEPRINT, Arc::new(clock.clone())).await?;
    let slow = Visitor::over(slow, BLUEPRINT, Arc::new(clock.clone())).await?;
    Ok((visitor, slow, paused, clock))
}

async fn who_looked_long_ago_claims_and_fails_nothing(lab: &dyn Lab) -> Result<()> {
    let (visitor, slow, paused, clock) = slow_desk(lab).await?;
    // What others do to the job's one attempt while somebody is about to claim it, or to fail it because its lease is over.
    for (tenant, over, state) in [
        ("claimed", false, "IN_PROGRESS"),
        ("held", true, "IN_PROGRESS"),
        ("replayed", true, "PENDING"),
        ("replayed-and-claimed", true, "IN_PROGRESS"),
    ] {
        let (visitor, slow) = (visitor.for_tenant(tenant)?, slow.for_tenant(tenant)?);
        enqueue(&visitor, "a", json!({"attempts_max": 1})).await?;
        if over {
            claim(&visitor, 1, 1).await?;
            clock.advance(SECOND * 31);
        }
        let (others, clock) = (visitor.clone(), clock.clone());
        paused.before("jobs", 1, async move {
            let look = json!({"worker": "other", "limit": 1});
            let ask = async |action: &str, key: &str, input: Json| {
                // If this fails, the job is in another state than the case expects.
                drop(others.done(action, &id(key), input, None).await);
            };
            match tenant {
                "claimed" => {
                    ask("job_queue.claim", "default", look).await;
                    clock.advance(SECOND * 31);
                }
                "held" => {
                    let beat = json!({"jobs": [{"job_id": "a", "attempt": 1}]});
                    ask("job_queue.heartbeat", "default", beat).await;
                }
                _ => {
                    ask("job_queue.claim", "default", look.clone()).await;
                    ask("job.replay", "a", json!({})).await;
                    if tenant != "replayed" {
                        ask("job_queue.claim", "default", look).await;
                        clock.advance(SECOND * 31);
                    }
                }
            }
        });
        let mut claimed = Vec::new();
        for _ in 0..LOOKS_MAX {
            claimed.extend(claim_once(&slow, json!({"limit": 1})).await?);
            if paused.is_over() {
                break;
            }
            pause().await;
        }
        same(tenant, &claimed, &Vec::new())?;
        visitor.shows("job", &id("a"), &json!({"state": state})).await.context(tenant)?;
    }
    Ok(())
}

async fn who_looked_long_ago_forgets_nothing(lab: &dyn Lab) -> Result<()> {
    let (visitor, slow, paused, clock) = slow_desk(lab).await?;
    enqueue(&visitor, "dead", json!({"attempts_max": 1})).await?;
    claim(&visitor, 1, 1).await?;
    visitor.done("job.fail", &id("dead"), json!({"attempt": 1}), None).await?;
    clock.advance(SECOND * 24 * 3_600);
    let others = visitor.clone();
    paused.before("jobs", 1, async move {
        // If this fails, the job is not there any more.
        drop(others.done("job.replay", &id("dead"), json!({}), None).await);
    });
    works_until_paused(&slow, &paused).await?;
    visitor.shows("job", &id("dead"), &json!({"state": "PENDING"})).await?;
    visitor.done("job.cancel", &id("dead"), json!({}), None).await?;
    clock.advance(SECOND * 3_600);
    visitor.drain_workers().await?;
    // Its key is another's by now.
    enqueue(&visitor, "done", json!({"unique_key": "u"})).await?;
    claim(&visitor, 1, 1).await?;
    complete(&visitor, "done", 1).await?;
    clock.advance(SECOND * 3_600);
    let others = visitor.clone();
    paused.before("jobs", 1, async move {
        // If this fails, the key is free.
        drop(enqueue(&others, "heir", json!({"unique_key": "u"})).await);
    });
    works_until_paused(&slow, &paused).await?;
    let third = json!({"job_id": "third", "unique_key": "u"});
    visitor.refused("job.enqueue", &[], third, None, Code::AlreadyExists).await.map(drop)
}

async fn who_looked_long_ago_makes_nothing(lab: &dyn Lab) -> Result<()> {
    let (visitor, slow, paused, clock) = slow_desk(lab).await?;
    // In which state the first job is when the second is due; what others do before the plan about the second is
    // committed; and how many are made and skipped in the end.
    for (tenant, before, meanwhile, made, skipped) in [
        ("pending", "", "", 1, 1),
        ("retrying", "retry", "", 1, 1),
        ("failed", "fail", "", 2, 0),
        ("cancelled", "cancel", "", 2, 0),
        ("back-to-life", "fail", "replay", 1, 1),
        ("ended", "claim", "complete", 2, 0),
        ("deleted", "claim", "delete", 2, 0),
        ("back-under-its-name", "delete", "enqueue", 1, 1),
    ] {
        let (visitor, slow) = (visitor.for_tenant(tenant)?, slow.for_tenant(tenant)?);
        let mut input = every(60);
        input["overlap"] = json!("skip");
        define(&visitor, "d", input).await?;
        clock.advance(SECOND * 60);
        visitor.drain_workers().await?;
        let job = all_rows(&visitor, "jobs").await?;
        let job = job.first().and_then(|row| row.text("job_id")).context("nothing was made")?.to_owned();
        if ["retry", "fail", "claim"].contains(&before) {
            let lease = json!({"limit": 1, "lease_ms": 3_600_000});
            let mut claimed = Vec::new();
            while claimed.is_empty() {
                claimed = claim_once(&visitor, lease.clone()).await?;
            }
        }
        match before {
            "retry" => drop(visitor.done("job.fail", &id(&job), json!({"attempt": 1}), None).await?),
            "fail" => drop(visitor.done("job.fail", &id(&job), failed(), None).await?),
            "cancel" => drop(visitor.done("job.cancel", &id(&job), json!({}), None).await?),
            "delete" => write(&visitor, Step::delete(visitor.table("jobs")?, id(&job))).await?,
            _ => {}
        }
        clock.advance(SECOND * 60);
        if !meanwhile.is_empty() {
            let (others, jobs) = (visitor.clone(), visitor.table("jobs")?.clone());
            paused.before("job_definitions", 1, async move {
                // If this fails, another number is made and skipped than the case expects.
                match meanwhile {
                    "replay" => drop(others.done("job.replay", &id(&job), json!({}), None).await),
                    "complete" => drop(complete(&others, &job, 1).await),
                    "enqueue" => drop(enqueue(&others, &job, json!({})).await),
                    _ => drop(write(&others, Step::delete(&jobs, id(&job))).await),
                }
            });
            works_until_paused(&slow, &paused).await?;
        }
        visitor.drain_workers().await?;
        let shown = visitor.shown("job_definition", &id("d"), &["made", "skipped"]).await?;
        same(tenant, &shown, &vec![json!(made), json!(skipped)])?;
        visitor.done("job_definition.delete", &id("d"), json!({}), None).await?;
    }
    // It was defined anew meanwhile, and is due again: what it was before is not made.
    let at = |clock: &DrillClock| json!({"at": clock.now().to_string()});
    define(&visitor, "anew", json!({"when": at(&clock), "payload": "old"})).await?;
    let (others, when) = (visitor.clone(), at(&clock));
    paused.before("job_definitions", 1, async move {
        // If this fails, the old one is made.
        drop(define(&others, "anew", json!({"when": when, "payload": "new"})).await);
    });
    works_until_paused(&slow, &paused).await?;
    visitor.drain_workers().await?;
    let jobs = all_rows(&visitor, "jobs").await?;
    let payloads: Vec<_> = jobs.iter().filter_map(|row| row.json("payload")).collect();
    same("what was made", &payloads, &vec![&json!("new")])?;
    // Somebody has a job of the name that one would get: it stays as it is.
    let due = clock.now().plus(SECOND * 60);
    enqueue(&visitor, &format!("taken@{due}.1"), json!({"payload": "mine"})).await?;
    define(&visitor, "taken", json!({"when": {"at": due.to_string()}, "payload": "its own"})).await?;
    clock.advance(SECOND * 60);
    for _ in 0..3 {
        // The worker says that it cannot.
        drop(visitor.work(7).await);
    }
    visitor.shows("job", &id(&format!("taken@{due}.1")), &json!({"payload": "mine"})).await
}
