//! The proof of `inventory`.

pub(crate) mod cases;
pub(crate) mod drills;
pub(crate) mod invariants;
mod samples;
pub(crate) mod workload;

use crate::harness::mutation::Redundant;
use crate::proof::Proof;

/// What is proven of `inventory`.
pub const PROOF: Proof = Proof {
    archetype: "inventory",
    cases: cases::CASES,
    drills: drills::DRILLS,
    workload: Some(&workload::WORKLOAD),
    invariants: Some(|scope| Box::pin(invariants::check(scope))),
    #[cfg(feature = "suite")]
    generate: Some(samples::generate),
    #[cfg(test)]
    tamperings: samples::tamperings,
    also_judges: &[],
    redundant: REDUNDANT,
};

const ENDINGS: &[&str] = &[
    "stock_reservation.commit",
    "stock_reservation.expire",
    "stock_reservation.release",
    "stock_reservation.reserve",
    "worker stock_reservation.expire",
];

/// Whose plans change stocks of several cells.
const OF_CELLS: &[&str] = &[
    "bolt.adjust",
    "bolt.recount",
    "part.adjust",
    "part.recount",
    "part.restock",
    "part.transfer",
    "bolt_reservation.commit",
    "bolt_reservation.release",
    "bolt_reservation.reserve",
    "part_reservation.commit",
    "part_reservation.expire",
    "part_reservation.release",
    "part_reservation.reserve",
    "worker part.balance",
    "worker part_reservation.expire",
];
const PRESENT: &str = "the row is present";
const NEVER_DELETED: &str = "A cell that was read is never deleted, and of one that never was nothing can be subtracted: the plan is \
                             refused because a required column would be null, and prepared again.";

const fn of_cells(step: &'static str) -> Redundant {
    Redundant { actors: OF_CELLS, step, condition: PRESENT, reason: NEVER_DELETED }
}

const REDUNDANT: &[Redundant] = &[
    Redundant {
        actors: ENDINGS,
        step: "where reserved >= ?",
        condition: PRESENT,
        reason: "Of a row that is not there nothing can be subtracted: the plan is refused because a required column would be null.",
    },
    of_cells("_cells where version = ?"),
    of_cells("_cells where available >= ?"),
    of_cells("_cells where available >= ? and version = ?"),
    of_cells("_cells where reserved >= ?"),
    of_cells("bolts where available >= ? and version = ?"),
    of_cells("parts where available >= ? and due_at = ?"),
    of_cells("parts where due_at = ?"),
    Redundant {
        actors: &["bolt.adjust", "part.adjust", "part.transfer"],
        step: "_cells where available >= ? and version = ?",
        condition: "available >= ?",
        reason: "The version implies it: what is taken was read at that version. One transition makes the step with and without it.",
    },
];
