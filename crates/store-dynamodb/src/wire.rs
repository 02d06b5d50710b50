//! Requests and what becomes of them: what is tried again, what is certain, what is not.
//!
//! The SDK's own retries are switched off, because they hide the difference that matters here. A write that got no
//! answer may have been applied; sending it again would make the second attempt fail on the first one's result. So:
//!
//! - Throttled requests, and those that met a transaction under way, were not applied. They are sent again.
//! - A transaction carries a token. Sent again with the same token and content within ten minutes it is applied at
//!   most once and says what became of it. So a transaction without an answer, or one that the server says is still in
//!   progress, is sent again as it is; only when that keeps failing is the outcome unknown.
//! - A single write has no token. Without an answer its outcome is unknown at once.
//! - Reads are simply sent again.

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
use statehouse_store::{Clock, Random, StoreError};

use crate::action::{Action, Verb};
use crate::item::{Item, Key};

/// How often a request that was certainly not applied is sent again.
const ATTEMPTS_MAX: u32 = 12;
/// How often a transaction whose outcome is open is sent again.
const OPEN_ATTEMPTS_MAX: u32 = 8;
/// Items in one batch read.
const BATCH_GET_MAX: usize = 100;
/// Items in one batch write.
const BATCH_WRITE_MAX: usize = 25;

/// Bytes of an item that the server takes.
const SERVER_ITEM_BYTES_MAX: usize = 400 * 1_024;
/// Characters of a server's message that are passed on.
const MESSAGE_MAX: usize = 400;

/// What went wrong with one attempt.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum Fault {
    /// Not applied, for lack of capacity.
    Throttled(String),
    /// Not applied, because a transaction on the same item is under way.
    Conflict(String),
    /// Not applied, because a condition failed.
    Condition,
    /// The same transaction is being applied.
    InProgress,
    /// There is no such table.
    NoTable(String),
    /// The table is being changed.
    Busy(String),
    /// The server does not take it: a limit that is known only to the server.
    Invalid(String),
    /// The server does not know or admit the caller, or refuses for another lasting reason.
    Denied(String),
    /// It never reached the server.
    Unsent(String),
    /// Nobody knows.
    Open(String),
}

impl Fault {
    /// The error where nothing was done.
    pub(crate) fn into_error(self, what: &str) -> StoreError {
        match self {
            Fault::NoTable(why) => {
                StoreError::schema(what, format!("{why}; migrate to a schema that has it"))
            }
            // The waist's limit is below the server's by more than ever comes on top, short of many indexes with keys
            // that are all at their limit and all to be escaped.
            Fault::Invalid(why) if why.contains("Item size") => StoreError::LimitExceeded {
                what: format!("{what}, with its index keys,"),
                limit: SERVER_ITEM_BYTES_MAX,
                actual: SERVER_ITEM_BYTES_MAX + 1,
            },
            Fault::Invalid(why) => {
                StoreError::corrupt(what, format!("the server refuses the request: {why}"))
            }
            Fault::Condition => StoreError::unavailable(format!("{what}: a condition failed unexpectedly")),
            Fault::InProgress => StoreError::unavailable(format!("{what}: still in progress")),
            Fault::Throttled(why)
            | Fault::Conflict(why)
            | Fault::Busy(why)
            | Fault::Denied(why)
            | Fault::Unsent(why)
            | Fault::Open(why) => StoreError::unavailable(format!("{what}: {why}")),
        }
    }

    fn may_pass(&self) -> bool {
        matches!(
            self,
            Fault::Throttled(_) | Fault::Conflict(_) | Fault::InProgress | Fault::Unsent(_) | Fault::Open(_)
        )
    }
}

/// Says what an SDK error means.
pub(crate) fn fault<E>(error: &SdkError<E>) -> Fault
where
    E: ProvideErrorMetadata + std::error::Error + 'static,
{
    let SdkError::ServiceError(context) = error else {
        let why = described(error);
        let unsent = match error {
            SdkError::ConstructionFailure(_) => true,
            // The connector says nothing but this about a server that it never reached.
            SdkError::DispatchFailure(_) => why.contains("tcp connect error") || why.contains("dns error"),
            _ => false,
        };
        return if unsent { Fault::Unsent(why) } else { Fault::Open(why) };
    };
    let (status, code) = (context.raw().status().as_u16(), error.code().unwrap_or("no code"));
    // A server may repeat the whole request in its message.
    let message: String = error.message().unwrap_or("no message").chars().take(MESSAGE_MAX).collect();
    let why = format!("{code}: {message}");
    match code {
        "ProvisionedThroughputExceededException"
        | "RequestLimitExceeded"
        | "ThrottlingException"
        | "Throttling"
        | "LimitExceededException" => Fault::Throttled(why),
        "TransactionConflictException" => Fault::Conflict(why),
        "ConditionalCheckFailedException" => Fault::Condition,
        "TransactionInProgressException" => Fault::InProgress,
        "ResourceNotFoundException" => Fault::NoTable(why),
        "ResourceInUseException" => Fault::Busy(why),
        "ValidationException" | "ItemCollectionSizeLimitExceededException" => Fault::Invalid(why),
        _ if status >= 500 => Fault::Open(why),
        _ => Fault::Denied(why),
    }
}

fn described(error: &(dyn std::error::Error + 'static)) -> String {
    let mut text = error.to_string();
    let mut cause = error.source();
    while let Some(error) = cause {
        text.push_str(": ");
        text.push_str(&error.to_string());
        cause = error.source();
    }
    text
}

/// What a write's condition on one item came to.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum Verdict {
    /// It held, as far as this item goes.
    Held,
    /// It failed on this item, or on none.
    Failed(Option<Item>),
    /// It was not checked: another transaction was under way, or capacity was short.
    Unchecked,
    /// The server does not take this part.
    Invalid(String),
}

/// What became of a write.
#[derive(Debug)]
pub(crate) enum Reply {
    /// It was applied. A single update returns the item as it left it.
    Done(Option<Item>),
    /// It was not, for what was found at its items, in the order of the actions.
    Not(Vec<Verdict>),
}

/// A connection to the server.
#[derive(Debug)]
pub(crate) struct Wire {
    pub(crate) client: Client,
    pub(crate) pauses: Arc<dyn Clock>,
    pub(crate) transaction_items: usize,
    random: Mutex<Random>,
    /// Whether a failed condition of a single write was seen to return its item. Old servers never do.
    returns_old: AtomicBool,
}

impl Wire {
    pub(crate) fn new(client: Client, pauses: Arc<dyn Clock>, transaction_items: usize) -> Wire {
        // Never from a seed: processes that drew the same tokens would take each other's transactions for their own.
        let random = Mutex::new(Random::from_entropy());
        Wire { client, pauses, transaction_items, random, returns_old: AtomicBool::new(false) }
    }

    /// A number that nobody can foresee.
    pub(crate) fn draw(&self) -> u64 {
        self.random.lock().unwrap_or_else(PoisonError::into_inner).next_u64()
    }

    /// Waits before the next attempt: exponentially longer, and any time between nothing and that.
    pub(crate) async fn pause(&self, attempt: u32) {
        let ceiling_micros = (4_000_u64 << attempt.min(6)).min(200_000);
        let micros = {
            let mut random = self.random.lock().unwrap_or_else(PoisonError::into_inner);
            500 + random.below(ceiling_micros)
        };
        self.pauses.sleep(Duration::from_micros(micros)).await;
    }

    /// Sends something that may be sent any number of times.
    pub(crate) async fn repeat<T, E, F>(&self, request: impl Fn() -> F) -> Result<T, Fault>
    where
        F: Future<Output = Result<T, SdkError<E>>>,
        E: ProvideErrorMetadata + std::error::Error + 'static,
    {
        let mut attempt = 0;
        loop {
            match request().await {
                Ok(answer) => return Ok(answer),
                Err(error) => {
                    let fault = fault(&error);
                    attempt += 1;
                    if !fault.may_pass() || attempt >= ATTEMPTS_MAX {
                        return Err(fault);
                    }
                }
            }
            self.pause(attempt).await;
        }
    }

    /// Reads one item.
    pub(crate) async fn get(&self, table: &str, key: Item, strong: bool) -> Result<Option<Item>, Fault> {
        let request = || {
            let request = self.client.get_item().table_name(table).set_key(Some(key.clone()));
            request.consistent_read(strong).send()
        };
        Ok(self.repeat(request).await?.item)
    }

    /// Reads rows by their keys, each by itself as of some moment. Keys may come twice.
    pub(crate) async fn get_all(&self, keys: &[Key], strong: bool) -> Result<HashMap<Key, Item>, Fault> {
        if let [key] = keys {
            let item = self.get(&key.table, key.attributes(), strong).await?;
            return Ok(item.into_iter().map(|item| (key.clone(), item)).collect());
        }
        let mut distinct: Vec<&Key> = keys.iter().collect();
        distinct.sort();
        distinct.dedup();
        let mut found = HashMap::new();
        for chunk in distinct.chunks(BATCH_GET_MAX) {
            let mut wanted: BTreeMap<String, Vec<Item>> = BTreeMap::new();
            for key in chunk {
                wanted.entry(key.table.clone()).or_default().push(key.attributes());
            }
            let mut open: HashMap<String, KeysAndAttributes> = HashMap::new();
            for (table, keys) in wanted {
                let keys = KeysAndAttributes::builder().set_keys(Some(keys)).consistent_read(strong).build();
                open.insert(table, keys.map_err(|error| Fault::Invalid(error.to_string()))?);
            }
            let mut attempt = 0;
            while !open.is_empty() {
                let request = || self.client.batch_get_item().set_request_items(Some(open.clone())).send();
                let answer = self.repeat(request).await?;
                let mut any = false;
                for (table, items) in answer.responses.unwrap_or_default() {
                    for item in items {
                        any = true;
                        if let Some(key) = Key::in_item(&table, &item) {
                            found.insert(key, item);
                        }
                    }
                }
                open = answer.unprocessed_keys.unwrap_or_default();
                if !open.is_empty() {
                    // The server answers a part when the rest is too much for its capacity or one answer.
                    attempt = if any { 0 } else { attempt + 1 };
                    if attempt >= ATTEMPTS_MAX {
                        return Err(Fault::Throttled("a batch read made no progress".into()));
                    }
                    self.pause(attempt).await;
                }
            }
        }
        Ok(found)
    }

    /// Reads items as of one moment, in order with all transactions. At most as many as a transaction takes.
    pub(crate) async fn snapshot(&self, keys: &[(String, Item)]) -> Result<Vec<Option<Item>>, Fault> {
        let items = keys.iter().map(|(table, key)| {
            let get = Get::builder().table_name(table).set_key(Some(key.clone())).build()?;
            Ok(TransactGetItem::builder().get(get).build())
        });
        let items: Vec<TransactGetItem> = items
            .collect::<Result<_, aws_sdk_dynamodb::error::BuildError>>()
            .map_err(|error| Fault::Invalid(error.to_string()))?;
        let mut attempt = 0;
        loop {
            let sent = self.client.transact_get_items().set_transact_items(Some(items.clone())).send().await;
            let fault = match sent {
                Ok(answer) => {
                    let items = answer.responses.unwrap_or_default();
                    return Ok(items.into_iter().map(|response| response.item).collect());
                }
                // A read is cancelled only for conflicts and lack of capacity.
                Err(error) if error.code() == Some("TransactionCanceledException") => {
                    Fault::Conflict("the items are being written".into())
                }
                Err(error) => fault(&error),
            };
            attempt += 1;
            if !fault.may_pass() || attempt >= ATTEMPTS_MAX {
                return Err(fault);
            }
            self.pause(attempt).await;
        }
    }

    /// Writes one item.
    pub(crate) async fn write_one(&self, action: &Action) -> Result<Reply, Fault> {
        let mut attempt = 0;
        loop {
            let fault = match self.send_one(action).await {
                Ok(item) => return Ok(Reply::Done(item)),
                Err((Fault::Condition, item)) => {
                    let item = self.old_item(action, item).await?;
                    return Ok(Reply::Not(vec![Verdict::Failed(item)]));
                }
                Err((fault, _)) => fault,
            };
            attempt += 1;
            let again = matches!(fault, Fault::Throttled(_) | Fault::Conflict(_) | Fault::Unsent(_));
            if !again || attempt >= ATTEMPTS_MAX {
                return Err(fault);
            }
            self.pause(attempt).await;
        }
    }

    async fn send_one(&self, action: &Action) -> Result<Option<Item>, (Fault, Option<Item>)> {
        let old = ReturnValuesOnConditionCheckFailure::AllOld;
        match &action.verb {
            Verb::Update(expression) => {
                let request = self
                    .client
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
                        let fault = fault(&error);
                        let item = match error.into_service_error() {
                            UpdateItemError::ConditionalCheckFailedException(failed) => failed.item,
                            _ => None,
                        };
                        Err((fault, item))
                    }
                }
            }
            Verb::Delete => {
                let request = self
                    .client
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
                        let fault = fault(&error);
                        let item = match error.into_service_error() {
                            DeleteItemError::ConditionalCheckFailedException(failed) => failed.item,
                            _ => None,
                        };
                        Err((fault, item))
                    }
                }
            }
            Verb::Put(_) | Verb::Check => {
                let why = format!("a {} is not sent alone", action.part_name());
                Err((Fault::Invalid(why), None))
            }
        }
    }

    /// The item on which a condition failed. A server that does not return items has to be asked, and the item may have
    /// changed until then; the caller decides anew on what it gets.
    async fn old_item(&self, action: &Action, item: Option<Item>) -> Result<Option<Item>, Fault> {
        if item.is_some() {
            self.returns_old.store(true, Ordering::Relaxed);
        }
        if item.is_some() || self.returns_old.load(Ordering::Relaxed) {
            return Ok(item);
        }
        self.get(&action.table, action.key.clone(), true).await
    }

    /// Writes several items at once, or none.
    pub(crate) async fn write_all(&self, actions: &[Action]) -> Result<Reply, Fault> {
        let items: Vec<_> = actions
            .iter()
            .map(Action::in_transaction)
            .collect::<Result<_, _>>()
            .map_err(|error| Fault::Invalid(error.to_string()))?;
        let token = format!("{:016x}{:016x}", self.draw(), self.draw());
        let (mut attempt, mut open) = (0, false);
        loop {
            let request = self
                .client
                .transact_write_items()
                .set_transact_items(Some(items.clone()))
                .client_request_token(&token);
            let fault = match request.send().await {
                Ok(_) => return Ok(Reply::Done(None)),
                Err(error) => {
                    let fault = fault(&error);
                    if let TransactWriteItemsError::TransactionCanceledException(cancelled) =
                        error.into_service_error()
                    {
                        let reasons = cancelled.cancellation_reasons.unwrap_or_default();
                        return Ok(Reply::Not(reasons.into_iter().map(verdict).collect()));
                    }
                    fault
                }
            };
            attempt += 1;
            open |= matches!(fault, Fault::Open(_) | Fault::InProgress);
            let limit = if open { OPEN_ATTEMPTS_MAX } else { ATTEMPTS_MAX };
            if !fault.may_pass() || attempt >= limit {
                // Once an attempt got no answer, what a later one was told about itself settles nothing.
                return Err(if open { Fault::Open(format!("{fault:?}")) } else { fault });
            }
            self.pause(attempt).await;
        }
    }

    /// Deletes or puts items without conditions, in batches. May be sent any number of times.
    pub(crate) async fn write_batch(&self, table: &str, requests: Vec<WriteRequest>) -> Result<(), Fault> {
        for chunk in requests.chunks(BATCH_WRITE_MAX) {
            let mut open = HashMap::from([(table.to_owned(), chunk.to_vec())]);
            let mut attempt = 0;
            while !open.is_empty() {
                let request = || self.client.batch_write_item().set_request_items(Some(open.clone())).send();
                open = self.repeat(request).await?.unprocessed_items.unwrap_or_default();
                if !open.is_empty() {
                    attempt += 1;
                    if attempt >= ATTEMPTS_MAX {
                        return Err(Fault::Throttled("a batch write made no progress".into()));
                    }
                    self.pause(attempt).await;
                }
            }
        }
        Ok(())
    }
}

fn verdict(reason: aws_sdk_dynamodb::types::CancellationReason) -> Verdict {
    match reason.code.as_deref() {
        None | Some("None") => Verdict::Held,
        Some("ConditionalCheckFailed") => Verdict::Failed(reason.item.filter(|item| !item.is_empty())),
        Some("ValidationError" | "ItemCollectionSizeLimitExceeded") => {
            Verdict::Invalid(reason.message.unwrap_or_default())
        }
        // TransactionConflict, ProvisionedThroughputExceeded, ThrottlingError.
        Some(_) => Verdict::Unchecked,
    }
}
