//! What `entity` says of itself: the one registration of the archetype.

use crate::archetypes::{Archetype, Dependencies, FailureAnswer, Relief};

/// A01, Current-Value Entity.
pub const ARCHETYPE: Archetype = Archetype {
    code: "A01",
    keyword: "entity",
    about: "rows that are read and changed with optimistic locking",
    declare: Some(super::declare),
    derived: false,
    depends_on: Dependencies::Named(&[]),
    specimen: r#"
[entity.thing]
key = { id = "int" }
fields = { n = "int?", list = "json?", by = "int?", at = "time?" }
"#,
    failures: &[
        FailureAnswer::of(
            "retry ambiguity on write",
            "The answer got lost; was it done? Send it again under the same id: it gets the first answer, even if the row has changed or was deleted since.",
            "the record in the log, written with the row, is unique by operation id",
        ),
        FailureAnswer::of(
            "concurrent overwrite race",
            "Two people saved over the same version. One write is applied; the other is refused with the current version and can merge.",
            "every write has the version it rests on in its guard",
        ),
        FailureAnswer::of(
            "stale read after update",
            "A reader that has just written wants to see it. Plain reads always do. A cached read does if it brings the write's token.",
            "reads go to the store; a token the cache has not reached sends it there",
        ),
        FailureAnswer::of(
            "cache invalidation lag",
            "The cache still has the old row. It follows the log, forgets what was written, never takes in what was read before a write and came after it, and answers nothing when it has heard nothing for five seconds.",
            "C1 to C4 in `crates/statehouse/src/cache.rs`",
        ),
    ],
    reliefs: &[
        Relief::of("hot entity read skew", "consistency=cached", Some("hotspots entity")),
        Relief::of(
            "write contention on hot entity",
            "hot = [\"FIELD\"], mutate = \"pessimistic\"",
            Some("hotspots entity"),
        ),
        Relief::of(
            "cache invalidation churn",
            "consistency=cached: rows are discarded one by one",
            Some("hotspots entity"),
        ),
    ],
};
