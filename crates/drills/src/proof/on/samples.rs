//! Samples of `on`: generated declarations, and changes that its checker of invariants must notice.

#[cfg(test)]
use serde_json::json;

#[cfg(test)]
use crate::harness::tampering::Tampering;
#[cfg(feature = "suite")]
use crate::proof::generated::BlueprintWriter;

/// A reaction that creates a row of an entity of its own.
#[cfg(feature = "suite")]
pub(crate) fn generate(writer: &mut BlueprintWriter, name: &str, _: usize) {
    let Some(source) = writer.any_source(name) else { return };
    let target = format!("{name}_target");
    writer
        .line(format_args!("[entity.{target}]\nkey = {{ id = \"text\" }}\nfields = {{ what = \"text?\" }}"));
    writer.head("on", name);
    writer.line(format_args!("event = \"{}.{}\"\ndo = \"{target}.create\"", source.name, source.event));
    writer.line(format_args!("input = {{ id = \"{{operation}}/{{subject}}\", what = \"{{event}}\" }}"));
    writer.maybe("from", &["\"now\"", "\"start\""]);
    if !source.ints.is_empty() {
        let int = writer.random.pick(&source.ints).cloned().unwrap_or_default();
        if writer.random.chance(0.5) {
            writer.line(format_args!("when = \"{int} > 1\""));
        }
    }
    writer.source(&target, "status", "created", Vec::new());
}

/// Changes of a row that no action makes.
#[cfg(test)]
pub(crate) fn tamperings() -> Vec<Tampering> {
    let made = Tampering::new("on", "thing_created", "house_progress").of_consumer("thing_created");
    vec![made.call("thing.create", &[], json!({"id": 1})).by_workers().set("parked", 1)]
}
