//! Plans of one step as one statement: they mean what the model says, and the usual ones do go that way.

use std::pin::Pin;
use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex};
use std::task::Poll;
use std::time::Duration;

use anyhow::Result;
use async_trait::async_trait;
use statehouse_drills::differential;
use statehouse_drills::engines::TestNamespace;
use statehouse_store::guard::{Guard, column, is_in, is_null, is_set, now, now_plus};
use statehouse_store::plan::PlanBuilder;
use statehouse_store::{
    Address, Applied, Clock, Commit, Consistency, Entry, EventTemplate, Expr, ManualClock, Migrate,
    ModelStore, Operand, Plan, Step, Store, StoreError, Table, Time, Type, eval,
};
use statehouse_store_postgres::{PostgresStore, StoreCounts};

use crate::proxy::{Cut, Proxy};
use crate::support::{Namespace, raw, schema_of, tenant};

/// A lab that remembers the stores it opened, to see how they settled their plans.
struct CountingLab {
    namespace: Namespace,
    opened: Mutex<Vec<Arc<PostgresStore>>>,
}

#[async_trait]
impl TestNamespace for CountingLab {
    async fn open_at(&self, clock: Arc<dyn Clock>) -> Result<Arc<dyn Store>> {
        let options = self.namespace.options.clone().with_clock(clock);
        let store = Arc::new(PostgresStore::open(options).await?);
        self.opened.lock().unwrap().push(store.clone());
        Ok(store)
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn small_random_plans_mean_what_the_model_says() {
    let mut sum = StoreCounts::default();
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
        .optional("later", Type::Time)
        .optional("json", Type::Json)
        .optional("float", Type::Float)
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
            .set("count", Expr::Add(Operand::Coalesce("count".into(), 0.into()), 1.into())),
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
            let entry = Entry::about("thing", "1")
                .event(EventTemplate::named("thing.changed").with("n", 1).with_row_of(0));
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

type Pending = Pin<Box<dyn Future<Output = Result<Commit, StoreError>>>>;

/// Begins a commit: when this returns, the plan is under way, or in the queue if another one is.
async fn begun(store: &Arc<PostgresStore>, plan: Plan) -> Pending {
    let store = store.clone();
    let mut pending: Pending = Box::pin(async move { store.commit(&plan).await });
    let first = std::future::poll_fn(|context| Poll::Ready(pending.as_mut().poll(context))).await;
    assert!(first.is_pending());
    pending
}

/// Plans of one shape that wait together: for some the guard holds, for some it does not, and some have no row. Each
/// outcome, and each record, is what the model says.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn plans_of_one_shape_mean_together_what_they_mean_alone() {
    const ROWS: i64 = 40;
    const BLOCKED: i64 = 1000;
    let table = everything();
    let at = Time::from_millis(1_700_000_000_000);
    let acme = tenant("acme");
    let row = |id: i64| Step::update(&table, [id.into(), at.into()]);
    let shapes: [&dyn Fn(i64) -> Step; 9] = [
        &|id| row(id).guard(column("count").lt(id % 7)).set("int", column("int").add(id)),
        &|id| row(id).guard(column("text").gt(format!("t{}", id % 5))).set("time", now()),
        &|id| row(id).guard(column("time").le(now())).set("time", now_plus(Duration::from_secs(600))),
        &|id| row(id).guard(is_in("count", [1, 2, 3])).set("json", serde_json::json!({"id": id})),
        &|id| {
            row(id)
                .guard(is_set("int").and(Guard::version(1).or(column("bool").eq(id % 2 == 0))))
                .set("bool", true)
        },
        &|id| row(id).set("bytes", vec![id as u8, 0, 255]).set("text", column("text")),
        &|id| Step::delete(&table, [id.into(), at.into()]).guard(column("count").ne(id % 4)),
        // Two of these rows are there already, so that none of them goes with the others.
        &|id| Step::insert(&table, [(id + ROWS - 2).into(), at.into()]).set("int", id),
        &|id| {
            Step::insert(&table, [(id + ROWS).into(), at.into()])
                .set("int", Operand::Coalesce("int".into(), id.into()))
                .set("count", Expr::Add(Operand::Coalesce("count".into(), id.into()), 1.into()))
                .set("text", format!("it's {id}"))
                .set("bytes", vec![id as u8, 0, 255])
                .set("json", serde_json::json!({"id": id, "half": id as f64 / 2.0}))
                .set("time", now_plus(Duration::from_secs(60)))
        },
    ];
    // Behind a pooler the transaction has to be told what the connection could not be set to.
    let pooler = Proxy::start().await;
    pooler.set(Cut::Settings);
    let ways = [false, true].into_iter().flat_map(|pooled| shapes.iter().map(move |shape| (pooled, shape)));
    for (number, (pooled, shape)) in ways.enumerate() {
        let clock = Arc::new(ManualClock::at(at));
        let model = ModelStore::with(clock.clone(), 4);
        let mut namespace = Namespace::new();
        if pooled {
            namespace.options = pooler.options(&namespace.options);
        }
        namespace.options.clock = Some(clock);
        namespace.options.partitions = Some(4);
        namespace.options.writers = 1;
        let store = Arc::new(namespace.open_with(&[&table]).await);
        model.migrate(&schema_of(&[&table]), Migrate::Apply).await.unwrap();
        for id in 0..ROWS {
            let insert = Step::insert(&table, [id.into(), at.into()])
                .set("count", id % 5)
                .set("int", id)
                .set("text", format!("t{}", id % 9))
                .set("time", at);
            let plan = Plan::of(&acme, format!("create-{id}")).step(insert).build().unwrap();
            model.commit(&plan).await.unwrap();
            store.commit(&plan).await.unwrap();
        }
        let blocked = Step::insert(&table, [BLOCKED.into(), at.into()]);
        store.commit(&Plan::of(&acme, "blocked").step(blocked).build().unwrap()).await.unwrap();
        let holder = raw().await;
        let hold =
            format!("begin; select from {}.everything where id = {BLOCKED} for update", namespace.schema());
        holder.batch_execute(&hold).await.unwrap();
        // It waits for the row, and all others for it.
        let waiting = Plan::of(&acme, "waiting").step(row(BLOCKED).set("int", 1)).build().unwrap();
        let waiting = begun(&store, waiting).await;
        let (mut running, mut expected) = (Vec::new(), Vec::new());
        // Two rows are not there.
        for id in 0..ROWS + 2 {
            let event = EventTemplate::named("thing.changed").with("n", id).with_row_of(0);
            let plan = Plan::of(&acme, format!("op-{id}")).step(shape(id));
            let plan = plan.log(Entry::about("thing", id.to_string()).event(event)).build().unwrap();
            expected.push(model.commit(&plan).await.unwrap());
            running.push(begun(&store, plan).await);
        }
        holder.batch_execute("rollback").await.unwrap();
        waiting.await.unwrap();
        for (id, running) in running.into_iter().enumerate() {
            let commit = running.await.unwrap();
            let mut told = commit.clone();
            let mut wanted = expected[id].clone();
            // Where it stands in its partition depends on who came first.
            for commit in [&mut told, &mut wanted] {
                if let Commit::Applied(applied) = commit {
                    applied.record.iter_mut().for_each(|record| record.position = None);
                }
            }
            assert_eq!(told, wanted, "shape {number}, row {id}");
            if let Some(record) = commit.applied().and_then(|applied| applied.record) {
                let place = record.position.unwrap();
                let stored = store.read_log(place.partition, place.offset - 1, 1).await.unwrap().records;
                assert_eq!(stored, [record], "shape {number}, row {id}");
            }
        }
        let (counts, applied) = (store.counts(), expected.iter().filter(|c| matches!(c, Commit::Applied(_))));
        let fails = shape(0).to_string().starts_with("insert") && applied.clone().count() < expected.len();
        let alike = if fails { 0 } else { applied.count() as u64 };
        assert_eq!(
            (counts.alike, counts.compiled_faults),
            (alike, fails.into()),
            "shape {number}: {counts:?}"
        );
    }
    assert!(pooler.achieved.elsewhere.load(Ordering::Relaxed) >= shapes.len() as u64);
}

/// A store in which plans wait for one another until a row is given free.
struct Held {
    store: Arc<PostgresStore>,
    holder: tokio_postgres::Client,
    waiting: Pending,
}

impl Held {
    const BLOCKED: i64 = 1000;

    async fn of(store: &Arc<PostgresStore>, namespace: &Namespace, table: &Arc<Table>) -> Held {
        let (acme, key) = (tenant("acme"), || [Held::BLOCKED.into(), Time::from_micros(0).into()]);
        let there = Step::upsert(table, key()).set("int", 0);
        store.commit(&Plan::of(&acme, "there").step(there).build().unwrap()).await.unwrap();
        let holder = raw().await;
        let hold = format!(
            "begin; select from {}.everything where id = {} for update",
            namespace.schema(),
            Held::BLOCKED
        );
        holder.batch_execute(&hold).await.unwrap();
        let waiting = Step::update(table, key()).set("int", 1);
        let waiting = begun(store, Plan::of(&acme, "waiting").step(waiting).build().unwrap()).await;
        Held { store: store.clone(), holder, waiting }
    }

    async fn commit(self, plans: &[Plan]) -> Vec<Commit> {
        let mut running = Vec::new();
        for plan in plans {
            running.push(begun(&self.store, plan.clone()).await);
        }
        self.holder.batch_execute("rollback").await.unwrap();
        self.waiting.await.unwrap();
        let mut commits = Vec::new();
        for running in running {
            commits.push(running.await.unwrap());
        }
        commits
    }
}

/// Inserts by the server's clock, alone and together: the row, the record and the answer tell one time, and what was
/// answered is what is stored, although the statement gives no row back.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn inserts_are_stamped_by_the_server() {
    const HOUR: Duration = Duration::from_secs(3_600);
    let (table, acme, at) = (everything(), tenant("acme"), Time::from_millis(1_700_000_000_000));
    let insert = |id: i64| {
        Step::insert(&table, [id.into(), at.into()])
            .set("int", Expr::Subtract(Operand::Coalesce("int".into(), id.into()), 1.into()))
            .set("text", format!("it's \"{id}\"\\, and \"\"now\"\" \"\"now 1\"\""))
            .set("bytes", vec![id as u8; 80])
            .set("float", id as f64 / 3.0)
            .set("json", serde_json::json!({"half": id as f64 / 2.0, "row": null, "large": 1e20}))
    };
    let shapes: [&dyn Fn(i64) -> Step; 4] = [
        &|id| insert(id),
        &|id| insert(id).set("time", now()),
        &|id| insert(id).set("time", now()).set("later", now_plus(HOUR)),
        &|id| insert(id).set("later", now_plus(HOUR * id as u32)),
    ];
    let entries: [&dyn Fn(i64) -> Option<Entry>; 4] = [
        &|_| None,
        &|id| {
            Some(
                Entry::about("thing", id.to_string()).event(EventTemplate::named("thing.made").with("n", id)),
            )
        },
        &|id| {
            let made = |name: &str| EventTemplate::named(name).with("row", "mine").with_row_of(0);
            let entry = Entry::about("thing", id.to_string()).event(made("thing.made"));
            Some(
                entry
                    .event(EventTemplate::named("thing.other").with("row", id))
                    .event(made("thing.made_too")),
            )
        },
        // All in one partition.
        &|_| Some(Entry::about("thing", "one").event(EventTemplate::named("thing.made").with_row_of(0))),
    ];
    // Behind a pooler the transaction has to be told what the connection could not be set to.
    let pooler = Proxy::start().await;
    pooler.set(Cut::Settings);
    for (count, pooled) in [(1, false), (9, false), (1, true), (9, true)] {
        let mut namespace = Namespace::new();
        if pooled {
            namespace.options = pooler.options(&namespace.options);
        }
        namespace.options.writers = 1;
        let store = Arc::new(namespace.open_with(&[&table]).await);
        let mut last = 0;
        for (shape, entry) in shapes.iter().flat_map(|shape| entries.iter().map(move |entry| (shape, entry)))
        {
            for returns in [false, true] {
                let before = store.counts();
                let plan = |id: i64| {
                    let plan = Plan::of(&acme, format!("op-{id}")).step(shape(id));
                    let plan = entry(id).into_iter().fold(plan, PlanBuilder::log);
                    if returns { plan } else { plan.without_rows() }.build().unwrap()
                };
                let plans: Vec<Plan> = (last..last + count).map(plan).collect();
                last += count;
                let commits = match plans.as_slice() {
                    [plan] => vec![store.commit(plan).await.unwrap()],
                    plans => Held::of(&store, &namespace, &table).await.commit(plans).await,
                };
                for (plan, commit) in plans.iter().zip(commits) {
                    check_insert(&store, plan, &commit.applied().unwrap()).await;
                }
                let counts = store.counts();
                let done = (counts.alone - before.alone, counts.alike - before.alike);
                // That which holds up the others is one too.
                let expected = if count == 1 { (1, 0) } else { (2, count as u64) };
                assert_eq!((done, counts.batches), (expected, 0), "{counts:?}");
            }
        }
    }
}

/// An insert that was applied is what the evaluation makes of it at the time of its record, in the table, in the log and in
/// the answer.
async fn check_insert(store: &PostgresStore, plan: &Plan, applied: &Applied) {
    let addresses: Vec<Address> = plan.addresses().collect();
    let stored = store.get(&addresses, Consistency::Strong).await.unwrap();
    let row = stored[0].as_ref().unwrap();
    if plan.returns_rows() {
        assert_eq!(applied.rows, stored, "{plan:?}");
    } else {
        assert_eq!(applied.rows, [], "{plan:?}");
    }
    let Some(record) = &applied.record else { return assert!(plan.entry().is_none()) };
    let made = eval::decide(plan, record.at, &[None]).unwrap();
    let expected = eval::StepEffect { rows: vec![Some(row.clone())], events: record.events.clone() };
    assert_eq!(made, eval::Decision::Apply(expected));
    let place = record.position.unwrap();
    let stored = store.read_log(place.partition, place.offset - 1, 1).await.unwrap().records;
    assert_eq!(stored, std::slice::from_ref(record));
}

/// Inserts that wait together, one of them of a row that is there: it is refused, the others are applied, and as long as that
/// goes on nothing is tried in vain.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn inserts_that_wait_together_are_looked_for_if_one_is_there() {
    let (table, acme, at) = (everything(), tenant("acme"), Time::from_millis(1_700_000_000_000));
    let mut namespace = Namespace::new();
    namespace.options.writers = 1;
    let store = Arc::new(namespace.open_with(&[&table]).await);
    let round = async |ids: &[i64], name: &str| {
        let plan = |id: &i64| {
            let step = Step::insert(&table, [(*id).into(), at.into()]).set("time", now());
            let entry = Entry::about("thing", id.to_string())
                .event(EventTemplate::named("thing.made").with_row_of(0));
            Plan::of(&acme, format!("{name}-{id}")).step(step).log(entry).build().unwrap()
        };
        let plans: Vec<Plan> = ids.iter().map(plan).collect();
        let commits = Held::of(&store, &namespace, &table).await.commit(&plans).await;
        let mut refused = Vec::new();
        for ((id, plan), commit) in ids.iter().zip(&plans).zip(commits) {
            match commit {
                Commit::Applied(applied) => check_insert(&store, plan, &applied).await,
                _ => refused.push(*id),
            }
        }
        let counts = store.counts();
        (refused, counts.alike, counts.compiled_faults, counts.doubted)
    };
    assert_eq!(round(&[1, 2, 3], "all").await, (vec![], 3, 0, 0));
    assert_eq!(round(&[3, 4, 5], "tried").await, (vec![3], 3, 1, 0));
    assert_eq!(round(&[5, 6, 7], "looked").await, (vec![5], 3, 1, 0));
    assert_eq!(round(&[8, 9], "looked").await, (vec![], 3, 1, 0));
    assert_eq!(round(&[10, 11], "trusted").await, (vec![], 5, 1, 0));
}

/// Plans of many steps of one shape are one statement, which applies them whole or does nothing.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn plans_of_many_steps_of_one_shape_mean_what_the_model_says() {
    const ROWS: i64 = 24;
    let (table, acme, at) = (everything(), tenant("acme"), Time::from_millis(1_700_000_000_000));
    let row = |id: i64| Step::update(&table, [id.into(), at.into()]);
    type Shape<'a> = &'a dyn Fn(i64) -> Step;
    let shapes: [Shape<'_>; 3] = [
        // By the clock, and by what is there; what is set depends on both.
        &|id| {
            row(id)
                .guard(column("time").le(now()))
                .guard(is_null("text"))
                .set("count", column("count").add(id))
                .set("time", now_plus(Duration::from_secs(60)))
                .set("text", format!("changed {id}"))
        },
        &|id| {
            row(id).guard(is_in("count", [0, 1, 2])).guard(is_null("text")).set("int", id).set("text", "once")
        },
        &|id| Step::delete(&table, [id.into(), at.into()]).guard(column("int").eq(id)).guard(is_null("text")),
    ];
    let pooler = Proxy::start().await;
    pooler.set(Cut::Settings);
    let ways = [false, true].into_iter().flat_map(|pooled| [false, true].map(|logged| (pooled, logged)));
    let ways = ways.flat_map(|(pooled, logged)| shapes.iter().map(move |shape| (pooled, logged, shape)));
    for (number, (pooled, logged, shape)) in ways.enumerate() {
        let clock = Arc::new(ManualClock::at(at));
        let model = ModelStore::with(clock.clone(), 4);
        let mut namespace = Namespace::new();
        if pooled {
            namespace.options = pooler.options(&namespace.options);
        }
        namespace.options.clock = Some(clock.clone());
        namespace.options.partitions = Some(4);
        let store = namespace.open_with(&[&table]).await;
        model.migrate(&schema_of(&[&table]), Migrate::Apply).await.unwrap();
        for id in 0..ROWS {
            // The last one is not due, and not what it has to be.
            let time = if id == ROWS - 1 { at.plus(Duration::from_secs(1)) } else { at };
            let count = if id == ROWS - 1 { 7 } else { id % 3 };
            let insert = Step::insert(&table, [id.into(), at.into()])
                .set("count", count)
                .set("int", if id == ROWS - 1 { -1 } else { id })
                .set("time", time);
            let plan = Plan::of(&acme, format!("create-{id}")).step(insert).build().unwrap();
            model.commit(&plan).await.unwrap();
            store.commit(&plan).await.unwrap();
        }
        let plan = |operation: &str, ids: &[i64]| {
            let plan = Plan::of(&acme, operation).steps(ids.iter().map(|id| shape(*id)));
            let event = EventTemplate::named("thing.changed").with("n", ids.len());
            let entry = Entry::about("thing", "several").event(event);
            if logged { plan.log(entry).build().unwrap() } else { plan.build().unwrap() }
        };
        // Not in the order of their keys. All hold, before any plan was refused; one that fails, one that is missing; then all
        // hold, and then none does any more.
        let courses: [(&str, Vec<i64>, bool); 6] = [
            ("first", vec![1, 0], true),
            ("fails", vec![3, ROWS - 1, 2], false),
            ("missing", vec![2, ROWS + 5, 3], false),
            ("holds", (2..ROWS - 1).rev().collect(), true),
            ("again", vec![4, 5, 6], false),
            ("holds", (2..ROWS - 1).rev().collect(), false),
        ];
        for (operation, ids, is_uniform) in courses {
            let plan = plan(operation, &ids);
            let before = store.counts();
            let (mut told, mut wanted) =
                (store.commit(&plan).await.unwrap(), model.commit(&plan).await.unwrap());
            for commit in [&mut told, &mut wanted] {
                if let Commit::Applied(applied) = commit {
                    applied.record.iter_mut().for_each(|record| record.position = None);
                }
            }
            assert_eq!(told, wanted, "way {number}, {operation}");
            let counts = store.counts();
            assert_eq!(counts.uniform - before.uniform, u64::from(is_uniform), "way {number}, {operation}");
        }
        assert_eq!(store.counts().uniform, 2);
        let mut records = Vec::new();
        for partition in 0..4 {
            records.extend(store.read_log(partition, 0, 10).await.unwrap().records);
        }
        assert_eq!(records.len(), 2 * usize::from(logged), "way {number}");
    }
}

/// The same by the server's clock: it is read once, behind the locks.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn plans_of_many_steps_are_judged_and_stamped_by_the_server() {
    let (table, acme, at) = (everything(), tenant("acme"), Time::from_millis(1_700_000_000_000));
    let namespace = Namespace::new();
    let store = namespace.open_with(&[&table]).await;
    for id in 0..9_i64 {
        // The last one is due in a thousand years.
        let time = if id == 8 { Time::from_millis(33_000_000_000_000) } else { at };
        let insert = Step::insert(&table, [id.into(), at.into()]).set("time", time);
        store.commit(&Plan::of(&acme, format!("create-{id}")).step(insert).build().unwrap()).await.unwrap();
    }
    let minute = Duration::from_secs(60);
    let claim = |id: i64| {
        let row = Step::update(&table, [id.into(), at.into()]);
        row.guard(column("time").le(now())).set("time", now_plus(minute)).set("int", id)
    };
    let plan = |operation: &str, ids: std::ops::Range<i64>| {
        let entry = Entry::about("thing", "several").event(EventTemplate::named("thing.claimed"));
        Plan::of(&acme, operation).steps(ids.map(claim)).log(entry).build().unwrap()
    };
    let early = store.commit(&plan("early", 0..9)).await.unwrap();
    assert!(matches!(&early, Commit::Refused(refused) if refused.step == 8), "{early:?}");
    let applied = store.commit(&plan("due", 0..8)).await.unwrap().applied().unwrap();
    let record = applied.record.unwrap();
    for (id, row) in applied.rows.iter().enumerate() {
        let row = row.as_ref().unwrap();
        assert_eq!(row.time("time"), Some(record.at.plus(minute)));
        assert_eq!(row.int("int"), i64::try_from(id).ok());
    }
    assert_eq!(store.counts().uniform, 1);
    let place = record.position.unwrap();
    assert_eq!(store.read_log(place.partition, place.offset - 1, 1).await.unwrap().records, [record]);
}

/// Plans of many steps that wait behind short ones are one statement each all the same, and the short ones go before them.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn long_plans_that_wait_behind_short_ones_are_one_statement_each() {
    let (table, acme, at) = (everything(), tenant("acme"), Time::from_millis(1_700_000_000_000));
    let mut namespace = Namespace::new();
    namespace.options.writers = 1;
    namespace.options.partitions = Some(1);
    let store = Arc::new(namespace.open_with(&[&table]).await);
    for id in 0..60_i64 {
        let insert = Step::insert(&table, [id.into(), at.into()]);
        store.commit(&Plan::of(&acme, format!("create-{id}")).step(insert).build().unwrap()).await.unwrap();
    }
    let plan = |operation: &str, ids: std::ops::Range<i64>| {
        let delete = |id: i64| Step::delete(&table, [id.into(), at.into()]).guard(is_null("text"));
        let entry = Entry::about("thing", operation).event(EventTemplate::named("thing.removed"));
        Plan::of(&acme, operation).steps(ids.map(delete)).log(entry).build().unwrap()
    };
    let plans = [
        plan("three", 0..3),
        plan("one", 3..4),
        plan("twenty", 4..24),
        plan("two", 24..26),
        plan("eighteen", 26..44),
    ];
    let before = store.counts();
    let commits = Held::of(&store, &namespace, &table).await.commit(&plans).await;
    let offsets: Vec<u64> = commits
        .iter()
        .map(|commit| match commit {
            Commit::Applied(applied) => applied.record.as_ref().unwrap().position.unwrap().offset,
            other => panic!("{other:?}"),
        })
        .collect();
    assert!(offsets.is_sorted(), "{offsets:?}");
    let counts = store.counts();
    // The first two together, by their rows; `two` by itself, because only a long one is left behind it.
    assert_eq!((counts.uniform - before.uniform, counts.batched - before.batched), (3, 2));
    let left = Address::new(&table, &acme, [43.into(), at.into()]).unwrap();
    assert_eq!(store.get(&[left], Consistency::Strong).await.unwrap(), [None]);
}
