//! Who calls, and what they may do.
//!
//! With credentials configured, every call below `/v1` needs `Authorization: Bearer` with a key of this house
//! ([`keys`]) or a token of a trusted issuer ([`jwt`]). Either names a tenant and scopes; nothing in the request can
//! change the tenant, so what belongs to another tenant is simply not there.
//!
//! Without credentials the server binds to loopback addresses only, and serves the tenant `default` or the one in the
//! header `Statehouse-Tenant`. A web page must not be able to use that door: a request that names a host or an origin
//! that is not local is turned away, since browsers send both, and a page cannot forge them.

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

/// Which tenant a caller without credentials means.
pub const TENANT: HeaderName = HeaderName::from_static("statehouse-tenant");
/// The tenant of callers who do not say.
pub const TENANT_DEFAULT: &str = "default";

/// What a caller may do.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Scope {
    /// Read rows and events.
    Read,
    /// Write rows.
    Write,
    /// Everything, and see how the server does.
    Admin,
}

impl Scope {
    /// Every scope.
    pub const ALL: [Scope; 3] = [Scope::Read, Scope::Write, Scope::Admin];

    /// As keys and tokens write it.
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

/// The text names no scope.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{0:?} is not a scope; there are read, write and admin")]
pub struct BadScope(pub String);

impl FromStr for Scope {
    type Err = BadScope;

    fn from_str(text: &str) -> Result<Scope, BadScope> {
        Scope::ALL.into_iter().find(|scope| scope.name() == text).ok_or_else(|| BadScope(text.to_owned()))
    }
}

/// Scopes as text, with spaces between them.
pub fn scopes_text(scopes: &[Scope]) -> String {
    scopes.iter().map(|scope| scope.name()).collect::<Vec<_>>().join(" ")
}

/// The scopes that a text names. Words that are no scopes of this server are passed over.
pub fn read_scopes(text: &str) -> Vec<Scope> {
    text.split_whitespace().filter_map(|word| word.parse().ok()).collect()
}

/// Somebody who was let in.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Caller {
    /// On whose behalf.
    pub tenant: Tenant,
    /// To do what.
    pub scopes: Vec<Scope>,
}

impl Caller {
    /// Demands a scope. Whoever administers may do everything.
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

/// The door.
pub struct Gate {
    ways: Option<Ways>,
}

/// How one can get in, where credentials are needed.
struct Ways {
    keys: Option<keys::Known>,
    tokens: Option<jwt::Tokens>,
}

impl Gate {
    /// A door that is open to whoever can reach it.
    pub fn open() -> Gate {
        Gate { ways: None }
    }

    /// A door for callers with keys, tokens, or both.
    pub fn guarded(keys: Option<keys::Known>, tokens: Option<jwt::Tokens>) -> Gate {
        Gate { ways: Some(Ways { keys, tokens }) }
    }

    /// Whether anybody gets in.
    pub fn is_open(&self) -> bool {
        self.ways.is_none()
    }

    /// Lets a caller in, or says why not.
    pub async fn admit(&self, headers: &HeaderMap) -> Result<Caller, Problem> {
        let Some(ways) = &self.ways else { return local(headers) };
        let credential = bearer(headers)?;
        let caller = match (&ways.keys, &ways.tokens) {
            (Some(keys), _) if credential.starts_with(keys::MARK) => keys.caller(credential).await?,
            (_, Some(tokens)) => tokens.caller(credential).await?,
            _ => None,
        };
        caller
            .filter(|caller| !own::is_own(&caller.tenant))
            .ok_or_else(|| unauthenticated("the key or token is not valid", ", error=\"invalid_token\""))
    }

    /// Turns web pages of other places away from an open door.
    pub fn check_origin(&self, headers: &HeaderMap, uri: &Uri, listed: &[String]) -> Result<(), Problem> {
        if !self.is_open() {
            return Ok(());
        }
        let refuse = |what: &str| {
            let detail =
                format!("without credentials this server answers local callers only, and {what} is not");
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

/// Whether a host, perhaps with a port, is this machine by its loopback name or address.
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
        return Err(bad("this name is the house's own".into()));
    }
    Ok(Caller { tenant, scopes: Scope::ALL.to_vec() })
}

/// The door that a configuration asks for.
pub(crate) async fn gate(
    house: &Arc<House>,
    config: &crate::Config,
    secret: &secret::Secret,
) -> Result<Gate, crate::SetupError> {
    if !config.auth.is_required() {
        return Ok(Gate::open());
    }
    let trusted_for = crate::config::millis(config.limits.credential_cache_ms);
    let keys = config.auth.api_keys.then(|| keys::Known::of(house.clone(), secret, trusted_for));
    let tokens = match &config.auth.jwt {
        None => None,
        Some(jwt) => Some(jwt::Tokens::of(jwt, house.clock().clone()).await?),
    };
    Ok(Gate::guarded(keys, tokens))
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
    fn an_open_door_is_not_for_web_pages() {
        let gate = Gate::open();
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
