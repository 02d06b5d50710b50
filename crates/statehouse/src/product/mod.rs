//! The product archetypes: rooms that people use.

pub mod booking;
pub mod entity;
pub mod feed;
mod fields;
mod listing;
pub mod relation;
pub mod schedule;
pub mod thread;
pub mod view;
