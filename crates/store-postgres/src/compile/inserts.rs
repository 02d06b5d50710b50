//! Plans that insert one row each. Of that row everything is known on this side, but for what the server's clock says. So
//! the statement gives only the reading back, and [`eval`](statehouse_store::eval) makes the row of it, as it would decide
//! the plan. What the record tells of the row is a constant too; what the clock says in it, the server fills in.
//!
//! **One plan** inserts its row if it is not there, and does nothing otherwise. **Several** insert their rows as if none were
//! there: if one is, the statement fails, nothing was done, and all of them are decided by their rows, as long as such rows
//! are found ([`crate::assumed_absent`]). In return the engine need not ask which of the rows were written: the places of the records, from
//! the heads on, are known ahead ([`InsertCounts`]), and all that comes back are the heads.

use std::collections::BTreeMap;

use statehouse_store::bug;
use statehouse_store::table::{TENANT, VERSION};
use statehouse_store::{Expr, Operand, Plan, Position, StoreError};

use super::statement::{CompiledStatement, FoundRow, RECORD, ValueSource, json_time};
use super::{Compiled, PlanOutcome};
use crate::shape::{is_stamped, partition, stamp, stamps_record, takers};
use crate::size_bounds;
use crate::sql::{Arg, count_at, int_at, literal, name, partition_at, placeholder, time_at};

/// Where the records of plans that are applied together stand in the log, counted from the heads of their partitions.
pub(crate) struct InsertCounts {
    /// Of each plan, its partition and which record it is there, from 1.
    ranks: Vec<(u32, i64)>,
    /// How many go to each partition. Heads are taken in this order.
    counts: BTreeMap<u32, i64>,
}

impl InsertCounts {
    pub(super) fn of(plans: &[&Plan], partitions: u32) -> InsertCounts {
        let mut counts = BTreeMap::new();
        let mut next = |plan: &Plan| {
            let partition = partition(plan, partitions);
            let count = counts.entry(partition).or_insert(0);
            *count += 1;
            (partition, *count)
        };
        InsertCounts { ranks: plans.iter().map(|plan| next(plan)).collect(), counts }
    }

    /// What the statement has to know of it: the plans' ranks, the partitions, their counts.
    pub(super) fn args<'p>(&self) -> [Arg<'p>; 3] {
        [
            Arg::Ints(self.ranks.iter().map(|(_, rank)| *rank).collect()),
            Arg::Partitions(self.counts.keys().copied().collect()),
            Arg::Ints(self.counts.values().copied().collect()),
        ]
    }
}

impl Compiled<'_> {
    /// What came of plans that insert: all were applied, or none.
    pub(super) fn inserted(
        &self,
        counts: &InsertCounts,
        rows: &[tokio_postgres::Row],
    ) -> Result<Vec<Option<PlanOutcome>>, StoreError> {
        let is_logged = self.plans.first().is_some_and(|plan| plan.entry().is_some());
        let mut bases: BTreeMap<u32, u64> = BTreeMap::new();
        let mut at = self.now;
        for answer in rows {
            if is_logged {
                let (heads, base) = ("statehouse_heads", count_at(answer, 1, "statehouse_heads")?);
                bases.insert(partition_at(answer, 0, heads)?, base);
            } else if usize::try_from(int_at(answer, 0, "the answer")?) != Ok(self.plans.len()) {
                return Ok(self.plans.iter().map(|_| None).collect());
            }
            if at.is_none() {
                at = Some(time_at(answer, if is_logged { 2 } else { 1 }, "the answer")?);
            }
        }
        let Some(at) = at.filter(|_| !rows.is_empty()) else {
            return Ok(self.plans.iter().map(|_| None).collect());
        };
        let inserted = counts.ranks.iter().map(|(partition, rank)| {
            let mut logged = None;
            if is_logged {
                let head = bases.get(partition);
                let head = head.ok_or_else(|| bug!("the head of partition {partition} is missing"))?;
                logged = Some(Position { partition: *partition, offset: head + rank.unsigned_abs() });
            }
            Ok(Some(PlanOutcome::Inserted { logged, at }))
        });
        inserted.collect()
    }
}

/// A time as the text of JSON that it is.
fn json_text(time: &str) -> String {
    format!("'\"' || {} || '\"'", json_time(time))
}

/// What an insert is made of.
struct Parts {
    /// The columns of the table, and what is put into them.
    columns: String,
    values: String,
    /// How many constants belong to the step.
    constants: usize,
    /// The constants of the record; none if there is none.
    record: Vec<String>,
    /// The events, complete.
    events: String,
    /// The clock's reading.
    at: String,
    /// Whether what is put into the record needs more constants than its own.
    is_mixed: bool,
}

impl CompiledStatement<'_, '_> {
    /// The statement of plans that insert.
    pub(super) fn insert_text(mut self) -> Option<String> {
        let (plan, step, now) = (self.plan, self.step, self.compiler.now);
        size_bounds::bounds(step, takers(plan).count())?;
        // In the order of the constants.
        let _ = self.key_condition();
        let operands: Vec<Vec<String>> =
            step.assignments.iter().map(|a| self.operand_names(&a.expr)).collect();
        let constants = self.named;
        let record: Vec<String> = match plan.entry() {
            Some(_) => RECORD.iter().map(|_| self.constant()).collect(),
            None => Vec::new(),
        };
        // Several records, or a record and an answer, tell one time.
        self.reads_clock |= now.is_none() && matches!(self.source, ValueSource::Rows { .. });
        let at = match now {
            Some(_) if !record.is_empty() => format!("{}::timestamptz", self.constant()),
            _ if self.reads_clock => "(select now from clock)".to_owned(),
            _ => "clock_timestamp()".to_owned(),
        };
        let mut events = record.last().cloned().unwrap_or_default();
        let (mut is_dated, mut is_mixed) = (false, false);
        if stamps_record(plan, step, now) {
            let mut filled = Vec::new();
            let assigned = step.assignments.iter().zip(&operands).enumerate();
            for (index, (assignment, names)) in assigned.filter(|(_, (a, _))| is_stamped(a, now)) {
                let is_moved = !matches!(assignment.expr, Expr::Is(Operand::Now { plus_micros: 0 }));
                let mark = stamp(step, index);
                if filled.contains(&mark) {
                    continue;
                }
                let text = if is_moved {
                    let time =
                        self.expression(&assignment.expr, names, &assignment.column, FoundRow::Nothing);
                    json_text(&format!("({time})"))
                } else {
                    "(select text from clock)".to_owned()
                };
                (is_dated, is_mixed) = (is_dated || !is_moved, is_mixed || is_moved);
                events = format!("replace({events}, '{mark}', {text})");
                filled.push(mark);
            }
        }
        let events = format!("{events}::json");
        let mut lead: Vec<String> = Vec::new();
        lead.extend(self.scope.as_ref().map(|scope| format!("scope as materialized (\nselect {scope}\n)")));
        if self.reads_clock {
            lead.push(match is_dated {
                false => "clock as materialized (\nselect clock_timestamp() as now\n)".to_owned(),
                true => format!(
                    "clock as materialized (\nselect now, {} as text\n\
                     from (select clock_timestamp() as now) as read\n)",
                    json_text("now"),
                ),
            });
        }
        let (columns, values) = self.new_row(&operands);
        let parts = Parts { columns, values, constants, record, events, at, is_mixed };
        Some(match self.source {
            ValueSource::Parameters => self.insert_one(lead, &parts),
            ValueSource::Rows { kinds } => self.insert_several(lead, &parts, kinds),
        })
    }

    fn insert_one(&self, mut lead: Vec<String>, parts: &Parts) -> String {
        let table = self.compiler.names.table(self.step.table.name());
        let Parts { columns, values, record, events, at, .. } = parts;
        let returning = match record.is_empty() {
            true if self.compiler.now.is_some() => "1::bigint".to_owned(),
            true => format!("1::bigint, {at}"),
            false => format!("{at} as _at"),
        };
        let insert = format!(
            "insert into {table} as t ({columns})\nvalues ({values})\non conflict ({}) do nothing\nreturning {returning}",
            self.key_columns(),
        );
        if record.is_empty() {
            let with = if lead.is_empty() { String::new() } else { format!("with {}\n", lead.join(", ")) };
            return format!("{with}{insert}");
        }
        lead.push(format!("written as (\n{insert}\n)"));
        lead.extend(self.append_one(events, record));
        format!("with {}\nselect 1::bigint, moved.head, written._at\nfrom written, moved", lead.join(", "))
    }

    /// One scan of the arrays inserts the rows, in their order; the heads are taken when it is done, by lookups in the order of
    /// the partitions.
    fn insert_several(&self, mut lead: Vec<String>, parts: &Parts, kinds: &[&str]) -> String {
        let table = self.compiler.names.table(self.step.table.name());
        let Parts { columns, values, constants, record, events, at, is_mixed } = parts;
        let rows = self.rows_of(kinds, 0..*constants, &self.limit());
        lead.push(format!(
            "inserted as (\ninsert into {table} ({columns})\nselect {values}\nfrom {rows}\nreturning 1\n)"
        ));
        let reading = if self.compiler.now.is_some() { String::new() } else { format!(", {at}") };
        let [partition, operation, resource, key, fingerprint, _] = record.as_slice() else {
            return format!("with {}\nselect count(*){reading}\nfrom inserted", lead.join(", "));
        };
        let (heads, log) = (self.compiler.names.heads(), self.compiler.names.log());
        let first = self.lists + 1 + kinds.len() + usize::from(self.says_tenants);
        let [ranks, partitions, counts] = [0, 1, 2].map(|index| placeholder(first + index));
        lead.push(format!(
            "moved as (\nupdate {heads} as h\nset head = h.head + k.count\nfrom (\n\
             select p.partition, ({counts}::bigint[])[p._place]\n\
             from unnest({partitions}::integer[]) with ordinality as p(partition, _place)\n\
             limit cardinality({partitions}::integer[])\n) as k(partition, count)\n\
             where h.partition = k.partition and (select count(*) from inserted) = cardinality({}::text[])\n\
             returning h.partition, h.head - k.count as base\n)",
            placeholder(self.lists),
        ));
        let rows = self.rows_of(kinds, if *is_mixed { 0 } else { *constants }..kinds.len(), "");
        lead.push(format!(
            "logged as (\ninsert into {log} (partition, position, tenant, operation, resource, key, at, \
             fingerprint, fate, events)\nselect moved.partition, moved.base + ({ranks}::bigint[])[k._place], \
             k.tenant, {operation}, {resource}, {key}, {at}, {fingerprint}, 'applied', {events}\n\
             from {rows}\njoin moved on moved.partition = {partition}\n)"
        ));
        format!("with {}\nselect moved.partition, moved.base{reading}\nfrom moved", lead.join(", "))
    }

    /// All columns of a row that is not there yet, and their values.
    pub(super) fn new_row(&self, operands: &[Vec<String>]) -> (String, String) {
        let step = self.step;
        let mut columns = vec![TENANT.to_owned()];
        let mut values = vec![self.tenant().to_owned()];
        for (index, column) in step.table.columns().iter().enumerate() {
            columns.push(name(&column.name));
            let mut assigned = step.assignments.iter().zip(operands);
            values.push(match assigned.find(|(assignment, _)| assignment.column == column.name) {
                // The key's values are the first constants.
                _ if index < step.table.key_len() => match self.source {
                    ValueSource::Parameters => placeholder(1 + self.lists + index),
                    ValueSource::Rows { .. } => format!("k.c{}", index + 1),
                },
                Some((assignment, names)) => {
                    self.expression(&assignment.expr, names, &column.name, FoundRow::Nothing)
                }
                None => column.default.as_ref().map_or("null".to_owned(), literal),
            });
        }
        columns.push(VERSION.to_owned());
        values.push("1".to_owned());
        (columns.join(", "), values.join(", "))
    }
}
