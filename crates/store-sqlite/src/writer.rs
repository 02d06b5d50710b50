//! The writer: one thread, one connection, group commit.
//!
//! ```text
//! callers ──(bounded queue)──► BEGIN IMMEDIATE
//!                              for each job: read rows → decide → write log record → write rows
//!                              COMMIT  (one synchronization of the WAL)
//!                              ◄── each caller its own outcome
//! ```
//!
//! While one batch waits for fsync, new jobs accumulate in the queue and become the next batch.
//!
//! W1. A caller gets `Applied` only after the COMMIT that holds its plan has returned.
//! W2. A job writes only after all of its conditions hold, so a refused job needs no rollback.
//! W3. The log record is written first: if its operation id exists, nothing else of the plan is written.
//! W4. A failed write rolls the batch back. The writer runs the other jobs of the batch again.
//! W5. A failed COMMIT is an unknown outcome, and the writer stops after it. A full disk is the exception: the commit mark
//!     could not be written, and the rollback that follows is certain.
//! W6. Commits are checkpointed from the WAL into the file within seconds ([`checkpoint_in_time`]), and a migration at once.
//!     Durability does not depend on it. It bounds the time of recovery after a crash, and what a copy of the file alone lacks
//!     (such a copy is no backup; [`crate::backup()`] makes one).
//! W7. After a scrub neither the file nor the WAL has former contents of rows and records. *`VACUUM` writes each page anew; without it
//!     free pages, and the free space in pages, keep them. The checkpoint that follows truncates the WAL.*

use std::borrow::Cow;
use std::collections::HashMap;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use rusqlite::{Connection, ErrorCode, Statement, params};
use statehouse_store::blank::BlankedRecord;
use statehouse_store::bug;
use statehouse_store::eval::{self, Decision};
use statehouse_store::limits::PAGE_MAX;
use statehouse_store::log::{LogPart, part_operation, partition_of, parts_of, write_events};
use statehouse_store::plan::{Expect, Verb};
use statehouse_store::{
    Address, Applied, BlankRange, BlankedPage, Clock, Commit, Entry, Event, Migrate, OperationStatus, Plan,
    Position, Record, Resolution, Row, Schema, SchemaChange, Step, StoreError, SystemClock, Tenant,
};
use tokio::sync::{mpsc, oneshot, watch};

use crate::SqliteOptions;
use crate::fault;
use crate::layout::{open_writer, pack, unpack};
use crate::migrate;
use crate::reader::{self, PartitionBounds, TableStatements, bounds};
use crate::sql::Bind;

type Reply<T> = oneshot::Sender<Result<T, StoreError>>;

/// A job for the writer thread, with the channel for its result.
enum WriterJob {
    Commit(PreparedPlan, Reply<Commit>),
    Resolve(Tenant, String, Reply<Resolution>),
    /// Replies whether records are left to be trimmed.
    Trim(u32, u64, Reply<bool>),
    Blank(BlankRange, Reply<BlankedPage>),
    Migrate(Schema, Migrate, Reply<Vec<SchemaChange>>),
    /// Rewrites the file without what was deleted or replaced (W7).
    Scrub(Reply<()>),
    /// Checkpoints the WAL into the file (W6).
    Checkpoint,
}

/// A plan, with everything that can be computed before the writer thread runs it.
struct PreparedPlan {
    plan: Plan,
    /// The log partition of its entry.
    partition: u32,
    /// The shares of further partitions in its events.
    parts: Vec<LogPart>,
    /// The events as the log stores them, if they do not need a row and all belong to one partition.
    events: Option<String>,
}

impl PreparedPlan {
    fn new(plan: Plan, partitions: u32) -> Result<PreparedPlan, StoreError> {
        let parts = parts_of(&plan, partitions)?;
        let entry = plan.entry();
        let partition =
            entry.map_or(0, |entry| partition_of(plan.tenant(), &entry.resource, &entry.key, partitions));
        let is_complete = |entry: &&Entry| entry.events.iter().all(|draft| draft.row_of.is_none());
        let complete = entry.filter(is_complete).filter(|_| parts.is_empty());
        let events = complete.and_then(|entry| {
            let events: Vec<Event> =
                entry.events.iter().map(|draft| eval::finish_event(draft, |_| None)).collect();
            serde_json::to_string(&events).ok()
        });
        Ok(PreparedPlan { plan, partition, parts, events })
    }
}

/// The result of a job. The caller gets it after the COMMIT.
enum JobResult {
    Commit(Result<Commit, StoreError>),
    Resolve(Result<Resolution, StoreError>),
    Trim(Result<bool, StoreError>),
    Blank(Result<BlankedPage, StoreError>),
    Migrate(Result<Vec<SchemaChange>, StoreError>),
    Checkpoint,
}

/// The handle to the writer thread.
pub(crate) struct SqliteWriter {
    queue: Mutex<Option<mpsc::Sender<WriterJob>>>,
    partitions: u32,
    commits: watch::Receiver<u64>,
    finished: watch::Receiver<bool>,
}

impl SqliteWriter {
    /// Starts the writer thread, which opens the file. Returns when it is open, with the number of log partitions.
    pub(crate) async fn start(options: &SqliteOptions) -> Result<(SqliteWriter, u32), StoreError> {
        let (queue, jobs) = mpsc::channel(options.queue.max(1));
        let (ready, opened) = oneshot::channel();
        let (commits, commits_seen) = watch::channel(0);
        let (finish, finished) = watch::channel(false);
        let checkpoint_after = options.checkpoint_after;
        let options = options.clone();
        let thread = std::thread::Builder::new().name("statehouse-sqlite".into());
        let spawned = thread.spawn(move || {
            match open_writer(&options) {
                Ok((connection, partitions)) => {
                    if ready.send(Ok(partitions)).is_ok() {
                        WriterThread::new(&connection, options, partitions, commits).run(jobs);
                    }
                    // A closed store is one file without a WAL. If the checkpoint fails, the next opening does it.
                    drop(connection.query_row("PRAGMA wal_checkpoint(TRUNCATE)", [], |_| Ok(())));
                }
                Err(error) => drop(ready.send(Err(error))),
            }
            finish.send_replace(true);
        });
        spawned.map_err(|error| StoreError::unavailable(format!("no thread for the writer: {error}")))?;
        let partitions = opened.await.map_err(|_| StoreError::unavailable("the writer did not start"))??;
        tokio::spawn(checkpoint_in_time(queue.downgrade(), commits_seen.clone(), checkpoint_after));
        let queue = Mutex::new(Some(queue));
        Ok((SqliteWriter { queue, partitions, commits: commits_seen, finished }, partitions))
    }

    /// Changes whenever something was committed.
    pub(crate) fn commits(&self) -> watch::Receiver<u64> {
        self.commits.clone()
    }

    pub(crate) async fn commit(&self, plan: Plan) -> Result<Commit, StoreError> {
        let ready = PreparedPlan::new(plan, self.partitions)?;
        self.send_job(|reply| WriterJob::Commit(ready, reply)).await
    }

    pub(crate) async fn resolve(&self, tenant: Tenant, operation: String) -> Result<Resolution, StoreError> {
        self.send_job(|reply| WriterJob::Resolve(tenant, operation, reply)).await
    }

    pub(crate) async fn trim(&self, partition: u32, through: u64) -> Result<(), StoreError> {
        while self.send_job(|reply| WriterJob::Trim(partition, through, reply)).await? {}
        Ok(())
    }

    pub(crate) async fn blank(&self, range: BlankRange) -> Result<BlankedPage, StoreError> {
        self.send_job(|reply| WriterJob::Blank(range, reply)).await
    }

    pub(crate) async fn scrub(&self) -> Result<(), StoreError> {
        self.send_job(WriterJob::Scrub).await
    }

    pub(crate) async fn migrate(
        &self,
        schema: Schema,
        how: Migrate,
    ) -> Result<Vec<SchemaChange>, StoreError> {
        self.send_job(|reply| WriterJob::Migrate(schema, how, reply)).await
    }

    async fn send_job<T>(&self, job: impl FnOnce(Reply<T>) -> WriterJob) -> Result<T, StoreError> {
        let queue = self.queue.lock().unwrap_or_else(PoisonError::into_inner).clone();
        let (reply, answer) = oneshot::channel();
        queue.ok_or_else(fault::closed)?.send(job(reply)).await.map_err(|_| fault::closed())?;
        // The writer replies to every job that it received. A job that it did not receive was not run.
        answer.await.map_err(|_| fault::closed())?
    }

    /// Accepts no more jobs. Returns when the accepted ones are done and the file is closed.
    pub(crate) async fn close(&self) {
        drop(self.queue.lock().unwrap_or_else(PoisonError::into_inner).take());
        // An error means that the thread has ended already.
        let _ = self.finished.clone().wait_for(|finished| *finished).await;
    }
}

/// How many idle periods are waited for at most before the WAL is checkpointed under load.
const PAUSES_MAX: u32 = 5;

/// Requests a checkpoint when nothing was committed during one `pause`, or after [`PAUSES_MAX`] of them (W6). The task wakes
/// once per pause, whatever the load, and ends with the writer.
async fn checkpoint_in_time(
    queue: mpsc::WeakSender<WriterJob>,
    mut commits: watch::Receiver<u64>,
    pause: Duration,
) {
    while commits.changed().await.is_ok() {
        for _ in 0..PAUSES_MAX {
            let seen = *commits.borrow_and_update();
            SystemClock.sleep(pause).await;
            if *commits.borrow() == seen {
                break;
            }
        }
        let Some(queue) = queue.upgrade() else { return };
        if queue.send(WriterJob::Checkpoint).await.is_err() {
            return;
        }
        commits.borrow_and_update();
    }
}

/// The state of the writer thread.
struct WriterThread<'c> {
    path: PathBuf,
    clock: Arc<dyn Clock>,
    batch_max: usize,
    connection: &'c Connection,
    partitions: u32,
    tables: TableStatements,
    prepared: StatementCache<'c>,
    /// The bounds of each partition, as of this connection's transaction.
    bounds: Vec<PartitionBounds>,
    /// Changes when another connection has written, which makes `bounds` wrong.
    data_version: i64,
    commits: watch::Sender<u64>,
    /// Whether a migration was committed and not checkpointed yet.
    migrated: bool,
    /// The error of all further jobs, once a COMMIT has failed (W5).
    stopped: Option<StoreError>,
}

/// Prepared statements of the writing connection, by their text.
struct StatementCache<'c> {
    connection: &'c Connection,
    statements: HashMap<String, Statement<'c>>,
}

/// The maximum number of prepared statements. No blueprint needs as many; a caller that generates texts may.
const PREPARED_MAX: usize = 1_000;

impl<'c> StatementCache<'c> {
    fn get(&mut self, text: &str) -> rusqlite::Result<&mut Statement<'c>> {
        if !self.statements.contains_key(text) {
            if self.statements.len() >= PREPARED_MAX {
                self.statements.clear();
            }
            self.statements.insert(text.to_owned(), self.connection.prepare(text)?);
        }
        // The statement was in the map or has been inserted above.
        self.statements.get_mut(text).ok_or(rusqlite::Error::InvalidQuery)
    }
}

impl<'c> WriterThread<'c> {
    fn new(
        connection: &'c Connection,
        options: SqliteOptions,
        partitions: u32,
        commits: watch::Sender<u64>,
    ) -> WriterThread<'c> {
        WriterThread {
            path: options.path,
            clock: options.clock,
            batch_max: options.batch.max(1),
            connection,
            partitions,
            tables: TableStatements::default(),
            prepared: StatementCache { connection, statements: HashMap::new() },
            bounds: Vec::new(),
            data_version: -1,
            commits,
            migrated: false,
            stopped: None,
        }
    }

    fn run(mut self, mut jobs: mpsc::Receiver<WriterJob>) {
        let mut batch = Vec::with_capacity(self.batch_max);
        while jobs.blocking_recv_many(&mut batch, self.batch_max) > 0 {
            let mut waiting = std::mem::take(&mut batch);
            let all = waiting.len();
            waiting.retain(|job| !matches!(job, WriterJob::Checkpoint));
            let is_asked = waiting.len() < all;
            let (scrubs, jobs): (Vec<WriterJob>, Vec<WriterJob>) =
                waiting.into_iter().partition(|job| matches!(job, WriterJob::Scrub(_)));
            waiting = jobs;
            while !waiting.is_empty() {
                waiting = self.run_batch(waiting);
            }
            if is_asked || self.migrated {
                self.checkpoint();
            }
            if !scrubs.is_empty() {
                let scrubbed = self.scrub();
                for job in scrubs {
                    if let WriterJob::Scrub(reply) = job {
                        drop(reply.send(scrubbed.clone()));
                    }
                }
            }
        }
    }

    /// Checkpoints the WAL, as far as open read transactions permit (W6). If it fails nothing is lost: the WAL keeps its content.
    fn checkpoint(&mut self) {
        self.migrated = false;
        if self.stopped.is_none() {
            drop(self.connection.query_row("PRAGMA wal_checkpoint(PASSIVE)", [], |_| Ok(())));
        }
    }

    /// Rewrites the file, and empties the WAL (W7). What it needs beside the file is a temporary one of the size of the data.
    fn scrub(&mut self) -> Result<(), StoreError> {
        if let Some(stopped) = &self.stopped {
            return Err(stopped.clone());
        }
        let fail = |error: rusqlite::Error| fault::from_sqlite(&self.path, &error);
        let run = |text: &str| self.connection.execute_batch(text);
        let rewritten = run("PRAGMA temp_store = FILE").and_then(|()| run("VACUUM"));
        rewritten.and(run("PRAGMA temp_store = MEMORY")).map_err(fail)?;
        let busy: i64 = self
            .connection
            .query_row("PRAGMA wal_checkpoint(TRUNCATE)", [], |row| row.get(0))
            .map_err(fail)?;
        if busy == 0 {
            return Ok(());
        }
        let path = self.path.display();
        Err(StoreError::unavailable(format!(
            "a reader of {path} keeps former contents in the write-ahead log; scrub again when it has finished"
        )))
    }

    /// Runs jobs in one transaction and replies to them. Returns the jobs that have to run again, without the failed one.
    fn run_batch(&mut self, jobs: Vec<WriterJob>) -> Vec<WriterJob> {
        if let Some(stopped) = &self.stopped {
            jobs.into_iter().for_each(|job| reply_error(job, stopped.clone()));
            return Vec::new();
        }
        if let Err(error) = self.begin() {
            self.roll_back();
            jobs.into_iter().for_each(|job| reply_error(job, error.clone()));
            return Vec::new();
        }
        let mut done = Vec::with_capacity(jobs.len());
        let mut failure = None;
        for (place, job) in jobs.iter().enumerate() {
            match self.run_job(job) {
                Ok(result) => done.push(result),
                Err(error) => {
                    failure = Some((place, error));
                    break;
                }
            }
        }
        let Some((culprit, error)) = failure else {
            let committed = self.prepared.get("COMMIT").and_then(|commit| commit.execute([])).map(drop);
            self.answer(jobs, done, committed);
            return Vec::new();
        };
        self.roll_back();
        if fault::is_global(&error) {
            jobs.into_iter().for_each(|job| reply_error(job, error.clone()));
            return Vec::new();
        }
        let mut again = Vec::with_capacity(jobs.len());
        for (place, job) in jobs.into_iter().enumerate() {
            if place == culprit {
                reply_error(job, error.clone());
            } else {
                again.push(job);
            }
        }
        again
    }

    /// Acquires the write lock, and reads the log's bounds again if another process has written since the last time.
    fn begin(&mut self) -> Result<(), StoreError> {
        let fail = |error: rusqlite::Error| fault::from_sqlite(&self.path, &error);
        self.prepared.get("BEGIN IMMEDIATE").and_then(|begin| begin.execute([])).map_err(fail)?;
        let pragma = self.prepared.get("PRAGMA data_version").map_err(fail)?;
        let version: i64 = pragma.query_row([], |row| row.get(0)).map_err(fail)?;
        if version != self.data_version {
            let all = (0..self.partitions).map(|partition| bounds(self.connection, partition));
            self.bounds = all.collect::<rusqlite::Result<_>>().map_err(fail)?;
            self.data_version = version;
        }
        Ok(())
    }

    fn roll_back(&mut self) {
        if !self.connection.is_autocommit() {
            drop(self.connection.execute_batch("ROLLBACK"));
        }
        self.data_version = -1;
    }

    /// Replies to each caller after the COMMIT has succeeded or failed.
    fn answer(&mut self, jobs: Vec<WriterJob>, done: Vec<JobResult>, committed: rusqlite::Result<()>) {
        let Err(error) = committed else {
            self.commits.send_modify(|count| *count += 1);
            jobs.into_iter().zip(done).for_each(|(job, done)| reply(job, done));
            return;
        };
        self.roll_back();
        let cause = fault::from_sqlite(&self.path, &error);
        if error.sqlite_error_code() == Some(ErrorCode::DiskFull) && self.connection.is_autocommit() {
            jobs.into_iter().for_each(|job| reply_error(job, cause.clone()));
            return;
        }
        let why = format!("the commit to {} failed ({error})", self.path.display());
        self.stopped = Some(StoreError::unavailable(format!(
            "{why}, so the writer has stopped; check the disk, then open the store again"
        )));
        for (job, done) in jobs.into_iter().zip(done) {
            let operation = match (&job, &done) {
                (WriterJob::Commit(ready, _), JobResult::Commit(Ok(Commit::Applied(_)))) => {
                    ready.plan.operation().to_owned()
                }
                (WriterJob::Resolve(_, operation, _), _) => operation.clone(),
                // A job that has written nothing certainly has no effect.
                _ => {
                    reply_error(job, cause.clone());
                    continue;
                }
            };
            reply_error(job, StoreError::unknown(operation, why.clone()));
        }
    }

    /// Runs one job inside the transaction. `Err` means that the transaction cannot go on.
    fn run_job(&mut self, job: &WriterJob) -> Result<JobResult, StoreError> {
        Ok(match job {
            WriterJob::Commit(ready, _) => JobResult::Commit(self.apply(ready)?),
            WriterJob::Resolve(tenant, operation, _) => {
                JobResult::Resolve(Ok(self.resolve_operation(tenant, operation)?))
            }
            WriterJob::Trim(partition, through, _) => {
                JobResult::Trim(Ok(self.trim_some(*partition, *through)?))
            }
            WriterJob::Blank(range, _) => JobResult::Blank(Ok(self.blank_some(range)?)),
            WriterJob::Migrate(schema, how, _) => {
                let changes = migrate::run(self.connection, &self.path, schema, *how)?;
                self.migrated |= *how != Migrate::Show && !changes.is_empty();
                JobResult::Migrate(Ok(changes))
            }
            WriterJob::Checkpoint | WriterJob::Scrub(_) => JobResult::Checkpoint,
        })
    }

    /// Decides and applies a plan. The inner error concerns this plan alone and occurred before it wrote anything.
    fn apply(&mut self, ready: &PreparedPlan) -> Result<Result<Commit, StoreError>, StoreError> {
        let plan = &ready.plan;
        let now = self.clock.now();
        let mut current = Vec::with_capacity(plan.steps().len());
        for address in plan.addresses() {
            match self.row(&address) {
                Ok(row) => current.push(row),
                Err(error) if fault::is_global(&error) => return Err(error),
                Err(error) => return Ok(Err(error)),
            }
        }
        let effect = match eval::decide(plan, now, &current) {
            Ok(Decision::Apply(effect)) => effect,
            Ok(Decision::Refuse(refused)) => {
                return self.first_outcome_or(plan, Ok(Commit::Refused(refused)));
            }
            Err(too_large) => return self.first_outcome_or(plan, Err(too_large)),
        };
        let mut record = None;
        if plan.entry().is_some() {
            let unplaced = Record::of(plan, now, effect.events);
            match self.append_all(unplaced, ready)? {
                Some(appended) => record = Some(appended),
                None => {
                    let first = self.find_operation(plan.tenant(), plan.operation())?;
                    let first = first.ok_or_else(|| {
                        StoreError::corrupt(
                            self.path.display().to_string(),
                            "log record found by index but not by key",
                        )
                    })?;
                    return Ok(Ok(Commit::of_record(first)));
                }
            }
        }
        for ((step, before), after) in plan.steps().iter().zip(&current).zip(&effect.rows) {
            self.write(plan, step, before.as_ref(), after.as_ref())?;
        }
        let rows = if plan.returns_rows() { effect.rows } else { Vec::new() };
        Ok(Ok(Commit::Applied(Applied { record, rows, repeated: false })))
    }

    /// The outcome of a plan that cannot be applied now: a retry of an applied operation gets the first outcome.
    fn first_outcome_or(
        &self,
        plan: &Plan,
        otherwise: Result<Commit, StoreError>,
    ) -> Result<Result<Commit, StoreError>, StoreError> {
        let first = match plan.entry() {
            Some(_) => self.find_operation(plan.tenant(), plan.operation())?,
            None => None,
        };
        Ok(first.map_or(otherwise, |record| Ok(Commit::of_record(record))))
    }

    fn row(&mut self, address: &Address) -> Result<Option<Row>, StoreError> {
        let select = self.prepared.get(&self.tables.of(address.table()).select);
        let select = select.map_err(|error| reader::unprepared(&self.path, address.table(), &error))?;
        reader::row_at(select, &self.path, address)
    }

    /// Writes one decided step.
    fn write(
        &mut self,
        plan: &Plan,
        step: &Step,
        before: Option<&Row>,
        after: Option<&Row>,
    ) -> Result<(), StoreError> {
        let fail = |error: rusqlite::Error| fault::from_sqlite(&self.path, &error);
        let tenant = plan.tenant().as_str();
        let sql = self.tables.of(&step.table);
        let changed = match (step.verb, before, after) {
            (Verb::Put, None, Some(row)) => {
                let insert = self.prepared.get(&sql.insert).map_err(fail)?;
                insert.raw_bind_parameter(1, tenant).map_err(fail)?;
                for (place, value) in row.values().iter().enumerate() {
                    insert.raw_bind_parameter(place + 2, Bind(value)).map_err(fail)?;
                }
                insert.raw_bind_parameter(row.values().len() + 2, row.version()).map_err(fail)?;
                insert.raw_execute().map_err(fail)?
            }
            (Verb::Put, Some(_), Some(row)) => {
                let update = self.prepared.get(sql.update_of(&step.assignments)).map_err(fail)?;
                for (place, assignment) in step.assignments.iter().enumerate() {
                    let Some(value) = row.get(&assignment.column) else {
                        return Err(bug!("{row} has no column {}", assignment.column).into());
                    };
                    update.raw_bind_parameter(place + 1, Bind(value)).map_err(fail)?;
                }
                let assigned = step.assignments.len();
                update.raw_bind_parameter(assigned + 1, row.version()).map_err(fail)?;
                update.raw_bind_parameter(assigned + 2, tenant).map_err(fail)?;
                for (place, part) in step.key.iter().enumerate() {
                    update.raw_bind_parameter(assigned + 3 + place, Bind(part)).map_err(fail)?;
                }
                update.raw_execute().map_err(fail)?
            }
            (Verb::Delete, Some(_), _) => {
                let delete = self.prepared.get(&sql.delete).map_err(fail)?;
                delete.raw_bind_parameter(1, tenant).map_err(fail)?;
                for (place, part) in step.key.iter().enumerate() {
                    delete.raw_bind_parameter(place + 2, Bind(part)).map_err(fail)?;
                }
                delete.raw_execute().map_err(fail)?
            }
            // An assert, or a remove that found nothing.
            _ => return Ok(()),
        };
        if changed != 1 {
            // The row was read in this transaction, so no other writer can have changed it.
            let place = format!("{} in {}", step.table, self.path.display());
            let expected = if step.expect == Expect::Absent { "an insert" } else { "a write by key" };
            return Err(StoreError::corrupt(place, format!("{expected} changed {changed} rows")));
        }
        Ok(())
    }

    /// Appends a plan's record, and those that it leaves in further partitions; `None` if its operation id is taken.
    fn append_all(&mut self, record: Record, ready: &PreparedPlan) -> Result<Option<Record>, StoreError> {
        if ready.parts.is_empty() {
            return self.append(record, ready.events.as_deref(), ready.partition);
        }
        let unwritten =
            |error: serde_json::Error| StoreError::corrupt("the events of a plan", error.to_string());
        let events = write_events(&record.events, &ready.parts).map_err(unwritten)?;
        let Some(whole) = self.append(record, Some(&events), ready.partition)? else { return Ok(None) };
        let mut also_at = Vec::with_capacity(ready.parts.len());
        for part in &ready.parts {
            let bounds = self.bounds.get(part.partition as usize);
            let bounds =
                bounds.ok_or_else(|| StoreError::no_partition(part.partition, self.partitions as usize))?;
            let at = Position { partition: part.partition, offset: bounds.newest + 1 };
            let operation = part_operation(&whole.operation, at);
            let of_part = Record { operation, ..part.record(&whole)? };
            let appended = self.append(of_part, None, part.partition)?;
            let taken = || {
                StoreError::corrupt(
                    "the log",
                    format!("a part of operation {} is recorded already", whole.operation),
                )
            };
            also_at.extend(appended.ok_or_else(taken)?.position);
        }
        Ok(Some(Record { also_at, ..whole }))
    }

    /// Appends a record; `None` if its operation id is taken.
    fn append(
        &mut self,
        mut record: Record,
        events: Option<&str>,
        number: u32,
    ) -> Result<Option<Record>, StoreError> {
        let fail = |error: rusqlite::Error| fault::from_sqlite(&self.path, &error);
        let bounds = self
            .bounds
            .get_mut(number as usize)
            .ok_or_else(|| StoreError::no_partition(number, self.partitions as usize))?;
        let events = match events {
            Some(text) => Cow::Borrowed(text),
            None => Cow::Owned(
                serde_json::to_string(&record.events)
                    .map_err(|error| StoreError::corrupt("the events of a plan", error.to_string()))?,
            ),
        };
        let status = match record.status {
            OperationStatus::Applied => "applied",
            OperationStatus::Aborted => "aborted",
        };
        let insert = self.prepared.get(INSERT_LOG).map_err(fail)?;
        let inserted = insert
            .execute(params![
                pack(number, bounds.newest + 1),
                record.tenant.as_str(),
                record.operation,
                record.resource,
                record.key,
                record.at.micros(),
                record.fingerprint,
                status,
                events
            ])
            .map_err(fail)?;
        if inserted == 0 {
            return Ok(None);
        }
        bounds.newest += 1;
        record.position = Some(Position { partition: number, offset: bounds.newest });
        Ok(Some(record))
    }

    fn find_operation(&self, tenant: &Tenant, operation: &str) -> Result<Option<Record>, StoreError> {
        reader::find_operation(self.connection, &self.path, tenant, operation)
    }

    /// Fences an operation id with an `aborted` record, or returns the outcome that is recorded.
    fn resolve_operation(&mut self, tenant: &Tenant, operation: &str) -> Result<Resolution, StoreError> {
        if let Some(record) = self.find_operation(tenant, operation)? {
            return Ok(Resolution::of_record(record));
        }
        let number = partition_of(tenant, "", operation, self.partitions);
        self.append(Record::aborted(tenant, operation, self.clock.now()), None, number)?;
        Ok(Resolution::Aborted)
    }

    /// Blanks events in up to as many records as the range says.
    fn blank_some(&mut self, range: &BlankRange) -> Result<BlankedPage, StoreError> {
        let fail = |error: rusqlite::Error| fault::from_sqlite(&self.path, &error);
        let newest = self.bounds.get(range.partition as usize).map(|bounds| bounds.newest);
        let newest =
            newest.ok_or_else(|| StoreError::no_partition(range.partition, self.partitions as usize))?;
        let [first, last] = [range.after, range.through].map(|at| pack(range.partition, at.min(newest)));
        let text = "SELECT position, tenant, key, events FROM statehouse_log \
                    WHERE position > ?1 AND position <= ?2 ORDER BY position LIMIT ?3";
        let limit = range.limit.clamp(1, PAGE_MAX);
        let stored = |row: &rusqlite::Row<'_>| {
            Ok((
                row.get::<_, i64>(0)?,
                row.get::<_, String>(1)?,
                row.get::<_, String>(2)?,
                row.get::<_, String>(3)?,
            ))
        };
        let mut select = self.connection.prepare_cached(text).map_err(fail)?;
        let found = select
            .query_map(params![first, last, limit as i64], stored)
            .and_then(Iterator::collect::<Result<Vec<_>, _>>)
            .map_err(fail)?;
        let text = "UPDATE statehouse_log SET events = ?2 WHERE position = ?1";
        let mut update = self.connection.prepare_cached(text).map_err(fail)?;
        let corrupt = |why: String| StoreError::corrupt(format!("the log in {}", self.path.display()), why);
        let mut page = BlankedPage { reached: range.through, events: 0 };
        if let Some((newest, ..)) = found.last().filter(|_| found.len() == limit) {
            page.reached = unpack(*newest).1;
        }
        for (position, tenant, key, events) in found {
            let tenant = Tenant::new(tenant).map_err(|error| corrupt(error.to_string()))?;
            let record = BlankedRecord { tenant: &tenant, key: &key, offset: unpack(position).1 };
            let left = range.blank_stored(record, &events).map_err(|error| corrupt(error.to_string()))?;
            if let Some((text, blanked)) = left {
                update.execute(params![position, text]).map_err(fail)?;
                page.events += blanked;
            }
        }
        Ok(page)
    }

    /// Deletes up to [`TRIM_MAX`] records, but never the newest. Returns whether more are left to be deleted.
    fn trim_some(&mut self, partition: u32, through: u64) -> Result<bool, StoreError> {
        let fail = |error: rusqlite::Error| fault::from_sqlite(&self.path, &error);
        let bounds = self
            .bounds
            .get_mut(partition as usize)
            .ok_or_else(|| StoreError::no_partition(partition, self.partitions as usize))?;
        let last = through.min(bounds.newest.saturating_sub(1));
        let mut delete =
            self.connection.prepare_cached("DELETE FROM statehouse_log WHERE position = ?1").map_err(fail)?;
        for _ in 0..TRIM_MAX {
            if bounds.oldest > last {
                break;
            }
            delete.execute([pack(partition, bounds.oldest)]).map_err(fail)?;
            bounds.oldest += 1;
        }
        Ok(bounds.oldest <= last)
    }
}

/// How many records one transaction deletes, so that trimming a long log does not delay other jobs.
const TRIM_MAX: u64 = 1_000;

/// Appends to the log, unless the operation id is taken.
pub(crate) const INSERT_LOG: &str = "INSERT INTO statehouse_log \
     (position, tenant, operation, resource, key, at, fingerprint, fate, events) \
     VALUES (?1, ?2, ?3, ?4, ?5, ?6, ?7, ?8, ?9) ON CONFLICT (tenant, operation) DO NOTHING";

/// Sends a caller its result. A caller that has been cancelled does not receive it.
fn reply(job: WriterJob, done: JobResult) {
    match (job, done) {
        (WriterJob::Commit(_, reply), JobResult::Commit(result)) => drop(reply.send(result)),
        (WriterJob::Resolve(_, _, reply), JobResult::Resolve(result)) => drop(reply.send(result)),
        (WriterJob::Trim(_, _, reply), JobResult::Trim(result)) => drop(reply.send(result)),
        (WriterJob::Blank(_, reply), JobResult::Blank(result)) => drop(reply.send(result)),
        (WriterJob::Migrate(_, _, reply), JobResult::Migrate(result)) => drop(reply.send(result)),
        (WriterJob::Checkpoint, _) => {}
        (job, _) => reply_error(job, bug!("the result of a job is of another kind than the job").into()),
    }
}

fn reply_error(job: WriterJob, error: StoreError) {
    match job {
        WriterJob::Commit(_, reply) => drop(reply.send(Err(error))),
        WriterJob::Resolve(_, _, reply) => drop(reply.send(Err(error))),
        WriterJob::Trim(_, _, reply) => drop(reply.send(Err(error))),
        WriterJob::Blank(_, reply) => drop(reply.send(Err(error))),
        WriterJob::Scrub(reply) => drop(reply.send(Err(error))),
        WriterJob::Migrate(_, _, reply) => drop(reply.send(Err(error))),
        WriterJob::Checkpoint => {}
    }
}
