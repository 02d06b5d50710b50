//! The proof of each archetype: one folder, with its cases, its drills, its simulated workload and what must always hold.
//!
//! A case gets an empty namespace, puts a house over it and calls actions, as a surface would. As for the store's own cases, none
//! knows the name of an engine. A drill provokes one failure that the atlas lists. A workload is what simulated clients do.
//!
//! [`PROOFS`] is made from the library's list of archetypes: an archetype that is in the list and has no folder here does not
//! compile.

use crate::conformance::Case;
use crate::harness::drill::Drill;
use crate::harness::invariants::InvariantCheck;
use crate::harness::mutation::Redundant;
use crate::harness::simulation::Workload;

mod blueprint;
pub(crate) mod booking;
mod changes;
pub(crate) mod effect;
pub(crate) mod entity;
pub(crate) mod feed;
pub mod generated;
pub(crate) mod lease;
pub(crate) mod log;
pub mod projection;
pub(crate) mod relation;
pub(crate) mod schedule;
pub(crate) mod sequence;
pub(crate) mod thread;
pub(crate) mod timer;
pub(crate) mod view;

/// What is proven of one archetype.
pub struct Proof {
    /// The archetype, by keyword.
    pub archetype: &'static str,
    /// What it promises, one small case at a time, on every engine. Their names begin with the keyword.
    pub cases: &'static [Case],
    /// Each failure that the atlas lists, provoked. A case that provokes one is a drill too ([`Drill::by_case`]).
    pub drills: &'static [Drill],
    /// What simulated clients do, if it is simulated.
    pub workload: Option<&'static Workload>,
    /// What must hold of the stored rows and the log: checked by cases, after each drill on a resource, at the end of each simulated
    /// history and by scenarios.
    pub(crate) invariants: Option<InvariantCheck>,
    /// Other archetypes, by keyword, whose guards its drills and cases judge as well.
    pub also_judges: &'static [&'static str],
    /// Guards that follow from others: whose they are, the condition, and why nothing goes wrong without it.
    pub redundant: &'static [Redundant],
}

impl Proof {
    /// The proof of an archetype, by keyword.
    pub fn of(archetype: &str) -> Option<&'static Proof> {
        PROOFS.iter().find(|proof| proof.archetype == archetype)
    }
}

macro_rules! list_proofs {
    ($($kind:ident::$name:ident,)*) => {
        /// The proof of every archetype that is built.
        pub const PROOFS: &[Proof] = &[$($name::PROOF),*];

        /// Every list of cases.
        pub const CASES: &[&[Case]] = &[blueprint::CASES, changes::CASES, $($name::PROOF.cases),*];

        /// Every list of drills.
        pub const DRILLS: &[&[Drill]] = &[$($name::PROOF.drills),*];
    };
}

statehouse::for_archetypes!(list_proofs);

/// Every drill.
pub fn drills() -> impl Iterator<Item = &'static Drill> {
    DRILLS.iter().copied().flatten()
}
