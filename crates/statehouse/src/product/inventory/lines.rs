//! Lines: what a reservation wants of which rows. Pure.

use std::sync::Arc;

use serde_json::{Map, Value as Json, json};
use statehouse_store::{Row, StoreError, Value};

use super::{InventorySpec, LINES, QUANTITY, TAKEN};
use crate::action::Refusal;
use crate::blueprint::settings::Field;
use crate::form::{Form, Property};
use crate::inputs::{Input, Inputs};
use crate::resource::key_text;

/// The most that one call changes a row by: the greatest integer that every JSON reader keeps exactly.
pub(super) const QUANTITY_MAX: i64 = (1 << 53) - 1;

/// A quantity of one stock.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Line {
    /// The key of the stock.
    pub key: Vec<Value>,
    /// How many.
    pub quantity: i64,
}

/// What a reservation has of one cell.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct TakenCell {
    /// The number of the line.
    pub line: usize,
    pub cell: usize,
    pub quantity: i64,
}

impl TakenCell {
    /// As a reservation stores it.
    pub(super) fn json(self) -> Json {
        json!([self.line, self.cell, self.quantity])
    }

    fn read(json: &Json) -> Option<TakenCell> {
        let place = |place: usize| {
            json.get(place).and_then(Json::as_u64).and_then(|number| usize::try_from(number).ok())
        };
        Some(TakenCell { line: place(0)?, cell: place(1)?, quantity: json.get(2)?.as_i64()? })
    }
}

/// The form of a line: the columns of the key, and the quantity.
pub(super) fn form(key: &[Field]) -> Form {
    let quantity = Property::required(QUANTITY, Form::Range(1, QUANTITY_MAX), "how many");
    Form::Object(key.iter().map(Field::property).chain([quantity]).collect())
}

impl InventorySpec {
    /// The key of a stock that an object names by its columns.
    fn key_in(&self, line: &Inputs) -> Vec<Value> {
        self.key.iter().map(|field| line.value_or_null(&field.name)).collect()
    }

    /// The lines of a call, those of one stock added up, in the order of their keys. A plan names a row once, so that each row is
    /// checked against the sum of what is wanted of it.
    pub(super) fn lines_given(&self, input: &Inputs) -> Result<Vec<Line>, Refusal> {
        let mut lines: Vec<(String, Line)> = Vec::new();
        for object in input.list(LINES).iter().filter_map(Input::object) {
            let (key, quantity) = (self.key_in(object), object.get_int(QUANTITY)?);
            let name = key_text(&key);
            match lines.iter_mut().find(|(known, _)| *known == name) {
                Some((_, line)) => line.quantity = added(line.quantity, quantity)?,
                None => lines.push((name, Line { key, quantity })),
            }
        }
        if lines.is_empty() {
            return Err(Refusal::field(LINES, "say what is wanted: at least one line"));
        }
        if lines.len() > self.lines_max {
            let detail = format!("{} lines are too many; the limit is {}", lines.len(), self.lines_max);
            return Err(Refusal::field(LINES, detail));
        }
        lines.sort_by(|(one, _), (other, _)| one.cmp(other));
        Ok(lines.into_iter().map(|(_, line)| line).collect())
    }

    /// Lines as a reservation stores and shows them.
    pub(super) fn lines_json(&self, lines: &[Line]) -> Json {
        let shown = |line: &Line| {
            let named = self.key.iter().zip(&line.key);
            let mut object: Map<String, Json> =
                named.map(|(field, value)| (field.name.clone(), value.to_json())).collect();
            object.insert(QUANTITY.to_owned(), line.quantity.into());
            Json::Object(object)
        };
        lines.iter().map(shown).collect()
    }

    /// The lines in a column of a reservation.
    pub(super) fn lines_in(&self, row: &Row, column: &'static str) -> Result<Vec<Line>, StoreError> {
        let lines = row.get_json(column)?.as_array();
        let lines = lines.ok_or_else(|| row.corrupt(column, "is not a list"))?;
        let line = |line: &Json| {
            let part = |field: &Field| {
                let given = line.get(&field.name).cloned().unwrap_or_default();
                let value = Value::from_json(given, field.kind).ok().filter(|value| !value.is_null());
                value.ok_or_else(|| row.corrupt(column, &format!("has a line without {}", field.name)))
            };
            let key = self.key.iter().map(part).collect::<Result<_, _>>()?;
            let quantity = line.get(QUANTITY).and_then(Json::as_i64).filter(|quantity| *quantity > 0);
            let quantity = quantity.ok_or_else(|| row.corrupt(column, "has a line without a quantity"))?;
            Ok(Line { key, quantity })
        };
        lines.iter().map(line).collect()
    }

    /// What a reservation has of which cells.
    pub(super) fn taken_in(&self, row: &Row, lines: &[Line]) -> Result<Vec<TakenCell>, StoreError> {
        let Some(taken) = row.json(TAKEN).filter(|taken| !taken.is_null()) else {
            let whole = |(line, of): (usize, &Line)| TakenCell { line, cell: 0, quantity: of.quantity };
            return Ok(lines.iter().enumerate().map(whole).collect());
        };
        let taken = taken.as_array().into_iter().flatten().map(TakenCell::read).collect::<Option<Vec<_>>>();
        let fits = |taken: &Vec<TakenCell>| taken.iter().all(|one| one.line < lines.len());
        taken.filter(fits).ok_or_else(|| row.corrupt(TAKEN, "is not a list of lines, cells and quantities"))
    }

    /// What of a reservation is bought: all, or the lines that the call names. The rest is released.
    pub(super) fn bought(
        self: &Arc<Self>,
        reserved: &[Line],
        input: Option<&Inputs>,
    ) -> Result<Vec<Line>, Refusal> {
        let Some(input) = input.filter(|input| input.has(LINES)) else { return Ok(reserved.to_vec()) };
        let lines = self.lines_given(input)?;
        for line in &lines {
            let what = key_text(&line.key);
            let of = reserved.iter().find(|of| of.key == line.key).map_or(0, |of| of.quantity);
            if of < line.quantity {
                let detail = format!("{} of {what} are more than the {of} that are reserved", line.quantity);
                return Err(Refusal::field(LINES, detail));
            }
        }
        Ok(lines)
    }
}

fn added(one: i64, other: i64) -> Result<i64, Refusal> {
    let sum = one.checked_add(other).filter(|sum| *sum <= QUANTITY_MAX);
    sum.ok_or_else(|| {
        Refusal::field(LINES, format!("the lines of one row add up to more than {QUANTITY_MAX}"))
    })
}
