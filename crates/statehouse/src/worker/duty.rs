//! One loop: a worker on one shard.

use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use statehouse_store::{Position, Random, StoreError};

use super::crew::{ERROR_MIN, Shop, Tally, growing, jittered};
use super::rota::Leave;
use super::{Next, Progress, Shift, Worker};
use crate::infra::lease::Held;

/// The first pause of a worker without work, and after a step that said "more" and did nothing.
const IDLE_MIN: Duration = Duration::from_millis(20);
/// How much longer a reader of the log may pause than others. It is woken by what is written; what it does not hear of is only
/// what others do about its group: a replay of what is parked, a build that somebody begins.
const LOG_PAUSES: u32 = 8;

/// A worker on one shard.
pub(super) struct Duty {
    pub(super) shop: Arc<Shop>,
    pub(super) worker: Arc<dyn Worker>,
    pub(super) tally: Arc<Tally>,
    pub(super) shard: u32,
    pub(super) held: Arc<Mutex<Held>>,
    pub(super) leave: Arc<Leave>,
    pub(super) random: Random,
}

/// The n-th pause in a row of a worker that found nothing to do.
fn pause_of(next: Next, number: u32, idle_max: Duration) -> Duration {
    match next {
        Next::Log(_) => growing(idle_max, number, idle_max.saturating_mul(LOG_PAUSES)),
        _ => growing(IDLE_MIN, number, idle_max),
    }
}

impl Duty {
    pub(super) async fn run(mut self) {
        let (mut idle, mut failures) = (0, 0);
        while !self.leave.is_asked() {
            if let Some(bell) = self.shop.bells.bell(self.worker.name(), self.shard) {
                bell.clear();
            }
            let step = self.step().await;
            let options = &self.shop.options;
            let (next, pause) = match step {
                None => (Next::Idle, options.lease / 10),
                Some(Err(error)) => {
                    failures += 1;
                    self.tally.failed(format!("shard {}: {error}", self.shard));
                    (Next::Idle, jittered(growing(ERROR_MIN, failures, options.error_max), &mut self.random))
                }
                Some(Ok(progress)) => {
                    failures = 0;
                    self.note(&progress);
                    idle = if progress.rows == 0 { idle + 1 } else { 0 };
                    let at_once = progress.rows > 0 && progress.next == Next::Now;
                    let pause = pause_of(progress.next, idle.max(1), options.idle_max);
                    (progress.next, if at_once { Duration::ZERO } else { pause })
                }
            };
            if self.wait(next, pause).await {
                // What was said to be due may show a little later; pauses begin anew.
                idle = 0;
            }
        }
        self.tally.lags.lock().unwrap_or_else(PoisonError::into_inner).remove(&self.shard);
    }

    /// One step, if the shard is still this process's.
    async fn step(&self) -> Option<Result<Progress, StoreError>> {
        let held = self.held.lock().unwrap_or_else(PoisonError::into_inner).clone();
        let shop = &*self.shop;
        let shift = Shift {
            store: &shop.store,
            clock: &*shop.clock,
            ids: &shop.ids,
            outside: &shop.outside,
            shard: self.shard,
            held: &held,
        };
        if !shift.is_live() {
            return None;
        }
        Some(self.worker.step(&shift, shop.options.step_rows).await)
    }

    fn note(&self, progress: &Progress) {
        self.tally.steps.fetch_add(1, Ordering::Relaxed);
        self.tally.rows.fetch_add(progress.rows as u64, Ordering::Relaxed);
        for failure in &progress.failures {
            self.tally.failed(format!("shard {}: {failure}", self.shard));
        }
        self.tally.lags.lock().unwrap_or_else(PoisonError::into_inner).insert(self.shard, progress.lag);
    }

    /// Waits until there may be something to do, or the shard is to be given up. Says whether somebody rang.
    async fn wait(&self, next: Next, pause: Duration) -> bool {
        let clock = &*self.shop.clock;
        let pause = match next {
            Next::At(at) => {
                at.since(clock.now()).min(self.shop.options.idle_max).max(Duration::from_millis(1))
            }
            Next::Now | Next::Idle | Next::Log(_) => pause,
        };
        if pause.is_zero() {
            // Others have their turn, too.
            tokio::task::yield_now().await;
            return false;
        }
        let news = async {
            let Next::Log(Position { partition, offset }) = next else { return std::future::pending().await };
            let beyond = |heads: &Vec<u64>| heads.get(partition as usize).is_some_and(|head| *head > offset);
            let mut heads = self.shop.heads.subscribe();
            self.shop.heads_wanted.notify_one();
            // The sender lives as long as the shop.
            let _ = heads.wait_for(beyond).await;
        };
        let rung = async {
            match self.shop.bells.bell(self.worker.name(), self.shard) {
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
            () = self.leave.changed.notified() => false,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pauses_grow_to_their_bounds() {
        let pauses = |next: Next| {
            [1, 2, 3, 4, 9].map(|number| pause_of(next, number, Duration::from_secs(1)).as_millis())
        };
        assert_eq!(pauses(Next::Idle), [20, 40, 80, 160, 1_000]);
        let log = Next::Log(Position { partition: 0, offset: 7 });
        assert_eq!(pauses(log), [1_000, 2_000, 4_000, 8_000, 8_000]);
    }
}
