//! The proof of `projection`.

pub(crate) mod cases;
#[cfg(feature = "suite")]
pub mod endurance;
pub(crate) mod invariants;
mod samples;
pub(crate) mod workload;

use crate::harness::mutation::Redundant;
use crate::proof::Proof;

/// What is proven of `projection`.
pub const PROOF: Proof = Proof {
    archetype: "projection",
    cases: cases::CASES,
    drills: cases::DRILLS,
    workload: Some(&workload::WORKLOAD),
    invariants: Some(|scope| Box::pin(invariants::check(scope))),
    #[cfg(feature = "suite")]
    generate: None,
    #[cfg(test)]
    tamperings: samples::tamperings,
    // Views fill no tables but by the pipeline. They are A05's, as feeds are.
    also_judges: &["feed"],
    redundant: &[
        Redundant {
            actors: &["a builder"],
            step: "version = ?",
            condition: "the row is present",
            reason: "It was read, and no plan deletes the state of a projection.",
        },
        Redundant {
            actors: &["worker home.project", "worker teams.project"],
            step: "_entries where version = ?",
            condition: "the row is present",
            reason: "It was read, and entries only go with their whole generation, which no reader reads any more.",
        },
    ],
};
