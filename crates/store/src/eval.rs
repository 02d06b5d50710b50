//! Evaluation of guards and assignments: pure, and the one meaning that every engine keeps.
//!
//! [`decide`] takes a plan, the engine's clock and the rows as they are, and says what the plan makes of them. The
//! model store is this function and a map. The SQL engines run it on rows that they hold locked; what an engine
//! compiles instead has to agree with it, and the differential tests see to that.

use std::borrow::Cow;
use std::sync::Arc;

use crate::bug;
use crate::bug::Bug;
use crate::error::StoreError;
use crate::guard::{Expr, Guard, Operand};
use crate::limits;
use crate::log::{Event, EventTemplate};
use crate::outcome::{Reason, Refused};
use crate::plan::{Expect, Plan, Step, Verb};
use crate::row::Row;
use crate::table::VERSION;
use crate::time::Time;
use crate::value::{Value, admit_float};

/// What a plan makes of the rows it names.
#[derive(Clone, Debug, PartialEq)]
pub enum Decision {
    /// All conditions hold; these rows and events result.
    Apply(StepEffect),
    /// A condition fails.
    Refuse(Refused),
}

/// The result of a plan whose conditions hold.
#[derive(Clone, Debug, PartialEq)]
pub struct StepEffect {
    /// The row of each step after the plan; `None` where there is none.
    pub rows: Vec<Option<Row>>,
    /// The events of the log entry, complete; empty if there is no entry.
    pub events: Vec<Event>,
}

/// Decides a plan. `current` has the row of each step, in their order.
pub fn decide(plan: &Plan, now: Time, current: &[Option<Row>]) -> Result<Decision, StoreError> {
    if current.len() != plan.steps().len() {
        return Err(bug!("{} rows for a plan of {} steps", current.len(), plan.steps().len()).into());
    }
    let mut rows = Vec::with_capacity(plan.steps().len());
    let mut bytes = 0;
    for (number, (step, row)) in plan.steps().iter().zip(current).enumerate() {
        let row = row.as_ref();
        match decide_step(plan, step, now, row)? {
            Ok(result) => {
                if let (Some(result), Verb::Put) = (&result, step.verb) {
                    bytes += limits::check_row(result)?;
                }
                rows.push(result);
            }
            Err(reason) => {
                return Ok(Decision::Refuse(Refused { step: number, reason, current: row.cloned() }));
            }
        }
    }
    let mut events = Vec::new();
    if let Some(entry) = plan.entry() {
        let row_of = |step: usize| {
            let deletes = plan.steps().get(step).is_some_and(|step| step.verb == Verb::Delete);
            let side = if deletes { current } else { rows.as_slice() };
            side.get(step).and_then(Option::as_ref)
        };
        events = entry.events.iter().map(|draft| finish_event(draft, row_of)).collect();
        bytes += limits::check_record(plan.operation(), &events)?;
        let weights = events.iter().map(limits::event_weight);
        bytes += limits::further_weight(entry, weights);
    }
    limits::check_plan_bytes(plan.operation(), bytes)?;
    Ok(Decision::Apply(StepEffect { rows, events }))
}

/// The row that a step leaves where there was none; `None` if it leaves none, or refuses to.
pub fn made(plan: &Plan, step: &Step, now: Time) -> Option<Row> {
    decide_step(plan, step, now, None).ok()?.ok().flatten()
}

/// Completes an event with the row it asks for.
pub fn finish_event<'a>(draft: &EventTemplate, row_of: impl FnOnce(usize) -> Option<&'a Row>) -> Event {
    let mut data = draft.data.clone();
    if let Some(step) = draft.row_of {
        data.insert("row".to_owned(), row_of(step).map_or(serde_json::Value::Null, Row::to_json));
    }
    Event { name: draft.name.clone(), data: data.into(), actor: draft.actor.clone() }
}

/// The row that a step leaves, or why it is refused.
fn decide_step(
    plan: &Plan,
    step: &Step,
    now: Time,
    row: Option<&Row>,
) -> Result<Result<Option<Row>, Reason>, Bug> {
    match (row, step.expect) {
        (None, Expect::Present) => return Ok(Err(Reason::Absent)),
        (Some(_), Expect::Absent) => return Ok(Err(Reason::Present)),
        (Some(row), _) => {
            // Without a column of the guard, the guard would be evaluated as if the column were null.
            if !Arc::ptr_eq(row.table(), &step.table) && *row.table() != step.table {
                return Err(bug!("the row {row} has the columns of another table than its step"));
            }
            if let Some((conjunct, guard)) = first_failure(&step.guard, row, now) {
                return Ok(Err(Reason::Guard { conjunct, guard: Box::new(guard.clone()) }));
            }
        }
        (None, _) => {}
    }
    Ok(match step.verb {
        Verb::Assert => Ok(row.cloned()),
        Verb::Delete => Ok(None),
        Verb::Put => put(plan, step, now, row)?.map(Some),
    })
}

/// The first conjunct that does not hold for the row.
pub fn first_failure<'a>(guard: &'a Guard, row: &Row, now: Time) -> Option<(usize, &'a Guard)> {
    guard.conjuncts().iter().enumerate().find(|(_, conjunct)| !holds(conjunct, row, now))
}

/// The row that a put leaves.
fn put(plan: &Plan, step: &Step, now: Time, row: Option<&Row>) -> Result<Result<Row, Reason>, Bug> {
    let table = &step.table;
    let mut assigned: Vec<Option<Value>> = vec![None; table.columns().len()];
    for assignment in &step.assignments {
        let name = assignment.column.as_str();
        let index = table.position(name);
        let target = index.and_then(|index| Some((table.columns().get(index)?, assigned.get_mut(index)?)));
        let Some((column, slot)) = target else {
            return Err(bug!("a step assigns {name}, which table {table} does not have"));
        };
        let Some(value) = compute(&assignment.expr, row, now)? else {
            return Ok(Err(Reason::Overflow { column: name.to_owned() }));
        };
        if value.is_null() && column.required {
            return Ok(Err(Reason::Null { column: name.to_owned() }));
        }
        *slot = Some(value);
    }
    // A column that the step does not assign keeps its value. A new row has the key, and defaults or null elsewhere.
    let kept = |index: usize| match row {
        _ if index < step.key.len() => step.key.get(index).cloned(),
        Some(row) => row.values().get(index).cloned(),
        None => table.columns().get(index).map(|column| column.default.clone().unwrap_or(Value::Null)),
    };
    let assigned = assigned.into_iter().enumerate();
    let values: Option<Vec<Value>> = assigned.map(|(index, value)| value.or_else(|| kept(index))).collect();
    let Some(values) = values else {
        return Err(bug!("a row of table {table} has fewer values than columns"));
    };
    let version = row.map_or(1, |row| row.version() + 1);
    Ok(Ok(Row::new(table.clone(), plan.tenant().clone(), values, version)))
}

/// Whether a guard holds for a row.
pub fn holds(guard: &Guard, row: &Row, now: Time) -> bool {
    let content = |name: &str| read(Some(row), name);
    match guard {
        Guard::Compare(left, comparison, right) => {
            let (left, right) = (resolve(left, Some(row), now), resolve(right, Some(row), now));
            left.compare(&right).is_some_and(|order| comparison.accepts(order))
        }
        Guard::Null(column) => content(column).is_null(),
        Guard::NotNull(column) => !content(column).is_null(),
        Guard::In(column, values) => {
            let content = content(column);
            values.iter().any(|value| content.compare(value).is_some_and(std::cmp::Ordering::is_eq))
        }
        Guard::NotIn(column, values) => {
            let content = content(column);
            !content.is_null()
                && values.iter().all(|value| content.compare(value).is_some_and(std::cmp::Ordering::is_ne))
        }
        Guard::All(parts) => parts.iter().all(|part| holds(part, row, now)),
        Guard::Any(parts) => parts.iter().any(|part| holds(part, row, now)),
    }
}

/// A column of a row; null where there is no row.
fn read<'a>(row: Option<&'a Row>, column: &str) -> Cow<'a, Value> {
    match row {
        None => Cow::Owned(Value::Null),
        Some(row) if column == VERSION => Cow::Owned(Value::Int(row.version())),
        Some(row) => row.get(column).map_or_else(
            || {
                drop(bug!("table {} has no column {column}", row.table()));
                Cow::Owned(Value::Null)
            },
            Cow::Borrowed,
        ),
    }
}

fn resolve<'a>(operand: &'a Operand, row: Option<&'a Row>, now: Time) -> Cow<'a, Value> {
    match operand {
        Operand::Column(column) => read(row, column),
        Operand::Coalesce(column, default) => {
            let content = read(row, column);
            if content.is_null() { Cow::Borrowed(default) } else { content }
        }
        Operand::Value(value) => Cow::Borrowed(value),
        Operand::Now { plus_micros } => Cow::Owned(Value::Time(now_moved(now, *plus_micros))),
    }
}

/// The clock moved by an offset, held inside the range of times.
pub fn now_moved(now: Time, plus_micros: i64) -> Time {
    let moved = now.micros().saturating_add(plus_micros);
    Time::from_micros(moved.clamp(Time::MIN.micros(), Time::MAX.micros()))
}

/// The result of an assignment; `None` when it lies outside the type's range.
pub fn compute(expr: &Expr, row: Option<&Row>, now: Time) -> Result<Option<Value>, Bug> {
    let (left, right, subtract) = match expr {
        Expr::Is(operand) => return Ok(Some(resolve(operand, row, now).into_owned())),
        Expr::Add(left, right) => (left, right, false),
        Expr::Subtract(left, right) => (left, right, true),
    };
    Ok(match (&*resolve(left, row, now), &*resolve(right, row, now)) {
        (Value::Null, _) | (_, Value::Null) => Some(Value::Null),
        (Value::Int(a), Value::Int(b)) => {
            if subtract { a.checked_sub(*b) } else { a.checked_add(*b) }.map(Value::Int)
        }
        (Value::Float(a), Value::Float(b)) => {
            admit_float(if subtract { a - b } else { a + b }).ok().map(Value::Float)
        }
        (Value::Time(time), Value::Int(micros)) => {
            let micros = if subtract { micros.checked_neg() } else { Some(*micros) };
            micros.and_then(|micros| time.checked_add_micros(micros)).map(Value::Time)
        }
        (left, right) => return Err(bug!("`{expr}` of {left} and {right}, which a plan is checked for")),
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::guard::{Comparison, column, is_null};
    use crate::row::Tenant;
    use crate::table::Table;
    use crate::value::Type;
    use proptest::prelude::*;

    /// SQL's three truth values, written out, to compare the two-valued evaluation with.
    #[derive(Clone, Copy, PartialEq, Eq, Debug)]
    enum Truth {
        True,
        False,
        Unknown,
    }

    fn kleene(guard: &Guard, row: &Row) -> Truth {
        let of = |bool| if bool { Truth::True } else { Truth::False };
        match guard {
            Guard::Compare(left, comparison, right) => {
                let now = Time::from_micros(0);
                match resolve(left, Some(row), now).compare(&resolve(right, Some(row), now)) {
                    None => Truth::Unknown,
                    Some(order) => of(comparison.accepts(order)),
                }
            }
            Guard::Null(column) => of(read(Some(row), column).is_null()),
            Guard::NotNull(column) => of(!read(Some(row), column).is_null()),
            Guard::In(column, values) => match &*read(Some(row), column) {
                Value::Null => Truth::Unknown,
                content => of(values.contains(content)),
            },
            Guard::NotIn(column, values) => match &*read(Some(row), column) {
                Value::Null => Truth::Unknown,
                content => of(!values.contains(content)),
            },
            Guard::All(parts) => {
                let truths: Vec<Truth> = parts.iter().map(|part| kleene(part, row)).collect();
                if truths.contains(&Truth::False) {
                    Truth::False
                } else if truths.contains(&Truth::Unknown) {
                    Truth::Unknown
                } else {
                    Truth::True
                }
            }
            Guard::Any(parts) => {
                let truths: Vec<Truth> = parts.iter().map(|part| kleene(part, row)).collect();
                if truths.contains(&Truth::True) {
                    Truth::True
                } else if truths.contains(&Truth::Unknown) {
                    Truth::Unknown
                } else {
                    Truth::False
                }
            }
        }
    }

    fn any_guard() -> impl Strategy<Value = Guard> {
        let name = prop_oneof![Just("a"), Just("b")];
        let leaf = prop_oneof![
            (name.clone(), 0..6_usize, -1..2_i64)
                .prop_map(|(name, op, n)| column(name).compare(Comparison::ALL[op], n)),
            (0..6_usize).prop_map(|op| column("a").compare(Comparison::ALL[op], column("b"))),
            name.clone().prop_map(is_null),
            (name.clone(), proptest::collection::vec(-1..2_i64, 1..3))
                .prop_map(|(name, values)| crate::guard::is_in(name, values)),
        ];
        leaf.prop_recursive(3, 12, 3, |inner| {
            prop_oneof![
                proptest::collection::vec(inner.clone(), 0..3).prop_map(Guard::All),
                proptest::collection::vec(inner.clone(), 0..3).prop_map(Guard::Any),
                inner.prop_map(Guard::negated),
            ]
        })
    }

    fn row(a: Option<i64>, b: Option<i64>) -> Row {
        let table = Table::named("t")
            .partition("id", Type::Int)
            .optional("a", Type::Int)
            .optional("b", Type::Int)
            .build()
            .unwrap();
        let values = vec![Value::Int(1), a.into(), b.into()];
        Row::new(table, Tenant::new("t").unwrap(), values, 1)
    }

    proptest! {
        #[test]
        fn two_values_decide_as_three_would(
            guard in any_guard(),
            a in proptest::option::of(-1..2_i64),
            b in proptest::option::of(-1..2_i64),
        ) {
            let row = row(a, b);
            let truth = kleene(&guard, &row);
            prop_assert_eq!(holds(&guard, &row, Time::from_micros(0)), truth == Truth::True);
            let negated = guard.negated();
            let expected = match truth {
                Truth::True => Truth::False,
                Truth::False => Truth::True,
                Truth::Unknown => Truth::Unknown,
            };
            prop_assert_eq!(kleene(&negated, &row), expected);
        }
    }
}
