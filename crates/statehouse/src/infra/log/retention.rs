//! Retention: how long records are kept, and the worker that forgets the others.
//!
//! With a record its operation id is forgotten, so retention bounds how long a repetition is recognized.

use std::time::Duration;

use async_trait::async_trait;
use statehouse_store::limits::PAGE_MAX;
use statehouse_store::{Query, StoreError, Table};

use super::progress::{Books, KEEPS, KEEPS_FROM, misuse};
use super::{offset_in, offset_of};
use crate::worker::{Next, Progress, Shift, Worker};

/// How long records are kept.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Keeping {
    /// For how long at least.
    pub span: Duration,
    /// Whether what some group has yet to read, or has parked, is kept for as long as it takes (I7).
    pub unread: bool,
}

/// The worker that trims the log: as many shards as it has partitions.
#[derive(Debug)]
pub struct Trimmer {
    keeping: Keeping,
    partitions: u32,
}

impl Trimmer {
    /// A trimmer of a log of so many partitions.
    pub fn of(keeping: Keeping, partitions: u32) -> Trimmer {
        Trimmer { keeping, partitions }
    }

    /// The offset up to which every group has done its work, as far as the index knows.
    async fn read_by_all(&self, shift: &Shift<'_>) -> Result<u64, StoreError> {
        let books = Books::open()?;
        let mut least = u64::MAX;
        let tables: [&std::sync::Arc<Table>; 2] = [&books.progress, &books.parked];
        for table in tables {
            let query = Query::across(table, KEEPS, [i64::from(shift.shard).into()])
                .and_then(|query| query.limit(1))
                .map_err(misuse)?;
            let page = shift.store.query(&query).await?;
            let slowest = page.rows.first().and_then(|row| row.int(KEEPS_FROM));
            least = least.min(slowest.map_or(u64::MAX, offset_in));
        }
        Ok(least)
    }
}

#[async_trait]
impl Worker for Trimmer {
    fn name(&self) -> &str {
        "log.trim"
    }

    fn shards(&self) -> u32 {
        self.partitions
    }

    async fn step(&self, shift: &Shift<'_>, limit: usize) -> Result<Progress, StoreError> {
        let mut progress = Progress::idle();
        let since = shift.clock.now().minus(self.keeping.span);
        let oldest = shift.store.read_log(shift.shard, 0, 1).await?;
        let Some(first) = oldest.records.first().filter(|record| record.at < since) else {
            return Ok(progress);
        };
        progress.lag = since.since(first.at);
        let page = shift.store.read_log(shift.shard, 0, limit.min(PAGE_MAX)).await?;
        let old = page.records.iter().take_while(|record| record.at < since).last().map_or(0, offset_of);
        let mut through = old.min(page.head.saturating_sub(1));
        if self.keeping.unread {
            through = through.min(self.read_by_all(shift).await?);
        }
        if through < page.oldest {
            return Ok(progress);
        }
        shift.store.trim_log(shift.shard, through).await?;
        progress.rows = usize::try_from(through - page.oldest + 1).unwrap_or(usize::MAX);
        progress.next = Next::Now;
        Ok(progress)
    }
}
