//! The worker that makes the jobs of definitions (D1 to D4).

use super::*;

/// The worker that makes the jobs of definitions.
#[derive(Debug)]
pub(in crate::product::schedule) struct JobMaker {
    pub name: String,
    pub schedule: Arc<ScheduleSpec>,
}

#[async_trait]
impl Worker for JobMaker {
    fn name(&self) -> &str {
        &self.name
    }

    fn shards(&self) -> u32 {
        self.schedule.shards
    }

    async fn step(&self, context: &StepContext<'_>, limit: usize) -> Result<StepProgress, StoreError> {
        let misuse = |error: PlanError| StoreError::schema(self.name.as_str(), error.to_string());
        let schedule = &self.schedule;
        let mut query = Query::all_tenants(&schedule.definitions, DUE, [i64::from(context.shard).into()])
            .and_then(|query| query.limit(limit))
            .map_err(misuse)?;
        let mut progress = StepProgress::idle();
        for _ in 0..PAGES_MAX {
            let page = context.store.query(&query).await?;
            let at = context.clock.now();
            let due: Vec<&Row> =
                page.rows.iter().take_while(|row| row.time(DUE_AT).is_some_and(|due| due <= at)).collect();
            let oldest = due.first().and_then(|row| row.time(DUE_AT));
            progress.lag = progress.lag.max(oldest.map_or(Duration::ZERO, |due| at.since(due)));
            for outcome in join_all(due.iter().map(|row| self.make(context, row))).await {
                match outcome {
                    Ok(made) => progress.rows += usize::from(made),
                    Err(why) => progress.failures.push(why),
                }
            }
            if progress.rows > 0 {
                schedule.notify_waiting();
                // What was made may be due again: a definition catches up on what it missed.
                progress.next = NextStep::Now;
                return Ok(progress);
            }
            if let Some(later) = page.rows.get(due.len()).and_then(|row| row.time(DUE_AT)) {
                progress.next = NextStep::At(later);
                return Ok(progress);
            }
            // Those that cannot be made do not hold up the others.
            match page.next {
                Some(next) => query = query.after(next).map_err(misuse)?,
                None => return Ok(progress),
            }
        }
        Ok(progress)
    }
}

impl JobMaker {
    /// Makes the job of one definition, unless another process was faster or a caller changed it.
    async fn make(&self, context: &StepContext<'_>, row: &Row) -> Result<bool, String> {
        let store = &**context.store;
        let mut plan = self.schedule.make(context, row, context.clock.now()).await?;
        let mut outcome = commit_known(store, &plan, RetryPolicy::WORKER).await;
        if let (Ok(Commit::Refused(refused)), Some(due)) = (&outcome, row.time(NEXT_TIME))
            && due::is_only_early(refused, row.version())
        {
            // By the engine's clock not all is over that would be passed over. The time that is due has its job all the same.
            plan = self.schedule.make(context, row, due).await?;
            outcome = commit_known(store, &plan, RetryPolicy::WORKER).await;
        }
        match outcome {
            Ok(Commit::Applied(_)) => Ok(true),
            Ok(Commit::Refused(Refused { step, reason: Reason::Present, .. })) => {
                match plan.addresses().nth(step) {
                    // Another process inserted the lane of its order key, or took its ticket; the next attempt reads it.
                    Some(lane) if self.schedule.is_of_lanes(lane.table()) => Ok(false),
                    taken => Err(format!(
                        "{row}: {} exists already",
                        taken.map_or_else(String::new, |address| address.to_string())
                    )),
                }
            }
            Ok(Commit::Refused(_) | Commit::Fenced) => Ok(false),
            Err(error) => Err(error.to_string()),
        }
    }
}
