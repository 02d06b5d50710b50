//! Samples of `entity`: generated declarations, and changes that its checker of invariants must notice.

#[cfg(test)]
use serde_json::json;

#[cfg(test)]
use crate::harness::tampering::Tampering;
#[cfg(feature = "suite")]
use crate::proof::generated::BlueprintWriter;

/// A declaration with settings by chance.
#[cfg(feature = "suite")]
pub(crate) fn generate(writer: &mut BlueprintWriter, name: &str, _: usize) {
    writer.head("entity", name);
    writer.key("key", "id_");
    let mut ints = writer.some_fields("fields", "field_");
    writer.maybe("mutate", &["\"optimistic\"", "\"pessimistic\""]);
    writer.maybe("require_version", &["true", "false"]);
    // A hot field must be one that `create` does not have to be given.
    let fields = writer.text.lines().rev().find(|line| line.starts_with("fields")).unwrap_or_default();
    let is_required = |name: &String| fields.contains(&format!("{name} = \"int\""));
    let hot = ints.iter().position(|name| !is_required(name));
    if let Some(index) = hot.filter(|_| writer.random.chance(0.5)) {
        let hot = ints.remove(index);
        writer.line(format_args!("hot = [\"{hot}\"]"));
    }
    writer.source(name, "status", "created", ints);
}

/// Changes of a row that no action makes.
#[cfg(test)]
pub(crate) fn tamperings() -> Vec<Tampering> {
    vec![Tampering::new("entity", "thing", "things").call("thing.create", &[], json!({"id": 1}))]
}
