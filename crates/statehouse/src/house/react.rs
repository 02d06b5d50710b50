//! A call that a reaction or another worker makes: prepared like any other, and handed to the worker, whose plan commits it together
//! with a step of its own, like the progress past the event.
//!
//! The worker's step is the first one of the plan, so that rows which events carry are numbered from the second step on.

use std::mem::take;
use std::sync::Arc;

use serde_json::Value as Json;
use statehouse_store::{Entry, Refused, Step, Tenant};
use tokio::sync::watch;

use super::assemble::{Assembled, PlannedCalls, assemble};
use super::{CallArguments, ValidatedCall, constrain, validate};
use crate::action::{
    Action, ActionContext, ActionHandler, Call, Code, Prepare, Refusal, RefusedStep, Verdict, WriteHandler,
};
use crate::allow::Principal;
use crate::infra::log::StepJudge;
use crate::lock::{self, HeldLock, LockOutcome};
use crate::resource::Resource;
use crate::worker::Wakeup;

/// Steps of the worker in front of those of the call.
const STEPS_BEFORE: usize = 1;
/// Where an event says which reaction, or which other worker, caused it.
pub(crate) const REACTION: &str = "reaction";

/// A call of an action, with the operation id that is derived from the event it reacts to.
pub(crate) struct ReactionCall<'a> {
    pub(crate) resource: &'a Resource,
    action: &'a Action,
    write: &'a WriteHandler,
    call: Call,
    operation: &'a str,
}

/// What a call writes.
pub(crate) struct Reacted {
    pub(crate) steps: Vec<Step>,
    pub(crate) entry: Entry,
    pub(crate) judge: StepJudge,
    pub(crate) wakeups: Vec<Wakeup>,
    pub(crate) notify: Vec<watch::Sender<u64>>,
}

impl<'a> ReactionCall<'a> {
    /// Checks the arguments against the action, which is a single write.
    pub(crate) fn validated(
        resource: &'a Resource,
        action: &'a Action,
        tenant: &Tenant,
        arguments: CallArguments,
        operation: &'a str,
    ) -> Result<ReactionCall<'a>, Refusal> {
        let ActionHandler::Write(write) = &action.handler else {
            let message = format!("{}.{} is not a single write", resource.name, action.name);
            return Err(Refusal::new(Code::InvalidInput, message));
        };
        // The blueprint declares the call: the rules for end users do not govern it.
        let call = validate(resource, action, &Principal::from(tenant), arguments)?;
        Ok(ReactionCall { resource, action, write, call, operation })
    }

    /// Whether the action does anything outside the plan while it is prepared.
    pub(crate) fn acts_before_commit(&self) -> bool {
        self.write.prepare.acts_before_commit() || !matches!(self.write.prepare.lock(&self.call), Ok(None))
    }

    /// Prepares the call; `None` if nothing has to be written. Each of its events says what caused it.
    pub(crate) async fn prepare(
        self,
        cx: &ActionContext<'_>,
        fingerprint: &str,
        cause: &Json,
    ) -> Result<Option<Reacted>, Refusal> {
        let locks = self.take_lock(cx).await?;
        let prepared = self.write.prepare.prepare(&self.call, cx).await?;
        let prepared = constrain::complete(prepared, &self.call, cx).await?;
        let ReactionCall { resource, action, write, call, operation } = self;
        let (tenant, calls) =
            (call.tenant.clone(), [ValidatedCall { resource, action, write, call, now: cx.clock.now() }]);
        let assembled = assemble(&tenant, &calls, vec![prepared], &locks, operation, fingerprint)?;
        let Assembled::Plan(plan, mut planned) = assembled else { return Ok(None) };
        let plan = plan.to_builder();
        let without = || Refusal::new(Code::Internal, "a write left no record in the log");
        let mut entry = plan.entry.ok_or_else(without)?;
        for event in &mut entry.events {
            event.row_of = event.row_of.map(|step| step + STEPS_BEFORE);
            event.data.insert(REACTION.to_owned(), cause.clone());
        }
        let [ValidatedCall { call, .. }] = calls;
        let (wakeups, notify) = (take(&mut planned.wakeups), take(&mut planned.notify));
        let judge = judge(write.prepare.clone(), call, planned);
        Ok(Some(Reacted { steps: plan.steps, entry, judge, wakeups, notify }))
    }

    /// Takes the lock that the action needs. The same operation takes it again on the next attempt; a lock whose plan was not
    /// committed ends by itself.
    async fn take_lock(&self, cx: &ActionContext<'_>) -> Result<Vec<HeldLock>, Refusal> {
        let Some(request) = self.write.prepare.lock(&self.call)? else { return Ok(Vec::new()) };
        match lock::acquire(cx.store, &self.call.tenant, self.operation, &request).await? {
            LockOutcome::Held(lock) => Ok(vec![lock]),
            LockOutcome::Busy => {
                Err(Refusal::new(Code::Contended, "the row is locked by another operation; retry"))
            }
            LockOutcome::Refused(refused) => {
                let (reason, row) = (&refused.reason, refused.current.as_ref());
                let step = RefusedStep { index: 0, step: &request.provided, reason, row };
                match self.write.prepare.refused(&self.call, &step) {
                    Verdict::Refuse(refusal) => Err(refusal),
                    Verdict::Retry | Verdict::Wait => Err(Refusal::new(
                        Code::Contended,
                        "the row was changed while its lock was taken; retry",
                    )),
                }
            }
        }
    }
}

/// What a refused step means to the action. Behind its own steps its lock is released, which may have been lost.
fn judge(prepare: Arc<dyn Prepare>, call: Call, planned: PlannedCalls) -> StepJudge {
    StepJudge(Arc::new(move |refused: &RefusedStep<'_>| {
        let (reason, current) = (refused.reason.clone(), refused.row.cloned());
        let outcome = Refused { step: refused.index, reason, current };
        match planned.attribute(&outcome) {
            Some((part, reason)) => {
                let step =
                    RefusedStep { index: part.at, step: &part.step, reason: &reason, row: refused.row };
                let constraint = constrain::verdict(&call, &step);
                constraint.unwrap_or_else(|| prepare.refused(&call, &step))
            }
            None => Verdict::Retry,
        }
    }))
}
