//! Time-ordered ids: worker ids that are leased, and spans of time that are reserved for them.

mod actions;

use std::ops::RangeInclusive;
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use serde_json::{Value as Json, json};
use statehouse_store::guard::{column, now, now_plus};
use statehouse_store::log::partition_of;
use statehouse_store::table::VERSION;
use statehouse_store::{
    Address, Bug, Consistency, Event, EventTemplate, Guard, Query, Reason, Row, Step, StoreError, Table,
    Time, Type, Value, bug,
};

use self::actions::actions;
use super::time_id::{TimeIdLayout, whole_millis};
use super::{COUNT, HOLDER};
use crate::action::{
    ActionContext, Answer, Call, Code, Method, PlanParts, Prepare, Prepared, Read, Refusal, RefusedStep,
    RouteKind, Verdict, take_row,
};
use crate::declare::{ActionSpec, Declare, ResourceSpec};
use crate::form::{Form, Property};
use crate::infra::lease::{self, ACQUIRED_AT, EPOCH, EXPIRES_AT, FREE, HELD, STATE};
use crate::paging;
use crate::prepare::{int_field, missing_field};
use crate::resource::{key_text, state_name};

const POOL: &str = "pool";
pub(super) const WORKER: &str = "worker";
pub(super) const RESERVED_FROM: &str = "reserved_from";
pub(super) const RESERVED_UNTIL: &str = "reserved_until";
pub(super) const LAYOUT: &str = "layout";
const IDS: &str = "ids";
const STATES: [&str; 2] = [HELD, FREE];

/// Ids in one call.
const COUNT_MAX: i64 = 10_000;
const AHEAD_DEFAULT: Duration = Duration::from_secs(10);
const AHEAD_MAX: Duration = Duration::from_secs(3_600);
/// The bounds of `lease`.
const LEASES: RangeInclusive<Duration> = Duration::from_millis(10)..=Duration::from_secs(366 * 86_400);
/// A lease lasts so many spans, if the blueprint does not say how long.
const LEASE_SPANS: u32 = 3;
/// 2020-01-01T00:00:00Z, from which 41 bits of milliseconds last until 2089.
const EPOCH_MS_DEFAULT: i64 = 1_577_836_800_000;
/// Bits of the time: 17 years at least.
const TIME_BITS_MIN: u32 = 39;
/// Worker rows that are looked at in one page.
const LOOK_ROWS: usize = 1_000;

/// One declared sequence.
#[derive(Debug)]
struct TimeSequenceSpec {
    name: String,
    layout: TimeIdLayout,
    /// Worker ids below this are leased to no process: their ids are allocated through the store.
    shared: i64,
    ahead: Duration,
    lease: Duration,
    table: Arc<Table>,
}

pub(super) fn declare(cx: &mut Declare<'_>, table: &str) -> Option<()> {
    let name = cx.name();
    let settings = cx.settings();
    let worker_bits = settings.count("worker_bits", 10, 1..=16);
    let sequence_bits = settings.count("sequence_bits", 12, 1..=20);
    let shared = i64::from(settings.count("shared", 1, 0..=64));
    let epoch = settings.maybe_text("epoch");
    let ahead = settings.duration("ahead", AHEAD_DEFAULT, Duration::from_millis(10)..=AHEAD_MAX);
    let lease = settings.duration("lease", ahead.saturating_mul(LEASE_SPANS), LEASES);
    let epoch_ms = match epoch.map(|text| text.parse::<Time>()) {
        None => EPOCH_MS_DEFAULT,
        Some(Ok(time)) => time.micros().div_euclid(1_000),
        Some(Err(error)) => {
            settings.problem("epoch", error.to_string());
            EPOCH_MS_DEFAULT
        }
    };
    let layout = TimeIdLayout { epoch_ms, worker_bits, sequence_bits };
    let title = format!("`worker_bits` and `sequence_bits` can be {} together", 63 - TIME_BITS_MIN);
    settings.refuse_if(layout.time_bits() < TIME_BITS_MIN, "sequence_bits", title);
    let title = format!("all {} worker ids are `shared`, so none can be leased", layout.workers());
    settings.refuse_if(shared >= layout.workers(), "shared", title);
    settings.refuse_if(lease < ahead, "lease", "`lease` must be at least as long as `ahead`");
    let workers = lease::columns(Table::named(table).partition(POOL, Type::Int).sort(WORKER, Type::Int))
        .required(RESERVED_FROM, Type::Time)
        .required(RESERVED_UNTIL, Type::Time)
        // An id of another layout can be the same as one that was minted before.
        .fixed("worker_bits", worker_bits)
        .fixed("sequence_bits", sequence_bits)
        .fixed("epoch_ms", epoch_ms);
    let table = cx.build_internal(workers)?;
    let ids = Arc::new(TimeSequenceSpec { name: name.to_owned(), layout, shared, ahead, lease, table });
    let key = vec![(WORKER.to_owned(), Type::Int)];
    let resource = ResourceSpec::without_rows(name, key, super::telling(name)).table(&ids.table).events(&[
        ("leased", &["lease"]),
        ("reserved", &["reserve"]),
        ("released", &["release"]),
        ("drawn", &["next"]),
    ]);
    cx.resource(resource.actions(actions(&ids)));
    Some(())
}

/// How a span is reserved.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum ReserveFrom {
    /// From now on, if that lies behind the mark.
    Now,
    /// From the mark on: the clock was set back, or ids are drawn faster than time passes.
    Mark,
}

/// The mark lies behind the clock.
fn is_behind() -> Guard {
    column(RESERVED_UNTIL).le(now())
}

/// Reserves a span of time in a worker's row (I4).
fn reserve(step: Step, from: ReserveFrom, span: Duration) -> Step {
    let micros = i64::try_from(span.as_micros()).unwrap_or(i64::MAX);
    match from {
        ReserveFrom::Now => {
            step.guard(is_behind()).set(RESERVED_FROM, now()).set(RESERVED_UNTIL, now_plus(span))
        }
        ReserveFrom::Mark => step
            .set(RESERVED_FROM, column(RESERVED_UNTIL))
            .set(RESERVED_UNTIL, column(RESERVED_UNTIL).add(micros)),
    }
}

/// What is known of a worker id, for choosing one.
#[derive(Clone, Debug, PartialEq)]
struct WorkerIdState {
    worker: i64,
    holder: Option<String>,
    epoch: i64,
    /// When its lease ends; `None` if it is free.
    expires_at: Option<Time>,
    mark: Time,
}

impl WorkerIdState {
    fn of(row: &Row) -> Result<WorkerIdState, StoreError> {
        Ok(WorkerIdState {
            worker: row.get_int(WORKER)?,
            holder: row.get_optional_text(HOLDER)?.map(str::to_owned),
            epoch: row.get_int(EPOCH)?,
            expires_at: row.get_optional_time(EXPIRES_AT)?,
            mark: row.get_time(RESERVED_UNTIL)?,
        })
    }

    fn is_live(&self, now: Time) -> bool {
        self.expires_at.is_some_and(|end| end > now)
    }
}

/// Which worker id to lease.
#[derive(Clone, Debug, PartialEq)]
enum WorkerIdChoice {
    /// The holder has one already, by a call whose answer was lost.
    Own { worker: i64, epoch: i64 },
    /// This one is free. Whether a row of it is there.
    Free { worker: i64, known: bool },
    /// None is free before this time.
    None { until: Option<Time> },
}

/// Chooses a worker id: the holder's own, or the first one from `start` on that is free, those first whose mark is not
/// ahead of the clock.
fn choose(
    seen: &[WorkerIdState],
    shared: i64,
    workers: i64,
    holder: &str,
    start: u32,
    now: Time,
) -> WorkerIdChoice {
    let own = |one: &&WorkerIdState| one.is_live(now) && one.holder.as_deref() == Some(holder);
    if let Some(own) = seen.iter().find(own) {
        return WorkerIdChoice::Own { worker: own.worker, epoch: own.epoch };
    }
    let size = (workers - shared).max(1);
    let mut ahead = None;
    for step in 0..size {
        let worker = shared + (i64::from(start) + step) % size;
        match seen.iter().find(|one| one.worker == worker) {
            None => return WorkerIdChoice::Free { worker, known: false },
            Some(one) if one.is_live(now) => {}
            Some(one) if one.mark <= now => return WorkerIdChoice::Free { worker, known: true },
            Some(_) => ahead = ahead.or(Some(WorkerIdChoice::Free { worker, known: true })),
        }
    }
    ahead
        .unwrap_or_else(|| WorkerIdChoice::None { until: seen.iter().filter_map(|one| one.expires_at).min() })
}

/// What a write does.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum TimeVerb {
    Lease,
    Reserve,
    Release,
    Next,
}

struct TimeWrite {
    ids: Arc<TimeSequenceSpec>,
    verb: TimeVerb,
}

impl TimeSequenceSpec {
    fn key(worker: i64) -> [Value; 2] {
        [0.into(), worker.into()]
    }

    fn what(&self, worker: i64) -> String {
        format!("worker {worker} of {}", self.name)
    }

    /// Every worker id that was ever used.
    async fn pool(&self, call: &Call, cx: &ActionContext<'_>) -> Result<Vec<WorkerIdState>, Refusal> {
        let mut query = Query::table(&self.table, &call.tenant, [0.into()])?.limit(LOOK_ROWS)?;
        let mut seen = Vec::new();
        loop {
            let page = cx.store.query(&query).await?;
            for row in &page.rows {
                seen.push(WorkerIdState::of(row)?);
            }
            match page.next {
                Some(next) => query = query.after(next)?,
                None => return Ok(seen),
            }
        }
    }

    async fn lease(&self, call: &Call, cx: &ActionContext<'_>) -> Result<Step, Refusal> {
        let holder = named_holder(call)?;
        let now = cx.clock.now();
        let seen = self.pool(call, cx).await?;
        // A caller that lost a worker id to another tries the next one.
        let start = partition_of(&call.tenant, &self.name, holder, u32::MAX / 2);
        let start = start.saturating_add(cx.attempt.saturating_mul(7));
        let retry = if cx.attempt == 0 { ReserveFrom::Now } else { ReserveFrom::Mark };
        match choose(&seen, self.shared, self.layout.workers(), holder, start, now) {
            WorkerIdChoice::Own { worker, epoch } => {
                let step =
                    lease::renew(&self.table, TimeSequenceSpec::key(worker), holder, epoch, self.lease);
                Ok(reserve(step, retry, self.ahead))
            }
            WorkerIdChoice::Free { worker, known } => {
                let step = lease::acquire(&self.table, TimeSequenceSpec::key(worker), holder, self.lease);
                Ok(reserve(step, if known { retry } else { ReserveFrom::Now }, self.ahead))
            }
            WorkerIdChoice::None { until } => {
                let until = until.map_or(String::new(), |time| format!("; the next is free at {time}"));
                let message = format!(
                    "all {} worker ids of {} are held{until}: wait, or declare more `worker_bits`",
                    self.layout.workers() - self.shared,
                    self.name
                );
                Err(Refusal::new(Code::Held, message))
            }
        }
    }

    /// Ids from a worker id that is leased to no process: a span that is just long enough, given out in the same call.
    fn next(&self, call: &Call, cx: &ActionContext<'_>, worker: i64) -> Result<Step, Refusal> {
        if worker < 0 || worker >= self.shared {
            let message = format!(
                "{} can be leased and is not for drawing; the {} below it are: worker 0 to {}",
                self.what(worker),
                self.shared,
                self.shared - 1
            );
            return Err(Refusal::new(Code::WrongState, message));
        }
        let now_ms = cx.clock.now().micros().div_euclid(1_000);
        if self.layout.id(now_ms, worker, 0).is_none() {
            let message = format!("the time has left the range of {}'s ids", self.name);
            return Err(Refusal::new(Code::OutOfRange, message));
        }
        // The span need not begin with a whole millisecond.
        let millis = (count_of(call) - 1) / self.layout.per_millisecond() + 2;
        let span = Duration::from_millis(u64::try_from(millis).unwrap_or(1));
        let step = Step::upsert(&self.table, TimeSequenceSpec::key(worker))
            .set(STATE, FREE)
            .set(EPOCH, 0)
            .set(ACQUIRED_AT, now());
        Ok(reserve(step, if cx.attempt == 0 { ReserveFrom::Now } else { ReserveFrom::Mark }, span))
    }

    /// A row as callers see it.
    fn shown(&self, mut row: Json) -> Json {
        if let Some(fields) = row.as_object_mut() {
            fields.remove(POOL);
            let TimeIdLayout { epoch_ms, worker_bits, sequence_bits } = self.layout;
            let layout =
                json!({"epoch_ms": epoch_ms, "worker_bits": worker_bits, "sequence_bits": sequence_bits});
            fields.insert(LAYOUT.into(), layout);
        }
        row
    }

    /// The ids of a span that was reserved for a call.
    fn drawn(&self, event: &Event, row: &Json, count: i64) -> Result<Vec<i64>, StoreError> {
        let time = |name: &str| {
            let text = row.get(name).and_then(Json::as_str);
            let time = text.and_then(|text| text.parse::<Time>().ok());
            time.ok_or_else(|| missing_field(&event.name, name))
        };
        let worker = int_field(event, row, WORKER)?;
        let (from_ms, until_ms) = whole_millis(time(RESERVED_FROM)?, time(RESERVED_UNTIL)?);
        let per = self.layout.per_millisecond();
        let id = |number: i64| {
            let millis = from_ms + number / per;
            (millis < until_ms).then(|| self.layout.id(millis, worker, number % per)).flatten()
        };
        Ok((0..count).filter_map(id).collect())
    }
}

fn count_of(call: &Call) -> i64 {
    call.input.int(COUNT).unwrap_or(1)
}

/// The worker id that a call names.
fn worker_of(call: &Call) -> Result<i64, Bug> {
    call.key.first().and_then(Value::as_int).ok_or_else(|| bug!("a call on a worker id has another key"))
}

fn named_holder(call: &Call) -> Result<&str, Refusal> {
    let holder = call.input.get_text(HOLDER)?;
    if holder.is_empty() {
        return Err(Refusal::field(HOLDER, "the holder must not be empty"));
    }
    Ok(holder)
}

#[async_trait]
impl Prepare for TimeWrite {
    async fn prepare(&self, call: &Call, cx: &ActionContext<'_>) -> Result<Prepared, Refusal> {
        let ids = &self.ids;
        let (step, what) = match self.verb {
            TimeVerb::Lease => (ids.lease(call, cx).await?, "leased"),
            TimeVerb::Reserve => {
                let (key, holder) = (TimeSequenceSpec::key(worker_of(call)?), named_holder(call)?);
                let step = lease::renew(&ids.table, key, holder, call.input.get_int(EPOCH)?, ids.lease);
                let from = if cx.attempt == 0 { ReserveFrom::Now } else { ReserveFrom::Mark };
                (reserve(step, from, ids.ahead), "reserved")
            }
            TimeVerb::Release => {
                let (key, holder) = (TimeSequenceSpec::key(worker_of(call)?), named_holder(call)?);
                (lease::release(&ids.table, key, holder, call.input.get_int(EPOCH)?), "released")
            }
            TimeVerb::Next => (ids.next(call, cx, worker_of(call)?)?, "drawn"),
        };
        let subject = step.key.get(1).map_or(String::new(), |worker| key_text([worker]));
        let event = EventTemplate::named(format!("{}.{what}", ids.name)).with_row_of(0);
        let event = if self.verb == TimeVerb::Next { event.with(COUNT, count_of(call)) } else { event };
        Ok(PlanParts::new(subject, vec![step], event).into())
    }

    fn refused(&self, call: &Call, refused: &RefusedStep<'_>) -> Verdict {
        // The step's key has the worker id, also if the call left the choice to the house.
        let worker = refused.step.key.get(1).and_then(Value::as_int);
        let what = worker.map_or_else(|| self.ids.name.clone(), |worker| self.ids.what(worker));
        let (Reason::Guard { .. }, Some(row)) = (refused.reason, refused.row) else {
            return refused.standard(&what);
        };
        // Another was faster at this worker id, or the mark is ahead of the clock: the next draft begins at the mark.
        if matches!(self.verb, TimeVerb::Lease | TimeVerb::Next) {
            return Verdict::Retry;
        }
        let seen = match WorkerIdState::of(row) {
            Ok(seen) => seen,
            Err(error) => return Verdict::Refuse(error.into()),
        };
        let holder = call.input.text(HOLDER);
        let epoch = call.input.int(EPOCH);
        let is_own = seen.holder.as_deref() == holder && Some(seen.epoch) == epoch;
        let message = match &seen.holder {
            Some(other) => format!("{what} is held by {other} under epoch {}: lease one anew", seen.epoch),
            None => format!("{what} was released and is at epoch {}: lease one anew", seen.epoch),
        };
        if !is_own {
            return Verdict::Refuse(Refusal::new(Code::NotHolder, message).at_version(Some(row)));
        }
        match refused.guard() {
            Some(guard) if *guard == is_behind() => Verdict::Retry,
            _ => {
                let message = format!("{what} has expired: lease one anew");
                Verdict::Refuse(Refusal::new(Code::Expired, message).at_version(Some(row)))
            }
        }
    }
}

impl TimeWrite {
    /// The answer of a write, from its event.
    fn answer(
        ids: &TimeSequenceSpec,
        verb: TimeVerb,
        key: &str,
        event: &mut Event,
    ) -> Result<Answer, StoreError> {
        let row = take_row(event);
        if verb == TimeVerb::Next {
            let count = int_field(event, &event.data, COUNT)?;
            return Ok(Answer::row(json!({IDS: ids.drawn(event, &row, count)?})));
        }
        let created = (verb == TimeVerb::Lease).then(|| key.to_owned());
        Ok(Answer { created, ..Answer::row(ids.shown(row)) })
    }
}

struct WorkerIdRead {
    ids: Arc<TimeSequenceSpec>,
    list: bool,
}

#[async_trait]
impl Read for WorkerIdRead {
    async fn read(&self, call: &Call, cx: &ActionContext<'_>) -> Result<Arc<Answer>, Refusal> {
        let ids = &self.ids;
        if self.list {
            let query = Query::table(&ids.table, &call.tenant, [0.into()])?;
            let page = cx.store.query(&paging::page_of(query, call)?).await?;
            let rows = page.rows.iter().map(|row| ids.shown(row.to_json()));
            return Ok(Arc::new(paging::answer(rows, page.next)));
        }
        let worker = worker_of(call)?;
        if !(0..ids.layout.workers()).contains(&worker) {
            let message = format!("{} has worker ids from 0 to {}", ids.name, ids.layout.workers() - 1);
            return Err(Refusal::new(Code::OutOfRange, message));
        }
        let address = Address::new(&ids.table, &call.tenant, TimeSequenceSpec::key(worker))?;
        let row = cx.store.get(&[address], Consistency::Strong).await?.into_iter().next().flatten();
        let never = json!({
            WORKER: worker, STATE: FREE, HOLDER: null, EPOCH: 0, ACQUIRED_AT: null, EXPIRES_AT: null,
            RESERVED_FROM: null, RESERVED_UNTIL: null, VERSION: 0,
        });
        Ok(Arc::new(Answer::row(ids.shown(row.map_or(never, |row| row.to_json())))))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn seen(worker: i64, holder: Option<&str>, expires: Option<i64>, mark: i64) -> WorkerIdState {
        WorkerIdState {
            worker,
            holder: holder.map(str::to_owned),
            epoch: 1,
            expires_at: expires.map(Time::from_millis),
            mark: Time::from_millis(mark),
        }
    }

    #[test]
    fn a_span_is_reserved_by_the_holder_of_the_lease_alone() {
        let table = lease::columns(Table::named("ids").partition(POOL, Type::Int).sort(WORKER, Type::Int))
            .required(RESERVED_FROM, Type::Time)
            .required(RESERVED_UNTIL, Type::Time)
            .build()
            .unwrap();
        let span = Duration::from_secs(1);
        let renewed = || lease::renew(&table, TimeSequenceSpec::key(1), "me", 7, span);
        let guard = |from| reserve(renewed(), from, span).guard.to_string();
        let held = "epoch = 7 and holder = 'me' and expires_at > now";
        assert_eq!(guard(ReserveFrom::Mark), held);
        assert_eq!(guard(ReserveFrom::Now), format!("{held} and reserved_until <= now"));
    }

    #[test]
    fn a_worker_is_chosen_that_is_free_and_not_ahead() {
        let now = Time::from_millis(100);
        let check = |seen: &[WorkerIdState], start: u32, expect: WorkerIdChoice| {
            assert_eq!(choose(seen, 1, 4, "me", start, now), expect, "{seen:?} from {start}");
        };
        let free = |worker, known| WorkerIdChoice::Free { worker, known };
        check(&[], 0, free(1, false));
        check(&[], 4, free(2, false));
        // Shared ones are passed over, those in use too; one that expired at this moment is free.
        let held = |worker| seen(worker, Some("other"), Some(101), 0);
        check(&[seen(0, None, None, 0), held(1)], 0, free(2, false));
        check(&[held(1), seen(2, Some("other"), Some(100), 0), held(3)], 0, free(2, true));
        // One whose mark is ahead is the last resort.
        check(&[seen(1, None, None, 5_000), held(2), seen(3, None, None, 90)], 0, free(3, true));
        check(&[seen(1, None, None, 5_000), held(2), held(3)], 0, free(1, true));
        check(&[held(1), held(2), held(3)], 0, WorkerIdChoice::None { until: Some(Time::from_millis(101)) });
        // What the holder has it keeps, unless its time is up.
        let own = WorkerIdChoice::Own { worker: 2, epoch: 1 };
        check(&[held(1), seen(2, Some("me"), Some(200), 5_000)], 0, own);
        check(&[held(1), seen(2, Some("me"), Some(100), 0), held(3)], 0, free(2, true));
    }
}
