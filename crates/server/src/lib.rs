//! The HTTP surface of a house, made from its actions.
//!
//! Nothing here knows an archetype. An action declares its name, input, output and refusals; from that follow its route
//! ([`http`](crate)), its entry in the OpenAPI document ([`openapi`]) and its problems ([`problem`]). What is written by
//! hand is what HTTP needs whatever the action: conditions, idempotency, cursors, problems, events, credentials, limits.
//!
//! ```no_run
//! use std::sync::Arc;
//! use statehouse::{Blueprint, House};
//! use statehouse_server::{Config, Server};
//! use statehouse_store::{Migrate, ModelStore};
//!
//! # async fn run() -> Result<(), Box<dyn std::error::Error>> {
//! let text = "[house]\nname = \"shop\"\n[entity.profile]\nkey = { user_id = \"int\" }\n";
//! let blueprint = Blueprint::read("statehouse.toml", text)?;
//! let house = Arc::new(House::over(Arc::new(ModelStore::new()), &blueprint)?);
//! house.migrate(Migrate::Apply).await?;
//! let server = Server::new(house, Config::default()).await?;
//! let listener = tokio::net::TcpListener::bind("127.0.0.1:8080").await?;
//! server.serve(listener, std::future::pending()).await?;
//! # Ok(())
//! # }
//! ```

pub mod auth;
pub mod config;
mod cors;
mod events;
mod http;
mod listen;
pub mod logs;
pub mod metrics;
pub mod openapi;
pub mod problem;
pub mod seal;
mod tls;

use std::future::Future;
use std::net::SocketAddr;
use std::sync::Arc;

use statehouse::House;
use tokio::net::TcpListener;
use tokio::sync::watch;
use tokio_rustls::TlsAcceptor;

use crate::auth::secret::{OwnError, Secret};
use crate::http::Shared;
use crate::listen::Connections;
use crate::metrics::Metrics;
pub use config::Config;

/// Reads JSON as bodies of requests are read: no member of an object twice, no integer that does not fit 64 bits.
pub fn strict_json(text: &str) -> Result<serde_json::Value, serde_json::Error> {
    http::strict::read(text)
}

/// What cursors are sealed for.
const CURSORS: &str = "cursors";

/// Why a server cannot start.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum SetupError {
    /// The house's own rows could not be read or written.
    #[error(transparent)]
    Own(#[from] OwnError),
    /// The certificate or the key cannot be used.
    #[error("TLS: {0}")]
    Tls(String),
    /// Tokens cannot be checked.
    #[error("tokens: {0}")]
    Tokens(String),
    /// Anybody could come in from anywhere.
    #[error(
        "{0} is not a loopback address, and no credentials are configured: switch API keys on (--api-keys), configure \
         tokens, or listen on 127.0.0.1"
    )]
    OpenToTheWorld(SocketAddr),
    /// The socket failed.
    #[error("the socket: {0}")]
    Socket(#[from] std::io::Error),
}

impl Config {
    /// Whether a server with these settings may be reached at the listener's address: without credentials only at a
    /// loopback one.
    pub fn may_listen(&self, listener: &TcpListener) -> Result<(), SetupError> {
        let address = listener.local_addr()?;
        if self.auth.is_required() || address.ip().is_loopback() {
            return Ok(());
        }
        Err(SetupError::OpenToTheWorld(address))
    }
}

/// A server, ready to serve.
pub struct Server {
    shared: Arc<Shared>,
    tls: Option<TlsAcceptor>,
    stop: watch::Sender<bool>,
}

impl Server {
    /// A server for a house whose store has been migrated to. Starts what follows the log.
    pub async fn new(house: Arc<House>, config: Config) -> Result<Server, SetupError> {
        let tls = config.tls.as_ref().map(tls::acceptor).transpose()?;
        let secret = Secret::of(&house, config.secret.as_deref()).await?;
        let gate = auth::gate(&house, &config, &secret).await?;
        house.start_followers();
        let (stop, stopping) = watch::channel(false);
        let metrics = Arc::new(Metrics::default());
        let shared = Shared::new(house, config, gate, secret.seal(CURSORS), metrics, stopping);
        Ok(Server { shared: Arc::new(shared), tls, stop })
    }

    /// Serves until `shutdown` is ready, and then until what is under way has finished or the time for that is over.
    ///
    /// Without credentials the listener must have a loopback address.
    pub async fn serve(
        self,
        listener: TcpListener,
        shutdown: impl Future<Output = ()>,
    ) -> Result<(), SetupError> {
        self.shared.config.may_listen(&listener)?;
        let address = listener.local_addr()?;
        let connections = Connections { shared: self.shared.clone(), tls: self.tls };
        tracing::info!(target: "statehouse::http", %address, house = self.shared.house.name(), "listening");
        listen::serve(listener, connections, shutdown, self.stop).await;
        tracing::info!(target: "statehouse::http", %address, "stopped");
        Ok(())
    }
}

impl std::fmt::Debug for Server {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Server({})", self.shared.house.name())
    }
}
