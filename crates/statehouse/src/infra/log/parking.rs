//! What cannot be done, and what waits behind it: rows that name a record of the log and say why.
//!
//! The record itself stays in the log, which is not trimmed past it (I7).

use std::collections::{BTreeSet, HashMap};
use std::sync::Arc;

use statehouse_store::guard::now;
use statehouse_store::{
    Operand, Query, Row, SchemaError, Step, Store, StoreError, Table, Tenant, Time, Type, Value,
};

use super::progress::{CONSUMER, ConsumerTables, KEEPS, KEEPS_FROM, LOG_PARTITION, misuse};
use super::{column_of, offset_at};

/// The table of what is parked.
pub const PARKED: &str = "house_parked";
pub(super) const SUBJECT: &str = "subject";
pub(super) const LOG_OFFSET: &str = "log_offset";
pub(super) const REASON: &str = "reason";
pub(super) const TRIES: &str = "tries";
pub(super) const PARKED_AT: &str = "parked_at";
pub(super) const READY_AT: &str = "ready_at";
/// The index across tenants by which a group's holder finds what is to be tried again.
pub(super) const READY: &str = "ready";
/// Bytes of a reason that are kept.
const REASON_BYTES_MAX: usize = 2_000;

/// The declaration of the table.
pub fn parked_table() -> Result<Arc<Table>, SchemaError> {
    Table::named(PARKED)
        .partition(CONSUMER, Type::Text)
        .partition(LOG_PARTITION, Type::Int)
        .sort(SUBJECT, Type::Text)
        .sort(LOG_OFFSET, Type::Int)
        .required(REASON, Type::Text)
        .defaulted(TRIES, Type::Int, 0)
        .required(PARKED_AT, Type::Time)
        .optional(READY_AT, Type::Time)
        .required(KEEPS_FROM, Type::Int)
        .global_index(KEEPS, &[LOG_PARTITION], &[KEEPS_FROM])
        .global_index(READY, &[CONSUMER, LOG_PARTITION], &[READY_AT])
        .build()
}

/// One record that is parked.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ParkedRecord {
    /// The partition it stands in.
    pub partition: u32,
    /// Its key.
    pub subject: String,
    /// Its offset.
    pub offset: u64,
    /// Why.
    pub reason: String,
    /// How often it was tried; 0 for one that is only behind another.
    pub tries: i64,
    /// Since when.
    pub parked_at: Time,
    /// Whether it is to be tried again.
    pub ready: bool,
}

impl ParkedRecord {
    pub(super) fn of(row: &Row) -> Result<ParkedRecord, StoreError> {
        let partition = u32::try_from(row.get_int(LOG_PARTITION)?);
        Ok(ParkedRecord {
            partition: partition.map_err(|_| row.corrupt(LOG_PARTITION, "is not a partition"))?,
            subject: row.get_text(SUBJECT)?.to_owned(),
            offset: offset_at(row, LOG_OFFSET)?,
            reason: row.get_text(REASON)?.to_owned(),
            tries: row.get_int(TRIES)?,
            parked_at: row.get_time(PARKED_AT)?,
            ready: row.get_optional_time(READY_AT)?.is_some(),
        })
    }
}

fn key(consumer: &str, partition: u32, subject: &str, offset: u64) -> [Value; 4] {
    [consumer.into(), i64::from(partition).into(), subject.into(), column_of(offset).into()]
}

/// A reason of bounded length.
pub(super) fn shortened(reason: &str) -> &str {
    let ends = reason.char_indices().map(|(place, letter)| place + letter.len_utf8());
    let end = ends.take_while(|end| *end <= REASON_BYTES_MAX).last().unwrap_or(0);
    reason.get(..end).unwrap_or_default()
}

/// Parks a record.
pub(super) fn park(
    consumer: &str,
    partition: u32,
    subject: &str,
    offset: u64,
    reason: &str,
    tries: i64,
    books: &ConsumerTables,
) -> Step {
    Step::insert(&books.parked, key(consumer, partition, subject, offset))
        .set(REASON, shortened(reason))
        .set(TRIES, tries)
        .set(PARKED_AT, now())
        .set(KEEPS_FROM, column_of(offset.saturating_sub(1)))
}

/// Has a parked record tried again.
pub(super) fn ready(parked: &ParkedRecord, consumer: &str, books: &ConsumerTables) -> Step {
    ready_at(consumer, parked.partition, &parked.subject, parked.offset, books)
}

/// The same, by its key and offset.
pub(super) fn ready_at(
    consumer: &str,
    partition: u32,
    subject: &str,
    offset: u64,
    books: &ConsumerTables,
) -> Step {
    Step::update(&books.parked, key(consumer, partition, subject, offset)).set(READY_AT, now())
}

/// Takes the record at an offset away, under each of its keys.
pub(super) fn remove_all(
    consumer: &str,
    partition: u32,
    subjects: &[&str],
    offset: u64,
    books: &ConsumerTables,
) -> Vec<Step> {
    let remove = |subject: &&str| Step::delete(&books.parked, key(consumer, partition, subject, offset));
    subjects.iter().map(remove).collect()
}

/// Says that a parked record was tried in vain.
pub(super) fn in_vain(parked: &ParkedRecord, consumer: &str, reason: &str, books: &ConsumerTables) -> Step {
    at(parked, consumer, books)
        .set(REASON, shortened(reason))
        .set(TRIES, Operand::Coalesce(TRIES.to_owned(), 0.into()).add(1))
        .set(READY_AT, Value::Null)
}

fn at(parked: &ParkedRecord, consumer: &str, books: &ConsumerTables) -> Step {
    Step::update(&books.parked, key(consumer, parked.partition, &parked.subject, parked.offset))
}

/// All rows of a range.
pub(super) async fn all(store: &dyn Store, mut query: Query) -> Result<Vec<ParkedRecord>, StoreError> {
    let mut found = Vec::new();
    loop {
        let page = store.query(&query).await?;
        for row in &page.rows {
            found.push(ParkedRecord::of(row)?);
        }
        let Some(next) = page.next else { return Ok(found) };
        query = query.after(next).map_err(misuse)?;
    }
}

/// The oldest few of a key.
pub(super) async fn of_subject(
    store: &dyn Store,
    tenant: &Tenant,
    consumer: &str,
    partition: u32,
    subject: &str,
    limit: usize,
) -> Result<Vec<ParkedRecord>, StoreError> {
    let books = ConsumerTables::open()?;
    let query = Query::table(&books.parked, tenant, ConsumerTables::key(consumer, partition))
        .and_then(|query| query.prefix([subject.into()]))
        .and_then(|query| query.limit(limit))
        .map_err(misuse)?;
    store.query(&query).await?.rows.iter().map(ParkedRecord::of).collect()
}

/// Which records are parked, by key: read after the row of progress, whose count guards them (I4).
#[derive(Clone, Debug, Default)]
pub(super) struct ParkedRows(HashMap<String, BTreeSet<u64>>);

impl ParkedRows {
    pub(super) async fn read(
        store: &dyn Store,
        tenant: &Tenant,
        consumer: &str,
        partition: u32,
    ) -> Result<ParkedRows, StoreError> {
        let books = ConsumerTables::open()?;
        let query =
            Query::table(&books.parked, tenant, ConsumerTables::key(consumer, partition)).map_err(misuse)?;
        let mut lot = ParkedRows::default();
        for parked in all(store, query).await? {
            lot.add(parked.subject, parked.offset);
        }
        Ok(lot)
    }

    pub(super) fn add(&mut self, subject: String, offset: u64) {
        self.0.entry(subject).or_default().insert(offset);
    }

    /// The keys under which the record at an offset is parked.
    pub(super) fn keys_at(&self, offset: u64) -> Vec<&str> {
        let at = self.0.iter().filter(|(_, offsets)| offsets.contains(&offset));
        let mut keys: Vec<&str> = at.map(|(key, _)| key.as_str()).collect();
        keys.sort_unstable();
        keys
    }

    /// The oldest record that is parked under one of the keys of the record at this offset, and is older than it.
    pub(super) fn before(&self, offset: u64) -> Option<(&str, u64)> {
        let at = self.0.iter().filter(|(_, offsets)| offsets.contains(&offset));
        let first = at.filter_map(|(key, offsets)| Some((key.as_str(), *offsets.first()?)));
        first.filter(|(_, first)| *first < offset).min_by_key(|(_, first)| *first)
    }

    /// The record behind this one under a key.
    pub(super) fn next_of(&self, key: &str, offset: u64) -> Option<u64> {
        self.0.get(key)?.range(offset + 1..).next().copied()
    }

    /// Whether nothing waits.
    pub(super) fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Whether a record of this key waits.
    pub(super) fn has(&self, subject: &str) -> bool {
        self.0.contains_key(subject)
    }

    /// Whether this very record does.
    pub(super) fn holds(&self, subject: &str, offset: u64) -> bool {
        self.0.get(subject).is_some_and(|offsets| offsets.contains(&offset))
    }
}
