//! What can be done with jobs and queues.

use std::sync::Arc;

use statehouse_store::Type;
use statehouse_store::table::VERSION;

use super::claim::{CODE, Claimer, DONE, Heart, JOBS, LEASE_MS, LIMIT, MESSAGE, WAIT_MS};
use super::read::{Reader, Reading};
use super::rules::{AFTER_MS, AT, millis};
use super::write::{FINAL, Gate, Verb, Writer, kind_of};
use super::{
    ATTEMPT, ATTEMPTS_LIMIT, ATTEMPTS_MAX, BATCH_MAX, ERROR, JOB_ID, LEASE_MAX, LEASE_MIN, ORDER_KEY, PAUSED,
    PAYLOAD, PRIORITIES_LIMIT, PRIORITY, QUEUE, RESULT, SPAN_MS_MAX, STATE, STATES, Schedule, UNIQUE_KEY,
    UPDATED_AT, WAIT_MAX, WORKER,
};
use crate::action::{Action, Code, Does, Each, Method, Place, Route, WAIT};
use crate::form::{Form, Property};
use crate::paging;
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

pub(super) fn job_actions(schedule: &Arc<Schedule>) -> Vec<Action> {
    let name = &schedule.name;
    let row = job_form(schedule);
    let at = |method, place| Route { method, place };
    let write = |verb: Verb| Does::Write(Arc::new(Writer { schedule: schedule.clone(), verb }));
    let read = |what: Reading| Does::Read(Arc::new(Reader { schedule: schedule.clone(), what }));
    let enqueued = format!("{name}.enqueue");
    let claimed = vec![enqueued.clone(), WAIT.to_owned(), format!("{}.claim", schedule.queue_resource())];
    let step = |name: &'static str, summary: String, mechanism: &'static str| Action {
        name: name.into(),
        summary,
        target: state_name(&schedule.name),
        shape: "state transition",
        mechanism: mechanism.into(),
        route: at(Method::Post, Place::ItemAction),
        input: vec![],
        output: row.clone(),
        refusals: vec![Code::NotFound, Code::WrongState],
        needs_version: false,
        answers: &[],
        after: vec![enqueued.clone()],
        does: write(Verb::Cancel),
    };
    let filters = [
        Property::optional(STATE, Form::one_of(&STATES), "which of them; PENDING if not given"),
        Property::optional(QUEUE, TEXT, "of which queue; `default` if not given"),
    ];
    vec![
        Action {
            shape: "create target",
            route: at(Method::Post, Place::Collection),
            input: enqueue_form(),
            refusals: vec![Code::AlreadyExists, Code::Contended],
            answers: &["due item never materialized"],
            after: vec![],
            does: write(Verb::Enqueue),
            ..step("enqueue", format!("Enqueue a {name}, for now or for later."), "materialize claimable run")
        },
        Action {
            shape: "read source",
            route: at(Method::Get, Place::Item),
            refusals: vec![Code::NotFound],
            does: read(Reading::Job),
            ..step("read", format!("Read a {name}."), "strong read by key")
        },
        Action {
            shape: "read source",
            route: at(Method::Get, Place::Collection),
            input: filters.into_iter().chain(paging::properties()).collect(),
            output: Form::List(Box::new(row.clone())),
            refusals: vec![],
            does: read(Reading::Jobs),
            ..step(
                "list",
                format!("List {name} rows of a queue by state, newest first."),
                "range read on the state and time index",
            )
        },
        Action {
            input: vec![attempt(), result()],
            refusals: vec![Code::NotFound, Code::WrongState, Code::NotHolder],
            answers: &["run executed but result not recorded"],
            output: Form::Object(vec![
                Property::required(JOB_ID, TEXT, ""),
                Property::required(STATE, Form::one_of(&STATES), ""),
                Property::required(ATTEMPT, Form::Value(Type::Int), about(ATTEMPT)),
                Property::required(RESULT, Form::Any, "").or_null(),
            ]),
            after: claimed.clone(),
            does: write(Verb::Complete),
            ..step(
                "complete",
                format!("Record the result of a {name} that you claimed."),
                "guarded conditional update by attempt",
            )
        },
        Action {
            input: [attempt()].into_iter().chain(error()).collect(),
            refusals: vec![Code::NotFound, Code::WrongState, Code::NotHolder],
            answers: &["run executed but result not recorded"],
            after: claimed.clone(),
            does: write(Verb::Fail),
            ..step(
                "fail",
                format!("Give a {name} back: it is tried again after a rest, or failed for good."),
                "guarded conditional update by attempt",
            )
        },
        Action {
            does: write(Verb::Cancel),
            ..step("cancel", format!("Cancel a {name} that is not over."), "guarded conditional update")
        },
        Action {
            refusals: vec![Code::NotFound, Code::WrongState, Code::AlreadyExists],
            after: claimed.into_iter().chain([format!("{name}.fail")]).collect(),
            does: write(Verb::Replay),
            ..step(
                "replay",
                format!("Bring a {name} that failed for good back to life."),
                "guarded conditional update",
            )
        },
    ]
}

pub(super) fn queue_actions(schedule: &Arc<Schedule>) -> Vec<Action> {
    let name = &schedule.name;
    let row = job_form(schedule);
    let target = format!("Runnable{}", state_name(name));
    let at = |method, place| Route { method, place };
    let lease = || {
        let range = Form::Range(millis(LEASE_MIN), millis(LEASE_MAX));
        Property::optional(LEASE_MS, range, "how long you hold it; the blueprint says how long otherwise")
    };
    let batch = |properties: Vec<Property>| {
        let job_id = Property::required(JOB_ID, TEXT, "");
        let one = Form::Object([job_id].into_iter().chain(properties).collect());
        Property::required(JOBS, Form::List(Box::new(one)), "at most 98 of them; each is decided by itself")
    };
    let outcome = Form::List(Box::new(Form::Object(vec![
        Property::required(JOB_ID, TEXT, ""),
        Property::required(DONE, Form::Value(Type::Bool), ""),
        Property::required(CODE, TEXT, "why it was not done").or_null(),
        Property::required(MESSAGE, TEXT, "").or_null(),
    ])));
    let claimed =
        vec![format!("{name}.enqueue"), WAIT.to_owned(), format!("{}.claim", schedule.queue_resource())];
    let step = |name: &'static str, summary: String, mechanism: &'static str| Action {
        name: name.into(),
        summary,
        target: target.clone(),
        shape: "state transition",
        mechanism: mechanism.into(),
        route: at(Method::Post, Place::ItemAction),
        input: vec![],
        output: outcome.clone(),
        refusals: vec![],
        needs_version: false,
        answers: &[],
        after: claimed.clone(),
        does: Does::Several(Arc::new(Heart(schedule.clone()))),
    };
    let each = |action: &str, as_one: bool| {
        Does::Each(Each {
            action: format!("{name}.{action}"),
            list: JOBS,
            key: JOB_ID,
            most: usize::try_from(BATCH_MAX).unwrap_or(1),
            as_one,
        })
    };
    let gate = |paused: bool| Does::Write(Arc::new(Gate { schedule: schedule.clone(), paused }));
    let queue_row = Form::Object(vec![
        Property::required(QUEUE, TEXT, ""),
        Property::required(PAUSED, Form::Value(Type::Bool), "whether nobody can claim from it"),
        Property::required(UPDATED_AT, Form::Value(Type::Time), "").or_null(),
        Property::required(VERSION, Form::Value(Type::Int), ""),
    ]);
    vec![
        Action {
            input: vec![
                Property::required(WORKER, TEXT, "who claims"),
                Property::optional(LIMIT, Form::Range(1, BATCH_MAX), "how many at most; one if not given"),
                lease(),
                Property::optional(
                    WAIT_MS,
                    Form::Range(0, millis(WAIT_MAX)),
                    "how long to wait for the first one; not at all if not given",
                ),
            ],
            output: Form::List(Box::new(row)),
            answers: &["job claimed twice", "run executed but result not recorded"],
            after: vec![format!("{name}.enqueue"), WAIT.to_owned()],
            does: Does::Several(Arc::new(Claimer(schedule.clone()))),
            ..step(
                "claim",
                format!("Claim {name} rows of a queue that are due, or whose lease is over."),
                "claim/lease",
            )
        },
        Action {
            input: vec![batch(vec![attempt()]), lease()],
            answers: &["job claimed twice"],
            ..step(
                "heartbeat",
                format!("Hold {name} rows that you claimed for another lease."),
                "lease renewal",
            )
        },
        Action {
            input: vec![batch(vec![attempt(), result()])],
            answers: &["run executed but result not recorded"],
            does: each("complete", true),
            ..step("complete", format!("Complete several {name} rows."), "guarded conditional update of each")
        },
        Action {
            input: vec![batch([attempt()].into_iter().chain(error()).collect())],
            answers: &["run executed but result not recorded"],
            does: each("fail", false),
            ..step("fail", format!("Give several {name} rows back."), "guarded conditional update of each")
        },
        Action {
            input: vec![batch(vec![])],
            after: claimed.clone().into_iter().chain([format!("{name}.fail")]).collect(),
            does: each("replay", false),
            ..step(
                "replay",
                format!("Bring several {name} rows that failed back to life."),
                "guarded conditional update of each",
            )
        },
        Action {
            output: queue_row.clone(),
            after: vec![],
            does: gate(true),
            ..step("pause", "Let nobody claim from a queue.".into(), "upsert of the queue's row")
        },
        Action {
            output: queue_row.clone(),
            after: vec![],
            does: gate(false),
            ..step("resume", "Let everybody claim from a queue again.".into(), "upsert of the queue's row")
        },
        Action {
            shape: "read source",
            route: at(Method::Get, Place::Item),
            output: queue_row,
            after: vec![],
            does: Does::Read(Arc::new(Reader { schedule: schedule.clone(), what: Reading::Queue })),
            ..step("read", "Read whether a queue is paused.".into(), "strong read by key")
        },
    ]
}

fn enqueue_form() -> Vec<Property> {
    vec![
        Property::optional(JOB_ID, TEXT, "an id that you choose; the house makes one if not given"),
        Property::optional(QUEUE, TEXT, "`default` if not given"),
        Property::optional(PAYLOAD, Form::Any, "what the worker gets").or_null(),
        Property::optional(AT, Form::Value(Type::Time), "when it is due; now if not given"),
        Property::optional(AFTER_MS, Form::Range(0, SPAN_MS_MAX), "and how many milliseconds later"),
        Property::optional(PRIORITY, Form::Range(0, PRIORITIES_LIMIT - 1), "0 comes first"),
        Property::optional(ATTEMPTS_MAX, Form::Range(1, ATTEMPTS_LIMIT), "how often it is tried"),
        Property::optional(UNIQUE_KEY, TEXT, "of those with this key at most one is not over"),
        Property::optional(
            ORDER_KEY,
            TEXT,
            "those with this key run one after the other, or `per_key` at a time",
        ),
    ]
}

pub(super) fn job_form(schedule: &Schedule) -> Form {
    let columns = schedule.jobs.columns().iter();
    let mut form: Vec<Property> = columns
        .map(|column| {
            let form = match column.name.as_str() {
                STATE => Form::one_of(&STATES),
                name if kind_of(schedule, name) == Type::Json => Form::Any,
                name => Form::Value(kind_of(schedule, name)),
            };
            let property = Property::required(&column.name, form, about(&column.name));
            if column.required { property } else { property.or_null() }
        })
        .collect();
    form.push(Property::required(VERSION, Form::Value(Type::Int), "raised by every write"));
    Form::Object(form)
}

fn about(column: &str) -> &'static str {
    match column {
        super::RUN_AT => "from when on it can be claimed; null when it is over or stands in line",
        super::NOT_BEFORE => "when it was to be due",
        ATTEMPT => "how often it was claimed",
        super::CLAIM_ID => "the last claim",
        super::UNIQUE_HELD => "whether it still has its unique key",
        super::LINE_SEQ => "its number among those with its order key",
        super::EXECUTION_TIME => "the due time of the definition that made it",
        _ => "",
    }
}
