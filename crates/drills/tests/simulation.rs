//! A slice of the simulation: the same seed gives the same trace, and no history is violated.
//!
//! Set `STATEHOUSE_SIMULATED_OPERATIONS` for a longer or a shorter run. Seeds count from 1.

#![expect(
    clippy::print_stdout,
    clippy::unwrap_used,
    reason = "this is the main function of a test: it prints, and fails by panicking"
)]

use std::process::ExitCode;
use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering};

use statehouse_drills::simulation::{self, OPERATIONS, Run, Size, Tally};

/// As many as the machine that this is run on has cores, at least.
const THREADS: u64 = 2;
/// Operations in all.
const SIMULATED: u64 = 1_000_000;
const SIMULATED_VARIABLE: &str = "STATEHOUSE_SIMULATED_OPERATIONS";
/// Seeds that are run twice, and operations of each.
const TWICE: u64 = 2_000;
const TWICE_OPERATIONS: u64 = 12;

fn main() -> ExitCode {
    let wanted =
        std::env::var(SIMULATED_VARIABLE).ok().and_then(|text| text.parse().ok()).unwrap_or(SIMULATED);
    let differing = Mutex::new(Vec::new());
    let short = Size { operations: TWICE_OPERATIONS, tells: false };
    on_threads(TWICE, |seed| {
        let traces = [run(seed, short), run(seed, short)].map(|run| run.map(|run| (run.trace, run.tally)));
        if traces[0].is_err() || traces[0] != traces[1] {
            differing.lock().unwrap().push(seed);
        }
    });
    let differing = differing.into_inner().unwrap();
    println!("simulation: {TWICE} seeds run twice, {} of them with different traces", differing.len());
    if let Some(seed) = differing.first() {
        println!("simulation: seed {seed} gives another trace each time");
        return ExitCode::FAILURE;
    }
    let (total, violated) = (Mutex::new(Tally::default()), Mutex::new(Vec::new()));
    let histories = wanted.div_ceil(OPERATIONS);
    on_threads(histories, |seed| match run(seed, Size::default()) {
        Ok(run) => {
            let mut total = total.lock().unwrap();
            *total = total.plus(run.tally);
            if let Some(violation) = run.violation {
                violated.lock().unwrap().push((seed, run.archetype, violation));
            }
        }
        Err(error) => violated.lock().unwrap().push((seed, "", error)),
    });
    let total = total.into_inner().unwrap();
    let mut violated = violated.into_inner().unwrap();
    violated.sort();
    println!("simulation: {histories} histories, {total}; {} violations", violated.len());
    for (seed, archetype, violation) in violated.iter().take(10) {
        println!("simulation: seed {seed} ({archetype}): {violation}");
    }
    let missing: Vec<&str> =
        total.faults().iter().filter(|(_, count)| *count == 0).map(|(name, _)| *name).collect();
    // A world in which something never went wrong has shown nothing about it.
    if !missing.is_empty() {
        println!("simulation: not achieved: {}", missing.join(", "));
    }
    if violated.is_empty() && missing.is_empty() { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}

fn run(seed: u64, size: Size) -> Result<Run, String> {
    simulation::run(seed, size).map_err(|error| format!("{error:#}"))
}

/// Does something with each seed from 1.
fn on_threads(seeds: u64, work: impl Fn(u64) + Sync) {
    let next = AtomicU64::new(1);
    std::thread::scope(|scope| {
        for _ in 0..THREADS {
            scope.spawn(|| {
                loop {
                    let seed = next.fetch_add(1, Ordering::Relaxed);
                    if seed > seeds {
                        break;
                    }
                    work(seed);
                }
            });
        }
    });
}
