//! Turns steps of a plan into writes of items ([`ItemWrite`]).
//!
//! A step that was evaluated in memory on the row that was read ([`StepWriter::decided`]) stores the result on the
//! condition that the row has the same version and incarnation. A step that was not evaluated
//! ([`crate::conditional`]) carries its guard as a condition.
//!
//! **Deletes.** The deletion of a row that a logged plan has written leaves a tombstone: an item with only `_at`, `_log`
//! and `_expires`. It keeps the order of the log if the row is inserted again. The inserting plan needs a later stamp
//! than the deleting one; without the tombstone a delayed request or a slow clock could use an earlier stamp. A row that no
//! logged plan has written is deleted without a tombstone.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use aws_sdk_dynamodb::types::AttributeValue;
use statehouse_store::plan::{Step, Verb};
use statehouse_store::table::VERSION;
use statehouse_store::{Plan, Row, StoreError, Tenant, Time, Value, limits};

use crate::catalog::LiveTable;
use crate::expression::{Condition, ExpressionPlaceholders, absent};
use crate::item::{self, AT, EXPIRES, INCARNATION, ItemKey, ItemState, LOG, StoredRow};
use crate::item_write::{ItemWrite, UpdateClauses, WriteKind};

/// Markers on a row above which its next writer runs the sequencer.
pub(crate) const MARKERS_MAX: usize = 16;

/// What a logged plan stores on every row that it writes.
#[derive(Clone, Debug)]
pub(crate) struct LogStamp {
    /// Greater than the previous stamp of the row.
    pub(crate) stamp: i64,
    /// Locates the plan's record until it has an offset.
    pub(crate) marker: String,
}

/// Turns the steps of one attempt of a plan into writes.
pub(crate) struct StepWriter<'a> {
    pub(crate) plan: &'a Plan,
    /// The live table of each step.
    pub(crate) tables: &'a [Arc<LiveTable>],
    pub(crate) now: Time,
    /// Present when the plan has a log entry.
    pub(crate) mark: Option<LogStamp>,
    /// A new random number for each attempt.
    pub(crate) incarnation: i64,
    /// When a tombstone of this attempt may be deleted, in seconds since 1970.
    pub(crate) expires: i64,
}

/// One step's row on the server.
pub(crate) struct StepTarget<'a> {
    pub(crate) step: &'a Step,
    pub(crate) live: &'a LiveTable,
    pub(crate) key: ItemKey,
}

impl StepWriter<'_> {
    /// The targets, in the order of the steps.
    pub(crate) fn targets(&self) -> impl Iterator<Item = StepTarget<'_>> {
        self.plan.steps().iter().zip(self.tables).map(|(step, live)| StepTarget {
            step,
            live,
            key: ItemKey::of(&step.table, &live.physical, self.plan.tenant(), &step.key),
        })
    }

    /// The write of a step that was evaluated on an item.
    pub(crate) fn decided(
        &self,
        target: &StepTarget<'_>,
        found: &ItemState,
        result: Option<&Row>,
    ) -> Result<ItemWrite, StoreError> {
        match (target.step.verb, &found.stored, result) {
            (Verb::Put, stored, Some(row)) => self.put(target, stored.as_ref(), row),
            (Verb::Delete, Some(stored), _) => {
                let mut terms = ExpressionPlaceholders::default();
                let condition = unchanged(&mut terms, stored);
                let without_tombstone = self.mark.is_none() && found.at.is_none();
                Ok(self.delete(target, condition, terms, without_tombstone))
            }
            // An assert, or the removal of an absent row.
            (_, stored, _) => {
                let mut terms = ExpressionPlaceholders::default();
                let condition = match stored {
                    Some(stored) => unchanged(&mut terms, stored),
                    None => absent(&mut terms),
                };
                Ok(self.check(target, condition, terms))
            }
        }
    }

    /// Replaces the stored row, if there is one, by this row.
    pub(crate) fn put(
        &self,
        target: &StepTarget<'_>,
        stored: Option<&StoredRow>,
        row: &Row,
    ) -> Result<ItemWrite, StoreError> {
        let (mut terms, mut clauses) = (ExpressionPlaceholders::default(), UpdateClauses::default());
        for (name, attribute) in attributes(target.live, self.plan.tenant(), stored, row)? {
            let before = stored.and_then(|stored| stored.item.get(&name));
            match attribute {
                Some(attribute) if before != Some(&attribute) => clauses.set(&mut terms, &name, attribute),
                None if before.is_some() => clauses.remove(&mut terms, &name),
                _ => {}
            }
        }
        clauses.set(&mut terms, VERSION, item::number(row.version()));
        let condition = match stored {
            Some(stored) => unchanged(&mut terms, stored),
            None => {
                clauses.set(&mut terms, INCARNATION, item::number(self.incarnation));
                clauses.remove(&mut terms, EXPIRES);
                absent(&mut terms)
            }
        };
        let condition = self.mark(&mut terms, &mut clauses, condition);
        let write = ItemWrite::update(&target.key.table, target.key.attributes(), &clauses, condition, terms);
        Ok(write.weighing(limits::row_weight(row)))
    }

    /// Deletes a row under a condition, with or without a tombstone.
    pub(crate) fn delete(
        &self,
        target: &StepTarget<'_>,
        condition: Condition,
        mut terms: ExpressionPlaceholders,
        without_tombstone: bool,
    ) -> ItemWrite {
        let (table, key) = (&target.key.table, target.key.attributes());
        if without_tombstone {
            let condition = condition.and(Condition::missing(&mut terms, AT));
            return ItemWrite::new(table, key, WriteKind::Delete, condition, terms);
        }
        target.live.logged.store(true, Ordering::Relaxed);
        let mut clauses = UpdateClauses::default();
        for column in target.live.table.columns() {
            clauses.remove(&mut terms, &column.name);
        }
        for index in target.live.table.indexes() {
            let (pk, sk) = item::index_names(&index.name);
            clauses.remove(&mut terms, &pk);
            clauses.remove(&mut terms, &sk);
        }
        clauses.remove(&mut terms, VERSION);
        clauses.remove(&mut terms, INCARNATION);
        clauses.set(&mut terms, EXPIRES, item::number(self.expires));
        let condition = self.mark(&mut terms, &mut clauses, condition);
        ItemWrite::update(table, key, &clauses, condition, terms)
    }

    /// Checks a condition. The stamp of a logged plan must be above the stamps of the rows that it asserts.
    pub(crate) fn check(
        &self,
        target: &StepTarget<'_>,
        mut condition: Condition,
        mut terms: ExpressionPlaceholders,
    ) -> ItemWrite {
        if let Some(mark) = &self.mark {
            condition = condition.and(later(&mut terms, mark.stamp));
        }
        ItemWrite::new(&target.key.table, target.key.attributes(), WriteKind::Check, condition, terms)
    }

    /// Adds a logged plan's stamp and marker to a write.
    pub(crate) fn mark(
        &self,
        terms: &mut ExpressionPlaceholders,
        clauses: &mut UpdateClauses,
        condition: Condition,
    ) -> Condition {
        let Some(LogStamp { stamp, marker }) = &self.mark else { return condition };
        clauses.set(terms, AT, item::number(*stamp));
        clauses.add(terms, LOG, marker);
        let max = AttributeValue::N(MARKERS_MAX.to_string());
        let few = format!("size({}) < {}", terms.name(LOG), terms.value(max));
        let few = Condition::missing(terms, LOG).or(Condition::Leaf(few));
        condition.and(later(terms, *stamp)).and(few)
    }
}

/// The row's stamp is below this one.
fn later(terms: &mut ExpressionPlaceholders, stamp: i64) -> Condition {
    Condition::missing(terms, AT).or(Condition::compare(terms, AT, "<", item::number(stamp)))
}

/// The row has not changed since it was read.
fn unchanged(terms: &mut ExpressionPlaceholders, stored: &StoredRow) -> Condition {
    let version = Condition::compare(terms, VERSION, "=", item::number(stored.row.version()));
    match stored.item.get(INCARNATION) {
        Some(incarnation) => version.and(Condition::compare(terms, INCARNATION, "=", incarnation.clone())),
        None => version,
    }
}

/// All attributes of a row in the live table, with those of indexes; `None` for attributes to be removed.
///
/// Columns that the plan's table does not have keep their content, or get their default in a new row.
fn attributes(
    live: &LiveTable,
    tenant: &Tenant,
    stored: Option<&StoredRow>,
    row: &Row,
) -> Result<Vec<(String, Option<AttributeValue>)>, StoreError> {
    let values = live
        .table
        .columns()
        .iter()
        .map(|column| {
            let value = match (row.get(&column.name), stored) {
                (Some(value), _) => value.clone(),
                (None, Some(stored)) => {
                    let attribute = stored.item.get(&column.name);
                    item::value(attribute, column.kind).ok_or_else(|| {
                        let why = format!("attribute {} is not of type {}", column.name, column.kind);
                        StoreError::corrupt(format!("a row of table {}", live.table), why)
                    })?
                }
                (None, None) => column.default.clone().unwrap_or(Value::Null),
            };
            Ok((column.name.as_str(), value))
        })
        .collect::<Result<Vec<(&str, Value)>, StoreError>>()?;
    let content = |name: &str| values.iter().find(|(column, _)| *column == name).map(|(_, value)| value);
    let mut attributes: Vec<_> =
        values.iter().map(|(name, value)| ((*name).to_owned(), item::attribute(value))).collect();
    for index in live.table.indexes() {
        let (pk, sk) = item::index_names(&index.name);
        let key = item::index_key(&live.table, index, tenant, content);
        let (pk_text, sk_text) = key.unzip();
        attributes.push((pk, pk_text.map(AttributeValue::S)));
        attributes.push((sk, sk_text.map(AttributeValue::S)));
    }
    Ok(attributes)
}
