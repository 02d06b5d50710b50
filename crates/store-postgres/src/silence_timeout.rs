//! Detects dead connections: one timer per connection instead of one per request.
//!
//! A server that has failed without closing the connection does not answer any more. A timer for each request would detect that, but
//! costs a lone reader a twentieth of its throughput. So each connection has one timer, which ticks [`TICKS`] times within the timeout.
//! A request records the tick at which it began, and the tick at which its answer came. If too many ticks have passed since the last
//! of these, the connection is dropped, and all requests on it fail.
//!
//! - W1. After the last answer no request waits longer than the timeout and two ticks. *Answers come in the order of the requests: as
//!   long as one is missing, so are all later ones. Only answers are recorded; a cancelled request records nothing.*
//! - W2. An idle connection is never dropped. *The tick is recorded before the first request is counted as pending.*
//!
//! A task that does not poll its received answer for that long counts as pending.

use std::future::Future;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::time::Duration;

use statehouse_store::{Clock as _, SystemClock};

/// Ticks within the timeout.
const TICKS: u32 = 8;

/// The silence timeout of a connection.
pub(crate) struct SilenceTimeout {
    /// The timeout.
    pub patience: Duration,
    tick: AtomicU64,
    /// The tick of the last answer, or of the first pending request.
    noted: AtomicU64,
    waiting: AtomicUsize,
    is_expired: AtomicBool,
}

impl SilenceTimeout {
    pub(crate) fn new(patience: Duration) -> SilenceTimeout {
        SilenceTimeout {
            patience,
            tick: AtomicU64::new(0),
            noted: AtomicU64::new(0),
            waiting: AtomicUsize::new(0),
            is_expired: AtomicBool::new(false),
        }
    }

    /// Whether the connection was silent for too long.
    pub(crate) fn is_expired(&self) -> bool {
        self.is_expired.load(Ordering::SeqCst)
    }

    /// Waits for an answer under this timeout. When the timeout expires the connection is dropped, which ends `work`.
    pub(crate) async fn wait_for<T>(&self, work: impl Future<Output = T>) -> T {
        let waiting = self.wait();
        let done = work.await;
        waiting.answered();
        done
    }

    fn wait(&self) -> PendingResponse<'_> {
        if self.waiting.load(Ordering::SeqCst) == 0 {
            self.record_response();
        }
        self.waiting.fetch_add(1, Ordering::SeqCst);
        PendingResponse(self)
    }

    fn record_response(&self) {
        self.noted.store(self.tick.load(Ordering::SeqCst), Ordering::SeqCst);
    }

    /// Returns when the timeout has expired.
    pub(crate) async fn expired(&self) {
        loop {
            SystemClock.sleep(self.patience / TICKS).await;
            if self.tick() {
                return;
            }
        }
    }

    /// Counts one tick. Returns whether the timeout has expired.
    fn tick(&self) -> bool {
        let tick = self.tick.fetch_add(1, Ordering::SeqCst) + 1;
        let is_waited_for = self.waiting.load(Ordering::SeqCst) > 0;
        // The tick during which the wait began does not count.
        let silent = tick.saturating_sub(self.noted.load(Ordering::SeqCst) + 1);
        let is_expired = is_waited_for && silent >= u64::from(TICKS);
        if is_expired {
            self.is_expired.store(true, Ordering::SeqCst);
        }
        is_expired
    }
}

/// A pending request.
struct PendingResponse<'w>(&'w SilenceTimeout);

impl PendingResponse<'_> {
    fn answered(self) {
        self.0.record_response();
    }
}

impl Drop for PendingResponse<'_> {
    fn drop(&mut self) {
        self.0.waiting.fetch_sub(1, Ordering::SeqCst);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The number of ticks until the timeout expires, if it does.
    fn ticks_left(timeout: &SilenceTimeout) -> Option<u32> {
        (1..=3 * TICKS).find(|_| timeout.tick())
    }

    #[test]
    fn a_pending_request_expires_and_an_idle_connection_does_not() {
        let timeout = SilenceTimeout::new(Duration::from_secs(8));
        assert_eq!(ticks_left(&timeout), None, "no request is pending");
        let first = timeout.wait();
        assert!(!(0..TICKS).any(|_| timeout.tick()), "the tick that it began within does not count");
        let second = timeout.wait();
        first.answered();
        assert_eq!(ticks_left(&timeout), Some(TICKS + 1), "an answer came, and another one is missing");
        assert!(timeout.is_expired());
        drop(second);
        assert_eq!(ticks_left(&timeout), None, "no request is pending any more");
        let third = timeout.wait();
        assert_eq!(ticks_left(&timeout), Some(TICKS + 1), "it begins anew");
        drop(third);
    }

    #[test]
    fn a_cancelled_request_does_not_extend_the_timeout_of_others() {
        let timeout = SilenceTimeout::new(Duration::from_secs(8));
        let _pending = timeout.wait();
        for _ in 0..TICKS {
            let _cancelled = timeout.wait();
            assert!(!timeout.tick());
        }
        assert!(timeout.tick());
    }
}
