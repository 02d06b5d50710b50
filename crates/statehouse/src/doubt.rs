//! Operations in doubt: those whose callers were told that nobody knows what became of them.
//!
//! A caller that is told `outcome_unknown` asks again under its id. If the answer is then a refusal, the first request may
//! still be under way, and find its guard holding after all. So the house remembers for a while whom it has left in doubt,
//! and tells such a caller of a refusal only when the operation is fenced. Another process does not know of it: whoever
//! changes processes in between, and is refused by the second, asks it what became of the operation.

use std::collections::{BTreeSet, VecDeque};
use std::sync::{Mutex, MutexGuard, PoisonError};

use statehouse_store::Tenant;

/// Operations that are remembered; the oldest are forgotten first.
const MOST: usize = 10_000;

/// Whom a house has left in doubt.
#[derive(Debug, Default)]
pub(crate) struct Doubts(Mutex<Content>);

#[derive(Debug, Default)]
struct Content {
    operations: BTreeSet<(Tenant, String)>,
    /// In the order in which they came.
    order: VecDeque<(Tenant, String)>,
}

impl Doubts {
    fn lock(&self) -> MutexGuard<'_, Content> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Somebody was left in doubt about an operation.
    pub(crate) fn add(&self, tenant: &Tenant, operation: &str) {
        let content = &mut *self.lock();
        let name = (tenant.clone(), operation.to_owned());
        if !content.operations.insert(name.clone()) {
            return;
        }
        content.order.push_back(name);
        if content.order.len() > MOST
            && let Some(oldest) = content.order.pop_front()
        {
            content.operations.remove(&oldest);
        }
    }

    /// Whether somebody was.
    pub(crate) fn has(&self, tenant: &Tenant, operation: &str) -> bool {
        let content = self.lock();
        !content.operations.is_empty() && content.operations.contains(&(tenant.clone(), operation.to_owned()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_oldest_doubts_are_forgotten() {
        let doubts = Doubts::default();
        let tenant = Tenant::new("acme").unwrap();
        for number in 0..=MOST {
            doubts.add(&tenant, &number.to_string());
            doubts.add(&tenant, &number.to_string());
        }
        let other = Tenant::new("zeta").unwrap();
        assert!(!doubts.has(&tenant, "0") && doubts.has(&tenant, "1") && !doubts.has(&other, "1"));
    }
}
