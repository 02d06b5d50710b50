//! Every guard of every archetype that has drills is taken out, and somebody notices.
//!
//! With a name as argument only that archetype's: `cargo test -p statehouse-drills --test mutation -- booking`.

#![expect(clippy::print_stdout, reason = "this is the main function of a test")]

use std::process::ExitCode;

use statehouse_drills::mutation;

/// Trials at a time: more than there are cores, because most of a trial's time is waiting.
const THREADS: usize = 8;

fn main() -> ExitCode {
    let wanted: Vec<String> =
        std::env::args().skip(1).filter(|argument| !argument.starts_with('-')).collect();
    let mut summary = Vec::new();
    let mut fine = true;
    let all = mutation::archetypes_with_drills();
    for archetype in all.into_iter().filter(|name| wanted.is_empty() || wanted.iter().any(|one| one == name))
    {
        let report = match mutation::run(archetype, THREADS) {
            Ok(report) => report,
            Err(error) => {
                println!("{archetype}: {error:#}");
                fine = false;
                continue;
            }
        };
        for (name, why) in &report.red_before {
            println!("{archetype}: {name} is red as it is: {why}");
        }
        for mutant in &report.mutants {
            match (&mutant.killed_by, mutant.redundant) {
                (Some(by), None) => println!("killed    {}  by {by}", mutant.site),
                (None, Some(reason)) => println!("redundant {}  {reason}", mutant.site),
                (None, None) => println!("SURVIVED  {}", mutant.site),
                (Some(by), Some(_)) => println!("LISTED    {}  and killed by {by}", mutant.site),
            }
        }
        fine &= report.is_fine();
        let (killed, all, redundant) = (report.killed(), report.mutants.len(), report.redundant());
        summary.push(format!("{archetype} {killed}/{all} ({redundant} redundant)"));
    }
    println!("mutation: killed {}", summary.join(", "));
    if fine { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}
