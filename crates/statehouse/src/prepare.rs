//! How an action is performed: what prepares a plan, what a refused step means, and where the answer comes from.

use std::any::Any;
use std::sync::Arc;

use async_trait::async_trait;
use serde_json::{Map, Value as Json};
use statehouse_store::{
    Address, Clock, Consistency, Event, EventTemplate, Guard, Ids, Label, Reason, Row, Step, Store,
    StoreError, Table, Tenant, Value,
};
use tokio::sync::watch;

use crate::action::{Answer, Call, Refusal};
use crate::cache::Cache;
use crate::code::Code;
use crate::declare::combine::Combiner;
use crate::lock;
use crate::product::booking::external_holds::ExternalHolds;
use crate::resource::Resource;
use crate::worker::Wakeup;

/// What performs an action.
#[derive(Clone)]
pub enum ActionHandler {
    /// One plan.
    Write(WriteHandler),
    /// A read.
    Read(Arc<dyn Read>),
    /// Several plans, each decided by itself.
    MultiPlan(Arc<dyn MultiPlan>),
    /// A call of another action for each item of a list, each decided by itself.
    ForEach(ForEach),
}

/// A write of one plan: how it is prepared, and where its answer comes from.
#[derive(Clone)]
pub struct WriteHandler {
    /// Prepares the plan.
    pub prepare: Arc<dyn Prepare>,
    /// Makes the answer. It belongs to the action and not to what was prepared, because a repetition is answered from its
    /// log record before anything is prepared.
    pub answer: AnswerFrom,
    /// Writes concurrent calls as one plan, if the action declares how ([`crate::declare::combine`]).
    pub(crate) combiner: Option<Arc<dyn Combiner>>,
}

/// Makes an answer from the call, the key of the event's subject as text, and the event. It may take values out of the event. An
/// event that lacks a value is reported as corrupt.
pub type Answerer = Arc<dyn Fn(&Call, &str, &mut Event) -> Result<Answer, StoreError> + Send + Sync>;

/// The source of a write's answer. All of it is in the log record, so that a repetition gets the same answer.
#[derive(Clone)]
pub enum AnswerFrom {
    /// The row in the event, without these hidden columns.
    Row(Vec<String>),
    /// The same, for an action that creates the row: the answer also names its key.
    Created(Vec<String>),
    /// Computed from the event.
    With(Answerer),
}

impl AnswerFrom {
    /// The answer to a call whose event is about the row with this key.
    pub(crate) fn answer(&self, call: &Call, key: &str, event: &mut Event) -> Result<Answer, StoreError> {
        Ok(match self {
            AnswerFrom::Row(hidden) => Answer::row(without_hidden(take_row(event), hidden)),
            AnswerFrom::Created(hidden) => {
                let row = without_hidden(take_row(event), hidden);
                Answer { created: Some(key.to_owned()), ..Answer::row(row) }
            }
            AnswerFrom::With(answerer) => answerer(call, key, event)?,
        })
    }
}

/// Takes a field out of the data of an event, which has it.
pub(crate) fn take_field(event: &mut Event, name: &str) -> Result<Json, StoreError> {
    let field = event.data.get_mut(name).map(Json::take);
    field.ok_or_else(|| missing_field(&event.name, name))
}

/// An integer in the data of an event, which has it.
pub(crate) fn int_field(event: &Event, data: &Json, name: &str) -> Result<i64, StoreError> {
    data.get(name).and_then(Json::as_i64).ok_or_else(|| missing_field(&event.name, name))
}

/// The report of an event without a value that every event of its name has.
pub(crate) fn missing_field(event: &str, name: &str) -> StoreError {
    StoreError::corrupt(format!("the event {event}"), format!("has no {name}, or one of another type"))
}

fn without_hidden(mut row: Json, hidden: &[String]) -> Json {
    if let Some(columns) = row.as_object_mut() {
        columns.retain(|name, _| !hidden.contains(name));
    }
    row
}

/// A list of calls of one action, all at once. A refused call does not affect the others.
#[derive(Clone, Debug)]
pub struct ForEach {
    /// The action, by its full name. It names a row of one key column.
    pub action: String,
    /// The input with the list.
    pub list: &'static str,
    /// The field of an item that has the key; the others are the input.
    pub key: &'static str,
    /// Items at most.
    pub max: usize,
    /// Whether they are tried as one plan first. Worth it where most calls succeed and need not read before they write.
    pub try_one_plan: bool,
}

/// What the house provides to an action that prepares a plan or reads.
pub struct ActionContext<'a> {
    /// The store, for strong reads.
    pub store: &'a dyn Store,
    /// Answers to earlier reads, for callers that ask for them.
    pub cache: &'a Cache,
    /// The clock of this process. Guards read the engine's clock; this one is for hints and for what is only shown.
    pub clock: &'a dyn Clock,
    /// Holds outside the store, if the house has them.
    pub holds: Option<&'a dyn ExternalHolds>,
    /// Generates ids.
    pub ids: &'a Ids,
    /// All resources of the house.
    pub resources: &'a [Resource],
    /// The id under which the plan will be committed; empty for a read.
    pub operation: &'a str,
    /// Number of earlier attempts that lost a race. The first attempt may skip reads and rely on the guard; retries must
    /// read.
    pub attempt: u32,
    /// The refused step of the previous attempt, if it was a step of this call.
    pub refused: Option<&'a LastRefusal>,
}

impl ActionContext<'_> {
    /// One row by a strong read.
    pub async fn row(
        &self,
        table: &Arc<Table>,
        tenant: &Tenant,
        key: impl IntoIterator<Item = Value>,
    ) -> Result<Option<Row>, Refusal> {
        let address = Address::new(table, tenant, key)?;
        Ok(self.store.get(&[address], Consistency::Strong).await?.into_iter().next().flatten())
    }
}

/// The refused step of the previous attempt of a call.
#[derive(Clone, Debug)]
pub struct LastRefusal {
    /// The label of the step.
    pub label: Option<Label>,
    /// The condition that failed.
    pub reason: Reason,
    /// The row as it was when the condition failed.
    pub row: Option<Row>,
}

/// An action that writes one plan.
#[async_trait]
pub trait Prepare: Send + Sync {
    /// Reads what it needs and returns the parts of a plan, or the answer if nothing has to change. It never commits.
    async fn prepare(&self, call: &Call, cx: &ActionContext<'_>) -> Result<Prepared, Refusal>;

    /// What it means that the store refused a step.
    fn refused(&self, call: &Call, refused: &RefusedStep<'_>) -> Verdict;

    /// Whether it acts outside the plan while it prepares, so that a repetition must be recognized before it prepares.
    fn acts_before_commit(&self) -> bool {
        false
    }

    /// The lock that has to be held while the call is prepared and committed, for changes that must not lose a race.
    fn lock(&self, _: &Call) -> Result<Option<lock::LockRequest>, Refusal> {
        Ok(None)
    }
}

/// The row that an event carries, taken out of it.
pub(crate) fn take_row(event: &mut Event) -> Json {
    event.data.get_mut("row").map(Json::take).unwrap_or_default()
}

/// An action that commits several plans, each decided by itself. It cannot be part of a batch. It is cancelled when its
/// caller disconnects: plans that were committed stay, the others are not begun.
#[async_trait]
pub trait MultiPlan: Send + Sync {
    /// Runs it, and answers. The house remembers the answer under the caller's operation id, if there is one.
    async fn run(&self, call: &Call, cx: &ActionContext<'_>) -> Result<Answer, Refusal>;

    /// Itself, for a part of the library that knows its type.
    fn as_any(&self) -> Option<&dyn Any> {
        None
    }
}

/// An action that reads.
#[async_trait]
pub trait Read: Send + Sync {
    /// Reads and answers. An answer from the cache is shared.
    async fn read(&self, call: &Call, cx: &ActionContext<'_>) -> Result<Arc<Answer>, Refusal>;

    /// Rows that another read of the resource found, each as this one shows it, or none if it does not show it. `None`: all of
    /// them as they are stored.
    async fn show(
        &self,
        _rows: &[Row],
        _call: &Call,
        _cx: &ActionContext<'_>,
    ) -> Result<Option<Vec<Option<Json>>>, Refusal> {
        Ok(None)
    }

    /// What a call asks for of an answer, after rules have judged the whole of it.
    fn project(&self, _call: &Call, answer: Arc<Answer>) -> Arc<Answer> {
        answer
    }

    /// Whether an answer is what the call waits for, of a call that says what that is: then `Prefer: wait` waits for it.
    fn is_awaited(&self, _input: &Map<String, Json>, _answer: &Answer) -> Option<bool> {
        None
    }

    /// What to say of an input that the action does not declare, if there is more to say than that.
    fn undeclared(&self, _name: &str, _fields: &Map<String, Json>) -> Option<String> {
        None
    }
}

/// What an action has prepared.
#[derive(Clone, Debug)]
pub enum Prepared {
    /// Nothing has to change; this is the answer.
    Unchanged(Answer),
    /// This is to be committed.
    Write(PlanParts),
}

/// The parts of a plan: everything that the action knows about its write.
#[derive(Clone, Debug)]
pub struct PlanParts {
    /// The key of the call's own row, as text.
    pub subject: String,
    /// The steps. Labels attribute a refusal.
    pub steps: Vec<Step>,
    /// The call's own event; a row it carries is numbered within `steps`.
    pub event: EventTemplate,
    /// Events of other rows that these steps change.
    pub related: Vec<RelatedEvent>,
    /// What the write makes due, so that workers of this process wake up in time. Hints by the process clock.
    pub wakeups: Vec<Wakeup>,
    /// Tasks of this process that wait for such a write.
    pub notify: Vec<watch::Sender<u64>>,
}

/// The event of another row than the call's own.
#[derive(Clone, Debug)]
pub struct RelatedEvent {
    /// The resource of the row.
    pub resource: String,
    /// The key of the row, as text.
    pub key: String,
    /// The event; a row it carries is numbered within the steps of the call.
    pub event: EventTemplate,
}

impl PlanParts {
    /// Steps that change the row with this key, and its event.
    pub fn new(subject: impl Into<String>, steps: Vec<Step>, event: EventTemplate) -> PlanParts {
        PlanParts {
            subject: subject.into(),
            steps,
            event,
            related: Vec::new(),
            wakeups: Vec::new(),
            notify: Vec::new(),
        }
    }

    /// Adds events of other rows.
    #[must_use]
    pub fn related(mut self, events: impl IntoIterator<Item = RelatedEvent>) -> PlanParts {
        self.related.extend(events);
        self
    }

    /// Adds what becomes due.
    #[must_use]
    pub fn wakeups(mut self, wakeups: impl IntoIterator<Item = Wakeup>) -> PlanParts {
        self.wakeups.extend(wakeups);
        self
    }

    /// Notifies waiting tasks of this process after the commit.
    #[must_use]
    pub fn notify(mut self, notify: &watch::Sender<u64>) -> PlanParts {
        self.notify.push(notify.clone());
        self
    }
}

impl From<PlanParts> for Prepared {
    fn from(parts: PlanParts) -> Prepared {
        Prepared::Write(parts)
    }
}

/// A step of a call that the store refused.
#[derive(Clone, Copy, Debug)]
pub struct RefusedStep<'a> {
    /// Its index within the steps of the call.
    pub index: usize,
    /// The step as it was committed.
    pub step: &'a Step,
    /// The condition that failed.
    pub reason: &'a Reason,
    /// The row as it was when the condition failed.
    pub row: Option<&'a Row>,
}

impl RefusedStep<'_> {
    /// The label of the step, or nothing.
    pub fn label(&self) -> &str {
        self.step.label.as_ref().map_or("", Label::as_str)
    }

    /// The conjunct that does not hold, if the refusal is a guard's.
    pub fn guard(&self) -> Option<&Guard> {
        match self.reason {
            Reason::Guard { guard, .. } => Some(guard),
            _ => None,
        }
    }

    /// What the conditions that mean the same for every action mean. A failed guard is retried.
    pub fn standard(&self, what: &str) -> Verdict {
        let refusal = match self.reason {
            Reason::Absent => Refusal::new(Code::NotFound, format!("{what} does not exist")),
            Reason::Present => {
                Refusal::new(Code::AlreadyExists, format!("{what} exists already")).at_version(self.row)
            }
            Reason::Overflow { column } => {
                Refusal::new(Code::OutOfRange, format!("{what}: the new {column} is out of range"))
            }
            Reason::Null { column } => Refusal::new(
                Code::InvalidInput,
                format!("{what}: {column} is required and would become null"),
            ),
            Reason::Guard { .. } => return Verdict::Retry,
        };
        Verdict::Refuse(refusal)
    }
}

/// What follows from a refused step.
#[derive(Clone, Debug)]
pub enum Verdict {
    /// Another operation was faster; prepare and commit again.
    Retry,
    /// Another operation holds a lock on the row; wait, then prepare and commit again.
    Wait,
    /// The caller is told.
    Refuse(Refusal),
}

impl Verdict {
    /// The caller is told, be it that the row which the refusal is about could not be read.
    pub fn refuse(refusal: Result<Refusal, impl Into<Refusal>>) -> Verdict {
        Verdict::Refuse(refusal.unwrap_or_else(Into::into))
    }
}
