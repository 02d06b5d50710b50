//! People who post, edit, delete, follow, unfollow and read their feeds, while the process that projects is killed again and
//! again and the feed is built anew.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use anyhow::{Context as _, Result, bail, ensure};
use serde_json::{Value as Json, json};
use statehouse::infra::projection::Projection;
use statehouse::{Blueprint, Code, Expected, House, worker};
use statehouse_store::random::{Ids, Random};
use statehouse_store::{Clock as _, Row, Scan, SystemClock, Tenant, Time, Value};

use super::{Invariant, ScenarioContext, System, nothing_is_lost_or_doubled, request};

/// The line between pushing and pulling, in the scenario; the blueprint's is shortened to it.
pub(super) const LINE: (&str, &str) = ("pull_above = 10000", "pull_above = 9");
/// Whom nearly everybody follows.
const CELEBRITY: i64 = 0;
/// How many processes project at once, and how long each of them lives, in milliseconds at most.
const PROJECTORS: usize = 2;
const LIFE_MS: u64 = 1_200;
/// How long a person thinks before the next action, in milliseconds at most.
const THINK_MS: u64 = 50;
/// How often the end of the projecting is looked for, and the pause between two looks.
const LOOKS_MAX: usize = 6_000;
const PAUSE: Duration = Duration::from_millis(20);

/// A post in a feed: its time, its number, its author and its words.
type Shown = (i64, i64, i64, String);

/// What callers know for sure.
#[derive(Default)]
struct FeedNotes {
    acknowledged: Mutex<Vec<String>>,
    feeds_read: AtomicU64,
    posts_read: AtomicU64,
    killed: AtomicU64,
    over: AtomicBool,
}

/// A house of its own over the store, as another process has it.
fn process(context: &ScenarioContext, random: &mut Random) -> Result<House> {
    let system = System::named("feed").context("there is no such system")?;
    let blueprint = Blueprint::read("statehouse.toml", &system.blueprint.replace(LINE.0, LINE.1))?;
    let clock = Arc::new(SystemClock);
    let house =
        House::with(context.store.clone(), &blueprint, clock.clone(), Ids::new(clock, random.fork()))?;
    Ok(house)
}

/// Short leases, so that the process that takes over need not wait long.
fn options(random: &mut Random) -> worker::WorkerOptions {
    worker::WorkerOptions {
        lease: Duration::from_millis(400),
        idle_max: Duration::from_millis(100),
        error_max: Duration::from_millis(200),
        random: random.fork(),
        ..worker::WorkerOptions::default()
    }
}

pub(super) async fn run(context: Arc<ScenarioContext>) -> Result<Vec<Invariant>> {
    let tenant = Tenant::new("default")?;
    let notes = Arc::new(FeedNotes::default());
    let mut random = Random::seeded(context.size.seed);
    let keeper = process(&context, &mut random)?;
    let projection = home(&keeper)?;
    keeper.start_workers(options(&mut random));
    caught_up(&projection).await?;
    keeper.stop_workers().await;
    let mut projectors = tokio::task::JoinSet::new();
    for _ in 0..PROJECTORS {
        let (context, notes, random) = (context.clone(), notes.clone(), random.fork());
        projectors.spawn(async move { project(&context, &notes, random).await });
    }
    context
        .callers(|context, caller, random| {
            let (tenant, notes, projection) = (tenant.clone(), notes.clone(), projection.clone());
            async move { live(&context, &tenant, &notes, &projection, caller, random).await }
        })
        .await?;
    notes.over.store(true, Ordering::SeqCst);
    while let Some(ended) = projectors.join_next().await {
        ended??;
    }
    // One that is not killed does what is left.
    let keeper = process(&context, &mut random)?;
    keeper.start_workers(options(&mut random));
    caught_up(&projection).await?;
    let (feeds, rows) = feeds_are_the_truth(&context, &keeper, &tenant, &projection).await?;
    ensure!(projection.rebuild().await?, "no build could be begun");
    caught_up(&projection).await?;
    let state = projection.state().await?;
    ensure!(state.verified == Some(true), "what was built from nothing differs: {state:?}");
    let (again, _) = feeds_are_the_truth(&context, &keeper, &tenant, &projection).await?;
    ensure!(again == feeds, "what was built from nothing has {again} posts in its feeds, not {feeds}");
    keeper.stop_workers().await;
    let records = context.records().await?;
    let acknowledged =
        std::mem::take(&mut *notes.acknowledged.lock().unwrap_or_else(PoisonError::into_inner));
    let count = |counter: &AtomicU64| counter.load(Ordering::SeqCst);
    Ok(vec![
        Invariant {
            holds: "every feed is the one that is computed from posts and follows",
            counted: format!("{feeds} posts in feeds, {} projectors killed on the way", count(&notes.killed)),
        },
        Invariant {
            holds: "no row is left of what was deleted or unfollowed, and no work",
            counted: format!("{rows} rows"),
        },
        Invariant {
            holds: "a feed that is read is in order, without a post twice, and of one generation",
            counted: format!("{} feeds of {} posts", count(&notes.feeds_read), count(&notes.posts_read)),
        },
        Invariant {
            holds: "a feed that is built from nothing is the same",
            counted: format!("{} generations", state.newest),
        },
        nothing_is_lost_or_doubled(&records, &acknowledged)?,
    ])
}

fn home(house: &House) -> Result<Projection> {
    let mut projections = house.projections().into_iter();
    projections.find(|one| one.name() == "home").context("the house has no such projection")
}

/// Processes that project, each of them killed after a while with its leases in its hands.
async fn project(context: &ScenarioContext, notes: &FeedNotes, mut random: Random) -> Result<()> {
    while !notes.over.load(Ordering::SeqCst) {
        let house = process(context, &mut random)?;
        house.start_workers(options(&mut random));
        SystemClock.sleep(Duration::from_millis(LIFE_MS / 2 + random.below(LIFE_MS / 2))).await;
        drop(house);
        notes.killed.fetch_add(1, Ordering::SeqCst);
    }
    Ok(())
}

/// What one caller does.
async fn live(
    context: &ScenarioContext,
    tenant: &Tenant,
    notes: &FeedNotes,
    projection: &Projection,
    caller: usize,
    mut random: Random,
) -> Result<()> {
    let me = i64::try_from(caller)?;
    let people = context.size.callers as u64;
    let mut mine: Vec<i64> = Vec::new();
    if me != CELEBRITY {
        let key = [me.into(), CELEBRITY.into()];
        act(context, tenant, notes, "follow.add", &key, json!({}), &format!("{caller}-fan")).await?;
    }
    for number in 0..context.size.actions {
        SystemClock.sleep(Duration::from_millis(random.below(THINK_MS))).await;
        let operation = format!("{caller}-{number}");
        let act = async |action: &str, key: &[Value], input: Json| {
            act(context, tenant, notes, action, key, input, &operation).await
        };
        let author = i64::try_from(random.below(people))?;
        let one_of_mine = usize::try_from(random.next_u64() % mine.len().max(1) as u64)
            .ok()
            .and_then(|at| mine.get(at).copied());
        match (random.below(20), one_of_mine) {
            (0..7, _) | (_, None) => {
                let post = 1_000_000 * (me + 1) + i64::try_from(number)?;
                let at = Value::Time(SystemClock.now()).to_json();
                let input = json!({"post_id": post, "author_id": me, "created_at": at, "body": format!("post {number}")});
                act("post.create", &[], input).await?;
                mine.push(post);
            }
            (7, Some(post)) => {
                let earlier = SystemClock.now().minus(Duration::from_secs(random.below(3_600)));
                let input = json!({"created_at": Value::Time(earlier).to_json()});
                act("post.patch", &[post.into()], input).await?;
            }
            (8, Some(post)) => {
                act("post.patch", &[post.into()], json!({"body": format!("edit {number}")})).await?;
            }
            (9..11, Some(post)) => {
                act("post.delete", &[post.into()], json!({})).await?;
                if random.chance(0.3) {
                    let operation = format!("{operation}-back");
                    let key = [post.into()];
                    self::act(context, tenant, notes, "post.restore", &key, json!({}), &operation).await?;
                }
            }
            (11..15, _) => {
                act("follow.add", &[me.into(), author.into()], json!({})).await?;
            }
            (15..17, _) => {
                act("follow.remove", &[me.into(), author.into()], json!({})).await?;
            }
            _ => {
                if let Some(feed) = read(context, tenant, me).await? {
                    notes.feeds_read.fetch_add(1, Ordering::SeqCst);
                    notes.posts_read.fetch_add(feed.len() as u64, Ordering::SeqCst);
                }
            }
        }
        if caller == 0 && number == context.size.actions / 2 {
            projection.rebuild().await?;
        }
        context.done();
    }
    Ok(())
}

/// Calls an action; one that is refused as it may be is no failure.
async fn act(
    context: &ScenarioContext,
    tenant: &Tenant,
    notes: &FeedNotes,
    action: &str,
    key: &[Value],
    input: Json,
    operation: &str,
) -> Result<()> {
    let mut wanted = request(action, key, input);
    wanted.expected = action.starts_with("post.").then_some(Expected::Any).filter(|_| !key.is_empty());
    match context.call(tenant, wanted, operation).await? {
        Ok(answer) => {
            // What changes nothing leaves nothing in the log.
            if answer.token.is_some() {
                let mut acknowledged = notes.acknowledged.lock().unwrap_or_else(PoisonError::into_inner);
                acknowledged.push(operation.to_owned());
            }
            Ok(())
        }
        Err(refusal) if matches!(refusal.code, Code::Deleted | Code::NotDeleted) => Ok(()),
        Err(refusal) => bail!("{operation}: {action}: {refusal}"),
    }
}

/// A person's feed, from its first page to its last; `None` if it cannot be read to its end: it is built for the first time,
/// or its generation was dropped on the way.
async fn read(context: &ScenarioContext, tenant: &Tenant, viewer: i64) -> Result<Option<Vec<Shown>>> {
    let mut input = json!({"viewer_id": viewer, "limit": 20});
    let (mut feed, mut generations): (Vec<Shown>, BTreeSet<i64>) = (Vec::new(), BTreeSet::new());
    loop {
        let page = match context
            .house
            .call(tenant, request("home.list", &[], input.clone()), Default::default())
            .await
        {
            Ok(page) => page,
            Err(refusal) if matches!(refusal.code, Code::Unavailable | Code::InvalidInput) => {
                return Ok(None);
            }
            Err(refusal) => bail!("the feed of {viewer}: {refusal}"),
        };
        for row in page.body.as_array().context("a feed that is no list")? {
            let int = |name: &str| super::number(row, name);
            let at: Time = row["created_at"].as_str().context("a post without a time")?.parse()?;
            let body = row["post_preview"].as_str().unwrap_or_default().to_owned();
            feed.push((at.micros(), int("post_id")?, int("author_id")?, body));
            generations.insert(int("generation")?);
        }
        let Some(next) = page.next else { break };
        input["cursor"] = next.into();
    }
    ensure!(generations.len() <= 1, "the feed of {viewer} is of the generations {generations:?}");
    for (one, next) in feed.iter().zip(feed.iter().skip(1)) {
        ensure!((one.0, one.1) > (next.0, next.1), "the feed of {viewer} has {next:?} behind {one:?}");
    }
    Ok(Some(feed))
}

/// Waits until nothing lies ahead of the projection, and nothing is being built.
async fn caught_up(projection: &Projection) -> Result<()> {
    for _ in 0..LOOKS_MAX {
        let status = projection.status().await?;
        let is_still = status.state.live.is_some() && status.state.building.is_none();
        if is_still && status.live.iter().all(|one| one.records == 0) {
            return Ok(());
        }
        SystemClock.sleep(PAUSE).await;
    }
    bail!("the projection does not catch up: {:?}", projection.status().await?)
}

async fn rows(context: &ScenarioContext, house: &House, table: &str) -> Result<Vec<Row>> {
    let mut scan =
        Scan::all(house.schema().table(table).with_context(|| format!("there is no table {table}"))?);
    let mut rows = Vec::new();
    loop {
        let page = context.store.scan(&scan).await?;
        rows.extend(page.rows);
        let Some(next) = page.next else { return Ok(rows) };
        scan = scan.after(next)?;
    }
}

/// Compares every feed with the one that is computed from posts and follows, and what is stored with both.
async fn feeds_are_the_truth(
    context: &ScenarioContext,
    house: &House,
    tenant: &Tenant,
    projection: &Projection,
) -> Result<(usize, usize)> {
    let mut by_author: BTreeMap<i64, Vec<Shown>> = BTreeMap::new();
    for row in rows(context, house, "posts").await?.iter().filter(|row| row.text("status") == Some("ACTIVE"))
    {
        let int = |name: &str| row.int(name).with_context(|| format!("a post without {name}"));
        let at = row.time("created_at").context("a post without a time")?.micros();
        let body = row.text("body").unwrap_or_default().to_owned();
        let author = int("author_id")?;
        by_author.entry(author).or_default().push((at, int("post_id")?, author, body));
    }
    let mut truth: BTreeMap<i64, Vec<Shown>> = BTreeMap::new();
    for row in rows(context, house, "follows").await? {
        let (Some(viewer), Some(author)) = (row.int("follower_id"), row.int("followed_id")) else { continue };
        let feed = truth.entry(viewer).or_default();
        if row.time("since").is_some() {
            feed.extend(by_author.get(&author).into_iter().flatten().cloned());
        }
    }
    let mut places: BTreeSet<(i64, i64, i64)> = BTreeSet::new();
    for (viewer, feed) in &mut truth {
        feed.sort_by_key(|shown| std::cmp::Reverse((shown.0, shown.1)));
        places.extend(feed.iter().map(|(at, post, ..)| (*viewer, *at, *post)));
        let read = read(context, tenant, *viewer).await?.context("a feed that cannot be read")?;
        let differs = read.iter().zip(feed.iter()).position(|(is, should)| is != should);
        ensure!(
            read == *feed,
            "the feed of {viewer} has {} posts and should have {}; the first that differs is number {differs:?}",
            read.len(),
            feed.len()
        );
    }
    let live = projection.state().await?.live.map(|live| live.number);
    let stored = rows(context, house, "user_feed").await?;
    for row in stored.iter().filter(|row| row.int("generation") == live) {
        let int = |name: &str| row.int(name).unwrap_or(-1);
        let at = row.time("created_at").map_or(0, Time::micros);
        ensure!(
            places.contains(&(int("viewer_id"), at, int("post_id"))),
            "a row is left of something else: {}",
            row.to_json()
        );
    }
    let work = rows(context, house, "user_feed_work").await?;
    ensure!(work.iter().all(|row| row.int("generation") != live), "work is left: {work:?}");
    Ok((truth.values().map(Vec::len).sum(), stored.len()))
}
