//! Values and their types: the seven kinds of datum that every engine holds with the same meaning.
//!
//! The weakest engine's law holds on all of them, and it is enforced here, in [`Value::admitted`]:
//! text has no U+0000 (PostgreSQL), floats are finite and lie where DynamoDB's numbers do, times lie in the
//! years 1 to 9999, and JSON is put into one canonical form so that it reads back the same everywhere.

use std::cmp::Ordering;
use std::fmt;

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD as BASE64;
use serde::{Deserialize, Serialize};

use crate::time::{BadTime, Time};

/// The type of a column.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Type {
    /// Unicode text, ordered bytewise by its UTF-8.
    Text,
    /// A signed 64-bit integer.
    Int,
    /// A finite 64-bit float; zero, or of a magnitude from 1e-130 to below 1e126.
    Float,
    /// True or false; false is the lesser.
    Bool,
    /// Octets, ordered bytewise.
    Bytes,
    /// A point in time, to the microsecond.
    Time,
    /// A JSON document. It can be stored and tested for null, not compared.
    Json,
}

impl Type {
    /// Every type, in the order in which documentation lists them.
    pub const ALL: [Type; 7] =
        [Type::Text, Type::Int, Type::Float, Type::Bool, Type::Bytes, Type::Time, Type::Json];

    /// The name used in blueprints and messages.
    pub fn name(self) -> &'static str {
        match self {
            Type::Text => "text",
            Type::Int => "int",
            Type::Float => "float",
            Type::Bool => "bool",
            Type::Bytes => "bytes",
            Type::Time => "time",
            Type::Json => "json",
        }
    }

    /// Whether values of this type have an order, and so can stand in keys, indexes and comparisons.
    pub fn is_ordered(self) -> bool {
        self != Type::Json
    }
}

impl fmt::Display for Type {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// A datum, or the absence of one.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Value {
    /// No datum. Any column that is not required may hold it.
    Null,
    /// See [`Type::Text`].
    Text(String),
    /// See [`Type::Int`].
    Int(i64),
    /// See [`Type::Float`].
    Float(f64),
    /// See [`Type::Bool`].
    Bool(bool),
    /// See [`Type::Bytes`].
    Bytes(#[serde(with = "base64_text")] Vec<u8>),
    /// See [`Type::Time`].
    Time(Time),
    /// See [`Type::Json`].
    Json(serde_json::Value),
}

/// Why a value cannot be stored in a column of some type.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
pub enum BadValue {
    /// The value is of another type.
    #[error("expected {expected}, got {got}")]
    WrongType {
        /// The column's type.
        expected: Type,
        /// The value's type, or `null`.
        got: &'static str,
    },
    /// The text holds U+0000, which PostgreSQL cannot store.
    #[error("the text holds the character U+0000, which cannot be stored")]
    NulCharacter,
    /// The float is NaN, infinite, or outside DynamoDB's range.
    #[error(
        "{0:e} cannot be stored: a float must be zero or have a magnitude from {min:e} to below {max:e}",
        min = Value::FLOAT_MIN,
        max = Value::FLOAT_MAX
    )]
    FloatRange(f64),
    /// The time is before [`Time::MIN`] or after [`Time::MAX`].
    #[error("{0} cannot be stored: a time must lie between {min} and {max}", min = Time::MIN, max = Time::MAX)]
    TimeRange(Time),
    /// The text is not a time that can be stored.
    #[error(transparent)]
    Time(#[from] BadTime),
    /// The JSON document is nested too deeply.
    #[error("the JSON is nested deeper than {limit} levels", limit = Value::JSON_DEPTH_MAX)]
    JsonDepth,
}

impl Value {
    /// The smallest magnitude of a float that is not zero.
    pub const FLOAT_MIN: f64 = 1e-130;
    /// Magnitudes of floats are below this.
    pub const FLOAT_MAX: f64 = 1e126;
    /// How deeply a JSON document may be nested.
    pub const JSON_DEPTH_MAX: usize = 64;

    /// The value's type; `None` for null.
    pub fn kind(&self) -> Option<Type> {
        match self {
            Value::Null => None,
            Value::Text(_) => Some(Type::Text),
            Value::Int(_) => Some(Type::Int),
            Value::Float(_) => Some(Type::Float),
            Value::Bool(_) => Some(Type::Bool),
            Value::Bytes(_) => Some(Type::Bytes),
            Value::Time(_) => Some(Type::Time),
            Value::Json(_) => Some(Type::Json),
        }
    }

    /// The name of the value's type, or `null`.
    pub fn kind_name(&self) -> &'static str {
        self.kind().map_or("null", Type::name)
    }

    /// Whether this is null.
    pub fn is_null(&self) -> bool {
        matches!(self, Value::Null)
    }

    /// The text, if it is one.
    pub fn as_text(&self) -> Option<&str> {
        if let Value::Text(text) = self { Some(text) } else { None }
    }

    /// The integer, if it is one.
    pub fn as_int(&self) -> Option<i64> {
        if let Value::Int(int) = self { Some(*int) } else { None }
    }

    /// The float, if it is one.
    pub fn as_float(&self) -> Option<f64> {
        if let Value::Float(float) = self { Some(*float) } else { None }
    }

    /// The boolean, if it is one.
    pub fn as_bool(&self) -> Option<bool> {
        if let Value::Bool(bool) = self { Some(*bool) } else { None }
    }

    /// The octets, if it is some.
    pub fn as_bytes(&self) -> Option<&[u8]> {
        if let Value::Bytes(bytes) = self { Some(bytes) } else { None }
    }

    /// The time, if it is one.
    pub fn as_time(&self) -> Option<Time> {
        if let Value::Time(time) = self { Some(*time) } else { None }
    }

    /// The JSON document, if it is one.
    pub fn as_json(&self) -> Option<&serde_json::Value> {
        if let Value::Json(json) = self { Some(json) } else { None }
    }

    /// The value as a column of type `expected` stores it, or why it cannot be stored there.
    ///
    /// An integer is widened where a float is expected when that loses nothing; negative zero becomes zero; JSON
    /// becomes canonical (and JSON's `null` is null). Null is admitted here: whether a column takes null is the table's affair.
    pub fn admitted(self, expected: Type) -> Result<Value, BadValue> {
        match (expected, self) {
            (_, Value::Null) | (Type::Json, Value::Json(serde_json::Value::Null)) => Ok(Value::Null),
            (Type::Text, Value::Text(text)) => {
                if text.contains('\0') {
                    Err(BadValue::NulCharacter)
                } else {
                    Ok(Value::Text(text))
                }
            }
            (Type::Int, Value::Int(int)) => Ok(Value::Int(int)),
            (Type::Float, Value::Int(int)) if int.unsigned_abs() <= 1 << 53 => Ok(Value::Float(int as f64)),
            (Type::Float, Value::Float(float)) => admit_float(float).map(Value::Float),
            (Type::Bool, Value::Bool(bool)) => Ok(Value::Bool(bool)),
            (Type::Bytes, Value::Bytes(bytes)) => Ok(Value::Bytes(bytes)),
            (Type::Time, Value::Time(time)) => {
                if time.is_storable() {
                    Ok(Value::Time(time))
                } else {
                    Err(BadValue::TimeRange(time))
                }
            }
            (Type::Json, Value::Json(json)) => canonical_json(json, Value::JSON_DEPTH_MAX).map(Value::Json),
            (expected, other) => Err(BadValue::WrongType { expected, got: other.kind_name() }),
        }
    }

    /// The order of two values of one ordered type; `None` when either is null, JSON, or the types differ.
    pub fn compare(&self, other: &Value) -> Option<Ordering> {
        match (self, other) {
            (Value::Text(a), Value::Text(b)) => Some(a.as_bytes().cmp(b.as_bytes())),
            (Value::Int(a), Value::Int(b)) => Some(a.cmp(b)),
            (Value::Float(a), Value::Float(b)) => a.partial_cmp(b),
            (Value::Bool(a), Value::Bool(b)) => Some(a.cmp(b)),
            (Value::Bytes(a), Value::Bytes(b)) => Some(a.cmp(b)),
            (Value::Time(a), Value::Time(b)) => Some(a.cmp(b)),
            _ => None,
        }
    }

    /// What the value weighs against the limits, in bytes, on the heaviest engine.
    pub fn weight(&self) -> usize {
        match self {
            Value::Null | Value::Bool(_) => 1,
            Value::Text(text) => text.len(),
            Value::Int(_) | Value::Float(_) => 21,
            Value::Bytes(bytes) => bytes.len(),
            Value::Time(_) => 27,
            Value::Json(json) => json_weight(json),
        }
    }

    /// The value as events and HTTP bodies show it: times in RFC 3339, octets in base64.
    pub fn to_json(&self) -> serde_json::Value {
        match self {
            Value::Null => serde_json::Value::Null,
            Value::Text(text) => text.as_str().into(),
            Value::Int(int) => (*int).into(),
            Value::Float(float) => canonical_number(*float),
            Value::Bool(bool) => (*bool).into(),
            Value::Bytes(bytes) => BASE64.encode(bytes).into(),
            Value::Time(time) => time.to_text().into(),
            Value::Json(json) => json.clone(),
        }
    }

    /// The same, consuming the value: its text is not copied.
    pub fn into_json(self) -> serde_json::Value {
        match self {
            Value::Text(text) => text.into(),
            Value::Json(json) => json,
            other => other.to_json(),
        }
    }

    /// Writes the text of [`Value::to_json`] behind what is there.
    pub fn write_json(&self, out: &mut Vec<u8>) {
        let written = match self {
            Value::Text(text) => serde_json::to_writer(out, text),
            Value::Json(json) => serde_json::to_writer(out, json),
            other => serde_json::to_writer(out, &other.to_json()),
        };
        // Memory takes what is written, and JSON can be written as JSON.
        debug_assert!(written.is_ok());
    }

    /// Reads back what [`Value::to_json`] wrote, given the column's type.
    pub fn from_json(json: serde_json::Value, expected: Type) -> Result<Value, BadValue> {
        use serde_json::Value as J;
        let got = match &json {
            J::Null => "null",
            J::Bool(_) => "bool",
            J::Number(_) => "number",
            J::String(_) => "string",
            J::Array(_) => "array",
            J::Object(_) => "object",
        };
        let wrong = || BadValue::WrongType { expected, got };
        let value = match (expected, json) {
            (_, J::Null) => Value::Null,
            (Type::Json, json) => Value::Json(json),
            (Type::Text, J::String(text)) => Value::Text(text),
            (Type::Int, J::Number(number)) => {
                Value::Int(number.as_i64().or_else(|| whole(number.as_f64()?)).ok_or_else(wrong)?)
            }
            (Type::Float, J::Number(number)) => Value::Float(number.as_f64().ok_or_else(wrong)?),
            (Type::Bool, J::Bool(bool)) => Value::Bool(bool),
            (Type::Bytes, J::String(text)) => Value::Bytes(BASE64.decode(text).map_err(|_| wrong())?),
            (Type::Time, J::String(text)) => Value::Time(text.parse()?),
            _ => return Err(wrong()),
        };
        value.admitted(expected)
    }
}

/// The integer that a float is, if it is one and no other integer is written the same: to JSON `1.0` and `1` are equal.
fn whole(float: f64) -> Option<i64> {
    const EXACT: f64 = 9_007_199_254_740_992.0;
    (float.fract() == 0.0 && float.abs() < EXACT).then_some(float as i64)
}

/// A float that every engine can hold, with negative zero made positive.
pub(crate) fn admit_float(float: f64) -> Result<f64, BadValue> {
    let magnitude = float.abs();
    if magnitude == 0.0 {
        Ok(0.0)
    } else if (Value::FLOAT_MIN..Value::FLOAT_MAX).contains(&magnitude) {
        Ok(float)
    } else {
        Err(BadValue::FloatRange(float))
    }
}

/// Puts a JSON document into the one form that every engine gives back.
///
/// PostgreSQL's jsonb forgets how a number was written: `1.0`, `1e0` and `1` are one number. So whole floats are
/// written as integers. Object keys are sorted and unique already: that is how `serde_json` holds them.
pub fn canonical_json(json: serde_json::Value, depth_left: usize) -> Result<serde_json::Value, BadValue> {
    use serde_json::Value as J;
    let deeper = || depth_left.checked_sub(1).ok_or(BadValue::JsonDepth);
    Ok(match json {
        J::Null | J::Bool(_) => json,
        J::Number(number) => match number.as_f64() {
            Some(float) if number.is_f64() => canonical_number(admit_float(float)?),
            _ => J::Number(number),
        },
        J::String(text) if text.contains('\0') => return Err(BadValue::NulCharacter),
        J::String(_) => json,
        J::Array(items) => {
            let depth = deeper()?;
            J::Array(items.into_iter().map(|item| canonical_json(item, depth)).collect::<Result<_, _>>()?)
        }
        J::Object(fields) => {
            let depth = deeper()?;
            if fields.keys().any(|name| name.contains('\0')) {
                return Err(BadValue::NulCharacter);
            }
            J::Object(
                fields
                    .into_iter()
                    .map(|(name, field)| Ok((name, canonical_json(field, depth)?)))
                    .collect::<Result<_, BadValue>>()?,
            )
        }
    })
}

fn canonical_number(float: f64) -> serde_json::Value {
    // 2^63 and 2^64 are exact as floats, and below them every whole float is exactly one integer.
    const TWO_63: f64 = 9_223_372_036_854_775_808.0;
    const TWO_64: f64 = 18_446_744_073_709_551_616.0;
    if float.fract() == 0.0 && (-TWO_63..TWO_63).contains(&float) {
        (float as i64).into()
    } else if float.fract() == 0.0 && (0.0..TWO_64).contains(&float) {
        (float as u64).into()
    } else {
        float.into()
    }
}

/// The length of the JSON text, counted without writing it.
pub(crate) fn json_weight(json: &impl Serialize) -> usize {
    struct JsonLength(usize);
    impl std::io::Write for JsonLength {
        fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
            self.0 += bytes.len();
            Ok(bytes.len())
        }
        fn flush(&mut self) -> std::io::Result<()> {
            Ok(())
        }
    }
    let mut counter = JsonLength(0);
    match serde_json::to_writer(&mut counter, json) {
        Ok(()) => counter.0,
        Err(_) => usize::MAX,
    }
}

/// As `explain` prints it: close to an SQL literal.
impl fmt::Display for Value {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Value::Null => f.write_str("null"),
            Value::Text(text) => write!(f, "'{}'", text.replace('\'', "''")),
            Value::Int(int) => write!(f, "{int}"),
            Value::Float(float) => write!(f, "{float:?}"),
            Value::Bool(bool) => write!(f, "{bool}"),
            Value::Bytes(bytes) => {
                f.write_str("x'")?;
                bytes.iter().try_for_each(|byte| write!(f, "{byte:02x}"))?;
                f.write_str("'")
            }
            Value::Time(time) => write!(f, "'{time}'"),
            Value::Json(json) => write!(f, "'{json}'"),
        }
    }
}

impl From<&str> for Value {
    fn from(text: &str) -> Value {
        Value::Text(text.to_owned())
    }
}
impl From<String> for Value {
    fn from(text: String) -> Value {
        Value::Text(text)
    }
}
impl From<i64> for Value {
    fn from(int: i64) -> Value {
        Value::Int(int)
    }
}
impl From<i32> for Value {
    fn from(int: i32) -> Value {
        Value::Int(int.into())
    }
}
impl From<f64> for Value {
    fn from(float: f64) -> Value {
        Value::Float(float)
    }
}
impl From<bool> for Value {
    fn from(bool: bool) -> Value {
        Value::Bool(bool)
    }
}
impl From<Vec<u8>> for Value {
    fn from(bytes: Vec<u8>) -> Value {
        Value::Bytes(bytes)
    }
}
impl From<Time> for Value {
    fn from(time: Time) -> Value {
        Value::Time(time)
    }
}
impl From<serde_json::Value> for Value {
    fn from(json: serde_json::Value) -> Value {
        Value::Json(json)
    }
}
impl<T: Into<Value>> From<Option<T>> for Value {
    fn from(option: Option<T>) -> Value {
        option.map_or(Value::Null, Into::into)
    }
}

mod base64_text {
    use super::{BASE64, Deserialize};
    use base64::Engine as _;
    use serde::{Deserializer, Serializer, de::Error};

    pub(super) fn serialize<S: Serializer>(bytes: &[u8], to: S) -> Result<S::Ok, S::Error> {
        to.serialize_str(&BASE64.encode(bytes))
    }

    pub(super) fn deserialize<'de, D: Deserializer<'de>>(from: D) -> Result<Vec<u8>, D::Error> {
        BASE64.decode(String::deserialize(from)?).map_err(D::Error::custom)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn json_takes_one_canonical_form() {
        let given = json!({"b": 1.0, "a": [1e2, -0.0, 0.5, 1e19, 1e20]});
        let kept = canonical_json(given, 8).unwrap();
        assert_eq!(kept.to_string(), r#"{"a":[100,0,0.5,10000000000000000000,1e+20],"b":1}"#);
    }

    #[test]
    fn json_depth_is_bounded() {
        let nested = |depth: usize| (0..depth).fold(json!(1), |inner, _| json!([inner]));
        assert!(Value::Json(nested(Value::JSON_DEPTH_MAX)).admitted(Type::Json).is_ok());
        assert_eq!(
            Value::Json(nested(Value::JSON_DEPTH_MAX + 1)).admitted(Type::Json),
            Err(BadValue::JsonDepth)
        );
    }

    #[test]
    fn floats_are_held_to_the_weakest_engine() {
        for good in [0.0, -0.0, 1e-130, -9.9e125, 0.1] {
            assert!(Value::Float(good).admitted(Type::Float).is_ok(), "{good}");
        }
        for bad in [f64::NAN, f64::INFINITY, 1e126, 9e-131, f64::MIN_POSITIVE] {
            assert!(Value::Float(bad).admitted(Type::Float).is_err(), "{bad}");
        }
        assert_eq!(Value::Int(3).admitted(Type::Float), Ok(Value::Float(3.0)));
        assert!(Value::Int(i64::MAX).admitted(Type::Float).is_err());
    }

    #[test]
    fn json_text_and_back_for_every_type() {
        for (value, kind) in [
            (Value::from("ü'"), Type::Text),
            (Value::from(i64::MIN), Type::Int),
            (Value::from(3.0), Type::Float),
            (Value::from(true), Type::Bool),
            (Value::from(vec![0, 255]), Type::Bytes),
            (Value::from(Time::from_micros(-7)), Type::Time),
            (Value::from(json!({"a": [1, null]})), Type::Json),
            (Value::Null, Type::Text),
        ] {
            assert_eq!(Value::from_json(value.to_json(), kind), Ok(value));
        }
    }
}
