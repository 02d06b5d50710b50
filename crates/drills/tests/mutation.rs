//! Every guard of every archetype that has drills is taken out, and a drill or a case has to notice. One trial for each
//! archetype: `cargo test --workspace --test mutation -- mutation::booking`.

#![expect(clippy::print_stdout, clippy::print_stderr, reason = "this is the main function of a test harness")]

#[path = "support/timed.rs"]
mod timed;

use std::process::ExitCode;
use std::sync::{Arc, Mutex, PoisonError};

use libtest_mimic::{Arguments, Failed, Trial};
use statehouse_drills::mutation::{self, MutationReport};
use statehouse_drills::selection::Selection;

/// Archetypes at a time, and mutants of each: more than there are cores, because most of a trial's time is waiting.
const ARCHETYPES: usize = 2;
const THREADS: usize = 4;

fn main() -> ExitCode {
    let mut arguments = Arguments::from_args();
    arguments.test_threads.get_or_insert(ARCHETYPES);
    let selection = match Selection::from_environment() {
        Ok(selection) => selection,
        Err(error) => {
            eprintln!("{error}");
            return ExitCode::FAILURE;
        }
    };
    let summary: Arc<Mutex<Vec<String>>> = Arc::default();
    let archetypes = mutation::archetypes_with_drills().into_iter().filter(|name| selection.has_area(name));
    let trials: Vec<Trial> = archetypes
        .map(|archetype| {
            let summary = summary.clone();
            timed::trial(format!("mutation::{archetype}"), move || {
                let report =
                    mutation::run(archetype, THREADS).map_err(|error| Failed::from(format!("{error:#}")))?;
                let (killed, all, redundant) = (report.killed(), report.mutants.len(), report.redundant());
                let line = format!("{archetype} {killed}/{all} ({redundant} redundant)");
                summary.lock().unwrap_or_else(PoisonError::into_inner).push(line);
                judge(&report)
            })
        })
        .collect();
    let conclusion = libtest_mimic::run(&arguments, trials);
    if !arguments.list {
        let mut summary = summary.lock().unwrap_or_else(PoisonError::into_inner);
        summary.sort();
        println!("mutation: killed {}", summary.join(", "));
    }
    conclusion.exit_code()
}

/// Prints what became of each mutant; what is wrong is the error.
fn judge(report: &MutationReport) -> Result<(), Failed> {
    let red = report.failing_before.iter().map(|(name, why)| format!("{name} is red as it is: {why}"));
    let mut wrong: Vec<String> = red.collect();
    let mut lines = String::new();
    for mutant in &report.mutants {
        let line = match (&mutant.killed_by, mutant.redundant) {
            (Some(by), None) => format!("killed    {}  by {by}", mutant.site),
            (None, Some(reason)) => format!("redundant {}  {reason}", mutant.site),
            (None, None) => format!("SURVIVED  {}", mutant.site),
            (Some(by), Some(_)) => format!("LISTED    {}  and killed by {by}", mutant.site),
        };
        if !mutant.is_fine() {
            wrong.push(line.clone());
        }
        lines += &line;
        lines.push('\n');
    }
    print!("{lines}");
    if report.mutants.is_empty() {
        wrong.push("no plan has a guard that is tried".to_owned());
    }
    if report.is_fine() { Ok(()) } else { Err(wrong.join("\n").into()) }
}
