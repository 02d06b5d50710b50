//! The log as its readers see it: pages, heads, waiting, trimming, and the fate of operations.
//!
//! A page never passes over an offset. While a move of several records is being applied, a later one can be visible
//! before an earlier one; a page then ends before the one that is missing.

use std::sync::Arc;
use std::time::Duration;

use aws_sdk_dynamodb::types::{AttributeValue, DeleteRequest, WriteRequest};
use statehouse_store::limits::PAGE_MAX;
use statehouse_store::log::{RecordView, partition_of};
use statehouse_store::{LogPage, Position, Record, Resolution, StoreError, Tenant};
use tokio::task::JoinSet;

use crate::action::{self, Action};
use crate::expression::{Condition, Terms};
use crate::inner::Inner;
use crate::item::{self, Item, PK};
use crate::record::{self, Entering, OFFSET, Operation, PARTITION};
use crate::wire::{Fault, Reply, Verdict};

/// The oldest offset that is kept, in the item of a partition's log among the settings.
const OLDEST: &str = "oldest";
/// Between two looks at the log when nothing is heard: at first, and at most.
const LOOK_FIRST: Duration = Duration::from_millis(40);
const LOOK_MAX: Duration = Duration::from_secs(2);
/// How often an operation is looked for that is being moved.
const LOOKUPS_MAX: u32 = 20;
/// Operations that are forgotten at a time.
const FORGET_AT_ONCE: usize = 16;

impl Inner {
    fn log_settings(partition: u32) -> Item {
        Item::from([(PK.to_owned(), item::string(&format!("log/{partition}")))])
    }

    async fn oldest(&self, partition: u32) -> Result<u64, StoreError> {
        let meta = self.catalog.meta();
        let item = self.wire.get(&meta, Inner::log_settings(partition), true).await;
        let item = item.map_err(|fault| fault.into_error(&meta))?;
        let oldest = item.and_then(|item| item::integer(&item, OLDEST));
        Ok(oldest.and_then(|oldest| u64::try_from(oldest).ok()).unwrap_or(1))
    }

    /// Items of the log after an offset, in order; at most `limit`, all up to `through`.
    async fn log_items(
        &self,
        partition: u32,
        after: u64,
        through: Option<u64>,
        limit: usize,
    ) -> Result<(Vec<Item>, bool), StoreError> {
        let mut items = Vec::new();
        let mut start: Option<Item> = None;
        while items.len() < limit {
            let left = i32::try_from(limit - items.len()).unwrap_or(i32::MAX);
            let request = || {
                let query = self.wire.client.query().table_name(&self.tables.log);
                let query = match through {
                    None => query.key_condition_expression("#partition = :partition AND #offset > :after"),
                    Some(through) => query
                        .key_condition_expression(
                            "#partition = :partition AND #offset BETWEEN :after AND :through",
                        )
                        .expression_attribute_values(":through", AttributeValue::N(through.to_string())),
                };
                query
                    .expression_attribute_names("#partition", PARTITION)
                    .expression_attribute_names("#offset", OFFSET)
                    .expression_attribute_values(":partition", item::number(partition.into()))
                    .expression_attribute_values(":after", AttributeValue::N(after.to_string()))
                    .consistent_read(true)
                    .limit(left)
                    .set_exclusive_start_key(start.clone())
                    .send()
            };
            let page = self.wire.repeat(request).await.map_err(|fault| fault.into_error(&self.tables.log))?;
            items.extend(page.items.unwrap_or_default());
            start = page.last_evaluated_key.filter(|key| !key.is_empty());
            if start.is_none() {
                return Ok((items, true));
            }
        }
        Ok((items, false))
    }

    pub(crate) async fn read_log(
        self: &Arc<Self>,
        partition: u32,
        after: u64,
        limit: usize,
    ) -> Result<LogPage, StoreError> {
        self.sequence(partition).await?;
        let limit = limit.min(PAGE_MAX);
        let (items, oldest) =
            tokio::join!(self.log_items(partition, after, None, limit), self.oldest(partition));
        let ((items, to_the_end), oldest) = (items?, oldest?);
        let mut next = oldest.max(after.saturating_add(1));
        let mut records = Vec::with_capacity(items.len());
        let mut newest = 0;
        for item in &items {
            let record = record::parse(item, RecordView::Log)?;
            let Some(Position { offset, .. }) = record.position else { continue };
            newest = offset;
            if offset == next {
                records.push(record);
                next += 1;
            }
        }
        let head = if to_the_end && newest > 0 { newest } else { self.head(partition).await? };
        Ok(LogPage { records, oldest, head })
    }

    /// The newest offset of each partition, after what is pending was moved.
    async fn heads(self: &Arc<Self>) -> Result<Vec<u64>, StoreError> {
        let mut tasks = JoinSet::new();
        for partition in 0..self.partitions {
            let inner = self.clone();
            tasks.spawn(async move {
                inner.sequence(partition).await?;
                Ok::<_, StoreError>((partition, inner.head(partition).await?))
            });
        }
        let mut heads = vec![0; self.sequencing.len()];
        while let Some(done) = tasks.join_next().await {
            let (partition, head) = done.map_err(|error| {
                StoreError::unavailable(format!("a look at the log was cut off: {error}"))
            })??;
            if let Some(place) = usize::try_from(partition).ok().and_then(|place| heads.get_mut(place)) {
                *place = head;
            }
        }
        Ok(heads)
    }

    pub(crate) async fn wait_log(
        self: &Arc<Self>,
        seen: &[u64],
        at_most: Duration,
    ) -> Result<Vec<u64>, StoreError> {
        let mut commits = self.commits.subscribe();
        let mut until = std::pin::pin!(self.clock.sleep(at_most));
        let mut pause = LOOK_FIRST;
        loop {
            commits.mark_unchanged();
            let heads = self.heads().await?;
            let known = |number: usize| seen.get(number).copied().unwrap_or(0);
            if heads.iter().enumerate().any(|(number, head)| *head > known(number)) {
                return Ok(heads);
            }
            tokio::select! {
                () = &mut until => return Ok(heads),
                _ = commits.changed() => pause = LOOK_FIRST,
                () = self.wire.pauses.sleep(pause) => pause = (pause * 2).min(LOOK_MAX),
            }
            self.open()?;
        }
    }

    pub(crate) async fn trim_log(self: &Arc<Self>, partition: u32, through: u64) -> Result<(), StoreError> {
        if partition >= self.partitions {
            return Err(StoreError::no_partition(partition, self.sequencing.len()));
        }
        let through = through.min(self.head(partition).await?.saturating_sub(1));
        if through == 0 {
            return Ok(());
        }
        self.raise_oldest(partition, through + 1).await?;
        // What an interrupted trim left behind is below, too, and goes with the rest.
        loop {
            let (items, _) = self.log_items(partition, 0, Some(through), PAGE_MAX).await?;
            if items.is_empty() {
                return Ok(());
            }
            self.move_parts(&items).await?;
            let mut tasks: JoinSet<Result<(), StoreError>> = JoinSet::new();
            for item in &items {
                let record = record::parse(item, RecordView::Log)?;
                let Some(Position { offset, .. }) = record.position else { continue };
                let inner = self.clone();
                if tasks.len() >= FORGET_AT_ONCE {
                    finish(tasks.join_next().await)?;
                }
                tasks.spawn(async move {
                    inner.forget(&record.tenant, &record.operation, partition, offset).await
                });
            }
            while let Some(done) = tasks.join_next().await {
                finish(Some(done))?;
            }
            // A record goes after its operation, so that none is remembered without its record.
            let mut deletes = Vec::with_capacity(items.len());
            for item in &items {
                let key = [PARTITION, OFFSET].into_iter().filter_map(|name| item.get_key_value(name));
                let key: Item = key.map(|(name, value)| (name.clone(), value.clone())).collect();
                let delete = DeleteRequest::builder().set_key(Some(key)).build();
                let delete =
                    delete.map_err(|error| StoreError::corrupt(&self.tables.log, error.to_string()))?;
                deletes.push(WriteRequest::builder().delete_request(delete).build());
            }
            let deleted = self.wire.write_batch(&self.tables.log, deletes).await;
            deleted.map_err(|fault| fault.into_error(&self.tables.log))?;
        }
    }

    /// Moves the parts of these records' plans before their operations are forgotten, where parts may have their rows.
    async fn move_parts(self: &Arc<Self>, items: &[Item]) -> Result<(), StoreError> {
        let parts = items.iter().map(record::has_parts).collect::<Result<Vec<bool>, StoreError>>()?;
        if parts.contains(&true) {
            for partition in 0..self.partitions {
                self.sequence(partition).await?;
            }
        }
        Ok(())
    }

    async fn raise_oldest(&self, partition: u32, oldest: u64) -> Result<(), StoreError> {
        let mut terms = Terms::default();
        let mut clauses = action::Clauses::default();
        let value = AttributeValue::N(oldest.to_string());
        clauses.set(&mut terms, OLDEST, value.clone());
        let condition = Condition::missing(&mut terms, OLDEST);
        let condition = condition.or(Condition::compare(&mut terms, OLDEST, "<", value));
        let meta = self.catalog.meta();
        let action = Action::update(&meta, Inner::log_settings(partition), &clauses, condition, terms);
        match self.wire.write_one(&action).await {
            // Raised by this trim, or further by another one.
            Ok(_) => Ok(()),
            Err(fault) => Err(fault.into_error(&meta)),
        }
    }

    /// Forgets an operation whose record stands at this offset, and no later one under the same id.
    async fn forget(
        &self,
        tenant: &Tenant,
        operation: &str,
        partition: u32,
        offset: u64,
    ) -> Result<(), StoreError> {
        let mut terms = Terms::default();
        let of = Condition::compare(&mut terms, PARTITION, "=", item::number(partition.into()));
        let of = of.and(Condition::compare(&mut terms, OFFSET, "=", AttributeValue::N(offset.to_string())));
        let key = record::operation_key(tenant, operation);
        let action = Action::new(&self.tables.operations, key, action::Verb::Delete, of, terms);
        match self.wire.write_one(&action).await {
            Ok(_) => Ok(()),
            Err(fault) => Err(fault.into_error(&self.tables.operations)),
        }
    }

    /// What is stored of an operation, in order with all transactions.
    pub(crate) async fn operation(
        &self,
        tenant: &Tenant,
        operation: &str,
    ) -> Result<Option<Operation>, StoreError> {
        let key = record::operation_key(tenant, operation);
        let item = self.wire.get(&self.tables.operations, key, true).await;
        let item = item.map_err(|fault| fault.into_error(&self.tables.operations))?;
        item.filter(|item| !item.is_empty()).as_ref().map(record::parse_operation).transpose()
    }

    /// The record under an operation id, if there is one; with its position if it has one already.
    pub(crate) async fn find_operation(
        &self,
        tenant: &Tenant,
        id: &str,
    ) -> Result<Option<Record>, StoreError> {
        match self.operation(tenant, id).await? {
            Some(operation) => self.record_of(&operation, tenant, id).await,
            None => Ok(None),
        }
    }

    /// The record of an operation; `None` when it was forgotten meanwhile.
    pub(crate) async fn record_of(
        &self,
        operation: &Operation,
        tenant: &Tenant,
        id: &str,
    ) -> Result<Option<Record>, StoreError> {
        let mut operation = operation.clone();
        for lookup in 0..LOOKUPS_MAX {
            let (table, key) = match operation.offset {
                Some(offset) => (&self.tables.log, record::log_key(operation.partition, offset)),
                None => (&self.tables.pending, record::pending_key(operation.partition, &operation.place)),
            };
            let item = self.wire.get(table, key, true).await.map_err(|fault| fault.into_error(table))?;
            if let Some(item) = item.filter(|item| !item.is_empty()) {
                return record::parse(&item, RecordView::Operation).map(Some);
            }
            // Moved since, or not yet visible.
            match self.operation(tenant, id).await? {
                None => return Ok(None),
                Some(now) if now == operation => self.wire.pause(lookup).await,
                Some(now) => operation = now,
            }
        }
        Err(StoreError::corrupt(
            format!("operation {id} of {tenant}"),
            "it is recorded, and its record is missing",
        ))
    }

    pub(crate) async fn resolve(
        self: &Arc<Self>,
        tenant: &Tenant,
        id: &str,
    ) -> Result<Resolution, StoreError> {
        for turn in 0..LOOKUPS_MAX {
            if let Some(operation) = self.operation(tenant, id).await? {
                if operation.offset.is_none() {
                    self.sequence(operation.partition).await?;
                }
                let operation = match self.operation(tenant, id).await? {
                    Some(operation) => operation,
                    None => continue,
                };
                match self.record_of(&operation, tenant, id).await? {
                    Some(record) => return Ok(Resolution::of_record(record)),
                    None => continue,
                }
            }
            let now = self.clock.now();
            let partition = partition_of(tenant, "", id, self.partitions);
            let attempt = format!("{:016x}", self.wire.draw());
            let record = Record::aborted(tenant, id, now);
            let stamp = self.stamps.next(now);
            let entering =
                Entering { record: &record, partition, parts: &[], stamp, attempt: &attempt, rows: &[] };
            let actions = self.tables.enter(&entering)?;
            match self.wire.write_all(&actions).await {
                Ok(Reply::Done(_)) => {
                    self.wake();
                    return Ok(Resolution::Aborted);
                }
                Ok(Reply::Not(verdicts)) => {
                    if verdicts.iter().any(|verdict| matches!(verdict, Verdict::Invalid(_))) {
                        return Err(StoreError::corrupt(&self.tables.operations, format!("{verdicts:?}")));
                    }
                    self.wire.pause(turn).await;
                }
                // The claim may stand: the next turn finds it, and if it was this one's, says the same.
                Err(Fault::Open(_)) => self.wire.pause(turn).await,
                Err(fault) => return Err(fault.into_error(&self.tables.operations)),
            }
        }
        Err(StoreError::unknown(id, "the operation could neither be found nor claimed"))
    }
}

fn finish(done: Option<Result<Result<(), StoreError>, tokio::task::JoinError>>) -> Result<(), StoreError> {
    match done {
        None => Ok(()),
        Some(Ok(result)) => result,
        Some(Err(error)) => Err(StoreError::unavailable(format!("a trim was cut off: {error}"))),
    }
}
