//! Samples of `log`: generated declarations, and changes that its checker of invariants must notice.

#[cfg(test)]
use serde_json::json;

#[cfg(test)]
use crate::harness::tampering::Tampering;
#[cfg(feature = "suite")]
use crate::proof::generated::BlueprintWriter;

/// A declaration with settings by chance.
#[cfg(feature = "suite")]
pub(crate) fn generate(writer: &mut BlueprintWriter, name: &str, _: usize) {
    writer.head("log", name);
    let source = writer.random.pick(&writer.sources).map(|source| source.name.clone());
    if let Some(source) = source.filter(|_| writer.random.chance(0.7)) {
        writer.line(format_args!("of = [\"{source}\"]"));
    }
    writer.maybe("lease", &["\"5s\"", "\"1m\""]);
}

/// Changes of a row that no action makes.
#[cfg(test)]
pub(crate) fn tamperings() -> Vec<Tampering> {
    let claim = json!({"holder": "ann"});
    let made = |table| Tampering::new("log", "readers", table).call("readers.claim", &[0], claim.clone());
    vec![made("house_progress").set("epoch", 7), made("house_progress").set("parked", 1)]
}
