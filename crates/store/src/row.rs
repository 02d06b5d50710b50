//! Rows, their addresses, and the tenants that own them.

use std::fmt;
use std::sync::Arc;

use serde::{Deserialize, Serialize};

use crate::bug;
use crate::error::{PlanError, StoreError};
use crate::limits::TENANT_BYTES_MAX;
use crate::table::{TENANT, Table, VERSION};
use crate::time::Time;
use crate::value::{Type, Value};

/// The owner of rows. No read or plan crosses from one tenant to another.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct Tenant(Arc<str>);

impl Tenant {
    /// A tenant's name: 1 to 64 of `A-Z a-z 0-9 _ . -`.
    pub fn new(name: impl AsRef<str>) -> Result<Tenant, PlanError> {
        let name = name.as_ref();
        let plain = |c: char| c.is_ascii_alphanumeric() || matches!(c, '_' | '.' | '-');
        if name.is_empty() || name.len() > TENANT_BYTES_MAX || !name.chars().all(plain) {
            let why = "a tenant is 1 to 64 of the characters A-Z a-z 0-9 _ . -";
            return Err(PlanError::BadName { what: "tenant", given: name.to_owned(), why });
        }
        Ok(Tenant(name.into()))
    }

    /// Its name.
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl fmt::Display for Tenant {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl TryFrom<String> for Tenant {
    type Error = PlanError;
    fn try_from(name: String) -> Result<Tenant, PlanError> {
        Tenant::new(name)
    }
}

impl From<Tenant> for String {
    fn from(tenant: Tenant) -> String {
        tenant.0.as_ref().to_owned()
    }
}

/// Accessors that report a value that cannot be there instead of reading it as absent.
macro_rules! checked_accessors {
    ($($get:ident, $optional:ident: $type:ty, $kind:expr, $read:path;)+) => {
        $(
            #[doc = concat!("The value of a column of type `", stringify!($type), "`. The caller knows that it is not null.")]
            ///
            /// # Errors
            /// [`StoreError::Corrupt`], with table, key and column, if the stored value is null or of another type. A column
            /// that the table declares otherwise, or not at all, is a defect of the caller ([`crate::bug!`]).
            pub fn $get(&self, column: &str) -> Result<$type, StoreError> {
                self.$optional(column)?.ok_or_else(|| self.corrupt(column, "is null"))
            }

            #[doc = concat!("The value of a column of type `", stringify!($type), "`; `None` if it is null.")]
            ///
            /// # Errors
            #[doc = concat!("As of [`Row::", stringify!($get), "`], except that null is a value.")]
            pub fn $optional(&self, column: &str) -> Result<Option<$type>, StoreError> {
                self.read_column(column, $kind, $read)
            }
        )+
    };
}

/// One row as it was stored at some version.
#[derive(Clone, Debug, PartialEq)]
pub struct Row {
    table: Arc<Table>,
    tenant: Tenant,
    /// One for each of the table's columns, in their order.
    values: Vec<Value>,
    version: i64,
}

impl Row {
    /// Puts a row together. `values` has one entry for each column of the table, in their order.
    pub fn new(table: Arc<Table>, tenant: Tenant, values: Vec<Value>, version: i64) -> Row {
        debug_assert_eq!(values.len(), table.columns().len());
        Row { table, tenant, values, version }
    }

    /// The table it stands in.
    pub fn table(&self) -> &Arc<Table> {
        &self.table
    }

    /// Its owner.
    pub fn tenant(&self) -> &Tenant {
        &self.tenant
    }

    /// How often it was written in its present life; an insert makes it 1.
    pub fn version(&self) -> i64 {
        self.version
    }

    /// The values of all declared columns, in the table's order.
    pub fn values(&self) -> &[Value] {
        &self.values
    }

    /// The same, to be kept without the row.
    pub fn into_values(self) -> Vec<Value> {
        self.values
    }

    /// The key after the tenant.
    pub fn key(&self) -> &[Value] {
        self.values.split_at(self.table.key_len()).0
    }

    /// The value of a declared column.
    pub fn get(&self, column: &str) -> Option<&Value> {
        self.values.get(self.table.position(column)?)
    }

    /// The text in a column; `None` if it is null or of another type.
    pub fn text(&self, column: &str) -> Option<&str> {
        self.get(column)?.as_text()
    }

    /// The int in a column, or the version.
    pub fn int(&self, column: &str) -> Option<i64> {
        if column == VERSION { Some(self.version) } else { self.get(column)?.as_int() }
    }

    /// The float in a column.
    pub fn float(&self, column: &str) -> Option<f64> {
        self.get(column)?.as_float()
    }

    /// The boolean in a column.
    pub fn bool(&self, column: &str) -> Option<bool> {
        self.get(column)?.as_bool()
    }

    /// The octets in a column.
    pub fn bytes(&self, column: &str) -> Option<&[u8]> {
        self.get(column)?.as_bytes()
    }

    /// The time in a column.
    pub fn time(&self, column: &str) -> Option<Time> {
        self.get(column)?.as_time()
    }

    /// The JSON document in a column.
    pub fn json(&self, column: &str) -> Option<&serde_json::Value> {
        self.get(column)?.as_json()
    }

    checked_accessors! {
        get_text, get_optional_text: &str, Type::Text, Value::as_text;
        get_float, get_optional_float: f64, Type::Float, Value::as_float;
        get_bool, get_optional_bool: bool, Type::Bool, Value::as_bool;
        get_bytes, get_optional_bytes: &[u8], Type::Bytes, Value::as_bytes;
        get_time, get_optional_time: Time, Type::Time, Value::as_time;
        get_json, get_optional_json: &serde_json::Value, Type::Json, Value::as_json;
    }

    /// The int in a column, or the version. An error as of [`Row::get_text`].
    pub fn get_int(&self, column: &str) -> Result<i64, StoreError> {
        self.get_optional_int(column)?.ok_or_else(|| self.corrupt(column, "is null"))
    }

    /// The int in a column, or the version; `None` if it is null. An error as of [`Row::get_text`].
    pub fn get_optional_int(&self, column: &str) -> Result<Option<i64>, StoreError> {
        if column == VERSION {
            return Ok(Some(self.version));
        }
        self.read_column(column, Type::Int, Value::as_int)
    }

    /// The value of a column, which the caller knows to be of this type.
    fn read_column<'a, T>(
        &'a self,
        column: &str,
        kind: Type,
        read: impl FnOnce(&'a Value) -> Option<T>,
    ) -> Result<Option<T>, StoreError> {
        let Some(index) = self.table.position(column) else {
            return Err(bug!("table {} has no column {column}", self.table).into());
        };
        match self.table.columns().get(index).map(|declared| declared.kind) {
            Some(declared) if declared == kind => {}
            _ => return Err(bug!("column {column} of table {} is not of type {kind}", self.table).into()),
        }
        match self.values.get(index) {
            Some(Value::Null) => Ok(None),
            Some(value) => match read(value) {
                Some(value) => Ok(Some(value)),
                None => Err(self.corrupt(column, &format!("has a value that is not of type {kind}"))),
            },
            None => Err(self.corrupt(column, "has no value")),
        }
    }

    /// The error for a column of this row whose value no write can have stored.
    pub fn corrupt(&self, column: &str, why: &str) -> StoreError {
        StoreError::corrupt(format!("{self}.{column}"), why)
    }

    /// The row's address.
    pub fn address(&self) -> Address {
        Address { table: self.table.clone(), tenant: self.tenant.clone(), key: self.key().to_vec() }
    }

    /// All columns and the version as a JSON object, as events carry them. The tenant is not part of it.
    pub fn to_json(&self) -> serde_json::Value {
        let columns = self.table.columns().iter().zip(&self.values);
        let fields = columns.map(|(column, value)| (column.name.clone(), value.to_json()));
        let version = (VERSION.to_owned(), self.version.into());
        serde_json::Value::Object(fields.chain([version]).collect())
    }
}

impl fmt::Display for Row {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write_address(f, &self.table, &self.tenant, self.key())
    }
}

/// Where a row stands, whether it exists or not.
#[derive(Clone, Debug, PartialEq)]
pub struct Address {
    pub(crate) table: Arc<Table>,
    pub(crate) tenant: Tenant,
    pub(crate) key: Vec<Value>,
}

impl Address {
    /// The address of the row with this key. The key has one value for each key column, in order.
    pub fn new(
        table: &Arc<Table>,
        tenant: &Tenant,
        key: impl IntoIterator<Item = Value>,
    ) -> Result<Address, PlanError> {
        let key = admit_key(table, tenant, key.into_iter().collect())?;
        Ok(Address { table: table.clone(), tenant: tenant.clone(), key })
    }

    /// The table.
    pub fn table(&self) -> &Arc<Table> {
        &self.table
    }

    /// The tenant.
    pub fn tenant(&self) -> &Tenant {
        &self.tenant
    }

    /// The key after the tenant.
    pub fn key(&self) -> &[Value] {
        &self.key
    }
}

impl fmt::Display for Address {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write_address(f, &self.table, &self.tenant, &self.key)
    }
}

fn write_address(f: &mut fmt::Formatter<'_>, table: &Table, tenant: &Tenant, key: &[Value]) -> fmt::Result {
    write!(f, "{table}({TENANT}={tenant}")?;
    for (column, value) in table.key_columns().iter().zip(key) {
        write!(f, ", {}={value}", column.name)?;
    }
    f.write_str(")")
}

/// Where one value stands: a column of a row, whether the row exists or not.
#[derive(Clone, Debug, PartialEq)]
pub struct Cell {
    address: Address,
    /// The number of the column.
    index: usize,
}

impl Cell {
    /// A declared column of the row at this address.
    pub fn new(address: Address, column: &str) -> Result<Cell, PlanError> {
        match address.table.position(column) {
            Some(index) => Ok(Cell { address, index }),
            None => {
                let known: Vec<&str> =
                    address.table.columns().iter().map(|known| known.name.as_str()).collect();
                let (table, column) = (address.table.name().to_owned(), column.to_owned());
                Err(PlanError::UnknownColumn { table, column, known: known.join(", ") })
            }
        }
    }

    /// The row's address.
    pub fn address(&self) -> &Address {
        &self.address
    }

    /// The number of the column among those of the table.
    pub fn column_index(&self) -> usize {
        self.index
    }

    /// What a row at the address has there.
    pub fn value_in(&self, row: Row) -> Option<Value> {
        row.into_values().into_iter().nth(self.index)
    }
}

/// Checks a key's parts, types and size.
pub(crate) fn admit_key(table: &Table, tenant: &Tenant, key: Vec<Value>) -> Result<Vec<Value>, PlanError> {
    let columns = table.key_columns();
    if key.len() != columns.len() {
        let names: Vec<&str> = columns.iter().map(|column| column.name.as_str()).collect();
        return Err(PlanError::KeyParts {
            table: table.name().to_owned(),
            expected: if columns.len() == 1 { "1 part".into() } else { format!("{} parts", columns.len()) },
            names: names.join(", "),
            given: key.len(),
        });
    }
    let admitted: Vec<Value> = columns
        .iter()
        .zip(key)
        .map(|(column, value)| admit_required(table, &column.name, column.kind, value))
        .collect::<Result<_, _>>()?;
    crate::limits::check_key(table, tenant.as_str(), &admitted)?;
    Ok(admitted)
}

/// A value that may not be null, as the column stores it.
pub(crate) fn admit_required(
    table: &Table,
    column: &str,
    kind: Type,
    value: Value,
) -> Result<Value, PlanError> {
    let named = || (table.name().to_owned(), column.to_owned());
    match value.admitted(kind) {
        Ok(Value::Null) => {
            let (table, column) = named();
            Err(PlanError::Required { table, column })
        }
        Ok(value) => Ok(value),
        Err(why) => {
            let (table, column) = named();
            Err(PlanError::BadValue { table, column, why })
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn row(name: Value) -> Row {
        let table = Table::named("profiles")
            .partition("user_id", Type::Int)
            .required("name", Type::Text)
            .optional("seen_at", Type::Time)
            .build()
            .unwrap();
        Row::new(table, Tenant::new("acme").unwrap(), vec![42.into(), name, Value::Null], 3)
    }

    #[test]
    fn checked_accessors_return_what_is_stored() {
        let row = row("Ann".into());
        assert_eq!(row.get_text("name"), Ok("Ann"));
        assert_eq!(row.get_optional_text("name"), Ok(Some("Ann")));
        assert_eq!(row.get_int("user_id"), Ok(42));
        assert_eq!(row.get_int(VERSION), Ok(3));
        assert_eq!(row.get_optional_time("seen_at"), Ok(None));
    }

    #[test]
    fn values_that_cannot_be_there_are_reported_with_table_key_and_column() {
        let place = |column: &str| format!("profiles(tenant=acme, user_id=42).{column}");
        let corrupt = |column: &str, why: &str| StoreError::corrupt(place(column), why);
        assert_eq!(row(Value::Null).get_text("name"), Err(corrupt("name", "is null")));
        assert_eq!(row("Ann".into()).get_time("seen_at"), Err(corrupt("seen_at", "is null")));
        let wrong = corrupt("name", "has a value that is not of type text");
        assert_eq!(row(7.into()).get_text("name"), Err(wrong.clone()));
        assert_eq!(row(7.into()).get_optional_text("name"), Err(wrong));
    }

    #[test]
    #[should_panic(expected = "table profiles has no column nmae")]
    fn a_misspelt_column_is_a_bug() {
        drop(row("Ann".into()).get_text("nmae"));
    }

    #[test]
    #[should_panic(expected = "column name of table profiles is not of type int")]
    fn a_column_of_another_type_is_a_bug() {
        drop(row("Ann".into()).get_int("name"));
    }
}
