//! What compiled plans have in common, their *shape*, and what each brings along, its *constants*.
//!
//! The text of a compiled statement depends on the shape alone, so that it is prepared once. The constants of a plan
//! are listed in one order, which the statement's writer follows ([`crate::compile`]): the key, the assignments,
//! the guard, the log entry. Lists (`in`) are part of the shape, with their content, because an array of arrays cannot
//! be taken apart by rows.

use statehouse_store::bug;
use statehouse_store::log::{has_several_subjects, partition_of};
use statehouse_store::plan::{Assignment, Expect, Verb};
use statehouse_store::table::VERSION;
use statehouse_store::{Expr, Guard, Operand, Plan, Row, Step, Table, Time, Type, Value, eval};

use crate::size_bounds;
use crate::sql::{Arg, type_name};

/// A value that a plan brings along, and the type under which it is sent.
#[derive(Clone, Debug)]
pub(crate) struct Constant<'p> {
    pub arg: Arg<'p>,
    pub kind: &'static str,
}

/// The one step of a plan that can be compiled.
pub(crate) fn compilable(plan: &Plan) -> Option<&Step> {
    let [step] = plan.steps() else { return None };
    if has_several_subjects(plan) {
        return None;
    }
    let put = step.verb == Verb::Put;
    let delete = step.verb == Verb::Delete && step.expect == Expect::Present;
    // The server looks for nulls in what would be inserted before it finds the row that is there already.
    let insertable = step.expect == Expect::Present || !has_null_when_new(step);
    // What an insert computes has to be known here, and a sum may overflow.
    let sums = inserts(step) && step.assignments.iter().any(|assignment| is_sum(&assignment.expr));
    let known = || !sums || eval::made(plan, step, Time::MIN).is_some();
    ((put || delete) && is_exact(step) && insertable && size_bounds::is_small(plan, step) && known())
        .then_some(step)
}

/// Whether what a step assigns is the same in SQL as here.
pub(crate) fn is_exact(step: &Step) -> bool {
    let is_int = |column: &str| step.table.type_of(column) == Some(Type::Int);
    step.assignments.iter().all(|assignment| !is_sum(&assignment.expr) || is_int(&assignment.column))
}

fn is_sum(expr: &Expr) -> bool {
    !matches!(expr, Expr::Is(_))
}

/// Whether a step inserts. Of the row that it leaves everything is known here, unless the server's clock is.
pub(crate) fn inserts(step: &Step) -> bool {
    step.verb == Verb::Put && step.expect == Expect::Absent
}

/// Whether an insert's assignment sets its column by the server's clock, so that the row is not known here.
pub(crate) fn is_stamped(assignment: &Assignment, now: Option<Time>) -> bool {
    now.is_none() && assignment.expr.operands().any(|operand| matches!(operand, Operand::Now { .. }))
}

/// Whether the row of an insert is to stand in the record, where the server has to complete it.
pub(crate) fn stamps_record(plan: &Plan, step: &Step, now: Option<Time>) -> bool {
    inserts(step) && takers(plan).next().is_some() && step.assignments.iter().any(|a| is_stamped(a, now))
}

/// Whether an assignment gives null for a row that is not there, to a column that refuses null.
fn has_null_when_new(step: &Step) -> bool {
    step.assignments.iter().any(|assignment| {
        let required = step.table.column(&assignment.column).is_some_and(|column| column.required);
        required && assignment.expr.operands().any(|operand| matches!(operand, Operand::Column(_)))
    })
}

/// Which events of a plan take in the row of its step.
pub(crate) fn takers(plan: &Plan) -> impl Iterator<Item = usize> {
    let events = plan.entry().into_iter().flat_map(|entry| &entry.events);
    events.enumerate().filter(|(_, draft)| draft.row_of.is_some()).map(|(index, _)| index)
}

/// Whether the statement has to give the row back. What it inserted is known without.
pub(crate) fn returns_row(plan: &Plan, step: &Step) -> bool {
    !inserts(step) && (takers(plan).next().is_some() || (step.verb == Verb::Put && plan.returns_rows()))
}

/// Whether two plans that can be compiled make the same statement.
pub(crate) fn are_alike(left: &Plan, right: &Plan) -> bool {
    let ([a, others_of_a @ ..], [b, others_of_b @ ..]) = (left.steps(), right.steps()) else { return false };
    others_of_a.is_empty() == others_of_b.is_empty()
        && left.entry().is_some() == right.entry().is_some()
        && left.returns_rows() == right.returns_rows()
        && takers(left).eq(takers(right))
        && steps_are_alike(a, b)
}

/// Whether two steps differ only in their constants.
pub(crate) fn steps_are_alike(a: &Step, b: &Step) -> bool {
    crate::batch::same(&a.table, &b.table)
        && (a.verb, a.expect) == (b.verb, b.expect)
        && a.assignments.len() == b.assignments.len()
        && a.assignments.iter().zip(&b.assignments).all(|(a, b)| {
            let sums = (matches!(a.expr, Expr::Add(..)), matches!(b.expr, Expr::Add(..)));
            let plain = (matches!(a.expr, Expr::Is(_)), matches!(b.expr, Expr::Is(_)));
            a.column == b.column
                && sums.0 == sums.1
                && plain.0 == plain.1
                && a.expr.operands().zip(b.expr.operands()).all(|(a, b)| operands_alike(a, b))
        })
        && guards_alike(&a.guard, &b.guard)
}

fn operands_alike(left: &Operand, right: &Operand) -> bool {
    match (left, right) {
        (Operand::Column(a), Operand::Column(b)) | (Operand::Coalesce(a, _), Operand::Coalesce(b, _)) => {
            a == b
        }
        (Operand::Value(_), Operand::Value(_)) => true,
        (Operand::Now { plus_micros: a }, Operand::Now { plus_micros: b }) => (*a == 0) == (*b == 0),
        _ => false,
    }
}

fn guards_alike(left: &Guard, right: &Guard) -> bool {
    match (left, right) {
        (Guard::Compare(a1, a, a2), Guard::Compare(b1, b, b2)) => {
            a == b && operands_alike(a1, b1) && operands_alike(a2, b2)
        }
        (Guard::All(a), Guard::All(b)) | (Guard::Any(a), Guard::Any(b)) => {
            a.len() == b.len() && a.iter().zip(b).all(|(a, b)| guards_alike(a, b))
        }
        // What is left has columns and lists, which are part of the shape.
        (Guard::Compare(..) | Guard::All(_) | Guard::Any(_), _) => false,
        (a, b) => a == b,
    }
}

/// The lists in a guard, in their order, with their types.
pub(crate) fn lists(step: &Step) -> Vec<(&[Value], &'static str)> {
    let mut lists = Vec::new();
    step.guard.leaves(&mut |leaf| {
        if let Guard::In(column, values) | Guard::NotIn(column, values) = leaf {
            lists.push((values.as_slice(), step.table.type_of(column).map_or("text", type_name)));
        }
    });
    lists
}

/// The type that an operand has by itself; a constant takes the type of what it stands beside.
pub(crate) fn operand_type(table: &Table, operand: &Operand) -> Option<Type> {
    match operand {
        Operand::Column(column) | Operand::Coalesce(column, _) => table.type_of(column),
        Operand::Now { .. } => Some(Type::Time),
        Operand::Value(_) => None,
    }
}

/// The type of a comparison's operands.
pub(crate) fn compared_type(table: &Table, left: &Operand, right: &Operand) -> Type {
    operand_type(table, left).or_else(|| operand_type(table, right)).unwrap_or(Type::Text)
}

/// Whether an operand brings a constant along. Of the server's clock, only a distance from it is one.
pub(crate) fn has_constant(operand: &Operand, now: Option<Time>) -> bool {
    match operand {
        Operand::Column(_) => false,
        Operand::Coalesce(..) | Operand::Value(_) => true,
        Operand::Now { plus_micros } => now.is_some() || *plus_micros != 0,
    }
}

/// Where a plan's record goes.
pub(crate) fn partition(plan: &Plan, partitions: u32) -> u32 {
    plan.entry().map_or(0, |entry| partition_of(plan.tenant(), &entry.resource, &entry.key, partitions))
}

/// What a plan brings along, in the order of its statement. Its events may be written already ([`events_of`]).
pub(crate) fn constants<'p>(
    plan: &'p Plan,
    step: &'p Step,
    events: Option<&'p str>,
    now: Option<Time>,
    partitions: u32,
) -> Vec<Constant<'p>> {
    let mut found = constants_of_step(step, now);
    found.extend(constants_of_record(plan, events, now, partitions));
    found
}

/// What a step brings along: the key, the assignments, the guard.
pub(crate) fn constants_of_step<'p>(step: &'p Step, now: Option<Time>) -> Vec<Constant<'p>> {
    let mut found = Vec::with_capacity(12);
    let mut add = |arg, kind: &'static str| found.push(Constant { arg, kind });
    for (column, value) in step.table.key_columns().iter().zip(&step.key) {
        add(Arg::One(value), type_name(column.kind));
    }
    let mut operand = |operand: &'p Operand, kind: Type| match operand {
        Operand::Column(_) => {}
        Operand::Coalesce(_, value) | Operand::Value(value) => add(Arg::One(value), type_name(kind)),
        Operand::Now { plus_micros } => match now {
            Some(now) => {
                add(Arg::Own(Value::Time(eval::now_moved(now, *plus_micros))), type_name(Type::Time));
            }
            None if *plus_micros == 0 => {}
            None => add(Arg::Interval(*plus_micros), "interval"),
        },
    };
    for assignment in &step.assignments {
        let kind = step.table.type_of(&assignment.column).unwrap_or(Type::Text);
        assignment.expr.operands().for_each(|part| operand(part, kind));
    }
    step.guard.leaves(&mut |leaf| {
        if let Guard::Compare(left, _, right) = leaf {
            let kind = compared_type(&step.table, left, right);
            operand(left, kind);
            operand(right, kind);
        }
    });
    found
}

/// What a plan brings along for its record. The row of an insert stands in its events. Where the server's clock is to speak in
/// them, or another row to stand, they are no JSON yet.
pub(crate) fn constants_of_record<'p>(
    plan: &'p Plan,
    events: Option<&'p str>,
    now: Option<Time>,
    partitions: u32,
) -> Vec<Constant<'p>> {
    let mut found = Vec::with_capacity(8);
    let mut add = |arg, kind: &'static str| found.push(Constant { arg, kind });
    if let Some(entry) = plan.entry() {
        add(Arg::Partition(partition(plan, partitions)), "integer");
        add(Arg::Text(plan.operation()), "text");
        add(Arg::Text(&entry.resource), "text");
        add(Arg::Text(&entry.key), "text");
        add(Arg::Text(&entry.fingerprint), "text");
        add(events.map_or_else(|| Arg::Own(Value::Text(events_of(plan, now))), Arg::Text), "text");
        if let Some(now) = now {
            add(Arg::Own(Value::Time(now)), type_name(Type::Time));
        }
    }
    found
}

/// What stands in events for the time to which an insert's assignment sets its column by the server's clock. No JSON has
/// such a thing in it: two quotes that are not escaped are an empty text, or the end of a text behind an escaped one, and
/// neither is followed by a letter.
pub(crate) fn stamp(step: &Step, index: usize) -> String {
    match step.assignments.get(index).map(|assignment| &assignment.expr) {
        Some(Expr::Is(Operand::Now { plus_micros: 0 })) => "\"\"now\"\"".to_owned(),
        _ => format!("\"\"now {index}\"\""),
    }
}

/// What stands in events for a row that only the server knows; no JSON has such a thing in it either.
pub(crate) const ROW_MARK: &str = "\"\"row\"\"";

/// The events as far as they are known: with the row that a step inserts, if it does, and otherwise with its mark.
pub(crate) fn events_of(plan: &Plan, now: Option<Time>) -> String {
    let inserted = plan.steps().first().filter(|step| inserts(step) && takers(plan).next().is_some());
    let made = |step| eval::made(plan, step, now.unwrap_or(Time::MIN)).map(|row| (step, row));
    let row = inserted.and_then(made);
    let mut out = Vec::with_capacity(256);
    out.push(b'[');
    for draft in plan.entry().into_iter().flat_map(|entry| &entry.events) {
        let takes = draft.row_of.is_some();
        separate(&mut out, b'[');
        out.extend_from_slice(b"{\"name\":");
        push(&mut out, &draft.name);
        out.extend_from_slice(b",\"data\":{");
        for (name, content) in draft.data.iter().filter(|(name, _)| !takes || *name != "row") {
            push_name(&mut out, name);
            push(&mut out, content);
        }
        if takes {
            push_name(&mut out, "row");
            match &row {
                Some((step, row)) => push_row(&mut out, step, row, now),
                None => out.extend_from_slice(ROW_MARK.as_bytes()),
            }
        }
        out.push(b'}');
        if let Some(actor) = &draft.actor {
            push_name(&mut out, "actor");
            push(&mut out, actor);
        }
        out.push(b'}');
    }
    out.push(b']');
    String::from_utf8(out).unwrap_or_else(|error| {
        // The server refuses an empty text as JSON, so nothing is committed.
        drop(bug!("events that are not UTF-8: {error}"));
        String::new()
    })
}

/// The row that a step inserts, with marks for what the server's clock says.
fn push_row(out: &mut Vec<u8>, step: &Step, row: &Row, now: Option<Time>) {
    out.push(b'{');
    for (column, value) in row.table().columns().iter().zip(row.values()) {
        push_name(out, &column.name);
        let is_it = |a: &Assignment| is_stamped(a, now) && a.column == column.name;
        match step.assignments.iter().position(is_it) {
            Some(index) => out.extend_from_slice(stamp(step, index).as_bytes()),
            None => value.write_json(out),
        }
    }
    push_name(out, VERSION);
    push(out, &row.version());
    out.push(b'}');
}

fn push_name(out: &mut Vec<u8>, name: &str) {
    separate(out, b'{');
    push(out, name);
    out.push(b':');
}

/// A comma, unless this is the first thing behind the bracket.
fn separate(out: &mut Vec<u8>, bracket: u8) {
    if out.last() != Some(&bracket) {
        out.push(b',');
    }
}

fn push(out: &mut Vec<u8>, content: &(impl serde::Serialize + ?Sized)) {
    // Names and JSON can be written as JSON, and memory takes what is written.
    let _ = serde_json::to_writer(out, content);
}
