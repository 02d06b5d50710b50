//! The HTTP surface: a front door that every request passes, and behind it rooms that are made from the house's actions.
//!
//! The front door gives each request its ids, turns floods of headers away, catches panics, writes problems out, counts
//! and logs. Whatever happens behind it, a client gets an answer with a code, and the log gets one line without bodies,
//! keys of rows or secrets. Behind it a handler either returns a response or a [`Problem`].

mod batch;
mod body;
mod call;
mod conditions;
mod context;
mod flight;
mod path;
mod routes;

use std::panic::AssertUnwindSafe;
use std::sync::Arc;

use axum::Router;
use axum::body::Body;
use axum::extract::{Request, State};
use axum::middleware::{Next, from_fn_with_state};
use axum::response::{IntoResponse, Response};
use axum::routing::any;
use bytes::Bytes;
use futures_util::FutureExt as _;
use http::header::{CACHE_CONTROL, CONTENT_TYPE, VARY, X_CONTENT_TYPE_OPTIONS};
use http::{HeaderMap, HeaderValue, Method, StatusCode};
use statehouse::House;
use statehouse_store::clock::Stopwatch;
use tokio::sync::{Semaphore, watch};
use tower_http::compression::CompressionLayer;
use tower_http::compression::predicate::{NotForContentType, Predicate as _, SizeAbove};

use crate::auth::{Gate, Scope};
use crate::config::{Config, millis};
use crate::metrics::{Gauged, Metrics};
use crate::problem::{self, HEADERS_TOO_LARGE, INTERNAL, NOT_FOUND, Problem, UNAVAILABLE};
use crate::seal::Seal;
use crate::{cors, events, openapi};
pub(crate) use context::Context;
use flight::Flights;
pub(crate) use path::pairs as query_pairs;
use routes::{Named, Routes};

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
            routes: Routes::of(&house),
            openapi: openapi::document(&house).to_string().into(),
            streams: Arc::new(Semaphore::new(config.limits.streams)),
            flights: Flights::default(),
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

/// What the log and the counters call a request; an action's name, or a path's pattern.
#[derive(Clone, Debug)]
pub(crate) struct Label(pub Arc<str>);

/// Which tenant a request was for, for the log.
#[derive(Clone, Debug)]
pub(crate) struct For(pub String);

/// All routes.
pub(crate) fn router(shared: Arc<Shared>) -> Router {
    let compression = CompressionLayer::new()
        .gzip(true)
        .compress_when(SizeAbove::new(COMPRESS_ABOVE_BYTES).and(NotForContentType::SSE));
    Router::new()
        .route("/healthz", any(health))
        .route("/livez", any(live))
        .route("/readyz", any(ready))
        .route("/metrics", any(metrics))
        .route("/openapi.json", any(document))
        .route("/problems/{code}", any(problem_page))
        .route("/v1/batch", any(batch::handle))
        .route("/v1/events", any(events::handle))
        .route("/v1/{name}", any(|shared, request| call::handle(shared, Place::Collection, request)))
        .route("/v1/{name}/{key}", any(|shared, request| call::handle(shared, Place::Item, request)))
        .route(
            "/v1/{name}/{key}/{action}",
            any(|shared, request| call::handle(shared, Place::ItemAction, request)),
        )
        .fallback(|| async { Problem::new(NOT_FOUND, "nothing has this path") })
        .layer(compression)
        .layer(from_fn_with_state(shared.clone(), front))
        .with_state(shared)
}

/// Which of the three patterns a path has.
#[derive(Clone, Copy, Debug)]
enum Place {
    Collection,
    Item,
    ItemAction,
}

/// Every request comes through here.
async fn front(State(shared): State<Arc<Shared>>, mut request: Request, next: Next) -> Response {
    let stopwatch = Stopwatch::start();
    let _counted = Gauged::enter(&shared.metrics, |metrics| &metrics.in_flight);
    let context = Context::of(request.headers(), shared.house.ids());
    let (method, instance) = (request.method().clone(), request.uri().path().to_owned());
    let origin = request.headers().get(http::header::ORIGIN).cloned();
    let mut response = match admit(&shared, &request) {
        Err(problem) => problem.into_response(),
        Ok(Some(response)) => response,
        Ok(None) => {
            request.extensions_mut().insert(context.clone());
            let answered = AssertUnwindSafe(next.run(request)).catch_unwind().await;
            answered.unwrap_or_else(|panic| Problem::hidden(INTERNAL, panic_text(&*panic)).into_response())
        }
    };
    let problem = response.extensions_mut().remove::<Problem>();
    if let Some(problem) = &problem {
        write_out(&mut response, problem, &instance, &context);
    }
    finish_headers(response.headers_mut(), &context, instance.starts_with("/v1/"));
    cors::allow(&shared.config.cors_origins, origin.as_ref(), response.headers_mut());
    report(&shared, &method, &instance, &context, &response, problem.as_ref(), stopwatch);
    response
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

fn write_out(response: &mut Response, problem: &Problem, instance: &str, context: &Context) {
    let document = problem.document(instance, &context.request_id, &context.trace_id);
    *response.status_mut() = problem.status();
    *response.body_mut() = Body::from(document.to_string());
    let headers = response.headers_mut();
    headers.remove(http::header::CONTENT_LENGTH);
    headers.insert(CONTENT_TYPE, HeaderValue::from_static("application/problem+json"));
    for (name, value) in &problem.headers {
        headers.insert(name.clone(), value.clone());
    }
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
    instance: &str,
    context: &Context,
    response: &Response,
    problem: Option<&Problem>,
    stopwatch: Stopwatch,
) {
    let label = response.extensions().get::<Label>().map(|label| label.0.clone());
    let route = label.unwrap_or_else(|| pattern(instance).into());
    let (status, took) = (response.status().as_u16(), stopwatch.elapsed());
    let code = problem.map(|problem| problem.kind.code);
    shared.metrics.answered(&route, status, code, took);
    let tenant = response.extensions().get::<For>().map_or("", |tenant| tenant.0.as_str());
    let micros = u64::try_from(took.as_micros()).unwrap_or(u64::MAX);
    let Context { request_id, trace_id, parent_id } = context;
    let parent_id = parent_id.as_deref().unwrap_or_default();
    let code = code.unwrap_or_default();
    match problem.and_then(|problem| problem.cause.as_deref()) {
        Some(cause) => tracing::error!(
            target: "statehouse::http",
            %method, %route, status, code, cause, micros, tenant, request_id, trace_id, parent_id, "failed"
        ),
        None => tracing::info!(
            target: "statehouse::http",
            %method, %route, status, code, micros, tenant, request_id, trace_id, parent_id, "answered"
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
async fn live(request: Request) -> Result<Response, Problem> {
    only_get(request.method())?;
    Ok(plain("ok\n"))
}

/// The process answers, and so does the store.
async fn health(State(shared): State<Arc<Shared>>, request: Request) -> Result<Response, Problem> {
    only_get(request.method())?;
    reach_store(&shared).await?;
    Ok(plain("ok\n"))
}

/// New requests are welcome: the store answers, and the server is not stopping.
async fn ready(State(shared): State<Arc<Shared>>, request: Request) -> Result<Response, Problem> {
    only_get(request.method())?;
    if *shared.stopping.borrow() {
        return Err(Problem::new(UNAVAILABLE, "the server is stopping"));
    }
    reach_store(&shared).await?;
    Ok(plain("ok\n"))
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

async fn metrics(State(shared): State<Arc<Shared>>, request: Request) -> Result<Response, Problem> {
    only_get(request.method())?;
    if !shared.config.open_metrics {
        shared.gate.admit(request.headers()).await?.require(Scope::Admin)?;
    }
    let text = shared.metrics.text(&shared.house);
    Ok(([(CONTENT_TYPE, "text/plain; version=0.0.4; charset=utf-8")], text).into_response())
}

async fn document(State(shared): State<Arc<Shared>>, request: Request) -> Result<Response, Problem> {
    only_get(request.method())?;
    Ok(([(CONTENT_TYPE, "application/json")], shared.openapi.clone()).into_response())
}

async fn problem_page(request: Request) -> Result<Response, Problem> {
    only_get(request.method())?;
    let code = request.uri().path().rsplit('/').next().unwrap_or_default();
    problem::page(code).ok_or_else(|| Problem::new(NOT_FOUND, "no problem has this code"))
}

/// A JSON response.
pub(crate) fn json_response(status: StatusCode, body: &serde_json::Value) -> Response {
    let mut response = Response::new(Body::from(body.to_string()));
    *response.status_mut() = status;
    response.headers_mut().insert(CONTENT_TYPE, HeaderValue::from_static("application/json"));
    response
}
