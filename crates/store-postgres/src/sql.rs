//! SQL identifiers, types, literals, and the conversion of values to and from the server.
//!
//! Values are sent in PostgreSQL's binary format, which is lossless: a time is a count of microseconds, a float its 64 bits. Values
//! that are received are validated like those that are sent ([`Value::admitted`]). A row that was written by hand, with `infinity`
//! or `NaN` in it, is reported as corrupt.
//!
//! The encoding of a single value does not depend on the type that the server infers for its parameter, so the type need not be
//! asked for before it is sent. An array contains the type of its elements, which therefore must be known: [`Arg::declared`].

use std::error::Error;
use std::fmt;

use bytes::{BufMut as _, BytesMut};
use statehouse_store::value::canonical_json;
use statehouse_store::{Row, StoreError, Table, Tenant, Time, Type, Value};
use std::sync::{Arc, LazyLock};
use tokio_postgres::types::{FromSql, IsNull, Kind, ToSql, Type as PgType, to_sql_checked};

/// Words that PostgreSQL does not take as a column's or a table's name unless they are quoted: the reserved ones,
/// and those reserved for functions and types.
const RESERVED: [&str; 101] = [
    "all",
    "analyse",
    "analyze",
    "and",
    "any",
    "array",
    "as",
    "asc",
    "asymmetric",
    "authorization",
    "binary",
    "both",
    "case",
    "cast",
    "check",
    "collate",
    "collation",
    "column",
    "concurrently",
    "constraint",
    "create",
    "cross",
    "current_catalog",
    "current_date",
    "current_role",
    "current_schema",
    "current_time",
    "current_timestamp",
    "current_user",
    "default",
    "deferrable",
    "desc",
    "distinct",
    "do",
    "else",
    "end",
    "except",
    "false",
    "fetch",
    "for",
    "foreign",
    "freeze",
    "from",
    "full",
    "grant",
    "group",
    "having",
    "ilike",
    "in",
    "initially",
    "inner",
    "intersect",
    "into",
    "is",
    "isnull",
    "join",
    "lateral",
    "leading",
    "left",
    "like",
    "limit",
    "localtime",
    "localtimestamp",
    "natural",
    "not",
    "notnull",
    "null",
    "offset",
    "on",
    "only",
    "or",
    "order",
    "outer",
    "overlaps",
    "placing",
    "primary",
    "references",
    "returning",
    "right",
    "select",
    "session_user",
    "similar",
    "some",
    "symmetric",
    "system_user",
    "table",
    "tablesample",
    "then",
    "to",
    "trailing",
    "true",
    "union",
    "unique",
    "user",
    "using",
    "variadic",
    "verbose",
    "when",
    "where",
    "window",
    "with",
];

/// A name as it stands in a statement: quoted only where it has to be.
pub(crate) fn name(name: &str) -> String {
    let mut letters = name.chars();
    let plain = letters.next().is_some_and(|first| first.is_ascii_lowercase() || first == '_')
        && letters.all(|c| c.is_ascii_lowercase() || c.is_ascii_digit() || c == '_')
        && RESERVED.binary_search(&name).is_err();
    if plain { name.to_owned() } else { format!("\"{}\"", name.replace('"', "\"\"")) }
}

/// A text as a literal.
pub(crate) fn quoted(text: &str) -> String {
    format!("'{}'", text.replace('\'', "''"))
}

/// The PostgreSQL type that holds a type.
pub(crate) fn type_name(kind: Type) -> &'static str {
    match kind {
        Type::Text => "text",
        Type::Int => "bigint",
        Type::Float => "double precision",
        Type::Bool => "boolean",
        Type::Bytes => "bytea",
        Type::Time => "timestamptz",
        Type::Json => "jsonb",
    }
}

/// A constant as a literal of its column's type.
pub(crate) fn literal(value: &Value) -> String {
    match value {
        Value::Bytes(bytes) => {
            let digits: String = bytes.iter().map(|byte| format!("{byte:02x}")).collect();
            format!("'\\x{digits}'")
        }
        Value::Json(json) => quoted(&json.to_string()),
        // The others print as SQL literals already.
        other => other.to_string(),
    }
}

/// `$1`, `$2`, … `$n` are counted from here.
pub(crate) fn placeholder(index: usize) -> String {
    format!("${}", index + 1)
}

/// Microseconds from the epoch of Unix, 1970, to that of PostgreSQL, 2000.
const PG_EPOCH_MICROS: i64 = 946_684_800_000_000;

/// How deeply JSON that is read may be nested: a column's content, inside a row, inside an event, inside a record.
const JSON_DEPTH_READ: usize = Value::JSON_DEPTH_MAX + 16;

/// A parameter of a statement.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum Arg<'a> {
    /// One value.
    One(&'a Value),
    /// One owned value.
    Own(Value),
    /// An array of values of this type.
    Many(&'static str, Vec<&'a Value>),
    /// An array of whatever is of this type.
    List(&'static str, Vec<Arg<'a>>),
    /// A text.
    Text(&'a str),
    /// A 64-bit integer.
    Int(i64),
    /// The number of a partition, a 32-bit integer.
    Partition(u32),
    /// A span of microseconds.
    Interval(i64),
    /// An array of texts.
    Texts(Vec<&'a str>),
    /// An array of 64-bit integers.
    Ints(Vec<i64>),
    /// An array of numbers of partitions.
    Partitions(Vec<u32>),
    /// An array of times.
    Times(Vec<Time>),
    /// JSON text.
    Json(String),
    /// An array of owned texts.
    Written(Vec<String>),
}

impl Arg<'_> {
    /// The type that it has to be declared as. Of a single value that is none: the server finds it where the parameter
    /// stands, as it does when a statement is prepared.
    pub(crate) fn declared(&self) -> PgType {
        match self {
            Arg::Many(members, _) | Arg::List(members, _) => array_of(members),
            Arg::Texts(_) | Arg::Written(_) => PgType::TEXT_ARRAY,
            Arg::Ints(_) => PgType::INT8_ARRAY,
            Arg::Partitions(_) => PgType::INT4_ARRAY,
            Arg::Times(_) => PgType::TIMESTAMPTZ_ARRAY,
            Arg::One(_)
            | Arg::Own(_)
            | Arg::Text(_)
            | Arg::Int(_)
            | Arg::Partition(_)
            | Arg::Interval(_)
            | Arg::Json(_) => UNDECLARED.clone(),
        }
    }

    /// Whether it can stand for a parameter that the server takes to be of this type.
    pub(crate) fn fits(&self, found: &PgType) -> bool {
        let declared = self.declared();
        declared == *UNDECLARED || declared == *found
    }
}

/// What is said instead of a type that the server is to find: the number that no type has.
static UNDECLARED: LazyLock<PgType> =
    LazyLock::new(|| PgType::new("undeclared".to_owned(), 0, Kind::Simple, String::new()));

/// The type of arrays whose members are of a type, by the name that stands in statements.
fn array_of(members: &str) -> PgType {
    match members {
        "bigint" => PgType::INT8_ARRAY,
        "integer" => PgType::INT4_ARRAY,
        "double precision" => PgType::FLOAT8_ARRAY,
        "boolean" => PgType::BOOL_ARRAY,
        "bytea" => PgType::BYTEA_ARRAY,
        "timestamptz" => PgType::TIMESTAMPTZ_ARRAY,
        "interval" => PgType::INTERVAL_ARRAY,
        "jsonb" => PgType::JSONB_ARRAY,
        _ => PgType::TEXT_ARRAY,
    }
}

impl ToSql for Arg<'_> {
    fn to_sql(&self, ty: &PgType, out: &mut BytesMut) -> Result<IsNull, Box<dyn Error + Sync + Send>> {
        match self {
            Arg::One(value) => Scalar(value).to_sql(ty, out),
            Arg::Own(value) => Scalar(value).to_sql(ty, out),
            Arg::Many(_, values) => {
                values.iter().map(|value| Scalar(value)).collect::<Vec<_>>().to_sql(ty, out)
            }
            Arg::List(_, args) => args.to_sql(ty, out),
            Arg::Text(text) => text.to_sql(ty, out),
            Arg::Int(int) => int.to_sql(ty, out),
            Arg::Partition(number) => partition(*number)?.to_sql(ty, out),
            Arg::Interval(micros) => {
                out.put_i64(*micros);
                // Days and months, whose length would depend on a calendar.
                out.put_i64(0);
                Ok(IsNull::No)
            }
            Arg::Texts(texts) => texts.to_sql(ty, out),
            Arg::Ints(ints) => ints.to_sql(ty, out),
            Arg::Partitions(numbers) => {
                let numbers: Result<Vec<i32>, _> = numbers.iter().map(|number| partition(*number)).collect();
                numbers?.to_sql(ty, out)
            }
            Arg::Times(times) => times.iter().map(|time| Instant(*time)).collect::<Vec<_>>().to_sql(ty, out),
            Arg::Json(text) => JsonText(text).to_sql(ty, out),
            Arg::Written(texts) => texts.to_sql(ty, out),
        }
    }

    fn accepts(_: &PgType) -> bool {
        true
    }

    to_sql_checked!();
}

/// The number of a partition as the server has it.
fn partition(number: u32) -> Result<i32, std::num::TryFromIntError> {
    i32::try_from(number)
}

/// As `explain` prints it.
impl fmt::Display for Arg<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fn list<T: fmt::Display>(f: &mut fmt::Formatter<'_>, items: impl Iterator<Item = T>) -> fmt::Result {
            f.write_str("{")?;
            for (index, item) in items.enumerate() {
                write!(f, "{}{item}", if index > 0 { ", " } else { "" })?;
            }
            f.write_str("}")
        }
        match self {
            Arg::One(value) => write!(f, "{value}"),
            Arg::Own(value) => write!(f, "{value}"),
            Arg::Many(_, values) => list(f, values.iter()),
            Arg::List(_, args) => list(f, args.iter()),
            Arg::Text(text) => f.write_str(&quoted(text)),
            Arg::Int(int) => write!(f, "{int}"),
            Arg::Partition(number) => write!(f, "{number}"),
            Arg::Interval(micros) => write!(f, "'{micros} microseconds'"),
            Arg::Texts(texts) => list(f, texts.iter().map(|text| quoted(text))),
            Arg::Ints(ints) => list(f, ints.iter()),
            Arg::Partitions(numbers) => list(f, numbers.iter()),
            Arg::Times(times) => list(f, times.iter()),
            Arg::Json(text) => f.write_str(&quoted(text)),
            Arg::Written(texts) => list(f, texts.iter().map(|text| quoted(text))),
        }
    }
}

#[derive(Debug)]
struct Scalar<'a>(&'a Value);

impl ToSql for Scalar<'_> {
    fn to_sql(&self, ty: &PgType, out: &mut BytesMut) -> Result<IsNull, Box<dyn Error + Sync + Send>> {
        match self.0 {
            Value::Null => return Ok(IsNull::Yes),
            Value::Text(text) => out.put_slice(text.as_bytes()),
            Value::Int(int) => return int.to_sql(ty, out),
            Value::Float(float) => out.put_f64(*float),
            Value::Bool(bool) => out.put_u8(u8::from(*bool)),
            Value::Bytes(bytes) => out.put_slice(bytes),
            Value::Time(time) => return Instant(*time).to_sql(ty, out),
            Value::Json(json) => {
                out.put_u8(1);
                serde_json::to_writer(out.writer(), json)?;
            }
        }
        Ok(IsNull::No)
    }

    fn accepts(_: &PgType) -> bool {
        true
    }

    to_sql_checked!();
}

#[derive(Debug)]
struct Instant(Time);

impl ToSql for Instant {
    fn to_sql(&self, _: &PgType, out: &mut BytesMut) -> Result<IsNull, Box<dyn Error + Sync + Send>> {
        out.put_i64(self.0.micros().saturating_sub(PG_EPOCH_MICROS));
        Ok(IsNull::No)
    }

    fn accepts(_: &PgType) -> bool {
        true
    }

    to_sql_checked!();
}

/// The binary form of jsonb is its text behind a version number.
#[derive(Debug)]
struct JsonText<'a>(&'a str);

impl ToSql for JsonText<'_> {
    fn to_sql(&self, _: &PgType, out: &mut BytesMut) -> Result<IsNull, Box<dyn Error + Sync + Send>> {
        out.put_u8(1);
        out.put_slice(self.0.as_bytes());
        Ok(IsNull::No)
    }

    fn accepts(_: &PgType) -> bool {
        true
    }

    to_sql_checked!();
}

/// A value as the server sent it.
struct Received(Value);

impl<'a> FromSql<'a> for Received {
    fn from_sql(ty: &PgType, raw: &'a [u8]) -> Result<Received, Box<dyn Error + Sync + Send>> {
        let value = match *ty {
            PgType::TEXT => Value::Text(std::str::from_utf8(raw)?.to_owned()),
            PgType::INT8 => Value::Int(i64::from_be_bytes(raw.try_into()?)),
            PgType::INT4 => Value::Int(i32::from_be_bytes(raw.try_into()?).into()),
            PgType::FLOAT8 => Value::Float(f64::from_be_bytes(raw.try_into()?)).admitted(Type::Float)?,
            PgType::BOOL => Value::Bool(raw != [0]),
            PgType::BYTEA => Value::Bytes(raw.to_vec()),
            PgType::TIMESTAMPTZ => {
                let micros = i64::from_be_bytes(raw.try_into()?).saturating_add(PG_EPOCH_MICROS);
                Value::Time(Time::from_micros(micros)).admitted(Type::Time)?
            }
            PgType::JSON | PgType::JSONB => {
                // The binary form of jsonb is its text behind a version number.
                let text = if *ty == PgType::JSONB { raw.get(1..).unwrap_or_default() } else { raw };
                match canonical_json(serde_json::from_slice(text)?, JSON_DEPTH_READ)? {
                    serde_json::Value::Null => Value::Null,
                    json => Value::Json(json),
                }
            }
            ref other => return Err(format!("a column of type {other} is none of ours").into()),
        };
        Ok(Received(value))
    }

    fn from_sql_null(_: &PgType) -> Result<Received, Box<dyn Error + Sync + Send>> {
        Ok(Received(Value::Null))
    }

    fn accepts(_: &PgType) -> bool {
        true
    }
}

/// One value of a row that the server sent. `table` is named in the error.
pub(crate) fn value_at(
    row: &tokio_postgres::Row,
    index: usize,
    kind: Type,
    table: &str,
) -> Result<Value, StoreError> {
    // Most of what is read is of these types. The rest, and whatever is not as it should be, goes the long way.
    if let (Ok(Octets(Some(raw))), Some(column)) = (row.try_get(index), row.columns().get(index)) {
        let plain = match kind {
            Type::Text if *column.type_() == PgType::TEXT => text_of(raw),
            Type::Int if *column.type_() == PgType::INT8 => int_of(raw),
            Type::Int if *column.type_() == PgType::INT4 => short_of(raw),
            Type::Time if *column.type_() == PgType::TIMESTAMPTZ => time_of(raw),
            _ => None,
        };
        if let Some(value) = plain {
            return Ok(value);
        }
    }
    let Received(value) =
        row.try_get(index).map_err(|error| StoreError::corrupt(table, with_source(&error)))?;
    of_kind(value, index, kind, table)
}

/// A value as the server sent it, not looked at.
struct Octets<'a>(Option<&'a [u8]>);

impl<'a> FromSql<'a> for Octets<'a> {
    fn from_sql(_: &PgType, raw: &'a [u8]) -> Result<Octets<'a>, Box<dyn Error + Sync + Send>> {
        Ok(Octets(Some(raw)))
    }

    fn from_sql_null(_: &PgType) -> Result<Octets<'a>, Box<dyn Error + Sync + Send>> {
        Ok(Octets(None))
    }

    fn accepts(_: &PgType) -> bool {
        true
    }
}

fn text_of(raw: &[u8]) -> Option<Value> {
    Some(Value::Text(std::str::from_utf8(raw).ok()?.to_owned()))
}

fn int_of(raw: &[u8]) -> Option<Value> {
    Some(Value::Int(i64::from_be_bytes(raw.try_into().ok()?)))
}

fn short_of(raw: &[u8]) -> Option<Value> {
    Some(Value::Int(i32::from_be_bytes(raw.try_into().ok()?).into()))
}

fn time_of(raw: &[u8]) -> Option<Value> {
    let micros = i64::from_be_bytes(raw.try_into().ok()?).saturating_add(PG_EPOCH_MICROS);
    Value::Time(Time::from_micros(micros)).admitted(Type::Time).ok()
}

fn of_kind(value: Value, index: usize, kind: Type, table: &str) -> Result<Value, StoreError> {
    match value.kind() {
        Some(got) if got != kind => {
            Err(StoreError::corrupt(table, format!("column {index} holds {got} where {kind} is declared")))
        }
        _ => Ok(value),
    }
}

/// The fields of a record that stands in one column, each with its type.
pub(crate) struct Fields<'a>(Vec<(PgType, Option<&'a [u8]>)>);

impl Fields<'_> {
    /// One value of the record.
    pub(crate) fn value_at(&self, index: usize, kind: Type, table: &str) -> Result<Value, StoreError> {
        let corrupt = |why: String| StoreError::corrupt(table, why);
        let field = self.0.get(index).ok_or_else(|| corrupt(format!("a record has no column {index}")))?;
        let received = match field {
            (ty, Some(raw)) => Received::from_sql(ty, raw),
            (ty, None) => Received::from_sql_null(ty),
        };
        let Received(value) = received.map_err(|error| corrupt(with_source(&*error)))?;
        of_kind(value, index, kind, table)
    }
}

/// In its binary form a record is the number of its fields, and of each its type, its length and its octets.
impl<'a> FromSql<'a> for Fields<'a> {
    fn from_sql(_: &PgType, raw: &'a [u8]) -> Result<Fields<'a>, Box<dyn Error + Sync + Send>> {
        fn int(raw: &mut &[u8]) -> Result<i32, Box<dyn Error + Sync + Send>> {
            let (int, rest) = raw.split_first_chunk().ok_or("a record ends too early")?;
            *raw = rest;
            Ok(i32::from_be_bytes(*int))
        }
        let mut raw = raw;
        let mut fields = Vec::new();
        for _ in 0..int(&mut raw)? {
            let oid = int(&mut raw)?.cast_unsigned();
            let ty =
                PgType::from_oid(oid).ok_or_else(|| format!("a column of type {oid} is none of ours"))?;
            let field = match usize::try_from(int(&mut raw)?) {
                // Nothing is as long as less than nothing.
                Err(_) => None,
                Ok(length) => {
                    let (field, rest) = raw.split_at_checked(length).ok_or("a record ends too early")?;
                    raw = rest;
                    Some(field)
                }
            };
            fields.push((ty, field));
        }
        Ok(Fields(fields))
    }

    fn accepts(_: &PgType) -> bool {
        true
    }
}

/// The fields of a record that the server sent in one column.
pub(crate) fn fields_at<'a>(
    row: &'a tokio_postgres::Row,
    index: usize,
    table: &str,
) -> Result<Fields<'a>, StoreError> {
    row.try_get(index).map_err(|error| StoreError::corrupt(table, with_source(&error)))
}

/// A required text of a row that the server sent.
pub(crate) fn text_at(row: &tokio_postgres::Row, index: usize, table: &str) -> Result<String, StoreError> {
    match value_at(row, index, Type::Text, table)? {
        Value::Text(text) => Ok(text),
        _ => Err(StoreError::corrupt(table, format!("column {index} is null"))),
    }
}

/// A required integer of a row that the server sent.
pub(crate) fn int_at(row: &tokio_postgres::Row, index: usize, table: &str) -> Result<i64, StoreError> {
    match value_at(row, index, Type::Int, table)? {
        Value::Int(int) => Ok(int),
        _ => Err(StoreError::corrupt(table, format!("column {index} is null"))),
    }
}

/// A required number that is never negative: an offset, a count or a partition.
pub(crate) fn count_at(row: &tokio_postgres::Row, index: usize, table: &str) -> Result<u64, StoreError> {
    let negative = |_| StoreError::corrupt(table, format!("column {index} is negative"));
    u64::try_from(int_at(row, index, table)?).map_err(negative)
}

/// A required number of a partition.
pub(crate) fn partition_at(row: &tokio_postgres::Row, index: usize, table: &str) -> Result<u32, StoreError> {
    let invalid = |_| StoreError::corrupt(table, format!("column {index} is not the number of a partition"));
    u32::try_from(int_at(row, index, table)?).map_err(invalid)
}

/// The index in an array of parameters that an answer belongs to, from 0. The server counts from 1.
pub(crate) fn ordinal_at(row: &tokio_postgres::Row, index: usize) -> Result<usize, StoreError> {
    let ordinal = int_at(row, index, "unnest")?;
    let invalid =
        |_| StoreError::corrupt("unnest", format!("an answer is for element {ordinal} of an array"));
    usize::try_from(ordinal - 1).map_err(invalid)
}

/// A required time of a row that the server sent.
pub(crate) fn time_at(row: &tokio_postgres::Row, index: usize, table: &str) -> Result<Time, StoreError> {
    match value_at(row, index, Type::Time, table)? {
        Value::Time(time) => Ok(time),
        _ => Err(StoreError::corrupt(table, format!("column {index} is null"))),
    }
}

/// A row of a table: its declared columns from `first` on, in their order, then the version.
pub(crate) fn row_at(
    row: &tokio_postgres::Row,
    first: usize,
    table: &Arc<Table>,
    tenant: &Tenant,
) -> Result<Row, StoreError> {
    let columns = table.columns();
    let mut values = Vec::with_capacity(columns.len());
    for (index, column) in columns.iter().enumerate() {
        let value = value_at(row, first + index, column.kind, table.name())?;
        values.push(value);
    }
    let version = int_at(row, first + columns.len(), table.name())?;
    Ok(Row::new(table.clone(), tenant.clone(), values, version))
}

/// An error and what is behind it, which the driver's errors do not print themselves.
pub(crate) fn with_source(error: &dyn Error) -> String {
    match error.source() {
        Some(source) => format!("{error}: {}", with_source(source)),
        None => error.to_string(),
    }
}

/// The declared columns of a table and its version, from an alias: what [`row_at`] reads.
pub(crate) fn all_columns(table: &Table, alias: &str) -> String {
    let columns = table.columns().iter().map(|column| column.name.as_str());
    let names =
        columns.chain([statehouse_store::table::VERSION]).map(|column| format!("{alias}.{}", name(column)));
    names.collect::<Vec<_>>().join(", ")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_quoted_only_where_they_must_be() {
        assert!(RESERVED.is_sorted());
        for plain in ["profiles", "user_id", "_x9", "status", "key", "position", "time"] {
            assert_eq!(name(plain), plain);
        }
        assert_eq!(name("user"), "\"user\"");
        assert_eq!(name("order"), "\"order\"");
        assert_eq!(name("My\"House"), "\"My\"\"House\"");
        assert_eq!(name(""), "\"\"");
    }

    #[test]
    fn literals_are_written_as_their_type_reads_them() {
        assert_eq!(literal(&Value::from("it's")), "'it''s'");
        assert_eq!(literal(&Value::from(vec![0, 255])), "'\\x00ff'");
        assert_eq!(literal(&Value::from(-5)), "-5");
        assert_eq!(literal(&Value::from(1e20)), "1e20");
        assert_eq!(literal(&Value::from(true)), "true");
        assert_eq!(literal(&Value::from(serde_json::json!({"a": "it's"}))), "'{\"a\":\"it''s\"}'");
        assert_eq!(literal(&Value::from(Time::from_micros(0))), "'1970-01-01T00:00:00.000000Z'");
    }
}
