//! The HTTP server of a house, generated from its actions.
//!
//! This crate knows no archetype. An action declares its name, input, output and refusals. The server derives its route
//! ([`http`](crate)), its entry in the OpenAPI document ([`openapi`]) and its problems ([`problem`]) from that. The rest
//! is what every action needs over HTTP: conditions, idempotency, cursors, problems, events, credentials and limits.
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

mod audit;
pub mod auth;
pub mod config;
pub mod console;
mod cors;
mod engine_clock;
mod events;
mod fair_queue;
#[cfg(feature = "fuzzing")]
pub mod fuzzing;
mod header_timeout;
mod http;
mod listen;
pub mod logs;
pub mod metrics;
pub mod openapi;
pub mod problem;
mod quota;
mod response_body;
pub mod seal;
mod tls;
mod unsent;
mod usage;
mod wait_hub;
mod write_rate;
mod write_timeout;

use std::future::Future;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use statehouse::House;
use tokio::net::TcpListener;
use tokio::sync::watch;

use crate::auth::secret::{HouseSecret, SystemRowError};
use crate::console::{ConsoleSources, ConsoleState};
use crate::http::HttpShared;
use crate::listen::Connections;
use crate::metrics::Metrics;
use crate::tls::TlsFiles;
pub use config::Config;

/// Parses JSON as request bodies are parsed: rejects duplicate members and integers beyond 64 bits.
pub fn strict_json(text: &str) -> Result<serde_json::Value, serde_json::Error> {
    http::strict::read(text)
}

/// Time for the last logins to be recorded when the server stops.
const LAST_LOGINS: Duration = Duration::from_secs(5);
/// Key derivation purpose of the cursor seal.
const CURSORS: &str = "cursors";

/// Why a server cannot start.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum SetupError {
    /// The system rows of the house could not be read or written.
    #[error(transparent)]
    Own(#[from] SystemRowError),
    /// The certificate or the key cannot be used.
    #[error("TLS: {0}")]
    Tls(String),
    /// The token keys cannot be loaded.
    #[error("tokens: {0}")]
    Tokens(String),
    /// A public address without credentials.
    #[error(
        "{0} is not a loopback address, and no credentials are configured: switch API keys on (--api-keys), configure \
         tokens, or listen on 127.0.0.1"
    )]
    PublicWithoutCredentials(SocketAddr),
    /// The socket failed.
    #[error("the socket: {0}")]
    Socket(#[from] std::io::Error),
}

impl Config {
    /// Checks that a server with these settings may listen on this address. Without credentials only loopback addresses
    /// are allowed.
    pub fn may_listen(&self, listener: &TcpListener) -> Result<(), SetupError> {
        let address = listener.local_addr()?;
        if self.auth.is_required() || address.ip().is_loopback() {
            return Ok(());
        }
        Err(SetupError::PublicWithoutCredentials(address))
    }
}

/// A configured server.
pub struct Server {
    shared: Arc<HttpShared>,
    tls: Option<Arc<TlsFiles>>,
    stop: watch::Sender<bool>,
}

impl Server {
    /// Creates a server for a house whose store is migrated, and starts the log followers of the house.
    pub async fn new(house: Arc<House>, config: Config) -> Result<Server, SetupError> {
        Server::with_console(house, config, ConsoleSources::default()).await
    }

    /// The same, with what the console shows beside the house.
    pub async fn with_console(
        house: Arc<House>,
        config: Config,
        sources: ConsoleSources,
    ) -> Result<Server, SetupError> {
        let reload = config::millis(config.limits.credential_cache_ms);
        let tls = config.tls.clone().map(|files| TlsFiles::load(files, reload)).transpose()?.map(Arc::new);
        let secret = HouseSecret::of(&house, config.secret.as_deref()).await?;
        let authenticator = auth::authenticator(&house, &config, &secret).await?;
        house.start_followers();
        let (stop, stopping) = watch::channel(false);
        let metrics = Arc::new(Metrics::default());
        let cursors = secret.seal(CURSORS);
        let console = ConsoleState::new(secret, sources);
        let shared = HttpShared::new(house, config, authenticator, cursors, console, metrics, stopping);
        shared.usage.start(&shared.stopping);
        Ok(Server { shared: Arc::new(shared), tls, stop })
    }

    /// Serves until `shutdown` resolves, then drains requests for at most `drain_ms`.
    ///
    /// Without credentials the listener must have a loopback address.
    pub async fn serve(
        self,
        listener: TcpListener,
        shutdown: impl Future<Output = ()>,
    ) -> Result<(), SetupError> {
        self.shared.config.may_listen(&listener)?;
        let address = listener.local_addr()?;
        if self.tls.is_none() && !address.ip().is_loopback() {
            tracing::warn!(
                target: "statehouse::http",
                %address,
                "credentials are sent over plain HTTP on a public address: configure tls, or listen on a loopback address \
                 behind a proxy that speaks TLS"
            );
        }
        let (logins, house) = (self.shared.authenticator.logins().clone(), self.shared.house.clone());
        let logins = tokio::spawn(logins.write(house, self.shared.stopping.clone()));
        let connections = Connections { shared: self.shared.clone(), tls: self.tls };
        tracing::info!(target: "statehouse::http", %address, house = self.shared.house.name(), "listening");
        listen::serve(listener, connections, shutdown, self.stop).await;
        let written = tokio::select! {
            written = logins => written.is_ok(),
            () = self.shared.house.clock().sleep(LAST_LOGINS) => false,
        };
        if !written {
            tracing::error!(target: "statehouse::audit", "the last logins were not recorded");
        }
        tracing::info!(target: "statehouse::http", %address, "stopped");
        Ok(())
    }
}

impl std::fmt::Debug for Server {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Server({})", self.shared.house.name())
    }
}
