//! API keys: `sth_<prefix>_<secret><checksum>`, all in hexadecimal.
//!
//! - The **prefix** (64 bits) identifies the key in lists and in the table; it is not secret.
//! - The **secret** (256 bits) comes from the operating system's random source. The store contains only a keyed digest,
//!   which is compared in constant time. A secret of this size needs no slow hash.
//! - The **checksum** (32 bits) detects mistyped keys without a read, and lets secret scanners avoid false positives.
//!
//! A key has a tenant, scopes and optionally an expiry. Rotation keeps two live keys: [`rotate`] creates a successor and
//! sets the expiry of the old key, so that callers can switch in between. Every server rejects a revoked key as soon as
//! its cached entry expires (`credential_cache_ms`).

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use serde::Serialize;
use statehouse::{House, own};
use statehouse_store::guard::is_null;
use statehouse_store::random::secret_bytes;
use statehouse_store::{
    Address, Commit, Consistency, Plan, RetryPolicy, Row, Scan, Step, Tenant, Time, Value, commit_known,
};
use subtle::ConstantTimeEq;

use super::secret::{Secret, SystemRowError, system_tenant};
use super::{Caller, Scope, read_scopes, scopes_text};
use crate::problem::{Problem, UNAVAILABLE};
use crate::seal::{CursorSeal, fingerprint};

/// Start of every key.
pub const MARK: &str = "sth_";
const PREFIX_DIGITS: usize = 16;
const SECRET_DIGITS: usize = 64;
const CHECKSUM_DIGITS: usize = 8;
/// Maximum number of cached keys.
const ENTRIES_MAX: usize = 10_000;
/// Key derivation purpose of the key digest.
const PURPOSE: &str = "api keys";

/// A key to create.
#[derive(Clone, Debug)]
pub struct NewKey {
    /// Tenant of the caller.
    pub tenant: Tenant,
    /// The operator's description.
    pub name: String,
    /// Granted scopes.
    pub scopes: Vec<Scope>,
    /// Time to live.
    pub expires_in: Option<Duration>,
}

/// The stored properties of a key, without the secret.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct KeyInfo {
    /// Identifier.
    pub prefix: String,
    /// Tenant of the caller.
    pub tenant: String,
    /// The operator's description.
    pub name: String,
    /// Granted scopes.
    pub scopes: String,
    /// Time of creation.
    #[serde(serialize_with = "as_text")]
    pub created_at: Time,
    /// Expiry.
    #[serde(serialize_with = "as_optional_text")]
    pub expires_at: Option<Time>,
    /// Time of revocation.
    #[serde(serialize_with = "as_optional_text")]
    pub revoked_at: Option<Time>,
}

fn as_text<S: serde::Serializer>(time: &Time, serializer: S) -> Result<S::Ok, S::Error> {
    serializer.collect_str(time)
}

#[expect(clippy::ref_option, reason = "the signature is serde's")]
fn as_optional_text<S: serde::Serializer>(time: &Option<Time>, serializer: S) -> Result<S::Ok, S::Error> {
    match time {
        Some(time) => serializer.collect_str(time),
        None => serializer.serialize_none(),
    }
}

impl KeyInfo {
    /// Whether the key is valid at this time.
    pub fn is_live(&self, now: Time) -> bool {
        self.revoked_at.is_none() && self.expires_at.is_none_or(|end| now < end)
    }
}

/// A new key. Its text is shown once and not stored.
#[derive(Clone, Debug)]
pub struct CreatedKey {
    /// The key as text.
    pub key: String,
    /// Its stored properties.
    pub info: KeyInfo,
}

/// Creates a key.
pub async fn create(house: &House, secret: &Secret, new: NewKey) -> Result<CreatedKey, SystemRowError> {
    if own::is_own(&new.tenant) {
        return Err(SystemRowError::OwnTenant(new.tenant.to_string()));
    }
    let (prefix, hidden) = (hex(&secret_bytes::<8>()?), hex(&secret_bytes::<32>()?));
    let now = house.clock().now();
    let info = KeyInfo {
        tenant: new.tenant.to_string(),
        name: new.name,
        scopes: scopes_text(&new.scopes),
        created_at: now,
        expires_at: new.expires_in.map(|span| now.plus(span)),
        revoked_at: None,
        prefix,
    };
    let optional = |time: Option<Time>| time.map_or(Value::Null, Value::from);
    let digest = digest(&secret.seal(PURPOSE), &info.prefix, &hidden);
    let insert = Step::insert(&own::keys()?, [info.prefix.as_str().into()])
        .set("owner", info.tenant.as_str())
        .set("name", info.name.as_str())
        .set("scopes", info.scopes.as_str())
        .set("digest", Value::Bytes(digest.to_vec()))
        .set("created_at", now)
        .set("expires_at", optional(info.expires_at));
    match commit(house, insert).await? {
        Commit::Applied(_) => {}
        // The prefix is random: a row with this digest was inserted by an earlier attempt of this call.
        Commit::Refused(refused)
            if refused.current.as_ref().and_then(|row| row.bytes("digest")) == Some(&digest[..]) => {}
        other => return Err(SystemRowError::NotStored(format!("the key was not stored: {other:?}"))),
    }
    let key = format!("{MARK}{}_{hidden}{}", info.prefix, checksum(&info.prefix, &hidden));
    Ok(CreatedKey { key, info })
}

/// Creates a successor with the same tenant, name and scopes, and lets the old key expire after an overlap.
pub async fn rotate(
    house: &House,
    secret: &Secret,
    prefix: &str,
    overlap: Duration,
    expires_in: Option<Duration>,
) -> Result<CreatedKey, SystemRowError> {
    let old = find(house, prefix).await?;
    let tenant = Tenant::new(&old.tenant)?;
    let scopes = read_scopes(&old.scopes);
    let created = create(house, secret, NewKey { tenant, name: old.name, scopes, expires_in }).await?;
    let end = house.clock().now().plus(overlap);
    if old.expires_at.is_none_or(|earlier| end < earlier) {
        change(house, prefix, "expires_at", end).await?;
    }
    Ok(created)
}

/// All keys, or those of one tenant, by time of creation.
pub async fn list(house: &House, tenant: Option<&Tenant>) -> Result<Vec<KeyInfo>, SystemRowError> {
    let mut keys = Vec::new();
    let mut scan = Scan::of(&own::keys()?, &system_tenant()?);
    loop {
        let page = house.store().scan(&scan).await?;
        keys.extend(page.rows.iter().filter_map(info_of));
        let Some(next) = page.next else { break };
        scan = scan.after(next)?;
    }
    keys.retain(|key| tenant.is_none_or(|tenant| key.tenant == tenant.as_str()));
    keys.sort_by(|a, b| (a.created_at, &a.prefix).cmp(&(b.created_at, &b.prefix)));
    Ok(keys)
}

/// Revokes a key permanently. Revoking a revoked key has no effect.
pub async fn revoke(house: &House, prefix: &str) -> Result<KeyInfo, SystemRowError> {
    if find(house, prefix).await?.revoked_at.is_none() {
        change(house, prefix, "revoked_at", house.clock().now()).await?;
    }
    find(house, prefix).await
}

async fn find(house: &House, prefix: &str) -> Result<KeyInfo, SystemRowError> {
    let row = row_of(house, prefix).await?;
    row.as_ref().and_then(info_of).ok_or_else(|| SystemRowError::NoKey(prefix.to_owned()))
}

async fn row_of(house: &House, prefix: &str) -> Result<Option<Row>, SystemRowError> {
    let address = Address::new(&own::keys()?, &system_tenant()?, [prefix.into()])?;
    let rows = house.store().get(&[address], Consistency::Strong).await?;
    Ok(rows.into_iter().next().flatten())
}

async fn change(house: &House, prefix: &str, column: &str, time: Time) -> Result<(), SystemRowError> {
    let step = Step::update(&own::keys()?, [prefix.into()]).guard(is_null("revoked_at")).set(column, time);
    match commit(house, step).await? {
        // Refused: the key was revoked concurrently, or an earlier attempt was applied.
        Commit::Applied(_) | Commit::Refused(_) => Ok(()),
        Commit::Fenced => Err(SystemRowError::NotStored("the change of a key was fenced".into())),
    }
}

/// Commits a step that is safe to retry, until its outcome is known.
async fn commit(house: &House, step: Step) -> Result<Commit, SystemRowError> {
    let plan = Plan::of(&system_tenant()?, house.ids().next()).step(step).build()?;
    Ok(commit_known(&**house.store(), &plan, RetryPolicy::WORKER).await?)
}

fn info_of(row: &Row) -> Option<KeyInfo> {
    let text = |column: &str| row.text(column).map(str::to_owned);
    Some(KeyInfo {
        prefix: text("prefix")?,
        tenant: text("owner")?,
        name: text("name")?,
        scopes: text("scopes")?,
        created_at: row.time("created_at")?,
        expires_at: row.time("expires_at"),
        revoked_at: row.time("revoked_at"),
    })
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

fn checksum(prefix: &str, hidden: &str) -> String {
    fingerprint(&[b"statehouse key", prefix.as_bytes(), hidden.as_bytes()])
        .chars()
        .take(CHECKSUM_DIGITS)
        .collect()
}

fn digest(seal: &CursorSeal, prefix: &str, hidden: &str) -> [u8; 32] {
    seal.digest(&[prefix.as_bytes(), hidden.as_bytes()])
}

/// Prefix and secret of a key with a valid checksum.
fn parse(key: &str) -> Option<(&str, &str)> {
    let (prefix, rest) = key.strip_prefix(MARK)?.split_once('_')?;
    let hexadecimal = |text: &str| text.bytes().all(|byte| matches!(byte, b'0'..=b'9' | b'a'..=b'f'));
    let fits = prefix.len() == PREFIX_DIGITS && rest.len() == SECRET_DIGITS + CHECKSUM_DIGITS;
    if !fits || !hexadecimal(prefix) || !hexadecimal(rest) {
        return None;
    }
    let (hidden, given) = rest.split_at_checked(SECRET_DIGITS)?;
    (checksum(prefix, hidden) == given).then_some((prefix, hidden))
}

/// Verifies keys of a house and caches the result for a short time, so that not every request reads the store.
pub struct KeyCache {
    house: Arc<House>,
    seal: CursorSeal,
    ttl: Duration,
    /// By the digest of the key, never by the key itself.
    entries: Mutex<HashMap<[u8; 32], (KeyInfo, Time)>>,
}

impl KeyCache {
    /// A cache over the keys of a house.
    pub fn of(house: Arc<House>, secret: &Secret, ttl: Duration) -> KeyCache {
        KeyCache { house, seal: secret.seal(PURPOSE), ttl, entries: Mutex::default() }
    }

    /// The caller of a valid key; `None` if the key is not valid.
    pub async fn caller(&self, key: &str) -> Result<Option<Caller>, Problem> {
        let Some((prefix, hidden)) = parse(key) else { return Ok(None) };
        let digest = digest(&self.seal, prefix, hidden);
        let now = self.house.clock().now();
        let info = match self.cached(&digest, now) {
            Some(info) => info,
            None => {
                let row = row_of(&self.house, prefix).await;
                let row = row.map_err(|error| Problem::hidden(UNAVAILABLE, error.to_string()))?;
                let Some(row) = row else { return Ok(None) };
                let stored = row.bytes("digest").unwrap_or_default();
                let Some(info) = info_of(&row).filter(|_| bool::from(stored.ct_eq(&digest))) else {
                    return Ok(None);
                };
                self.insert(digest, info.clone(), now);
                info
            }
        };
        if !info.is_live(now) {
            return Ok(None);
        }
        let tenant = Tenant::new(&info.tenant).ok();
        Ok(tenant.map(|tenant| Caller { tenant, scopes: read_scopes(&info.scopes) }))
    }

    fn cached(&self, digest: &[u8; 32], now: Time) -> Option<KeyInfo> {
        let entries = self.entries.lock().unwrap_or_else(PoisonError::into_inner);
        let (info, seen) = entries.get(digest)?;
        (now.since(*seen) < self.ttl && now >= *seen).then(|| info.clone())
    }

    fn insert(&self, digest: [u8; 32], info: KeyInfo, now: Time) {
        let mut entries = self.entries.lock().unwrap_or_else(PoisonError::into_inner);
        if entries.len() >= ENTRIES_MAX {
            entries.clear();
        }
        entries.insert(digest, (info, now));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn mistyped_keys_are_known_without_a_look_at_the_store() {
        let (prefix, hidden) = ("0123456789abcdef", "ab".repeat(32));
        let key = format!("{MARK}{prefix}_{hidden}{}", checksum(prefix, &hidden));
        assert_eq!(parse(&key), Some((prefix, hidden.as_str())));
        for place in [4, 20, 30, key.len() - 1] {
            let mut typo: Vec<u8> = key.bytes().collect();
            typo[place] = if typo[place] == b'0' { b'1' } else { b'0' };
            assert_eq!(parse(std::str::from_utf8(&typo).unwrap()), None, "{place}");
        }
        for text in ["", "sth_", "sth__", &key[..key.len() - 1], &key.to_uppercase(), &format!("{key}0")] {
            assert_eq!(parse(text), None, "{text}");
        }
    }
}
