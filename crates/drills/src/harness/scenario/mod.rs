//! Systems that are ready to run: a blueprint, a scenario with load, and what must hold when it is over.
//!
//! A scenario runs on any store, in a world in which answers get lost, and talks to the house as callers do. What it
//! then checks it reads from the rows and the log, not from what it believes to have done.
//!
//! The files of a system stand together in `systems/<name>`, its scenario among them.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use serde_json::{Map, Value as Json};
use statehouse::house::subject_of;
use statehouse::{Answer, Blueprint, Code, Expected, House, Operation, Refusal, Request};
use statehouse_store::clock::Stopwatch;
use statehouse_store::faulty::Odds;
use statehouse_store::{
    FaultyStore, Ids, Migrate, OperationStatus, Random, Record, Store, SystemClock, Tenant, Value,
};

use crate::harness::invariants::CheckScope;
use crate::proof::entity::invariants;

#[path = "../../../../../systems/auction/scenario.rs"]
mod auction;
#[path = "../../../../../systems/catalog/scenario.rs"]
mod catalog;
#[path = "../../../../../systems/feed/scenario.rs"]
mod feed;
#[path = "../../../../../systems/jobs/scenario.rs"]
mod jobs;
#[path = "../../../../../systems/library/scenario.rs"]
mod library;
#[path = "../../../../../systems/profile/scenario.rs"]
mod profile;
#[path = "../../../../../systems/tickets/scenario.rs"]
mod tickets;

/// A system: a name, a blueprint and a scenario.
pub struct System {
    /// Its name, and its folder's.
    pub name: &'static str,
    /// What it shows, in one sentence.
    pub about: &'static str,
    /// Its blueprint.
    pub blueprint: &'static str,
    /// Durations of the blueprint that are shortened so that the scenario need not wait for them: a text, and what stands for it.
    shortened: Option<(&'static str, &'static str)>,
    run: fn(Arc<ScenarioContext>) -> Running,
}

/// A scenario under way.
type Running = Pin<Box<dyn Future<Output = Result<Vec<Invariant>>> + Send>>;

/// All of them.
pub const SYSTEMS: &[System] = &[
    System {
        name: "auction",
        about: "Lots that bidders compete for up to the last moment, each with one winner.",
        blueprint: include_str!("../../../../../systems/auction/statehouse.toml"),
        shortened: Some(auction::EXTENSION),
        run: |context| Box::pin(auction::run(context)),
    },
    System {
        name: "catalog",
        about: "A commerce catalog that several people of each tenant edit at the same time.",
        blueprint: include_str!("../../../../../systems/catalog/statehouse.toml"),
        shortened: None,
        run: |context| Box::pin(catalog::run(context)),
    },
    System {
        name: "feed",
        about: "Home feeds of people who post, follow and unfollow, while the projector is killed again and again.",
        blueprint: include_str!("../../../../../systems/feed/statehouse.toml"),
        shortened: Some(feed::LINE),
        run: |context| Box::pin(feed::run(context)),
    },
    System {
        name: "jobs",
        about: "Jobs that workers claim, do, give back and die with, each done once in the end.",
        blueprint: include_str!("../../../../../systems/jobs/statehouse.toml"),
        shortened: Some(jobs::LEASE),
        run: |context| Box::pin(jobs::run(context)),
    },
    System {
        name: "library",
        about: "A tool library: loans, members who keep tools too long, waiting lists and a dashboard.",
        blueprint: include_str!("../../../../../systems/library/statehouse.toml"),
        shortened: Some(library::LOAN),
        run: |context| Box::pin(library::run(context)),
    },
    System {
        name: "profile",
        about: "Profiles that people edit from several devices, with retries and lost answers.",
        blueprint: include_str!("../../../../../systems/profile/statehouse.toml"),
        shortened: None,
        run: |context| Box::pin(profile::run(context)),
    },
    System {
        name: "tickets",
        about: "Seats that more buyers want than there are, held for a moment, bought or swept.",
        blueprint: include_str!("../../../../../systems/tickets/statehouse.toml"),
        shortened: Some(tickets::HOLD),
        run: |context| Box::pin(tickets::run(context)),
    },
];

/// How a scenario is run.
#[derive(Clone, Copy, Debug)]
pub struct ScenarioSize {
    /// Callers at once.
    pub callers: usize,
    /// What each of them does, in actions.
    pub actions: usize,
    /// Where chance comes from.
    pub seed: u64,
}

impl Default for ScenarioSize {
    fn default() -> ScenarioSize {
        ScenarioSize { callers: 16, actions: 100, seed: 1 }
    }
}

/// What is said while a scenario runs: actions done, and actions in all.
pub type ScenarioProgress = Arc<dyn Fn(u64, u64) + Send + Sync>;

/// Something that must hold, and what was counted to find out.
#[derive(Clone, Debug)]
pub struct Invariant {
    /// What must hold.
    pub holds: &'static str,
    /// What was looked at.
    pub counted: String,
}

/// What came of a scenario whose invariants all hold.
#[derive(Clone, Debug)]
pub struct ScenarioReport {
    /// What was checked.
    pub invariants: Vec<Invariant>,
    /// What was measured, as pairs of a name and a figure.
    pub figures: Vec<(&'static str, String)>,
}

impl System {
    /// The system of that name.
    pub fn named(name: &str) -> Option<&'static System> {
        SYSTEMS.iter().find(|system| system.name == name)
    }

    /// Runs the scenario on an empty store. An invariant that does not hold is an error.
    pub async fn run(
        &self,
        store: Arc<dyn Store>,
        size: ScenarioSize,
        progress: ScenarioProgress,
    ) -> Result<ScenarioReport> {
        let clock = Arc::new(SystemClock);
        let mut random = Random::seeded(size.seed);
        let faulty = FaultyStore::over(store.clone(), clock.clone(), Odds::default(), random.next_u64());
        let faulty = Arc::new(faulty);
        let text = self
            .shortened
            .map_or(self.blueprint.to_owned(), |(long, short)| self.blueprint.replace(long, short));
        let blueprint = Blueprint::read("statehouse.toml", &text)?;
        let ids = Ids::new(clock.clone(), random.fork());
        let house = House::with(faulty.clone(), &blueprint, clock, ids)?;
        let heads = store.wait_log(&[], Duration::ZERO).await?;
        ensure!(
            heads.iter().all(|head| *head == 0),
            "a scenario wants an empty store, and this one has a log"
        );
        house.migrate(Migrate::Apply).await?;
        let odds = Odds { unknown_before: 0.01, unknown_after: 0.01, unavailable: 0.005, ..Odds::default() };
        faulty.set_odds(odds);
        let total = (size.callers * size.actions) as u64;
        let stats = ScenarioCounters::default();
        let context =
            Arc::new(ScenarioContext { house, store, faulty: faulty.clone(), size, stats, total, progress });
        let watch = Stopwatch::start();
        let invariants = (self.run)(context.clone()).await?;
        let elapsed = watch.elapsed();
        let count = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        let done = count(&context.stats.done);
        let figures = vec![
            ("actions", done.to_string()),
            ("actions a second", format!("{:.0}", done as f64 / elapsed.as_secs_f64())),
            ("refused by a version", count(&context.stats.conflicts).to_string()),
            ("retried under the same id", count(&context.stats.retries).to_string()),
            ("faults", faulty.achieved().to_string()),
        ];
        Ok(ScenarioReport { invariants, figures })
    }
}

/// What a scenario has to work with.
pub struct ScenarioContext {
    house: House,
    /// The store without faults, for looking at what is there.
    store: Arc<dyn Store>,
    faulty: Arc<FaultyStore>,
    size: ScenarioSize,
    stats: ScenarioCounters,
    total: u64,
    progress: ScenarioProgress,
}

#[derive(Default)]
struct ScenarioCounters {
    done: AtomicU64,
    conflicts: AtomicU64,
    retries: AtomicU64,
}

/// How often a caller asks again before it gives the scenario up.
const TRIES_MAX: usize = 200;

impl ScenarioContext {
    /// Runs `caller` for each caller at once, each with chance of its own.
    async fn callers<F>(
        self: &Arc<Self>,
        caller: impl Fn(Arc<ScenarioContext>, usize, Random) -> F,
    ) -> Result<()>
    where
        F: Future<Output = Result<()>> + Send + 'static,
    {
        let mut random = Random::seeded(self.size.seed);
        let mut callers = tokio::task::JoinSet::new();
        for number in 0..self.size.callers {
            callers.spawn(caller(self.clone(), number, random.fork()));
        }
        while let Some(ended) = callers.join_next().await {
            ended??;
        }
        // The world is good again while what is stored is looked at.
        self.faulty.set_odds(Odds::default());
        Ok(())
    }

    /// What a checker of invariants looks at.
    fn scope<'a>(&'a self, tenant: &'a Tenant, resource: &'a str) -> CheckScope<'a> {
        CheckScope { house: &self.house, store: self.store.clone(), tenant, resource }
    }

    /// One action is done.
    fn done(&self) {
        let done = self.stats.done.fetch_add(1, Ordering::Relaxed) + 1;
        (self.progress)(done, self.total);
    }

    /// Calls an action as a careful caller does: again, under the same id, until the outcome is known.
    async fn call(
        &self,
        tenant: &Tenant,
        request: Request,
        operation: &str,
    ) -> Result<Result<Answer, Refusal>> {
        self.repeat(|operation| self.house.call(tenant, request.clone(), operation), operation).await
    }

    /// Calls several actions as one, as carefully.
    async fn batch(
        &self,
        tenant: &Tenant,
        requests: &[Request],
        operation: &str,
    ) -> Result<Result<Vec<Answer>, Refusal>> {
        let call = |operation| async { self.house.batch(tenant, requests.to_vec(), operation).await };
        self.repeat(call, operation).await
    }

    async fn repeat<T, F>(&self, call: impl Fn(Operation) -> F, id: &str) -> Result<Result<T, Refusal>>
    where
        F: Future<Output = Result<T, Refusal>>,
    {
        for _ in 0..TRIES_MAX {
            let operation = Operation { id: Some(id.to_owned()), fingerprint: String::new() };
            match call(operation).await {
                Err(refusal)
                    if matches!(refusal.code, Code::OutcomeUnknown | Code::Unavailable | Code::Contended) =>
                {
                    self.stats.retries.fetch_add(1, Ordering::Relaxed);
                }
                Err(refusal) => {
                    if refusal.code == Code::VersionConflict {
                        self.stats.conflicts.fetch_add(1, Ordering::Relaxed);
                    }
                    return Ok(Err(refusal));
                }
                Ok(answer) => return Ok(Ok(answer)),
            }
        }
        anyhow::bail!("operation {id} had no outcome after {TRIES_MAX} tries")
    }

    /// Every record of the log, of each subject in order.
    async fn records(&self) -> Result<Vec<Record>> {
        let mut records = Vec::new();
        for partition in 0..self.store.partitions() {
            let mut after = 0;
            loop {
                let page = self.store.read_log(partition, after, 1_000).await?;
                let Some(last) = page.records.last().and_then(|record| record.position) else { break };
                after = last.offset;
                records.extend(page.records);
            }
        }
        Ok(records)
    }
}

/// A request without a version.
fn request(action: &str, key: &[Value], input: Json) -> Request {
    let input = if let Json::Object(fields) = input { fields } else { Map::new() };
    Request { action: action.to_owned(), key: key.to_vec(), input, expected: None }
}

/// The same under a version that was seen.
fn under(version: i64, request: Request) -> Request {
    Request { expected: Some(Expected::Version(version)), ..request }
}

/// Checks the invariants of entities of a tenant, and counts their versions and deletions.
async fn entities_are_sound(scope: CheckScope<'_>) -> Result<(usize, usize)> {
    invariants::check(&scope).await?;
    let changes = scope.changes(scope.sibling("")?, &["counted"]).await?;
    let deletions = changes.values().flat_map(BTreeMap::values).filter(|change| change.name == "deleted");
    Ok((changes.values().map(BTreeMap::len).sum(), deletions.count()))
}

/// What was counted to find out that versions have one writer.
fn versions_have_one_writer(versions: usize) -> Invariant {
    Invariant {
        holds: "each version of a row has exactly one writer",
        counted: format!("{versions} versions"),
    }
}

/// Checks that every acknowledged write is in the log, and that no event of an operation is there twice. The events of one
/// operation may be in several records, one for each partition of the log.
fn nothing_is_lost_or_doubled(records: &[Record], acknowledged: &[String]) -> Result<Invariant> {
    let mut written: HashMap<(&str, String), usize> = HashMap::new();
    for record in records.iter().filter(|record| record.status == OperationStatus::Applied) {
        for event in &record.events {
            let what = format!("{} {:?}", event.name, subject_of(record, event));
            *written.entry((&record.operation, what)).or_default() += 1;
        }
    }
    let operations: HashSet<&str> = written.keys().map(|(operation, _)| *operation).collect();
    for operation in acknowledged {
        ensure!(
            operations.contains(operation.as_str()),
            "{operation} was acknowledged and is not in the log"
        );
    }
    let doubled = written.iter().find(|(_, times)| **times > 1);
    ensure!(doubled.is_none(), "an event of an operation is in the log more than once: {doubled:?}");
    let counted = format!("{} acknowledged writes", acknowledged.len());
    Ok(Invariant { holds: "no acknowledged write is lost, and none is done twice", counted })
}

/// Reads a number of a row.
fn number(row: &Json, name: &str) -> Result<i64> {
    row.get(name).and_then(Json::as_i64).with_context(|| format!("{name} is missing in {row}"))
}
