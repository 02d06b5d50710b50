//! Definitions: what makes jobs by itself, by a cron pattern, in steps, or once.
//!
//! ```text
//!             create                  make, skip (the last due time)
//!   (none) ───────────► ACTIVE ──────────────────────────────► ENDED
//!                       │ ▲ └┐ make, skip                        │
//!                 pause ▼ │ resume                               │
//!                      PAUSED ──── delete ────► DELETED ◄────────┘
//! ```
//!
//! `job_definitions(tenant, definition_id, status, every_ms | cron, zone | at, queue, …, next_time, last_time, last_job_id, revision,
//! made, skipped, due_shard, due_at, version)`. `next_time` is the due time of the next job. It is made `look_ahead` before,
//! at `due_at`, but not before the one ahead of it is due: so at most one job of a definition waits for its time, and who
//! pauses or changes the definition withdraws it in the same plan.
//!
//! - D1. Each due time yields one job. *Guard of make:* `version = the one that was scanned`; the same plan stores the job, whose id
//!   has the due time and the definition's revision in it, and moves `next_time` on.
//! - D2. No due time is lost. *A definition that is active stands in the due index until its job is made.* What was missed is
//!   passed over only if it is past. *Guard of make:* `the last that is passed over <= now`, by the engine's clock; a process
//!   whose own is ahead makes the jobs one by one.
//! - D3. None is made early. *Guard of make:* `due_at <= now`; and the job itself is not claimed before its time.
//! - D4. `overlap = "skip"`: a due time is skipped if and only if the job before it is not over. *A step on that job's row says
//!   which.* Such a definition makes nothing ahead. `overlap = "queue"`: its jobs share an order key.

mod actions;
mod maker;
mod write;

pub(super) use self::actions::actions;
pub(super) use self::maker::JobMaker;
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use futures_util::future::join_all;
use statehouse_store::guard::{Operand, column, is_in, now, now_plus, value};
use statehouse_store::{
    Address, Commit, Consistency, Entry, EventTemplate, Expr, Guard, Plan, PlanError, Query, Reason, Refused,
    RetryPolicy, Row, Step, Store, StoreError, Tenant, Time, Type, Value, commit_known,
};

use super::rules::{JobInput, check_size, field_error};
use super::when::When;
use super::write::document;
use super::{
    ATTEMPTS_LIMIT, ATTEMPTS_MAX, BY_DEFINITION, DEFINITION_ID, EXECUTION_TIME, LIVE, OVER, PAYLOAD, PENDING,
    PRIORITIES_LIMIT, PRIORITY, QUEUE, QUEUE_DEFAULT, SPAN_MS_MAX, STATE, ScheduleSpec, UPDATED_AT,
};
use crate::action::{
    ActionContext, Answer, Call, Code, Expected, Method, PlanParts, Prepare, Prepared, Read, Refusal,
    RefusedStep, RouteKind, Verdict,
};
use crate::declare::{ActionSpec, IndexList, TableSpec};
use crate::form::{Form, Property};
use crate::infra::due::{self, DUE, DUE_AT};
use crate::infra::timer::MissedPolicy;
use crate::inputs::Inputs;
use crate::paging;
use crate::resource::key_text;
use crate::view_source::{RowFilter, SourceRows};
use crate::worker::{NextStep, StepContext, StepProgress, Worker};

/// The states of a definition.
const STATUSES: [&str; 4] = [ACTIVE, PAUSED, ENDED, DELETED];
pub(super) const ACTIVE: &str = "ACTIVE";
pub(super) const PAUSED: &str = "PAUSED";
pub(super) const ENDED: &str = "ENDED";
pub(super) const DELETED: &str = "DELETED";
/// Columns, besides those that its jobs have as well.
const STATUS: &str = "status";
const EVERY_MS: &str = "every_ms";
const CRON: &str = "cron";
const ZONE: &str = "zone";
const AT: &str = "at";
const MISSED: &str = "missed";
const OVERLAP: &str = "overlap";
const NEXT_TIME: &str = "next_time";
const LAST_TIME: &str = "last_time";
pub(super) const LAST_JOB_ID: &str = "last_job_id";
const REVISION: &str = "revision";
const MADE: &str = "made";
const SKIPPED: &str = "skipped";
const BY_STATUS: &str = "by_status";
/// The input of `create` that says when.
const WHEN: &str = "when";
const MISSED_WORDS: [&str; 2] = ["once", "all"];
const OVERLAP_WORDS: [&str; 3] = ["allow", "skip", "queue"];
const EVERY_MS_MIN: i64 = 1_000;
/// Pages of the index that one step reads past definitions that could not be made.
const PAGES_MAX: usize = 8;
const ZONE_DEFAULT: &str = "UTC";

pub(super) fn table(name: &str, shards: u32) -> TableSpec {
    TableSpec::named(format!("{name}_definitions"))
        .partition(DEFINITION_ID, Type::Text)
        .states_in(STATUS, &STATUSES)
        .int(EVERY_MS)
        .null()
        .text(CRON)
        .null()
        .text(ZONE)
        .null()
        .time(AT)
        .null()
        .text(QUEUE)
        .int(PRIORITY)
        .int(ATTEMPTS_MAX)
        .null()
        .json(PAYLOAD)
        .null()
        .text(MISSED)
        .one_of(&MISSED_WORDS)
        .text(OVERLAP)
        .one_of(&OVERLAP_WORDS)
        .time(NEXT_TIME)
        .null()
        .about("the due time of the next job; null unless it is active")
        .time(LAST_TIME)
        .null()
        .about("the due time of the last job")
        .text(LAST_JOB_ID)
        .null()
        .int(REVISION)
        .int(MADE)
        .default(0)
        .int(SKIPPED)
        .default(0)
        .about("due times without a job, because the one before was not over")
        .updated_at()
        .time(DUE_AT)
        .null()
        .about("when the next job is made")
        .deadline(&[""; 0], DUE_AT, shards)
        .index(BY_STATUS, &[STATUS], &[UPDATED_AT])
}

/// When the row of a definition is due, as it says.
fn when_of(row: &Row) -> Result<When, StoreError> {
    if let Some(cron) = row.get_optional_text(CRON)? {
        let zone = row.get_optional_text(ZONE)?.unwrap_or(ZONE_DEFAULT);
        return When::cron(cron, zone).map_err(|(column, why)| row.corrupt(column, &why));
    }
    if let Some(millis) = row.get_optional_int(EVERY_MS)? {
        let millis = u64::try_from(millis).map_err(|_| row.corrupt(EVERY_MS, "is negative"))?;
        return Ok(When::Every(Duration::from_millis(millis)));
    }
    // One of the three says when.
    Ok(When::At(row.get_time(AT)?))
}

/// A definition that is due, as its row says it.
struct DueDefinition<'r> {
    id: &'r str,
    due: Time,
    when: When,
    missed: MissedPolicy,
    overlap: &'r str,
}

impl DueDefinition<'_> {
    fn of(row: &Row) -> Result<DueDefinition<'_>, StoreError> {
        let missed = if row.get_text(MISSED)? == "all" { MissedPolicy::All } else { MissedPolicy::Once };
        Ok(DueDefinition {
            id: row.get_text(DEFINITION_ID)?,
            due: row.get_time(NEXT_TIME)?,
            when: when_of(row)?,
            missed,
            overlap: row.get_text(OVERLAP)?,
        })
    }
}

/// What its jobs are like.
fn wanted(row: &Row, execution_time: Time) -> Result<JobInput, StoreError> {
    let definition_id = row.get_text(DEFINITION_ID)?;
    Ok(JobInput {
        queue: row.get_text(QUEUE)?.to_owned(),
        priority: row.get_int(PRIORITY)?,
        when: Value::Time(execution_time).into(),
        attempts_max: row.get_optional_int(ATTEMPTS_MAX)?,
        payload: row.get_optional_json(PAYLOAD)?.cloned().unwrap_or_default(),
        unique_key: None,
        order_key: (row.get_text(OVERLAP)? == "queue").then(|| format!("definition {definition_id}")),
        made_by: Some((definition_id.to_owned(), execution_time)),
    })
}

impl ScheduleSpec {
    pub(super) fn definition_resource(&self) -> String {
        format!("{}_definition", self.name)
    }

    pub(super) fn maker(&self) -> String {
        format!("{}.make", self.name)
    }

    /// How views follow its definitions.
    pub(super) fn definition_source_rows(&self) -> SourceRows {
        let counts = RowFilter::With(STATUS, &[ACTIVE, PAUSED, ENDED]);
        SourceRows::with_row(&self.definition_resource(), &self.definitions).filtered(counts)
    }

    async fn definition(
        &self,
        store: &dyn Store,
        tenant: &Tenant,
        definition_id: &str,
    ) -> Result<Option<Row>, Refusal> {
        let address = Address::new(&self.definitions, tenant, [definition_id.into()])?;
        Ok(store.get(&[address], Consistency::Strong).await?.into_iter().next().flatten())
    }

    /// Makes a definition due for its next job: ahead of its time, but not before the one ahead of it is due.
    fn ahead(&self, step: Step, tenant: &Tenant, definition_id: &str, next: &NextRuns<'_>) -> Step {
        let NextRuns { time, before, overlap } = *next;
        let Some(time) = time else {
            return due::clear(step.set(NEXT_TIME, Value::Null));
        };
        let ahead = time.minus(self.look_ahead(overlap));
        let at = before.map_or(ahead, |before| before.max(ahead));
        let shard = due::shard_of(tenant, &self.definition_resource(), definition_id, self.shards);
        due::set(step.set(NEXT_TIME, time), shard, at)
    }

    /// Makes a definition due for its first job. What comes in steps counts them by the engine's clock, whatever this process
    /// takes for the time; a pattern has no meaning to an engine, and is read by this one.
    fn begun(
        &self,
        step: Step,
        tenant: &Tenant,
        definition_id: &str,
        when: &When,
        at: Time,
        overlap: &str,
    ) -> Option<Step> {
        if let When::Every(every) = when {
            let shard = due::shard_of(tenant, &self.definition_resource(), definition_id, self.shards);
            let ahead = every.saturating_sub(self.look_ahead(overlap));
            return Some(due::set(step.set(NEXT_TIME, now_plus(*every)), shard, now_plus(ahead)));
        }
        let time = Some(when.first(at)?);
        Some(self.ahead(step, tenant, definition_id, &NextRuns { time, before: None, overlap }))
    }

    /// How long before their times the jobs of a definition are made.
    fn look_ahead(&self, overlap: &str) -> Duration {
        if overlap == "skip" { Duration::ZERO } else { self.look_ahead }
    }

    /// The plan that makes the job of a definition that is due (D1 to D4), for a caller with this clock.
    async fn make(&self, context: &StepContext<'_>, row: &Row, at: Time) -> Result<Plan, String> {
        let corrupt = |error: StoreError| error.to_string();
        let definition = DueDefinition::of(row).map_err(corrupt)?;
        let DueDefinition { id: definition_id, due, when, missed, overlap } = definition;
        let (store, tenant) = (&**context.store, row.tenant());
        let next = when.next(due, at, missed);
        let step = Step::update(&self.definitions, row.key().iter().cloned())
            .guard(Guard::version(row.version()))
            .guard(column(DUE_AT).le(now()))
            .set(UPDATED_AT, now());
        let step = match when.passed(due, at, missed) {
            Some(passed) => step.guard(value(passed).le(now())),
            None => step,
        };
        let step = if next.is_none() { step.set(STATUS, ENDED) } else { step };
        let step =
            self.ahead(step, tenant, definition_id, &NextRuns { time: next, before: Some(due), overlap });
        let said = |refusal: Refusal| format!("{row}: {refusal}");
        let mut steps = Vec::new();
        let mut skips = false;
        if let (Some(before), "skip") = (row.get_optional_text(LAST_JOB_ID).map_err(corrupt)?, overlap) {
            let address =
                Address::new(&self.jobs, tenant, [before.into()]).map_err(|error| error.to_string())?;
            let found = store.get(&[address], Consistency::Strong).await.map_err(corrupt)?;
            let key = || [before.into()];
            steps.push(match found.into_iter().next().flatten() {
                None => Step::assert_absent(&self.jobs, key()),
                Some(job) if LIVE.contains(&job.get_text(STATE).map_err(corrupt)?) => {
                    skips = true;
                    Step::assert(&self.jobs, key()).guard(is_in(STATE, LIVE))
                }
                Some(_) => Step::assert(&self.jobs, key()).guard(is_in(STATE, OVER)),
            });
        }
        let (step, event) = if skips {
            (step.set(SKIPPED, column(SKIPPED).add(1)), "skipped")
        } else {
            let wanted = wanted(row, due).map_err(corrupt)?;
            let revision = row.get_int(REVISION).map_err(corrupt)?;
            let job_id = format!("{definition_id}@{due}.{revision}");
            let place = match &wanted.order_key {
                Some(key) => Some(self.take_ticket(store, context.ids, tenant, key).await.map_err(said)?),
                None => None,
            };
            steps.extend(self.stored(tenant, &job_id, &wanted, place.as_ref()));
            let step = step.set(MADE, column(MADE).add(1)).set(LAST_TIME, due).set(LAST_JOB_ID, job_id);
            (step, "made")
        };
        let resource = self.definition_resource();
        let event = EventTemplate::named(format!("{resource}.{event}"))
            .with(EXECUTION_TIME, Value::Time(due).to_json())
            .with_row_of(0);
        let entry = Entry::about(&resource, key_text(row.key())).event(event);
        let plan =
            Plan::of(tenant, context.ids.next()).step(step).steps(steps).log(entry).without_rows().build();
        plan.map_err(|error| format!("{row}: {error}"))
    }

    /// Takes back the job of a definition that waits for its time, if there is one.
    async fn withdraw(&self, cx: &ActionContext<'_>, row: &Row) -> Result<Vec<Step>, Refusal> {
        let Some(job_id) = row.get_optional_text(LAST_JOB_ID)? else { return Ok(Vec::new()) };
        let address = Address::new(&self.jobs, row.tenant(), [job_id.into()])?;
        let job = cx.store.get(&[address], Consistency::Strong).await?.into_iter().next().flatten();
        match job {
            Some(job)
                if job.get_text(STATE)? == PENDING
                    && job.get_optional_time(EXECUTION_TIME)?.is_some_and(|time| time > cx.clock.now()) =>
            {
                self.cancelled(cx.store, &job, true).await
            }
            _ => Ok(Vec::new()),
        }
    }
}

/// The next due time of a definition, the one ahead of it, and what happens when jobs overlap.
struct NextRuns<'a> {
    time: Option<Time>,
    before: Option<Time>,
    overlap: &'a str,
}
