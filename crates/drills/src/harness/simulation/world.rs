//! The bad world between processes and their store: latency, lost answers, requests that arrive late, stale indexes,
//! pauses; and the trace of what happened.

use std::collections::HashMap;
use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use async_trait::async_trait;
use statehouse_store::{
    Clock, Commit, Page, Plan, Query, Random, Resolution, Store, StoreError, Tenant, Time,
};

use super::time::VirtualClock;
use crate::harness::proxy::Interceptor;

/// What was provoked, by kind.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct SimulationStats {
    /// Operations of clients: actions that were called, each once however often it was repeated.
    pub operations: u64,
    /// Calls of the store.
    pub calls: u64,
    /// Calls that failed before they reached it.
    pub unavailable: u64,
    /// Unknown outcomes of writes that did not happen.
    pub unknown_before: u64,
    /// Unknown outcomes of writes that did.
    pub unknown_after: u64,
    /// Unknown outcomes of writes that happened, or not, some time later.
    pub late: u64,
    /// Pages of an index that were older than the rows.
    pub stale_pages: u64,
    /// Processes that died.
    pub crashes: u64,
    /// Processes that were paused.
    pub pauses: u64,
    /// Clocks that were set wrong.
    pub skews: u64,
}

impl SimulationStats {
    /// Both together.
    #[must_use]
    pub fn plus(self, other: SimulationStats) -> SimulationStats {
        SimulationStats {
            operations: self.operations + other.operations,
            calls: self.calls + other.calls,
            unavailable: self.unavailable + other.unavailable,
            unknown_before: self.unknown_before + other.unknown_before,
            unknown_after: self.unknown_after + other.unknown_after,
            late: self.late + other.late,
            stale_pages: self.stale_pages + other.stale_pages,
            crashes: self.crashes + other.crashes,
            pauses: self.pauses + other.pauses,
            skews: self.skews + other.skews,
        }
    }

    /// The faults, as pairs of a name and a number.
    pub fn faults(&self) -> [(&'static str, u64); 8] {
        [
            ("unavailable", self.unavailable),
            ("unknown, not done", self.unknown_before),
            ("unknown, done", self.unknown_after),
            ("unknown, done late", self.late),
            ("stale pages", self.stale_pages),
            ("crashes", self.crashes),
            ("pauses", self.pauses),
            ("skewed clocks", self.skews),
        ]
    }
}

impl fmt::Display for SimulationStats {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let faults: Vec<String> =
            self.faults().iter().map(|(name, count)| format!("{count} {name}")).collect();
        write!(f, "{} operations, {} calls of the store; {}", self.operations, self.calls, faults.join(", "))
    }
}

/// What all processes of a simulation share.
#[derive(Debug)]
pub(crate) struct SimulatedWorld {
    pub(crate) clock: VirtualClock,
    state: Mutex<WorldState>,
}

#[derive(Debug)]
pub(crate) struct WorldState {
    pub(crate) random: Random,
    pub(crate) stats: SimulationStats,
    /// A digest of everything that happened, in order.
    pub(crate) trace: u64,
    /// Whether things go wrong.
    pub(crate) faulty: bool,
    /// Until when a process is paused, by its number.
    pub(crate) paused_until: HashMap<usize, u64>,
    /// Former pages, by query.
    former: HashMap<String, Page>,
    /// The last plans in words, if they are wanted.
    pub(crate) told: Option<Vec<String>>,
    /// All plans as they arrived, if they are wanted.
    pub(crate) plans: Option<Vec<(Time, Plan)>>,
}

/// What happens to a commit.
#[derive(Clone, Copy)]
enum NetworkFault {
    None,
    Unavailable,
    UnknownBefore,
    UnknownAfter,
    Late,
}

/// Chances, in thousandths.
const UNAVAILABLE: u64 = 20;
const UNKNOWN_BEFORE: u64 = 20;
const UNKNOWN_AFTER: u64 = 30;
const LATE: u64 = 20;
const STALE: u64 = 300;
/// The longest that a call takes, and that a late one is late.
const LATENCY_MICROS: u64 = 20_000;
const LATE_MICROS: u64 = 4_000_000;

impl SimulatedWorld {
    pub(crate) fn new(seed: u64, tells: bool) -> SimulatedWorld {
        let state = WorldState {
            random: Random::seeded(seed),
            stats: SimulationStats::default(),
            trace: 0xcbf2_9ce4_8422_2325,
            faulty: true,
            paused_until: HashMap::new(),
            former: HashMap::new(),
            told: tells.then(Vec::new),
            plans: None,
        };
        SimulatedWorld { clock: VirtualClock::default(), state: Mutex::new(state) }
    }

    pub(crate) fn lock(&self) -> MutexGuard<'_, WorldState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Adds to the trace.
    pub(crate) fn note(&self, process: usize, what: &str, outcome: u64) {
        let at = self.clock.elapsed_micros();
        let state = &mut *self.lock();
        let numbers = [at, process as u64, outcome].into_iter().flat_map(u64::to_le_bytes);
        for byte in numbers.chain(what.bytes()) {
            state.trace = (state.trace ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3);
        }
    }

    fn tell(&self, process: usize, text: impl FnOnce() -> String) {
        let at = self.clock.now();
        if let Some(told) = &mut self.lock().told {
            told.push(format!("{at} process {process}: {}", text()));
        }
    }
}

/// Writes down what arrives at the store, if that is wanted.
#[derive(Clone, Debug)]
pub(crate) struct ArrivalRecorder(pub(crate) Arc<SimulatedWorld>);

#[async_trait]
impl Interceptor for ArrivalRecorder {
    async fn commit(&self, inner: &Arc<dyn Store>, plan: &Plan) -> Result<Commit, StoreError> {
        let at = self.0.clock.now();
        if let Some(plans) = &mut self.0.lock().plans {
            plans.push((at, plan.clone()));
        }
        inner.commit(plan).await
    }
}

/// What tells a query from others. A query in full would be a page of text for each, with its whole table.
fn asked(query: &Query) -> String {
    let range = (query.partition_values(), query.prefix_values(), query.bounds(), query.cursor_values());
    format!("{} {:?} {range:?} {}", query.source(), query.tenant(), query.page_limit())
}

/// A process's way to the store.
#[derive(Clone, Debug)]
pub(crate) struct Network {
    pub(crate) world: Arc<SimulatedWorld>,
    pub(crate) process: usize,
}

impl Network {
    /// The way there: it takes time, and if the process is paused, as long as it is.
    async fn travel(&self) {
        let span = {
            let elapsed = self.world.clock.elapsed_micros();
            let state = &mut *self.world.lock();
            state.stats.calls += 1;
            let paused =
                state.paused_until.get(&self.process).map_or(0, |until| until.saturating_sub(elapsed));
            paused + 1 + state.random.below(LATENCY_MICROS)
        };
        self.world.clock.sleep(Duration::from_micros(span)).await;
    }

    fn draw(&self) -> NetworkFault {
        let state = &mut *self.world.lock();
        if !state.faulty {
            return NetworkFault::None;
        }
        let mut left = state.random.below(1_000);
        for (chance, fault) in [
            (UNAVAILABLE, NetworkFault::Unavailable),
            (UNKNOWN_BEFORE, NetworkFault::UnknownBefore),
            (UNKNOWN_AFTER, NetworkFault::UnknownAfter),
            (LATE, NetworkFault::Late),
        ] {
            if left < chance {
                return fault;
            }
            left -= chance;
        }
        NetworkFault::None
    }
}

#[async_trait]
impl Interceptor for Network {
    async fn commit(&self, inner: &Arc<dyn Store>, plan: &Plan) -> Result<Commit, StoreError> {
        self.travel().await;
        let unknown = |why: &str| Err(StoreError::unknown(plan.operation(), why));
        let count = |count: fn(&mut SimulationStats) -> &mut u64| *count(&mut self.world.lock().stats) += 1;
        let (outcome, number) = match self.draw() {
            NetworkFault::None => {
                let outcome = inner.commit(plan).await;
                let number = match &outcome {
                    Ok(Commit::Applied(_)) => 1,
                    Ok(Commit::Refused(refused)) => 10 + refused.step as u64,
                    Ok(Commit::Fenced) => 2,
                    Err(_) => 3,
                };
                (outcome, number)
            }
            NetworkFault::Unavailable => {
                count(|stats| &mut stats.unavailable);
                (Err(StoreError::unavailable("injected")), 4)
            }
            NetworkFault::UnknownBefore => {
                count(|stats| &mut stats.unknown_before);
                (unknown("injected, before"), 5)
            }
            NetworkFault::UnknownAfter => {
                count(|stats| &mut stats.unknown_after);
                let _ = inner.commit(plan).await;
                (unknown("injected, after"), 6)
            }
            NetworkFault::Late => {
                count(|stats| &mut stats.late);
                let span = self.world.lock().random.below(LATE_MICROS);
                let (inner, plan, network) = (inner.clone(), plan.clone(), self.clone());
                tokio::spawn(async move {
                    network.world.clock.sleep(Duration::from_micros(span)).await;
                    let outcome = inner.commit(&plan).await;
                    network.world.note(network.process, plan.operation(), 7);
                    network.world.tell(network.process, || {
                        format!("{} arrives late: {outcome:?}", crate::harness::store_client::shown(&plan))
                    });
                });
                (unknown("injected, in flight"), 8)
            }
        };
        self.world.note(self.process, plan.operation(), number);
        self.world.tell(self.process, || {
            let outcome = match &outcome {
                Ok(Commit::Applied(applied)) if applied.repeated => "applied before".to_owned(),
                Ok(Commit::Applied(_)) => "applied".to_owned(),
                Ok(Commit::Refused(refused)) => format!("refused: {}", refused.describe(plan)),
                Ok(Commit::Fenced) => "fenced".to_owned(),
                Err(error) => error.to_string(),
            };
            format!("{} -> {outcome}", crate::harness::store_client::shown(plan))
        });
        outcome
    }

    async fn resolve(
        &self,
        inner: &Arc<dyn Store>,
        tenant: &Tenant,
        operation: &str,
    ) -> Result<Resolution, StoreError> {
        self.travel().await;
        let outcome = match self.draw() {
            NetworkFault::Unavailable => Err(StoreError::unavailable("injected")),
            NetworkFault::UnknownBefore | NetworkFault::Late => {
                Err(StoreError::unknown(operation, "injected, before"))
            }
            NetworkFault::UnknownAfter => {
                let _ = inner.resolve(tenant, operation).await;
                Err(StoreError::unknown(operation, "injected, after"))
            }
            NetworkFault::None => inner.resolve(tenant, operation).await,
        };
        self.world.note(self.process, operation, 20 + u64::from(outcome.is_ok()));
        self.world.tell(self.process, || format!("resolve {operation} -> {outcome:?}"));
        outcome
    }

    async fn query(&self, inner: &Arc<dyn Store>, query: &Query) -> Result<Page, StoreError> {
        self.read().await?;
        let page = inner.query(query).await?;
        if query.read_index().is_none() {
            return Ok(page);
        }
        let state = &mut *self.world.lock();
        let before = state.former.insert(asked(query), page.clone());
        match before {
            Some(before) if state.faulty && state.random.below(1_000) < STALE => {
                state.stats.stale_pages += u64::from(before.rows != page.rows);
                Ok(before)
            }
            _ => Ok(page),
        }
    }

    async fn read(&self) -> Result<(), StoreError> {
        self.travel().await;
        let state = &mut *self.world.lock();
        if state.faulty && state.random.below(1_000) < UNAVAILABLE {
            state.stats.unavailable += 1;
            return Err(StoreError::unavailable("injected"));
        }
        Ok(())
    }
}
