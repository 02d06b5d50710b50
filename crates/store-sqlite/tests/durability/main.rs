//! Power cuts, full disks, dying disks, read-only, locked and foreign files.
//!
//! Killing a process does not test durability: the operating system keeps what the process wrote. These tests lose
//! what was not synchronized, at the layer below SQLite, and the control shows that they would notice.

#![expect(
    clippy::unwrap_used,
    clippy::indexing_slicing,
    reason = "helpers of tests fail by panicking, as tests do"
)]

mod crash_vfs;

use std::collections::{BTreeMap, HashSet};
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use crash_vfs::{CrashVfs, Image};
use statehouse_store::guard::column;
use statehouse_store::{
    Commit, Consistency, Entry, EventTemplate, Migrate, Plan, Random, Resolution, Scan, Schema, Step, Store,
    StoreError, Table, Tenant, Type,
};
use statehouse_store_sqlite::{SqliteOptions, SqliteStore};

const FILE: &str = "house.db";

fn counters() -> Arc<Table> {
    Table::named("counters")
        .partition("id", Type::Int)
        .defaulted("n", Type::Int, 0)
        .optional("filler", Type::Text)
        .build()
        .unwrap()
}

fn tenant() -> Tenant {
    Tenant::new("acme").unwrap()
}

/// Adds one to two counters, so that half a plan would show.
fn increment(table: &Arc<Table>, operation: &str, pair: i64, filler: usize) -> Plan {
    let step = |id: i64| {
        Step::upsert(table, [id.into()])
            .set("n", statehouse_store::Operand::Coalesce("n".into(), 0.into()).add(1))
            .set("filler", "x".repeat(filler))
    };
    Plan::of(&tenant(), operation)
        .step(step(pair * 2))
        .step(step(pair * 2 + 1))
        .log(
            Entry::about("counter", pair.to_string())
                .event(EventTemplate::named("incremented").with_row_of(0)),
        )
        .build()
        .unwrap()
}

async fn open(options: SqliteOptions) -> Result<SqliteStore, StoreError> {
    let store = SqliteStore::open(options).await?;
    store.migrate(&Schema::new([counters()]).unwrap(), Migrate::Apply).await?;
    Ok(store)
}

/// Lets several callers write while power is cut again and again. Returns the images.
async fn run_under_cuts(name: &str, seed: u64, synchronous: bool, plans: u64) -> Vec<Image> {
    let folder = tempfile::tempdir().unwrap();
    let vfs = Arc::new(CrashVfs::register(name, seed, 40));
    let options = SqliteOptions {
        vfs: Some(vfs.name()),
        synchronous,
        batch: 8,
        ..SqliteOptions::at(folder.path().join(FILE))
    };
    let store = Arc::new(open(options).await.unwrap());
    let tasks: Vec<_> = (0..6_u64)
        .map(|caller| {
            let (store, vfs) = (store.clone(), vfs.clone());
            tokio::spawn(async move {
                let (table, mut random) = (counters(), Random::seeded(seed ^ (caller << 32)));
                for number in 0..plans {
                    let operation = format!("{caller}-{number}");
                    let filler = random.below(3000) as usize;
                    let plan = increment(&table, &operation, random.below(5) as i64, filler);
                    if let Commit::Applied(_) = store.commit(&plan).await.unwrap() {
                        vfs.acknowledge(&operation);
                    }
                }
            })
        })
        .collect();
    for task in tasks {
        task.await.unwrap();
    }
    store.close().await;
    vfs.take_images()
}

/// What is wrong with an image: nothing, if everything that was acknowledged is there and fits together.
async fn fault_of(image: &Image) -> Option<String> {
    let folder = tempfile::tempdir().unwrap();
    let path = image.restore(folder.path(), FILE);
    let store = match open(SqliteOptions::at(&path)).await {
        Ok(store) => store,
        Err(error) => return Some(format!("it does not open: {error}")),
    };
    let mut operations = HashSet::new();
    let mut logged: BTreeMap<i64, i64> = BTreeMap::new();
    for partition in 0..store.partitions() {
        let page = match store.read_log(partition, 0, 1000).await {
            Ok(page) => page,
            Err(error) => return Some(format!("the log cannot be read: {error}")),
        };
        for (number, record) in page.records.iter().enumerate() {
            if record.position.unwrap().offset != number as u64 + 1 {
                return Some(format!("partition {partition} has a gap at {number}"));
            }
            operations.insert(record.operation.clone());
            let pair: i64 = record.key.parse().unwrap();
            *logged.entry(pair * 2).or_default() += 1;
            *logged.entry(pair * 2 + 1).or_default() += 1;
        }
    }
    if let Some(lost) = image.acknowledged.iter().find(|operation| !operations.contains(*operation)) {
        return Some(format!("operation {lost} was acknowledged and is lost"));
    }
    let page = match store.scan(&Scan::all(&counters())).await {
        Ok(page) => page,
        Err(error) => return Some(format!("the rows cannot be read: {error}")),
    };
    let rows: BTreeMap<i64, i64> =
        page.rows.iter().map(|row| (row.int("id").unwrap(), row.int("n").unwrap())).collect();
    if rows != logged {
        return Some(format!("rows {rows:?} do not fit the log {logged:?}"));
    }
    store.close().await;
    let check: String = rusqlite::Connection::open(&path)
        .unwrap()
        .query_row("PRAGMA integrity_check", [], |row| row.get(0))
        .unwrap();
    (check != "ok").then_some(check)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn nothing_acknowledged_is_lost_at_a_power_cut() {
    let (mut cuts, mut damaged, mut acknowledged) = (0, 0, 0);
    for seed in 0..4 {
        for image in run_under_cuts(&format!("crash-full-{seed}"), seed, true, 60).await {
            if let Some(fault) = fault_of(&image).await {
                panic!("seed {seed}, cut {cuts}: {fault}");
            }
            cuts += 1;
            damaged += usize::from(image.damaged > 0);
            acknowledged += image.acknowledged.len();
        }
    }
    println!(
        "{cuts} power cuts, {damaged} with lost or torn writes, {acknowledged} acknowledgements checked"
    );
    assert!(cuts > 100 && damaged > 50 && acknowledged > 1000, "the test must have had something to lose");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn without_synchronization_the_same_test_fails() {
    let mut faults = 0;
    for image in run_under_cuts("crash-off", 1, false, 60).await {
        faults += usize::from(fault_of(&image).await.is_some());
    }
    println!("{faults} images were damaged");
    assert!(faults > 0, "cutting the power without synchronization went unnoticed");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_full_disk_is_said_and_loses_nothing() {
    let folder = tempfile::tempdir().unwrap();
    let vfs = CrashVfs::register("crash-disk-full", 1, 0);
    let options = SqliteOptions { vfs: Some(vfs.name()), ..SqliteOptions::at(folder.path().join(FILE)) };
    let store = open(options).await.unwrap();
    let table = counters();
    let commit = async |operation: &str| store.commit(&increment(&table, operation, 0, 10)).await;
    assert!(matches!(commit("before").await, Ok(Commit::Applied(_))));
    vfs.refuse_writes(true);
    for attempt in 0..3 {
        let refused = commit(&format!("during-{attempt}")).await;
        assert!(
            matches!(&refused, Err(StoreError::Unavailable { why }) if why.contains("no space left")),
            "{refused:?}"
        );
    }
    vfs.refuse_writes(false);
    assert!(matches!(commit("after").await, Ok(Commit::Applied(_))));
    assert!(matches!(commit("before").await, Ok(Commit::Applied(applied)) if applied.repeated));
    assert!(matches!(commit("during-0").await, Ok(Commit::Applied(applied)) if !applied.repeated));
    let address = statehouse_store::Address::new(&table, &tenant(), [0.into()]).unwrap();
    let rows = store.get(&[address], Consistency::Strong).await.unwrap();
    assert_eq!(rows[0].as_ref().unwrap().int("n"), Some(3));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_failed_synchronization_leaves_the_outcome_open_and_stops_the_writer() {
    let folder = tempfile::tempdir().unwrap();
    let vfs = CrashVfs::register("crash-sync", 1, 0);
    let options = SqliteOptions { vfs: Some(vfs.name()), ..SqliteOptions::at(folder.path().join(FILE)) };
    let store = open(options).await.unwrap();
    let table = counters();
    assert!(matches!(store.commit(&increment(&table, "sure", 0, 10)).await, Ok(Commit::Applied(_))));
    vfs.refuse_synchronization(true);
    let outcome = store.commit(&increment(&table, "unsure", 0, 10)).await;
    assert!(matches!(outcome, Err(StoreError::OutcomeUnknown { .. })), "{outcome:?}");
    vfs.refuse_synchronization(false);
    let later = store.commit(&increment(&table, "later", 0, 10)).await;
    assert!(
        matches!(&later, Err(StoreError::Unavailable { why }) if why.contains("open the store again")),
        "{later:?}"
    );
    // Whatever the disk kept, the operation can be settled, and the sure one is there.
    for _ in 0..20 {
        let image = vfs.cut();
        let elsewhere = tempfile::tempdir().unwrap();
        let reopened = open(SqliteOptions::at(image.restore(elsewhere.path(), FILE))).await.unwrap();
        let sure = reopened.resolve(&tenant(), "sure").await.unwrap();
        assert!(matches!(sure, Resolution::Applied(_)));
        let settled = reopened.resolve(&tenant(), "unsure").await.unwrap();
        let again = reopened.commit(&increment(&table, "unsure", 0, 10)).await.unwrap();
        match settled {
            Resolution::Applied(_) => {
                assert!(matches!(again, Commit::Applied(applied) if applied.repeated));
            }
            Resolution::Aborted => assert_eq!(again, Commit::Fenced),
        }
        reopened.close().await;
    }
}

#[tokio::test]
async fn a_read_only_file_is_said() {
    let folder = tempfile::tempdir().unwrap();
    let vfs = CrashVfs::register("crash-read-only", 1, 0);
    let options = SqliteOptions { vfs: Some(vfs.name()), ..SqliteOptions::at(folder.path().join(FILE)) };
    open(options.clone()).await.unwrap().close().await;
    vfs.read_only(true);
    let error = open(options).await.unwrap_err();
    assert!(matches!(&error, StoreError::Unavailable { why } if why.contains("read-only")), "{error}");
}

#[tokio::test]
async fn a_locked_file_is_said_and_freed_later() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join(FILE);
    let options = SqliteOptions { lock_timeout: Duration::from_millis(20), ..SqliteOptions::at(&path) };
    let store = open(options).await.unwrap();
    let other = rusqlite::Connection::open(&path).unwrap();
    other.execute_batch("BEGIN IMMEDIATE").unwrap();
    let table = counters();
    let error = store.commit(&increment(&table, "one", 0, 1)).await.unwrap_err();
    assert!(
        matches!(&error, StoreError::Unavailable { why } if why.contains("locked by another process")),
        "{error}"
    );
    other.execute_batch("ROLLBACK").unwrap();
    assert!(matches!(store.commit(&increment(&table, "one", 0, 1)).await, Ok(Commit::Applied(_))));
}

#[tokio::test]
async fn two_processes_on_one_file_keep_one_log() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join(FILE);
    let (first, second) =
        (open(SqliteOptions::at(&path)).await.unwrap(), open(SqliteOptions::at(&path)).await.unwrap());
    let table = counters();
    for number in 0..20 {
        let store = if number % 2 == 0 { &first } else { &second };
        let plan = increment(&table, &format!("op-{number}"), 0, 1);
        assert!(matches!(store.commit(&plan).await, Ok(Commit::Applied(_))));
    }
    let partition = statehouse_store::log::partition_of(&tenant(), "counter", "0", first.partitions());
    let page = first.read_log(partition, 0, 100).await.unwrap();
    let operations: Vec<&str> = page.records.iter().map(|record| record.operation.as_str()).collect();
    assert_eq!(operations, (0..20).map(|number| format!("op-{number}")).collect::<Vec<_>>());
    // A reader in one process hears of what the other wrote.
    let seen = first.wait_log(&[], Duration::ZERO).await.unwrap();
    second.commit(&increment(&table, "news", 0, 1)).await.unwrap();
    let heads = first.wait_log(&seen, Duration::from_secs(30)).await.unwrap();
    assert_ne!(heads, seen);
}

#[tokio::test]
async fn foreign_newer_and_broken_files_are_refused() {
    let folder = tempfile::tempdir().unwrap();
    let check = async |name: &str, expect: &str| {
        let path = folder.path().join(name);
        let error = SqliteStore::open(SqliteOptions::at(&path)).await.unwrap_err().to_string();
        assert!(error.contains(expect) && error.contains(name), "{name}: {error}");
    };
    let sqlite = |name: &str, statement: &str| {
        let connection = rusqlite::Connection::open(folder.path().join(name)).unwrap();
        connection.execute_batch(statement).unwrap();
    };
    sqlite("foreign.db", "CREATE TABLE t (x)");
    check("foreign.db", "another program").await;

    open(SqliteOptions::at(folder.path().join("newer.db"))).await.unwrap().close().await;
    sqlite("newer.db", "PRAGMA user_version = 99");
    check("newer.db", "has format 99").await;

    std::fs::write(folder.path().join("text.db"), "not a database, but long enough ".repeat(100)).unwrap();
    check("text.db", "corrupt").await;

    check("missing/house.db", "cannot be opened").await;
}

/// Flips bits all over a valid file: whatever a call returns, it is an answer or an error, never a panic.
#[tokio::test]
async fn a_corrupted_file_is_an_error_with_the_path_and_never_a_panic() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join(FILE);
    let store = open(SqliteOptions::at(&path)).await.unwrap();
    let table = counters();
    for number in 0..200 {
        store.commit(&increment(&table, &format!("op-{number}"), number % 50, 200)).await.unwrap();
    }
    store.close().await;
    let valid = std::fs::read(&path).unwrap();
    let mut corrupt = 0;
    for seed in 0..60 {
        let mut random = Random::seeded(seed);
        let mut bytes = valid.clone();
        for _ in 0..1 + random.below(200) {
            let place = random.below(bytes.len() as u64) as usize;
            bytes[place] ^= 1 << random.below(8);
        }
        let damaged = folder.path().join(format!("damaged-{seed}.db"));
        std::fs::write(&damaged, &bytes).unwrap();
        corrupt += usize::from(meets_corruption(&damaged).await);
        for suffix in ["", "-wal", "-shm"] {
            drop(std::fs::remove_file(format!("{}{suffix}", damaged.display())));
        }
    }
    println!("{corrupt} of 60 damaged files were found to be corrupt");
    assert!(corrupt > 10);
}

async fn meets_corruption(path: &Path) -> bool {
    let table = counters();
    let mut corrupt = false;
    let mut note = |error: StoreError| {
        if let StoreError::Corrupt { place, .. } = &error {
            corrupt = true;
            assert!(!place.is_empty());
        }
    };
    let store = match open(SqliteOptions::at(path)).await {
        Ok(store) => store,
        Err(error) => {
            note(error);
            return corrupt;
        }
    };
    if let Err(error) = store.scan(&Scan::all(&table)).await {
        note(error);
    }
    for partition in 0..store.partitions() {
        if let Err(error) = store.read_log(partition, 0, 1000).await {
            note(error);
        }
    }
    for pair in 0..50 {
        let plan = Plan::of(&tenant(), format!("new-{pair}"))
            .step(
                Step::update(&table, [(pair * 2).into()])
                    .guard(column("n").ge(0))
                    .set("n", column("n").add(1)),
            )
            .log(Entry::about("counter", pair.to_string()));
        if let Err(error) = store.commit(&plan.build().unwrap()).await {
            note(error);
        }
    }
    store.close().await;
    corrupt
}
