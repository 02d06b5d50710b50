//! Who may read the files: only the user that the process runs as.
#![cfg(unix)]
#![expect(clippy::unwrap_used, reason = "helpers of tests fail by panicking, as tests do")]

use std::fmt::Write as _;
use std::fs::Permissions;
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};

use statehouse_store::{Migrate, Plan, Schema, Step, Store, Table, Tenant, Type};
use statehouse_store_sqlite::{SqliteOptions, SqliteStore, backup};
use tracing::field::{Field, Visit};
use tracing::{Event, Level, Metadata, Subscriber, span};

/// The permission bits of a file.
fn mode(path: &Path) -> u32 {
    std::fs::metadata(path).unwrap().permissions().mode() & 0o777
}

fn beside(path: &Path, end: &str) -> PathBuf {
    let mut name = path.as_os_str().to_owned();
    name.push(end);
    PathBuf::from(name)
}

/// Opens a store and writes a row, so that all of its files exist.
async fn written(path: &Path) -> SqliteStore {
    let store = SqliteStore::open(SqliteOptions::at(path)).await.unwrap();
    let notes = Table::named("notes").partition("id", Type::Int).build().unwrap();
    store.migrate(&Schema::new([notes.clone()]).unwrap(), Migrate::Apply).await.unwrap();
    let plan = Plan::of(&Tenant::new("acme").unwrap(), "op").step(Step::upsert(&notes, [1.into()]));
    store.commit(&plan.build().unwrap()).await.unwrap();
    store
}

#[tokio::test]
async fn new_files_are_for_their_owner_alone() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("house.db");
    let store = written(&path).await;
    for end in ["", "-wal", "-shm"] {
        let file = beside(&path, end);
        assert_eq!(mode(&file), 0o600, "{}: {:o}", file.display(), mode(&file));
    }
    let copy = folder.path().join("copy.db");
    backup(&path, &copy, &mut |_| {}).unwrap();
    assert_eq!(mode(&copy), 0o600, "the backup: {:o}", mode(&copy));
    store.close().await;
}

#[tokio::test]
async fn a_file_that_others_can_read_keeps_its_mode_and_is_reported() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("house.db");
    written(&path).await.close().await;
    let warnings = Warnings::default();
    let guard = tracing::subscriber::set_default(warnings.clone());
    written(&path).await.close().await;
    assert_eq!(warnings.taken(), "", "a file for its owner alone gives no reason to warn");

    std::fs::set_permissions(&path, Permissions::from_mode(0o640)).unwrap();
    written(&path).await.close().await;
    let taken = warnings.taken();
    assert!(taken.contains("house.db") && taken.contains("640") && taken.contains("chmod 600"), "{taken:?}");
    assert_eq!(mode(&path), 0o640, "an operator's choice is not changed");
    drop(guard);
}

/// Keeps the warnings of the current thread.
#[derive(Clone, Default)]
struct Warnings(Arc<Mutex<String>>);

impl Warnings {
    fn taken(&self) -> String {
        std::mem::take(&mut *self.0.lock().unwrap())
    }
}

struct Text<'t>(&'t mut String);

impl Visit for Text<'_> {
    fn record_debug(&mut self, field: &Field, value: &dyn std::fmt::Debug) {
        let _ = write!(self.0, "{field}={value:?} ");
    }
}

impl Subscriber for Warnings {
    fn enabled(&self, metadata: &Metadata<'_>) -> bool {
        *metadata.level() == Level::WARN && metadata.target() == "statehouse::store"
    }
    fn new_span(&self, _: &span::Attributes<'_>) -> span::Id {
        span::Id::from_u64(1)
    }
    fn record(&self, _: &span::Id, _: &span::Record<'_>) {}
    fn record_follows_from(&self, _: &span::Id, _: &span::Id) {}
    fn event(&self, event: &Event<'_>) {
        event.record(&mut Text(&mut self.0.lock().unwrap()));
    }
    fn enter(&self, _: &span::Id) {}
    fn exit(&self, _: &span::Id) {}
}
