//! Guard mutation: does anybody notice when a guard is missing?
//!
//! Plans are data, so a guard can be taken out without touching the source. First every drill and case of an archetype
//! runs as it is, before a recorder that lists the sites: each conjunct of each kind of step of each action and worker, each
//! alternative in it, and that a row is absent or present where that is the condition. Then, for one site at a time, the
//! drills and cases that met it run again on plans that lack it, the quickest first, until one turns red. Resources of one
//! archetype have their sites in common, because the same code makes their plans. A site that none misses is a
//! *survivor*: a guard that is not tested, or not needed. Actions of an archetype share steps, which one function makes, and
//! a step of an action has variants: a site that no check misses counts as noticed if it was in another of these.
//! [`Proof::redundant`] lists the few that are not needed to keep an invariant, each with the reason; they must survive,
//! or the list is wrong.
//!
//! Everything runs on the model, each trial in a runtime of one thread whose tasks take turns at every call of the store,
//! so that races happen in the same way each time.

use std::collections::{BTreeMap, VecDeque};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use anyhow::{Context, Result, bail};
use statehouse::atlas;
use statehouse_store::clock::Stopwatch;

use crate::conformance::Case;
use crate::harness::drill::{Drill, DrillSettings, DrillTarget, ROUNDS, bounded};
use crate::harness::engines::{Model, TestEngine};
use crate::harness::recorder::{GuardSite, PlanRecorder};
use crate::proof::{KIT_CASES, PROOFS, Proof};

/// A guard that follows from others, listed in the proof of its archetype ([`Proof::redundant`]).
#[derive(Clone, Copy, Debug)]
pub struct Redundant {
    /// The actions and workers.
    pub actors: &'static [&'static str],
    /// How [`GuardSite::step`] ends.
    pub step: &'static str,
    /// How [`GuardSite::condition`] ends.
    pub condition: &'static str,
    /// Why nothing goes wrong without it. It stays, because each step says by itself what it relies on.
    pub reason: &'static str,
}

impl Redundant {
    fn is(&self, site: &GuardSite) -> bool {
        self.actors.contains(&&*site.actor.name)
            && site.step.ends_with(self.step)
            && site.condition.ends_with(self.condition)
    }
}

/// What became of a mutant.
#[derive(Clone, Debug)]
pub struct Mutant {
    /// What was taken out.
    pub site: GuardSite,
    /// The check that noticed; `None` if no check did.
    pub killed_by: Option<String>,
    /// Why no check has to, if that is known.
    pub redundant: Option<&'static str>,
}

impl Mutant {
    /// Whether it is as it should be: noticed, or known not to matter.
    pub fn is_fine(&self) -> bool {
        self.killed_by.is_some() != self.redundant.is_some()
    }
}

/// What came of an archetype's mutants.
#[derive(Clone, Debug)]
pub struct MutationReport {
    /// The archetype, by keyword.
    pub archetype: &'static str,
    /// In the order of their actions.
    pub mutants: Vec<Mutant>,
    /// Drills and cases that are red as they are, with what they say: they cannot judge anything.
    pub failing_before: Vec<(String, String)>,
}

impl MutationReport {
    /// How many were noticed.
    pub fn killed(&self) -> usize {
        self.mutants.iter().filter(|mutant| mutant.killed_by.is_some()).count()
    }

    /// How many are known to follow from others.
    pub fn redundant(&self) -> usize {
        self.mutants.iter().filter(|mutant| mutant.redundant.is_some()).count()
    }

    /// Whether every mutant is as it should be, and every trial could judge. Where no plan has a guard that anybody tries,
    /// nothing was shown.
    pub fn is_fine(&self) -> bool {
        !self.mutants.is_empty() && self.failing_before.is_empty() && self.mutants.iter().all(Mutant::is_fine)
    }
}

/// A drill or a case.
#[derive(Clone)]
enum MutationTrial {
    Drill(Drill, Option<DrillTarget>),
    Case(&'static Case),
}

impl MutationTrial {
    fn name(&self) -> String {
        match self {
            MutationTrial::Drill(drill, _) => format!("drill {}", drill.name()),
            MutationTrial::Case(case) => case.name.to_owned(),
        }
    }

    /// Runs it on the model behind a recorder; the error says what was found. A panic is an error too: without a guard the code
    /// may reach a state that the guard excludes (`bug!`), which is one way to notice.
    fn run(&self, recorder: &PlanRecorder, patience: Duration) -> Result<()> {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
        let namespace = recorder.over(Model.namespace("mutation")?);
        let trial = async {
            match self {
                MutationTrial::Drill(drill, target) => {
                    let settings = DrillSettings { target: target.as_ref(), seed: 1, rounds: ROUNDS };
                    drill.run(namespace, &settings).await.map(drop)
                }
                MutationTrial::Case(case) => case.run(&*namespace).await,
            }
        };
        let run = || runtime.block_on(bounded(trial, patience));
        catch_unwind(AssertUnwindSafe(run)).unwrap_or_else(|_| bail!("it panicked"))
    }
}

/// How long a trial may take as it is.
const PATIENCE: Duration = Duration::from_secs(60);
/// How much longer it may take without a guard. A trial that waits for ever has noticed.
const SLOWER: u32 = 5;
const SLOWER_BY: Duration = Duration::from_secs(5);

/// The archetypes that have drills, by keyword. An archetype of a second keyword, like `on` beside `log`, has the plans of the
/// first, and its guards are judged there.
pub fn archetypes_with_drills() -> Vec<&'static str> {
    let is_first = |keyword: &str| atlas::by_keyword(keyword).is_some_and(|entry| entry.keyword() == keyword);
    let proofs = PROOFS.iter().filter(|proof| !proof.drills.is_empty() && is_first(proof.archetype));
    proofs.map(|proof| proof.archetype).collect()
}

/// Whether the drills and cases of an archetype judge what another one commits in them.
fn judges(archetype: &str, other: &str) -> bool {
    archetype == other || Proof::of(archetype).is_some_and(|proof| proof.also_judges.contains(&other))
}

/// Archetypes with rows that can be erased.
const ERASABLE: [&str; 2] = ["entity", "thread"];

/// Takes every guard of an archetype out in turn, on so many threads.
pub fn run(archetype: &'static str, threads: usize) -> Result<MutationReport> {
    let proof = Proof::of(archetype).with_context(|| format!("{archetype} has no proof"))?;
    let drills = proof.drills.iter().map(|drill| MutationTrial::Drill(*drill, None));
    // Of the cases of erasures only these archetypes have rows to erase; others are sources or followers in them.
    let concerns = |case: &&Case| !case.name.starts_with("erasure::") || ERASABLE.contains(&archetype);
    let kit = KIT_CASES.iter().copied().flatten().filter(concerns);
    let cases = proof.cases.iter().chain(kit).map(MutationTrial::Case);
    judge(archetype, drills.chain(cases).collect(), threads)
}

/// The same for a resource that is no blueprint's: by the drills of its archetype alone.
pub fn run_on(archetype: &'static str, target: &DrillTarget, threads: usize) -> Result<MutationReport> {
    let proof = Proof::of(archetype).with_context(|| format!("{archetype} has no proof"))?;
    let trials = proof.drills.iter().filter(|drill| drill.takes_any_resource());
    judge(
        archetype,
        trials.map(|drill| MutationTrial::Drill(*drill, Some(target.clone()))).collect(),
        threads,
    )
}

/// A trial as it is: what it met, and how long it took.
struct BaselineTrial {
    trial: MutationTrial,
    took: Duration,
}

/// One mutant: a site, in every resource of its archetype, and who met it.
#[derive(Default)]
struct MutantCandidate {
    sites: Vec<GuardSite>,
    trials: Vec<Arc<BaselineTrial>>,
}

impl MutantCandidate {
    fn reason(&self) -> Option<&'static str> {
        let is = |entry: &&Redundant| self.sites.iter().any(|site| entry.is(site));
        let redundant = PROOFS.iter().flat_map(|proof| proof.redundant);
        redundant.into_iter().find(is).map(|entry| entry.reason)
    }

    /// Who notices that it is missing: the quickest first.
    fn killer(&mut self) -> Option<String> {
        self.trials.sort_by_key(|before| (before.took, before.trial.name()));
        self.trials.dedup_by_key(|before| before.trial.name());
        let noticed = self.trials.iter().find(|before| {
            let recorder = PlanRecorder::without(self.sites.clone());
            before.trial.run(&recorder, before.took * SLOWER + SLOWER_BY).is_err()
        });
        noticed.map(|before| before.trial.name())
    }
}

fn judge(archetype: &'static str, trials: Vec<MutationTrial>, threads: usize) -> Result<MutationReport> {
    let runs = in_parallel(trials, threads, |trial| {
        let (recorder, watch) = (PlanRecorder::of_sites(), Stopwatch::start());
        let verdict = trial.run(&recorder, PATIENCE);
        (trial, verdict, recorder.sites(), watch.elapsed())
    })?;
    let mut failing_before = Vec::new();
    let mut met: BTreeMap<GuardSite, Vec<Arc<BaselineTrial>>> = BTreeMap::new();
    for (trial, verdict, sites, took) in runs {
        if let Err(error) = verdict {
            failing_before.push((trial.name(), format!("{error:#}")));
            continue;
        }
        let before = Arc::new(BaselineTrial { trial, took });
        for site in sites {
            met.entry(site).or_default().push(before.clone());
        }
    }
    failing_before.sort();
    let mut candidates: BTreeMap<GuardSite, MutantCandidate> = BTreeMap::new();
    for (site, trials) in met.iter().filter(|(site, _)| judges(archetype, site.actor.archetype)) {
        let candidate = candidates.entry(site.kind()).or_default();
        candidate.sites.push(site.clone());
        let like = met.iter().filter(|(other, _)| other.actor.archetype.is_empty() && site.is_like(other));
        candidate.trials.extend(like.flat_map(|(_, trials)| trials).chain(trials).cloned());
    }
    let judged = in_parallel(
        candidates.into_iter().collect(),
        threads,
        |(kind, mut candidate): (GuardSite, MutantCandidate)| {
            let (site, killed_by) = (GuardSite::common(&candidate.sites), candidate.killer());
            site.map(|site| (kind, Mutant { site, killed_by, redundant: candidate.reason() }))
        },
    )?;
    let mut judged: Vec<(GuardSite, Mutant)> = judged.into_iter().flatten().collect();
    judged.sort_by(|(one, _), (other, _)| one.cmp(other));
    // What vouches for a site: the same step in another action, or a variant of the step in the same action, which has other
    // conditions besides.
    let vouched = |kind: &GuardSite| {
        let condition = || kind.condition.clone();
        [(kind.step.clone(), condition()), (format!("{} {}", kind.actor.name, kind.head()), condition())]
    };
    let mut noticed: BTreeMap<(String, String), String> = BTreeMap::new();
    for (kind, mutant) in &judged {
        if let Some(by) = &mutant.killed_by {
            let by = format!("{by}, in {}", mutant.site.actor.name);
            for key in vouched(kind) {
                noticed.entry(key).or_insert_with(|| by.clone());
            }
        }
    }
    for (kind, mutant) in &mut judged {
        if mutant.killed_by.is_none() && mutant.redundant.is_none() {
            mutant.killed_by = vouched(kind).iter().find_map(|key| noticed.get(key)).cloned();
        }
    }
    let mut mutants: Vec<Mutant> = judged.into_iter().map(|(_, mutant)| mutant).collect();
    mutants.sort_by(|one, other| one.site.cmp(&other.site));
    Ok(MutationReport { archetype, mutants, failing_before })
}

/// Does something with each of many, on so many threads. The results come in any order.
fn in_parallel<T: Send, R: Send>(
    items: Vec<T>,
    threads: usize,
    work: impl Fn(T) -> R + Sync,
) -> Result<Vec<R>> {
    let (queue, results) = (Mutex::new(VecDeque::from(items)), Mutex::new(Vec::new()));
    let next = || queue.lock().unwrap_or_else(PoisonError::into_inner).pop_front();
    std::thread::scope(|scope| {
        let worker = || {
            while let Some(item) = next() {
                let result = work(item);
                results.lock().unwrap_or_else(PoisonError::into_inner).push(result);
            }
        };
        let handles: Vec<_> = (0..threads.max(1)).map(|_| scope.spawn(worker)).collect();
        let panicked =
            handles.into_iter().map(std::thread::ScopedJoinHandle::join).filter(Result::is_err).count();
        (panicked == 0).then_some(()).context("a trial panicked")
    })?;
    Ok(results.into_inner().unwrap_or_else(PoisonError::into_inner))
}
