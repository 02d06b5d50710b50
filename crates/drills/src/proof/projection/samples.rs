//! Samples of `projection`: generated declarations, and changes that its checker of invariants must notice.

#[cfg(test)]
use serde_json::json;

#[cfg(test)]
use crate::harness::tampering::Tampering;

/// Changes of a row that no action makes.
#[cfg(test)]
pub(crate) fn tamperings() -> Vec<Tampering> {
    let made = |table| {
        let create = json!({"id": 1, "n": 2});
        Tampering::new("view", "totals", table).call("thing.create", &[], create).by_workers()
    };
    vec![made("totals_entries").set("gone", true)]
}
