//! The product archetypes: rooms that people use.

pub mod auction;
pub mod booking;
pub mod entity;
pub mod feed;
mod fields;
pub mod inventory;
mod listing;
pub mod payment;
pub mod relation;
pub mod schedule;
pub mod thread;
pub mod view;
pub mod workflow;
