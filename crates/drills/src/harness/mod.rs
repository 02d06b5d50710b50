//! The harness that runs the proofs of all archetypes.
//!
//! Nothing in this module names an archetype; the proofs of one archetype are in [`crate::proof`].

#[cfg(feature = "proof")]
pub(crate) mod case_check;
#[cfg(feature = "proof")]
pub mod coverage;
#[cfg(feature = "proof")]
pub mod drill;
#[cfg(feature = "proof")]
pub mod engines;
#[cfg(feature = "proof")]
pub mod fake_targets;
#[cfg(feature = "suite")]
pub mod faults;
#[cfg(feature = "proof")]
pub(crate) mod invariants;
#[cfg(feature = "proof")]
pub mod linearize;
#[cfg(feature = "proof")]
pub(crate) mod log_paths;
#[cfg(feature = "proof")]
pub mod machine_docs;
#[cfg(feature = "proof")]
pub mod mutation;
#[cfg(feature = "proof")]
pub(crate) mod proxy;
#[cfg(feature = "proof")]
pub mod recorder;
pub mod sample_inputs;
#[cfg(feature = "proof")]
pub mod scenario;
#[cfg(feature = "proof")]
pub mod selection;
#[cfg(feature = "proof")]
pub mod simulation;
#[cfg(feature = "proof")]
pub(crate) mod store_client;
pub mod systems;
#[cfg(test)]
pub(crate) mod tampering;
#[cfg(feature = "proof")]
pub(crate) mod tenant_client;
