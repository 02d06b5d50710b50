//! Writes in progress.
//!
//! - U1. *A disconnecting client does not cancel a write.* When a connection closes, its futures are dropped. A write that
//!   is dropped before its end continues in its own task, so its retries and the query for an unknown outcome complete,
//!   and it releases its resources only when the outcome is known.
//! - U2. *A stopping server waits for writes*, with or without a client, as long as it waits for connections.

use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};

use tokio::runtime::Handle;
use tokio::sync::watch;

/// Counts the writes in progress.
#[derive(Clone, Debug, Default)]
pub struct PendingWrites(Arc<watch::Sender<usize>>);

/// One write. It completes whether or not a caller awaits it.
pub struct PendingWrite<T: 'static>(Option<Pin<Box<dyn Future<Output = T> + Send>>>);

/// Counts a write for as long as it lives.
struct PendingGuard(PendingWrites);

impl PendingWrites {
    /// Counts a write from now to its end. The caller must await it immediately.
    pub fn run<T: 'static>(&self, write: impl Future<Output = T> + Send + 'static) -> PendingWrite<T> {
        self.0.send_modify(|count| *count += 1);
        let counted = PendingGuard(self.clone());
        PendingWrite(Some(Box::pin(async move {
            let _counted = counted;
            write.await
        })))
    }

    /// Resolves when no write is in progress.
    pub async fn finished(&self) {
        // `self` owns the sender, so waiting cannot fail.
        let _ = self.0.subscribe().wait_for(|count| *count == 0).await;
    }
}

impl Drop for PendingGuard {
    fn drop(&mut self) {
        self.0.0.send_modify(|count| *count -= 1);
    }
}

impl<T> Future for PendingWrite<T> {
    type Output = T;

    fn poll(mut self: Pin<&mut Self>, task: &mut Context<'_>) -> Poll<T> {
        // Taken, so that a write that panicked is not polled again.
        let Some(mut write) = self.0.take() else { return Poll::Pending };
        let polled = write.as_mut().poll(task);
        if polled.is_pending() {
            self.0 = Some(write);
        }
        polled
    }
}

impl<T> Drop for PendingWrite<T> {
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
        let writes = PendingWrites::default();
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
