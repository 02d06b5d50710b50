//! A group of the house at work: one bounded step on one partition.
//!
//! A step reads a page of the log, sorts its records by tenant, and sends each tenant's on a [`Course`] of its own, all at
//! once. Then the low-water mark moves up to the first record that is not done.

use std::any::Any;
use std::collections::BTreeMap;
use std::future::{Future, poll_fn};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::pin::Pin;
use std::sync::Arc;
use std::task::Poll;
use std::time::Duration;

use async_trait::async_trait;
use statehouse_store::{
    Address, Commit, Consistency, Entry, Ids, Plan, Position, Query, Reason, Record, RetryPolicy, Row, Step,
    Store, StoreError, Tenant, Time, commit_known,
};
use tokio::task::JoinSet;

use super::parking::{self, Lot, Parked, READY};
use super::progress::{Books, Mark, misuse};
use super::{Effect, Handler, Reading, Unable, column_of, is_applied, offset_of};
use crate::worker::{Next, Progress, Shift, Worker};

/// Records that a handler gets at once, at most.
const RUN_MAX: usize = 48;
/// How often a record is tried whose plan is refused, before it is parked. Rows that others write at the same time make
/// for a refusal now and then.
const TRIES_MAX: u32 = 8;
/// How often a row of progress may be found changed, in one course.
const OVERTAKEN_MAX: u32 = 8;
/// Parts of records that one course writes, before it lets others of the process have their turn.
const PARTS_MAX: usize = 64;
/// Parked records that one step tries again.
const READY_MAX: usize = 16;

/// The worker of a group: as many shards as the log has partitions.
#[derive(Debug)]
pub struct Consumer {
    name: String,
    partitions: u32,
    handler: Arc<dyn Handler>,
}

impl Consumer {
    /// The worker of a handler's group, over a log of so many partitions.
    pub fn of(handler: Arc<dyn Handler>, partitions: u32) -> Consumer {
        Consumer { name: format!("{}.consume", handler.group()), partitions, handler }
    }
}

#[async_trait]
impl Worker for Consumer {
    fn name(&self) -> &str {
        &self.name
    }

    fn shards(&self) -> u32 {
        self.partitions
    }

    async fn step(&self, shift: &Shift<'_>, limit: usize) -> Result<Progress, StoreError> {
        feed(&self.handler, shift, limit).await
    }
}

/// One step of a group on the partition that is the shift's shard.
pub async fn feed(
    handler: &Arc<dyn Handler>,
    shift: &Shift<'_>,
    limit: usize,
) -> Result<Progress, StoreError> {
    let books = Books::open()?;
    let (group, partition) = (handler.group(), shift.shard);
    let mut progress = Progress::idle();
    let own = books.address(&books.house, group, partition)?;
    let rows = shift.store.get(std::slice::from_ref(&own), Consistency::Strong).await?;
    let low = Mark::of(rows.first().and_then(Option::as_ref));
    let course = |tenant: &Tenant| Course {
        store: shift.store.clone(),
        ids: shift.ids.clone(),
        handler: handler.clone(),
        books,
        tenant: tenant.clone(),
        partition,
        epoch: shift.held.epoch(),
        era: low.era,
        now: shift.clock.now(),
    };
    for (tenant, subject) in ready(shift, group).await? {
        course(&tenant).retry(&subject, &mut progress).await?;
    }
    let page = shift.store.read_log(partition, low.reached, limit).await?;
    // A group that has not begun yet begins with what there is.
    let trimmed = page.oldest.saturating_sub(1).saturating_sub(low.reached);
    let missed = if low.present { trimmed } else { 0 };
    if missed > 0 {
        progress.failures.push(format!("{missed} records were trimmed before {group} could read them"));
    }
    let last = page.records.last().map_or(low.reached + trimmed, offset_of);
    if let Some(first) = page.records.first() {
        progress.lag = shift.clock.now().since(first.at);
    }
    let mut by_tenant: BTreeMap<Tenant, Vec<Record>> = BTreeMap::new();
    for record in page.records.into_iter().filter(|record| is_applied(record) && handler.wants(record)) {
        by_tenant.entry(record.tenant.clone()).or_default().push(record);
    }
    let tenants = by_tenant.keys().map(|tenant| books.address(tenant, group, partition));
    let addresses = tenants.collect::<Result<Vec<Address>, StoreError>>()?;
    let rows = match addresses.is_empty() {
        true => Vec::new(),
        false => shift.store.get(&addresses, Consistency::Strong).await?,
    };
    let mut courses: JoinSet<Finished> = JoinSet::new();
    for ((tenant, records), row) in by_tenant.into_iter().zip(rows) {
        courses.spawn(course(&tenant).run(Mark::of(row.as_ref()), records));
    }
    let (mut reached, mut error, mut goes_on) = (last, None, false);
    while let Some(finished) = courses.join_next().await {
        let finished = finished.map_err(|panic| StoreError::unavailable(format!("{group}: {panic}")))?;
        progress.rows += finished.rows;
        progress.failures.extend(finished.parked);
        if let Some((offset, why)) = finished.stopped {
            reached = reached.min(offset.saturating_sub(1));
            error = Some(why);
        }
        if let Some(offset) = finished.goes_on {
            reached = reached.min(offset.saturating_sub(1));
            goes_on = true;
        }
    }
    if reached > low.reached || missed > 0 {
        let missed = low.missed + column_of(missed);
        let after = Mark { reached, missed, epoch: shift.held.epoch(), ..low.clone() };
        let plan = Plan::of(&books.house, "log.reached")
            .step(low.low_water_to(&after, group, partition, books))
            .step(shift.guard())
            .without_rows()
            .build()
            .map_err(misuse)?;
        // If it is refused, the group was moved, or the partition is another's: the next step will see.
        commit_known(&**shift.store, &plan, RetryPolicy::WORKER).await?;
    }
    match error {
        Some(error) if progress.rows == 0 => return Err(error),
        Some(error) => progress.failures.push(error.to_string()),
        None if goes_on || last < page.head => progress.next = Next::Now,
        None => progress.next = Next::Log(Position { partition, offset: page.head }),
    }
    // Passing over what does not concern the group is work, too.
    match progress.next {
        Next::Now => progress.rows = progress.rows.max(1),
        Next::Log(_) => progress.lag = Duration::ZERO,
        _ => {}
    }
    Ok(progress)
}

/// Waits for a handler. One that panics over a record can do it never, and holds up nothing else (I5).
async fn unpanicked<T>(
    mut handling: Pin<Box<dyn Future<Output = Result<T, Unable>> + Send + '_>>,
) -> Result<T, Unable> {
    let polled = poll_fn(|context| {
        let poll = catch_unwind(AssertUnwindSafe(|| handling.as_mut().poll(context)));
        poll.unwrap_or_else(|panic| Poll::Ready(Err(Unable::Never(said(&*panic)))))
    });
    polled.await
}

/// What a handler said that panicked.
fn said(panic: &(dyn Any + Send)) -> String {
    let text = panic.downcast_ref::<&str>().copied();
    let text = text.or_else(|| panic.downcast_ref::<String>().map(String::as_str));
    format!("the handler panicked: {}", text.unwrap_or("it did not say why"))
}

/// The keys of which something is to be tried again.
async fn ready(shift: &Shift<'_>, group: &str) -> Result<Vec<(Tenant, String)>, StoreError> {
    let books = Books::open()?;
    let query = Query::all_tenants(&books.parked, READY, Books::key(group, shift.shard))
        .and_then(|query| query.limit(READY_MAX))
        .map_err(misuse)?;
    let page = shift.store.query(&query).await?;
    let key = |row: &Row| (row.tenant().clone(), Parked::of(row).subject);
    let mut keys: Vec<(Tenant, String)> = page.rows.iter().map(key).collect();
    keys.dedup();
    Ok(keys)
}

/// One tenant's records of a page.
struct Course {
    store: Arc<dyn Store>,
    ids: Ids,
    handler: Arc<dyn Handler>,
    books: &'static Books,
    tenant: Tenant,
    partition: u32,
    epoch: i64,
    era: i64,
    now: Time,
}

/// What came of it.
#[derive(Debug, Default)]
struct Finished {
    rows: usize,
    /// What was parked, and why.
    parked: Vec<String>,
    /// The first record that is not done, and what stopped it.
    stopped: Option<(u64, StoreError)>,
    /// The first record that is not done, because it goes on in the next step.
    goes_on: Option<u64>,
}

/// What is to be committed for the first records of a rest.
struct Drafted {
    effect: Effect,
    /// How the first record is parked, if it is.
    parked: Option<String>,
}

impl Drafted {
    /// How many rows say that the first record is parked: all of its steps, if it is.
    fn rows_parked(&self) -> i64 {
        self.parked.as_ref().map_or(0, |_| i64::try_from(self.effect.steps.len()).unwrap_or(0))
    }
}

/// What a commit means for the course.
enum Judged {
    /// It is done.
    Done,
    /// The row of progress is not what was read.
    Overtaken,
    /// The handler's own steps do not fit, for this reason.
    Unfit(String),
    /// It can never be written.
    Never(String),
}

impl Course {
    fn group(&self) -> &str {
        self.handler.group()
    }

    async fn mark(&self) -> Result<Mark, StoreError> {
        let address = self.books.address(&self.tenant, self.group(), self.partition)?;
        let rows = self.store.get(std::slice::from_ref(&address), Consistency::Strong).await?;
        Ok(Mark::of(rows.first().and_then(Option::as_ref)))
    }

    async fn run(self, mark: Mark, records: Vec<Record>) -> Finished {
        let mut finished = Finished::default();
        let mut at = 0;
        if let Err(error) = self.go(mark, &records, &mut at, &mut finished).await {
            finished.stopped = records.get(at).map(|record| (offset_of(record), error));
        }
        finished
    }

    /// Goes through the records; `at` is the first one that is not done.
    async fn go(
        &self,
        mut mark: Mark,
        records: &[Record],
        at: &mut usize,
        finished: &mut Finished,
    ) -> Result<(), StoreError> {
        let (mut parked, mut known) = (Lot::default(), false);
        // How many of the next records are tried one by one, because a plan of several could not be written.
        let mut singly = 0;
        let (mut tries, mut overtaken, mut parts) = (0, 0, 0);
        let mut why = None;
        // What the next records make, as it was made while those before them were being written.
        let mut ahead: Option<Effect> = None;
        loop {
            while records.get(*at).is_some_and(|record| offset_of(record) <= mark.done_in(self.era)) {
                *at += 1;
            }
            let Some(first) = records.get(*at) else { return Ok(()) };
            if !known {
                parked = match mark.parked {
                    0 => Lot::default(),
                    _ => Lot::read(&*self.store, &self.tenant, self.group(), self.partition).await?,
                };
                known = true;
            }
            let waits = |record: &&Record| {
                parked.is_empty() || !self.handler.subjects(record).iter().any(|key| parked.has(key))
            };
            let most = if singly > 0 { 1 } else { RUN_MAX };
            let count = records.iter().skip(*at).take(most).take_while(waits).count();
            let run = records.get(*at..*at + count).unwrap_or_default();
            let early = ahead.take();
            let was_early = early.is_some();
            let handled = async || match early {
                Some(effect) => Ok(effect),
                None => self.handled(run, tries).await,
            };
            let mut drafted = match (run.is_empty(), why.take()) {
                (true, _) => self.behind(first, &parked),
                (false, Some(why)) => self.poison(first, why),
                (false, None) => match handled().await {
                    Ok(effect) => Drafted {
                        effect: Effect { taken: effect.taken.clamp(1, count), ..effect },
                        parked: None,
                    },
                    Err(_) if count > 1 => {
                        singly = count;
                        continue;
                    }
                    Err(Unable::Later(error)) => return Err(error),
                    Err(Unable::Never(why)) => self.poison(first, why),
                },
            };
            let taken = if drafted.effect.goes_on { 0 } else { drafted.effect.taken };
            let after = self.after(&mark, records.get(*at..*at + taken).unwrap_or_default(), &drafted);
            let rest = records.iter().skip(*at + taken).take(RUN_MAX).take_while(waits).count();
            let may = taken > 0 && singly == 0 && drafted.parked.is_none();
            let next = records.get(*at + taken..*at + taken + rest).filter(|_| may).unwrap_or_default();
            let progress = mark.step_to(&after, self.group(), self.partition, self.books);
            let (steps, entry) = drafted.effect.take_writes();
            let (judged, early) = tokio::join!(self.write(progress, steps, entry), self.handled_ahead(next));
            match judged? {
                Judged::Done => {
                    ahead = early;
                    (tries, overtaken) = (0, 0);
                    *at += taken;
                    finished.rows += taken.max(1);
                    singly = singly.saturating_sub(taken);
                    mark = after;
                    if let Some(reason) = drafted.parked {
                        let (subjects, offset) = (self.handler.subjects(first), offset_of(first));
                        let place = Position { partition: self.partition, offset };
                        finished
                            .parked
                            .push(format!("{place} of {} is parked: {reason}", subjects.join(", ")));
                        subjects.into_iter().for_each(|subject| parked.add(subject, offset));
                    }
                    parts += usize::from(taken == 0);
                    if parts == PARTS_MAX {
                        finished.goes_on = records.get(*at).map(offset_of);
                        return Ok(());
                    }
                }
                Judged::Overtaken => {
                    overtaken += 1;
                    let seen = self.mark().await?;
                    if seen.epoch > self.epoch || overtaken > OVERTAKEN_MAX {
                        let why = format!("another process has the partition, at epoch {}", seen.epoch);
                        return Err(StoreError::unavailable(why));
                    }
                    (mark, known) = (seen, false);
                }
                // Made anew, from what is so now.
                Judged::Unfit(_) | Judged::Never(_) if was_early => {}
                Judged::Unfit(_) if tries < TRIES_MAX => tries += 1,
                Judged::Unfit(reason) if drafted.effect.contends => {
                    return Err(StoreError::unavailable(reason));
                }
                Judged::Unfit(_) | Judged::Never(_) if count > 1 => (singly, tries) = (count, 0),
                Judged::Unfit(reason) | Judged::Never(reason) => (why, tries) = (Some(reason), 0),
            }
        }
    }

    /// What the handler makes of records.
    async fn handled(&self, records: &[Record], refused: u32) -> Result<Effect, Unable> {
        let reading = self.reading(refused);
        unpanicked(self.handler.handle(records, &reading)).await
    }

    /// What the handler makes of records before those in front of them are done. Whatever is wrong with them is found when it
    /// is their turn.
    async fn handled_ahead(&self, records: &[Record]) -> Option<Effect> {
        let reading = self.reading(0);
        match records {
            [] => None,
            some => unpanicked(self.handler.ahead(some, &reading)).await.ok().flatten(),
        }
    }

    fn reading(&self, refused: u32) -> Reading<'_> {
        Reading { store: &*self.store, tenant: &self.tenant, now: self.now, refused }
    }

    /// A record that cannot be done is parked (I5).
    fn poison(&self, record: &Record, reason: String) -> Drafted {
        Drafted { effect: Effect::of(1, self.park(record, &reason, 1)), parked: Some(reason) }
    }

    /// A record of a key that has something parked waits behind it (I4), unless it is there already.
    fn behind(&self, record: &Record, parked: &Lot) -> Drafted {
        let (subjects, offset) = (self.handler.subjects(record), offset_of(record));
        if subjects.iter().any(|subject| parked.holds(subject, offset)) {
            return Drafted { effect: Effect::of(1, vec![]), parked: None };
        }
        let reason = "an older record of its key is parked".to_owned();
        Drafted { effect: Effect::of(1, self.park(record, &reason, 0)), parked: Some(reason) }
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
    fn after(&self, mark: &Mark, records: &[Record], drafted: &Drafted) -> Mark {
        Mark {
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
        steps: Vec<Step>,
        entry: Option<Entry>,
    ) -> Result<Judged, StoreError> {
        let mut plan = Plan::of(&self.tenant, self.ids.next()).step(progress).steps(steps).without_rows();
        plan.entry = entry;
        let plan = match plan.build() {
            Ok(plan) => plan,
            Err(error) => return Ok(Judged::Never(error.to_string())),
        };
        Ok(match commit_known(&*self.store, &plan, RetryPolicy::WORKER).await {
            Ok(Commit::Applied(_)) => Judged::Done,
            Ok(Commit::Refused(refused)) if refused.step == 0 => Judged::Overtaken,
            // No race: what is added is too much for what is there.
            Ok(Commit::Refused(refused)) if matches!(refused.reason, Reason::Overflow { .. }) => {
                Judged::Never(refused.describe(&plan))
            }
            Ok(Commit::Refused(refused)) => Judged::Unfit(refused.describe(&plan)),
            Ok(Commit::Fenced) => Judged::Overtaken,
            Err(error @ StoreError::LimitExceeded { .. }) => Judged::Never(error.to_string()),
            Err(error) => return Err(error),
        })
    }

    /// Tries what is parked of a key again: the oldest, and if it is done, the next one later.
    async fn retry(&self, subject: &str, progress: &mut Progress) -> Result<(), StoreError> {
        let mut reason = None;
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
            let lot = Lot::read(store, &self.tenant, group, partition).await?;
            let keys = lot.keys_at(head.offset);
            let older = lot.before(head.offset);
            let effect = match (reason.take(), older) {
                (Some(reason), _) => Err(reason),
                (None, Some((key, offset))) => Err(format!("the record of {key} at {offset} is older")),
                (None, None) => self.again(head, tries).await?,
            };
            let goes_on = effect.as_ref().is_ok_and(|effect| effect.goes_on);
            let contends = effect.as_ref().is_ok_and(|effect| effect.contends);
            let done = effect.is_ok() && !goes_on;
            let effect = match effect {
                Ok(effect) if goes_on => effect,
                Ok(mut effect) => {
                    effect.steps.extend(self.unpark(head.offset, &keys, &lot));
                    effect
                }
                Err(reason) => Effect::of(1, vec![parking::in_vain(head, group, &reason, self.books)]),
            };
            let removed = if done { i64::try_from(keys.len()).unwrap_or(0) } else { 0 };
            let parked = mark.parked - removed;
            let after = Mark { present: true, epoch: self.epoch, parked, ..mark.clone() };
            let step = mark.step_to(&after, group, partition, self.books);
            match self.write(step, effect.steps, effect.entry).await? {
                Judged::Done => {
                    progress.rows += usize::from(done || goes_on);
                    if !goes_on {
                        return Ok(());
                    }
                }
                Judged::Overtaken => {}
                Judged::Unfit(_) if contends => {}
                Judged::Unfit(why) | Judged::Never(why) => reason = Some(why),
            }
        }
        Ok(())
    }

    /// Takes a record away that was done after all, and has the next one of each of its keys tried: of those with several
    /// records behind it, each record once.
    fn unpark(&self, offset: u64, keys: &[&str], lot: &Lot) -> Vec<Step> {
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
    async fn again(&self, parked: &Parked, refused: u32) -> Result<Result<Effect, String>, StoreError> {
        let page = self.store.read_log(self.partition, parked.offset.saturating_sub(1), 1).await?;
        let Some(record) = page.records.first().filter(|record| offset_of(record) == parked.offset) else {
            return Ok(Err("the record was trimmed; it can only be discarded".to_owned()));
        };
        Ok(match self.handled(std::slice::from_ref(record), refused).await {
            Ok(effect) => Ok(effect),
            Err(Unable::Later(error)) => return Err(error),
            Err(Unable::Never(why)) => Err(why),
        })
    }
}
