//! A long log through projectors that are killed: what is left is what a build from nothing gives.
//!
//! Set `STATEHOUSE_PROJECTED_EVENTS` for a longer or a shorter run; a million take a while.

#![expect(clippy::print_stdout, clippy::print_stderr, reason = "this is the main function of a test harness")]

#[path = "support/timed.rs"]
mod timed;

use std::process::ExitCode;

use libtest_mimic::{Arguments, Failed};
use statehouse_drills::endurance;

/// Events, if the environment does not say.
const EVENTS: u64 = 10_000;
const EVENTS_VARIABLE: &str = "STATEHOUSE_PROJECTED_EVENTS";
const SEED: u64 = 7;

fn main() -> ExitCode {
    let arguments = Arguments::from_args();
    let events = match std::env::var(EVENTS_VARIABLE).map(|text| text.parse()) {
        Ok(Ok(events)) => events,
        Ok(Err(error)) => {
            eprintln!("{EVENTS_VARIABLE} has to be a number: {error}");
            return ExitCode::FAILURE;
        }
        Err(_) => EVENTS,
    };
    let trial = timed::trial("endurance::projectors_that_are_killed", move || endure(events));
    libtest_mimic::run(&arguments, vec![trial]).exit_code()
}

fn endure(events: u64) -> Result<(), Failed> {
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build()?;
    let endured =
        runtime.block_on(endurance::run(events, SEED)).map_err(|error| Failed::from(format!("{error:#}")))?;
    println!("endurance: {endured}");
    // A run in which no projector was killed has shown nothing.
    if endured.killed.0 == 0 || endured.killed.1 == 0 {
        return Err("no projector was killed before a write, or none after it".into());
    }
    Ok(())
}
