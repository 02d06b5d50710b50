//! What the writers, the readers and the store's methods have in common.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};

use statehouse_store::log::partition_of;
use statehouse_store::{Clock, Plan, Position, StoreError, SystemClock};
use tokio::sync::watch;
use tokio_postgres::Row;

use crate::compile::{Compiler, Takes, Texts, is_uniform};
use crate::ddl::Names;
use crate::fault::Fault;
use crate::link::{Call, Dialer, Link};
use crate::look::Statements;
use crate::options::Options;
use crate::order::place;
use crate::reader::{ATTEMPTS, Readers};
use crate::shape::{compilable, events_of};
use crate::take::Taker;
use crate::tenancy::Scope;
use crate::trust::Doubts;
use crate::writer::Lane;

/// Takers for each writer: a take waits for the server twice, for its rows and for its commit.
const TAKERS: usize = 2;

pub(crate) struct Shared {
    pub names: Names,
    pub options: Options,
    pub dialer: Dialer,
    /// How the writers' connections are made.
    pub writer_dialer: Dialer,
    pub partitions: u32,
    texts: Texts,
    /// The writers' connections, each with the plans that wait for it.
    pub lanes: Vec<Lane>,
    /// Those of whoever takes the first rows of ranges.
    pub takers: Vec<Taker>,
    pub next_taker: AtomicUsize,
    pub takes: Takes,
    /// The readers' connections, and the looks that wait for one.
    pub readers: Readers,
    /// How they are made.
    pub reader_dialer: Dialer,
    pub statements: Statements,
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
    /// Where rows that are to be inserted are looked for all the same.
    pub doubts: Doubts,
    /// Where plans of many rows are refused, so that the rows are judged before they are written.
    pub refusals: Doubts,
    pub counters: Counters,
}

/// What the writers and readers of a store have done since it was opened.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counts {
    /// Plans that a compiled statement of their own applied.
    pub alone: u64,
    /// Plans that a compiled statement applied together with others of their shape.
    pub alike: u64,
    /// Plans of several steps of one shape that one statement applied.
    pub uniform: u64,
    /// Plans for which a compiled statement did nothing, so that they were decided on locked rows.
    pub left_open: u64,
    /// Compiled statements that the server refused; their plans were decided on locked rows too.
    pub compiled_faults: u64,
    /// Transactions that settled plans decided on locked rows.
    pub batches: u64,
    /// Plans that were settled so.
    pub batched: u64,
    /// Transactions that were run again because others were in the way.
    pub reruns: u64,
    /// Rows that were inserted, or found to be missing, without a look for them before.
    pub unread: u64,
    /// Transactions that were run again with such a look.
    pub doubted: u64,
    /// Looks that were answered by one statement together with others.
    pub joined: u64,
    /// Rows of ranges that a statement found and changed.
    pub taken: u64,
}

/// The same, while it is being counted.
#[derive(Debug, Default)]
pub(crate) struct Counters {
    pub alone: AtomicU64,
    pub alike: AtomicU64,
    pub uniform: AtomicU64,
    pub left_open: AtomicU64,
    pub compiled_faults: AtomicU64,
    pub batches: AtomicU64,
    pub batched: AtomicU64,
    pub reruns: AtomicU64,
    pub unread: AtomicU64,
    pub doubted: AtomicU64,
    pub joined: AtomicU64,
    pub taken: AtomicU64,
}

impl Counters {
    pub(crate) fn counts(&self) -> Counts {
        let read = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        Counts {
            alone: read(&self.alone),
            alike: read(&self.alike),
            uniform: read(&self.uniform),
            left_open: read(&self.left_open),
            compiled_faults: read(&self.compiled_faults),
            batches: read(&self.batches),
            batched: read(&self.batched),
            reruns: read(&self.reruns),
            unread: read(&self.unread),
            doubted: read(&self.doubted),
            joined: read(&self.joined),
            taken: read(&self.taken),
        }
    }
}

impl Shared {
    pub(crate) fn new(
        names: Names,
        mut options: Options,
        dialer: Dialer,
        writer_dialer: Dialer,
        reader_dialer: Dialer,
        partitions: u32,
    ) -> Shared {
        // What the store has is what counts from here on.
        options.partitions = Some(partitions);
        let lanes = std::iter::repeat_with(Lane::default).take(options.writers.max(1)).collect();
        let takers = std::iter::repeat_with(Taker::default).take(TAKERS * options.writers.max(1)).collect();
        let readers = Readers::new(options.readers);
        Shared {
            names,
            options,
            dialer,
            writer_dialer,
            partitions,
            texts: Texts::default(),
            lanes,
            takers,
            next_taker: AtomicUsize::new(0),
            takes: Takes::default(),
            readers,
            reader_dialer,
            statements: Statements::default(),
            next_reader: AtomicUsize::new(0),
            heads: watch::Sender::new(vec![0; partitions as usize]),
            waiting: AtomicUsize::new(0),
            polling: AtomicBool::new(false),
            claims: Link::default(),
            doubts: Doubts::default(),
            refusals: Doubts::default(),
            counters: Counters::default(),
        }
    }

    /// The lane of a plan: that of its record's partition. Two lanes never wait for one another's heads, and seldom for
    /// one another's rows, because what is logged under one key is mostly kept in the same rows.
    pub(crate) fn lane(&self, plan: &Plan) -> Option<&Lane> {
        let number = match (plan.entry(), plan.steps().first()) {
            (Some(entry), _) => {
                partition_of(plan.tenant(), &entry.resource, &entry.key, self.partitions) as usize
            }
            (None, Some(step)) => {
                let row = place(step.table.name(), 0, plan.tenant(), &step.key);
                row.iter().fold(0_usize, |sum, octet| sum.wrapping_mul(31).wrapping_add(usize::from(*octet)))
            }
            (None, None) => 0,
        };
        self.lanes.get(number % self.lanes.len().max(1))
    }

    /// Lets no more plans in. What waits is still done.
    pub(crate) fn shut(&self) {
        self.lanes.iter().for_each(|lane| lane.queue.close());
    }

    /// Whether the store was closed.
    pub(crate) fn is_closed(&self) -> bool {
        self.lanes.first().is_none_or(|lane| lane.queue.is_closed())
    }

    /// The clock that waits are measured by.
    pub(crate) fn clock(&self) -> Arc<dyn Clock> {
        self.options.clock.clone().unwrap_or_else(|| Arc::new(SystemClock))
    }

    /// What compiles plans, as of now.
    pub(crate) fn compiler(&self) -> Compiler<'_> {
        Compiler::new(&self.names, &self.texts, &self.options, self.partitions)
    }

    /// The events of a plan that may be compiled, as its statement sends them. By a clock of our own they are not known yet.
    pub(crate) fn events_ahead(&self, plan: &Plan) -> Option<String> {
        let compiles = || compilable(plan).is_some() || is_uniform(plan);
        let is_known = self.options.clock.is_none() && plan.entry().is_some();
        (is_known && compiles()).then(|| events_of(plan, None))
    }

    /// Runs reads on one of the reading connections, in one round trip, beside whoever has it.
    pub(crate) async fn read(&self, scope: &Scope, calls: &[Call<'_>]) -> Result<Vec<Vec<Row>>, Fault> {
        let Some(link) = self.readers.link(self.next_reader.fetch_add(1, Ordering::Relaxed)) else {
            return Err(Fault::Busy("there are no readers".into()));
        };
        let open = self.options.row_level_security.then(|| self.options.read_words(scope));
        self.read_on(link, open.as_deref(), calls).await
    }

    /// Runs reads on a connection, in one round trip. Without anything to set, each statement is its own transaction.
    pub(crate) async fn read_on(
        &self,
        link: &Link,
        open: Option<&str>,
        calls: &[Call<'_>],
    ) -> Result<Vec<Vec<Row>>, Fault> {
        let mut attempt = 0;
        loop {
            let session = link.session(&self.reader_dialer).await.map_err(|error| match error {
                // Nobody else who waits for this connection would get it either.
                StoreError::Unavailable { why } => Fault::Lost(why),
                other => Fault::Schema(other.to_string()),
            })?;
            match session.run(open, calls, open.map(|_| "commit")).await.rows {
                Err(fault) if fault.is_passing() && attempt + 1 < ATTEMPTS => attempt += 1,
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
        for lane in &self.lanes {
            lane.close().await;
        }
        for taker in &self.takers {
            taker.link.close().await;
        }
        self.claims.close().await;
        self.readers.close().await;
    }
}
