//! Samples of `workflow`: generated declarations, and changes that its checker of invariants must notice.

#[cfg(test)]
use serde_json::json;

#[cfg(test)]
use crate::harness::tampering::Tampering;
#[cfg(feature = "suite")]
use crate::proof::generated::BlueprintWriter;

/// A declaration with settings by chance: a circle of states, ways out of it, timers and conditions.
#[cfg(feature = "suite")]
pub(crate) fn generate(writer: &mut BlueprintWriter, name: &str, _: usize) {
    let states = 2 + writer.random.below(4);
    writer.head("workflow", name);
    writer.key("key", "id_");
    let ints = writer.some_fields("fields", "field_");
    writer.maybe("history", &["\"rows\"", "\"log\""]);
    writer.maybe("shards", &["1", "4"]);
    writer.line(format_args!("initial = \"S0\""));
    writer.line(format_args!("final = [\"DONE\"]"));
    writer.line(format_args!("[workflow.{name}.on]"));
    for state in 0..states {
        let next = (state + 1) % states;
        writer.line(format_args!("go_{state} = {{ from = \"S{state}\", to = \"S{next}\" }}"));
    }
    let condition = match ints.first() {
        Some(field) if writer.random.chance(0.5) => {
            format!(", if = \"{field} is null or {field} < 1000000\"")
        }
        _ => String::new(),
    };
    writer.line(format_args!("finish = {{ from = [\"S0\", \"S1\"], to = \"DONE\"{condition} }}"));
    if writer.random.chance(0.5) {
        writer.line(format_args!("lapse = {{ from = \"S1\", to = \"DONE\", after = \"1h\" }}"));
    }
    if writer.random.chance(0.5) {
        writer.line(format_args!("note = {{ from = \"*\" }}"));
    }
    writer.source(name, "state", "started", Vec::new());
}

/// Changes of rows that no action makes.
#[cfg(test)]
pub(crate) fn tamperings() -> Vec<Tampering> {
    let start = json!({"order_id": "a", "total": 5});
    let made = |table| Tampering::new("workflow", "order", table).call("order.start", &[], start.clone());
    vec![made("orders").set("state", "DELIVERED"), made("order_history").set("transition", "pay")]
}
