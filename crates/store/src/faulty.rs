//! A wrapper that makes any store fail, by a seed: delays, refusals to work, lost answers, crashed callers, stale reads.
//!
//! What it does to a call is what a network or a machine would do: the wrapped store itself stays right. It counts
//! what it achieved, because a seed that provoked nothing has shown nothing.

use std::collections::{HashMap, VecDeque};
use std::fmt;
use std::future::Future;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use async_trait::async_trait;

use crate::blank::{BlankRange, BlankedPage};
use crate::clock::Clock;
use crate::error::StoreError;
use crate::log::{LogPage, Record};
use crate::migration::{Migrate, SchemaChange};
use crate::outcome::{Commit, Resolution};
use crate::plan::Plan;
use crate::random::Random;
use crate::read::{Consistency, Page, Query};
use crate::row::{Address, Row, Tenant};
use crate::scan::{Scan, Segment};
use crate::store::{ExplainRequest, Explanation, Store};
use crate::table::Schema;
use crate::time::Time;

/// How often each fault is tried, from 0 (never) to 1 (always).
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Odds {
    /// A call takes up to [`Odds::delay_at_most`] longer.
    pub delay: f64,
    /// The longest delay.
    pub delay_at_most: Duration,
    /// A call fails with `Unavailable` before it reaches the store.
    pub unavailable: f64,
    /// A commit or a resolve never reaches the store, and the caller gets `OutcomeUnknown`.
    pub unknown_before: f64,
    /// A commit or a resolve reaches the store, and the caller gets `OutcomeUnknown`.
    pub unknown_after: f64,
    /// The caller dies before its commit reaches the store: the call never returns.
    pub crash_before: f64,
    /// The caller dies after its commit reached the store: the call never returns.
    pub crash_after: f64,
    /// An eventual read shows a row as it was before its latest commits.
    pub stale: f64,
}

impl Odds {
    /// Everything goes wrong now and then; callers do not die.
    pub fn rough() -> Odds {
        Odds {
            delay: 0.2,
            delay_at_most: Duration::from_millis(2),
            unavailable: 0.05,
            unknown_before: 0.05,
            unknown_after: 0.05,
            stale: 0.5,
            ..Odds::default()
        }
    }
}

/// How many faults of each kind were achieved.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Achieved {
    /// Calls that were delayed.
    pub delays: u64,
    /// Calls that failed before they reached the store.
    pub unavailable: u64,
    /// Unknown outcomes of writes that did not happen.
    pub unknown_before: u64,
    /// Unknown outcomes of writes that did.
    pub unknown_after: u64,
    /// Callers that died before their write.
    pub crashes_before: u64,
    /// Callers that died after it.
    pub crashes_after: u64,
    /// Rows that were shown in an older state than the store's.
    pub stale_rows: u64,
}

impl Achieved {
    /// Both together.
    #[must_use]
    pub fn plus(self, other: Achieved) -> Achieved {
        Achieved {
            delays: self.delays + other.delays,
            unavailable: self.unavailable + other.unavailable,
            unknown_before: self.unknown_before + other.unknown_before,
            unknown_after: self.unknown_after + other.unknown_after,
            crashes_before: self.crashes_before + other.crashes_before,
            crashes_after: self.crashes_after + other.crashes_after,
            stale_rows: self.stale_rows + other.stale_rows,
        }
    }
}

impl fmt::Display for Achieved {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Achieved { delays, unavailable, unknown_before, unknown_after, .. } = self;
        let Achieved { crashes_before, crashes_after, stale_rows, .. } = self;
        write!(
            f,
            "{delays} delays, {unavailable} unavailable, {unknown_before}+{unknown_after} unknown \
             (before+after), {crashes_before}+{crashes_after} crashes, {stale_rows} stale rows"
        )
    }
}

/// A store whose callers live in a bad world.
#[derive(Debug)]
pub struct FaultyStore {
    inner: Arc<dyn Store>,
    clock: Arc<dyn Clock>,
    state: Mutex<FaultyState>,
}

#[derive(Debug)]
struct FaultyState {
    odds: Odds,
    random: Random,
    achieved: Achieved,
    /// Former states of rows, newest last, by their printed address.
    former: HashMap<String, VecDeque<Option<Row>>>,
}

/// How many former states of a row are remembered.
const FORMER_MAX: usize = 4;

/// What is going to happen to a write.
enum InjectedFault {
    None,
    Unavailable,
    UnknownBefore,
    UnknownAfter,
    CrashBefore,
    CrashAfter,
}

impl FaultyStore {
    /// Wraps a store. `clock` is what delays are slept on.
    pub fn over(inner: Arc<dyn Store>, clock: Arc<dyn Clock>, odds: Odds, seed: u64) -> FaultyStore {
        let random = Random::seeded(seed);
        let state = FaultyState { odds, random, achieved: Achieved::default(), former: HashMap::new() };
        FaultyStore { inner, clock, state: Mutex::new(state) }
    }

    /// What was achieved so far.
    pub fn achieved(&self) -> Achieved {
        self.lock().achieved
    }

    /// Changes the odds: a world that gets better, or worse.
    pub fn set_odds(&self, odds: Odds) {
        self.lock().odds = odds;
    }

    /// The wrapped store.
    pub fn inner(&self) -> &Arc<dyn Store> {
        &self.inner
    }

    fn lock(&self) -> MutexGuard<'_, FaultyState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    async fn delay(&self) {
        let span = {
            let state = &mut *self.lock();
            if !state.random.chance(state.odds.delay) {
                return;
            }
            state.achieved.delays += 1;
            state.odds.delay_at_most.mul_f64(state.random.unit())
        };
        self.clock.sleep(span).await;
    }

    fn draw(&self) -> InjectedFault {
        let state = &mut *self.lock();
        let (odds, achieved) = (state.odds, &mut state.achieved);
        let mut left = state.random.unit();
        let mut drawn = |odds: f64| {
            left -= odds;
            left < 0.0
        };
        if drawn(odds.unavailable) {
            achieved.unavailable += 1;
            InjectedFault::Unavailable
        } else if drawn(odds.unknown_before) {
            achieved.unknown_before += 1;
            InjectedFault::UnknownBefore
        } else if drawn(odds.unknown_after) {
            // Counted when the write has happened.
            InjectedFault::UnknownAfter
        } else if drawn(odds.crash_before) {
            achieved.crashes_before += 1;
            InjectedFault::CrashBefore
        } else if drawn(odds.crash_after) {
            InjectedFault::CrashAfter
        } else {
            InjectedFault::None
        }
    }

    /// Runs a write under a fault.
    async fn write<T>(
        &self,
        operation: &str,
        work: impl Future<Output = Result<T, StoreError>> + Send,
    ) -> Result<T, StoreError> {
        self.delay().await;
        let result = match self.draw() {
            InjectedFault::None => work.await,
            InjectedFault::Unavailable => return Err(StoreError::unavailable("injected")),
            InjectedFault::UnknownBefore => return Err(StoreError::unknown(operation, "injected, before")),
            InjectedFault::CrashBefore => return std::future::pending().await,
            InjectedFault::UnknownAfter => {
                work.await?;
                self.lock().achieved.unknown_after += 1;
                return Err(StoreError::unknown(operation, "injected, after"));
            }
            InjectedFault::CrashAfter => {
                drop(work.await);
                self.lock().achieved.crashes_after += 1;
                return std::future::pending().await;
            }
        };
        self.delay().await;
        result
    }

    /// Runs a read under a fault.
    async fn read<T>(
        &self,
        work: impl Future<Output = Result<T, StoreError>> + Send,
    ) -> Result<T, StoreError> {
        self.delay().await;
        {
            let state = &mut *self.lock();
            if state.random.chance(state.odds.unavailable) {
                state.achieved.unavailable += 1;
                return Err(StoreError::unavailable("injected"));
            }
        }
        work.await
    }

    /// Remembers the rows that a plan is about to change.
    async fn remember(&self, plan: &Plan) -> Result<(), StoreError> {
        if self.lock().odds.stale == 0.0 {
            return Ok(());
        }
        let addresses: Vec<Address> = plan.addresses().collect();
        let rows = self.inner.get(&addresses, Consistency::Strong).await?;
        let state = &mut *self.lock();
        for (address, row) in addresses.iter().zip(rows) {
            let former = state.former.entry(address.to_string()).or_default();
            if former.back() != Some(&row) {
                former.push_back(row);
            }
            if former.len() > FORMER_MAX {
                former.pop_front();
            }
        }
        Ok(())
    }

    /// The row as an eventual read may show it.
    fn aged(&self, address: &str, row: Option<Row>) -> Option<Row> {
        let state = &mut *self.lock();
        if !state.random.chance(state.odds.stale) {
            return row;
        }
        let Some(former) = state.former.get(address) else { return row };
        let choice = state.random.below(former.len() as u64) as usize;
        let Some(older) = former.get(choice).cloned() else { return row };
        if older != row {
            state.achieved.stale_rows += 1;
        }
        older
    }
}

#[async_trait]
impl Store for FaultyStore {
    fn engine(&self) -> &'static str {
        self.inner.engine()
    }

    fn partitions(&self) -> u32 {
        self.inner.partitions()
    }

    async fn migrate(&self, schema: &Schema, how: Migrate) -> Result<Vec<SchemaChange>, StoreError> {
        self.inner.migrate(schema, how).await
    }

    async fn commit(&self, plan: &Plan) -> Result<Commit, StoreError> {
        self.write(plan.operation(), async {
            self.remember(plan).await?;
            self.inner.commit(plan).await
        })
        .await
    }

    async fn resolve(&self, tenant: &Tenant, operation: &str) -> Result<Resolution, StoreError> {
        self.write(operation, self.inner.resolve(tenant, operation)).await
    }

    async fn find_operation(&self, tenant: &Tenant, operation: &str) -> Result<Option<Record>, StoreError> {
        self.read(self.inner.find_operation(tenant, operation)).await
    }

    async fn get(
        &self,
        addresses: &[Address],
        consistency: Consistency,
    ) -> Result<Vec<Option<Row>>, StoreError> {
        let rows = self.read(self.inner.get(addresses, consistency)).await?;
        if consistency == Consistency::Strong {
            return Ok(rows);
        }
        Ok(addresses.iter().zip(rows).map(|(address, row)| self.aged(&address.to_string(), row)).collect())
    }

    async fn query(&self, query: &Query) -> Result<Page, StoreError> {
        let mut page = self.read(self.inner.query(query)).await?;
        if query.consistency() == Consistency::Eventual {
            // A row in a former state may no longer belong to the range; it is shown only while it still does, so
            // that the page keeps its order. Rows that were deleted since are not brought back.
            let order = |row: &Row| query.cursor_at(row);
            page.rows = page
                .rows
                .into_iter()
                .filter_map(|row| {
                    let older = self.aged(&row.to_string(), Some(row.clone()))?;
                    Some(if order(&older) == order(&row) { older } else { row })
                })
                .collect();
        }
        Ok(page)
    }

    async fn scan(&self, scan: &Scan) -> Result<Page, StoreError> {
        self.read(self.inner.scan(scan)).await
    }

    async fn segments(&self, scan: &Scan, max: usize) -> Result<Vec<Segment>, StoreError> {
        self.read(self.inner.segments(scan, max)).await
    }

    async fn read_log(&self, partition: u32, after: u64, limit: usize) -> Result<LogPage, StoreError> {
        self.read(self.inner.read_log(partition, after, limit)).await
    }

    async fn wait_log(&self, seen: &[u64], at_most: Duration) -> Result<Vec<u64>, StoreError> {
        self.read(self.inner.wait_log(seen, at_most)).await
    }

    async fn trim_log(&self, partition: u32, through: u64) -> Result<(), StoreError> {
        self.inner.trim_log(partition, through).await
    }

    async fn blank_events(&self, range: &BlankRange) -> Result<BlankedPage, StoreError> {
        self.read(self.inner.blank_events(range)).await
    }

    async fn scrub(&self) -> Result<(), StoreError> {
        self.read(self.inner.scrub()).await
    }

    async fn now(&self) -> Result<Time, StoreError> {
        self.inner.now().await
    }

    fn explain(&self, asked: ExplainRequest<'_>) -> Explanation {
        self.inner.explain(asked)
    }

    async fn close(&self) {
        self.inner.close().await;
    }
}
