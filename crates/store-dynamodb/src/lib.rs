//! Statehouse on DynamoDB.
//!
//! Each table is a table on the server, named by a prefix, with keys and attributes that people can read
//! (`item`, `key`). A plan of one step without a log entry is one conditional request; any other is one
//! `TransactWriteItems`, with guards compiled to condition expressions (`expression`, `blind`). Where the caller
//! needs rows that the server would not return, or a step cannot be said in an expression, the rows are read first and
//! written back on the condition that they have not changed (`commit`, `write`).
//!
//! The log has no head item that all writers would meet at. A plan leaves its record among the pending ones of a
//! partition, and readers give out the offsets (`record`, `sequencer`, `journal`).
//!
//! What the server may do to a request, and what that means, is in `wire`; what the processes that share a
//! store know of its tables is in `catalog`, and how those change in `migrate`.
//!
//! # What to know before choosing it
//! - `Now` is the caller's clock; [`Options::clock_skew`] declares how wrong it may be.
//! - The answer to a commit has no position; a repetition and `resolve` have one as soon as a reader of the log numbered
//!   the record, and the log always has.
//! - A log entry takes two of the hundred items of a transaction.
//! - A row that logged plans wrote stays as a tombstone for a quarter of an hour after its deletion, so a range in which
//!   such rows come and go reads past them. Rows that no logged plan wrote are deleted outright.
//! - Reads of an index are eventual, and a walk over one tenant's rows pays for the whole table.

mod action;
mod blind;
mod catalog;
mod commit;
mod explain;
mod expression;
mod inner;
mod item;
mod journal;
mod key;
mod migrate;
mod options;
mod read;
mod record;
mod sequencer;
mod stamp;
mod store;
mod wire;
mod write;

pub use options::{Billing, Credentials, Options};
pub use store::{DynamoStore, explain};
