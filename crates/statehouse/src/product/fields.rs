//! What inputs give for declared fields.

use statehouse_store::Value;

use crate::blueprint::settings::Field;
use crate::inputs::Inputs;

/// The values that inputs give for fields; of a whole row also those that are left out.
pub(super) fn contents<'a>(fields: &'a [Field], inputs: &Inputs, whole: bool) -> Vec<(&'a str, Value)> {
    let value = |field: &'a Field| {
        let left_out = || whole.then(|| field.default.clone().unwrap_or(Value::Null));
        let value = inputs.value(&field.name).cloned().or_else(left_out)?;
        Some((field.name.as_str(), value))
    };
    fields.iter().filter_map(value).collect()
}
