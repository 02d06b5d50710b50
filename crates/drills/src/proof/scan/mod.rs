//! The proof of `scan`.

pub(crate) mod cases;
pub(crate) mod invariants;
mod samples;
pub(crate) mod worker;
pub(crate) mod workload;

use crate::harness::mutation::Redundant;
use crate::proof::Proof;

/// What is proven of `scan`.
pub const PROOF: Proof = Proof {
    archetype: "scan",
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
            actors: &["worker house.scan"],
            step: "update items where version = ?",
            condition: "version = ?",
            reason: "a guard of the task that the cases give to the runner; the page number of the run keeps a late plan out",
        },
        Redundant {
            actors: &["sweep.start"],
            step: "insert sweep_ranges",
            condition: "the row is absent",
            reason: "ranges are inserted with their scan, which is absent by its own insert, and none is ever deleted",
        },
        Redundant {
            actors: &["sweep_range.advance", "sweep_range.claim"],
            step: "assert sweeps where state = ?",
            condition: "the row is present",
            reason: "a range is inserted with its scan, and no transition deletes a scan",
        },
        Redundant {
            actors: &["sweep_range.finish"],
            step: "update sweeps where state = ? and open = ?",
            condition: "open = ?",
            reason: "while one range is open, only a split of it adds another, and a split changes its version",
        },
    ],
};
