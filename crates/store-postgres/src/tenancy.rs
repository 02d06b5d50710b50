//! Tenants kept apart by the database too: forced row-level security under a role that owns nothing.
//!
//! Every statement names its tenant anyway. This is the second fence, for the day when a statement is wrong: a
//! transaction says for whom it works (`set local statehouse.tenants`), and the policy on every table hides and
//! refuses everything else. A batch that serves several tenants lists them; workers that walk over all tenants say
//! `*`. A transaction that says nothing sees nothing.
//!
//! Owners, superusers and roles with BYPASSRLS pass through row-level security. So it is *forced*, which binds
//! the owner, and the work is done under a role that neither owns the tables nor bypasses: the one that
//! connects, or, where an administrator connects, the one named as `role`. Writers' sessions have that role from
//! their start, if the server lets them ([`crate::connection`]); all others take it on by `set local role` within each
//! transaction. Whom a transaction works for rides in the words that open it or in its one statement, and is gone with it.

use std::collections::BTreeSet;

use statehouse_store::{Plan, Tenant};

use crate::ddl::Names;
use crate::sql::{name, quoted};

/// The policy's name on every table.
pub(crate) const POLICY: &str = "statehouse_tenants";

/// For whom a transaction works.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum TransactionScope {
    /// For these tenants.
    Of(BTreeSet<Tenant>),
    /// For any tenant: workers and tools.
    All,
}

impl TransactionScope {
    pub(crate) fn of(tenant: &Tenant) -> TransactionScope {
        TransactionScope::Of(BTreeSet::from([tenant.clone()]))
    }

    pub(crate) fn of_all<'p>(plans: impl IntoIterator<Item = &'p Plan>) -> TransactionScope {
        TransactionScope::Of(plans.into_iter().map(|plan| plan.tenant().clone()).collect())
    }

    /// For whom two transactions work, as one.
    pub(crate) fn and(self, other: TransactionScope) -> TransactionScope {
        match (self, other) {
            (TransactionScope::Of(mut tenants), TransactionScope::Of(others)) => {
                tenants.extend(others);
                TransactionScope::Of(tenants)
            }
            _ => TransactionScope::All,
        }
    }

    /// What the setting is set to. Tenants' names hold no quotes and no commas.
    pub(crate) fn names(&self) -> String {
        match self {
            TransactionScope::All => "*".to_owned(),
            TransactionScope::Of(tenants) => tenants.iter().map(Tenant::as_str).collect::<Vec<_>>().join(","),
        }
    }

    /// The words that restrict a transaction.
    pub(crate) fn sql(&self, role: Option<&str>) -> String {
        let role = role.map(|role| format!("; set local role {}", name(role))).unwrap_or_default();
        format!("{role}; set local statehouse.tenants = {}", quoted(&self.names()))
    }
}

/// The condition of the policy. The settings are read in subqueries so that they are read once a statement and
/// not once a row.
const CONDITION: &str = "(select current_setting('statehouse.tenants', true)) = '*' \
                         or tenant = any ((select string_to_array(current_setting('statehouse.tenants', true), \
                         ','))::text[])";

/// What puts a table under row-level security.
pub(crate) fn protect(full_name: &str) -> Vec<String> {
    vec![
        format!("alter table {full_name} enable row level security"),
        format!("alter table {full_name} force row level security"),
        format!("create policy {POLICY} on {full_name} using ({CONDITION}) with check ({CONDITION})"),
    ]
}

/// What lets the runtime role work with a declared table.
pub(crate) fn grant_on_table(full_name: &str, role: &str) -> String {
    format!("grant select, insert, update, delete on {full_name} to {}", name(role))
}

/// What lets the runtime role work with Statehouse's own tables. It cannot change what the tables are.
pub(crate) fn grant_on_system_tables(names: &Names, role: &str) -> Vec<String> {
    let role = name(role);
    vec![
        format!("grant usage on schema {} to {role}", name(names.schema())),
        format!("grant select on {}, {} to {role}", names.meta(), names.tables()),
        format!("grant select, update on {} to {role}", names.heads()),
        format!("grant select, insert, delete on {} to {role}", names.log()),
        // An erasure blanks events; nothing else of a record changes.
        format!("grant update (events) on {} to {role}", names.log()),
    ]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_transaction_says_for_whom_it_works() {
        let tenants = ["b", "a"].map(|name| Tenant::new(name).unwrap());
        let scope = TransactionScope::Of(tenants.into_iter().collect());
        assert_eq!(scope.sql(None), "; set local statehouse.tenants = 'a,b'");
        assert_eq!(
            TransactionScope::All.sql(Some("app")),
            "; set local role app; set local statehouse.tenants = '*'"
        );
    }
}
