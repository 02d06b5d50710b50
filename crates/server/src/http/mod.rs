//! The HTTP surface: a front door that every request passes, and behind it rooms that are made from the house's actions.
//!
//! The front door gives each request its ids, turns floods of headers away, catches panics, writes problems out, counts
//! and logs. Whatever happens behind it, a client gets an answer with a code, and the log gets one line without bodies,
//! keys of rows or secrets. Behind it a handler either returns a response or a [`Problem`].
//!
//! There is no router: seven fixed paths and three patterns are told apart by a look at the path, and what is below
//! `/v1` is looked up in the table of the house's actions ([`routes`]). A general one would cost every request more than
//! a cached read does.

mod batch;
mod body;
mod call;
mod conditions;
mod context;
mod flight;
mod path;
mod routes;
pub(crate) mod strict;
mod writes;

use std::convert::Infallible;
use std::panic::AssertUnwindSafe;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

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

use crate::auth::{Gate, Scope};
use crate::config::{Config, millis};
use crate::metrics::{Gauged, Metrics};
use crate::problem::{self, HEADERS_TOO_LARGE, INTERNAL, NOT_FOUND, Problem, SCHEMA_MISMATCH, UNAVAILABLE};
use crate::seal::Seal;
use crate::{cors, events, openapi};
pub(crate) use context::Context;
use flight::Flights;
pub(crate) use path::pairs as query_pairs;
use routes::{Named, Routes};
pub(crate) use writes::Writes;

/// Smaller answers are not worth compressing.
const COMPRESS_ABOVE_BYTES: u64 = 1024;

/// What all requests share.
pub(crate) struct Shared {
    pub house: Arc<House>,
    pub config: Config,
    pub gate: Gate,
    /// Seals cursors of lists and of the log.
    pub cursors: Seal,
    pub metrics: Arc<Metrics>,
    /// Becomes true when the server begins to stop.
    pub stopping: watch::Receiver<bool>,
    /// One permit for each event stream that may still be opened.
    pub streams: Arc<Semaphore>,
    /// Writes under way, with or without their clients.
    pub writes: Writes,
    /// Whether a request met tables that are not those of the house, and no probe has found them in order since.
    has_mismatch: AtomicBool,
    routes: Routes,
    flights: Flights,
    openapi: Bytes,
}

impl Shared {
    pub fn new(
        house: Arc<House>,
        config: Config,
        gate: Gate,
        cursors: Seal,
        metrics: Arc<Metrics>,
        stopping: watch::Receiver<bool>,
    ) -> Shared {
        Shared {
            has_mismatch: AtomicBool::new(false),
            routes: Routes::of(&house),
            openapi: openapi::document(&house).to_string().into(),
            streams: Arc::new(Semaphore::new(config.limits.streams)),
            flights: Flights::default(),
            writes: Writes::default(),
            house,
            config,
            gate,
            cursors,
            metrics,
            stopping,
        }
    }

    /// What a body may take.
    fn bounds(&self) -> body::Bounds {
        let limits = &self.config.limits;
        body::Bounds { bytes: limits.body_bytes, time: millis(limits.body_timeout_ms) }
    }
}

/// A request as it comes in.
pub(crate) type Request = http::Request<Incoming>;

/// What is learned about a request on its way, for the log and the counters.
#[derive(Debug)]
pub(crate) struct Visit {
    pub context: Context,
    /// The action that it calls.
    pub action: Option<Arc<str>>,
    /// On whose behalf.
    pub tenant: Option<Tenant>,
}

/// Which of the three patterns a path has.
#[derive(Clone, Copy, Debug)]
enum Place {
    Collection,
    Item,
    ItemAction,
}

/// Every request comes through here.
pub(crate) async fn answer(shared: Arc<Shared>, request: Request) -> Response {
    let stopwatch = Stopwatch::start();
    let _counted = Gauged::enter(&shared.metrics, |metrics| &metrics.in_flight);
    let context = Context::of(request.headers(), shared.house.ids());
    let mut visit = Visit { context, action: None, tenant: None };
    let (method, uri) = (request.method().clone(), request.uri().clone());
    let origin = request.headers().get(http::header::ORIGIN).cloned();
    let accepted = request.headers().get(ACCEPT_ENCODING).cloned();
    let answered = match admit(&shared, &request) {
        Ok(None) => {
            let answered = AssertUnwindSafe(dispatch(&shared, request, &mut visit)).catch_unwind().await;
            answered.unwrap_or_else(|panic| Err(Problem::hidden(INTERNAL, panic_text(&*panic))))
        }
        Ok(Some(response)) => Ok(response),
        Err(problem) => Err(problem),
    };
    if matches!(&answered, Err(problem) if problem.kind.code == SCHEMA_MISMATCH.code) {
        shared.has_mismatch.store(true, Ordering::Relaxed);
    }
    let (mut response, problem) = match answered {
        Ok(response) => (compressed(accepted, response).await, None),
        Err(problem) => (written_out(&problem, uri.path(), &visit.context), Some(problem)),
    };
    if method == Method::HEAD {
        leave_out_body(&mut response);
    }
    finish_headers(response.headers_mut(), &visit.context, uri.path().starts_with("/v1/"));
    cors::allow(&shared.config.cors_origins, origin.as_ref(), response.headers_mut());
    report(&shared, &method, uri.path(), &visit, response.status(), problem.as_ref(), stopwatch);
    response
}

/// Finds who answers a path.
async fn dispatch(shared: &Arc<Shared>, request: Request, visit: &mut Visit) -> Result<Response, Problem> {
    match request.uri().path() {
        "/healthz" => health(shared, &request).await,
        "/livez" => live(&request),
        "/readyz" => ready(shared, &request).await,
        "/metrics" => metrics(shared, &request).await,
        "/openapi.json" => document(shared, &request),
        "/v1/batch" => batch::handle(shared, request, visit).await,
        "/v1/events" => events::handle(shared, request, visit).await,
        path => match place(path) {
            Some(place) => call::handle(shared, place, request, visit).await,
            None => problem_page(&request),
        },
    }
}

/// Which of the three patterns below `/v1` a path has, as it was sent.
fn place(path: &str) -> Option<Place> {
    let below = path.strip_prefix("/v1/")?;
    if below.split('/').any(str::is_empty) {
        return None;
    }
    match below.split('/').count() {
        1 => Some(Place::Collection),
        2 => Some(Place::Item),
        3 => Some(Place::ItemAction),
        _ => None,
    }
}

/// Compresses an answer that is worth it, if the caller takes it so.
async fn compressed(accepted: Option<HeaderValue>, mut response: Response) -> Response {
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
    let mut answer = Some(response);
    let answers = tower::service_fn(move |_| {
        let answer = answer.take().unwrap_or_default();
        async { Ok::<_, Infallible>(answer) }
    });
    match compression.layer(answers).oneshot(asked).await {
        Ok(response) => response.map(Body::new),
        Err(never) => match never {},
    }
}

/// An answer to HEAD: all headers, and no body.
fn leave_out_body(response: &mut Response) {
    if let Some(length) = response.body().size_hint().exact() {
        response.headers_mut().entry(CONTENT_LENGTH).or_insert(length.into());
    }
    *response.body_mut() = Body::empty();
}

/// Turns away what need not be looked at, and answers the questions of browsers.
fn admit(shared: &Shared, request: &Request) -> Result<Option<Response>, Problem> {
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
    if let Some(answer) = cors::preflight(&shared.config.cors_origins, request.method(), headers) {
        return Ok(Some(answer));
    }
    shared.gate.check_origin(headers, request.uri(), &shared.config.cors_origins)?;
    Ok(None)
}

fn panic_text(panic: &(dyn std::any::Any + Send)) -> String {
    let text = panic.downcast_ref::<&str>().map(|text| (*text).to_owned());
    let text = text.or_else(|| panic.downcast_ref::<String>().cloned());
    format!("panicked: {}", text.unwrap_or_default())
}

fn written_out(problem: &Problem, instance: &str, context: &Context) -> Response {
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
        // One URL shows different things to different callers, and both may have the same version of theirs.
        headers.append(VARY, HeaderValue::from_static("authorization, statehouse-tenant"));
    }
}

fn report(
    shared: &Shared,
    method: &Method,
    path: &str,
    visit: &Visit,
    status: StatusCode,
    problem: Option<&Problem>,
    stopwatch: Stopwatch,
) {
    let Visit { context, action, tenant } = visit;
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

/// The pattern of a path that no action answers. Paths themselves have no bound.
fn pattern(path: &str) -> &'static str {
    match path {
        "/healthz" => "/healthz",
        "/livez" => "/livez",
        "/readyz" => "/readyz",
        "/metrics" => "/metrics",
        "/openapi.json" => "/openapi.json",
        "/v1/batch" => "/v1/batch",
        "/v1/events" => "/v1/events",
        _ if path.starts_with("/problems/") => "/problems/{code}",
        _ => "unmatched",
    }
}

/// Demands GET (or HEAD) for a path that takes nothing else.
pub(crate) fn only_get(method: &Method) -> Result<(), Problem> {
    if method == Method::GET || method == Method::HEAD {
        return Ok(());
    }
    Err(Problem::method_not_allowed(&["GET", "HEAD"]))
}

fn plain(text: &'static str) -> Response {
    ([(CONTENT_TYPE, "text/plain; charset=utf-8"), (CACHE_CONTROL, "no-store")], text).into_response()
}

/// The process answers.
fn live(request: &Request) -> Result<Response, Problem> {
    only_get(request.method())?;
    Ok(plain("ok\n"))
}

/// The process answers, and so does the store.
async fn health(shared: &Shared, request: &Request) -> Result<Response, Problem> {
    only_get(request.method())?;
    reach_store(shared).await?;
    Ok(plain("ok\n"))
}

/// New requests are welcome: the store answers, and the server is not stopping.
async fn ready(shared: &Shared, request: &Request) -> Result<Response, Problem> {
    only_get(request.method())?;
    if *shared.stopping.borrow() {
        return Err(Problem::new(UNAVAILABLE, "the server is stopping"));
    }
    reach_store(shared).await?;
    fit_store(shared).await?;
    Ok(plain("ok\n"))
}

/// After a request met tables that are not those of the house: whether they are by now.
async fn fit_store(shared: &Shared) -> Result<(), Problem> {
    if !shared.has_mismatch.load(Ordering::Relaxed) {
        return Ok(());
    }
    let missing = match shared.house.migrate(Migrate::Show).await {
        // What the store has and the house does not know is no harm.
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

async fn reach_store(shared: &Shared) -> Result<(), Problem> {
    let read = shared.house.store().read_log(0, 0, 1);
    let patience = millis(shared.config.limits.header_timeout_ms);
    let answered = tokio::select! {
        answered = read => answered.map(drop).map_err(|error| error.to_string()),
        () = shared.house.clock().sleep(patience) => Err("the store did not answer in time".to_owned()),
    };
    answered.map_err(|cause| Problem::hidden(UNAVAILABLE, cause))
}

async fn metrics(shared: &Shared, request: &Request) -> Result<Response, Problem> {
    only_get(request.method())?;
    if !shared.config.open_metrics {
        shared.gate.admit(request.headers()).await?.require(Scope::Admin)?;
    }
    let text = shared.metrics.text(&shared.house);
    Ok(([(CONTENT_TYPE, "text/plain; version=0.0.4; charset=utf-8")], text).into_response())
}

fn document(shared: &Shared, request: &Request) -> Result<Response, Problem> {
    only_get(request.method())?;
    Ok(([(CONTENT_TYPE, "application/json")], shared.openapi.clone()).into_response())
}

/// The page of a problem, or of none that there is: no other path is left.
fn problem_page(request: &Request) -> Result<Response, Problem> {
    let code = request.uri().path().strip_prefix("/problems/").filter(|code| !code.contains('/'));
    let code = code.ok_or_else(|| Problem::new(NOT_FOUND, "nothing has this path"))?;
    only_get(request.method())?;
    problem::page(code).ok_or_else(|| Problem::new(NOT_FOUND, "no problem has this code"))
}

/// A JSON response.
pub(crate) fn json_response(status: StatusCode, body: &serde_json::Value) -> Response {
    // A document without keys that are no text is always written.
    let mut response = Response::new(Body::from(serde_json::to_vec(body).unwrap_or_default()));
    *response.status_mut() = status;
    response.headers_mut().insert(CONTENT_TYPE, HeaderValue::from_static("application/json"));
    response
}
