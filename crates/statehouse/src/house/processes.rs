//! Which processes serve a store, and with which blueprint.
//!
//! A process that serves has a lease, `house_leases("processes", its name)`, whose holder is the digest of its blueprint's tables.
//! Changes after which another blueprint cannot go on (a greater layout number, a column that gets another name, values that move,
//! constraints that are filled, removals) are refused while a process with another blueprint may be alive. A process that was killed
//! may be alive until its lease has ended.

use std::sync::{Arc, PoisonError};
use std::time::Duration;

use statehouse_store::{Clock, Migrate, Plan, Schema, SchemaChange, Step, StoreError, Value};
use tokio::task::JoinHandle;

use super::{House, digest};
use crate::infra::lease::{Held, Leases};
use crate::system;

/// The scope of the leases.
const PROCESSES: &str = "processes";

/// A process that says that it serves.
#[derive(Debug)]
pub(super) struct ServingProcess {
    /// The row of its lease.
    key: [Value; 2],
    renewal: JoinHandle<()>,
}

impl Drop for ServingProcess {
    fn drop(&mut self) {
        self.renewal.abort();
    }
}

/// What tells the tables of one blueprint from those of another.
fn schema_digest(schema: &Schema) -> String {
    let tables: Vec<String> = schema.tables().map(|table| format!("{table:?}")).collect();
    digest(&tables.join("\n"))
}

impl House {
    fn leases(&self) -> Result<Leases, StoreError> {
        let table = system::leases().map_err(|error| StoreError::schema(error.table, error.why))?;
        let tenant =
            system::tenant().ok_or_else(|| StoreError::schema("leases", "the house has no tenant"))?;
        Ok(Leases::of(self.store.clone(), self.clock.clone(), table, tenant))
    }

    /// Says in the store that this process serves the blueprint, until [`House::unregister`] or until the process is gone: then
    /// for the time of the lease.
    pub async fn register(&self, lease: Duration) -> Result<(), StoreError> {
        let (leases, holder) = (self.leases()?, schema_digest(&self.schema));
        let key = [PROCESSES.into(), self.ids.next().into()];
        let Ok(held) = leases.acquire(&key, &holder, lease).await? else {
            return Err(StoreError::unavailable("another process has the same name"));
        };
        let renewing = renew(leases, self.clock.clone(), held, key.clone(), holder, lease);
        let process = ServingProcess { key, renewal: tokio::spawn(renewing) };
        *self.serving.lock().unwrap_or_else(PoisonError::into_inner) = Some(process);
        Ok(())
    }

    /// Says in the store that this process does not serve any more.
    pub async fn unregister(&self) {
        let process = self.serving.lock().unwrap_or_else(PoisonError::into_inner).take();
        let (Some(process), Ok(leases), Some(tenant)) = (process, self.leases(), system::tenant()) else {
            return;
        };
        process.renewal.abort();
        let step = Step::remove(leases.table(), process.key.iter().cloned());
        if let Ok(plan) = Plan::of(&tenant, "process.leave").step(step).build() {
            // What cannot be removed ends by itself.
            let _ = self.store.commit(&plan).await;
        }
    }

    /// Refuses changes that another blueprint cannot go on after, while a process that serves one may be alive.
    pub(super) async fn check_processes(
        &self,
        shown: &[SchemaChange],
        how: Migrate,
        names: Option<&[String]>,
    ) -> Result<(), StoreError> {
        let is_named = |change: &SchemaChange| match names {
            None => true,
            Some(names) => change.removed().is_some_and(|removed| names.contains(&removed)),
        };
        let ends = |change: &&SchemaChange| match change.removes() {
            true => how == Migrate::ApplyWithLoss && is_named(change),
            false => !change.is_reversible(),
        };
        let Some(change) = shown.iter().find(ends) else { return Ok(()) };
        let own = schema_digest(&self.schema);
        let processes = match self.leases()?.list(&[PROCESSES.into()]).await {
            Ok(processes) => processes,
            // The table was not created yet.
            Err(StoreError::Schema { .. }) => return Ok(()),
            Err(error) => return Err(error),
        };
        let now = self.clock.now();
        let other = processes
            .iter()
            .filter(|process| process.is_held(now) && process.holder.as_deref() != Some(own.as_str()));
        let Some(process) = other.max_by_key(|process| process.expires_at) else { return Ok(()) };
        let name = process.key.get(1).and_then(Value::as_text).unwrap_or_default();
        let until = process.expires_at.map(|at| at.to_string()).unwrap_or_default();
        let why = format!(
            "it would not do after this change: {change}. Process {name} serves another blueprint and may be alive until {until}, \
             unless it renews its lease. Nothing was changed: stop it, and try again"
        );
        Err(StoreError::schema("the blueprint of a running process", why))
    }
}

/// Renews the lease of a process for as long as it runs.
async fn renew(
    leases: Leases,
    clock: Arc<dyn Clock>,
    mut held: Held,
    key: [Value; 2],
    holder: String,
    lease: Duration,
) {
    loop {
        clock.sleep(lease / 3).await;
        // A store that cannot be reached is tried again; a lease that has ended is acquired anew.
        if let Ok(lost) = leases.renew(vec![&mut held], lease).await
            && !lost.is_empty()
            && let Ok(Ok(anew)) = leases.acquire(&key, &holder, lease).await
        {
            held = anew;
        }
    }
}
