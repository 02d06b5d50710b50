//! I05 Append log and consumer progress: groups that read the store's log, each record's effect once, in order by key.
//!
//! ```text
//!                   effect and offset in one plan
//!   record ──► ahead ─────────────────────────────► done
//!                │                                   ▲
//!                │ it cannot be done, or an older     │ replayed, oldest first; or discarded
//!                │ record of its key is parked        │
//!                └──────────────► PARKED ─────────────┘
//! ```
//!
//! A *group* is everybody who reads the log for one purpose, under one name. Its members share the log's partitions by
//! lease: one member at a time for each. There are two kinds. A group of the house is a [`RecordHandler`] that is registered
//! with it; its records are those of all tenants, and the worker runtime spreads its partitions over processes. A
//! declared group, `[log.NAME]`, belongs to each tenant by itself; programs outside read it by the actions of
//! [`group`], and see their own tenant's records only.
//!
//! **Rows.** `house_progress(tenant, consumer, log_partition, reached, era, parked, missed, keeps_from, state, holder,
//! epoch, acquired_at, expires_at, updated_at, version)` and `house_parked(tenant, consumer, log_partition, subject,
//! log_offset, reason, tries, parked_at, ready_at, keeps_from, version)`. A plan belongs to one tenant, so the truth of a
//! house's group is one row for each tenant and partition: up to where that tenant's records are done. The house's own
//! row for the partition is only a *low-water mark*: everything up to there is done, and a new holder begins behind it
//! and passes over what the tenants' rows say is done.
//!
//! **Invariants.**
//! - I1. A record's effect and the progress past it are one plan. *Nothing else moves `reached` forward.*
//! - I2. Each record has its effect once. *Guard of every effect:* `reached = the one that was read`, or that there is no
//!   row yet.
//! - I3. A holder that was overtaken writes nothing. *Guard of every effect:* `epoch <= mine`, which the plan then sets; of
//!   every move of the low-water mark the lease itself ([`StepContext::guard`](crate::worker::StepContext::guard)). Of a declared group:
//!   `epoch = mine and holder = me`.
//! - I4. Records of one key have their effects in the order of the log. *A partition has all events of a subject, and
//!   is gone through in order; once a record is parked, later ones that have a key in common with it are parked behind it.
//!   Guard of every effect:* `parked = the one that was read`, so that what is parked cannot change between the reading and
//!   the writing. A record of several keys is parked under each of them, and given up or done once.
//! - I5. One record that cannot be done holds up its key and nothing else. *Parking and passing it are one plan.*
//! - I6. The low-water mark is never ahead of the work. *It is moved after the plans of all tenants, under I3.*
//! - I7. What a group has yet to read, or has parked, is not trimmed, unless the blueprint says so; and if it was, that is
//!   counted in `missed` and said. *`keeps_from`, indexed across tenants, is what the trimmer looks at; a declared group that
//!   no program of a tenant has claimed a partition of has yet to read all of the tenant's records there ([`retention`]).*
//! - I8. A replay does everything again. *`era` is raised with the new low-water mark, in one row; a tenant's row of an older
//!   era says nothing about what is done. Guard of every move of the mark:* `era = the one that was read`.
//!
//! **Failures.** *Duplicate consumption*: I2, and I3 for a holder that was paused. *Offset advanced before effect
//! committed*: I1, I6. *Consumer lag*: [`GroupInfo::status`] says it in records and in time; a step takes many records, all
//! tenants at once. *Out-of-order processing across partitions*: I4; what is in different partitions has no order, and a
//! batch of several rows leaves a record in the partition of each, with that row's event in it.
//!
//! **Hotspots.** *Hot partitions*: tenants of one partition go side by side; a store is made with as many partitions as
//! it needs. *Log I/O*: one read serves all tenants of a page. *Lag buildup*: [`HandlerWrite::taken`] lets a handler make one
//! plan of many records. *Rebalance churn*: a partition changes hands at a step's end, and the next holder begins at the
//! low-water mark.

mod archetype;
mod consumer;
mod delivery;
pub mod group;
mod parking;
mod progress;
mod retention;

pub use archetype::ARCHETYPE;
pub(crate) use archetype::{HOT_PARTITIONS, LOG_IO, REBALANCE_CHURN};

use std::fmt;
use std::sync::Arc;

use async_trait::async_trait;
use statehouse_store::{
    Clock, Entry, Ids, OperationStatus, Record, Row, Step, Store, StoreError, Tenant, Time,
};
use tokio::sync::watch;

use crate::action::{LastRefusal, RefusedStep, Verdict};
use crate::product::booking::external_holds::ExternalHolds;
use crate::worker::Wakeup;

pub use consumer::{Consumer, feed};
pub(crate) use delivery::subjects_among;
pub use delivery::subjects_of;
pub(crate) use group::declare;
pub use parking::{PARKED, ParkedRecord, parked_table};
pub(crate) use progress::has_passed;
pub use progress::{ConsumerTables, GroupInfo, GroupStatus, PROGRESS, progress_table};
pub use retention::{DeclaredGroup, LogRetention, Trimmer};

/// What a group of the house does with records.
#[async_trait]
pub trait RecordHandler: Send + Sync + fmt::Debug {
    /// The group's name. Progress is kept under it.
    fn group(&self) -> &str;

    /// Whether a record concerns the group. Those that do not are passed over without a plan.
    fn wants(&self, _record: &Record) -> bool {
        true
    }

    /// The keys by which order is kept, and by which records are parked: one for each subject of a record's events, and at
    /// least one.
    fn subjects(&self, record: &Record) -> Vec<String> {
        subjects_of(record)
    }

    /// What is to be written for these records of one tenant, which stand in this order in one partition. There is at
    /// least one; the effect may be that of the first few only ([`HandlerWrite::taken`]). What is read on the way is read after
    /// everything before these records was done.
    async fn handle(
        &self,
        records: &[Record],
        reading: &HandlerContext<'_>,
    ) -> Result<HandlerWrite, HandlerError>;

    /// Whether a group that is new begins at the end of the log, instead of with all that there is.
    fn begins_at_end(&self) -> bool {
        false
    }

    /// The same, while what comes before these records is still being written; `None` where that is not good enough. Only for
    /// effects whose steps demand everything that was read for them: it is written after all that comes before, and if
    /// something is no longer so it is refused, and made anew.
    async fn ahead(
        &self,
        _records: &[Record],
        _reading: &HandlerContext<'_>,
    ) -> Result<Option<HandlerWrite>, HandlerError> {
        Ok(None)
    }
}

/// What a handler may read.
#[derive(Clone, Copy)]
pub struct HandlerContext<'a> {
    /// The store.
    pub store: &'a dyn Store,
    /// Whose records they are. What is written belongs to the same tenant.
    pub tenant: &'a Tenant,
    /// What time it is for this process.
    pub now: Time,
    /// How often in a row what was to be written for this was refused, because others wrote at the same time.
    pub refused: u32,
    /// What a handler needs to call actions; `None` where records are not read by a group.
    pub support: Option<CallSupport<'a>>,
}

/// What a handler needs to call actions.
#[derive(Clone, Copy)]
pub struct CallSupport<'a> {
    /// The step of its last effect that was refused, if it has made one for these records before.
    pub last_refusal: Option<&'a LastRefusal>,
    /// The clock of this process.
    pub clock: &'a dyn Clock,
    /// Where ids come from.
    pub ids: &'a Ids,
    /// ExternalHolds before the store, if the house has them.
    pub holds: Option<&'a dyn ExternalHolds>,
}

/// What is written for records, in one plan with the progress past them.
#[derive(Clone, Debug, Default)]
pub struct HandlerWrite {
    /// How many of the records this is for, from the first one on.
    pub taken: usize,
    /// The steps; there may be none.
    pub steps: Vec<Step>,
    /// What it leaves in the log, if anything.
    pub entry: Option<Entry>,
    /// Whether this is only a part of what the first record makes: it is not passed, and the handler is asked again, which
    /// has to see from what is stored how far it has come.
    pub goes_on: bool,
    /// Whether a refused plan means that others write the same rows. It is then tried again for ever, and never parked.
    pub contends: bool,
    /// The operation id of the plan, if a repetition must be recognized by it. Then it has an entry.
    pub operation: Option<String>,
    /// Decides what a refused step means. Without it, others write the same rows.
    pub judge: Option<StepJudge>,
    /// Work that becomes due by it, for the workers of this process.
    pub wakeups: Vec<Wakeup>,
    /// Tasks of this process that wait for such a write.
    pub notify: Vec<watch::Sender<u64>>,
}

/// Decides what a refused step of an effect means: its index among the effect's steps, and the refusal.
#[derive(Clone)]
pub struct StepJudge(pub Arc<dyn Fn(&RefusedStep<'_>) -> Verdict + Send + Sync>);

impl fmt::Debug for StepJudge {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("StepJudge")
    }
}

impl HandlerWrite {
    /// Steps for so many records.
    pub fn of(taken: usize, steps: Vec<Step>) -> HandlerWrite {
        HandlerWrite { taken, steps, ..HandlerWrite::default() }
    }

    /// Takes out what is to be written, and leaves what is known about it.
    fn take_writes(&mut self) -> EffectWrites {
        EffectWrites {
            steps: std::mem::take(&mut self.steps),
            entry: self.entry.take(),
            operation: self.operation.take(),
            judge: self.judge.take(),
            wakeups: std::mem::take(&mut self.wakeups),
            notify: std::mem::take(&mut self.notify),
        }
    }
}

/// What one commit of an effect writes.
#[derive(Debug, Default)]
struct EffectWrites {
    steps: Vec<Step>,
    entry: Option<Entry>,
    operation: Option<String>,
    judge: Option<StepJudge>,
    wakeups: Vec<Wakeup>,
    notify: Vec<watch::Sender<u64>>,
}

/// Why a handler has nothing to write for records. If there were several, each is tried by itself before it counts.
#[derive(Clone, Debug, PartialEq)]
pub enum HandlerError {
    /// Not now: the same records are tried again, for ever.
    Later(StoreError),
    /// Never: the record is parked with this reason.
    Never(String),
}

impl From<StoreError> for HandlerError {
    fn from(error: StoreError) -> HandlerError {
        match error {
            StoreError::LimitExceeded { .. } => HandlerError::Never(error.to_string()),
            error => HandlerError::Later(error),
        }
    }
}

impl From<statehouse_store::PlanError> for HandlerError {
    fn from(error: statehouse_store::PlanError) -> HandlerError {
        HandlerError::Never(error.to_string())
    }
}

/// The subject of a record, which is that of its first event, as text that fits into a key.
pub fn subject_of(record: &Record) -> String {
    bounded(format!("{}/{}", record.resource, record.key))
}

/// Bytes of a subject, so that it can stand in a key and in an index with the rest.
const SUBJECT_BYTES_MAX: usize = 200;
/// What is left of a longer one, before its digest.
const SUBJECT_BYTES_KEPT: usize = 160;

/// A text as it is, or its beginning and a digest of the whole.
fn bounded(text: String) -> String {
    if text.len() <= SUBJECT_BYTES_MAX {
        return text;
    }
    let digest = text.bytes().fold(0xcbf2_9ce4_8422_2325_u64, |hash, byte| {
        (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3)
    });
    let ends = text.char_indices().map(|(place, _)| place);
    let end = ends.take_while(|place| *place <= SUBJECT_BYTES_KEPT).last().unwrap_or(0);
    format!("{}#{digest:016x}", text.get(..end).unwrap_or_default())
}

/// Whether a record says something that was done.
fn is_applied(record: &Record) -> bool {
    record.status == OperationStatus::Applied
}

/// The offset of a record that was read from the log.
fn offset_of(record: &Record) -> u64 {
    record.position.map_or(0, |position| position.offset)
}

/// An offset as a column holds it.
fn column_of(offset: u64) -> i64 {
    i64::try_from(offset).unwrap_or(i64::MAX)
}

/// The offset in a column.
fn offset_at(row: &Row, column: &str) -> Result<u64, StoreError> {
    offset_in(row, column, row.get_int(column)?)
}

/// The content of a column as an offset.
fn offset_in(row: &Row, column: &str, content: i64) -> Result<u64, StoreError> {
    u64::try_from(content).map_err(|_| row.corrupt(column, "is negative"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn long_subjects_are_told_apart() {
        assert_eq!(bounded("profile/1".into()), "profile/1");
        let long = |end: &str| bounded(format!("{}{end}", "ä".repeat(200)));
        assert!(long("a").len() <= SUBJECT_BYTES_MAX);
        assert_ne!(long("a"), long("b"));
        assert_eq!(long("a"), long("a"));
    }
}
