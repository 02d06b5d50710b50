//! What an input gives for declared fields.

use serde_json::{Map, Value as Json};
use statehouse_store::Value;

use crate::action::Refusal;
use crate::blueprint::settings::Field;
use crate::form::Misfit;

/// The contents that an input gives for fields; of a whole row also those that it leaves out.
pub(super) fn contents<'a>(
    fields: &'a [Field],
    input: &Map<String, Json>,
    whole: bool,
) -> Result<Vec<(&'a str, Value)>, Refusal> {
    let mut contents = Vec::new();
    for field in fields {
        let value = match input.get(&field.name) {
            Some(json) => Value::from_json(json.clone(), field.kind).map_err(|why| {
                let pointer = format!("/{}", field.name);
                Refusal::misfits(vec![Misfit { pointer, detail: why.to_string() }])
            })?,
            None if whole => field.default.clone().unwrap_or(Value::Null),
            None => continue,
        };
        contents.push((field.name.as_str(), value));
    }
    Ok(contents)
}
