//! The HTTP surface over real sockets: each case on each engine, each with a server of its own.
//!
//! Cases are listed once, in the module that has them. A case is a function from a [`Site`](support::Site), which knows
//! the engine and starts servers on it, to nothing: it panics when something is wrong. Cases about rights and
//! hostile clients also run on PostgreSQL with row-level security.

#![expect(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::indexing_slicing,
    clippy::panic,
    clippy::needless_pass_by_value,
    reason = "tests fail by panicking and take literals"
)]

mod audit;
mod backpressure;
mod cached;
mod console;
#[path = "../../../store-sqlite/tests/durability/crash_vfs.rs"]
#[expect(dead_code, reason = "only the full disk is needed here")]
mod crash_vfs;
mod credentials;
mod document;
mod grammar;
mod guide;
mod hardening;
mod hostile;
mod hostile_random;
mod inbound;
mod limits;
mod logged;
mod open_mode;
mod operations;
mod postgres;
mod protocols;
mod reasons;
mod repeated;
mod rights;
mod rules;
mod streams;
mod support;
#[path = "../../../drills/tests/support/timed.rs"]
mod timed;
mod trap;

use std::time::Duration;

use libtest_mimic::Arguments;
use statehouse_store::{Clock as _, SystemClock};
use support::{Case, ENGINES, RESTRICTED, Site};

/// The groups that also run on PostgreSQL with row-level security.
const ON_POSTGRES: [&str; 18] = [
    "audit",
    "backpressure",
    "console",
    "credentials",
    "hardening",
    "hostile",
    "hostile_random",
    "inbound",
    "limits",
    "logged",
    "open_mode",
    "operations",
    "protocols",
    "reasons",
    "repeated",
    "rights",
    "rules",
    "streams",
];

/// Longer than any trial takes. A trial that hangs fails instead of the whole run.
const PATIENCE: Duration = Duration::from_secs(300);

fn main() {
    let arguments = Arguments::from_args();
    let logs = logged::start();
    let groups: [(&str, &[Case]); 22] = [
        ("audit", audit::CASES),
        ("backpressure", backpressure::CASES),
        ("cached", cached::CASES),
        ("console", console::CASES),
        ("credentials", credentials::CASES),
        ("document", document::CASES),
        ("grammar", grammar::CASES),
        ("guide", guide::CASES),
        ("hardening", hardening::CASES),
        ("hostile", hostile::CASES),
        ("hostile_random", hostile_random::CASES),
        ("inbound", inbound::CASES),
        ("limits", limits::CASES),
        ("logged", logged::CASES),
        ("open_mode", open_mode::CASES),
        ("operations", operations::CASES),
        ("protocols", protocols::CASES),
        ("reasons", reasons::CASES),
        ("repeated", repeated::CASES),
        ("rights", rights::CASES),
        ("rules", rules::CASES),
        ("streams", streams::CASES),
    ];
    let mut trials = Vec::new();
    for engine in ENGINES.into_iter().chain([RESTRICTED]) {
        let runs = |group: &str| engine != RESTRICTED || ON_POSTGRES.contains(&group);
        for (group, cases) in groups.into_iter().filter(|(group, _)| runs(group)) {
            for (name, case) in cases {
                let case = *case;
                trials.push(timed::trial(format!("{engine}::{group}::{name}"), move || {
                    let mut runtime = tokio::runtime::Builder::new_multi_thread();
                    let runtime = runtime.worker_threads(2).enable_all().build().unwrap();
                    runtime.block_on(async {
                        tokio::select! {
                            () = case(Site::on(engine)) => Ok(()),
                            () = SystemClock.sleep(PATIENCE) => {
                                Err(format!("the trial did not end within {PATIENCE:?}").into())
                            }
                        }
                    })
                }));
            }
        }
    }
    let conclusion = libtest_mimic::run(&arguments, trials);
    drop(logs);
    conclusion.exit();
}
