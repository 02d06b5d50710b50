//! Drills: each failure that the atlas names, provoked for real, on any engine and on the user's own blueprint.
//!
//! A [`Drill`] belongs to an archetype and to one of its failures, in the atlas's own words. It says what it provokes, and
//! then checks the archetype's invariants on what is stored. There are two kinds:
//!
//! - a drill on a [`DrillRun`] works with any resource of its archetype, the user's own among them: it makes keys and
//!   inputs from the declared types ([`crate::harness::sample_inputs`]) and learns spans of time from the rows;
//! - a case of the suite, which brings its own blueprint.
//!
//! [`crate::proof::DRILLS`] is the one list. `statehouse drill`, the suite, the guard mutation and the atlas read it.
//!
//! A drill that fails is run again, shorter and with other seeds, and the shortest history of plans that was found is
//! shown with its seed.

use std::fmt;
use std::future::Future;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use anyhow::{Context, Result, bail};
use async_trait::async_trait;
use serde_json::{Map, Value as Json};
use statehouse::action::Action;
use statehouse::form::Property;
use statehouse::{Answer, Blueprint, Code, House, Resource, resource};
use statehouse_store::clock::Stopwatch;
use statehouse_store::faulty::{Achieved, FaultyStore, Odds};
use statehouse_store::{Clock, Ids, ManualClock, Random, Store, SystemClock, Time, Value};

use crate::conformance::{Case, CaseFuture};
use crate::harness::engines::{TestEngine, TestNamespace};
use crate::harness::recorder::PlanRecorder;
use crate::harness::sample_inputs;
use crate::harness::tenant_client::TenantClient;
use crate::proof::Proof;

/// One failure, provoked.
#[derive(Clone, Copy)]
pub struct Drill {
    /// The archetype, by keyword.
    pub archetype: &'static str,
    /// The failure, in the atlas's words.
    pub failure: &'static str,
    /// What it provokes, in one sentence.
    pub provokes: &'static str,
    /// Operations in the largest plan that it sends, the log entry included.
    pub largest_plan: usize,
    pub(crate) kind: DrillKind,
}

#[derive(Clone, Copy)]
pub(crate) enum DrillKind {
    /// On any resource of the archetype; the text is the blueprint and the name its resource, if there is no other.
    AnyResource { blueprint: &'static str, resource: &'static str, run: DrillFn },
    /// A case of the suite.
    Case(for<'a> fn(&'a dyn TestNamespace) -> CaseFuture<'a>),
}

pub(crate) type DrillFn = for<'a> fn(&'a DrillRun) -> CaseFuture<'a>;

impl Drill {
    /// A case of the suite that provokes a failure of its archetype, by its full name. Found when this is compiled, so a
    /// name that no case has does not compile, and nothing that the case says is said again.
    #[expect(
        clippy::indexing_slicing,
        clippy::panic,
        reason = "it runs when this is compiled, or not at all"
    )]
    pub const fn by_case(
        cases: &'static [Case],
        failure: &'static str,
        provokes: &'static str,
        name: &'static str,
    ) -> Drill {
        let mut index = 0;
        while index < cases.len() {
            let case = cases[index];
            if same(case.name.as_bytes(), name.as_bytes()) {
                let kind = DrillKind::Case(case.run);
                let archetype = theme(case.name);
                return Drill { archetype, failure, provokes, largest_plan: case.largest_plan, kind };
            }
            index += 1;
        }
        panic!("there is no such case")
    }

    /// Its name: `booking::duplicate_hold`.
    pub fn name(&self) -> String {
        let slug = |c: char| if c.is_ascii_alphanumeric() { c.to_ascii_lowercase() } else { '_' };
        format!("{}::{}", self.archetype, self.failure.chars().map(slug).collect::<String>())
    }

    /// Whether it works on any resource of its archetype.
    pub fn takes_any_resource(&self) -> bool {
        matches!(self.kind, DrillKind::AnyResource { .. })
    }

    /// The default target.
    fn own_target(&self) -> Result<Option<DrillTarget>> {
        match self.kind {
            DrillKind::AnyResource { blueprint, resource, .. } => {
                DrillTarget::of(&Blueprint::read("drill.toml", blueprint)?, resource).map(Some)
            }
            DrillKind::Case(_) => Ok(None),
        }
    }

    /// Runs it once, in an empty namespace. A case knows no other target than its own.
    pub(crate) async fn run(
        &self,
        namespace: Arc<dyn TestNamespace>,
        settings: &DrillSettings<'_>,
    ) -> Result<Achieved> {
        let own = self.own_target()?;
        match (self.kind, settings.target.or(own.as_ref())) {
            (DrillKind::Case(run), _) => run(&*namespace).await.map(|()| Achieved::default()),
            (DrillKind::AnyResource { run: provoke, .. }, Some(target)) => {
                let DrillSettings { seed, rounds, .. } = *settings;
                let (faulty, houses) = Default::default();
                let run = DrillRun { namespace, target: target.clone(), seed, rounds, faulty, houses };
                provoke(&run).await?;
                run.check_invariants(self.archetype).await.context("after the drill")?;
                Ok(run.achieved())
            }
            (DrillKind::AnyResource { .. }, None) => bail!("{} has no ground", self.name()),
        }
    }

    /// Runs it on an engine. If it is red, looks for the shortest history that shows it.
    pub async fn report(
        &self,
        engine: &dyn TestEngine,
        target: Option<&DrillTarget>,
        seed: u64,
    ) -> DrillReport {
        let watch = Stopwatch::start();
        let target = target.filter(|_| self.takes_any_resource());
        let settings = DrillSettings { target, seed, rounds: ROUNDS };
        let DrillAttempt { outcome, recorder } = self.attempt(engine, &settings).await;
        let (took, plans) = (watch.elapsed(), recorder.plans());
        let (mut achieved, mut failed, mut skipped) = (Achieved::default(), None, None);
        match outcome {
            Ok(faults) => achieved = faults,
            Err(DrillEnd::Skipped(reason)) => skipped = Some(reason),
            Err(DrillEnd::Failed(first)) => {
                let shorter = self.shortened(engine, &settings).await;
                failed = shorter.into_iter().chain([first]).min_by_key(|failed| failed.history.len());
            }
        }
        let on = target.map(|target| target.resource.clone());
        DrillReport { drill: *self, seed, on, took, plans, achieved, skipped, failed }
    }

    async fn attempt(&self, engine: &dyn TestEngine, settings: &DrillSettings<'_>) -> DrillAttempt {
        let recorder = PlanRecorder::about(self.archetype);
        let run = async {
            let namespace =
                engine.namespace(&self.name()).with_context(|| format!("{} gave no lab", engine.name()))?;
            bounded(self.run(recorder.over(namespace), settings), PATIENCE).await
        };
        let outcome = run.await.map_err(|error| match error.downcast_ref::<Skipped>() {
            Some(Skipped(reason)) => DrillEnd::Skipped(reason.clone()),
            None => DrillEnd::Failed(DrillFailure {
                why: format!("{error:#}"),
                seed: settings.seed,
                history: recorder.history(),
                left_out: recorder.plans() - recorder.history().len(),
            }),
        });
        DrillAttempt { outcome, recorder }
    }

    /// Reds of shorter courses.
    async fn shortened(&self, engine: &dyn TestEngine, settings: &DrillSettings<'_>) -> Vec<DrillFailure> {
        let mut failures = Vec::new();
        for rounds in [1, 2, 4] {
            for seed in settings.seed..settings.seed.saturating_add(SEEDS_TRIED) {
                let attempt = self.attempt(engine, &DrillSettings { seed, rounds, ..*settings }).await;
                if let Err(DrillEnd::Failed(failed)) = attempt.outcome {
                    failures.push(failed);
                }
            }
            if !failures.is_empty() {
                break;
            }
        }
        failures
    }
}

/// One run of a drill.
struct DrillAttempt {
    outcome: Result<Achieved, DrillEnd>,
    recorder: PlanRecorder,
}

/// Why a run of a drill is not green.
enum DrillEnd {
    Skipped(String),
    Failed(DrillFailure),
}

/// The error of a drill that cannot show anything on this resource, with the reason. It is neither green nor red.
#[derive(Debug)]
pub(crate) struct Skipped(pub String);

impl fmt::Display for Skipped {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "skipped: {}", self.0)
    }
}

impl std::error::Error for Skipped {}

/// Whether two texts are the same.
#[expect(clippy::indexing_slicing, reason = "it runs when this is compiled, or not at all")]
const fn same(one: &[u8], other: &[u8]) -> bool {
    let mut index = 0;
    while index < one.len() && index < other.len() && one[index] == other[index] {
        index += 1;
    }
    index == one.len() && index == other.len()
}

/// The part of a case's name before the colons.
#[expect(clippy::indexing_slicing, reason = "it runs when this is compiled, or not at all")]
const fn theme(name: &'static str) -> &'static str {
    let mut end = 0;
    while end < name.len() && name.as_bytes()[end] != b':' {
        end += 1;
    }
    name.split_at(end).0
}

impl fmt::Debug for Drill {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Drill({})", self.name())
    }
}

/// How often a drill does what it does.
pub(crate) const ROUNDS: u64 = 6;
/// Other seeds that are tried for a shorter history.
const SEEDS_TRIED: u64 = 4;
/// Longer than any drill takes.
const PATIENCE: Duration = Duration::from_secs(120);

/// A drill's verdict, unless it takes for ever.
pub(crate) async fn bounded<T>(trial: impl Future<Output = Result<T>>, patience: Duration) -> Result<T> {
    tokio::select! {
        verdict = trial => verdict,
        () = SystemClock.sleep(patience) => bail!("it did not end within {patience:?}"),
    }
}

/// How a drill is run.
#[derive(Clone, Copy, Debug)]
pub(crate) struct DrillSettings<'p> {
    pub target: Option<&'p DrillTarget>,
    pub seed: u64,
    pub rounds: u64,
}

/// What came of a drill.
#[derive(Clone, Debug)]
pub struct DrillReport {
    /// The drill.
    pub drill: Drill,
    /// The seed it was run with.
    pub seed: u64,
    /// The resource of the user's blueprint that was drilled, if it was.
    pub on: Option<String>,
    /// How long it took.
    pub took: Duration,
    /// Plans that it sent.
    pub plans: usize,
    /// Faults on the way, besides races and moved clocks.
    pub achieved: Achieved,
    /// Why it was skipped, if it was: it can show nothing on this resource.
    pub skipped: Option<String>,
    /// Why it is red, if it is.
    pub failed: Option<DrillFailure>,
}

impl fmt::Display for DrillFailure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "{}", self.why)?;
        writeln!(f, "the shortest history that shows it, with --seed {}:", self.seed)?;
        self.history.iter().try_for_each(|plan| writeln!(f, "  {plan}"))?;
        if self.left_out > 0 {
            writeln!(f, "  ({} plans of the system's own workers and leases are left out)", self.left_out)?;
        }
        Ok(())
    }
}

/// A failure that happened.
#[derive(Clone, Debug)]
pub struct DrillFailure {
    /// What was found.
    pub why: String,
    /// The seed that shows it.
    pub seed: u64,
    /// The plans and their outcomes, without those of the system itself.
    pub history: Vec<String>,
    /// How many plans of the system itself are left out of the history.
    pub left_out: usize,
}

/// What is drilled: a resource among others.
#[derive(Clone, Debug)]
pub struct DrillTarget {
    house: String,
    resources: Vec<Resource>,
    pub(crate) resource: String,
}

impl DrillTarget {
    /// A resource of a blueprint.
    pub fn of(blueprint: &Blueprint, resource: &str) -> Result<DrillTarget> {
        Ok(DrillTarget::among(&blueprint.name, resource::declare(blueprint)?, resource))
    }

    /// A resource of a house that was not declared by a blueprint.
    pub fn among(house: &str, resources: Vec<Resource>, resource: &str) -> DrillTarget {
        DrillTarget { house: house.to_owned(), resources, resource: resource.to_owned() }
    }

    /// The first thing of each archetype that a blueprint declares: what its drills are run on.
    pub fn all_of(blueprint: &Blueprint) -> Result<Vec<(&'static str, DrillTarget)>> {
        let mut targets: Vec<(&'static str, DrillTarget)> = Vec::new();
        for thing in &blueprint.things {
            let keyword = thing.archetype.keyword();
            if !targets.iter().any(|(known, _)| *known == keyword) {
                targets.push((keyword, DrillTarget::of(blueprint, &thing.name)?));
            }
        }
        Ok(targets)
    }

    pub(crate) fn build_house(
        &self,
        store: Arc<dyn Store>,
        clock: Arc<dyn Clock>,
        ids: Ids,
    ) -> Result<House> {
        Ok(House::of(&self.house, self.resources.clone(), None, store, clock, ids)?)
    }
}

/// Where a drill takes place: an empty namespace, and a resource to put into it.
pub struct DrillRun {
    pub(crate) namespace: Arc<dyn TestNamespace>,
    pub(crate) target: DrillTarget,
    pub(crate) seed: u64,
    pub(crate) rounds: u64,
    pub(crate) faulty: Mutex<Vec<Arc<FaultyStore>>>,
    /// How many houses were opened: the ids of each follow from the seed and are its own.
    houses: AtomicU64,
}

impl DrillRun {
    /// Chance, from the seed.
    pub(crate) fn random(&self) -> Random {
        Random::seeded(self.seed)
    }

    /// The number of each round, from 1.
    pub(crate) fn rounds(&self) -> std::ops::RangeInclusive<i64> {
        1..=i64::try_from(self.rounds).unwrap_or(1)
    }

    /// A house on the machine's clock.
    pub(crate) async fn house(&self) -> Result<TenantClient> {
        self.house_over(self.namespace.open().await?, Arc::new(SystemClock)).await
    }

    /// A house whose store shares a clock with it that the drill moves.
    pub(crate) async fn house_at(&self, clock: &DrillClock) -> Result<TenantClient> {
        let clock: Arc<dyn Clock> = Arc::new(clock.clone());
        self.house_over(self.namespace.open_at(clock.clone()).await?, clock).await
    }

    /// A house over a store that was opened already: another process.
    pub(crate) async fn house_over(
        &self,
        store: Arc<dyn Store>,
        clock: Arc<dyn Clock>,
    ) -> Result<TenantClient> {
        let number = self.houses.fetch_add(1, Ordering::Relaxed);
        let random = Random::seeded(self.seed.wrapping_mul(1_000_003).wrapping_add(number));
        let ids = Ids::new(clock.clone(), random);
        TenantClient::enter(self.target.build_house(store, clock, ids)?).await
    }

    /// The same store in a bad world, which begins well.
    pub(crate) fn faulty(&self, store: Arc<dyn Store>) -> Arc<FaultyStore> {
        let faulty = FaultyStore::over(store, Arc::new(SystemClock), Odds::default(), self.seed);
        let faulty = Arc::new(faulty);
        self.faulty.lock().unwrap_or_else(PoisonError::into_inner).push(faulty.clone());
        faulty
    }

    pub(crate) fn achieved(&self) -> Achieved {
        let faulty = self.faulty.lock().unwrap_or_else(PoisonError::into_inner);
        faulty.iter().map(|store| store.achieved()).fold(Achieved::default(), Achieved::plus)
    }

    /// Checks what must hold of the archetype, in a house of its own.
    async fn check_invariants(&self, archetype: &str) -> Result<()> {
        let Some(check) = Proof::of(archetype).and_then(|proof| proof.invariants) else { return Ok(()) };
        let client = self.house().await?;
        check(&client.scope(&self.target.resource)).await
    }

    /// The resource that is drilled.
    pub(crate) fn resource(&self) -> Result<&Resource> {
        self.named(&self.target.resource)
    }

    pub(crate) fn named(&self, name: &str) -> Result<&Resource> {
        let found = self.target.resources.iter().find(|resource| resource.name == name);
        found.with_context(|| format!("there is no resource {name}"))
    }

    /// The full name of an action of it.
    pub(crate) fn action(&self, name: &str) -> String {
        format!("{}.{name}", self.target.resource)
    }

    /// Its key of that number.
    pub(crate) fn key(&self, number: i64) -> Result<Vec<Value>> {
        Ok(sample_inputs::key(self.resource()?, number))
    }
}

pub(crate) fn action<'r>(resource: &'r Resource, name: &str) -> Result<&'r Action> {
    resource.action(name).with_context(|| format!("{} has no action {name}", resource.name))
}

/// What an action has to be given, with values of that number; and what else is given.
pub(crate) fn input(action: &Action, number: i64, given: Map<String, Json>) -> Json {
    let needed = action.input.iter().filter(|property| property.required);
    let mut input: Map<String, Json> = needed
        .filter_map(|p: &Property| Some((p.name.clone(), sample_inputs::of_property(p, number)?)))
        .collect();
    input.extend(given);
    Json::Object(input)
}

/// A clock that the drill moves. Pauses of the house pass by themselves, so that a caller that lost a race can retry.
#[derive(Clone, Debug)]
pub(crate) struct DrillClock(ManualClock);

impl DrillClock {
    pub(crate) fn new() -> DrillClock {
        DrillClock(ManualClock::at(Time::from_millis(1_800_000_000_000)))
    }

    /// Lets time pass.
    pub(crate) fn advance(&self, span: Duration) {
        self.0.advance(span);
    }

    /// Moves to a time, also back.
    pub(crate) fn set(&self, time: Time) {
        self.0.set(time);
    }

    /// Moves on to a time; not back.
    pub(crate) fn reach(&self, time: Time) {
        self.0.advance(time.since(self.0.now()));
    }
}

#[async_trait]
impl Clock for DrillClock {
    fn now(&self) -> Time {
        self.0.now()
    }

    fn uptime(&self) -> Duration {
        self.0.uptime()
    }

    async fn sleep(&self, span: Duration) {
        SystemClock.sleep(span).await;
    }
}

/// A time in an answer.
pub(crate) fn time_in(body: &Json, name: &str) -> Result<Time> {
    let text = body[name].as_str().with_context(|| format!("{name} is no time in {body}"))?;
    Ok(text.parse()?)
}

/// Calls an action until it is known what became of it, as a caller does that keeps its operation id.
pub(crate) async fn insist(
    client: &TenantClient,
    operation: &str,
    action: &str,
    key: &[Value],
    input: &Json,
    version: Option<i64>,
) -> Result<Answer> {
    for _ in 0..TRIES_MAX {
        match client.call_as(operation, action, key, input.clone(), version).await {
            Ok(answer) => return Ok(answer),
            Err(refusal) if is_passing(refusal.code) => {}
            Err(refusal) => bail!("{action} {key:?} {input} as {operation}: {refusal}"),
        }
    }
    bail!("{action} as {operation} was tried {TRIES_MAX} times and never known")
}

/// Tries of a call whose answers get lost.
const TRIES_MAX: usize = 200;

/// Whether a refusal says to try again.
pub(crate) fn is_passing(code: Code) -> bool {
    matches!(code, Code::Unavailable | Code::OutcomeUnknown | Code::Contended)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::engines::{Model, Sqlite};
    use crate::proof::{DRILLS, booking};

    /// Threads that keep every core busy until they are dropped.
    struct CpuLoad(Arc<std::sync::atomic::AtomicBool>);

    impl CpuLoad {
        fn start() -> CpuLoad {
            let stop = Arc::new(std::sync::atomic::AtomicBool::new(false));
            for _ in 0..4 {
                let stop = stop.clone();
                std::thread::spawn(move || while !stop.load(Ordering::Relaxed) {});
            }
            CpuLoad(stop)
        }
    }

    impl Drop for CpuLoad {
        fn drop(&mut self) {
            self.0.store(true, Ordering::Relaxed);
        }
    }

    #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
    async fn the_drill_of_relation_lists_has_one_history_on_a_busy_machine() {
        let drill =
            DRILLS.iter().copied().flatten().find(|drill| drill.failure == "stale relation list cache");
        let (drill, _load) = (drill.unwrap(), CpuLoad::start());
        let settings = DrillSettings { target: None, seed: 1, rounds: ROUNDS };
        for engine in [&Model as &dyn TestEngine, &Sqlite] {
            let mut histories = Vec::new();
            for _ in 0..5 {
                let DrillAttempt { outcome, recorder } = drill.attempt(engine, &settings).await;
                assert!(outcome.is_ok(), "{}", engine.name());
                histories.push(recorder.history());
            }
            assert!(histories[0].len() > 100, "{}", histories[0].len());
            assert!(histories.windows(2).all(|pair| pair[0] == pair[1]), "{}", engine.name());
        }
    }

    #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
    async fn histories_hide_the_plans_of_the_system_itself() {
        let text = "[booking.seat]\nkey = { event_id = \"text\", seat_no = \"int\" }\n\
                    [view.states]\nof = \"seat\"\ngroup_by = [\"state\"]\n";
        let target = DrillTarget::of(&Blueprint::read("statehouse.toml", text).unwrap(), "seat").unwrap();
        let drill = booking::drills::DRILLS
            .iter()
            .find(|drill| drill.failure == "expired hold not released")
            .unwrap();
        let settings = DrillSettings { target: Some(&target), seed: 1, rounds: 1 };
        let DrillAttempt { outcome, recorder } = drill.attempt(&Model, &settings).await;
        assert!(outcome.is_ok());
        let history = recorder.history();
        assert!(history.iter().any(|plan| plan.contains("seat_booking.expired")), "{history:#?}");
        let hidden = |plan: &&String| plan.contains("house_") || plan.contains(" states");
        assert_eq!(history.iter().find(hidden), None);
        assert!(recorder.plans() > history.len());
    }

    /// Plans without what comes from the machine's clock: ids and times.
    fn without_times(history: &[String]) -> Vec<String> {
        let is_time =
            |word: &str| word.contains("-") && word.chars().filter(char::is_ascii_digit).count() > 7;
        let strip =
            |plan: &String| plan.split([' ', '/', '\'']).filter(|word| !is_time(word)).collect::<String>();
        history.iter().map(strip).collect()
    }

    #[test]
    fn on_one_thread_of_the_model_a_seed_has_one_history() {
        let drills = DRILLS.iter().copied().flatten().filter(|drill| drill.takes_any_resource());
        let mut differ = Vec::new();
        for drill in drills {
            let run = || {
                let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
                let settings = DrillSettings { target: None, seed: 5, rounds: ROUNDS };
                let DrillAttempt { outcome, recorder } = runtime.block_on(drill.attempt(&Model, &settings));
                assert!(outcome.is_ok(), "{}", drill.name());
                without_times(&recorder.history())
            };
            if run() != run() {
                differ.push(drill.name());
            }
        }
        assert_eq!(differ, Vec::<String>::new());
    }
}
