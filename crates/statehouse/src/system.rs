//! Tables of the house itself, which exist with any blueprint: its name and id, API keys, secrets, leases of workers,
//! and the [`audit`].
//!
//! They are part of every house's schema, so that a migration that removes tables which the blueprint no longer names keeps
//! them. Their rows belong to [`tenant`], which no caller can be; the tenant that a key belongs to is in its row. Only the
//! progress of groups through the log ([`log`]) and of scans through tables ([`runner`]), and erasures ([`erasures`]), have rows of
//! other tenants as well.

use std::sync::Arc;

use statehouse_store::{SchemaError, Table, Tenant, Type};

use crate::audit;
use crate::infra::scan::runner;
use crate::infra::{lease, log, projection};

/// Keys that let callers in.
pub const KEYS: &str = "house_keys";
/// What the house must remember and not tell: one row for each purpose.
pub const SECRETS: &str = "house_secrets";

/// Who does which work: a lease for each part of it, and for each process.
pub const LEASES: &str = "house_leases";

/// Which house the store belongs to: one row.
pub const IDENTITY: &str = "house_identity";

/// Constraints of fields that rows were checked for.
pub const CONSTRAINTS: &str = "house_constraints";

/// Rows that were erased and whose events are not blank yet: rows of the tenants.
pub const ERASURES: &str = "house_erasures";

/// How far the log was blanked: one row while there are such erasures.
pub const BLANKING: &str = "house_blanking";

/// The name of the owner of these rows.
const TENANT: &str = "_house";

/// The owner of these rows; `None` is for a name that is no tenant's, which this one is not.
pub fn tenant() -> Option<Tenant> {
    Tenant::new(TENANT).ok()
}

/// Whether a tenant is the house itself.
pub fn is_system(tenant: &Tenant) -> bool {
    tenant.as_str() == TENANT
}

/// Who may come in. The key itself is not stored, only its digest.
pub fn keys() -> Result<Arc<Table>, SchemaError> {
    Table::named(KEYS)
        .partition("prefix", Type::Text)
        .required("owner", Type::Text)
        .required("name", Type::Text)
        .required("scopes", Type::Text)
        .required("digest", Type::Bytes)
        .required("created_at", Type::Time)
        .optional("expires_at", Type::Time)
        .optional("revoked_at", Type::Time)
        .optional("networks", Type::Text)
        .build()
}

/// What must not be told.
pub fn secrets() -> Result<Arc<Table>, SchemaError> {
    Table::named(SECRETS).partition("purpose", Type::Text).required("content", Type::Bytes).build()
}

/// Who does which work.
pub fn leases() -> Result<Arc<Table>, SchemaError> {
    lease::columns(Table::named(LEASES).partition("scope", Type::Text).sort("name", Type::Text)).build()
}

/// Which house the store belongs to.
pub fn identity() -> Result<Arc<Table>, SchemaError> {
    Table::named(IDENTITY)
        .partition("part", Type::Text)
        .required("name", Type::Text)
        .required("id", Type::Text)
        .required("claimed_at", Type::Time)
        .build()
}

/// Constraints of fields that rows were checked for.
pub fn constraints() -> Result<Arc<Table>, SchemaError> {
    Table::named(CONSTRAINTS)
        .partition("of_table", Type::Text)
        .sort("of_column", Type::Text)
        .required("limits", Type::Text)
        .build()
}

/// Rows that were erased and whose events are not blank yet.
pub fn erasures() -> Result<Arc<Table>, SchemaError> {
    Table::named(ERASURES)
        .partition("resource", Type::Text)
        .sort("key", Type::Text)
        .required("operation", Type::Text)
        .required("erased_at", Type::Time)
        .build()
}

/// How far the log was blanked.
pub fn blanking() -> Result<Arc<Table>, SchemaError> {
    Table::named(BLANKING)
        .partition("part", Type::Text)
        .required("subjects", Type::Json)
        .required("heads", Type::Json)
        .required("log_partition", Type::Int)
        .required("reached", Type::Int)
        .required("events", Type::Int)
        .required("began_at", Type::Time)
        .build()
}

/// All of them. The declarations stand above and are right, which a test shows.
pub fn tables() -> Result<Vec<Arc<Table>>, SchemaError> {
    [
        identity(),
        constraints(),
        erasures(),
        blanking(),
        keys(),
        secrets(),
        leases(),
        audit::table(),
        log::progress_table(),
        log::parked_table(),
        projection::projections_table(),
        runner::scans_table(),
    ]
    .into_iter()
    .collect()
}

/// Whether a blueprint must leave this table's name alone.
pub fn has_table(name: &str) -> bool {
    let own = [IDENTITY, CONSTRAINTS, ERASURES, BLANKING, KEYS, SECRETS, LEASES, audit::AUDIT];
    own.contains(&name)
        || [log::PROGRESS, log::PARKED, projection::PROJECTIONS, runner::SCANS].contains(&name)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_declarations_are_right() {
        let tables = tables().unwrap();
        assert_eq!(tables.len(), 12);
        assert!(tables.iter().all(|table| has_table(table.name())));
        assert!(is_system(&tenant().unwrap()));
    }
}
