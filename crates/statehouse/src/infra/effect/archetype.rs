//! What `effect` says of itself: the one registration of the archetype.

use crate::archetypes::{Archetype, Dependencies, FailureAnswer, Relief};

/// I12, Workflow + External Side Effect.
pub const ARCHETYPE: Archetype = Archetype {
    code: "I12",
    keyword: "effect",
    about: "HTTP requests to other systems that must happen, also when responses are lost",
    declare: Some(super::declare),
    derived: false,
    depends_on: Dependencies::Named(&[]),
    specimen: r#"
[effect.call]
url = "https://target.example/"
reconcile = { url = "https://target.example/{key}" }
"#,
    failures: &[
        FailureAnswer::of(
            "effect succeeded but ack lost",
            "It is `UNCERTAIN`. The target is asked; or it gets the same key again; or a person is told.",
            "`doubt`, which only a definite answer clears",
        ),
        FailureAnswer::of(
            "duplicate side effect",
            "One sender at a time; a sender that was given up writes nothing; what may have been applied is sent again only under its key to a target that honours it.",
            "guard of claim: `status` and `attempt` as seen and `due_at <= now`; guard of record: `status = 'SENDING' and attempt = mine`",
        ),
        FailureAnswer::of(
            "stuck reconciliation",
            "It is asked for ever, at growing pauses. After `max_checks` the row has `stuck_at` and the log says so.",
            "`due_at` stays set; `resolve`",
        ),
        FailureAnswer::of(
            "invalid workflow transition around effect",
            "The decision and the effect are one plan: both or neither. Each action begins with certain states only.",
            "one plan; guards on `status` and `doubt`",
        ),
    ],
    reliefs: &[
        Relief::of(
            "external dependency latency",
            "limits = { concurrency = N }, for each target",
            Some("hotspots effect"),
        ),
        Relief::of("retry storms", "breaker = { failures = N, cool_down = SPAN }", Some("hotspots effect")),
        Relief::of("outbox relay backlog", "shards = N", Some("hotspots effect")),
    ],
};
