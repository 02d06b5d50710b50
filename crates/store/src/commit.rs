//! Commits a plan until its outcome is known.
//!
//! An engine that loses an answer returns [`StoreError::OutcomeUnknown`]. Committing the same plan again under the same
//! operation id is safe for a plan with a log entry (the record of the first attempt answers the second), and for a plan
//! whose guards fail, or hold for the same caller, the second time.
//!
//! - K1. An unknown outcome is never reported as a failure. *An attempt that failed says nothing about an earlier attempt
//!   whose answer was lost: after one, every error is reported as `OutcomeUnknown`.*
//! - K2. The number of attempts is bounded by the caller's [`RetryPolicy`]. Only an unknown outcome is retried.

use std::time::Duration;

use crate::clock::Clock;
use crate::error::StoreError;
use crate::outcome::Commit;
use crate::plan::Plan;
use crate::random::Random;
use crate::store::Store;

/// How often a plan whose outcome is unknown is committed, and how long the caller pauses between two attempts.
#[derive(Clone, Copy, Debug)]
pub struct RetryPolicy<'c> {
    /// Attempts in all, the first one included. There is always a first one.
    pub attempts: u32,
    /// The pauses; without it the next attempt follows at once.
    pub backoff: Option<Backoff<'c>>,
}

impl RetryPolicy<'static> {
    /// For workers, which run again in any case: few attempts, without pauses.
    pub const WORKER: RetryPolicy<'static> = RetryPolicy { attempts: 4, backoff: None };
}

/// Exponential backoff with jitter.
#[derive(Clone, Copy, Debug)]
pub struct Backoff<'c> {
    /// The clock that pauses are slept on.
    pub clock: &'c dyn Clock,
    /// The longest first pause. Each further one is up to twice as long as the one before.
    pub first: Duration,
}

/// How often a pause is doubled at most.
const DOUBLINGS_MAX: u32 = 8;

impl Backoff<'_> {
    /// The pause before retry `retry` (from 0) of an operation: from half of the longest pause to all of it. The operation
    /// id decides, so that concurrent callers spread and a simulation can be repeated.
    fn pause(&self, operation: &str, retry: u32) -> Duration {
        let longest = self.first.saturating_mul(1 << retry.min(DOUBLINGS_MAX));
        let seed = operation
            .bytes()
            .fold(u64::from(retry), |seed, byte| seed.wrapping_mul(0x0000_0100_0000_01b3) ^ u64::from(byte));
        longest.mul_f64(0.5 + Random::seeded(seed).unit() / 2.0)
    }
}

/// The last attempt's outcome, and whether the answer to an earlier attempt was lost.
#[derive(Debug)]
pub struct CommitReport {
    /// What the last attempt returned. An error that only says "try again later" after a lost answer is already
    /// `OutcomeUnknown`; any other error after a lost answer is as the engine gave it, for a caller that resolves the
    /// operation before it reports the error.
    pub outcome: Result<Commit, StoreError>,
    /// Whether the answer to some attempt was lost. A refusal is then not final: the lost attempt may still be in flight.
    pub answer_lost: bool,
}

impl CommitReport {
    /// The outcome for a caller that does not resolve operations (K1).
    pub fn into_outcome(self, plan: &Plan) -> Result<Commit, StoreError> {
        match self.outcome {
            Err(error) if self.answer_lost => Err(still_unknown(plan, error)),
            outcome => outcome,
        }
    }
}

fn still_unknown(plan: &Plan, error: StoreError) -> StoreError {
    match error {
        StoreError::OutcomeUnknown { .. } => error,
        StoreError::Unavailable { why } => StoreError::unknown(plan.operation(), why),
        other => StoreError::unknown(plan.operation(), other.to_string()),
    }
}

/// Commits a plan until its outcome is known, or the policy's attempts are used up.
pub async fn commit_known<S: Store + ?Sized>(
    store: &S,
    plan: &Plan,
    policy: RetryPolicy<'_>,
) -> Result<Commit, StoreError> {
    commit_reported(store, plan, policy).await.into_outcome(plan)
}

/// The same, and reports whether an answer was lost.
pub async fn commit_reported<S: Store + ?Sized>(
    store: &S,
    plan: &Plan,
    policy: RetryPolicy<'_>,
) -> CommitReport {
    let mut retry = 0;
    loop {
        match store.commit(plan).await {
            Err(StoreError::OutcomeUnknown { .. }) if retry + 1 < policy.attempts => {
                if let Some(backoff) = &policy.backoff {
                    backoff.clock.sleep(backoff.pause(plan.operation(), retry)).await;
                }
                retry += 1;
            }
            Err(error @ StoreError::OutcomeUnknown { .. }) => {
                return CommitReport { outcome: Err(error), answer_lost: true };
            }
            Err(error @ StoreError::Unavailable { .. }) if retry > 0 => {
                return CommitReport { outcome: Err(still_unknown(plan, error)), answer_lost: true };
            }
            outcome => return CommitReport { outcome, answer_lost: retry > 0 },
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::{Arc, Mutex};

    use async_trait::async_trait;

    use super::*;
    use crate::clock::SystemClock;
    use crate::faulty::{FaultyStore, Odds};
    use crate::{Entry, EventTemplate, Migrate, ModelStore, Reason, Schema, Step, Table, Tenant, Time, Type};

    const LOST: Odds = Odds { unknown_after: 1.0, ..SOUND };
    const UNAVAILABLE: Odds = Odds { unavailable: 1.0, ..SOUND };
    const SOUND: Odds = Odds {
        delay: 0.0,
        delay_at_most: Duration::ZERO,
        unavailable: 0.0,
        unknown_before: 0.0,
        unknown_after: 0.0,
        crash_before: 0.0,
        crash_after: 0.0,
        stale: 0.0,
    };

    /// What happens between a lost answer and the next attempt.
    #[derive(Clone, Copy, Debug)]
    enum Then {
        Fail(Odds),
        DropTables,
    }

    /// A clock on which pauses take no time: each one changes the store instead, and is remembered.
    #[derive(Debug)]
    struct NextFault {
        store: Arc<FaultyStore>,
        then: Then,
        pauses: Mutex<Vec<Duration>>,
    }

    #[async_trait]
    impl Clock for NextFault {
        fn now(&self) -> Time {
            Time::from_millis(0)
        }

        fn uptime(&self) -> Duration {
            Duration::ZERO
        }

        async fn sleep(&self, pause: Duration) {
            self.pauses.lock().unwrap().push(pause);
            let schema = Schema::new([]).unwrap();
            match self.then {
                Then::Fail(odds) => self.store.set_odds(odds),
                Then::DropTables => {
                    self.store.set_odds(SOUND);
                    self.store.inner().migrate(&schema, Migrate::ApplyWithLoss).await.unwrap();
                }
            }
        }
    }

    /// Notes in a store that loses the first answer.
    async fn notes(then: Then) -> (Arc<Table>, NextFault) {
        let table = Table::named("notes").partition("id", Type::Int).optional("text", Type::Text).build();
        let table = table.unwrap();
        let model = Arc::new(ModelStore::new());
        model.migrate(&Schema::new([table.clone()]).unwrap(), Migrate::Apply).await.unwrap();
        let store = Arc::new(FaultyStore::over(model, Arc::new(SystemClock), LOST, 1));
        (table, NextFault { store, then, pauses: Mutex::default() })
    }

    fn insert(table: &Arc<Table>) -> crate::plan::PlanBuilder {
        let tenant = Tenant::new("acme").unwrap();
        Plan::of(&tenant, "op").step(Step::insert(table, [1.into()]))
    }

    async fn report(clock: &NextFault, plan: &Plan) -> CommitReport {
        let backoff = Some(Backoff { clock, first: Duration::from_millis(8) });
        commit_reported(&*clock.store, plan, RetryPolicy { attempts: 3, backoff }).await
    }

    #[tokio::test]
    async fn unavailable_after_a_lost_answer_stays_unknown() {
        let (table, clock) = notes(Then::Fail(UNAVAILABLE)).await;
        let report = report(&clock, &insert(&table).build().unwrap()).await;
        assert!(report.answer_lost);
        assert!(matches!(report.outcome, Err(StoreError::OutcomeUnknown { .. })), "{:?}", report.outcome);
        let achieved = clock.store.achieved();
        assert_eq!((achieved.unknown_after, achieved.unavailable), (1, 1));
    }

    #[tokio::test]
    async fn unavailable_at_first_is_unavailable() {
        let (table, clock) = notes(Then::Fail(SOUND)).await;
        clock.store.set_odds(UNAVAILABLE);
        let report = report(&clock, &insert(&table).build().unwrap()).await;
        assert!(!report.answer_lost);
        assert!(matches!(report.outcome, Err(StoreError::Unavailable { .. })), "{:?}", report.outcome);
        assert_eq!(clock.store.achieved().unavailable, 1, "it is not retried");
    }

    #[tokio::test]
    async fn any_error_after_a_lost_answer_stays_unknown() {
        let (table, clock) = notes(Then::DropTables).await;
        let plan = insert(&table).build().unwrap();
        let report = report(&clock, &plan).await;
        assert!(report.answer_lost);
        assert!(matches!(report.outcome, Err(StoreError::Schema { .. })), "{:?}", report.outcome);
        let known = report.into_outcome(&plan);
        assert!(matches!(known, Err(StoreError::OutcomeUnknown { .. })), "{known:?}");
    }

    #[tokio::test]
    async fn a_logged_plan_gets_its_first_outcome() {
        let (table, clock) = notes(Then::Fail(SOUND)).await;
        let entry = Entry::about("note", "1").event(EventTemplate::named("note.created"));
        let report = report(&clock, &insert(&table).log(entry).build().unwrap()).await;
        assert!(report.answer_lost);
        assert!(matches!(report.outcome, Ok(Commit::Applied(applied)) if applied.repeated));
    }

    #[tokio::test]
    async fn a_refusal_after_a_lost_answer_says_that_one_was_lost() {
        let (table, clock) = notes(Then::Fail(SOUND)).await;
        let report = report(&clock, &insert(&table).build().unwrap()).await;
        assert!(report.answer_lost);
        assert!(matches!(report.outcome, Ok(Commit::Refused(refused)) if refused.reason == Reason::Present));
    }

    #[tokio::test]
    async fn attempts_are_bounded_and_pauses_grow() {
        let (table, clock) = notes(Then::Fail(LOST)).await;
        let report = report(&clock, &insert(&table).build().unwrap()).await;
        assert!(report.answer_lost);
        assert!(matches!(report.outcome, Err(StoreError::OutcomeUnknown { .. })), "{:?}", report.outcome);
        assert_eq!(clock.store.achieved().unknown_after, 3);
        let pauses = clock.pauses.lock().unwrap().clone();
        let millis: Vec<f64> = pauses.iter().map(|pause| pause.as_secs_f64() * 1_000.0).collect();
        assert!(
            matches!(millis[..], [first, second] if (4.0..=8.0).contains(&first)
            && (8.0..=16.0).contains(&second)),
            "{millis:?}"
        );
    }

    #[test]
    fn pauses_differ_between_operations_and_repeat_for_one() {
        let backoff = Backoff { clock: &SystemClock, first: Duration::from_millis(8) };
        assert_eq!(backoff.pause("op-1", 0), backoff.pause("op-1", 0));
        assert_ne!(backoff.pause("op-1", 0), backoff.pause("op-2", 0));
    }
}
