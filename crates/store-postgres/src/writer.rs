//! Writers: each owns a connection, takes the plans that wait, and settles them in one transaction.
//!
//! A plan that is alone goes as one compiled statement, which is a transaction by itself, and plans that wait together
//! and are of one shape go as one too: one round trip ([`crate::compile`]). All others, and whatever a compiled
//! statement left open, go as a batch: one round trip to lock and read, one to write and commit ([`crate::batch`]).
//!
//! **What is certain.** The server's answer to a statement is. An error means that the transaction is rolled back,
//! because the commit queued behind it can only confirm that. What conflicts with others is run again, from the
//! start; what cannot succeed is told to its caller, and the plans that were with it are run one by one.
//! As long as no commit was sent, the loss of a connection is certain too: nothing was done, and the
//! batch is run again on a new one.
//!
//! **What is not.** When the commit was sent and its answer is lost, the plans that would have been applied have an
//! unknown outcome, and the plans that were refused on the strength of those have been refused by a state that may
//! not exist: they are told to try again.

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;
use std::sync::atomic::Ordering;

use statehouse_store::log::RecordView;
use statehouse_store::{Applied, Commit, Plan, Record, StoreError, Tenant};

use crate::batch::Batch;
use crate::compile::{Set, Settled, Way, is_uniform, lookup_words};
use crate::fault::Fault;
use crate::link::{Answers, Call, Closing, Link, Session};
use crate::order::place;
use crate::queue::{Job, PLANS_MAX, Queue, Told};
use crate::shape::{compilable, inserts};
use crate::shared::Shared;
use crate::sql::{int_at, row_at};
use crate::statements::{
    PLANNER, Placeholders, bases_at, clock_at, clock_call, lock_calls, record_at, records_of, write_calls,
};
use crate::tenancy::Scope;

/// How often a batch is run before its callers are told that it did not work out.
const ATTEMPTS: u32 = 12;
/// So many steps of one shape are worth a transaction without the plans that wait with them.
const UNIFORM_MIN: usize = 16;
/// How long a plan that is run by itself, because somebody's lock held up its batch, waits for that lock.
const SHORT_LOCK_TIMEOUT_MS: u128 = 250;

/// How often a writer lets others go first, as long as they come with more plans.
const YIELDS_MAX: usize = 64;

/// What came of one run of a batch.
enum Run {
    /// Every plan has its outcome.
    Settled(Vec<Result<Commit, StoreError>>),
    /// Nothing was done.
    Failed(Fault),
    /// Nothing was done, because a row that was not looked for may be there ([`crate::trust`]).
    Doubtful,
}

/// Which rows a run looks for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Looks {
    /// Not for those that are to be inserted.
    Few,
    /// For all.
    All,
}

/// What came of running a plan as one statement.
#[expect(clippy::large_enum_variant, reason = "it is returned once and taken apart at once")]
pub(crate) enum Attempt {
    /// It has its outcome.
    Settled(Told),
    /// The statement did nothing, and why is not known.
    LeftOpen,
    /// It was not run.
    NotMade,
}

/// A writer's connection and the plans that wait for it. Whoever holds the turn may use the connection.
#[derive(Default)]
pub(crate) struct Lane {
    pub queue: Queue,
    link: Link,
    turn: tokio::sync::Mutex<()>,
}

impl Lane {
    /// The turn, if nobody has it.
    fn turn(&self) -> Option<tokio::sync::MutexGuard<'_, ()>> {
        self.turn.try_lock().ok()
    }

    /// Lets go of the connection.
    pub(crate) async fn close(&self) {
        self.link.close().await;
    }
}

/// Settles the plans of one lane until its queue is closed.
pub(crate) async fn work(shared: Arc<Shared>, lane: usize) {
    let Some(lane) = shared.lanes.get(lane) else { return };
    while lane.queue.wait().await {
        let turn = lane.turn.lock().await;
        loop {
            let jobs = lane.queue.take();
            if jobs.is_empty() {
                break;
            }
            let outcomes = shared.on(lane).settle_jobs(&jobs).await;
            let mut deferred = Vec::new();
            for (job, outcome) in jobs.into_iter().zip(outcomes) {
                match outcome {
                    // Who no longer waits does not hear it.
                    Some(outcome) => drop(job.reply.send(outcome)),
                    None => deferred.push(Job { left_open: false, ..job }),
                }
            }
            lane.queue.put_back(deferred);
            // Those who were just answered are about to ask for more. The turn is kept until they have, or each
            // batch would find one of them ahead of it, alone.
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

/// An outcome that was decided on rows, as callers are told.
fn decided(outcome: Result<Commit, StoreError>) -> Told {
    outcome.map(Settled::Decided)
}

/// A way to settle plans: in one lane, while holding its turn.
pub(crate) struct Desk<'s> {
    shared: &'s Shared,
    link: &'s Link,
}

impl Shared {
    fn on<'s>(&'s self, lane: &'s Lane) -> Desk<'s> {
        Desk { shared: self, link: &lane.link }
    }

    /// Settles a plan at once if nobody else is writing: without a queue and the change of tasks that it takes. A lone
    /// caller stays in the first lane, whose connection is warm; the plan's own is for when that one is taken.
    /// Dropping this midway leaves the connection in order, because the whole transaction is queued in one go.
    pub(crate) async fn settle_at_once(&self, own: &Lane, plan: &Plan) -> Attempt {
        let idle = |lane: &&Lane| lane.queue.is_empty();
        let lanes = self.lanes.first().into_iter().chain([own]).filter(idle);
        let turn = |lane| Lane::turn(lane).map(|turn| (lane, turn));
        let Some((lane, _turn)) = lanes.filter(|_| idle(&own)).find_map(turn) else {
            return Attempt::NotMade;
        };
        self.on(lane).settle_alone(plan, None).await
    }
}

impl Desk<'_> {
    /// Settles the plans of jobs. One without an outcome was not run, and is to go with the next ones.
    async fn settle_jobs(&self, jobs: &[Job]) -> Vec<Option<Told>> {
        let plans: Vec<Plan> = jobs.iter().map(|job| job.plan.clone()).collect();
        let events: Vec<Option<&str>> = jobs.iter().map(|job| job.events.as_deref()).collect();
        self.settle(&plans, &events, jobs.iter().any(|job| job.left_open)).await
    }

    /// Settles plans; `left_open` if a compiled statement did nothing for one of them already.
    async fn settle(&self, plans: &[Plan], events: &[Option<&str>], left_open: bool) -> Vec<Option<Told>> {
        let first_events = events.first().copied().flatten();
        if let [plan] = plans
            && !left_open
            && let Attempt::Settled(outcome) = self.settle_alone(plan, first_events).await
        {
            return vec![Some(outcome)];
        }
        // A plan of many rows is worth a transaction of its own. So are those that wait before the first one of them.
        let is_long = |plan: &Plan| plan.steps().len() >= UNIFORM_MIN && is_uniform(plan);
        if let [first, others @ ..] = plans
            && !left_open
            && !others.is_empty()
        {
            if is_long(first)
                && let Attempt::Settled(outcome) = self.settle_uniform(first, first_events).await
            {
                return std::iter::once(Some(outcome)).chain(others.iter().map(|_| None)).collect();
            }
            if !is_long(first)
                && let Some(before) = plans.iter().position(is_long)
            {
                let (plans, deferred) = plans.split_at(before);
                let mut outcomes = Box::pin(self.settle(plans, events, left_open)).await;
                outcomes.extend(deferred.iter().map(|_| None));
                return outcomes;
            }
        }
        if plans.len() > 1
            && !left_open
            && let Some(outcomes) = self.settle_alike(plans, events).await
        {
            return outcomes;
        }
        self.settle_by_rows(plans).await.into_iter().map(|outcome| Some(decided(outcome))).collect()
    }

    /// Settles plans by deciding them on locked rows.
    async fn settle_by_rows(&self, plans: &[Plan]) -> Vec<Result<Commit, StoreError>> {
        let lock_timeout_ms = self.shared.options.lock_timeout.as_millis();
        match self.settle_together(plans, lock_timeout_ms).await {
            Ok(outcomes) => outcomes,
            Err(fault) => self.settle_apart(plans, fault).await,
        }
    }

    /// Runs a plan as one statement, if it is one that can be compiled.
    async fn settle_alone(&self, plan: &Plan, events: Option<&str>) -> Attempt {
        let shared = self.shared;
        if compilable(plan).is_none() {
            return self.settle_uniform(plan, events).await;
        }
        let Ok(session) = self.link.session(&shared.writer_dialer).await else { return Attempt::NotMade };
        let set = if session.is_set() { Set::Session } else { Set::Nothing };
        let Some(compiled) = shared.compiler().one(plan, events, set) else { return Attempt::NotMade };
        let open = shared.options.role_words().filter(|_| set == Set::Nothing);
        let answers = session.run_compiled(&compiled.call, open.as_deref()).await;
        match self.compiled_outcomes(answers, |rows| compiled.outcomes(rows)) {
            Some(Ok(outcomes)) => match outcomes.into_iter().next().flatten() {
                Some(settled) => {
                    shared.counters.alone.fetch_add(1, Ordering::Relaxed);
                    Attempt::Settled(Ok(settled))
                }
                None => Attempt::LeftOpen,
            },
            Some(Err(why)) => Attempt::Settled(Err(StoreError::unknown(plan.operation(), why))),
            None => Attempt::LeftOpen,
        }
    }

    /// Runs a plan of several steps as one statement, if they are all of one shape.
    async fn settle_uniform(&self, plan: &Plan, events: Option<&str>) -> Attempt {
        let shared = self.shared;
        if !is_uniform(plan) {
            return Attempt::NotMade;
        }
        let Ok(session) = self.link.session(&shared.writer_dialer).await else { return Attempt::NotMade };
        let set = if session.is_set() { Set::Session } else { Set::Transaction };
        let table = plan.steps().first().map_or("", |step| step.table.name());
        let refused = !shared.refusals.trusts(table);
        let Some(uniform) = shared.compiler().uniform(plan, events, set, refused) else {
            return Attempt::NotMade;
        };
        let open = (set == Set::Transaction).then(|| self.words_of_one_shape(std::slice::from_ref(plan)));
        let answers = session.run_compiled(&uniform.call, open.as_deref()).await;
        match self.compiled_outcomes(answers, |rows| Ok(vec![uniform.outcome(rows)?])) {
            Some(Ok(outcomes)) => match outcomes.into_iter().next().flatten() {
                Some(settled) => {
                    shared.counters.uniform.fetch_add(1, Ordering::Relaxed);
                    shared.refusals.lessen(table);
                    Attempt::Settled(Ok(settled))
                }
                None => Attempt::LeftOpen,
            },
            Some(Err(why)) => Attempt::Settled(Err(StoreError::unknown(plan.operation(), why))),
            None => {
                shared.refusals.raise((uniform.way == Way::AtOnce).then_some(table));
                Attempt::LeftOpen
            }
        }
    }

    /// The words that open a transaction of one compiled statement in a session that could not be set.
    fn words_of_one_shape(&self, plans: &[Plan]) -> String {
        let options = &self.shared.options;
        options.open_words(options.lock_timeout.as_millis(), &lookup_words(), &Scope::of_all(plans))
    }

    /// Runs plans of one shape as one statement, and those for which it does nothing by their rows. `None` if they
    /// cannot be compiled together, or the server refused it.
    async fn settle_alike(&self, plans: &[Plan], events: &[Option<&str>]) -> Option<Vec<Option<Told>>> {
        let shared = self.shared;
        // Several inserts fail together if one of the rows is there.
        let inserted = plans.first().and_then(|plan| plan.steps().first()).filter(|step| inserts(step));
        let inserted = inserted.map(|step| step.table.name());
        if inserted.is_some_and(|table| shared.doubts.expects(table)) {
            return None;
        }
        let session = self.link.session(&shared.writer_dialer).await.ok()?;
        let set = if session.is_set() { Set::Session } else { Set::Transaction };
        let compiled = shared.compiler().several(plans, events, set)?;
        let open = (set == Set::Transaction).then(|| self.words_of_one_shape(plans));
        let answers = session.run_compiled(&compiled.call, open.as_deref()).await;
        if matches!(answers.rows, Err(Fault::Conflict(_))) {
            shared.doubts.raise(inserted);
        }
        let answered = self.compiled_outcomes(answers, |rows| compiled.outcomes(rows))?;
        let mut settled: Vec<Option<Told>> = plans.iter().map(|_| None).collect();
        let mut set = |place: usize, outcome: Told| {
            if let Some(settled) = settled.get_mut(place) {
                *settled = Some(outcome);
            }
        };
        let mut left: Vec<(usize, Plan)> = Vec::new();
        match answered {
            Ok(outcomes) => {
                for (place, outcome) in compiled.places.iter().zip(outcomes) {
                    match outcome {
                        Some(outcome) => set(*place, Ok(outcome)),
                        None => left.extend(plans.get(*place).map(|plan| (*place, plan.clone()))),
                    }
                }
                let applied = compiled.places.len() - left.len();
                shared.counters.alike.fetch_add(applied as u64, Ordering::Relaxed);
            }
            Err(why) => {
                for place in &compiled.places {
                    let operation = plans.get(*place).map_or("", Plan::operation);
                    set(*place, Err(StoreError::unknown(operation, why.as_str())));
                }
            }
        }
        if !left.is_empty() {
            let (places, left): (Vec<usize>, Vec<Plan>) = left.into_iter().unzip();
            for (place, outcome) in places.into_iter().zip(self.settle_by_rows(&left).await) {
                set(place, decided(outcome));
            }
        }
        Some(settled)
    }

    /// What a compiled statement did for each of its plans; an error if nobody knows; `None` if nothing.
    fn compiled_outcomes(
        &self,
        answers: Answers,
        outcomes: impl FnOnce(&[tokio_postgres::Row]) -> Result<Vec<Option<Settled>>, StoreError>,
    ) -> Option<Result<Vec<Option<Settled>>, String>> {
        let counters = &self.shared.counters;
        match (answers.rows, answers.closing) {
            (Ok(rows), Closing::Done) => {
                let rows = rows.first().map(Vec::as_slice).unwrap_or_default();
                // What was committed and cannot be read is not to be answered as if nothing had been done.
                let outcomes = match outcomes(rows) {
                    Ok(outcomes) => outcomes,
                    Err(error) => return Some(Err(error.to_string())),
                };
                let open = outcomes.iter().filter(|outcome| outcome.is_none()).count();
                counters.left_open.fetch_add(open as u64, Ordering::Relaxed);
                self.shared.publish(outcomes.iter().flatten().flat_map(Settled::positions));
                Some(Ok(outcomes))
            }
            (Ok(_) | Err(Fault::Lost(_)), Closing::Unknown(why)) => Some(Err(why)),
            // The server said no, or nothing was sent.
            _ => {
                counters.compiled_faults.fetch_add(1, Ordering::Relaxed);
                None
            }
        }
    }

    /// Runs plans in one transaction, again and again if others are in the way.
    async fn settle_together(
        &self,
        plans: &[Plan],
        lock_timeout_ms: u128,
    ) -> Result<Vec<Result<Commit, StoreError>>, Fault> {
        let mut attempt = 0;
        let mut looks = Looks::Few;
        loop {
            let session = match self.link.session(&self.shared.writer_dialer).await {
                Ok(session) => session,
                Err(error) => return Ok(plans.iter().map(|_| Err(error.clone())).collect()),
            };
            let run = self.run(&session, plans, lock_timeout_ms, looks).await;
            looks = Looks::All;
            match run {
                Run::Settled(outcomes) => {
                    self.shared.counters.batches.fetch_add(1, Ordering::Relaxed);
                    self.shared.counters.batched.fetch_add(plans.len() as u64, Ordering::Relaxed);
                    return Ok(outcomes);
                }
                Run::Failed(fault) if fault.is_passing() && attempt + 1 < ATTEMPTS => {
                    self.shared.counters.reruns.fetch_add(1, Ordering::Relaxed);
                    self.shared.dialer.step_aside(attempt).await;
                }
                Run::Failed(fault) => return Err(fault),
                // That is nobody's doing who would have to be let pass.
                Run::Doubtful => {
                    self.shared.counters.doubted.fetch_add(1, Ordering::Relaxed);
                    continue;
                }
            }
            attempt += 1;
        }
    }

    /// Runs plans one by one, because something about one of them stopped all.
    async fn settle_apart(&self, plans: &[Plan], fault: Fault) -> Vec<Result<Commit, StoreError>> {
        let concerns_one =
            matches!(fault, Fault::Locked(_) | Fault::NoTable(_) | Fault::Schema(_) | Fault::Data(_));
        if plans.len() == 1 || !concerns_one {
            let failed = |plan: &Plan| {
                let tables: Vec<&str> = plan.steps().iter().map(|step| step.table.name()).collect();
                Err(fault.clone().into_error(&tables))
            };
            return plans.iter().map(failed).collect();
        }
        let mut outcomes = Vec::with_capacity(plans.len());
        // Whoever needs a row that an earlier plan did not get need not wait for it as well.
        let mut held: HashMap<Vec<u8>, StoreError> = HashMap::new();
        for plan in plans {
            let rows =
                || plan.steps().iter().map(|step| place(step.table.name(), 0, plan.tenant(), &step.key));
            if let Some(error) = rows().find_map(|row| held.get(&row)) {
                outcomes.push(Err(error.clone()));
                continue;
            }
            let alone = std::slice::from_ref(plan);
            match self.settle_together(alone, SHORT_LOCK_TIMEOUT_MS).await {
                Ok(outcome) => outcomes.extend(outcome),
                Err(fault) => {
                    if matches!(fault, Fault::Locked(_)) {
                        held.extend(rows().map(|row| (row, StoreError::unavailable(fault.said()))));
                    }
                    outcomes.extend(Box::pin(self.settle_apart(alone, fault)).await);
                }
            }
        }
        outcomes
    }

    async fn run(&self, session: &Session, plans: &[Plan], lock_timeout_ms: u128, looks: Looks) -> Run {
        let shared = self.shared;
        let mut batch = Batch::of(plans);
        if looks == Looks::Few {
            batch.trust(|table| shared.doubts.trusts(table));
        }
        let open = shared.options.open_words(lock_timeout_ms, PLANNER, &Scope::of_all(plans));
        match self.read(session, &open, &mut batch).await {
            Ok(Ok(())) => {}
            Ok(Err(error)) => {
                session.tell("rollback").await;
                return Run::Settled(plans.iter().map(|_| Err(error.clone())).collect());
            }
            Err(fault) => {
                session.tell("rollback").await;
                return Run::Failed(fault);
            }
        }
        shared.doubts.learn(&batch);
        let unproved = batch.unproved();
        if !unproved.is_empty() {
            session.tell("rollback").await;
            shared.doubts.raise(unproved);
            return Run::Doubtful;
        }
        if !batch.applies() {
            session.tell("rollback").await;
            return Run::Settled(batch.committed(&BTreeMap::new()));
        }
        self.write(session, batch).await
    }

    /// Locks and reads the rows, looks up the operations, reads the clock, and decides. The operations are looked up
    /// after the rows are locked: if a plan waited for its own first attempt, it finds the record now.
    async fn read(
        &self,
        session: &Session,
        open: &str,
        batch: &mut Batch<'_>,
    ) -> Result<Result<(), StoreError>, Fault> {
        let shared = self.shared;
        let mut calls = lock_calls(&shared.names, batch);
        let looked_for = batch.looked_for();
        let remembers = batch.operations().next().is_some();
        if remembers {
            calls.push(records_of(&shared.names, batch.operations()));
        }
        if shared.options.clock.is_none() {
            calls.push(clock_call());
        }
        let mut answers = session.run(Some(open), &calls, None).await.rows?;
        drop(calls);
        let mut decide = || {
            let now = match &shared.options.clock {
                Some(clock) => clock.now(),
                None => clock_at(&answers.pop().unwrap_or_default())?,
            };
            let mut recorded: HashMap<(Tenant, String), Record> = HashMap::new();
            if remembers {
                for row in answers.pop().unwrap_or_default() {
                    let record = record_at(&row, 0, RecordView::Operation)?;
                    recorded.insert((record.tenant.clone(), record.operation.clone()), record);
                }
            }
            for (numbers, rows) in looked_for.iter().zip(&answers) {
                for row in rows {
                    let place = usize::try_from(int_at(row, 0, "unnest")? - 1).unwrap_or(usize::MAX);
                    let Some(number) = numbers.get(place) else { continue };
                    let Some(slot) = batch.slot(*number) else { continue };
                    let found = row_at(row, 1, slot.table, slot.tenant)?;
                    batch.found(*number, found);
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
        let calls: Vec<Call<'_>> = write_calls(&shared.names, &batch, &placeholders);
        let answers = session.run(None, &calls, Some("commit")).await;
        drop(calls);
        match (answers.rows, answers.closing) {
            (Ok(rows), Closing::Done) => {
                let mut bases = BTreeMap::new();
                if !batch.counts().is_empty() {
                    let heads = rows.last().map(Vec::as_slice).unwrap_or_default();
                    bases = match bases_at(heads) {
                        Ok(bases) => bases,
                        Err(error) => return Run::Settled(batch.unknown(&error.to_string())),
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
                Run::Settled(outcomes)
            }
            (Ok(_) | Err(Fault::Lost(_)), Closing::Unknown(why)) => Run::Settled(batch.unknown(&why)),
            (Err(Fault::Conflict(_)), _) if batch.unread() > 0 => Run::Doubtful,
            (Err(fault), _) => Run::Failed(fault),
            // Statements without a closing are not sent from here.
            (Ok(_), Closing::Unsent) => Run::Failed(Fault::Busy("the transaction was not closed".into())),
        }
    }
}
