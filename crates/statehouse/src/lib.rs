//! Say what kind of state each thing in your product is; get the tables, the guarded writes, and the proof.
//!
//! A [`Blueprint`] is one file that names things and their archetypes. The [`atlas`] lists the 34 archetypes: their
//! states, what is the truth among them, who acts on them, what fails and what gets hot.

pub mod action;
pub mod allow;
pub mod archetypes;
pub mod atlas;
pub mod audit;
pub mod blueprint;
pub mod cache;
pub mod code;
pub mod declare;
pub mod egress;
pub mod engine;
pub mod erase;
pub mod follow;
pub mod form;
#[cfg(feature = "fuzzing")]
pub mod fuzzing;
pub mod house;
pub mod inbound;
pub mod infra;
pub mod inputs;
pub mod lock;
mod paging;
pub mod prepare;
pub mod product;
pub mod resource;
pub mod secret_keys;
pub mod system;
mod unknown_outcomes;
pub mod view_source;
pub mod worker;

pub use action::{Answer, Expected, Refusal};
pub use allow::{Claims, Principal};
pub use blueprint::Blueprint;
pub use blueprint::problem::Problems;
pub use code::Code;
pub use house::{House, Operation, Request};
pub use product::entity::handle as entities;
pub use product::schedule::job_runner as jobs;
pub use resource::Resource;
