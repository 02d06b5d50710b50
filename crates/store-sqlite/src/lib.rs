//! Statehouse on an embedded SQLite file: the default engine.
//!
//! **Writing.** One thread owns the only writing connection ([`writer`]). It takes all plans that wait, runs them
//! in one transaction and acknowledges them after that transaction is durable (WAL, `synchronous=FULL`): one
//! synchronization of the disk serves them all. Each plan's rows are read, decided in memory by
//! `statehouse_store::eval`, and only then written, so that a refused plan has written nothing and needs no
//! savepoint, and a guard means here what it means in the model.
//!
//! **Reading.** A few read-only connections stand beside the writer ([`reader`]). In WAL mode a transaction becomes
//! visible to them only after it is durable, so a strong read never shows what a loss of power could take back.
//!
//! **Layout.** Ordinary `STRICT` tables with readable names ([`layout`]): times are integers of microseconds,
//! booleans 0 and 1, JSON is text. The log is `statehouse_log`; its key packs partition and offset into one integer.
//!
//! **Backup.** A copy of the file alone lacks what is still in the write-ahead log beside it, and a copy of both is torn if
//! something is written meanwhile. [`backup()`] copies one moment of a live file, whoever writes to it.
//!
//! **Permissions.** New files are for their owner alone ([`permissions`]).
//!
//! **Failures.** A full disk, a locked or read-only file give `Unavailable`, and nothing is lost that was
//! acknowledged. If the commit itself fails, its plans get `OutcomeUnknown` and the writer stops for good: after a
//! failed synchronization the operating system may have dropped the data it could not write, and whatever is
//! appended behind such a hole could be lost with it. Opening the file again starts from what the disk has.

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
use statehouse_store::{
    Address, Change, Clock, Commit, Consistency, ExplainRequest, Explanation, LogPage, Migrate, Page, Plan,
    Query, Record, Resolution, Row, Scan, Schema, Store, StoreError, SystemClock, Tenant,
};

pub use backup::{BackupFile, BackupProgress, backup};
pub use explain::explain;

use crate::reader::Readers;
use crate::writer::Writer;

/// How a store is opened.
#[derive(Clone, Debug)]
pub struct Options {
    /// The file. Its folder must exist; the file is created if it does not.
    pub path: PathBuf,
    /// What `Now` in a guard reads.
    pub clock: Arc<dyn Clock>,
    /// Log partitions of a new file. An existing file keeps its own number.
    pub partitions: u32,
    /// Connections for reading.
    pub readers: usize,
    /// Plans that may wait for the writer before callers have to wait themselves.
    pub queue: usize,
    /// Plans that share one transaction at most.
    pub batch: usize,
    /// How long to wait for a file that another process has locked.
    pub lock_timeout: Duration,
    /// How long nothing must be committed before the write-ahead log is moved into the file; it is moved after five times as
    /// long anyway.
    pub checkpoint_after: Duration,
    /// The SQLite file layer, by its registered name; for tests that make it fail.
    pub vfs: Option<String>,
    /// Whether commits wait for the disk. Switching this off gives up durability; it exists for the test that
    /// shows that the durability test would notice.
    pub synchronous: bool,
}

impl Options {
    /// The usual settings for a file.
    pub fn at(path: impl Into<PathBuf>) -> Options {
        Options {
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
    writer: Writer,
    readers: Readers,
}

/// Log partitions of a new file. There is one writer, so whoever consumes the log and writes cannot gain by sharing it
/// out, and each partition costs a page in every transaction: measured, four of them take an eighth of the rate.
const PARTITIONS: u32 = 1;

/// How often a waiting reader of the log looks for records that another process wrote.
const LOG_POLL: Duration = Duration::from_millis(200);

impl SqliteStore {
    /// Opens a file, and creates it if it does not exist. Logs a warning if other users can read the file.
    pub async fn open(options: Options) -> Result<SqliteStore, StoreError> {
        let (writer, partitions) = Writer::start(&options).await?;
        permissions::warn_if_shared(&options.path);
        let readers = Readers::new(&options);
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

    async fn migrate(&self, schema: &Schema, how: Migrate) -> Result<Vec<Change>, StoreError> {
        self.writer.migrate(schema.clone(), how).await
    }

    async fn commit(&self, plan: &Plan) -> Result<Commit, StoreError> {
        self.writer.commit(plan.clone()).await
    }

    async fn resolve(&self, tenant: &Tenant, operation: &str) -> Result<Resolution, StoreError> {
        self.writer.resolve(tenant.clone(), operation.to_owned()).await
    }

    async fn find_operation(&self, tenant: &Tenant, operation: &str) -> Result<Option<Record>, StoreError> {
        self.readers.here(|reader| reader.find_operation(tenant, operation)).await
    }

    async fn get(&self, addresses: &[Address], _: Consistency) -> Result<Vec<Option<Row>>, StoreError> {
        // Every read is strong here, and a read of a few rows is done before a thread could be woken for it.
        self.readers.here(|reader| reader.get(addresses)).await
    }

    async fn query(&self, query: &Query) -> Result<Page, StoreError> {
        if query.page_limit() <= reader::INLINE_ROWS {
            return self.readers.here(|reader| reader.query(query)).await;
        }
        let query = query.clone();
        self.readers.aside(move |reader| reader.query(&query)).await
    }

    async fn scan(&self, scan: &Scan) -> Result<Page, StoreError> {
        let scan = scan.clone();
        self.readers.aside(move |reader| reader.scan(&scan)).await
    }

    async fn read_log(&self, partition: u32, after: u64, limit: usize) -> Result<LogPage, StoreError> {
        self.check_partition(partition)?;
        let limit = limit.min(PAGE_MAX);
        self.readers.aside(move |reader| reader.log(partition, after, limit)).await
    }

    async fn wait_log(&self, seen: &[u64], at_most: Duration) -> Result<Vec<u64>, StoreError> {
        let mut commits = self.writer.commits();
        let deadline = self.clock.now().plus(at_most);
        loop {
            commits.borrow_and_update();
            let heads = self.readers.here(|reader| reader.heads(self.partitions)).await?;
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

    fn explain(&self, asked: ExplainRequest<'_>) -> Explanation {
        explain(asked)
    }

    async fn close(&self) {
        self.readers.close();
        self.writer.close().await;
    }
}
