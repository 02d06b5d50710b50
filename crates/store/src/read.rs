//! Reads of a range of one partition of a table or index, page by page. Scans of whole tables are in [`crate::scan`].

use std::fmt;
use std::ops::Bound;
use std::sync::Arc;

use base64::Engine as _;
use base64::engine::general_purpose::URL_SAFE_NO_PAD as BASE64;
use serde::{Deserialize, Serialize};

use crate::error::PlanError;
use crate::limits::{PAGE_MAX, PARTITION_KEY_BYTES_MAX, SORT_KEY_BYTES_MAX, check_sought};
use crate::row::{Row, Tenant, admit_required};
use crate::table::{Column, Index, TENANT, Table, tenant_column};
use crate::value::{Type, Value};

/// How fresh a read has to be.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Consistency {
    /// It sees every commit that was acknowledged before it began.
    Strong,
    /// It may see an older state, row by row. No guard may rest on it.
    Eventual,
}

/// Which way a range is read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Direction {
    /// Least first.
    Forward,
    /// Greatest first.
    Backward,
}

/// A range of one partition, in the order of its sort columns. Built with [`Query::table`], [`Query::index`] or
/// [`Query::all_tenants`].
#[derive(Clone, Debug, PartialEq)]
pub struct Query {
    table: Arc<Table>,
    index: Option<usize>,
    tenant: Option<Tenant>,
    partition: Vec<Value>,
    prefix: Vec<Value>,
    lower: Bound<Value>,
    upper: Bound<Value>,
    direction: Direction,
    limit: usize,
    after: Option<Cursor>,
    consistency: Consistency,
}

impl Query {
    /// A range of a table. `partition` has one value for each of the table's partition columns.
    pub fn table(
        table: &Arc<Table>,
        tenant: &Tenant,
        partition: impl IntoIterator<Item = Value>,
    ) -> Result<Query, PlanError> {
        Query::start(table, None, Some(tenant), partition.into_iter().collect(), Consistency::Strong)
    }

    /// A range of a declared index. `partition` has one value for each of the index's partition columns.
    ///
    /// Always eventual: not every engine can read an index otherwise.
    pub fn index(
        table: &Arc<Table>,
        index: &str,
        tenant: &Tenant,
        partition: impl IntoIterator<Item = Value>,
    ) -> Result<Query, PlanError> {
        let position = index_position(table, index, false)?;
        Query::start(
            table,
            Some(position),
            Some(tenant),
            partition.into_iter().collect(),
            Consistency::Eventual,
        )
    }

    /// A range of an index across tenants: for workers and tools, never on behalf of a tenant. Rows of different
    /// tenants come mixed, in the order of the sort columns, then of the tenant and the row's key.
    ///
    /// Always eventual, as every read of an index: what is found is a hint, and the guard of a plan decides.
    pub fn all_tenants(
        table: &Arc<Table>,
        index: &str,
        partition: impl IntoIterator<Item = Value>,
    ) -> Result<Query, PlanError> {
        let position = index_position(table, index, true)?;
        Query::start(table, Some(position), None, partition.into_iter().collect(), Consistency::Eventual)
    }

    fn start(
        table: &Arc<Table>,
        index: Option<usize>,
        tenant: Option<&Tenant>,
        given: Vec<Value>,
        consistency: Consistency,
    ) -> Result<Query, PlanError> {
        let mut query = Query {
            table: table.clone(),
            index,
            tenant: tenant.cloned(),
            partition: Vec::new(),
            prefix: Vec::new(),
            lower: Bound::Unbounded,
            upper: Bound::Unbounded,
            direction: Direction::Forward,
            limit: PAGE_MAX,
            after: None,
            consistency,
        };
        let columns = query.partition_columns();
        if columns.len() != given.len() {
            let names: Vec<&str> = columns.iter().map(|column| column.name.as_str()).collect();
            return Err(PlanError::KeyParts {
                table: query.source(),
                expected: format!("{} partition column(s)", columns.len()),
                names: names.join(", "),
                given: given.len(),
            });
        }
        let admit =
            |(column, value): (&&Column, Value)| admit_required(table, &column.name, column.kind, value);
        query.partition = columns.iter().zip(given).map(admit).collect::<Result<_, _>>()?;
        let what = || format!("partition of a read of {}", query.source());
        let fixed = tenant.map_or(0, |tenant| tenant.as_str().len());
        check_sought(what, fixed, &query.partition, PARTITION_KEY_BYTES_MAX)?;
        Ok(query)
    }

    /// Fixes the leading sort columns to these values.
    pub fn prefix(mut self, values: impl IntoIterator<Item = Value>) -> Result<Query, PlanError> {
        self.prefix.clear();
        for value in values {
            let admitted = self.admit_next(value)?;
            self.prefix.push(admitted);
        }
        Ok(self)
    }

    /// Starts at this value of the first sort column that is not fixed, inclusive.
    pub fn from(mut self, value: impl Into<Value>) -> Result<Query, PlanError> {
        self.lower = Bound::Included(self.admit_next(value.into())?);
        Ok(self)
    }

    /// Starts after this value of the first sort column that is not fixed.
    pub fn above(mut self, value: impl Into<Value>) -> Result<Query, PlanError> {
        self.lower = Bound::Excluded(self.admit_next(value.into())?);
        Ok(self)
    }

    /// Ends at this value of the first sort column that is not fixed, inclusive.
    pub fn to(mut self, value: impl Into<Value>) -> Result<Query, PlanError> {
        self.upper = Bound::Included(self.admit_next(value.into())?);
        Ok(self)
    }

    /// Ends before this value of the first sort column that is not fixed.
    pub fn below(mut self, value: impl Into<Value>) -> Result<Query, PlanError> {
        self.upper = Bound::Excluded(self.admit_next(value.into())?);
        Ok(self)
    }

    /// Reads greatest first.
    #[must_use]
    pub fn backward(mut self) -> Query {
        self.direction = Direction::Backward;
        self
    }

    /// At most this many rows in a page; 1 to [`PAGE_MAX`].
    pub fn limit(mut self, rows: usize) -> Result<Query, PlanError> {
        self.limit = admit_limit(rows)?;
        Ok(self)
    }

    /// Continues behind a page.
    pub fn after(mut self, cursor: Cursor) -> Result<Query, PlanError> {
        let columns = self.order_columns();
        cursor.check(&self.source(), &columns.iter().map(|column| column.kind).collect::<Vec<_>>())?;
        self.after = Some(cursor);
        Ok(self)
    }

    /// Accepts an older state.
    #[must_use]
    pub fn eventual(mut self) -> Query {
        self.consistency = Consistency::Eventual;
        self
    }

    /// The sort column that a value put at this point would stand for.
    fn admit_next(&self, value: Value) -> Result<Value, PlanError> {
        let columns = self.sort_columns();
        let column = columns.get(self.prefix.len()).ok_or_else(|| PlanError::KeyParts {
            table: self.source(),
            expected: format!("{} sort column(s)", columns.len()),
            names: columns.iter().map(|column| column.name.as_str()).collect::<Vec<_>>().join(", "),
            given: self.prefix.len() + 1,
        })?;
        let value = admit_required(&self.table, &column.name, column.kind, value)?;
        let what = || format!("sort values of a read of {}", self.source());
        let fixed = self.prefix.iter().map(|value| value.weight() + 1).sum();
        check_sought(what, fixed, std::slice::from_ref(&value), SORT_KEY_BYTES_MAX)?;
        Ok(value)
    }

    /// The table's name, and the index's.
    pub fn source(&self) -> String {
        match self.read_index() {
            Some(index) => format!("{}/{}", self.table, index.name),
            None => self.table.name().to_owned(),
        }
    }

    /// The table.
    pub fn read_table(&self) -> &Arc<Table> {
        &self.table
    }

    /// The index, if it reads one.
    pub fn read_index(&self) -> Option<&Index> {
        self.index.and_then(|position| self.table.indexes().get(position))
    }

    /// Whose rows; `None` for all, which only an index across tenants can give.
    pub fn tenant(&self) -> Option<&Tenant> {
        self.tenant.as_ref()
    }

    /// The columns that `partition_values` are for.
    pub fn partition_columns(&self) -> Vec<&Column> {
        match self.read_index() {
            Some(index) => named(&self.table, &index.partition),
            None => self.table.partition_columns().iter().collect(),
        }
    }

    /// The values of the partition columns.
    pub fn partition_values(&self) -> &[Value] {
        &self.partition
    }

    /// The declared sort columns.
    pub fn sort_columns(&self) -> Vec<&Column> {
        match self.read_index() {
            Some(index) => named(&self.table, &index.sort),
            None => self.table.sort_columns().iter().collect(),
        }
    }

    /// All columns that order the rows: the sort columns and, for an index, the row's key, which the tenant leads where
    /// rows of all tenants are read.
    pub fn order_columns(&self) -> Vec<&Column> {
        let mut columns = self.sort_columns();
        if self.tenant.is_none() {
            columns.push(tenant_column());
        }
        if self.index.is_some() {
            columns.extend(self.table.key_columns());
        }
        columns
    }

    /// The fixed values of the leading sort columns.
    pub fn prefix_values(&self) -> &[Value] {
        &self.prefix
    }

    /// Bounds of the first sort column that is not fixed.
    pub fn bounds(&self) -> (&Bound<Value>, &Bound<Value>) {
        (&self.lower, &self.upper)
    }

    /// Which way it reads.
    pub fn direction(&self) -> Direction {
        self.direction
    }

    /// The most rows of a page.
    pub fn page_limit(&self) -> usize {
        self.limit
    }

    /// The values of [`Query::order_columns`] behind which it continues.
    pub fn cursor_values(&self) -> Option<&[Value]> {
        self.after.as_ref().map(|cursor| cursor.values.as_slice())
    }

    /// How fresh it has to be.
    pub fn consistency(&self) -> Consistency {
        self.consistency
    }

    /// What a row has in [`Query::order_columns`].
    pub fn order_values(&self, row: &Row) -> Vec<Value> {
        let value = |column: &Column| match column.name.as_str() {
            TENANT => Some(row.tenant().as_str().into()),
            name => row.get(name).cloned(),
        };
        self.order_columns().into_iter().filter_map(value).collect()
    }

    /// The cursor behind a row of this read.
    pub fn cursor_at(&self, row: &Row) -> Cursor {
        Cursor { source: self.source(), values: self.order_values(row) }
    }
}

/// Where an index of this reach stands among the table's.
fn index_position(table: &Table, index: &str, global: bool) -> Result<usize, PlanError> {
    let named = || (table.name().to_owned(), index.to_owned());
    let found = table.indexes().iter().enumerate().find(|(_, candidate)| candidate.name == index);
    let Some((position, found)) = found else {
        let (table, index) = named();
        return Err(PlanError::UnknownIndex { table, index });
    };
    if found.global != global {
        let (table, index) = named();
        let why = if global {
            "holds each tenant's rows by themselves; name the tenant, with Query::index"
        } else {
            "holds the rows of all tenants; only the house itself reads it, with Query::all_tenants"
        };
        return Err(PlanError::IndexReach { table, index, why });
    }
    Ok(position)
}

fn named<'a>(table: &'a Table, names: &[String]) -> Vec<&'a Column> {
    names.iter().filter_map(|name| table.column(name)).collect()
}

pub(crate) fn admit_limit(rows: usize) -> Result<usize, PlanError> {
    if rows == 0 || rows > PAGE_MAX {
        let what = "rows in a page (from 1)".to_owned();
        return Err(PlanError::Limit { what, limit: PAGE_MAX, actual: rows });
    }
    Ok(rows)
}

/// Rows, and where to go on.
#[derive(Clone, Debug, PartialEq)]
pub struct Page {
    /// The rows, in the order of the read. May be fewer than the limit, even none, before the end.
    pub rows: Vec<Row>,
    /// Where the next page begins; `None` when the end was reached.
    pub next: Option<Cursor>,
}

/// A place between two rows of a read. Printed, it is opaque text; it holds the position in clear, so a server
/// signs it before handing it out.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Cursor {
    pub(crate) source: String,
    pub(crate) values: Vec<Value>,
}

impl Cursor {
    /// Reads back what `Display` wrote.
    pub fn parse(text: &str) -> Result<Cursor, PlanError> {
        let bad = || PlanError::BadCursor { why: "it is not text that a page returned".into() };
        let bytes = BASE64.decode(text).map_err(|_| bad())?;
        serde_json::from_slice(&bytes).map_err(|_| bad())
    }

    /// The same place in another read whose rows have the same order, like a second list that is merged with the first.
    #[must_use]
    pub fn in_read(&self, query: &Query) -> Cursor {
        Cursor { source: query.source(), values: self.values.clone() }
    }

    pub(crate) fn check(&self, source: &str, kinds: &[Type]) -> Result<(), PlanError> {
        if self.source != source {
            let why = format!("it was made by a read of {}, this one is of {source}", self.source);
            return Err(PlanError::BadCursor { why });
        }
        let fits = self.values.len() == kinds.len()
            && self.values.iter().zip(kinds).all(|(value, kind)| value.kind() == Some(*kind));
        if fits { Ok(()) } else { Err(PlanError::BadCursor { why: "its values have other types".into() }) }
    }
}

impl fmt::Display for Cursor {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let json = serde_json::to_vec(self).map_err(|_| fmt::Error)?;
        f.write_str(&BASE64.encode(json))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn table() -> Arc<Table> {
        Table::named("posts")
            .partition("author", Type::Text)
            .sort("at", Type::Time)
            .sort("id", Type::Int)
            .optional("topic", Type::Text)
            .index("by_topic", &["topic"], &["at"])
            .global_index("everywhere", &["topic"], &["at"])
            .build()
            .unwrap()
    }

    #[test]
    fn reads_are_checked_when_they_are_built() {
        let (table, tenant) = (table(), Tenant::new("acme").unwrap());
        let query = || Query::table(&table, &tenant, ["ann".into()]).unwrap();
        assert!(matches!(Query::table(&table, &tenant, []), Err(PlanError::KeyParts { .. })));
        assert!(matches!(Query::index(&table, "by_x", &tenant, []), Err(PlanError::UnknownIndex { .. })));
        let apart = Query::index(&table, "everywhere", &tenant, ["rust".into()]);
        assert!(matches!(apart, Err(PlanError::IndexReach { .. })));
        assert!(matches!(
            Query::all_tenants(&table, "by_topic", ["rust".into()]),
            Err(PlanError::IndexReach { .. })
        ));
        assert!(matches!(Query::all_tenants(&table, "everywhere", []), Err(PlanError::KeyParts { .. })));
        assert!(matches!(query().from("late"), Err(PlanError::BadValue { .. })));
        let long = "x".repeat(PARTITION_KEY_BYTES_MAX);
        assert!(matches!(Query::table(&table, &tenant, [long.into()]), Err(PlanError::Limit { .. })));
        assert!(matches!(query().limit(0), Err(PlanError::Limit { .. })));
        assert!(matches!(query().limit(PAGE_MAX + 1), Err(PlanError::Limit { .. })));
        let fixed = query().prefix([crate::Time::from_micros(1).into(), 2.into()]).unwrap();
        assert!(matches!(fixed.from(3), Err(PlanError::KeyParts { .. })));
    }

    #[test]
    fn cursors_belong_to_one_read() {
        let (table, tenant) = (table(), Tenant::new("acme").unwrap());
        let row = Row::new(
            table.clone(),
            tenant.clone(),
            vec!["ann".into(), crate::Time::from_micros(1).into(), 7.into(), "rust".into()],
            1,
        );
        let by_author = Query::table(&table, &tenant, ["ann".into()]).unwrap();
        let by_topic = Query::index(&table, "by_topic", &tenant, ["rust".into()]).unwrap();
        let cursor = by_author.cursor_at(&row);
        let parsed = Cursor::parse(&cursor.to_string()).unwrap();
        assert_eq!(parsed, cursor);
        assert!(by_author.clone().after(parsed.clone()).is_ok());
        assert!(matches!(by_topic.after(parsed), Err(PlanError::BadCursor { .. })));
        let everywhere = Query::all_tenants(&table, "everywhere", ["rust".into()]).unwrap();
        let cursor = everywhere.cursor_at(&row);
        assert_eq!(everywhere.after(cursor).unwrap().cursor_values().map(<[Value]>::len), Some(5));
        assert!(matches!(Cursor::parse("!"), Err(PlanError::BadCursor { .. })));
    }
}
