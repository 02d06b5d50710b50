//! What the writers, the readers and the store's methods have in common.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};

use statehouse_store::{Clock, Position, StoreError, SystemClock};
use tokio::sync::watch;
use tokio_postgres::Row;

use crate::ddl::Names;
use crate::fault::Fault;
use crate::link::{Call, Dialer, Link};
use crate::options::Options;
use crate::queue::Queue;
use crate::tenancy::Scope;
use crate::writer::Seat;

pub(crate) struct Shared {
    pub names: Names,
    pub options: Options,
    pub dialer: Dialer,
    pub partitions: u32,
    pub queue: Queue,
    /// The writers' connections.
    pub seats: Vec<Seat>,
    readers: Vec<Link>,
    next_reader: AtomicUsize,
    /// The newest position of each partition, as far as this process knows.
    pub heads: watch::Sender<Vec<u64>>,
    /// How many wait for the log to grow.
    pub waiting: AtomicUsize,
    /// Whether a task looks at the heads for them.
    pub polling: AtomicBool,
    /// The connection on which unknown outcomes are settled and records forgotten, apart from the writers: a
    /// claim may have to wait for the very transaction whose outcome is unknown.
    pub claims: Link,
    pub counters: Counters,
}

/// What the writers of a store have done since it was opened.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counts {
    /// Plans that one compiled statement applied.
    pub alone: u64,
    /// Compiled statements that did nothing, so that their plans were decided on locked rows.
    pub left_open: u64,
    /// Compiled statements that the server refused; their plans were decided on locked rows too.
    pub compiled_faults: u64,
    /// Transactions that settled plans decided on locked rows.
    pub batches: u64,
    /// Plans that were settled so.
    pub batched: u64,
    /// Transactions that were run again because others were in the way.
    pub reruns: u64,
}

/// The same, while it is being counted.
#[derive(Debug, Default)]
pub(crate) struct Counters {
    pub alone: AtomicU64,
    pub left_open: AtomicU64,
    pub compiled_faults: AtomicU64,
    pub batches: AtomicU64,
    pub batched: AtomicU64,
    pub reruns: AtomicU64,
}

impl Counters {
    pub(crate) fn counts(&self) -> Counts {
        let read = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        Counts {
            alone: read(&self.alone),
            left_open: read(&self.left_open),
            compiled_faults: read(&self.compiled_faults),
            batches: read(&self.batches),
            batched: read(&self.batched),
            reruns: read(&self.reruns),
        }
    }
}

/// How often a read is tried.
const READ_ATTEMPTS: u32 = 4;

impl Shared {
    pub(crate) fn new(names: Names, options: Options, dialer: Dialer, partitions: u32) -> Shared {
        let seats = std::iter::repeat_with(Seat::default).take(options.writers.max(1)).collect();
        let readers = std::iter::repeat_with(Link::default).take(options.readers.max(1)).collect();
        Shared {
            names,
            options,
            dialer,
            partitions,
            queue: Queue::default(),
            seats,
            readers,
            next_reader: AtomicUsize::new(0),
            heads: watch::Sender::new(vec![0; partitions as usize]),
            waiting: AtomicUsize::new(0),
            polling: AtomicBool::new(false),
            claims: Link::default(),
            counters: Counters::default(),
        }
    }

    /// The clock that waits are measured by.
    pub(crate) fn clock(&self) -> Arc<dyn Clock> {
        self.options.clock.clone().unwrap_or_else(|| Arc::new(SystemClock))
    }

    /// The role that a transaction takes on, if it is not the one that connects.
    pub(crate) fn role(&self) -> Option<&str> {
        self.options.runtime_role.as_deref().filter(|_| self.options.row_level_security)
    }

    fn scope_words(&self, scope: &Scope) -> String {
        if self.options.row_level_security { scope.words(self.role()) } else { String::new() }
    }

    /// The words that open a transaction that writes. What they set is gone with it, so a pooler may stand between.
    pub(crate) fn open_words(&self, lock_timeout_ms: u128, planner: &str, scope: &Scope) -> String {
        let timeout_ms = self.options.statement_timeout.as_millis();
        format!(
            "begin isolation level read committed; set local statement_timeout = {timeout_ms}; \
             set local lock_timeout = {lock_timeout_ms}; \
             set local idle_in_transaction_session_timeout = {timeout_ms}{planner}{}",
            self.scope_words(scope),
        )
    }

    /// Runs reads on one of the reading connections, in one round trip.
    pub(crate) async fn read(&self, scope: &Scope, calls: &[Call<'_>]) -> Result<Vec<Vec<Row>>, Fault> {
        let mut attempt = 0;
        loop {
            let number = self.next_reader.fetch_add(1, Ordering::Relaxed) % self.readers.len();
            let Some(link) = self.readers.get(number) else {
                return Err(Fault::Busy("there are no readers".into()));
            };
            let session = link.session(&self.dialer).await.map_err(|error| match error {
                StoreError::Unavailable { why } => Fault::Busy(why),
                other => Fault::Schema(other.to_string()),
            })?;
            let answers = if self.options.row_level_security {
                let open = format!("begin read only{}", self.scope_words(scope));
                session.run(Some(&open), calls, Some("commit")).await
            } else {
                // Without anything to set, each statement is its own transaction.
                session.run(None, calls, None).await
            };
            match answers.rows {
                Err(fault) if fault.is_passing() && attempt + 1 < READ_ATTEMPTS => attempt += 1,
                rows => return rows,
            }
        }
    }

    /// Wakes those who wait for the log.
    pub(crate) fn publish(&self, positions: impl Iterator<Item = Position>) {
        let positions: Vec<Position> = positions.collect();
        self.heads.send_if_modified(|heads| {
            let mut news = false;
            for position in positions {
                if let Some(head) =
                    heads.get_mut(position.partition as usize).filter(|h| **h < position.offset)
                {
                    *head = position.offset;
                    news = true;
                }
            }
            news
        });
    }

    /// Lets go of the connections, and wakes those who wait for the log.
    pub(crate) async fn close(&self) {
        self.heads.send_modify(|_| {});
        for seat in &self.seats {
            seat.close().await;
        }
        self.claims.close().await;
        for reader in &self.readers {
            reader.close().await;
        }
    }
}
