//! The store: opens the tables on a server and implements the contract.

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use async_trait::async_trait;
use aws_config::{BehaviorVersion, Region, retry::RetryConfig, timeout::TimeoutConfig};
use aws_sdk_dynamodb::Client;
use aws_sdk_dynamodb::types::ScalarAttributeType;
use statehouse_store::{
    Address, BlankRange, BlankedPage, Commit, Consistency, ExplainRequest, Explanation, LogPage, Migrate,
    Page, Plan, Query, Record, Resolution, Row, Scan, Schema, SchemaChange, Segment, Store, StoreError,
    Tenant, Time,
};
use tokio::sync::watch;

use crate::catalog::Catalog;
use crate::client::DynamoClient;
use crate::expression::{Condition, ExpressionPlaceholders};
use crate::inner::DynamoInner;
use crate::item::{self, Item, PK};
use crate::item_write::{ItemWrite, UpdateClauses};
use crate::options::{Credentials, DynamoOptions};
use crate::record::{LogTables, OFFSET, PARTITION, SORT_KEY};
use crate::request_error::RequestError;
use crate::stamps::StampClock;

/// The version of the stored format. This code rejects later versions.
const FORMAT: i64 = 1;
/// Partitions of a new log, unless the options say otherwise.
const PARTITIONS: u32 = 16;

/// A store on DynamoDB. Clones share one connection.
#[derive(Clone)]
pub struct DynamoStore {
    inner: Arc<DynamoInner>,
}

impl fmt::Debug for DynamoStore {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "DynamoStore({})", self.inner.catalog.physical("*"))
    }
}

impl DynamoStore {
    /// Opens the store of a prefix, and creates it if there is none.
    pub async fn open(options: DynamoOptions) -> Result<DynamoStore, StoreError> {
        options.check()?;
        let client = connect(&options).await;
        let partitions = options.partitions;
        let mut inner = inner(options, client);
        inner.partitions = match settings(&inner).await? {
            Some(settings) => check_settings(&inner, &settings, partitions)?,
            None => create(&inner, partitions).await?,
        };
        inner.sequencing = (0..inner.partitions).map(|_| tokio::sync::Mutex::default()).collect();
        inner.catalog.refresh(&inner.client).await?;
        Ok(DynamoStore { inner: Arc::new(inner) })
    }

    /// Deletes all tables of a prefix. For tests and for uninstallation.
    pub async fn erase(options: DynamoOptions) -> Result<(), StoreError> {
        options.check()?;
        let client = connect(&options).await;
        let prefix = format!("{}.", options.prefix);
        let client = DynamoClient::new(client, options.retry_clock, options.transaction_items);
        let mut after: Option<String> = None;
        loop {
            // Names are listed in order from the prefix on, so that few other tables are listed.
            let start = after.clone().unwrap_or_else(|| prefix.clone());
            let request = || client.sdk.list_tables().exclusive_start_table_name(&start).send();
            let page = client
                .send_with_retries(request)
                .await
                .map_err(|error| error.into_error("the list of tables"))?;
            let names = page.table_names.unwrap_or_default();
            let own: Vec<&String> = names.iter().filter(|name| name.starts_with(&prefix)).collect();
            for name in &own {
                let deleted =
                    client.send_with_retries(|| client.sdk.delete_table().table_name(*name).send()).await;
                match deleted {
                    Ok(_) | Err(RequestError::TableNotFound(_) | RequestError::TableInUse(_)) => {}
                    Err(error) => return Err(error.into_error(name)),
                }
            }
            after = page.last_evaluated_table_name.filter(|_| own.len() == names.len());
            if after.is_none() {
                return Ok(());
            }
        }
    }
}

/// The requests of a store with these options and a log of the default size. No request is sent.
pub fn explain(options: DynamoOptions, asked: ExplainRequest<'_>) -> Explanation {
    let config = aws_sdk_dynamodb::Config::builder().behavior_version(BehaviorVersion::latest()).build();
    let partitions = options.partitions.unwrap_or(PARTITIONS);
    let mut inner = inner(options, Client::from_conf(config));
    inner.partitions = partitions;
    inner.explain(asked)
}

/// The state of a store before its first request.
fn inner(options: DynamoOptions, client: Client) -> DynamoInner {
    let DynamoOptions { prefix, billing, clock, retry_clock, clock_skew, schema_lease, .. } = options;
    let catalog = Catalog::new(&prefix, schema_lease);
    let tables = LogTables {
        operations: catalog.physical("statehouse_operations"),
        pending: catalog.physical("statehouse_pending"),
        log: catalog.physical("statehouse_log"),
    };
    DynamoInner {
        client: DynamoClient::new(client, retry_clock, options.transaction_items),
        catalog,
        tables,
        partitions: 0,
        clock,
        clock_skew,
        stamps: StampClock::new(),
        billing,
        sequencing: Vec::new(),
        commits: watch::Sender::new(0),
        deleting_tombstones: AtomicBool::new(false),
        closed: AtomicBool::new(false),
    }
}

/// An SDK client for the server of the options. It does not retry: see `client`.
async fn connect(options: &DynamoOptions) -> Client {
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

/// The settings of a store; `None` if the store does not exist.
async fn settings(inner: &DynamoInner) -> Result<Option<Item>, StoreError> {
    let meta = inner.catalog.meta();
    match inner.client.get(&meta, settings_key(), true).await {
        Ok(item) => Ok(item),
        Err(RequestError::TableNotFound(_)) => Ok(None),
        Err(error) => Err(error.into_error(&meta)),
    }
}

fn check_settings(inner: &DynamoInner, settings: &Item, asked: Option<u32>) -> Result<u32, StoreError> {
    let meta = inner.catalog.meta();
    match item::integer(settings, "format") {
        Some(FORMAT) => {}
        Some(other) => {
            let why = format!("it has format version {other}; this program supports version {FORMAT}");
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

/// Creates the system tables. The settings are written last: if they exist, everything else exists.
async fn create(inner: &DynamoInner, partitions: Option<u32>) -> Result<u32, StoreError> {
    let (text, number) = (ScalarAttributeType::S, ScalarAttributeType::N);
    let LogTables { operations, pending, log } = &inner.tables;
    let meta = inner.catalog.meta();
    inner.create_system_table(operations, (PK, text.clone()), None).await?;
    inner.create_system_table(pending, (PARTITION, number.clone()), Some((SORT_KEY, text.clone()))).await?;
    inner.create_system_table(log, (PARTITION, number.clone()), Some((OFFSET, number))).await?;
    inner.create_system_table(&meta, (PK, text), None).await?;
    let mut terms = ExpressionPlaceholders::default();
    let mut clauses = UpdateClauses::default();
    clauses.set(&mut terms, "format", item::number(FORMAT));
    clauses.set(&mut terms, "partitions", item::number(partitions.unwrap_or(PARTITIONS).into()));
    let condition = Condition::missing(&mut terms, "format");
    let action = ItemWrite::update(&meta, settings_key(), &clauses, condition, terms);
    match inner.client.write_one(&action).await {
        // Written by this call or by another process, or unknown: the stored settings decide.
        Ok(_) | Err(RequestError::UnknownOutcome(_)) => {}
        Err(error) => return Err(error.into_error(&meta)),
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

    async fn migrate(&self, schema: &Schema, how: Migrate) -> Result<Vec<SchemaChange>, StoreError> {
        self.inner.check_open()?;
        self.inner.migrate(schema, how).await
    }

    async fn commit(&self, plan: &Plan) -> Result<Commit, StoreError> {
        self.inner.check_open()?;
        self.inner.commit(plan).await
    }

    async fn resolve(&self, tenant: &Tenant, operation: &str) -> Result<Resolution, StoreError> {
        self.inner.check_open()?;
        self.inner.resolve(tenant, operation).await
    }

    async fn find_operation(&self, tenant: &Tenant, operation: &str) -> Result<Option<Record>, StoreError> {
        self.inner.check_open()?;
        self.inner.find_operation(tenant, operation).await
    }

    async fn get(
        &self,
        addresses: &[Address],
        consistency: Consistency,
    ) -> Result<Vec<Option<Row>>, StoreError> {
        self.inner.check_open()?;
        self.inner.get(addresses, consistency).await
    }

    async fn query(&self, query: &Query) -> Result<Page, StoreError> {
        self.inner.check_open()?;
        self.inner.query(query).await
    }

    async fn scan(&self, scan: &Scan) -> Result<Page, StoreError> {
        self.inner.check_open()?;
        self.inner.scan(scan).await
    }

    async fn segments(&self, scan: &Scan, max: usize) -> Result<Vec<Segment>, StoreError> {
        self.inner.check_open()?;
        self.inner.catalog.live(&self.inner.client, scan.read_table()).await?;
        self.inner.segments(scan, max)
    }

    async fn read_log(&self, partition: u32, after: u64, limit: usize) -> Result<LogPage, StoreError> {
        self.inner.check_open()?;
        self.inner.read_log(partition, after, limit).await
    }

    async fn wait_log(&self, seen: &[u64], at_most: Duration) -> Result<Vec<u64>, StoreError> {
        self.inner.check_open()?;
        self.inner.wait_log(seen, at_most).await
    }

    async fn trim_log(&self, partition: u32, through: u64) -> Result<(), StoreError> {
        self.inner.check_open()?;
        self.inner.trim_log(partition, through).await
    }

    async fn blank_events(&self, range: &BlankRange) -> Result<BlankedPage, StoreError> {
        self.inner.check_open()?;
        self.inner.blank_events(range).await
    }

    async fn scrub(&self) -> Result<(), StoreError> {
        self.inner.check_open()
    }

    async fn now(&self) -> Result<Time, StoreError> {
        self.inner.check_open()?;
        Ok(self.inner.clock.now())
    }

    fn explain(&self, asked: ExplainRequest<'_>) -> Explanation {
        self.inner.explain(asked)
    }

    async fn close(&self) {
        self.inner.closed.store(true, Ordering::SeqCst);
        self.inner.notify_log_waiters();
    }
}
