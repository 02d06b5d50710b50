//! SQL statements, and the conversion of values to and from SQLite.

use std::fmt::Write as _;
use std::ops::Bound;
use std::sync::Arc;

use rusqlite::types::{ToSql, ToSqlOutput, ValueRef};
use statehouse_store::plan::Assignment;
use statehouse_store::read::Direction;
use statehouse_store::table::{TENANT, VERSION};
use statehouse_store::{Query, Row, Scan, StoreError, Table, Tenant, Time, Type, Value};

/// A value as a parameter.
pub(crate) struct Bind<'a>(pub &'a Value);

impl ToSql for Bind<'_> {
    fn to_sql(&self) -> rusqlite::Result<ToSqlOutput<'_>> {
        use rusqlite::types::Value as Owned;
        Ok(match self.0 {
            Value::Null => ToSqlOutput::Owned(Owned::Null),
            Value::Text(text) => ToSqlOutput::Borrowed(ValueRef::Text(text.as_bytes())),
            Value::Int(int) => ToSqlOutput::Owned(Owned::Integer(*int)),
            Value::Float(float) => ToSqlOutput::Owned(Owned::Real(*float)),
            Value::Bool(bool) => ToSqlOutput::Owned(Owned::Integer(i64::from(*bool))),
            Value::Bytes(bytes) => ToSqlOutput::Borrowed(ValueRef::Blob(bytes)),
            Value::Time(time) => ToSqlOutput::Owned(Owned::Integer(time.micros())),
            Value::Json(json) => ToSqlOutput::Owned(Owned::Text(json.to_string())),
        })
    }
}

/// Converts a stored datum to a value of a column's type; `None` if it is of another type.
fn decode(stored: ValueRef<'_>, kind: Type) -> Option<Value> {
    let text = |bytes: &[u8]| std::str::from_utf8(bytes).ok().map(str::to_owned);
    Some(match (kind, stored) {
        (_, ValueRef::Null) => Value::Null,
        (Type::Text, ValueRef::Text(bytes)) => Value::Text(text(bytes)?),
        (Type::Int, ValueRef::Integer(int)) => Value::Int(int),
        (Type::Float, ValueRef::Real(float)) => Value::Float(float),
        (Type::Bool, ValueRef::Integer(int @ (0 | 1))) => Value::Bool(int == 1),
        (Type::Bytes, ValueRef::Blob(bytes)) => Value::Bytes(bytes.to_vec()),
        (Type::Time, ValueRef::Integer(int)) => Value::Time(Time::from_micros(int)),
        (Type::Json, ValueRef::Text(bytes)) => Value::Json(serde_json::from_slice(bytes).ok()?),
        _ => return None,
    })
}

/// A row from a statement that selects [`TableSql::columns`] and `version`, beginning at a column.
pub(crate) fn row(
    stored: &rusqlite::Row<'_>,
    first: usize,
    table: &Arc<Table>,
    tenant: &Tenant,
) -> Result<Row, StoreError> {
    let mut values = Vec::with_capacity(table.columns().len());
    for (place, column) in table.columns().iter().enumerate() {
        let datum = stored.get_ref(first + place).ok().and_then(|datum| decode(datum, column.kind));
        values.push(datum.ok_or_else(|| {
            let place = format!("{table}.{}", column.name);
            StoreError::corrupt(place, format!("it holds something that is not {}", column.kind))
        })?);
    }
    let version: i64 = stored
        .get(first + table.columns().len())
        .map_err(|error| StoreError::corrupt(format!("{table}.{VERSION}"), error.to_string()))?;
    Ok(Row::new(table.clone(), tenant.clone(), values, version))
}

/// An identifier for a statement: quoted if SQLite has a keyword of that name.
pub(crate) fn name(name: &str) -> String {
    if KEYWORDS.contains(&name) { format!("\"{name}\"") } else { name.to_owned() }
}

/// SQLite's keywords.
const KEYWORDS: [&str; 147] = [
    "abort",
    "action",
    "add",
    "after",
    "all",
    "alter",
    "always",
    "analyze",
    "and",
    "as",
    "asc",
    "attach",
    "autoincrement",
    "before",
    "begin",
    "between",
    "by",
    "cascade",
    "case",
    "cast",
    "check",
    "collate",
    "column",
    "commit",
    "conflict",
    "constraint",
    "create",
    "cross",
    "current",
    "current_date",
    "current_time",
    "current_timestamp",
    "database",
    "default",
    "deferrable",
    "deferred",
    "delete",
    "desc",
    "detach",
    "distinct",
    "do",
    "drop",
    "each",
    "else",
    "end",
    "escape",
    "except",
    "exclude",
    "exclusive",
    "exists",
    "explain",
    "fail",
    "filter",
    "first",
    "following",
    "for",
    "foreign",
    "from",
    "full",
    "generated",
    "glob",
    "group",
    "groups",
    "having",
    "if",
    "ignore",
    "immediate",
    "in",
    "index",
    "indexed",
    "initially",
    "inner",
    "insert",
    "instead",
    "intersect",
    "into",
    "is",
    "isnull",
    "join",
    "key",
    "last",
    "left",
    "like",
    "limit",
    "match",
    "materialized",
    "natural",
    "no",
    "not",
    "nothing",
    "notnull",
    "null",
    "nulls",
    "of",
    "offset",
    "on",
    "or",
    "order",
    "others",
    "outer",
    "over",
    "partition",
    "plan",
    "pragma",
    "preceding",
    "primary",
    "query",
    "raise",
    "range",
    "recursive",
    "references",
    "regexp",
    "reindex",
    "release",
    "rename",
    "replace",
    "restrict",
    "returning",
    "right",
    "rollback",
    "row",
    "rows",
    "savepoint",
    "select",
    "set",
    "table",
    "temp",
    "temporary",
    "then",
    "ties",
    "to",
    "transaction",
    "trigger",
    "unbounded",
    "union",
    "unique",
    "update",
    "using",
    "vacuum",
    "values",
    "view",
    "virtual",
    "when",
    "where",
    "window",
    "with",
    "without",
];

fn list<'a>(names: impl IntoIterator<Item = &'a str>) -> String {
    names.into_iter().map(name).collect::<Vec<_>>().join(", ")
}

fn placeholders(count: usize) -> String {
    (1..=count).map(|n| format!("?{n}")).collect::<Vec<_>>().join(", ")
}

/// The statements of one table, as one caller knows it.
#[derive(Debug)]
pub(crate) struct TableSql {
    /// The table. Kept alive, so that its address identifies it.
    pub table: Arc<Table>,
    /// All columns and the version of a row, by tenant and key.
    pub select: String,
    /// A whole row: tenant, columns, version.
    pub insert: String,
    /// By tenant and key.
    pub delete: String,
    /// By the columns that they set.
    updates: Vec<(Vec<String>, String)>,
}

impl TableSql {
    pub(crate) fn new(table: &Arc<Table>) -> TableSql {
        let of = name(table.name());
        let columns = TableSql::columns(table);
        let condition = TableSql::by_key(table, 1);
        TableSql {
            table: table.clone(),
            select: format!("SELECT {columns}, {VERSION} FROM {of} WHERE {condition}"),
            insert: format!(
                "INSERT INTO {of} ({TENANT}, {columns}, {VERSION}) VALUES ({})",
                placeholders(table.columns().len() + 2)
            ),
            delete: format!("DELETE FROM {of} WHERE {condition}"),
            updates: Vec::new(),
        }
    }

    /// [`TableSql::update`], made once for each set of columns.
    pub(crate) fn update_of(&mut self, assignments: &[Assignment]) -> &str {
        let columns = || assignments.iter().map(|assignment| assignment.column.as_str());
        let known = self.updates.iter().position(|(of, _)| of.iter().map(String::as_str).eq(columns()));
        let place = known.unwrap_or_else(|| {
            let text = TableSql::update(&self.table, &columns().collect::<Vec<_>>());
            self.updates.push((columns().map(str::to_owned).collect(), text));
            self.updates.len() - 1
        });
        self.updates.get(place).map_or("", |(_, text)| text)
    }

    /// All declared columns.
    pub(crate) fn columns(table: &Table) -> String {
        list(table.columns().iter().map(|column| column.name.as_str()))
    }

    /// `tenant = ?n AND …`, with placeholders from a number on.
    fn by_key(table: &Table, first: usize) -> String {
        let keys = table.key_columns().iter().map(|column| column.name.as_str());
        let parts = std::iter::once(TENANT).chain(keys).enumerate();
        parts.map(|(n, key)| format!("{} = ?{}", name(key), first + n)).collect::<Vec<_>>().join(" AND ")
    }

    /// Sets these columns and the version, by tenant and key. Parameters: columns, version, tenant, key.
    pub(crate) fn update(table: &Table, columns: &[&str]) -> String {
        let mut text = format!("UPDATE {} SET ", name(table.name()));
        for (n, column) in columns.iter().enumerate() {
            let _ = write!(text, "{} = ?{}, ", name(column), n + 1);
        }
        let version = columns.len() + 1;
        let _ = write!(text, "{VERSION} = ?{version} WHERE {}", TableSql::by_key(table, version + 1));
        text
    }
}

/// A statement under construction with its parameters.
#[derive(Debug, Default)]
pub(crate) struct SqliteStatement {
    pub text: String,
    pub parameters: Vec<Value>,
}

impl SqliteStatement {
    fn push(&mut self, text: &str) {
        self.text.push_str(text);
    }

    fn parameter(&mut self, value: &Value) {
        self.parameters.push(value.clone());
        let _ = write!(self.text, "?{}", self.parameters.len());
    }

    /// The condition of the rest of a scan.
    fn scan_bounds(&mut self, scan: &Scan) {
        let order = || scan_order(scan.read_table());
        self.push(" WHERE 1");
        if let Some(tenant) = scan.tenant() {
            self.push(" AND tenant = ");
            self.parameter(&tenant.as_str().into());
        }
        if let Some(above) = scan.lower_bound() {
            self.behind(order(), ">", above);
        }
        if let Some(through) = scan.upper_bound() {
            self.behind(order(), "<=", through);
        }
    }

    /// ` AND (a, b) > (?, ?)`, for a cursor.
    fn behind<'a>(&mut self, columns: impl IntoIterator<Item = &'a str>, sign: &str, values: &[Value]) {
        let _ = write!(self.text, " AND ({}) {sign} (", list(columns));
        for (n, value) in values.iter().enumerate() {
            if n > 0 {
                self.push(", ");
            }
            self.parameter(value);
        }
        self.push(")");
    }
}

/// The statement of a range read: columns and version, after the tenant if rows of all tenants are read. It reads one row more
/// than the page has, to find out whether a next page exists.
pub(crate) fn query(query: &Query) -> SqliteStatement {
    let table = query.read_table();
    let mut statement = SqliteStatement::default();
    let columns = TableSql::columns(table);
    let owner = if query.tenant().is_some() { String::new() } else { format!("{TENANT}, ") };
    let _ = write!(statement.text, "SELECT {owner}{columns}, {VERSION} FROM {}", name(table.name()));
    if let Some(index) = query.read_index() {
        let _ = write!(statement.text, " INDEXED BY {}", index_name(table, &index.name));
    }
    match query.tenant() {
        Some(tenant) => {
            statement.push(" WHERE tenant = ");
            statement.parameter(&tenant.as_str().into());
        }
        None => statement.push(" WHERE 1"),
    }
    let equal = query.partition_columns().into_iter().zip(query.partition_values());
    let sort = query.sort_columns();
    for (column, value) in equal.chain(sort.iter().copied().zip(query.prefix_values())) {
        let _ = write!(statement.text, " AND {} = ", name(&column.name));
        statement.parameter(value);
    }
    if let Some(column) = sort.get(query.prefix_values().len()) {
        let (lower, upper) = query.bounds();
        for (bound, open, closed) in [(lower, ">", ">="), (upper, "<", "<=")] {
            let (sign, value) = match bound {
                Bound::Unbounded => continue,
                Bound::Included(value) => (closed, value),
                Bound::Excluded(value) => (open, value),
            };
            let _ = write!(statement.text, " AND {} {sign} ", name(&column.name));
            statement.parameter(value);
        }
    }
    if let Some(index) = query.read_index() {
        for column in index.columns().filter(|column| is_optional(table, column)) {
            let _ = write!(statement.text, " AND {} IS NOT NULL", name(column));
        }
    }
    let order = query.order_columns();
    let names = || order.iter().map(|column| column.name.as_str());
    let backward = query.direction() == Direction::Backward;
    match query.cursor_values() {
        // A partition without sort columns has one row, and the cursor is after it.
        Some([]) => statement.push(" AND 0"),
        Some(values) => statement.behind(names(), if backward { "<" } else { ">" }, values),
        None => {}
    }
    if !order.is_empty() {
        let suffix = if backward { " DESC" } else { "" };
        let parts: Vec<String> = names().map(|column| format!("{}{suffix}", name(column))).collect();
        let _ = write!(statement.text, " ORDER BY {}", parts.join(", "));
    }
    let _ = write!(statement.text, " LIMIT {}", query.page_limit() + 1);
    statement
}

/// The statement of a page of a whole table: tenant, columns, version.
pub(crate) fn scan(scan: &Scan) -> SqliteStatement {
    let table = scan.read_table();
    let mut statement = SqliteStatement::default();
    let columns = TableSql::columns(table);
    let _ = write!(statement.text, "SELECT {TENANT}, {columns}, {VERSION} FROM {}", name(table.name()));
    statement.scan_bounds(scan);
    let _ = write!(statement.text, " ORDER BY {} LIMIT {}", list(scan_order(table)), scan.page_limit() + 1);
    statement
}

/// The statement of the boundaries of segments: tenant and key of the last row of each segment but the last. Two CTEs
/// number and count the keys, which only reads the primary key.
pub(crate) fn segments(scan: &Scan, max: usize) -> SqliteStatement {
    let table = scan.read_table();
    let order = scan_order(table);
    let (from, keys) = (name(table.name()), list(order.iter().copied()));
    let mut statement = SqliteStatement::default();
    let _ = write!(
        statement.text,
        "WITH _keys AS (SELECT {keys}, row_number() OVER (ORDER BY {keys}) AS _n FROM {from}"
    );
    statement.scan_bounds(scan);
    let _ = write!(statement.text, "), _size AS (SELECT count(*) AS _total FROM {from}");
    statement.scan_bounds(scan);
    let _ = write!(
        statement.text,
        ") SELECT {keys} FROM _keys, _size WHERE _n < _total AND _n * {max} / _total <> (_n - 1) * {max} / _total \
         ORDER BY _n"
    );
    statement
}

/// The columns by which scans are ordered.
fn scan_order(table: &Table) -> Vec<&str> {
    let keys = table.key_columns().iter().map(|column| column.name.as_str());
    std::iter::once(TENANT).chain(keys).collect()
}

/// The position that [`segments`] returns: tenant and key.
pub(crate) fn scan_position(stored: &rusqlite::Row<'_>, table: &Table) -> Result<Vec<Value>, StoreError> {
    let kinds = std::iter::once(Type::Text).chain(table.key_columns().iter().map(|column| column.kind));
    let value = |(index, kind): (usize, Type)| {
        let datum = stored.get_ref(index).ok().and_then(|datum| decode(datum, kind));
        datum.ok_or_else(|| StoreError::corrupt(table.name(), format!("key column {index} is not {kind}")))
    };
    kinds.enumerate().map(value).collect()
}

/// Whether a column of the table may be null.
pub(crate) fn is_optional(table: &Table, column: &str) -> bool {
    table.column(column).is_some_and(|column| !column.required)
}

/// The name of an index, unique in the file.
pub(crate) fn index_name(table: &Table, index: &str) -> String {
    format!("{}__{index}", table.name())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_index_across_tenants_gives_rows_with_their_owners() {
        let table = Table::named("jobs")
            .partition("id", Type::Int)
            .optional("due_shard", Type::Int)
            .required("due_at", Type::Time)
            .global_index("due", &["due_shard"], &["due_at"])
            .build()
            .unwrap();
        let index = table.index("due").unwrap();
        assert_eq!(
            crate::layout::create_index(&table, index),
            "CREATE INDEX jobs__due ON jobs (due_shard, due_at) WHERE due_shard IS NOT NULL"
        );
        let read = Query::all_tenants(&table, "due", [3.into()]).unwrap().limit(10).unwrap();
        assert_eq!(
            query(&read).text,
            "SELECT tenant, id, due_shard, due_at, version FROM jobs INDEXED BY jobs__due WHERE 1 AND due_shard = ?1 \
             AND due_shard IS NOT NULL ORDER BY due_at, tenant, id LIMIT 11"
        );
    }

    #[test]
    fn statements_name_every_column() {
        let table = Table::named("profiles")
            .partition("user_id", Type::Int)
            .required("display_name", Type::Text)
            .optional("order", Type::Int)
            .build()
            .unwrap();
        let sql = TableSql::new(&table);
        assert_eq!(
            sql.select,
            "SELECT user_id, display_name, \"order\", version FROM profiles WHERE tenant = ?1 AND user_id = ?2"
        );
        assert_eq!(
            sql.insert,
            "INSERT INTO profiles (tenant, user_id, display_name, \"order\", version) VALUES (?1, ?2, ?3, ?4, ?5)"
        );
        assert_eq!(
            TableSql::update(&table, &["order"]),
            "UPDATE profiles SET \"order\" = ?1, version = ?2 WHERE tenant = ?3 AND user_id = ?4"
        );
    }
}
