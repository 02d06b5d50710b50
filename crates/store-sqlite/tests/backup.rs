//! A copy that is made while others write is of one moment, and a file that is left alone for a while has everything.

#![expect(clippy::unwrap_used, reason = "helpers of tests fail by panicking, as tests do")]

use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use statehouse_store::{
    Address, Clock, Consistency, Entry, EventTemplate, Migrate, Plan, Scan, Schema, Step, Store, SystemClock,
    Table, Tenant, Type,
};
use statehouse_store_sqlite::{BackupProgress, SqliteOptions, SqliteStore, backup};

fn counters() -> Arc<Table> {
    Table::named("counters")
        .partition("id", Type::Int)
        .required("n", Type::Int)
        .optional("filling", Type::Text)
        .build()
        .unwrap()
}

fn acme() -> Tenant {
    Tenant::new("acme").unwrap()
}

async fn open(path: &Path) -> SqliteStore {
    let store = SqliteStore::open(SqliteOptions::at(path)).await.unwrap();
    store.migrate(&Schema::new([counters()]).unwrap(), Migrate::Apply).await.unwrap();
    store
}

/// Two counters that go up together, and what makes the file large.
async fn write(store: &SqliteStore, writer: i64, round: i64) {
    let table = counters();
    let count = |id: i64| {
        let step = Step::upsert(&table, [id.into()]);
        step.set("n", statehouse_store::Operand::Coalesce("n".into(), 0.into()).add(1))
    };
    let filling = Step::upsert(&table, [(1_000 + 1_000 * writer + round % 900).into()])
        .set("n", round)
        .set("filling", "x".repeat(2_000).as_str());
    let entry = Entry::about("counter", "1").event(EventTemplate::named("counter.up"));
    let plan = Plan::of(&acme(), format!("{writer}-{round}"))
        .steps([count(1), count(2), filling])
        .log(entry)
        .without_rows()
        .build()
        .unwrap();
    store.commit(&plan).await.unwrap();
}

async fn count(store: &SqliteStore, id: i64) -> i64 {
    let address = Address::new(&counters(), &acme(), [id.into()]).unwrap();
    let rows = store.get(&[address], Consistency::Strong).await.unwrap();
    rows.first().and_then(Option::as_ref).and_then(|row| row.int("n")).unwrap_or(0)
}

#[tokio::test(flavor = "multi_thread")]
async fn a_copy_is_of_one_moment_beside_writers() {
    let folder = tempfile::tempdir().unwrap();
    let (path, copy) = (folder.path().join("house.db"), folder.path().join("copy.db"));
    let store = Arc::new(open(&path).await);
    let goes_on = Arc::new(AtomicBool::new(true));
    let writers: Vec<_> = (0..4)
        .map(|writer| {
            let (store, goes_on) = (store.clone(), goes_on.clone());
            tokio::spawn(async move {
                let mut round = 0;
                while goes_on.load(Ordering::Relaxed) {
                    write(&store, writer, round).await;
                    round += 1;
                }
            })
        })
        .collect();
    while count(&store, 1).await < 800 {
        SystemClock.sleep(Duration::from_millis(10)).await;
    }
    let before = count(&store, 1).await;
    let (from, to) = (path.clone(), copy.clone());
    let made = tokio::task::spawn_blocking(move || {
        let mut steps = Vec::new();
        let made = backup(&from, &to, &mut |step: BackupProgress| {
            // Others write between any two steps.
            std::thread::park_timeout(Duration::from_millis(20));
            steps.push(step);
        });
        (made.unwrap(), steps)
    });
    let (made, steps) = made.await.unwrap();
    let after = count(&store, 1).await;
    goes_on.store(false, Ordering::Relaxed);
    for writer in writers {
        writer.await.unwrap();
    }
    assert!(steps.len() > 1 && steps.last().is_some_and(|last| last.copied == last.pages), "{steps:?}");
    assert_eq!(made.bytes, std::fs::metadata(&copy).unwrap().len());
    let copied = open(&copy).await;
    let (one, two) = (count(&copied, 1).await, count(&copied, 2).await);
    assert_eq!(one, two, "the copy has half of a plan");
    assert!(before <= one && one < after, "{before} <= {one} < {after}");
    let heads = copied.wait_log(&[], Duration::ZERO).await.unwrap();
    assert_eq!(heads.iter().sum::<u64>(), u64::try_from(one).unwrap(), "rows and log are of two moments");
    // It is a store like any other.
    write(&copied, 9, 1).await;
    assert_eq!(count(&copied, 1).await, one + 1);
    copied.close().await;
    store.close().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn the_file_alone_has_everything_after_a_while() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("house.db");
    let store = open(&path).await;
    // The tables are there soon, without anything being written.
    let schema = Schema::new([counters()]).unwrap();
    let lacks =
        async |copied: &SqliteStore| !copied.migrate(&schema, Migrate::Show).await.unwrap().is_empty();
    let mut attempts = 0;
    while copied_alone(&folder, &path, lacks).await {
        attempts += 1;
        assert!(attempts < 100, "the tables are still only in the write-ahead log");
    }
    write(&store, 0, 0).await;
    let rows =
        async |copied: &SqliteStore| copied.scan(&Scan::of(&counters(), &acme())).await.unwrap().rows.len();
    let mut attempts = 0;
    while copied_alone(&folder, &path, rows).await < 3 {
        attempts += 1;
        assert!(attempts < 100, "what was committed is still only in the write-ahead log");
    }
    store.close().await;
}

/// Copies the file alone, as an operator would who does not know better, and looks at the copy.
async fn copied_alone<T>(
    folder: &tempfile::TempDir,
    path: &Path,
    look: impl AsyncFn(&SqliteStore) -> T,
) -> T {
    SystemClock.sleep(Duration::from_millis(100)).await;
    let copy = folder.path().join("alone.db");
    std::fs::copy(path, &copy).unwrap();
    let copied = SqliteStore::open(SqliteOptions::at(&copy)).await.unwrap();
    let seen = look(&copied).await;
    copied.close().await;
    seen
}
