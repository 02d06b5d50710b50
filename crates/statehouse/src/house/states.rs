//! States that a workflow no longer has, and the rows that are in them.
//!
//! The states of each workflow are recorded in the store. If the blueprint has others, all rows are looked at before a migration changes
//! anything: rows in a state that is gone are counted, and the blueprint is refused unless it says what they become. They are moved by
//! plans of their own, each under the version of its row, so that concurrent migrations move no row twice, and one that was interrupted
//! goes on with what is left. The states are recorded when no row is left to be moved.

use std::collections::BTreeMap;

use futures_util::future::join_all;
use statehouse_store::migration::Difference;
use statehouse_store::{Commit, Ids, PlanError, Row, Scan, SchemaChange, Store, StoreError};

use super::constraints::live_part;
use crate::declare::table::STATE;
use crate::product::workflow::StateMover;
use crate::resource::Resource;

/// Rows of a page that are moved at once.
const AT_ONCE: usize = 32;
/// How often all rows are gone over. Each time only those are left that were written meanwhile.
const PASSES_MAX: u32 = 20;

/// The workflows whose states are others than the store has a record of.
#[derive(Debug, Default)]
pub(super) struct StateChanges {
    moves: Vec<StateMove>,
    /// What is to be recorded: a table, and its states.
    pub(super) unrecorded: Vec<(String, String)>,
}

/// Rows of one workflow in states that it no longer has.
#[derive(Debug)]
struct StateMove {
    mover: StateMover,
    /// By state.
    rows: BTreeMap<String, u64>,
}

#[expect(clippy::needless_pass_by_value, reason = "it is what `map_err` gives")]
fn misuse(error: PlanError) -> StoreError {
    StoreError::schema("a state that moves", error.to_string())
}

impl StateChanges {
    /// Compares the states of workflows with what is recorded, takes that out of the records, and counts rows where they differ.
    pub(super) async fn pending(
        store: &dyn Store,
        resources: &[Resource],
        planned: &[SchemaChange],
        recorded: &mut BTreeMap<(String, String), String>,
    ) -> Result<StateChanges, StoreError> {
        let mut changes = StateChanges::default();
        for mover in resources.iter().filter_map(StateMover::of) {
            let table = mover.table().name().to_owned();
            let states = mover.chart.states.join(" ");
            if recorded.remove(&(table.clone(), STATE.to_owned())).as_ref() == Some(&states) {
                continue;
            }
            changes.unrecorded.push((table, states));
            let Some(live) = live_part(mover.table(), planned)? else { continue };
            let mut rows: BTreeMap<String, u64> = BTreeMap::new();
            let mut scan = Scan::all(&live);
            loop {
                let page = store.scan(&scan).await?;
                for state in page.rows.iter().filter_map(|row| mover.removed_state(row)) {
                    *rows.entry(state.to_owned()).or_default() += 1;
                }
                let Some(next) = page.next else { break };
                scan = scan.after(next).map_err(misuse)?;
            }
            if !rows.is_empty() {
                changes.moves.push(StateMove { mover, rows });
            }
        }
        Ok(changes)
    }

    pub(super) fn is_empty(&self) -> bool {
        self.moves.is_empty()
    }

    /// Refuses rows in states that the blueprint neither has nor maps.
    pub(super) fn check(&self) -> Result<(), StoreError> {
        for StateMove { mover, rows } in &self.moves {
            let is_left = |(state, _): &(&String, &u64)| mover.target(state).is_none();
            let left: Vec<String> =
                rows.iter().filter(is_left).map(|(state, count)| format!("{state} ({count} rows)")).collect();
            if left.is_empty() {
                continue;
            }
            let name = &mover.chart.name;
            let why = format!(
                "rows are in states that `workflow.{name}` no longer has: {}. Nothing was changed: say what they become, \
                 `[workflow.{name}.moved]` and `OLD = \"NEW\"`",
                left.join(", ")
            );
            return Err(StoreError::schema(format!("table {}", mover.table().name()), why));
        }
        Ok(())
    }

    /// The moves, as changes.
    pub(super) fn changes(&self) -> Vec<SchemaChange> {
        let of = |one: &StateMove| {
            let mover = one.mover.clone();
            let change = move |(from, rows): (&String, &u64)| SchemaChange {
                table: mover.table().clone(),
                difference: Difference::MoveRows {
                    from: from.clone(),
                    to: mover.target(from).unwrap_or_default().to_owned(),
                    rows: *rows,
                },
                statements: Vec::new(),
            };
            one.rows.iter().map(change).collect::<Vec<_>>()
        };
        self.moves.iter().flat_map(of).collect()
    }

    /// Moves the rows.
    pub(super) async fn carry_out(&self, store: &dyn Store, ids: &Ids) -> Result<(), StoreError> {
        for StateMove { mover, .. } in &self.moves {
            let mut passes = 0;
            while pass(mover, store, ids).await? > 0 {
                passes += 1;
                if passes == PASSES_MAX {
                    let why = format!(
                        "rows of {} get into removed states all the time; stop the servers that run with the older blueprint, \
                         and apply again",
                        mover.chart.name
                    );
                    return Err(StoreError::unavailable(why));
                }
            }
        }
        Ok(())
    }
}

/// Goes over all rows once. Returns how many were to be moved.
async fn pass(mover: &StateMover, store: &dyn Store, ids: &Ids) -> Result<usize, StoreError> {
    let mut found = 0;
    let mut scan = Scan::all(mover.table());
    loop {
        let page = store.scan(&scan).await?;
        let removed: Vec<&Row> = page.rows.iter().filter(|row| mover.removed_state(row).is_some()).collect();
        found += removed.len();
        for rows in removed.chunks(AT_ONCE) {
            let moved = join_all(rows.iter().map(|row| move_row(mover, store, ids, row))).await;
            moved.into_iter().collect::<Result<Vec<()>, StoreError>>()?;
        }
        let Some(next) = page.next else { return Ok(found) };
        scan = scan.after(next).map_err(misuse)?;
    }
}

/// Moves a row. One that was written meanwhile is found by the next pass.
async fn move_row(mover: &StateMover, store: &dyn Store, ids: &Ids, row: &Row) -> Result<(), StoreError> {
    let Some(plan) = mover.plan(row, &ids.next()).map_err(misuse)? else {
        let why = format!("{row} is in a state that the blueprint does not map; add it to `moved`");
        return Err(StoreError::schema(format!("table {}", mover.table().name()), why));
    };
    match store.commit(&plan).await {
        Ok(Commit::Applied(_) | Commit::Refused(_) | Commit::Fenced)
        // The next pass sees what became of it.
        | Err(StoreError::OutcomeUnknown { .. }) => Ok(()),
        Err(error) => Err(error),
    }
}
