//! The write path: from validated calls to one committed plan (H1 to H5).

use std::time::Duration;

use statehouse_store::{
    Backoff, Commit, Plan, Refused, Resolution, RetryPolicy, Step, StoreError, Tenant, Time, commit_reported,
};

use super::assemble::{Assembled, PlannedCalls, answers, assemble, fenced};
use super::authorize::masked;
use super::constrain;
use super::{ActionRef, CONFLICTS_MAX, CallArguments, House, Operation, Request, ValidatedCall, validate};
use crate::action::{
    ActionContext, ActionHandler, Answer, Code, LastRefusal, Prepared, Refusal, RefusedStep, Verdict,
};
use crate::allow::Principal;
use crate::lock::{self, HeldLock, LockOutcome, LockRequest};
use crate::resource;

/// How often a plan is committed whose outcome stays unknown.
const COMMIT_ATTEMPTS: u32 = 5;
/// The first pause of a backoff; it doubles with each attempt.
pub(super) const BACKOFF: Duration = Duration::from_millis(5);
/// How often the pause between two attempts to take a lock is doubled.
const LOCK_DOUBLINGS: u32 = 4;

/// The result of one attempt to write.
enum WriteAttempt {
    /// It was applied, now or before.
    Written(Vec<Answer>),
    /// Nothing had to be written.
    Unchanged(Vec<Answer>),
    /// The store refused a step of this call.
    Conflict(usize, Verdict, LastRefusal),
}

/// What was written.
struct WriteResult {
    answers: Vec<Answer>,
    /// Whether nothing had to be written.
    unchanged: bool,
}

/// The state of a write over its attempts.
struct RetryState {
    conflicts: u32,
    conflicts_max: u32,
    lock_waits: u32,
    waited: Duration,
    /// Whether a response of the store was lost, so that a plan of this operation may still be applied.
    in_doubt: bool,
    /// The call whose step was refused last, and the step.
    refused: Option<(usize, LastRefusal)>,
}

/// Under which id a write runs.
struct WriteId<'a> {
    tenant: &'a Tenant,
    id: &'a str,
    fingerprint: &'a str,
}

impl House {
    pub(super) async fn write_batch(
        &self,
        caller: &Principal,
        calls: Vec<(ActionRef, CallArguments)>,
        operation: Operation,
        conflicts_max: u32,
    ) -> Result<Vec<Answer>, Refusal> {
        let mut validated = Vec::with_capacity(calls.len());
        for (index, (action, arguments)) in calls.into_iter().enumerate() {
            let call = self.validated_write(caller, action, arguments);
            let call = call.map_err(|refusal| refusal.of_call(index))?;
            let allowed = self.authorize(call.resource, call.action, &call.call).await;
            allowed.map_err(|refusal| refusal.of_call(index))?;
            validated.push(call);
        }
        self.write(&caller.tenant, &validated, operation, conflicts_max).await
    }

    fn validated_write(
        &self,
        caller: &Principal,
        action: ActionRef,
        arguments: CallArguments,
    ) -> Result<ValidatedCall<'_>, Refusal> {
        let (resource, action) = self.resolve(action)?;
        let ActionHandler::Write(write) = &action.handler else {
            let name = format!("{}.{}", resource.name, action.name);
            let why = format!("{name} is not a single write; a batch takes only those");
            return Err(Refusal::new(Code::InvalidInput, why));
        };
        let call = validate(resource, action, caller, arguments)?;
        Ok(self.validated(resource, action, write, call))
    }

    /// The plan that a call would commit now, for `explain`; `None` if nothing would have to be written.
    pub async fn plan(&self, tenant: &Tenant, request: Request) -> Result<Option<Plan>, Refusal> {
        let (action, arguments) = self.split(request)?;
        let calls = [self.validated_write(&tenant.into(), action, arguments)?];
        let state = RetryState::new(CONFLICTS_MAX, false);
        let operation = self.ids.next();
        let prepared = self.prepare_calls(&calls, &operation, &state).await?;
        let locks = lock_requests(&calls)?;
        let locks: Vec<HeldLock> = locks.iter().map(|(_, request)| HeldLock::imagined(request)).collect();
        match assemble(tenant, &calls, prepared, &locks, &operation, "")? {
            Assembled::Plan(plan, _) => Ok(Some(plan)),
            Assembled::Unchanged(_) => Ok(None),
        }
    }

    /// Writes calls as one plan under one operation id.
    pub(super) async fn write(
        &self,
        tenant: &Tenant,
        calls: &[ValidatedCall<'_>],
        operation: Operation,
        conflicts_max: u32,
    ) -> Result<Vec<Answer>, Refusal> {
        let Operation { id, fingerprint } = operation;
        let given = id.is_some();
        let id = id.unwrap_or_else(|| self.ids.next());
        let write = WriteId { tenant, id: &id, fingerprint: &fingerprint };
        // H3. The commit answers a repetition from its record. Calls that act before the commit must not act twice, so
        // the record is looked up first.
        let acts_first = calls.iter().any(ValidatedCall::acts_before_commit);
        if given
            && acts_first
            && let Some(repeated) = self.repeated(calls, &write).await?
        {
            return Ok(repeated);
        }
        let mut state = RetryState::new(conflicts_max, given && self.unknown_outcomes.has(tenant, &id));
        let result = match self.write_with_retries(calls, &write, &mut state).await {
            Ok(WriteResult { answers, unchanged: false }) => Ok(answers),
            // The first call under this id may have changed something.
            Ok(WriteResult { answers, unchanged: true }) if given && !acts_first => {
                Ok(self.repeated(calls, &write).await?.unwrap_or(answers))
            }
            Ok(WriteResult { answers, .. }) => Ok(answers),
            Err(refusal) if state.in_doubt => self.resolve_unknown(calls, &write, given, refusal).await,
            Err(refusal) if given && !acts_first && refusal.code != Code::OutcomeUnknown => {
                self.repeated(calls, &write).await?.ok_or(refusal)
            }
            Err(refusal) => Err(refusal),
        };
        if given && matches!(&result, Err(refusal) if refusal.code == Code::OutcomeUnknown) {
            self.unknown_outcomes.add(tenant, &id);
        }
        result.map_err(|refusal| masked(calls, refusal))
    }

    /// The answers of an operation that was applied before (H3).
    async fn repeated(
        &self,
        calls: &[ValidatedCall<'_>],
        write: &WriteId<'_>,
    ) -> Result<Option<Vec<Answer>>, Refusal> {
        match self.store.find_operation(write.tenant, write.id).await? {
            Some(record) => answers(calls, record, write.fingerprint).map(Some),
            None => Ok(None),
        }
    }

    /// What the caller is told of a refusal after a lost response (H1).
    async fn resolve_unknown(
        &self,
        calls: &[ValidatedCall<'_>],
        write: &WriteId<'_>,
        given: bool,
        refusal: Refusal,
    ) -> Result<Vec<Answer>, Refusal> {
        let unknown = |why: String| {
            let call = refusal.call;
            Refusal { call, ..StoreError::unknown(write.id, why).into() }
        };
        if refusal.code == Code::OutcomeUnknown {
            return Err(refusal);
        }
        // Fencing the operation would make the id useless to a caller that is told to retry under it.
        if given && refusal.code.is_passing() {
            return Err(unknown(format!("its answer was lost, and then: {}", refusal.message)));
        }
        match self.store.resolve(write.tenant, write.id).await {
            Ok(Resolution::Applied(record)) => answers(calls, record, write.fingerprint),
            Ok(Resolution::Aborted) => Err(refusal),
            Err(error) => Err(unknown(format!("it was refused after a lost answer, and {error}"))),
        }
    }

    /// Tries to write until it is done, refused, or out of attempts.
    async fn write_with_retries(
        &self,
        calls: &[ValidatedCall<'_>],
        write: &WriteId<'_>,
        state: &mut RetryState,
    ) -> Result<WriteResult, Refusal> {
        loop {
            let locks = self.take_locks(calls, write, state).await?;
            let attempt = self.try_once(calls, &locks, write, state).await;
            // A plan whose outcome is unknown may yet be applied under its locks. If it is not, the next attempt under
            // this id holds them.
            let keeps = match &attempt {
                Ok(attempt) => matches!(attempt, WriteAttempt::Written(_)),
                Err(refusal) => refusal.code == Code::OutcomeUnknown,
            };
            if !keeps {
                self.release_locks(write, &locks).await;
            }
            match attempt? {
                WriteAttempt::Written(answers) => return Ok(WriteResult { answers, unchanged: false }),
                WriteAttempt::Unchanged(answers) => return Ok(WriteResult { answers, unchanged: true }),
                WriteAttempt::Conflict(index, verdict, refused) => {
                    state.refused = Some((index, refused));
                    self.back_off(verdict, state).await.map_err(|refusal| refusal.of_call(index))?;
                }
            }
        }
    }

    async fn prepare_calls(
        &self,
        calls: &[ValidatedCall<'_>],
        operation: &str,
        state: &RetryState,
    ) -> Result<Vec<Prepared>, Refusal> {
        let mut prepared = Vec::with_capacity(calls.len());
        for (index, one) in calls.iter().enumerate() {
            let refused =
                state.refused.as_ref().filter(|(call, _)| *call == index).map(|(_, refused)| refused);
            let cx = ActionContext { operation, attempt: state.conflicts, refused, ..self.context() };
            let done = one.write.prepare.prepare(&one.call, &cx).await;
            let done = done.and_then(|done| one.with_condition(done));
            let done = done.and_then(|prepared| match one.governed() {
                Some(governed) => governed.restrict(prepared, self.clock.now()),
                None => Ok(prepared),
            });
            let done = match done {
                Ok(done) => constrain::complete(done, &one.call, &cx).await,
                Err(refusal) => Err(refusal),
            };
            prepared.push(done.map_err(|refusal| refusal.of_call(index))?);
        }
        if calls.len() > 1 {
            constrain::settle_batch(&mut prepared, &self.resources)?;
        }
        Ok(prepared)
    }

    /// Prepares the calls and commits them, once.
    async fn try_once(
        &self,
        calls: &[ValidatedCall<'_>],
        locks: &[HeldLock],
        write: &WriteId<'_>,
        state: &mut RetryState,
    ) -> Result<WriteAttempt, Refusal> {
        let prepared = self.prepare_calls(calls, write.id, state).await?;
        let assembled = assemble(write.tenant, calls, prepared, locks, write.id, write.fingerprint)?;
        let (plan, planned) = match assembled {
            Assembled::Plan(plan, planned) => (plan, planned),
            Assembled::Unchanged(answers) => return Ok(WriteAttempt::Unchanged(answers)),
        };
        match self.commit_until_known(&plan, &mut state.in_doubt).await? {
            Commit::Applied(applied) => {
                let record = applied
                    .record
                    .ok_or_else(|| Refusal::new(Code::Internal, "a write left no record in the log"))?;
                planned.wakeups.iter().for_each(|wakeup| self.wakeups.notify(wakeup));
                for waiting in &planned.notify {
                    waiting.send_modify(|count| *count = count.wrapping_add(1));
                }
                answers(calls, record, write.fingerprint).map(WriteAttempt::Written)
            }
            Commit::Fenced => Err(fenced(write.id)),
            Commit::Refused(refused) => {
                Ok(attribute_refusal(calls, &plan, &planned, refused, self.clock.now()))
            }
        }
    }

    /// Pauses before the next attempt, or returns why there is none.
    async fn back_off(&self, verdict: Verdict, state: &mut RetryState) -> Result<(), Refusal> {
        match verdict {
            Verdict::Refuse(refusal) => Err(refusal),
            Verdict::Wait => self.wait_for_lock(state).await,
            Verdict::Retry if state.conflicts < state.conflicts_max => {
                // The first attempt may have skipped its reads, so there need not have been a race.
                if state.conflicts > 0 {
                    self.clock.sleep(BACKOFF.saturating_mul(1 << state.conflicts.min(8))).await;
                }
                state.conflicts += 1;
                Ok(())
            }
            Verdict::Retry => {
                let message = "too many callers write this row at once; it was tried several times";
                Err(Refusal::new(Code::Contended, message))
            }
        }
    }

    /// Waits for a lock that another operation holds.
    async fn wait_for_lock(&self, state: &mut RetryState) -> Result<(), Refusal> {
        if state.waited >= lock::WAIT_MAX {
            let message =
                format!("the row is locked by another operation (waited {:?}); retry", state.waited);
            return Err(Refusal::new(Code::Contended, message));
        }
        let pause = BACKOFF.saturating_mul(1 << state.lock_waits.min(LOCK_DOUBLINGS));
        self.clock.sleep(pause).await;
        state.lock_waits += 1;
        state.waited += pause;
        Ok(())
    }

    /// Takes the locks that the calls need (H5).
    async fn take_locks(
        &self,
        calls: &[ValidatedCall<'_>],
        write: &WriteId<'_>,
        state: &mut RetryState,
    ) -> Result<Vec<HeldLock>, Refusal> {
        let mut held = Vec::new();
        for (index, request) in lock_requests(calls)? {
            loop {
                let taken = match lock::acquire(&*self.store, write.tenant, write.id, &request).await {
                    Ok(LockOutcome::Held(lock)) => {
                        held.push(lock);
                        break;
                    }
                    Ok(LockOutcome::Busy) => self.wait_for_lock(state).await,
                    Ok(LockOutcome::Refused(refused)) => match calls.get(index) {
                        Some(one) => {
                            let verdict = one.verdict(0, &request.provided, &refused, self.clock.now());
                            self.back_off(verdict, state).await
                        }
                        None => Ok(()),
                    },
                    Err(refusal) => Err(refusal),
                };
                if let Err(refusal) = taken {
                    self.release_locks(write, &held).await;
                    return Err(refusal.of_call(index));
                }
            }
        }
        Ok(held)
    }

    async fn release_locks(&self, write: &WriteId<'_>, locks: &[HeldLock]) {
        for lock in locks {
            lock.give_back(&*self.store, write.tenant, write.id).await;
        }
    }

    /// Commits a plan that no caller waits for to be decided, until its outcome is known (H1).
    pub(crate) async fn commit_known(&self, plan: &Plan) -> Result<Commit, Refusal> {
        self.commit_until_known(plan, &mut false).await
    }

    /// Commits a plan until its outcome is known (H1).
    pub(super) async fn commit_until_known(
        &self,
        plan: &Plan,
        in_doubt: &mut bool,
    ) -> Result<Commit, Refusal> {
        let backoff = Some(Backoff { clock: &*self.clock, first: BACKOFF });
        let policy = RetryPolicy { attempts: COMMIT_ATTEMPTS, backoff };
        let report = commit_reported(&*self.store, plan, policy).await;
        *in_doubt |= report.answer_lost;
        Ok(report.outcome?)
    }
}

impl RetryState {
    fn new(conflicts_max: u32, in_doubt: bool) -> RetryState {
        RetryState {
            conflicts: 0,
            conflicts_max,
            lock_waits: 0,
            waited: Duration::ZERO,
            in_doubt,
            refused: None,
        }
    }
}

/// The locks that calls need, with the index of the call, each once and in one order for all operations.
fn lock_requests(calls: &[ValidatedCall<'_>]) -> Result<Vec<(usize, LockRequest)>, Refusal> {
    let mut requests = Vec::new();
    for (index, one) in calls.iter().enumerate() {
        let lock = one.write.prepare.lock(&one.call).map_err(|refusal| refusal.of_call(index))?;
        requests.extend(lock.map(|lock| (index, lock)));
    }
    let name = |lock: &LockRequest| (lock.row.table().name().to_owned(), resource::key_text(lock.row.key()));
    requests.sort_by_cached_key(|(_, lock)| name(lock));
    requests.dedup_by(|(_, one), (_, other)| name(one) == name(other));
    Ok(requests)
}

/// Which call a refused step belongs to, and what the refusal means to it.
fn attribute_refusal(
    calls: &[ValidatedCall<'_>],
    plan: &Plan,
    planned: &PlannedCalls,
    refused: Refused,
    now: Time,
) -> WriteAttempt {
    let owner =
        planned.attribute(&refused).and_then(|(part, reason)| Some((part, reason, calls.get(part.call)?)));
    let Some((part, reason, one)) = owner else {
        // Behind the calls' own steps the locks are released: one of them was lost.
        let label = plan.steps().get(refused.step).and_then(|step| step.label.clone());
        let last = LastRefusal { label, reason: refused.reason, row: refused.current };
        return WriteAttempt::Conflict(0, Verdict::Retry, last);
    };
    let refused = Refused { reason, ..refused };
    let verdict = one.verdict(part.at, &part.step, &refused, now);
    let last = LastRefusal { label: part.step.label.clone(), reason: refused.reason, row: refused.current };
    WriteAttempt::Conflict(part.call, verdict, last)
}

impl ValidatedCall<'_> {
    fn verdict(&self, index: usize, step: &Step, refused: &Refused, now: Time) -> Verdict {
        let refused = RefusedStep { index, step, reason: &refused.reason, row: refused.current.as_ref() };
        if let Some(verdict) = constrain::verdict(&self.call, &refused) {
            return verdict;
        }
        if let Some(refusal) = self.governed().and_then(|governed| governed.verdict(&refused, now)) {
            return Verdict::Refuse(refusal);
        }
        let condition = self.condition_verdict(&refused);
        condition.unwrap_or_else(|| self.write.prepare.refused(&self.call, &refused))
    }

    /// Whether it does anything outside the plan while it is prepared: takes a lock, or a hold outside the store.
    fn acts_before_commit(&self) -> bool {
        self.write.prepare.acts_before_commit() || !matches!(self.write.prepare.lock(&self.call), Ok(None))
    }
}
