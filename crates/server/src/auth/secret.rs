//! The server's secret: what seals cursors and digests keys.
//!
//! Servers over one store must agree on it, and a restart must not change it. Either the operator gives it, or the
//! first server makes one and keeps it in the store; the insert is guarded, so that of two servers that start at once
//! one wins and both use its secret.

use statehouse::{House, own};
use statehouse_store::random::{NoEntropy, secret_bytes};
use statehouse_store::{Address, Consistency, Plan, PlanError, SchemaError, Step, StoreError, Tenant, Value};

use crate::seal::Seal;

/// The least length of a secret that the operator gives.
pub const SECRET_BYTES_MIN: usize = 16;
/// How often an outcome that is not known is asked for again.
const TRIES: usize = 5;
const PURPOSE: &str = "server";

/// Why something of the house itself could not be read or written.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum OwnError {
    /// The store failed.
    #[error(transparent)]
    Store(#[from] StoreError),
    /// What was to be written cannot be.
    #[error(transparent)]
    Plan(#[from] PlanError),
    /// A table of the house is declared wrongly, which is a defect.
    #[error(transparent)]
    Schema(#[from] SchemaError),
    /// The operating system gave no random bytes.
    #[error(transparent)]
    Entropy(#[from] NoEntropy),
    /// The secret that was given is too short.
    #[error("the secret has {given} bytes; it needs at least {SECRET_BYTES_MIN}")]
    ShortSecret {
        /// Its length.
        given: usize,
    },
    /// The tenant cannot have keys.
    #[error("the name {0:?} is the house's own")]
    OwnTenant(String),
    /// There is no such key.
    #[error("there is no key with the prefix {0:?}")]
    NoKey(String),
    /// What was to be written was not, and it is not clear why.
    #[error("{0}")]
    Undone(String),
}

/// The server's secret.
#[derive(Clone)]
pub struct Secret(Vec<u8>);

impl Secret {
    /// The secret that the operator gave, or the one of the house, which is made if there is none. The house must have
    /// been migrated.
    pub async fn of(house: &House, given: Option<&str>) -> Result<Secret, OwnError> {
        if let Some(given) = given {
            if given.len() < SECRET_BYTES_MIN {
                return Err(OwnError::ShortSecret { given: given.len() });
            }
            return Ok(Secret(given.as_bytes().to_vec()));
        }
        let (table, tenant) = (own::secrets()?, own_tenant()?);
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
            // Whatever comes of it, the row is read again: another server may have been first.
            match house.store().commit(&plan).await {
                Ok(_) | Err(StoreError::OutcomeUnknown { .. }) => {}
                Err(error) => return Err(error.into()),
            }
        }
        Err(OwnError::Undone("the server's secret could not be kept in the store".into()))
    }

    /// A seal for one purpose.
    pub fn seal(&self, purpose: &str) -> Seal {
        Seal::of(&self.0, purpose)
    }
}

/// The owner of the house's own rows.
pub(crate) fn own_tenant() -> Result<Tenant, OwnError> {
    own::tenant().ok_or_else(|| OwnError::Undone("the house has no tenant of its own".into()))
}
