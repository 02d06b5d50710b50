//! The stores that are judged: an [`TestEngine`] hands out [`TestNamespace`]s, and a namespace is one empty namespace of it.
//!
//! What a namespace is, is the engine's affair: a fresh object for the model, a folder for SQLite, a schema or a
//! prefix of table names on a server. Opening a namespace twice gives the same content, which is how a restart is tested:
//! close the store and open it again.
//!
//! An engine that needs a server takes its address from the environment, and is always in the list. When the
//! address is missing or no server answers there, [`TestEngine::namespace`] or [`TestNamespace::open`] fails and says what to set, and so
//! every case of that engine fails. An engine that was not tested must never look like one that passed.

use std::fmt;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use anyhow::{Context, Result};
use async_trait::async_trait;
use statehouse::engine::{Engine as EngineKind, OpenError};
use statehouse_store::limits::PLAN_OPERATIONS_MAX;
use statehouse_store::model::PARTITIONS;
use statehouse_store::{Clock, ModelStore, Random, Store, SystemClock, Time};
#[cfg(feature = "dynamodb")]
use statehouse_store_dynamodb::DynamoStore;
use statehouse_store_postgres::PostgresStore;
use statehouse_store_sqlite::{SqliteOptions, SqliteStore};
use tempfile::TempDir;

/// A kind of store.
pub trait TestEngine: Send + Sync {
    /// How reports name it. One engine may be judged several times, for example on two emulators.
    fn name(&self) -> &str;

    /// An empty namespace. Different names never share anything, neither within a run nor across runs.
    fn namespace(&self, namespace: &str) -> Result<Arc<dyn TestNamespace>>;

    /// The most operations that this server takes in one plan. Less than the contract's limit only for an emulator
    /// that falls short of what it emulates; cases with larger plans are then left out, and counted.
    fn largest_plan(&self) -> usize {
        PLAN_OPERATIONS_MAX
    }

    /// Whether what stands on a store is judged on it too. Not where only the way to a server is another one: what reaches
    /// the store is the same then.
    fn carries_archetypes(&self) -> bool {
        true
    }
}

/// One namespace of an engine. Whatever it keeps (a folder, a schema) goes away with it.
#[async_trait]
pub trait TestNamespace: Send + Sync {
    /// Opens the store on this clock.
    async fn open_at(&self, clock: Arc<dyn Clock>) -> Result<Arc<dyn Store>>;

    /// Opens the store on the machine's clock.
    async fn open(&self) -> Result<Arc<dyn Store>> {
        self.open_at(Arc::new(SystemClock)).await
    }
}

/// Every engine that this build knows.
pub fn all() -> Vec<Arc<dyn TestEngine>> {
    vec![
        Arc::new(Model),
        Arc::new(Sqlite),
        Arc::new(Postgres::direct()),
        Arc::new(Postgres::pooled()),
        Arc::new(DynamoDb::dynoxide()),
        Arc::new(DynamoDb::local()),
    ]
}

/// The engine that a URL names, with namespaces beside what the URL names and never in it: a file of its own in the same folder,
/// a schema of its own in the same database, a prefix of its own at the same server. What is wrong with the URL is said
/// here, and not by each namespace.
pub fn at(url: &str) -> Result<Arc<dyn TestEngine>, OpenError> {
    let kind = EngineKind::of_url(url)?;
    let location = match kind {
        EngineKind::Model => NamespaceLocation::Nothing,
        EngineKind::Sqlite => {
            let path = url.strip_prefix("sqlite:").unwrap_or(url);
            let path = Path::new(path.strip_prefix("//").unwrap_or(path));
            let folder = path.parent().filter(|folder| !folder.as_os_str().is_empty());
            NamespaceLocation::Files(folder.unwrap_or(Path::new(".")).to_owned())
        }
        EngineKind::Postgres => {
            NamespaceLocation::Schemas(Box::new(statehouse_store_postgres::PostgresOptions::from_url(url)?))
        }
        #[cfg(feature = "dynamodb")]
        EngineKind::Dynamodb => {
            NamespaceLocation::Prefixes(statehouse_store_dynamodb::DynamoOptions::from_url(url)?)
        }
        #[cfg(not(feature = "dynamodb"))]
        EngineKind::Dynamodb => return Err(OpenError::NotBuilt { engine: "dynamodb" }),
    };
    Ok(Arc::new(EngineAtUrl { kind, location }))
}

/// See [`at`].
struct EngineAtUrl {
    kind: EngineKind,
    location: NamespaceLocation,
}

/// NamespaceLocation what namespaces are.
enum NamespaceLocation {
    Nothing,
    Files(PathBuf),
    Schemas(Box<statehouse_store_postgres::PostgresOptions>),
    #[cfg(feature = "dynamodb")]
    Prefixes(statehouse_store_dynamodb::DynamoOptions),
}

impl TestEngine for EngineAtUrl {
    fn name(&self) -> &str {
        self.kind.name()
    }

    fn namespace(&self, namespace: &str) -> Result<Arc<dyn TestNamespace>> {
        match &self.location {
            NamespaceLocation::Nothing => Model.namespace(namespace),
            NamespaceLocation::Files(location) => {
                let folder = tempfile::Builder::new()
                    .prefix(".statehouse-drill-")
                    .tempdir_in(location)
                    .context("a folder for the drill's file")?;
                Ok(Arc::new(SqliteNamespace { folder }))
            }
            NamespaceLocation::Schemas(options) => {
                let mut options = options.as_ref().clone();
                options.schema = own_name("drill", '_');
                Ok(Arc::new(PostgresNamespace { options }))
            }
            #[cfg(feature = "dynamodb")]
            NamespaceLocation::Prefixes(options) => {
                let mut options = options.clone();
                options.prefix = own_name("drill", '-');
                Ok(Arc::new(DynamoDbNamespace { options }))
            }
        }
    }
}

/// A name that no other namespace has: several runs may use one server at the same time.
fn own_name(lead: &str, between: char) -> String {
    static NAMESPACES: AtomicU64 = AtomicU64::new(0);
    let run = Random::from_entropy().below(1 << 40);
    format!("{lead}{between}{run:x}{between}{}", NAMESPACES.fetch_add(1, Ordering::Relaxed))
}

/// The reference, judged like any other: the cases must not ask what the model does not do.
#[derive(Clone, Copy, Debug, Default)]
pub struct Model;

impl TestEngine for Model {
    fn name(&self) -> &str {
        "model"
    }

    fn namespace(&self, _: &str) -> Result<Arc<dyn TestNamespace>> {
        let clock = SwitchedClock { current: Arc::new(Mutex::new(Arc::new(SystemClock))) };
        let store = ModelStore::with(Arc::new(clock.clone()), PARTITIONS);
        Ok(Arc::new(ModelNamespace { store, clock }))
    }
}

struct ModelNamespace {
    store: ModelStore,
    clock: SwitchedClock,
}

#[async_trait]
impl TestNamespace for ModelNamespace {
    async fn open_at(&self, clock: Arc<dyn Clock>) -> Result<Arc<dyn Store>> {
        *self.clock.current.lock().unwrap_or_else(PoisonError::into_inner) = clock;
        Ok(Arc::new(self.store.reopened()))
    }
}

/// SQLite as it is shipped: synchronized to the disk at every commit, one file in a folder for each namespace.
#[derive(Clone, Copy, Debug, Default)]
pub struct Sqlite;

impl TestEngine for Sqlite {
    fn name(&self) -> &str {
        "sqlite"
    }

    fn namespace(&self, _: &str) -> Result<Arc<dyn TestNamespace>> {
        let folder = TempDir::with_prefix("statehouse-drills-").context("a folder for the file")?;
        Ok(Arc::new(SqliteNamespace { folder }))
    }
}

struct SqliteNamespace {
    folder: TempDir,
}

#[async_trait]
impl TestNamespace for SqliteNamespace {
    async fn open_at(&self, clock: Arc<dyn Clock>) -> Result<Arc<dyn Store>> {
        let options = SqliteOptions { clock, ..SqliteOptions::at(self.folder.path().join("house.db")) };
        Ok(Arc::new(SqliteStore::open(options).await?))
    }
}

/// PostgreSQL on a server that is already running: a schema for each namespace.
#[derive(Clone, Copy, Debug)]
pub struct Postgres {
    name: &'static str,
    /// Holds the URL.
    variable: &'static str,
    /// What prints it.
    script: &'static str,
    is_pooled: bool,
}

impl Postgres {
    /// The server itself.
    pub fn direct() -> Postgres {
        let (variable, script) = ("STATEHOUSE_TEST_POSTGRES", "scripts/postgres start DIR");
        Postgres { name: "postgres", variable, script, is_pooled: false }
    }

    /// Through a pooler, which gives each transaction to any of its few server processes.
    pub fn pooled() -> Postgres {
        let (variable, script) = ("STATEHOUSE_TEST_PGBOUNCER", "scripts/pgbouncer start DIR POSTGRES_URL");
        Postgres { name: "postgres-pooled", variable, script, is_pooled: true }
    }
}

impl TestEngine for Postgres {
    fn name(&self) -> &str {
        self.name
    }

    fn namespace(&self, _: &str) -> Result<Arc<dyn TestNamespace>> {
        let url = std::env::var(self.variable).with_context(|| {
            format!("{} has to hold the URL that `{}` prints", self.variable, self.script)
        })?;
        let mut options = statehouse_store_postgres::PostgresOptions::from_url(&url)?;
        options.schema = own_name("lab", '_');
        Ok(Arc::new(PostgresNamespace { options }))
    }

    fn carries_archetypes(&self) -> bool {
        !self.is_pooled
    }
}

struct PostgresNamespace {
    options: statehouse_store_postgres::PostgresOptions,
}

#[async_trait]
impl TestNamespace for PostgresNamespace {
    async fn open_at(&self, clock: Arc<dyn Clock>) -> Result<Arc<dyn Store>> {
        let options = self.options.clone().with_clock(clock);
        Ok(Arc::new(PostgresStore::open(options).await?))
    }

    /// On the server's clock, as in production.
    async fn open(&self) -> Result<Arc<dyn Store>> {
        Ok(Arc::new(PostgresStore::open(self.options.clone()).await?))
    }
}

impl Drop for PostgresNamespace {
    fn drop(&mut self) {
        let options = self.options.clone();
        // A runtime of its own, on a thread of its own: the namespace may go away within another runtime or after it.
        let erased = std::thread::spawn(move || {
            let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
            runtime.is_ok_and(|runtime| runtime.block_on(PostgresStore::erase(&options)).is_ok())
        });
        // A schema that stays behind is harmless.
        let _ = erased.join();
    }
}

/// DynamoDB on a server that is already running: a prefix of table names for each namespace.
#[derive(Clone, Copy, Debug)]
pub struct DynamoDb {
    name: &'static str,
    /// Holds the server's address.
    variable: &'static str,
    transaction_items: usize,
}

impl DynamoDb {
    /// The emulator dynoxide, which takes transactions of any size that DynamoDB takes.
    pub fn dynoxide() -> DynamoDb {
        DynamoDb { name: "dynamodb", variable: "STATEHOUSE_TEST_DYNAMODB", transaction_items: 100 }
    }

    /// Amazon's DynamoDB Local of 2020, which takes transactions of 10 items.
    pub fn local() -> DynamoDb {
        let variable = "STATEHOUSE_TEST_DYNAMODB_LOCAL";
        DynamoDb { name: "dynamodb-local", variable, transaction_items: 10 }
    }
}

impl TestEngine for DynamoDb {
    fn name(&self) -> &str {
        self.name
    }

    fn namespace(&self, _: &str) -> Result<Arc<dyn TestNamespace>> {
        let endpoint = std::env::var(self.variable).with_context(|| {
            format!("{} has to hold the address that `scripts/dynamodb start DIR` prints", self.variable)
        })?;
        dynamodb_namespace(endpoint, self.transaction_items)
    }

    fn largest_plan(&self) -> usize {
        // A log entry is one operation of a plan and two items of a transaction.
        if self.transaction_items < PLAN_OPERATIONS_MAX {
            self.transaction_items - 1
        } else {
            PLAN_OPERATIONS_MAX
        }
    }
}

#[cfg(feature = "dynamodb")]
fn dynamodb_namespace(endpoint: String, transaction_items: usize) -> Result<Arc<dyn TestNamespace>> {
    let mut options = statehouse_store_dynamodb::DynamoOptions::new(own_name("lab", '-'));
    options.endpoint = Some(endpoint);
    options.credentials = statehouse_store_dynamodb::Credentials::Emulator;
    options.transaction_items = transaction_items;
    // Both emulators do one thing at a time, and a whole run of cases waits for them at once.
    options.request_timeout = Duration::from_secs(60);
    options.schema_lease = Duration::from_millis(250);
    Ok(Arc::new(DynamoDbNamespace { options }))
}

#[cfg(not(feature = "dynamodb"))]
fn dynamodb_namespace(_: String, _: usize) -> Result<Arc<dyn TestNamespace>> {
    Err(OpenError::NotBuilt { engine: "dynamodb" }.into())
}

#[cfg(feature = "dynamodb")]
struct DynamoDbNamespace {
    options: statehouse_store_dynamodb::DynamoOptions,
}

#[cfg(feature = "dynamodb")]
#[async_trait]
impl TestNamespace for DynamoDbNamespace {
    async fn open_at(&self, clock: Arc<dyn Clock>) -> Result<Arc<dyn Store>> {
        let options = statehouse_store_dynamodb::DynamoOptions { clock, ..self.options.clone() };
        Ok(Arc::new(DynamoStore::open(options).await?))
    }
}

#[cfg(feature = "dynamodb")]
impl Drop for DynamoDbNamespace {
    fn drop(&mut self) {
        let options = self.options.clone();
        // A runtime of its own, on a thread of its own: the namespace may go away within another runtime or after it.
        let erased = std::thread::spawn(move || {
            let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
            runtime.is_ok_and(|runtime| runtime.block_on(DynamoStore::erase(options)).is_ok())
        });
        // Tables that stay behind are harmless.
        let _ = erased.join();
    }
}

/// A clock that can be exchanged for another: the model's content outlives an opening, its clock does not.
#[derive(Clone)]
struct SwitchedClock {
    current: Arc<Mutex<Arc<dyn Clock>>>,
}

impl SwitchedClock {
    fn current(&self) -> Arc<dyn Clock> {
        self.current.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }
}

impl fmt::Debug for SwitchedClock {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "SwitchedClock({:?})", self.current())
    }
}

#[async_trait]
impl Clock for SwitchedClock {
    fn now(&self) -> Time {
        self.current().now()
    }

    fn uptime(&self) -> Duration {
        self.current().uptime()
    }

    async fn sleep(&self, span: Duration) {
        self.current().sleep(span).await;
    }
}
