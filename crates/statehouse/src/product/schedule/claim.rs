//! Claims and heartbeats. A claim takes the first jobs of a range ([`statehouse_store::claim_range`]); heartbeats are plans of one
//! row each, in flight together. Either way each job is decided by itself, and an engine makes one of many. They leave nothing
//! in the log: their guards make them safe to repeat, and the row says who has it.

use std::any::Any;
use std::collections::HashMap;
use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use async_trait::async_trait;
use futures_util::future::join_all;
use serde_json::{Value as Json, json};
use statehouse_store::guard::{column, now, now_plus};
use statehouse_store::limits::row_weight;
use statehouse_store::log::partition_of;
use statehouse_store::{
    Address, Bug, Cell, ClaimRange, Clock, Commit, Entry, EventTemplate, Ids, Plan, PlanError, Query,
    ReadRequest, ReadResult, Reason, Refused, RetryPolicy, Row, Step, Store, StoreError, Tenant, Time,
    commit_known,
};

use super::rules::field_error;
use super::{
    ATTEMPT, ATTEMPTS_MAX, BATCH_MAX, CLAIM_BYTES_MAX, CLAIM_ID, ERROR, FAILED, IN_PROGRESS, JOB_ID, OWNER,
    PAUSED, PRIORITY, QUEUE, RUN_AT, RUN_SHARD, RUNNABLE, STARTED_AT, STATE, ScheduleSpec, UPDATED_AT,
    WORKER,
};
use crate::action::{ActionContext, Answer, Call, Code, MultiPlan, Refusal};
use crate::inputs::Input;
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
/// Ranges that a claim looks at in one go.
const RANGES_MAX: usize = 64;

/// How long a range is looked at from where it began. What is enqueued comes behind that, except for what should have been
/// done earlier; it is found when this is over.
const BEGUN_FOR: Duration = Duration::from_secs(1);
/// Ranges of which that is known, at most.
const BEGUN_MAX: usize = 1_024;

/// A range of some tenant's queue.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
struct RangeKey {
    tenant: String,
    queue: String,
    range: QueueRange,
}

impl RangeKey {
    fn of(want: ClaimRequest<'_>, range: QueueRange) -> RangeKey {
        RangeKey { tenant: want.tenant.as_str().to_owned(), queue: want.queue.to_owned(), range }
    }
}

/// Where a range began, and until when that is taken for true.
#[derive(Clone, Copy, Debug)]
struct RangeStart {
    at: Time,
    until: Duration,
}

/// The first known entry of each range. Dead index entries of finished jobs precede the live ones until the engine removes them;
/// a scan from the start would read them all, so claims start at the last known first entry.
#[derive(Debug, Default)]
pub(super) struct RangeStartCache(Mutex<HashMap<RangeKey, RangeStart>>);

impl RangeStartCache {
    fn lock(&self) -> MutexGuard<'_, HashMap<RangeKey, RangeStart>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Where a range began, until the next claim has got all that it wanted there.
    fn take_fresh(&self, range: &RangeKey, uptime: Duration) -> Option<RangeStart> {
        self.lock().remove(range).filter(|begun| uptime < begun.until)
    }

    fn remember(&self, range: RangeKey, begun: RangeStart) {
        let mut known = self.lock();
        if known.len() >= BEGUN_MAX {
            known.clear();
        }
        known.insert(range, begun);
    }
}

/// Who wants jobs of which queue.
#[derive(Clone, Copy, Debug)]
pub(super) struct ClaimRequest<'a> {
    pub tenant: &'a Tenant,
    pub queue: &'a str,
    pub worker: &'a str,
    pub limit: usize,
    pub lease: Duration,
}

/// What a claim came to.
#[derive(Debug, Default)]
pub(super) struct ClaimResult {
    /// The jobs, as they are now.
    pub jobs: Vec<Row>,
    /// When the next one can be claimed, as far as was seen.
    pub next_at: Option<Time>,
    bytes: usize,
}

impl ClaimResult {
    fn is_full(&self, want: ClaimRequest<'_>) -> bool {
        self.jobs.len() >= want.limit || self.bytes >= CLAIM_BYTES_MAX
    }

    fn expect(&mut self, later: Time) {
        self.next_at = Some(self.next_at.map_or(later, |at| at.min(later)));
    }
}

/// What a claim has left of a range.
#[derive(Clone, Copy, Debug)]
struct RangeRest {
    has_failed_some: bool,
    may_be_more: bool,
}

/// Where jobs are claimed from: a shard and a priority of a tenant's queue.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
struct QueueRange {
    shard: usize,
    priority: i64,
}

impl ScheduleSpec {
    /// Claims jobs of a queue, as many as there are and are wanted.
    pub(super) async fn claim(
        &self,
        store: &dyn Store,
        clock: &dyn Clock,
        ids: &Ids,
        want: ClaimRequest<'_>,
    ) -> Result<ClaimResult, StoreError> {
        let mut found = ClaimResult::default();
        let shards = self.shards as usize;
        let first = self.turn.fetch_add(1, Ordering::Relaxed);
        let ranges: Vec<QueueRange> = (0..self.priorities)
            .flat_map(|priority| {
                (0..shards)
                    .map(move |index| QueueRange { shard: first.wrapping_add(index) % shards, priority })
            })
            .collect();
        // If the first one gave enough lately, it is looked at alone, from where it began then: it may again.
        let index = ranges.first().map(|range| RangeKey::of(want, *range));
        let begun = index.as_ref().and_then(|index| self.begun.take_fresh(index, clock.uptime()));
        let (ahead, others) = ranges.split_at(usize::from(begun.is_some()));
        let (ahead, others) = (ahead.chunks(1), others.chunks(RANGES_MAX));
        let in_turn = ahead.map(|ahead| (ahead, begun)).chain(others.map(|others| (others, None)));
        let mut tried = 0;
        for (ranges, begun) in in_turn {
            if found.is_full(want) {
                break;
            }
            // What each begins with tells whether there is anything to claim.
            let firsts = match self.firsts(store, want, ranges, begun.map(|begun| begun.at)).await {
                Err(_) if !found.jobs.is_empty() => return Ok(found),
                firsts => firsts?,
            };
            let Some(firsts) = firsts else { return Ok(found) };
            for (range, first) in ranges.iter().zip(firsts) {
                if found.is_full(want) {
                    break;
                }
                tried += 1;
                match first.filter(|row| row.tenant() == want.tenant).and_then(|row| row.time(RUN_AT)) {
                    Some(run_at) if run_at <= clock.now() => {
                        self.claim_range(store, clock, ids, want, (*range, run_at), &mut found).await?;
                        if let Some(index) = index.clone().filter(|_| tried == 1 && found.is_full(want)) {
                            let until = begun.map_or(clock.uptime() + BEGUN_FOR, |begun| begun.until);
                            self.begun.remember(index, RangeStart { at: run_at, until });
                        }
                    }
                    Some(later) => found.expect(later),
                    None => {}
                }
            }
        }
        Ok(found)
    }

    /// The first job of each range; none if the queue is paused.
    async fn firsts(
        &self,
        store: &dyn Store,
        want: ClaimRequest<'_>,
        ranges: &[QueueRange],
        from: Option<Time>,
    ) -> Result<Option<Vec<Option<Row>>>, StoreError> {
        let paused = Address::new(&self.queues, want.tenant, [want.queue.into()])
            .and_then(|queue| Cell::new(queue, PAUSED))
            .map_err(|error| self.misuse(&error))?;
        let first = |range: &QueueRange| {
            let query = self.runnable(want, *range)?.limit(1)?;
            match from {
                Some(from) => query.from(from),
                None => Ok(query),
            }
        };
        let queries: Vec<Query> =
            ranges.iter().map(first).collect::<Result<_, _>>().map_err(|error| self.misuse(&error))?;
        let asks: Vec<ReadRequest<'_>> =
            [ReadRequest::Value(&paused)].into_iter().chain(queries.iter().map(ReadRequest::Query)).collect();
        let mut seen = store.read_many(&asks).await?.into_iter();
        let paused = seen.next().map(ReadResult::into_value).transpose()?.flatten();
        if paused.and_then(|paused| paused.as_bool()) == Some(true) {
            return Ok(None);
        }
        let first = |seen: ReadResult| Ok(seen.into_page()?.rows.into_iter().next());
        Ok(Some(seen.map(first).collect::<Result<_, StoreError>>()?))
    }

    /// The jobs of a range, in the order of their times.
    fn runnable(&self, want: ClaimRequest<'_>, range: QueueRange) -> Result<Query, PlanError> {
        let shard = i64::try_from(range.shard).unwrap_or(0);
        // The prefix is the tenant's own name: of the index across tenants nothing else is read.
        Query::all_tenants(&self.jobs, RUNNABLE, [want.queue.into(), shard.into()])?
            .prefix([want.tenant.as_str().into(), range.priority.into()])
    }

    fn misuse(&self, error: &PlanError) -> StoreError {
        StoreError::schema(self.name.as_str(), error.to_string())
    }

    /// Claims from one range, of which the first job is known, while no other claimer of this process does.
    async fn claim_range(
        &self,
        store: &dyn Store,
        clock: &dyn Clock,
        ids: &Ids,
        want: ClaimRequest<'_>,
        (range, first): (QueueRange, Time),
        found: &mut ClaimResult,
    ) -> Result<(), StoreError> {
        let shard = range.shard.to_string();
        let stripe = partition_of(want.tenant, want.queue, &shard, super::STRIPES as u32) as usize;
        let _turn = match self.stripes.get(stripe) {
            Some(stripe) => Some(stripe.lock().await),
            None => None,
        };
        while !found.is_full(want) {
            let rows = want.limit - found.jobs.len();
            let take = self.taking(clock, ids, want, (range, first), rows);
            let take = take.map_err(|error| self.misuse(&error))?;
            let taken = match store.claim_range(&take.limit_bytes(CLAIM_BYTES_MAX - found.bytes)).await {
                Ok(taken) => taken,
                Err(error) if found.jobs.is_empty() => return Err(error),
                // The jobs that are claimed are answered. Those that this request may have claimed run again after their lease.
                Err(_) => return Ok(()),
            };
            let (all, some) = (taken.len() == rows, !taken.is_empty());
            for row in taken {
                found.bytes += row_weight(&row);
                found.jobs.push(row);
            }
            if all || found.is_full(want) {
                continue;
            }
            // Nothing is left to claim, unless it stood behind what could not be.
            let behind = match self.inspect_rest(store, clock, ids, want, range, found).await {
                // What was claimed is told, whatever becomes of the rest.
                Err(_) if !found.jobs.is_empty() => break,
                behind => behind?,
            };
            if !behind.may_be_more || !(some || behind.has_failed_some) {
                break;
            }
        }
        Ok(())
    }

    /// A claim (I1) of so many jobs that are due and have attempts left (I4).
    fn taking(
        &self,
        clock: &dyn Clock,
        ids: &Ids,
        want: ClaimRequest<'_>,
        (range, first): (QueueRange, Time),
        rows: usize,
    ) -> Result<ClaimRange, PlanError> {
        let query = self.runnable(want, range)?.from(first)?.to(clock.now())?.limit(rows)?;
        // The index's columns are all set, as they are, so that an engine need not read the row for them.
        let step = Step::update(&self.jobs, [])
            .guard(column(RUN_AT).le(now()))
            .guard(column(ATTEMPT).lt(column(ATTEMPTS_MAX)))
            .set(STATE, IN_PROGRESS)
            .set(ATTEMPT, column(ATTEMPT).add(1))
            .set(WORKER, want.worker)
            .set(QUEUE, want.queue)
            .set(RUN_SHARD, i64::try_from(range.shard).unwrap_or(0))
            .set(OWNER, want.tenant.as_str())
            .set(PRIORITY, range.priority)
            .set(RUN_AT, now_plus(want.lease))
            .set(STARTED_AT, now())
            .set(UPDATED_AT, now());
        ClaimRange::of(want.tenant, ids.next(), query, step, CLAIM_ID)
    }

    /// Looks at what a claim has left of a range: fails the jobs without attempts left, and notes when the next one can be
    /// claimed.
    async fn inspect_rest(
        &self,
        store: &dyn Store,
        clock: &dyn Clock,
        ids: &Ids,
        want: ClaimRequest<'_>,
        range: QueueRange,
        found: &mut ClaimResult,
    ) -> Result<RangeRest, StoreError> {
        let limit = usize::try_from(BATCH_MAX).unwrap_or(1);
        let query = self.runnable(want, range).and_then(|query| query.limit(limit));
        let page = store.query(&query.map_err(|error| self.misuse(&error))?).await?;
        let at = clock.now();
        let is_due = |row: &&Row| row.time(RUN_AT).is_some_and(|run_at| run_at <= at);
        let due: Vec<&Row> =
            page.rows.iter().filter(|row| row.tenant() == want.tenant).take_while(is_due).collect();
        let (over, left): (Vec<&Row>, Vec<&Row>) =
            due.iter().partition(|row| row.int(ATTEMPT) >= row.int(ATTEMPTS_MAX));
        let mut has_failed_some = false;
        for failed in join_all(over.iter().map(|row| self.fail_exhausted(store, ids, row))).await {
            match failed {
                Ok(failed) => has_failed_some |= failed,
                Err(error) if found.jobs.is_empty() => return Err(error),
                Err(_) => {}
            }
        }
        if let Some(later) = page.rows.get(due.len()).and_then(|row| row.time(RUN_AT)) {
            found.expect(later);
        }
        Ok(RangeRest { has_failed_some, may_be_more: !left.is_empty() || page.rows.len() == limit })
    }

    /// Fails a job whose last lease has expired: its worker is gone. Returns whether it has.
    async fn fail_exhausted(&self, store: &dyn Store, ids: &Ids, row: &Row) -> Result<bool, StoreError> {
        let (job_id, attempt) = (row.get_text(JOB_ID)?, row.get_int(ATTEMPT)?);
        let step = Step::update(&self.jobs, row.key().iter().cloned())
            .guard(ScheduleSpec::held(attempt))
            .guard(column(RUN_AT).le(now()))
            .set(ERROR, "the lease of the last attempt ran out");
        let mut steps = vec![self.over(step, row.tenant(), job_id, FAILED)];
        match self.admit_next(store, row).await {
            Ok(left) => steps.extend(left),
            // The next claim tries again.
            Err(_) => return Ok(false),
        }
        let event = EventTemplate::named(format!("{}.failed", self.name)).with_row_of(0);
        let entry = Entry::about(&self.name, key_text(row.key())).event(event);
        let plan = Plan::of(row.tenant(), ids.next()).steps(steps).log(entry).without_rows().build();
        let plan = plan.map_err(|error| self.misuse(&error))?;
        let outcome = commit_known(store, &plan, RetryPolicy::WORKER).await?;
        self.notify_waiting();
        Ok(matches!(outcome, Commit::Applied(_)))
    }

    /// Holds a job for another lease, if it is still this attempt's.
    pub(super) async fn heartbeat(
        &self,
        store: &dyn Store,
        ids: &Ids,
        tenant: &Tenant,
        job_id: &str,
        attempt: i64,
        lease: Duration,
    ) -> Result<(), Refusal> {
        let step = Step::update(&self.jobs, [job_id.into()])
            .guard(ScheduleSpec::held(attempt))
            .set(RUN_AT, now_plus(lease));
        let plan = Plan::of(tenant, ids.next()).step(step).without_rows().build()?;
        match commit_known(store, &plan, RetryPolicy::WORKER).await? {
            Commit::Applied(_) => Ok(()),
            Commit::Refused(Refused { reason: Reason::Guard { .. }, current: Some(row), .. }) => {
                Err(self.lost(&row, attempt)?)
            }
            Commit::Refused(_) | Commit::Fenced => {
                Err(Refusal::new(Code::NotFound, format!("{} {job_id} does not exist", self.name)))
            }
        }
    }
}

fn duration(call: &Call, name: &str) -> Option<Duration> {
    call.input.duration_ms(name)
}

/// `claim`.
pub(super) struct ClaimJobs(pub Arc<ScheduleSpec>);

#[async_trait]
impl MultiPlan for ClaimJobs {
    async fn run(&self, call: &Call, cx: &ActionContext<'_>) -> Result<Answer, Refusal> {
        let schedule = &self.0;
        let want = ClaimRequest {
            tenant: &call.tenant,
            queue: call.key_text()?,
            worker: call.input.get_text(WORKER)?,
            limit: call.input.count(LIMIT).and_then(|n| usize::try_from(n).ok()).unwrap_or(1),
            lease: duration(call, LEASE_MS).unwrap_or(schedule.lease),
        };
        let until = cx.clock.uptime() + duration(call, WAIT_MS).unwrap_or_default();
        let mut news = schedule.news.subscribe();
        loop {
            // What is told from here on ends the pause below.
            news.borrow_and_update();
            let found = schedule.claim(cx.store, cx.clock, cx.ids, want).await?;
            let left = until.saturating_sub(cx.clock.uptime());
            if !found.jobs.is_empty() || left.is_zero() {
                let jobs: Vec<Json> = found.jobs.iter().map(|row| self.0.jobs_def.row_json(row)).collect();
                return Ok(Answer::row(json!(jobs)));
            }
            let due_in = found.next_at.map_or(LOOK_EVERY, |at| at.since(cx.clock.now()));
            let pause = left.min(LOOK_EVERY).min(due_in.max(Duration::from_millis(1)));
            tokio::select! {
                () = cx.clock.sleep(pause) => {}
                _ = news.changed() => {}
            }
        }
    }

    fn as_any(&self) -> Option<&dyn Any> {
        Some(self)
    }
}

/// `heartbeat`.
pub(super) struct Heartbeat(pub Arc<ScheduleSpec>);

#[async_trait]
impl MultiPlan for Heartbeat {
    async fn run(&self, call: &Call, cx: &ActionContext<'_>) -> Result<Answer, Refusal> {
        let lease = duration(call, LEASE_MS).unwrap_or(self.0.lease);
        let jobs = call.input.list(JOBS);
        if jobs.len() > usize::try_from(BATCH_MAX).unwrap_or(1) {
            return Err(field_error(
                JOBS,
                &format!("at most {BATCH_MAX} at a time; these are {}", jobs.len()),
            ));
        }
        let beats = jobs.iter().filter_map(Input::object).map(async |job| {
            let (job_id, attempt) = (job.get_text(JOB_ID)?, job.get_int(ATTEMPT)?);
            let held = self.0.heartbeat(cx.store, cx.ids, &call.tenant, job_id, attempt, lease).await;
            Ok(match held {
                Ok(()) => json!({JOB_ID: job_id, DONE: true, CODE: null, MESSAGE: null}),
                Err(refusal) => {
                    json!({JOB_ID: job_id, DONE: false, CODE: refusal.code.name(), MESSAGE: refusal.message})
                }
            })
        });
        let outcomes: Vec<Json> = join_all(beats).await.into_iter().collect::<Result<_, Bug>>()?;
        Ok(Answer::row(json!(outcomes)))
    }
}
