//! What a server can be told. Every setting has a default that is safe on a laptop and sensible in production.
//!
//! The structure is plain and flat in meaning: the command line fills it from flags, environment and file, in that
//! order, and nothing here reads any of the three.

use std::path::PathBuf;
use std::time::Duration;

use serde::{Deserialize, Serialize};

/// How a server serves.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Config {
    /// Who may come in.
    pub auth: Auth,
    /// Certificate and key; without them the server speaks plain HTTP.
    pub tls: Option<Tls>,
    /// What signs cursors and digests keys. Without it a secret is made once and kept in the store.
    pub secret: Option<String>,
    /// Origins of web pages that may call this server, such as `https://app.example.com`. None by default.
    pub cors_origins: Vec<String>,
    /// Whether `/metrics` is open to callers without credentials.
    pub open_metrics: bool,
    /// What a client may take, in bytes, numbers and time.
    pub limits: Limits,
}

/// Who may come in. With neither, everybody who can reach a loopback address.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Auth {
    /// Callers with a key of this house (see [`crate::auth::keys`]).
    pub api_keys: bool,
    /// Callers with a token of an issuer that is trusted.
    pub jwt: Option<Jwt>,
}

impl Auth {
    /// Whether callers must say who they are.
    pub fn is_required(&self) -> bool {
        self.api_keys || self.jwt.is_some()
    }
}

/// Which tokens are trusted, and how they are read.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Jwt {
    /// Where the keys come from.
    #[serde(flatten)]
    pub keys: JwtKeys,
    /// The only issuer that is accepted (`iss`), if given.
    #[serde(default)]
    pub issuer: Option<String>,
    /// The audience that a token must name (`aud`), if given.
    #[serde(default)]
    pub audience: Option<String>,
    /// The claim that names the tenant.
    #[serde(default = "tenant_claim")]
    pub tenant_claim: String,
    /// The claim that lists the scopes: words with spaces between them, or a list.
    #[serde(default = "scope_claim")]
    pub scope_claim: String,
    /// How far the issuer's clock may be off, in seconds.
    #[serde(default = "leeway_s")]
    pub leeway_s: u64,
}

fn tenant_claim() -> String {
    "tenant".into()
}

fn scope_claim() -> String {
    "scope".into()
}

fn leeway_s() -> u64 {
    30
}

impl Jwt {
    /// The usual reading of tokens that these keys sign.
    pub fn with(keys: JwtKeys) -> Jwt {
        Jwt {
            keys,
            issuer: None,
            audience: None,
            tenant_claim: tenant_claim(),
            scope_claim: scope_claim(),
            leeway_s: leeway_s(),
        }
    }
}

/// Where the keys of an issuer come from.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum JwtKeys {
    /// A secret that is shared with the issuer: HS256. At least 32 bytes.
    Secret(String),
    /// A JWKS document in a file, read again when it changes: RS256 and EdDSA.
    JwksFile(PathBuf),
    /// A JWKS document at an `https` address, fetched again every few minutes: RS256 and EdDSA.
    JwksUrl(String),
}

/// Certificate and key, as PEM files.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Tls {
    /// The certificate and those between it and the root.
    pub certificates: PathBuf,
    /// The private key.
    pub key: PathBuf,
}

/// What a client may take.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Limits {
    /// Connections at once; more wait in the operating system's queue.
    pub connections: usize,
    /// Bytes of a body, after decompression. A little over the largest plan.
    pub body_bytes: usize,
    /// Bytes of all headers of a request.
    pub header_bytes: usize,
    /// Headers of a request.
    pub headers: usize,
    /// Calls in a batch. A plan has 100 operations, and two of them are the log's.
    pub batch_calls: usize,
    /// Event streams at once.
    pub streams: usize,
    /// Time for the headers of a request to arrive, in milliseconds; for a TLS handshake too.
    pub header_timeout_ms: u64,
    /// Time for the body of a request to arrive.
    pub body_timeout_ms: u64,
    /// Time that a connection may stay open without a request.
    pub idle_timeout_ms: u64,
    /// Time that a client may take to accept a part of an answer.
    pub write_timeout_ms: u64,
    /// The longest that `Prefer: wait` waits.
    pub wait_max_ms: u64,
    /// The pause after which an event stream says that it is still there.
    pub heartbeat_ms: u64,
    /// Time for requests under way to finish when the server stops.
    pub drain_ms: u64,
    /// Time for which a key or token set is trusted before it is looked at again.
    pub credential_cache_ms: u64,
}

impl Default for Limits {
    fn default() -> Limits {
        Limits {
            connections: 10_000,
            body_bytes: 4 << 20,
            header_bytes: 32 << 10,
            headers: 64,
            batch_calls: 98,
            streams: 1_000,
            header_timeout_ms: 10_000,
            body_timeout_ms: 30_000,
            idle_timeout_ms: 75_000,
            write_timeout_ms: 30_000,
            wait_max_ms: 60_000,
            heartbeat_ms: 15_000,
            drain_ms: 25_000,
            credential_cache_ms: 5_000,
        }
    }
}

/// A setting in milliseconds.
pub(crate) fn millis(setting: u64) -> Duration {
    Duration::from_millis(setting)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_empty_configuration_is_the_default_and_unknown_settings_are_refused() {
        assert_eq!(serde_json::from_str::<Config>("{}").unwrap(), Config::default());
        assert!(serde_json::from_str::<Config>("{\"limit\": {}}").is_err());
        let jwt = serde_json::json!({"auth": {"jwt": {"jwks_file": "keys.json", "issuer": "me"}}});
        let config: Config = serde_json::from_value(jwt).unwrap();
        assert!(config.auth.is_required());
        assert_eq!(config.auth.jwt.unwrap().tenant_claim, "tenant");
    }
}
