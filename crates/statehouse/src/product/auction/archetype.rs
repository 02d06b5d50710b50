//! What `auction` says of itself: the one registration of the archetype.

use crate::archetypes::{Archetype, Dependencies, FailureAnswer, Relief};

/// A16, Auction / Competitive Window.
pub const ARCHETYPE: Archetype = Archetype {
    code: "A16",
    keyword: "auction",
    about: "lots that bidders compete for until a time: proxy, open or sealed bids, one winner",
    declare: Some(super::declare),
    derived: false,
    depends_on: Dependencies::Named(&["effect"]),
    specimen: r#"
[auction.sale]
key     = { sale_id = "int" }
bidding = "open"
"#,
    failures: &[
        FailureAnswer::of(
            "accepted late bid",
            "Bids and the close are about one row, and the engine's clock decides: a bid that arrives at the end or later is stored as `REJECTED`, or counted, and the bidder is told `expired`.",
            "guard of bid: `ends_at > now`; of close: `ends_at <= now`",
        ),
        FailureAnswer::of(
            "wrong winner",
            "Every bid is judged by the row that the plan writes, so no accepted bid is overwritten. The winner is taken from the row that the close guards, in the plan that closes.",
            "guard of bid and of close: `version = the one that was judged`",
        ),
        FailureAnswer::of(
            "duplicate close",
            "Two closers, or a closer whose answer was lost: one plan closes the lot, inserts the winner and sends the effect; the other is refused.",
            "guard of close: `version = the one that was read`; the winner's row is absent",
        ),
        FailureAnswer::of(
            "stale current-best read near close",
            "What a reader saw decides nothing. A bid is judged by the row as it is, and the bidder is told the price, the least next bid and the end of that moment.",
            "guard of bid: `version = the one that was judged`",
        ),
    ],
    reliefs: &[
        Relief::of("burst bids near close", "fold = N", Some("hotspots auction")),
        Relief::of(
            "hot auction row",
            "the description is a row of its own, without a switch",
            Some("hotspots auction"),
        ),
        Relief::of("current-best contention", "fold = N", Some("hotspots auction")),
        Relief::of("append hotspot for hot auction", "bid_buckets = N", Some("hotspots auction")),
    ],
};
