//! A slice of the simulation: the same seed gives the same trace, and no history is violated. One trial for each workload:
//! `simulation::booking`.
//!
//! Each workload has a budget of its own: `STATEHOUSE_SIMULATED_OPERATIONS` operations. The seeds are those that
//! `statehouse simulate --first SEED --seeds 1` gives to the same workload.

#![expect(clippy::print_stdout, clippy::print_stderr, reason = "this is the main function of a test harness")]

#[path = "support/timed.rs"]
mod timed;

use std::process::ExitCode;
use std::sync::{Arc, Mutex, PoisonError};

use libtest_mimic::{Arguments, Failed, Trial};
use statehouse_drills::selection::{self, Selection};
use statehouse_drills::simulation::{self, HistorySize, OPERATIONS, SimulationStats, WORKLOADS};

/// Workloads at a time: this is bound by the processor.
const THREADS: usize = 2;
/// Operations of each workload, if the environment does not say.
const SIMULATED: u64 = 20_000;
const SIMULATED_VARIABLE: &str = "STATEHOUSE_SIMULATED_OPERATIONS";
/// One seed is run twice for so many operations of the budget, with so many operations.
const BUDGET_OF_TWICE: u64 = 80;
const TWICE_OPERATIONS: u64 = 12;

/// What came of all workloads.
#[derive(Default)]
struct SimulationTotals {
    workloads: u64,
    histories: u64,
    twice: u64,
    violations: u64,
    stats: SimulationStats,
}

fn main() -> ExitCode {
    let mut arguments = Arguments::from_args();
    arguments.test_threads.get_or_insert(THREADS);
    let (selection, operations) =
        match (Selection::from_environment(), selection::number(SIMULATED_VARIABLE, SIMULATED)) {
            (Ok(selection), Ok(operations)) => (selection, operations),
            (Err(error), _) | (_, Err(error)) => {
                eprintln!("{error}");
                return ExitCode::FAILURE;
            }
        };
    let sum = Arc::new(Mutex::new(SimulationTotals::default()));
    let workloads =
        WORKLOADS.iter().enumerate().filter(|(_, workload)| selection.has_area(workload.archetype));
    let trials: Vec<Trial> = workloads
        .map(|(index, workload)| {
            let sum = sum.clone();
            timed::trial(format!("simulation::{}", workload.archetype), move || {
                simulate(index, operations, &sum)
            })
        })
        .collect();
    let conclusion = libtest_mimic::run(&arguments, trials);
    if arguments.list {
        return conclusion.exit_code();
    }
    let sum = sum.lock().unwrap_or_else(PoisonError::into_inner);
    println!(
        "simulation: {} workloads, {} seeds run twice, {} histories, {}; {} violations",
        sum.workloads, sum.twice, sum.histories, sum.stats, sum.violations
    );
    // A world in which something never went wrong has shown nothing about it.
    let faults = sum.stats.faults();
    let missing: Vec<&str> = faults.iter().filter(|(_, count)| *count == 0).map(|(name, _)| *name).collect();
    if sum.workloads == WORKLOADS.len() as u64 && !missing.is_empty() {
        println!("simulation: not achieved: {}", missing.join(", "));
        return ExitCode::FAILURE;
    }
    conclusion.exit_code()
}

/// The seeds of the workload at this place of the list, from the smallest.
fn seeds(index: usize) -> impl Iterator<Item = u64> {
    let (index, count) = (index as u64, WORKLOADS.len() as u64);
    (0..).map(move |turn| index + turn * count).filter(|seed| *seed > 0)
}

fn simulate(index: usize, operations: u64, sum: &Mutex<SimulationTotals>) -> Result<(), Failed> {
    let run = |seed: u64, size: HistorySize| {
        simulation::run(seed, size).map_err(|error| Failed::from(format!("seed {seed}: {error:#}")))
    };
    let short = HistorySize { operations: TWICE_OPERATIONS, tells: false };
    let twice = operations.div_ceil(BUDGET_OF_TWICE);
    for seed in seeds(index).take(usize::try_from(twice)?) {
        let [one, other] = [run(seed, short)?, run(seed, short)?];
        if (one.trace, one.stats) != (other.trace, other.stats) {
            return Err(format!("seed {seed} gives another trace each time").into());
        }
    }
    let histories = operations.div_ceil(OPERATIONS);
    let (mut stats, mut violated) = (SimulationStats::default(), Vec::new());
    for seed in seeds(index).take(usize::try_from(histories)?) {
        let run = run(seed, HistorySize::default())?;
        stats = stats.plus(run.stats);
        violated.extend(run.violation.map(|violation| format!("seed {seed}: {violation}")));
    }
    let mut sum = sum.lock().unwrap_or_else(PoisonError::into_inner);
    sum.workloads += 1;
    sum.histories += histories;
    sum.twice += twice;
    sum.violations += violated.len() as u64;
    sum.stats = sum.stats.plus(stats);
    if violated.is_empty() { Ok(()) } else { Err(violated.join("\n").into()) }
}
