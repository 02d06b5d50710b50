//! Samples of `relation`: generated declarations, and changes that its checker of invariants must notice.

#[cfg(test)]
use serde_json::json;

#[cfg(test)]
use crate::harness::tampering::Tampering;
#[cfg(feature = "suite")]
use crate::proof::generated::BlueprintWriter;

/// A declaration with settings by chance.
#[cfg(feature = "suite")]
pub(crate) fn generate(writer: &mut BlueprintWriter, name: &str, _: usize) {
    writer.head("relation", name);
    writer.key("from", "from_");
    writer.key("to", "to_");
    let ints = writer.some_fields("fields", "field_");
    writer.maybe("buckets", &["1", "4", "7"]);
    writer.maybe("out_buckets", &["1", "3"]);
    writer.maybe("count_shards", &["1", "5"]);
    writer.source(name, "from_0", "added", ints);
}

/// Changes of a row that no action makes.
#[cfg(test)]
pub(crate) fn tamperings() -> Vec<Tampering> {
    vec![Tampering::new("relation", "edge", "edges").call("edge.add", &[1, 2], json!({}))]
}
