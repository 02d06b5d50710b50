//! API keys: `sth_<prefix>_<secret><checksum>`, all in hexadecimal.
//!
//! - The **prefix** (64 bits) names the key in lists and in the table; it is no secret.
//! - The **secret** (256 bits) comes from the operating system's entropy. Only a keyed digest of it is stored, and it is
//!   compared in constant time. A secret of that size needs no slow hash.
//! - The **checksum** (32 bits) tells a mistyped or cut-off key from a wrong one without a look at the store, and lets a
//!   scanner of leaked secrets be sure.
//!
//! A key has a tenant, scopes, perhaps an end. Rotation is two live keys: [`rotate`] makes a successor and gives the
//! old one an end, so that callers can change over in between. A revoked key is refused by every server within the time
//! for which credentials are trusted (a few seconds).

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

use super::secret::{OwnError, Secret, own_tenant};
use super::{Caller, Scope, read_scopes, scopes_text};
use crate::problem::{Problem, UNAVAILABLE};
use crate::seal::{Seal, fingerprint};

/// How every key begins.
pub const MARK: &str = "sth_";
const PREFIX_DIGITS: usize = 16;
const SECRET_DIGITS: usize = 64;
const CHECKSUM_DIGITS: usize = 8;
/// How many credentials are remembered between looks at the store.
const REMEMBERED_MAX: usize = 10_000;
/// What keys are sealed for.
const PURPOSE: &str = "api keys";

/// What a key is to allow.
#[derive(Clone, Debug)]
pub struct NewKey {
    /// On whose behalf it lets in.
    pub tenant: Tenant,
    /// What it is for, in the operator's words.
    pub name: String,
    /// To do what.
    pub scopes: Vec<Scope>,
    /// When it ends, counted from now.
    pub expires_in: Option<Duration>,
}

/// A key as it is known to the house: everything but the secret.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct KeyInfo {
    /// What names it.
    pub prefix: String,
    /// On whose behalf it lets in.
    pub tenant: String,
    /// What it is for.
    pub name: String,
    /// To do what.
    pub scopes: String,
    /// When it was made.
    #[serde(serialize_with = "as_text")]
    pub created_at: Time,
    /// When it ends.
    #[serde(serialize_with = "as_optional_text")]
    pub expires_at: Option<Time>,
    /// When it was revoked.
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
    /// Whether it lets anybody in at this time.
    pub fn is_live(&self, now: Time) -> bool {
        self.revoked_at.is_none() && self.expires_at.is_none_or(|end| now < end)
    }
}

/// A key that was just made. The text is shown once and stored nowhere.
#[derive(Clone, Debug)]
pub struct Created {
    /// The key itself.
    pub key: String,
    /// What is known about it from now on.
    pub info: KeyInfo,
}

/// Makes a key.
pub async fn create(house: &House, secret: &Secret, new: NewKey) -> Result<Created, OwnError> {
    if own::is_own(&new.tenant) {
        return Err(OwnError::OwnTenant(new.tenant.to_string()));
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
        // The prefix is random and unknown to anybody else: whoever is there was inserted by an earlier try of this.
        Commit::Refused(refused)
            if refused.current.as_ref().and_then(|row| row.bytes("digest")) == Some(&digest[..]) => {}
        other => return Err(OwnError::Undone(format!("the key was not stored: {other:?}"))),
    }
    let key = format!("{MARK}{}_{hidden}{}", info.prefix, checksum(&info.prefix, &hidden));
    Ok(Created { key, info })
}

/// Makes a successor of a key, with the same tenant, name and scopes, and ends the old one after a time in which both
/// are live.
pub async fn rotate(
    house: &House,
    secret: &Secret,
    prefix: &str,
    overlap: Duration,
    expires_in: Option<Duration>,
) -> Result<Created, OwnError> {
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

/// All keys, or those of one tenant, in the order of their making.
pub async fn list(house: &House, tenant: Option<&Tenant>) -> Result<Vec<KeyInfo>, OwnError> {
    let mut keys = Vec::new();
    let mut scan = Scan::of(&own::keys()?, &own_tenant()?);
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

/// Revokes a key, for good. A key that was revoked before stays so.
pub async fn revoke(house: &House, prefix: &str) -> Result<KeyInfo, OwnError> {
    if find(house, prefix).await?.revoked_at.is_none() {
        change(house, prefix, "revoked_at", house.clock().now()).await?;
    }
    find(house, prefix).await
}

async fn find(house: &House, prefix: &str) -> Result<KeyInfo, OwnError> {
    let row = row_of(house, prefix).await?;
    row.as_ref().and_then(info_of).ok_or_else(|| OwnError::NoKey(prefix.to_owned()))
}

async fn row_of(house: &House, prefix: &str) -> Result<Option<Row>, OwnError> {
    let address = Address::new(&own::keys()?, &own_tenant()?, [prefix.into()])?;
    let rows = house.store().get(&[address], Consistency::Strong).await?;
    Ok(rows.into_iter().next().flatten())
}

async fn change(house: &House, prefix: &str, column: &str, time: Time) -> Result<(), OwnError> {
    let step = Step::update(&own::keys()?, [prefix.into()]).guard(is_null("revoked_at")).set(column, time);
    match commit(house, step).await? {
        // Refused: it was revoked meanwhile, or an earlier try of this has done it.
        Commit::Applied(_) | Commit::Refused(_) => Ok(()),
        Commit::Fenced => Err(OwnError::Undone("the change of a key was fenced".into())),
    }
}

/// Commits a step that is safe to repeat, again if its outcome is not known.
async fn commit(house: &House, step: Step) -> Result<Commit, OwnError> {
    let plan = Plan::of(&own_tenant()?, house.ids().next()).step(step).build()?;
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

fn digest(seal: &Seal, prefix: &str, hidden: &str) -> [u8; 32] {
    seal.digest(&[prefix.as_bytes(), hidden.as_bytes()])
}

/// Prefix and secret of a key whose checksum is right.
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

/// The keys of a house, as the door knows them. A key that let somebody in is trusted for a moment, so that not every
/// request has to ask the store.
pub struct Known {
    house: Arc<House>,
    seal: Seal,
    trusted_for: Duration,
    /// By the digest of the key: never the key itself.
    remembered: Mutex<HashMap<[u8; 32], (KeyInfo, Time)>>,
}

impl Known {
    /// The keys of a house.
    pub fn of(house: Arc<House>, secret: &Secret, trusted_for: Duration) -> Known {
        Known { house, seal: secret.seal(PURPOSE), trusted_for, remembered: Mutex::default() }
    }

    /// Whom a key lets in; `None` if it does not.
    pub async fn caller(&self, key: &str) -> Result<Option<Caller>, Problem> {
        let Some((prefix, hidden)) = parse(key) else { return Ok(None) };
        let digest = digest(&self.seal, prefix, hidden);
        let now = self.house.clock().now();
        let info = match self.recall(&digest, now) {
            Some(info) => info,
            None => {
                let row = row_of(&self.house, prefix).await;
                let row = row.map_err(|error| Problem::hidden(UNAVAILABLE, error.to_string()))?;
                let Some(row) = row else { return Ok(None) };
                let stored = row.bytes("digest").unwrap_or_default();
                let Some(info) = info_of(&row).filter(|_| bool::from(stored.ct_eq(&digest))) else {
                    return Ok(None);
                };
                self.remember(digest, info.clone(), now);
                info
            }
        };
        if !info.is_live(now) {
            return Ok(None);
        }
        let tenant = Tenant::new(&info.tenant).ok();
        Ok(tenant.map(|tenant| Caller { tenant, scopes: read_scopes(&info.scopes) }))
    }

    fn recall(&self, digest: &[u8; 32], now: Time) -> Option<KeyInfo> {
        let remembered = self.remembered.lock().unwrap_or_else(PoisonError::into_inner);
        let (info, seen) = remembered.get(digest)?;
        (now.since(*seen) < self.trusted_for && now >= *seen).then(|| info.clone())
    }

    fn remember(&self, digest: [u8; 32], info: KeyInfo, now: Time) {
        let mut remembered = self.remembered.lock().unwrap_or_else(PoisonError::into_inner);
        if remembered.len() >= REMEMBERED_MAX {
            remembered.clear();
        }
        remembered.insert(digest, (info, now));
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
