//! The proof of `log`.

pub(crate) mod cases;

use crate::harness::mutation::Redundant;
use crate::proof::Proof;

/// What is proven of `log`.
pub const PROOF: Proof = Proof {
    archetype: "log",
    cases: cases::CASES,
    drills: cases::DRILLS,
    workload: None,
    invariants: None,
    also_judges: &[],
    redundant: &[
        Redundant {
            actors: &["a reader of the house"],
            step: "era = ?",
            condition: "the row is present",
            reason: "It was read, and nobody deletes the progress of a group that is read.",
        },
        Redundant {
            actors: &["a reader of the house"],
            step: "reached = ? and parked = ? and epoch <= ?",
            condition: "the row is present",
            reason: "It was read, and nobody deletes the progress of a group that is read.",
        },
        Redundant {
            actors: &["audit.park"],
            step: "reached < ?",
            condition: "the row is present",
            reason: "One is added to the count of what is parked: there is no such count without a row.",
        },
        Redundant {
            actors: &["a reader of the house"],
            step: "insert house_parked",
            condition: "the row is absent",
            reason: "The mark passes a record in the plan that parks it, so that nobody else has parked it.",
        },
    ],
};
