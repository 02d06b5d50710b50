//! A long log through projectors that are killed: what is left is what a build from nothing gives.
//!
//! Set `STATEHOUSE_PROJECTED_EVENTS` for a longer or a shorter run; a million take a while.

#![expect(clippy::print_stdout, reason = "this is the main function of a test")]

use std::process::ExitCode;

use statehouse_drills::endurance;

/// Events of a run that nobody has asked to be longer.
const EVENTS: u64 = 10_000;
const EVENTS_VARIABLE: &str = "STATEHOUSE_PROJECTED_EVENTS";
const SEED: u64 = 7;

fn main() -> ExitCode {
    let events = std::env::var(EVENTS_VARIABLE).ok().and_then(|text| text.parse().ok()).unwrap_or(EVENTS);
    let ran = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(2)
        .enable_all()
        .build()
        .map_err(anyhow::Error::from)
        .and_then(|runtime| runtime.block_on(endurance::run(events, SEED)));
    match ran {
        // Whoever is never killed has shown nothing.
        Ok(endured) if endured.killed.0 == 0 || endured.killed.1 == 0 => {
            println!("endurance: nobody was killed: {endured}");
            ExitCode::FAILURE
        }
        Ok(endured) => {
            println!("endurance: {endured}");
            ExitCode::SUCCESS
        }
        Err(error) => {
            println!("endurance: {error:#}");
            ExitCode::FAILURE
        }
    }
}
