//! What `timer` says of itself: the one registration of the archetype.

use crate::archetypes::{Archetype, Dependencies, FailureAnswer, Relief};

/// I03, Due-Time Release + Claimable Run.
pub const ARCHETYPE: Archetype = Archetype {
    code: "I03",
    keyword: "timer",
    about: "durable timers, one-shot and recurring, each due time released once",
    declare: Some(super::declare),
    derived: false,
    depends_on: Dependencies::Named(&[]),
    specimen: r#"
[timer.alarm]
key = { id = "int" }
"#,
    failures: &[
        FailureAnswer::of(
            "due item materialized twice",
            "Two scanners find the same timer. The first release moves the row on; the second is refused.",
            "guard of fire: `version = the one that was scanned`",
        ),
        FailureAnswer::of(
            "due item never materialized",
            "The process died, or no process ran. The timer stays in the index of what is due until it is released, whenever that is.",
            "`due_at` changes with the release only",
        ),
        FailureAnswer::of(
            "job claimed twice",
            "A shard is one process's at a time; if two believed to have it, the guard above lets one release each due time. A timer that is cancelled does not fire: both are about one row.",
            "the shard's lease; guard of cancel: `status = 'SET'`",
        ),
        FailureAnswer::of(
            "run executed but result not recorded",
            "The release is its own record: row and event are one plan. A lost answer changes nothing; the next scan sees what the row says.",
            "one plan",
        ),
    ],
    reliefs: &[
        Relief::of("due-time bucket hotspot", "shards = N", Some("hotspots timer")),
        Relief::of("cron boundary burst", "shards = N", Some("hotspots timer")),
        Relief::of("queue backlog", "missed = \"once\"", Some("hotspots timer")),
        Relief::of("worker burst", "steps are bounded, without a switch", Some("hotspots timer")),
    ],
};
