//! The live tables: made once however many ask, whatever their columns are called, refused when they are not ours.

use std::sync::Arc;

use statehouse_store::{
    Address, Commit, Consistency, Migrate, Plan, Query, Schema, Step, Store, StoreError, Table, Type,
};
use statehouse_store_postgres::PostgresStore;
use tokio::task::JoinSet;

use crate::support::{Namespace, counters, profiles, raw, schema_of, tenant};

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn many_servers_may_start_at_once() {
    start_at_once(&Namespace::new()).await;
}

/// Of several that open and migrate a store at the same time, one makes the tables.
pub async fn start_at_once(namespace: &Namespace) {
    let mut tasks = JoinSet::new();
    for _ in 0..6 {
        let options = namespace.options.clone();
        tasks.spawn(async move {
            let store = PostgresStore::open(options).await.unwrap();
            store
                .migrate(&schema_of(&[&profiles(), &counters("counters")]), Migrate::Apply)
                .await
                .unwrap()
                .len()
        });
    }
    let mut made = Vec::new();
    while let Some(done) = tasks.join_next().await {
        made.push(done.unwrap());
    }
    made.sort_unstable();
    assert_eq!(made, [0, 0, 0, 0, 0, 2]);
}

/// What is said of a table when it is made: no index looks for duplicates, which it cannot have, and the log is packed with
/// lz4 where the server can.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn indexes_and_the_log_are_made_for_what_is_kept_in_them() {
    let namespace = Namespace::new();
    namespace.open_with(&[&profiles()]).await;
    let client = raw().await;
    let text = "select count(*), count(*) filter (where 'deduplicate_items=off' = any (i.reloptions)) \
                from pg_index x join pg_class i on i.oid = x.indexrelid join pg_class t on t.oid = x.indrelid \
                where t.relname = 'profiles' and t.relnamespace = to_regnamespace($1)";
    let row = client.query_one(text, &[&namespace.schema()]).await.unwrap();
    assert_eq!((row.get::<_, i64>(0), row.get::<_, i64>(1)), (2, 2));
    let text = "select exists (select from pg_settings where name = 'default_toast_compression' and 'lz4' = any (enumvals))";
    if client.query_one(text, &[]).await.unwrap().get(0) {
        let text = "select attcompression::text from pg_attribute where attname = 'events' and attrelid = \
                    (select oid from pg_class where relname = 'statehouse_log' and relnamespace = to_regnamespace($1))";
        let row = client.query_one(text, &[&namespace.schema()]).await.unwrap();
        assert_eq!(row.get::<_, String>(0), "l");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn every_word_that_the_server_knows_can_name_a_column() {
    let namespace = Namespace::new();
    let text = "select word from pg_get_keywords() where word ~ '^[a-z][a-z0-9_]*$' and length(word) <= 48 order by 1";
    let words: Vec<String> =
        raw().await.query(text, &[]).await.unwrap().iter().map(|row| row.get(0)).collect();
    assert!(words.len() > 400, "{}", words.len());
    let words: Vec<String> =
        words.into_iter().filter(|word| !["tenant", "version", "key"].contains(&word.as_str())).collect();
    // A row holds so many columns at most, so there are several tables; their names are words too.
    for (number, words) in words.chunks(60).enumerate() {
        let name = ["user", "order", "table", "select", "group", "end", "check", "default", "limit"][number];
        let mut builder = Table::named(name).partition("key", Type::Int);
        for word in words {
            builder = builder.optional(word, Type::Int);
        }
        let table = builder.index("by", &[words[0].as_str()], &[words[1].as_str()]).build().unwrap();
        let store = namespace.open_with(&[&table]).await;
        let acme = tenant("acme");
        let fill = |step: Step| words.iter().fold(step, |step, word| step.set(word, 7));
        for (operation, step) in [
            ("insert", fill(Step::insert(&table, [1.into()]))),
            ("update", fill(Step::update(&table, [1.into()]))),
        ] {
            // Alone, and together with another step.
            for steps in [vec![step.clone()], vec![step.clone(), Step::upsert(&table, [2.into()])]] {
                let plan = Plan::of(&acme, format!("{name} {operation} {}", steps.len())).steps(steps);
                let commit = store.commit(&plan.build().unwrap()).await.unwrap();
                let inserted_before = operation == "insert" && matches!(commit, Commit::Refused(_));
                assert!(inserted_before || matches!(commit, Commit::Applied(_)), "{commit:?}");
            }
        }
        let address = Address::new(&table, &acme, [1.into()]).unwrap();
        let rows = store.get(&[address], Consistency::Strong).await.unwrap();
        assert!(words.iter().all(|word| rows[0].as_ref().unwrap().int(word) == Some(7)));
        let query = Query::index(&table, "by", &acme, [7.into()]).unwrap();
        assert_eq!(store.query(&query).await.unwrap().rows.len(), 1);
        assert_eq!(store.counts().compiled_faults, 0);
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_index_that_was_built_beforehand_is_taken_over() {
    let namespace = Namespace::new();
    let store = namespace.open_with(&[&notes(false)]).await;
    let wanted = schema_of(&[&notes(true)]);
    let shown = store.migrate(&wanted, Migrate::Show).await.unwrap();
    let statement = shown[0].statements[0].replace("create index", "create index concurrently");
    raw().await.batch_execute(&statement).await.unwrap();
    assert_eq!(store.migrate(&wanted, Migrate::Apply).await.unwrap().len(), 1);
    assert_eq!(store.migrate(&wanted, Migrate::Apply).await.unwrap().len(), 0);
}

/// A table of notes, with the index or without it.
fn notes(indexed: bool) -> Arc<Table> {
    let builder = Table::named("notes").partition("id", Type::Int).optional("topic", Type::Text);
    let builder = if indexed { builder.index("by_topic", &["topic"], &[]) } else { builder };
    builder.build().unwrap()
}

/// Inserts a note.
async fn write_note(store: &PostgresStore, id: i64) {
    let step = Step::insert(&notes(false), [id.into()]).set("topic", "a");
    let plan = Plan::of(&tenant("acme"), format!("write {id}")).step(step).build().unwrap();
    assert!(matches!(store.commit(&plan).await.unwrap(), Commit::Applied(_)));
}

/// Whether the index is there, and whether it is valid.
async fn index_state(namespace: &Namespace) -> Option<bool> {
    let text = "select x.indisvalid from pg_index x join pg_class c on c.oid = x.indexrelid \
                where c.relname = 'notes_by_topic_idx' and c.relnamespace = to_regnamespace($1)";
    raw().await.query_opt(text, &[&namespace.schema()]).await.unwrap().map(|row| row.get(0))
}

/// Waits until the index is being built, and returns the process that does it.
async fn until_built_by(namespace: &Namespace) -> i32 {
    let text = "select pid from pg_stat_activity where state = 'active' and query like \
                'create index concurrently notes_by_topic_idx on ' || $1 || '.%'";
    loop {
        if let Some(row) = raw().await.query_opt(text, &[&namespace.schema()]).await.unwrap() {
            return row.get(0);
        }
        tokio::task::yield_now().await;
    }
}

/// A transaction that has written a note and does not end: no index of the table is complete before it has.
async fn open_transaction(namespace: &Namespace) -> tokio_postgres::Client {
    let client = raw().await;
    let insert =
        format!("begin; insert into {}.notes (tenant, id) values ('acme', 1000)", namespace.schema());
    client.batch_execute(&insert).await.unwrap();
    client
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_index_is_built_beside_writers() {
    let namespace = Namespace::new();
    let store = Arc::new(namespace.open_with(&[&notes(false)]).await);
    write_note(&store, 1).await;
    let wanted = schema_of(&[&notes(true)]);
    let shown = store.migrate(&wanted, Migrate::Show).await.unwrap();
    assert!(shown[0].statements[0].starts_with("create index concurrently "), "{shown:?}");
    let transaction = open_transaction(&namespace).await;
    let building = tokio::spawn({
        let (store, wanted) = (store.clone(), wanted.clone());
        async move { store.migrate(&wanted, Migrate::Apply).await }
    });
    until_built_by(&namespace).await;
    // With an index that is built in a transaction, this would wait for the other one.
    write_note(&store, 2).await;
    assert_eq!(index_state(&namespace).await, Some(false));
    transaction.batch_execute("commit").await.unwrap();
    assert_eq!(building.await.unwrap().unwrap().len(), 1);
    assert_eq!(index_state(&namespace).await, Some(true));
    assert_eq!(store.migrate(&wanted, Migrate::Apply).await.unwrap().len(), 0);
    let query = Query::index(&notes(true), "by_topic", &tenant("acme"), ["a".into()]).unwrap();
    assert_eq!(store.query(&query).await.unwrap().rows.len(), 2);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_index_whose_build_was_killed_is_built_again() {
    let namespace = Namespace::new();
    let store = Arc::new(namespace.open_with(&[&notes(false)]).await);
    write_note(&store, 1).await;
    let wanted = schema_of(&[&notes(true)]);
    let transaction = open_transaction(&namespace).await;
    let building = tokio::spawn({
        let (store, wanted) = (store.clone(), wanted.clone());
        async move { store.migrate(&wanted, Migrate::Apply).await }
    });
    let builder = until_built_by(&namespace).await;
    raw().await.execute("select pg_terminate_backend($1)", &[&builder]).await.unwrap();
    let error = building.await.unwrap().unwrap_err().to_string();
    assert!(error.contains("index by_topic of table notes") && error.contains("migrate again"), "{error}");
    transaction.batch_execute("rollback").await.unwrap();
    assert_eq!(index_state(&namespace).await, Some(false));
    // The table is recorded without it, so no query counts on it.
    assert_eq!(store.migrate(&wanted, Migrate::Show).await.unwrap().len(), 1);
    assert_eq!(store.migrate(&wanted, Migrate::Apply).await.unwrap().len(), 1);
    assert_eq!(index_state(&namespace).await, Some(true));
    assert_eq!(store.migrate(&wanted, Migrate::Apply).await.unwrap().len(), 0);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn servers_that_start_at_once_build_an_index_once() {
    let namespace = Namespace::new();
    let store = namespace.open_with(&[&notes(false)]).await;
    write_note(&store, 1).await;
    let mut tasks = JoinSet::new();
    for _ in 0..4 {
        let options = namespace.options.clone();
        tasks.spawn(async move {
            let store = PostgresStore::open(options).await.unwrap();
            store.migrate(&schema_of(&[&notes(true)]), Migrate::Apply).await.unwrap()
        });
    }
    while let Some(done) = tasks.join_next().await {
        assert!(done.unwrap().len() <= 1);
    }
    assert_eq!(index_state(&namespace).await, Some(true));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_store_of_a_later_format_is_refused() {
    let namespace = Namespace::new();
    namespace.open().await.close().await;
    let schema = namespace.schema();
    raw()
        .await
        .batch_execute(&format!("update {schema}.statehouse_meta set value = 99 where name = 'format'"))
        .await
        .unwrap();
    let error = PostgresStore::open(namespace.options.clone()).await.unwrap_err();
    assert!(
        matches!(&error, StoreError::Schema { .. }) && error.to_string().contains("format 99"),
        "{error}"
    );
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_number_of_partitions_is_fixed() {
    let mut namespace = Namespace::new();
    namespace.options.partitions = Some(4);
    assert_eq!(namespace.open().await.partitions(), 4);
    namespace.options.partitions = None;
    assert_eq!(namespace.open().await.partitions(), 4);
    namespace.options.partitions = Some(8);
    let error = PostgresStore::open(namespace.options.clone()).await.unwrap_err();
    assert!(error.to_string().contains("4 partitions, which cannot become 8"), "{error}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_failed_migration_leaves_nothing_behind() {
    let namespace = Namespace::new();
    let store = namespace.open().await;
    // Two indexes whose relations would have one name: the second fails, and the first goes with it.
    let clash = |table: &str, index: &str| {
        Table::named(table)
            .partition("id", Type::Int)
            .required("x", Type::Int)
            .index(index, &["x"], &[])
            .build()
            .unwrap()
    };
    let tables: [Arc<Table>; 2] = [clash("a", "b_c"), clash("a_b", "c")];
    let error = store.migrate(&Schema::new(tables).unwrap(), Migrate::Apply).await.unwrap_err();
    assert!(
        matches!(&error, StoreError::Schema { .. }) && error.to_string().contains("a_b_c_idx"),
        "{error}"
    );
    let text = "select count(*) from pg_tables where schemaname = $1 and tablename not like 'statehouse%'";
    let left: i64 = raw().await.query_one(text, &[&namespace.schema()]).await.unwrap().get(0);
    assert_eq!(left, 0);
}
