//! One action over HTTP: converts the request into a call of the house, and the answer into a response.

use std::sync::Arc;
use std::time::Duration;

use axum::body::Body;
use axum::response::Response;
use http::header::{CACHE_CONTROL, ETAG, LINK, LOCATION};
use http::request::Parts;
use http::{HeaderName, HeaderValue, Method, StatusCode};
use serde_json::{Map, Value as Json};
use statehouse::follow::{Listener, Next};
use statehouse::form::Misfit;
use statehouse::house::subject_of;
use statehouse::resource::key_text;
use statehouse::{Answer, Code, Operation, Refusal, Request};
use statehouse_store::{Record, Tenant, Value};

use super::conditions::{self, NoneMatch, etag};
use super::routes::RouteEntry;
use super::{
    PathShape, Request as HttpRequest, RequestInfo, RoutePattern, Shared, body, json_response, path,
};
use crate::auth::Scope;
use crate::config::millis;
use crate::problem::{INTERNAL, NOT_FOUND, Problem};
use crate::seal::fingerprint;

/// Token of a write. A cached read that sends it sees the write.
pub const TOKEN: HeaderName = HeaderName::from_static("statehouse-token");
/// The applied preferences.
const PREFERENCE_APPLIED: HeaderName = HeaderName::from_static("preference-applied");

/// The cursor parameter of a list. It is sealed, so this layer must know it.
const CURSOR: &str = "cursor";
/// The page size parameter of a list. It may differ from page to page.
const LIMIT: &str = "limit";

/// Log records per check for a changed row.
const RECORDS_PER_CHECK: usize = 256;

/// An authorized call.
struct ActionCall {
    entry: Arc<RouteEntry>,
    tenant: Tenant,
    key: Vec<Value>,
    parts: Parts,
    body: hyper::body::Incoming,
}

/// Handles a request for an action.
pub async fn handle(
    shared: &Shared,
    shape: PathShape,
    request: HttpRequest,
    info: &mut RequestInfo,
) -> Result<Response, Problem> {
    let (parts, body) = request.into_parts();
    let caller = shared.authenticator.authenticate(&parts.headers).await?;
    info.tenant = Some(caller.tenant.clone());
    let call = authorize(shared, &caller, shape, parts, body)?;
    info.action = Some(call.entry.name.clone());
    if call.entry.writes() { write(shared, call).await } else { read(shared, call).await }
}

/// Finds the action and the row of a request, and checks that the caller may call it.
fn authorize(
    shared: &Shared,
    caller: &crate::auth::Caller,
    shape: PathShape,
    parts: Parts,
    body: hyper::body::Incoming,
) -> Result<ActionCall, Problem> {
    let (name, key, action) = {
        let mut segments = path::segments(parts.uri.path()).skip(1);
        (segments.next(), segments.next(), segments.next())
    };
    let missing = || Problem::new(NOT_FOUND, "unknown path");
    let name = name.ok_or_else(missing)?;
    let pattern = match (shape, action) {
        (PathShape::Collection, _) => RoutePattern::Collection,
        (PathShape::Item, _) => RoutePattern::Item,
        (PathShape::ItemAction, Some(action)) => RoutePattern::ItemAction(action),
        (PathShape::ItemAction, None) => return Err(missing()),
    };
    let entry = shared.routes.find(name, pattern, &parts.method)?;
    caller.require(if entry.writes() { Scope::Write } else { Scope::Read })?;
    let key = match (shape, key) {
        (PathShape::Collection, _) | (_, None) => Vec::new(),
        (_, Some(segment)) => path::key(shared.house.resource(name)?, segment)?,
    };
    Ok(ActionCall { entry, tenant: caller.tenant.clone(), key, parts, body })
}

async fn read(shared: &Shared, call: ActionCall) -> Result<Response, Problem> {
    let ActionCall { entry, tenant, key, parts, .. } = call;
    let mut input = path::input(parts.uri.query(), &entry.action.input)?;
    open_cursor(shared, &entry, &tenant, &mut input)?;
    let held = conditions::none_match(&parts.headers);
    let wait_limit = conditions::wait_preference(&parts.headers).filter(|_| !key.is_empty());
    let filter = if key.is_empty() { filter_of(&input) } else { String::new() };
    let request = Request { action: entry.name.to_string(), key, input, expected: None };
    let answer = match (&held, wait_limit) {
        (Some(held), Some(wait_limit)) => wait(shared, &tenant, &request, held, wait_limit).await?,
        _ => shared.house.read(&tenant, request).await?,
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
    if let Some(next) = &answer.next {
        put(headers, LINK, &next_link(shared, &entry, &tenant, &parts, &filter, next)?)?;
    }
    if let Some(wait_limit) = wait_limit {
        put(headers, PREFERENCE_APPLIED, &format!("wait={}", bounded(shared, wait_limit).as_secs()))?;
    }
    Ok(response)
}

fn put(headers: &mut http::HeaderMap, name: HeaderName, content: &str) -> Result<(), Problem> {
    let content = HeaderValue::from_str(content)
        .map_err(|_| Problem::hidden(INTERNAL, format!("{name} is not a header")))?;
    headers.insert(name, content);
    Ok(())
}

fn bounded(shared: &Shared, wait_limit: Duration) -> Duration {
    wait_limit.min(millis(shared.config.limits.wait_max_ms))
}

/// Reads a row as soon as it has a version that the caller does not hold, or when the time limit is reached.
async fn wait(
    shared: &Shared,
    tenant: &Tenant,
    request: &Request,
    held: &NoneMatch,
    wait_limit: Duration,
) -> Result<Arc<Answer>, Problem> {
    let clock = shared.house.clock();
    let deadline = clock.now().plus(bounded(shared, wait_limit));
    let mut stopping = shared.stopping.clone();
    let mut listener = shared.house.tail().listen();
    let target = WaitTarget {
        tenant,
        resource: request.action.split('.').next().unwrap_or_default(),
        key: &key_text(&request.key),
    };
    loop {
        // Take the offsets before the read: a later write has a higher offset and ends the wait.
        let mut seen = listener.reached();
        let answer = shared.house.read(tenant, request.clone()).await?;
        let left = deadline.since(clock.now());
        let news = answer.version.is_none_or(|version| !held.holds(version));
        if news || left.is_zero() || *stopping.borrow() {
            return Ok(answer);
        }
        let end = clock.sleep(left);
        let mut end = std::pin::pin!(end);
        while !target.has_changed(&listener, &mut seen) {
            tokio::select! {
                () = listener.news() => {}
                () = &mut end => break,
                _ = stopping.changed() => break,
            }
        }
    }
}

/// The row a caller waits for.
struct WaitTarget<'a> {
    tenant: &'a Tenant,
    resource: &'a str,
    key: &'a str,
}

impl WaitTarget<'_> {
    /// Whether a record after these offsets may concern the row. Advances the offsets past other records.
    fn has_changed(&self, listener: &Listener, seen: &mut [u64]) -> bool {
        for (partition, seen) in seen.iter_mut().enumerate() {
            loop {
                match listener.after(partition, *seen, RECORDS_PER_CHECK) {
                    Next::Nothing => break,
                    Next::Behind => return true,
                    Next::Records(records) => {
                        if records.iter().any(|record| self.is_subject_of(record)) {
                            return true;
                        }
                        let last = records.last().and_then(|record| record.position);
                        *seen = last.map_or(u64::MAX, |position| position.offset);
                    }
                }
            }
        }
        false
    }

    fn is_subject_of(&self, record: &Record) -> bool {
        let concerns_row = |event| subject_of(record, event) == Some((self.resource, self.key));
        record.tenant == *self.tenant && record.events.iter().any(concerns_row)
    }
}

/// The filter that a cursor is bound to.
fn filter_of(input: &Map<String, Json>) -> String {
    let filter: Map<String, Json> = input
        .iter()
        .filter(|(name, _)| *name != CURSOR && *name != LIMIT)
        .map(|(n, v)| (n.clone(), v.clone()))
        .collect();
    Json::Object(filter).to_string()
}

fn open_cursor(
    shared: &Shared,
    entry: &RouteEntry,
    tenant: &Tenant,
    input: &mut Map<String, Json>,
) -> Result<(), Problem> {
    let Some(Json::String(sealed)) = input.get(CURSOR) else { return Ok(()) };
    let filter = filter_of(input);
    let context = [tenant.as_str().as_bytes(), entry.name.as_bytes(), filter.as_bytes()];
    let opened = shared.cursors.open(&context, sealed).and_then(|content| String::from_utf8(content).ok());
    let cursor = opened.ok_or_else(|| path::at(CURSOR, "not a cursor returned by this list"))?;
    input.insert(CURSOR.into(), cursor.into());
    Ok(())
}

fn next_link(
    shared: &Shared,
    entry: &RouteEntry,
    tenant: &Tenant,
    parts: &Parts,
    filter: &str,
    next: &str,
) -> Result<String, Problem> {
    let context = [tenant.as_str().as_bytes(), entry.name.as_bytes(), filter.as_bytes()];
    let sealed = shared.cursors.close(&context, next.as_bytes());
    let mut query = String::new();
    for (name, value) in path::pairs(parts.uri.query())? {
        if name != CURSOR {
            query.push_str(&format!("{}={}&", path::parameter(&name), path::parameter(&value)));
        }
    }
    Ok(format!("<{}?{query}{CURSOR}={sealed}>; rel=\"next\"", parts.uri.path()))
}

async fn write(shared: &Shared, call: ActionCall) -> Result<Response, Problem> {
    let ActionCall { entry, tenant, key, parts, body } = call;
    let headers = &parts.headers;
    if let Some((name, _)) = path::pairs(parts.uri.query())?.first() {
        return Err(path::at(name, "this action takes its input in the body"));
    }
    let expected = conditions::expected(headers)?;
    let id = conditions::idempotency_key(headers)?;
    // Reject a concurrent request with the same key before reading its body.
    let flight = id.as_deref().map(|id| shared.in_flight_keys.begin(&tenant, id)).transpose()?;
    let body = body::read(headers, body, shared.bounds(), &**shared.house.clock()).await?;
    let input = match body::json(headers, &body, parts.method == Method::PATCH)? {
        None => Map::new(),
        Some(Json::Object(input)) => input,
        Some(_) => {
            let misfit = Misfit { pointer: String::new(), detail: "expected an object".into() };
            return Err(Refusal::misfits(vec![misfit]).into());
        }
    };
    let insists_on_new = conditions::none_match(headers) == Some(NoneMatch::Anything);
    let operation =
        Operation { fingerprint: id.as_ref().map_or(String::new(), |_| digest(&parts, &body)), id };
    let request = Request { action: entry.name.to_string(), key, input, expected };
    let house = shared.house.clone();
    let write = async move {
        let answer = house.call(&tenant, request, operation).await;
        // Release the key only when the outcome is known.
        drop(flight);
        answer
    };
    let answer =
        if entry.is_cancelled_with_caller() { write.await } else { shared.pending_writes.run(write).await };
    let answer = answer.map_err(|refusal| {
        let exists = refusal.code == Code::AlreadyExists;
        let mut problem = Problem::from(refusal);
        if exists && insists_on_new {
            problem.status = Some(StatusCode::PRECONDITION_FAILED);
        }
        problem
    })?;
    written(&entry, &answer)
}

/// Digest by which a retry with the same idempotency key is distinguished from another request.
pub fn digest(parts: &Parts, body: &[u8]) -> String {
    let target = parts.uri.path_and_query().map_or("", http::uri::PathAndQuery::as_str);
    let if_match = parts.headers.get(http::header::IF_MATCH).map_or(&b""[..], HeaderValue::as_bytes);
    fingerprint(&[parts.method.as_str().as_bytes(), target.as_bytes(), if_match, body])
}

/// The path of a row.
pub fn location(action: &str, key_text: &str) -> String {
    let resource = action.split('.').next().unwrap_or_default();
    format!("/v1/{resource}/{}", path::segment(key_text))
}

fn written(entry: &RouteEntry, answer: &Answer) -> Result<Response, Problem> {
    let status = if answer.created.is_some() { StatusCode::CREATED } else { StatusCode::OK };
    let mut response = json_response(status, &answer.body);
    let headers = response.headers_mut();
    if let Some(created) = &answer.created {
        put(headers, LOCATION, &location(&entry.name, created))?;
    }
    if let Some(version) = answer.version {
        put(headers, ETAG, &etag(version))?;
    }
    if let Some(token) = &answer.token {
        put(headers, TOKEN, token)?;
    }
    Ok(response)
}
