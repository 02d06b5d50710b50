//! Virtual time: it stands while anybody has something to do, and then moves on to the next one who sleeps.
//!
//! Everything runs on one thread. Which task is woken first is decided by the time until which each slept, and, for the same
//! time, by who went to sleep first. So the same calls with the same chance happen in the same order each time.

use std::cmp::Reverse;
use std::collections::{BinaryHeap, HashMap};
use std::fmt;
use std::future::Future;
use std::pin::Pin;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll, Waker};
use std::time::Duration;

use async_trait::async_trait;
use statehouse_store::{Clock, Time};

/// When a simulation begins.
const BEGINNING_MILLIS: i64 = 1_800_000_000_000;

/// A clock that [`VirtualClock::settle`] and [`VirtualClock::move_on`] drive. Clones share one time.
#[derive(Clone, Default)]
pub(crate) struct VirtualClock(Arc<Mutex<ClockState>>);

#[derive(Default)]
struct ClockState {
    elapsed_micros: u64,
    sleepers: BinaryHeap<Reverse<(u64, u64)>>,
    wakers: HashMap<u64, Waker>,
    next: u64,
    /// Raised whenever a task goes to sleep or wakes up.
    activity: u64,
}

impl VirtualClock {
    fn lock(&self) -> MutexGuard<'_, ClockState> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn elapsed_micros(&self) -> u64 {
        self.lock().elapsed_micros
    }

    /// Lets everything run that can, until all wait or sleep.
    pub(crate) async fn settle(&self) {
        let mut quiet = 0;
        while quiet < 2 {
            let before = self.lock().activity;
            tokio::task::yield_now().await;
            quiet = if self.lock().activity == before { quiet + 1 } else { 0 };
        }
    }

    /// Wakes the next sleeper at its time; false if no task sleeps.
    pub(crate) fn move_on(&self) -> bool {
        let state = &mut *self.lock();
        while let Some(Reverse((at, number))) = state.sleepers.pop() {
            if let Some(waker) = state.wakers.remove(&number) {
                state.elapsed_micros = state.elapsed_micros.max(at);
                state.activity += 1;
                waker.wake();
                return true;
            }
        }
        false
    }
}

impl fmt::Debug for VirtualClock {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "VirtualClock({})", self.elapsed_micros())
    }
}

#[async_trait]
impl Clock for VirtualClock {
    fn now(&self) -> Time {
        Time::from_millis(BEGINNING_MILLIS).plus(self.uptime())
    }

    fn uptime(&self) -> Duration {
        Duration::from_micros(self.elapsed_micros())
    }

    async fn sleep(&self, span: Duration) {
        let span = u64::try_from(span.as_micros()).unwrap_or(u64::MAX);
        let at = self.elapsed_micros().saturating_add(span);
        Sleep { clock: self.clone(), at, number: None }.await;
    }
}

struct Sleep {
    clock: VirtualClock,
    at: u64,
    number: Option<u64>,
}

impl Future for Sleep {
    type Output = ();

    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<()> {
        let clock = self.clock.clone();
        let state = &mut *clock.lock();
        match self.number {
            Some(number) if !state.wakers.contains_key(&number) => return Poll::Ready(()),
            Some(number) => drop(state.wakers.insert(number, context.waker().clone())),
            None => {
                let number = state.next;
                state.next += 1;
                state.activity += 1;
                state.sleepers.push(Reverse((self.at, number)));
                state.wakers.insert(number, context.waker().clone());
                self.number = Some(number);
            }
        }
        Poll::Pending
    }
}

impl Drop for Sleep {
    fn drop(&mut self) {
        if let Some(number) = self.number {
            self.clock.lock().wakers.remove(&number);
        }
    }
}
