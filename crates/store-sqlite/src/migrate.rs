//! Migration: the differences between file and schema, as statements in one transaction.

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Arc;

use rusqlite::{Connection, params};
use statehouse_store::migration::{Difference, NULL_ROWS_MAX, keep_surplus, null_rows, planned};
use statehouse_store::{Column, Migrate, Schema, SchemaChange, StoreError, Table};

use crate::fault;
use crate::layout::{column_definition, create_index, create_table, literal, live_schema};
use crate::sql::{index_name, name};

/// Runs inside the writer's transaction. Returns the changes; the caller commits.
pub(crate) fn run(
    connection: &Connection,
    path: &Path,
    schema: &Schema,
    how: Migrate,
) -> Result<Vec<SchemaChange>, StoreError> {
    let live = live_schema(connection, path)?;
    let found = planned(&live, schema, how)?;
    for (table, difference) in &found {
        check_nulls(connection, path, table, difference)?;
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
        changes.push(SchemaChange { table, difference, statements });
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

/// Refuses a column that becomes required while rows have no value for it.
fn check_nulls(
    connection: &Connection,
    path: &Path,
    table: &Table,
    difference: &Difference,
) -> Result<(), StoreError> {
    let Difference::RequireColumn(column) = difference else { return Ok(()) };
    if column.default.is_some() {
        return Ok(());
    }
    let keys =
        table.key_columns().iter().map(|key| format!("', {}=' || quote({})", key.name, name(&key.name)));
    let select = format!(
        "SELECT '{table}(tenant=' || tenant || {} || ')' FROM {} WHERE {} IS NULL LIMIT {}",
        keys.collect::<Vec<_>>().join(" || "),
        name(table.name()),
        name(&column.name),
        NULL_ROWS_MAX + 1,
    );
    let fail = |error: rusqlite::Error| fault::from_sqlite(path, &error);
    let mut statement = connection.prepare(&select).map_err(fail)?;
    let rows = statement.query_map([], |row| row.get(0)).map_err(fail)?;
    let rows = rows.collect::<Result<Vec<String>, rusqlite::Error>>().map_err(fail)?;
    match rows.is_empty() {
        true => Ok(()),
        false => Err(null_rows(table, column, rows)),
    }
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
        Difference::RenameColumn { column, to } => {
            let former = columns.iter_mut().filter(|name| **name == column.name);
            former.for_each(|name| name.clone_from(to));
            vec![format!("ALTER TABLE {of} RENAME COLUMN {} TO {}", name(&column.name), name(to))]
        }
        // SQLite cannot change a column in place.
        Difference::RelaxColumn(_) | Difference::RequireColumn(_) | Difference::ChangeDefault(_) => {
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
        Difference::SetLayout { .. }
        | Difference::MoveColumn { .. }
        | Difference::FillTable { .. }
        | Difference::MoveRows { .. } => Vec::new(),
    }
}

/// Copies a table into its new shape. A column that is required, and has a default, may have been null before.
fn rebuild(target: &Table, columns: &[String]) -> Vec<String> {
    let (of, copy) = (name(target.name()), format!("statehouse_copy_of_{}", target.name()));
    let is_common = |column: &&Column| columns.contains(&column.name);
    let common: Vec<&Column> = target.columns().iter().filter(is_common).collect();
    let filled = |column: &&Column| match &column.default {
        Some(default) if column.required => format!("coalesce({}, {})", name(&column.name), literal(default)),
        _ => name(&column.name),
    };
    let values = common.iter().map(filled).collect::<Vec<_>>().join(", ");
    let common = common.iter().map(|column| name(&column.name)).collect::<Vec<_>>().join(", ");
    let mut statements = vec![
        create_table(target, &copy),
        format!("INSERT INTO {copy} (tenant, {common}, version) SELECT tenant, {values}, version FROM {of}"),
        format!("DROP TABLE {of}"),
        format!("ALTER TABLE {copy} RENAME TO {of}"),
    ];
    statements.extend(target.indexes().iter().map(|index| create_index(target, index)));
    statements
}
