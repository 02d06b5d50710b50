//! A plan of many steps of one shape as one statement: jobs completed together, rows removed together.
//!
//! Like every compiled statement it applies the plan, or does nothing: all of the rows, or none. There are two [`UniformMode`]s to see
//! to that. Where plans are refused, the rows are locked first, in the order of their keys, and judged as they are then; only
//! if every one of them is there and its guard holds is anything written, then the head of the log's partition and the record.
//! What holds by the clock is judged by one reading of it, behind the locks. Where they are not refused, and nothing that is
//! written depends on the clock, the rows are written under their guards straight away, in the same order, which spares the
//! server every row's lock and second look; if some of them were not written, the statement fails, and nothing was done.

use std::collections::BTreeMap;
use std::sync::Arc;

use statehouse_store::bug;
use statehouse_store::log::{EventSubject, LogPart, has_several_subjects, parts_of, write_events};
use statehouse_store::plan::{Expect, Verb};
use statehouse_store::{Event, Guard, Operand, Plan, Step, Time, eval};

use super::statement::{CompiledStatement, RECORD, ValueSource};
use super::{Compiler, PlanOutcome, Set, StepForm, list_args, without_repeats};
use crate::connection::DatabaseCall;
use crate::order;
use crate::shape::{
    Constant, constants_of_record, constants_of_step, is_exact, returns_row, steps_are_alike, takers,
};
use crate::size_bounds;
use crate::sql::{Arg, all_columns, count_at, name, ordinal_at, partition_at, placeholder, row_at, time_at};
use crate::statements::part_operation_of;
use crate::tenancy::TransactionScope;
use statehouse_store::{Applied, Position, Record, Row, StoreError, Value};

/// A plan as one statement.
pub(crate) struct Uniform<'p> {
    plan: &'p Plan,
    pub way: UniformMode,
    /// Of each row in the order of the statement's arrays, which step it is.
    indexes: Vec<usize>,
    partitions: u32,
    /// Whether it leaves records in several partitions.
    spread: bool,
    pub call: DatabaseCall<'p>,
}

/// How a statement sees to it that all rows are written, or none.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum UniformMode {
    /// It locks and judges them first.
    Judged,
    /// It fails, if some were written and some were not.
    AtOnce,
}

/// What the server says, and logs, of a statement that fails so.
const NOT_ALL: &str = "statehouse: not every row is as the plan wants it, so it is decided row by row";

/// The way of a plan's statement, if plans like it are refused seldom.
fn quick_way(step: &Step) -> UniformMode {
    let reads_clock = |operand: &Operand| matches!(operand, Operand::Now { .. });
    let by_clock = step.guard.conjuncts().iter().any(looks_at_clock)
        || step.assignments.iter().any(|assignment| assignment.expr.operands().any(reads_clock));
    if by_clock { UniformMode::Judged } else { UniformMode::AtOnce }
}

/// The first step of a plan of several, if all are of its shape and can be compiled.
fn uniform(plan: &Plan) -> Option<&Step> {
    let (first, others) = plan.steps().split_first()?;
    let verb = matches!(first.verb, Verb::Put | Verb::Delete) && first.expect == Expect::Present;
    let is_like = |step: &Step| steps_are_alike(first, step) && size_bounds::is_small_step(step);
    let fits = verb && is_exact(first) && !others.is_empty() && plan.steps().iter().all(is_like);
    // Where there are several records, their places come back instead of the rows.
    let answers = !(plan.returns_rows() && has_several_subjects(plan));
    (fits && takers(plan).next().is_none() && answers).then_some(first)
}

/// Whether all steps of a plan of several are of one shape and can be compiled.
pub(crate) fn is_uniform(plan: &Plan) -> bool {
    uniform(plan).is_some()
}

impl Compiler<'_> {
    /// Compiles a plan of several steps, if all of them are of one shape; `refused` if plans like it are.
    pub(crate) fn uniform<'p>(
        &self,
        plan: &'p Plan,
        events: Option<&'p str>,
        set: Set,
        refused: bool,
    ) -> Option<Uniform<'p>> {
        let first = uniform(plan)?;
        // A plan that is too large with its further records is refused where every plan is decided.
        let parts = parts_of(plan, self.partitions).ok()?;
        let spread = !parts.is_empty();
        let way = if refused { UniformMode::Judged } else { quick_way(first) };
        // Rows are locked in the order of the arrays; no row is in a plan twice.
        let mut ordered: BTreeMap<Vec<u8>, (usize, &'p Step)> = BTreeMap::new();
        for (number, step) in plan.steps().iter().enumerate() {
            ordered.insert(order::place(step.table.name(), 0, plan.tenant(), &step.key), (number, step));
        }
        let given: Vec<Vec<Constant<'p>>> =
            ordered.values().map(|(_, step)| constants_of_step(step, self.now)).collect();
        let kinds: Vec<&'static str> = given.first()?.iter().map(|constant| constant.kind).collect();
        let text: Arc<str> =
            self.texts.of(plan, StepForm { several: spread, set, way: Some(way) }, || {
                CompiledStatement::new(self, plan, first, ValueSource::Rows { kinds: &kinds }, set)
                    .uniform_text(set, way, spread)
            })?;
        let tenant = plan.tenant().as_str();
        let mut args = list_args(first);
        args.push(Arg::Texts(ordered.values().map(|_| tenant).collect()));
        let mut columns: Vec<Vec<Arg<'p>>> = kinds.iter().map(|_| Vec::with_capacity(given.len())).collect();
        for constants in given {
            for (column, constant) in columns.iter_mut().zip(constants) {
                column.push(constant.arg);
            }
        }
        args.extend(kinds.iter().zip(columns).map(|(kind, column)| Arg::List(kind, without_repeats(column))));
        if set != Set::Transaction && self.says_tenant {
            args.push(Arg::Own(Value::Text(TransactionScope::of(plan.tenant()).names())));
        }
        if spread {
            args.extend(records_of(plan, &parts, self.now, self.partitions)?);
        } else {
            let record = constants_of_record(plan, events, self.now, self.partitions);
            args.extend(record.into_iter().map(|constant| constant.arg));
        }
        let indexes = ordered.into_values().map(|(number, _)| number).collect();
        let (partitions, call) = (self.partitions, DatabaseCall::new(text, args));
        Some(Uniform { plan, way, indexes, partitions, spread, call })
    }
}

/// The events of a plan whose events take in no row.
fn known_events(plan: &Plan) -> Vec<Event> {
    let drafts = plan.entry().into_iter().flat_map(|entry| &entry.events);
    drafts.map(|draft| eval::finish_event(draft, |_| None)).collect()
}

/// What a plan of several records brings along for them, in the order in which their heads are taken: what
/// [`constants_of_record`] says of one, with arrays of what differs between them, and the partition of the commit record.
fn records_of<'p>(
    plan: &'p Plan,
    parts: &[LogPart],
    now: Option<Time>,
    partitions: u32,
) -> Option<Vec<Arg<'p>>> {
    let entry = plan.entry()?;
    let whole = Record::of(plan, now.unwrap_or(Time::MIN), known_events(plan));
    let own = crate::shape::partition(plan, partitions);
    let events = write_events(&whole.events, parts).ok()?;
    let mut records = vec![(own, entry.resource.clone(), entry.key.clone(), events)];
    for part in parts {
        let EventSubject { resource, key } = part.subject.clone();
        let events = write_events(&part.record(&whole).ok()?.events, &[]).ok()?;
        records.push((part.partition, resource, key, events));
    }
    records.sort_by_key(|(partition, ..)| *partition);
    let numbers = records.iter().map(|(partition, ..)| *partition).collect();
    let (mut resources, mut keys, mut events) = (Vec::new(), Vec::new(), Vec::new());
    for (_, resource, key, event) in records {
        resources.push(resource);
        keys.push(key);
        events.push(event);
    }
    let mut args = vec![
        Arg::Partitions(numbers),
        Arg::Text(plan.operation()),
        Arg::Written(resources),
        Arg::Written(keys),
        Arg::Text(&entry.fingerprint),
        Arg::Written(events),
    ];
    args.extend(now.map(|now| Arg::Own(Value::Time(now))));
    args.push(Arg::Partition(own));
    Some(args)
}

impl Uniform<'_> {
    /// The record of a plan that left several, from the heads of their partitions.
    fn spread_record(&self, rows: &[tokio_postgres::Row], at: Time) -> Result<Record, StoreError> {
        let own = crate::shape::partition(self.plan, self.partitions);
        let (mut position, mut also_at) = (None, Vec::new());
        for answer in rows {
            let partition = partition_at(answer, 0, "statehouse_heads")?;
            let offset = count_at(answer, 1, "statehouse_log")?;
            let place = Position { partition, offset };
            if partition == own { position = Some(place) } else { also_at.push(place) }
        }
        Ok(Record { position, also_at, ..Record::of(self.plan, at, known_events(self.plan)) })
    }

    /// What came of the plan: `None` if the statement did nothing.
    pub(crate) fn outcome(&self, rows: &[tokio_postgres::Row]) -> Result<Option<PlanOutcome>, StoreError> {
        let Some(first) = rows.first() else { return Ok(None) };
        let plan = self.plan;
        let steps = plan.steps();
        let mut written: Vec<Option<Row>> = Vec::new();
        if plan.returns_rows() {
            written.resize_with(steps.len(), || None);
            let returns = steps.first().is_some_and(|step| returns_row(plan, step));
            for answer in rows.iter().filter(|_| returns) {
                let index = self.indexes.get(ordinal_at(answer, 0)?).copied();
                let target = index.and_then(|index| Some((steps.get(index)?, written.get_mut(index)?)));
                let Some((step, row)) = target else {
                    return Err(bug!("an answer for a step that the plan does not have").into());
                };
                let columns = if plan.entry().is_some() { 3 } else { 1 };
                *row = Some(row_at(answer, columns, &step.table, plan.tenant())?);
            }
        }
        let mut record = None;
        if plan.entry().is_some() {
            let at = time_at(first, 2, "statehouse_log")?;
            if self.spread {
                let record = Some(self.spread_record(rows, at)?);
                return Ok(Some(PlanOutcome::applied(Applied { record, rows: written, repeated: false })));
            }
            let offset = count_at(first, 1, "statehouse_log")?;
            let position = Position { partition: crate::shape::partition(plan, self.partitions), offset };
            record = Some(Record { position: Some(position), ..Record::of(plan, at, known_events(plan)) });
        }
        Ok(Some(PlanOutcome::applied(Applied { record, rows: written, repeated: false })))
    }
}

/// Whether a part of a guard looks at the clock.
fn looks_at_clock(guard: &Guard) -> bool {
    let mut looks = false;
    guard.leaves(&mut |leaf| {
        if let Guard::Compare(left, _, right) = leaf {
            looks |= [left, right].iter().any(|operand| matches!(operand, Operand::Now { .. }));
        }
    });
    looks
}

/// The columns that a part of a guard looks at.
fn columns_of(guard: &Guard, found: &mut Vec<String>) {
    guard.leaves(&mut |leaf| {
        let mut add = |column: &String| {
            if !found.contains(column) {
                found.push(column.clone());
            }
        };
        match leaf {
            Guard::Compare(left, _, right) => {
                for operand in [left, right] {
                    if let Operand::Column(column) | Operand::Coalesce(column, _) = operand {
                        add(column);
                    }
                }
            }
            Guard::Null(column) | Guard::NotNull(column) | Guard::In(column, _) | Guard::NotIn(column, _) => {
                add(column);
            }
            Guard::All(_) | Guard::Any(_) => {}
        }
    });
}

/// The conditions on each row of a plan of one shape, with their constants named.
struct RowConditions {
    key: String,
    /// Of each assignment, the names of its constants.
    operands: Vec<Vec<String>>,
    /// What is evaluated when the row is locked.
    at_lock: String,
    /// Conditions that read the clock.
    by_clock: Vec<String>,
    /// The columns that they look at.
    clock_columns: Vec<String>,
}

/// One reading of the clock, after another part of the statement.
fn clock_behind(part: &str) -> String {
    format!(
        "clock as materialized (\nselect clock_timestamp() as now\n\
         from (select count(*) from {part}) as {part}\n)"
    )
}

impl CompiledStatement<'_, '_> {
    /// The statement of a plan of several steps of one shape.
    fn uniform_text(mut self, set: Set, way: UniformMode, spread: bool) -> Option<String> {
        let ValueSource::Rows { kinds } = self.source else { return None };
        self.stamped = None;
        let conditions = self.row_conditions()?;
        let reads_clock = self.compiler.now.is_none() && (self.reads_clock || self.plan.entry().is_some());
        let mut parts: Vec<String> = Vec::new();
        parts.extend(self.scope.as_ref().map(|scope| format!("scope as materialized (\nselect {scope}\n)")));
        match way {
            UniformMode::AtOnce => {
                parts.push(self.written(&conditions, &self.rows(kinds), &conditions.at_lock));
                parts.extend(reads_clock.then(|| clock_behind("written")));
            }
            UniformMode::Judged => {
                parts.push(self.locked(&conditions, kinds));
                parts.extend(reads_clock.then(|| clock_behind("locked")));
                parts.push(self.judged(&conditions));
                parts.push(self.written(&conditions, "locked as k, judged", "judged.hold"));
            }
        }
        let count = format!("(select count(*) from written) = {}", self.plan_count());
        // One, if all were written. Otherwise none was, or the statement ends here.
        let (one, done) = match way {
            UniformMode::Judged => ("1".to_owned(), count),
            UniformMode::AtOnce => (
                format!("(case when {count} then '1' else '{NOT_ALL}' end)::bigint"),
                "exists (select from written)".to_owned(),
            ),
        };
        if self.plan.entry().is_none() {
            let answer = if self.returns() {
                format!("select written._place{}\nfrom written\nwhere {one} = 1", self.columns("written"))
            } else {
                format!("select 1::bigint\nwhere {done} and {one} = 1")
            };
            return Some(format!("with {}\n{answer}", parts.join(", ")));
        }
        let first =
            self.lists + kinds.len() + usize::from(set != Set::Transaction && self.compiler.says_tenant);
        let own = |index: usize| placeholder(first + 1 + index);
        let at = match self.compiler.now {
            Some(_) => format!("{}::timestamptz", own(RECORD.len())),
            None => "(select now from clock)".to_owned(),
        };
        let answer = if spread {
            let last = RECORD.len() + usize::from(self.compiler.now.is_some());
            let own: Vec<String> = (0..RECORD.len()).chain([last]).map(own).collect();
            parts.extend(self.append_spread(&own, &at, &one, &done)?);
            format!("select moved.partition::bigint, moved.head, {at}\nfrom moved")
        } else {
            let own: Vec<String> = (0..RECORD.len()).map(own).collect();
            parts.extend(self.append_whole(&own, &at, &one, &done)?);
            if self.returns() {
                format!(
                    "select written._place, moved.head, {at}{}\nfrom written, moved",
                    self.columns("written")
                )
            } else {
                format!("select 1::bigint, moved.head, {at}\nfrom moved")
            }
        };
        Some(format!("with {}\n{answer}", parts.join(", ")))
    }

    /// Names the constants of a step, in their order, and sorts its conditions by whether they read the clock.
    fn row_conditions(&mut self) -> Option<RowConditions> {
        let step = self.step;
        let mut at_lock = size_bounds::bounds(step, 0)?;
        let key = self.key_condition();
        let operands = step.assignments.iter().map(|a| self.operand_names(&a.expr)).collect();
        let (mut by_clock, mut clock_columns) = (Vec::new(), Vec::new());
        for conjunct in step.guard.conjuncts() {
            let text = self.guard(conjunct);
            if looks_at_clock(conjunct) {
                columns_of(conjunct, &mut clock_columns);
                by_clock.push(text);
            } else {
                at_lock.push(text);
            }
        }
        let at_lock = if at_lock.is_empty() { "true".to_owned() } else { at_lock.join(" and ") };
        Some(RowConditions { key, operands, at_lock, by_clock, clock_columns })
    }

    /// How many steps the plan has.
    fn plan_count(&self) -> String {
        format!("cardinality({}::text[])", placeholder(self.lists))
    }

    fn returns(&self) -> bool {
        returns_row(self.plan, self.step)
    }

    /// The columns of the row, behind others, if the answer has them.
    fn columns(&self, alias: &str) -> String {
        if self.returns() { format!(", {}", all_columns(&self.step.table, alias)) } else { String::new() }
    }

    fn written(&self, conditions: &RowConditions, from: &str, condition: &str) -> String {
        let table = self.compiler.names.table(self.step.table.name());
        let (key, returning) = (&conditions.key, format!("returning k._place{}", self.columns("t")));
        match self.step.verb {
            Verb::Put => format!(
                "written as (\nupdate {table} as t\nset {}\nfrom {from}\nwhere {condition} and {key}\n{returning}\n)",
                self.changes(&conditions.operands, false),
            ),
            _ => format!(
                "written as (\ndelete from {table} as t\nusing {from}\nwhere {condition} and {key}\n{returning}\n)"
            ),
        }
    }

    /// Locks the rows, in their order, and evaluates the conditions that do not read the clock.
    fn locked(&self, conditions: &RowConditions, kinds: &[&str]) -> String {
        let table = self.compiler.names.table(self.step.table.name());
        let shown = (1..).zip(&conditions.clock_columns);
        let shown: String = shown.map(|(n, column)| format!(", t.{} as _t{n}", name(column))).collect();
        format!(
            "locked as materialized (\nselect k.*, t.*\nfrom {}\ncross join lateral (\n\
             select {} as _holds{shown}\nfrom {table} as t\nwhere {}\nfor update\n) as t\n)",
            self.rows(kinds),
            conditions.at_lock,
            conditions.key,
        )
    }

    /// Whether every row is there and all conditions hold, by one reading of the clock.
    fn judged(&self, conditions: &RowConditions) -> String {
        // The names by which a guard knows the columns of its row.
        let as_row = (1..).zip(&conditions.clock_columns);
        let as_row: Vec<String> = as_row.map(|(n, column)| format!("k._t{n} as {}", name(column))).collect();
        let row = if as_row.is_empty() {
            String::new()
        } else {
            format!(" cross join lateral (select {}) as t", as_row.join(", "))
        };
        let by_clock: String = conditions.by_clock.iter().map(|part| format!(" and {part}")).collect();
        format!(
            "judged as materialized (\nselect count(*) = {} as hold\nfrom locked as k{row}\n\
             where k._holds{by_clock}\n)",
            self.plan_count()
        )
    }

    /// Locks the head of the partition and appends the record, if everything was written.
    fn append_whole(&self, own: &[String], at: &str, one: &str, done: &str) -> Option<[String; 2]> {
        let [partition, operation, resource, key, fingerprint, events] = own else { return None };
        let (heads, log) = (self.compiler.names.heads(), self.compiler.names.log());
        let (partition, tenants) = (format!("{partition}::integer"), placeholder(self.lists));
        Some([
            format!(
                "moved as (\nupdate {heads} as h\nset head = h.head + {one}\nwhere h.partition = {partition} and {done}\n\
                 returning h.head\n)"
            ),
            format!(
                "logged as (\ninsert into {log} (partition, position, tenant, operation, resource, key, at, fingerprint, \
                 fate, events)\nselect {partition}, moved.head, ({tenants}::text[])[1], {operation}::text, \
                 {resource}::text, {key}::text, {at}, {fingerprint}::text, 'applied', {events}::text::json\nfrom moved\n)"
            ),
        ])
    }

    /// Locks the heads of several partitions and appends a record to each, if everything was written, which is checked before
    /// the first head is locked. They are locked in the order of the array, like those of several plans.
    fn append_spread(&self, own: &[String], at: &str, one: &str, done: &str) -> Option<Vec<String>> {
        let [partitions, operation, resources, keys, fingerprint, events, commit] = own else { return None };
        let further = part_operation_of(&format!("{operation}::text"), "r.partition", "moved.head");
        let (heads, log) = (self.compiler.names.heads(), self.compiler.names.log());
        let tenants = placeholder(self.lists);
        Some(vec![
            format!(
                "moved as (\nupdate {heads} as h\nset head = h.head + 1\nfrom (\nselect p.partition\n\
                 from unnest({partitions}::integer[]) as p(partition)\n\
                 where case when {done} then {one} = 1 else false end\norder by p.partition\noffset 0\n) as k\n\
                 where h.partition = k.partition\nreturning h.partition, h.head\n)"
            ),
            format!(
                "logged as (\ninsert into {log} (partition, position, tenant, operation, resource, key, at, fingerprint, \
                 fate, events)\nselect moved.partition, moved.head, ({tenants}::text[])[1], \
                 case when r.partition = {commit}::integer then {operation}::text else {further} end, \
                 r.resource, r.key, {at}, {fingerprint}::text, 'applied', r.events::json\n\
                 from unnest({partitions}::integer[], {resources}::text[], {keys}::text[], {events}::text[]) \
                 as r(partition, resource, key, events)\n\
                 join moved on moved.partition = r.partition\n)"
            ),
        ])
    }
}
