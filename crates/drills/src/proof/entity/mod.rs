//! The proof of `entity`.

pub(crate) mod cases;
pub(crate) mod drills;
pub(crate) mod workload;
