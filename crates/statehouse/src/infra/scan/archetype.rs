//! What `scan` says of itself: the one registration of the archetype.

use crate::archetypes::{Archetype, Dependencies, FailureAnswer, Relief};

/// I04, Frontier Scan + Claimable Run.
pub const ARCHETYPE: Archetype = Archetype {
    code: "I04",
    keyword: "scan",
    about: "all rows of a resource, in ranges that workers claim, advance and finish",
    declare: Some(super::declare),
    derived: false,
    depends_on: Dependencies::Tables,
    specimen: r#"
[scan.review]
of     = "claim"
ranges = 2
"#,
    failures: &[
        FailureAnswer::of(
            "frontier advanced too far",
            "The cursor of a range moves in the plan of the caller's effects, from the position that the caller read. A range with rows after its cursor cannot be finished.",
            "guard of advance and finish: `version = the one that was read`, with `cursor = from`; finish looks for a row after the cursor",
        ),
        FailureAnswer::of(
            "same range claimed twice",
            "Workers that claim at once get different ranges. A worker whose claim has ended, and was given to another, can write nothing under its epoch.",
            "guard of claim: `state = 'READY'` at the version that was read; `epoch = mine` in each later step",
        ),
        FailureAnswer::of(
            "progress not advanced after success",
            "Effects and cursor are one plan: both are stored or neither. A worker that died is followed by one that begins at the stored cursor.",
            "one plan for effects and cursor; the sweeper returns ranges whose claim has ended",
        ),
        FailureAnswer::of(
            "already-covered range reprocessed",
            "A second step from the same position is refused, also by a worker that repeats itself under a new operation id. A split starts where the cursor is.",
            "guard of advance: `cursor = from`; a split changes the epoch",
        ),
    ],
    reliefs: &[
        Relief::of("frontier contention", "ranges = N", Some("hotspots scan")),
        Relief::of("skewed range claims", "the action `split`", Some("hotspots scan")),
        Relief::of("checkpoint lag", "`limit` of the action `rows`", Some("hotspots scan")),
        Relief::of("bursty batch materialization", "ranges = N", Some("hotspots scan")),
    ],
};
