//! Plans: one atomic write of guarded steps, one log entry, one operation id.
//!
//! A [`Step`] names one row by its full key, says what must be there (`expect`), under what condition (`guard`)
//! and what becomes of it (`verb`). The three are independent, which gives the familiar verbs:
//!
//! | constructor | verb | expects | when the row is there and the guard fails | when the row is missing |
//! |---|---|---|---|---|
//! | [`Step::insert`] | put | absent | refused (`Present`) | inserted |
//! | [`Step::update`] | put | present | refused (`Guard`) | refused (`Absent`) |
//! | [`Step::upsert`] | put | either | refused (`Guard`) | inserted |
//! | [`Step::delete`] | delete | present | refused (`Guard`) | refused (`Absent`) |
//! | [`Step::remove`] | delete | either | refused (`Guard`) | nothing to do |
//! | [`Step::assert`] | assert | present | refused (`Guard`) | refused (`Absent`) |
//! | [`Step::assert_absent`] | assert | absent | refused (`Present`) | holds |
//!
//! Everything that can be wrong with a plan without knowing what is stored is refused by [`PlanBuilder::build`].

use std::fmt;
use std::sync::Arc;

use crate::error::PlanError;
use crate::guard::{Expr, Guard, Operand};
use crate::label::Label;
use crate::limits;
use crate::log::{Entry, EventSubject, EventTemplate, is_part_operation};
use crate::row::{Address, Tenant, admit_key, admit_required};
use crate::table::{TENANT, Table, VERSION};
use crate::value::{BadValue, Type, Value, canonical_json, json_weight};

/// What a step does to its row.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Verb {
    /// Stores the row, with the assignments made on what was there.
    Put,
    /// Deletes the row.
    Delete,
    /// Changes nothing; the plan as a whole is refused if the condition fails.
    Assert,
}

/// Whether the row must be there.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Expect {
    /// It must not be.
    Absent,
    /// It must be.
    Present,
    /// It may be; if it is, the guard must hold.
    Either,
}

/// One column's new content.
#[derive(Clone, Debug, PartialEq)]
pub struct Assignment {
    /// The column; not one of the key's, nor `version`.
    pub column: String,
    /// Computed from the row as it was before the step. Of a row that was absent, all columns are null.
    pub expr: Expr,
}

/// One guarded write, or check, of one row.
#[derive(Clone, Debug, PartialEq)]
pub struct Step {
    /// The table.
    pub table: Arc<Table>,
    /// The key after the tenant.
    pub key: Vec<Value>,
    /// What is done.
    pub verb: Verb,
    /// Whether the row must be there.
    pub expect: Expect,
    /// What must hold for the row, if it is there.
    pub guard: Guard,
    /// What a put stores. Columns that are not named keep their content, or get their default in a new row.
    pub assignments: Vec<Assignment>,
    /// What the author of the plan calls the step. Engines ignore it.
    pub label: Option<Label>,
}

impl Step {
    fn new(table: &Arc<Table>, key: impl IntoIterator<Item = Value>, verb: Verb, expect: Expect) -> Step {
        let key = key.into_iter().collect();
        let (table, guard, assignments) = (table.clone(), Guard::always(), Vec::new());
        Step { table, key, verb, expect, guard, assignments, label: None }
    }

    /// Inserts a row; refused if it is there.
    pub fn insert(table: &Arc<Table>, key: impl IntoIterator<Item = Value>) -> Step {
        Step::new(table, key, Verb::Put, Expect::Absent)
    }

    /// Updates a row; refused if it is missing or the guard fails.
    pub fn update(table: &Arc<Table>, key: impl IntoIterator<Item = Value>) -> Step {
        Step::new(table, key, Verb::Put, Expect::Present)
    }

    /// Inserts a row, or updates it if the guard holds.
    pub fn upsert(table: &Arc<Table>, key: impl IntoIterator<Item = Value>) -> Step {
        Step::new(table, key, Verb::Put, Expect::Either)
    }

    /// Deletes a row; refused if it is missing or the guard fails.
    pub fn delete(table: &Arc<Table>, key: impl IntoIterator<Item = Value>) -> Step {
        Step::new(table, key, Verb::Delete, Expect::Present)
    }

    /// Deletes a row if it is there and the guard holds.
    pub fn remove(table: &Arc<Table>, key: impl IntoIterator<Item = Value>) -> Step {
        Step::new(table, key, Verb::Delete, Expect::Either)
    }

    /// Demands that a row is there and the guard holds, without writing it.
    pub fn assert(table: &Arc<Table>, key: impl IntoIterator<Item = Value>) -> Step {
        Step::new(table, key, Verb::Assert, Expect::Present)
    }

    /// Demands that a row is not there.
    pub fn assert_absent(table: &Arc<Table>, key: impl IntoIterator<Item = Value>) -> Step {
        Step::new(table, key, Verb::Assert, Expect::Absent)
    }

    /// Adds a condition: all that were added must hold.
    #[must_use]
    pub fn guard(mut self, guard: Guard) -> Step {
        self.guard = self.guard.and(guard);
        self
    }

    /// Assigns a column.
    #[must_use]
    pub fn set(mut self, column: &str, expr: impl Into<Expr>) -> Step {
        self.assignments.push(Assignment { column: column.to_owned(), expr: expr.into() });
        self
    }

    /// Names the step, so that a refusal can be attributed ([`crate::Refused::label`]).
    #[must_use]
    pub fn label(mut self, label: impl Into<Label>) -> Step {
        self.label = Some(label.into());
        self
    }

    /// Whether the step can change its row.
    pub fn writes(&self) -> bool {
        self.verb != Verb::Assert
    }

    /// Whether the engine's clock is part of the guard or the assignments.
    pub fn reads_clock(&self) -> bool {
        let is_now = |operand: &Operand| matches!(operand, Operand::Now { .. });
        let mut found = self.assignments.iter().flat_map(|assignment| assignment.expr.operands()).any(is_now);
        self.guard.leaves(&mut |leaf| {
            if let Guard::Compare(left, _, right) = leaf {
                found |= is_now(left) || is_now(right);
            }
        });
        found
    }
}

/// One atomic write, checked and ready to be committed. Cheap to clone.
#[derive(Clone, Debug, PartialEq)]
pub struct Plan(Arc<PlanContent>);

#[derive(Debug, PartialEq)]
struct PlanContent {
    tenant: Tenant,
    operation: String,
    steps: Vec<Step>,
    entry: Option<Entry>,
    returns_rows: bool,
}

impl Plan {
    /// Starts a plan of one tenant under an operation id.
    ///
    /// The id names this one intent: a commit under an id that was applied before is not applied again. Only
    /// plans with a log entry are remembered. A plan without one must be safe to repeat by its guards.
    pub fn of(tenant: &Tenant, operation: impl Into<String>) -> PlanBuilder {
        PlanBuilder {
            tenant: tenant.clone(),
            operation: operation.into(),
            steps: Vec::new(),
            entry: None,
            returns_rows: true,
        }
    }

    /// Whose plan it is.
    pub fn tenant(&self) -> &Tenant {
        &self.0.tenant
    }

    /// The operation id.
    pub fn operation(&self) -> &str {
        &self.0.operation
    }

    /// The steps, in the order in which a refusal numbers them.
    pub fn steps(&self) -> &[Step] {
        &self.0.steps
    }

    /// What it leaves in the log.
    pub fn entry(&self) -> Option<&Entry> {
        self.0.entry.as_ref()
    }

    /// Whether the outcome has the rows as the plan left them.
    pub fn returns_rows(&self) -> bool {
        self.0.returns_rows
    }

    /// The rows it names, in the order of its steps.
    pub fn addresses(&self) -> impl Iterator<Item = Address> {
        self.0.steps.iter().map(|step| Address {
            table: step.table.clone(),
            tenant: self.0.tenant.clone(),
            key: step.key.clone(),
        })
    }

    /// The plan as it was before it was built, to be changed and built anew.
    pub fn to_builder(&self) -> PlanBuilder {
        PlanBuilder {
            tenant: self.0.tenant.clone(),
            operation: self.0.operation.clone(),
            steps: self.0.steps.clone(),
            entry: self.0.entry.clone(),
            returns_rows: self.0.returns_rows,
        }
    }
}

/// A plan being put together.
#[derive(Clone, Debug)]
pub struct PlanBuilder {
    /// Whose plan it is.
    pub tenant: Tenant,
    /// The operation id.
    pub operation: String,
    /// The steps so far.
    pub steps: Vec<Step>,
    /// The log entry, if any.
    pub entry: Option<Entry>,
    /// Whether the outcome is to have the rows as the plan left them.
    pub returns_rows: bool,
}

impl PlanBuilder {
    /// Adds a step.
    #[must_use]
    pub fn step(mut self, step: Step) -> PlanBuilder {
        self.steps.push(step);
        self
    }

    /// Adds steps.
    #[must_use]
    pub fn steps(mut self, steps: impl IntoIterator<Item = Step>) -> PlanBuilder {
        self.steps.extend(steps);
        self
    }

    /// Sets the log entry.
    #[must_use]
    pub fn log(mut self, entry: Entry) -> PlanBuilder {
        self.entry = Some(entry);
        self
    }

    /// Does without the rows in the outcome. Where an engine would have to read them first, this saves a request.
    #[must_use]
    pub fn without_rows(mut self) -> PlanBuilder {
        self.returns_rows = false;
        self
    }

    /// Checks the plan: names, types, keys, limits.
    pub fn build(self) -> Result<Plan, PlanError> {
        let PlanBuilder { tenant, operation, steps, entry, returns_rows } = self;
        check_text("operation", &operation, false)?;
        check_operation(&operation)?;
        check_operations(&steps, entry.as_ref())?;
        let mut weight = 0;
        let steps: Vec<Step> = steps
            .into_iter()
            .map(|step| {
                let step = admit_step(step, &tenant)?;
                weight += check_known_weight(&step, &tenant)?;
                Ok(step)
            })
            .collect::<Result<_, PlanError>>()?;
        check_rows_differ(&steps, &tenant)?;
        let entry = entry.map(|entry| admit_entry(entry, &steps)).transpose()?;
        if let Some(entry) = &entry {
            weight += check_entry_weight(&operation, entry)?;
        }
        check_limit(format_args!("bytes in a plan"), weight, limits::PLAN_BYTES_MAX)?;
        Ok(Plan(Arc::new(PlanContent { tenant, operation, steps, entry, returns_rows })))
    }
}

/// An id under which a part of another operation can be stored is none.
fn check_operation(operation: &str) -> Result<(), PlanError> {
    if is_part_operation(operation) {
        let why = "it must not end in the character U+0001 and a place in the log";
        return Err(PlanError::BadName { what: "operation", given: operation.to_owned(), why });
    }
    Ok(())
}

fn check_operations(steps: &[Step], entry: Option<&Entry>) -> Result<(), PlanError> {
    let logged = |entry: &Entry| limits::LOG_ENTRY_OPERATIONS + limits::further_records(entry);
    let operations = steps.len() + entry.map_or(0, logged);
    if operations == 0 {
        return Err(PlanError::Empty);
    }
    let further = entry.map_or(0, limits::further_records);
    if further == 0 {
        let what = format_args!("operations in a plan (steps and log entry)");
        return check_limit(what, operations, limits::PLAN_OPERATIONS_MAX);
    }
    let what = format_args!(
        "operations in a plan ({} steps, 2 for the log entry, {further} for its events about other subjects)",
        steps.len()
    );
    check_limit(what, operations, limits::PLAN_OPERATIONS_MAX)
}

/// `what` is put into words only if it is needed.
fn check_limit(what: impl fmt::Display, actual: usize, limit: usize) -> Result<(), PlanError> {
    if actual > limit {
        return Err(PlanError::Limit { what: what.to_string(), limit, actual });
    }
    Ok(())
}

pub(crate) fn check_text(what: &'static str, text: &str, may_be_empty: bool) -> Result<(), PlanError> {
    if text.contains('\0') || (text.is_empty() && !may_be_empty) {
        let why = "it must not be empty or hold the character U+0000";
        return Err(PlanError::BadName { what, given: text.to_owned(), why });
    }
    check_limit(format_args!("bytes in the {what} {text:?}"), text.len(), limits::NAME_BYTES_MAX)
}

fn check_rows_differ(steps: &[Step], tenant: &Tenant) -> Result<(), PlanError> {
    for (second, step) in steps.iter().enumerate() {
        let same = |other: &Step| other.table.name() == step.table.name() && other.key == step.key;
        if let Some(first) = steps.iter().take(second).position(same) {
            let row = Address { table: step.table.clone(), tenant: tenant.clone(), key: step.key.clone() };
            return Err(PlanError::RowTwice { row: row.to_string(), first, second });
        }
    }
    Ok(())
}

/// Checks a step and puts its values into the form in which they are stored.
fn admit_step(mut step: Step, tenant: &Tenant) -> Result<Step, PlanError> {
    step.key = admit_key(&step.table, tenant, step.key)?;
    admit_change(step)
}

/// The same for everything but the key.
pub(crate) fn admit_change(step: Step) -> Result<Step, PlanError> {
    let Step { table, key, verb, expect, guard, assignments, label } = step;
    if expect == Expect::Absent && !guard.conjuncts().is_empty() {
        return Err(PlanError::Mistyped {
            table: table.name().to_owned(),
            expression: guard.to_string(),
            why: "guards a row that must be absent; use an update or an upsert".into(),
        });
    }
    let mut leaves = 0;
    guard.leaves(&mut |_| leaves += 1);
    check_limit(format_args!("conditions in a guard on {table}"), leaves, limits::GUARD_LEAVES_MAX)?;
    let guard = admit_guard(&table, guard)?;
    if verb != Verb::Put
        && let Some(first) = assignments.first()
    {
        let (table, column) = (table.name().to_owned(), first.column.clone());
        return Err(PlanError::Unassignable { table, column, why: "only a put assigns columns" });
    }
    let mut admitted: Vec<Assignment> = Vec::with_capacity(assignments.len());
    let mut given = vec![false; table.columns().len()];
    for assignment in assignments {
        let index = table.position(&assignment.column);
        if let Some(given) = index.and_then(|index| given.get_mut(index))
            && std::mem::replace(given, true)
        {
            let (table, column) = (table.name().to_owned(), assignment.column);
            return Err(PlanError::Unassignable { table, column, why: "it is assigned twice in one step" });
        }
        admitted.push(admit_assignment(&table, index, assignment)?);
    }
    if verb == Verb::Put && expect != Expect::Present {
        for (column, given) in table.columns().iter().zip(given).skip(table.key_len()) {
            if column.required && column.default.is_none() && !given {
                let (table, column) = (table.name().to_owned(), column.name.clone());
                return Err(PlanError::Required { table, column });
            }
        }
    }
    Ok(Step { table, key, verb, expect, guard, assignments: admitted, label })
}

fn unknown_column(table: &Table, column: &str) -> PlanError {
    let known: Vec<&str> = table.columns().iter().map(|column| column.name.as_str()).collect();
    PlanError::UnknownColumn {
        table: table.name().to_owned(),
        column: column.to_owned(),
        known: format!("{}, {VERSION}", known.join(", ")),
    }
}

/// The type of a column that a guard or an assignment may look at.
pub(crate) fn visible_type(table: &Table, column: &str) -> Result<Type, PlanError> {
    // The tenant is not a matter of guards: it is in every key already.
    if column == TENANT {
        return Err(unknown_column(table, column));
    }
    table.type_of(column).ok_or_else(|| unknown_column(table, column))
}

fn admit_guard(table: &Table, guard: Guard) -> Result<Guard, PlanError> {
    let mistyped = |expression: String, why: String| PlanError::Mistyped {
        table: table.name().to_owned(),
        expression,
        why,
    };
    match guard {
        Guard::Compare(mut left, comparison, mut right) => {
            let text = |left: &Operand, right: &Operand| format!("{left} {} {right}", comparison.symbol());
            let (left_type, right_type) = (operand_type(table, &left)?, operand_type(table, &right)?);
            let Some(kind) = left_type.or(right_type) else {
                let why = "compares two constants; name a column of the row";
                return Err(mistyped(text(&left, &right), why.into()));
            };
            if !kind.is_ordered() {
                return Err(mistyped(
                    text(&left, &right),
                    format!("compares {kind}, which has no order; only `is null` can be asked of it"),
                ));
            }
            if let (Some(left_type), Some(right_type)) = (left_type, right_type)
                && left_type != right_type
            {
                return Err(mistyped(text(&left, &right), format!("compares {left_type} with {right_type}")));
            }
            let admitted =
                admit_operand(table, &mut left, kind).and_then(|()| admit_operand(table, &mut right, kind));
            if let Err(error) = admitted {
                return Err(error.within(table, text(&left, &right)));
            }
            Ok(Guard::Compare(left, comparison, right))
        }
        Guard::Null(column) => {
            visible_type(table, &column)?;
            Ok(Guard::Null(column))
        }
        Guard::NotNull(column) => {
            visible_type(table, &column)?;
            Ok(Guard::NotNull(column))
        }
        Guard::In(column, values) => {
            let values = admit_list(table, &column, values)?;
            Ok(if values.is_empty() { Guard::never() } else { Guard::In(column, values) })
        }
        Guard::NotIn(column, values) => {
            let values = admit_list(table, &column, values)?;
            Ok(if values.is_empty() { Guard::NotNull(column) } else { Guard::NotIn(column, values) })
        }
        Guard::All(parts) => {
            Ok(Guard::All(parts.into_iter().map(|part| admit_guard(table, part)).collect::<Result<_, _>>()?))
        }
        Guard::Any(parts) => {
            Ok(Guard::Any(parts.into_iter().map(|part| admit_guard(table, part)).collect::<Result<_, _>>()?))
        }
    }
}

fn admit_list(table: &Table, column: &str, values: Vec<Value>) -> Result<Vec<Value>, PlanError> {
    let kind = visible_type(table, column)?;
    if !kind.is_ordered() {
        return Err(PlanError::Mistyped {
            table: table.name().to_owned(),
            expression: format!("{column} in (…)"),
            why: format!("compares {kind}, which has no order; only `is null` can be asked of it"),
        });
    }
    check_limit(format_args!("values in `{table}.{column} in (…)`"), values.len(), limits::IN_VALUES_MAX)?;
    values.into_iter().map(|value| admit_required(table, column, kind, value)).collect()
}

/// The type that an operand has by itself; a constant takes the type of what it stands beside.
fn operand_type(table: &Table, operand: &Operand) -> Result<Option<Type>, PlanError> {
    match operand {
        Operand::Column(column) | Operand::Coalesce(column, _) => visible_type(table, column).map(Some),
        Operand::Now { .. } => Ok(Some(Type::Time)),
        Operand::Value(_) => Ok(None),
    }
}

/// Offsets of the clock beyond a century are mistakes in a unit.
const NOW_OFFSET_MAX_MICROS: u64 = 100 * 366 * 24 * 3600 * 1_000_000;

/// Why an operand does not fit where it stands. What it stands in is put into words only then.
enum OperandError {
    Unknown(PlanError),
    Mistyped(String),
}

impl OperandError {
    fn within(self, table: &Table, expression: String) -> PlanError {
        match self {
            OperandError::Unknown(error) => error,
            OperandError::Mistyped(why) => {
                PlanError::Mistyped { table: table.name().to_owned(), expression, why }
            }
        }
    }
}

/// Checks an operand and puts its constant into the form in which it is stored.
fn admit_operand(table: &Table, operand: &mut Operand, kind: Type) -> Result<(), OperandError> {
    let mistyped = |why: String| Err(OperandError::Mistyped(why));
    if let Some(own) = operand_type(table, operand).map_err(OperandError::Unknown)?
        && own != kind
    {
        return mistyped(format!("needs {kind} where `{operand}` is {own}"));
    }
    match operand {
        Operand::Value(value) | Operand::Coalesce(_, value) => match value.clone().admitted(kind) {
            Ok(Value::Null) => mistyped("involves the constant null; ask `is null` instead".into()),
            Ok(admitted) => {
                *value = admitted;
                Ok(())
            }
            Err(BadValue::WrongType { expected, got }) => {
                mistyped(format!("needs a constant of type {expected}, got {got}"))
            }
            Err(why) => mistyped(why.to_string()),
        },
        Operand::Now { plus_micros } if plus_micros.unsigned_abs() > NOW_OFFSET_MAX_MICROS => {
            mistyped("moves the clock by more than a century".into())
        }
        Operand::Now { .. } | Operand::Column(_) => Ok(()),
    }
}

/// Checks an assignment to the column at this place of the table.
fn admit_assignment(
    table: &Table,
    index: Option<usize>,
    assignment: Assignment,
) -> Result<Assignment, PlanError> {
    let Assignment { column, mut expr } = assignment;
    let unassignable =
        |why| PlanError::Unassignable { table: table.name().to_owned(), column: column.clone(), why };
    if column == VERSION {
        return Err(unassignable("the store counts it"));
    }
    if index.is_some_and(|index| index < table.key_len()) {
        return Err(unassignable("it is part of the key"));
    }
    let declared = index.and_then(|index| table.columns().get(index));
    let declared = declared.ok_or_else(|| unknown_column(table, &column))?;
    let kind = declared.kind;
    if let Expr::Is(Operand::Value(constant)) = expr {
        let value = constant.admitted(kind).map_err(|why| PlanError::BadValue {
            table: table.name().to_owned(),
            column: column.clone(),
            why,
        })?;
        if value.is_null() && declared.required {
            return Err(PlanError::Required { table: table.name().to_owned(), column });
        }
        return Ok(Assignment { column, expr: Expr::Is(Operand::Value(value)) });
    }
    let admitted = match &mut expr {
        Expr::Is(operand) => admit_operand(table, operand, kind),
        Expr::Add(..) | Expr::Subtract(..) if !matches!(kind, Type::Int | Type::Float | Type::Time) => {
            Err(OperandError::Mistyped(format!("computes {kind}; only int, float and time can be computed")))
        }
        Expr::Add(left, right) | Expr::Subtract(left, right) => {
            let second = if kind == Type::Time { Type::Int } else { kind };
            admit_operand(table, left, kind).and_then(|()| admit_operand(table, right, second))
        }
    };
    match admitted {
        Ok(()) => Ok(Assignment { column, expr }),
        Err(error) => Err(error.within(table, format!("{column} = {expr}"))),
    }
}

/// Weighs what a step is already known to write, and checks it against the limits of a row.
fn check_known_weight(step: &Step, tenant: &Tenant) -> Result<usize, PlanError> {
    if step.verb != Verb::Put {
        return Ok(0);
    }
    let mut values: Vec<&Value> = vec![&Value::Null; step.table.columns().len()];
    values.iter_mut().zip(&step.key).for_each(|(value, key)| *value = key);
    for Assignment { column, expr } in &step.assignments {
        let index = step.table.position(column).and_then(|index| values.get_mut(index));
        if let (Some(value), Some(constant)) = (index, expr.as_constant()) {
            *value = constant;
        }
    }
    limits::check_values(&step.table, tenant, &values).map_err(|error| match error {
        crate::StoreError::LimitExceeded { what, limit, actual } => {
            PlanError::Limit { what: format!("bytes in {what}"), limit, actual }
        }
        // The check of a row has no other result.
        other => PlanError::Limit { what: other.to_string(), limit: 0, actual: 0 },
    })
}

fn admit_entry(entry: Entry, steps: &[Step]) -> Result<Entry, PlanError> {
    let Entry { resource, key, fingerprint, events } = entry;
    check_text("resource", &resource, false)?;
    check_text("key", &key, true)?;
    check_text("fingerprint", &fingerprint, true)?;
    let events = events
        .into_iter()
        .map(|draft| {
            let EventTemplate { name, data, row_of, about, actor } = draft;
            check_text("event", &name, false)?;
            if let Some(actor) = &actor {
                check_text("actor", actor, false)?;
            }
            if let Some(EventSubject { resource, key }) = &about {
                check_text("resource", resource, false)?;
                check_text("key", key, true)?;
            }
            let about = about.filter(|about| about.resource != resource || about.key != key);
            if let Some(step) = row_of
                && !steps.get(step).is_some_and(Step::writes)
            {
                return Err(PlanError::NoSuchStep { event: name, step });
            }
            let data = canonical_json(serde_json::Value::Object(data), Value::JSON_DEPTH_MAX);
            let data = data.map_err(|why| PlanError::BadValue {
                table: "the log".into(),
                column: format!("events.{name}"),
                why,
            })?;
            let data = if let serde_json::Value::Object(data) = data { data } else { serde_json::Map::new() };
            Ok(EventTemplate { name, data, row_of, about, actor })
        })
        .collect::<Result<_, _>>()?;
    Ok(Entry { resource, key, fingerprint, events })
}

fn check_entry_weight(operation: &str, entry: &Entry) -> Result<usize, PlanError> {
    let weights = || {
        entry.events.iter().map(|draft| {
            (draft.name.as_str(), json_weight(&draft.data) + limits::actor_weight(draft.actor.as_ref()))
        })
    };
    let own = limits::check_events(operation, weights());
    own.map(|own| own + limits::further_weight(entry, weights())).map_err(|error| match error {
        crate::StoreError::LimitExceeded { what, limit, actual } => {
            PlanError::Limit { what: format!("bytes in {what}"), limit, actual }
        }
        // The check of a record has no other result.
        other => PlanError::Limit { what: other.to_string(), limit: 0, actual: 0 },
    })
}
