//! Commits a plan.
//!
//! An attempt starts from one of three states of knowledge about the rows ([`KnownRows`]):
//!
//! - *Not read.* The guards are sent as conditions ([`crate::conditional`]). This is one request.
//! - *Assumed absent.* All steps expect no row. The plan is evaluated on absent rows. This is one request.
//! - *Read.* The plan is evaluated in memory and written on the condition that the rows have not changed.
//!
//! Rows are read first only if the caller or an event needs their content, or if a step cannot be compiled to an
//! expression. A failed attempt returns the rows on which its conditions failed. If the plan is refused on them, the
//! refusal is the outcome. Otherwise the next attempt starts from these rows. A conflict is therefore never reported as a
//! refusal, and an attempt is repeated only because another plan wrote a row.
//!
//! **Basis of a refusal.** The results of a cancelled transaction are one snapshot. Rows that were read one by one are
//! not, so they are read again as a snapshot before a plan of several steps is refused. A refused plan whose
//! operation is recorded is a repetition. Operations are looked up after the rows. An operation stays recorded, so an
//! operation that is not found then was not recorded before either.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use statehouse_store::bug;
use statehouse_store::eval::{self, Decision, StepEffect};
use statehouse_store::log::{LogPart, partition_of, parts_of};
use statehouse_store::plan::{Expect, Verb};
use statehouse_store::{Applied, Commit, Entry, Plan, Record, Refused, Row, StoreError, Time};

use crate::catalog::LiveTable;
use crate::client::{ClientWriteResult, ConditionResult};
use crate::inner::DynamoInner;
use crate::item::{self, ItemKey, ItemState};
use crate::item_write::{ItemWrite, WriteKind};
use crate::record::{self, LogWrite};
use crate::request_error::RequestError;
use crate::write::{LogStamp, MARKERS_MAX, StepTarget, StepWriter};

/// Attempts of a plan that loses races against other plans.
const ATTEMPTS_MAX: u32 = 60;
/// How long a request can be in flight. The server rejects a request whose signature is older.
pub(crate) const REQUEST_LIFE: Duration = Duration::from_secs(15 * 60);

/// The knowledge about the rows of a plan with which an attempt starts.
pub(crate) enum KnownRows {
    NotRead,
    Items {
        items: Vec<ItemState>,
        /// Whether they were read, as one snapshot.
        is_snapshot: bool,
    },
}

/// One attempt to write a plan.
struct CommitAttempt {
    now: Time,
    /// Stored with the operation. Tells this attempt's operation from those of other writers.
    id: String,
    stamp: i64,
    writes: Vec<ItemWrite>,
    /// The result, if the plan was evaluated before the write.
    effect: Option<StepEffect>,
}

/// What the commit of a plan does next.
enum CommitStep {
    Write(CommitAttempt),
    /// The plan needs no write: it is refused, or it changes nothing.
    Finish(Result<Decision, StoreError>),
    ReadRows,
}

/// Whether a plan can be written without reading its rows: neither the caller nor an event needs them, or the write
/// itself returns the row.
fn needs_no_rows(plan: &Plan) -> bool {
    let events_need =
        plan.entry().is_some_and(|entry| entry.events.iter().any(|event| event.row_of.is_some()));
    is_single_write(plan) || !(plan.returns_rows() || events_need)
}

/// Whether a plan is sent as one request for one item instead of a transaction.
fn is_single_write(plan: &Plan) -> bool {
    plan.entry().is_none() && plan.steps().len() == 1
}

/// The state with which the first attempt starts; `None` if the rows have to be read.
pub(crate) fn initial_rows(plan: &Plan) -> Option<KnownRows> {
    if plan.steps().iter().all(|step| step.expect == Expect::Absent) {
        let items = plan.steps().iter().map(|_| ItemState::absent()).collect();
        return Some(KnownRows::Items { items, is_snapshot: false });
    }
    needs_no_rows(plan).then_some(KnownRows::NotRead)
}

impl DynamoInner {
    pub(crate) async fn commit(self: &Arc<Self>, plan: &Plan) -> Result<Commit, StoreError> {
        let writes = plan.entry().is_some() || plan.steps().iter().any(statehouse_store::Step::writes);
        let parts = parts_of(plan, self.partitions)?;
        let mut known = if writes { initial_rows(plan) } else { None };
        for attempt_number in 0..ATTEMPTS_MAX {
            let mut tables = Vec::with_capacity(plan.steps().len());
            for step in plan.steps() {
                tables.push(self.catalog.live(&self.client, &step.table).await?);
            }
            let rows = match known.take() {
                Some(rows) => rows,
                // A plan that only reads is done after one snapshot.
                None => self.read_rows(plan, &tables, !writes).await?,
            };
            match self.try_commit(plan, &parts, &tables, rows).await? {
                Progress::Done(outcome) => return Ok(outcome),
                Progress::Retry(next) => known = next,
                Progress::BackOff(next) => {
                    known = next;
                    self.client.back_off(attempt_number / 2).await;
                }
            }
        }
        let why = format!(
            "operation {}: other plans changed its rows during each of {ATTEMPTS_MAX} attempts",
            plan.operation()
        );
        Err(StoreError::unavailable(why))
    }

    /// One attempt, from what is known of the rows.
    async fn try_commit(
        self: &Arc<Self>,
        plan: &Plan,
        parts: &[LogPart],
        tables: &[Arc<LiveTable>],
        rows: KnownRows,
    ) -> Result<Progress, StoreError> {
        let attempt = match self.prepare(plan, parts, tables, &rows)? {
            CommitStep::Write(attempt) => attempt,
            CommitStep::ReadRows => {
                return Ok(Progress::Retry(Some(self.read_rows(plan, tables, false).await?)));
            }
            CommitStep::Finish(decision) => {
                if !matches!(rows, KnownRows::Items { is_snapshot: true, .. }) {
                    return Ok(Progress::Retry(Some(self.read_rows(plan, tables, true).await?)));
                }
                if let Some(repeated) = self.recorded_outcome(plan).await? {
                    return Ok(Progress::Done(repeated));
                }
                return self.outcome_without_write(plan, decision?).map(Progress::Done);
            }
        };
        let sent = match attempt.writes.as_slice() {
            [write] if is_single_write(plan) => self.client.write_one(write).await,
            writes => self.client.write_all(writes).await,
        };
        match sent {
            Ok(ClientWriteResult::Applied(item)) => self.applied(plan, attempt, item).map(Progress::Done),
            Ok(ClientWriteResult::Rejected(results)) => {
                self.after_rejection(plan, tables, attempt, rows, &results).await
            }
            Err(RequestError::UnknownOutcome(why)) => {
                self.outcome_without_answer(plan, attempt, &why).await.map(Progress::Done)
            }
            // A row may have become too large. The evaluation in memory reports its size.
            Err(RequestError::Invalid(_)) if matches!(rows, KnownRows::NotRead) => {
                Ok(Progress::Retry(Some(self.read_rows(plan, tables, false).await?)))
            }
            Err(error) => Err(error.into_error(&format!("operation {}", plan.operation()))),
        }
    }

    /// Continues after a rejected attempt: with the recorded outcome, a refusal, or another attempt.
    async fn after_rejection(
        self: &Arc<Self>,
        plan: &Plan,
        tables: &[Arc<LiveTable>],
        attempt: CommitAttempt,
        rows: KnownRows,
        results: &[ConditionResult],
    ) -> Result<Progress, StoreError> {
        let operation = match (plan.entry(), results.get(plan.steps().len())) {
            (Some(_), Some(ConditionResult::Failed(Some(item)))) => Some(record::parse_operation(item)?),
            (Some(_), Some(ConditionResult::Failed(None))) => {
                self.operation(plan.tenant(), plan.operation()).await?
            }
            _ => return self.next_state(plan, tables, &attempt, rows, results).await,
        };
        match operation {
            Some(operation) if operation.attempt == attempt.id => {
                self.applied(plan, attempt, None).map(Progress::Done)
            }
            Some(operation) => {
                let record = self.record_of(&operation, plan.tenant(), plan.operation()).await?;
                Ok(match record {
                    Some(record) => Progress::Done(Commit::of_record(record)),
                    None => Progress::Retry(Some(rows)),
                })
            }
            // Trimmed between the two requests: the id can be used again.
            None => Ok(Progress::Retry(Some(rows))),
        }
    }

    /// Reads the rows of a plan, as a snapshot or one by one.
    async fn read_rows(
        &self,
        plan: &Plan,
        tables: &[Arc<LiveTable>],
        is_snapshot: bool,
    ) -> Result<KnownRows, StoreError> {
        let keys: Vec<ItemKey> = plan
            .addresses()
            .zip(tables)
            .map(|(address, live)| ItemKey::at(&address, &live.physical))
            .collect();
        let failed = |error: RequestError| error.into_error("the rows of a plan");
        let items = if is_snapshot && keys.len() > 1 {
            let keys: Vec<_> = keys.iter().map(|key| (key.table.clone(), key.attributes())).collect();
            self.client.snapshot(&keys).await.map_err(failed)?
        } else {
            let mut items = self.client.get_all(&keys, true).await.map_err(failed)?;
            keys.iter().map(|key| items.remove(key)).collect()
        };
        let mut states = Vec::with_capacity(keys.len());
        for ((item, step), live) in items.into_iter().zip(plan.steps()).zip(tables) {
            let one = ItemState::read(item.filter(|item| !item.is_empty()), &step.table)?;
            self.observe(&one, live);
            states.push(one);
        }
        let is_snapshot = is_snapshot || states.len() <= 1;
        Ok(KnownRows::Items { items: states, is_snapshot })
    }

    /// Records the stamp of a row, and that its table has logged rows.
    fn observe(&self, found: &ItemState, live: &LiveTable) {
        if let Some(at) = found.at {
            self.stamps.observe(at);
            live.logged.store(true, Ordering::Relaxed);
        }
    }

    /// Compiles or evaluates the plan on what is known of its rows.
    fn prepare(
        &self,
        plan: &Plan,
        parts: &[LogPart],
        tables: &[Arc<LiveTable>],
        known: &KnownRows,
    ) -> Result<CommitStep, StoreError> {
        let now = self.clock.now();
        let partition = plan.entry().map(|entry| self.partition_of(plan, entry));
        let stamp = if partition.is_some() { self.stamps.next(now) } else { now.micros() };
        let partitions: Vec<u32> =
            partition.into_iter().chain(parts.iter().map(|part| part.partition)).collect();
        let writer = self.writer(plan, tables, now, &partitions, stamp, self.new_incarnation());
        let targets: Vec<StepTarget<'_>> = writer.targets().collect();
        let (mut writes, effect) = match known {
            KnownRows::NotRead => {
                match targets.iter().map(|target| writer.conditional(target)).collect::<Option<Vec<_>>>() {
                    Some(writes) => (writes, None),
                    None => return Ok(CommitStep::ReadRows),
                }
            }
            KnownRows::Items { items, .. } => {
                let rows: Vec<Option<Row>> = items.iter().map(|item| item.row().cloned()).collect();
                let effect = match eval::decide(plan, now, &rows) {
                    Ok(Decision::Apply(effect)) => effect,
                    other => return Ok(CommitStep::Finish(other)),
                };
                let parts = targets.iter().zip(items).zip(&effect.rows);
                let writes = parts
                    .map(|((target, item), row)| writer.decided(target, item, row.as_ref()))
                    .collect::<Result<Vec<ItemWrite>, StoreError>>()?;
                if partition.is_none() && writes.iter().all(|write| write.kind == WriteKind::Check) {
                    return Ok(CommitStep::Finish(Ok(Decision::Apply(effect))));
                }
                (writes, Some(effect))
            }
        };
        let id = format!("{:016x}", self.client.random_u64());
        if let (Some(entry), Some(partition)) = (plan.entry(), partition) {
            let events = match &effect {
                Some(effect) => effect.events.clone(),
                None => entry.events.iter().map(|draft| eval::finish_event(draft, |_| None)).collect(),
            };
            let keys: Vec<ItemKey> = targets.iter().map(|target| target.key.clone()).collect();
            let record = &Record::of(plan, now, events);
            let entering = LogWrite { record, partition, parts, stamp, attempt: &id, rows: &keys };
            writes.extend(self.tables.enter(&entering)?);
        }
        Ok(CommitStep::Write(CommitAttempt { now, id, stamp, writes, effect }))
    }

    /// The writer of the steps of an attempt.
    pub(crate) fn writer<'a>(
        &self,
        plan: &'a Plan,
        tables: &'a [Arc<LiveTable>],
        now: Time,
        partitions: &[u32],
        stamp: i64,
        incarnation: i64,
    ) -> StepWriter<'a> {
        let is_logged = !partitions.is_empty();
        let mark = is_logged
            .then(|| LogStamp { stamp, marker: record::marker(partitions, stamp, plan.operation()) });
        let kept = REQUEST_LIFE + 2 * self.clock_skew;
        let until = Time::from_micros(stamp.max(now.micros())).plus(kept);
        StepWriter { plan, tables, now, mark, incarnation, expires: until.micros() / 1_000_000 }
    }

    pub(crate) fn partition_of(&self, plan: &Plan, entry: &Entry) -> u32 {
        partition_of(plan.tenant(), &entry.resource, &entry.key, self.partitions)
    }

    /// What the results of a rejected attempt lead to, if its operation is not the reason.
    async fn next_state(
        self: &Arc<Self>,
        plan: &Plan,
        tables: &[Arc<LiveTable>],
        attempt: &CommitAttempt,
        rows: KnownRows,
        results: &[ConditionResult],
    ) -> Result<Progress, StoreError> {
        let steps = plan.steps().len();
        // An operation that was not checked may be a concurrent attempt of this plan. It decides the outcome.
        if matches!(results.get(steps), Some(ConditionResult::NotChecked)) {
            return Ok(Progress::BackOff(Some(rows)));
        }
        let first = results.iter().take(steps).position(|result| *result != ConditionResult::Held);
        let Some(first) = first else { return Ok(Progress::BackOff(Some(rows))) };
        match results.get(first) {
            Some(ConditionResult::Failed(_)) => {}
            Some(ConditionResult::Invalid(_)) if matches!(rows, KnownRows::NotRead) => {
                return Ok(Progress::BackOff(Some(self.read_rows(plan, tables, false).await?)));
            }
            Some(ConditionResult::Invalid(why)) => {
                let error = RequestError::Invalid(why.clone());
                return Err(error.into_error(&format!("operation {}", plan.operation())));
            }
            _ => return Ok(Progress::BackOff(Some(rows))),
        }
        let failed = self.failed_items(plan, tables, results).await?;
        let Some((_, item)) = failed.first() else { return Ok(Progress::BackOff(Some(rows))) };
        if let Some(refused) = refusal_of_step(plan, first, attempt.now, item)? {
            return Ok(Progress::Done(Commit::Refused(refused)));
        }
        Ok(Progress::BackOff(match rows {
            KnownRows::NotRead if failed.iter().all(|item| failed_on_order(plan, attempt, item)) => {
                Some(KnownRows::NotRead)
            }
            KnownRows::NotRead if steps == 1 => {
                let items = failed.into_iter().map(|(_, item)| item).collect();
                Some(KnownRows::Items { items, is_snapshot: true })
            }
            KnownRows::NotRead => None,
            KnownRows::Items { mut items, .. } => {
                for (index, new) in failed {
                    match items.get_mut(index) {
                        Some(item) => *item = new,
                        None => return Err(bug!("step {index} of a plan of {} rows", items.len()).into()),
                    }
                }
                let is_snapshot = items.len() <= 1;
                Some(KnownRows::Items { items, is_snapshot })
            }
        }))
    }

    /// The items on which conditions of steps failed, with the indexes of the steps.
    async fn failed_items(
        self: &Arc<Self>,
        plan: &Plan,
        tables: &[Arc<LiveTable>],
        results: &[ConditionResult],
    ) -> Result<Vec<(usize, ItemState)>, StoreError> {
        let mut failed = Vec::new();
        for (index, ((step, live), result)) in plan.steps().iter().zip(tables).zip(results).enumerate() {
            let ConditionResult::Failed(item) = result else { continue };
            let state = ItemState::read(item.clone(), &step.table)?;
            self.observe(&state, live);
            if plan.entry().is_some() && step.writes() && state.markers >= MARKERS_MAX {
                let key = ItemKey::of(&step.table, &live.physical, plan.tenant(), &step.key);
                self.clear_markers(&key, plan.tenant(), item.as_ref()).await?;
            }
            failed.push((index, state));
        }
        Ok(failed)
    }

    /// The outcome of an attempt that was applied.
    fn applied(
        &self,
        plan: &Plan,
        attempt: CommitAttempt,
        item: Option<item::Item>,
    ) -> Result<Commit, StoreError> {
        let CommitAttempt { now, effect, .. } = attempt;
        let (rows, events) = match effect {
            Some(effect) => (effect.rows, effect.events),
            None => {
                let events = plan.entry().map(|entry| entry.events.as_slice()).unwrap_or_default();
                let events = events.iter().map(|draft| eval::finish_event(draft, |_| None)).collect();
                let row = match (plan.steps(), item) {
                    ([step], Some(item)) => item::row(&item, &step.table)?,
                    _ => None,
                };
                (vec![row], events)
            }
        };
        if plan.entry().is_some() {
            self.notify_log_waiters();
        }
        let record = plan.entry().map(|_| Record::of(plan, now, events));
        let rows = if plan.returns_rows() { rows } else { Vec::new() };
        Ok(Commit::Applied(Applied { record, rows, repeated: false }))
    }

    /// The outcome of a plan that needs no write.
    fn outcome_without_write(&self, plan: &Plan, decision: Decision) -> Result<Commit, StoreError> {
        Ok(match decision {
            Decision::Refuse(refused) => Commit::Refused(refused),
            Decision::Apply(effect) => {
                let rows = if plan.returns_rows() { effect.rows } else { Vec::new() };
                Commit::Applied(Applied { record: None, rows, repeated: false })
            }
        })
    }

    /// The outcome of an operation that is recorded already.
    async fn recorded_outcome(&self, plan: &Plan) -> Result<Option<Commit>, StoreError> {
        if plan.entry().is_none() {
            return Ok(None);
        }
        let Some(operation) = self.operation(plan.tenant(), plan.operation()).await? else { return Ok(None) };
        let record = self.record_of(&operation, plan.tenant(), plan.operation()).await?;
        Ok(record.map(Commit::of_record))
    }

    /// The outcome of an attempt without an answer. It is known only if the operation is recorded.
    async fn outcome_without_answer(
        &self,
        plan: &Plan,
        attempt: CommitAttempt,
        why: &str,
    ) -> Result<Commit, StoreError> {
        let unknown = || StoreError::unknown(plan.operation(), why);
        if plan.entry().is_none() {
            return Err(unknown());
        }
        match self.operation(plan.tenant(), plan.operation()).await {
            Ok(Some(operation)) if operation.attempt == attempt.id => self.applied(plan, attempt, None),
            Ok(Some(operation)) => {
                let record = self.record_of(&operation, plan.tenant(), plan.operation()).await;
                record.ok().flatten().map(Commit::of_record).ok_or_else(unknown)
            }
            Ok(None) | Err(_) => Err(unknown()),
        }
    }
}

/// The result of one attempt.
enum Progress {
    Done(Commit),
    /// Try again from here; `None`: read the rows.
    Retry(Option<KnownRows>),
    /// The same, after a pause: another plan was faster.
    BackOff(Option<KnownRows>),
}

/// Whether an attempt failed on an item only because of the stamp, the number of markers or the assumed way to delete.
/// The next attempt can be sent without reading the row.
fn failed_on_order(plan: &Plan, attempt: &CommitAttempt, (index, item): &(usize, ItemState)) -> bool {
    let deletes = plan.steps().get(*index).is_some_and(|step| step.verb == Verb::Delete);
    let stale = plan.entry().is_some()
        && (item.at.is_some_and(|at| at >= attempt.stamp) || item.markers >= MARKERS_MAX);
    stale || (deletes && item.stored.is_some() && item.at.is_some())
}

/// Whether one step of a plan is refused on a row.
fn refusal_of_step(
    plan: &Plan,
    index: usize,
    now: Time,
    item: &ItemState,
) -> Result<Option<Refused>, StoreError> {
    let Some(step) = plan.steps().get(index) else {
        return Err(bug!("step {index} of a plan of {} steps", plan.steps().len()).into());
    };
    let single = Plan::of(plan.tenant(), plan.operation()).step(step.clone()).build();
    let single = single.map_err(|error| StoreError::corrupt("a plan", error.to_string()))?;
    Ok(match eval::decide(&single, now, &[item.row().cloned()]) {
        Ok(Decision::Refuse(refused)) => Some(Refused { step: index, ..refused }),
        // The size of the whole plan is checked on all of its rows.
        Ok(Decision::Apply(_)) | Err(_) => None,
    })
}
