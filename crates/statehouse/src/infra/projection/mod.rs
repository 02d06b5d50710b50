//! I06 Projection pipeline: rows that follow from other rows, kept up from the log and rebuilt beside themselves.
//!
//! ```text
//!                 begin                 the scan is done, and
//!   (definition) ───────► BUILDING      it has caught up        LIVE ──────────► KEPT ──────► dropped
//!     is new, or it      (scan of truth, ─────────────────────►  ▲    the next    │   drop,
//!     is asked for        and the log)        switch             │    switch      │   or one more switch
//!                                                                └────────────────┘
//!                                                                     roll back
//! ```
//!
//! A [`Projector`] says, purely, what a source row means: an *entry*, and what the entry changes elsewhere (totals, ordered
//! rows). The pipeline does the rest. All rows of a projection carry a *generation* in their key; one row of the house names
//! the generation that readers read. A new generation is filled from a scan of the source while the log is followed from
//! where it stood before the scan, so that nothing is missed; then the row of the house is switched.
//!
//! Where the log only names the rows that a write has changed, the projector has a [`RowLookup`]: their entries are read, then the
//! rows themselves, and what they are then is what is written. Where a record has less of a row than the projector uses,
//! because a server with an older blueprint has written it, the row is looked up too, and counts under its own version
//! ([`SourceMention`]).
//!
//! Where one source row means more rows than fit into a plan, as a post does that goes to thousands of readers, the projector
//! has a [`FanOut`]: it hands out pieces, each of them a plan, and sees from what is stored how far it has come. What is small
//! enough goes with others of its kind as a [`FanOutBatch`], one plan for all of them.
//!
//! **Rows.** `house_projections(name, live, previous, building, newest, dropping, definitions…, phase, cursor, scanned,
//! verified, digest, updated_at, version)`, of the house; and for each projection its entries, `NAME_entries(tenant,
//! generation, source, source_order, gone, …)`, with whatever else the projector keeps under the same generation. Each
//! generation is a group of its own ([`crate::infra::log`]), `NAME@generation`: its progress, lag and parked records.
//!
//! **Invariants.**
//! - I1. After everything was read, a generation is what a replay from nothing gives. *Entry, totals and the progress of the
//!   group are one plan.*
//! - I2. A row's versions count once each and in their order, from wherever they come: the log, a second partition of it, or a
//!   scan. *A change whose order is not above the entry's is nothing; guard of every other:* `version = the entry's that was
//!   read`, or that there is none.
//!   Of rows that are looked up, the last look counts: *the entry is read before its row, and written, if only with what it
//!   says already, under the same guard;* so a process that has read before and writes later is refused, and reads again.
//!   *The entry says which record it was written for,* so that a record which names many rows can be done in pieces.
//! - I3. What is gone stays gone. *An entry that is gone keeps its order, as a tombstone, so that an older row that a scan has
//!   read before does not come back.*
//! - I4. A reader never sees two generations mixed. *It reads the row of the house once and everything else under the
//!   generation that it names; a cursor says which one it belongs to.*
//! - I5. A generation is switched to once its scan is done, it has passed everything that the live one has, and its entries
//!   are those of the source. *Guard of the switch:* `version = the one that was read` of the house's row, and the lease.
//! - I6. The scan's place is never ahead of its work. *It is written after the plans of its page.*
//! - I7. A record that is done in pieces, because it has more rows than fit into a plan, is passed with the last of them. *A piece before it leaves the progress where it
//!   is.*
//! - I8. A generation goes with its tables. *Before a migration creates one of them, or one that they follow from, all
//!   generations are given up; before it adds a column, those of the definition that needs it are* ([`restart`]). *What is
//!   given up is never read again, and its number never given out again.*
//!
//! **Failures.** *Stale index*: lag is said, and a reader that brings the token of its own write waits for it
//! ([`Projection::wait_for`]). *Missing entry*: I1, I6; a rebuild starts from the truth. *Duplicate entry*: I2. *Tombstone not
//! propagated*: I3.
//!
//! **Hotspots.** *Projector lag*: partitions are shared by processes, and a plan takes many records. *Rebuild cost*: pages
//! with a place to go on from, beside the live generation, memory bounded. *Hot search/index shards*: totals are added to
//! without being read. *Broad query fanout*: a read names its rows.

mod archetype;
mod build;
mod pipeline;
mod reader;
mod restart;
mod state;

pub use archetype::ARCHETYPE;

use std::collections::BTreeMap;
use std::fmt;
use std::sync::Arc;

use async_trait::async_trait;
use statehouse_store::table::TableBuilder;
use statehouse_store::{Bug, Record, Row, Step, StoreError, Table, Type, Value};

use crate::infra::log::{HandlerContext, HandlerError};

pub use build::{Projection, ProjectionStatus, ProjectionWorker};
pub(crate) use pipeline::{changes_in, entry_step};
pub(crate) use reader::{ProjectionReader, fresh};
pub(crate) use restart::restart;
pub use state::{BuildPhase, Generation, GenerationBuild, PROJECTIONS, ProjectionState, projections_table};

/// The columns that every table of a projection's entries begins with.
pub const GENERATION: &str = "generation";
/// The key of the source row, as text.
pub const SOURCE: &str = "source";
pub(crate) const SOURCE_ORDER: &str = "source_order";
const GONE: &str = "gone";

/// A table of entries, without the projector's own columns, all of which may be null.
pub fn entries_table(name: &str) -> TableBuilder {
    Table::named(name)
        .partition(GENERATION, Type::Int)
        .partition(SOURCE, Type::Text)
        .required(SOURCE_ORDER, Type::Int)
        .required(GONE, Type::Bool)
}

/// What an entry says, by column; what is not named is null.
pub type EntryContent = BTreeMap<String, Value>;

/// What a source row means now.
#[derive(Clone, Debug, PartialEq)]
pub struct SourceChange {
    /// The key of the source row, as text.
    pub source: String,
    /// A number that grows with every change of the source row: its version. It begins anew after an erasure, whose order is
    /// the negative version of the row that was erased ([`SourceChange::supersedes`]).
    pub order: i64,
    /// What the entry says; `None` if there is none (any more).
    pub content: Option<EntryContent>,
}

impl SourceChange {
    /// The source row was erased at this version.
    pub fn erased(source: String, version: i64) -> SourceChange {
        SourceChange { source, order: -version, content: None }
    }

    /// Whether the change comes after what an entry of this order says. An erasure comes after every version of the row, and every
    /// version of a row that was created later comes after the erasure. So changes must be taken in the order of the log; a scan, which
    /// has none, looks at a row again before it changes an entry.
    pub fn supersedes(&self, order: i64) -> bool {
        self.order > order || (self.order < 0 && self.order != order)
    }
}

/// What a record says of a source row.
#[derive(Clone, Debug, PartialEq)]
pub enum SourceMention {
    /// What the row means now.
    Change(SourceChange),
    /// Not enough: the row of this key has to be looked up. If it is not there, there is no entry.
    Partial {
        /// The key of the source row, after the tenant.
        key: Vec<Value>,
        /// The same as text.
        source: String,
        /// The order of the change that the record tells of; the row may have changed since.
        order: i64,
    },
}

/// What an entry changes elsewhere, under the same generation.
#[derive(Clone, Debug, PartialEq)]
pub enum EntryDelta {
    /// Adds to columns of a row, which is made if it is not there.
    Add {
        /// The table.
        table: Arc<Table>,
        /// The key after the tenant, the generation included.
        key: Vec<Value>,
        /// What is added, by column.
        amounts: BTreeMap<String, i64>,
        /// What a new row says besides; the same for every delta of one key.
        columns: EntryContent,
    },
    /// Stores a row.
    Put {
        /// The table.
        table: Arc<Table>,
        /// The key after the tenant, the generation included.
        key: Vec<Value>,
        /// What it says.
        columns: EntryContent,
    },
    /// Takes a row away.
    Remove {
        /// The table.
        table: Arc<Table>,
        /// The key after the tenant, the generation included.
        key: Vec<Value>,
    },
}

/// What a [`FanOut`] makes pieces of.
#[derive(Clone, Copy, Debug)]
pub enum FanOutTask<'a> {
    /// A record of the log.
    Record(&'a Record),
    /// A row of the source, which a scan has come to.
    Row(&'a Row),
}

/// One plan's worth of what a record or a row makes.
#[derive(Clone, Debug, Default)]
pub struct FanOutStep {
    /// The steps; there may be none.
    pub steps: Vec<Step>,
    /// Whether nothing is left to do after them.
    pub is_last: bool,
}

impl FanOutStep {
    /// The last piece.
    pub fn last(steps: Vec<Step>) -> FanOutStep {
        FanOutStep { steps, is_last: true }
    }
}

/// One plan's worth of what several records or rows make, each of them to its end.
#[derive(Clone, Debug, Default)]
pub struct FanOutBatch {
    /// How many of them, from the first one on.
    pub taken: usize,
    /// The steps.
    pub steps: Vec<Step>,
}

/// What is done in pieces. Each piece is made from what is stored when it is asked for, and guarded so that it is refused
/// if that has changed; a process that finds unfinished work of another finishes it first.
#[async_trait]
pub trait FanOut: Send + Sync {
    /// The next piece, under a generation.
    async fn piece(
        &self,
        generation: i64,
        of: FanOutTask<'_>,
        reading: &HandlerContext<'_>,
    ) -> Result<FanOutStep, HandlerError>;

    /// What the first few of these make, if one plan is enough for them; `None` if the first one is to be done in pieces.
    /// All are of one tenant. It is not asked again for what was refused. The steps demand everything that was read for them,
    /// so that it may be asked while what comes before is still being written.
    async fn bundle(
        &self,
        _generation: i64,
        _of: &[FanOutTask<'_>],
        _reading: &HandlerContext<'_>,
    ) -> Result<Option<FanOutBatch>, HandlerError> {
        Ok(None)
    }
}

/// How rows are followed that the log names and does not have.
pub trait RowLookup: Send + Sync {
    /// The keys of the source rows that a record names, after the tenant.
    fn named(&self, record: &Record) -> Vec<Vec<Value>>;

    /// What a row means that was looked up, by its key; `None` if it is not there. Or why it cannot be understood. The order
    /// does not count.
    fn seen(&self, key: &[Value], row: Option<&Row>) -> Result<SourceChange, String>;
}

/// What follows from source rows. Pure: the same row always means the same.
pub trait Projector: Send + Sync + fmt::Debug {
    /// The projection's name.
    fn name(&self) -> &str;

    /// What it makes of a row, in words or as a digest. If it is another than the live generation's, a new one is built.
    fn definition(&self) -> String;

    /// The table that holds the truth.
    fn source(&self) -> &Arc<Table>;

    /// The table of its entries, made with [`entries_table`].
    fn entries(&self) -> &Arc<Table>;

    /// All tables with rows of a generation, the entries' included: what is dropped with it.
    fn tables(&self) -> Vec<Arc<Table>>;

    /// All tables that its rows follow from.
    fn truths(&self) -> Vec<Arc<Table>> {
        vec![self.source().clone()]
    }

    /// Whether a record may change something.
    fn wants(&self, record: &Record) -> bool;

    /// What a record says of source rows, in the order of its events; or why it cannot be understood.
    fn mentions(&self, record: &Record) -> Result<Vec<SourceMention>, String>;

    /// What a row of the source means.
    fn change_of(&self, row: &Row) -> SourceChange;

    /// What follows, under a generation, when the entry of a source goes from `before` to `after`.
    fn deltas(
        &self,
        generation: i64,
        source: &str,
        before: Option<&EntryContent>,
        after: Option<&EntryContent>,
    ) -> Result<Vec<EntryDelta>, Bug>;

    /// How source rows are looked up, if they are; [`Projector::mentions`] is then not asked. The order of all changes, also
    /// of [`Projector::change_of`], is then 0; that of an entry says which record it was last written for.
    fn row_lookup(&self) -> Option<&dyn RowLookup> {
        None
    }

    /// How it is done in pieces, if it is; [`Projector::deltas`] is then not asked.
    fn reach(&self) -> Option<&dyn FanOut> {
        None
    }
}

/// What an entry's row says.
#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) struct ProjectionEntry {
    /// The row's version; 0 if there is none.
    pub(crate) version: i64,
    pub(crate) order: i64,
    pub(crate) content: Option<EntryContent>,
}

impl ProjectionEntry {
    pub(crate) fn of(row: Option<&Row>) -> Result<ProjectionEntry, StoreError> {
        let Some(row) = row else {
            return Ok(ProjectionEntry { version: 0, order: i64::MIN, content: None });
        };
        let own = |name: &str| ![GENERATION, SOURCE, SOURCE_ORDER, GONE].contains(&name);
        let columns = row.table().columns().iter().zip(row.values());
        let content = columns
            .filter(|(column, value)| own(&column.name) && !value.is_null())
            .map(|(column, value)| (column.name.clone(), value.clone()));
        Ok(ProjectionEntry {
            version: row.version(),
            order: row.get_int(SOURCE_ORDER)?,
            content: (!row.get_bool(GONE)?).then(|| content.collect()),
        })
    }
}
