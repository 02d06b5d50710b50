//! What `thread` says of itself: the one registration of the archetype.

use crate::archetypes::{Archetype, Dependencies, FailureAnswer, Relief};

/// A03, Append-Only Child Object.
pub const ARCHETYPE: Archetype = Archetype {
    code: "A03",
    keyword: "thread",
    about: "comments and reviews: children of a parent, in order of creation",
    declare: Some(super::declare),
    derived: false,
    depends_on: Dependencies::Named(&[]),
    specimen: r#"
[thread.note]
parent = { about = "int" }
fields = { body = "text" }
"#,
    failures: &[
        FailureAnswer::of(
            "duplicate child creation on retry",
            "The id is the key. A retry under another operation id gets the child that is there; if other words come under the same id it is refused with `already_exists`. What was removed in between stays removed.",
            "append expects no row; `digest` of the words",
        ),
        FailureAnswer::of(
            "projection/search lag after append",
            "There is none: list and count are written in the plan of the child.",
            "one plan",
        ),
        FailureAnswer::of(
            "delete/edit race",
            "Both are about one row. An edit that comes second is refused with `deleted`; a removal that comes second wins.",
            "guard of edit: `version = the one that was seen`, at which it was visible; without a version `status = 'VISIBLE'`",
        ),
        FailureAnswer::of(
            "moderation/removal lag",
            "There is none: what is hidden or removed leaves list and count in the same plan, and what a list names is looked up, strongly, before it is shown. Hiding asks for no version, so no edit can outrun it.",
            "guard of hide, restore and remove: `status = the one that it leaves`",
        ),
        FailureAnswer::of(
            "concurrent edit/delete race",
            "Of two edits under one version one is done, and the other is told the version as it is.",
            "guard of edit: `version = the one that was seen`",
        ),
    ],
    reliefs: &[
        Relief::of("hot parent append rate", "buckets = N", Some("hotspots thread")),
        Relief::of(
            "hot thread reads",
            "a page is one request for each bucket, without a switch",
            Some("hotspots thread"),
        ),
        Relief::of(
            "long history scans",
            "a page is one request for each bucket, without a switch",
            Some("hotspots thread"),
        ),
    ],
};
