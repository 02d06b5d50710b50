//! The proof of `feed`.

pub(crate) mod cases;
pub(crate) mod invariants;
mod samples;
pub(crate) mod workload;

use crate::harness::mutation::Redundant;
use crate::proof::Proof;

/// What is proven of `feed`.
pub const PROOF: Proof = Proof {
    archetype: "feed",
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
            actors: &["worker home.project"],
            step: "assert follows where since = ?",
            condition: "the row is present",
            reason: "It was listed, and the row of an edge stays when the edge is removed.",
        },
        Redundant {
            actors: &["worker home.project"],
            step: "assert follows where version = ?",
            condition: "the row is present",
            reason: "It was read, and the row of an edge stays when the edge is removed.",
        },
        Redundant {
            actors: &["worker home.project"],
            step: "assert follows_in_count where version = ?",
            condition: "the row is present",
            reason: "It was read, and no plan deletes a part of a count.",
        },
        Redundant {
            actors: &["worker home.project"],
            step: "insert user_feed",
            condition: "the row is absent",
            reason: "A post that has no entry, which its plan demands, has no rows: they are made with the entry, or after it.",
        },
        Redundant {
            actors: &["worker home.project"],
            step: "insert user_feed_posts",
            condition: "the row is absent",
            reason: "A post that has no entry, which its plan demands, is in no list: it comes there with the entry, or after it.",
        },
    ],
};
