//! State that the writers, the readers and the store's methods share.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};

use statehouse_store::log::partition_of;
use statehouse_store::{Clock, Plan, Position, StoreError, SystemClock};
use tokio::sync::watch;
use tokio_postgres::Row;

use crate::assumed_absent::ConflictHistory;
use crate::claim::ClaimConnection;
use crate::compile::{ClaimTexts, Compiler, Texts, is_uniform};
use crate::connection::{Connector, DatabaseCall, LazyConnection};
use crate::ddl::Names;
use crate::fault::PostgresFault;
use crate::multi_read::ReadStatements;
use crate::options::PostgresOptions;
use crate::order::place;
use crate::reader::{ATTEMPTS, Readers};
use crate::shape::{compilable, events_of};
use crate::tenancy::TransactionScope;
use crate::writer::WriterLane;

/// Claim connections for each writer: a claim waits for the server twice, for its rows and for its commit.
const CLAIM_CONNECTIONS: usize = 2;

pub(crate) struct Shared {
    pub names: Names,
    pub options: PostgresOptions,
    pub connector: Connector,
    /// How the writers' connections are made.
    pub writer_connector: Connector,
    pub partitions: u32,
    texts: Texts,
    /// The writers' connections, each with the plans that wait for it.
    pub lanes: Vec<WriterLane>,
    /// The connections for claims of ranges.
    pub claim_connections: Vec<ClaimConnection>,
    pub next_claim_connection: AtomicUsize,
    pub claim_texts: ClaimTexts,
    /// The readers' connections, and the looks that wait for one.
    pub readers: Readers,
    /// How they are made.
    pub reader_connector: Connector,
    pub statements: ReadStatements,
    next_reader: AtomicUsize,
    /// The newest position of each partition, as far as this process knows.
    pub heads: watch::Sender<Vec<u64>>,
    /// How many callers wait for the log to grow.
    pub waiting: AtomicUsize,
    /// Whether a task polls the heads for them.
    pub polling: AtomicBool,
    /// The connection for fencing and trimming. It is separate from the writers, because a fence may have to wait for the
    /// transaction whose outcome is unknown.
    pub fences: LazyConnection,
    /// Tables whose rows are read before they are inserted.
    pub insert_conflicts: ConflictHistory,
    /// Tables in which plans of many rows were refused, so that the rows are checked before they are written.
    pub uniform_refusals: ConflictHistory,
    pub counters: Counters,
}

/// Counters of the writers and readers of a store since it was opened.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct StoreCounts {
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
    /// Transactions that were retried after a conflict.
    pub reruns: u64,
    /// Rows that were inserted, or verified to be absent, without a read before.
    pub unread: u64,
    /// Transactions that were run again with such a read.
    pub doubted: u64,
    /// Reads that were joined with others to one statement.
    pub joined: u64,
    /// Rows of ranges that a statement found and changed.
    pub taken: u64,
}

/// The live counters.
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
    pub(crate) fn counts(&self) -> StoreCounts {
        let read = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        StoreCounts {
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
        mut options: PostgresOptions,
        connector: Connector,
        writer_connector: Connector,
        reader_connector: Connector,
        partitions: u32,
    ) -> Shared {
        // The number of the existing store overrides the option.
        options.partitions = Some(partitions);
        let lanes = std::iter::repeat_with(WriterLane::default).take(options.writers.max(1)).collect();
        let claim_connections = std::iter::repeat_with(ClaimConnection::default)
            .take(CLAIM_CONNECTIONS * options.writers.max(1))
            .collect();
        let readers = Readers::new(options.readers);
        Shared {
            names,
            options,
            connector,
            writer_connector,
            partitions,
            texts: Texts::default(),
            lanes,
            claim_connections,
            next_claim_connection: AtomicUsize::new(0),
            claim_texts: ClaimTexts::default(),
            readers,
            reader_connector,
            statements: ReadStatements::default(),
            next_reader: AtomicUsize::new(0),
            heads: watch::Sender::new(vec![0; partitions as usize]),
            waiting: AtomicUsize::new(0),
            polling: AtomicBool::new(false),
            fences: LazyConnection::default(),
            insert_conflicts: ConflictHistory::default(),
            uniform_refusals: ConflictHistory::default(),
            counters: Counters::default(),
        }
    }

    /// The lane of a plan: that of its record's partition. Two lanes never wait for each other's heads, and seldom for each
    /// other's rows, because plans of one subject mostly write the same rows.
    pub(crate) fn lane_of(&self, plan: &Plan) -> Option<&WriterLane> {
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

    /// Accepts no more plans. Queued plans are still committed.
    pub(crate) fn shut(&self) {
        self.lanes.iter().for_each(|lane| lane.queue.close());
    }

    /// Whether the store was closed.
    pub(crate) fn is_closed(&self) -> bool {
        self.lanes.first().is_none_or(|lane| lane.queue.is_closed())
    }

    /// The clock for timeouts.
    pub(crate) fn clock(&self) -> Arc<dyn Clock> {
        self.options.clock.clone().unwrap_or_else(|| Arc::new(SystemClock))
    }

    /// The compiler, with the current time of the store's clock.
    pub(crate) fn compiler(&self) -> Compiler<'_> {
        Compiler::new(&self.names, &self.texts, &self.options, self.partitions)
    }

    /// The events of a plan that may be compiled, as its statement sends them. With a clock of the caller they are not known yet.
    pub(crate) fn events_ahead(&self, plan: &Plan) -> Option<String> {
        let compiles = || compilable(plan).is_some() || is_uniform(plan);
        let is_known = self.options.clock.is_none() && plan.entry().is_some();
        (is_known && compiles()).then(|| events_of(plan, None))
    }

    /// Runs reads on one of the reading connections, in one round trip. Other reads may be in flight on it.
    pub(crate) async fn read(
        &self,
        scope: &TransactionScope,
        calls: &[DatabaseCall<'_>],
    ) -> Result<Vec<Vec<Row>>, PostgresFault> {
        let Some(connection) = self.readers.connection(self.next_reader.fetch_add(1, Ordering::Relaxed))
        else {
            return Err(PostgresFault::Busy("there are no readers".into()));
        };
        let open = self.options.row_level_security.then(|| self.options.begin_read_sql(scope));
        self.read_on(connection, open.as_deref(), calls).await
    }

    /// Runs reads on a connection, in one round trip. Without `open`, each statement is its own transaction.
    pub(crate) async fn read_on(
        &self,
        connection: &LazyConnection,
        open: Option<&str>,
        calls: &[DatabaseCall<'_>],
    ) -> Result<Vec<Vec<Row>>, PostgresFault> {
        let mut attempt = 0;
        loop {
            let session = connection.session(&self.reader_connector).await.map_err(|error| match error {
                // Other reads that wait for this connection would fail as well.
                StoreError::Unavailable { why } => PostgresFault::Lost(why),
                other => PostgresFault::Schema(other.to_string()),
            })?;
            match session.run(open, calls, open.map(|_| "commit")).await.rows {
                Err(fault) if fault.is_passing() && attempt + 1 < ATTEMPTS => attempt += 1,
                rows => return rows,
            }
        }
    }

    /// Publishes new positions to callers that wait for the log.
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

    /// Closes the connections, and wakes callers that wait for the log.
    pub(crate) async fn close(&self) {
        self.heads.send_modify(|_| {});
        for lane in &self.lanes {
            lane.close().await;
        }
        for claim in &self.claim_connections {
            claim.connection.close().await;
        }
        self.fences.close().await;
        self.readers.close().await;
    }
}
