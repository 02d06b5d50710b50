//! How much room a compiled statement may count on: the limits of rows and records, made safe without reading.
//!
//! A row may weigh so much, and its parts in an index so much ([`statehouse_store::limits`]). Of a row that a
//! statement changes unseen, the caller knows what is assigned but not what is kept. So the statement carries an
//! upper bound on the length of the kept columns, computed here from the worst case of all that is known. Within the
//! bound every limit holds for certain; beyond it the statement does nothing and the row is looked at.

use statehouse_store::plan::{Expect, Verb};
use statehouse_store::{Event, Expr, Operand, Plan, Row, Step, Table, Time, Type, Value, limits};

use crate::sql::name;

/// An upper bound on the length of some columns that are kept.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Bound {
    /// The sum of their lengths, over the row `t`.
    pub length: String,
    /// The most that it may be.
    pub bytes_max: i64,
}

/// The bounds under which a step keeps the limits.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Room {
    pub bounds: Vec<Bound>,
}

impl Room {
    /// The bounds for a plan of this one step; `None` if it might break a limit whatever is stored.
    pub(crate) fn of(plan: &Plan, step: &Step) -> Option<Room> {
        let table = &step.table;
        if step.verb != Verb::Put {
            // What a delete takes into an event may be as large as a row can be.
            let kept: Vec<&str> = variable(table).collect();
            let bound = record_bound(plan, &worst(plan, step, Found::Row), kept.is_empty())?;
            return Some(Room {
                bounds: bound.into_iter().map(|bytes| bounded(table, &kept, bytes)).collect(),
            });
        }
        if step.expect != Expect::Present {
            let new = worst(plan, step, Found::Nothing);
            limits::check_row(&new).ok()?;
            record_bound(plan, &new, true)?;
            if step.expect == Expect::Absent {
                return Some(Room { bounds: Vec::new() });
            }
        }
        let known = worst(plan, step, Found::Row);
        limits::check_row(&known).ok()?;
        let kept: Vec<&str> = kept(step).collect();
        let record = record_bound(plan, &known, kept.is_empty())?;
        if kept.is_empty() {
            return Some(Room { bounds: Vec::new() });
        }
        // A kept column counts once for itself and in each index it is part of, where octets count double.
        let share = 1 + 2 * table.indexes().len();
        let row = (limits::ROW_BYTES_MAX - limits::row_weight(&known).min(limits::ROW_BYTES_MAX)) / share;
        let mut bounds = vec![bounded(table, &kept, record.map_or(row, |record| record.min(row)))];
        for index in table.indexes() {
            let touched = index.columns().any(|column| assigned(step, column).is_some());
            let part: Vec<&str> =
                kept.iter().copied().filter(|kept| index.columns().any(|c| c == *kept)).collect();
            if touched && !part.is_empty() {
                // The tightest limit of an index, less the worst case of everything else in the entry.
                let entry = limits::row_weight(&known) - limits::row_weight(&without_index_entries(&known));
                let left = limits::SORT_KEY_BYTES_MAX.checked_sub(entry.min(limits::SORT_KEY_BYTES_MAX))?;
                bounds.push(bounded(table, &part, left / 2));
            }
        }
        Some(Room { bounds })
    }
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Found {
    Row,
    Nothing,
}

fn is_variable(kind: Type) -> bool {
    matches!(kind, Type::Text | Type::Bytes | Type::Json)
}

/// The columns of variable length that are not part of the key.
fn variable(table: &Table) -> impl Iterator<Item = &str> {
    table.other_columns().iter().filter(|column| is_variable(column.kind)).map(|column| column.name.as_str())
}

fn assigned<'s>(step: &'s Step, column: &str) -> Option<&'s Expr> {
    step.assignments.iter().find(|assignment| assignment.column == column).map(|assignment| &assignment.expr)
}

/// The columns of variable length whose content the step does not know: kept, or the source of another.
fn kept(step: &Step) -> impl Iterator<Item = &str> {
    variable(&step.table).filter_map(|column| match assigned(step, column) {
        None => Some(column),
        Some(Expr::Is(Operand::Column(source) | Operand::ColumnOr(source, _))) => Some(source.as_str()),
        Some(_) => None,
    })
}

/// The row with everything that is known, and the heaviest content of fixed length elsewhere.
fn worst(plan: &Plan, step: &Step, found: Found) -> Row {
    let heaviest = |kind: Type| match kind {
        Type::Text => Value::Text(String::new()),
        Type::Int => Value::Int(i64::MIN),
        Type::Float => Value::Float(0.0),
        Type::Bool => Value::Bool(false),
        Type::Bytes => Value::Bytes(Vec::new()),
        Type::Time => Value::Time(Time::MAX),
        Type::Json => Value::Json(serde_json::Value::Bool(false)),
    };
    let others = step.table.other_columns().iter().map(|column| match assigned(step, &column.name) {
        Some(Expr::Is(Operand::Value(value) | Operand::ColumnOr(_, value))) => value.clone(),
        None if found == Found::Nothing => column.default.clone().unwrap_or(Value::Null),
        _ => heaviest(column.kind),
    });
    let values = step.key.iter().cloned().chain(others).collect();
    Row::new(step.table.clone(), plan.tenant().clone(), values, i64::MAX)
}

/// The same row in a table without indexes: the difference in weight is what the entries weigh.
fn without_index_entries(row: &Row) -> Row {
    let mut builder = Table::named(row.table().name());
    for column in row.table().partition_columns() {
        builder = builder.partition(&column.name, column.kind);
    }
    for column in row.table().sort_columns() {
        builder = builder.sort(&column.name, column.kind);
    }
    for column in row.table().other_columns() {
        builder = builder.declared(column.clone());
    }
    match builder.build() {
        Ok(table) => Row::new(table, row.tenant().clone(), row.values().to_vec(), row.version()),
        // A table that was built before can be built without its indexes; if not, no room is counted on.
        Err(_) => row.clone(),
    }
}

/// How many bytes of unknown content the events can take in: `Some(None)` where that does not matter, `None` where
/// the record might be too large already.
#[expect(clippy::option_option, reason = "no bound and no room are different answers")]
fn record_bound(plan: &Plan, known: &Row, nothing_kept: bool) -> Option<Option<usize>> {
    /// A control character takes six bytes in JSON.
    const ESCAPED: usize = 6;
    let Some(entry) = plan.entry() else { return Some(None) };
    let takers = entry.events.iter().filter(|draft| draft.row_of.is_some()).count();
    if takers == 0 {
        // What the events hold was weighed when the plan was built.
        return Some(None);
    }
    let data =
        entry.events.iter().map(|draft| Event { name: draft.name.clone(), data: draft.data.clone().into() });
    let said = limits::check_record(plan.operation(), &data.collect::<Vec<_>>()).ok()?;
    let rows = takers * (Value::Json(known.to_json()).weight() + 10);
    let left = limits::ROW_BYTES_MAX.checked_sub(said + rows)?;
    Some(if nothing_kept { None } else { Some(left / (ESCAPED * takers)) })
}

/// The columns' lengths together, at most so many bytes.
fn bounded(table: &Table, columns: &[&str], bytes_max: usize) -> Bound {
    let lengths = columns.iter().map(|column| {
        let kind = table.type_of(column);
        // JSON's text is never shorter than the form in which it is weighed.
        let cast = if kind == Some(Type::Json) { "::text" } else { "" };
        format!("coalesce(octet_length(t.{}{cast}), 0)", name(column))
    });
    let length = lengths.collect::<Vec<_>>().join(" + ");
    Bound { length, bytes_max: i64::try_from(bytes_max).unwrap_or(i64::MAX) }
}
