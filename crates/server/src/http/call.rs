//! One action over HTTP: the request becomes a call of the house, and its answer a response.

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
use super::routes::Served;
use super::{Named, Place, Request as HttpRequest, Shared, Visit, body, json_response, path};
use crate::auth::Scope;
use crate::config::millis;
use crate::problem::{INTERNAL, NOT_FOUND, Problem};
use crate::seal::fingerprint;

/// What a cached read has to bring along to see this write.
pub const TOKEN: HeaderName = HeaderName::from_static("statehouse-token");
/// Which of the caller's preferences were taken into account.
const PREFERENCE_APPLIED: HeaderName = HeaderName::from_static("preference-applied");

/// The parameter of a list that says where to go on. It is sealed, so it is the one parameter this surface knows.
const CURSOR: &str = "cursor";
/// The parameter of a list that may change from page to page.
const LIMIT: &str = "limit";

/// Records that are looked at in one go for a row that a caller waits for.
const LOOKED_AT: usize = 256;

/// A call that is ready.
struct Incoming {
    served: Arc<Served>,
    tenant: Tenant,
    key: Vec<Value>,
    parts: Parts,
    body: hyper::body::Incoming,
}

/// Answers a request for an action.
pub async fn handle(
    shared: &Shared,
    place: Place,
    request: HttpRequest,
    visit: &mut Visit,
) -> Result<Response, Problem> {
    let (parts, body) = request.into_parts();
    let caller = shared.gate.admit(&parts.headers).await?;
    visit.tenant = Some(caller.tenant.clone());
    let incoming = admit(shared, &caller, place, parts, body)?;
    visit.action = Some(incoming.served.name.clone());
    if incoming.served.writes() { write(shared, incoming).await } else { read(shared, incoming).await }
}

/// Finds the action and the row that a request names, and whether the caller may call it.
fn admit(
    shared: &Shared,
    caller: &crate::auth::Caller,
    place: Place,
    parts: Parts,
    body: hyper::body::Incoming,
) -> Result<Incoming, Problem> {
    let (name, key, action) = {
        let mut segments = path::segments(parts.uri.path()).skip(1);
        (segments.next(), segments.next(), segments.next())
    };
    let missing = || Problem::new(NOT_FOUND, "nothing has this path");
    let name = name.ok_or_else(missing)?;
    let named = match (place, action) {
        (Place::Collection, _) => Named::Collection,
        (Place::Item, _) => Named::Item,
        (Place::ItemAction, Some(action)) => Named::ItemAction(action),
        (Place::ItemAction, None) => return Err(missing()),
    };
    let served = shared.routes.find(name, named, &parts.method)?;
    caller.require(if served.writes() { Scope::Write } else { Scope::Read })?;
    let key = match (place, key) {
        (Place::Collection, _) | (_, None) => Vec::new(),
        (_, Some(segment)) => path::key(shared.house.resource(name)?, segment)?,
    };
    Ok(Incoming { served, tenant: caller.tenant.clone(), key, parts, body })
}

async fn read(shared: &Shared, incoming: Incoming) -> Result<Response, Problem> {
    let Incoming { served, tenant, key, parts, .. } = incoming;
    let mut input = path::input(parts.uri.query(), &served.action.input)?;
    open_cursor(shared, &served, &tenant, &mut input)?;
    let held = conditions::none_match(&parts.headers);
    let patience = conditions::patience(&parts.headers).filter(|_| !key.is_empty());
    let filter = if key.is_empty() { filter_of(&input) } else { String::new() };
    let request = Request { action: served.name.to_string(), key, input, expected: None };
    let answer = match (&held, patience) {
        (Some(held), Some(patience)) => wait(shared, &tenant, &request, held, patience).await?,
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
        put(headers, LINK, &next_link(shared, &served, &tenant, &parts, &filter, next)?)?;
    }
    if let Some(patience) = patience {
        put(headers, PREFERENCE_APPLIED, &format!("wait={}", bounded(shared, patience).as_secs()))?;
    }
    Ok(response)
}

fn put(headers: &mut http::HeaderMap, name: HeaderName, content: &str) -> Result<(), Problem> {
    let content = HeaderValue::from_str(content)
        .map_err(|_| Problem::hidden(INTERNAL, format!("{name} is not a header")))?;
    headers.insert(name, content);
    Ok(())
}

fn bounded(shared: &Shared, patience: Duration) -> Duration {
    patience.min(millis(shared.config.limits.wait_max_ms))
}

/// Reads a row as soon as it is at a version that the caller does not hold, or when the caller's patience ends.
async fn wait(
    shared: &Shared,
    tenant: &Tenant,
    request: &Request,
    held: &NoneMatch,
    patience: Duration,
) -> Result<Arc<Answer>, Problem> {
    let clock = shared.house.clock();
    let deadline = clock.now().plus(bounded(shared, patience));
    let mut stopping = shared.stopping.clone();
    let mut listener = shared.house.tail().listen();
    let about = About {
        tenant,
        resource: request.action.split('.').next().unwrap_or_default(),
        key: &key_text(&request.key),
    };
    loop {
        // The places are taken before the read: what is written after it lies above them and ends the wait.
        let mut seen = listener.reached();
        let answer = shared.house.read(tenant, request.clone()).await?;
        let left = deadline.since(clock.now());
        let news = answer.version.is_none_or(|version| !held.holds(version));
        if news || left.is_zero() || *stopping.borrow() {
            return Ok(answer);
        }
        let end = clock.sleep(left);
        let mut end = std::pin::pin!(end);
        while !about.is_in(&listener, &mut seen) {
            tokio::select! {
                () = listener.news() => {}
                () = &mut end => break,
                _ = stopping.changed() => break,
            }
        }
    }
}

/// A row that somebody waits for.
struct About<'a> {
    tenant: &'a Tenant,
    resource: &'a str,
    key: &'a str,
}

impl About<'_> {
    /// Whether a record after these places may be about the row. Moves the places past those that are not.
    fn is_in(&self, listener: &Listener, seen: &mut [u64]) -> bool {
        for (partition, seen) in seen.iter_mut().enumerate() {
            loop {
                match listener.after(partition, *seen, LOOKED_AT) {
                    Next::Nothing => break,
                    Next::Behind => return true,
                    Next::Records(records) => {
                        if records.iter().any(|record| self.is_told_by(record)) {
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

    fn is_told_by(&self, record: &Record) -> bool {
        let told = |event| subject_of(record, event) == Some((self.resource, self.key));
        record.tenant == *self.tenant && record.events.iter().any(told)
    }
}

/// What a cursor is bound to: who asks, for what, with which filter.
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
    served: &Served,
    tenant: &Tenant,
    input: &mut Map<String, Json>,
) -> Result<(), Problem> {
    let Some(Json::String(sealed)) = input.get(CURSOR) else { return Ok(()) };
    let filter = filter_of(input);
    let context = [tenant.as_str().as_bytes(), served.name.as_bytes(), filter.as_bytes()];
    let opened = shared.cursors.open(&context, sealed).and_then(|content| String::from_utf8(content).ok());
    let cursor = opened.ok_or_else(|| path::at(CURSOR, "it is not a cursor that this list returned"))?;
    input.insert(CURSOR.into(), cursor.into());
    Ok(())
}

fn next_link(
    shared: &Shared,
    served: &Served,
    tenant: &Tenant,
    parts: &Parts,
    filter: &str,
    next: &str,
) -> Result<String, Problem> {
    let context = [tenant.as_str().as_bytes(), served.name.as_bytes(), filter.as_bytes()];
    let sealed = shared.cursors.close(&context, next.as_bytes());
    let mut query = String::new();
    for (name, value) in path::pairs(parts.uri.query())? {
        if name != CURSOR {
            query.push_str(&format!("{}={}&", path::parameter(&name), path::parameter(&value)));
        }
    }
    Ok(format!("<{}?{query}{CURSOR}={sealed}>; rel=\"next\"", parts.uri.path()))
}

async fn write(shared: &Shared, incoming: Incoming) -> Result<Response, Problem> {
    let Incoming { served, tenant, key, parts, body } = incoming;
    let headers = &parts.headers;
    if let Some((name, _)) = path::pairs(parts.uri.query())?.first() {
        return Err(path::at(name, "this action takes its input in the body"));
    }
    let expected = conditions::expected(headers)?;
    let id = conditions::idempotency_key(headers)?;
    // A second request with the key is turned away before its body is read.
    let flight = id.as_deref().map(|id| shared.flights.begin(&tenant, id)).transpose()?;
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
    let request = Request { action: served.name.to_string(), key, input, expected };
    let house = shared.house.clone();
    let write = async move {
        let answer = house.call(&tenant, request, operation).await;
        // Only what has come to its end may be begun again.
        drop(flight);
        answer
    };
    let answer = if served.ends_with_its_caller() { write.await } else { shared.writes.run(write).await };
    let answer = answer.map_err(|refusal| {
        let exists = refusal.code == Code::AlreadyExists;
        let mut problem = Problem::from(refusal);
        if exists && insists_on_new {
            problem.status = Some(StatusCode::PRECONDITION_FAILED);
        }
        problem
    })?;
    written(&served, &answer)
}

/// By what a repetition under the same key is told from another request.
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

fn written(served: &Served, answer: &Answer) -> Result<Response, Problem> {
    let status = if answer.created.is_some() { StatusCode::CREATED } else { StatusCode::OK };
    let mut response = json_response(status, &answer.body);
    let headers = response.headers_mut();
    if let Some(created) = &answer.created {
        put(headers, LOCATION, &location(&served.name, created))?;
    }
    if let Some(version) = answer.version {
        put(headers, ETAG, &etag(version))?;
    }
    if let Some(token) = &answer.token {
        put(headers, TOKEN, token)?;
    }
    Ok(response)
}
