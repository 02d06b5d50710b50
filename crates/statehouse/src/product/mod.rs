//! The product archetypes: rooms that people use.

pub mod booking;
pub mod entity;
