//! The HTTP layer: a common entry point for every request, and handlers generated from the actions of the house.
//!
//! The entry point assigns request ids, enforces header limits, catches panics, writes problem documents, counts and logs.
//! In every case the client gets a response with a code, and the log gets one line without bodies, row keys or secrets.
//! A handler returns a response or a [`Problem`].
//!
//! There is no general router: a match distinguishes eight fixed paths and four patterns, and paths below `/v1` are
//! looked up in the table of actions ([`routes`]). A general router would cost each request more than a cached read.

pub(crate) mod batch;
pub(crate) mod body;
pub(crate) mod call;
pub(crate) mod conditions;
mod context;
mod in_flight;
mod inbound;
pub(crate) mod path;
mod pending_writes;
mod routes;
pub(crate) mod strict;

use std::convert::Infallible;
use std::panic::AssertUnwindSafe;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use axum::body::Body;
use axum::response::{IntoResponse, Response};
use bytes::Bytes;
use futures_util::FutureExt as _;
use http::header::{
    ACCEPT_ENCODING, CACHE_CONTROL, CONTENT_LENGTH, CONTENT_TYPE, VARY, X_CONTENT_TYPE_OPTIONS,
};
use http::{HeaderMap, HeaderValue, Method, StatusCode};
use http_body::Body as _;
use hyper::body::Incoming;
use statehouse::House;
use statehouse_store::clock::Stopwatch;
use statehouse_store::{Migrate, Tenant};
use tokio::sync::{Semaphore, watch};
use tower::{Layer as _, ServiceExt as _};
use tower_http::compression::CompressionLayer;
use tower_http::compression::predicate::{NotForContentType, Predicate as _, SizeAbove};

use crate::auth::networks::PeerAddress;
use crate::auth::{Access, Authenticator, open_mode, secret};
use crate::config::{Config, millis};
use crate::console::ConsoleState;
use crate::engine_clock::EngineClock;
use crate::fair_queue::FairQueue;
use crate::metrics::{GaugeGuard, Metrics};
use crate::problem::{self, HEADERS_TOO_LARGE, INTERNAL, NOT_FOUND, Problem, SCHEMA_MISMATCH, UNAVAILABLE};
use crate::quota::Quotas;
use crate::seal::CursorSeal;
use crate::unsent::{ConnectionUnsent, UnsentBytes};
use crate::usage::TenantUsage;
use crate::wait_hub::WaitHub;
use crate::write_rate::WriteRate;
use crate::{audit, console, cors, events, openapi};
pub(crate) use context::Context;
use in_flight::InFlightKeys;
pub(crate) use path::pairs as query_pairs;
pub(crate) use pending_writes::PendingWrites;
pub(crate) use routes::ActionPath;
use routes::Routes;

/// Minimum size of a response to be compressed.
const COMPRESS_ABOVE_BYTES: u64 = 1024;

/// Smaller responses are not counted as unsent: the limit of concurrent streams bounds them.
const COUNTED_BYTES_MIN: usize = 4096;

/// State shared by all requests.
pub(crate) struct HttpShared {
    pub house: Arc<House>,
    pub config: Config,
    pub authenticator: Authenticator,
    /// Seals cursors of lists and of the log.
    pub cursors: CursorSeal,
    pub metrics: Arc<Metrics>,
    /// True once the server is stopping.
    pub stopping: watch::Receiver<bool>,
    /// One permit for each event stream that may still be opened.
    pub streams: Arc<Semaphore>,
    /// Bytes of responses that clients have not accepted.
    pub unsent: Arc<UnsentBytes>,
    /// Limits per tenant and per key.
    pub quotas: Quotas,
    /// Limit of the bytes that a tenant writes.
    pub write_rate: WriteRate,
    /// Limits of what a tenant has in the store.
    pub usage: TenantUsage,
    /// Lets the writes of tenants take turns.
    pub write_queue: FairQueue,
    /// The time by which deadlines are judged.
    pub engine_clock: EngineClock,
    /// Wakes reads that wait for a row.
    pub wait_hub: WaitHub,
    /// Writes in progress, with or without their clients.
    pub pending_writes: PendingWrites,
    /// Idempotency keys of writes in progress.
    pub in_flight_keys: InFlightKeys,
    /// What the console has beside the house.
    pub console: ConsoleState,
    /// Whether a request found tables of another blueprint, and no probe has found the right ones since.
    has_mismatch: AtomicBool,
    /// Whether a write found the store unavailable, and no write has succeeded since.
    has_write_failure: AtomicBool,
    /// The failures of workers after which the store was found to accept writes.
    worker_failures_seen: AtomicU64,
    routes: Routes,
    openapi: Bytes,
}

impl HttpShared {
    pub fn new(
        house: Arc<House>,
        config: Config,
        authenticator: Authenticator,
        cursors: CursorSeal,
        console: ConsoleState,
        metrics: Arc<Metrics>,
        stopping: watch::Receiver<bool>,
    ) -> HttpShared {
        HttpShared {
            has_mismatch: AtomicBool::new(false),
            has_write_failure: AtomicBool::new(false),
            worker_failures_seen: AtomicU64::new(0),
            routes: Routes::of(&house),
            openapi: openapi::document(&house).to_string().into(),
            streams: Arc::new(Semaphore::new(config.limits.streams)),
            unsent: Arc::new(UnsentBytes::new(&config.limits)),
            quotas: Quotas::new(&config.limits),
            write_rate: WriteRate::new(config.limits.tenant_write_bytes_per_minute, house.clock().clone()),
            usage: TenantUsage::new(&house, &config.limits),
            write_queue: FairQueue::new(
                config.limits.concurrent_writes,
                config.limits.tenant_concurrent_writes,
                house.clock().clone(),
            ),
            engine_clock: EngineClock::default(),
            wait_hub: WaitHub::new(metrics.clone(), stopping.clone()),
            in_flight_keys: InFlightKeys::default(),
            console,
            pending_writes: PendingWrites::default(),
            house,
            config,
            authenticator,
            cursors,
            metrics,
            stopping,
        }
    }

    /// Limits of a body.
    pub fn bounds(&self) -> body::Bounds {
        let limits = &self.config.limits;
        body::Bounds { bytes: limits.body_bytes, time: millis(limits.body_timeout_ms) }
    }
}

/// An incoming request.
pub(crate) type HttpRequest = http::Request<Incoming>;

/// Facts about a request for log and metrics.
#[derive(Debug)]
pub(crate) struct RequestInfo {
    pub context: Context,
    /// The called action.
    pub action: Option<Arc<str>>,
    /// The caller's tenant.
    pub tenant: Option<Tenant>,
}

/// Handles every request.
pub(crate) async fn handle_request(
    shared: Arc<HttpShared>,
    request: HttpRequest,
    connection: &ConnectionUnsent,
) -> Response {
    let stopwatch = Stopwatch::start();
    let _counted = GaugeGuard::enter(&shared.metrics, |metrics| &metrics.in_flight);
    let context = Context::of(request.headers(), shared.house.ids());
    let mut info = RequestInfo { context, action: None, tenant: None };
    let (method, uri) = (request.method().clone(), request.uri().clone());
    let origin = request.headers().get(http::header::ORIGIN).cloned();
    let accepted = request.headers().get(ACCEPT_ENCODING).cloned();
    let answered = match check_limits(&shared, &request) {
        Ok(None) => {
            let answered = AssertUnwindSafe(dispatch(&shared, request, &mut info)).catch_unwind().await;
            answered.unwrap_or_else(|panic| Err(Problem::hidden(INTERNAL, panic_text(&*panic))))
        }
        Ok(Some(response)) => Ok(response),
        Err(problem) => Err(problem),
    };
    let answered = answered.and_then(|response| count_unsent(&shared, connection, &method, &info, response));
    if matches!(&answered, Err(problem) if problem.kind.code == SCHEMA_MISMATCH.code) {
        shared.has_mismatch.store(true, Ordering::Relaxed);
    }
    note_write(&shared, &method, &answered);
    let (mut response, problem) = match answered {
        Ok(response) => (compress(accepted, response).await, None),
        Err(problem) => (problem_response(&problem, uri.path(), &info.context), Some(problem)),
    };
    if method == Method::HEAD {
        strip_body(&mut response);
    }
    finish_headers(
        response.headers_mut(),
        &info.context,
        uri.path().starts_with("/v1/") || inbound::is_path(uri.path()),
    );
    cors::allow(&shared.config.cors_origins, origin.as_ref(), response.headers_mut());
    record_request(&shared, &method, uri.path(), &info, response.status(), problem.as_ref(), stopwatch);
    response
}

/// Remembers whether the store accepts writes, for `/readyz`.
fn note_write(shared: &HttpShared, method: &Method, answered: &Result<Response, Problem>) {
    if matches!(*method, Method::GET | Method::HEAD) {
        return;
    }
    match answered {
        Err(problem) if problem.kind == UNAVAILABLE => {
            shared.has_write_failure.store(true, Ordering::Relaxed);
        }
        Err(_) => {}
        Ok(_) => shared.has_write_failure.store(false, Ordering::Relaxed),
    }
}

/// Counts the bytes of a response as unsent until the client has accepted them. A read that exceeds a bound gets a problem.
fn count_unsent(
    shared: &HttpShared,
    connection: &ConnectionUnsent,
    method: &Method,
    info: &RequestInfo,
    mut response: Response,
) -> Result<Response, Problem> {
    let bytes = usize::try_from(response.body().size_hint().lower()).unwrap_or(usize::MAX);
    if bytes < COUNTED_BYTES_MIN || method == Method::HEAD {
        return Ok(response);
    }
    let refuse = method == Method::GET;
    let guard = shared.unsent.reserve(connection, info.tenant.as_ref(), bytes, refuse)?;
    response.extensions_mut().insert(Arc::new(guard));
    Ok(response)
}

/// Selects the handler of a path.
async fn dispatch(
    shared: &Arc<HttpShared>,
    request: HttpRequest,
    info: &mut RequestInfo,
) -> Result<Response, Problem> {
    match request.uri().path() {
        "/healthz" => health(shared, &request).await,
        "/livez" => live(&request),
        "/readyz" => ready(shared, &request).await,
        "/metrics" => metrics(shared, &request).await,
        "/openapi.json" => document(shared, &request).await,
        audit::PATH => audit::handle(shared, request, info).await,
        "/v1/batch" => batch::handle(shared, request, info).await,
        "/v1/events" => events::handle(shared, request, info).await,
        path if inbound::is_path(path) => inbound::handle(shared, request, info).await,
        path if console::is_console_path(path) => console::handle(shared, request, info).await,
        path if ActionPath::parse(path).is_some() => call::handle(shared, request, info).await,
        _ => problem_page(&request),
    }
}

/// Compresses a response if it is large enough and the client accepts gzip.
async fn compress(accepted: Option<HeaderValue>, mut response: Response) -> Response {
    if response.body().size_hint().lower() < COMPRESS_ABOVE_BYTES {
        return response;
    }
    let Some(accepted) = accepted else {
        response.headers_mut().append(VARY, HeaderValue::from_static("accept-encoding"));
        return response;
    };
    let compression = CompressionLayer::new()
        .gzip(true)
        .compress_when(SizeAbove::new(COMPRESS_ABOVE_BYTES).and(NotForContentType::SSE));
    let mut asked = http::Request::new(Body::empty());
    asked.headers_mut().insert(ACCEPT_ENCODING, accepted);
    let mut response = Some(response);
    let service = tower::service_fn(move |_| {
        let response = response.take().unwrap_or_default();
        async { Ok::<_, Infallible>(response) }
    });
    match compression.layer(service).oneshot(asked).await {
        Ok(response) => response.map(Body::new),
        Err(never) => match never {},
    }
}

/// Removes the body of a response to HEAD and keeps its headers.
fn strip_body(response: &mut Response) {
    if let Some(length) = response.body().size_hint().exact() {
        response.headers_mut().entry(CONTENT_LENGTH).or_insert(length.into());
    }
    *response.body_mut() = Body::empty();
}

/// Checks header limits and origin, and answers preflight requests.
fn check_limits(shared: &HttpShared, request: &HttpRequest) -> Result<Option<Response>, Problem> {
    let limits = &shared.config.limits;
    let headers = request.headers();
    let bytes: usize = headers.iter().map(|(name, value)| name.as_str().len() + value.len() + 4).sum();
    let uri_bytes = request.uri().path_and_query().map_or(0, |uri| uri.as_str().len());
    if headers.len() > limits.headers || bytes + uri_bytes > limits.header_bytes {
        let detail = format!(
            "a request may have {} headers and {} bytes of headers and path",
            limits.headers, limits.header_bytes
        );
        return Err(Problem::new(HEADERS_TOO_LARGE, detail));
    }
    if let Some(response) = cors::preflight(&shared.config.cors_origins, request.method(), headers) {
        return Ok(Some(response));
    }
    if shared.authenticator.is_open() {
        open_mode::check(headers, request.uri(), &shared.config.cors_origins)?;
    }
    Ok(None)
}

fn panic_text(panic: &(dyn std::any::Any + Send)) -> String {
    let text = panic.downcast_ref::<&str>().map(|text| (*text).to_owned());
    let text = text.or_else(|| panic.downcast_ref::<String>().cloned());
    format!("panicked: {}", text.unwrap_or_default())
}

fn problem_response(problem: &Problem, instance: &str, context: &Context) -> Response {
    let document = problem.document(instance, &context.request_id, &context.trace_id());
    let mut response = json_response(problem.status(), &document);
    let headers = response.headers_mut();
    headers.insert(CONTENT_TYPE, HeaderValue::from_static("application/problem+json"));
    for (name, value) in &problem.headers {
        headers.insert(name.clone(), value.clone());
    }
    response
}

fn finish_headers(headers: &mut HeaderMap, context: &Context, of_tenant: bool) {
    if let Ok(id) = HeaderValue::from_str(&context.request_id) {
        headers.insert(context::REQUEST_ID, id);
    }
    headers.insert(X_CONTENT_TYPE_OPTIONS, HeaderValue::from_static("nosniff"));
    if of_tenant {
        headers.entry(CACHE_CONTROL).or_insert(HeaderValue::from_static("no-store"));
        // One URL has different content for different callers, possibly with the same version.
        headers.append(VARY, HeaderValue::from_static("authorization, statehouse-tenant"));
    }
}

fn record_request(
    shared: &HttpShared,
    method: &Method,
    path: &str,
    info: &RequestInfo,
    status: StatusCode,
    problem: Option<&Problem>,
    stopwatch: Stopwatch,
) {
    let RequestInfo { context, action, tenant } = info;
    let route = action.as_deref().unwrap_or_else(|| pattern(path));
    let (status, took) = (status.as_u16(), stopwatch.elapsed());
    let code = problem.map(|problem| problem.kind.code);
    shared.metrics.answered(route, status, code, took);
    let tenant = tenant.as_ref().map_or("", Tenant::as_str);
    let micros = u64::try_from(took.as_micros()).unwrap_or(u64::MAX);
    let (method, request_id, trace_id) =
        (method.as_str(), context.request_id.as_str(), context.other_trace());
    let parent_id = context.parent_id.as_deref().unwrap_or_default();
    let code = code.unwrap_or_default();
    match problem.and_then(|problem| problem.cause.as_deref()) {
        Some(cause) => tracing::error!(
            target: "statehouse::http",
            method, route, status, code, cause, micros, tenant, request_id, trace_id, parent_id, "failed"
        ),
        None => tracing::info!(
            target: "statehouse::http",
            method, route, status, code, micros, tenant, request_id, trace_id, parent_id, "answered"
        ),
    }
}

/// The pattern of a path without an action. The number of paths is unbounded, the number of patterns is not.
fn pattern(path: &str) -> &'static str {
    match path {
        "/healthz" => "/healthz",
        "/livez" => "/livez",
        "/readyz" => "/readyz",
        "/metrics" => "/metrics",
        "/openapi.json" => "/openapi.json",
        audit::PATH => audit::PATH,
        "/v1/batch" => "/v1/batch",
        "/v1/events" => "/v1/events",
        _ if console::is_console_path(path) => console::pattern(path),
        _ if path.starts_with("/problems/") => "/problems/{code}",
        _ => "unmatched",
    }
}

/// Requires GET or HEAD.
pub(crate) fn only_get(method: &Method) -> Result<(), Problem> {
    if method == Method::GET || method == Method::HEAD {
        return Ok(());
    }
    Err(Problem::method_not_allowed(&["GET", "HEAD"]))
}

fn plain(text: &'static str) -> Response {
    ([(CONTENT_TYPE, "text/plain; charset=utf-8"), (CACHE_CONTROL, "no-store")], text).into_response()
}

/// `/livez`: the process responds.
fn live(request: &HttpRequest) -> Result<Response, Problem> {
    only_get(request.method())?;
    Ok(plain("ok\n"))
}

/// `/healthz`: the process and the store respond.
async fn health(shared: &HttpShared, request: &HttpRequest) -> Result<Response, Problem> {
    only_get(request.method())?;
    check_store(shared).await?;
    Ok(plain("ok\n"))
}

/// `/readyz`: the store responds and accepts writes, and the server is not stopping.
async fn ready(shared: &HttpShared, request: &HttpRequest) -> Result<Response, Problem> {
    only_get(request.method())?;
    if *shared.stopping.borrow() {
        return Err(Problem::new(UNAVAILABLE, "the server is stopping"));
    }
    check_store(shared).await?;
    check_writes(shared).await?;
    check_schema(shared).await?;
    Ok(plain("ok\n"))
}

/// After a request found tables of another blueprint: checks whether they are right now.
async fn check_schema(shared: &HttpShared) -> Result<(), Problem> {
    if !shared.has_mismatch.load(Ordering::Relaxed) {
        return Ok(());
    }
    let missing = match shared.house.migrate(Migrate::Show).await {
        // Additional tables in the store are harmless.
        Ok(changes) => changes.into_iter().find(|change| !change.loses_data()),
        Err(error) => return Err(Problem::mismatch(error.to_string())),
    };
    match missing {
        Some(change) => Err(Problem::mismatch(change.to_string())),
        None => {
            shared.has_mismatch.store(false, Ordering::Relaxed);
            Ok(())
        }
    }
}

/// After a write of a request or of a worker failed because the store was unavailable, for example because its disk is full:
/// checks whether it accepts writes now. A store may answer reads all the while.
async fn check_writes(shared: &HttpShared) -> Result<(), Problem> {
    let worker_failures = shared.house.worker_store_failures();
    let is_news = worker_failures != shared.worker_failures_seen.load(Ordering::Relaxed);
    if !is_news && !shared.has_write_failure.load(Ordering::Relaxed) {
        return Ok(());
    }
    let timeout = millis(shared.config.limits.header_timeout_ms);
    let written = tokio::select! {
        written = secret::write_probe(&shared.house) => written.map_err(|error| error.to_string()),
        () = shared.house.clock().sleep(timeout) => Err("the store did not accept a write in time".to_owned()),
    };
    written.map_err(|cause| Problem::hidden(UNAVAILABLE, cause))?;
    shared.has_write_failure.store(false, Ordering::Relaxed);
    shared.worker_failures_seen.store(worker_failures, Ordering::Relaxed);
    Ok(())
}

async fn check_store(shared: &HttpShared) -> Result<(), Problem> {
    let read = shared.house.store().read_log(0, 0, 1);
    let timeout = millis(shared.config.limits.header_timeout_ms);
    let answered = tokio::select! {
        answered = read => answered.map(drop).map_err(|error| error.to_string()),
        () = shared.house.clock().sleep(timeout) => Err("the store did not respond in time".to_owned()),
    };
    answered.map_err(|cause| Problem::hidden(UNAVAILABLE, cause))
}

async fn metrics(shared: &HttpShared, request: &HttpRequest) -> Result<Response, Problem> {
    only_get(request.method())?;
    if !shared.config.open_metrics {
        shared
            .authenticator
            .authenticate(request.headers(), PeerAddress::of(request.extensions()))
            .await?
            .require(Access::Operator)?;
    }
    let text = shared.metrics.text(&shared.house);
    Ok(([(CONTENT_TYPE, "text/plain; version=0.0.4; charset=utf-8")], text).into_response())
}

async fn document(shared: &HttpShared, request: &HttpRequest) -> Result<Response, Problem> {
    only_get(request.method())?;
    if !shared.config.open_openapi {
        shared.authenticator.authenticate(request.headers(), PeerAddress::of(request.extensions())).await?;
    }
    Ok(([(CONTENT_TYPE, "application/json")], shared.openapi.clone()).into_response())
}

/// The page of a problem code, or 404 for every other path.
fn problem_page(request: &HttpRequest) -> Result<Response, Problem> {
    let code = request.uri().path().strip_prefix("/problems/").filter(|code| !code.contains('/'));
    let code = code.ok_or_else(|| Problem::new(NOT_FOUND, "unknown path"))?;
    only_get(request.method())?;
    problem::page(code).ok_or_else(|| Problem::new(NOT_FOUND, "unknown problem code"))
}

/// A JSON response.
pub(crate) fn json_response(status: StatusCode, body: &serde_json::Value) -> Response {
    // Serialization of a JSON value cannot fail.
    let mut response = Response::new(Body::from(serde_json::to_vec(body).unwrap_or_default()));
    *response.status_mut() = status;
    response.headers_mut().insert(CONTENT_TYPE, HeaderValue::from_static("application/json"));
    response
}
