//! Rows that are deleted with the row they refer to: `on_delete = "cascade"`.
//!
//! The plan that deletes a row notes it in a table beside ([`super::constrain`], K5). A worker finds the notes, and deletes the rows
//! that refer to the deleted one, a bounded number in each step, each by its own action: so their constraints, counts, unique
//! values and events are as after any other deletion. A row that is deleted so may have rows that refer to it, whose deletion is
//! noted in turn. Each row is deleted once, so a cycle comes to an end.
//!
//! - C1. A row is deleted only while its note is there, and only if it still refers to the deleted row. *Assertion that the note is
//!   present, in the plan of the deletion; the version that was read strongly with the reference.*
//! - C2. A note is removed when no live row refers to the deleted one. *Guard of the removal:* `n <= 0` of each count of
//!   references. The index by which rows are found may be behind; the counts are not.
//! - C3. Nothing refers to the deleted row anew. *K2 of [`super::constrain`]: it is not live, and cannot be restored while the note is
//!   there.*
//! - C4. Work that was interrupted goes on. *The note is stored, and due until it is removed.* A row that cannot be deleted now is
//!   said in the note, and tried again with a pause.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use serde_json::json;
use statehouse_store::guard::{column, now_plus};
use statehouse_store::plan::{Expect, PlanBuilder};
use statehouse_store::{
    Address, Commit, Consistency, Guard, Plan, PlanError, Query, RetryPolicy, Row, Step, StoreError, Tenant,
    Value, commit_known,
};

use super::constrain::CASCADE_SHARDS;
use super::react::ReactionCall;
use super::{CallArguments, digest};
use crate::action::{Action, ActionContext, Code, Expected, Refusal};
use crate::cache::Cache;
use crate::declare::row_constraints::{Cascade, ERROR, REFERENCES, ReferenceCount, cascade_index};
use crate::infra::due;
use crate::resource::{Resource, key_text};
use crate::worker::{NextStep, StepContext, StepProgress, Worker};

/// The pause before rows that could not be found or deleted are looked for again.
const RETRY_PAUSE: Duration = Duration::from_secs(1);
/// Actions that delete a row.
const DELETING: [&str; 2] = ["delete", "remove"];

/// The workers of all resources whose rows take others along.
pub(super) fn workers(resources: &[Resource]) -> Vec<Arc<dyn Worker>> {
    let cascades =
        || resources.iter().filter_map(|resource| Some((resource, resource.constraints.cascade.clone()?)));
    if cascades().next().is_none() {
        return Vec::new();
    }
    let shared: Arc<[Resource]> = resources.into();
    let worker = |(resource, cascade): (&Resource, Cascade)| {
        let (name, resources) = (resource.name.clone(), shared.clone());
        Arc::new(CascadeWorker { name, cascade, resources }) as Arc<dyn Worker>
    };
    cascades().map(worker).collect()
}

/// Deletes the rows that refer to deleted rows of one resource.
struct CascadeWorker {
    /// The resource whose rows were deleted.
    name: String,
    cascade: Cascade,
    resources: Arc<[Resource]>,
}

impl fmt::Debug for CascadeWorker {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "CascadeWorker({})", self.name)
    }
}

/// What became of a row that refers to a deleted one.
enum Deletion {
    Done,
    /// It is not there any more, or refers to another row.
    Elsewhere,
    Refused(Refusal),
}

#[expect(clippy::needless_pass_by_value, reason = "it is what `map_err` gives")]
fn misuse(error: PlanError) -> StoreError {
    StoreError::schema("a cascade", error.to_string())
}

#[async_trait]
impl Worker for CascadeWorker {
    fn name(&self) -> &str {
        &self.cascade.worker
    }

    fn shards(&self) -> u32 {
        CASCADE_SHARDS
    }

    async fn step(&self, context: &StepContext<'_>, limit: usize) -> Result<StepProgress, StoreError> {
        let query = Query::all_tenants(&self.cascade.table, due::DUE, [i64::from(context.shard).into()])
            .and_then(|query| query.limit(limit))
            .map_err(misuse)?;
        let page = context.store.query(&query).await?;
        let now = context.clock.now();
        let mut progress = StepProgress::idle();
        for note in &page.rows {
            let due_at = note.get_time(due::DUE_AT)?;
            if due_at > now {
                progress.next = NextStep::At(due_at);
                return Ok(progress);
            }
            progress.lag = progress.lag.max(now.since(due_at));
            if progress.rows >= limit {
                progress.next = NextStep::Now;
                return Ok(progress);
            }
            self.follow(note, limit - progress.rows, context, &mut progress).await?;
        }
        if page.next.is_some() || progress.rows > 0 {
            progress.next = NextStep::Now;
        }
        Ok(progress)
    }
}

impl CascadeWorker {
    /// Deletes some of the rows that refer to a deleted one, and removes the note if there are no more.
    async fn follow(
        &self,
        note: &Row,
        most: usize,
        context: &StepContext<'_>,
        progress: &mut StepProgress,
    ) -> Result<(), StoreError> {
        let (mut tried, mut error) = (0, None);
        for reference in &self.cascade.references {
            let Some((resource, action)) = self.deletion_of(reference) else { continue };
            for row in referring(resource, reference, note, most.saturating_sub(tried), context).await? {
                tried += 1;
                match self.delete(resource, action, &row, note, context).await? {
                    Deletion::Done => progress.rows += 1,
                    Deletion::Elsewhere => {}
                    Deletion::Refused(refusal) => {
                        let what = format!("{} {}", resource.name, key_text(row.key()));
                        error = Some(format!("{what}: {}", refusal.message));
                    }
                }
            }
        }
        if self.remove(note, context).await? {
            // The note counts as a row, so that a worker does not pause between rows that have nothing to take along.
            progress.rows += 1;
            return Ok(());
        }
        if error.is_some() || tried == 0 {
            self.postpone(note, error.as_deref(), context).await?;
        }
        progress.failures.extend(error);
        Ok(())
    }

    /// The resource of a reference, and how its rows are deleted.
    fn deletion_of(&self, reference: &ReferenceCount) -> Option<(&Resource, &Action)> {
        let resource = self.resources.iter().find(|resource| resource.name == reference.resource)?;
        let action = DELETING.into_iter().find_map(|name| resource.action(name))?;
        Some((resource, action))
    }

    /// Deletes a row as its action does, under the version at which it refers to the deleted one (C1).
    async fn delete(
        &self,
        resource: &Resource,
        action: &Action,
        row: &Row,
        note: &Row,
        context: &StepContext<'_>,
    ) -> Result<Deletion, StoreError> {
        let operation = context.ids.next();
        let prepared = self.prepared(resource, action, row, note, &operation, context).await;
        let reacted = match prepared {
            Ok(Some(reacted)) => reacted,
            Ok(None) => return Ok(Deletion::Elsewhere),
            Err(refusal) if refusal.code.is_passing() && refusal.code != Code::Contended => {
                return Err(StoreError::unavailable(refusal.message));
            }
            Err(refusal) => return Ok(judged(refusal)),
        };
        let present = Step::assert(&self.cascade.table, note.key().iter().cloned());
        let plan = Plan::of(row.tenant(), operation).step(present).steps(reacted.steps).log(reacted.entry);
        let plan = plan.without_rows().build().map_err(misuse)?;
        match commit_known(&**context.store, &plan, RetryPolicy::WORKER).await? {
            Commit::Applied(_) => {
                reacted.wakeups.iter().for_each(|wakeup| context.wakeups.notify(wakeup));
                for waiting in &reacted.notify {
                    waiting.send_modify(|count| *count = count.wrapping_add(1));
                }
                Ok(Deletion::Done)
            }
            // The row, or the note, was changed since: the next step looks again.
            Commit::Refused(_) | Commit::Fenced => Ok(Deletion::Elsewhere),
        }
    }

    async fn prepared(
        &self,
        resource: &Resource,
        action: &Action,
        row: &Row,
        note: &Row,
        operation: &str,
        context: &StepContext<'_>,
    ) -> Result<Option<super::react::Reacted>, Refusal> {
        let expected = Some(Expected::Version(row.version()));
        let arguments = CallArguments { key: row.key().to_vec(), expected, ..CallArguments::default() };
        let call = ReactionCall::validated(resource, action, row.tenant(), arguments, operation)?;
        let cache = Cache::holding(0, context.store.partitions(), context.clock.clone());
        let cx = ActionContext {
            store: &**context.store,
            cache: &cache,
            clock: &**context.clock,
            holds: context.egress.holds.as_deref(),
            ids: context.ids,
            resources: &self.resources,
            operation,
            // What it relies on is read, so that a refusal says what it is about.
            attempt: 1,
            refused: None,
        };
        let cause = json!({"cascade": format!("{} {}", self.name, key_text(note.key()))});
        call.prepare(&cx, &digest(operation), &cause).await
    }

    /// Removes a note if no live row refers to the deleted row (C2).
    async fn remove(&self, note: &Row, context: &StepContext<'_>) -> Result<bool, StoreError> {
        let key = || note.key().iter().cloned();
        let unreferenced = |reference: &ReferenceCount| {
            let step = Step::assert(&reference.table, key());
            Step { expect: Expect::Either, ..step }.guard(column(REFERENCES).le(Value::Int(0)))
        };
        let plan = Plan::of(note.tenant(), context.ids.next())
            .steps(self.cascade.references.iter().map(unreferenced))
            .step(Step::remove(&self.cascade.table, key()));
        self.is_applied(plan, context).await
    }

    async fn postpone(
        &self,
        note: &Row,
        error: Option<&str>,
        context: &StepContext<'_>,
    ) -> Result<(), StoreError> {
        let step = Step::update(&self.cascade.table, note.key().iter().cloned())
            .guard(Guard::version(note.version()))
            .set(ERROR, error.map_or(Value::Null, Value::from))
            .set(due::DUE_AT, now_plus(RETRY_PAUSE));
        self.is_applied(Plan::of(note.tenant(), context.ids.next()).step(step), context).await.map(drop)
    }

    async fn is_applied(&self, plan: PlanBuilder, context: &StepContext<'_>) -> Result<bool, StoreError> {
        let plan = plan.without_rows().build().map_err(misuse)?;
        let outcome = commit_known(&**context.store, &plan, RetryPolicy::WORKER).await?;
        Ok(matches!(outcome, Commit::Applied(_)))
    }
}

/// What a refusal means for the row.
fn judged(refusal: Refusal) -> Deletion {
    match refusal.code {
        Code::NotFound | Code::Deleted | Code::VersionConflict | Code::WrongState => Deletion::Elsewhere,
        _ => Deletion::Refused(refusal),
    }
}

/// Some of the rows that refer to a deleted one, as they are by a strong read. The index that names them may be behind.
async fn referring(
    resource: &Resource,
    reference: &ReferenceCount,
    note: &Row,
    most: usize,
    context: &StepContext<'_>,
) -> Result<Vec<Row>, StoreError> {
    let (Some(def), Some(target), true) = (resource.row_def(), note.key().first(), most > 0) else {
        return Ok(Vec::new());
    };
    let tenant: &Tenant = note.tenant();
    let state = def.states().map(|(state, _)| state);
    let live = def.live_states().first().map(|live| Value::from(live.as_ref()));
    let partition = live.into_iter().chain([target.clone()]);
    let query = Query::index(def.table(), &cascade_index(&reference.field), tenant, partition);
    let page = context.store.query(&query.and_then(|query| query.limit(most)).map_err(misuse)?).await?;
    let addresses: Vec<Address> = page.rows.iter().map(Row::address).collect();
    if addresses.is_empty() {
        return Ok(Vec::new());
    }
    let found = context.store.get(&addresses, Consistency::Strong).await?;
    let is_live = |row: &Row| {
        state.is_none_or(|state| def.live_states().iter().any(|live| row.text(state) == Some(live.as_ref())))
    };
    let refers = |row: &Row| row.get(&reference.field) == Some(target) && is_live(row);
    Ok(found.into_iter().flatten().filter(refers).collect())
}
