//! Looks of many callers at once: those that wait for a connection together are one statement, with the same results.

use std::sync::Arc;

use futures_util::future::{join, join_all, poll_immediate};
use statehouse_store::{
    Address, Migrate, ModelStore, Plan, Query, Random, ReadRequest, Step, Store, StoreError, Table, Tenant,
    Time, Type, Value,
};

use crate::support::{Namespace, counters, increment, logged, raw, schema_of, tenant};

fn entries() -> Arc<Table> {
    Table::named("entries")
        .partition("list", Type::Int)
        .sort("at", Type::Time)
        .sort("number", Type::Int)
        .optional("note", Type::Text)
        .build()
        .unwrap()
}

/// A look as a caller makes one up: a range or two, and perhaps rows.
struct Wish {
    queries: Vec<Query>,
    addresses: Vec<Address>,
}

impl Wish {
    fn random(random: &mut Random, entries: &Arc<Table>, counters: &Arc<Table>, tenant: &Tenant) -> Wish {
        let mut range = || {
            let list = random.below(12) as i64;
            let query = Query::table(entries, tenant, [list.into()]).unwrap();
            let query = query.limit(random.below(30) as usize + 1).unwrap();
            let query = if random.chance(0.5) { query.backward() } else { query };
            if random.chance(0.5) { query.from(at(random.below(50) as i64)).unwrap() } else { query }
        };
        let queries = vec![range(), range()];
        let row = |random: &mut Random| {
            Address::new(counters, tenant, [random.below(12).to_string().into()]).unwrap()
        };
        let addresses = if random.chance(0.5) { vec![row(random), row(random)] } else { Vec::new() };
        Wish { queries, addresses }
    }

    fn asks(&self) -> Vec<ReadRequest<'_>> {
        self.queries.iter().map(ReadRequest::Query).chain([ReadRequest::Get(&self.addresses)]).collect()
    }
}

fn at(seconds: i64) -> Time {
    Time::from_millis(1_000_000 + seconds * 1_000)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn callers_that_wait_together_each_get_their_own_answers() {
    let (namespace, entries, counters) = (Namespace::new(), entries(), counters("counters"));
    let store = namespace.open_with(&[&entries, &counters]).await;
    let model = ModelStore::new();
    model.migrate(&schema_of(&[&entries, &counters]), Migrate::Apply).await.unwrap();
    let tenants = [tenant("acme"), tenant("bond")];
    for (number, tenant) in tenants.iter().enumerate() {
        for list in 0..10_i64 {
            let entry = |number: i64| {
                let key = [list.into(), at(number * 7 % 50).into(), number.into()];
                Step::insert(&entries, key).set("note", format!("{tenant} {list}/{number}"))
            };
            let count = 60 - list * 6 - number as i64;
            let row = Step::insert(&counters, [list.to_string().into()]).set("n", list + 100 * number as i64);
            let plan = Plan::of(tenant, "fill").steps((0..count).map(entry)).step(row).build().unwrap();
            store.commit(&plan).await.unwrap();
            model.commit(&plan).await.unwrap();
        }
    }
    let caller = |number: u64| {
        let (store, model, tenants, entries, counters) = (&store, &model, &tenants, &entries, &counters);
        async move {
            let mut random = Random::seeded(number);
            for _ in 0..12 {
                let tenant = &tenants[random.below(2) as usize];
                let wish = Wish::random(&mut random, entries, counters, tenant);
                let seen = store.read_many(&wish.asks()).await.unwrap();
                assert_eq!(seen, model.read_many(&wish.asks()).await.unwrap(), "{:?}", wish.asks());
            }
        }
    };
    join_all((0..64).map(caller)).await;
    let counts = store.counts();
    assert!(counts.joined > 64, "{counts:?}");
    store.close().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn many_ranges_of_a_large_table_come_in_their_order() {
    let (namespace, entries, acme) = (Namespace::new(), entries(), tenant("acme"));
    let store = namespace.open_with(&[&entries]).await;
    let admin = raw().await;
    let schema = namespace.schema();
    // Written in an order that has nothing to do with that of the ranges, of which the server is then told.
    let fill = format!(
        "insert into {schema}.entries (tenant, list, at, number, note, version) \
         select 'acme', n % 60, 'epoch'::timestamptz + (n * 7919 % 30000) * interval '1 second', n, 'note', 1 \
         from generate_series(1, 60000::bigint) as n order by n * 104729 % 60001; analyze {schema}.entries"
    );
    admin.batch_execute(&fill).await.unwrap();
    let mut queries = Vec::new();
    for list in 0..60_i64 {
        for limit in [1, 20, 150] {
            let query = Query::table(&entries, &acme, [list.into()]).unwrap().limit(limit).unwrap();
            queries.push(query.clone().backward());
            queries.push(query);
        }
    }
    let asks: Vec<ReadRequest<'_>> = queries.iter().map(ReadRequest::Query).collect();
    let seen = store.read_many(&asks).await.unwrap();
    assert_eq!(seen.len(), queries.len());
    for (query, seen) in queries.iter().zip(seen) {
        let page = seen.into_page().unwrap();
        assert_eq!(page.rows.len(), query.page_limit());
        let places: Vec<(Time, i64)> =
            page.rows.iter().map(|row| (row.time("at").unwrap(), row.int("number").unwrap())).collect();
        let forward = |pair: &[(Time, i64)]| pair[0] < pair[1];
        let is_backward = query.clone().backward() == *query;
        assert!(places.windows(2).all(|pair| forward(pair) != is_backward), "{query:?}: {places:?}");
        assert_eq!(page, store.query(query).await.unwrap());
    }
    store.close().await;
}

/// Puts a view in the place of the counters: the row `bad` cannot be computed, and `held` waits for a lock that the
/// returned connection has.
async fn trap(schema: &str) -> tokio_postgres::Client {
    let admin = raw().await;
    let words = format!(
        "alter table {schema}.counters rename to counters_kept; \
         create function {schema}.trapped(id text, n bigint) returns bigint stable language plpgsql as $$ begin \
             if id = 'bad' then return 1 / 0; end if; \
             if id = 'held' then perform pg_advisory_xact_lock_shared(hashtext('{schema}')); end if; \
             return n; \
         end $$; \
         create view {schema}.counters as \
             select tenant, id, {schema}.trapped(id, n) as n, version from {schema}.counters_kept; \
         select pg_advisory_lock(hashtext('{schema}'))"
    );
    admin.batch_execute(&words).await.unwrap();
    admin
}

/// A store with one reading connection, and a row for each of these names.
async fn with_rows(namespace: &mut Namespace, names: &[&str]) -> (impl Store + use<>, Arc<Table>) {
    namespace.options.readers = 1;
    let table = counters("counters");
    let store = namespace.open_with(&[&table]).await;
    for name in names {
        let plan = logged(&tenant("acme"), name, name, vec![increment(&table, name)]);
        store.commit(&plan).await.unwrap();
    }
    (store, table)
}

async fn n_of(store: &impl Store, table: &Arc<Table>, name: &str) -> Result<Option<i64>, StoreError> {
    let addresses = [Address::new(table, &tenant("acme"), [Value::from(name)]).unwrap()];
    let seen = store.read_many(&[ReadRequest::Get(&addresses)]).await?;
    Ok(seen
        .into_iter()
        .flat_map(|seen| seen.into_rows().unwrap())
        .flatten()
        .next()
        .and_then(|row| row.int("n")))
}

#[tokio::test]
async fn a_failing_read_does_not_fail_the_reads_joined_with_it() {
    let mut namespace = Namespace::new();
    let (store, table) = with_rows(&mut namespace, &["held", "a", "bad", "b"]).await;
    let holder = trap(namespace.schema()).await;
    assert_eq!(n_of(&store, &table, "a").await.unwrap(), Some(1));
    let names = ["held", "a", "bad", "b", "missing", "a"];
    // The first has the only connection, so that all others wait, in this order. Then it is let go.
    let (answers, ()) = join(join_all(names.map(|name| n_of(&store, &table, name))), async {
        holder.batch_execute("select pg_advisory_unlock_all()").await.unwrap();
    })
    .await;
    for (name, answer) in names.iter().zip(&answers) {
        match *name {
            "bad" => assert!(matches!(answer, Err(StoreError::Corrupt { .. })), "{answer:?}"),
            "missing" => assert_eq!(answer, &Ok(None)),
            _ => assert_eq!(answer, &Ok(Some(1)), "{name}"),
        }
    }
    store.close().await;
}

#[tokio::test]
async fn a_cancelled_caller_does_not_affect_the_others() {
    let mut namespace = Namespace::new();
    let (store, table) = with_rows(&mut namespace, &["held", "a", "b"]).await;
    let holder = trap(namespace.schema()).await;
    assert_eq!(n_of(&store, &table, "a").await.unwrap(), Some(1));
    let mut held = Box::pin(n_of(&store, &table, "held"));
    let mut waits = Box::pin(n_of(&store, &table, "a"));
    let mut goes = Box::pin(n_of(&store, &table, "b"));
    // One has the connection, and two wait.
    for caller in [&mut held, &mut waits, &mut goes] {
        assert!(poll_immediate(caller).await.is_none());
    }
    drop(goes);
    drop(held);
    let (answer, ()) = join(waits, async {
        holder.batch_execute("select pg_advisory_unlock_all()").await.unwrap();
    })
    .await;
    assert_eq!(answer, Ok(Some(1)));
    // The connection is free again, and in order.
    for name in ["b", "held", "missing"] {
        let expected = (name != "missing").then_some(1);
        assert_eq!(n_of(&store, &table, name).await, Ok(expected), "{name}");
    }
    store.close().await;
    let closed = n_of(&store, &table, "a").await;
    assert!(matches!(closed, Err(StoreError::Unavailable { .. })), "{closed:?}");
}
