//! A consistent copy of a live file.
//!
//! SQLite's backup interface makes the copy under one read transaction. So the copy has everything that was committed before it
//! began and nothing that any process committed later, and writers do not wait for it. It gets its final name only when it is
//! complete, checked and durable.

use std::path::{Path, PathBuf};
use std::thread;
use std::time::Duration;

use rusqlite::backup::{Backup, StepResult};
use rusqlite::{Connection, MAIN_DB, OpenFlags};
use statehouse_store::StoreError;

use crate::fault;
use crate::layout::{APPLICATION_ID, synchronize_folder};
use crate::permissions::create_private;

/// Pages that are copied between two reports of progress.
const STEP_PAGES: i32 = 256;
/// How long the backup waits for a lock of another connection.
const BUSY: Duration = Duration::from_secs(5);

/// How far a backup has got.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BackupProgress {
    /// Pages that are copied.
    pub copied: u64,
    /// All pages.
    pub pages: u64,
}

/// A backup that was made.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct BackupFile {
    /// Where it is.
    pub path: PathBuf,
    /// How large it is.
    pub bytes: u64,
}

/// Copies a store's file, which may be in use, to a file that must not exist. Blocks until it is done.
pub fn backup(
    from: &Path,
    to: &Path,
    progress: &mut dyn FnMut(BackupProgress),
) -> Result<BackupFile, StoreError> {
    if to.exists() {
        let why = "it exists already; name a file that does not, or remove it";
        return Err(StoreError::unavailable(format!("{}: {why}", to.display())));
    }
    let source = open_source(from)?;
    let partial = partial_of(to);
    forget(&partial);
    let copied =
        copy(&source, &partial, progress).and_then(|()| check(&partial)).and_then(|()| keep(&partial, to));
    if copied.is_err() {
        forget(&partial);
    }
    let bytes = copied?;
    Ok(BackupFile { path: to.to_owned(), bytes })
}

/// Where the copy is until it is complete.
fn partial_of(to: &Path) -> PathBuf {
    let mut name = to.as_os_str().to_owned();
    name.push(".partial");
    PathBuf::from(name)
}

/// Removes an unfinished copy, if there is one.
fn forget(partial: &Path) {
    for end in ["", "-journal", "-wal", "-shm"] {
        let mut name = partial.as_os_str().to_owned();
        name.push(end);
        // A file that cannot be removed is reported when the copy is made.
        let _ = std::fs::remove_file(PathBuf::from(name));
    }
}

/// Opens a store's file for reading. Refuses files of other programs.
fn open_source(from: &Path) -> Result<Connection, StoreError> {
    let fail = |error: rusqlite::Error| fault::from_sqlite(from, &error);
    if !from.exists() {
        return Err(StoreError::unavailable(format!("there is no file {}", from.display())));
    }
    let flags = OpenFlags::SQLITE_OPEN_READ_ONLY | OpenFlags::SQLITE_OPEN_NO_MUTEX;
    let source = Connection::open_with_flags(from, flags).map_err(fail)?;
    source.busy_timeout(BUSY).map_err(fail)?;
    let application: i64 = source.query_row("PRAGMA application_id", [], |row| row.get(0)).map_err(fail)?;
    if application != APPLICATION_ID {
        let why = "it holds no Statehouse store, so there is nothing to back up";
        return Err(StoreError::schema(from.display().to_string(), why));
    }
    // The snapshot of the backup: everything is read in this transaction.
    source.execute_batch("BEGIN").map_err(fail)?;
    source.query_row("SELECT count(*) FROM sqlite_schema", [], |_| Ok(())).map_err(fail)?;
    Ok(source)
}

fn copy(
    source: &Connection,
    partial: &Path,
    progress: &mut dyn FnMut(BackupProgress),
) -> Result<(), StoreError> {
    let fail = |error: rusqlite::Error| fault::from_sqlite(partial, &error);
    create_private(partial);
    let mut target = Connection::open(partial).map_err(fail)?;
    target.busy_timeout(BUSY).map_err(fail)?;
    let backup = Backup::new_with_names(source, MAIN_DB, &mut target, MAIN_DB).map_err(fail)?;
    loop {
        let step = backup.step(STEP_PAGES).map_err(fail)?;
        let seen = backup.progress();
        // SQLite counts pages in an int that is never negative.
        let (pages, left) = (seen.pagecount.unsigned_abs().into(), seen.remaining.unsigned_abs().into());
        progress(BackupProgress { copied: u64::saturating_sub(pages, left), pages });
        match step {
            StepResult::Done => return Ok(()),
            // No other process uses the copy, and the source is read from a snapshot, so a retry succeeds.
            StepResult::Busy | StepResult::Locked => thread::park_timeout(Duration::from_millis(10)),
            _ => {}
        }
    }
}

/// Runs SQLite's integrity check on the whole copy.
fn check(partial: &Path) -> Result<(), StoreError> {
    let fail = |error: rusqlite::Error| fault::from_sqlite(partial, &error);
    let copy = Connection::open(partial).map_err(fail)?;
    // The copy is one file, and stays so when it is read. A store that opens it has its write-ahead log again.
    copy.query_row("PRAGMA journal_mode = DELETE", [], |_| Ok(())).map_err(fail)?;
    let found: String = copy.query_row("PRAGMA quick_check(1)", [], |row| row.get(0)).map_err(fail)?;
    if found != "ok" {
        return Err(StoreError::corrupt(partial.display().to_string(), found));
    }
    copy.close().map_err(|(_, error)| fail(error))
}

/// Gives the copy its name, durably. Returns how large it is.
fn keep(partial: &Path, to: &Path) -> Result<u64, StoreError> {
    let fail = |error: std::io::Error| StoreError::unavailable(format!("{}: {error}", to.display()));
    let file = std::fs::File::open(partial).map_err(fail)?;
    file.sync_all().map_err(fail)?;
    let bytes = file.metadata().map_err(fail)?.len();
    std::fs::rename(partial, to).map_err(fail)?;
    synchronize_folder(to)?;
    Ok(bytes)
}
