//! The proof of `sequence`.

pub(crate) mod cases;
pub(crate) mod workload;
