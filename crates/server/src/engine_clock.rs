//! The clock that guards read, as far as this process knows it.
//!
//! A caller that shows a countdown needs the time by which the engine judges deadlines. On PostgreSQL that is the clock of the
//! database server, and asking for it costs a round trip. This clock asks at most once a second, and adds the time that has passed
//! on the clock of this process since.

use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use statehouse_store::{Clock, Store, Time};

/// How long the process adds its own time to the last answer of the engine.
const ANSWER_USED_FOR: Duration = Duration::from_secs(1);

/// The engine's time, asked for at most once a second.
#[derive(Debug, Default)]
pub struct EngineClock {
    state: Mutex<EngineClockState>,
}

#[derive(Clone, Copy, Debug, Default)]
struct EngineClockState {
    answer: Option<ClockAnswer>,
    /// When the engine was last asked, whether it has answered or not.
    asked_at: Duration,
}

/// What the engine's clock showed at a moment of this process.
#[derive(Clone, Copy, Debug)]
struct ClockAnswer {
    engine: Time,
    uptime: Duration,
}

impl ClockAnswer {
    fn at(&self, uptime: Duration) -> Time {
        self.engine.plus(uptime.saturating_sub(self.uptime))
    }
}

impl EngineClock {
    /// The engine's time. `None` if the engine has not been able to tell it yet.
    pub async fn now(&self, store: &dyn Store, clock: &dyn Clock) -> Option<Time> {
        let before = clock.uptime();
        let known = {
            let mut state = self.state();
            let is_asked = before.saturating_sub(state.asked_at) < ANSWER_USED_FOR;
            // While one caller asks, the others use the answer that they have.
            if let (Some(answer), true) = (state.answer, is_asked) {
                return Some(answer.at(before));
            }
            state.asked_at = before;
            state.answer
        };
        let asked = store.now().await;
        let after = clock.uptime();
        let Ok(engine) = asked else { return known.map(|answer| answer.at(after)) };
        let answer = ClockAnswer { engine, uptime: before + after.saturating_sub(before) / 2 };
        self.state().answer = Some(answer);
        Some(answer.at(after))
    }

    fn state(&self) -> MutexGuard<'_, EngineClockState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use statehouse_store::ManualClock;
    use statehouse_store::model::ModelStore;

    use super::*;

    #[tokio::test]
    async fn time_passes_between_two_answers_of_the_engine() {
        let engine_clock = ManualClock::at(Time::from_millis(5_000_000));
        let store = ModelStore::with(Arc::new(engine_clock.clone()), 1);
        let here = ManualClock::at(Time::from_millis(0));
        let clock = EngineClock::default();
        assert_eq!(clock.now(&store, &here).await, Some(Time::from_millis(5_000_000)));
        // The engine's clock is set, and the process does not know yet.
        engine_clock.advance(Duration::from_secs(3600));
        here.advance(Duration::from_millis(999));
        assert_eq!(clock.now(&store, &here).await, Some(Time::from_millis(5_000_999)));
        here.advance(Duration::from_millis(1));
        assert_eq!(clock.now(&store, &here).await, Some(Time::from_millis(8_600_000)));
    }

    #[tokio::test]
    async fn the_last_answer_counts_while_the_engine_does_not_answer() {
        let store = ModelStore::with(Arc::new(ManualClock::at(Time::from_millis(7_000))), 1);
        let here = ManualClock::at(Time::from_millis(0));
        let clock = EngineClock::default();
        assert_eq!(clock.now(&store, &here).await, Some(Time::from_millis(7_000)));
        store.close().await;
        here.advance(Duration::from_secs(2));
        assert_eq!(clock.now(&store, &here).await, Some(Time::from_millis(9_000)));
        assert_eq!(EngineClock::default().now(&store, &here).await, None);
    }
}
