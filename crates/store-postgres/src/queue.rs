//! Plans waiting for a writer. Those that wait together are committed together.

use std::collections::VecDeque;
use std::sync::{Mutex, MutexGuard, PoisonError};

use statehouse_store::{Plan, StoreError};
use tokio::sync::{Notify, oneshot};

use crate::batch::{Admission, size_of};
use crate::compile::Settled;

/// Plans in one batch. More gain nothing, and each waits for all.
pub(crate) const PLANS_MAX: usize = 256;
/// Bytes in one batch, roughly.
const BYTES_MAX: usize = 8_000_000;

/// A plan, and whoever waits for its outcome.
pub(crate) struct Job {
    pub plan: Plan,
    /// Its events as a compiled statement sends them, if they were written ahead: by whoever waits, so that the writer need
    /// not do it for all of them one after the other.
    pub events: Option<String>,
    /// Whether a compiled statement has done nothing for it already.
    pub left_open: bool,
    pub reply: oneshot::Sender<Told>,
}

/// What a caller is told of its plan.
pub(crate) type Told = Result<Settled, StoreError>;

/// The plans that wait.
#[derive(Default)]
pub(crate) struct Queue {
    state: Mutex<State>,
    arrival: Notify,
}

#[derive(Default)]
struct State {
    jobs: VecDeque<Job>,
    closed: bool,
}

impl Queue {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Adds a plan; `false` if the queue is closed.
    pub(crate) fn push(&self, job: Job) -> bool {
        let mut state = self.lock();
        if state.closed {
            return false;
        }
        state.jobs.push_back(job);
        drop(state);
        self.arrival.notify_one();
        true
    }

    /// Waits until there is something to take. `false` when the queue is closed and empty.
    pub(crate) async fn wait(&self) -> bool {
        loop {
            let arrival = self.arrival.notified();
            {
                let state = self.lock();
                if !state.jobs.is_empty() {
                    return true;
                }
                if state.closed {
                    return false;
                }
            }
            arrival.await;
        }
    }

    /// Takes what waits and may go together, in the order of arrival; maybe nothing.
    pub(crate) fn take(&self) -> Vec<Job> {
        next_batch(&mut self.lock().jobs)
    }

    /// Puts plans that were taken and not run back before all others.
    pub(crate) fn put_back(&self, jobs: Vec<Job>) {
        let mut state = self.lock();
        jobs.into_iter().rev().for_each(|job| state.jobs.push_front(job));
    }

    /// How many wait.
    pub(crate) fn len(&self) -> usize {
        self.lock().jobs.len()
    }

    /// Whether nothing waits.
    pub(crate) fn is_empty(&self) -> bool {
        self.lock().jobs.is_empty()
    }

    /// Lets nothing in any more. What waits is still done.
    pub(crate) fn close(&self) {
        self.lock().closed = true;
        self.arrival.notify_one();
    }

    /// Whether it was closed.
    pub(crate) fn is_closed(&self) -> bool {
        self.lock().closed
    }
}

fn next_batch(jobs: &mut VecDeque<Job>) -> Vec<Job> {
    let mut admission = Admission::default();
    let (mut batch, mut bytes) = (Vec::new(), 0);
    while let Some(job) = jobs.front() {
        bytes += size_of(&job.plan);
        let full = batch.len() == PLANS_MAX || (bytes > BYTES_MAX && !batch.is_empty());
        if full || !admission.admits(&job.plan) {
            break;
        }
        batch.extend(jobs.pop_front());
    }
    batch
}
