//! The rooms that other rooms stand on, one folder each.

pub mod due;
pub mod effect;
pub mod lease;
pub mod log;
pub mod projection;
pub mod sequence;
pub mod timer;
