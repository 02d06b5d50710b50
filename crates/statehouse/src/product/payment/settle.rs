//! Records what is known of a transaction: the transaction, its payment and the notices to the merchant, in the plan that records
//! the outcome of the request (I3).

use std::sync::Arc;

use async_trait::async_trait;
use statehouse_store::{Address, Consistency, Row, Store, StoreError, Tenant, Time, Value};

use super::provider::{ProviderReading, TransactionFacts};
use super::rules::{PaymentBalance, PaymentChange, TransactionEnd, TransactionKind, transaction_end};
use super::{
    ACTION_URL, CAPTURABLE, CAPTURED, LIVE_TRANSACTION, PENDING, PENDING_NETWORK_RESULT, PROVIDER_REF,
    PaymentSpec, REASON, REFUNDABLE, REFUNDED, REFUNDING, STATUS, first_text, webhook,
};
use crate::action::{Code, Refusal};
use crate::declare::machine::{Firing, MachinePart, PartUse};
use crate::egress::TargetResponse;
use crate::infra::effect::settle::{EffectEnd, ExchangeKind, Interpretation, Settlement, Settler};

/// Settles the requests of transactions.
#[derive(Debug)]
pub(super) struct PaymentSettler {
    pub spec: Arc<PaymentSpec>,
    /// `settle` of the transaction, and of the payment.
    pub transaction: PartUse,
    pub payment: PartUse,
}

/// A transaction and its payment as they were read.
pub(super) struct OpenTransaction {
    pub payment: Row,
    pub transaction: Row,
}

/// What is recorded with the outcome of a request.
pub(super) struct SettledParts {
    pub transaction: Firing,
    pub others: Vec<MachinePart>,
}

/// What is known of a transaction.
pub(super) struct TransactionOutcome<'a> {
    pub end: EffectEnd,
    /// What the provider answered; none if a person found out, or nothing came.
    pub reading: Option<ProviderReading>,
    pub reason: Option<&'a str>,
}

impl PaymentSettler {
    /// The rows of a transaction.
    pub(super) async fn rows(
        &self,
        store: &dyn Store,
        tenant: &Tenant,
        payment: &str,
        transaction: &str,
    ) -> Result<Option<OpenTransaction>, Refusal> {
        let addresses = [
            Address::new(self.spec.table(), tenant, [payment.into()])?,
            Address::new(self.spec.transactions_table(), tenant, [payment.into(), transaction.into()])?,
        ];
        let mut rows = store.get(&addresses, Consistency::Strong).await?.into_iter();
        let (payment, transaction) = (rows.next().flatten(), rows.next().flatten());
        Ok(payment.zip(transaction).map(|(payment, transaction)| OpenTransaction { payment, transaction }))
    }

    /// What becomes of a transaction and of its payment; nothing if the rows say it already.
    pub(super) fn settled(
        &self,
        rows: &OpenTransaction,
        outcome: &TransactionOutcome<'_>,
        now_here: Time,
    ) -> Result<Option<SettledParts>, Refusal> {
        let OpenTransaction { payment, transaction } = rows;
        if ![PENDING, PENDING_NETWORK_RESULT].contains(&transaction.get_text(STATUS)?) {
            return Ok(None);
        }
        let facts = self.spec.facts_of(payment, transaction)?;
        let verdict = outcome.reading.as_ref().map(|reading| &reading.verdict);
        let end = transaction_end(facts.kind, facts.is_manual, outcome.end, verdict).ok_or_else(|| {
            Refusal::new(Code::Internal, format!("the answer to {transaction} is not definite"))
        })?;
        let balance = PaymentBalance::of(payment)?;
        let change = balance.after(facts.kind, end, facts.amount, self.spec.attempts_max);
        let is_known =
            end_case(facts.kind, end) == UNCERTAIN && transaction.get_text(STATUS)? == PENDING_NETWORK_RESULT;
        let others = match &change {
            Some(change) => self.payment_parts(payment, change, &facts, outcome, now_here)?,
            None if is_known => return Ok(None),
            None => Vec::new(),
        };
        let transaction = self.transaction_part(transaction, end_case(facts.kind, end), outcome);
        Ok(Some(SettledParts { transaction, others }))
    }

    fn transaction_part(
        &self,
        transaction: &Row,
        case: &'static str,
        outcome: &TransactionOutcome<'_>,
    ) -> Firing {
        let mut firing = self.transaction.at(transaction.key().iter().cloned()).case(case);
        firing = firing.bind(REASON, reason_of(outcome).map_or(Value::Null, Value::from));
        let named = outcome.reading.as_ref().and_then(|reading| reading.provider_ref.as_deref());
        match named {
            Some(named) => firing.bind(PROVIDER_REF, named),
            None => firing,
        }
    }

    /// The transition of the payment, and the notices of it.
    fn payment_parts(
        &self,
        payment: &Row,
        change: &PaymentChange,
        facts: &TransactionFacts,
        outcome: &TransactionOutcome<'_>,
        now_here: Time,
    ) -> Result<Vec<MachinePart>, Refusal> {
        let PaymentChange { case, after } = change;
        let or_null = |text: Option<&str>| text.map_or(Value::Null, Value::from);
        let mut columns: Vec<(&str, Value)> = vec![
            (LIVE_TRANSACTION, or_null(after.live.as_deref())),
            (CAPTURABLE, after.capturable.into()),
            (CAPTURED, after.captured.into()),
            (REFUNDABLE, after.refundable.into()),
            (REFUNDING, after.refunding.into()),
            (REFUNDED, after.refunded.into()),
            (REASON, or_null(reason_of(outcome))),
        ];
        let reading = outcome.reading.as_ref();
        if facts.kind == TransactionKind::Charge {
            columns.push((ACTION_URL, or_null(reading.and_then(|reading| reading.action_url.as_deref()))));
            if let Some(named) = reading.and_then(|reading| reading.provider_ref.as_deref()) {
                columns.push((PROVIDER_REF, named.into()));
            }
        }
        let mut firing = self.payment.on(payment).case(*case);
        for (name, value) in &columns {
            firing = firing.bind((*name).to_owned(), value.clone());
        }
        columns.push((STATUS, after.status.as_str().into()));
        let mut parts = vec![MachinePart::from(firing)];
        parts.extend(webhook::notices(&self.spec, payment, case, &columns, now_here)?);
        parts.extend(self.postings(payment, case, facts)?);
        Ok(parts)
    }

    /// The transfers that follow from a change (I7).
    fn postings(
        &self,
        payment: &Row,
        case: &str,
        facts: &TransactionFacts,
    ) -> Result<Vec<MachinePart>, Refusal> {
        let Some(ledger) = &self.spec.ledger else { return Ok(Vec::new()) };
        let templates = match case {
            "captured" => &ledger.spec.on_capture,
            "refunded" => &ledger.spec.on_refund,
            _ => return Ok(Vec::new()),
        };
        let mut lines = Vec::with_capacity(templates.len());
        for (number, template) in templates.iter().enumerate() {
            let id = format!("{}:{}:{number}", facts.payment_intent_id, facts.transaction_id);
            lines.push(template.line(id, payment, self.spec.provider_name, facts.amount)?);
        }
        ledger.posted(&lines)
    }

    /// What a response says about the request of an effect.
    fn read(
        &self,
        rows: &OpenTransaction,
        exchange: ExchangeKind,
        answer: &TargetResponse,
    ) -> Result<ProviderReading, StoreError> {
        let facts = self.spec.facts_of(&rows.payment, &rows.transaction)?;
        Ok(self.spec.provider.read(&facts, exchange, answer))
    }
}

const UNCERTAIN: &str = "uncertain";

/// The case in which a transaction has this end.
fn end_case(kind: TransactionKind, end: TransactionEnd) -> &'static str {
    match end {
        TransactionEnd::Done if kind == TransactionKind::Charge => "captured",
        TransactionEnd::Done => "done",
        TransactionEnd::Authorized => "authorized",
        TransactionEnd::Declined => "declined",
        TransactionEnd::Failed => "failed",
        TransactionEnd::ActionRequired | TransactionEnd::Processing | TransactionEnd::Unknown => UNCERTAIN,
    }
}

/// Why it is as it is: in the provider's words, or else in those of the request.
fn reason_of<'o>(outcome: &'o TransactionOutcome<'_>) -> Option<&'o str> {
    let said = outcome.reading.as_ref().and_then(|reading| reading.reason.as_deref());
    said.or(outcome.reason)
}

#[async_trait]
impl Settler for PaymentSettler {
    async fn interpret(
        &self,
        effect: &Row,
        exchange: ExchangeKind,
        answer: &TargetResponse,
        store: &dyn Store,
    ) -> Result<Interpretation, Refusal> {
        let Some(rows) = self.rows_of(effect, store).await? else { return Ok(Interpretation::ByStatus) };
        Ok(self.read(&rows, exchange, answer)?.interpretation(answer.status))
    }

    async fn settle(&self, settlement: &Settlement<'_>) -> Result<Vec<MachinePart>, Refusal> {
        let effect = settlement.effect;
        let rows = self.rows_of(effect, settlement.store).await?;
        let rows = rows.ok_or_else(|| effect.corrupt("key", "names a transaction that is not there"))?;
        let read = |answer| self.read(&rows, ExchangeKind::Request, answer);
        let reading = settlement.answer.map(read).transpose()?;
        let outcome = TransactionOutcome { end: settlement.end, reading, reason: settlement.reason };
        let settled = self.settled(&rows, &outcome, settlement.clock.now())?;
        Ok(settled.map_or(Vec::new(), |SettledParts { transaction, others }| {
            std::iter::once(transaction.into()).chain(others).collect()
        }))
    }
}

impl PaymentSettler {
    /// The rows that a request is about.
    async fn rows_of(&self, effect: &Row, store: &dyn Store) -> Result<Option<OpenTransaction>, Refusal> {
        let (payment, transaction) = PaymentSpec::parse_request_key(first_text(effect.key())?)?;
        self.rows(store, effect.tenant(), payment, transaction).await
    }
}
