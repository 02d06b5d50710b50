//! The text as settings that remember where they stand, in the order in which they were written.

use std::ops::Range;

use toml::Spanned;
use toml::de::{DeTable, DeValue};

use super::problem::{Problem, Problems};

/// A value and its place.
#[derive(Clone, Debug, PartialEq)]
pub struct Node {
    /// Where it stands in the text, in bytes.
    pub span: Range<usize>,
    /// What it is.
    pub value: Value,
}

/// What TOML can say.
#[derive(Clone, Debug, PartialEq)]
pub enum Value {
    /// A string.
    Text(String),
    /// An integer.
    Int(i64),
    /// A float.
    Float(f64),
    /// `true` or `false`.
    Bool(bool),
    /// A date, a time, or both, as written.
    Time(String),
    /// An array.
    List(Vec<Node>),
    /// A table.
    Table(Vec<Entry>),
}

/// A key of a table with its value.
#[derive(Clone, Debug, PartialEq)]
pub struct Entry {
    /// The key.
    pub key: String,
    /// Where the key stands.
    pub key_span: Range<usize>,
    /// What it is set to.
    pub value: Node,
}

impl Value {
    /// What it is, for messages.
    pub fn kind(&self) -> &'static str {
        match self {
            Value::Text(_) => "text",
            Value::Int(_) => "an integer",
            Value::Float(_) => "a float",
            Value::Bool(_) => "true or false",
            Value::Time(_) => "a time",
            Value::List(_) => "a list",
            Value::Table(_) => "a table",
        }
    }
}

/// Reads a text. What cannot be read becomes a problem; the rest is returned.
pub fn parse(text: &str, problems: &mut Problems) -> Vec<Entry> {
    let (root, errors) = DeTable::parse_recoverable(text);
    for error in errors {
        let span = error.span().unwrap_or(0..0);
        problems.add(Problem::at(span, format!("this is not TOML: {}", error.message())));
    }
    entries(root.into_inner(), problems)
}

fn entries(table: DeTable<'_>, problems: &mut Problems) -> Vec<Entry> {
    let mut entries: Vec<Entry> = table
        .into_iter()
        .map(|(key, value)| Entry {
            key_span: key.span(),
            key: key.into_inner().into_owned(),
            value: node(value, problems),
        })
        .collect();
    // The parser's table is sorted by key; people read from top to bottom.
    entries.sort_by_key(|entry| entry.key_span.start);
    entries
}

fn node(value: Spanned<DeValue<'_>>, problems: &mut Problems) -> Node {
    let span = value.span();
    let value = match value.into_inner() {
        DeValue::String(text) => Value::Text(text.into_owned()),
        DeValue::Integer(integer) => {
            let digits = i64::from_str_radix(integer.as_str(), integer.radix());
            Value::Int(digits.unwrap_or_else(|_| {
                problems.add(Problem::at(span.clone(), "this integer does not fit 64 bits"));
                0
            }))
        }
        DeValue::Float(float) => Value::Float(float.as_str().parse().unwrap_or(f64::NAN)),
        DeValue::Boolean(bool) => Value::Bool(bool),
        DeValue::Datetime(time) => Value::Time(time.to_string()),
        DeValue::Array(items) => Value::List(items.into_iter().map(|item| node(item, problems)).collect()),
        DeValue::Table(table) => Value::Table(entries(table, problems)),
    };
    Node { span, value }
}
