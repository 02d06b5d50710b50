//! Maps SQLite's errors to errors of the store.

use std::path::Path;

use rusqlite::ErrorCode;
use statehouse_store::StoreError;

/// The error of calls on a closed store.
pub(crate) fn closed() -> StoreError {
    StoreError::unavailable("the store was closed")
}

/// The error of a statement that was not a commit: nothing has become durable.
pub(crate) fn from_sqlite(path: &Path, error: &rusqlite::Error) -> StoreError {
    let file = path.display();
    let Some(code) = error.sqlite_error_code() else {
        return StoreError::corrupt(file.to_string(), error.to_string());
    };
    match code {
        ErrorCode::DatabaseCorrupt => {
            StoreError::corrupt(file.to_string(), format!("{error}; restore it from a backup"))
        }
        ErrorCode::NotADatabase => StoreError::corrupt(file.to_string(), "it is not an SQLite database"),
        ErrorCode::DiskFull => {
            StoreError::unavailable(format!("no space left for {file}; make room and retry"))
        }
        ErrorCode::ReadOnly => {
            StoreError::unavailable(format!("{file} or its folder is read-only; make both writable"))
        }
        ErrorCode::DatabaseBusy | ErrorCode::DatabaseLocked => {
            StoreError::unavailable(format!("{file} is locked by another process; stop it or wait for it"))
        }
        ErrorCode::CannotOpen => StoreError::unavailable(format!(
            "{file} cannot be opened; check that its folder exists and that both can be read and written"
        )),
        ErrorCode::PermissionDenied => StoreError::unavailable(format!("no permission to use {file}")),
        ErrorCode::SystemIoFailure => {
            StoreError::unavailable(format!("the disk under {file} failed: {error}"))
        }
        ErrorCode::OutOfMemory => StoreError::unavailable("out of memory"),
        ErrorCode::TooBig => StoreError::unavailable(format!("a value is too large for {file}: {error}")),
        // All other errors concern the statement: its tables or columns differ from the plan's table.
        _ => StoreError::schema(file.to_string(), error.to_string()),
    }
}

/// Whether an error concerns the file as a whole, and not the one plan that met it.
pub(crate) fn is_global(error: &StoreError) -> bool {
    matches!(error, StoreError::Unavailable { .. } | StoreError::Corrupt { .. })
}
