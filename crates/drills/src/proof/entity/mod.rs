//! The proof of `entity`.

mod allow;
pub(crate) mod cases;
pub(crate) mod drills;
pub(crate) mod invariants;
mod samples;
pub(crate) mod workload;

use crate::harness::mutation::Redundant;
use crate::proof::Proof;

/// What is proven of `entity`.
pub const PROOF: Proof = Proof {
    archetype: "entity",
    cases: cases::CASES,
    drills: drills::DRILLS,
    workload: Some(&workload::WORKLOAD),
    invariants: Some(|scope| Box::pin(invariants::check(scope))),
    #[cfg(feature = "suite")]
    generate: Some(samples::generate),
    #[cfg(test)]
    tamperings: samples::tamperings,
    also_judges: &[],
    redundant: &[
        Redundant {
            actors: &["member.patch"],
            step: "assert members where version = ? and open_loans = ?",
            condition: "the row is present",
            reason: "the call has read the version of the row, which a row that was erased does not have",
        },
        Redundant {
            actors: &["member.patch"],
            step: "assert members where version = ? and points = ?",
            condition: "the row is present",
            reason: "the call has read the version of the row, which a row that was erased does not have",
        },
        Redundant {
            actors: &["worker member.cascade", "worker loan.cascade"],
            step: " where version = ? and status = ?",
            condition: "status = ?",
            reason: "the row was ACTIVE at the version that the worker has read",
        },
        Redundant {
            actors: &["worker member.cascade", "worker loan.cascade"],
            step: " where version = ? and status = ?",
            condition: "the row is present",
            reason: "the worker has read the version of the row, which a row that was erased does not have",
        },
        Redundant {
            actors: &["worker member.cascade"],
            step: "delete comments_listed",
            condition: "the row is present",
            reason: "a child that is visible at the version that the worker has read is in the list",
        },
        Redundant {
            actors: &["worker loan.cascade"],
            step: " where version = ? and status = ?",
            condition: "version = ?",
            reason: "the guard of the same worker for members, which a_row_that_refers_elsewhere_meanwhile_stays kills",
        },
        Redundant {
            actors: &["worker loan.cascade", "worker folder.cascade"],
            step: "_refs where n <= ?",
            condition: "n <= ?",
            reason: "the guard of the same worker for members, which deletions_go_on_after_a_crash kills",
        },
    ],
};
