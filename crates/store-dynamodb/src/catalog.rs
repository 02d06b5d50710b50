//! The live tables: their definitions in the store's own `statehouse_meta` table, and this process's knowledge of them.
//!
//! A write has to keep attributes right that its plan knows nothing of: the keys of all live indexes, the defaults of
//! columns that were added since. So a process must not work from an old definition for long. It reads the definitions
//! again when they are older than the schema lease, and a migration that has to fill in existing rows first publishes
//! the new definition and then waits for twice the lease: by then every process writes in the new shape, and what
//! was written in the old one is there to be found.

use std::collections::HashMap;
use std::sync::atomic::AtomicBool;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use serde::{Deserialize, Serialize};
use statehouse_store::clock::Stopwatch;
use statehouse_store::{StoreError, Table};

use crate::action::{self, Action};
use crate::expression::{Condition, Terms};
use crate::item::{self, Item, PK};
use crate::wire::{Reply, Wire};

/// A table that can be written.
#[derive(Debug)]
pub(crate) struct Live {
    /// As it is stored; it may have columns and indexes that a plan's table does not know.
    pub(crate) table: Arc<Table>,
    /// Its name on the server.
    pub(crate) physical: String,
    /// Whether rows of it were seen that a logged plan wrote. Only a guess at which request to try first.
    pub(crate) logged: AtomicBool,
}

/// What has yet to be done on the server before a definition holds for every item.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub(crate) struct Work {
    /// Columns whose default existing rows have to get.
    pub(crate) fill: Vec<String>,
    /// Indexes whose keys existing rows have to get.
    pub(crate) index: Vec<String>,
    /// Indexes to be deleted.
    pub(crate) drop_index: Vec<String>,
    /// Attributes to be taken from existing rows.
    pub(crate) strip: Vec<String>,
    /// Whether the whole table is to be deleted.
    pub(crate) drop_table: bool,
}

impl Work {
    pub(crate) fn is_done(&self) -> bool {
        *self == Work::default()
    }
}

/// A definition as it is stored.
#[derive(Clone, Debug)]
pub(crate) struct Definition {
    pub(crate) table: Arc<Table>,
    /// Grows with every change; who changes a definition names the one it read.
    pub(crate) revision: i64,
    pub(crate) work: Work,
}

const DEFINITION: &str = "definition";
const REVISION: &str = "revision";
const WORK: &str = "work";
const TABLE_PREFIX: &str = "table/";

/// The definitions, stored and known.
#[derive(Debug)]
pub(crate) struct Catalog {
    prefix: String,
    lease: Duration,
    known: Mutex<Known>,
    /// One reading at a time is enough for all that wait.
    reading: tokio::sync::Mutex<()>,
}

#[derive(Debug, Default)]
struct Known {
    tables: Arc<HashMap<String, Arc<Live>>>,
    /// Started before the reading was sent.
    age: Option<Stopwatch>,
}

impl Catalog {
    pub(crate) fn new(prefix: &str, lease: Duration) -> Catalog {
        let (known, reading) = (Mutex::default(), tokio::sync::Mutex::default());
        Catalog { prefix: prefix.to_owned(), lease, known, reading }
    }

    /// How long a definition may be worked with before it is read again.
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

    /// What is known without asking.
    pub(crate) fn known(&self) -> Arc<HashMap<String, Arc<Live>>> {
        self.known.lock().unwrap_or_else(PoisonError::into_inner).tables.clone()
    }

    fn fresh(&self) -> Option<Arc<HashMap<String, Arc<Live>>>> {
        let known = self.known.lock().unwrap_or_else(PoisonError::into_inner);
        known.age.is_some_and(|age| age.elapsed() < self.lease).then(|| known.tables.clone())
    }

    /// The live tables, read again if what is known is too old.
    pub(crate) async fn tables(&self, wire: &Wire) -> Result<Arc<HashMap<String, Arc<Live>>>, StoreError> {
        if let Some(tables) = self.fresh() {
            return Ok(tables);
        }
        let _reading = self.reading.lock().await;
        match self.fresh() {
            Some(tables) => Ok(tables),
            None => self.refresh(wire).await,
        }
    }

    /// Reads the definitions.
    pub(crate) async fn refresh(&self, wire: &Wire) -> Result<Arc<HashMap<String, Arc<Live>>>, StoreError> {
        let age = Stopwatch::start();
        let definitions = self.definitions(wire).await?;
        let mut known = self.known.lock().unwrap_or_else(PoisonError::into_inner);
        let mut tables = HashMap::new();
        for definition in definitions {
            if definition.work.drop_table {
                continue;
            }
            let name = definition.table.name().to_owned();
            let live = match known.tables.get(&name) {
                Some(live) if live.table == definition.table => live.clone(),
                _ => Arc::new(Live {
                    physical: self.physical(&name),
                    table: definition.table,
                    logged: AtomicBool::new(false),
                }),
            };
            tables.insert(name, live);
        }
        known.tables = Arc::new(tables);
        known.age = Some(age);
        Ok(known.tables.clone())
    }

    /// The live table behind a caller's, if the two fit each other.
    pub(crate) async fn live(&self, wire: &Wire, table: &Arc<Table>) -> Result<Arc<Live>, StoreError> {
        let fit = |tables: &HashMap<String, Arc<Live>>| {
            let live = tables.get(table.name()).ok_or_else(|| StoreError::no_table(table.name()))?;
            check_fit(table, &live.table).map(|()| live.clone())
        };
        match fit(&*self.tables(wire).await?) {
            Ok(live) => Ok(live),
            // Another process may have migrated since the last look.
            Err(_) => fit(&*self.refresh(wire).await?),
        }
    }

    /// All definitions, as they are now.
    pub(crate) async fn definitions(&self, wire: &Wire) -> Result<Vec<Definition>, StoreError> {
        let meta = self.meta();
        let mut definitions = Vec::new();
        let mut start: Option<Item> = None;
        loop {
            let request = || {
                let scan = wire.client.scan().table_name(&meta).consistent_read(true);
                scan.set_exclusive_start_key(start.clone()).send()
            };
            let page = wire.repeat(request).await.map_err(|fault| fault.into_error(&meta))?;
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

    fn parse(&self, item: &Item) -> Result<Definition, StoreError> {
        let place = || format!("{} {:?}", self.meta(), item::text(item, PK).unwrap_or_default());
        let corrupt = |why: String| StoreError::corrupt(place(), why);
        let definition =
            item::text(item, DEFINITION).ok_or_else(|| corrupt("it has no definition".into()))?;
        let table = serde_json::from_str(definition).map_err(|error| corrupt(error.to_string()))?;
        let revision = item::integer(item, REVISION).ok_or_else(|| corrupt("it has no revision".into()))?;
        let work = item::text(item, WORK).unwrap_or("{}");
        let work = serde_json::from_str(work).map_err(|error| corrupt(error.to_string()))?;
        Ok(Definition { table: Arc::new(table), revision, work })
    }

    fn key(table: &str) -> Item {
        Item::from([(PK.to_owned(), item::string(&format!("{TABLE_PREFIX}{table}")))])
    }

    /// Stores a definition over the one of a revision (0: none). Says whether it was still that one.
    pub(crate) async fn publish(
        &self,
        wire: &Wire,
        table: &Table,
        over: i64,
        work: &Work,
    ) -> Result<bool, StoreError> {
        let json = |error: serde_json::Error| StoreError::corrupt(self.meta(), error.to_string());
        let mut terms = Terms::default();
        let mut clauses = action::Clauses::default();
        let definition = serde_json::to_string(table).map_err(json)?;
        clauses.set(&mut terms, DEFINITION, item::string(&definition));
        clauses.set(&mut terms, WORK, item::string(&serde_json::to_string(work).map_err(json)?));
        clauses.set(&mut terms, REVISION, item::number(over + 1));
        let condition = if over == 0 {
            Condition::missing(&mut terms, REVISION)
        } else {
            Condition::compare(&mut terms, REVISION, "=", item::number(over))
        };
        let action = Action::update(&self.meta(), Catalog::key(table.name()), &clauses, condition, terms);
        self.settle(wire, &action, table.name(), over + 1).await
    }

    /// Forgets a definition of a revision.
    pub(crate) async fn forget(&self, wire: &Wire, table: &str, revision: i64) -> Result<bool, StoreError> {
        let mut terms = Terms::default();
        let condition = Condition::compare(&mut terms, REVISION, "=", item::number(revision));
        let verb = action::Verb::Delete;
        let action = Action::new(&self.meta(), Catalog::key(table), verb, condition, terms);
        self.settle(wire, &action, table, 0).await
    }

    /// Sends a change of a definition. When its answer is lost, the next reading of the definitions tells.
    async fn settle(&self, wire: &Wire, action: &Action, table: &str, now: i64) -> Result<bool, StoreError> {
        match wire.write_one(action).await {
            Ok(Reply::Done(_)) => Ok(true),
            Ok(Reply::Not(_)) => Ok(false),
            Err(crate::wire::Fault::Open(_)) => {
                let item = wire.get(&self.meta(), Catalog::key(table), true).await;
                let item = item.map_err(|fault| fault.into_error(&self.meta()))?;
                Ok(item.and_then(|item| item::integer(&item, REVISION)).unwrap_or(0) == now)
            }
            Err(fault) => Err(fault.into_error(&self.meta())),
        }
    }

    /// A check that a definition still has this revision, as a part of a transaction.
    pub(crate) fn still(&self, table: &str, revision: i64) -> Action {
        let mut terms = Terms::default();
        let condition = Condition::compare(&mut terms, REVISION, "=", item::number(revision));
        Action::new(&self.meta(), Catalog::key(table), action::Verb::Check, condition, terms)
    }
}

/// Checks that a caller's table can work on the live one: the same key, and no column that is not there.
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
            "its key is another one than in the live store",
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
