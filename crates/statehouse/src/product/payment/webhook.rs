//! Notices to the merchant: effects in the plan of the change that they tell of. The body is the row after the change.

use serde_json::{Value as Json, json};
use statehouse_store::table::VERSION;
use statehouse_store::{Row, Time, Value};

use super::{PaymentSpec, WEBHOOK_URLS, first_text};
use crate::action::Refusal;
use crate::declare::machine::MachinePart;
use crate::declare::table::UPDATED_AT;
use crate::infra::effect::EffectRequest;

/// The effects that tell of a change of a payment. The plan is fenced by the version of the row, so the row after it is known: it is
/// the row with these columns, at the next version.
pub(super) fn notices(
    spec: &PaymentSpec,
    row: &Row,
    event: &str,
    changes: &[(&str, Value)],
    now_here: Time,
) -> Result<Vec<MachinePart>, Refusal> {
    let Some(webhook) = &spec.webhook else { return Ok(Vec::new()) };
    let version = row.version() + 1;
    let mut after = spec.def.row_json(row);
    if let Some(fields) = after.as_object_mut() {
        for (name, value) in changes {
            fields.insert((*name).to_owned(), value.to_json());
        }
        fields.insert(VERSION.to_owned(), version.into());
        // Only the engine knows when the change is applied, and where to tell is for the sender alone.
        fields.remove(UPDATED_AT);
        fields.remove(WEBHOOK_URLS);
    }
    let id = first_text(row.key())?;
    let body =
        json!({"id": format!("{id}.{version}"), "type": format!("{}.{event}", spec.name), "data": after});
    let urls = row.json(WEBHOOK_URLS).and_then(Json::as_array);
    let urls = urls.into_iter().flatten().filter_map(Json::as_str).map(|url| Some(url.to_owned()));
    let urls: Vec<Option<String>> = if webhook.takes_url() { urls.collect() } else { vec![None] };
    let mut notices = Vec::new();
    for (number, url) in urls.into_iter().enumerate() {
        let key = format!("{}:{id}:{version}:{number}", spec.name);
        let request = EffectRequest { key, url, body: body.clone(), ..EffectRequest::default() };
        let parts = webhook.send(row.tenant(), &request, now_here)?;
        notices.push(MachinePart::Prepared { resource: webhook.name().to_owned(), parts });
    }
    Ok(notices)
}
