//! The writes: from a call to the steps of a plan, and from a refused step to what it means.

use std::sync::Arc;

use async_trait::async_trait;
use statehouse_store::guard::{column, now};
use statehouse_store::plan::Expect;
use statehouse_store::table::VERSION;
use statehouse_store::{
    Address, Consistency, Event, EventTemplate, Expr, Guard, Ids, Operand, Reason, Row, Step, Table, Tenant,
    Value,
};

use super::rules::{MutationInput, MutationMode, computed, differs, is_zero, zero_like};
use super::{ACTIVE, DELETED, EntitySpec, STATUS, UPDATED_AT};
use crate::action::{
    ActionContext, Answer, Call, Code, Expected, PlanParts, Prepare, Prepared, Refusal, RefusedStep, Verdict,
    take_row,
};
use crate::blueprint::settings::Field;
use crate::declare::FieldLimits;
use crate::declare::table::CREATED_AT;
use crate::erase;
use crate::inputs::Inputs;
use crate::lock;
use crate::product::fields::contents;
use crate::resource::key_text;

/// How the name of an event ends whose row is the one of the hot fields.
const COUNTED: &str = ".counted";

/// The labels of the steps: on the row, on the row of the hot fields, on the lock.
const ROW: &str = "row";
const HOT: &str = "hot";
const LOCK: &str = "lock";

/// What a write does.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum EntityVerb {
    Create,
    Update,
    Patch,
    Mutate,
    Delete,
    Restore,
    Erase,
}

pub(super) struct EntityWrite {
    pub entity: Arc<EntitySpec>,
    pub verb: EntityVerb,
}

impl EntitySpec {
    pub(super) fn what(&self, call: &Call) -> String {
        format!("{} {}", self.name, key_text(&call.key))
    }

    fn address(table: &Arc<Table>, tenant: &Tenant, key: &[Value]) -> Result<Address, Refusal> {
        Ok(Address::new(table, tenant, key.iter().cloned())?)
    }

    /// The row and, if fields are split off, the hot row.
    pub(super) async fn rows(
        &self,
        call: &Call,
        cx: &ActionContext<'_>,
    ) -> Result<(Option<Row>, Option<Row>), Refusal> {
        let mut addresses = vec![EntitySpec::address(&self.table, &call.tenant, &call.key)?];
        if let Some(hot) = &self.hot_table {
            addresses.push(EntitySpec::address(hot, &call.tenant, &call.key)?);
        }
        let mut rows = cx.store.get(&addresses, Consistency::Strong).await?.into_iter();
        Ok((rows.next().flatten(), rows.next().flatten()))
    }

    /// The row that a caller means to change (I1, I3), as it is.
    async fn current(&self, call: &Call, cx: &ActionContext<'_>) -> Result<Row, Refusal> {
        let (row, _) = self.rows(call, cx).await?;
        let row =
            row.ok_or_else(|| Refusal::new(Code::NotFound, format!("{} does not exist", self.what(call))))?;
        self.check_status(call, &row, ACTIVE)?;
        match call.expected {
            Some(Expected::Version(expected)) if expected != row.version() => {
                Err(self.conflict(call, expected, &row))
            }
            _ => Ok(row),
        }
    }

    pub(super) fn check_status(&self, call: &Call, row: &Row, status: &str) -> Result<(), Refusal> {
        if row.get_text(STATUS)? == status {
            return Ok(());
        }
        let what = self.what(call);
        Err(match status {
            ACTIVE => Refusal::new(Code::Deleted, format!("{what} was deleted; restore it first")),
            _ => Refusal::new(Code::NotDeleted, format!("{what} is not deleted")),
        }
        .at_version(Some(row)))
    }

    fn conflict(&self, call: &Call, expected: i64, row: &Row) -> Refusal {
        let message = format!(
            "{} is at version {}, not {expected}: read it again, merge and retry",
            self.what(call),
            row.version()
        );
        Refusal::new(Code::VersionConflict, message).at_version(Some(row))
    }

    /// The row must be there and active.
    fn is_active(&self, call: &Call) -> Step {
        Step::assert(&self.table, call.key.iter().cloned()).label(ROW).guard(column(STATUS).eq(ACTIVE))
    }

    /// A guarded update of a row that was read as active, or the answer that nothing has to change (I4). Its version says
    /// enough: a deletion raises it.
    fn change(&self, call: &Call, row: &Row, changes: Vec<(&str, Value)>, locked: bool) -> Prepared {
        let changed: Vec<(&str, Value)> =
            changes.into_iter().filter(|(name, value)| row.get(name) != Some(value)).collect();
        if changed.is_empty() {
            return Prepared::Unchanged(Answer::row(row.to_json()));
        }
        let mut step = Step::update(&self.table, call.key.iter().cloned())
            .guard(Guard::version(row.version()))
            .set(UPDATED_AT, now());
        for (name, value) in changed {
            step = step.set(name, value);
        }
        self.write(call, step, "updated", locked)
    }

    /// A guarded update without a read: the version that the caller has seen is enough. If the store
    /// refuses it, the next draft looks at the row and finds out why.
    fn overwrite(&self, call: &Call, version: i64, differs: Guard, changes: Vec<(&str, Value)>) -> Prepared {
        let mut step = Step::update(&self.table, call.key.iter().cloned())
            .guard(Guard::version(version))
            .guard(column(STATUS).eq(ACTIVE))
            .guard(differs)
            .set(UPDATED_AT, now());
        for (name, value) in changes {
            step = step.set(name, value);
        }
        self.write(call, step, "updated", false)
    }

    /// A write of the row. Without the row's lock it demands that no other caller holds it (I6).
    fn write(&self, call: &Call, step: Step, what: &str, locked: bool) -> Prepared {
        let event = EventTemplate::named(format!("{}.{what}", self.name)).with_row_of(0);
        let mut steps = vec![step.label(ROW)];
        if let (Some(locks), false) = (&self.lock_table, locked) {
            steps.push(lock::free(locks, call.key.iter().cloned()).label(LOCK));
        }
        PlanParts::new(key_text(&call.key), steps, event).into()
    }

    /// The key of a row that is created, which is part of its contents. The server makes what is left out.
    fn new_key(&self, inputs: &Inputs, ids: &Ids) -> Vec<Value> {
        let part = |field: &Field| match inputs.value(&field.name) {
            None if field.generated => ids.next().into(),
            _ => inputs.value_or_null(&field.name),
        };
        self.key.iter().map(part).collect()
    }

    fn create(&self, call: &Call, ids: &Ids) -> Result<Prepared, Refusal> {
        let key = self.new_key(&call.input, ids);
        let mut step = Step::insert(&self.table, key.iter().cloned())
            .label(ROW)
            .set(STATUS, ACTIVE)
            .set(UPDATED_AT, now());
        if self.created_at {
            step = step.set(CREATED_AT, now());
        }
        for (name, value) in contents(&self.fields, &call.input, true) {
            step = step.set(name, value);
        }
        let event = EventTemplate::named(format!("{}.created", self.name)).with_row_of(0);
        Ok(PlanParts::new(key_text(&key), vec![step], event).into())
    }

    async fn mutate(&self, call: &Call, cx: &ActionContext<'_>) -> Result<Prepared, Refusal> {
        let mutation = MutationInput::of(call, &self.fields, &self.hot)?;
        match mutation.way {
            MutationMode::Hot => self.mutate_hot(call, cx, &mutation).await,
            MutationMode::Count => {
                let amounts = contents(&self.fields, &mutation.increment, false);
                if amounts.iter().all(|(_, amount)| is_zero(amount)) {
                    return Ok(Prepared::Unchanged(Answer::row(self.current(call, cx).await?.to_json())));
                }
                Ok(self.count(call, amounts))
            }
            MutationMode::Compute => {
                let row = self.current(call, cx).await?;
                let mut changes =
                    self.without_immutable(&row, contents(&self.fields, &mutation.set, false))?;
                changes.extend(computed(&self.fields, Some(&row), &mutation.increment, &mutation.append)?);
                Ok(self.change(call, &row, changes, self.takes_lock(call, mutation.way)))
            }
        }
    }

    fn is_immutable(&self, name: &str) -> bool {
        self.fields.iter().any(|field| field.immutable && field.name == name)
    }

    /// The changes without immutable fields, which must be given as they are. The version that was read keeps them so.
    fn without_immutable<'c>(
        &self,
        row: &Row,
        mut changes: Vec<(&'c str, Value)>,
    ) -> Result<Vec<(&'c str, Value)>, Refusal> {
        for (name, value) in changes.iter().filter(|(name, _)| self.is_immutable(name)) {
            if row.get(name) != Some(value) {
                return Err(Refusal::field(name, "it is immutable and keeps what it was created with"));
            }
        }
        changes.retain(|(name, _)| !self.is_immutable(name));
        Ok(changes)
    }

    /// What the caller is told if a limit of a sum is what failed: the only guards with a value for null.
    fn sum_refusal(&self, call: &Call, refused: &RefusedStep<'_>, row: &Row) -> Option<Refusal> {
        let Some(Guard::Compare(Operand::Coalesce(name, _), ..)) = refused.guard() else { return None };
        let field = self.fields.iter().chain(&self.hot).find(|field| field.name == *name)?;
        let why = field.limits.as_ref()?.sum_refused(name, row.get(name));
        let refusal = Refusal::new(Code::OutOfRange, format!("{}: {why}", self.what(call)));
        Some(if refused.label() == ROW { refusal.at_version(Some(row)) } else { refusal })
    }

    /// Whether a mutation is done under the row's lock. One that names a version is not: it may lose, and wants to know.
    fn takes_lock(&self, call: &Call, way: MutationMode) -> bool {
        self.lock_table.is_some() && way == MutationMode::Compute && call.expected.is_none()
    }

    /// Adds to numbers where they stand.
    fn count(&self, call: &Call, amounts: Vec<(&str, Value)>) -> Prepared {
        let mut step = Step::update(&self.table, call.key.iter().cloned())
            .guard(column(STATUS).eq(ACTIVE))
            .set(UPDATED_AT, now());
        for (name, amount) in amounts {
            let zero = zero_like(&amount);
            let limits =
                self.fields.iter().find(|field| field.name == name).and_then(|field| field.limits.as_ref());
            if let Some(guard) = limits.and_then(|limits| limits.sum_guard(name, &zero, &amount)) {
                step = step.guard(guard);
            }
            let base = Operand::Coalesce(name.to_owned(), zero);
            step = step.set(name, Expr::Add(base, Operand::Value(amount)));
        }
        self.write(call, step, "updated", false)
    }

    /// Changes the row of the hot fields, which is made when it is first needed.
    async fn mutate_hot(
        &self,
        call: &Call,
        cx: &ActionContext<'_>,
        mutation: &MutationInput,
    ) -> Result<Prepared, Refusal> {
        let Some(table) = &self.hot_table else {
            return Err(Refusal::new(Code::Internal, "hot fields without a table"));
        };
        // The row itself is not written, so its version stays.
        let mut owner = self.is_active(call);
        if let Some(Expected::Version(version)) = call.expected {
            owner = owner.guard(Guard::version(version));
        }
        let mut step = Step::upsert(table, call.key.iter().cloned());
        let mut changes = contents(&self.hot, &mutation.set, false);
        if !mutation.append.is_empty() {
            let (_, hot) = self.rows(call, cx).await?;
            changes.extend(computed(&self.hot, hot.as_ref(), &Default::default(), &mutation.append)?);
            step = match &hot {
                Some(hot) => step.guard(Guard::version(hot.version())),
                None => Step::insert(table, call.key.iter().cloned()),
            };
        }
        for (name, value) in changes {
            step = step.set(name, value);
        }
        for (name, amount) in contents(&self.hot, &mutation.increment, false) {
            let field = self.hot.iter().find(|field| field.name == name);
            let base = field.and_then(|field| field.default.clone()).unwrap_or_else(|| zero_like(&amount));
            if let Some(limits) = field.and_then(|field| field.limits.as_ref()) {
                step = bounded(step, limits, (name, &base, &amount));
            }
            step =
                step.set(name, Expr::Add(Operand::Coalesce(name.to_owned(), base), Operand::Value(amount)));
        }
        let event = EventTemplate::named(format!("{}{COUNTED}", self.name)).with_row_of(1);
        Ok(PlanParts::new(key_text(&call.key), vec![owner, step.label(HOT)], event).into())
    }

    /// From one status to the other.
    fn transition(&self, call: &Call, verb: EntityVerb) -> Prepared {
        let (from, to, what) = match verb {
            EntityVerb::Delete => (ACTIVE, DELETED, "deleted"),
            _ => (DELETED, ACTIVE, "restored"),
        };
        let mut step = Step::update(&self.table, call.key.iter().cloned());
        if let Some(Expected::Version(version)) = call.expected {
            step = step.guard(Guard::version(version));
        }
        let step = step.guard(column(STATUS).eq(from)).set(STATUS, to).set(UPDATED_AT, now());
        self.write(call, step, what, false)
    }
}

impl EntitySpec {
    /// Removes the row for good, whatever its status, with what stands beside it (I7).
    async fn erase(&self, call: &Call, cx: &ActionContext<'_>) -> Result<Prepared, Refusal> {
        let (row, _) = self.rows(call, cx).await?;
        let row =
            row.ok_or_else(|| Refusal::new(Code::NotFound, format!("{} does not exist", self.what(call))))?;
        if let Some(Expected::Version(expected)) = call.expected
            && expected != row.version()
        {
            return Err(self.conflict(call, expected, &row));
        }
        let key = || call.key.iter().cloned();
        let mut steps =
            vec![Step::delete(&self.table, key()).guard(Guard::version(row.version())).label(ROW)];
        steps.extend(self.hot_table.as_ref().map(|hot| Step::remove(hot, key()).label(HOT)));
        steps.extend(self.lock_table.as_ref().map(|locks| lock::remove(locks, key()).label(LOCK)));
        erase::parts(&self.name, &row, steps, cx)
    }
}

#[async_trait]
impl Prepare for EntityWrite {
    fn lock(&self, call: &Call) -> Result<Option<lock::LockRequest>, Refusal> {
        let entity = &self.entity;
        let (Some(locks), EntityVerb::Mutate) = (&entity.lock_table, self.verb) else { return Ok(None) };
        if !entity.takes_lock(call, MutationInput::of(call, &entity.fields, &entity.hot)?.way) {
            return Ok(None);
        }
        let row = EntitySpec::address(locks, &call.tenant, &call.key)?;
        Ok(Some(lock::LockRequest { row, provided: entity.is_active(call) }))
    }

    async fn prepare(&self, call: &Call, cx: &ActionContext<'_>) -> Result<Prepared, Refusal> {
        let entity = &self.entity;
        match self.verb {
            EntityVerb::Create => entity.create(call, cx.ids),
            EntityVerb::Mutate => entity.mutate(call, cx).await,
            EntityVerb::Update | EntityVerb::Patch => {
                let mut changes = contents(&entity.fields, &call.input, self.verb == EntityVerb::Update);
                changes.retain(|(name, _)| call.input.has(name) || !entity.is_immutable(name));
                let is_free = !changes.iter().any(|(name, _)| entity.is_immutable(name));
                if let (Some(Expected::Version(version)), 0, true) = (call.expected, cx.attempt, is_free)
                    && let Some(differs) = differs(&changes)
                {
                    return Ok(entity.overwrite(call, version, differs, changes));
                }
                let row = entity.current(call, cx).await?;
                let changes = entity.without_immutable(&row, changes)?;
                Ok(entity.change(call, &row, changes, false))
            }
            EntityVerb::Delete | EntityVerb::Restore => Ok(entity.transition(call, self.verb)),
            EntityVerb::Erase => entity.erase(call, cx).await,
        }
    }

    fn refused(&self, call: &Call, refused: &RefusedStep<'_>) -> Verdict {
        let entity = &self.entity;
        let (Reason::Guard { .. }, Some(row)) = (refused.reason, refused.row) else {
            return match (self.verb, refused.reason) {
                (EntityVerb::Create, _) => {
                    let what = format!("{} {}", entity.name, key_text(&refused.step.key));
                    match refused.row.filter(|row| row.text(STATUS) == Some(DELETED)) {
                        Some(row) => Verdict::Refuse(
                            Refusal::new(
                                Code::AlreadyExists,
                                format!("{what} was deleted; restore it instead"),
                            )
                            .at_version(Some(row)),
                        ),
                        None => refused.standard(&what),
                    }
                }
                // Another caller inserted the row of the hot fields meanwhile.
                (EntityVerb::Mutate, Reason::Present) => Verdict::Retry,
                // The first sum of a hot field would be out of range.
                (EntityVerb::Mutate, Reason::Absent) if refused.label() == HOT => {
                    let message = format!("{}: the new number would be out of range", entity.what(call));
                    Verdict::Refuse(Refusal::new(Code::OutOfRange, message))
                }
                _ => refused.standard(&entity.what(call)),
            };
        };
        if refused.label() == LOCK {
            return Verdict::Wait;
        }
        if let Some(refusal) = entity.sum_refusal(call, refused, row) {
            return Verdict::Refuse(refusal);
        }
        if refused.label() == ROW && self.verb != EntityVerb::Erase {
            let wanted = if self.verb == EntityVerb::Restore { DELETED } else { ACTIVE };
            if let Err(refusal) = entity.check_status(call, row, wanted) {
                return Verdict::Refuse(refusal);
            }
            if let Some(Expected::Version(expected)) = call.expected
                && expected != row.version()
            {
                return Verdict::Refuse(entity.conflict(call, expected, row));
            }
        }
        // The caller did not insist on a version, so the one that was read here is no concern of theirs. Or the version
        // is right and nothing would change, which the next draft sees.
        Verdict::Retry
    }
}

/// A step on the hot row whose sum stays in range. Where there is no row yet, no guard is judged: a first sum that is out of
/// range demands a row.
fn bounded(step: Step, limits: &FieldLimits, (name, base, amount): (&str, &Value, &Value)) -> Step {
    let Some(guard) = limits.sum_guard(name, base, amount) else { return step };
    let first = base.as_int().zip(amount.as_int()).and_then(|(base, amount)| base.checked_add(amount));
    let fits = first.is_some_and(|first| limits.check(&first.into()).is_ok());
    let step = step.guard(guard);
    if fits || step.expect != Expect::Either { step } else { Step { expect: Expect::Present, ..step } }
}

/// The answer of a mutation. The row of the hot fields has a version of its own, which a caller could take for the row's.
pub(super) fn mutated(event: &mut Event) -> Answer {
    let mut row = take_row(event);
    if let (true, Some(row)) = (event.name.ends_with(COUNTED), row.as_object_mut()) {
        row.remove(VERSION);
    }
    Answer::row(row)
}
