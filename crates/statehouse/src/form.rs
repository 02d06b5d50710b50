//! Forms: what an action takes and gives, said once. Checking, the OpenAPI document and the command line's flags come
//! from the same form.

use std::borrow::Cow;
use std::fmt;

use serde_json::{Map, Value as Json, json};
use statehouse_store::{Type, Value};

/// The form of a JSON value.
#[derive(Clone, Debug, PartialEq)]
pub enum Form {
    /// A column's value, in the JSON form of its type.
    Value(Type),
    /// One of these words.
    OneOf(Vec<Cow<'static, str>>),
    /// An integer in a range.
    Range(i64, i64),
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

/// What does not fit a form.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Misfit {
    /// Where, as a JSON pointer.
    pub pointer: String,
    /// What is wrong there.
    pub detail: String,
}

impl Form {
    /// One of these words.
    pub fn one_of(words: &[&'static str]) -> Form {
        Form::OneOf(words.iter().map(|word| Cow::Borrowed(*word)).collect())
    }

    /// Everything in a value that does not fit.
    pub fn misfits(&self, value: &Json) -> Vec<Misfit> {
        let mut misfits = Vec::new();
        self.check(value, &Spot::Root, &mut misfits);
        misfits
    }

    fn check(&self, value: &Json, spot: &Spot<'_>, misfits: &mut Vec<Misfit>) {
        let mut misfit = |detail: String| misfits.push(Misfit { pointer: spot.to_string(), detail });
        match self {
            Form::Any => {}
            Form::Value(kind) => {
                if value.is_null() {
                    misfit(format!("expected {kind}, got null"));
                } else if let Err(why) = Value::from_json(value.clone(), *kind) {
                    misfit(why.to_string());
                }
            }
            Form::OneOf(words) => {
                if !value.as_str().is_some_and(|given| words.iter().any(|word| word == given)) {
                    misfit(format!("expected one of {}", words.join(", ")));
                }
            }
            Form::Range(least, most) => {
                if !value.as_i64().is_some_and(|given| (*least..=*most).contains(&given)) {
                    misfit(format!("expected an integer from {least} to {most}"));
                }
            }
            Form::List(item) => match value.as_array() {
                None => misfit("expected a list".into()),
                Some(items) => {
                    for (place, one) in items.iter().enumerate() {
                        item.check(one, &Spot::Item(spot, place), misfits);
                    }
                }
            },
            Form::Object(properties) => match value.as_object() {
                None => misfit("expected an object".into()),
                Some(fields) => check_object(properties, fields, spot, misfits),
            },
        }
    }

    /// The form in JSON Schema.
    pub fn schema(&self) -> Json {
        match self {
            Form::Any => json!({}),
            Form::Value(kind) => type_schema(*kind),
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

/// Everything in an object that does not fit its properties.
pub fn object_misfits(properties: &[Property], fields: &Map<String, Json>) -> Vec<Misfit> {
    let mut misfits = Vec::new();
    check_object(properties, fields, &Spot::Root, &mut misfits);
    misfits
}

/// A place within a value. It is written as a JSON pointer, which only what does not fit needs.
enum Spot<'a> {
    Root,
    Field(&'a Spot<'a>, &'a str),
    Item(&'a Spot<'a>, usize),
}

impl fmt::Display for Spot<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Spot::Root => Ok(()),
            Spot::Field(within, name) => write!(f, "{within}/{}", escape(name)),
            Spot::Item(within, place) => write!(f, "{within}/{place}"),
        }
    }
}

fn check_object(
    properties: &[Property],
    fields: &Map<String, Json>,
    spot: &Spot<'_>,
    misfits: &mut Vec<Misfit>,
) {
    for property in properties {
        let at = Spot::Field(spot, &property.name);
        match fields.get(&property.name) {
            None if property.required => {
                misfits.push(Misfit { pointer: at.to_string(), detail: "it is required".into() });
            }
            None => {}
            Some(Json::Null) if property.nullable => {}
            Some(value) => property.form.check(value, &at, misfits),
        }
    }
    for name in fields.keys() {
        if !properties.iter().any(|property| property.name == *name) {
            let known: Vec<&str> = properties.iter().map(|property| property.name.as_str()).collect();
            let advice = match crate::blueprint::nearest(name, known.iter().copied()) {
                Some(near) => format!("; did you mean {near}?"),
                None => format!("; it can have {}", known.join(", ")),
            };
            misfits.push(Misfit {
                pointer: Spot::Field(spot, name).to_string(),
                detail: format!("there is no such property{advice}"),
            });
        }
    }
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
        let misfits = form.misfits(&value);
        let pairs: Vec<(&str, &str)> =
            misfits.iter().map(|misfit| (misfit.pointer.as_str(), misfit.detail.as_str())).collect();
        assert_eq!(pairs, expect);
    }

    #[test]
    fn every_misfit_is_named_with_its_place() {
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
