//! Wakeups: a write that makes something due notifies the workers of the same process, which may be asleep.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use statehouse_store::{Clock, Time};
use tokio::sync::Notify;

use super::Worker;

/// How writers wake workers of the same process.
#[derive(Debug, Default)]
pub struct WakeupHub {
    shards: HashMap<String, Vec<ShardWakeup>>,
}

/// Something that will be due: of which worker and shard, and when.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Wakeup {
    /// The worker's name.
    pub worker: String,
    /// The shard.
    pub shard: u32,
    /// When it will be due.
    pub at: Time,
}

#[derive(Debug, Default)]
pub(super) struct ShardWakeup {
    at: Mutex<Option<Time>>,
    changed: Notify,
}

impl WakeupHub {
    /// A hub for these workers.
    pub fn of<'w>(workers: impl IntoIterator<Item = &'w Arc<dyn Worker>>) -> WakeupHub {
        let shards = |worker: &Arc<dyn Worker>| {
            let each = std::iter::repeat_with(ShardWakeup::default).take(worker.shards() as usize);
            (worker.name().to_owned(), each.collect())
        };
        WakeupHub { shards: workers.into_iter().map(shards).collect() }
    }

    /// Notifies the worker of the shard that something will be due.
    pub fn notify(&self, wakeup: &Wakeup) {
        let Some(waiting) = self.shard(&wakeup.worker, wakeup.shard) else { return };
        let mut at = waiting.at.lock().unwrap_or_else(PoisonError::into_inner);
        if at.is_none_or(|at| wakeup.at < at) {
            *at = Some(wakeup.at);
            waiting.changed.notify_one();
        }
    }

    pub(super) fn shard(&self, worker: &str, shard: u32) -> Option<&ShardWakeup> {
        self.shards.get(worker)?.get(shard as usize)
    }
}

impl ShardWakeup {
    /// What was said since the last step, which will see it.
    pub(super) fn clear(&self) {
        *self.at.lock().unwrap_or_else(PoisonError::into_inner) = None;
    }

    /// Waits for a span of time, or until what was said to be due is. Says whether something is.
    pub(super) async fn wait(&self, span: Duration, clock: &dyn Clock) -> bool {
        let until = clock.uptime() + span;
        loop {
            let at = *self.at.lock().unwrap_or_else(PoisonError::into_inner);
            let due_in = at.map_or(Duration::MAX, |at| at.since(clock.now()));
            let left = until.saturating_sub(clock.uptime()).min(due_in);
            if left.is_zero() {
                return due_in.is_zero();
            }
            tokio::select! {
                () = clock.sleep(left) => {}
                () = self.changed.notified() => {}
            }
        }
    }
}
