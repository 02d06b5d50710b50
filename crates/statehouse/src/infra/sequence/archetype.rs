//! What `sequence` says of itself: the one registration of the archetype.

use crate::archetypes::{Archetype, Dependencies, FailureAnswer, Relief};

/// I09, Sequence / Identifier Generation.
pub const ARCHETYPE: Archetype = Archetype {
    code: "I09",
    keyword: "sequence",
    about: "unique numbers and ids: counters, gapless numbers, time-ordered ids",
    declare: Some(super::declare),
    derived: false,
    depends_on: Dependencies::Named(&[]),
    specimen: r#"
[sequence.number]
kind = "counter"
key = { id = "int" }
[sequence.invoice_number]
kind = "gapless"
key = { id = "int" }
[sequence.time_id]
kind = "time"
"#,
    failures: &[
        FailureAnswer::of(
            "duplicate IDs",
            "Counter: numbers are added to where they stand. Gapless: of two who want the same number one is refused. Time: two processes that both believe to own a worker, one of them paused for an hour, mint from spans that do not overlap. A lost answer loses numbers, unless the request is repeated under its operation id.",
            "`last = last + n`; guard of take and of lease: `last = the one that was read`; guard of a span that begins now: `reserved_until <= now`, and any other begins at `reserved_until`",
        ),
        FailureAnswer::of(
            "non-monotonic IDs",
            "Ids of one worker rise, always. Ids of different workers differ from the order of their making by `ahead` at most, while the store's clock is right. A range whose lease is over is given up by its holder, so that no number comes hours late.",
            "the mark; the lease",
        ),
        FailureAnswer::of(
            "worker-id exhaustion",
            "`lease` is refused with `held` and says when the next worker id is free. Nothing is minted without one. A process that comes back under its own name gets the one that it has.",
            "one row for each worker id",
        ),
        FailureAnswer::of(
            "clock rollback / stale epoch",
            "The store's clock was set back: the next span begins at the mark, not at the clock. The process's clock was set: it is not read. A holder that lost its worker id is refused, and what it still mints is from its own span.",
            "`reserved_until` in the store; `epoch = mine and holder = me`",
        ),
    ],
    reliefs: &[
        Relief::of("allocator hot spot", "leased ranges, or a sequence of times", Some("hotspots sequence")),
        Relief::of(
            "worker-id pool contention",
            "processes look at different places, without a switch",
            Some("hotspots sequence"),
        ),
        Relief::of("lease refresh pressure", "ahead = SPAN", Some("hotspots sequence")),
    ],
};
