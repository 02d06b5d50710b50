//! I03 Due-time release: durable timers, one-shot and recurring, each of whose due times is released once.
//!
//! ```text
//!             set                fire (the last due time)
//!   (none) ─────────► SET ───────────────────────────────────► FIRED
//!                     │ ▲ ▲                                       │
//!     fire (more to   └─┘ ├───────────────── set ─────────────────┤
//!      come), set         │                                       │
//!                     SET ─────────────────────────────────► CANCELLED
//!                                       cancel
//! ```
//!
//! **Rows.** `reminders(tenant, key…, status, due_shard, due_at, every_ms, fired, last_due_at, payload, updated_at, version)`,
//! with an index by status and the index `due` across tenants ([`crate::infra::due`]). `due_at` and `due_shard` are set
//! while the timer is.
//!
//! **Invariants.**
//! - I1. Each due time is released at most once. *Guard of fire:* `version = the one that was scanned`; the same plan moves
//!   `due_at` on, or clears it, and leaves the event `NAME.fired` in the log.
//! - I2. Each due time is released. *A timer that is set stands in the due index until it fires or is cancelled, and a
//!   scanner tries every row of it that is due; a crash leaves the row where it was.*
//! - I3. None is released early. *Guard of fire:* `due_at <= now`, by the engine's clock.
//! - I4. A recurring timer does not drift. *The next due time is computed from the last one, not from the clock.* Those
//!   that were missed while nobody scanned fire one by one (`missed = "all"`), or once for all (`missed = "once"`). *Guard of
//!   fire, if some are passed over:* `the last of them <= now`, by the engine's clock; a scanner whose own is ahead releases
//!   them one by one.
//! - I5. A cancelled timer does not fire. *Cancel and fire contend on one row; guard of cancel:* `status = 'SET'`.
//!
//! **Failures.** *Due item materialized twice*: I1. *Due item never materialized*: I2. *Job claimed twice*: a shard is
//! scanned by one process at a time, and if it were two, I1. *Run executed but result not recorded*: the release is the
//! record, in one plan; who acts on `NAME.fired` reads it from the log, by its place, and commits that with the effect.
//!
//! **Hotspots.** *Due-time bucket hotspot*, *cron boundary burst*: `shards = 16` spreads the rows of one moment by their
//! keys. *Queue backlog*, *worker burst*: a step releases a bounded number of rows, as plans in flight together.

mod archetype;

pub use archetype::ARCHETYPE;

use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use serde_json::Value as Json;
use statehouse_store::guard::{column, now, now_plus, value};
use statehouse_store::table::VERSION;
use statehouse_store::{
    Address, Consistency, Draft as EventDraft, Entry, Event, Expr, Guard, Plan, PlanError, Query, Reason,
    Refused, Row, Step, Table, Tenant, Time, Type, Value,
};

use crate::action::{
    Action, Answer, Call, Code, Desk, Does, Draft, Expected, Method, Pieces, Place, Read, Refusal, Route,
    Verdict, Write, common_verdict, row_of,
};
use crate::blueprint::Thing;
use crate::blueprint::problem::{Problem, Problems};
use crate::blueprint::settings::Field;
use crate::form::{Form, Misfit, Property};
use crate::infra::due::{self, DUE_AT, DUE_SHARD, Due, Scanner};
use crate::paging;
use crate::resource::{Resource, key_text, plural, state_name};
use crate::told::{Telling, Told};
use crate::worker::{Wake, Worker};

/// The states of a row.
const STATUSES: [&str; 3] = [SET, FIRED, CANCELLED];
const SET: &str = "SET";
const FIRED: &str = "FIRED";
const CANCELLED: &str = "CANCELLED";
/// The columns of a timer, besides those of what is due.
const STATUS: &str = "status";
const EVERY_MS: &str = "every_ms";
const FIRED_COUNT: &str = "fired";
const LAST_DUE_AT: &str = "last_due_at";
const PAYLOAD: &str = "payload";
const UPDATED_AT: &str = "updated_at";
const BY_STATUS: &str = "by_status";
/// An input of `set`: a due time from now.
const AFTER_MS: &str = "after_ms";

/// What becomes of due times that passed while nobody scanned.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Missed {
    /// All of them are released at once, as one.
    Once,
    /// Each is released.
    All,
}

/// The next due time of a recurring timer, and how many were passed over.
pub fn next_due(due: Time, every: Duration, at: Time, missed: Missed) -> (Time, u64) {
    let every_micros = i64::try_from(every.as_micros()).unwrap_or(i64::MAX).max(1);
    let late_micros = i64::try_from(at.since(due).as_micros()).unwrap_or(i64::MAX);
    let passed = if missed == Missed::Once { late_micros / every_micros } else { 0 };
    let next = due.checked_add_micros(every_micros.saturating_mul(passed.saturating_add(1)));
    (next.unwrap_or(Time::MAX), u64::try_from(passed).unwrap_or(0))
}

/// One declared timer.
#[derive(Clone, Debug)]
struct Timer {
    name: String,
    table: Arc<Table>,
    shards: u32,
    missed: Missed,
}

/// In how many parts the scanning is cut, if the blueprint does not say.
const SHARDS_DEFAULT: i64 = 4;
const SHARDS_MAX: i64 = 1_024;
/// The least and the greatest span between two due times.
const EVERY_MS_MIN: i64 = 1_000;
const SPAN_MS_MAX: i64 = 10 * 366 * 24 * 3_600 * 1_000;

/// Reads `[timer.NAME]`.
pub fn declare(thing: &Thing, problems: &mut Problems) -> Option<Resource> {
    let mut settings = thing.settings.clone();
    let key = settings.key("key", problems);
    let table = settings.text("table", problems).unwrap_or_else(|| plural(&thing.name));
    let shards = settings.int("shards", problems).unwrap_or(SHARDS_DEFAULT);
    let missed = settings.choice("missed", &["once", "all"], problems).unwrap_or("once");
    settings.finish(problems);
    if !(1..=SHARDS_MAX).contains(&shards) {
        let title = format!("`shards` must be from 1 to {SHARDS_MAX}");
        problems.add(Problem::at(settings.span_of("shards"), title));
    }
    let key = key?;
    let mut builder = Table::named(&table);
    for field in &key {
        builder = builder.partition(&field.name, field.kind);
    }
    let builder = due::columns(builder.required(STATUS, Type::Text))
        .optional(EVERY_MS, Type::Int)
        .defaulted(FIRED_COUNT, Type::Int, 0)
        .optional(LAST_DUE_AT, Type::Time)
        .optional(PAYLOAD, Type::Json)
        .required(UPDATED_AT, Type::Time)
        .index(BY_STATUS, &[STATUS], &[UPDATED_AT]);
    let table = match builder.build() {
        Ok(table) => table,
        Err(error) => {
            problems.add(Problem::at(settings.span(), format!("`timer.{}`: {}", thing.name, error.why)));
            return None;
        }
    };
    let timer = Arc::new(Timer {
        name: thing.name.clone(),
        table: table.clone(),
        shards: u32::try_from(shards).unwrap_or(1).max(1),
        missed: if missed == "all" { Missed::All } else { Missed::Once },
    });
    let scanner: Arc<dyn Worker> = Arc::new(Scanner::new(timer.worker(), timer.shards, Timer::clone(&timer)));
    let told = Told::with_row(&thing.name, &table);
    Some(Resource {
        hidden: Vec::new(),
        name: thing.name.clone(),
        archetype: thing.archetype,
        key: key.iter().map(|field| (field.name.clone(), field.kind)).collect(),
        tables: vec![table],
        actions: actions(&timer, &key),
        workers: vec![scanner],
        consumers: Vec::new(),
        telling: Telling::Rows(Box::new(told)),
    })
}

fn actions(timer: &Arc<Timer>, key: &[Field]) -> Vec<Action> {
    let name = &timer.name;
    let target = state_name(name);
    let row = row_form(key);
    let at = |method, place| Route { method, place };
    let write = |verb: Verb| Does::Write(Arc::new(Writer { timer: timer.clone(), verb }));
    let read = |list: bool| Does::Read(Arc::new(Reader { timer: timer.clone(), list }));
    vec![
        Action {
            name: "set".into(),
            summary: format!("Set a {name}, or set it anew."),
            target: target.clone(),
            shape: "overwrite",
            mechanism: "upsert into the sharded due index".into(),
            route: at(Method::Put, Place::Item),
            input: vec![
                Property::optional(DUE_AT, Form::Value(Type::Time), "when it is due first"),
                Property::optional(
                    AFTER_MS,
                    Form::Range(0, SPAN_MS_MAX),
                    "and how many milliseconds later; from now, if due_at is not given",
                ),
                Property::optional(
                    EVERY_MS,
                    Form::Range(EVERY_MS_MIN, SPAN_MS_MAX),
                    "and in which steps again, without end; alone, it is due first after one step",
                ),
                Property::optional(PAYLOAD, Form::Any, "what its events bring along"),
            ],
            output: row.clone(),
            refusals: vec![Code::NotFound, Code::VersionConflict],
            needs_version: false,
            answers: &["due item never materialized"],
            after: vec![],
            does: write(Verb::Set),
        },
        Action {
            name: "cancel".into(),
            summary: format!("Cancel a {name} that is set."),
            target: target.clone(),
            shape: "state transition",
            mechanism: "guarded conditional update".into(),
            route: at(Method::Delete, Place::Item),
            input: vec![],
            output: row.clone(),
            refusals: vec![Code::NotFound, Code::WrongState, Code::VersionConflict],
            needs_version: false,
            answers: &["job claimed twice"],
            after: vec![format!("{name}.set")],
            does: write(Verb::Cancel),
        },
        Action {
            name: "read".into(),
            summary: format!("Read a {name}."),
            target: target.clone(),
            shape: "read source",
            mechanism: "strong read by key".into(),
            route: at(Method::Get, Place::Item),
            input: vec![],
            output: row.clone(),
            refusals: vec![Code::NotFound],
            needs_version: false,
            answers: &[],
            after: vec![format!("{name}.set")],
            does: read(false),
        },
        Action {
            name: "list".into(),
            summary: format!("List {name} rows by status, newest first."),
            target,
            shape: "read source",
            mechanism: "range read on the status and time index".into(),
            route: at(Method::Get, Place::Collection),
            input: [Property::optional(STATUS, Form::one_of(&STATUSES), "which rows; SET if not given")]
                .into_iter()
                .chain(paging::properties())
                .collect(),
            output: Form::List(Box::new(row)),
            refusals: vec![],
            needs_version: false,
            answers: &[],
            after: vec![format!("{name}.set")],
            does: read(true),
        },
    ]
}

fn row_form(key: &[Field]) -> Form {
    let mut properties: Vec<Property> =
        key.iter().map(|field| Property::required(&field.name, Form::Value(field.kind), "")).collect();
    let time = |name: &str, about: &str| Property::required(name, Form::Value(Type::Time), about);
    properties.extend([
        Property::required(STATUS, Form::one_of(&STATUSES), ""),
        time(DUE_AT, "when it is due next; null unless it is set").or_null(),
        Property::required(DUE_SHARD, Form::Value(Type::Int), "").or_null(),
        Property::required(EVERY_MS, Form::Value(Type::Int), "null for one that fires once").or_null(),
        Property::required(FIRED_COUNT, Form::Value(Type::Int), "how often it has fired"),
        time(LAST_DUE_AT, "the due time that was released last").or_null(),
        Property::required(PAYLOAD, Form::Any, "").or_null(),
        time(UPDATED_AT, ""),
        Property::required(VERSION, Form::Value(Type::Int), "raised by every write"),
    ]);
    Form::Object(properties)
}

impl Timer {
    fn worker(&self) -> String {
        format!("{}.fire", self.name)
    }

    fn shard(&self, tenant: &Tenant, key: &str) -> i64 {
        due::shard_of(tenant, &self.name, key, self.shards)
    }

    fn what(&self, call: &Call) -> String {
        format!("{} {}", self.name, key_text(&call.key))
    }

    /// When a call wants the timer to be due first.
    fn first_due(input: &serde_json::Map<String, Json>) -> Result<Expr, Refusal> {
        let millis = |name: &str| input.get(name).and_then(Json::as_u64).map(Duration::from_millis);
        let misfit = |detail: &str| {
            Refusal::misfits(vec![Misfit { pointer: format!("/{DUE_AT}"), detail: detail.to_owned() }])
        };
        let due = input.get(DUE_AT).map(|due| Value::from_json(due.clone(), Type::Time));
        let due = due.transpose().map_err(|why| misfit(&why.to_string()))?.and_then(|due| due.as_time());
        match (due, millis(AFTER_MS), millis(EVERY_MS)) {
            (Some(due), after, _) => Ok(Value::Time(due.plus(after.unwrap_or_default())).into()),
            (None, Some(span), _) | (None, None, Some(span)) => Ok(now_plus(span).into()),
            (None, None, None) => Err(misfit("say when it is due: due_at, after_ms or every_ms")),
        }
    }
}

/// What fires (I1, I3, I4).
impl Due for Timer {
    fn table(&self) -> &Arc<Table> {
        &self.table
    }

    fn plan(&self, row: &Row, at: Time, operation: &str) -> Result<Plan, PlanError> {
        let key = key_text(row.key());
        let due = row.time(DUE_AT).unwrap_or(Time::MAX);
        let number = row.int(FIRED_COUNT).unwrap_or(0).saturating_add(1);
        let every =
            row.int(EVERY_MS).and_then(|millis| u64::try_from(millis).ok()).map(Duration::from_millis);
        let step = Step::update(&self.table, row.key().iter().cloned())
            .guard(Guard::version(row.version()))
            .guard(column(DUE_AT).le(now()))
            .set(FIRED_COUNT, number)
            .set(LAST_DUE_AT, due)
            .set(UPDATED_AT, now());
        let mut event = EventDraft::named(format!("{}.fired", self.name))
            .with(DUE_AT, Value::Time(due).to_json())
            .with("number", number);
        let step = match every {
            Some(every) => {
                let (next, passed) = next_due(due, every, at, self.missed);
                event = event.with("missed", passed);
                // What is passed over must be over, whatever this process takes for the time.
                let step = if passed > 0 { step.guard(value(next.minus(every)).le(now())) } else { step };
                due::set(step, self.shard(row.tenant(), &key), next)
            }
            None => due::clear(step.set(STATUS, FIRED)),
        };
        let entry = Entry::about(&self.name, key).event(event.with_row_of(0));
        Plan::of(row.tenant(), operation).step(step).log(entry).without_rows().build()
    }

    fn plan_just_due(&self, row: &Row, at: Time, operation: &str) -> Option<Result<Plan, PlanError>> {
        let due = row.time(DUE_AT)?;
        let passes_over = row.int(EVERY_MS).is_some() && self.missed == Missed::Once && due < at;
        passes_over.then(|| self.plan(row, due, operation))
    }
}

/// What a write does.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Verb {
    Set,
    Cancel,
}

struct Writer {
    timer: Arc<Timer>,
    verb: Verb,
}

#[async_trait]
impl Write for Writer {
    async fn draft(&self, call: &Call, _: &Desk<'_>) -> Result<Draft, Refusal> {
        let (timer, key) = (&*self.timer, call.key.iter().cloned());
        let subject = key_text(&call.key);
        let (mut step, what) = match self.verb {
            Verb::Set => {
                let given = |name: &str, kind: Type| {
                    let json = call.input.get(name).cloned().unwrap_or_default();
                    Value::from_json(json, kind).unwrap_or(Value::Null)
                };
                let step = match call.expected {
                    None => Step::upsert(&timer.table, key),
                    Some(_) => Step::update(&timer.table, key),
                };
                let step = step.set(STATUS, SET).set(EVERY_MS, given(EVERY_MS, Type::Int));
                let step = step.set(PAYLOAD, given(PAYLOAD, Type::Json));
                let due = Timer::first_due(&call.input)?;
                (due::set(step, timer.shard(&call.tenant, &subject), due), "set")
            }
            Verb::Cancel => {
                let step = Step::update(&timer.table, key).guard(column(STATUS).eq(SET));
                (due::clear(step.set(STATUS, CANCELLED)), "cancelled")
            }
        };
        if let Some(Expected::Version(version)) = call.expected {
            step = step.guard(Guard::version(version));
        }
        let event = EventDraft::named(format!("{}.{what}", timer.name)).with_row_of(0);
        Ok(Draft::Write(Pieces { subject, steps: vec![step.set(UPDATED_AT, now())], event }))
    }

    fn refusal(&self, call: &Call, refused: &Refused) -> Verdict {
        let what = self.timer.what(call);
        let (Reason::Guard { .. }, Some(row)) = (&refused.reason, &refused.current) else {
            return common_verdict(&what, refused);
        };
        let status = row.text(STATUS).unwrap_or_default();
        let refusal = if self.verb == Verb::Cancel && status != SET {
            Refusal::new(
                Code::WrongState,
                format!("{what} is {status}, and only one that is SET can be cancelled"),
            )
        } else {
            let message = format!("{what} is at version {}: read it again and decide anew", row.version());
            Refusal::new(Code::VersionConflict, message)
        };
        Verdict::Refuse(refusal.at_version(Some(row)))
    }

    fn answer(&self, _: &Call, event: &mut Event) -> Answer {
        Answer::row(row_of(event))
    }

    fn wakes(&self, _: &Call, event: &Event) -> Vec<Wake> {
        due::wake(&self.timer.worker(), event).into_iter().collect()
    }
}

struct Reader {
    timer: Arc<Timer>,
    list: bool,
}

#[async_trait]
impl Read for Reader {
    async fn read(&self, call: &Call, desk: &Desk<'_>) -> Result<Arc<Answer>, Refusal> {
        if self.list {
            return self.list(call, desk).await.map(Arc::new);
        }
        let address = Address::new(&self.timer.table, &call.tenant, call.key.iter().cloned())?;
        let row = desk.store.get(&[address], Consistency::Strong).await?.into_iter().next().flatten();
        let missing = || Refusal::new(Code::NotFound, format!("{} was never set", self.timer.what(call)));
        Ok(Arc::new(Answer::row(row.ok_or_else(missing)?.to_json())))
    }
}

impl Reader {
    async fn list(&self, call: &Call, desk: &Desk<'_>) -> Result<Answer, Refusal> {
        let text = |name: &str| call.input.get(name).and_then(Json::as_str);
        let status = text(STATUS).unwrap_or(SET);
        let query = Query::index(&self.timer.table, BY_STATUS, &call.tenant, [status.into()])?.backward();
        let page = desk.store.query(&paging::page_of(query, call)?).await?;
        Ok(paging::answer(page.rows.iter().map(Row::to_json), page.next))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn recurring_timers_do_not_drift() {
        let at = Time::from_millis;
        let every = Duration::from_secs(10);
        for (now, missed, expect) in [
            // In time, late by less than a step, late by exactly one step, late by many.
            (at(0), Missed::Once, (at(10_000), 0)),
            (at(9_999), Missed::Once, (at(10_000), 0)),
            (at(10_000), Missed::Once, (at(20_000), 1)),
            (at(57_123), Missed::Once, (at(60_000), 5)),
            (at(57_123), Missed::All, (at(10_000), 0)),
            // A clock that was set back does not move the next one.
            (at(-3_000), Missed::Once, (at(10_000), 0)),
        ] {
            assert_eq!(next_due(at(0), every, now, missed), expect, "{now} {missed:?}");
        }
        assert_eq!(next_due(Time::MAX, every, Time::MAX, Missed::All), (Time::MAX, 0));
    }
}
