//! Jobs done in this process: a handler in Rust, and the loop that claims for it.
//!
//! [`Hands`] claim jobs of one queue, of all tenants in turn, as many at a time as there is room for, and do them at once,
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

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use futures_util::stream::{FuturesUnordered, StreamExt as _};
use serde_json::{Map, Value as Json, json};
use statehouse_store::{
    Commit, Entry, Plan, Query, RetryPolicy, Row, StoreError, Tenant, Time, Value, commit_known,
};
use tokio::sync::{mpsc, oneshot, watch};
use tokio::task::{JoinHandle, JoinSet};

use super::claim::{Claimer, Want};
use super::write::FINAL;
use super::{ATTEMPT, ERROR, JOB_ID, PAYLOAD, QUEUE, RESULT, RUNNABLE, Schedule};
use crate::action::{Code, Does, Refusal};
use crate::house::{House, Operation, Request, TOGETHER_MAX, with_subject};
use crate::resource::key_text;

/// A job to do.
#[derive(Clone, Debug)]
pub struct Job {
    /// Whose it is.
    pub tenant: Tenant,
    /// Its id, under which what it does elsewhere had better be known.
    pub job_id: String,
    /// How often it was claimed, this time included.
    pub attempt: i64,
    /// Its queue.
    pub queue: String,
    /// What it is about.
    pub payload: Json,
}

/// Why a job was not done.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{error}")]
pub struct Failure {
    /// What went wrong.
    pub error: String,
    /// That trying again is of no use.
    pub is_final: bool,
}

impl Failure {
    /// Something that may go better next time.
    pub fn passing(error: impl Into<String>) -> Failure {
        Failure { error: error.into(), is_final: false }
    }
}

/// What does jobs.
#[async_trait]
pub trait Handler: Send + Sync {
    /// Does a job, and says what came of it. It may be called again for the same job, as another attempt.
    async fn handle(&self, job: &Job) -> Result<Json, Failure>;
}

/// How jobs are done in this process.
#[derive(Clone, Debug)]
pub struct Options {
    /// How many at once.
    pub at_once: usize,
    /// Under which name they are claimed.
    pub worker: String,
    /// How long a claim lasts; as the blueprint says, if not given.
    pub lease: Option<Duration>,
    /// How long it takes at most to find what another process has enqueued.
    pub idle_max: Duration,
}

impl Default for Options {
    fn default() -> Options {
        Options { at_once: 98, worker: "house".into(), lease: None, idle_max: Duration::from_millis(500) }
    }
}

/// A loop that claims jobs for a handler. Dropped, it stops at once, as a process that is killed does.
#[derive(Debug)]
pub struct Hands {
    stop: watch::Sender<bool>,
    task: Option<JoinHandle<()>>,
}

/// How long the list of tenants that wait is taken for true.
const TENANTS_FOR: Duration = Duration::from_secs(1);
/// Tenants of one shard that are looked at in one round.
const TENANTS_MAX: usize = 1_000;
/// How often a result is sent that was not taken.
const TRIES_MAX: u32 = 8;
/// What passes: somebody else, or the world, was in the way.
const PASSING: [Code; 3] = [Code::OutcomeUnknown, Code::Unavailable, Code::Contended];
/// Jobs of one claim: more than one who asks over HTTP gets, because what a claim costs by itself is shared by them.
const CLAIM_MAX: usize = 196;
/// Plans of completions in flight, but for the first one of each tenant: while some are written, the next ones gather.
const RECORDING_MAX: usize = 4;
/// Bytes of results in one plan: with what else its record says they fit into one.
const RESULTS_BYTES_MAX: usize = 300_000;

impl Hands {
    /// Starts doing jobs of one queue of a schedule, in the caller's tokio runtime.
    pub fn start(
        house: &Arc<House>,
        schedule: &str,
        queue: &str,
        handler: Arc<dyn Handler>,
        options: Options,
    ) -> Result<Hands, Refusal> {
        let (_, claim) = house.action(&format!("{schedule}_queue.claim"))?;
        let found = match &claim.does {
            Does::Several(several) => several.as_any().and_then(|any| any.downcast_ref::<Claimer>()),
            _ => None,
        };
        let claimer =
            found.ok_or_else(|| Refusal::new(Code::NotFound, format!("`{schedule}` is no schedule")))?;
        let stop = watch::Sender::new(false);
        let labour = Labour {
            house: house.clone(),
            schedule: claimer.0.clone(),
            queue: queue.to_owned(),
            handler,
            options,
            stop: stop.subscribe(),
        };
        Ok(Hands { stop, task: Some(tokio::spawn(Arc::new(labour).run())) })
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

impl Drop for Hands {
    fn drop(&mut self) {
        if let Some(task) = &self.task {
            task.abort();
        }
    }
}

struct Labour {
    house: Arc<House>,
    schedule: Arc<Schedule>,
    queue: String,
    handler: Arc<dyn Handler>,
    options: Options,
    stop: watch::Receiver<bool>,
}

impl fmt::Debug for Labour {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Labour({} {})", self.schedule.name, self.queue)
    }
}

/// The tenants that wait, and whose turn it is.
#[derive(Default)]
struct Round {
    tenants: Vec<Tenant>,
    first: usize,
    until: Duration,
    /// Whether the last claim got all that it wanted. Then several go at once.
    is_busy: bool,
}

/// How many jobs there were to do, and when there may be more.
#[derive(Default)]
struct Claimed {
    jobs: usize,
    next_at: Option<Time>,
}

/// A job that was done.
struct Done {
    job: Job,
    result: Json,
    bytes: usize,
}

/// One on its way to the store, together with others.
struct Ended {
    done: Arc<Done>,
    /// Told whether it was recorded. If it was not, it goes by itself.
    recorded: oneshot::Sender<bool>,
}

/// The first jobs that fit into one plan, and into one record of it.
fn first_that_fit(waiting: &mut VecDeque<Ended>, most: usize) -> Vec<Ended> {
    let mut bytes = 0;
    let fits = |ended: &&Ended| {
        bytes += ended.done.bytes;
        bytes <= RESULTS_BYTES_MAX
    };
    // One that does not fit by itself is refused for that.
    let many = waiting.iter().take(most).take_while(fits).count().max(1);
    waiting.drain(..many.min(waiting.len())).collect()
}

impl Labour {
    async fn run(self: Arc<Self>) {
        let clock = self.house.clock().clone();
        let (mut stop, mut news) = (self.stop.clone(), self.schedule.news.subscribe());
        let (mut tasks, mut round) = (JoinSet::new(), Round::default());
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
            let attend = |job| drop(tasks.spawn(self.clone().attend(job, ended.clone())));
            let claimed = self.claim(room, &mut round, attend).await.unwrap_or_default();
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
        round: &mut Round,
        mut attend: impl FnMut(Row),
    ) -> Result<Claimed, StoreError> {
        let clock = self.house.clock();
        if round.tenants.is_empty() || clock.uptime() >= round.until {
            round.tenants = self.tenants().await?;
            round.until = clock.uptime() + TENANTS_FOR;
        }
        let many = round.tenants.len();
        let mut claimed = Claimed::default();
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
                let want = Want { tenant, queue, worker, limit, lease: self.lease() };
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
    async fn attend(self: Arc<Self>, row: Row, ended: mpsc::UnboundedSender<Ended>) {
        let text = |name: &str| row.text(name).unwrap_or_default().to_owned();
        let job = Job {
            tenant: row.tenant().clone(),
            job_id: text(JOB_ID),
            attempt: row.int(ATTEMPT).unwrap_or(0),
            queue: text(QUEUE),
            payload: row.json(PAYLOAD).cloned().unwrap_or_default(),
        };
        let outcome = tokio::select! {
            // Most jobs are done before anybody need set a clock for them.
            biased;
            outcome = self.handler.handle(&job) => outcome,
            () = self.lose(&job) => return,
        };
        match outcome {
            Ok(result) => {
                let done = Arc::new(Done { bytes: result.to_string().len(), job, result });
                if self.schedule.concerns_nobody(&row) && self.is_recorded_with_others(&done, &ended).await {
                    return;
                }
                let input = json!({ATTEMPT: done.job.attempt, RESULT: done.result});
                self.record(&done.job, "complete", input).await;
            }
            Err(Failure { error, is_final }) => {
                let input = json!({ATTEMPT: job.attempt, ERROR: error, FINAL: is_final});
                self.record(&job, "fail", input).await;
            }
        }
    }

    /// Hands a job that was done to who records them together, and waits until it is recorded, or known not to be.
    async fn is_recorded_with_others(&self, done: &Arc<Done>, ended: &mpsc::UnboundedSender<Ended>) -> bool {
        let (recorded, is_recorded) = oneshot::channel();
        // Who records goes away after the last of these.
        ended.send(Ended { done: done.clone(), recorded }).is_ok() && is_recorded.await.unwrap_or(false)
    }

    /// Records jobs that were done, until there are no more. One that ends by itself is recorded at once; those that end
    /// while others of their tenant are being recorded gather until there are enough for a plan, or until those are.
    async fn record_all(self: Arc<Self>, mut ended: mpsc::UnboundedReceiver<Ended>) {
        let most = TOGETHER_MAX;
        let enough = (self.options.at_once / 2).clamp(1, most);
        let mut gathered: BTreeMap<Tenant, VecDeque<Ended>> = BTreeMap::new();
        // Of each tenant, how many plans are under way.
        let mut under_way: BTreeMap<Tenant, usize> = BTreeMap::new();
        let (mut recording, mut arrived, mut more) = (JoinSet::new(), Vec::new(), true);
        while more || !recording.is_empty() {
            tokio::select! {
                taken = ended.recv_many(&mut arrived, most), if more => {
                    more = taken > 0;
                    // Those that end at the same moment are about to say so.
                    tokio::task::yield_now().await;
                    while let Ok(another) = ended.try_recv() {
                        arrived.push(another);
                    }
                }
                Some(recorded) = recording.join_next() => match recorded {
                    Ok(tenant) => {
                        under_way.entry(tenant).and_modify(|plans| *plans = plans.saturating_sub(1));
                    }
                    // It panicked, and does not say whose it was: nobody waits for one that is gone.
                    Err(_) => under_way.clear(),
                },
            }
            for ended in arrived.drain(..) {
                gathered.entry(ended.done.job.tenant.clone()).or_default().push_back(ended);
            }
            gathered.retain(|tenant, waiting| {
                let plans = under_way.entry(tenant.clone()).or_default();
                while !waiting.is_empty()
                    && (*plans == 0 || (waiting.len() >= enough && recording.len() < RECORDING_MAX))
                {
                    recording.spawn(self.clone().complete(tenant.clone(), first_that_fit(waiting, most)));
                    *plans += 1;
                }
                !waiting.is_empty()
            });
            under_way.retain(|_, plans| *plans > 0);
        }
    }

    /// Completes jobs of one tenant as one plan; if something is in the way of one of them, they are told so. Returns whose
    /// they are.
    async fn complete(self: Arc<Self>, tenant: Tenant, together: Vec<Ended>) -> Tenant {
        let is_done = self.complete_as_one(&tenant, &together).await;
        for ended in together {
            // Whoever did it may have been let go of.
            let _ = ended.recorded.send(is_done);
        }
        tenant
    }

    /// Whether jobs were completed by one plan: that of `complete`, for all of them, made without the way of a request.
    async fn complete_as_one(&self, tenant: &Tenant, together: &[Ended]) -> bool {
        let Some(first) = together.first() else { return true };
        let about = key_text([&Value::from(first.done.job.job_id.as_str())]);
        let mut entry = Entry::about(&self.schedule.name, about.as_str());
        let mut steps = Vec::with_capacity(together.len());
        for Ended { done, .. } in together {
            let job = &done.job;
            let completed = self.schedule.completed(tenant, &job.job_id, job.attempt, done.result.clone());
            let Ok((step, event)) = completed else { return false };
            steps.push(self.schedule.concerning_nobody(step));
            let key = key_text([&Value::from(job.job_id.as_str())]);
            let event = with_subject(event, &self.schedule.name, &key, &entry);
            entry = entry.event(event);
        }
        let plan = Plan::of(tenant, self.house.ids().next()).steps(steps).log(entry);
        let Ok(plan) = plan.without_rows().build() else { return false };
        // Nobody need be told: what concerns nobody else lets nobody claim.
        matches!(
            commit_known(&**self.house.store(), &plan, RetryPolicy::WORKER).await,
            Ok(Commit::Applied(_))
        )
    }

    /// Holds a job for one lease after the other. Returns when it is lost (W2).
    async fn lose(&self, job: &Job) {
        let (clock, lease) = (self.house.clock(), self.lease());
        loop {
            clock.sleep(lease / 3).await;
            let (store, ids) = (&**self.house.store(), self.house.ids());
            let held = self.schedule.hold_on(store, ids, &job.tenant, &job.job_id, job.attempt, lease).await;
            let gone = |code| matches!(code, Code::NotHolder | Code::WrongState | Code::NotFound);
            if held.is_err_and(|refusal| gone(refusal.code)) {
                return;
            }
        }
    }

    /// Sends what came of a job until it is taken, or known to be of no use. If it never is, the lease ends.
    async fn record(&self, job: &Job, action: &str, input: Json) {
        let input = match input {
            Json::Object(input) => input,
            _ => Map::new(),
        };
        for tries in 0..TRIES_MAX {
            let request = Request {
                action: format!("{}.{action}", self.schedule.name),
                key: vec![Value::from(job.job_id.as_str())],
                input: input.clone(),
                expected: None,
            };
            match self.house.call(&job.tenant, request, Operation::default()).await {
                Err(Refusal { code, .. }) if PASSING.contains(&code) => {
                    self.house.clock().sleep(Duration::from_millis(10 << tries)).await;
                }
                Ok(_) | Err(_) => return,
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ended(bytes: usize) -> Ended {
        let tenant = Tenant::new("acme").unwrap();
        let job = Job { tenant, job_id: "a".into(), attempt: 1, queue: "q".into(), payload: Json::Null };
        Ended { done: Arc::new(Done { job, result: Json::Null, bytes }), recorded: oneshot::channel().0 }
    }

    #[test]
    fn jobs_go_together_as_far_as_their_results_fit_into_a_record() {
        let check = |given: &[usize], expected: &[usize]| {
            let mut waiting: VecDeque<Ended> = given.iter().map(|bytes| ended(*bytes)).collect();
            let mut sizes = Vec::new();
            while !waiting.is_empty() {
                sizes.push(first_that_fit(&mut waiting, 98).len());
            }
            assert_eq!(sizes, expected, "{given:?}");
        };
        check(&[], &[]);
        check(&[4; 100], &[98, 2]);
        check(&[200_000, 90_000, 20_000], &[2, 1]);
        // One that is too large by itself holds up nobody.
        check(&[RESULTS_BYTES_MAX + 1, 4, 4], &[1, 2]);
    }
}
