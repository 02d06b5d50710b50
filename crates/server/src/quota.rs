//! Limits per tenant and per key on what they may use at the same time: requests, event streams, waits, body bytes.
//!
//! A quota counts units in use. A caller that would exceed the limit of its tenant or of its key gets a 429. Callers in
//! open mode have no key, so only the limit of the tenant applies to them. Each process counts for itself.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};

use statehouse_store::Tenant;

use crate::auth::Caller;
use crate::config::ServerLimits;
use crate::problem::Problem;

/// The units of one kind that are in use.
#[derive(Debug)]
pub struct Quota {
    /// Name of the units in messages.
    units: &'static str,
    tenant_max: usize,
    key_max: usize,
    used: Mutex<HashMap<QuotaOwner, usize>>,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash)]
enum QuotaOwner {
    Tenant(Tenant),
    Key(Tenant, Arc<str>),
}

/// Units in use, until this is dropped.
#[derive(Debug)]
pub struct QuotaGuard {
    quota: Arc<Quota>,
    tenant: QuotaOwner,
    key: Option<QuotaOwner>,
    count: usize,
}

/// All quotas of a server.
#[derive(Clone, Debug)]
pub struct Quotas {
    /// Requests in flight.
    pub requests: Arc<Quota>,
    /// Open event streams.
    pub streams: Arc<Quota>,
    /// Reads that wait for a change.
    pub waits: Arc<Quota>,
    /// Bytes of request bodies in memory.
    pub body_bytes: Arc<Quota>,
}

impl Quotas {
    /// Quotas with these limits.
    pub fn new(limits: &ServerLimits) -> Quotas {
        let quota = |units, tenant_max, key_max| Arc::new(Quota::new(units, tenant_max, key_max));
        Quotas {
            requests: quota("requests in flight", limits.tenant_requests, limits.key_requests),
            streams: quota("event streams", limits.tenant_streams, limits.key_streams),
            waits: quota("waiting reads", limits.tenant_waits, limits.key_waits),
            body_bytes: quota("body bytes in memory", limits.tenant_body_bytes, limits.key_body_bytes),
        }
    }
}

impl Quota {
    fn new(units: &'static str, tenant_max: usize, key_max: usize) -> Quota {
        Quota { units, tenant_max, key_max, used: Mutex::default() }
    }

    /// Takes this many units for a caller.
    pub fn acquire(self: &Arc<Self>, caller: &Caller, count: usize) -> Result<QuotaGuard, Problem> {
        let tenant = QuotaOwner::Tenant(caller.tenant.clone());
        let key = caller.credential.clone().map(|key| QuotaOwner::Key(caller.tenant.clone(), key));
        let mut guard = QuotaGuard { quota: self.clone(), tenant, key, count: 0 };
        guard.grow(count)?;
        Ok(guard)
    }

    fn exceeded(&self, owner: &str, max: usize) -> Problem {
        Problem::too_many_requests(format!("a {owner} may have {max} {}", self.units))
    }
}

impl QuotaGuard {
    /// Takes more units.
    pub fn grow(&mut self, count: usize) -> Result<(), Problem> {
        let Quota { tenant_max, key_max, .. } = *self.quota;
        let mut used = self.quota.used.lock().unwrap_or_else(PoisonError::into_inner);
        let now = |owner: &QuotaOwner| used.get(owner).copied().unwrap_or_default().saturating_add(count);
        let of_tenant = now(&self.tenant);
        let of_key = self.key.as_ref().map(now);
        if of_tenant > tenant_max {
            return Err(self.quota.exceeded("tenant", tenant_max));
        }
        if of_key.is_some_and(|of_key| of_key > key_max) {
            return Err(self.quota.exceeded("key", key_max));
        }
        used.insert(self.tenant.clone(), of_tenant);
        if let (Some(key), Some(of_key)) = (&self.key, of_key) {
            used.insert(key.clone(), of_key);
        }
        self.count += count;
        Ok(())
    }
}

impl Drop for QuotaGuard {
    fn drop(&mut self) {
        let mut used = self.quota.used.lock().unwrap_or_else(PoisonError::into_inner);
        for owner in [Some(&self.tenant), self.key.as_ref()].into_iter().flatten() {
            let Some(units) = used.get_mut(owner) else { continue };
            *units = units.saturating_sub(self.count);
            if *units == 0 {
                used.remove(owner);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn units_are_counted_per_tenant_and_per_key() {
        let caller = |tenant: &str, key: Option<&str>| Caller {
            credential: key.map(Into::into),
            ..Caller::anonymous(Tenant::new(tenant).unwrap())
        };
        let quota = Arc::new(Quota::new("units", 3, 2));
        let mut first = quota.acquire(&caller("acme", Some("a")), 1).unwrap();
        first.grow(1).unwrap();
        assert!(first.grow(1).is_err(), "the key has two");
        let second = quota.acquire(&caller("acme", Some("b")), 1).unwrap();
        assert!(quota.acquire(&caller("acme", Some("c")), 1).is_err(), "the tenant has three");
        assert!(quota.acquire(&caller("other", Some("a")), 2).is_ok());
        drop(first);
        assert!(quota.acquire(&caller("acme", None), 2).is_ok());
        drop(second);
        assert!(quota.used.lock().unwrap().is_empty());
    }
}
