//! What can go wrong, apart from a refused guard, which is a value ([`crate::outcome::Commit::Refused`]).

use crate::bug::Bug;
use crate::value::BadValue;

/// A store could not do what was asked, or cannot say whether it did. Closed: there is no `Other`.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum StoreError {
    /// Nothing was done. The same call may succeed later.
    #[error("the store is unavailable, and nothing was done: {why}")]
    Unavailable {
        /// What the engine said, and where.
        why: String,
    },
    /// The plan may have been applied, may not have been, or may still be in flight. Commit the same plan again
    /// under the same operation id, or call [`crate::Store::resolve`]; a read does not answer the question.
    #[error("it is not known whether operation {operation} was applied: {why}")]
    OutcomeUnknown {
        /// The plan's operation id.
        operation: String,
        /// What the engine said.
        why: String,
    },
    /// Nothing was done, because the result would be larger than every engine can hold.
    #[error("{what} would have {actual} bytes; the limit is {limit}")]
    LimitExceeded {
        /// What is too large, by name.
        what: String,
        /// The limit in bytes.
        limit: usize,
        /// What it would have been.
        actual: usize,
    },
    /// What is stored cannot be what this store wrote.
    #[error("{place} is corrupt: {why}")]
    Corrupt {
        /// The file, table or row.
        place: String,
        /// What was found.
        why: String,
    },
    /// The program is wrong ([`crate::bug!`]). A commit that returns this has not applied the plan.
    #[error(transparent)]
    Bug(#[from] Bug),
    /// The live tables are not the ones that the caller works with. Nothing was done.
    #[error("{place} does not fit this schema: {why}")]
    Schema {
        /// The file, table or column.
        place: String,
        /// What differs and what to do.
        why: String,
    },
}

impl StoreError {
    /// Shorthand for [`StoreError::Unavailable`].
    pub fn unavailable(why: impl Into<String>) -> StoreError {
        StoreError::Unavailable { why: why.into() }
    }

    /// Shorthand for [`StoreError::OutcomeUnknown`].
    pub fn unknown(operation: impl Into<String>, why: impl Into<String>) -> StoreError {
        StoreError::OutcomeUnknown { operation: operation.into(), why: why.into() }
    }

    /// Shorthand for [`StoreError::Corrupt`].
    pub fn corrupt(place: impl Into<String>, why: impl Into<String>) -> StoreError {
        StoreError::Corrupt { place: place.into(), why: why.into() }
    }

    /// Shorthand for [`StoreError::Schema`].
    pub fn schema(place: impl Into<String>, why: impl Into<String>) -> StoreError {
        StoreError::Schema { place: place.into(), why: why.into() }
    }

    /// The error for a log partition that the store does not have.
    pub fn no_partition(partition: u32, partitions: usize) -> StoreError {
        StoreError::schema(
            format!("log partition {partition}"),
            format!("the log has {partitions} partitions"),
        )
    }

    /// The error for a table that was not migrated to.
    pub fn no_table(table: &str) -> StoreError {
        StoreError::schema(
            format!("table {table}"),
            "it is not in this store; migrate to a schema that has it",
        )
    }

    /// Whether trying again, as it is, can help.
    pub fn is_transient(&self) -> bool {
        matches!(self, StoreError::Unavailable { .. } | StoreError::OutcomeUnknown { .. })
    }
}

/// A table's declaration is wrong.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("table {table}: {why}")]
pub struct SchemaError {
    /// The table.
    pub table: String,
    /// What is wrong with it.
    pub why: String,
}

/// A plan or a read that cannot be built. Nothing has been sent when this is returned.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum PlanError {
    /// The table has no column of that name.
    #[error("table {table} has no column {column}; it has {known}")]
    UnknownColumn {
        /// The table.
        table: String,
        /// The name that was given.
        column: String,
        /// The names that it could have been.
        known: String,
    },
    /// The table has no index of that name.
    #[error("table {table} has no index {index}")]
    UnknownIndex {
        /// The table.
        table: String,
        /// The name that was given.
        index: String,
    },
    /// The index holds the rows of all tenants and was read for one of them, or the other way round.
    #[error("index {index} of table {table} {why}")]
    IndexReach {
        /// The table.
        table: String,
        /// The index.
        index: String,
        /// What it is, and how it is read.
        why: &'static str,
    },
    /// The key has too few or too many parts.
    #[error("a key of table {table} has {expected} ({names}); {given} given")]
    KeyParts {
        /// The table.
        table: String,
        /// How many parts it takes, in words.
        expected: String,
        /// Their names.
        names: String,
        /// How many were given.
        given: usize,
    },
    /// A value cannot stand where it was put.
    #[error("{table}.{column}: {why}")]
    BadValue {
        /// The table.
        table: String,
        /// The column.
        column: String,
        /// Why not.
        why: BadValue,
    },
    /// A required column, or a part of a key, would be null.
    #[error("{table}.{column} is required and cannot be null")]
    Required {
        /// The table.
        table: String,
        /// The column.
        column: String,
    },
    /// An expression's type does not fit.
    #[error("{table}: `{expression}` {why}")]
    Mistyped {
        /// The table.
        table: String,
        /// The guard or assignment.
        expression: String,
        /// What does not fit, and what to write instead.
        why: String,
    },
    /// A column is assigned that may not be, or twice.
    #[error("{table}.{column} cannot be assigned: {why}")]
    Unassignable {
        /// The table.
        table: String,
        /// The column.
        column: String,
        /// Why not.
        why: &'static str,
    },
    /// Two steps name one row.
    #[error("steps {first} and {second} both name the row {row}; merge them into one")]
    RowTwice {
        /// The row.
        row: String,
        /// The earlier step, from 0.
        first: usize,
        /// The later step, from 0.
        second: usize,
    },
    /// A number is over its limit.
    #[error("{what}: {actual}; the limit is {limit}")]
    Limit {
        /// What is limited.
        what: String,
        /// The limit.
        limit: usize,
        /// What was given.
        actual: usize,
    },
    /// The plan does nothing.
    #[error("the plan has no steps and no log entry")]
    Empty,
    /// A name (tenant, operation, resource, event) is not acceptable.
    #[error("{what} {given:?} is not acceptable: {why}")]
    BadName {
        /// What it would name.
        what: &'static str,
        /// What was given.
        given: String,
        /// What is allowed.
        why: &'static str,
    },
    /// An event refers to a step that the plan does not have, or that writes nothing.
    #[error("event {event} takes the row of step {step}, and the plan has no writing step of that number")]
    NoSuchStep {
        /// The event.
        event: String,
        /// The step it names.
        step: usize,
    },
    /// The cursor does not belong to this read.
    #[error("the cursor does not belong to this read: {why}")]
    BadCursor {
        /// What does not fit.
        why: String,
    },
    /// The segment does not belong to this scan.
    #[error("the segment does not belong to this scan: {why}")]
    BadSegment {
        /// What does not fit.
        why: String,
    },
}
