//! Row-level security: the store works under it, and the runtime role cannot bypass it.

use futures_util::future::join_all;
use statehouse_store::{
    Address, Commit, Consistency, Migrate, Plan, Query, Random, ReadRequest, ReadResult, Resolution, Scan,
    Step, Store, StoreError, Tenant, Time, Value,
};
use statehouse_store_postgres::{PostgresOptions, PostgresStore};
use tokio_postgres::{Client, NoTls};

use crate::support::{Namespace, bump, counters, increment, jobs, logged, raw, schema_of, tenant, url};

/// A role that owns nothing, and a store under it with a row of each of two tenants.
struct Scene {
    /// How the store gets to the server.
    url: String,
    namespace: Namespace,
    role: String,
    store: PostgresStore,
}

impl Scene {
    async fn set() -> Scene {
        Scene::at(url()).await
    }

    async fn at(url: String) -> Scene {
        let role = format!("role_{:x}", Random::from_entropy().below(1 << 48));
        raw().await.batch_execute(&format!("create role {role} login password 'runtime'")).await.unwrap();
        let mut namespace = Namespace::at(&url);
        namespace.options.row_level_security = true;
        namespace.options.runtime_role = Some(role.clone());
        let table = counters("counters");
        let store = namespace.open_with(&[&table]).await;
        for name in ["acme", "bond"] {
            store.commit(&logged(&tenant(name), "create", "x", vec![increment(&table, "x")])).await.unwrap();
        }
        Scene { url, namespace, role, store }
    }

    /// A connection as the runtime role itself.
    async fn intruder(&self) -> Client {
        let mut config: tokio_postgres::Config = url().parse().unwrap();
        config.user(&self.role).password("runtime");
        let (client, connection) = config.connect(NoTls).await.unwrap();
        tokio::spawn(connection);
        client
    }

    fn role_url(&self) -> String {
        let config: tokio_postgres::Config = self.url.parse().unwrap();
        let host = match config.get_hosts().first() {
            Some(tokio_postgres::config::Host::Tcp(host)) => host.clone(),
            _ => "127.0.0.1".to_owned(),
        };
        let port = config.get_ports().first().copied().unwrap_or(5432);
        let database = config.get_dbname().unwrap_or("postgres");
        format!("postgres://{}:runtime@{host}:{port}/{database}?rls=on", self.role)
    }

    async fn clear(self) {
        let Scene { namespace, role, store, .. } = self;
        store.close().await;
        PostgresStore::erase(&namespace.options).await.unwrap();
        raw().await.batch_execute(&format!("drop owned by {role}; drop role {role}")).await.unwrap();
    }
}

/// A pooler may have taken the role that a session asked for, and run a later statement in another one's.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_lone_statement_does_nothing_under_another_role() {
    let scene = Scene::set().await;
    let plan = logged(&tenant("acme"), "alone", "x", vec![bump(&counters("counters"), "x")]);
    let explained = scene.store.explain((&plan).into());
    let [statement] = &explained.requests[..] else { panic!("{explained}") };
    let parameters = statement.parameters.iter().rev();
    let text = parameters.fold(statement.text.clone(), |text, (name, value)| text.replace(name, value));
    let client = raw().await;
    let answers = async |open: &str| {
        client.batch_execute(open).await.unwrap();
        let rows = client.simple_query(&text).await.unwrap();
        client.batch_execute("commit").await.unwrap();
        rows.iter().filter(|row| matches!(row, tokio_postgres::SimpleQueryMessage::Row(_))).count()
    };
    assert_eq!(answers("begin").await, 0);
    assert_eq!(answers(&format!("begin; set local role {}", scene.role)).await, 1);
    scene.clear().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_runtime_role_cannot_cross_tenants_by_any_verb() {
    let scene = Scene::set().await;
    let intruder = scene.intruder().await;
    let schema = scene.namespace.schema();
    let counters = format!("{schema}.counters");
    let log = format!("{schema}.statehouse_log");
    let record = |tenant: &str| {
        format!(
            "insert into {log} values (0, 1000, '{tenant}', 'forged', '', '', now(), '', 'applied', '[]')"
        )
    };
    for setting in ["", "set local statehouse.tenants = 'acme';"] {
        // What is to see nothing and change nothing.
        for text in [
            format!("select 1 from {counters} where tenant = 'bond'"),
            format!("select 1 from {counters} where tenant = 'bond' for update"),
            format!("update {counters} set n = 99 where tenant = 'bond' returning 1"),
            format!("delete from {counters} where tenant = 'bond' returning 1"),
            format!("select 1 from {log} where tenant = 'bond'"),
            format!("delete from {log} where tenant = 'bond' returning 1"),
            format!("update {log} set events = '[]' where tenant = 'bond' returning 1"),
        ] {
            intruder.batch_execute(&format!("begin; {setting}")).await.unwrap();
            let rows = intruder.query(&text, &[]).await.unwrap();
            assert!(rows.is_empty(), "{setting} {text}");
            intruder.batch_execute("commit").await.unwrap();
        }
        // What is to fail.
        for text in [
            format!("insert into {counters} (tenant, id) values ('bond', 'new')"),
            format!(
                "insert into {counters} (tenant, id) values ('bond', 'x') on conflict (tenant, id) do update set n = 99"
            ),
            record("bond"),
        ] {
            let outcome = intruder.batch_execute(&format!("begin; {setting} {text}")).await;
            let error = outcome.expect_err(&text);
            assert_eq!(
                error.code().map(tokio_postgres::error::SqlState::code),
                Some("42501"),
                "{setting} {text}: {error:?}"
            );
            intruder.batch_execute("rollback").await.unwrap();
        }
    }
    // With its own tenant's name set it can move its rows nowhere else.
    let words =
        format!("begin; set local statehouse.tenants = 'acme'; update {counters} set tenant = 'bond'");
    assert!(intruder.batch_execute(&words).await.is_err());
    intruder.batch_execute("rollback").await.unwrap();
    // What it may do, it can: the fence is not simply closed.
    intruder.batch_execute("begin; set local statehouse.tenants = 'acme'").await.unwrap();
    let rows = intruder.query(&format!("update {counters} set n = n returning tenant"), &[]).await.unwrap();
    let tenants: Vec<String> = rows.iter().map(|row| row.get(0)).collect();
    assert_eq!(tenants, ["acme"]);
    intruder.batch_execute("rollback").await.unwrap();
    // It can neither switch the fence off nor change the tables.
    for text in [
        format!("alter table {counters} disable row level security"),
        format!("alter table {counters} no force row level security"),
        format!("drop policy statehouse_tenants on {counters}"),
        format!("drop table {counters}"),
        format!("truncate {counters}"),
        format!("update {schema}.statehouse_tables set name = name"),
        format!("update {schema}.statehouse_meta set value = 2"),
        format!("update {log} set operation = ''"),
        "set row_security = off; select 1 from pg_class where false".to_owned(),
    ] {
        let outcome = intruder.batch_execute(&text).await;
        // Switching `row_security` off is allowed, and makes the next statement fail instead of seeing more.
        let rows = intruder.query(&format!("select 1 from {counters}"), &[]).await;
        assert!(outcome.is_err() || rows.is_err(), "{text}");
        intruder.batch_execute("reset row_security").await.unwrap();
    }
    drop(intruder);
    scene.clear().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_store_does_all_its_work_under_the_fence() {
    work_under_the_fence(url()).await;
}

/// A store at this URL does all that stores do, for two tenants.
pub async fn work_under_the_fence(url: String) {
    let scene = Scene::at(url).await;
    let table = counters("counters");
    // As the administrator who takes on the role, and as the role itself, which may migrate if nothing is to do.
    let mut direct = PostgresOptions::from_url(&scene.role_url()).unwrap();
    direct.schema = scene.namespace.schema().to_owned();
    let direct = PostgresStore::open(direct).await.unwrap();
    assert!(direct.migrate(&schema_of(&[&table]), Migrate::Apply).await.unwrap().is_empty());
    let refused = direct.migrate(&schema_of(&[&table, &counters("more")]), Migrate::Apply).await;
    assert!(matches!(refused, Err(StoreError::Schema { .. })), "{refused:?}");
    for (name, store) in [("switched", &scene.store), ("direct", &direct)] {
        let (acme, bond) = (tenant("acme"), tenant("bond"));
        let row = |tenant| Address::new(&table, tenant, [Value::from("x")]).unwrap();
        let before = store.get(&[row(&acme), row(&bond)], Consistency::Strong).await.unwrap();
        // Alone, in a batch, and of two tenants at once.
        let alone = logged(&acme, &format!("{name}-1"), "x", vec![bump(&table, "x")]);
        assert!(matches!(store.commit(&alone).await.unwrap(), Commit::Applied(_)));
        let new = format!("new-{name}");
        let steps = vec![
            bump(&table, "x"),
            Step::insert(&table, [new.as_str().into()]),
            Step::assert_absent(&table, ["y".into()]),
        ];
        let large = logged(&acme, &format!("{name}-2"), "x", steps);
        let remove = Step::delete(&table, [new.as_str().into()]);
        let (first, second, third) = tokio::join!(
            store.commit(&large),
            async { store.commit(&logged(&bond, &format!("{name}-3"), "x", vec![bump(&table, "x")])).await },
            async {
                store.commit(&Plan::of(&bond, "unlogged").step(increment(&table, "z")).build().unwrap()).await
            },
        );
        for outcome in [first, second, third] {
            assert!(matches!(outcome, Ok(Commit::Applied(_))), "{outcome:?}");
        }
        let removed = store.commit(&logged(&acme, &format!("{name}-4"), "x", vec![remove])).await;
        assert!(matches!(removed, Ok(Commit::Applied(_))), "{removed:?}");
        let after = store.get(&[row(&acme), row(&bond)], Consistency::Strong).await.unwrap();
        let n = |rows: &[Option<statehouse_store::Row>], index: usize| {
            rows[index].as_ref().unwrap().int("n").unwrap()
        };
        assert_eq!((n(&after, 0), n(&after, 1)), (n(&before, 0) + 2, n(&before, 1) + 1));
        // Reads of one tenant, walks over all, the log, and what is unknown.
        let query = Query::table(&table, &bond, ["x".into()]).unwrap();
        assert_eq!(store.query(&query).await.unwrap().rows.len(), 1);
        assert_eq!(store.scan(&Scan::all(&table)).await.unwrap().rows.len(), 3);
        assert_eq!(store.scan(&Scan::of(&table, &acme)).await.unwrap().rows.len(), 1);
        let resolved = store.resolve(&acme, &format!("{name}-never")).await.unwrap();
        assert_eq!(resolved, Resolution::Aborted);
        assert!(matches!(store.resolve(&acme, &format!("{name}-1")).await.unwrap(), Resolution::Applied(_)));
        for partition in 0..store.partitions() {
            let page = store.read_log(partition, 0, 100).await.unwrap();
            assert_eq!(page.records.len() as u64, page.head - (page.oldest - 1));
            store.trim_log(partition, 1).await.unwrap();
        }
    }
    // Statements that are transactions by themselves said in time for whom they work.
    let counts = direct.counts();
    assert!(counts.alone >= 2 && counts.compiled_faults == 0, "{counts:?}");
    direct.close().await;
    scene.clear().await;
}

#[tokio::test]
async fn looks_of_two_tenants_that_are_one_statement_never_see_each_others_rows() {
    look_together(url()).await;
}

/// Looks of several tenants at a store at this URL, which go as one statement. Needs a runtime of one thread.
pub async fn look_together(url: String) {
    let scene = Scene::at(url).await;
    let mut options = PostgresOptions::from_url(&scene.role_url()).unwrap();
    options.schema = scene.namespace.schema().to_owned();
    options.readers = 1;
    let direct = PostgresStore::open(options).await.unwrap();
    let table = counters("counters");
    let (acme, bond, empty) = (tenant("acme"), tenant("bond"), tenant("empty"));
    let own = logged(&acme, "more", "own", vec![increment(&table, "own")]);
    scene.store.commit(&own).await.unwrap();
    let owners = [&acme, &bond, &empty, &bond, &acme, &empty, &acme, &bond];
    let look = async |tenant: &Tenant| {
        let row = |id: &str| Address::new(&table, tenant, [Value::from(id)]).unwrap();
        let addresses = [row("x"), row("own")];
        let range = Query::table(&table, tenant, ["x".into()]).unwrap().limit(5).unwrap();
        direct.read_many(&[ReadRequest::Get(&addresses), ReadRequest::Query(&range)]).await.unwrap()
    };
    // A connection has to be there, or the first one would wait for it alone.
    look(&acme).await;
    let before = direct.counts().joined;
    // One has the only connection. The others wait until it has been answered, and are one statement then.
    let seen = join_all(owners.map(look)).await;
    assert_eq!(direct.counts().joined - before, 7);
    for (owner, seen) in owners.iter().zip(seen) {
        let mut rows = Vec::new();
        for seen in seen {
            match seen {
                ReadResult::Rows(found) => rows.extend(found.into_iter().flatten()),
                ReadResult::Value(_) => {}
                ReadResult::Page(page) => rows.extend(page.rows),
            }
        }
        assert!(rows.iter().all(|row| row.tenant() == *owner), "{owner}: {rows:?}");
        let expected = match owner.as_str() {
            "acme" => 3,
            "bond" => 2,
            _ => 0,
        };
        assert_eq!(rows.len(), expected, "{owner}: {rows:?}");
    }
    direct.close().await;
    scene.clear().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn workers_find_the_rows_of_all_tenants_under_the_fence() {
    let scene = Scene::set().await;
    let jobs = jobs();
    scene.store.migrate(&schema_of(&[&jobs]), Migrate::Apply).await.unwrap();
    let mut direct = PostgresOptions::from_url(&scene.role_url()).unwrap();
    direct.schema = scene.namespace.schema().to_owned();
    let direct = PostgresStore::open(direct).await.unwrap();
    for (name, due) in [("acme", 2), ("bond", 1), ("acme", 3)] {
        let step = Step::insert(&jobs, ["q".into(), due.into()]);
        let step = step.set("due_shard", 1).set("due_at", Time::from_millis(due));
        let commit = direct.commit(&Plan::of(&tenant(name), "unlogged").step(step).build().unwrap()).await;
        assert!(matches!(commit, Ok(Commit::Applied(_))), "{commit:?}");
    }
    let query = Query::all_tenants(&jobs, "due", [1.into()]).unwrap().limit(2).unwrap();
    for store in [&scene.store, &direct] {
        let page = store.query(&query).await.unwrap();
        let rest = store.query(&query.clone().after(page.next.clone().unwrap()).unwrap()).await.unwrap();
        let owners: Vec<&str> = page.rows.iter().chain(&rest.rows).map(|row| row.tenant().as_str()).collect();
        assert_eq!(owners, ["bond", "acme", "acme"]);
    }
    direct.close().await;
    scene.clear().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_role_that_passes_through_the_fence_is_refused() {
    let mut namespace = Namespace::new();
    namespace.options.row_level_security = true;
    let error = PostgresStore::open(namespace.options.clone()).await.unwrap_err();
    assert!(error.to_string().contains("row-level security does not bind it"), "{error}");
    namespace.options.runtime_role = Some("nobody_of_that_name".into());
    let error = PostgresStore::open(namespace.options.clone()).await.unwrap_err();
    assert!(error.to_string().contains("does not exist"), "{error}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn tables_that_were_there_before_are_fenced_too() {
    let mut namespace = Namespace::new();
    let table = counters("counters");
    namespace.open_with(&[&table]).await.close().await;
    let role = format!("role_{:x}", Random::from_entropy().below(1 << 48));
    let admin = raw().await;
    admin.batch_execute(&format!("create role {role}")).await.unwrap();
    namespace.options.row_level_security = true;
    namespace.options.runtime_role = Some(role.clone());
    let store = namespace.open_with(&[&table]).await;
    let commit = store.commit(&logged(&tenant("acme"), "op", "x", vec![increment(&table, "x")])).await;
    assert!(matches!(commit, Ok(Commit::Applied(_))), "{commit:?}");
    let text = "select count(*) from pg_class c join pg_namespace n on n.oid = c.relnamespace \
                where n.nspname = $1 and c.relrowsecurity and c.relforcerowsecurity";
    let fenced: i64 = admin.query_one(text, &[&namespace.schema()]).await.unwrap().get(0);
    assert_eq!(fenced, 2);
    store.close().await;
    PostgresStore::erase(&namespace.options).await.unwrap();
    admin.batch_execute(&format!("drop owned by {role}; drop role {role}")).await.unwrap();
}
