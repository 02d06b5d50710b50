//! Statehouse on PostgreSQL: ordinary tables, one round trip for a plan, a log in the order of the commits.
//!
//! ```no_run
//! # async fn example() -> Result<(), statehouse_store::StoreError> {
//! use statehouse_store::Store;
//! use statehouse_store_postgres::{Options, PostgresStore};
//!
//! let options = Options::from_url("postgres://app:secret@db/shop?schema=house&sslmode=verify-full")?;
//! let store = PostgresStore::open(options).await?;
//! assert_eq!(store.engine(), "postgres");
//! # Ok(())
//! # }
//! ```
//!
//! # A plan's way
//! A plan goes to the [writer](writer) of its partition of the log. When that one is idle, `commit`
//! [compiles](compile) the plan to one statement and runs it at once. Otherwise the plan goes into the writer's
//! [queue](queue). The writer takes whatever waits there, settles it in one transaction and answers each caller: plans of
//! one [shape](shape) are one statement too, within the [room](room) that it can count on; all others are
//! [decided in memory](batch) on rows locked in [one order](order), of which those to be inserted are
//! [not looked for](trust), and written by [statements](statements) that take arrays.
//!
//! # Around it
//! [Options](options) come from a URL; a [link](link) is a connection that is made when it is needed, over
//! [TLS](tls) if asked; a [fault](fault) is what the server said, sorted by what can be done about it. [Tables](ddl) are
//! made by a [migration](migrate), and [tenants](tenancy) can be kept apart by row-level security.
//!
//! # A read's way
//! Rows by key and pages of ranges, as many as a caller wants in one go, are [one statement](look), on a connection of
//! the [readers](reader). When all of those are busy, reads that wait and are alike become one statement too.
//! [Walks](read) over tables and the [log](log) go on the same connections, beside them.

mod batch;
mod compile;
mod ddl;
mod explain;
mod fault;
mod link;
mod log;
mod look;
mod migrate;
mod options;
mod order;
mod queue;
mod read;
mod reader;
mod room;
mod shape;
mod shared;
mod sql;
mod statements;
mod take;
mod tenancy;
mod tls;
mod trust;
mod watch;
mod writer;

use std::fmt;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use async_trait::async_trait;
use statehouse_store::bug;
use statehouse_store::claim_range::{claim_keys, claim_remaining, claim_row_by_row};
use statehouse_store::{
    Address, Change, ClaimRange, Commit, Consistency, ExplainRequest, Explanation, LogPage, Migrate, Page,
    Plan, Query, ReadRequest, ReadResult, Record, Resolution, Row, Scan, Schema, Store, StoreError, Tenant,
};
use tokio::sync::oneshot;
use tokio::task::{JoinHandle, JoinSet};

pub use explain::explain;
pub use options::{Encryption, Options};
pub use shared::Counts;

use ddl::Names;
use link::Dialer;
use migrate::Builder;
use queue::Job;
use reader::serve;
use shared::Shared;
use take::Taking;
use writer::{Attempt, work};

/// How long one statement of a migration may take: an index on a large table is not built in seconds.
const MIGRATION_PATIENCE: Duration = Duration::from_secs(6 * 3600);

/// A store in a PostgreSQL schema.
pub struct PostgresStore {
    shared: Arc<Shared>,
    writers: Mutex<Vec<JoinHandle<()>>>,
    /// The readers' tasks, which end with the store.
    _readers: JoinSet<()>,
}

impl PostgresStore {
    /// Opens a store, and creates it if the schema has none. Needs a tokio runtime.
    pub async fn open(options: Options) -> Result<PostgresStore, StoreError> {
        let names = Names::new(&options.schema);
        let dialer = Dialer::new(&options)?;
        let session = dialer.session_with(MIGRATION_PATIENCE).await?;
        let partitions = Builder { session: &session, names: &names, options: &options }.open().await?;
        drop(session);
        let writer_dialer = Dialer::for_writers(&options)?;
        let reader_dialer = Dialer::for_readers(&options)?;
        let shared = Shared::new(names, options, dialer, writer_dialer, reader_dialer, partitions);
        let shared = Arc::new(shared);
        let writers = (0..shared.lanes.len()).map(|lane| tokio::spawn(work(shared.clone(), lane))).collect();
        let mut readers = JoinSet::new();
        for seat in 0..shared.readers.count() {
            readers.spawn(serve(shared.clone(), seat));
        }
        Ok(PostgresStore { shared, writers: Mutex::new(writers), _readers: readers })
    }

    /// Drops the PostgreSQL schema of a store, with everything in it. For tests and tools.
    pub async fn erase(options: &Options) -> Result<(), StoreError> {
        let session = Dialer::new(options)?.session_with(MIGRATION_PATIENCE).await?;
        let words = format!("drop schema if exists {} cascade", sql::name(&options.schema));
        session.say(&words).await.map_err(|fault| fault.into_error(&[]))
    }

    /// What the writers and readers have done since the store was opened.
    pub fn counts(&self) -> Counts {
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

    async fn migrate(&self, schema: &Schema, how: Migrate) -> Result<Vec<Change>, StoreError> {
        let shared = self.opened()?;
        let session = shared.dialer.session_with(MIGRATION_PATIENCE).await?;
        let builder = Builder { session: &session, names: &shared.names, options: &shared.options };
        builder.migrate(schema, how).await
    }

    async fn commit(&self, plan: &Plan) -> Result<Commit, StoreError> {
        let Some(lane) = self.opened()?.lane(plan) else { return Err(closed()) };
        let left_open = match self.shared.settle_at_once(lane, plan).await {
            Attempt::Settled(outcome) => return outcome.map(|settled| settled.commit(plan)),
            Attempt::LeftOpen => true,
            Attempt::NotMade => false,
        };
        let (reply, outcome) = oneshot::channel();
        let events = if left_open { None } else { self.shared.events_ahead(plan) };
        if !lane.queue.push(Job { plan: plan.clone(), events, left_open, reply }) {
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
        let taking = tokio::spawn(self.opened()?.clone().take(take.clone())).await;
        let gone = |_| StoreError::unknown(take.operation(), "the taker has gone");
        match taking.map_err(gone)?? {
            Taking::Taken(rows) => Ok(rows),
            Taking::Unknown(keys) => claim_keys(self, take, keys).await,
            Taking::NotMade => claim_row_by_row(self, take).await,
            Taking::Partly(rows) => claim_remaining(self, take, rows).await,
        }
    }

    async fn scan(&self, scan: &Scan) -> Result<Page, StoreError> {
        self.opened()?.scan(scan).await
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
