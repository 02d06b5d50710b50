//! The proof of `log`.

pub(crate) mod cases;
pub(crate) mod invariants;
mod samples;
pub(crate) mod workload;

use crate::harness::mutation::Redundant;
use crate::proof::Proof;

/// What is proven of `log`.
pub const PROOF: Proof = Proof {
    archetype: "log",
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
            actors: &["a reader of the house", "worker badge_of_member.consume"],
            step: "era = ?",
            condition: "the row is present",
            reason: "It was read, and no plan deletes the progress of a group that is read.",
        },
        Redundant {
            actors: &["a reader of the house"],
            step: "reached = ? and parked = ? and epoch <= ?",
            condition: "the row is present",
            reason: "It was read, and no plan deletes the progress of a group that is read.",
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
            reason: "The mark passes a record in the plan that parks it, so that no other plan has parked it.",
        },
    ],
};
