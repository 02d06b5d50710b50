//! Queued plans of a writer. Plans that are queued together are committed together.

use std::collections::VecDeque;
use std::sync::{Mutex, MutexGuard, PoisonError};

use statehouse_store::{Plan, StoreError};
use tokio::sync::{Notify, oneshot};

use crate::batch::{BatchAdmission, size_of};
use crate::compile::PlanOutcome;

/// Plans in one batch, at most. More do not raise throughput and add latency.
pub(crate) const PLANS_MAX: usize = 256;
/// Bytes in one batch, roughly.
const BYTES_MAX: usize = 8_000_000;

/// A plan, and the channel for its outcome.
pub(crate) struct QueuedPlan {
    pub plan: Plan,
    /// Its events as a compiled statement sends them, if the caller has serialized them already. That spares the writer, which
    /// would serialize those of all plans one after the other.
    pub events: Option<String>,
    /// Whether a compiled statement was tried and did nothing for it.
    pub left_open: bool,
    pub reply: oneshot::Sender<CommitResult>,
}

/// The outcome of a plan for its caller.
pub(crate) type CommitResult = Result<PlanOutcome, StoreError>;

/// The queue of one writer.
#[derive(Default)]
pub(crate) struct Queue {
    state: Mutex<QueueState>,
    arrival: Notify,
}

#[derive(Default)]
struct QueueState {
    jobs: VecDeque<QueuedPlan>,
    closed: bool,
}

impl Queue {
    fn lock(&self) -> MutexGuard<'_, QueueState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Adds a plan; `false` if the queue is closed.
    pub(crate) fn push(&self, job: QueuedPlan) -> bool {
        let mut state = self.lock();
        if state.closed {
            return false;
        }
        state.jobs.push_back(job);
        drop(state);
        self.arrival.notify_one();
        true
    }

    /// Waits until the queue has a plan. `false` when it is closed and empty.
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

    /// Removes the next batch: plans that may be committed together, in the order of arrival. It may be empty.
    pub(crate) fn take(&self) -> Vec<QueuedPlan> {
        next_batch(&mut self.lock().jobs)
    }

    /// Puts plans that were removed and not run back to the front.
    pub(crate) fn put_back(&self, jobs: Vec<QueuedPlan>) {
        let mut state = self.lock();
        jobs.into_iter().rev().for_each(|job| state.jobs.push_front(job));
    }

    /// The number of queued plans.
    pub(crate) fn len(&self) -> usize {
        self.lock().jobs.len()
    }

    /// Whether no plan is queued.
    pub(crate) fn is_empty(&self) -> bool {
        self.lock().jobs.is_empty()
    }

    /// Accepts no more plans. Queued plans are still committed.
    pub(crate) fn close(&self) {
        self.lock().closed = true;
        self.arrival.notify_one();
    }

    /// Whether it was closed.
    pub(crate) fn is_closed(&self) -> bool {
        self.lock().closed
    }
}

fn next_batch(jobs: &mut VecDeque<QueuedPlan>) -> Vec<QueuedPlan> {
    let mut admission = BatchAdmission::default();
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
