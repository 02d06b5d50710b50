//! Bytes of responses that clients have not accepted yet, bounded per connection and per tenant.
//!
//! A response stays in memory until its client accepts it. Without a bound, a client that opens many HTTP/2 streams and
//! reads none of them fills the memory of the server. A read whose response exceeds a bound gets a 429 instead. A bound
//! never refuses the only response of a connection or tenant, whatever its size.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};

use statehouse_store::Tenant;

use crate::config::ServerLimits;
use crate::problem::Problem;

/// The unsent bytes of a server.
#[derive(Debug)]
pub struct UnsentBytes {
    connection_max: usize,
    tenant_max: usize,
    tenants: Mutex<HashMap<Tenant, usize>>,
}

/// The unsent bytes of a connection.
#[derive(Clone, Debug, Default)]
pub struct ConnectionUnsent(Arc<Mutex<usize>>);

/// The unsent bytes of a response, until this is dropped.
#[derive(Debug)]
pub struct UnsentGuard {
    all: Arc<UnsentBytes>,
    connection: ConnectionUnsent,
    tenant: Option<Tenant>,
    bytes: usize,
}

impl UnsentBytes {
    /// Counters with the bounds of these limits.
    pub fn new(limits: &ServerLimits) -> UnsentBytes {
        UnsentBytes {
            connection_max: limits.connection_unsent_bytes,
            tenant_max: limits.tenant_unsent_bytes,
            tenants: Mutex::default(),
        }
    }

    /// Rejects a request of a tenant that has as many unsent bytes as it may have.
    pub fn check(&self, tenant: &Tenant) -> Result<(), Problem> {
        let tenants = self.tenants.lock().unwrap_or_else(PoisonError::into_inner);
        match tenants.get(tenant) {
            Some(bytes) if *bytes >= self.tenant_max => Err(self.tenant_exceeded()),
            _ => Ok(()),
        }
    }

    /// Counts the bytes of a response. With `refuse`, fails if a bound would be exceeded; otherwise the bytes are counted
    /// in any case, because the response reports a write.
    pub fn reserve(
        self: &Arc<Self>,
        connection: &ConnectionUnsent,
        tenant: Option<&Tenant>,
        bytes: usize,
        refuse: bool,
    ) -> Result<UnsentGuard, Problem> {
        let exceeds = |before: usize, max: usize| refuse && before > 0 && before + bytes > max;
        let mut in_connection = connection.0.lock().unwrap_or_else(PoisonError::into_inner);
        if exceeds(*in_connection, self.connection_max) {
            let detail = format!(
                "this connection has not read {in_connection} bytes of earlier responses; at most {} may be unread",
                self.connection_max
            );
            return Err(Problem::too_many_requests(detail));
        }
        if let Some(tenant) = tenant {
            let mut tenants = self.tenants.lock().unwrap_or_else(PoisonError::into_inner);
            let of_tenant = tenants.get(tenant).copied().unwrap_or_default();
            if exceeds(of_tenant, self.tenant_max) {
                return Err(self.tenant_exceeded());
            }
            tenants.insert(tenant.clone(), of_tenant + bytes);
        }
        *in_connection += bytes;
        drop(in_connection);
        Ok(UnsentGuard { all: self.clone(), connection: connection.clone(), tenant: tenant.cloned(), bytes })
    }

    fn tenant_exceeded(&self) -> Problem {
        let detail = format!("at most {} bytes of responses of a tenant may be unread", self.tenant_max);
        Problem::too_many_requests(detail)
    }
}

impl Drop for UnsentGuard {
    fn drop(&mut self) {
        let mut in_connection = self.connection.0.lock().unwrap_or_else(PoisonError::into_inner);
        *in_connection = in_connection.saturating_sub(self.bytes);
        drop(in_connection);
        let Some(tenant) = &self.tenant else { return };
        let mut tenants = self.all.tenants.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(bytes) = tenants.get_mut(tenant) {
            *bytes = bytes.saturating_sub(self.bytes);
            if *bytes == 0 {
                tenants.remove(tenant);
            }
        }
    }
}
