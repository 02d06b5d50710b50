//! One group of combined calls: judged, committed, and each caller told.

use statehouse_store::{
    Address, Applied, Commit, Consistency, Entry, Guard, Plan, Reason, Record, Refused, Resolution, Row,
    StoreError, Time, bug,
};

use super::{COMBINED_OPERATIONS, GroupMember, Leader};
use crate::action::{Answer, Call, Code, PlanParts, Refusal, RelatedEvent};
use crate::allow::judge::GovernedCall;
use crate::cache::ReadToken;
use crate::declare::combine::{
    APPLIED_BY, AnyState, CallGroup, CombinedCall, Combiner, ComposedCall, ComposedGroup, RefusedSeal,
    clock_guard, repeated,
};
use crate::house::write::BACKOFF;
use crate::house::{CONFLICTS_MAX, House, ValidatedCall, with_subject};
use crate::worker::Wakeup;

/// How often the case of a plan is chosen anew while its row stays the same.
const CASES_MAX: u32 = 8;

/// A group under way.
pub(super) struct GroupRun<'r, 'q> {
    house: &'r House,
    /// The leader's call, which has the action of all of them.
    one: &'r ValidatedCall<'r>,
    combiner: &'r dyn Combiner,
    leader: &'r mut Leader<'q>,
    known: Option<AnyState>,
    /// Whether `known` is as a strong read of this group returned it.
    is_fresh: bool,
    /// The clock rule by which the engine refused a case, for the row as it is known.
    refused: Option<(usize, Guard)>,
    conflicts: u32,
    cases: u32,
}

/// A plan that was committed, and what it is made of.
struct CommittedGroup {
    composed: ComposedGroup,
    /// The member of each call.
    members: Vec<usize>,
    plan: Plan,
    case: usize,
    state: AnyState,
    wakeups: Vec<Wakeup>,
}

impl<'r, 'q> GroupRun<'r, 'q> {
    pub(super) fn of(
        house: &'r House,
        one: &'r ValidatedCall<'r>,
        combiner: &'r dyn Combiner,
        leader: &'r mut Leader<'q>,
    ) -> GroupRun<'r, 'q> {
        let known = leader.queue.lock().known.take();
        GroupRun {
            house,
            one,
            combiner,
            leader,
            known,
            is_fresh: false,
            refused: None,
            conflicts: 0,
            cases: 0,
        }
    }

    /// Runs until every caller of the group was told.
    pub(super) async fn run(mut self) {
        self.resolve_doubts().await;
        while !self.leader.open().is_empty() {
            if let Err(refusal) = self.turn().await {
                self.leader.settle_open(&refusal);
            }
        }
        self.leader.queue.lock().known = self.known.take();
    }

    fn member(&self, index: usize) -> Result<&GroupMember, Refusal> {
        self.leader.group.get(index).ok_or_else(|| bug!("a group has no member {index}").into())
    }

    /// Q2: plans that may yet apply a call of the group are resolved first.
    async fn resolve_doubts(&mut self) {
        let tenant = self.one.call.tenant.clone();
        let mut resolved: Vec<(String, Result<Resolution, StoreError>)> = Vec::new();
        for index in self.leader.open() {
            let Ok(member) = self.member(index) else { continue };
            let queued = &member.queued;
            let remembered = || self.house.unknown_outcomes.plan_of(&tenant, &queued.id);
            let Some(plan) = queued.doubt.clone().or_else(remembered) else { continue };
            let known = resolved.iter().find(|(operation, _)| *operation == plan);
            let why = match known {
                Some((_, result)) => result.as_ref().err().map(ToString::to_string),
                None => {
                    let result = self.house.store.resolve(&tenant, &plan).await;
                    let why = result.as_ref().err().map(ToString::to_string);
                    resolved.push((plan.clone(), result));
                    why
                }
            };
            if let Some(why) = why {
                self.tell_unknown(index, &plan, &why);
            }
        }
    }

    /// Tells a caller that its call may have been applied by a plan, or may yet be.
    fn tell_unknown(&mut self, index: usize, plan: &str, why: &str) {
        let Ok(member) = self.member(index) else { return };
        let (id, is_given) = (member.queued.id.clone(), member.queued.is_given);
        if is_given {
            self.house.unknown_outcomes.add_within(&self.one.call.tenant, &id, plan);
        }
        self.leader.settle(index, Err(StoreError::unknown(id, why).into()));
    }

    /// The state by which calls are judged.
    async fn state(&mut self) -> Result<AnyState, Refusal> {
        if let Some(state) = &self.known {
            return Ok(state.clone());
        }
        let state = self.combiner.load(&self.one.call, &self.house.context(), None).await?;
        self.is_fresh = true;
        self.refused = None;
        self.known = Some(state.clone());
        Ok(state)
    }

    /// Judges the calls that are open and commits them, once.
    async fn turn(&mut self) -> Result<(), Refusal> {
        let state = self.state().await?;
        let operation = self.house.ids.next();
        let now_here = self.house.clock.now();
        let refused = self.refused.as_ref().map(|(case, guard)| RefusedSeal { case: *case, guard });
        let case = self.combiner.pick(&state, now_here, refused)?;
        let members = self.leader.open();
        let row = self.combiner.row(&state)?;
        let mut calls = Vec::with_capacity(members.len());
        for index in &members {
            let queued = &self.member(*index)?.queued;
            let call = CombinedCall { call: &queued.call, id: &queued.id };
            calls.push(self.one.allowed(&queued.call, row, now_here).map(|()| call));
        }
        let tenant = &self.one.call.tenant;
        let group = CallGroup { tenant, operation: &operation, state: &state, case, calls, now_here };
        let mut composed = self.combiner.compose(&group)?;
        let Some(mut parts) = composed.parts.take() else {
            self.tell_refusals(composed, &members);
            return Ok(());
        };
        let wakeups = std::mem::take(&mut parts.wakeups);
        let plan = match self.plan(&operation, parts, &composed, &members) {
            Ok(plan) => plan,
            // Fewer calls may fit.
            Err(refusal) => return if self.leader.halve() { Ok(()) } else { Err(refusal) },
        };
        self.leader.in_flight = Some(operation);
        let mut in_doubt = false;
        let outcome = self.house.commit_until_known(&plan, &mut in_doubt).await;
        let committed = CommittedGroup { composed, members, plan, case, state, wakeups };
        self.decide(&committed, outcome, in_doubt).await
    }

    /// Tells refusals of calls that leave nothing behind, if the state is not that of an earlier group (C3).
    fn tell_refusals(&mut self, composed: ComposedGroup, members: &[usize]) {
        if !self.is_fresh {
            self.known = None;
            return;
        }
        for (index, call) in members.iter().zip(composed.calls) {
            match call {
                ComposedCall::Refused(refusal) => self.leader.settle(*index, Err(refusal)),
                ComposedCall::Stored(..) => {
                    let bug = bug!("a combined call is stored by no plan");
                    self.leader.settle(*index, Err(bug.into()));
                }
            }
        }
    }

    /// One plan of the group.
    fn plan(
        &self,
        operation: &str,
        parts: PlanParts,
        composed: &ComposedGroup,
        members: &[usize],
    ) -> Result<Plan, Refusal> {
        let PlanParts { subject, steps, event, related, .. } = parts;
        let (mut stored, mut ids) = (Vec::new(), Vec::new());
        for (index, call) in members.iter().zip(&composed.calls) {
            let queued = &self.member(*index)?.queued;
            if let ComposedCall::Stored(_, refusal) = call {
                stored.push(queued);
                ids.extend(refusal.is_none().then_some(queued.id.as_str()));
            }
        }
        // Receipts say who called. The event does if it was one caller.
        let actor = stored.first().and_then(|queued| queued.call.actor.as_deref());
        let actor = actor.filter(|actor| stored.iter().all(|q| q.call.actor.as_deref() == Some(actor)));
        let mut entry = Entry::about(self.one.resource.name.as_str(), subject);
        entry = entry.event(event.with(COMBINED_OPERATIONS, ids).by(actor));
        for RelatedEvent { resource, key, event } in related {
            let event = with_subject(event, &resource, &key, &entry).by(actor);
            entry = entry.event(event);
        }
        Ok(Plan::of(&self.one.call.tenant, operation).steps(steps).log(entry).build()?)
    }

    async fn decide(
        &mut self,
        committed: &CommittedGroup,
        outcome: Result<Commit, Refusal>,
        in_doubt: bool,
    ) -> Result<(), Refusal> {
        let operation = committed.plan.operation().to_owned();
        let applied = match outcome {
            Ok(Commit::Applied(applied)) => applied,
            Ok(Commit::Refused(refused)) if in_doubt => {
                // Q3: the attempt whose answer was lost may yet be applied.
                match self.house.store.resolve(&self.one.call.tenant, &operation).await {
                    Ok(Resolution::Applied(record)) => {
                        Applied { record: Some(record), rows: Vec::new(), repeated: true }
                    }
                    Ok(Resolution::Aborted) => return self.refused(committed, refused).await,
                    Err(error) => return self.unknown(committed, &error.to_string()),
                }
            }
            Ok(Commit::Refused(refused)) => return self.refused(committed, refused).await,
            Ok(Commit::Fenced) => {
                // Only a later leader fences a plan of this one.
                self.leader.in_flight = None;
                return self.conflict().await;
            }
            Err(refusal) if refusal.code == Code::OutcomeUnknown => {
                return self.unknown(committed, &refusal.message);
            }
            Err(refusal) if in_doubt => return self.unknown(committed, &refusal.message),
            Err(refusal) => {
                self.leader.in_flight = None;
                self.known = None;
                return Err(refusal);
            }
        };
        let told = self.applied(committed, applied).await;
        self.leader.in_flight = None;
        told
    }

    fn unknown(&mut self, committed: &CommittedGroup, why: &str) -> Result<(), Refusal> {
        self.leader.in_flight = None;
        self.known = None;
        for index in &committed.members {
            self.tell_unknown(*index, committed.plan.operation(), why);
        }
        Ok(())
    }

    /// Tells what the receipts say.
    async fn applied(&mut self, committed: &CommittedGroup, applied: Applied) -> Result<(), Refusal> {
        let Applied { record, mut rows, .. } = applied;
        let record: Record = record.ok_or_else(|| bug!("a group left no record in the log"))?;
        let token = ReadToken::text_of(&record);
        committed.wakeups.iter().for_each(|wakeup| self.house.wakeups.notify(wakeup));
        self.known = match rows.first_mut().and_then(Option::take) {
            Some(row) => self.combiner.sealed(&committed.composed.after, row)?,
            None => None,
        };
        (self.is_fresh, self.refused) = (false, None);
        if rows.is_empty() {
            let addresses: Vec<Address> = committed.plan.addresses().collect();
            // What was applied is never reported as a failure.
            match self.house.store.get(&addresses, Consistency::Strong).await {
                Ok(read) => rows = read,
                Err(error) => return self.unknown(committed, &error.to_string()),
            }
        }
        for (index, call) in committed.members.iter().zip(&committed.composed.calls) {
            let result = match call {
                ComposedCall::Refused(refusal) => Err(refusal.clone()),
                ComposedCall::Stored(steps, _) => {
                    let receipt: Option<&Row> = rows.get(steps.start).and_then(Option::as_ref);
                    let call = &self.member(*index)?.queued.call;
                    match receipt {
                        Some(receipt) => self.combiner.answer(call, receipt),
                        None => Err(bug!("the receipt of a combined call is missing").into()),
                    }
                }
            };
            let told = result.map(|answer| Answer { token: Some(token.clone()), ..answer });
            self.leader.settle(*index, told);
        }
        Ok(())
    }

    /// The group is judged again: by another case, without a caller who was applied before, or by the row as it is now.
    async fn refused(&mut self, committed: &CommittedGroup, refused: Refused) -> Result<(), Refusal> {
        self.leader.in_flight = None;
        let Refused { step, reason, current } = refused;
        if step < committed.composed.seal_steps {
            let Some(guard) = clock_guard(&reason) else { return self.conflict().await };
            self.known = Some(committed.state.clone());
            self.refused = Some((committed.case, guard.clone()));
            self.cases += 1;
            if self.cases > CASES_MAX {
                return self.conflict().await;
            }
            return Ok(());
        }
        let owner = committed.composed.calls.iter().position(
            |call| matches!(call, ComposedCall::Stored(steps, _) if steps.start == step && reason == Reason::Present),
        );
        let Some(index) = owner.and_then(|owner| committed.members.get(owner).copied()) else {
            return self.conflict().await;
        };
        let receipt = match current {
            Some(row) => row,
            None => {
                let address = committed.plan.addresses().nth(step);
                let rows = self.house.store.get(address.as_slice(), Consistency::Strong).await?;
                match rows.into_iter().next().flatten() {
                    Some(row) => row,
                    // It was deleted in between.
                    None => return self.conflict().await,
                }
            }
        };
        let queued = &self.member(index)?.queued;
        let told = repeated(self.combiner, &queued.call, &queued.id, &receipt);
        let told = match told {
            Ok(answer) => self.with_token(answer, &receipt).await,
            Err(refusal) => Err(refusal),
        };
        self.leader.settle(index, told);
        Ok(())
    }

    /// The answer to a repetition, with the token of the plan that applied it, if the log still has that.
    async fn with_token(&self, answer: Answer, receipt: &Row) -> Result<Answer, Refusal> {
        let plan = receipt.get_text(APPLIED_BY)?;
        let record = self.house.store.find_operation(&self.one.call.tenant, plan).await?;
        Ok(Answer { token: record.as_ref().map(ReadToken::text_of), ..answer })
    }

    /// Another writer was faster.
    async fn conflict(&mut self) -> Result<(), Refusal> {
        (self.known, self.refused, self.cases) = (None, None, 0);
        if self.conflicts >= CONFLICTS_MAX {
            let message = "too many callers write this row at once; it was tried several times";
            return Err(Refusal::new(Code::Contended, message));
        }
        // The first attempt may have relied on an older state, so there need not have been a race.
        if self.conflicts > 0 {
            self.house.clock.sleep(BACKOFF.saturating_mul(1 << self.conflicts.min(8))).await;
        }
        self.conflicts += 1;
        Ok(())
    }
}

impl ValidatedCall<'_> {
    /// Judges another call of the same action by the rules of the resource, which the seal makes exact: it is guarded by the
    /// version of this row.
    fn allowed(&self, call: &Call, row: &Row, now: Time) -> Result<(), Refusal> {
        match GovernedCall::of(self.resource, self.action, call) {
            Some(governed) if governed.named_row().is_some() => governed.judge_row(Some(row), now),
            _ => Ok(()),
        }
    }
}
