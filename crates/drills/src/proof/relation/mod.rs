//! The proof of `relation`.

pub(crate) mod cases;
pub(crate) mod workload;
