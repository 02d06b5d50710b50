//! Numbers without gaps: taken in the plan of what uses them, so that what is not written has not taken one.
//!
//! The plan of another archetype takes a number with [`take`]; over HTTP `take` goes into one batch with the write of the
//! row that bears the number.

use std::sync::Arc;

use async_trait::async_trait;
use serde_json::{Map, Value as Json, json};
use statehouse_store::guard::{column, now};
use statehouse_store::plan::Expect;
use statehouse_store::table::VERSION;
use statehouse_store::{Address, Consistency, EventTemplate, Query, Reason, Row, Step, Table, Type, Value};

use super::{LAST, STARTS, UPDATED_AT, key_properties};
use crate::action::{
    ActionContext, Answer, Call, Code, PlanParts, Prepare, Prepared, Read, Refusal, RefusedStep, Verdict,
};
use crate::blueprint::settings::Field;
use crate::declare::{ActionSpec, Declare, ResourceSpec, TableSpec};
use crate::form::{Form, Property};
use crate::lock;
use crate::paging;
use crate::resource::key_text;

const SUBJECT: &str = "subject";
const NUMBER: &str = "number";
const NEXT: &str = "next";
const TAKEN_AT: &str = "taken_at";
const BY_NUMBER: &str = "by_number";

/// Takes a number: the one behind `last`, or the first if there is no row yet (I3). Refused if another caller was faster.
pub fn take_number(
    table: &Arc<Table>,
    key: impl IntoIterator<Item = Value>,
    last: Option<i64>,
    number: i64,
) -> Step {
    let step = match last {
        Some(last) => Step::update(table, key).guard(column(LAST).eq(last)),
        None => Step::insert(table, key),
    };
    step.set(LAST, number).set(UPDATED_AT, now())
}

/// One declared sequence.
#[derive(Debug)]
struct GaplessSpec {
    name: String,
    key: Vec<Field>,
    start: i64,
    table: Arc<Table>,
    taken: Arc<Table>,
    locks: Arc<Table>,
}

pub(super) fn declare(cx: &mut Declare<'_>, table: &str) -> Option<()> {
    let name = cx.name();
    let settings = cx.settings();
    let key = settings.key("key");
    let start = settings.integer("start", 1, STARTS);
    let names: Vec<&str> = key.iter().map(|field| field.name.as_str()).collect();
    let def = cx.build(TableSpec::named(table).key(&key).int(LAST).updated_at())?;
    let taken_def = cx.build(
        TableSpec::named(format!("{table}_taken"))
            .key(&key)
            .sort(SUBJECT, Type::Text)
            .int(NUMBER)
            .time(TAKEN_AT)
            .index(BY_NUMBER, &names, &[NUMBER]),
    )?;
    let locks = Table::named(format!("{table}_lock"));
    let locks = key.iter().fold(locks, |table, field| table.partition(&field.name, field.kind));
    let gapless = Arc::new(GaplessSpec {
        name: name.to_owned(),
        start,
        table: def.table().clone(),
        taken: taken_def.table().clone(),
        locks: cx.build_internal(lock::columns(locks))?,
        key,
    });
    cx.resource(
        ResourceSpec::of(name, &def)
            .table(&gapless.taken)
            .table(&gapless.locks)
            .telling(super::telling(name))
            .events(&[("taken", &["take"])])
            .actions(actions(&gapless, &taken_def.row_form())),
    );
    Some(())
}

fn actions(gapless: &Arc<GaplessSpec>, taken: &Form) -> [ActionSpec; 3] {
    let read = |list: bool| GaplessRead { gapless: gapless.clone(), list };
    let int = |name: &str, about: &str| Property::required(name, Form::Value(Type::Int), about);
    let next =
        [int(NEXT, "the number that the next `take` gets"), int(VERSION, "raised by every write").or_null()];
    let number = "the number that `read` said is next, if a row of the same batch has to hold it";
    [
        ActionSpec::transition(
            "take",
            "Take the next number of a {name} for a subject, in one batch with what bears it. A subject that has one \
             keeps it.",
        )
        .shape("overwrite")
        .mechanism("guarded increment and the subject's row, in the plan of what bears the number")
        .takes([
            Property::required(SUBJECT, Form::Value(Type::Text), "what bears the number"),
            Property::optional(NUMBER, Form::Value(Type::Int), number),
        ])
        .gives(taken.clone())
        .codes(&[Code::AlreadyExists, Code::VersionConflict, Code::Contended, Code::OutOfRange])
        .answers(&["duplicate IDs", "non-monotonic IDs"])
        .writes(GaplessWrite(gapless.clone())),
        ActionSpec::read("read", "Read which number of a {name} is next.")
            .gives(Form::Object(key_properties(&gapless.key).into_iter().chain(next).collect()))
            .codes(&[])
            .reads(read(false)),
        ActionSpec::list("list", "List the numbers of a {name} that were taken, the highest first.")
            .mechanism("range read on the index by number")
            .takes(key_properties(&gapless.key))
            .gives_rows(taken.clone())
            .reads(read(true)),
    ]
}

impl GaplessSpec {
    fn what(&self, call: &Call) -> String {
        format!("{} {}", self.name, key_text(&call.key))
    }

    /// The counter and, if one is named, the subject's number.
    async fn rows(
        &self,
        call: &Call,
        cx: &ActionContext<'_>,
        subject: Option<&str>,
    ) -> Result<(Option<Row>, Option<Row>), Refusal> {
        let mut addresses = vec![Address::new(&self.table, &call.tenant, call.key.iter().cloned())?];
        if let Some(subject) = subject {
            let key = call.key.iter().cloned().chain([subject.into()]);
            addresses.push(Address::new(&self.taken, &call.tenant, key)?);
        }
        let mut rows = cx.store.get(&addresses, Consistency::Strong).await?.into_iter();
        Ok((rows.next().flatten(), rows.next().flatten()))
    }

    /// Takes a number for a subject (I3).
    fn number_given(&self, call: &Call, subject: &str, last: Option<i64>, number: i64) -> Prepared {
        let counted = take_number(&self.table, call.key.iter().cloned(), last, number);
        let used = Step::insert(&self.taken, call.key.iter().cloned().chain([subject.into()]))
            .set(NUMBER, number)
            .set(TAKEN_AT, now());
        let event = EventTemplate::named(format!("{}.taken", self.name)).with_row_of(1);
        PlanParts::new(key_text(&call.key), vec![counted, used], event).into()
    }

    /// The number behind the last one.
    fn next(&self, call: &Call, row: Option<&Row>) -> Result<i64, Refusal> {
        let exhausted = || Refusal::new(Code::OutOfRange, format!("{} has no numbers left", self.what(call)));
        match row {
            Some(row) => row.get_int(LAST)?.checked_add(1).ok_or_else(exhausted),
            None => Ok(self.start),
        }
    }
}

struct GaplessWrite(Arc<GaplessSpec>);

/// The number that a caller insists on.
fn wanted(call: &Call) -> Option<i64> {
    call.input.int(NUMBER)
}

#[async_trait]
impl Prepare for GaplessWrite {
    /// Takers take turns: each has to know its number before it commits, and would lose to the others otherwise. A caller that
    /// names a number does not mind losing.
    fn lock(&self, call: &Call) -> Result<Option<lock::LockRequest>, Refusal> {
        if wanted(call).is_some() {
            return Ok(None);
        }
        let gapless = &self.0;
        let row = Address::new(&gapless.locks, &call.tenant, call.key.iter().cloned())?;
        let provided = Step::assert(&gapless.table, call.key.iter().cloned());
        Ok(Some(lock::LockRequest { row, provided: Step { expect: Expect::Either, ..provided } }))
    }

    async fn prepare(&self, call: &Call, cx: &ActionContext<'_>) -> Result<Prepared, Refusal> {
        let gapless = &self.0;
        let subject = call.input.get_text(SUBJECT)?;
        if subject.is_empty() {
            return Err(Refusal::field(SUBJECT, "the subject must not be empty"));
        }
        // A named number is enough. If the store refuses it, the next draft looks and finds out why.
        if let (Some(number), 0) = (wanted(call), cx.attempt) {
            let last = number.checked_sub(1).filter(|_| number != gapless.start);
            return Ok(gapless.number_given(call, subject, last, number));
        }
        let (row, taken) = gapless.rows(call, cx, Some(subject)).await?;
        if let Some(taken) = taken {
            let number = taken.get_int(NUMBER)?;
            if wanted(call).is_some_and(|wanted| wanted != number) {
                let message = format!("{subject} has number {number} of {} already", gapless.what(call));
                return Err(Refusal::new(Code::AlreadyExists, message));
            }
            return Ok(Prepared::Unchanged(Answer::row(taken.to_json())));
        }
        let number = gapless.next(call, row.as_ref())?;
        if let Some(wanted) = wanted(call).filter(|wanted| *wanted != number) {
            let message =
                format!("the next number of {} is {number}, not {wanted}: read it again", gapless.what(call));
            return Err(Refusal::new(Code::VersionConflict, message));
        }
        let last = row.as_ref().map(|row| row.get_int(LAST)).transpose()?;
        Ok(gapless.number_given(call, subject, last, number))
    }

    fn refused(&self, call: &Call, refused: &RefusedStep<'_>) -> Verdict {
        match refused.reason {
            // Another caller took the number, or the subject has one by now: the next attempt reads which.
            Reason::Guard { .. } | Reason::Present | Reason::Absent => Verdict::Retry,
            _ => refused.standard(&self.0.what(call)),
        }
    }
}

struct GaplessRead {
    gapless: Arc<GaplessSpec>,
    list: bool,
}

#[async_trait]
impl Read for GaplessRead {
    async fn read(&self, call: &Call, cx: &ActionContext<'_>) -> Result<Arc<Answer>, Refusal> {
        let gapless = &self.gapless;
        if !self.list {
            let (row, _) = gapless.rows(call, cx, None).await?;
            let mut body = Map::new();
            for (field, value) in gapless.key.iter().zip(&call.key) {
                body.insert(field.name.clone(), value.to_json());
            }
            body.insert(NEXT.into(), json!(gapless.next(call, row.as_ref())?));
            body.insert(VERSION.into(), json!(row.as_ref().map(Row::version)));
            return Ok(Arc::new(Answer::row(Json::Object(body))));
        }
        let key = paging::given(&gapless.key, call)?;
        let query = Query::index(&gapless.taken, BY_NUMBER, &call.tenant, key)?.backward();
        let page = cx.store.query(&paging::page_of(query, call)?).await?;
        Ok(Arc::new(paging::answer(page.rows.iter().map(Row::to_json), page.next)))
    }
}
