//! Indexes on tables that have rows, built beside the writers of the tables.
//!
//! `create index` holds back the writers of its table for as long as it takes. `create index concurrently` does not, and it cannot
//! be part of a transaction. So a migration makes everything else first, and records the tables without such indexes. Then it builds
//! each of them on a second session, while the first one holds the lock of migrations, and records it.
//!
//! A process that is killed meanwhile leaves the tables recorded without the index, and perhaps an index that PostgreSQL calls
//! invalid. The next migration drops that one and builds the index again.

use std::sync::Arc;

use statehouse_store::migration::{Difference, SchemaChange, with_index};
use statehouse_store::{Index, StoreError, Table};

use crate::MIGRATION_PATIENCE;
use crate::connection::{DatabaseCall, Session};
use crate::ddl::{Names, index_name};
use crate::fault::PostgresFault;
use crate::migrate::{SchemaMigrator, denied, is_true};
use crate::sql::Arg;

/// An index that is built when everything else of a migration is done.
#[derive(Clone, Debug)]
pub(crate) struct LaterIndex {
    pub table: Arc<Table>,
    pub index: Index,
}

impl LaterIndex {
    pub(crate) fn is(&self, table: &str, index: &str) -> bool {
        self.table.name() == table && self.index.name == index
    }

    /// Whether this change adds it.
    pub(crate) fn is_added_by(&self, change: &SchemaChange) -> bool {
        matches!(&change.difference, Difference::AddIndex(index) if self.is(change.table.name(), &index.name))
    }

    /// What builds it.
    pub(crate) fn statement(&self, names: &Names) -> String {
        let statement = names.create_index(&self.table, &self.index, true);
        statement.replacen("create index", "create index concurrently", 1)
    }
}

/// What PostgreSQL has under the name of an index.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum IndexState {
    Missing,
    Valid,
    /// A concurrent build has not ended.
    Invalid,
}

impl IndexState {
    pub(crate) async fn of(session: &Session, names: &Names, index: &str) -> Result<IndexState, StoreError> {
        let text = "select x.indisvalid from pg_catalog.pg_index x join pg_catalog.pg_class c on c.oid = x.indexrelid \
                    join pg_catalog.pg_namespace n on n.oid = c.relnamespace \
                    where n.nspname = $1::text and c.relname = $2::text";
        let call = DatabaseCall::new(text, vec![Arg::Text(names.schema()), Arg::Text(index)]);
        let rows = session.run(None, &[call], None).await.rows.map_err(denied)?;
        let rows = rows.into_iter().next().unwrap_or_default();
        Ok(match rows.is_empty() {
            true => IndexState::Missing,
            false if is_true(&rows)? => IndexState::Valid,
            false => IndexState::Invalid,
        })
    }
}

impl SchemaMigrator<'_> {
    /// Builds an index and records it. No other migration of this schema runs meanwhile. False if another one has built it already.
    pub(crate) async fn build(&self, later: &LaterIndex) -> Result<bool, StoreError> {
        self.begin().await?;
        let result = self.build_under_lock(later).await;
        self.end(result).await
    }

    async fn build_under_lock(&self, later: &LaterIndex) -> Result<bool, StoreError> {
        let live = self.live().await?;
        let recorded = live.table(later.table.name()).ok_or_else(|| {
            let why = "it was dropped before its index was built";
            StoreError::schema(format!("table {}", later.table.name()), why)
        })?;
        if recorded.index(&later.index.name).is_some() {
            return Ok(false);
        }
        // The build would wait for the snapshot of a statement that has not ended; one of the simple protocol ends it.
        self.execute("select").await?;
        self.build_on(&*self.connector.session_with(MIGRATION_PATIENCE).await?, later).await?;
        self.define(&*with_index(recorded, &later.index)?).await?;
        Ok(true)
    }

    async fn build_on(&self, session: &Session, later: &LaterIndex) -> Result<(), StoreError> {
        let name = index_name(later.table.name(), &later.index.name);
        let state = IndexState::of(session, self.names, &name).await?;
        if state == IndexState::Invalid {
            let statement = format!("drop index concurrently {}", self.names.table(&name));
            session.execute(&statement).await.map_err(|fault| failed(later, &fault))?;
        }
        if state != IndexState::Valid {
            session.execute(&later.statement(self.names)).await.map_err(|fault| failed(later, &fault))?;
        }
        Ok(())
    }
}

/// The error of a build that failed. Everything else of the migration is done.
fn failed(later: &LaterIndex, fault: &PostgresFault) -> StoreError {
    let place = format!("index {} of table {}", later.index.name, later.table.name());
    let why = format!(
        "it could not be built: {}; the other changes were made, so migrate again to build it",
        fault.said()
    );
    match fault {
        PostgresFault::Schema(_) | PostgresFault::NoTable(_) | PostgresFault::Data(_) => {
            StoreError::schema(place, why)
        }
        _ => StoreError::unavailable(format!("{place}: {why}")),
    }
}
