//! The proof of `lease`.

pub(crate) mod cases;
pub(crate) mod drills;
pub(crate) mod workload;
