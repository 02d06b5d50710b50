//! The engines of the hotspot benchmark, each with an empty namespace for every run, and a store that counts requests.

use std::any::Any;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use anyhow::Result;
use async_trait::async_trait;
use statehouse_drills::engines;
use statehouse_store::model::PARTITIONS;
use statehouse_store::{
    Address, BlankRange, BlankedPage, ClaimRange, Commit, Consistency, ExplainRequest, Explanation, LogPage,
    Migrate, ModelStore, Page, Plan, Query, ReadRequest, ReadResult, Record, Resolution, Row, Scan, Schema,
    SchemaChange, Segment, Store, StoreError, SystemClock, Tenant, Time,
};
use statehouse_store_sqlite::{SqliteOptions, SqliteStore};

use crate::servers::BenchServer;

/// An engine on which both sides of a comparison run.
#[derive(Clone)]
pub enum HotspotEngine {
    /// The model store: no disk and no network, so what is left is the code above it.
    Memory,
    /// A SQLite file in a temporary folder.
    Sqlite,
    /// A PostgreSQL server.
    Postgres(Arc<BenchServer>),
    /// A DynamoDB emulator.
    Dynamodb(Arc<BenchServer>),
}

/// Keeps a namespace until it is dropped.
pub type Namespace = Box<dyn Any + Send + Sync>;

impl HotspotEngine {
    /// The engines of a run: memory and SQLite, and the servers that the environment names.
    pub fn available() -> Result<Vec<HotspotEngine>> {
        let mut all = vec![HotspotEngine::Memory, HotspotEngine::Sqlite];
        if std::env::var_os("STATEHOUSE_TEST_POSTGRES").is_some() {
            all.push(HotspotEngine::Postgres(Arc::new(BenchServer::postgres()?)));
        }
        if std::env::var_os("STATEHOUSE_TEST_DYNAMODB").is_some() {
            all.push(HotspotEngine::Dynamodb(Arc::new(BenchServer::dynamodb()?)));
        }
        Ok(all)
    }

    /// Its name in reports.
    pub fn name(&self) -> &'static str {
        match self {
            HotspotEngine::Memory => "memory",
            HotspotEngine::Sqlite => "SQLite",
            HotspotEngine::Postgres(_) => "PostgreSQL",
            HotspotEngine::Dynamodb(_) => "DynamoDB (emulator)",
        }
    }

    /// How many operations a run has, of those that a case names. The emulator does one request at a time.
    pub fn scaled(&self, operations: u64) -> u64 {
        match self {
            HotspotEngine::Memory | HotspotEngine::Sqlite => operations,
            HotspotEngine::Postgres(_) => operations.div_ceil(2),
            HotspotEngine::Dynamodb(_) => operations.div_ceil(20),
        }
    }

    /// An empty store, with so many log partitions if the engine's default is not wanted.
    pub async fn open(&self, partitions: Option<u32>) -> Result<(Arc<dyn Store>, Namespace)> {
        match self {
            HotspotEngine::Memory => {
                let store = ModelStore::with(Arc::new(SystemClock), partitions.unwrap_or(PARTITIONS));
                Ok((Arc::new(store), Box::new(())))
            }
            HotspotEngine::Sqlite => {
                let folder = tempfile::tempdir()?;
                let mut options = SqliteOptions::at(folder.path().join("house.db"));
                options.partitions = partitions.unwrap_or(options.partitions);
                Ok((Arc::new(SqliteStore::open(options).await?), Box::new(folder)))
            }
            HotspotEngine::Postgres(server) | HotspotEngine::Dynamodb(server) => {
                let url = with_partitions(&server.url, partitions);
                let namespace = engines::at(&url)?.namespace("hotspots")?;
                Ok((namespace.open().await?, Box::new(namespace)))
            }
        }
    }

    /// Lets the server collect statistics of its tables, where it would do so later by itself.
    pub async fn settle(&self) -> Result<()> {
        match self {
            HotspotEngine::Postgres(server) => server.settle().await,
            HotspotEngine::Memory | HotspotEngine::Sqlite | HotspotEngine::Dynamodb(_) => Ok(()),
        }
    }
}

fn with_partitions(url: &str, partitions: Option<u32>) -> String {
    let join = if url.contains('?') { '&' } else { '?' };
    partitions.map_or_else(|| url.to_owned(), |count| format!("{url}{join}partitions={count}"))
}

/// A store that counts the requests it hands on. Waiting for the log is not counted: it asks for nothing.
#[derive(Debug)]
pub struct CountingStore {
    inner: Arc<dyn Store>,
    requests: AtomicU64,
}

impl CountingStore {
    /// Counts requests to this store.
    pub fn over(inner: Arc<dyn Store>) -> CountingStore {
        CountingStore { inner, requests: AtomicU64::new(0) }
    }

    /// How many requests were handed on so far.
    pub fn requests(&self) -> u64 {
        self.requests.load(Ordering::Relaxed)
    }

    fn counted(&self) -> &dyn Store {
        self.requests.fetch_add(1, Ordering::Relaxed);
        &*self.inner
    }
}

#[async_trait]
impl Store for CountingStore {
    fn engine(&self) -> &'static str {
        self.inner.engine()
    }

    fn partitions(&self) -> u32 {
        self.inner.partitions()
    }

    async fn migrate(&self, schema: &Schema, how: Migrate) -> Result<Vec<SchemaChange>, StoreError> {
        self.counted().migrate(schema, how).await
    }

    async fn commit(&self, plan: &Plan) -> Result<Commit, StoreError> {
        self.counted().commit(plan).await
    }

    async fn resolve(&self, tenant: &Tenant, operation: &str) -> Result<Resolution, StoreError> {
        self.counted().resolve(tenant, operation).await
    }

    async fn find_operation(&self, tenant: &Tenant, operation: &str) -> Result<Option<Record>, StoreError> {
        self.counted().find_operation(tenant, operation).await
    }

    async fn get(&self, rows: &[Address], consistency: Consistency) -> Result<Vec<Option<Row>>, StoreError> {
        self.counted().get(rows, consistency).await
    }

    async fn query(&self, query: &Query) -> Result<Page, StoreError> {
        self.counted().query(query).await
    }

    async fn read_many(&self, reads: &[ReadRequest<'_>]) -> Result<Vec<ReadResult>, StoreError> {
        self.counted().read_many(reads).await
    }

    async fn claim_range(&self, claim: &ClaimRange) -> Result<Vec<Row>, StoreError> {
        self.counted().claim_range(claim).await
    }

    async fn scan(&self, scan: &Scan) -> Result<Page, StoreError> {
        self.counted().scan(scan).await
    }

    async fn segments(&self, scan: &Scan, max: usize) -> Result<Vec<Segment>, StoreError> {
        self.counted().segments(scan, max).await
    }

    async fn read_log(&self, partition: u32, after: u64, limit: usize) -> Result<LogPage, StoreError> {
        self.counted().read_log(partition, after, limit).await
    }

    async fn wait_log(&self, seen: &[u64], at_most: Duration) -> Result<Vec<u64>, StoreError> {
        self.inner.wait_log(seen, at_most).await
    }

    async fn trim_log(&self, partition: u32, through: u64) -> Result<(), StoreError> {
        self.counted().trim_log(partition, through).await
    }

    async fn blank_events(&self, range: &BlankRange) -> Result<BlankedPage, StoreError> {
        self.inner.blank_events(range).await
    }

    async fn scrub(&self) -> Result<(), StoreError> {
        self.inner.scrub().await
    }

    async fn now(&self) -> Result<Time, StoreError> {
        self.inner.now().await
    }

    fn explain(&self, request: ExplainRequest<'_>) -> Explanation {
        self.inner.explain(request)
    }

    async fn close(&self) {
        self.inner.close().await;
    }
}
