//! Endurance: a long log goes through the projectors of a view and a feed, while they are killed again and again.
//!
//! Writers change profiles, posts and follows. Beside them lives one process at a time that projects, over a store that kills
//! it at the boundary of a plan: the call never returns, whether the plan was written or not, and the next process begins with
//! what is stored. When everything was read, all is built anew from nothing, and must be the same: the digest of the entries,
//! and everything that readers see.

use std::collections::BTreeSet;
use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use serde_json::{Value as Json, json};
use statehouse::{Expected, Operation, Request};
use statehouse_store::clock::Stopwatch;
use statehouse_store::faulty::{FaultyStore, Odds};
use statehouse_store::{Clock, Random, Scan, Store, SystemClock, Time, Value};
use tokio::task::JoinSet;

use crate::harness::engines::{Sqlite, TestEngine};
use crate::harness::store_client::{pause, same};
use crate::harness::tenant_client::TenantClient;
use crate::proof::feed::cases::feed_of;
use crate::proof::projection::cases::ProjectionFixture;

const BLUEPRINT: &str = r#"
[house]
name = "drill"

[entity.profile]
key    = { id = "int" }
fields = { team = "text?", points = { type = "int", default = 0 } }

[view.teams]
of       = "profile"
group_by = ["team"]
count    = true
sum      = ["points"]
min      = ["points"]
max      = ["points"]

[entity.post]
key    = { post_id = "int" }
fields = { author_id = "int", created_at = "time", body = "text?" }

[relation.follow]
from = { follower = "int" }
to   = { followed = "int" }

[feed.home]
posts      = "post"
follows    = "follow"
preview    = "body"
pull_above = 12
"#;

/// Those who write, each with profiles, posts and readers of its own.
const WRITERS: u64 = 32;
const PROFILES_EACH: u64 = 100;
const READERS_EACH: u64 = 2;
const AUTHORS: u64 = 200;
const TEAMS: u64 = 40;
/// Profiles that one plan changes at most.
const TOGETHER_MAX: u64 = 16;
/// Of a hundred plans of a writer, how many are about profiles; of a thousand others, how many about follows.
const PROFILES_SHARE: u64 = 30;
const FOLLOWS_SHARE: u64 = 4;
/// Records that a step of a projector takes.
const STEP: usize = 98;
/// How likely a plan is the last of the process that commits it: before it is written, or after.
const DEATH: f64 = 0.01;
/// In a long run that becomes less, or most of it would be the starts of processes: so many deaths of each kind, were each event
/// a plan.
const DEATHS: f64 = 1_000.0;
/// The feed, of which readers see pages of so many rows; and the tables of the view.
const FEED: &str = "home";
const PAGE: usize = 100;
const TABLES: [&str; 2] = ["teams", "teams_order"];

/// What came of a run.
#[derive(Clone, Debug)]
pub struct EnduranceReport {
    /// Events that were written and projected.
    pub events: u64,
    /// Processes that were killed, before and after their plan was written.
    pub killed: (u64, u64),
    /// Rows that readers see.
    pub rows: u64,
    /// How long it took, without the comparison.
    pub elapsed: Duration,
}

impl fmt::Display for EnduranceReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let EnduranceReport { events, killed: (before, after), rows, elapsed } = self;
        let seconds = elapsed.as_secs();
        write!(
            f,
            "{events} events in {seconds} s, {before}+{after} projectors killed (before+after a plan), {rows} rows are what a \
             build from nothing gives"
        )
    }
}

/// Sends at least so many events through the projectors, on SQLite, and compares.
pub async fn run(events: u64, seed: u64) -> Result<EnduranceReport> {
    let namespace = Sqlite.namespace("endurance")?;
    let store = namespace.open().await?;
    let client = TenantClient::over(store.clone(), BLUEPRINT, Arc::new(SystemClock)).await?;
    let watch = Stopwatch::start();
    let mut random = Random::seeded(seed);
    let (left, is_written) = (Arc::new(AtomicU64::new(events)), Arc::new(AtomicBool::new(false)));
    let base = Time::from_millis(SystemClock.now().micros() / 1_000).minus(Duration::from_secs(86_400));
    let mut writers: JoinSet<Result<u64>> = JoinSet::new();
    for number in 0..WRITERS {
        let writer = EventWriter::new(number, client.clone(), random.fork(), base);
        writers.spawn(writer.write(left.clone()));
    }
    let written = tokio::spawn({
        let is_written = is_written.clone();
        async move {
            let mut events = 0;
            while let Some(writer) = writers.join_next().await {
                events += writer??;
            }
            is_written.store(true, Ordering::SeqCst);
            anyhow::Ok(events)
        }
    });
    let mut killed = (0, 0);
    loop {
        let was_written = is_written.load(Ordering::SeqCst) || written.is_finished();
        match live(&store, random.next_u64(), DEATH.min(DEATHS / events as f64)).await? {
            ProcessEnd::Before => killed.0 += 1,
            ProcessEnd::After => killed.1 += 1,
            ProcessEnd::Idle if was_written => break,
            ProcessEnd::Idle => pause().await,
        }
    }
    let (events, elapsed) = (written.await??, watch.elapsed());
    let rows = compare(&store).await?;
    store.close().await;
    Ok(EnduranceReport { events, killed, rows, elapsed })
}

/// How the life of a process ended.
enum ProcessEnd {
    Before,
    After,
    /// It had nothing more to do.
    Idle,
}

/// One process that projects until it is killed, which is so likely with each plan, or everything is read.
async fn live(store: &Arc<dyn Store>, seed: u64, death: f64) -> Result<ProcessEnd> {
    let faulty = Arc::new(FaultyStore::over(store.clone(), Arc::new(SystemClock), Odds::default(), seed));
    let client = TenantClient::over(faulty.clone(), BLUEPRINT, Arc::new(SystemClock)).await?;
    let fixture = ProjectionFixture::of(client).await?;
    faulty.set_odds(Odds { crash_before: death, crash_after: death, ..Odds::default() });
    let process = tokio::spawn(async move { while fixture.work(STEP).await.unwrap_or(true) {} });
    loop {
        let achieved = faulty.achieved();
        if achieved.crashes_before + achieved.crashes_after > 0 {
            process.abort();
            return Ok(if achieved.crashes_after > 0 { ProcessEnd::After } else { ProcessEnd::Before });
        }
        if process.is_finished() {
            process.await.context("a process ended in another way")?;
            return Ok(ProcessEnd::Idle);
        }
        pause().await;
    }
}

/// Builds everything anew, and requires it to be what was projected. Says how many rows readers see.
async fn compare(store: &Arc<dyn Store>) -> Result<u64> {
    let client = TenantClient::over(store.clone(), BLUEPRINT, Arc::new(SystemClock)).await?;
    let fixture = ProjectionFixture::of(client.clone()).await?;
    let projections = client.house.projections();
    let mut before = Vec::new();
    for projection in &projections {
        let live = projection.state().await?.live.context("nothing is live")?.number;
        before.push((projection.digest(live).await?, shown(&client, projection.name(), live).await?));
        ensure!(projection.rebuild().await?, "no build of {} could be begun", projection.name());
    }
    while fixture.work(STEP).await? {}
    let mut rows = 0;
    for (projection, (digest, (sum, count))) in projections.iter().zip(before) {
        let (name, state) = (projection.name(), projection.state().await?);
        same(&format!("whether {name} is the source's"), &state.verified, &Some(true))?;
        let live = state.live.context("nothing is live")?.number;
        same(&format!("the digest of {name}"), &projection.digest(live).await?, &digest)?;
        same(&format!("the rows of {name}"), &shown(&client, name, live).await?, &(sum, count))?;
        ensure!(count > 0, "{name} shows nothing");
        rows += count;
    }
    Ok(rows)
}

/// A digest of what readers see of the live generation, in which the order does not count, and how many rows that are. Whether a
/// post was pushed to a reader or is pulled is no difference: a build decides it by how many follow now.
async fn shown(client: &TenantClient, name: &str, generation: i64) -> Result<(u128, u64)> {
    let mut seen = DigestSum::default();
    if name == FEED {
        for reader in 0..READERS_EACH * WRITERS {
            let reader = i64::try_from(reader)?;
            for row in feed_of(client, reader, PAGE).await? {
                seen.add(&format!("{reader} {row:?}"));
            }
        }
        return Ok((seen.sum, seen.count));
    }
    for table in TABLES {
        let mut scan = Scan::all(client.table(table)?);
        loop {
            let page = client.house.store().scan(&scan).await?;
            for row in page.rows.iter().filter(|row| row.int("generation") == Some(generation)) {
                let mut row = row.to_json();
                // How often a row was written is not what it says.
                for column in ["generation", "version"] {
                    row.as_object_mut().context("a row is no object")?.remove(column);
                }
                seen.add(&format!("{table} {row}"));
            }
            let Some(next) = page.next else { break };
            scan = scan.after(next)?;
        }
    }
    Ok((seen.sum, seen.count))
}

/// Texts, added up.
#[derive(Default)]
struct DigestSum {
    sum: u128,
    count: u64,
}

impl DigestSum {
    fn add(&mut self, text: &str) {
        let digest = text.bytes().fold(0x6c62_272e_07bb_0142_62b8_2175_6295_c58d_u128, |hash, byte| {
            (hash ^ u128::from(byte)).wrapping_mul(0x0000_0000_0100_0000_0000_0000_0000_013b)
        });
        (self.sum, self.count) = (self.sum.wrapping_add(digest), self.count + 1);
    }
}

/// A writer. No other writer touches the same rows, so nothing is ever refused.
struct EventWriter {
    number: u64,
    client: TenantClient,
    random: Random,
    base: Time,
    /// Whether each profile is there; `None` before it was made.
    profiles: Vec<Option<bool>>,
    /// Whether each post is there.
    posts: Vec<bool>,
    follows: BTreeSet<(u64, u64)>,
}

impl EventWriter {
    fn new(number: u64, client: TenantClient, random: Random, base: Time) -> EventWriter {
        let profiles = vec![None; PROFILES_EACH as usize];
        EventWriter { number, client, random, base, profiles, posts: Vec::new(), follows: BTreeSet::new() }
    }

    /// Writes as long as events are left. Says how many it has written.
    async fn write(mut self, left: Arc<AtomicU64>) -> Result<u64> {
        let mut written = 0;
        while left.load(Ordering::Relaxed) > 0 {
            let requests = if self.random.below(100) < PROFILES_SHARE {
                self.change_profiles()?
            } else if self.random.below(1_000) < FOLLOWS_SHARE {
                vec![self.change_follow()]
            } else {
                vec![self.change_post()?]
            };
            let events = requests.len() as u64;
            let TenantClient { house, tenant } = &self.client;
            let done = house.batch(tenant, requests, Operation::default()).await;
            done.map_err(|refusal| anyhow::anyhow!("request {:?}: {refusal}", refusal.call))?;
            written += events;
            let less = |left: u64| Some(left.saturating_sub(events));
            // It always is: there is no number that less would not do.
            let _ = left.fetch_update(Ordering::Relaxed, Ordering::Relaxed, less);
        }
        Ok(written)
    }

    fn request(action: &str, key: u64, input: &Json) -> Result<Request> {
        let key = [Value::from(i64::try_from(key)?)];
        Ok(TenantClient::request(action, &key, input, Some(Expected::Any)))
    }

    fn change_profiles(&mut self) -> Result<Vec<Request>> {
        let count = 1 + self.random.below(TOGETHER_MAX);
        let first = self.random.below(PROFILES_EACH);
        let mut requests = Vec::new();
        for index in (first..first + count).map(|index| index % PROFILES_EACH) {
            let id = index * WRITERS + self.number;
            let team = format!("team {}", self.random.below(TEAMS));
            let fields = json!({"team": team, "points": self.random.below(1_000)});
            let is_rare = self.random.below(8) == 0;
            let profile = &mut self.profiles[usize::try_from(index)?];
            let (action, input, after) = match *profile {
                None => {
                    let input = json!({"id": id, "team": team, "points": 1});
                    requests.push(TenantClient::request("profile.create", &[], &input, None));
                    *profile = Some(true);
                    continue;
                }
                Some(true) if is_rare => ("profile.delete", json!({}), false),
                Some(true) => ("profile.patch", fields, true),
                Some(false) => ("profile.restore", json!({}), true),
            };
            *profile = Some(after);
            requests.push(EventWriter::request(action, id, &input)?);
        }
        Ok(requests)
    }

    fn change_post(&mut self) -> Result<Request> {
        let place = self.posts.len() as u64;
        if place == 0 || self.random.below(2) == 0 {
            let id = place * WRITERS + self.number;
            let at = Value::Time(self.base.plus(Duration::from_millis(id))).to_json();
            let author = self.random.below(AUTHORS);
            self.posts.push(true);
            let input = json!({"post_id": id, "author_id": author, "created_at": at, "body": "new"});
            return Ok(TenantClient::request("post.create", &[], &input, None));
        }
        let place = self.random.below(place);
        let id = place * WRITERS + self.number;
        let at = Value::Time(self.base.plus(Duration::from_millis(self.random.below(80_000_000)))).to_json();
        let choice = self.random.below(8);
        let post = &mut self.posts[usize::try_from(place)?];
        let (action, input) = match (*post, choice) {
            (false, _) => ("post.restore", json!({})),
            (true, 0) => ("post.delete", json!({})),
            (true, 1) => ("post.patch", json!({"created_at": at})),
            (true, 2) => ("post.patch", json!({"author_id": self.random.below(AUTHORS)})),
            (true, choice) => ("post.patch", json!({"body": format!("edited {choice}")})),
        };
        *post = action != "post.delete";
        EventWriter::request(action, id, &input)
    }

    fn change_follow(&mut self) -> Request {
        let reader = self.random.below(READERS_EACH) * WRITERS + self.number;
        let edge = (reader, self.random.below(AUTHORS));
        let action = if self.follows.remove(&edge) {
            "follow.remove"
        } else {
            self.follows.insert(edge);
            "follow.add"
        };
        let key = [edge.0, edge.1].map(|end| Value::from(i64::try_from(end).unwrap_or_default()));
        TenantClient::request(action, &key, &json!({}), None)
    }
}
