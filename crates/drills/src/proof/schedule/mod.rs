//! The proof of `schedule`.

pub(crate) mod cases;
pub(crate) mod workload;

use crate::harness::mutation::Redundant;
use crate::proof::Proof;

/// What is proven of `schedule`.
pub const PROOF: Proof = Proof {
    archetype: "schedule",
    cases: cases::CASES,
    drills: cases::DRILLS,
    workload: Some(&workload::WORKLOAD),
    invariants: None,
    also_judges: &[],
    redundant: &[
        Redundant {
            actors: &["worker job.forget"],
            step: "",
            condition: "the row is present",
            reason: "What somebody else has forgotten is forgotten. Told twice, it names a row that is gone all the same.",
        },
        Redundant {
            actors: &["job.complete", "job_queue.complete"],
            step: "delete job_uniques where job_id = ?",
            condition: "the row is present",
            reason: "The job is in progress, which its own step demands, and nobody takes the key of one that is not over.",
        },
    ],
};
