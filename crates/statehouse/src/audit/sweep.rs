//! The worker that deletes audit rows after their retention (A3).

use std::time::Duration;

use async_trait::async_trait;
use statehouse_store::{Commit, Plan, Query, Row, Step, StoreError};

use super::{PART, misuse, table, tenant};
use crate::worker::{NextStep, StepContext, StepProgress, Worker};

/// Rows that are deleted in one plan, which has the guard of the worker's lease as well.
const DELETED_MAX: usize = 90;
/// The longest pause between two looks at the oldest row.
const PAUSE_MAX: Duration = Duration::from_secs(60 * 60);

/// Deletes audit rows that are older than a span of time.
#[derive(Debug)]
pub struct AuditSweeper {
    kept: Duration,
}

impl AuditSweeper {
    /// A worker that keeps rows for this long.
    pub fn keeping(kept: Duration) -> AuditSweeper {
        AuditSweeper { kept }
    }
}

#[async_trait]
impl Worker for AuditSweeper {
    fn name(&self) -> &str {
        "audit.sweep"
    }

    fn shards(&self) -> u32 {
        1
    }

    async fn step(&self, context: &StepContext<'_>, limit: usize) -> Result<StepProgress, StoreError> {
        let mut progress = StepProgress::idle();
        let (table, tenant, now) = (table().map_err(misuse)?, tenant()?, context.clock.now());
        let oldest = Query::table(&table, &tenant, [PART.into()])
            .and_then(|query| query.limit(limit.clamp(1, DELETED_MAX)))
            .map_err(misuse)?;
        let page = context.store.query(&oldest).await?;
        let cutoff = now.minus(self.kept);
        let mut old: Vec<&Row> = Vec::new();
        for row in &page.rows {
            let at = row.get_time("at")?;
            if at >= cutoff {
                break;
            }
            progress.lag = progress.lag.max(cutoff.since(at));
            old.push(row);
        }
        if old.is_empty() {
            progress.next = NextStep::At(now.plus(self.kept.min(PAUSE_MAX)));
            return Ok(progress);
        }
        let removed = old.iter().map(|row| Step::remove(&table, row.key().iter().cloned()));
        let plan = Plan::of(&tenant, context.ids.next()).steps(removed).step(context.guard()).without_rows();
        // A refusal tells that another process has the shard now.
        if let Commit::Applied(_) = context.store.commit(&plan.build().map_err(misuse)?).await? {
            progress.rows = old.len();
            progress.next = NextStep::Now;
        }
        Ok(progress)
    }
}
