//! The text as settings that remember where they stand, in the order in which they were written.

use std::ops::Range;

use toml::Spanned;
use toml::de::{DeTable, DeValue};

use super::problem::{BlueprintProblem, Problems};

/// A value and its place.
#[derive(Clone, Debug, PartialEq)]
pub struct Node {
    /// Where it stands in the text, in bytes.
    pub span: Range<usize>,
    /// What it is.
    pub value: TreeValue,
}

/// What TOML can say.
#[derive(Clone, Debug, PartialEq)]
pub enum TreeValue {
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
    Table(Vec<TreeEntry>),
}

/// A key of a table with its value.
#[derive(Clone, Debug, PartialEq)]
pub struct TreeEntry {
    /// The key.
    pub key: String,
    /// Where the key stands.
    pub key_span: Range<usize>,
    /// What it is set to.
    pub value: Node,
}

impl TreeValue {
    /// What it is, for messages.
    pub fn kind(&self) -> &'static str {
        match self {
            TreeValue::Text(_) => "text",
            TreeValue::Int(_) => "an integer",
            TreeValue::Float(_) => "a float",
            TreeValue::Bool(_) => "true or false",
            TreeValue::Time(_) => "a time",
            TreeValue::List(_) => "a list",
            TreeValue::Table(_) => "a table",
        }
    }
}

/// Reads a text. What cannot be read becomes a problem; the rest is returned.
pub fn parse(text: &str, problems: &mut Problems) -> Vec<TreeEntry> {
    let (root, errors) = DeTable::parse_recoverable(text);
    for error in errors {
        let span = error.span().unwrap_or(0..0);
        problems.add(BlueprintProblem::at(span, format!("this is not TOML: {}", error.message())));
    }
    entries(root.into_inner(), problems)
}

fn entries(table: DeTable<'_>, problems: &mut Problems) -> Vec<TreeEntry> {
    let mut entries: Vec<TreeEntry> = table
        .into_iter()
        .map(|(key, value)| TreeEntry {
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
        DeValue::String(text) => TreeValue::Text(text.into_owned()),
        DeValue::Integer(integer) => {
            let digits = i64::from_str_radix(integer.as_str(), integer.radix());
            TreeValue::Int(digits.unwrap_or_else(|_| {
                problems.add(BlueprintProblem::at(span.clone(), "this integer does not fit 64 bits"));
                0
            }))
        }
        DeValue::Float(float) => TreeValue::Float(float.as_str().parse().unwrap_or(f64::NAN)),
        DeValue::Boolean(bool) => TreeValue::Bool(bool),
        DeValue::Datetime(time) => TreeValue::Time(time.to_string()),
        DeValue::Array(items) => {
            TreeValue::List(items.into_iter().map(|item| node(item, problems)).collect())
        }
        DeValue::Table(table) => TreeValue::Table(entries(table, problems)),
    };
    Node { span, value }
}
