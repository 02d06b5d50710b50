//! What archetypes promise, one small case at a time, on every engine.
//!
//! A case gets an empty lab, puts a house over it and calls actions, as a surface would. As for the store's own cases,
//! none knows the name of an engine, and each archetype has a file of the same name as in the library, with its list.

use crate::conformance::Case;
use crate::drill::{self, Drill};

mod blueprint;
pub(crate) mod booking;
mod effect;
pub(crate) mod entity;
pub(crate) mod feed;
pub(crate) mod house;
pub(crate) mod lease;
mod log;
pub(crate) mod projection;
pub(crate) mod relation;
mod schedule;
mod sequence;
mod thread;
pub(crate) mod timer;

/// Every list of cases.
pub const CASES: &[&[Case]] = &[
    blueprint::CASES,
    booking::CASES,
    effect::CASES,
    entity::CASES,
    feed::CASES,
    lease::CASES,
    log::CASES,
    projection::CASES,
    relation::CASES,
    schedule::CASES,
    sequence::CASES,
    thread::CASES,
    timer::CASES,
];

/// Every list of drills: one for each failure that the atlas names of an archetype. A case that provokes one is a drill
/// too ([`Drill::by_case`]).
pub const DRILLS: &[&[Drill]] = &[
    drill::booking::DRILLS,
    effect::DRILLS,
    drill::entity::DRILLS,
    feed::DRILLS,
    drill::lease::DRILLS,
    log::DRILLS,
    projection::DRILLS,
    relation::DRILLS,
    schedule::DRILLS,
    sequence::DRILLS,
    thread::DRILLS,
    drill::timer::DRILLS,
];
