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
#[cfg(test)]
use crate::harness::tampering::Tampering;

pub(crate) mod auction;
mod audit;
mod blueprint;
pub(crate) mod booking;
mod changes;
mod conditions;
mod constraints;
pub(crate) mod effect;
pub(crate) mod entity;
mod erasure;
pub(crate) mod feed;
#[cfg(feature = "suite")]
pub mod generated;
mod inbound;
mod indexes;
pub(crate) mod inventory;
pub(crate) mod lease;
pub(crate) mod log;
mod machines;
pub(crate) mod on;
pub(crate) mod payment;
pub mod projection;
pub(crate) mod relation;
mod row_constraints;
mod rules;
pub(crate) mod scan;
pub(crate) mod schedule;
pub(crate) mod sequence;
pub(crate) mod thread;
pub(crate) mod timer;
pub(crate) mod view;
pub(crate) mod workflow;

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
    /// Writes a declaration with settings by chance, if a blueprint can declare it.
    #[cfg(feature = "suite")]
    pub(crate) generate: Option<generated::GenerateDeclaration>,
    /// Changes of rows that no action makes: its checker has to notice each.
    #[cfg(test)]
    pub(crate) tamperings: fn() -> Vec<Tampering>,
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
        pub const CASES: &[&[Case]] = &[audit::CASES, blueprint::CASES, changes::CASES, conditions::CASES, constraints::CASES, erasure::CASES, inbound::CASES, indexes::CASES, machines::CASES, row_constraints::CASES, rules::CASES, $($name::PROOF.cases),*];

        /// Every list of drills.
        pub const DRILLS: &[&[Drill]] = &[$($name::PROOF.drills),*];
    };
}

statehouse::for_archetypes!(list_proofs);

/// Cases of what every archetype gets from the declaration kit. They judge the guards of each archetype that they use.
pub(crate) const KIT_CASES: &[&[Case]] =
    &[conditions::CASES, constraints::CASES, erasure::CASES, row_constraints::CASES];

/// Every drill.
pub fn drills() -> impl Iterator<Item = &'static Drill> {
    DRILLS.iter().copied().flatten()
}
