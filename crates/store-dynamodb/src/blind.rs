//! Steps that need no reading: the guard travels as a condition, the assignments as an update expression.
//!
//! A step is compiled only where the server is sure to do what [`statehouse_store::eval`] would. Where that depends
//! on the row, the dependence becomes part of the condition: an increment demands that its result stays in range, a
//! write over an existing row demands that the other columns leave it room below the limit of a row. When such a
//! condition fails, the failed request returns the row, and the step is decided in memory after all. What cannot be
//! said in an expression (sums of floats and times, copies of columns, an index key of which only some columns are
//! known) is not compiled.

use aws_sdk_dynamodb::types::AttributeValue;
use statehouse_store::eval::{self, Decision};
use statehouse_store::plan::{Expect, Step, Verb};
use statehouse_store::table::VERSION;
use statehouse_store::{Expr, Operand, Plan, Type, Value, limits};
use std::sync::atomic::Ordering;

use crate::action::{Action, Clauses};
use crate::expression::{Compiler, Condition, Terms, absent, present};
use crate::item::{self, EXPIRES, LIFE};
use crate::write::{Target, Writer};

/// What an assignment is in an update expression.
enum Assigned {
    /// This attribute, or none.
    Constant(Option<Value>),
    /// This expression, as long as the condition holds.
    Computed(String, Condition),
}

impl Writer<'_> {
    /// The action of a step on a row that was not read; `None` where the row has to be read first.
    pub(crate) fn blind(&self, target: &Target<'_>) -> Option<Action> {
        let step = target.step;
        let mut terms = Terms::default();
        let guard = Compiler { table: &step.table, now: self.now }.guard(&step.guard, &mut terms);
        let action = match (step.verb, step.expect) {
            (Verb::Put, Expect::Absent) => return self.blind_insert(target),
            (Verb::Put, _) => self.blind_put(target, guard, terms)?,
            (Verb::Assert, Expect::Absent) => {
                let condition = absent(&mut terms);
                self.check(target, condition, terms)
            }
            (Verb::Assert, _) => {
                let condition = present(&mut terms).and(guard);
                self.check(target, condition, terms)
            }
            (Verb::Delete, _) => {
                // A removal is compiled as if the row were there; if it is not, the failed condition says so.
                let condition = present(&mut terms).and(guard);
                let outright = self.mark.is_none() && !target.live.logged.load(Ordering::Relaxed);
                self.delete(target, condition, terms, outright)
            }
        };
        action.fits.then_some(action)
    }

    /// An insert knows its row: there was none before.
    fn blind_insert(&self, target: &Target<'_>) -> Option<Action> {
        let alone =
            Plan::of(self.plan.tenant(), self.plan.operation()).step(target.step.clone()).build().ok()?;
        match eval::decide(&alone, self.now, &[None]).ok()? {
            Decision::Apply(effect) => {
                let row = effect.rows.into_iter().next()??;
                Some(self.put(target, None, &row))
            }
            Decision::Refuse(_) => None,
        }
    }

    fn blind_put(&self, target: &Target<'_>, guard: Condition, mut terms: Terms) -> Option<Action> {
        let (step, live) = (target.step, &target.live.table);
        let may_insert = step.expect == Expect::Either;
        let mut clauses = Clauses::default();
        let mut conditions = Vec::new();
        let mut constants: Vec<(&str, Option<Value>)> = Vec::new();
        let mut computed: Vec<&str> = Vec::new();
        for assignment in &step.assignments {
            let column = assignment.column.as_str();
            match self.assigned(step, column, &assignment.expr, &mut terms)? {
                Assigned::Constant(value) => {
                    match value.as_ref().and_then(item::attribute) {
                        Some(attribute) => clauses.set(&mut terms, column, attribute),
                        None => clauses.remove(&mut terms, column),
                    }
                    constants.push((column, value));
                }
                Assigned::Computed(expression, condition) => {
                    clauses.set.push(format!("{} = {expression}", terms.name(column)));
                    conditions.push(condition);
                    computed.push(column);
                }
            }
        }
        let one = terms.value(item::number(1));
        let version = terms.name(VERSION);
        if may_insert {
            let zero = terms.value(item::number(0));
            clauses.set.push(format!("{version} = if_not_exists({version}, {zero}) + {one}"));
            let (life, drawn) = (terms.name(LIFE), terms.value(item::number(self.life)));
            clauses.set.push(format!("{life} = if_not_exists({life}, {drawn})"));
            clauses.remove(&mut terms, EXPIRES);
            for (column, value) in live.key_columns().iter().zip(&step.key) {
                clauses.set(&mut terms, &column.name, item::attribute(value)?);
            }
            for column in live.other_columns() {
                let assigned = step.assignments.iter().any(|assignment| assignment.column == column.name);
                let declared = step.table.column(&column.name).unwrap_or(column);
                if let (false, Some(default)) = (assigned, &declared.default) {
                    // In an existing row a null stays null, and an expression cannot tell it from a new row's.
                    if !declared.required {
                        return None;
                    }
                    let (name, value) = (terms.name(&column.name), terms.value(item::attribute(default)?));
                    clauses.set.push(format!("{name} = if_not_exists({name}, {value})"));
                }
            }
        } else {
            clauses.set.push(format!("{version} = {version} + {one}"));
        }
        self.blind_indexes(target, &constants, &computed, &mut clauses, &mut terms)?;
        conditions.extend(room(step, self.plan.tenant().as_str(), &constants, &mut terms)?);
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
        Some(Action::update(&target.key.table, key, &clauses, condition, terms).weighing(weight))
    }

    /// Compiles one assignment.
    fn assigned(&self, step: &Step, column: &str, expr: &Expr, terms: &mut Terms) -> Option<Assigned> {
        let (left, right, subtract) = match expr {
            Expr::Is(Operand::Value(Value::Null)) => return Some(Assigned::Constant(None)),
            Expr::Is(Operand::Value(value)) => return Some(Assigned::Constant(Some(value.clone()))),
            Expr::Is(Operand::Now { plus_micros }) => {
                let time = eval::now_moved(self.now, *plus_micros);
                return Some(Assigned::Constant(Some(Value::Time(time))));
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
                let Assigned::Computed(sum, condition) =
                    computed(operand, terms, "", 0, |content| from - content)?
                else {
                    return None;
                };
                let from = terms.value(item::number(i64::try_from(from).ok()?));
                Some(Assigned::Computed(format!("{from} - {sum}"), condition))
            }
            (Operand::Value(Value::Int(by)), operand) => {
                let by = i128::from(*by);
                computed(operand, terms, "+", by, |content| content + by)
            }
            _ => None,
        }
    }

    /// Keeps the index attributes right, where that can be done without the row.
    fn blind_indexes(
        &self,
        target: &Target<'_>,
        constants: &[(&str, Option<Value>)],
        computed: &[&str],
        clauses: &mut Clauses,
        terms: &mut Terms,
    ) -> Option<()> {
        let (step, live) = (target.step, &target.live.table);
        let may_insert = step.expect == Expect::Either;
        let content = |name: &str| {
            let in_key = live.key_columns().iter().position(|column| column.name == name);
            match in_key {
                Some(place) => step.key.get(place),
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
                // Whether the key is too long is for the evaluation to say. Its measure of a value is at most half
                // as much again as the text here.
                let too_long = |text: &str, limit: usize| text.len() * 3 / 2 > limit;
                if too_long(&pk_text, limits::PARTITION_KEY_BYTES_MAX)
                    || too_long(&sk_text, limits::SORT_KEY_BYTES_MAX)
                {
                    return None;
                }
                clauses.set(terms, &pk, AttributeValue::S(pk_text));
                clauses.set(terms, &sk, AttributeValue::S(sk_text));
            } else if assigned > 0 {
                return None;
            } else if may_insert {
                // None is assigned: an existing row keeps its place, and a new one has none, unless by defaults.
                let defaulted = |name: &&str| {
                    let declared = step.table.column(name).or_else(|| live.column(name));
                    declared.is_some_and(|column| column.default.is_some())
                };
                if others.iter().all(defaulted) {
                    return None;
                }
            }
        }
        Some(())
    }
}

/// An integer column, plus or minus a constant, as long as the result is an integer of 64 bits.
fn computed(
    operand: &Operand,
    terms: &mut Terms,
    sign: &str,
    by: i128,
    result: impl Fn(i128) -> i128,
) -> Option<Assigned> {
    let (column, default) = match operand {
        Operand::Column(column) => (column, None),
        Operand::Coalesce(column, Value::Int(default)) => (column, Some(*default)),
        _ => return None,
    };
    let in_range = |value: i128| i64::try_from(value).is_ok();
    if default.is_some_and(|default| !in_range(result(i128::from(default)))) {
        return None;
    }
    // The result is monotone in the content, so the contents whose result is in range are an interval. Its ends are
    // where the result meets the ends of the range, and what lies beyond 64 bits needs no condition.
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
    Some(Assigned::Computed(expression, condition))
}

/// Conditions under which the row stays below its limit whatever the columns hold that are not assigned.
///
/// Each of these may take an equal share of what is left. A longer one is no error: the row is then read and weighed.
fn room(
    step: &Step,
    tenant: &str,
    constants: &[(&str, Option<Value>)],
    terms: &mut Terms,
) -> Option<Vec<Condition>> {
    let mut taken = 100 + 2 * (limits::PARTITION_KEY_BYTES_MAX + limits::SORT_KEY_BYTES_MAX) + tenant.len();
    taken += step.table.columns().iter().map(|column| column.name.len()).sum::<usize>();
    for index in step.table.indexes() {
        taken += limits::PARTITION_KEY_BYTES_MAX + limits::SORT_KEY_BYTES_MAX + 2 * index.name.len();
    }
    let mut open: Vec<&str> = Vec::new();
    for column in step.table.other_columns() {
        let constant = constants.iter().find(|(name, _)| *name == column.name);
        match (constant, column.kind) {
            (Some((_, value)), _) => taken += value.as_ref().map_or(0, Value::weight),
            (None, Type::Text | Type::Bytes | Type::Json) => open.push(&column.name),
            (None, _) => taken += 27,
        }
    }
    let left = limits::ROW_BYTES_MAX.checked_sub(taken)?;
    let Some(share) = left.checked_div(open.len()) else { return Some(Vec::new()) };
    // `size` of a text may count its characters, which are up to four bytes each.
    let share = i64::try_from(share / 4).ok()?;
    let conditions = open.into_iter().map(|column| {
        let size = format!("size({}) <= {}", terms.name(column), terms.value(item::number(share)));
        Condition::missing(terms, column).or(Condition::Leaf(size))
    });
    Some(conditions.collect())
}
