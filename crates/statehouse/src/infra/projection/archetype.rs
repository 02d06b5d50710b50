//! What `projection` says of itself: the one registration of the archetype.

use crate::archetypes::{Archetype, Dependencies, FailureAnswer, Relief};

/// I06, Projection / Index / Search Pipeline.
pub const ARCHETYPE: Archetype = Archetype {
    code: "I06",
    keyword: "projection",
    about: "derived rows with generations and rebuild: the basis of feeds and views",
    declare: None,
    derived: false,
    depends_on: Dependencies::Named(&[]),
    specimen: "",
    failures: &[
        FailureAnswer::of(
            "stale index",
            "The lag is known, in records and in time. A reader that brings the token of its own write waits until the projection has passed it, or is told that it has not.",
            "progress by partition",
        ),
        FailureAnswer::of(
            "missing entry",
            "Entry and progress are one plan; a scan's place is written after its rows. A rebuild starts from the truth.",
            "one plan",
        ),
        FailureAnswer::of(
            "duplicate entry",
            "A version that was counted counts nothing again, from the log, a replay or a scan.",
            "`source_order`, and guard `version = the entry's that was read`",
        ),
        FailureAnswer::of(
            "tombstone not propagated",
            "An entry that is gone keeps its order, so that an older row that a scan has read before does not come back.",
            "`gone`",
        ),
    ],
    reliefs: &[
        Relief::of(
            "projector lag",
            "partitions=N in the store's URL, shared by all processes",
            Some("hotspots projection"),
        ),
        Relief::of(
            "rebuild cost",
            "beside the live one, in pages, without a switch",
            Some("hotspots projection"),
        ),
        Relief::of(
            "hot search/index shards",
            "totals are added to without being read, without a switch",
            Some("hotspots projection"),
        ),
        Relief::of(
            "broad query fanout",
            "a read names its rows under one generation, without a switch",
            Some("hotspots projection"),
        ),
    ],
};
