//! Drills: each failure that the atlas names, provoked for real, on any engine and on the user's own blueprint.
//!
//! A [`Drill`] belongs to an archetype and to one of its failures, in the atlas's own words. It says what it provokes, and
//! then checks the archetype's invariants on what is stored. There are two kinds:
//!
//! - a drill on a [`Ground`] works with any resource of its archetype, the user's own among them: it makes keys and
//!   inputs from the declared types ([`crate::harness::specimen`]) and learns spans of time from the rows;
//! - a case of the suite, which brings its own blueprint.
//!
//! [`crate::proof::DRILLS`] is the one list. `statehouse drill`, the suite, the guard mutation and the atlas read it.
//!
//! A drill that fails is run again, shorter and with other seeds, and the shortest history of plans that was found is
//! shown with its seed.

use std::fmt;
use std::future::Future;
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

use crate::conformance::{Case, Verdict};
use crate::harness::engines::{Engine, Lab};
use crate::harness::house::Visitor;
use crate::harness::specimen;
use crate::harness::witness::Witness;

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
    pub(crate) kind: Kind,
}

#[derive(Clone, Copy)]
pub(crate) enum Kind {
    /// On any resource of the archetype; the text is the blueprint and the name its resource, if there is no other.
    Ground { blueprint: &'static str, resource: &'static str, run: OnGround },
    /// A case of the suite.
    Case(for<'a> fn(&'a dyn Lab) -> Verdict<'a>),
}

pub(crate) type OnGround = for<'a> fn(&'a Ground) -> Verdict<'a>;

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
        let mut place = 0;
        while place < cases.len() {
            let case = cases[place];
            if same(case.name.as_bytes(), name.as_bytes()) {
                let kind = Kind::Case(case.run);
                let archetype = theme(case.name);
                return Drill { archetype, failure, provokes, largest_plan: case.largest_plan, kind };
            }
            place += 1;
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
        matches!(self.kind, Kind::Ground { .. })
    }

    /// What it is about if nobody says otherwise.
    fn own_plot(&self) -> Result<Option<Plot>> {
        match self.kind {
            Kind::Ground { blueprint, resource, .. } => {
                Plot::of(&Blueprint::read("drill.toml", blueprint)?, resource).map(Some)
            }
            Kind::Case(_) => Ok(None),
        }
    }

    /// Runs it once, in an empty lab. A case knows no other plot than its own.
    pub(crate) async fn run(&self, lab: Arc<dyn Lab>, course: &Course<'_>) -> Result<Achieved> {
        let own = self.own_plot()?;
        match (self.kind, course.plot.or(own.as_ref())) {
            (Kind::Case(run), _) => run(&*lab).await.map(|()| Achieved::default()),
            (Kind::Ground { run, .. }, Some(plot)) => {
                let Course { seed, rounds, .. } = *course;
                let ground = Ground { lab, plot: plot.clone(), seed, rounds, faulty: Mutex::default() };
                run(&ground).await?;
                Ok(ground.achieved())
            }
            (Kind::Ground { .. }, None) => bail!("{} has no ground", self.name()),
        }
    }

    /// Runs it on an engine. If it is red, looks for the shortest history that shows it.
    pub async fn report(&self, engine: &dyn Engine, plot: Option<&Plot>, seed: u64) -> Report {
        let watch = Stopwatch::start();
        let plot = plot.filter(|_| self.takes_any_resource());
        let course = Course { plot, seed, rounds: ROUNDS };
        let (first, plans) = self.attempt(engine, &course).await;
        let took = watch.elapsed();
        let (achieved, red) = match first {
            Ok(achieved) => (achieved, None),
            Err(red) => {
                let shorter = self.shortened(engine, &course).await;
                let shortest = shorter.into_iter().chain([red]).min_by_key(|red| red.history.len());
                (Achieved::default(), shortest)
            }
        };
        let on = plot.map(|plot| plot.resource.clone());
        Report { drill: *self, seed, on, took, plans, achieved, red }
    }

    async fn attempt(&self, engine: &dyn Engine, course: &Course<'_>) -> (Result<Achieved, Red>, usize) {
        let witness = Witness::default();
        let run = async {
            let lab = engine.lab(&self.name()).with_context(|| format!("{} gave no lab", engine.name()))?;
            bounded(self.run(witness.over(lab), course), PATIENCE).await
        };
        let outcome = run.await;
        let history = witness.history();
        let plans = history.len();
        let red = |error: anyhow::Error| Red { why: format!("{error:#}"), seed: course.seed, history };
        (outcome.map_err(red), plans)
    }

    /// Reds of shorter courses.
    async fn shortened(&self, engine: &dyn Engine, course: &Course<'_>) -> Vec<Red> {
        let mut reds = Vec::new();
        for rounds in [1, 2, 4] {
            for seed in course.seed..course.seed.saturating_add(SEEDS_TRIED) {
                if let (Err(red), _) = self.attempt(engine, &Course { seed, rounds, ..*course }).await {
                    reds.push(red);
                }
            }
            if !reds.is_empty() {
                break;
            }
        }
        reds
    }
}

/// Whether two texts are the same.
#[expect(clippy::indexing_slicing, reason = "it runs when this is compiled, or not at all")]
const fn same(one: &[u8], other: &[u8]) -> bool {
    let mut place = 0;
    while place < one.len() && place < other.len() && one[place] == other[place] {
        place += 1;
    }
    place == one.len() && place == other.len()
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
pub(crate) struct Course<'p> {
    pub plot: Option<&'p Plot>,
    pub seed: u64,
    pub rounds: u64,
}

/// What came of a drill.
#[derive(Clone, Debug)]
pub struct Report {
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
    /// Why it is red, if it is.
    pub red: Option<Red>,
}

impl fmt::Display for Red {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "{}", self.why)?;
        writeln!(f, "the shortest history that shows it, with --seed {}:", self.seed)?;
        self.history.iter().try_for_each(|plan| writeln!(f, "  {plan}"))
    }
}

/// A failure that happened.
#[derive(Clone, Debug)]
pub struct Red {
    /// What was found.
    pub why: String,
    /// The seed that shows it.
    pub seed: u64,
    /// The plans and their outcomes.
    pub history: Vec<String>,
}

/// What is drilled: a resource among others.
#[derive(Clone, Debug)]
pub struct Plot {
    house: String,
    resources: Vec<Resource>,
    pub(crate) resource: String,
}

impl Plot {
    /// A resource of a blueprint.
    pub fn of(blueprint: &Blueprint, resource: &str) -> Result<Plot> {
        Ok(Plot::among(&blueprint.name, resource::declare(blueprint)?, resource))
    }

    /// A resource of a house that was not declared by a blueprint.
    pub fn among(house: &str, resources: Vec<Resource>, resource: &str) -> Plot {
        Plot { house: house.to_owned(), resources, resource: resource.to_owned() }
    }

    /// The first thing of each archetype that a blueprint declares: what its drills are run on.
    pub fn all_of(blueprint: &Blueprint) -> Result<Vec<(&'static str, Plot)>> {
        let mut plots: Vec<(&'static str, Plot)> = Vec::new();
        for thing in &blueprint.things {
            let keyword = thing.archetype.keyword();
            if !plots.iter().any(|(known, _)| *known == keyword) {
                plots.push((keyword, Plot::of(blueprint, &thing.name)?));
            }
        }
        Ok(plots)
    }

    pub(crate) fn furnish(&self, store: Arc<dyn Store>, clock: Arc<dyn Clock>, ids: Ids) -> House {
        House::of(&self.house, self.resources.clone(), None, store, clock, ids)
    }
}

/// Where a drill takes place: an empty lab, and a resource to put into it.
pub struct Ground {
    pub(crate) lab: Arc<dyn Lab>,
    pub(crate) plot: Plot,
    pub(crate) seed: u64,
    pub(crate) rounds: u64,
    pub(crate) faulty: Mutex<Vec<Arc<FaultyStore>>>,
}

impl Ground {
    /// Chance, from the seed.
    pub(crate) fn random(&self) -> Random {
        Random::seeded(self.seed)
    }

    /// The number of each round, from 1.
    pub(crate) fn rounds(&self) -> std::ops::RangeInclusive<i64> {
        1..=i64::try_from(self.rounds).unwrap_or(1)
    }

    /// A house on the machine's clock.
    pub(crate) async fn house(&self) -> Result<Visitor> {
        self.house_over(self.lab.open().await?, Arc::new(SystemClock)).await
    }

    /// A house whose store shares a clock with it that the drill moves.
    pub(crate) async fn house_at(&self, clock: &DrillClock) -> Result<Visitor> {
        let clock: Arc<dyn Clock> = Arc::new(clock.clone());
        self.house_over(self.lab.open_at(clock.clone()).await?, clock).await
    }

    /// A house over a store that was opened already: another process.
    pub(crate) async fn house_over(&self, store: Arc<dyn Store>, clock: Arc<dyn Clock>) -> Result<Visitor> {
        let ids = Ids::new(clock.clone(), Random::from_entropy());
        Visitor::enter(self.plot.furnish(store, clock, ids)).await
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

    /// The resource that is drilled.
    pub(crate) fn resource(&self) -> Result<&Resource> {
        self.named(&self.plot.resource)
    }

    pub(crate) fn named(&self, name: &str) -> Result<&Resource> {
        let found = self.plot.resources.iter().find(|resource| resource.name == name);
        found.with_context(|| format!("there is no resource {name}"))
    }

    /// The full name of an action of it.
    pub(crate) fn action(&self, name: &str) -> String {
        format!("{}.{name}", self.plot.resource)
    }

    /// Its key of that number.
    pub(crate) fn key(&self, number: i64) -> Result<Vec<Value>> {
        Ok(specimen::key(self.resource()?, number))
    }
}

pub(crate) fn action<'r>(resource: &'r Resource, name: &str) -> Result<&'r Action> {
    resource.action(name).with_context(|| format!("{} has no action {name}", resource.name))
}

/// What an action has to be given, with values of that number; and what else is given.
pub(crate) fn input(action: &Action, number: i64, given: Map<String, Json>) -> Json {
    let needed = action.input.iter().filter(|property| property.required);
    let mut input: Map<String, Json> =
        needed.filter_map(|p: &Property| Some((p.name.clone(), specimen::of_property(p, number)?))).collect();
    input.extend(given);
    Json::Object(input)
}

/// A clock that the drill moves. Pauses of the house pass by themselves, so that whoever lost a race can try again.
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
    visitor: &Visitor,
    operation: &str,
    action: &str,
    key: &[Value],
    input: &Json,
    version: Option<i64>,
) -> Result<Answer> {
    for _ in 0..TRIES_MAX {
        match visitor.call_as(operation, action, key, input.clone(), version).await {
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

/// Every case of an archetype, by its theme.
pub(crate) fn cases_of(archetype: &str) -> Vec<&'static Case> {
    let theme = format!("{archetype}::");
    crate::proof::CASES.iter().copied().flatten().filter(|case| case.name.starts_with(&theme)).collect()
}
