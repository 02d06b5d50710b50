//! Stamps: the order in which logged plans wrote a row, decided by the row itself.
//!
//! A stamp is a number of microseconds: this process's clock, or one more than the greatest stamp it has given out or
//! seen, whichever is later (a hybrid logical clock). A logged plan writes its stamp into each row on the condition
//! that the row's last stamp is less. So along the writes of one row stamps only grow, whatever the clocks say; clocks
//! that agree only make it rare that a plan has to try again with a later stamp.

use std::sync::atomic::{AtomicI64, Ordering};

use statehouse_store::Time;

/// Gives out stamps.
#[derive(Debug)]
pub(crate) struct Stamps {
    last: AtomicI64,
}

impl Stamps {
    /// A source that has seen nothing.
    pub(crate) fn new() -> Stamps {
        Stamps { last: AtomicI64::new(i64::MIN) }
    }

    /// A stamp above all that were given out or seen.
    pub(crate) fn next(&self, now: Time) -> i64 {
        let step = |last: i64| now.micros().max(last.saturating_add(1));
        match self.last.fetch_update(Ordering::SeqCst, Ordering::SeqCst, |last| Some(step(last))) {
            Ok(last) | Err(last) => step(last),
        }
    }

    /// What the next stamp would be, without giving it out.
    pub(crate) fn peek(&self, now: Time) -> i64 {
        now.micros().max(self.last.load(Ordering::SeqCst).saturating_add(1))
    }

    /// Takes note of a stamp that another process gave out.
    pub(crate) fn observe(&self, stamp: i64) {
        self.last.fetch_max(stamp, Ordering::SeqCst);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn stamps_grow_whatever_the_clock_does() {
        let stamps = Stamps::new();
        assert_eq!(stamps.next(Time::from_micros(100)), 100);
        assert_eq!(stamps.next(Time::from_micros(100)), 101);
        assert_eq!(stamps.next(Time::from_micros(5)), 102);
        stamps.observe(500);
        assert_eq!(stamps.peek(Time::from_micros(5)), 501);
        assert_eq!(stamps.next(Time::from_micros(5)), 501);
        assert_eq!(stamps.next(Time::from_micros(900)), 900);
    }
}
