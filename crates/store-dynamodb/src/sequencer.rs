//! The sequencer: gives pending records their offsets.
//!
//! Writers of different rows never meet: a plan leaves its record among the pending of its partition, and whoever
//! wants to read the log first moves what is pending into it. Each move is a transaction: the record is put at the
//! offset after the head if nothing is there, taken from the pending if it is there, and noted in its operation. Two
//! sequencers that race want the same offset, and one of them wins. One that crashes has moved whole records or none.
//! So offsets have no gap and never change, and a record has one exactly when its plan was applied.
//!
//! **Order.** Plans that wrote a common row have to stand in the order of those writes. Their stamps grow in that
//! order ([`crate::stamp`]), so records that are moved together are sorted by stamp. What is left to show is that no
//! earlier plan is overlooked, and a list of the pending cannot show it: DynamoDB applies a transaction item by item, and
//! a list read meanwhile may have a later plan's record and not yet an earlier one's. The rows can. A plan leaves
//! a marker on every row it writes, together with its write, and the next plan can write the row only after that. So
//! whoever finds plan B's record pending finds on B's rows the markers of every plan that wrote them before and has no
//! offset yet. Each such marker is followed to its record by a transactional read, which is in order with all
//! transactions: the record is pending, and is moved before B; or it is not, and then it was moved before. There is
//! nothing to wait for, and no clock takes part.
//!
//! **Several partitions.** A plan whose events belong to several partitions has a record pending in each of them, and a
//! marker that names all of them. So the argument above holds in each partition by itself. Each record is moved on its own;
//! readers of one partition do not wait for the others.
//!
//! Markers of moved records are taken off when a few have gathered. A writer that finds a row full of them runs the
//! sequencer itself.

use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet};
use std::sync::Arc;

use aws_sdk_dynamodb::types::AttributeValue;
use statehouse_store::{StoreError, Tenant};

use crate::action::Action;
use crate::expression::{Condition, Terms};
use crate::inner::Inner;
use crate::item::{self, Item, Key, LOG, PK};
use crate::key;
use crate::record::{self, OFFSET, PARTITION, Pending};
use crate::wire::{Reply, Verdict};

/// Records that are looked at in one turn.
const TURN_RECORDS_MAX: usize = 250;
/// Bytes of records that are moved in one transaction, well below what one takes.
const MOVE_BYTES_MAX: usize = 1_500_000;
/// Turns of one call. A log that grows faster than that is moved by the next call.
const TURNS_MAX: u32 = 40;
/// How many markers of moved records gather on a row before they are taken off.
const STALE_MARKERS_MAX: usize = 4;

impl Inner {
    /// Moves what is pending in a partition into the log.
    ///
    /// In a task of its own, which goes on when the caller does not: callers that are impatient one after the other
    /// would otherwise start over for ever, and none of them would get a long backlog moved.
    pub(crate) async fn sequence(self: &Arc<Self>, partition: u32) -> Result<(), StoreError> {
        let inner = self.clone();
        let moved = tokio::spawn(async move { inner.move_pending(partition).await }).await;
        moved.map_err(|error| StoreError::unavailable(format!("the sequencer was cut off: {error}")))?
    }

    async fn move_pending(&self, partition: u32) -> Result<(), StoreError> {
        let Some(own) = usize::try_from(partition).ok().and_then(|place| self.sequencing.get(place)) else {
            return Err(StoreError::no_partition(partition, self.sequencing.len()));
        };
        let _turn = own.lock().await;
        for turn in 0..TURNS_MAX {
            let (batch, more) = self.pending(partition).await?;
            if batch.is_empty() {
                return Ok(());
            }
            let (batch, rows) = self.complete(partition, batch).await?;
            let moved = self.move_all(partition, &batch).await?;
            self.tidy(partition, &rows).await?;
            if moved && !more {
                return Ok(());
            }
            if !moved {
                self.wire.pause(turn / 2).await;
            }
        }
        Ok(())
    }

    /// The oldest pending records of a partition, and whether there are more.
    async fn pending(&self, partition: u32) -> Result<(Vec<Pending>, bool), StoreError> {
        let mut records = Vec::new();
        let mut start: Option<Item> = None;
        loop {
            let request = || {
                self.wire
                    .client
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
            let page =
                self.wire.repeat(request).await.map_err(|fault| fault.into_error(&self.tables.pending))?;
            for item in page.items.unwrap_or_default() {
                records.push(record::parse_pending(&item)?);
            }
            start = page.last_evaluated_key.filter(|key| !key.is_empty());
            if start.is_none() || records.len() >= TURN_RECORDS_MAX {
                return Ok((records, start.is_some()));
            }
        }
    }

    /// Adds the records that have to come before these, and sorts all. Returns the rows that were looked at, too.
    async fn complete(
        &self,
        partition: u32,
        batch: Vec<Pending>,
    ) -> Result<(Vec<Pending>, HashMap<Key, Item>), StoreError> {
        let mut records: BTreeMap<String, Pending> = BTreeMap::new();
        let mut rows: HashMap<Key, Item> = HashMap::new();
        let mut looked: HashSet<Key> = HashSet::new();
        let mut settled: HashSet<String> = HashSet::new();
        let mut new = batch;
        while !new.is_empty() {
            for record in new.iter_mut().filter(|record| record.rows.is_none()) {
                record.rows = Some(self.rows_of(record).await?);
            }
            let mut unread: Vec<Key> =
                new.iter().flat_map(|record| record.rows.clone().unwrap_or_default()).collect();
            unread.retain(|key| looked.insert(key.clone()));
            let found = self.wire.get_all(&unread, true).await;
            rows.extend(found.map_err(|fault| fault.into_error("the rows of pending records"))?);
            records.extend(new.drain(..).map(|record| (record.place.clone(), record)));
            // The places of earlier plans' records in this partition.
            let mut earlier: BTreeSet<String> = BTreeSet::new();
            for record in records.values() {
                let tenant = &record.record.tenant;
                let named = record.rows.iter().flatten().filter_map(|key| rows.get(key));
                for marker in named.flat_map(item::markers).filter_map(|marker| record::parse_marker(marker))
                {
                    let place = marker.place_in(partition, tenant).filter(|_| marker.stamp < record.stamp);
                    earlier.extend(place.filter(|place| !records.contains_key(place)));
                }
            }
            earlier.retain(|place| !settled.contains(place));
            new = self.follow(partition, &earlier).await?;
            settled.extend(earlier);
        }
        // By stamp: the places begin with it.
        Ok((records.into_values().collect(), rows))
    }

    /// The keys of a plan's rows, where they stand in its operation.
    async fn rows_of(&self, pending: &Pending) -> Result<Vec<Key>, StoreError> {
        let Pending { record, place, .. } = pending;
        let key = record::operation_key(&record.tenant, &record.operation);
        let found = self.wire.snapshot(&[(self.tables.operations.clone(), key)]).await;
        let found = found.map_err(|fault| fault.into_error(&self.tables.operations))?;
        let rows = match found.into_iter().flatten().next() {
            Some(item) => record::parse_rows(&item),
            // Moved and forgotten since the list was read: to move it once more will fail.
            None => Ok(None),
        };
        let rows = rows.map_err(|why| StoreError::corrupt(format!("the pending record {place:?}"), why))?;
        Ok(rows.unwrap_or_default())
    }

    /// Looks where markers lead to. Returns the records that are still pending there.
    async fn follow(&self, partition: u32, places: &BTreeSet<String>) -> Result<Vec<Pending>, StoreError> {
        let key = |place: &String| (self.tables.pending.clone(), record::pending_key(partition, place));
        let keys: Vec<(String, Item)> = places.iter().map(key).collect();
        let mut records = Vec::new();
        for chunk in keys.chunks(self.wire.transaction_items) {
            let items = self.wire.snapshot(chunk).await;
            let items = items.map_err(|fault| fault.into_error(&self.tables.pending))?;
            for pending in items.into_iter().flatten().filter(|item| !item.is_empty()) {
                records.push(record::parse_pending(&pending)?);
            }
        }
        Ok(records)
    }

    /// Moves records into the log, in this order. Says whether all were moved; if not, somebody else is at it.
    async fn move_all(&self, partition: u32, records: &[Pending]) -> Result<bool, StoreError> {
        let mut head = self.head(partition).await?;
        let mut rest = records;
        while !rest.is_empty() {
            let (mut actions, mut bytes, mut count) = (Vec::<Action>::new(), 0, 0);
            for pending in rest {
                let weight = weight(pending);
                let full = actions.len() + 3 > self.wire.transaction_items || bytes + weight > MOVE_BYTES_MAX;
                if full && count > 0 {
                    break;
                }
                let offset = head + 1 + u64::try_from(count).unwrap_or(0);
                actions.extend(self.tables.sequence(pending, partition, offset));
                (bytes, count) = (bytes + weight, count + 1);
            }
            match self.wire.write_all(&actions).await {
                Ok(Reply::Done(_)) => {}
                Ok(Reply::Not(verdicts)) => {
                    if let Some(Verdict::Invalid(why)) =
                        verdicts.into_iter().find(|verdict| matches!(verdict, Verdict::Invalid(_)))
                    {
                        return Err(StoreError::corrupt(&self.tables.log, why));
                    }
                    return Ok(false);
                }
                // Moved or not, the next look at the pending tells.
                Err(crate::wire::Fault::Open(_)) => return Ok(false),
                Err(fault) => return Err(fault.into_error(&self.tables.log)),
            }
            head += u64::try_from(count).unwrap_or(0);
            rest = rest.get(count..).unwrap_or_default();
        }
        Ok(true)
    }

    /// The newest offset of a partition.
    pub(crate) async fn head(&self, partition: u32) -> Result<u64, StoreError> {
        let request = || {
            self.wire
                .client
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
        let page = self.wire.repeat(request).await.map_err(|fault| fault.into_error(&self.tables.log))?;
        let newest = page.items.unwrap_or_default().into_iter().next();
        let offset = newest.and_then(|item| item::integer(&item, OFFSET));
        Ok(offset.and_then(|offset| u64::try_from(offset).ok()).unwrap_or(0))
    }

    /// Takes the markers of this partition off rows that carry several. All that these rows had were moved.
    async fn tidy(&self, partition: u32, rows: &HashMap<Key, Item>) -> Result<(), StoreError> {
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
                    self.take_off(key, &tenant, &own).await?;
                }
            }
        }
        Ok(())
    }

    /// Takes those of these markers off a row whose records have their offsets or are forgotten.
    async fn take_off(&self, key: &Key, tenant: &Tenant, markers: &[String]) -> Result<(), StoreError> {
        // Where a record of a marker's plan may be pending: by its place, so that an operation id which was forgotten and
        // used again is not mistaken for its former use.
        let keys = markers.iter().filter_map(|text| Some((text, record::parse_marker(text)?)));
        let keys: Vec<(&String, (String, Item))> = keys
            .flat_map(|(text, marker)| {
                let key = |partition: &u32| {
                    let place = marker.place_in(*partition, tenant)?;
                    Some((text, (self.tables.pending.clone(), record::pending_key(*partition, &place))))
                };
                marker.partitions.iter().filter_map(key).collect::<Vec<_>>()
            })
            .collect();
        let mut open: HashSet<&String> = HashSet::new();
        for chunk in keys.chunks(self.wire.transaction_items) {
            let wanted: Vec<(String, Item)> = chunk.iter().map(|(_, key)| key.clone()).collect();
            let items = self.wire.snapshot(&wanted).await;
            let items = items.map_err(|fault| fault.into_error(&self.tables.pending))?;
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
        let mut terms = Terms::default();
        let expression = format!("DELETE {} {}", terms.name(LOG), terms.value(AttributeValue::Ss(stale)));
        let condition = Condition::exists(&mut terms, PK).and(Condition::exists(&mut terms, LOG));
        let verb = crate::action::Verb::Update(expression);
        let action = Action::new(&key.table, key.attributes(), verb, condition, terms);
        match self.wire.write_one(&action).await {
            // A marker that stays is taken off another time.
            Ok(_) | Err(crate::wire::Fault::Open(_) | crate::wire::Fault::Conflict(_)) => Ok(()),
            Err(crate::wire::Fault::Throttled(_)) => Ok(()),
            Err(fault) => Err(fault.into_error(&key.table)),
        }
    }

    /// Makes room for markers on a row: moves the records that they point to, and takes them off.
    pub(crate) async fn relieve(
        self: &Arc<Self>,
        key: &Key,
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
        self.take_off(key, tenant, markers).await
    }
}

/// About how many bytes a record has.
fn weight(pending: &Pending) -> usize {
    let events = pending.record.events.iter();
    1_500
        + events
            .map(|event| event.name.len() + statehouse_store::Value::Json(event.data.clone()).weight())
            .sum::<usize>()
}
