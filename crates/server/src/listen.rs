//! The accept loop, and what every connection is bound by.
//!
//! A server that leaves this to a framework has no timers: a client that sends half a request, or reads half an answer,
//! holds its connection for ever. Here each wait has an end:
//!
//! | while | bound |
//! |---|---|
//! | the TLS handshake runs | `header_timeout_ms` |
//! | the headers of a request arrive | `header_timeout_ms`, by hyper |
//! | the body of a request arrives | `body_timeout_ms`, where it is read |
//! | no request is under way | `idle_timeout_ms`, here |
//! | the client does not take the answer | `write_timeout_ms`, here |
//!
//! Connections are limited: beyond the limit they wait in the operating system's queue, which costs this process
//! nothing. To stop, the loop accepts no more, tells every connection to finish what it has begun, ends streams, waits for
//! them and for writes whose clients have gone, and cuts off what is left after `drain_ms`.

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
use crate::http::{Request, Shared, answer};
use crate::metrics::Gauged;

/// The pause after the operating system refused a connection, for want of files for instance.
const ACCEPT_PAUSE: Duration = Duration::from_millis(50);
/// What hyper lets through beyond the limits, so that a request that breaks them a little gets a problem and not a
/// bare status.
const SLACK: usize = 4;
/// Requests at once on one HTTP/2 connection.
const HTTP2_STREAMS: u32 = 100;

/// What every connection needs.
#[derive(Clone)]
pub(crate) struct Connections {
    pub shared: Arc<Shared>,
    pub tls: Option<TlsAcceptor>,
}

/// Accepts connections until `shutdown` is ready, then lets them finish.
pub(crate) async fn serve(
    listener: TcpListener,
    connections: Connections,
    shutdown: impl Future<Output = ()>,
    stop: watch::Sender<bool>,
) {
    let (limits, clock) = (&connections.shared.config.limits, connections.shared.house.clock());
    let room = Arc::new(Semaphore::new(limits.connections));
    let mut open = JoinSet::new();
    let mut shutdown = pin!(shutdown);
    loop {
        let accepted = tokio::select! {
            biased;
            () = &mut shutdown => break,
            accepted = accept(&listener, &room) => accepted,
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
                tracing::warn!(target: "statehouse::http", %error, "a connection could not be accepted");
                clock.sleep(ACCEPT_PAUSE).await;
            }
        }
    }
    drop(listener);
    stop.send_replace(true);
    let drained = async {
        while open.join_next().await.is_some() {}
        connections.shared.writes.finished().await;
    };
    tokio::select! {
        () = drained => {}
        () = clock.sleep(millis(limits.drain_ms)) => {
            tracing::warn!(target: "statehouse::http", "requests were cut off before they had finished");
        }
    }
}

async fn accept(
    listener: &TcpListener,
    room: &Arc<Semaphore>,
) -> io::Result<(TcpStream, tokio::sync::OwnedSemaphorePermit)> {
    let permit = room.clone().acquire_owned().await.map_err(io::Error::other)?;
    let (stream, _) = listener.accept().await?;
    Ok((stream, permit))
}

impl Connections {
    async fn run(self, stream: TcpStream) {
        let (metrics, limits) = (&self.shared.metrics, &self.shared.config.limits);
        metrics.accepted.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
        let _counted = Gauged::enter(metrics, |metrics| &metrics.connections);
        // Answers are small and complete; holding them back for more would only add delay.
        let _ = stream.set_nodelay(true);
        let stream =
            Unstalled::new(stream, self.shared.house.clock().clone(), millis(limits.write_timeout_ms));
        let Some(tls) = self.tls.clone() else { return self.talk(stream).await };
        let secured = tokio::select! {
            secured = tls.accept(stream) => secured,
            () = self.shared.house.clock().sleep(millis(limits.header_timeout_ms)) => return,
        };
        match secured {
            Ok(stream) => self.talk(stream).await,
            Err(error) => tracing::debug!(target: "statehouse::http", %error, "a TLS handshake failed"),
        }
    }

    async fn talk(&self, stream: impl AsyncRead + AsyncWrite + Unpin + Send + 'static) {
        let activity = Activity::default();
        let service = service_fn({
            let (shared, activity) = (self.shared.clone(), activity.clone());
            move |request: Request| {
                let busy = activity.begin();
                let shared = shared.clone();
                async move {
                    let response = answer(shared, request).await;
                    Ok::<_, Infallible>(response.map(|body| Held { body, _busy: busy }))
                }
            }
        });
        let builder = self.builder();
        let mut connection = pin!(builder.serve_connection_with_upgrades(TokioIo::new(stream), service));
        let idle_max = millis(self.shared.config.limits.idle_timeout_ms);
        let (clock, mut stopping) = (self.shared.house.clock(), self.shared.stopping.clone());
        let mut wait = idle_max;
        let mut told_to_stop = false;
        loop {
            tokio::select! {
                biased;
                ended = connection.as_mut() => {
                    if let Err(error) = ended {
                        tracing::debug!(target: "statehouse::http", %error, "a connection broke");
                    }
                    return;
                }
                _ = stopping.changed(), if !told_to_stop => {
                    told_to_stop = true;
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
            .max_headers(limits.headers * SLACK)
            .max_buf_size((limits.header_bytes * SLACK).max(8 << 10));
        builder
            .http2()
            .timer(TokioTimer::new())
            .max_concurrent_streams(HTTP2_STREAMS)
            .max_header_list_size(u32::try_from(limits.header_bytes * SLACK).unwrap_or(u32::MAX));
        builder
    }
}

/// How many requests of a connection are under way, and since when there was none.
#[derive(Clone)]
struct Activity(Arc<Mutex<(usize, Stopwatch)>>);

/// A request under way, until its answer is complete.
struct Busy(Activity);

impl Default for Activity {
    fn default() -> Activity {
        Activity(Arc::new(Mutex::new((0, Stopwatch::start()))))
    }
}

impl Activity {
    fn begin(&self) -> Busy {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).0 += 1;
        Busy(self.clone())
    }

    /// How long there was no request; `None` while there is one.
    fn idle(&self) -> Option<Duration> {
        let state = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        (state.0 == 0).then(|| state.1.elapsed())
    }
}

impl Drop for Busy {
    fn drop(&mut self) {
        let mut state = self.0.0.lock().unwrap_or_else(PoisonError::into_inner);
        *state = (state.0.saturating_sub(1), Stopwatch::start());
    }
}

/// A body that keeps its request under way.
struct Held {
    body: Body,
    _busy: Busy,
}

impl http_body::Body for Held {
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

/// A stream whose writes fail when the other side takes nothing for too long.
struct Unstalled {
    stream: TcpStream,
    clock: Arc<dyn Clock>,
    at_most: Duration,
    /// Runs while a write waits.
    patience: Option<Pin<Box<dyn Future<Output = ()> + Send>>>,
}

impl Unstalled {
    fn new(stream: TcpStream, clock: Arc<dyn Clock>, at_most: Duration) -> Unstalled {
        Unstalled { stream, clock, at_most, patience: None }
    }

    fn bounded<T>(&mut self, task: &mut Context<'_>, written: Poll<io::Result<T>>) -> Poll<io::Result<T>> {
        if written.is_ready() {
            self.patience = None;
            return written;
        }
        let (clock, at_most) = (&self.clock, self.at_most);
        let patience = self.patience.get_or_insert_with(|| {
            let clock = clock.clone();
            Box::pin(async move { clock.sleep(at_most).await })
        });
        ready!(patience.as_mut().poll(task));
        Poll::Ready(Err(io::Error::new(io::ErrorKind::TimedOut, "the client took nothing for too long")))
    }
}

impl AsyncRead for Unstalled {
    fn poll_read(
        self: Pin<&mut Self>,
        task: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        Pin::new(&mut self.get_mut().stream).poll_read(task, buffer)
    }
}

impl AsyncWrite for Unstalled {
    fn poll_write(self: Pin<&mut Self>, task: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        let this = self.get_mut();
        let written = Pin::new(&mut this.stream).poll_write(task, bytes);
        this.bounded(task, written)
    }

    fn poll_write_vectored(
        self: Pin<&mut Self>,
        task: &mut Context<'_>,
        slices: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        let this = self.get_mut();
        let written = Pin::new(&mut this.stream).poll_write_vectored(task, slices);
        this.bounded(task, written)
    }

    fn is_write_vectored(&self) -> bool {
        self.stream.is_write_vectored()
    }

    fn poll_flush(self: Pin<&mut Self>, task: &mut Context<'_>) -> Poll<io::Result<()>> {
        let this = self.get_mut();
        let flushed = Pin::new(&mut this.stream).poll_flush(task);
        this.bounded(task, flushed)
    }

    fn poll_shutdown(self: Pin<&mut Self>, task: &mut Context<'_>) -> Poll<io::Result<()>> {
        let this = self.get_mut();
        let shut = Pin::new(&mut this.stream).poll_shutdown(task);
        this.bounded(task, shut)
    }
}
