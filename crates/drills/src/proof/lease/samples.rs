//! Samples of `lease`: generated declarations, and changes that its checker of invariants must notice.

#[cfg(test)]
use serde_json::json;

#[cfg(test)]
use crate::harness::tampering::Tampering;
#[cfg(feature = "suite")]
use crate::proof::generated::BlueprintWriter;

/// A declaration with settings by chance.
#[cfg(feature = "suite")]
pub(crate) fn generate(writer: &mut BlueprintWriter, name: &str, _: usize) {
    writer.head("lease", name);
    writer.key("key", "id_");
    writer.maybe("duration", &["\"1s\"", "\"30s\"", "\"10m\""]);
    writer.maybe("max_duration", &["\"1h\"", "\"1d\""]);
    writer.source(name, "state", "acquired", Vec::new());
}

/// Changes of a row that no action makes.
#[cfg(test)]
pub(crate) fn tamperings() -> Vec<Tampering> {
    vec![Tampering::new("lease", "claim", "claims").call("claim.acquire", &[1], json!({"holder": "ann"}))]
}
