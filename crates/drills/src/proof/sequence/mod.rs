//! The proof of `sequence`.

pub(crate) mod cases;
pub(crate) mod invariants;
mod samples;
pub(crate) mod workload;

use crate::harness::mutation::Redundant;
use crate::proof::Proof;

/// What is proven of `sequence`.
pub const PROOF: Proof = Proof {
    archetype: "sequence",
    cases: cases::CASES,
    drills: cases::DRILLS,
    workload: Some(&workload::WORKLOAD),
    invariants: Some(|scope| Box::pin(invariants::check(scope))),
    #[cfg(feature = "suite")]
    generate: Some(samples::generate),
    #[cfg(test)]
    tamperings: samples::tamperings,
    also_judges: &[],
    redundant: &[Redundant {
        actors: &["order_id.lease", "lone_id.lease"],
        step: "",
        condition: "epoch = ?",
        reason: "A holder that leases anew under its own name gets what it has, and a span of its own behind the mark.",
    }],
};
