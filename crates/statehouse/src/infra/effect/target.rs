//! Limits and circuit breakers of targets.
//!
//! ```text
//!             failures in a row                 cool-down is over
//!   CLOSED ───────────────────────► OPEN ◄────────────────────────► HALF OPEN
//!      ▲                                       the probe failed          │
//!      └──────────────────────────────────────────── the probe succeeded ┘
//! ```
//!
//! Two things are counted. A [`KnownTarget`] is a host and port for all tenants: it bounds what the target receives. A
//! [`TenantTarget`] is one tenant at one target: it has the breaker and the waiting time that the target asked for. A tenant
//! whose path at a shared host fails, or whose requests the host throttles, waits alone.
//!
//! The state is of this process and lost with it. That suffices, because all effects of one target are in one shard, and
//! a shard is one process's at a time: no other process sends to the same target for the same resource. A process that
//! takes the shard over begins with closed breakers.
//!
//! - T1. A target has at most `concurrency` requests in flight, over all tenants. *A pass is taken before the effect is
//!   claimed.* Tenants that wait for the same target share its slots evenly ([`Targets::in_flight`] orders the rows).
//! - T2. A target gets at most `per_second` requests in a second, on the average, and as many at once, over all tenants.
//! - T3. A tenant whose requests to a target failed `failures` times in a row sends nothing there for `cool_down`; then one
//!   probe goes, and its result decides for the tenant's other requests.
//! - T4. A tenant that a target throttles sends nothing there for the time that the target asks for.
//! - T5. Failures of one target or one tenant do not delay other targets or other tenants. *Breaker and throttling are
//!   counted by tenant and target.*

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use statehouse_store::Tenant;

use super::rules::TargetHealth;
use crate::worker::Gauge;

/// What is asked of a target at most, and what it may fail.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct TargetLimits {
    pub concurrency: usize,
    pub per_second: Option<u32>,
    pub failures: u32,
    pub cool_down: Duration,
}

/// Targets that are known to this process.
#[derive(Debug)]
pub(super) struct Targets {
    limits: TargetLimits,
    known: Mutex<KnownTargets>,
}

#[derive(Debug, Default)]
struct KnownTargets {
    targets: BTreeMap<String, KnownTarget>,
    /// How many accounts they have in all.
    accounts: usize,
}

/// One target, for all tenants. Times are the clock's uptime.
#[derive(Clone, Debug, Default)]
struct KnownTarget {
    in_flight: usize,
    /// When the rate is used up to nothing again.
    level_at: Duration,
    accounts: BTreeMap<Tenant, TenantTarget>,
}

/// One tenant at one target.
#[derive(Clone, Debug, Default)]
struct TenantTarget {
    in_flight: usize,
    failures: u32,
    breaker: Breaker,
    throttled_until: Duration,
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

/// Whether an effect can be sent now.
#[derive(Debug)]
pub(super) enum SendPermit {
    /// It can.
    Pass(InFlightRequest),
    /// When a request to the target has ended.
    Full,
    /// Not before this uptime.
    Later(Duration),
}

/// A request in flight. A pass that is dropped, because the step was cut short, reports nothing about the target.
#[derive(Debug)]
pub(super) struct InFlightRequest {
    targets: Arc<Targets>,
    tenant: Tenant,
    target: String,
    probe: bool,
    reported: bool,
}

/// Accounts that are remembered. Beyond that, those without state are removed.
const KNOWN_MAX: usize = 10_000;

impl Targets {
    pub(super) fn with(limits: TargetLimits) -> Targets {
        Targets { limits, known: Mutex::default() }
    }

    /// Asks whether a tenant's effect can be sent to a target now.
    pub(super) fn enter(self: &Arc<Targets>, tenant: &Tenant, target: &str, uptime: Duration) -> SendPermit {
        let mut known = self.known.lock().unwrap_or_else(PoisonError::into_inner);
        known.make_room(tenant, target, uptime);
        let state = known.targets.entry(target.to_owned()).or_default();
        let account = state.accounts.entry(tenant.clone()).or_default();
        if account.throttled_until > uptime {
            return SendPermit::Later(account.throttled_until);
        }
        let probe = match account.breaker {
            Breaker::Open { until } if until > uptime => return SendPermit::Later(until),
            Breaker::Open { .. } => true,
            Breaker::HalfOpen => return SendPermit::Full,
            Breaker::Closed => false,
        };
        if state.in_flight >= self.limits.concurrency {
            return SendPermit::Full;
        }
        if let Some(per_second) = self.limits.per_second {
            // A bucket that fills by one in each interval and holds a second's worth.
            let interval = Duration::from_secs(1) / per_second.max(1);
            let level = state.level_at.max(uptime) + interval;
            if level > uptime + Duration::from_secs(1).max(interval) {
                return SendPermit::Later(level - Duration::from_secs(1).max(interval));
            }
            state.level_at = level;
        }
        if probe {
            account.breaker = Breaker::HalfOpen;
        }
        account.in_flight += 1;
        state.in_flight += 1;
        SendPermit::Pass(InFlightRequest {
            targets: self.clone(),
            tenant: tenant.clone(),
            target: target.to_owned(),
            probe,
            reported: false,
        })
    }

    /// How many requests of a tenant to a target are in flight. The tenant with the fewest is admitted first.
    pub(super) fn in_flight(&self, tenant: &Tenant, target: &str) -> usize {
        let known = self.known.lock().unwrap_or_else(PoisonError::into_inner);
        let account = known.targets.get(target).and_then(|target| target.accounts.get(tenant));
        account.map_or(0, |account| account.in_flight)
    }

    /// How many accounts are in which state, for the metrics.
    pub(super) fn gauges(&self) -> Vec<Gauge> {
        let known = self.known.lock().unwrap_or_else(PoisonError::into_inner);
        let count = |wanted: fn(&Breaker) -> bool| {
            known.targets.values().flat_map(|t| t.accounts.values()).filter(|a| wanted(&a.breaker)).count()
        };
        let gauge = |state: &'static str, count: usize| Gauge {
            name: "effect_targets",
            about: "Targets of effects that this process knows, one for each tenant, by the state of their breaker.",
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
                value: known.targets.values().map(|target| target.in_flight).sum::<usize>() as f64,
            },
        ]
    }
}

impl KnownTargets {
    /// Counts an account that is about to be added. If there are too many, those without state are removed. If all have
    /// state, accounts with failures but without a request in flight go too: a caller that invents hosts must not fill
    /// the memory.
    fn make_room(&mut self, tenant: &Tenant, target: &str, uptime: Duration) {
        if self.targets.get(target).is_some_and(|target| target.accounts.contains_key(tenant)) {
            return;
        }
        if self.accounts >= KNOWN_MAX {
            self.retain(uptime, |account| !account.is_plain(uptime));
        }
        if self.accounts >= KNOWN_MAX {
            self.retain(uptime, |account| account.in_flight > 0);
        }
        self.accounts += 1;
    }

    fn retain(&mut self, uptime: Duration, keep: impl Fn(&TenantTarget) -> bool) {
        for target in self.targets.values_mut() {
            target.accounts.retain(|_, account| keep(account));
        }
        self.targets.retain(|_, target| !target.is_plain(uptime));
        self.accounts = self.targets.values().map(|target| target.accounts.len()).sum();
    }
}

impl KnownTarget {
    /// Whether forgetting it changes nothing.
    fn is_plain(&self, uptime: Duration) -> bool {
        self.in_flight == 0 && self.level_at <= uptime && self.accounts.is_empty()
    }
}

impl TenantTarget {
    /// Whether forgetting it changes nothing.
    fn is_plain(&self, uptime: Duration) -> bool {
        self.in_flight == 0
            && self.failures == 0
            && self.breaker == Breaker::Closed
            && self.throttled_until <= uptime
    }

    /// Reports how a request of this tenant went. Returns whether that opened the breaker.
    fn report(&mut self, health: TargetHealth, probe: bool, limits: TargetLimits, uptime: Duration) -> bool {
        if let TargetHealth::Throttled(duration) = health {
            self.throttled_until = self.throttled_until.max(uptime + duration);
        }
        let bad = health == TargetHealth::Bad;
        match self.breaker {
            // Requests that were in flight when it opened report nothing new.
            Breaker::Open { .. } => false,
            Breaker::HalfOpen if !probe => false,
            Breaker::Closed | Breaker::HalfOpen => {
                self.failures = if bad { self.failures.saturating_add(1) } else { 0 };
                let opens = bad && (probe || self.failures >= limits.failures);
                self.breaker =
                    if opens { Breaker::Open { until: uptime + limits.cool_down } } else { Breaker::Closed };
                opens
            }
        }
    }
}

impl InFlightRequest {
    /// Ends the request and reports how it went. Returns whether that opened the breaker.
    pub(super) fn finish(mut self, health: TargetHealth, uptime: Duration) -> bool {
        self.reported = true;
        let (limits, probe) = (self.targets.limits, self.probe);
        self.end(|account| account.report(health, probe, limits, uptime)).unwrap_or(false)
    }

    fn end<T>(&self, report: impl FnOnce(&mut TenantTarget) -> T) -> Option<T> {
        let mut known = self.targets.known.lock().unwrap_or_else(PoisonError::into_inner);
        let state = known.targets.get_mut(&self.target)?;
        state.in_flight = state.in_flight.saturating_sub(1);
        let account = state.accounts.get_mut(&self.tenant)?;
        account.in_flight = account.in_flight.saturating_sub(1);
        Some(report(account))
    }
}

impl Drop for InFlightRequest {
    fn drop(&mut self) {
        if self.reported {
            return;
        }
        self.end(|account| {
            if self.probe && account.breaker == Breaker::HalfOpen {
                // The next request is a probe again.
                account.breaker = Breaker::Open { until: Duration::ZERO };
            }
        });
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SECOND: Duration = Duration::from_secs(1);

    fn targets(concurrency: usize, per_second: Option<u32>) -> Arc<Targets> {
        Arc::new(Targets::with(TargetLimits { concurrency, per_second, failures: 3, cool_down: SECOND * 30 }))
    }

    fn enter(targets: &Arc<Targets>, tenant: &str, target: &str, uptime: Duration) -> SendPermit {
        targets.enter(&Tenant::new(tenant).unwrap(), target, uptime)
    }

    fn pass(targets: &Arc<Targets>, target: &str, uptime: Duration) -> InFlightRequest {
        pass_of(targets, "acme", target, uptime)
    }

    fn pass_of(targets: &Arc<Targets>, tenant: &str, target: &str, uptime: Duration) -> InFlightRequest {
        match enter(targets, tenant, target, uptime) {
            SendPermit::Pass(pass) => pass,
            other => panic!("{target} at {uptime:?}: {other:?}"),
        }
    }

    fn later(targets: &Arc<Targets>, target: &str, uptime: Duration) -> Duration {
        match enter(targets, "acme", target, uptime) {
            SendPermit::Later(at) => at,
            other => panic!("{target} at {uptime:?}: {other:?}"),
        }
    }

    #[test]
    fn no_more_than_so_many_at_once() {
        let targets = targets(2, None);
        let first = pass(&targets, "a", SECOND);
        let second = pass(&targets, "a", SECOND);
        assert!(matches!(enter(&targets, "acme", "a", SECOND), SendPermit::Full));
        // Another target has room, and one who left without a word has made some.
        let _other = pass(&targets, "b", SECOND);
        drop(first);
        let _third = pass(&targets, "a", SECOND);
        assert!(matches!(enter(&targets, "acme", "a", SECOND), SendPermit::Full));
        second.finish(TargetHealth::Good, SECOND);
        let _fourth = pass(&targets, "a", SECOND);
    }

    #[test]
    fn no_more_than_so_many_in_a_second() {
        let targets = targets(100, Some(4));
        for _ in 0..4 {
            pass(&targets, "a", SECOND).finish(TargetHealth::Good, SECOND);
        }
        assert_eq!(later(&targets, "a", SECOND), SECOND + SECOND / 4);
        pass(&targets, "b", SECOND).finish(TargetHealth::Good, SECOND);
        pass(&targets, "a", SECOND + SECOND / 4).finish(TargetHealth::Good, SECOND);
        assert_eq!(later(&targets, "a", SECOND + SECOND / 4), SECOND + SECOND / 2);
        for _ in 0..4 {
            pass(&targets, "a", SECOND * 9).finish(TargetHealth::Good, SECOND * 9);
        }
        later(&targets, "a", SECOND * 9);
    }

    #[test]
    fn the_breaker_opens_probes_and_closes() {
        let targets = targets(10, None);
        let fail = |at| pass(&targets, "a", at).finish(TargetHealth::Bad, at);
        assert_eq!([fail(SECOND), fail(SECOND)], [false, false]);
        // A success in between begins the count anew.
        assert!(!pass(&targets, "a", SECOND).finish(TargetHealth::Good, SECOND));
        assert_eq!([fail(SECOND), fail(SECOND)], [false, false]);
        let late = pass(&targets, "a", SECOND);
        assert!(fail(SECOND));
        assert_eq!(later(&targets, "a", SECOND * 2), SECOND * 31);
        pass(&targets, "b", SECOND).finish(TargetHealth::Good, SECOND);
        // One that was under way does not close it.
        assert!(!late.finish(TargetHealth::Good, SECOND * 3));
        assert_eq!(later(&targets, "a", SECOND * 30), SECOND * 31);
        // One probe at a time; its failure opens it for as long again.
        let probe = pass(&targets, "a", SECOND * 31);
        assert!(matches!(enter(&targets, "acme", "a", SECOND * 31), SendPermit::Full));
        assert!(probe.finish(TargetHealth::Bad, SECOND * 32));
        assert_eq!(later(&targets, "a", SECOND * 33), SECOND * 62);
        // A probe that says nothing leaves its place to another.
        drop(pass(&targets, "a", SECOND * 62));
        let probe = pass(&targets, "a", SECOND * 62);
        assert!(!probe.finish(TargetHealth::Good, SECOND * 62));
        let _two = (pass(&targets, "a", SECOND * 63), pass(&targets, "a", SECOND * 63));
        let open = |targets: &Targets| targets.gauges().iter().map(|gauge| gauge.value).collect::<Vec<_>>();
        assert_eq!(open(&targets), [2.0, 0.0, 0.0, 2.0]);
    }

    #[test]
    fn patience_is_given() {
        let targets = targets(10, None);
        assert!(!pass(&targets, "a", SECOND).finish(TargetHealth::Throttled(SECOND * 60), SECOND));
        assert_eq!(later(&targets, "a", SECOND * 2), SECOND * 61);
        pass(&targets, "a", SECOND * 61).finish(TargetHealth::Good, SECOND * 61);
    }

    #[test]
    fn failures_of_one_tenant_are_its_own() {
        let targets = targets(4, None);
        for _ in 0..3 {
            pass(&targets, "a", SECOND).finish(TargetHealth::Bad, SECOND);
        }
        assert_eq!(later(&targets, "a", SECOND * 2), SECOND * 31);
        pass_of(&targets, "globex", "a", SECOND * 2).finish(TargetHealth::Throttled(SECOND * 9), SECOND * 2);
        assert!(
            matches!(enter(&targets, "globex", "a", SECOND * 3), SendPermit::Later(at) if at == SECOND * 11)
        );
        // A third one is neither throttled nor cut off, and its success closes no breaker but its own.
        assert!(!pass_of(&targets, "initech", "a", SECOND * 3).finish(TargetHealth::Good, SECOND * 3));
        assert_eq!(later(&targets, "a", SECOND * 4), SECOND * 31);
        // The bound of the target is above all tenants.
        let passes: Vec<InFlightRequest> = ["globex", "initech", "initech", "umbrella"]
            .map(|tenant| pass_of(&targets, tenant, "a", SECOND * 11))
            .into();
        assert!(matches!(enter(&targets, "hooli", "a", SECOND * 11), SendPermit::Full));
        assert_eq!(targets.in_flight(&Tenant::new("initech").unwrap(), "a"), 2);
        drop(passes);
        assert_eq!(targets.in_flight(&Tenant::new("initech").unwrap(), "a"), 0);
        drop(pass_of(&targets, "hooli", "a", SECOND * 11));
    }

    #[test]
    fn invented_hosts_do_not_fill_the_memory() {
        let targets = targets(1, None);
        let _busy = pass(&targets, "busy", SECOND);
        for number in 0..KNOWN_MAX + 10 {
            pass(&targets, &format!("host-{number}"), SECOND).finish(TargetHealth::Bad, SECOND);
        }
        let count = targets.gauges().iter().take(3).map(|gauge| gauge.value).sum::<f64>();
        assert!(count <= KNOWN_MAX as f64, "{count}");
        assert!(matches!(enter(&targets, "acme", "busy", SECOND), SendPermit::Full));
    }
}
