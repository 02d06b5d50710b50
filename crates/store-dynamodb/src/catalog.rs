//! The live tables: their definitions in the system table `statehouse_meta`, and this process's cache of them.
//!
//! A write maintains attributes that its plan does not name: the keys of all live indexes, and the defaults of columns
//! that were added later. A process therefore reads the definitions again when its cache is older than the schema lease. A
//! migration that has to backfill rows publishes the new definition first and then waits for twice the lease. After
//! that, every process writes rows of the new shape, and the backfill finds all rows of the old one.

use std::collections::HashMap;
use std::sync::atomic::AtomicBool;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use serde::{Deserialize, Serialize};
use statehouse_store::clock::Stopwatch;
use statehouse_store::{StoreError, Table};

use crate::client::{ClientWriteResult, DynamoClient};
use crate::expression::{Condition, ExpressionPlaceholders};
use crate::item::{self, Item, PK};
use crate::item_write::{ItemWrite, UpdateClauses, WriteKind};

/// A table that can be written.
#[derive(Debug)]
pub(crate) struct LiveTable {
    /// As it is stored; it may have columns and indexes that a plan's table does not know.
    pub(crate) table: Arc<Table>,
    /// Its name on the server.
    pub(crate) physical: String,
    /// Whether this process saw a row that a logged plan wrote. Only decides which request is tried first.
    pub(crate) logged: AtomicBool,
}

/// The changes that are still to be made on the server before a definition holds for every item.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub(crate) struct BackfillWork {
    /// Columns whose default is to be set in existing rows.
    pub(crate) fill: Vec<String>,
    /// Indexes whose keys are to be set in existing rows.
    pub(crate) index: Vec<String>,
    /// Indexes to be deleted.
    pub(crate) drop_index: Vec<String>,
    /// Attributes to be removed from existing rows.
    pub(crate) strip: Vec<String>,
    /// Whether the whole table is to be deleted.
    pub(crate) drop_table: bool,
}

impl BackfillWork {
    pub(crate) fn is_done(&self) -> bool {
        *self == BackfillWork::default()
    }
}

/// A definition as it is stored.
#[derive(Clone, Debug)]
pub(crate) struct TableDefinition {
    pub(crate) table: Arc<Table>,
    /// Incremented by every change. A change is conditional on the revision that was read.
    pub(crate) revision: i64,
    pub(crate) work: BackfillWork,
}

const DEFINITION: &str = "definition";
const REVISION: &str = "revision";
const WORK: &str = "work";
const TABLE_PREFIX: &str = "table/";

/// The definitions, with a cache.
#[derive(Debug)]
pub(crate) struct Catalog {
    prefix: String,
    lease: Duration,
    cached: Mutex<CachedTables>,
    /// Concurrent callers share one refresh.
    reading: tokio::sync::Mutex<()>,
}

#[derive(Debug, Default)]
struct CachedTables {
    tables: Arc<HashMap<String, Arc<LiveTable>>>,
    /// Started before the request was sent.
    age: Option<Stopwatch>,
}

impl Catalog {
    pub(crate) fn new(prefix: &str, lease: Duration) -> Catalog {
        let (cached, reading) = (Mutex::default(), tokio::sync::Mutex::default());
        Catalog { prefix: prefix.to_owned(), lease, cached, reading }
    }

    /// The maximal age of the cache.
    pub(crate) fn lease(&self) -> Duration {
        self.lease
    }

    /// The name of a table on the server.
    pub(crate) fn physical(&self, table: &str) -> String {
        format!("{}.{table}", self.prefix)
    }

    /// The name of the table that holds definitions and settings.
    pub(crate) fn meta(&self) -> String {
        self.physical("statehouse_meta")
    }

    /// The cached tables, of any age.
    pub(crate) fn cached(&self) -> Arc<HashMap<String, Arc<LiveTable>>> {
        self.cached.lock().unwrap_or_else(PoisonError::into_inner).tables.clone()
    }

    fn fresh(&self) -> Option<Arc<HashMap<String, Arc<LiveTable>>>> {
        let cached = self.cached.lock().unwrap_or_else(PoisonError::into_inner);
        cached.age.is_some_and(|age| age.elapsed() < self.lease).then(|| cached.tables.clone())
    }

    /// The live tables, read again if the cache is older than the lease.
    pub(crate) async fn tables(
        &self,
        client: &DynamoClient,
    ) -> Result<Arc<HashMap<String, Arc<LiveTable>>>, StoreError> {
        if let Some(tables) = self.fresh() {
            return Ok(tables);
        }
        let _reading = self.reading.lock().await;
        match self.fresh() {
            Some(tables) => Ok(tables),
            None => self.refresh(client).await,
        }
    }

    /// Reads the definitions.
    pub(crate) async fn refresh(
        &self,
        client: &DynamoClient,
    ) -> Result<Arc<HashMap<String, Arc<LiveTable>>>, StoreError> {
        let age = Stopwatch::start();
        let definitions = self.definitions(client).await?;
        let mut cached = self.cached.lock().unwrap_or_else(PoisonError::into_inner);
        let mut tables = HashMap::new();
        for definition in definitions {
            if definition.work.drop_table {
                continue;
            }
            let name = definition.table.name().to_owned();
            let live = match cached.tables.get(&name) {
                Some(live) if live.table == definition.table => live.clone(),
                _ => Arc::new(LiveTable {
                    physical: self.physical(&name),
                    table: definition.table,
                    logged: AtomicBool::new(false),
                }),
            };
            tables.insert(name, live);
        }
        cached.tables = Arc::new(tables);
        cached.age = Some(age);
        Ok(cached.tables.clone())
    }

    /// The live table of a caller's table, if the two are compatible.
    pub(crate) async fn live(
        &self,
        client: &DynamoClient,
        table: &Arc<Table>,
    ) -> Result<Arc<LiveTable>, StoreError> {
        let fit = |tables: &HashMap<String, Arc<LiveTable>>| {
            let live = tables.get(table.name()).ok_or_else(|| StoreError::no_table(table.name()))?;
            check_fit(table, &live.table).map(|()| live.clone())
        };
        match fit(&*self.tables(client).await?) {
            Ok(live) => Ok(live),
            // Another process may have migrated since the last refresh.
            Err(_) => fit(&*self.refresh(client).await?),
        }
    }

    /// Reads all definitions.
    pub(crate) async fn definitions(
        &self,
        client: &DynamoClient,
    ) -> Result<Vec<TableDefinition>, StoreError> {
        let meta = self.meta();
        let mut definitions = Vec::new();
        let mut start: Option<Item> = None;
        loop {
            let request = || {
                let scan = client.sdk.scan().table_name(&meta).consistent_read(true);
                scan.set_exclusive_start_key(start.clone()).send()
            };
            let page = client.send_with_retries(request).await.map_err(|error| error.into_error(&meta))?;
            for item in page.items.unwrap_or_default() {
                if item::text(&item, PK).is_some_and(|pk| pk.starts_with(TABLE_PREFIX)) {
                    definitions.push(self.parse(&item)?);
                }
            }
            start = page.last_evaluated_key.filter(|key| !key.is_empty());
            if start.is_none() {
                break;
            }
        }
        definitions.sort_by(|a, b| a.table.name().cmp(b.table.name()));
        Ok(definitions)
    }

    fn parse(&self, item: &Item) -> Result<TableDefinition, StoreError> {
        let location = || format!("{} {:?}", self.meta(), item::text(item, PK).unwrap_or_default());
        let corrupt = |why: String| StoreError::corrupt(location(), why);
        let definition =
            item::text(item, DEFINITION).ok_or_else(|| corrupt("the item has no definition".into()))?;
        let table = serde_json::from_str(definition).map_err(|error| corrupt(error.to_string()))?;
        let revision =
            item::integer(item, REVISION).ok_or_else(|| corrupt("the item has no revision".into()))?;
        let work = item::text(item, WORK).ok_or_else(|| corrupt("the item has no work".into()))?;
        let work = serde_json::from_str(work).map_err(|error| corrupt(error.to_string()))?;
        Ok(TableDefinition { table: Arc::new(table), revision, work })
    }

    fn key(table: &str) -> Item {
        Item::from([(PK.to_owned(), item::string(&format!("{TABLE_PREFIX}{table}")))])
    }

    /// Replaces the definition of a revision (0: none). Returns whether it still had that revision.
    pub(crate) async fn publish(
        &self,
        client: &DynamoClient,
        table: &Table,
        over: i64,
        work: &BackfillWork,
    ) -> Result<bool, StoreError> {
        let json = |error: serde_json::Error| StoreError::corrupt(self.meta(), error.to_string());
        let mut terms = ExpressionPlaceholders::default();
        let mut clauses = UpdateClauses::default();
        let definition = serde_json::to_string(table).map_err(json)?;
        clauses.set(&mut terms, DEFINITION, item::string(&definition));
        clauses.set(&mut terms, WORK, item::string(&serde_json::to_string(work).map_err(json)?));
        clauses.set(&mut terms, REVISION, item::number(over + 1));
        let condition = if over == 0 {
            Condition::missing(&mut terms, REVISION)
        } else {
            Condition::compare(&mut terms, REVISION, "=", item::number(over))
        };
        let action = ItemWrite::update(&self.meta(), Catalog::key(table.name()), &clauses, condition, terms);
        self.write_definition(client, &action, table.name(), over + 1).await
    }

    /// Deletes the definition of a revision.
    pub(crate) async fn delete_definition(
        &self,
        client: &DynamoClient,
        table: &str,
        revision: i64,
    ) -> Result<bool, StoreError> {
        let mut terms = ExpressionPlaceholders::default();
        let condition = Condition::compare(&mut terms, REVISION, "=", item::number(revision));
        let verb = WriteKind::Delete;
        let action = ItemWrite::new(&self.meta(), Catalog::key(table), verb, condition, terms);
        self.write_definition(client, &action, table, 0).await
    }

    /// Sends a change of a definition. If its answer is lost, the stored revision decides.
    async fn write_definition(
        &self,
        client: &DynamoClient,
        action: &ItemWrite,
        table: &str,
        now: i64,
    ) -> Result<bool, StoreError> {
        match client.write_one(action).await {
            Ok(ClientWriteResult::Applied(_)) => Ok(true),
            Ok(ClientWriteResult::Rejected(_)) => Ok(false),
            Err(crate::request_error::RequestError::UnknownOutcome(_)) => {
                let item = client.get(&self.meta(), Catalog::key(table), true).await;
                let item = item.map_err(|error| error.into_error(&self.meta()))?;
                Ok(item.and_then(|item| item::integer(&item, REVISION)).unwrap_or(0) == now)
            }
            Err(error) => Err(error.into_error(&self.meta())),
        }
    }

    /// The check, within a transaction, that a definition still has this revision.
    pub(crate) fn revision_check(&self, table: &str, revision: i64) -> ItemWrite {
        let mut terms = ExpressionPlaceholders::default();
        let condition = Condition::compare(&mut terms, REVISION, "=", item::number(revision));
        ItemWrite::new(&self.meta(), Catalog::key(table), WriteKind::Check, condition, terms)
    }
}

/// Checks that a caller's table is compatible with the live one: the same key, and only columns that exist.
fn check_fit(table: &Table, live: &Table) -> Result<(), StoreError> {
    if table == live {
        return Ok(());
    }
    let shape = |columns: &[statehouse_store::Column]| -> Vec<(String, statehouse_store::Type)> {
        columns.iter().map(|column| (column.name.clone(), column.kind)).collect()
    };
    if shape(table.partition_columns()) != shape(live.partition_columns())
        || shape(table.sort_columns()) != shape(live.sort_columns())
    {
        return Err(StoreError::schema(
            format!("table {table}"),
            "its key differs from the key of the live table",
        ));
    }
    for column in table.other_columns() {
        if live.column(&column.name).is_none_or(|live| live.kind != column.kind) {
            let why = "the live table has no such column of this type; migrate to a schema that has it";
            return Err(StoreError::schema(format!("column {table}.{}", column.name), why));
        }
    }
    Ok(())
}
