//! Authentication and authorization.
//!
//! With credentials configured, every call below `/v1` needs `Authorization: Bearer` with an API key of this house
//! ([`keys`]) or a token of a trusted issuer ([`jwt`]). The credential determines tenant and scopes; nothing in the request
//! can change the tenant.
//!
//! Without credentials (open mode) the server binds to loopback addresses only, and serves the tenant `default` or the
//! one in the header `Statehouse-Tenant`. [`open_mode`] rejects requests of web pages and of proxies.

pub mod jwks;
pub mod jwt;
pub mod keys;
pub mod logins;
pub mod networks;
pub mod open_mode;
pub mod scope;
pub mod secret;

use std::sync::Arc;

use http::header::{AUTHORIZATION, WWW_AUTHENTICATE};
use http::{HeaderMap, HeaderName};
use statehouse::audit::AuditActor;
use statehouse::{Claims, House, Principal, system};
use statehouse_store::Tenant;

use crate::problem::{FORBIDDEN, Problem, UNAUTHENTICATED};
use logins::{LoginLog, RejectedLogin};
use networks::PeerAddress;
pub use scope::{Access, ActionSet, BadScope, Scope, read_scopes, scopes_text};

/// Tenant of a caller in open mode.
pub const TENANT: HeaderName = HeaderName::from_static("statehouse-tenant");
/// Tenant of callers in open mode that name none.
pub const TENANT_DEFAULT: &str = "default";

/// An authenticated caller.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Caller {
    /// Tenant of all its calls.
    pub tenant: Tenant,
    /// Granted scopes.
    pub scopes: Vec<Scope>,
    /// Prefix of the key, or subject of the token. `None` in open mode.
    pub credential: Option<Arc<str>>,
    /// The claims of a token, whose holder is governed by the rules of resources. `None` for operators: API keys, open mode and
    /// tokens with the scope `admin`.
    pub claims: Option<Arc<Claims>>,
    /// What log and audit say of it.
    pub actor: Arc<AuditActor>,
    /// Where it comes from.
    pub peer: PeerAddress,
}

impl Caller {
    /// A caller without credential, scopes and claims.
    pub fn anonymous(tenant: Tenant) -> Caller {
        let actor = open_mode::actor().clone();
        Caller {
            tenant,
            scopes: Vec::new(),
            credential: None,
            claims: None,
            actor,
            peer: PeerAddress::default(),
        }
    }

    /// Who it is, and where it comes from.
    pub fn audited(&self) -> AuditActor {
        (*self.actor).clone().at(self.peer.0)
    }

    /// On whose behalf its calls are made.
    pub fn principal(&self) -> Principal {
        let actor = Some(self.actor.credential().clone());
        Principal { tenant: self.tenant.clone(), claims: self.claims.clone(), actor }
    }

    /// Distinguishes the operations of end users: an answer is repeated to the caller that got it first, and to no other.
    pub(crate) fn operation_owner(&self) -> &[u8] {
        let subject = self.claims.as_ref().and_then(|claims| claims.get("sub"));
        subject.and_then(serde_json::Value::as_str).unwrap_or_default().as_bytes()
    }

    /// Whether its scopes permit this.
    pub fn may(&self, access: Access<'_>) -> bool {
        self.scopes.iter().any(|scope| scope.permits(access))
    }

    /// Requires that its scopes permit this.
    pub fn require(&self, access: Access<'_>) -> Result<(), Problem> {
        if self.may(access) {
            return Ok(());
        }
        let granted = match scopes_text(&self.scopes) {
            none if none.is_empty() => "none".to_owned(),
            scopes => scopes,
        };
        let detail = format!("this call needs the scope {access}; the caller has {granted}");
        let challenge =
            format!("Bearer realm=\"statehouse\", error=\"insufficient_scope\", scope=\"{access}\"");
        Err(Problem::new(FORBIDDEN, detail).header(WWW_AUTHENTICATE, &challenge))
    }
}

/// Authenticates requests.
pub struct Authenticator {
    methods: Option<Methods>,
    logins: Arc<LoginLog>,
}

/// The configured authentication methods.
struct Methods {
    keys: Option<keys::KeyCache>,
    tokens: Option<jwt::TokenVerifier>,
}

impl Authenticator {
    /// Open mode: no credentials.
    pub fn open() -> Authenticator {
        Authenticator { methods: None, logins: Arc::default() }
    }

    /// Requires API keys, tokens, or either.
    pub fn with_credentials(
        keys: Option<keys::KeyCache>,
        tokens: Option<jwt::TokenVerifier>,
    ) -> Authenticator {
        Authenticator { methods: Some(Methods { keys, tokens }), logins: Arc::default() }
    }

    /// Whether the server is in open mode.
    pub fn is_open(&self) -> bool {
        self.methods.is_none()
    }

    /// Authenticates a request by its headers.
    pub async fn authenticate(&self, headers: &HeaderMap, peer: PeerAddress) -> Result<Caller, Problem> {
        let Some(methods) = &self.methods else {
            return open_mode::caller(headers).map(|caller| Caller { peer, ..caller });
        };
        let credential = bearer(headers)?;
        let caller = match (&methods.keys, &methods.tokens) {
            (Some(keys), _) if credential.starts_with(keys::MARK) => keys.caller(credential, peer).await?,
            (_, Some(tokens)) => tokens.caller(credential).await?,
            _ => Err(RejectedLogin::unproved("unknown", "", "a credential of another kind")),
        };
        let caller = caller.and_then(|caller| match system::is_system(&caller.tenant) {
            true => Err(RejectedLogin::unproved("token", "", "its tenant is reserved")),
            false => Ok(Caller { peer, ..caller }),
        });
        caller.map_err(|rejected| {
            self.logins.failed(&rejected, peer.0);
            unauthenticated("the key or token is not valid", ", error=\"invalid_token\"")
        })
    }

    /// Logins for the audit.
    pub fn logins(&self) -> &Arc<LoginLog> {
        &self.logins
    }
}

fn unauthenticated(detail: &str, error: &str) -> Problem {
    Problem::new(UNAUTHENTICATED, detail)
        .header(WWW_AUTHENTICATE, &format!("Bearer realm=\"statehouse\"{error}"))
}

pub(crate) fn bearer(headers: &HeaderMap) -> Result<&str, Problem> {
    let mut given = headers.get_all(AUTHORIZATION).iter();
    let missing = || unauthenticated("send `Authorization: Bearer` with a key or a token", "");
    let (first, None) = (given.next().ok_or_else(missing)?, given.next()) else { return Err(missing()) };
    let text = first.to_str().map_err(|_| missing())?;
    let (scheme, credential) = text.split_once(' ').ok_or_else(missing)?;
    if scheme.eq_ignore_ascii_case("bearer") { Ok(credential.trim()) } else { Err(missing()) }
}

/// Creates the authenticator of a configuration.
pub(crate) async fn authenticator(
    house: &Arc<House>,
    config: &crate::Config,
    secret: &secret::HouseSecret,
) -> Result<Authenticator, crate::SetupError> {
    if !config.auth.is_required() {
        return Ok(Authenticator::open());
    }
    let ttl = crate::config::millis(config.limits.credential_cache_ms);
    let keys = config.auth.api_keys.then(|| keys::KeyCache::of(house.clone(), secret, ttl));
    let tokens = match &config.auth.jwt {
        None => None,
        Some(jwt) => Some(jwt::TokenVerifier::of(jwt, house.clock().clone(), ttl).await?),
    };
    Ok(Authenticator::with_credentials(keys, tokens))
}

#[cfg(test)]
mod tests {
    use super::*;
    use http::HeaderValue;

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
}
