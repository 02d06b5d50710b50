//! Binding: a case and the values of one firing make a step, its event and its wakeups.

use statehouse_store::guard::now;
use statehouse_store::{EventTemplate, Expr, Guard, Operand, Row, Step, Time, Type, Value};

use super::check::{BuiltCase, DueChange};
use super::transition::{Assign, PresentRows, RowReading, TransitionTarget};
use super::{Machine, Scene};
use crate::action::{Expected, Refusal};
use crate::declare::rule::RuleSource as _;
use crate::declare::table::UPDATED_AT;
use crate::infra::due::{self, DUE_AT, DUE_SHARD};
use crate::resource::key_text;
use crate::worker::Wakeup;

/// What the plan demands of the row because it was read.
#[derive(Clone, Copy)]
pub(super) enum Fence {
    /// Nothing.
    None,
    /// It is still absent.
    Absent,
    /// It is still at this version.
    Version(i64),
}

impl RowReading {
    /// What a firing demands of a row that was read.
    pub(super) fn fence(&self, row: Option<&Row>) -> Fence {
        match (self, row) {
            (RowReading::Fenced, Some(row)) => Fence::Version(row.version()),
            (RowReading::Fenced, None) => Fence::Absent,
            _ => Fence::None,
        }
    }

    /// What of a row the functions of a transition see.
    pub(super) fn shown(&self, row: Option<&Row>) -> Option<Row> {
        match (self, row?) {
            (RowReading::No, _) => None,
            (RowReading::Fenced, row) => Some(row.clone()),
            (RowReading::Only(columns), row) => {
                let table = row.table();
                let shown = |(index, value): (usize, &Value)| {
                    let name = table.columns().get(index).map_or("", |column| &column.name);
                    let is_shown = index < table.key_len() || columns.iter().any(|column| column == name);
                    if is_shown { value.clone() } else { Value::Null }
                };
                let values = row.values().iter().enumerate().map(shown).collect();
                Some(Row::new(table.clone(), row.tenant().clone(), values, row.version()))
            }
        }
    }
}

impl BuiltCase {
    /// The step of a firing, without its label.
    pub(super) fn step(&self, machine: &Machine, scene: &Scene<'_>, fence: Fence) -> Result<Step, Refusal> {
        let expected = scene.call.and_then(|call| call.expected);
        let mut step = self.bare_step(machine, scene.key, fence, expected);
        for guard in self.guards(scene, fence, expected) {
            step = step.guard(guard);
        }
        for (column, kind, assign) in &self.sets {
            if let Some(expr) = assign.bind(*kind, scene)? {
                step = step.set(column, expr);
            }
        }
        let def = &machine.def;
        if let (TransitionTarget::State(state), Some((column, _))) = (&self.decl.to, def.states()) {
            step = step.set(column, state.as_ref());
        }
        let is_stored = matches!(self.decl.to, TransitionTarget::State(_) | TransitionTarget::Same);
        if is_stored && def.table().type_of(UPDATED_AT).is_some() {
            step = step.set(UPDATED_AT, now());
        }
        Ok(self.with_due(step, machine, scene))
    }

    fn bare_step(&self, machine: &Machine, key: &[Value], fence: Fence, expected: Option<Expected>) -> Step {
        let (table, key) = (machine.def.table(), key.iter().cloned());
        let absent = match fence {
            Fence::Absent => Some(true),
            Fence::Version(_) => Some(false),
            Fence::None if self.decl.from.present == PresentRows::None => Some(true),
            Fence::None if self.decl.from.absent && expected.is_none() => None,
            Fence::None => Some(false),
        };
        match (&self.decl.to, absent) {
            (TransitionTarget::Checked, Some(true)) => Step::assert_absent(table, key),
            (TransitionTarget::Checked, _) => Step::assert(table, key),
            (TransitionTarget::Deleted, Some(false)) => Step::delete(table, key),
            (TransitionTarget::Deleted, _) => Step::remove(table, key),
            (_, Some(true)) => Step::insert(table, key),
            (_, Some(false)) => Step::update(table, key),
            (_, None) => Step::upsert(table, key),
        }
    }

    /// The conditions that are sent. What a fence implies is not.
    fn guards(&self, scene: &Scene<'_>, fence: Fence, expected: Option<Expected>) -> Vec<Guard> {
        let fenced = match fence {
            Fence::Absent => return Vec::new(),
            Fence::Version(version) => Some(Guard::version(version)),
            Fence::None if self.decl.from.present == PresentRows::None => return Vec::new(),
            Fence::None => None,
        };
        let is_fenced = fenced.is_some();
        let mut guards: Vec<Guard> = fenced.into_iter().collect();
        if !is_fenced {
            guards.extend(self.state.clone());
            if let Some(Expected::Version(version)) = expected {
                guards.push(Guard::version(version));
            }
        }
        let sent = self.rules.iter().filter(|rule| !rule.is_of_call);
        let sent = sent.filter(|rule| !is_fenced || rule.rule.reads_clock());
        guards.extend(sent.map(|rule| rule.rule.bind(scene)));
        guards
    }

    fn with_due(&self, step: Step, machine: &Machine, scene: &Scene<'_>) -> Step {
        let Some(deadline) = machine.def.deadline() else { return step };
        let at = match self.due {
            DueChange::Unchanged => return step,
            DueChange::Cleared => return due::clear(step),
            DueChange::FromColumn => Expr::Is(Operand::Column(deadline.column.to_owned())),
            DueChange::Assigned => {
                let assigned = step.assignments.iter().find(|one| one.column == deadline.column);
                let Some(expr) = assigned.map(|one| one.expr.clone()) else { return step };
                expr
            }
        };
        let shard = due::shard_of(scene.tenant, &machine.resource, &key_text(scene.key), deadline.shards);
        if deadline.column == DUE_AT { step.set(DUE_SHARD, shard) } else { due::set(step, shard, at) }
    }

    /// The event of a firing whose step has this index in the plan.
    pub(super) fn event(&self, scene: &Scene<'_>, row_of: Option<usize>) -> Option<EventTemplate> {
        let mut event = EventTemplate::named(self.event.clone()?);
        for (field, compute) in &self.decl.data {
            event = event.with(field, compute(scene));
        }
        event.row_of = row_of.filter(|_| self.decl.to != TransitionTarget::Checked);
        Some(event)
    }
}

impl Assign {
    /// What is stored; `None` if the column is not set.
    fn bind(&self, kind: Type, scene: &Scene<'_>) -> Result<Option<Expr>, Refusal> {
        // What is added to a time is a number of microseconds.
        let second = if kind == Type::Time { Type::Int } else { kind };
        Ok(Some(match self {
            Assign::Is(term) => Expr::Is(term.bind(kind, scene)),
            Assign::Add(left, right) => Expr::Add(left.bind(kind, scene), right.bind(second, scene)),
            Assign::Subtract(left, right) => {
                Expr::Subtract(left.bind(kind, scene), right.bind(second, scene))
            }
            Assign::With(compute) => compute(scene)?,
            Assign::Given(name) => {
                let is_given = scene.inputs().is_some_and(|inputs| inputs.has(name));
                let value = match scene.bound(name) {
                    Some(value) => value.clone(),
                    None if is_given => scene.input(name),
                    None => return Ok(None),
                };
                Expr::Is(Operand::Value(value))
            }
        }))
    }
}

/// The wakeups of a step: when the row is due, by the clock of this process. A step that leaves the shard as it is wakes all.
pub(super) fn wakeups(machine: &Machine, step: &Step, row: Option<&Row>, now_here: Time) -> Vec<Wakeup> {
    let (Some(worker), Some(deadline)) = (&machine.worker, machine.def.deadline()) else { return Vec::new() };
    let assigned = |name: &str| step.assignments.iter().find(|one| one.column == name).map(|one| &one.expr);
    let at = match assigned(DUE_AT) {
        Some(Expr::Is(Operand::Column(name))) => row.and_then(|row| row.time(name)),
        _ => due::due_at(step, now_here),
    };
    let Some(at) = at else { return Vec::new() };
    let shard = assigned(DUE_SHARD).and_then(Expr::as_constant).and_then(Value::as_int);
    let shards = match shard.and_then(|shard| u32::try_from(shard).ok()) {
        Some(shard) => shard..shard.saturating_add(1),
        None => 0..deadline.shards,
    };
    shards.map(|shard| Wakeup { worker: worker.clone(), shard, at }).collect()
}
