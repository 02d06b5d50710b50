//! `simulate`: histories of simulated processes, each from a seed.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use anyhow::Context as _;
use serde_json::{Value as Json, json};
use statehouse_drills::simulation::{self, HistorySize, SimulationRun, SimulationStats};
use statehouse_store::clock::Stopwatch;

use crate::arguments::Simulate;
use crate::output::{CliFailure, Output, counted};
use crate::stop::stop_requested;

/// What came of all seeds.
#[derive(Default)]
struct SimulationSummary {
    histories: u64,
    stats: SimulationStats,
    elapsed: Duration,
    violated: Vec<SimulationRun>,
    /// Whether it was asked to end before all seeds were run.
    is_stopped: bool,
    /// The last one, for a single seed.
    last: Option<SimulationRun>,
}

pub(crate) async fn run(simulate: &Simulate, output: &Output) -> Result<(), CliFailure> {
    let (first, seeds, history) = (simulate.first, simulate.seeds.max(1), simulate.history);
    let limit = Duration::from_secs(simulate.minutes.saturating_mul(60));
    let watch = Stopwatch::start();
    let stopped = Arc::new(AtomicBool::new(false));
    let is_stopped = stopped.clone();
    let work = move || all(first, seeds, history, limit, &is_stopped);
    let mut work = tokio::task::spawn_blocking(work);
    let ended = tokio::select! {
        ended = &mut work => ended,
        () = stop_requested() => {
            // The histories under way are brought to their end, and what there is so far is shown.
            stopped.store(true, Ordering::Relaxed);
            work.await
        }
    };
    let mut sum = ended.context("the simulation did not end")??;
    sum.is_stopped = stopped.load(Ordering::Relaxed);
    output.show(&to_json(&sum, watch.elapsed()), || describe(&sum, simulate, watch.elapsed()));
    if sum.violated.is_empty() { Ok(()) } else { Err(CliFailure::Shown) }
}

fn all(
    first: u64,
    seeds: u64,
    history: bool,
    limit: Duration,
    stopped: &AtomicBool,
) -> anyhow::Result<SimulationSummary> {
    let threads = std::thread::available_parallelism().map_or(1, std::num::NonZero::get);
    let (next, sum, failed) = (AtomicU64::new(0), Mutex::new(SimulationSummary::default()), Mutex::new(None));
    let watch = Stopwatch::start();
    std::thread::scope(|scope| {
        for _ in 0..threads {
            scope.spawn(|| {
                while watch.elapsed() < limit && !stopped.load(Ordering::Relaxed) {
                    let number = next.fetch_add(1, Ordering::Relaxed);
                    if number >= seeds {
                        break;
                    }
                    let size = HistorySize { tells: history, ..HistorySize::default() };
                    match simulation::run(first.wrapping_add(number), size) {
                        Ok(run) => {
                            let mut sum = sum.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
                            add(&mut sum, run);
                        }
                        Err(error) => {
                            *failed.lock().unwrap_or_else(std::sync::PoisonError::into_inner) = Some(error);
                            break;
                        }
                    }
                }
            });
        }
    });
    match failed.into_inner().unwrap_or_else(std::sync::PoisonError::into_inner) {
        Some(error) => Err(error),
        None => Ok(sum.into_inner().unwrap_or_else(std::sync::PoisonError::into_inner)),
    }
}

fn add(sum: &mut SimulationSummary, run: SimulationRun) {
    sum.histories += 1;
    sum.stats = sum.stats.plus(run.stats);
    sum.elapsed += run.elapsed;
    if run.violation.is_some() {
        sum.violated.push(run.clone());
    }
    sum.last = Some(run);
}

fn to_json(sum: &SimulationSummary, took: Duration) -> Json {
    let faults = sum.stats.faults().map(|(name, count)| (name.to_owned(), json!(count)));
    let violated = sum.violated.iter().map(|run| {
        json!({
            "seed": run.seed, "archetype": run.archetype, "trace": format!("{:016x}", run.trace),
            "violation": run.violation, "history": run.told,
        })
    });
    json!({
        "histories": sum.histories, "stopped": sum.is_stopped, "operations": sum.stats.operations, "store_calls": sum.stats.calls,
        "faults": faults.into_iter().collect::<serde_json::Map<_, _>>(),
        "virtual_seconds": sum.elapsed.as_secs(), "seconds": took.as_secs_f64(),
        "violations": violated.collect::<Vec<_>>(),
    })
}

fn describe(sum: &SimulationSummary, simulate: &Simulate, took: Duration) -> String {
    let mut lines = Vec::new();
    if let (true, 1, Some(run)) = (simulate.history, sum.histories, &sum.last) {
        lines.extend(run.told.iter().cloned());
        lines.push(format!("trace {:016x}\n", run.trace));
    }
    for run in &sum.violated {
        lines.push(format!(
            "VIOLATED  seed {} ({}): {}",
            run.seed,
            run.archetype,
            run.violation.as_deref().unwrap_or("")
        ));
        if simulate.history && sum.histories > 1 {
            lines.extend(run.told.iter().map(|plan| format!("  {plan}")));
        }
    }
    if sum.is_stopped {
        lines.push(format!("stopped before all {} seeds were run", simulate.seeds.max(1)));
    }
    lines.push(format!(
        "{} in {:.1} s, {} of virtual time\n{}\n{}",
        counted(sum.histories, "history", "histories"),
        took.as_secs_f64(),
        counted(sum.elapsed.as_secs() / 3_600, "hour", "hours"),
        sum.stats,
        counted(sum.violated.len() as u64, "violation", "violations")
    ));
    lines.join("\n")
}
