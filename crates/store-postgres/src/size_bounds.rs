//! Upper bounds that make the size limits of rows and records hold without reading the row.
//!
//! The size of a row and of its index entries is limited ([`statehouse_store::limits`]). A compiled statement changes a row that
//! the caller has not read: it knows what it assigns, and not what the row keeps. So two things are bounded. The values of the plan
//! must be small, or the plan is not compiled. And the statement has conditions on the length of the columns that it keeps, computed
//! from the worst case of everything else. Within these bounds every limit holds. Otherwise the statement does nothing, and the plan
//! is decided on the row itself.

use statehouse_store::plan::{Expect, Verb};
use statehouse_store::{Expr, Operand, Plan, Step, Table, Type, Value, limits};

use crate::batch::{size_of, size_of_step};
use crate::sql::name;

/// The maximum weight of the values and events of a compiled plan.
const KNOWN_BYTES_MAX: usize = 4_000;
/// The maximum weight of the key of a compiled plan and of its assignments to indexed columns.
const INDEXED_BYTES_MAX: usize = 160;
/// More than a value of fixed length weighs, with the punctuation around it.
const FIXED_BYTES: usize = 36;
/// Bytes of a control character in JSON. Bytes in keys are doubled, which is less.
const ESCAPED: usize = 6;

/// Whether a plan of this one step is small enough to be compiled.
pub(crate) fn is_small(plan: &Plan, step: &Step) -> bool {
    indexed_bytes(step) <= INDEXED_BYTES_MAX && key_bytes(step) + size_of(plan) <= KNOWN_BYTES_MAX
}

/// Whether a step of a plan of several steps is small enough. Its record includes no row, so its size is checked for the plan.
pub(crate) fn is_small_step(step: &Step) -> bool {
    indexed_bytes(step) <= INDEXED_BYTES_MAX && key_bytes(step) + size_of_step(step) <= KNOWN_BYTES_MAX
}

/// Whether a step whose key is not known yet is small enough, apart from the key ([`key_bound`]).
pub(crate) fn is_small_change(step: &Step) -> bool {
    size_of_step(step) + INDEXED_BYTES_MAX <= KNOWN_BYTES_MAX
}

/// The condition on the row `t` under which its key is small; `None` if there is none.
pub(crate) fn key_bound(step: &Step) -> Option<String> {
    let table = &step.table;
    let (variable, fixed): (Vec<_>, Vec<_>) =
        table.key_columns().iter().partition(|column| is_variable(column.kind));
    let known = indexed_bytes(step) - key_bytes(step) + variable.len() + fixed.len() * FIXED_BYTES;
    let left = INDEXED_BYTES_MAX.checked_sub(known)?;
    let names: Vec<&str> = variable.iter().map(|column| column.name.as_str()).collect();
    // Bytes count double.
    Some(if names.is_empty() { "true".to_owned() } else { bounded(table, &names, left / 2) })
}

/// The total length of the columns of variable length of the row `t`, without the key.
pub(crate) fn length(table: &Table) -> String {
    let columns: Vec<&str> = variable(table).collect();
    if columns.is_empty() { "0".to_owned() } else { lengths(table, &columns) }
}

fn key_bytes(step: &Step) -> usize {
    step.key.iter().map(weight).sum()
}

fn weight(value: &Value) -> usize {
    match value {
        Value::Bytes(bytes) => 2 * bytes.len() + 1,
        other => other.weight() + 1,
    }
}

/// The weight of the key and of the assignments to indexed columns.
fn indexed_bytes(step: &Step) -> usize {
    let table = &step.table;
    let is_indexed = |column: &str| table.indexes().iter().any(|index| index.columns().any(|c| c == column));
    let assigned = step.assignments.iter().filter(|assignment| is_indexed(&assignment.column));
    let indexed: usize = assigned.flat_map(|a| a.expr.operands()).filter_map(constant).map(weight).sum();
    key_bytes(step) + indexed
}

fn constant(operand: &Operand) -> Option<&Value> {
    match operand {
        Operand::Value(value) | Operand::Coalesce(_, value) => Some(value),
        Operand::Column(_) | Operand::Now { .. } => None,
    }
}

/// The conditions on the row `t` under which a step of a small plan respects every limit; `None` if there are none. `takers`
/// is the number of events that include the row.
pub(crate) fn bounds(step: &Step, takers: usize) -> Option<Vec<String>> {
    bounds_by(step, takers, None)
}

/// As [`bounds`], where the row's [`length`] is known, which is no less than that of any of its columns.
pub(crate) fn bounds_by(step: &Step, takers: usize, length: Option<&str>) -> Option<Vec<String>> {
    let table = &step.table;
    let named: usize = table.columns().iter().map(|column| column.name.len() + FIXED_BYTES).sum();
    let defaults: usize = table.columns().iter().filter_map(|c| c.default.as_ref()).map(Value::weight).sum();
    let known = ESCAPED * (KNOWN_BYTES_MAX + defaults) + named;
    let entries = table.indexes().len() * (2 * limits::SORT_KEY_BYTES_MAX + 200);
    let row = limits::ROW_BYTES_MAX.checked_sub(known + entries + 1_000)?;
    let record = limits::ROW_BYTES_MAX.checked_sub(takers * known + known + 4_000)?;
    let kept: Vec<&str> = match (step.verb, step.expect) {
        (Verb::Put, Expect::Absent) => return Some(Vec::new()),
        (Verb::Put, _) => kept(step).collect(),
        // A delete can only make the record too large.
        _ => variable(table).filter(|_| takers > 0).collect(),
    };
    if kept.is_empty() {
        return Some(Vec::new());
    }
    // A kept column counts once for itself and once in each index that it is part of, where bytes count double.
    let row = row / (1 + 2 * table.indexes().len());
    let record = record / (ESCAPED * takers.max(1));
    let most = row.min(record);
    let mut bounds =
        vec![length.map_or_else(|| bounded(table, &kept, most), |all| format!("{all} <= {most}"))];
    for index in table.indexes() {
        let touched = index.columns().any(|column| assigned(step, column).is_some());
        let part: Vec<&str> =
            kept.iter().copied().filter(|kept| index.columns().any(|column| column == *kept)).collect();
        if touched && !part.is_empty() {
            let fixed = (index.columns().count() + table.key_len()) * FIXED_BYTES;
            let left = limits::SORT_KEY_BYTES_MAX.checked_sub(INDEXED_BYTES_MAX + fixed)?;
            bounds.push(bounded(table, &part, left / 2));
        }
    }
    Some(bounds)
}

/// The columns of variable length that are not part of the key.
fn variable(table: &Table) -> impl Iterator<Item = &str> {
    table.other_columns().iter().filter(|column| is_variable(column.kind)).map(|column| column.name.as_str())
}

fn is_variable(kind: Type) -> bool {
    matches!(kind, Type::Text | Type::Bytes | Type::Json)
}

fn assigned<'s>(step: &'s Step, column: &str) -> Option<&'s Expr> {
    step.assignments.iter().find(|assignment| assignment.column == column).map(|assignment| &assignment.expr)
}

/// The columns of variable length whose value the step does not know: kept columns, and sources of others.
fn kept(step: &Step) -> impl Iterator<Item = &str> {
    variable(&step.table).filter_map(|column| match assigned(step, column) {
        None => Some(column),
        Some(Expr::Is(Operand::Column(source) | Operand::Coalesce(source, _))) => Some(source.as_str()),
        Some(_) => None,
    })
}

/// The condition that the columns' total length is at most `bytes_max`.
fn bounded(table: &Table, columns: &[&str], bytes_max: usize) -> String {
    format!("{} <= {bytes_max}", lengths(table, columns))
}

fn lengths(table: &Table, columns: &[&str]) -> String {
    let lengths = columns.iter().map(|column| {
        // JSON's text is never shorter than the form in which it is weighed.
        let cast = if table.type_of(column) == Some(Type::Json) { "::text" } else { "" };
        format!("coalesce(octet_length(t.{}{cast}), 0)", name(column))
    });
    lengths.collect::<Vec<_>>().join(" + ")
}
