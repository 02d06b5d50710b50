//! Batches of 16 updates on PostgreSQL whose rows belong to 1, 4 or all 16 partitions of the log.
//!
//! A batch leaves a record in each partition that its rows belong to, and takes the head of each of them. Batches over one
//! partition meet only those of the same partition; batches over all partitions meet all others. Each caller changes rows of its
//! own, so they never meet at a row.

use std::sync::Arc;
use std::time::Duration;

use anyhow::{Result, ensure};
use serde_json::json;
use statehouse::{Expected, Operation, Request};
use statehouse_store::Tenant;
use statehouse_store::log::partition_of;

use crate::load::{self, LoadRound, drive, median, ratio};
use crate::report;
use crate::servers::BenchServer;
use crate::site::{Site, Tenancy, request};

const BLUEPRINT: &str = "
[house]
name = \"bench\"

[entity.profile]
key    = { user_id = \"int\" }
fields = { display_name = \"text\" }
";
/// The tenant of all sites.
const TENANT: &str = "acme";
/// Partitions of the log, as by default.
const PARTITIONS: u32 = 16;
/// How many of them a batch touches, in turn.
const TOUCHED: [u32; 3] = [1, 4, PARTITIONS];
/// Updates of one batch.
const IN_BATCH: u32 = 16;
/// Callers, in turn.
const CALLERS: [u32; 2] = [1, 16];
/// Rows that are there, enough for each caller to find its own in each partition.
const ROWS: u32 = 8_000;
const ROUNDS: usize = 7;
const SPAN: Duration = Duration::from_millis(700);

/// Measures and prints.
pub async fn run() -> Result<()> {
    let server = BenchServer::postgres()?;
    let site = Site::at(&server.url).await?;
    let house = site.house(BLUEPRINT).await?;
    ensure!(house.house.store().partitions() == PARTITIONS, "the store has another number of partitions");
    house.fill((0..ROWS).map(|user| vec![create(user)])).await?;
    server.settle().await?;
    let by_partition = rows_by_partition()?;
    for callers in CALLERS {
        let mut rounds = [Vec::new(), Vec::new(), Vec::new()];
        for _ in 0..ROUNDS {
            for (touched, rounds) in TOUCHED.into_iter().zip(&mut rounds) {
                rounds.push(batches(&house, callers, touched, &by_partition).await?);
            }
        }
        report::heading(&format!("PostgreSQL: batches of {IN_BATCH} updates, {callers} caller(s)"));
        let [one, ..] = &rounds;
        for (touched, rounds) in TOUCHED.into_iter().zip(&rounds) {
            report::measured(&format!("batches over {touched} of {PARTITIONS} partitions"), median(rounds)?);
            report::compared(&format!("over {touched} / over 1"), ratio(rounds, one)?);
        }
    }
    if let Some(load) = load::machine() {
        report::note("load of the machine (1, 5, 15 minutes)", &load);
    }
    site.close().await;
    Ok(())
}

fn create(user: u32) -> Request {
    request("profile.create", vec![], json!({"user_id": user, "display_name": "a name"}))
}

/// The rows of each partition.
fn rows_by_partition() -> Result<Arc<Vec<Vec<u32>>>> {
    let tenant = Tenant::new(TENANT)?;
    let mut rows = vec![Vec::new(); PARTITIONS as usize];
    for user in 0..ROWS {
        let partition = partition_of(&tenant, "profile", &user.to_string(), PARTITIONS);
        if let Some(rows) = rows.get_mut(partition as usize) {
            rows.push(user);
        }
    }
    Ok(Arc::new(rows))
}

/// The rows that a caller changes: of as many partitions as are to be touched, and no other caller's.
fn rows_of(caller: u32, touched: u32, by_partition: &[Vec<u32>]) -> Vec<u32> {
    let row = |number: u32| {
        let partition = (caller * touched + number % touched) % PARTITIONS;
        by_partition.get(partition as usize)?.get((caller * IN_BATCH + number) as usize).copied()
    };
    (0..IN_BATCH).filter_map(row).collect()
}

async fn batches(
    house: &Tenancy,
    callers: u32,
    touched: u32,
    by_partition: &Arc<Vec<Vec<u32>>>,
) -> Result<LoadRound> {
    let (house, by_partition) = (house.clone(), by_partition.clone());
    drive(u64::from(callers), SPAN, move |caller, number| {
        let (house, by_partition) = (house.clone(), by_partition.clone());
        async move {
            let rows = rows_of(u32::try_from(caller)?, touched, &by_partition);
            ensure!(rows.len() == IN_BATCH as usize, "a partition has too few rows");
            let update = |user: u32| {
                let input = json!({"display_name": format!("name {number}")});
                let update = request("profile.update", vec![i64::from(user).into()], input);
                Request { expected: Some(Expected::Any), ..update }
            };
            let requests = rows.into_iter().map(update).collect();
            let tenant = Tenant::new(TENANT)?;
            let written = house.house.batch(&tenant, requests, Operation::default()).await;
            written.map_err(|refused| anyhow::anyhow!("not written: {refused:?}"))?;
            Ok(())
        }
    })
    .await
}
