//! What lies outside a house: other people's services, and the environment in which the process runs.
//!
//! Everything that leaves a house goes through a [`Courier`], and every secret that is not in its store comes from an
//! [`Environment`]. Both are given to the house ([`crate::House::with_outside`]), so that a test or a simulation can be the
//! outside. A courier says exactly what is known of a request ([`Sent`]): that an answer came, that not one byte of it
//! left, or that it left and nothing is known. Whoever sends decides what follows from that.
//!
//! With the feature `http` there is a courier that speaks HTTP/1.1, with TLS ([`http::HttpCourier`]). Without it a house has
//! none until one is given, and what it has to send stays where it is.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use ::http::{HeaderMap, Method, Uri};
use async_trait::async_trait;
use statehouse_store::Clock;

pub mod address;
#[cfg(feature = "http")]
pub mod http;

/// What a house reaches beyond its store. Clones share it.
#[derive(Clone, Debug)]
pub struct Outside {
    /// Who carries requests; nobody, if the build has no courier and none was given.
    pub courier: Option<Arc<dyn Courier>>,
    /// Where secrets are read that are not in the store.
    pub environment: Arc<dyn Environment>,
}

impl Default for Outside {
    fn default() -> Outside {
        #[cfg(feature = "http")]
        let courier: Option<Arc<dyn Courier>> = Some(Arc::new(http::HttpCourier::default()));
        #[cfg(not(feature = "http"))]
        let courier = None;
        Outside { courier, environment: Arc::new(Process) }
    }
}

/// Carries requests.
#[async_trait]
pub trait Courier: Send + Sync + fmt::Debug {
    /// Sends a request, once, and says what is known of it. It follows no redirect and uses no proxy. Time-outs are
    /// measured by the clock. Dropped before it is done, it has sent the request or not.
    async fn send(&self, parcel: &Parcel, clock: &dyn Clock) -> Sent;
}

/// A request that is to leave the house. Headers with secrets are marked as sensitive, so that nothing prints them.
#[derive(Clone, Debug)]
pub struct Parcel {
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
    pub answer_max: usize,
    /// Whether it may go to one's own network (see [`address`]).
    pub allow_private: bool,
}

/// What is known of a request that was to be sent.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Sent {
    /// The target has answered.
    Answered(Reply),
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
    /// It left, or may have, and no answer came: nobody here knows whether the target acted on it.
    Unknown {
        /// What happened.
        why: String,
    },
}

/// What a target answered.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Reply {
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
pub struct Process;

#[async_trait]
impl Environment for Process {
    async fn read(&self, name: &str) -> Option<String> {
        let value = match std::env::var(format!("{name}_FILE")) {
            Ok(path) => std::fs::read_to_string(path).ok(),
            Err(_) => std::env::var(name).ok(),
        };
        value.map(|value| value.trim_end_matches(['\r', '\n']).to_owned()).filter(|value| !value.is_empty())
    }
}
