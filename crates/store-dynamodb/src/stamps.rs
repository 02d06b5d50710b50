//! Stamps: the order in which logged plans wrote a row.
//!
//! A stamp is a number of microseconds from a hybrid logical clock: the maximum of this process's clock and of one more
//! than the greatest stamp that it has issued or seen. A logged plan writes its stamp into each row on the condition that the
//! row's stamp is smaller. The stamps of one row's writes therefore grow, independently of the clocks. Synchronized
//! clocks only reduce how often a plan has to be retried with a later stamp.

use std::sync::atomic::{AtomicI64, Ordering};

use statehouse_store::Time;

/// Issues stamps.
#[derive(Debug)]
pub(crate) struct StampClock {
    last: AtomicI64,
}

impl StampClock {
    /// A clock without any stamp.
    pub(crate) fn new() -> StampClock {
        StampClock { last: AtomicI64::new(i64::MIN) }
    }

    /// A stamp above all that were issued or seen.
    pub(crate) fn next(&self, now: Time) -> i64 {
        let step = |last: i64| now.micros().max(last.saturating_add(1));
        match self.last.fetch_update(Ordering::SeqCst, Ordering::SeqCst, |last| Some(step(last))) {
            Ok(last) | Err(last) => step(last),
        }
    }

    /// The next stamp, without issuing it.
    pub(crate) fn peek(&self, now: Time) -> i64 {
        now.micros().max(self.last.load(Ordering::SeqCst).saturating_add(1))
    }

    /// Records a stamp that another process issued.
    pub(crate) fn observe(&self, stamp: i64) {
        self.last.fetch_max(stamp, Ordering::SeqCst);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn stamps_grow_whatever_the_clock_does() {
        let stamps = StampClock::new();
        assert_eq!(stamps.next(Time::from_micros(100)), 100);
        assert_eq!(stamps.next(Time::from_micros(100)), 101);
        assert_eq!(stamps.next(Time::from_micros(5)), 102);
        stamps.observe(500);
        assert_eq!(stamps.peek(Time::from_micros(5)), 501);
        assert_eq!(stamps.next(Time::from_micros(5)), 501);
        assert_eq!(stamps.next(Time::from_micros(900)), 900);
    }
}
