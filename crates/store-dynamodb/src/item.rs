//! Rows as DynamoDB items: one typed attribute per column, and a few system attributes.
//!
//! | attribute | content |
//! |---|---|
//! | `PK`, `SK` | the key as text ([`crate::key`]); `SK` only if the table has sort columns |
//! | each column | text, time and JSON as S, int and float as N, bool as BOOL, bytes as B; null is a missing attribute |
//! | `version` | the row's version; an item without it is a tombstone and not a row |
//! | `_life` | the incarnation: a random number that is set when the row is inserted and when a migration backfills it. Versions start at 1 in each incarnation |
//! | `_at` | the stamp of the last logged plan that wrote the row ([`crate::stamps`]) |
//! | `_log` | markers of logged plans that wrote the row and may not have an offset yet |
//! | `_expires` | in a tombstone: when it may be deleted |
//! | `by_x_PK`, `by_x_SK` | the key in index `by_x`, present only while all columns of the index are set. In an index over all tenants, the tenant is a part of the second |
//!
//! Names with a capital letter or a leading underscore cannot be columns.
//!
//! **Empty text and bytes.** Older servers reject empty attributes. A value of n zero bytes is stored as n + 1 zero
//! bytes, and an empty text as U+0000, which no other text contains. All other values are stored unchanged. This keeps the
//! order: a value of zeros is below every other value, and longer ones are above shorter ones. Comparisons need no special
//! case.

use std::collections::HashMap;
use std::sync::Arc;

use aws_sdk_dynamodb::primitives::Blob;
use aws_sdk_dynamodb::types::AttributeValue;
use statehouse_store::table::VERSION;
use statehouse_store::{Address, Index, Row, StoreError, Table, Tenant, Type, Value};

use crate::key;

/// The attributes of one item.
pub(crate) type Item = HashMap<String, AttributeValue>;

/// The partition key.
pub(crate) const PK: &str = "PK";
/// The sort key.
pub(crate) const SK: &str = "SK";
/// The stamp of the last logged write.
pub(crate) const AT: &str = "_at";
/// The random number of the row's incarnation.
pub(crate) const INCARNATION: &str = "_life";
/// Markers of logged writes.
pub(crate) const LOG: &str = "_log";
/// When a tombstone may be deleted, in seconds since 1970.
pub(crate) const EXPIRES: &str = "_expires";

/// The key of an item, with its table.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(crate) struct ItemKey {
    /// The table's name on the server.
    pub(crate) table: String,
    pub(crate) pk: String,
    pub(crate) sk: Option<String>,
}

impl ItemKey {
    /// The key of a row.
    pub(crate) fn of(table: &Table, physical: &str, tenant: &Tenant, values: &[Value]) -> ItemKey {
        let (partition, sort) = values.split_at(table.partition_columns().len().min(values.len()));
        let sk = (!table.sort_columns().is_empty()).then(|| key::encode(sort));
        ItemKey { table: physical.to_owned(), pk: key::encode_for(tenant.as_str(), partition), sk }
    }

    /// The key of an address.
    pub(crate) fn at(address: &Address, physical: &str) -> ItemKey {
        ItemKey::of(address.table(), physical, address.tenant(), address.key())
    }

    /// The key of an item that was read from a table.
    pub(crate) fn in_item(table: &str, item: &Item) -> Option<ItemKey> {
        Some(ItemKey {
            table: table.to_owned(),
            pk: text(item, PK)?.to_owned(),
            sk: text(item, SK).map(str::to_owned),
        })
    }

    /// The key as attributes.
    pub(crate) fn attributes(&self) -> Item {
        let mut item = Item::from([(PK.to_owned(), AttributeValue::S(self.pk.clone()))]);
        if let Some(sk) = &self.sk {
            item.insert(SK.to_owned(), AttributeValue::S(sk.clone()));
        }
        item
    }
}

/// A number as an attribute.
pub(crate) fn number(value: i64) -> AttributeValue {
    AttributeValue::N(value.to_string())
}

/// A text as an attribute. The text may be empty.
pub(crate) fn string(value: &str) -> AttributeValue {
    AttributeValue::S(if value.is_empty() { "\0".to_owned() } else { value.to_owned() })
}

/// The text in an attribute, as it is stored.
pub(crate) fn text<'i>(item: &'i Item, name: &str) -> Option<&'i str> {
    item.get(name)?.as_s().ok().map(String::as_str)
}

/// The text in an attribute that [`string`] made.
pub(crate) fn plain_text<'i>(item: &'i Item, name: &str) -> Option<&'i str> {
    text(item, name).map(|text| if text == "\0" { "" } else { text })
}

/// The integer in an attribute.
pub(crate) fn integer(item: &Item, name: &str) -> Option<i64> {
    item.get(name)?.as_n().ok()?.parse().ok()
}

/// A value as an attribute; `None` for null.
pub(crate) fn attribute(value: &Value) -> Option<AttributeValue> {
    Some(match value {
        Value::Null => return None,
        Value::Text(content) => string(content),
        Value::Int(content) => number(*content),
        // The shortest decimal that reads back as the same float. These decimals sort as the floats do.
        Value::Float(content) => AttributeValue::N(format!("{content:e}")),
        Value::Bool(content) => AttributeValue::Bool(*content),
        Value::Bytes(content) => {
            let mut octets = content.clone();
            if is_zeros(&octets) {
                octets.push(0);
            }
            AttributeValue::B(Blob::new(octets))
        }
        Value::Time(content) => AttributeValue::S(content.to_string()),
        Value::Json(content) => AttributeValue::S(content.to_string()),
    })
}

fn is_zeros(octets: &[u8]) -> bool {
    octets.iter().all(|octet| *octet == 0)
}

/// The value in an attribute of a column of this type.
pub(crate) fn value(attribute: Option<&AttributeValue>, kind: Type) -> Option<Value> {
    Some(match (kind, attribute) {
        (_, None | Some(AttributeValue::Null(_))) => Value::Null,
        (Type::Text, Some(AttributeValue::S(text))) if text == "\0" => Value::Text(String::new()),
        (Type::Text, Some(AttributeValue::S(text))) => Value::Text(text.clone()),
        (Type::Int, Some(AttributeValue::N(number))) => Value::Int(number.parse().ok()?),
        (Type::Float, Some(AttributeValue::N(number))) => Value::Float(number.parse().ok()?),
        (Type::Bool, Some(AttributeValue::Bool(bool))) => Value::Bool(*bool),
        (Type::Bytes, Some(AttributeValue::B(blob))) => {
            let mut octets = blob.as_ref().to_vec();
            if is_zeros(&octets) {
                octets.pop();
            }
            Value::Bytes(octets)
        }
        (Type::Time, Some(AttributeValue::S(text))) => Value::Time(text.parse().ok()?),
        (Type::Json, Some(AttributeValue::S(text))) => Value::Json(serde_json::from_str(text).ok()?),
        _ => return None,
    })
}

/// A stored row: in the shape of the plan's table, and as the item.
#[derive(Clone, Debug)]
pub(crate) struct StoredRow {
    pub(crate) row: Row,
    pub(crate) item: Item,
}

/// The state of a key in a table: a row, a tombstone, or no item.
#[derive(Clone, Debug)]
pub(crate) struct ItemState {
    pub(crate) stored: Option<StoredRow>,
    /// The last stamp.
    pub(crate) at: Option<i64>,
    /// The number of markers.
    pub(crate) markers: usize,
}

impl ItemState {
    /// There is no item, not even a tombstone.
    pub(crate) fn absent() -> ItemState {
        ItemState { stored: None, at: None, markers: 0 }
    }

    /// Reads an item in the shape of a table.
    pub(crate) fn read(item: Option<Item>, table: &Arc<Table>) -> Result<ItemState, StoreError> {
        let Some(item) = item else { return Ok(ItemState::absent()) };
        let at = integer(&item, AT);
        let markers = markers(&item).len();
        let stored = row(&item, table)?.map(|row| StoredRow { row, item });
        Ok(ItemState { stored, at, markers })
    }

    pub(crate) fn row(&self) -> Option<&Row> {
        self.stored.as_ref().map(|stored| &stored.row)
    }
}

/// The markers on an item.
pub(crate) fn markers(item: &Item) -> &[String] {
    item.get(LOG).and_then(|set| set.as_ss().ok()).map(Vec::as_slice).unwrap_or_default()
}

/// The row in an item, in the shape of a table; `None` for a tombstone.
pub(crate) fn row(item: &Item, table: &Arc<Table>) -> Result<Option<Row>, StoreError> {
    let Some(version) = integer(item, VERSION) else { return Ok(None) };
    let location = || format!("the item {:?} of table {table}", text(item, PK).unwrap_or_default());
    let tenant = text(item, PK)
        .and_then(key::split_tenant)
        .and_then(|(tenant, _)| Tenant::new(tenant).ok())
        .ok_or_else(|| StoreError::corrupt(location(), "the key has no tenant"))?;
    let values = table.columns().iter().map(|column| {
        let attribute = item.get(&column.name);
        value(attribute, column.kind).ok_or_else(|| {
            StoreError::corrupt(
                location(),
                format!("attribute {} is not of type {}: {attribute:?}", column.name, column.kind),
            )
        })
    });
    let values = values.collect::<Result<Vec<_>, _>>()?;
    Ok(Some(Row::new(table.clone(), tenant, values, version)))
}

/// A row with only the key of an item, for cursors at a tombstone.
pub(crate) fn key_row(item: &Item, table: &Arc<Table>) -> Option<Row> {
    let (tenant, partition) = key::split_tenant(text(item, PK)?)?;
    let kinds =
        |columns: &[statehouse_store::Column]| columns.iter().map(|column| column.kind).collect::<Vec<_>>();
    let mut values = key::decode(partition, kinds(table.partition_columns()))?;
    if !table.sort_columns().is_empty() {
        values.extend(key::decode(text(item, SK)?, kinds(table.sort_columns()))?);
    }
    values.resize(table.columns().len(), Value::Null);
    Some(Row::new(table.clone(), Tenant::new(tenant).ok()?, values, 0))
}

/// The names of an index's two attributes.
pub(crate) fn index_names(index: &str) -> (String, String) {
    (format!("{index}_{PK}"), format!("{index}_{SK}"))
}

/// The name of an index on the server, which requires at least three characters.
pub(crate) fn index_physical(index: &str) -> String {
    if index.len() < 3 { format!("{index}-index") } else { index.to_owned() }
}

/// A row's key in an index; `None` while a column of the index is null.
pub(crate) fn index_key<'v>(
    table: &Table,
    index: &Index,
    tenant: &Tenant,
    content: impl Fn(&str) -> Option<&'v Value>,
) -> Option<(String, String)> {
    let set = |names: &[String]| {
        names.iter().map(|name| content(name).filter(|value| !value.is_null())).collect::<Option<Vec<_>>>()
    };
    let (partition, sort) = (set(&index.partition)?, set(&index.sort)?);
    let key = table.key_columns().iter().map(|column| content(&column.name)).collect::<Option<Vec<_>>>()?;
    Some(if index.global {
        let sort = format!("{}{}", key::encode(sort), key::encode_for(tenant.as_str(), key));
        (key::encode(partition), sort)
    } else {
        (key::encode_for(tenant.as_str(), partition), key::encode(sort.into_iter().chain(key)))
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use statehouse_store::Time;

    #[test]
    fn values_read_back() {
        for (given, kind) in [
            (Value::from(""), Type::Text),
            (Value::from("a b"), Type::Text),
            (Value::from(i64::MIN), Type::Int),
            (Value::from(0.1), Type::Float),
            (Value::from(-1.5e125), Type::Float),
            (Value::from(1e-130), Type::Float),
            (Value::from(true), Type::Bool),
            (Value::from(Vec::new()), Type::Bytes),
            (Value::from(vec![0, 0]), Type::Bytes),
            (Value::from(vec![0, 7]), Type::Bytes),
            (Value::from(Time::from_micros(-7)), Type::Time),
            (Value::Json(serde_json::json!({"a": [1, null]})), Type::Json),
            (Value::Null, Type::Bytes),
        ] {
            assert_eq!(value(attribute(&given).as_ref(), kind), Some(given));
        }
    }

    fn stored_octets(octets: &[u8]) -> Vec<u8> {
        match attribute(&Value::from(octets.to_vec())) {
            Some(AttributeValue::B(blob)) => blob.into_inner(),
            other => panic!("{other:?}"),
        }
    }

    proptest! {
        #[test]
        fn octets_keep_their_order_and_are_never_empty(
            a in proptest::collection::vec(0..3_u8, 0..5),
            b in proptest::collection::vec(0..3_u8, 0..5),
        ) {
            prop_assert_eq!(stored_octets(&a).cmp(&stored_octets(&b)), a.cmp(&b));
            prop_assert!(!stored_octets(&a).is_empty());
        }
    }
}
