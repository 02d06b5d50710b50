//! Constraints between rows: what `unique` and `ref` add to the plan of a call ([`crate::declare::row_constraints`]).
//!
//! Every step that inserts, changes or deletes a row of a constrained resource is completed, whichever action prepared it.
//!
//! K1. A value that is unique has one row, which exists exactly while a live row has the value. *The insert of that row expects that it is
//!     absent; it is removed in the plan in which the row changes the value or ceases to be live.*
//! K2. When a field is set to refer to a row, that row is live. *Assertion with the guard of live rows.*
//! K3. A row is not deleted while others refer to it, unless the reference says `on_delete = "keep"`. *References are counted in the plans
//!     of the rows that refer; the plan that deletes the target asserts that the count is not positive.*
//! K4. K1 and K3 are computed from the row as it was read, so the plan has its version as a fence. *An assertion on the row, unless the
//!     action has this version in its guard already.*
//! K5. Rows that refer to a row with `on_delete = "cascade"` are deleted after it, and it is not restored before they are. *The plan that
//!     deletes the row notes it for the worker ([`super::cascade`]); the plan that restores it asserts that there is no such note.*
//!
//! A row that refers to itself is neither checked nor counted. In a batch, a value that one call releases can be taken by another, a
//! row that one call creates can be referred to by another, and counts of one target are summed.

use std::collections::BTreeMap;

use statehouse_store::guard::{Comparison, column, now};
use statehouse_store::plan::{Expect, Verb};
use statehouse_store::table::VERSION;
use statehouse_store::{Bug, Expr, Guard, Operand, Row, Step, StoreError, Table, Value, bug, eval};

use crate::action::{ActionContext, Call, Code, PlanParts, Prepared, Refusal, RefusedStep, Verdict};
use crate::declare::TableDef;
use crate::declare::row_constraints::{DELETED_AT, ERROR, REFERENCES, RowReference, TAKEN_BY};
use crate::form::FieldError;
use crate::infra::due;
use crate::resource::{Resource, key_text};

/// The labels of the steps that are added, without what they are about.
const SEEN: &str = "seen";
const UNIQUE: &str = "unique";
const RELEASED: &str = "released";
const REF: &str = "ref";
const COUNTED: &str = "counted";
const REFERENCED: &str = "referenced";
const CASCADED: &str = "cascaded";
const CASCADING: &str = "cascading";
/// Shards of the worker that deletes rows with those that they refer to.
pub(super) const CASCADE_SHARDS: u32 = 4;

/// Adds what the constraints demand to the plan of a call.
pub(super) async fn complete(
    prepared: Prepared,
    call: &Call,
    cx: &ActionContext<'_>,
) -> Result<Prepared, Refusal> {
    let Prepared::Write(mut parts) = prepared else { return Ok(prepared) };
    let mut added = Vec::new();
    for step in parts.steps.iter().filter(|step| step.writes()) {
        let Some(rows) = ConstrainedRows::of(cx.resources, &step.table) else { continue };
        added.extend(rows.completion(step, call, cx).await?);
    }
    let due = added.iter().filter(|step| is_labelled(step, CASCADED));
    for step in due {
        let worker = format!("{}.cascade", label_part(step, 1)?);
        parts.wakeups.extend(due::wakeup(&worker, step, cx.clock.now()));
    }
    parts.steps.extend(added);
    Ok(parts.into())
}

/// The rows of a resource with constraints.
struct ConstrainedRows<'r> {
    resource: &'r Resource,
    def: &'r TableDef,
}

/// The values of constrained columns of a row that is live.
type LiveValues = BTreeMap<String, Value>;

impl<'r> ConstrainedRows<'r> {
    fn of(resources: &'r [Resource], table: &Table) -> Option<ConstrainedRows<'r>> {
        let mut constrained = resources.iter().filter(|resource| !resource.constraints.is_empty());
        constrained.find_map(|resource| {
            let def = resource.def.as_deref().filter(|def| def.table().name() == table.name())?;
            Some(ConstrainedRows { resource, def })
        })
    }

    /// Whether a step can change what the constraints are about.
    fn is_concerned(&self, step: &Step) -> bool {
        let state = self.def.states().map(|(state, _)| state);
        let is_of =
            |name: &str| Some(name) == state || self.resource.constraints.columns().any(|one| one == name);
        step.verb == Verb::Delete
            || step.expect != Expect::Present
            || step.assignments.iter().any(|assignment| is_of(&assignment.column))
    }

    /// The steps that a step on one of the rows brings along.
    async fn completion(
        &self,
        step: &Step,
        call: &Call,
        cx: &ActionContext<'_>,
    ) -> Result<Vec<Step>, Refusal> {
        if !self.is_concerned(step) {
            return Ok(Vec::new());
        }
        if self.resource.constraints.columns().next().is_none() {
            // Nothing depends on what the row was.
            return Ok(match (self.is_ending(step), self.is_reviving(step)) {
                (true, _) => self.ending_steps(step, call),
                (_, true) => self.reviving_steps(step),
                _ => Vec::new(),
            });
        }
        let row = match step.expect {
            Expect::Absent => None,
            _ => cx.row(&step.table, &call.tenant, step.key.iter().cloned()).await?,
        };
        let mut steps = Vec::new();
        match (&row, step.expect) {
            (None, Expect::Present) => return Ok(steps),
            (None, Expect::Absent) => {}
            (None, Expect::Either) => {
                steps.push(Step::assert_absent(&step.table, step.key.iter().cloned()).label(SEEN));
            }
            (Some(row), _) => match fence(step, row) {
                VersionFence::Lost => return Ok(steps),
                VersionFence::Present => {}
                VersionFence::Missing => steps.push(
                    Step::assert(&step.table, step.key.iter().cloned())
                        .guard(Guard::version(row.version()))
                        .label(SEEN),
                ),
            },
        }
        // A sum that is out of range is refused by the engine.
        let Some(after) = self.after(step, row.as_ref())? else { return Ok(Vec::new()) };
        let before = row.as_ref().and_then(|row| self.before(row));
        steps.extend(self.unique_steps(step, before.as_ref(), after.as_ref()));
        for reference in &self.resource.constraints.references {
            steps.extend(self.reference_steps(reference, step, before.as_ref(), after.as_ref()));
        }
        if before.is_some() && after.is_none() {
            steps.extend(self.ending_steps(step, call));
        }
        if row.is_some() && before.is_none() && after.is_some() {
            steps.extend(self.reviving_steps(step));
        }
        Ok(steps)
    }

    fn is_live(&self, state: &Value) -> bool {
        let live = self.def.live_states();
        live.is_empty() || live.iter().any(|one| state.as_text() == Some(one.as_ref()))
    }

    /// Whether a step leaves no live row, whatever was there.
    fn is_ending(&self, step: &Step) -> bool {
        let state = self.def.states().map(|(state, _)| state);
        let assigned = step.assignments.iter().find(|assignment| Some(assignment.column.as_str()) == state);
        let is_dead = |state: &Value| !self.is_live(state);
        step.verb == Verb::Delete
            || assigned.and_then(|assignment| assignment.expr.as_constant()).is_some_and(is_dead)
    }

    /// Whether a step makes a row live that was not.
    fn is_reviving(&self, step: &Step) -> bool {
        let Some((state, _)) = self.def.states() else { return false };
        let assigned = step.assignments.iter().find(|assignment| assignment.column == state);
        let is_live = |state: &Value| self.is_live(state);
        step.expect != Expect::Absent
            && assigned.and_then(|assignment| assignment.expr.as_constant()).is_some_and(is_live)
    }

    /// K3 and K5: nothing that forbids it refers to the row, and what does otherwise follows it.
    fn ending_steps(&self, step: &Step, call: &Call) -> Vec<Step> {
        let mut steps = self.unreferenced(step);
        if let Some(cascade) = &self.resource.constraints.cascade {
            let name = &self.resource.name;
            let shard = due::shard_of(&call.tenant, name, &key_text(&step.key), CASCADE_SHARDS);
            let noted = Step::upsert(&cascade.table, step.key.iter().cloned())
                .set(DELETED_AT, now())
                .set(ERROR, Value::Null)
                .label(format!("{CASCADED}/{name}"));
            steps.push(due::set(noted, shard, now()));
        }
        steps
    }

    /// K5: all that followed the row when it was deleted is deleted.
    fn reviving_steps(&self, step: &Step) -> Vec<Step> {
        let cascade = self.resource.constraints.cascade.iter();
        let label = format!("{CASCADING}/{}", self.resource.name);
        cascade
            .map(|cascade| Step::assert_absent(&cascade.table, step.key.iter().cloned()).label(label.clone()))
            .collect()
    }

    /// The values of a row, if it is live.
    fn before(&self, row: &Row) -> Option<LiveValues> {
        let state = self.def.states().and_then(|(state, _)| row.get(state)).unwrap_or(&Value::Null);
        let value = |name: &str| (name.to_owned(), row.get(name).cloned().unwrap_or(Value::Null));
        self.is_live(state).then(|| self.resource.constraints.columns().map(value).collect())
    }

    /// The values of the row after a step, if it is live then. `None` if the engine will refuse an assignment.
    fn after(&self, step: &Step, row: Option<&Row>) -> Result<Option<Option<LiveValues>>, Refusal> {
        if step.verb == Verb::Delete {
            return Ok(Some(None));
        }
        let value = |name: &str| -> Result<Option<Value>, Refusal> {
            // Times of the clock are not in columns that callers constrain, so any time will do.
            let now = statehouse_store::Time::MIN;
            match step.assignments.iter().find(|assignment| assignment.column == name) {
                Some(assignment) => Ok(eval::compute(&assignment.expr, row, now)?),
                None => Ok(Some(self.content(name, row))),
            }
        };
        if let Some((state, _)) = self.def.states() {
            match value(state)? {
                None => return Ok(None),
                Some(state) if !self.is_live(&state) => return Ok(Some(None)),
                Some(_) => {}
            }
        }
        let mut values = LiveValues::new();
        for name in self.resource.constraints.columns() {
            let Some(value) = value(name)? else { return Ok(None) };
            values.insert(name.to_owned(), value);
        }
        Ok(Some(Some(values)))
    }

    /// What a column is that is not assigned: as it was, or the default of a new row.
    fn content(&self, name: &str, row: Option<&Row>) -> Value {
        let default = || {
            let column = self.def.columns().iter().find(|def| def.column.name == name);
            column.and_then(|def| def.column.default.clone())
        };
        let content = row.map_or_else(default, |row| row.get(name).cloned());
        content.unwrap_or(Value::Null)
    }

    /// K1: releases what the row no longer has, and takes what it has now.
    fn unique_steps(
        &self,
        step: &Step,
        before: Option<&LiveValues>,
        after: Option<&LiveValues>,
    ) -> Vec<Step> {
        let mut steps = Vec::new();
        for unique in &self.resource.constraints.unique {
            let (old, new) = (taken(&unique.fields, before), taken(&unique.fields, after));
            if old == new {
                continue;
            }
            let label = |what: &str| format!("{what}/{}", self.resource.name);
            steps.extend(old.map(|old| Step::remove(&unique.table, old).label(label(RELEASED))));
            steps.extend(new.map(|new| {
                Step::insert(&unique.table, new).set(TAKEN_BY, key_text(&step.key)).label(label(UNIQUE))
            }));
        }
        steps
    }

    /// K2 and K3: the new target is live, and references are counted.
    fn reference_steps(
        &self,
        reference: &RowReference,
        step: &Step,
        before: Option<&LiveValues>,
        after: Option<&LiveValues>,
    ) -> Vec<Step> {
        let RowReference { field, target, def, counts } = reference;
        // A row that refers to itself needs no other.
        let is_itself = |value: &Value| {
            def.table().name() == self.def.table().name()
                && step.key.as_slice() == std::slice::from_ref(value)
        };
        let named = |values: Option<&LiveValues>| {
            values
                .and_then(|values| values.get(field))
                .filter(|value| !value.is_null() && !is_itself(value))
                .cloned()
        };
        let (old, new) = (named(before), named(after));
        if old == new {
            return Vec::new();
        }
        let mut steps = Vec::new();
        if let Some(new) = &new {
            let assertion = Step::assert(def.table(), [new.clone()]).label(format!("{REF}/{target}/{field}"));
            steps.push(match def.live_guard() {
                Some(guard) => assertion.guard(guard),
                None => assertion,
            });
        }
        let counted = counts.iter().flat_map(|counts| {
            let changes = [(old.clone(), -1), (new.clone(), 1)];
            changes.into_iter().filter_map(|(key, amount)| Some(count(counts, key?, amount)))
        });
        steps.extend(counted);
        steps
    }

    /// K3: nothing refers to the row of a step.
    fn unreferenced(&self, step: &Step) -> Vec<Step> {
        let assertion = |count: &crate::declare::row_constraints::ReferenceCount| {
            let label = format!("{REFERENCED}/{}/{}/{}", self.resource.name, count.resource, count.field);
            let assertion = Step::assert(&count.table, step.key.iter().cloned()).label(label);
            Step { expect: Expect::Either, ..assertion }.guard(column(REFERENCES).le(Value::Int(0)))
        };
        self.resource.constraints.referenced_by.iter().map(assertion).collect()
    }
}

/// The values of fields that are taken together; none if one of them is null.
fn taken(fields: &[String], values: Option<&LiveValues>) -> Option<Vec<Value>> {
    let values = values?;
    fields.iter().map(|name| values.get(name).filter(|value| !value.is_null()).cloned()).collect()
}

/// A step that changes the number of references to a row.
pub(super) fn count(counts: &std::sync::Arc<Table>, key: Value, amount: i64) -> Step {
    let number = Operand::Coalesce(REFERENCES.to_owned(), Value::Int(0));
    Step::upsert(counts, [key]).set(REFERENCES, number.add(Value::Int(amount))).label(COUNTED)
}

/// Whether a step demands the version of a row that was read.
enum VersionFence {
    Present,
    Missing,
    /// It demands another, and will be refused.
    Lost,
}

fn fence(step: &Step, row: &Row) -> VersionFence {
    let conjuncts = step.guard.conjuncts();
    let is_version = |guard: &Guard| matches!(guard, Guard::Compare(Operand::Column(name), Comparison::Eq, Operand::Value(_)) if name == VERSION);
    if conjuncts.contains(&Guard::version(row.version())) {
        VersionFence::Present
    } else if conjuncts.iter().any(is_version) {
        VersionFence::Lost
    } else {
        VersionFence::Missing
    }
}

fn is_labelled(step: &Step, kind: &str) -> bool {
    let label = step.label.as_ref().map_or("", statehouse_store::Label::as_str);
    label.split('/').next() == Some(kind)
}

/// Two writes of one row as one, where both are of constraints: counts are summed, and a value that one call releases is taken by
/// the other.
pub(super) fn combined(one: &Step, other: &Step) -> Option<Step> {
    if is_labelled(one, COUNTED) && is_labelled(other, COUNTED) {
        let (first, second) = (amount(one)?, amount(other)?);
        return Some(count(&one.table, one.key.first()?.clone(), first.checked_add(second)?));
    }
    let taking = match (is_labelled(one, RELEASED), is_labelled(other, RELEASED)) {
        (true, false) => other,
        (false, true) => one,
        _ => return None,
    };
    // Another call takes it already if the row need not be absent any more.
    let is_free = is_labelled(taking, UNIQUE) && taking.expect == Expect::Absent;
    is_free.then(|| Step { expect: Expect::Either, ..taking.clone() })
}

/// What a count is changed by.
fn amount(step: &Step) -> Option<i64> {
    step.assignments.iter().find_map(|assignment| match &assignment.expr {
        Expr::Add(_, Operand::Value(amount)) => amount.as_int(),
        _ => None,
    })
}

fn steps_of(prepared: &[Prepared]) -> impl Iterator<Item = &Step> {
    prepared.iter().flat_map(|prepared| match prepared {
        Prepared::Write(PlanParts { steps, .. }) => steps.as_slice(),
        Prepared::Unchanged(_) => &[],
    })
}

/// Fits the calls of a batch together: a row that one call creates can be referred to by another, and one that a call deletes cannot.
pub(super) fn settle_batch(prepared: &mut [Prepared], resources: &[Resource]) -> Result<(), Refusal> {
    let is_reference = |step: &&Step| is_labelled(step, REF);
    if !steps_of(prepared).any(|step| is_reference(&step)) {
        return Ok(());
    }
    let place = |step: &Step| (step.table.name().to_owned(), step.key.clone());
    let is_new = |step: &&Step| step.verb == Verb::Put && step.expect == Expect::Absent;
    let created: Vec<(String, Vec<Value>)> = steps_of(prepared).filter(is_new).map(place).collect();
    let is_ending = |step: &&Step| {
        step.writes() && ConstrainedRows::of(resources, &step.table).is_some_and(|rows| rows.is_ending(step))
    };
    let ended: Vec<(String, Vec<Value>)> = steps_of(prepared).filter(is_ending).map(place).collect();
    for (index, prepared) in prepared.iter_mut().enumerate() {
        let Prepared::Write(parts) = prepared else { continue };
        let mut references = parts.steps.iter().filter(is_reference);
        if let Some(step) = references.find(|step| ended.contains(&place(step))) {
            let message = format!("{} is deleted by the same batch", referred(step)?.0);
            return Err(missing(step, &message)?.of_call(index));
        }
        // They stand behind the steps of the action, which events are numbered by.
        parts.steps.retain(|step| !(is_reference(&step) && created.contains(&place(step))));
    }
    Ok(())
}

/// What it means that a step was refused, if a constraint made it.
pub(super) fn verdict(call: &Call, refused: &RefusedStep<'_>) -> Option<Verdict> {
    let step = refused.step;
    if is_labelled(step, SEEN) {
        return Some(Verdict::Retry);
    }
    let refusal = if is_labelled(step, UNIQUE) {
        not_unique(step, refused.row.filter(|_| call.claims.is_none())).map_err(StoreError::from)
    } else if is_labelled(step, REF) {
        missing_row(step, refused.row).map_err(StoreError::from)
    } else if is_labelled(step, REFERENCED) {
        referenced(step, refused.row)
    } else if is_labelled(step, CASCADING) {
        cascading(step, refused.row).map_err(StoreError::from)
    } else {
        return None;
    };
    Some(Verdict::refuse(refusal))
}

/// The refusal of a reference to a row that is not there.
fn missing_row(step: &Step, row: Option<&Row>) -> Result<Refusal, Bug> {
    let (what, _) = referred(step)?;
    let why = if row.is_some() { "was deleted" } else { "does not exist" };
    missing(step, &format!("{what} {why}"))
}

/// The refusal of a restoration while the rows that refer to the deleted row are being deleted.
fn cascading(step: &Step, note: Option<&Row>) -> Result<Refusal, Bug> {
    let what = format!("{} {}", label_part(step, 1)?, key_text(&step.key));
    let error = note.and_then(|row| row.text(ERROR)).map_or(String::new(), |error| format!(" ({error})"));
    let message = format!(
        "{what} was deleted, and the rows that refer to it are being deleted{error}; restore it when they are"
    );
    Ok(Refusal::new(Code::Held, message))
}

/// The part of a label behind the kind, by its number.
fn label_part(step: &Step, number: usize) -> Result<&str, Bug> {
    let label = step.label.as_ref().map_or("", statehouse_store::Label::as_str);
    label
        .split('/')
        .nth(number)
        .ok_or_else(|| bug!("the label {label:?} of a constraint has no part {number}"))
}

/// The refusal of a value that another row has. Who has it is told unless the caller may not know of that row.
pub(super) fn not_unique(step: &Step, holder: Option<&Row>) -> Result<Refusal, Bug> {
    let name = label_part(step, 1)?;
    let fields: Vec<&str> = step.table.key_columns().iter().map(|column| column.name.as_str()).collect();
    let values = fields.iter().zip(&step.key).map(|(field, value)| format!("{field} {}", value.to_json()));
    let values = values.collect::<Vec<_>>().join(" and ");
    let by = holder.and_then(|row| row.text(TAKEN_BY));
    let detail = match by {
        Some(key) => format!("it is taken by {name} {key}"),
        None => "it is taken by another row".to_owned(),
    };
    let message = format!("{name}: {values}: {detail}; one row at most may have it");
    let error = |field: &&str| FieldError { pointer: format!("/{field}"), detail: detail.clone() };
    let field_errors = fields.iter().map(error).collect();
    Ok(Refusal { field_errors, ..Refusal::new(Code::NotUnique, message) })
}

/// The row that a reference names, in words, and the field.
fn referred(step: &Step) -> Result<(String, &str), Bug> {
    Ok((format!("{} {}", label_part(step, 1)?, key_text(&step.key)), label_part(step, 2)?))
}

fn missing(step: &Step, why: &str) -> Result<Refusal, Bug> {
    let (_, field) = referred(step)?;
    let error = FieldError { pointer: format!("/{field}"), detail: why.to_owned() };
    let message = format!("{field} refers to a row that is not there: {why}");
    Ok(Refusal { field_errors: vec![error], ..Refusal::new(Code::MissingReference, message) })
}

fn referenced(step: &Step, row: Option<&Row>) -> Result<Refusal, StoreError> {
    let what = format!("{} {}", label_part(step, 1)?, key_text(&step.key));
    let row =
        row.ok_or_else(|| bug!("{what} is refused as referenced, and no row of references is there"))?;
    let number = row.get_int(REFERENCES)?;
    let (by, field) = (label_part(step, 2)?, label_part(step, 3)?);
    let rows = if number == 1 { "row refers" } else { "rows refer" };
    let message = format!(
        "{what} cannot be deleted: {number} {by} {rows} to it by {field}; change or delete them first"
    );
    Ok(Refusal::new(Code::Referenced, message))
}

/// The refusal of two calls of a batch that take one value.
pub(super) fn taken_twice(one: &Step, other: &Step) -> Result<Option<Refusal>, Bug> {
    if !is_labelled(one, UNIQUE) || !is_labelled(other, UNIQUE) {
        return Ok(None);
    }
    let refusal = not_unique(other, None)?;
    let message = refusal.message.replace("another row", "another call of the batch");
    Ok(Some(Refusal { message, ..refusal }))
}
