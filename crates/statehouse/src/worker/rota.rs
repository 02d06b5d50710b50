//! The rota: which process works on which shard.

use std::collections::{BTreeMap, HashMap};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use statehouse_store::guard::{column, now_minus};
use statehouse_store::{Plan, Random, Step, StoreError, Tenant, Value};
use tokio::sync::Notify;
use tokio::task::{AbortHandle, JoinSet};

use super::Worker;
use super::crew::{ERROR_MIN, Shop, Tally, follow_heads, growing, jittered};
use super::duty::Duty;
use crate::infra::lease::{EXPIRES_AT, Held, Lease, Leases};

/// Where processes that run workers have their leases.
const MEMBERS: &str = "members";
/// The row of a process that has been gone for so many leases is removed. Its name is never used again, so that nothing
/// is lost with its epoch.
const FORGOTTEN_AFTER: u32 = 20;

/// A shard that this process works on.
#[derive(Debug)]
struct Post {
    held: Arc<Mutex<Held>>,
    leave: Arc<Leave>,
    /// Of the loop.
    task: AbortHandle,
    /// Whether the lease is still this process's, so that it can be released.
    own: bool,
}

/// Tells a loop to end after the step under way.
#[derive(Debug, Default)]
pub(super) struct Leave {
    asked: AtomicBool,
    pub(super) changed: Notify,
}

impl Leave {
    fn ask(&self) {
        self.asked.store(true, Ordering::Release);
        self.changed.notify_one();
    }

    pub(super) fn is_asked(&self) -> bool {
        self.asked.load(Ordering::Acquire)
    }
}

/// Who works where: the one task that acquires, renews and releases.
pub(super) struct Rota {
    shop: Arc<Shop>,
    leases: Leases,
    tenant: Tenant,
    /// This process's name among the members.
    member: String,
    membership: Option<Held>,
    random: Random,
    crew: Vec<(Arc<dyn Worker>, Arc<Tally>)>,
    /// By worker, as a number in `crew`, and shard.
    posts: BTreeMap<(usize, u32), Post>,
    /// Versions of leases and when they were first seen: one that does not change for a lease's time is nobody's (W3).
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

impl Rota {
    pub(super) fn new(
        shop: Arc<Shop>,
        leases: Leases,
        tenant: Tenant,
        crew: Vec<(Arc<dyn Worker>, Arc<Tally>)>,
    ) -> Rota {
        Rota {
            member: shop.ids.next(),
            membership: None,
            random: shop.options.random.clone(),
            leases,
            tenant,
            crew,
            posts: BTreeMap::new(),
            seen: HashMap::new(),
            tasks: JoinSet::new(),
            shop,
        }
    }

    pub(super) async fn run(mut self, stop: Arc<Notify>) {
        let shop = self.shop.clone();
        self.tasks.spawn(follow_heads(shop.clone()));
        let mut failures = 0;
        'turns: loop {
            let pause = match self.turn().await {
                Ok(()) => {
                    failures = 0;
                    shop.options.lease / 3
                }
                Err(_) => {
                    failures += 1;
                    jittered(growing(ERROR_MIN, failures, shop.options.lease / 3), &mut self.random)
                }
            };
            let until = shop.clock.uptime() + pause;
            loop {
                let left = until.saturating_sub(shop.clock.uptime());
                tokio::select! {
                    () = shop.clock.sleep(left) => break,
                    () = stop.notified() => break 'turns,
                    // A shard that was given up is released at once, so that another process can have it.
                    Some(_) = self.tasks.join_next() => self.clear(false).await,
                }
            }
        }
        self.leave().await;
    }

    /// Renews what this process has, sees who else is there, lets go of what is too much and takes what is missing.
    async fn turn(&mut self) -> Result<(), StoreError> {
        self.clear(true).await;
        self.renew().await?;
        if self.membership.is_none() {
            let held =
                self.leases.acquire(&member_key(&self.member), &self.member, self.shop.options.lease).await?;
            self.membership = held.ok();
        }
        let live = self.live_members().await?;
        for number in 0..self.crew.len() {
            self.balance(number, live).await?;
        }
        Ok(())
    }

    /// Releases the shards of loops that have ended (W4). One that ended unasked has panicked, and begins again (W5).
    async fn clear(&mut self, restart: bool) {
        while self.tasks.try_join_next().is_some() {}
        let ended: Vec<(usize, u32)> =
            self.posts.iter().filter(|(_, post)| post.task.is_finished()).map(|(place, _)| *place).collect();
        for (number, shard) in ended {
            let Some(post) = self.posts.get(&(number, shard)) else { continue };
            let held = post.held.lock().unwrap_or_else(PoisonError::into_inner).clone();
            if post.leave.is_asked() {
                let own = post.own;
                self.posts.remove(&(number, shard));
                if own {
                    // What cannot be released expires.
                    let _ = self.leases.release(&held).await;
                }
            } else if let (true, Some((_, tally))) = (restart, self.crew.get(number)) {
                tally.failed(format!("a step of shard {shard} panicked"));
                self.enter(number, shard, held);
            }
        }
    }

    /// Renews all leases as one plan. What is lost is left without a release, since it is not this process's to release.
    async fn renew(&mut self) -> Result<(), StoreError> {
        let places: Vec<(usize, u32)> =
            self.posts.iter().filter(|(_, post)| post.own).map(|(place, _)| *place).collect();
        let current = |place: &(usize, u32)| {
            let post = self.posts.get(place)?;
            Some(post.held.lock().unwrap_or_else(PoisonError::into_inner).clone())
        };
        let mut held: Vec<Held> = places.iter().filter_map(current).collect();
        let mut membership = self.membership.take();
        let span = self.shop.options.lease;
        let renewed = self.leases.renew(held.iter_mut().chain(&mut membership).collect(), span).await;
        // Also where some plan had no answer: those before it are renewed, and the others keep their deadlines.
        let lost = renewed.as_deref().unwrap_or_default();
        self.membership = membership.filter(|held| !lost.contains(held.address()));
        for (place, held) in places.into_iter().zip(held) {
            let Some(post) = self.posts.get_mut(&place) else { continue };
            if lost.contains(held.address()) {
                post.own = false;
                post.leave.ask();
            } else {
                *post.held.lock().unwrap_or_else(PoisonError::into_inner) = held;
            }
        }
        renewed.map(drop)
    }

    /// How many processes run workers, this one included. Removes the rows of those that are long gone.
    async fn live_members(&mut self) -> Result<usize, StoreError> {
        let members = self.leases.list(&[MEMBERS.into()]).await?;
        let mut live = 0;
        for member in &members {
            let name = member.key.get(1).and_then(Value::as_text).unwrap_or_default();
            if name == self.member || !self.is_stale(MEMBERS, member) {
                live += 1;
            } else if self.unchanged_for(MEMBERS, member) > self.shop.options.lease * FORGOTTEN_AFTER {
                self.forget(member).await?;
            }
        }
        Ok(live.max(1))
    }

    async fn forget(&self, member: &Lease) -> Result<(), StoreError> {
        let age = self.shop.options.lease * (FORGOTTEN_AFTER / 2);
        let table = self.leases.table();
        let gone = column(EXPIRES_AT).le(now_minus(age));
        let step = Step::remove(table, member.key.iter().cloned()).guard(gone);
        let plan = Plan::of(&self.tenant, "worker.forget").step(step).build();
        let plan = plan.map_err(|error| StoreError::schema("a member", error.to_string()))?;
        self.shop.store.commit(&plan).await.map(drop)
    }

    /// How long a lease has been seen not to change.
    fn unchanged_for(&mut self, scope: &str, lease: &Lease) -> Duration {
        let name = lease.key.get(1).and_then(Value::as_text).unwrap_or_default();
        let uptime = self.shop.clock.uptime();
        let seen =
            self.seen.entry((scope.to_owned(), name.as_bytes().to_vec())).or_insert((lease.version, uptime));
        if seen.0 != lease.version {
            *seen = (lease.version, uptime);
        }
        uptime.saturating_sub(seen.1)
    }

    /// Whether a lease is nobody's: released, or not renewed for as long as it lasts.
    fn is_stale(&mut self, scope: &str, lease: &Lease) -> bool {
        let unchanged = self.unchanged_for(scope, lease);
        lease.holder.is_none() || unchanged > self.shop.options.lease
    }

    /// Brings one worker's shards to this process's share (W2, W3).
    async fn balance(&mut self, number: usize, live: usize) -> Result<(), StoreError> {
        let Some((worker, tally)) = self.crew.get(number).cloned() else { return Ok(()) };
        let share = share(worker.shards(), live);
        let staying = |rota: &Rota| -> Vec<u32> {
            let posts = rota.posts.iter().filter(|((of, _), post)| *of == number && !post.leave.is_asked());
            posts.map(|((_, shard), _)| *shard).collect()
        };
        for shard in staying(self).into_iter().skip(share) {
            if let Some(post) = self.posts.get(&(number, shard)) {
                post.leave.ask();
            }
        }
        let mine = |rota: &Rota| staying(rota).len();
        if mine(self) < share {
            let scope = scope_of(&*worker);
            let leases = self.leases.list(&[scope.as_str().into()]).await?;
            let now = self.shop.clock.now();
            let mut free = Vec::new();
            for shard in 0..worker.shards() {
                if self.posts.contains_key(&(number, shard)) {
                    continue;
                }
                let name = shard_name(shard);
                let lease =
                    leases.iter().find(|lease| lease.key.get(1).and_then(Value::as_text) == Some(&name));
                // The clock is a hint that saves a refusal; the guard decides.
                if lease.is_none_or(|lease| self.is_stale(&scope, lease) || !lease.is_held(now)) {
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
                if let Ok(held) = self.leases.acquire(&key, &self.member, self.shop.options.lease).await? {
                    self.enter(number, shard, held);
                }
            }
        }
        tally.held.store(mine(self) as u64, Ordering::Relaxed);
        Ok(())
    }

    fn enter(&mut self, number: usize, shard: u32, held: Held) {
        let Some((worker, tally)) = self.crew.get(number).cloned() else { return };
        let (held, leave) = (Arc::new(Mutex::new(held)), Arc::new(Leave::default()));
        let duty = Duty {
            shop: self.shop.clone(),
            worker,
            tally,
            shard,
            held: held.clone(),
            leave: leave.clone(),
            random: self.random.fork(),
        };
        let task = self.tasks.spawn(duty.run());
        self.posts.insert((number, shard), Post { held, leave, task, own: true });
    }

    /// Leaves everything as if this process had never been (W4).
    async fn leave(&mut self) {
        for post in self.posts.values() {
            post.leave.ask();
        }
        let shop = self.shop.clone();
        loop {
            self.clear(false).await;
            if self.posts.is_empty() {
                break;
            }
            tokio::select! {
                _ = self.tasks.join_next() => {}
                // A long step keeps its shard until it is done.
                () = shop.clock.sleep(shop.options.lease / 3) => drop(self.renew().await),
            }
        }
        for (_, tally) in &self.crew {
            tally.held.store(0, Ordering::Relaxed);
        }
        if let Some(membership) = self.membership.take() {
            let address = membership.address();
            let step = Step::remove(address.table(), address.key().iter().cloned());
            if let Ok(plan) = Plan::of(&self.tenant, "worker.leave").step(step).build() {
                let _ = shop.store.commit(&plan).await;
            }
        }
    }
}
