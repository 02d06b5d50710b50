//! A provider of payments in tests. It moves money for every request that reaches it, also twice under one key, so that a double
//! request shows as money; and it knows what it has done when it is asked.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use serde_json::{Value as Json, json};
use statehouse::egress::OutboundRequest;

use crate::harness::fake_targets::{TargetBehavior, key_of};

/// What happens to the next request of a transaction.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ProviderReaction {
    /// It is done.
    Works,
    /// It is done, and the answer is lost.
    LosesAnswer,
    /// It is lost.
    LosesRequest,
    /// It is declined.
    Declines,
    /// It is refused as malformed.
    Rejects,
    /// The provider works on it, and will have done it when it is asked.
    Delays,
    /// The payer has to act, and has done so when the provider is asked.
    WantsAction,
    /// It is done, and the answer makes no sense.
    Babbles,
    /// It is done, and the answer is an error.
    Fails,
}

/// What the provider has of one request.
#[derive(Clone, Debug)]
struct ProviderEntry {
    payment: String,
    path: String,
    amount: i64,
    /// `None` as long as it is not decided.
    status: Option<&'static str>,
}

#[derive(Debug, Default)]
struct ProviderBooks {
    planned: BTreeMap<String, Vec<ProviderReaction>>,
    answers: BTreeMap<String, Vec<Json>>,
    /// In the order in which they came, by key.
    entries: Vec<(String, ProviderEntry)>,
}

/// A provider. Clones are one.
#[derive(Clone, Debug, Default)]
pub(crate) struct TestProvider(Arc<Mutex<ProviderBooks>>);

impl TestProvider {
    fn books(&self) -> MutexGuard<'_, ProviderBooks> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// What happens to the requests of a transaction, one after the other; then they work.
    pub(crate) fn plan(&self, transaction: &str, reactions: &[ProviderReaction]) {
        self.books().planned.insert(transaction.to_owned(), reactions.to_vec());
    }

    /// Lets the provider give these answers when it is asked about a transaction, before it tells the truth.
    pub(crate) fn answers(&self, transaction: &str, answers: &[Json]) {
        self.books().answers.insert(transaction.to_owned(), answers.to_vec());
    }

    /// The money that was moved by these requests for a payment.
    fn moved(&self, payment: &str, paths: &[&str]) -> i64 {
        let books = self.books();
        let done = |entry: &&ProviderEntry| {
            entry.payment == payment
                && paths.contains(&entry.path.as_str())
                && matches!(entry.status, Some("captured" | "done"))
        };
        books.entries.iter().map(|(_, entry)| entry).filter(done).map(|entry| entry.amount).sum()
    }

    /// What was captured of a payment.
    pub(crate) fn captured(&self, payment: &str) -> i64 {
        self.moved(payment, &["/charges", "/captures"])
    }

    /// What was refunded of a payment.
    pub(crate) fn refunded(&self, payment: &str) -> i64 {
        self.moved(payment, &["/refunds"])
    }

    /// Does what a request says.
    pub(crate) fn react(&self, outbound: &OutboundRequest) -> TargetBehavior {
        match outbound.method.as_str() {
            "GET" => self.tell(outbound),
            _ => self.take(outbound),
        }
    }

    /// What became of the request with the key in the address.
    fn tell(&self, outbound: &OutboundRequest) -> TargetBehavior {
        let key = key_of(outbound);
        let mut books = self.books();
        let transaction = key.rsplit(':').next().unwrap_or_default().to_owned();
        if let Some(answers) = books.answers.get_mut(&transaction).filter(|answers| !answers.is_empty()) {
            let answer = answers.remove(0);
            return match answer.as_u64().and_then(|status| u16::try_from(status).ok()) {
                Some(status) => TargetBehavior::status(status),
                None => TargetBehavior::body(200, &answer.to_string()),
            };
        }
        let Some((_, entry)) = books.entries.iter_mut().find(|(known, _)| *known == key) else {
            return TargetBehavior::status(404);
        };
        let status = *entry.status.get_or_insert(done(&entry.path, true));
        TargetBehavior::body(
            200,
            &json!({"status": status, "provider_ref": format!("ref-{key}")}).to_string(),
        )
    }

    fn take(&self, outbound: &OutboundRequest) -> TargetBehavior {
        let body: Json = serde_json::from_slice(&outbound.body).unwrap_or_default();
        let text = |name: &str| body[name].as_str().unwrap_or_default().to_owned();
        let (key, path) = (key_of(outbound), outbound.url.path().trim_start_matches("/v1").to_owned());
        let mut books = self.books();
        let planned = books.planned.get_mut(&text("transaction_id")).filter(|planned| !planned.is_empty());
        let reaction = planned.map_or(ProviderReaction::Works, |planned| planned.remove(0));
        let status = match reaction {
            ProviderReaction::LosesRequest | ProviderReaction::Rejects => None,
            ProviderReaction::Declines => Some(Some("declined")),
            ProviderReaction::Delays | ProviderReaction::WantsAction => Some(None),
            _ => Some(Some(done(&path, body["capture"].as_bool().unwrap_or(true)))),
        };
        if let Some(status) = status {
            let amount = body["amount"].as_i64().unwrap_or_default();
            let entry = ProviderEntry { payment: text("payment_intent_id"), path, amount, status };
            books.entries.push((key.clone(), entry));
        }
        let said = |status: &str| json!({"status": status, "provider_ref": format!("ref-{key}")}).to_string();
        match reaction {
            ProviderReaction::LosesAnswer => TargetBehavior::Loses,
            ProviderReaction::LosesRequest => TargetBehavior::Swallows,
            ProviderReaction::Rejects => TargetBehavior::body(422, "{\"error\": \"no such method\"}"),
            ProviderReaction::Declines => {
                TargetBehavior::body(402, "{\"status\": \"declined\", \"reason\": \"insufficient_funds\"}")
            }
            ProviderReaction::Delays => TargetBehavior::body(202, &said("processing")),
            ProviderReaction::WantsAction => {
                let body = json!({"status": "requires_action", "action_url": "https://bank.example/3ds"});
                TargetBehavior::body(200, &body.to_string())
            }
            ProviderReaction::Babbles => {
                TargetBehavior::body(200, "{\"status\": \"captured\", \"amount\": 1}")
            }
            ProviderReaction::Fails => TargetBehavior::status(500),
            ProviderReaction::Works => {
                let status = status.flatten().unwrap_or("processing");
                TargetBehavior::body(200, &said(status))
            }
        }
    }
}

/// What a request of this kind ends with. A charge of a provider that only reserves is not captured.
fn done(path: &str, captures: bool) -> &'static str {
    match path {
        "/charges" if !captures => "authorized",
        "/charges" | "/captures" => "captured",
        _ => "done",
    }
}
