//! Lists by pages: what every action that lists takes, asks for and answers.

use serde_json::Value as Json;
use statehouse_store::{Cursor, Query, Type, Value};

use crate::action::{Answer, Call, Refusal};
use crate::blueprint::settings::Field;
use crate::form::{Form, Property};
use crate::inputs::Inputs;

/// Rows in a page, if the caller says nothing.
const ROWS_DEFAULT: i64 = 50;
/// The most rows in a page.
const ROWS_MAX: i64 = 500;
pub(crate) const LIMIT: &str = "limit";
pub(crate) const CURSOR: &str = "cursor";

/// What a list takes besides its filters.
pub(crate) fn properties() -> [Property; 2] {
    let about = format!("rows in a page; {ROWS_DEFAULT} if not given");
    [
        Property::optional(LIMIT, Form::Range(1, ROWS_MAX), &about),
        Property::optional(CURSOR, Form::Value(Type::Text), "where a page before this one ended"),
    ]
}

/// What a call gives for these fields: the rows of whom or what it asks for.
pub(crate) fn given(fields: &[Field], call: &Call) -> Result<Vec<Value>, Refusal> {
    let value = |field: &Field| {
        let missing = || Refusal::field(&field.name, "it is required");
        call.input.value(&field.name).cloned().ok_or_else(missing)
    };
    fields.iter().map(value).collect()
}

/// What a call gives that asks for the first so many rows.
pub(crate) fn first(rows: i64) -> Inputs {
    let mut inputs = Inputs::default();
    inputs.set(LIMIT, rows);
    inputs
}

/// How many rows a call asks for.
pub(crate) fn rows(call: &Call) -> usize {
    let rows = call.input.int(LIMIT).unwrap_or(ROWS_DEFAULT);
    usize::try_from(rows).unwrap_or(1)
}

/// The page of a range that a call asks for.
pub(crate) fn page_of(query: Query, call: &Call) -> Result<Query, Refusal> {
    let query = query.limit(rows(call))?;
    match call.input.text(CURSOR) {
        Some(cursor) => Ok(query.after(Cursor::parse(cursor)?)?),
        None => Ok(query),
    }
}

/// The answer of a list.
pub(crate) fn answer(rows: impl IntoIterator<Item = Json>, next: Option<Cursor>) -> Answer {
    let rows = Json::Array(rows.into_iter().collect());
    Answer { next: next.map(|cursor| cursor.to_string()), ..Answer::row(rows) }
}
