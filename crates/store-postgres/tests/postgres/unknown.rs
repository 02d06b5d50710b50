//! Connections that break around a commit: the store says that it does not know, and then finds out.

use statehouse_store::{
    Address, Commit, Consistency, Entry, EventTemplate, Migrate, Plan, Resolution, Step, Store, StoreError,
    Table, Tenant,
};
use statehouse_store_postgres::{PostgresOptions, PostgresStore};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use crate::proxy::{Cut, Proxy};
use crate::support::{Namespace, counters, increment, logged, schema_of, tenant};

struct Scene {
    _namespace: Namespace,
    proxy: Proxy,
    store: PostgresStore,
    /// Past the proxy.
    witness: PostgresStore,
    table: Arc<Table>,
    acme: Tenant,
}

impl Scene {
    async fn set() -> Scene {
        let (namespace, proxy, table) = (Namespace::new(), Proxy::start().await, counters("counters"));
        let witness = namespace.open_with(&[&table]).await;
        let store = PostgresStore::open(proxy.options(&namespace.options)).await.unwrap();
        let scene = Scene { _namespace: namespace, proxy, store, witness, table, acme: tenant("acme") };
        // Connections and prepared statements are there before anything is cut.
        for plan in [scene.small("warm-1"), scene.large("warm-2")] {
            scene.store.commit(&plan).await.unwrap();
        }
        scene
    }

    /// A plan that goes as one statement.
    fn small(&self, operation: &str) -> Plan {
        logged(&self.acme, operation, "a", vec![increment(&self.table, "a")])
    }

    /// A plan that is decided on locked rows.
    fn large(&self, operation: &str) -> Plan {
        let steps = vec![increment(&self.table, "a"), increment(&self.table, "b")];
        logged(&self.acme, operation, "a", steps)
    }

    async fn count(&self) -> i64 {
        let address = Address::new(&self.table, &self.acme, ["a".into()]).unwrap();
        let rows = self.witness.get(&[address], Consistency::Strong).await.unwrap();
        rows[0].as_ref().unwrap().int("n").unwrap()
    }

    async fn cut(&self, cut: Cut, plan: &Plan) {
        self.proxy.set(cut);
        let outcome = self.store.commit(plan).await;
        assert!(matches!(outcome, Err(StoreError::OutcomeUnknown { .. })), "{outcome:?}");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_commit_that_never_arrived_is_fenced_by_resolving() {
    let scene = Scene::set().await;
    for plan in [scene.small("op-1"), scene.large("op-2")] {
        scene.cut(Cut::BeforeCommit, &plan).await;
        let resolution = scene.store.resolve(&scene.acme, plan.operation()).await.unwrap();
        assert_eq!(resolution, Resolution::Aborted);
        assert_eq!(scene.store.commit(&plan).await.unwrap(), Commit::Fenced);
    }
    assert_eq!(scene.count().await, 2);
    assert_eq!(scene.proxy.achieved.before.load(Ordering::Relaxed), 2);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_commit_that_was_done_is_learned_by_resolving() {
    let scene = Scene::set().await;
    for (plan, expected) in [(scene.small("op-1"), 3), (scene.large("op-2"), 4)] {
        scene.cut(Cut::AfterCommit, &plan).await;
        let Resolution::Applied(record) = scene.store.resolve(&scene.acme, plan.operation()).await.unwrap()
        else {
            panic!("it was applied")
        };
        assert_eq!(record.operation, plan.operation());
        assert_eq!(record.events[0].data["row"]["n"], expected);
        assert_eq!(scene.count().await, expected);
    }
    assert_eq!(scene.proxy.achieved.after.load(Ordering::Relaxed), 2);
}

/// Nothing was refused: a pooler that lost the server knows as little as the client.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_pooler_that_has_lost_the_server_has_not_said_no() {
    let scene = Scene::set().await;
    for (plan, expected) in [(scene.small("op-1"), 3), (scene.large("op-2"), 4)] {
        scene.cut(Cut::Disowned, &plan).await;
        let resolution = scene.store.resolve(&scene.acme, plan.operation()).await.unwrap();
        assert!(matches!(resolution, Resolution::Applied(_)), "{resolution:?}");
        assert_eq!(scene.count().await, expected);
    }
    // Without a record nothing would show that it was done, if it were done again.
    let unlogged = Plan::of(&scene.acme, "unlogged").step(increment(&scene.table, "a")).build().unwrap();
    scene.cut(Cut::Disowned, &unlogged).await;
    assert_eq!(scene.count().await, 5);
    assert_eq!(scene.proxy.achieved.after.load(Ordering::Relaxed), 3);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn committing_again_applies_it_once() {
    let scene = Scene::set().await;
    let plans = [scene.small("op-1"), scene.large("op-2"), scene.small("op-3"), scene.large("op-4")];
    for (number, plan) in plans.iter().enumerate() {
        let arrived = number >= 2;
        scene.cut(if arrived { Cut::AfterCommit } else { Cut::BeforeCommit }, plan).await;
        let Commit::Applied(applied) = scene.store.commit(plan).await.unwrap() else {
            panic!("it can be applied")
        };
        assert_eq!(applied.repeated, arrived);
        assert_eq!(scene.count().await, 3 + i64::try_from(number).unwrap());
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_refusal_that_rests_on_an_unknown_outcome_is_not_given() {
    let scene = Scene::set().await;
    // Both wait together: the second insert is refused only if the first is applied.
    let insert = |operation: &str| {
        let steps = vec![Step::insert(&scene.table, ["new".into()]), increment(&scene.table, "a")];
        logged(&scene.acme, operation, "new", steps)
    };
    let (first, second, third) = (insert("op-1"), insert("op-2"), scene.large("op-0"));
    scene.proxy.set(Cut::Never);
    // The first to come keeps the writer busy while the others gather.
    let busy = scene.store.commit(&third);
    let (busy, first_outcome, second_outcome) = tokio::join!(
        async {
            let outcome = busy.await;
            scene.proxy.set(Cut::BeforeCommit);
            outcome
        },
        scene.store.commit(&first),
        scene.store.commit(&second),
    );
    busy.unwrap();
    match (first_outcome, second_outcome) {
        (Err(StoreError::OutcomeUnknown { .. }), Err(StoreError::Unavailable { .. })) => {}
        // They did not gather, or the cut came too late for them: then both answers are certain.
        (Ok(Commit::Applied(_)), Ok(Commit::Refused(_))) => {}
        (Err(StoreError::OutcomeUnknown { .. }), Ok(Commit::Applied(_))) => {}
        (Ok(Commit::Applied(_)), Err(StoreError::OutcomeUnknown { .. })) => {}
        other => panic!("{other:?}"),
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_idle_connection_that_broke_is_replaced_unnoticed() {
    let scene = Scene::set().await;
    for number in 0..3 {
        scene.proxy.cut_all();
        let outcome = scene.store.commit(&scene.large(&format!("op-{number}"))).await;
        assert!(matches!(outcome, Ok(Commit::Applied(_))), "{outcome:?}");
        let rows = scene.store.get(&[], Consistency::Strong).await.unwrap();
        assert!(rows.is_empty());
    }
    assert_eq!(scene.count().await, 5);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_server_that_lets_in_and_says_nothing_is_not_waited_for() {
    let silent = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let port = silent.local_addr().unwrap().port();
    tokio::spawn(async move {
        let mut guests = Vec::new();
        while let Ok(guest) = silent.accept().await {
            guests.push(guest);
        }
    });
    let url = format!("postgres://user@127.0.0.1:{port}/nothing?sslmode=disable&connect_timeout=1");
    let opened = PostgresStore::open(PostgresOptions::from_url(&url).unwrap()).await;
    assert!(matches!(opened, Err(StoreError::Unavailable { .. })), "{opened:?}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_server_that_falls_silent_leaves_an_unknown_outcome_and_no_waiting_caller() {
    let (proxy, namespace) = (Proxy::start().await, Namespace::new());
    let table = counters("counter");
    let mut options = proxy.options(&namespace.options);
    options.statement_timeout = Duration::from_millis(100);
    let store = PostgresStore::open(options).await.unwrap();
    store.migrate(&schema_of(&[&table]), Migrate::Apply).await.unwrap();
    let plan = |operation: &str| {
        let step = Step::insert(&table, [operation.into()]);
        let entry = Entry::about("counter", operation).event(EventTemplate::named("counter.begun"));
        Plan::of(&tenant("acme"), operation).step(step).log(entry).build().unwrap()
    };
    store.commit(&plan("heard")).await.unwrap();
    proxy.set(Cut::Silence);
    let outcome = store.commit(&plan("unheard")).await;
    let Err(StoreError::OutcomeUnknown { why, .. }) = &outcome else { panic!("{outcome:?}") };
    assert!(why.contains("no answer for 5.1s"), "{why}");
    let resolved = store.resolve(&tenant("acme"), "unheard").await.unwrap();
    assert!(matches!(resolved, Resolution::Applied(_)), "{resolved:?}");
    assert!(matches!(store.commit(&plan("heard again")).await, Ok(Commit::Applied(_))));
}
