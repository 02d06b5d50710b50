//! Scans of the house itself: a task is done for every row of a table, whichever tenant has it, in ranges that workers of any process
//! claim. It is used where rows that exist have to be brought up to a new declaration.
//!
//! ```text
//!  a run:    start           last range is done
//!   (none) ────────► RUNNING ──────────────────► DONE ─── remove ──► (none)
//!                     │ ▲ │                                 ▲
//!               pause │ │ └───────── stop ───────► STOPPED ─┘
//!                     ▼ │ resume                      ▲
//!                    PAUSED ────────── stop ──────────┘
//!
//!  a range:        claim               no rows are left
//!   READY ───────────────► CLAIMED ───────────────────────► DONE
//!                           │ ▲ └── open a page, apply it in each tenant, close it ──┐
//!                           └─┘ claim, when the lease has expired ◄──────────────────┘
//! ```
//!
//! **Rows.** `house_scans(tenant, run, part, …)`. Of the system tenant: part 0 is the run, and the others are its ranges, with the
//! segment of the table, the cursor in it, and the page that is open. Of any other tenant: the number of the last page of the range
//! that was applied to rows of this tenant.
//!
//! A plan has one tenant, so a page that has rows of several tenants is applied by several plans. The keys of the page are stored
//! first, under the next page number; then each tenant's plan is committed together with that number; then the cursor moves.
//!
//! **Invariants.**
//! - H1. The effects of a page are applied once to each tenant's rows. *The plan with the effects raises the tenant's page number;
//!   guard:* `page < this page`. So a page that was open when a worker died is applied again without harm, and a worker that
//!   lost its range is too late.
//! - H2. A page is what it was when it was opened. *Its keys are stored in the range; a row that was deleted since is left out, and
//!   one that was inserted since is not part of it.*
//! - H3. A range moves only from where the worker has read it. *Guard of each write of a range:* `version = the one that was read`.
//! - H4. A claim ends. *Guard of a claim of another worker's range:* `expires_at <= now`, by the engine's clock. Each write of the
//!   holder extends it.
//! - H5. No range is claimed, opened or finished while the run is not `RUNNING`. *Assertion on the run in each of these plans.* A page
//!   that is open is applied to its end.
//! - H6. The segments tile the table. *They are inserted in one plan with the run.*

mod pages;

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use futures_util::future::join_all;
use serde_json::Value as Json;
use statehouse_store::guard::{is_in, now};
use statehouse_store::{
    Clock, Commit, Entry, Ids, Plan, PlanError, Query, RetryPolicy, Row, Scan, SchemaError, Segment, Step,
    Store, StoreError, Table, Tenant, Type, Value, commit_known,
};

use super::{
    AT_BEGIN, CLAIMED, CURSOR, DONE, EXPIRES_AT, HOLDER, LAST_ROWS, PAUSED, RATE, READY, ROWS, RUNNING,
};
use super::{SEGMENT, STATE};
use crate::system;

/// The table.
pub const SCANS: &str = "house_scans";
const RUN: &str = "run";
const PART: &str = "part";
const OF: &str = "of_table";
const STARTED_AT: &str = "started_at";
const ADVANCED_AT: &str = "advanced_at";
const PAGE: &str = "page";
const PAGE_KEYS: &str = "page_keys";
const PAGE_END: &str = "page_end";
const PROBLEMS: &str = "problems";
const STOPPED: &str = "STOPPED";
/// How many problems a range keeps.
const PROBLEMS_MAX: usize = 11;
/// The part that is the run itself.
const HEAD: i64 = 0;
/// The most ranges of a run, so that one plan inserts them all.
const RANGES_MAX: usize = 90;
/// How often the effects of a page are computed while its rows are written by others.
const TRIES: u32 = 20;
/// How long a worker waits for ranges that others have, and for a run that is paused.
const PAUSE: Duration = Duration::from_millis(200);

/// The declaration of the table.
pub fn scans_table() -> Result<Arc<Table>, SchemaError> {
    Table::named(SCANS)
        .partition(RUN, Type::Text)
        .sort(PART, Type::Int)
        .optional(STATE, Type::Text)
        .optional(OF, Type::Text)
        .optional(RATE, Type::Int)
        .optional(STARTED_AT, Type::Time)
        .optional(SEGMENT, Type::Text)
        .optional(CURSOR, Type::Text)
        .optional(PAGE, Type::Int)
        .optional(PAGE_KEYS, Type::Json)
        .optional(PAGE_END, Type::Text)
        .optional(ROWS, Type::Int)
        .optional(LAST_ROWS, Type::Int)
        .optional(HOLDER, Type::Text)
        .optional(EXPIRES_AT, Type::Time)
        .optional(ADVANCED_AT, Type::Time)
        .optional(PROBLEMS, Type::Json)
        .build()
}

/// What is done for each row of a table.
#[async_trait]
pub trait ScanTask: Send + Sync + fmt::Debug {
    /// The table.
    fn table(&self) -> &Arc<Table>;

    /// The most rows whose effects fit into one plan, beside one step of the runner.
    fn page_rows(&self) -> usize;

    /// What is to be done for rows of one tenant. It is asked again if a step is refused, so it reads what its guards rest on.
    async fn effects(&self, store: &dyn Store, rows: &[Row]) -> Result<RowEffects, StoreError>;
}

/// The part of a plan that a task wants for some rows of one tenant. Rows of events are numbered from 1: the first step of the plan
/// is the runner's.
#[derive(Clone, Debug, Default)]
pub struct RowEffects {
    /// The steps; with none the rows need nothing.
    pub steps: Vec<Step>,
    /// The log entry, if there is one.
    pub entry: Option<Entry>,
    /// Rows that the task cannot be done for, and why. The run goes on, and keeps some of them.
    pub problems: Vec<String>,
}

/// How a run is begun.
#[derive(Clone, Copy, Debug)]
pub struct RunSettings {
    /// The most ranges: how many workers can work at once.
    pub ranges: usize,
    /// Rows per second that each range may advance over; `None` for no limit.
    pub rate: Option<i64>,
}

/// What a worker did in one step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RunStep {
    /// It claimed a range, opened a page, or finished with so many rows.
    Worked(usize),
    /// Other workers have the ranges that are left, or the run is throttled or paused: come again after this time.
    Waiting(Duration),
    /// All ranges are done.
    Done,
    /// It was stopped, or there is no such run.
    Stopped,
}

/// How far a run is.
#[derive(Clone, Debug, PartialEq)]
pub struct RunProgress {
    /// The run.
    pub run: String,
    /// The table that is scanned.
    pub table: String,
    /// `RUNNING`, `PAUSED`, `DONE` or `STOPPED`.
    pub state: String,
    /// Ranges in all.
    pub ranges: usize,
    /// Ranges that are done.
    pub done: usize,
    /// Rows that were processed.
    pub rows: i64,
    /// How long it has run.
    pub elapsed: Duration,
    /// Rows that the task could not be done for: of each range the first ones.
    pub problems: Vec<String>,
}

impl RunProgress {
    /// Whether all ranges are done.
    pub fn is_done(&self) -> bool {
        self.state == DONE
    }
}

impl fmt::Display for RunProgress {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let RunProgress { run, rows, done, ranges, elapsed, .. } = self;
        write!(f, "{run}: {rows} rows, {done} of {ranges} ranges, {:.1} s", elapsed.as_secs_f64())
    }
}

/// Begins runs and works on them.
#[derive(Clone, Debug)]
pub struct ScanRunner {
    store: Arc<dyn Store>,
    clock: Arc<dyn Clock>,
    ids: Ids,
    table: Arc<Table>,
    house: Tenant,
    lease: Duration,
}

#[expect(clippy::needless_pass_by_value, reason = "it is what `map_err` gives")]
fn misuse(error: PlanError) -> StoreError {
    StoreError::schema(SCANS, error.to_string())
}

impl ScanRunner {
    /// A runner over a store that has the tables of the house.
    pub fn of(store: Arc<dyn Store>, clock: Arc<dyn Clock>, ids: Ids) -> Result<ScanRunner, StoreError> {
        let table = scans_table().map_err(|error| StoreError::schema(error.table, error.why))?;
        let house = system::tenant().ok_or_else(|| StoreError::schema(SCANS, "the house has no tenant"))?;
        Ok(ScanRunner { store, clock, ids, table, house, lease: Duration::from_secs(30) })
    }

    /// The same with claims that end after this time.
    #[must_use]
    pub fn with_lease(self, lease: Duration) -> ScanRunner {
        ScanRunner { lease, ..self }
    }

    /// Begins a run, unless it has begun: then it goes on as it is (H6).
    pub async fn start(
        &self,
        run: &str,
        task: &dyn ScanTask,
        settings: RunSettings,
    ) -> Result<(), StoreError> {
        if let Some(head) = self.parts(run).await?.first() {
            let (of, table) = (head.get_text(OF)?, task.table().name());
            if of != table {
                let why = format!("the run {run} scans the table {of} and not {table}");
                return Err(StoreError::schema(SCANS, why));
            }
            return Ok(());
        }
        let most = settings.ranges.clamp(1, RANGES_MAX);
        let segments = self.store.segments(&Scan::all(task.table()), most).await?;
        let head = Step::insert(&self.table, [run.into(), HEAD.into()])
            .set(STATE, RUNNING)
            .set(OF, task.table().name())
            .set(RATE, settings.rate.map_or(Value::Null, Value::Int))
            .set(STARTED_AT, now());
        let range = |(part, segment): (i64, &Segment)| {
            Step::insert(&self.table, [run.into(), part.into()])
                .set(STATE, READY)
                .set(SEGMENT, segment.to_string())
                .set(CURSOR, AT_BEGIN)
                .set(PAGE, 0)
                .set(ROWS, 0)
                .set(LAST_ROWS, 0)
                .set(ADVANCED_AT, now())
        };
        let steps = std::iter::once(head).chain((HEAD + 1..).zip(&segments).map(range));
        // If it is refused, another process has begun it.
        self.commit(&self.house, steps).await.map(drop)
    }

    /// Lets no range advance until [`ScanRunner::resume`].
    pub async fn pause(&self, run: &str) -> Result<bool, StoreError> {
        self.turn(run, &[RUNNING], PAUSED).await
    }

    /// Lets ranges advance again.
    pub async fn resume(&self, run: &str) -> Result<bool, StoreError> {
        self.turn(run, &[PAUSED], RUNNING).await
    }

    /// Ends a run. Effects that were applied stay.
    pub async fn stop(&self, run: &str) -> Result<bool, StoreError> {
        self.turn(run, &[RUNNING, PAUSED], STOPPED).await
    }

    /// Sets how fast each range may advance.
    pub async fn throttle(&self, run: &str, rate: Option<i64>) -> Result<bool, StoreError> {
        let step = Step::update(&self.table, [run.into(), HEAD.into()]);
        self.applied([step.set(RATE, rate.map_or(Value::Null, Value::Int))]).await
    }

    /// How far a run is; `None` if there is none.
    pub async fn progress(&self, run: &str) -> Result<Option<RunProgress>, StoreError> {
        let parts = self.parts(run).await?;
        let Some((head, ranges)) = parts.split_first() else { return Ok(None) };
        let (mut rows, mut problems) = (0, Vec::new());
        for range in ranges {
            rows += range.get_int(ROWS)?;
            problems.extend(problems_of(range));
        }
        Ok(Some(RunProgress {
            run: run.to_owned(),
            table: head.get_text(OF)?.to_owned(),
            state: head.get_text(STATE)?.to_owned(),
            ranges: ranges.len(),
            done: ranges.iter().filter(|range| range.text(STATE) == Some(DONE)).count(),
            rows,
            elapsed: self.clock.now().since(head.get_time(STARTED_AT)?),
            problems,
        }))
    }

    /// Works on a run with so many workers until it is done or stopped, and tells how far it is from time to time.
    pub async fn drive(
        &self,
        run: &str,
        task: &dyn ScanTask,
        workers: usize,
        tell: &(dyn Fn(&RunProgress) + Send + Sync),
    ) -> Result<(), StoreError> {
        let work = async |number: usize| -> Result<(), StoreError> {
            let holder = self.ids.next();
            let mut told_at = self.clock.uptime();
            loop {
                match self.step(run, task, &holder).await? {
                    RunStep::Worked(_) => {}
                    RunStep::Waiting(pause) => self.clock.sleep(pause).await,
                    RunStep::Done | RunStep::Stopped => return Ok(()),
                }
                if number == 0 && self.clock.uptime().saturating_sub(told_at) >= Duration::from_secs(1) {
                    told_at = self.clock.uptime();
                    self.progress(run).await?.iter().for_each(tell);
                }
            }
        };
        let results = join_all((0..workers.max(1)).map(work)).await;
        results.into_iter().collect::<Result<Vec<()>, StoreError>>()?;
        self.progress(run).await?.iter().for_each(tell);
        Ok(())
    }

    /// Removes everything that is stored of a run which is over.
    pub async fn remove(&self, run: &str) -> Result<(), StoreError> {
        let mut scan = Scan::all(&self.table);
        let mut head = None;
        loop {
            let page = self.store.scan(&scan).await?;
            for row in page.rows.iter().filter(|row| row.text(RUN) == Some(run)) {
                let step = Step::remove(&self.table, row.key().iter().cloned());
                match row.tenant() == &self.house && row.int(PART) == Some(HEAD) {
                    // The last one, so that what was interrupted can be seen.
                    true => head = Some(step),
                    false => drop(self.commit(row.tenant(), [step]).await?),
                }
            }
            let Some(next) = page.next else { break };
            scan = scan.after(next).map_err(misuse)?;
        }
        if let Some(head) = head {
            self.commit(&self.house, [head]).await?;
        }
        Ok(())
    }

    /// The run and its ranges, by a strong read, in the order of their numbers.
    async fn parts(&self, run: &str) -> Result<Vec<Row>, StoreError> {
        let mut query = Query::table(&self.table, &self.house, [run.into()]).map_err(misuse)?;
        let mut rows = Vec::new();
        loop {
            let page = self.store.query(&query).await?;
            rows.extend(page.rows);
            let Some(next) = page.next else { return Ok(rows) };
            query = query.after(next).map_err(misuse)?;
        }
    }

    async fn turn(&self, run: &str, from: &[&str], to: &str) -> Result<bool, StoreError> {
        let states = from.iter().map(|state| Value::from(*state));
        let step = Step::update(&self.table, [run.into(), HEAD.into()]).guard(is_in(STATE, states));
        self.applied([step.set(STATE, to)]).await
    }

    /// Commits steps of the house. Returns whether they were applied.
    async fn applied(&self, steps: impl IntoIterator<Item = Step>) -> Result<bool, StoreError> {
        Ok(matches!(self.commit(&self.house, steps).await?, Commit::Applied(_)))
    }

    async fn commit(
        &self,
        tenant: &Tenant,
        steps: impl IntoIterator<Item = Step>,
    ) -> Result<Commit, StoreError> {
        let plan = Plan::of(tenant, self.ids.next()).steps(steps).without_rows().build().map_err(misuse)?;
        commit_known(&*self.store, &plan, RetryPolicy::WORKER).await
    }
}

/// The problems that a range has kept.
fn problems_of(range: &Row) -> Vec<String> {
    let kept = range.json(PROBLEMS).and_then(Json::as_array).into_iter().flatten();
    kept.filter_map(|problem| problem.as_str().map(str::to_owned)).collect()
}
