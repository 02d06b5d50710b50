//! One hot stock that 64 callers want, on SQLite and PostgreSQL; on PostgreSQL against one guarded statement and one connection for
//! each caller. And what a refused reserve costs, as a share of an applied one.
//!
//! By hand a caller runs `update … set available = available - 1 where available >= 1`: without a row for the reservation, without
//! a log record, and without protection against a lost answer. Ours writes all of these.

use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use serde_json::json;
use statehouse::Code;
use tokio_postgres::{Client, NoTls, Statement};

use crate::load::{self, LoadRound, drive, median, ratio};
use crate::report;
use crate::servers::BenchServer;
use crate::site::{Site, Tenancy, request};

const BLUEPRINT: &str = "
[house]
name = \"bench\"

[inventory.stock]
key       = { sku = \"int\" }
movements = \"log\"
";

const CALLERS: u64 = 64;
const PLENTY: i64 = 1_000_000_000;
/// The hot stock, and the one of which nothing is left.
const HOT: i64 = 1;
const SOLD_OUT: i64 = 2;
/// The share of an applied reserve that a refused one may cost.
const REFUSED_SHARE: f64 = 0.2;
/// How many times the rate of the statement by hand is wanted on PostgreSQL.
const WANTED: f64 = 15.0;

/// How long is measured.
#[derive(Clone, Copy)]
struct Length {
    rounds: usize,
    span: Duration,
}

/// Measures and prints. `quick` shows in seconds that it runs.
pub async fn run(quick: bool) -> Result<()> {
    let length = match quick {
        true => Length { rounds: 1, span: Duration::from_millis(100) },
        false => Length { rounds: 7, span: Duration::from_millis(1000) },
    };
    let sqlite = BenchServer::sqlite()?;
    measure("SQLite", &sqlite, None, length).await?;
    let postgres = BenchServer::postgres()?;
    let by_hand = Arc::new(StockByHand::open(&postgres.url).await?);
    measure("PostgreSQL", &postgres, Some(&by_hand), length).await?;
    if let Some(load) = load::machine() {
        report::note("load of the machine (1, 5, 15 minutes)", &load);
    }
    Ok(())
}

async fn measure(
    engine: &str,
    server: &BenchServer,
    by_hand: Option<&Arc<StockByHand>>,
    length: Length,
) -> Result<()> {
    let site = Site::at(&server.url).await?;
    let house = site.house(BLUEPRINT).await?;
    for sku in [HOT, SOLD_OUT] {
        house.call("stock.restock", vec![sku.into()], json!({"quantity": PLENTY})).await?;
    }
    house.call("stock.adjust", vec![SOLD_OUT.into()], json!({"by": -PLENTY})).await?;
    let mut series: u64 = 0;
    let (mut applied, mut refused, mut reference) = (Vec::new(), Vec::new(), Vec::new());
    // The first round warms up.
    for round in 0..=length.rounds {
        series += 1;
        let one = reserve(&house, HOT, series, length.span).await?;
        let other = reserve(&house, SOLD_OUT, series, length.span).await?;
        let hand = match by_hand {
            Some(by_hand) => Some(by_hand.take(length.span).await?),
            None => None,
        };
        if round > 0 {
            applied.push(one);
            refused.push(other);
            reference.extend(hand);
        }
    }
    report::heading(&format!("{engine}: one of a hot stock, {CALLERS} callers"));
    report::measured("reservations, applied", median(&applied)?);
    report::measured("reservations, refused because it is sold out", median(&refused)?);
    let cost = ratio(&applied, &refused)?;
    report::bounded("cost of a refused reserve / an applied one", cost, "×", REFUSED_SHARE);
    if by_hand.is_some() {
        report::measured("by hand, one guarded update and connection for each caller", median(&reference)?);
        report::ratio("reservations / by hand", ratio(&applied, &reference)?, WANTED);
    }
    site.close().await;
    Ok(())
}

/// Each caller reserves one of a stock, again and again.
async fn reserve(house: &Tenancy, sku: i64, series: u64, span: Duration) -> Result<LoadRound> {
    let house = house.clone();
    drive(CALLERS, span, move |caller, number| {
        let house = house.clone();
        async move {
            let id = format!("{sku}-{series}-{caller}-{number}");
            let input = json!({"reservation_id": id, "lines": [{"sku": sku, "quantity": 1}]});
            match house.send(request("stock_reservation.reserve", vec![], input)).await {
                Ok(_) => ensure!(sku == HOT, "what is sold out was reserved"),
                Err(refusal) => ensure!(sku == SOLD_OUT && refusal.code == Code::OutOfStock, "{refusal}"),
            }
            Ok(())
        }
    })
    .await
}

/// What a careful engineer would write who has only the quantity in mind.
struct StockByHand {
    clients: Vec<(Client, Statement)>,
}

const TABLES: &str = "
drop schema if exists bench_stock_by_hand cascade;
create schema bench_stock_by_hand;
create table bench_stock_by_hand.stocks (
    tenant text not null, sku bigint not null, available bigint not null, reserved bigint not null default 0,
    updated_at timestamptz not null, version bigint not null default 1, primary key (tenant, sku)
);";

const TAKE: &str = "
update bench_stock_by_hand.stocks
set available = available - 1, reserved = reserved + 1, updated_at = now(), version = version + 1
where tenant = $1 and sku = $2 and available >= 1";

impl StockByHand {
    async fn open(url: &str) -> Result<StockByHand> {
        let mut clients = Vec::new();
        for number in 0..CALLERS {
            let (client, connection) = tokio_postgres::connect(url, NoTls).await?;
            tokio::spawn(connection);
            if number == 0 {
                client.batch_execute(TABLES).await?;
                let fill = "insert into bench_stock_by_hand.stocks (tenant, sku, available, updated_at)
                            values ('acme', $1, $2, now())";
                client.execute(fill, &[&HOT, &PLENTY]).await?;
            }
            let statement = client.prepare(TAKE).await?;
            clients.push((client, statement));
        }
        Ok(StockByHand { clients })
    }

    async fn take(self: &Arc<StockByHand>, span: Duration) -> Result<LoadRound> {
        let by_hand = self.clone();
        drive(CALLERS, span, move |caller, _| {
            let by_hand = by_hand.clone();
            async move {
                let (client, statement) = by_hand.clients.get(caller as usize).context("no connection")?;
                let written = client.execute(statement, &[&"acme", &HOT]).await?;
                ensure!(written == 1, "not applied");
                Ok(())
            }
        })
        .await
    }
}
