//! Migration: the differences between file and schema, as statements in one transaction.

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Arc;

use rusqlite::{Connection, params};
use statehouse_store::migration::{Difference, differences, keep_surplus};
use statehouse_store::{Change, Migrate, Schema, StoreError, Table};

use crate::fault;
use crate::layout::{column_definition, create_index, create_table, live_schema};
use crate::sql::{index_name, name};

/// Runs inside the writer's transaction. Returns the changes; the caller commits.
pub(crate) fn run(
    connection: &Connection,
    path: &Path,
    schema: &Schema,
    how: Migrate,
) -> Result<Vec<Change>, StoreError> {
    let live = live_schema(connection, path)?;
    let mut found = differences(&live, schema)?;
    if how == Migrate::Apply {
        found.retain(|(_, difference)| !is_removal(difference));
    }
    let targets = targets(&live, schema, how)?;
    let mut physical: BTreeMap<String, Vec<String>> =
        live.tables().map(|table| (table.name().to_owned(), column_names(table))).collect();
    let mut changes = Vec::with_capacity(found.len());
    for (table, difference) in found {
        // A table that is dropped has no target.
        let target = targets.get(table.name()).unwrap_or(&table);
        let columns = physical.entry(table.name().to_owned()).or_default();
        let statements = statements(&table, target, &difference, columns);
        changes.push(Change { table, difference, statements });
    }
    if how == Migrate::Show {
        return Ok(changes);
    }
    let fail = |error: rusqlite::Error| fault::from_sqlite(path, &error);
    for statement in changes.iter().flat_map(|change| &change.statements) {
        connection.execute_batch(statement).map_err(fail)?;
    }
    for table in targets.values() {
        let definition = serde_json::to_string(&**table)
            .map_err(|error| StoreError::schema(format!("table {table}"), error.to_string()))?;
        connection
            .execute(
                "INSERT INTO statehouse_tables (name, definition) VALUES (?1, ?2)
                 ON CONFLICT (name) DO UPDATE SET definition = excluded.definition
                 WHERE definition <> excluded.definition",
                params![table.name(), definition],
            )
            .map_err(fail)?;
    }
    for change in &changes {
        if change.difference == Difference::DropTable {
            connection
                .execute("DELETE FROM statehouse_tables WHERE name = ?1", params![change.table.name()])
                .map_err(fail)?;
        }
    }
    Ok(changes)
}

fn is_removal(difference: &Difference) -> bool {
    matches!(difference, Difference::DropTable | Difference::DropColumn(_) | Difference::DropIndex(_))
}

fn column_names(table: &Table) -> Vec<String> {
    table.columns().iter().map(|column| column.name.clone()).collect()
}

/// The tables as they will be.
fn targets(live: &Schema, schema: &Schema, how: Migrate) -> Result<BTreeMap<String, Arc<Table>>, StoreError> {
    let mut targets = BTreeMap::new();
    for new in schema.tables() {
        let target = match live.table(new.name()) {
            Some(old) if how == Migrate::Apply => keep_surplus(old, new)?,
            _ => new.clone(),
        };
        targets.insert(new.name().to_owned(), target);
    }
    Ok(targets)
}

/// The statements for one difference. `columns` are the table's columns at that point and are kept up to date.
fn statements(
    table: &Table,
    target: &Table,
    difference: &Difference,
    columns: &mut Vec<String>,
) -> Vec<String> {
    let of = name(table.name());
    match difference {
        Difference::CreateTable => {
            *columns = column_names(target);
            let indexes = target.indexes().iter().map(|index| create_index(target, index));
            std::iter::once(create_table(target, target.name())).chain(indexes).collect()
        }
        Difference::AddColumn(column) => {
            if columns.contains(&column.name) {
                return Vec::new();
            }
            columns.push(column.name.clone());
            vec![format!("ALTER TABLE {of} ADD COLUMN {}", column_definition(column))]
        }
        // SQLite cannot change a column in place.
        Difference::RelaxColumn(_) | Difference::ChangeDefault(_) => {
            let statements = rebuild(target, columns);
            *columns = column_names(target);
            statements
        }
        Difference::AddIndex(index) => {
            vec![
                format!("DROP INDEX IF EXISTS {}", index_name(table, &index.name)),
                create_index(target, index),
            ]
        }
        Difference::DropIndex(index) => {
            vec![format!("DROP INDEX IF EXISTS {}", index_name(table, &index.name))]
        }
        Difference::DropColumn(column) => {
            if !columns.contains(&column.name) {
                return Vec::new();
            }
            columns.retain(|name| *name != column.name);
            vec![format!("ALTER TABLE {of} DROP COLUMN {}", name(&column.name))]
        }
        Difference::DropTable => vec![format!("DROP TABLE {of}")],
        // Layout numbers are part of the definition, which is written after the statements. The library moves columns.
        Difference::SetLayout(_) | Difference::MoveColumn { .. } => Vec::new(),
    }
}

/// Copies a table into its new shape.
fn rebuild(target: &Table, columns: &[String]) -> Vec<String> {
    let (of, copy) = (name(target.name()), format!("statehouse_copy_of_{}", target.name()));
    let common: Vec<String> = target
        .columns()
        .iter()
        .filter(|column| columns.contains(&column.name))
        .map(|column| name(&column.name))
        .collect();
    let common = common.join(", ");
    let mut statements = vec![
        create_table(target, &copy),
        format!("INSERT INTO {copy} (tenant, {common}, version) SELECT tenant, {common}, version FROM {of}"),
        format!("DROP TABLE {of}"),
        format!("ALTER TABLE {copy} RENAME TO {of}"),
    ];
    statements.extend(target.indexes().iter().map(|index| create_index(target, index)));
    statements
}
