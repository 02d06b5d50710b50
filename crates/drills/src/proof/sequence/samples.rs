//! Samples of `sequence`: generated declarations, and changes that its checker of invariants must notice.

#[cfg(test)]
use serde_json::json;
#[cfg(test)]
use statehouse_store::{Clock as _, SystemClock};

#[cfg(test)]
use crate::harness::tampering::Tampering;
#[cfg(feature = "suite")]
use crate::proof::generated::BlueprintWriter;

/// A declaration with settings by chance.
#[cfg(feature = "suite")]
pub(crate) fn generate(writer: &mut BlueprintWriter, name: &str, _: usize) {
    writer.head("sequence", name);
    let kind = writer.pick(&["counter", "gapless", "time"]);
    writer.line(format_args!("kind = \"{kind}\""));
    if kind == "time" {
        writer.maybe("worker_bits", &["4", "10"]);
        writer.maybe("shared", &["1", "3"]);
    } else {
        writer.key("key", "id_");
        writer.maybe("start", &["1", "1000"]);
    }
}

/// Changes of a row that no action makes.
#[cfg(test)]
pub(crate) fn tamperings() -> Vec<Tampering> {
    let now = SystemClock.now();
    let counter = Tampering::new("sequence", "number", "numbers").call("number.next", &[1], json!({}));
    let gapless = Tampering::new("sequence", "invoice_number", "invoice_numbers_taken");
    let gapless = gapless.call("invoice_number.take", &[1], json!({"subject": "s"}));
    let time = Tampering::new("sequence", "time_id", "time_ids");
    let time = time.call("time_id.lease", &[], json!({"holder": "ann"}));
    vec![counter.set("last", 5), gapless.set("number", 2), time.set("reserved_until", now)]
}
