//! Writes under way, by tenant and idempotency key.
//!
//! A repetition that arrives while the first request still runs in this process is turned away with 409: it would only
//! wait for the same answer. A first request in another process is not seen here and need not be: the store lets one of
//! the two be applied, and both get its answer. This saves work; it does not keep anything right.

use std::collections::HashSet;
use std::sync::{Arc, Mutex, PoisonError};

use statehouse_store::Tenant;

use crate::problem::{OPERATION_IN_PROGRESS, Problem};

type Names = Arc<Mutex<HashSet<(Tenant, String)>>>;

/// The writes under way.
#[derive(Clone, Debug, Default)]
pub struct Flights(Names);

/// One write under way, until this is dropped.
#[derive(Debug)]
pub struct Flight {
    names: Names,
    name: (Tenant, String),
}

impl Flights {
    /// Notes that a write begins, unless it is under way.
    pub fn begin(&self, tenant: &Tenant, key: &str) -> Result<Flight, Problem> {
        let name = (tenant.clone(), key.to_owned());
        let begun = self.0.lock().unwrap_or_else(PoisonError::into_inner).insert(name.clone());
        if begun {
            return Ok(Flight { names: self.0.clone(), name });
        }
        let detail = "the first request with this Idempotency-Key still runs; repeat this one after a moment";
        Err(Problem::new(OPERATION_IN_PROGRESS, detail).header(http::header::RETRY_AFTER, "1"))
    }
}

impl Drop for Flight {
    fn drop(&mut self) {
        self.names.lock().unwrap_or_else(PoisonError::into_inner).remove(&self.name);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_key_is_under_way_once_for_each_tenant() {
        let flights = Flights::default();
        let (acme, other) = (Tenant::new("acme").unwrap(), Tenant::new("other").unwrap());
        let first = flights.begin(&acme, "k").unwrap();
        assert!(flights.begin(&acme, "k").is_err());
        assert!(flights.begin(&other, "k").is_ok());
        drop(first);
        assert!(flights.begin(&acme, "k").is_ok());
    }
}
