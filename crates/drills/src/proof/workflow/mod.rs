//! The proof of `workflow`.

pub(crate) mod cases;
pub(crate) mod drills;
pub(crate) mod invariants;
mod samples;
pub(crate) mod workload;

use crate::harness::mutation::Redundant;
use crate::proof::Proof;

/// What is proven of `workflow`.
pub const PROOF: Proof = Proof {
    archetype: "workflow",
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
            actors: &[
                "order.start",
                "order.address",
                "order.cancel",
                "order.deliver",
                "order.finish",
                "order.pay",
                "order.refund",
                "order.ship",
                "order.test",
                "worker order.expire",
                "worker order.late",
            ],
            step: "insert order_history",
            condition: "the row is absent",
            reason: "the guard of the order's own row implies that it has made no transition of this number",
        },
        Redundant {
            actors: &["order.finish", "order.pay", "order.test", "worker order.late"],
            step: "where version = ?",
            condition: "the row is present",
            reason: "it was read, and no plan deletes the row of a workflow",
        },
        Redundant {
            actors: &["worker order.late"],
            step: "where version = ? and due_at <= now",
            condition: "the row is present",
            reason: "it was read, and no plan deletes the row of a workflow",
        },
    ],
};
