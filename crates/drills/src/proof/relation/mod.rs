//! The proof of `relation`.

pub(crate) mod cases;
pub(crate) mod invariants;
mod samples;
pub(crate) mod workload;

use crate::proof::Proof;

/// What is proven of `relation`.
pub const PROOF: Proof = Proof {
    archetype: "relation",
    cases: cases::CASES,
    drills: cases::DRILLS,
    workload: Some(&workload::WORKLOAD),
    invariants: Some(|scope| Box::pin(invariants::check(scope))),
    #[cfg(feature = "suite")]
    generate: Some(samples::generate),
    #[cfg(test)]
    tamperings: samples::tamperings,
    also_judges: &[],
    redundant: &[],
};
