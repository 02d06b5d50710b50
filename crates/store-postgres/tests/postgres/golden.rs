//! What people read: the statements that make a table, and those that a plan sends.
//!
//! When a change is meant, run with `STATEHOUSE_BLESS=1` and look at the difference.

use statehouse_store::guard::{Guard, column};
use statehouse_store::{Entry, EventTemplate, Migrate, Plan, Step, Store};
use statehouse_store_postgres::explain;

use crate::support::{Namespace, jobs, profiles, schema_of, tenant};

fn check(name: &str, actual: &str, schema: &str) {
    let actual = actual.replace(schema, "house");
    let path = format!("{}/tests/postgres/golden/{name}", env!("CARGO_MANIFEST_DIR"));
    if std::env::var("STATEHOUSE_BLESS").is_ok() {
        std::fs::write(&path, &actual).unwrap();
    }
    let expected = std::fs::read_to_string(&path).unwrap_or_default();
    assert!(actual == expected, "{name} differs; this is how it is now:\n{actual}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_statements_that_make_a_table() {
    let namespace = Namespace::new();
    let store = namespace.open().await;
    for (table, file) in [(profiles(), "profiles.sql"), (jobs(), "jobs.sql")] {
        let changes = store.migrate(&schema_of(&[&table]), Migrate::Show).await.unwrap();
        let statements: Vec<String> = changes
            .iter()
            .flat_map(|change| &change.statements)
            .map(|statement| format!("{statement};\n"))
            .collect();
        check(file, &statements.concat(), namespace.schema());
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_statements_of_a_plan_of_one_step() {
    let namespace = Namespace::new();
    let store = namespace.open().await;
    let plan = Plan::of(&tenant("acme"), "op-1")
        .step(
            Step::update(&profiles(), [42.into()])
                .guard(Guard::version(1).and(column("status").eq("ACTIVE")))
                .set("display_name", "Anna")
                .set("updated_at", statehouse_store::guard::now()),
        )
        .log(Entry::about("profile", "42").event(EventTemplate::named("profile.updated").with_row_of(0)))
        .build()
        .unwrap();
    check("update.txt", &store.explain((&plan).into()).to_string(), namespace.schema());
    assert_eq!(
        explain(&namespace.options, (&plan).into()),
        store.explain((&plan).into()),
        "a live store adds nothing"
    );
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_statements_of_a_plan_of_two_steps() {
    let namespace = Namespace::new();
    let store = namespace.open().await;
    let plan = Plan::of(&tenant("acme"), "op-2")
        .step(Step::insert(&profiles(), [43.into()]).set("display_name", "Bert"))
        .step(Step::assert(&profiles(), [42.into()]).guard(column("status").eq("ACTIVE")))
        .log(Entry::about("profile", "43").event(EventTemplate::named("profile.created")))
        .build()
        .unwrap();
    check("two_steps.txt", &store.explain((&plan).into()).to_string(), namespace.schema());
}
