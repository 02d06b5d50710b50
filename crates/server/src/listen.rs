//! The accept loop and the limits of every connection.
//!
//! Without timers a client that sends half a request, or reads half a response, holds its connection for ever. Every
//! wait therefore has a timeout:
//!
//! | while | timeout |
//! |---|---|
//! | the TLS handshake runs | `header_timeout_ms` |
//! | the headers of a request arrive | `header_timeout_ms`, in `header_timeout.rs` |
//! | the body of a request arrives | `body_timeout_ms`, in `http/body.rs` |
//! | no request is in flight | `idle_timeout_ms`, here |
//! | the socket accepts no bytes | `write_timeout_ms`, in `write_timeout.rs` |
//! | the client does not accept the next chunk of a response | `write_timeout_ms`, in `response_body.rs` |
//!
//! Connections beyond the limit wait in the listen queue of the operating system. To stop, the loop accepts no more
//! connections, asks every connection to finish its requests, ends streams, waits for connections and pending writes, and
//! aborts the rest after `drain_ms`.

use std::convert::Infallible;
use std::future::Future;
use std::io;
use std::pin::pin;
use std::sync::Arc;
use std::time::Duration;

use hyper::service::service_fn;
use hyper_util::rt::{TokioIo, TokioTimer};
use hyper_util::server::conn::auto;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{Semaphore, watch};
use tokio::task::JoinSet;

use crate::auth::networks::PeerAddress;
use crate::config::millis;
use crate::header_timeout::HeaderTimeout;
use crate::http::{HttpRequest, HttpShared, handle_request};
use crate::metrics::GaugeGuard;
use crate::response_body::{ConnectionActivity, Stall, StreamExecutor, TrackedBody};
use crate::tls::TlsFiles;
use crate::unsent::{ConnectionUnsent, UnsentGuard};
use crate::write_timeout::WriteTimeout;

/// Pause after a failed accept, for example because the process is out of file descriptors.
const ACCEPT_PAUSE: Duration = Duration::from_millis(50);
/// hyper's limits are this much higher than ours, so that a request slightly over the limit gets a problem document and
/// not a bare status.
const LIMIT_MARGIN: usize = 4;
/// Concurrent requests on one HTTP/2 connection.
const HTTP2_STREAMS: u32 = 100;
/// Bytes that one HTTP/2 stream may buffer for the socket.
const HTTP2_SEND_BUFFER_BYTES: usize = 64 << 10;
/// Minimum interval between two checks of a connection's timeouts.
const CHECK_INTERVAL_MIN: Duration = Duration::from_millis(10);

/// State shared by all connections.
#[derive(Clone)]
pub(crate) struct Connections {
    pub shared: Arc<HttpShared>,
    pub tls: Option<Arc<TlsFiles>>,
}

/// Accepts connections until `shutdown` resolves, then drains them.
pub(crate) async fn serve(
    listener: TcpListener,
    connections: Connections,
    shutdown: impl Future<Output = ()>,
    stop: watch::Sender<bool>,
) {
    let (limits, clock) = (&connections.shared.config.limits, connections.shared.house.clock());
    let permits = Arc::new(Semaphore::new(limits.connections));
    let mut open = JoinSet::new();
    let mut shutdown = pin!(shutdown);
    loop {
        let accepted = tokio::select! {
            biased;
            () = &mut shutdown => break,
            accepted = accept(&listener, &permits) => accepted,
            Some(_) = open.join_next() => continue,
        };
        match accepted {
            Ok((stream, peer, permit)) => {
                let connections = connections.clone();
                open.spawn(async move {
                    connections.run(stream, peer).await;
                    drop(permit);
                });
            }
            Err(error) => {
                tracing::warn!(target: "statehouse::http", %error, "accept failed");
                clock.sleep(ACCEPT_PAUSE).await;
            }
        }
    }
    drop(listener);
    stop.send_replace(true);
    let drained = async {
        while open.join_next().await.is_some() {}
        connections.shared.pending_writes.finished().await;
    };
    tokio::select! {
        () = drained => {}
        () = clock.sleep(millis(limits.drain_ms)) => {
            tracing::warn!(target: "statehouse::http", "drain timeout: remaining requests were aborted");
        }
    }
}

async fn accept(
    listener: &TcpListener,
    permits: &Arc<Semaphore>,
) -> io::Result<(TcpStream, PeerAddress, tokio::sync::OwnedSemaphorePermit)> {
    let permit = permits.clone().acquire_owned().await.map_err(io::Error::other)?;
    let (stream, peer) = listener.accept().await?;
    Ok((stream, PeerAddress(Some(peer.ip())), permit))
}

impl Connections {
    async fn run(self, stream: TcpStream, peer: PeerAddress) {
        let (metrics, limits) = (&self.shared.metrics, &self.shared.config.limits);
        metrics.accepted.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
        let _counted = GaugeGuard::enter(metrics, |metrics| &metrics.connections);
        // Responses are complete when written; Nagle's algorithm would only delay them.
        let _ = stream.set_nodelay(true);
        let stream =
            WriteTimeout::new(stream, self.shared.house.clock().clone(), millis(limits.write_timeout_ms));
        let Some(tls) = self.tls.clone() else { return self.serve_connection(stream, peer).await };
        let secured = tokio::select! {
            secured = async { tls.acceptor(&**self.shared.house.clock()).await.accept(stream).await } => secured,
            () = self.shared.house.clock().sleep(millis(limits.header_timeout_ms)) => return,
        };
        match secured {
            Ok(stream) => self.serve_connection(stream, peer).await,
            Err(error) => tracing::debug!(target: "statehouse::http", %error, "TLS handshake failed"),
        }
    }

    async fn serve_connection(
        &self,
        stream: impl AsyncRead + AsyncWrite + Unpin + Send + 'static,
        peer: PeerAddress,
    ) {
        let activity = ConnectionActivity::default();
        let service = service_fn({
            let (shared, activity) = (self.shared.clone(), activity.clone());
            let unsent = ConnectionUnsent::default();
            move |mut request: HttpRequest| {
                request.extensions_mut().insert(peer);
                let active = activity.begin();
                let (shared, unsent) = (shared.clone(), unsent.clone());
                async move {
                    let mut response = handle_request(shared, request, &unsent).await;
                    let unsent = response.extensions_mut().remove::<Arc<UnsentGuard>>();
                    Ok::<_, Infallible>(response.map(|body| TrackedBody::new(body, active, unsent)))
                }
            }
        });
        let builder = self.builder();
        let mut connection = pin!(builder.serve_connection_with_upgrades(
            TokioIo::new(HeaderTimeout::new(stream, activity.clone())),
            service
        ));
        let (clock, mut stopping) = (self.shared.house.clock(), self.shared.stopping.clone());
        let mut is_stopping = false;
        loop {
            tokio::select! {
                biased;
                ended = connection.as_mut() => {
                    if let Err(error) = ended {
                        tracing::debug!(target: "statehouse::http", %error, "connection failed");
                    }
                    return;
                }
                _ = stopping.changed(), if !is_stopping => {
                    is_stopping = true;
                    connection.as_mut().graceful_shutdown();
                }
                () = clock.sleep(self.check_interval(&activity)) => {
                    if self.must_close(&activity) {
                        return;
                    }
                }
            }
        }
    }

    /// Time until the timeouts of a connection are checked again.
    fn check_interval(&self, activity: &ConnectionActivity) -> Duration {
        let limits = &self.shared.config.limits;
        // A request may begin at any time, so an idle connection is checked as often as a busy one.
        let until_idle = millis(limits.idle_timeout_ms).saturating_sub(activity.idle().unwrap_or_default());
        let often = millis(limits.write_timeout_ms.min(limits.header_timeout_ms)) / 2;
        until_idle.min(often).max(CHECK_INTERVAL_MIN)
    }

    /// Whether a connection is idle for too long, or its client does not accept responses.
    fn must_close(&self, activity: &ConnectionActivity) -> bool {
        let limits = &self.shared.config.limits;
        if activity.idle().is_some_and(|idle| idle >= millis(limits.idle_timeout_ms)) {
            return true;
        }
        if activity.awaits_headers().is_some_and(|time| time >= millis(limits.header_timeout_ms)) {
            return true;
        }
        let stall = activity.stalled(millis(limits.write_timeout_ms));
        let (count, close) = match stall {
            Stall::None => return false,
            Stall::Reset(count) => (count, false),
            Stall::Close(count) => (count, true),
        };
        self.shared.metrics.stalled.fetch_add(count as u64, std::sync::atomic::Ordering::Relaxed);
        tracing::debug!(target: "statehouse::http", count, close, "the client does not accept responses");
        close
    }

    fn builder(&self) -> auto::Builder<StreamExecutor> {
        let limits = &self.shared.config.limits;
        let mut builder = auto::Builder::new(StreamExecutor);
        builder
            .http1()
            .timer(TokioTimer::new())
            // hyper's timer runs while a connection is idle too, which has a timeout of its own here.
            .header_read_timeout(None)
            .max_headers(limits.headers * LIMIT_MARGIN)
            .max_buf_size((limits.header_bytes * LIMIT_MARGIN).max(8 << 10));
        builder
            .http2()
            .timer(TokioTimer::new())
            .max_concurrent_streams(HTTP2_STREAMS)
            .max_send_buf_size(HTTP2_SEND_BUFFER_BYTES)
            .max_header_list_size(u32::try_from(limits.header_bytes * LIMIT_MARGIN).unwrap_or(u32::MAX));
        builder
    }
}
