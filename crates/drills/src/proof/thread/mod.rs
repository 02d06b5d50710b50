//! The proof of `thread`.

pub(crate) mod cases;
pub(crate) mod invariants;

use crate::proof::Proof;

/// What is proven of `thread`.
pub const PROOF: Proof = Proof {
    archetype: "thread",
    cases: cases::CASES,
    drills: cases::DRILLS,
    workload: None,
    invariants: Some(|scope| Box::pin(invariants::check(scope))),
    also_judges: &[],
    redundant: &[],
};
