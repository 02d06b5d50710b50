//! Assigns shards to processes.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use statehouse_store::guard::{column, now_minus};
use statehouse_store::{Plan, Random, Step, StoreError, Tenant, Value, bug};
use tokio::sync::Notify;
use tokio::task::{AbortHandle, JoinSet};

use super::Worker;
use super::pool::{ERROR_MIN, PoolShared, WorkerCounters, exponential, follow_heads, jittered};
use super::shard_loop::ShardLoop;
use crate::infra::lease::{EXPIRES_AT, Held, Lease, Leases};

/// Where processes that run workers have their leases.
const MEMBERS: &str = "members";
/// The row of a process that has been gone for so many leases is removed. Its name is never used again, so that nothing
/// is lost with its epoch.
const FORGOTTEN_AFTER: u32 = 20;

/// A shard that this process works on.
#[derive(Debug)]
struct AssignedShard {
    held: Arc<Mutex<Held>>,
    stop: Arc<StopSignal>,
    /// Of the loop.
    task: AbortHandle,
    /// Whether the lease is still this process's, so that it can be released.
    own: bool,
}

/// Tells a loop to end after the step under way.
#[derive(Debug, Default)]
pub(super) struct StopSignal {
    asked: AtomicBool,
    pub(super) changed: Notify,
}

impl StopSignal {
    fn request(&self) {
        self.asked.store(true, Ordering::Release);
        self.changed.notify_one();
    }

    pub(super) fn is_requested(&self) -> bool {
        self.asked.load(Ordering::Acquire)
    }
}

/// The one task of a process that acquires, renews and releases leases of shards.
pub(super) struct ShardAssigner {
    shared: Arc<PoolShared>,
    leases: Leases,
    tenant: Tenant,
    /// This process's name among the members.
    member: String,
    /// The names of its workers, as other processes read them: the holder of its membership.
    runs: String,
    membership: Option<Held>,
    random: Random,
    workers: Vec<(Arc<dyn Worker>, Arc<WorkerCounters>)>,
    /// By worker, as a number in `crew`, and shard.
    assigned: BTreeMap<(usize, u32), AssignedShard>,
    /// Versions of leases and when they were first seen: one that does not change for a lease's time is free (W3).
    seen: HashMap<(String, Vec<u8>), (i64, Duration)>,
    tasks: JoinSet<()>,
}

fn member_key(member: &str) -> [Value; 2] {
    [MEMBERS.into(), member.into()]
}

fn scope_of(worker: &dyn Worker) -> String {
    format!("worker.{}", worker.name())
}

/// Shards in the order of their numbers.
fn shard_name(shard: u32) -> String {
    format!("{shard:05}")
}

/// The most shards that one of so many processes holds (W2).
fn share(shards: u32, live: usize) -> usize {
    (shards as usize).div_ceil(live.max(1))
}

/// The names of workers as the holder of a membership.
fn worker_names(workers: &[(Arc<dyn Worker>, Arc<WorkerCounters>)]) -> String {
    let names: Vec<&str> = workers.iter().map(|(worker, _)| worker.name()).collect();
    serde_json::Value::from(names).to_string()
}

/// Another live process. Processes with another blueprint run other workers.
struct OtherMember {
    /// The workers that it runs. Earlier versions of the program do not say which: they count for every worker.
    workers: Option<BTreeSet<String>>,
}

impl OtherMember {
    fn of(lease: &Lease) -> OtherMember {
        let names = lease.holder.as_deref().and_then(|holder| serde_json::from_str(holder).ok());
        OtherMember { workers: names }
    }

    fn runs(&self, worker: &str) -> bool {
        self.workers.as_ref().is_none_or(|workers| workers.contains(worker))
    }
}

impl ShardAssigner {
    pub(super) fn new(
        shared: Arc<PoolShared>,
        leases: Leases,
        tenant: Tenant,
        workers: Vec<(Arc<dyn Worker>, Arc<WorkerCounters>)>,
    ) -> ShardAssigner {
        ShardAssigner {
            member: shared.ids.next(),
            runs: worker_names(&workers),
            membership: None,
            random: shared.options.random.clone(),
            leases,
            tenant,
            workers,
            assigned: BTreeMap::new(),
            seen: HashMap::new(),
            tasks: JoinSet::new(),
            shared,
        }
    }

    pub(super) async fn run(mut self, stop: Arc<Notify>) {
        let shared = self.shared.clone();
        self.tasks.spawn(follow_heads(shared.clone()));
        let mut failures = 0;
        'turns: loop {
            let pause = match self.rebalance().await {
                Ok(()) => {
                    failures = 0;
                    shared.options.lease / 3
                }
                Err(error) => {
                    failures += 1;
                    shared.record_error(&error);
                    jittered(exponential(ERROR_MIN, failures, shared.options.lease / 3), &mut self.random)
                }
            };
            let until = shared.clock.uptime() + pause;
            loop {
                let left = until.saturating_sub(shared.clock.uptime());
                tokio::select! {
                    () = shared.clock.sleep(left) => break,
                    () = stop.notified() => break 'turns,
                    // A shard that was given up is released at once, so that another process can have it.
                    Some(_) = self.tasks.join_next() => self.release_ended(false).await,
                }
            }
        }
        self.release_all().await;
    }

    /// Renews what this process has, sees who else is there, lets go of what is too much and takes what is missing.
    async fn rebalance(&mut self) -> Result<(), StoreError> {
        self.release_ended(true).await;
        self.renew().await?;
        if self.membership.is_none() {
            let lease = self.shared.options.lease;
            let held = self.leases.acquire(&member_key(&self.member), &self.runs, lease).await?;
            self.membership = held.ok();
        }
        let others = self.other_members().await?;
        for number in 0..self.workers.len() {
            self.balance(number, &others).await?;
        }
        Ok(())
    }

    /// Releases the shards of loops that have ended (W4). One that ended unasked has panicked, and begins again (W5).
    async fn release_ended(&mut self, restart: bool) {
        while self.tasks.try_join_next().is_some() {}
        let ended: Vec<(usize, u32)> = self
            .assigned
            .iter()
            .filter(|(_, assigned)| assigned.task.is_finished())
            .map(|(place, _)| *place)
            .collect();
        for (number, shard) in ended {
            let Some(assigned) = self.assigned.get(&(number, shard)) else { continue };
            let held = assigned.held.lock().unwrap_or_else(PoisonError::into_inner).clone();
            if assigned.stop.is_requested() {
                let own = assigned.own;
                self.assigned.remove(&(number, shard));
                if own {
                    // What cannot be released expires.
                    let _ = self.leases.release(&held).await;
                }
            } else if let (true, Some((_, counters))) = (restart, self.workers.get(number)) {
                counters.record_error(format!("a step of shard {shard} panicked"));
                self.start_loop(number, shard, held);
            }
        }
    }

    /// Renews all leases as one plan. What is lost is left without a release, since it is not this process's to release.
    async fn renew(&mut self) -> Result<(), StoreError> {
        let shards: Vec<(usize, u32)> =
            self.assigned.iter().filter(|(_, assigned)| assigned.own).map(|(shard, _)| *shard).collect();
        let current = |shard: &(usize, u32)| {
            let assigned = self.assigned.get(shard)?;
            Some(assigned.held.lock().unwrap_or_else(PoisonError::into_inner).clone())
        };
        let mut held: Vec<Held> = shards.iter().filter_map(current).collect();
        let mut membership = self.membership.take();
        let span = self.shared.options.lease;
        let renewed = self.leases.renew(held.iter_mut().chain(&mut membership).collect(), span).await;
        // Also where some plan had no answer: those before it are renewed, and the others keep their deadlines.
        let lost = renewed.as_deref().unwrap_or_default();
        self.membership = membership.filter(|held| !lost.contains(held.address()));
        for (shard, held) in shards.into_iter().zip(held) {
            let Some(assigned) = self.assigned.get_mut(&shard) else { continue };
            if lost.contains(held.address()) {
                assigned.own = false;
                assigned.stop.request();
            } else {
                *assigned.held.lock().unwrap_or_else(PoisonError::into_inner) = held;
            }
        }
        renewed.map(drop)
    }

    /// The other processes that run workers. Removes the rows of those that are long gone.
    async fn other_members(&mut self) -> Result<Vec<OtherMember>, StoreError> {
        let members = self.leases.list(&[MEMBERS.into()]).await?;
        let mut live = Vec::new();
        for member in &members {
            if self.name_of(member)? == self.member {
                continue;
            }
            if !self.is_stale(MEMBERS, member)? {
                live.push(OtherMember::of(member));
            } else if self.unchanged_for(MEMBERS, member)? > self.shared.options.lease * FORGOTTEN_AFTER {
                self.remove_member(member).await?;
            }
        }
        Ok(live)
    }

    async fn remove_member(&self, member: &Lease) -> Result<(), StoreError> {
        let age = self.shared.options.lease * (FORGOTTEN_AFTER / 2);
        let table = self.leases.table();
        let gone = column(EXPIRES_AT).le(now_minus(age));
        let step = Step::remove(table, member.key.iter().cloned()).guard(gone);
        let plan = Plan::of(&self.tenant, "worker.forget").step(step).build();
        let plan = plan.map_err(|error| StoreError::schema("a member", error.to_string()))?;
        self.shared.store.commit(&plan).await.map(drop)
    }

    /// The second part of a lease's key: the member, or the shard.
    fn name_of<'l>(&self, lease: &'l Lease) -> Result<&'l str, StoreError> {
        let name = lease.key.get(1).and_then(Value::as_text);
        name.ok_or_else(|| {
            bug!("a lease of table {} has the key {:?}", self.leases.table(), lease.key).into()
        })
    }

    /// How long a lease has been seen not to change.
    fn unchanged_for(&mut self, scope: &str, lease: &Lease) -> Result<Duration, StoreError> {
        let name = self.name_of(lease)?;
        let uptime = self.shared.clock.uptime();
        let seen =
            self.seen.entry((scope.to_owned(), name.as_bytes().to_vec())).or_insert((lease.version, uptime));
        if seen.0 != lease.version {
            *seen = (lease.version, uptime);
        }
        Ok(uptime.saturating_sub(seen.1))
    }

    /// Whether a lease is free: released, or not renewed for as long as it lasts.
    fn is_stale(&mut self, scope: &str, lease: &Lease) -> Result<bool, StoreError> {
        let unchanged = self.unchanged_for(scope, lease)?;
        Ok(lease.holder.is_none() || unchanged > self.shared.options.lease)
    }

    /// Brings one worker's shards to this process's share (W2, W3).
    async fn balance(&mut self, number: usize, others: &[OtherMember]) -> Result<(), StoreError> {
        let Some((worker, counters)) = self.workers.get(number).cloned() else { return Ok(()) };
        let live = 1 + others.iter().filter(|other| other.runs(worker.name())).count();
        let share = share(worker.shards(), live);
        let staying = |assigner: &ShardAssigner| -> Vec<u32> {
            let posts = assigner
                .assigned
                .iter()
                .filter(|((of, _), assigned)| *of == number && !assigned.stop.is_requested());
            posts.map(|((_, shard), _)| *shard).collect()
        };
        for shard in staying(self).into_iter().skip(share) {
            if let Some(assigned) = self.assigned.get(&(number, shard)) {
                assigned.stop.request();
            }
        }
        let mine = |assigner: &ShardAssigner| staying(assigner).len();
        if mine(self) < share {
            let scope = scope_of(&*worker);
            let leases = self.leases.list(&[scope.as_str().into()]).await?;
            let now = self.shared.clock.now();
            let mut free = Vec::new();
            for shard in 0..worker.shards() {
                if self.assigned.contains_key(&(number, shard)) {
                    continue;
                }
                let name = shard_name(shard);
                let lease =
                    leases.iter().find(|lease| lease.key.get(1).and_then(Value::as_text) == Some(&name));
                // The clock is a hint that saves a refusal; the guard decides.
                let is_free = match lease {
                    Some(lease) => self.is_stale(&scope, lease)? || !lease.is_held(now),
                    None => true,
                };
                if is_free {
                    free.push(shard);
                }
            }
            // Processes that start together do not all begin with the same shard.
            let start = usize::try_from(self.random.below(free.len() as u64)).unwrap_or(0);
            free.rotate_left(start);
            for shard in free {
                if mine(self) >= share {
                    break;
                }
                let key = [scope.as_str().into(), shard_name(shard).into()];
                if let Ok(held) = self.leases.acquire(&key, &self.member, self.shared.options.lease).await? {
                    self.start_loop(number, shard, held);
                }
            }
        }
        counters.held.store(mine(self) as u64, Ordering::Relaxed);
        Ok(())
    }

    fn start_loop(&mut self, number: usize, shard: u32, held: Held) {
        let Some((worker, counters)) = self.workers.get(number).cloned() else { return };
        let (held, leave) = (Arc::new(Mutex::new(held)), Arc::new(StopSignal::default()));
        let duty = ShardLoop {
            shared: self.shared.clone(),
            worker,
            counters,
            shard,
            held: held.clone(),
            stop: leave.clone(),
            random: self.random.fork(),
        };
        let task = self.tasks.spawn(duty.run());
        self.assigned.insert((number, shard), AssignedShard { held, stop: leave, task, own: true });
    }

    /// Leaves everything as if this process had never been (W4).
    async fn release_all(&mut self) {
        for assigned in self.assigned.values() {
            assigned.stop.request();
        }
        let shared = self.shared.clone();
        loop {
            self.release_ended(false).await;
            if self.assigned.is_empty() {
                break;
            }
            tokio::select! {
                _ = self.tasks.join_next() => {}
                // A long step keeps its shard until it is done.
                () = shared.clock.sleep(shared.options.lease / 3) => drop(self.renew().await),
            }
        }
        for (_, counters) in &self.workers {
            counters.held.store(0, Ordering::Relaxed);
        }
        if let Some(membership) = self.membership.take() {
            let address = membership.address();
            let step = Step::remove(address.table(), address.key().iter().cloned());
            if let Ok(plan) = Plan::of(&self.tenant, "worker.leave").step(step).build() {
                let _ = shared.store.commit(&plan).await;
            }
        }
    }
}
