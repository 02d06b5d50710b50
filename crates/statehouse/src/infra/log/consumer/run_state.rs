//! The state of a run through the records of one tenant.

use statehouse_store::{Bug, Record, bug};

use super::super::parking::ParkedRows;
use super::super::progress::GroupProgress;
use super::super::{HandlerWrite, offset_of};
use crate::action::LastRefusal;

/// How far a run is, and what it has learned from attempts that failed.
pub(super) struct RunState<'r> {
    pub mark: GroupProgress,
    pub records: &'r [Record],
    /// The first record that is not done.
    pub at: usize,
    /// The parked rows of the tenant; none if they have to be read.
    pub parked: Option<ParkedRows>,
    /// How many of the next records are tried one by one, because a plan of several could not be written.
    pub singly: usize,
    pub tries: u32,
    pub overtaken: u32,
    /// Parts of records that were written.
    pub parts: usize,
    /// Why the next record cannot be done.
    pub poison: Option<String>,
    /// What the last attempt was refused for.
    pub last: Option<Box<LastRefusal>>,
    /// What the next records make, as it was made while those before them were being written.
    pub ahead: Option<HandlerWrite>,
}

/// What follows after an attempt.
pub(super) enum RunTurn {
    /// The next one.
    Continue,
    /// The next one, after the parked rows are read again.
    Reread,
    /// Other runs have their turn.
    Finished,
}

impl<'r> RunState<'r> {
    pub(super) fn of(mark: GroupProgress, records: &'r [Record]) -> RunState<'r> {
        RunState {
            mark,
            records,
            at: 0,
            parked: None,
            singly: 0,
            tries: 0,
            overtaken: 0,
            parts: 0,
            poison: None,
            last: None,
            ahead: None,
        }
    }

    /// Passes over the records that the progress says are done.
    pub(super) fn skip_done(&mut self, era: i64) {
        let done = self.mark.done_in(era);
        while self.records.get(self.at).is_some_and(|record| offset_of(record) <= done) {
            self.at += 1;
        }
    }

    /// The records that are not done, without the first ones.
    pub(super) fn from(&self, skipped: usize) -> Result<&'r [Record], Bug> {
        let records = self.records.get(self.at + skipped..);
        records.ok_or_else(|| {
            bug!("{} records, and {skipped} after {} are skipped", self.records.len(), self.at)
        })
    }

    /// So many of the records that are not done, without the first ones.
    pub(super) fn next(&self, skipped: usize, count: usize) -> Result<&'r [Record], Bug> {
        let records = self.from(skipped)?;
        records.get(..count).ok_or_else(|| bug!("{count} of {} records", records.len()))
    }

    /// So many records are done; none, if it was a part of one.
    pub(super) fn advance(&mut self, after: GroupProgress, taken: usize, ahead: Option<HandlerWrite>) {
        (self.tries, self.overtaken, self.last) = (0, 0, None);
        self.at += taken;
        self.singly = self.singly.saturating_sub(taken);
        self.parts += usize::from(taken == 0);
        (self.mark, self.ahead) = (after, ahead);
    }
}
