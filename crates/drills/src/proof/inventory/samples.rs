//! Samples of `inventory`: generated declarations, and changes that its checker of invariants must notice.

#[cfg(test)]
use serde_json::json;

#[cfg(test)]
use crate::harness::tampering::Tampering;
#[cfg(feature = "suite")]
use crate::proof::generated::{BlueprintWriter, FieldUse};

/// A declaration with settings by chance.
#[cfg(feature = "suite")]
pub(crate) fn generate(writer: &mut BlueprintWriter, name: &str, _: usize) {
    writer.head("inventory", name);
    let parts = 1 + writer.random.below(3);
    writer.fields("key", "part_", parts, FieldUse::Key);
    writer.some_fields("fields", "note_");
    let hold = writer.pick(&["", "1s", "15m"]);
    writer.line(format_args!("hold_for = \"{hold}\""));
    if !hold.is_empty() {
        writer.maybe("hold_max", &["\"15m\"", "\"1d\""]);
    }
    writer.maybe("lines_max", &["1", "3", "5"]);
    writer.maybe("cells", &["1", "2", "16"]);
    writer.maybe("backorder", &["0", "2", "100"]);
    writer.maybe("low", &["0", "1", "50"]);
    writer.maybe("movements", &["\"rows\"", "\"log\""]);
    writer.maybe("shards", &["1", "3", "16"]);
    writer.source(&format!("{name}_reservation"), "state", "reserved", Vec::new());
}

/// Changes of rows that no action makes.
#[cfg(test)]
pub(crate) fn tamperings() -> Vec<Tampering> {
    let reserve = json!({"reservation_id": "r", "lines": [{"id": 1, "quantity": 2}]});
    let stocked = |table| {
        Tampering::new("inventory", "stock", table).call("stock.restock", &[1], json!({"quantity": 5}))
    };
    vec![
        stocked("stocks"),
        stocked("stocks").set("available", 6),
        stocked("stocks").set("available", 4).set("sold", 1),
        stocked("stock_movements").set("quantity", 4),
        stocked("stock_reservations").call("stock_reservation.reserve", &[], reserve.clone()),
        stocked("stocks")
            .call("stock_reservation.reserve", &[], reserve)
            .set("available", 4)
            .set("reserved", 1),
    ]
}
