//! Simulation: archetypes, workers and the model store on a virtual clock, in several processes that crash, restart, are
//! paused and have wrong clocks, over a network that loses answers and delivers late.
//!
//! A seed determines everything: the same seed gives the same trace, call by call, which its digest shows. Clients act
//! for a bounded number of operations; then the world gets better, the workers finish what is due, and a *history* is
//! judged:
//!
//! - **linearizable**: what clients saw of each row can have happened in one order ([`crate::harness::linearize`]);
//! - **exactly once**: an operation that was acknowledged is in the log once, one that was refused is not in it;
//! - **order**: the log of each subject is a way through its archetype's states, in time;
//! - **conservation**: what is stored is what the log adds up to; nothing is missing or there twice.
//!
//! An archetype joins with a [`Workload`] as the workload of its [`crate::proof::Proof`]: a blueprint, what a client does, what is checked in the end.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::future::Future;
use std::pin::Pin;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, LazyLock, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};
use serde_json::Value as Json;
use statehouse::egress::Egress;
use statehouse::house::{COMBINED_OPERATIONS, subject_of};
use statehouse::{Answer, Blueprint, Code, House};
use statehouse_store::clock::SkewedClock;
use statehouse_store::{
    Clock, Ids, ModelStore, OperationStatus, Plan, Random, Record, Schema, Store, Time, Value,
};
use tokio::task::JoinHandle;

use crate::conformance::CaseFuture;
use crate::harness::drill::{DrillTarget, is_passing};
use crate::harness::linearize::RegisterCall;
use crate::harness::log_paths::check_log_paths;
use crate::harness::proxy::StoreProxy;
use crate::harness::store_client::whole_log;
use crate::harness::tenant_client::TenantClient;
use crate::proof::{PROOFS, Proof};
use time::VirtualClock;
use world::{ArrivalRecorder, Network, SimulatedWorld};

mod time;
mod world;

pub use world::SimulationStats;

/// What is simulated of an archetype.
pub struct Workload {
    /// The archetype, by keyword.
    pub archetype: &'static str,
    pub(crate) blueprint: &'static str,
    pub(crate) resource: &'static str,
    /// The targets of outgoing requests, from a seed; all processes of a history share them. None for those that send nothing.
    pub(crate) egress: Option<fn(u64) -> Egress>,
    /// Before anything goes wrong.
    pub(crate) prepare: for<'a> fn(&'a TenantClient) -> CaseFuture<'a>,
    /// What a client does, again and again.
    pub(crate) act: for<'a> fn(&'a mut SimulatedClient) -> ClientFuture<'a>,
    /// What must hold in the end.
    pub(crate) check: for<'a> fn(&'a FinishedHistory) -> CaseFuture<'a>,
}

pub(crate) type ClientFuture<'a> = Pin<Box<dyn Future<Output = ()> + Send + 'a>>;

/// Every workload, in the order of the archetypes.
pub static WORKLOADS: LazyLock<Vec<&'static Workload>> =
    LazyLock::new(|| PROOFS.iter().filter_map(|proof| proof.workload).collect());

/// Operations in one history.
pub const OPERATIONS: u64 = 250;
const PROCESSES: usize = 3;
const CLIENTS: usize = 2;
/// How long a client thinks at most.
const THOUGHT_MICROS: u64 = 150_000;
/// How long lies between two blows at most, and how long a process is paused or gone.
const FAULT_INTERVAL_MICROS: u64 = 1_500_000;
const DOWNTIME_MICROS: u64 = 3_000_000;
const SKEW_MICROS: u64 = 4_000_000;
/// How often workers look for what is due.
const SWEEP_MICROS: u64 = 300_000;
/// Longer than any hold, lease or timer lasts.
const AFTERWARDS: Duration = Duration::from_secs(30);

/// What came of a seed.
#[derive(Clone, Debug)]
pub struct SimulationRun {
    /// The seed.
    pub seed: u64,
    /// The archetype.
    pub archetype: &'static str,
    /// A digest of the whole trace.
    pub trace: u64,
    /// What was provoked.
    pub stats: SimulationStats,
    /// Virtual time that passed.
    pub elapsed: Duration,
    /// What was violated, if anything was.
    pub violation: Option<String>,
    /// The plans in words, if they were asked for.
    pub told: Vec<String>,
}

/// What was sent to the store in a history.
#[derive(Clone, Debug)]
pub struct RecordedPlans {
    /// The tables of its house.
    pub schema: Schema,
    /// The plans, each with the time at which it arrived.
    pub plans: Vec<(Time, Plan)>,
}

/// How a seed is run.
#[derive(Clone, Copy, Debug)]
pub struct HistorySize {
    /// Operations of clients.
    pub operations: u64,
    /// Whether the plans are kept in words.
    pub tells: bool,
}

impl Default for HistorySize {
    fn default() -> HistorySize {
        HistorySize { operations: OPERATIONS, tells: false }
    }
}

/// Runs the history of a seed. The seed also chooses the archetype.
pub fn run(seed: u64, size: HistorySize) -> Result<SimulationRun> {
    let count = WORKLOADS.len() as u64;
    let workload = WORKLOADS.get(usize::try_from(seed % count)?).context("there are no courses")?;
    workload.run(None, seed, size)
}

impl Workload {
    /// The workload of an archetype.
    pub fn of(archetype: &str) -> Option<&'static Workload> {
        WORKLOADS.iter().copied().find(|workload| workload.archetype == archetype)
    }

    /// The default workload.
    fn own_target(&self) -> Result<DrillTarget> {
        DrillTarget::of(&Blueprint::read("simulation.toml", self.blueprint)?, self.resource)
    }

    /// The plans of a history, and the tables that they are about.
    pub fn recorded(&self, seed: u64, operations: u64) -> Result<RecordedPlans> {
        let target = self.own_target()?;
        let world = Arc::new(SimulatedWorld::new(seed, false));
        world.lock().plans = Some(Vec::new());
        let clock: Arc<dyn Clock> = Arc::new(world.clock.clone());
        let store: Arc<dyn Store> = Arc::new(ModelStore::with(clock.clone(), LOG_PARTITIONS));
        let house = target.build_house(store, clock.clone(), Ids::new(clock, Random::seeded(seed)))?;
        // On a thread of its own, because the caller has a runtime already.
        let size = HistorySize { operations, ..HistorySize::default() };
        let history = || {
            let runtime = tokio::runtime::Builder::new_current_thread().build()?;
            runtime.block_on(self.history(&target, &world, seed, size))
        };
        let judged = std::thread::scope(|scope| scope.spawn(history).join());
        judged.map_err(|_| anyhow::anyhow!("the history panicked"))??;
        let plans = world.lock().plans.take().unwrap_or_default();
        Ok(RecordedPlans { schema: house.schema().clone(), plans })
    }

    /// Runs the history of a seed, on another resource than its own if one is given.
    pub fn run(&self, target: Option<&DrillTarget>, seed: u64, size: HistorySize) -> Result<SimulationRun> {
        // Without a driver: code that sleeps by the machine's clock here is wrong, and panics.
        let runtime = tokio::runtime::Builder::new_current_thread().build()?;
        let own;
        let target = match target {
            Some(target) => target,
            None => {
                own = self.own_target()?;
                &own
            }
        };
        let world = Arc::new(SimulatedWorld::new(seed, size.tells));
        let violation = runtime.block_on(self.history(target, &world, seed, size)).err();
        let elapsed = world.clock.uptime();
        let state = &mut *world.lock();
        Ok(SimulationRun {
            seed,
            archetype: self.archetype,
            trace: state.trace,
            stats: state.stats,
            elapsed,
            violation: violation.map(|error| format!("{error:#}")),
            told: state.told.take().unwrap_or_default(),
        })
    }

    async fn history(
        &self,
        target: &DrillTarget,
        world: &Arc<SimulatedWorld>,
        seed: u64,
        size: HistorySize,
    ) -> Result<()> {
        let clock: Arc<dyn Clock> = Arc::new(world.clock.clone());
        let store: Arc<dyn Store> = Arc::new(ModelStore::with(clock.clone(), LOG_PARTITIONS));
        let store: Arc<dyn Store> = Arc::new(StoreProxy::new(store, ArrivalRecorder(world.clone())));
        let ids = Ids::new(clock.clone(), Random::seeded(seed ^ 0x5eed));
        let egress = self.egress.map(|targets| targets(seed));
        let house = target.build_house(store.clone(), clock.clone(), ids)?;
        let sound = TenantClient::enter(with_egress(house, egress.as_ref())).await?;
        (self.prepare)(&sound).await.context("before anything went wrong")?;
        let observations = Arc::new(ClientObservations {
            left: AtomicU64::new(size.operations),
            ..ClientObservations::default()
        });
        let mut cluster = Cluster {
            target: target.clone(),
            act: self.act,
            egress,
            store: store.clone(),
            world: world.clone(),
            observations: observations.clone(),
            processes: Vec::new(),
            lives: 0,
        };
        for process in 0..PROCESSES {
            cluster.start(process)?;
        }
        cluster.live().await?;
        // What was under way arrives or never will; then everything that is due is done.
        world.lock().faulty = false;
        let rest = world.clock.clone();
        finish(&world.clock, tokio::spawn(async move { rest.sleep(AFTERWARDS).await })).await?;
        let end = FinishedHistory { sound, observations };
        let swept = tokio::spawn({
            let client = end.sound.clone();
            async move { client.drain_workers().await }
        });
        finish(&world.clock, swept).await??;
        end.check_operations().await?;
        end.check_subjects().await?;
        let house = &end.sound.house;
        check_log_paths(house, house.store().as_ref()).await?;
        (self.check)(&end).await?;
        match Proof::of(self.archetype).and_then(|proof| proof.invariants) {
            Some(check) => check(&end.sound.scope(&target.resource)).await,
            None => Ok(()),
        }
    }
}

/// A house whose outgoing requests go to these targets, if there are some.
fn with_egress(house: House, egress: Option<&Egress>) -> House {
    match egress {
        Some(egress) => house.with_egress(egress.clone()),
        None => house,
    }
}

/// Partitions of the simulated log.
const LOG_PARTITIONS: u32 = 2;

/// Lets time pass until a task is done.
async fn finish<T>(clock: &VirtualClock, task: JoinHandle<T>) -> Result<T> {
    let mut idle = 0;
    loop {
        clock.settle().await;
        if task.is_finished() {
            return Ok(task.await?);
        }
        // Who calls the store without a detour sleeps nowhere, and may have much to do.
        idle = if clock.move_on() { 0 } else { idle + 1 };
        ensure!(idle < IDLE_MAX, "everybody waits for somebody else");
    }
}

/// Turns without anybody who sleeps.
const IDLE_MAX: u32 = 100_000;

/// All processes, and what befalls them.
struct Cluster {
    target: DrillTarget,
    act: for<'a> fn(&'a mut SimulatedClient) -> ClientFuture<'a>,
    egress: Option<Egress>,
    store: Arc<dyn Store>,
    world: Arc<SimulatedWorld>,
    observations: Arc<ClientObservations>,
    processes: Vec<SimulatedProcess>,
    lives: u64,
}

struct SimulatedProcess {
    tasks: Vec<JoinHandle<()>>,
    worker: JoinHandle<()>,
    clock: SkewedClock,
}

impl Cluster {
    /// Starts a process, or starts it again.
    fn start(&mut self, number: usize) -> Result<()> {
        self.lives += 1;
        let life = self.lives;
        let network = Network { world: self.world.clone(), process: number };
        let store: Arc<dyn Store> = Arc::new(StoreProxy::new(self.store.clone(), network));
        let clock = SkewedClock::over(Arc::new(self.world.clock.clone()));
        let mut random = Random::seeded(self.world.lock().random.next_u64());
        let ids = Ids::new(Arc::new(clock.clone()), random.fork());
        let house = self.target.build_house(store, Arc::new(clock.clone()), ids)?;
        let house = Arc::new(with_egress(house, self.egress.as_ref()));
        let client = TenantClient::of(house)?;
        let worker = tokio::spawn({
            let (client, clock) = (client.clone(), self.world.clock.clone());
            async move {
                loop {
                    clock.sleep(Duration::from_micros(SWEEP_MICROS)).await;
                    // Whatever came of it: what is due stays due.
                    let _ = client.work(5).await;
                }
            }
        });
        let tasks = (0..CLIENTS).map(|index| {
            let mut client = SimulatedClient {
                client: client.clone(),
                clock: self.world.clock.clone(),
                world: self.world.clone(),
                observations: self.observations.clone(),
                random: random.fork(),
                name: format!("{number}-{life}-{index}"),
                next: 0,
                memory: Json::Null,
            };
            let act = self.act;
            tokio::spawn(async move {
                while client.observations.take() {
                    client.world.lock().stats.operations += 1;
                    act(&mut client).await;
                    let thought = client.random.below(THOUGHT_MICROS);
                    client.clock.sleep(Duration::from_micros(thought)).await;
                }
            })
        });
        let process = SimulatedProcess { tasks: tasks.collect(), worker, clock };
        match self.processes.get_mut(number) {
            Some(place) => *place = process,
            None => self.processes.push(process),
        }
        Ok(())
    }

    /// Lets time pass and blows fall until all operations are done.
    async fn live(&mut self) -> Result<()> {
        let mut fault_at = self.next_fault_at();
        let mut down: BTreeMap<usize, u64> = BTreeMap::new();
        loop {
            self.world.clock.settle().await;
            let done = self.processes.iter().all(|process| process.tasks.iter().all(JoinHandle::is_finished));
            if done && down.is_empty() {
                break;
            }
            let now = self.world.clock.elapsed_micros();
            let back: Vec<usize> =
                down.iter().filter(|(_, at)| **at <= now).map(|(number, _)| *number).collect();
            for number in back {
                down.remove(&number);
                self.start(number)?;
            }
            if now >= fault_at {
                if let Some((number, until)) = self.inject_fault(now) {
                    down.insert(number, until);
                }
                fault_at = self.next_fault_at();
            }
            ensure!(self.world.clock.move_on(), "everybody waits for somebody else");
        }
        for process in &self.processes {
            process.worker.abort();
        }
        Ok(())
    }

    fn next_fault_at(&self) -> u64 {
        let now = self.world.clock.elapsed_micros();
        now + 1 + self.world.lock().random.below(FAULT_INTERVAL_MICROS)
    }

    /// Something befalls a process. Returns when it comes back, if it is gone.
    fn inject_fault(&mut self, now: u64) -> Option<(usize, u64)> {
        let state = &mut *self.world.lock();
        let number = usize::try_from(state.random.below(PROCESSES as u64)).unwrap_or(0);
        let process = self.processes.get(number)?;
        let until = now + state.random.below(DOWNTIME_MICROS);
        match state.random.below(3) {
            0 => {
                state.stats.crashes += 1;
                process.tasks.iter().chain([&process.worker]).for_each(JoinHandle::abort);
                // Time goes on, also when everybody is gone.
                let clock = self.world.clock.clone();
                tokio::spawn(async move { clock.sleep(Duration::from_micros(until - now)).await });
                return Some((number, until));
            }
            1 => {
                state.stats.pauses += 1;
                state.paused_until.insert(number, until);
            }
            _ => {
                state.stats.skews += 1;
                let offset = i64::try_from(state.random.below(2 * SKEW_MICROS)).unwrap_or(0);
                process.clock.skew(offset - i64::try_from(SKEW_MICROS).unwrap_or(0));
            }
        }
        None
    }
}

/// A client that calls actions.
pub(crate) struct SimulatedClient {
    pub(crate) client: TenantClient,
    pub(crate) clock: VirtualClock,
    pub(crate) world: Arc<SimulatedWorld>,
    pub(crate) observations: Arc<ClientObservations>,
    pub(crate) random: Random,
    pub(crate) name: String,
    pub(crate) next: u64,
    /// What it knows, as its workload wants to keep it.
    pub(crate) memory: Json,
}

/// What a client was told in the end.
pub(crate) enum CallOutcome {
    Done(Answer),
    Refused,
    Unknown,
    /// Nothing was done, for certain.
    Nothing,
}

impl SimulatedClient {
    pub(crate) fn below(&mut self, end: u64) -> i64 {
        i64::try_from(self.random.below(end)).unwrap_or(0)
    }

    pub(crate) fn operation(&mut self) -> String {
        self.next += 1;
        format!("{}-{}", self.name, self.next)
    }

    /// Calls an action under an id of its own, and again a few times while nothing is known.
    pub(crate) async fn call(
        &mut self,
        action: &str,
        key: &[Value],
        input: Json,
        version: Option<i64>,
    ) -> CallOutcome {
        let operation = self.operation();
        let mut unknown = false;
        for _ in 0..TRIES {
            let told = self.client.call_as(&operation, action, key, input.clone(), version).await;
            match told {
                Ok(answer) => {
                    // An answer without a token says that nothing had to be written.
                    if answer.token.is_some() {
                        self.observations.lock().done.insert(operation);
                    }
                    return CallOutcome::Done(answer);
                }
                Err(refusal) if refusal.code == Code::OutcomeUnknown => unknown = true,
                Err(refusal) if is_passing(refusal.code) => {}
                // Also after an unknown outcome: then the house has made sure that the first request does nothing any more.
                Err(_) => {
                    self.observations.lock().refused.insert(operation);
                    return CallOutcome::Refused;
                }
            }
        }
        if unknown { CallOutcome::Unknown } else { CallOutcome::Nothing }
    }

    pub(crate) fn read(&self) -> &TenantClient {
        &self.client
    }
}

/// How often a client repeats a call.
const TRIES: usize = 3;

/// What clients know, for the judgement.
#[derive(Debug, Default)]
pub(crate) struct ClientObservations {
    left: AtomicU64,
    moment: AtomicU64,
    content: Mutex<ObservedCalls>,
}

#[derive(Debug, Default)]
pub(crate) struct ObservedCalls {
    /// Operations that were acknowledged.
    pub(crate) done: BTreeSet<String>,
    /// Operations that were refused, for certain.
    pub(crate) refused: BTreeSet<String>,
    /// What was seen of rows.
    pub(crate) calls: Vec<RegisterCall>,
}

impl ClientObservations {
    pub(crate) fn take(&self) -> bool {
        self.left.fetch_update(Ordering::Relaxed, Ordering::Relaxed, |left| left.checked_sub(1)).is_ok()
    }

    pub(crate) fn moment(&self) -> u64 {
        self.moment.fetch_add(1, Ordering::Relaxed)
    }

    pub(crate) fn lock(&self) -> MutexGuard<'_, ObservedCalls> {
        self.content.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A history that is over.
pub(crate) struct FinishedHistory {
    pub(crate) sound: TenantClient,
    pub(crate) observations: Arc<ClientObservations>,
}

impl FinishedHistory {
    pub(crate) async fn records(&self) -> Result<Vec<Record>> {
        whole_log(self.sound.house.store().as_ref()).await
    }

    /// Exactly once: what was acknowledged is in the log, what was refused is not.
    pub(crate) async fn check_operations(&self) -> Result<()> {
        let (mut applied, mut places) = (BTreeSet::new(), BTreeSet::new());
        for record in
            self.records().await?.into_iter().filter(|record| record.status == OperationStatus::Applied)
        {
            // A plan about several subjects has a record in each of their partitions.
            let partition = record.position.map(|position| position.partition);
            ensure!(
                places.insert((record.operation.clone(), partition)),
                "{} was applied twice",
                record.operation
            );
            // A plan of combined calls names those that it applied.
            for id in
                record.events.iter().flat_map(|event| event.data[COMBINED_OPERATIONS].as_array()).flatten()
            {
                let id = id.as_str().with_context(|| format!("{id} is no operation id"))?;
                ensure!(applied.insert(id.to_owned()), "{id} was applied twice");
            }
            applied.insert(record.operation);
        }
        let observations = self.observations.lock();
        if let Some(lost) = observations.done.iter().find(|operation| !applied.contains(*operation)) {
            bail!("{lost} was acknowledged and is not in the log");
        }
        if let Some(undead) = observations.refused.iter().find(|operation| applied.contains(*operation)) {
            bail!("{undead} was refused, and was applied all the same");
        }
        Ok(())
    }

    /// In order: all events of a subject stand in one partition, also those of plans about several subjects.
    pub(crate) async fn check_subjects(&self) -> Result<()> {
        let mut partitions = BTreeMap::new();
        for record in self.records().await? {
            let Some(position) = record.position else { bail!("{record:?} has no position") };
            for event in &record.events {
                let Some((resource, key)) = subject_of(&record, event) else { continue };
                let subject = (record.tenant.clone(), resource.to_owned(), key.to_owned());
                let first = *partitions.entry(subject).or_insert(position.partition);
                ensure!(
                    first == position.partition,
                    "events of {resource}/{key} are in the partitions {first} and {}",
                    position.partition
                );
            }
        }
        Ok(())
    }
}

impl fmt::Display for SimulationRun {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "seed {} ({}, trace {:016x}): {}", self.seed, self.archetype, self.trace, self.stats)
    }
}
