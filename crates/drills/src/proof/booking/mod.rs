//! The proof of `booking`.

pub(crate) mod cases;
pub(crate) mod drills;
pub(crate) mod workload;
