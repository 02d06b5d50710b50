//! The cases of the hotspot benchmark: for each relief of each archetype a workload and the two sides that it compares.

mod booking;
mod effect;
mod entity;
mod feed;
mod lease;
mod log;
mod relation;
mod schedule;
mod sequence;
mod thread;
mod timer;
mod view;

use super::case::HotspotCase;

/// The cases of each archetype, in the order of the keywords. A view's file has those of `projection`, which has nothing to
/// declare of its own.
const LISTS: &[&[HotspotCase]] = &[
    booking::CASES,
    effect::CASES,
    entity::CASES,
    feed::CASES,
    lease::CASES,
    log::CASES,
    view::PROJECTION_CASES,
    relation::CASES,
    schedule::CASES,
    sequence::CASES,
    thread::CASES,
    timer::CASES,
    view::CASES,
];

/// All cases.
pub fn all() -> impl Iterator<Item = &'static HotspotCase> {
    LISTS.iter().copied().flatten()
}
