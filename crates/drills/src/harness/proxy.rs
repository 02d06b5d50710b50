//! Something between a caller and a store: [`StoreProxy`] is a store that asks a [`Interceptor`] what becomes of each call.
//!
//! What watches plans, changes them, delays them or loses their answers differs in a few calls only. The rest of the
//! contract is handed on here, once.

use std::fmt;
use std::future::Future;
use std::pin::Pin;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use async_trait::async_trait;
use statehouse_store::{
    Address, BlankRange, BlankedPage, Commit, Consistency, ExplainRequest, Explanation, LogPage, Migrate,
    Page, Plan, Query, Record, Resolution, Row, Scan, Schema, SchemaChange, Segment, Store, StoreError,
    Tenant, Time,
};

use crate::harness::recorder::unattributed;

/// What becomes of calls. Unless it says otherwise they are handed on.
#[async_trait]
pub(crate) trait Interceptor: Send + Sync + fmt::Debug {
    /// StoreProxy a commit.
    async fn commit(&self, inner: &Arc<dyn Store>, plan: &Plan) -> Result<Commit, StoreError> {
        inner.commit(plan).await
    }

    /// StoreProxy a resolve.
    async fn resolve(
        &self,
        inner: &Arc<dyn Store>,
        tenant: &Tenant,
        operation: &str,
    ) -> Result<Resolution, StoreError> {
        inner.resolve(tenant, operation).await
    }

    /// StoreProxy a query.
    async fn query(&self, inner: &Arc<dyn Store>, query: &Query) -> Result<Page, StoreError> {
        self.read().await?;
        inner.query(query).await
    }

    /// Intercepts a scan.
    async fn scan(&self, inner: &Arc<dyn Store>, scan: &Scan) -> Result<Page, StoreError> {
        self.read().await?;
        inner.scan(scan).await
    }

    /// Intercepts a division into segments.
    async fn segments(
        &self,
        inner: &Arc<dyn Store>,
        scan: &Scan,
        max: usize,
    ) -> Result<Vec<Segment>, StoreError> {
        self.read().await?;
        inner.segments(scan, max).await
    }

    /// StoreProxy a get.
    async fn get(
        &self,
        inner: &Arc<dyn Store>,
        addresses: &[Address],
        consistency: Consistency,
    ) -> Result<Vec<Option<Row>>, StoreError> {
        self.read().await?;
        inner.get(addresses, consistency).await
    }

    /// Before any other read.
    async fn read(&self) -> Result<(), StoreError> {
        Ok(())
    }
}

/// Lets something happen between a reading and what follows from it, once.
#[derive(Default)]
pub(crate) struct Meanwhile(Mutex<Option<Pin<Box<dyn Future<Output = ()> + Send>>>>);

impl Meanwhile {
    /// This happens as soon as a row is read, or a page that holds one, before the reader goes on.
    pub(crate) fn next(&self, event: impl Future<Output = ()> + Send + 'static) {
        *self.0.lock().unwrap_or_else(PoisonError::into_inner) = Some(Box::pin(event));
    }

    async fn happen(&self) {
        let event = self.0.lock().unwrap_or_else(PoisonError::into_inner).take();
        if let Some(event) = event {
            unattributed(event).await;
        }
    }
}

impl fmt::Debug for Meanwhile {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Meanwhile")
    }
}

#[async_trait]
impl Interceptor for Arc<Meanwhile> {
    async fn query(&self, inner: &Arc<dyn Store>, query: &Query) -> Result<Page, StoreError> {
        let page = inner.query(query).await?;
        if !page.rows.is_empty() {
            self.happen().await;
        }
        Ok(page)
    }

    async fn read(&self) -> Result<(), StoreError> {
        self.happen().await;
        Ok(())
    }
}

/// Lets something happen before a commit, once: its caller was paused with the plan in its hands.
#[derive(Default)]
pub(crate) struct Paused(Mutex<Option<Pause>>);

struct Pause {
    table: String,
    /// How many commits to the table are still to come, the one that waits included.
    left: usize,
    event: Pin<Box<dyn Future<Output = ()> + Send>>,
}

impl Paused {
    /// This happens before the commit of that number, counted from 1, of those that concern a table. Then the commit goes on.
    pub(crate) fn before(
        &self,
        table: &str,
        number: usize,
        event: impl Future<Output = ()> + Send + 'static,
    ) {
        let pause = Pause { table: table.to_owned(), left: number, event: Box::pin(event) };
        *self.lock() = Some(pause);
    }

    /// Whether it has happened.
    pub(crate) fn is_over(&self) -> bool {
        self.lock().is_none()
    }

    fn lock(&self) -> MutexGuard<'_, Option<Pause>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn arrive(&self, plan: &Plan) -> Option<Pause> {
        let mut waits = self.lock();
        let pause = waits.as_mut()?;
        if plan.steps().iter().any(|step| step.table.name() == pause.table) {
            pause.left = pause.left.saturating_sub(1);
        }
        waits.take_if(|pause| pause.left == 0)
    }
}

impl fmt::Debug for Paused {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Paused")
    }
}

#[async_trait]
impl Interceptor for Arc<Paused> {
    async fn commit(&self, inner: &Arc<dyn Store>, plan: &Plan) -> Result<Commit, StoreError> {
        if let Some(pause) = self.arrive(plan) {
            unattributed(pause.event).await;
        }
        inner.commit(plan).await
    }
}

/// Keeps commits under way: their caller is told that nothing is known, and the last one arrives when it is told to.
#[derive(Debug, Default)]
pub(crate) struct Delayed {
    wanted: AtomicUsize,
    kept: Mutex<Option<Plan>>,
}

impl Delayed {
    /// So many commits are under way for a long time, from the next one on.
    pub(crate) fn next(&self, count: usize) {
        self.wanted.store(count, Ordering::SeqCst);
    }

    /// What is under way.
    pub(crate) fn kept(&self) -> Option<Plan> {
        self.kept.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }
}

#[async_trait]
impl Interceptor for Arc<Delayed> {
    async fn commit(&self, inner: &Arc<dyn Store>, plan: &Plan) -> Result<Commit, StoreError> {
        let less = |wanted: usize| wanted.checked_sub(1);
        if self.wanted.fetch_update(Ordering::SeqCst, Ordering::SeqCst, less).is_ok() {
            *self.kept.lock().unwrap_or_else(PoisonError::into_inner) = Some(plan.clone());
            return Err(StoreError::unknown(plan.operation(), "it is under way"));
        }
        inner.commit(plan).await
    }
}

/// A store that fails in the middle of a caller's retries: one commit is applied and its answer is lost, and the next
/// one does not reach the store.
#[derive(Debug, Default)]
pub(crate) struct LostThenUnavailable(Mutex<Vec<CommitFault>>);

#[derive(Clone, Copy, Debug)]
enum CommitFault {
    AnswerLost,
    NotReached,
}

impl LostThenUnavailable {
    /// Injects both faults, from the next commit on.
    pub(crate) fn start(&self) {
        *self.lock() = vec![CommitFault::NotReached, CommitFault::AnswerLost];
    }

    /// Fails unless both faults were injected since the last start.
    pub(crate) fn check_injected(&self) -> anyhow::Result<()> {
        let left = self.lock();
        anyhow::ensure!(left.is_empty(), "not injected: {left:?}");
        Ok(())
    }

    fn lock(&self) -> MutexGuard<'_, Vec<CommitFault>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[async_trait]
impl Interceptor for Arc<LostThenUnavailable> {
    async fn commit(&self, inner: &Arc<dyn Store>, plan: &Plan) -> Result<Commit, StoreError> {
        let fault = self.lock().pop();
        match fault {
            None => inner.commit(plan).await,
            Some(CommitFault::NotReached) => Err(StoreError::unavailable("injected")),
            Some(CommitFault::AnswerLost) => {
                inner.commit(plan).await?;
                Err(StoreError::unknown(plan.operation(), "injected"))
            }
        }
    }
}

/// A store with a interceptor around it.
#[derive(Debug)]
pub(crate) struct StoreProxy<H> {
    inner: Arc<dyn Store>,
    interceptor: H,
}

impl<H: Interceptor> StoreProxy<H> {
    pub(crate) fn new(inner: Arc<dyn Store>, interceptor: H) -> StoreProxy<H> {
        StoreProxy { inner, interceptor }
    }
}

#[async_trait]
impl<H: Interceptor> Store for StoreProxy<H> {
    fn engine(&self) -> &'static str {
        self.inner.engine()
    }

    fn partitions(&self) -> u32 {
        self.inner.partitions()
    }

    async fn migrate(&self, schema: &Schema, how: Migrate) -> Result<Vec<SchemaChange>, StoreError> {
        self.inner.migrate(schema, how).await
    }

    async fn commit(&self, plan: &Plan) -> Result<Commit, StoreError> {
        self.interceptor.commit(&self.inner, plan).await
    }

    async fn resolve(&self, tenant: &Tenant, operation: &str) -> Result<Resolution, StoreError> {
        self.interceptor.resolve(&self.inner, tenant, operation).await
    }

    async fn find_operation(&self, tenant: &Tenant, operation: &str) -> Result<Option<Record>, StoreError> {
        self.interceptor.read().await?;
        self.inner.find_operation(tenant, operation).await
    }

    async fn get(
        &self,
        addresses: &[Address],
        consistency: Consistency,
    ) -> Result<Vec<Option<Row>>, StoreError> {
        self.interceptor.get(&self.inner, addresses, consistency).await
    }

    async fn query(&self, query: &Query) -> Result<Page, StoreError> {
        self.interceptor.query(&self.inner, query).await
    }

    async fn scan(&self, scan: &Scan) -> Result<Page, StoreError> {
        self.interceptor.scan(&self.inner, scan).await
    }

    async fn segments(&self, scan: &Scan, max: usize) -> Result<Vec<Segment>, StoreError> {
        self.interceptor.segments(&self.inner, scan, max).await
    }

    async fn read_log(&self, partition: u32, after: u64, limit: usize) -> Result<LogPage, StoreError> {
        self.interceptor.read().await?;
        self.inner.read_log(partition, after, limit).await
    }

    async fn wait_log(&self, seen: &[u64], at_most: Duration) -> Result<Vec<u64>, StoreError> {
        self.inner.wait_log(seen, at_most).await
    }

    async fn trim_log(&self, partition: u32, through: u64) -> Result<(), StoreError> {
        self.inner.trim_log(partition, through).await
    }

    async fn blank_events(&self, range: &BlankRange) -> Result<BlankedPage, StoreError> {
        self.inner.blank_events(range).await
    }

    async fn scrub(&self) -> Result<(), StoreError> {
        self.inner.scrub().await
    }

    async fn now(&self) -> Result<Time, StoreError> {
        self.inner.now().await
    }

    fn explain(&self, asked: ExplainRequest<'_>) -> Explanation {
        self.inner.explain(asked)
    }

    async fn close(&self) {
        self.inner.close().await;
    }
}
