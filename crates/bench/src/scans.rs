//! What the house does by itself when times have come: bookings that expire and timers that fire, many at once, on SQLite and
//! on PostgreSQL.
//!
//! Ten times as many rows should take ten times as long. While a hundred thousand bookings are swept, others go on holding
//! and cancelling seats; their rate is compared with that on the same store before the sweep began, in each of several rounds.

use std::ops::Range;
use std::time::Duration;

use anyhow::{Result, ensure};
use serde_json::{Value as Json, json};
use statehouse::worker::WorkerOptions;
use statehouse_store::clock::Stopwatch;
use statehouse_store::{Clock as _, SystemClock};

use crate::load::{self, LoadRound, drive, median, ratio};
use crate::report;
use crate::servers::BenchServer;
use crate::site::{Site, Tenancy, request};

/// How many rows are due, in turn.
const FEW: u64 = 10_000;
const MANY: u64 = 100_000;
/// Rows that are there before the server is let look at its tables.
const WARM: u64 = 1_000;
/// Rows of one plan while tables are filled. A booking has two.
const FILLED: u64 = 40;
/// Those who hold seats meanwhile.
const BUYERS: u64 = 16;
const SPAN: Duration = Duration::from_millis(1_500);
/// The event at which they do.
const FOREGROUND: u64 = u32::MAX as u64;
const ROUNDS: usize = 3;
/// The worker that sweeps bookings.
const SWEEPER: &str = "seat_booking.expire";
/// How often a scan's progress is looked at.
const LOOK_EVERY: Duration = Duration::from_millis(5);

/// Bookings that are soon over; the same tables with bookings that are not.
fn blueprint(hold_for: &str) -> String {
    format!(
        "[house]\nname = \"bench\"\n\n[booking.seat]\nkey = {{ event_id = \"int\", seat_no = \"int\" }}\n\
         hold_for = \"{hold_for}\"\nhold_max = \"1h\"\n\n[timer.alarm]\nkey = {{ id = \"int\" }}\nshards = 16\n"
    )
}

/// Measures and prints.
pub async fn run() -> Result<()> {
    for (engine, server) in [("SQLite", BenchServer::sqlite()?), ("PostgreSQL", BenchServer::postgres()?)] {
        let few = measure(&server, FEW).await?;
        let many = measure(&server, MANY).await?;
        let (alone, beside) = beside_a_sweep(&server).await?;
        report::heading(&format!("{engine}: what is due, done by the house's workers"));
        for (what, few, many) in
            [("expired bookings", few.swept, many.swept), ("due timers", few.fired, many.fired)]
        {
            report::figure(&format!("{FEW} {what}"), few, "rows/s");
            report::figure(&format!("{MANY} {what}"), many, "rows/s");
            report::figure(&format!("{what}: rate with ten times as many / with few"), many / few, "×");
        }
        report::measured(&format!("hold + cancel, {BUYERS} buyers, nothing due"), median(&alone)?);
        report::measured(&format!("hold + cancel, {BUYERS} buyers, during the sweep"), median(&beside)?);
        report::bounded(
            "foreground holds: how much slower during the sweep",
            ratio(&alone, &beside)?,
            "×",
            2.0,
        );
    }
    if let Some(load) = load::machine() {
        report::note("load of the machine (1, 5, 15 minutes)", &load);
    }
    Ok(())
}

/// Rates in rows a second.
struct ScanFigures {
    swept: f64,
    fired: f64,
}

async fn measure(server: &BenchServer, rows: u64) -> Result<ScanFigures> {
    let site = Site::at(&server.url).await?;
    let house = site.house(&blueprint("1h")).await?;
    expired(server, &site, rows).await?;
    let swept = done(&house, SWEEPER, rows).await?;
    house.house.stop_workers().await;
    for part in [0..WARM, WARM..rows] {
        set(&house, part).await?;
        server.settle().await?;
    }
    let fired = done(&house, "alarm.fire", rows).await?;
    house.house.stop_workers().await;
    site.close().await;
    Ok(ScanFigures { swept, fired })
}

/// Bookings that are over and not swept.
async fn expired(server: &BenchServer, site: &Site, rows: u64) -> Result<()> {
    let fleeting = site.house(&blueprint("1ms")).await?;
    for part in [0..WARM, WARM..rows] {
        offer(&fleeting, 0, part.clone()).await?;
        hold(&fleeting, part).await?;
        server.settle().await?;
    }
    Ok(())
}

/// A range, cut into what one plan takes.
fn parts(range: &Range<u64>) -> impl Iterator<Item = Range<u64>> + use<> {
    let end = range.end;
    range.clone().step_by(FILLED as usize).map(move |first| first..end.min(first + FILLED))
}

/// Puts seats on sale.
async fn offer(house: &Tenancy, event: u64, seats: Range<u64>) -> Result<()> {
    let seat = |seat: u64| request("seat.create", vec![], json!({"event_id": event, "seat_no": seat}));
    house.fill(parts(&seats).map(|part| part.map(seat).collect())).await
}

/// Holds each seat of the first event, one for each booking.
async fn hold(house: &Tenancy, seats: Range<u64>) -> Result<()> {
    let hold = |seat: u64| {
        let booking = format!("{}-{seat}", house.house.ids().next());
        let input = json!({"booking_id": booking, "event_id": 0, "seat_no": [seat], "holder": "a person"});
        request("seat_booking.hold", vec![], input)
    };
    house.fill(parts(&seats).map(|part| part.map(hold).collect())).await
}

/// Sets timers that are due at once.
async fn set(house: &Tenancy, ids: Range<u64>) -> Result<()> {
    let set = |id: u64| {
        let key = vec![i64::try_from(id).unwrap_or_default().into()];
        request("alarm.set", key, json!({"due_at": "2020-01-01T00:00:00Z"}))
    };
    house.fill(parts(&ids).map(|part| part.map(set).collect())).await
}

/// How many rows a worker of this process has done.
fn done_by(house: &Tenancy, worker: &str) -> u64 {
    let figures = house.house.worker_figures();
    figures.iter().filter(|figures| figures.worker == worker).map(|figures| figures.rows).sum()
}

/// Starts the workers, and says how many rows a second one of them does.
async fn done(house: &Tenancy, worker: &str, rows: u64) -> Result<f64> {
    let watch = Stopwatch::start();
    house.house.start_workers(WorkerOptions::default());
    while done_by(house, worker) < rows {
        ensure!(watch.elapsed() < Duration::from_secs(600), "{worker} does not get done");
        SystemClock.sleep(LOOK_EVERY).await;
    }
    Ok(rows as f64 / watch.elapsed().as_secs_f64())
}

/// Buyers who hold a seat of their own and cancel it, again and again.
async fn holds(house: &Tenancy) -> Result<LoadRound> {
    let house = house.clone();
    drive(BUYERS, SPAN, move |caller, _| {
        let house = house.clone();
        async move {
            let booking = house.house.ids().next();
            let input = json!({
                "booking_id": booking, "event_id": FOREGROUND, "seat_no": [caller], "holder": "a person",
            });
            house.call("seat_booking.hold", vec![], input).await?;
            house.call("seat_booking.cancel", vec![booking.as_str().into()], Json::Null).await?;
            Ok(())
        }
    })
    .await
}

/// What buyers get done with nothing due, and in the midst of a sweep, in turns.
async fn beside_a_sweep(server: &BenchServer) -> Result<(Vec<LoadRound>, Vec<LoadRound>)> {
    let (mut alone, mut beside) = (Vec::new(), Vec::new());
    for _ in 0..ROUNDS {
        let site = Site::at(&server.url).await?;
        let house = site.house(&blueprint("1h")).await?;
        offer(&house, FOREGROUND, 0..BUYERS).await?;
        expired(server, &site, MANY).await?;
        alone.push(holds(&house).await?);
        house.house.start_workers(WorkerOptions::default());
        let watch = Stopwatch::start();
        while done_by(&house, SWEEPER) == 0 {
            ensure!(watch.elapsed() < Duration::from_secs(60), "nothing is swept");
            SystemClock.sleep(LOOK_EVERY).await;
        }
        beside.push(holds(&house).await?);
        let swept = done_by(&house, SWEEPER);
        ensure!(swept < MANY, "the sweep was over before the buyers were, so it was not measured");
        house.house.stop_workers().await;
        site.close().await;
    }
    Ok((alone, beside))
}
