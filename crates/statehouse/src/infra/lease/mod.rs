//! I02 Claim, lease, exclusive ownership: one holder at a time, for a bounded time, under a number that only grows.
//!
//! ```text
//!             acquire                     release
//!   (none) ────────────► HELD ──────────────────────► FREE
//!                        │ ▲ ▲                          │
//!                 renew  └─┘ └──────────────────────────┘
//!                                    acquire
//!            (an expired one is acquired from under its holder)
//! ```
//!
//! **Rows.** `locks(tenant, key…, state, holder, epoch, acquired_at, expires_at, version)`, with an index by state and one
//! by holder. The epoch counts acquisitions. `expires_at` is the engine's clock plus the duration, computed in the plan.
//! A row is never deleted, so its epoch never starts again.
//!
//! **Invariants.**
//! - I1. At most one holder at a time. *Guard of acquire:* `state = 'FREE' or expires_at <= now`.
//! - I2. Each acquisition has an epoch of its own, above all before it. *Acquire sets* `epoch = epoch + 1`; *nothing else
//!   writes it, and nothing deletes the row.*
//! - I3. Only the holder renews, and only while it holds. *Guard of renew:* `epoch = mine and holder = me and
//!   expires_at > now`. A holder that was too late acquires again, under a new epoch.
//! - I4. Only the holder releases. *Guard of release:* `epoch = mine and holder = me`.
//! - I5. What a stale holder writes is refused. *Every plan of a holder has the step [`Held::guard`]*: `epoch = mine and
//!   holder = me` on the lease's row, in the same plan as its effect. It is the guard and not the clock that fences: a
//!   holder that was paused, or whose clock is wrong, loses nothing but its turn.
//! - I6. A holder that looks at its own deadline stops in time. *[`Held::is_live`]* counts from before the request was
//!   sent, on a monotonic clock.
//!
//! **Failures.** *Duplicate claim*: I1; a retry under the same operation id gets the first answer. *Stale holder acting
//! after expiry*: I5, and I6 to save it the trouble. *Lease expiry race*: renew and the next acquire contend on one row,
//! and `now` is read once for both guards; exactly one of them wins. *Orphaned claim after crash*: it expires, and the
//! next acquire takes it without anybody sweeping.
//!
//! **Hotspots.** *Hot claim key*: an acquire that loses is one refused plan, and waiting for a change is a read with
//! `Prefer: wait` instead of a loop. *Heartbeat storm*: a renewal writes one row and no index key; leases of one tenant
//! can be renewed as one plan ([`Leases::renew`] does so, and `/v1/batch`). *Lease-manager contention*: there is no
//! manager; each key is a row of its own.

mod archetype;
mod declare;

pub use archetype::ARCHETYPE;
pub(crate) use declare::declare;

use std::sync::Arc;
use std::time::Duration;

use statehouse_store::guard::{column, now, now_plus};
use statehouse_store::limits::PLAN_OPERATIONS_MAX;
use statehouse_store::table::TableBuilder;
use statehouse_store::{
    Address, Clock, Commit, Consistency, Guard, Operand, Plan, Query, RetryPolicy, Row, Step, Store,
    StoreError, Table, Tenant, Time, Type, Value, commit_known,
};

/// The states of a row.
pub(crate) const HELD: &str = "HELD";
pub(crate) const FREE: &str = "FREE";
/// The columns of a lease.
pub(crate) const STATE: &str = "state";
pub(crate) const HOLDER: &str = "holder";
pub(crate) const EPOCH: &str = "epoch";
pub(crate) const ACQUIRED_AT: &str = "acquired_at";
pub(crate) const EXPIRES_AT: &str = "expires_at";
/// Adds the columns of a lease to a table. They can stand beside others, in any table.
pub fn columns(builder: TableBuilder) -> TableBuilder {
    builder
        .required(STATE, Type::Text)
        .optional(HOLDER, Type::Text)
        .required(EPOCH, Type::Int)
        .required(ACQUIRED_AT, Type::Time)
        .optional(EXPIRES_AT, Type::Time)
}

/// Takes a lease that is free or has expired (I1, I2).
pub fn acquire(
    table: &Arc<Table>,
    key: impl IntoIterator<Item = Value>,
    holder: &str,
    span: Duration,
) -> Step {
    Step::upsert(table, key)
        .guard(column(STATE).eq(FREE).or(column(EXPIRES_AT).le(now())))
        .set(STATE, HELD)
        .set(HOLDER, holder)
        .set(EPOCH, Operand::Coalesce(EPOCH.to_owned(), 0.into()).add(1))
        .set(ACQUIRED_AT, now())
        .set(EXPIRES_AT, now_plus(span))
}

/// Holds a lease for longer (I3).
pub fn renew(
    table: &Arc<Table>,
    key: impl IntoIterator<Item = Value>,
    holder: &str,
    epoch: i64,
    span: Duration,
) -> Step {
    Step::update(table, key)
        .guard(held_by(holder, epoch))
        .guard(column(EXPIRES_AT).gt(now()))
        .set(EXPIRES_AT, now_plus(span))
}

/// Lets go of a lease (I4). The row and its epoch stay.
pub fn release(table: &Arc<Table>, key: impl IntoIterator<Item = Value>, holder: &str, epoch: i64) -> Step {
    Step::update(table, key)
        .guard(held_by(holder, epoch))
        .set(STATE, FREE)
        .set(HOLDER, Value::Null)
        .set(EXPIRES_AT, Value::Null)
}

/// The lease is still that holder's (I5): for the guard of a step on the lease's own row.
pub fn held_by(holder: &str, epoch: i64) -> Guard {
    column(EPOCH).eq(epoch).and(column(HOLDER).eq(holder))
}

/// A lease that was acquired.
#[derive(Clone, Debug, PartialEq)]
pub struct Held {
    address: Address,
    holder: String,
    epoch: i64,
    /// On the holder's own clock, by [`Clock::uptime`].
    deadline: Duration,
}

impl Held {
    /// The lease's row.
    pub fn address(&self) -> &Address {
        &self.address
    }

    /// Whose it is.
    pub fn holder(&self) -> &str {
        &self.holder
    }

    /// The number of the acquisition.
    pub fn epoch(&self) -> i64 {
        self.epoch
    }

    /// How long the holder may go on without a renewal (I6).
    pub fn left(&self, clock: &dyn Clock) -> Duration {
        self.deadline.saturating_sub(clock.uptime())
    }

    /// Whether the holder may go on (I6).
    pub fn is_live(&self, clock: &dyn Clock) -> bool {
        !self.left(clock).is_zero()
    }

    /// The step that every plan of the holder has, in the same tenant as the lease (I5).
    pub fn guard(&self) -> Step {
        Step::assert(self.address.table(), self.address.key().iter().cloned())
            .guard(held_by(&self.holder, self.epoch))
    }

    fn renewal(&self, span: Duration) -> Step {
        renew(self.address.table(), self.address.key().iter().cloned(), &self.holder, self.epoch, span)
    }
}

/// What a lease's row says.
#[derive(Clone, Debug, PartialEq)]
pub struct Lease {
    /// The key after the tenant.
    pub key: Vec<Value>,
    /// Who holds it, or held it until it expired; `None` for a free one.
    pub holder: Option<String>,
    /// How often it was acquired.
    pub epoch: i64,
    /// When it expires, or did, by the engine's clock; `None` for a free one.
    pub expires_at: Option<Time>,
    /// The row's version, for [`Leases::watch`].
    pub version: i64,
}

impl Lease {
    /// Reads a row.
    pub fn of(row: &Row) -> Result<Lease, StoreError> {
        Ok(Lease {
            key: row.key().to_vec(),
            holder: row.get_optional_text(HOLDER)?.map(str::to_owned),
            epoch: row.get_int(EPOCH)?,
            expires_at: row.get_optional_time(EXPIRES_AT)?,
            version: row.version(),
        })
    }

    /// Whether it is held at this time.
    pub fn is_held(&self, at: Time) -> bool {
        self.expires_at.is_some_and(|expires_at| expires_at > at)
    }
}

/// Leases in one table of one tenant, for programs. Nothing is logged.
///
/// A holder's name must be unique among programs, and the same program must not use it again after a restart: then
/// a lease that stands under it was acquired by a call whose answer was lost, and is the caller's.
#[derive(Clone, Debug)]
pub struct Leases {
    store: Arc<dyn Store>,
    clock: Arc<dyn Clock>,
    table: Arc<Table>,
    tenant: Tenant,
}

impl Leases {
    /// The leases in a table that has [`columns`].
    pub fn of(store: Arc<dyn Store>, clock: Arc<dyn Clock>, table: Arc<Table>, tenant: Tenant) -> Leases {
        Leases { store, clock, table, tenant }
    }

    /// Acquires a lease, or says who has it.
    pub async fn acquire(
        &self,
        key: &[Value],
        holder: &str,
        span: Duration,
    ) -> Result<Result<Held, Lease>, StoreError> {
        let address = self.address(key)?;
        // The engine's clock reads a later moment than this, so the deadline is no later than the lease's end (I6).
        let deadline = self.clock.uptime() + span;
        let step = acquire(&self.table, key.iter().cloned(), holder, span);
        let (row, fresh) = match self.commit("acquire", vec![step]).await? {
            Commit::Applied(applied) => (applied.rows.into_iter().next().flatten(), true),
            Commit::Refused(refused) => (refused.current, false),
            Commit::Fenced => (None, false),
        };
        let lease = Lease::of(row.as_ref().ok_or_else(|| lost_row(&address))?)?;
        let mut held = Held { address, holder: holder.to_owned(), epoch: lease.epoch, deadline };
        if fresh {
            return Ok(Ok(held));
        }
        // It is the caller's already, by a call whose answer was lost. When it will end is for a renewal to say.
        let is_own = lease.holder.as_deref() == Some(holder);
        let is_lost = !is_own || !self.renew(vec![&mut held], span).await?.is_empty();
        Ok(if is_lost { Err(lease) } else { Ok(held) })
    }

    /// The table.
    pub fn table(&self) -> &Arc<Table> {
        &self.table
    }

    /// Renews leases, in as few plans as possible, and returns those that are no longer the caller's.
    pub async fn renew(&self, mut held: Vec<&mut Held>, span: Duration) -> Result<Vec<Address>, StoreError> {
        let mut lost = Vec::new();
        while !held.is_empty() {
            let deadline = self.clock.uptime() + span;
            let count = held.len().min(PLAN_OPERATIONS_MAX);
            let steps = held.iter().take(count).map(|held| held.renewal(span)).collect();
            match self.commit("renew", steps).await? {
                Commit::Refused(refused) if refused.step < count => {
                    lost.push(held.remove(refused.step).address.clone());
                }
                _ => held.drain(..count).for_each(|held| held.deadline = deadline),
            }
        }
        Ok(lost)
    }

    /// Releases a lease. Says whether it was still the caller's.
    pub async fn release(&self, held: &Held) -> Result<bool, StoreError> {
        let step = release(&self.table, held.address.key().iter().cloned(), &held.holder, held.epoch);
        Ok(matches!(self.commit("release", vec![step]).await?, Commit::Applied(_)))
    }

    /// The lease with this key, if it was ever acquired.
    pub async fn read(&self, key: &[Value]) -> Result<Option<Lease>, StoreError> {
        let rows = self.store.get(&[self.address(key)?], Consistency::Strong).await?;
        rows.first().and_then(Option::as_ref).map(Lease::of).transpose()
    }

    /// The leases of one partition of the table, in the order of their keys.
    pub async fn list(&self, partition: &[Value]) -> Result<Vec<Lease>, StoreError> {
        let mut query = Query::table(&self.table, &self.tenant, partition.iter().cloned()).map_err(misuse)?;
        let mut leases = Vec::new();
        loop {
            let page = self.store.query(&query).await?;
            for row in &page.rows {
                leases.push(Lease::of(row)?);
            }
            let Some(next) = page.next else { return Ok(leases) };
            query = query.after(next).map_err(misuse)?;
        }
    }

    /// Returns the lease once it is at another version than the one that was seen (0: none), or when it can be acquired,
    /// or when `at_most` has passed.
    pub async fn watch(
        &self,
        key: &[Value],
        seen: i64,
        at_most: Duration,
    ) -> Result<Option<Lease>, StoreError> {
        let until = self.clock.uptime() + at_most;
        loop {
            let lease = self.read(key).await?;
            let version = lease.as_ref().map_or(0, |lease| lease.version);
            let left = until.saturating_sub(self.clock.uptime());
            let expires_in = lease
                .as_ref()
                .and_then(|lease| lease.expires_at)
                .map_or(Duration::MAX, |expires_at| expires_at.since(self.clock.now()));
            if version != seen || left.is_zero() || expires_in.is_zero() {
                return Ok(lease);
            }
            self.clock.sleep(LOOK_AGAIN.min(left).min(expires_in)).await;
        }
    }

    fn address(&self, key: &[Value]) -> Result<Address, StoreError> {
        Address::new(&self.table, &self.tenant, key.iter().cloned()).map_err(misuse)
    }

    /// Commits steps that are safe to repeat: the guard of each fails, or holds for the same caller, the second time.
    async fn commit(&self, what: &str, steps: Vec<Step>) -> Result<Commit, StoreError> {
        let plan = Plan::of(&self.tenant, format!("lease.{what}")).steps(steps).build().map_err(misuse)?;
        commit_known(&*self.store, &plan, RetryPolicy::WORKER).await
    }
}

/// The pause between two reads of a lease that a caller waits for.
const LOOK_AGAIN: Duration = Duration::from_millis(100);

#[expect(clippy::needless_pass_by_value, reason = "it is what `map_err` gives")]
fn misuse(error: statehouse_store::PlanError) -> StoreError {
    StoreError::schema("a lease", error.to_string())
}

fn lost_row(address: &Address) -> StoreError {
    StoreError::corrupt(address.to_string(), "a lease was decided without showing its row")
}
