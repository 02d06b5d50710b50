//! By which index rows are found on a table that PostgreSQL knows nothing of: a plan that is made then is kept.

use std::sync::Arc;
use std::time::Duration;

use statehouse_store::guard::{column, now};
use statehouse_store::{
    Address, Clock as _, Consistency, Draft, Entry, Plan, Query, Step, Store, SystemClock, Table, Type,
};

use crate::support::{Namespace, raw, tenant};

/// A table whose rows are long, so that PostgreSQL believes that only few are on a page, with indexes that begin with
/// the tenant, with the tenant and a part of the key, and with a column that guards compare.
fn wide() -> Arc<Table> {
    let texts = (0..10).map(|number| format!("text_{number}"));
    texts
        .fold(Table::named("wide").partition("queue", Type::Text).sort("id", Type::Int), |table, text| {
            table.optional(&text, Type::Text)
        })
        .defaulted("status", Type::Text, "NEW")
        .defaulted("n", Type::Int, 0)
        .optional("due_at", Type::Time)
        .index("by_status", &["status"], &["n"])
        .index("by_queue", &["queue", "status"], &[])
        .index("by_due", &["queue"], &["due_at"])
        .build()
        .unwrap()
}

/// How often each index of a table was used, by its name, when the server has told of `at_least` uses in all.
async fn uses(schema: &str, at_least: i64) -> Vec<(String, i64)> {
    let client = raw().await;
    loop {
        let rows = client
            .query(
                "select indexrelname::text, idx_scan from pg_stat_user_indexes \
                 where schemaname = $1 and relname = 'wide' order by 1",
                &[&schema],
            )
            .await
            .unwrap();
        let uses: Vec<(String, i64)> = rows.iter().map(|row| (row.get(0), row.get(1))).collect();
        if uses.iter().map(|(_, count)| count).sum::<i64>() >= at_least {
            return uses;
        }
        SystemClock.sleep(Duration::from_millis(50)).await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn keys_are_looked_up_by_the_primary_key_and_lists_by_their_index() {
    let (namespace, table, acme) = (Namespace::new(), wide(), tenant("acme"));
    let store = namespace.open_with(&[&table]).await;
    let key = |id: i64| ["mail".into(), id.into()];
    let commit = async |name: &str, steps: Vec<Step>| {
        let entry = Entry::about("wide", name).event(Draft::named("wide.changed"));
        let plan = Plan::of(&acme, name).steps(steps).log(entry).build().unwrap();
        store.commit(&plan).await.unwrap()
    };
    for id in 0..3 {
        let add = Step::insert(&table, key(id)).set("due_at", now());
        commit(&format!("add {id}"), vec![add]).await;
    }
    for id in 0..3 {
        let due = || column("due_at").le(now());
        let change = || Step::update(&table, key(id)).set("n", 7).guard(due());
        commit(&format!("alone {id}"), vec![change()]).await;
        commit(&format!("two {id}"), vec![change(), Step::upsert(&table, key(9 + id)).set("n", 1)]).await;
        let address = Address::new(&table, &acme, key(id)).unwrap();
        assert!(store.get(&[address], Consistency::Strong).await.unwrap()[0].is_some());
        commit(&format!("gone {id}"), vec![Step::delete(&table, key(id)).guard(due())]).await;
    }
    let whole = Query::table(&table, &acme, ["mail".into()]).unwrap();
    assert_eq!(store.query(&whole).await.unwrap().rows.len(), 3);
    // A connection tells of what it used at the latest when it ends. By key went 3 inserts, 3 updates alone, 3 with
    // another row each, 3 reads, 3 deletes and a list.
    store.close().await;
    let uses_of_keys = uses(namespace.schema(), 16).await;
    for (index, count) in &uses_of_keys {
        assert_eq!(*count > 0, index == "wide_pkey", "{uses_of_keys:?}");
    }
    let lists = [
        Query::index(&table, "by_status", &acme, ["NEW".into()]),
        Query::index(&table, "by_queue", &acme, ["mail".into(), "NEW".into()]),
        Query::index(&table, "by_due", &acme, ["mail".into()]),
    ];
    let store = namespace.open().await;
    for list in lists {
        store.query(&list.unwrap()).await.unwrap();
    }
    store.close().await;
    let of_keys: i64 = uses_of_keys.iter().map(|(_, count)| count).sum();
    let after = uses(namespace.schema(), of_keys + 3).await;
    let used: Vec<&str> =
        after.iter().filter(|(_, count)| *count > 0).map(|(name, _)| name.as_str()).collect();
    assert_eq!(
        used,
        ["wide_by_due_idx", "wide_by_queue_idx", "wide_by_status_idx", "wide_pkey"],
        "{after:?}"
    );
}
