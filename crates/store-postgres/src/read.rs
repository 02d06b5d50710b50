//! Reads: rows by their keys, pages of a range, pages of a whole table.
//!
//! All of them go to the primary, so strong and eventual reads are the same here. A page is read with one row more
//! than asked for, which tells whether there is a next one. Cursors are rows of values in the order of the index,
//! compared as such, so that the server continues where the last page ended instead of counting past it.

use std::ops::Bound;
use std::sync::Arc;

use statehouse_store::read::Direction;
use statehouse_store::table::TENANT;
use statehouse_store::{Address, Column, Page, Query, Row, Scan, StoreError, Table, Tenant, Type, Value};

use crate::ddl::{INDEXED, Names};
use crate::link::Call;
use crate::shared::Shared;
use crate::sql::{Arg, all_columns, int_at, name, placeholder, row_at, text_at};
use crate::statements::{Key, rows_by_key};
use crate::tenancy::Scope;

impl Shared {
    pub(crate) async fn get(&self, addresses: &[Address]) -> Result<Vec<Option<Row>>, StoreError> {
        let groups = by_table(addresses);
        let calls: Vec<Call<'_>> = groups.iter().map(|group| group.call(&self.names)).collect();
        let tenants = addresses.iter().map(|address| address.tenant().clone()).collect();
        let tables: Vec<&str> = groups.iter().map(|group| group.table.name()).collect();
        let answers =
            self.read(&Scope::Of(tenants), &calls).await.map_err(|fault| fault.into_error(&tables))?;
        let mut found: Vec<Option<Row>> = vec![None; addresses.len()];
        for (group, rows) in groups.iter().zip(&answers) {
            for row in rows {
                let place = usize::try_from(int_at(row, 0, "unnest")? - 1).unwrap_or(usize::MAX);
                let Some((number, address)) = group.rows.get(place) else { continue };
                if let Some(slot) = found.get_mut(*number) {
                    *slot = Some(row_at(row, 1, group.table, address.tenant())?);
                }
            }
        }
        Ok(found)
    }

    pub(crate) async fn query(&self, query: &Query) -> Result<Page, StoreError> {
        let Some(call) = range_call(&self.names, query) else {
            return Ok(Page { rows: Vec::new(), next: None });
        };
        let table = query.read_table();
        let scope = query.tenant().map_or(Scope::All, Scope::of);
        let answers = self.read(&scope, &[call]).await;
        let answers = answers.map_err(|fault| fault.into_error(&[table.name()]))?;
        let answers = answers.first().map(Vec::as_slice).unwrap_or_default();
        let row_of = |row| match query.tenant() {
            Some(tenant) => row_at(row, 0, table, tenant),
            None => row_of_any(row, table),
        };
        let rows = answers.iter().map(row_of).collect::<Result<_, _>>()?;
        Ok(page(rows, query.page_limit(), |row| query.cursor_at(row)))
    }

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

/// Addresses of one table, with their places in the list.
pub(crate) struct Group<'a> {
    table: &'a Arc<Table>,
    rows: Vec<(usize, &'a Address)>,
}

impl<'a> Group<'a> {
    /// The statement that reads these rows.
    pub(crate) fn call(&self, names: &Names) -> Call<'a> {
        let keys: Vec<Key<'a>> = self.rows.iter().map(|(_, row)| (row.tenant(), row.key())).collect();
        rows_by_key(names, self.table, &keys, false)
    }
}

/// Addresses by table; two definitions of one table are two tables here.
pub(crate) fn by_table(addresses: &[Address]) -> Vec<Group<'_>> {
    let mut groups: Vec<Group<'_>> = Vec::new();
    for (number, address) in addresses.iter().enumerate() {
        let table = address.table();
        match groups.iter_mut().find(|group| Arc::ptr_eq(group.table, table) || group.table == table) {
            Some(group) => group.rows.push((number, address)),
            None => groups.push(Group { table, rows: vec![(number, address)] }),
        }
    }
    groups
}

/// A row behind the name of its tenant.
fn row_of_any(row: &tokio_postgres::Row, table: &Arc<Table>) -> Result<Row, StoreError> {
    let tenant = Tenant::new(text_at(row, 0, table.name())?)
        .map_err(|error| StoreError::corrupt(table.name(), error.to_string()))?;
    row_at(row, 1, table, &tenant)
}

/// A page of the first rows of a list that has one more than the page if there is a next one.
fn page(mut rows: Vec<Row>, limit: usize, cursor_at: impl Fn(&Row) -> statehouse_store::Cursor) -> Page {
    let more = rows.len() > limit;
    rows.truncate(limit);
    let next = rows.last().filter(|_| more).map(cursor_at);
    Page { rows, next }
}

/// A column in an order or a comparison. Text is ordered bytewise, however the column was made.
fn ordered(column: &Column) -> String {
    let collation = if column.kind == Type::Text { " collate \"C\"" } else { "" };
    format!("t.{}{collation}", name(&column.name))
}

/// The statement of a range; `None` if nothing can be in it.
pub(crate) fn range_call<'q>(names: &Names, query: &'q Query) -> Option<Call<'q>> {
    let table = query.read_table();
    let (mut args, mut conditions, mut owner) = (Vec::new(), Vec::new(), String::new());
    match query.tenant() {
        Some(tenant) => {
            args.push(Arg::Text(tenant.as_str()));
            conditions.push(format!("t.{TENANT} = $1"));
        }
        None => owner = format!("t.{TENANT}, "),
    }
    let sort = query.sort_columns();
    let fixed = query.partition_columns().into_iter().zip(query.partition_values());
    let fixed = fixed.chain(sort.iter().copied().zip(query.prefix_values()));
    for (column, value) in fixed {
        args.push(Arg::One(value));
        conditions.push(format!("t.{} = {}", name(&column.name), placeholder(args.len() - 1)));
    }
    if let Some(column) = sort.get(query.prefix_values().len()) {
        let (lower, upper) = query.bounds();
        for (bound, inclusive, exclusive) in [(lower, ">=", ">"), (upper, "<=", "<")] {
            let (operator, value) = match bound {
                Bound::Unbounded => continue,
                Bound::Included(value) => (inclusive, value),
                Bound::Excluded(value) => (exclusive, value),
            };
            args.push(Arg::One(value));
            conditions.push(format!("{} {operator} {}", ordered(column), placeholder(args.len() - 1)));
        }
    }
    if let Some(index) = query.read_index() {
        // Only a statement that names an index's conditions may use it.
        conditions.push(format!("t.{INDEXED}"));
        let sparse =
            index.columns().filter_map(|column| table.column(column)).filter(|column| !column.required);
        conditions.extend(sparse.map(|column| format!("t.{} is not null", name(&column.name))));
    }
    let order = query.order_columns();
    let (operator, direction) = match query.direction() {
        Direction::Forward => (">", ""),
        Direction::Backward => ("<", " desc"),
    };
    if let Some(after) = query.cursor_values() {
        if order.is_empty() {
            return None;
        }
        let columns: Vec<String> = order.iter().map(|column| ordered(column)).collect();
        conditions.push(behind(&columns, operator, after, &mut args));
    }
    let mut text = format!(
        "select {owner}{}\nfrom {} as t\nwhere {}",
        all_columns(table, "t"),
        names.table(table.name()),
        conditions.join(" and "),
    );
    if !order.is_empty() {
        let order: Vec<String> =
            order.iter().map(|column| format!("{}{direction}", ordered(column))).collect();
        text.push_str(&format!("\norder by {}", order.join(", ")));
    }
    args.push(Arg::Int(i64::try_from(query.page_limit() + 1).unwrap_or(i64::MAX)));
    text.push_str(&format!("\nlimit {}", placeholder(args.len() - 1)));
    Some(Call::new(text, args))
}

/// `(a, b) > ($1, $2)`: behind a cursor.
fn behind<'q>(columns: &[String], operator: &str, values: &'q [Value], args: &mut Vec<Arg<'q>>) -> String {
    let mut places = Vec::with_capacity(values.len());
    for value in values {
        args.push(Arg::One(value));
        places.push(placeholder(args.len() - 1));
    }
    format!("({}) {operator} ({})", columns.join(", "), places.join(", "))
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
        conditions.push(behind(&keys, ">", after, &mut args));
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
