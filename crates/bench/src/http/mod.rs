//! HTTP: the server on SQLite, against a bare axum server that reads JSON and sends it back, and against one that is
//! made by hand for one table.
//!
//! The load comes from a second process on the same machine, which is this benchmark started again: a client that costs
//! little, the same for all servers, with the same connections kept alive from round to round. All servers live in
//! this process, one at a time under load, and the machine's cores are shared with the client, as they are where such
//! figures are usually taken.

mod by_hand;
mod echo;
pub mod fairness;
mod generator;
mod start;

use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, Result};
use statehouse::{Blueprint, House, Operation, Request};
use statehouse_server::{Config, Server, logs};
use statehouse_store::Tenant;
use statehouse_store::clock::Stopwatch;
use tokio::net::TcpListener;
use tokio::task::JoinSet;

use self::generator::{Generator, HttpLoad};
use crate::load::{self, LoadRound, median, ratio};
use crate::report;

pub use generator::serve as generate;
pub use start::serve as serve_only;

/// Connections of the load generator.
pub const CONNECTIONS: usize = 64;
/// Rows that belong to one connection. No other connection touches them, so no write loses a race.
pub const ROWS_EACH: usize = 100;
const ROUNDS: usize = 9;
const SPAN: Duration = Duration::from_millis(1_000);
/// Calls in flight while the table is filled.
const FILLING: usize = 256;

const BLUEPRINT: &str = include_str!("../../../../systems/profile/statehouse.toml");

/// Measures and prints.
pub async fn run() -> Result<()> {
    start::run().await?;
    let folder = tempfile::tempdir()?;
    // What the server says at its default level is written, as it would be for a user who keeps it.
    let _logs = logs::start(logs::LogOptions::default(), std::fs::File::create(folder.path().join("log"))?)?;
    let bare = echo::start().await?;
    let by_hand = by_hand::start(folder.path()).await?;
    let ours = serve(folder.path()).await?;
    let mut generator = Generator::start()?;
    let mut measured: [Vec<LoadRound>; 4] = Default::default();
    let mut cost: [Vec<f64>; 4] = Default::default();
    let loads = [
        (HttpLoad::Echo, bare),
        (HttpLoad::Update, ours),
        (HttpLoad::CachedRead, ours),
        (HttpLoad::Update, by_hand),
    ];
    let mut synchronized = Vec::new();
    for round in 0..=ROUNDS {
        synchronized.push(synchronize(folder.path())?);
        for (number, (load, port)) in loads.into_iter().enumerate() {
            let before = load::processor_seconds();
            let figures = generator.round(load, port, SPAN).await?;
            let spent = load::processor_seconds().zip(before).map(|(after, before)| after - before);
            // The first one opens connections and fills the cache.
            if round > 0
                && let (Some(rounds), Some(costs)) = (measured.get_mut(number), cost.get_mut(number))
            {
                rounds.push(figures);
                costs.extend(spent.map(|seconds| seconds * 1e6 / (figures.rate * SPAN.as_secs_f64())));
            }
        }
    }
    let [echoed, updated, read, hand_made] = &measured;
    report::heading(&format!("HTTP: {CONNECTIONS} connections from another process, SQLite"));
    for (name, rounds, cost) in [
        ("bare axum, JSON echo", echoed, &cost[0]),
        ("update under version", updated, &cost[1]),
        ("cached read", read, &cost[2]),
        ("update under version, a server by hand for this one table", hand_made, &cost[3]),
    ] {
        report::measured(name, median(rounds)?);
        report::figure(&format!("{name}: processor time of the server, each"), load::middle(cost)?, "µs");
    }
    report::ratio("update under version / echo", ratio(updated, echoed)?, 0.4);
    report::ratio("cached read / echo", ratio(read, echoed)?, 0.7);
    report::compared("the server by hand / echo", ratio(hand_made, echoed)?);
    report::compared("update under version / the server by hand", ratio(updated, hand_made)?);
    report::figure(
        "one synchronization of this disk, in the midst of it",
        load::middle(&synchronized)? * 1e6,
        "µs",
    );
    if let Some(load) = load::machine() {
        report::note("load of the machine (1, 5, 15 minutes)", &load);
    }
    Ok(())
}

/// How long this disk takes to make a page durable, in seconds. A durable write cannot be answered sooner.
fn synchronize(folder: &Path) -> Result<f64> {
    use std::io::Write as _;
    let mut file = std::fs::OpenOptions::new().create(true).append(true).open(folder.join("page"))?;
    file.write_all(&[7; 4096])?;
    let watch = Stopwatch::start();
    file.sync_data()?;
    Ok(watch.elapsed().as_secs_f64())
}

/// A server on a new file, with its rows.
async fn serve(folder: &Path) -> Result<u16> {
    let blueprint = Blueprint::read("statehouse.toml", BLUEPRINT)?;
    let url = format!("sqlite:{}", folder.join("house.db").display());
    let house = Arc::new(House::open(&url, &blueprint).await?);
    fill(&house).await?;
    let server = Server::new(house, Config::default()).await?;
    let listener = TcpListener::bind("127.0.0.1:0").await?;
    let port = listener.local_addr()?.port();
    tokio::spawn(async move { server.serve(listener, std::future::pending()).await });
    Ok(port)
}

async fn fill(house: &Arc<House>) -> Result<()> {
    let tenant = Tenant::new("default")?;
    let mut filling = JoinSet::new();
    // One half is for updates, the other for reads.
    for user in 0..2 * CONNECTIONS * ROWS_EACH {
        let mut input = generator::fields(0);
        input.insert("user_id".into(), user.into());
        let request = Request { action: "profile.create".into(), key: Vec::new(), input, expected: None };
        let (house, tenant) = (house.clone(), tenant.clone());
        filling.spawn(async move { house.call(&tenant, request, Operation::default()).await });
        if filling.len() >= FILLING {
            filling.join_next().await.context("nothing is being filled")???;
        }
    }
    while let Some(filled) = filling.join_next().await {
        filled??;
    }
    Ok(())
}
