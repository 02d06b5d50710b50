//! Reads of the log: pages, heads, waiting, trimming, and the status of operations.
//!
//! A page has no gap between its offsets. While a transaction that moves several records is being applied, a later record
//! can be visible before an earlier one. The page then ends before the missing record.

use std::sync::Arc;
use std::time::Duration;

use aws_sdk_dynamodb::types::{AttributeValue, DeleteRequest, WriteRequest};
use statehouse_store::bug;
use statehouse_store::limits::PAGE_MAX;
use statehouse_store::log::{RecordView, partition_of};
use statehouse_store::{LogPage, Record, Resolution, StoreError, Tenant};
use tokio::task::JoinSet;

use crate::client::{ClientWriteResult, ConditionResult};
use crate::expression::{Condition, ExpressionPlaceholders};
use crate::inner::DynamoInner;
use crate::item::{self, Item, PK};
use crate::item_write::{ItemWrite, UpdateClauses, WriteKind};
use crate::record::{self, LogWrite, OFFSET, OperationItem, PARTITION};
use crate::request_error::RequestError;

/// The oldest offset that is kept: an attribute of the partition's item in the system table.
const OLDEST: &str = "oldest";
/// The interval between two polls of the log, which grows from the first to the second.
const POLL_MIN: Duration = Duration::from_millis(40);
const POLL_MAX: Duration = Duration::from_secs(2);
/// Attempts to find the record of an operation that is being moved.
const LOOKUPS_MAX: u32 = 20;
/// Operations that a trim deletes concurrently.
const CONCURRENT_DELETES_MAX: usize = 16;

impl DynamoInner {
    fn log_settings(partition: u32) -> Item {
        Item::from([(PK.to_owned(), item::string(&format!("log/{partition}")))])
    }

    async fn oldest(&self, partition: u32) -> Result<u64, StoreError> {
        let meta = self.catalog.meta();
        let item = self.client.get(&meta, DynamoInner::log_settings(partition), true).await;
        let item = item.map_err(|error| error.into_error(&meta))?;
        match item.and_then(|item| item.get(OLDEST).cloned()) {
            None => Ok(1),
            Some(AttributeValue::N(oldest)) if oldest.parse::<u64>().is_ok_and(|oldest| oldest > 0) => {
                oldest.parse().map_err(|_| StoreError::corrupt(&meta, "the oldest offset is no number"))
            }
            Some(other) => Err(StoreError::corrupt(&meta, format!("the oldest offset is {other:?}"))),
        }
    }

    /// Items of the log after an offset, in order; at most `limit`, all up to `through`.
    pub(crate) async fn log_items(
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
                let query = self.client.sdk.query().table_name(&self.tables.log);
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
            let page = self
                .client
                .send_with_retries(request)
                .await
                .map_err(|error| error.into_error(&self.tables.log))?;
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
            let offset = offset_of(&record)?;
            newest = offset;
            if offset == next {
                records.push(record);
                next += 1;
            }
        }
        let head = if to_the_end && newest > 0 { newest } else { self.head(partition).await? };
        Ok(LogPage { records, oldest, head })
    }

    /// The newest offset of each partition, after the sequencer moved the pending records.
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
                StoreError::unavailable(format!("a read of the log was cancelled: {error}"))
            })??;
            match usize::try_from(partition).ok().and_then(|index| heads.get_mut(index)) {
                Some(slot) => *slot = head,
                None => return Err(bug!("partition {partition} of {}", self.partitions).into()),
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
        let mut pause = POLL_MIN;
        loop {
            commits.mark_unchanged();
            let heads = self.heads().await?;
            let known = |number: usize| seen.get(number).copied().unwrap_or(0);
            if heads.iter().enumerate().any(|(number, head)| *head > known(number)) {
                return Ok(heads);
            }
            tokio::select! {
                () = &mut until => return Ok(heads),
                _ = commits.changed() => pause = POLL_MIN,
                () = self.client.retry_clock.sleep(pause) => pause = (pause * 2).min(POLL_MAX),
            }
            self.check_open()?;
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
        // Records that an interrupted trim left have smaller offsets and are deleted, too.
        loop {
            let (items, _) = self.log_items(partition, 0, Some(through), PAGE_MAX).await?;
            if items.is_empty() {
                return Ok(());
            }
            self.move_parts(&items).await?;
            let mut tasks: JoinSet<Result<(), StoreError>> = JoinSet::new();
            for item in &items {
                let record = record::parse(item, RecordView::Log)?;
                let offset = offset_of(&record)?;
                let inner = self.clone();
                if tasks.len() >= CONCURRENT_DELETES_MAX {
                    finish(tasks.join_next().await)?;
                }
                tasks.spawn(async move {
                    inner.delete_operation(&record.tenant, &record.operation, partition, offset).await
                });
            }
            while let Some(done) = tasks.join_next().await {
                finish(Some(done))?;
            }
            // A record is deleted after its operation, so that every operation has its record.
            let mut deletes = Vec::with_capacity(items.len());
            for item in &items {
                let key = [PARTITION, OFFSET].into_iter().filter_map(|name| item.get_key_value(name));
                let key: Item = key.map(|(name, value)| (name.clone(), value.clone())).collect();
                let delete = DeleteRequest::builder().set_key(Some(key)).build();
                let delete =
                    delete.map_err(|error| StoreError::corrupt(&self.tables.log, error.to_string()))?;
                deletes.push(WriteRequest::builder().delete_request(delete).build());
            }
            let deleted = self.client.write_batch(&self.tables.log, deletes).await;
            deleted.map_err(|error| error.into_error(&self.tables.log))?;
        }
    }

    /// Moves the parts of these records' plans before the operations are deleted, which may hold the keys of their rows.
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
        let mut terms = ExpressionPlaceholders::default();
        let mut clauses = UpdateClauses::default();
        let value = AttributeValue::N(oldest.to_string());
        clauses.set(&mut terms, OLDEST, value.clone());
        let condition = Condition::missing(&mut terms, OLDEST);
        let condition = condition.or(Condition::compare(&mut terms, OLDEST, "<", value));
        let meta = self.catalog.meta();
        let action =
            ItemWrite::update(&meta, DynamoInner::log_settings(partition), &clauses, condition, terms);
        match self.client.write_one(&action).await {
            // Raised by this trim, or by another one to a later offset.
            Ok(_) => Ok(()),
            Err(error) => Err(error.into_error(&meta)),
        }
    }

    /// Deletes the operation whose record has this offset, and no later one with the same id.
    async fn delete_operation(
        &self,
        tenant: &Tenant,
        operation: &str,
        partition: u32,
        offset: u64,
    ) -> Result<(), StoreError> {
        let mut terms = ExpressionPlaceholders::default();
        let of = Condition::compare(&mut terms, PARTITION, "=", item::number(partition.into()));
        let of = of.and(Condition::compare(&mut terms, OFFSET, "=", AttributeValue::N(offset.to_string())));
        let key = record::operation_key(tenant, operation);
        let action = ItemWrite::new(&self.tables.operations, key, WriteKind::Delete, of, terms);
        match self.client.write_one(&action).await {
            Ok(_) => Ok(()),
            Err(error) => Err(error.into_error(&self.tables.operations)),
        }
    }

    /// Reads an operation, with strong consistency.
    pub(crate) async fn operation(
        &self,
        tenant: &Tenant,
        operation: &str,
    ) -> Result<Option<OperationItem>, StoreError> {
        let key = record::operation_key(tenant, operation);
        let item = self.client.get(&self.tables.operations, key, true).await;
        let item = item.map_err(|error| error.into_error(&self.tables.operations))?;
        item.filter(|item| !item.is_empty()).as_ref().map(record::parse_operation).transpose()
    }

    /// The record of an operation id, with its position if it has one.
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

    /// The record of an operation; `None` if it was trimmed in between.
    pub(crate) async fn record_of(
        &self,
        operation: &OperationItem,
        tenant: &Tenant,
        id: &str,
    ) -> Result<Option<Record>, StoreError> {
        let mut operation = operation.clone();
        for lookup in 0..LOOKUPS_MAX {
            let (table, key) = match operation.offset {
                Some(offset) => (&self.tables.log, record::log_key(operation.partition, offset)),
                None => (&self.tables.pending, record::pending_key(operation.partition, &operation.sort_key)),
            };
            let item = self.client.get(table, key, true).await.map_err(|error| error.into_error(table))?;
            if let Some(item) = item.filter(|item| !item.is_empty()) {
                return record::parse(&item, RecordView::Operation).map(Some);
            }
            // The record was moved, or is not visible yet.
            match self.operation(tenant, id).await? {
                None => return Ok(None),
                Some(now) if now == operation => self.client.back_off(lookup).await,
                Some(now) => operation = now,
            }
        }
        Err(StoreError::corrupt(
            format!("operation {id} of {tenant}"),
            "the operation exists and its record does not",
        ))
    }

    pub(crate) async fn resolve(
        self: &Arc<Self>,
        tenant: &Tenant,
        id: &str,
    ) -> Result<Resolution, StoreError> {
        for lookup in 0..LOOKUPS_MAX {
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
            let attempt = format!("{:016x}", self.client.random_u64());
            let record = Record::aborted(tenant, id, now);
            let stamp = self.stamps.next(now);
            let entering =
                LogWrite { record: &record, partition, parts: &[], stamp, attempt: &attempt, rows: &[] };
            let actions = self.tables.enter(&entering)?;
            match self.client.write_all(&actions).await {
                Ok(ClientWriteResult::Applied(_)) => {
                    self.notify_log_waiters();
                    return Ok(Resolution::Aborted);
                }
                Ok(ClientWriteResult::Rejected(results)) => {
                    if results.iter().any(|result| matches!(result, ConditionResult::Invalid(_))) {
                        return Err(StoreError::corrupt(&self.tables.operations, format!("{results:?}")));
                    }
                    self.client.back_off(lookup).await;
                }
                // The abort may have been applied: the next attempt reads it.
                Err(RequestError::UnknownOutcome(_)) => self.client.back_off(lookup).await,
                Err(error) => return Err(error.into_error(&self.tables.operations)),
            }
        }
        Err(StoreError::unknown(id, "the operation could be neither found nor aborted"))
    }
}

/// The offset of a record that was read from the log.
fn offset_of(record: &Record) -> Result<u64, StoreError> {
    let location = || format!("the log record of operation {}", record.operation);
    let position = record.position.ok_or_else(|| StoreError::corrupt(location(), "it has no offset"))?;
    Ok(position.offset)
}

fn finish(done: Option<Result<Result<(), StoreError>, tokio::task::JoinError>>) -> Result<(), StoreError> {
    match done {
        None => Ok(()),
        Some(Ok(result)) => result,
        Some(Err(error)) => Err(StoreError::unavailable(format!("a trim was cancelled: {error}"))),
    }
}
