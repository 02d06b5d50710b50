//! The balancer: makes the cells of a stock even again, so that callers find what they want in the first cell that they try (C4).

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use statehouse_store::{
    Commit, Consistency, Plan, PlanError, Query, RetryPolicy, Row, Step, StoreError, Value, commit_known,
};

use super::cells::{CellRows, balance};
use super::transitions::{FLOOR, StockParts};
use super::{AVAILABLE, InventorySpec, QUANTITY};
use crate::action::{PlanParts, Refusal};
use crate::declare::machine::add_parts;
use crate::infra::due::{self, DUE, DUE_AT};
use crate::worker::{NextStep, StepContext, StepProgress, Worker};

/// How long after a plan that took from several cells. Stocks of which little is left are then not moved by every call.
pub(super) const BALANCE_AFTER: Duration = Duration::from_millis(100);
/// How often a stock that is changed meanwhile is tried in one step.
const TRIES: usize = 4;

/// The name of the worker.
pub(super) fn worker_name(inventory: &str) -> String {
    format!("{inventory}.balance")
}

/// The worker.
pub(super) struct CellBalancer {
    name: String,
    inventory: Arc<InventorySpec>,
    parts: Arc<StockParts>,
}

impl fmt::Debug for CellBalancer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "CellBalancer({})", self.name)
    }
}

impl CellBalancer {
    pub(super) fn new(inventory: &Arc<InventorySpec>, parts: &Arc<StockParts>) -> CellBalancer {
        let name = worker_name(&inventory.name);
        CellBalancer { name, inventory: inventory.clone(), parts: parts.clone() }
    }

    /// Makes the cells of one stock even. Whether it was done.
    async fn balance(&self, stock: &Row, context: &StepContext<'_>) -> Result<bool, StoreError> {
        for _ in 0..TRIES {
            let Some(plan) = self.plan(stock, context).await? else { return Ok(false) };
            match commit_known(&**context.store, &plan, RetryPolicy::WORKER).await? {
                Commit::Applied(_) => return Ok(true),
                // A caller took something meanwhile.
                Commit::Refused(_) | Commit::Fenced => {}
            }
        }
        Ok(false)
    }

    /// The plan for the cells as they are; none if the stock is due no more.
    async fn plan(&self, stock: &Row, context: &StepContext<'_>) -> Result<Option<Plan>, StoreError> {
        let inventory = &self.inventory;
        let addresses =
            inventory.addresses(stock.tenant(), &[stock.key()]).map_err(|error| misuse(&error))?;
        let seen = CellRows(context.store.get(&addresses, Consistency::Strong).await?);
        let Some(due_at) = seen.main().and_then(|row| row.time(DUE_AT)) else { return Ok(None) };
        let mut parts = PlanParts::new("", Vec::new(), statehouse_store::EventTemplate::named(""));
        for change in balance(&seen.column(AVAILABLE)?) {
            let rows = self.parts.of(change.cell);
            let key = inventory.row_key(stock.key(), change.cell);
            let firing = match change.quantity {
                // The row of the stock itself is there, with fields that it may need.
                1.. if change.cell == 0 => rows.find.at(key).bind(QUANTITY, change.quantity),
                1.. => rows.add.at(key).bind(QUANTITY, change.quantity),
                _ => rows.remove.at(key).bind(QUANTITY, -change.quantity).bind(FLOOR, -change.quantity),
            };
            let added = add_parts(&mut parts, stock.tenant(), context.clock.now(), [firing.into()]);
            added.map_err(|refusal| refused(&self.name, &refusal))?;
        }
        let table = inventory.stock_def.table();
        let is_main = |step: &Step| step.table.name() == table.name();
        let main = match parts.steps.iter().position(is_main) {
            Some(index) => parts.steps.remove(index),
            None => Step::update(table, stock.key().iter().cloned()),
        };
        let main = main.guard(statehouse_store::guard::column(DUE_AT).eq(Value::Time(due_at)));
        let plan = Plan::of(stock.tenant(), context.ids.next())
            .step(due::clear(main).label("main"))
            .steps(parts.steps);
        plan.without_rows().build().map(Some).map_err(|error| misuse(&error))
    }
}

fn misuse(error: &PlanError) -> StoreError {
    StoreError::schema("the balancer", error.to_string())
}

fn refused(name: &str, refusal: &Refusal) -> StoreError {
    StoreError::schema(name, refusal.to_string())
}

#[async_trait]
impl Worker for CellBalancer {
    fn name(&self) -> &str {
        &self.name
    }

    fn shards(&self) -> u32 {
        self.inventory.stock_def.deadline().map_or(1, |deadline| deadline.shards)
    }

    async fn step(&self, context: &StepContext<'_>, limit: usize) -> Result<StepProgress, StoreError> {
        let table = self.inventory.stock_def.table();
        let query = Query::all_tenants(table, DUE, [i64::from(context.shard).into()]);
        let page = context
            .store
            .query(&query.and_then(|query| query.limit(limit)).map_err(|error| misuse(&error))?)
            .await?;
        let mut progress = StepProgress::idle();
        for row in &page.rows {
            let (Some(at), now) = (row.time(DUE_AT), context.clock.now()) else { continue };
            if at > now {
                progress.next = NextStep::At(at);
                return Ok(progress);
            }
            progress.lag = progress.lag.max(now.since(at));
            progress.rows += usize::from(self.balance(row, context).await?);
        }
        if page.next.is_some() && progress.rows > 0 {
            progress.next = NextStep::Now;
        }
        Ok(progress)
    }
}
