//! Home feeds: how fast posts come to their followers, a page of a feed is read, and a feed is built anew; and how far it is
//! behind while people post all the time.
//!
//! Every author has twenty followers. *Fan-out*: posts wait in the log, the house's workers start, and the rows that they bring
//! to readers are counted from the first ones on. The reference writes the same rows into a table with the same columns and the
//! same key, durably, and does nothing else: it reads no log, asks for no followers and keeps no offset.

mod by_hand;

use std::collections::VecDeque;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use serde_json::json;
use statehouse::Request;
use statehouse::worker::WorkerOptions;
use statehouse_store::clock::Stopwatch;
use statehouse_store::{Clock as _, Scan, SystemClock, Time, Value};
use tokio::task::JoinSet;

use self::by_hand::{FeedByHand, PostgresByHand, SqliteByHand};
use crate::load::{self, drive, median, middle, ratio};
use crate::report;
use crate::servers::BenchServer;
use crate::site::{Site, Tenancy, request};

const BLUEPRINT: &str = "
[house]
name = \"bench\"

[entity.post]
key    = { post_id = \"int\" }
fields = { author_id = \"int\", created_at = \"time\", body = \"text\" }

[relation.follow]
from = { follower_id = \"int\" }
to   = { followed_id = \"int\" }

[feed.home]
posts   = \"post\"
follows = \"follow\"
preview = \"body\"
";

const AUTHORS: u64 = 400;
const FOLLOWERS: u64 = 20;
const READERS: u64 = 2_000;
const BODY: &str = "what an author has to say to the people who follow them, in a line";

/// Posts of one round, those of the first round, which is not measured, and those by whose end the workers are under way.
const POSTS: u64 = 4_000;
const WARM: u64 = 1_000;
const UNDER_WAY: u64 = POSTS / 8;
const ROUNDS: u64 = 5;
/// Rows of a large statement by hand.
const MANY: usize = 1_000;

/// Rows of a page, those who read at once, and for how long.
const PAGE: i64 = 20;
const CALLERS: [u64; 2] = [1, 16];
const SPAN: Duration = Duration::from_millis(1_000);

/// Posts a second that are to be kept up with, and what is tried when they are not.
const STEADY: [u64; 6] = [2_000, 1_500, 1_000, 750, 500, 250];
const STEADY_FOR: Duration = Duration::from_secs(20);
/// Posts in flight at most, so that a house that does not keep up is measured and not overloaded.
const IN_FLIGHT: usize = 512;

/// Posts that are built anew: a million rows.
const BUILT: u64 = 50_000;
/// Events that go through projectors that are killed.
const ENDURED: u64 = 1_000_000;
const ENDURANCE_SEED: u64 = 11;
/// How often figures are looked at.
const LOOK_EVERY: Duration = Duration::from_millis(5);
/// How often a projection's lag, or the memory of the process, is.
const SAMPLE_EVERY: Duration = Duration::from_millis(250);
/// The longest that anything here takes.
const PATIENCE: Duration = Duration::from_secs(900);

/// A post, as both sides write it.
#[derive(Clone, Copy, Debug)]
struct Post {
    number: u64,
    base: Time,
}

impl Post {
    fn author(self) -> u64 {
        self.number % AUTHORS
    }

    fn at(self) -> Time {
        self.base.plus(Duration::from_millis(self.number))
    }

    fn request(self) -> Request {
        let at = Value::Time(self.at()).to_json();
        let (post, author) = (self.number, self.author());
        request(
            "post.create",
            vec![],
            json!({"post_id": post, "author_id": author, "created_at": at, "body": BODY}),
        )
    }
}

/// The followers of an author, all of them different.
fn followers(author: u64) -> impl Iterator<Item = u64> {
    (0..FOLLOWERS).map(move |number| (author * 37 + number * 101) % READERS)
}

/// A house in which people follow each other.
struct Square {
    site: Site,
    house: Tenancy,
    base: Time,
}

impl Square {
    async fn open(server: &BenchServer) -> Result<Square> {
        let site = Site::at(&server.url).await?;
        let house = site.house(BLUEPRINT).await?;
        let follow = |author: u64, reader: u64| -> Result<Request> {
            let key = vec![i64::try_from(reader)?.into(), i64::try_from(author)?.into()];
            Ok(request("follow.add", key, json!({})))
        };
        let edges = (0..AUTHORS).flat_map(|author| followers(author).map(move |reader| (author, reader)));
        let edges = edges.map(|(author, reader)| follow(author, reader)).collect::<Result<Vec<_>>>()?;
        // Each by itself: a plan names a part of an author's count once.
        house.fill(edges.into_iter().map(|edge| vec![edge])).await?;
        let base = SystemClock.now().minus(Duration::from_secs(3_600));
        Ok(Square { site, house, base: Time::from_millis(base.micros() / 1_000) })
    }

    fn post(&self, number: u64) -> Post {
        Post { number, base: self.base }
    }

    /// Posts, each in a plan of its own.
    async fn fill(&self, posts: Range<u64>) -> Result<()> {
        self.house.fill(posts.map(|number| vec![self.post(number).request()])).await
    }

    /// Waits until the feed is built, and has read everything.
    async fn caught_up(&self) -> Result<()> {
        let watch = Stopwatch::start();
        loop {
            let projection = self.house.house.projections().into_iter().next().context("there is no feed")?;
            let status = projection.status().await?;
            if status.state.live.is_some() && status.live.iter().all(|one| one.records == 0) {
                return Ok(());
            }
            ensure!(watch.elapsed() < PATIENCE, "the feed does not catch up: {:?}", self.failure());
            SystemClock.sleep(SAMPLE_EVERY).await;
        }
    }

    fn failure(&self) -> Option<String> {
        self.house.house.worker_figures().into_iter().find_map(|figures| figures.last_error)
    }

    /// Lets the workers bring posts that wait in the log to their readers. Says how many rows a second that was, from the
    /// time on when they were under way.
    async fn brought(&self, posts: u64) -> Result<f64> {
        let watch = Stopwatch::start();
        self.house.house.start_workers(WorkerOptions::default());
        let mut begun = None;
        let (first, from) = loop {
            let done = self.projected();
            if begun.is_none() && done >= UNDER_WAY {
                begun = Some((done, watch.elapsed()));
            }
            if let (Some(begun), true) = (begun, done >= posts) {
                break begun;
            }
            ensure!(
                watch.elapsed() < PATIENCE,
                "posts are not brought to their readers: {:?}",
                self.failure()
            );
            SystemClock.sleep(LOOK_EVERY).await;
        };
        let elapsed = watch.elapsed().saturating_sub(from);
        self.caught_up().await?;
        self.house.house.stop_workers().await;
        Ok(((posts - first) * FOLLOWERS) as f64 / elapsed.as_secs_f64())
    }

    /// How many records the feed's workers have done since they were started.
    fn projected(&self) -> u64 {
        let figures = self.house.house.worker_figures();
        figures.iter().filter(|figures| figures.worker == "home.project").map(|figures| figures.rows).sum()
    }

    /// How many rows readers have.
    async fn rows(&self) -> Result<u64> {
        let house = &self.house.house;
        let table = house.schema().table("user_feed").context("there is no table of feeds")?;
        let (mut scan, mut rows) = (Scan::all(table), 0);
        loop {
            let page = house.store().scan(&scan).await?;
            rows += page.rows.len() as u64;
            let Some(next) = page.next else { return Ok(rows) };
            scan = scan.after(next)?;
        }
    }
}

/// Measures and prints fan-out, pages and lag.
pub async fn run() -> Result<()> {
    let server = BenchServer::sqlite()?;
    let square = Square::open(&server).await?;
    let by_hand: Arc<dyn FeedByHand> = Arc::new(SqliteByHand::open()?);
    fan_out("SQLite", "a transaction", &server, &square, &by_hand).await?;
    square.site.close().await;

    let server = BenchServer::postgres()?;
    let square = Square::open(&server).await?;
    let by_hand = Arc::new(PostgresByHand::open(&server.url).await?);
    let posts = fan_out("PostgreSQL", "a statement", &server, &square, &(by_hand.clone() as _)).await?;
    pages(&square, &by_hand).await?;
    steady(&square, posts).await?;
    square.site.close().await;
    by_hand.erase().await?;
    if let Some(load) = load::machine() {
        report::note("load of the machine (1, 5, 15 minutes)", &load);
    }
    Ok(())
}

/// Brings posts to readers, round by round with those who do it by hand. Returns how many posts there are then.
async fn fan_out(
    engine: &str,
    one: &str,
    server: &BenchServer,
    square: &Square,
    by_hand: &Arc<dyn FeedByHand>,
) -> Result<u64> {
    square.house.house.start_workers(WorkerOptions::default());
    square.caught_up().await?;
    square.house.house.stop_workers().await;
    let (mut ours, mut each, mut large) = (Vec::new(), Vec::new(), Vec::new());
    let mut next = 0;
    for round in 0..=ROUNDS {
        let posts = if round == 0 { WARM } else { POSTS };
        let wanted: Vec<Post> = (next..next + posts).map(|number| square.post(number)).collect();
        let for_each = by_hand.write(&wanted, FOLLOWERS as usize).await?;
        let for_many = by_hand.write(&wanted, MANY).await?;
        square.fill(next..next + posts).await?;
        let brought = square.brought(posts).await?;
        next += posts;
        if round == 0 {
            server.settle().await?;
            continue;
        }
        ours.push(brought);
        each.push(for_each);
        large.push(for_many);
    }
    let rows = square.rows().await?;
    ensure!(rows == next * FOLLOWERS, "readers have {rows} rows of {next} posts");
    let share = |of: &[f64]| middle(&ours.iter().zip(of).map(|(a, b)| a / b).collect::<Vec<f64>>());
    report::heading(&format!("{engine}: posts brought to {FOLLOWERS} followers each"));
    report::figure("Statehouse, log to rows of readers", middle(&ours)?, "rows/s");
    report::figure(&format!("by hand, {one} for each post"), middle(&each)?, "rows/s");
    report::figure(&format!("by hand, {one} for {MANY} rows"), middle(&large)?, "rows/s");
    report::ratio(&format!("Statehouse / by hand, {one} for each post"), share(&each)?, 0.7);
    report::compared(&format!("Statehouse / by hand, {one} for {MANY} rows"), share(&large)?);
    Ok(next)
}

/// Pages of feeds, the newest posts first.
async fn pages(square: &Square, by_hand: &Arc<PostgresByHand>) -> Result<()> {
    by_hand.settle().await?;
    for callers in CALLERS {
        let (mut ours, mut reference) = (Vec::new(), Vec::new());
        for _ in 0..ROUNDS {
            let house = square.house.clone();
            ours.push(
                drive(callers, SPAN, move |caller, number| {
                    let house = house.clone();
                    async move {
                        let input = json!({"viewer_id": reader(caller, number), "limit": PAGE});
                        let rows = house.list("home.list", vec![], input).await?;
                        ensure!(rows.len() as i64 == PAGE, "a page has {} rows", rows.len());
                        Ok(())
                    }
                })
                .await?,
            );
            let by_hand = by_hand.clone();
            reference.push(
                drive(callers, SPAN, move |caller, number| {
                    let by_hand = by_hand.clone();
                    async move {
                        let rows = by_hand.page(caller, reader(caller, number), PAGE).await?;
                        ensure!(rows == PAGE as usize, "a page has {rows} rows");
                        Ok(())
                    }
                })
                .await?,
            );
        }
        report::heading(&format!("PostgreSQL: a page of {PAGE} posts, {callers} caller(s)"));
        report::measured("Statehouse, the action in the library", median(&ours)?);
        report::measured("by hand, one prepared statement", median(&reference)?);
        report::ratio("Statehouse / by hand", ratio(&ours, &reference)?, 0.8);
    }
    Ok(())
}

/// Whose feed a caller reads; spread over all without a generator's cost.
fn reader(caller: u64, number: u64) -> i64 {
    ((caller * 7_919 + number * 104_729) % READERS) as i64
}

/// How far behind the feed was at one moment.
#[derive(Clone, Copy, Debug)]
struct Lag {
    records: u64,
    behind: Duration,
}

/// Posts at a steady rate while the workers bring them to readers. If that is too much, at a lower one.
async fn steady(square: &Square, first: u64) -> Result<()> {
    report::heading(&format!(
        "PostgreSQL: lag while people post for {} s, {FOLLOWERS} followers each",
        STEADY_FOR.as_secs()
    ));
    square.house.house.start_workers(WorkerOptions::default());
    let mut next = first;
    for rate in STEADY {
        square.caught_up().await?;
        let watch = Stopwatch::start();
        let (posted, lags) = post_steadily(square, next, rate).await?;
        let elapsed = watch.elapsed();
        next += posted;
        let catching = Stopwatch::start();
        square.caught_up().await?;
        let settled = catching.elapsed();
        let part = |part: usize| {
            let size = lags.len() / 4;
            lags.get(part * size..(part + 1) * size).unwrap_or_default()
        };
        let mean = |lags: &[Lag]| {
            lags.iter().map(|lag| lag.behind.as_secs_f64()).sum::<f64>() / lags.len().max(1) as f64
        };
        let (early, late) = (mean(part(1)), mean(part(3)));
        let most = |of: fn(&Lag) -> f64| lags.iter().map(of).fold(0.0, f64::max);
        let achieved = posted as f64 / elapsed.as_secs_f64();
        // What falls behind a little more each second is behind without bound in the end.
        let is_bounded = late <= 1.5 * early + 0.25 && achieved >= 0.97 * rate as f64;
        report::figure(&format!("{rate} posts/s wanted: posted"), achieved, "posts/s");
        report::figure("  most that it was behind", most(|lag| lag.records as f64), "records");
        report::figure("  most that it was behind", 1e3 * most(|lag| lag.behind.as_secs_f64()), "ms");
        report::figure("  behind on average, second quarter of the time", 1e3 * early, "ms");
        report::figure("  behind on average, last quarter of the time", 1e3 * late, "ms");
        report::figure("  until it had caught up afterwards", 1e3 * settled.as_secs_f64(), "ms");
        report::note("  ", if is_bounded { "bounded: it keeps up" } else { "NOT bounded" });
        if is_bounded {
            break;
        }
    }
    square.house.house.stop_workers().await;
    Ok(())
}

/// Posts so many a second, as long as the house takes them. Says how many were posted, and how the lag was.
async fn post_steadily(square: &Square, first: u64, rate: u64) -> Result<(u64, Vec<Lag>)> {
    let over = Arc::new(AtomicBool::new(false));
    let house = square.house.house.clone();
    let sampled = tokio::spawn({
        let over = over.clone();
        async move {
            let projection = house.projections().into_iter().next().context("there is no feed")?;
            let mut lags = Vec::new();
            while !over.load(Ordering::Relaxed) {
                let live = projection.status().await?.live;
                lags.push(Lag {
                    records: live.iter().map(|one| one.records).sum(),
                    behind: live.iter().map(|one| one.behind).max().unwrap_or_default(),
                });
                SystemClock.sleep(SAMPLE_EVERY).await;
            }
            anyhow::Ok(lags)
        }
    });
    let watch = Stopwatch::start();
    let (mut posted, mut posting) = (0, JoinSet::new());
    while watch.elapsed() < STEADY_FOR {
        let due = (watch.elapsed().as_secs_f64() * rate as f64) as u64;
        while posted < due && watch.elapsed() < STEADY_FOR {
            let (house, request) = (square.house.clone(), square.post(first + posted).request());
            posting.spawn(async move { house.fill([vec![request]]).await });
            posted += 1;
            if posting.len() >= IN_FLIGHT {
                posting.join_next().await.context("no author posts")???;
            }
        }
        while let Some(done) = posting.try_join_next() {
            done??;
        }
        SystemClock.sleep(LOOK_EVERY).await;
    }
    while let Some(done) = posting.join_next().await {
        done??;
    }
    over.store(true, Ordering::Relaxed);
    Ok((posted, sampled.await??))
}

/// Measures and prints how a feed of a million rows is built.
pub async fn rebuild() -> Result<()> {
    for (engine, server) in [("SQLite", BenchServer::sqlite()?), ("PostgreSQL", BenchServer::postgres()?)] {
        let square = Square::open(&server).await?;
        square.fill(0..BUILT).await?;
        server.settle().await?;
        let before = resident();
        let (peak, over) = (Arc::new(AtomicU64::new(0)), Arc::new(AtomicBool::new(false)));
        let sampled = tokio::spawn({
            let (peak, over) = (peak.clone(), over.clone());
            async move {
                let mut last = VecDeque::new();
                while !over.load(Ordering::Relaxed) {
                    peak.fetch_max(resident(), Ordering::Relaxed);
                    last.push_back(resident());
                    SystemClock.sleep(SAMPLE_EVERY).await;
                }
                last.into_iter().collect::<Vec<u64>>()
            }
        });
        let watch = Stopwatch::start();
        square.house.house.start_workers(WorkerOptions::default());
        square.caught_up().await?;
        let elapsed = watch.elapsed();
        square.house.house.stop_workers().await;
        over.store(true, Ordering::Relaxed);
        let samples = sampled.await?;
        let rows = square.rows().await?;
        ensure!(rows == BUILT * FOLLOWERS, "readers have {rows} rows of {BUILT} posts");
        let verified = square.house.house.projections().into_iter().next().context("there is no feed")?;
        ensure!(verified.state().await?.verified == Some(true), "the build is not what the source says");
        let megabytes = |bytes: u64| bytes as f64 / 1e6;
        let half = samples.get(samples.len() / 2).copied().unwrap_or_default();
        report::heading(&format!("{engine}: a feed of {rows} rows built from {BUILT} posts"));
        report::figure("from the start of the workers to the switch", elapsed.as_secs_f64(), "s");
        report::figure("rows of readers", rows as f64 / elapsed.as_secs_f64(), "rows/s");
        report::figure("resident memory before", megabytes(before), "MB");
        report::figure("resident memory, half of the way", megabytes(half), "MB");
        report::figure("resident memory, most", megabytes(peak.load(Ordering::Relaxed)), "MB");
        report::figure("resident memory after", megabytes(resident()), "MB");
        square.site.close().await;
    }
    if let Some(load) = load::machine() {
        report::note("load of the machine (1, 5, 15 minutes)", &load);
    }
    Ok(())
}

/// Sends a million events through projectors that are killed, and prints what came of it. The comparison with a build from
/// nothing is part of it.
pub async fn endurance() -> Result<()> {
    let endured = statehouse_drills::endurance::run(ENDURED, ENDURANCE_SEED).await?;
    let (before, after) = endured.killed;
    report::heading(&format!("SQLite: {} events through projectors that are killed", endured.events));
    report::figure("until all were projected", endured.elapsed.as_secs_f64(), "s");
    report::figure("events", endured.events as f64 / endured.elapsed.as_secs_f64(), "events/s");
    report::figure("killed before their plan was written", before as f64, "processes");
    report::figure("killed after it", after as f64, "processes");
    report::figure("rows that are what a build from nothing gives", endured.rows as f64, "rows");
    Ok(())
}

/// The memory that this process has resident, in bytes.
fn resident() -> u64 {
    load::resident_bytes(std::process::id()).unwrap_or_default()
}
