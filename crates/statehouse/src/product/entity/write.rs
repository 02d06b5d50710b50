//! The writes: from a call to the steps of a plan, and from a refused step to what it means.

use std::sync::Arc;

use async_trait::async_trait;
use serde_json::{Map, Value as Json};
use statehouse_store::guard::{column, now};
use statehouse_store::table::{Column, VERSION};
use statehouse_store::{
    Address, BadValue, Consistency, Event, EventTemplate, Expr, Guard, Operand, Reason, Refused, Row, Step,
    Table, Tenant, Value,
};

use super::rules::{Mutation, Way, computed, differs, is_zero, zero_like};
use super::{ACTIVE, DELETED, Entity, STATUS, UPDATED_AT};
use crate::action::{
    Answer, Call, Code, Desk, Draft, Expected, Pieces, Refusal, Verdict, Write, common_verdict, row_of,
};
use crate::lock;
use crate::product::fields::contents;
use crate::resource::key_text;

/// How the name of an event ends whose row is the one of the hot fields.
const COUNTED: &str = ".counted";

/// What a write does.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Verb {
    Create,
    Update,
    Patch,
    Mutate,
    Delete,
    Restore,
}

pub(super) struct Writer {
    pub entity: Arc<Entity>,
    pub verb: Verb,
}

impl Entity {
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
        desk: &Desk<'_>,
    ) -> Result<(Option<Row>, Option<Row>), Refusal> {
        let mut addresses = vec![Entity::address(&self.table, &call.tenant, &call.key)?];
        if let Some(hot) = &self.hot_table {
            addresses.push(Entity::address(hot, &call.tenant, &call.key)?);
        }
        let mut rows = desk.store.get(&addresses, Consistency::Strong).await?.into_iter();
        Ok((rows.next().flatten(), rows.next().flatten()))
    }

    /// The row that a caller means to change (I1, I3), as it is.
    async fn current(&self, call: &Call, desk: &Desk<'_>) -> Result<Row, Refusal> {
        let (row, _) = self.rows(call, desk).await?;
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
        if row.text(STATUS) == Some(status) {
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
        Step::assert(&self.table, call.key.iter().cloned()).guard(column(STATUS).eq(ACTIVE))
    }

    /// A guarded update of a row that was read as active, or the answer that nothing has to change (I4). Its version says
    /// enough: whoever deletes the row raises it.
    fn change(&self, call: &Call, row: &Row, changes: Vec<(&str, Value)>, locked: bool) -> Draft {
        let changed: Vec<(&str, Value)> =
            changes.into_iter().filter(|(name, value)| row.get(name) != Some(value)).collect();
        if changed.is_empty() {
            return Draft::Done(Answer::row(row.to_json()));
        }
        let mut step = Step::update(&self.table, call.key.iter().cloned())
            .guard(Guard::version(row.version()))
            .set(UPDATED_AT, now());
        for (name, value) in changed {
            step = step.set(name, value);
        }
        self.write(call, step, "updated", locked)
    }

    /// A guarded update of a row that nobody has read: the version that the caller has seen says enough. If the store
    /// refuses it, the next draft looks at the row and finds out why.
    fn overwrite(&self, call: &Call, version: i64, differs: Guard, changes: Vec<(&str, Value)>) -> Draft {
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

    /// A write of the row. Without the row's lock it demands that nobody else holds it (I6).
    fn write(&self, call: &Call, step: Step, what: &str, locked: bool) -> Draft {
        let event = EventTemplate::named(format!("{}.{what}", self.name)).with_row_of(0);
        let mut steps = vec![step];
        if let (Some(locks), false) = (&self.lock_table, locked) {
            steps.push(lock::free(locks, call.key.iter().cloned()));
        }
        Draft::Write(Pieces { subject: key_text(&call.key), steps, event })
    }

    /// The key of a row that is created, which is part of its contents.
    fn new_key(&self, contents: &Map<String, Json>) -> Result<Vec<Value>, BadValue> {
        let part = |column: &Column| {
            Value::from_json(contents.get(&column.name).cloned().unwrap_or_default(), column.kind)
        };
        self.table.key_columns().iter().map(part).collect()
    }

    fn create(&self, call: &Call) -> Result<Draft, Refusal> {
        let key =
            self.new_key(&call.input).map_err(|why| Refusal::new(Code::InvalidInput, why.to_string()))?;
        let mut step =
            Step::insert(&self.table, key.iter().cloned()).set(STATUS, ACTIVE).set(UPDATED_AT, now());
        for (name, value) in contents(&self.fields, &call.input, true)? {
            step = step.set(name, value);
        }
        let event = EventTemplate::named(format!("{}.created", self.name)).with_row_of(0);
        Ok(Draft::Write(Pieces { subject: key_text(&key), steps: vec![step], event }))
    }

    async fn mutate(&self, call: &Call, desk: &Desk<'_>) -> Result<Draft, Refusal> {
        let mutation = Mutation::of(call, &self.hot)?;
        match mutation.way {
            Way::Hot => self.mutate_hot(call, desk, &mutation).await,
            Way::Count => {
                let amounts = contents(&self.fields, &mutation.increment, false)?;
                if amounts.iter().all(|(_, amount)| is_zero(amount)) {
                    return Ok(Draft::Done(Answer::row(self.current(call, desk).await?.to_json())));
                }
                Ok(self.count(call, amounts))
            }
            Way::Compute => {
                let row = self.current(call, desk).await?;
                let mut changes = contents(&self.fields, &mutation.set, false)?;
                changes.extend(computed(&self.fields, Some(&row), &mutation.increment, &mutation.append)?);
                Ok(self.change(call, &row, changes, self.takes_lock(call, mutation.way)))
            }
        }
    }

    /// Whether a mutation is done under the row's lock. One that names a version is not: it may lose, and wants to know.
    fn takes_lock(&self, call: &Call, way: Way) -> bool {
        self.lock_table.is_some() && way == Way::Compute && call.expected.is_none()
    }

    /// Adds to numbers where they stand.
    fn count(&self, call: &Call, amounts: Vec<(&str, Value)>) -> Draft {
        let mut step = Step::update(&self.table, call.key.iter().cloned())
            .guard(column(STATUS).eq(ACTIVE))
            .set(UPDATED_AT, now());
        for (name, amount) in amounts {
            let base = Operand::Coalesce(name.to_owned(), zero_like(&amount));
            step = step.set(name, Expr::Add(base, Operand::Value(amount)));
        }
        self.write(call, step, "updated", false)
    }

    /// Changes the row of the hot fields, which is made when it is first needed.
    async fn mutate_hot(&self, call: &Call, desk: &Desk<'_>, mutation: &Mutation) -> Result<Draft, Refusal> {
        let Some(table) = &self.hot_table else {
            return Err(Refusal::new(Code::Internal, "hot fields without a table"));
        };
        // The row itself is not written, so its version stays.
        let mut owner = self.is_active(call);
        if let Some(Expected::Version(version)) = call.expected {
            owner = owner.guard(Guard::version(version));
        }
        let mut step = Step::upsert(table, call.key.iter().cloned());
        let mut changes = contents(&self.hot, &mutation.set, false)?;
        if !mutation.append.is_empty() {
            let (_, hot) = self.rows(call, desk).await?;
            changes.extend(computed(&self.hot, hot.as_ref(), &Default::default(), &mutation.append)?);
            step = match &hot {
                Some(hot) => step.guard(Guard::version(hot.version())),
                None => Step::insert(table, call.key.iter().cloned()),
            };
        }
        for (name, value) in changes {
            step = step.set(name, value);
        }
        for (name, amount) in contents(&self.hot, &mutation.increment, false)? {
            let field = self.hot.iter().find(|field| field.name == name);
            let base = field.and_then(|field| field.default.clone()).unwrap_or_else(|| zero_like(&amount));
            step =
                step.set(name, Expr::Add(Operand::Coalesce(name.to_owned(), base), Operand::Value(amount)));
        }
        let event = EventTemplate::named(format!("{}{COUNTED}", self.name)).with_row_of(1);
        Ok(Draft::Write(Pieces { subject: key_text(&call.key), steps: vec![owner, step], event }))
    }

    /// From one status to the other.
    fn transition(&self, call: &Call, verb: Verb) -> Draft {
        let (from, to, what) = match verb {
            Verb::Delete => (ACTIVE, DELETED, "deleted"),
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

#[async_trait]
impl Write for Writer {
    fn lock(&self, call: &Call) -> Result<Option<lock::Wanted>, Refusal> {
        let entity = &self.entity;
        let (Some(locks), Verb::Mutate) = (&entity.lock_table, self.verb) else { return Ok(None) };
        if !entity.takes_lock(call, Mutation::of(call, &entity.hot)?.way) {
            return Ok(None);
        }
        let row = Entity::address(locks, &call.tenant, &call.key)?;
        Ok(Some(lock::Wanted { row, provided: entity.is_active(call) }))
    }

    async fn draft(&self, call: &Call, desk: &Desk<'_>) -> Result<Draft, Refusal> {
        let entity = &self.entity;
        match self.verb {
            Verb::Create => entity.create(call),
            Verb::Mutate => entity.mutate(call, desk).await,
            Verb::Update | Verb::Patch => {
                let changes = contents(&entity.fields, &call.input, self.verb == Verb::Update)?;
                if let (Some(Expected::Version(version)), 0) = (call.expected, desk.tries)
                    && let Some(differs) = differs(&changes)
                {
                    return Ok(entity.overwrite(call, version, differs, changes));
                }
                let row = entity.current(call, desk).await?;
                Ok(entity.change(call, &row, changes, false))
            }
            Verb::Delete | Verb::Restore => Ok(entity.transition(call, self.verb)),
        }
    }

    fn refusal(&self, call: &Call, refused: &Refused) -> Verdict {
        let entity = &self.entity;
        let (Reason::Guard { .. }, Some(row)) = (&refused.reason, &refused.current) else {
            return match (self.verb, &refused.reason) {
                (Verb::Create, _) => {
                    let key = entity.new_key(&call.input).unwrap_or_default();
                    let what = format!("{} {}", entity.name, key_text(&key));
                    match refused.current.as_ref().filter(|row| row.text(STATUS) == Some(DELETED)) {
                        Some(row) => Verdict::Refuse(
                            Refusal::new(
                                Code::AlreadyExists,
                                format!("{what} was deleted; restore it instead"),
                            )
                            .at_version(Some(row)),
                        ),
                        None => common_verdict(&what, refused),
                    }
                }
                // The row of the hot fields was made by somebody else meanwhile.
                (Verb::Mutate, Reason::Present) => Verdict::TryAgain,
                _ => common_verdict(&entity.what(call), refused),
            };
        };
        if entity.lock_table.as_ref().is_some_and(|locks| locks.name() == row.table().name()) {
            return Verdict::Wait;
        }
        if row.table().name() == entity.table.name() {
            let wanted = if self.verb == Verb::Restore { DELETED } else { ACTIVE };
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
        Verdict::TryAgain
    }

    fn answer(&self, _: &Call, event: &mut Event) -> Answer {
        let mut row = row_of(event);
        // The row of the hot fields has a version of its own, which would be taken for the one that editors hold.
        if let (true, Some(row)) = (event.name.ends_with(COUNTED), row.as_object_mut()) {
            row.remove(VERSION);
        }
        let created = (self.verb == Verb::Create).then(|| {
            let key = row.as_object().and_then(|row| self.entity.new_key(row).ok());
            key_text(&key.unwrap_or_default())
        });
        Answer { created, ..Answer::row(row) }
    }
}
