//! Records outcomes together with what their settler makes of them (I8).

use super::*;
use crate::action::PlanParts;
use crate::declare::machine::add_parts;
use crate::infra::effect::settle::{EffectEnd, Settlement, Settler};

/// How often the settler is asked for steps, if one of them is refused.
const SETTLE_TRIES: usize = 3;
/// How long an outcome that could not be settled waits.
pub(super) const UNSETTLED_PAUSE: Duration = Duration::from_secs(10);
/// The event of an outcome that was settled later.
const SETTLED: &str = "settled";

/// The reason of an outcome whose response the settler could not read.
const NOT_READ: &str = "response_not_read";

/// What became of a plan with the steps of a settler.
enum SettledPlan {
    Applied,
    /// The effect's own step was refused: another process was faster.
    Passed,
    /// The settler has no steps that fit.
    Unsettled,
}

impl EffectSpec {
    /// What a settler reads in a response.
    pub(super) async fn interpreted(
        &self,
        row: &Row,
        exchange: ExchangeKind,
        sent: &SendOutcome,
        cx: &SendContext<'_, '_>,
    ) -> Interpretation {
        let (Some(settler), Some(answer)) = (self.settler.get(), response(sent)) else {
            return Interpretation::ByStatus;
        };
        let interpreted = settler.interpret(row, exchange, answer, &**cx.context.store).await;
        interpreted.unwrap_or(Interpretation::Open(NOT_READ))
    }

    /// Commits what became of an effect, with the steps of its settler. `false` if another process was faster.
    pub(super) async fn record(
        &self,
        moved: &EffectTransition,
        answer: Option<&TargetResponse>,
        cx: &SendContext<'_, '_>,
    ) -> Result<bool, StoreError> {
        let end = end_of(moved.status);
        let (Some(settler), Some(end)) = (self.settler.get(), end) else {
            return cx.commit(moved.plan(moved.parts(), cx)?).await;
        };
        let settlement = Settlement {
            effect: &moved.row,
            end,
            answer,
            reason: moved.reason,
            store: &**cx.context.store,
            clock: &**cx.context.clock,
        };
        match settled(&**settler, &settlement, moved, cx).await? {
            SettledPlan::Applied => Ok(true),
            SettledPlan::Passed => Ok(false),
            SettledPlan::Unsettled => {
                let alone = moved.unsettled();
                cx.commit(alone.plan(alone.parts(), cx)?).await
            }
        }
    }

    /// Settles an outcome that was recorded alone, from the stored answer (S2, S3 of settlers).
    pub(super) async fn settle_again(
        &self,
        row: &Row,
        cx: &SendContext<'_, '_>,
    ) -> Result<RowResult, StoreError> {
        let status = row.get_text(STATUS)?;
        let (Some(settler), Some(end)) = (self.settler.get(), end_of(status)) else {
            return Ok(RowResult::Failed(format!("{row} has no settler")));
        };
        let stored = stored_answer(row)?;
        let reason = row.get_optional_text(REASON)?;
        let settlement = Settlement {
            effect: row,
            end,
            answer: stored.as_ref(),
            reason,
            store: &**cx.context.store,
            clock: &**cx.context.clock,
        };
        let moved = self.resettled(row, end)?;
        Ok(match settled(&**settler, &settlement, &moved, cx).await? {
            SettledPlan::Applied => RowResult::Moved,
            SettledPlan::Passed => RowResult::Passed,
            SettledPlan::Unsettled => {
                let plan = self.put_off(row, UNSETTLED_PAUSE, cx)?;
                // The outcome does not matter: a row that was not put off is due as before.
                let _ = commit_known(&**cx.context.store, &plan, RetryPolicy::WORKER).await;
                RowResult::Failed(format!("{row}: its outcome could not be settled"))
            }
        })
    }

    /// The step that says that an outcome is settled: the row is due for what comes next.
    fn resettled(&self, row: &Row, end: EffectEnd) -> Result<EffectTransition, StoreError> {
        let due: Expr = match (end, self.keep, self.rules.reconcile) {
            (EffectEnd::Delivered, Some(keep), _) => now_plus(keep).into(),
            (EffectEnd::Uncertain, _, Some(reconcile)) => now_plus(reconcile.after).into(),
            _ => Value::Null.into(),
        };
        let step = Step::update(&self.table, row.key().iter().cloned())
            .guard(Guard::version(row.version()))
            .set(UNSETTLED_AT, Value::Null)
            .set(DUE_AT, due)
            .set(UPDATED_AT, now());
        let event = EventTemplate::named(self.event(SETTLED))
            .with(KEY, row.get_text(KEY)?)
            .with(STATUS, row.get_text(STATUS)?);
        EffectTransition::of(&self.name, row, step, event)
    }
}

/// Commits a transition of an effect with the steps of its settler, which is asked again if they are refused.
async fn settled(
    settler: &dyn Settler,
    settlement: &Settlement<'_>,
    moved: &EffectTransition,
    cx: &SendContext<'_, '_>,
) -> Result<SettledPlan, StoreError> {
    for _ in 0..SETTLE_TRIES {
        let Ok(parts) = settler.settle(settlement).await else { return Ok(SettledPlan::Unsettled) };
        let mut plan: PlanParts = moved.parts();
        let (tenant, at) = (moved.row.tenant(), cx.context.clock.now());
        if add_parts(&mut plan, tenant, at, parts).is_err() {
            return Ok(SettledPlan::Unsettled);
        }
        let wakeups = std::mem::take(&mut plan.wakeups);
        let Ok(plan) = moved.plan(plan, cx) else { return Ok(SettledPlan::Unsettled) };
        match commit_known(&**cx.context.store, &plan, RetryPolicy::WORKER).await? {
            Commit::Applied(_) => {
                wakeups.iter().for_each(|wakeup| cx.context.wakeups.notify(wakeup));
                return Ok(SettledPlan::Applied);
            }
            Commit::Refused(refused) if refused.step == 0 => return Ok(SettledPlan::Passed),
            Commit::Refused(_) => {}
            Commit::Fenced => return Ok(SettledPlan::Passed),
        }
    }
    Ok(SettledPlan::Unsettled)
}

/// What is known of an effect in a state; `None` in states in which the worker still sends it.
fn end_of(status: &str) -> Option<EffectEnd> {
    match status {
        DELIVERED => Some(EffectEnd::Delivered),
        PARKED => Some(EffectEnd::Parked),
        UNCERTAIN => Some(EffectEnd::Uncertain),
        _ => None,
    }
}

/// The last answer, as far as the row has it.
fn stored_answer(row: &Row) -> Result<Option<TargetResponse>, StoreError> {
    let Some(answer) = row.get_optional_text(ANSWER)? else { return Ok(None) };
    let status = row.get_optional_int(HTTP_STATUS)?.and_then(|status| u16::try_from(status).ok());
    Ok(Some(TargetResponse {
        status: status.unwrap_or(200),
        retry_after: None,
        body: answer.as_bytes().to_vec(),
        complete: true,
    }))
}
