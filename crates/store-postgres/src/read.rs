//! Walks over whole tables, page by page, and what all reads have in common.
//!
//! All of them go to the primary, so strong and eventual reads are the same here. Rows by their keys and pages of ranges are
//! read by [`crate::look`].

use std::sync::Arc;

use statehouse_store::table::TENANT;
use statehouse_store::{Column, Page, Row, Scan, StoreError, Table, Tenant, Type};

use crate::ddl::Names;
use crate::link::Call;
use crate::shared::Shared;
use crate::sql::{Arg, all_columns, name, placeholder, row_at, text_at};
use crate::tenancy::Scope;

impl Shared {
    pub(crate) async fn scan(&self, scan: &Scan) -> Result<Page, StoreError> {
        let table = scan.read_table();
        let scope = scan.tenant().map_or(Scope::All, Scope::of);
        let answers = self.read(&scope, &[scan_call(&self.names, scan)]).await;
        let answers = answers.map_err(|fault| fault.into_error(&[table.name()]))?;
        let answers = answers.first().map(Vec::as_slice).unwrap_or_default();
        let rows = answers.iter().map(|row| row_of_any(row, table)).collect::<Result<_, _>>()?;
        Ok(page(rows, scan.page_limit(), |row| scan.cursor_at(row)))
    }
}

/// A row behind the name of its tenant.
fn row_of_any(row: &tokio_postgres::Row, table: &Arc<Table>) -> Result<Row, StoreError> {
    let tenant = Tenant::new(text_at(row, 0, table.name())?)
        .map_err(|error| StoreError::corrupt(table.name(), error.to_string()))?;
    row_at(row, 1, table, &tenant)
}

/// A page of the first rows of a list that has one more than the page if there is a next one.
pub(crate) fn page(
    mut rows: Vec<Row>,
    limit: usize,
    cursor_at: impl Fn(&Row) -> statehouse_store::Cursor,
) -> Page {
    let more = rows.len() > limit;
    rows.truncate(limit);
    let next = rows.last().filter(|_| more).map(cursor_at);
    Page { rows, next }
}

/// A column in an order or a comparison. Text is ordered bytewise, however the column was made.
pub(crate) fn ordered(column: &Column) -> String {
    let collation = if column.kind == Type::Text { " collate \"C\"" } else { "" };
    format!("t.{}{collation}", name(&column.name))
}

/// `(a, b) > ($1, $2)`: behind a cursor.
pub(crate) fn behind(columns: &[String], operator: &str, values: &[String]) -> String {
    format!("({}) {operator} ({})", columns.join(", "), values.join(", "))
}

/// The statement of a walk over a table, in the order of its primary key.
pub(crate) fn scan_call<'s>(names: &Names, scan: &'s Scan) -> Call<'s> {
    let table = scan.read_table();
    let keys: Vec<String> = std::iter::once(TENANT)
        .chain(table.key_columns().iter().map(|column| column.name.as_str()))
        .map(|column| format!("t.{}", name(column)))
        .collect();
    let mut args = Vec::new();
    let mut conditions = Vec::new();
    if let Some(tenant) = scan.tenant() {
        args.push(Arg::Text(tenant.as_str()));
        conditions.push(format!("t.{TENANT} = $1"));
    }
    if let Some(after) = scan.cursor_values() {
        let first = args.len();
        args.extend(after.iter().map(Arg::One));
        let places: Vec<String> = (first..args.len()).map(placeholder).collect();
        conditions.push(behind(&keys, ">", &places));
    }
    let condition =
        if conditions.is_empty() { String::new() } else { format!("\nwhere {}", conditions.join(" and ")) };
    args.push(Arg::Int(i64::try_from(scan.page_limit() + 1).unwrap_or(i64::MAX)));
    let text = format!(
        "select t.{TENANT}, {}\nfrom {} as t{condition}\norder by {}\nlimit {}",
        all_columns(table, "t"),
        names.table(table.name()),
        keys.join(", "),
        placeholder(args.len() - 1),
    );
    Call::new(text, args)
}
