//! Response bodies with backpressure.
//!
//! HTTP/2 has flow control per stream, so a client can refuse the body of a response while the socket stays writable:
//! the write timeout of the socket never fires. Every body is therefore tracked:
//!
//! - B1. *A body is handed to the protocol in chunks of [`CHUNK_BYTES`].* The protocol asks for a chunk only when the
//!   client has accepted the one before, so it buffers at most two chunks of a body that the client does not accept.
//! - B2. *A client must accept a chunk within `write_timeout_ms`.* [`ConnectionActivity::stalled`] finds the bodies that
//!   wait longer. A body that waits for the server, such as an idle event stream, is not stalled.
//! - B3. *A stalled HTTP/2 stream is reset.* [`StreamExecutor`] runs each stream as a task that the connection can cancel.
//!   If the client accepted nothing at all on the connection, or speaks HTTP/1, the connection is closed.

use std::future::Future;
use std::pin::Pin;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll};
use std::time::Duration;

use axum::body::Body;
use bytes::{Buf as _, Bytes};
use http_body::{Body as _, Frame};
use statehouse_store::clock::Stopwatch;
use tokio::sync::Notify;

use crate::unsent::UnsentGuard;

/// Largest chunk that is handed to the protocol.
const CHUNK_BYTES: usize = 16 << 10;

tokio::task_local! {
    /// Cancels the HTTP/2 stream that the current task runs.
    static CANCEL: Arc<Notify>;
}

/// Runs the tasks of a connection. hyper creates one task for each HTTP/2 stream: it runs the handler and sends the body.
#[derive(Clone, Copy, Debug)]
pub struct StreamExecutor;

impl<F> hyper::rt::Executor<F> for StreamExecutor
where
    F: Future + Send + 'static,
    F::Output: Send,
{
    fn execute(&self, stream: F) {
        let cancel = Arc::new(Notify::new());
        tokio::spawn(CANCEL.scope(cancel.clone(), async move {
            tokio::select! {
                biased;
                _ = stream => {}
                // Dropping the stream resets it.
                () = cancel.notified() => {}
            }
        }));
    }
}

/// The requests in flight on a connection.
#[derive(Clone, Debug)]
pub struct ConnectionActivity(Arc<Mutex<Activity>>);

#[derive(Debug)]
struct Activity {
    requests: usize,
    /// Since the first byte of a request whose headers are not complete.
    headers: Option<Stopwatch>,
    /// Since the last request ended.
    idle: Stopwatch,
    /// Since the client last accepted a chunk.
    progress: Stopwatch,
    responses: Vec<Arc<ResponseState>>,
}

/// A response that is being sent.
#[derive(Debug)]
struct ResponseState {
    /// Runs while the client has not accepted the current chunk.
    waiting: Mutex<Option<Stopwatch>>,
    /// Resets the stream; `None` on HTTP/1.
    cancel: Option<Arc<Notify>>,
}

impl ResponseState {
    fn waiting(&self) -> MutexGuard<'_, Option<Stopwatch>> {
        self.waiting.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A request in flight, until its response is complete.
#[derive(Debug)]
pub struct ActiveRequest(ConnectionActivity);

/// What to do about stalled responses.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Stall {
    /// There is none.
    None,
    /// Their streams were reset.
    Reset(usize),
    /// The connection must be closed.
    Close(usize),
}

impl Default for ConnectionActivity {
    fn default() -> ConnectionActivity {
        let (idle, progress) = (Stopwatch::start(), Stopwatch::start());
        ConnectionActivity(Arc::new(Mutex::new(Activity {
            requests: 0,
            headers: None,
            idle,
            progress,
            responses: Vec::new(),
        })))
    }
}

impl ConnectionActivity {
    fn lock(&self) -> MutexGuard<'_, Activity> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Counts a request until the guard is dropped.
    pub fn begin(&self) -> ActiveRequest {
        let mut activity = self.lock();
        activity.requests += 1;
        activity.headers = None;
        drop(activity);
        ActiveRequest(self.clone())
    }

    /// Notes that bytes arrived. While no request is in flight they are headers of the next one.
    pub fn received(&self) {
        let mut activity = self.lock();
        if activity.requests == 0 {
            activity.headers.get_or_insert_with(Stopwatch::start);
        }
    }

    /// Time since the headers of a request began to arrive; `None` if they are complete or have not begun.
    pub fn awaits_headers(&self) -> Option<Duration> {
        self.lock().headers.as_ref().map(Stopwatch::elapsed)
    }

    /// Time since the last request ended; `None` while a request is in flight.
    pub fn idle(&self) -> Option<Duration> {
        let activity = self.lock();
        (activity.requests == 0).then(|| activity.idle.elapsed())
    }

    /// Resets the streams whose client has not accepted a chunk within the limit.
    pub fn stalled(&self, limit: Duration) -> Stall {
        let activity = self.lock();
        let is_stalled = |response: &&Arc<ResponseState>| {
            response.waiting().as_ref().is_some_and(|waiting| waiting.elapsed() >= limit)
        };
        let stalled: Vec<_> = activity.responses.iter().filter(is_stalled).collect();
        if stalled.is_empty() {
            return Stall::None;
        }
        let accepts_others = activity.progress.elapsed() < limit;
        for response in &stalled {
            match &response.cancel {
                Some(cancel) if accepts_others => cancel.notify_one(),
                _ => return Stall::Close(stalled.len()),
            }
        }
        Stall::Reset(stalled.len())
    }

    fn accepted(&self) {
        self.lock().progress = Stopwatch::start();
    }
}

impl Drop for ActiveRequest {
    fn drop(&mut self) {
        let mut activity = self.0.lock();
        activity.requests = activity.requests.saturating_sub(1);
        activity.idle = Stopwatch::start();
    }
}

/// A response body that keeps its request in flight until it is sent or dropped.
#[derive(Debug)]
pub struct TrackedBody {
    body: Body,
    /// The rest of a frame that is larger than a chunk.
    rest: Bytes,
    state: Arc<ResponseState>,
    request: ActiveRequest,
    /// The bytes of this response that count as unsent.
    _unsent: Option<Arc<UnsentGuard>>,
}

impl TrackedBody {
    /// Tracks the body of a response to this request.
    pub fn new(body: Body, request: ActiveRequest, unsent: Option<Arc<UnsentGuard>>) -> TrackedBody {
        let cancel = CANCEL.try_with(Arc::clone).ok();
        let state = Arc::new(ResponseState { waiting: Mutex::new(Some(Stopwatch::start())), cancel });
        request.0.lock().responses.push(state.clone());
        TrackedBody { body, rest: Bytes::new(), state, request, _unsent: unsent }
    }

    /// The next chunk. It is a copy, so that a part in a buffer of the protocol does not keep the whole body in memory.
    fn chunk(&mut self) -> Option<Bytes> {
        if self.rest.is_empty() {
            return None;
        }
        let chunk = match self.rest.get(..CHUNK_BYTES) {
            None => std::mem::take(&mut self.rest),
            Some(chunk) => {
                let chunk = Bytes::copy_from_slice(chunk);
                self.rest.advance(CHUNK_BYTES);
                chunk
            }
        };
        Some(chunk)
    }

    fn poll_inner(&mut self, task: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, axum::Error>>> {
        if let Some(chunk) = self.chunk() {
            return Poll::Ready(Some(Ok(Frame::data(chunk))));
        }
        let polled = Pin::new(&mut self.body).poll_frame(task);
        let Poll::Ready(Some(Ok(frame))) = polled else { return polled };
        let data = match frame.into_data() {
            Ok(data) if data.len() > CHUNK_BYTES => data,
            Ok(data) => return Poll::Ready(Some(Ok(Frame::data(data)))),
            Err(other) => return Poll::Ready(Some(Ok(other))),
        };
        self.rest = data;
        Poll::Ready(self.chunk().map(|chunk| Ok(Frame::data(chunk))))
    }
}

impl http_body::Body for TrackedBody {
    type Data = Bytes;
    type Error = axum::Error;

    fn poll_frame(
        self: Pin<&mut Self>,
        task: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, axum::Error>>> {
        let this = self.get_mut();
        let polled = this.poll_inner(task);
        let waits_for_client = matches!(polled, Poll::Ready(Some(_)));
        let before = std::mem::replace(&mut *this.state.waiting(), waits_for_client.then(Stopwatch::start));
        // The protocol asks for a frame after the client accepted the one before.
        if before.is_some() {
            this.request.0.accepted();
        }
        polled
    }

    fn is_end_stream(&self) -> bool {
        self.rest.is_empty() && self.body.is_end_stream()
    }

    fn size_hint(&self) -> http_body::SizeHint {
        let (inner, rest) = (self.body.size_hint(), self.rest.len() as u64);
        let mut hint = http_body::SizeHint::new();
        hint.set_lower(inner.lower() + rest);
        if let Some(upper) = inner.upper() {
            hint.set_upper(upper + rest);
        }
        hint
    }
}

impl Drop for TrackedBody {
    fn drop(&mut self) {
        let mut activity = self.request.0.lock();
        activity.responses.retain(|response| !Arc::ptr_eq(response, &self.state));
    }
}
