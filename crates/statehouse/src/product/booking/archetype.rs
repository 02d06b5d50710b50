//! What `booking` says of itself: the one registration of the archetype.

use crate::archetypes::{Archetype, Dependencies, FailureAnswer, Relief};

/// A08, Time-Bounded Exclusive Allocation.
pub const ARCHETYPE: Archetype = Archetype {
    code: "A08",
    keyword: "booking",
    about: "seats, rooms and slots: one buyer holds a unit for a limited time, then buys it or loses it",
    declare: Some(super::declare),
    derived: false,
    depends_on: Dependencies::Named(&[]),
    specimen: r#"
[booking.unit]
key = { group_id = "text", id = "int" }
"#,
    failures: &[
        FailureAnswer::of(
            "duplicate hold",
            "Two buyers: one plan is applied, the other is told `held`. One buyer who asks twice under one id gets the first answer.",
            "guard of hold, for each unit: `state = 'AVAILABLE'`, or its hold has ended; the operation id",
        ),
        FailureAnswer::of(
            "expired hold not released",
            "It reads as free and can be held from the moment its time is up, whether it was swept or not.",
            "guard of hold: `hold_expires_at <= now`; the booking is due at its end",
        ),
        FailureAnswer::of(
            "confirm-after-expiry race",
            "Confirm needs `expires_at > now`, the sweeper the opposite, on one row and by the engine's clock: one of them wins.",
            "guard of confirm: `expires_at > now`; of expire: `expires_at <= now`",
        ),
        FailureAnswer::of(
            "cancel/confirm race",
            "Both leave `IN_PROGRESS`: the second one is told `wrong_state`.",
            "guard of both: `state = 'IN_PROGRESS'`",
        ),
        FailureAnswer::of(
            "stale availability after hold expiry",
            "Reads look at the end of the hold, not only at the state.",
            "`hold_expires_at`, judged when a unit is read",
        ),
    ],
    reliefs: &[
        Relief::of("hot hold key", "count=N instead of named units", Some("hotspots booking")),
        Relief::of(
            "hold storms",
            "plans in flight share a transaction, without a switch; a schedule with per_key = N as a waiting room",
            Some("hotspots booking"),
        ),
        Relief::of("expiry scan pressure", "shards = N", Some("hotspots booking")),
        Relief::of(
            "hold-store contention",
            "units of different groups share no row, without a switch",
            Some("hotspots booking"),
        ),
    ],
};
