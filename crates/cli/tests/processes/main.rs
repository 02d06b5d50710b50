//! What only processes can show: servers that share a store and are killed or paused, and workers beside them.
//!
//! Needs a PostgreSQL server (`STATEHOUSE_TEST_POSTGRES`), `python3` and `node`. Without one of them tests fail.

#![expect(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    clippy::indexing_slicing,
    clippy::disallowed_methods,
    reason = "helpers of tests fail by panicking, as tests do, and wait for processes that have a clock of their own"
)]

mod feeds;
mod races;
mod served;
mod sharing;
mod systems;
mod versions;
mod workers;
