//! Providers: how the requests of a transaction are made, and what the responses say.
//!
//! A provider only makes requests and reads responses. What is sent when, what is asked again and what becomes of an unknown
//! outcome is decided by [`crate::infra::effect`]; what a verdict means for the payment by [`super::rules`].

use std::fmt;

use serde_json::Value as Json;

use super::rules::TransactionKind;
use crate::egress::TargetResponse;
use crate::infra::effect::settle::{ExchangeKind, Interpretation};

pub(super) mod http;

/// What a provider needs to know of a transaction.
#[derive(Clone, Debug)]
pub(super) struct TransactionFacts {
    pub payment_intent_id: String,
    pub transaction_id: String,
    pub kind: TransactionKind,
    pub amount: i64,
    pub currency: String,
    /// Whether a charge reserves the money only.
    pub is_manual: bool,
    /// What the payer pays with, as a reference of the provider's.
    pub method: Option<String>,
    /// What the provider calls the charge.
    pub provider_ref: Option<String>,
}

/// A request to a provider.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct ProviderRequest {
    /// Behind the provider's address.
    pub path: String,
    pub body: Json,
}

/// What a response says.
#[derive(Clone, Debug, PartialEq)]
pub(super) enum ProviderVerdict {
    /// Captured, refunded or voided.
    Done,
    /// The money is reserved.
    Authorized,
    /// Declined.
    Declined,
    /// Certainly not done.
    Failed,
    /// The payer has to act first.
    ActionRequired,
    /// The provider is still working on it.
    Processing,
    /// It says nothing that the provider's protocol has.
    Unclear,
}

/// A response, as a provider's protocol reads it.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct ProviderReading {
    pub verdict: ProviderVerdict,
    /// What the provider calls the transaction.
    pub provider_ref: Option<String>,
    /// Why it was declined.
    pub reason: Option<String>,
    /// Where the payer has to act.
    pub action_url: Option<String>,
}

impl ProviderReading {
    pub(super) fn unclear() -> ProviderReading {
        ProviderReading {
            verdict: ProviderVerdict::Unclear,
            provider_ref: None,
            reason: None,
            action_url: None,
        }
    }

    /// What it means for the request.
    pub(super) fn interpretation(&self, status: u16) -> Interpretation {
        match self.verdict {
            ProviderVerdict::Done
            | ProviderVerdict::Authorized
            | ProviderVerdict::Declined
            | ProviderVerdict::Failed => Interpretation::Definite,
            ProviderVerdict::ActionRequired => Interpretation::Open(ACTION_REQUIRED),
            ProviderVerdict::Processing => Interpretation::Open(PROCESSING),
            // Success without a word that is understood is no success.
            ProviderVerdict::Unclear if (200..300).contains(&status) => Interpretation::Open(UNCLEAR),
            ProviderVerdict::Unclear => Interpretation::ByStatus,
        }
    }
}

/// Reasons for which a request stays open.
const ACTION_REQUIRED: &str = "action_required";
const PROCESSING: &str = "provider_processing";
const UNCLEAR: &str = "unclear_response";

/// The protocol of a provider.
pub(super) trait Provider: Send + Sync + fmt::Debug {
    /// The request of a transaction. The error says what about the transaction the provider cannot do.
    fn request(&self, facts: &TransactionFacts) -> ProviderRequest;

    /// What a response says.
    fn read(
        &self,
        facts: &TransactionFacts,
        exchange: ExchangeKind,
        answer: &TargetResponse,
    ) -> ProviderReading;
}
