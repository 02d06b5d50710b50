//! What `payment` says of itself: the one registration of the archetype.

use crate::archetypes::{Archetype, Dependencies, FailureAnswer, Relief};

/// A07, Critical Transaction Process.
pub const ARCHETYPE: Archetype = Archetype {
    code: "A07",
    keyword: "payment",
    about: "payments at a provider: one charge for each order, refunds within what was captured, unknown outcomes reconciled",
    declare: Some(super::declare),
    derived: false,
    depends_on: Dependencies::Named(&["effect"]),
    specimen: r#"
[payment.pay]
key        = { payment_intent_id = "text" }
currencies = ["EUR", "USD"]
http       = { url = "https://psp.example" }
"#,
    failures: &[
        FailureAnswer::of(
            "duplicate commit",
            "A second charge is refused while the first is under way or its outcome is unknown. A repeated call gets the first answer; a transaction id is one transaction for ever.",
            "guard of charge: `status in ('CREATED', 'RETRYABLE')`; of capture and cancel: `live_transaction is null`; the operation id; the transaction is absent",
        ),
        FailureAnswer::of(
            "invalid transition",
            "Each action begins with certain states. Two refunds that exceed what was captured: one is refused, also when they race.",
            "guards on `status`; guard of refund: `refundable >= amount`; of capture: `capturable >= amount`",
        ),
        FailureAnswer::of(
            "crash after commit before side effect",
            "The request to the provider is a row of the plan that begins the transaction. Any process sends it.",
            "one plan; the request is due until its outcome is recorded",
        ),
        FailureAnswer::of(
            "retry ambiguity against provider",
            "The payment is `REQUIRES_RECONCILIATION`, never failed, and keeps its live transaction. The provider is asked what became of it.",
            "guard of record: `attempt = mine`; `doubt`, which only a definite answer clears; the payment is as it was read",
        ),
        FailureAnswer::of(
            "reconciliation drift",
            "What the provider says when it is asked is recorded with the payment in one plan, and it is asked again and again until it knows.",
            "one plan; guard of record: `status = 'UNCERTAIN' and checks = asked`",
        ),
    ],
    reliefs: &[
        Relief::of(
            "synchronous commit-path latency",
            "a charge is one plan that waits for no provider, without a switch",
            Some("hotspots payment"),
        ),
        Relief::of("external provider bottleneck", "limits = { concurrency = N }", Some("hotspots payment")),
        Relief::of(
            "retry amplification",
            "breaker = { failures = N, cool_down = SPAN }",
            Some("hotspots payment"),
        ),
        Relief::of(
            "idempotency-store hotspot",
            "partitions = N: operation ids are in the partition of the payment",
            Some("hotspots payment"),
        ),
    ],
};
