//! One step of the sweeper on behalf of callers that were refused for lack (I8).
//!
//! Reservations are not indexed by the rows that they hold. So a caller that lacks stock ends those that are due, a bounded number
//! of each shard, before it is refused. Callers of one process that wait at the same time share a step that begins after all of
//! them were refused.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use futures_util::future::join_all;
use statehouse_store::store::{ReadRequest, ReadResult};
use statehouse_store::{Query, RetryPolicy, Row, Time, commit_known};
use tokio::sync::Mutex;

use crate::action::{ActionContext, Refusal};
use crate::declare::TableDef;
use crate::declare::machine::PartUse;
use crate::infra::due::{DUE, DUE_AT};

/// Reservations of one shard that one step ends.
const ROWS_MAX: usize = 8;

/// The step.
pub(super) struct SharedSweep {
    def: Arc<TableDef>,
    /// Ends a reservation.
    expire: PartUse,
    /// How many steps have begun.
    begun: AtomicU64,
    /// Held by the caller that makes a step.
    turn: Mutex<()>,
}

impl SharedSweep {
    pub(super) fn new(def: &Arc<TableDef>, expire: PartUse) -> SharedSweep {
        SharedSweep { def: def.clone(), expire, begun: AtomicU64::new(0), turn: Mutex::new(()) }
    }

    /// Returns when a step that began after this call is over.
    pub(super) async fn run(&self, cx: &ActionContext<'_>) -> Result<(), Refusal> {
        let before = self.begun.load(Ordering::SeqCst);
        let turn = self.turn.lock().await;
        if self.begun.load(Ordering::SeqCst) > before {
            return Ok(());
        }
        self.begun.fetch_add(1, Ordering::SeqCst);
        let done = self.step(cx).await;
        drop(turn);
        done
    }

    async fn step(&self, cx: &ActionContext<'_>) -> Result<(), Refusal> {
        let shards = self.def.deadline().map_or(0, |deadline| deadline.shards);
        let query = |shard: u32| {
            Query::all_tenants(self.def.table(), DUE, [i64::from(shard).into()])?.limit(ROWS_MAX)
        };
        let queries = (0..shards).map(query).collect::<Result<Vec<Query>, _>>()?;
        let asks: Vec<ReadRequest<'_>> = queries.iter().map(ReadRequest::Query).collect();
        let now = cx.clock.now();
        let found = cx.store.read_many(&asks).await?;
        let rows = found.into_iter().flat_map(|result| match result {
            ReadResult::Page(page) => page.rows,
            ReadResult::Rows(_) | ReadResult::Value(_) => Vec::new(),
        });
        let due = rows.filter(|row| row.time(DUE_AT).is_some_and(|at| at <= now));
        join_all(due.map(|row| self.end(row, now, cx))).await.into_iter().collect()
    }

    /// Ends one reservation. If it is refused or its outcome is unknown, the rows that are read afterwards say what they have.
    async fn end(&self, row: Row, now: Time, cx: &ActionContext<'_>) -> Result<(), Refusal> {
        let plan = self.expire.on(&row).plan(row.tenant(), &cx.ids.next(), now, None)?;
        drop(commit_known(cx.store, &plan, RetryPolicy::WORKER).await);
        Ok(())
    }
}
