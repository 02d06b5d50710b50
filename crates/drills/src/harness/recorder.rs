//! A recorder between a house and its store: it remembers every plan and its outcome, knows on whose behalf each was
//! made, and can take one guard out of the plans of one action.
//!
//! On whose behalf is said by the caller ([`acting`]): for an action of a resource, or a worker. A plan without an actor
//! because a case commits it itself, is attributed by its events.
//!
//! A [`GuardSite`] is one condition of one kind of step of one action or worker: *confirm, update seat_bookings, `expires_at >
//! now`*. Constants are left out of it, so that all plans of an action have the same few sites. Besides conjuncts there are
//! the alternatives of an `or` (without one of them the guard asks for more, and a call is refused that should not be),
//! and that a row is there or is not, wherever a plan without this can be built.

use std::collections::BTreeSet;
use std::fmt;
use std::future::Future;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use anyhow::Result;
use async_trait::async_trait;
use statehouse::infra::log::{PARKED, PROGRESS};
use statehouse::infra::projection::PROJECTIONS;
use statehouse_store::guard::Comparison;
use statehouse_store::plan::{Expect, Verb};
use statehouse_store::{Clock, Commit, Guard, Operand, Page, Plan, Query, Step, Store, StoreError};

use crate::harness::engines::TestNamespace;
use crate::harness::proxy::{Interceptor, StoreProxy};
use crate::harness::store_client::shown;

tokio::task_local! {
    static ACTOR: Actor;
}

/// On whose behalf a store is called.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Actor {
    /// The archetype, by keyword.
    pub archetype: &'static str,
    /// The action or the worker: `seat_booking.confirm`.
    pub name: String,
}

/// Runs a future on behalf of an actor.
pub(crate) async fn acting<T>(actor: Actor, work: impl Future<Output = T>) -> T {
    ACTOR.scope(actor, work).await
}

/// Runs a future without an actor, while another acts.
pub(crate) async fn unattributed<T>(work: impl Future<Output = T>) -> T {
    acting(Actor { archetype: "", name: String::new() }, work).await
}

/// A store whose commits are all on one actor's behalf, also those of tasks that the actor spawns.
pub(crate) fn on_behalf(store: &Arc<dyn Store>, actor: Actor) -> Arc<dyn Store> {
    Arc::new(StoreProxy::new(store.clone(), AttributedStore(actor)))
}

#[derive(Debug)]
struct AttributedStore(Actor);

#[async_trait]
impl Interceptor for AttributedStore {
    async fn commit(&self, inner: &Arc<dyn Store>, plan: &Plan) -> Result<Commit, StoreError> {
        acting(self.0.clone(), inner.commit(plan)).await
    }
}

/// One condition of one kind of step of one action or worker.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct GuardSite {
    /// Whose plans.
    pub actor: Actor,
    /// The first event of the plan; empty if it leaves none.
    event: String,
    /// The step, without its constants: `update seat_bookings where state = ? and expires_at > now`.
    pub step: String,
    /// What is taken out: a conjunct, an alternative of one, or that the row is absent or present.
    pub condition: String,
    part: PlanPart,
}

/// Which part of a step a site is.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum PlanPart {
    Conjunct(usize),
    /// One of the alternatives of a conjunct, by its words.
    Alternative(usize, String),
    Expect,
}

impl GuardSite {
    /// What it is in any resource of its archetype, and whatever comes of the plan: without the resource's name and the
    /// event. The same code makes the plans of all of them, so that a check that notices in one of them has noticed.
    pub(crate) fn kind(&self) -> GuardSite {
        let (whose, action) = self.actor.name.rsplit_once('.').unwrap_or(("", &self.actor.name));
        let (worker, resource) = match whose.strip_prefix(WORKER) {
            Some(resource) => (WORKER, resource),
            None => ("", whose),
        };
        // What belongs to a resource is called after it: the queue of a `task` is the `task_queue`.
        let owner = resource.rsplit_once('_').map_or(resource, |(owner, _)| owner);
        let bare = |text: &str| {
            let rest = [resource, owner]
                .into_iter()
                .find_map(|name| text.strip_prefix(name).filter(|_| !name.is_empty()));
            rest.map_or(text.to_owned(), |rest| format!("*{}", rest.trim_start_matches('s')))
        };
        let (head, guard) = self.step.split_once(WHERE).unwrap_or((&self.step, ""));
        let (verb, table) = head.rsplit_once(' ').unwrap_or(("", head));
        GuardSite {
            actor: Actor { archetype: self.actor.archetype, name: format!("{worker}{action}") },
            event: String::new(),
            step: format!("{verb} {}{WHERE}{guard}", bare(table)),
            ..self.clone()
        }
    }

    /// The step without its conditions.
    pub(crate) fn head(&self) -> &str {
        self.step.split_once(WHERE).map_or(&self.step, |(head, _)| head)
    }

    /// Sites of one kind, as one.
    pub(crate) fn common(sites: &[GuardSite]) -> Option<GuardSite> {
        let mut names: Vec<&str> = sites.iter().map(|site| site.actor.name.as_str()).collect();
        names.dedup();
        let first = sites.first()?;
        let actor = Actor { name: names.join(" and "), ..first.actor.clone() };
        Some(GuardSite { actor, ..first.clone() })
    }

    /// Whether it is the same in a plan without an actor, because a case commits it itself.
    pub(crate) fn is_like(&self, nobodys: &GuardSite) -> bool {
        !self.event.is_empty() && *self == GuardSite { actor: self.actor.clone(), ..nobodys.clone() }
    }
}

impl fmt::Display for GuardSite {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {} without `{}`", self.actor.name, self.step, self.condition)
    }
}

/// What a recorder remembers.
#[derive(Debug, Default)]
pub(crate) struct RecorderState {
    plans: usize,
    /// Without those of the system itself.
    history: Vec<String>,
    sites: BTreeSet<GuardSite>,
}

/// Plans that a recorder remembers in words. Only a failed drill prints them.
const HISTORY_MAX: usize = 2_000;

/// Remembers plans, and takes a guard out if it is told to. Clones share what they remember.
#[derive(Clone, Debug, Default)]
pub(crate) struct PlanRecorder {
    memory: Arc<Mutex<RecorderState>>,
    removed: Vec<GuardSite>,
    finds_sites: bool,
    /// The archetype that is drilled; empty for every one.
    about: &'static str,
}

impl PlanRecorder {
    /// One of a drill of that archetype: plans that workers make for others are left out of its history.
    pub(crate) fn about(archetype: &'static str) -> PlanRecorder {
        PlanRecorder { about: archetype, ..PlanRecorder::default() }
    }

    /// One that also looks for sites.
    pub(crate) fn of_sites() -> PlanRecorder {
        PlanRecorder { finds_sites: true, ..PlanRecorder::default() }
    }

    /// One that takes these conditions out wherever they stand.
    pub(crate) fn without(removed: Vec<GuardSite>) -> PlanRecorder {
        PlanRecorder { removed, ..PlanRecorder::default() }
    }

    /// How many plans there were, those of the system itself included.
    pub(crate) fn plans(&self) -> usize {
        self.lock().plans
    }

    /// The plans and their outcomes, in the order in which they were decided, without those of the system itself.
    pub(crate) fn history(&self) -> Vec<String> {
        self.lock().history.clone()
    }

    pub(crate) fn sites(&self) -> BTreeSet<GuardSite> {
        self.lock().sites.clone()
    }

    /// A namespace whose stores are watched.
    pub(crate) fn over(&self, namespace: Arc<dyn TestNamespace>) -> Arc<dyn TestNamespace> {
        Arc::new(RecordedNamespace { namespace, recorder: self.clone() })
    }

    fn lock(&self) -> MutexGuard<'_, RecorderState> {
        self.memory.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn remember(&self, plan: &Plan, outcome: &Result<Commit, StoreError>) {
        let memory = &mut *self.lock();
        memory.plans += 1;
        if memory.history.len() >= HISTORY_MAX || is_internal(plan, self.about) {
            return;
        }
        let outcome = match outcome {
            Ok(Commit::Applied(applied)) if applied.repeated => "applied before".to_owned(),
            Ok(Commit::Applied(_)) => "applied".to_owned(),
            Ok(Commit::Refused(refused)) => format!("refused: {}", refused.describe(plan)),
            Ok(Commit::Fenced) => "fenced".to_owned(),
            Err(error) => error.to_string(),
        };
        memory.history.push(format!("{} -> {outcome}", shown(plan)));
    }

    /// The plan without the conditions, if it is one of theirs; if it cannot be built, as it was.
    fn mutated(&self, plan: &Plan) -> Option<Plan> {
        if self.removed.is_empty() {
            return None;
        }
        let mut builder = plan.to_builder();
        for step in &mut builder.steps {
            let actor = actor(plan, step);
            let is_theirs = |site: &&GuardSite| {
                let is_actor = actor.as_ref().is_none_or(|actor| *actor == site.actor);
                let is_event = events(plan).any(|event| event == site.event);
                is_actor && (is_event || (site.event.is_empty() && actor.is_some()))
            };
            let theirs: Vec<&GuardSite> = self.removed.iter().filter(is_theirs).collect();
            if !theirs.is_empty() {
                let outline = outline(step);
                let parts: Vec<&PlanPart> =
                    theirs.iter().filter(|site| site.step == outline).map(|site| &site.part).collect();
                remove(step, &parts);
            }
        }
        builder.build().ok().filter(|mutated| mutated != plan)
    }
}

#[async_trait]
impl Interceptor for PlanRecorder {
    async fn commit(&self, inner: &Arc<dyn Store>, plan: &Plan) -> Result<Commit, StoreError> {
        // A caller that reads and then writes lets others in between, also where a store never waits.
        tokio::task::yield_now().await;
        if self.finds_sites {
            let found = sites(plan);
            self.lock().sites.extend(found);
        }
        let mutated = self.mutated(plan);
        let plan = mutated.as_ref().unwrap_or(plan);
        let outcome = inner.commit(plan).await;
        self.remember(plan, &outcome);
        outcome
    }

    async fn query(&self, inner: &Arc<dyn Store>, query: &Query) -> Result<Page, StoreError> {
        let page = inner.query(query).await;
        tokio::task::yield_now().await;
        page
    }

    async fn read(&self) -> Result<(), StoreError> {
        tokio::task::yield_now().await;
        Ok(())
    }
}

struct RecordedNamespace {
    namespace: Arc<dyn TestNamespace>,
    recorder: PlanRecorder,
}

#[async_trait]
impl TestNamespace for RecordedNamespace {
    async fn open_at(&self, clock: Arc<dyn Clock>) -> Result<Arc<dyn Store>> {
        Ok(Arc::new(StoreProxy::new(self.namespace.open_at(clock).await?, self.recorder.clone())))
    }

    async fn open(&self) -> Result<Arc<dyn Store>> {
        Ok(Arc::new(StoreProxy::new(self.namespace.open().await?, self.recorder.clone())))
    }
}

/// A column that the rows of effects have, and no others.
const SENT_KEY: &str = "sent_key";
/// How the operation ids of programs that hold leases begin.
const LEASES: &str = "lease.";
/// How the names of tables begin that are the house's own.
const OWN: &str = "house_";
/// How the names of workers begin, among those who act.
pub(crate) const WORKER: &str = "worker ";

/// On whose behalf a plan is committed here.
fn speaker(plan: &Plan) -> Option<Actor> {
    ACTOR.try_with(Clone::clone).ok().or_else(|| {
        let name = plan.operation();
        name.starts_with(LEASES).then(|| Actor { archetype: "lease", name: name.to_owned() })
    })
}

/// On whose behalf a step is committed. The house's own tables tell which code has made it, whichever task runs it.
fn actor(plan: &Plan, step: &Step) -> Option<Actor> {
    let of = |archetype, name: &str| Some(Actor { archetype, name: name.to_owned() });
    let speaker = speaker(plan);
    match step.table.name() {
        // Those of programs leave an event, those of the house's own readers do not.
        PROGRESS | PARKED
            if plan.entry().is_none()
                && speaker.as_ref().is_none_or(|actor| !["log", ""].contains(&actor.archetype)) =>
        {
            of("log", "a reader of the house")
        }
        PROJECTIONS => of("projection", "a builder"),
        // The code of `effect` writes the rows of every effect, also of those that belong to another archetype.
        _ if step.table.type_of(SENT_KEY).is_some() => speaker.map(|actor| {
            if actor.archetype.is_empty() { actor } else { Actor { archetype: "effect", ..actor } }
        }),
        _ => speaker,
    }
}

/// Whether a plan is of the system itself and not of what is drilled: on its own tables only, or of a worker of another
/// archetype.
fn is_internal(plan: &Plan, about: &str) -> bool {
    let is_own = |step: &Step| {
        let name = step.table.name();
        let is_about = READERS.contains(&about) && [PROGRESS, PARKED, PROJECTIONS].contains(&name);
        name.starts_with(OWN) && !is_about
    };
    let of_other = |actor: Actor| actor.name.starts_with(WORKER) && actor.archetype != about;
    let only_own = !plan.steps().is_empty() && plan.steps().iter().all(is_own);
    only_own || (!about.is_empty() && speaker(plan).is_some_and(of_other))
}

/// The archetypes whose progress stands in the system's own tables.
const READERS: [&str; 4] = ["log", "projection", "feed", "view"];

fn events(plan: &Plan) -> impl Iterator<Item = &str> {
    plan.entry().into_iter().flat_map(|entry| &entry.events).map(|event| event.name.as_str())
}

/// The sites of a plan. Without an actor they are unattributed; see [`GuardSite::is_like`].
fn sites(plan: &Plan) -> Vec<GuardSite> {
    let event = events(plan).next().unwrap_or_default();
    let mut found = Vec::new();
    for (number, step) in plan.steps().iter().enumerate().filter(|(_, step)| is_judged(step)) {
        let actor = actor(plan, step).unwrap_or(Actor { archetype: "", name: String::new() });
        let site = |condition: String, part: PlanPart| GuardSite {
            actor: actor.clone(),
            event: event.to_owned(),
            step: outline(step),
            condition,
            part,
        };
        for (index, conjunct) in step.guard.conjuncts().iter().enumerate() {
            found.push(site(condition(conjunct), PlanPart::Conjunct(index)));
            for words in alternatives(conjunct) {
                let part = PlanPart::Alternative(index, words.clone());
                found.push(site(format!("or {words}"), part));
            }
        }
        let is_there = match step.expect {
            Expect::Absent => "the row is absent",
            Expect::Present => "the row is present",
            Expect::Either => continue,
        };
        // An update that writes too little for a whole row cannot do without one.
        let mut builder = plan.to_builder();
        if let Some(step) = builder.steps.get_mut(number) {
            step.expect = Expect::Either;
        }
        if builder.build().is_ok() {
            found.push(site(is_there.to_owned(), PlanPart::Expect));
        }
    }
    found
}

/// Whether a check has to notice what is missing in a step: not in what the house keeps for itself, its own leases and
/// secrets, which stand on what is judged elsewhere.
fn is_judged(step: &Step) -> bool {
    let name = step.table.name();
    !name.starts_with(OWN) || [PROGRESS, PARKED, PROJECTIONS].contains(&name)
}

/// What a conjunct leaves a choice between, in words.
fn alternatives(conjunct: &Guard) -> Vec<String> {
    match conjunct {
        Guard::Any(parts) if parts.len() > 1 && !parts.iter().all(is_difference) => {
            parts.iter().map(condition).collect()
        }
        Guard::In(column, values) if values.len() > 1 => {
            values.iter().map(|value| format!("{column} = {value}")).collect()
        }
        _ => Vec::new(),
    }
}

fn remove(step: &mut Step, parts: &[&PlanPart]) {
    if parts.contains(&&PlanPart::Expect) {
        step.expect = Expect::Either;
    }
    let conjuncts = step.guard.conjuncts().iter().enumerate();
    let kept = conjuncts.filter(|(index, _)| !parts.contains(&&PlanPart::Conjunct(*index)));
    let kept = kept.map(|(index, conjunct)| {
        let is_gone = |words: String| parts.contains(&&PlanPart::Alternative(index, words));
        match conjunct {
            Guard::Any(alternatives) => {
                let left = alternatives.iter().filter(|one| !is_gone(condition(one)));
                Guard::Any(left.cloned().collect())
            }
            Guard::In(column, values) => {
                let left = values.iter().filter(|value| !is_gone(format!("{column} = {value}")));
                Guard::In(column.clone(), left.cloned().collect())
            }
            other => other.clone(),
        }
    });
    step.guard = Guard::All(kept.collect());
}

/// Between a step and its guard.
const WHERE: &str = " where ";

/// A step without its constants.
fn outline(step: &Step) -> String {
    let verb = match (step.verb, step.expect) {
        (Verb::Put, Expect::Absent) => "insert",
        (Verb::Put, Expect::Present) => "update",
        (Verb::Put, Expect::Either) => "upsert",
        (Verb::Delete, Expect::Either) => "remove",
        (Verb::Delete, _) => "delete",
        (Verb::Assert, Expect::Absent) => "assert absent",
        (Verb::Assert, Expect::Present) => "assert",
        (Verb::Assert, Expect::Either) => "assert if there",
    };
    let conjuncts: Vec<String> = step.guard.conjuncts().iter().map(condition).collect();
    let lead = if conjuncts.is_empty() { "" } else { WHERE };
    format!("{verb} {}{lead}{}", step.table, conjuncts.join(" and "))
}

/// A guard without its constants.
fn condition(guard: &Guard) -> String {
    let joined = |parts: &[Guard], word: &str| {
        let parts: BTreeSet<String> = parts.iter().map(condition).collect();
        format!("({})", parts.into_iter().collect::<Vec<_>>().join(word))
    };
    match guard {
        Guard::Compare(left, comparison, right) => {
            format!("{} {} {}", operand(left), comparison.symbol(), operand(right))
        }
        Guard::Null(column) => format!("{column} is null"),
        Guard::NotNull(column) => format!("{column} is set"),
        Guard::In(column, _) => format!("{column} is one of them"),
        Guard::NotIn(column, _) => format!("{column} is none of them"),
        Guard::All(parts) => joined(parts, " and "),
        // Which fields a caller wants to change is as much up to the caller as what to.
        Guard::Any(parts) if parts.iter().all(is_difference) => "some field differs".to_owned(),
        Guard::Any(parts) => joined(parts, " or "),
    }
}

fn is_difference(guard: &Guard) -> bool {
    match guard {
        Guard::Compare(_, Comparison::Ne, Operand::Value(_)) | Guard::Null(_) | Guard::NotNull(_) => true,
        Guard::Any(parts) | Guard::All(parts) => parts.iter().all(is_difference),
        _ => false,
    }
}

fn operand(operand: &Operand) -> String {
    match operand {
        Operand::Column(name) | Operand::Coalesce(name, _) => name.clone(),
        Operand::Value(_) => "?".to_owned(),
        Operand::Now { plus_micros: 0 } => "now".to_owned(),
        Operand::Now { plus_micros } if *plus_micros < 0 => "now - ?".to_owned(),
        Operand::Now { .. } => "now + ?".to_owned(),
    }
}
