//! One loop: a worker on one shard.

use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use statehouse_store::{Position, Random, StoreError};

use super::pool::{ERROR_MIN, PoolShared, WorkerCounters, exponential, jittered};
use super::shard_assigner::StopSignal;
use super::{NextStep, StepContext, StepProgress, Worker};
use crate::infra::lease::Held;

/// The first pause of a worker without work, and after a step that said "more" and did nothing.
const IDLE_MIN: Duration = Duration::from_millis(20);
/// How much longer a reader of the log may pause than others. It is woken by what is written; what it does not hear of is only
/// what others do about its group: a replay of what is parked, a build that an operator starts.
const LOG_PAUSES: u32 = 8;

/// A worker on one shard.
pub(super) struct ShardLoop {
    pub(super) shared: Arc<PoolShared>,
    pub(super) worker: Arc<dyn Worker>,
    pub(super) counters: Arc<WorkerCounters>,
    pub(super) shard: u32,
    pub(super) held: Arc<Mutex<Held>>,
    pub(super) stop: Arc<StopSignal>,
    pub(super) random: Random,
}

/// The n-th pause in a row of a worker that found nothing to do.
fn pause_of(next: NextStep, number: u32, idle_max: Duration) -> Duration {
    match next {
        NextStep::Log(_) => exponential(idle_max, number, idle_max.saturating_mul(LOG_PAUSES)),
        _ => exponential(IDLE_MIN, number, idle_max),
    }
}

impl ShardLoop {
    pub(super) async fn run(mut self) {
        let (mut idle, mut failures) = (0, 0);
        while !self.stop.is_requested() {
            if let Some(bell) = self.shared.wakeups.shard(self.worker.name(), self.shard) {
                bell.clear();
            }
            let step = self.step().await;
            let options = &self.shared.options;
            let (next, pause) = match step {
                None => (NextStep::Idle, options.lease / 10),
                Some(Err(error)) => {
                    failures += 1;
                    self.shared.record_error(&error);
                    self.counters.record_error(format!("shard {}: {error}", self.shard));
                    (
                        NextStep::Idle,
                        jittered(exponential(ERROR_MIN, failures, options.error_max), &mut self.random),
                    )
                }
                Some(Ok(progress)) => {
                    failures = 0;
                    self.record_progress(&progress);
                    idle = if progress.rows == 0 { idle + 1 } else { 0 };
                    let at_once = progress.rows > 0 && progress.next == NextStep::Now;
                    let pause = pause_of(progress.next, idle.max(1), options.idle_max);
                    (progress.next, if at_once { Duration::ZERO } else { pause })
                }
            };
            if self.wait(next, pause).await {
                // What was said to be due may show a little later; pauses begin anew.
                idle = 0;
            }
        }
        self.counters.lags.lock().unwrap_or_else(PoisonError::into_inner).remove(&self.shard);
    }

    /// One step, if the shard is still this process's.
    async fn step(&self) -> Option<Result<StepProgress, StoreError>> {
        let held = self.held.lock().unwrap_or_else(PoisonError::into_inner).clone();
        let shared = &*self.shared;
        let context = StepContext {
            store: &shared.store,
            clock: &shared.clock,
            ids: &shared.ids,
            egress: &shared.egress,
            wakeups: &shared.wakeups,
            shard: self.shard,
            held: &held,
        };
        if !context.is_live() {
            return None;
        }
        Some(self.worker.step(&context, shared.options.step_rows).await)
    }

    fn record_progress(&self, progress: &StepProgress) {
        self.counters.steps.fetch_add(1, Ordering::Relaxed);
        self.counters.rows.fetch_add(progress.rows as u64, Ordering::Relaxed);
        for failure in &progress.failures {
            self.counters.record_error(format!("shard {}: {failure}", self.shard));
        }
        self.counters.lags.lock().unwrap_or_else(PoisonError::into_inner).insert(self.shard, progress.lag);
    }

    /// Waits until there may be something to do, or the shard is to be given up. Returns whether a write notified it.
    async fn wait(&self, next: NextStep, pause: Duration) -> bool {
        let clock = &*self.shared.clock;
        let pause = match next {
            NextStep::At(at) => {
                at.since(clock.now()).min(self.shared.options.idle_max).max(Duration::from_millis(1))
            }
            NextStep::Now | NextStep::Idle | NextStep::Log(_) => pause,
        };
        if pause.is_zero() {
            // Others have their turn, too.
            tokio::task::yield_now().await;
            return false;
        }
        let news = async {
            let NextStep::Log(Position { partition, offset }) = next else {
                return std::future::pending().await;
            };
            let beyond = |heads: &Vec<u64>| heads.get(partition as usize).is_some_and(|head| *head > offset);
            let mut heads = self.shared.heads.subscribe();
            self.shared.heads_wanted.notify_one();
            // The sender lives as long as the shop.
            let _ = heads.wait_for(beyond).await;
        };
        let rung = async {
            match self.shared.wakeups.shard(self.worker.name(), self.shard) {
                Some(bell) => bell.wait(pause, clock).await,
                None => {
                    clock.sleep(pause).await;
                    false
                }
            }
        };
        tokio::select! {
            rung = rung => rung,
            () = news => true,
            () = self.stop.changed.notified() => false,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pauses_grow_to_their_bounds() {
        let pauses = |next: NextStep| {
            [1, 2, 3, 4, 9].map(|number| pause_of(next, number, Duration::from_secs(1)).as_millis())
        };
        assert_eq!(pauses(NextStep::Idle), [20, 40, 80, 160, 1_000]);
        let log = NextStep::Log(Position { partition: 0, offset: 7 });
        assert_eq!(pauses(log), [1_000, 2_000, 4_000, 8_000, 8_000]);
    }
}
