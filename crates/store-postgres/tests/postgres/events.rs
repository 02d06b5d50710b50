//! What stands in the log's events: rows of any width, and texts that look like what the server is to fill in; also in a log
//! whose events are of the type that it had at first.

use std::sync::Arc;

use futures_util::future::join_all;
use statehouse_store::guard::{column, now};
use statehouse_store::{Entry, EventTemplate, Plan, Step, Store, Table, Type};
use statehouse_store_postgres::PostgresStore;

use crate::support::{Namespace, raw, tenant};

/// More columns than a function takes arguments, so that a row's object is made of several.
const COLUMNS: usize = 90;
/// Texts that look like marks, and whatever could be mistaken for the end of a text.
const TEXTS: [&str; 6] = ["\"\"row\"\"", "\"\"now\"\"", "\\\"\"row\"\"", "}", "'", "\u{1}\u{2028}\\"];

fn wide() -> Arc<Table> {
    let table = Table::named("wide").partition("id", Type::Int).optional("at", Type::Time);
    let columns = (0..COLUMNS).map(|number| format!("c{number}"));
    columns.fold(table, |table, column| table.optional(&column, Type::Text)).build().unwrap()
}

/// A step that sets all columns to such texts, from one of them on.
fn filled(step: Step, from: usize) -> Step {
    (0..COLUMNS).fold(step.set("at", now()), |step, number| {
        step.set(&format!("c{number}"), TEXTS[(number + from) % TEXTS.len()])
    })
}

fn plan(operation: String, steps: Vec<Step>, takes_row: bool) -> Plan {
    let draft =
        TEXTS.iter().fold(EventTemplate::named("wide.changed"), |draft, text| draft.with(text, *text));
    let draft = draft.with("row", "is taken in");
    let draft = if takes_row { draft.with_row_of(0) } else { draft };
    let plan = Plan::of(&tenant("acme"), operation).steps(steps);
    plan.log(Entry::about("wide", "1").event(draft)).build().unwrap()
}

/// Commits plans at the same time. What each is told is what was stored.
async fn committed(store: &PostgresStore, plans: Vec<Plan>) {
    for commit in join_all(plans.iter().map(|plan| store.commit(plan))).await {
        let record = commit.unwrap().applied().unwrap().record.unwrap();
        let place = record.position.unwrap();
        let stored = store.read_log(place.partition, place.offset - 1, 1).await.unwrap().records;
        assert_eq!(stored, [record]);
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn events_are_stored_as_they_are_told() {
    const ROWS: i64 = 12;
    let table = wide();
    for kind in ["json", "jsonb"] {
        let namespace = Namespace::new();
        let store = namespace.open_with(&[&table]).await;
        let alter = format!("alter table {}.statehouse_log alter events type {kind}", namespace.schema());
        raw().await.batch_execute(&alter).await.unwrap();
        let insert = |id: i64| filled(Step::insert(&table, [id.into()]), id as usize);
        let update = |id: i64| Step::update(&table, [id.into()]).guard(column("c0").ne("none"));
        committed(&store, vec![plan("alone".into(), vec![insert(100)], true)]).await;
        committed(&store, vec![plan("changed".into(), vec![update(100).set("c1", "new")], true)]).await;
        let all = |what: &str, step: &dyn Fn(i64) -> Step| -> Vec<Plan> {
            (0..ROWS).map(|id| plan(format!("{what}-{id}"), vec![step(id)], true)).collect()
        };
        committed(&store, all("insert", &insert)).await;
        committed(&store, all("update", &|id| filled(update(id), id as usize + 1))).await;
        let two = vec![update(1).set("c1", "one"), update(2).set("c2", "other")];
        committed(&store, vec![plan("two".into(), two, true)]).await;
        let deletes = (0..ROWS).map(|id| Step::delete(&table, [id.into()])).collect();
        committed(&store, vec![plan("uniform".into(), deletes, false)]).await;
        let counts = store.counts();
        assert!(
            counts.alone > 0 && counts.alike > 0 && counts.uniform > 0 && counts.batches > 0,
            "{counts:?}"
        );
        assert_eq!(counts.compiled_faults, 0, "{counts:?}");
    }
}
