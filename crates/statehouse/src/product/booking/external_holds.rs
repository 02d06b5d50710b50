//! Holds before the store: names that one holder has for a while, in memory that is fast and may be lost.
//!
//! A booking may keep its holds in Redis, so that a storm of buyers does not reach the store until one of them pays. A
//! hold there is a lease and no more: it can be lost with the server that has it. The caller must decide the
//! durable change by a guard of its own, and does (see [`crate::product::booking`]).
//!
//! What Redis is sent stands here as scripts, because one of them has to be all or nothing over several names; the
//! connection is in [`crate::engine`]. [`MemoryHolds`] means the same in this process.

use std::collections::BTreeMap;
use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use async_trait::async_trait;
use statehouse_store::{Clock, Time};

use crate::action::{Code, Refusal};

/// Takes all names or none; the number of the first that another holder has, from 1, or 0. A name that the holder has
/// already keeps its end, or a hold could be prolonged for ever by asking for it again.
pub const TAKE: &str = "\
for i, name in ipairs(KEYS) do
  local holder = redis.call('GET', name)
  if holder and holder ~= ARGV[1] then return i end
end
for _, name in ipairs(KEYS) do redis.call('SET', name, ARGV[1], 'NX', 'PX', ARGV[2]) end
return 0";

/// Moves the end of all names, if the holder still has them all: 1, or 0.
pub const EXTEND: &str = "\
for _, name in ipairs(KEYS) do
  if redis.call('GET', name) ~= ARGV[1] then return 0 end
end
for _, name in ipairs(KEYS) do redis.call('PEXPIRE', name, ARGV[2]) end
return 1";

/// Lets go of those names that the holder has.
pub const RELEASE: &str = "\
for _, name in ipairs(KEYS) do
  if redis.call('GET', name) == ARGV[1] then redis.call('DEL', name) end
end
return 0";

/// Who has each name, and for how many milliseconds more; an empty text and 0 where no holder does.
pub const LOOK: &str = "\
local found = {}
for i, name in ipairs(KEYS) do
  local holder = redis.call('GET', name)
  found[2 * i - 1] = holder or ''
  found[2 * i] = holder and redis.call('PTTL', name) or 0
end
return found";

/// A name that is held.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ExternalHold {
    /// Who has it.
    pub holder: String,
    /// For how long.
    pub left: Duration,
}

/// The holds cannot be reached. Whether they were changed is not known; what was taken ends by itself.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("the holds cannot be reached: {0}")]
pub struct HoldsUnreachable(pub String);

impl From<HoldsUnreachable> for Refusal {
    fn from(error: HoldsUnreachable) -> Refusal {
        Refusal::new(Code::Unavailable, format!("{error}; try again"))
    }
}

/// Names that are held.
#[async_trait]
pub trait ExternalHolds: Send + Sync + fmt::Debug {
    /// Takes all names for a span, or none: then it returns which one another holder has. Names that the holder has
    /// already keep their end.
    async fn acquire(
        &self,
        names: &[String],
        holder: &str,
        span: Duration,
    ) -> Result<Result<(), usize>, HoldsUnreachable>;

    /// Has all names end a span from now, if the holder still has them all.
    async fn extend(&self, names: &[String], holder: &str, span: Duration) -> Result<bool, HoldsUnreachable>;

    /// Lets go of those names that the holder has.
    async fn release(&self, names: &[String], holder: &str) -> Result<(), HoldsUnreachable>;

    /// Who has each name.
    async fn read_holds(&self, names: &[String]) -> Result<Vec<Option<ExternalHold>>, HoldsUnreachable>;
}

/// Holds in this process, for tests and for `explain`.
#[derive(Debug)]
pub struct MemoryHolds {
    clock: Arc<dyn Clock>,
    held: Mutex<BTreeMap<String, (String, Time)>>,
}

impl MemoryHolds {
    /// None yet.
    pub fn on(clock: Arc<dyn Clock>) -> MemoryHolds {
        MemoryHolds { clock, held: Mutex::default() }
    }

    /// What is held now.
    fn live(&self) -> MutexGuard<'_, BTreeMap<String, (String, Time)>> {
        let now = self.clock.now();
        let mut held = self.held.lock().unwrap_or_else(PoisonError::into_inner);
        held.retain(|_, (_, end)| *end > now);
        held
    }
}

#[async_trait]
impl ExternalHolds for MemoryHolds {
    async fn acquire(
        &self,
        names: &[String],
        holder: &str,
        span: Duration,
    ) -> Result<Result<(), usize>, HoldsUnreachable> {
        let end = self.clock.now().plus(span);
        let mut held = self.live();
        let is_others = |name: &String| held.get(name).is_some_and(|(other, _)| other != holder);
        if let Some(index) = names.iter().position(is_others) {
            return Ok(Err(index));
        }
        for name in names {
            held.entry(name.clone()).or_insert_with(|| (holder.to_owned(), end));
        }
        Ok(Ok(()))
    }

    async fn extend(&self, names: &[String], holder: &str, span: Duration) -> Result<bool, HoldsUnreachable> {
        let end = self.clock.now().plus(span);
        let mut held = self.live();
        if !names.iter().all(|name| held.get(name).is_some_and(|(other, _)| other == holder)) {
            return Ok(false);
        }
        held.extend(names.iter().map(|name| (name.clone(), (holder.to_owned(), end))));
        Ok(true)
    }

    async fn release(&self, names: &[String], holder: &str) -> Result<(), HoldsUnreachable> {
        self.live().retain(|name, (other, _)| other != holder || !names.contains(name));
        Ok(())
    }

    async fn read_holds(&self, names: &[String]) -> Result<Vec<Option<ExternalHold>>, HoldsUnreachable> {
        let now = self.clock.now();
        let held = self.live();
        let hold = |name: &String| {
            held.get(name).map(|(holder, end)| ExternalHold { holder: holder.clone(), left: end.since(now) })
        };
        Ok(names.iter().map(hold).collect())
    }
}
