//! Bells: whoever writes something due tells the workers of the same process, which may be asleep.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use statehouse_store::{Clock, Time};
use tokio::sync::Notify;

use super::Worker;

/// How writers wake workers of the same process.
#[derive(Debug, Default)]
pub struct Bells {
    bells: HashMap<String, Vec<Bell>>,
}

/// Something that will be due: of which worker and shard, and when.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Wake {
    /// The worker's name.
    pub worker: String,
    /// The shard.
    pub shard: u32,
    /// When it will be due.
    pub at: Time,
}

#[derive(Debug, Default)]
pub(super) struct Bell {
    at: Mutex<Option<Time>>,
    rung: Notify,
}

impl Bells {
    /// Bells for these workers.
    pub fn of<'w>(workers: impl IntoIterator<Item = &'w Arc<dyn Worker>>) -> Bells {
        let bells = |worker: &Arc<dyn Worker>| {
            let shards = std::iter::repeat_with(Bell::default).take(worker.shards() as usize);
            (worker.name().to_owned(), shards.collect())
        };
        Bells { bells: workers.into_iter().map(bells).collect() }
    }

    /// Says that something will be due.
    pub fn ring(&self, wake: &Wake) {
        let Some(bell) = self.bell(&wake.worker, wake.shard) else { return };
        let mut at = bell.at.lock().unwrap_or_else(PoisonError::into_inner);
        if at.is_none_or(|at| wake.at < at) {
            *at = Some(wake.at);
            bell.rung.notify_one();
        }
    }

    pub(super) fn bell(&self, worker: &str, shard: u32) -> Option<&Bell> {
        self.bells.get(worker)?.get(shard as usize)
    }
}

impl Bell {
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
                () = self.rung.notified() => {}
            }
        }
    }
}
