//! One tenant's user of a store: commits that must be applied or refused, and reads that follow every page.
//!
//! Cases say what they expect by the method that they call, and the error names the plan when it came otherwise.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};
use statehouse_store::limits::PAGE_MAX;
use statehouse_store::plan::PlanBuilder;
use statehouse_store::{
    Address, Applied, Clock as _, Commit, Consistency, Cursor, Entry, EventTemplate, Page, Plan, Record,
    Refused, Row, Scan, Step, Store, SystemClock, Table, Tenant, Value,
};

#[cfg(feature = "suite")]
mod suite;

#[cfg(feature = "suite")]
pub(crate) use self::suite::{column_of, fails, keys_of, rows};

/// How often a read that may lag is tried, and how long lies between two tries. Ten seconds in all, which is a
/// bound and not an expectation: on most engines the first try succeeds.
const TRIES: usize = 1_000;
const PAUSE: Duration = Duration::from_millis(10);

/// A tenant at work on a store. Clones share the operation ids that they give out.
#[derive(Clone, Debug)]
pub(crate) struct StoreClient {
    pub(crate) store: Arc<dyn Store>,
    pub(crate) tenant: Tenant,
    next: Arc<AtomicU64>,
}

impl StoreClient {
    /// Works on a store that was opened elsewhere.
    pub(crate) fn of(store: Arc<dyn Store>, tenant: &str) -> Result<StoreClient> {
        Ok(StoreClient { store, tenant: Tenant::new(tenant)?, next: Arc::default() })
    }

    /// A plan under an operation id that was not given out before.
    pub(crate) fn plan(&self) -> PlanBuilder {
        let number = self.next.fetch_add(1, Ordering::Relaxed);
        Plan::of(&self.tenant, format!("{}-{number}", self.tenant))
    }

    /// A plan of one step.
    pub(crate) fn one(&self, step: Step) -> PlanBuilder {
        self.plan().step(step)
    }

    /// A plan that leaves a record about a subject, with an event of that name and no data.
    pub(crate) fn noted(&self, resource: &str, key: &str, event: &str) -> PlanBuilder {
        self.plan().log(Entry::about(resource, key).event(EventTemplate::named(event)))
    }

    /// Commits a plan that must be applied, and not as a repetition.
    pub(crate) async fn apply(&self, plan: PlanBuilder) -> Result<Applied> {
        let plan = plan.build()?;
        match self.store.commit(&plan).await.with_context(|| format!("committing {}", shown(&plan)))? {
            Commit::Applied(applied) if !applied.repeated => Ok(applied),
            other => bail!("expected {} to be applied, got {other:?}", shown(&plan)),
        }
    }

    /// Commits a plan that must be refused.
    pub(crate) async fn refuse(&self, plan: PlanBuilder) -> Result<Refused> {
        let plan = plan.build()?;
        match self.store.commit(&plan).await.with_context(|| format!("committing {}", shown(&plan)))? {
            Commit::Refused(refused) => Ok(refused),
            other => bail!("expected {} to be refused, got {other:?}", shown(&plan)),
        }
    }

    /// The address of a row of this tenant.
    pub(crate) fn address(
        &self,
        table: &Arc<Table>,
        key: impl IntoIterator<Item = Value>,
    ) -> Result<Address> {
        Ok(Address::new(table, &self.tenant, key)?)
    }

    /// Reads one row, strongly.
    pub(crate) async fn get(&self, address: &Address) -> Result<Option<Row>> {
        let rows = self.store.get(std::slice::from_ref(address), Consistency::Strong).await?;
        ensure!(rows.len() == 1, "one address was asked for and {} answers came", rows.len());
        Ok(rows.into_iter().next().flatten())
    }

    /// Reads the row of a key, if it is there.
    pub(crate) async fn find(
        &self,
        table: &Arc<Table>,
        key: impl IntoIterator<Item = Value>,
    ) -> Result<Option<Row>> {
        self.get(&self.address(table, key)?).await
    }

    /// Reads a row that must be there.
    pub(crate) async fn row(&self, table: &Arc<Table>, key: impl IntoIterator<Item = Value>) -> Result<Row> {
        let address = self.address(table, key)?;
        self.get(&address).await?.with_context(|| format!("{address} is missing"))
    }

    /// All records of the log, by partition and offset, once there are at least so many.
    pub(crate) async fn log(&self, at_least: usize) -> Result<Vec<Record>> {
        let mut records = Vec::new();
        for _ in 0..TRIES {
            records = whole_log(self.store.as_ref()).await?;
            if records.len() >= at_least {
                break;
            }
            pause().await;
        }
        ensure!(
            records.len() >= at_least,
            "expected {at_least} records in the log, after {TRIES} reads there are {}: {records:#?}",
            records.len()
        );
        Ok(records)
    }

    /// All records of the log, which must be exactly so many.
    pub(crate) async fn exact_log(&self, count: usize) -> Result<Vec<Record>> {
        let records = self.log(count).await?;
        ensure!(
            records.len() == count,
            "expected {count} records in the log, there are {}: {records:#?}",
            records.len()
        );
        Ok(records)
    }
}

/// A plan as messages show it.
pub(crate) fn shown(plan: &Plan) -> String {
    let steps: Vec<String> = plan.steps().iter().map(Step::to_string).collect();
    let entry = plan.entry().map(|entry| {
        let events: Vec<&str> = entry.events.iter().map(|event| event.name.as_str()).collect();
        format!("log {}/{} [{}]", entry.resource, entry.key, events.join(", "))
    });
    let parts: Vec<String> = steps.into_iter().chain(entry).collect();
    let mut text = format!("{}/{}: {}", plan.tenant(), plan.operation(), parts.join("; "));
    // Plans at the limits hold megabytes; the beginning tells enough.
    if let Some((end, _)) = text.char_indices().nth(2_000) {
        text.truncate(end);
        text.push('…');
    }
    text
}

/// Waits a little for something that lags.
pub(crate) async fn pause() {
    SystemClock.sleep(PAUSE).await;
}

/// Reads all pages of a scan.
pub(crate) async fn scan(store: &dyn Store, scan: Scan) -> Result<Vec<Row>> {
    let mut found = Vec::new();
    let mut next = scan.clone();
    loop {
        let page = store.scan(&next).await?;
        let Some(cursor) = take_page(&mut found, page, scan.page_limit())? else { return Ok(found) };
        next = scan.clone().after(cursor)?;
    }
}

fn take_page(found: &mut Vec<Row>, page: Page, limit: usize) -> Result<Option<Cursor>> {
    ensure!(page.rows.len() <= limit, "a page limited to {limit} rows has {}", page.rows.len());
    found.extend(page.rows);
    // A cursor that does not move would page for ever; no case reads as much as this.
    ensure!(found.len() <= 100_000, "the pages do not end");
    page.next.map(|cursor| Ok(Cursor::parse(&cursor.to_string())?)).transpose()
}

/// All records that are kept, by partition and offset. Every page is checked for gaps on the way.
pub(crate) async fn whole_log(store: &dyn Store) -> Result<Vec<Record>> {
    let mut records = Vec::new();
    for partition in 0..store.partitions() {
        let mut after = 0;
        loop {
            let page = store.read_log(partition, after, PAGE_MAX).await?;
            let first = page.oldest.max(after + 1);
            for (record, offset) in page.records.iter().zip(first..) {
                let position = record.position.with_context(|| format!("{record:?} has no position"))?;
                ensure!(
                    position.partition == partition && position.offset == offset,
                    "expected the record at {partition}:{offset}, got the one at {position}"
                );
            }
            let Some(last) = page.records.last().and_then(|record| record.position) else { break };
            ensure!(last.offset <= page.head, "partition {partition} ends at {} and holds {last}", page.head);
            after = last.offset;
            records.extend(page.records);
        }
    }
    Ok(records)
}

/// Requires two things to be equal, and says which read or plan they are about when they are not.
pub(crate) fn same<T: PartialEq + std::fmt::Debug>(about: &str, got: &T, expected: &T) -> Result<()> {
    ensure!(got == expected, "{about}: expected {expected:?}, got {got:?}");
    Ok(())
}
