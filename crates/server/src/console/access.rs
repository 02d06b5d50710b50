//! Who uses the console.
//!
//! Without credentials configured, a request is served as the API serves it: direct local requests only
//! ([`crate::auth::open_mode`]), for the tenant that the person chose. With credentials, a person logs in with an API key or a
//! token. The session is a cookie that holds the credential, encrypted and authenticated by the server's secret. So a session
//! needs no table, works on every process, and ends as soon as the key is revoked.
//!
//! The roles follow from the scopes of the credential: `read` looks, `write` acts, `admin` operates the house.
//!
//! Requests of other sites are rejected twice: the cookie is `SameSite=Strict`, and a form is accepted only if the browser
//! says that it comes from this origin.

use std::time::Duration;

use axum::response::Response;
use http::header::{AUTHORIZATION, COOKIE, HOST, ORIGIN, SET_COOKIE};
use http::request::Parts;
use http::{HeaderMap, HeaderName, HeaderValue, StatusCode};
use hyper::body::Incoming;
use maud::html;
use serde::{Deserialize, Serialize};
use statehouse::Resource;
use statehouse::action::Action;
use statehouse_store::Tenant;

use super::{ROOT, frame, html_response, redirect};
use crate::auth::networks::PeerAddress;
use crate::auth::{self, Access, ActionSet, Caller, Scope};
use crate::http::{HttpShared, RequestInfo, body};
use crate::problem::{FORBIDDEN, INTERNAL, Problem, UNAUTHENTICATED};

const COOKIE_NAME: &str = "statehouse_console";
const SEC_FETCH_SITE: HeaderName = HeaderName::from_static("sec-fetch-site");
/// Time after which a person logs in again.
const SESSION: Duration = Duration::from_secs(12 * 60 * 60);
/// Seal context of sessions.
const CONTEXT: &[u8] = b"session";
/// Bytes of a credential that a person may send.
const CREDENTIAL_BYTES_MAX: usize = 4 << 10;

/// What a cookie holds.
#[derive(Debug, Serialize, Deserialize)]
struct ConsoleSession {
    /// The API key or token.
    credential: Option<String>,
    /// The tenant, in open mode.
    tenant: Option<String>,
    /// Microseconds since the epoch.
    until: i64,
}

/// Requires that a caller may call an action.
pub(super) fn may_call(caller: &Caller, resource: &Resource, action: &Action) -> Result<(), Problem> {
    let (resource, writes, restricted) = (&resource.name, action.is_write(), action.is_restricted);
    let scope = action.scope.as_deref();
    caller.require(Access::Action { resource, action: &action.name, writes, restricted, scope })
}

/// Whether a caller may read the events of a resource.
pub(super) fn may_follow(caller: &Caller, resource: &str) -> bool {
    caller.may(Access::Resource(resource))
}

/// Requires that a caller may read a resource.
pub(super) fn require_follow(caller: &Caller, resource: &str) -> Result<(), Problem> {
    caller.require(Access::Resource(resource))
}

/// Requires that a caller may operate the house.
pub(super) fn may_operate(caller: &Caller) -> Result<(), Problem> {
    caller.require(Access::Operator)
}

/// The caller's role, in words.
pub(super) fn role(caller: &Caller) -> &'static str {
    let acts = |scope: &Scope| match scope {
        Scope::Write => true,
        Scope::Actions { actions, .. } => *actions != ActionSet::Reads,
        Scope::Declared(_) => true,
        Scope::Read | Scope::Admin => false,
    };
    match may_operate(caller) {
        Ok(()) => "operate",
        Err(_) if caller.scopes.iter().any(acts) => "act",
        Err(_) => "read",
    }
}

/// Rejects end users: the rules of resources decide what they see, and pages like the log show rows of everybody.
pub(super) fn operator_only(caller: &Caller) -> Result<(), Problem> {
    if caller.claims.is_none() {
        return Ok(());
    }
    let detail = "the console is for operators; log in with an API key or a token with the scope `admin`";
    Err(Problem::new(FORBIDDEN, detail))
}

/// Rejects a form that another site sends.
pub(super) fn check_origin(headers: &HeaderMap) -> Result<(), Problem> {
    let text = |name: &HeaderName| headers.get(name).map(|value| value.to_str().unwrap_or_default());
    let refused = |why: &str| {
        let detail = format!("{why}; forms are accepted from the console's own pages only");
        Err(Problem::new(FORBIDDEN, detail))
    };
    let (site, origin, host) = (text(&SEC_FETCH_SITE), text(&ORIGIN), text(&HOST));
    if site.is_some_and(|site| site != "same-origin") {
        return refused("another site sent this form");
    }
    let sender = origin.and_then(|origin| origin.split_once("://")).map(|(_, host)| host);
    match (site, origin) {
        (None, None) => refused("the request does not say which page sent this form"),
        (_, Some(_)) if sender.is_none() || sender != host => {
            refused("a page of another origin sent this form")
        }
        _ => Ok(()),
    }
}

/// Scheme and host as the browser named them.
pub(super) fn origin(shared: &HttpShared, headers: &HeaderMap) -> String {
    let scheme = if shared.config.tls.is_some() { "https" } else { "http" };
    let host = headers.get(HOST).and_then(|host| host.to_str().ok()).unwrap_or("localhost");
    format!("{scheme}://{host}")
}

/// The headers that the API takes for the session of a request.
pub(super) fn credentials(shared: &HttpShared, headers: &HeaderMap) -> HeaderMap {
    let mut credentials = HeaderMap::new();
    let Some(session) = session(shared, headers) else { return credentials };
    let given = if shared.authenticator.is_open() {
        session.tenant.map(|tenant| (auth::TENANT, tenant))
    } else {
        session.credential.map(|credential| (AUTHORIZATION, format!("Bearer {credential}")))
    };
    if let Some((name, value)) = given
        && let Ok(value) = HeaderValue::from_str(&value)
    {
        credentials.insert(name, value);
    }
    credentials
}

fn session(shared: &HttpShared, headers: &HeaderMap) -> Option<ConsoleSession> {
    let cookies = headers.get_all(COOKIE).iter().filter_map(|value| value.to_str().ok());
    let pairs = cookies.flat_map(|value| value.split(';')).filter_map(|pair| pair.trim().split_once('='));
    let sealed = pairs.filter(|(name, _)| *name == COOKIE_NAME).map(|(_, value)| value).next()?;
    let opened = shared.console.sessions.open(&[CONTEXT], sealed)?;
    let session: ConsoleSession = serde_json::from_slice(&opened).ok()?;
    (session.until > shared.house.clock().now().micros()).then_some(session)
}

/// What is done before a caller is known.
pub(super) enum LoginStep {
    LoginPage,
    Login,
    Logout,
    Tenant,
}

/// Whether a page is for those who are not logged in.
pub(super) fn handle(shared: &HttpShared, page: &str, _parts: &Parts, is_post: bool) -> Option<LoginStep> {
    let is_open = shared.authenticator.is_open();
    match (page, is_post) {
        ("login", false) if !is_open => Some(LoginStep::LoginPage),
        ("login", true) if !is_open => Some(LoginStep::Login),
        ("logout", true) if !is_open => Some(LoginStep::Logout),
        ("tenant", true) if is_open => Some(LoginStep::Tenant),
        _ => None,
    }
}

/// Answers what is done before a caller is known.
pub(super) async fn respond(
    shared: &HttpShared,
    entry: LoginStep,
    parts: &Parts,
    body: Incoming,
) -> Result<Response, Problem> {
    if let LoginStep::LoginPage = entry {
        return Ok(html_response(StatusCode::OK, frame::login(shared, None)));
    }
    let given = read_entry(shared, parts, body).await?;
    match entry {
        LoginStep::LoginPage | LoginStep::Login => {
            login(shared, given, PeerAddress::of(&parts.extensions)).await
        }
        LoginStep::Logout => Ok(with_cookie(redirect(&format!("{ROOT}/login")), shared, "", Duration::ZERO)),
        LoginStep::Tenant => choose_tenant(shared, &given),
    }
}

/// The one field of a form that is sent without a caller.
async fn read_entry(shared: &HttpShared, parts: &Parts, body: Incoming) -> Result<String, Problem> {
    let bounds = body::Bounds { bytes: CREDENTIAL_BYTES_MAX, ..shared.bounds() };
    let anonymous =
        auth::secret::system_tenant().map_err(|error| Problem::hidden(INTERNAL, error.to_string()))?;
    let anonymous = Caller::anonymous(anonymous);
    let mut memory = shared.quotas.body_bytes.acquire(&anonymous, 0)?;
    let form = body::read_form(&parts.headers, body, bounds, &**shared.house.clock(), &mut memory).await?;
    Ok(form.into_iter().next().map_or(String::new(), |(_, value)| value.trim().to_owned()))
}

async fn login(shared: &HttpShared, credential: String, peer: PeerAddress) -> Result<Response, Problem> {
    let mut headers = HeaderMap::new();
    if let Ok(value) = HeaderValue::from_str(&format!("Bearer {credential}")) {
        headers.insert(AUTHORIZATION, value);
    }
    match shared.authenticator.authenticate(&headers, peer).await {
        Ok(caller) => {
            operator_only(&caller)?;
            let tenant = caller.tenant.as_str();
            shared.authenticator.logins().succeeded(&caller.audited(), tenant, peer.0);
            start(shared, Some(credential), None)
        }
        Err(problem) if problem.kind == UNAUTHENTICATED => {
            let page = frame::login(shared, Some("This key is not valid here, has expired or was revoked."));
            Ok(html_response(StatusCode::UNAUTHORIZED, page))
        }
        Err(problem) => Err(problem),
    }
}

fn choose_tenant(shared: &HttpShared, name: &str) -> Result<Response, Problem> {
    let mut headers = HeaderMap::new();
    if let Ok(value) = HeaderValue::from_str(name) {
        headers.insert(auth::TENANT, value);
    }
    let caller = auth::open_mode::caller(&headers)?;
    let tenant: &Tenant = &caller.tenant;
    start(shared, None, Some(tenant.to_string()))
}

fn start(
    shared: &HttpShared,
    credential: Option<String>,
    tenant: Option<String>,
) -> Result<Response, Problem> {
    let until = shared.house.clock().now().plus(SESSION).micros();
    let session = serde_json::to_vec(&ConsoleSession { credential, tenant, until }).unwrap_or_default();
    let sealed = shared.console.sessions.close(&[CONTEXT], &session);
    Ok(with_cookie(redirect(ROOT), shared, &sealed, SESSION))
}

fn with_cookie(mut response: Response, shared: &HttpShared, value: &str, age: Duration) -> Response {
    let secure = if shared.config.tls.is_some() { "; Secure" } else { "" };
    let cookie = format!(
        "{COOKIE_NAME}={value}; Path={ROOT}; Max-Age={}; HttpOnly; SameSite=Strict{secure}",
        age.as_secs()
    );
    if let Ok(cookie) = HeaderValue::from_str(&cookie) {
        response.headers_mut().insert(SET_COOKIE, cookie);
    }
    response
}

/// Sends a person who is not logged in to the login page.
pub(super) fn to_login(_info: &RequestInfo) -> Response {
    redirect(&format!("{ROOT}/login"))
}

/// A form that ends the session.
pub(super) fn logout_form() -> maud::Markup {
    html! {
        form method="post" action={ (ROOT) "/logout" } {
            button type="submit" class="quiet" { "Log out" }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check(pairs: &[(&'static str, &'static str)]) -> bool {
        let headers = pairs
            .iter()
            .map(|(name, value)| (HeaderName::from_static(name), HeaderValue::from_static(value)));
        check_origin(&headers.collect()).is_ok()
    }

    #[test]
    fn forms_of_other_sites_are_rejected() {
        assert!(check(&[("sec-fetch-site", "same-origin")]));
        assert!(check(&[("host", "localhost:8080"), ("origin", "http://localhost:8080")]));
        assert!(!check(&[]));
        for site in ["cross-site", "same-site", "none", "SAME-ORIGIN"] {
            assert!(!check(&[("sec-fetch-site", site)]), "{site}");
        }
        for origin in ["http://localhost:3000", "https://evil.example", "null", ""] {
            assert!(!check(&[("host", "localhost:8080"), ("origin", origin)]), "{origin}");
            assert!(
                !check(&[("host", "localhost:8080"), ("origin", origin), ("sec-fetch-site", "same-origin")]),
                "{origin}"
            );
        }
    }
}
