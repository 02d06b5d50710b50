//! What `feed` says of itself: the one registration of the archetype.

use crate::archetypes::{Archetype, Dependencies, FailureAnswer, Relief};

/// A05, Derived Projection.
pub const ARCHETYPE: Archetype = Archetype {
    code: "A05",
    keyword: "feed",
    about: "home feeds: posts of followed authors, pushed to readers, or pulled for authors with many followers",
    declare: Some(super::declare),
    derived: true,
    depends_on: Dependencies::Named(&["entity", "projection", "relation"]),
    specimen: r#"
[feed.home]
posts = "thing"
author = "by"
created = "at"
follows = "edge"
"#,
    failures: &[
        FailureAnswer::of(
            "stale projection",
            "`after` waits for a write; the lag is in `statehouse projection list`.",
            "progress by partition",
        ),
        FailureAnswer::of(
            "missing entry",
            "Followers are listed after the post is in its author's list, or no edge may have moved; an author's list is read after the edge was made.",
            "the relation's count rows, the order of reads",
        ),
        FailureAnswer::of(
            "duplicate entry",
            "A row's key is the reader and the post's place; a version of a post goes out once, and completely before the next.",
            "the entry's version, `user_feed_work`",
        ),
        FailureAnswer::of(
            "tombstone not propagated",
            "A row is not written for a reader who does not follow any more, and an unfollow takes whatever is there.",
            "the edge, as a condition of the plan",
        ),
        FailureAnswer::of(
            "expensive reindex after schema change",
            "A feed with another definition is built beside the one that serves.",
            "generations",
        ),
        FailureAnswer::of(
            "stale ranking after source update",
            "Old place and new place are one plan for each reader, if the time was changed.",
            "one plan",
        ),
    ],
    reliefs: &[
        Relief::of(
            "fanout on write",
            "pull_above = N; a post goes out in bounded plans",
            Some("hotspots feed"),
        ),
        Relief::of(
            "projection lag",
            "partitions=N in the store's URL, shared by all processes",
            Some("hotspots feed"),
        ),
        Relief::of(
            "expensive ranking/recompute",
            "the order is the key's, without a switch",
            Some("hotspots feed"),
        ),
        Relief::of("rebuild cost", "keep = SPAN: what is over goes nowhere", Some("hotspots feed")),
        Relief::of(
            "query fanout across shards",
            "one request, and one for each author above `pull_above`",
            Some("hotspots feed"),
        ),
    ],
};
