//! Tables of the house itself, whatever its blueprint says: who may come in, what is kept secret, who does which work.
//!
//! They are part of every house's schema, so that a migration that removes what the blueprint no longer names leaves
//! them alone. Their rows belong to [`tenant`], which no caller can be; whom a key lets in stands in its row. Only the
//! progress of groups through the log ([`log`]) has rows of other tenants as well.

use std::sync::Arc;

use statehouse_store::{SchemaError, Table, Tenant, Type};

use crate::infra::{lease, log, projection};

/// Keys that let callers in.
pub const KEYS: &str = "house_keys";
/// What the house must remember and not tell: one row for each purpose.
pub const SECRETS: &str = "house_secrets";

/// Who does which work: a lease for each part of it, and for each process.
pub const LEASES: &str = "house_leases";

/// The name of the owner of these rows.
const TENANT: &str = "_house";

/// The owner of these rows; `None` is for a name that is no tenant's, which this one is not.
pub fn tenant() -> Option<Tenant> {
    Tenant::new(TENANT).ok()
}

/// Whether a tenant is the house itself.
pub fn is_own(tenant: &Tenant) -> bool {
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

/// All of them. The declarations stand above and are right, which a test shows.
pub fn tables() -> Vec<Arc<Table>> {
    [keys(), secrets(), leases(), log::progress_table(), log::parked_table(), projection::projections_table()]
        .into_iter()
        .flatten()
        .collect()
}

/// Whether a blueprint must leave this table's name alone.
pub fn has_table(name: &str) -> bool {
    [KEYS, SECRETS, LEASES, log::PROGRESS, log::PARKED, projection::PROJECTIONS].contains(&name)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_declarations_are_right() {
        let tables = tables();
        assert_eq!(tables.len(), 6);
        assert!(tables.iter().all(|table| has_table(table.name())));
        assert!(is_own(&tenant().unwrap()));
    }
}
