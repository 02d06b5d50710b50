//! Constraints of fields, and the rows that exist already.
//!
//! A constraint is checked when a row is written. One that is new, or other than before, is checked on all rows before a migration
//! changes anything; rows that violate it are listed. What was checked is recorded in the store, so that it is checked once. Servers
//! with an older blueprint can still write rows that violate it until they are stopped.

use std::collections::BTreeMap;
use std::sync::Arc;

use statehouse_store::migration::{Difference, strip};
use statehouse_store::{
    Commit, Ids, Plan, PlanError, Row, Scan, SchemaChange, Step, Store, StoreError, Table,
};

use super::fill::{FILLED, Fills};
use super::states::StateChanges;
use crate::declare::FieldLimits;
use crate::declare::table::STATE;
use crate::form::Form;
use crate::resource::Resource;
use crate::system;

/// How many rows an error lists.
pub(super) const LISTED_MAX: usize = 10;

/// The constraints of one column.
#[derive(Debug)]
struct ColumnLimits {
    table: Arc<Table>,
    column: String,
    limits: FieldLimits,
}

/// What the blueprint constrains, beside what the store has a record of.
#[derive(Debug)]
pub(super) struct ConstraintChanges {
    /// Those that are new, or other than before.
    changed: Vec<ColumnLimits>,
    /// Tables and columns that are constrained no longer.
    gone: Vec<(String, String)>,
    /// Constraints between rows that are new.
    pub(super) fills: Fills,
    /// States of workflows that are others than before.
    pub(super) states: StateChanges,
}

fn misuse(error: &PlanError) -> StoreError {
    StoreError::schema(system::CONSTRAINTS, error.to_string())
}

fn record_table() -> Result<Arc<Table>, StoreError> {
    system::constraints().map_err(|error| StoreError::schema(error.table, error.why))
}

/// The constraints of a house's columns. Forms of inputs have them.
fn declared(resources: &[Resource]) -> Vec<ColumnLimits> {
    let mut found: Vec<ColumnLimits> = Vec::new();
    for resource in resources {
        for property in resource.actions.iter().flat_map(|action| &action.input) {
            let Form::Limited(limits) = &property.form else { continue };
            let has = |table: &&Arc<Table>| {
                table.column(&property.name).is_some_and(|column| column.kind == limits.kind)
            };
            for table in resource.tables.iter().filter(has) {
                let is_same =
                    |one: &ColumnLimits| one.table.name() == table.name() && one.column == property.name;
                if !found.iter().any(is_same) {
                    let (table, column) = (table.clone(), property.name.clone());
                    found.push(ColumnLimits { table, column, limits: (**limits).clone() });
                }
            }
        }
    }
    found
}

impl ConstraintChanges {
    /// Compares what the blueprint constrains with what was checked before.
    pub(super) async fn read(
        store: &dyn Store,
        resources: &[Resource],
        planned: &[SchemaChange],
    ) -> Result<ConstraintChanges, StoreError> {
        let mut recorded = read_recorded(store).await?;
        let fills = Fills::pending(store, resources, planned, &mut recorded).await?;
        let states = StateChanges::pending(store, resources, planned, &mut recorded).await?;
        let mut changed = Vec::new();
        for one in declared(resources) {
            let before = recorded.remove(&(one.table.name().to_owned(), one.column.clone()));
            if before != Some(one.limits.describe()) {
                changed.push(one);
            }
        }
        Ok(ConstraintChanges { changed, gone: recorded.into_keys().collect(), fills, states })
    }

    /// Refuses constraints that rows violate. The planned changes were not made yet.
    pub(super) async fn check(&self, store: &dyn Store, planned: &[SchemaChange]) -> Result<(), StoreError> {
        self.states.check()?;
        let mut tables: BTreeMap<&str, Vec<&ColumnLimits>> = BTreeMap::new();
        for one in &self.changed {
            tables.entry(one.table.name()).or_default().push(one);
        }
        for constraints in tables.into_values() {
            let Some(first) = constraints.first() else { continue };
            let Some(live) = live_part(&first.table, planned)? else { continue };
            let named = |column: &str| match live.column(column) {
                Some(_) => Some(column.to_owned()),
                None => first.table.renamed_from(column).map(str::to_owned),
            };
            let constraints: Vec<(String, &ColumnLimits)> =
                constraints.iter().filter_map(|one| Some((named(&one.column)?, *one))).collect();
            let violations = violations(store, &live, &constraints).await?;
            if !violations.is_empty() {
                let more = if violations.len() > LISTED_MAX { "; and more" } else { "" };
                let listed: Vec<String> = violations.into_iter().take(LISTED_MAX).collect();
                let why = format!(
                    "rows violate a new constraint: {}{more}. Nothing was changed: correct these rows, or change the \
                     constraint",
                    listed.join("; ")
                );
                return Err(StoreError::schema(format!("table {}", first.table), why));
            }
        }
        Ok(())
    }

    /// Records what was checked.
    pub(super) async fn record(&self, store: &dyn Store, ids: &Ids) -> Result<(), StoreError> {
        let table = record_table()?;
        let Some(tenant) = system::tenant() else { return Ok(()) };
        let changed = self.changed.iter().map(|one| {
            Step::upsert(&table, [one.table.name().into(), one.column.as_str().into()])
                .set("limits", one.limits.describe())
        });
        let gone = self
            .gone
            .iter()
            .map(|(of, column)| Step::delete(&table, [of.as_str().into(), column.as_str().into()]));
        let filled = self.fills.unrecorded.iter().map(|(of, by)| {
            Step::upsert(&table, [of.as_str().into(), by.as_str().into()]).set("limits", FILLED)
        });
        let states = self.states.unrecorded.iter().map(|(of, states)| {
            Step::upsert(&table, [of.as_str().into(), STATE.into()]).set("limits", states.as_str())
        });
        for step in changed.chain(filled).chain(states).chain(gone) {
            let plan = Plan::of(&tenant, ids.next()).step(step).build().map_err(|error| misuse(&error))?;
            match store.commit(&plan).await {
                // What is not recorded is checked once more.
                Ok(Commit::Applied(_) | Commit::Refused(_) | Commit::Fenced)
                | Err(StoreError::OutcomeUnknown { .. }) => {}
                Err(error) => return Err(error),
            }
        }
        Ok(())
    }
}

/// What was checked: table and column, and the constraints in words.
async fn read_recorded(store: &dyn Store) -> Result<BTreeMap<(String, String), String>, StoreError> {
    let table = record_table()?;
    let mut recorded = BTreeMap::new();
    let mut scan = Scan::all(&table);
    loop {
        let page = match store.scan(&scan).await {
            Ok(page) => page,
            // The table was not created yet.
            Err(StoreError::Schema { .. }) => return Ok(recorded),
            Err(error) => return Err(error),
        };
        for row in &page.rows {
            let text = |column: &str| row.get_text(column).map(str::to_owned);
            recorded.insert((text("of_table")?, text("of_column")?), text("limits")?);
        }
        let Some(next) = page.next else { return Ok(recorded) };
        scan = scan.after(next).map_err(|error| misuse(&error))?;
    }
}

/// The part of a table that is there before the planned changes; nothing of a table that is created.
pub(super) fn live_part(table: &Table, planned: &[SchemaChange]) -> Result<Option<Arc<Table>>, StoreError> {
    let own = || planned.iter().filter(|change| change.table.name() == table.name());
    if own().any(|change| change.difference == Difference::CreateTable) {
        return Ok(None);
    }
    // A table with a column that gets another name is planned as it was.
    let was = own().find(|change| matches!(change.difference, Difference::RenameColumn { .. }));
    if let Some(change) = was {
        return Ok(Some(change.table.clone()));
    }
    let is_new = |name: &str| {
        own().any(|change| matches!(&change.difference, Difference::AddColumn(column) if column.name == name))
    };
    strip(table, is_new, |_| true).map(Some)
}

/// Rows that violate a constraint, and why: at most one more than is listed.
async fn violations(
    store: &dyn Store,
    live: &Arc<Table>,
    constraints: &[(String, &ColumnLimits)],
) -> Result<Vec<String>, StoreError> {
    let violated = |row: &Row| {
        constraints.iter().find_map(|(column, one)| {
            let why = one.limits.check(row.get(column)?).err()?;
            Some(format!("{row}: {column}: {why}"))
        })
    };
    let mut found = Vec::new();
    let mut scan = Scan::all(live);
    loop {
        let page = store.scan(&scan).await?;
        found.extend(page.rows.iter().filter_map(violated));
        let Some(next) = page.next.filter(|_| found.len() <= LISTED_MAX) else { return Ok(found) };
        scan = scan.after(next).map_err(|error| misuse(&error))?;
    }
}
