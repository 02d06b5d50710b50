//! The sequencer: gives pending records their offsets.
//!
//! Writers of different rows do not conflict: a plan puts its record among the pending records of its partition. A reader
//! of the log first moves the pending records into it. Each move is a transaction: it puts the record at the offset after
//! the head if that offset is free, deletes the pending record if it exists, and sets the offset in the operation. Of two
//! concurrent sequencers, one gets the offset and the other fails. A sequencer that crashes has moved whole records or none.
//! Offsets therefore have no gap and never change, and a record has an offset only if its plan was applied.
//!
//! **Order.** Records of plans that wrote a common row must have the order of those writes. Their stamps grow in that
//! order ([`crate::stamps`]), so records that are moved together are sorted by stamp. It remains to show that no earlier
//! record is missed. A list of the pending records is not sufficient: DynamoDB applies a transaction item by item, and a
//! concurrent list may contain a later plan's record and not yet an earlier one's. The rows are sufficient. A plan puts a
//! marker on every row with its write, and the next plan can write the row only after that. If plan B's record is
//! pending, B's rows have the markers of all plans that wrote them before and have no offset yet. Each such marker is
//! followed to its record by a transactional read, which is serialized with all transactions. Either the record is pending
//! and is moved before B, or it was moved before. This needs neither waiting nor a clock.
//!
//! **Several partitions.** A plan whose events belong to several partitions has a pending record in each of them, and a
//! marker that names all of them. The argument above holds in each partition separately. Each record is moved separately;
//! readers of one partition do not wait for the others.
//!
//! Markers of moved records are removed once a row has several of them. A writer that finds too many markers on a row runs
//! the sequencer.

use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet};
use std::sync::Arc;

use aws_sdk_dynamodb::types::AttributeValue;
use statehouse_store::bug;
use statehouse_store::{StoreError, Tenant};

use crate::client::{ClientWriteResult, ConditionResult};
use crate::expression::{Condition, ExpressionPlaceholders};
use crate::inner::DynamoInner;
use crate::item::{self, Item, ItemKey, LOG, PK};
use crate::item_write::{ItemWrite, WriteKind};
use crate::key;
use crate::record::{self, OFFSET, PARTITION, UnnumberedRecord};

/// Records that are read in one round.
const TURN_RECORDS_MAX: usize = 250;
/// Bytes of records that are moved in one transaction, well below the limit of a transaction.
const MOVE_BYTES_MAX: usize = 1_500_000;
/// Rounds of one call. If more records are pending, the next call moves them.
const ATTEMPTS_MAX: u32 = 40;
/// The number of markers on a row from which those of moved records are removed.
const STALE_MARKERS_MAX: usize = 4;

impl DynamoInner {
    /// Moves the pending records of a partition into the log.
    ///
    /// It runs in its own task, which continues if the caller is cancelled. Otherwise a series of callers with short
    /// timeouts would start again each time and never move a long backlog.
    pub(crate) async fn sequence(self: &Arc<Self>, partition: u32) -> Result<(), StoreError> {
        let inner = self.clone();
        let moved = tokio::spawn(async move { inner.move_pending(partition).await }).await;
        moved.map_err(|error| StoreError::unavailable(format!("the sequencer was cancelled: {error}")))?
    }

    async fn move_pending(&self, partition: u32) -> Result<(), StoreError> {
        let Some(own) = usize::try_from(partition).ok().and_then(|sort_key| self.sequencing.get(sort_key))
        else {
            return Err(StoreError::no_partition(partition, self.sequencing.len()));
        };
        let _turn = own.lock().await;
        for attempt_number in 0..ATTEMPTS_MAX {
            let (batch, more) = self.pending(partition).await?;
            if batch.is_empty() {
                return Ok(());
            }
            let (batch, rows) = self.add_predecessors(partition, batch).await?;
            let moved = self.move_all(partition, &batch).await?;
            self.prune_markers(partition, &rows).await?;
            if moved && !more {
                return Ok(());
            }
            if !moved {
                self.client.back_off(attempt_number / 2).await;
            }
        }
        Ok(())
    }

    /// The oldest pending records of a partition, and whether there are more.
    async fn pending(&self, partition: u32) -> Result<(Vec<UnnumberedRecord>, bool), StoreError> {
        let mut records = Vec::new();
        let mut start: Option<Item> = None;
        loop {
            let request = || {
                self.client
                    .sdk
                    .query()
                    .table_name(&self.tables.pending)
                    .key_condition_expression("#partition = :partition")
                    .expression_attribute_names("#partition", PARTITION)
                    .expression_attribute_values(":partition", item::number(partition.into()))
                    .consistent_read(true)
                    .limit(i32::try_from(TURN_RECORDS_MAX).unwrap_or(i32::MAX))
                    .set_exclusive_start_key(start.clone())
                    .send()
            };
            let page = self
                .client
                .send_with_retries(request)
                .await
                .map_err(|error| error.into_error(&self.tables.pending))?;
            for item in page.items.unwrap_or_default() {
                records.push(record::parse_pending(&item)?);
            }
            start = page.last_evaluated_key.filter(|key| !key.is_empty());
            if start.is_none() || records.len() >= TURN_RECORDS_MAX {
                return Ok((records, start.is_some()));
            }
        }
    }

    /// Adds the records that have to precede these, and sorts all. Also returns the rows that were read.
    async fn add_predecessors(
        &self,
        partition: u32,
        batch: Vec<UnnumberedRecord>,
    ) -> Result<(Vec<UnnumberedRecord>, HashMap<ItemKey, Item>), StoreError> {
        let mut records: BTreeMap<String, UnnumberedRecord> = BTreeMap::new();
        let mut rows: HashMap<ItemKey, Item> = HashMap::new();
        let mut looked: HashSet<ItemKey> = HashSet::new();
        let mut settled: HashSet<String> = HashSet::new();
        let mut new = batch;
        while !new.is_empty() {
            for record in new.iter_mut().filter(|record| record.rows.is_none()) {
                record.rows = Some(self.rows_of(record).await?);
            }
            let mut unread: Vec<ItemKey> =
                new.iter().flat_map(|record| record.rows.iter().flatten().cloned()).collect();
            unread.retain(|key| looked.insert(key.clone()));
            let found = self.client.get_all(&unread, true).await;
            rows.extend(found.map_err(|error| error.into_error("the rows of pending records"))?);
            records.extend(new.drain(..).map(|record| (record.sort_key.clone(), record)));
            // The sort_keys of earlier plans' records in this partition.
            let mut earlier: BTreeSet<String> = BTreeSet::new();
            for record in records.values() {
                let tenant = &record.record.tenant;
                let named = record.rows.iter().flatten().filter_map(|key| rows.get(key));
                for marker in named.flat_map(item::markers).filter_map(|marker| record::parse_marker(marker))
                {
                    let sort_key =
                        marker.sort_key_in(partition, tenant).filter(|_| marker.stamp < record.stamp);
                    earlier.extend(sort_key.filter(|sort_key| !records.contains_key(sort_key)));
                }
            }
            earlier.retain(|sort_key| !settled.contains(sort_key));
            new = self.read_pending_at(partition, &earlier).await?;
            settled.extend(earlier);
        }
        // Sorted by stamp, which is the prefix of the sort keys.
        Ok((records.into_values().collect(), rows))
    }

    /// The keys of a plan's rows, if its operation holds them.
    async fn rows_of(&self, pending: &UnnumberedRecord) -> Result<Vec<ItemKey>, StoreError> {
        let UnnumberedRecord { record, sort_key, .. } = pending;
        let key = record::operation_key(&record.tenant, &record.operation);
        let found = self.client.snapshot(&[(self.tables.operations.clone(), key)]).await;
        let found = found.map_err(|error| error.into_error(&self.tables.operations))?;
        let rows = match found.into_iter().flatten().next() {
            Some(item) => record::parse_rows(&item),
            // Moved and trimmed since the list was read. The next move of this record fails.
            None => Ok(None),
        };
        let rows =
            rows.map_err(|why| StoreError::corrupt(format!("the pending record {sort_key:?}"), why))?;
        Ok(rows.unwrap_or_default())
    }

    /// Reads the records with these sort keys that are still pending.
    async fn read_pending_at(
        &self,
        partition: u32,
        sort_keys: &BTreeSet<String>,
    ) -> Result<Vec<UnnumberedRecord>, StoreError> {
        let key = |sort_key: &String| (self.tables.pending.clone(), record::pending_key(partition, sort_key));
        let keys: Vec<(String, Item)> = sort_keys.iter().map(key).collect();
        let mut records = Vec::new();
        for chunk in keys.chunks(self.client.transaction_items) {
            let items = self.client.snapshot(chunk).await;
            let items = items.map_err(|error| error.into_error(&self.tables.pending))?;
            for pending in items.into_iter().flatten().filter(|item| !item.is_empty()) {
                records.push(record::parse_pending(&pending)?);
            }
        }
        Ok(records)
    }

    /// Moves records into the log, in this order. Returns whether all were moved; if not, another sequencer is active.
    async fn move_all(&self, partition: u32, records: &[UnnumberedRecord]) -> Result<bool, StoreError> {
        let mut head = self.head(partition).await?;
        let mut rest = records;
        while !rest.is_empty() {
            let (mut writes, mut bytes, mut count, mut offset) = (Vec::<ItemWrite>::new(), 0, 0, head);
            for pending in rest {
                let weight = weight(pending);
                let full =
                    writes.len() + 3 > self.client.transaction_items || bytes + weight > MOVE_BYTES_MAX;
                if full && count > 0 {
                    break;
                }
                offset += 1;
                writes.extend(self.tables.sequence(pending, partition, offset));
                (bytes, count) = (bytes + weight, count + 1);
            }
            match self.client.write_all(&writes).await {
                Ok(ClientWriteResult::Applied(_)) => {}
                Ok(ClientWriteResult::Rejected(results)) => {
                    if let Some(ConditionResult::Invalid(why)) =
                        results.into_iter().find(|result| matches!(result, ConditionResult::Invalid(_)))
                    {
                        return Err(StoreError::corrupt(&self.tables.log, why));
                    }
                    return Ok(false);
                }
                // The next read of the pending records decides.
                Err(crate::request_error::RequestError::UnknownOutcome(_)) => return Ok(false),
                Err(error) => return Err(error.into_error(&self.tables.log)),
            }
            head = offset;
            rest = match rest.get(count..) {
                Some(rest) => rest,
                None => return Err(bug!("{count} of {} records were moved", rest.len()).into()),
            };
        }
        Ok(true)
    }

    /// The newest offset of a partition.
    pub(crate) async fn head(&self, partition: u32) -> Result<u64, StoreError> {
        let request = || {
            self.client
                .sdk
                .query()
                .table_name(&self.tables.log)
                .key_condition_expression("#partition = :partition")
                .projection_expression("#offset")
                .expression_attribute_names("#partition", PARTITION)
                .expression_attribute_names("#offset", OFFSET)
                .expression_attribute_values(":partition", item::number(partition.into()))
                .consistent_read(true)
                .scan_index_forward(false)
                .limit(1)
                .send()
        };
        let page = self
            .client
            .send_with_retries(request)
            .await
            .map_err(|error| error.into_error(&self.tables.log))?;
        let newest = page.items.unwrap_or_default().into_iter().next();
        let Some(item) = newest else { return Ok(0) };
        let offset = item::integer(&item, OFFSET).and_then(|offset| u64::try_from(offset).ok());
        offset.ok_or_else(|| StoreError::corrupt(&self.tables.log, "a record has no offset"))
    }

    /// Removes the markers of this partition from rows with several of them. Their records were moved.
    async fn prune_markers(&self, partition: u32, rows: &HashMap<ItemKey, Item>) -> Result<(), StoreError> {
        for (key, item) in rows {
            let own: Vec<String> = item::markers(item)
                .iter()
                .filter(|text| {
                    record::parse_marker(text).is_some_and(|marker| marker.partitions.contains(&partition))
                })
                .cloned()
                .collect();
            if own.len() >= STALE_MARKERS_MAX {
                let tenant = key::split_tenant(&key.pk).and_then(|(tenant, _)| Tenant::new(tenant).ok());
                if let Some(tenant) = tenant {
                    self.remove_stale_markers(key, &tenant, &own).await?;
                }
            }
        }
        Ok(())
    }

    /// Removes those markers from a row whose records have offsets or were trimmed.
    async fn remove_stale_markers(
        &self,
        key: &ItemKey,
        tenant: &Tenant,
        markers: &[String],
    ) -> Result<(), StoreError> {
        // Where a record of a marker's plan may be pending: by its sort_key, so that an operation id which was forgotten and
        // used again is not mistaken for its former use.
        let keys = markers.iter().filter_map(|text| Some((text, record::parse_marker(text)?)));
        let keys: Vec<(&String, (String, Item))> = keys
            .flat_map(|(text, marker)| {
                let key = |partition: &u32| {
                    let sort_key = marker.sort_key_in(*partition, tenant)?;
                    Some((text, (self.tables.pending.clone(), record::pending_key(*partition, &sort_key))))
                };
                marker.partitions.iter().filter_map(key).collect::<Vec<_>>()
            })
            .collect();
        let mut open: HashSet<&String> = HashSet::new();
        for chunk in keys.chunks(self.client.transaction_items) {
            let wanted: Vec<(String, Item)> = chunk.iter().map(|(_, key)| key.clone()).collect();
            let items = self.client.snapshot(&wanted).await;
            let items = items.map_err(|error| error.into_error(&self.tables.pending))?;
            for ((text, _), item) in chunk.iter().zip(items) {
                if item.is_some_and(|item| !item.is_empty()) {
                    open.insert(text);
                }
            }
        }
        let is_stale = |text: &&String| record::parse_marker(text).is_some() && !open.contains(text);
        let stale: Vec<String> = markers.iter().filter(is_stale).cloned().collect();
        if stale.is_empty() {
            return Ok(());
        }
        let mut terms = ExpressionPlaceholders::default();
        let expression = format!("DELETE {} {}", terms.name(LOG), terms.value(AttributeValue::Ss(stale)));
        let condition = Condition::exists(&mut terms, PK).and(Condition::exists(&mut terms, LOG));
        let verb = WriteKind::Update(expression);
        let action = ItemWrite::new(&key.table, key.attributes(), verb, condition, terms);
        match self.client.write_one(&action).await {
            // A later call removes a marker that stays.
            Ok(_)
            | Err(
                crate::request_error::RequestError::UnknownOutcome(_)
                | crate::request_error::RequestError::Conflict(_),
            ) => Ok(()),
            Err(crate::request_error::RequestError::Throttled(_)) => Ok(()),
            Err(error) => Err(error.into_error(&key.table)),
        }
    }

    /// Removes all markers from a row, after moving their records.
    pub(crate) async fn clear_markers(
        self: &Arc<Self>,
        key: &ItemKey,
        tenant: &Tenant,
        item: Option<&Item>,
    ) -> Result<(), StoreError> {
        let markers = item.map(item::markers).unwrap_or_default();
        let partitions: BTreeSet<u32> = markers
            .iter()
            .filter_map(|marker| record::parse_marker(marker))
            .flat_map(|marker| marker.partitions)
            .collect();
        for partition in partitions {
            self.sequence(partition).await?;
        }
        self.remove_stale_markers(key, tenant, markers).await
    }
}

/// The approximate bytes of a record.
fn weight(pending: &UnnumberedRecord) -> usize {
    let events = pending.record.events.iter();
    1_500
        + events
            .map(|event| event.name.len() + statehouse_store::Value::Json(event.data.clone()).weight())
            .sum::<usize>()
}
