//! The writes: from a call to the steps of a plan, and from a refused step to what it means.

use std::sync::Arc;

use async_trait::async_trait;
use serde_json::Value as Json;
use statehouse_store::guard::{column, now};
use statehouse_store::{Event, EventTemplate, Guard, Reason, Refused, Row, Step, Value};

use super::{BUCKET, DIGEST, HIDDEN, POSTED_AT, REASON, REMOVED, STATUS, Thread, UPDATED_AT, VISIBLE, place};
use crate::action::{
    Answer, Call, Code, Desk, Draft, Expected, Pieces, Refusal, Verdict, Write, common_verdict, row_of,
};
use crate::house::digest;
use crate::paging;
use crate::product::fields::contents;
use crate::resource::key_text;

/// What a write does.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Verb {
    Append,
    Edit,
    Remove,
    Hide,
    Restore,
}

pub(super) struct Writer {
    pub thread: Arc<Thread>,
    pub verb: Verb,
}

impl Thread {
    async fn append(&self, call: &Call, desk: &Desk<'_>) -> Result<Draft, Refusal> {
        let mut key = paging::given(&self.parent, call)?;
        key.extend(paging::given(std::slice::from_ref(&self.id), call)?);
        let fields = contents(&self.fields, &call.input, true)?;
        let said: Vec<String> = fields.iter().map(|(name, value)| format!("{name}={value}")).collect();
        let said = digest(&said.join("\n"));
        // Most children are new. If this one is not, the store says so, and the next draft looks.
        if desk.tries > 0
            && let Some(row) =
                self.rows(desk, &call.tenant, [key.clone()]).await?.into_iter().next().flatten()
        {
            return self.again(&row, &said);
        }
        let (parent, id) = self.parts(&key);
        let place = self.listing.place(&call.tenant, id, desk.clock.now());
        let mut child = Step::insert(&self.table, key.iter().cloned())
            .set(STATUS, VISIBLE)
            .set(POSTED_AT, place.at)
            .set(BUCKET, place.bucket)
            .set(DIGEST, said)
            .set(UPDATED_AT, now());
        for (name, value) in fields {
            child = child.set(name, value);
        }
        let listed = self.listing.put(&call.tenant, parent, id, place);
        let steps = std::iter::once(child).chain(listed).collect();
        let event = EventTemplate::named(format!("{}.appended", self.name)).with_row_of(0);
        Ok(Draft::Write(Pieces { subject: key_text(&key), steps, event }))
    }

    /// An append whose id is taken: by this very child, or by another (I1).
    fn again(&self, row: &Row, said: &str) -> Result<Draft, Refusal> {
        let what = self.what(row.key());
        if row.text(DIGEST) != Some(said) {
            let message = format!("{what} is there already, and says something else; choose another id");
            return Err(Refusal::new(Code::AlreadyExists, message).at_version(Some(row)));
        }
        match row.text(STATUS) {
            Some(VISIBLE) => {
                let created = Some(key_text(row.key()));
                Ok(Draft::Done(Answer { created, ..Answer::row(self.def.row_json(row)) }))
            }
            Some(HIDDEN) => Err(self.hidden(row)),
            _ => Err(self.removed(row)),
        }
    }

    fn hidden(&self, row: &Row) -> Refusal {
        let message = format!("{} was hidden by a moderator", self.what(row.key()));
        Refusal::new(Code::WrongState, message).at_version(Some(row))
    }

    async fn edit(&self, call: &Call, desk: &Desk<'_>) -> Result<Draft, Refusal> {
        let changes = contents(&self.fields, &call.input, false)?;
        let row = self.child(call, desk).await?;
        match row.text(STATUS) {
            Some(VISIBLE) => {}
            Some(HIDDEN) => return Err(self.hidden(&row)),
            _ => return Err(self.removed(&row)),
        }
        self.check_expected(call, &row)?;
        let differs = |(name, value): &(&str, Value)| row.get(name) != Some(value);
        let changed: Vec<(&str, Value)> = changes.into_iter().filter(differs).collect();
        if changed.is_empty() {
            return Ok(Draft::Done(Answer::row(self.def.row_json(&row))));
        }
        let step =
            changed.into_iter().fold(self.leave(call, VISIBLE), |step, (name, value)| step.set(name, value));
        Ok(self.change(call, vec![step], "edited"))
    }

    /// A step on a child that was read in this state (I2, I3): it is still in it, or, if the caller has named the version
    /// that it has seen, still at that one, which says more.
    fn leave(&self, call: &Call, status: &str) -> Step {
        let guard = match call.expected {
            Some(Expected::Version(version)) => Guard::version(version),
            _ => column(STATUS).eq(status),
        };
        Step::update(&self.table, call.key.iter().cloned()).guard(guard).set(UPDATED_AT, now())
    }

    /// From one state to another, out of the list or back into it.
    async fn transition(&self, call: &Call, desk: &Desk<'_>, verb: Verb) -> Result<Draft, Refusal> {
        let row = self.child(call, desk).await?;
        let (to, what) = match verb {
            Verb::Hide => (HIDDEN, "hidden"),
            Verb::Restore => (VISIBLE, "restored"),
            _ => (REMOVED, "removed"),
        };
        let status = row.text(STATUS).unwrap_or_default();
        if status == to {
            return Ok(Draft::Done(Answer::row(self.def.row_json(&row))));
        }
        if status == REMOVED {
            return Err(self.removed(&row));
        }
        self.check_expected(call, &row)?;
        let mut child = self.leave(call, status).set(STATUS, to);
        if to == REMOVED {
            child = self.fields.iter().fold(child, |child, field| child.set(&field.name, Value::Null));
        }
        let (parent, id) = self.parts(&call.key);
        let place = place(&row)
            .ok_or_else(|| Refusal::new(Code::Internal, format!("{} has no place", self.what(row.key()))))?;
        let mut steps = vec![child];
        match (status, to) {
            (VISIBLE, _) => steps.extend(self.listing.take(&call.tenant, parent, id, place)),
            (_, VISIBLE) => steps.extend(self.listing.put(&call.tenant, parent, id, place)),
            _ => {}
        }
        Ok(self.change(call, steps, what))
    }

    fn change(&self, call: &Call, steps: Vec<Step>, what: &str) -> Draft {
        let mut event = EventTemplate::named(format!("{}.{what}", self.name)).with_row_of(0);
        if let Some(reason) = call.input.get(REASON).and_then(Json::as_str) {
            event = event.with(REASON, reason);
        }
        Draft::Write(Pieces { subject: key_text(&call.key), steps, event })
    }

    fn check_expected(&self, call: &Call, row: &Row) -> Result<(), Refusal> {
        match call.expected {
            Some(Expected::Version(expected)) if expected != row.version() => {
                Err(self.conflict(expected, row))
            }
            _ => Ok(()),
        }
    }

    fn conflict(&self, expected: i64, row: &Row) -> Refusal {
        let message = format!(
            "{} is at version {}, not {expected}: read it again, merge and retry",
            self.what(row.key()),
            row.version()
        );
        Refusal::new(Code::VersionConflict, message).at_version(Some(row))
    }
}

#[async_trait]
impl Write for Writer {
    async fn draft(&self, call: &Call, desk: &Desk<'_>) -> Result<Draft, Refusal> {
        match self.verb {
            Verb::Append => self.thread.append(call, desk).await,
            Verb::Edit => self.thread.edit(call, desk).await,
            verb => self.thread.transition(call, desk, verb).await,
        }
    }

    fn refusal(&self, call: &Call, refused: &Refused) -> Verdict {
        let thread = &self.thread;
        match (&refused.reason, &refused.current) {
            // The id is taken: the next draft sees by whom.
            (Reason::Present, Some(_)) if refused.step == 0 => Verdict::TryAgain,
            (Reason::Guard { .. }, Some(row)) if refused.step == 0 => match call.expected {
                Some(Expected::Version(expected))
                    if expected != row.version() && row.text(STATUS) == Some(VISIBLE) =>
                {
                    Verdict::Refuse(thread.conflict(expected, row))
                }
                // It is in another state by now: the next draft says what that means.
                _ => Verdict::TryAgain,
            },
            (Reason::Overflow { .. } | Reason::Null { .. }, _) => {
                common_verdict(&format!("this {}", thread.name), refused)
            }
            _ if refused.step == 0 => common_verdict(&thread.what(&call.key), refused),
            (reason, _) => {
                let message = format!("{} and its list do not agree: {reason}", thread.what(&call.key));
                Verdict::Refuse(Refusal::new(Code::Internal, message))
            }
        }
    }

    fn answer(&self, _: &Call, event: &mut Event) -> Answer {
        let row = row_of(event);
        let created = (self.verb == Verb::Append).then(|| {
            let parts = self.thread.table.key_columns().iter().map(|column| {
                Value::from_json(row.get(&column.name).cloned().unwrap_or_default(), column.kind)
                    .unwrap_or(Value::Null)
            });
            key_text(&parts.collect::<Vec<_>>())
        });
        Answer { created, ..Answer::row(self.thread.def.visible(row)) }
    }
}
