//! Requests to the server: which errors are retried and which outcomes are known.
//!
//! The retries of the SDK are switched off. A write without an answer may have been applied, and a retry by the SDK
//! would then fail on the result of the first attempt. The rules here are:
//!
//! - A throttled request and a request that conflicts with a transaction were not applied. They are retried.
//! - A transaction carries a token. If it is sent again with the same token and content within ten minutes, the server
//!   applies it at most once and reports its result. A transaction without an answer, or one that is reported as in
//!   progress, is therefore retried unchanged. Its outcome is unknown only after the last retry.
//! - A single write has no token. Without an answer its outcome is unknown.
//! - Reads are retried.

use std::collections::{BTreeMap, HashMap};
use std::future::Future;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use aws_sdk_dynamodb::Client;
use aws_sdk_dynamodb::error::{ProvideErrorMetadata, SdkError};
use aws_sdk_dynamodb::operation::delete_item::DeleteItemError;
use aws_sdk_dynamodb::operation::transact_write_items::TransactWriteItemsError;
use aws_sdk_dynamodb::operation::update_item::UpdateItemError;
use aws_sdk_dynamodb::types::{
    Get, KeysAndAttributes, ReturnValue, ReturnValuesOnConditionCheckFailure, TransactGetItem, WriteRequest,
};
use statehouse_store::{Clock, Random};

use crate::item::{Item, ItemKey};
use crate::item_write::{ItemWrite, WriteKind};
use crate::request_error::{RequestError, classify};

/// Attempts for a request that was certainly not applied.
const ATTEMPTS_MAX: u32 = 12;
/// Attempts for a transaction whose outcome is unknown.
const UNKNOWN_ATTEMPTS_MAX: u32 = 8;
/// Items in one batch read.
const BATCH_GET_MAX: usize = 100;
/// Items in one batch write.
const BATCH_WRITE_MAX: usize = 25;

/// The result of the condition on one item.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum ConditionResult {
    /// The condition held.
    Held,
    /// The condition failed on this item; `None` if there is no item.
    Failed(Option<Item>),
    /// The condition was not evaluated because of a conflicting transaction or of throttling.
    NotChecked,
    /// The server rejects the content of this write.
    Invalid(String),
}

/// The result of a write.
#[derive(Debug)]
pub(crate) enum ClientWriteResult {
    /// Applied. A single update returns the new item.
    Applied(Option<Item>),
    /// Not applied. One result for each item, in the order of the writes.
    Rejected(Vec<ConditionResult>),
}

/// The SDK client with this store's retries.
#[derive(Debug)]
pub(crate) struct DynamoClient {
    pub(crate) sdk: Client,
    pub(crate) retry_clock: Arc<dyn Clock>,
    pub(crate) transaction_items: usize,
    random: Mutex<Random>,
    /// Whether the server returned the item of a failed single write at least once. Old servers never do.
    returns_old: AtomicBool,
}

impl DynamoClient {
    pub(crate) fn new(sdk: Client, retry_clock: Arc<dyn Clock>, transaction_items: usize) -> DynamoClient {
        // Not from a seed: two processes with equal tokens would confuse their transactions.
        let random = Mutex::new(Random::from_entropy());
        DynamoClient { sdk, retry_clock, transaction_items, random, returns_old: AtomicBool::new(false) }
    }

    /// A random number.
    pub(crate) fn random_u64(&self) -> u64 {
        self.random.lock().unwrap_or_else(PoisonError::into_inner).next_u64()
    }

    /// Waits before the next attempt: exponential backoff with full jitter.
    pub(crate) async fn back_off(&self, attempt: u32) {
        let ceiling_micros = (4_000_u64 << attempt.min(6)).min(200_000);
        let micros = {
            let mut random = self.random.lock().unwrap_or_else(PoisonError::into_inner);
            500 + random.below(ceiling_micros)
        };
        self.retry_clock.sleep(Duration::from_micros(micros)).await;
    }

    /// Sends an idempotent request, with retries.
    pub(crate) async fn send_with_retries<T, E, F>(&self, request: impl Fn() -> F) -> Result<T, RequestError>
    where
        F: Future<Output = Result<T, SdkError<E>>>,
        E: ProvideErrorMetadata + std::error::Error + 'static,
    {
        let mut attempt = 0;
        loop {
            match request().await {
                Ok(answer) => return Ok(answer),
                Err(error) => {
                    let error = classify(&error);
                    attempt += 1;
                    if !error.is_retryable() || attempt >= ATTEMPTS_MAX {
                        return Err(error);
                    }
                }
            }
            self.back_off(attempt).await;
        }
    }

    /// Reads one item.
    pub(crate) async fn get(
        &self,
        table: &str,
        key: Item,
        strong: bool,
    ) -> Result<Option<Item>, RequestError> {
        let request = || {
            let request = self.sdk.get_item().table_name(table).set_key(Some(key.clone()));
            request.consistent_read(strong).send()
        };
        Ok(self.send_with_retries(request).await?.item)
    }

    /// Reads items by their keys. The items are not a snapshot. Keys may occur twice.
    pub(crate) async fn get_all(
        &self,
        keys: &[ItemKey],
        strong: bool,
    ) -> Result<HashMap<ItemKey, Item>, RequestError> {
        if let [key] = keys {
            let item = self.get(&key.table, key.attributes(), strong).await?;
            return Ok(item.into_iter().map(|item| (key.clone(), item)).collect());
        }
        let mut distinct: Vec<&ItemKey> = keys.iter().collect();
        distinct.sort();
        distinct.dedup();
        let mut found = HashMap::new();
        for chunk in distinct.chunks(BATCH_GET_MAX) {
            let mut wanted: BTreeMap<String, Vec<Item>> = BTreeMap::new();
            for key in chunk {
                wanted.entry(key.table.clone()).or_default().push(key.attributes());
            }
            let mut unprocessed: HashMap<String, KeysAndAttributes> = HashMap::new();
            for (table, keys) in wanted {
                let keys = KeysAndAttributes::builder().set_keys(Some(keys)).consistent_read(strong).build();
                unprocessed.insert(table, keys.map_err(|error| RequestError::Invalid(error.to_string()))?);
            }
            let mut attempt = 0;
            while !unprocessed.is_empty() {
                let request =
                    || self.sdk.batch_get_item().set_request_items(Some(unprocessed.clone())).send();
                let answer = self.send_with_retries(request).await?;
                let mut any = false;
                for (table, items) in answer.responses.unwrap_or_default() {
                    for item in items {
                        any = true;
                        let key = ItemKey::in_item(&table, &item);
                        let key = key.ok_or_else(|| {
                            RequestError::Invalid(format!("{table} returned {item:?}, which has no key"))
                        })?;
                        found.insert(key, item);
                    }
                }
                unprocessed = answer.unprocessed_keys.unwrap_or_default();
                if !unprocessed.is_empty() {
                    // The server leaves out keys when it is throttled or when the answer is too large.
                    attempt = if any { 0 } else { attempt + 1 };
                    if attempt >= ATTEMPTS_MAX {
                        return Err(RequestError::Throttled("a batch read made no progress".into()));
                    }
                    self.back_off(attempt).await;
                }
            }
        }
        Ok(found)
    }

    /// Reads items as one snapshot that is serialized with all transactions. At most `transaction_items` of them.
    pub(crate) async fn snapshot(&self, keys: &[(String, Item)]) -> Result<Vec<Option<Item>>, RequestError> {
        let items = keys.iter().map(|(table, key)| {
            let get = Get::builder().table_name(table).set_key(Some(key.clone())).build()?;
            Ok(TransactGetItem::builder().get(get).build())
        });
        let items: Vec<TransactGetItem> = items
            .collect::<Result<_, aws_sdk_dynamodb::error::BuildError>>()
            .map_err(|error| RequestError::Invalid(error.to_string()))?;
        let mut attempt = 0;
        loop {
            let sent = self.sdk.transact_get_items().set_transact_items(Some(items.clone())).send().await;
            let error = match sent {
                Ok(answer) => {
                    let items = answer.responses.unwrap_or_default();
                    if items.len() != keys.len() {
                        let why = format!("{} responses for {} keys", items.len(), keys.len());
                        return Err(RequestError::Invalid(why));
                    }
                    return Ok(items.into_iter().map(|response| response.item).collect());
                }
                // The server cancels a transactional read only for conflicts and throttling.
                Err(error) if error.code() == Some("TransactionCanceledException") => {
                    RequestError::Conflict("the items are being written".into())
                }
                Err(error) => classify(&error),
            };
            attempt += 1;
            if !error.is_retryable() || attempt >= ATTEMPTS_MAX {
                return Err(error);
            }
            self.back_off(attempt).await;
        }
    }

    /// Writes one item.
    pub(crate) async fn write_one(&self, action: &ItemWrite) -> Result<ClientWriteResult, RequestError> {
        let mut attempt = 0;
        loop {
            let error = match self.send_one(action).await {
                Ok(item) => return Ok(ClientWriteResult::Applied(item)),
                Err((RequestError::Condition, item)) => {
                    let item = self.old_item(action, item).await?;
                    return Ok(ClientWriteResult::Rejected(vec![ConditionResult::Failed(item)]));
                }
                Err((error, _)) => error,
            };
            attempt += 1;
            let again = matches!(
                error,
                RequestError::Throttled(_) | RequestError::Conflict(_) | RequestError::NotSent(_)
            );
            if !again || attempt >= ATTEMPTS_MAX {
                return Err(error);
            }
            self.back_off(attempt).await;
        }
    }

    async fn send_one(&self, action: &ItemWrite) -> Result<Option<Item>, (RequestError, Option<Item>)> {
        let old = ReturnValuesOnConditionCheckFailure::AllOld;
        match &action.kind {
            WriteKind::Update(expression) => {
                let request = self
                    .sdk
                    .update_item()
                    .table_name(&action.table)
                    .set_key(Some(action.key.clone()))
                    .update_expression(expression)
                    .set_condition_expression(action.condition.clone())
                    .set_expression_attribute_names(action.terms.names())
                    .set_expression_attribute_values(action.terms.values())
                    .return_values(ReturnValue::AllNew)
                    .return_values_on_condition_check_failure(old);
                match request.send().await {
                    Ok(answer) => Ok(answer.attributes),
                    Err(error) => {
                        let class = classify(&error);
                        let item = match error.into_service_error() {
                            UpdateItemError::ConditionalCheckFailedException(failed) => failed.item,
                            _ => None,
                        };
                        Err((class, item))
                    }
                }
            }
            WriteKind::Delete => {
                let request = self
                    .sdk
                    .delete_item()
                    .table_name(&action.table)
                    .set_key(Some(action.key.clone()))
                    .set_condition_expression(action.condition.clone())
                    .set_expression_attribute_names(action.terms.names())
                    .set_expression_attribute_values(action.terms.values())
                    .return_values_on_condition_check_failure(old);
                match request.send().await {
                    Ok(_) => Ok(None),
                    Err(error) => {
                        let class = classify(&error);
                        let item = match error.into_service_error() {
                            DeleteItemError::ConditionalCheckFailedException(failed) => failed.item,
                            _ => None,
                        };
                        Err((class, item))
                    }
                }
            }
            WriteKind::Put(_) | WriteKind::Check => {
                let why = format!("a {} is not sent alone", action.part_name());
                Err((RequestError::Invalid(why), None))
            }
        }
    }

    /// The item on which a condition failed. If the server does not return it, this reads it. The item may have changed in
    /// between, so the caller evaluates the plan again on the result.
    async fn old_item(&self, action: &ItemWrite, item: Option<Item>) -> Result<Option<Item>, RequestError> {
        if item.is_some() {
            self.returns_old.store(true, Ordering::Relaxed);
        }
        if item.is_some() || self.returns_old.load(Ordering::Relaxed) {
            return Ok(item);
        }
        self.get(&action.table, action.key.clone(), true).await
    }

    /// Writes several items in one transaction.
    pub(crate) async fn write_all(&self, actions: &[ItemWrite]) -> Result<ClientWriteResult, RequestError> {
        let items: Vec<_> = actions
            .iter()
            .map(ItemWrite::in_transaction)
            .collect::<Result<_, _>>()
            .map_err(|error| RequestError::Invalid(error.to_string()))?;
        let token = format!("{:016x}{:016x}", self.random_u64(), self.random_u64());
        let (mut attempt, mut unknown) = (0, false);
        loop {
            let request = self
                .sdk
                .transact_write_items()
                .set_transact_items(Some(items.clone()))
                .client_request_token(&token);
            let error = match request.send().await {
                Ok(_) => return Ok(ClientWriteResult::Applied(None)),
                Err(error) => {
                    let class = classify(&error);
                    if let TransactWriteItemsError::TransactionCanceledException(cancelled) =
                        error.into_service_error()
                    {
                        let reasons = cancelled.cancellation_reasons.unwrap_or_default();
                        // The reasons are matched with the items by their index.
                        if reasons.len() == items.len() {
                            return Ok(ClientWriteResult::Rejected(
                                reasons.into_iter().map(condition_result).collect(),
                            ));
                        }
                    }
                    class
                }
            };
            attempt += 1;
            unknown |= matches!(error, RequestError::UnknownOutcome(_) | RequestError::InProgress);
            let limit = if unknown { UNKNOWN_ATTEMPTS_MAX } else { ATTEMPTS_MAX };
            if !error.is_retryable() || attempt >= limit {
                // After an attempt without an answer, the error of a later attempt does not decide the outcome.
                return Err(if unknown { RequestError::UnknownOutcome(format!("{error:?}")) } else { error });
            }
            self.back_off(attempt).await;
        }
    }

    /// Deletes or puts items without conditions, in batches. The requests are idempotent.
    pub(crate) async fn write_batch(
        &self,
        table: &str,
        requests: Vec<WriteRequest>,
    ) -> Result<(), RequestError> {
        for chunk in requests.chunks(BATCH_WRITE_MAX) {
            let mut unprocessed = HashMap::from([(table.to_owned(), chunk.to_vec())]);
            let mut attempt = 0;
            while !unprocessed.is_empty() {
                let request =
                    || self.sdk.batch_write_item().set_request_items(Some(unprocessed.clone())).send();
                unprocessed = self.send_with_retries(request).await?.unprocessed_items.unwrap_or_default();
                if !unprocessed.is_empty() {
                    attempt += 1;
                    if attempt >= ATTEMPTS_MAX {
                        return Err(RequestError::Throttled("a batch write made no progress".into()));
                    }
                    self.back_off(attempt).await;
                }
            }
        }
        Ok(())
    }
}

fn condition_result(reason: aws_sdk_dynamodb::types::CancellationReason) -> ConditionResult {
    match reason.code.as_deref() {
        None | Some("None") => ConditionResult::Held,
        Some("ConditionalCheckFailed") => {
            ConditionResult::Failed(reason.item.filter(|item| !item.is_empty()))
        }
        Some("ValidationError" | "ItemCollectionSizeLimitExceeded") => {
            ConditionResult::Invalid(reason.message.unwrap_or_default())
        }
        // TransactionConflict, ProvisionedThroughputExceeded, ThrottlingError.
        Some(_) => ConditionResult::NotChecked,
    }
}
