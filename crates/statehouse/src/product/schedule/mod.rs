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
//! whether a queue is paused. `job_lanes` and `job_lines`: for each order key how many jobs run and which wait ([`lanes`]).
//! `job_uniques`: who has a unique key ([`unique`]). `job_definitions`: what makes jobs by itself ([`definition`]). Programs in
//! Rust need not claim by hand ([`hands`]).
//!
//! **Invariants.**
//! - I1. A job has at most one live claim. *Guard of claim:* `run_at <= now`, by the engine's clock; the same write moves
//!   `run_at` to the end of the new lease and raises `attempt`, which is never lowered.
//! - I2. A result is recorded once, by the attempt that is the last. *Guard of complete and fail:* `state = 'IN_PROGRESS' and
//!   attempt = mine`. A worker that was away for longer than its lease may still complete, as long as nobody else has claimed.
//! - I3. A killed worker's job runs again within one lease. *A claimed job stays in the index, at the end of its lease.* No
//!   sweeper is needed.
//! - I4. Attempts end. *Guard of claim:* `attempt < attempts_max`; whoever finds a job whose last lease is over fails it.
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
pub mod hands;
mod lanes;
mod read;
mod rules;
mod unique;
mod when;
mod write;

pub use archetype::ARCHETYPE;

use std::sync::Arc;
use std::sync::atomic::AtomicUsize;
use std::time::Duration;

use statehouse_store::{Table, Tenant, Type};
use tokio::sync::watch;

use self::claim::Beginnings;
use crate::blueprint::Thing;
use crate::blueprint::problem::{Problem, Problems};
use crate::infra::due::{self, Scanner};
use crate::resource::{Resource, plural};
use crate::told::{Alike, Telling, Told};
use crate::worker::Worker;

/// The states of a job.
const STATES: [&str; 6] = [PENDING, IN_PROGRESS, RETRYING, COMPLETED, FAILED, CANCELLED];
/// Those in which it is not over.
const LIVE: [&str; 3] = [PENDING, IN_PROGRESS, RETRYING];
/// Those in which it is.
const OVER: [&str; 3] = [COMPLETED, FAILED, CANCELLED];
/// Columns that claims, heartbeats and the ends of other jobs change, without an event.
const UNTOLD: [&str; 8] = [RUN_SHARD, RUN_AT, ATTEMPT, WORKER, CLAIM_ID, UNIQUE_HELD, STARTED_AT, UPDATED_AT];
const PENDING: &str = "PENDING";
const IN_PROGRESS: &str = "IN_PROGRESS";
const RETRYING: &str = "RETRYING";
const COMPLETED: &str = "COMPLETED";
const FAILED: &str = "FAILED";
const CANCELLED: &str = "CANCELLED";
/// Columns of a job.
const JOB_ID: &str = "job_id";
const QUEUE: &str = "queue";
const STATE: &str = "state";
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
const UPDATED_AT: &str = "updated_at";
/// Columns of a queue, and of a lane.
const PAUSED: &str = "paused";
const RUNNING: &str = "running";
const WAITING: &str = "waiting";
const TAIL: &str = "tail";
/// Indexes.
const RUNNABLE: &str = "runnable";
const BY_STATE: &str = "by_state";
const BY_DEFINITION: &str = "by_definition";
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
const ATTEMPTS_DEFAULT: i64 = 5;
const ATTEMPTS_LIMIT: i64 = 1_000;
const SHARDS_DEFAULT: i64 = 4;
const SHARDS_LIMIT: i64 = 1_024;
const PRIORITIES_LIMIT: i64 = 10;
const PER_KEY_LIMIT: i64 = 1_000;
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
struct Schedule {
    /// `job`.
    name: String,
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
    /// Raised by everything that may let somebody claim, so that claimers of this process who wait look again.
    news: watch::Sender<u64>,
    /// Where the next claim begins to look.
    turn: AtomicUsize,
    /// Where ranges began that gave a claim all that it wanted.
    begun: Beginnings,
    /// Claimers of this process take turns at a shard.
    stripes: Vec<tokio::sync::Mutex<()>>,
}

/// How many turns are taken at once.
const STRIPES: usize = 64;

impl Schedule {
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
    fn told(&self) -> Told {
        let definitions = self.definition_resource();
        let namings = [(self.name.as_str(), JOB_ID), (definitions.as_str(), definition::LAST_JOB_ID)];
        Told::by_name(&self.jobs, namings)
            .untold(&UNTOLD, "claims and heartbeats leave nothing in the log")
            .alike(Alike { column: STATE, values: &LIVE, shown: "LIVE" })
    }

    fn tell(&self) {
        self.news.send_modify(|news| *news = news.wrapping_add(1));
    }
}

/// Reads `[schedule.NAME]`: the jobs, their queues, and what makes them.
pub fn declare(thing: &Thing, problems: &mut Problems) -> Vec<Resource> {
    declare_all(thing, problems).unwrap_or_default()
}

fn declare_all(thing: &Thing, problems: &mut Problems) -> Option<Vec<Resource>> {
    let mut settings = thing.settings.clone();
    let name = thing.name.as_str();
    let table = settings.text("table", problems).unwrap_or_else(|| plural(name));
    let spans = [
        ("lease", LEASE_DEFAULT),
        ("backoff", BACKOFF_DEFAULT),
        ("backoff_max", BACKOFF_MAX_DEFAULT),
        ("keep", KEEP_DEFAULT),
        ("keep_failed", KEEP_FAILED_DEFAULT),
        ("look_ahead", LOOK_AHEAD_DEFAULT),
    ];
    let [lease, backoff, backoff_max, keep, keep_failed, look_ahead] =
        spans.map(|(name, default)| settings.duration(name, problems).unwrap_or(default));
    let counts = [
        ("max_attempts", ATTEMPTS_DEFAULT, ATTEMPTS_LIMIT),
        ("per_key", 1, PER_KEY_LIMIT),
        ("priorities", 1, PRIORITIES_LIMIT),
        ("shards", SHARDS_DEFAULT, SHARDS_LIMIT),
    ];
    let [attempts_max, per_key, priorities, shards] =
        counts.map(|(name, default, _)| settings.int(name, problems).unwrap_or(default));
    settings.finish(problems);
    let before = problems.len();
    for ((name, _, most), given) in counts.into_iter().zip([attempts_max, per_key, priorities, shards]) {
        if !(1..=most).contains(&given) {
            let title = format!("`{name}` must be from 1 to {most}");
            problems.add(Problem::at(settings.span_of(name), title));
        }
    }
    if !(LEASE_MIN..=LEASE_MAX).contains(&lease) {
        problems.add(Problem::at(settings.span_of("lease"), "`lease` must be from 100ms to 1d"));
    }
    if problems.len() > before {
        return None;
    }
    let mut built = |builder: statehouse_store::table::Builder| match builder.build() {
        Ok(table) => Some(table),
        Err(error) => {
            problems.add(Problem::at(settings.span(), format!("`schedule.{name}`: {}", error.why)));
            None
        }
    };
    let jobs = Table::named(&table)
        .partition(JOB_ID, Type::Text)
        .required(QUEUE, Type::Text)
        .required(STATE, Type::Text)
        .required(OWNER, Type::Text)
        .required(PRIORITY, Type::Int)
        .optional(RUN_SHARD, Type::Int)
        .optional(RUN_AT, Type::Time)
        .required(NOT_BEFORE, Type::Time)
        .defaulted(ATTEMPT, Type::Int, 0)
        .required(ATTEMPTS_MAX, Type::Int)
        .optional(WORKER, Type::Text)
        .optional(CLAIM_ID, Type::Text)
        .optional(PAYLOAD, Type::Json)
        .optional(RESULT, Type::Json)
        .optional(ERROR, Type::Text)
        .optional(UNIQUE_KEY, Type::Text)
        .optional(UNIQUE_HELD, Type::Bool)
        .optional(ORDER_KEY, Type::Text)
        .optional(LINE_SEQ, Type::Int)
        .optional(DEFINITION_ID, Type::Text)
        .optional(EXECUTION_TIME, Type::Time)
        .required(ENQUEUED_AT, Type::Time)
        .optional(STARTED_AT, Type::Time)
        .optional(FINISHED_AT, Type::Time)
        .required(UPDATED_AT, Type::Time)
        .index_across(RUNNABLE, &[QUEUE, RUN_SHARD], &[OWNER, PRIORITY, RUN_AT])
        .index(BY_STATE, &[QUEUE, STATE], &[UPDATED_AT])
        .index(BY_DEFINITION, &[DEFINITION_ID], &[EXECUTION_TIME]);
    let jobs = built(due::columns(jobs))?;
    let queues = built(
        Table::named(format!("{name}_queues"))
            .partition(QUEUE, Type::Text)
            .required(PAUSED, Type::Bool)
            .required(UPDATED_AT, Type::Time),
    )?;
    let lanes = built(
        Table::named(format!("{name}_lanes"))
            .partition(ORDER_KEY, Type::Text)
            .defaulted(RUNNING, Type::Int, 0)
            .defaulted(WAITING, Type::Int, 0)
            .required(TAIL, Type::Int),
    )?;
    let lines = built(
        Table::named(format!("{name}_lines"))
            .partition(ORDER_KEY, Type::Text)
            .sort(LINE_SEQ, Type::Int)
            .required(JOB_ID, Type::Text)
            .required(NOT_BEFORE, Type::Time),
    )?;
    let uniques = built(
        Table::named(format!("{name}_uniques"))
            .partition(UNIQUE_KEY, Type::Text)
            .required(JOB_ID, Type::Text),
    )?;
    let definitions = built(definition::table(name))?;
    let schedule = Arc::new(Schedule {
        name: name.to_owned(),
        jobs,
        queues,
        lanes,
        lines,
        uniques,
        definitions,
        lease,
        attempts_max,
        backoff,
        backoff_max,
        keep,
        keep_failed,
        look_ahead,
        per_key,
        priorities,
        shards: u32::try_from(shards).unwrap_or(1),
        news: watch::Sender::new(0),
        begun: Beginnings::default(),
        turn: AtomicUsize::new(0),
        stripes: std::iter::repeat_with(tokio::sync::Mutex::default).take(STRIPES).collect(),
    });
    let sweeper: Arc<dyn Worker> =
        Arc::new(Scanner::new(schedule.sweeper(), schedule.shards, write::Forget(schedule.clone())));
    let maker: Arc<dyn Worker> =
        Arc::new(definition::Maker { name: schedule.maker(), schedule: schedule.clone() });
    let text_key = |name: &str| vec![(name.to_owned(), Type::Text)];
    Some(vec![
        Resource {
            hidden: Vec::new(),
            name: name.to_owned(),
            archetype: thing.archetype,
            key: text_key(JOB_ID),
            tables: vec![
                schedule.jobs.clone(),
                schedule.lanes.clone(),
                schedule.lines.clone(),
                schedule.uniques.clone(),
            ],
            actions: actions::job_actions(&schedule),
            workers: vec![sweeper],
            consumers: Vec::new(),
            telling: Telling::Rows(Box::new(schedule.told())),
        },
        Resource {
            hidden: Vec::new(),
            name: schedule.queue_resource(),
            archetype: thing.archetype,
            key: text_key(QUEUE),
            tables: vec![schedule.queues.clone()],
            actions: actions::queue_actions(&schedule),
            workers: Vec::new(),
            consumers: Vec::new(),
            telling: Telling::Rows(Box::new(Told::with_row(&schedule.queue_resource(), &schedule.queues))),
        },
        Resource {
            hidden: Vec::new(),
            name: schedule.definition_resource(),
            archetype: thing.archetype,
            key: text_key(DEFINITION_ID),
            tables: vec![schedule.definitions.clone()],
            actions: definition::actions(&schedule, &actions::job_form(&schedule)),
            workers: vec![maker],
            consumers: Vec::new(),
            telling: Telling::Rows(Box::new(schedule.definitions_told())),
        },
    ])
}
