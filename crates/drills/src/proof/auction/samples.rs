//! Samples of `auction`: generated declarations, and changes that its checker of invariants must notice.

#[cfg(test)]
use serde_json::json;

#[cfg(test)]
use crate::harness::tampering::Tampering;
#[cfg(feature = "suite")]
use crate::proof::generated::{BlueprintWriter, FieldUse};

/// A declaration with settings by chance.
#[cfg(feature = "suite")]
pub(crate) fn generate(writer: &mut BlueprintWriter, name: &str, _: usize) {
    writer.head("auction", name);
    writer.fields("key", "part_", 1, FieldUse::Key);
    writer.some_fields("fields", "detail_");
    let mode = writer.pick(&["proxy", "open", "sealed"]);
    writer.line(format_args!("bidding = \"{mode}\""));
    writer.maybe("increments", &["5", "[[0, 5], [100, 25]]"]);
    writer.maybe("buy_now", &["\"until_first_bid\""]);
    writer.maybe("extend", &["{ within = \"1s\", to = \"2s\", until = \"5s\" }", "{ within = \"1m\" }"]);
    writer.maybe("rejected", &["\"keep\"", "\"count\""]);
    writer.maybe("runner_up", &["true"]);
    writer.maybe("fold", &["1", "3", "90"]);
    writer.maybe("bid_buckets", &["1", "4"]);
    writer.maybe("shards", &["1", "3", "16"]);
    writer.source(name, "state", "created", Vec::new());
}

/// Changes of a row that no action makes.
#[cfg(test)]
pub(crate) fn tamperings() -> Vec<Tampering> {
    let of = |table| {
        let lot = json!({"sale_id": 1, "ends_at": "2099-01-01T00:00:00Z"});
        Tampering::new("auction", "sale", table).call("sale.create", &[], lot)
    };
    let bid = |table| of(table).call("sale.bid", &[1], json!({"bidder_id": "ann", "amount": 5}));
    vec![
        of("sales"),
        of("sales").set("price", 7),
        bid("sales").set("bidder_id", "bob"),
        bid("sale_bids").set("amount", 9),
        bid("sale_bids").set("seq", 2),
        bid("sale_bids").set("state", "VOIDED"),
    ]
}
