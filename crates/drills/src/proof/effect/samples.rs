//! Samples of `effect`: generated declarations, and changes that its checker of invariants must notice.

#[cfg(test)]
use serde_json::json;

#[cfg(test)]
use crate::harness::tampering::Tampering;
#[cfg(feature = "suite")]
use crate::proof::generated::BlueprintWriter;

/// A declaration with settings by chance.
#[cfg(feature = "suite")]
pub(crate) fn generate(writer: &mut BlueprintWriter, name: &str, _: usize) {
    writer.head("effect", name);
    let place = writer.pick(&["url = \"https://example.com/hook\"", "hosts = [\"*.example.com\"]"]);
    writer.line(format_args!("{place}"));
    writer.maybe("method", &["\"POST\"", "\"PUT\""]);
    writer.maybe("idempotent", &["true", "false"]);
    writer.maybe("max_attempts", &["1", "5"]);
    writer.maybe("keep", &["\"1d\""]);
    writer.source(name, "status", "pending", Vec::new());
}

/// Changes of a row that no action makes.
#[cfg(test)]
pub(crate) fn tamperings() -> Vec<Tampering> {
    let send = json!({"key": "a", "body": {}});
    vec![Tampering::new("effect", "call", "calls").call("call.send", &[], send).set("status", "DELIVERED")]
}
