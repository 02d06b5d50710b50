//! From a verified message to a call: its id, its tenant, whether it concerns the endpoint, and the arguments.

use http::HeaderMap;
use serde_json::Value as Json;
use statehouse_store::{Tenant, Time, Value};

use super::{ID_BYTES_MAX, InboundEndpoint, OPERATION_PREFIX};
use crate::action::Refusal;
use crate::declare::template::{Template, TemplateValues, find, text_of};
use crate::form::FieldError;
use crate::house::{ActionRef, CallArguments, House, Operation, digest};
use crate::system;

/// A message whose signature was verified.
#[derive(Clone, Debug)]
pub struct AcceptedMessage {
    /// The endpoint.
    pub endpoint: String,
    /// What the sender calls the message.
    pub id: String,
    /// Whose rows it writes.
    pub tenant: Tenant,
    /// The action and its arguments; `None` if the endpoint ignores such messages.
    pub call: Option<(ActionRef, CallArguments)>,
}

impl AcceptedMessage {
    /// Whether an action runs.
    pub fn is_handled(&self) -> bool {
        self.call.is_some()
    }

    /// The id under which the log knows the effect (W2).
    pub fn operation_id(&self) -> String {
        format!("{OPERATION_PREFIX}{}/{}", self.endpoint, self.id)
    }

    /// A repeated delivery may have another body, such as a count of attempts. So the digest is that of the id, by which a
    /// caller's own request under the same id is told from the message.
    pub(super) fn fingerprint(&self) -> String {
        digest(&self.operation_id())
    }

    pub(super) fn operation(&self) -> Operation {
        Operation { id: Some(self.operation_id()), fingerprint: self.fingerprint() }
    }
}

/// Whose rows a message writes.
#[derive(Clone, Debug)]
pub(super) enum TenantName {
    Constant(Tenant),
    Signed(Template),
}

impl TenantName {
    pub(super) fn constant(&self) -> Option<&Tenant> {
        match self {
            TenantName::Constant(tenant) => Some(tenant),
            TenantName::Signed(_) => None,
        }
    }

    fn of(&self, values: &MessageValues<'_>) -> Result<Tenant, Refusal> {
        match self {
            TenantName::Constant(tenant) => Ok(tenant.clone()),
            TenantName::Signed(template) => {
                let name = whole_text("tenant", template, values)?;
                let tenant = Tenant::new(&name).ok().filter(|tenant| !system::is_system(tenant));
                tenant.ok_or_else(|| refused("tenant", format!("`{name}` cannot be a tenant")))
            }
        }
    }
}

/// A value that a message must have for the endpoint to handle it.
#[derive(Clone, Debug)]
pub(super) struct MessageCondition {
    pub(super) path: Vec<String>,
    /// Any of these will do.
    pub(super) values: Vec<Json>,
}

impl MessageCondition {
    fn holds(&self, values: &MessageValues<'_>) -> bool {
        self.values.contains(&values.value(&self.path))
    }
}

impl InboundEndpoint {
    pub(super) fn read_message(
        &self,
        house: &House,
        headers: &HeaderMap,
        body: &[u8],
        now: Time,
    ) -> Result<AcceptedMessage, Refusal> {
        let body: Json = serde_json::from_slice(body).map_err(|error| {
            let pointer = String::new();
            Refusal::invalid(vec![FieldError {
                pointer,
                detail: format!("the message is not JSON: {error}"),
            }])
        })?;
        let mut values = MessageValues { headers, body: &body, now, id: "" };
        let id = whole_text("id", &self.id, &values)?;
        if id.len() > ID_BYTES_MAX || id.chars().any(char::is_control) {
            let detail = format!("a message id has at most {ID_BYTES_MAX} bytes and no control characters");
            return Err(refused("id", detail));
        }
        values.id = &id;
        let tenant = self.tenant.of(&values)?;
        let call = match self.when.iter().all(|condition| condition.holds(&values)) {
            true => Some((house.find_action(&self.action())?, self.call.arguments(&values)?)),
            false => None,
        };
        Ok(AcceptedMessage { endpoint: self.name.clone(), tenant, call, id: id.clone() })
    }
}

fn refused(what: &str, detail: String) -> Refusal {
    Refusal::invalid(vec![FieldError { pointer: format!("/{what}"), detail }])
}

/// A text with a value in every placeholder: without one of them, two messages would have one name.
fn whole_text(what: &str, template: &Template, values: &MessageValues<'_>) -> Result<String, Refusal> {
    let mut missing = None;
    template.placeholders(&mut |path| {
        let is_name = match values.value(path) {
            Json::String(text) => !text.is_empty(),
            Json::Number(_) | Json::Bool(_) => true,
            _ => false,
        };
        if !is_name {
            missing.get_or_insert_with(|| path.join("."));
        }
    });
    match missing {
        None => Ok(text_of(&template.render(values))),
        Some(path) => {
            Err(refused(what, format!("the message has no text or number as `{path}`, which names it")))
        }
    }
}

/// What the templates of an endpoint name.
struct MessageValues<'a> {
    headers: &'a HeaderMap,
    body: &'a Json,
    now: Time,
    id: &'a str,
}

impl TemplateValues for MessageValues<'_> {
    fn value(&self, path: &[String]) -> Json {
        match path.split_first() {
            Some((name, rest)) if name == "body" => find(self.body, rest).clone(),
            Some((name, [header])) if name == "header" => {
                let text = self.headers.get(header.as_str()).and_then(|value| value.to_str().ok());
                text.map_or(Json::Null, Json::from)
            }
            Some((name, [])) if name == "id" => self.id.into(),
            Some((name, [])) if name == "at" => Value::Time(self.now).to_json(),
            _ => Json::Null,
        }
    }
}
