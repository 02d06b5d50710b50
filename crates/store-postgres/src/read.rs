//! Scans of whole tables, page by page, their segments, and the common parts of all reads.
//!
//! All of them go to the primary, so strong and eventual reads are the same here. Rows by their keys and pages of ranges are
//! read by [`crate::multi_read`].

use std::sync::Arc;

use statehouse_store::bug;
use statehouse_store::scan::check_segments;
use statehouse_store::table::TENANT;
use statehouse_store::{Column, Page, Row, Scan, Segment, StoreError, Table, Tenant, Type, Value};

use crate::connection::DatabaseCall;
use crate::ddl::Names;
use crate::shared::Shared;
use crate::sql::{Arg, all_columns, name, placeholder, row_at, text_at, value_at};
use crate::tenancy::TransactionScope;

impl Shared {
    pub(crate) async fn scan(&self, scan: &Scan) -> Result<Page, StoreError> {
        scan.require_key_segment()?;
        let table = scan.read_table();
        let scope = scan.tenant().map_or(TransactionScope::All, TransactionScope::of);
        let answers = self.read(&scope, &[scan_call(&self.names, scan)]).await;
        let answers = answers.map_err(|fault| fault.into_error(&[table.name()]))?;
        let answers = answers.first().ok_or_else(|| bug!("a scan without an answer"))?;
        let rows = answers.iter().map(|row| row_of_any(row, table)).collect::<Result<_, _>>()?;
        Ok(page(rows, scan.page_limit(), |row| scan.cursor_at(row)))
    }

    pub(crate) async fn segments(&self, scan: &Scan, max: usize) -> Result<Vec<Segment>, StoreError> {
        check_segments(max)?;
        scan.require_key_segment()?;
        let table = scan.read_table();
        let scope = scan.tenant().map_or(TransactionScope::All, TransactionScope::of);
        let answers = self.read(&scope, &[segments_call(&self.names, scan, max)]).await;
        let answers = answers.map_err(|fault| fault.into_error(&[table.name()]))?;
        let answers = answers.first().ok_or_else(|| bug!("a division of a table without an answer"))?;
        let boundaries = answers.iter().map(|row| scan_position(row, table)).collect::<Result<_, _>>()?;
        Ok(Segment::by_keys(scan, boundaries))
    }
}

/// Tenant and key of a row.
fn scan_position(row: &tokio_postgres::Row, table: &Table) -> Result<Vec<Value>, StoreError> {
    let kinds = std::iter::once(Type::Text).chain(table.key_columns().iter().map(|column| column.kind));
    kinds.enumerate().map(|(index, kind)| value_at(row, index, kind, table.name())).collect()
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

/// The statement of a scan of a table, in the order of its primary key.
pub(crate) fn scan_call<'s>(names: &Names, scan: &'s Scan) -> DatabaseCall<'s> {
    let table = scan.read_table();
    let (condition, mut args) = scan_condition(scan);
    args.push(Arg::Int(i64::try_from(scan.page_limit() + 1).unwrap_or(i64::MAX)));
    let text = format!(
        "select t.{TENANT}, {}\nfrom {} as t{condition}\norder by {}\nlimit {}",
        all_columns(table, "t"),
        names.table(table.name()),
        scan_order(table).join(", "),
        placeholder(args.len() - 1),
    );
    DatabaseCall::new(text, args)
}

/// The statement of the boundaries of segments: tenant and key of the last row of each segment but the last. It reads only
/// the primary key.
fn segments_call<'s>(names: &Names, scan: &'s Scan, max: usize) -> DatabaseCall<'s> {
    let table = scan.read_table();
    let (condition, args) = scan_condition(scan);
    let from = names.table(table.name());
    let keys = scan_order(table).join(", ");
    let outer = keys.replace("t.", "_keys.");
    let text = format!(
        "with _keys as (select {keys}, row_number() over (order by {keys}) as _n\nfrom {from} as t{condition}),\n\
         _size as (select count(*) as _total\nfrom {from} as t{condition})\n\
         select {outer}\nfrom _keys, _size\n\
         where _n < _total and _n * {max} / _total <> (_n - 1) * {max} / _total\norder by _n"
    );
    DatabaseCall::new(text, args)
}

/// The columns by which scans are ordered.
fn scan_order(table: &Table) -> Vec<String> {
    let keys = table.key_columns().iter().map(|column| column.name.as_str());
    std::iter::once(TENANT).chain(keys).map(|column| format!("t.{}", name(column))).collect()
}

/// The condition of the rest of a scan, with its arguments.
fn scan_condition(scan: &Scan) -> (String, Vec<Arg<'_>>) {
    let keys = scan_order(scan.read_table());
    let mut args = Vec::new();
    let mut conditions = Vec::new();
    if let Some(tenant) = scan.tenant() {
        args.push(Arg::Text(tenant.as_str()));
        conditions.push(format!("t.{TENANT} = $1"));
    }
    for (operator, bound) in [(">", scan.lower_bound()), ("<=", scan.upper_bound())] {
        let Some(values) = bound else { continue };
        let first = args.len();
        args.extend(values.iter().map(Arg::One));
        let placeholders: Vec<String> = (first..args.len()).map(placeholder).collect();
        conditions.push(behind(&keys, operator, &placeholders));
    }
    let condition =
        if conditions.is_empty() { String::new() } else { format!("\nwhere {}", conditions.join(" and ")) };
    (condition, args)
}
