//! Bids of 64 callers for one lot on PostgreSQL, against one guarded statement and one connection for each caller.
//!
//! Both sides store the best bid, a row for each accepted bid and a log record. Amounts rise, so that most bids are accepted; one
//! that was overtaken on its way is refused on either side, and counted as an operation too.

use std::sync::Arc;
use std::sync::atomic::{AtomicI64, Ordering};
use std::time::Duration;

use anyhow::{Context, Result, bail};
use serde_json::json;
use statehouse::Code;
use tokio_postgres::{Client, NoTls, Statement};

use crate::load::{LoadRound, drive, median, ratio};
use crate::report;
use crate::servers::BenchServer;
use crate::site::{Site, Tenancy, request};

const CALLERS: u64 = 64;
const ROUNDS: usize = 5;
const SPAN: Duration = Duration::from_millis(700);
/// What the rate of bids is to be, as a multiple of that of guarded statements.
const WANTED: f64 = 15.0;
/// Bids in one plan.
const FOLDS: [u32; 3] = [1, 8, 64];

fn blueprint() -> String {
    let lot = |fold: u32| {
        format!("[auction.lot{fold}]\nkey = {{ lot_id = \"int\" }}\nbidding = \"open\"\nfold = {fold}\n")
    };
    format!("[house]\nname = \"bench\"\n{}", FOLDS.map(lot).concat())
}

/// Measures and prints.
pub async fn run() -> Result<()> {
    let server = BenchServer::postgres()?;
    let site = Site::at(&server.url).await?;
    let house = site.house(&blueprint()).await?;
    let by_hand = Arc::new(BidsByHand::open(&server.url).await?);
    let amounts = Arc::new(AtomicI64::new(1));
    for fold in FOLDS {
        let lot = json!({"lot_id": 1, "ends_at": "2099-01-01T00:00:00Z"});
        house.send(request(&format!("lot{fold}.create"), vec![], lot)).await?;
    }
    let mut ours: [Vec<LoadRound>; FOLDS.len()] = Default::default();
    let mut reference = Vec::new();
    for _ in 0..ROUNDS {
        reference.push(by_hand.clone().bids(amounts.clone()).await?);
        for (rounds, fold) in ours.iter_mut().zip(FOLDS) {
            rounds.push(bids(&house, fold, amounts.clone()).await?);
        }
    }
    report::heading(&format!("PostgreSQL: bids of {CALLERS} callers for one lot"));
    report::measured("by hand, one statement and connection for each caller", median(&reference)?);
    for (rounds, fold) in ours.iter().zip(FOLDS) {
        report::measured(&format!("Statehouse, fold = {fold}"), median(rounds)?);
    }
    let [one, .., most] = &ours;
    report::figure("fold = 64 / fold = 1", ratio(most, one)?, "×");
    report::ratio("fold = 64 / by hand", ratio(most, &reference)?, WANTED);
    site.close().await;
    Ok(())
}

async fn bids(house: &Tenancy, fold: u32, amounts: Arc<AtomicI64>) -> Result<LoadRound> {
    let house = house.clone();
    drive(CALLERS, SPAN, move |caller, _| {
        let (house, amounts) = (house.clone(), amounts.clone());
        async move {
            let amount = amounts.fetch_add(1, Ordering::Relaxed);
            let input = json!({"bidder_id": format!("b{caller}"), "amount": amount});
            match house.call(&format!("lot{fold}.bid"), vec![1.into()], input).await {
                Ok(_) => Ok(()),
                Err(refusal) if refusal.code == Code::TooLow => Ok(()),
                Err(refusal) => bail!("a bid of {amount}: {refusal}"),
            }
        }
    })
    .await
}

/// What a careful engineer would write: a connection for each caller, one prepared statement that does it all.
struct BidsByHand {
    clients: Vec<(Client, Statement)>,
}

const TABLES: &str = "
drop schema if exists bench_bids_by_hand cascade;
create schema bench_bids_by_hand;
create table bench_bids_by_hand.lots (
    tenant text not null, lot_id bigint not null, price bigint not null, bidder_id text, bids bigint not null default 0,
    ends_at timestamptz not null, updated_at timestamptz not null, primary key (tenant, lot_id)
);
create table bench_bids_by_hand.bids (
    tenant text not null, lot_id bigint not null, seq bigint not null, bidder_id text not null, amount bigint not null,
    at timestamptz not null, primary key (tenant, lot_id, seq)
);
create table bench_bids_by_hand.outbox (
    position bigserial primary key, tenant text not null, key text not null, at timestamptz not null, events json not null
);
insert into bench_bids_by_hand.lots (tenant, lot_id, price, ends_at, updated_at)
values ('acme', 1, 0, '2099-01-01', now());
";

const BID: &str = "
with best as (
    update bench_bids_by_hand.lots
    set price = $1, bidder_id = $2, bids = bids + 1, updated_at = now()
    where tenant = 'acme' and lot_id = 1 and price < $1 and ends_at > now()
    returning bids
), placed as (
    insert into bench_bids_by_hand.bids (tenant, lot_id, seq, bidder_id, amount, at)
    select 'acme', 1, bids, $2, $1, now() from best
    returning seq
)
insert into bench_bids_by_hand.outbox (tenant, key, at, events)
select 'acme', '1', now(), $3::text::json from placed";

impl BidsByHand {
    async fn open(url: &str) -> Result<BidsByHand> {
        let mut clients = Vec::new();
        for number in 0..CALLERS {
            let (client, connection) = tokio_postgres::connect(url, NoTls).await?;
            tokio::spawn(connection);
            if number == 0 {
                client.batch_execute(TABLES).await?;
            }
            let statement = client.prepare(BID).await?;
            clients.push((client, statement));
        }
        Ok(BidsByHand { clients })
    }

    async fn bids(self: Arc<BidsByHand>, amounts: Arc<AtomicI64>) -> Result<LoadRound> {
        drive(CALLERS, SPAN, move |caller, _| {
            let (by_hand, amounts) = (self.clone(), amounts.clone());
            async move {
                let index = usize::try_from(caller)?;
                let (client, statement) = by_hand.clients.get(index).context("no connection")?;
                let amount = amounts.fetch_add(1, Ordering::Relaxed);
                let bidder = format!("b{caller}");
                let event = json!([{"name": "lot.bid", "data": {"bidder_id": bidder, "price": amount}}]);
                client.execute(statement, &[&amount, &bidder, &event.to_string()]).await?;
                Ok(())
            }
        })
        .await
    }
}
