//! What can be done with jobs and queues.

use std::sync::Arc;

use statehouse_store::Type;

use super::claim::{CODE, Claimer, DONE, Heart, JOBS, LEASE_MS, LIMIT, MESSAGE, WAIT_MS};
use super::read::{Reader, Reading};
use super::rules::{AFTER_MS, AT, millis};
use super::write::{FINAL, Gate, Verb, Writer};
use super::{
    ATTEMPT, ATTEMPTS_LIMIT, ATTEMPTS_MAX, BATCH_MAX, ERROR, JOB_ID, LEASE_MAX, LEASE_MIN, ORDER_KEY,
    PAYLOAD, PRIORITIES_LIMIT, PRIORITY, QUEUE, RESULT, SPAN_MS_MAX, STATE, STATES, Schedule, UNIQUE_KEY,
    UPDATED_AT, WAIT_MAX, WORKER,
};
use crate::action::{Code, Each, WAIT};
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

pub(super) fn job_actions(schedule: &Arc<Schedule>) -> [ActionSpec; 7] {
    let write = |verb: Verb| Writer { schedule: schedule.clone(), verb };
    let read = |what: Reading| Reader { schedule: schedule.clone(), what };
    let claim = format!("{}.claim", schedule.queue_resource());
    let claimed = ["enqueue", WAIT, claim.as_str()];
    let change = |name: &'static str, summary: &'static str, verb: Verb| {
        ActionSpec::transition(name, summary).after(["enqueue"]).writes(write(verb))
    };
    let end = |name: &'static str, summary: &'static str, verb: Verb| {
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
            .writes(write(Verb::Enqueue)),
        ActionSpec::read("read", "Read a {name}.").after(["enqueue"]).reads(read(Reading::Job)),
        ActionSpec::list("list", "List {name} rows of a queue by state, newest first.")
            .mechanism("range read on the state and time index")
            .takes([
                Property::optional(STATE, Form::one_of(&STATES), "which of them; PENDING if not given"),
                Property::optional(QUEUE, TEXT, "of which queue; `default` if not given"),
            ])
            .after(["enqueue"])
            .reads(read(Reading::Jobs)),
        end("complete", "Record the result of a {name} that you claimed.", Verb::Complete)
            .takes([attempt(), result()])
            .gives(completed),
        end("fail", "Give a {name} back: it is tried again after a pause, or failed for good.", Verb::Fail)
            .takes([attempt()].into_iter().chain(error())),
        change("cancel", "Cancel a {name} that is not over.", Verb::Cancel),
        change("replay", "Bring a {name} that failed for good back to life.", Verb::Replay)
            .code(Code::AlreadyExists)
            .after(claimed.into_iter().chain(["fail"])),
    ]
}

pub(super) fn queue_actions(schedule: &Arc<Schedule>) -> [ActionSpec; 8] {
    let job = &schedule.name;
    let [enqueue, fail] = ["enqueue", "fail"].map(|action| format!("{job}.{action}"));
    let claimed = [enqueue.as_str(), WAIT, "claim"];
    let lease = || {
        let range = Form::Range(millis(LEASE_MIN), millis(LEASE_MAX));
        Property::optional(LEASE_MS, range, "how long you hold it; the blueprint says how long otherwise")
    };
    let outcome = Form::List(Box::new(Form::Object(vec![
        Property::required(JOB_ID, TEXT, ""),
        Property::required(DONE, Form::Value(Type::Bool), ""),
        Property::required(CODE, TEXT, "why it was not done").or_null(),
        Property::required(MESSAGE, TEXT, "").or_null(),
    ])));
    let step = |name: &'static str, summary: String, mechanism: &'static str| {
        ActionSpec::transition(name, summary)
            .target(format!("Runnable{}", state_name(job)))
            .mechanism(mechanism)
            .gives(outcome.clone())
            .codes(&[])
            .after(claimed)
    };
    let each = |action: &'static str, summary: String, as_one: bool| {
        let each = Each {
            action: format!("{job}.{action}"),
            list: JOBS,
            key: JOB_ID,
            most: usize::try_from(BATCH_MAX).unwrap_or(1),
            as_one,
        };
        step(action, summary, "guarded conditional update of each").for_each(each)
    };
    let gate = |name: &'static str, summary: &str, paused: bool| {
        step(name, summary.to_owned(), "upsert of the queue's row")
            .gives(queue_form(schedule))
            .after([])
            .writes(Gate { schedule: schedule.clone(), paused })
    };
    let not_recorded = &["run executed but result not recorded"];
    [
        step(
            "claim",
            format!("Claim {job} rows of a queue that are due, or whose lease is over."),
            "claim/lease",
        )
        .takes(claim_form())
        .takes([lease(), wait()])
        .gives(Form::List(Box::new(schedule.jobs_def.row_form())))
        .answers(&["job claimed twice", "run executed but result not recorded"])
        .after([enqueue.as_str(), WAIT])
        .writes_several(Claimer(schedule.clone())),
        step("heartbeat", format!("Hold {job} rows that you claimed for another lease."), "lease renewal")
            .takes([batch(vec![attempt()]), lease()])
            .answers(&["job claimed twice"])
            .writes_several(Heart(schedule.clone())),
        each("complete", format!("Complete several {job} rows."), true)
            .takes([batch(vec![attempt(), result()])])
            .answers(not_recorded),
        each("fail", format!("Give several {job} rows back."), false)
            .takes([batch([attempt()].into_iter().chain(error()).collect())])
            .answers(not_recorded),
        each("replay", format!("Bring several {job} rows that failed back to life."), false)
            .takes([batch(vec![])])
            .after(claimed.into_iter().chain([fail.as_str()])),
        gate("pause", "Let nobody claim from a queue.", true),
        gate("resume", "Let everybody claim from a queue again.", false),
        ActionSpec::read("read", "Read whether a queue is paused.")
            .target(format!("Runnable{}", state_name(job)))
            .gives(queue_form(schedule))
            .codes(&[])
            .reads(Reader { schedule: schedule.clone(), what: Reading::Queue }),
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
fn queue_form(schedule: &Schedule) -> Form {
    match schedule.queues_def.row_form() {
        Form::Object(mut properties) => {
            let updated = properties.iter_mut().filter(|property| property.name == UPDATED_AT);
            updated.for_each(|property| property.nullable = true);
            Form::Object(properties)
        }
        other => other,
    }
}

fn enqueue_form() -> Vec<Property> {
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
