//! What a step becomes on the server: an [`Action`] on the row's item.
//!
//! Two ways lead there. A step whose outcome was decided in memory on a row that was read ([`Writer::decided`]) stores
//! the result on the condition that the row is still the one that was read: same version, same life. A step that
//! was not decided yet ([`crate::blind`]) carries its guard as a condition.
//!
//! **Deleting** a row that logged plans have written leaves a tombstone: an item with `_at`, `_log` and `_expires`
//! and nothing else. It keeps the order of the log when the row comes back: a plan that inserts the row again needs a
//! later stamp than the plan that deleted it, and without the tombstone a request that was long under way, or a
//! slow clock, could slip below it. A row that no logged plan has written is deleted outright.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use aws_sdk_dynamodb::types::AttributeValue;
use statehouse_store::plan::{Step, Verb};
use statehouse_store::table::VERSION;
use statehouse_store::{Plan, Row, Tenant, Time, Value, limits};

use crate::action::{self, Action, Clauses};
use crate::catalog::Live;
use crate::expression::{Condition, Terms, absent};
use crate::item::{self, AT, EXPIRES, Found, Key, LIFE, LOG, Stored};

/// How many markers a row may carry before a writer has to help the log along.
pub(crate) const MARKERS_MAX: usize = 16;

/// What a logged plan leaves on every row that it writes.
#[derive(Clone, Debug)]
pub(crate) struct Mark {
    /// Greater than the row's last one.
    pub(crate) stamp: i64,
    /// Leads to the plan's record while it has no place in the log yet.
    pub(crate) marker: String,
}

/// Turns the steps of one attempt of a plan into actions.
pub(crate) struct Writer<'a> {
    pub(crate) plan: &'a Plan,
    /// The live table of each step.
    pub(crate) tables: &'a [Arc<Live>],
    pub(crate) now: Time,
    /// Present when the plan has a log entry.
    pub(crate) mark: Option<Mark>,
    /// Drawn anew for each attempt.
    pub(crate) life: i64,
    /// When a tombstone of this attempt may go, in seconds since 1970.
    pub(crate) expires: i64,
}

/// One step's row on the server.
pub(crate) struct Target<'a> {
    pub(crate) step: &'a Step,
    pub(crate) live: &'a Live,
    pub(crate) key: Key,
}

impl Writer<'_> {
    /// The rows, in the order of the steps.
    pub(crate) fn targets(&self) -> impl Iterator<Item = Target<'_>> {
        self.plan.steps().iter().zip(self.tables).map(|(step, live)| Target {
            step,
            live,
            key: Key::of(&step.table, &live.physical, self.plan.tenant(), &step.key),
        })
    }

    /// The action of a step that was decided on a row as it was found.
    pub(crate) fn decided(&self, target: &Target<'_>, found: &Found, result: Option<&Row>) -> Action {
        match (target.step.verb, &found.stored, result) {
            (Verb::Put, stored, Some(row)) => self.put(target, stored.as_ref(), row),
            (Verb::Delete, Some(stored), _) => {
                let mut terms = Terms::default();
                let condition = unchanged(&mut terms, stored);
                let outright = self.mark.is_none() && found.at.is_none();
                self.delete(target, condition, terms, outright)
            }
            // An assert, or a removal of what is not there.
            (_, stored, _) => {
                let mut terms = Terms::default();
                let condition = match stored {
                    Some(stored) => unchanged(&mut terms, stored),
                    None => absent(&mut terms),
                };
                self.check(target, condition, terms)
            }
        }
    }

    /// Stores a row that is known, over what was found.
    pub(crate) fn put(&self, target: &Target<'_>, stored: Option<&Stored>, row: &Row) -> Action {
        let (mut terms, mut clauses) = (Terms::default(), Clauses::default());
        for (name, attribute) in attributes(target.live, self.plan.tenant(), stored, row) {
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
                clauses.set(&mut terms, LIFE, item::number(self.life));
                clauses.remove(&mut terms, EXPIRES);
                absent(&mut terms)
            }
        };
        let condition = self.mark(&mut terms, &mut clauses, condition);
        Action::update(&target.key.table, target.key.attributes(), &clauses, condition, terms)
            .weighing(limits::row_weight(row))
    }

    /// Deletes a row under a condition, outright or leaving a tombstone.
    pub(crate) fn delete(
        &self,
        target: &Target<'_>,
        condition: Condition,
        mut terms: Terms,
        outright: bool,
    ) -> Action {
        let (table, key) = (&target.key.table, target.key.attributes());
        if outright {
            let condition = condition.and(Condition::missing(&mut terms, AT));
            return Action::new(table, key, action::Verb::Delete, condition, terms);
        }
        target.live.logged.store(true, Ordering::Relaxed);
        let mut clauses = Clauses::default();
        for column in target.live.table.columns() {
            clauses.remove(&mut terms, &column.name);
        }
        for index in target.live.table.indexes() {
            let (pk, sk) = item::index_names(&index.name);
            clauses.remove(&mut terms, &pk);
            clauses.remove(&mut terms, &sk);
        }
        clauses.remove(&mut terms, VERSION);
        clauses.remove(&mut terms, LIFE);
        clauses.set(&mut terms, EXPIRES, item::number(self.expires));
        let condition = self.mark(&mut terms, &mut clauses, condition);
        Action::update(table, key, &clauses, condition, terms)
    }

    /// Checks a condition. A logged plan's stamp lies above the writes whose result it relies on.
    pub(crate) fn check(&self, target: &Target<'_>, mut condition: Condition, mut terms: Terms) -> Action {
        if let Some(mark) = &self.mark {
            condition = condition.and(later(&mut terms, mark.stamp));
        }
        Action::new(&target.key.table, target.key.attributes(), action::Verb::Check, condition, terms)
    }

    /// Adds a logged plan's stamp and marker to a write.
    pub(crate) fn mark(&self, terms: &mut Terms, clauses: &mut Clauses, condition: Condition) -> Condition {
        let Some(Mark { stamp, marker }) = &self.mark else { return condition };
        clauses.set(terms, AT, item::number(*stamp));
        clauses.add(terms, LOG, marker);
        let room = i64::try_from(MARKERS_MAX).unwrap_or(i64::MAX);
        let few = format!("size({}) < {}", terms.name(LOG), terms.value(item::number(room)));
        let few = Condition::missing(terms, LOG).or(Condition::Leaf(few));
        condition.and(later(terms, *stamp)).and(few)
    }
}

/// The row's last stamp is below this one.
fn later(terms: &mut Terms, stamp: i64) -> Condition {
    Condition::missing(terms, AT).or(Condition::compare(terms, AT, "<", item::number(stamp)))
}

/// The row is still the one that was read.
fn unchanged(terms: &mut Terms, stored: &Stored) -> Condition {
    let version = Condition::compare(terms, VERSION, "=", item::number(stored.row.version()));
    match stored.item.get(LIFE) {
        Some(life) => version.and(Condition::compare(terms, LIFE, "=", life.clone())),
        None => version,
    }
}

/// All attributes of a row as the live table stores it, indexes included; `None` for those that it must not have.
///
/// Columns that the plan's table does not know keep their content, or get their default in a new row.
fn attributes(
    live: &Live,
    tenant: &Tenant,
    stored: Option<&Stored>,
    row: &Row,
) -> Vec<(String, Option<AttributeValue>)> {
    let values: Vec<(&str, Value)> = live
        .table
        .columns()
        .iter()
        .map(|column| {
            let value = match (row.get(&column.name), stored) {
                (Some(value), _) => value.clone(),
                (None, Some(stored)) => {
                    item::value(stored.item.get(&column.name), column.kind).unwrap_or(Value::Null)
                }
                (None, None) => column.default.clone().unwrap_or(Value::Null),
            };
            (column.name.as_str(), value)
        })
        .collect();
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
    attributes
}
