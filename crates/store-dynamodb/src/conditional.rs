//! Steps that need no read: the guard is sent as a condition, the assignments as an update expression.
//!
//! A step is compiled only if the server's result is certainly that of [`statehouse_store::eval`]. If the result depends
//! on the row, the dependence becomes a part of the condition: an increment requires that its result stays in range, and
//! a write over an existing row requires that the other columns leave enough of the row limit. If such a condition
//! fails, the server returns the row, and the step is evaluated in memory. Steps that have no expression (sums of floats and
//! times, copies of columns, index keys of which only some columns are assigned) are not compiled.

use aws_sdk_dynamodb::types::AttributeValue;
use statehouse_store::eval::{self, Decision};
use statehouse_store::plan::{Expect, Step, Verb};
use statehouse_store::table::VERSION;
use statehouse_store::{Expr, Operand, Plan, Table, Type, Value, limits};
use std::sync::atomic::Ordering;

use crate::expression::{Condition, ExpressionPlaceholders, GuardCompiler, absent, present};
use crate::item::{self, EXPIRES, INCARNATION};
use crate::item_write::{ItemWrite, UpdateClauses};
use crate::write::{StepTarget, StepWriter};

/// An assignment in an update expression.
enum CompiledAssignment {
    /// This value; `None` for null.
    Constant(Option<Value>),
    /// This expression, which is right if the condition holds.
    Computed(String, Condition),
}

/// The compiled assignments of one step.
#[derive(Default)]
struct Assignments<'s> {
    constants: Vec<(&'s str, Option<Value>)>,
    /// Columns whose new value depends on the row.
    computed: Vec<&'s str>,
    conditions: Vec<Condition>,
}

impl StepWriter<'_> {
    /// The write of a step on a row that was not read; `None` if the row has to be read first.
    pub(crate) fn conditional(&self, target: &StepTarget<'_>) -> Option<ItemWrite> {
        let step = target.step;
        let mut terms = ExpressionPlaceholders::default();
        let guard = GuardCompiler { table: &step.table, now: self.now }.guard(&step.guard, &mut terms);
        let action = match (step.verb, step.expect) {
            (Verb::Put, Expect::Absent) => return self.conditional_insert(target),
            (Verb::Put, _) => self.conditional_put(target, guard, terms)?,
            (Verb::Assert, Expect::Absent) => {
                let condition = absent(&mut terms);
                self.check(target, condition, terms)
            }
            (Verb::Assert, _) => {
                let condition = present(&mut terms).and(guard);
                self.check(target, condition, terms)
            }
            (Verb::Delete, _) => {
                // A removal assumes that the row exists. If it does not, the condition fails.
                let condition = present(&mut terms).and(guard);
                let without_tombstone = self.mark.is_none() && !target.live.logged.load(Ordering::Relaxed);
                self.delete(target, condition, terms, without_tombstone)
            }
        };
        action.fits.then_some(action)
    }

    /// An insert can be evaluated on an absent row.
    fn conditional_insert(&self, target: &StepTarget<'_>) -> Option<ItemWrite> {
        let single =
            Plan::of(self.plan.tenant(), self.plan.operation()).step(target.step.clone()).build().ok()?;
        match eval::decide(&single, self.now, &[None]).ok()? {
            Decision::Apply(effect) => {
                let row = effect.rows.into_iter().next()??;
                self.put(target, None, &row).ok()
            }
            Decision::Refuse(_) => None,
        }
    }

    fn conditional_put(
        &self,
        target: &StepTarget<'_>,
        guard: Condition,
        mut terms: ExpressionPlaceholders,
    ) -> Option<ItemWrite> {
        let step = target.step;
        let may_insert = step.expect == Expect::Either;
        let mut clauses = UpdateClauses::default();
        let assignments = self.assignments(step, &mut clauses, &mut terms)?;
        let Assignments { constants, computed, mut conditions } = assignments;
        let one = terms.value(item::number(1));
        let version = terms.name(VERSION);
        if may_insert {
            let zero = terms.value(item::number(0));
            clauses.set.push(format!("{version} = if_not_exists({version}, {zero}) + {one}"));
            self.insert_clauses(target, &mut clauses, &mut terms)?;
        } else {
            clauses.set.push(format!("{version} = {version} + {one}"));
        }
        self.index_clauses(target, &constants, &computed, &mut clauses, &mut terms)?;
        conditions.extend(size_conditions(step, self.plan.tenant().as_str(), &constants, &mut terms)?);
        let row = match (may_insert, step.guard.conjuncts().is_empty()) {
            (false, _) => present(&mut terms).and(guard),
            (true, false) => absent(&mut terms).or(guard),
            (true, true) => Condition::All(Vec::new()),
        };
        let condition = self.mark(&mut terms, &mut clauses, row.and(Condition::All(conditions)));
        let weight =
            constants.iter().map(|(name, value)| name.len() + value.as_ref().map_or(0, Value::weight));
        let weight = 100 + step.key.iter().map(Value::weight).sum::<usize>() + weight.sum::<usize>();
        let key = target.key.attributes();
        Some(ItemWrite::update(&target.key.table, key, &clauses, condition, terms).weighing(weight))
    }

    /// Compiles all assignments of a step.
    fn assignments<'s>(
        &self,
        step: &'s Step,
        clauses: &mut UpdateClauses,
        terms: &mut ExpressionPlaceholders,
    ) -> Option<Assignments<'s>> {
        let mut all = Assignments::default();
        for assignment in &step.assignments {
            let column = assignment.column.as_str();
            match self.assigned(step, column, &assignment.expr, terms)? {
                CompiledAssignment::Constant(value) => {
                    match value.as_ref().and_then(item::attribute) {
                        Some(attribute) => clauses.set(terms, column, attribute),
                        None => clauses.remove(terms, column),
                    }
                    all.constants.push((column, value));
                }
                CompiledAssignment::Computed(expression, condition) => {
                    clauses.set.push(format!("{} = {expression}", terms.name(column)));
                    all.conditions.push(condition);
                    all.computed.push(column);
                }
            }
        }
        Some(all)
    }

    /// The clauses of an upsert that apply only if it inserts the row: incarnation, key columns and defaults.
    fn insert_clauses(
        &self,
        target: &StepTarget<'_>,
        clauses: &mut UpdateClauses,
        terms: &mut ExpressionPlaceholders,
    ) -> Option<()> {
        let (step, live) = (target.step, &target.live.table);
        let (name, random) = (terms.name(INCARNATION), terms.value(item::number(self.incarnation)));
        clauses.set.push(format!("{name} = if_not_exists({name}, {random})"));
        clauses.remove(terms, EXPIRES);
        for (column, value) in live.key_columns().iter().zip(&step.key) {
            clauses.set(terms, &column.name, item::attribute(value)?);
        }
        for column in live.other_columns() {
            let assigned = step.assignments.iter().any(|assignment| assignment.column == column.name);
            let declared = step.table.column(&column.name).unwrap_or(column);
            if let (false, Some(default)) = (assigned, &declared.default) {
                // A null of an existing row stays null. An expression cannot tell it from the null of a new row.
                if !declared.required {
                    return None;
                }
                let (name, value) = (terms.name(&column.name), terms.value(item::attribute(default)?));
                clauses.set.push(format!("{name} = if_not_exists({name}, {value})"));
            }
        }
        Some(())
    }

    /// Compiles one assignment.
    fn assigned(
        &self,
        step: &Step,
        column: &str,
        expr: &Expr,
        terms: &mut ExpressionPlaceholders,
    ) -> Option<CompiledAssignment> {
        let (left, right, subtract) = match expr {
            Expr::Is(Operand::Value(Value::Null)) => return Some(CompiledAssignment::Constant(None)),
            Expr::Is(Operand::Value(value)) => {
                return Some(CompiledAssignment::Constant(Some(value.clone())));
            }
            Expr::Is(Operand::Now { plus_micros }) => {
                let time = eval::now_moved(self.now, *plus_micros);
                return Some(CompiledAssignment::Constant(Some(Value::Time(time))));
            }
            Expr::Is(_) => return None,
            Expr::Add(left, right) => (left, right, false),
            Expr::Subtract(left, right) => (left, right, true),
        };
        if step.table.type_of(column) != Some(Type::Int) {
            return None;
        }
        match (left, right) {
            (operand, Operand::Value(Value::Int(by))) => {
                let by = i128::from(*by);
                computed(operand, terms, if subtract { "-" } else { "+" }, by, |content| {
                    if subtract { content - by } else { content + by }
                })
            }
            (Operand::Value(Value::Int(from)), operand) if subtract => {
                let from = i128::from(*from);
                let CompiledAssignment::Computed(sum, condition) =
                    computed(operand, terms, "", 0, |content| from - content)?
                else {
                    return None;
                };
                let from = terms.value(item::number(i64::try_from(from).ok()?));
                Some(CompiledAssignment::Computed(format!("{from} - {sum}"), condition))
            }
            (Operand::Value(Value::Int(by)), operand) => {
                let by = i128::from(*by);
                computed(operand, terms, "+", by, |content| content + by)
            }
            _ => None,
        }
    }

    /// Sets and removes the index attributes, if that is possible without the row.
    fn index_clauses(
        &self,
        target: &StepTarget<'_>,
        constants: &[(&str, Option<Value>)],
        computed: &[&str],
        clauses: &mut UpdateClauses,
        terms: &mut ExpressionPlaceholders,
    ) -> Option<()> {
        let (step, live) = (target.step, &target.live.table);
        let may_insert = step.expect == Expect::Either;
        let content = |name: &str| {
            let in_key = live.key_columns().iter().position(|column| column.name == name);
            match in_key {
                Some(index) => step.key.get(index),
                None => constants.iter().find(|(column, _)| *column == name)?.1.as_ref(),
            }
        };
        for index in live.indexes() {
            let is_key = |name: &str| live.key_columns().iter().any(|column| column.name == name);
            let is_constant = |name: &str| constants.iter().any(|(column, _)| *column == name);
            let others: Vec<&str> = index.columns().filter(|name| !is_key(name)).collect();
            if others.iter().any(|name| computed.contains(name)) {
                return None;
            }
            let (pk, sk) = item::index_names(&index.name);
            let assigned = others.iter().filter(|name| is_constant(name)).count();
            let becomes_null = others.iter().any(|name| is_constant(name) && content(name).is_none());
            if becomes_null {
                clauses.remove(terms, &pk);
                clauses.remove(terms, &sk);
            } else if assigned == others.len() {
                if others.is_empty() && !may_insert {
                    continue;
                }
                let (pk_text, sk_text) = item::index_key(live, index, self.plan.tenant(), content)?;
                if may_exceed(&pk_text, limits::PARTITION_KEY_BYTES_MAX)
                    || may_exceed(&sk_text, limits::SORT_KEY_BYTES_MAX)
                {
                    return None;
                }
                clauses.set(terms, &pk, AttributeValue::S(pk_text));
                clauses.set(terms, &sk, AttributeValue::S(sk_text));
            } else if assigned > 0 || (may_insert && all_have_defaults(step, live, &others)) {
                return None;
            }
            // No column is assigned: an existing row keeps its index key, and a new row has none.
        }
        Some(())
    }
}

/// Whether a key may exceed its limit. The evaluation decides that: its measure of a value is at most 1.5 times the
/// length of the text here.
fn may_exceed(text: &str, limit: usize) -> bool {
    text.len() * 3 / 2 > limit
}

/// Whether a new row would have values in all of these columns without an assignment.
fn all_have_defaults(step: &Step, live: &Table, columns: &[&str]) -> bool {
    columns.iter().all(|name| {
        let declared = step.table.column(name).or_else(|| live.column(name));
        declared.is_some_and(|column| column.default.is_some())
    })
}

/// An integer column plus or minus a constant, under the condition that the result has 64 bits.
fn computed(
    operand: &Operand,
    terms: &mut ExpressionPlaceholders,
    sign: &str,
    by: i128,
    result: impl Fn(i128) -> i128,
) -> Option<CompiledAssignment> {
    let (column, default) = match operand {
        Operand::Column(column) => (column, None),
        Operand::Coalesce(column, Value::Int(default)) => (column, Some(*default)),
        _ => return None,
    };
    let in_range = |value: i128| i64::try_from(value).is_ok();
    if default.is_some_and(|default| !in_range(result(i128::from(default)))) {
        return None;
    }
    // The result is monotone in the column's value, so the values whose result is in range are an interval. A bound
    // beyond 64 bits needs no condition.
    let (min, max) = (i128::from(i64::MIN), i128::from(i64::MAX));
    let rising = result(1) > result(0);
    let offset = result(0);
    let (low, high) = if rising { (min - offset, max - offset) } else { (offset - max, offset - min) };
    let mut bounds = Vec::new();
    if low > min {
        bounds.push(Condition::compare(terms, column, ">=", item::number(i64::try_from(low).ok()?)));
    }
    if high < max {
        bounds.push(Condition::compare(terms, column, "<=", item::number(i64::try_from(high).ok()?)));
    }
    if bounds.is_empty() {
        bounds.push(Condition::exists(terms, column));
    }
    let bounds = Condition::All(bounds);
    let name = terms.name(column);
    let (content, condition) = match default {
        None => (name, bounds),
        Some(default) => {
            let default = terms.value(item::number(default));
            (format!("if_not_exists({name}, {default})"), Condition::missing(terms, column).or(bounds))
        }
    };
    let expression = if sign.is_empty() {
        content
    } else {
        format!("{content} {sign} {}", terms.value(item::number(i64::try_from(by).ok()?)))
    };
    Some(CompiledAssignment::Computed(expression, condition))
}

/// Conditions under which the row is below its limit, for any content of the columns that are not assigned.
///
/// Each of these columns may use an equal share of the remaining bytes. If one is longer, the condition fails, and the row
/// is read and measured.
fn size_conditions(
    step: &Step,
    tenant: &str,
    constants: &[(&str, Option<Value>)],
    terms: &mut ExpressionPlaceholders,
) -> Option<Vec<Condition>> {
    let mut used = 100 + 2 * (limits::PARTITION_KEY_BYTES_MAX + limits::SORT_KEY_BYTES_MAX) + tenant.len();
    used += step.table.columns().iter().map(|column| column.name.len()).sum::<usize>();
    for index in step.table.indexes() {
        used += limits::PARTITION_KEY_BYTES_MAX + limits::SORT_KEY_BYTES_MAX + 2 * index.name.len();
    }
    let mut unassigned: Vec<&str> = Vec::new();
    for column in step.table.other_columns() {
        let constant = constants.iter().find(|(name, _)| *name == column.name);
        match (constant, column.kind) {
            (Some((_, value)), _) => used += value.as_ref().map_or(0, Value::weight),
            (None, Type::Text | Type::Bytes | Type::Json) => unassigned.push(&column.name),
            (None, _) => used += 27,
        }
    }
    let left = limits::ROW_BYTES_MAX.checked_sub(used)?;
    let Some(share) = left.checked_div(unassigned.len()) else { return Some(Vec::new()) };
    // `size` of a text may count its characters, which are up to four bytes each.
    let share = i64::try_from(share / 4).ok()?;
    let conditions = unassigned.into_iter().map(|column| {
        let size = format!("size({}) <= {}", terms.name(column), terms.value(item::number(share)));
        Condition::missing(terms, column).or(Condition::Leaf(size))
    });
    Some(conditions.collect())
}
