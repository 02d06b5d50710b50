//! What is due: rows of any tenant on which the house acts by itself when their time has come.
//!
//! A table that takes part has two columns, `due_at` and `due_shard`, which are set together, and null while the house
//! has nothing to do ([`set`], [`clear`]). Its index `due` is across tenants, so that a [`Scanner`] finds what is due
//! without knowing whose it is. The owner of the table decides what to do about a row ([`Due`]), as a plan
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
use statehouse_store::log::partition_of;
use statehouse_store::table::TableBuilder;
use statehouse_store::{
    Commit, Expr, Operand, Plan, PlanError, Query, Reason, Refused, RetryPolicy, Row, Step, Store,
    StoreError, Table, Tenant, Time, Type, Value, commit_known,
};
use tokio::sync::Semaphore;
use tokio::task::JoinSet;

use crate::action::Refusal;
use crate::worker::{NextStep, StepContext, StepProgress, Wakeup, Worker};

/// When the house acts on a row; null for never.
pub const DUE_AT: &str = "due_at";
/// Which part of the work the row is.
pub const DUE_SHARD: &str = "due_shard";
/// The index across tenants.
pub const DUE: &str = "due";

/// Adds the columns and the index to a table.
pub fn columns(builder: TableBuilder) -> TableBuilder {
    index(builder.optional(DUE_SHARD, Type::Int).optional(DUE_AT, Type::Time))
}

/// Adds the index to a table that has the columns.
pub fn index(builder: TableBuilder) -> TableBuilder {
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

/// When a worker has to look at the row that a step makes due, by the clock of this process.
pub fn wakeup(worker: &str, step: &Step, now: Time) -> Option<Wakeup> {
    let assigned = |name: &str| {
        step.assignments
            .iter()
            .find(|assignment| assignment.column == name)
            .map(|assignment| &assignment.expr)
    };
    let shard = assigned(DUE_SHARD)?.as_constant()?.as_int().and_then(|shard| u32::try_from(shard).ok())?;
    Some(Wakeup { worker: worker.to_owned(), shard, at: due_at(step, now)? })
}

/// The due time that a step assigns, by the clock of this process.
pub fn due_at(step: &Step, now: Time) -> Option<Time> {
    let due = step.assignments.iter().find(|assignment| assignment.column == DUE_AT)?;
    match &due.expr {
        Expr::Is(Operand::Value(value)) => value.as_time(),
        Expr::Is(Operand::Now { plus_micros }) => now.checked_add_micros(*plus_micros),
        _ => None,
    }
}

/// Rows that become due, and what is done about them then.
pub trait Due: Send + Sync + fmt::Debug {
    /// The table, which has [`columns`].
    fn table(&self) -> &Arc<Table>;

    /// What is done about a row that is due, as one plan under this operation id, in the row's tenant (D2).
    fn plan(&self, row: &Row, now: Time, operation: &str) -> Result<Plan, Refusal>;

    /// The plan to commit instead if the first one was refused although the row has not changed: the engine's clock is behind
    /// this one. `None` if the row is tried again later.
    fn plan_if_early(
        &self,
        _row: &Row,
        _now: Time,
        _operation: &str,
        _refused: &Refused,
    ) -> Result<Option<Plan>, Refusal> {
        Ok(None)
    }
}

/// The worker that finds what is due and has it done.
#[derive(Debug)]
pub struct Scanner<D> {
    name: String,
    shards: u32,
    due: Arc<D>,
    /// Plans that may be in flight, of all shards together.
    room: Arc<Semaphore>,
}

/// Plans of one worker in flight: enough for an engine to make one of many, and no more than those who write in the
/// foreground can stand in line with.
const AT_ONCE: usize = 16;

/// Pages of the index that one step reads past rows that could not be done.
const PAGES_MAX: usize = 8;

impl<D: Due + 'static> Scanner<D> {
    /// A scanner of so many shards.
    pub fn new(name: impl Into<String>, shards: u32, due: D) -> Scanner<D> {
        Scanner { name: name.into(), shards, due: Arc::new(due), room: Arc::new(Semaphore::new(AT_ONCE)) }
    }

    /// Has rows done, some at once: an engine makes one of many plans in flight.
    async fn release(&self, rows: &[&Row], context: &StepContext<'_>) -> Result<DueOutcome, StoreError> {
        let now = context.clock.now();
        let mut released = DueOutcome::default();
        let mut commits: JoinSet<Result<Commit, StoreError>> = JoinSet::new();
        for row in rows {
            let (operation, second) = (context.ids.next(), context.ids.next());
            let plan = match self.due.plan(row, now, &operation) {
                Ok(plan) => plan,
                Err(error) => {
                    released.failures.push(format!("{row}: {error}"));
                    continue;
                }
            };
            // It is never closed.
            let permit = self.room.clone().acquire_owned().await.ok();
            let attempt = DueAttempt { due: self.due.clone(), row: (*row).clone(), now, second };
            let committed = attempt.commit(context.store.clone(), plan);
            commits.spawn(async move {
                let outcome = committed.await;
                drop(permit);
                outcome
            });
        }
        while let Some(outcome) = commits.join_next().await {
            match outcome {
                Ok(Ok(Commit::Applied(_))) => released.rows += 1,
                // Another process was faster, the row was changed, or the engine's clock is behind this one.
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
struct DueOutcome {
    rows: usize,
    failures: Vec<String>,
    unreachable: Option<StoreError>,
}

/// One row that is due.
struct DueAttempt<D> {
    due: Arc<D>,
    row: Row,
    now: Time,
    /// The operation id of the second plan.
    second: String,
}

impl<D: Due> DueAttempt<D> {
    /// Commits the plan until its outcome is known, and the second plan if the first was refused because of the engine's clock.
    /// If the outcome stays unknown, the next step sees it in the row.
    async fn commit(self, store: Arc<dyn Store>, plan: Plan) -> Result<Commit, StoreError> {
        let outcome = commit_known(&*store, &plan, RetryPolicy::WORKER).await;
        let Ok(Commit::Refused(refused)) = &outcome else { return outcome };
        if !is_only_early(refused, self.row.version()) {
            return outcome;
        }
        match self.due.plan_if_early(&self.row, self.now, &self.second, refused) {
            Ok(Some(second)) => commit_known(&*store, &second, RetryPolicy::WORKER).await,
            Ok(None) => outcome,
            Err(error) => Err(StoreError::schema(self.row.to_string(), error.to_string())),
        }
    }
}

/// Whether the first row of a plan was refused as it was scanned: what is left is the engine's clock.
pub(crate) fn is_only_early(refused: &Refused, version: i64) -> bool {
    let current = refused.current.as_ref().map(Row::version);
    refused.step == 0 && matches!(refused.reason, Reason::Guard { .. }) && current == Some(version)
}

#[async_trait]
impl<D: Due + 'static> Worker for Scanner<D> {
    fn name(&self) -> &str {
        &self.name
    }

    fn shards(&self) -> u32 {
        self.shards
    }

    async fn step(&self, context: &StepContext<'_>, limit: usize) -> Result<StepProgress, StoreError> {
        let misuse = |error: PlanError| StoreError::schema(self.name.as_str(), error.to_string());
        let mut query = Query::all_tenants(self.due.table(), DUE, [i64::from(context.shard).into()])
            .and_then(|query| query.limit(limit))
            .map_err(misuse)?;
        let mut progress = StepProgress::idle();
        for _ in 0..PAGES_MAX {
            let page = context.store.query(&query).await?;
            let now = context.clock.now();
            let due: Vec<&Row> =
                page.rows.iter().take_while(|row| row.time(DUE_AT).is_some_and(|at| at <= now)).collect();
            let oldest = due.first().and_then(|row| row.time(DUE_AT));
            progress.lag = progress.lag.max(oldest.map_or(Duration::ZERO, |at| now.since(at)));
            let released = self.release(&due, context).await?;
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
                progress.next = first.time(DUE_AT).map_or(NextStep::Idle, NextStep::At);
                return Ok(progress);
            }
            match page.next {
                None => return Ok(progress),
                Some(_) if progress.rows > 0 => {
                    progress.next = NextStep::Now;
                    return Ok(progress);
                }
                Some(next) => query = query.after(next).map_err(misuse)?,
            }
        }
        Ok(progress)
    }
}
