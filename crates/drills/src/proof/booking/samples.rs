//! Samples of `booking`: generated declarations, and changes that its checker of invariants must notice.

#[cfg(test)]
use serde_json::json;

#[cfg(test)]
use crate::harness::tampering::Tampering;
#[cfg(feature = "suite")]
use crate::proof::generated::{BlueprintWriter, FieldUse};

/// A declaration with settings by chance.
#[cfg(feature = "suite")]
pub(crate) fn generate(writer: &mut BlueprintWriter, name: &str, _: usize) {
    writer.head("booking", name);
    let parts = 2 + writer.random.below(2);
    writer.fields("key", "part_", parts, FieldUse::Key);
    let ints = writer.some_fields("fields", "price_");
    writer.some_fields("details", "detail_");
    let hold = writer.pick(&["1s", "90s", "10m", "1d"]);
    writer.line(format_args!("hold_for = \"{hold}\""));
    writer.maybe("hold_max", &["\"1d\"", "\"7d\""]);
    writer.maybe("units_max", &["1", "10", "40"]);
    writer.maybe("refundable", &["true", "false"]);
    writer.maybe("on_expiry", &["\"free\"", "\"overdue\""]);
    writer.maybe("holder", &["\"text\"", "\"int\"", "\"bytes\"", "\"time\""]);
    writer.maybe("shards", &["1", "3", "16"]);
    writer.source(name, "state", "created", ints);
    writer.source(&format!("{name}_booking"), "state", "held", Vec::new());
}

/// Changes of a row that no action makes.
#[cfg(test)]
pub(crate) fn tamperings() -> Vec<Tampering> {
    let hold = json!({"booking_id": "b", "group_id": "g", "id": [1], "holder": "ann"});
    let made = Tampering::new("booking", "unit", "unit_bookings")
        .call("unit.create", &[], json!({"group_id": "g", "id": 1}))
        .call("unit_booking.hold", &[], hold);
    vec![made]
}
