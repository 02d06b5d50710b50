//! The HTTP surface over real sockets: each case on each engine, each with a server of its own.
//!
//! Cases are listed once, in the module that has them. A case is a function from a [`Site`](support::Site), which knows
//! the engine and starts servers on it, to nothing: it panics when something is wrong.

#![expect(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::indexing_slicing,
    clippy::panic,
    clippy::needless_pass_by_value,
    reason = "tests fail by panicking and take literals"
)]

mod cached;
mod credentials;
mod document;
mod grammar;
mod guide;
mod hostile;
mod logged;
mod operations;
mod protocols;
mod reasons;
mod repeated;
mod streams;
mod support;
#[path = "../../../drills/tests/support/timed.rs"]
mod timed;
mod trap;

use libtest_mimic::Arguments;
use support::{Case, ENGINES, Site};

fn main() {
    let arguments = Arguments::from_args();
    let logs = logged::start();
    let groups: [(&str, &[Case]); 12] = [
        ("cached", cached::CASES),
        ("credentials", credentials::CASES),
        ("document", document::CASES),
        ("grammar", grammar::CASES),
        ("guide", guide::CASES),
        ("hostile", hostile::CASES),
        ("logged", logged::CASES),
        ("operations", operations::CASES),
        ("protocols", protocols::CASES),
        ("reasons", reasons::CASES),
        ("repeated", repeated::CASES),
        ("streams", streams::CASES),
    ];
    let mut trials = Vec::new();
    for engine in ENGINES {
        for (group, cases) in groups {
            for (name, case) in cases {
                let case = *case;
                trials.push(timed::trial(format!("{engine}::{group}::{name}"), move || {
                    let mut runtime = tokio::runtime::Builder::new_multi_thread();
                    let runtime = runtime.worker_threads(2).enable_all().build().unwrap();
                    runtime.block_on(async { case(Site::on(engine)).await });
                    Ok(())
                }));
            }
        }
    }
    let conclusion = libtest_mimic::run(&arguments, trials);
    drop(logs);
    conclusion.exit();
}
