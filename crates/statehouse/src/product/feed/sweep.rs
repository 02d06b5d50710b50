//! What is over is deleted, in passing (F6). No page shows it any more, so nothing waits for it.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use async_trait::async_trait;
use statehouse_store::guard::{column, now};
use statehouse_store::{Cursor, Plan, PlanError, Row, Scan, Step, StoreError, Tenant};

use super::{EXPIRES_AT, FeedSpec};
use crate::worker::{NextStep, StepContext, StepProgress, Worker};

/// Rows that are deleted in one plan.
const PLAN_MAX: usize = 16;
/// The shortest and the longest pause between two rounds.
const PAUSE_MIN: Duration = Duration::from_secs(60);
const PAUSE_MAX: Duration = Duration::from_secs(86_400);

/// The worker that goes round all rows with an end.
#[derive(Debug)]
pub(super) struct FeedSweeper {
    name: String,
    feed: Arc<FeedSpec>,
    /// Which table, and where in it. A process that begins anew begins at the beginning.
    place: Mutex<(usize, Option<Cursor>)>,
}

impl FeedSweeper {
    pub(super) fn of(feed: Arc<FeedSpec>) -> FeedSweeper {
        FeedSweeper { name: format!("{}.sweep", feed.name), feed, place: Mutex::default() }
    }
}

#[async_trait]
impl Worker for FeedSweeper {
    fn name(&self) -> &str {
        &self.name
    }

    fn shards(&self) -> u32 {
        1
    }

    async fn step(&self, context: &StepContext<'_>, limit: usize) -> Result<StepProgress, StoreError> {
        let misuse = |error: PlanError| StoreError::schema(self.name.as_str(), error.to_string());
        let mut progress = StepProgress::idle();
        let (number, cursor) = self.place.lock().unwrap_or_else(PoisonError::into_inner).clone();
        let tables = [&self.feed.rows, &self.feed.lists];
        let table = tables.get(number).copied().unwrap_or(&self.feed.rows);
        let mut scan = Scan::all(table).limit(limit.max(1)).map_err(misuse)?;
        if let Some(cursor) = cursor {
            scan = scan.after(cursor).map_err(misuse)?;
        }
        let page = context.store.scan(&scan).await?;
        let time = context.clock.now();
        let mut over: BTreeMap<&Tenant, Vec<&Row>> = BTreeMap::new();
        for row in page.rows.iter().filter(|row| row.time(EXPIRES_AT).is_some_and(|end| end <= time)) {
            over.entry(row.tenant()).or_default().push(row);
        }
        for (tenant, rows) in over {
            for some in rows.chunks(PLAN_MAX) {
                let step = |row: &&Row| {
                    Step::remove(table, row.key().iter().cloned()).guard(column(EXPIRES_AT).le(now()))
                };
                let plan = Plan::of(tenant, context.ids.next()).steps(some.iter().map(step)).without_rows();
                // If it is refused, the engine's clock is behind this one: the next round will do it.
                context.store.commit(&plan.build().map_err(misuse)?).await?;
                progress.rows += some.len();
            }
        }
        let is_done = page.next.is_none() && number + 1 >= tables.len();
        let next = match page.next {
            Some(cursor) => (number, Some(cursor)),
            None => ((number + 1) % tables.len(), None),
        };
        *self.place.lock().unwrap_or_else(PoisonError::into_inner) = next;
        progress.next = match is_done {
            true => NextStep::At(time.plus((self.feed.keep / 8).clamp(PAUSE_MIN, PAUSE_MAX))),
            false => NextStep::Now,
        };
        Ok(progress)
    }
}
