//! Counters, and ranges of their numbers that a holder gives out by itself.

use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use serde_json::{Map, Value as Json, json};
use statehouse_store::guard::{column, now, now_plus};
use statehouse_store::{
    Event, EventTemplate, Operand, Query, Reason, Row, Step, StoreError, Table, Type, Value,
};

use super::{COUNT, FIRST, HOLDER, LAST, STARTS, UPDATED_AT, key_properties};
use crate::action::{
    ActionContext, Answer, Call, Code, PlanParts, Prepare, Prepared, Read, Refusal, RefusedStep, Verdict,
    take_row,
};
use crate::blueprint::settings::Field;
use crate::declare::{ActionSpec, Declare, ResourceSpec, RowRead, TableDef, TableSpec};
use crate::form::{Form, Property};
use crate::paging;
use crate::prepare::{int_field, missing_field};
use crate::resource::{key_text, state_name};

const LEASED_AT: &str = "leased_at";
const EXPIRES_AT: &str = "expires_at";
/// For how long a holder wants a range.
const DURATION_MS: &str = "duration_ms";
/// Numbers in one call.
const COUNT_MAX: i64 = 1_000_000;
const LEASE_DEFAULT: Duration = Duration::from_secs(3_600);
/// A day is long enough for numbers that are lost when it ends.
const LEASE_MAX: Duration = Duration::from_secs(24 * 3_600);
const LEASE_MS_MAX: i64 = 24 * 3_600 * 1_000;

/// One declared counter.
#[derive(Debug)]
struct CounterSpec {
    name: String,
    key: Vec<Field>,
    start: i64,
    lease: Duration,
    table: Arc<Table>,
    ranges: Arc<Table>,
}

pub(super) fn declare(cx: &mut Declare<'_>, table: &str) -> Option<()> {
    let name = cx.name();
    let settings = cx.settings();
    let key = settings.key("key");
    let start = settings.integer("start", 1, STARTS);
    let lease = settings.duration("lease", LEASE_DEFAULT, Duration::from_millis(1)..=LEASE_MAX);
    let def = cx.build(
        TableSpec::named(table).key(&key).int(LAST).about("the last number that was given out").updated_at(),
    )?;
    let ranges_def = cx.build(
        TableSpec::named(format!("{table}_ranges"))
            .key(&key)
            .sort(FIRST, Type::Int)
            .int(LAST)
            .about("the last one")
            .text(HOLDER)
            .about("who gives them out")
            .time(LEASED_AT)
            .time(EXPIRES_AT)
            .about("what is left then is given up"),
    )?;
    let counter = Arc::new(CounterSpec {
        name: name.to_owned(),
        key,
        start,
        lease,
        table: def.table().clone(),
        ranges: ranges_def.table().clone(),
    });
    cx.resource(
        ResourceSpec::of(name, &def)
            .table(&counter.ranges)
            .telling(super::telling(name))
            .events(&[("given", &["next"]), ("leased", &["lease"])])
            .actions(actions(&counter, &def, &ranges_def)),
    );
    Some(())
}

fn actions(counter: &Arc<CounterSpec>, def: &Arc<TableDef>, ranges: &TableDef) -> [ActionSpec; 4] {
    let write = |verb: CounterVerb| CounterWrite { counter: counter.clone(), verb };
    let object =
        |more: Vec<Property>| Form::Object(key_properties(&counter.key).into_iter().chain(more).collect());
    let int = |name: &str, about: &str| Property::required(name, Form::Value(Type::Int), about);
    let failures = &["duplicate IDs", "non-monotonic IDs"];
    let about = format!("for how long; {} if not given", counter.lease.as_millis());
    [
        ActionSpec::transition("next", "Take the next numbers of a {name}: one, or so many in a row.")
            .shape("overwrite")
            .mechanism("atomic increment where the number stands")
            .takes([Property::optional(COUNT, Form::Range(1, COUNT_MAX), "how many; 1 if not given")])
            .gives(object(vec![
                int(FIRST, "the first that is the caller's"),
                int(LAST, "the last that is the caller's"),
            ]))
            .codes(&[Code::OutOfRange])
            .answers(failures)
            .try_answer_with({
                let counter = counter.clone();
                move |_, _, event| counter.given(event)
            })
            .writes(write(CounterVerb::Next)),
        ActionSpec::transition(
            "lease",
            "Take a range of numbers of a {name}, to be given out without asking again until the lease ends.",
        )
        .target(format!("{} + RangeLeaseState", state_name(&counter.name)))
        .shape("create target")
        .mechanism("guarded increment and the range's row, as one plan")
        .takes([
            Property::required(HOLDER, Form::Value(Type::Text), "who gives them out"),
            Property::required(COUNT, Form::Range(1, COUNT_MAX), "how many"),
            Property::optional(DURATION_MS, Form::Range(1, LEASE_MS_MAX), &about),
        ])
        .gives(ranges.row_form())
        .codes(&[Code::OutOfRange, Code::Contended])
        .answers(failures)
        .writes(write(CounterVerb::Lease)),
        ActionSpec::read("read", "Read how far a {name} has come.")
            .after(["next"])
            .reads_row(RowRead::of(&counter.name, def).missing("has given out nothing yet")),
        ActionSpec::list("ranges", "List the ranges of a {name} that were leased, the newest first.")
            .target("RangeLeaseState")
            .mechanism("strong range read by key")
            .takes(key_properties(&counter.key))
            .gives_rows(ranges.row_form())
            .after(["lease"])
            .reads(RangesRead(counter.clone())),
    ]
}

/// What a write does.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum CounterVerb {
    Next,
    Lease,
}

struct CounterWrite {
    counter: Arc<CounterSpec>,
    verb: CounterVerb,
}

impl CounterSpec {
    fn what(&self, call: &Call) -> String {
        format!("{} {}", self.name, key_text(&call.key))
    }

    async fn row(&self, call: &Call, cx: &ActionContext<'_>) -> Result<Option<Row>, Refusal> {
        cx.row(&self.table, &call.tenant, call.key.iter().cloned()).await
    }

    /// Adds to the counter where it stands (I1).
    fn next(&self, call: &Call, count: i64) -> Step {
        let before = Operand::Coalesce(LAST.to_owned(), (self.start - 1).into());
        Step::upsert(&self.table, call.key.iter().cloned())
            .set(LAST, before.add(count))
            .set(UPDATED_AT, now())
    }

    /// Takes a range whose ends are known before the commit, so that they can stand in its row (I1).
    async fn lease(&self, call: &Call, cx: &ActionContext<'_>, count: i64) -> Result<PlanParts, Refusal> {
        let holder = call.input.get_text(HOLDER)?;
        if holder.is_empty() {
            return Err(Refusal::field(HOLDER, "the holder must not be empty"));
        }
        let span = call.input.duration_ms(DURATION_MS).unwrap_or(self.lease);
        let row = self.row(call, cx).await?;
        let before = row.as_ref().map_or(Ok(self.start - 1), |row| row.get_int(LAST))?;
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
        let steps = vec![taken.set(LAST, last).set(UPDATED_AT, now()), range];
        let event = EventTemplate::named(format!("{}.leased", self.name)).with_row_of(1);
        Ok(PlanParts::new(key_text(&call.key), steps, event))
    }
}

fn count_of(call: &Call) -> i64 {
    call.input.int(COUNT).unwrap_or(1)
}

#[async_trait]
impl Prepare for CounterWrite {
    async fn prepare(&self, call: &Call, cx: &ActionContext<'_>) -> Result<Prepared, Refusal> {
        let count = count_of(call);
        let pieces = match self.verb {
            CounterVerb::Next => {
                let event = EventTemplate::named(format!("{}.given", self.counter.name));
                let steps = vec![self.counter.next(call, count)];
                PlanParts::new(key_text(&call.key), steps, event.with(COUNT, count).with_row_of(0))
            }
            CounterVerb::Lease => self.counter.lease(call, cx, count).await?,
        };
        Ok(Prepared::Write(pieces))
    }

    fn refused(&self, call: &Call, refused: &RefusedStep<'_>) -> Verdict {
        match refused.reason {
            // Another caller took numbers meanwhile, perhaps the first ones.
            Reason::Guard { .. } | Reason::Present | Reason::Absent => Verdict::Retry,
            _ => refused.standard(&self.counter.what(call)),
        }
    }
}

impl CounterSpec {
    /// The numbers that an event of `next` gave out.
    fn given(&self, event: &mut Event) -> Result<Answer, StoreError> {
        let row = take_row(event);
        let (last, count) = (int_field(event, &row, LAST)?, int_field(event, &event.data, COUNT)?);
        let mut body = Map::new();
        for field in &self.key {
            let value = row.get(&field.name).ok_or_else(|| missing_field(&event.name, &field.name))?;
            body.insert(field.name.clone(), value.clone());
        }
        body.insert(FIRST.into(), json!(last.saturating_sub(count).saturating_add(1)));
        body.insert(LAST.into(), json!(last));
        Ok(Answer::row(Json::Object(body)))
    }
}

/// Lists the ranges of a counter.
struct RangesRead(Arc<CounterSpec>);

#[async_trait]
impl Read for RangesRead {
    async fn read(&self, call: &Call, cx: &ActionContext<'_>) -> Result<Arc<Answer>, Refusal> {
        let key = paging::given(&self.0.key, call)?;
        let query = Query::table(&self.0.ranges, &call.tenant, key)?.backward();
        let page = cx.store.query(&paging::page_of(query, call)?).await?;
        Ok(Arc::new(paging::answer(page.rows.iter().map(Row::to_json), page.next)))
    }
}
