//! The proof of `effect`.

pub(crate) mod cases;

use crate::proof::Proof;

/// What is proven of `effect`.
pub const PROOF: Proof = Proof {
    archetype: "effect",
    cases: cases::CASES,
    drills: cases::DRILLS,
    workload: None,
    invariants: None,
    also_judges: &[],
    redundant: &[],
};
