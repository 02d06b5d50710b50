//! The proof of `effect`.

pub(crate) mod cases;
