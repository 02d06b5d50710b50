//! What only PostgreSQL has to show: the order of its log, row-level security, connections that break around a
//! commit, several processes, deadlocks, its tables. What every engine has to show is in the conformance cases.
//!
//! Needs a server: `STATEHOUSE_TEST_POSTGRES` has to hold the URL that `scripts/postgres start DIR` prints. Without
//! one every test fails. Those of [`pooler`] need a PgBouncer too: `STATEHOUSE_TEST_PGBOUNCER` has to hold the URL that
//! `scripts/pgbouncer start DIR URL` prints.

#![expect(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::indexing_slicing,
    clippy::panic,
    reason = "these are tests, down to their helpers"
)]

mod assumed_absent;
mod claims;
mod compiled;
mod contention;
mod erasure;
mod events;
mod golden;
mod log_order;
mod lookups;
mod migration;
mod multi_reads;
mod pooler;
mod processes;
mod proxy;
mod support;
mod tenancy;
mod tls;
mod unknown;
