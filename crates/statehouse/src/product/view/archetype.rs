//! What `view` says of itself: the one registration of the archetype.

use crate::archetypes::{Archetype, Dependencies, FailureAnswer, Relief};

/// A05, Derived Projection.
pub const ARCHETYPE: Archetype = Archetype {
    code: "A05",
    keyword: "view",
    about: "counts, sums and extremes of a resource, by group",
    declare: Some(super::declare),
    derived: true,
    depends_on: Dependencies::Tables,
    specimen: r#"
[view.totals]
of = "thing"
group_by = ["n"]
"#,
    failures: &[
        FailureAnswer::of(
            "stale projection",
            "`after` waits for a write; the lag is in `statehouse projection list`.",
            "progress by partition",
        ),
        FailureAnswer::of(
            "missing entry",
            "Whatever changes an entry takes its old share from the totals and adds the new one, with the group's progress, as one plan.",
            "one plan; the source row's version",
        ),
        FailureAnswer::of(
            "duplicate entry",
            "Whatever changes an entry takes its old share from the totals and adds the new one, with the group's progress, as one plan.",
            "one plan; the source row's version",
        ),
        FailureAnswer::of(
            "tombstone not propagated",
            "A deleted row's entry is marked as gone, and its shares are taken away. What is forgotten for good is named by the log, and not found.",
            "`gone`",
        ),
        FailureAnswer::of(
            "expensive reindex after schema change",
            "A view with another definition is built beside the one that serves.",
            "generations",
        ),
        FailureAnswer::of(
            "stale ranking after source update",
            "The values stand in order, as rows that come and go with the entries: after the greatest has gone the next one is the greatest.",
            "one plan",
        ),
    ],
    reliefs: &[
        Relief::of(
            "fanout on write",
            "a row changes its entry, at most two totals and two ordered rows for each column, without a switch",
            Some("hotspots view"),
        ),
        Relief::of(
            "projection lag",
            "many rows of one plan are added to a total once, without a switch",
            Some("hotspots view"),
        ),
        Relief::of(
            "expensive ranking/recompute",
            "extremes are kept as ordered rows, without a switch",
            Some("hotspots view"),
        ),
        Relief::of(
            "query fanout across shards",
            "a group is one row and each extreme one more read, without a switch",
            Some("hotspots view"),
        ),
        Relief::of("rebuild cost", "beside the live one, in pages, without a switch", Some("hotspots view")),
    ],
};
