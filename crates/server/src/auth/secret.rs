//! The server's secret, from which seals and key digests are derived.
//!
//! All servers of one store must use the same secret, also after a restart. The operator sets it, or the first server
//! generates it and stores it; the insert is guarded, so that servers that start concurrently agree on one.

use statehouse::audit::{self, AuditActor, AuditEntry};
use statehouse::secret_keys::{CONTENT, SecretKeyError};
use statehouse::{House, system};
use statehouse_store::random::{NoEntropy, secret_bytes};
use statehouse_store::{Address, Consistency, Plan, PlanError, SchemaError, Step, StoreError, Tenant, Value};

use crate::seal::CursorSeal;

/// Minimum length of a configured secret.
pub const SECRET_BYTES_MIN: usize = 16;
/// Maximum length of the name of a key.
const NAME_CHARS_MAX: usize = 200;
/// Attempts to store the secret.
const TRIES: usize = 5;
const PURPOSE: &str = "server";
/// The row that [`write_probe`] writes.
const PROBE: &str = "write probe";

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
    /// The stored secret cannot be decrypted, or encrypted.
    #[error("the server's secret in the store: {0}")]
    SecretKey(#[from] SecretKeyError),
    /// The tenant is reserved.
    #[error("the tenant name {0:?} is reserved")]
    OwnTenant(String),
    /// Unknown key.
    #[error("there is no key with the prefix {0:?}")]
    NoKey(String),
    /// The key was revoked or has expired.
    #[error("the key {0:?} was revoked or has expired: create a new one")]
    NotLive(String),
    /// The description of a key cannot be shown.
    #[error(
        "the name of a key has at most {NAME_CHARS_MAX} characters, none of them a control or invisible character"
    )]
    BadName,
    /// The row was not written.
    #[error("{0}")]
    NotStored(String),
}

/// The server's secret.
#[derive(Clone)]
pub struct HouseSecret(Vec<u8>);

impl HouseSecret {
    /// The configured secret, or the stored one, which is generated if missing. The house must be migrated.
    pub async fn of(house: &House, given: Option<&str>) -> Result<HouseSecret, SystemRowError> {
        if let Some(given) = given {
            if given.len() < SECRET_BYTES_MIN {
                return Err(SystemRowError::ShortSecret { given: given.len() });
            }
            return Ok(HouseSecret(given.as_bytes().to_vec()));
        }
        let (table, tenant) = (system::secrets()?, system_tenant()?);
        let address = Address::new(&table, &tenant, [PURPOSE.into()])?;
        for _ in 0..TRIES {
            let rows = house.store().get(std::slice::from_ref(&address), Consistency::Strong).await?;
            if let Some(row) = rows.first().and_then(Option::as_ref) {
                return Ok(HouseSecret(house.secret_keys().open(&address, row.get_bytes(CONTENT)?)?));
            }
            let content = house.secret_keys().seal(&address, &secret_bytes::<32>()?)?;
            let insert = Step::insert(&table, [PURPOSE.into()]).set(CONTENT, Value::Bytes(content));
            let entry = AuditEntry::of(&AuditActor::program("server"), "secret.generate", PURPOSE);
            let plan =
                audit::begin(&entry, house.clock().now(), &house.ids().next())?.step(insert).build()?;
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

/// Whether an operator's description can be shown on a terminal: no control characters, no invisible ones and none that
/// change the direction of text.
pub(crate) fn is_plain_name(name: &str) -> bool {
    let is_hidden = |c: char| {
        c.is_control()
            || matches!(c, '\u{ad}' | '\u{61c}' | '\u{200b}'..='\u{200f}' | '\u{2028}'..='\u{202e}' | '\u{2060}'..='\u{206f}' | '\u{feff}')
    };
    name.chars().count() <= NAME_CHARS_MAX && !name.chars().any(is_hidden)
}

/// Writes a system row, to find out whether the store accepts writes.
pub(crate) async fn write_probe(house: &House) -> Result<(), SystemRowError> {
    let step = Step::upsert(&system::secrets()?, [PROBE.into()]).set("content", Value::Bytes(Vec::new()));
    let plan = Plan::of(&system_tenant()?, house.ids().next()).step(step).build()?;
    house.store().commit(&plan).await?;
    Ok(())
}

/// The tenant that owns the system rows.
pub(crate) fn system_tenant() -> Result<Tenant, SystemRowError> {
    system::tenant().ok_or_else(|| SystemRowError::NotStored("the house has no tenant of its own".into()))
}
