//! Plans decided together: rows locked in one order, guards evaluated in memory, results written in bulk.
//!
//! All plans that are queued together, and all plans for which a compiled statement did nothing, are committed this way. The rows that
//! a batch names are locked and read, table by table, in the order of their keys. Then [`eval::decide`] decides each plan, in the order
//! of arrival, on the rows *as the plans before it left them*: many plans on one hot row become one write. The batch writes the final
//! state of each row, in one statement for each table and verb, then the heads of the log partitions in their order, then the records.
//!
//! A row that does not exist cannot be locked. If a plan inserts it, the primary key acts as the lock: if another transaction inserted
//! it first, the insert fails and the batch is decided again. If a plan only relies on the absence (an assert, or a removal of a row
//! that may be missing), a placeholder is inserted and deleted in the same transaction, so that no other transaction can insert the row
//! before this commit. Both need no read before, so such rows can be [assumed to be absent](crate::assumed_absent).
//!
//! This module does not communicate with the server; [`crate::writer`] does.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::sync::Arc;

use statehouse_store::bug;
use statehouse_store::eval::{self, Decision};
use statehouse_store::log::{LogPart, partition_of, parts_of};
use statehouse_store::plan::{Expect, Step, Verb};
use statehouse_store::table::VERSION;
use statehouse_store::{
    Applied, Bug, Commit, Plan, Position, Record, Row, StoreError, Table, Tenant, Time, Type, Value,
};

use crate::order;

/// A row that the batch names, whether it exists or not.
#[derive(Debug)]
pub(crate) struct Slot<'p> {
    pub table: &'p Arc<Table>,
    pub tenant: &'p Tenant,
    pub key: &'p [Value],
    /// Whether the first step on it requires its absence.
    expects_absence: bool,
    /// Whether it is assumed to be absent without a read.
    unread: bool,
    /// Whether the read found it.
    found: bool,
    /// Its state after the plans that were decided so far.
    current: Option<Row>,
    /// Whether an applied plan writes it or relies on it.
    used: bool,
    /// Whether an applied plan writes it.
    written: bool,
    /// Whether it was deleted and inserted again. Then columns that this program does not know are reset too.
    reborn: bool,
    /// The columns that were assigned, by their places.
    assigned: BTreeSet<usize>,
}

/// The decision on a plan.
#[derive(Debug)]
enum PlanDecision {
    /// Certain, whether or not the transaction commits.
    Certain(Result<Commit, StoreError>),
    /// Decided on writes of earlier plans of the batch: certain only when the transaction has committed.
    Dependent(Result<Commit, StoreError>),
    /// Applied when the transaction commits.
    Apply { rows: Vec<Option<Row>>, record: Option<PendingRecord> },
    /// A retry of an earlier plan of the batch; it gets the record of that plan.
    Repeat(usize),
    /// A retry of an operation whose record is in the log.
    Recorded(Box<Record>),
}

/// A record whose position is known when its partition's head is.
#[derive(Debug)]
struct PendingRecord {
    record: Record,
    partition: u32,
    /// Which record of the batch in this partition, from 1.
    rank: u64,
    /// The shares of further partitions in its events.
    parts: Vec<LogPart>,
    /// What goes to these partitions, in their order.
    further: Vec<PendingRecord>,
}

impl PendingRecord {
    /// Where the record stands, given the head of each partition before.
    fn position(&self, bases: &BTreeMap<u32, u64>) -> Result<Position, Bug> {
        let base = bases.get(&self.partition);
        let base = base.ok_or_else(|| bug!("the head of partition {} is missing", self.partition))?;
        Ok(Position { partition: self.partition, offset: base + self.rank })
    }

    /// What is written of it.
    fn to_write(&self, is_part: bool) -> PlacedRecord<'_> {
        let PendingRecord { record, partition, rank, parts, .. } = self;
        PlacedRecord { partition: *partition, rank: *rank, record, parts, is_part }
    }

    /// The record with its positions.
    fn placed(self, bases: &BTreeMap<u32, u64>) -> Result<Record, Bug> {
        let position = Some(self.position(bases)?);
        let also_at = self.further.iter().map(|further| further.position(bases)).collect::<Result<_, _>>()?;
        Ok(Record { position, also_at, ..self.record })
    }
}

/// A record to be written.
#[derive(Clone, Copy, Debug)]
pub(crate) struct PlacedRecord<'b> {
    pub partition: u32,
    /// Which of those that are written to the partition, from 1.
    pub rank: u64,
    pub record: &'b Record,
    /// The shares of further partitions in its events.
    pub parts: &'b [LogPart],
    /// Whether it is a further record of its plan.
    pub is_part: bool,
}

impl<'b> PlacedRecord<'b> {
    /// A plan's commit record that is the only one of its partition.
    pub(crate) fn alone(partition: u32, record: &'b Record) -> PlacedRecord<'b> {
        PlacedRecord { partition, rank: 1, record, parts: &[], is_part: false }
    }
}

/// Plans decided together.
#[derive(Debug)]
pub(crate) struct Batch<'p> {
    plans: &'p [Plan],
    /// In the order in which they are locked.
    slots: Vec<Slot<'p>>,
    /// The slots of each plan's steps.
    steps: Vec<Vec<usize>>,
    verdicts: Vec<PlanDecision>,
    /// How many records go to each partition.
    counts: BTreeMap<u32, u64>,
}

impl<'p> Batch<'p> {
    /// A batch of plans. All of them must use the same definition of a table: see [`BatchAdmission`].
    pub(crate) fn of(plans: &'p [Plan]) -> Batch<'p> {
        let mut definitions: Vec<&'p Arc<Table>> = Vec::new();
        let mut definition = |table: &'p Arc<Table>| match definitions.iter().position(|d| same(d, table)) {
            Some(number) => number,
            None => {
                definitions.push(table);
                definitions.len() - 1
            }
        };
        let mut named = |plan: &'p Plan, step: &'p Step| {
            order::place(step.table.name(), definition(&step.table), plan.tenant(), &step.key)
        };
        let mut steps: Vec<Vec<usize>> = plans.iter().map(|plan| vec![0; plan.steps().len()]).collect();
        let mut places: Vec<(Vec<u8>, usize, usize)> = Vec::with_capacity(steps.iter().map(Vec::len).sum());
        for (number, plan) in plans.iter().enumerate() {
            places.extend(plan.steps().iter().enumerate().map(|(at, step)| (named(plan, step), number, at)));
        }
        // Of the steps on one row, the first one comes first.
        places.sort_unstable();
        let mut slots: Vec<Slot<'p>> = Vec::with_capacity(places.len());
        let mut last: Option<&[u8]> = None;
        for (place, number, at) in &places {
            let Some(plan) = plans.get(*number) else { continue };
            let Some(step) = plan.steps().get(*at) else { continue };
            if last != Some(place) {
                last = Some(place);
                slots.push(Slot {
                    table: &step.table,
                    tenant: plan.tenant(),
                    key: &step.key,
                    expects_absence: step.expect == Expect::Absent,
                    unread: false,
                    found: false,
                    current: None,
                    used: false,
                    written: false,
                    reborn: false,
                    assigned: BTreeSet::new(),
                });
            }
            if let Some(slot) = steps.get_mut(*number).and_then(|steps| steps.get_mut(*at)) {
                *slot = slots.len() - 1;
            }
        }
        Batch { plans, slots, steps, verdicts: Vec::new(), counts: BTreeMap::new() }
    }

    /// The slots of each table's definition, in the order in which they are locked, as ranges.
    pub(crate) fn tables(&self) -> Vec<std::ops::Range<usize>> {
        let mut ranges: Vec<std::ops::Range<usize>> = Vec::new();
        for (number, slot) in self.slots.iter().enumerate() {
            match ranges.last_mut() {
                Some(last)
                    if self.slots.get(last.start).is_some_and(|first| same(first.table, slot.table)) =>
                {
                    last.end = number + 1;
                }
                _ => ranges.push(number..number + 1),
            }
        }
        ranges
    }

    /// The slots of one table.
    pub(crate) fn slots(&self, range: &std::ops::Range<usize>) -> &[Slot<'p>] {
        self.slots.get(range.clone()).unwrap_or_default()
    }

    /// Assumes rows to be absent whose absence is required, in tables that permit it ([`crate::assumed_absent`]).
    pub(crate) fn assume_absent(&mut self, trusts: impl Fn(&str) -> bool) {
        for slot in &mut self.slots {
            slot.unread = slot.expects_absence && trusts(slot.table.name());
        }
    }

    /// How many rows are not read.
    pub(crate) fn unread(&self) -> usize {
        self.slots.iter().filter(|slot| slot.unread).count()
    }

    /// The numbers of the slots that are read, table by table, in the order in which they are locked.
    pub(crate) fn rows_to_read(&self) -> Vec<Vec<usize>> {
        let is_read = |number: &usize| self.slots.get(*number).is_some_and(|slot| !slot.unread);
        let tables = self.tables().into_iter().map(|range| range.filter(is_read).collect::<Vec<usize>>());
        tables.filter(|numbers| !numbers.is_empty()).collect()
    }

    /// A slot by its number.
    pub(crate) fn slot(&self, number: usize) -> Option<&Slot<'p>> {
        self.slots.get(number)
    }

    /// For each row that was read although its absence is required: its table, and whether it was found.
    pub(crate) fn checked_absences(&self) -> impl Iterator<Item = (&'p str, bool)> {
        let rows_to_read = self.slots.iter().filter(|slot| slot.expects_absence && !slot.unread);
        rows_to_read.map(|slot| (slot.table.name(), slot.found))
    }

    /// The tables of rows that were not read and on which a decision rests that writes nothing, so that no insert would verify
    /// it: the rows up to the step that refuses a plan, and all rows of a plan that fails.
    pub(crate) fn unverified(&self) -> BTreeSet<&'p str> {
        let rests_on = |(verdict, slots): (&PlanDecision, &Vec<usize>)| {
            let steps = match verdict {
                PlanDecision::Apply { .. } | PlanDecision::Repeat(_) | PlanDecision::Recorded(_) => 0,
                PlanDecision::Certain(Ok(Commit::Refused(refused)))
                | PlanDecision::Dependent(Ok(Commit::Refused(refused))) => refused.step + 1,
                PlanDecision::Certain(_) | PlanDecision::Dependent(_) => slots.len(),
            };
            slots.iter().take(steps).copied().collect::<Vec<usize>>()
        };
        let numbers = self.verdicts.iter().zip(&self.steps).flat_map(rests_on);
        let unread = numbers.filter_map(|number| self.slots.get(number).filter(|slot| slot.unread));
        unread.map(|slot| slot.table.name()).collect()
    }

    /// Records a row that was read.
    pub(crate) fn found(&mut self, slot: usize, row: Row) {
        if let Some(slot) = self.slots.get_mut(slot) {
            slot.found = true;
            slot.current = Some(row);
        }
    }

    /// The operation ids whose records would change the outcome.
    pub(crate) fn operations(&self) -> impl Iterator<Item = (&'p Tenant, &'p str)> + use<'p> {
        let remembered = self.plans.iter().filter(|plan| plan.entry().is_some());
        remembered.map(|plan| (plan.tenant(), plan.operation()))
    }

    /// Decides all plans, in their order. `recorded` holds the records of operations that are in the log already.
    pub(crate) fn decide(
        &mut self,
        now: Time,
        partitions: u32,
        mut recorded: HashMap<(Tenant, String), Record>,
    ) {
        let mut applied: HashMap<(&Tenant, &str), usize> = HashMap::new();
        for (number, plan) in self.plans.iter().enumerate() {
            let operation = (plan.tenant(), plan.operation());
            let remembered = plan.entry().is_some();
            let verdict = if remembered && let Some(first) = applied.get(&operation) {
                PlanDecision::Repeat(*first)
            } else if remembered
                && let Some(record) = recorded.remove(&(plan.tenant().clone(), plan.operation().to_owned()))
            {
                let again = record.clone();
                recorded.insert((plan.tenant().clone(), plan.operation().to_owned()), again);
                PlanDecision::Recorded(Box::new(record))
            } else {
                self.decide_one(number, plan, now, partitions)
            };
            if remembered && matches!(verdict, PlanDecision::Apply { .. }) {
                applied.insert(operation, number);
            }
            self.verdicts.push(verdict);
        }
    }

    fn decide_one(&mut self, number: usize, plan: &'p Plan, now: Time, partitions: u32) -> PlanDecision {
        let Some(numbers) = self.steps.get(number).cloned() else {
            return PlanDecision::Certain(Err(bug!("a plan that is not of the batch").into()));
        };
        let parts = match parts_of(plan, partitions) {
            Ok(parts) => parts,
            Err(error) => return PlanDecision::Certain(Err(error)),
        };
        // The rows are moved out for the decision and moved back: a batch may have large ones.
        let mut after_others = false;
        let mut current: Vec<Option<Row>> = Vec::with_capacity(numbers.len());
        for slot in &numbers {
            let slot = self.slots.get_mut(*slot);
            after_others |= slot.as_ref().is_some_and(|slot| slot.written);
            current.push(slot.and_then(|slot| slot.current.take()));
        }
        let decision = eval::decide(plan, now, &current);
        for (slot, row) in numbers.iter().zip(current) {
            if let Some(slot) = self.slots.get_mut(*slot) {
                slot.current = row;
            }
        }
        let decided = |outcome| {
            if after_others { PlanDecision::Dependent(outcome) } else { PlanDecision::Certain(outcome) }
        };
        let effect = match decision {
            Err(error) => return decided(Err(error)),
            Ok(Decision::Refuse(refused)) => return decided(Ok(Commit::Refused(refused))),
            Ok(Decision::Apply(effect)) => effect,
        };
        let record = plan.entry().map(|entry| {
            let partition = partition_of(plan.tenant(), &entry.resource, &entry.key, partitions);
            self.pending(Record::of(plan, now, effect.events), partition, parts)
        });
        let record = match record.transpose() {
            Ok(record) => record,
            Err(bug) => return PlanDecision::Certain(Err(bug.into())),
        };
        // Rows are copied only for a caller that wants them back.
        let (rows, mut left) = match plan.returns_rows() {
            true => (effect.rows.clone(), effect.rows),
            false => (Vec::new(), effect.rows),
        };
        for ((slot, step), row) in numbers.iter().zip(plan.steps()).zip(&mut left) {
            if let Some(slot) = self.slots.get_mut(*slot) {
                slot.apply(step, row.take());
            }
        }
        PlanDecision::Apply { rows, record }
    }

    /// Gives a record, and what its plan leaves in further partitions, their ranks.
    fn pending(&mut self, record: Record, partition: u32, parts: Vec<LogPart>) -> Result<PendingRecord, Bug> {
        let records: Vec<Record> = parts.iter().map(|part| part.record(&record)).collect::<Result<_, _>>()?;
        let mut rank = |partition: u32| {
            let rank = self.counts.entry(partition).or_default();
            *rank += 1;
            *rank
        };
        let of_part = |(part, record): (&LogPart, Record)| PendingRecord {
            record,
            partition: part.partition,
            rank: rank(part.partition),
            parts: Vec::new(),
            further: Vec::new(),
        };
        let further = parts.iter().zip(records).map(of_part).collect();
        let rank = rank(partition);
        Ok(PendingRecord { record, partition, rank, parts, further })
    }

    /// Whether anything is to be written or relied on.
    pub(crate) fn applies(&self) -> bool {
        self.verdicts.iter().any(|verdict| matches!(verdict, PlanDecision::Apply { .. }))
    }

    /// How many records go to each partition.
    pub(crate) fn counts(&self) -> &BTreeMap<u32, u64> {
        &self.counts
    }

    /// The records to be written.
    pub(crate) fn records(&self) -> impl Iterator<Item = PlacedRecord<'_>> {
        let plans = self.verdicts.iter().filter_map(|verdict| match verdict {
            PlanDecision::Apply { record: Some(pending), .. } => Some(pending),
            _ => None,
        });
        plans.flat_map(|pending| {
            let further = pending.further.iter().map(|further| further.to_write(true));
            std::iter::once(pending.to_write(false)).chain(further)
        })
    }

    /// The outcomes when the transaction is committed. `bases` has the head of each partition before it.
    pub(crate) fn committed(self, bases: &BTreeMap<u32, u64>) -> Vec<Result<Commit, StoreError>> {
        let mut outcomes: Vec<Result<Commit, StoreError>> = Vec::with_capacity(self.verdicts.len());
        for (plan, verdict) in self.plans.iter().zip(self.verdicts) {
            let outcome = match verdict {
                PlanDecision::Certain(outcome) | PlanDecision::Dependent(outcome) => outcome,
                PlanDecision::Recorded(record) => Ok(Commit::of_record(*record)),
                PlanDecision::Apply { rows, record } => {
                    // The plan is committed. Without its position the outcome cannot be reported as applied.
                    match record.map(|pending| pending.placed(bases)).transpose() {
                        Ok(record) => Ok(Commit::Applied(Applied { record, rows, repeated: false })),
                        Err(bug) => Err(StoreError::unknown(plan.operation(), bug.to_string())),
                    }
                }
                PlanDecision::Repeat(first) => match outcomes.get(first) {
                    Some(Ok(Commit::Applied(Applied { record: Some(record), .. }))) => {
                        Ok(Commit::of_record(record.clone()))
                    }
                    _ => Err(StoreError::unavailable("the operation it repeats was not applied")),
                },
            };
            outcomes.push(outcome);
        }
        outcomes
    }

    /// The outcomes if it is unknown whether the transaction was committed.
    pub(crate) fn unknown(self, why: &str) -> Vec<Result<Commit, StoreError>> {
        let plans = self.plans.iter();
        plans
            .zip(self.verdicts)
            .map(|(plan, verdict)| match verdict {
                PlanDecision::Certain(outcome) => outcome,
                PlanDecision::Recorded(record) => Ok(Commit::of_record(*record)),
                PlanDecision::Dependent(_) => Err(StoreError::unavailable(format!(
                    "the outcome of plans that it depends on is unknown: {why}"
                ))),
                PlanDecision::Apply { .. } | PlanDecision::Repeat(_) => {
                    Err(StoreError::unknown(plan.operation(), why))
                }
            })
            .collect()
    }
}

impl Slot<'_> {
    /// Applies a step of an applied plan to the row in memory.
    fn apply(&mut self, step: &Step, row: Option<Row>) {
        self.used = true;
        match step.verb {
            Verb::Assert => return,
            Verb::Delete if self.current.is_none() => return,
            Verb::Delete => self.assigned.clear(),
            Verb::Put => {
                self.reborn |= self.current.is_none() && self.found;
                let places = step.assignments.iter().filter_map(|a| self.table.position(&a.column));
                self.assigned.extend(places);
            }
        }
        self.written = true;
        self.current = row;
    }

    /// The change of the stored row.
    pub(crate) fn change(&self) -> RowChange<'_> {
        match (self.found, &self.current) {
            (false, None) if self.used => RowChange::HoldAbsent,
            (false, Some(row)) => RowChange::Insert(row),
            (true, None) => RowChange::Delete,
            (true, Some(row)) if self.reborn => RowChange::Replace(row),
            (true, Some(row)) if self.written => RowChange::Update(row, &self.assigned),
            _ => RowChange::Nothing,
        }
    }
}

/// A change of a stored row.
#[derive(Debug, PartialEq)]
pub(crate) enum RowChange<'s> {
    Nothing,
    Insert(&'s Row),
    /// The row, and the places of the columns that may differ.
    Update(&'s Row, &'s BTreeSet<usize>),
    Delete,
    /// It was deleted and inserted again.
    Replace(&'s Row),
    /// It does not exist, and no other transaction may insert it before the commit.
    HoldAbsent,
}

/// Whether two handles are of one definition of a table.
pub(crate) fn same(left: &Arc<Table>, right: &Arc<Table>) -> bool {
    Arc::ptr_eq(left, right) || left == right
}

/// Selects plans that can be decided together: those that use the same definitions of their tables. Programs of two versions
/// may use different definitions of one table, and so may one plan. Such a plan is decided by itself, because a row is passed on
/// from plan to plan in one shape only.
#[derive(Debug, Default)]
pub(crate) struct BatchAdmission {
    tables: HashMap<String, Vec<Arc<Table>>>,
}

impl BatchAdmission {
    /// Whether a plan can join those admitted so far; if so, it has.
    pub(crate) fn admits(&mut self, plan: &Plan) -> bool {
        let known = |step: &Step| self.tables.get(step.table.name()).map(Vec::as_slice).unwrap_or_default();
        let fits = plan.steps().iter().all(|step| known(step).iter().all(|known| same(known, &step.table)));
        for step in plan.steps().iter().filter(|_| fits) {
            match self.tables.get_mut(step.table.name()) {
                Some(known) if known.iter().any(|known| same(known, &step.table)) => {}
                Some(known) => known.push(step.table.clone()),
                None => drop(self.tables.insert(step.table.name().to_owned(), vec![step.table.clone()])),
            }
        }
        fits
    }
}

/// What a required column without a default holds in a placeholder.
pub(crate) fn nothing_of(kind: Type) -> Value {
    match kind {
        Type::Text => Value::Text(String::new()),
        Type::Int => Value::Int(0),
        Type::Float => Value::Float(0.0),
        Type::Bool => Value::Bool(false),
        Type::Bytes => Value::Bytes(Vec::new()),
        Type::Time => Value::Time(Time::from_micros(0)),
        Type::Json => Value::Json(serde_json::Value::Bool(false)),
    }
}

/// Roughly how much a plan sends, in bytes, to keep batches from growing too large for a message.
pub(crate) fn size_of(plan: &Plan) -> usize {
    let events = plan.entry().into_iter().flat_map(|entry| &entry.events);
    let data = events.flat_map(|draft| draft.data.values()).map(json_size);
    plan.steps().iter().map(size_of_step).chain(data).sum::<usize>() + VERSION.len()
}

/// Roughly how much a step sends.
pub(crate) fn size_of_step(step: &Step) -> usize {
    let constants = step.assignments.iter().filter_map(|assignment| assignment.expr.as_constant());
    let lengths = constants.map(|value| match value {
        Value::Text(text) => text.len(),
        Value::Bytes(bytes) => bytes.len(),
        Value::Json(json) => json_size(json),
        _ => 8,
    });
    lengths.sum::<usize>() + 64
}

fn json_size(json: &serde_json::Value) -> usize {
    match json {
        serde_json::Value::String(text) => text.len() + 2,
        serde_json::Value::Array(items) => items.iter().map(json_size).sum::<usize>() + 2,
        serde_json::Value::Object(fields) => {
            fields.iter().map(|(name, field)| name.len() + json_size(field) + 4).sum::<usize>() + 2
        }
        _ => 8,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use statehouse_store::guard::column;
    use statehouse_store::{Entry, EventTemplate};

    fn table() -> Arc<Table> {
        Table::named("counters").partition("id", Type::Text).defaulted("n", Type::Int, 0).build().unwrap()
    }

    fn acme() -> Tenant {
        Tenant::new("acme").unwrap()
    }

    fn plan(operation: &str, steps: Vec<Step>) -> Plan {
        let entry = Entry::about("counter", "x").event(EventTemplate::named("changed"));
        Plan::of(&acme(), operation).steps(steps).log(entry).build().unwrap()
    }

    fn row(table: &Arc<Table>, id: &str, n: i64) -> Row {
        Row::new(table.clone(), acme(), vec![id.into(), n.into()], 1)
    }

    fn below(table: &Arc<Table>, limit: i64) -> Step {
        Step::update(table, ["a".into()]).guard(column("n").lt(limit)).set("n", column("n").add(1))
    }

    /// Decides plans on rows that are found, which are named by their first column.
    fn decided<'p>(plans: &'p [Plan], found: &[Row]) -> Batch<'p> {
        let mut batch = Batch::of(plans);
        for row in found {
            let index = batch.slots.iter().position(|slot| slot.key == row.key()).unwrap();
            batch.found(index, row.clone());
        }
        batch.decide(Time::from_micros(0), 4, HashMap::new());
        batch
    }

    fn summary(outcomes: &[Result<Commit, StoreError>]) -> Vec<&'static str> {
        outcomes
            .iter()
            .map(|outcome| match outcome {
                Ok(Commit::Applied(applied)) if applied.repeated => "repeated",
                Ok(Commit::Applied(_)) => "applied",
                Ok(Commit::Refused(_)) => "refused",
                Ok(Commit::Fenced) => "fenced",
                Err(StoreError::OutcomeUnknown { .. }) => "unknown",
                Err(StoreError::Unavailable { .. }) => "unavailable",
                Err(_) => "error",
            })
            .collect()
    }

    #[test]
    fn many_plans_on_one_row_are_one_write_of_it() {
        let table = table();
        let plans: Vec<Plan> = (0..4).map(|n| plan(&format!("op-{n}"), vec![below(&table, 3)])).collect();
        let batch = decided(&plans, &[row(&table, "a", 0)]);
        let changes: Vec<RowChange<'_>> = batch.slots.iter().map(Slot::change).collect();
        let [RowChange::Update(row, _)] = changes.as_slice() else { panic!("{changes:?}") };
        assert_eq!((row.int("n"), row.version()), (Some(3), 4));
        assert_eq!(batch.records().map(|placed| placed.rank).collect::<Vec<_>>(), [1, 2, 3]);
        let bases = batch.counts().keys().map(|partition| (*partition, 10)).collect();
        let outcomes = batch.committed(&bases);
        assert_eq!(summary(&outcomes), ["applied", "applied", "applied", "refused"]);
    }

    #[test]
    fn a_refusal_that_rests_on_an_unknown_outcome_is_not_given() {
        let table = table();
        let unrelated = Step::update(&table, ["b".into()]).guard(column("n").gt(5)).set("n", 0);
        let plans = [
            plan("op-1", vec![below(&table, 1)]),
            plan("op-2", vec![below(&table, 1)]),
            plan("op-3", vec![unrelated]),
            plan("op-1", vec![below(&table, 1)]),
        ];
        let found = [row(&table, "a", 0), row(&table, "b", 0)];
        let batch = decided(&plans, &found);
        assert_eq!(summary(&batch.unknown("cut")), ["unknown", "unavailable", "refused", "unknown"]);
        let batch = decided(&plans, &found);
        let bases = batch.counts().keys().map(|partition| (*partition, 0)).collect();
        assert_eq!(summary(&batch.committed(&bases)), ["applied", "refused", "refused", "repeated"]);
    }

    #[test]
    fn rows_that_come_and_go_within_a_batch() {
        let table = table();
        let key = |id: &str| [Value::from(id)];
        let check = |steps: Vec<Step>, found: &[Row], expected: &str| {
            let plans: Vec<Plan> =
                steps.into_iter().enumerate().map(|(n, step)| plan(&format!("op-{n}"), vec![step])).collect();
            let batch = decided(&plans, found);
            let change = format!("{:?}", batch.slots[0].change());
            assert!(change.starts_with(expected), "{change} is not {expected}");
        };
        let there = [row(&table, "a", 7)];
        check(vec![Step::insert(&table, key("a"))], &[], "Insert");
        check(vec![Step::insert(&table, key("a")), Step::delete(&table, key("a"))], &[], "HoldAbsent");
        check(vec![Step::assert_absent(&table, key("a"))], &[], "HoldAbsent");
        check(vec![Step::remove(&table, key("a"))], &[], "HoldAbsent");
        check(vec![Step::update(&table, key("a")).set("n", 1)], &[], "Nothing");
        check(vec![Step::remove(&table, key("a"))], &there, "Delete");
        check(vec![Step::assert(&table, key("a"))], &there, "Nothing");
        check(vec![Step::delete(&table, key("a")), Step::insert(&table, key("a"))], &there, "Replace");
    }

    #[test]
    fn plans_that_know_a_table_differently_are_not_decided_together() {
        let (old, new) = (
            table(),
            Table::named("counters")
                .partition("id", Type::Text)
                .defaulted("n", Type::Int, 0)
                .optional("note", Type::Text)
                .build()
                .unwrap(),
        );
        let write = |table: &Arc<Table>, id: &str| Step::upsert(table, [id.into()]);
        let mut admission = BatchAdmission::default();
        assert!(admission.admits(&plan("op-1", vec![write(&old, "a")])));
        assert!(admission.admits(&plan("op-2", vec![write(&table(), "b")])));
        assert!(!admission.admits(&plan("op-3", vec![write(&new, "c")])));
        let mixed = plan("op-4", vec![write(&old, "a"), write(&new, "b")]);
        assert!(!admission.admits(&mixed));
        let mut admission = BatchAdmission::default();
        assert!(admission.admits(&mixed));
        assert!(!admission.admits(&plan("op-5", vec![write(&old, "c")])));
        let plans = [mixed];
        assert_eq!(Batch::of(&plans).tables().len(), 2);
    }
}
