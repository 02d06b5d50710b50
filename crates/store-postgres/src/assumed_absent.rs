//! Skips the read for rows that a plan inserts: the primary key detects conflicts.
//!
//! A step that inserts a row, or requires its absence, expects to find nothing. A read would return nothing and lock nothing, and it
//! would prove nothing: another transaction may insert the row in the next moment, and the primary key decides in any case
//! ([`crate::batch`]). So a batch assumes absence where its first step on a row requires it, and reads all other rows only. A post
//! that is delivered to eighty readers saves eighty reads.
//!
//! **Why it is correct.** Every assumption is verified or not relied on:
//! - If an applied plan names such a row, the row, or a placeholder for it, is inserted. If the row exists, the insert fails and
//!   nothing was done.
//! - If a plan is refused by a step before its steps on such rows, they do not matter.
//! - If a plan is refused by a later step, or fails, the answer might name the wrong step. The answer is not given
//!   ([`Batch::unverified`]) and nothing is written.
//!
//! In the first and the last case the batch is run again, and this time every row is read.
//!
//! **The cost of a wrong assumption** is one more run for all plans of the batch. So the store remembers the tables in which a row
//! was found that should not have existed. The next [`READS`] batches that insert into them read first. Where plans are refused all
//! the time, because callers compete, the rows are always read.

use std::collections::HashMap;
use std::sync::{Mutex, MutexGuard, PoisonError};

use crate::batch::Batch;

/// Batches that read and find no conflict, before absence is assumed again.
const READS: u32 = 64;

/// The tables in which conflicts were found, each with the number of successes that are missing until it is forgotten. Also used
/// for tables whose rows are checked before several of them are written ([`crate::compile::Way`]).
#[derive(Debug, Default)]
pub(crate) struct ConflictHistory(Mutex<HashMap<String, u32>>);

impl ConflictHistory {
    fn lock(&self) -> MutexGuard<'_, HashMap<String, u32>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Whether rows of this table may be assumed to be absent.
    pub(crate) fn assumes_absent(&self, table: &str) -> bool {
        !self.lock().contains_key(table)
    }

    /// Whether the last read of this table found a conflict. A statement that fails on a conflict ([`crate::compile`]) would
    /// probably fail again.
    pub(crate) fn expects_conflict(&self, table: &str) -> bool {
        self.lock().get(table) == Some(&READS)
    }

    /// Records conflicts in these tables, so that their rows are read.
    pub(crate) fn record_conflict<'t>(&self, tables: impl IntoIterator<Item = &'t str>) {
        self.lock().extend(tables.into_iter().map(|table| (table.to_owned(), READS)));
    }

    /// Records a batch or statement without a conflict in this table.
    pub(crate) fn record_success(&self, table: &str) {
        let mut left = self.lock();
        if let Some(left_reads) = left.get_mut(table) {
            *left_reads -= 1;
            if *left_reads == 0 {
                left.remove(table);
            }
        }
    }

    /// Records what a batch found in the rows that it read and was to insert.
    pub(crate) fn learn(&self, batch: &Batch<'_>) {
        let mut seen: HashMap<&str, bool> = HashMap::new();
        for (table, is_found) in batch.checked_absences() {
            *seen.entry(table).or_default() |= is_found;
        }
        for (table, is_found) in seen {
            if is_found {
                self.record_conflict([table]);
            } else {
                self.record_success(table);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use statehouse_store::{Plan, Row, Step, Table, Tenant, Type};
    use std::sync::Arc;

    fn table() -> Arc<Table> {
        Table::named("seats").partition("id", Type::Int).build().unwrap()
    }

    fn insert(table: &Arc<Table>) -> Plan {
        let tenant = Tenant::new("acme").unwrap();
        Plan::of(&tenant, "op").step(Step::insert(table, [7.into()])).build().unwrap()
    }

    #[test]
    fn a_table_with_a_conflict_is_read_until_enough_batches_found_none() {
        let (table, history) = (table(), ConflictHistory::default());
        let plans = [insert(&table)];
        assert!(history.assumes_absent("seats"));
        let mut found = Batch::of(&plans);
        found.found(0, Row::new(table.clone(), Tenant::new("acme").unwrap(), vec![7.into()], 1));
        history.learn(&found);
        assert!(history.expects_conflict("seats"));
        for _ in 0..READS {
            assert!(!history.assumes_absent("seats"));
            history.learn(&Batch::of(&plans));
            assert!(!history.expects_conflict("seats"));
        }
        assert!(history.assumes_absent("seats"));
        // A row that was not read tells nothing.
        history.learn(&found);
        let mut trusting = Batch::of(&plans);
        trusting.assume_absent(|_| true);
        (0..2 * READS).for_each(|_| history.learn(&trusting));
        assert!(!history.assumes_absent("seats"));
    }
}
