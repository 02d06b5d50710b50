//! Operations that were reported as `outcome_unknown`.
//!
//! A caller that is told `outcome_unknown` asks again under its id. If the answer is then a refusal, the first request may
//! still be under way, and find its guard holding after all. So the house remembers such operations for a while,
//! and reports a refusal for one of them only when the operation is fenced. Another process does not know of it: a caller that
//! changes processes in between, and is refused by the second, has to ask it for the outcome of the operation.

use std::collections::{BTreeMap, VecDeque};
use std::sync::{Mutex, MutexGuard, PoisonError};

use statehouse_store::Tenant;

/// Operations that are remembered; the oldest are forgotten first.
const MOST: usize = 10_000;

/// Operations of this house with an unknown outcome.
#[derive(Debug, Default)]
pub(crate) struct UnknownOutcomes(Mutex<RememberedOperations>);

#[derive(Debug, Default)]
struct RememberedOperations {
    /// Each with the plan that may yet be applied, if that has another id.
    operations: BTreeMap<(Tenant, String), Option<String>>,
    /// In the order in which they came.
    order: VecDeque<(Tenant, String)>,
}

impl UnknownOutcomes {
    fn lock(&self) -> MutexGuard<'_, RememberedOperations> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Remembers an operation.
    pub(crate) fn add(&self, tenant: &Tenant, operation: &str) {
        self.remember(tenant, operation, None);
    }

    /// Remembers an operation that may yet be applied by a plan under another id, together with others.
    pub(crate) fn add_within(&self, tenant: &Tenant, operation: &str, plan: &str) {
        self.remember(tenant, operation, Some(plan));
    }

    fn remember(&self, tenant: &Tenant, operation: &str, plan: Option<&str>) {
        let content = &mut *self.lock();
        let name = (tenant.clone(), operation.to_owned());
        if content.operations.insert(name.clone(), plan.map(str::to_owned)).is_some() {
            return;
        }
        content.order.push_back(name);
        if content.order.len() > MOST
            && let Some(oldest) = content.order.pop_front()
        {
            content.operations.remove(&oldest);
        }
    }

    /// Whether an operation is remembered.
    pub(crate) fn has(&self, tenant: &Tenant, operation: &str) -> bool {
        let content = self.lock();
        !content.operations.is_empty()
            && content.operations.contains_key(&(tenant.clone(), operation.to_owned()))
    }

    /// The plan under another id that may yet apply an operation.
    pub(crate) fn plan_of(&self, tenant: &Tenant, operation: &str) -> Option<String> {
        let content = self.lock();
        if content.operations.is_empty() {
            return None;
        }
        content.operations.get(&(tenant.clone(), operation.to_owned()))?.clone()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_oldest_doubts_are_forgotten() {
        let doubts = UnknownOutcomes::default();
        let tenant = Tenant::new("acme").unwrap();
        for number in 0..=MOST {
            doubts.add(&tenant, &number.to_string());
            doubts.add(&tenant, &number.to_string());
        }
        let other = Tenant::new("zeta").unwrap();
        assert!(!doubts.has(&tenant, "0") && doubts.has(&tenant, "1") && !doubts.has(&other, "1"));
    }
}
