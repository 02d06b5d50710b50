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
//! Where the log only names the rows that a write has changed, the projector has a [`Look`]: their entries are read, then the
//! rows themselves, and what they are then is what is written. Where a record has less of a row than the projector uses,
//! because a server with an older blueprint has written it, the row is looked up too, and counts under its own version
//! ([`Mention`]).
//!
//! Where one source row means more rows than fit into a plan, as a post does that goes to thousands of readers, the projector
//! has a [`Reach`]: it hands out pieces, each of them a plan, and sees from what is stored how far it has come. What is small
//! enough goes with others of its kind as a [`Bundle`], one plan for all of them.
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
//!   says already, under the same guard;* so whoever has looked before and comes to write later is refused, and looks again.
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
mod consult;
mod pipeline;
mod restart;
mod state;

pub use archetype::ARCHETYPE;

use std::collections::BTreeMap;
use std::fmt;
use std::sync::Arc;

use async_trait::async_trait;
use statehouse_store::table::Builder;
use statehouse_store::{Record, Row, Step, Table, Type, Value};

use crate::infra::log::{Reading, Unable};

pub use build::{Projecting, Projection, Status};
pub(crate) use consult::{Consult, fresh};
pub(crate) use pipeline::{changes_in, entry_step};
pub(crate) use restart::restart;
pub use state::{Building, Generation, PROJECTIONS, Phase, State, projections_table};

/// The columns that every table of a projection's entries begins with.
pub const GENERATION: &str = "generation";
/// The key of the source row, as text.
pub const SOURCE: &str = "source";
pub(crate) const SOURCE_ORDER: &str = "source_order";
const GONE: &str = "gone";

/// A table of entries, without the projector's own columns, all of which may be null.
pub fn entries_table(name: &str) -> Builder {
    Table::named(name)
        .partition(GENERATION, Type::Int)
        .partition(SOURCE, Type::Text)
        .required(SOURCE_ORDER, Type::Int)
        .required(GONE, Type::Bool)
}

/// What an entry says, by column; what is not named is null.
pub type Content = BTreeMap<String, Value>;

/// What a source row means now.
#[derive(Clone, Debug, PartialEq)]
pub struct Change {
    /// The key of the source row, as text.
    pub source: String,
    /// A number that grows with every change of the source row, and never begins anew: its version, if the row is never
    /// deleted for good.
    pub order: i64,
    /// What the entry says; `None` if there is none (any more).
    pub content: Option<Content>,
}

/// What a record says of a source row.
#[derive(Clone, Debug, PartialEq)]
pub enum Mention {
    /// What the row means now.
    Change(Change),
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
pub enum Delta {
    /// Adds to columns of a row, which is made if it is not there.
    Add {
        /// The table.
        table: Arc<Table>,
        /// The key after the tenant, the generation included.
        key: Vec<Value>,
        /// What is added, by column.
        amounts: BTreeMap<String, i64>,
        /// What a new row says besides; the same for every delta of one key.
        columns: Content,
    },
    /// Stores a row.
    Put {
        /// The table.
        table: Arc<Table>,
        /// The key after the tenant, the generation included.
        key: Vec<Value>,
        /// What it says.
        columns: Content,
    },
    /// Takes a row away.
    Remove {
        /// The table.
        table: Arc<Table>,
        /// The key after the tenant, the generation included.
        key: Vec<Value>,
    },
}

/// What a [`Reach`] makes pieces of.
#[derive(Clone, Copy, Debug)]
pub enum Matter<'a> {
    /// A record of the log.
    Record(&'a Record),
    /// A row of the source, which a scan has come to.
    Row(&'a Row),
}

/// One plan's worth of what a record or a row makes.
#[derive(Clone, Debug, Default)]
pub struct Piece {
    /// The steps; there may be none.
    pub steps: Vec<Step>,
    /// Whether nothing is left to do after them.
    pub is_last: bool,
}

impl Piece {
    /// The last piece.
    pub fn last(steps: Vec<Step>) -> Piece {
        Piece { steps, is_last: true }
    }
}

/// One plan's worth of what several records or rows make, each of them to its end.
#[derive(Clone, Debug, Default)]
pub struct Bundle {
    /// How many of them, from the first one on.
    pub taken: usize,
    /// The steps.
    pub steps: Vec<Step>,
}

/// What is done in pieces. Each piece is made from what is stored when it is asked for, and guarded so that it is refused
/// if that has changed; whoever comes to unfinished work of somebody else finishes it first.
#[async_trait]
pub trait Reach: Send + Sync {
    /// The next piece, under a generation.
    async fn piece(&self, generation: i64, of: Matter<'_>, reading: &Reading<'_>) -> Result<Piece, Unable>;

    /// What the first few of these make, if one plan is enough for them; `None` if the first one is to be done in pieces.
    /// All are of one tenant. It is not asked again for what was refused. The steps demand everything that was read for them,
    /// so that it may be asked while what comes before is still being written.
    async fn bundle(
        &self,
        _generation: i64,
        _of: &[Matter<'_>],
        _reading: &Reading<'_>,
    ) -> Result<Option<Bundle>, Unable> {
        Ok(None)
    }
}

/// How rows are followed that the log names and does not have.
pub trait Look: Send + Sync {
    /// The keys of the source rows that a record names, after the tenant.
    fn named(&self, record: &Record) -> Vec<Vec<Value>>;

    /// What a row means that was looked up, by its key; `None` if it is not there. Or why it cannot be understood. The order
    /// does not count.
    fn seen(&self, key: &[Value], row: Option<&Row>) -> Result<Change, String>;
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
    fn mentions(&self, record: &Record) -> Result<Vec<Mention>, String>;

    /// What a row of the source means.
    fn change_of(&self, row: &Row) -> Change;

    /// What follows, under a generation, when the entry of a source goes from `before` to `after`.
    fn deltas(
        &self,
        generation: i64,
        source: &str,
        before: Option<&Content>,
        after: Option<&Content>,
    ) -> Vec<Delta>;

    /// How source rows are looked up, if they are; [`Projector::mentions`] is then not asked. The order of all changes, also
    /// of [`Projector::change_of`], is then 0; that of an entry says which record it was last written for.
    fn look(&self) -> Option<&dyn Look> {
        None
    }

    /// How it is done in pieces, if it is; [`Projector::deltas`] is then not asked.
    fn reach(&self) -> Option<&dyn Reach> {
        None
    }
}

/// What an entry's row says.
#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) struct Entry {
    /// The row's version; 0 if there is none.
    pub(crate) version: i64,
    pub(crate) order: i64,
    pub(crate) content: Option<Content>,
}

impl Entry {
    pub(crate) fn of(row: Option<&Row>) -> Entry {
        let Some(row) = row else { return Entry { version: 0, order: i64::MIN, content: None } };
        let own = |name: &str| ![GENERATION, SOURCE, SOURCE_ORDER, GONE].contains(&name);
        let columns = row.table().columns().iter().zip(row.values());
        let content = columns
            .filter(|(column, value)| own(&column.name) && !value.is_null())
            .map(|(column, value)| (column.name.clone(), value.clone()));
        Entry {
            version: row.version(),
            order: row.int(SOURCE_ORDER).unwrap_or(i64::MIN),
            content: (row.bool(GONE) != Some(true)).then(|| content.collect()),
        }
    }
}
