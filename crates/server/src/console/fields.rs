//! Forms in pages, made from the forms of actions: a field for each property, and the JSON that was meant.
//!
//! A property named `bio` is the field `f.bio`. A field that is left empty is left out, unless the property is a text that must
//! be given. Text that is no JSON of the expected type is sent as text, so that the house reports it beside the field.

use maud::{Markup, html};
use serde_json::{Map, Value as Json};
use statehouse::Expected;
use statehouse::form::{Form, Property};
use statehouse_store::Type;

use super::values::plain;
use crate::http::strict;
use crate::problem::{MALFORMED, Problem};
use crate::quota::QuotaGuard;

/// Prefix of the names of fields.
const FIELD: &str = "f.";
/// Prefix of the names of check boxes that mean null.
const NULL: &str = "null.";
/// The idempotency key of a form.
pub(super) const OPERATION: &str = "operation";
/// The version that the person has seen.
pub(super) const VERSION: &str = "version";
/// The key of the row, as text.
pub(super) const KEY: &str = "key";
/// The row as the person has seen it.
pub(super) const BASE: &str = "base";

/// A form that was sent.
pub(super) struct SentForm {
    fields: Vec<(String, String)>,
    /// Counts its bytes, until the write is done.
    pub memory: QuotaGuard,
}

impl SentForm {
    pub(super) fn of(fields: Vec<(String, String)>, memory: QuotaGuard) -> SentForm {
        SentForm { fields, memory }
    }

    /// A field, if it was sent and is not empty.
    pub(super) fn text(&self, name: &str) -> Option<&str> {
        let found = self.fields.iter().find(|(known, _)| known == name).map(|(_, value)| value.trim());
        found.filter(|text| !text.is_empty())
    }

    /// A field that must be sent.
    pub(super) fn required(&self, name: &str) -> Result<&str, Problem> {
        self.text(name).ok_or_else(|| Problem::new(MALFORMED, format!("the form has no field {name}")))
    }

    /// Bytes of the form.
    pub(super) fn bytes(&self) -> usize {
        self.fields.iter().map(|(name, value)| name.len() + value.len()).sum()
    }

    /// The version that the person has seen.
    pub(super) fn expected(&self) -> Result<Option<Expected>, Problem> {
        match self.text(VERSION) {
            None => Ok(None),
            Some("*") => Ok(Some(Expected::Any)),
            Some(text) => match text.parse() {
                Ok(version) => Ok(Some(Expected::Version(version))),
                Err(_) => Err(Problem::new(MALFORMED, "the version is a number or *")),
            },
        }
    }

    /// The row as the person has seen it.
    pub(super) fn base(&self) -> Option<Map<String, Json>> {
        match strict::read(self.text(BASE)?).ok()? {
            Json::Object(base) => Some(base),
            _ => None,
        }
    }

    /// What the fields say, as the input of an action.
    pub(super) fn input(&self, properties: &[Property]) -> Map<String, Json> {
        let mut input = Map::new();
        for property in properties {
            let sent = |prefix: &str| {
                let name = format!("{prefix}{}", property.name);
                self.fields.iter().find(|(known, _)| *known == name).map(|(_, value)| value.as_str())
            };
            let value = match (sent(NULL), sent(FIELD)) {
                (Some(_), _) => Some(Json::Null),
                (None, Some(text)) => parse(text, property),
                (None, None) => None,
            };
            input.extend(value.map(|value| (property.name.clone(), value)));
        }
        input
    }
}

/// The value that a person typed for a property; `None` if it is left out.
pub(super) fn parse(text: &str, property: &Property) -> Option<Json> {
    let is_text = is_text(&property.form);
    if text.trim().is_empty() && !(is_text && property.required) {
        return None;
    }
    // Browsers send line breaks as CRLF.
    let text = text.replace("\r\n", "\n");
    if is_text {
        return Some(Json::String(text));
    }
    Some(strict::read(text.trim()).unwrap_or(Json::String(text)))
}

fn is_text(form: &Form) -> bool {
    matches!(form.kind(), Some(Type::Text | Type::Bytes | Type::Time))
}

/// What a field looks like.
fn kind(form: &Form) -> &'static str {
    if is_text(form) { "text" } else { "json" }
}

/// The type and constraint of a form, in words.
pub(super) fn constraint(property: &Property) -> String {
    let what = match &property.form {
        Form::Value(Type::Time) => "time, such as 2026-01-31T12:00:00Z".to_owned(),
        Form::Value(Type::Bytes) => "bytes in Base64".to_owned(),
        Form::Value(kind) => kind.to_string(),
        Form::Limited(limits) => format!("{}, {}", limits.kind, limits.describe()),
        Form::OneOf(words) => format!("one of {}", words.join(", ")),
        Form::Range(min, max) if *max == i64::MAX => format!("integer from {min}"),
        Form::Range(min, max) => format!("integer from {min} to {max}"),
        Form::Object(properties) => {
            let names: Vec<&str> = properties.iter().map(|property| property.name.as_str()).collect();
            format!("JSON object with {}", names.join(", "))
        }
        Form::List(of) => {
            format!("JSON list of {}", constraint(&Property::required("", Form::clone(of), "")))
        }
        Form::Any => "any JSON".to_owned(),
    };
    if property.required { format!("{what}, required") } else { what }
}

/// What a field is filled with and what is wrong with it.
#[derive(Clone, Debug, Default)]
pub(super) struct FieldState {
    pub value: Option<Json>,
    pub errors: Vec<String>,
}

/// One field with its label, its constraint and its errors.
pub(super) fn field(property: &Property, state: &FieldState) -> Markup {
    let name = format!("{FIELD}{}", property.name);
    let (help, wrong) = (format!("help.{}", property.name), format!("error.{}", property.name));
    let described = if state.errors.is_empty() { help.clone() } else { format!("{help} {wrong}") };
    let invalid = (!state.errors.is_empty()).then_some("true");
    let is_null = state.value == Some(Json::Null);
    let text = match &state.value {
        None | Some(Json::Null) => String::new(),
        Some(value) if is_text(&property.form) => plain(value),
        Some(value @ (Json::Object(_) | Json::Array(_))) => format!("{value:#}"),
        Some(value) => value.to_string(),
    };
    html! {
        div class="field" {
            label for=(name) { (property.name) }
            @match &property.form {
                Form::OneOf(words) => select id=(name) name=(name) aria-describedby=(described) data-field=(property.name) data-kind="text" {
                    @if !property.required { option value="" { "(left out)" } }
                    @for word in words { option value=(word) selected[*word == text] { (word) } }
                },
                Form::Value(Type::Bool) => select id=(name) name=(name) aria-describedby=(described) data-field=(property.name) data-kind="json" {
                    @if !property.required { option value="" { "(left out)" } }
                    @for word in ["true", "false"] { option value=(word) selected[word == text] { (word) } }
                },
                Form::Value(Type::Json) | Form::Object(_) | Form::List(_) | Form::Any => textarea id=(name) name=(name)
                    rows="4" class="mono" spellcheck="false" aria-describedby=(described) aria-invalid=[invalid] data-field=(property.name) data-kind="json" { "\n" (text) },
                Form::Value(Type::Text) => textarea id=(name) name=(name) rows="1" aria-describedby=(described) aria-invalid=[invalid]
                    data-field=(property.name) data-kind="text" data-required[property.required] { "\n" (text) },
                form => input id=(name) name=(name) value=(text) autocomplete="off" aria-describedby=(described) aria-invalid=[invalid]
                    data-field=(property.name) data-kind=(kind(form)) data-required[property.required];
            }
            @if property.nullable {
                label class="null-box" {
                    input type="checkbox" name={ (NULL) (property.name) } checked[is_null] data-null=(property.name); " null"
                }
            }
            p id=(help) class="help" {
                (constraint(property)) @if !property.about.is_empty() { ": " (property.about) }
            }
            @if !state.errors.is_empty() {
                p id=(wrong) class="error" { @for error in &state.errors { (error) " " } }
            }
        }
    }
}

/// A hidden field.
pub(super) fn hidden(name: &str, value: &str) -> Markup {
    html! { input type="hidden" name=(name) value=(value); }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn text_becomes_what_the_property_expects() {
        let int = Property::optional("n", Form::Value(Type::Int), "");
        let text = Property::required("t", Form::Value(Type::Text), "");
        assert_eq!(parse("7", &int), Some(json!(7)));
        assert_eq!(parse("seven", &int), Some(json!("seven")));
        assert_eq!(parse(" ", &int), None);
        assert_eq!(parse("", &text), Some(json!("")));
        assert_eq!(parse("7\r\n8", &text), Some(json!("7\n8")));
        assert_eq!(parse("{\"a\": 1}", &Property::optional("o", Form::Any, "")), Some(json!({"a": 1})));
    }
}
