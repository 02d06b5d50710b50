//! Retention: how long records are kept, and the worker that forgets the others.
//!
//! With a record its operation id is forgotten, so retention bounds how long a repetition is recognized.
//!
//! What a group has yet to read is found in two ways. A group that has begun has a row that says from where on it needs
//! the log, and an index across tenants finds the least of these. A declared group has no such row for a tenant and
//! partition that no program of the tenant has claimed yet; but it reads from its declaration on, so the trimmer looks at
//! the records that it is about to forget, and keeps those that such a group would get.

use std::collections::BTreeMap;
use std::time::Duration;

use async_trait::async_trait;
use statehouse_store::limits::PAGE_MAX;
use statehouse_store::{Address, Consistency, Query, Record, Row, StoreError, Table, Tenant};

use super::delivery::Delivery;
use super::progress::{ConsumerTables, KEEPS, KEEPS_FROM, misuse};
use super::{offset_in, offset_of};
use crate::worker::{NextStep, StepContext, StepProgress, Worker};

/// How long records are kept.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LogRetention {
    /// For how long at least.
    pub span: Duration,
    /// Whether what some group has yet to read, or has parked, is kept for as long as it takes (I7).
    pub unread: bool,
}

/// A declared group, as far as the trimmer needs to know it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DeclaredGroup {
    /// Its name.
    pub name: String,
    /// The resources whose events it gets; all if there are none.
    pub of: Vec<String>,
}

/// The worker that trims the log: as many shards as it has partitions.
#[derive(Debug)]
pub struct Trimmer {
    keeping: LogRetention,
    partitions: u32,
    groups: Vec<DeclaredGroup>,
}

impl Trimmer {
    /// A trimmer of a log of so many partitions, which these declared groups read.
    pub fn of(keeping: LogRetention, partitions: u32, groups: Vec<DeclaredGroup>) -> Trimmer {
        Trimmer { keeping, partitions, groups }
    }

    /// The offset up to which the declared groups have read these records.
    async fn read_by_declared(
        &self,
        context: &StepContext<'_>,
        records: &[Record],
    ) -> Result<u64, StoreError> {
        let books = ConsumerTables::open()?;
        // The first record that each tenant's group would get.
        let mut firsts: BTreeMap<(&Tenant, &str), u64> = BTreeMap::new();
        for record in records {
            for group in &self.groups {
                if Delivery::of(&group.of, &record.tenant, record).is_some() {
                    firsts.entry((&record.tenant, &group.name)).or_insert_with(|| offset_of(record));
                }
            }
        }
        let address = |(tenant, group): &(&Tenant, &str)| books.address(tenant, group, context.shard);
        let addresses = firsts.keys().map(address).collect::<Result<Vec<Address>, StoreError>>()?;
        let mut least = u64::MAX;
        if addresses.is_empty() {
            return Ok(least);
        }
        let rows = context.store.get(&addresses, Consistency::Strong).await?;
        for (row, first) in rows.iter().zip(firsts.values()) {
            let kept = row.as_ref().map_or(Ok(None), keeps_from)?;
            least = least.min(kept.unwrap_or_else(|| first.saturating_sub(1)));
        }
        Ok(least)
    }

    /// The offset up to which every group has done its work, as far as the index knows.
    async fn read_by_all(&self, context: &StepContext<'_>) -> Result<u64, StoreError> {
        let books = ConsumerTables::open()?;
        let mut least = u64::MAX;
        let tables: [&std::sync::Arc<Table>; 2] = [&books.progress, &books.parked];
        for table in tables {
            let query = Query::all_tenants(table, KEEPS, [i64::from(context.shard).into()])
                .and_then(|query| query.limit(1))
                .map_err(misuse)?;
            let page = context.store.query(&query).await?;
            let slowest = page.rows.first().map_or(Ok(None), keeps_from)?;
            least = least.min(slowest.unwrap_or(u64::MAX));
        }
        Ok(least)
    }
}

/// The offset behind which a row needs the log; `None` for one that needs nothing.
fn keeps_from(row: &Row) -> Result<Option<u64>, StoreError> {
    row.get_optional_int(KEEPS_FROM)?.map(|offset| offset_in(row, KEEPS_FROM, offset)).transpose()
}

#[async_trait]
impl Worker for Trimmer {
    fn name(&self) -> &str {
        "log.trim"
    }

    fn shards(&self) -> u32 {
        self.partitions
    }

    async fn step(&self, context: &StepContext<'_>, limit: usize) -> Result<StepProgress, StoreError> {
        let mut progress = StepProgress::idle();
        let since = context.clock.now().minus(self.keeping.span);
        let oldest = context.store.read_log(context.shard, 0, 1).await?;
        let Some(first) = oldest.records.first().filter(|record| record.at < since) else {
            return Ok(progress);
        };
        progress.lag = since.since(first.at);
        let page = context.store.read_log(context.shard, 0, limit.min(PAGE_MAX)).await?;
        let old = page.records.iter().take_while(|record| record.at < since).last().map_or(0, offset_of);
        let mut through = old.min(page.head.saturating_sub(1));
        if self.keeping.unread {
            through = through.min(self.read_by_all(context).await?);
            let is_old = |record: &&Record| offset_of(record) <= through;
            let old: Vec<Record> = page.records.iter().take_while(is_old).cloned().collect();
            through = through.min(self.read_by_declared(context, &old).await?);
        }
        if through < page.oldest {
            return Ok(progress);
        }
        context.store.trim_log(context.shard, through).await?;
        progress.rows = usize::try_from(through - page.oldest + 1).unwrap_or(usize::MAX);
        progress.next = NextStep::Now;
        Ok(progress)
    }
}
