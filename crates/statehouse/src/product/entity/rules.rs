//! Pure decisions: what an input means for the fields of a row.

use serde_json::Value as Json;
use statehouse_store::guard::{column, is_null, is_set};
use statehouse_store::{Guard, Row, Type, Value};

use crate::action::{Call, Code, Refusal};
use crate::blueprint::settings::Field;
use crate::declare::FieldLimits;
use crate::inputs::Inputs;
use crate::product::fields::contents;

/// What a mutation asks for.
pub(super) struct MutationInput {
    pub set: Inputs,
    pub increment: Inputs,
    pub append: Inputs,
    /// How it can be done.
    pub way: MutationMode,
}

/// How a mutation can be done.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum MutationMode {
    /// In the row of the hot fields.
    Hot,
    /// By adding to numbers where they stand: no version is needed, so no race can be lost.
    Count,
    /// By reading the row and writing what follows from it.
    Compute,
}

impl MutationInput {
    /// Reads the input of a mutation. It was checked against the form already.
    pub(super) fn of(call: &Call, fields: &[Field], hot: &[Field]) -> Result<MutationInput, Refusal> {
        let part = |name: &str| call.input.object(name).cloned().unwrap_or_default();
        let (set, increment, append) = (part("set"), part("increment"), part("append"));
        let invalid = |message: String| Err(Refusal::new(Code::InvalidInput, message));
        let names: Vec<&str> = set.names().chain(increment.names()).chain(append.names()).collect();
        if names.is_empty() {
            return invalid("say what to set, increment or append".into());
        }
        if let Some((_, twice)) =
            names.iter().enumerate().find(|(n, name)| names.iter().take(*n).any(|other| other == *name))
        {
            return invalid(format!("{twice} is changed in two ways at once"));
        }
        let hot = names.iter().filter(|name| hot.iter().any(|field| field.name == **name)).count();
        if hot > 0 && hot < names.len() {
            let message = "hot fields stand in a row of their own; change them in a mutation of their own";
            return invalid(message.into());
        }
        let way = if hot > 0 {
            MutationMode::Hot
        } else if set.is_empty()
            && append.is_empty()
            && call.expected.is_none()
            && !fields.iter().any(|field| increment.has(&field.name) && needs_row(field))
        {
            MutationMode::Count
        } else {
            MutationMode::Compute
        };
        Ok(MutationInput { set, increment, append, way })
    }
}

fn needs_row(field: &Field) -> bool {
    field.limits.as_ref().is_some_and(FieldLimits::needs_row)
}

/// The most fields that are compared in a guard; beyond them a row is read first.
const COMPARED_MAX: usize = 16;

/// The guard that a row is not what it would be changed to (I4). None where a guard cannot say so: documents cannot be
/// compared.
pub(super) fn differs(changes: &[(&str, Value)]) -> Option<Guard> {
    if changes.is_empty() || changes.len() > COMPARED_MAX {
        return None;
    }
    let differs = changes.iter().map(|(name, value)| match value {
        Value::Json(_) => None,
        Value::Null => Some(is_set(name)),
        value => Some(column(name).ne(value.clone()).or(is_null(name))),
    });
    Some(differs.collect::<Option<Vec<Guard>>>()?.into_iter().fold(Guard::never(), Guard::or))
}

pub(super) fn is_zero(value: &Value) -> bool {
    matches!(value, Value::Int(0)) || value.as_float() == Some(0.0)
}

/// Nothing, as a number of the same type.
pub(super) fn zero_like(amount: &Value) -> Value {
    if matches!(amount, Value::Float(_)) { Value::Float(0.0) } else { Value::Int(0) }
}

/// Sums and longer lists, computed from a row that was read.
pub(super) fn computed<'a>(
    fields: &'a [Field],
    row: Option<&Row>,
    increment: &Inputs,
    append: &Inputs,
) -> Result<Vec<(&'a str, Value)>, Refusal> {
    let mut results = Vec::new();
    for (name, amount) in contents(fields, increment, false) {
        let out_of_range = || Refusal::new(Code::OutOfRange, format!("the new {name} is out of range"));
        let before = row.and_then(|row| row.get(name));
        let sum = match (before, amount) {
            (Some(Value::Int(a)), Value::Int(b)) => Value::Int(a.checked_add(b).ok_or_else(out_of_range)?),
            (Some(Value::Float(a)), Value::Float(b)) => {
                Value::Float(a + b).admitted(Type::Float).map_err(|_| out_of_range())?
            }
            (_, amount) => amount,
        };
        let limits = fields.iter().find(|field| field.name == name).and_then(|field| field.limits.as_ref());
        if let Some((limits, Err(_))) = limits.map(|limits| (limits, limits.check(&sum))) {
            return Err(Refusal::new(Code::OutOfRange, limits.sum_refused(name, before)));
        }
        results.push((name, sum));
    }
    for field in fields {
        if !append.has(&field.name) {
            continue;
        }
        let mut items = match row.and_then(|row| row.json(&field.name)) {
            None => Vec::new(),
            Some(Json::Array(items)) => items.clone(),
            Some(_) => {
                let message = format!("{} is not a list, so nothing can be appended to it", field.name);
                return Err(Refusal::new(Code::InvalidInput, message));
            }
        };
        items.push(append.json(&field.name));
        let list = Value::Json(Json::Array(items)).admitted(Type::Json);
        results.push((
            field.name.as_str(),
            list.map_err(|why| Refusal::new(Code::InvalidInput, format!("{}: {why}", field.name)))?,
        ));
    }
    Ok(results)
}
