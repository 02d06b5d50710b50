//! JSON Web Tokens of a trusted issuer, signed with HS256, RS256 or EdDSA.
//!
//! The source of the keys decides which algorithms are accepted, never the token: a shared secret allows only HS256, a key
//! set only RS256 and EdDSA, each with keys of its own type. This rules out `none` and algorithm confusion (a public
//! key used as an HMAC secret). A token with critical extensions (`crit`), or of a type that is no access token (`typ`), is
//! rejected. `exp` is required; `nbf`, `iss` and `aud` are checked; time is the clock of the house.

use std::sync::Arc;
use std::time::Duration;

use base64::Engine as _;
use base64::engine::general_purpose::URL_SAFE_NO_PAD as BASE64;
use jsonwebtoken::{Algorithm, DecodingKey, Validation};
use serde_json::{Map, Value as Json};
use statehouse::Claims;
use statehouse::audit::AuditActor;
use statehouse_store::{Clock, Tenant};

use super::jwks::KeySet;
use super::logins::RejectedLogin;
use super::{Caller, Scope, read_scopes};
use crate::SetupError;
use crate::config::{Jwt, JwtKeys};
use crate::problem::Problem;

/// Minimum length of a shared secret: the size of the digest.
pub const SECRET_BYTES_MIN: usize = 32;

/// Verifies tokens.
pub struct TokenVerifier {
    config: Jwt,
    clock: Arc<dyn Clock>,
    keys: TokenKeys,
}

enum TokenKeys {
    Secret(DecodingKey),
    Set(Box<KeySet>),
}

impl TokenVerifier {
    /// Creates a verifier. It fetches a key set once, so that a wrong address fails at startup.
    pub async fn of(
        config: &Jwt,
        clock: Arc<dyn Clock>,
        max_age: Duration,
    ) -> Result<TokenVerifier, SetupError> {
        let keys = match &config.keys {
            JwtKeys::Secret(secret) if secret.len() < SECRET_BYTES_MIN => {
                let why =
                    format!("the shared secret has {} bytes; it needs {SECRET_BYTES_MIN}", secret.len());
                return Err(SetupError::Tokens(why));
            }
            JwtKeys::Secret(secret) => TokenKeys::Secret(DecodingKey::from_secret(secret.as_bytes())),
            JwtKeys::JwksFile(path) => {
                TokenKeys::Set(Box::new(KeySet::in_file(path.clone(), clock.clone(), max_age).await?))
            }
            JwtKeys::JwksUrl(url) => {
                TokenKeys::Set(Box::new(KeySet::at_url(url, clock.clone(), max_age).await?))
            }
        };
        Ok(TokenVerifier { config: config.clone(), clock, keys })
    }

    /// The caller of a valid token, or why the token is not valid.
    pub async fn caller(&self, token: &str) -> Result<Result<Caller, RejectedLogin>, Problem> {
        let Some(claims) = self.claims(token).await else {
            return Ok(Err(RejectedLogin::unproved("token", "", "no valid signature, issuer or audience")));
        };
        let subject = claims.get("sub").and_then(Json::as_str).unwrap_or_default();
        let actor = AuditActor::token(subject);
        let rejected = |reason: &'static str| RejectedLogin { actor: actor.clone(), tenant: None, reason };
        if !self.is_timely(&claims) {
            return Ok(Err(rejected("expired, or not valid yet")));
        }
        let tenant = claims.get(&self.config.tenant_claim).and_then(Json::as_str);
        let tenant = tenant.and_then(|tenant| Tenant::new(tenant).ok());
        let scopes: Vec<Scope> = match claims.get(&self.config.scope_claim) {
            Some(Json::String(words)) => read_scopes(words),
            Some(Json::Array(words)) => words.iter().filter_map(Json::as_str).flat_map(read_scopes).collect(),
            _ => Vec::new(),
        };
        let credential = Some(format!("token:{subject}").into());
        let claims = (!scopes.contains(&Scope::Admin)).then(|| Arc::new(claims));
        let Some(tenant) = tenant else { return Ok(Err(rejected("it names no tenant"))) };
        Ok(Ok(Caller { scopes, credential, claims, actor: Arc::new(actor), ..Caller::anonymous(tenant) }))
    }

    /// The claims of a token with a valid signature, issuer and audience.
    async fn claims(&self, token: &str) -> Option<Claims> {
        if !has_acceptable_header(token) {
            return None;
        }
        let header = jsonwebtoken::decode_header(token).ok()?;
        let candidates = match &self.keys {
            TokenKeys::Secret(secret) => vec![(Algorithm::HS256, secret.clone())],
            TokenKeys::Set(set) => set.candidates(header.kid.as_deref()).await,
        };
        let fitting = candidates.into_iter().filter(|(algorithm, _)| *algorithm == header.alg);
        fitting.into_iter().find_map(|(algorithm, key)| {
            let mut validation = Validation::new(algorithm);
            // `is_timely` checks times with the clock of the house.
            validation.validate_exp = false;
            validation.validate_nbf = false;
            validation.required_spec_claims.clear();
            match &self.config.audience {
                Some(audience) => {
                    validation.set_audience(&[audience]);
                    validation.required_spec_claims.insert("aud".into());
                }
                None => validation.validate_aud = false,
            }
            if let Some(issuer) = &self.config.issuer {
                validation.set_issuer(&[issuer]);
                validation.required_spec_claims.insert("iss".into());
            }
            jsonwebtoken::decode::<Claims>(token, &key, &validation).ok().map(|data| data.claims)
        })
    }

    /// Whether the token is valid now. A token without `exp` is not accepted.
    fn is_timely(&self, claims: &Claims) -> bool {
        let now = self.clock.now().micros() as f64 / 1e6;
        let leeway = self.config.leeway_s as f64;
        let time = |name: &str| claims.get(name).and_then(Json::as_f64);
        let begun = match claims.get("nbf") {
            None => true,
            Some(_) => time("nbf").is_some_and(|begin| begin - leeway <= now),
        };
        begun && time("exp").is_some_and(|end| now < end + leeway)
    }
}

/// Whether the header of a token names no critical extension, and no type other than an access token.
fn has_acceptable_header(token: &str) -> bool {
    let header = token.split('.').next().and_then(|header| BASE64.decode(header).ok());
    let header: Option<Map<String, Json>> = header.and_then(|header| serde_json::from_slice(&header).ok());
    let Some(header) = header else { return false };
    let is_type_accepted = match header.get("typ") {
        None => true,
        Some(Json::String(given)) => {
            let given = given.to_ascii_lowercase();
            ["jwt", "at+jwt"].contains(&given.strip_prefix("application/").unwrap_or(&given))
        }
        Some(_) => false,
    };
    is_type_accepted && !header.contains_key("crit")
}
