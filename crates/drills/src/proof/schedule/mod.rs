//! The proof of `schedule`.

pub(crate) mod cases;
pub(crate) mod invariants;
mod samples;
pub(crate) mod workload;

use crate::harness::mutation::Redundant;
use crate::proof::Proof;

/// What is proven of `schedule`.
pub const PROOF: Proof = Proof {
    archetype: "schedule",
    cases: cases::CASES,
    drills: cases::DRILLS,
    workload: Some(&workload::WORKLOAD),
    invariants: Some(|scope| Box::pin(invariants::check(scope))),
    #[cfg(feature = "suite")]
    generate: Some(samples::generate),
    #[cfg(test)]
    tamperings: samples::tamperings,
    also_judges: &[],
    redundant: &[
        Redundant {
            actors: &["worker job.forget"],
            step: "",
            condition: "the row is present",
            reason: "Deleting an already deleted job is harmless; a second `forgotten` event is idempotent.",
        },
        Redundant {
            actors: &["job.complete", "job_queue.complete"],
            step: "delete job_uniques where job_id = ?",
            condition: "the row is present",
            reason: "The job is in progress, which its own step demands, and no plan takes the key of one that is not over.",
        },
    ],
};
