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
//!   that were missed while no process scanned fire one by one (`missed = "all"`), or once for all (`missed = "once"`). *Guard of
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

use std::time::Duration;

use serde_json::Value as Json;
use statehouse_store::guard::now_plus;
use statehouse_store::{Expr, Time, Type, Value, bug};

use crate::action::Refusal;
use crate::declare::machine::{Scene, Transition, always, from};
use crate::declare::rule::{bind, col, input, now};
use crate::declare::table::UPDATED_AT;
use crate::declare::{
    ActionSpec, Declare, IndexList, Machine, MachineSpec, ResourceSpec, RowRead, TableSpec,
};
use crate::form::{Form, Property};
use crate::infra::due::DUE_AT;
use crate::resource::plural;

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
/// The last of the due times that a release passes over.
const PASSED: &str = "passed";
/// An input of `set`: a due time from now.
const AFTER_MS: &str = "after_ms";

/// What becomes of due times that passed while no process scanned.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MissedPolicy {
    /// All of them are released at once, as one.
    Once,
    /// Each is released.
    All,
}

/// The next due time of a recurring timer, and how many were passed over.
pub fn next_due(due: Time, every: Duration, at: Time, missed: MissedPolicy) -> (Time, u64) {
    let every_micros = i64::try_from(every.as_micros()).unwrap_or(i64::MAX).max(1);
    let late_micros = i64::try_from(at.since(due).as_micros()).unwrap_or(i64::MAX);
    let passed = if missed == MissedPolicy::Once { late_micros / every_micros } else { 0 };
    let next = due.checked_add_micros(every_micros.saturating_mul(passed.saturating_add(1)));
    (next.unwrap_or(Time::MAX), u64::try_from(passed).unwrap_or(0))
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
        "all" => MissedPolicy::All,
        _ => MissedPolicy::Once,
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
    let machine = cx.machine(transitions(Machine::of(name, &def), missed))?;
    let status = Property::optional(STATUS, Form::one_of(&STATUSES), "which rows; SET if not given");
    cx.resource(
        ResourceSpec::of(name, &def)
            .machine(&machine)
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

fn transitions(machine: MachineSpec, missed: MissedPolicy) -> MachineSpec {
    let set = ActionSpec::put("set", "Set a {name}, or set it anew.")
        .mechanism("upsert into the sharded due index")
        .takes(set_inputs())
        .answers(&["due item never materialized"]);
    let cancel = ActionSpec::delete("cancel", "Cancel a {name} that is set.").answers(&["job claimed twice"]);
    machine
        .transition(Transition::call(
            set,
            always()
                .to(SET)
                .event("set")
                .set(EVERY_MS, input(EVERY_MS))
                .set(PAYLOAD, input(PAYLOAD))
                .set_with(DUE_AT, first_due),
        ))
        .transition(Transition::call(cancel, from([SET]).to(CANCELLED).event("cancelled")))
        .transition(fire(missed))
}

/// The release of a due time. I1: the fence. I3: the rule `due`, which every deadline transition has.
fn fire(missed: MissedPolicy) -> Transition {
    let next = move |at: fn(&Scene<'_>) -> Result<Time, Refusal>| {
        move |scene: &Scene<'_>| {
            let release = TimerRelease::of(scene, at(scene)?, missed)?;
            let release = release.ok_or_else(|| bug!("a timer that fires once has no next due time"))?;
            Ok(release.next.into())
        }
    };
    Transition::deadline(
        "fire",
        [
            from([SET]).to(FIRED).named("last"),
            from([SET])
                .to_same()
                .named("again")
                .set_with(DUE_AT, next(just_due))
                .event_field("missed", |_| 0.into()),
            // I4: what is passed over must be over by the engine's clock.
            from([SET])
                .to_same()
                .named("skip")
                .rule_or_retry("passed", bind(PASSED).le(now()))
                .set_with(DUE_AT, next(|scene| Ok(scene.now_here)))
                .event_field("missed", move |scene| {
                    // The step of this case has the same release, or the error.
                    let release = TimerRelease::of(scene, scene.now_here, missed).ok().flatten();
                    release.map_or(Json::Null, |release| release.passed.into())
                }),
        ],
    )
    .reading()
    .bind(PASSED, move |scene| {
        let skipped = TimerRelease::of(scene, scene.now_here, missed)?;
        Ok(skipped.map_or(Value::Null, |release| Value::Time(release.next.minus(release.every))))
    })
    .try_pick(move |scene| {
        Ok(match TimerRelease::of(scene, scene.now_here, missed)? {
            None => 0,
            Some(release) if release.passed > 0 && scene.refused.is_none() => 2,
            Some(_) => 1,
        })
    })
    .each(|case| {
        case.set_with(FIRED_COUNT, |scene| Ok(occurrence_number(scene)?.into()))
            .set(LAST_DUE_AT, col(DUE_AT))
            .event_field(DUE_AT, |scene| {
                scene.row.and_then(|row| row.get(DUE_AT)).map_or(Json::Null, Value::to_json)
            })
            // The step of this case has the same number, or the error.
            .event_field("number", |scene| occurrence_number(scene).map_or(Json::Null, Json::from))
    })
}

/// Which release of the timer this is, from 1. The fence keeps it right: the row is as it was read.
fn occurrence_number(scene: &Scene<'_>) -> Result<i64, Refusal> {
    Ok(scene.loaded_row()?.get_int(FIRED_COUNT)?.saturating_add(1))
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

/// When a call wants the timer to be due first.
fn first_due(scene: &Scene<'_>) -> Result<Expr, Refusal> {
    let given = |name: &str| scene.inputs().and_then(|inputs| inputs.duration_ms(name));
    let due = scene.inputs().and_then(|inputs| inputs.time(DUE_AT));
    match (due, given(AFTER_MS), given(EVERY_MS)) {
        (Some(due), after, _) => Ok(Value::Time(due.plus(after.unwrap_or_default())).into()),
        (None, Some(span), _) | (None, None, Some(span)) => Ok(now_plus(span).into()),
        (None, None, None) => Err(Refusal::field(DUE_AT, "say when it is due: due_at, after_ms or every_ms")),
    }
}

fn just_due(scene: &Scene<'_>) -> Result<Time, Refusal> {
    Ok(scene.loaded_row()?.get_time(DUE_AT)?)
}

/// What follows the release of a due time of a recurring timer.
struct TimerRelease {
    every: Duration,
    next: Time,
    passed: u64,
}

impl TimerRelease {
    /// The release at a time of the timer in a scene; `None` for a timer that fires once.
    fn of(scene: &Scene<'_>, at: Time, missed: MissedPolicy) -> Result<Option<TimerRelease>, Refusal> {
        let row = scene.loaded_row()?;
        let Some(millis) = row.get_optional_int(EVERY_MS)? else { return Ok(None) };
        let every = u64::try_from(millis).map_err(|_| row.corrupt(EVERY_MS, "is negative"))?;
        let every = Duration::from_millis(every);
        let (next, passed) = next_due(just_due(scene)?, every, at, missed);
        Ok(Some(TimerRelease { every, next, passed }))
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
            (at(0), MissedPolicy::Once, (at(10_000), 0)),
            (at(9_999), MissedPolicy::Once, (at(10_000), 0)),
            (at(10_000), MissedPolicy::Once, (at(20_000), 1)),
            (at(57_123), MissedPolicy::Once, (at(60_000), 5)),
            (at(57_123), MissedPolicy::All, (at(10_000), 0)),
            // A clock that was set back does not move the next one.
            (at(-3_000), MissedPolicy::Once, (at(10_000), 0)),
        ] {
            assert_eq!(next_due(at(0), every, now, missed), expect, "{now} {missed:?}");
        }
        assert_eq!(next_due(Time::MAX, every, Time::MAX, MissedPolicy::All), (Time::MAX, 0));
    }
}
