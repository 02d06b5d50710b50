//! The console in a real browser, on a house with the specimens of all archetypes.
//!
//! Needs `chromedriver` and `axe-core`: `scripts/browser` installs them and prints the variables that name them. Without
//! them the trials fail. A page that breaks the content security policy, a script that fails, and a serious finding of
//! axe-core fail the trial. `STATEHOUSE_TEST_PICTURES` names a folder for screenshots.

#![expect(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::indexing_slicing,
    clippy::panic,
    reason = "tests fail by panicking"
)]

mod driver;
mod flows;
mod pages;
mod site;
#[path = "../../../drills/tests/support/timed.rs"]
mod timed;

use std::future::Future;
use std::pin::Pin;

use libtest_mimic::Arguments;

type Flow = fn() -> Pin<Box<dyn Future<Output = ()> + Send>>;

macro_rules! flows {
    ($($group:ident::$name:ident),* $(,)?) => {
        &[$((concat!(stringify!($group), "::", stringify!($name)), || Box::pin($group::$name()))),*]
    };
}

const FLOWS: &[(&str, Flow)] = flows![
    pages::every_page_renders,
    pages::every_page_fits_a_phone,
    pages::every_action_form_is_submitted,
    flows::a_newcomer_writes_and_finds_the_record,
    flows::two_people_edit_one_row,
    flows::a_list_follows_the_log,
    flows::a_person_logs_in,
];

fn main() {
    let mut arguments = Arguments::from_args();
    // A browser keeps both cores busy by itself.
    arguments.test_threads = arguments.test_threads.or(Some(2));
    let trials = FLOWS.iter().map(|(name, flow)| {
        timed::trial(*name, move || {
            let mut runtime = tokio::runtime::Builder::new_multi_thread();
            let runtime = runtime.worker_threads(2).enable_all().build().unwrap();
            runtime.block_on(flow());
            Ok(())
        })
    });
    let conclusion = libtest_mimic::run(&arguments, trials.collect());
    driver::stop_driver();
    conclusion.exit();
}
