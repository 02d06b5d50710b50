//! Writes under way, each until its end.
//!
//! - U1. *A client that goes away does not break a write off.* A connection that is closed drops what it was doing. A
//!   write that is dropped before its end goes on in a task of its own, so its draft, its tries and the question for an
//!   unknown outcome all come to their end, and what a write holds is let go when it is decided and not before.
//! - U2. *A server that stops waits for them*, with or without a client, as long as it waits for connections.

use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};

use tokio::runtime::Handle;
use tokio::sync::watch;

/// The writes under way.
#[derive(Clone, Debug, Default)]
pub struct Writes(Arc<watch::Sender<usize>>);

/// One write. It comes to its end, whether or not somebody waits for it.
pub struct Write<T: 'static>(Option<Pin<Box<dyn Future<Output = T> + Send>>>);

/// Counts a write as long as it lives.
struct Counted(Writes);

impl Writes {
    /// Counts a write from now until its end. It must be awaited at once.
    pub fn run<T: 'static>(&self, write: impl Future<Output = T> + Send + 'static) -> Write<T> {
        self.0.send_modify(|count| *count += 1);
        let counted = Counted(self.clone());
        Write(Some(Box::pin(async move {
            let _counted = counted;
            write.await
        })))
    }

    /// Returns when none is under way.
    pub async fn finished(&self) {
        // The sender lives as long as `self`, so waiting cannot fail.
        let _ = self.0.subscribe().wait_for(|count| *count == 0).await;
    }
}

impl Drop for Counted {
    fn drop(&mut self) {
        self.0.0.send_modify(|count| *count -= 1);
    }
}

impl<T> Future for Write<T> {
    type Output = T;

    fn poll(mut self: Pin<&mut Self>, task: &mut Context<'_>) -> Poll<T> {
        // Taken out, so that one that panics is not polled again. One that has ended is not polled at all.
        let Some(mut write) = self.0.take() else { return Poll::Pending };
        let polled = write.as_mut().poll(task);
        if polled.is_pending() {
            self.0 = Some(write);
        }
        polled
    }
}

impl<T> Drop for Write<T> {
    fn drop(&mut self) {
        if let (Some(write), Ok(runtime)) = (self.0.take(), Handle::try_current()) {
            drop(runtime.spawn(async move { drop(write.await) }));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use tokio::sync::oneshot;

    #[tokio::test]
    async fn a_write_that_is_dropped_comes_to_its_end() {
        let writes = Writes::default();
        let (go, wait) = oneshot::channel::<()>();
        let (done, ended) = oneshot::channel();
        let mut write = writes.run(async move {
            wait.await.unwrap();
            done.send(()).unwrap();
        });
        assert!(futures_util::FutureExt::now_or_never(&mut write).is_none());
        drop(write);
        let mut finished = Box::pin(writes.finished());
        assert!(futures_util::FutureExt::now_or_never(&mut finished).is_none());
        go.send(()).unwrap();
        ended.await.unwrap();
        finished.await;
        assert_eq!(writes.run(async { 7 }).await, 7);
        writes.finished().await;
    }
}
