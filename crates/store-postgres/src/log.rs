//! The log: reading, waiting, trimming, and resolving unknown outcomes.
//!
//! **Order.** A record gets its position from the head of its partition, a row that every transaction locks last and until its
//! end. So positions are gapless and in commit order, and a reader that has read a position has read all before it. A sequence does
//! not have this property: its numbers may commit late. Neither has the order of transaction ids, which are assigned at the first
//! write and not at the commit.
//!
//! **Wakeups.** Commits of this process wake its waiters directly. For commits of other processes one task polls the heads every
//! [`POLL_EVERY`], for all waiters together, and only while there are any. `NOTIFY` is not used: in a writing transaction it takes
//! a lock on the whole instance at commit.
//!
//! **Fencing.** [`resolve`](Shared::resolve) inserts an `aborted` record under the operation id. The unique index makes it wait
//! for a transaction that is inserting the same id. Then there is one record, which has the outcome.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use statehouse_store::limits::PAGE_MAX;
use statehouse_store::log::{RecordView, partition_of};
use statehouse_store::{
    Bug, Clock, LogPage, Position, Record, Resolution, StoreError, SystemClock, Tenant, Time, Type, bug,
};

use crate::batch::PlacedRecord;
use crate::connection::{Closing, DatabaseCall, Session};
use crate::fault::PostgresFault;
use crate::shared::Shared;
use crate::sql::{Arg, int_at, partition_at, value_at};
use crate::statements::{RECORD, append, bases_at, clock_at, clock_call, record_at, records_of};
use crate::tenancy::TransactionScope;

/// How often the heads are polled while a caller waits.
const POLL_EVERY: Duration = Duration::from_millis(25);
/// How many records one statement deletes.
const TRIM_AT_ONCE: i64 = 5_000;
/// How often fencing is tried.
const ATTEMPTS: u32 = 8;

const HEADS: &str = "statehouse_heads";

fn offset(value: i64) -> Result<u64, StoreError> {
    u64::try_from(value).map_err(|_| StoreError::corrupt(HEADS, "a position is negative"))
}

/// The rows of one of the calls that were sent.
fn answer_of(answers: &[Vec<tokio_postgres::Row>], call: usize) -> Result<&[tokio_postgres::Row], Bug> {
    let rows = answers.get(call).map(Vec::as_slice);
    rows.ok_or_else(|| bug!("{} answers, and none to call {call}", answers.len()))
}

fn unknown_table(fault: PostgresFault) -> StoreError {
    fault.into_error(&[])
}

impl Shared {
    /// The time by the clock that guards read.
    pub(crate) async fn now(&self) -> Result<Time, StoreError> {
        if let Some(clock) = &self.options.clock {
            return Ok(clock.now());
        }
        let answers = self.read(&TransactionScope::All, &[clock_call()]).await;
        clock_at(answer_of(&answers.map_err(unknown_table)?, 0)?)
    }

    fn check_partition(&self, partition: u32) -> Result<(), StoreError> {
        if partition < self.partitions {
            return Ok(());
        }
        Err(StoreError::no_partition(partition, self.partitions as usize))
    }

    /// Records, head and oldest position in one statement, and so as of one moment.
    pub(crate) async fn read_log(
        &self,
        partition: u32,
        after: u64,
        limit: usize,
    ) -> Result<LogPage, StoreError> {
        self.check_partition(partition)?;
        let text = format!(
            "select h.head, coalesce((select min(o.position) from {log} as o where o.partition = h.partition), \
             h.head + 1), l.partition is not null, {RECORD}\nfrom {heads} as h\nleft join lateral (\n\
             select *\nfrom {log} as l\nwhere l.partition = h.partition and l.position > $2\n\
             order by l.position\nlimit $3\n) as l on true\nwhere h.partition = $1\norder by l.position",
            log = self.names.log(),
            heads = self.names.heads(),
        );
        let after = i64::try_from(after).unwrap_or(i64::MAX);
        let limit = i64::try_from(limit.min(PAGE_MAX)).unwrap_or(i64::MAX);
        let args = vec![Arg::Partition(partition), Arg::Int(after), Arg::Int(limit)];
        let answers = self
            .read(&TransactionScope::All, &[DatabaseCall::new(text, args)])
            .await
            .map_err(unknown_table)?;
        let rows = answer_of(&answers, 0)?;
        let Some(first) = rows.first() else {
            return Err(StoreError::corrupt(HEADS, format!("partition {partition} has no row")));
        };
        let (head, oldest) = (offset(int_at(first, 0, HEADS)?)?, offset(int_at(first, 1, HEADS)?)?);
        let mut records = Vec::with_capacity(rows.len());
        for row in rows {
            // A partition without such records has one row, with the head alone.
            if value_at(row, 2, Type::Bool, HEADS)?.as_bool() == Some(true) {
                records.push(record_at(row, 3, RecordView::Log)?);
            }
        }
        Ok(LogPage { records, oldest, head })
    }

    /// Deletes records, a bounded number at a time. The newest is kept.
    pub(crate) async fn trim_log(&self, partition: u32, through: u64) -> Result<(), StoreError> {
        self.check_partition(partition)?;
        let text = format!(
            "with oldest as (\nselect min(o.position) as position from {log} as o where o.partition = $1\n)\n\
             delete from {log} as l\nusing {heads} as h, oldest\n\
             where h.partition = $1 and l.partition = $1 and l.position <= least($2, h.head - 1) \
             and l.position < oldest.position + $3\nreturning 1",
            log = self.names.log(),
            heads = self.names.heads(),
        );
        let through = i64::try_from(through).unwrap_or(i64::MAX);
        loop {
            let args = vec![Arg::Partition(partition), Arg::Int(through), Arg::Int(TRIM_AT_ONCE)];
            let session = self.fences.session(&self.connector).await?;
            let open =
                self.options.begin_sql(self.options.lock_timeout.as_millis(), "", &TransactionScope::All);
            let answers =
                session.run(Some(&open), &[DatabaseCall::new(text.as_str(), args)], Some("commit")).await;
            // Trimming is idempotent, so a lost answer is reported as unavailable and the caller retries.
            let rows = match (answers.rows, answers.closing) {
                (Ok(rows), Closing::Done) => rows,
                (Ok(_), _) => {
                    return Err(StoreError::unavailable("the connection broke while the log was trimmed"));
                }
                (Err(fault), _) => return Err(fault.into_error(&[])),
            };
            if rows.first().is_none_or(Vec::is_empty) {
                return Ok(());
            }
        }
    }

    /// The record of an operation, if there is one now.
    pub(crate) async fn find_operation(
        &self,
        tenant: &Tenant,
        operation: &str,
    ) -> Result<Option<Record>, StoreError> {
        let lookup = records_of(&self.names, std::iter::once((tenant, operation)));
        let found = self
            .read(&TransactionScope::of(tenant), &[lookup])
            .await
            .map_err(|fault| fault.into_error(&[]))?;
        found
            .first()
            .and_then(|rows| rows.first())
            .map(|row| record_at(row, 0, RecordView::Operation))
            .transpose()
    }

    /// Fences an operation id with an `aborted` record, or returns the outcome that is recorded.
    pub(crate) async fn resolve(&self, tenant: &Tenant, operation: &str) -> Result<Resolution, StoreError> {
        let mut attempt = 0;
        loop {
            let session = self.fences.session(&self.connector).await?;
            match self.try_fence(&session, tenant, operation).await? {
                FenceAttempt::Done(resolution) => return Ok(resolution),
                FenceAttempt::Failed(fault) if attempt + 1 == ATTEMPTS => return Err(fault.into_error(&[])),
                FenceAttempt::Unknown(why) if attempt + 1 == ATTEMPTS => {
                    return Err(StoreError::unknown(operation, why));
                }
                // Fencing is idempotent: a retry finds the record of the first attempt.
                FenceAttempt::Failed(fault) if !fault.is_passing() => return Err(fault.into_error(&[])),
                FenceAttempt::Failed(_) | FenceAttempt::Unknown(_) => {
                    self.connector.back_off_after_conflict(attempt).await;
                }
            }
            attempt += 1;
        }
    }

    async fn try_fence(
        &self,
        session: &Session,
        tenant: &Tenant,
        operation: &str,
    ) -> Result<FenceAttempt, StoreError> {
        let lookup = || records_of(&self.names, std::iter::once((tenant, operation)));
        let scope = TransactionScope::of(tenant);
        let found = self.read(&scope, &[lookup(), clock_call()]).await;
        let found = match found {
            Ok(found) => found,
            Err(fault) => return Ok(FenceAttempt::Failed(fault)),
        };
        if let Some(row) = found.first().and_then(|rows| rows.first()) {
            return Ok(FenceAttempt::Done(Resolution::of_record(record_at(row, 0, RecordView::Operation)?)));
        }
        let now = match &self.options.clock {
            Some(clock) => clock.now(),
            None => clock_at(answer_of(&found, 1)?)?,
        };
        let record = Record::aborted(tenant, operation, now);
        let partition = partition_of(tenant, "", operation, self.partitions);
        let calls = append(
            &self.names,
            &BTreeMap::from([(partition, 1)]),
            std::iter::once(PlacedRecord::alone(partition, &record)),
        );
        // The lock timeout is the statement timeout, to wait for an original that is still in flight.
        let open = self.options.begin_sql(self.options.statement_timeout.as_millis(), "", &scope);
        let answers = session.run(Some(&open), &calls, Some("commit")).await;
        match (answers.rows, answers.closing) {
            (Ok(rows), Closing::Done) => {
                let bases = bases_at(answer_of(&rows, calls.len() - 1)?)?;
                self.publish(bases.iter().map(|(p, base)| Position { partition: *p, offset: base + 1 }));
                Ok(FenceAttempt::Done(Resolution::Aborted))
            }
            (Ok(_) | Err(PostgresFault::Lost(_)), Closing::Unknown(why)) => Ok(FenceAttempt::Unknown(why)),
            (Ok(_), Closing::Unsent) => {
                Ok(FenceAttempt::Failed(PostgresFault::Busy("the commit was not sent".into())))
            }
            // Another transaction recorded the operation meanwhile. The next attempt reads its record.
            (Err(fault), _) => Ok(FenceAttempt::Failed(fault)),
        }
    }

    /// Reads the heads and publishes them to the waiters of this process.
    async fn read_heads(&self) -> Result<(), StoreError> {
        let text = format!("select h.partition, h.head from {} as h", self.names.heads());
        let answers = self
            .read(&TransactionScope::All, &[DatabaseCall::new(text, Vec::new())])
            .await
            .map_err(unknown_table)?;
        let mut positions = Vec::with_capacity(self.partitions as usize);
        for row in answer_of(&answers, 0)? {
            let partition = partition_at(row, 0, HEADS)?;
            positions.push(Position { partition, offset: offset(int_at(row, 1, HEADS)?)? });
        }
        self.publish(positions.into_iter());
        Ok(())
    }

    pub(crate) async fn wait_log(
        self: &Arc<Shared>,
        seen: &[u64],
        at_most: Duration,
    ) -> Result<Vec<u64>, StoreError> {
        let news = |heads: &Vec<u64>| {
            heads.iter().enumerate().any(|(number, head)| *head > seen.get(number).copied().unwrap_or(0))
        };
        let mut heads = self.heads.subscribe();
        if !news(&heads.borrow()) {
            self.read_heads().await?;
            let _waiting = LogWaiter::register(self);
            let clock = self.clock();
            let timed_out = tokio::select! {
                biased;
                _ = heads.wait_for(|heads| news(heads) || self.is_closed()) => false,
                () = clock.sleep(at_most) => true,
            };
            if timed_out {
                self.read_heads().await?;
            }
        }
        if self.is_closed() {
            return Err(StoreError::unavailable("the store was closed"));
        }
        let heads = self.heads.borrow().clone();
        Ok(heads)
    }
}

enum FenceAttempt {
    Done(Resolution),
    /// Nothing was recorded.
    Failed(PostgresFault),
    /// The fence may have been recorded.
    Unknown(String),
}

/// A caller that waits for the log to grow. The first one starts the task that polls the heads.
struct LogWaiter<'s>(&'s Shared);

impl<'s> LogWaiter<'s> {
    fn register(shared: &'s Arc<Shared>) -> LogWaiter<'s> {
        if shared.waiting.fetch_add(1, Ordering::SeqCst) == 0 && !shared.polling.swap(true, Ordering::SeqCst)
        {
            tokio::spawn(poll(shared.clone()));
        }
        LogWaiter(shared)
    }
}

impl Drop for LogWaiter<'_> {
    fn drop(&mut self) {
        self.0.waiting.fetch_sub(1, Ordering::SeqCst);
    }
}

/// Polls the heads while a caller waits. It always uses real time, as other processes do.
async fn poll(shared: Arc<Shared>) {
    loop {
        SystemClock.sleep(POLL_EVERY).await;
        if shared.is_closed() {
            break;
        }
        if shared.waiting.load(Ordering::SeqCst) == 0 {
            shared.polling.store(false, Ordering::SeqCst);
            // A caller may have registered between the two lines and seen a task that was about to end.
            if shared.waiting.load(Ordering::SeqCst) == 0 || shared.polling.swap(true, Ordering::SeqCst) {
                break;
            }
        }
        // An error is ignored here: callers get it from their own calls, and the next poll may succeed.
        let _ = shared.read_heads().await;
    }
}
