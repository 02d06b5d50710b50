//! The accept loop and the limits of every connection.
//!
//! Without timers a client that sends half a request, or reads half a response, holds its connection for ever. Every
//! wait therefore has a timeout:
//!
//! | while | timeout |
//! |---|---|
//! | the TLS handshake runs | `header_timeout_ms` |
//! | the headers of a request arrive | `header_timeout_ms`, in hyper |
//! | the body of a request arrives | `body_timeout_ms`, in `http/body.rs` |
//! | no request is in flight | `idle_timeout_ms`, here |
//! | the client does not read the response | `write_timeout_ms`, here |
//!
//! Connections beyond the limit wait in the listen queue of the operating system. To stop, the loop accepts no more
//! connections, asks every connection to finish its requests, ends streams, waits for connections and pending writes, and
//! aborts the rest after `drain_ms`.

use std::convert::Infallible;
use std::future::Future;
use std::io;
use std::pin::{Pin, pin};
use std::sync::{Arc, Mutex, PoisonError};
use std::task::{Context, Poll, ready};
use std::time::Duration;

use axum::body::Body;
use bytes::Bytes;
use http_body::Frame;
use hyper::service::service_fn;
use hyper_util::rt::{TokioExecutor, TokioIo, TokioTimer};
use hyper_util::server::conn::auto;
use statehouse_store::Clock;
use statehouse_store::clock::Stopwatch;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{Semaphore, watch};
use tokio::task::JoinSet;
use tokio_rustls::TlsAcceptor;

use crate::config::millis;
use crate::http::{Request, Shared, handle_request};
use crate::metrics::GaugeGuard;

/// Pause after a failed accept, for example because the process is out of file descriptors.
const ACCEPT_PAUSE: Duration = Duration::from_millis(50);
/// hyper's limits are this much higher than ours, so that a request slightly over the limit gets a problem document and
/// not a bare status.
const LIMIT_MARGIN: usize = 4;
/// Concurrent requests on one HTTP/2 connection.
const HTTP2_STREAMS: u32 = 100;

/// State shared by all connections.
#[derive(Clone)]
pub(crate) struct Connections {
    pub shared: Arc<Shared>,
    pub tls: Option<TlsAcceptor>,
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
            Ok((stream, permit)) => {
                let connections = connections.clone();
                open.spawn(async move {
                    connections.run(stream).await;
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
) -> io::Result<(TcpStream, tokio::sync::OwnedSemaphorePermit)> {
    let permit = permits.clone().acquire_owned().await.map_err(io::Error::other)?;
    let (stream, _) = listener.accept().await?;
    Ok((stream, permit))
}

impl Connections {
    async fn run(self, stream: TcpStream) {
        let (metrics, limits) = (&self.shared.metrics, &self.shared.config.limits);
        metrics.accepted.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
        let _counted = GaugeGuard::enter(metrics, |metrics| &metrics.connections);
        // Responses are complete when written; Nagle's algorithm would only delay them.
        let _ = stream.set_nodelay(true);
        let stream =
            WriteTimeout::new(stream, self.shared.house.clock().clone(), millis(limits.write_timeout_ms));
        let Some(tls) = self.tls.clone() else { return self.serve_connection(stream).await };
        let secured = tokio::select! {
            secured = tls.accept(stream) => secured,
            () = self.shared.house.clock().sleep(millis(limits.header_timeout_ms)) => return,
        };
        match secured {
            Ok(stream) => self.serve_connection(stream).await,
            Err(error) => tracing::debug!(target: "statehouse::http", %error, "TLS handshake failed"),
        }
    }

    async fn serve_connection(&self, stream: impl AsyncRead + AsyncWrite + Unpin + Send + 'static) {
        let activity = ConnectionActivity::default();
        let service = service_fn({
            let (shared, activity) = (self.shared.clone(), activity.clone());
            move |request: Request| {
                let busy = activity.begin();
                let shared = shared.clone();
                async move {
                    let response = handle_request(shared, request).await;
                    Ok::<_, Infallible>(response.map(|body| TrackedBody { body, _busy: busy }))
                }
            }
        });
        let builder = self.builder();
        let mut connection = pin!(builder.serve_connection_with_upgrades(TokioIo::new(stream), service));
        let idle_max = millis(self.shared.config.limits.idle_timeout_ms);
        let (clock, mut stopping) = (self.shared.house.clock(), self.shared.stopping.clone());
        let mut wait = idle_max;
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
                () = clock.sleep(wait) => match activity.idle() {
                    Some(idle) if idle >= idle_max => return,
                    Some(idle) => wait = idle_max.saturating_sub(idle),
                    None => wait = idle_max,
                },
            }
        }
    }

    fn builder(&self) -> auto::Builder<TokioExecutor> {
        let limits = &self.shared.config.limits;
        let mut builder = auto::Builder::new(TokioExecutor::new());
        builder
            .http1()
            .timer(TokioTimer::new())
            .header_read_timeout(millis(limits.header_timeout_ms))
            .max_headers(limits.headers * LIMIT_MARGIN)
            .max_buf_size((limits.header_bytes * LIMIT_MARGIN).max(8 << 10));
        builder
            .http2()
            .timer(TokioTimer::new())
            .max_concurrent_streams(HTTP2_STREAMS)
            .max_header_list_size(u32::try_from(limits.header_bytes * LIMIT_MARGIN).unwrap_or(u32::MAX));
        builder
    }
}

/// Number of requests in flight on a connection, and the time since the last one ended.
#[derive(Clone)]
struct ConnectionActivity(Arc<Mutex<(usize, Stopwatch)>>);

/// A request in flight, until its response is complete.
struct ActiveRequest(ConnectionActivity);

impl Default for ConnectionActivity {
    fn default() -> ConnectionActivity {
        ConnectionActivity(Arc::new(Mutex::new((0, Stopwatch::start()))))
    }
}

impl ConnectionActivity {
    fn begin(&self) -> ActiveRequest {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).0 += 1;
        ActiveRequest(self.clone())
    }

    /// Time since the last request ended; `None` while a request is in flight.
    fn idle(&self) -> Option<Duration> {
        let state = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        (state.0 == 0).then(|| state.1.elapsed())
    }
}

impl Drop for ActiveRequest {
    fn drop(&mut self) {
        let mut state = self.0.0.lock().unwrap_or_else(PoisonError::into_inner);
        *state = (state.0.saturating_sub(1), Stopwatch::start());
    }
}

/// A response body that keeps its request in flight until it is dropped.
struct TrackedBody {
    body: Body,
    _busy: ActiveRequest,
}

impl http_body::Body for TrackedBody {
    type Data = Bytes;
    type Error = axum::Error;

    fn poll_frame(
        self: Pin<&mut Self>,
        task: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, axum::Error>>> {
        Pin::new(&mut self.get_mut().body).poll_frame(task)
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }

    fn size_hint(&self) -> http_body::SizeHint {
        self.body.size_hint()
    }
}

/// A socket whose writes fail when the peer accepts nothing within a time limit.
struct WriteTimeout {
    stream: TcpStream,
    clock: Arc<dyn Clock>,
    limit: Duration,
    /// Runs while a write is blocked.
    timer: Option<Pin<Box<dyn Future<Output = ()> + Send>>>,
}

impl WriteTimeout {
    fn new(stream: TcpStream, clock: Arc<dyn Clock>, limit: Duration) -> WriteTimeout {
        WriteTimeout { stream, clock, limit, timer: None }
    }

    fn check_timeout<T>(
        &mut self,
        task: &mut Context<'_>,
        written: Poll<io::Result<T>>,
    ) -> Poll<io::Result<T>> {
        if written.is_ready() {
            self.timer = None;
            return written;
        }
        let (clock, limit) = (&self.clock, self.limit);
        let timer = self.timer.get_or_insert_with(|| {
            let clock = clock.clone();
            Box::pin(async move { clock.sleep(limit).await })
        });
        ready!(timer.as_mut().poll(task));
        Poll::Ready(Err(io::Error::new(
            io::ErrorKind::TimedOut,
            "the client did not read the response in time",
        )))
    }
}

impl AsyncRead for WriteTimeout {
    fn poll_read(
        self: Pin<&mut Self>,
        task: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        Pin::new(&mut self.get_mut().stream).poll_read(task, buffer)
    }
}

impl AsyncWrite for WriteTimeout {
    fn poll_write(self: Pin<&mut Self>, task: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        let this = self.get_mut();
        let written = Pin::new(&mut this.stream).poll_write(task, bytes);
        this.check_timeout(task, written)
    }

    fn poll_write_vectored(
        self: Pin<&mut Self>,
        task: &mut Context<'_>,
        slices: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        let this = self.get_mut();
        let written = Pin::new(&mut this.stream).poll_write_vectored(task, slices);
        this.check_timeout(task, written)
    }

    fn is_write_vectored(&self) -> bool {
        self.stream.is_write_vectored()
    }

    fn poll_flush(self: Pin<&mut Self>, task: &mut Context<'_>) -> Poll<io::Result<()>> {
        let this = self.get_mut();
        let flushed = Pin::new(&mut this.stream).poll_flush(task);
        this.check_timeout(task, flushed)
    }

    fn poll_shutdown(self: Pin<&mut Self>, task: &mut Context<'_>) -> Poll<io::Result<()>> {
        let this = self.get_mut();
        let shut = Pin::new(&mut this.stream).poll_shutdown(task);
        this.check_timeout(task, shut)
    }
}
