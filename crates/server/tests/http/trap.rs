//! A store that does what a test tells it to: fail, panic, or wait.

use std::sync::Arc;
use std::sync::atomic::{AtomicU8, AtomicUsize, Ordering};
use std::time::Duration;

use async_trait::async_trait;
use statehouse_store::{
    Address, BlankRange, BlankedPage, Commit, Consistency, ExplainRequest, Explanation, LogPage, Migrate,
    Page, Plan, Query, Record, Resolution, Row, Scan, Schema, SchemaChange, Segment, Store, StoreError,
    Tenant, Time,
};
use tokio::sync::watch;

pub const SOUND: u8 = 0;
pub const FAIL: u8 = 1;
pub const PANIC: u8 = 2;
pub const UNKNOWN: u8 = 3;
/// Reads are answered, writes fail: a full disk.
pub const FAIL_WRITES: u8 = 4;
/// The engine's clock is an hour ahead of the process's.
pub const AHEAD: u8 = 5;

/// Another store, with a trap in it.
#[derive(Debug)]
pub struct TrapStore {
    pub inner: Arc<dyn Store>,
    pub mode: AtomicU8,
    /// Whether commits wait before they begin.
    held: watch::Sender<bool>,
    waiting: AtomicUsize,
    log_reads: AtomicUsize,
    /// How many commits failed as on a full disk.
    refused: AtomicUsize,
}

impl TrapStore {
    pub fn over(inner: Arc<dyn Store>) -> Arc<TrapStore> {
        Arc::new(TrapStore {
            inner,
            mode: AtomicU8::new(SOUND),
            held: watch::Sender::new(false),
            waiting: AtomicUsize::new(0),
            log_reads: AtomicUsize::new(0),
            refused: AtomicUsize::new(0),
        })
    }

    /// Makes commits wait before they begin, or lets them go.
    pub fn hold(&self, held: bool) {
        self.held.send_replace(held);
    }

    /// Returns when a commit waits.
    pub async fn until_held(&self) {
        while self.waiting.load(Ordering::SeqCst) == 0 {
            tokio::task::yield_now().await;
        }
    }

    /// Returns when this many commits have failed as on a full disk.
    pub async fn until_refused(&self, count: usize) {
        while self.refused.load(Ordering::SeqCst) < count {
            tokio::task::yield_now().await;
        }
    }

    /// How often the log was read.
    pub fn log_reads(&self) -> usize {
        self.log_reads.load(Ordering::SeqCst)
    }

    pub fn set(&self, mode: u8) {
        self.mode.store(mode, Ordering::SeqCst);
    }

    fn spring(&self) -> Result<(), StoreError> {
        match self.mode.load(Ordering::SeqCst) {
            FAIL => Err(StoreError::unavailable("secret-host-7 is down")),
            PANIC => panic!("a defect with a secret-detail"),
            UNKNOWN => Err(StoreError::unknown("op", "secret-host-7 went away")),
            _ => Ok(()),
        }
    }
}

#[async_trait]
impl Store for TrapStore {
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
        self.spring()?;
        if self.mode.load(Ordering::SeqCst) == FAIL_WRITES {
            self.refused.fetch_add(1, Ordering::SeqCst);
            return Err(StoreError::unavailable("the disk of secret-host-7 is full"));
        }
        self.waiting.fetch_add(1, Ordering::SeqCst);
        self.held.subscribe().wait_for(|held| !held).await.unwrap();
        self.waiting.fetch_sub(1, Ordering::SeqCst);
        self.inner.commit(plan).await
    }
    async fn resolve(&self, tenant: &Tenant, operation: &str) -> Result<Resolution, StoreError> {
        self.inner.resolve(tenant, operation).await
    }
    async fn find_operation(&self, tenant: &Tenant, operation: &str) -> Result<Option<Record>, StoreError> {
        self.inner.find_operation(tenant, operation).await
    }
    async fn get(&self, addresses: &[Address], how: Consistency) -> Result<Vec<Option<Row>>, StoreError> {
        self.spring()?;
        self.inner.get(addresses, how).await
    }
    async fn query(&self, query: &Query) -> Result<Page, StoreError> {
        self.inner.query(query).await
    }
    async fn scan(&self, scan: &Scan) -> Result<Page, StoreError> {
        self.inner.scan(scan).await
    }

    async fn segments(&self, scan: &Scan, max: usize) -> Result<Vec<Segment>, StoreError> {
        self.inner.segments(scan, max).await
    }
    async fn read_log(&self, partition: u32, after: u64, limit: usize) -> Result<LogPage, StoreError> {
        if self.mode.load(Ordering::SeqCst) == FAIL {
            self.spring()?;
        }
        self.log_reads.fetch_add(1, Ordering::SeqCst);
        self.inner.read_log(partition, after, limit).await
    }
    async fn wait_log(&self, seen: &[u64], at_most: Duration) -> Result<Vec<u64>, StoreError> {
        self.inner.wait_log(seen, at_most).await
    }
    async fn trim_log(&self, partition: u32, through: u64) -> Result<(), StoreError> {
        self.inner.trim_log(partition, through).await
    }

    async fn blank_events(&self, range: &BlankRange) -> Result<BlankedPage, StoreError> {
        self.inner.blank_events(range).await
    }

    async fn scrub(&self) -> Result<(), StoreError> {
        self.inner.scrub().await
    }
    async fn now(&self) -> Result<Time, StoreError> {
        let now = self.inner.now().await?;
        let is_ahead = self.mode.load(Ordering::SeqCst) == AHEAD;
        Ok(if is_ahead { now.plus(Duration::from_secs(3600)) } else { now })
    }

    fn explain(&self, asked: ExplainRequest<'_>) -> Explanation {
        self.inner.explain(asked)
    }
    async fn close(&self) {
        self.inner.close().await;
    }
}
