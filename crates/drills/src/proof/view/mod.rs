//! The proof of `view`: its simulated workload. Views are what the projection pipeline is tried on, so the cases and drills are
//! those of `projection`.

pub(crate) mod invariants;
mod samples;
pub(crate) mod workload;

use crate::proof::Proof;

/// What is proven of `view`.
pub const PROOF: Proof = Proof {
    archetype: "view",
    cases: &[],
    drills: &[],
    workload: Some(&workload::WORKLOAD),
    invariants: Some(|scope| Box::pin(invariants::check(scope))),
    #[cfg(feature = "suite")]
    generate: Some(samples::generate),
    #[cfg(test)]
    tamperings: samples::tamperings,
    also_judges: &[],
    redundant: &[],
};
