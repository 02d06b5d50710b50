//! The harness: what runs a proof, whatever archetype it is of.
//!
//! Nothing in here names an archetype; the proofs of one archetype are in [`crate::proof`].

#[cfg(feature = "proof")]
pub(crate) mod around;
#[cfg(feature = "proof")]
pub mod chosen;
#[cfg(feature = "proof")]
pub(crate) mod client;
#[cfg(feature = "proof")]
pub mod coverage;
#[cfg(feature = "proof")]
pub mod drill;
#[cfg(feature = "proof")]
pub mod engines;
#[cfg(feature = "proof")]
pub mod faults;
#[cfg(feature = "proof")]
pub(crate) mod house;
#[cfg(feature = "proof")]
pub(crate) mod invariants;
#[cfg(feature = "proof")]
pub mod linearize;
#[cfg(feature = "proof")]
pub mod mutation;
#[cfg(feature = "proof")]
pub mod outside;
#[cfg(feature = "proof")]
pub(crate) mod samples;
#[cfg(feature = "proof")]
pub mod scenario;
#[cfg(feature = "proof")]
pub mod simulation;
pub mod specimen;
pub mod systems;
#[cfg(feature = "proof")]
pub mod witness;
