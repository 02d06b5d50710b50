//! How long a connection may be silent while somebody waits for an answer on it.
//!
//! A server that is gone without a word is found out by its silence. To set a clock for each request would find it out too,
//! but what that takes for each, a lone reader of a page feels: a twentieth of its rate. So a connection has one clock,
//! which ticks a few times in the span that is waited; whoever waits only notes at which tick it began, and at which its
//! answer came. When too many ticks have passed since, the connection is dropped, and all who wait are told.
//!
//! - W1. Behind the last answer nobody waits for longer than the span and two ticks. *Answers come in the order of the requests:
//!   as long as one is missing, so are all behind it. Only answers are noted: who gives up waiting has had none.*
//! - W2. A connection on which nobody waits is never dropped for its silence. *Where it begins is noted before anybody is
//!   counted as waiting.*
//!
//! Who has its answer and does not look at it for so long is taken for one who waits.

use std::future::Future;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::time::Duration;

use statehouse_store::{Clock as _, SystemClock};

/// Ticks in the span that is waited.
const TICKS: u32 = 8;

/// The clock of a connection.
pub(crate) struct Watch {
    /// How long is waited.
    pub patience: Duration,
    tick: AtomicU64,
    /// At which tick somebody began to wait, or an answer came.
    noted: AtomicU64,
    waiting: AtomicUsize,
    is_over: AtomicBool,
}

impl Watch {
    pub(crate) fn new(patience: Duration) -> Watch {
        Watch {
            patience,
            tick: AtomicU64::new(0),
            noted: AtomicU64::new(0),
            waiting: AtomicUsize::new(0),
            is_over: AtomicBool::new(false),
        }
    }

    /// Whether the connection was silent for too long.
    pub(crate) fn is_over(&self) -> bool {
        self.is_over.load(Ordering::SeqCst)
    }

    /// Waits for an answer under this watch. It ends when the connection does, at the latest.
    pub(crate) async fn over<T>(&self, work: impl Future<Output = T>) -> T {
        let waiting = self.wait();
        let done = work.await;
        waiting.answered();
        done
    }

    fn wait(&self) -> Waiting<'_> {
        if self.waiting.load(Ordering::SeqCst) == 0 {
            self.note();
        }
        self.waiting.fetch_add(1, Ordering::SeqCst);
        Waiting(self)
    }

    fn note(&self) {
        self.noted.store(self.tick.load(Ordering::SeqCst), Ordering::SeqCst);
    }

    /// Ticks until the connection has been silent for too long.
    pub(crate) async fn until_over(&self) {
        loop {
            SystemClock.sleep(self.patience / TICKS).await;
            if self.ticks() {
                return;
            }
        }
    }

    /// One tick. Returns whether it was one too many.
    fn ticks(&self) -> bool {
        let tick = self.tick.fetch_add(1, Ordering::SeqCst) + 1;
        let is_waited_for = self.waiting.load(Ordering::SeqCst) > 0;
        // The one that it began within does not count.
        let silent = tick.saturating_sub(self.noted.load(Ordering::SeqCst) + 1);
        let is_over = is_waited_for && silent >= u64::from(TICKS);
        if is_over {
            self.is_over.store(true, Ordering::SeqCst);
        }
        is_over
    }
}

/// Somebody waits.
struct Waiting<'w>(&'w Watch);

impl Waiting<'_> {
    fn answered(self) {
        self.0.note();
    }
}

impl Drop for Waiting<'_> {
    fn drop(&mut self) {
        self.0.waiting.fetch_sub(1, Ordering::SeqCst);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// How many ticks it takes until it is over, if it ever is.
    fn left(watch: &Watch) -> Option<u32> {
        (1..=3 * TICKS).find(|_| watch.ticks())
    }

    #[test]
    fn nobody_waits_for_ever_and_silence_alone_is_no_harm() {
        let watch = Watch::new(Duration::from_secs(8));
        assert_eq!(left(&watch), None, "nobody waits");
        let first = watch.wait();
        assert!(!(0..TICKS).any(|_| watch.ticks()), "the tick that it began within does not count");
        let second = watch.wait();
        first.answered();
        assert_eq!(left(&watch), Some(TICKS + 1), "an answer came, and another one is missing");
        assert!(watch.is_over());
        drop(second);
        assert_eq!(left(&watch), None, "nobody waits any more");
        let third = watch.wait();
        assert_eq!(left(&watch), Some(TICKS + 1), "it begins anew");
        drop(third);
    }

    #[test]
    fn who_gives_up_waiting_does_not_make_the_others_wait_longer() {
        let watch = Watch::new(Duration::from_secs(8));
        let _patient = watch.wait();
        for _ in 0..TICKS {
            let _impatient = watch.wait();
            assert!(!watch.ticks());
        }
        assert!(watch.ticks());
    }
}
