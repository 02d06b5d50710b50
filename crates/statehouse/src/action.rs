//! Actions: declared once, served everywhere.
//!
//! An [`Action`] says what it is called, what it takes and gives, how it can be refused and which failures it answers,
//! and it can build the steps that do it. The HTTP routes, the OpenAPI document, the command line, `explain` and the
//! drills are made from this declaration; no surface knows an archetype.
//!
//! A write has three phases:
//!
//! 1. [`Prepare::prepare`] reads what it needs and returns the parts of a plan ([`PlanParts`]), or an answer if nothing has
//!    to change, or a refusal.
//! 2. The house commits the parts as one plan, alone or with those of other actions. If the store refuses a step,
//!    [`Prepare::refused`] says what that means: retry, or tell the caller.
//! 3. [`AnswerFrom`] makes the answer from the event in the log record, and from nothing else, so that a repetition gets the
//!    same answer.

use std::borrow::Cow;
use std::fmt;
use std::sync::Arc;

use serde::{Deserialize, Serialize};
use serde_json::Value as Json;
use statehouse_store::{Bug, Row, StoreError, Tenant, Value, bug};

use crate::allow::Claims;
pub use crate::code::Code;
use crate::declare::rule::CheckedRule;
use crate::form::{FieldError, Form, Property};
use crate::inputs::Inputs;
pub use crate::prepare::*;

/// Where an action is found over HTTP.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Route {
    /// The method.
    pub method: Method,
    /// The path.
    pub kind: RouteKind,
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
pub enum RouteKind {
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
    /// Whether the scope `write` is not enough for it: a credential needs `admin`, or a scope that names the action.
    pub is_restricted: bool,
    /// The scope of its own that permits it, declared in the blueprint; then the scope `write` is not enough.
    pub scope: Option<Box<str>>,
    /// The failures of the atlas that it answers.
    pub answers: &'static [&'static str],
    /// Full names of actions that bring a house from nothing to a state in which this one can be done, in order;
    /// [`WAIT`] among them stands for a day that passes. For `explain`.
    pub after: Vec<String>,
    /// What performs it.
    pub handler: ActionHandler,
}

/// A day passes (see [`Action::after`]).
pub const WAIT: &str = "wait";

impl Action {
    /// Its path as an action of that resource. `key` is what stands for the key: a path segment, or `{key}`.
    pub fn path(&self, resource: &str, key: &str) -> String {
        match self.route.kind {
            RouteKind::Collection => format!("/v1/{resource}"),
            RouteKind::Item => format!("/v1/{resource}/{key}"),
            RouteKind::ItemAction => format!("/v1/{resource}/{key}/{}", self.name),
        }
    }

    /// The input that takes the id of the operation. A caller that sends an idempotency key leaves it out.
    pub fn operation_input(&self) -> Option<&'static str> {
        match &self.handler {
            ActionHandler::Write(write) => write.combiner.as_ref().map(|combiner| combiner.id_input()),
            _ => None,
        }
    }

    /// Whether it writes.
    pub fn is_write(&self) -> bool {
        !matches!(self.handler, ActionHandler::Read(_))
    }
}

impl fmt::Debug for Action {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Action({})", self.name)
    }
}

/// A call of an action: who, which row, with what.
#[derive(Clone, Debug)]
pub struct Call {
    /// On whose behalf.
    pub tenant: Tenant,
    /// The key of the row, for actions that name one.
    pub key: Vec<Value>,
    /// What the action takes, parsed by its form.
    pub input: Inputs,
    /// What the caller says about the version it has seen.
    pub expected: Option<Expected>,
    /// What the caller demands of the row (`if`).
    pub condition: Option<Arc<CheckedRule>>,
    /// The claims of an end user, whom the rules of resources govern ([`crate::allow`]).
    pub claims: Option<Arc<Claims>>,
    /// Who calls, as the log says of each write.
    pub actor: Option<Arc<str>>,
}

impl Call {
    /// The first part of the key, which is a text.
    ///
    /// # Errors
    /// There is none: a defect, because the house refuses a call whose key does not fit the resource.
    pub fn key_text(&self) -> Result<&str, Bug> {
        let first = self.key.first().and_then(Value::as_text);
        first.ok_or_else(|| bug!("the key of a call does not begin with a text"))
    }
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
    /// The values that do not fit, for bad input.
    pub field_errors: Vec<FieldError>,
    /// Which call of a batch it is about, from 0; none if it is about all of them, or there is only one.
    pub call: Option<usize>,
}

impl Refusal {
    /// A refusal with a code and a message.
    pub fn new(code: Code, message: impl Into<String>) -> Refusal {
        Refusal { code, message: message.into(), current_version: None, field_errors: Vec::new(), call: None }
    }

    /// The same, with the row's version as it is.
    #[must_use]
    pub fn at_version(mut self, row: Option<&Row>) -> Refusal {
        self.current_version = row.map(Row::version);
        self
    }

    /// The same, about one call of a batch, from 0.
    #[must_use]
    pub fn of_call(mut self, call: usize) -> Refusal {
        self.call = Some(call);
        self
    }

    /// Bad input.
    pub fn invalid(field_errors: Vec<FieldError>) -> Refusal {
        let first = field_errors.first().map_or(String::new(), |error| {
            let location = if error.pointer.is_empty() { "the input" } else { &error.pointer };
            format!("{location}: {}", error.detail)
        });
        Refusal { field_errors, ..Refusal::new(Code::InvalidInput, first) }
    }

    /// Bad input in one field.
    pub fn field(name: &str, detail: impl Into<String>) -> Refusal {
        Refusal::invalid(vec![FieldError { pointer: format!("/{name}"), detail: detail.into() }])
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

impl From<Bug> for Refusal {
    fn from(bug: Bug) -> Refusal {
        Refusal::new(Code::Internal, bug.to_string())
    }
}

impl From<statehouse_store::PlanError> for Refusal {
    fn from(error: statehouse_store::PlanError) -> Refusal {
        use statehouse_store::PlanError;
        let code = match &error {
            PlanError::Limit { .. } => Code::TooLarge,
            PlanError::BadValue { .. }
            | PlanError::Required { .. }
            | PlanError::BadCursor { .. }
            | PlanError::BadSegment { .. } => Code::InvalidInput,
            PlanError::BadName { .. } | PlanError::RowTwice { .. } => Code::InvalidInput,
            _ => Code::Internal,
        };
        Refusal::new(code, error.to_string())
    }
}
