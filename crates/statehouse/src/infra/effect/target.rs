//! Targets: how much each of them is asked for at once, and when it is left alone.
//!
//! ```text
//!             failures in a row                 cool-down is over
//!   CLOSED ───────────────────────► OPEN ◄────────────────────────► HALF OPEN
//!      ▲                                       the probe failed          │
//!      └──────────────────────────────────────────── the probe succeeded ┘
//! ```
//!
//! What is known here is of this process and lost with it. That suffices, because all effects of one target are in one
//! shard, and a shard is one process's at a time: no other process asks the same target for the same resource. A process
//! that takes the shard over begins with a closed breaker.
//!
//! - T1. A target has at most `concurrency` requests under way. *A pass is taken before the effect is claimed.*
//! - T2. A target gets at most `per_second` requests in a second, on the average, and as many at once.
//! - T3. A target that failed `failures` times in a row is left alone for `cool_down`; then one probe goes, and its result
//!   decides for the others.
//! - T4. A target that asks for patience is left alone for so long.
//! - T5. One target's troubles are nobody else's. *All of this is counted by target.*

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use super::rules::Health;
use crate::worker::Gauge;

/// What is asked of a target at most, and what it may fail.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Limits {
    pub concurrency: usize,
    pub per_second: Option<u32>,
    pub failures: u32,
    pub cool_down: Duration,
}

/// Targets that are known to this process.
#[derive(Debug)]
pub(super) struct Targets {
    limits: Limits,
    known: Mutex<BTreeMap<String, Target>>,
}

/// One target. Times are the clock's uptime.
#[derive(Clone, Debug, Default)]
struct Target {
    in_flight: usize,
    failures: u32,
    breaker: Breaker,
    /// When the rate is used up to nothing again.
    level_at: Duration,
    patient_until: Duration,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum Breaker {
    #[default]
    Closed,
    Open {
        until: Duration,
    },
    HalfOpen,
}

/// What a target says to somebody who comes with an effect.
#[derive(Debug)]
pub(super) enum Admission {
    /// Come in.
    Pass(Pass),
    /// Wait until somebody has come out.
    Full,
    /// Come again at this uptime.
    Later(Duration),
}

/// Somebody who is in. Whoever leaves without a word, because the step was cut short, has not said anything about it.
#[derive(Debug)]
pub(super) struct Pass {
    targets: Arc<Targets>,
    target: String,
    probe: bool,
    told: bool,
}

/// Targets that are remembered. Beyond that, those about which there is nothing to remember are forgotten.
const KNOWN_MAX: usize = 10_000;

impl Targets {
    pub(super) fn with(limits: Limits) -> Targets {
        Targets { limits, known: Mutex::default() }
    }

    /// Asks a target whether an effect can come now.
    pub(super) fn enter(self: &Arc<Targets>, target: &str, uptime: Duration) -> Admission {
        let mut known = self.known.lock().unwrap_or_else(PoisonError::into_inner);
        if known.len() >= KNOWN_MAX && !known.contains_key(target) {
            known.retain(|_, target| !target.is_plain(uptime));
        }
        let state = known.entry(target.to_owned()).or_default();
        if state.patient_until > uptime {
            return Admission::Later(state.patient_until);
        }
        let probe = match state.breaker {
            Breaker::Open { until } if until > uptime => return Admission::Later(until),
            Breaker::Open { .. } => true,
            Breaker::HalfOpen => return Admission::Full,
            Breaker::Closed => false,
        };
        if state.in_flight >= self.limits.concurrency {
            return Admission::Full;
        }
        if let Some(per_second) = self.limits.per_second {
            // A bucket that fills by one in each interval and holds a second's worth.
            let interval = Duration::from_secs(1) / per_second.max(1);
            let level = state.level_at.max(uptime) + interval;
            if level > uptime + Duration::from_secs(1).max(interval) {
                return Admission::Later(level - Duration::from_secs(1).max(interval));
            }
            state.level_at = level;
        }
        if probe {
            state.breaker = Breaker::HalfOpen;
        }
        state.in_flight += 1;
        Admission::Pass(Pass { targets: self.clone(), target: target.to_owned(), probe, told: false })
    }

    /// How many targets are in which state, for whoever watches.
    pub(super) fn gauges(&self) -> Vec<Gauge> {
        let known = self.known.lock().unwrap_or_else(PoisonError::into_inner);
        let count = |wanted: fn(&Breaker) -> bool| known.values().filter(|t| wanted(&t.breaker)).count();
        let gauge = |state: &'static str, count: usize| Gauge {
            name: "effect_targets",
            about: "Targets of effects that this process knows, by the state of their breaker.",
            label: ("breaker", state),
            value: count as f64,
        };
        vec![
            gauge("closed", count(|breaker| *breaker == Breaker::Closed)),
            gauge("open", count(|breaker| matches!(breaker, Breaker::Open { .. }))),
            gauge("half_open", count(|breaker| *breaker == Breaker::HalfOpen)),
            Gauge {
                name: "effect_requests_in_flight",
                about: "Requests to targets that are under way.",
                label: ("breaker", "any"),
                value: known.values().map(|target| target.in_flight).sum::<usize>() as f64,
            },
        ]
    }
}

impl Target {
    /// Whether it is as if nothing had ever been heard of it.
    fn is_plain(&self, uptime: Duration) -> bool {
        self.in_flight == 0
            && self.failures == 0
            && self.breaker == Breaker::Closed
            && self.level_at <= uptime
            && self.patient_until <= uptime
    }
}

impl Pass {
    /// Leaves, and says how the target was. Says whether that opened the breaker.
    pub(super) fn leave(mut self, health: Health, uptime: Duration) -> bool {
        self.told = true;
        let limits = self.targets.limits;
        let mut known = self.targets.known.lock().unwrap_or_else(PoisonError::into_inner);
        let Some(state) = known.get_mut(&self.target) else { return false };
        state.in_flight = state.in_flight.saturating_sub(1);
        if let Health::Throttled(span) = health {
            state.patient_until = state.patient_until.max(uptime + span);
        }
        let bad = health == Health::Bad;
        match state.breaker {
            // What was under way when it opened says nothing new.
            Breaker::Open { .. } => false,
            Breaker::HalfOpen if !self.probe => false,
            Breaker::Closed | Breaker::HalfOpen => {
                state.failures = if bad { state.failures.saturating_add(1) } else { 0 };
                let opens = bad && (self.probe || state.failures >= limits.failures);
                state.breaker =
                    if opens { Breaker::Open { until: uptime + limits.cool_down } } else { Breaker::Closed };
                opens
            }
        }
    }
}

impl Drop for Pass {
    fn drop(&mut self) {
        if self.told {
            return;
        }
        let mut known = self.targets.known.lock().unwrap_or_else(PoisonError::into_inner);
        let Some(state) = known.get_mut(&self.target) else { return };
        state.in_flight = state.in_flight.saturating_sub(1);
        if self.probe && state.breaker == Breaker::HalfOpen {
            // The next one is a probe again.
            state.breaker = Breaker::Open { until: Duration::ZERO };
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SECOND: Duration = Duration::from_secs(1);

    fn targets(concurrency: usize, per_second: Option<u32>) -> Arc<Targets> {
        Arc::new(Targets::with(Limits { concurrency, per_second, failures: 3, cool_down: SECOND * 30 }))
    }

    fn pass(targets: &Arc<Targets>, target: &str, uptime: Duration) -> Pass {
        match targets.enter(target, uptime) {
            Admission::Pass(pass) => pass,
            other => panic!("{target} at {uptime:?}: {other:?}"),
        }
    }

    fn later(targets: &Arc<Targets>, target: &str, uptime: Duration) -> Duration {
        match targets.enter(target, uptime) {
            Admission::Later(at) => at,
            other => panic!("{target} at {uptime:?}: {other:?}"),
        }
    }

    #[test]
    fn no_more_than_so_many_at_once() {
        let targets = targets(2, None);
        let first = pass(&targets, "a", SECOND);
        let second = pass(&targets, "a", SECOND);
        assert!(matches!(targets.enter("a", SECOND), Admission::Full));
        // Another target has room, and one who left without a word has made some.
        let _other = pass(&targets, "b", SECOND);
        drop(first);
        let _third = pass(&targets, "a", SECOND);
        assert!(matches!(targets.enter("a", SECOND), Admission::Full));
        second.leave(Health::Good, SECOND);
        let _fourth = pass(&targets, "a", SECOND);
    }

    #[test]
    fn no_more_than_so_many_in_a_second() {
        let targets = targets(100, Some(4));
        for _ in 0..4 {
            pass(&targets, "a", SECOND).leave(Health::Good, SECOND);
        }
        assert_eq!(later(&targets, "a", SECOND), SECOND + SECOND / 4);
        pass(&targets, "b", SECOND).leave(Health::Good, SECOND);
        pass(&targets, "a", SECOND + SECOND / 4).leave(Health::Good, SECOND);
        assert_eq!(later(&targets, "a", SECOND + SECOND / 4), SECOND + SECOND / 2);
        for _ in 0..4 {
            pass(&targets, "a", SECOND * 9).leave(Health::Good, SECOND * 9);
        }
        later(&targets, "a", SECOND * 9);
    }

    #[test]
    fn the_breaker_opens_probes_and_closes() {
        let targets = targets(10, None);
        let fail = |at| pass(&targets, "a", at).leave(Health::Bad, at);
        assert_eq!([fail(SECOND), fail(SECOND)], [false, false]);
        // A success in between begins the count anew.
        assert!(!pass(&targets, "a", SECOND).leave(Health::Good, SECOND));
        assert_eq!([fail(SECOND), fail(SECOND)], [false, false]);
        let late = pass(&targets, "a", SECOND);
        assert!(fail(SECOND));
        assert_eq!(later(&targets, "a", SECOND * 2), SECOND * 31);
        pass(&targets, "b", SECOND).leave(Health::Good, SECOND);
        // One that was under way does not close it.
        assert!(!late.leave(Health::Good, SECOND * 3));
        assert_eq!(later(&targets, "a", SECOND * 30), SECOND * 31);
        // One probe at a time; its failure opens it for as long again.
        let probe = pass(&targets, "a", SECOND * 31);
        assert!(matches!(targets.enter("a", SECOND * 31), Admission::Full));
        assert!(probe.leave(Health::Bad, SECOND * 32));
        assert_eq!(later(&targets, "a", SECOND * 33), SECOND * 62);
        // A probe that says nothing leaves its place to another.
        drop(pass(&targets, "a", SECOND * 62));
        let probe = pass(&targets, "a", SECOND * 62);
        assert!(!probe.leave(Health::Good, SECOND * 62));
        let _two = (pass(&targets, "a", SECOND * 63), pass(&targets, "a", SECOND * 63));
        let open = |targets: &Targets| targets.gauges().iter().map(|gauge| gauge.value).collect::<Vec<_>>();
        assert_eq!(open(&targets), [2.0, 0.0, 0.0, 2.0]);
    }

    #[test]
    fn patience_is_given() {
        let targets = targets(10, None);
        assert!(!pass(&targets, "a", SECOND).leave(Health::Throttled(SECOND * 60), SECOND));
        assert_eq!(later(&targets, "a", SECOND * 2), SECOND * 61);
        pass(&targets, "a", SECOND * 61).leave(Health::Good, SECOND * 61);
    }
}
