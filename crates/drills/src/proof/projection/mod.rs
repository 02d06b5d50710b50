//! The proof of `projection`.

pub(crate) mod cases;
pub mod endurance;

use crate::harness::mutation::Redundant;
use crate::proof::Proof;

/// What is proven of `projection`.
pub const PROOF: Proof = Proof {
    archetype: "projection",
    cases: cases::CASES,
    drills: cases::DRILLS,
    workload: None,
    invariants: None,
    // Views fill no tables but by the pipeline. They are A05's, as feeds are.
    also_judges: &["feed"],
    redundant: &[
        Redundant {
            actors: &["a builder"],
            step: "version = ?",
            condition: "the row is present",
            reason: "It was read, and nobody deletes the state of a projection.",
        },
        Redundant {
            actors: &["worker home.project", "worker teams.project"],
            step: "_entries where version = ?",
            condition: "the row is present",
            reason: "It was read, and entries only go with their whole generation, which nobody reads any more.",
        },
    ],
};
