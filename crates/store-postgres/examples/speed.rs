//! How fast a guarded update with its log record is, next to the same thing written by hand.
//!
//! By hand: one connection for each caller, one prepared statement that updates the row under a guard and inserts an
//! outbox row. The store: the same callers, one store, without and with row-level security. The contenders take
//! turns in short slices, so that whatever else the machine does falls on all of them, and what is printed is the
//! median. What counts is the ratio.
//!
//! ```text
//! STATEHOUSE_TEST_POSTGRES=$(scripts/postgres start DIR | tail -n 1) \
//!     cargo run --release -p statehouse-store-postgres --example speed [callers …]
//! ```

#![expect(clippy::print_stdout, reason = "this is a program that prints what it measured")]

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use statehouse_store::clock::Stopwatch;
use statehouse_store::guard::column;
use statehouse_store::{
    Commit, Entry, EventTemplate, Migrate, Plan, Random, Schema, Step, Store, Table, Tenant, Type,
};
use statehouse_store_postgres::{PostgresOptions, PostgresStore};
use tokio::task::JoinSet;
use tokio_postgres::{Client, NoTls, Statement};

const ROWS: u64 = 10_000;
const SLICE: Duration = Duration::from_millis(700);
const SLICES: usize = 7;
const SCHEMA: &str = "statehouse_speed";
const ROLE: &str = "statehouse_speed_role";

#[tokio::main]
async fn main() -> Result<()> {
    let url = std::env::var("STATEHOUSE_TEST_POSTGRES")
        .context("STATEHOUSE_TEST_POSTGRES has to hold the URL of a PostgreSQL server")?;
    let asked: Vec<u64> =
        std::env::args().skip(1).map(|callers| callers.parse()).collect::<Result<_, _>>()?;
    let asked = if asked.is_empty() { vec![1, 16, 64, 256] } else { asked };
    for callers in asked {
        // The server takes a limited number of connections.
        let by_hand = ByHand::set_up(&url, callers.min(128)).await?;
        let plain = House::set_up(&url, false).await?;
        let fenced = House::set_up(&url, true).await?;
        let mut rates: [Vec<f64>; 3] = Default::default();
        for slice in 0..=SLICES {
            let turn = [
                by_hand.run(callers.min(128), slice).await?,
                plain.run(callers, slice).await?,
                fenced.run(callers, slice).await?,
            ];
            // The first slice warms up caches and plans.
            for (rates, rate) in rates.iter_mut().zip(turn).filter(|_| slice > 0) {
                rates.push(rate);
            }
        }
        let [by_hand, store, rls] = rates.map(median);
        println!(
            "{callers:>3} callers: by hand {by_hand:.0}/s; store {store:.0}/s = {:.2} ×; with rls {rls:.0}/s = {:.2} × \
             of without",
            store / by_hand,
            rls / store,
        );
        println!("             {:?}", plain.store.counts());
        plain.tear_down().await?;
        fenced.tear_down().await?;
    }
    Ok(())
}

fn median(mut rates: Vec<f64>) -> f64 {
    rates.sort_by(f64::total_cmp);
    rates.get(rates.len() / 2).copied().unwrap_or_default()
}

/// Runs `work` in so many tasks for the length of a slice, and returns how often it was done in a second.
async fn slice<F, Fut>(callers: u64, mut make: F) -> Result<f64>
where
    F: FnMut(u64, Arc<AtomicU64>) -> Fut,
    Fut: Future<Output = Result<()>> + Send + 'static,
{
    let mut tasks = JoinSet::new();
    let count = Arc::new(AtomicU64::new(0));
    let watch = Stopwatch::start();
    for number in 0..callers {
        tasks.spawn(make(number, count.clone()));
    }
    while let Some(done) = tasks.join_next().await {
        done??;
    }
    Ok(count.load(Ordering::Relaxed) as f64 / watch.elapsed().as_secs_f64())
}

struct ByHand {
    clients: Vec<Arc<(Client, Statement)>>,
}

impl ByHand {
    async fn set_up(url: &str, callers: u64) -> Result<ByHand> {
        let (client, connection) = tokio_postgres::connect(url, NoTls).await?;
        tokio::spawn(connection);
        let schema = format!("{SCHEMA}_by_hand");
        client
            .batch_execute(&format!(
                "drop schema if exists {schema} cascade; create schema {schema};
                 create table {schema}.profiles (tenant text not null, user_id bigint not null,
                     display_name text not null, bio text, status text not null, version bigint not null default 1,
                     primary key (tenant, user_id));
                 create table {schema}.outbox (id bigserial primary key, tenant text not null,
                     operation text not null, at timestamptz not null, event jsonb not null,
                     unique (tenant, operation));
                 insert into {schema}.profiles
                     select 'acme', n, 'name', 'bio', 'ACTIVE', 1 from generate_series(0, {ROWS} - 1) n;
                 analyze"
            ))
            .await?;
        let text = format!(
            "with written as (
                 update {schema}.profiles set display_name = $3, version = version + 1
                 where tenant = $1 and user_id = $2 and status = 'ACTIVE' returning *
             )
             insert into {schema}.outbox (tenant, operation, at, event)
             select $1, $4, now(), jsonb_build_object('name', 'profile.updated', 'row', to_jsonb(written))
             from written returning id"
        );
        let mut clients = Vec::new();
        for _ in 0..callers {
            let (client, connection) = tokio_postgres::connect(url, NoTls).await?;
            tokio::spawn(connection);
            let statement = client.prepare(&text).await?;
            clients.push(Arc::new((client, statement)));
        }
        Ok(ByHand { clients })
    }

    async fn run(&self, callers: u64, turn: usize) -> Result<f64> {
        let mut clients = self.clients.iter().cloned();
        slice(callers, |number, count| {
            let client = clients.next();
            async move {
                let Some(client) = client else { return Ok(()) };
                let (client, statement) = &*client;
                let mut random = Random::seeded(number);
                let watch = Stopwatch::start();
                let mut done = 0_u64;
                while watch.elapsed() < SLICE {
                    let id = i64::try_from(random.below(ROWS))?;
                    let (name, operation) = (format!("name {done}"), format!("op-{turn}-{number}-{done}"));
                    let rows = client.query(statement, &[&"acme", &id, &name, &operation]).await?;
                    ensure!(rows.len() == 1, "the guard did not hold");
                    count.fetch_add(1, Ordering::Relaxed);
                    done += 1;
                }
                Ok(())
            }
        })
        .await
    }
}

struct House {
    store: Arc<PostgresStore>,
    options: PostgresOptions,
    profiles: Arc<Table>,
}

impl House {
    async fn set_up(url: &str, rls: bool) -> Result<House> {
        let (client, connection) = tokio_postgres::connect(url, NoTls).await?;
        tokio::spawn(connection);
        // Left over from an earlier run, or not there: both are fine.
        let _ = client.batch_execute(&format!("create role {ROLE} login")).await;
        let mut options = PostgresOptions::from_url(url)?;
        options.schema = format!("{SCHEMA}_{}", if rls { "rls" } else { "plain" });
        options.row_level_security = rls;
        options.runtime_role = rls.then(|| ROLE.to_owned());
        PostgresStore::erase(&options).await?;
        let profiles = Table::named("profiles")
            .partition("user_id", Type::Int)
            .required("display_name", Type::Text)
            .optional("bio", Type::Text)
            .defaulted("status", Type::Text, "ACTIVE")
            .build()?;
        let mut store = Arc::new(PostgresStore::open(options.clone()).await?);
        store.migrate(&Schema::new([profiles.clone()])?, Migrate::Apply).await?;
        if rls {
            // The owner has made the tables; the work is done by the role itself.
            let mut driver: tokio_postgres::Config = url.parse()?;
            driver.user(ROLE);
            let mut direct = PostgresOptions::new(driver);
            direct.schema = options.schema.clone();
            direct.row_level_security = true;
            store = Arc::new(PostgresStore::open(direct).await?);
        }
        let fill = format!(
            "insert into {}.profiles (tenant, user_id, display_name, bio) \
             select 'acme', n, 'name', 'bio' from generate_series(0, {ROWS} - 1) n; analyze",
            options.schema
        );
        client.batch_execute(&fill).await?;
        Ok(House { store, options, profiles })
    }

    async fn run(&self, callers: u64, turn: usize) -> Result<f64> {
        let tenant = Tenant::new("acme")?;
        slice(callers, |number, count| {
            let (store, profiles, tenant) = (self.store.clone(), self.profiles.clone(), tenant.clone());
            async move {
                let mut random = Random::seeded(number);
                let watch = Stopwatch::start();
                let mut done = 0_u64;
                while watch.elapsed() < SLICE {
                    let id = i64::try_from(random.below(ROWS))?;
                    let updated = EventTemplate::named("profile.updated").with_row_of(0);
                    let plan = Plan::of(&tenant, format!("op-{turn}-{number}-{done}"))
                        .step(
                            Step::update(&profiles, [id.into()])
                                .guard(column("status").eq("ACTIVE"))
                                .set("display_name", format!("name {done}")),
                        )
                        .log(Entry::about("profile", id.to_string()).event(updated));
                    let commit = store.commit(&plan.build()?).await?;
                    ensure!(matches!(commit, Commit::Applied(_)), "the guard did not hold");
                    count.fetch_add(1, Ordering::Relaxed);
                    done += 1;
                }
                Ok(())
            }
        })
        .await
    }

    async fn tear_down(self) -> Result<()> {
        self.store.close().await;
        PostgresStore::erase(&self.options).await?;
        Ok(())
    }
}
