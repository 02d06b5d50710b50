//! ClaimTexts as PostgreSQL makes them: one statement, which waits for no lock, and whose commit may get lost.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use statehouse_store::guard::{column, now};
use statehouse_store::{Address, ClaimRange, Consistency, Plan, Query, Row, Step, Store, Table, Type, Value};
use statehouse_store_postgres::{PostgresStore, StoreCounts};

use crate::proxy::{Cut, Proxy};
use crate::support::{Namespace, raw, tenant};

fn tickets() -> Arc<Table> {
    Table::named("tickets")
        .partition("counter", Type::Text)
        .sort("number", Type::Int)
        .defaulted("times", Type::Int, 0)
        .optional("taken_by", Type::Text)
        .optional("taken_at", Type::Time)
        .optional("note", Type::Text)
        .build()
        .unwrap()
}

async fn fill(store: &PostgresStore, table: &Arc<Table>, count: i64) {
    let steps = (0..count).map(|number| Step::insert(table, ["a".into(), number.into()]));
    store.commit(&Plan::of(&tenant("acme"), "fill").steps(steps).build().unwrap()).await.unwrap();
}

fn taking(table: &Arc<Table>, operation: &str, rows: usize) -> ClaimRange {
    taking_from(table, operation, 0, rows)
}

fn taking_from(table: &Arc<Table>, operation: &str, first: i64, rows: usize) -> ClaimRange {
    let acme = tenant("acme");
    let query = Query::table(table, &acme, ["a".into()]).unwrap().from(first).unwrap().limit(rows).unwrap();
    let step = Step::update(table, [])
        .guard(column("times").eq(0))
        .set("times", column("times").add(1))
        .set("taken_at", now());
    ClaimRange::of(&acme, operation, query, step, "taken_by").unwrap()
}

fn numbers(rows: &[Row]) -> Vec<i64> {
    rows.iter().map(|row| row.int("number").unwrap()).collect()
}

/// What was written since, by any way.
fn since(before: StoreCounts, after: StoreCounts) -> (u64, u64) {
    let plans = |counts: StoreCounts| counts.alone + counts.alike + counts.uniform + counts.batched;
    (after.taken - before.taken, plans(after) - plans(before))
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn one_statement_takes_what_is_small_and_plans_the_rest() {
    let (namespace, table) = (Namespace::new(), tickets());
    let store = namespace.open_with(&[&table]).await;
    fill(&store, &table, 6).await;
    let before = store.counts();
    assert_eq!(numbers(&store.claim_range(&taking(&table, "one", 4)).await.unwrap()), [0, 1, 2, 3]);
    assert_eq!(since(before, store.counts()), (4, 0));
    // Too large to be changed unseen.
    let note = Step::update(&table, ["a".into(), 4.into()]).set("note", "x".repeat(300_000).as_str());
    store.commit(&Plan::of(&tenant("acme"), "note").step(note).build().unwrap()).await.unwrap();
    let before = store.counts();
    let mut rest = numbers(&store.claim_range(&taking(&table, "two", 6)).await.unwrap());
    rest.sort_unstable();
    assert_eq!(rest, [4, 5]);
    let (taken, plans) = since(before, store.counts());
    assert_eq!(taken, 1);
    assert!(plans >= 1, "{plans}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn rows_that_others_have_locked_are_passed_over() {
    let (namespace, table) = (Namespace::new(), tickets());
    let store = namespace.open_with(&[&table]).await;
    fill(&store, &table, 5).await;
    let other = raw().await;
    let lock = format!("begin; select from {}.tickets where number < 2 for update", namespace.schema());
    other.batch_execute(&lock).await.unwrap();
    assert_eq!(numbers(&store.claim_range(&taking(&table, "one", 2)).await.unwrap()), [2, 3]);
    other.batch_execute("rollback").await.unwrap();
    assert_eq!(numbers(&store.claim_range(&taking(&table, "two", 2)).await.unwrap()), [0, 1]);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_commit_whose_answer_is_lost_loses_no_row() {
    let (namespace, proxy, table) = (Namespace::new(), Proxy::start().await, tickets());
    let witness = namespace.open_with(&[&table]).await;
    fill(&witness, &table, 9).await;
    let store = PostgresStore::open(proxy.options(&namespace.options)).await.unwrap();
    assert_eq!(numbers(&store.claim_range(&taking(&table, "warm", 1)).await.unwrap()), [0]);
    for (cut, operation, first) in [(Cut::BeforeCommit, "before", 1), (Cut::AfterCommit, "after", 4)] {
        proxy.set(cut);
        let taken = store.claim_range(&taking_from(&table, operation, first, 3)).await.unwrap();
        assert_eq!(numbers(&taken), [first, first + 1, first + 2]);
        for number in first..first + 3 {
            let key: [Value; 2] = ["a".into(), number.into()];
            let address = Address::new(&table, &tenant("acme"), key).unwrap();
            let rows = witness.get(&[address], Consistency::Strong).await.unwrap();
            let row = rows[0].as_ref().unwrap();
            assert_eq!((row.text("taken_by"), row.int("times")), (Some(operation), Some(1)));
        }
    }
    let achieved = &proxy.achieved;
    let cuts = [&achieved.before, &achieved.after].map(|cuts| cuts.load(Ordering::Relaxed));
    assert_eq!(cuts, [1, 1]);
}
