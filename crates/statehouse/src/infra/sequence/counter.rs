//! Counters, and ranges of their numbers that a holder gives out by itself.

use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use serde_json::{Map, Value as Json, json};
use statehouse_store::guard::{column, now, now_plus};
use statehouse_store::table::VERSION;
use statehouse_store::{
    Address, Consistency, Draft as EventDraft, Event, Operand, Query, Reason, Refused, Row, Step, Table,
    Type, Value,
};

use super::{COUNT, FIRST, HOLDER, LAST, UPDATED_AT, bounded, built, key_properties, keyed};
use crate::action::{
    Action, Answer, Call, Code, Desk, Does, Draft, Method, Pieces, Place, Read, Refusal, Route, Verdict,
    Write, common_verdict, row_of,
};
use crate::blueprint::Thing;
use crate::blueprint::problem::{Problem, Problems};
use crate::blueprint::settings::{Field, Settings};
use crate::form::{Form, Misfit, Property};
use crate::paging;
use crate::resource::{Resource, key_text, state_name};

const LEASED_AT: &str = "leased_at";
const EXPIRES_AT: &str = "expires_at";
/// For how long a holder wants a range.
const DURATION_MS: &str = "duration_ms";
/// Numbers in one call.
const COUNT_MAX: i64 = 1_000_000;
const LEASE_DEFAULT: Duration = Duration::from_secs(3_600);
/// A day is long enough for numbers that are lost when it ends.
const LEASE_MS_MAX: i64 = 24 * 3_600 * 1_000;

/// One declared counter.
#[derive(Debug)]
struct Counter {
    name: String,
    key: Vec<Field>,
    start: i64,
    lease: Duration,
    table: Arc<Table>,
    ranges: Arc<Table>,
}

pub(super) fn declare(
    thing: &Thing,
    mut settings: Settings,
    table: &str,
    problems: &mut Problems,
) -> Option<Resource> {
    let before = problems.len();
    let key = settings.key("key", problems);
    let start = bounded(&mut settings, "start", 1, (i64::MIN / 2, i64::MAX / 2), problems);
    let lease = settings.duration("lease", problems).unwrap_or(LEASE_DEFAULT);
    settings.finish(problems);
    if lease.is_zero() || lease.as_millis() > LEASE_MS_MAX.unsigned_abs().into() {
        let title = "`lease` must be longer than nothing, and a day at most";
        problems.add(Problem::at(settings.span_of("lease"), title));
    }
    let key = key?;
    let main = keyed(table, &key).required(LAST, Type::Int).required(UPDATED_AT, Type::Time);
    let ranges = keyed(&format!("{table}_ranges"), &key)
        .sort(FIRST, Type::Int)
        .required(LAST, Type::Int)
        .required(HOLDER, Type::Text)
        .required(LEASED_AT, Type::Time)
        .required(EXPIRES_AT, Type::Time);
    let main = built(main, thing, &settings, problems)?;
    let ranges = built(ranges, thing, &settings, problems)?;
    if problems.len() > before {
        return None;
    }
    let counter = Arc::new(Counter { name: thing.name.clone(), key, start, lease, table: main, ranges });
    Some(Resource {
        hidden: Vec::new(),
        name: thing.name.clone(),
        archetype: thing.archetype,
        key: counter.key.iter().map(|field| (field.name.clone(), field.kind)).collect(),
        tables: vec![counter.table.clone(), counter.ranges.clone()],
        actions: actions(&counter),
        workers: Vec::new(),
        consumers: Vec::new(),
        telling: super::telling(&thing.name),
    })
}

fn actions(counter: &Arc<Counter>) -> Vec<Action> {
    let name = &counter.name;
    let write = |verb: Verb| Does::Write(Arc::new(Writer { counter: counter.clone(), verb }));
    let read = |list: bool| Does::Read(Arc::new(Reader { counter: counter.clone(), list }));
    let at = |method, place| Route { method, place };
    let object =
        |more: Vec<Property>| Form::Object(key_properties(&counter.key).into_iter().chain(more).collect());
    let int = |name: &str, about: &str| Property::required(name, Form::Value(Type::Int), about);
    let time = |name: &str, about: &str| Property::required(name, Form::Value(Type::Time), about);
    let version = || int(VERSION, "raised by every write");
    let range = object(vec![
        int(FIRST, "the first number of the range"),
        int(LAST, "the last one"),
        Property::required(HOLDER, Form::Value(Type::Text), "who gives them out"),
        time(LEASED_AT, ""),
        time(EXPIRES_AT, "what is left then is given up"),
        version(),
    ]);
    vec![
        Action {
            name: "next".into(),
            summary: format!("Take the next numbers of a {name}: one, or so many in a row."),
            target: state_name(name),
            shape: "overwrite",
            mechanism: "atomic increment where the number stands".into(),
            route: at(Method::Post, Place::ItemAction),
            input: vec![Property::optional(COUNT, Form::Range(1, COUNT_MAX), "how many; 1 if not given")],
            output: object(vec![
                int(FIRST, "the first that is the caller's"),
                int(LAST, "the last that is the caller's"),
            ]),
            refusals: vec![Code::OutOfRange],
            needs_version: false,
            answers: &["duplicate IDs", "non-monotonic IDs"],
            after: vec![],
            does: write(Verb::Next),
        },
        Action {
            name: "lease".into(),
            summary: format!(
                "Take a range of numbers of a {name}, to be given out without asking again until the lease ends."
            ),
            target: format!("{} + RangeLeaseState", state_name(name)),
            shape: "create target",
            mechanism: "guarded increment and the range's row, as one plan".into(),
            route: at(Method::Post, Place::ItemAction),
            input: vec![
                Property::required(HOLDER, Form::Value(Type::Text), "who gives them out"),
                Property::required(COUNT, Form::Range(1, COUNT_MAX), "how many"),
                Property::optional(
                    DURATION_MS,
                    Form::Range(1, LEASE_MS_MAX),
                    &format!("for how long; {} if not given", counter.lease.as_millis()),
                ),
            ],
            output: range.clone(),
            refusals: vec![Code::OutOfRange, Code::Contended],
            needs_version: false,
            answers: &["duplicate IDs", "non-monotonic IDs"],
            after: vec![],
            does: write(Verb::Lease),
        },
        Action {
            name: "read".into(),
            summary: format!("Read how far a {name} has come."),
            target: state_name(name),
            shape: "read source",
            mechanism: "strong read by key".into(),
            route: at(Method::Get, Place::Item),
            input: vec![],
            output: object(vec![
                int(LAST, "the last number that was given out"),
                time(UPDATED_AT, ""),
                version(),
            ]),
            refusals: vec![Code::NotFound],
            needs_version: false,
            answers: &[],
            after: vec![format!("{name}.next")],
            does: read(false),
        },
        Action {
            name: "ranges".into(),
            summary: format!("List the ranges of a {name} that were leased, the newest first."),
            target: "RangeLeaseState".into(),
            shape: "read source",
            mechanism: "strong range read by key".into(),
            route: at(Method::Get, Place::Collection),
            input: key_properties(&counter.key).into_iter().chain(paging::properties()).collect(),
            output: Form::List(Box::new(range)),
            refusals: vec![],
            needs_version: false,
            answers: &[],
            after: vec![format!("{name}.lease")],
            does: read(true),
        },
    ]
}

/// What a write does.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Verb {
    Next,
    Lease,
}

struct Writer {
    counter: Arc<Counter>,
    verb: Verb,
}

impl Counter {
    fn what(&self, call: &Call) -> String {
        format!("{} {}", self.name, key_text(&call.key))
    }

    async fn row(&self, call: &Call, desk: &Desk<'_>) -> Result<Option<Row>, Refusal> {
        let address = Address::new(&self.table, &call.tenant, call.key.iter().cloned())?;
        Ok(desk.store.get(&[address], Consistency::Strong).await?.into_iter().next().flatten())
    }

    /// Adds to the counter where it stands (I1).
    fn next(&self, call: &Call, count: i64) -> Step {
        let before = Operand::ColumnOr(LAST.to_owned(), (self.start - 1).into());
        Step::upsert(&self.table, call.key.iter().cloned())
            .set(LAST, before.add(count))
            .set(UPDATED_AT, now())
    }

    /// Takes a range whose ends are known before the commit, so that they can stand in its row (I1).
    async fn lease(&self, call: &Call, desk: &Desk<'_>, count: i64) -> Result<Pieces, Refusal> {
        let holder = call.input.get(HOLDER).and_then(Json::as_str).unwrap_or_default();
        if holder.is_empty() {
            let detail = "a holder has a name".to_owned();
            return Err(Refusal::misfits(vec![Misfit { pointer: format!("/{HOLDER}"), detail }]));
        }
        let millis = call.input.get(DURATION_MS).and_then(Json::as_u64);
        let span = millis.map_or(self.lease, Duration::from_millis);
        let row = self.row(call, desk).await?;
        let before = row.as_ref().and_then(|row| row.int(LAST)).unwrap_or(self.start - 1);
        let out_of_range =
            || Refusal::new(Code::OutOfRange, format!("{} has no {count} numbers left", self.what(call)));
        let last = before.checked_add(count).ok_or_else(out_of_range)?;
        let key = || call.key.iter().cloned();
        let taken = match row {
            Some(_) => Step::update(&self.table, key()).guard(column(LAST).eq(before)),
            None => Step::insert(&self.table, key()),
        };
        let range = Step::insert(&self.ranges, key().chain([Value::from(before + 1)]))
            .set(LAST, last)
            .set(HOLDER, holder)
            .set(LEASED_AT, now())
            .set(EXPIRES_AT, now_plus(span));
        Ok(Pieces {
            subject: key_text(&call.key),
            steps: vec![taken.set(LAST, last).set(UPDATED_AT, now()), range],
            event: EventDraft::named(format!("{}.leased", self.name)).with_row_of(1),
        })
    }
}

fn count_of(call: &Call) -> i64 {
    call.input.get(COUNT).and_then(Json::as_i64).unwrap_or(1)
}

#[async_trait]
impl Write for Writer {
    async fn draft(&self, call: &Call, desk: &Desk<'_>) -> Result<Draft, Refusal> {
        let count = count_of(call);
        let pieces = match self.verb {
            Verb::Next => Pieces {
                subject: key_text(&call.key),
                steps: vec![self.counter.next(call, count)],
                event: EventDraft::named(format!("{}.given", self.counter.name))
                    .with(COUNT, count)
                    .with_row_of(0),
            },
            Verb::Lease => self.counter.lease(call, desk, count).await?,
        };
        Ok(Draft::Write(pieces))
    }

    fn refusal(&self, call: &Call, refused: &Refused) -> Verdict {
        match refused.reason {
            // Somebody took numbers meanwhile, perhaps the first ones.
            Reason::Guard { .. } | Reason::Present | Reason::Absent => Verdict::TryAgain,
            _ => common_verdict(&self.counter.what(call), refused),
        }
    }

    fn answer(&self, _: &Call, event: &mut Event) -> Answer {
        let row = row_of(event);
        if self.verb == Verb::Lease {
            return Answer::row(row);
        }
        let int = |from: &Json, name: &str| from.get(name).and_then(Json::as_i64).unwrap_or(0);
        let (last, count) = (int(&row, LAST), int(&event.data, COUNT));
        let mut body = Map::new();
        for field in &self.counter.key {
            body.insert(field.name.clone(), row.get(&field.name).cloned().unwrap_or_default());
        }
        body.insert(FIRST.into(), json!(last.saturating_sub(count).saturating_add(1)));
        body.insert(LAST.into(), json!(last));
        Answer::row(Json::Object(body))
    }
}

struct Reader {
    counter: Arc<Counter>,
    list: bool,
}

#[async_trait]
impl Read for Reader {
    async fn read(&self, call: &Call, desk: &Desk<'_>) -> Result<Arc<Answer>, Refusal> {
        let counter = &self.counter;
        if !self.list {
            let row = counter.row(call, desk).await?.ok_or_else(|| {
                Refusal::new(Code::NotFound, format!("{} has given out nothing yet", counter.what(call)))
            })?;
            return Ok(Arc::new(Answer::row(row.to_json())));
        }
        let key = paging::given(&counter.key, call)?;
        let query = Query::table(&counter.ranges, &call.tenant, key)?.backward();
        let page = desk.store.query(&paging::page_of(query, call)?).await?;
        Ok(Arc::new(paging::answer(page.rows.iter().map(Row::to_json), page.next)))
    }
}
