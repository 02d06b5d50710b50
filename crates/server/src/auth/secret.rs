//! The server's secret, from which seals and key digests are derived.
//!
//! All servers of one store must use the same secret, also after a restart. The operator sets it, or the first server
//! generates it and stores it; the insert is guarded, so that servers that start concurrently agree on one.

use statehouse::{House, own};
use statehouse_store::random::{NoEntropy, secret_bytes};
use statehouse_store::{Address, Consistency, Plan, PlanError, SchemaError, Step, StoreError, Tenant, Value};

use crate::seal::CursorSeal;

/// Minimum length of a configured secret.
pub const SECRET_BYTES_MIN: usize = 16;
/// Attempts to store the secret.
const TRIES: usize = 5;
const PURPOSE: &str = "server";

/// A failed read or write of system rows.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum SystemRowError {
    /// The store failed.
    #[error(transparent)]
    Store(#[from] StoreError),
    /// The plan is not valid.
    #[error(transparent)]
    Plan(#[from] PlanError),
    /// A system table is declared wrongly, which is a defect.
    #[error(transparent)]
    Schema(#[from] SchemaError),
    /// The operating system gave no random bytes.
    #[error(transparent)]
    Entropy(#[from] NoEntropy),
    /// The configured secret is too short.
    #[error("the secret has {given} bytes; it needs at least {SECRET_BYTES_MIN}")]
    ShortSecret {
        /// Its length.
        given: usize,
    },
    /// The tenant is reserved.
    #[error("the tenant name {0:?} is reserved")]
    OwnTenant(String),
    /// Unknown key.
    #[error("there is no key with the prefix {0:?}")]
    NoKey(String),
    /// The row was not written.
    #[error("{0}")]
    NotStored(String),
}

/// The server's secret.
#[derive(Clone)]
pub struct Secret(Vec<u8>);

impl Secret {
    /// The configured secret, or the stored one, which is generated if missing. The house must be migrated.
    pub async fn of(house: &House, given: Option<&str>) -> Result<Secret, SystemRowError> {
        if let Some(given) = given {
            if given.len() < SECRET_BYTES_MIN {
                return Err(SystemRowError::ShortSecret { given: given.len() });
            }
            return Ok(Secret(given.as_bytes().to_vec()));
        }
        let (table, tenant) = (own::secrets()?, system_tenant()?);
        let address = Address::new(&table, &tenant, [PURPOSE.into()])?;
        for _ in 0..TRIES {
            let rows = house.store().get(std::slice::from_ref(&address), Consistency::Strong).await?;
            if let Some(content) = rows.first().and_then(Option::as_ref).and_then(|row| row.bytes("content"))
            {
                return Ok(Secret(content.to_vec()));
            }
            let content = Value::Bytes(secret_bytes::<32>()?.to_vec());
            let insert = Step::insert(&table, [PURPOSE.into()]).set("content", content);
            let plan = Plan::of(&tenant, house.ids().next()).step(insert).build()?;
            // In any case, read again: another server may have inserted first.
            match house.store().commit(&plan).await {
                Ok(_) | Err(StoreError::OutcomeUnknown { .. }) => {}
                Err(error) => return Err(error.into()),
            }
        }
        Err(SystemRowError::NotStored("the server's secret could not be kept in the store".into()))
    }

    /// Derives the seal for one purpose.
    pub fn seal(&self, purpose: &str) -> CursorSeal {
        CursorSeal::of(&self.0, purpose)
    }
}

/// The tenant that owns the system rows.
pub(crate) fn system_tenant() -> Result<Tenant, SystemRowError> {
    own::tenant().ok_or_else(|| SystemRowError::NotStored("the house has no tenant of its own".into()))
}
