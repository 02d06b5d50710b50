//! Signed messages from other systems: `POST /inbound/NAME`. The signature is the credential.
//!
//! The order is that of distrust: the path, the method, the form of the body, its size, the signature; what the message says is
//! read last. Until the signature was verified, the sender has the quotas of one credential of the tenant, so that a flood of
//! forged messages leaves the rest to the tenant's own callers.

use std::sync::Arc;

use axum::response::Response;
use http::header::{ACCEPT, CONTENT_ENCODING, CONTENT_TYPE, WWW_AUTHENTICATE};
use http::{HeaderMap, Method, StatusCode};
use serde_json::json;
use statehouse::Code;
use statehouse::audit::AuditActor;
use statehouse::inbound::InboundEndpoint;
use statehouse_store::Tenant;

use super::conditions::single;
use super::{HttpRequest, HttpShared, RequestInfo, body, json_response};
use crate::auth::{Caller, TENANT_DEFAULT};
use crate::problem::{INTERNAL, NOT_FOUND, Problem, UNSUPPORTED_MEDIA_TYPE};

/// What the paths of endpoints begin with.
const PREFIX: &str = "/inbound/";

/// Whether a path is that of an endpoint.
pub(super) fn is_path(path: &str) -> bool {
    path.starts_with(PREFIX)
}

/// Handles a message.
pub(super) async fn handle(
    shared: &HttpShared,
    request: HttpRequest,
    info: &mut RequestInfo,
) -> Result<Response, Problem> {
    let (parts, body) = request.into_parts();
    let name = parts.uri.path().strip_prefix(PREFIX).unwrap_or_default();
    let endpoint = shared.house.inbound().iter().find(|endpoint| endpoint.name() == name);
    let endpoint = endpoint.ok_or_else(|| Problem::new(NOT_FOUND, "no inbound endpoint has this path"))?;
    if parts.method != Method::POST {
        return Err(Problem::method_not_allowed(&["POST"]));
    }
    info.action = Some(format!("inbound.{name}").into());
    check_form(&parts.headers)?;
    let sender = sender(endpoint)?;
    let admitted = shared.quotas.requests.acquire(&sender, 1)?;
    let memory = shared.quotas.body_bytes.acquire(&sender, 0)?;
    let mut bounds = shared.bounds();
    bounds.bytes = bounds.bytes.min(endpoint.body_max());
    let clock = &**shared.house.clock();
    let (bytes, memory) = body::read_raw(&parts.headers, body, bounds, clock, memory).await?;
    let accepted = shared.house.accept_message(endpoint, &parts.headers, &bytes).await;
    let message = accepted.map_err(|refusal| match refusal.code {
        Code::InvalidSignature => Problem::from(refusal).header(WWW_AUTHENTICATE, "Signature"),
        _ => refusal.into(),
    })?;
    info.tenant = Some(message.tenant.clone());
    let answer = json_response(StatusCode::OK, &json!({"id": message.id, "handled": message.is_handled()}));
    if !message.is_handled() {
        return Ok(answer);
    }
    let tenant = message.tenant.clone();
    shared.write_rate.check(&tenant)?;
    let (house, queue) = (shared.house.clone(), shared.write_queue.clone());
    let write = async move {
        let slot = queue.acquire(&message.tenant).await;
        let done = house.run_message(&message).await;
        drop((slot, admitted, memory));
        done
    };
    shared.pending_writes.run(write).await?;
    shared.write_rate.charge(&tenant, bytes.len(), &answer);
    Ok(answer)
}

/// A message is JSON as it was signed: what a proxy or a sender has encoded cannot be verified.
fn check_form(headers: &HeaderMap) -> Result<(), Problem> {
    if let Some(coding) = single(headers, &CONTENT_ENCODING)?
        && !matches!(coding, "" | "identity")
    {
        let detail = format!("a message must not be encoded, and this one is: {coding:?}");
        return Err(Problem::new(UNSUPPORTED_MEDIA_TYPE, detail));
    }
    let given = single(headers, &CONTENT_TYPE)?.unwrap_or("none");
    let essence = given.split(';').next().unwrap_or_default().trim().to_ascii_lowercase();
    let is_json =
        essence == "application/json" || (essence.starts_with("application/") && essence.ends_with("+json"));
    if !is_json {
        let detail = format!("the message is of type {given:?}; an endpoint takes application/json");
        return Err(Problem::new(UNSUPPORTED_MEDIA_TYPE, detail).header(ACCEPT, "application/json"));
    }
    Ok(())
}

/// Whose quotas a message uses before its signature was verified.
fn sender(endpoint: &InboundEndpoint) -> Result<Caller, Problem> {
    let tenant = match endpoint.tenant() {
        Some(tenant) => tenant.clone(),
        None => Tenant::new(TENANT_DEFAULT).map_err(|error| Problem::hidden(INTERNAL, error.to_string()))?,
    };
    let name = format!("inbound.{}", endpoint.name());
    let actor = Arc::new(AuditActor::program(&name));
    Ok(Caller { credential: Some(name.into()), actor, ..Caller::anonymous(tenant) })
}
