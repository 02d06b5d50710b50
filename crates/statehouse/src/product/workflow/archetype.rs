//! What `workflow` says of itself: the one registration of the archetype.

use crate::archetypes::{Archetype, Dependencies, FailureAnswer, Relief};

/// A04, Workflow / Lifecycle State.
pub const ARCHETYPE: Archetype = Archetype {
    code: "A04",
    keyword: "workflow",
    about: "the life cycle of a row: declared transitions with conditions, timers, history, effects and jobs",
    declare: Some(super::declare),
    derived: false,
    depends_on: Dependencies::Named(&["effect", "schedule"]),
    specimen: r#"
[workflow.order]
key     = { order_id = "text" }
fields  = { total = "int", payment = "text?" }
initial = "PLACED"
final   = ["DELIVERED", "CANCELLED"]
[workflow.order.on]
pay     = { from = "PLACED", to = "PAID", set = ["payment"], send = { call = { order = "{order_id}", by = "{payment}" } } }
ship    = { from = "PAID", to = "SHIPPED", scope = "warehouse", enqueue = { job = { order = "{order_id}" } } }
deliver = { from = "SHIPPED", to = "DELIVERED" }
cancel  = { from = ["PLACED", "PAID"], to = "CANCELLED", if = "total < 100000" }
expire  = { from = "PLACED", to = "CANCELLED", after = "30m" }
"#,
    failures: &[
        FailureAnswer::of(
            "retry of same transition after commit",
            "A caller whose answer was lost repeats the transition. Under the same operation id it gets the first answer; without one it is refused and told the last transition, its time and its operation. The history has the transition once, and its effects and jobs exist once.",
            "the log's operation; guard of a transition: `version = the one that was read`; insert of the history row",
        ),
        FailureAnswer::of(
            "invalid transition from stale state",
            "The caller decided on an old copy of the row. The engine judges the state of the row, not the copy, and the refusal says in which state the row is, since when and by which transition.",
            "guard of a transition: `version = the one that was read`, or `state = 'PAID'`",
        ),
        FailureAnswer::of(
            "competing transitions",
            "Two callers, or a caller and a timer, change one row at once. One is applied; the other is judged again in the new state, and applied or refused there.",
            "guard of a transition: `version = the one that was read`, or `state = 'PAID'`; of a timer: `due_at <= now`",
        ),
        FailureAnswer::of(
            "crash after transition but before side effect",
            "The process dies after the commit. The effect and the job of the transition are rows of the same plan, so that any other process sends the one and claims the other.",
            "one plan",
        ),
        FailureAnswer::of(
            "stale status read",
            "A read by key is strong: it sees every transition that was answered before it began. A read with `until` waits for a state, and is answered from the row itself.",
            "strong read by key",
        ),
    ],
    reliefs: &[
        Relief::of("hot workflow transition rows", "history = \"log\"", Some("hotspots workflow")),
        Relief::of("expensive status polling", "until=STATE with Prefer: wait", Some("hotspots workflow")),
        Relief::of(
            "side-effect worker backlog",
            "limits = { concurrency = N } of the effect",
            Some("hotspots workflow"),
        ),
    ],
};
