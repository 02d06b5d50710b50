//! From a plan to its outcome.
//!
//! An attempt starts from what is known of the rows:
//!
//! - *nothing*: the guards travel as conditions ([`crate::blind`]), which is one request;
//! - *a guess*: a plan that inserts or expects absence only knows its rows, and says so in its conditions: one request;
//! - *the rows*, read before: the plan is decided in memory and written on the condition that nothing has changed.
//!
//! Rows are read first only where the caller or an event asks for them and they cannot be known otherwise, or where a
//! step cannot be compiled. A failed attempt brings back the rows on which its conditions failed. If the plan is
//! refused on them, that is the outcome; if not, the next attempt starts from them. So a conflict is never mistaken
//! for a refusal, and each turn of the loop means that somebody else has got on.
//!
//! **What a refusal rests on.** The verdicts of a cancelled transaction are those of one moment. Rows that were read
//! one by one are not, so before a plan of several steps is refused on them they are read again at one moment. And a
//! refused plan whose operation is recorded already is a repetition: operations are looked up after the rows, and
//! since an operation stays recorded, not finding it then means that it was not there before either.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use statehouse_store::eval::{self, Decision, Effect};
use statehouse_store::log::{LogPart, partition_of, parts_of};
use statehouse_store::plan::{Expect, Verb};
use statehouse_store::{Applied, Commit, Entry, Plan, Record, Refused, Row, StoreError, Time};

use crate::action::{self, Action};
use crate::catalog::Live;
use crate::inner::Inner;
use crate::item::{self, Found, Key};
use crate::record::{self, Entering};
use crate::wire::{Fault, Reply, Verdict};
use crate::write::{MARKERS_MAX, Mark, Target, Writer};

/// How often a plan is tried again because somebody else was faster.
const TURNS_MAX: u32 = 60;
/// How long a request can be under way: a server takes none whose signature is older.
pub(crate) const REQUEST_LIFE: Duration = Duration::from_secs(15 * 60);

/// What is known of the rows of a plan.
pub(crate) enum Known {
    Nothing,
    Rows {
        found: Vec<Found>,
        /// Whether they were read, and all at one moment.
        at_once: bool,
    },
}

/// One try at writing a plan.
struct Attempt {
    now: Time,
    /// By which the writer knows an operation as its own.
    id: String,
    stamp: i64,
    actions: Vec<Action>,
    /// The result, where it was decided before writing.
    effect: Option<Effect>,
}

/// How an attempt is put together: whether it is written, or is decided already.
enum Prepared {
    Write(Attempt),
    Decided(Result<Decision, StoreError>),
    ReadFirst,
}

/// Whether a plan can be written without its rows: nobody asks for them, or the write itself returns them.
fn needs_no_rows(plan: &Plan) -> bool {
    let alone = plan.entry().is_none() && plan.steps().len() == 1;
    let events_need =
        plan.entry().is_some_and(|entry| entry.events.iter().any(|event| event.row_of.is_some()));
    alone || !(plan.returns_rows() || events_need)
}

/// What a plan is first tried with; `None` if its rows have to be read.
pub(crate) fn first_guess(plan: &Plan) -> Option<Known> {
    if plan.steps().iter().all(|step| step.expect == Expect::Absent) {
        let found = plan.steps().iter().map(|_| Found::nothing()).collect();
        return Some(Known::Rows { found, at_once: false });
    }
    needs_no_rows(plan).then_some(Known::Nothing)
}

impl Inner {
    pub(crate) async fn commit(self: &Arc<Self>, plan: &Plan) -> Result<Commit, StoreError> {
        let writes = plan.entry().is_some() || plan.steps().iter().any(statehouse_store::Step::writes);
        let parts = parts_of(plan, self.partitions)?;
        let mut known = if writes { first_guess(plan) } else { None };
        for turn in 0..TURNS_MAX {
            let mut tables = Vec::with_capacity(plan.steps().len());
            for step in plan.steps() {
                tables.push(self.catalog.live(&self.wire, &step.table).await?);
            }
            let state = match known.take() {
                Some(state) => state,
                // What is only read is read at one moment, and that is all.
                None => self.look(plan, &tables, !writes).await?,
            };
            let attempt = match self.prepare(plan, &parts, &tables, &state)? {
                Prepared::Write(attempt) => attempt,
                Prepared::ReadFirst => {
                    known = Some(self.look(plan, &tables, false).await?);
                    continue;
                }
                Prepared::Decided(decision) => {
                    let at_once = matches!(state, Known::Rows { at_once: true, .. });
                    if !at_once {
                        known = Some(self.look(plan, &tables, true).await?);
                        continue;
                    }
                    if let Some(repeated) = self.repetition(plan).await? {
                        return Ok(repeated);
                    }
                    return self.decided(plan, decision?);
                }
            };
            let alone = plan.entry().is_none() && plan.steps().len() == 1;
            let sent = match attempt.actions.as_slice() {
                [action] if alone => self.wire.write_one(action).await,
                actions => self.wire.write_all(actions).await,
            };
            let verdicts = match sent {
                Ok(Reply::Done(item)) => return self.applied(plan, attempt, item),
                Ok(Reply::Not(verdicts)) => verdicts,
                Err(Fault::Open(why)) => return self.outcome_of_open(plan, attempt, &why).await,
                // Perhaps a row would become too large: decided in memory, that is said with its number.
                Err(Fault::Invalid(_)) if matches!(state, Known::Nothing) => {
                    known = Some(self.look(plan, &tables, false).await?);
                    continue;
                }
                Err(fault) => return Err(fault.into_error(&format!("operation {}", plan.operation()))),
            };
            if plan.entry().is_some()
                && let Some(Verdict::Failed(item)) = verdicts.get(plan.steps().len())
            {
                let operation = match item {
                    Some(item) => Some(record::parse_operation(item)?),
                    None => self.operation(plan.tenant(), plan.operation()).await?,
                };
                match operation {
                    Some(operation) if operation.attempt == attempt.id => {
                        return self.applied(plan, attempt, None);
                    }
                    Some(operation) => {
                        if let Some(record) =
                            self.record_of(&operation, plan.tenant(), plan.operation()).await?
                        {
                            return Ok(Commit::of_record(record));
                        }
                    }
                    // Forgotten between the two requests: the id is free again.
                    None => {}
                }
                known = Some(state);
                continue;
            }
            let next = self.learn(plan, &tables, &attempt, state, &verdicts).await?;
            match next {
                Learned::Refused(refused) => return Ok(Commit::Refused(refused)),
                Learned::Known(state) => known = state,
            }
            self.wire.pause(turn / 2).await;
        }
        let why = format!("operation {}: its rows are written by others all the time", plan.operation());
        Err(StoreError::unavailable(why))
    }

    /// Reads the rows of a plan, at one moment or one by one.
    async fn look(&self, plan: &Plan, tables: &[Arc<Live>], at_once: bool) -> Result<Known, StoreError> {
        let keys: Vec<Key> =
            plan.addresses().zip(tables).map(|(address, live)| Key::at(&address, &live.physical)).collect();
        let failed = |fault: Fault| fault.into_error("the rows of a plan");
        let items = if at_once && keys.len() > 1 {
            let keys: Vec<_> = keys.iter().map(|key| (key.table.clone(), key.attributes())).collect();
            self.wire.snapshot(&keys).await.map_err(failed)?
        } else {
            let mut items = self.wire.get_all(&keys, true).await.map_err(failed)?;
            keys.iter().map(|key| items.remove(key)).collect()
        };
        let mut found = Vec::with_capacity(keys.len());
        for ((item, step), live) in items.into_iter().zip(plan.steps()).zip(tables) {
            let one = Found::read(item.filter(|item| !item.is_empty()), &step.table)?;
            self.note(&one, live);
            found.push(one);
        }
        let at_once = at_once || found.len() <= 1;
        Ok(Known::Rows { found, at_once })
    }

    /// Remembers what a row tells beyond its content.
    fn note(&self, found: &Found, live: &Live) {
        if let Some(at) = found.at {
            self.stamps.observe(at);
            live.logged.store(true, Ordering::Relaxed);
        }
    }

    /// Puts an attempt together from what is known.
    fn prepare(
        &self,
        plan: &Plan,
        parts: &[LogPart],
        tables: &[Arc<Live>],
        state: &Known,
    ) -> Result<Prepared, StoreError> {
        let now = self.clock.now();
        let partition = plan.entry().map(|entry| self.partition_of(plan, entry));
        let stamp = if partition.is_some() { self.stamps.next(now) } else { now.micros() };
        let partitions: Vec<u32> =
            partition.into_iter().chain(parts.iter().map(|part| part.partition)).collect();
        let writer = self.writer(plan, tables, now, &partitions, stamp, self.draw_life());
        let targets: Vec<Target<'_>> = writer.targets().collect();
        let (mut actions, effect) = match state {
            Known::Nothing => {
                match targets.iter().map(|target| writer.blind(target)).collect::<Option<Vec<_>>>() {
                    Some(actions) => (actions, None),
                    None => return Ok(Prepared::ReadFirst),
                }
            }
            Known::Rows { found, .. } => {
                let rows: Vec<Option<Row>> = found.iter().map(|found| found.row().cloned()).collect();
                let effect = match eval::decide(plan, now, &rows) {
                    Ok(Decision::Apply(effect)) => effect,
                    other => return Ok(Prepared::Decided(other)),
                };
                let parts = targets.iter().zip(found).zip(&effect.rows);
                let actions: Vec<Action> =
                    parts.map(|((target, found), row)| writer.decided(target, found, row.as_ref())).collect();
                if partition.is_none() && actions.iter().all(|action| action.verb == action::Verb::Check) {
                    return Ok(Prepared::Decided(Ok(Decision::Apply(effect))));
                }
                (actions, Some(effect))
            }
        };
        let id = format!("{:016x}", self.wire.draw());
        if let (Some(entry), Some(partition)) = (plan.entry(), partition) {
            let events = match &effect {
                Some(effect) => effect.events.clone(),
                None => entry.events.iter().map(|draft| eval::finish_event(draft, |_| None)).collect(),
            };
            let keys: Vec<Key> = targets.iter().map(|target| target.key.clone()).collect();
            let record = &Record::of(plan, now, events);
            let entering = Entering { record, partition, parts, stamp, attempt: &id, rows: &keys };
            actions.extend(self.tables.enter(&entering)?);
        }
        Ok(Prepared::Write(Attempt { now, id, stamp, actions, effect }))
    }

    /// What turns the steps of an attempt into actions.
    pub(crate) fn writer<'a>(
        &self,
        plan: &'a Plan,
        tables: &'a [Arc<Live>],
        now: Time,
        partitions: &[u32],
        stamp: i64,
        life: i64,
    ) -> Writer<'a> {
        let is_logged = !partitions.is_empty();
        let mark =
            is_logged.then(|| Mark { stamp, marker: record::marker(partitions, stamp, plan.operation()) });
        let kept = REQUEST_LIFE + 2 * self.clock_skew;
        let until = Time::from_micros(stamp.max(now.micros())).plus(kept);
        Writer { plan, tables, now, mark, life, expires: until.micros() / 1_000_000 }
    }

    pub(crate) fn partition_of(&self, plan: &Plan, entry: &Entry) -> u32 {
        partition_of(plan.tenant(), &entry.resource, &entry.key, self.partitions)
    }

    /// What a failed attempt tells.
    async fn learn(
        self: &Arc<Self>,
        plan: &Plan,
        tables: &[Arc<Live>],
        attempt: &Attempt,
        state: Known,
        verdicts: &[Verdict],
    ) -> Result<Learned, StoreError> {
        let steps = plan.steps().len();
        // An operation that was not checked may be this one, under way elsewhere: nothing can be said yet.
        if matches!(verdicts.get(steps), Some(Verdict::Unchecked)) {
            return Ok(Learned::Known(Some(state)));
        }
        let first = verdicts.iter().take(steps).position(|verdict| *verdict != Verdict::Held);
        let Some(first) = first else { return Ok(Learned::Known(Some(state))) };
        match verdicts.get(first) {
            Some(Verdict::Failed(_)) => {}
            Some(Verdict::Invalid(why)) => {
                if matches!(state, Known::Nothing) {
                    return Ok(Learned::Known(Some(self.look(plan, tables, false).await?)));
                }
                return Err(
                    Fault::Invalid(why.clone()).into_error(&format!("operation {}", plan.operation()))
                );
            }
            _ => return Ok(Learned::Known(Some(state))),
        }
        let mut learned = Vec::new();
        for (number, verdict) in verdicts.iter().take(steps).enumerate() {
            if let (Verdict::Failed(item), Some(step), Some(live)) =
                (verdict, plan.steps().get(number), tables.get(number))
            {
                let found = Found::read(item.clone(), &step.table)?;
                self.note(&found, live);
                if plan.entry().is_some() && step.writes() && found.markers >= MARKERS_MAX {
                    let key = Key::of(&step.table, &live.physical, plan.tenant(), &step.key);
                    self.relieve(&key, plan.tenant(), item.as_ref()).await?;
                }
                learned.push((number, found));
            }
        }
        let Some((_, found)) = learned.first() else { return Ok(Learned::Known(Some(state))) };
        if let Some(refused) = refuses(plan, first, attempt.now, found)? {
            return Ok(Learned::Refused(refused));
        }
        // Only the stamp, the number of markers or the guess at how to delete stood in the way: the same again.
        let order_only = learned.iter().all(|(number, found)| {
            let deletes = plan.steps().get(*number).is_some_and(|step| step.verb == Verb::Delete);
            let stale = plan.entry().is_some()
                && (found.at.is_some_and(|at| at >= attempt.stamp) || found.markers >= MARKERS_MAX);
            stale || (deletes && found.stored.is_some() && found.at.is_some())
        });
        Ok(Learned::Known(match state {
            Known::Nothing if order_only => Some(Known::Nothing),
            Known::Nothing if steps == 1 => {
                let found = learned.into_iter().map(|(_, found)| found).collect();
                Some(Known::Rows { found, at_once: true })
            }
            Known::Nothing => None,
            Known::Rows { mut found, .. } => {
                for (number, new) in learned {
                    if let Some(place) = found.get_mut(number) {
                        *place = new;
                    }
                }
                let at_once = found.len() <= 1;
                Some(Known::Rows { found, at_once })
            }
        }))
    }

    /// The outcome of an attempt that was written.
    fn applied(&self, plan: &Plan, attempt: Attempt, item: Option<item::Item>) -> Result<Commit, StoreError> {
        let Attempt { now, effect, .. } = attempt;
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
            self.wake();
        }
        let record = plan.entry().map(|_| Record::of(plan, now, events));
        let rows = if plan.returns_rows() { rows } else { Vec::new() };
        Ok(Commit::Applied(Applied { record, rows, repeated: false }))
    }

    /// The outcome of a plan that needs no writing.
    fn decided(&self, plan: &Plan, decision: Decision) -> Result<Commit, StoreError> {
        Ok(match decision {
            Decision::Refuse(refused) => Commit::Refused(refused),
            Decision::Apply(effect) => {
                let rows = if plan.returns_rows() { effect.rows } else { Vec::new() };
                Commit::Applied(Applied { record: None, rows, repeated: false })
            }
        })
    }

    /// What a commit of an operation that is recorded returns.
    async fn repetition(&self, plan: &Plan) -> Result<Option<Commit>, StoreError> {
        if plan.entry().is_none() {
            return Ok(None);
        }
        let Some(operation) = self.operation(plan.tenant(), plan.operation()).await? else { return Ok(None) };
        let record = self.record_of(&operation, plan.tenant(), plan.operation()).await?;
        Ok(record.map(Commit::of_record))
    }

    /// The outcome of an attempt that got no answer: known if the operation is recorded, and otherwise not.
    async fn outcome_of_open(&self, plan: &Plan, attempt: Attempt, why: &str) -> Result<Commit, StoreError> {
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

/// What a failed attempt leads to.
enum Learned {
    Refused(Refused),
    /// Try again from here; `None`: read the rows.
    Known(Option<Known>),
}

/// Whether one step of a plan is refused on a row.
fn refuses(plan: &Plan, number: usize, now: Time, found: &Found) -> Result<Option<Refused>, StoreError> {
    let Some(step) = plan.steps().get(number) else { return Ok(None) };
    let alone = Plan::of(plan.tenant(), plan.operation()).step(step.clone()).build();
    let alone = alone.map_err(|error| StoreError::corrupt("a plan", error.to_string()))?;
    Ok(match eval::decide(&alone, now, &[found.row().cloned()]) {
        Ok(Decision::Refuse(refused)) => Some(Refused { step: number, ..refused }),
        // Whether the plan as a whole is too large is decided on all of its rows.
        Ok(Decision::Apply(_)) | Err(_) => None,
    })
}
