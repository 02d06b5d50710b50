//! The cases of the hotspot benchmark: for each relief of each archetype a workload and the two sides that it compares.

mod auction;
mod booking;
mod effect;
mod entity;
mod feed;
mod inventory;
mod lease;
mod log;
mod on;
mod payment;
mod projection;
mod relation;
mod scan;
mod schedule;
mod sequence;
mod thread;
mod timer;
mod view;
mod workflow;

use super::case::HotspotCase;

macro_rules! list_cases {
    ($($kind:ident::$name:ident,)*) => {
        /// The cases of each archetype that is built.
        const LISTS: &[&[HotspotCase]] = &[$($name::CASES),*];
    };
}

statehouse::for_archetypes!(list_cases);

/// All cases.
pub fn all() -> impl Iterator<Item = &'static HotspotCase> {
    LISTS.iter().copied().flatten()
}
