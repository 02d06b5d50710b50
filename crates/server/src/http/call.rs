//! One action over HTTP: converts the request into a call of the house, and the answer into a response.

use std::sync::Arc;
use std::time::Duration;

use axum::body::Body;
use axum::response::Response;
use http::header::{CACHE_CONTROL, ETAG, LINK, LOCATION};
use http::request::Parts;
use http::{HeaderName, HeaderValue, Method, StatusCode};
use serde_json::{Map, Value as Json};
use statehouse::action::ActionHandler;
use statehouse::form::FieldError;
use statehouse::house::{ActionRef, CallArguments, IF};
use statehouse::resource::key_text;
use statehouse::{Answer, Code, Operation, Refusal};
use statehouse_store::{Tenant, Value};

use super::conditions::{self, NoneMatch, etag};
use super::routes::{RouteEntry, created_in, is_cancelled_with_caller};
use super::{ActionPath, HttpRequest, HttpShared, RequestInfo, body, json_response, path};
use crate::auth::networks::PeerAddress;
use crate::auth::{Access, Caller};
use crate::config::millis;
use crate::problem::{INTERNAL, NOT_FOUND, Problem};
use crate::quota::QuotaGuard;
use crate::seal::fingerprint;

/// Token of a write. A cached read that sends it sees the write.
pub const TOKEN: HeaderName = HeaderName::from_static("statehouse-token");
/// The engine's time in milliseconds since 1970, on reads of resources whose rows have deadlines.
pub const NOW: HeaderName = HeaderName::from_static("statehouse-now");
/// The applied preferences.
const PREFERENCE_APPLIED: HeaderName = HeaderName::from_static("preference-applied");

/// The cursor parameter of a list. It is sealed, so this layer must know it.
const CURSOR: &str = "cursor";
/// The parameter of a read that names the tokens of writes.
const AFTER: &str = "after";
/// Seal context of tokens.
const TOKENS: &[u8] = b"tokens";
/// The parameter of actions that wait for something to do.
const WAIT_MS: &str = "wait_ms";
/// The page size parameter of a list. It may differ from page to page.
const LIMIT: &str = "limit";

/// An authorized call.
struct ActionCall {
    entry: Arc<RouteEntry>,
    key: Vec<Value>,
    parts: Parts,
    body: hyper::body::Incoming,
    caller: Caller,
    /// Counts the request as one in flight.
    admitted: QuotaGuard,
}

/// Handles a request for an action.
pub(super) async fn handle(
    shared: &HttpShared,
    request: HttpRequest,
    info: &mut RequestInfo,
) -> Result<Response, Problem> {
    let (parts, body) = request.into_parts();
    let caller =
        shared.authenticator.authenticate(&parts.headers, PeerAddress::of(&parts.extensions)).await?;
    info.tenant = Some(caller.tenant.clone());
    shared.unsent.check(&caller.tenant)?;
    let admitted = shared.quotas.requests.acquire(&caller, 1)?;
    let call = authorize(shared, caller, parts, body, admitted)?;
    info.action = Some(call.entry.name.clone());
    if call.entry.declared.is_write() { write(shared, call).await } else { read(shared, call).await }
}

/// Finds the action and the row of a request, and checks that the caller may call it.
fn authorize(
    shared: &HttpShared,
    caller: Caller,
    parts: Parts,
    body: hyper::body::Incoming,
    admitted: QuotaGuard,
) -> Result<ActionCall, Problem> {
    let path = ActionPath::parse(parts.uri.path()).ok_or_else(|| Problem::new(NOT_FOUND, "unknown path"))?;
    let entry = shared.routes.find(&path, &parts.method)?;
    caller.require(entry.access())?;
    let key = match path.key {
        None => Vec::new(),
        Some(segment) => path::key(shared.house.resolve(entry.action)?.0, segment)?,
    };
    Ok(ActionCall { entry, key, parts, body, caller, admitted })
}

async fn read(shared: &HttpShared, call: ActionCall) -> Result<Response, Problem> {
    let ActionCall { entry, key, parts, caller, admitted: _admitted, .. } = call;
    let tenant = caller.tenant.clone();
    let mut input = path::input(parts.uri.query(), &entry.declared.input)?;
    open_cursor(shared, &entry.name, &tenant, &mut input)?;
    open_tokens(shared, &tenant, &mut input)?;
    let held = conditions::none_match(&parts.headers);
    let wait_limit = conditions::wait_preference(&parts.headers).filter(|_| !key.is_empty());
    let filter = if key.is_empty() { filter_of(&input) } else { String::new() };
    let _waiting = count_wait(shared, &caller, &input)?;
    let arguments = CallArguments { key, input, expected: None };
    let answer = match wait_limit {
        Some(wait_limit) if held.is_some() || says_what(&entry, &arguments.input) => {
            wait(shared, &caller, &entry, &arguments, (held.as_ref(), wait_limit)).await?
        }
        _ => shared.house.read_action(&caller.principal(), entry.action, arguments).await?,
    };
    let mut response = match (answer.version, held) {
        (Some(version), Some(held)) if held.holds(version) => {
            let mut response = Response::new(Body::empty());
            *response.status_mut() = StatusCode::NOT_MODIFIED;
            response
        }
        _ => json_response(StatusCode::OK, &answer.body),
    };
    let headers = response.headers_mut();
    headers.insert(CACHE_CONTROL, HeaderValue::from_static("private, no-cache"));
    if let Some(version) = answer.version {
        put(headers, ETAG, &etag(version))?;
    }
    if shared.house.resolve(entry.action)?.0.has_times()
        && let Some(now) = shared.engine_clock.now(&**shared.house.store(), &**shared.house.clock()).await
    {
        put(headers, NOW, &(now.micros() / 1000).to_string())?;
    }
    if let Some(next) = &answer.next {
        put(headers, LINK, &next_link(shared, &entry, &tenant, &parts, &filter, next)?)?;
    }
    if let Some(wait_limit) = wait_limit {
        put(headers, PREFERENCE_APPLIED, &format!("wait={}", bounded(shared, wait_limit).as_secs()))?;
    }
    Ok(response)
}

/// Counts a call that may wait long for something to do: a poll, a claim of jobs, a read that waits for a projection.
fn count_wait(
    shared: &HttpShared,
    caller: &Caller,
    input: &Map<String, Json>,
) -> Result<Option<QuotaGuard>, Problem> {
    let waits = input.get(WAIT_MS).is_some_and(|wait| wait.as_i64() != Some(0));
    waits.then(|| shared.quotas.waits.acquire(caller, 1)).transpose()
}

fn put(headers: &mut http::HeaderMap, name: HeaderName, content: &str) -> Result<(), Problem> {
    let content = HeaderValue::from_str(content)
        .map_err(|_| Problem::hidden(INTERNAL, format!("{name} is not a header")))?;
    headers.insert(name, content);
    Ok(())
}

fn bounded(shared: &HttpShared, wait_limit: Duration) -> Duration {
    wait_limit.min(millis(shared.config.limits.wait_max_ms))
}

/// Whether a read says itself what it waits for.
fn says_what(entry: &RouteEntry, input: &Map<String, Json>) -> bool {
    let nothing = Answer::row(Json::Object(Map::new()));
    match &entry.declared.handler {
        ActionHandler::Read(read) => read.is_awaited(input, &nothing).is_some(),
        _ => false,
    }
}

/// Whether an answer is what the caller waits for: as the input says, or else a version that the caller does not hold.
fn is_news(entry: &RouteEntry, input: &Map<String, Json>, held: Option<&NoneMatch>, answer: &Answer) -> bool {
    let awaited = match &entry.declared.handler {
        ActionHandler::Read(read) => read.is_awaited(input, answer),
        _ => None,
    };
    let is_new = || {
        let holds = |version| held.is_some_and(|held| held.holds(version));
        answer.version.is_none_or(|version| !holds(version))
    };
    awaited.unwrap_or_else(is_new)
}

/// Reads a row as soon as it is what the caller waits for, or when the time limit is reached.
async fn wait(
    shared: &HttpShared,
    caller: &Caller,
    entry: &RouteEntry,
    arguments: &CallArguments,
    (held, wait_limit): (Option<&NoneMatch>, Duration),
) -> Result<Arc<Answer>, Problem> {
    let _counted = shared.quotas.waits.acquire(caller, 1)?;
    let clock = shared.house.clock();
    let deadline = clock.now().plus(bounded(shared, wait_limit));
    let mut stopping = shared.stopping.clone();
    let key = key_text(&arguments.key);
    let row = shared.wait_hub.register(&shared.house, &caller.tenant, &entry.resource, &key);
    loop {
        // Created before the read: a later write ends the wait.
        let changed = row.changed();
        let answer = shared.house.read_action(&caller.principal(), entry.action, arguments.clone()).await?;
        let left = deadline.since(clock.now());
        if is_news(entry, &arguments.input, held, &answer) || left.is_zero() || *stopping.borrow() {
            return Ok(answer);
        }
        tokio::select! {
            () = changed => {}
            () = clock.sleep(left) => {}
            _ = stopping.changed() => {}
        }
    }
}

/// A cursor as the caller gets it, bound to the tenant, the action and its filter.
pub fn sealed_cursor(shared: &HttpShared, action: &str, tenant: &Tenant, filter: &str, next: &str) -> String {
    let context = [tenant.as_str().as_bytes(), action.as_bytes(), filter.as_bytes()];
    shared.cursors.close(&context, next.as_bytes())
}

/// The filter that a cursor is bound to.
pub fn filter_of(input: &Map<String, Json>) -> String {
    let filter: Map<String, Json> = input
        .iter()
        .filter(|(name, _)| *name != CURSOR && *name != LIMIT)
        .map(|(n, v)| (n.clone(), v.clone()))
        .collect();
    Json::Object(filter).to_string()
}

pub fn open_cursor(
    shared: &HttpShared,
    action: &str,
    tenant: &Tenant,
    input: &mut Map<String, Json>,
) -> Result<(), Problem> {
    let Some(Json::String(sealed)) = input.get(CURSOR) else { return Ok(()) };
    let filter = filter_of(input);
    let context = [tenant.as_str().as_bytes(), action.as_bytes(), filter.as_bytes()];
    let opened = shared.cursors.open(&context, sealed).and_then(|content| String::from_utf8(content).ok());
    let cursor = opened.ok_or_else(|| path::at(CURSOR, "not a cursor returned by this list"))?;
    input.insert(CURSOR.into(), cursor.into());
    Ok(())
}

/// Opens the tokens of writes that a read names in `after`. Numbers are positions of another kind and are left as they are.
fn open_tokens(shared: &HttpShared, tenant: &Tenant, input: &mut Map<String, Json>) -> Result<(), Problem> {
    let Some(Json::String(sealed)) = input.get(AFTER) else { return Ok(()) };
    let context = [tenant.as_str().as_bytes(), TOKENS];
    let open = |sealed: &str| {
        shared.cursors.open(&context, sealed.trim()).and_then(|token| String::from_utf8(token).ok())
    };
    let tokens: Option<Vec<String>> = sealed.split(',').map(open).collect();
    let tokens = tokens.ok_or_else(|| path::at(AFTER, "not a token that a write returned"))?;
    input.insert(AFTER.into(), tokens.join(",").into());
    Ok(())
}

/// The token of a write as the caller gets it. Its position in the log is encrypted: it tells how much all tenants write.
pub fn sealed_token(shared: &HttpShared, tenant: &Tenant, token: &str) -> String {
    shared.cursors.close(&[tenant.as_str().as_bytes(), TOKENS], token.as_bytes())
}

fn next_link(
    shared: &HttpShared,
    entry: &RouteEntry,
    tenant: &Tenant,
    parts: &Parts,
    filter: &str,
    next: &str,
) -> Result<String, Problem> {
    let sealed = sealed_cursor(shared, &entry.name, tenant, filter, next);
    let mut query = String::new();
    for (name, value) in path::pairs(parts.uri.query())? {
        if name != CURSOR {
            query.push_str(&format!("{}={}&", path::parameter(&name), path::parameter(&value)));
        }
    }
    Ok(format!("<{}?{query}{CURSOR}={sealed}>; rel=\"next\"", parts.uri.path()))
}

async fn write(shared: &HttpShared, call: ActionCall) -> Result<Response, Problem> {
    let ActionCall { entry, key, parts, body, caller, admitted } = call;
    let tenant = caller.tenant.clone();
    let headers = &parts.headers;
    let condition = condition_in_query(parts.uri.query())?;
    let expected = conditions::expected(headers)?;
    let id = conditions::idempotency_key(headers)?;
    // Reject a concurrent request with the same key before reading its body.
    let flight = id.as_deref().map(|id| shared.in_flight_keys.begin(&tenant, id)).transpose()?;
    shared.write_rate.check(&tenant)?;
    let is_deletion = parts.method == Method::DELETE;
    let creation = shared.usage.admit(&tenant, entry.creates, is_deletion)?;
    let memory = shared.quotas.body_bytes.acquire(&caller, 0)?;
    let (clock, is_patch) = (&**shared.house.clock(), parts.method == Method::PATCH);
    let body = body::read(headers, body, shared.bounds(), clock, is_patch, memory).await?;
    let mut input = match body.json {
        None => Map::new(),
        Some(Json::Object(input)) => input,
        Some(_) => {
            let field_error = FieldError { pointer: String::new(), detail: "expected an object".into() };
            return Err(Refusal::invalid(vec![field_error]).into());
        }
    };
    add_condition(&mut input, condition, &parts.method)?;
    if input.contains_key(IF) {
        // Whether a condition holds says what the row is.
        caller.require(Access::Resource(&entry.resource))?;
    }
    let waiting = count_wait(shared, &caller, &input)?;
    let insists_on_new = conditions::none_match(headers) == Some(NoneMatch::Anything);
    let operation = Operation {
        fingerprint: id.as_ref().map_or(String::new(), |_| digest(&parts, &caller, &body.bytes)),
        id,
    };
    let arguments = CallArguments { key, input, expected };
    let request_bytes = body.bytes.len();
    let guards = (flight, body.memory, admitted, waiting);
    let answer = submit(shared, &caller, entry.action, arguments, operation, guards).await;
    let answer = answer.map_err(|refusal| {
        let exists = refusal.code == Code::AlreadyExists;
        let mut problem = Problem::from(refusal);
        if exists && insists_on_new {
            problem.status = Some(StatusCode::PRECONDITION_FAILED);
        }
        problem
    })?;
    creation.created(created_in(std::slice::from_ref(&answer)));
    // A write that changed nothing would show the row to a caller that may not read it, without a trace in the log.
    if answer.token.is_none() && !caller.may(Access::Resource(&entry.resource)) {
        let mut response = Response::new(Body::empty());
        *response.status_mut() = StatusCode::NO_CONTENT;
        return Ok(response);
    }
    let response = written(shared, &caller.tenant, &entry, &answer)?;
    shared.write_rate.charge(&tenant, request_bytes, &response);
    Ok(response)
}

/// The condition in the query of a write, which takes everything else in its body.
fn condition_in_query(query: Option<&str>) -> Result<Option<String>, Problem> {
    let mut condition = None;
    for (name, value) in path::pairs(query)? {
        if name != IF {
            return Err(path::at(&name, "this action takes its input in the body"));
        }
        condition = Some(value);
    }
    Ok(condition)
}

/// Adds the condition of the query to the input. The body of a `PUT` or `PATCH` is the row, so the condition is not a part of it.
fn add_condition(
    input: &mut Map<String, Json>,
    condition: Option<String>,
    method: &Method,
) -> Result<(), Problem> {
    let is_row = [Method::PUT, Method::PATCH].contains(method);
    match (condition, input.contains_key(IF)) {
        (_, true) if is_row => Err(path::at(IF, "give the condition as the query parameter `if`")),
        (Some(_), true) => Err(path::at(IF, "given in the query and in the body")),
        (Some(condition), false) => {
            input.insert(IF.to_owned(), condition.into());
            Ok(())
        }
        (None, _) => Ok(()),
    }
}

/// Runs a write in its turn. The guards of its key and quotas are released when its outcome is known.
pub async fn submit(
    shared: &HttpShared,
    caller: &Caller,
    action: ActionRef,
    arguments: CallArguments,
    operation: Operation,
    guards: impl Send + 'static,
) -> Result<Answer, Refusal> {
    let (house, queue, principal) = (shared.house.clone(), shared.write_queue.clone(), caller.principal());
    // An action that may wait long does not keep others from the store while it does.
    let is_queued = !is_cancelled_with_caller(shared.house.resolve(action)?.1);
    let write = async move {
        let slot = if is_queued { Some(queue.acquire(&principal.tenant).await) } else { None };
        let answer = house.call_action(&principal, action, arguments, operation).await;
        drop((slot, guards));
        answer
    };
    if is_queued { shared.pending_writes.run(write).await } else { write.await }
}

/// Digest by which a retry with the same idempotency key is distinguished from another request.
pub fn digest(parts: &Parts, caller: &Caller, body: &[u8]) -> String {
    let target = parts.uri.path_and_query().map_or("", http::uri::PathAndQuery::as_str);
    let if_match = parts.headers.get(http::header::IF_MATCH).map_or(&b""[..], HeaderValue::as_bytes);
    let owner = caller.operation_owner();
    match owner.is_empty() {
        true => fingerprint(&[parts.method.as_str().as_bytes(), target.as_bytes(), if_match, body]),
        false => fingerprint(&[parts.method.as_str().as_bytes(), target.as_bytes(), if_match, body, owner]),
    }
}

/// The path of a row.
pub fn location(resource: &str, key_text: &str) -> String {
    format!("/v1/{resource}/{}", path::segment(key_text))
}

fn written(
    shared: &HttpShared,
    tenant: &Tenant,
    entry: &RouteEntry,
    answer: &Answer,
) -> Result<Response, Problem> {
    let status = if answer.created.is_some() { StatusCode::CREATED } else { StatusCode::OK };
    let mut response = json_response(status, &answer.body);
    let headers = response.headers_mut();
    if let Some(created) = &answer.created {
        put(headers, LOCATION, &location(&entry.resource, created))?;
    }
    if let Some(version) = answer.version {
        put(headers, ETAG, &etag(version))?;
    }
    if let Some(token) = &answer.token {
        put(headers, TOKEN, &sealed_token(shared, tenant, token))?;
    }
    Ok(response)
}
