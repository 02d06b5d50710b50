//! What `on` says of itself: the one registration of the archetype.

use crate::archetypes::{Archetype, Dependencies, FailureAnswer, Relief};
use crate::infra::log::{HOT_PARTITIONS, LOG_IO, REBALANCE_CHURN};

/// I05, Append Log + Consumer Progress, as a group of the server that calls actions.
pub const ARCHETYPE: Archetype = Archetype {
    code: "I05",
    keyword: "on",
    about: "reactions: an event in the log calls an action, once, with what the event says",
    declare: Some(super::declare),
    derived: true,
    depends_on: Dependencies::AllOthers,
    specimen: r#"
[on.thing_created]
event = "thing.created"
do    = "call.send"
input = { key = "thing-{subject}", body = { n = "{row.n}" } }
"#,
    failures: &[
        FailureAnswer::of(
            "duplicate consumption",
            "The action runs in the plan that moves the offset, under an operation id that is made from the event: a second \
             process, a retry and a replay find it done.",
            "guards `reached = the one that was read` and `epoch <= mine`; the operation id",
        ),
        FailureAnswer::of(
            "offset advanced before effect committed",
            "Cannot be: they are one plan. What is refused is parked in the plan that passes it.",
            "one plan",
        ),
        FailureAnswer::of(
            "consumer lag",
            "The worker `NAME.consume` says it in the metrics; the log waits for the slowest.",
            "`keeps_from`",
        ),
        FailureAnswer::of(
            "out-of-order processing across partitions",
            "Events of one row are reacted to in the order of its versions; behind a parked event the row's later ones wait. \
             Between rows there is no order.",
            "the partition; guard `parked = the number that was read`",
        ),
    ],
    reliefs: &[
        HOT_PARTITIONS,
        LOG_IO,
        Relief::of(
            "lag buildup",
            "`when` passes events without a plan; tenants of a partition go side by side",
            Some("hotspots log"),
        ),
        REBALANCE_CHURN,
    ],
};
