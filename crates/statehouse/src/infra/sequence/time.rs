//! Time-ordered ids: worker ids that are leased, and spans of time that are reserved for them.

use std::ops::RangeInclusive;
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use serde_json::{Value as Json, json};
use statehouse_store::guard::{column, now, now_plus};
use statehouse_store::log::partition_of;
use statehouse_store::table::VERSION;
use statehouse_store::{
    Address, Consistency, Event, EventTemplate, Guard, Query, Reason, Refused, Row, Step, Table, Time, Type,
    Value,
};

use super::mint::{Layout, whole_millis};
use super::{COUNT, HOLDER};
use crate::action::{
    Answer, Call, Code, Desk, Draft, Method, Pieces, Place, Read, Refusal, Verdict, Write, common_verdict,
    row_of,
};
use crate::declare::{ActionSpec, Declare, ResourceSpec};
use crate::form::{Form, Misfit, Property};
use crate::infra::lease::{self, ACQUIRED_AT, EPOCH, EXPIRES_AT, FREE, HELD, STATE};
use crate::paging;
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
struct Ids {
    name: String,
    layout: Layout,
    /// Worker ids below this are nobody's: their ids are drawn through the store.
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
    let layout = Layout { epoch_ms, worker_bits, sequence_bits };
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
    let ids = Arc::new(Ids { name: name.to_owned(), layout, shared, ahead, lease, table });
    let key = vec![(WORKER.to_owned(), Type::Int)];
    let resource = ResourceSpec::without_rows(name, key, super::telling(name)).table(&ids.table);
    cx.resource(resource.actions(actions(&ids)));
    Some(())
}

fn actions(ids: &Arc<Ids>) -> [ActionSpec; 6] {
    let holder =
        || Property::required(HOLDER, Form::Value(Type::Text), "who mints; a name that nobody else uses");
    let epoch = || Property::required(EPOCH, Form::Value(Type::Int), "the epoch that lease returned");
    let target = "WorkerIdState + EpochState";
    let read = |action: ActionSpec, list: bool| {
        action.target(target).after(["lease"]).reads(Reader { ids: ids.clone(), list })
    };
    let step = |name: &'static str, summary: &'static str, mechanism: &'static str, verb: Verb| {
        ActionSpec::transition(name, summary)
            .target(target)
            .mechanism(mechanism)
            .gives(row_form())
            .codes(&[Code::NotFound, Code::NotHolder, Code::Expired])
            .answers(&["duplicate IDs", "clock rollback / stale epoch"])
            .after(["lease"])
            .writes(Writer { ids: ids.clone(), verb })
    };
    let drawn = Form::List(Box::new(Form::Value(Type::Int)));
    [
        step(
            "lease",
            "Take a worker id of {name} that is free or has expired, and a first span of time.",
            "guarded exclusive claim with epoch, and reservation behind the mark",
            Verb::Lease,
        )
        .on(Method::Post, Place::Collection)
        .takes([holder()])
        .codes(&[Code::Held, Code::Contended])
        .answers(&["duplicate IDs", "worker-id exhaustion", "clock rollback / stale epoch"])
        .after([]),
        step(
            "reserve",
            "Reserve the next span of time for a worker id of {name}, and hold it for longer.",
            "conditional update guarded by epoch, and reservation behind the mark",
            Verb::Reserve,
        )
        .takes([holder(), epoch()]),
        step(
            "release",
            "Let go of a worker id of {name}. What was reserved stays used.",
            "conditional update guarded by epoch",
            Verb::Release,
        )
        .takes([holder(), epoch()])
        .codes(&[Code::NotFound, Code::NotHolder])
        .answers(&["worker-id exhaustion"]),
        step(
            "next",
            "Draw ids of {name} through the store, from a worker id that is shared.",
            "reservation behind the mark, one write a call",
            Verb::Next,
        )
        .target(state_name(&ids.name))
        .shape("overwrite")
        .takes([Property::optional(COUNT, Form::Range(1, COUNT_MAX), "how many; 1 if not given")])
        .gives(Form::Object(vec![Property::required(IDS, drawn, "in the order of their making")]))
        .codes(&[Code::WrongState, Code::OutOfRange, Code::Contended])
        .answers(&["duplicate IDs", "non-monotonic IDs", "clock rollback / stale epoch"])
        .after([]),
        read(
            ActionSpec::read("read", "Read who has a worker id of {name}, and what is reserved for it.")
                .gives(row_form())
                .codes(&[Code::OutOfRange]),
            false,
        ),
        read(
            ActionSpec::list("list", "List the worker ids of {name} that were ever used.")
                .mechanism("strong range read of the pool")
                .gives_rows(row_form()),
            true,
        ),
    ]
}

fn row_form() -> Form {
    let int = |name: &str, about: &str| Property::required(name, Form::Value(Type::Int), about);
    let time = |name: &str, about: &str| Property::required(name, Form::Value(Type::Time), about);
    Form::Object(vec![
        int(WORKER, "the worker id"),
        Property::required(STATE, Form::one_of(&STATES), "a held one whose time is up can be leased"),
        Property::required(HOLDER, Form::Value(Type::Text), "").or_null(),
        int(EPOCH, "counts leases and is never reset"),
        time(ACQUIRED_AT, "").or_null(),
        time(EXPIRES_AT, "by the store's clock").or_null(),
        time(RESERVED_FROM, "the span that was reserved last begins here").or_null(),
        time(RESERVED_UNTIL, "and ends before this: the mark").or_null(),
        Property::required(
            LAYOUT,
            Form::Object(vec![
                int("epoch_ms", "where an id's time begins, in milliseconds since 1970"),
                int("worker_bits", ""),
                int("sequence_bits", ""),
            ]),
            "how an id is put together: time, worker, number",
        ),
        int(VERSION, "raised by every write"),
    ])
}

/// How a span is reserved.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum From {
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
fn reserve(step: Step, from: From, span: Duration) -> Step {
    let micros = i64::try_from(span.as_micros()).unwrap_or(i64::MAX);
    match from {
        From::Now => step.guard(is_behind()).set(RESERVED_FROM, now()).set(RESERVED_UNTIL, now_plus(span)),
        From::Mark => step
            .set(RESERVED_FROM, column(RESERVED_UNTIL))
            .set(RESERVED_UNTIL, column(RESERVED_UNTIL).add(micros)),
    }
}

/// What is known of a worker id, for choosing one.
#[derive(Clone, Debug, PartialEq)]
struct Seen {
    worker: i64,
    holder: Option<String>,
    epoch: i64,
    /// When its lease ends; `None` if nobody has it.
    expires_at: Option<Time>,
    mark: Time,
}

impl Seen {
    fn of(row: &Row) -> Seen {
        Seen {
            worker: row.int(WORKER).unwrap_or_default(),
            holder: row.text(HOLDER).map(str::to_owned),
            epoch: row.int(EPOCH).unwrap_or_default(),
            expires_at: row.time(EXPIRES_AT),
            mark: row.time(RESERVED_UNTIL).unwrap_or(Time::MIN),
        }
    }

    fn is_live(&self, now: Time) -> bool {
        self.expires_at.is_some_and(|end| end > now)
    }
}

/// Which worker id to lease.
#[derive(Clone, Debug, PartialEq)]
enum Choice {
    /// The holder has one already, by a call whose answer was lost.
    Own { worker: i64, epoch: i64 },
    /// This one is free. Whether a row of it is there.
    Free { worker: i64, known: bool },
    /// None is free before this time.
    None { until: Option<Time> },
}

/// Chooses a worker id: the holder's own, or the first one from `start` on that is free, those first whose mark is not
/// ahead of the clock.
fn choose(seen: &[Seen], shared: i64, workers: i64, holder: &str, start: u32, now: Time) -> Choice {
    let own = |one: &&Seen| one.is_live(now) && one.holder.as_deref() == Some(holder);
    if let Some(own) = seen.iter().find(own) {
        return Choice::Own { worker: own.worker, epoch: own.epoch };
    }
    let size = (workers - shared).max(1);
    let mut ahead = None;
    for step in 0..size {
        let worker = shared + (i64::from(start) + step) % size;
        match seen.iter().find(|one| one.worker == worker) {
            None => return Choice::Free { worker, known: false },
            Some(one) if one.is_live(now) => {}
            Some(one) if one.mark <= now => return Choice::Free { worker, known: true },
            Some(_) => ahead = ahead.or(Some(Choice::Free { worker, known: true })),
        }
    }
    ahead.unwrap_or_else(|| Choice::None { until: seen.iter().filter_map(|one| one.expires_at).min() })
}

/// What a write does.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Verb {
    Lease,
    Reserve,
    Release,
    Next,
}

struct Writer {
    ids: Arc<Ids>,
    verb: Verb,
}

impl Ids {
    fn key(worker: i64) -> [Value; 2] {
        [0.into(), worker.into()]
    }

    fn what(&self, worker: i64) -> String {
        format!("worker {worker} of {}", self.name)
    }

    /// Every worker id that was ever used.
    async fn pool(&self, call: &Call, desk: &Desk<'_>) -> Result<Vec<Seen>, Refusal> {
        let mut query = Query::table(&self.table, &call.tenant, [0.into()])?.limit(LOOK_ROWS)?;
        let mut seen = Vec::new();
        loop {
            let page = desk.store.query(&query).await?;
            seen.extend(page.rows.iter().map(Seen::of));
            match page.next {
                Some(next) => query = query.after(next)?,
                None => return Ok(seen),
            }
        }
    }

    async fn lease(&self, call: &Call, desk: &Desk<'_>) -> Result<Step, Refusal> {
        let holder = named_holder(call)?;
        let now = desk.clock.now();
        let seen = self.pool(call, desk).await?;
        // Whoever lost a worker id to somebody goes on elsewhere.
        let start = partition_of(&call.tenant, &self.name, holder, u32::MAX / 2);
        let start = start.saturating_add(desk.tries.saturating_mul(7));
        let retry = if desk.tries == 0 { From::Now } else { From::Mark };
        match choose(&seen, self.shared, self.layout.workers(), holder, start, now) {
            Choice::Own { worker, epoch } => {
                let step = lease::renew(&self.table, Ids::key(worker), holder, epoch, self.lease);
                Ok(reserve(step, retry, self.ahead))
            }
            Choice::Free { worker, known } => {
                let step = lease::acquire(&self.table, Ids::key(worker), holder, self.lease);
                Ok(reserve(step, if known { retry } else { From::Now }, self.ahead))
            }
            Choice::None { until } => {
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

    /// Ids from a worker that is nobody's: a span that is just long enough, given out in the same call.
    fn next(&self, call: &Call, desk: &Desk<'_>, worker: i64) -> Result<Step, Refusal> {
        if worker < 0 || worker >= self.shared {
            let message = format!(
                "{} can be leased and is not for drawing; the {} below it are: worker 0 to {}",
                self.what(worker),
                self.shared,
                self.shared - 1
            );
            return Err(Refusal::new(Code::WrongState, message));
        }
        let now_ms = desk.clock.now().micros().div_euclid(1_000);
        if self.layout.id(now_ms, worker, 0).is_none() {
            let message = format!("the time has left the range of {}'s ids", self.name);
            return Err(Refusal::new(Code::OutOfRange, message));
        }
        // The span need not begin with a whole millisecond.
        let millis = (count_of(call) - 1) / self.layout.per_millisecond() + 2;
        let span = Duration::from_millis(u64::try_from(millis).unwrap_or(1));
        let step = Step::upsert(&self.table, Ids::key(worker))
            .set(STATE, FREE)
            .set(EPOCH, 0)
            .set(ACQUIRED_AT, now());
        Ok(reserve(step, if desk.tries == 0 { From::Now } else { From::Mark }, span))
    }

    /// A row as callers see it.
    fn shown(&self, mut row: Json) -> Json {
        if let Some(fields) = row.as_object_mut() {
            fields.remove(POOL);
            let Layout { epoch_ms, worker_bits, sequence_bits } = self.layout;
            let layout =
                json!({"epoch_ms": epoch_ms, "worker_bits": worker_bits, "sequence_bits": sequence_bits});
            fields.insert(LAYOUT.into(), layout);
        }
        row
    }

    /// The ids of a span that was reserved for a call.
    fn drawn(&self, row: &Json, count: i64) -> Vec<i64> {
        let time =
            |name: &str| row.get(name).and_then(Json::as_str).and_then(|text| text.parse::<Time>().ok());
        let (Some(from), Some(until)) = (time(RESERVED_FROM), time(RESERVED_UNTIL)) else {
            return Vec::new();
        };
        let worker = row.get(WORKER).and_then(Json::as_i64).unwrap_or_default();
        let (from_ms, until_ms) = whole_millis(from, until);
        let per = self.layout.per_millisecond();
        let id = |number: i64| {
            let millis = from_ms + number / per;
            (millis < until_ms).then(|| self.layout.id(millis, worker, number % per)).flatten()
        };
        (0..count).filter_map(id).collect()
    }
}

fn count_of(call: &Call) -> i64 {
    call.input.get(COUNT).and_then(Json::as_i64).unwrap_or(1)
}

fn worker_of(call: &Call) -> i64 {
    call.key.first().and_then(Value::as_int).unwrap_or(-1)
}

fn named_holder(call: &Call) -> Result<&str, Refusal> {
    let holder = call.input.get(HOLDER).and_then(Json::as_str).unwrap_or_default();
    if holder.is_empty() {
        let detail = "a holder has a name".to_owned();
        return Err(Refusal::misfits(vec![Misfit { pointer: format!("/{HOLDER}"), detail }]));
    }
    Ok(holder)
}

#[async_trait]
impl Write for Writer {
    async fn draft(&self, call: &Call, desk: &Desk<'_>) -> Result<Draft, Refusal> {
        let ids = &self.ids;
        let worker = worker_of(call);
        let epoch = call.input.get(EPOCH).and_then(Json::as_i64).unwrap_or_default();
        let (step, what) = match self.verb {
            Verb::Lease => (ids.lease(call, desk).await?, "leased"),
            Verb::Reserve => {
                let step = lease::renew(&ids.table, Ids::key(worker), named_holder(call)?, epoch, ids.lease);
                let from = if desk.tries == 0 { From::Now } else { From::Mark };
                (reserve(step, from, ids.ahead), "reserved")
            }
            Verb::Release => {
                (lease::release(&ids.table, Ids::key(worker), named_holder(call)?, epoch), "released")
            }
            Verb::Next => (ids.next(call, desk, worker)?, "drawn"),
        };
        let subject = step.key.get(1).map_or(String::new(), |worker| key_text([worker]));
        let event = EventTemplate::named(format!("{}.{what}", ids.name)).with_row_of(0);
        let event = if self.verb == Verb::Next { event.with(COUNT, count_of(call)) } else { event };
        Ok(Draft::Write(Pieces { subject, steps: vec![step], event }))
    }

    fn refusal(&self, call: &Call, refused: &Refused) -> Verdict {
        let what = self.ids.what(worker_of(call));
        let (Reason::Guard { .. }, Some(row)) = (&refused.reason, &refused.current) else {
            return common_verdict(&what, refused);
        };
        // Another was faster at this worker id, or the mark is ahead of the clock: the next draft begins at the mark.
        if matches!(self.verb, Verb::Lease | Verb::Next) {
            return Verdict::TryAgain;
        }
        let seen = Seen::of(row);
        let holder = call.input.get(HOLDER).and_then(Json::as_str);
        let epoch = call.input.get(EPOCH).and_then(Json::as_i64);
        let is_own = seen.holder.as_deref() == holder && Some(seen.epoch) == epoch;
        let message = match &seen.holder {
            Some(other) => format!("{what} is held by {other} under epoch {}: lease one anew", seen.epoch),
            None => format!("{what} was released and is at epoch {}: lease one anew", seen.epoch),
        };
        if !is_own {
            return Verdict::Refuse(Refusal::new(Code::NotHolder, message).at_version(Some(row)));
        }
        match &refused.reason {
            Reason::Guard { guard, .. } if **guard == is_behind() => Verdict::TryAgain,
            _ => {
                let message = format!("{what} has expired: lease one anew");
                Verdict::Refuse(Refusal::new(Code::Expired, message).at_version(Some(row)))
            }
        }
    }

    fn answer(&self, _: &Call, event: &mut Event) -> Answer {
        let row = row_of(event);
        if self.verb == Verb::Next {
            let count = event.data.get(COUNT).and_then(Json::as_i64).unwrap_or_default();
            return Answer::row(json!({IDS: self.ids.drawn(&row, count)}));
        }
        let created = (self.verb == Verb::Lease)
            .then(|| row.get(WORKER).and_then(Json::as_i64).map(|worker| worker.to_string()))
            .flatten();
        Answer { created, ..Answer::row(self.ids.shown(row)) }
    }
}

struct Reader {
    ids: Arc<Ids>,
    list: bool,
}

#[async_trait]
impl Read for Reader {
    async fn read(&self, call: &Call, desk: &Desk<'_>) -> Result<Arc<Answer>, Refusal> {
        let ids = &self.ids;
        if self.list {
            let query = Query::table(&ids.table, &call.tenant, [0.into()])?;
            let page = desk.store.query(&paging::page_of(query, call)?).await?;
            let rows = page.rows.iter().map(|row| ids.shown(row.to_json()));
            return Ok(Arc::new(paging::answer(rows, page.next)));
        }
        let worker = worker_of(call);
        if !(0..ids.layout.workers()).contains(&worker) {
            let message = format!("{} has worker ids from 0 to {}", ids.name, ids.layout.workers() - 1);
            return Err(Refusal::new(Code::OutOfRange, message));
        }
        let address = Address::new(&ids.table, &call.tenant, Ids::key(worker))?;
        let row = desk.store.get(&[address], Consistency::Strong).await?.into_iter().next().flatten();
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

    fn seen(worker: i64, holder: Option<&str>, expires: Option<i64>, mark: i64) -> Seen {
        Seen {
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
        let renewed = || lease::renew(&table, Ids::key(1), "me", 7, span);
        let guard = |from| reserve(renewed(), from, span).guard.to_string();
        let held = "epoch = 7 and holder = 'me' and expires_at > now";
        assert_eq!(guard(From::Mark), held);
        assert_eq!(guard(From::Now), format!("{held} and reserved_until <= now"));
    }

    #[test]
    fn a_worker_is_chosen_that_is_free_and_not_ahead() {
        let now = Time::from_millis(100);
        let check = |seen: &[Seen], start: u32, expect: Choice| {
            assert_eq!(choose(seen, 1, 4, "me", start, now), expect, "{seen:?} from {start}");
        };
        let free = |worker, known| Choice::Free { worker, known };
        check(&[], 0, free(1, false));
        check(&[], 4, free(2, false));
        // Shared ones are passed over, those in use too; one that expired at this moment is free.
        let held = |worker| seen(worker, Some("other"), Some(101), 0);
        check(&[seen(0, None, None, 0), held(1)], 0, free(2, false));
        check(&[held(1), seen(2, Some("other"), Some(100), 0), held(3)], 0, free(2, true));
        // One whose mark is ahead is the last resort.
        check(&[seen(1, None, None, 5_000), held(2), seen(3, None, None, 90)], 0, free(3, true));
        check(&[seen(1, None, None, 5_000), held(2), held(3)], 0, free(1, true));
        check(&[held(1), held(2), held(3)], 0, Choice::None { until: Some(Time::from_millis(101)) });
        // What the holder has it keeps, unless its time is up.
        let own = Choice::Own { worker: 2, epoch: 1 };
        check(&[held(1), seen(2, Some("me"), Some(200), 5_000)], 0, own);
        check(&[held(1), seen(2, Some("me"), Some(100), 0), held(3)], 0, free(2, true));
    }
}
