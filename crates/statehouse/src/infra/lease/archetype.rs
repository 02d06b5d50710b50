//! What `lease` says of itself: the one registration of the archetype.

use crate::archetypes::{Archetype, Dependencies, FailureAnswer, Relief};

/// I02, Claim / Lease / Exclusive Ownership.
pub const ARCHETYPE: Archetype = Archetype {
    code: "I02",
    keyword: "lease",
    about: "exclusive ownership for a limited time, with fencing tokens",
    declare: Some(super::declare),
    derived: false,
    depends_on: Dependencies::Named(&[]),
    specimen: r#"
[lease.claim]
key = { id = "int" }
"#,
    failures: &[
        FailureAnswer::of(
            "duplicate claim",
            "Many claim it at once, or one sends its claim twice. One gets it; the others are refused with `held`, and a repetition under the same operation id gets the first answer.",
            "guard of acquire: `state = 'FREE' or expires_at <= now`",
        ),
        FailureAnswer::of(
            "stale holder acting after expiry",
            "It was paused, the lease went to another, and it goes on where it was. Its batch is refused with `not_holder`.",
            "`check` in the batch: `epoch = mine and holder = me`",
        ),
        FailureAnswer::of(
            "lease expiry race",
            "A renewal and the next claim arrive at the very end. Both are about one row, and one reading of the clock decides: exactly one is done.",
            "guard of renew: `expires_at > now`; of acquire: `expires_at <= now`",
        ),
        FailureAnswer::of(
            "orphaned claim after crash",
            "Nothing has to be cleaned up: when it has expired, the next caller acquires it.",
            "guard of acquire",
        ),
    ],
    reliefs: &[
        Relief::of("hot claim key", "Prefer: wait", Some("hotspots lease")),
        Relief::of(
            "heartbeat/renew storm",
            "renewals of several leases as one plan: /v1/batch",
            Some("hotspots lease"),
        ),
        Relief::of(
            "lease-manager contention",
            "each key is a row of its own, without a switch",
            Some("hotspots lease"),
        ),
    ],
};
