//! Errors of the server and of the connection, classified by how to react to them.
//!
//! The server's answer to a statement is certain: an error means that its transaction was rolled back. Only a lost answer leaves an
//! outcome open, and that depends on what had been sent ([`crate::writer`]).

use statehouse_store::{Bug, StoreError};
use tokio_postgres::error::{DbError, Severity, SqlState};

use crate::sql::with_source;

/// Why a statement failed.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum PostgresFault {
    /// The connection could not be made, broke, timed out or was closed by the server. Statements that were sent may have been
    /// executed.
    Lost(String),
    /// A conflict with another transaction: deadlock, serialization failure, a row or an operation id that was inserted
    /// meanwhile. A retry of the whole transaction helps.
    Conflict(String),
    /// Another transaction holds a lock for longer than the lock timeout.
    Locked(String),
    /// The prepared statement is outdated: the table was changed.
    Stale(String),
    /// The server process is not the one that the statement was prepared on, or other clients prepare statements on it.
    Elsewhere(String),
    /// The table does not exist.
    NoTable(String),
    /// The tables differ from the caller's definitions, or the role has no permission.
    Schema(String),
    /// The server cannot work now: out of memory, read-only.
    Busy(String),
    /// The statement fails with these values. A smaller one may succeed.
    Data(String),
    /// A case that the code rules out.
    Bug(Bug),
}

impl PostgresFault {
    /// Classifies an error of the driver.
    pub(crate) fn of(error: &tokio_postgres::Error) -> PostgresFault {
        let Some(answer) = error.as_db_error() else { return PostgresFault::Lost(with_source(error)) };
        let code = answer.code();
        let said = format!("{} ({})", answer.message(), code.code());
        if ends_connection(answer) {
            return PostgresFault::Lost(said);
        }
        match code {
            &SqlState::T_R_DEADLOCK_DETECTED
            | &SqlState::T_R_SERIALIZATION_FAILURE
            | &SqlState::UNIQUE_VIOLATION => PostgresFault::Conflict(said),
            &SqlState::LOCK_NOT_AVAILABLE | &SqlState::QUERY_CANCELED => PostgresFault::Locked(said),
            &SqlState::FEATURE_NOT_SUPPORTED => PostgresFault::Stale(said),
            // A protocol violation means that the name belongs to another statement, with other parameters.
            &SqlState::INVALID_SQL_STATEMENT_NAME
            | &SqlState::DUPLICATE_PSTATEMENT
            | &SqlState::PROTOCOL_VIOLATION => PostgresFault::Elsewhere(said),
            &SqlState::UNDEFINED_TABLE | &SqlState::INVALID_SCHEMA_NAME => PostgresFault::NoTable(said),
            code => match code.code().get(..2).unwrap_or_default() {
                "22" | "23" | "54" => PostgresFault::Data(said),
                "42" | "2B" | "0A" => PostgresFault::Schema(said),
                // A pooler has lost its connection to the server.
                "08" => PostgresFault::Lost(said),
                _ => PostgresFault::Busy(said),
            },
        }
    }

    /// The message of the server or the driver.
    pub(crate) fn said(&self) -> &str {
        match self {
            PostgresFault::Lost(said)
            | PostgresFault::Conflict(said)
            | PostgresFault::Locked(said)
            | PostgresFault::Stale(said)
            | PostgresFault::Elsewhere(said)
            | PostgresFault::NoTable(said)
            | PostgresFault::Schema(said)
            | PostgresFault::Busy(said)
            | PostgresFault::Data(said) => said,
            PostgresFault::Bug(bug) => bug.message(),
        }
    }

    /// Whether a retry of the same transaction can succeed.
    pub(crate) fn is_passing(&self) -> bool {
        matches!(
            self,
            PostgresFault::Lost(_)
                | PostgresFault::Conflict(_)
                | PostgresFault::Stale(_)
                | PostgresFault::Elsewhere(_)
        )
    }

    /// The error of a call that had no effect. `tables` are the ones that it named.
    pub(crate) fn into_error(self, tables: &[&str]) -> StoreError {
        match self {
            PostgresFault::NoTable(said) => {
                // The server's message names one of them, or, when the schema is missing, none.
                let named = tables.iter().find(|table| said.contains(&format!("{table}\"")));
                StoreError::no_table(named.or(tables.first()).copied().unwrap_or("statehouse_log"))
            }
            PostgresFault::Schema(said) => {
                let place = if tables.is_empty() {
                    "the store".into()
                } else {
                    format!("table {}", tables.join(", "))
                };
                StoreError::schema(place, said)
            }
            PostgresFault::Data(said) => StoreError::corrupt(format!("table {}", tables.join(", ")), said),
            PostgresFault::Bug(bug) => bug.into(),
            other => StoreError::unavailable(other.said()),
        }
    }
}

/// Whether the connection ends with this answer, of the server or of a pooler that has lost the server. Poolers do not always send
/// the severity that is not translated.
fn ends_connection(answer: &DbError) -> bool {
    match answer.parsed_severity() {
        Some(severity) => matches!(severity, Severity::Fatal | Severity::Panic),
        None => matches!(answer.severity(), "FATAL" | "PANIC"),
    }
}

impl From<&tokio_postgres::Error> for PostgresFault {
    fn from(error: &tokio_postgres::Error) -> PostgresFault {
        PostgresFault::of(error)
    }
}

impl From<tokio_postgres::Error> for PostgresFault {
    fn from(error: tokio_postgres::Error) -> PostgresFault {
        PostgresFault::of(&error)
    }
}
