//! One tenant's records of a page: each is done, parked, or stops the run.

use std::any::Any;
use std::future::{Future, poll_fn};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::pin::Pin;
use std::sync::Arc;
use std::task::Poll;

use statehouse_store::{
    Clock, Commit, Consistency, Ids, Plan, Position, Reason, Record, RetryPolicy, Step, Store, StoreError,
    Tenant, Time, commit_known,
};

use super::super::parking::{self, ParkedRecord, ParkedRows};
use super::super::progress::{ConsumerTables, GroupProgress};
use super::super::{
    CallSupport, EffectWrites, HandlerContext, HandlerError, HandlerWrite, RecordHandler, offset_of,
};
use super::run_state::{RunState, RunTurn};
use super::verdict::{CommitVerdict, unfit};
use crate::action::LastRefusal;
use crate::product::booking::external_holds::ExternalHolds;
use crate::worker::{StepProgress, Wakeup};

/// Records that a handler gets at once, at most.
const RUN_MAX: usize = 48;
/// How often a record is tried whose plan is refused, before it is parked. Rows that others write at the same time make
/// for a refusal now and then.
const TRIES_MAX: u32 = 8;
/// How often a row of progress may be found changed, in one course.
const OVERTAKEN_MAX: u32 = 8;
/// Parts of records that one course writes, before it lets others of the process have their turn.
const PARTS_MAX: usize = 64;

/// Waits for a handler. One that panics over a record can do it never, and holds up nothing else (I5).
async fn unpanicked<T>(
    mut handling: Pin<Box<dyn Future<Output = Result<T, HandlerError>> + Send + '_>>,
) -> Result<T, HandlerError> {
    let polled = poll_fn(|context| {
        let poll = catch_unwind(AssertUnwindSafe(|| handling.as_mut().poll(context)));
        poll.unwrap_or_else(|panic| Poll::Ready(Err(HandlerError::Never(said(&*panic)))))
    });
    polled.await
}

/// What a handler said that panicked.
fn said(panic: &(dyn Any + Send)) -> String {
    let text = panic.downcast_ref::<&str>().copied();
    let text = text.or_else(|| panic.downcast_ref::<String>().map(String::as_str));
    format!("the handler panicked: {}", text.unwrap_or("it did not say why"))
}

/// One tenant's records of a page.
pub(super) struct TenantRun {
    pub store: Arc<dyn Store>,
    pub ids: Ids,
    pub handler: Arc<dyn RecordHandler>,
    pub books: &'static ConsumerTables,
    pub tenant: Tenant,
    pub partition: u32,
    pub epoch: i64,
    pub era: i64,
    pub now: Time,
    pub clock: Arc<dyn Clock>,
    pub holds: Option<Arc<dyn ExternalHolds>>,
}

/// What came of it.
#[derive(Debug, Default)]
pub(super) struct RunResult {
    pub rows: usize,
    /// What was parked, and why.
    pub parked: Vec<String>,
    /// The first record that is not done, and what stopped it.
    pub stopped: Option<(u64, StoreError)>,
    /// The first record that is not done, because it goes on in the next step.
    pub goes_on: Option<u64>,
    /// Work that became due.
    pub wakeups: Vec<Wakeup>,
}

/// What is to be committed for the first records of a rest.
struct PreparedRecords {
    effect: HandlerWrite,
    /// How the first record is parked, if it is.
    parked: Option<String>,
}

impl PreparedRecords {
    /// How many rows say that the first record is parked: all of its steps, if it is.
    fn rows_parked(&self) -> i64 {
        self.parked.as_ref().map_or(0, |_| i64::try_from(self.effect.steps.len()).unwrap_or(0))
    }
}

impl TenantRun {
    fn group(&self) -> &str {
        self.handler.group()
    }

    async fn mark(&self) -> Result<GroupProgress, StoreError> {
        let address = self.books.address(&self.tenant, self.group(), self.partition)?;
        let rows = self.store.get(std::slice::from_ref(&address), Consistency::Strong).await?;
        GroupProgress::of(rows.first().and_then(Option::as_ref))
    }

    pub(super) async fn run(
        self,
        mark: Result<GroupProgress, StoreError>,
        records: Vec<Record>,
    ) -> RunResult {
        let mut finished = RunResult::default();
        let (gone, at) = match mark {
            Ok(mark) => {
                let mut run = RunState::of(mark, &records);
                (self.go(&mut run, &mut finished).await, run.at)
            }
            // The other tenants go on.
            Err(error) => (Err(error), 0),
        };
        if let Err(error) = gone {
            finished.stopped = records.get(at).map(|record| (offset_of(record), error));
        }
        finished
    }

    /// Goes through the records.
    async fn go(&self, run: &mut RunState<'_>, finished: &mut RunResult) -> Result<(), StoreError> {
        loop {
            run.skip_done(self.era);
            let Some(first) = run.records.get(run.at) else { return Ok(()) };
            let mut parked = match run.parked.take() {
                Some(parked) => parked,
                None if run.mark.parked == 0 => ParkedRows::default(),
                None => ParkedRows::read(&*self.store, &self.tenant, self.group(), self.partition).await?,
            };
            match self.turn(run, first, &mut parked, finished).await? {
                RunTurn::Continue => run.parked = Some(parked),
                RunTurn::Reread => {}
                RunTurn::Finished => return Ok(()),
            }
        }
    }

    /// One attempt to do the next records, with the progress past them (I1).
    async fn turn(
        &self,
        run: &mut RunState<'_>,
        first: &Record,
        parked: &mut ParkedRows,
        finished: &mut RunResult,
    ) -> Result<RunTurn, StoreError> {
        let most = if run.singly > 0 { 1 } else { RUN_MAX };
        let count = self.unblocked(run.from(0)?, parked, most);
        let early = run.ahead.take();
        let was_early = early.is_some();
        let Some(mut prepared) = self.prepare(run, (first, count), early, parked).await? else {
            return Ok(RunTurn::Continue);
        };
        let taken = if prepared.effect.goes_on { 0 } else { prepared.effect.taken };
        let after = self.after(&run.mark, run.next(0, taken)?, &prepared);
        let progress = run.mark.step_to(&after, self.group(), self.partition, self.books);
        let may_look_ahead = taken > 0 && run.singly == 0 && prepared.parked.is_none();
        let ahead = if may_look_ahead { self.unblocked(run.from(taken)?, parked, RUN_MAX) } else { 0 };
        let next = run.next(taken, ahead)?;
        let writes = prepared.effect.take_writes();
        let (verdict, early) =
            tokio::join!(self.write(progress, writes, &mut finished.wakeups), self.handled_ahead(next));
        match verdict? {
            CommitVerdict::Done => {
                run.advance(after, taken, early);
                finished.rows += taken.max(1);
                if let Some(reason) = prepared.parked {
                    self.report_parked(first, &reason, parked, finished);
                }
                if run.parts < PARTS_MAX {
                    return Ok(RunTurn::Continue);
                }
                finished.goes_on = run.records.get(run.at).map(offset_of);
                return Ok(RunTurn::Finished);
            }
            // The handler has to look what is done already.
            CommitVerdict::Repeated => {
                run.tries += 1;
                return self.reread(run).await;
            }
            CommitVerdict::Overtaken => return self.reread(run).await,
            // Made anew, from what is so now.
            CommitVerdict::Unfit(..) | CommitVerdict::Never(_) if was_early => {}
            CommitVerdict::Unfit(_, refused) if run.tries < TRIES_MAX => {
                (run.tries, run.last) = (run.tries + 1, refused);
            }
            CommitVerdict::Unfit(reason, _) if prepared.effect.contends => {
                return Err(StoreError::unavailable(reason));
            }
            CommitVerdict::Unfit(..) | CommitVerdict::Never(_) if count > 1 => {
                (run.singly, run.tries) = (count, 0);
            }
            CommitVerdict::Unfit(reason, _) | CommitVerdict::Never(reason) => {
                (run.poison, run.tries) = (Some(reason), 0);
            }
        }
        Ok(RunTurn::Continue)
    }

    /// How many of the first records do not wait for a parked one of their keys.
    fn unblocked(&self, records: &[Record], parked: &ParkedRows, most: usize) -> usize {
        let is_free = |record: &&Record| {
            parked.is_empty() || !self.handler.subjects(record).iter().any(|key| parked.has(key))
        };
        records.iter().take(most).take_while(is_free).count()
    }

    /// What is to be committed for the next records, of which so many do not wait for parked ones. `None` if they have to be
    /// tried one by one.
    async fn prepare(
        &self,
        run: &mut RunState<'_>,
        (first, count): (&Record, usize),
        early: Option<HandlerWrite>,
        parked: &ParkedRows,
    ) -> Result<Option<PreparedRecords>, StoreError> {
        let poison = run.poison.take();
        if count == 0 {
            return Ok(Some(self.behind(first, parked)));
        }
        if let Some(why) = poison {
            return Ok(Some(self.poison(first, why)));
        }
        let handled = match early {
            Some(effect) => Ok(effect),
            None => self.handled(run.next(0, count)?, run.tries, run.last.as_deref()).await,
        };
        match handled {
            Ok(effect) => {
                let effect = HandlerWrite { taken: effect.taken.clamp(1, count), ..effect };
                Ok(Some(PreparedRecords { effect, parked: None }))
            }
            Err(_) if count > 1 => {
                run.singly = count;
                Ok(None)
            }
            Err(HandlerError::Later(error)) => Err(error),
            Err(HandlerError::Never(why)) => Ok(Some(self.poison(first, why))),
        }
    }

    /// Remembers that a record was parked.
    fn report_parked(
        &self,
        record: &Record,
        reason: &str,
        parked: &mut ParkedRows,
        finished: &mut RunResult,
    ) {
        let (subjects, offset) = (self.handler.subjects(record), offset_of(record));
        let position = Position { partition: self.partition, offset };
        finished.parked.push(format!("{position} of {} is parked: {reason}", subjects.join(", ")));
        subjects.into_iter().for_each(|subject| parked.add(subject, offset));
    }

    /// Reads the progress again, which is not what was read.
    async fn reread(&self, run: &mut RunState<'_>) -> Result<RunTurn, StoreError> {
        run.overtaken += 1;
        let seen = self.mark().await?;
        if seen.epoch > self.epoch || run.overtaken > OVERTAKEN_MAX {
            let why = format!("another process has the partition, at epoch {}", seen.epoch);
            return Err(StoreError::unavailable(why));
        }
        run.mark = seen;
        Ok(RunTurn::Reread)
    }

    /// What the handler makes of records.
    async fn handled(
        &self,
        records: &[Record],
        refused: u32,
        last: Option<&LastRefusal>,
    ) -> Result<HandlerWrite, HandlerError> {
        let reading = self.reading(refused, last);
        unpanicked(self.handler.handle(records, &reading)).await
    }

    /// What the handler makes of records before those in front of them are done. Whatever is wrong with them is found when it
    /// is their turn.
    async fn handled_ahead(&self, records: &[Record]) -> Option<HandlerWrite> {
        let reading = self.reading(0, None);
        match records {
            [] => None,
            some => unpanicked(self.handler.ahead(some, &reading)).await.ok().flatten(),
        }
    }

    fn reading<'r>(&'r self, refused: u32, last_refusal: Option<&'r LastRefusal>) -> HandlerContext<'r> {
        HandlerContext {
            store: &*self.store,
            tenant: &self.tenant,
            now: self.now,
            refused,
            support: Some(CallSupport {
                last_refusal,
                clock: &*self.clock,
                ids: &self.ids,
                holds: self.holds.as_deref(),
            }),
        }
    }

    /// A record that cannot be done is parked (I5).
    fn poison(&self, record: &Record, reason: String) -> PreparedRecords {
        PreparedRecords { effect: HandlerWrite::of(1, self.park(record, &reason, 1)), parked: Some(reason) }
    }

    /// A record of a key that has something parked waits behind it (I4), unless it is there already.
    fn behind(&self, record: &Record, parked: &ParkedRows) -> PreparedRecords {
        let (subjects, offset) = (self.handler.subjects(record), offset_of(record));
        if subjects.iter().any(|subject| parked.holds(subject, offset)) {
            return PreparedRecords { effect: HandlerWrite::of(1, vec![]), parked: None };
        }
        let reason = "an older record of its key is parked".to_owned();
        PreparedRecords { effect: HandlerWrite::of(1, self.park(record, &reason, 0)), parked: Some(reason) }
    }

    /// Parks a record under each of its keys.
    fn park(&self, record: &Record, reason: &str, tries: i64) -> Vec<Step> {
        let (subjects, offset) = (self.handler.subjects(record), offset_of(record));
        let park = |subject: &String| {
            parking::park(self.group(), self.partition, subject, offset, reason, tries, self.books)
        };
        subjects.iter().map(park).collect()
    }

    /// The row of progress behind these records; where it was, if there are none.
    fn after(&self, mark: &GroupProgress, records: &[Record], drafted: &PreparedRecords) -> GroupProgress {
        GroupProgress {
            present: true,
            reached: records.last().map_or(mark.done_in(self.era), offset_of),
            era: self.era,
            epoch: self.epoch,
            parked: mark.parked + drafted.rows_parked(),
            missed: mark.missed,
        }
    }

    /// Commits what is to be written with the progress past it (I1).
    async fn write(
        &self,
        progress: Step,
        writes: EffectWrites,
        wakeups: &mut Vec<Wakeup>,
    ) -> Result<CommitVerdict, StoreError> {
        let EffectWrites { steps, entry, operation, judge, wakeups: due, notify } = writes;
        let is_named = operation.is_some();
        let operation = operation.unwrap_or_else(|| self.ids.next());
        let mut plan = Plan::of(&self.tenant, operation).step(progress).steps(steps).without_rows();
        plan.entry = entry;
        let plan = match plan.build() {
            Ok(plan) => plan,
            Err(error) => return Ok(CommitVerdict::Never(error.to_string())),
        };
        Ok(match commit_known(&*self.store, &plan, RetryPolicy::WORKER).await {
            Ok(Commit::Applied(applied)) if applied.repeated => CommitVerdict::Repeated,
            Ok(Commit::Applied(_)) => {
                wakeups.extend(due);
                notify.iter().for_each(|waiting| waiting.send_modify(|count| *count = count.wrapping_add(1)));
                CommitVerdict::Done
            }
            Ok(Commit::Refused(refused)) if refused.step == 0 => CommitVerdict::Overtaken,
            // No race: what is added is too much for what is there.
            Ok(Commit::Refused(refused)) if matches!(refused.reason, Reason::Overflow { .. }) => {
                CommitVerdict::Never(refused.describe(&plan))
            }
            Ok(Commit::Refused(refused)) => match (judge, plan.steps().get(refused.step)) {
                (Some(judge), Some(step)) => unfit(&judge, step, refused, &plan),
                _ => CommitVerdict::Unfit(refused.describe(&plan), None),
            },
            // The record of the operation says that it was given up.
            Ok(Commit::Fenced) if is_named => CommitVerdict::Repeated,
            Ok(Commit::Fenced) => CommitVerdict::Overtaken,
            Err(error @ StoreError::LimitExceeded { .. }) => CommitVerdict::Never(error.to_string()),
            Err(error) => return Err(error),
        })
    }

    /// Tries what is parked of a key again: the oldest, and if it is done, the next one later.
    pub(super) async fn retry(
        &self,
        subject: &str,
        progress: &mut StepProgress,
        wakeups: &mut Vec<Wakeup>,
    ) -> Result<(), StoreError> {
        let (mut reason, mut last) = (None, None);
        for tries in 0..TRIES_MAX {
            let mark = self.mark().await?;
            if mark.epoch > self.epoch {
                return Ok(());
            }
            let store = &*self.store;
            let (group, partition) = (self.group(), self.partition);
            let rows = parking::of_subject(store, &self.tenant, group, partition, subject, 1).await?;
            // The index told of something that is there no more.
            let Some(head) = rows.first() else { return Ok(()) };
            let lot = ParkedRows::read(store, &self.tenant, group, partition).await?;
            let keys = lot.keys_at(head.offset);
            let older = lot.before(head.offset);
            let effect = match (reason.take(), older) {
                (Some(reason), _) => Err(reason),
                (None, Some((key, offset))) => Err(format!("the record of {key} at {offset} is older")),
                (None, None) => self.again(head, tries, last.as_deref()).await?,
            };
            let goes_on = effect.as_ref().is_ok_and(|effect| effect.goes_on);
            let contends = effect.as_ref().is_ok_and(|effect| effect.contends);
            let done = effect.is_ok() && !goes_on;
            let mut effect = match effect {
                Ok(effect) if goes_on => effect,
                Ok(mut effect) => {
                    effect.steps.extend(self.unpark(head.offset, &keys, &lot));
                    effect
                }
                Err(reason) => HandlerWrite::of(1, vec![parking::in_vain(head, group, &reason, self.books)]),
            };
            let removed = if done { i64::try_from(keys.len()).unwrap_or(0) } else { 0 };
            let parked = mark.parked - removed;
            let after = GroupProgress { present: true, epoch: self.epoch, parked, ..mark.clone() };
            let step = mark.step_to(&after, group, partition, self.books);
            match self.write(step, effect.take_writes(), wakeups).await? {
                CommitVerdict::Done => {
                    progress.rows += usize::from(done || goes_on);
                    if !goes_on {
                        return Ok(());
                    }
                }
                CommitVerdict::Overtaken | CommitVerdict::Repeated => {}
                CommitVerdict::Unfit(_, refused) if contends => last = refused,
                CommitVerdict::Unfit(why, _) | CommitVerdict::Never(why) => reason = Some(why),
            }
        }
        Ok(())
    }

    /// Takes a record away that was done after all, and has the next one of each of its keys tried: of those with several
    /// records behind it, each record once.
    fn unpark(&self, offset: u64, keys: &[&str], lot: &ParkedRows) -> Vec<Step> {
        let mut steps = parking::remove_all(self.group(), self.partition, keys, offset, self.books);
        let mut tried = Vec::new();
        for (key, next) in keys.iter().filter_map(|key| Some((*key, lot.next_of(key, offset)?))) {
            if !tried.contains(&next) {
                tried.push(next);
                steps.push(parking::ready_at(self.group(), self.partition, key, next, self.books));
            }
        }
        steps
    }

    /// The effect of a parked record, or why there is none.
    async fn again(
        &self,
        parked: &ParkedRecord,
        refused: u32,
        last: Option<&LastRefusal>,
    ) -> Result<Result<HandlerWrite, String>, StoreError> {
        let page = self.store.read_log(self.partition, parked.offset.saturating_sub(1), 1).await?;
        let Some(record) = page.records.first().filter(|record| offset_of(record) == parked.offset) else {
            return Ok(Err("the record was trimmed; it can only be discarded".to_owned()));
        };
        Ok(match self.handled(std::slice::from_ref(record), refused, last).await {
            Ok(effect) => Ok(effect),
            Err(HandlerError::Later(error)) => return Err(error),
            Err(HandlerError::Never(why)) => Err(why),
        })
    }
}
