//! What `inventory` says of itself: the one registration of the archetype.

use crate::archetypes::{Archetype, Dependencies, FailureAnswer, Relief};

/// A06, Inventory / Constrained Resource.
pub const ARCHETYPE: Archetype = Archetype {
    code: "A06",
    keyword: "inventory",
    about: "stock: quantities that callers reserve in several lines, all or none, and then buy or release",
    declare: Some(super::declare),
    derived: false,
    depends_on: Dependencies::Named(&[]),
    specimen: r#"
[inventory.stock]
key = { id = "int" }
"#,
    failures: &[
        FailureAnswer::of(
            "oversell",
            "Of many callers who want the last ones, those get them whose plans are decided first; the others are told `out_of_stock` with the number that is left. Two lines of one row are one quantity.",
            "guard of reserve, for each row: `available >= quantity - backorder`, judged in the write",
        ),
        FailureAnswer::of(
            "double allocate",
            "A caller that repeats a reserve gets the reservation that it has: under its operation id, and under the reservation's id with the same lines. Other lines under a used id are told `already_exists`.",
            "the reservation's row is absent before; the operation id",
        ),
        FailureAnswer::of(
            "lost release",
            "A reservation that is not bought ends by itself at its time, and its stock is available again, all of it in the plan that ends it. Repeated releases release once.",
            "guard of release and expire: `state = 'RESERVED'`; the reservation is due at its end",
        ),
        FailureAnswer::of(
            "stale availability read",
            "Reads are strong: a read that begins after a write was answered sees it. A refused reserve says the number that it was refused for.",
            "strong reads by key; the row of the refused step",
        ),
    ],
    reliefs: &[
        Relief::of("hot inventory key", "cells = N", Some("hotspots inventory")),
        Relief::of(
            "concentrated contention on scarce resources",
            "a reserve for which too little is left is one refused plan, without a switch",
            Some("hotspots inventory"),
        ),
        Relief::of(
            "fragmented capacity",
            "lines of several rows are one plan; cells = N are made even by a worker",
            Some("hotspots inventory"),
        ),
    ],
};
