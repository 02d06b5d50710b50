//! Limit of the bytes that a tenant writes in a minute.
//!
//! The log keeps every write for the retention time, and rows grow with writes. A limit of written bytes therefore bounds
//! how fast a tenant fills the store. A token bucket per tenant holds one minute's worth. A write is charged after it was
//! applied, with the bytes of its request, of its response (which shows the row) and of a log record without content. A
//! tenant whose bucket is empty gets a 429 until it has refilled. Each process counts for itself.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};

use axum::response::Response;
use http::header::RETRY_AFTER;
use http_body::Body as _;
use statehouse_store::{Clock, Tenant, Time};

use crate::problem::{Problem, TOO_MANY_REQUESTS};

/// Bytes that each write is charged in addition to its content.
const WRITE_OVERHEAD_BYTES: u64 = 256;
/// Tenants with debts above which paid debts are removed.
const TENANTS_CLEANED_ABOVE: usize = 1024;
const MICROS_PER_MINUTE: u128 = 60_000_000;

/// The written bytes of all tenants.
pub struct WriteRate {
    bytes_per_minute: u64,
    clock: Arc<dyn Clock>,
    debts: Mutex<HashMap<Tenant, Debt>>,
}

/// Bytes that a tenant has written and that have not been paid off by time.
#[derive(Clone, Copy, Debug)]
struct Debt {
    bytes: u64,
    at: Time,
}

impl WriteRate {
    /// A limit of this many bytes.
    pub fn new(bytes_per_minute: u64, clock: Arc<dyn Clock>) -> WriteRate {
        WriteRate { bytes_per_minute: bytes_per_minute.max(1), clock, debts: Mutex::default() }
    }

    /// Rejects a write of a tenant that has written as much as it may.
    pub fn check(&self, tenant: &Tenant) -> Result<(), Problem> {
        let now = self.clock.now();
        let debts = self.debts.lock().unwrap_or_else(PoisonError::into_inner);
        let owed = debts.get(tenant).map_or(0, |debt| self.owed(debt, now));
        drop(debts);
        if owed < self.bytes_per_minute {
            return Ok(());
        }
        let seconds = (owed - self.bytes_per_minute).saturating_mul(60) / self.bytes_per_minute + 1;
        let detail = format!("a tenant may write {} bytes in a minute", self.bytes_per_minute);
        Err(Problem::new(TOO_MANY_REQUESTS, detail).header(RETRY_AFTER, &seconds.to_string()))
    }

    /// Charges a write that was applied.
    pub fn charge(&self, tenant: &Tenant, request_bytes: usize, response: &Response) {
        let bytes = request_bytes as u64 + response.body().size_hint().lower() + WRITE_OVERHEAD_BYTES;
        let now = self.clock.now();
        let mut debts = self.debts.lock().unwrap_or_else(PoisonError::into_inner);
        if debts.len() > TENANTS_CLEANED_ABOVE {
            debts.retain(|_, debt| self.owed(debt, now) > 0);
        }
        let before = debts.get(tenant).map_or(0, |debt| self.owed(debt, now));
        debts.insert(tenant.clone(), Debt { bytes: before.saturating_add(bytes), at: now });
    }

    fn owed(&self, debt: &Debt, now: Time) -> u64 {
        let paid = now.since(debt.at).as_micros() * u128::from(self.bytes_per_minute) / MICROS_PER_MINUTE;
        debt.bytes.saturating_sub(u64::try_from(paid).unwrap_or(u64::MAX))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use statehouse_store::ManualClock;
    use std::time::Duration;

    #[test]
    fn a_tenant_waits_until_its_bytes_are_paid_off() {
        let clock = ManualClock::at(Time::from_micros(0));
        let rate = WriteRate::new(6_000, Arc::new(clock.clone()));
        let (acme, other) = (Tenant::new("acme").unwrap(), Tenant::new("other").unwrap());
        assert!(rate.check(&acme).is_ok());
        rate.charge(&acme, 8_000 - WRITE_OVERHEAD_BYTES as usize, &Response::default());
        assert!(rate.check(&other).is_ok());
        let problem = rate.check(&acme).unwrap_err();
        assert_eq!(problem.kind.code, "too_many_requests");
        assert!(problem.headers.iter().any(|(name, value)| name == RETRY_AFTER && value == "21"));
        clock.advance(Duration::from_secs(21));
        assert!(rate.check(&acme).is_ok());
    }
}
