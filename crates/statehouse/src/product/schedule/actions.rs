//! What can be done with jobs and queues.

use std::sync::Arc;

use statehouse_store::Type;

use super::claim::{CODE, ClaimJobs, DONE, Heartbeat, JOBS, LEASE_MS, LIMIT, MESSAGE, WAIT_MS};
use super::read::{JobQuery, JobRead};
use super::rules::{AFTER_MS, AT, millis};
use super::write::{FINAL, JobVerb, JobWrite, PauseQueue, completed_answer};
use super::{
    ATTEMPT, ATTEMPTS_LIMIT, ATTEMPTS_MAX, BATCH_MAX, ERROR, JOB_ID, LEASE_MAX, LEASE_MIN, ORDER_KEY,
    PAYLOAD, PRIORITIES_LIMIT, PRIORITY, QUEUE, RESULT, SPAN_MS_MAX, STATE, STATES, ScheduleSpec, UNIQUE_KEY,
    UPDATED_AT, WAIT_MAX, WORKER,
};
use crate::action::{Code, ForEach, WAIT};
use crate::declare::ActionSpec;
use crate::form::{Form, Property};
use crate::resource::state_name;

const TEXT: Form = Form::Value(Type::Text);

fn attempt() -> Property {
    Property::required(ATTEMPT, Form::Value(Type::Int), "the one under which you claimed it")
}

fn result() -> Property {
    Property::optional(RESULT, Form::Any, "what came of it").or_null()
}

fn error() -> [Property; 2] {
    [
        Property::optional(ERROR, TEXT, "what went wrong"),
        Property::optional(FINAL, Form::Value(Type::Bool), "that trying again is of no use"),
    ]
}

pub(super) fn job_actions(schedule: &Arc<ScheduleSpec>) -> [ActionSpec; 7] {
    let write = |verb: JobVerb| JobWrite { schedule: schedule.clone(), verb };
    let read = |what: JobQuery| JobRead { schedule: schedule.clone(), what };
    let claim = format!("{}.claim", schedule.queue_resource());
    let claimed = ["enqueue", WAIT, claim.as_str()];
    let change = |name: &'static str, summary: &'static str, verb: JobVerb| {
        ActionSpec::transition(name, summary).after(["enqueue"]).writes(write(verb))
    };
    let end = |name: &'static str, summary: &'static str, verb: JobVerb| {
        change(name, summary, verb)
            .mechanism("guarded conditional update by attempt")
            .code(Code::NotHolder)
            .answers(&["run executed but result not recorded"])
            .after(claimed)
    };
    let completed = Form::Object(vec![
        Property::required(JOB_ID, TEXT, ""),
        Property::required(STATE, Form::one_of(&STATES), ""),
        Property::required(ATTEMPT, Form::Value(Type::Int), "how often it was claimed"),
        Property::required(RESULT, Form::Any, "").or_null(),
    ]);
    [
        ActionSpec::create("enqueue", "Enqueue a {name}, for now or for later.")
            .mechanism("materialize claimable run")
            .takes(enqueue_form())
            .code(Code::Contended)
            .answers(&["due item never materialized"])
            .writes(write(JobVerb::Enqueue)),
        ActionSpec::read("read", "Read a {name}.").after(["enqueue"]).reads(read(JobQuery::Job)),
        ActionSpec::list("list", "List {name} rows of a queue by state, or of an order key, newest first.")
            .mechanism("range read on the index by state and time, or by order key and time")
            .takes([
                Property::optional(STATE, Form::one_of(&STATES), "which of them; PENDING if not given"),
                Property::optional(QUEUE, TEXT, "of which queue; `default` if not given"),
                Property::optional(
                    ORDER_KEY,
                    TEXT,
                    "of which order key; then of all states and queues if not given",
                ),
            ])
            .after(["enqueue"])
            .reads(read(JobQuery::Jobs)),
        end("complete", "Record the result of a {name} that you claimed.", JobVerb::Complete)
            .takes([attempt(), result()])
            .gives(completed)
            .answer_with(|_, _, event| completed_answer(event)),
        end(
            "fail",
            "Give a {name} back: it is tried again after a pause, or failed for good.",
            JobVerb::Fail,
        )
        .takes([attempt()].into_iter().chain(error())),
        change("cancel", "Cancel a {name} that is not over.", JobVerb::Cancel),
        change("replay", "Bring a {name} that failed for good back to life.", JobVerb::Replay)
            .code(Code::AlreadyExists)
            .after(claimed.into_iter().chain(["fail"])),
    ]
}

pub(super) fn queue_actions(schedule: &Arc<ScheduleSpec>) -> [ActionSpec; 8] {
    let [claim, heartbeat] = worker_actions(schedule);
    let [complete, fail, replay] = batch_actions(schedule);
    let gate = |name: &'static str, summary: &str, paused: bool| {
        queue_action(schedule, name, summary.to_owned(), "upsert of the queue's row")
            .gives(queue_form(schedule))
            .after([])
            .writes(PauseQueue { schedule: schedule.clone(), paused })
    };
    [
        claim,
        heartbeat,
        complete,
        fail,
        replay,
        gate("pause", "Stop claims from a queue.", true),
        gate("resume", "Let everybody claim from a queue again.", false),
        ActionSpec::read("read", "Read whether a queue is paused.")
            .target(format!("Runnable{}", state_name(&schedule.name)))
            .gives(queue_form(schedule))
            .codes(&[])
            .reads(JobRead { schedule: schedule.clone(), what: JobQuery::Queue }),
    ]
}

/// An action of a queue on several jobs, each of which is decided by itself.
fn queue_action(
    schedule: &ScheduleSpec,
    name: &'static str,
    summary: String,
    mechanism: &'static str,
) -> ActionSpec {
    let enqueue = format!("{}.enqueue", schedule.name);
    let outcome = Form::List(Box::new(Form::Object(vec![
        Property::required(JOB_ID, TEXT, ""),
        Property::required(DONE, Form::Value(Type::Bool), ""),
        Property::required(CODE, TEXT, "why it was not done").or_null(),
        Property::required(MESSAGE, TEXT, "").or_null(),
    ])));
    ActionSpec::transition(name, summary)
        .target(format!("Runnable{}", state_name(&schedule.name)))
        .mechanism(mechanism)
        .gives(outcome)
        .codes(&[])
        .after([enqueue.as_str(), WAIT, "claim"])
}

/// Claims and heartbeats.
fn worker_actions(schedule: &Arc<ScheduleSpec>) -> [ActionSpec; 2] {
    let (job, enqueue) = (&schedule.name, format!("{}.enqueue", schedule.name));
    let lease = || {
        let range = Form::Range(millis(LEASE_MIN), millis(LEASE_MAX));
        Property::optional(LEASE_MS, range, "how long you hold it; the blueprint says how long otherwise")
    };
    let claim = format!("Claim {job} rows of a queue that are due, or whose lease is over.");
    let heartbeat = format!("Hold {job} rows that you claimed for another lease.");
    [
        queue_action(schedule, "claim", claim, "claim/lease")
            .takes(claim_form())
            .takes([lease(), wait()])
            .gives(Form::List(Box::new(schedule.jobs_def.row_form())))
            .answers(&["job claimed twice", "run executed but result not recorded"])
            .after([enqueue.as_str(), WAIT])
            .writes_several(ClaimJobs(schedule.clone())),
        queue_action(schedule, "heartbeat", heartbeat, "lease renewal")
            .takes([batch(vec![attempt()]), lease()])
            .answers(&["job claimed twice"])
            .writes_several(Heartbeat(schedule.clone())),
    ]
}

/// `complete`, `fail` and `replay` of several jobs.
fn batch_actions(schedule: &Arc<ScheduleSpec>) -> [ActionSpec; 3] {
    let job = &schedule.name;
    let each = |action: &'static str, summary: String, try_one_plan: bool| {
        let each = ForEach {
            action: format!("{job}.{action}"),
            list: JOBS,
            key: JOB_ID,
            max: usize::try_from(BATCH_MAX).unwrap_or(1),
            try_one_plan,
        };
        queue_action(schedule, action, summary, "guarded conditional update of each").for_each(each)
    };
    let [enqueue, fail] = ["enqueue", "fail"].map(|action| format!("{job}.{action}"));
    let not_recorded = &["run executed but result not recorded"];
    [
        each("complete", format!("Complete several {job} rows."), true)
            .takes([batch(vec![attempt(), result()])])
            .answers(not_recorded),
        each("fail", format!("Give several {job} rows back."), false)
            .takes([batch([attempt()].into_iter().chain(error()).collect())])
            .answers(not_recorded),
        each("replay", format!("Bring several {job} rows that failed back to life."), false)
            .takes([batch(vec![])])
            .after([enqueue.as_str(), WAIT, "claim", fail.as_str()]),
    ]
}

fn claim_form() -> [Property; 2] {
    [
        Property::required(WORKER, TEXT, "who claims"),
        Property::optional(LIMIT, Form::Range(1, BATCH_MAX), "how many at most; one if not given"),
    ]
}

fn wait() -> Property {
    let about = "how long to wait for the first one; not at all if not given";
    Property::optional(WAIT_MS, Form::Range(0, millis(WAIT_MAX)), about)
}

/// A list of jobs, with what is said of each.
fn batch(properties: Vec<Property>) -> Property {
    let job_id = Property::required(JOB_ID, TEXT, "");
    let one = Form::Object([job_id].into_iter().chain(properties).collect());
    Property::required(JOBS, Form::List(Box::new(one)), "at most 98 of them; each is decided by itself")
}

/// A queue that has no row yet is answered too, without the time of a change.
fn queue_form(schedule: &ScheduleSpec) -> Form {
    match schedule.queues_def.row_form() {
        Form::Object(mut properties) => {
            let updated = properties.iter_mut().filter(|property| property.name == UPDATED_AT);
            updated.for_each(|property| property.nullable = true);
            Form::Object(properties)
        }
        other => other,
    }
}

pub(super) fn enqueue_form() -> Vec<Property> {
    vec![
        Property::optional(JOB_ID, TEXT, "an id that you choose; the house makes one if not given"),
        Property::optional(QUEUE, TEXT, "`default` if not given"),
        Property::optional(PAYLOAD, Form::Any, "what the worker gets").or_null(),
        Property::optional(AT, Form::Value(Type::Time), "when it is due; now if not given"),
        Property::optional(AFTER_MS, Form::Range(0, SPAN_MS_MAX), "and how many milliseconds later"),
        Property::optional(PRIORITY, Form::Range(0, i64::from(PRIORITIES_LIMIT) - 1), "0 comes first"),
        Property::optional(ATTEMPTS_MAX, Form::Range(1, i64::from(ATTEMPTS_LIMIT)), "how often it is tried"),
        Property::optional(UNIQUE_KEY, TEXT, "of those with this key at most one is not over"),
        Property::optional(
            ORDER_KEY,
            TEXT,
            "those with this key run one after the other, or `per_key` at a time",
        ),
    ]
}
