//! Samples of `scan`: generated declarations, and changes that its checker of invariants must notice.

#[cfg(test)]
use serde_json::json;

#[cfg(test)]
use crate::harness::tampering::Tampering;
#[cfg(feature = "suite")]
use crate::proof::generated::BlueprintWriter;

/// A declaration with settings by chance.
#[cfg(feature = "suite")]
pub(crate) fn generate(writer: &mut BlueprintWriter, name: &str, _: usize) {
    let Some(source) = writer.any_source(name) else { return };
    writer.head("scan", name);
    writer.line(format_args!("of = \"{}\"", source.name));
    writer.maybe("ranges", &["1", "5", "90"]);
    writer.maybe("lease", &["\"5s\"", "\"1h\""]);
    writer.maybe("attempts", &["1", "9"]);
    writer.maybe("shards", &["1", "6"]);
}

/// Changes of a row that no action makes.
#[cfg(test)]
pub(crate) fn tamperings() -> Vec<Tampering> {
    let made =
        |table| Tampering::new("scan", "review", table).call("review.start", &[], json!({"run_id": "a"}));
    vec![made("reviews").set("open", 2), made("review_ranges").set("state", "DONE")]
}
