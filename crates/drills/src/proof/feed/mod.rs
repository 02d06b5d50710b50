//! The proof of `feed`.

pub(crate) mod cases;
