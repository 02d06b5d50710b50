//! The proof of `lease`.

pub(crate) mod cases;
pub(crate) mod drills;
pub(crate) mod invariants;
mod samples;
pub(crate) mod workload;

use crate::proof::Proof;

/// What is proven of `lease`.
pub const PROOF: Proof = Proof {
    archetype: "lease",
    cases: cases::CASES,
    drills: drills::DRILLS,
    workload: Some(&workload::WORKLOAD),
    invariants: Some(|scope| Box::pin(invariants::check(scope))),
    #[cfg(feature = "suite")]
    generate: Some(samples::generate),
    #[cfg(test)]
    tamperings: samples::tamperings,
    also_judges: &[],
    redundant: &[],
};
