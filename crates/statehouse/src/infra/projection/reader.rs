//! A projection as actions read it: under one generation, and no older than the caller's own writes.

use std::time::Duration;

use statehouse_store::{Cell, Tenant, Type};

use super::build::{read_state, state_address, wait_for};
use super::pipeline::group_of;
use super::state::LIVE;
use crate::action::{ActionContext, Call, Code, Refusal};
use crate::cache::ReadToken;
use crate::form::{FieldError, Form, Property};

const AFTER: &str = "after";
const WAIT_MS: &str = "wait_ms";
const CURSOR: &str = "cursor";
const WAIT_MS_DEFAULT: u64 = 5_000;
const WAIT_MS_MAX: i64 = 30_000;

/// What a read of a projection takes besides what it reads.
pub(crate) fn fresh() -> [Property; 2] {
    let wait = format!("how long to wait for them; {WAIT_MS_DEFAULT} if not given");
    [
        Property::optional(AFTER, Form::Value(Type::Text), "tokens of writes that must have been seen"),
        Property::optional(WAIT_MS, Form::Range(0, WAIT_MS_MAX), &wait),
    ]
}

/// A projection as an action reads it (I4 of the pipeline).
pub(crate) struct ProjectionReader<'a, 'd> {
    /// The projection.
    pub(crate) name: &'a str,
    /// What the house lends.
    pub(crate) cx: &'a ActionContext<'d>,
}

impl ProjectionReader<'_, '_> {
    /// The generation that a call reads, once it has what the call has to see; and where its page begins in it. A page
    /// goes on in the generation that it began in.
    pub(crate) async fn open(&self, call: &Call) -> Result<(i64, Option<String>), Refusal> {
        let field_error = |name: &str, detail: &str| {
            Refusal::invalid(vec![FieldError { pointer: format!("/{name}"), detail: detail.into() }])
        };
        let text = |name: &str| call.input.text(name);
        let tokens = match text(AFTER).map(ReadToken::parse_list) {
            None => Vec::new(),
            Some(Some(tokens)) => tokens,
            Some(None) => return Err(field_error(AFTER, "expected what writes returned as their token")),
        };
        let (generation, cursor) = match text(CURSOR) {
            None => (self.live().await?, None),
            Some(cursor) => {
                let parts = cursor.split_once('.');
                let parts = parts.and_then(|(number, cursor)| Some((number.parse::<i64>().ok()?, cursor)));
                let Some((generation, cursor)) = parts else {
                    return Err(field_error(CURSOR, "this is not a cursor of this list"));
                };
                (self.kept(generation).await?, Some(cursor.to_owned()))
            }
        };
        if !tokens.is_empty() {
            let wait = call.input.count(WAIT_MS).unwrap_or(WAIT_MS_DEFAULT);
            self.passed(generation, &call.tenant, &tokens, Duration::from_millis(wait)).await?;
        }
        Ok((generation, cursor))
    }

    /// Whether a call asks for the live generation from its beginning, whatever it has seen.
    pub(crate) fn is_plain(call: &Call) -> bool {
        !call.input.has(AFTER) && !call.input.has(CURSOR)
    }

    /// The cursor of a page, for the one that goes on behind it.
    pub(crate) fn cursor(generation: i64, cursor: &str) -> String {
        format!("{generation}.{cursor}")
    }

    /// The generation that readers read.
    async fn live(&self) -> Result<i64, Refusal> {
        let state = read_state(self.cx.store, self.name).await?;
        let live = state.live.map(|live| live.number);
        live.ok_or_else(|| {
            let message = format!("{} is being built for the first time; try again", self.name);
            Refusal::new(Code::Unavailable, message)
        })
    }

    /// The row that says which generation is live, for callers that read other rows in the same request.
    pub(crate) fn live_cell(&self) -> Result<Cell, Refusal> {
        Ok(Cell::new(state_address(self.name)?, LIVE)?)
    }

    /// A generation that a reader has begun with, if it is still there.
    async fn kept(&self, generation: i64) -> Result<i64, Refusal> {
        let state = read_state(self.cx.store, self.name).await?;
        let kept = [state.live, state.previous].into_iter().flatten().any(|one| one.number == generation);
        if kept {
            return Ok(generation);
        }
        let detail = format!("{} was rebuilt since this page; begin anew, without a cursor", self.name);
        Err(Refusal::invalid(vec![FieldError { pointer: format!("/{CURSOR}"), detail }]))
    }

    /// Waits until a generation has passed a caller's own writes.
    async fn passed(
        &self,
        generation: i64,
        tenant: &Tenant,
        tokens: &[ReadToken],
        at_most: Duration,
    ) -> Result<(), Refusal> {
        let group = group_of(self.name, generation);
        if wait_for(self.cx.store, self.cx.clock, &group, tenant, tokens, at_most).await? {
            return Ok(());
        }
        let message = format!("{} has not got to that write yet; try again", self.name);
        Err(Refusal::new(Code::Unavailable, message))
    }
}
