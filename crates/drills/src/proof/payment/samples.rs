//! Samples of `payment`: generated declarations, and changes that its checker of invariants must notice.

#[cfg(test)]
use serde_json::json;

#[cfg(test)]
use crate::harness::tampering::Tampering;
#[cfg(feature = "suite")]
use crate::proof::generated::BlueprintWriter;

/// A declaration with settings by chance.
#[cfg(feature = "suite")]
pub(crate) fn generate(writer: &mut BlueprintWriter, name: &str, _: usize) {
    writer.head("payment", name);
    writer.line(format_args!("key = {{ payment_intent_id = \"text\" }}"));
    writer.line(format_args!("currencies = [\"EUR\", \"USD\"]"));
    writer.maybe("capture", &["\"automatic\"", "\"manual\""]);
    writer.maybe("attempts_max", &["1", "5"]);
    writer.line(format_args!("http = {{ url = \"https://psp.example\" }}"));
    writer.source(name, "status", "created", Vec::new());
}

/// Changes of a row that no action makes.
#[cfg(test)]
pub(crate) fn tamperings() -> Vec<Tampering> {
    let create = json!({"payment_intent_id": "p1", "amount": 100, "currency": "EUR"});
    vec![
        Tampering::new("payment", "pay", "pay_intents")
            .call("pay.create", &[], create.clone())
            .set("captured", 100),
        Tampering::new("payment", "pay", "pay_intents")
            .call("pay.create", &[], create)
            .set("live_transaction", "t1"),
    ]
}
