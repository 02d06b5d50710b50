//! The only place where a clock is read.
//!
//! Everything else takes a [`Clock`], so that a test or a simulation can own time.

use std::fmt;
use std::sync::Arc;
use std::sync::{LazyLock, Mutex, PoisonError};
use std::time::Duration;

use async_trait::async_trait;
use tokio::sync::watch;

use crate::time::Time;

/// A source of time.
#[async_trait]
pub trait Clock: Send + Sync + fmt::Debug {
    /// What time it is.
    fn now(&self) -> Time;

    /// How much time has passed on this clock since some moment that stays the same. Setting the clock does not move it,
    /// so it is what a deadline of one's own is measured by.
    fn uptime(&self) -> Duration;

    /// Returns when this much time has passed on this clock.
    async fn sleep(&self, span: Duration);
}

/// The machine's clock.
#[derive(Clone, Copy, Debug, Default)]
pub struct SystemClock;

#[async_trait]
impl Clock for SystemClock {
    #[expect(clippy::disallowed_methods, reason = "this is the clock module")]
    fn now(&self) -> Time {
        let since_epoch = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH);
        Time::from_micros(0).plus(since_epoch.unwrap_or_default())
    }

    #[expect(clippy::disallowed_methods, reason = "this is the clock module")]
    fn uptime(&self) -> Duration {
        static START: LazyLock<std::time::Instant> = LazyLock::new(std::time::Instant::now);
        START.elapsed()
    }

    #[expect(clippy::disallowed_methods, reason = "this is the clock module")]
    async fn sleep(&self, span: Duration) {
        tokio::time::sleep(span).await;
    }
}

/// A clock that moves only when the test moves it. Clones share one time.
#[derive(Clone, Debug)]
pub struct ManualClock {
    hands: watch::Sender<ManualClockState>,
}

/// What a manual clock shows.
#[derive(Clone, Copy, Debug)]
struct ManualClockState {
    time: Time,
    uptime: Duration,
}

impl ManualClock {
    /// A clock that stands at this time.
    pub fn at(time: Time) -> ManualClock {
        ManualClock { hands: watch::Sender::new(ManualClockState { time, uptime: Duration::ZERO }) }
    }

    /// Lets time pass, and wakes the sleepers that are due.
    pub fn advance(&self, span: Duration) {
        self.hands.send_modify(|hands| {
            hands.time = hands.time.plus(span);
            hands.uptime += span;
        });
    }

    /// Sets the clock, backward too. No time passes by that, and no sleeper wakes.
    pub fn set(&self, time: Time) {
        self.hands.send_modify(|hands| hands.time = time);
    }
}

#[async_trait]
impl Clock for ManualClock {
    fn now(&self) -> Time {
        self.hands.borrow().time
    }

    fn uptime(&self) -> Duration {
        self.hands.borrow().uptime
    }

    async fn sleep(&self, span: Duration) {
        let until = self.uptime() + span;
        // The sender lives as long as `self`, so waiting cannot fail.
        let _ = self.hands.subscribe().wait_for(|hands| hands.uptime >= until).await;
    }
}

/// A span of monotonic time, for measurements that no decision rests on.
#[derive(Clone, Copy, Debug)]
pub struct Stopwatch(std::time::Instant);

impl Stopwatch {
    /// Starts measuring.
    #[expect(clippy::disallowed_methods, reason = "this is the clock module")]
    pub fn start() -> Stopwatch {
        Stopwatch(std::time::Instant::now())
    }

    /// The time since the start.
    pub fn elapsed(&self) -> Duration {
        self.0.elapsed()
    }
}

/// Another clock moved by a fixed offset that can be changed: a machine whose time is wrong.
#[derive(Debug, Clone)]
pub struct SkewedClock {
    inner: Arc<dyn Clock>,
    offset_micros: Arc<Mutex<i64>>,
}

impl SkewedClock {
    /// A clock that agrees with `inner` until it is skewed.
    pub fn over(inner: Arc<dyn Clock>) -> SkewedClock {
        SkewedClock { inner, offset_micros: Arc::default() }
    }

    /// Makes this clock differ from the inner one by so many microseconds.
    pub fn skew(&self, micros: i64) {
        *self.offset_micros.lock().unwrap_or_else(PoisonError::into_inner) = micros;
    }
}

#[async_trait]
impl Clock for SkewedClock {
    fn now(&self) -> Time {
        let offset = *self.offset_micros.lock().unwrap_or_else(PoisonError::into_inner);
        crate::eval::now_moved(self.inner.now(), offset)
    }

    fn uptime(&self) -> Duration {
        self.inner.uptime()
    }

    async fn sleep(&self, span: Duration) {
        self.inner.sleep(span).await;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn a_manual_clock_wakes_sleepers_in_time_only() {
        let clock = ManualClock::at(Time::from_micros(0));
        let sleeper = tokio::spawn({
            let clock = clock.clone();
            async move { clock.sleep(Duration::from_secs(2)).await }
        });
        tokio::task::yield_now().await;
        clock.advance(Duration::from_secs(1));
        // Setting the clock is not the passing of time.
        clock.set(Time::from_millis(3_600_000));
        tokio::task::yield_now().await;
        assert!(!sleeper.is_finished());
        assert_eq!(clock.uptime(), Duration::from_secs(1));
        clock.advance(Duration::from_secs(1));
        sleeper.await.unwrap();
    }
}
