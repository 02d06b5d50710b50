//! Say what kind of state each thing in your product is; get the tables, the guarded writes, and the proof.
//!
//! A [`Blueprint`] is one file that names things and their archetypes. The [`atlas`] lists the 34 archetypes: their
//! states, what is the truth among them, who acts on them, what fails and what gets hot.

pub mod action;
pub mod archetypes;
pub mod atlas;
pub mod blueprint;
pub mod cache;
pub mod code;
pub mod declare;
mod doubt;
pub mod engine;
pub mod follow;
pub mod form;
pub mod holds;
pub mod house;
pub mod infra;
pub mod lock;
pub mod outside;
pub mod own;
mod paging;
pub mod product;
pub mod resource;
pub mod told;
pub mod worker;

pub use action::{Answer, Expected, Refusal};
pub use blueprint::Blueprint;
pub use blueprint::problem::Problems;
pub use code::Code;
pub use house::{House, Operation, Request};
pub use product::entity::handle as entity;
pub use product::schedule::hands as schedule;
pub use resource::Resource;
