//! Audit: who did what with which credential, for operators.
//!
//! A row of `house_audit` tells one thing: a key that was created, rotated or revoked, a secret that was set or forgotten, an
//! operation on a projection, a migration, a login, or logins that failed. The rows belong to the system tenant
//! ([`system::tenant`]), which no caller can be, and no action reads or writes them.
//!
//! - A1. *In the same plan.* What a plan changes is told by a step of that plan ([`begin`]): it is changed and recorded, or
//!   neither. Only migrations, which no plan can make, and logins are recorded by plans of their own.
//! - A2. *Once.* The row's id is the plan's operation id, and the insert is the plan's first step. A plan that is committed again
//!   after a lost answer is refused by that step, which tells that it was applied ([`commit`]).
//! - A3. *Own retention.* The rows do not go with the log. [`AuditSweeper`] deletes rows that are older than the setting
//!   `audit_retention` says.
//! - A4. *No secrets.* A row has the ids of credentials: prefixes of keys, subjects of tokens. Texts are cut at [`TEXT_BYTES_MAX`].
//!
//! All rows are in one partition, in the order of time, because they are read by time and are few: bounded rates of logins, and
//! what operators do.

mod list;
mod sweep;

use std::fmt;
use std::net::IpAddr;
use std::sync::Arc;

use statehouse_store::plan::PlanBuilder;
use statehouse_store::{
    Commit, Plan, Reason, Refused, RetryPolicy, SchemaError, Step, Store, StoreError, Table, Tenant, Time,
    Type, Value, commit_known,
};

use crate::system;

pub use list::{AuditFilter, AuditPage, AuditRow, list};
pub use sweep::AuditSweeper;

/// The table.
pub const AUDIT: &str = "house_audit";
/// The name of the only partition.
const PART: &str = "all";
/// Bytes of a text in a row.
pub const TEXT_BYTES_MAX: usize = 1_000;
/// Bytes of what names a credential or a person.
const NAME_BYTES_MAX: usize = 200;

/// What was done, as far as it is known.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AuditOutcome {
    /// It was done.
    Done,
    /// It was begun. A row with another outcome follows, unless the process ended.
    Begun,
    /// It was rejected.
    Rejected,
    /// It failed, and may have been done in part.
    Failed,
}

impl AuditOutcome {
    /// Its name in rows.
    pub fn name(self) -> &'static str {
        match self {
            AuditOutcome::Done => "done",
            AuditOutcome::Begun => "begun",
            AuditOutcome::Rejected => "rejected",
            AuditOutcome::Failed => "failed",
        }
    }
}

/// Who does something, with which credential, from where.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct AuditActor {
    name: String,
    credential: Arc<str>,
    peer: Option<String>,
}

impl AuditActor {
    fn new(kind: &str, id: &str, name: &str) -> AuditActor {
        let credential = if id.is_empty() { kind.to_owned() } else { format!("{kind}:{id}") };
        let name = if name.is_empty() { id } else { name };
        AuditActor {
            name: shortened(name, NAME_BYTES_MAX),
            credential: shortened(&credential, NAME_BYTES_MAX).into(),
            peer: None,
        }
    }

    /// The holder of an API key.
    pub fn key(prefix: &str, name: &str) -> AuditActor {
        AuditActor::new("key", prefix, name)
    }

    /// The holder of a token, by its subject.
    pub fn token(subject: &str) -> AuditActor {
        AuditActor::new("token", subject, "")
    }

    /// A local caller of a server without credentials.
    pub fn open() -> AuditActor {
        AuditActor::new("open", "", "")
    }

    /// A person at a command line who has the credentials of the store, by the name that the operating system gives.
    pub fn command(user: &str) -> AuditActor {
        AuditActor::new("command", user, "")
    }

    /// A program by itself: a server that starts, a worker.
    pub fn program(name: &str) -> AuditActor {
        AuditActor::new("program", name, "")
    }

    /// A caller whose credential was rejected. It names a credential that was claimed and not proved.
    pub fn unproved(kind: &str, id: &str) -> AuditActor {
        AuditActor { name: String::new(), ..AuditActor::new(kind, id, "") }
    }

    /// The same from this address.
    #[must_use]
    pub fn at(mut self, peer: Option<IpAddr>) -> AuditActor {
        self.peer = peer.map(|peer| peer.to_canonical().to_string());
        self
    }

    /// Its credential: `key:0123456789abcdef`, `token:SUBJECT`, `command:USER`, `program:NAME` or `open`. The log has it with each
    /// event.
    pub fn credential(&self) -> &Arc<str> {
        &self.credential
    }
}

/// What a row tells.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct AuditEntry {
    actor: AuditActor,
    action: String,
    target: String,
    tenant: String,
    outcome: AuditOutcome,
    count: i64,
    detail: String,
}

impl AuditEntry {
    /// Something that was done to a target: `key.revoke` to a prefix.
    pub fn of(actor: &AuditActor, action: &str, target: &str) -> AuditEntry {
        AuditEntry {
            actor: actor.clone(),
            action: action.to_owned(),
            target: target.to_owned(),
            tenant: String::new(),
            outcome: AuditOutcome::Done,
            count: 1,
            detail: String::new(),
        }
    }

    /// The tenant that it concerns.
    #[must_use]
    pub fn tenant(mut self, tenant: &str) -> AuditEntry {
        tenant.clone_into(&mut self.tenant);
        self
    }

    /// What became of it.
    #[must_use]
    pub fn outcome(mut self, outcome: AuditOutcome) -> AuditEntry {
        self.outcome = outcome;
        self
    }

    /// How often it happened.
    #[must_use]
    pub fn times(mut self, count: i64) -> AuditEntry {
        self.count = count;
        self
    }

    /// More about it, in words.
    #[must_use]
    pub fn detail(mut self, detail: impl Into<String>) -> AuditEntry {
        self.detail = detail.into();
        self
    }

    /// The insert of its row.
    pub fn step(&self, at: Time, id: &str) -> Result<Step, SchemaError> {
        let text = |text: &str| match text {
            "" => Value::Null,
            text => Value::from(shortened(text, TEXT_BYTES_MAX)),
        };
        let AuditActor { name, credential, peer } = &self.actor;
        Ok(Step::insert(&table()?, [PART.into(), at.into(), id.into()])
            .set("actor", text(name))
            .set("credential", &**credential)
            .set("peer", text(peer.as_deref().unwrap_or_default()))
            .set("action", self.action.as_str())
            .set("target", text(&self.target))
            .set("of_tenant", text(&self.tenant))
            .set("outcome", self.outcome.name())
            .set("count", self.count)
            .set("detail", text(&self.detail)))
    }
}

/// A text of at most so many bytes, without characters that cannot be stored or shown.
fn shortened(text: &str, bytes: usize) -> String {
    let mut text: String = text.chars().map(|c| if c.is_control() { ' ' } else { c }).collect();
    if text.len() > bytes {
        const CUT: &str = "…";
        let mut end = bytes.saturating_sub(CUT.len());
        while !text.is_char_boundary(end) {
            end -= 1;
        }
        text.truncate(end);
        text.push_str(CUT);
    }
    text
}

/// What operators and callers did, in the order of time.
pub fn table() -> Result<Arc<Table>, SchemaError> {
    Table::named(AUDIT)
        .partition("part", Type::Text)
        .sort("at", Type::Time)
        .sort("id", Type::Text)
        .optional("actor", Type::Text)
        .required("credential", Type::Text)
        .optional("peer", Type::Text)
        .required("action", Type::Text)
        .optional("target", Type::Text)
        .optional("of_tenant", Type::Text)
        .required("outcome", Type::Text)
        .required("count", Type::Int)
        .optional("detail", Type::Text)
        .build()
}

fn misuse(why: impl fmt::Display) -> StoreError {
    StoreError::schema(AUDIT, why.to_string())
}

/// The tenant of the rows.
fn tenant() -> Result<Tenant, StoreError> {
    system::tenant().ok_or_else(|| misuse("the house has no tenant of its own"))
}

/// A plan on rows of the house that begins with its audit row (A1, A2). The id is a new one, for this plan alone.
pub fn begin(entry: &AuditEntry, at: Time, id: &str) -> Result<PlanBuilder, StoreError> {
    let step = entry.step(at, id).map_err(misuse)?;
    Ok(Plan::of(&tenant()?, id).step(step).without_rows())
}

/// Commits a plan that [`begin`] began, until its outcome is known. Returns what refused it, if it was not applied (A2).
pub async fn commit(store: &dyn Store, plan: &Plan) -> Result<Option<Refused>, StoreError> {
    match commit_known(store, plan, RetryPolicy::WORKER).await? {
        Commit::Applied(_) => Ok(None),
        // The id of the row is this plan's alone: an earlier attempt was applied.
        Commit::Refused(Refused { step: 0, reason: Reason::Present, .. }) => Ok(None),
        Commit::Refused(refused) => Ok(Some(refused)),
        Commit::Fenced => Err(StoreError::unavailable("the plan was fenced; try again")),
    }
}

/// Records things that no plan of their own change (A1): migrations and logins.
pub async fn record(store: &dyn Store, entries: &[AuditEntry], at: Time, id: &str) -> Result<(), StoreError> {
    let numbered = entries.iter().enumerate();
    let steps = numbered.map(|(number, entry)| entry.step(at, &format!("{id}-{number}")));
    let steps: Vec<Step> = steps.collect::<Result<_, _>>().map_err(misuse)?;
    let plan = Plan::of(&tenant()?, id).steps(steps).without_rows().build().map_err(misuse)?;
    match commit(store, &plan).await? {
        None => Ok(()),
        Some(refused) => Err(misuse(refused.describe(&plan))),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn texts_are_bounded_and_plain() {
        let entry = AuditEntry::of(&AuditActor::token(&"ü".repeat(5_000)), "login", "a\u{0}b\nc")
            .detail("x".repeat(5_000));
        let step = entry.step(Time::from_micros(1), "id").unwrap();
        let plan = Plan::of(&tenant().unwrap(), "id").step(step).build().unwrap();
        let text = format!("{plan}");
        assert!(text.contains("a b c") && text.len() < 3_000, "{text}");
        assert!(entry.actor.credential().len() <= NAME_BYTES_MAX);
        assert_eq!(shortened("häuser", 5), "h…");
        assert_eq!(shortened("häuser", 6), "hä…");
    }

    #[test]
    fn actors_name_their_credential() {
        for (actor, credential, name) in [
            (AuditActor::key("0123", "billing"), "key:0123", "billing"),
            (AuditActor::key("0123", ""), "key:0123", "0123"),
            (AuditActor::token("ann"), "token:ann", "ann"),
            (AuditActor::open(), "open", ""),
            (AuditActor::unproved("key", "0123"), "key:0123", ""),
        ] {
            assert_eq!((&**actor.credential(), actor.name.as_str()), (credential, name));
        }
        let mapped = AuditActor::open().at(Some("::ffff:10.0.0.1".parse().unwrap()));
        assert_eq!(mapped.peer.as_deref(), Some("10.0.0.1"));
    }
}
