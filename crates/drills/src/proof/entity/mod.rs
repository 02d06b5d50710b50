//! The proof of `entity`.

pub(crate) mod cases;
pub(crate) mod drills;
pub(crate) mod invariants;
pub(crate) mod workload;

use crate::proof::Proof;

/// What is proven of `entity`.
pub const PROOF: Proof = Proof {
    archetype: "entity",
    cases: cases::CASES,
    drills: drills::DRILLS,
    workload: Some(&workload::WORKLOAD),
    invariants: Some(|scope| Box::pin(invariants::check(scope))),
    also_judges: &[],
    redundant: &[],
};
