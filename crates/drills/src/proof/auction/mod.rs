//! The proof of `auction`.

pub(crate) mod cases;
mod combining;
pub(crate) mod drills;
pub(crate) mod invariants;
mod modes;
mod samples;
mod times;
pub(crate) mod workload;

use crate::harness::mutation::Redundant;
use crate::proof::Proof;

/// What is proven of `auction`.
pub const PROOF: Proof = Proof {
    archetype: "auction",
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

/// The actions that bid, on the resources of the cases that store rejected bids.
const BIDS: &[&str] = &["lot.bid", "plain.bid", "tender.bid", "maximum.bid"];
/// The actions and workers that sell a lot.
const SALES: &[&str] = &[
    "lot.close",
    "plain.close",
    "prize.close",
    "tender.close",
    "maximum.close",
    "worker lot.close",
    "worker plain.close",
    "worker tender.close",
    "worker maximum.close",
    "worker flood.close",
    "tender.buy_now",
    "maximum.buy_now",
];

const REDUNDANT: &[Redundant] = &[
    Redundant {
        actors: BIDS,
        step: "",
        condition: "the row is present",
        reason: "A lot is never deleted, and its version was read.",
    },
    Redundant {
        actors: BIDS,
        step: "where version = ?",
        condition: "version = ?",
        reason: "A lot that is closed or cancelled stays so.",
    },
    Redundant {
        actors: BIDS,
        step: "where version = ? and ends_at <= now",
        condition: "version = ?",
        reason: "Only a close, a void or a cancellation changes a lot whose end has come: the bid stays late.",
    },
    Redundant {
        actors: BIDS,
        step: "where version = ? and starts_at > now",
        condition: "version = ?",
        reason: "Only a cancellation changes a lot that has not begun: the bid is refused either way.",
    },
    Redundant {
        actors: SALES,
        step: "_winners",
        condition: "the row is absent",
        reason: "The lot's own step sells it once; the winner's row says so by itself.",
    },
    Redundant {
        actors: &["prize.close"],
        step: "insert wons",
        condition: "the row is absent",
        reason: "The lot's own step closes it once, and the effect is named after the lot.",
    },
    Redundant {
        actors: &["lot.create"],
        step: "insert lot_details",
        condition: "the row is absent",
        reason: "The lot itself must be absent, and both have one key.",
    },
    Redundant {
        actors: &["lot.void", "plain.void", "tender.void", "maximum.void"],
        step: "_bids where state = ?",
        condition: "state = ?",
        reason: "Every change of an accepted bid writes the lot, whose version the void has read.",
    },
];
