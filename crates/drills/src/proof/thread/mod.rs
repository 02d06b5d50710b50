//! The proof of `thread`.

pub(crate) mod cases;

use crate::proof::Proof;

/// What is proven of `thread`.
pub const PROOF: Proof = Proof {
    archetype: "thread",
    cases: cases::CASES,
    drills: cases::DRILLS,
    workload: None,
    also_judges: &[],
    redundant: &[],
};
