//! What the server or the connection said, sorted by what can be done about it.
//!
//! The server's answer to a statement is certain: an error means that its transaction was rolled back. Only the
//! loss of an answer leaves something open, and whether it does depends on what had been sent: see
//! [`crate::writer`].

use statehouse_store::StoreError;
use tokio_postgres::error::{DbError, Severity, SqlState};

use crate::sql::with_source;

/// Why a statement failed.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum Fault {
    /// There is no connection, or it broke, or it was silent for too long, or the server ended it. What was sent may
    /// have been done.
    Lost(String),
    /// Somebody else was there first: deadlock, serialization failure, a row or an operation id that appeared.
    /// Trying again from the start helps.
    Conflict(String),
    /// Somebody else holds a lock for longer than we wait.
    Locked(String),
    /// The prepared statement is not what it was: the table was changed.
    Stale(String),
    /// The server process is not the one that the statement was prepared on, or others prepare statements on it.
    Elsewhere(String),
    /// A table that is not there.
    NoTable(String),
    /// The tables are not what the caller takes them for, or may not be touched.
    Schema(String),
    /// The server cannot work now: out of memory, read-only.
    Busy(String),
    /// The statement cannot be done with these data; a smaller or more exact one may be.
    Data(String),
}

impl Fault {
    /// Sorts an error of the driver.
    pub(crate) fn of(error: &tokio_postgres::Error) -> Fault {
        let Some(answer) = error.as_db_error() else { return Fault::Lost(with_source(error)) };
        let code = answer.code();
        let said = format!("{} ({})", answer.message(), code.code());
        if ends_connection(answer) {
            return Fault::Lost(said);
        }
        match code {
            &SqlState::T_R_DEADLOCK_DETECTED
            | &SqlState::T_R_SERIALIZATION_FAILURE
            | &SqlState::UNIQUE_VIOLATION => Fault::Conflict(said),
            &SqlState::LOCK_NOT_AVAILABLE | &SqlState::QUERY_CANCELED => Fault::Locked(said),
            &SqlState::FEATURE_NOT_SUPPORTED => Fault::Stale(said),
            // The last one: a name that stands for some other statement, with other parameters.
            &SqlState::INVALID_SQL_STATEMENT_NAME
            | &SqlState::DUPLICATE_PSTATEMENT
            | &SqlState::PROTOCOL_VIOLATION => Fault::Elsewhere(said),
            &SqlState::UNDEFINED_TABLE | &SqlState::INVALID_SCHEMA_NAME => Fault::NoTable(said),
            code => match code.code().get(..2).unwrap_or_default() {
                "22" | "23" | "54" => Fault::Data(said),
                "42" | "2B" | "0A" => Fault::Schema(said),
                // Somebody between has lost the server.
                "08" => Fault::Lost(said),
                _ => Fault::Busy(said),
            },
        }
    }

    /// What the server or the driver said.
    pub(crate) fn said(&self) -> &str {
        match self {
            Fault::Lost(said)
            | Fault::Conflict(said)
            | Fault::Locked(said)
            | Fault::Stale(said)
            | Fault::Elsewhere(said)
            | Fault::NoTable(said)
            | Fault::Schema(said)
            | Fault::Busy(said)
            | Fault::Data(said) => said,
        }
    }

    /// Whether the same transaction, run again, can come out otherwise.
    pub(crate) fn is_passing(&self) -> bool {
        matches!(self, Fault::Lost(_) | Fault::Conflict(_) | Fault::Stale(_) | Fault::Elsewhere(_))
    }

    /// The error of a call that did nothing. `tables` are the ones that it named.
    pub(crate) fn into_error(self, tables: &[&str]) -> StoreError {
        match self {
            Fault::NoTable(said) => {
                // The server's message names one of them, or, when the schema is missing, none.
                let named = tables.iter().find(|table| said.contains(&format!("{table}\"")));
                StoreError::no_table(named.or(tables.first()).copied().unwrap_or("statehouse_log"))
            }
            Fault::Schema(said) => {
                let place = if tables.is_empty() {
                    "the store".into()
                } else {
                    format!("table {}", tables.join(", "))
                };
                StoreError::schema(place, said)
            }
            Fault::Data(said) => StoreError::corrupt(format!("table {}", tables.join(", ")), said),
            other => StoreError::unavailable(other.said()),
        }
    }
}

/// Whether the connection ends with this answer, whatever was being done: so says the server, or a pooler that has lost it.
/// Poolers do not always say how severe it is in the word that is the same in every language.
fn ends_connection(answer: &DbError) -> bool {
    match answer.parsed_severity() {
        Some(severity) => matches!(severity, Severity::Fatal | Severity::Panic),
        None => matches!(answer.severity(), "FATAL" | "PANIC"),
    }
}

impl From<&tokio_postgres::Error> for Fault {
    fn from(error: &tokio_postgres::Error) -> Fault {
        Fault::of(error)
    }
}

impl From<tokio_postgres::Error> for Fault {
    fn from(error: tokio_postgres::Error) -> Fault {
        Fault::of(&error)
    }
}
