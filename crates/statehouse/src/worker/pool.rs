//! The workers of one process: what they share, what they have done, how they start and stop.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use statehouse_store::{Clock, Ids, Random, Store, StoreError, Table, Tenant};
use tokio::sync::{Notify, watch};

use super::shard_assigner::ShardAssigner;
use super::{WakeupHub, Worker, WorkerOptions, WorkerStats};
use crate::egress::Egress;
use crate::infra::lease::Leases;

/// The first pause after a step that failed.
pub(super) const ERROR_MIN: Duration = Duration::from_millis(100);

/// What a process's workers have done, one for each worker.
#[derive(Debug)]
pub(super) struct WorkerCounters {
    worker: String,
    shards: u32,
    pub(super) held: AtomicU64,
    pub(super) steps: AtomicU64,
    pub(super) rows: AtomicU64,
    errors: AtomicU64,
    pub(super) lags: Mutex<BTreeMap<u32, Duration>>,
    last_error: Mutex<Option<String>>,
}

impl WorkerCounters {
    fn of(worker: &dyn Worker) -> WorkerCounters {
        WorkerCounters {
            worker: worker.name().to_owned(),
            shards: worker.shards(),
            held: AtomicU64::new(0),
            steps: AtomicU64::new(0),
            rows: AtomicU64::new(0),
            errors: AtomicU64::new(0),
            lags: Mutex::default(),
            last_error: Mutex::default(),
        }
    }

    pub(super) fn record_error(&self, why: String) {
        self.errors.fetch_add(1, Ordering::Relaxed);
        *self.last_error.lock().unwrap_or_else(PoisonError::into_inner) = Some(why);
    }

    fn stats(&self) -> WorkerStats {
        let lags = self.lags.lock().unwrap_or_else(PoisonError::into_inner);
        WorkerStats {
            worker: self.worker.clone(),
            shards: u64::from(self.shards),
            held: self.held.load(Ordering::Relaxed),
            steps: self.steps.load(Ordering::Relaxed),
            rows: self.rows.load(Ordering::Relaxed),
            errors: self.errors.load(Ordering::Relaxed),
            lag: lags.values().copied().max().unwrap_or_default(),
            last_error: self.last_error.lock().unwrap_or_else(PoisonError::into_inner).clone(),
        }
    }
}

/// What all loops of a process share.
#[derive(Debug)]
pub(super) struct PoolShared {
    pub(super) store: Arc<dyn Store>,
    pub(super) clock: Arc<dyn Clock>,
    pub(super) ids: Ids,
    pub(super) egress: Egress,
    pub(super) wakeups: Arc<WakeupHub>,
    pub(super) options: WorkerOptions,
    /// The newest known offsets of the log.
    pub(super) heads: watch::Sender<Vec<u64>>,
    pub(super) heads_wanted: Notify,
    /// How often the store did not do what a worker, or the assignment of shards, asked of it.
    pub(super) store_failures: AtomicU64,
}

impl PoolShared {
    /// Counts an error of the store, if it is one that passes: the store is down, or its disk is full.
    pub(super) fn record_error(&self, error: &StoreError) {
        if error.is_transient() {
            self.store_failures.fetch_add(1, Ordering::Relaxed);
        }
    }
}

/// Workers that run. Dropped, they stop at once, as a process that is killed does.
#[derive(Debug)]
pub struct WorkerPool {
    stop: Arc<Notify>,
    counters: Vec<Arc<WorkerCounters>>,
    shared: Arc<PoolShared>,
    task: Option<tokio::task::JoinHandle<()>>,
}

/// Where workers find things: the house gives it.
#[derive(Clone, Debug)]
pub struct PoolConfig {
    /// The store.
    pub store: Arc<dyn Store>,
    /// The house's clock.
    pub clock: Arc<dyn Clock>,
    /// Where ids come from.
    pub ids: Ids,
    /// What is reached beyond the store.
    pub egress: Egress,
    /// How writers wake workers.
    pub wakeups: Arc<WakeupHub>,
    /// The table of leases.
    pub leases: Arc<Table>,
    /// The owner of the rows in it.
    pub tenant: Tenant,
}

impl WorkerPool {
    /// Starts workers in the caller's tokio runtime.
    pub fn start(config: PoolConfig, workers: Vec<Arc<dyn Worker>>, options: WorkerOptions) -> WorkerPool {
        let PoolConfig { store, clock, ids, egress, wakeups, leases, tenant } = config;
        let stop = Arc::new(Notify::new());
        let counters: Vec<Arc<WorkerCounters>> =
            workers.iter().map(|worker| Arc::new(WorkerCounters::of(&**worker))).collect();
        let heads = watch::Sender::new(Vec::new());
        let leases = Leases::of(store.clone(), clock.clone(), leases, tenant.clone());
        let heads_wanted = Notify::new();
        let store_failures = AtomicU64::new(0);
        let shared = Arc::new(PoolShared {
            store,
            clock,
            ids,
            egress,
            wakeups,
            options,
            heads,
            heads_wanted,
            store_failures,
        });
        let assigner = ShardAssigner::new(
            shared.clone(),
            leases,
            tenant,
            workers.into_iter().zip(counters.iter().cloned()).collect(),
        );
        let task = Some(tokio::spawn(assigner.run(stop.clone())));
        WorkerPool { stop, counters, shared, task }
    }

    /// Lets every step under way finish, releases every lease, and returns (W4).
    pub async fn stop(mut self) {
        self.stop.notify_one();
        if let Some(task) = self.task.take() {
            // It ends by itself; if it was cut short there is nothing left to wait for.
            let _ = task.await;
        }
    }

    /// How often the store did not do what the workers asked of it, because it was unavailable.
    pub fn store_failures(&self) -> u64 {
        self.shared.store_failures.load(Ordering::Relaxed)
    }

    /// What the workers did so far.
    pub fn stats(&self) -> Vec<WorkerStats> {
        self.counters.iter().map(|counters| counters.stats()).collect()
    }
}

impl Drop for WorkerPool {
    fn drop(&mut self) {
        if let Some(task) = &self.task {
            task.abort();
        }
    }
}

/// Between half of a span and all of it, so that those who failed together do not come back together.
pub(super) fn jittered(span: Duration, random: &mut Random) -> Duration {
    span.mul_f64(0.5 + random.unit() / 2.0)
}

/// The n-th pause of a series that doubles up to a bound.
pub(super) fn exponential(first: Duration, number: u32, most: Duration) -> Duration {
    first.saturating_mul(1_u32 << number.saturating_sub(1).min(20)).min(most)
}

/// Keeps the newest offsets of the log known, while a loop waits for them.
pub(super) async fn follow_heads(shared: Arc<PoolShared>) {
    loop {
        if shared.heads.receiver_count() == 0 {
            shared.heads_wanted.notified().await;
            continue;
        }
        let seen = shared.heads.borrow().clone();
        match shared.store.wait_log(&seen, shared.options.idle_max).await {
            Ok(heads) => {
                shared.heads.send_if_modified(|known| {
                    let news = *known != heads;
                    *known = heads;
                    news
                });
            }
            Err(_) => shared.clock.sleep(shared.options.idle_max).await,
        }
    }
}
