//! What is due: rows of any tenant on which the house acts by itself when their time has come.
//!
//! A table that takes part has two columns, `due_at` and `due_shard`, which are set together, and null while the house
//! has nothing to do ([`set`], [`clear`]). Its index `due` is across tenants, so that a [`Scanner`] finds what is due
//! without knowing whose it is. What is to be done about a row is said by whoever owns the table ([`Due`]), as a plan
//! whose guard decides: the index is only a hint, which may be late or wrong.
//!
//! - D1. What is due is found. *A row with a due time stands in the index of its shard; each shard is read from its
//!   beginning, and every row that is due is tried.*
//! - D2. It is done once, however many scanners run. *The guard of the owner's plan*, which has to name the due time (or
//!   the version) that the scanner saw, and `due_at <= now` by the engine's clock.
//! - D3. A row that cannot be done does not hold up the others. *It is counted as failed and passed over; all rows of a
//!   step are independent plans, in flight together.*

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use serde_json::Value as Json;
use statehouse_store::log::partition_of;
use statehouse_store::table::Builder;
use statehouse_store::{
    Commit, Event, Expr, Plan, PlanError, Query, Reason, Refused, RetryPolicy, Row, Step, Store, StoreError,
    Table, Tenant, Time, Type, Value, commit_known,
};
use tokio::sync::Semaphore;
use tokio::task::JoinSet;

use crate::worker::{Next, Progress, Shift, Wake, Worker};

/// When the house acts on a row; null for never.
pub const DUE_AT: &str = "due_at";
/// Which part of the work the row is.
pub const DUE_SHARD: &str = "due_shard";
/// The index across tenants.
pub const DUE: &str = "due";

/// Adds the columns and the index to a table.
pub fn columns(builder: Builder) -> Builder {
    index(builder.optional(DUE_SHARD, Type::Int).optional(DUE_AT, Type::Time))
}

/// Adds the index to a table that has the columns.
pub fn index(builder: Builder) -> Builder {
    builder.global_index(DUE, &[DUE_SHARD], &[DUE_AT])
}

/// Which of so many shards a row belongs to. It spreads the rows of one tenant, and of one due time, evenly.
pub fn shard_of(tenant: &Tenant, resource: &str, key: &str, shards: u32) -> i64 {
    i64::from(partition_of(tenant, resource, key, shards))
}

/// Makes a row due at a time.
pub fn set(step: Step, shard: i64, at: impl Into<Expr>) -> Step {
    step.set(DUE_SHARD, shard).set(DUE_AT, at)
}

/// Makes a row due no more.
pub fn clear(step: Step) -> Step {
    step.set(DUE_SHARD, Value::Null).set(DUE_AT, Value::Null)
}

/// Which worker has to know that the row of an event is due, if it is.
pub fn wake(worker: &str, event: &Event) -> Option<Wake> {
    let row = event.data.get("row")?;
    let shard = row.get(DUE_SHARD)?.as_u64().and_then(|shard| u32::try_from(shard).ok())?;
    let at = row.get(DUE_AT).and_then(Json::as_str)?.parse().ok()?;
    Some(Wake { worker: worker.to_owned(), shard, at })
}

/// Rows that become due, and what is done about them then.
pub trait Due: Send + Sync + fmt::Debug {
    /// The table, which has [`columns`].
    fn table(&self) -> &Arc<Table>;

    /// What is done about a row that is due, as one plan under this operation id, in the row's tenant (D2).
    fn plan(&self, row: &Row, now: Time, operation: &str) -> Result<Plan, PlanError>;

    /// What is done instead if the engine did not agree that it is as late as that: as if it were just due. `None` if being
    /// late makes no difference.
    fn plan_just_due(&self, _row: &Row, _now: Time, _operation: &str) -> Option<Result<Plan, PlanError>> {
        None
    }
}

/// The worker that finds what is due and has it done.
#[derive(Debug)]
pub struct Scanner<D> {
    name: String,
    shards: u32,
    due: D,
    /// Plans that may be in flight, of all shards together.
    room: Arc<Semaphore>,
}

/// Plans of one worker in flight: enough for an engine to make one of many, and no more than those who write in the
/// foreground can stand in line with.
const AT_ONCE: usize = 16;

/// Pages of the index that one step reads past rows that could not be done.
const PAGES_MAX: usize = 8;

impl<D: Due> Scanner<D> {
    /// A scanner of so many shards.
    pub fn new(name: impl Into<String>, shards: u32, due: D) -> Scanner<D> {
        Scanner { name: name.into(), shards, due, room: Arc::new(Semaphore::new(AT_ONCE)) }
    }

    /// Has rows done, some at once: an engine makes one of many plans in flight.
    async fn release(&self, rows: &[&Row], shift: &Shift<'_>) -> Result<Released, StoreError> {
        let now = shift.clock.now();
        let mut released = Released::default();
        let mut commits: JoinSet<Result<Commit, StoreError>> = JoinSet::new();
        for row in rows {
            let plan = self.due.plan(row, now, &shift.ids.next());
            let otherwise = self.due.plan_just_due(row, now, &shift.ids.next()).transpose();
            match plan.and_then(|plan| Ok((plan, otherwise?))) {
                Ok((plan, otherwise)) => {
                    // It is never closed.
                    let place = self.room.clone().acquire_owned().await.ok();
                    let done = commit_or(shift.store.clone(), plan, otherwise, row.version());
                    commits.spawn(async move {
                        let outcome = done.await;
                        drop(place);
                        outcome
                    });
                }
                Err(error) => released.failures.push(format!("{row}: {error}")),
            }
        }
        while let Some(outcome) = commits.join_next().await {
            match outcome {
                Ok(Ok(Commit::Applied(_))) => released.rows += 1,
                // Somebody was faster, the row was changed, or the engine's clock is behind this one.
                Ok(Ok(Commit::Refused(_) | Commit::Fenced)) => {}
                Ok(Err(error)) if error.is_transient() => released.unreachable = Some(error),
                Ok(Err(error)) => released.failures.push(error.to_string()),
                Err(error) => released.failures.push(error.to_string()),
            }
        }
        Ok(released)
    }
}

#[derive(Debug, Default)]
struct Released {
    rows: usize,
    failures: Vec<String>,
    unreachable: Option<StoreError>,
}

/// Commits a plan until its outcome is known. If it is refused although the row is unchanged, the engine's clock is behind:
/// commits the other plan then. If the outcome stays unknown, the next step sees it in the row.
async fn commit_or(
    store: Arc<dyn Store>,
    plan: Plan,
    otherwise: Option<Plan>,
    version: i64,
) -> Result<Commit, StoreError> {
    match (commit_known(&*store, &plan, RetryPolicy::WORKER).await, otherwise) {
        (Ok(Commit::Refused(refused)), Some(otherwise)) if is_only_early(&refused, version) => {
            commit_known(&*store, &otherwise, RetryPolicy::WORKER).await
        }
        (outcome, _) => outcome,
    }
}

/// Whether the first row of a plan was refused as it was scanned: what is left is the engine's clock.
pub(crate) fn is_only_early(refused: &Refused, version: i64) -> bool {
    let current = refused.current.as_ref().map(Row::version);
    refused.step == 0 && matches!(refused.reason, Reason::Guard { .. }) && current == Some(version)
}

#[async_trait]
impl<D: Due> Worker for Scanner<D> {
    fn name(&self) -> &str {
        &self.name
    }

    fn shards(&self) -> u32 {
        self.shards
    }

    async fn step(&self, shift: &Shift<'_>, limit: usize) -> Result<Progress, StoreError> {
        let misuse = |error: PlanError| StoreError::schema(self.name.as_str(), error.to_string());
        let mut query = Query::all_tenants(self.due.table(), DUE, [i64::from(shift.shard).into()])
            .and_then(|query| query.limit(limit))
            .map_err(misuse)?;
        let mut progress = Progress::idle();
        for _ in 0..PAGES_MAX {
            let page = shift.store.query(&query).await?;
            let now = shift.clock.now();
            let due: Vec<&Row> =
                page.rows.iter().take_while(|row| row.time(DUE_AT).is_some_and(|at| at <= now)).collect();
            let oldest = due.first().and_then(|row| row.time(DUE_AT));
            progress.lag = progress.lag.max(oldest.map_or(Duration::ZERO, |at| now.since(at)));
            let released = self.release(&due, shift).await?;
            progress.rows += released.rows;
            progress.failures.extend(released.failures);
            if let Some(error) = released.unreachable {
                if progress.rows == 0 {
                    return Err(error);
                }
                progress.failures.push(error.to_string());
                return Ok(progress);
            }
            if let Some(first) = page.rows.get(due.len()) {
                progress.next = first.time(DUE_AT).map_or(Next::Idle, Next::At);
                return Ok(progress);
            }
            match page.next {
                None => return Ok(progress),
                Some(_) if progress.rows > 0 => {
                    progress.next = Next::Now;
                    return Ok(progress);
                }
                Some(next) => query = query.after(next).map_err(misuse)?,
            }
        }
        Ok(progress)
    }
}
