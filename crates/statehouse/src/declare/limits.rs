//! Constraints on the contents of a field: `min`, `max`, `max_length`, `enum`, `pattern`.
//!
//! What a caller gives is checked with the form of its input, before a plan is made ([`FieldLimits::check`]). What the engine computes,
//! the sum of an increment, is bounded by a conjunct of the guard ([`FieldLimits::sum_guard`]), so that it holds in a race as well.

use std::fmt;

use serde_json::{Map, Value as Json, json};
use statehouse_store::guard::Comparison;
use statehouse_store::{Guard, Operand, Type, Value};

/// The constraints of one field. At least one is given.
#[derive(Clone, Debug, PartialEq)]
pub struct FieldLimits {
    /// The type of the field.
    pub kind: Type,
    /// The least value.
    pub min: Option<Value>,
    /// The greatest value.
    pub max: Option<Value>,
    /// The most characters of a text.
    pub max_length: Option<usize>,
    /// The allowed values; empty if all are.
    pub one_of: Vec<Value>,
    /// What a whole text must look like.
    pub pattern: Option<TextPattern>,
}

/// A regular expression that a whole text must match.
#[derive(Clone)]
pub struct TextPattern {
    text: String,
    whole: regex_lite::Regex,
}

impl TextPattern {
    /// Compiles a regular expression.
    pub fn new(text: &str) -> Result<TextPattern, String> {
        let whole = regex_lite::Regex::new(&format!("^(?:{text})$")).map_err(|error| error.to_string())?;
        Ok(TextPattern { text: text.to_owned(), whole })
    }
}

impl fmt::Debug for TextPattern {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "TextPattern({})", self.text)
    }
}

impl PartialEq for TextPattern {
    fn eq(&self, other: &TextPattern) -> bool {
        self.text == other.text
    }
}

impl FieldLimits {
    /// No constraints yet.
    pub fn of(kind: Type) -> FieldLimits {
        FieldLimits { kind, min: None, max: None, max_length: None, one_of: Vec::new(), pattern: None }
    }

    /// Whether nothing is constrained.
    pub fn is_empty(&self) -> bool {
        *self == FieldLimits::of(self.kind)
    }

    /// Why a value does not fit. Null is the concern of whether the field is optional.
    pub fn check(&self, value: &Value) -> Result<(), String> {
        let is_beyond = |limit: &Option<Value>, order: std::cmp::Ordering| {
            limit.as_ref().is_some_and(|limit| value.compare(limit) == Some(order))
        };
        if value.is_null() {
            return Ok(());
        }
        if is_beyond(&self.min, std::cmp::Ordering::Less) || is_beyond(&self.max, std::cmp::Ordering::Greater)
        {
            return Err(self.range_text());
        }
        if !self.one_of.is_empty() && !self.one_of.contains(value) {
            let allowed: Vec<String> = self.one_of.iter().map(plain).collect();
            return Err(format!("it must be one of {}", allowed.join(", ")));
        }
        let text = value.as_text().unwrap_or_default();
        if let Some(max) = self.max_length
            && text.chars().count() > max
        {
            return Err(format!("it has {} characters; the limit is {max}", text.chars().count()));
        }
        match &self.pattern {
            Some(pattern) if !pattern.whole.is_match(text) => {
                Err(format!("it must match {} as a whole", pattern.text))
            }
            _ => Ok(()),
        }
    }

    fn range_text(&self) -> String {
        match (&self.min, &self.max) {
            (Some(min), Some(max)) => format!("it must be from {} to {}", plain(min), plain(max)),
            (Some(min), None) => format!("it must be at least {}", plain(min)),
            (None, Some(max)) => format!("it must be at most {}", plain(max)),
            (None, None) => String::new(),
        }
    }

    /// The constraints in words, for people who fill in a form.
    pub fn describe(&self) -> String {
        let list = |values: &[Value]| values.iter().map(plain).collect::<Vec<_>>().join(", ");
        let parts = [
            self.min.as_ref().map(|min| format!("at least {}", plain(min))),
            self.max.as_ref().map(|max| format!("at most {}", plain(max))),
            (!self.one_of.is_empty()).then(|| format!("one of {}", list(&self.one_of))),
            self.max_length.map(|max| format!("at most {max} characters")),
            self.pattern.as_ref().map(|pattern| format!("matching {}", pattern.text)),
        ];
        parts.into_iter().flatten().collect::<Vec<_>>().join(", ")
    }

    /// What is said of a sum that would be out of range.
    pub fn sum_refused(&self, name: &str, current: Option<&Value>) -> String {
        let current = current.filter(|value| !value.is_null()).map_or("nothing".to_owned(), plain);
        format!("the new {name} would be out of range: {}, and {name} is {current}", self.range_text())
    }

    /// Whether a sum can only be checked on a row that was read: floats are rounded, and a list has gaps.
    pub fn needs_row(&self) -> bool {
        let has_range = self.min.is_some() || self.max.is_some();
        !self.one_of.is_empty() || (has_range && self.kind == Type::Float)
    }

    /// The condition that a sum of integers stays in range: on the number as it is before the increment. `base` stands for a
    /// number that is null. Only the limit that the amount leads to is compared.
    pub fn sum_guard(&self, name: &str, base: &Value, amount: &Value) -> Option<Guard> {
        let amount = amount.as_int()?;
        // No integer is beyond the last one: such a comparison never holds, and still names the field.
        let (limit, comparison, never) = match amount {
            0 => return None,
            1.. => (self.max.as_ref()?.as_int()?, Comparison::Le, (Comparison::Lt, i64::MIN)),
            _ => (self.min.as_ref()?.as_int()?, Comparison::Ge, (Comparison::Gt, i64::MAX)),
        };
        let (comparison, bound) = limit.checked_sub(amount).map_or(never, |bound| (comparison, bound));
        let number = Operand::Coalesce(name.to_owned(), base.clone());
        Some(number.compare(comparison, Value::Int(bound)))
    }

    /// Adds the constraints to a JSON Schema.
    pub fn add_to_schema(&self, schema: &mut Map<String, Json>) {
        let mut put = |name: &str, value: Json| drop(schema.insert(name.to_owned(), value));
        // Times have no order in JSON Schema.
        if self.kind != Type::Time {
            self.min.iter().for_each(|min| put("minimum", min.to_json()));
            self.max.iter().for_each(|max| put("maximum", max.to_json()));
        }
        self.max_length.iter().for_each(|max| put("maxLength", json!(max)));
        if !self.one_of.is_empty() {
            put("enum", self.one_of.iter().map(Value::to_json).collect());
        }
        self.pattern.iter().for_each(|pattern| put("pattern", format!("^(?:{})$", pattern.text).into()));
    }
}

fn plain(value: &Value) -> String {
    match value.to_json() {
        Json::String(text) => text,
        other => other.to_string(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn stock() -> FieldLimits {
        FieldLimits { min: Some(0.into()), max: Some(10.into()), ..FieldLimits::of(Type::Int) }
    }

    #[test]
    fn values_are_checked() {
        assert_eq!(stock().check(&Value::Null), Ok(()));
        assert_eq!(stock().check(&10.into()), Ok(()));
        assert_eq!(stock().check(&11.into()), Err("it must be from 0 to 10".into()));
        let email = FieldLimits {
            max_length: Some(8),
            pattern: Some(TextPattern::new("[a-z]+@[a-z]+|x").unwrap()),
            ..FieldLimits::of(Type::Text)
        };
        assert_eq!(email.check(&"ann@home".into()), Ok(()));
        assert_eq!(email.check(&"anna@home".into()), Err("it has 9 characters; the limit is 8".into()));
        assert_eq!(email.check(&"y x".into()), Err("it must match [a-z]+@[a-z]+|x as a whole".into()));
        assert_eq!(email.describe(), "at most 8 characters, matching [a-z]+@[a-z]+|x");
        let words =
            FieldLimits { one_of: vec!["hand".into(), "power".into()], ..FieldLimits::of(Type::Text) };
        assert_eq!(words.check(&"saw".into()), Err("it must be one of hand, power".into()));
    }

    #[test]
    fn a_sum_is_bounded_on_the_side_that_it_moves_to() {
        let guard = |amount: i64| stock().sum_guard("n", &0.into(), &amount.into()).map(|g| g.to_string());
        assert_eq!(guard(3).as_deref(), Some("coalesce(n, 0) <= 7"));
        assert_eq!(guard(-3).as_deref(), Some("coalesce(n, 0) >= 3"));
        assert_eq!(guard(0), None);
        let low = FieldLimits { max: Some(i64::MIN.into()), ..FieldLimits::of(Type::Int) };
        let never = low.sum_guard("n", &0.into(), &1.into()).map(|guard| guard.to_string());
        assert_eq!(never.as_deref(), Some("coalesce(n, 0) < -9223372036854775808"));
        assert_eq!(guard(i64::MIN).as_deref(), Some("coalesce(n, 0) > 9223372036854775807"));
    }
}
