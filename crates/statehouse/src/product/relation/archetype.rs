//! What `relation` says of itself: the one registration of the archetype.

use crate::archetypes::{Archetype, Dependencies, FailureAnswer, Relief};

/// A02, Relation / Edge.
pub const ARCHETYPE: Archetype = Archetype {
    code: "A02",
    keyword: "relation",
    about: "edges such as follows and likes, with a list and an exact count at both ends",
    declare: Some(super::declare),
    derived: false,
    depends_on: Dependencies::Named(&[]),
    specimen: r#"
[relation.edge]
from = { source = "int" }
to = { target = "int" }
"#,
    failures: &[
        FailureAnswer::of(
            "duplicate edge creation on retry",
            "The pair is the key, so there is one edge, and it is listed and counted once. Under its operation id a retry gets the first answer, also after the edge was removed: what comes late brings nothing back.",
            "the key; guard of add: `since is null`; the operation id",
        ),
        FailureAnswer::of(
            "add/remove race",
            "Both are about one row. The one that the row takes last is what counts; the call that lost is retried on the new row. No order of theirs leaves an edge in one list and not in the other.",
            "guard of remove: `since = the one that was read`",
        ),
        FailureAnswer::of(
            "count projection lag",
            "There is none: counts change in the plan of the edge. While others write, the shards are read one after another; without concurrent writes the sum is exact.",
            "one plan",
        ),
        FailureAnswer::of(
            "stale relation list cache",
            "There is none: lists are read strongly, and each edge that a list names is looked up before it is shown.",
            "strong reads",
        ),
    ],
    reliefs: &[
        Relief::of("celebrity skew", "buckets = N", Some("hotspots relation")),
        Relief::of("hot relation partition", "buckets = N, out_buckets = N", Some("hotspots relation")),
        Relief::of("hot count key", "count_shards = N", Some("hotspots relation")),
        Relief::of(
            "hot relation-list pages",
            "a page is one request for each bucket, without a switch",
            Some("hotspots relation"),
        ),
    ],
};
