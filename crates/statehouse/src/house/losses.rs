//! Removals that are asked for by name: nothing else goes away.

use std::collections::BTreeMap;
use std::sync::Arc;

use statehouse_store::migration::{Difference, keep_surplus, strip};
use statehouse_store::{Schema, SchemaChange, StoreError, Table};

/// Refuses names of which a migration would remove nothing.
pub(super) fn check(planned: &[SchemaChange], names: &[String]) -> Result<(), StoreError> {
    let removed: Vec<String> = planned.iter().filter_map(SchemaChange::removed).collect();
    let Some(wrong) = names.iter().find(|name| !removed.contains(name)) else { return Ok(()) };
    let list = match removed.is_empty() {
        true => "nothing of the store would be lost".to_owned(),
        false => format!("what could be removed: {}", removed.join(", ")),
    };
    let why = match wrong.as_str() {
        "" => format!("it does not say what may be lost; {list}; nothing was changed"),
        _ => format!("nothing of this name would be lost; {list}; nothing was changed"),
    };
    Err(StoreError::schema(format!("the allowed loss `{wrong}`"), why))
}

/// The schema with all that is in the store and not in it, except for what is named.
pub(super) fn kept(
    schema: &Schema,
    planned: &[SchemaChange],
    names: &[String],
) -> Result<Schema, StoreError> {
    let mut tables: BTreeMap<String, Arc<Table>> =
        schema.tables().map(|table| (table.name().to_owned(), table.clone())).collect();
    for change in planned.iter().filter(|change| change.removes()) {
        let name = change.table.name();
        let is_named = |part: &str| names.iter().any(|named| *named == format!("{name}.{part}"));
        let kept = match (&change.difference, schema.table(name)) {
            (Difference::DropTable, _) if names.iter().any(|named| named == name) => continue,
            (_, Some(new)) => keep_surplus(&strip(&change.table, is_named, is_named)?, new)?,
            (_, None) => change.table.clone(),
        };
        tables.insert(name.to_owned(), kept);
    }
    Schema::new(tables.into_values()).map_err(|error| StoreError::schema(error.table, error.why))
}
