//! The order of the log: what goes wrong with the usual ways, and that it does not here.
//!
//! Each wrong order is first produced on a scratch table, by the interleaving that produces it. Then the same
//! interleaving is run on the store. An interleaving is made by holding a lock from outside where a transaction is
//! to stop.

use std::sync::Arc;
use std::time::Duration;

use statehouse_store::{Clock as _, Commit, Record, Step, Store, SystemClock, Value};
use statehouse_store_postgres::PostgresStore;

use crate::support::{Namespace, bump, counters, logged, raw, tenant};

/// Long enough for a statement to arrive and block. Too short makes a test pass for nothing, never fail.
async fn a_moment() {
    SystemClock.sleep(Duration::from_millis(150)).await;
}

fn patient(namespace: &mut Namespace) {
    namespace.options.partitions = Some(1);
    namespace.options.lock_timeout = Duration::from_secs(10);
}

async fn records(store: &PostgresStore, after: u64) -> Vec<Record> {
    store.read_log(0, after, 100).await.unwrap().records
}

fn position(record: &Record) -> u64 {
    record.position.unwrap().offset
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_sequence_passes_over_what_commits_late() {
    let namespace = Namespace::new();
    let (slow, fast) = (raw().await, raw().await);
    let schema = namespace.schema();
    fast.batch_execute(&format!(
        "create schema {schema}; create table {schema}.outbox (id bigserial, what text)"
    ))
    .await
    .unwrap();
    let insert = |what: &str| format!("insert into {schema}.outbox (what) values ('{what}')");
    slow.batch_execute(&format!("begin; {}", insert("slow"))).await.unwrap();
    fast.batch_execute(&insert("fast")).await.unwrap();
    let read = |after: i64| {
        let text = format!("select id, what from {schema}.outbox where id > {after} order by id");
        let reader = &fast;
        async move { reader.query(&text, &[]).await.unwrap() }
    };
    let first = read(0).await;
    let seen: i64 = first.last().unwrap().get(0);
    slow.batch_execute("commit").await.unwrap();
    let second = read(seen).await;
    let what: Vec<String> = first.iter().chain(&second).map(|row| row.get(1)).collect();
    assert_eq!(what, ["fast"], "the reader was to miss the record that committed late");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_log_passes_over_nothing() {
    let mut namespace = Namespace::new();
    patient(&mut namespace);
    let table = counters("counters");
    let store = Arc::new(namespace.open_with(&[&table]).await);
    let other = namespace.open().await;
    let acme = tenant("acme");
    for id in ["slow", "fast"] {
        let insert = Step::insert(&table, [Value::from(id)]);
        store.commit(&logged(&acme, &format!("create {id}"), id, vec![insert])).await.unwrap();
    }
    let mut seen = position(records(&store, 0).await.last().unwrap());
    // The slow one stops within its transaction, as the writer of an outbox would after taking its number.
    let holder = raw().await;
    let hold = format!("begin; select from {}.counters where id = 'slow' for update", namespace.schema());
    holder.batch_execute(&hold).await.unwrap();
    let slow = tokio::spawn({
        let (store, plan) = (store.clone(), logged(&acme, "slow", "slow", vec![bump(&table, "slow")]));
        async move { store.commit(&plan).await.unwrap() }
    });
    a_moment().await;
    assert!(!slow.is_finished(), "it was to wait for the lock");
    other.commit(&logged(&acme, "fast", "fast", vec![bump(&table, "fast")])).await.unwrap();
    let mut read: Vec<String> = Vec::new();
    for record in records(&other, seen).await {
        seen = position(&record);
        read.push(record.operation);
    }
    holder.batch_execute("commit").await.unwrap();
    assert!(matches!(slow.await.unwrap(), Commit::Applied(_)));
    read.extend(records(&other, seen).await.into_iter().map(|record| record.operation));
    assert_eq!(read, ["fast", "slow"]);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_record_whose_transaction_is_open_holds_back_those_behind_it() {
    let mut namespace = Namespace::new();
    patient(&mut namespace);
    let table = counters("counters");
    let store = Arc::new(namespace.open_with(&[&table]).await);
    let acme = tenant("acme");
    store.commit(&logged(&acme, "create", "a", vec![Step::insert(&table, ["a".into()])])).await.unwrap();
    // A writer of another process, stopped between taking the head and its commit.
    let (writer, schema) = (raw().await, namespace.schema());
    writer
        .batch_execute(&format!(
            "begin; update {schema}.statehouse_heads set head = head + 1;
             insert into {schema}.statehouse_log
             select partition, 2, tenant, 'elsewhere', resource, key, at, fingerprint, fate, events
             from {schema}.statehouse_log"
        ))
        .await
        .unwrap();
    let behind = tokio::spawn({
        let (store, plan) = (store.clone(), logged(&acme, "behind", "a", vec![bump(&table, "a")]));
        async move { store.commit(&plan).await.unwrap() }
    });
    a_moment().await;
    assert!(!behind.is_finished(), "it was to wait for the head");
    let page = store.read_log(0, 1, 100).await.unwrap();
    assert_eq!((page.records, page.head), (Vec::new(), 1));
    writer.batch_execute("commit").await.unwrap();
    behind.await.unwrap();
    let operations: Vec<String> =
        records(&store, 1).await.into_iter().map(|record| record.operation).collect();
    assert_eq!(operations, ["elsewhere", "behind"]);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn transaction_ids_invert_the_versions_of_a_row() {
    let namespace = Namespace::new();
    let (early, late) = (raw().await, raw().await);
    let schema = namespace.schema();
    late.batch_execute(&format!(
        "create schema {schema};
         create table {schema}.items (id text primary key, version bigint);
         create table {schema}.outbox (xid xid8 default pg_current_xact_id(), version bigint);
         insert into {schema}.items values ('k', 1)"
    ))
    .await
    .unwrap();
    let write = format!(
        "with written as (update {schema}.items set version = version + 1 where id = 'k' returning version)
         insert into {schema}.outbox (version) select version from written"
    );
    // The early one has its id before the late one writes the row, and writes it afterwards.
    early.batch_execute("begin; select pg_current_xact_id()").await.unwrap();
    late.batch_execute(&write).await.unwrap();
    early.batch_execute(&format!("{write}; commit")).await.unwrap();
    let text = format!(
        "select version from {schema}.outbox where xid < pg_snapshot_xmin(pg_current_snapshot()) order by xid"
    );
    // The reader waits until no older transaction is open on the server; other tests have theirs.
    let mut versions: Vec<i64> = Vec::new();
    while versions.len() < 2 {
        a_moment().await;
        versions = late.query(&text, &[]).await.unwrap().iter().map(|row| row.get(0)).collect();
    }
    assert_eq!(versions, [3, 2], "the order by transaction id was to be wrong");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_log_has_the_versions_of_a_row_in_order() {
    let mut namespace = Namespace::new();
    patient(&mut namespace);
    // Rows are locked by table: the early plan has its transaction id from `first`, and stops at `second`.
    let tables = ["first", "second", "third"].map(counters);
    let [first, second, third] = &tables;
    let store = Arc::new(namespace.open_with(&[first, second, third]).await);
    let other = namespace.open().await;
    let acme = tenant("acme");
    let inserts = tables.iter().map(|table| Step::insert(table, ["k".into()])).collect();
    store.commit(&logged(&acme, "create", "k", inserts)).await.unwrap();
    let (holder, schema) = (raw().await, namespace.schema());
    holder.batch_execute(&format!("begin; select from {schema}.second for update")).await.unwrap();
    let early = tokio::spawn({
        let steps = vec![bump(third, "k"), bump(first, "k"), bump(second, "k")];
        let (store, plan) = (store.clone(), logged(&acme, "early", "k", steps));
        async move { store.commit(&plan).await.unwrap() }
    });
    a_moment().await;
    other.commit(&logged(&acme, "late", "k", vec![bump(third, "k")])).await.unwrap();
    holder.batch_execute("commit").await.unwrap();
    assert!(matches!(early.await.unwrap(), Commit::Applied(_)));
    let versions: Vec<i64> = records(&store, 1)
        .await
        .iter()
        .map(|record| record.events[0].data["row"]["version"].as_i64().unwrap())
        .collect();
    assert_eq!(versions, [2, 3]);
    // That it was the same interleaving: by their transaction ids the two stand the other way round.
    let text = format!(
        "select operation from {schema}.statehouse_log where position > 1 order by xmin::text::bigint"
    );
    let by_xid: Vec<String> = holder.query(&text, &[]).await.unwrap().iter().map(|row| row.get(0)).collect();
    assert_eq!(by_xid, ["early", "late"]);
}
