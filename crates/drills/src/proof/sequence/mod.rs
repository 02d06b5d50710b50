//! The proof of `sequence`.

pub(crate) mod cases;
pub(crate) mod workload;

use crate::harness::mutation::Redundant;
use crate::proof::Proof;

/// What is proven of `sequence`.
pub const PROOF: Proof = Proof {
    archetype: "sequence",
    cases: cases::CASES,
    drills: cases::DRILLS,
    workload: Some(&workload::WORKLOAD),
    invariants: None,
    also_judges: &[],
    redundant: &[Redundant {
        actors: &["order_id.lease", "lone_id.lease"],
        step: "",
        condition: "epoch = ?",
        reason: "Whoever leases anew under its own name gets what it has, and a span of its own behind the mark.",
    }],
};
