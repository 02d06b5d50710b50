//! The inputs of a call, parsed once: after [`parse_inputs`] every value has the type that its form declares.

use std::collections::BTreeMap;
use std::time::Duration;

use serde_json::{Map, Value as Json};
use statehouse_store::{Bug, Time, Value, bug};

use crate::form::{FieldError, Property};

/// One input.
#[derive(Clone, Debug, PartialEq)]
pub enum Input {
    /// A single value; a document is [`Value::Json`].
    Value(Value),
    /// A list.
    List(Vec<Input>),
    /// An object with declared properties.
    Object(Inputs),
}

impl Input {
    /// The value; `None` for a list or an object.
    pub fn value(&self) -> Option<&Value> {
        match self {
            Input::Value(value) => Some(value),
            Input::List(_) | Input::Object(_) => None,
        }
    }

    /// The inputs within an object.
    pub fn object(&self) -> Option<&Inputs> {
        match self {
            Input::Object(inputs) => Some(inputs),
            Input::Value(_) | Input::List(_) => None,
        }
    }

    /// The input as JSON.
    pub fn to_json(&self) -> Json {
        match self {
            Input::Value(value) => value.to_json(),
            Input::List(items) => Json::Array(items.iter().map(Input::to_json).collect()),
            Input::Object(inputs) => inputs.to_json(),
        }
    }
}

/// The inputs of a call by name. An accessor returns `None` for an input that is missing, null or of another type.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Inputs(BTreeMap<String, Input>);

/// Parses the fields of an object into the declared properties.
pub fn parse_inputs(properties: &[Property], fields: Map<String, Json>) -> Result<Inputs, Vec<FieldError>> {
    let mut errors = Vec::new();
    let inputs = crate::form::parse_root(properties, fields, &mut errors);
    if errors.is_empty() { Ok(inputs) } else { Err(errors) }
}

impl Inputs {
    /// The input of this name.
    pub fn get(&self, name: &str) -> Option<&Input> {
        self.0.get(name)
    }

    /// Whether the caller gave it, if only as null.
    pub fn has(&self, name: &str) -> bool {
        self.0.contains_key(name)
    }

    /// Whether the caller gave nothing.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// The names of all inputs.
    pub fn names(&self) -> impl Iterator<Item = &str> {
        self.0.keys().map(String::as_str)
    }

    /// A single value, null included.
    pub fn value(&self, name: &str) -> Option<&Value> {
        self.get(name)?.value()
    }

    /// A single value as a column stores it: null if it is missing.
    pub fn value_or_null(&self, name: &str) -> Value {
        self.value(name).cloned().unwrap_or(Value::Null)
    }

    /// A text that the action's form requires.
    ///
    /// # Errors
    /// It is missing: a defect, because [`parse_inputs`] has refused such a call.
    pub fn get_text(&self, name: &str) -> Result<&str, Bug> {
        self.text(name)
            .ok_or_else(|| bug!("the input `{name}` is not a text: the action's form does not require it"))
    }

    /// An integer that the action's form requires. An error as of [`Inputs::get_text`].
    pub fn get_int(&self, name: &str) -> Result<i64, Bug> {
        self.int(name).ok_or_else(|| {
            bug!("the input `{name}` is not an integer: the action's form does not require it")
        })
    }

    /// An integer that is not negative, which the action's form requires. An error as of [`Inputs::get_text`].
    pub fn get_count(&self, name: &str) -> Result<u64, Bug> {
        self.count(name)
            .ok_or_else(|| bug!("the input `{name}` is not a count: the action's form does not require it"))
    }

    /// An object that the action's form requires. An error as of [`Inputs::get_text`].
    pub fn get_object(&self, name: &str) -> Result<&Inputs, Bug> {
        self.object(name)
            .ok_or_else(|| bug!("the input `{name}` is not an object: the action's form does not require it"))
    }

    /// A text.
    pub fn text(&self, name: &str) -> Option<&str> {
        self.value(name)?.as_text()
    }

    /// An integer.
    pub fn int(&self, name: &str) -> Option<i64> {
        self.value(name)?.as_int()
    }

    /// An integer that is not negative.
    pub fn count(&self, name: &str) -> Option<u64> {
        self.int(name).and_then(|int| u64::try_from(int).ok())
    }

    /// A time.
    pub fn time(&self, name: &str) -> Option<Time> {
        self.value(name)?.as_time()
    }

    /// A flag.
    pub fn flag(&self, name: &str) -> Option<bool> {
        match self.value(name)? {
            Value::Bool(flag) => Some(*flag),
            _ => None,
        }
    }

    /// A number of milliseconds.
    pub fn duration_ms(&self, name: &str) -> Option<Duration> {
        self.count(name).map(Duration::from_millis)
    }

    /// Any input as JSON; null if it is missing.
    pub fn json(&self, name: &str) -> Json {
        self.get(name).map(Input::to_json).unwrap_or_default()
    }

    /// A list; empty if it is missing.
    pub fn list(&self, name: &str) -> &[Input] {
        match self.get(name) {
            Some(Input::List(items)) => items,
            _ => &[],
        }
    }

    /// An object.
    pub fn object(&self, name: &str) -> Option<&Inputs> {
        self.get(name)?.object()
    }

    /// Adds or replaces an input.
    pub fn insert(&mut self, name: impl Into<String>, input: Input) {
        self.0.insert(name.into(), input);
    }

    /// Adds or replaces a single value.
    pub fn set(&mut self, name: impl Into<String>, value: impl Into<Value>) {
        self.insert(name, Input::Value(value.into()));
    }

    /// Removes an input.
    pub fn remove(&mut self, name: &str) -> Option<Input> {
        self.0.remove(name)
    }

    /// All inputs as a JSON object.
    pub fn to_json(&self) -> Json {
        Json::Object(self.to_map())
    }

    /// All inputs as the fields of a JSON object.
    pub fn to_map(&self) -> Map<String, Json> {
        self.0.iter().map(|(name, input)| (name.clone(), input.to_json())).collect()
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;
    use statehouse_store::Type;

    use super::*;
    use crate::form::Form;

    #[test]
    fn values_have_the_types_of_their_forms() {
        let item = Form::Object(vec![Property::required("at", Form::Value(Type::Time), "")]);
        let properties = [
            Property::required("id", Form::Value(Type::Int), ""),
            Property::optional("note", Form::Value(Type::Text), "").or_null(),
            Property::optional("wait_ms", Form::Range(0, 10), ""),
            Property::optional("state", Form::one_of(&["OPEN"]), ""),
            Property::optional("body", Form::Any, ""),
            Property::optional("slots", Form::List(Box::new(item)), ""),
        ];
        let given = json!({
            "id": 7.0, "note": null, "wait_ms": 3, "state": "OPEN", "body": {"a": 1},
            "slots": [{"at": "2030-01-01T01:00:00+01:00"}],
        });
        let Json::Object(given) = given else { unreachable!("it is an object") };
        let inputs = parse_inputs(&properties, given).unwrap();
        assert_eq!(inputs.int("id"), Some(7));
        assert!(inputs.has("note") && inputs.text("note").is_none());
        assert_eq!(inputs.duration_ms("wait_ms"), Some(Duration::from_millis(3)));
        assert_eq!(inputs.text("state"), Some("OPEN"));
        assert_eq!(inputs.json("body"), json!({"a": 1}));
        let slot = inputs.list("slots").first().and_then(Input::object).unwrap();
        assert_eq!(slot.time("at"), Some("2030-01-01T00:00:00Z".parse().unwrap()));
        // Values are canonical: the time is in UTC, the integer is no float.
        assert_eq!(
            inputs.to_json(),
            json!({
                "id": 7, "note": null, "wait_ms": 3, "state": "OPEN", "body": {"a": 1},
                "slots": [{"at": "2030-01-01T00:00:00.000000Z"}],
            })
        );
    }
}
