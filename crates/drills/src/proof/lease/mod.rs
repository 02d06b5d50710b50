//! The proof of `lease`.

pub(crate) mod cases;
pub(crate) mod drills;
pub(crate) mod invariants;
pub(crate) mod workload;

use crate::proof::Proof;

/// What is proven of `lease`.
pub const PROOF: Proof = Proof {
    archetype: "lease",
    cases: cases::CASES,
    drills: drills::DRILLS,
    workload: Some(&workload::WORKLOAD),
    invariants: Some(|scope| Box::pin(invariants::check(scope))),
    also_judges: &[],
    redundant: &[],
};
