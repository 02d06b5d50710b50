//! Idempotency keys of writes in progress, per tenant.
//!
//! A retry that arrives while the first request still runs in this process gets a 409: it would only wait for the same
//! answer. This is an optimization. Correctness does not depend on it: the store applies one of two concurrent requests
//! with the same key, and both get its answer.

use std::collections::HashSet;
use std::sync::{Arc, Mutex, PoisonError};

use statehouse_store::Tenant;

use crate::problem::{OPERATION_IN_PROGRESS, Problem};

type InFlightKeySet = Arc<Mutex<HashSet<(Tenant, String)>>>;

/// The keys in use.
#[derive(Clone, Debug, Default)]
pub struct InFlightKeys(InFlightKeySet);

/// A key in use, until this is dropped.
#[derive(Debug)]
pub struct InFlightKey {
    keys: InFlightKeySet,
    entry: (Tenant, String),
}

impl InFlightKeys {
    /// Reserves a key, unless it is in use.
    pub fn begin(&self, tenant: &Tenant, key: &str) -> Result<InFlightKey, Problem> {
        let entry = (tenant.clone(), key.to_owned());
        let is_new = self.0.lock().unwrap_or_else(PoisonError::into_inner).insert(entry.clone());
        if is_new {
            return Ok(InFlightKey { keys: self.0.clone(), entry });
        }
        let detail = "the first request with this Idempotency-Key still runs; retry after a moment";
        Err(Problem::new(OPERATION_IN_PROGRESS, detail).header(http::header::RETRY_AFTER, "1"))
    }
}

impl Drop for InFlightKey {
    fn drop(&mut self) {
        self.keys.lock().unwrap_or_else(PoisonError::into_inner).remove(&self.entry);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_key_is_under_way_once_for_each_tenant() {
        let in_flight_keys = InFlightKeys::default();
        let (acme, other) = (Tenant::new("acme").unwrap(), Tenant::new("other").unwrap());
        let first = in_flight_keys.begin(&acme, "k").unwrap();
        assert!(in_flight_keys.begin(&acme, "k").is_err());
        assert!(in_flight_keys.begin(&other, "k").is_ok());
        drop(first);
        assert!(in_flight_keys.begin(&acme, "k").is_ok());
    }
}
