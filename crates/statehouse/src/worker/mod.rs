//! Workers: background work in bounded steps, and the runtime that owns the loops around them.
//!
//! A [`Worker`] does one bounded piece of work for one shard and returns when it wants to run again. It has no loop, no clock and
//! no thread of its own. The runtime, started by [`crate::House::start_workers`], owns the rest:
//!
//! ```text
//!            acquire                  step, step, …           stop requested, or lease lost
//!   shard ────────────► assigned ───────────────────► waits ───────────────────────────────► stopped ──► released
//!                          ▲                            │
//!                          └── due, woken, or idle ─────┘
//! ```
//!
//! **Rows.** `house_leases(scope, name)`, of the system tenant: a lease for each shard of each worker (`worker.NAME`, shard)
//! and one for each process that runs workers (`members`, its name), whose holder is the list of its workers: processes with another
//! blueprint run other workers. [`crate::infra::lease`] describes leases.
//!
//! **Invariants.**
//! - W1. One process at a time works on a shard. *The shard's lease.* A process that lost its lease without noticing is
//!   harmless: its writes to rows of the house carry [`StepContext::guard`], and its writes to rows of a tenant are guarded
//!   transitions of that row, of which only the first is applied.
//! - W2. The work is shared. *A process holds at most its share of a worker's shards,* the number of shards divided by
//!   that of live processes that run the worker, rounded up; it releases shards above its share.
//! - W3. Every shard is assigned. *A process that has less than its share acquires shards that are free or expired.* A process is
//!   live while its own lease changes; clocks of different processes are never compared.
//! - W4. A running step is finished before its shard is released, and a process that stops releases every lease, so that other
//!   processes need not wait for it to expire.
//! - W5. Failed steps are retried for ever with capped exponential backoff and jitter. A step that panics counts as failed.
//!
//! **Pacing.** A step returns what comes [next](NextStep): more at once, more at a time, more when the log goes on, or nothing
//! known. A write that makes a row due notifies the worker through the [`WakeupHub`] of its process; workers of another process find
//! the row within [`WorkerOptions::idle_max`]. Readers of the log are woken by records of any process; while there are none, their
//! pauses grow to eight times that.
//!
//! All time and randomness come from the house's clock and [`WorkerOptions::random`]: under a manual clock nothing happens until
//! the test moves it.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use statehouse_store::{Clock, Ids, Position, Random, Step, Store, StoreError, Time};

use crate::egress::Egress;
use crate::infra::lease::Held;

mod pool;
mod shard_assigner;
mod shard_loop;
mod wakeups;

pub use pool::{PoolConfig, WorkerPool};
pub use wakeups::{Wakeup, WakeupHub};

/// Background work of the house.
#[async_trait]
pub trait Worker: Send + Sync + fmt::Debug {
    /// Its name, unique in the house: `seat.expire`.
    fn name(&self) -> &str;

    /// Number of shards, each assigned to one process at a time. Fixed while rows store shard numbers.
    fn shards(&self) -> u32;

    /// Processes at most `limit` rows of one shard. It may be cancelled at any point and run again in another process.
    async fn step(&self, context: &StepContext<'_>, limit: usize) -> Result<StepProgress, StoreError>;

    /// Further metrics of this worker in this process.
    fn gauges(&self) -> Vec<Gauge> {
        Vec::new()
    }
}

/// A metric that goes up and down.
#[derive(Clone, Debug, PartialEq)]
pub struct Gauge {
    /// Its name, as a metric's.
    pub name: &'static str,
    /// What it is.
    pub about: &'static str,
    /// What of it: a label and its value.
    pub label: (&'static str, &'static str),
    /// How much.
    pub value: f64,
}

/// What the runtime gives to a step.
#[derive(Debug)]
pub struct StepContext<'a> {
    /// The store.
    pub store: &'a Arc<dyn Store>,
    /// What time it is for this process; a guard reads the engine's clock instead.
    pub clock: &'a Arc<dyn Clock>,
    /// Where ids come from.
    pub ids: &'a Ids,
    /// What is reached beyond the store.
    pub egress: &'a Egress,
    /// Wakes workers of this process for what a step makes due.
    pub wakeups: &'a WakeupHub,
    /// Which part of the work.
    pub shard: u32,
    /// The lease on it.
    pub held: &'a Held,
}

impl StepContext<'_> {
    /// The step that a plan on rows of the house itself carries, so that it is refused once the shard is another's (W1).
    pub fn guard(&self) -> Step {
        self.held.guard()
    }

    /// Whether the shard is still this process's, as far as it can know. A long step asks from time to time.
    pub fn is_live(&self) -> bool {
        self.held.is_live(&**self.clock)
    }
}

/// What came of a step.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StepProgress {
    /// How many rows it did.
    pub rows: usize,
    /// How long what it did, or has yet to do, was due already.
    pub lag: Duration,
    /// When to come again.
    pub next: NextStep,
    /// Rows that could not be done, each for a reason of its own. They are counted, and the step goes on without them.
    pub failures: Vec<String>,
}

/// When a step has something to do again.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NextStep {
    /// At once: there was more than the limit.
    Now,
    /// At this time, by the process's clock, or earlier if a write notifies the worker.
    At(Time),
    /// When the log has more than this.
    Log(Position),
    /// Not known. The pauses grow to [`WorkerOptions::idle_max`].
    Idle,
}

impl StepProgress {
    /// Nothing was to be done.
    pub fn idle() -> StepProgress {
        StepProgress { rows: 0, lag: Duration::ZERO, next: NextStep::Idle, failures: Vec::new() }
    }
}

/// How workers are run.
#[derive(Clone, Debug)]
pub struct WorkerOptions {
    /// How long a shard is held without a renewal: how long work stands still after a process was killed.
    pub lease: Duration,
    /// Rows in one step.
    pub step_rows: usize,
    /// The longest pause of a worker that knows of nothing to do; readers of the log, which are woken by it, pause up to eight
    /// times as long.
    pub idle_max: Duration,
    /// The longest pause after a step that failed.
    pub error_max: Duration,
    /// Where the jitter of pauses comes from.
    pub random: Random,
}

impl Default for WorkerOptions {
    fn default() -> WorkerOptions {
        WorkerOptions {
            lease: Duration::from_secs(10),
            step_rows: 98,
            idle_max: Duration::from_secs(1),
            error_max: Duration::from_secs(30),
            random: Random::from_entropy(),
        }
    }
}

/// What a worker did so far, in this process.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct WorkerStats {
    /// The worker.
    pub worker: String,
    /// In how many parts its work is cut.
    pub shards: u64,
    /// How many of them this process has.
    pub held: u64,
    /// Steps that were done.
    pub steps: u64,
    /// Rows that they did.
    pub rows: u64,
    /// Steps and rows that failed.
    pub errors: u64,
    /// How long the most belated shard's work was due, when it was last looked at.
    pub lag: Duration,
    /// What the last failure said.
    pub last_error: Option<String>,
}
