//! Workers: what the house does by itself, in bounded steps, and the runtime that owns the loops around them.
//!
//! A [`Worker`] does one bounded piece of work for one shard and says when to come again. It has no loop, no clock and
//! no thread of its own. The runtime, started by [`crate::House::start_workers`], owns the rest:
//!
//! ```text
//!            acquire                 step, step, …            told to go, or lost
//!   shard ────────────► on duty ───────────────────► waits ─────────────────────► off duty ──► released
//!                          ▲                            │
//!                          └── due, woken, or idle for ─┘
//! ```
//!
//! **Rows.** `house_leases(scope, name)`, of the house itself: a lease for each shard of each worker (`worker.NAME`, shard)
//! and one for each process that runs workers (`members`, its name). [`crate::infra::lease`] says what a lease is.
//!
//! **Invariants.**
//! - W1. One process at a time works on a shard. *The shard's lease.* A process that lost its lease without noticing is
//!   harmless: what it writes to rows of the house carries [`Shift::guard`], and what it writes to rows of a tenant is a
//!   guarded transition of that row, which happens once whoever is first.
//! - W2. The work is shared. *A process holds at most its share of a worker's shards,* the number of shards divided by
//!   that of live processes, rounded up; it lets go of what it has above that.
//! - W3. No shard is left behind. *A process that has less than its share takes what is free or expired.* A process is
//!   live while its own lease is seen to change; nobody's clock is compared with anybody else's.
//! - W4. A step under way is finished before its shard is given up, and at the end of the process every lease is released,
//!   so that others need not wait for it to expire.
//! - W5. A step that fails is tried again after a pause that grows to a bound, with some chance in it, for ever: what is
//!   due stays due. A step that panics counts as one that failed.
//!
//! **Pacing.** A step says what comes [`Next`]: more at once, more at a time, more when the log goes on, or nothing known.
//! Whoever writes something due rings ([`Bells`]), so that this process does not sleep through it; another process finds
//! it within [`Options::idle_max`]. Readers of the log are woken by it, from whichever process it is written; while nothing
//! is, their pauses grow to eight times that.
//!
//! All time and chance come from the house's clock and [`Options::random`]: under a manual clock nothing happens until it
//! is moved.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use statehouse_store::{Clock, Ids, Position, Random, Step, Store, StoreError, Time};

use crate::infra::lease::Held;
use crate::outside::Outside;

mod bells;
mod crew;
mod duty;
mod rota;

pub use bells::{Bells, Wake};
pub use crew::{Crew, Premises};

/// Something that the house does by itself.
#[async_trait]
pub trait Worker: Send + Sync + fmt::Debug {
    /// Its name, unique in the house: `seat.expire`.
    fn name(&self) -> &str;

    /// In how many parts the work is cut, each of them for one process at a time. Fixed as long as rows name them.
    fn shards(&self) -> u32;

    /// Does at most so many rows of one shard's work. It may be cut short at any point and called again anywhere else.
    async fn step(&self, shift: &Shift<'_>, limit: usize) -> Result<Progress, StoreError>;

    /// What else there is to watch about it in this process.
    fn gauges(&self) -> Vec<Gauge> {
        Vec::new()
    }
}

/// Something that goes up and down, for whoever watches.
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

/// What the runtime lends to a step.
#[derive(Debug)]
pub struct Shift<'a> {
    /// The store.
    pub store: &'a Arc<dyn Store>,
    /// What time it is for this process; a guard reads the engine's clock instead.
    pub clock: &'a dyn Clock,
    /// Where ids come from.
    pub ids: &'a Ids,
    /// What is reached beyond the store.
    pub outside: &'a Outside,
    /// Which part of the work.
    pub shard: u32,
    /// The lease on it.
    pub held: &'a Held,
}

impl Shift<'_> {
    /// The step that a plan on rows of the house itself carries, so that it is refused once the shard is another's (W1).
    pub fn guard(&self) -> Step {
        self.held.guard()
    }

    /// Whether the shard is still this process's, as far as it can know. A long step asks from time to time.
    pub fn is_live(&self) -> bool {
        self.held.is_live(self.clock)
    }
}

/// What came of a step.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Progress {
    /// How many rows it did.
    pub rows: usize,
    /// How long what it did, or has yet to do, was due already.
    pub lag: Duration,
    /// When to come again.
    pub next: Next,
    /// Rows that could not be done, each for a reason of its own. They are counted, and the step goes on without them.
    pub failures: Vec<String>,
}

/// When a step has something to do again.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Next {
    /// At once: there was more than the limit.
    Now,
    /// At this time, by the process's clock, or before if somebody rings.
    At(Time),
    /// When the log has more than this.
    Log(Position),
    /// Not known. The pauses grow to [`Options::idle_max`].
    Idle,
}

impl Progress {
    /// Nothing was to be done.
    pub fn idle() -> Progress {
        Progress { rows: 0, lag: Duration::ZERO, next: Next::Idle, failures: Vec::new() }
    }
}

/// How workers are run.
#[derive(Clone, Debug)]
pub struct Options {
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

impl Default for Options {
    fn default() -> Options {
        Options {
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
pub struct Figures {
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
