//! Settings of a server. Every setting has a default that is safe on a laptop and usable in production.
//!
//! The command line fills this structure from flags, environment and file. Nothing here reads any of the three.

use std::path::PathBuf;
use std::time::Duration;

use serde::{Deserialize, Serialize};

/// Settings of a server.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Config {
    /// Accepted credentials.
    pub auth: Auth,
    /// Certificate and key; without them the server speaks plain HTTP.
    pub tls: Option<Tls>,
    /// Key material for cursor seals and key digests. Without it the house generates a secret and stores it.
    pub secret: Option<String>,
    /// Origins of web pages that may call this server, such as `https://app.example.com`. None by default.
    pub cors_origins: Vec<String>,
    /// Serve `/metrics` to callers without credentials.
    pub open_metrics: bool,
    /// Limits in bytes, counts and time.
    pub limits: Limits,
}

/// Accepted credentials. With neither, the server is in open mode and serves loopback callers only.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Auth {
    /// Accept API keys of this house (see [`crate::auth::keys`]).
    pub api_keys: bool,
    /// Accept tokens of a trusted issuer.
    pub jwt: Option<Jwt>,
}

impl Auth {
    /// Whether callers must authenticate.
    pub fn is_required(&self) -> bool {
        self.api_keys || self.jwt.is_some()
    }
}

/// Trusted tokens and how to read them.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Jwt {
    /// Source of the verification keys.
    #[serde(flatten)]
    pub keys: JwtKeys,
    /// The only accepted issuer (`iss`), if set.
    #[serde(default)]
    pub issuer: Option<String>,
    /// The audience a token must name (`aud`), if set.
    #[serde(default)]
    pub audience: Option<String>,
    /// The claim that names the tenant.
    #[serde(default = "tenant_claim")]
    pub tenant_claim: String,
    /// The claim that lists the scopes, as a list or as words separated by spaces.
    #[serde(default = "scope_claim")]
    pub scope_claim: String,
    /// Accepted clock difference to the issuer, in seconds.
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
    /// Default settings for tokens that these keys verify.
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

/// Source of an issuer's verification keys.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum JwtKeys {
    /// A secret shared with the issuer: HS256. At least 32 bytes.
    Secret(String),
    /// A JWKS document in a file: RS256 and EdDSA.
    JwksFile(PathBuf),
    /// A JWKS document at an `https` address: RS256 and EdDSA.
    JwksUrl(String),
}

/// Certificate and key, as PEM files.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Tls {
    /// The certificate and its intermediates.
    pub certificates: PathBuf,
    /// The private key.
    pub key: PathBuf,
}

/// Limits for clients.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Limits {
    /// Concurrent connections; further ones wait in the listen queue of the operating system.
    pub connections: usize,
    /// Bytes of a body after decompression. Slightly more than the largest plan.
    pub body_bytes: usize,
    /// Bytes of all headers of a request.
    pub header_bytes: usize,
    /// Headers of a request.
    pub headers: usize,
    /// Calls in a batch. A plan has 100 operations; two of them belong to the log.
    pub batch_calls: usize,
    /// Concurrent event streams.
    pub streams: usize,
    /// Timeout for the headers of a request and for a TLS handshake.
    pub header_timeout_ms: u64,
    /// Timeout for the body of a request.
    pub body_timeout_ms: u64,
    /// Time after which a connection without a request is closed.
    pub idle_timeout_ms: u64,
    /// Time in which a client must accept some part of a response.
    pub write_timeout_ms: u64,
    /// Upper bound of `Prefer: wait`.
    pub wait_max_ms: u64,
    /// Interval of heartbeats on an event stream.
    pub heartbeat_ms: u64,
    /// Time for requests in flight to finish when the server stops.
    pub drain_ms: u64,
    /// Time for which a verified key is cached.
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

/// A setting in milliseconds as a duration.
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
