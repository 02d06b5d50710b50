//! A group of the house at work: one bounded step on one partition.
//!
//! A step reads a page of the log, sorts its records by tenant, and sends each tenant's on a [`TenantRun`] of its own, all at
//! once. Then the low-water mark moves up to the first record that is not done.

mod run_state;
mod tenant_run;
mod verdict;

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use statehouse_store::{
    Address, Consistency, Plan, Position, Query, Record, RetryPolicy, Row, StoreError, Tenant, commit_known,
};
use tokio::task::JoinSet;

use self::tenant_run::{RunResult, TenantRun};
use super::parking::{READY, SUBJECT};
use super::progress::{ConsumerTables, GroupProgress, misuse};
use super::{RecordHandler, is_applied, offset_of};
use crate::worker::{NextStep, StepContext, StepProgress, Worker};

/// Parked records that one step tries again.
const READY_MAX: usize = 16;

/// The worker of a group: as many shards as the log has partitions.
#[derive(Debug)]
pub struct Consumer {
    name: String,
    partitions: u32,
    handler: Arc<dyn RecordHandler>,
}

impl Consumer {
    /// The worker of a handler's group, over a log of so many partitions.
    pub fn of(handler: Arc<dyn RecordHandler>, partitions: u32) -> Consumer {
        Consumer { name: format!("{}.consume", handler.group()), partitions, handler }
    }
}

#[async_trait]
impl Worker for Consumer {
    fn name(&self) -> &str {
        &self.name
    }

    fn shards(&self) -> u32 {
        self.partitions
    }

    async fn step(&self, context: &StepContext<'_>, limit: usize) -> Result<StepProgress, StoreError> {
        feed(&self.handler, context, limit).await
    }
}

/// One step of a group on the partition that is the context's shard.
pub async fn feed(
    handler: &Arc<dyn RecordHandler>,
    context: &StepContext<'_>,
    limit: usize,
) -> Result<StepProgress, StoreError> {
    let tables = ConsumerTables::open()?;
    let own = tables.address(&tables.house, handler.group(), context.shard)?;
    let rows = context.store.get(std::slice::from_ref(&own), Consistency::Strong).await?;
    let low = GroupProgress::of(rows.first().and_then(Option::as_ref))?;
    GroupStep { handler, context, tables, low }.run(limit).await
}

/// One step of a group on a partition.
struct GroupStep<'s> {
    handler: &'s Arc<dyn RecordHandler>,
    context: &'s StepContext<'s>,
    tables: &'static ConsumerTables,
    /// The progress of the whole group: the low-water mark.
    low: GroupProgress,
}

/// What the runs of all tenants came to.
struct FinishedRuns {
    /// The last offset that is done, with all before it.
    reached: u64,
    /// What stopped a run.
    error: Option<StoreError>,
    /// Whether a run goes on in the next step.
    goes_on: bool,
}

impl GroupStep<'_> {
    async fn run(self, limit: usize) -> Result<StepProgress, StoreError> {
        let (context, group) = (self.context, self.handler.group());
        let mut progress = StepProgress::idle();
        for (tenant, subject) in ready(context, group).await? {
            let mut wakeups = Vec::new();
            self.tenant_run(&tenant).retry(&subject, &mut progress, &mut wakeups).await?;
            wakeups.iter().for_each(|wakeup| context.wakeups.notify(wakeup));
        }
        let page = context.store.read_log(context.shard, self.low.reached, limit).await?;
        // A group that has not begun yet begins with what there is.
        let trimmed = page.oldest.saturating_sub(1).saturating_sub(self.low.reached);
        let missed = if self.low.present { trimmed } else { 0 };
        if missed > 0 {
            progress.failures.push(format!("{missed} records were trimmed before {group} could read them"));
        }
        let last = page.records.last().map_or(self.low.reached + trimmed, offset_of);
        if let Some(first) = page.records.first() {
            progress.lag = context.clock.now().since(first.at);
        }
        let FinishedRuns { reached, error, goes_on } =
            self.run_tenants(page.records, last, &mut progress).await?;
        self.raise_low_water(reached, missed).await?;
        match error {
            Some(error) if progress.rows == 0 => return Err(error),
            Some(error) => progress.failures.push(error.to_string()),
            None if goes_on || last < page.head => progress.next = NextStep::Now,
            None => {
                progress.next = NextStep::Log(Position { partition: context.shard, offset: page.head });
            }
        }
        // Passing over what does not concern the group is work, too.
        match progress.next {
            NextStep::Now => progress.rows = progress.rows.max(1),
            NextStep::Log(_) => progress.lag = Duration::ZERO,
            _ => {}
        }
        Ok(progress)
    }

    fn tenant_run(&self, tenant: &Tenant) -> TenantRun {
        let context = self.context;
        TenantRun {
            store: context.store.clone(),
            ids: context.ids.clone(),
            handler: self.handler.clone(),
            books: self.tables,
            tenant: tenant.clone(),
            partition: context.shard,
            epoch: context.held.epoch(),
            era: self.low.era,
            now: context.clock.now(),
            clock: context.clock.clone(),
            holds: context.egress.holds.clone(),
        }
    }

    /// Runs the records of each tenant, all at once. `last` is the offset that is reached if none of them stops.
    async fn run_tenants(
        &self,
        records: Vec<Record>,
        last: u64,
        progress: &mut StepProgress,
    ) -> Result<FinishedRuns, StoreError> {
        let (context, group) = (self.context, self.handler.group());
        let mut by_tenant: BTreeMap<Tenant, Vec<Record>> = BTreeMap::new();
        for record in records.into_iter().filter(|record| is_applied(record) && self.handler.wants(record)) {
            by_tenant.entry(record.tenant.clone()).or_default().push(record);
        }
        let tenants = by_tenant.keys().map(|tenant| self.tables.address(tenant, group, context.shard));
        let addresses = tenants.collect::<Result<Vec<Address>, StoreError>>()?;
        let rows = match addresses.is_empty() {
            true => Vec::new(),
            false => context.store.get(&addresses, Consistency::Strong).await?,
        };
        let mut runs: JoinSet<RunResult> = JoinSet::new();
        for ((tenant, records), row) in by_tenant.into_iter().zip(rows) {
            runs.spawn(self.tenant_run(&tenant).run(GroupProgress::of(row.as_ref()), records));
        }
        let mut all = FinishedRuns { reached: last, error: None, goes_on: false };
        while let Some(finished) = runs.join_next().await {
            let finished = finished.map_err(|panic| StoreError::unavailable(format!("{group}: {panic}")))?;
            progress.rows += finished.rows;
            progress.failures.extend(finished.parked);
            finished.wakeups.iter().for_each(|wakeup| context.wakeups.notify(wakeup));
            if let Some((offset, why)) = finished.stopped {
                all.reached = all.reached.min(offset.saturating_sub(1));
                all.error = Some(why);
            }
            if let Some(offset) = finished.goes_on {
                all.reached = all.reached.min(offset.saturating_sub(1));
                all.goes_on = true;
            }
        }
        Ok(all)
    }

    /// Moves the low-water mark up to an offset, and counts the records that were trimmed unread.
    async fn raise_low_water(&self, reached: u64, missed: u64) -> Result<(), StoreError> {
        if reached <= self.low.reached && missed == 0 {
            return Ok(());
        }
        let (context, low, tables) = (self.context, &self.low, self.tables);
        let missed = low.missed + missed;
        let after = GroupProgress { reached, missed, epoch: context.held.epoch(), ..low.clone() };
        let plan = Plan::of(&tables.house, "log.reached")
            .step(low.low_water_to(&after, self.handler.group(), context.shard, tables))
            .step(context.guard())
            .without_rows()
            .build()
            .map_err(misuse)?;
        // If it is refused, the group was moved, or the partition is another's: the next step will see.
        commit_known(&**context.store, &plan, RetryPolicy::WORKER).await.map(drop)
    }
}

/// The keys of which something is to be tried again.
async fn ready(context: &StepContext<'_>, group: &str) -> Result<Vec<(Tenant, String)>, StoreError> {
    let books = ConsumerTables::open()?;
    let query = Query::all_tenants(&books.parked, READY, ConsumerTables::key(group, context.shard))
        .and_then(|query| query.limit(READY_MAX))
        .map_err(misuse)?;
    let page = context.store.query(&query).await?;
    let key = |row: &Row| Ok((row.tenant().clone(), row.get_text(SUBJECT)?.to_owned()));
    let mut keys = page.rows.iter().map(key).collect::<Result<Vec<(Tenant, String)>, StoreError>>()?;
    keys.dedup();
    Ok(keys)
}
