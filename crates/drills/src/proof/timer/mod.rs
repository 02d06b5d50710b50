//! The proof of `timer`.

pub(crate) mod cases;
pub(crate) mod drills;
pub(crate) mod workload;
