//! The proof of `log`.

pub(crate) mod cases;
