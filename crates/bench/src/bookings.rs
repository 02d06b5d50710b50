//! Holds and confirmations on one event, on each engine, against plain updates of entities on the same store.
//!
//! Buyers come 64 at a time. *Uncontested*, each takes seats that no other buyer wants: every hold and every confirmation is
//! applied, and both are counted, as updates are. *Contested*, two buyers want each seat: one gets it and buys it, the other is
//! refused, and the time until it knows is measured.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use anyhow::{Result, bail, ensure};
use serde_json::{Value as Json, json};
use statehouse::Code;
use statehouse_store::clock::Stopwatch;
use tokio::task::JoinSet;

use crate::load::{self, LoadRound, drive, median, ratio, summed};
use crate::report;
use crate::servers::BenchServer;
use crate::site::{Site, Tenancy, request};

const BLUEPRINT: &str = "
[house]
name = \"bench\"

[booking.seat]
key = { event_id = \"int\", seat_no = \"int\" }

[entity.profile]
key    = { user_id = \"int\" }
fields = { display_name = \"text\", bio = \"text?\", points = { type = \"int\", default = 0 } }
";

const BUYERS: u64 = 64;
/// Seats and rows of one plan while tables are filled.
const FILLED: u64 = 40;
/// The event of the first sale, which is not measured.
const WARM: u64 = 1_000_000;
/// Rows of entities.
const PROFILES: u64 = 6_400;

/// What is asked of an engine.
struct BookingTrial {
    engine: &'static str,
    server: BenchServer,
    rounds: usize,
    /// Seats that are sold in one round.
    seats: u64,
    /// How long entities are updated in one round.
    span: Duration,
    /// What the rate of holds and confirmations is to be, as a share of that of plain updates.
    wanted: Option<f64>,
}

/// Measures and prints.
pub async fn run() -> Result<()> {
    let span = Duration::from_millis(700);
    let trials = [
        BookingTrial {
            engine: "SQLite",
            server: BenchServer::sqlite()?,
            rounds: 5,
            seats: 6_400,
            span,
            wanted: Some(0.7),
        },
        BookingTrial {
            engine: "PostgreSQL",
            server: BenchServer::postgres()?,
            rounds: 5,
            seats: 3_200,
            span,
            wanted: None,
        },
        BookingTrial {
            engine: "DynamoDB (emulator)",
            server: BenchServer::dynamodb()?,
            rounds: 3,
            seats: 640,
            span,
            wanted: None,
        },
    ];
    for trial in &trials {
        measure(trial).await?;
    }
    if let Some(load) = load::machine() {
        report::note("load of the machine (1, 5, 15 minutes)", &load);
    }
    Ok(())
}

async fn measure(trial: &BookingTrial) -> Result<()> {
    let site = Site::at(&trial.server.url).await?;
    let house = site.house(BLUEPRINT).await?;
    fill_profiles(&house).await?;
    let (mut updates, mut bought, mut contested, mut refused) = (vec![], vec![], vec![], vec![]);
    offer(&house, WARM, trial.seats / 4).await?;
    buy(&house, WARM, trial.seats / 4, 2).await?;
    trial.server.settle().await?;
    for round in 0..trial.rounds as u64 {
        updates.push(update(&house, trial.span).await?);
        offer(&house, 2 * round, trial.seats).await?;
        let (writes, loser) = buy(&house, 2 * round, trial.seats, 1).await?;
        ensure!(loser.is_none(), "a buyer was refused a seat that no other buyer wanted");
        bought.push(writes);
        offer(&house, 2 * round + 1, trial.seats).await?;
        let (writes, others) = buy(&house, 2 * round + 1, trial.seats, 2).await?;
        contested.push(writes);
        refused.extend(others);
    }
    report::heading(&format!("{}: hold + confirm on one event, {BUYERS} buyers", trial.engine));
    report::measured("updates of entities, through the same house", median(&updates)?);
    report::measured("holds and confirmations, uncontested", median(&bought)?);
    report::measured("holds and confirmations, two buyers for each seat", median(&contested)?);
    report::measured("refusals among them", median(&refused)?);
    let share = ratio(&bought, &updates)?;
    let name = "holds and confirmations, uncontested / updates";
    match trial.wanted {
        Some(wanted) => report::ratio(name, share, wanted),
        None => report::figure(name, share, "×"),
    }
    site.close().await;
    Ok(())
}

async fn fill_profiles(house: &Tenancy) -> Result<()> {
    let batches = (0..PROFILES).step_by(FILLED as usize).map(|first| {
        let row = |user: u64| {
            let input = json!({"user_id": user, "display_name": "a person", "bio": "a few words"});
            request("profile.create", vec![], input)
        };
        (first..first + FILLED).map(row).collect()
    });
    house.fill(batches).await
}

/// Plain updates, each caller of rows of its own.
async fn update(house: &Tenancy, span: Duration) -> Result<LoadRound> {
    let house = house.clone();
    drive(BUYERS, span, move |caller, number| {
        let house = house.clone();
        async move {
            let user = caller * (PROFILES / BUYERS) + number % (PROFILES / BUYERS);
            let input = json!({"display_name": format!("a person {number}"), "bio": "a few words"});
            house.overwrite("profile.update", vec![i64::try_from(user)?.into()], input).await?;
            Ok(())
        }
    })
    .await
}

/// Puts the seats of an event on sale.
async fn offer(house: &Tenancy, event: u64, seats: u64) -> Result<()> {
    let batches = (0..seats).step_by(FILLED as usize).map(|first| {
        let seat = |seat: u64| request("seat.create", vec![], json!({"event_id": event, "seat_no": seat}));
        (first..seats.min(first + FILLED)).map(seat).collect()
    });
    house.fill(batches).await
}

/// What buyers of one event share.
struct Sale {
    house: Tenancy,
    event: u64,
    /// The next wish. Each seat is wished for by so many buyers in turn.
    next: AtomicU64,
    wishes: u64,
    buyers_each: u64,
    applied: Mutex<Vec<Duration>>,
    refused: Mutex<Vec<Duration>>,
}

/// Sells all seats of an event; each is wanted by so many buyers. Returns the writes that were applied, and the refusals.
async fn buy(
    house: &Tenancy,
    event: u64,
    seats: u64,
    buyers_each: u64,
) -> Result<(LoadRound, Option<LoadRound>)> {
    let sale = Arc::new(Sale {
        house: house.clone(),
        event,
        next: AtomicU64::new(0),
        wishes: seats * buyers_each,
        buyers_each,
        applied: Mutex::default(),
        refused: Mutex::default(),
    });
    let watch = Stopwatch::start();
    let mut buyers: JoinSet<Result<()>> = (0..BUYERS).map(|_| buyer(sale.clone())).collect();
    while let Some(ended) = buyers.join_next().await {
        ended??;
    }
    let elapsed = watch.elapsed();
    let taken = |times: &Mutex<Vec<Duration>>| {
        std::mem::take(&mut *times.lock().unwrap_or_else(PoisonError::into_inner))
    };
    let (applied, refused) = (taken(&sale.applied), taken(&sale.refused));
    ensure!(applied.len() as u64 == 2 * seats, "{} writes for {seats} seats", applied.len());
    ensure!(refused.len() as u64 == seats * (buyers_each - 1), "{} refusals", refused.len());
    let refusals = (!refused.is_empty()).then(|| summed(refused, elapsed));
    Ok((summed(applied, elapsed), refusals))
}

async fn buyer(sale: Arc<Sale>) -> Result<()> {
    let Sale { house, event, .. } = &*sale;
    let note = |times: &Mutex<Vec<Duration>>, span: Duration| {
        times.lock().unwrap_or_else(PoisonError::into_inner).push(span);
    };
    loop {
        let wish = sale.next.fetch_add(1, Ordering::Relaxed);
        if wish >= sale.wishes {
            return Ok(());
        }
        let seat = wish / sale.buyers_each;
        let booking = format!("{event}-{seat}-{}", wish % sale.buyers_each);
        let input =
            json!({"booking_id": booking, "event_id": event, "seat_no": [seat], "holder": "a person"});
        let watch = Stopwatch::start();
        match house.call("seat_booking.hold", vec![], input).await {
            Ok(_) => note(&sale.applied, watch.elapsed()),
            Err(refusal) if matches!(refusal.code, Code::Held | Code::WrongState) => {
                note(&sale.refused, watch.elapsed());
                continue;
            }
            Err(refusal) => bail!("seat {seat}: {refusal}"),
        }
        let watch = Stopwatch::start();
        house.call("seat_booking.confirm", vec![booking.as_str().into()], Json::Null).await?;
        note(&sale.applied, watch.elapsed());
    }
}
