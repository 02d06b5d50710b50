//! The proof of `payment`.

pub(crate) mod cases;
pub(crate) mod invariants;
pub(crate) mod provider;
mod samples;
pub(crate) mod workload;

use crate::harness::mutation::Redundant;
use crate::proof::Proof;

/// What records the outcomes of requests.
const SETTLES: [&str; 3] = ["worker pay_attempt.send", "worker card_attempt.send", "pay_transaction.resolve"];

/// What is proven of `payment`.
pub const PROOF: Proof = Proof {
    archetype: "payment",
    cases: cases::CASES,
    drills: cases::DRILLS,
    workload: Some(&workload::WORKLOAD),
    invariants: Some(|scope| Box::pin(invariants::check(scope))),
    #[cfg(feature = "suite")]
    generate: Some(samples::generate),
    #[cfg(test)]
    tamperings: samples::tamperings,
    also_judges: &[],
    redundant: &[
        Redundant {
            actors: &SETTLES,
            step: "where status is one of them",
            condition: "status is one of them",
            reason: "a transaction has its end in the plan in which its request has it, and such a request is not recorded again",
        },
        Redundant {
            actors: &["pay_transaction.resolve"],
            step: "where status is one of them",
            condition: "or status = 'PENDING'",
            reason: "a transaction whose request is uncertain is PENDING_NETWORK_RESULT",
        },
        Redundant {
            actors: &SETTLES,
            step: "insert pay_transfers",
            condition: "the row is absent",
            reason: "an outcome is recorded once, and no caller can choose an id with a colon",
        },
        Redundant {
            actors: &["worker pay_transfer.timeout"],
            step: "where kind = ? and expires_at <= now",
            condition: "kind = ?",
            reason: "only a pending transfer has an end",
        },
    ],
};
