//! What has to change on the live store before it fits a schema: computed once, carried out by each engine.

use std::fmt;
use std::sync::Arc;

use crate::error::StoreError;
use crate::table::{Column, Index, LayoutNumber, LayoutRule, Schema, Table};

/// How far a migration may go.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Migrate {
    /// Say what would be done, and do nothing.
    Show,
    /// Add what is missing. What the schema no longer names stays.
    Apply,
    /// Add what is missing and remove what the schema no longer names, with its data.
    ApplyWithLoss,
}

/// One difference between the live store and the schema.
#[derive(Clone, Debug, PartialEq)]
pub enum Difference {
    /// The table is missing.
    CreateTable,
    /// A column is missing.
    AddColumn(Column),
    /// A column may be null from now on.
    RelaxColumn(Column),
    /// A column has another default for new rows.
    ChangeDefault(Column),
    /// An index is missing.
    AddIndex(Index),
    /// A number that says where rows are is recorded, or has become greater.
    SetLayout(LayoutNumber),
    /// The schema no longer names this index. Nothing is lost with it: an index can be built again.
    DropIndex(Index),
    /// The schema no longer names this column.
    DropColumn(Column),
    /// The schema no longer names this table.
    DropTable,
    /// The schema names this column in another table with the same key. No engine finds or makes this change: whoever declares
    /// both tables moves the values by plans, and drops the column when it is empty.
    MoveColumn {
        /// The column, as it was.
        column: Column,
        /// The table that it goes to.
        to: String,
    },
}

/// A difference, and what the engine does about it.
#[derive(Clone, Debug, PartialEq)]
pub struct Change {
    /// The table, as it will be (or, for a removal, as it was).
    pub table: Arc<Table>,
    /// What differs.
    pub difference: Difference,
    /// What the engine will run, readable.
    pub statements: Vec<String>,
}

impl Change {
    /// Whether data goes away with it.
    pub fn loses_data(&self) -> bool {
        matches!(self.difference, Difference::DropColumn(_) | Difference::DropTable)
    }

    /// Whether it removes something that the schema no longer names.
    pub fn removes(&self) -> bool {
        self.loses_data() || matches!(self.difference, Difference::DropIndex(_))
    }

    /// Whether it moves values from one table to another.
    pub fn moves(&self) -> bool {
        matches!(self.difference, Difference::MoveColumn { .. })
    }
}

impl fmt::Display for Change {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let table = self.table.name();
        match &self.difference {
            Difference::CreateTable => write!(f, "create table {table}"),
            Difference::AddColumn(column) => write!(f, "add column {table}.{} {}", column.name, column.kind),
            Difference::RelaxColumn(column) => write!(f, "let {table}.{} be null", column.name),
            Difference::ChangeDefault(column) => match &column.default {
                Some(default) => write!(f, "default {table}.{} to {default}", column.name),
                None => write!(f, "give {table}.{} no default", column.name),
            },
            Difference::AddIndex(index) => {
                let reach = if index.global { " across tenants" } else { "" };
                write!(f, "add index {table}.{}{reach}", index.name)
            }
            Difference::SetLayout(number) => {
                write!(f, "record `{}` of {table} as {}", number.name, number.value)
            }
            Difference::DropIndex(index) => write!(f, "drop index {table}.{}", index.name),
            Difference::DropColumn(column) => write!(f, "drop column {table}.{}, with its data", column.name),
            Difference::DropTable => write!(f, "drop table {table}, with its data"),
            Difference::MoveColumn { column, to } => {
                write!(f, "move the values of {table}.{} to {to}", column.name)
            }
        }
    }
}

/// What leads from the live tables to the wanted ones: additions first, removals last.
///
/// A difference that cannot be crossed without rewriting data (another key, another type, a column that becomes
/// required) is an error that says what to do instead.
pub fn differences(live: &Schema, wanted: &Schema) -> Result<Vec<(Arc<Table>, Difference)>, StoreError> {
    let mut additions = Vec::new();
    let mut removals = Vec::new();
    for table in wanted.tables() {
        match live.table(table.name()) {
            None => additions.push((table.clone(), Difference::CreateTable)),
            Some(old) => compare(old, table, &mut additions, &mut removals)?,
        }
    }
    for old in live.tables() {
        if wanted.table(old.name()).is_none() {
            removals.push((old.clone(), Difference::DropTable));
        }
    }
    additions.append(&mut removals);
    Ok(additions)
}

fn compare(
    old: &Arc<Table>,
    new: &Arc<Table>,
    additions: &mut Vec<(Arc<Table>, Difference)>,
    removals: &mut Vec<(Arc<Table>, Difference)>,
) -> Result<(), StoreError> {
    let mut add = |difference| additions.push((new.clone(), difference));
    let key = |table: &Table| {
        let names = |columns: &[Column]| -> Vec<(String, crate::Type)> {
            columns.iter().map(|column| (column.name.clone(), column.kind)).collect()
        };
        (names(table.partition_columns()), names(table.sort_columns()))
    };
    if key(old) != key(new) {
        let why =
            "the key is another one; a key cannot change in place: declare a new table and move the rows";
        return Err(StoreError::schema(format!("table {new}"), why));
    }
    for column in new.other_columns() {
        let place = || format!("column {new}.{}", column.name);
        let Some(before) = old.column(&column.name) else {
            if column.required && column.default.is_none() {
                let why = "it is required and has no default for the rows that exist; give it a default or make \
                           it optional";
                return Err(StoreError::schema(place(), why));
            }
            add(Difference::AddColumn(column.clone()));
            continue;
        };
        if before.kind != column.kind {
            let why = format!(
                "it is stored as {} and declared as {}; a type cannot change in place: declare a new column",
                before.kind, column.kind
            );
            return Err(StoreError::schema(place(), why));
        }
        match (before.required, column.required) {
            (true, false) => add(Difference::RelaxColumn(column.clone())),
            (false, true) => {
                let why = "it may be null in the live store and is declared as required; keep it optional, or \
                           declare a new column with a default";
                return Err(StoreError::schema(place(), why));
            }
            _ => {}
        }
        if before.default != column.default {
            add(Difference::ChangeDefault(column.clone()));
        }
    }
    for number in new.layout() {
        if old.layout_number(&number.name) != Some(number) {
            check_layout(old.layout_number(&number.name), number, new)?;
            add(Difference::SetLayout(number.clone()));
        }
    }
    for index in new.indexes() {
        match old.index(&index.name) {
            None => add(Difference::AddIndex(index.clone())),
            Some(before) if before != index => {
                let why = "it is declared otherwise than in the live store; give the new index a new name";
                return Err(StoreError::schema(format!("index {new}.{}", index.name), why));
            }
            Some(_) => {}
        }
    }
    for index in old.indexes() {
        if new.index(&index.name).is_none() {
            removals.push((old.clone(), Difference::DropIndex(index.clone())));
        }
    }
    for column in old.other_columns() {
        if new.column(&column.name).is_none() {
            removals.push((old.clone(), Difference::DropColumn(column.clone())));
        }
    }
    Ok(())
}

/// Refuses a layout number with which rows that exist would no longer be found. A table of an older version of the program has
/// none recorded.
fn check_layout(old: Option<&LayoutNumber>, new: &LayoutNumber, table: &Table) -> Result<(), StoreError> {
    let Some(old) = old else { return Ok(()) };
    let (name, before, after) = (&new.name, old.value, new.value);
    let why = match new.rule {
        LayoutRule::Grows if after < before => format!(
            "`{name}` is {before} in the store and {after} in the blueprint; rows that are spread over {before} would \
             no longer be found: write `{name} = {before}` or more, or declare a new resource and move the rows"
        ),
        LayoutRule::Fixed if after != before => format!(
            "`{name}` is {before} in the store and {after} in the blueprint; what exists was made with {before}, so \
             it cannot change: keep it, or declare a new resource"
        ),
        LayoutRule::Grows | LayoutRule::Fixed => return Ok(()),
    };
    Err(StoreError::schema(format!("table {table}"), why))
}

/// The live table after a migration that keeps what the schema no longer names.
///
/// A column that stays behind must not stop inserts that do not know it.
pub fn keep_surplus(old: &Table, new: &Arc<Table>) -> Result<Arc<Table>, StoreError> {
    let surplus: Vec<&Column> =
        old.other_columns().iter().filter(|column| new.column(&column.name).is_none()).collect();
    if let Some(column) = surplus.iter().find(|column| column.required && column.default.is_none()) {
        let why = "it is required in the live store and no longer declared, so inserts would fail; keep it \
                   declared, or remove it with its data";
        return Err(StoreError::schema(format!("column {new}.{}", column.name), why));
    }
    let mut builder = Table::named(new.name());
    for column in new.partition_columns() {
        builder = builder.partition(&column.name, column.kind);
    }
    for column in new.sort_columns() {
        builder = builder.sort(&column.name, column.kind);
    }
    for column in new.other_columns().iter().chain(surplus) {
        builder = builder.declared(column.clone());
    }
    let kept = old.indexes().iter().filter(|index| new.index(&index.name).is_none());
    for index in new.indexes().iter().chain(kept) {
        builder = builder.declared_index(index.clone());
    }
    let kept = old.layout().iter().filter(|number| new.layout_number(&number.name).is_none());
    for number in new.layout().iter().chain(kept) {
        builder = builder.declared_layout(number.clone());
    }
    builder.build().map_err(|error| StoreError::schema(error.table, error.why))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::value::Type;

    fn schema(tables: impl IntoIterator<Item = crate::table::Builder>) -> Schema {
        Schema::new(tables.into_iter().map(|table| table.build().unwrap())).unwrap()
    }

    fn base() -> crate::table::Builder {
        Table::named("t").partition("id", Type::Int).required("a", Type::Text)
    }

    fn check(live: crate::table::Builder, wanted: crate::table::Builder, expect: &str) {
        let text = match differences(&schema([live]), &schema([wanted])) {
            Ok(list) => list
                .into_iter()
                .map(|(table, difference)| Change { table, difference, statements: Vec::new() }.to_string())
                .collect::<Vec<_>>()
                .join("; "),
            Err(error) => format!("error: {error}"),
        };
        assert!(text.contains(expect), "{text}");
    }

    #[test]
    fn additive_changes_are_found_and_the_rest_is_refused_with_advice() {
        check(base(), base(), "");
        check(base(), base().optional("b", Type::Int), "add column t.b int");
        check(base(), base().defaulted("b", Type::Int, 1), "add column t.b int");
        check(base(), base().required("b", Type::Int), "error: column t.b does not fit");
        check(base(), base().index("by_a", &["a"], &[]), "add index t.by_a");
        check(base(), base().global_index("by_a", &["a"], &[]), "add index t.by_a across tenants");
        check(
            base().index("by_a", &["a"], &[]),
            base().global_index("by_a", &["a"], &[]),
            "error: index t.by_a does not fit",
        );
        check(base().optional("b", Type::Int), base(), "drop column t.b, with its data");
        check(
            base(),
            Table::named("t").partition("id", Type::Int).optional("a", Type::Text),
            "let t.a be null",
        );
        check(base(), Table::named("t").partition("id", Type::Text).required("a", Type::Text), "another one");
        check(
            base(),
            Table::named("t").partition("id", Type::Int).required("a", Type::Int),
            "stored as text",
        );
        check(base(), Table::named("u").partition("id", Type::Int), "create table u; drop table t");
        check(base(), base().growing("buckets", 4), "record `buckets` of t as 4");
        check(base().growing("buckets", 4), base().growing("buckets", 8), "record `buckets` of t as 8");
        check(base().growing("buckets", 4), base().growing("buckets", 2), "write `buckets = 4` or more");
        check(base().growing("buckets", 4), base(), "");
        check(base().fixed("bits", 4), base().fixed("bits", 5), "error: table t does not fit");
    }
}
