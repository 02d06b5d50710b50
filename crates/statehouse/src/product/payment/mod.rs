//! A07 Critical transaction process: payments at a provider, from the order to the last refund.
//!
//! ```text
//!            create              charge                 captured
//!   (none) ─────────► CREATED ───────────► PROCESSING ────────────────────────► SUCCEEDED ◄─┐ refund
//!                      │   ▲                │ │ │  │ authorized                    ▲   └────┘
//!               cancel │   │ charge         │ │ │  └────────► REQUIRES_CAPTURE ─────┤ captured
//!                      │   │                │ │ │                │   cancel         │
//!                      ▼   │     declined   │ │ │                ▼                  │
//!               CANCELLED  RETRYABLE ◄──────┤ │ │            CANCELLED              │
//!                      ▲    │ cancel        │ │ └─ REQUIRES_ACTION ─────────────────┤
//!                      └────┘               │ ├─── PENDING ─────────────────────────┤
//!                          FAILED ◄─────────┘ └─── REQUIRES_RECONCILIATION ─────────┘
//!
//!   transaction   open                 a response, a status query, a person
//!       (none) ────────► PENDING ───────────────────────────────────────────► CAPTURED, AUTHORIZED, DONE
//!                          │                                                  DECLINED, FAILED
//!                          └──► PENDING_NETWORK_RESULT ─────────────────────►
//! ```
//!
//! **Rows.** `pay_intents(tenant, payment_intent_id, fields…, amount, currency, capture_method, status, live_transaction, attempt,
//! capturable, captured, refundable, refunding, refunded, provider_ref, action_url, reason, created_at, updated_at, version)`:
//! PaymentIntentState. `pay_transactions(tenant, payment_intent_id, transaction_id, type, status, amount, currency, provider,
//! provider_ref, method, reason, created_at, updated_at, version)`: TransactionState. `pay_attempts`: the rows of the effect that
//! sends a transaction to the provider and asks what became of it ([`crate::infra::effect`]), under the key
//! `PAYMENT:TRANSACTION`: ExternalAuthorizationAttemptState and ReconciliationState. WebhookDeliveryState is the rows of the effect
//! that `webhook` names, one for each event and address.
//!
//! **Invariants.**
//! - I1. One charge, capture or cancellation of a payment is under way at a time, from its beginning to its definite end; an unknown
//!   outcome does not end it. *`live_transaction` names it. Guard of charge:* `status in ('CREATED', 'RETRYABLE')`, states without
//!   a live transaction; *of capture:* `live_transaction is null`; *of cancel:* the payment is as it was read. *Recording an
//!   outcome:* the payment is as it was read, with this live transaction.
//! - I2. A transaction is requested if and only if it was begun. *The payment, the transaction and the request to the provider
//!   are one plan.*
//! - I3. What is known of a transaction is recorded with the payment, the request, the ledger and the webhooks. *One plan; guard of
//!   the transaction:* `status in ('PENDING', 'PENDING_NETWORK_RESULT')`; *of the request:* I2 of [`crate::infra::effect`].
//! - I4. A transaction fails only by a definite answer. *`DECLINED` and `FAILED` are written with a request that is `DELIVERED`
//!   or `PARKED`, and so without `doubt`.*
//! - I5. `refundable = captured - refunded - refunding`, and is not negative. *Guard of refund:* `refundable >= amount`; *of
//!   capture:* `capturable >= amount`. Each plan that changes one of these columns changes the others with it.
//! - I7. What was captured or refunded is posted to the [ledger], once, with the payment. *The transfers of `on_capture` and
//!   `on_refund` are steps of the plan that records the outcome; each is absent before.*
//! - I6. No card number is stored: texts of callers that have one are refused.
//!
//! **Failures.** *Duplicate commit*: I1, and the operation id. *Invalid transition*: I1, I5. *Crash after commit before side
//! effect*: I2; the request is due until its outcome is recorded. *Retry ambiguity against provider*: I1, I4; the provider is asked.
//! *Reconciliation drift*: I3.
//!
//! **Hotspots.** *Synchronous commit-path latency*: a charge is one plan and does not wait for the provider. *External provider
//! bottleneck*: `limits` of the provider. *Retry amplification*: `back_off` and `breaker` of the provider, and one live
//! transaction for each payment. *Idempotency-store hotspot*: operation ids are records of the log, spread over its partitions.

mod actions;
mod archetype;
mod by_hand;
mod create;
mod declare;
mod ledger;
mod provider;
mod rules;
mod settle;
mod transitions;
mod webhook;

pub use archetype::ARCHETYPE;
pub(crate) use declare::declare;

use std::sync::Arc;

use statehouse_store::{Row, StoreError, Table, Value, bug};

use crate::action::{Code, Refusal};
use crate::blueprint::settings::Field;
use crate::declare::TableDef;
use crate::infra::effect::Outbox;
use ledger::Ledger;
use provider::{Provider, TransactionFacts};
use rules::TransactionKind;

/// The states of a payment.
const STATUSES: [&str; 10] = [
    CREATED,
    PROCESSING,
    REQUIRES_ACTION,
    REQUIRES_CAPTURE,
    PENDING,
    REQUIRES_RECONCILIATION,
    RETRYABLE,
    SUCCEEDED,
    FAILED,
    CANCELLED,
];
const CREATED: &str = "CREATED";
const PROCESSING: &str = "PROCESSING";
const REQUIRES_ACTION: &str = "REQUIRES_ACTION";
const REQUIRES_CAPTURE: &str = "REQUIRES_CAPTURE";
const PENDING: &str = "PENDING";
const REQUIRES_RECONCILIATION: &str = "REQUIRES_RECONCILIATION";
const RETRYABLE: &str = "RETRYABLE";
const SUCCEEDED: &str = "SUCCEEDED";
const FAILED: &str = "FAILED";
const CANCELLED: &str = "CANCELLED";
/// The states of a transaction, besides `PENDING` and `FAILED`.
const TRANSACTION_STATUSES: [&str; 7] =
    [PENDING, PENDING_NETWORK_RESULT, AUTHORIZED, TRANSACTION_CAPTURED, DECLINED, FAILED, DONE];
const PENDING_NETWORK_RESULT: &str = "PENDING_NETWORK_RESULT";
const AUTHORIZED: &str = "AUTHORIZED";
const TRANSACTION_CAPTURED: &str = "CAPTURED";
const DECLINED: &str = "DECLINED";
const DONE: &str = "DONE";
/// Columns of both.
const STATUS: &str = "status";
const AMOUNT: &str = "amount";
const CURRENCY: &str = "currency";
const PROVIDER_REF: &str = "provider_ref";
const REASON: &str = "reason";
/// Columns of a payment.
const CAPTURE_METHOD: &str = "capture_method";
const LIVE_TRANSACTION: &str = "live_transaction";
const ATTEMPT: &str = "attempt";
const CAPTURABLE: &str = "capturable";
const CAPTURED: &str = "captured";
const REFUNDABLE: &str = "refundable";
const REFUNDING: &str = "refunding";
const REFUNDED: &str = "refunded";
const ACTION_URL: &str = "action_url";
const WEBHOOK_URLS: &str = "webhook_urls";
/// Columns of a transaction.
const TRANSACTION_ID: &str = "transaction_id";
const TYPE: &str = "type";
const PROVIDER: &str = "provider";
const METHOD: &str = "method";
/// Ways to capture.
const CAPTURE_METHODS: [&str; 2] = ["automatic", MANUAL];
const MANUAL: &str = "manual";
const BY_STATUS: &str = "by_status";
const BY_PAYMENT: &str = "by_payment";
/// An input of `resolve`.
const APPLIED: &str = "applied";

/// One declared kind of payment.
#[derive(Debug)]
struct PaymentSpec {
    /// `pay`.
    name: String,
    /// `pay_transaction`.
    transactions: String,
    /// The name of the key column.
    key: String,
    fields: Vec<Field>,
    currencies: Vec<String>,
    is_manual: bool,
    attempts_max: i64,
    def: Arc<TableDef>,
    transactions_def: Arc<TableDef>,
    provider_name: &'static str,
    provider: Box<dyn Provider>,
    /// Sends requests to the provider.
    outbox: Outbox,
    /// Tells the merchant.
    webhook: Option<Outbox>,
    ledger: Option<Arc<Ledger>>,
}

impl PaymentSpec {
    fn table(&self) -> &Arc<Table> {
        self.def.table()
    }

    fn transactions_table(&self) -> &Arc<Table> {
        self.transactions_def.table()
    }

    /// The key of the request of a transaction. No id has a colon.
    fn request_key(payment: &str, transaction: &str) -> String {
        format!("{payment}:{transaction}")
    }

    /// The payment and the transaction of a request.
    fn parse_request_key(key: &str) -> Result<(&str, &str), StoreError> {
        let parts = key.split_once(':');
        parts.ok_or_else(|| StoreError::corrupt(format!("the request {key}"), "its key names no transaction"))
    }

    /// What the provider needs to know of a transaction that is stored.
    fn facts_of(&self, payment: &Row, transaction: &Row) -> Result<TransactionFacts, StoreError> {
        let word = transaction.get_text(TYPE)?;
        let kind = TransactionKind::of(word)
            .ok_or_else(|| transaction.corrupt(TYPE, "is no kind of transaction"))?;
        let id = transaction.get_text(TRANSACTION_ID)?.to_owned();
        let method = transaction.get_optional_text(METHOD)?.map(str::to_owned);
        self.facts(payment, kind, id, transaction.get_int(AMOUNT)?, method)
    }

    fn facts(
        &self,
        payment: &Row,
        kind: TransactionKind,
        transaction_id: String,
        amount: i64,
        method: Option<String>,
    ) -> Result<TransactionFacts, StoreError> {
        Ok(TransactionFacts {
            payment_intent_id: payment.get_text(&self.key)?.to_owned(),
            transaction_id,
            kind,
            amount,
            currency: payment.get_text(CURRENCY)?.to_owned(),
            is_manual: payment.get_text(CAPTURE_METHOD)? == MANUAL,
            method,
            provider_ref: payment.get_optional_text(PROVIDER_REF)?.map(str::to_owned),
        })
    }

    fn missing(&self, key: &[Value]) -> Refusal {
        let what = format!("{} {}", self.name, crate::resource::key_text(key));
        Refusal::new(Code::NotFound, format!("{what} does not exist"))
    }
}

/// The text of the first part of a key.
fn first_text(key: &[Value]) -> Result<&str, StoreError> {
    let first = key.first().and_then(Value::as_text);
    first.ok_or_else(|| bug!("the key of a payment does not begin with a text").into())
}
