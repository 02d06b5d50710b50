//! Actions: declared once, served everywhere.
//!
//! An [`Action`] says what it is called, what it takes and gives, how it can be refused and which failures it answers,
//! and it can build the steps that do it. The HTTP routes, the OpenAPI document, the command line, `explain` and the
//! drills are made from this declaration; no surface knows an archetype.
//!
//! A write goes three ways through its [`Write`]:
//!
//! 1. `draft` reads what it needs and returns steps and an event, or an answer if nothing has to change, or a refusal.
//! 2. The house commits them as one plan, alone or with those of other actions.
//! 3. `answer` makes the answer from the event in the log record, and from nothing else, so that a retry gets the very
//!    same answer. If the plan was refused, `refusal` says what that means: try again, or tell the caller.

use std::any::Any;
use std::borrow::Cow;
use std::fmt;
use std::sync::Arc;

use async_trait::async_trait;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value as Json};
use statehouse_store::{
    Clock, Event, EventTemplate, Ids, Reason, Refused, Row, Step, Store, StoreError, Tenant, Value,
};

use crate::cache::Cache;
pub use crate::code::Code;
use crate::form::{Form, Misfit, Property};
use crate::holds::Holds;
use crate::lock;
use crate::resource::Resource;
use crate::worker::Wake;

/// Where an action is found over HTTP.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Route {
    /// The method.
    pub method: Method,
    /// The path.
    pub place: Place,
}

/// An HTTP method.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[expect(missing_docs, reason = "they are HTTP's own")]
pub enum Method {
    Get,
    Post,
    Put,
    Patch,
    Delete,
}

impl Method {
    /// As HTTP writes it.
    pub fn name(self) -> &'static str {
        match self {
            Method::Get => "GET",
            Method::Post => "POST",
            Method::Put => "PUT",
            Method::Patch => "PATCH",
            Method::Delete => "DELETE",
        }
    }
}

/// A path below `/v1`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Place {
    /// `/v1/{name}`.
    Collection,
    /// `/v1/{name}/{key}`.
    Item,
    /// `/v1/{name}/{key}/{action}`.
    ItemAction,
}

/// One thing that can be done with a resource.
#[derive(Clone)]
pub struct Action {
    /// Its name within the resource: `update`.
    pub name: Cow<'static, str>,
    /// One sentence.
    pub summary: String,
    /// The state it works on: `ProfileState`.
    pub target: String,
    /// The abstract shape of the write or read: `overwrite`.
    pub shape: &'static str,
    /// How it is kept right: `guarded conditional update`.
    pub mechanism: Cow<'static, str>,
    /// Where it is found over HTTP.
    pub route: Route,
    /// What it takes, apart from the key: the body of a write, the query of a read.
    pub input: Vec<Property>,
    /// What it gives.
    pub output: Form,
    /// How it can be refused, apart from what every action can be refused for.
    pub refusals: Vec<Code>,
    /// Whether a caller has to say which version it has seen.
    pub needs_version: bool,
    /// The failures of the atlas that it answers.
    pub answers: &'static [&'static str],
    /// Full names of actions that bring a house from nothing to a state in which this one can be done, in order;
    /// [`WAIT`] among them stands for a day that passes. For `explain`.
    pub after: Vec<String>,
    /// What it does.
    pub does: Does,
}

/// A day passes (see [`Action::after`]).
pub const WAIT: &str = "wait";

impl Action {
    /// Whether it writes.
    pub fn is_write(&self) -> bool {
        !matches!(self.does, Does::Read(_))
    }
}

impl fmt::Debug for Action {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Action({})", self.name)
    }
}

/// A write or a read.
#[derive(Clone)]
pub enum Does {
    /// Builds a plan.
    Write(Arc<dyn Write>),
    /// Reads.
    Read(Arc<dyn Read>),
    /// Makes plans of its own, each decided by itself.
    Several(Arc<dyn Several>),
    /// Calls another action for each item of a list, each decided by itself.
    Each(Each),
}

/// A list of calls of one action, all at once, of which one that is refused does not hold up the others.
#[derive(Clone, Debug)]
pub struct Each {
    /// The action, by its full name. It names a row of one key column.
    pub action: String,
    /// The input with the list.
    pub list: &'static str,
    /// The field of an item that has the key; the others are the input.
    pub key: &'static str,
    /// Items at most.
    pub most: usize,
    /// Whether they are tried as one plan first. Worth it where most calls hold, and need not read before they write.
    pub as_one: bool,
}

/// A call of an action: who, which row, with what.
#[derive(Clone, Debug)]
pub struct Call {
    /// On whose behalf.
    pub tenant: Tenant,
    /// The key of the row, for actions that name one.
    pub key: Vec<Value>,
    /// What the action takes, already checked against its form.
    pub input: Map<String, Json>,
    /// What the caller says about the version it has seen.
    pub expected: Option<Expected>,
}

/// What a caller says about a row's version.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Expected {
    /// It has seen this one.
    Version(i64),
    /// Any will do, if the row exists.
    Any,
}

impl From<i64> for Expected {
    fn from(version: i64) -> Expected {
        Expected::Version(version)
    }
}

/// What the house lends to an action while it drafts or reads.
pub struct Desk<'a> {
    /// The store, for strong reads.
    pub store: &'a dyn Store,
    /// Answers to earlier reads, for callers that ask for them.
    pub cache: &'a Cache,
    /// What time it is for this process. Guards read the engine's clock; this one is for what is only shown.
    pub clock: &'a dyn Clock,
    /// Holds before the store, if the house has them.
    pub holds: Option<&'a dyn Holds>,
    /// Where ids come from.
    pub ids: &'a Ids,
    /// All resources of the house.
    pub resources: &'a [Resource],
    /// How often this call was drafted before, in vain. A first draft may leave it to the store to find out that it
    /// does not fit; later ones had better look.
    pub tries: u32,
}

/// An action that writes.
#[async_trait]
pub trait Write: Send + Sync {
    /// The steps and the event of the write, or its answer if nothing has to be written.
    async fn draft(&self, call: &Call, desk: &Desk<'_>) -> Result<Draft, Refusal>;

    /// The lock that has to be held while the call is drafted and committed, for changes that must not lose a race.
    fn lock(&self, _: &Call) -> Result<Option<lock::Wanted>, Refusal> {
        Ok(None)
    }

    /// What else these steps of the draft mean: the key of another subject of the resource, and its event, whose row is
    /// numbered within the steps. These follow the events of the calls.
    fn besides(&self, _steps: &[Step]) -> Vec<(String, EventTemplate)> {
        Vec::new()
    }

    /// What it means that the store refused a step of the draft (numbered from 0 within the draft).
    fn refusal(&self, call: &Call, refused: &Refused) -> Verdict;

    /// The answer, from the event of the draft as it stands in the log. It may take out of it what it needs.
    fn answer(&self, call: &Call, event: &mut Event) -> Answer;

    /// What the write makes due, so that workers of this process do not sleep through it.
    fn wakes(&self, _call: &Call, _event: &Event) -> Vec<Wake> {
        Vec::new()
    }
}

/// The row that an event has taken in, taken out of it again: it may be large, and is told once.
pub(crate) fn row_of(event: &mut Event) -> Json {
    event.data.get_mut("row").map(Json::take).unwrap_or_default()
}

/// An action that makes several plans, each of one row or a few, which are decided each by itself. It cannot be part of a
/// batch, and is broken off when its caller goes away: what its plans did is done, and the others were not begun.
#[async_trait]
pub trait Several: Send + Sync {
    /// Does it, and answers. The house remembers the answer under the caller's operation id, if there is one.
    async fn run(&self, call: &Call, desk: &Desk<'_>) -> Result<Answer, Refusal>;

    /// Itself, for a part of the library that knows what it is.
    fn as_any(&self) -> Option<&dyn Any> {
        None
    }
}

/// An action that reads.
#[async_trait]
pub trait Read: Send + Sync {
    /// Reads and answers. What the cache holds is handed on as it is.
    async fn read(&self, call: &Call, desk: &Desk<'_>) -> Result<Arc<Answer>, Refusal>;
}

/// What an action wants to write.
#[derive(Clone, Debug)]
pub enum Draft {
    /// Nothing has to change; this is the answer.
    Done(Answer),
    /// This is to be committed.
    Write(Pieces),
}

/// The parts of a plan.
#[derive(Clone, Debug)]
pub struct Pieces {
    /// The key of the subject, as text.
    pub subject: String,
    /// The steps.
    pub steps: Vec<Step>,
    /// The event; a row it takes is numbered within `steps`.
    pub event: EventTemplate,
}

/// What follows from a refused step.
#[derive(Clone, Debug)]
pub enum Verdict {
    /// Somebody else was faster; draft it anew and try again.
    TryAgain,
    /// Somebody holds a lock on the row; wait for them, and try again.
    Wait,
    /// The caller has to know.
    Refuse(Refusal),
}

/// What an action gives.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Answer {
    /// The body.
    pub body: Json,
    /// The version of the row, if it has one.
    pub version: Option<i64>,
    /// The key of a row that was created, as text.
    pub created: Option<String>,
    /// Where the next page begins.
    pub next: Option<String>,
    /// Of a write: what a cached read has to bring along to see it (see [`crate::cache`]).
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub token: Option<String>,
}

impl Answer {
    /// An answer with a body and a version.
    pub fn row(body: Json) -> Answer {
        let version = body.get("version").and_then(Json::as_i64);
        Answer { body, version, created: None, next: None, token: None }
    }
}

/// Why an action was not done. The codes are stable; messages may change.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
#[error("{code}: {message}")]
pub struct Refusal {
    /// The stable code.
    pub code: Code,
    /// What happened, to which row, and what to do.
    pub message: String,
    /// The row's version as it is, where that helps.
    pub current_version: Option<i64>,
    /// What does not fit, for bad input.
    pub misfits: Vec<Misfit>,
}

impl Refusal {
    /// A refusal with a code and a message.
    pub fn new(code: Code, message: impl Into<String>) -> Refusal {
        Refusal { code, message: message.into(), current_version: None, misfits: Vec::new() }
    }

    /// The same, with the row's version as it is.
    #[must_use]
    pub fn at_version(mut self, row: Option<&Row>) -> Refusal {
        self.current_version = row.map(Row::version);
        self
    }

    /// Bad input.
    pub fn misfits(misfits: Vec<Misfit>) -> Refusal {
        let first = misfits.first().map_or(String::new(), |misfit| {
            let place = if misfit.pointer.is_empty() { "the input" } else { &misfit.pointer };
            format!("{place}: {}", misfit.detail)
        });
        Refusal { misfits, ..Refusal::new(Code::InvalidInput, first) }
    }
}

impl Refusal {
    /// Bad input in one field.
    pub fn field(name: &str, detail: impl Into<String>) -> Refusal {
        Refusal::misfits(vec![Misfit { pointer: format!("/{name}"), detail: detail.into() }])
    }
}

impl From<StoreError> for Refusal {
    fn from(error: StoreError) -> Refusal {
        let code = match &error {
            StoreError::Unavailable { .. } => Code::Unavailable,
            StoreError::OutcomeUnknown { .. } => Code::OutcomeUnknown,
            StoreError::LimitExceeded { .. } => Code::TooLarge,
            StoreError::Schema { .. } => Code::SchemaMismatch,
            _ => Code::Internal,
        };
        Refusal::new(code, error.to_string())
    }
}

impl From<statehouse_store::Bug> for Refusal {
    fn from(bug: statehouse_store::Bug) -> Refusal {
        Refusal::new(Code::Internal, bug.to_string())
    }
}

impl From<statehouse_store::PlanError> for Refusal {
    fn from(error: statehouse_store::PlanError) -> Refusal {
        use statehouse_store::PlanError;
        let code = match &error {
            PlanError::Limit { .. } => Code::TooLarge,
            PlanError::BadValue { .. } | PlanError::Required { .. } | PlanError::BadCursor { .. } => {
                Code::InvalidInput
            }
            PlanError::BadName { .. } | PlanError::RowTwice { .. } => Code::InvalidInput,
            _ => Code::Internal,
        };
        Refusal::new(code, error.to_string())
    }
}

/// What the reasons that have the same meaning for every action mean.
pub fn common_verdict(what: &str, refused: &Refused) -> Verdict {
    let refusal = match &refused.reason {
        Reason::Absent => Refusal::new(Code::NotFound, format!("{what} does not exist")),
        Reason::Present => Refusal::new(Code::AlreadyExists, format!("{what} exists already"))
            .at_version(refused.current.as_ref()),
        Reason::Overflow { column } => {
            Refusal::new(Code::OutOfRange, format!("{what}: the new {column} is out of range"))
        }
        Reason::Null { column } => {
            Refusal::new(Code::InvalidInput, format!("{what}: {column} is required and would become null"))
        }
        Reason::Guard { .. } => return Verdict::TryAgain,
    };
    Verdict::Refuse(refusal)
}
