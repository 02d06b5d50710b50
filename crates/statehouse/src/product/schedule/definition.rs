//! Definitions: what makes jobs by itself, by a cron pattern, in steps, or once.
//!
//! ```text
//!             create                  make (the last due time)
//!   (none) ───────────► ACTIVE ──────────────────────────────► ENDED
//!                       │ ▲ └┐ make                              │
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

use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use futures_util::future::join_all;
use serde_json::{Map, Value as Json};
use statehouse_store::guard::{Operand, column, is_in, now, now_plus, value};
use statehouse_store::{
    Address, Commit, Consistency, Entry, Event, EventTemplate, Expr, Guard, Plan, PlanError, Query, Reason,
    Refused, RetryPolicy, Row, Step, Store, StoreError, Tenant, Time, Type, Value, commit_known,
};

use super::rules::{Wanted, check_size, misfit, time};
use super::when::When;
use super::write::document;
use super::{
    ATTEMPTS_LIMIT, ATTEMPTS_MAX, BY_DEFINITION, DEFINITION_ID, EXECUTION_TIME, LIVE, OVER, PAYLOAD, PENDING,
    PRIORITIES_LIMIT, PRIORITY, QUEUE, QUEUE_DEFAULT, SPAN_MS_MAX, STATE, Schedule, UPDATED_AT,
};
use crate::action::{
    Answer, Call, Code, Desk, Draft, Expected, Method, Pieces, Place as RoutePlace, Read, Refusal, Verdict,
    Write, common_verdict, row_of,
};
use crate::declare::{ActionSpec, IndexList, TableSpec};
use crate::form::{Form, Property};
use crate::infra::due::{self, DUE, DUE_AT};
use crate::infra::timer::Missed;
use crate::paging;
use crate::resource::key_text;
use crate::told::{Counts, Told};
use crate::worker::{Next, Progress, Shift, Wake, Worker};

/// The states of a definition.
const STATUSES: [&str; 4] = [ACTIVE, PAUSED, ENDED, DELETED];
const ACTIVE: &str = "ACTIVE";
const PAUSED: &str = "PAUSED";
const ENDED: &str = "ENDED";
const DELETED: &str = "DELETED";
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
        .deadline(&[], DUE_AT, shards)
        .index(BY_STATUS, &[STATUS], &[UPDATED_AT])
}

/// When the row of a definition is due, as it says.
fn when_of(row: &Row) -> Option<When> {
    if let Some(cron) = row.text(CRON) {
        return When::cron(cron, row.text(ZONE).unwrap_or(ZONE_DEFAULT)).ok();
    }
    let every = row.int(EVERY_MS).and_then(|millis| u64::try_from(millis).ok()).map(Duration::from_millis);
    every.map(When::Every).or_else(|| row.time(AT).map(When::At))
}

fn missed_of(row: &Row) -> Missed {
    if row.text(MISSED) == Some("all") { Missed::All } else { Missed::Once }
}

/// What its jobs are like.
fn wanted(row: &Row, execution_time: Time) -> Wanted {
    let definition_id = row.text(DEFINITION_ID).unwrap_or_default();
    Wanted {
        queue: row.text(QUEUE).unwrap_or(QUEUE_DEFAULT).to_owned(),
        priority: row.int(PRIORITY).unwrap_or(0),
        when: Value::Time(execution_time).into(),
        attempts_max: row.int(ATTEMPTS_MAX),
        payload: row.json(PAYLOAD).cloned().unwrap_or_default(),
        unique_key: None,
        order_key: (row.text(OVERLAP) == Some("queue")).then(|| format!("definition {definition_id}")),
        made_by: Some((definition_id.to_owned(), execution_time)),
    }
}

impl Schedule {
    pub(super) fn definition_resource(&self) -> String {
        format!("{}_definition", self.name)
    }

    pub(super) fn maker(&self) -> String {
        format!("{}.make", self.name)
    }

    /// How views follow its definitions.
    pub(super) fn definitions_told(&self) -> Told {
        let counts = Counts::With(STATUS, &[ACTIVE, PAUSED, ENDED]);
        Told::with_row(&self.definition_resource(), &self.definitions).counting(counts)
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
    fn ahead(&self, step: Step, tenant: &Tenant, definition_id: &str, next: &Coming<'_>) -> Step {
        let Coming { time, before, overlap } = *next;
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
        Some(self.ahead(step, tenant, definition_id, &Coming { time, before: None, overlap }))
    }

    /// How long before their times the jobs of a definition are made.
    fn look_ahead(&self, overlap: &str) -> Duration {
        if overlap == "skip" { Duration::ZERO } else { self.look_ahead }
    }

    /// The plan that makes the job of a definition that is due (D1 to D4), for somebody who takes this for the time.
    async fn make(&self, shift: &Shift<'_>, row: &Row, at: Time) -> Result<Plan, String> {
        let (Some(due), Some(when)) = (row.time(NEXT_TIME), when_of(row)) else {
            return Err(format!("{row} does not say when it is due"));
        };
        let store = &**shift.store;
        let tenant = row.tenant();
        let definition_id = row.text(DEFINITION_ID).unwrap_or_default();
        let overlap = row.text(OVERLAP).unwrap_or_default();
        let next = when.next(due, at, missed_of(row));
        let step = Step::update(&self.definitions, row.key().iter().cloned())
            .guard(Guard::version(row.version()))
            .guard(column(DUE_AT).le(now()))
            .set(UPDATED_AT, now());
        let step = match when.passed(due, at, missed_of(row)) {
            Some(passed) => step.guard(value(passed).le(now())),
            None => step,
        };
        let step = if next.is_none() { step.set(STATUS, ENDED) } else { step };
        let step =
            self.ahead(step, tenant, definition_id, &Coming { time: next, before: Some(due), overlap });
        let said = |refusal: Refusal| format!("{row}: {refusal}");
        let mut steps = Vec::new();
        let mut skips = false;
        if let (Some(before), "skip") = (row.text(LAST_JOB_ID), overlap) {
            let address =
                Address::new(&self.jobs, tenant, [before.into()]).map_err(|error| error.to_string())?;
            let found =
                store.get(&[address], Consistency::Strong).await.map_err(|error| error.to_string())?;
            let key = || [before.into()];
            steps.push(match found.into_iter().next().flatten() {
                None => Step::assert_absent(&self.jobs, key()),
                Some(job) if job.text(STATE).is_some_and(|state| LIVE.contains(&state)) => {
                    skips = true;
                    Step::assert(&self.jobs, key()).guard(is_in(STATE, LIVE))
                }
                Some(_) => Step::assert(&self.jobs, key()).guard(is_in(STATE, OVER)),
            });
        }
        let (step, event) = if skips {
            (step.set(SKIPPED, column(SKIPPED).add(1)), "skipped")
        } else {
            let wanted = wanted(row, due);
            let revision = row.int(REVISION).unwrap_or(0);
            let job_id = format!("{definition_id}@{due}.{revision}");
            let place = match &wanted.order_key {
                Some(key) => Some(self.number(store, shift.ids, tenant, key).await.map_err(said)?),
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
            Plan::of(tenant, shift.ids.next()).step(step).steps(steps).log(entry).without_rows().build();
        plan.map_err(|error| format!("{row}: {error}"))
    }

    /// Takes back the job of a definition that waits for its time, if there is one.
    async fn withdraw(&self, desk: &Desk<'_>, row: &Row) -> Result<Vec<Step>, Refusal> {
        let Some(job_id) = row.text(LAST_JOB_ID) else { return Ok(Vec::new()) };
        let address = Address::new(&self.jobs, row.tenant(), [job_id.into()])?;
        let job = desk.store.get(&[address], Consistency::Strong).await?.into_iter().next().flatten();
        match job {
            Some(job)
                if job.text(STATE) == Some(PENDING)
                    && job.time(EXECUTION_TIME).is_some_and(|time| time > desk.clock.now()) =>
            {
                self.cancelled(desk.store, &job, true).await
            }
            _ => Ok(Vec::new()),
        }
    }
}

/// The next due time of a definition, the one ahead of it, and what happens when jobs overlap.
struct Coming<'a> {
    time: Option<Time>,
    before: Option<Time>,
    overlap: &'a str,
}

/// The worker that makes the jobs of definitions.
#[derive(Debug)]
pub(super) struct Maker {
    pub name: String,
    pub schedule: Arc<Schedule>,
}

#[async_trait]
impl Worker for Maker {
    fn name(&self) -> &str {
        &self.name
    }

    fn shards(&self) -> u32 {
        self.schedule.shards
    }

    async fn step(&self, shift: &Shift<'_>, limit: usize) -> Result<Progress, StoreError> {
        let misuse = |error: PlanError| StoreError::schema(self.name.as_str(), error.to_string());
        let schedule = &self.schedule;
        let mut query = Query::all_tenants(&schedule.definitions, DUE, [i64::from(shift.shard).into()])
            .and_then(|query| query.limit(limit))
            .map_err(misuse)?;
        let mut progress = Progress::idle();
        for _ in 0..PAGES_MAX {
            let page = shift.store.query(&query).await?;
            let at = shift.clock.now();
            let due: Vec<&Row> =
                page.rows.iter().take_while(|row| row.time(DUE_AT).is_some_and(|due| due <= at)).collect();
            let oldest = due.first().and_then(|row| row.time(DUE_AT));
            progress.lag = progress.lag.max(oldest.map_or(Duration::ZERO, |due| at.since(due)));
            for outcome in join_all(due.iter().map(|row| self.make(shift, row))).await {
                match outcome {
                    Ok(made) => progress.rows += usize::from(made),
                    Err(why) => progress.failures.push(why),
                }
            }
            if progress.rows > 0 {
                schedule.tell();
                // What was made may be due again: a definition catches up on what it missed.
                progress.next = Next::Now;
                return Ok(progress);
            }
            if let Some(later) = page.rows.get(due.len()).and_then(|row| row.time(DUE_AT)) {
                progress.next = Next::At(later);
                return Ok(progress);
            }
            // Those that cannot be made do not hold up the others.
            match page.next {
                Some(next) => query = query.after(next).map_err(misuse)?,
                None => return Ok(progress),
            }
        }
        Ok(progress)
    }
}

impl Maker {
    /// Makes the job of one definition, unless somebody was faster or changed it.
    async fn make(&self, shift: &Shift<'_>, row: &Row) -> Result<bool, String> {
        let store = &**shift.store;
        let mut plan = self.schedule.make(shift, row, shift.clock.now()).await?;
        let mut outcome = commit_known(store, &plan, RetryPolicy::WORKER).await;
        if let (Ok(Commit::Refused(refused)), Some(due)) = (&outcome, row.time(NEXT_TIME))
            && due::is_only_early(refused, row.version())
        {
            // By the engine's clock not all is over that would be passed over. The time that is due has its job all the same.
            plan = self.schedule.make(shift, row, due).await?;
            outcome = commit_known(store, &plan, RetryPolicy::WORKER).await;
        }
        match outcome {
            Ok(Commit::Applied(_)) => Ok(true),
            Ok(Commit::Refused(Refused { step, reason: Reason::Present, .. })) => {
                match plan.addresses().nth(step) {
                    // Somebody else made the lane of its order key, or took its place there; the next look finds it.
                    Some(lane) if self.schedule.is_of_lanes(lane.table()) => Ok(false),
                    taken => Err(format!(
                        "{row}: {} exists already",
                        taken.map_or_else(String::new, |address| address.to_string())
                    )),
                }
            }
            Ok(Commit::Refused(_) | Commit::Fenced) => Ok(false),
            Err(error) => Err(error.to_string()),
        }
    }
}

/// What is done with a definition.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Verb {
    Create,
    Pause,
    Resume,
    Delete,
    Run,
}

/// The columns that say when.
type Columns = [(&'static str, Value); 4];

struct Writer {
    schedule: Arc<Schedule>,
    verb: Verb,
}

impl Writer {
    fn missing(&self, definition_id: &str) -> Refusal {
        let resource = self.schedule.definition_resource();
        Refusal::new(Code::NotFound, format!("{resource} {definition_id} does not exist"))
    }

    /// Reads what `create` says about the time.
    fn when(input: &Map<String, Json>) -> Result<(When, Columns), Refusal> {
        let empty = Map::new();
        let said = input.get(WHEN).and_then(Json::as_object).unwrap_or(&empty);
        let text = |name: &str| said.get(name).and_then(Json::as_str);
        let every = said.get(EVERY_MS).and_then(Json::as_i64);
        let at = time(said, AT)?;
        let (when, zone) = match (text(CRON), every, at) {
            (Some(cron), None, None) => {
                let zone = text(ZONE).unwrap_or(ZONE_DEFAULT);
                let when =
                    When::cron(cron, zone).map_err(|(name, why)| misfit(&format!("{WHEN}/{name}"), &why))?;
                (when, Some(zone))
            }
            (None, Some(every), None) => {
                (When::Every(Duration::from_millis(u64::try_from(every).unwrap_or(0))), None)
            }
            (None, None, Some(at)) => (When::At(at), None),
            _ => return Err(misfit(WHEN, "say one of cron (and zone), every_ms and at")),
        };
        let columns = [
            (CRON, text(CRON).map_or(Value::Null, Value::from)),
            (ZONE, zone.map_or(Value::Null, Value::from)),
            (EVERY_MS, every.map_or(Value::Null, Value::from)),
            (AT, at.map_or(Value::Null, Value::from)),
        ];
        Ok((when, columns))
    }

    async fn create(&self, call: &Call, desk: &Desk<'_>, definition_id: &str) -> Result<Draft, Refusal> {
        let schedule = &self.schedule;
        let input = &call.input;
        let text = |name: &str| input.get(name).and_then(Json::as_str);
        let (when, columns) = Writer::when(input)?;
        let priority = input.get(PRIORITY).and_then(Json::as_i64).unwrap_or(0);
        if priority >= schedule.priorities {
            return Err(misfit(PRIORITY, &format!("there are {} priorities", schedule.priorities)));
        }
        let payload = input.get(PAYLOAD).cloned().unwrap_or_default();
        check_size(PAYLOAD, &payload)?;
        let overlap = text(OVERLAP).unwrap_or("allow");
        let before = schedule.definition(desk.store, &call.tenant, definition_id).await?;
        let key = [definition_id.into()];
        let mut step = match &before {
            Some(row) => Step::update(&schedule.definitions, key).guard(Guard::version(row.version())),
            None if call.expected.is_some() => return Err(self.missing(definition_id)),
            None => Step::insert(&schedule.definitions, key),
        };
        if let (Some(Expected::Version(expected)), Some(row)) = (call.expected, &before)
            && row.version() != expected
        {
            return Err(self.conflict(row));
        }
        for (name, value) in columns {
            step = step.set(name, value);
        }
        let attempts = input.get(ATTEMPTS_MAX).and_then(Json::as_i64).map_or(Value::Null, Value::from);
        let step = step
            .set(STATUS, ACTIVE)
            .set(QUEUE, text(QUEUE).unwrap_or(QUEUE_DEFAULT))
            .set(PRIORITY, priority)
            .set(ATTEMPTS_MAX, attempts)
            .set(PAYLOAD, document(&payload))
            .set(MISSED, text(MISSED).unwrap_or("once"))
            .set(OVERLAP, overlap)
            .set(REVISION, Expr::Add(Operand::Coalesce(REVISION.to_owned(), 0.into()), value(1)))
            .set(UPDATED_AT, now());
        let at = desk.clock.now();
        let Some(step) = schedule.begun(step, &call.tenant, definition_id, &when, at, overlap) else {
            return Err(misfit(&format!("{WHEN}/{CRON}"), "it is never due"));
        };
        let mut steps = vec![step];
        if let Some(row) = &before {
            steps.extend(schedule.withdraw(desk, row).await?);
        }
        Ok(self.pieces(definition_id, steps, "created"))
    }

    async fn change(&self, call: &Call, desk: &Desk<'_>, definition_id: &str) -> Result<Draft, Refusal> {
        let schedule = &self.schedule;
        let row = schedule.definition(desk.store, &call.tenant, definition_id).await?;
        let row = row.filter(|row| row.text(STATUS) != Some(DELETED));
        let row = row.ok_or_else(|| self.missing(definition_id))?;
        if let Some(Expected::Version(expected)) = call.expected
            && row.version() != expected
        {
            return Err(self.conflict(&row));
        }
        if self.verb == Verb::Run {
            let at = desk.clock.now();
            let job_id = format!("{definition_id}@run-{}", desk.ids.next());
            let wanted = Wanted { when: now().into(), ..wanted(&row, at) };
            let place = match &wanted.order_key {
                Some(key) => Some(schedule.number(desk.store, desk.ids, &call.tenant, key).await?),
                None => None,
            };
            let mut steps = schedule.stored(&call.tenant, &job_id, &wanted, place.as_ref());
            let there = Step::assert(&schedule.definitions, [definition_id.into()]);
            steps.push(there.guard(Guard::version(row.version())));
            let event = EventTemplate::named(format!("{}.enqueued", schedule.name)).with_row_of(0);
            let subject = key_text([&Value::from(job_id)]);
            return Ok(Draft::Write(Pieces { subject, steps, event }));
        }
        let status = row.text(STATUS).unwrap_or_default();
        let step = Step::update(&schedule.definitions, [definition_id.into()])
            .guard(Guard::version(row.version()))
            .set(REVISION, column(REVISION).add(1))
            .set(UPDATED_AT, now());
        let wrong = || {
            let message = format!("{} {definition_id} is {status}", schedule.definition_resource());
            Err(Refusal::new(Code::WrongState, message).at_version(Some(&row)))
        };
        let (step, what) = match (self.verb, status) {
            (Verb::Pause, ACTIVE) => {
                (due::clear(step.set(STATUS, PAUSED).set(NEXT_TIME, Value::Null)), "paused")
            }
            (Verb::Resume, PAUSED) => {
                let (at, overlap) = (desk.clock.now(), row.text(OVERLAP).unwrap_or_default());
                // One that was for a time that has passed is due at once; what recurs goes on from now.
                let step = step.set(STATUS, ACTIVE);
                let begun = when_of(&row).and_then(|when| {
                    schedule.begun(step.clone(), &call.tenant, definition_id, &when, at, overlap)
                });
                (begun.unwrap_or_else(|| due::clear(step.set(NEXT_TIME, Value::Null))), "resumed")
            }
            (Verb::Delete, _) => {
                (due::clear(step.set(STATUS, DELETED).set(NEXT_TIME, Value::Null)), "deleted")
            }
            _ => return wrong(),
        };
        let mut steps = vec![step];
        steps.extend(schedule.withdraw(desk, &row).await?);
        Ok(self.pieces(definition_id, steps, what))
    }

    fn pieces(&self, definition_id: &str, steps: Vec<Step>, what: &str) -> Draft {
        let event =
            EventTemplate::named(format!("{}.{what}", self.schedule.definition_resource())).with_row_of(0);
        Draft::Write(Pieces { subject: key_text([&Value::from(definition_id)]), steps, event })
    }

    fn conflict(&self, row: &Row) -> Refusal {
        let message = format!(
            "{} {} is at version {}: read it again and decide anew",
            self.schedule.definition_resource(),
            row.text(DEFINITION_ID).unwrap_or_default(),
            row.version()
        );
        Refusal::new(Code::VersionConflict, message).at_version(Some(row))
    }
}

#[async_trait]
impl Write for Writer {
    async fn draft(&self, call: &Call, desk: &Desk<'_>) -> Result<Draft, Refusal> {
        let definition_id = call.key.first().and_then(Value::as_text).unwrap_or_default();
        match self.verb {
            Verb::Create => self.create(call, desk, definition_id).await,
            _ => self.change(call, desk, definition_id).await,
        }
    }

    fn refusal(&self, _: &Call, refused: &Refused) -> Verdict {
        match &refused.reason {
            // Somebody changed the definition, or a job of it, since it was read.
            Reason::Guard { .. } | Reason::Present | Reason::Absent => Verdict::TryAgain,
            _ => common_verdict(&format!("this {}", self.schedule.definition_resource()), refused),
        }
    }

    fn answer(&self, _: &Call, event: &mut Event) -> Answer {
        let def = match self.verb {
            Verb::Run => &self.schedule.jobs_def,
            _ => &self.schedule.definitions_def,
        };
        Answer::row(def.visible(row_of(event)))
    }

    fn wakes(&self, _: &Call, event: &Event) -> Vec<Wake> {
        self.schedule.tell();
        if self.verb == Verb::Run {
            return Vec::new();
        }
        due::wake(&self.schedule.maker(), event).into_iter().collect()
    }
}

/// What is read of definitions.
#[derive(Clone, Copy, Debug)]
enum Reading {
    One,
    History,
}

struct Reader {
    schedule: Arc<Schedule>,
    what: Reading,
}

#[async_trait]
impl Read for Reader {
    async fn read(&self, call: &Call, desk: &Desk<'_>) -> Result<Arc<Answer>, Refusal> {
        let schedule = &self.schedule;
        let definition_id = call.key.first().and_then(Value::as_text).unwrap_or_default();
        let query = match self.what {
            Reading::One => {
                let row = schedule.definition(desk.store, &call.tenant, definition_id).await?;
                let row = row.filter(|row| row.text(STATUS) != Some(DELETED)).ok_or_else(|| {
                    let resource = schedule.definition_resource();
                    Refusal::new(Code::NotFound, format!("{resource} {definition_id} does not exist"))
                })?;
                return Ok(Arc::new(Answer::row(schedule.definitions_def.row_json(&row))));
            }
            Reading::History => {
                Query::index(&schedule.jobs, BY_DEFINITION, &call.tenant, [definition_id.into()])?
            }
        };
        let page = desk.store.query(&paging::page_of(query.backward(), call)?).await?;
        let rows = page.rows.iter().map(|row| schedule.jobs_def.row_json(row));
        Ok(Arc::new(paging::answer(rows, page.next)))
    }
}

pub(super) fn actions(schedule: &Arc<Schedule>) -> [ActionSpec; 8] {
    let job = &schedule.name;
    let read = |what: Reading| Reader { schedule: schedule.clone(), what };
    let write = |action: ActionSpec, verb: Verb| {
        action
            .code(Code::VersionConflict)
            .after(["create"])
            .writes(Writer { schedule: schedule.clone(), verb })
    };
    let status = Property::optional(STATUS, Form::one_of(&STATUSES), "which of them; ACTIVE if not given");
    let transition = |name: &'static str, summary: String| ActionSpec::transition(name, summary);
    [
        write(
            ActionSpec::put("create", format!("Define when {job} rows are made, or define it anew.")),
            Verb::Create,
        )
        .shape("create target")
        .mechanism("insert/create")
        .takes(create_form())
        .codes(&[Code::NotFound, Code::VersionConflict])
        .answers(&["due item never materialized"])
        .after([]),
        write(
            transition("pause", format!("Make no {job} rows, and take back the one that waits.")),
            Verb::Pause,
        ),
        write(transition("resume", format!("Make {job} rows again, from now on.")), Verb::Resume)
            .after(["create", "pause"]),
        write(ActionSpec::delete("delete", format!("Make no {job} rows any more.")), Verb::Delete),
        write(transition("run", format!("Make a {job} now, besides those that are due.")), Verb::Run)
            .shape("create target")
            .mechanism("materialize claimable run")
            .gives(schedule.jobs_def.row_form()),
        ActionSpec::read("read", "Read a definition.").after(["create"]).reads(read(Reading::One)),
        ActionSpec::list("list", "List definitions by status, newest first.")
            .mechanism("range read on the status and time index")
            .after(["create"])
            .reads_index(IndexList::newest_first(&schedule.definitions_def).by_or(BY_STATUS, status, ACTIVE)),
        ActionSpec::list(
            "history",
            format!("List the {job} rows of a definition, by their due times, newest first."),
        )
        .on(Method::Get, RoutePlace::ItemAction)
        .shape("read projection")
        .mechanism("range read on the definition and time index")
        .gives_rows(schedule.jobs_def.row_form())
        .after(["create"])
        .reads(read(Reading::History)),
    ]
}

fn create_form() -> Vec<Property> {
    let text = || Form::Value(Type::Text);
    let when = Form::Object(vec![
        Property::optional(
            EVERY_MS,
            Form::Range(EVERY_MS_MIN, SPAN_MS_MAX),
            "in which steps, the first one from now",
        ),
        Property::optional(CRON, text(), "a pattern of five fields, or of six with seconds in front"),
        Property::optional(ZONE, text(), "by which wall clock: Europe/Berlin; UTC if not given"),
        Property::optional(AT, Form::Value(Type::Time), "once, at this time"),
    ]);
    vec![
        Property::required(WHEN, when, "one of every_ms, cron (and zone), and at"),
        Property::optional(QUEUE, text(), "`default` if not given"),
        Property::optional(PAYLOAD, Form::Any, "what the worker gets").or_null(),
        Property::optional(PRIORITY, Form::Range(0, i64::from(PRIORITIES_LIMIT) - 1), "0 comes first"),
        Property::optional(
            ATTEMPTS_MAX,
            Form::Range(1, i64::from(ATTEMPTS_LIMIT)),
            "how often each is tried",
        ),
        Property::optional(
            MISSED,
            Form::one_of(&MISSED_WORDS),
            "due times that passed while nobody looked: made as one, or each",
        ),
        Property::optional(
            OVERLAP,
            Form::one_of(&OVERLAP_WORDS),
            "when the one before is not over: made, skipped, or in line behind it",
        ),
    ]
}
