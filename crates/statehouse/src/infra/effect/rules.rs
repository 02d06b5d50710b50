//! What follows from what is known. No I/O: what was seen goes in, what becomes of the row comes out.

use std::time::Duration;

use serde_json::Value as Json;
use statehouse_store::Tenant;
use statehouse_store::log::partition_of;

use super::{DELIVERED, PARKED, RETRYING, UNCERTAIN};
use crate::outside::{Reply, Sent};

/// How one kind of effect is sent again.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Rules {
    /// Tries before it is parked.
    pub max_attempts: i64,
    /// The first pause between two tries, and the longest.
    pub pause_min: Duration,
    pub pause_max: Duration,
    /// Whether the target does the same key once, so that it can be sent again although nobody knows.
    pub idempotent: bool,
    /// How long to wait before the target is asked what it did, and how often before somebody is told; `None` if it
    /// cannot be asked.
    pub reconcile: Option<Reconcile>,
}

/// When a target is asked what became of an effect.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Reconcile {
    pub after: Duration,
    pub max_checks: i64,
}

/// What was known of an effect before: tries under this run with the one at hand, questions asked with the one at hand,
/// and whether some attempt may have been applied.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Before {
    pub tries: i64,
    pub checks: i64,
    pub doubt: bool,
    /// From 0 to below 1: spreads those that failed together.
    pub spread: f64,
}

/// What becomes of it.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Outcome {
    pub status: &'static str,
    pub doubt: bool,
    /// When the house looks at it again; `None` for never by itself.
    pub wait: Option<Duration>,
    /// Whether it is time that somebody looks at it.
    pub stuck: bool,
    /// A stable word for why, and the rest of it.
    pub reason: Option<&'static str>,
    pub detail: String,
}

/// What an exchange says about the target itself.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Health {
    /// It is there and answers, whatever it answers.
    Good,
    /// It is not, or it is broken.
    Bad,
    /// It is there and wants to be left alone for so long.
    Throttled(Duration),
}

/// What a target says about an effect whose acknowledgement was lost.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Finding {
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
enum Meaning {
    Applied,
    /// The target did not take it this time, and may another time.
    NotTaken(&'static str, Duration),
    /// The target will not take it.
    Refused(&'static str),
    /// An answer that leaves open whether it was applied.
    Broken,
    /// No answer.
    Silence,
}

impl Rules {
    /// What an exchange means. A target that asks for patience, or says that it could not take a request, has not applied it;
    /// a server's error leaves that open.
    fn meaning(&self, sent: &Sent) -> Meaning {
        match sent {
            Sent::NotSent { .. } => Meaning::NotTaken(NOT_TAKEN, Duration::ZERO),
            Sent::Forbidden { .. } => Meaning::Refused(FORBIDDEN),
            Sent::Unknown { .. } => Meaning::Silence,
            Sent::Answered(Reply { status, retry_after, .. }) => match status {
                200..=299 => Meaning::Applied,
                300..=399 => Meaning::Refused(REDIRECTED),
                408 | 425 | 429 | 503 => Meaning::NotTaken(NOT_TAKEN, retry_after.unwrap_or_default()),
                // The same key is under way there already.
                409 if self.idempotent => Meaning::Broken,
                400..=499 => Meaning::Refused(REJECTED),
                _ => Meaning::Broken,
            },
        }
    }

    /// What becomes of an effect that was sent.
    pub(super) fn after_sending(&self, before: Before, sent: &Sent) -> Outcome {
        let detail = told(sent);
        let outcome = |status, doubt, wait, reason| Outcome {
            status,
            doubt,
            wait,
            stuck: false,
            reason,
            detail: detail.clone(),
        };
        let again = before.tries < self.max_attempts;
        let pause = self.pause(before.tries, before.spread);
        match self.meaning(sent) {
            Meaning::Applied => outcome(DELIVERED, false, None, None),
            Meaning::NotTaken(reason, least) if again => {
                outcome(RETRYING, before.doubt, Some(pause.max(least)), Some(reason))
            }
            Meaning::NotTaken(..) if !before.doubt => outcome(PARKED, false, None, Some(EXHAUSTED)),
            Meaning::Refused(reason) if !before.doubt => outcome(PARKED, false, None, Some(reason)),
            // An earlier attempt may have been applied; that this one was not says nothing about it.
            Meaning::NotTaken(..) => self.unsettled(before, false, EXHAUSTED, detail),
            Meaning::Refused(reason) => self.unsettled(before, false, reason, detail),
            Meaning::Broken if again && self.idempotent => outcome(RETRYING, true, Some(pause), Some(BROKEN)),
            Meaning::Broken => self.unsettled(before, again, BROKEN, detail),
            Meaning::Silence => self.unsettled(before, again, NO_ANSWER, detail),
        }
    }

    /// What becomes of an effect whose sender did not come back: it was sent, or not.
    pub(super) fn after_lapse(&self, before: Before) -> Outcome {
        let detail = "whoever sent it did not come back to say what became of it".to_owned();
        self.unsettled(before, before.tries < self.max_attempts, LAPSED, detail)
    }

    /// What becomes of an effect whose time is up before it was sent.
    pub(super) fn after_expiry(&self, before: Before) -> Outcome {
        let detail = "its time was up before it could be sent".to_owned();
        if before.doubt {
            return self.unsettled(before, false, EXPIRED, detail);
        }
        Outcome { status: PARKED, doubt: false, wait: None, stuck: false, reason: Some(EXPIRED), detail }
    }

    /// Nobody knows whether it was applied. The target is asked, if it can be; else it is sent again, if the target does
    /// one key once; else somebody has to look.
    fn unsettled(&self, before: Before, again: bool, reason: &'static str, detail: String) -> Outcome {
        let wait = match self.reconcile {
            Some(reconcile) => Some(reconcile.after),
            None if self.idempotent && again => Some(self.pause(before.tries, before.spread)),
            None => None,
        };
        Outcome { status: UNCERTAIN, doubt: true, stuck: wait.is_none(), wait, reason: Some(reason), detail }
    }

    /// What becomes of an effect whose target was asked.
    pub(super) fn after_asking(&self, before: Before, finding: Finding, detail: &str) -> Outcome {
        let outcome = |status, wait, reason| Outcome {
            status,
            doubt: false,
            wait,
            stuck: false,
            reason: Some(reason),
            detail: detail.to_owned(),
        };
        match finding {
            Finding::Applied => outcome(DELIVERED, None, RECONCILED),
            Finding::NotApplied if before.tries < self.max_attempts => {
                outcome(RETRYING, Some(Duration::ZERO), RECONCILED)
            }
            Finding::NotApplied => outcome(PARKED, None, EXHAUSTED),
            Finding::Unknown => {
                // It is asked for ever, in the end at the longest pause; after some time somebody is told as well.
                let stuck = self.reconcile.is_some_and(|reconcile| before.checks >= reconcile.max_checks);
                let wait = Some(self.pause(before.checks, before.spread));
                Outcome { doubt: true, stuck, ..outcome(UNCERTAIN, wait, NO_ANSWER) }
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
pub(super) fn health(sent: &Sent) -> Health {
    match sent {
        Sent::NotSent { .. } | Sent::Unknown { .. } => Health::Bad,
        Sent::Forbidden { .. } => Health::Good,
        Sent::Answered(Reply { status: 429 | 503, retry_after: Some(after), .. }) => {
            Health::Throttled(*after)
        }
        Sent::Answered(Reply { status: 500.., .. }) => Health::Bad,
        Sent::Answered(_) => Health::Good,
    }
}

/// What the answer to a question says: `{"outcome": "applied" | "not_applied" | "unknown"}` in an answer of success; without
/// that, that the thing is there, or that it is not.
pub(super) fn finding(sent: &Sent) -> Finding {
    let Sent::Answered(reply) = sent else { return Finding::Unknown };
    match reply.status {
        200..=299 => {
            let body: Option<Json> = serde_json::from_slice(&reply.body).ok();
            match body.as_ref().and_then(|body| body.get("outcome")).map(Json::as_str) {
                Some(Some("applied")) => Finding::Applied,
                Some(Some("not_applied")) => Finding::NotApplied,
                Some(_) => Finding::Unknown,
                // Half of a document may have lacked the half that matters.
                None if !reply.complete => Finding::Unknown,
                None => Finding::Applied,
            }
        }
        404 | 410 => Finding::NotApplied,
        _ => Finding::Unknown,
    }
}

/// What an exchange says, in words.
pub(super) fn told(sent: &Sent) -> String {
    match sent {
        Sent::Answered(reply) => format!("the target answered {}", reply.status),
        Sent::NotSent { why } | Sent::Forbidden { why } | Sent::Unknown { why } => why.clone(),
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

    fn rules(idempotent: bool, reconciles: bool) -> Rules {
        let reconcile = reconciles.then_some(Reconcile { after: SECOND * 7, max_checks: 3 });
        Rules { max_attempts: 3, pause_min: SECOND, pause_max: SECOND * 10, idempotent, reconcile }
    }

    fn before(tries: i64, doubt: bool) -> Before {
        Before { tries, checks: 0, doubt, spread: 1.0 }
    }

    fn answered(status: u16) -> Sent {
        Sent::Answered(Reply { status, complete: true, ..Reply::default() })
    }

    #[test]
    fn what_an_answer_means() {
        let unknown = Sent::Unknown { why: "cut".into() };
        let not_sent = Sent::NotSent { why: "refused".into() };
        let forbidden = Sent::Forbidden { why: "private".into() };
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
            let outcome = rules(idempotent, reconciles).after_sending(before(tries, doubt), &sent);
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
        let sent = Sent::Answered(Reply { status: 429, retry_after: patience, ..Reply::default() });
        assert_eq!(rules(false, false).after_sending(before(1, false), &sent).wait, patience);
        assert_eq!(health(&sent), Health::Throttled(SECOND * 60));
    }

    #[test]
    fn what_a_target_says_when_it_is_asked() {
        let body = |status: u16, text: &str, complete: bool| {
            Sent::Answered(Reply { status, body: text.as_bytes().to_vec(), complete, retry_after: None })
        };
        for (sent, expected) in [
            (body(200, "{\"outcome\": \"applied\"}", true), Finding::Applied),
            (body(200, "{\"outcome\": \"not_applied\"}", true), Finding::NotApplied),
            (body(200, "{\"outcome\": \"unknown\"}", true), Finding::Unknown),
            (body(200, "{\"outcome\": 3}", true), Finding::Unknown),
            (body(200, "{\"id\": \"ch_1\"}", true), Finding::Applied),
            (body(200, "{\"id\": \"ch_1\"", false), Finding::Unknown),
            (body(404, "", true), Finding::NotApplied),
            (body(410, "", true), Finding::NotApplied),
            (body(401, "", true), Finding::Unknown),
            (body(500, "", true), Finding::Unknown),
            (Sent::NotSent { why: String::new() }, Finding::Unknown),
            (Sent::Unknown { why: String::new() }, Finding::Unknown),
        ] {
            assert_eq!(finding(&sent), expected, "{sent:?}");
        }
        let asked = |finding, tries, checks| {
            let before = Before { tries, checks, doubt: true, spread: 1.0 };
            let outcome = rules(false, true).after_asking(before, finding, "");
            (outcome.status, outcome.doubt, outcome.wait, outcome.stuck)
        };
        assert_eq!(asked(Finding::Applied, 3, 1), (DELIVERED, false, None, false));
        assert_eq!(asked(Finding::NotApplied, 1, 1), (RETRYING, false, Some(Duration::ZERO), false));
        assert_eq!(asked(Finding::NotApplied, 3, 1), (PARKED, false, None, false));
        assert_eq!(asked(Finding::Unknown, 1, 2), (UNCERTAIN, true, Some(SECOND * 2), false));
        assert_eq!(asked(Finding::Unknown, 1, 3), (UNCERTAIN, true, Some(SECOND * 4), true));
        assert_eq!(asked(Finding::Unknown, 1, 99), (UNCERTAIN, true, Some(SECOND * 10), true));
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
