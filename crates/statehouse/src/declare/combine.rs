//! Combining: concurrent callers of one hot row are judged one after the other in memory and written as one plan.
//!
//! Engines combine plans whose steps do not depend on what is stored. A write whose new value is a function of the old row
//! (the best bid, the next sequence number) has to read, judge and compare versions, so that of many concurrent callers one
//! succeeds and the others start again. A [`Combine`] says how a call is judged by a state in memory. The house then takes up
//! to [`Combine::most`] waiting callers of one subject, judges them in their order of arrival, and commits one plan: the
//! *seal*, which moves the hot row on under `version = seen`, and for each caller a row of its own, the *receipt*.
//!
//! - C1. A caller is applied once. *Its receipt is inserted by the plan that applies it*, under a key that the caller's id
//!   decides. A repetition finds the receipt: by the digest it is the same request, which gets the first answer, or another
//!   one, which is refused.
//! - C2. Callers are judged by the row as the plan finds it. *Guard of the seal:* `version = seen`. Rules that read the clock
//!   stand in the guard too, because the engine's clock decides; a plan has one case of such rules ([`Combine::pick`]).
//! - C3. A refusal is told only if it is exact: it was judged by a state that a plan of the same group has sealed, or that a
//!   strong read has just returned.
//!
//! The state is the decoded row, or a replica of a log at a sequence number: [`Combine::load`] gets the state that the house
//! knows from the group before and may catch up from it.

use std::any::Any;
use std::ops::Range;
use std::sync::Arc;

use async_trait::async_trait;
use statehouse_store::{
    Bug, Event, Guard, Label, Operand, Reason, Row, Step, StoreError, Table, Tenant, Time, Value, bug,
};

use super::table::TableSpec;
use crate::action::{
    ActionContext, Answer, Call, Code, Expected, PlanParts, Prepare, Prepared, Refusal, RefusedStep, Verdict,
};
use crate::house::digest;

/// The column of a receipt with the operation id of the plan that inserted it.
pub const APPLIED_BY: &str = "applied_by";
/// The column of a receipt with the digest of the request.
pub const DIGEST: &str = "digest";
/// The column of a receipt that says who called: a group has one event for all its callers.
pub const CALLED_BY: &str = "called_by";

/// A call within a group.
#[derive(Clone, Copy, Debug)]
pub struct CombinedCall<'a> {
    /// The call.
    pub call: &'a Call,
    /// The caller's id: the operation id, or the id in the inputs, which is the same if both are given.
    pub id: &'a str,
}

/// What becomes of a call.
#[derive(Clone, Debug)]
pub enum Judged {
    /// It is stored, whether it succeeds or not: [`Combine::answer`] reads the receipt.
    Stored(Box<StoredCall>),
    /// Nothing of its own is stored. The seal may count it.
    Refused(Refusal),
}

/// What is stored of a call.
#[derive(Clone, Debug)]
pub struct StoredCall {
    /// Inserts the caller's own row. The house adds [`APPLIED_BY`], [`DIGEST`] and [`CALLED_BY`].
    pub receipt: Step,
    /// Further rows of this caller. No other caller of the group may write them.
    pub others: Vec<Step>,
    /// Why the call did not succeed, if it did not: then a batch that it is a part of is refused, and nothing is stored.
    pub refusal: Option<Refusal>,
}

/// What is written about a group as a whole.
#[derive(Clone, Debug)]
pub struct Seal {
    /// The hot row first, then rows that several callers have changed, and the event.
    pub parts: PlanParts,
}

/// The seal that was refused before, by a condition that reads the clock.
#[derive(Clone, Copy, Debug)]
pub struct RefusedSeal<'a> {
    /// The case, as [`Combine::pick`] chose it.
    pub case: usize,
    /// The condition.
    pub guard: &'a Guard,
}

/// How calls of one action are judged and written together. All but `load` are pure.
#[async_trait]
pub trait Combine: Send + Sync + 'static {
    /// The hot row, decoded, or a replica at a sequence number.
    type State: Clone + Send + Sync + 'static;

    /// Callers in one plan at most. With 1, callers of one process still wait for one another instead of competing.
    fn most(&self) -> usize;

    /// The input by which a caller may give its id.
    fn id_input(&self) -> &'static str;

    /// The table and the key of the caller's own row. They do not depend on what changes in the state.
    fn receipt(
        &self,
        state: &Self::State,
        call: &Call,
        id: &str,
    ) -> Result<(Arc<Table>, Vec<Value>), Refusal>;

    /// Reads the state strongly. `known` is that of the group before; it may be stale.
    async fn load(
        &self,
        call: &Call,
        cx: &ActionContext<'_>,
        known: Option<&Self::State>,
    ) -> Result<Self::State, Refusal>;

    /// The hot row: for conditions of callers and rules of the resource.
    fn row<'s>(&self, state: &'s Self::State) -> &'s Row;

    /// Chooses the case, that is the rules with a clock under which the group is judged. `now_here` is only a hint: after the
    /// engine has refused a case, `refused` says by which condition.
    fn pick(&self, state: &Self::State, now_here: Time, refused: Option<RefusedSeal<'_>>) -> usize;

    /// Judges a call by the state, and changes the state by it.
    fn judge(&self, state: &mut Self::State, case: usize, call: &CombinedCall<'_>)
    -> Result<Judged, Refusal>;

    /// What is written about the group, whose calls were judged; `None` if no call was stored or counted. The first step is
    /// guarded by the version of `before` and the clock rules of the case.
    fn seal(
        &self,
        tenant: &Tenant,
        before: &Self::State,
        after: &Self::State,
        case: usize,
        now_here: Time,
    ) -> Result<Option<Seal>, Refusal>;

    /// The state after the seal was applied: `row` is the hot row as the plan left it.
    fn sealed(&self, after: Self::State, row: Row) -> Option<Self::State>;

    /// The answer to a call, by its receipt. It has to be the same whenever it is asked for.
    fn answer(&self, call: &Call, receipt: &Row) -> Result<Answer, Refusal>;

    /// The same by the event of a plan with this call only, which is part of a batch and was not refused.
    fn answer_alone(&self, call: &Call, event: &mut Event) -> Result<Answer, StoreError>;
}

/// A state whose type only its [`Combine`] knows.
pub(crate) type AnyState = Arc<dyn Any + Send + Sync>;

/// A group that was judged.
pub(crate) struct ComposedGroup {
    /// One for each call.
    pub(crate) calls: Vec<ComposedCall>,
    /// Nothing if nothing has to be written.
    pub(crate) parts: Option<PlanParts>,
    /// How many of the steps are the seal's: the first ones.
    pub(crate) seal_steps: usize,
    /// The state after the plan.
    pub(crate) after: AnyState,
}

/// A call of a group that was judged.
pub(crate) enum ComposedCall {
    /// Its steps, of which the first one inserts the receipt, and why it did not succeed, if it did not.
    Stored(Range<usize>, Option<Refusal>),
    Refused(Refusal),
}

/// A [`Combine`] without its type: what the house runs.
#[async_trait]
pub(crate) trait Combiner: Send + Sync {
    fn most(&self) -> usize;
    fn id_input(&self) -> &'static str;
    async fn load(
        &self,
        call: &Call,
        cx: &ActionContext<'_>,
        known: Option<&AnyState>,
    ) -> Result<AnyState, Refusal>;
    fn row<'s>(&self, state: &'s AnyState) -> Result<&'s Row, Bug>;
    fn pick(&self, state: &AnyState, now_here: Time, refused: Option<RefusedSeal<'_>>) -> Result<usize, Bug>;
    fn compose(&self, group: &CallGroup<'_>) -> Result<ComposedGroup, Refusal>;
    fn sealed(&self, after: &AnyState, row: Row) -> Result<Option<AnyState>, Bug>;
    fn answer(&self, call: &Call, receipt: &Row) -> Result<Answer, Refusal>;
}

/// A group to be judged.
pub(crate) struct CallGroup<'a> {
    pub(crate) tenant: &'a Tenant,
    /// The operation id of the plan.
    pub(crate) operation: &'a str,
    pub(crate) state: &'a AnyState,
    pub(crate) case: usize,
    /// Each call, or why it is refused before it is judged.
    pub(crate) calls: Vec<Result<CombinedCall<'a>, Refusal>>,
    pub(crate) now_here: Time,
}

/// A [`Combine`] as an action: groups are run by the house, a call in a batch by itself.
pub(crate) struct Combining<R>(pub(crate) R);

/// What tells one request from another under the same id.
pub(crate) fn request_digest(call: &Call) -> String {
    digest(&format!("{:?} {}", call.key, call.input.to_json()))
}

fn typed<S: 'static>(state: &AnyState) -> Result<&S, Bug> {
    state.downcast_ref().ok_or_else(|| bug!("a combined action got the state of another one"))
}

#[async_trait]
impl<R: Combine> Combiner for Combining<R> {
    fn most(&self) -> usize {
        self.0.most().max(1)
    }

    fn id_input(&self) -> &'static str {
        self.0.id_input()
    }

    async fn load(
        &self,
        call: &Call,
        cx: &ActionContext<'_>,
        known: Option<&AnyState>,
    ) -> Result<AnyState, Refusal> {
        let known = known.map(typed::<R::State>).transpose()?;
        Ok(Arc::new(self.0.load(call, cx, known).await?))
    }

    fn row<'s>(&self, state: &'s AnyState) -> Result<&'s Row, Bug> {
        Ok(self.0.row(typed(state)?))
    }

    fn pick(&self, state: &AnyState, now_here: Time, refused: Option<RefusedSeal<'_>>) -> Result<usize, Bug> {
        Ok(self.0.pick(typed(state)?, now_here, refused))
    }

    fn compose(&self, group: &CallGroup<'_>) -> Result<ComposedGroup, Refusal> {
        let before = typed::<R::State>(group.state)?;
        let mut after = before.clone();
        let judged = group.calls.iter().map(|call| match call {
            Ok(call) => Ok((Some(*call), self.0.judge(&mut after, group.case, call)?)),
            Err(refusal) => Ok((None, Judged::Refused(refusal.clone()))),
        });
        let judged = judged.collect::<Result<Vec<_>, Refusal>>()?;
        let seal = self.0.seal(group.tenant, before, &after, group.case, group.now_here)?;
        let mut parts = seal.map(|seal| seal.parts);
        let seal_steps = parts.as_ref().map_or(0, |parts| parts.steps.len());
        let mut calls = Vec::with_capacity(judged.len());
        for (call, judged) in judged {
            calls.push(match (judged, &mut parts, call) {
                (Judged::Refused(refusal), ..) => ComposedCall::Refused(refusal),
                (Judged::Stored(stored), Some(parts), Some(call)) => {
                    let StoredCall { receipt, others, refusal } = *stored;
                    let first = parts.steps.len();
                    let receipt = receipt
                        .set(APPLIED_BY, group.operation)
                        .set(DIGEST, request_digest(call.call))
                        .set(CALLED_BY, call.call.actor.as_deref().map_or(Value::Null, Value::from))
                        .label(RECEIPT);
                    parts.steps.push(receipt);
                    parts.steps.extend(others);
                    ComposedCall::Stored(first..parts.steps.len(), refusal)
                }
                (Judged::Stored(_), ..) => {
                    return Err(bug!("a combined call is stored by a plan without a seal").into());
                }
            });
        }
        Ok(ComposedGroup { calls, parts, seal_steps, after: Arc::new(after) })
    }

    fn sealed(&self, after: &AnyState, row: Row) -> Result<Option<AnyState>, Bug> {
        let after = typed::<R::State>(after)?.clone();
        Ok(self.0.sealed(after, row).map(|state| Arc::new(state) as AnyState))
    }

    fn answer(&self, call: &Call, receipt: &Row) -> Result<Answer, Refusal> {
        self.0.answer(call, receipt)
    }
}

/// The label of the step that inserts a receipt.
const RECEIPT: &str = "receipt";
/// How the label of a seal's first step ends: with the number of its case.
const CASE: &str = "#case";

/// What a receipt says to a call under its id: the first answer, or that the id was used for another request.
pub(crate) fn repeated(
    combiner: &dyn Combiner,
    call: &Call,
    id: &str,
    receipt: &Row,
) -> Result<Answer, Refusal> {
    if receipt.get_text(DIGEST)? != request_digest(call) {
        let message = format!("id {id} was used for another request; use a new id");
        return Err(Refusal::new(Code::OperationReused, message));
    }
    combiner.answer(call, receipt)
}

/// Whether a condition reads the clock: then the row is as it was seen, and another case may fit.
pub(crate) fn clock_guard(reason: &Reason) -> Option<&Guard> {
    let Reason::Guard { guard, .. } = reason else { return None };
    let mut reads = false;
    guard.leaves(&mut |leaf| {
        if let Guard::Compare(left, _, right) = leaf {
            let is_now = |operand: &Operand| matches!(operand, Operand::Now { .. });
            reads |= is_now(left) || is_now(right);
        }
    });
    reads.then_some(&**guard)
}

#[async_trait]
impl<R: Combine> Prepare for Combining<R> {
    /// A group of one, for a batch and for `explain`.
    async fn prepare(&self, call: &Call, cx: &ActionContext<'_>) -> Result<Prepared, Refusal> {
        let id = call.input.text(self.0.id_input()).unwrap_or(cx.operation);
        let state = Combiner::load(self, call, cx, None).await?;
        // The insert of the receipt recognizes a repetition, so that the first attempt need not read it.
        if cx.attempt > 0 {
            let (table, key) = self.0.receipt(typed(&state)?, call, id)?;
            if let Some(receipt) = cx.row(&table, &call.tenant, key).await? {
                return repeated(self, call, id, &receipt).map(Prepared::Unchanged);
            }
        }
        let now_here = cx.clock.now();
        let label = cx.refused.and_then(|last| last.label.as_ref()).map_or("", Label::as_str);
        let last_case = label.rsplit_once(CASE).and_then(|(_, case)| case.parse().ok());
        let row = self.row(&state)?;
        let version = row.version();
        if let Some(Expected::Version(seen)) = call.expected
            && seen != version
        {
            let message =
                format!("the row is at version {version}, not {seen}: read it again and decide anew");
            return Err(Refusal::new(Code::VersionConflict, message).at_version(Some(row)));
        }
        let refused = cx.refused.filter(|last| last.row.as_ref().is_some_and(|row| row.version() == version));
        let refused = refused
            .and_then(|last| Some(RefusedSeal { case: last_case?, guard: clock_guard(&last.reason)? }));
        let case = self.pick(&state, now_here, refused)?;
        let calls = vec![Ok(CombinedCall { call, id })];
        let group =
            CallGroup { tenant: &call.tenant, operation: cx.operation, state: &state, case, calls, now_here };
        let ComposedGroup { calls, parts, .. } = self.compose(&group)?;
        if let Some(ComposedCall::Refused(refusal) | ComposedCall::Stored(_, Some(refusal))) =
            calls.into_iter().next()
        {
            return Err(refusal);
        }
        let mut parts = parts.ok_or_else(|| bug!("a combined call has nothing to write"))?;
        if let Some(seal) = parts.steps.first_mut() {
            let label = seal.label.as_ref().map_or("", Label::as_str);
            *seal = seal.clone().label(format!("{label}{CASE}{case}"));
        }
        Ok(parts.into())
    }

    fn refused(&self, _: &Call, refused: &RefusedStep<'_>) -> Verdict {
        match refused.reason {
            Reason::Overflow { .. } | Reason::Null { .. } => refused.standard("the row"),
            _ => Verdict::Retry,
        }
    }
}

impl TableSpec {
    /// The columns by which a repetition of a combined call is recognized ([`super::combine`]).
    #[must_use]
    pub fn receipt(self) -> TableSpec {
        let spec = self.text(APPLIED_BY).hidden().immutable().text(DIGEST).hidden().immutable();
        spec.text(CALLED_BY).null().hidden().immutable()
    }
}
