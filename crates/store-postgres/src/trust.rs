//! Rows that are not looked for, because they are to be inserted.
//!
//! A step that inserts a row, or demands that there is none, expects to find nothing. A look for it would find nothing, lock
//! nothing, and prove nothing: somebody else may insert the row in the next moment, and the primary key is the judge in any
//! case ([`crate::batch`]). So a batch takes absence for granted where the first of its steps on a row demands it, and looks
//! for all other rows only. Of a post that goes to eighty readers, eighty rows less are looked for.
//!
//! **Why it is right.** What was taken for granted is proved, or not relied on:
//! - Where a plan that is applied names such a row, the row, or a placeholder for it, is inserted. If it is there after all,
//!   the insert fails, and nothing was done.
//! - Where a plan is refused by a step that comes before its steps on such rows, they have nothing to do with it.
//! - Where it is refused by a later one, or fails, the answer might name the wrong step. It is not given
//!   ([`Batch::unproved`]), and nothing is written.
//!
//! In the first and the last case the batch is run again, and this time looks for every row.
//!
//! **What it costs to be wrong** is one run of a batch, for all that are in it. So the tables are remembered in which a row was
//! found that should not have been there, or of which it had to be known: for the next [`LOOKS`] batches that insert into them,
//! there is a look first. Where plans are refused all the time, as where callers compete, there always is.

use std::collections::HashMap;
use std::sync::{Mutex, MutexGuard, PoisonError};

use crate::batch::Batch;

/// Batches with a look in which nothing was found, before absence is taken for granted again.
const LOOKS: u32 = 64;

/// The tables in which rows are looked for although they are to be inserted, with the looks that are left to be made. Likewise
/// those of which several rows are judged before they are written ([`crate::compile::Way`]).
#[derive(Debug, Default)]
pub(crate) struct Doubts(Mutex<HashMap<String, u32>>);

impl Doubts {
    fn lock(&self) -> MutexGuard<'_, HashMap<String, u32>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Whether absence can be taken for granted in a table.
    pub(crate) fn trusts(&self, table: &str) -> bool {
        !self.lock().contains_key(table)
    }

    /// Whether the last look in a table found what should not have been there. Then the next statement that fails if
    /// something is ([`crate::compile`]) would be tried in vain.
    pub(crate) fn expects(&self, table: &str) -> bool {
        self.lock().get(table) == Some(&LOOKS)
    }

    /// Has rows looked for in these tables.
    pub(crate) fn raise<'t>(&self, tables: impl IntoIterator<Item = &'t str>) {
        self.lock().extend(tables.into_iter().map(|table| (table.to_owned(), LOOKS)));
    }

    /// One of those that are in doubt went well.
    pub(crate) fn lessen(&self, table: &str) {
        let mut left = self.lock();
        if let Some(looks) = left.get_mut(table) {
            *looks -= 1;
            if *looks == 0 {
                left.remove(table);
            }
        }
    }

    /// Learns from the rows that a batch has looked for, and was to insert.
    pub(crate) fn learn(&self, batch: &Batch<'_>) {
        let mut seen: HashMap<&str, bool> = HashMap::new();
        for (table, is_found) in batch.doubted() {
            *seen.entry(table).or_default() |= is_found;
        }
        for (table, is_found) in seen {
            if is_found {
                self.raise([table]);
            } else {
                self.lessen(table);
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
    fn a_row_that_was_there_is_looked_for_until_it_was_missing_often() {
        let (table, doubts) = (table(), Doubts::default());
        let plans = [insert(&table)];
        assert!(doubts.trusts("seats"));
        let mut found = Batch::of(&plans);
        found.found(0, Row::new(table.clone(), Tenant::new("acme").unwrap(), vec![7.into()], 1));
        doubts.learn(&found);
        assert!(doubts.expects("seats"));
        for _ in 0..LOOKS {
            assert!(!doubts.trusts("seats"));
            doubts.learn(&Batch::of(&plans));
            assert!(!doubts.expects("seats"));
        }
        assert!(doubts.trusts("seats"));
        // What was not looked for tells nothing.
        doubts.learn(&found);
        let mut trusting = Batch::of(&plans);
        trusting.trust(|_| true);
        (0..2 * LOOKS).for_each(|_| doubts.learn(&trusting));
        assert!(!doubts.trusts("seats"));
    }
}
