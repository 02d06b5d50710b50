//! Statehouse on DynamoDB.
//!
//! Each table is a table on the server with a prefixed name, readable keys and one attribute per column
//! (`item`, `key`). A plan of one step without a log entry is one conditional request; any other plan is one
//! `TransactWriteItems`. Guards are compiled to condition expressions (`expression`, `conditional`). If the caller
//! needs rows that the server would not return, or if a step has no expression, the rows are read first and written back
//! on the condition that they have not changed (`commit`, `write`).
//!
//! The log has no head item on which all writers would conflict. A plan puts its record among the pending records of a
//! partition, and readers assign the offsets (`record`, `sequencer`, `log_read`).
//!
//! `client` classifies the errors of requests and retries them. `catalog` caches the definitions of the live tables,
//! `migrate` and `backfill` change them.
//!
//! # Properties
//! - `Now` is the caller's clock; [`DynamoOptions::clock_skew`] declares its maximal error.
//! - The outcome of a commit has no position. A repetition and `resolve` return one after a reader of the log has numbered
//!   the record. Records that are read from the log always have one.
//! - A log entry takes two of the hundred items of a transaction.
//! - A row that logged plans wrote stays as a tombstone for a quarter of an hour after its deletion. Range reads
//!   skip such tombstones. Rows that no logged plan wrote are deleted without a tombstone.
//! - Reads of an index are eventually consistent. A scan of one tenant's rows reads the whole table.

mod backfill;
mod blank;
mod catalog;
mod client;
mod commit;
mod conditional;
mod explain;
mod expression;
mod inner;
mod item;
mod item_write;
mod key;
mod log_read;
mod migrate;
mod options;
mod read;
mod record;
mod request_error;
mod sequencer;
mod stamps;
mod store;
mod write;

pub use options::{Billing, Credentials, DynamoOptions};
pub use store::{DynamoStore, explain};
