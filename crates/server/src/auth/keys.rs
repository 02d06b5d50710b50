//! API keys: `sth_<prefix>_<secret><checksum>`, all in hexadecimal.
//!
//! - The **prefix** (64 bits) identifies the key in lists and in the table; it is not secret.
//! - The **secret** (256 bits) comes from the operating system's random source. The store contains only a keyed digest,
//!   which is compared in constant time. A secret of this size needs no slow hash.
//! - The **checksum** (32 bits) detects mistyped keys without a read, and lets secret scanners avoid false positives.
//!
//! A key has a tenant, scopes and optionally an expiry and a list of networks from which it may be used. Rotation keeps two live keys:
//! [`rotate`] creates a successor and sets the expiry of the old key, so that callers can switch in between. Each change is one plan
//! with its audit row. Every server rejects a revoked key as soon as
//! its cached entry expires (`credential_cache_ms`).

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use serde::Serialize;
use statehouse::audit::{self, AuditActor, AuditEntry};
use statehouse::{House, system};
use statehouse_store::guard::is_null;
use statehouse_store::random::secret_bytes;
use statehouse_store::{
    Address, Consistency, Guard, Refused, Row, Scan, Step, StoreError, Tenant, Time, Value,
};
use subtle::ConstantTimeEq;

use super::logins::RejectedLogin;
use super::networks::{AllowedNetworks, PeerAddress};
use super::secret::{HouseSecret, SystemRowError, is_plain_name, system_tenant};
use super::{Caller, Scope, read_scopes, scopes_text};
use crate::problem::{INTERNAL, Problem, UNAVAILABLE};
use crate::seal::{CursorSeal, fingerprint};

/// Start of every key.
pub const MARK: &str = "sth_";
const PREFIX_DIGITS: usize = 16;
const SECRET_DIGITS: usize = 64;
const CHECKSUM_DIGITS: usize = 8;
/// Maximum number of cached keys.
const ENTRIES_MAX: usize = 10_000;
/// Attempts to rotate a key that others change at the same time.
const TRIES: usize = 5;
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
    /// From where it may be used.
    pub networks: AllowedNetworks,
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
    /// From where it may be used; `None` if from everywhere.
    pub networks: Option<String>,
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

    /// Whether the key may be used from an address. A list that cannot be read allows none.
    pub fn allows(&self, peer: PeerAddress) -> bool {
        let Some(networks) = &self.networks else { return true };
        networks
            .parse::<AllowedNetworks>()
            .is_ok_and(|networks| !networks.is_empty() && networks.allow(peer.0))
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

/// A key that is not stored yet.
struct DraftKey {
    created: CreatedKey,
    insert: Step,
}

/// Makes a key and the step that stores it.
fn draft(house: &House, secret: &HouseSecret, new: NewKey) -> Result<DraftKey, SystemRowError> {
    if system::is_system(&new.tenant) {
        return Err(SystemRowError::OwnTenant(new.tenant.to_string()));
    }
    if !is_plain_name(&new.name) {
        return Err(SystemRowError::BadName);
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
        networks: (!new.networks.is_empty()).then(|| new.networks.to_string()),
        prefix,
    };
    let optional = |time: Option<Time>| time.map_or(Value::Null, Value::from);
    let digest = digest(&secret.seal(PURPOSE), &info.prefix, &hidden);
    let insert = Step::insert(&system::keys()?, [info.prefix.as_str().into()])
        .set("owner", info.tenant.as_str())
        .set("name", info.name.as_str())
        .set("scopes", info.scopes.as_str())
        .set("digest", Value::Bytes(digest.to_vec()))
        .set("created_at", now)
        .set("expires_at", optional(info.expires_at))
        .set("networks", info.networks.clone().map_or(Value::Null, Value::from));
    let key = format!("{MARK}{}_{hidden}{}", info.prefix, checksum(&info.prefix, &hidden));
    Ok(DraftKey { created: CreatedKey { key, info }, insert })
}

/// What the audit says of a key.
fn described(info: &KeyInfo) -> String {
    let networks = info.networks.as_deref().map_or(String::new(), |networks| format!(", from {networks}"));
    let end = info.expires_at.map_or(String::new(), |end| format!(", until {end}"));
    format!("name {:?}, scopes {}{networks}{end}", info.name, info.scopes)
}

/// Creates a key, in one plan with its audit row.
pub async fn create(
    house: &House,
    secret: &HouseSecret,
    new: NewKey,
    by: &AuditActor,
) -> Result<CreatedKey, SystemRowError> {
    let DraftKey { created, insert } = draft(house, secret, new)?;
    let info = &created.info;
    let entry = AuditEntry::of(by, "key.create", &info.prefix).tenant(&info.tenant).detail(described(info));
    match commit(house, &entry, [insert]).await? {
        None => Ok(created),
        Some(refused) => Err(SystemRowError::NotStored(format!("the key was not stored: {refused:?}"))),
    }
}

/// Creates a successor of a live key with the same tenant, name, scopes and networks, and lets the old key expire after an overlap,
/// in one plan with its audit row.
pub async fn rotate(
    house: &House,
    secret: &HouseSecret,
    prefix: &str,
    (overlap, expires_in): (Duration, Option<Duration>),
    by: &AuditActor,
) -> Result<CreatedKey, SystemRowError> {
    for _ in 0..TRIES {
        let row = row_of(house, prefix).await?.ok_or_else(|| SystemRowError::NoKey(prefix.to_owned()))?;
        let (old, now) = (info_of(&row)?, house.clock().now());
        if !old.is_live(now) {
            return Err(SystemRowError::NotLive(prefix.to_owned()));
        }
        let tenant = Tenant::new(&old.tenant)?;
        let scopes = read_scopes(&old.scopes);
        let networks = old.networks.as_deref().unwrap_or_default().parse().map_err(|_| unreadable(prefix))?;
        let new = NewKey { tenant, name: old.name, scopes, expires_in, networks };
        let DraftKey { created, insert } = draft(house, secret, new)?;
        let end = now.plus(overlap);
        let end = old.expires_at.map_or(end, |earlier| earlier.min(end));
        let replaced = Step::update(&system::keys()?, [prefix.into()])
            .guard(Guard::version(row.version()))
            .guard(is_null("revoked_at"))
            .set("expires_at", end);
        let info = &created.info;
        let entry = AuditEntry::of(by, "key.rotate", prefix).tenant(&info.tenant).detail(format!(
            "valid until {end}; the successor is {}, {}",
            info.prefix,
            described(info)
        ));
        if commit(house, &entry, [insert, replaced]).await?.is_none() {
            return Ok(created);
        }
    }
    Err(SystemRowError::NotStored(format!(
        "the key {prefix} is changed by others at the same time: try again"
    )))
}

/// All keys, or those of one tenant, by time of creation.
pub async fn list(house: &House, tenant: Option<&Tenant>) -> Result<Vec<KeyInfo>, SystemRowError> {
    let mut keys = Vec::new();
    let mut scan = Scan::of(&system::keys()?, &system_tenant()?);
    loop {
        let page = house.store().scan(&scan).await?;
        for row in &page.rows {
            keys.push(info_of(row)?);
        }
        let Some(next) = page.next else { break };
        scan = scan.after(next)?;
    }
    keys.retain(|key| tenant.is_none_or(|tenant| key.tenant == tenant.as_str()));
    keys.sort_by(|a, b| (a.created_at, &a.prefix).cmp(&(b.created_at, &b.prefix)));
    Ok(keys)
}

/// Revokes a key permanently, in one plan with its audit row. Revoking a revoked key has no effect.
pub async fn revoke(house: &House, prefix: &str, by: &AuditActor) -> Result<KeyInfo, SystemRowError> {
    let info = find(house, prefix).await?;
    if info.revoked_at.is_none() {
        let revoked = Step::update(&system::keys()?, [prefix.into()])
            .guard(is_null("revoked_at"))
            .set("revoked_at", house.clock().now());
        let entry = AuditEntry::of(by, "key.revoke", prefix).tenant(&info.tenant).detail(described(&info));
        // A refusal tells that the key was revoked concurrently, and that was recorded.
        commit(house, &entry, [revoked]).await?;
    }
    find(house, prefix).await
}

async fn find(house: &House, prefix: &str) -> Result<KeyInfo, SystemRowError> {
    let row = row_of(house, prefix).await?;
    Ok(info_of(&row.ok_or_else(|| SystemRowError::NoKey(prefix.to_owned()))?)?)
}

async fn row_of(house: &House, prefix: &str) -> Result<Option<Row>, SystemRowError> {
    let address = Address::new(&system::keys()?, &system_tenant()?, [prefix.into()])?;
    let rows = house.store().get(&[address], Consistency::Strong).await?;
    Ok(rows.into_iter().next().flatten())
}

/// Commits steps in one plan with their audit row. Returns what refused it, if it was not applied.
async fn commit(
    house: &House,
    entry: &AuditEntry,
    steps: impl IntoIterator<Item = Step>,
) -> Result<Option<Refused>, SystemRowError> {
    let plan = audit::begin(entry, house.clock().now(), &house.ids().next())?.steps(steps).build()?;
    Ok(audit::commit(&**house.store(), &plan).await?)
}

/// What a row says of its key. A row that is damaged is an error: a revocation that cannot be read must not count as none.
fn info_of(row: &Row) -> Result<KeyInfo, StoreError> {
    let text = |column: &str| row.get_text(column).map(str::to_owned);
    Ok(KeyInfo {
        prefix: text("prefix")?,
        tenant: text("owner")?,
        name: text("name")?,
        scopes: text("scopes")?,
        created_at: row.get_time("created_at")?,
        expires_at: row.get_optional_time("expires_at")?,
        revoked_at: row.get_optional_time("revoked_at")?,
        networks: row.get_optional_text("networks")?.map(str::to_owned),
    })
}

fn unreadable(prefix: &str) -> SystemRowError {
    SystemRowError::NotStored(format!("the networks of the key {prefix} cannot be read: create a new key"))
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
pub(crate) fn parse(key: &str) -> Option<(&str, &str)> {
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
    entries: Mutex<HashMap<[u8; 32], CachedKey>>,
}

/// A key that was verified.
#[derive(Clone)]
struct CachedKey {
    info: KeyInfo,
    /// Its holder, for log and audit.
    actor: Arc<AuditActor>,
    /// When it was read.
    seen: Time,
}

impl KeyCache {
    /// A cache over the keys of a house.
    pub fn of(house: Arc<House>, secret: &HouseSecret, ttl: Duration) -> KeyCache {
        KeyCache { house, seal: secret.seal(PURPOSE), ttl, entries: Mutex::default() }
    }

    /// The caller of a valid key that may be used from an address, or why the key is not valid there.
    pub async fn caller(
        &self,
        key: &str,
        peer: PeerAddress,
    ) -> Result<Result<Caller, RejectedLogin>, Problem> {
        let unproved = |prefix: &str, reason| Ok(Err(RejectedLogin::unproved("key", prefix, reason)));
        let Some((prefix, hidden)) = parse(key) else { return unproved("", "not a key") };
        let digest = digest(&self.seal, prefix, hidden);
        let now = self.house.clock().now();
        let known = match self.cached(&digest, now) {
            Some(known) => known,
            None => {
                let row = row_of(&self.house, prefix).await;
                let row = row.map_err(|error| Problem::hidden(UNAVAILABLE, error.to_string()))?;
                let Some(row) = row else { return unproved(prefix, "unknown key") };
                let damaged = |error: StoreError| Problem::hidden(INTERNAL, error.to_string());
                let stored = row.get_bytes("digest").map_err(damaged)?;
                if !bool::from(stored.ct_eq(&digest)) {
                    return unproved(prefix, "wrong secret");
                }
                let info = info_of(&row).map_err(damaged)?;
                let actor = Arc::new(AuditActor::key(&info.prefix, &info.name));
                let known = CachedKey { info, actor, seen: now };
                self.insert(digest, known.clone());
                known
            }
        };
        let CachedKey { info, actor, .. } = known;
        let rejected = |reason| {
            Ok(Err(RejectedLogin { actor: (*actor).clone(), tenant: Some(info.tenant.clone()), reason }))
        };
        if info.revoked_at.is_some() {
            return rejected("revoked");
        }
        if !info.is_live(now) {
            return rejected("expired");
        }
        if !info.allows(peer) {
            return rejected("not from this address");
        }
        let Ok(tenant) = Tenant::new(&info.tenant) else { return rejected("its tenant is no name") };
        let credential = Some(info.prefix.as_str().into());
        let scopes = read_scopes(&info.scopes);
        Ok(Ok(Caller { scopes, credential, actor, ..Caller::anonymous(tenant) }))
    }

    fn cached(&self, digest: &[u8; 32], now: Time) -> Option<CachedKey> {
        let entries = self.entries.lock().unwrap_or_else(PoisonError::into_inner);
        let known = entries.get(digest)?;
        (now.since(known.seen) < self.ttl && now >= known.seen).then(|| known.clone())
    }

    fn insert(&self, digest: [u8; 32], known: CachedKey) {
        let mut entries = self.entries.lock().unwrap_or_else(PoisonError::into_inner);
        if entries.len() >= ENTRIES_MAX {
            entries.clear();
        }
        entries.insert(digest, known);
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
        for index in [4, 20, 30, key.len() - 1] {
            let mut typo: Vec<u8> = key.bytes().collect();
            typo[index] = if typo[index] == b'0' { b'1' } else { b'0' };
            assert_eq!(parse(std::str::from_utf8(&typo).unwrap()), None, "{index}");
        }
        for text in ["", "sth_", "sth__", &key[..key.len() - 1], &key.to_uppercase(), &format!("{key}0")] {
            assert_eq!(parse(text), None, "{text}");
        }
    }
}
