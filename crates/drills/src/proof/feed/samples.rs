//! Samples of `feed`: generated declarations, and changes that its checker of invariants must notice.

#[cfg(test)]
use serde_json::json;
#[cfg(test)]
use statehouse_store::{Clock as _, SystemClock, Value};

#[cfg(test)]
use crate::harness::tampering::Tampering;
#[cfg(feature = "suite")]
use crate::proof::generated::BlueprintWriter;

/// A feed with posts and follows of its own.
#[cfg(feature = "suite")]
pub(crate) fn generate(writer: &mut BlueprintWriter, name: &str, number: usize) {
    let (post, follow) = (format!("post{number}"), format!("follow{number}"));
    let author = writer.pick(&["int", "text"]);
    writer.line(format_args!("[entity.{post}]\nkey = {{ post_id = \"int\" }}"));
    writer.line(format_args!(
        "fields = {{ author_id = \"{author}\", created_at = \"time\", body = \"text\" }}"
    ));
    writer.line(format_args!("[relation.{follow}]\nfrom = {{ reader = \"{author}\" }}"));
    writer.line(format_args!("to = {{ author = \"{author}\" }}"));
    writer.line(format_args!("[feed.{name}]\nposts = \"{post}\"\nfollows = \"{follow}\""));
    writer.line(format_args!("table = \"{name}_rows\"\ncursor_table = \"{name}_cursors\""));
    writer.maybe("preview", &["\"body\""]);
    writer.maybe("pull_above", &["0", "2", "1000"]);
}

/// Changes of a row that no action makes.
#[cfg(test)]
pub(crate) fn tamperings() -> Vec<Tampering> {
    let now = SystemClock.now();
    let post = json!({"id": 1, "by": 2, "at": Value::Time(now).to_json()});
    let made = Tampering::new("feed", "home", "user_feed")
        .call("thing.create", &[], post)
        .call("edge.add", &[3, 2], json!({}))
        .by_workers();
    vec![made.set("author_id", 4)]
}
