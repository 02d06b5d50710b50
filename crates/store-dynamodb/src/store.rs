//! The store itself: opened on a server, and the contract on top of the parts.

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use async_trait::async_trait;
use aws_config::{BehaviorVersion, Region, retry::RetryConfig, timeout::TimeoutConfig};
use aws_sdk_dynamodb::Client;
use aws_sdk_dynamodb::types::ScalarAttributeType;
use statehouse_store::{
    Address, Change, Commit, Consistency, ExplainRequest, Explanation, LogPage, Migrate, Page, Plan, Query,
    Record, Resolution, Row, Scan, Schema, Store, StoreError, Tenant,
};
use tokio::sync::watch;

use crate::action::{Action, Clauses};
use crate::catalog::Catalog;
use crate::expression::{Condition, Terms};
use crate::inner::Inner;
use crate::item::{self, Item, PK};
use crate::options::{Credentials, Options};
use crate::record::{LogTables, OFFSET, PARTITION, PLACE};
use crate::stamp::Stamps;
use crate::wire::{Fault, Wire};

/// The form in which all this is stored. A later form gets a higher number, and this code refuses it.
const FORMAT: i64 = 1;
/// Partitions of a new log, unless the options say otherwise.
const PARTITIONS: u32 = 16;

/// A store on DynamoDB. Clones share one connection.
#[derive(Clone)]
pub struct DynamoStore {
    inner: Arc<Inner>,
}

impl fmt::Debug for DynamoStore {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "DynamoStore({})", self.inner.catalog.physical("*"))
    }
}

impl DynamoStore {
    /// Opens the store of a prefix, and creates it if there is none.
    pub async fn open(options: Options) -> Result<DynamoStore, StoreError> {
        options.check()?;
        let client = connect(&options).await;
        let partitions = options.partitions;
        let mut inner = inner(options, client);
        inner.partitions = match settings(&inner).await? {
            Some(settings) => check_settings(&inner, &settings, partitions)?,
            None => create(&inner, partitions).await?,
        };
        inner.sequencing = (0..inner.partitions).map(|_| tokio::sync::Mutex::default()).collect();
        inner.catalog.refresh(&inner.wire).await?;
        Ok(DynamoStore { inner: Arc::new(inner) })
    }

    /// Deletes every table of a prefix, with all that is in them. For tests and for leaving.
    pub async fn erase(options: Options) -> Result<(), StoreError> {
        options.check()?;
        let client = connect(&options).await;
        let prefix = format!("{}.", options.prefix);
        let wire = Wire::new(client, options.pauses, options.transaction_items);
        let mut after: Option<String> = None;
        loop {
            // The order of the names begins with the prefix itself, so that other tables are hardly listed.
            let start = after.clone().unwrap_or_else(|| prefix.clone());
            let request = || wire.client.list_tables().exclusive_start_table_name(&start).send();
            let page = wire.repeat(request).await.map_err(|fault| fault.into_error("the list of tables"))?;
            let names = page.table_names.unwrap_or_default();
            let own: Vec<&String> = names.iter().filter(|name| name.starts_with(&prefix)).collect();
            for name in &own {
                let deleted = wire.repeat(|| wire.client.delete_table().table_name(*name).send()).await;
                match deleted {
                    Ok(_) | Err(Fault::NoTable(_) | Fault::Busy(_)) => {}
                    Err(fault) => return Err(fault.into_error(name)),
                }
            }
            after = page.last_evaluated_table_name.filter(|_| own.len() == names.len());
            if after.is_none() {
                return Ok(());
            }
        }
    }
}

/// What a store with these options would send, in a region and with a log of the size that a new store gets. No
/// server is asked.
pub fn explain(options: Options, asked: ExplainRequest<'_>) -> Explanation {
    let config = aws_sdk_dynamodb::Config::builder().behavior_version(BehaviorVersion::latest()).build();
    let partitions = options.partitions.unwrap_or(PARTITIONS);
    let mut inner = inner(options, Client::from_conf(config));
    inner.partitions = partitions;
    inner.explain(asked)
}

/// The parts of a store that has not spoken with a server yet.
fn inner(options: Options, client: Client) -> Inner {
    let Options { prefix, billing, clock, pauses, clock_skew, schema_lease, .. } = options;
    let catalog = Catalog::new(&prefix, schema_lease);
    let tables = LogTables {
        operations: catalog.physical("statehouse_operations"),
        pending: catalog.physical("statehouse_pending"),
        log: catalog.physical("statehouse_log"),
    };
    Inner {
        wire: Wire::new(client, pauses, options.transaction_items),
        catalog,
        tables,
        partitions: 0,
        clock,
        clock_skew,
        stamps: Stamps::new(),
        billing,
        sequencing: Vec::new(),
        commits: watch::Sender::new(0),
        sweeping: AtomicBool::new(false),
        closed: AtomicBool::new(false),
    }
}

/// A client for the server of the options. It never retries by itself: see `wire`.
async fn connect(options: &Options) -> Client {
    let timeouts = TimeoutConfig::builder()
        .connect_timeout(options.request_timeout.min(Duration::from_secs(3)))
        .operation_attempt_timeout(options.request_timeout)
        .build();
    let mut loader = aws_config::defaults(BehaviorVersion::latest())
        .retry_config(RetryConfig::disabled())
        .timeout_config(timeouts);
    if let Some(region) = &options.region {
        loader = loader.region(Region::new(region.clone()));
    }
    if let Some(endpoint) = &options.endpoint {
        loader = loader.endpoint_url(endpoint);
    }
    if options.credentials == Credentials::Emulator {
        if options.region.is_none() {
            loader = loader.region(Region::new("us-east-1"));
        }
        let emulator =
            aws_sdk_dynamodb::config::Credentials::new("statehouse", "statehouse", None, None, "emulator");
        loader = loader.credentials_provider(emulator);
    }
    Client::new(&loader.load().await)
}

fn settings_key() -> Item {
    Item::from([(PK.to_owned(), item::string("store"))])
}

/// The settings of a store; `None` when there is no store yet.
async fn settings(inner: &Inner) -> Result<Option<Item>, StoreError> {
    let meta = inner.catalog.meta();
    match inner.wire.get(&meta, settings_key(), true).await {
        Ok(item) => Ok(item),
        Err(Fault::NoTable(_)) => Ok(None),
        Err(fault) => Err(fault.into_error(&meta)),
    }
}

fn check_settings(inner: &Inner, settings: &Item, asked: Option<u32>) -> Result<u32, StoreError> {
    let meta = inner.catalog.meta();
    match item::integer(settings, "format") {
        Some(FORMAT) => {}
        Some(other) => {
            let why = format!("it is stored in form {other}; this program knows form {FORMAT}");
            return Err(StoreError::schema(meta, why));
        }
        None => return Err(StoreError::corrupt(meta, "its settings have no format")),
    }
    let stored = item::integer(settings, "partitions").and_then(|count| u32::try_from(count).ok());
    let stored = stored.filter(|count| *count > 0);
    let stored = stored.ok_or_else(|| StoreError::corrupt(&meta, "its settings have no partitions"))?;
    match asked {
        Some(asked) if asked != stored => {
            let why =
                format!("the log has {stored} partitions and {asked} were asked for; the number is fixed");
            Err(StoreError::schema(meta, why))
        }
        _ => Ok(stored),
    }
}

/// Creates the store's own tables. The settings come last: who finds them finds everything else.
async fn create(inner: &Inner, partitions: Option<u32>) -> Result<u32, StoreError> {
    let (text, number) = (ScalarAttributeType::S, ScalarAttributeType::N);
    let LogTables { operations, pending, log } = &inner.tables;
    let meta = inner.catalog.meta();
    inner.create_own(operations, (PK, text.clone()), None).await?;
    inner.create_own(pending, (PARTITION, number.clone()), Some((PLACE, text.clone()))).await?;
    inner.create_own(log, (PARTITION, number.clone()), Some((OFFSET, number))).await?;
    inner.create_own(&meta, (PK, text), None).await?;
    let mut terms = Terms::default();
    let mut clauses = Clauses::default();
    clauses.set(&mut terms, "format", item::number(FORMAT));
    clauses.set(&mut terms, "partitions", item::number(partitions.unwrap_or(PARTITIONS).into()));
    let condition = Condition::missing(&mut terms, "format");
    let action = Action::update(&meta, settings_key(), &clauses, condition, terms);
    match inner.wire.write_one(&action).await {
        // Stored now, before by another process, or perhaps: the settings themselves tell.
        Ok(_) | Err(Fault::Open(_)) => {}
        Err(fault) => return Err(fault.into_error(&meta)),
    }
    let stored = settings(inner).await?;
    let stored = stored.ok_or_else(|| StoreError::unavailable(format!("{meta} could not be written")))?;
    check_settings(inner, &stored, partitions)
}

#[async_trait]
impl Store for DynamoStore {
    fn engine(&self) -> &'static str {
        "dynamodb"
    }

    fn partitions(&self) -> u32 {
        self.inner.partitions
    }

    async fn migrate(&self, schema: &Schema, how: Migrate) -> Result<Vec<Change>, StoreError> {
        self.inner.open()?;
        self.inner.migrate(schema, how).await
    }

    async fn commit(&self, plan: &Plan) -> Result<Commit, StoreError> {
        self.inner.open()?;
        self.inner.commit(plan).await
    }

    async fn resolve(&self, tenant: &Tenant, operation: &str) -> Result<Resolution, StoreError> {
        self.inner.open()?;
        self.inner.resolve(tenant, operation).await
    }

    async fn find_operation(&self, tenant: &Tenant, operation: &str) -> Result<Option<Record>, StoreError> {
        self.inner.open()?;
        self.inner.find_operation(tenant, operation).await
    }

    async fn get(
        &self,
        addresses: &[Address],
        consistency: Consistency,
    ) -> Result<Vec<Option<Row>>, StoreError> {
        self.inner.open()?;
        self.inner.get(addresses, consistency).await
    }

    async fn query(&self, query: &Query) -> Result<Page, StoreError> {
        self.inner.open()?;
        self.inner.query(query).await
    }

    async fn scan(&self, scan: &Scan) -> Result<Page, StoreError> {
        self.inner.open()?;
        self.inner.scan(scan).await
    }

    async fn read_log(&self, partition: u32, after: u64, limit: usize) -> Result<LogPage, StoreError> {
        self.inner.open()?;
        self.inner.read_log(partition, after, limit).await
    }

    async fn wait_log(&self, seen: &[u64], at_most: Duration) -> Result<Vec<u64>, StoreError> {
        self.inner.open()?;
        self.inner.wait_log(seen, at_most).await
    }

    async fn trim_log(&self, partition: u32, through: u64) -> Result<(), StoreError> {
        self.inner.open()?;
        self.inner.trim_log(partition, through).await
    }

    fn explain(&self, asked: ExplainRequest<'_>) -> Explanation {
        self.inner.explain(asked)
    }

    async fn close(&self) {
        self.inner.closed.store(true, Ordering::SeqCst);
        self.inner.wake();
    }
}
