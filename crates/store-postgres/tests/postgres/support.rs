//! Namespaces on the server, tables, plans.

use std::sync::Arc;

use statehouse_store::guard::column;
use statehouse_store::{
    Entry, EventTemplate, Expr, Migrate, Operand, Plan, Random, Schema, Step, Store, Table, Tenant, Type,
    Value,
};
use statehouse_store_postgres::{PostgresOptions, PostgresStore};
use tokio_postgres::{Client, NoTls};

/// Where the server is.
pub fn url() -> String {
    std::env::var("STATEHOUSE_TEST_POSTGRES")
        .expect("STATEHOUSE_TEST_POSTGRES has to hold the URL that `scripts/postgres start DIR` prints")
}

/// A connection past the store.
pub async fn raw() -> Client {
    let (client, connection) =
        tokio_postgres::connect(&url(), NoTls).await.expect("the server has to be reachable");
    tokio::spawn(connection);
    client
}

/// A PostgreSQL schema of this test's own; gone with it.
pub struct Namespace {
    pub options: PostgresOptions,
}

impl Namespace {
    pub fn new() -> Namespace {
        Namespace::at(&url())
    }

    /// At a URL that leads to the server, by whatever way.
    pub fn at(url: &str) -> Namespace {
        let mut options = PostgresOptions::from_url(url).unwrap();
        options.schema = format!("test_{:x}", Random::from_entropy().below(1 << 48));
        Namespace { options }
    }

    pub fn schema(&self) -> &str {
        &self.options.schema
    }

    pub async fn open(&self) -> PostgresStore {
        PostgresStore::open(self.options.clone()).await.unwrap()
    }

    /// Opens the store with these tables.
    pub async fn open_with(&self, tables: &[&Arc<Table>]) -> PostgresStore {
        let store = self.open().await;
        store.migrate(&schema_of(tables), Migrate::Apply).await.unwrap();
        store
    }
}

impl Drop for Namespace {
    fn drop(&mut self) {
        let options = self.options.clone();
        let erased = std::thread::spawn(move || {
            let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
            runtime.block_on(PostgresStore::erase(&options))
        });
        drop(erased.join());
    }
}

pub fn schema_of(tables: &[&Arc<Table>]) -> Schema {
    Schema::new(tables.iter().map(|table| (*table).clone())).unwrap()
}

pub fn tenant(name: &str) -> Tenant {
    Tenant::new(name).unwrap()
}

/// `id` and a number.
pub fn counters(name: &str) -> Arc<Table> {
    Table::named(name).partition("id", Type::Text).defaulted("n", Type::Int, 0).build().unwrap()
}

/// The running example of the documentation.
pub fn profiles() -> Arc<Table> {
    Table::named("profiles")
        .partition("user_id", Type::Int)
        .required("display_name", Type::Text)
        .optional("bio", Type::Text)
        .optional("avatar_url", Type::Text)
        .defaulted("status", Type::Text, "ACTIVE")
        .optional("updated_at", Type::Time)
        .index("by_status", &["status"], &["updated_at"])
        .build()
        .unwrap()
}

/// Jobs of a queue, which workers find by shard and due time whosever they are.
pub fn jobs() -> Arc<Table> {
    Table::named("jobs")
        .partition("queue", Type::Text)
        .sort("number", Type::Int)
        .optional("due_shard", Type::Int)
        .optional("due_at", Type::Time)
        .global_index("due", &["due_shard"], &["due_at"])
        .build()
        .unwrap()
}

/// Adds 1 to a counter, creating it if need be.
pub fn increment(table: &Arc<Table>, id: &str) -> Step {
    Step::upsert(table, [Value::from(id)]).set("n", plus_one())
}

/// `coalesce(n, 0) + 1`.
pub fn plus_one() -> Expr {
    Expr::Add(Operand::Coalesce("n".into(), 0.into()), 1.into())
}

/// `n + 1` on a counter that is there.
pub fn bump(table: &Arc<Table>, id: &str) -> Step {
    Step::update(table, [Value::from(id)]).set("n", column("n").add(1))
}

/// A plan of these steps with an entry about this key, which takes in the row of the first step.
pub fn logged(tenant: &Tenant, operation: &str, key: &str, steps: Vec<Step>) -> Plan {
    let entry = Entry::about("counter", key).event(EventTemplate::named("counter.changed").with_row_of(0));
    Plan::of(tenant, operation).steps(steps).log(entry).build().unwrap()
}
