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
    /// A column gets another name, and keeps its values.
    RenameColumn {
        /// The column, as it was.
        column: Column,
        /// Its name from now on.
        to: String,
    },
    /// A column may be null from now on. Also for a required column that the schema no longer names, which must not stop inserts.
    RelaxColumn(Column),
    /// A column may not be null from now on. Rows that have null get the column's default. If it has none, they are an error.
    RequireColumn(Column),
    /// A column has another default for new rows.
    ChangeDefault(Column),
    /// An index is missing.
    AddIndex(Index),
    /// A number that says where rows are is recorded, or has become greater.
    SetLayout {
        /// The number.
        number: LayoutNumber,
        /// What is recorded already, if anything is.
        before: Option<i64>,
    },
    /// The schema no longer names this index. Nothing is lost with it: an index can be built again.
    DropIndex(Index),
    /// The schema no longer names this column.
    DropColumn(Column),
    /// The schema no longer names this table.
    DropTable,
    /// The schema names this column in another table with the same key. No engine finds or makes this change: the caller that declares
    /// both tables moves the values by plans, and drops the column when it is empty.
    MoveColumn {
        /// The column, as it was.
        column: Column,
        /// The table that it goes to.
        to: String,
    },
    /// The table gets rows that follow from those of another table. No engine finds or makes this change: the caller that declares both
    /// tables writes the rows by plans.
    FillTable {
        /// The table with the rows.
        from: String,
    },
    /// Rows in a state that a definition no longer has get another one. No engine finds or makes this change: the caller that declares the
    /// states changes the rows by plans.
    MoveRows {
        /// The state that there is no more.
        from: String,
        /// What the rows become.
        to: String,
        /// How many rows there are.
        rows: u64,
    },
}

/// A difference, and what the engine does about it.
#[derive(Clone, Debug, PartialEq)]
pub struct SchemaChange {
    /// The table, as it will be (or, for a removal, as it was).
    pub table: Arc<Table>,
    /// What differs.
    pub difference: Difference,
    /// What the engine will run, readable.
    pub statements: Vec<String>,
}

impl SchemaChange {
    /// Whether data goes away with it.
    pub fn loses_data(&self) -> bool {
        matches!(self.difference, Difference::DropColumn(_) | Difference::DropTable)
    }

    /// Whether it removes something that the schema no longer names.
    pub fn removes(&self) -> bool {
        is_removal(&self.difference)
    }

    /// Whether an older blueprint fits the store again after it, without loss. A greater layout number never becomes smaller, and
    /// what was removed or moved is not where an older blueprint looks for it.
    pub fn is_reversible(&self) -> bool {
        match &self.difference {
            Difference::CreateTable
            | Difference::AddColumn(_)
            | Difference::RelaxColumn(_)
            | Difference::RequireColumn(_)
            | Difference::ChangeDefault(_)
            | Difference::AddIndex(_) => true,
            Difference::SetLayout { before, .. } => before.is_none(),
            Difference::DropIndex(_)
            | Difference::DropColumn(_)
            | Difference::DropTable
            | Difference::RenameColumn { .. }
            | Difference::MoveColumn { .. }
            | Difference::FillTable { .. }
            | Difference::MoveRows { .. } => false,
        }
    }

    /// The name of what it removes: `table`, `table.column` or `table.index`.
    pub fn removed(&self) -> Option<String> {
        let table = self.table.name();
        match &self.difference {
            Difference::DropTable => Some(table.to_owned()),
            Difference::DropColumn(column) => Some(format!("{table}.{}", column.name)),
            Difference::DropIndex(index) => Some(format!("{table}.{}", index.name)),
            _ => None,
        }
    }

    /// Whether it moves values from one table to another.
    pub fn moves(&self) -> bool {
        matches!(self.difference, Difference::MoveColumn { .. })
    }
}

impl fmt::Display for SchemaChange {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let table = self.table.name();
        match &self.difference {
            Difference::CreateTable => write!(f, "create table {table}"),
            Difference::AddColumn(column) => write!(f, "add column {table}.{} {}", column.name, column.kind),
            Difference::RenameColumn { column, to } => {
                write!(f, "rename column {table}.{} to {to}", column.name)
            }
            Difference::RelaxColumn(column) => write!(f, "let {table}.{} be null", column.name),
            Difference::RequireColumn(column) => match &column.default {
                Some(default) => {
                    write!(f, "require {table}.{}, with {default} where it is null", column.name)
                }
                None => write!(f, "require {table}.{}", column.name),
            },
            Difference::ChangeDefault(column) => match &column.default {
                Some(default) => write!(f, "default {table}.{} to {default}", column.name),
                None => write!(f, "give {table}.{} no default", column.name),
            },
            Difference::AddIndex(index) => {
                let reach = if index.global { " across tenants" } else { "" };
                write!(f, "add index {table}.{}{reach}", index.name)
            }
            Difference::SetLayout { number, .. } => {
                write!(f, "record `{}` of {table} as {}", number.name, number.value)
            }
            Difference::DropIndex(index) => write!(f, "drop index {table}.{}", index.name),
            Difference::DropColumn(column) => write!(f, "drop column {table}.{}, with its data", column.name),
            Difference::DropTable => write!(f, "drop table {table}, with its data"),
            Difference::MoveColumn { column, to } => {
                write!(f, "move the values of {table}.{} to {to}", column.name)
            }
            Difference::FillTable { from } => write!(f, "fill {table} from the rows of {from}"),
            Difference::MoveRows { from, to, rows } => {
                write!(f, "take the rows of {table} that are {from} to {to}: there are {rows}")
            }
        }
    }
}

fn is_removal(difference: &Difference) -> bool {
    matches!(difference, Difference::DropTable | Difference::DropColumn(_) | Difference::DropIndex(_))
}

/// The differences that a migration makes, or, for [`Migrate::Show`], all of them.
pub fn planned(
    live: &Schema,
    wanted: &Schema,
    how: Migrate,
) -> Result<Vec<(Arc<Table>, Difference)>, StoreError> {
    let mut found = differences(live, wanted)?;
    found.retain(|(table, difference)| match (how, difference) {
        (Migrate::Show, _) => true,
        (Migrate::Apply, difference) => !is_removal(difference),
        // What is removed need not be relaxed first.
        (Migrate::ApplyWithLoss, Difference::RelaxColumn(column)) => {
            wanted.table(table.name()).is_some_and(|table| table.column(&column.name).is_some())
        }
        (Migrate::ApplyWithLoss, _) => true,
    });
    Ok(found)
}

/// What leads from the live tables to the wanted ones: additions first, removals last.
///
/// A difference that cannot be crossed without rewriting data (another key, another type) is an error that says what to do
/// instead. Whether rows allow a column to become required is for the engine to say ([`null_rows`]).
pub fn differences(live: &Schema, wanted: &Schema) -> Result<Vec<(Arc<Table>, Difference)>, StoreError> {
    let mut additions = Vec::new();
    let mut removals = Vec::new();
    for table in wanted.tables() {
        match live.table(table.name()) {
            None => additions.push((table.clone(), Difference::CreateTable)),
            Some(old) => {
                additions.extend(renames(old, table).map(|(column, to)| {
                    (old.clone(), Difference::RenameColumn { column: column.clone(), to: to.to_owned() })
                }));
                compare(&renamed(old, table)?, table, &mut additions, &mut removals)?;
            }
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
    // Behind columns that are added: the indexes over it may be built again, and list these.
    let mut required = Vec::new();
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
            (false, true) => required.push(Difference::RequireColumn(column.clone())),
            _ => {}
        }
        if before.default != column.default {
            add(Difference::ChangeDefault(column.clone()));
        }
    }
    required.into_iter().for_each(&mut add);
    for number in new.layout() {
        let before = old.layout_number(&number.name);
        if before != Some(number) {
            check_layout(before, number, new)?;
            let before = before.map(|before| before.value);
            add(Difference::SetLayout { number: number.clone(), before });
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
            if stops_inserts(column) {
                additions.push((new.clone(), Difference::RelaxColumn(relaxed(column))));
            }
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

/// Which columns of a live table get another name, and which.
fn renames<'t>(old: &'t Table, new: &'t Table) -> impl Iterator<Item = (&'t Column, &'t str)> {
    new.other_columns().iter().filter(|column| old.column(&column.name).is_none()).filter_map(|column| {
        let former = new.renamed_from(&column.name)?;
        let former = old.other_columns().iter().find(|old| old.name == former)?;
        Some((former, column.name.as_str()))
    })
}

/// The live table with the new names of its columns.
fn renamed(old: &Arc<Table>, new: &Table) -> Result<Arc<Table>, StoreError> {
    let names: Vec<(&str, &str)> = renames(old, new).map(|(column, to)| (column.name.as_str(), to)).collect();
    if names.is_empty() {
        return Ok(old.clone());
    }
    let name = |name: &str| {
        let found = names.iter().find(|(former, _)| *former == name);
        found.map_or(name, |(_, to)| to).to_owned()
    };
    let mut builder = Table::named(old.name());
    for column in old.partition_columns() {
        builder = builder.partition(&column.name, column.kind);
    }
    for column in old.sort_columns() {
        builder = builder.sort(&column.name, column.kind);
    }
    for column in old.other_columns() {
        builder = builder.declared(Column { name: name(&column.name), ..column.clone() });
    }
    for index in old.indexes() {
        let of = |columns: &[String]| columns.iter().map(|column| name(column)).collect();
        let (partition, sort) = (of(&index.partition), of(&index.sort));
        builder = builder.declared_index(Index { partition, sort, ..index.clone() });
    }
    for number in old.layout() {
        builder = builder.declared_layout(number.clone());
    }
    builder.build().map_err(|error| StoreError::schema(error.table, error.why))
}

/// Whether inserts that do not know a column fail.
fn stops_inserts(column: &Column) -> bool {
    column.required && column.default.is_none()
}

/// A column as it is when the schema no longer names it: it does not stop inserts.
fn relaxed(column: &Column) -> Column {
    Column { required: column.required && column.default.is_some(), ..column.clone() }
}

/// The error for a column that becomes required, while there are rows, listed, without a value. `rows` is not empty; the last
/// one stands for more if there are more than [`NULL_ROWS_MAX`].
pub fn null_rows(table: &Table, column: &Column, mut rows: Vec<String>) -> StoreError {
    let more = if rows.len() > NULL_ROWS_MAX { ", and more" } else { "" };
    rows.truncate(NULL_ROWS_MAX);
    let why = format!(
        "it becomes required, and rows have no value: {}{more}; set it in these rows, give it a default, or keep it \
         optional",
        rows.join(", ")
    );
    StoreError::schema(format!("column {table}.{}", column.name), why)
}

/// How many rows an error lists.
pub const NULL_ROWS_MAX: usize = 10;

/// The live table after a migration that keeps what the schema no longer names.
///
/// A column that stays behind must not stop inserts that do not know it, so it may be null from then on.
pub fn keep_surplus(old: &Arc<Table>, new: &Arc<Table>) -> Result<Arc<Table>, StoreError> {
    let old = renamed(old, new)?;
    let surplus = old.other_columns().iter().filter(|column| new.column(&column.name).is_none());
    let mut builder = Table::named(new.name());
    for column in new.partition_columns() {
        builder = builder.partition(&column.name, column.kind);
    }
    for column in new.sort_columns() {
        builder = builder.sort(&column.name, column.kind);
    }
    for column in new.other_columns().iter().cloned().chain(surplus.map(relaxed)) {
        builder = builder.declared(column);
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

/// A table without some of its columns, the indexes over them, and some of its indexes.
pub fn strip(
    table: &Table,
    is_column_gone: impl Fn(&str) -> bool,
    is_index_gone: impl Fn(&str) -> bool,
) -> Result<Arc<Table>, StoreError> {
    rebuilt(table, is_column_gone, is_index_gone, None)
}

/// A table with one more index.
pub fn with_index(table: &Table, index: &Index) -> Result<Arc<Table>, StoreError> {
    rebuilt(table, |_| false, |_| false, Some(index))
}

fn rebuilt(
    table: &Table,
    is_column_gone: impl Fn(&str) -> bool,
    is_index_gone: impl Fn(&str) -> bool,
    added: Option<&Index>,
) -> Result<Arc<Table>, StoreError> {
    let mut builder = Table::named(table.name());
    for column in table.partition_columns() {
        builder = builder.partition(&column.name, column.kind);
    }
    for column in table.sort_columns() {
        builder = builder.sort(&column.name, column.kind);
    }
    for column in table.other_columns().iter().filter(|column| !is_column_gone(&column.name)) {
        builder = builder.declared(column.clone());
    }
    let is_kept = |index: &&Index| !is_index_gone(&index.name) && !index.columns().any(&is_column_gone);
    for index in table.indexes().iter().filter(is_kept).chain(added) {
        builder = builder.declared_index(index.clone());
    }
    for number in table.layout() {
        builder = builder.declared_layout(number.clone());
    }
    builder.build().map_err(|error| StoreError::schema(error.table, error.why))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::value::Type;

    fn schema(tables: impl IntoIterator<Item = crate::table::TableBuilder>) -> Schema {
        Schema::new(tables.into_iter().map(|table| table.build().unwrap())).unwrap()
    }

    fn base() -> crate::table::TableBuilder {
        Table::named("t").partition("id", Type::Int).required("a", Type::Text)
    }

    fn check(live: crate::table::TableBuilder, wanted: crate::table::TableBuilder, expect: &str) {
        let text = match differences(&schema([live]), &schema([wanted])) {
            Ok(list) => list
                .into_iter()
                .map(|(table, difference)| {
                    SchemaChange { table, difference, statements: Vec::new() }.to_string()
                })
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
        let renamed =
            || Table::named("t").partition("id", Type::Int).required("b", Type::Text).renamed("b", "a");
        check(base(), renamed(), "rename column t.a to b");
        check(base().index("by", &["a"], &[]), renamed().index("by", &["b"], &[]), "rename column t.a to b");
        check(renamed(), renamed(), "");
        check(base(), base().index("by_a", &["a"], &[]), "add index t.by_a");
        check(base(), base().global_index("by_a", &["a"], &[]), "add index t.by_a across tenants");
        check(
            base().index("by_a", &["a"], &[]),
            base().global_index("by_a", &["a"], &[]),
            "error: index t.by_a does not fit",
        );
        check(base().optional("b", Type::Int), base(), "drop column t.b, with its data");
        check(base().required("b", Type::Int), base(), "let t.b be null; drop column t.b, with its data");
        check(base().optional("b", Type::Int), base().required("b", Type::Int), "require t.b");
        check(
            base().optional("b", Type::Int),
            base().defaulted("b", Type::Int, 7),
            "default t.b to 7; require t.b, with 7 where it is null",
        );
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
