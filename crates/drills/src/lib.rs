//! The suite that judges any store: if an engine passes it, everything that is built on the waist may stand on it.
//!
//! Five kinds of proof, each finding what the others cannot:
//!
//! - [`conformance`] says what the contract means, one small case at a time. A case states what it expects from
//!   the documentation of [`statehouse_store::Store`], not from what some engine does.
//! - [`proof`] says the same of what stands on the waist: each archetype's actions, on every engine.
//! - [`differential`] runs random plans over random schemas on the model and on another store, side by side, and
//!   finds combinations that have no case.
//! - [`linearize`] decides whether what concurrent clients saw can have happened in one order. Where many clients
//!   race there is no expected answer to compare with, only answers that are impossible.
//! - [`faults`] makes the world around a store bad, lets clients get on with it by the rules that the contract
//!   gives them (commit again, or resolve), and then counts whether anything was lost or done twice.
//!
//! [`endurance`] sends a long log through projectors that are killed, and compares with a build from nothing.
//!
//! A fifth is for people: [`scenario`] runs whole systems under load, and then counts.
//!
//! What is judged comes in through [`engines`]: every case gets an empty namespace of its own, so all of them run
//! at once. Cases are code in a library and not tests, so that a test harness and a command can both run them; they
//! return an error that says what was expected, and never panic.
//!
//! What the command runs is behind the feature `proof`: cases of archetypes, drills, guard mutation, simulation and scenarios. The suite
//! of the store and what else only tests run is behind the feature `suite`. Only [`systems`] and [`sample_inputs`] are always there.

#![cfg_attr(
    feature = "proof",
    expect(
        clippy::indexing_slicing,
        reason = "this is test code in the form of a library: an index that is out of range is a failed case, and tests \
                  are exempt from this lint"
    )
)]

#[cfg(feature = "proof")]
pub mod conformance;
#[cfg(feature = "suite")]
pub mod differential;
pub mod harness;
#[cfg(feature = "proof")]
pub mod proof;

#[cfg(feature = "suite")]
pub use harness::faults;
#[cfg(feature = "proof")]
pub use harness::{
    coverage, drill, engines, fake_targets, linearize, mutation, recorder, scenario, selection, simulation,
};
pub use harness::{sample_inputs, systems};
#[cfg(feature = "suite")]
pub use proof::projection::endurance;
