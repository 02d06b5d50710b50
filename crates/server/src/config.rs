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
    /// Serve `/openapi.json` to callers without credentials.
    pub open_openapi: bool,
    /// Whether the console is served, and what it may do.
    pub console: ConsoleMode,
    /// What the console's pages say about this environment, such as `production`.
    pub console_label: String,
    /// The colour that tells this environment from others.
    pub console_colour: ConsoleColour,
    /// Limits in bytes, counts and time.
    pub limits: ServerLimits,
}

/// What the console may do.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum ConsoleMode {
    /// Whatever the caller may do.
    #[default]
    On,
    /// It shows everything that the caller may read, and writes nothing.
    ReadOnly,
    /// It is not served.
    Off,
}

/// Colours of the bar on the console's pages.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
#[expect(missing_docs, reason = "they are colours")]
pub enum ConsoleColour {
    Grey,
    #[default]
    Blue,
    Green,
    Orange,
    Red,
    Violet,
}

impl ConsoleColour {
    /// Its name, as in the settings.
    pub fn name(self) -> &'static str {
        match self {
            ConsoleColour::Grey => "grey",
            ConsoleColour::Blue => "blue",
            ConsoleColour::Green => "green",
            ConsoleColour::Orange => "orange",
            ConsoleColour::Red => "red",
            ConsoleColour::Violet => "violet",
        }
    }
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
    /// Certificates of the authorities that sign the certificates of clients. If set, a client must present one.
    #[serde(default)]
    pub client_authorities: Option<PathBuf>,
}

/// Limits for clients.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct ServerLimits {
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
    /// Requests of a tenant in flight.
    pub tenant_requests: usize,
    /// Requests of a key in flight.
    pub key_requests: usize,
    /// Event streams of a tenant.
    pub tenant_streams: usize,
    /// Event streams of a key.
    pub key_streams: usize,
    /// Requests of a tenant that wait for a change (`Prefer: wait`) or for something to do (`wait_ms`).
    pub tenant_waits: usize,
    /// Requests of a key that wait.
    pub key_waits: usize,
    /// Bytes of request bodies of a tenant in memory.
    pub tenant_body_bytes: usize,
    /// Bytes of request bodies of a key in memory.
    pub key_body_bytes: usize,
    /// Bytes that a tenant may write in a minute: bodies of writes and of their responses, and a fixed amount for each
    /// write. Writes beyond it are rejected until the time has passed.
    pub tenant_write_bytes_per_minute: u64,
    /// Writes that are handed to the store at once; further ones wait in a queue that is fair to tenants.
    pub concurrent_writes: usize,
    /// The same for one tenant while other tenants write too.
    pub tenant_concurrent_writes: usize,
    /// Rows that a tenant may have in the store; 0 for any number.
    pub tenant_rows: u64,
    /// Timers of a tenant that may be set; 0 for any number.
    pub tenant_timers: u64,
    /// Bytes that the records of a tenant may have in the log; 0 for any number.
    pub tenant_log_bytes: u64,
    /// Bytes of responses that a connection has not accepted yet.
    pub connection_unsent_bytes: usize,
    /// Bytes of responses that all connections of a tenant have not accepted yet.
    pub tenant_unsent_bytes: usize,
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

impl Default for ServerLimits {
    fn default() -> ServerLimits {
        ServerLimits {
            connections: 10_000,
            body_bytes: 4 << 20,
            header_bytes: 32 << 10,
            headers: 64,
            batch_calls: 98,
            streams: 1_000,
            tenant_requests: 1_000,
            key_requests: 500,
            tenant_streams: 200,
            key_streams: 100,
            tenant_waits: 1_000,
            key_waits: 500,
            tenant_body_bytes: 64 << 20,
            key_body_bytes: 32 << 20,
            tenant_write_bytes_per_minute: 1 << 30,
            concurrent_writes: 64,
            tenant_concurrent_writes: 8,
            tenant_rows: 0,
            tenant_timers: 0,
            tenant_log_bytes: 0,
            connection_unsent_bytes: 16 << 20,
            tenant_unsent_bytes: 64 << 20,
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
