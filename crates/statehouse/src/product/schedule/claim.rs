//! Claims and heartbeats: plans of one row each, in flight together, so that each job is decided by itself and an engine
//! makes one of many. They leave nothing in the log: their guards make them safe to repeat, and the row says who has it.

use std::any::Any;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use async_trait::async_trait;
use futures_util::future::join_all;
use serde_json::{Value as Json, json};
use statehouse_store::guard::{column, now, now_plus};
use statehouse_store::limits::row_weight;
use statehouse_store::log::partition_of;
use statehouse_store::{
    Address, Clock, Commit, Consistency, Draft as EventDraft, Entry, Ids, Plan, Query, Reason, Refused, Row,
    Step, Store, StoreError, Tenant, Time, Value,
};

use super::rules::misfit;
use super::{
    ATTEMPT, ATTEMPTS_MAX, BATCH_MAX, CLAIM_BYTES_MAX, CLAIM_ID, ERROR, FAILED, IN_PROGRESS, JOB_ID, OWNER,
    PAUSED, PRIORITY, QUEUE, RUN_AT, RUN_SHARD, RUNNABLE, STARTED_AT, STATE, Schedule, UPDATED_AT, WORKER,
};
use crate::action::{Answer, Call, Code, Desk, Refusal, Several};
use crate::infra::due::settled;
use crate::resource::key_text;

/// Inputs.
pub(super) const LIMIT: &str = "limit";
pub(super) const LEASE_MS: &str = "lease_ms";
pub(super) const WAIT_MS: &str = "wait_ms";
pub(super) const JOBS: &str = "jobs";
pub(super) const DONE: &str = "done";
pub(super) const CODE: &str = "code";
pub(super) const MESSAGE: &str = "message";

/// How often one that waits looks at what other processes may have enqueued.
const LOOK_EVERY: Duration = Duration::from_millis(500);
/// Pages of one range that a claim reads past jobs that others took.
const PAGES_MAX: usize = 4;

/// Who wants jobs of which queue.
#[derive(Clone, Copy, Debug)]
pub(super) struct Want<'a> {
    pub tenant: &'a Tenant,
    pub queue: &'a str,
    pub worker: &'a str,
    pub limit: usize,
    pub lease: Duration,
}

/// What a claim came to.
#[derive(Debug, Default)]
pub(super) struct Found {
    /// The jobs, as they are now.
    pub jobs: Vec<Row>,
    /// When the next one can be claimed, as far as was seen.
    pub next_at: Option<Time>,
    bytes: usize,
}

/// What became of one job that somebody wanted.
enum Outcome {
    Claimed(Row),
    /// Somebody was faster, it is over, or the engine's clock says that it is not due.
    Missed,
    Failed(StoreError),
}

impl Schedule {
    /// Claims jobs of a queue, as many as there are and are wanted.
    pub(super) async fn claim(
        &self,
        store: &dyn Store,
        clock: &dyn Clock,
        ids: &Ids,
        want: Want<'_>,
    ) -> Result<Found, StoreError> {
        let mut found = Found::default();
        if self.is_paused(store, want.tenant, want.queue).await? {
            return Ok(found);
        }
        let shards = self.shards as usize;
        let first = self.turn.fetch_add(1, Ordering::Relaxed);
        for priority in 0..self.priorities {
            for shard in (0..shards).map(|place| (first.wrapping_add(place)) % shards) {
                if found.jobs.len() >= want.limit || found.bytes >= CLAIM_BYTES_MAX {
                    return Ok(found);
                }
                self.claim_range(store, clock, ids, want, shard, priority, &mut found).await?;
            }
        }
        Ok(found)
    }

    async fn is_paused(&self, store: &dyn Store, tenant: &Tenant, queue: &str) -> Result<bool, StoreError> {
        let address =
            Address::new(&self.queues, tenant, [queue.into()]).map_err(|error| self.misuse(&error))?;
        let row = store.get(&[address], Consistency::Strong).await?.into_iter().next().flatten();
        Ok(row.and_then(|row| row.bool(PAUSED)).unwrap_or(false))
    }

    fn misuse(&self, error: &statehouse_store::PlanError) -> StoreError {
        StoreError::schema(self.name.as_str(), error.to_string())
    }

    /// Claims from one shard and priority, while no other claimer of this process does.
    #[expect(clippy::too_many_arguments, reason = "what to claim from, for whom, and what was found so far")]
    async fn claim_range(
        &self,
        store: &dyn Store,
        clock: &dyn Clock,
        ids: &Ids,
        want: Want<'_>,
        shard: usize,
        priority: i64,
        found: &mut Found,
    ) -> Result<(), StoreError> {
        let stripe =
            partition_of(want.tenant, want.queue, &shard.to_string(), super::STRIPES as u32) as usize;
        let _turn = match self.stripes.get(stripe) {
            Some(stripe) => Some(stripe.lock().await),
            None => None,
        };
        let shard = i64::try_from(shard).unwrap_or(0);
        // The prefix is the tenant's own name: of the index across tenants nothing else is read.
        let mut query = Query::across(&self.jobs, RUNNABLE, [want.queue.into(), shard.into()])
            .and_then(|query| query.prefix([want.tenant.as_str().into(), priority.into()]))
            .map_err(|error| self.misuse(&error))?;
        for _ in 0..PAGES_MAX {
            let rows = want.limit.saturating_sub(found.jobs.len());
            if rows == 0 || found.bytes >= CLAIM_BYTES_MAX {
                return Ok(());
            }
            let page =
                store.query(&query.clone().limit(rows.max(1)).map_err(|error| self.misuse(&error))?).await?;
            let at = clock.now();
            let is_due = |row: &&Row| row.time(RUN_AT).is_some_and(|run_at| run_at <= at);
            let own = |row: &&Row| row.tenant() == want.tenant;
            let mut taken = found.bytes;
            let due: Vec<&Row> = page.rows.iter().filter(own).take_while(is_due).collect();
            let fitting = due.iter().take_while(|row| {
                let fits = taken < CLAIM_BYTES_MAX;
                taken += row_weight(row);
                fits
            });
            let outcomes = join_all(fitting.map(|row| self.claim_one(store, ids, want, row))).await;
            let (before, mut failure) = (found.jobs.len(), None);
            for outcome in outcomes {
                match outcome {
                    Outcome::Claimed(row) => {
                        found.bytes += row_weight(&row);
                        found.jobs.push(row);
                    }
                    Outcome::Missed => {}
                    Outcome::Failed(error) => failure = Some(error),
                }
            }
            if let (Some(error), true) = (failure, before == found.jobs.len() && found.jobs.is_empty()) {
                return Err(error);
            }
            if let Some(later) = page.rows.get(due.len()).and_then(|row| row.time(RUN_AT)) {
                found.next_at = Some(found.next_at.map_or(later, |at| at.min(later)));
                return Ok(());
            }
            match page.next {
                Some(next) => query = query.after(next).map_err(|error| self.misuse(&error))?,
                None => return Ok(()),
            }
        }
        Ok(())
    }

    /// Claims one job (I1), or fails it if it has no attempts left (I4).
    async fn claim_one(&self, store: &dyn Store, ids: &Ids, want: Want<'_>, row: &Row) -> Outcome {
        if row.int(ATTEMPT) >= row.int(ATTEMPTS_MAX) {
            return self.exhaust(store, ids, row).await;
        }
        let claim_id = ids.next();
        // The index's columns are all set, as they are, so that an engine need not read the row for them.
        let known = |name: &str| row.get(name).cloned().unwrap_or(Value::Null);
        let step = Step::update(&self.jobs, row.key().iter().cloned())
            .guard(column(RUN_AT).le(now()))
            .guard(column(ATTEMPT).lt(column(ATTEMPTS_MAX)))
            .set(STATE, IN_PROGRESS)
            .set(ATTEMPT, column(ATTEMPT).add(1))
            .set(WORKER, want.worker)
            .set(CLAIM_ID, claim_id.as_str())
            .set(QUEUE, known(QUEUE))
            .set(RUN_SHARD, known(RUN_SHARD))
            .set(OWNER, known(OWNER))
            .set(PRIORITY, known(PRIORITY))
            .set(RUN_AT, now_plus(want.lease))
            .set(STARTED_AT, now())
            .set(UPDATED_AT, now());
        let plan = match Plan::of(want.tenant, &claim_id).step(step).build() {
            Ok(plan) => plan,
            Err(error) => return Outcome::Failed(self.misuse(&error)),
        };
        match settled(store, &plan).await {
            Ok(Commit::Applied(applied)) => match applied.rows.into_iter().next().flatten() {
                Some(row) => Outcome::Claimed(row),
                None => Outcome::Missed,
            },
            // An answer got lost, and the claim is this one's own.
            Ok(Commit::Refused(Refused { current: Some(row), .. }))
                if row.text(CLAIM_ID) == Some(&claim_id) && row.text(STATE) == Some(IN_PROGRESS) =>
            {
                Outcome::Claimed(row)
            }
            Ok(Commit::Refused(_) | Commit::Fenced) => Outcome::Missed,
            Err(error) => Outcome::Failed(error),
        }
    }

    /// Fails a job whose last lease is over: whoever had it is gone.
    async fn exhaust(&self, store: &dyn Store, ids: &Ids, row: &Row) -> Outcome {
        let job_id = row.text(JOB_ID).unwrap_or_default();
        let attempt = row.int(ATTEMPT).unwrap_or(0);
        let step = Step::update(&self.jobs, row.key().iter().cloned())
            .guard(Schedule::held(attempt))
            .guard(column(RUN_AT).le(now()))
            .set(ERROR, "the lease of the last attempt ran out");
        let mut steps = vec![self.over(step, row.tenant(), job_id, FAILED)];
        match self.leave(store, row).await {
            Ok(left) => steps.extend(left),
            // Whoever looks next tries again.
            Err(_) => return Outcome::Missed,
        }
        let event = EventDraft::named(format!("{}.failed", self.name)).with_row_of(0);
        let entry = Entry::about(&self.name, key_text(row.key())).event(event);
        let plan = Plan::of(row.tenant(), ids.next()).steps(steps).log(entry).without_rows().build();
        match plan {
            Ok(plan) => match settled(store, &plan).await {
                Ok(_) => {
                    self.tell();
                    Outcome::Missed
                }
                Err(error) => Outcome::Failed(error),
            },
            Err(error) => Outcome::Failed(self.misuse(&error)),
        }
    }

    /// Holds a job for another lease, if it is still this attempt's.
    pub(super) async fn hold_on(
        &self,
        store: &dyn Store,
        ids: &Ids,
        tenant: &Tenant,
        job_id: &str,
        attempt: i64,
        lease: Duration,
    ) -> Result<(), Refusal> {
        let step = Step::update(&self.jobs, [job_id.into()])
            .guard(Schedule::held(attempt))
            .set(RUN_AT, now_plus(lease));
        let plan = Plan::of(tenant, ids.next()).step(step).without_rows().build()?;
        match settled(store, &plan).await? {
            Commit::Applied(_) => Ok(()),
            Commit::Refused(Refused { reason: Reason::Guard { .. }, current: Some(row), .. }) => {
                Err(self.lost(&row, attempt))
            }
            Commit::Refused(_) | Commit::Fenced => {
                Err(Refusal::new(Code::NotFound, format!("{} {job_id} does not exist", self.name)))
            }
        }
    }
}

fn span(call: &Call, name: &str) -> Option<Duration> {
    call.input.get(name).and_then(Json::as_u64).map(Duration::from_millis)
}

/// `claim`.
pub(super) struct Claimer(pub Arc<Schedule>);

#[async_trait]
impl Several for Claimer {
    async fn run(&self, call: &Call, desk: &Desk<'_>) -> Result<Answer, Refusal> {
        let schedule = &self.0;
        let text = |name: &str| call.input.get(name).and_then(Json::as_str).unwrap_or_default();
        let want = Want {
            tenant: &call.tenant,
            queue: call.key.first().and_then(Value::as_text).unwrap_or_default(),
            worker: text(WORKER),
            limit: call
                .input
                .get(LIMIT)
                .and_then(Json::as_u64)
                .and_then(|n| usize::try_from(n).ok())
                .unwrap_or(1),
            lease: span(call, LEASE_MS).unwrap_or(schedule.lease),
        };
        let until = desk.clock.uptime() + span(call, WAIT_MS).unwrap_or_default();
        let mut news = schedule.news.subscribe();
        loop {
            // What is told from here on ends the pause below.
            news.borrow_and_update();
            let found = schedule.claim(desk.store, desk.clock, desk.ids, want).await?;
            let left = until.saturating_sub(desk.clock.uptime());
            if !found.jobs.is_empty() || left.is_zero() {
                let jobs: Vec<Json> = found.jobs.iter().map(Row::to_json).collect();
                return Ok(Answer::row(json!(jobs)));
            }
            let due_in = found.next_at.map_or(LOOK_EVERY, |at| at.since(desk.clock.now()));
            let pause = left.min(LOOK_EVERY).min(due_in.max(Duration::from_millis(1)));
            tokio::select! {
                () = desk.clock.sleep(pause) => {}
                _ = news.changed() => {}
            }
        }
    }

    fn as_any(&self) -> Option<&dyn Any> {
        Some(self)
    }
}

/// `heartbeat`.
pub(super) struct Heart(pub Arc<Schedule>);

#[async_trait]
impl Several for Heart {
    async fn run(&self, call: &Call, desk: &Desk<'_>) -> Result<Answer, Refusal> {
        let lease = span(call, LEASE_MS).unwrap_or(self.0.lease);
        let jobs = call.input.get(JOBS).and_then(Json::as_array).map(Vec::as_slice).unwrap_or_default();
        if jobs.len() > usize::try_from(BATCH_MAX).unwrap_or(1) {
            return Err(misfit(JOBS, &format!("at most {BATCH_MAX} at a time; these are {}", jobs.len())));
        }
        let beats = jobs.iter().map(async |job| {
            let job_id = job.get(JOB_ID).and_then(Json::as_str).unwrap_or_default();
            let attempt = job.get(ATTEMPT).and_then(Json::as_i64).unwrap_or(0);
            let held = self.0.hold_on(desk.store, desk.ids, &call.tenant, job_id, attempt, lease).await;
            match held {
                Ok(()) => json!({JOB_ID: job_id, DONE: true, CODE: null, MESSAGE: null}),
                Err(refusal) => {
                    json!({JOB_ID: job_id, DONE: false, CODE: refusal.code.name(), MESSAGE: refusal.message})
                }
            }
        });
        let outcomes: Vec<Json> = join_all(beats).await;
        Ok(Answer::row(json!(outcomes)))
    }
}
