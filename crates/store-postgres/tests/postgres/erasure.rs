//! Erased rows: no table of the schema has their text, the log included, also under row-level security.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use statehouse_store::blank::BlankSubjects;
use statehouse_store::log::EventSubject;
use statehouse_store::{BlankRange, Entry, EventTemplate, Plan, Position, Random, Step, Store};
use tokio_postgres::Client;

use crate::support::{Namespace, profiles, raw, tenant};

const SECRET: &str = "ann.erased@example.org";

/// The tables of a schema that have a text in some row.
async fn tables_with(client: &Client, schema: &str, text: &str) -> Vec<String> {
    let tables = "select tablename::text from pg_tables where schemaname = $1 order by tablename";
    let mut found = Vec::new();
    for table in client.query(tables, &[&schema]).await.unwrap() {
        let table: String = table.get(0);
        let count =
            format!("select count(*) from \"{schema}\".\"{table}\" as t where t::text like '%' || $1 || '%'");
        let count: i64 = client.query_one(&count, &[&text]).await.unwrap().get(0);
        if count > 0 {
            found.push(table);
        }
    }
    found
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn erasure_leaves_nothing_in_any_table() {
    let role = format!("role_{:x}", Random::from_entropy().below(1 << 48));
    let client = raw().await;
    client.batch_execute(&format!("create role {role} login password 'runtime'")).await.unwrap();
    let mut namespace = Namespace::new();
    namespace.options.row_level_security = true;
    namespace.options.runtime_role = Some(role.clone());
    let table = profiles();
    let store = namespace.open_with(&[&table]).await;
    let acme = tenant("acme");
    let plan = |operation: &str, step: Step, event: EventTemplate| {
        let entry = Entry::about("profile", "1").event(event);
        Plan::of(&acme, operation).step(step).log(entry).build().unwrap()
    };
    let named = |name: &str| EventTemplate::named(format!("profile.{name}"));
    let create = Step::insert(&table, [1.into()]).set("display_name", SECRET);
    store.commit(&plan("create", create, named("created").with_row_of(0))).await.unwrap();
    let batch = Entry::about("note", "2")
        .event(EventTemplate::named("note.created"))
        .event(named("updated").with("subject", "1").with("reason", SECRET).about("profile", "1"));
    store.commit(&Plan::of(&acme, "batch").log(batch).build().unwrap()).await.unwrap();
    let superuser_sees = tables_with(&client, namespace.schema(), SECRET).await;
    assert_eq!(superuser_sees, ["profiles", "statehouse_log"], "the scan has to find what is there");
    let erased = named("erased").with("of", serde_json::json!({"user_id": 1}));
    store.commit(&plan("erase", Step::delete(&table, [1.into()]), erased)).await.unwrap();
    let at = store.find_operation(&acme, "erase").await.unwrap().unwrap().position.unwrap();
    let subject = EventSubject { resource: "profile".into(), key: "1".into() };
    let subjects = BlankSubjects::from([(acme.clone(), BTreeMap::from([(subject, at)]))]);
    let subjects = Arc::new(subjects);
    let heads = store.wait_log(&[], Duration::ZERO).await.unwrap();
    for (partition, through) in (0..).zip(heads) {
        let range = BlankRange { partition, after: 0, through, limit: 1_000, subjects: subjects.clone() };
        assert_eq!(store.blank_events(&range).await.unwrap().reached, through);
    }
    store.scrub().await.unwrap();
    assert_eq!(tables_with(&client, namespace.schema(), SECRET).await, Vec::<String>::new());
    let Position { partition, offset } = at;
    let kept = store.read_log(partition, offset - 1, 1).await.unwrap().records;
    assert_eq!(kept[0].events[0].name, "profile.erased");
    store.close().await;
    drop(namespace);
    client.batch_execute(&format!("drop owned by {role}; drop role {role}")).await.unwrap();
}
