//! Samples of `thread`: generated declarations, and changes that its checker of invariants must notice.

#[cfg(test)]
use serde_json::json;

#[cfg(test)]
use crate::harness::tampering::Tampering;
#[cfg(feature = "suite")]
use crate::proof::generated::{BlueprintWriter, FieldUse};

/// A declaration with settings by chance.
#[cfg(feature = "suite")]
pub(crate) fn generate(writer: &mut BlueprintWriter, name: &str, _: usize) {
    writer.head("thread", name);
    writer.key("parent", "parent_");
    let count = 1 + writer.random.below(4);
    let ints = writer.fields("fields", "field_", count, FieldUse::Any);
    writer.maybe("buckets", &["1", "5"]);
    writer.maybe("require_version", &["true", "false"]);
    writer.source(name, "status", "appended", ints);
}

/// Changes of a row that no action makes.
#[cfg(test)]
pub(crate) fn tamperings() -> Vec<Tampering> {
    let append = json!({"about": 1, "note_id": "a", "body": "hello"});
    vec![Tampering::new("thread", "note", "notes").call("note.append", &[], append)]
}
