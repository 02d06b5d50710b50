//! Rules for end users: what callers with claims may do, row by row.
//!
//! ```toml
//! [entity.note.allow]
//! create = "row.owner = claims.sub"
//! read   = "row.owner = claims.sub or row.public = true"
//! update = "row.owner = claims.sub"
//! list   = { if = "row.owner = claims.sub", filter = true }
//! "*"    = "claims.role = 'staff'"
//! ```
//!
//! A caller has claims if its credential is a token without the scope `admin` ([`Principal`]). Callers without claims (API
//! keys, open mode, the command line, workers) are governed by scopes only.
//!
//! - A1. *Deny by default.* If a declaration has rules, callers with claims may do only what a rule allows. If any declaration
//!   has rules, resources that are derived from others (views, feeds, groups of the log) need rules of their own.
//! - A2. *Writes.* The rule is a guard of the step on the row, so it holds for the row that is written, whatever other callers
//!   do meanwhile. It must also hold for the row as the write leaves it: a caller cannot give a row away or take one. A new row
//!   is judged before the plan is committed.
//! - A3. *Visibility.* A row for which the rule `read` does not hold is answered like a row that does not exist, by every
//!   action that names it. The guard of A2 demands `read` as well.
//! - A4. *Reads* are judged on the answer itself, so on what the caller would see. Rows of a list are left out one by one.
//!   Unless `filter = true` permits that, the filters that the call gives must fulfil the rule, so that no page is short.
//! - A5. *Events* are judged by `read`, each before it is sent.
//!
//! [`declare`] reads the rules, [`judge`] applies them; the house calls it.

pub(crate) mod declare;
pub(crate) mod judge;

use std::sync::Arc;

use serde_json::{Map, Value as Json};
use statehouse_store::Tenant;

use crate::declare::rule::CheckedRule;

/// The claims of a token.
pub type Claims = Map<String, Json>;

/// On whose behalf a call is made.
#[derive(Clone, Debug, PartialEq)]
pub struct Principal {
    /// The tenant.
    pub tenant: Tenant,
    /// The claims of an end user, whom rules govern. `None` for an operator.
    pub claims: Option<Arc<Claims>>,
    /// Who it is, as the log says of each write ([`crate::audit::AuditActor::credential`]).
    pub actor: Option<Arc<str>>,
}

impl From<&Tenant> for Principal {
    fn from(tenant: &Tenant) -> Principal {
        Principal { tenant: tenant.clone(), claims: None, actor: None }
    }
}

impl From<&Principal> for Principal {
    fn from(principal: &Principal) -> Principal {
        principal.clone()
    }
}

/// The rules of a resource.
#[derive(Clone, Debug, Default)]
pub struct AllowRules {
    /// By the name of the action.
    actions: Vec<(String, ActionRule)>,
    /// Which rows a caller may know of, by the columns of their table.
    visible: Option<CheckedRule>,
}

/// The rule of an action.
#[derive(Clone, Debug)]
pub struct ActionRule {
    /// The condition.
    pub rule: CheckedRule,
    /// Of a list: whether rows for which it does not hold are left out, so that pages may be short.
    pub filter: bool,
}

impl AllowRules {
    /// The rule of an action; without one it is not allowed.
    pub fn action(&self, name: &str) -> Option<&ActionRule> {
        self.actions.iter().find(|(action, _)| action == name).map(|(_, rule)| rule)
    }

    /// Which rows a caller may know of; without a rule, none.
    pub fn visible(&self) -> Option<&CheckedRule> {
        self.visible.as_ref()
    }
}
