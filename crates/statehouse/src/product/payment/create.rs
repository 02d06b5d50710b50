//! `create`: the same id with the same content is the first payment.

use std::sync::Arc;

use async_trait::async_trait;
use statehouse_store::{Reason, Row, Value};

use super::actions::WEBHOOKS_MAX;
use super::rules::{card_number_problem, id_problem};
use super::{AMOUNT, CAPTURE_METHOD, CAPTURE_METHODS, CURRENCY, MANUAL, PaymentSpec, WEBHOOK_URLS};
use crate::action::{ActionContext, Answer, Call, Code, Prepare, Prepared, Refusal, RefusedStep, Verdict};
use crate::declare::machine::PartUse;
use crate::inputs::Input;
use crate::product::fields;

/// `create`.
pub(super) struct CreatePayment {
    pub spec: Arc<PaymentSpec>,
    /// The insert.
    pub part: PartUse,
}

#[async_trait]
impl Prepare for CreatePayment {
    async fn prepare(&self, call: &Call, cx: &ActionContext<'_>) -> Result<Prepared, Refusal> {
        let contents = self.contents(call)?;
        let id = call.input.get_text(&self.spec.key)?;
        // The first draft leaves it to the store to find out that the id is taken.
        if cx.attempt > 0
            && let Some(row) = cx.row(self.spec.table(), &call.tenant, [id.into()]).await?
        {
            return match is_same(&contents, &row) {
                true => Ok(Prepared::Unchanged(Answer::row(self.spec.def.row_json(&row)))),
                false => Err(self.id_taken(id, &row)),
            };
        }
        let mut firing = self.part.at([Value::from(id)]);
        for (name, value) in contents {
            firing = firing.bind(name, value);
        }
        Ok(Prepared::Write(firing.prepare(&call.tenant, cx.clock.now())?))
    }

    fn refused(&self, call: &Call, refused: &RefusedStep<'_>) -> Verdict {
        let (Reason::Present, Some(row)) = (refused.reason, refused.row) else { return Verdict::Retry };
        match (self.contents(call), call.input.text(&self.spec.key)) {
            (Ok(contents), Some(id)) if !is_same(&contents, row) => Verdict::Refuse(self.id_taken(id, row)),
            // The same payment: its row is the answer.
            _ => Verdict::Retry,
        }
    }
}

/// Whether a payment was created with this content.
fn is_same(contents: &[(String, Value)], row: &Row) -> bool {
    contents.iter().all(|(name, value)| row.get(name) == Some(value))
}

impl CreatePayment {
    /// The columns that the call decides, checked.
    fn contents(&self, call: &Call) -> Result<Vec<(String, Value)>, Refusal> {
        let (spec, input) = (&self.spec, &call.input);
        if let Some(problem) = id_problem(input.get_text(&spec.key)?) {
            return Err(Refusal::field(&spec.key, problem));
        }
        let default = if spec.is_manual { MANUAL } else { CAPTURE_METHODS[0] };
        let mut contents = vec![
            (AMOUNT.to_owned(), input.value_or_null(AMOUNT)),
            (CURRENCY.to_owned(), input.value_or_null(CURRENCY)),
            (CAPTURE_METHOD.to_owned(), input.text(CAPTURE_METHOD).unwrap_or(default).into()),
        ];
        for (name, value) in fields::contents(&spec.fields, input, true) {
            if let Some(problem) = texts_of(&value).iter().find_map(|text| card_number_problem(text)) {
                return Err(Refusal::field(name, problem));
            }
            contents.push((name.to_owned(), value));
        }
        if let Some(ledger) = &spec.ledger {
            ledger.check_names(&contents, spec.provider_name, input.get_text(&spec.key)?, &spec.key)?;
        }
        if spec.table().type_of(WEBHOOK_URLS).is_some() {
            contents.push((WEBHOOK_URLS.to_owned(), self.urls(call)?));
        }
        Ok(contents)
    }

    /// The addresses of the merchant, each of which the effect may go to.
    fn urls(&self, call: &Call) -> Result<Value, Refusal> {
        let given: Vec<&str> = call.input.list(WEBHOOK_URLS).iter().filter_map(text_of).collect();
        if given.len() > WEBHOOKS_MAX {
            return Err(Refusal::field(WEBHOOK_URLS, format!("at most {WEBHOOKS_MAX} addresses are told")));
        }
        for url in &given {
            let checked = self.spec.webhook.as_ref().map_or(Ok(()), |webhook| webhook.check_address(url));
            checked.map_err(|why| Refusal::field(WEBHOOK_URLS, why))?;
        }
        Ok(if given.is_empty() { Value::Null } else { Value::Json(given.into()) })
    }

    fn id_taken(&self, id: &str, row: &Row) -> Refusal {
        let name = &self.spec.name;
        let message = format!("{name} {id} exists and is another one: choose another id");
        Refusal::new(Code::AlreadyExists, message).at_version(Some(row))
    }
}

fn text_of(input: &Input) -> Option<&str> {
    input.value().and_then(Value::as_text)
}

/// The texts in a value of a field.
fn texts_of(value: &Value) -> Vec<String> {
    fn add(json: &serde_json::Value, texts: &mut Vec<String>) {
        match json {
            serde_json::Value::String(text) => texts.push(text.clone()),
            serde_json::Value::Array(items) => items.iter().for_each(|item| add(item, texts)),
            serde_json::Value::Object(fields) => fields.values().for_each(|field| add(field, texts)),
            _ => {}
        }
    }
    let mut texts = Vec::new();
    match value {
        Value::Int(number) => texts.push(number.to_string()),
        other => add(&other.to_json(), &mut texts),
    }
    texts
}
