//! What `schedule` says of itself: the one registration of the archetype.

use crate::archetypes::{Archetype, Dependencies, FailureAnswer, Relief};

/// A09, Future Constraint + Claimable Run.
pub const ARCHETYPE: Archetype = Archetype {
    code: "A09",
    keyword: "schedule",
    about: "jobs that run now, later or by cron, one worker at a time, each finished once",
    declare: Some(super::declare),
    derived: false,
    depends_on: Dependencies::Named(&[]),
    specimen: r#"
[schedule.job]
"#,
    failures: &[
        FailureAnswer::of(
            "due item materialized twice",
            "Two makers find the same definition. The first plan stores the job and moves the definition on; the second is refused. A job that is enqueued for later is its own item: one row, one id.",
            "guard of make: `version = the one that was scanned`; insert if absent",
        ),
        FailureAnswer::of(
            "due item never materialized",
            "A definition stands in the due index until its job is made, and a job in its own until it is over, whichever process dies; claims need no scanner.",
            "`due_at` moves with the job that is made; `run_at` is cleared only by what ends the job",
        ),
        FailureAnswer::of(
            "job claimed twice",
            "Of two claims one is refused. The lease of a dead worker ends by itself.",
            "guard of claim: `run_at <= now`, by the engine's clock",
        ),
        FailureAnswer::of(
            "run executed but result not recorded",
            "The job is claimed again when its lease is over, at once, by any worker. The worker that comes back late is refused; if no other worker has claimed since, its result counts.",
            "guard of complete and fail: `state = 'IN_PROGRESS' and attempt = mine`",
        ),
    ],
    reliefs: &[
        Relief::of(
            "due-time burstiness",
            "look_ahead = SPAN; claims in batches: limit=N",
            Some("hotspots schedule"),
        ),
        Relief::of("due bucket/index hotspot", "shards = N", Some("hotspots schedule")),
        Relief::of(
            "queue backlog",
            "a claim reads the beginning of a range, without a switch; priorities = N",
            Some("hotspots schedule"),
        ),
        Relief::of(
            "worker burst pressure",
            "claimers of one process take turns at a shard, without a switch",
            Some("hotspots schedule"),
        ),
    ],
};
