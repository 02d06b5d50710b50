//! The log's side of the store: reading, waiting, forgetting, and settling what is unknown.
//!
//! **Order.** A record gets its position from the head of its partition, a row that every committing transaction takes
//! as its last lock and keeps until its end. So positions are gapless and in the order of the commits, and a
//! reader that has seen a position has seen all before it. A sequence would not do: it gives out numbers that commit
//! late. Nor would the order of transaction ids: ids are given out at the first write, not at the commit.
//!
//! **Waking.** Commits of this process wake its waiters directly. For those of other processes one task looks at the
//! heads every [`POLL_EVERY`], for all waiters together, and only while somebody waits. `NOTIFY` is not used: within
//! a writing transaction it takes a lock on the whole instance at commit.
//!
//! **Claim or learn.** [`resolve`](Shared::resolve) inserts an `aborted` record under the operation id. The unique
//! index makes it wait for whoever is about to insert the same id, and then there is one record, which says what
//! happened.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use statehouse_store::limits::PAGE_MAX;
use statehouse_store::log::{RecordView, partition_of};
use statehouse_store::{Clock, LogPage, Position, Record, Resolution, StoreError, SystemClock, Tenant};

use crate::batch::Placed;
use crate::fault::Fault;
use crate::link::{Call, Closing, Session};
use crate::shared::Shared;
use crate::sql::{Arg, int_at};
use crate::statements::{RECORD, append, bases_at, clock_at, clock_call, record_at, records_of};
use crate::tenancy::Scope;

/// How often the heads are looked at while somebody waits.
const POLL_EVERY: Duration = Duration::from_millis(25);
/// How many records are forgotten in one statement.
const TRIM_AT_ONCE: i64 = 5_000;
/// How often a claim is tried.
const ATTEMPTS: u32 = 8;

const HEADS: &str = "statehouse_heads";

fn offset(value: i64) -> Result<u64, StoreError> {
    u64::try_from(value).map_err(|_| StoreError::corrupt(HEADS, "a position is negative"))
}

fn unknown_table(fault: Fault) -> StoreError {
    fault.into_error(&[])
}

impl Shared {
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
        let answers = self.read(&Scope::All, &[Call::new(text, args)]).await.map_err(unknown_table)?;
        let rows = answers.first().map(Vec::as_slice).unwrap_or_default();
        let Some(first) = rows.first() else {
            return Err(StoreError::corrupt(HEADS, format!("partition {partition} has no row")));
        };
        let (head, oldest) = (offset(int_at(first, 0, HEADS)?)?, offset(int_at(first, 1, HEADS)?)?);
        let is_record = |row: &&tokio_postgres::Row| row.try_get::<_, bool>(2).unwrap_or(false);
        let records = rows
            .iter()
            .filter(is_record)
            .map(|row| record_at(row, 3, RecordView::Log))
            .collect::<Result<_, _>>()?;
        Ok(LogPage { records, oldest, head })
    }

    /// Forgets records, a bounded number at a time. The newest stays.
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
            let session = self.claims.session(&self.dialer).await?;
            let open = self.options.open_words(self.options.lock_timeout.as_millis(), "", &Scope::All);
            let answers = session.run(Some(&open), &[Call::new(text.as_str(), args)], Some("commit")).await;
            // To forget is safe to repeat, so a lost answer is no more than a reason to ask again.
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

    /// Claims an operation id with an `aborted` record, or learns what became of it.
    /// The record of an operation, if there is one now.
    pub(crate) async fn find_operation(
        &self,
        tenant: &Tenant,
        operation: &str,
    ) -> Result<Option<Record>, StoreError> {
        let lookup = records_of(&self.names, std::iter::once((tenant, operation)));
        let found = self.read(&Scope::of(tenant), &[lookup]).await.map_err(|fault| fault.into_error(&[]))?;
        found
            .first()
            .and_then(|rows| rows.first())
            .map(|row| record_at(row, 0, RecordView::Operation))
            .transpose()
    }

    pub(crate) async fn resolve(&self, tenant: &Tenant, operation: &str) -> Result<Resolution, StoreError> {
        let mut attempt = 0;
        loop {
            let session = self.claims.session(&self.dialer).await?;
            match self.claim(&session, tenant, operation).await? {
                Claim::Settled(resolution) => return Ok(resolution),
                Claim::Failed(fault) if attempt + 1 == ATTEMPTS => return Err(fault.into_error(&[])),
                Claim::Unknown(why) if attempt + 1 == ATTEMPTS => {
                    return Err(StoreError::unknown(operation, why));
                }
                // To claim is safe to repeat: the second finds the record of the first.
                Claim::Failed(fault) if !fault.is_passing() => return Err(fault.into_error(&[])),
                Claim::Failed(_) | Claim::Unknown(_) => self.dialer.step_aside(attempt).await,
            }
            attempt += 1;
        }
    }

    async fn claim(&self, session: &Session, tenant: &Tenant, operation: &str) -> Result<Claim, StoreError> {
        let lookup = || records_of(&self.names, std::iter::once((tenant, operation)));
        let scope = Scope::of(tenant);
        let found = self.read(&scope, &[lookup(), clock_call()]).await;
        let found = match found {
            Ok(found) => found,
            Err(fault) => return Ok(Claim::Failed(fault)),
        };
        if let Some(row) = found.first().and_then(|rows| rows.first()) {
            return Ok(Claim::Settled(Resolution::of_record(record_at(row, 0, RecordView::Operation)?)));
        }
        let now = match &self.options.clock {
            Some(clock) => clock.now(),
            None => clock_at(found.get(1).map(Vec::as_slice).unwrap_or_default())?,
        };
        let record = Record::aborted(tenant, operation, now);
        let partition = partition_of(tenant, "", operation, self.partitions);
        let calls = append(
            &self.names,
            &BTreeMap::from([(partition, 1)]),
            std::iter::once(Placed::alone(partition, &record)),
        );
        // An original that is still in flight is waited for as long as a statement may take.
        let open = self.options.open_words(self.options.statement_timeout.as_millis(), "", &scope);
        let answers = session.run(Some(&open), &calls, Some("commit")).await;
        match (answers.rows, answers.closing) {
            (Ok(rows), Closing::Done) => {
                let bases = bases_at(rows.last().map(Vec::as_slice).unwrap_or_default())?;
                self.publish(bases.iter().map(|(p, base)| Position { partition: *p, offset: base + 1 }));
                Ok(Claim::Settled(Resolution::Aborted))
            }
            (Ok(_) | Err(Fault::Lost(_)), Closing::Unknown(why)) => Ok(Claim::Unknown(why)),
            (Ok(_), Closing::Unsent) => {
                Ok(Claim::Failed(Fault::Busy("the transaction was not closed".into())))
            }
            // Somebody recorded the operation meanwhile: the next attempt reads what.
            (Err(fault), _) => Ok(Claim::Failed(fault)),
        }
    }

    /// The heads as they are stored, which this process then knows too.
    async fn look_at_heads(&self) -> Result<(), StoreError> {
        let text = format!("select h.partition, h.head from {} as h", self.names.heads());
        let answers = self.read(&Scope::All, &[Call::new(text, Vec::new())]).await.map_err(unknown_table)?;
        let mut positions = Vec::with_capacity(self.partitions as usize);
        for row in answers.first().map(Vec::as_slice).unwrap_or_default() {
            let partition = u32::try_from(int_at(row, 0, HEADS)?).unwrap_or(u32::MAX);
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
            self.look_at_heads().await?;
            let _waiting = Waiting::register(self);
            let clock = self.clock();
            let timed_out = tokio::select! {
                biased;
                _ = heads.wait_for(|heads| news(heads) || self.is_closed()) => false,
                () = clock.sleep(at_most) => true,
            };
            if timed_out {
                self.look_at_heads().await?;
            }
        }
        if self.is_closed() {
            return Err(StoreError::unavailable("the store was closed"));
        }
        let heads = self.heads.borrow().clone();
        Ok(heads)
    }
}

enum Claim {
    Settled(Resolution),
    /// Nothing was recorded.
    Failed(Fault),
    /// The claim may have been recorded.
    Unknown(String),
}

/// Somebody waits for the log to grow. The first of them starts the task that looks at the heads.
struct Waiting<'s>(&'s Shared);

impl<'s> Waiting<'s> {
    fn register(shared: &'s Arc<Shared>) -> Waiting<'s> {
        if shared.waiting.fetch_add(1, Ordering::SeqCst) == 0 && !shared.polling.swap(true, Ordering::SeqCst)
        {
            tokio::spawn(poll(shared.clone()));
        }
        Waiting(shared)
    }
}

impl Drop for Waiting<'_> {
    fn drop(&mut self) {
        self.0.waiting.fetch_sub(1, Ordering::SeqCst);
    }
}

/// Looks at the heads as long as somebody waits. It always measures real time: other processes do.
async fn poll(shared: Arc<Shared>) {
    loop {
        SystemClock.sleep(POLL_EVERY).await;
        if shared.is_closed() {
            break;
        }
        if shared.waiting.load(Ordering::SeqCst) == 0 {
            shared.polling.store(false, Ordering::SeqCst);
            // Somebody may have come between the two lines, and found a task that was about to end.
            if shared.waiting.load(Ordering::SeqCst) == 0 || shared.polling.swap(true, Ordering::SeqCst) {
                break;
            }
        }
        // A store that cannot be reached is the affair of those who call it; the next look may succeed.
        let _ = shared.look_at_heads().await;
    }
}
