//! The state that all parts of the store share.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use statehouse_store::{Clock, StoreError};
use tokio::sync::watch;

use crate::catalog::Catalog;
use crate::client::DynamoClient;
use crate::record::LogTables;
use crate::stamps::StampClock;

#[derive(Debug)]
pub(crate) struct DynamoInner {
    pub(crate) client: DynamoClient,
    pub(crate) catalog: Catalog,
    pub(crate) tables: LogTables,
    pub(crate) partitions: u32,
    pub(crate) clock: Arc<dyn Clock>,
    pub(crate) clock_skew: Duration,
    pub(crate) stamps: StampClock,
    pub(crate) billing: crate::options::Billing,
    /// One for each partition. Two sequencers of one process would only conflict.
    pub(crate) sequencing: Vec<tokio::sync::Mutex<()>>,
    /// The number of logged plans of this process. A change wakes the waiting log readers.
    pub(crate) commits: watch::Sender<u64>,
    /// Whether a task is deleting tombstones.
    pub(crate) deleting_tombstones: AtomicBool,
    pub(crate) closed: AtomicBool,
}

impl DynamoInner {
    /// Fails once the store is closed.
    pub(crate) fn check_open(&self) -> Result<(), StoreError> {
        if self.closed.load(Ordering::SeqCst) {
            return Err(StoreError::unavailable("the store is closed"));
        }
        Ok(())
    }

    /// A random number for a row's incarnation. It has 53 bits, so that it is exact in every JSON tool.
    pub(crate) fn new_incarnation(&self) -> i64 {
        (self.client.random_u64() >> 11).cast_signed()
    }

    /// Wakes the readers of this process that wait for the log.
    pub(crate) fn notify_log_waiters(&self) {
        self.commits.send_modify(|commits| *commits += 1);
    }
}
