//! Samples of `view`: generated declarations, and changes that its checker of invariants must notice.

#[cfg(test)]
use serde_json::json;

#[cfg(test)]
use crate::harness::tampering::Tampering;
#[cfg(feature = "suite")]
use crate::proof::generated::{BlueprintWriter, GeneratedSource};

/// A declaration with settings by chance.
#[cfg(feature = "suite")]
pub(crate) fn generate(writer: &mut BlueprintWriter, name: &str, _: usize) {
    let Some(GeneratedSource { name: source, state, ints, .. }) = writer.any_source(name) else { return };
    writer.head("view", name);
    writer.line(format_args!("of = \"{source}\""));
    let is_key = state.starts_with("from");
    if !is_key && writer.random.chance(0.8) {
        writer.line(format_args!("group_by = [\"{state}\"]"));
        writer.maybe("total", &["true"]);
    }
    if let Some(int) = writer.random.pick(&ints).cloned().filter(|_| writer.random.chance(0.6)) {
        let what = writer.pick(&["sum", "min", "max"]);
        writer.line(format_args!("{what} = [\"{int}\"]\ncount = true"));
    }
}

/// Changes of a row that no action makes.
#[cfg(test)]
pub(crate) fn tamperings() -> Vec<Tampering> {
    let made = |table| {
        let create = json!({"id": 1, "n": 2});
        Tampering::new("view", "totals", table).call("thing.create", &[], create).by_workers()
    };
    vec![made("totals_entries").set("gone", true), made("totals").set("members", 2)]
}
