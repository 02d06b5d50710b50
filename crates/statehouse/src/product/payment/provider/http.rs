//! The generic HTTP provider: JSON requests by kind, one response format, one status query.
//!
//! | transaction | request |
//! |---|---|
//! | `CHARGE` | `POST {url}/charges` |
//! | `CAPTURE` | `POST {url}/captures` |
//! | `VOID` | `POST {url}/voids` |
//! | `REFUND` | `POST {url}/refunds` |
//! | what became of it | `GET {url}/transactions/{key}` with the key of the request; 404: it is not there |
//!
//! A response is `{"status": "captured" | "authorized" | "done" | "declined" | "failed" | "requires_action" | "processing",
//! "provider_ref": "…", "reason": "…", "action_url": "…"}`, with an amount and a currency if the provider repeats them. A response
//! with another amount or currency than was requested says nothing about the request.

use serde_json::{Value as Json, json};

use super::{Provider, ProviderReading, ProviderRequest, ProviderVerdict, TransactionFacts};
use crate::egress::TargetResponse;
use crate::infra::effect::settle::ExchangeKind;
use crate::product::payment::rules::TransactionKind;

/// The longest text of a response that is stored.
const TEXT_CHARS_MAX: usize = 500;

/// The protocol.
#[derive(Debug)]
pub(in crate::product::payment) struct HttpProvider;

impl Provider for HttpProvider {
    fn request(&self, facts: &TransactionFacts) -> ProviderRequest {
        let path = match facts.kind {
            TransactionKind::Charge => "/charges",
            TransactionKind::Capture => "/captures",
            TransactionKind::Void => "/voids",
            TransactionKind::Refund => "/refunds",
        };
        let common = json!({
            "payment_intent_id": facts.payment_intent_id,
            "transaction_id": facts.transaction_id,
            "amount": facts.amount,
            "currency": facts.currency,
        });
        let special = match facts.kind {
            TransactionKind::Charge => json!({"capture": !facts.is_manual, "method": facts.method}),
            _ => json!({"provider_ref": facts.provider_ref}),
        };
        let fields = [common, special].into_iter().filter_map(|part| part.as_object().cloned()).flatten();
        let body = Json::Object(fields.collect());
        ProviderRequest { path: path.to_owned(), body }
    }

    fn read(&self, facts: &TransactionFacts, _: ExchangeKind, answer: &TargetResponse) -> ProviderReading {
        let body: Option<Json> = serde_json::from_slice(&answer.body).ok();
        let Some(body) = body.filter(|_| answer.complete) else { return ProviderReading::unclear() };
        let is_other = |name: &str, expected: Json| body.get(name).is_some_and(|given| *given != expected);
        if is_other("amount", facts.amount.into()) || is_other("currency", facts.currency.as_str().into()) {
            return ProviderReading::unclear();
        }
        let verdict = verdict(facts, body.get("status").and_then(Json::as_str).unwrap_or_default());
        // An error says at most that it was not done.
        let fits = |verdict: &ProviderVerdict| match answer.status {
            200..=299 => true,
            400..=499 => matches!(verdict, ProviderVerdict::Declined | ProviderVerdict::Failed),
            _ => false,
        };
        let Some(verdict) = verdict.filter(fits) else { return ProviderReading::unclear() };
        let text = |name: &str| {
            let text = body.get(name).and_then(Json::as_str)?;
            Some(text.replace('\0', "\u{fffd}").chars().take(TEXT_CHARS_MAX).collect())
        };
        ProviderReading {
            verdict,
            provider_ref: text("provider_ref"),
            reason: text("reason"),
            action_url: text("action_url"),
        }
    }
}

/// What a status means for a transaction; `None` if it cannot have it.
fn verdict(facts: &TransactionFacts, status: &str) -> Option<ProviderVerdict> {
    let is_charge = facts.kind == TransactionKind::Charge;
    Some(match status {
        "authorized" if is_charge && facts.is_manual => ProviderVerdict::Authorized,
        "captured" if is_charge && !facts.is_manual => ProviderVerdict::Done,
        "captured" if facts.kind == TransactionKind::Capture => ProviderVerdict::Done,
        "done" if !is_charge => ProviderVerdict::Done,
        "declined" => ProviderVerdict::Declined,
        "failed" => ProviderVerdict::Failed,
        "requires_action" if is_charge => ProviderVerdict::ActionRequired,
        "processing" => ProviderVerdict::Processing,
        _ => return None,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn facts(kind: TransactionKind, is_manual: bool) -> TransactionFacts {
        TransactionFacts {
            payment_intent_id: "p".into(),
            transaction_id: "t".into(),
            kind,
            amount: 100,
            currency: "EUR".into(),
            is_manual,
            method: Some("pm_1".into()),
            provider_ref: None,
        }
    }

    #[test]
    fn nonsense_is_never_an_answer() {
        let answer = |body: &str| TargetResponse {
            status: 200,
            retry_after: None,
            body: body.as_bytes().to_vec(),
            complete: true,
        };
        let read = |facts: &TransactionFacts, body: &str| {
            HttpProvider.read(facts, ExchangeKind::Request, &answer(body)).verdict
        };
        let charge = facts(TransactionKind::Charge, false);
        for nonsense in [
            "",
            "captured",
            "[]",
            "{}",
            "{\"status\": \"CAPTURED\"}",
            "{\"status\": \"authorized\"}",
            "{\"status\": \"done\"}",
            "{\"status\": true}",
            "{\"status\": \"captured\", \"amount\": 99}",
            "{\"status\": \"captured\", \"amount\": \"100\"}",
            "{\"status\": \"captured\", \"currency\": \"USD\"}",
        ] {
            assert_eq!(read(&charge, nonsense), ProviderVerdict::Unclear, "{nonsense}");
        }
        let failed = TargetResponse { status: 500, ..answer("{\"status\": \"captured\"}") };
        assert_eq!(
            HttpProvider.read(&charge, ExchangeKind::Request, &failed).verdict,
            ProviderVerdict::Unclear
        );
        let declined = TargetResponse { status: 402, ..answer("{\"status\": \"declined\"}") };
        assert_eq!(
            HttpProvider.read(&charge, ExchangeKind::Request, &declined).verdict,
            ProviderVerdict::Declined
        );
        let cut = TargetResponse { complete: false, ..answer("{\"status\": \"captured\"}") };
        assert_eq!(HttpProvider.read(&charge, ExchangeKind::Request, &cut).verdict, ProviderVerdict::Unclear);
        assert_eq!(read(&charge, "{\"status\": \"captured\", \"amount\": 100}"), ProviderVerdict::Done);
        assert_eq!(
            read(&facts(TransactionKind::Charge, true), "{\"status\": \"captured\"}"),
            ProviderVerdict::Unclear
        );
        assert_eq!(
            read(&facts(TransactionKind::Refund, true), "{\"status\": \"done\"}"),
            ProviderVerdict::Done
        );
    }
}
