//! A queue in front of the store's writer that is fair to tenants.
//!
//! The engines commit plans in the order in which they arrive, many at once. If one tenant sends a thousand writes, a write of
//! another tenant would wait for all of them, and a group of writes that is committed at once takes longer the more are in it.
//!
//! - F1. At most `concurrent_writes` are handed to the store at once. Further writes wait in one queue per tenant, and the queues
//!   take turns.
//! - F2. A tenant that writes alone may use all slots. While other tenants write too, and for [`SHARED_FOR`] after their last write,
//!   it may use `tenant_concurrent_writes`. So a write of one tenant waits for few writes of each other tenant.

use std::collections::{HashMap, VecDeque};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use statehouse_store::{Clock, Tenant, Time};
use tokio::sync::oneshot;

/// How long a tenant counts as one that writes after it has asked for a slot.
const SHARED_FOR: Duration = Duration::from_secs(1);

/// The queue.
#[derive(Clone)]
pub struct FairQueue(Arc<QueueShared>);

struct QueueShared {
    slots: usize,
    tenant_slots: usize,
    clock: Arc<dyn Clock>,
    state: Mutex<FairState>,
}

#[derive(Debug, Default)]
struct FairState {
    used: usize,
    tenants: HashMap<Tenant, TenantWrites>,
    /// The tenants with waiting writes, in the order of their turns.
    turns: VecDeque<Tenant>,
    /// The tenant that asked for a slot last, and the last one before it that was another tenant.
    last: Option<(Tenant, Time)>,
    other: Option<(Tenant, Time)>,
}

/// The writes of one tenant. A tenant without any has no entry.
#[derive(Debug, Default)]
struct TenantWrites {
    used: usize,
    waiting: VecDeque<oneshot::Sender<WriteSlot>>,
}

impl std::fmt::Debug for FairQueue {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("FairQueue")
    }
}

/// Permission to write, until this is dropped.
#[derive(Debug)]
pub struct WriteSlot(Option<(FairQueue, Tenant)>);

impl FairQueue {
    /// A queue that lets this many writes through at once, and this many of a tenant while others write.
    pub fn new(slots: usize, tenant_slots: usize, clock: Arc<dyn Clock>) -> FairQueue {
        let (slots, tenant_slots) = (slots.max(1), tenant_slots.max(1));
        FairQueue(Arc::new(QueueShared { slots, tenant_slots, clock, state: Mutex::default() }))
    }

    fn lock(&self) -> MutexGuard<'_, FairState> {
        self.0.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Waits for the tenant's turn.
    pub async fn acquire(&self, tenant: &Tenant) -> WriteSlot {
        let now = self.0.clock.now();
        let turn = {
            let mut state = self.lock();
            state.note(tenant, now);
            let is_first = state.tenants.get(tenant).is_none_or(|writes| writes.waiting.is_empty());
            if is_first && state.may_write(tenant, &self.0, now) {
                state.begin(tenant);
                return WriteSlot(Some((self.clone(), tenant.clone())));
            }
            let (sender, turn) = oneshot::channel();
            state.tenants.entry(tenant.clone()).or_default().waiting.push_back(sender);
            if is_first {
                state.turns.push_back(tenant.clone());
            }
            turn
        };
        // The sender stays in the queue until it sends, so this cannot fail.
        turn.await.unwrap_or(WriteSlot(None))
    }

    /// Gives free slots to waiting writes.
    fn grant(&self) {
        let now = self.0.clock.now();
        loop {
            let Some((tenant, next)) = self.lock().next(&self.0, now) else { return };
            if let Err(mut slot) = next.send(WriteSlot(Some((self.clone(), tenant.clone())))) {
                // This caller has gone. The slot goes to the next one.
                drop(slot.0.take());
                self.lock().end(&tenant);
            }
        }
    }
}

impl FairState {
    /// Remembers that a tenant asked for a slot.
    fn note(&mut self, tenant: &Tenant, now: Time) {
        match &mut self.last {
            Some((last, at)) if last == tenant => *at = now,
            last => self.other = last.replace((tenant.clone(), now)),
        }
    }

    /// Whether a write of a tenant may go to the store now (F1, F2).
    fn may_write(&self, tenant: &Tenant, queue: &QueueShared, now: Time) -> bool {
        let used = self.tenants.get(tenant).map_or(0, |writes| writes.used);
        let another = match &self.last {
            Some((last, _)) if last == tenant => &self.other,
            last => last,
        };
        let is_shared =
            self.used > used || another.as_ref().is_some_and(|(_, at)| now.since(*at) < SHARED_FOR);
        self.used < queue.slots && (!is_shared || used < queue.tenant_slots)
    }

    fn begin(&mut self, tenant: &Tenant) {
        self.used += 1;
        self.tenants.entry(tenant.clone()).or_default().used += 1;
    }

    fn end(&mut self, tenant: &Tenant) {
        self.used = self.used.saturating_sub(1);
        let Some(writes) = self.tenants.get_mut(tenant) else { return };
        writes.used = writes.used.saturating_sub(1);
        if writes.used == 0 && writes.waiting.is_empty() {
            self.tenants.remove(tenant);
        }
    }

    /// Takes the waiting write whose turn it is, and gives it a slot.
    fn next(&mut self, queue: &QueueShared, now: Time) -> Option<(Tenant, oneshot::Sender<WriteSlot>)> {
        let index = self.turns.iter().position(|tenant| self.may_write(tenant, queue, now))?;
        let tenant = self.turns.remove(index)?;
        let writes = self.tenants.get_mut(&tenant)?;
        let next = writes.waiting.pop_front()?;
        if !writes.waiting.is_empty() {
            self.turns.push_back(tenant.clone());
        }
        self.begin(&tenant);
        Some((tenant, next))
    }
}

impl Drop for WriteSlot {
    fn drop(&mut self) {
        let Some((queue, tenant)) = self.0.take() else { return };
        queue.lock().end(&tenant);
        queue.grant();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use futures_util::FutureExt;
    use statehouse_store::ManualClock;

    fn queue(slots: usize, tenant_slots: usize) -> (FairQueue, ManualClock) {
        let clock = ManualClock::at(Time::from_micros(0));
        (FairQueue::new(slots, tenant_slots, Arc::new(clock.clone())), clock)
    }

    fn tenants() -> (Tenant, Tenant) {
        (Tenant::new("acme").unwrap(), Tenant::new("other").unwrap())
    }

    #[tokio::test]
    async fn tenants_take_turns() {
        let (queue, _) = queue(1, 1);
        let (acme, other) = tenants();
        let mut slot = queue.acquire(&acme).await;
        let mut flood: Vec<_> = (0..100).map(|_| Box::pin(queue.acquire(&acme))).collect();
        for waiting in &mut flood {
            assert!(waiting.now_or_never().is_none());
        }
        let mut single = Box::pin(queue.acquire(&other));
        assert!((&mut single).now_or_never().is_none());
        let mut before = 0;
        for waiting in &mut flood {
            drop(slot);
            if let Some(granted) = (&mut single).now_or_never() {
                drop(granted);
                break;
            }
            before += 1;
            slot = waiting.now_or_never().expect("the next write of the flood");
        }
        assert_eq!(before, 1, "one write of the other tenant is let through before");
    }

    #[tokio::test]
    async fn a_tenant_has_few_slots_while_another_one_writes() {
        let (queue, clock) = queue(10, 2);
        let (acme, other) = tenants();
        let alone: Vec<_> = (0..10).filter_map(|_| queue.acquire(&acme).now_or_never()).collect();
        assert_eq!(alone.len(), 10, "a tenant that is alone has all slots");
        drop(alone);
        let others = queue.acquire(&other).await;
        let mut flood: Vec<_> = (0..10).map(|_| Box::pin(queue.acquire(&acme))).collect();
        let mut granted: Vec<_> = flood.iter_mut().filter_map(FutureExt::now_or_never).collect();
        assert_eq!(granted.len(), 2);
        // The other tenant has written a moment ago: its next write finds the store as free as the last one.
        drop(others);
        assert!(flood.iter_mut().skip(2).all(|waiting| waiting.now_or_never().is_none()));
        clock.advance(SHARED_FOR);
        drop(granted.pop());
        let more: Vec<_> = flood.iter_mut().skip(2).filter_map(FutureExt::now_or_never).collect();
        assert_eq!(more.len(), 8, "the tenant is alone again");
    }

    #[tokio::test]
    async fn a_write_at_its_limit_does_not_stop_the_next_tenant() {
        let (queue, _) = queue(3, 1);
        let (acme, other) = tenants();
        let third = Tenant::new("third").unwrap();
        let (first, _others) = (queue.acquire(&acme).await, queue.acquire(&other).await);
        let mut waiting = Box::pin(queue.acquire(&acme));
        assert!((&mut waiting).now_or_never().is_none(), "the tenant has its one slot");
        let thirds = queue.acquire(&third).now_or_never();
        assert!(thirds.is_some(), "a slot is free, and the third tenant has none");
        drop(first);
        assert!((&mut waiting).now_or_never().is_some());
    }

    #[tokio::test]
    async fn callers_that_are_gone_hold_no_slot() {
        let (queue, _) = queue(1, 1);
        let (acme, _) = tenants();
        let slot = queue.acquire(&acme).await;
        let (mut gone, mut granted) = (Box::pin(queue.acquire(&acme)), Box::pin(queue.acquire(&acme)));
        assert!((&mut gone).now_or_never().is_none() && (&mut granted).now_or_never().is_none());
        drop(gone);
        drop(slot);
        // This one was granted the slot and is gone before it took it.
        drop(granted);
        let slot = queue.acquire(&acme).now_or_never().expect("a free slot");
        drop(slot);
        let state = queue.lock();
        assert!(state.used == 0 && state.tenants.is_empty() && state.turns.is_empty());
    }
}
