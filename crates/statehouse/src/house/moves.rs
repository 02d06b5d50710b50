//! Fields that go to another table of their resource, with their values: an entity's field that becomes hot, or is so no longer.
//!
//! The column stays behind in the old table when the new one has been created. Row by row one plan writes the value to the new
//! place and empties the old one, under the version of the row that has it; so no value is moved twice by concurrent migrations, and
//! a move that was interrupted goes on with what is left. A row that says its default, or nothing, is not moved: the new place
//! says the same without it. When a pass over all rows finds nothing more, the column is dropped.

use std::collections::BTreeMap;
use std::sync::Arc;

use futures_util::future::join_all;
use statehouse_store::migration::{Difference, keep_surplus, strip};
use statehouse_store::{
    Column, Commit, Entry, EventTemplate, Guard, Ids, Plan, PlanError, Row, Scan, Schema, SchemaChange, Step,
    Store, StoreError, Table, Value,
};

use crate::product::entity;
use crate::resource::{Resource, key_text};

/// Rows of a page that are moved at once.
const AT_ONCE: usize = 32;
/// How often all rows are gone over. Each time only those are left that were written meanwhile.
const PASSES_MAX: u32 = 20;

/// All values that have to move.
#[derive(Debug)]
pub(super) struct Moves(Vec<Relocation>);

/// Columns of a resource that go from one table to the other.
#[derive(Debug)]
struct Relocation {
    /// The resource's name.
    resource: String,
    /// The table with the row itself, and the one beside it. Each has the columns that move.
    main: Arc<Table>,
    beside: Arc<Table>,
    /// The columns, as they are where the values are now.
    columns: Vec<Column>,
    /// Whether they go to the table beside, or come from it.
    is_outward: bool,
    /// The old table as it was, for those who show changes.
    was: Arc<Table>,
}

impl Moves {
    /// What has to move before the planned changes are complete.
    pub(super) fn pending(resources: &[Resource], planned: &[SchemaChange]) -> Result<Moves, StoreError> {
        let mut moves = Vec::new();
        for resource in resources {
            let Some(pair) = entity::hot_pair(resource) else { continue };
            if let Some(hot) = &pair.hot
                && let (Some(was), columns) = left_behind(planned, pair.main.name(), hot)
            {
                check(&was, &columns, hot)?;
                let main = keep_surplus(&was, &pair.main)?;
                let beside = hot.clone();
                let resource = resource.name.clone();
                moves.push(Relocation { resource, main, beside, columns, is_outward: true, was });
            }
            if let (Some(was), columns) = left_behind(planned, &pair.hot_name, &pair.main) {
                check(&was, &columns, &pair.main)?;
                let beside = match &pair.hot {
                    Some(hot) => keep_surplus(&was, hot)?,
                    None => was.clone(),
                };
                let (resource, main) = (resource.name.clone(), pair.main.clone());
                moves.push(Relocation { resource, main, beside, columns, is_outward: false, was });
            }
        }
        Ok(Moves(moves))
    }

    pub(super) fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// The moves, as changes.
    pub(super) fn changes(&self) -> Vec<SchemaChange> {
        let of = |relocation: &Relocation| {
            let to = if relocation.is_outward { &relocation.beside } else { &relocation.main };
            let change = |column: &Column| SchemaChange {
                table: relocation.was.clone(),
                difference: Difference::MoveColumn { column: column.clone(), to: to.name().to_owned() },
                statements: Vec::new(),
            };
            relocation.columns.iter().map(change).collect::<Vec<_>>()
        };
        self.0.iter().flat_map(of).collect()
    }

    /// Whether a change removes what the moves empty.
    pub(super) fn empties(&self, change: &SchemaChange) -> bool {
        let of_table = |relocation: &&Relocation| relocation.was.name() == change.table.name();
        self.0.iter().filter(of_table).any(|relocation| match &change.difference {
            Difference::DropColumn(column) => relocation.moves(&column.name),
            Difference::DropTable => relocation.empties(&change.table),
            _ => false,
        })
    }

    /// Planned changes, with the moves in the place of the removals that follow them.
    pub(super) fn shown(&self, planned: Vec<SchemaChange>) -> Vec<SchemaChange> {
        let mut shown: Vec<SchemaChange> =
            planned.into_iter().filter(|change| !self.empties(change)).collect();
        let place = shown.iter().position(SchemaChange::removes).unwrap_or(shown.len());
        shown.splice(place..place, self.changes());
        shown
    }

    /// The schema with all that is in the store and not in it, except for what the moves have emptied.
    pub(super) fn emptied(&self, schema: &Schema, planned: &[SchemaChange]) -> Result<Schema, StoreError> {
        let mut tables: BTreeMap<String, Arc<Table>> =
            schema.tables().map(|table| (table.name().to_owned(), table.clone())).collect();
        for change in planned.iter().filter(|change| change.removes()) {
            let (name, table) = (change.table.name(), &change.table);
            let kept = match self.0.iter().find(|relocation| relocation.was.name() == name) {
                Some(relocation) if relocation.empties(table) && schema.table(name).is_none() => continue,
                Some(relocation) => relocation.without_moved(table)?,
                None => table.clone(),
            };
            let kept = match schema.table(name) {
                Some(new) => keep_surplus(&kept, new)?,
                None => kept,
            };
            tables.insert(name.to_owned(), kept);
        }
        Schema::new(tables.into_values()).map_err(|error| StoreError::schema(error.table, error.why))
    }

    /// Moves the values of all rows.
    pub(super) async fn carry_out(&self, store: &dyn Store, ids: &Ids) -> Result<(), StoreError> {
        for relocation in &self.0 {
            let mut passes = 0;
            while relocation.pass(store, ids).await? > 0 {
                passes += 1;
                if passes == PASSES_MAX {
                    let why = format!(
                        "values of {} are written all the time where they were; stop the servers that run with the \
                         older blueprint, and apply again",
                        relocation.resource
                    );
                    return Err(StoreError::unavailable(why));
                }
            }
        }
        Ok(())
    }
}

/// Which columns of a table are no longer its own and another's now, and the table as it was.
fn left_behind(planned: &[SchemaChange], table: &str, other: &Table) -> (Option<Arc<Table>>, Vec<Column>) {
    let (mut was, mut columns) = (None, Vec::new());
    for change in planned.iter().filter(|change| change.table.name() == table) {
        let left: &[Column] = match &change.difference {
            Difference::DropColumn(column) => std::slice::from_ref(column),
            Difference::DropTable => change.table.other_columns(),
            _ => continue,
        };
        let taken = left.iter().filter(|column| other.column(&column.name).is_some());
        columns.extend(taken.cloned());
        was = Some(change.table.clone());
    }
    (was.filter(|_| !columns.is_empty()), columns)
}

/// Refuses columns that are another thing in their new place.
fn check(was: &Table, columns: &[Column], to: &Table) -> Result<(), StoreError> {
    for column in columns {
        let Some(new) = to.column(&column.name) else { continue };
        let why = if new.kind != column.kind {
            format!("it moves to {to}, where it is {} and no longer {}; keep its type", new.kind, column.kind)
        } else if column.required && column.default.is_none() {
            format!("it moves to {to}; first declare it as optional or with a default, and apply that")
        } else if new.default != column.default {
            format!("it moves to {to} and gets another default; do one after the other, and apply each")
        } else {
            continue;
        };
        return Err(StoreError::schema(format!("column {was}.{}", column.name), why));
    }
    Ok(())
}

/// What a column says when its value has moved: the same as in a row that never had one.
fn blank(column: &Column) -> Value {
    column.default.clone().unwrap_or(Value::Null)
}

impl Relocation {
    fn moves(&self, column: &str) -> bool {
        self.columns.iter().any(|moved| moved.name == column)
    }

    /// Whether nothing is left in the old table, as it is.
    fn empties(&self, table: &Table) -> bool {
        table.other_columns().iter().all(|column| self.moves(&column.name))
    }

    /// The old table as it is, without what has moved.
    fn without_moved(&self, was: &Table) -> Result<Arc<Table>, StoreError> {
        strip(was, |column| self.moves(column), |_| false)
    }

    /// Goes over all rows once. Returns how many had something to move.
    async fn pass(&self, store: &dyn Store, ids: &Ids) -> Result<usize, StoreError> {
        let mut found = 0;
        let mut scan = Scan::all(if self.is_outward { &self.main } else { &self.beside });
        loop {
            let page = store.scan(&scan).await?;
            let full: Vec<&Row> = page.rows.iter().filter(|row| !self.values(row).is_empty()).collect();
            found += full.len();
            for rows in full.chunks(AT_ONCE) {
                let moved = join_all(rows.iter().map(|row| self.move_row(store, ids, row))).await;
                moved.into_iter().collect::<Result<Vec<()>, StoreError>>()?;
            }
            let Some(next) = page.next else { return Ok(found) };
            scan = scan.after(next).map_err(|error| misuse(&error))?;
        }
    }

    /// What a row has to move.
    fn values(&self, row: &Row) -> Vec<(&Column, Value)> {
        let values = self.columns.iter().filter_map(|column| Some((column, row.get(&column.name)?.clone())));
        values.filter(|(column, value)| !value.is_null() && *value != blank(column)).collect()
    }

    /// Moves the values of a row. One that was written meanwhile is found by the next pass.
    async fn move_row(&self, store: &dyn Store, ids: &Ids, row: &Row) -> Result<(), StoreError> {
        let key = || row.key().iter().cloned();
        let read = Guard::version(row.version());
        let (mut main, mut beside) = match self.is_outward {
            true => (Step::update(&self.main, key()).guard(read), Step::upsert(&self.beside, key())),
            false => (Step::update(&self.main, key()), Step::update(&self.beside, key()).guard(read)),
        };
        for (column, value) in self.values(row) {
            let (there, here) = match self.is_outward {
                true => (blank(column), value),
                false => (value, blank(column)),
            };
            (main, beside) = (main.set(&column.name, there), beside.set(&column.name, here));
        }
        // The row gets another version, so readers of the log need an event.
        let event = EventTemplate::named(format!("{}.moved", self.resource)).with_row_of(0);
        let entry = Entry::about(&self.resource, key_text(row.key())).event(event);
        let plan =
            Plan::of(row.tenant(), ids.next()).step(main).step(beside).log(entry).without_rows().build();
        match store.commit(&plan.map_err(|error| misuse(&error))?).await {
            Ok(Commit::Applied(_) | Commit::Refused(_) | Commit::Fenced) => Ok(()),
            // The next pass sees what became of it.
            Err(StoreError::OutcomeUnknown { .. }) => Ok(()),
            Err(error) => Err(error),
        }
    }
}

fn misuse(error: &PlanError) -> StoreError {
    StoreError::schema("a field that moves", error.to_string())
}
