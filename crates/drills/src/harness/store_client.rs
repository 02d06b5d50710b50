//! One tenant's user of a store: commits that must be applied or refused, and reads that follow every page.
//!
//! Cases say what they expect by the method that they call, and the error names the plan when it came otherwise.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};
use statehouse_store::limits::PAGE_MAX;
use statehouse_store::plan::Builder;
use statehouse_store::{
    Address, Applied, Clock, Commit, Consistency, Cursor, Entry, EventTemplate, Migrate, Page, Plan, Query,
    Reason, Record, Refused, Row, Scan, Schema, Step, Store, StoreError, SystemClock, Table, Tenant, Value,
};

use crate::harness::engines::TestNamespace;

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
    /// Opens a namespace, migrates it to these tables, and works there for the tenant `acme`.
    pub(crate) async fn open(namespace: &dyn TestNamespace, tables: &[&Arc<Table>]) -> Result<StoreClient> {
        StoreClient::over(namespace.open().await?, tables).await
    }

    /// The same on a clock.
    pub(crate) async fn open_at(
        namespace: &dyn TestNamespace,
        clock: Arc<dyn Clock>,
        tables: &[&Arc<Table>],
    ) -> Result<StoreClient> {
        StoreClient::over(namespace.open_at(clock).await?, tables).await
    }

    async fn over(store: Arc<dyn Store>, tables: &[&Arc<Table>]) -> Result<StoreClient> {
        if !tables.is_empty() {
            let schema = Schema::new(tables.iter().map(|&table| table.clone()))?;
            store.migrate(&schema, Migrate::Apply).await.context("migrating to the case's tables")?;
        }
        StoreClient::of(store, "acme")
    }

    /// Works on a store that was opened elsewhere.
    pub(crate) fn of(store: Arc<dyn Store>, tenant: &str) -> Result<StoreClient> {
        Ok(StoreClient { store, tenant: Tenant::new(tenant)?, next: Arc::default() })
    }

    /// The same store, for another tenant.
    pub(crate) fn for_tenant(&self, tenant: &str) -> Result<StoreClient> {
        Ok(StoreClient { tenant: Tenant::new(tenant)?, ..self.clone() })
    }

    /// A plan under an operation id that was not given out before.
    pub(crate) fn plan(&self) -> Builder {
        let number = self.next.fetch_add(1, Ordering::Relaxed);
        Plan::of(&self.tenant, format!("{}-{number}", self.tenant))
    }

    /// Goes on with operation ids from this number: for a client that takes over from another.
    pub(crate) fn skip_ids(&self, to: u64) {
        self.next.fetch_max(to, Ordering::Relaxed);
    }

    /// A plan of one step.
    pub(crate) fn one(&self, step: Step) -> Builder {
        self.plan().step(step)
    }

    /// A plan that leaves a record about a subject, with an event of that name and no data.
    pub(crate) fn noted(&self, resource: &str, key: &str, event: &str) -> Builder {
        self.plan().log(Entry::about(resource, key).event(EventTemplate::named(event)))
    }

    /// Commits a plan that must be applied, and not as a repetition.
    pub(crate) async fn apply(&self, plan: Builder) -> Result<Applied> {
        let plan = plan.build()?;
        match self.store.commit(&plan).await.with_context(|| format!("committing {}", shown(&plan)))? {
            Commit::Applied(applied) if !applied.repeated => Ok(applied),
            other => bail!("expected {} to be applied, got {other:?}", shown(&plan)),
        }
    }

    /// Commits a plan that must be refused.
    pub(crate) async fn refuse(&self, plan: Builder) -> Result<Refused> {
        let plan = plan.build()?;
        match self.store.commit(&plan).await.with_context(|| format!("committing {}", shown(&plan)))? {
            Commit::Refused(refused) => Ok(refused),
            other => bail!("expected {} to be refused, got {other:?}", shown(&plan)),
        }
    }

    /// Commits a plan that must be refused at this step, for this reason, with the row as it is now.
    pub(crate) async fn refuse_as(&self, plan: Builder, step: usize, reason: &Reason) -> Result<()> {
        let built = plan.clone().build()?;
        let address = built.addresses().nth(step).context("the plan has no such step")?;
        let refused = self.refuse(plan).await?;
        ensure!(
            refused.step == step && refused.reason == *reason,
            "expected {} to be refused at step {step} because {reason:?}, got {refused:?}",
            shown(&built)
        );
        let current = self.get(&address).await?;
        ensure!(
            refused.current == current,
            "the refusal of {} shows {:?}; the row is {current:?}",
            shown(&built),
            refused.current
        );
        Ok(())
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

    /// Reads all pages of a query.
    pub(crate) async fn rows(&self, query: Query) -> Result<Vec<Row>> {
        rows(self.store.as_ref(), query).await
    }

    /// Reads all pages of a query again and again until they are what is expected.
    pub(crate) async fn eventually(
        &self,
        query: &Query,
        mut expect: impl FnMut(&[Row]) -> Result<()>,
    ) -> Result<()> {
        let mut last = None;
        for _ in 0..TRIES {
            match expect(&self.rows(query.clone()).await?) {
                Ok(()) => return Ok(()),
                Err(error) => last = Some(error),
            }
            pause().await;
        }
        let last = last.context("a read that is never tried cannot succeed")?;
        Err(last.context(format!("after {TRIES} reads of {}", query.source())))
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

/// Reads all pages of a query. Each cursor goes through its text, as it would on its way to a caller and back.
pub(crate) async fn rows(store: &dyn Store, query: Query) -> Result<Vec<Row>> {
    let mut found = Vec::new();
    let mut next = query.clone();
    loop {
        let page = store.query(&next).await?;
        let Some(cursor) = take_page(&mut found, page, query.page_limit())? else { return Ok(found) };
        next = query.clone().after(cursor)?;
    }
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

/// The values of one column, in the order of the rows.
pub(crate) fn column_of(rows: &[Row], column: &str) -> Vec<Value> {
    rows.iter().map(|row| row.get(column).cloned().unwrap_or(Value::Null)).collect()
}

/// The keys of rows, in their order.
pub(crate) fn keys_of(rows: &[Row]) -> Vec<Vec<Value>> {
    rows.iter().map(|row| row.key().to_vec()).collect()
}

/// Requires two things to be equal, and says which read or plan they are about when they are not.
pub(crate) fn same<T: PartialEq + std::fmt::Debug>(about: &str, got: &T, expected: &T) -> Result<()> {
    ensure!(got == expected, "{about}: expected {expected:?}, got {got:?}");
    Ok(())
}

/// Requires an error of the kind that the closure accepts.
pub(crate) fn fails<T: std::fmt::Debug>(
    about: &str,
    result: Result<T, StoreError>,
    kind: impl FnOnce(&StoreError) -> bool,
) -> Result<()> {
    match result {
        Err(error) if kind(&error) => Ok(()),
        other => bail!("{about}: expected another error, got {other:?}"),
    }
}
