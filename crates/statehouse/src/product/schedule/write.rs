//! The writes of one job.

use std::sync::Arc;

use async_trait::async_trait;
use serde_json::Value as Json;
use statehouse_store::guard::{column, is_in, is_null, is_set, now, now_plus};
use statehouse_store::{
    Address, Consistency, Entry, Event, EventTemplate, Expr, Guard, Plan, PlanError, Reason, Refused, Row,
    Step, Store, Table, Tenant, Time, Value,
};

use super::lanes::Place;
use super::rules::{Wanted, check_size, rest};
use super::{
    ATTEMPT, ATTEMPTS_MAX, CANCELLED, CLAIM_ID, COMPLETED, DEFINITION_ID, ENQUEUED_AT, ERROR, EXECUTION_TIME,
    FAILED, FINISHED_AT, IN_PROGRESS, JOB_ID, LINE_SEQ, LIVE, NOT_BEFORE, ORDER_KEY, OWNER, PAUSED, PAYLOAD,
    PENDING, PRIORITY, QUEUE, RESULT, RETRYING, RUN_AT, RUN_SHARD, STATE, Schedule, UNIQUE_HELD, UNIQUE_KEY,
    UPDATED_AT, WORKER,
};
use crate::action::{
    Answer, Call, Code, Desk, Draft, Pieces, Refusal, Verdict, Write, common_verdict, row_of,
};
use crate::house::drop_subject;
use crate::infra::due::{self, DUE_AT, Due};
use crate::resource::key_text;
use crate::worker::Wake;

/// An input of `fail`: that it need not be tried again.
pub(super) const FINAL: &str = "final";

/// What is done with one job.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Verb {
    Enqueue,
    Complete,
    Fail,
    Cancel,
    Replay,
}

pub(super) struct Writer {
    pub schedule: Arc<Schedule>,
    pub verb: Verb,
}

impl Schedule {
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
        wanted: &Wanted,
        place: Option<&Place>,
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
        // What most jobs do not have is left out, so that nobody has to send or weigh it.
        if let Some(key) = &wanted.unique_key {
            step = step.set(UNIQUE_KEY, key.as_str()).set(UNIQUE_HELD, true);
        }
        if let Some(key) = &wanted.order_key {
            step = step.set(ORDER_KEY, key.as_str());
        }
        if let Some((definition_id, time)) = &wanted.made_by {
            step = step.set(DEFINITION_ID, definition_id.as_str()).set(EXECUTION_TIME, *time);
        }
        let mut steps = vec![self.placed(step, tenant, job_id, &wanted.when, place)];
        steps.extend(place.into_iter().flat_map(|place| self.stand(place, job_id, &wanted.when)));
        steps
    }

    /// A job that can be claimed from a time on, or stands in line.
    fn placed(&self, step: Step, tenant: &Tenant, job_id: &str, when: &Expr, place: Option<&Place>) -> Step {
        // A job without an order key never had a number.
        let step = match place {
            Some(place) => step.set(LINE_SEQ, place.seq),
            None => step,
        };
        match place {
            Some(Place { admitted: false, .. }) => step.set(RUN_SHARD, Value::Null).set(RUN_AT, Value::Null),
            _ => step.set(RUN_SHARD, self.shard_of(tenant, job_id)).set(RUN_AT, when.clone()),
        }
    }

    /// A job that is over: nobody can claim it any more, and one day it is forgotten.
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
            Step::delete(&self.jobs, [job_id.into()]).guard(Schedule::held(attempt))
        } else {
            let step = Step::update(&self.jobs, [job_id.into()])
                .guard(Schedule::held(attempt))
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

    /// Whether a job's end concerns nobody else: nobody who stands in line behind it, and no unique key that would outlive
    /// its row.
    pub(super) fn concerns_nobody(&self, row: &Row) -> bool {
        let goes_with_its_key = self.keep.is_zero() && row.text(UNIQUE_KEY).is_some();
        row.text(ORDER_KEY).is_none() && !goes_with_its_key
    }

    /// A step that ends such a job, and no other.
    pub(super) fn concerning_nobody(&self, step: Step) -> Step {
        let step = step.guard(alone());
        if self.keep.is_zero() { step.guard(is_null(UNIQUE_KEY)) } else { step }
    }

    /// The steps that cancel a job, or only one that nobody has claimed yet: its own row first.
    pub(super) async fn cancelled(
        &self,
        store: &dyn Store,
        row: &Row,
        unclaimed: bool,
    ) -> Result<Vec<Step>, Refusal> {
        let job_id = row.text(JOB_ID).unwrap_or_default();
        let waits = || column(STATE).eq(PENDING);
        // Whether it stands in line or was admitted decides who else is concerned. Nobody has claimed one that stands in
        // line, and one that has a time from which it can be claimed is not over.
        let (guard, others) = match (row.text(ORDER_KEY), row.time(RUN_AT)) {
            (None, _) if unclaimed => (waits(), Vec::new()),
            (None, _) => (is_in(STATE, LIVE), Vec::new()),
            (Some(_), None) => (waits().and(is_null(RUN_AT)), self.step_out(row)),
            (Some(_), Some(_)) if unclaimed => (waits().and(is_set(RUN_AT)), self.leave(store, row).await?),
            (Some(_), Some(_)) => (is_set(RUN_AT), self.leave(store, row).await?),
        };
        let step = Step::update(&self.jobs, [job_id.into()]).guard(guard);
        let step = self.over(step, row.tenant(), job_id, CANCELLED);
        Ok([step].into_iter().chain(others).collect())
    }

    /// That a job is in progress under an attempt (I2).
    pub(super) fn held(attempt: i64) -> Guard {
        column(STATE).eq(IN_PROGRESS).and(column(ATTEMPT).eq(attempt))
    }

    /// What a guard of [`Schedule::held`] that failed means to the worker.
    pub(super) fn lost(&self, row: &Row, attempt: i64) -> Refusal {
        let what = format!("{} {}", self.name, row.text(JOB_ID).unwrap_or_default());
        let (state, current) = (row.text(STATE).unwrap_or_default(), row.int(ATTEMPT).unwrap_or(0));
        if current == attempt {
            Refusal::new(Code::WrongState, format!("{what} is {state}"))
        } else {
            let message =
                format!("{what} is at attempt {current} and {state}; attempt {attempt} has lost it");
            Refusal::new(Code::NotHolder, message)
        }
    }
}

/// A document as a column stores it: null is none.
pub(super) fn document(json: &Json) -> Value {
    if json.is_null() { Value::Null } else { Value::Json(json.clone()) }
}

/// That a job has no order key: then its end concerns nobody else.
fn alone() -> Guard {
    is_null(ORDER_KEY)
}

impl Writer {
    fn attempt(call: &Call) -> i64 {
        call.input.get(ATTEMPT).and_then(Json::as_i64).unwrap_or(0)
    }

    async fn enqueue(&self, call: &Call, desk: &Desk<'_>) -> Result<Draft, Refusal> {
        let schedule = &self.schedule;
        let wanted = Wanted::of(&call.input, schedule.priorities)?;
        let given = call.input.get(JOB_ID).and_then(Json::as_str).map(str::to_owned);
        let job_id = given.unwrap_or_else(|| desk.ids.next());
        let place = match &wanted.order_key {
            Some(key) => Some(schedule.number(desk.store, desk.ids, &call.tenant, key).await?),
            None => None,
        };
        let mut steps = schedule.stored(&call.tenant, &job_id, &wanted, place.as_ref());
        if let Some(key) = &wanted.unique_key {
            let looks = desk.tries > 0;
            steps.extend(schedule.claim_key(desk.store, &call.tenant, key, &job_id, looks).await?);
        }
        Ok(self.pieces(&job_id, steps, "enqueued"))
    }

    async fn complete(&self, call: &Call, desk: &Desk<'_>, job_id: &str) -> Result<Draft, Refusal> {
        let schedule = &self.schedule;
        let result = call.input.get(RESULT).cloned().unwrap_or_default();
        let (step, event) = schedule.completed(&call.tenant, job_id, Writer::attempt(call), result)?;
        let pieces = |steps| Draft::Write(Pieces { subject: key_text([&Value::from(job_id)]), steps, event });
        // Most jobs have no order key, and need not be looked at.
        if desk.tries == 0 {
            return Ok(pieces(vec![schedule.concerning_nobody(step)]));
        }
        let row = schedule.job(desk.store, &call.tenant, job_id).await?;
        let mut steps = vec![step];
        steps.extend(schedule.leave(desk.store, &row).await?);
        if schedule.keep.is_zero() {
            steps.extend(schedule.give_up_key(&row));
        }
        Ok(pieces(steps))
    }

    async fn fail(&self, call: &Call, desk: &Desk<'_>, job_id: &str) -> Result<Draft, Refusal> {
        let schedule = &self.schedule;
        let row = schedule.job(desk.store, &call.tenant, job_id).await?;
        let attempt = Writer::attempt(call);
        let error = call.input.get(ERROR).cloned().unwrap_or_default();
        check_size(ERROR, &error)?;
        let is_final = call.input.get(FINAL).and_then(Json::as_bool).unwrap_or(false);
        let step = Step::update(&schedule.jobs, [job_id.into()])
            .guard(Schedule::held(attempt))
            .set(ERROR, error.as_str().map_or(Value::Null, Value::from));
        if !is_final && row.int(ATTEMPTS_MAX).is_some_and(|most| attempt < most) {
            let rest = rest(job_id, attempt, schedule.backoff, schedule.backoff_max);
            let step = step.set(STATE, RETRYING).set(RUN_AT, now_plus(rest)).set(UPDATED_AT, now());
            return Ok(self.pieces(job_id, vec![step], "retrying"));
        }
        let mut steps = vec![schedule.over(step, &call.tenant, job_id, FAILED)];
        steps.extend(schedule.leave(desk.store, &row).await?);
        Ok(self.pieces(job_id, steps, "failed"))
    }

    async fn cancel(&self, call: &Call, desk: &Desk<'_>, job_id: &str) -> Result<Draft, Refusal> {
        let row = self.schedule.job(desk.store, &call.tenant, job_id).await?;
        let steps = self.schedule.cancelled(desk.store, &row, false).await?;
        Ok(self.pieces(job_id, steps, "cancelled"))
    }

    async fn replay(&self, call: &Call, desk: &Desk<'_>, job_id: &str) -> Result<Draft, Refusal> {
        let schedule = &self.schedule;
        let row = schedule.job(desk.store, &call.tenant, job_id).await?;
        let failed = column(STATE).eq(FAILED);
        if row.text(STATE) != Some(FAILED) {
            return Err(self.wrong_state(&row));
        }
        let when: Expr = now().into();
        let place = match row.text(ORDER_KEY) {
            Some(key) => Some(schedule.number(desk.store, desk.ids, &call.tenant, key).await?),
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
        let step = due::clear(schedule.placed(step, &call.tenant, job_id, &when, place.as_ref()));
        let key = row.text(UNIQUE_KEY);
        let step = if key.is_some() { step.set(UNIQUE_HELD, true) } else { step };
        let mut steps = vec![step];
        steps.extend(place.iter().flat_map(|place| schedule.stand(place, job_id, &when)));
        if let Some(key) = key {
            steps.extend(schedule.claim_key(desk.store, &call.tenant, key, job_id, true).await?);
        }
        Ok(self.pieces(job_id, steps, "replayed"))
    }

    fn pieces(&self, job_id: &str, steps: Vec<Step>, what: &str) -> Draft {
        let event = EventTemplate::named(format!("{}.{what}", self.schedule.name)).with_row_of(0);
        Draft::Write(Pieces { subject: key_text([&Value::from(job_id)]), steps, event })
    }

    fn wrong_state(&self, row: &Row) -> Refusal {
        let (id, state) = (row.text(JOB_ID).unwrap_or_default(), row.text(STATE).unwrap_or_default());
        Refusal::new(Code::WrongState, format!("{} {id} is {state}", self.schedule.name))
            .at_version(Some(row))
    }
}

#[async_trait]
impl Write for Writer {
    async fn draft(&self, call: &Call, desk: &Desk<'_>) -> Result<Draft, Refusal> {
        let job_id = call.key.first().and_then(Value::as_text).unwrap_or_default();
        match self.verb {
            Verb::Enqueue => self.enqueue(call, desk).await,
            Verb::Complete => self.complete(call, desk, job_id).await,
            Verb::Fail => self.fail(call, desk, job_id).await,
            Verb::Cancel => self.cancel(call, desk, job_id).await,
            Verb::Replay => self.replay(call, desk, job_id).await,
        }
    }

    fn refusal(&self, call: &Call, refused: &Refused) -> Verdict {
        // The job itself is the first step; the others are of lanes and keys, which are looked at anew.
        if refused.step > 0 {
            return Verdict::TryAgain;
        }
        let (Reason::Guard { guard, .. }, Some(row)) = (&refused.reason, &refused.current) else {
            return common_verdict(&format!("this {}", self.schedule.name), refused);
        };
        if [alone(), is_null(UNIQUE_KEY), is_null(RUN_AT), is_set(RUN_AT)].contains(guard) {
            return Verdict::TryAgain;
        }
        Verdict::Refuse(match self.verb {
            Verb::Complete | Verb::Fail => {
                self.schedule.lost(row, Writer::attempt(call)).at_version(Some(row))
            }
            _ => self.wrong_state(row),
        })
    }

    fn answer(&self, _: &Call, event: &mut Event) -> Answer {
        if self.verb == Verb::Complete {
            drop_subject(event);
            return Answer::row(event.data.take());
        }
        let row = row_of(event);
        let id = row.get(JOB_ID).and_then(Json::as_str).map(|id| key_text([&Value::from(id)]));
        Answer {
            created: id.filter(|_| self.verb == Verb::Enqueue),
            ..Answer::row(self.schedule.jobs_def.visible(row))
        }
    }

    fn wakes(&self, _: &Call, event: &Event) -> Vec<Wake> {
        self.schedule.tell();
        due::wake(&self.schedule.sweeper(), event).into_iter().collect()
    }
}

/// What forgets jobs that have been over for long enough.
#[derive(Debug)]
pub(super) struct Forget(pub Arc<Schedule>);

impl Due for Forget {
    fn table(&self) -> &Arc<Table> {
        &self.0.jobs
    }

    fn plan(&self, row: &Row, _: Time, operation: &str) -> Result<Plan, PlanError> {
        let job = Step::delete(&self.0.jobs, row.key().iter().cloned()).guard(column(DUE_AT).le(now()));
        let job_id = row.text(JOB_ID).unwrap_or_default();
        // Whoever counts jobs has to know; what it was is of no use to anybody.
        let event = EventTemplate::named(format!("{}.forgotten", self.0.name)).with(JOB_ID, job_id);
        let entry = Entry::about(&self.0.name, key_text(row.key())).event(event);
        let steps = [job].into_iter().chain(self.0.give_up_key(row));
        Plan::of(row.tenant(), operation).steps(steps).log(entry).without_rows().build()
    }
}

/// `pause` and `resume` of a queue.
pub(super) struct Gate {
    pub schedule: Arc<Schedule>,
    pub paused: bool,
}

#[async_trait]
impl Write for Gate {
    async fn draft(&self, call: &Call, _: &Desk<'_>) -> Result<Draft, Refusal> {
        let step = Step::upsert(&self.schedule.queues, call.key.iter().cloned())
            .set(PAUSED, self.paused)
            .set(UPDATED_AT, now());
        let what = if self.paused { "paused" } else { "resumed" };
        let event = EventTemplate::named(format!("{}.{what}", self.schedule.queue_resource())).with_row_of(0);
        Ok(Draft::Write(Pieces { subject: key_text(&call.key), steps: vec![step], event }))
    }

    fn refusal(&self, _: &Call, refused: &Refused) -> Verdict {
        common_verdict("this queue", refused)
    }

    fn answer(&self, _: &Call, event: &mut Event) -> Answer {
        Answer::row(row_of(event))
    }

    fn wakes(&self, _: &Call, _: &Event) -> Vec<Wake> {
        self.schedule.tell();
        Vec::new()
    }
}
