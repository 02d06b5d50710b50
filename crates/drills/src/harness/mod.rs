//! The harness: what runs a proof, whatever archetype it is of.
//!
//! Nothing in here names an archetype; the proofs of one archetype are in [`crate::proof`].

pub(crate) mod around;
pub mod chosen;
pub(crate) mod client;
pub mod coverage;
pub mod drill;
pub mod engines;
pub mod faults;
pub(crate) mod house;
pub(crate) mod invariants;
pub mod linearize;
pub mod mutation;
pub mod outside;
pub(crate) mod samples;
pub mod scenario;
pub mod simulation;
pub mod specimen;
pub mod witness;
