//! What people do about an uncertain outcome: have the provider asked at once, or say what they found out.

use std::sync::Arc;

use async_trait::async_trait;
use serde_json::json;
use statehouse_store::{EventTemplate, Row, Tenant, Value};

use super::actions::ASKED;
use super::settle::{OpenTransaction, PaymentSettler, SettledParts, TransactionOutcome};
use super::{APPLIED, LIVE_TRANSACTION, PaymentSpec, REASON, first_text};
use crate::action::{
    ActionContext, Answer, Call, Code, Expected, PlanParts, Prepare, Prepared, Refusal, RefusedStep, Verdict,
};
use crate::declare::machine::{MachinePart, PartUse, add_parts};
use crate::infra::effect::owned::{ResolvedByHand, is_uncertain};
use crate::infra::effect::settle::EffectEnd;
use crate::resource::key_text;

/// `reconcile`, of a payment or of one of its transactions.
pub(super) struct AskProvider {
    pub spec: Arc<PaymentSpec>,
    /// Makes the question due.
    pub ask: PartUse,
    pub on_transaction: bool,
}

/// The request of a transaction.
async fn request_of(
    spec: &PaymentSpec,
    cx: &ActionContext<'_>,
    tenant: &Tenant,
    payment: &str,
    transaction: &str,
) -> Result<Option<Row>, Refusal> {
    let key = PaymentSpec::request_key(payment, transaction);
    cx.row(spec.outbox.table(), tenant, [key.as_str().into()]).await
}

impl AskProvider {
    /// The transaction that is meant, if there is one.
    async fn transaction(&self, call: &Call, cx: &ActionContext<'_>) -> Result<Option<String>, Refusal> {
        let (spec, key) = (&self.spec, call.key.iter().cloned());
        let (table, resource) = match self.on_transaction {
            true => (spec.transactions_table(), &spec.transactions),
            false => (spec.table(), &spec.name),
        };
        let row = cx.row(table, &call.tenant, key).await?;
        let what = format!("{resource} {}", key_text(&call.key));
        let row = row.ok_or_else(|| Refusal::new(Code::NotFound, format!("{what} does not exist")))?;
        match self.on_transaction {
            true => Ok(call.key.get(1).and_then(Value::as_text).map(str::to_owned)),
            false => Ok(row.get_optional_text(LIVE_TRANSACTION)?.map(str::to_owned)),
        }
    }
}

#[async_trait]
impl Prepare for AskProvider {
    async fn prepare(&self, call: &Call, cx: &ActionContext<'_>) -> Result<Prepared, Refusal> {
        let payment = first_text(&call.key)?;
        let request = match self.transaction(call, cx).await? {
            Some(transaction) => request_of(&self.spec, cx, &call.tenant, payment, &transaction).await?,
            None => None,
        };
        let Some(request) = request.filter(is_uncertain) else {
            return Ok(Prepared::Unchanged(Answer::row(json!({ASKED: false}))));
        };
        let resource = if self.on_transaction { &self.spec.transactions } else { &self.spec.name };
        let event = EventTemplate::named(format!("{resource}.reconcile_requested"));
        let mut parts = PlanParts::new(key_text(&call.key), Vec::new(), event);
        let ask = self.ask.on(&request);
        add_parts(&mut parts, &call.tenant, cx.clock.now(), [MachinePart::from(ask)])?;
        Ok(Prepared::Write(parts))
    }

    fn refused(&self, _: &Call, _: &RefusedStep<'_>) -> Verdict {
        // The request has changed since it was read.
        Verdict::Retry
    }
}

/// `resolve`: a person found out what became of a transaction.
pub(super) struct ResolveTransaction {
    pub settler: Arc<PaymentSettler>,
    pub effect: ResolvedByHand,
}

#[async_trait]
impl Prepare for ResolveTransaction {
    async fn prepare(&self, call: &Call, cx: &ActionContext<'_>) -> Result<Prepared, Refusal> {
        let spec = &self.settler.spec;
        let what = format!("{} {}", spec.transactions, key_text(&call.key));
        let [payment, transaction] = call.key.as_slice() else { return Err(spec.missing(&call.key)) };
        let (payment, transaction) =
            (payment.as_text().unwrap_or_default(), transaction.as_text().unwrap_or_default());
        let rows = self.settler.rows(cx.store, &call.tenant, payment, transaction).await?;
        let rows = rows.ok_or_else(|| Refusal::new(Code::NotFound, format!("{what} does not exist")))?;
        if let Some(Expected::Version(seen)) = call.expected
            && seen != rows.transaction.version()
        {
            let message =
                format!("{what} is at version {}: read it again and decide anew", rows.transaction.version());
            return Err(Refusal::new(Code::VersionConflict, message).at_version(Some(&rows.transaction)));
        }
        let request = request_of(spec, cx, &call.tenant, payment, transaction).await?.filter(is_uncertain);
        let request = request.ok_or_else(|| not_uncertain(&what, &rows))?;
        let is_applied = call.input.flag(APPLIED) == Some(true);
        let reason = call.input.get_text(REASON)?;
        let end = if is_applied { EffectEnd::Delivered } else { EffectEnd::Parked };
        let outcome = TransactionOutcome { end, reading: None, reason: Some(reason) };
        let settled = self.settler.settled(&rows, &outcome, cx.clock.now())?;
        let SettledParts { transaction, others } = settled.ok_or_else(|| not_uncertain(&what, &rows))?;
        let mut parts = transaction.prepare(&call.tenant, cx.clock.now())?;
        let resolved = self.effect.firing(&request, is_applied, reason);
        let others = others.into_iter().chain([MachinePart::from(resolved)]);
        add_parts(&mut parts, &call.tenant, cx.clock.now(), others)?;
        Ok(Prepared::Write(parts))
    }

    fn refused(&self, _: &Call, _: &RefusedStep<'_>) -> Verdict {
        // A row has changed since it was read.
        Verdict::Retry
    }
}

fn not_uncertain(what: &str, rows: &OpenTransaction) -> Refusal {
    let status = rows.transaction.text(super::STATUS).unwrap_or_default();
    let message = format!("{what} is {status}: only an uncertain outcome can be resolved by hand");
    Refusal::new(Code::WrongState, message).at_version(Some(&rows.transaction))
}
