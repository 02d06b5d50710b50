//! The proof of `projection`.

pub(crate) mod cases;
pub mod endurance;
