//! The writes of one job.

use std::sync::Arc;

use async_trait::async_trait;
use serde_json::Value as Json;
use statehouse_store::guard::{column, is_in, is_null, is_set, now, now_plus};
use statehouse_store::{
    Address, Consistency, Entry, Event, EventTemplate, Expr, Guard, Plan, Row, Step, Store, StoreError,
    Table, Tenant, Time, Value,
};

use super::order_keys::LaneTicket;
use super::rules::{JobInput, backoff, check_size};
use super::{
    ATTEMPT, ATTEMPTS_MAX, CANCELLED, CLAIM_ID, COMPLETED, DEFINITION_ID, ENQUEUED_AT, ERROR, EXECUTION_TIME,
    FAILED, FINISHED_AT, IN_PROGRESS, JOB_ID, LINE_SEQ, LIVE, NOT_BEFORE, ORDER_KEY, OWNER, PAUSED, PAYLOAD,
    PENDING, PRIORITY, QUEUE, RESULT, RETRYING, RUN_AT, RUN_SHARD, STATE, ScheduleSpec, UNIQUE_HELD,
    UNIQUE_KEY, UPDATED_AT, WORKER,
};
use crate::action::{
    ActionContext, Answer, Call, Code, PlanParts, Prepare, Prepared, Refusal, RefusedStep, Verdict,
};
use crate::house::drop_subject;
use crate::infra::due::{self, DUE_AT, Due};
use crate::resource::key_text;

/// The label of the step on the job itself.
const JOB: &str = "job";
/// An input of `fail`: that it need not be tried again.
pub(super) const FINAL: &str = "final";

/// What is done with one job.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum JobVerb {
    Enqueue,
    Complete,
    Fail,
    Cancel,
    Replay,
}

pub(super) struct JobWrite {
    pub schedule: Arc<ScheduleSpec>,
    pub verb: JobVerb,
}

impl ScheduleSpec {
    pub(super) async fn job(&self, store: &dyn Store, tenant: &Tenant, job_id: &str) -> Result<Row, Refusal> {
        let address = Address::new(&self.jobs, tenant, [job_id.into()])?;
        let row = store.get(&[address], Consistency::Strong).await?.into_iter().next().flatten();
        row.ok_or_else(|| Refusal::new(Code::NotFound, format!("{} {job_id} does not exist", self.name)))
    }

    /// The steps that store a job: its own row first.
    pub(super) fn stored(
        &self,
        tenant: &Tenant,
        job_id: &str,
        wanted: &JobInput,
        ticket: Option<&LaneTicket>,
    ) -> Vec<Step> {
        let mut step = Step::insert(&self.jobs, [job_id.into()])
            .set(QUEUE, wanted.queue.as_str())
            .set(STATE, PENDING)
            .set(OWNER, tenant.as_str())
            .set(PRIORITY, wanted.priority)
            .set(NOT_BEFORE, wanted.when.clone())
            .set(ATTEMPTS_MAX, wanted.attempts_max.unwrap_or(self.attempts_max))
            .set(PAYLOAD, document(&wanted.payload))
            .set(ENQUEUED_AT, now())
            .set(UPDATED_AT, now());
        // Columns that most jobs do not have are left out, so that plans stay small.
        if let Some(key) = &wanted.unique_key {
            step = step.set(UNIQUE_KEY, key.as_str()).set(UNIQUE_HELD, true);
        }
        if let Some(key) = &wanted.order_key {
            step = step.set(ORDER_KEY, key.as_str());
        }
        if let Some((definition_id, time)) = &wanted.made_by {
            step = step.set(DEFINITION_ID, definition_id.as_str()).set(EXECUTION_TIME, *time);
        }
        let mut steps = vec![self.placed(step, tenant, job_id, &wanted.when, ticket)];
        steps.extend(ticket.into_iter().flat_map(|ticket| self.join_wait_list(ticket, job_id, &wanted.when)));
        steps
    }

    /// A job that can be claimed from a time on, or stands in line.
    fn placed(
        &self,
        step: Step,
        tenant: &Tenant,
        job_id: &str,
        when: &Expr,
        ticket: Option<&LaneTicket>,
    ) -> Step {
        // A job without an order key never had a number.
        let step = match ticket {
            Some(ticket) => step.set(LINE_SEQ, ticket.seq),
            None => step,
        };
        match ticket {
            Some(LaneTicket { admitted: false, .. }) => {
                step.set(RUN_SHARD, Value::Null).set(RUN_AT, Value::Null)
            }
            _ => step.set(RUN_SHARD, self.shard_of(tenant, job_id)).set(RUN_AT, when.clone()),
        }
    }

    /// A job that is over: it cannot be claimed any more, and is deleted after its retention.
    pub(super) fn over(&self, step: Step, tenant: &Tenant, job_id: &str, state: &str) -> Step {
        let keep = if state == FAILED { self.keep_failed } else { self.keep };
        let step = step
            .set(STATE, state)
            .set(RUN_SHARD, Value::Null)
            .set(RUN_AT, Value::Null)
            .set(FINISHED_AT, now())
            .set(UPDATED_AT, now());
        due::set(step, self.shard_of(tenant, job_id), now_plus(keep))
    }

    /// The step that completes a job under an attempt, and the event that tells it.
    pub(super) fn completed(
        &self,
        tenant: &Tenant,
        job_id: &str,
        attempt: i64,
        result: Json,
    ) -> Result<(Step, EventTemplate), Refusal> {
        check_size(RESULT, &result)?;
        let step = if self.keep.is_zero() {
            Step::delete(&self.jobs, [job_id.into()]).guard(ScheduleSpec::held(attempt))
        } else {
            let step = Step::update(&self.jobs, [job_id.into()])
                .guard(ScheduleSpec::held(attempt))
                .set(RESULT, document(&result))
                .set(ERROR, Value::Null);
            self.over(step, tenant, job_id, COMPLETED)
        };
        // What was enqueued with it is in the log already, and there are many of these: only what is new.
        let event = EventTemplate::named(format!("{}.completed", self.name))
            .with(JOB_ID, job_id)
            .with(STATE, COMPLETED)
            .with(ATTEMPT, attempt)
            .with(RESULT, result);
        Ok((step, event))
    }

    /// Whether a job's end changes no other row: no job waits behind it, and it has no unique key that would outlive
    /// its row.
    pub(super) fn is_independent(&self, row: &Row) -> bool {
        let goes_with_its_key = self.keep.is_zero() && row.get(UNIQUE_KEY) != Some(&Value::Null);
        row.get(ORDER_KEY) == Some(&Value::Null) && !goes_with_its_key
    }

    /// A step that ends a job only if no other job waits for it.
    pub(super) fn only_if_independent(&self, step: Step) -> Step {
        let step = step.guard(alone());
        if self.keep.is_zero() { step.guard(is_null(UNIQUE_KEY)) } else { step }
    }

    /// The steps that cancel a job, or only one that was not claimed yet: its own row first.
    pub(super) async fn cancelled(
        &self,
        store: &dyn Store,
        row: &Row,
        unclaimed: bool,
    ) -> Result<Vec<Step>, Refusal> {
        let job_id = row.get_text(JOB_ID)?;
        let waits = || column(STATE).eq(PENDING);
        // Whether it stands in line or was admitted decides which other rows change. No worker has claimed one that stands in
        // line, and one that has a time from which it can be claimed is not over.
        let (guard, others) = match (row.get_optional_text(ORDER_KEY)?, row.get_optional_time(RUN_AT)?) {
            (None, _) if unclaimed => (waits(), Vec::new()),
            (None, _) => (is_in(STATE, LIVE), Vec::new()),
            (Some(_), None) => (waits().and(is_null(RUN_AT)), self.leave_wait_list(row)?),
            (Some(_), Some(_)) if unclaimed => {
                (waits().and(is_set(RUN_AT)), self.admit_next(store, row).await?)
            }
            (Some(_), Some(_)) => (is_set(RUN_AT), self.admit_next(store, row).await?),
        };
        let step = Step::update(&self.jobs, [job_id.into()]).guard(guard);
        let step = self.over(step, row.tenant(), job_id, CANCELLED);
        Ok([step].into_iter().chain(others).collect())
    }

    /// That a job is in progress under an attempt (I2).
    pub(super) fn held(attempt: i64) -> Guard {
        column(STATE).eq(IN_PROGRESS).and(column(ATTEMPT).eq(attempt))
    }

    /// What a guard of [`ScheduleSpec::held`] that failed means to the worker.
    pub(super) fn lost(&self, row: &Row, attempt: i64) -> Result<Refusal, StoreError> {
        let what = format!("{} {}", self.name, row.get_text(JOB_ID)?);
        let (state, current) = (row.get_text(STATE)?, row.get_int(ATTEMPT)?);
        if current == attempt {
            return Ok(Refusal::new(Code::WrongState, format!("{what} is {state}")));
        }
        let message = format!("{what} is at attempt {current} and {state}; attempt {attempt} has lost it");
        Ok(Refusal::new(Code::NotHolder, message))
    }
}

/// A document as a column stores it: null is none.
pub(super) fn document(json: &Json) -> Value {
    if json.is_null() { Value::Null } else { Value::Json(json.clone()) }
}

/// That a job has no order key: then its end changes no other row.
fn alone() -> Guard {
    is_null(ORDER_KEY)
}

impl JobWrite {
    async fn enqueue(&self, call: &Call, cx: &ActionContext<'_>) -> Result<Prepared, Refusal> {
        let schedule = &self.schedule;
        let wanted = JobInput::of(&call.input, schedule.priorities)?;
        let given = call.input.text(JOB_ID).map(str::to_owned);
        let job_id = given.unwrap_or_else(|| cx.ids.next());
        let ticket = match &wanted.order_key {
            Some(key) => Some(schedule.take_ticket(cx.store, cx.ids, &call.tenant, key).await?),
            None => None,
        };
        let mut steps = schedule.stored(&call.tenant, &job_id, &wanted, ticket.as_ref());
        if let Some(key) = &wanted.unique_key {
            let looks = cx.attempt > 0;
            steps.extend(schedule.claim_key(cx.store, &call.tenant, key, &job_id, looks).await?);
        }
        Ok(self.changed(cx, &job_id, steps, "enqueued"))
    }

    async fn complete(&self, call: &Call, cx: &ActionContext<'_>, job_id: &str) -> Result<Prepared, Refusal> {
        let schedule = &self.schedule;
        let result = call.input.json(RESULT);
        let attempt = call.input.get_int(ATTEMPT)?;
        let (step, event) = schedule.completed(&call.tenant, job_id, attempt, result)?;
        let parts = |steps: Vec<Step>| self.parts(cx, job_id, steps, event);
        // Most jobs have no order key, and need not be looked at.
        if cx.attempt == 0 {
            return Ok(parts(vec![schedule.only_if_independent(step)]));
        }
        let row = schedule.job(cx.store, &call.tenant, job_id).await?;
        let mut steps = vec![step];
        steps.extend(schedule.admit_next(cx.store, &row).await?);
        if schedule.keep.is_zero() {
            steps.extend(schedule.give_up_key(&row)?);
        }
        Ok(parts(steps))
    }

    async fn fail(&self, call: &Call, cx: &ActionContext<'_>, job_id: &str) -> Result<Prepared, Refusal> {
        let schedule = &self.schedule;
        let row = schedule.job(cx.store, &call.tenant, job_id).await?;
        let attempt = call.input.get_int(ATTEMPT)?;
        let error = call.input.json(ERROR);
        check_size(ERROR, &error)?;
        let is_final = call.input.flag(FINAL).unwrap_or(false);
        let step = Step::update(&schedule.jobs, [job_id.into()])
            .guard(ScheduleSpec::held(attempt))
            .set(ERROR, error.as_str().map_or(Value::Null, Value::from));
        if !is_final && attempt < row.get_int(ATTEMPTS_MAX)? {
            let rest = backoff(job_id, attempt, schedule.backoff, schedule.backoff_max);
            let step = step.set(STATE, RETRYING).set(RUN_AT, now_plus(rest)).set(UPDATED_AT, now());
            return Ok(self.changed(cx, job_id, vec![step], "retrying"));
        }
        let mut steps = vec![schedule.over(step, &call.tenant, job_id, FAILED)];
        steps.extend(schedule.admit_next(cx.store, &row).await?);
        Ok(self.changed(cx, job_id, steps, "failed"))
    }

    async fn cancel(&self, call: &Call, cx: &ActionContext<'_>, job_id: &str) -> Result<Prepared, Refusal> {
        let row = self.schedule.job(cx.store, &call.tenant, job_id).await?;
        let steps = self.schedule.cancelled(cx.store, &row, false).await?;
        Ok(self.changed(cx, job_id, steps, "cancelled"))
    }

    async fn replay(&self, call: &Call, cx: &ActionContext<'_>, job_id: &str) -> Result<Prepared, Refusal> {
        let schedule = &self.schedule;
        let row = schedule.job(cx.store, &call.tenant, job_id).await?;
        let failed = column(STATE).eq(FAILED);
        if row.get_text(STATE)? != FAILED {
            return Err(self.wrong_state(&row)?);
        }
        let when: Expr = now().into();
        let ticket = match row.get_optional_text(ORDER_KEY)? {
            Some(key) => Some(schedule.take_ticket(cx.store, cx.ids, &call.tenant, key).await?),
            None => None,
        };
        // The attempts go on counting, so that no worker of an earlier one can pass for one of these.
        let step = Step::update(&schedule.jobs, [job_id.into()])
            .guard(failed)
            .set(STATE, PENDING)
            .set(NOT_BEFORE, now())
            .set(ATTEMPTS_MAX, column(ATTEMPT).add(schedule.attempts_max))
            .set(WORKER, Value::Null)
            .set(CLAIM_ID, Value::Null)
            .set(FINISHED_AT, Value::Null)
            .set(UPDATED_AT, now());
        let step = due::clear(schedule.placed(step, &call.tenant, job_id, &when, ticket.as_ref()));
        let key = row.get_optional_text(UNIQUE_KEY)?;
        let step = if key.is_some() { step.set(UNIQUE_HELD, true) } else { step };
        let mut steps = vec![step];
        steps.extend(ticket.iter().flat_map(|ticket| schedule.join_wait_list(ticket, job_id, &when)));
        if let Some(key) = key {
            steps.extend(schedule.claim_key(cx.store, &call.tenant, key, job_id, true).await?);
        }
        Ok(self.changed(cx, job_id, steps, "replayed"))
    }

    /// Steps on a job, its own row first, and its event with the row.
    fn changed(&self, cx: &ActionContext<'_>, job_id: &str, steps: Vec<Step>, what: &str) -> Prepared {
        let event = EventTemplate::named(format!("{}.{what}", self.schedule.name)).with_row_of(0);
        self.parts(cx, job_id, steps, event)
    }

    fn parts(
        &self,
        cx: &ActionContext<'_>,
        job_id: &str,
        mut steps: Vec<Step>,
        event: EventTemplate,
    ) -> Prepared {
        let job = steps.first_mut();
        let due = job.and_then(|job| {
            job.label = Some(JOB.into());
            due::wakeup(&self.schedule.sweeper(), job, cx.clock.now())
        });
        let parts = PlanParts::new(key_text([&Value::from(job_id)]), steps, event);
        parts.wakeups(due).notify(&self.schedule.news).into()
    }

    fn wrong_state(&self, row: &Row) -> Result<Refusal, StoreError> {
        let (id, state) = (row.get_text(JOB_ID)?, row.get_text(STATE)?);
        let message = format!("{} {id} is {state}", self.schedule.name);
        Ok(Refusal::new(Code::WrongState, message).at_version(Some(row)))
    }

    fn refusal(&self, call: &Call, row: &Row) -> Result<Refusal, Refusal> {
        match self.verb {
            JobVerb::Complete | JobVerb::Fail => {
                let lost = self.schedule.lost(row, call.input.get_int(ATTEMPT)?)?;
                Ok(lost.at_version(Some(row)))
            }
            _ => Ok(self.wrong_state(row)?),
        }
    }
}

#[async_trait]
impl Prepare for JobWrite {
    async fn prepare(&self, call: &Call, cx: &ActionContext<'_>) -> Result<Prepared, Refusal> {
        match self.verb {
            JobVerb::Enqueue => self.enqueue(call, cx).await,
            JobVerb::Complete => self.complete(call, cx, call.key_text()?).await,
            JobVerb::Fail => self.fail(call, cx, call.key_text()?).await,
            JobVerb::Cancel => self.cancel(call, cx, call.key_text()?).await,
            JobVerb::Replay => self.replay(call, cx, call.key_text()?).await,
        }
    }

    fn refused(&self, call: &Call, refused: &RefusedStep<'_>) -> Verdict {
        // The other steps are on lanes and keys, which the next attempt reads.
        if refused.label() != JOB {
            return Verdict::Retry;
        }
        let (Some(guard), Some(row)) = (refused.guard(), refused.row) else {
            return refused.standard(&format!("this {}", self.schedule.name));
        };
        if [alone(), is_null(UNIQUE_KEY), is_null(RUN_AT), is_set(RUN_AT)].contains(guard) {
            return Verdict::Retry;
        }
        Verdict::refuse(self.refusal(call, row))
    }
}

/// The answer of `complete`: its event says all that is new.
pub(super) fn completed_answer(event: &mut Event) -> Answer {
    drop_subject(event);
    Answer::row(event.data.take())
}

/// What forgets jobs that have been over for long enough.
#[derive(Debug)]
pub(super) struct DeleteFinished(pub Arc<ScheduleSpec>);

impl Due for DeleteFinished {
    fn table(&self) -> &Arc<Table> {
        &self.0.jobs
    }

    fn plan(&self, row: &Row, _: Time, operation: &str) -> Result<Plan, Refusal> {
        let job = Step::delete(&self.0.jobs, row.key().iter().cloned()).guard(column(DUE_AT).le(now()));
        let job_id = row.get_text(JOB_ID)?;
        // Views that count jobs need the event; the row itself is not needed.
        let event = EventTemplate::named(format!("{}.forgotten", self.0.name)).with(JOB_ID, job_id);
        let entry = Entry::about(&self.0.name, key_text(row.key())).event(event);
        let steps = [job].into_iter().chain(self.0.give_up_key(row)?);
        Ok(Plan::of(row.tenant(), operation).steps(steps).log(entry).without_rows().build()?)
    }
}

/// `pause` and `resume` of a queue.
pub(super) struct PauseQueue {
    pub schedule: Arc<ScheduleSpec>,
    pub paused: bool,
}

#[async_trait]
impl Prepare for PauseQueue {
    async fn prepare(&self, call: &Call, _: &ActionContext<'_>) -> Result<Prepared, Refusal> {
        let step = Step::upsert(&self.schedule.queues, call.key.iter().cloned())
            .set(PAUSED, self.paused)
            .set(UPDATED_AT, now());
        let what = if self.paused { "paused" } else { "resumed" };
        let event = EventTemplate::named(format!("{}.{what}", self.schedule.queue_resource())).with_row_of(0);
        let parts = PlanParts::new(key_text(&call.key), vec![step], event);
        Ok(parts.notify(&self.schedule.news).into())
    }

    fn refused(&self, _: &Call, refused: &RefusedStep<'_>) -> Verdict {
        refused.standard("this queue")
    }
}
