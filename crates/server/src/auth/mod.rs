//! Authentication and authorization.
//!
//! With credentials configured, every call below `/v1` needs `Authorization: Bearer` with an API key of this house
//! ([`keys`]) or a token of a trusted issuer ([`jwt`]). The credential determines tenant and scopes; nothing in the request
//! can change the tenant.
//!
//! Without credentials (open mode) the server binds to loopback addresses only, and serves the tenant `default` or the
//! one in the header `Statehouse-Tenant`. Web pages must not use open mode: the server rejects requests whose `Host` or
//! `Origin` is not local. Browsers send both headers, and a page cannot forge them.

pub mod jwks;
pub mod jwt;
pub mod keys;
pub mod secret;

use std::fmt;
use std::str::FromStr;
use std::sync::Arc;

use http::header::{AUTHORIZATION, HOST, ORIGIN, WWW_AUTHENTICATE};
use http::{HeaderMap, HeaderName, HeaderValue, Uri};
use statehouse::{House, own};
use statehouse_store::Tenant;

use crate::cors;
use crate::problem::{FORBIDDEN, MALFORMED, Problem, UNAUTHENTICATED};

/// Tenant of a caller in open mode.
pub const TENANT: HeaderName = HeaderName::from_static("statehouse-tenant");
/// Tenant of callers in open mode that name none.
pub const TENANT_DEFAULT: &str = "default";

/// A permission.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Scope {
    /// Read rows and events.
    Read,
    /// Write rows.
    Write,
    /// Everything, including metrics.
    Admin,
}

impl Scope {
    /// Every scope.
    pub const ALL: [Scope; 3] = [Scope::Read, Scope::Write, Scope::Admin];

    /// The name in keys and tokens.
    pub fn name(self) -> &'static str {
        match self {
            Scope::Read => "read",
            Scope::Write => "write",
            Scope::Admin => "admin",
        }
    }
}

impl fmt::Display for Scope {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// An unknown scope.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{0:?} is not a scope; the scopes are read, write and admin")]
pub struct BadScope(pub String);

impl FromStr for Scope {
    type Err = BadScope;

    fn from_str(text: &str) -> Result<Scope, BadScope> {
        Scope::ALL.into_iter().find(|scope| scope.name() == text).ok_or_else(|| BadScope(text.to_owned()))
    }
}

/// Scopes as text, separated by spaces.
pub fn scopes_text(scopes: &[Scope]) -> String {
    scopes.iter().map(|scope| scope.name()).collect::<Vec<_>>().join(" ")
}

/// The scopes in a text. Unknown words are ignored, because tokens may carry scopes of other services.
pub fn read_scopes(text: &str) -> Vec<Scope> {
    text.split_whitespace().filter_map(|word| word.parse().ok()).collect()
}

/// An authenticated caller.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Caller {
    /// Tenant of all its calls.
    pub tenant: Tenant,
    /// Granted scopes.
    pub scopes: Vec<Scope>,
}

impl Caller {
    /// Requires a scope. `admin` includes every scope.
    pub fn require(&self, scope: Scope) -> Result<(), Problem> {
        if self.scopes.contains(&scope) || self.scopes.contains(&Scope::Admin) {
            return Ok(());
        }
        let detail =
            format!("this call needs the scope {scope}; the caller has {}", scopes_text(&self.scopes));
        let challenge =
            format!("Bearer realm=\"statehouse\", error=\"insufficient_scope\", scope=\"{scope}\"");
        Err(Problem::new(FORBIDDEN, detail).header(WWW_AUTHENTICATE, &challenge))
    }
}

/// Authenticates requests.
pub struct Authenticator {
    methods: Option<Methods>,
}

/// The configured authentication methods.
struct Methods {
    keys: Option<keys::KeyCache>,
    tokens: Option<jwt::TokenVerifier>,
}

impl Authenticator {
    /// Open mode: no credentials.
    pub fn open() -> Authenticator {
        Authenticator { methods: None }
    }

    /// Requires API keys, tokens, or either.
    pub fn with_credentials(
        keys: Option<keys::KeyCache>,
        tokens: Option<jwt::TokenVerifier>,
    ) -> Authenticator {
        Authenticator { methods: Some(Methods { keys, tokens }) }
    }

    /// Whether the server is in open mode.
    pub fn is_open(&self) -> bool {
        self.methods.is_none()
    }

    /// Authenticates a request by its headers.
    pub async fn authenticate(&self, headers: &HeaderMap) -> Result<Caller, Problem> {
        let Some(methods) = &self.methods else { return local(headers) };
        let credential = bearer(headers)?;
        let caller = match (&methods.keys, &methods.tokens) {
            (Some(keys), _) if credential.starts_with(keys::MARK) => keys.caller(credential).await?,
            (_, Some(tokens)) => tokens.caller(credential).await?,
            _ => None,
        };
        caller
            .filter(|caller| !own::is_own(&caller.tenant))
            .ok_or_else(|| unauthenticated("the key or token is not valid", ", error=\"invalid_token\""))
    }

    /// Rejects requests of web pages in open mode.
    pub fn check_origin(&self, headers: &HeaderMap, uri: &Uri, listed: &[String]) -> Result<(), Problem> {
        if !self.is_open() {
            return Ok(());
        }
        let refuse = |what: &str| {
            let detail = format!(
                "without credentials this server accepts local callers only, and {what} is not local"
            );
            Err(Problem::new(FORBIDDEN, detail))
        };
        let host = headers.get(HOST).and_then(|host| host.to_str().ok()).or_else(|| uri.host());
        if host.is_some_and(|host| !is_local(host)) {
            return refuse("this host name");
        }
        match headers.get(ORIGIN) {
            Some(origin) if !cors::is_listed(listed, origin) && !is_local_origin(origin) => {
                refuse("this origin")
            }
            _ => Ok(()),
        }
    }
}

fn is_local_origin(origin: &HeaderValue) -> bool {
    let origin = origin.to_str().ok().and_then(|origin| origin.split_once("://"));
    origin.is_some_and(|(_, host)| is_local(host))
}

/// Whether a host, with or without a port, is a loopback name or address.
fn is_local(host: &str) -> bool {
    let name = match host.strip_prefix('[') {
        Some(rest) => rest.split(']').next().unwrap_or_default(),
        None => host.rsplit_once(':').map_or(host, |(name, _)| name),
    };
    name.eq_ignore_ascii_case("localhost")
        || name.to_ascii_lowercase().ends_with(".localhost")
        || name.parse::<std::net::IpAddr>().is_ok_and(|address| address.is_loopback())
}

fn unauthenticated(detail: &str, error: &str) -> Problem {
    Problem::new(UNAUTHENTICATED, detail)
        .header(WWW_AUTHENTICATE, &format!("Bearer realm=\"statehouse\"{error}"))
}

fn bearer(headers: &HeaderMap) -> Result<&str, Problem> {
    let mut given = headers.get_all(AUTHORIZATION).iter();
    let missing = || unauthenticated("send `Authorization: Bearer` with a key or a token", "");
    let (first, None) = (given.next().ok_or_else(missing)?, given.next()) else { return Err(missing()) };
    let text = first.to_str().map_err(|_| missing())?;
    let (scheme, credential) = text.split_once(' ').ok_or_else(missing)?;
    if scheme.eq_ignore_ascii_case("bearer") { Ok(credential.trim()) } else { Err(missing()) }
}

fn local(headers: &HeaderMap) -> Result<Caller, Problem> {
    let name = match headers.get(TENANT) {
        None => TENANT_DEFAULT,
        Some(name) => name.to_str().unwrap_or_default(),
    };
    let bad = |why: String| Problem::new(MALFORMED, format!("Statehouse-Tenant: {why}"));
    let tenant = Tenant::new(name).map_err(|error| bad(error.to_string()))?;
    if own::is_own(&tenant) {
        return Err(bad("this name is reserved".into()));
    }
    Ok(Caller { tenant, scopes: Scope::ALL.to_vec() })
}

/// Creates the authenticator of a configuration.
pub(crate) async fn authenticator(
    house: &Arc<House>,
    config: &crate::Config,
    secret: &secret::Secret,
) -> Result<Authenticator, crate::SetupError> {
    if !config.auth.is_required() {
        return Ok(Authenticator::open());
    }
    let ttl = crate::config::millis(config.limits.credential_cache_ms);
    let keys = config.auth.api_keys.then(|| keys::KeyCache::of(house.clone(), secret, ttl));
    let tokens = match &config.auth.jwt {
        None => None,
        Some(jwt) => Some(jwt::TokenVerifier::of(jwt, house.clock().clone()).await?),
    };
    Ok(Authenticator::with_credentials(keys, tokens))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn local_hosts_are_known_by_name_and_address() {
        for host in
            ["localhost", "LocalHost:80", "127.0.0.1:8080", "127.8.8.8", "[::1]:80", "app.localhost:3000"]
        {
            assert!(is_local(host), "{host}");
        }
        for host in ["example.com", "localhost.example.com", "10.0.0.1:80", "[::2]", "", "127.0.0.1.nip.io"] {
            assert!(!is_local(host), "{host}");
        }
    }

    #[test]
    fn open_mode_rejects_web_pages() {
        let gate = Authenticator::open();
        let check = |name: HeaderName, value: &'static str| {
            let headers = HeaderMap::from_iter([(name, HeaderValue::from_static(value))]);
            gate.check_origin(&headers, &Uri::from_static("/v1/x"), &["https://app.example".into()]).is_ok()
        };
        assert!(check(HOST, "127.0.0.1:80") && check(ORIGIN, "http://localhost:3000"));
        assert!(check(ORIGIN, "https://app.example"));
        assert!(
            !check(HOST, "evil.example") && !check(ORIGIN, "https://evil.example") && !check(ORIGIN, "null")
        );
    }

    #[test]
    fn bearers_are_read_strictly() {
        let read = |values: &[&'static str]| {
            let headers = values.iter().map(|value| (AUTHORIZATION, HeaderValue::from_static(value)));
            bearer(&headers.collect()).map(str::to_owned).map_err(|problem| problem.kind.code)
        };
        assert_eq!(read(&["Bearer abc"]), Ok("abc".into()));
        assert_eq!(read(&["bearer  abc "]), Ok("abc".into()));
        for values in [&[][..], &["abc"], &["Basic abc"], &["Bearer a", "Bearer b"]] {
            assert_eq!(read(values), Err("unauthenticated"));
        }
    }

    #[test]
    fn scopes_are_demanded_and_administrators_have_all() {
        let caller = |text: &str| Caller { tenant: Tenant::new("a").unwrap(), scopes: read_scopes(text) };
        assert!(caller("read openid").require(Scope::Read).is_ok());
        assert!(caller("read").require(Scope::Write).is_err());
        assert!(caller("write").require(Scope::Read).is_err());
        assert!(caller("admin").require(Scope::Write).is_ok());
    }
}
