//! What archetypes promise, one small case at a time, on every engine.
//!
//! A case gets an empty lab, puts a house over it and calls actions, as a surface would. As for the store's own cases,
//! none knows the name of an engine, and each archetype has a file of the same name as in the library, with its list.

use crate::conformance::Case;
use crate::harness::drill::Drill;

mod blueprint;
pub(crate) mod booking;
pub(crate) mod effect;
pub(crate) mod entity;
pub(crate) mod feed;
pub(crate) mod lease;
pub(crate) mod log;
pub mod projection;
pub(crate) mod relation;
pub(crate) mod schedule;
pub(crate) mod sequence;
pub(crate) mod thread;
pub(crate) mod timer;
pub(crate) mod view;

/// Every list of cases.
pub const CASES: &[&[Case]] = &[
    blueprint::CASES,
    booking::cases::CASES,
    effect::cases::CASES,
    entity::cases::CASES,
    feed::cases::CASES,
    lease::cases::CASES,
    log::cases::CASES,
    projection::cases::CASES,
    relation::cases::CASES,
    schedule::cases::CASES,
    sequence::cases::CASES,
    thread::cases::CASES,
    timer::cases::CASES,
];

/// Every list of drills: one for each failure that the atlas names of an archetype. A case that provokes one is a drill
/// too ([`Drill::by_case`]).
pub const DRILLS: &[&[Drill]] = &[
    booking::drills::DRILLS,
    effect::cases::DRILLS,
    entity::drills::DRILLS,
    feed::cases::DRILLS,
    lease::drills::DRILLS,
    log::cases::DRILLS,
    projection::cases::DRILLS,
    relation::cases::DRILLS,
    schedule::cases::DRILLS,
    sequence::cases::DRILLS,
    thread::cases::DRILLS,
    timer::drills::DRILLS,
];
