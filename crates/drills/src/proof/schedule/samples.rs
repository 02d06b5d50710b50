//! Samples of `schedule`: generated declarations, and changes that its checker of invariants must notice.

#[cfg(test)]
use serde_json::json;

#[cfg(test)]
use crate::harness::tampering::Tampering;
#[cfg(feature = "suite")]
use crate::proof::generated::BlueprintWriter;

/// A declaration with settings by chance.
#[cfg(feature = "suite")]
pub(crate) fn generate(writer: &mut BlueprintWriter, name: &str, _: usize) {
    writer.head("schedule", name);
    writer.maybe("lease", &["\"5s\"", "\"1m\""]);
    writer.maybe("max_attempts", &["1", "20"]);
    writer.maybe("per_key", &["1", "3"]);
    writer.maybe("priorities", &["1", "4"]);
    writer.maybe("shards", &["1", "6"]);
    writer.maybe("keep", &["\"0s\"", "\"1d\""]);
    writer.source(name, "state", "enqueued", Vec::new());
}

/// Changes of a row that no action makes.
#[cfg(test)]
pub(crate) fn tamperings() -> Vec<Tampering> {
    let made = || Tampering::new("schedule", "job", "jobs").call("job.enqueue", &[], json!({"job_id": "a"}));
    let keyed = json!({"job_id": "a", "order_key": "k", "unique_key": "u"});
    let keyed = |table| Tampering::new("schedule", "job", table).call("job.enqueue", &[], keyed.clone());
    let lane = keyed("job_lanes").set("running", 2);
    let unique = keyed("job_uniques").set("job_id", "b");
    vec![made().set("state", "COMPLETED"), lane, unique]
}
