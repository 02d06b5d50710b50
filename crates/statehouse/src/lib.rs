//! Say what kind of state each thing in your product is; get the tables, the guarded writes, and the proof.
//!
//! A [`Blueprint`] is one file that names things and their archetypes. The [`atlas`] lists the 34 archetypes: their
//! states, what is the truth among them, who acts on them, what fails and what gets hot.

pub mod atlas;
pub mod blueprint;

pub use blueprint::Blueprint;
