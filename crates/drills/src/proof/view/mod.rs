//! The proof of `view`: its simulated workload. Views are what the projection pipeline is tried on, so the cases and drills are
//! those of `projection`.

pub(crate) mod workload;

use crate::proof::Proof;

/// What is proven of `view`.
pub const PROOF: Proof = Proof {
    archetype: "view",
    cases: &[],
    drills: &[],
    workload: Some(&workload::WORKLOAD),
    invariants: None,
    also_judges: &[],
    redundant: &[],
};
