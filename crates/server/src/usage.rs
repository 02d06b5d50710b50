//! Limits on what a tenant has in the store: rows, timers, and bytes in the log.
//!
//! - S1. A write that creates rows (a `POST` to a collection, or a `PUT`) is admitted only while the tenant has fewer rows than
//!   `tenant_rows`, and a timer is set only while it has fewer timers than `tenant_timers`. Each admitted creation is counted at once
//!   and given back if nothing was created, so callers of one process cannot exceed a limit together.
//! - S2. A write is admitted only while the records of the tenant in the log have fewer bytes than `tenant_log_bytes`. Deletions are
//!   always admitted.
//! - S3. *The counts are approximate and corrected.* A background task counts the rows of a tenant page by page: soon after the
//!   first write, at most every [`RECOUNT_AFTER`] after that, and soon after a refusal. It works one part in ten of the time. Rows that
//!   workers or other processes create are found by the next count, and a tenant is limited only once its first count is done or
//!   this process has admitted enough. Another task reads the log from its oldest record on; bytes leave the sum when the
//!   log's retention has removed them, in parts of [`CHUNK_RECORDS`] records.
//!
//! A limit of 0 is none; without limits no task runs.

use std::collections::{BTreeMap, HashMap};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use statehouse::House;
use statehouse_store::clock::Stopwatch;
use statehouse_store::limits::PAGE_MAX;
use statehouse_store::{Clock as _, Record, Scan, StoreError, SystemClock, Tenant, Time};
use tokio::sync::{mpsc, watch};

use crate::auth::secret::SystemRowError;
use crate::config::ServerLimits;
use crate::problem::{Problem, ProblemKind, TENANT_LOG_BYTES, TENANT_ROWS, TENANT_TIMERS};

/// Age at which a count is made again, if the tenant writes.
const RECOUNT_AFTER: Duration = Duration::from_secs(60);
/// The same for a tenant that was refused: it may have deleted rows.
const RECOUNT_REFUSED_AFTER: Duration = Duration::from_secs(1);
/// For each second of counting the task pauses for this many.
const PAUSE_FACTOR: u32 = 9;
/// Records of the log whose bytes are kept as one sum.
const CHUNK_RECORDS: u64 = 1_024;
/// The longest that new records of the log are not counted.
const LOG_WAIT: Duration = Duration::from_secs(1);
/// The pause after a store error, and between two full pages of the log.
const RETRY_PAUSE: Duration = Duration::from_secs(1);
const PAGE_PAUSE: Duration = Duration::from_millis(10);
/// Counts that are kept. Tenants that have not written for long are forgotten above it.
const TENANTS_KEPT: usize = 10_000;
/// The archetype of timers.
pub const TIMER: &str = "timer";
/// The column of a timer's state, and what is in it while the timer is set.
const TIMER_STATE: &str = "status";
const TIMER_SET: &str = "SET";

/// What each tenant has, as far as it is limited.
#[derive(Clone)]
pub struct TenantUsage(Option<Arc<UsageShared>>);

struct UsageShared {
    house: Arc<House>,
    limits: StoredLimits,
    state: Mutex<UsageState>,
    /// Tenants whose rows are to be counted.
    wanted: mpsc::UnboundedSender<Tenant>,
    to_count: Mutex<Option<mpsc::UnboundedReceiver<Tenant>>>,
}

#[derive(Clone, Copy)]
struct StoredLimits {
    rows: u64,
    timers: u64,
    log_bytes: u64,
}

#[derive(Default)]
struct UsageState {
    counts: HashMap<Tenant, TenantCount>,
    log: LogBytes,
}

/// The rows of one tenant.
#[derive(Clone, Copy, Debug, Default)]
struct TenantCount {
    /// What was counted, and what was admitted since.
    stored: StoredRows,
    /// What was admitted to writes that are in progress.
    reserved: StoredRows,
    /// While rows are counted: what was admitted since the count began, or was in progress then. The count may have seen it.
    uncertain: Option<StoredRows>,
    counted_at: Option<Time>,
    used_at: Option<Time>,
    is_queued: bool,
}

/// Rows and timers: stored ones, or those that a write creates.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct StoredRows {
    /// Rows of all resources, timers among them.
    pub rows: u64,
    /// Timers that are set.
    pub timers: u64,
}

impl StoredRows {
    fn plus(self, more: StoredRows) -> StoredRows {
        StoredRows {
            rows: self.rows.saturating_add(more.rows),
            timers: self.timers.saturating_add(more.timers),
        }
    }

    fn minus(self, less: StoredRows) -> StoredRows {
        StoredRows {
            rows: self.rows.saturating_sub(less.rows),
            timers: self.timers.saturating_sub(less.timers),
        }
    }
}

impl TenantCount {
    fn reserve(&mut self, creates: StoredRows) {
        self.stored = self.stored.plus(creates);
        self.reserved = self.reserved.plus(creates);
        self.uncertain = self.uncertain.map(|uncertain| uncertain.plus(creates));
    }

    /// Ends a reservation of which this much was not created.
    fn release(&mut self, admitted: StoredRows, not_created: StoredRows) {
        self.reserved = self.reserved.minus(admitted);
        self.stored = self.stored.minus(not_created);
    }

    fn begin_count(&mut self) {
        self.uncertain = Some(self.reserved);
    }

    /// Takes over a count. What is uncertain may be in the count or not: within these bounds the own sum is kept.
    fn end_count(&mut self, counted: Option<StoredRows>, now: Time) {
        self.is_queued = false;
        self.counted_at = Some(now);
        let uncertain = self.uncertain.take().unwrap_or_default();
        let Some(counted) = counted else { return };
        let most = counted.plus(uncertain);
        self.stored = StoredRows {
            rows: self.stored.rows.clamp(counted.rows, most.rows),
            timers: self.stored.timers.clamp(counted.timers, most.timers),
        };
    }
}

/// Bytes of the log by tenant, in sums of some records each.
#[derive(Debug, Default)]
struct LogBytes {
    chunks: BTreeMap<(u32, u64), HashMap<Tenant, u64>>,
    totals: HashMap<Tenant, u64>,
}

/// What a write was admitted to create. It is given back when this is dropped, unless the write created it.
pub struct Creation {
    usage: TenantUsage,
    tenant: Tenant,
    admitted: StoredRows,
    not_created: StoredRows,
}

impl Creation {
    /// The write created this many rows.
    pub fn created(mut self, rows: u64) {
        let missing = self.admitted.rows.saturating_sub(rows);
        self.not_created = StoredRows { rows: missing, timers: self.admitted.timers.min(missing) };
    }
}

impl Drop for Creation {
    fn drop(&mut self) {
        let Some(usage) = &self.usage.0 else { return };
        if let Some(count) = usage.lock().counts.get_mut(&self.tenant) {
            count.release(self.admitted, self.not_created);
        }
    }
}

impl TenantUsage {
    /// Counts for these limits.
    pub fn new(house: &Arc<House>, limits: &ServerLimits) -> TenantUsage {
        let limits = StoredLimits {
            rows: limits.tenant_rows,
            timers: limits.tenant_timers,
            log_bytes: limits.tenant_log_bytes,
        };
        if [limits.rows, limits.timers, limits.log_bytes] == [0; 3] {
            return TenantUsage(None);
        }
        let (wanted, to_count) = mpsc::unbounded_channel();
        TenantUsage(Some(Arc::new(UsageShared {
            house: house.clone(),
            limits,
            state: Mutex::default(),
            wanted,
            to_count: Mutex::new(Some(to_count)),
        })))
    }

    /// Starts the tasks that count, until the server stops.
    pub fn start(&self, stopping: &watch::Receiver<bool>) {
        let Some(usage) = &self.0 else { return };
        let to_count = usage.to_count.lock().unwrap_or_else(PoisonError::into_inner).take();
        if let Some(to_count) = to_count.filter(|_| usage.limits.rows > 0 || usage.limits.timers > 0) {
            let (usage, stopping) = (usage.clone(), stopping.clone());
            tokio::spawn(until_stopped(stopping, async move { usage.count_wanted(to_count).await }));
        }
        if usage.limits.log_bytes > 0 {
            let (usage, stopping) = (usage.clone(), stopping.clone());
            tokio::spawn(until_stopped(stopping, async move { usage.follow_log().await }));
        }
    }

    /// Admits a write that may create this much (S1, S2).
    pub fn admit(&self, tenant: &Tenant, creates: StoredRows, deletes: bool) -> Result<Creation, Problem> {
        if let Some(usage) = &self.0 {
            if !deletes {
                usage.check_log(tenant)?;
            }
            usage.reserve(tenant, creates)?;
        }
        Ok(Creation { usage: self.clone(), tenant: tenant.clone(), admitted: creates, not_created: creates })
    }
}

impl UsageShared {
    fn lock(&self) -> MutexGuard<'_, UsageState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn check_log(&self, tenant: &Tenant) -> Result<(), Problem> {
        let bytes = self.lock().log.totals.get(tenant).copied().unwrap_or_default();
        if self.limits.log_bytes == 0 || bytes < self.limits.log_bytes {
            return Ok(());
        }
        let detail = format!(
            "the log has {bytes} bytes of this tenant; the limit is {} (limits.tenant_log_bytes), and records leave the log \
             when its retention has passed",
            self.limits.log_bytes
        );
        Err(Problem::new(TENANT_LOG_BYTES, detail))
    }

    fn reserve(&self, tenant: &Tenant, creates: StoredRows) -> Result<(), Problem> {
        if creates == StoredRows::default() || (self.limits.rows == 0 && self.limits.timers == 0) {
            return Ok(());
        }
        let now = self.house.clock().now();
        let mut state = self.lock();
        state.forget_idle(now);
        let count = state.counts.entry(tenant.clone()).or_default();
        count.used_at = Some(now);
        let exceeds =
            |limit: u64, stored: u64, new: u64| limit > 0 && new > 0 && stored.saturating_add(new) > limit;
        let is_refused = exceeds(self.limits.rows, count.stored.rows, creates.rows)
            || exceeds(self.limits.timers, count.stored.timers, creates.timers);
        let again_after = if is_refused { RECOUNT_REFUSED_AFTER } else { RECOUNT_AFTER };
        let is_old = count.counted_at.is_none_or(|at| now.since(at) >= again_after);
        if is_old && !count.is_queued {
            // The receiver lives as long as this: it is in `to_count`, or in the task.
            count.is_queued = self.wanted.send(tenant.clone()).is_ok();
        }
        if exceeds(self.limits.timers, count.stored.timers, creates.timers) {
            return Err(self.exceeded(TENANT_TIMERS, "timers", count.stored.timers, self.limits.timers));
        }
        if exceeds(self.limits.rows, count.stored.rows, creates.rows) {
            return Err(self.exceeded(TENANT_ROWS, "rows", count.stored.rows, self.limits.rows));
        }
        count.reserve(creates);
        Ok(())
    }

    fn exceeded(&self, kind: ProblemKind, what: &str, stored: u64, limit: u64) -> Problem {
        let setting = kind.code;
        let detail = format!(
            "the tenant has about {stored} {what}; the limit is {limit} (limits.{}). Delete some first",
            setting.trim_end_matches("_limit")
        );
        Problem::new(kind, detail)
    }

    /// Counts tenants, one after the other.
    async fn count_wanted(&self, mut to_count: mpsc::UnboundedReceiver<Tenant>) {
        while let Some(tenant) = to_count.recv().await {
            let watch = Stopwatch::start();
            if let Some(count) = self.lock().counts.get_mut(&tenant) {
                count.begin_count();
            }
            let counted = self.count(&tenant).await;
            let now = self.house.clock().now();
            if let Some(count) = self.lock().counts.get_mut(&tenant) {
                count.end_count(counted.as_ref().ok().copied(), now);
            }
            if let Err(error) = counted {
                tracing::warn!(target: "statehouse::http", %tenant, %error, "the rows of a tenant could not be counted");
                SystemClock.sleep(RETRY_PAUSE).await;
            }
            SystemClock.sleep(watch.elapsed() * PAUSE_FACTOR).await;
        }
    }

    /// Counts the rows of a tenant, page by page. It stops once all limits are exceeded.
    async fn count(&self, tenant: &Tenant) -> Result<StoredRows, SystemRowError> {
        let mut stored = StoredRows::default();
        let is_over = |limit: u64, count: u64| limit == 0 || count > limit;
        for resource in self.house.resources() {
            let own = resource.tables.first().map(|table| table.name());
            for table in &resource.tables {
                let is_timer = resource.archetype.keyword() == TIMER && own == Some(table.name());
                let mut scan = Scan::of(table, tenant).limit(PAGE_MAX)?;
                loop {
                    let page = self.house.store().scan(&scan).await?;
                    stored.rows += page.rows.len() as u64;
                    if is_timer {
                        let set = page.rows.iter().filter(|row| row.text(TIMER_STATE) == Some(TIMER_SET));
                        stored.timers += set.count() as u64;
                    }
                    if is_over(self.limits.rows, stored.rows) && is_over(self.limits.timers, stored.timers) {
                        return Ok(stored);
                    }
                    let Some(next) = page.next else { break };
                    scan = scan.after(next)?;
                    tokio::task::yield_now().await;
                }
            }
        }
        Ok(stored)
    }

    /// Adds up the bytes of the log, for as long as the server runs.
    async fn follow_log(&self) {
        let store = self.house.store();
        let mut seen = vec![0; usize::try_from(store.partitions()).unwrap_or_default()];
        loop {
            let read = self.read_log(&mut seen).await;
            let waited = match read {
                Ok(true) => {
                    SystemClock.sleep(PAGE_PAUSE).await;
                    Ok(Vec::new())
                }
                Ok(false) => store.wait_log(&seen, LOG_WAIT).await,
                Err(error) => Err(error),
            };
            if let Err(error) = waited {
                tracing::warn!(target: "statehouse::http", %error, "the bytes of the log could not be counted");
                SystemClock.sleep(RETRY_PAUSE).await;
            }
        }
    }

    /// Reads a page of each partition. Says whether there is more.
    async fn read_log(&self, seen: &mut [u64]) -> Result<bool, StoreError> {
        let mut has_more = false;
        for (partition, seen) in (0_u32..).zip(seen.iter_mut()) {
            let page = self.house.store().read_log(partition, *seen, PAGE_MAX).await?;
            let mut state = self.lock();
            state.log.forget_below(partition, page.oldest);
            for record in &page.records {
                let Some(position) = record.position else { continue };
                state.log.add(partition, position.offset, &record.tenant, bytes_of(record));
                *seen = position.offset;
            }
            has_more |= *seen < page.head && !page.records.is_empty();
        }
        Ok(has_more)
    }
}

/// About what a record takes in the log.
fn bytes_of(record: &Record) -> u64 {
    serde_json::to_vec(record).map_or(0, |json| json.len() as u64)
}

async fn until_stopped(mut stopping: watch::Receiver<bool>, task: impl Future<Output = ()>) {
    tokio::select! {
        () = task => {}
        // An error means that the server is gone.
        _ = stopping.wait_for(|stopping| *stopping) => {}
    }
}

impl UsageState {
    /// Forgets tenants that have not written for long, if there are many.
    fn forget_idle(&mut self, now: Time) {
        if self.counts.len() > TENANTS_KEPT {
            let is_recent = |at: Time| now.since(at) < RECOUNT_AFTER;
            self.counts.retain(|_, count| {
                count.is_queued
                    || count.reserved != StoredRows::default()
                    || count.used_at.is_some_and(is_recent)
            });
        }
    }
}

impl LogBytes {
    fn add(&mut self, partition: u32, offset: u64, tenant: &Tenant, bytes: u64) {
        let chunk = self.chunks.entry((partition, offset / CHUNK_RECORDS)).or_default();
        *chunk.entry(tenant.clone()).or_default() += bytes;
        *self.totals.entry(tenant.clone()).or_default() += bytes;
    }

    /// Takes off the chunks whose records are all below the oldest one that is kept.
    fn forget_below(&mut self, partition: u32, oldest: u64) {
        let kept = oldest / CHUNK_RECORDS;
        while let Some((&key, _)) = self.chunks.range((partition, 0)..(partition, kept)).next() {
            for (tenant, bytes) in self.chunks.remove(&key).unwrap_or_default() {
                let Some(total) = self.totals.get_mut(&tenant) else { continue };
                *total = total.saturating_sub(bytes);
                if *total == 0 {
                    self.totals.remove(&tenant);
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bytes_leave_the_sum_with_their_records() {
        let (acme, other) = (Tenant::new("acme").unwrap(), Tenant::new("other").unwrap());
        let mut log = LogBytes::default();
        log.add(0, 1, &acme, 10);
        log.add(0, CHUNK_RECORDS, &acme, 20);
        log.add(0, CHUNK_RECORDS, &other, 5);
        log.add(1, 1, &acme, 40);
        assert_eq!((log.totals[&acme], log.totals[&other]), (70, 5));
        log.forget_below(0, CHUNK_RECORDS);
        assert_eq!(log.totals[&acme], 60, "the first chunk has no kept record, the second one has");
        log.forget_below(0, CHUNK_RECORDS * 2 - 1);
        assert_eq!(log.totals[&acme], 60);
        log.forget_below(0, CHUNK_RECORDS * 2);
        assert_eq!((log.totals.get(&acme), log.totals.get(&other)), (Some(&40), None));
    }

    #[test]
    fn a_count_corrects_the_sum_but_not_by_what_was_created_meanwhile() {
        let rows = |rows: u64| StoredRows { rows, timers: 0 };
        let now = Time::from_micros(0);
        let mut count = TenantCount::default();
        count.reserve(rows(1));
        // The count begins while the write is in progress, and ends before or after the row was seen.
        for seen in [0, 1] {
            let mut count = count;
            count.begin_count();
            count.end_count(Some(rows(seen)), now);
            assert_eq!(count.stored, rows(1), "seen: {seen}");
        }
        count.release(rows(1), rows(0));
        count.begin_count();
        count.end_count(Some(rows(7)), now);
        assert_eq!(count.stored, rows(7), "rows of others are found");
        count.begin_count();
        count.end_count(Some(rows(3)), now);
        assert_eq!(count.stored, rows(3), "deleted rows are taken off");
        count.begin_count();
        count.end_count(None, now);
        assert_eq!(count.stored, rows(3), "a count that failed says nothing");
        count.reserve(rows(2));
        count.release(rows(2), rows(2));
        assert_eq!((count.stored, count.reserved), (rows(3), rows(0)), "what was not created is given back");
    }
}
