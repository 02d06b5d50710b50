//! Inbound webhooks, `[inbound.NAME]`: another system posts a signed message, and an action runs once per message id.
//!
//! ```toml
//! [inbound.psp]
//! scheme = "standard"
//! secret = "env:PSP_SECRET"
//! when   = { body.type = "payment.succeeded" }
//! do     = "payment.settle"
//! key    = "{body.data.id}"
//! ```
//!
//! ```text
//! bytes ──verify──▶ message ──parse──▶ id, tenant ──when──▶ call ──one plan──▶ applied under the operation id
//!           │                  │                     │               └──▶ refused: nothing written, the sender retries
//!           └──▶ 401           └──▶ 400              └──▶ ignored
//! ```
//!
//! An endpoint has no rows and no workers. The log is its memory.
//!
//! **Invariants.**
//! - W1. Nothing of a message is used before its signature was verified, and a message that is not signed, or was signed too long
//!   ago, writes nothing. *[`SignatureScheme::verify`] is called with the bytes as received, before they are parsed; signatures
//!   are compared in constant time.*
//! - W2. A message id has its effect once, also when deliveries race, answers get lost, or the message changed nothing. *The
//!   operation id of the plan is made from the endpoint and the message id, and the log has an operation once. A message that
//!   changes nothing leaves a record without steps.*
//! - W3. A repeated delivery gets the first outcome for as long as the log keeps the record. A refusal is not an outcome: nothing
//!   was written, and the next delivery tries again. *[`House::call_action`]: an applied operation is answered from its record.*
//! - W4. A sender reaches no other tenant than those that the endpoint, or what it signed, names. *The tenant is a template of
//!   constants and the body, which is signed; the system's own tenant is refused.*
//! - W5. Each secret can be replaced without a pause. *An endpoint has up to two, and a signature by either is valid.*

mod declare;
mod message;
mod verify;

pub use declare::{action_of, summaries};
pub(crate) use declare::{check, declare};
pub use message::AcceptedMessage;

use http::HeaderMap;
use serde_json::Value as Json;
use statehouse_store::{Entry, EventTemplate, Plan, Tenant, bug};

use crate::action::{Answer, Code, Refusal};
use crate::declare::action_call::DeclaredCall;
use crate::declare::template::Template;
use crate::house::{House, UNCHANGED};
use crate::infra::effect::secret::{SecretReference, Secrets};
use crate::resource::no_such;
use message::{MessageCondition, TenantName};
use verify::SignatureScheme;

/// What begins the operation ids of messages.
const OPERATION_PREFIX: &str = "inbound.";
/// The longest message id.
pub const ID_BYTES_MAX: usize = 150;
/// The tenant of messages if the endpoint names none: that of a server without credentials.
const TENANT_DEFAULT: &str = "default";
/// The most secrets of an endpoint: the new one and the old one during a rotation.
const SECRETS_MAX: usize = 2;

/// An endpoint for signed messages from another system.
#[derive(Clone, Debug)]
pub struct InboundEndpoint {
    name: String,
    scheme: SignatureScheme,
    secrets: Vec<SecretReference>,
    id: Template,
    tenant: TenantName,
    when: Vec<MessageCondition>,
    call: DeclaredCall,
    body_max: usize,
}

impl InboundEndpoint {
    /// Its name.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Where messages are posted.
    pub fn path(&self) -> String {
        format!("/inbound/{}", self.name)
    }

    /// The most bytes of a message.
    pub fn body_max(&self) -> usize {
        self.body_max
    }

    /// The full name of the action that it runs.
    pub fn action(&self) -> String {
        self.call.name()
    }

    /// The codes of the action's own refusals.
    pub fn refusals(&self) -> &[Code] {
        self.call.action().map_or(&[], |action| &action.refusals)
    }

    /// The headers of a signed message, each with what it has.
    pub fn headers(&self) -> Vec<(String, &'static str)> {
        self.scheme.headers()
    }

    /// The tenant of every message, if the body does not say it.
    pub fn tenant(&self) -> Option<&Tenant> {
        self.tenant.constant()
    }
}

impl House {
    /// The endpoints of the blueprint.
    pub fn inbound(&self) -> &[InboundEndpoint] {
        &self.endpoints
    }

    /// The endpoint of that name.
    pub fn inbound_endpoint(&self, name: &str) -> Result<&InboundEndpoint, Refusal> {
        let found = self.endpoints.iter().find(|endpoint| endpoint.name == name);
        let names = || self.endpoints.iter().map(|endpoint| endpoint.name.as_str());
        found.ok_or_else(|| no_such("inbound endpoint", name, names()))
    }

    /// Verifies a message and reads what it asks for. Nothing is written.
    ///
    /// # Errors
    /// `invalid_signature` if it is not signed with a secret of the endpoint or was signed too long ago; `unavailable` if no
    /// secret can be read; `invalid_input` if it has no id or no tenant, or does not have what the action takes.
    pub async fn accept_message(
        &self,
        endpoint: &InboundEndpoint,
        headers: &HeaderMap,
        body: &[u8],
    ) -> Result<AcceptedMessage, Refusal> {
        let store = self.store().as_ref();
        let secrets = Secrets::read(endpoint.secrets.iter(), self.egress(), store).await?;
        let now = self.clock().now();
        endpoint.scheme.verify(headers, body, now, &endpoint.secrets, &secrets)?;
        endpoint.read_message(self, headers, body, now)
    }

    /// Runs the action of an accepted message, once per message id.
    pub async fn run_message(&self, message: &AcceptedMessage) -> Result<(), Refusal> {
        let Some((action, arguments)) = message.call.clone() else { return Ok(()) };
        let answer = self.call_action(&message.tenant, action, arguments, message.operation()).await?;
        match answer.token {
            Some(_) => Ok(()),
            None => self.remember_unchanged(message).await,
        }
    }

    /// Records a message that changed nothing, so that a later delivery changes nothing either (W2).
    async fn remember_unchanged(&self, message: &AcceptedMessage) -> Result<(), Refusal> {
        // The sender gets no part of the row, so the log need not keep it.
        let answer = serde_json::to_value(Answer::row(Json::Null));
        let answer = answer.map_err(|error| bug!("an answer is no JSON: {error}"))?;
        let entry = Entry::about(format!("inbound.{}", message.endpoint), message.id.as_str())
            .fingerprint(message.fingerprint())
            .event(EventTemplate::named(UNCHANGED).with("answer", answer));
        let plan = Plan::of(&message.tenant, message.operation_id()).log(entry).build()?;
        // Applied now, applied before by a delivery that raced with this one, or fenced: each is final.
        self.commit_known(&plan).await.map(drop)
    }
}
