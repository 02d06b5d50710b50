//! Forms: what an action takes and gives, said once. Checking, the OpenAPI document and the command line's flags come
//! from the same form.

use std::borrow::Cow;
use std::fmt;

use serde_json::{Map, Value as Json, json};
use statehouse_store::{Type, Value};

use crate::declare::FieldLimits;
use crate::inputs::{Input, Inputs};

/// The form of a JSON value.
#[derive(Clone, Debug, PartialEq)]
pub enum Form {
    /// A column's value, in the JSON form of its type.
    Value(Type),
    /// One of these words.
    OneOf(Vec<Cow<'static, str>>),
    /// An integer in a range.
    Range(i64, i64),
    /// A column's value that keeps the constraints of its field.
    Limited(Box<FieldLimits>),
    /// An object with these properties and no others.
    Object(Vec<Property>),
    /// A list.
    List(Box<Form>),
    /// Anything.
    Any,
}

/// A property of an object.
#[derive(Clone, Debug, PartialEq)]
pub struct Property {
    /// Its name.
    pub name: String,
    /// Its form.
    pub form: Form,
    /// Whether it must be given.
    pub required: bool,
    /// Whether it may be null.
    pub nullable: bool,
    /// What it is, in a few words.
    pub about: String,
    /// What it may look like, where that cannot be guessed from its form.
    pub example: Option<Json>,
}

impl Property {
    /// A property that must be given.
    pub fn required(name: &str, form: Form, about: &str) -> Property {
        Property {
            name: name.to_owned(),
            form,
            required: true,
            nullable: false,
            about: about.to_owned(),
            example: None,
        }
    }

    /// A property that may be left out.
    pub fn optional(name: &str, form: Form, about: &str) -> Property {
        Property { required: false, ..Property::required(name, form, about) }
    }

    /// The same, with an example.
    #[must_use]
    pub fn example(mut self, example: Json) -> Property {
        self.example = Some(example);
        self
    }

    /// The same, and it may be null.
    #[must_use]
    pub fn or_null(mut self) -> Property {
        self.nullable = true;
        self
    }
}

/// A value that does not fit its form.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FieldError {
    /// The location, as a JSON pointer.
    pub pointer: String,
    /// What is wrong there.
    pub detail: String,
}

impl Form {
    /// One of these words.
    pub fn one_of(words: &[&'static str]) -> Form {
        Form::OneOf(words.iter().map(|word| Cow::Borrowed(*word)).collect())
    }

    /// The type of a single value; `None` for a list, an object and anything.
    pub fn kind(&self) -> Option<Type> {
        match self {
            Form::Value(kind) => Some(*kind),
            Form::Limited(limits) => Some(limits.kind),
            Form::OneOf(_) => Some(Type::Text),
            Form::Range(..) => Some(Type::Int),
            Form::Object(_) | Form::List(_) | Form::Any => None,
        }
    }

    /// Everything in a value that does not fit, up to [`FIELD_ERRORS_MAX`].
    pub fn field_errors(&self, value: &Json) -> Vec<FieldError> {
        let mut errors = Vec::new();
        self.parse(value.clone(), &Location::Root, &mut errors);
        errors
    }

    /// The value in the type of the form. What does not fit is reported, and is null in the result.
    fn parse(&self, value: Json, at: &Location<'_>, errors: &mut Vec<FieldError>) -> Input {
        let parsed = match (self, value) {
            (Form::Any, Json::Null) => Ok(Value::Null),
            (Form::Any, value) => Ok(Value::Json(value)),
            (Form::Value(kind), Json::Null) => Err(format!("expected {kind}, got null")),
            (Form::Value(kind), value) => Value::from_json(value, *kind).map_err(|why| why.to_string()),
            (Form::Limited(limits), Json::Null) => Err(format!("expected {}, got null", limits.kind)),
            (Form::Limited(limits), value) => Value::from_json(value, limits.kind)
                .map_err(|why| why.to_string())
                .and_then(|value| limits.check(&value).map(|()| value)),
            (Form::OneOf(words), Json::String(given)) if words.iter().any(|word| *word == given) => {
                Ok(Value::Text(given))
            }
            (Form::OneOf(words), _) => Err(format!("expected one of {}", words.join(", "))),
            (Form::Range(min, max), value) => match value.as_i64() {
                Some(given) if (*min..=*max).contains(&given) => Ok(Value::Int(given)),
                _ => Err(format!("expected an integer from {min} to {max}")),
            },
            (Form::List(item), Json::Array(items)) => {
                let items = items.into_iter().enumerate();
                let parse = |(index, one)| item.parse(one, &Location::Item(at, index), errors);
                return Input::List(items.map(parse).collect());
            }
            (Form::List(_), _) => Err("expected a list".into()),
            (Form::Object(properties), Json::Object(fields)) => {
                return Input::Object(parse_object(properties, fields, at, errors));
            }
            (Form::Object(_), _) => Err("expected an object".into()),
        };
        Input::Value(parsed.unwrap_or_else(|detail| {
            report(errors, at, detail);
            Value::Null
        }))
    }

    /// The form in JSON Schema.
    pub fn schema(&self) -> Json {
        match self {
            Form::Any => json!({}),
            Form::Value(kind) => type_schema(*kind),
            Form::Limited(limits) => {
                let mut schema = type_schema(limits.kind);
                if let Some(schema) = schema.as_object_mut() {
                    limits.add_to_schema(schema);
                }
                schema
            }
            Form::OneOf(words) => json!({"type": "string", "enum": words}),
            Form::Range(least, most) => json!({"type": "integer", "minimum": least, "maximum": most}),
            Form::List(item) => json!({"type": "array", "items": item.schema()}),
            Form::Object(properties) => {
                let described: Map<String, Json> =
                    properties.iter().map(|property| (property.name.clone(), property.schema())).collect();
                let required: Vec<&str> = properties
                    .iter()
                    .filter(|property| property.required)
                    .map(|property| property.name.as_str())
                    .collect();
                let mut schema =
                    json!({"type": "object", "properties": described, "additionalProperties": false});
                if let (Some(schema), false) = (schema.as_object_mut(), required.is_empty()) {
                    schema.insert("required".into(), json!(required));
                }
                schema
            }
        }
    }
}

impl Property {
    /// The property in JSON Schema.
    pub fn schema(&self) -> Json {
        let mut schema = self.form.schema();
        if let Some(fields) = schema.as_object_mut() {
            if self.nullable
                && let Some(kind) = fields.get("type").cloned()
            {
                fields.insert("type".into(), json!([kind, "null"]));
                if let Some(Json::Array(choices)) = fields.get_mut("anyOf") {
                    choices.push(json!({"type": "null"}));
                }
            }
            if !self.about.is_empty() {
                fields.insert("description".into(), self.about.as_str().into());
            }
            if let Some(example) = &self.example {
                fields.insert("examples".into(), json!([example]));
            }
        }
        schema
    }
}

/// At most this many errors are reported for one request.
pub const FIELD_ERRORS_MAX: usize = 20;

fn report(errors: &mut Vec<FieldError>, at: &Location<'_>, detail: impl Into<String>) {
    if errors.len() < FIELD_ERRORS_MAX {
        errors.push(FieldError { pointer: at.to_string(), detail: detail.into() });
    }
}

/// A location within a value. It is written as a JSON pointer only when an error is reported.
enum Location<'a> {
    Root,
    Field(&'a Location<'a>, &'a str),
    Item(&'a Location<'a>, usize),
}

impl fmt::Display for Location<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Location::Root => Ok(()),
            Location::Field(within, name) => write!(f, "{within}/{}", escape(name)),
            Location::Item(within, index) => write!(f, "{within}/{index}"),
        }
    }
}

/// The inputs that the fields of a request give for declared properties.
pub(crate) fn parse_root(
    properties: &[Property],
    fields: Map<String, Json>,
    errors: &mut Vec<FieldError>,
) -> Inputs {
    parse_object(properties, fields, &Location::Root, errors)
}

fn parse_object(
    properties: &[Property],
    mut fields: Map<String, Json>,
    at: &Location<'_>,
    errors: &mut Vec<FieldError>,
) -> Inputs {
    let mut inputs = Inputs::default();
    for property in properties {
        let location = Location::Field(at, &property.name);
        match fields.remove(&property.name) {
            None if property.required => report(errors, &location, "it is required"),
            None => {}
            Some(Json::Null) if property.nullable => inputs.set(&property.name, Value::Null),
            Some(value) => inputs.insert(&property.name, property.form.parse(value, &location, errors)),
        }
    }
    for name in fields.keys() {
        if errors.len() >= FIELD_ERRORS_MAX {
            break;
        }
        let known: Vec<&str> = properties.iter().map(|property| property.name.as_str()).collect();
        let advice = match crate::blueprint::nearest(name, known.iter().copied()) {
            Some(near) => format!("; did you mean {near}?"),
            None => format!("; it can have {}", known.join(", ")),
        };
        report(errors, &Location::Field(at, name), format!("there is no such property{advice}"));
    }
    inputs
}

/// A name in a JSON pointer.
fn escape(name: &str) -> String {
    name.replace('~', "~0").replace('/', "~1")
}

fn type_schema(kind: Type) -> Json {
    match kind {
        Type::Text => json!({"type": "string", "pattern": "^[^\\u0000]*$"}),
        Type::Int => json!({"type": "integer", "format": "int64", "minimum": i64::MIN, "maximum": i64::MAX}),
        Type::Float => json!({
            "type": "number",
            "format": "double",
            "exclusiveMinimum": -Value::FLOAT_MAX,
            "exclusiveMaximum": Value::FLOAT_MAX,
            "anyOf": [{"const": 0}, {"minimum": Value::FLOAT_MIN}, {"maximum": -Value::FLOAT_MIN}],
        }),
        Type::Bool => json!({"type": "boolean"}),
        Type::Bytes => json!({
            "type": "string",
            "contentEncoding": "base64",
            "pattern": "^([A-Za-z0-9+/]{4})*([A-Za-z0-9+/][AQgw]==|[A-Za-z0-9+/]{2}[AEIMQUYcgkosw048]=)?$",
        }),
        Type::Time => json!({"type": "string", "format": "date-time"}),
        Type::Json => json!({}),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[expect(clippy::needless_pass_by_value, reason = "cases read better with literals")]
    fn check(value: Json, expect: &[(&str, &str)]) {
        let form = Form::Object(vec![
            Property::required("name", Form::Value(Type::Text), ""),
            Property::optional("bio", Form::Value(Type::Text), "").or_null(),
            Property::optional("limit", Form::Range(1, 10), ""),
            Property::optional("tags", Form::List(Box::new(Form::Value(Type::Text))), ""),
        ]);
        let errors = form.field_errors(&value);
        let pairs: Vec<(&str, &str)> =
            errors.iter().map(|error| (error.pointer.as_str(), error.detail.as_str())).collect();
        assert_eq!(pairs, expect);
    }

    #[test]
    fn every_error_is_reported_with_its_location() {
        check(json!({"name": "Ann", "bio": null}), &[]);
        check(json!({}), &[("/name", "it is required")]);
        check(json!({"name": null}), &[("/name", "expected text, got null")]);
        check(
            json!({"name": 1, "limit": 11}),
            &[("/name", "expected text, got number"), ("/limit", "expected an integer from 1 to 10")],
        );
        check(json!({"name": "x", "tags": ["a", 1]}), &[("/tags/1", "expected text, got number")]);
        check(json!({"name": "x", "bo": ""}), &[("/bo", "there is no such property; did you mean bio?")]);
        check(json!([]), &[("", "expected an object")]);
    }
}
