//! Plans of one step as one statement: they mean what the model says, and the usual ones do go that way.

use std::sync::{Arc, Mutex};
use std::time::Duration;

use anyhow::Result;
use async_trait::async_trait;
use statehouse_drills::differential;
use statehouse_drills::engines::Lab;
use statehouse_store::guard::{Guard, column, is_in, is_null, is_set, now, now_plus};
use statehouse_store::{Clock, Commit, Draft, Entry, Expr, Operand, Plan, Step, Store, Table, Time, Type};
use statehouse_store_postgres::{Counts, PostgresStore};

use crate::support::{Namespace, tenant};

/// A lab that remembers the stores it opened, to see how they settled their plans.
struct CountingLab {
    namespace: Namespace,
    opened: Mutex<Vec<Arc<PostgresStore>>>,
}

#[async_trait]
impl Lab for CountingLab {
    async fn open_at(&self, clock: Arc<dyn Clock>) -> Result<Arc<dyn Store>> {
        let options = self.namespace.options.clone().with_clock(clock);
        let store = Arc::new(PostgresStore::open(options).await?);
        self.opened.lock().unwrap().push(store.clone());
        Ok(store)
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn small_random_plans_mean_what_the_model_says() {
    let mut sum = Counts::default();
    for seed in 1..=6 {
        let lab = CountingLab { namespace: Namespace::new(), opened: Mutex::default() };
        differential::run(&lab, seed, 400, 2).await.unwrap();
        for store in lab.opened.lock().unwrap().iter() {
            let counts = store.counts();
            sum.alone += counts.alone;
            sum.left_open += counts.left_open;
            sum.compiled_faults += counts.compiled_faults;
            sum.batched += counts.batched;
        }
    }
    // It has shown something only if many plans did go as one statement, and did so for good and for ill.
    assert!(sum.alone > 300 && sum.left_open > 80, "{sum:?}");
    // The server refuses sums that overflow, nulls that are not allowed, and operations that were recorded before.
    assert!(sum.compiled_faults * 4 < sum.alone, "{sum:?}");
}

fn everything() -> Arc<Table> {
    Table::named("everything")
        .partition("id", Type::Int)
        .sort("at", Type::Time)
        .optional("text", Type::Text)
        .optional("int", Type::Int)
        .optional("bool", Type::Bool)
        .optional("bytes", Type::Bytes)
        .optional("time", Type::Time)
        .optional("json", Type::Json)
        .defaulted("count", Type::Int, 0)
        .index("by_text", &["text"], &["int"])
        .build()
        .unwrap()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_usual_shapes_go_as_one_statement() {
    let table = everything();
    let at = Time::from_millis(1_700_000_000_000);
    let key = || [1.into(), at.into()];
    let update = || Step::update(&table, key());
    let shapes = [
        Step::insert(&table, key())
            .set("text", "a")
            .set("int", 1)
            .set("bool", true)
            .set("bytes", vec![0, 255])
            .set("json", serde_json::json!({"a": [1, 2.5]}))
            .set("time", now()),
        update().guard(Guard::version(1)).set("int", column("int").add(1)),
        update().guard(column("text").eq("a").and(column("text").lt("b"))).set("text", "ab"),
        update().guard(is_in("text", ["a", "ab"])).set("text", column("text")),
        update().guard(is_null("bool").or(column("bool").eq(true))).set("bool", false),
        update().guard(is_set("bytes")).set("bytes", vec![1]).set("json", serde_json::json!([])),
        update().guard(column("time").le(now())).set("time", now_plus(Duration::from_secs(600))),
        update().guard(column("time").gt(now())).set("count", column("count").subtract(1)),
        Step::upsert(&table, key())
            .set("count", Expr::Add(Operand::ColumnOr("count".into(), 0.into()), 1.into())),
        Step::upsert(&table, [2.into(), at.into()]).guard(column("count").lt(5)).set("text", "new"),
        Step::delete(&table, key()).guard(column("count").ge(0)),
    ];
    for clock in [false, true] {
        let mut namespace = Namespace::new();
        if clock {
            namespace.options.clock = Some(Arc::new(statehouse_store::SystemClock));
        }
        let store = namespace.open_with(&[&table]).await;
        for (number, step) in shapes.iter().enumerate() {
            let entry =
                Entry::about("thing", "1").event(Draft::named("thing.changed").with("n", 1).with_row_of(0));
            let plan = Plan::of(&tenant("acme"), format!("op-{number}")).step(step.clone()).log(entry);
            let commit = store.commit(&plan.build().unwrap()).await.unwrap();
            assert!(matches!(commit, Commit::Applied(_)), "{step}: {commit:?}");
            // What was answered is what was stored, to the last digit of the row in the event.
            let record = commit.applied().unwrap().record.unwrap();
            let place = record.position.unwrap();
            let stored = store.read_log(place.partition, place.offset - 1, 1).await.unwrap().records;
            assert_eq!(stored, [record], "{step}");
        }
        let counts = store.counts();
        assert_eq!((counts.alone, counts.batches), (shapes.len() as u64, 0), "{counts:?}");
    }
}
