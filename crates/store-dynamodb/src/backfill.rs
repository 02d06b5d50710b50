//! Changes existing rows to a new definition of their table.
//!
//! Each item is written on the condition that it has not changed since it was read, and that the work is still to be
//! done. The second condition matters if two processes backfill the same table. After the faster one is done, a plan may
//! set a column to null, and the slower one must not set the default again.

use std::collections::BTreeMap;

use aws_sdk_dynamodb::types::AttributeValue;
use statehouse_store::migration::{Difference, NULL_ROWS_MAX, null_rows};
use statehouse_store::{SchemaChange, StoreError, Value};

use crate::catalog::TableDefinition;
use crate::client::{ClientWriteResult, ConditionResult};
use crate::expression::{Condition, ExpressionPlaceholders, present};
use crate::inner::DynamoInner;
use crate::item::{self, INCARNATION, Item, ItemKey};
use crate::item_write::{ItemWrite, UpdateClauses};
use crate::request_error::RequestError;

/// Attempts for one item that other plans write concurrently.
const ATTEMPTS_MAX: u32 = 20;

impl DynamoInner {
    /// Backfills all rows of a table.
    pub(crate) async fn backfill(
        &self,
        definition: &TableDefinition,
        physical: &str,
    ) -> Result<(), StoreError> {
        let mut start: Option<Item> = None;
        loop {
            let request = || {
                let scan = self.client.sdk.scan().table_name(physical).consistent_read(true);
                scan.set_exclusive_start_key(start.clone()).send()
            };
            let page =
                self.client.send_with_retries(request).await.map_err(|error| error.into_error(physical))?;
            for item in page.items.unwrap_or_default() {
                if !self.backfill_item(definition, physical, item).await? {
                    return Ok(());
                }
            }
            start = page.last_evaluated_key.filter(|key| !key.is_empty());
            if start.is_none() {
                return Ok(());
            }
        }
    }

    /// Refuses a column that becomes required while rows have no value for it.
    ///
    /// DynamoDB does not refuse null by itself, plans do. Until the new definition is known everywhere, a process with the
    /// former one can still write null.
    pub(crate) async fn check_nulls(&self, change: &SchemaChange) -> Result<(), StoreError> {
        let Difference::RequireColumn(column) = &change.difference else { return Ok(()) };
        if column.default.is_some() {
            return Ok(());
        }
        let physical = self.catalog.physical(change.table.name());
        let (mut start, mut rows): (Option<Item>, Vec<String>) = (None, Vec::new());
        loop {
            let request = || {
                let scan = self.client.sdk.scan().table_name(&physical).consistent_read(true);
                scan.set_exclusive_start_key(start.clone()).send()
            };
            let page =
                self.client.send_with_retries(request).await.map_err(|error| error.into_error(&physical))?;
            for item in page.items.unwrap_or_default() {
                let row = item::row(&item, &change.table)?;
                rows.extend(row.filter(|_| !item.contains_key(&column.name)).map(|row| row.to_string()));
            }
            start = page.last_evaluated_key.filter(|key| !key.is_empty());
            if start.is_none() || rows.len() > NULL_ROWS_MAX {
                break;
            }
        }
        rows.sort();
        match rows.is_empty() {
            true => Ok(()),
            false => Err(null_rows(&change.table, column, rows)),
        }
    }

    /// Backfills one item. Returns whether the work is still to be done.
    async fn backfill_item(
        &self,
        definition: &TableDefinition,
        physical: &str,
        item: Item,
    ) -> Result<bool, StoreError> {
        let mut item = item;
        for attempt_number in 0..ATTEMPTS_MAX {
            let Some(action) = patch(definition, physical, &item, self.new_incarnation())? else {
                return Ok(true);
            };
            let key = action.key.clone();
            let still = self.catalog.revision_check(definition.table.name(), definition.revision);
            match self.client.write_all(&[action, still]).await {
                Ok(ClientWriteResult::Applied(_)) => return Ok(true),
                Ok(ClientWriteResult::Rejected(results)) => {
                    if matches!(results.get(1), Some(ConditionResult::Failed(_))) {
                        return Ok(false);
                    }
                }
                Err(RequestError::UnknownOutcome(_)) => {}
                Err(error) => return Err(error.into_error(physical)),
            }
            self.client.back_off(attempt_number).await;
            match self.client.get(physical, key, true).await.map_err(|error| error.into_error(physical))? {
                Some(now) => item = now,
                None => return Ok(true),
            }
        }
        Err(StoreError::unavailable(format!(
            "a row of {physical} was changed by other plans during each of {ATTEMPTS_MAX} attempts"
        )))
    }
}

/// The write that backfills an item, on the condition that the item has not changed; `None` if nothing is to be done.
///
/// It sets a new incarnation. The version stays, because no column of a plan changes its meaning. But a writer that read
/// the row before must not write an index key that was computed from the old columns.
fn patch(
    definition: &TableDefinition,
    physical: &str,
    item: &Item,
    incarnation: i64,
) -> Result<Option<ItemWrite>, StoreError> {
    let TableDefinition { table, work, .. } = definition;
    let Some(row) = item::row(item, table)? else { return Ok(None) };
    let (mut terms, mut clauses) = (ExpressionPlaceholders::default(), UpdateClauses::default());
    let mut condition = present(&mut terms);
    let mut values: BTreeMap<&str, Value> = table
        .columns()
        .iter()
        .zip(row.values())
        .map(|(column, value)| (column.name.as_str(), value.clone()))
        .collect();
    for column in work.fill.iter().filter_map(|name| table.column(name)) {
        if let (None, Some(default)) = (item.get(&column.name), &column.default) {
            values.insert(&column.name, default.clone());
            if let Some(attribute) = item::attribute(default) {
                clauses.set(&mut terms, &column.name, attribute);
                condition = condition.and(Condition::missing(&mut terms, &column.name));
            }
        }
    }
    for index in work.index.iter().filter_map(|name| table.index(name)) {
        let key = item::index_key(table, index, row.tenant(), |name| values.get(name));
        let (pk, sk) = item::index_names(&index.name);
        let (pk_text, sk_text) = key.unzip();
        let mut changes = false;
        for (name, text) in [(pk, pk_text), (sk, sk_text)] {
            match text.map(AttributeValue::S) {
                Some(text) if item.get(&name) != Some(&text) => clauses.set(&mut terms, &name, text),
                None if item.contains_key(&name) => clauses.remove(&mut terms, &name),
                _ => continue,
            }
            changes = true;
        }
        for column in index.columns().filter(|_| changes) {
            condition = condition.and(match item.get(column) {
                Some(value) => Condition::compare(&mut terms, column, "=", value.clone()),
                None => Condition::missing(&mut terms, column),
            });
        }
    }
    for name in work.strip.iter().filter(|name| item.contains_key(*name)) {
        clauses.remove(&mut terms, name);
    }
    if clauses.set.is_empty() && clauses.remove.is_empty() {
        return Ok(None);
    }
    clauses.set(&mut terms, INCARNATION, item::number(incarnation));
    let Some(key) = ItemKey::in_item(physical, item) else { return Ok(None) };
    Ok(Some(ItemWrite::update(physical, key.attributes(), &clauses, condition, terms)))
}
