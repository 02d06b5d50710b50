//! Plans that are in each other's way: nothing is lost, nothing is done twice, no caller sees a deadlock.

use std::sync::Arc;
use std::time::Duration;

use statehouse_store::{Address, Commit, Consistency, Random, Step, Store, Value};
use tokio::task::JoinSet;

use crate::support::{Namespace, bump, counters, logged, raw, tenant};

const ROWS: u64 = 6;
const CALLERS: u64 = 12;
const PLANS: u64 = 40;

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn plans_of_several_stores_over_the_same_rows_all_get_through() {
    let mut namespace = Namespace::new();
    namespace.options.writers = 2;
    // The server needs a second to notice each deadlock. On a busy machine several of them exceed the default.
    namespace.options.lock_timeout = Duration::from_secs(60);
    let tables = [counters("left"), counters("right")];
    let store = Arc::new(namespace.open_with(&[&tables[0], &tables[1]]).await);
    let other = Arc::new(namespace.open().await);
    let acme = tenant("acme");
    for number in 0..ROWS {
        let row = |table| Step::insert(table, [Value::from(number.to_string())]);
        let steps = tables.iter().map(row).collect();
        store.commit(&logged(&acme, &format!("create-{number}"), "x", steps)).await.unwrap();
    }
    let mut tasks = JoinSet::new();
    for caller in 0..CALLERS {
        let store = if caller % 2 == 0 { store.clone() } else { other.clone() };
        let (tables, acme) = (tables.clone(), acme.clone());
        tasks.spawn(async move {
            let mut random = Random::seeded(caller);
            let mut steps_done = 0;
            for number in 0..PLANS {
                let mut rows: Vec<(usize, u64)> = Vec::new();
                while rows.len() < 1 + random.below(4) as usize {
                    let row = (random.below(2) as usize, random.below(ROWS));
                    if !rows.contains(&row) {
                        rows.push(row);
                    }
                }
                let steps: Vec<Step> =
                    rows.iter().map(|(table, row)| bump(&tables[*table], &row.to_string())).collect();
                steps_done += steps.len();
                let plan = logged(&acme, &format!("op-{caller}-{number}"), &rows[0].1.to_string(), steps);
                assert!(matches!(store.commit(&plan).await.unwrap(), Commit::Applied(_)));
            }
            steps_done
        });
    }
    // A client outside the store locks two of the rows in the opposite order, which causes deadlocks.
    let adversary = raw().await;
    let schema = namespace.schema().to_owned();
    let spoiling = tokio::spawn(async move {
        let mut deadlocks = 0;
        for _ in 0..5 {
            let take = |table: &str, id: u64| {
                format!("select from {schema}.{table} where tenant = 'acme' and id = '{id}' for update")
            };
            let words = format!("begin; {}; select pg_sleep(0.005); {}", take("right", 5), take("left", 0));
            deadlocks += usize::from(adversary.batch_execute(&words).await.is_err());
            adversary.batch_execute("rollback").await.unwrap();
        }
        deadlocks
    });
    let mut expected = 0;
    while let Some(done) = tasks.join_next().await {
        expected += i64::try_from(done.unwrap()).unwrap();
    }
    // The number of deadlocks depends on the schedule. No caller may receive an error because of one.
    spoiling.await.unwrap();
    let addresses: Vec<Address> = tables
        .iter()
        .flat_map(|table| (0..ROWS).map(move |row| (table, row.to_string())))
        .map(|(table, row)| Address::new(table, &acme, [row.into()]).unwrap())
        .collect();
    let rows = store.get(&addresses, Consistency::Strong).await.unwrap();
    let total: i64 = rows.iter().map(|row| row.as_ref().unwrap().int("n").unwrap()).sum();
    assert_eq!(total, expected);
    let (mut records, mut partition) = (0, 0);
    while partition < store.partitions() {
        records += store.read_log(partition, 0, 1000).await.unwrap().head;
        partition += 1;
    }
    assert_eq!(records, ROWS + CALLERS * PLANS);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn one_locked_row_does_not_stop_the_others() {
    let mut namespace = Namespace::new();
    namespace.options.lock_timeout = Duration::from_millis(300);
    let table = counters("counters");
    let store = Arc::new(namespace.open_with(&[&table]).await);
    let acme = tenant("acme");
    for id in ["held", "free"] {
        store
            .commit(&logged(&acme, &format!("create {id}"), id, vec![Step::insert(&table, [id.into()])]))
            .await
            .unwrap();
    }
    let holder = raw().await;
    let hold = format!("begin; select from {}.counters where id = 'held' for update", namespace.schema());
    holder.batch_execute(&hold).await.unwrap();
    let mut tasks = JoinSet::new();
    for number in 0..20 {
        let (store, table, acme) = (store.clone(), table.clone(), acme.clone());
        tasks.spawn(async move {
            let id = if number % 4 == 0 { "held" } else { "free" };
            (id, store.commit(&logged(&acme, &format!("op-{number}"), id, vec![bump(&table, id)])).await)
        });
    }
    while let Some(done) = tasks.join_next().await {
        match done.unwrap() {
            ("free", outcome) => assert!(matches!(outcome, Ok(Commit::Applied(_))), "{outcome:?}"),
            (_, outcome) => {
                let unavailable = matches!(outcome, Err(statehouse_store::StoreError::Unavailable { .. }));
                assert!(unavailable, "{outcome:?}");
            }
        }
    }
    holder.batch_execute("rollback").await.unwrap();
    let again = store.commit(&logged(&acme, "op-0", "held", vec![bump(&table, "held")])).await;
    assert!(matches!(again, Ok(Commit::Applied(_))), "{again:?}");
}
