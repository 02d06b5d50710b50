//! The proof of `relation`.

pub(crate) mod cases;
pub(crate) mod invariants;
pub(crate) mod workload;

use crate::proof::Proof;

/// What is proven of `relation`.
pub const PROOF: Proof = Proof {
    archetype: "relation",
    cases: cases::CASES,
    drills: cases::DRILLS,
    workload: Some(&workload::WORKLOAD),
    invariants: Some(|scope| Box::pin(invariants::check(scope))),
    also_judges: &[],
    redundant: &[],
};
