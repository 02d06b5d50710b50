//! Trials whose time is recorded, for the report of `scripts/verify`: the harness itself prints the time of a whole run only.
//!
//! Where `STATEHOUSE_TRIAL_TIMES` names a file, each trial appends a line to it: its seconds, a space and its name.

use std::io::Write as _;
use std::time::Duration;

use libtest_mimic::{Failed, Trial};
use statehouse_store::clock::Stopwatch;

const TIMES_VARIABLE: &str = "STATEHOUSE_TRIAL_TIMES";

/// A trial that records its time, also if it panics.
pub fn trial(name: impl Into<String>, run: impl FnOnce() -> Result<(), Failed> + Send + 'static) -> Trial {
    let name = name.into();
    let timed = name.clone();
    Trial::test(name, move || {
        let _timing = Timing { name: timed, watch: Stopwatch::start() };
        run()
    })
}

/// Appends the line when it is dropped.
struct Timing {
    name: String,
    watch: Stopwatch,
}

impl Drop for Timing {
    fn drop(&mut self) {
        if let Some(path) = std::env::var_os(TIMES_VARIABLE) {
            let line = line(&self.name, self.watch.elapsed());
            let file = std::fs::File::options().append(true).create(true).open(path);
            // Times are for a report: a trial does not fail because its time cannot be written.
            let _ = file.and_then(|mut file| file.write_all(line.as_bytes()));
        }
    }
}

fn line(name: &str, took: Duration) -> String {
    format!("{:.3} {name}\n", took.as_secs_f64())
}
