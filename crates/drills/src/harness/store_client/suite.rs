//! What only the suite of the store asks of a client.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use anyhow::{Context, Result, bail, ensure};
use statehouse_store::plan::PlanBuilder;
use statehouse_store::{Clock, Migrate, Query, Reason, Row, Schema, Store, StoreError, Table, Tenant, Value};

use super::{StoreClient, TRIES, pause, shown, take_page};
use crate::harness::engines::TestNamespace;

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

    /// The same store, for another tenant.
    pub(crate) fn for_tenant(&self, tenant: &str) -> Result<StoreClient> {
        Ok(StoreClient { tenant: Tenant::new(tenant)?, ..self.clone() })
    }

    /// Goes on with operation ids from this number: for a client that takes over from another.
    pub(crate) fn skip_ids(&self, to: u64) {
        self.next.fetch_max(to, Ordering::Relaxed);
    }

    /// Commits a plan that must be refused at this step, for this reason, with the row as it is now.
    pub(crate) async fn refuse_as(&self, plan: PlanBuilder, step: usize, reason: &Reason) -> Result<()> {
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

/// The values of one column, in the order of the rows.
pub(crate) fn column_of(rows: &[Row], column: &str) -> Vec<Value> {
    rows.iter().map(|row| row.get(column).cloned().unwrap_or(Value::Null)).collect()
}

/// The keys of rows, in their order.
pub(crate) fn keys_of(rows: &[Row]) -> Vec<Vec<Value>> {
    rows.iter().map(|row| row.key().to_vec()).collect()
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
