//! The proof of `schedule`.

pub(crate) mod cases;
pub(crate) mod workload;
