//! Writers: each owns a connection and commits queued plans in one transaction.
//!
//! A lone plan is one compiled statement, which is a transaction by itself. Queued plans of one shape are one statement too: one round
//! trip ([`crate::compile`]). All other plans, and those for which a compiled statement did nothing, are a batch: one round trip to
//! lock and read, one to write and commit ([`crate::batch`]).
//!
//! **Certain outcomes.** The server's answer to a statement is certain. An error means that the transaction is rolled back, because the
//! commit that is queued after it can only confirm that. A transaction that conflicts with others is retried from the start. A plan
//! that cannot succeed is reported to its caller, and the other plans of its transaction are run one by one. If the connection is lost
//! before the commit was sent, nothing was done, and the batch is retried on a new connection.
//!
//! **Unknown outcomes.** If the commit was sent and its answer is lost, the plans that would have been applied have an unknown outcome.
//! Plans that were refused because of them were decided on a state that may not exist; their callers get `Unavailable`.

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;
use std::sync::atomic::Ordering;

use statehouse_store::bug;
use statehouse_store::log::RecordView;
use statehouse_store::{Applied, Commit, Plan, Record, StoreError, Tenant};

use crate::batch::Batch;
use crate::compile::{PlanOutcome, Set, UniformMode, is_uniform, lookup_settings_sql};
use crate::connection::{Answers, Closing, DatabaseCall, LazyConnection, Session};
use crate::fault::PostgresFault;
use crate::order::place;
use crate::queue::{CommitResult, PLANS_MAX, Queue, QueuedPlan};
use crate::shape::{compilable, inserts};
use crate::shared::Shared;
use crate::sql::{ordinal_at, row_at};
use crate::statements::{
    PLANNER, Placeholders, bases_at, clock_at, clock_call, lock_calls, record_at, records_of, write_calls,
};
use crate::tenancy::TransactionScope;

/// How often a batch is run before its callers get an error.
const ATTEMPTS: u32 = 12;
/// Steps of one shape that justify a transaction without the other queued plans, at least.
const UNIFORM_MIN: usize = 16;
/// The lock timeout of a plan that is run by itself, after its batch had to wait for a lock too long.
const SHORT_LOCK_TIMEOUT_MS: u128 = 250;

/// How often a writer yields to other tasks while they queue more plans.
const YIELDS_MAX: usize = 64;

/// The result of one run of a batch.
enum Run {
    /// Every plan has its outcome.
    Done(Vec<Result<Commit, StoreError>>),
    /// Nothing was done.
    Failed(PostgresFault),
    /// Nothing was done, because a row that was assumed to be absent may exist ([`crate::assumed_absent`]).
    AssumptionFailed,
}

/// Which rows a run reads.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum RowReads {
    /// All but those that are inserted.
    SkipInserted,
    /// All.
    All,
}

/// The result of running a plan as one statement.
#[expect(clippy::large_enum_variant, reason = "it is returned once and taken apart at once")]
pub(crate) enum StatementAttempt {
    /// It has its outcome.
    Done(CommitResult),
    /// The statement did nothing, and why is not known.
    LeftOpen,
    /// It was not run.
    NotMade,
}

/// A writer's connection and its queue. The holder of `turn` may use the connection.
#[derive(Default)]
pub(crate) struct WriterLane {
    pub queue: Queue,
    connection: LazyConnection,
    turn: tokio::sync::Mutex<()>,
}

impl WriterLane {
    /// The turn, if it is free.
    fn turn(&self) -> Option<tokio::sync::MutexGuard<'_, ()>> {
        self.turn.try_lock().ok()
    }

    /// Closes the connection.
    pub(crate) async fn close(&self) {
        self.connection.close().await;
    }
}

/// The task of one lane: commits its queued plans until the queue is closed.
pub(crate) async fn work(shared: Arc<Shared>, lane: usize) {
    let Some(lane) = shared.lanes.get(lane) else { return };
    while lane.queue.wait().await {
        let turn = lane.turn.lock().await;
        loop {
            let jobs = lane.queue.take();
            if jobs.is_empty() {
                break;
            }
            let outcomes = shared.on(lane).commit_queued(&jobs).await;
            let mut deferred = Vec::new();
            for (job, outcome) in jobs.into_iter().zip(outcomes) {
                match outcome {
                    // A cancelled call has no receiver.
                    Some(outcome) => drop(job.reply.send(outcome)),
                    None => deferred.push(QueuedPlan { left_open: false, ..job }),
                }
            }
            lane.queue.put_back(deferred);
            // The callers that were just answered often commit again at once. The turn is kept until they have. Otherwise the
            // first of them would take it for a lone plan, ahead of each batch.
            for _ in 0..YIELDS_MAX {
                let before = lane.queue.len();
                tokio::task::yield_now().await;
                let waiting = lane.queue.len();
                if waiting == before || waiting >= PLANS_MAX {
                    break;
                }
            }
        }
        drop(turn);
    }
}

/// The result of a plan that was decided on rows.
fn decided(outcome: Result<Commit, StoreError>) -> CommitResult {
    outcome.map(PlanOutcome::Decided)
}

/// Commits plans on the connection of a lane whose turn is held.
pub(crate) struct WriterSession<'s> {
    shared: &'s Shared,
    connection: &'s LazyConnection,
}

impl Shared {
    fn on<'s>(&'s self, lane: &'s WriterLane) -> WriterSession<'s> {
        WriterSession { shared: self, connection: &lane.connection }
    }

    /// Commits a plan on the caller's task if a lane is idle, without the cost of a queue and a change of tasks. A lone caller
    /// uses the first lane, whose connection is warm. The plan's own lane is used if the first one is busy. Dropping this future
    /// leaves the connection usable, because the whole transaction is sent at once.
    pub(crate) async fn commit_directly(&self, own: &WriterLane, plan: &Plan) -> StatementAttempt {
        let idle = |lane: &&WriterLane| lane.queue.is_empty();
        let lanes = self.lanes.first().into_iter().chain([own]).filter(idle);
        let turn = |lane| WriterLane::turn(lane).map(|turn| (lane, turn));
        let Some((lane, _turn)) = lanes.filter(|_| idle(&own)).find_map(turn) else {
            return StatementAttempt::NotMade;
        };
        self.on(lane).commit_statement(plan, None).await
    }
}

impl WriterSession<'_> {
    /// Commits queued plans. A plan without a result was not run and is queued again.
    async fn commit_queued(&self, jobs: &[QueuedPlan]) -> Vec<Option<CommitResult>> {
        let plans: Vec<Plan> = jobs.iter().map(|job| job.plan.clone()).collect();
        let events: Vec<Option<&str>> = jobs.iter().map(|job| job.events.as_deref()).collect();
        self.commit_plans(&plans, &events, jobs.iter().any(|job| job.left_open)).await
    }

    /// Commits plans; `left_open` if a compiled statement was tried for one of them and did nothing.
    async fn commit_plans(
        &self,
        plans: &[Plan],
        events: &[Option<&str>],
        left_open: bool,
    ) -> Vec<Option<CommitResult>> {
        let first_events = events.first().copied().flatten();
        if let [plan] = plans
            && !left_open
            && let StatementAttempt::Done(outcome) = self.commit_statement(plan, first_events).await
        {
            return vec![Some(outcome)];
        }
        // A plan of many rows gets a transaction of its own. So do the plans before the first one of them.
        let is_long = |plan: &Plan| plan.steps().len() >= UNIFORM_MIN && is_uniform(plan);
        if let [first, others @ ..] = plans
            && !left_open
            && !others.is_empty()
        {
            if is_long(first)
                && let StatementAttempt::Done(outcome) = self.commit_uniform(first, first_events).await
            {
                return std::iter::once(Some(outcome)).chain(others.iter().map(|_| None)).collect();
            }
            if !is_long(first)
                && let Some(before) = plans.iter().position(is_long)
            {
                let (plans, deferred) = plans.split_at(before);
                let mut outcomes = Box::pin(self.commit_plans(plans, events, left_open)).await;
                outcomes.extend(deferred.iter().map(|_| None));
                return outcomes;
            }
        }
        if plans.len() > 1
            && !left_open
            && let Some(outcomes) = self.commit_same_shape(plans, events).await
        {
            return outcomes;
        }
        self.commit_by_rows(plans).await.into_iter().map(|outcome| Some(decided(outcome))).collect()
    }

    /// Commits plans by deciding them on locked rows.
    async fn commit_by_rows(&self, plans: &[Plan]) -> Vec<Result<Commit, StoreError>> {
        let lock_timeout_ms = self.shared.options.lock_timeout.as_millis();
        match self.commit_batch(plans, lock_timeout_ms).await {
            Ok(outcomes) => outcomes,
            Err(fault) => self.commit_separately(plans, fault).await,
        }
    }

    /// Runs a plan as one statement, if it is one that can be compiled.
    async fn commit_statement(&self, plan: &Plan, events: Option<&str>) -> StatementAttempt {
        let shared = self.shared;
        if compilable(plan).is_none() {
            return self.commit_uniform(plan, events).await;
        }
        let Ok(session) = self.connection.session(&shared.writer_connector).await else {
            return StatementAttempt::NotMade;
        };
        let set = if session.is_set() { Set::Session } else { Set::Nothing };
        let Some(compiled) = shared.compiler().compile(plan, events, set) else {
            return StatementAttempt::NotMade;
        };
        let open = shared.options.role_sql().filter(|_| set == Set::Nothing);
        let answers = session.run_compiled(&compiled.call, open.as_deref()).await;
        match self.compiled_outcomes(answers, |rows| compiled.outcomes(rows)) {
            Some(Ok(outcomes)) => match outcomes.into_iter().next().flatten() {
                Some(settled) => {
                    shared.counters.alone.fetch_add(1, Ordering::Relaxed);
                    StatementAttempt::Done(Ok(settled))
                }
                None => StatementAttempt::LeftOpen,
            },
            Some(Err(why)) => StatementAttempt::Done(Err(StoreError::unknown(plan.operation(), why))),
            None => StatementAttempt::LeftOpen,
        }
    }

    /// Runs a plan of several steps as one statement, if they are all of one shape.
    async fn commit_uniform(&self, plan: &Plan, events: Option<&str>) -> StatementAttempt {
        let shared = self.shared;
        if !is_uniform(plan) {
            return StatementAttempt::NotMade;
        }
        let Ok(session) = self.connection.session(&shared.writer_connector).await else {
            return StatementAttempt::NotMade;
        };
        let set = if session.is_set() { Set::Session } else { Set::Transaction };
        let table = plan.steps().first().map_or("", |step| step.table.name());
        let refused = !shared.uniform_refusals.assumes_absent(table);
        let Some(uniform) = shared.compiler().uniform(plan, events, set, refused) else {
            return StatementAttempt::NotMade;
        };
        let open = (set == Set::Transaction).then(|| self.begin_sql_of_one_shape(std::slice::from_ref(plan)));
        let answers = session.run_compiled(&uniform.call, open.as_deref()).await;
        match self.compiled_outcomes(answers, |rows| Ok(vec![uniform.outcome(rows)?])) {
            Some(Ok(outcomes)) => match outcomes.into_iter().next().flatten() {
                Some(settled) => {
                    shared.counters.uniform.fetch_add(1, Ordering::Relaxed);
                    shared.uniform_refusals.record_success(table);
                    StatementAttempt::Done(Ok(settled))
                }
                None => StatementAttempt::LeftOpen,
            },
            Some(Err(why)) => StatementAttempt::Done(Err(StoreError::unknown(plan.operation(), why))),
            None => {
                shared
                    .uniform_refusals
                    .record_conflict((uniform.way == UniformMode::AtOnce).then_some(table));
                StatementAttempt::LeftOpen
            }
        }
    }

    /// The SQL that begins a transaction of one compiled statement in a session that does not have the settings.
    fn begin_sql_of_one_shape(&self, plans: &[Plan]) -> String {
        let options = &self.shared.options;
        options.begin_sql(
            options.lock_timeout.as_millis(),
            &lookup_settings_sql(),
            &TransactionScope::of_all(plans),
        )
    }

    /// Runs plans of one shape as one statement, and decides those for which it did nothing on locked rows. `None` if they
    /// cannot be compiled together, or the server refused the statement.
    async fn commit_same_shape(
        &self,
        plans: &[Plan],
        events: &[Option<&str>],
    ) -> Option<Vec<Option<CommitResult>>> {
        let shared = self.shared;
        // Several inserts fail together if one of the rows exists.
        let inserted = plans.first().and_then(|plan| plan.steps().first()).filter(|step| inserts(step));
        let inserted = inserted.map(|step| step.table.name());
        if inserted.is_some_and(|table| shared.insert_conflicts.expects_conflict(table)) {
            return None;
        }
        let session = self.connection.session(&shared.writer_connector).await.ok()?;
        let set = if session.is_set() { Set::Session } else { Set::Transaction };
        let compiled = shared.compiler().compile_same_shape(plans, events, set)?;
        let open = (set == Set::Transaction).then(|| self.begin_sql_of_one_shape(plans));
        let answers = session.run_compiled(&compiled.call, open.as_deref()).await;
        if matches!(answers.rows, Err(PostgresFault::Conflict(_))) {
            shared.insert_conflicts.record_conflict(inserted);
        }
        let answered = self.compiled_outcomes(answers, |rows| compiled.outcomes(rows))?;
        let mut settled: Vec<Option<CommitResult>> = plans.iter().map(|_| None).collect();
        let mut set = |index: usize, outcome: CommitResult| {
            if let Some(settled) = settled.get_mut(index) {
                *settled = Some(outcome);
            }
        };
        let mut left: Vec<(usize, Plan)> = Vec::new();
        match answered {
            Ok(outcomes) => {
                for (index, outcome) in compiled.indexes.iter().zip(outcomes) {
                    match outcome {
                        Some(outcome) => set(*index, Ok(outcome)),
                        None => left.extend(plans.get(*index).map(|plan| (*index, plan.clone()))),
                    }
                }
                let applied = compiled.indexes.len() - left.len();
                shared.counters.alike.fetch_add(applied as u64, Ordering::Relaxed);
            }
            Err(why) => {
                for index in &compiled.indexes {
                    let operation = plans.get(*index).map_or("", Plan::operation);
                    set(*index, Err(StoreError::unknown(operation, why.as_str())));
                }
            }
        }
        if !left.is_empty() {
            let (indexes, left): (Vec<usize>, Vec<Plan>) = left.into_iter().unzip();
            for (index, outcome) in indexes.into_iter().zip(self.commit_by_rows(&left).await) {
                set(index, decided(outcome));
            }
        }
        Some(settled)
    }

    /// The outcomes of a compiled statement for its plans; an error if they are unknown; `None` if it did nothing.
    fn compiled_outcomes(
        &self,
        answers: Answers,
        outcomes: impl FnOnce(&[tokio_postgres::Row]) -> Result<Vec<Option<PlanOutcome>>, StoreError>,
    ) -> Option<Result<Vec<Option<PlanOutcome>>, String>> {
        let counters = &self.shared.counters;
        match (answers.rows, answers.closing) {
            (Ok(rows), Closing::Done) => {
                // If the answer of a committed statement cannot be read, its outcome is unknown.
                let Some(rows) = rows.first() else {
                    return Some(Err(bug!("a statement without an answer").to_string()));
                };
                let outcomes = match outcomes(rows) {
                    Ok(outcomes) => outcomes,
                    Err(error) => return Some(Err(error.to_string())),
                };
                let open = outcomes.iter().filter(|outcome| outcome.is_none()).count();
                counters.left_open.fetch_add(open as u64, Ordering::Relaxed);
                self.shared.publish(outcomes.iter().flatten().flat_map(PlanOutcome::positions));
                Some(Ok(outcomes))
            }
            (Ok(_) | Err(PostgresFault::Lost(_)), Closing::Unknown(why)) => Some(Err(why)),
            // The server refused the statement, or nothing was sent.
            _ => {
                counters.compiled_faults.fetch_add(1, Ordering::Relaxed);
                None
            }
        }
    }

    /// Runs plans in one transaction, with retries after conflicts.
    async fn commit_batch(
        &self,
        plans: &[Plan],
        lock_timeout_ms: u128,
    ) -> Result<Vec<Result<Commit, StoreError>>, PostgresFault> {
        let mut attempt = 0;
        let mut reads = RowReads::SkipInserted;
        loop {
            let session = match self.connection.session(&self.shared.writer_connector).await {
                Ok(session) => session,
                Err(error) => return Ok(plans.iter().map(|_| Err(error.clone())).collect()),
            };
            let run = self.run(&session, plans, lock_timeout_ms, reads).await;
            reads = RowReads::All;
            match run {
                Run::Done(outcomes) => {
                    self.shared.counters.batches.fetch_add(1, Ordering::Relaxed);
                    self.shared.counters.batched.fetch_add(plans.len() as u64, Ordering::Relaxed);
                    return Ok(outcomes);
                }
                Run::Failed(fault) if fault.is_passing() && attempt + 1 < ATTEMPTS => {
                    self.shared.counters.reruns.fetch_add(1, Ordering::Relaxed);
                    self.shared.connector.back_off_after_conflict(attempt).await;
                }
                Run::Failed(fault) => return Err(fault),
                // No other transaction has to finish first, so the retry follows at once.
                Run::AssumptionFailed => {
                    self.shared.counters.doubted.fetch_add(1, Ordering::Relaxed);
                    continue;
                }
            }
            attempt += 1;
        }
    }

    /// Runs plans one by one, because one of them made the whole batch fail.
    async fn commit_separately(
        &self,
        plans: &[Plan],
        fault: PostgresFault,
    ) -> Vec<Result<Commit, StoreError>> {
        let concerns_one = matches!(
            fault,
            PostgresFault::Locked(_)
                | PostgresFault::NoTable(_)
                | PostgresFault::Schema(_)
                | PostgresFault::Data(_)
        );
        if plans.len() == 1 || !concerns_one {
            let failed = |plan: &Plan| {
                let tables: Vec<&str> = plan.steps().iter().map(|step| step.table.name()).collect();
                Err(fault.clone().into_error(&tables))
            };
            return plans.iter().map(failed).collect();
        }
        let mut outcomes = Vec::with_capacity(plans.len());
        // A plan that needs a row for which an earlier plan timed out does not wait for it again.
        let mut held: HashMap<Vec<u8>, StoreError> = HashMap::new();
        for plan in plans {
            let rows =
                || plan.steps().iter().map(|step| place(step.table.name(), 0, plan.tenant(), &step.key));
            if let Some(error) = rows().find_map(|row| held.get(&row)) {
                outcomes.push(Err(error.clone()));
                continue;
            }
            let alone = std::slice::from_ref(plan);
            match self.commit_batch(alone, SHORT_LOCK_TIMEOUT_MS).await {
                Ok(outcome) => outcomes.extend(outcome),
                Err(fault) => {
                    if matches!(fault, PostgresFault::Locked(_)) {
                        held.extend(rows().map(|row| (row, StoreError::unavailable(fault.said()))));
                    }
                    outcomes.extend(Box::pin(self.commit_separately(alone, fault)).await);
                }
            }
        }
        outcomes
    }

    async fn run(&self, session: &Session, plans: &[Plan], lock_timeout_ms: u128, reads: RowReads) -> Run {
        let shared = self.shared;
        let mut batch = Batch::of(plans);
        if reads == RowReads::SkipInserted {
            batch.assume_absent(|table| shared.insert_conflicts.assumes_absent(table));
        }
        let open = shared.options.begin_sql(lock_timeout_ms, PLANNER, &TransactionScope::of_all(plans));
        match self.read(session, &open, &mut batch).await {
            Ok(Ok(())) => {}
            Ok(Err(error)) => {
                session.execute_unawaited("rollback").await;
                return Run::Done(plans.iter().map(|_| Err(error.clone())).collect());
            }
            Err(fault) => {
                session.execute_unawaited("rollback").await;
                return Run::Failed(fault);
            }
        }
        shared.insert_conflicts.learn(&batch);
        let unverified = batch.unverified();
        if !unverified.is_empty() {
            session.execute_unawaited("rollback").await;
            shared.insert_conflicts.record_conflict(unverified);
            return Run::AssumptionFailed;
        }
        if !batch.applies() {
            session.execute_unawaited("rollback").await;
            return Run::Done(batch.committed(&BTreeMap::new()));
        }
        self.write(session, batch).await
    }

    /// Locks and reads the rows, looks up the operations, reads the clock, and decides. The operations are looked up after the
    /// rows are locked: a retry that waited for its first attempt then finds the record.
    async fn read(
        &self,
        session: &Session,
        open: &str,
        batch: &mut Batch<'_>,
    ) -> Result<Result<(), StoreError>, PostgresFault> {
        let shared = self.shared;
        let mut calls = lock_calls(&shared.names, batch);
        let rows_to_read = batch.rows_to_read();
        let remembers = batch.operations().next().is_some();
        if remembers {
            calls.push(records_of(&shared.names, batch.operations()));
        }
        if shared.options.clock.is_none() {
            calls.push(clock_call());
        }
        let mut answers = session.run(Some(open), &calls, None).await.rows?;
        drop(calls);
        let unanswered = || StoreError::from(bug!("a statement without an answer"));
        let mut decide = || {
            let now = match &shared.options.clock {
                Some(clock) => clock.now(),
                None => clock_at(&answers.pop().ok_or_else(unanswered)?)?,
            };
            let mut recorded: HashMap<(Tenant, String), Record> = HashMap::new();
            if remembers {
                for row in answers.pop().ok_or_else(unanswered)? {
                    let record = record_at(&row, 0, RecordView::Operation)?;
                    recorded.insert((record.tenant.clone(), record.operation.clone()), record);
                }
            }
            for (numbers, rows) in rows_to_read.iter().zip(&answers) {
                for row in rows {
                    let number = numbers.get(ordinal_at(row, 0)?).copied();
                    let Some((number, slot)) = number.and_then(|number| Some((number, batch.slot(number)?)))
                    else {
                        return Err(bug!("a row that the batch did not ask for").into());
                    };
                    let found = row_at(row, 1, slot.table, slot.tenant)?;
                    batch.found(number, found);
                }
            }
            batch.decide(now, shared.partitions, recorded);
            Ok(())
        };
        Ok(decide())
    }

    async fn write(&self, session: &Session, batch: Batch<'_>) -> Run {
        let shared = self.shared;
        let placeholders = Placeholders::new();
        let calls: Vec<DatabaseCall<'_>> = write_calls(&shared.names, &batch, &placeholders);
        let answers = session.run(None, &calls, Some("commit")).await;
        drop(calls);
        match (answers.rows, answers.closing) {
            (Ok(rows), Closing::Done) => {
                let mut bases = BTreeMap::new();
                if !batch.counts().is_empty() {
                    let heads = rows.last().map(Vec::as_slice).unwrap_or_default();
                    bases = match bases_at(heads) {
                        Ok(bases) => bases,
                        Err(error) => return Run::Done(batch.unknown(&error.to_string())),
                    };
                }
                shared.counters.unread.fetch_add(batch.unread() as u64, Ordering::Relaxed);
                let outcomes = batch.committed(&bases);
                let records = outcomes.iter().filter_map(|outcome| match outcome {
                    Ok(Commit::Applied(Applied { record: Some(record), .. })) => Some(record),
                    _ => None,
                });
                shared.publish(
                    records.flat_map(|record| record.position.into_iter().chain(record.also_at.clone())),
                );
                Run::Done(outcomes)
            }
            (Ok(_) | Err(PostgresFault::Lost(_)), Closing::Unknown(why)) => Run::Done(batch.unknown(&why)),
            (Err(PostgresFault::Conflict(_)), _) if batch.unread() > 0 => Run::AssumptionFailed,
            (Err(fault), _) => Run::Failed(fault),
            // ReadStatements without a closing are not sent from here.
            (Ok(_), Closing::Unsent) => {
                Run::Failed(PostgresFault::Busy("the transaction was not closed".into()))
            }
        }
    }
}
