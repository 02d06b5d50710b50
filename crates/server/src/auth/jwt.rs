//! Tokens of a trusted issuer: JSON Web Tokens signed with HS256, RS256 or EdDSA.
//!
//! Which algorithms are accepted follows from where the keys come from, never from the token: a shared secret means
//! HS256 and nothing else, a key set means RS256 and EdDSA, each with the keys of its own kind. So neither `none` nor
//! the trick of signing with a public key as a secret can work. `exp` is required; `nbf`, `iss` and `aud` are checked;
//! time is the house's clock.

use std::sync::Arc;

use jsonwebtoken::{Algorithm, DecodingKey, Validation};
use serde_json::{Map, Value as Json};
use statehouse_store::{Clock, Tenant};

use super::jwks::KeySet;
use super::{Caller, read_scopes};
use crate::SetupError;
use crate::config::{Jwt, JwtKeys};
use crate::problem::Problem;

/// The least length of a shared secret: as long as the digest that it keys.
pub const SECRET_BYTES_MIN: usize = 32;

/// Reads tokens.
pub struct Tokens {
    config: Jwt,
    clock: Arc<dyn Clock>,
    keys: Keys,
}

enum Keys {
    Secret(DecodingKey),
    Set(Box<KeySet>),
}

type Claims = Map<String, Json>;

impl Tokens {
    /// Reads tokens as configured. A key set is fetched once, so that a wrong address shows at once.
    pub async fn of(config: &Jwt, clock: Arc<dyn Clock>) -> Result<Tokens, SetupError> {
        let keys = match &config.keys {
            JwtKeys::Secret(secret) if secret.len() < SECRET_BYTES_MIN => {
                let why =
                    format!("the shared secret has {} bytes; it needs {SECRET_BYTES_MIN}", secret.len());
                return Err(SetupError::Tokens(why));
            }
            JwtKeys::Secret(secret) => Keys::Secret(DecodingKey::from_secret(secret.as_bytes())),
            JwtKeys::JwksFile(path) => {
                Keys::Set(Box::new(KeySet::in_file(path.clone(), clock.clone()).await?))
            }
            JwtKeys::JwksUrl(url) => Keys::Set(Box::new(KeySet::at_url(url, clock.clone()).await?)),
        };
        Ok(Tokens { config: config.clone(), clock, keys })
    }

    /// Whom a token lets in; `None` if it does not.
    pub async fn caller(&self, token: &str) -> Result<Option<Caller>, Problem> {
        let Some(claims) = self.claims(token).await else { return Ok(None) };
        if !self.is_timely(&claims) {
            return Ok(None);
        }
        let tenant = claims.get(&self.config.tenant_claim).and_then(Json::as_str);
        let tenant = tenant.and_then(|tenant| Tenant::new(tenant).ok());
        let scopes = match claims.get(&self.config.scope_claim) {
            Some(Json::String(words)) => read_scopes(words),
            Some(Json::Array(words)) => words.iter().filter_map(Json::as_str).flat_map(read_scopes).collect(),
            _ => Vec::new(),
        };
        Ok(tenant.map(|tenant| Caller { tenant, scopes }))
    }

    /// The claims of a token whose signature, issuer and audience are right.
    async fn claims(&self, token: &str) -> Option<Claims> {
        let header = jsonwebtoken::decode_header(token).ok()?;
        let candidates = match &self.keys {
            Keys::Secret(secret) => vec![(Algorithm::HS256, secret.clone())],
            Keys::Set(set) => set.candidates(header.kid.as_deref()).await,
        };
        let fitting = candidates.into_iter().filter(|(algorithm, _)| *algorithm == header.alg);
        fitting.into_iter().find_map(|(algorithm, key)| {
            let mut validation = Validation::new(algorithm);
            // Times are compared here, with the house's clock.
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

    /// Whether the token has begun and has not ended. One without an end is not accepted.
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
