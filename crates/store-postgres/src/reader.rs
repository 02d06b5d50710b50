//! Readers: who has a connection free reads at once, and who has not is read for.
//!
//! Each reading connection is a *seat*. A look that finds a seat empty takes it and runs there, without a queue and a
//! change of tasks. When all are taken it waits. Whoever leaves a seat while others wait hands it to the task of
//! that seat, which takes the first of those that wait and all whose looks are like it, runs them as one statement
//! ([`crate::look`]) and gives each its own rows, until nobody waits. On few cores the server does more for few connections
//! with much to do each than for many.
//!
//! - R1. Nobody waits while a seat is empty. *A seat is left, taken and waited for under one lock.*
//! - R2. Who goes away does not hurt the others. *A seat is left when its user is dropped; what is run for several is run
//!   by the seat's own task; what nobody waits for any more is not run.*
//! - R3. Nobody suffers from what another one asks for. *If a statement of several looks fails, unless the connection was
//!   lost, each is run by itself. Long looks are never joined with others.*
//! - R4. Nobody gets what another one asked for. *Each spot has its own place in the arrays, and each tenant's name is one
//!   of its constants. Where the server keeps tenants apart too, the transaction names those of all looks in it.*

use std::collections::VecDeque;
use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use statehouse_store::{ReadRequest, ReadResult, StoreError};
use tokio::sync::{Notify, oneshot};

use crate::fault::Fault;
use crate::link::Link;
use crate::look::{Asking, Found, KeptLook, Look};
use crate::shared::Shared;
use crate::tenancy::Scope;

/// Looks in one statement, at most. More gain little, and each waits for all.
const LOOKS_MAX: usize = 32;
/// Rows of one statement of several looks, at most, by their limits.
const ROWS_MAX: usize = 2_000;
/// A look of more rows than this is run by itself.
const LONG: usize = 200;
/// How often a read is tried.
pub(crate) const ATTEMPTS: u32 = 4;

/// The reading connections, and the looks that wait for one.
pub(crate) struct Readers {
    state: Mutex<State>,
    seats: Vec<Seat>,
}

/// A reading connection.
#[derive(Default)]
struct Seat {
    link: Link,
    /// Told when the seat is handed to its task.
    handed: Notify,
}

#[derive(Default)]
struct State {
    /// Seats that nobody has, the one that was left last at the end: its connection is warm.
    empty: Vec<usize>,
    waiting: VecDeque<Job>,
}

impl State {
    /// The seat is empty. It is the next to be taken, unless what was run there was not answered: then it is the last.
    fn leave(&mut self, seat: usize, is_answered: bool) {
        let place = if is_answered { self.empty.len() } else { 0 };
        self.empty.insert(place, seat);
    }
}

/// A look, and whoever waits for it.
struct Job {
    look: KeptLook,
    /// The most rows that it can give.
    rows: usize,
    reply: oneshot::Sender<Result<Found, Fault>>,
}

/// A seat that was taken.
struct Turn<'r> {
    readers: &'r Readers,
    seat: usize,
    /// Whether what was run there was answered. If not, the connection may be gone, or still be busy with it.
    is_answered: bool,
}

impl Drop for Turn<'_> {
    fn drop(&mut self) {
        let mut state = self.readers.lock();
        if state.waiting.is_empty() {
            state.leave(self.seat, self.is_answered);
        } else if let Some(seat) = self.readers.seats.get(self.seat) {
            seat.handed.notify_one();
        }
    }
}

/// How a look is served.
enum Entry<'r> {
    AtOnce(Turn<'r>),
    Waits(oneshot::Receiver<Result<Found, Fault>>),
}

impl Readers {
    pub(crate) fn new(count: usize) -> Readers {
        let seats: Vec<Seat> = std::iter::repeat_with(Seat::default).take(count.max(1)).collect();
        let state = State { empty: (0..seats.len()).rev().collect(), waiting: VecDeque::new() };
        Readers { state: Mutex::new(state), seats }
    }

    pub(crate) fn count(&self) -> usize {
        self.seats.len()
    }

    /// The connection of a number, however large.
    pub(crate) fn link(&self, number: usize) -> Option<&Link> {
        self.seats.get(number % self.seats.len().max(1)).map(|seat| &seat.link)
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn enter(&self, look: &Look<'_>) -> Entry<'_> {
        let mut state = self.lock();
        if let Some(seat) = state.empty.pop() {
            return Entry::AtOnce(Turn { readers: self, seat, is_answered: false });
        }
        let (reply, answer) = oneshot::channel();
        state.waiting.push_back(Job { look: look.kept(), rows: look.rows(), reply });
        Entry::Waits(answer)
    }

    /// What a seat's task is to run next; nothing, and the seat is empty, if nobody waits.
    fn next(&self, seat: usize, is_answered: bool) -> Vec<Job> {
        let mut state = self.lock();
        let jobs = take(&mut state.waiting);
        if jobs.is_empty() {
            state.leave(seat, is_answered);
        }
        jobs
    }

    /// Lets go of the connections, and of those who wait.
    pub(crate) async fn close(&self) {
        self.lock().waiting.clear();
        for seat in &self.seats {
            seat.link.close().await;
        }
    }
}

/// Takes the first that waits, and those that can go with it.
fn take(waiting: &mut VecDeque<Job>) -> Vec<Job> {
    waiting.retain(|job| !job.reply.is_closed());
    let Some(first) = waiting.pop_front() else { return Vec::new() };
    let mut rows = first.rows;
    let mut jobs = vec![first];
    if rows > LONG {
        return jobs;
    }
    let mut left = VecDeque::with_capacity(waiting.len());
    for job in waiting.drain(..) {
        let is_like = jobs.first().is_some_and(|first| first.look.is_like(&job.look));
        if is_like && job.rows <= LONG && rows + job.rows <= ROWS_MAX && jobs.len() < LOOKS_MAX {
            rows += job.rows;
            jobs.push(job);
        } else {
            left.push_back(job);
        }
    }
    *waiting = left;
    jobs
}

/// Runs what waits, whenever a seat is handed on.
pub(crate) async fn serve(shared: Arc<Shared>, seat: usize) {
    let Some(handed) = shared.readers.seats.get(seat).map(|seat| &seat.handed) else { return };
    loop {
        handed.notified().await;
        let mut is_answered = true;
        loop {
            let jobs = shared.readers.next(seat, is_answered);
            if jobs.is_empty() {
                break;
            }
            is_answered = shared.answer(seat, jobs).await;
            // Those who were just answered are about to ask for more. The seat is kept until they have, so that they go
            // together again.
            tokio::task::yield_now().await;
        }
    }
}

impl Shared {
    /// Makes several reads as one statement.
    pub(crate) async fn read_many(&self, asks: &[ReadRequest<'_>]) -> Result<Vec<ReadResult>, StoreError> {
        let look = Look::of(asks);
        if look.is_empty() {
            return look.seen(asks, None);
        }
        let answer = match self.readers.enter(&look) {
            Entry::AtOnce(mut turn) => {
                let found = self.run(turn.seat, std::slice::from_ref(&look)).await;
                turn.is_answered = !matches!(found, Err(Fault::Lost(_)));
                found.map(|mut found| found.pop())
            }
            // The seat's task ends without an answer only with the store.
            Entry::Waits(answer) => match answer.await {
                Ok(answer) => answer.map(Some),
                Err(_) => return Err(crate::closed()),
            },
        };
        let found = answer.map_err(|fault| fault.into_error(&look.tables()))?;
        look.seen(asks, found.as_ref())
    }

    /// Runs looks that are alike, and tells each who waits. Says whether the server has answered.
    async fn answer(&self, seat: usize, jobs: Vec<Job>) -> bool {
        let looks: Vec<Look<'_>> = jobs.iter().map(|job| job.look.look()).collect();
        let answers: Vec<Result<Found, Fault>> = match self.run(seat, &looks).await {
            Ok(found) => {
                if found.len() > 1 {
                    self.counters.joined.fetch_add(found.len() as u64, Ordering::Relaxed);
                }
                found.into_iter().map(Ok).collect()
            }
            Err(fault) if looks.len() == 1 || matches!(fault, Fault::Lost(_)) => {
                looks.iter().map(|_| Err(fault.clone())).collect()
            }
            Err(_) => {
                let mut answers = Vec::with_capacity(looks.len());
                for (look, job) in looks.iter().zip(&jobs) {
                    if job.reply.is_closed() {
                        answers.push(Err(Fault::Busy("nobody waits for it any more".into())));
                        continue;
                    }
                    match self.run(seat, std::slice::from_ref(look)).await {
                        Ok(found) => answers.extend(found.into_iter().map(Ok)),
                        Err(fault) => answers.push(Err(fault)),
                    }
                }
                answers
            }
        };
        drop(looks);
        let is_answered = !answers.iter().any(|answer| matches!(answer, Err(Fault::Lost(_))));
        for (job, answer) in jobs.into_iter().zip(answers) {
            // Who no longer waits does not hear it.
            drop(job.reply.send(answer));
        }
        is_answered
    }

    /// Runs looks that are alike as one statement, in one round trip, on the connection of a seat.
    async fn run(&self, seat: usize, looks: &[Look<'_>]) -> Result<Vec<Found>, Fault> {
        let Some(link) = self.readers.link(seat) else { return Ok(Vec::new()) };
        let Some(asking) = Asking::of(&self.names, &self.statements, looks) else { return Ok(Vec::new()) };
        let open = self.options.row_level_security.then(|| {
            let scope = looks.iter().map(Look::scope).reduce(Scope::and).unwrap_or(Scope::All);
            self.options.read_words(&scope)
        });
        let mut answers = self.read_on(link, open.as_deref(), std::slice::from_ref(&asking.call)).await?;
        asking.found(answers.pop().unwrap_or_default()).map_err(|error| Fault::Data(error.to_string()))
    }
}
