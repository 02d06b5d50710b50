//! Inputs as a caller may give them, made from an action's form: for drills, for `explain`, and for hints.

use serde_json::{Map, Value as Json, json};
use statehouse::action::{Action, RouteKind};
use statehouse::declare::FieldLimits;
use statehouse::form::{Form, Property};
use statehouse::{Expected, Request, Resource};
use statehouse_store::{Time, Type, Value};

#[cfg(feature = "suite")]
pub(crate) mod values;

/// The variant of inputs that name a row.
const KEY: i64 = 1;

/// A key of a resource.
pub fn key(resource: &Resource, variant: i64) -> Vec<Value> {
    let part = |(name, kind): &(String, Type)| value(name, *kind, variant);
    resource.key.iter().map(part).collect()
}

/// A request of an action. What names a row is the same in every variant, also a row of another resource.
pub fn request(resources: &[Resource], resource: &Resource, action: &Action, variant: i64) -> Request {
    // What is declared together has names that begin the same: `seat` and `seat_booking`.
    let related =
        |other: &&Resource| other.name.starts_with(&resource.name) || resource.name.starts_with(&other.name);
    let keys = resources.iter().filter(related).flat_map(|other| &other.key).map(|(key, _)| key.as_str());
    let keys: Vec<&str> = keys.collect();
    let names_row = |name: &str| keys.contains(&name);
    let sampled = |property: &Property| {
        let variant = if names_row(&property.name) || lists_rows(property, &keys) { KEY } else { variant };
        Some((property.name.clone(), of_property(property, variant)?))
    };
    // A list by a part of the key does not require it, because it can also read by other things.
    let is_key = |property: &Property| {
        resource.def.is_some() && resource.key.iter().any(|(name, _)| *name == property.name)
    };
    let is_given = |property: &&Property| property.required || action.is_write() || is_key(property);
    let given = action.input.iter().filter(is_given);
    let mut input: Map<String, Json> = given.filter_map(sampled).collect();
    // Of the ways to change something one is enough, and they exclude each other.
    if action.input.iter().any(|property| matches!(property.form, Form::Object(_))) {
        let first =
            input.iter().find(|(_, value)| value.as_object().is_some_and(|fields| !fields.is_empty()));
        input = first.map(|(name, value)| (name.clone(), value.clone())).into_iter().collect();
    }
    let key = if action.route.kind == RouteKind::Collection { Vec::new() } else { key(resource, KEY) };
    let expected = action.needs_version.then_some(Expected::Version(1));
    Request { action: format!("{}.{}", resource.name, action.name), key, input, expected }
}

/// Whether it is a list of rows with a quantity each, like the lines of an order.
fn lists_rows(property: &Property, keys: &[&str]) -> bool {
    let Form::List(item) = &property.form else { return false };
    let Form::Object(properties) = &**item else { return false };
    let names: Vec<&str> = properties.iter().map(|property| property.name.as_str()).collect();
    names.contains(&"quantity") && names.iter().any(|name| keys.contains(name))
}

/// A value for one property; `None` where nothing can be said.
pub fn of_property(property: &Property, variant: i64) -> Option<Json> {
    if let Some(example) = &property.example {
        return Some(example.clone());
    }
    match &property.form {
        Form::Value(kind) => Some(value(&property.name, *kind, variant).to_json()),
        Form::Limited(limits) => limited(&property.name, limits, variant),
        Form::OneOf(words) => words.first().map(|word| word.to_string().into()),
        Form::Range(least, _) => Some((*least).into()),
        Form::Any => Some(format!("item {variant}").into()),
        Form::List(of) => {
            let one = Property { form: Form::clone(of), ..property.clone() };
            Some(Json::Array(of_property(&one, variant).into_iter().collect()))
        }
        Form::Object(properties) => {
            // What must be given; or else one field, which tells as much as all of them.
            let sampled = |p: &Property| Some((p.name.clone(), of_property(p, variant)?));
            let mut fields: Map<String, Json> =
                properties.iter().filter(|p| p.required).filter_map(sampled).collect();
            if fields.is_empty() {
                fields.extend(properties.iter().find_map(sampled));
            }
            Some(Json::Object(fields))
        }
    }
}

/// A value that keeps constraints; `None` if none of a few does, as with most patterns.
fn limited(name: &str, limits: &FieldLimits, variant: i64) -> Option<Json> {
    let chosen =
        usize::try_from(variant).ok().and_then(|at| limits.one_of.get(at % limits.one_of.len().max(1)));
    let sampled = value(name, limits.kind, variant);
    let cut = limits.max_length.and_then(|most| {
        let text: String = sampled.as_text()?.chars().rev().take(most).collect();
        Some(Value::from(text.chars().rev().collect::<String>()))
    });
    let number = limits.min.iter().chain(&limits.max).filter_map(Value::as_int).next();
    let near = number.and_then(|number| number.checked_add(variant % 2)).map(Value::Int);
    let words =
        [format!("a{variant}"), format!("{variant}"), format!("a{variant}@b.example")].map(Value::from);
    let words = words.into_iter().filter(|_| limits.kind == Type::Text);
    let edges = limits.min.clone().into_iter().chain(limits.max.clone());
    let candidates =
        chosen.cloned().into_iter().chain([sampled]).chain(cut).chain(near).chain(edges).chain(words);
    candidates.into_iter().find(|value| limits.check(value).is_ok()).map(|value| value.to_json())
}

/// A value of a type, for a column of that name.
pub fn value(name: &str, kind: Type, variant: i64) -> Value {
    match kind {
        Type::Text => format!("{} {variant}", name.replace('_', " ")).into(),
        Type::Int => variant.into(),
        Type::Float => Value::Float(variant as f64 + 0.5),
        Type::Bool => (variant % 2 == 0).into(),
        Type::Bytes => {
            let bytes = variant.to_be_bytes();
            let first = bytes.iter().position(|byte| *byte != 0).unwrap_or(bytes.len() - 1);
            bytes.into_iter().skip(first).collect::<Vec<u8>>().into()
        }
        Type::Time => Time::from_millis(1_700_000_000_000 + variant).into(),
        Type::Json => json!([variant]).into(),
    }
}
