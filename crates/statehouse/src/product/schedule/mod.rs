//! A09 Future constraint + claimable run: jobs that wait for their time, are claimed by one worker at a time, and end once.
//!
//! ```text
//!                    claim                    complete
//!   PENDING ────────────────────► IN_PROGRESS ─────────► COMPLETED
//!      ▲ │                         ▲  │ │ │ ▲
//!      │ │          claim, in time │  │ │ └─┘ heartbeat; claim, once the lease is over
//!      │ │                         │  │ │
//!      │ │                     RETRYING◄┘ fail, with attempts left
//!      │ │                         │  │
//!      │ └──────── cancel ─────────┼──┴─ cancel ──► CANCELLED
//!      │                           │
//!      └────────── replay ────── FAILED ◄── fail, or the lease is over, without attempts left
//! ```
//!
//! **Rows.** `jobs(tenant, job_id, queue, state, owner, priority, run_shard, run_at, not_before, attempt, attempts_max, worker,
//! claim_id, payload, result, error, …, version)`. `run_at` is the time from which anybody may claim the job: its due time,
//! the end of its back-off, or the end of its lease. It is null when the job is over, and while it stands in line. With
//! `keep = "0s"` a job that is completed is deleted instead, by the same plan and under the same guards. The index
//! `runnable` across tenants has, for each queue and shard, the jobs of each owner by priority and `run_at`. `job_queues`:
//! whether a queue is paused. `job_lanes` and `job_lines`: for each order key how many jobs run and which wait ([`order_keys`]).
//! `job_uniques`: who has a unique key ([`unique`]). `job_definitions`: what makes jobs by itself ([`definition`]). Programs in
//! Rust need not claim by hand ([`hands`]).
//!
//! **Invariants.**
//! - I1. A job has at most one live claim. *Guard of claim:* `run_at <= now`, by the engine's clock; the same write moves
//!   `run_at` to the end of the new lease and raises `attempt`, which is never lowered.
//! - I2. A result is recorded once, by the attempt that is the last. *Guard of complete and fail:* `state = 'IN_PROGRESS' and
//!   attempt = mine`. A worker that was away for longer than its lease may still complete, while no other worker has claimed it.
//! - I3. A killed worker's job runs again within one lease. *A claimed job stays in the index, at the end of its lease.* No
//!   sweeper is needed.
//! - I4. Attempts end. *Guard of claim:* `attempt < attempts_max`; a worker that finds a job whose last lease has expired fails it.
//! - I5. At most `per_key` jobs of an order key are admitted, in the order in which they were enqueued ([`lanes`]).
//! - I6. A unique key has at most one job that is not over ([`unique`]).
//! - I7. Each due time of a definition yields one job ([`definition`]).
//!
//! **Failures.** *Due item materialized twice*, *due item never materialized*: I7, and for a job that is enqueued for later,
//! that its row is the item. *Job claimed twice*: I1. *Run executed but result not recorded*: I2 and I3: the job is run again,
//! and the worker that comes back late is told `not_holder`.
//!
//! **Hotspots.** *Due-time burstiness*: jobs of one moment are claimed in batches; definitions make theirs `look_ahead` before
//! they are due. *Due bucket/index hotspot*: `shards = 16` parts of the index. *Queue backlog*: a claim reads the beginning of
//! a range, however long it is, from where the last one found it, and not past what was claimed before ([`claim`]). *Worker
//! burst pressure*: claimers of one process take turns at a shard, and those of several begin at different ones.

mod actions;
mod archetype;
mod claim;
mod definition;
mod job_queue;
pub mod job_runner;
mod order_keys;
mod read;
mod rules;
mod transitions;
mod unique;
mod when;
mod write;

pub use archetype::ARCHETYPE;
pub use job_queue::JobQueue;

use std::ops::RangeInclusive;
use std::sync::Arc;
use std::sync::atomic::AtomicUsize;
use std::time::Duration;

use statehouse_store::table::TableBuilder;
use statehouse_store::{Table, Tenant, Type};
use tokio::sync::watch;

use self::claim::RangeStartCache;
use crate::declare::table::{STATE, UPDATED_AT};
use crate::declare::{Declare, ResourceSpec, TableDef, TableSpec};
use crate::infra::due::{self, Scanner};
use crate::resource::plural;
use crate::view_source::{MergedValues, SourceRows};

/// The states of a job.
const STATES: [&str; 6] = [PENDING, IN_PROGRESS, RETRYING, COMPLETED, FAILED, CANCELLED];
/// Those in which it is not over.
const LIVE: [&str; 3] = [PENDING, IN_PROGRESS, RETRYING];
/// Those in which it is.
const OVER: [&str; 3] = [COMPLETED, FAILED, CANCELLED];
/// Columns that claims, heartbeats and the ends of other jobs change, without an event.
const UNLOGGED: [&str; 8] =
    [RUN_SHARD, RUN_AT, ATTEMPT, WORKER, CLAIM_ID, UNIQUE_HELD, STARTED_AT, UPDATED_AT];
const PENDING: &str = "PENDING";
const IN_PROGRESS: &str = "IN_PROGRESS";
const RETRYING: &str = "RETRYING";
const COMPLETED: &str = "COMPLETED";
const FAILED: &str = "FAILED";
const CANCELLED: &str = "CANCELLED";
/// Columns of a job.
const JOB_ID: &str = "job_id";
const QUEUE: &str = "queue";
const OWNER: &str = "owner";
const PRIORITY: &str = "priority";
const RUN_SHARD: &str = "run_shard";
const RUN_AT: &str = "run_at";
const NOT_BEFORE: &str = "not_before";
const ATTEMPT: &str = "attempt";
const ATTEMPTS_MAX: &str = "attempts_max";
const WORKER: &str = "worker";
const CLAIM_ID: &str = "claim_id";
const PAYLOAD: &str = "payload";
const RESULT: &str = "result";
const ERROR: &str = "error";
const UNIQUE_KEY: &str = "unique_key";
const UNIQUE_HELD: &str = "unique_held";
const ORDER_KEY: &str = "order_key";
const LINE_SEQ: &str = "line_seq";
const DEFINITION_ID: &str = "definition_id";
const EXECUTION_TIME: &str = "execution_time";
const ENQUEUED_AT: &str = "enqueued_at";
const STARTED_AT: &str = "started_at";
const FINISHED_AT: &str = "finished_at";
/// Columns of a queue, and of a lane.
const PAUSED: &str = "paused";
const RUNNING: &str = "running";
const WAITING: &str = "waiting";
const TAIL: &str = "tail";
/// Indexes.
const RUNNABLE: &str = "runnable";
const BY_STATE: &str = "by_state";
const BY_DEFINITION: &str = "by_definition";
const BY_ORDER_KEY: &str = "by_order_key";
/// The queue of a job whose maker does not name one.
const QUEUE_DEFAULT: &str = "default";

const LEASE_DEFAULT: Duration = Duration::from_secs(30);
const LEASE_MIN: Duration = Duration::from_millis(100);
const LEASE_MAX: Duration = Duration::from_secs(24 * 3_600);
const BACKOFF_DEFAULT: Duration = Duration::from_secs(1);
const BACKOFF_MAX_DEFAULT: Duration = Duration::from_secs(3_600);
const KEEP_DEFAULT: Duration = Duration::from_secs(7 * 24 * 3_600);
const KEEP_FAILED_DEFAULT: Duration = Duration::from_secs(90 * 24 * 3_600);
const LOOK_AHEAD_DEFAULT: Duration = Duration::from_secs(10);
/// The bounds of the other durations.
const DURATIONS: RangeInclusive<Duration> = Duration::ZERO..=Duration::from_secs(100 * 366 * 86_400);
const ATTEMPTS_LIMIT: u32 = 1_000;
const PRIORITIES_LIMIT: u32 = 10;
/// Jobs in one claim, heartbeat or batch of completions: as many as an engine likes to have in flight at once.
const BATCH_MAX: i64 = 98;
/// The longest that a claim waits for a job.
const WAIT_MAX: Duration = Duration::from_secs(30);
/// Bytes of a payload or a result, so that a claim of several jobs and a record of one always fit.
const PAYLOAD_BYTES_MAX: usize = 100_000;
/// Bytes of the jobs of one claim.
const CLAIM_BYTES_MAX: usize = 250_000;
/// The longest delay of a job.
const SPAN_MS_MAX: i64 = 10 * 366 * 24 * 3_600 * 1_000;

/// One declared kind of job.
#[derive(Debug)]
struct ScheduleSpec {
    /// `job`.
    name: String,
    jobs_def: Arc<TableDef>,
    queues_def: Arc<TableDef>,
    definitions_def: Arc<TableDef>,
    jobs: Arc<Table>,
    queues: Arc<Table>,
    lanes: Arc<Table>,
    lines: Arc<Table>,
    uniques: Arc<Table>,
    definitions: Arc<Table>,
    lease: Duration,
    attempts_max: i64,
    backoff: Duration,
    backoff_max: Duration,
    keep: Duration,
    keep_failed: Duration,
    look_ahead: Duration,
    per_key: i64,
    priorities: i64,
    shards: u32,
    /// Raised by every write that makes a job claimable, so that waiting claims of this process look again.
    news: watch::Sender<u64>,
    /// Where the next claim begins to look.
    turn: AtomicUsize,
    /// Where ranges began that gave a claim all that it wanted.
    begun: RangeStartCache,
    /// Claimers of this process take turns at a shard.
    stripes: Vec<tokio::sync::Mutex<()>>,
}

/// How many turns are taken at once.
const STRIPES: usize = 64;

impl ScheduleSpec {
    fn shard_of(&self, tenant: &Tenant, job_id: &str) -> i64 {
        due::shard_of(tenant, &self.name, job_id, self.shards)
    }

    /// The resource of its queues: `job_queue`.
    fn queue_resource(&self) -> String {
        format!("{}_queue", self.name)
    }

    fn sweeper(&self) -> String {
        format!("{}.forget", self.name)
    }

    /// How views follow its jobs. Claims, heartbeats and the ends of others change a job without an event. A definition's
    /// events are about the definition, and name the job that was made or withdrawn.
    fn source_rows(&self) -> SourceRows {
        let definitions = self.definition_resource();
        let namings = [(self.name.as_str(), JOB_ID), (definitions.as_str(), definition::LAST_JOB_ID)];
        SourceRows::with_keys(&self.jobs, namings)
            .unlogged(&UNLOGGED, "claims and heartbeats leave nothing in the log")
            .merging(MergedValues { column: STATE, values: &LIVE, shown: "LIVE" })
    }

    fn notify_waiting(&self) {
        self.news.send_modify(|news| *news = news.wrapping_add(1));
    }
}

/// Reads `[schedule.NAME]`: the jobs, their queues, and what makes them.
pub(crate) fn declare(cx: &mut Declare<'_>) -> Option<()> {
    let schedule = Arc::new(read_schedule(cx)?);
    let lanes = [&schedule.lanes, &schedule.lines, &schedule.uniques];
    let run = format!("{}.run", schedule.definition_resource());
    let jobs = ResourceSpec::of(&schedule.name, &schedule.jobs_def)
        .source_rows(schedule.source_rows())
        .job_queue(JobQueue(schedule.clone()))
        .events(&[("enqueued", &["enqueue", &run])])
        .machine(&cx.machine(transitions::of_jobs(&schedule))?);
    cx.resource(
        lanes.into_iter().fold(jobs, ResourceSpec::table).actions(actions::job_actions(&schedule)).worker(
            Scanner::new(schedule.sweeper(), schedule.shards, write::DeleteFinished(schedule.clone())),
        ),
    );
    cx.resource(
        ResourceSpec::of(&schedule.queue_resource(), &schedule.queues_def)
            .events(&[("paused", &["pause"]), ("resumed", &["resume"])])
            .actions(actions::queue_actions(&schedule)),
    );
    let definitions = cx.machine(transitions::of_definitions(&schedule))?;
    cx.resource(
        ResourceSpec::of(&schedule.definition_resource(), &schedule.definitions_def)
            .source_rows(schedule.definition_source_rows())
            .machine(&definitions)
            .actions(definition::actions(&schedule))
            .worker(definition::JobMaker { name: schedule.maker(), schedule: schedule.clone() }),
    );
    Some(())
}

fn read_schedule(cx: &mut Declare<'_>) -> Option<ScheduleSpec> {
    let name = cx.name();
    let settings = cx.settings();
    let table = settings.text("table", plural(name));
    let lease = settings.duration("lease", LEASE_DEFAULT, LEASE_MIN..=LEASE_MAX);
    let [backoff, backoff_max, keep, keep_failed, look_ahead] = [
        ("backoff", BACKOFF_DEFAULT),
        ("backoff_max", BACKOFF_MAX_DEFAULT),
        ("keep", KEEP_DEFAULT),
        ("keep_failed", KEEP_FAILED_DEFAULT),
        ("look_ahead", LOOK_AHEAD_DEFAULT),
    ]
    .map(|(name, default)| settings.duration(name, default, DURATIONS));
    let attempts_max = i64::from(settings.count("max_attempts", 5, 1..=ATTEMPTS_LIMIT));
    let per_key = i64::from(settings.count("per_key", 1, 1..=1_000));
    let most_priorities = settings.count("priorities", 1, 1..=PRIORITIES_LIMIT);
    let priorities = i64::from(most_priorities);
    let shards = settings.count("shards", 4, 1..=1_024);
    // A claim looks at so many priorities, and at no others.
    let jobs_def = cx.build(jobs_table(table, shards).growing("priorities", most_priorities))?;
    let queues_def = cx.build(
        TableSpec::named(format!("{name}_queues"))
            .partition(QUEUE, Type::Text)
            .flag(PAUSED)
            .about("whether claims from it are refused")
            .updated_at(),
    )?;
    let definitions_def = cx.build(definition::table(name, shards))?;
    let [lanes, lines, uniques] = key_tables(name);
    Some(ScheduleSpec {
        name: name.to_owned(),
        jobs: jobs_def.table().clone(),
        jobs_def,
        queues: queues_def.table().clone(),
        queues_def,
        definitions: definitions_def.table().clone(),
        definitions_def,
        lanes: cx.build_internal(lanes)?,
        lines: cx.build_internal(lines)?,
        uniques: cx.build_internal(uniques)?,
        lease,
        attempts_max,
        backoff,
        backoff_max,
        keep,
        keep_failed,
        look_ahead,
        per_key,
        priorities,
        shards,
        news: watch::Sender::new(0),
        begun: RangeStartCache::default(),
        turn: AtomicUsize::new(0),
        stripes: std::iter::repeat_with(tokio::sync::Mutex::default).take(STRIPES).collect(),
    })
}

/// The tables of order keys and of unique keys.
fn key_tables(name: &str) -> [TableBuilder; 3] {
    let lanes = Table::named(format!("{name}_lanes"))
        .partition(ORDER_KEY, Type::Text)
        .defaulted(RUNNING, Type::Int, 0)
        .defaulted(WAITING, Type::Int, 0)
        .required(TAIL, Type::Int);
    let lines = Table::named(format!("{name}_lines"))
        .partition(ORDER_KEY, Type::Text)
        .sort(LINE_SEQ, Type::Int)
        .required(JOB_ID, Type::Text)
        .required(NOT_BEFORE, Type::Time);
    let uniques = Table::named(format!("{name}_uniques"))
        .partition(UNIQUE_KEY, Type::Text)
        .required(JOB_ID, Type::Text);
    [lanes, lines, uniques]
}

fn jobs_table(table: String, shards: u32) -> TableSpec {
    TableSpec::named(table)
        .partition(JOB_ID, Type::Text)
        .text(QUEUE)
        .states(&STATES)
        .text(OWNER)
        .hidden()
        .int(PRIORITY)
        .int(RUN_SHARD)
        .null()
        .hidden()
        .time(RUN_AT)
        .null()
        .about("from when on it can be claimed; null when it is over or waits for its order key")
        .time(NOT_BEFORE)
        .about("when it was to be due")
        .int(ATTEMPT)
        .default(0)
        .about("how often it was claimed")
        .int(ATTEMPTS_MAX)
        .text(WORKER)
        .null()
        .text(CLAIM_ID)
        .null()
        .hidden()
        .about("the last claim")
        .json(PAYLOAD)
        .null()
        .json(RESULT)
        .null()
        .text(ERROR)
        .null()
        .text(UNIQUE_KEY)
        .null()
        .flag(UNIQUE_HELD)
        .null()
        .hidden()
        .about("whether it still has its unique key")
        .text(ORDER_KEY)
        .null()
        .int(LINE_SEQ)
        .null()
        .hidden()
        .about("its number among those with its order key")
        .text(DEFINITION_ID)
        .null()
        .time(EXECUTION_TIME)
        .null()
        .about("the due time of the definition that made it")
        .time(ENQUEUED_AT)
        .time(STARTED_AT)
        .null()
        .time(FINISHED_AT)
        .null()
        .updated_at()
        .deadline(&[""; 0], due::DUE_AT, shards)
        .global_index(RUNNABLE, &[QUEUE, RUN_SHARD], &[OWNER, PRIORITY, RUN_AT])
        .index(BY_STATE, &[QUEUE, STATE], &[UPDATED_AT])
        .index(BY_DEFINITION, &[DEFINITION_ID], &[EXECUTION_TIME])
        .index(BY_ORDER_KEY, &[ORDER_KEY], &[ENQUEUED_AT])
}
