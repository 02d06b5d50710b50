//! By which index rows are found on a table that PostgreSQL knows nothing of: a plan that is made then is kept.

use std::sync::Arc;
use std::time::Duration;

use statehouse_store::guard::{column, now};
use statehouse_store::{
    Address, Clock as _, Consistency, Entry, EventTemplate, Plan, Query, ReadRequest, Step, Store,
    SystemClock, Table, Type,
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
        let entry = Entry::about("wide", name).event(EventTemplate::named("wide.changed"));
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

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn several_reads_in_one_go_are_lookups_each_by_its_own_index() {
    let (namespace, table, acme) = (Namespace::new(), wide(), tenant("acme"));
    let beside = crate::support::counters("beside");
    let store = namespace.open_with(&[&table, &beside]).await;
    let range = Query::table(&table, &acme, ["mail".into()]).unwrap().backward();
    let behind = range.clone().above(3).unwrap().limit(5).unwrap();
    let list = Query::index(&table, "by_due", &acme, ["mail".into()]).unwrap();
    let rows = [1, 2].map(|id: i64| Address::new(&table, &acme, ["mail".into(), id.into()]).unwrap());
    let other = [Address::new(&beside, &acme, ["x".into()]).unwrap()];
    let few = [
        ReadRequest::Query(&range),
        ReadRequest::Get(&rows[..1]),
        ReadRequest::Query(&list),
        ReadRequest::Get(&other),
    ];
    let many = [
        ReadRequest::Query(&range),
        ReadRequest::Query(&range),
        ReadRequest::Query(&behind),
        ReadRequest::Get(&rows),
        ReadRequest::Query(&list),
        ReadRequest::Get(&other),
    ];
    // The plans are made while the tables are empty, and are kept when they are not. By then the server knows what is
    // there, which is what could make it think otherwise.
    for asks in [few.as_slice(), &many] {
        store.read_many(asks).await.unwrap();
    }
    let schema = namespace.schema();
    let fill = format!(
        "insert into {schema}.wide (tenant, queue, id, due_at) \
         select 'acme', case when n % 3 = 0 then 'mail' else 'other' end, n, now() + n * interval '1 second' \
         from generate_series(1, 3000) as n; \
         analyze {schema}.wide"
    );
    raw().await.batch_execute(&fill).await.unwrap();
    let mut lookups = 0;
    for asks in [few.as_slice(), &many] {
        for _ in 0..8 {
            let seen = store.read_many(asks).await.unwrap();
            let first = seen.into_iter().next().unwrap().into_page().unwrap();
            assert_eq!(first.rows.len(), 1_000);
            assert!(first.rows.windows(2).all(|pair| pair[0].int("id") > pair[1].int("id")));
        }
        // Each range once, and each row once.
        lookups += 8 * asks
            .iter()
            .map(|ask| match ask {
                ReadRequest::Get(rows) => rows.len() as i64,
                ReadRequest::Query(_) | ReadRequest::Value(_) => 1,
            })
            .sum::<i64>();
    }
    store.close().await;
    // All but those beside, which are one in each look.
    let used = uses(schema, lookups - 16).await;
    for (index, count) in &used {
        assert_eq!(*count > 0, index == "wide_pkey" || index == "wide_by_due_idx", "{used:?}");
    }
    let scans = "select seq_tup_read from pg_stat_user_tables where schemaname = $1 and relname = 'wide'";
    let scanned: i64 = raw().await.query_one(scans, &[&schema]).await.unwrap().get(0);
    assert_eq!(scanned, 0, "the table was walked over");
}
