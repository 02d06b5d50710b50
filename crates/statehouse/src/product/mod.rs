//! The product archetypes: rooms that people use.

pub mod entity;
