//! Permissions of the store's files.
//!
//! - P1. A new database is readable and writable by its owner alone. *The file is created with mode 0600 before SQLite opens
//!   it; SQLite gives the `-wal` and `-shm` files the mode of the database.*
//! - P2. The mode of an existing file is never changed. An operator may have a reason for it. Opening a store whose files other
//!   users can read or write logs a warning for each.
//!
//! Other systems than Unix have no such modes; there the folder decides who can read the files.

use std::path::{Path, PathBuf};

/// What SQLite appends to the name of the database for its other files.
const FILES: [&str; 3] = ["", "-wal", "-shm"];

/// Creates an empty file with mode 0600 unless the file exists. Errors are left to SQLite, which meets and reports them when it
/// opens the file.
///
/// The file is created exclusively: opening and closing an existing file would release the locks that other SQLite connections
/// of this process hold on it.
#[cfg(unix)]
pub(crate) fn create_private(path: &Path) {
    use std::os::unix::fs::OpenOptionsExt as _;
    drop(std::fs::OpenOptions::new().write(true).create_new(true).mode(0o600).open(path));
}

#[cfg(not(unix))]
pub(crate) fn create_private(_: &Path) {}

/// Logs a warning for each file of the store that other users can read or write (P2).
pub(crate) fn warn_if_shared(path: &Path) {
    for (file, mode) in FILES.iter().filter_map(|end| shared(path, end)) {
        let file = file.display();
        tracing::warn!(
            target: "statehouse::store",
            "{file} has mode {mode:o}, so other users of this machine can use it; run `chmod 600 {file}`"
        );
    }
}

/// A file of the store and its mode, if the group or others may read or write it.
#[cfg(unix)]
fn shared(path: &Path, end: &str) -> Option<(PathBuf, u32)> {
    use std::os::unix::fs::PermissionsExt as _;
    let mut name = path.as_os_str().to_owned();
    name.push(end);
    let file = PathBuf::from(name);
    let mode = std::fs::metadata(&file).ok()?.permissions().mode() & 0o777;
    (mode & 0o066 != 0).then_some((file, mode))
}

#[cfg(not(unix))]
fn shared(_: &Path, _: &str) -> Option<(PathBuf, u32)> {
    None
}
