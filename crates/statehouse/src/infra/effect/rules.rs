//! What follows from what is known. No I/O: what was seen goes in, what becomes of the row comes out.

use std::time::Duration;

use serde_json::Value as Json;
use statehouse_store::Tenant;
use statehouse_store::log::partition_of;

use super::settle::Interpretation;
use super::{DELIVERED, PARKED, RETRYING, UNCERTAIN};
use crate::egress::{SendOutcome, TargetResponse};

/// How one kind of effect is sent again.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct RetryRules {
    /// Tries before it is parked.
    pub max_attempts: i64,
    /// The first pause between two tries, and the longest.
    pub pause_min: Duration,
    pub pause_max: Duration,
    /// Whether the target does the same key once, so that it can be sent again although its outcome is unknown.
    pub idempotent: bool,
    /// Whether the target keeps an error of its own under the key and repeats it, so that sending again learns nothing.
    pub replays_errors: bool,
    /// How long to wait before the target is asked what it did, and how often before an operator is alerted; `None` if it
    /// cannot be asked.
    pub reconcile: Option<ReconcileRules>,
}

/// When a target is asked what became of an effect.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct ReconcileRules {
    pub after: Duration,
    pub max_checks: i64,
}

/// What was known of an effect before: tries under this run with the one at hand, questions asked with the one at hand,
/// and whether some attempt may have been applied.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct AttemptHistory {
    pub tries: i64,
    pub checks: i64,
    pub doubt: bool,
    /// Whether the target has kept an error under the key ([`RetryRules::replays_errors`]).
    pub kept_error: bool,
    /// From 0 to below 1: spreads those that failed together.
    pub spread: f64,
}

/// What becomes of it.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct EffectOutcome {
    pub status: &'static str,
    pub doubt: bool,
    /// When the house looks at it again; `None` for never by itself.
    pub wait: Option<Duration>,
    /// Whether an operator has to be alerted.
    pub stuck: bool,
    /// A stable word for why, and the rest of it.
    pub reason: Option<&'static str>,
    pub detail: String,
}

/// What an exchange says about the target itself.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum TargetHealth {
    /// It is there and answers, whatever it answers.
    Good,
    /// It is not, or it is broken.
    Bad,
    /// It is there and wants to be left alone for so long.
    Throttled(Duration),
}

/// What a target says about an effect whose acknowledgement was lost.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum ReconcileFinding {
    Applied,
    NotApplied,
    Unknown,
}

pub(super) const REJECTED: &str = "rejected";
pub(super) const REDIRECTED: &str = "redirected";
pub(super) const FORBIDDEN: &str = "address_forbidden";
pub(super) const EXHAUSTED: &str = "attempts_exhausted";
pub(super) const EXPIRED: &str = "expired";
pub(super) const NO_ANSWER: &str = "no_answer";
pub(super) const LAPSED: &str = "sender_lost";
pub(super) const NOT_TAKEN: &str = "not_taken";
pub(super) const BROKEN: &str = "target_failed";
pub(super) const RECONCILED: &str = "reconciled";
pub(super) const BY_HAND: &str = "resolved_by_hand";

/// What an exchange means for the effect.
enum ResponseMeaning {
    Applied,
    /// The target did not take it this time, and may another time.
    NotTaken(&'static str, Duration),
    /// The target will not take it.
    Refused(&'static str),
    /// An answer that leaves open whether it was applied.
    Broken,
    /// The same, as a settler reads it.
    Open(&'static str),
    /// No answer.
    Silence,
}

impl RetryRules {
    /// What an exchange means. A target that asks for patience, or says that it could not take a request, has not applied it;
    /// a server's error leaves that open.
    fn meaning(&self, sent: &SendOutcome, interpreted: Interpretation) -> ResponseMeaning {
        match interpreted {
            Interpretation::Definite => return ResponseMeaning::Applied,
            Interpretation::NotApplied => return ResponseMeaning::Refused(REJECTED),
            Interpretation::Open(reason) => return ResponseMeaning::Open(reason),
            Interpretation::ByStatus => {}
        }
        match sent {
            SendOutcome::NotSent { .. } => ResponseMeaning::NotTaken(NOT_TAKEN, Duration::ZERO),
            SendOutcome::Forbidden { .. } => ResponseMeaning::Refused(FORBIDDEN),
            SendOutcome::Unknown { .. } => ResponseMeaning::Silence,
            SendOutcome::Answered(TargetResponse { status, retry_after, .. }) => match status {
                200..=299 => ResponseMeaning::Applied,
                300..=399 => ResponseMeaning::Refused(REDIRECTED),
                408 | 425 | 429 | 503 => {
                    ResponseMeaning::NotTaken(NOT_TAKEN, retry_after.unwrap_or_default())
                }
                // The same key is under way there already.
                409 if self.idempotent => ResponseMeaning::Broken,
                400..=499 => ResponseMeaning::Refused(REJECTED),
                _ => ResponseMeaning::Broken,
            },
        }
    }

    /// What becomes of an effect that was sent.
    pub(super) fn after_sending(
        &self,
        before: AttemptHistory,
        sent: &SendOutcome,
        interpreted: Interpretation,
    ) -> EffectOutcome {
        let detail = describe(sent);
        let outcome = |status, doubt, wait, reason| EffectOutcome {
            status,
            doubt,
            wait,
            stuck: false,
            reason,
            detail: detail.clone(),
        };
        let again = before.tries < self.max_attempts;
        let pause = self.pause(before.tries, before.spread);
        match self.meaning(sent, interpreted) {
            ResponseMeaning::Applied => outcome(DELIVERED, false, None, None),
            ResponseMeaning::NotTaken(reason, least) if again => {
                outcome(RETRYING, before.doubt, Some(pause.max(least)), Some(reason))
            }
            ResponseMeaning::NotTaken(..) if !before.doubt => outcome(PARKED, false, None, Some(EXHAUSTED)),
            ResponseMeaning::Refused(reason) if !before.doubt => outcome(PARKED, false, None, Some(reason)),
            // An earlier attempt may have been applied; that this one was not says nothing about it.
            ResponseMeaning::NotTaken(..) => self.unsettled(before, false, EXHAUSTED, detail),
            ResponseMeaning::Refused(reason) => self.unsettled(before, false, reason, detail),
            ResponseMeaning::Broken if again && self.idempotent && !self.replays_errors => {
                outcome(RETRYING, true, Some(pause), Some(BROKEN))
            }
            ResponseMeaning::Broken => self.unsettled(before, again, BROKEN, detail),
            ResponseMeaning::Open(reason) => self.unsettled(before, again, reason, detail),
            ResponseMeaning::Silence => self.unsettled(before, again, NO_ANSWER, detail),
        }
    }

    /// What becomes of an effect whose sender did not come back: it was sent, or not.
    pub(super) fn after_lapse(&self, before: AttemptHistory) -> EffectOutcome {
        let detail = "the process that sent it did not record an outcome".to_owned();
        self.unsettled(before, before.tries < self.max_attempts, LAPSED, detail)
    }

    /// What becomes of an effect that expired before it was sent.
    pub(super) fn after_expiry(&self, before: AttemptHistory) -> EffectOutcome {
        let detail = "it expired before it could be sent".to_owned();
        if before.doubt {
            return self.unsettled(before, false, EXPIRED, detail);
        }
        EffectOutcome {
            status: PARKED,
            doubt: false,
            wait: None,
            stuck: false,
            reason: Some(EXPIRED),
            detail,
        }
    }

    /// It is unknown whether it was applied. The target is asked, if it can be; else it is sent again, if the target does
    /// one key once; else an operator has to decide.
    fn unsettled(
        &self,
        before: AttemptHistory,
        again: bool,
        reason: &'static str,
        detail: String,
    ) -> EffectOutcome {
        let wait = match self.reconcile {
            Some(reconcile) => Some(reconcile.after),
            None if self.idempotent && again => Some(self.pause(before.tries, before.spread)),
            None => None,
        };
        EffectOutcome {
            status: UNCERTAIN,
            doubt: true,
            stuck: wait.is_none(),
            wait,
            reason: Some(reason),
            detail,
        }
    }

    /// What becomes of an effect whose target was asked.
    pub(super) fn after_asking(
        &self,
        before: AttemptHistory,
        finding: ReconcileFinding,
        reason: &'static str,
        detail: &str,
    ) -> EffectOutcome {
        let outcome = |status, wait, reason| EffectOutcome {
            status,
            doubt: false,
            wait,
            stuck: false,
            reason: Some(reason),
            detail: detail.to_owned(),
        };
        match finding {
            ReconcileFinding::Applied => outcome(DELIVERED, None, RECONCILED),
            // The same key would get the same error.
            ReconcileFinding::NotApplied if before.kept_error => outcome(PARKED, None, BROKEN),
            ReconcileFinding::NotApplied if before.tries < self.max_attempts => {
                outcome(RETRYING, Some(Duration::ZERO), RECONCILED)
            }
            ReconcileFinding::NotApplied => outcome(PARKED, None, EXHAUSTED),
            ReconcileFinding::Unknown => {
                // It is asked for ever, in the end at the longest pause; after some time an operator is alerted as well.
                let stuck = self.reconcile.is_some_and(|reconcile| before.checks >= reconcile.max_checks);
                let wait = Some(self.pause(before.checks, before.spread));
                let reason = if before.kept_error { BROKEN } else { reason };
                EffectOutcome { doubt: true, stuck, ..outcome(UNCERTAIN, wait, reason) }
            }
        }
    }

    /// The pause after the n-th try: it doubles up to a bound, and between half of that and all of it chance decides, so
    /// that those that failed together do not come back together.
    pub(super) fn pause(&self, number: i64, spread: f64) -> Duration {
        let doublings = number.saturating_sub(1).clamp(0, 30);
        let whole = self.pause_min.saturating_mul(1 << doublings).min(self.pause_max);
        whole.mul_f64(0.5 + spread.clamp(0.0, 1.0) / 2.0)
    }
}

/// What an exchange says about the target.
pub(super) fn health(sent: &SendOutcome) -> TargetHealth {
    match sent {
        SendOutcome::NotSent { .. } | SendOutcome::Unknown { .. } => TargetHealth::Bad,
        SendOutcome::Forbidden { .. } => TargetHealth::Good,
        SendOutcome::Answered(TargetResponse { status: 429 | 503, retry_after: Some(after), .. }) => {
            TargetHealth::Throttled(*after)
        }
        SendOutcome::Answered(TargetResponse { status: 500.., .. }) => TargetHealth::Bad,
        SendOutcome::Answered(_) => TargetHealth::Good,
    }
}

/// What the answer to a question says: `{"outcome": "applied" | "not_applied" | "unknown"}` in an answer of success; without
/// that, that the thing is there, or that it is not.
pub(super) fn finding(sent: &SendOutcome) -> ReconcileFinding {
    let SendOutcome::Answered(reply) = sent else { return ReconcileFinding::Unknown };
    match reply.status {
        200..=299 => {
            let body: Option<Json> = serde_json::from_slice(&reply.body).ok();
            match body.as_ref().and_then(|body| body.get("outcome")).map(Json::as_str) {
                Some(Some("applied")) => ReconcileFinding::Applied,
                Some(Some("not_applied")) => ReconcileFinding::NotApplied,
                Some(_) => ReconcileFinding::Unknown,
                // Half of a document may have lacked the half that matters.
                None if !reply.complete => ReconcileFinding::Unknown,
                None => ReconcileFinding::Applied,
            }
        }
        404 | 410 => ReconcileFinding::NotApplied,
        _ => ReconcileFinding::Unknown,
    }
}

/// What an exchange says, in words.
pub(super) fn describe(sent: &SendOutcome) -> String {
    match sent {
        SendOutcome::Answered(reply) => format!("the target answered {}", reply.status),
        SendOutcome::NotSent { why } | SendOutcome::Forbidden { why } | SendOutcome::Unknown { why } => {
            why.clone()
        }
    }
}

/// From 0 to below 1, by what is done and how often: the same for the same try, and evenly spread over others.
pub(super) fn spread(tenant: &Tenant, resource: &str, key: &str, number: i64) -> f64 {
    const PARTS: u32 = 1 << 20;
    f64::from(partition_of(tenant, resource, &format!("{key} {number}"), PARTS)) / f64::from(PARTS)
}

#[cfg(test)]
mod tests {
    use super::*;

    const SECOND: Duration = Duration::from_secs(1);

    fn rules(idempotent: bool, reconciles: bool) -> RetryRules {
        let reconcile = reconciles.then_some(ReconcileRules { after: SECOND * 7, max_checks: 3 });
        let (pause_min, pause_max) = (SECOND, SECOND * 10);
        let replays_errors = false;
        RetryRules { max_attempts: 3, pause_min, pause_max, idempotent, replays_errors, reconcile }
    }

    fn before(tries: i64, doubt: bool) -> AttemptHistory {
        AttemptHistory { tries, checks: 0, doubt, kept_error: false, spread: 1.0 }
    }

    fn after_sending(rules: &RetryRules, before: AttemptHistory, sent: &SendOutcome) -> EffectOutcome {
        rules.after_sending(before, sent, Interpretation::ByStatus)
    }

    fn answered(status: u16) -> SendOutcome {
        SendOutcome::Answered(TargetResponse { status, complete: true, ..TargetResponse::default() })
    }

    #[test]
    fn what_an_answer_means() {
        let unknown = SendOutcome::Unknown { why: "cut".into() };
        let not_sent = SendOutcome::NotSent { why: "refused".into() };
        let forbidden = SendOutcome::Forbidden { why: "private".into() };
        // (idempotent, reconciles, tries, doubt, what came) → (status, doubt, waits for seconds, stuck)
        for (idempotent, reconciles, tries, doubt, sent, expected) in [
            (false, false, 1, false, answered(200), (DELIVERED, false, None, false)),
            (true, true, 3, true, answered(204), (DELIVERED, false, None, false)),
            (false, false, 1, false, not_sent.clone(), (RETRYING, false, Some(1), false)),
            (false, false, 2, false, answered(429), (RETRYING, false, Some(2), false)),
            (false, false, 1, false, answered(503), (RETRYING, false, Some(1), false)),
            (false, false, 3, false, not_sent.clone(), (PARKED, false, None, false)),
            (true, false, 3, true, not_sent.clone(), (UNCERTAIN, true, None, true)),
            (true, true, 3, true, not_sent.clone(), (UNCERTAIN, true, Some(7), false)),
            (false, false, 1, false, answered(422), (PARKED, false, None, false)),
            (false, false, 1, false, answered(302), (PARKED, false, None, false)),
            (false, false, 1, false, forbidden, (PARKED, false, None, false)),
            (true, false, 2, true, answered(401), (UNCERTAIN, true, None, true)),
            (true, true, 2, true, answered(401), (UNCERTAIN, true, Some(7), false)),
            (false, false, 1, false, answered(409), (PARKED, false, None, false)),
            (true, false, 1, false, answered(409), (RETRYING, true, Some(1), false)),
            (false, false, 1, false, answered(500), (UNCERTAIN, true, None, true)),
            (false, true, 1, false, answered(500), (UNCERTAIN, true, Some(7), false)),
            (true, false, 1, false, answered(500), (RETRYING, true, Some(1), false)),
            (true, false, 3, false, answered(500), (UNCERTAIN, true, None, true)),
            (false, false, 1, false, unknown.clone(), (UNCERTAIN, true, None, true)),
            (false, true, 1, false, unknown.clone(), (UNCERTAIN, true, Some(7), false)),
            (true, false, 1, false, unknown.clone(), (UNCERTAIN, true, Some(1), false)),
            (true, false, 3, false, unknown, (UNCERTAIN, true, None, true)),
        ] {
            let outcome = after_sending(&rules(idempotent, reconciles), before(tries, doubt), &sent);
            let got = (outcome.status, outcome.doubt, outcome.wait.map(|wait| wait.as_secs()), outcome.stuck);
            assert_eq!(
                got, expected,
                "{sent:?} at try {tries}, idempotent {idempotent}, reconciles {reconciles}"
            );
        }
    }

    #[test]
    fn a_target_that_asks_for_patience_gets_it() {
        let patience = Some(SECOND * 60);
        let sent = SendOutcome::Answered(TargetResponse {
            status: 429,
            retry_after: patience,
            ..TargetResponse::default()
        });
        assert_eq!(after_sending(&rules(false, false), before(1, false), &sent).wait, patience);
        assert_eq!(health(&sent), TargetHealth::Throttled(SECOND * 60));
    }

    #[test]
    fn what_a_target_says_when_it_is_asked() {
        let body = |status: u16, text: &str, complete: bool| {
            SendOutcome::Answered(TargetResponse {
                status,
                body: text.as_bytes().to_vec(),
                complete,
                retry_after: None,
            })
        };
        for (sent, expected) in [
            (body(200, "{\"outcome\": \"applied\"}", true), ReconcileFinding::Applied),
            (body(200, "{\"outcome\": \"not_applied\"}", true), ReconcileFinding::NotApplied),
            (body(200, "{\"outcome\": \"unknown\"}", true), ReconcileFinding::Unknown),
            (body(200, "{\"outcome\": 3}", true), ReconcileFinding::Unknown),
            (body(200, "{\"id\": \"ch_1\"}", true), ReconcileFinding::Applied),
            (body(200, "{\"id\": \"ch_1\"", false), ReconcileFinding::Unknown),
            (body(404, "", true), ReconcileFinding::NotApplied),
            (body(410, "", true), ReconcileFinding::NotApplied),
            (body(401, "", true), ReconcileFinding::Unknown),
            (body(500, "", true), ReconcileFinding::Unknown),
            (SendOutcome::NotSent { why: String::new() }, ReconcileFinding::Unknown),
            (SendOutcome::Unknown { why: String::new() }, ReconcileFinding::Unknown),
        ] {
            assert_eq!(finding(&sent), expected, "{sent:?}");
        }
        let asked = |finding, tries, checks| {
            let before = AttemptHistory { checks, ..before(tries, true) };
            let outcome = rules(false, true).after_asking(before, finding, NO_ANSWER, "");
            (outcome.status, outcome.doubt, outcome.wait, outcome.stuck)
        };
        assert_eq!(asked(ReconcileFinding::Applied, 3, 1), (DELIVERED, false, None, false));
        assert_eq!(asked(ReconcileFinding::NotApplied, 1, 1), (RETRYING, false, Some(Duration::ZERO), false));
        assert_eq!(asked(ReconcileFinding::NotApplied, 3, 1), (PARKED, false, None, false));
        assert_eq!(asked(ReconcileFinding::Unknown, 1, 2), (UNCERTAIN, true, Some(SECOND * 2), false));
        assert_eq!(asked(ReconcileFinding::Unknown, 1, 3), (UNCERTAIN, true, Some(SECOND * 4), true));
        assert_eq!(asked(ReconcileFinding::Unknown, 1, 99), (UNCERTAIN, true, Some(SECOND * 10), true));
    }

    #[test]
    fn an_error_that_a_target_keeps_is_asked_about_and_not_sent_again() {
        let rules = RetryRules { replays_errors: true, ..rules(true, true) };
        let outcome = after_sending(&rules, before(1, false), &answered(500));
        assert_eq!((outcome.status, outcome.reason, outcome.doubt), (UNCERTAIN, Some(BROKEN), true));
        assert_eq!(outcome.wait, Some(SECOND * 7));
        let kept = AttemptHistory { kept_error: true, ..before(1, true) };
        let unknown = rules.after_asking(kept, ReconcileFinding::Unknown, NO_ANSWER, "");
        assert_eq!((unknown.status, unknown.reason, unknown.doubt), (UNCERTAIN, Some(BROKEN), true));
        let absent = rules.after_asking(kept, ReconcileFinding::NotApplied, NO_ANSWER, "");
        assert_eq!((absent.status, absent.reason, absent.doubt), (PARKED, Some(BROKEN), false));
        // An error of the network between is none that the target has kept.
        let silent = SendOutcome::Unknown { why: "cut".into() };
        assert_eq!(after_sending(&rules, before(1, false), &silent).reason, Some(NO_ANSWER));
    }

    #[test]
    fn a_settler_reads_more_in_a_response_than_its_status() {
        let rules = rules(true, true);
        for (status, interpreted, expected) in [
            (402, Interpretation::Definite, (DELIVERED, false, None)),
            (200, Interpretation::Open("pending"), (UNCERTAIN, true, Some("pending"))),
            (200, Interpretation::NotApplied, (PARKED, false, Some(REJECTED))),
            (402, Interpretation::ByStatus, (PARKED, false, Some(REJECTED))),
        ] {
            let outcome = rules.after_sending(before(1, false), &answered(status), interpreted);
            assert_eq!((outcome.status, outcome.doubt, outcome.reason), expected, "{status} {interpreted:?}");
        }
    }

    #[test]
    fn pauses_double_up_to_a_bound_and_chance_halves_them_at_most() {
        let rules = rules(false, false);
        let pauses: Vec<u64> = (1..=6).map(|number| rules.pause(number, 1.0).as_secs()).collect();
        assert_eq!(pauses, [1, 2, 4, 8, 10, 10]);
        assert_eq!(rules.pause(3, 0.0), SECOND * 2);
        assert_eq!(rules.pause(i64::MAX, 1.0), SECOND * 10);
        let tenant = Tenant::new("acme").unwrap();
        let spreads: Vec<f64> = (0..100).map(|key| spread(&tenant, "charge", &key.to_string(), 1)).collect();
        assert!(spreads.iter().all(|spread| (0.0..1.0).contains(spread)), "{spreads:?}");
        assert!(spreads.iter().filter(|spread| **spread < 0.5).count() > 30, "{spreads:?}");
        assert!(spreads.iter().filter(|spread| **spread >= 0.5).count() > 30, "{spreads:?}");
    }
}
