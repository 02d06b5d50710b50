//! Giving up generations whose tables a migration is about to create (I8).
//!
//! A table that has to be created has no rows, whatever the row of the house says was read into it: it was dropped since, and
//! comes back empty. So does a column. The generations are given up *before* the migration. If the process dies between the
//! two, the next migration finds nothing to give up, and nothing was lost but generations that could not be read anyway.
//!
//! Several processes may migrate at once. Each reads the state, then what the migration would do, and changes the state only if
//! it is still the one that was read. A process that was overtaken by a migration, and by a build that was begun after it, looks
//! again and finds the tables.

use statehouse_store::migration::Difference;
use statehouse_store::{Migrate, Schema, SchemaChange, Store, StoreError};

use super::Projector;
use super::build::{change_state, read_state};
use super::state::{Generation, PROJECTIONS};

/// How often the state may be another one before the migration is given up.
const RACES_MAX: u32 = 20;

/// Gives up the generations of a projection that a migration to this schema would find without their rows. It is planned to
/// make these changes.
pub(crate) async fn restart(
    store: &dyn Store,
    schema: &Schema,
    planned: &[SchemaChange],
    projector: &dyn Projector,
) -> Result<(), StoreError> {
    // The table of the states itself may have to be created; then there are none.
    if lost(planned, projector) == LostRecords::Nothing || creates(planned, PROJECTIONS) {
        return Ok(());
    }
    for _ in 0..RACES_MAX {
        let state = read_state(store, projector.name()).await?;
        let planned = store.migrate(schema, Migrate::Show).await?;
        let definition = projector.definition();
        let after = match lost(&planned, projector) {
            LostRecords::Nothing => None,
            LostRecords::Columns => {
                state.without(|generation: &Generation| generation.definition == definition)
            }
            LostRecords::Rows => state.without(|_| true),
        };
        match after {
            None => return Ok(()),
            Some(after) if change_state(store, projector.name(), &state, &after, None).await? => {
                return Ok(());
            }
            Some(_) => {}
        }
    }
    let why = format!("the generations of {} change all the time", projector.name());
    Err(StoreError::unavailable(why))
}

/// What generations have lost.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum LostRecords {
    Nothing,
    /// Columns that the projector fills.
    Columns,
    /// All rows of a table.
    Rows,
}

fn lost(planned: &[SchemaChange], projector: &dyn Projector) -> LostRecords {
    let (tables, truths) = (projector.tables(), projector.truths());
    let is_own = |change: &&SchemaChange| tables.iter().any(|table| table.name() == change.table.name());
    if tables.iter().chain(&truths).any(|table| creates(planned, table.name())) {
        return LostRecords::Rows;
    }
    match planned.iter().filter(is_own).any(|change| matches!(change.difference, Difference::AddColumn(_))) {
        true => LostRecords::Columns,
        false => LostRecords::Nothing,
    }
}

fn creates(planned: &[SchemaChange], table: &str) -> bool {
    planned.iter().any(|change| change.table.name() == table && change.difference == Difference::CreateTable)
}
