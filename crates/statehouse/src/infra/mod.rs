//! The rooms that other rooms stand on, one folder each.

pub mod due;
pub mod effect;
pub mod lease;
pub mod log;
pub mod on;
pub mod projection;
pub mod scan;
pub mod sequence;
pub mod timer;
