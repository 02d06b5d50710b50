//! The store against two servers, and against what servers and networks do that neither of them does by itself.
//!
//! What every store must do is in the conformance cases; here is what is special to this one.

#![expect(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    clippy::indexing_slicing,
    reason = "the exemption for tests does not reach the functions that tests share"
)]

mod common;
mod explain;
mod failures;
mod order;
mod requests;
