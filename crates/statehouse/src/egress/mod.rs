//! Outbound requests and the process environment.
//!
//! Every request that leaves a house goes through a [`Transport`], and every secret that is not in its store comes from an
//! [`Environment`]. The house is given both ([`crate::House::with_egress`]), so that a test or a simulation can replace them. A
//! transport reports exactly what is known of a request ([`SendOutcome`]): the target answered, no byte was sent, or bytes were
//! sent and the result is unknown. The sender decides what follows from that.
//!
//! The feature `http` adds a transport for HTTP/1.1 with TLS ([`http::HttpTransport`]). Without it a house has no transport until
//! one is given, and outbound requests stay in the store.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use ::http::{HeaderMap, Method, Uri};
use async_trait::async_trait;
use statehouse_store::Clock;

use crate::product::booking::external_holds::ExternalHolds;
use crate::secret_keys::SecretKeys;

pub mod address;
#[cfg(feature = "http")]
pub mod http;

/// What a house reaches beyond its store. Clones share it.
#[derive(Clone, Debug)]
pub struct Egress {
    /// What sends requests; `None` if the build has no transport and none was given.
    pub transport: Option<Arc<dyn Transport>>,
    /// Where secrets are read that are not in the store.
    pub environment: Arc<dyn Environment>,
    /// Keys that encrypt the secrets in the store.
    pub secret_keys: SecretKeys,
    /// ExternalHolds before the store, for actions that workers run. [`crate::House::with_holds`] sets it.
    pub holds: Option<Arc<dyn ExternalHolds>>,
}

impl Default for Egress {
    fn default() -> Egress {
        #[cfg(feature = "http")]
        let transport: Option<Arc<dyn Transport>> = Some(Arc::new(http::HttpTransport::default()));
        #[cfg(not(feature = "http"))]
        let transport = None;
        Egress {
            transport,
            environment: Arc::new(ProcessEnvironment),
            secret_keys: SecretKeys::default(),
            holds: None,
        }
    }
}

/// Carries requests.
#[async_trait]
pub trait Transport: Send + Sync + fmt::Debug {
    /// Sends a request, once, and says what is known of it. It follows no redirect and uses no proxy. Time-outs are
    /// measured by the clock. Dropped before it is done, it has sent the request or not.
    async fn send(&self, outbound: &OutboundRequest, clock: &dyn Clock) -> SendOutcome;
}

/// A request that is to leave the house. Headers with secrets are marked as sensitive, so that nothing prints them.
#[derive(Clone, Debug)]
pub struct OutboundRequest {
    /// The method.
    pub method: Method,
    /// Where it goes: scheme, host, port, path and query.
    pub url: Uri,
    /// Headers, without those that HTTP itself needs.
    pub headers: HeaderMap,
    /// The body.
    pub body: Vec<u8>,
    /// How long finding and reaching the target may take.
    pub connect_timeout: Duration,
    /// How long the target may take from then on to have answered.
    pub timeout: Duration,
    /// How much of the answer's body is kept.
    pub response_max: usize,
    /// Whether it may go to one's own network (see [`address`]).
    pub allow_private: bool,
}

/// What is known of a request that was to be sent.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum SendOutcome {
    /// The target has answered.
    Answered(TargetResponse),
    /// Not one byte of the request left: the target cannot have acted on it.
    NotSent {
        /// Why not.
        why: String,
    },
    /// It must not be sent there.
    Forbidden {
        /// Why not.
        why: String,
    },
    /// It was sent, or may have been, and no response came: it is unknown whether the target acted on it.
    Unknown {
        /// What happened.
        why: String,
    },
}

/// What a target answered.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct TargetResponse {
    /// The status code.
    pub status: u16,
    /// When it wants to be asked again.
    pub retry_after: Option<Duration>,
    /// The beginning of the body.
    pub body: Vec<u8>,
    /// Whether that is all of it.
    pub complete: bool,
}

/// Where the process finds what its operator has set.
#[async_trait]
pub trait Environment: Send + Sync + fmt::Debug {
    /// What is set under this name, or stands in the file that `NAME_FILE` names, without the line break at its end.
    async fn read(&self, name: &str) -> Option<String>;
}

/// The environment of this process.
#[derive(Clone, Copy, Debug, Default)]
pub struct ProcessEnvironment;

#[async_trait]
impl Environment for ProcessEnvironment {
    async fn read(&self, name: &str) -> Option<String> {
        let value = match std::env::var(format!("{name}_FILE")) {
            Ok(path) => std::fs::read_to_string(path).ok(),
            Err(_) => std::env::var(name).ok(),
        };
        value.map(|value| value.trim_end_matches(['\r', '\n']).to_owned()).filter(|value| !value.is_empty())
    }
}
