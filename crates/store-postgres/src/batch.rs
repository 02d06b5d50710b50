//! Plans decided together: rows locked in one order, guards evaluated in memory, results written in bulk.
//!
//! This is the way of every plan that is not alone, and of every plan whose outcome a compiled statement did not
//! settle. The rows that a batch names are locked and read, table by table, in the order of their keys. Then each plan
//! is decided by [`eval::decide`], in the order of arrival, on the rows *as the plans before it left them*: many
//! plans on one hot row become one write of it. What is written is the final image of each row, in one statement for
//! each table and verb, then the heads of the log's partitions in their order, then the records.
//!
//! A row that is not there cannot be locked. Where it is inserted, the primary key is the lock: if somebody else was
//! faster, the insert fails and the batch is decided anew. Where a plan only relies on the absence (it asserts it, or
//! removes what may be missing), a placeholder is inserted and deleted again in the same transaction: nobody can
//! insert the row before this commit. Both need no look before, so such rows can be [taken to be missing](crate::trust).
//!
//! Nothing here talks to a server: [`crate::writer`] does.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::sync::Arc;

use statehouse_store::eval::{self, Decision};
use statehouse_store::log::{LogPart, partition_of, parts_of};
use statehouse_store::plan::{Expect, Step, Verb};
use statehouse_store::table::VERSION;
use statehouse_store::{
    Applied, Bug, Commit, Plan, Position, Record, Row, StoreError, Table, Tenant, Time, Type, Value,
};

use crate::order;

/// A row that the batch names, found or not.
#[derive(Debug)]
pub(crate) struct Slot<'p> {
    pub table: &'p Arc<Table>,
    pub tenant: &'p Tenant,
    pub key: &'p [Value],
    /// Whether the first step on it demands that it is not there.
    expects_absence: bool,
    /// Whether it is taken to be missing without a look.
    unread: bool,
    /// Whether it is stored.
    found: bool,
    /// As the plans so far leave it.
    current: Option<Row>,
    /// Whether a plan that is to be applied writes it or relies on it.
    used: bool,
    /// Whether a plan that is to be applied writes it.
    written: bool,
    /// Whether it was deleted and inserted again: then what the store holds beside our columns goes too.
    reborn: bool,
    /// The columns that were assigned, by their places.
    assigned: BTreeSet<usize>,
}

/// What becomes of a plan.
#[derive(Debug)]
enum Verdict {
    /// Certain already, whatever becomes of the transaction.
    Certain(Result<Commit, StoreError>),
    /// Decided on what earlier plans of the batch will have written: certain only once they are.
    Dependent(Result<Commit, StoreError>),
    /// It is applied with the transaction.
    Apply { rows: Vec<Option<Row>>, record: Option<Pending> },
    /// Under the same operation id as an earlier plan of the batch, whose record it gets.
    Repeat(usize),
    /// The log has a record of it, which says what became of it.
    Recorded(Box<Record>),
}

/// A record whose position is known when its partition's head is.
#[derive(Debug)]
struct Pending {
    record: Record,
    partition: u32,
    /// Which record of the batch in this partition, from 1.
    rank: u64,
    /// The shares of further partitions in its events.
    parts: Vec<LogPart>,
    /// What goes to these partitions, in their order.
    further: Vec<Pending>,
}

impl Pending {
    /// Where the record stands, given the head of each partition before.
    fn position(&self, bases: &BTreeMap<u32, u64>) -> Position {
        let base = bases.get(&self.partition).copied().unwrap_or_default();
        Position { partition: self.partition, offset: base + self.rank }
    }

    /// What is written of it.
    fn to_write(&self, is_part: bool) -> Placed<'_> {
        let Pending { record, partition, rank, parts, .. } = self;
        Placed { partition: *partition, rank: *rank, record, parts, is_part }
    }

    /// The record with its positions.
    fn placed(self, bases: &BTreeMap<u32, u64>) -> Record {
        let position = Some(self.position(bases));
        let also_at = self.further.iter().map(|further| further.position(bases)).collect();
        Record { position, also_at, ..self.record }
    }
}

/// A record to be written.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Placed<'b> {
    pub partition: u32,
    /// Which of those that are written to the partition, from 1.
    pub rank: u64,
    pub record: &'b Record,
    /// The shares of further partitions in its events.
    pub parts: &'b [LogPart],
    /// Whether it is a further record of its plan.
    pub is_part: bool,
}

impl<'b> Placed<'b> {
    /// A plan's commit record that is the only one of its partition.
    pub(crate) fn alone(partition: u32, record: &'b Record) -> Placed<'b> {
        Placed { partition, rank: 1, record, parts: &[], is_part: false }
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
    verdicts: Vec<Verdict>,
    /// How many records go to each partition.
    counts: BTreeMap<u32, u64>,
}

impl<'p> Batch<'p> {
    /// Puts plans together. All of them must know a table by the same definition: see [`Admission`].
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

    /// Takes rows to be missing whose absence is demanded, in tables where that can be done ([`crate::trust`]).
    pub(crate) fn trust(&mut self, trusts: impl Fn(&str) -> bool) {
        for slot in &mut self.slots {
            slot.unread = slot.expects_absence && trusts(slot.table.name());
        }
    }

    /// How many rows are not looked for.
    pub(crate) fn unread(&self) -> usize {
        self.slots.iter().filter(|slot| slot.unread).count()
    }

    /// The numbers of the slots that are looked for, table by table, in the order in which they are locked.
    pub(crate) fn looked_for(&self) -> Vec<Vec<usize>> {
        let is_read = |number: &usize| self.slots.get(*number).is_some_and(|slot| !slot.unread);
        let tables = self.tables().into_iter().map(|range| range.filter(is_read).collect::<Vec<usize>>());
        tables.filter(|numbers| !numbers.is_empty()).collect()
    }

    /// A slot by its number.
    pub(crate) fn slot(&self, number: usize) -> Option<&Slot<'p>> {
        self.slots.get(number)
    }

    /// Of each row that was looked for although its absence is demanded: its table, and whether it was there.
    pub(crate) fn doubted(&self) -> impl Iterator<Item = (&'p str, bool)> {
        let looked_for = self.slots.iter().filter(|slot| slot.expects_absence && !slot.unread);
        looked_for.map(|slot| (slot.table.name(), slot.found))
    }

    /// The tables of rows that were not looked for and on which an answer rests that writes nothing, so that nothing would
    /// prove it: those up to the step that refuses a plan, and all of a plan that fails.
    pub(crate) fn unproved(&self) -> BTreeSet<&'p str> {
        let rests_on = |(verdict, slots): (&Verdict, &Vec<usize>)| {
            let steps = match verdict {
                Verdict::Apply { .. } | Verdict::Repeat(_) | Verdict::Recorded(_) => 0,
                Verdict::Certain(Ok(Commit::Refused(refused)))
                | Verdict::Dependent(Ok(Commit::Refused(refused))) => refused.step + 1,
                Verdict::Certain(_) | Verdict::Dependent(_) => slots.len(),
            };
            slots.iter().take(steps).copied().collect::<Vec<usize>>()
        };
        let numbers = self.verdicts.iter().zip(&self.steps).flat_map(rests_on);
        let unread = numbers.filter_map(|number| self.slots.get(number).filter(|slot| slot.unread));
        unread.map(|slot| slot.table.name()).collect()
    }

    /// Notes a row as it is stored.
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
                Verdict::Repeat(*first)
            } else if remembered
                && let Some(record) = recorded.remove(&(plan.tenant().clone(), plan.operation().to_owned()))
            {
                let again = record.clone();
                recorded.insert((plan.tenant().clone(), plan.operation().to_owned()), again);
                Verdict::Recorded(Box::new(record))
            } else {
                self.decide_one(number, plan, now, partitions)
            };
            if remembered && matches!(verdict, Verdict::Apply { .. }) {
                applied.insert(operation, number);
            }
            self.verdicts.push(verdict);
        }
    }

    fn decide_one(&mut self, number: usize, plan: &'p Plan, now: Time, partitions: u32) -> Verdict {
        let numbers = self.steps.get(number).cloned().unwrap_or_default();
        let parts = match parts_of(plan, partitions) {
            Ok(parts) => parts,
            Err(error) => return Verdict::Certain(Err(error)),
        };
        // The rows are lent to the decision and given back: a batch may have large ones.
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
        let settled =
            |outcome| if after_others { Verdict::Dependent(outcome) } else { Verdict::Certain(outcome) };
        let effect = match decision {
            Err(error) => return settled(Err(error)),
            Ok(Decision::Refuse(refused)) => return settled(Ok(Commit::Refused(refused))),
            Ok(Decision::Apply(effect)) => effect,
        };
        let record = plan.entry().map(|entry| {
            let partition = partition_of(plan.tenant(), &entry.resource, &entry.key, partitions);
            self.pending(Record::of(plan, now, effect.events), partition, parts)
        });
        let record = match record.transpose() {
            Ok(record) => record,
            Err(bug) => return Verdict::Certain(Err(bug.into())),
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
        Verdict::Apply { rows, record }
    }

    /// Gives a record, and what its plan leaves in further partitions, their ranks.
    fn pending(&mut self, record: Record, partition: u32, parts: Vec<LogPart>) -> Result<Pending, Bug> {
        let records: Vec<Record> = parts.iter().map(|part| part.record(&record)).collect::<Result<_, _>>()?;
        let mut rank = |partition: u32| {
            let rank = self.counts.entry(partition).or_default();
            *rank += 1;
            *rank
        };
        let of_part = |(part, record): (&LogPart, Record)| Pending {
            record,
            partition: part.partition,
            rank: rank(part.partition),
            parts: Vec::new(),
            further: Vec::new(),
        };
        let further = parts.iter().zip(records).map(of_part).collect();
        let rank = rank(partition);
        Ok(Pending { record, partition, rank, parts, further })
    }

    /// Whether anything is to be written or relied on.
    pub(crate) fn applies(&self) -> bool {
        self.verdicts.iter().any(|verdict| matches!(verdict, Verdict::Apply { .. }))
    }

    /// How many records go to each partition.
    pub(crate) fn counts(&self) -> &BTreeMap<u32, u64> {
        &self.counts
    }

    /// The records to be written.
    pub(crate) fn records(&self) -> impl Iterator<Item = Placed<'_>> {
        let plans = self.verdicts.iter().filter_map(|verdict| match verdict {
            Verdict::Apply { record: Some(pending), .. } => Some(pending),
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
        for verdict in self.verdicts {
            let outcome = match verdict {
                Verdict::Certain(outcome) | Verdict::Dependent(outcome) => outcome,
                Verdict::Recorded(record) => Ok(Commit::of_record(*record)),
                Verdict::Apply { rows, record } => {
                    let record = record.map(|pending| pending.placed(bases));
                    Ok(Commit::Applied(Applied { record, rows, repeated: false }))
                }
                Verdict::Repeat(first) => match outcomes.get(first) {
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

    /// The outcomes when nobody knows whether the transaction was committed.
    pub(crate) fn unknown(self, why: &str) -> Vec<Result<Commit, StoreError>> {
        let plans = self.plans.iter();
        plans
            .zip(self.verdicts)
            .map(|(plan, verdict)| match verdict {
                Verdict::Certain(outcome) => outcome,
                Verdict::Recorded(record) => Ok(Commit::of_record(*record)),
                Verdict::Dependent(_) => {
                    Err(StoreError::unavailable(format!("the plans before it have no known outcome: {why}")))
                }
                Verdict::Apply { .. } | Verdict::Repeat(_) => Err(StoreError::unknown(plan.operation(), why)),
            })
            .collect()
    }
}

impl Slot<'_> {
    /// Takes over what an applied step makes of the row.
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

    /// What is to be done to the stored row.
    pub(crate) fn change(&self) -> Change<'_> {
        match (self.found, &self.current) {
            (false, None) if self.used => Change::HoldAbsent,
            (false, Some(row)) => Change::Insert(row),
            (true, None) => Change::Delete,
            (true, Some(row)) if self.reborn => Change::Replace(row),
            (true, Some(row)) if self.written => Change::Update(row, &self.assigned),
            _ => Change::Nothing,
        }
    }
}

/// What is to be done to a stored row.
#[derive(Debug, PartialEq)]
pub(crate) enum Change<'s> {
    Nothing,
    Insert(&'s Row),
    /// The row, and the places of the columns that may differ.
    Update(&'s Row, &'s BTreeSet<usize>),
    Delete,
    /// It was deleted and inserted again.
    Replace(&'s Row),
    /// It is not there, and nobody may insert it before the commit.
    HoldAbsent,
}

/// Whether two handles are of one definition of a table.
pub(crate) fn same(left: &Arc<Table>, right: &Arc<Table>) -> bool {
    Arc::ptr_eq(left, right) || left == right
}

/// Which plans can be decided together: those that know their tables by the same definitions. Programs of two ages
/// may know one table by different ones, even one plan may; then the plan is decided by itself, because a row can
/// be taken over from plan to plan in one shape only.
#[derive(Debug, Default)]
pub(crate) struct Admission {
    tables: HashMap<String, Vec<Arc<Table>>>,
}

impl Admission {
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
            let place = batch.slots.iter().position(|slot| slot.key == row.key()).unwrap();
            batch.found(place, row.clone());
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
        let changes: Vec<Change<'_>> = batch.slots.iter().map(Slot::change).collect();
        let [Change::Update(row, _)] = changes.as_slice() else { panic!("{changes:?}") };
        assert_eq!((row.int("n"), row.version()), (Some(3), 4));
        assert_eq!(batch.records().map(|placed| placed.rank).collect::<Vec<_>>(), [1, 2, 3]);
        let outcomes = batch.committed(&BTreeMap::from([(2, 10)]));
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
        let mut admission = Admission::default();
        assert!(admission.admits(&plan("op-1", vec![write(&old, "a")])));
        assert!(admission.admits(&plan("op-2", vec![write(&table(), "b")])));
        assert!(!admission.admits(&plan("op-3", vec![write(&new, "c")])));
        let mixed = plan("op-4", vec![write(&old, "a"), write(&new, "b")]);
        assert!(!admission.admits(&mixed));
        let mut admission = Admission::default();
        assert!(admission.admits(&mixed));
        assert!(!admission.admits(&plan("op-5", vec![write(&old, "c")])));
        let plans = [mixed];
        assert_eq!(Batch::of(&plans).tables().len(), 2);
    }
}
