//! Reading audit rows by time.

use serde::{Serialize, Serializer};
use statehouse_store::{Cursor, Query, Row, Store, StoreError, Time};

use super::{PART, misuse, table, tenant};

/// Which rows are wanted.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct AuditFilter {
    /// Not before this time.
    pub from: Option<Time>,
    /// Before this time.
    pub to: Option<Time>,
    /// Only this action, or those of a group that ends in a dot: `key.`.
    pub action: Option<String>,
    /// Only what concerns this tenant.
    pub tenant: Option<String>,
    /// The oldest first.
    pub oldest_first: bool,
}

impl AuditFilter {
    fn admits(&self, row: &AuditRow) -> bool {
        let is_action = |wanted: &String| match wanted.ends_with('.') {
            true => row.action.starts_with(wanted.as_str()),
            false => row.action == *wanted,
        };
        self.action.as_ref().is_none_or(is_action)
            && self.tenant.as_ref().is_none_or(|wanted| row.tenant.as_ref() == Some(wanted))
    }
}

/// An audit row.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct AuditRow {
    /// When it happened, by the clock of the process that recorded it.
    #[serde(serialize_with = "as_text")]
    pub at: Time,
    /// The row's id.
    pub id: String,
    /// Who: the name of a key, the subject of a token, the user of a command.
    pub actor: Option<String>,
    /// With which credential: its kind and id.
    pub credential: String,
    /// From which address.
    pub peer: Option<String>,
    /// What was done.
    pub action: String,
    /// To what.
    pub target: Option<String>,
    /// The tenant that it concerns.
    pub tenant: Option<String>,
    /// What became of it.
    pub outcome: String,
    /// How often it happened.
    pub count: i64,
    /// More about it.
    pub detail: Option<String>,
}

fn as_text<S: Serializer>(time: &Time, serializer: S) -> Result<S::Ok, S::Error> {
    serializer.collect_str(time)
}

impl AuditRow {
    fn of(row: &Row) -> Result<AuditRow, StoreError> {
        let text = |column: &str| row.get_text(column).map(str::to_owned);
        let optional = |column: &str| row.get_optional_text(column).map(|text| text.map(str::to_owned));
        Ok(AuditRow {
            at: row.get_time("at")?,
            id: text("id")?,
            actor: optional("actor")?,
            credential: text("credential")?,
            peer: optional("peer")?,
            action: text("action")?,
            target: optional("target")?,
            tenant: optional("of_tenant")?,
            outcome: text("outcome")?,
            count: row.get_int("count")?,
            detail: optional("detail")?,
        })
    }
}

/// A page of rows.
#[derive(Clone, Debug, PartialEq)]
pub struct AuditPage {
    /// The rows. Fewer than the limit, even none, where the filter leaves rows out.
    pub rows: Vec<AuditRow>,
    /// Where the next page begins.
    pub next: Option<Cursor>,
}

/// A page of audit rows. It reads at most `limit` rows and leaves out what the filter does not admit.
pub async fn list(
    store: &dyn Store,
    filter: &AuditFilter,
    limit: usize,
    after: Option<Cursor>,
) -> Result<AuditPage, StoreError> {
    let mut query = Query::table(&table().map_err(misuse)?, &tenant()?, [PART.into()]).map_err(misuse)?;
    if let Some(from) = filter.from {
        query = query.from(from).map_err(misuse)?;
    }
    if let Some(to) = filter.to {
        query = query.below(to).map_err(misuse)?;
    }
    if !filter.oldest_first {
        query = query.backward();
    }
    if let Some(after) = after {
        query = query.after(after).map_err(misuse)?;
    }
    let page = store.query(&query.limit(limit).map_err(misuse)?).await?;
    let rows: Vec<AuditRow> = page.rows.iter().map(AuditRow::of).collect::<Result<_, _>>()?;
    Ok(AuditPage { rows: rows.into_iter().filter(|row| filter.admits(row)).collect(), next: page.next })
}
