//! Every engine through every case, as trials of one harness: `sqlite::guards::expiry_is_exact_at_the_boundary` for
//! what a store has to do, `sqlite::entity::increments_are_never_lost` for what stands on it.
//!
//! An engine that cannot be reached fails each of its trials. The last lines say how many cases each engine passed,
//! so that a run which tested less than one thinks does not go unnoticed. For a longer run, set
//! `STATEHOUSE_DRILL_SEEDS` to the number of differential and fault workloads each engine is to go through. For a shorter
//! one, [`statehouse_drills::selection`] has variables for engines and areas.

#![expect(clippy::print_stdout, clippy::print_stderr, reason = "this is the main function of a test harness")]

#[path = "support/timed.rs"]
mod timed;

use std::collections::{BTreeMap, VecDeque};
use std::future::Future;
use std::process::ExitCode;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use anyhow::{Context, Result, bail};
use libtest_mimic::{Arguments, Failed, Trial};
use statehouse_drills::conformance::{self, Case};
use statehouse_drills::drill::Drill;
use statehouse_drills::engines::{self, TestEngine, TestNamespace};
use statehouse_drills::faults::FaultLevel;
use statehouse_drills::proof;
use statehouse_drills::selection::{self, STORE, Selection, area};
use statehouse_drills::simulation::{self, Workload};
use statehouse_store::{Clock, SystemClock};

/// Longer than any trial takes, on any engine. A store that hangs fails its trial instead of the whole run.
const PATIENCE: Duration = Duration::from_secs(900);

/// How many workloads of the differential and fault runs each engine goes through, if the environment does not say.
/// Seeds count from 1, so that a longer run repeats the shorter one first.
const SEEDS: u64 = 4;
const SEEDS_VARIABLE: &str = "STATEHOUSE_DRILL_SEEDS";

/// Random plans of one workload of the differential test.
const PLANS: usize = 400;

/// Trials at a time, if the command line does not say: more than there are cores, because many wait for servers.
const THREADS: usize = 4;

/// The suite of what a store has to do.
const CONFORMANCE: &str = "conformance";
/// The suite of what stands on a store.
const ARCHETYPES: &str = "archetypes";
/// The suite of drills.
const DRILLS: &str = "drills";
/// What the drills' chance begins with.
const DRILL_SEED: u64 = 1;

/// One engine's trials of one suite that were made, and that passed.
struct Score {
    suite: &'static str,
    engine: Arc<dyn TestEngine>,
    cases: AtomicUsize,
    /// Because their plans are too large for the server.
    left_out: usize,
    /// Because this run is reduced on this engine.
    reduced: usize,
}

/// The trials of a run, and the counts that are printed behind it.
#[derive(Default)]
struct Suite {
    trials: Vec<Trial>,
    scores: Vec<Arc<Score>>,
}

fn main() -> ExitCode {
    let mut arguments = Arguments::from_args();
    arguments.test_threads.get_or_insert(THREADS);
    let (selection, seeds) = match (Selection::from_environment(), selection::number(SEEDS_VARIABLE, SEEDS)) {
        (Ok(selection), Ok(seeds)) => (selection, seeds),
        (Err(error), _) | (_, Err(error)) => {
            eprintln!("{error}");
            return ExitCode::FAILURE;
        }
    };
    let mut suite = Suite::default();
    for engine in engines::all().into_iter().filter(|engine| selection.has_engine(engine.name())) {
        suite.store_cases(&engine, &selection);
        if engine.carries_archetypes() {
            suite.archetype_cases(&engine, &selection);
            suite.drills(&engine, &selection);
        }
        if !selection.is_reduced(engine.name()) {
            suite.random_runs(&engine, &selection, seeds);
        }
    }
    let conclusion = libtest_mimic::run(&arguments, in_turns(suite.trials));
    if !arguments.list {
        for name in [CONFORMANCE, ARCHETYPES, DRILLS] {
            let line = suite.scores.iter().filter(|score| score.suite == name).map(ToString::to_string);
            println!("{name}: {}", line.collect::<Vec<_>>().join(", "));
        }
    }
    conclusion.exit_code()
}

impl Suite {
    /// What the store has to do.
    fn store_cases(&mut self, engine: &Arc<dyn TestEngine>, selection: &Selection) {
        if selection.has_area(STORE) {
            self.cases(CONFORMANCE, engine, conformance::CASES.iter(), false);
        }
    }

    /// What stands on the store.
    fn archetype_cases(&mut self, engine: &Arc<dyn TestEngine>, selection: &Selection) {
        let all = proof::CASES.iter().copied().flatten();
        let cases = all.filter(|case| selection.has_area(area(case.name)));
        self.cases(ARCHETYPES, engine, cases, selection.is_reduced(engine.name()));
    }

    fn cases(
        &mut self,
        suite: &'static str,
        engine: &Arc<dyn TestEngine>,
        cases: impl Iterator<Item = &'static Case>,
        is_reduced: bool,
    ) {
        let (mut cases, left_out): (Vec<&Case>, Vec<&Case>) =
            cases.partition(|case| case.largest_plan <= engine.largest_plan());
        let reduced = if is_reduced { std::mem::take(&mut cases).len() } else { 0 };
        let score = self.score(suite, engine, left_out.len(), reduced);
        for case in cases {
            let (name, engine, score) =
                (format!("{}::{}", engine.name(), case.name), engine.clone(), score.clone());
            self.trials.push(timed::trial(name.clone(), move || {
                judge(engine.as_ref(), &name, async |namespace| case.run(namespace).await)?;
                score.cases.fetch_add(1, Ordering::Relaxed);
                Ok(())
            }));
        }
    }

    /// Every drill that takes any resource, on the blueprint that it brings along. The others are cases of the archetypes
    /// and have their trials there, unless the run is reduced: then every drill has its trial here.
    fn drills(&mut self, engine: &Arc<dyn TestEngine>, selection: &Selection) {
        let is_reduced = selection.is_reduced(engine.name());
        let all = proof::DRILLS.iter().copied().flatten();
        let (drills, left_out): (Vec<&Drill>, Vec<&Drill>) = all
            .filter(|drill| selection.has_area(drill.archetype))
            .filter(|drill| is_reduced || drill.takes_any_resource())
            .partition(|drill| drill.largest_plan <= engine.largest_plan());
        let score = self.score(DRILLS, engine, left_out.len(), 0);
        for drill in drills {
            let (name, engine, score) =
                (format!("{}::drill::{}", engine.name(), drill.name()), engine.clone(), score.clone());
            self.trials.push(timed::trial(name, move || {
                let runtime =
                    tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build()?;
                let report = runtime.block_on(drill.report(engine.as_ref(), None, DRILL_SEED));
                match (report.failed, report.skipped) {
                    (None, None) => score.cases.fetch_add(1, Ordering::Relaxed),
                    (Some(red), _) => return Err(Failed::from(red.to_string())),
                    (None, Some(reason)) => return Err(Failed::from(format!("skipped: {reason}"))),
                };
                Ok(())
            }));
        }
    }

    /// Random plans, clients in a bad world, and plans of the archetypes' histories.
    fn random_runs(&mut self, engine: &Arc<dyn TestEngine>, selection: &Selection, seeds: u64) {
        if selection.has_area(STORE) {
            for seed in 1..=seeds {
                self.trials.push(differential(engine, seed));
                self.trials.push(faults(engine, seed, FaultLevel::Rough));
                self.trials.push(faults(engine, seed, FaultLevel::Deadly));
            }
        }
        for seed in 1..=seeds.div_ceil(SEEDS) {
            let workloads =
                simulation::WORKLOADS.iter().filter(|workload| selection.has_area(workload.archetype));
            self.trials.extend(workloads.map(|workload| differential_of(engine, workload, seed)));
        }
    }

    fn score(
        &mut self,
        suite: &'static str,
        engine: &Arc<dyn TestEngine>,
        left_out: usize,
        reduced: usize,
    ) -> Arc<Score> {
        let (engine, cases) = (engine.clone(), AtomicUsize::new(0));
        let score = Arc::new(Score { suite, engine, cases, left_out, reduced });
        self.scores.push(score.clone());
        score
    }
}

/// The trials of all engines in turns. An emulator that does one thing at a time is then asked from the beginning to the
/// end, while the others are judged beside it.
fn in_turns(trials: Vec<Trial>) -> Vec<Trial> {
    let mut by_engine: BTreeMap<String, VecDeque<Trial>> = BTreeMap::new();
    for trial in trials {
        let engine = trial.name().split("::").next().unwrap_or_default().to_owned();
        by_engine.entry(engine).or_default().push_back(trial);
    }
    let mut mixed = Vec::new();
    while by_engine.values().any(|queue| !queue.is_empty()) {
        mixed.extend(by_engine.values_mut().filter_map(VecDeque::pop_front));
    }
    mixed
}

impl std::fmt::Display for Score {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{} {} cases", self.engine.name(), self.cases.load(Ordering::Relaxed))?;
        if self.left_out > 0 {
            write!(
                f,
                " ({} left out: plans of more than {} operations)",
                self.left_out,
                self.engine.largest_plan()
            )?;
        }
        if self.reduced > 0 {
            write!(f, " ({} left to the nightly run)", self.reduced)?;
        }
        Ok(())
    }
}

/// Random plans on the model and on this engine. What a workload did is part of what it has shown, so it is printed.
fn differential(engine: &Arc<dyn TestEngine>, seed: u64) -> Trial {
    let (name, engine) = (format!("{}::differential::seed_{seed}", engine.name()), engine.clone());
    timed::trial(name.clone(), move || {
        judge(engine.as_ref(), &name, async |namespace| {
            let stats =
                statehouse_drills::differential::run(namespace, seed, PLANS, engine.largest_plan().min(12))
                    .await?;
            println!("{name}: {stats}");
            Ok(())
        })
    })
}

/// Plans of an archetype's history on the model and on this engine.
fn differential_of(engine: &Arc<dyn TestEngine>, workload: &'static Workload, seed: u64) -> Trial {
    let name = format!("{}::differential::{}_{seed}", engine.name(), workload.archetype);
    let engine = engine.clone();
    timed::trial(name.clone(), move || {
        judge(engine.as_ref(), &name, async |namespace| {
            let plan = engine.largest_plan();
            println!(
                "{name}: {}",
                statehouse_drills::differential::archetypes::run(namespace, workload, seed, plan).await?
            );
            Ok(())
        })
    })
}

/// Clients in a bad world around this engine. The faults that were achieved are printed for the same reason.
fn faults(engine: &Arc<dyn TestEngine>, seed: u64, level: FaultLevel) -> Trial {
    let world_name = format!("{level:?}").to_lowercase();
    let (name, engine) = (format!("{}::faults::{world_name}_{seed}", engine.name()), engine.clone());
    timed::trial(name.clone(), move || {
        judge(engine.as_ref(), &name, async |namespace| {
            println!("{name}: {}", statehouse_drills::faults::run(namespace, seed, level).await?);
            Ok(())
        })
    })
}

/// Runs one trial in a namespace and a runtime of its own. Two threads, so that what races does so for real.
fn judge(
    engine: &dyn TestEngine,
    name: &str,
    trial: impl AsyncFnOnce(&dyn TestNamespace) -> Result<()>,
) -> Result<(), Failed> {
    let verdict = || -> Result<()> {
        let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build()?;
        let namespace = engine.namespace(name).with_context(|| format!("{} gave no lab", engine.name()))?;
        runtime.block_on(bounded(trial(namespace.as_ref())))
    };
    verdict().map_err(|error| Failed::from(format!("{error:#}")))
}

async fn bounded(trial: impl Future<Output = Result<()>>) -> Result<()> {
    tokio::select! {
        verdict = trial => verdict,
        () = SystemClock.sleep(PATIENCE) => bail!("the trial did not end within {PATIENCE:?}"),
    }
}
