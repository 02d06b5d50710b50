//! The proof of `thread`.

pub(crate) mod cases;
