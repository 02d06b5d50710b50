//! A plan of many steps of one shape as one statement: jobs completed together, rows removed together.
//!
//! Like every compiled statement it applies the plan, or does nothing: all of the rows, or none. There are two [`Way`]s to see
//! to that. Where plans are refused, the rows are locked first, in the order of their keys, and judged as they are then; only
//! if every one of them is there and its guard holds is anything written, then the head of the log's partition and the record.
//! What holds by the clock is judged by one reading of it, behind the locks. Where they are not refused, and nothing that is
//! written depends on the clock, the rows are written under their guards straight away, in the same order, which spares the
//! server every row's lock and second look; if some of them were not written, the statement fails, and nothing was done.

use std::collections::BTreeMap;
use std::sync::Arc;

use statehouse_store::log::{EventSubject, LogPart, has_several_subjects, parts_of, write_events};
use statehouse_store::plan::{Expect, Verb};
use statehouse_store::{Event, Guard, Operand, Plan, Step, Time, eval};

use super::{Compiler, Form, RECORD, Set, Settled, Source, Statement, list_args, shortened};
use crate::link::Call;
use crate::order;
use crate::room;
use crate::shape::{
    Constant, constants_of_record, constants_of_step, is_exact, returns_row, steps_are_alike, takers,
};
use crate::sql::{Arg, all_columns, int_at, name, placeholder, row_at, time_at};
use crate::statements::part_operation_of;
use crate::tenancy::Scope;
use statehouse_store::{Applied, Position, Record, Row, StoreError, Value};

/// A plan as one statement.
pub(crate) struct Uniform<'p> {
    plan: &'p Plan,
    pub way: Way,
    /// Of each row in the order of the statement's arrays, which step it is.
    places: Vec<usize>,
    partitions: u32,
    /// Whether it leaves records in several partitions.
    spread: bool,
    pub call: Call<'p>,
}

/// How a statement sees to it that all rows are written, or none.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Way {
    /// It locks and judges them first.
    Judged,
    /// It fails, if some were written and some were not.
    AtOnce,
}

/// What the server says, and logs, of a statement that fails so.
const NOT_ALL: &str = "statehouse: not every row is as the plan wants it, so it is decided row by row";

/// The way of a plan's statement, if plans like it are refused seldom.
fn quick_way(step: &Step) -> Way {
    let reads_clock = |operand: &Operand| matches!(operand, Operand::Now { .. });
    let by_clock = step.guard.conjuncts().iter().any(looks_at_clock)
        || step.assignments.iter().any(|assignment| assignment.expr.operands().any(reads_clock));
    if by_clock { Way::Judged } else { Way::AtOnce }
}

/// The first step of a plan of several, if all are of its shape and can be compiled.
fn uniform(plan: &Plan) -> Option<&Step> {
    let (first, others) = plan.steps().split_first()?;
    let verb = matches!(first.verb, Verb::Put | Verb::Delete) && first.expect == Expect::Present;
    let is_like = |step: &Step| steps_are_alike(first, step) && room::is_small_step(step);
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
        let way = if refused { Way::Judged } else { quick_way(first) };
        // Rows are locked in the order of the arrays; no row is in a plan twice.
        let mut ordered: BTreeMap<Vec<u8>, (usize, &'p Step)> = BTreeMap::new();
        for (number, step) in plan.steps().iter().enumerate() {
            ordered.insert(order::place(step.table.name(), 0, plan.tenant(), &step.key), (number, step));
        }
        let given: Vec<Vec<Constant<'p>>> =
            ordered.values().map(|(_, step)| constants_of_step(step, self.now)).collect();
        let kinds: Vec<&'static str> = given.first()?.iter().map(|constant| constant.kind).collect();
        let text: Arc<str> = self.texts.of(plan, Form { several: spread, set, way: Some(way) }, || {
            Statement::new(self, plan, first, Source::Rows { kinds: &kinds }, set)
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
        args.extend(kinds.iter().zip(columns).map(|(kind, column)| Arg::List(kind, shortened(column))));
        if set != Set::Transaction && self.says_tenant {
            args.push(Arg::Own(Value::Text(Scope::of(plan.tenant()).names())));
        }
        if spread {
            args.extend(records_of(plan, &parts, self.now, self.partitions)?);
        } else {
            let record = constants_of_record(plan, events, self.now, self.partitions);
            args.extend(record.into_iter().map(|constant| constant.arg));
        }
        let places = ordered.into_values().map(|(number, _)| number).collect();
        let (partitions, call) = (self.partitions, Call::new(text, args));
        Some(Uniform { plan, way, places, partitions, spread, call })
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
    for (_, resource, key, told) in records {
        resources.push(resource);
        keys.push(key);
        events.push(told);
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
            let partition = u32::try_from(int_at(answer, 0, "statehouse_heads")?).unwrap_or_default();
            let offset = u64::try_from(int_at(answer, 1, "statehouse_log")?).unwrap_or_default();
            let place = Position { partition, offset };
            if partition == own { position = Some(place) } else { also_at.push(place) }
        }
        Ok(Record { position, also_at, ..Record::of(self.plan, at, known_events(self.plan)) })
    }

    /// What came of the plan: `None` if the statement did nothing.
    pub(crate) fn outcome(&self, rows: &[tokio_postgres::Row]) -> Result<Option<Settled>, StoreError> {
        let Some(first) = rows.first() else { return Ok(None) };
        let plan = self.plan;
        let steps = plan.steps();
        let mut written: Vec<Option<Row>> = Vec::new();
        if plan.returns_rows() {
            written.resize_with(steps.len(), || None);
            let returns = steps.first().is_some_and(|step| returns_row(plan, step));
            for answer in rows.iter().filter(|_| returns) {
                let number = usize::try_from(int_at(answer, 0, "unnest")? - 1).unwrap_or(usize::MAX);
                let place = self.places.get(number).copied().unwrap_or(usize::MAX);
                if let (Some(step), Some(row)) = (steps.get(place), written.get_mut(place)) {
                    let columns = if plan.entry().is_some() { 3 } else { 1 };
                    *row = Some(row_at(answer, columns, &step.table, plan.tenant())?);
                }
            }
        }
        let mut record = None;
        if plan.entry().is_some() {
            let at = time_at(first, 2, "statehouse_log")?;
            if self.spread {
                let record = Some(self.spread_record(rows, at)?);
                return Ok(Some(Settled::applied(Applied { record, rows: written, repeated: false })));
            }
            let offset = u64::try_from(int_at(first, 1, "statehouse_log")?).unwrap_or_default();
            let position = Position { partition: crate::shape::partition(plan, self.partitions), offset };
            record = Some(Record { position: Some(position), ..Record::of(plan, at, known_events(plan)) });
        }
        Ok(Some(Settled::applied(Applied { record, rows: written, repeated: false })))
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

impl Statement<'_, '_> {
    /// The statement of a plan of several steps of one shape.
    fn uniform_text(mut self, set: Set, way: Way, spread: bool) -> Option<String> {
        let step = self.step;
        let Source::Rows { kinds } = self.source else { return None };
        let bounds = room::bounds(step, 0)?;
        self.stamped = None;
        // In the order of the constants.
        let key = self.key_condition();
        let operands: Vec<Vec<String>> =
            step.assignments.iter().map(|a| self.operand_names(&a.expr)).collect();
        let (mut at_lock, mut by_clock, mut looked_at) = (bounds, Vec::new(), Vec::new());
        for conjunct in step.guard.conjuncts() {
            let text = self.guard(conjunct);
            if looks_at_clock(conjunct) {
                columns_of(conjunct, &mut looked_at);
                by_clock.push(text);
            } else {
                at_lock.push(text);
            }
        }
        let tenants = placeholder(self.lists);
        let all = format!("cardinality({tenants}::text[])");
        let table = self.compiler.names.table(step.table.name());
        let holds = if at_lock.is_empty() { "true".to_owned() } else { at_lock.join(" and ") };
        let mut parts: Vec<String> = Vec::new();
        parts.extend(self.scope.as_ref().map(|scope| format!("scope as materialized (\nselect {scope}\n)")));
        let reads_clock = self.compiler.now.is_none() && (self.reads_clock || self.plan.entry().is_some());
        let clock = |behind: &str| {
            format!(
                "clock as materialized (\nselect clock_timestamp() as now\n\
                 from (select count(*) from {behind}) as {behind}\n)"
            )
        };
        let returns = returns_row(self.plan, step);
        let columns = |alias: &str| {
            if returns { format!(", {}", all_columns(&step.table, alias)) } else { String::new() }
        };
        let written = |from: &str, condition: &str| {
            let (key, returning) = (&key, format!("returning k._place{}", columns("t")));
            match step.verb {
                Verb::Put => format!(
                    "written as (\nupdate {table} as t\nset {}\nfrom {from}\nwhere {condition} and {key}\n{returning}\n)",
                    self.changes(&operands, false),
                ),
                _ => format!(
                    "written as (\ndelete from {table} as t\nusing {from}\nwhere {condition} and {key}\n{returning}\n)"
                ),
            }
        };
        match way {
            Way::AtOnce => {
                parts.push(written(&self.rows(kinds), &holds));
                parts.extend(reads_clock.then(|| clock("written")));
            }
            Way::Judged => {
                let shown: String = (1..)
                    .zip(&looked_at)
                    .map(|(n, column)| format!(", t.{} as _t{n}", name(column)))
                    .collect();
                parts.push(format!(
                    "locked as materialized (\nselect k.*, t.*\nfrom {}\ncross join lateral (\n\
                     select {holds} as _holds{shown}\nfrom {table} as t\nwhere {key}\nfor update\n) as t\n)",
                    self.rows(kinds),
                ));
                parts.extend(reads_clock.then(|| clock("locked")));
                // The names by which a guard knows the columns of its row.
                let as_row: Vec<String> =
                    (1..).zip(&looked_at).map(|(n, column)| format!("k._t{n} as {}", name(column))).collect();
                let row = if as_row.is_empty() {
                    String::new()
                } else {
                    format!(" cross join lateral (select {}) as t", as_row.join(", "))
                };
                let by_clock: String = by_clock.iter().map(|part| format!(" and {part}")).collect();
                parts.push(format!(
                    "judged as materialized (\nselect count(*) = {all} as hold\nfrom locked as k{row}\n\
                     where k._holds{by_clock}\n)"
                ));
                parts.push(written("locked as k, judged", "judged.hold"));
            }
        }
        let count = format!("(select count(*) from written) = {all}");
        // One, if all were written. Otherwise none was, or the statement ends here.
        let one = match way {
            Way::Judged => "1".to_owned(),
            Way::AtOnce => format!("(case when {count} then '1' else '{NOT_ALL}' end)::bigint"),
        };
        let done = match way {
            Way::Judged => count,
            Way::AtOnce => "exists (select from written)".to_owned(),
        };
        let first =
            self.lists + kinds.len() + usize::from(set != Set::Transaction && self.compiler.says_tenant);
        let own = |place: usize| placeholder(first + 1 + place);
        if self.plan.entry().is_none() {
            let answer = if returns {
                format!("select written._place{}\nfrom written\nwhere {one} = 1", columns("written"))
            } else {
                format!("select 1::bigint\nwhere {done} and {one} = 1")
            };
            return Some(format!("with {}\n{answer}", parts.join(", ")));
        }
        let at = match self.compiler.now {
            Some(_) => format!("{}::timestamptz", own(RECORD.len())),
            None => "(select now from clock)".to_owned(),
        };
        if spread {
            let last = RECORD.len() + usize::from(self.compiler.now.is_some());
            let own: Vec<String> = (0..RECORD.len()).chain([last]).map(own).collect();
            parts.extend(self.append_spread(&own, &at, &one, &done)?);
            return Some(format!(
                "with {}\nselect moved.partition::bigint, moved.head, {at}\nfrom moved",
                parts.join(", ")
            ));
        }
        let (heads, log) = (self.compiler.names.heads(), self.compiler.names.log());
        let partition = format!("{}::integer", own(0));
        parts.push(format!(
            "moved as (\nupdate {heads} as h\nset head = h.head + {one}\nwhere h.partition = {partition} and {done}\n\
             returning h.head\n)"
        ));
        parts.push(format!(
            "logged as (\ninsert into {log} (partition, position, tenant, operation, resource, key, at, fingerprint, \
             fate, events)\nselect {partition}, moved.head, ({tenants}::text[])[1], {}::text, {}::text, {}::text, {at}, \
             {}::text, 'applied', {}::text::json\nfrom moved\n)",
            own(1), own(2), own(3), own(4), own(5),
        ));
        let answer = if returns {
            format!("select written._place, moved.head, {at}{}\nfrom written, moved", columns("written"))
        } else {
            format!("select 1::bigint, moved.head, {at}\nfrom moved")
        };
        Some(format!("with {}\n{answer}", parts.join(", ")))
    }

    /// Takes the heads of several partitions and appends a record to each: if everything was written, which is found out
    /// before the first head is taken. They are taken in the order of the array, as those of several plans are.
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
