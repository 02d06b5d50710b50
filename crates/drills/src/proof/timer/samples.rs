//! Samples of `timer`: generated declarations, and changes that its checker of invariants must notice.

#[cfg(test)]
use serde_json::json;

#[cfg(test)]
use crate::harness::tampering::Tampering;
#[cfg(feature = "suite")]
use crate::proof::generated::BlueprintWriter;

/// A declaration with settings by chance.
#[cfg(feature = "suite")]
pub(crate) fn generate(writer: &mut BlueprintWriter, name: &str, _: usize) {
    writer.head("timer", name);
    writer.key("key", "id_");
    writer.maybe("shards", &["1", "4", "9"]);
    writer.maybe("missed", &["\"once\"", "\"all\""]);
    writer.source(name, "status", "set", Vec::new());
}

/// Changes of a row that no action makes.
#[cfg(test)]
pub(crate) fn tamperings() -> Vec<Tampering> {
    vec![Tampering::new("timer", "alarm", "alarms").call("alarm.set", &[1], json!({"after_ms": 1_000}))]
}
