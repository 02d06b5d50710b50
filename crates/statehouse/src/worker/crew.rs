//! The workers of one process: what they share, what they have done, how they start and stop.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use statehouse_store::{Clock, Ids, Random, Store, Table, Tenant};
use tokio::sync::{Notify, watch};

use super::rota::Rota;
use super::{Bells, Figures, Options, Worker};
use crate::infra::lease::Leases;
use crate::outside::Outside;

/// The first pause after a step that failed.
pub(super) const ERROR_MIN: Duration = Duration::from_millis(100);

/// What a process's workers have done, one for each worker.
#[derive(Debug)]
pub(super) struct Tally {
    worker: String,
    shards: u32,
    pub(super) held: AtomicU64,
    pub(super) steps: AtomicU64,
    pub(super) rows: AtomicU64,
    errors: AtomicU64,
    pub(super) lags: Mutex<BTreeMap<u32, Duration>>,
    last_error: Mutex<Option<String>>,
}

impl Tally {
    fn of(worker: &dyn Worker) -> Tally {
        Tally {
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

    pub(super) fn failed(&self, why: String) {
        self.errors.fetch_add(1, Ordering::Relaxed);
        *self.last_error.lock().unwrap_or_else(PoisonError::into_inner) = Some(why);
    }

    fn figures(&self) -> Figures {
        let lags = self.lags.lock().unwrap_or_else(PoisonError::into_inner);
        Figures {
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
pub(super) struct Shop {
    pub(super) store: Arc<dyn Store>,
    pub(super) clock: Arc<dyn Clock>,
    pub(super) ids: Ids,
    pub(super) outside: Outside,
    pub(super) bells: Arc<Bells>,
    pub(super) options: Options,
    /// The newest known offsets of the log.
    pub(super) heads: watch::Sender<Vec<u64>>,
    pub(super) heads_wanted: Notify,
}

/// Workers that run. Dropped, they stop at once, as a process that is killed does.
#[derive(Debug)]
pub struct Crew {
    stop: Arc<Notify>,
    tallies: Vec<Arc<Tally>>,
    task: Option<tokio::task::JoinHandle<()>>,
}

/// Where workers find things: the house gives it.
#[derive(Clone, Debug)]
pub struct Premises {
    /// The store.
    pub store: Arc<dyn Store>,
    /// The house's clock.
    pub clock: Arc<dyn Clock>,
    /// Where ids come from.
    pub ids: Ids,
    /// What is reached beyond the store.
    pub outside: Outside,
    /// How writers wake workers.
    pub bells: Arc<Bells>,
    /// The table of leases.
    pub leases: Arc<Table>,
    /// The owner of the rows in it.
    pub tenant: Tenant,
}

impl Crew {
    /// Starts workers in the caller's tokio runtime.
    pub fn start(premises: Premises, workers: Vec<Arc<dyn Worker>>, options: Options) -> Crew {
        let Premises { store, clock, ids, outside, bells, leases, tenant } = premises;
        let stop = Arc::new(Notify::new());
        let tallies: Vec<Arc<Tally>> = workers.iter().map(|worker| Arc::new(Tally::of(&**worker))).collect();
        let heads = watch::Sender::new(Vec::new());
        let leases = Leases::of(store.clone(), clock.clone(), leases, tenant.clone());
        let heads_wanted = Notify::new();
        let shop = Arc::new(Shop { store, clock, ids, outside, bells, options, heads, heads_wanted });
        let rota =
            Rota::new(shop, leases, tenant, workers.into_iter().zip(tallies.iter().cloned()).collect());
        let task = Some(tokio::spawn(rota.run(stop.clone())));
        Crew { stop, tallies, task }
    }

    /// Lets every step under way finish, releases every lease, and returns (W4).
    pub async fn stop(mut self) {
        self.stop.notify_one();
        if let Some(task) = self.task.take() {
            // It ends by itself; if it was cut short there is nothing left to wait for.
            let _ = task.await;
        }
    }

    /// What the workers did so far.
    pub fn figures(&self) -> Vec<Figures> {
        self.tallies.iter().map(|tally| tally.figures()).collect()
    }
}

impl Drop for Crew {
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
pub(super) fn growing(first: Duration, number: u32, most: Duration) -> Duration {
    first.saturating_mul(1_u32 << number.saturating_sub(1).min(20)).min(most)
}

/// Keeps the newest offsets of the log known, as long as somebody waits for them.
pub(super) async fn follow_heads(shop: Arc<Shop>) {
    loop {
        if shop.heads.receiver_count() == 0 {
            shop.heads_wanted.notified().await;
            continue;
        }
        let seen = shop.heads.borrow().clone();
        match shop.store.wait_log(&seen, shop.options.idle_max).await {
            Ok(heads) => {
                shop.heads.send_if_modified(|known| {
                    let news = *known != heads;
                    *known = heads;
                    news
                });
            }
            Err(_) => shop.clock.sleep(shop.options.idle_max).await,
        }
    }
}
