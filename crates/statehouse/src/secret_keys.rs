//! Encryption of secrets at rest: values of [`system::secrets`] are encrypted with a key that is not in the store.
//!
//! The operator gives the keys ([`SecretKeys::parse`]). The first key encrypts; all keys decrypt, so that a key can be
//! replaced while servers run. A stored value is
//!
//! ```text
//! MAGIC (8 bytes) | key id (8 hex digits) | nonce (24 bytes) | XChaCha20-Poly1305 ciphertext and tag
//! ```
//!
//! - K1. A value belongs to its row. *Associated data:* table, tenant, key columns and key id; a value that was copied to
//!   another row does not decrypt.
//! - K2. A value that cannot be decrypted is an error that names its key id. It is never read as absent or empty.
//! - K3. A value without `MAGIC` is plain: it was written before a key was configured. It is readable, and encrypted by the
//!   next write or by [`reencrypt`].
//!
//! A process that can write to the store can replace a value by a plain one of its choice, or by an older one. Encryption
//! protects files, backups and tables that are read by others.

use std::fmt;
use std::sync::Arc;

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use chacha20poly1305::aead::{Aead as _, KeyInit as _, Payload};
use chacha20poly1305::{XChaCha20Poly1305, XNonce};
use sha2::{Digest as _, Sha256};
use statehouse_store::guard::column;
use statehouse_store::random::{NoEntropy, secret_bytes};
use statehouse_store::{Address, Guard, PlanError, Row, Scan, SchemaError, Step, StoreError, Value};

use crate::House;
use crate::audit::{self, AuditActor, AuditEntry};
use crate::resource::key_text;
use crate::system;

/// The column that holds a secret.
pub const CONTENT: &str = "content";
const MAGIC: &[u8; 8] = b"\0shsec1\0";
const PREFIX: &str = "shk_";
const ID_BYTES: usize = 8;
const NONCE_BYTES: usize = 24;
/// How often a row that changes concurrently is read again.
const TRIES: usize = 5;

/// Why a secret cannot be read or written.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum SecretKeyError {
    /// A configured key is not one.
    #[error("key {index} of `secrets_key` is not a key: `statehouse secret new-key` prints one")]
    NotAKey {
        /// Its position, from 1.
        index: usize,
    },
    /// The key of a value is not configured.
    #[error(
        "it is encrypted with the key {id}, and this process has {configured}: add that key to `secrets_key`"
    )]
    MissingKey {
        /// The key id that is stored with the value.
        id: String,
        /// The key ids that are configured.
        configured: String,
    },
    /// The value was changed, or belongs to another row.
    #[error(
        "it is encrypted with the key {id} and does not decrypt: it was changed, or copied from another row"
    )]
    Damaged {
        /// The key id that is stored with the value.
        id: String,
    },
    /// Encryption failed.
    #[error("encryption with the key {id} failed")]
    Failed {
        /// The key id.
        id: String,
    },
    /// No key is configured to encrypt with.
    #[error("no `secrets_key` is configured")]
    NoKey,
    /// The row changed again and again.
    #[error("the secret {0} is changed by others at the same time: try again")]
    Contended(String),
    /// The operating system gave no random bytes.
    #[error(transparent)]
    Entropy(#[from] NoEntropy),
    /// The store failed.
    #[error(transparent)]
    Store(#[from] StoreError),
    /// The plan is not valid.
    #[error(transparent)]
    Plan(#[from] PlanError),
    /// A system table is declared wrongly, which is a defect.
    #[error(transparent)]
    Schema(#[from] SchemaError),
}

/// Keys that encrypt secrets at rest. Clones share them. `Debug` prints their ids only.
#[derive(Clone, Default)]
pub struct SecretKeys(Arc<[SecretKey]>);

struct SecretKey {
    id: String,
    cipher: XChaCha20Poly1305,
}

impl fmt::Debug for SecretKeys {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_list().entries(self.ids()).finish()
    }
}

impl SecretKeys {
    /// A new key as text.
    pub fn generate() -> Result<String, NoEntropy> {
        Ok(format!("{PREFIX}{}", STANDARD.encode(secret_bytes::<32>()?)))
    }

    /// Reads keys as text, with white space or commas between them. No text is no key.
    pub fn parse(text: &str) -> Result<SecretKeys, SecretKeyError> {
        let words = text.split([',', ' ', '\t', '\r', '\n']).filter(|word| !word.is_empty());
        let parsed = words.enumerate().map(|(index, word)| {
            let bytes = word.strip_prefix(PREFIX).and_then(|word| STANDARD.decode(word).ok());
            let bytes: Option<[u8; 32]> = bytes.and_then(|bytes| bytes.try_into().ok());
            let bytes = bytes.ok_or(SecretKeyError::NotAKey { index: index + 1 })?;
            Ok(SecretKey { id: id_of(&bytes), cipher: XChaCha20Poly1305::new(&bytes.into()) })
        });
        Ok(SecretKeys(parsed.collect::<Result<_, SecretKeyError>>()?))
    }

    /// Whether there is no key, so that secrets are stored as plain bytes.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// The ids of the keys; the first one encrypts.
    pub fn ids(&self) -> impl Iterator<Item = &str> {
        self.0.iter().map(|key| key.id.as_str())
    }

    /// The bytes that are stored for a secret at this address: encrypted, if there is a key.
    pub fn seal(&self, address: &Address, secret: &[u8]) -> Result<Vec<u8>, SecretKeyError> {
        let Some(key) = self.0.first() else { return Ok(secret.to_vec()) };
        let nonce = secret_bytes::<NONCE_BYTES>()?;
        let payload = Payload { msg: secret, aad: &associated_data(address, &key.id) };
        let sealed = key.cipher.encrypt(&XNonce::from(nonce), payload);
        let sealed = sealed.map_err(|_| SecretKeyError::Failed { id: key.id.clone() })?;
        Ok([MAGIC, key.id.as_bytes(), &nonce, &sealed].concat())
    }

    /// The secret that is stored at this address.
    pub fn open(&self, address: &Address, stored: &[u8]) -> Result<Vec<u8>, SecretKeyError> {
        let Some(sealed) = stored.strip_prefix(MAGIC) else { return Ok(stored.to_vec()) };
        let damaged = |id: &str| SecretKeyError::Damaged { id: id.to_owned() };
        let (id, rest) = sealed.split_at_checked(ID_BYTES).ok_or_else(|| damaged("(cut off)"))?;
        let id = std::str::from_utf8(id).map_err(|_| damaged("(damaged)"))?;
        let key = self.0.iter().find(|key| key.id == id).ok_or_else(|| self.missing(id))?;
        let (nonce, sealed) = rest.split_at_checked(NONCE_BYTES).ok_or_else(|| damaged(id))?;
        let nonce: [u8; NONCE_BYTES] = nonce.try_into().map_err(|_| damaged(id))?;
        let payload = Payload { msg: sealed, aad: &associated_data(address, id) };
        key.cipher.decrypt(&XNonce::from(nonce), payload).map_err(|_| damaged(id))
    }

    fn missing(&self, id: &str) -> SecretKeyError {
        let ids: Vec<&str> = self.ids().collect();
        let configured = if ids.is_empty() { "no key".to_owned() } else { ids.join(", ") };
        SecretKeyError::MissingKey { id: id.to_owned(), configured }
    }

    /// Whether a stored value is encrypted with the first key.
    fn is_current(&self, stored: &[u8]) -> bool {
        let id = stored.strip_prefix(MAGIC).and_then(|sealed| sealed.get(..ID_BYTES));
        self.ids().next().is_some_and(|current| id == Some(current.as_bytes()))
    }
}

/// The id of a key is a part of its digest, so that a key cannot be configured under another key's id.
fn id_of(key: &[u8; 32]) -> String {
    let digest = Sha256::new().chain_update(b"statehouse secret key").chain_update(key).finalize();
    digest.iter().take(ID_BYTES / 2).map(|byte| format!("{byte:02x}")).collect()
}

/// What a value is bound to (K1).
fn associated_data(address: &Address, id: &str) -> Vec<u8> {
    let key = key_text(address.key());
    let parts = [address.table().name(), address.tenant().as_str(), &key, id];
    let mut bytes = Vec::new();
    for part in parts {
        bytes.extend_from_slice(&(part.len() as u64).to_le_bytes());
        bytes.extend_from_slice(part.as_bytes());
    }
    bytes
}

/// What [`reencrypt`] did.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ReencryptedSecrets {
    /// Secrets in the store.
    pub total: usize,
    /// Those that were plain or encrypted with another key, and are encrypted with the first key now.
    pub changed: usize,
}

/// Encrypts every secret of the store with the first key, each in one plan with its audit row. Servers go on reading and writing meanwhile, if they have both
/// keys.
pub async fn reencrypt(house: &House, by: &AuditActor) -> Result<ReencryptedSecrets, SecretKeyError> {
    let keys = house.secret_keys();
    if keys.is_empty() {
        return Err(SecretKeyError::NoKey);
    }
    let table = system::secrets()?;
    let mut done = ReencryptedSecrets::default();
    let mut scan = Scan::all(&table);
    loop {
        let page = house.store().scan(&scan).await?;
        for row in page.rows {
            done.total += 1;
            done.changed += usize::from(reencrypt_row(house, keys, by, row).await?);
        }
        let Some(next) = page.next else { return Ok(done) };
        scan = scan.after(next)?;
    }
}

/// Returns whether the row was changed. A row that is gone needs nothing.
async fn reencrypt_row(
    house: &House,
    keys: &SecretKeys,
    by: &AuditActor,
    row: Row,
) -> Result<bool, SecretKeyError> {
    let address = Address::new(&system::secrets()?, row.tenant(), row.key().iter().cloned())?;
    let mut row = row;
    for _ in 0..TRIES {
        let stored = row.get_bytes(CONTENT)?;
        if keys.is_current(stored) {
            return Ok(false);
        }
        let sealed = keys.seal(&address, &keys.open(&address, stored)?)?;
        let step = Step::update(address.table(), row.key().iter().cloned())
            .guard(Guard::version(row.version()))
            .guard(column(CONTENT).eq(Value::Bytes(stored.to_vec())))
            .set(CONTENT, Value::Bytes(sealed));
        let entry = AuditEntry::of(by, "secret.reencrypt", &key_text(address.key()));
        let plan = audit::begin(&entry, house.clock().now(), &house.ids().next())?.step(step).build()?;
        match audit::commit(&**house.store(), &plan).await? {
            None => return Ok(true),
            Some(refused) => match refused.current {
                Some(current) => row = current,
                None => return Ok(false),
            },
        }
    }
    Err(SecretKeyError::Contended(address.to_string()))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn address(name: &str) -> Address {
        Address::new(&system::secrets().unwrap(), &system::tenant().unwrap(), [name.into()]).unwrap()
    }

    #[test]
    fn values_are_bound_to_their_key_and_their_row() {
        let (first, second) = (SecretKeys::generate().unwrap(), SecretKeys::generate().unwrap());
        let keys = SecretKeys::parse(&format!("{first}\n")).unwrap();
        let sealed = keys.seal(&address("a"), b"topsecret").unwrap();
        assert!(!sealed.windows(9).any(|window| window == b"topsecret"));
        assert_ne!(sealed, keys.seal(&address("a"), b"topsecret").unwrap(), "a nonce is used once");
        assert_eq!(keys.open(&address("a"), &sealed).unwrap(), b"topsecret");
        // After a rotation the new key encrypts, and the old one still decrypts.
        let both = SecretKeys::parse(&format!("{second}, {first}")).unwrap();
        assert_eq!(both.open(&address("a"), &sealed).unwrap(), b"topsecret");
        assert!(keys.is_current(&sealed) && !both.is_current(&sealed));
        let id = keys.ids().next().unwrap();
        for (keys, place, stored, expected) in [
            (SecretKeys::parse(&second).unwrap(), "a", sealed.clone(), "which is missing"),
            (SecretKeys::default(), "a", sealed.clone(), "no key"),
            (keys.clone(), "b", sealed.clone(), "copied from another row"),
            (keys.clone(), "a", sealed[..sealed.len() - 1].to_vec(), "does not decrypt"),
            (keys.clone(), "a", sealed[..20].to_vec(), "does not decrypt"),
            (keys.clone(), "a", [&sealed[..60], b"x"].concat(), "does not decrypt"),
        ] {
            let why = keys.open(&address(place), &stored).unwrap_err().to_string();
            assert!(why.contains(id), "{why}");
            assert!(why.contains(expected) || expected == "which is missing", "{why}");
            assert!(!why.contains("topsecret"), "{why}");
        }
        assert!(keys.open(&address("a"), MAGIC).is_err());
        assert_eq!(format!("{keys:?}"), format!("[{id:?}]"));
    }

    #[test]
    fn plain_values_stay_readable() {
        let keys = SecretKeys::parse(&SecretKeys::generate().unwrap()).unwrap();
        assert_eq!(SecretKeys::default().seal(&address("a"), b"plain").unwrap(), b"plain");
        assert_eq!(keys.open(&address("a"), b"plain").unwrap(), b"plain");
        assert!(!keys.is_current(b"plain"));
    }

    #[test]
    fn what_is_not_a_key_is_refused() {
        let good = SecretKeys::generate().unwrap();
        for bad in ["x", "shk_", "shk_AAAA", good.trim_start_matches(PREFIX)] {
            let why = SecretKeys::parse(&format!("{good} {bad}")).unwrap_err().to_string();
            assert!(why.contains("key 2") && !why.contains(&good), "{why}");
        }
        assert!(SecretKeys::parse(" \n").unwrap().is_empty());
    }
}
