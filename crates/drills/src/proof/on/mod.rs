//! The proof of `on`: an event calls its action once, whatever gets lost, dies or is refused on the way.

pub(crate) mod cases;
mod invariants;
mod samples;
mod workload;

use crate::proof::Proof;

/// What is proven of `on`. The guards of its plans are those of a group of the log and of the actions that it calls; they are
/// taken out one by one in their proofs. Here each effect has an operation id of its own besides, so that it is applied once even
/// without them.
pub const PROOF: Proof = Proof {
    archetype: "on",
    cases: cases::CASES,
    drills: cases::DRILLS,
    workload: Some(&workload::WORKLOAD),
    invariants: Some(|scope| Box::pin(invariants::check(scope))),
    #[cfg(feature = "suite")]
    generate: Some(samples::generate),
    #[cfg(test)]
    tamperings: samples::tamperings,
    also_judges: &[],
    redundant: &[],
};
