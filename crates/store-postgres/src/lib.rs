//! Statehouse on PostgreSQL: ordinary tables, one round trip for a plan, a log in commit order.
//!
//! ```no_run
//! # async fn example() -> Result<(), statehouse_store::StoreError> {
//! use statehouse_store::Store;
//! use statehouse_store_postgres::{PostgresOptions, PostgresStore};
//!
//! let options = PostgresOptions::from_url("postgres://app:secret@db/shop?schema=house&sslmode=verify-full")?;
//! let store = PostgresStore::open(options).await?;
//! assert_eq!(store.engine(), "postgres");
//! # Ok(())
//! # }
//! ```
//!
//! # How a plan is committed
//! A plan belongs to the [writer](writer) of its log partition. If that writer is idle, `commit` [compiles](compile) the plan to one
//! statement and runs it at once. Otherwise the plan is [queued](queue). The writer takes all queued plans, commits them in one
//! transaction and replies to each caller. Plans of one [shape](shape) become one statement too, within the [bounds](size_bounds) of
//! the size limits. All others are [decided in memory](batch) on rows that are locked in [one order](order), and written by
//! [statements](statements) that take arrays. Rows that are inserted are [not read first](assumed_absent).
//!
//! # Connections and tables
//! [Options](options) are parsed from a URL. A [connection](connection) is made when it is needed, over [TLS](tls) if configured. A
//! [fault](fault) is an error of the server or of the connection, classified by how to react to it. [Tables](ddl) are created by a
//! [migration](migrate), and row-level security can separate [tenants](tenancy).
//!
//! # How a read is made
//! Rows by key and pages of ranges, any number of them in one call, are [one statement](multi_read) on one of the
//! [reading connections](reader). If all of those are busy, queued reads of the same shape are joined to one statement.
//! [Scans](read) and reads of the [log](log) share these connections.

mod assumed_absent;
mod batch;
mod blank;
mod claim;
mod compile;
mod connection;
mod ddl;
mod explain;
mod fault;
mod index_build;
mod log;
mod migrate;
mod multi_read;
mod options;
mod order;
mod queue;
mod read;
mod reader;
mod shape;
mod shared;
mod silence_timeout;
mod size_bounds;
mod sql;
mod statements;
mod tenancy;
mod tls;
mod writer;

use std::fmt;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use async_trait::async_trait;
use statehouse_store::bug;
use statehouse_store::claim_range::{claim_keys, claim_remaining, claim_row_by_row};
use statehouse_store::{
    Address, BlankRange, BlankedPage, ClaimRange, Commit, Consistency, ExplainRequest, Explanation, LogPage,
    Migrate, Page, Plan, Query, ReadRequest, ReadResult, Record, Resolution, Row, Scan, Schema, SchemaChange,
    Segment, Store, StoreError, Tenant, Time,
};
use tokio::sync::oneshot;
use tokio::task::{JoinHandle, JoinSet};

pub use explain::explain;
pub use options::{Encryption, PostgresOptions};
pub use shared::StoreCounts;

use claim::ClaimOutcome;
use connection::Connector;
use ddl::Names;
use migrate::SchemaMigrator;
use queue::QueuedPlan;
use reader::serve;
use shared::Shared;
use writer::{StatementAttempt, work};

/// How long one statement of a migration may take: an index on a large table is not built in seconds.
pub(crate) const MIGRATION_PATIENCE: Duration = Duration::from_secs(6 * 3600);

/// A store in a PostgreSQL schema.
pub struct PostgresStore {
    shared: Arc<Shared>,
    writers: Mutex<Vec<JoinHandle<()>>>,
    /// The readers' tasks, which end with the store.
    _readers: JoinSet<()>,
}

impl PostgresStore {
    /// Opens a store, and creates it if the schema has none. Needs a tokio runtime.
    pub async fn open(options: PostgresOptions) -> Result<PostgresStore, StoreError> {
        let names = Names::new(&options.schema);
        let connector = Connector::new(&options)?;
        let session = connector.session_with(MIGRATION_PATIENCE).await?;
        let migrator =
            SchemaMigrator { session: &session, connector: &connector, names: &names, options: &options };
        let partitions = migrator.open().await?;
        drop(session);
        let writer_connector = Connector::for_writers(&options)?;
        let reader_connector = Connector::for_readers(&options)?;
        let shared = Shared::new(names, options, connector, writer_connector, reader_connector, partitions);
        let shared = Arc::new(shared);
        let writers = (0..shared.lanes.len()).map(|lane| tokio::spawn(work(shared.clone(), lane))).collect();
        let mut readers = JoinSet::new();
        for seat in 0..shared.readers.count() {
            readers.spawn(serve(shared.clone(), seat));
        }
        Ok(PostgresStore { shared, writers: Mutex::new(writers), _readers: readers })
    }

    /// Drops the PostgreSQL schema of a store, with everything in it. For tests and tools.
    pub async fn erase(options: &PostgresOptions) -> Result<(), StoreError> {
        let session = Connector::new(options)?.session_with(MIGRATION_PATIENCE).await?;
        let words = format!("drop schema if exists {} cascade", sql::name(&options.schema));
        session.execute(&words).await.map_err(|fault| fault.into_error(&[]))
    }

    /// What the writers and readers have done since the store was opened.
    pub fn counts(&self) -> StoreCounts {
        self.shared.counters.counts()
    }

    fn opened(&self) -> Result<&Arc<Shared>, StoreError> {
        if self.shared.is_closed() { Err(closed()) } else { Ok(&self.shared) }
    }
}

fn closed() -> StoreError {
    StoreError::unavailable("the store was closed")
}

#[async_trait]
impl Store for PostgresStore {
    fn engine(&self) -> &'static str {
        "postgres"
    }

    fn partitions(&self) -> u32 {
        self.shared.partitions
    }

    async fn migrate(&self, schema: &Schema, how: Migrate) -> Result<Vec<SchemaChange>, StoreError> {
        let shared = self.opened()?;
        let session = shared.connector.session_with(MIGRATION_PATIENCE).await?;
        let migrator = SchemaMigrator {
            session: &session,
            connector: &shared.connector,
            names: &shared.names,
            options: &shared.options,
        };
        migrator.migrate(schema, how).await
    }

    async fn commit(&self, plan: &Plan) -> Result<Commit, StoreError> {
        let Some(lane) = self.opened()?.lane_of(plan) else { return Err(closed()) };
        let left_open = match self.shared.commit_directly(lane, plan).await {
            StatementAttempt::Done(outcome) => return outcome.map(|settled| settled.commit(plan)),
            StatementAttempt::LeftOpen => true,
            StatementAttempt::NotMade => false,
        };
        let (reply, outcome) = oneshot::channel();
        let events = if left_open { None } else { self.shared.events_ahead(plan) };
        if !lane.queue.push(QueuedPlan { plan: plan.clone(), events, left_open, reply }) {
            return Err(closed());
        }
        // A writer that ends without an answer, with its runtime, may have sent the plan.
        let gone = |_| Err(StoreError::unknown(plan.operation(), "the writer has gone"));
        outcome.await.unwrap_or_else(gone).map(|settled| settled.commit(plan))
    }

    async fn resolve(&self, tenant: &Tenant, operation: &str) -> Result<Resolution, StoreError> {
        self.opened()?.resolve(tenant, operation).await
    }

    async fn find_operation(&self, tenant: &Tenant, operation: &str) -> Result<Option<Record>, StoreError> {
        self.opened()?.find_operation(tenant, operation).await
    }

    async fn get(&self, addresses: &[Address], _: Consistency) -> Result<Vec<Option<Row>>, StoreError> {
        let seen = self.opened()?.read_many(&[ReadRequest::Get(addresses)]).await?;
        Ok(only(seen)?.into_rows()?)
    }

    async fn query(&self, query: &Query) -> Result<Page, StoreError> {
        let seen = self.opened()?.read_many(&[ReadRequest::Query(query)]).await?;
        Ok(only(seen)?.into_page()?)
    }

    async fn read_many(&self, asks: &[ReadRequest<'_>]) -> Result<Vec<ReadResult>, StoreError> {
        self.opened()?.read_many(asks).await
    }

    async fn claim_range(&self, take: &ClaimRange) -> Result<Vec<Row>, StoreError> {
        let outcome = tokio::spawn(self.opened()?.clone().claim(take.clone())).await;
        let gone = |_| StoreError::unknown(take.operation(), "the task of the claim was cancelled");
        match outcome.map_err(gone)?? {
            ClaimOutcome::Complete(rows) => Ok(rows),
            ClaimOutcome::Unknown(keys) => claim_keys(self, take, keys).await,
            ClaimOutcome::NotRun => claim_row_by_row(self, take).await,
            ClaimOutcome::Partial(rows) => claim_remaining(self, take, rows).await,
        }
    }

    async fn scan(&self, scan: &Scan) -> Result<Page, StoreError> {
        self.opened()?.scan(scan).await
    }

    async fn segments(&self, scan: &Scan, max: usize) -> Result<Vec<Segment>, StoreError> {
        self.opened()?.segments(scan, max).await
    }

    async fn read_log(&self, partition: u32, after: u64, limit: usize) -> Result<LogPage, StoreError> {
        self.opened()?.read_log(partition, after, limit).await
    }

    async fn wait_log(&self, seen: &[u64], at_most: Duration) -> Result<Vec<u64>, StoreError> {
        self.opened()?.wait_log(seen, at_most).await
    }

    async fn trim_log(&self, partition: u32, through: u64) -> Result<(), StoreError> {
        self.opened()?.trim_log(partition, through).await
    }

    async fn blank_events(&self, range: &BlankRange) -> Result<BlankedPage, StoreError> {
        self.opened()?.blank_events(range).await
    }

    async fn scrub(&self) -> Result<(), StoreError> {
        self.opened().map(drop)
    }

    async fn now(&self) -> Result<Time, StoreError> {
        self.shared.now().await
    }

    fn explain(&self, asked: ExplainRequest<'_>) -> Explanation {
        explain(&self.shared.options, asked)
    }

    async fn close(&self) {
        self.shared.shut();
        let writers = std::mem::take(&mut *self.writers.lock().unwrap_or_else(PoisonError::into_inner));
        for writer in writers {
            // A writer that failed has nothing left to finish.
            let _ = writer.await;
        }
        self.shared.close().await;
    }
}

/// Writers finish what waits and end; nothing new comes in.
impl Drop for PostgresStore {
    fn drop(&mut self) {
        self.shared.shut();
    }
}

impl fmt::Debug for PostgresStore {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("PostgresStore").field("options", &self.shared.options).finish_non_exhaustive()
    }
}

/// The result of the only one of a list of reads.
fn only(mut results: Vec<ReadResult>) -> Result<ReadResult, StoreError> {
    results.pop().ok_or_else(|| bug!("a read without a result").into())
}
