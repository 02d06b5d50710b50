//! Locks of rows, for changes that read first and must not lose: a short lease, taken by a guarded write before the
//! change and given back in the same plan as the change.
//!
//! ```text
//!            take                          the change's own plan
//!   FREE ───────────► HELD (by an operation, ──────────────────────► FREE
//!    ▲                 until a time)     │
//!    └────────────────────────────────────┘
//!              the time has come, or nothing had to be changed
//! ```
//!
//! **Rows.** One for each row that was ever locked, beside it and with its key: `accounts_lock(tenant, key…, held_by,
//! held_until, version)`. The lock is not in the row itself, so that taking it does not raise the version that editors
//! hold. The lock's own version is its *epoch*: every taking raises it and nothing resets it, because the row is never
//! deleted.
//!
//! **Invariants.**
//! - L1. At most one operation holds a lock whose time has not come. *Guard of taking:* `held_until <= now or held_by =
//!   this operation`.
//! - L2. Nothing is changed under a lock that was lost. *Guard of giving back, in the plan of the change:* `version = the
//!   epoch that was taken` and `held_until > now`.
//! - L3. Writes that do not take the lock wait while another caller holds it. *Assert in their plans:* there is no lock, or
//!   `held_until <= now`.
//! - L4. A holder that crashed stops others for [`TERM`] at most. The same operation, tried again, need not wait at all:
//!   it is the holder.
//! - L5. No two operations wait for each other for ever: each takes its locks in one order, and gives up after
//!   [`WAIT_MAX`].
//! - L6. There are no locks of rows that do not exist. *Step of the taking plan:* the row is there, as the change needs it.
//!
//! `now` is the engine's clock. Where callers' clocks differ (DynamoDB) a lock may be seen as expired too early; then L2
//! refuses the first holder's plan, and it starts again. A lock decides who waits. What keeps the row right is, as ever,
//! the version in the guard of the change.

use std::sync::Arc;
use std::time::Duration;

use statehouse_store::guard::{column, now, now_plus};
use statehouse_store::plan::Expect;
use statehouse_store::table::TableBuilder;
use statehouse_store::{
    Address, Commit, Guard, Plan, Refused, Row, Step, Store, StoreError, Table, Tenant, Type, Value,
};

use crate::action::Refusal;

/// How long a lock is held at most: a read and a commit take milliseconds, a commit that an engine retries some seconds.
pub const TERM: Duration = Duration::from_secs(5);
/// How long a call waits for locks of others, in all. Longer than [`TERM`], so that a crashed holder is outlived.
pub const WAIT_MAX: Duration = Duration::from_secs(10);

const HELD_BY: &str = "held_by";
const HELD_UNTIL: &str = "held_until";

/// A lock that a call needs.
#[derive(Clone, Debug)]
pub struct LockRequest {
    /// The row of the lock.
    pub row: Address,
    /// What must hold for the row that is to be changed (L6).
    pub provided: Step,
}

/// A lock that was taken.
#[derive(Clone, Debug)]
pub struct HeldLock {
    row: Address,
    epoch: i64,
}

/// What came of taking a lock.
#[derive(Clone, Debug)]
pub enum LockOutcome {
    /// It is held.
    Held(HeldLock),
    /// Another caller holds it.
    Busy,
    /// There is nothing to be locked: the row is not as the change needs it.
    Refused(Refused),
}

/// Adds the columns of a lock to a table that has the key already.
pub fn columns(table: TableBuilder) -> TableBuilder {
    table.required(HELD_BY, Type::Text).required(HELD_UNTIL, Type::Time)
}

/// Demands that no caller holds a lock (L3).
pub fn free(table: &Arc<Table>, key: impl IntoIterator<Item = Value>) -> Step {
    let step = Step::assert(table, key).guard(column(HELD_UNTIL).le(now()));
    Step { expect: Expect::Either, ..step }
}

/// Removes the row of a lock that no caller holds, with the row that it is about.
pub fn remove(table: &Arc<Table>, key: impl IntoIterator<Item = Value>) -> Step {
    Step::remove(table, key).guard(column(HELD_UNTIL).le(now()))
}

/// Takes a lock for an operation, or takes it once more (L1). Safe to repeat when its outcome is unknown.
pub async fn acquire(
    store: &dyn Store,
    tenant: &Tenant,
    operation: &str,
    wanted: &LockRequest,
) -> Result<LockOutcome, Refusal> {
    let LockRequest { row, provided } = wanted;
    let is_ours = column(HELD_UNTIL).le(now()).or(column(HELD_BY).eq(operation));
    let lock = Step::upsert(row.table(), row.key().iter().cloned())
        .guard(is_ours)
        .set(HELD_BY, operation)
        .set(HELD_UNTIL, now_plus(TERM));
    let plan = Plan::of(tenant, operation).step(provided.clone()).step(lock).build()?;
    Ok(match store.commit(&plan).await {
        Ok(Commit::Applied(applied)) => {
            let epoch = applied.rows.last().and_then(Option::as_ref).map(Row::version);
            let unsaid =
                || StoreError::corrupt(format!("the lock {row}"), "the commit did not return its row");
            LockOutcome::Held(HeldLock { row: row.clone(), epoch: epoch.ok_or_else(unsaid)? })
        }
        Ok(Commit::Refused(refused)) if refused.step == 0 => LockOutcome::Refused(refused),
        Ok(Commit::Refused(_) | Commit::Fenced) | Err(StoreError::OutcomeUnknown { .. }) => LockOutcome::Busy,
        Err(error) => return Err(error.into()),
    })
}

impl HeldLock {
    /// A lock as it would be taken for the first time, for a plan that is only to be shown.
    pub fn imagined(wanted: &LockRequest) -> HeldLock {
        HeldLock { row: wanted.row.clone(), epoch: 1 }
    }

    /// Gives the lock back in the plan of the change, if it is still held (L2).
    pub fn release(&self) -> Step {
        self.end().guard(column(HELD_UNTIL).gt(now()))
    }

    /// Gives the lock back because nothing was changed. If that fails, the lock ends by itself.
    pub async fn give_back(&self, store: &dyn Store, tenant: &Tenant, operation: &str) {
        if let Ok(plan) = Plan::of(tenant, operation).step(self.end()).without_rows().build() {
            let _ = store.commit(&plan).await;
        }
    }

    fn end(&self) -> Step {
        Step::update(self.row.table(), self.row.key().iter().cloned())
            .guard(Guard::version(self.epoch))
            .set(HELD_UNTIL, now())
    }
}
