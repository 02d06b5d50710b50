//! Every engine through every case, as trials of one harness: `sqlite::guards::expiry_is_exact_at_the_boundary` for
//! what a store has to do, `sqlite::entity::increments_are_never_lost` for what stands on it.
//!
//! An engine that cannot be reached fails each of its trials. The last lines say how many cases each engine passed,
//! so that a run which tested less than one thinks does not go unnoticed. For a longer run, set
//! `STATEHOUSE_DRILL_SEEDS` to the number of differential and fault courses each engine is to go through.

#![expect(clippy::print_stdout, clippy::print_stderr, reason = "this is the main function of a test harness")]

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
use statehouse_drills::engines::{self, Engine, Lab};
use statehouse_drills::faults::World;
use statehouse_drills::proof;
use statehouse_drills::simulation::{self, Course};
use statehouse_store::{Clock, SystemClock};

/// Longer than any trial takes, on any engine. A store that hangs fails its trial instead of the whole run.
const PATIENCE: Duration = Duration::from_secs(300);

/// How many courses of the differential and fault runs each engine goes through, if the environment does not say.
/// Seeds count from 1, so that a longer run repeats the shorter one first.
const SEEDS: u64 = 4;
const SEEDS_VARIABLE: &str = "STATEHOUSE_DRILL_SEEDS";

/// Random plans of one course of the differential test.
const PLANS: usize = 400;

/// Trials at a time, if the command line does not say: more than there are cores, because many wait for servers.
const THREADS: usize = 4;

/// The lists of cases, each with a line of its own at the end.
const SUITES: [(&str, &[&[Case]]); 2] = [("conformance", &[conformance::CASES]), (ARCHETYPES, proof::CASES)];

/// The suite of what stands on a store.
const ARCHETYPES: &str = "archetypes";

/// The suite of drills.
const DRILLS: &str = "drills";
/// What the drills' chance begins with.
const DRILL_SEED: u64 = 1;

/// One engine's trials of one suite that were made, and that passed.
struct Score {
    suite: &'static str,
    engine: Arc<dyn Engine>,
    cases: AtomicUsize,
    left_out: usize,
}

fn main() -> ExitCode {
    let mut arguments = Arguments::from_args();
    arguments.test_threads.get_or_insert(THREADS);
    let mut trials = Vec::new();
    let mut scores = Vec::new();
    let seeds = match std::env::var(SEEDS_VARIABLE).map(|count| count.parse()) {
        Ok(Ok(count)) => count,
        Ok(Err(error)) => {
            eprintln!("{SEEDS_VARIABLE} has to be a number: {error}");
            return ExitCode::FAILURE;
        }
        Err(_) => SEEDS,
    };
    for engine in engines::all() {
        for (suite, lists) in SUITES {
            if suite == ARCHETYPES && !engine.carries_archetypes() {
                continue;
            }
            let (cases, left_out): (Vec<&Case>, Vec<&Case>) =
                lists.iter().copied().flatten().partition(|case| case.largest_plan <= engine.largest_plan());
            let (cases_passed, left_out) = (AtomicUsize::new(0), left_out.len());
            let score = Arc::new(Score { suite, engine: engine.clone(), cases: cases_passed, left_out });
            for case in cases {
                let (name, engine, score) =
                    (format!("{}::{}", engine.name(), case.name), engine.clone(), score.clone());
                trials.push(Trial::test(name.clone(), move || {
                    judge(engine.as_ref(), &name, async |lab| case.run(lab).await)?;
                    score.cases.fetch_add(1, Ordering::Relaxed);
                    Ok(())
                }));
            }
            scores.push(score);
        }
        if engine.carries_archetypes() {
            scores.push(drills(&engine, &mut trials));
        }
        for seed in 1..=seeds {
            trials.push(differential(&engine, seed));
            trials.push(faults(&engine, seed, World::Rough));
            trials.push(faults(&engine, seed, World::Deadly));
        }
        for seed in 1..=seeds.div_ceil(SEEDS) {
            trials.extend(simulation::COURSES.iter().map(|course| differential_of(&engine, course, seed)));
        }
    }
    let conclusion = libtest_mimic::run(&arguments, in_turns(trials));
    if !arguments.list {
        for suite in SUITES.map(|(suite, _)| suite).into_iter().chain([DRILLS]) {
            let line = scores.iter().filter(|score| score.suite == suite).map(ToString::to_string);
            println!("{suite}: {}", line.collect::<Vec<_>>().join(", "));
        }
    }
    conclusion.exit_code()
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
        Ok(())
    }
}

/// Every drill that takes any resource, on the blueprint that it brings along. The others are cases of the archetypes, and
/// have their trials there.
fn drills(engine: &Arc<dyn Engine>, trials: &mut Vec<Trial>) -> Arc<Score> {
    let all = proof::DRILLS.iter().copied().flatten().filter(|drill| drill.takes_any_resource());
    let (drills, left_out): (Vec<&Drill>, Vec<&Drill>) =
        all.partition(|drill| drill.largest_plan <= engine.largest_plan());
    let (cases, left_out) = (AtomicUsize::new(0), left_out.len());
    let score = Arc::new(Score { suite: DRILLS, engine: engine.clone(), cases, left_out });
    for drill in drills {
        let (name, engine, score) =
            (format!("{}::drill::{}", engine.name(), drill.name()), engine.clone(), score.clone());
        trials.push(Trial::test(name, move || {
            let runtime =
                tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build()?;
            match runtime.block_on(drill.report(engine.as_ref(), None, DRILL_SEED)).red {
                None => score.cases.fetch_add(1, Ordering::Relaxed),
                Some(red) => return Err(Failed::from(red.to_string())),
            };
            Ok(())
        }));
    }
    score
}

/// Random plans on the model and on this engine. What a course did is part of what it has shown, so it is printed.
fn differential(engine: &Arc<dyn Engine>, seed: u64) -> Trial {
    let (name, engine) = (format!("{}::differential::seed_{seed}", engine.name()), engine.clone());
    Trial::test(name.clone(), move || {
        judge(engine.as_ref(), &name, async |lab| {
            let tally =
                statehouse_drills::differential::run(lab, seed, PLANS, engine.largest_plan().min(12)).await?;
            println!("{name}: {tally}");
            Ok(())
        })
    })
}

/// Plans of an archetype's history on the model and on this engine.
fn differential_of(engine: &Arc<dyn Engine>, course: &'static Course, seed: u64) -> Trial {
    let name = format!("{}::differential::{}_{seed}", engine.name(), course.archetype);
    let engine = engine.clone();
    Trial::test(name.clone(), move || {
        judge(engine.as_ref(), &name, async |lab| {
            let plan = engine.largest_plan();
            println!(
                "{name}: {}",
                statehouse_drills::differential::archetypes::run(lab, course, seed, plan).await?
            );
            Ok(())
        })
    })
}

/// Clients in a bad world around this engine. The faults that were achieved are printed for the same reason.
fn faults(engine: &Arc<dyn Engine>, seed: u64, world: World) -> Trial {
    let world_name = format!("{world:?}").to_lowercase();
    let (name, engine) = (format!("{}::faults::{world_name}_{seed}", engine.name()), engine.clone());
    Trial::test(name.clone(), move || {
        judge(engine.as_ref(), &name, async |lab| {
            println!("{name}: {}", statehouse_drills::faults::run(lab, seed, world).await?);
            Ok(())
        })
    })
}

/// Runs one trial in a lab and a runtime of its own. Two threads, so that what races does so for real.
fn judge(
    engine: &dyn Engine,
    name: &str,
    trial: impl AsyncFnOnce(&dyn Lab) -> Result<()>,
) -> Result<(), Failed> {
    let verdict = || -> Result<()> {
        let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build()?;
        let lab = engine.lab(name).with_context(|| format!("{} gave no lab", engine.name()))?;
        runtime.block_on(bounded(trial(lab.as_ref())))
    };
    verdict().map_err(|error| Failed::from(format!("{error:#}")))
}

async fn bounded(trial: impl Future<Output = Result<()>>) -> Result<()> {
    tokio::select! {
        verdict = trial => verdict,
        () = SystemClock.sleep(PATIENCE) => bail!("the trial did not end within {PATIENCE:?}"),
    }
}
