//! Statehouse on an embedded SQLite file: the default engine.
//!
//! **Writing.** One thread owns the only writing connection ([`writer`]). It runs all queued plans in one transaction and
//! acknowledges them after that transaction is durable (WAL, `synchronous=FULL`). One fsync serves them all (group commit).
//! Each plan's rows are read, decided in memory by `statehouse_store::eval`, and only then written. So a refused plan has
//! written nothing and needs no savepoint, and a guard has the same meaning as in the model.
//!
//! **Reading.** A pool of read-only connections serves all reads ([`reader`]). In WAL mode a transaction becomes visible to
//! them only after it is durable, so a strong read never returns data that a power failure could undo.
//!
//! **Layout.** Ordinary `STRICT` tables with readable names ([`layout`]): times are integers of microseconds,
//! booleans 0 and 1, JSON is text. The log is `statehouse_log`; its key packs partition and offset into one integer.
//!
//! **Backup.** A copy of the file alone lacks the commits that are still in the write-ahead log, and a copy of both files is
//! torn if a process writes meanwhile. [`backup()`] copies a consistent snapshot of a live file.
//!
//! **Permissions.** New files are for their owner alone ([`permissions`]).
//!
//! **Failures.** A full disk and a locked or read-only file give `Unavailable`; acknowledged commits are not lost. If the commit
//! itself fails, its plans get `OutcomeUnknown` and the writer stops for good. After a failed fsync the operating system may have
//! dropped the pages that it could not write, and later appends behind such a hole could be lost with it. Opening the file again
//! starts from the content of the disk.

mod backup;
mod explain;
mod fault;
mod layout;
mod migrate;
mod permissions;
mod reader;
mod sql;
mod writer;

use std::fmt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use statehouse_store::limits::PAGE_MAX;
use statehouse_store::scan::check_segments;
use statehouse_store::{
    Address, BlankRange, BlankedPage, Clock, Commit, Consistency, ExplainRequest, Explanation, LogPage,
    Migrate, Page, Plan, Query, Record, Resolution, Row, Scan, Schema, SchemaChange, Segment, Store,
    StoreError, SystemClock, Tenant, Time,
};

pub use backup::{BackupFile, BackupProgress, backup};
pub use explain::explain;

use crate::reader::ReaderPool;
use crate::writer::SqliteWriter;

/// How a store is opened.
#[derive(Clone, Debug)]
pub struct SqliteOptions {
    /// The file. Its folder must exist; the file is created if it does not.
    pub path: PathBuf,
    /// The clock that `Now` in a guard reads.
    pub clock: Arc<dyn Clock>,
    /// Log partitions of a new file. An existing file keeps its own number.
    pub partitions: u32,
    /// Connections for reading.
    pub readers: usize,
    /// Capacity of the writer's queue, in plans. Callers wait while it is full.
    pub queue: usize,
    /// The maximum number of plans in one transaction.
    pub batch: usize,
    /// How long to wait for a file that another process has locked.
    pub lock_timeout: Duration,
    /// How long the writer must be idle before the write-ahead log is checkpointed. It is checkpointed after five times as long
    /// in any case.
    pub checkpoint_after: Duration,
    /// The SQLite VFS, by its registered name; for tests that inject failures.
    pub vfs: Option<String>,
    /// Whether commits wait for the disk. Switching this off gives up durability; it exists for the test that
    /// shows that the durability test would notice.
    pub synchronous: bool,
}

impl SqliteOptions {
    /// The usual settings for a file.
    pub fn at(path: impl Into<PathBuf>) -> SqliteOptions {
        SqliteOptions {
            path: path.into(),
            clock: Arc::new(SystemClock),
            partitions: PARTITIONS,
            readers: 4,
            queue: 1024,
            batch: 256,
            lock_timeout: Duration::from_secs(5),
            checkpoint_after: Duration::from_secs(1),
            vfs: None,
            synchronous: true,
        }
    }
}

/// A store in one SQLite file.
pub struct SqliteStore {
    path: PathBuf,
    partitions: u32,
    clock: Arc<dyn Clock>,
    writer: SqliteWriter,
    readers: ReaderPool,
}

/// Log partitions of a new file. There is one writer, so consumers that write gain nothing from more partitions, and each
/// partition costs a page in every transaction: four partitions reduce the measured write rate by an eighth.
const PARTITIONS: u32 = 1;

/// How often `wait_log` polls for records that another process wrote.
const LOG_POLL: Duration = Duration::from_millis(200);

impl SqliteStore {
    /// Opens a file, and creates it if it does not exist. Logs a warning if other users can read the file.
    pub async fn open(options: SqliteOptions) -> Result<SqliteStore, StoreError> {
        let (writer, partitions) = SqliteWriter::start(&options).await?;
        permissions::warn_if_shared(&options.path);
        let readers = ReaderPool::new(&options);
        Ok(SqliteStore { path: options.path, partitions, clock: options.clock, writer, readers })
    }

    /// The file.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// How many transactions were committed since the store was opened: far fewer than plans, under load.
    pub fn transactions(&self) -> u64 {
        *self.writer.commits().borrow()
    }

    fn check_partition(&self, partition: u32) -> Result<(), StoreError> {
        if partition < self.partitions {
            return Ok(());
        }
        Err(StoreError::no_partition(partition, self.partitions as usize))
    }
}

impl fmt::Debug for SqliteStore {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "SqliteStore({})", self.path.display())
    }
}

#[async_trait]
impl Store for SqliteStore {
    fn engine(&self) -> &'static str {
        "sqlite"
    }

    fn partitions(&self) -> u32 {
        self.partitions
    }

    async fn migrate(&self, schema: &Schema, how: Migrate) -> Result<Vec<SchemaChange>, StoreError> {
        self.writer.migrate(schema.clone(), how).await
    }

    async fn commit(&self, plan: &Plan) -> Result<Commit, StoreError> {
        self.writer.commit(plan.clone()).await
    }

    async fn resolve(&self, tenant: &Tenant, operation: &str) -> Result<Resolution, StoreError> {
        self.writer.resolve(tenant.clone(), operation.to_owned()).await
    }

    async fn find_operation(&self, tenant: &Tenant, operation: &str) -> Result<Option<Record>, StoreError> {
        self.readers.run_inline(|reader| reader.find_operation(tenant, operation)).await
    }

    async fn get(&self, addresses: &[Address], _: Consistency) -> Result<Vec<Option<Row>>, StoreError> {
        // Every read is strong here. A read of a few rows takes less time than waking a thread for it.
        self.readers.run_inline(|reader| reader.get(addresses)).await
    }

    async fn query(&self, query: &Query) -> Result<Page, StoreError> {
        if query.page_limit() <= reader::INLINE_ROWS {
            return self.readers.run_inline(|reader| reader.query(query)).await;
        }
        let query = query.clone();
        self.readers.run_blocking(move |reader| reader.query(&query)).await
    }

    async fn scan(&self, scan: &Scan) -> Result<Page, StoreError> {
        let scan = scan.clone();
        self.readers.run_blocking(move |reader| reader.scan(&scan)).await
    }

    async fn segments(&self, scan: &Scan, max: usize) -> Result<Vec<Segment>, StoreError> {
        check_segments(max)?;
        let scan = scan.clone();
        self.readers.run_blocking(move |reader| reader.segments(&scan, max)).await
    }

    async fn read_log(&self, partition: u32, after: u64, limit: usize) -> Result<LogPage, StoreError> {
        self.check_partition(partition)?;
        let limit = limit.min(PAGE_MAX);
        self.readers.run_blocking(move |reader| reader.log(partition, after, limit)).await
    }

    async fn wait_log(&self, seen: &[u64], at_most: Duration) -> Result<Vec<u64>, StoreError> {
        let mut commits = self.writer.commits();
        let deadline = self.clock.now().plus(at_most);
        loop {
            commits.borrow_and_update();
            let heads = self.readers.run_inline(|reader| reader.heads(self.partitions)).await?;
            let news = heads.iter().enumerate().any(|(n, head)| *head > seen.get(n).copied().unwrap_or(0));
            let left = deadline.since(self.clock.now());
            if news || left.is_zero() {
                return Ok(heads);
            }
            tokio::select! {
                changed = commits.changed() => {
                    if changed.is_err() {
                        return Err(fault::closed());
                    }
                }
                () = self.clock.sleep(left.min(LOG_POLL)) => {}
            }
        }
    }

    async fn trim_log(&self, partition: u32, through: u64) -> Result<(), StoreError> {
        self.check_partition(partition)?;
        self.writer.trim(partition, through).await
    }

    async fn blank_events(&self, range: &BlankRange) -> Result<BlankedPage, StoreError> {
        self.check_partition(range.partition)?;
        self.writer.blank(range.clone()).await
    }

    async fn scrub(&self) -> Result<(), StoreError> {
        self.writer.scrub().await
    }

    async fn now(&self) -> Result<Time, StoreError> {
        Ok(self.clock.now())
    }

    fn explain(&self, asked: ExplainRequest<'_>) -> Explanation {
        explain(asked)
    }

    async fn close(&self) {
        self.readers.close();
        self.writer.close().await;
    }
}
