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
use statehouse_store::{
    Entry, Event, EventTemplate, Expr, Guard, Plan, PlanError, Reason, Refused, Row, Step, Table, Time, Type,
    Value,
};

use crate::action::{
    Answer, Call, Code, Desk, Draft, Expected, Pieces, Refusal, Verdict, Write, common_verdict, row_of,
};
use crate::declare::table::UPDATED_AT;
use crate::declare::{ActionSpec, Declare, IndexList, ResourceSpec, RowRead, TableDef, TableSpec};
use crate::form::{Form, Property};
use crate::infra::due::{self, DUE_AT, Due, Scanner};
use crate::resource::{key_text, plural};
use crate::worker::Wake;

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
    def: Arc<TableDef>,
    missed: Missed,
}

/// The shortest and the longest interval between two due times.
const EVERY_MS_MIN: i64 = 1_000;
const INTERVAL_MS_MAX: i64 = 10 * 366 * 24 * 3_600 * 1_000;

/// Reads `[timer.NAME]`.
pub(crate) fn declare(cx: &mut Declare<'_>) -> Option<()> {
    let name = cx.name();
    let settings = cx.settings();
    let key = settings.key("key");
    let table = settings.text("table", plural(name));
    let shards = settings.count("shards", 4, 1..=1_024);
    let missed = match settings.choice("missed", &["once", "all"]) {
        "all" => Missed::All,
        _ => Missed::Once,
    };
    let spec = TableSpec::named(table)
        .key(&key)
        .states_in(STATUS, &STATUSES)
        .time(DUE_AT)
        .null()
        .about("when it is due next; null unless it is set")
        .int(EVERY_MS)
        .null()
        .about("the interval of a recurring timer; null for one that fires once")
        .int(FIRED_COUNT)
        .default(0)
        .about("how often it has fired")
        .time(LAST_DUE_AT)
        .null()
        .about("the due time that was released last")
        .json(PAYLOAD)
        .null()
        .about("copied into its events")
        .updated_at()
        .deadline(&[SET], DUE_AT, shards)
        .index(BY_STATUS, &[STATUS], &[UPDATED_AT]);
    let def = cx.build(spec)?;
    let timer = Arc::new(Timer { name: name.to_owned(), def: def.clone(), missed });
    let status = Property::optional(STATUS, Form::one_of(&STATUSES), "which rows; SET if not given");
    let write = |verb: Verb| Writer { timer: timer.clone(), verb };
    cx.resource(
        ResourceSpec::of(name, &def)
            .worker(Scanner::new(timer.worker(), shards, Timer::clone(&timer)))
            .action(
                ActionSpec::put("set", "Set a {name}, or set it anew.")
                    .mechanism("upsert into the sharded due index")
                    .takes(set_inputs())
                    .codes(&[Code::NotFound, Code::VersionConflict])
                    .answers(&["due item never materialized"])
                    .writes(write(Verb::Set)),
            )
            .action(
                ActionSpec::delete("cancel", "Cancel a {name} that is set.")
                    .code(Code::VersionConflict)
                    .answers(&["job claimed twice"])
                    .after(["set"])
                    .writes(write(Verb::Cancel)),
            )
            .action(
                ActionSpec::read("read", "Read a {name}.")
                    .after(["set"])
                    .reads_row(RowRead::of(name, &def).missing("was never set")),
            )
            .action(
                ActionSpec::list("list", "List {name} rows by status, newest first.")
                    .mechanism("range read on the status and time index")
                    .after(["set"])
                    .reads_index(IndexList::newest_first(&def).by_or(BY_STATUS, status, SET)),
            ),
    );
    Some(())
}

fn set_inputs() -> [Property; 4] {
    let interval = |name, min, about| Property::optional(name, Form::Range(min, INTERVAL_MS_MAX), about);
    [
        Property::optional(DUE_AT, Form::Value(Type::Time), "when it is due first"),
        interval(AFTER_MS, 0, "and how many milliseconds later; from now, if due_at is not given"),
        interval(
            EVERY_MS,
            EVERY_MS_MIN,
            "repeat at this interval without end; alone, it is due first after one interval",
        ),
        Property::optional(PAYLOAD, Form::Any, "copied into its events"),
    ]
}

impl Timer {
    fn worker(&self) -> String {
        format!("{}.fire", self.name)
    }

    fn what(&self, call: &Call) -> String {
        format!("{} {}", self.name, key_text(&call.key))
    }

    /// When a call wants the timer to be due first.
    fn first_due(input: &serde_json::Map<String, Json>) -> Result<Expr, Refusal> {
        let millis = |name: &str| input.get(name).and_then(Json::as_u64).map(Duration::from_millis);
        let misfit = |detail: &str| Refusal::field(DUE_AT, detail);
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
        self.def.table()
    }

    fn plan(&self, row: &Row, at: Time, operation: &str) -> Result<Plan, PlanError> {
        let key = key_text(row.key());
        let due = row.time(DUE_AT).unwrap_or(Time::MAX);
        let number = row.int(FIRED_COUNT).unwrap_or(0).saturating_add(1);
        let every =
            row.int(EVERY_MS).and_then(|millis| u64::try_from(millis).ok()).map(Duration::from_millis);
        let step = Step::update(self.def.table(), row.key().iter().cloned())
            .guard(Guard::version(row.version()))
            .guard(column(DUE_AT).le(now()))
            .set(FIRED_COUNT, number)
            .set(LAST_DUE_AT, due)
            .set(UPDATED_AT, now());
        let mut event = EventTemplate::named(format!("{}.fired", self.name))
            .with(DUE_AT, Value::Time(due).to_json())
            .with("number", number);
        let step = match every {
            Some(every) => {
                let (next, passed) = next_due(due, every, at, self.missed);
                event = event.with("missed", passed);
                // What is passed over must be over, whatever this process takes for the time.
                let step = if passed > 0 { step.guard(value(next.minus(every)).le(now())) } else { step };
                self.def.set_due(step, row.tenant(), &self.name, next)
            }
            None => self.def.clear_due(step.set(STATUS, FIRED)),
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
                    None => Step::upsert(timer.def.table(), key),
                    Some(_) => Step::update(timer.def.table(), key),
                };
                let step = step.set(STATUS, SET).set(EVERY_MS, given(EVERY_MS, Type::Int));
                let step = step.set(PAYLOAD, given(PAYLOAD, Type::Json));
                let due = Timer::first_due(&call.input)?;
                (timer.def.set_due(step, &call.tenant, &timer.name, due), "set")
            }
            Verb::Cancel => {
                let step = Step::update(timer.def.table(), key).guard(column(STATUS).eq(SET));
                (timer.def.clear_due(step.set(STATUS, CANCELLED)), "cancelled")
            }
        };
        if let Some(Expected::Version(version)) = call.expected {
            step = step.guard(Guard::version(version));
        }
        let event = EventTemplate::named(format!("{}.{what}", timer.name)).with_row_of(0);
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
        Answer::row(self.timer.def.visible(row_of(event)))
    }

    fn wakes(&self, _: &Call, event: &Event) -> Vec<Wake> {
        due::wake(&self.timer.worker(), event).into_iter().collect()
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
