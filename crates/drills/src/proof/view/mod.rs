//! The proof of `view`.

pub(crate) mod workload;
