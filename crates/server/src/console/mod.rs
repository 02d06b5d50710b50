//! The console: web pages for people, generated from the resources and actions of the house.
//!
//! All pages are rendered on the server and work without scripts; two small modules add live updates and keyboard shortcuts.
//! No page knows an archetype: tables, forms and links follow from forms, keys and state machines.
//!
//! **Invariants.**
//! - A page performs a bounded number of reads, whatever the size of the tables and of the log.
//! - A page shows and does what the caller may do over the API with the same credentials, and nothing else.
//! - A write needs a request of the same origin ([`access`]), and runs under an idempotency key that was created with its
//!   form. A form that is sent twice is one write.
//! - No page contains inline scripts or styles: [`CONTENT_SECURITY_POLICY`] forbids them.

mod access;
mod action_form;
mod assets;
mod atlas;
mod audit;
mod batch;
mod blueprint;
mod conflict;
mod fields;
mod frame;
mod groups;
mod history;
mod home;
mod keys;
mod list;
mod log_page;
mod projections;
mod queues;
mod row;
mod samples;
mod values;

use std::borrow::Cow;
use std::sync::Arc;

use async_trait::async_trait;
use axum::body::Body;
use axum::response::Response;
use http::header::{CACHE_CONTROL, CONTENT_SECURITY_POLICY as CSP, CONTENT_TYPE, LOCATION, REFERRER_POLICY};
use http::request::Parts;
use http::{HeaderValue, Method, StatusCode};
use hyper::body::Incoming;
use maud::{Markup, html};
use statehouse::Resource;
use statehouse::action::Action;
use statehouse::house::CallArguments;
use statehouse_store::Time;

use crate::auth::Caller;
use crate::auth::networks::PeerAddress;
use crate::auth::secret::HouseSecret;
use crate::config::ConsoleMode;
use crate::http::{HttpRequest, HttpShared, RequestInfo, body, path};
use crate::problem::{FORBIDDEN, NOT_FOUND, Problem, UNAUTHENTICATED};
use crate::quota::QuotaGuard;
use crate::seal::CursorSeal;

/// What pages may load: their own scripts, styles and images.
const CONTENT_SECURITY_POLICY: &str =
    "default-src 'self'; base-uri 'none'; form-action 'self'; frame-ancestors 'none'; object-src 'none'";
/// Key derivation purpose of the seal of sessions.
const SESSIONS: &str = "console sessions";
/// Where the console begins.
pub const ROOT: &str = "/console";

/// What the console shows beside the house. All of it is optional.
#[derive(Clone, Default)]
pub struct ConsoleSources {
    /// The text of the blueprint.
    pub blueprint: Option<String>,
    /// Says what engines get for an action.
    pub explainer: Option<Arc<dyn ActionExplainer>>,
}

/// Says what an engine gets for an action.
#[async_trait]
pub trait ActionExplainer: Send + Sync {
    /// Engines and what each of them gets for the action of this full name, as text.
    async fn explain(&self, action: &str) -> Vec<(String, String)>;
}

/// What the console has beside the house.
pub(crate) struct ConsoleState {
    sessions: CursorSeal,
    secret: HouseSecret,
    sources: ConsoleSources,
}

impl ConsoleState {
    pub(crate) fn new(secret: HouseSecret, sources: ConsoleSources) -> ConsoleState {
        ConsoleState { sessions: secret.seal(SESSIONS), secret, sources }
    }
}

/// Whether a path belongs to the console.
pub(crate) fn is_console_path(path: &str) -> bool {
    path.strip_prefix(ROOT).is_some_and(|rest| rest.is_empty() || rest.starts_with('/'))
}

/// The pattern of a path of the console, for metrics and log.
pub(crate) fn pattern(path: &str) -> &'static str {
    const PAGES: [&str; 15] = [
        "/console/assets",
        "/console/login",
        "/console/logout",
        "/console/tenant",
        "/console/live",
        "/console/r",
        "/console/a",
        "/console/batch",
        "/console/log",
        "/console/groups",
        "/console/projections",
        "/console/queues",
        "/console/keys",
        "/console/audit",
        "/console/find",
    ];
    let page =
        |page: &&&str| path.strip_prefix(**page).is_some_and(|rest| rest.is_empty() || rest.starts_with('/'));
    PAGES.iter().find(page).map_or("/console", |page| page)
}

/// One request of a person who is logged in, or needs not to be.
pub(crate) struct ConsoleContext {
    shared: Arc<HttpShared>,
    caller: Caller,
    /// Path segments behind `/console`, decoded.
    segments: Vec<String>,
    query: Vec<(String, String)>,
    /// Scheme and host, as the browser named them.
    origin: String,
    now: Time,
    /// Counts the request as one in flight.
    _admitted: QuotaGuard,
}

impl ConsoleContext {
    /// A query parameter.
    fn parameter(&self, name: &str) -> Option<&str> {
        self.query.iter().find(|(known, _)| known == name).map(|(_, value)| value.as_str())
    }

    fn segment(&self, index: usize) -> &str {
        self.segments.get(index).map_or("", String::as_str)
    }

    fn is_read_only(&self) -> bool {
        self.shared.config.console == ConsoleMode::ReadOnly
    }

    /// Whether the caller may call an action here.
    fn may_call(&self, resource: &Resource, action: &Action) -> bool {
        !(action.is_write() && self.is_read_only())
            && access::may_call(&self.caller, resource, action).is_ok()
    }

    /// Requires that the caller may call an action here.
    fn require_call(&self, resource: &Resource, action: &Action) -> Result<(), Problem> {
        if action.is_write() {
            self.require_writable()?;
        }
        access::may_call(&self.caller, resource, action)
    }

    /// Whether the caller may operate the house: its groups, projections and keys.
    fn may_operate(&self) -> bool {
        !self.is_read_only() && access::may_operate(&self.caller).is_ok()
    }

    fn require_operator(&self) -> Result<(), Problem> {
        self.require_writable()?;
        access::may_operate(&self.caller)
    }

    fn require_writable(&self) -> Result<(), Problem> {
        match self.is_read_only() {
            true => Err(Problem::new(FORBIDDEN, "this console is read-only (--console read-only)")),
            false => Ok(()),
        }
    }

    /// Reads by an action.
    async fn read(
        &self,
        resource: &Resource,
        action: &Action,
        key: Vec<statehouse_store::Value>,
        input: serde_json::Map<String, serde_json::Value>,
    ) -> Result<Arc<statehouse::Answer>, Problem> {
        access::may_call(&self.caller, resource, action)?;
        let action = self.shared.house.find_action_of(&resource.name, &action.name)?;
        let arguments = CallArguments { key, input, expected: None };
        Ok(self.shared.house.read_action(&self.caller.principal(), action, arguments).await?)
    }
}

/// Handles a request of the console. Problems become pages.
pub(crate) async fn handle(
    shared: &Arc<HttpShared>,
    request: HttpRequest,
    info: &mut RequestInfo,
) -> Result<Response, Problem> {
    if shared.config.console == ConsoleMode::Off {
        return Err(Problem::new(NOT_FOUND, "the console is not served (--console off)"));
    }
    let (parts, body) = request.into_parts();
    let segments: Result<Vec<String>, Problem> =
        path::segments(parts.uri.path()).skip(1).map(|segment| path::decoded(segment, false)).collect();
    let segments = segments?;
    let first = segments.first().map_or("", String::as_str);
    if first == "assets" {
        crate::http::only_get(&parts.method)?;
        return assets::response(segments.get(1).map_or("", String::as_str));
    }
    let answered = match parts.method {
        Method::GET | Method::HEAD => Ok(()),
        Method::POST => access::check_origin(&parts.headers),
        _ => Err(Problem::method_not_allowed(&["GET", "HEAD", "POST"])),
    };
    let answered = match answered {
        Ok(()) => dispatch(shared, segments, parts, body, info).await,
        Err(problem) => Err(problem),
    };
    match answered {
        Ok(response) => Ok(response),
        Err(problem) if problem.kind == UNAUTHENTICATED => Ok(access::to_login(info)),
        Err(problem) => Ok(frame::problem_page(&problem, info)),
    }
}

async fn dispatch(
    shared: &Arc<HttpShared>,
    segments: Vec<String>,
    parts: Parts,
    body: Incoming,
    info: &mut RequestInfo,
) -> Result<Response, Problem> {
    let first = segments.first().cloned().unwrap_or_default();
    let is_post = parts.method == Method::POST;
    if let Some(answered) = access::handle(shared, &first, &parts, is_post) {
        return access::respond(shared, answered, &parts, body).await;
    }
    let credentials = access::credentials(shared, &parts.headers);
    let caller = shared.authenticator.authenticate(&credentials, PeerAddress::of(&parts.extensions)).await?;
    access::operator_only(&caller)?;
    info.tenant = Some(caller.tenant.clone());
    shared.unsent.check(&caller.tenant)?;
    if first == "live" {
        let mut parts = parts;
        parts.headers.extend(credentials);
        return crate::events::handle(shared, http::Request::from_parts(parts, body), info).await;
    }
    let admitted = shared.quotas.requests.acquire(&caller, 1)?;
    let mut memory = shared.quotas.body_bytes.acquire(&caller, 0)?;
    let cx = ConsoleContext {
        query: path::pairs(parts.uri.query())?,
        origin: access::origin(shared, &parts.headers),
        now: shared.house.clock().now(),
        shared: shared.clone(),
        caller,
        segments,
        _admitted: admitted,
    };
    if !is_post {
        return get(&cx).await;
    }
    let clock = &**shared.house.clock();
    let form = body::read_form(&parts.headers, body, shared.bounds(), clock, &mut memory).await?;
    let form = fields::SentForm::of(form, memory);
    post(&cx, form, info).await
}

/// Pages.
async fn get(cx: &ConsoleContext) -> Result<Response, Problem> {
    let page = match (cx.segment(0), cx.segments.len()) {
        ("", _) => home::page(cx).await?,
        ("r", 2) => list::page(cx).await?,
        ("r", 3) => row::page(cx).await?,
        ("a", 2) => action_form::page(cx).await?,
        ("batch", 1) => batch::page(cx),
        ("log", 1) => log_page::page(cx).await?,
        ("groups", 1) => groups::page(cx).await?,
        ("projections", 1) => projections::page(cx).await?,
        ("queues", 1) => queues::page(cx).await?,
        ("atlas", 1) => atlas::page(cx),
        ("atlas", 2) => atlas::archetype(cx)?,
        ("blueprint", 1) => blueprint::page(cx).await?,
        ("keys", 1) => keys::page(cx).await?,
        ("audit", 1) => audit::page(cx).await?,
        ("find", 1) => return Ok(home::find(cx)),
        _ => return Err(Problem::new(NOT_FOUND, "the console has no such page")),
    };
    Ok(page)
}

/// Forms.
async fn post(
    cx: &ConsoleContext,
    form: fields::SentForm,
    info: &mut RequestInfo,
) -> Result<Response, Problem> {
    match (cx.segment(0), cx.segments.len()) {
        ("a", 2) => action_form::submit(cx, form, info).await,
        ("batch", 1) => batch::submit(cx, &form).await,
        ("groups", 1) => groups::submit(cx, &form).await,
        ("projections", 1) => projections::submit(cx, &form).await,
        ("keys", 1) => keys::submit(cx, &form).await,
        _ => Err(Problem::new(NOT_FOUND, "the console has no such form")),
    }
}

/// A page as a response.
fn html_response(status: StatusCode, page: Markup) -> Response {
    let mut response = Response::new(Body::from(page.into_string()));
    *response.status_mut() = status;
    let headers = response.headers_mut();
    headers.insert(CONTENT_TYPE, HeaderValue::from_static("text/html; charset=utf-8"));
    headers.insert(CACHE_CONTROL, HeaderValue::from_static("no-store"));
    headers.insert(CSP, HeaderValue::from_static(CONTENT_SECURITY_POLICY));
    headers.insert(REFERRER_POLICY, HeaderValue::from_static("same-origin"));
    response
}

/// Sends the browser to another page.
fn redirect(to: &str) -> Response {
    let mut response = html_response(StatusCode::SEE_OTHER, html! { a href=(to) { "Continue" } });
    if let Ok(to) = HeaderValue::from_str(to) {
        response.headers_mut().insert(LOCATION, to);
    }
    response
}

/// The address of a resource's page.
fn resource_link(name: &str) -> String {
    format!("{ROOT}/r/{}", path::segment(name))
}

/// The address of a row's page.
fn row_link(resource: &str, key: &str) -> String {
    format!("{ROOT}/r/{}/{}", path::segment(resource), path::segment(key))
}

/// The address of an action's form, for a row or none.
fn action_link(resource: &str, action: &str, key: Option<&str>) -> String {
    let key = key.map_or(String::new(), |key| format!("?key={}", path::parameter(key)));
    format!("{ROOT}/a/{}{key}", path::segment(&format!("{resource}.{action}")))
}

/// A name as a heading: `display_name` is shown as it is, `create` as `Create`.
fn capitalized(name: &str) -> Cow<'_, str> {
    let mut letters = name.chars();
    match letters.next() {
        Some(first) if first.is_ascii_lowercase() => {
            format!("{}{}", first.to_ascii_uppercase(), letters.as_str().replace('_', " ")).into()
        }
        _ => name.into(),
    }
}
