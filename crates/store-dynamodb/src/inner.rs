//! What every part of the store shares.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use statehouse_store::{Clock, StoreError};
use tokio::sync::watch;

use crate::catalog::Catalog;
use crate::record::LogTables;
use crate::stamp::Stamps;
use crate::wire::Wire;

#[derive(Debug)]
pub(crate) struct Inner {
    pub(crate) wire: Wire,
    pub(crate) catalog: Catalog,
    pub(crate) tables: LogTables,
    pub(crate) partitions: u32,
    pub(crate) clock: Arc<dyn Clock>,
    pub(crate) clock_skew: Duration,
    pub(crate) stamps: Stamps,
    pub(crate) billing: crate::options::Billing,
    /// One for each partition: two sequencers of one process would only be in each other's way.
    pub(crate) sequencing: Vec<tokio::sync::Mutex<()>>,
    /// Counts the logged plans of this process.
    pub(crate) commits: watch::Sender<u64>,
    /// Whether tombstones are being swept.
    pub(crate) sweeping: AtomicBool,
    pub(crate) closed: AtomicBool,
}

impl Inner {
    /// Fails once the store is closed.
    pub(crate) fn open(&self) -> Result<(), StoreError> {
        if self.closed.load(Ordering::SeqCst) {
            return Err(StoreError::unavailable("the store was closed"));
        }
        Ok(())
    }

    /// A number for a row's life. 53 bits are a number that every tool can show.
    pub(crate) fn draw_life(&self) -> i64 {
        i64::try_from(self.wire.draw() >> 11).unwrap_or(0)
    }

    /// Wakes whoever waits for the log.
    pub(crate) fn wake(&self) {
        self.commits.send_modify(|commits| *commits += 1);
    }
}
