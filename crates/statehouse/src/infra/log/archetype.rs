//! What `log` says of itself: the one registration of the archetype.

use crate::archetypes::{Archetype, Dependencies, FailureAnswer, Relief};

/// The relief of "hot partitions", for all groups that read the log.
pub(crate) const HOT_PARTITIONS: Relief =
    Relief::of("hot partitions", "partitions=N in the store's URL, when it is created", Some("hotspots log"));

/// The relief of "log I/O", for all groups that read the log.
pub(crate) const LOG_IO: Relief =
    Relief::of("log I/O", "one read serves all tenants of a page, without a switch", Some("hotspots log"));

/// The relief of "rebalance churn", for all groups that read the log.
pub(crate) const REBALANCE_CHURN: Relief = Relief::of(
    "rebalance churn",
    "a partition changes hands at a step's end, without a switch",
    Some("hotspots log"),
);

/// I05, Append Log + Consumer Progress.
pub const ARCHETYPE: Archetype = Archetype {
    code: "I05",
    keyword: "log",
    about: "consumer groups that process every record of the log, each once and in order by key",
    declare: Some(super::declare),
    derived: false,
    depends_on: Dependencies::Named(&[]),
    specimen: r#"
[log.readers]
"#,
    failures: &[
        FailureAnswer::of(
            "duplicate consumption",
            "Two readers of one partition, or one that slept through its lease: the second commit is refused, effect and all.",
            "guards `reached = from` and `epoch = mine`, in the plan of the effect",
        ),
        FailureAnswer::of(
            "offset advanced before effect committed",
            "Cannot be: they are one plan. A group's low-water mark, from which a new holder begins, is moved after the plans of all tenants.",
            "one plan; the lease in the plan of the mark",
        ),
        FailureAnswer::of(
            "consumer lag",
            "`read`, `list` and `GroupInfo::status` say it in records and in time; the log waits for the slowest.",
            "`keeps_from`",
        ),
        FailureAnswer::of(
            "out-of-order processing across partitions",
            "All events of a subject are in one partition, also those of batches, which one reader goes through in order; behind a parked record its key waits. Between partitions there is no order.",
            "the partition; guard `parked = the number that was read`",
        ),
    ],
    reliefs: &[
        HOT_PARTITIONS,
        LOG_IO,
        Relief::of(
            "lag buildup",
            "a handler that makes one plan of many records: Effect::taken",
            Some("hotspots log"),
        ),
        REBALANCE_CHURN,
    ],
};
