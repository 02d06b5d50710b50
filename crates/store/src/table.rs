//! Tables: typed columns, a key of partition and sort columns, declared indexes.
//!
//! Two columns are in every table without being declared: `tenant` (text), the first column of every key and
//! index, and `version` (int), which counts the writes of a row's present life, from 1.
//!
//! A row stands in an index only while all of the index's columns are set (indexes are sparse), so that no
//! engine has to say where null sorts.
//!
//! An index *across* tenants does not begin with the tenant: it holds the rows of all of them. It is for workers of
//! the house itself, which have to find what is due without knowing whose it is.

use std::collections::BTreeMap;
use std::fmt;
use std::sync::{Arc, LazyLock};

use serde::{Deserialize, Serialize};

use crate::error::SchemaError;
use crate::value::{Type, Value};

/// The name of the column that leads every key.
pub const TENANT: &str = "tenant";
/// The name of the column that counts a row's writes.
pub const VERSION: &str = "version";
/// Names of tables and columns are at most this long, so that derived names fit every engine.
pub const NAME_MAX: usize = 48;

/// A declared column.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Column {
    /// Its name, unique in the table.
    pub name: String,
    /// Its type.
    #[serde(rename = "type")]
    pub kind: Type,
    /// Whether it refuses null.
    pub required: bool,
    /// What an insert stores when it does not set the column.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub default: Option<Value>,
}

static TENANT_COLUMN: LazyLock<Column> = LazyLock::new(|| key_column(TENANT, Type::Text));

/// The column that leads every key, as a column like any other: an index across tenants orders by it too.
pub fn tenant_column() -> &'static Column {
    &TENANT_COLUMN
}

/// A declared index: rows of one partition, in the order of the sort columns and then of the row's key, of one tenant
/// or of all.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Index {
    /// Its name, unique in the table.
    pub name: String,
    /// Columns that a query must give, after the tenant. May be empty, unless the index is across tenants.
    pub partition: Vec<String>,
    /// Columns that order the rows.
    pub sort: Vec<String>,
    /// Whether it holds the rows of all tenants together. The tenant then stands behind the sort columns, before the
    /// row's key.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub global: bool,
}

impl Index {
    /// Partition columns, then sort columns.
    pub fn columns(&self) -> impl Iterator<Item = &str> {
        self.partition.iter().chain(&self.sort).map(String::as_str)
    }
}

/// A number that says where rows of a table are, like the number of buckets they are spread over. The store keeps it with the
/// table's definition, and a migration refuses a number with which rows that exist would no longer be found.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct LayoutNumber {
    /// The setting that it comes from, unique in the table.
    pub name: String,
    /// The number.
    pub value: i64,
    /// How it may change.
    pub rule: LayoutRule,
}

/// How a [`LayoutNumber`] may change while its table exists.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum LayoutRule {
    /// It may become greater.
    Grows,
    /// It stays as it is.
    Fixed,
}

/// A table. Built with [`Table::named`], immutable after that, shared by `Arc`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Table {
    name: String,
    /// Key columns first (partition, then sort), then the others in the order of declaration.
    columns: Vec<Column>,
    partition_len: usize,
    sort_len: usize,
    indexes: Vec<Index>,
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    layout: Vec<LayoutNumber>,
    /// New and former names of columns. They are for migrations and not part of the definition that is stored.
    #[serde(skip)]
    renames: Vec<(String, String)>,
}

impl Table {
    /// Starts the declaration of a table.
    pub fn named(name: impl Into<String>) -> TableBuilder {
        TableBuilder {
            name: name.into(),
            partition: Vec::new(),
            sort: Vec::new(),
            others: Vec::new(),
            indexes: Vec::new(),
            layout: Vec::new(),
            renames: Vec::new(),
        }
    }

    /// The name that a column had before, if the declaration says one.
    pub fn renamed_from(&self, column: &str) -> Option<&str> {
        self.renames.iter().find(|(name, _)| name == column).map(|(_, former)| former.as_str())
    }

    /// Its name.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// All declared columns: the key's first, in key order.
    pub fn columns(&self) -> &[Column] {
        &self.columns
    }

    /// The key's columns after the tenant: partition, then sort.
    pub fn key_columns(&self) -> &[Column] {
        self.columns.split_at(self.key_len()).0
    }

    /// The key's partition columns.
    pub fn partition_columns(&self) -> &[Column] {
        self.columns.split_at(self.partition_len).0
    }

    /// The key's sort columns.
    pub fn sort_columns(&self) -> &[Column] {
        self.key_columns().split_at(self.partition_len).1
    }

    /// The columns that are not part of the key.
    pub fn other_columns(&self) -> &[Column] {
        self.columns.split_at(self.key_len()).1
    }

    /// How many columns the key has after the tenant.
    pub fn key_len(&self) -> usize {
        self.partition_len + self.sort_len
    }

    /// The declared indexes.
    pub fn indexes(&self) -> &[Index] {
        &self.indexes
    }

    /// The index of that name.
    pub fn index(&self, name: &str) -> Option<&Index> {
        self.indexes.iter().find(|index| index.name == name)
    }

    /// The numbers that say where its rows are.
    pub fn layout(&self) -> &[LayoutNumber] {
        &self.layout
    }

    /// The layout number of that name.
    pub fn layout_number(&self, name: &str) -> Option<&LayoutNumber> {
        self.layout.iter().find(|number| number.name == name)
    }

    /// Where a column stands in [`Table::columns`] and in a row's values.
    pub fn position(&self, column: &str) -> Option<usize> {
        self.columns.iter().position(|candidate| candidate.name == column)
    }

    /// The declared column of that name.
    pub fn column(&self, name: &str) -> Option<&Column> {
        self.columns.iter().find(|candidate| candidate.name == name)
    }

    /// The type of a column, `version` and `tenant` included.
    pub fn type_of(&self, column: &str) -> Option<Type> {
        match column {
            VERSION => Some(Type::Int),
            TENANT => Some(Type::Text),
            _ => self.column(column).map(|column| column.kind),
        }
    }
}

impl fmt::Display for Table {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.name)
    }
}

/// A table being declared.
#[derive(Clone, Debug)]
pub struct TableBuilder {
    name: String,
    partition: Vec<Column>,
    sort: Vec<Column>,
    others: Vec<Column>,
    indexes: Vec<Index>,
    layout: Vec<LayoutNumber>,
    renames: Vec<(String, String)>,
}

impl TableBuilder {
    /// The name of the table.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Adds a partition column to the key.
    pub fn partition(mut self, name: &str, kind: Type) -> TableBuilder {
        self.partition.push(key_column(name, kind));
        self
    }

    /// Adds a sort column to the key.
    pub fn sort(mut self, name: &str, kind: Type) -> TableBuilder {
        self.sort.push(key_column(name, kind));
        self
    }

    /// Adds a column that refuses null.
    pub fn required(mut self, name: &str, kind: Type) -> TableBuilder {
        self.others.push(Column { name: name.to_owned(), kind, required: true, default: None });
        self
    }

    /// Adds a column that may be null.
    pub fn optional(mut self, name: &str, kind: Type) -> TableBuilder {
        self.others.push(Column { name: name.to_owned(), kind, required: false, default: None });
        self
    }

    /// Adds a column that refuses null and has a default for inserts that do not set it.
    pub fn defaulted(mut self, name: &str, kind: Type, default: impl Into<Value>) -> TableBuilder {
        let default = Some(default.into());
        self.others.push(Column { name: name.to_owned(), kind, required: true, default });
        self
    }

    /// Adds a column that was declared elsewhere.
    pub fn declared(mut self, column: Column) -> TableBuilder {
        self.others.push(column);
        self
    }

    /// Says which name a column had before.
    pub fn renamed(mut self, column: &str, former: &str) -> TableBuilder {
        self.renames.push((column.to_owned(), former.to_owned()));
        self
    }

    /// Adds an index that was declared elsewhere.
    pub fn declared_index(mut self, index: Index) -> TableBuilder {
        self.indexes.push(index);
        self
    }

    /// Records a number that says where rows are, and that may only become greater while the table exists.
    pub fn growing(self, name: &str, value: impl Into<i64>) -> TableBuilder {
        let value = value.into();
        self.declared_layout(LayoutNumber { name: name.to_owned(), value, rule: LayoutRule::Grows })
    }

    /// Records a number that rows were made with, and that cannot change while the table exists.
    pub fn fixed(self, name: &str, value: impl Into<i64>) -> TableBuilder {
        let value = value.into();
        self.declared_layout(LayoutNumber { name: name.to_owned(), value, rule: LayoutRule::Fixed })
    }

    /// Records a layout number that was declared elsewhere.
    pub fn declared_layout(mut self, number: LayoutNumber) -> TableBuilder {
        self.layout.push(number);
        self
    }

    /// Declares an index of each tenant's rows.
    pub fn index(self, name: &str, partition: &[&str], sort: &[&str]) -> TableBuilder {
        self.declared_index(index(name, partition, sort, false))
    }

    /// Declares an index across tenants, for [`crate::Query::all_tenants`]. Its partition columns spread the rows of the
    /// whole house, so there must be one, and it should have as many values as workers are to share the reading.
    pub fn global_index(self, name: &str, partition: &[&str], sort: &[&str]) -> TableBuilder {
        self.declared_index(index(name, partition, sort, true))
    }

    /// The names of columns that cannot be declared, each once: those that every table has, and those that are declared before.
    pub fn clashes(&self) -> Vec<String> {
        let (mut seen, mut found) = (vec![TENANT, VERSION], Vec::new());
        for column in self.partition.iter().chain(&self.sort).chain(&self.others) {
            if !seen.contains(&column.name.as_str()) {
                seen.push(&column.name);
            } else if !found.contains(&column.name) {
                found.push(column.name.clone());
            }
        }
        found
    }

    /// Checks the declaration.
    pub fn build(self) -> Result<Arc<Table>, SchemaError> {
        let TableBuilder { name: table, partition, sort, others, indexes, layout, renames } = self;
        let bad = |why: String| SchemaError { table: table.clone(), why };
        check_name(&table).map_err(|why| bad(format!("the table's name {why}")))?;
        if table.starts_with("statehouse") {
            return Err(bad("names that begin with `statehouse` are kept for Statehouse itself".into()));
        }
        if partition.is_empty() {
            return Err(bad("it needs at least one partition column".into()));
        }
        let (partition_len, sort_len) = (partition.len(), sort.len());
        let mut columns: Vec<Column> = Vec::with_capacity(partition_len + sort_len + others.len());
        for (place, mut column) in partition.into_iter().chain(sort).chain(others).enumerate() {
            check_name(&column.name)
                .map_err(|why| bad(format!("the column name {:?} {why}", column.name)))?;
            if column.name == TENANT || column.name == VERSION {
                return Err(bad(format!("column {} is in every table and is not declared", column.name)));
            }
            if columns.iter().any(|other| other.name == column.name) {
                return Err(bad(format!("column {} is declared twice", column.name)));
            }
            if place < partition_len + sort_len && !column.kind.is_ordered() {
                return Err(bad(format!(
                    "key column {} is of type {}, which has no order",
                    column.name, column.kind
                )));
            }
            if let Some(default) = column.default.take() {
                let admitted = default
                    .admitted(column.kind)
                    .map_err(|why| bad(format!("the default of column {}: {why}", column.name)))?;
                column.default = (!admitted.is_null()).then_some(admitted);
            }
            columns.push(column);
        }
        for (place, index) in indexes.iter().enumerate() {
            check_name(&index.name).map_err(|why| bad(format!("the index name {:?} {why}", index.name)))?;
            if indexes.iter().take(place).any(|other| other.name == index.name) {
                return Err(bad(format!("index {} is declared twice", index.name)));
            }
            if index.columns().next().is_none() {
                return Err(bad(format!("index {} has no columns", index.name)));
            }
            if index.global && index.partition.is_empty() {
                let why =
                    "is across tenants and has no partition column, so all rows would stand in one place";
                return Err(bad(format!("index {} {why}", index.name)));
            }
            let mut seen: Vec<&str> = Vec::new();
            for name in index.columns() {
                let column = columns.iter().find(|column| column.name == name);
                let column = column
                    .ok_or_else(|| bad(format!("index {} names an unknown column {name}", index.name)))?;
                if !column.kind.is_ordered() {
                    return Err(bad(format!(
                        "index {}: column {name} is of type {}, which has no order",
                        index.name, column.kind
                    )));
                }
                if seen.contains(&name) {
                    return Err(bad(format!("index {} names column {name} twice", index.name)));
                }
                seen.push(name);
            }
        }
        if let Some((_, twice)) = layout
            .iter()
            .enumerate()
            .find(|(place, number)| layout.iter().take(*place).any(|other| other.name == number.name))
        {
            return Err(bad(format!("layout number {} is declared twice", twice.name)));
        }
        if let Some((column, former)) =
            renames.iter().find(|(_, former)| columns.iter().any(|column| column.name == *former))
        {
            return Err(bad(format!("column {column} was {former} before, which is declared too")));
        }
        Ok(Arc::new(Table { name: table, columns, partition_len, sort_len, indexes, layout, renames }))
    }
}

fn index(name: &str, partition: &[&str], sort: &[&str], global: bool) -> Index {
    let owned = |names: &[&str]| names.iter().map(|&name| name.to_owned()).collect();
    Index { name: name.to_owned(), partition: owned(partition), sort: owned(sort), global }
}

fn key_column(name: &str, kind: Type) -> Column {
    Column { name: name.to_owned(), kind, required: true, default: None }
}

/// Names are plain enough to be used unquoted, and readable, on every engine.
fn check_name(name: &str) -> Result<(), String> {
    let mut letters = name.chars();
    let plain = letters.next().is_some_and(|first| first.is_ascii_lowercase())
        && letters.all(|c| c.is_ascii_lowercase() || c.is_ascii_digit() || c == '_');
    if !plain {
        Err("must begin with a letter a-z and hold only a-z, 0-9 and _".into())
    } else if name.len() > NAME_MAX {
        Err(format!("has {} characters; the limit is {NAME_MAX}", name.len()))
    } else {
        Ok(())
    }
}

/// The tables of one house, by name.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Schema {
    tables: BTreeMap<String, Arc<Table>>,
}

impl Schema {
    /// A schema of these tables. A name given twice is an error.
    pub fn new(tables: impl IntoIterator<Item = Arc<Table>>) -> Result<Schema, SchemaError> {
        let mut schema = Schema::default();
        for table in tables {
            let name = table.name().to_owned();
            if schema.tables.insert(name.clone(), table).is_some() {
                return Err(SchemaError { table: name, why: "it is declared twice".into() });
            }
        }
        Ok(schema)
    }

    /// The tables in the order of their names.
    pub fn tables(&self) -> impl Iterator<Item = &Arc<Table>> {
        self.tables.values()
    }

    /// The table of that name.
    pub fn table(&self, name: &str) -> Option<&Arc<Table>> {
        self.tables.get(name)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check(builder: TableBuilder, expect: &str) {
        match builder.build() {
            Ok(_) => panic!("expected an error holding {expect:?}"),
            Err(error) => assert!(error.to_string().contains(expect), "{error}"),
        }
    }

    #[test]
    fn declarations_that_no_engine_could_carry_are_refused() {
        let start = || Table::named("t").partition("id", Type::Int);
        check(Table::named("t"), "at least one partition column");
        check(Table::named("T").partition("id", Type::Int), "must begin with a letter a-z");
        check(Table::named("t".repeat(49)).partition("id", Type::Int), "49 characters; the limit is 48");
        check(Table::named("statehouse_log").partition("id", Type::Int), "kept for Statehouse");
        check(start().required("id", Type::Int), "column id is declared twice");
        check(start().required("version", Type::Int), "in every table");
        check(Table::named("t").partition("id", Type::Json), "has no order");
        check(start().index("by_x", &[], &["x"]), "unknown column x");
        check(start().index("by_x", &[], &[]), "no columns");
        check(start().index("by_id", &["id"], &["id"]), "twice");
        check(start().global_index("by_id", &[], &["id"]), "no partition column");
        check(start().defaulted("n", Type::Int, "seven"), "expected int, got text");
        check(start().growing("buckets", 2).fixed("buckets", 2), "layout number buckets is declared twice");
    }

    #[test]
    fn definitions_survive_serialization() {
        let table = Table::named("profiles")
            .partition("user_id", Type::Int)
            .defaulted("status", Type::Text, "ACTIVE")
            .optional("bio", Type::Text)
            .index("by_status", &["status"], &[])
            .global_index("everywhere", &["status"], &["user_id"])
            .growing("buckets", 4)
            .fixed("bits", 10)
            .build()
            .unwrap();
        let text = serde_json::to_string(&*table).unwrap();
        assert_eq!(serde_json::from_str::<Table>(&text).unwrap(), *table);
    }
}
