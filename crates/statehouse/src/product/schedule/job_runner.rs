//! Jobs done in this process: a handler in Rust, and the loop that claims for it.
//!
//! [`JobRunner`] claim jobs of one queue, of all tenants in turn, as many at a time as there is room for, and do them at once,
//! each in a task of its own. A third of a lease before they would lose it they hold it for another one. What comes of a job is
//! recorded when it ends. Jobs that end while others are being recorded gather meanwhile and are recorded together, as one plan
//! if nothing is in the way of any of them.
//!
//! - W1. *Each tenant has its turn.* Of the room that there is each tenant that waits gets an equal part, and who came last
//!   begins the next round. A tenant with a long queue does not hold up one with a short one.
//! - W2. A job that was lost is dropped: *a heartbeat that is refused ends the handler.*
//! - W3. A handler that panics is a worker that died: *the lease ends, and the job is tried again.*
//! - W4. At the end no more jobs are claimed, and those under way are finished and recorded.
//! - W5. A job takes up room until it is recorded: *a store that is slow is not sent more than `at_once` at a time.*

mod recorder;

use std::collections::BTreeSet;
use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use futures_util::stream::{FuturesUnordered, StreamExt as _};
use serde_json::{Value as Json, json};
use statehouse_store::{Query, Row, StoreError, Tenant, Time, bug};
use tokio::sync::{mpsc, watch};
use tokio::task::{JoinHandle, JoinSet};

use self::recorder::{FinishedJob, JobReport};
use super::claim::{ClaimJobs, ClaimRequest};
use super::write::FINAL;
use super::{ATTEMPT, ERROR, JOB_ID, PAYLOAD, QUEUE, RESULT, RUNNABLE, ScheduleSpec};
use crate::action::{ActionHandler, Code, Refusal};
use crate::house::House;

/// A job to do.
#[derive(Clone, Debug)]
pub struct Job {
    /// Whose it is.
    pub tenant: Tenant,
    /// Its id. A handler should pass it on as the idempotency key of what it does elsewhere.
    pub job_id: String,
    /// How often it was claimed, this time included.
    pub attempt: i64,
    /// Its queue.
    pub queue: String,
    /// What it is about.
    pub payload: Json,
}

impl Job {
    /// The job that a worker has claimed.
    fn of(row: &Row) -> Result<Job, StoreError> {
        Ok(Job {
            tenant: row.tenant().clone(),
            job_id: row.get_text(JOB_ID)?.to_owned(),
            attempt: row.get_int(ATTEMPT)?,
            queue: row.get_text(QUEUE)?.to_owned(),
            payload: row.get_optional_json(PAYLOAD)?.cloned().unwrap_or_default(),
        })
    }
}

/// Why a job was not done.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{error}")]
pub struct JobFailure {
    /// What went wrong.
    pub error: String,
    /// That trying again is of no use.
    pub is_final: bool,
}

impl JobFailure {
    /// Something that may go better next time.
    pub fn passing(error: impl Into<String>) -> JobFailure {
        JobFailure { error: error.into(), is_final: false }
    }
}

/// What does jobs.
#[async_trait]
pub trait JobHandler: Send + Sync {
    /// Does a job, and says what came of it. It may be called again for the same job, as another attempt.
    async fn handle(&self, job: &Job) -> Result<Json, JobFailure>;
}

/// How jobs are done in this process.
#[derive(Clone, Debug)]
pub struct RunnerOptions {
    /// How many at once.
    pub at_once: usize,
    /// Under which name they are claimed.
    pub worker: String,
    /// How long a claim lasts; as the blueprint says, if not given.
    pub lease: Option<Duration>,
    /// How long it takes at most to find what another process has enqueued.
    pub idle_max: Duration,
}

impl Default for RunnerOptions {
    fn default() -> RunnerOptions {
        RunnerOptions {
            at_once: 98,
            worker: "house".into(),
            lease: None,
            idle_max: Duration::from_millis(500),
        }
    }
}

/// A loop that claims jobs for a handler. Dropped, it stops at once, as a process that is killed does.
#[derive(Debug)]
pub struct JobRunner {
    stop: watch::Sender<bool>,
    task: Option<JoinHandle<()>>,
}

/// How long the list of tenants that wait is taken for true.
const TENANTS_FOR: Duration = Duration::from_secs(1);
/// Tenants of one shard that are looked at in one round.
const TENANTS_MAX: usize = 1_000;
/// Jobs of one claim: more than one who asks over HTTP gets, because what a claim costs by itself is shared by them.
const CLAIM_MAX: usize = 196;

impl JobRunner {
    /// Starts doing jobs of one queue of a schedule, in the caller's tokio runtime.
    pub fn start(
        house: &Arc<House>,
        schedule: &str,
        queue: &str,
        handler: Arc<dyn JobHandler>,
        options: RunnerOptions,
    ) -> Result<JobRunner, Refusal> {
        let (_, claim) = house.action(&format!("{schedule}_queue.claim"))?;
        let found = match &claim.handler {
            ActionHandler::MultiPlan(several) => {
                several.as_any().and_then(|any| any.downcast_ref::<ClaimJobs>())
            }
            _ => None,
        };
        let claimer =
            found.ok_or_else(|| Refusal::new(Code::NotFound, format!("`{schedule}` is no schedule")))?;
        let stop = watch::Sender::new(false);
        let labour = RunnerTask {
            house: house.clone(),
            schedule: claimer.0.clone(),
            queue: queue.to_owned(),
            handler,
            options,
            stop: stop.subscribe(),
        };
        Ok(JobRunner { stop, task: Some(tokio::spawn(Arc::new(labour).run())) })
    }

    /// Finishes the jobs under way, and returns (W4).
    pub async fn stop(mut self) {
        self.stop.send_replace(true);
        if let Some(task) = self.task.take() {
            // It ends by itself; if it was cut short there is nothing left to wait for.
            let _ = task.await;
        }
    }
}

impl Drop for JobRunner {
    fn drop(&mut self) {
        if let Some(task) = &self.task {
            task.abort();
        }
    }
}

struct RunnerTask {
    house: Arc<House>,
    schedule: Arc<ScheduleSpec>,
    queue: String,
    handler: Arc<dyn JobHandler>,
    options: RunnerOptions,
    stop: watch::Receiver<bool>,
}

impl fmt::Debug for RunnerTask {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Labour({} {})", self.schedule.name, self.queue)
    }
}

/// The tenants that wait, and whose turn it is.
#[derive(Default)]
struct TenantTurns {
    tenants: Vec<Tenant>,
    first: usize,
    until: Duration,
    /// Whether the last claim got all that it wanted. Then several go at once.
    is_busy: bool,
}

/// How many jobs there were to do, and when there may be more.
#[derive(Default)]
struct ClaimedJobs {
    jobs: usize,
    next_at: Option<Time>,
}

impl RunnerTask {
    async fn run(self: Arc<Self>) {
        let clock = self.house.clock().clone();
        let (mut stop, mut news) = (self.stop.clone(), self.schedule.news.subscribe());
        let (mut tasks, mut round) = (JoinSet::new(), TenantTurns::default());
        let (ended, endings) = mpsc::unbounded_channel();
        let mut recorder = JoinSet::new();
        recorder.spawn(self.clone().record_all(endings));
        while !*stop.borrow() {
            while tasks.try_join_next().is_some() {}
            news.borrow_and_update();
            let room = self.options.at_once.saturating_sub(tasks.len());
            // A claim of many costs hardly more than one of few, so it waits until there is room for some.
            if room == 0 || room * 2 < self.options.at_once {
                tokio::select! {
                    Some(_) = tasks.join_next() => {}
                    _ = stop.changed() => {}
                }
                continue;
            }
            let attend = |job| drop(tasks.spawn(self.clone().run_job(job, ended.clone())));
            // A claim that failed is repeated after the pause; the error is logged.
            let claimed = self.claim(room, &mut round, attend).await.unwrap_or_else(|error| {
                let job = &self.schedule.name;
                tracing::warn!(target: "statehouse::jobs", job, %error, "claiming jobs failed");
                Default::default()
            });
            if claimed.jobs == 0 {
                // What waits for its time, or is another's until its lease is over, is looked at then.
                let due_in = claimed.next_at.map_or(self.options.idle_max, |at| at.since(clock.now()));
                let pause = self.options.idle_max.min(due_in.max(Duration::from_millis(1)));
                tokio::select! {
                    Some(_) = tasks.join_next() => {}
                    _ = news.changed() => {}
                    () = clock.sleep(pause) => {}
                    _ = stop.changed() => {}
                }
            }
        }
        while tasks.join_next().await.is_some() {}
        drop(ended);
        while recorder.join_next().await.is_some() {}
    }

    /// Claims for one tenant after the other, as long as there is room (W1), and has every job attended to as soon as it is
    /// there.
    async fn claim(
        &self,
        room: usize,
        round: &mut TenantTurns,
        mut attend: impl FnMut(Row),
    ) -> Result<ClaimedJobs, StoreError> {
        let clock = self.house.clock();
        if round.tenants.is_empty() || clock.uptime() >= round.until {
            round.tenants = self.tenants().await?;
            round.until = clock.uptime() + TENANTS_FOR;
        }
        let many = round.tenants.len();
        let mut claimed = ClaimedJobs::default();
        if many == 0 {
            return Ok(claimed);
        }
        let most = CLAIM_MAX;
        let part = room.div_ceil(many).max(1);
        let part = if round.is_busy { part } else { part.min(most) };
        round.is_busy = false;
        for turn in 0..many {
            let left = room.saturating_sub(claimed.jobs);
            let Some(tenant) = round.tenants.get((round.first + turn) % many) else { continue };
            if left == 0 {
                round.first = (round.first + turn) % many;
                return Ok(claimed);
            }
            let part = part.min(left);
            let claims = (0..part).step_by(most).map(|from| {
                let limit = most.min(part - from);
                let (queue, worker) = (self.queue.as_str(), self.options.worker.as_str());
                let want = ClaimRequest { tenant, queue, worker, limit, lease: self.lease() };
                self.schedule.claim(&**self.house.store(), &**clock, self.house.ids(), want)
            });
            let (before, mut failure) = (claimed.jobs, None);
            let mut claims: FuturesUnordered<_> = claims.collect();
            while let Some(found) = claims.next().await {
                match found {
                    Ok(found) => {
                        claimed.jobs += found.jobs.len();
                        found.jobs.into_iter().for_each(&mut attend);
                        claimed.next_at = [claimed.next_at, found.next_at].into_iter().flatten().min();
                    }
                    Err(error) => failure = Some(error),
                }
            }
            round.is_busy |= claimed.jobs - before == part;
            match failure {
                Some(error) if claimed.jobs == 0 => return Err(error),
                Some(_) => break,
                None => {}
            }
        }
        if claimed.jobs == 0 {
            // Who is in the list has nothing that is due; others may.
            round.until = Duration::ZERO;
        }
        Ok(claimed)
    }

    fn lease(&self) -> Duration {
        self.options.lease.unwrap_or(self.schedule.lease)
    }

    /// The tenants with jobs in the queue, from one to the next of each shard.
    async fn tenants(&self) -> Result<Vec<Tenant>, StoreError> {
        let misuse = |error: statehouse_store::PlanError| {
            StoreError::schema(self.schedule.name.as_str(), error.to_string())
        };
        let mut found: BTreeSet<String> = BTreeSet::new();
        let mut tenants = Vec::new();
        for shard in 0..i64::from(self.schedule.shards) {
            let mut last: Option<String> = None;
            for _ in 0..TENANTS_MAX {
                let partition = [self.queue.as_str().into(), shard.into()];
                let mut query =
                    Query::all_tenants(&self.schedule.jobs, RUNNABLE, partition).map_err(misuse)?;
                if let Some(last) = &last {
                    query = query.above(last.as_str()).map_err(misuse)?;
                }
                let page = self.house.store().query(&query.limit(1).map_err(misuse)?).await?;
                let Some(row) = page.rows.into_iter().next() else { break };
                last = Some(row.tenant().as_str().to_owned());
                if found.insert(row.tenant().as_str().to_owned()) {
                    tenants.push(row.tenant().clone());
                }
            }
        }
        Ok(tenants)
    }

    /// Does one job, and sees to it that what came of it is recorded.
    async fn run_job(self: Arc<Self>, row: Row, ended: mpsc::UnboundedSender<JobReport>) {
        let job = match Job::of(&row) {
            Ok(job) => job,
            Err(error) => return self.fail_corrupt(&row, &error).await,
        };
        let outcome = tokio::select! {
            // Most jobs are done before anybody need set a clock for them.
            biased;
            outcome = self.handler.handle(&job) => outcome,
            () = self.lose(&job) => return,
        };
        match outcome {
            Ok(result) => {
                let done = Arc::new(FinishedJob { bytes: result.to_string().len(), job, result });
                if self.schedule.is_independent(&row) && self.is_recorded_with_others(&done, &ended).await {
                    return;
                }
                let input = json!({ATTEMPT: done.job.attempt, RESULT: done.result});
                self.record(&done.job, "complete", input).await;
            }
            Err(JobFailure { error, is_final }) => {
                let input = json!({ATTEMPT: job.attempt, ERROR: error, FINAL: is_final});
                self.record(&job, "fail", input).await;
            }
        }
    }

    /// Fails a job whose row cannot be read: no attempt can do it.
    async fn fail_corrupt(&self, row: &Row, error: &StoreError) {
        let (Ok(job_id), Ok(attempt)) = (row.get_text(JOB_ID), row.get_int(ATTEMPT)) else {
            // The claim has just set the attempt.
            drop(bug!("a claim returned {row} without the attempt: {error}"));
            return;
        };
        let job = Job {
            tenant: row.tenant().clone(),
            job_id: job_id.to_owned(),
            attempt,
            queue: self.queue.clone(),
            payload: Json::Null,
        };
        let input = json!({ATTEMPT: attempt, ERROR: error.to_string(), FINAL: true});
        self.record(&job, "fail", input).await;
    }

    /// Holds a job for one lease after the other. Returns when it is lost (W2).
    async fn lose(&self, job: &Job) {
        let (clock, lease) = (self.house.clock(), self.lease());
        loop {
            clock.sleep(lease / 3).await;
            let (store, ids) = (&**self.house.store(), self.house.ids());
            let held =
                self.schedule.heartbeat(store, ids, &job.tenant, &job.job_id, job.attempt, lease).await;
            let gone = |code| matches!(code, Code::NotHolder | Code::WrongState | Code::NotFound);
            if held.is_err_and(|refusal| gone(refusal.code)) {
                return;
            }
        }
    }
}
