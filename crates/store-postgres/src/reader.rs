//! The pool of reading connections, and the queue of reads that wait for one.
//!
//! Each reading connection is a *slot*. A read that finds a free slot uses it at once, without a queue and a change of tasks. If all
//! slots are in use, the read is queued. A caller that releases a slot while reads are queued hands it over to the task of that slot.
//! The task takes the first queued read and all reads of the same shape, runs them as one statement ([`crate::multi_read`]) and gives
//! each caller its rows, until the queue is empty. On a machine with few cores the server handles few busy connections better than
//! many.
//!
//! - R1. No read waits while a slot is free. *Slots are released, acquired and queued for under one lock.*
//! - R2. A cancelled read does not affect others. *A slot is released when its user is dropped. A statement for several reads is run by
//!   the slot's task. Cancelled reads in the queue are not run.*
//! - R3. A read is not affected by the errors or the size of others. *If a statement of several reads fails, unless the connection was
//!   lost, each read is run by itself. Long reads are never joined with others.*
//! - R4. A caller gets only its own rows. *Each item has its own position in the arrays, and the tenant is one of its constants. If
//!   row-level security is on, the transaction names the tenants of all reads in it.*

use std::collections::VecDeque;
use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use statehouse_store::bug;
use statehouse_store::{ReadRequest, ReadResult, StoreError};
use tokio::sync::{Notify, oneshot};

use crate::connection::LazyConnection;
use crate::fault::PostgresFault;
use crate::multi_read::{FoundRows, MultiRead, OwnedMultiRead, ReadCall};
use crate::shared::Shared;
use crate::tenancy::TransactionScope;

/// Reads in one statement, at most. More gain little and add latency.
const READS_MAX: usize = 32;
/// Rows of one statement of several reads, at most, by the limits of the reads.
const ROWS_MAX: usize = 2_000;
/// A read of more rows than this is long and is run by itself.
const LONG: usize = 200;
/// How often a read is tried.
pub(crate) const ATTEMPTS: u32 = 4;

/// The reading connections and the queued reads.
pub(crate) struct Readers {
    state: Mutex<ReaderState>,
    slots: Vec<ReaderSlot>,
}

/// A reading connection.
#[derive(Default)]
struct ReaderSlot {
    connection: LazyConnection,
    /// Notified when the slot is handed over to its task.
    handed_over: Notify,
}

#[derive(Default)]
struct ReaderState {
    /// Free slots. The one that was released last is at the end and is used first: its connection is warm.
    empty: Vec<usize>,
    waiting: VecDeque<PendingRead>,
}

impl ReaderState {
    /// Releases a slot. It is used next, unless its last statement was not answered: then it is used last.
    fn release(&mut self, slot: usize, is_answered: bool) {
        let index = if is_answered { self.empty.len() } else { 0 };
        self.empty.insert(index, slot);
    }
}

/// A queued read, and the channel for its rows.
struct PendingRead {
    read: OwnedMultiRead,
    /// The maximum number of rows that it can return.
    rows: usize,
    reply: oneshot::Sender<Result<FoundRows, PostgresFault>>,
}

/// A slot in use. It is released on drop.
struct SlotGuard<'r> {
    readers: &'r Readers,
    slot: usize,
    /// Whether the server answered. If not, the connection may be lost or still busy.
    is_answered: bool,
}

impl Drop for SlotGuard<'_> {
    fn drop(&mut self) {
        let mut state = self.readers.lock();
        if state.waiting.is_empty() {
            state.release(self.slot, self.is_answered);
        } else if let Some(slot) = self.readers.slots.get(self.slot) {
            slot.handed_over.notify_one();
        }
    }
}

/// The result of requesting a slot.
enum SlotRequest<'r> {
    Granted(SlotGuard<'r>),
    Queued(oneshot::Receiver<Result<FoundRows, PostgresFault>>),
}

impl Readers {
    pub(crate) fn new(count: usize) -> Readers {
        let slots: Vec<ReaderSlot> = std::iter::repeat_with(ReaderSlot::default).take(count.max(1)).collect();
        let state = ReaderState { empty: (0..slots.len()).rev().collect(), waiting: VecDeque::new() };
        Readers { state: Mutex::new(state), slots }
    }

    pub(crate) fn count(&self) -> usize {
        self.slots.len()
    }

    /// The connection with this number, modulo their count.
    pub(crate) fn connection(&self, number: usize) -> Option<&LazyConnection> {
        self.slots.get(number % self.slots.len().max(1)).map(|slot| &slot.connection)
    }

    fn lock(&self) -> MutexGuard<'_, ReaderState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn request_slot(&self, read: &MultiRead<'_>) -> SlotRequest<'_> {
        let mut state = self.lock();
        if let Some(slot) = state.empty.pop() {
            return SlotRequest::Granted(SlotGuard { readers: self, slot, is_answered: false });
        }
        let (reply, answer) = oneshot::channel();
        state.waiting.push_back(PendingRead { read: read.owned(), rows: read.rows(), reply });
        SlotRequest::Queued(answer)
    }

    /// The reads that a slot's task runs next. If there are none, the slot is released.
    fn next(&self, slot: usize, is_answered: bool) -> Vec<PendingRead> {
        let mut state = self.lock();
        let jobs = next_batch(&mut state.waiting);
        if jobs.is_empty() {
            state.release(slot, is_answered);
        }
        jobs
    }

    /// Closes the connections and cancels the queued reads.
    pub(crate) async fn close(&self) {
        self.lock().waiting.clear();
        for slot in &self.slots {
            slot.connection.close().await;
        }
    }
}

/// Removes the first queued read, and those that can be joined with it.
fn next_batch(waiting: &mut VecDeque<PendingRead>) -> Vec<PendingRead> {
    waiting.retain(|job| !job.reply.is_closed());
    let Some(first) = waiting.pop_front() else { return Vec::new() };
    let mut rows = first.rows;
    let mut jobs = vec![first];
    if rows > LONG {
        return jobs;
    }
    let mut left = VecDeque::with_capacity(waiting.len());
    for job in waiting.drain(..) {
        let is_like = jobs.first().is_some_and(|first| first.read.is_like(&job.read));
        if is_like && job.rows <= LONG && rows + job.rows <= ROWS_MAX && jobs.len() < READS_MAX {
            rows += job.rows;
            jobs.push(job);
        } else {
            left.push_back(job);
        }
    }
    *waiting = left;
    jobs
}

/// The task of a slot: runs queued reads whenever the slot is handed over.
pub(crate) async fn serve(shared: Arc<Shared>, slot: usize) {
    let Some(handed_over) = shared.readers.slots.get(slot).map(|slot| &slot.handed_over) else { return };
    loop {
        handed_over.notified().await;
        let mut is_answered = true;
        loop {
            let jobs = shared.readers.next(slot, is_answered);
            if jobs.is_empty() {
                break;
            }
            is_answered = shared.answer(slot, jobs).await;
            // The callers that were just answered often read again at once. The slot is kept until they have, so that their
            // reads are joined again.
            tokio::task::yield_now().await;
        }
    }
}

impl Shared {
    /// Makes several reads as one statement.
    pub(crate) async fn read_many(
        &self,
        requests: &[ReadRequest<'_>],
    ) -> Result<Vec<ReadResult>, StoreError> {
        let read = MultiRead::of(requests);
        if read.is_empty() {
            return read.seen(requests, None);
        }
        let answer = match self.readers.request_slot(&read) {
            SlotRequest::Granted(mut guard) => {
                let found = self.run(guard.slot, std::slice::from_ref(&read)).await;
                guard.is_answered = !matches!(found, Err(PostgresFault::Lost(_)));
                found.map(|mut found| found.pop())
            }
            // The slot's task drops a read only when the store is closed.
            SlotRequest::Queued(answer) => match answer.await {
                Ok(answer) => answer.map(Some),
                Err(_) => return Err(crate::closed()),
            },
        };
        let found = answer.map_err(|fault| fault.into_error(&read.tables()))?;
        read.seen(requests, found.as_ref())
    }

    /// Runs reads of one shape and replies to each caller. Returns whether the server has answered.
    async fn answer(&self, slot: usize, jobs: Vec<PendingRead>) -> bool {
        let reads: Vec<MultiRead<'_>> = jobs.iter().map(|job| job.read.borrowed()).collect();
        let answers: Vec<Result<FoundRows, PostgresFault>> = match self.run(slot, &reads).await {
            Ok(found) => {
                if found.len() > 1 {
                    self.counters.joined.fetch_add(found.len() as u64, Ordering::Relaxed);
                }
                found.into_iter().map(Ok).collect()
            }
            Err(fault) if reads.len() == 1 || matches!(fault, PostgresFault::Lost(_)) => {
                reads.iter().map(|_| Err(fault.clone())).collect()
            }
            Err(_) => {
                let mut answers = Vec::with_capacity(reads.len());
                for (read, job) in reads.iter().zip(&jobs) {
                    if job.reply.is_closed() {
                        answers.push(Err(PostgresFault::Busy("the read was cancelled".into())));
                        continue;
                    }
                    match self.run(slot, std::slice::from_ref(read)).await {
                        Ok(found) => answers.extend(found.into_iter().map(Ok)),
                        Err(fault) => answers.push(Err(fault)),
                    }
                }
                answers
            }
        };
        drop(reads);
        let is_answered = !answers.iter().any(|answer| matches!(answer, Err(PostgresFault::Lost(_))));
        for (job, answer) in jobs.into_iter().zip(answers) {
            // A cancelled read has no receiver.
            drop(job.reply.send(answer));
        }
        is_answered
    }

    /// Runs reads of one shape as one statement, in one round trip, on the connection of a slot.
    async fn run(&self, slot: usize, reads: &[MultiRead<'_>]) -> Result<Vec<FoundRows>, PostgresFault> {
        let Some(connection) = self.readers.connection(slot) else {
            return Err(PostgresFault::Bug(bug!("there is no slot {slot}")));
        };
        let Some(asking) = ReadCall::of(&self.names, &self.statements, reads) else { return Ok(Vec::new()) };
        let open = self.options.row_level_security.then(|| {
            // Without reads there is no call.
            let scope = reads
                .iter()
                .map(MultiRead::scope)
                .reduce(TransactionScope::and)
                .unwrap_or(TransactionScope::All);
            self.options.begin_read_sql(&scope)
        });
        let mut answers =
            self.read_on(connection, open.as_deref(), std::slice::from_ref(&asking.call)).await?;
        let rows = answers.pop().ok_or_else(|| PostgresFault::Bug(bug!("a statement without an answer")))?;
        asking.found(rows).map_err(|error| PostgresFault::Data(error.to_string()))
    }
}
