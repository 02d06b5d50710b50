//! What archetypes promise, one small case at a time, on every engine.
//!
//! A case gets an empty lab, puts a house over it and calls actions, as a surface would. As for the store's own cases,
//! none knows the name of an engine, and each archetype has a file of the same name as in the library, with its list.

use crate::conformance::Case;

mod blueprint;
mod booking;
mod entity;
mod house;
mod lease;
mod log;
mod relation;
mod sequence;
mod thread;
mod timer;

/// Every list of cases.
pub const CASES: &[&[Case]] = &[
    blueprint::CASES,
    booking::CASES,
    entity::CASES,
    lease::CASES,
    log::CASES,
    relation::CASES,
    sequence::CASES,
    thread::CASES,
    timer::CASES,
];
