//! The writes: from a call to the steps of a plan, and from a refused step to what it means.

use std::sync::Arc;

use async_trait::async_trait;
use statehouse_store::guard::{column, now};
use statehouse_store::{EventTemplate, Guard, Reason, Row, Step, Value};

use super::{
    BUCKET, DIGEST, HIDDEN, POSTED_AT, REASON, REMOVED, STATUS, ThreadSpec, UPDATED_AT, VISIBLE, position,
    rows_of,
};
use crate::action::{
    ActionContext, Answer, Call, Code, Expected, PlanParts, Prepare, Prepared, Refusal, RefusedStep, Verdict,
};
use crate::erase;
use crate::house::digest;
use crate::paging;
use crate::product::fields::contents;
use crate::resource::key_text;

/// The label of the step on the child itself; the others are on the parent's list and count.
const CHILD: &str = "child";

/// What a write does.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum ThreadVerb {
    Append,
    Edit,
    Remove,
    Hide,
    Restore,
    Erase,
}

pub(super) struct ThreadWrite {
    pub thread: Arc<ThreadSpec>,
    pub verb: ThreadVerb,
}

impl ThreadSpec {
    async fn append(&self, call: &Call, cx: &ActionContext<'_>) -> Result<Prepared, Refusal> {
        let mut key = paging::given(&self.parent, call)?;
        key.extend(paging::given(std::slice::from_ref(&self.id), call)?);
        let fields = contents(&self.fields, &call.input, true);
        let said: Vec<String> = fields.iter().map(|(name, value)| format!("{name}={value}")).collect();
        let said = digest(&said.join("\n"));
        // Most children are new. If this one is not, the store says so, and the next draft looks.
        if cx.attempt > 0
            && let Some(row) =
                rows_of(cx, &self.table, &call.tenant, [key.clone()]).await?.into_iter().next().flatten()
        {
            return self.again(&row, &said);
        }
        let (parent, id) = self.parts(&key);
        let position = self.listing.position(&call.tenant, id, cx.clock.now());
        let mut child = Step::insert(&self.table, key.iter().cloned())
            .label(CHILD)
            .set(STATUS, VISIBLE)
            .set(POSTED_AT, position.at)
            .set(BUCKET, position.bucket)
            .set(DIGEST, said)
            .set(UPDATED_AT, now());
        for (name, value) in fields {
            child = child.set(name, value);
        }
        let listed = self.listing.put(&call.tenant, parent, id, position);
        let steps = std::iter::once(child).chain(listed).collect();
        let event = EventTemplate::named(format!("{}.appended", self.name)).with_row_of(0);
        Ok(PlanParts::new(key_text(&key), steps, event).into())
    }

    /// An append whose id is taken: by this very child, or by another (I1).
    fn again(&self, row: &Row, said: &str) -> Result<Prepared, Refusal> {
        let what = self.what(row.key());
        if row.get_text(DIGEST)? != said {
            let message = format!("{what} is there already, and says something else; choose another id");
            return Err(Refusal::new(Code::AlreadyExists, message).at_version(Some(row)));
        }
        match row.get_text(STATUS)? {
            VISIBLE => {
                let created = Some(key_text(row.key()));
                Ok(Prepared::Unchanged(Answer { created, ..Answer::row(self.def.row_json(row)) }))
            }
            HIDDEN => Err(self.hidden(row)),
            _ => Err(self.removed(row)),
        }
    }

    fn hidden(&self, row: &Row) -> Refusal {
        let message = format!("{} was hidden by a moderator", self.what(row.key()));
        Refusal::new(Code::WrongState, message).at_version(Some(row))
    }

    async fn edit(&self, call: &Call, cx: &ActionContext<'_>) -> Result<Prepared, Refusal> {
        let changes = contents(&self.fields, &call.input, false);
        let row = self.child(call, cx).await?;
        match row.get_text(STATUS)? {
            VISIBLE => {}
            HIDDEN => return Err(self.hidden(&row)),
            _ => return Err(self.removed(&row)),
        }
        self.check_expected(call, &row)?;
        let differs = |(name, value): &(&str, Value)| row.get(name) != Some(value);
        let changed: Vec<(&str, Value)> = changes.into_iter().filter(differs).collect();
        if changed.is_empty() {
            return Ok(Prepared::Unchanged(Answer::row(self.def.row_json(&row))));
        }
        let step = changed
            .into_iter()
            .fold(self.leave_list(call, VISIBLE), |step, (name, value)| step.set(name, value));
        Ok(self.change(call, vec![step], "edited"))
    }

    /// A step on a child that was read in this state (I2, I3): it is still in it, or, if the caller has named the version
    /// that it has seen, still at that one, which says more.
    fn leave_list(&self, call: &Call, status: &str) -> Step {
        let guard = match call.expected {
            Some(Expected::Version(version)) => Guard::version(version),
            _ => column(STATUS).eq(status),
        };
        Step::update(&self.table, call.key.iter().cloned()).label(CHILD).guard(guard).set(UPDATED_AT, now())
    }

    /// From one state to another, out of the list or back into it.
    async fn transition(
        &self,
        call: &Call,
        cx: &ActionContext<'_>,
        verb: ThreadVerb,
    ) -> Result<Prepared, Refusal> {
        let row = self.child(call, cx).await?;
        let (to, what) = match verb {
            ThreadVerb::Hide => (HIDDEN, "hidden"),
            ThreadVerb::Restore => (VISIBLE, "restored"),
            _ => (REMOVED, "removed"),
        };
        let status = row.get_text(STATUS)?;
        if status == to {
            return Ok(Prepared::Unchanged(Answer::row(self.def.row_json(&row))));
        }
        if status == REMOVED {
            return Err(self.removed(&row));
        }
        self.check_expected(call, &row)?;
        let mut child = self.leave_list(call, status).set(STATUS, to);
        if to == REMOVED {
            let lost = self.fields.iter().filter(|field| self.person.as_ref() != Some(&field.name));
            child = lost.fold(child, |child, field| child.set(&field.name, Value::Null));
        }
        let (parent, id) = self.parts(&call.key);
        let position = position(&row)?;
        let mut steps = vec![child];
        match (status, to) {
            (VISIBLE, _) => steps.extend(self.listing.remove(&call.tenant, parent, id, position)),
            (_, VISIBLE) => steps.extend(self.listing.put(&call.tenant, parent, id, position)),
            _ => {}
        }
        Ok(self.change(call, steps, what))
    }

    /// Removes the child for good, whatever its state, out of list and count if it is in them (I7).
    async fn erase(&self, call: &Call, cx: &ActionContext<'_>) -> Result<Prepared, Refusal> {
        let row = self.child(call, cx).await?;
        self.check_expected(call, &row)?;
        let key = call.key.iter().cloned();
        let mut steps =
            vec![Step::delete(&self.table, key).guard(Guard::version(row.version())).label(CHILD)];
        if row.get_text(STATUS)? == VISIBLE {
            let (parent, id) = self.parts(&call.key);
            steps.extend(self.listing.remove(&call.tenant, parent, id, position(&row)?));
        }
        erase::parts(&self.name, &row, steps, cx)
    }

    fn change(&self, call: &Call, steps: Vec<Step>, what: &str) -> Prepared {
        let mut event = EventTemplate::named(format!("{}.{what}", self.name)).with_row_of(0);
        if let Some(reason) = call.input.text(REASON) {
            event = event.with(REASON, reason);
        }
        PlanParts::new(key_text(&call.key), steps, event).into()
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
impl Prepare for ThreadWrite {
    async fn prepare(&self, call: &Call, cx: &ActionContext<'_>) -> Result<Prepared, Refusal> {
        match self.verb {
            ThreadVerb::Append => self.thread.append(call, cx).await,
            ThreadVerb::Edit => self.thread.edit(call, cx).await,
            ThreadVerb::Erase => self.thread.erase(call, cx).await,
            verb => self.thread.transition(call, cx, verb).await,
        }
    }

    fn refused(&self, call: &Call, refused: &RefusedStep<'_>) -> Verdict {
        let thread = &self.thread;
        match (refused.reason, refused.row) {
            // The id is taken: the next draft sees by whom.
            (Reason::Present, Some(_)) if refused.label() == CHILD => Verdict::Retry,
            // A draft looks at it again.
            (Reason::Guard { .. }, _) if self.verb == ThreadVerb::Erase => Verdict::Retry,
            (Reason::Guard { .. }, Some(row)) if refused.label() == CHILD => match call.expected {
                Some(Expected::Version(expected))
                    if expected != row.version() && row.text(STATUS) == Some(VISIBLE) =>
                {
                    Verdict::Refuse(thread.conflict(expected, row))
                }
                // It is in another state by now: the next draft says what that means.
                _ => Verdict::Retry,
            },
            (Reason::Overflow { .. } | Reason::Null { .. }, _) => {
                refused.standard(&format!("this {}", thread.name))
            }
            _ if refused.label() == CHILD => refused.standard(&thread.what(&call.key)),
            (reason, _) => {
                let message = format!("{} and its list do not agree: {reason}", thread.what(&call.key));
                Verdict::Refuse(Refusal::new(Code::Internal, message))
            }
        }
    }
}
