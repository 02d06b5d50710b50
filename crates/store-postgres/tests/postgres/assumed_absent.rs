//! Rows to be inserted are not read first, which no caller can observe: not by an outcome, not by the step that a refusal names.

use std::sync::Arc;

use statehouse_store::guard::column;
use statehouse_store::{
    Address, Commit, Consistency, Entry, EventTemplate, Migrate, ModelStore, Plan, Random, Reason, Step,
    Store, Table, Value,
};
use tokio::task::JoinSet;

use crate::support::{Namespace, bump, counters, increment, logged, raw, schema_of, tenant};

fn insert(table: &Arc<Table>, id: &str) -> Step {
    Step::insert(table, [Value::from(id)]).set("n", 1)
}

/// The step that refuses a plan, and whether because its row is there.
fn refused(outcome: &Commit) -> (usize, bool) {
    match outcome {
        Commit::Refused(refused) => (refused.step, refused.reason == Reason::Present),
        other => panic!("{other:?}"),
    }
}

#[tokio::test]
async fn rows_that_are_not_there_are_inserted_without_a_look() {
    let namespace = Namespace::new();
    let (left, right) = (counters("left"), counters("right"));
    let store = namespace.open_with(&[&left, &right]).await;
    let acme = tenant("acme");
    let plan = |operation: &str, id: &str| {
        logged(&acme, operation, id, vec![insert(&left, id), Step::assert_absent(&right, [id.into()])])
    };
    let Commit::Applied(applied) = store.commit(&plan("op-1", "a")).await.unwrap() else { panic!() };
    assert_eq!(applied.rows[0].as_ref().and_then(|row| row.int("n")), Some(1));
    assert_eq!((store.counts().unread, store.counts().doubted), (2, 0), "{:?}", store.counts());
    // The same operation again finds its record, although the row is there.
    let Commit::Applied(applied) = store.commit(&plan("op-1", "a")).await.unwrap() else { panic!() };
    assert!(applied.repeated);
    assert_eq!(store.counts().doubted, 0);
    // Another one finds the row, which is then looked for.
    let outcome = store.commit(&plan("op-2", "a")).await.unwrap();
    assert_eq!(refused(&outcome), (0, true));
    let Commit::Refused(refused) = outcome else { panic!() };
    assert_eq!(refused.current.and_then(|row| row.int("n")), Some(1));
    assert_eq!(store.counts().doubted, 1);
    assert!(matches!(store.commit(&plan("op-3", "a")).await.unwrap(), Commit::Refused(_)));
    assert_eq!(store.counts().doubted, 1, "a row that was there is looked for the next time");
}

#[tokio::test]
async fn an_absence_that_is_only_demanded_is_proved() {
    let namespace = Namespace::new();
    let (left, right) = (counters("left"), counters("right"));
    let store = namespace.open_with(&[&left, &right]).await;
    let acme = tenant("acme");
    let steps = |id: &str| vec![increment(&left, id), Step::assert_absent(&right, [id.into()])];
    assert!(matches!(
        store.commit(&logged(&acme, "op-1", "a", steps("a"))).await.unwrap(),
        Commit::Applied(_)
    ));
    let placed = logged(&acme, "op-2", "a", vec![insert(&right, "a")]);
    assert!(matches!(store.commit(&placed).await.unwrap(), Commit::Applied(_)));
    let outcome = store.commit(&logged(&acme, "op-3", "a", steps("a"))).await.unwrap();
    assert_eq!(refused(&outcome), (1, true));
    assert!(store.counts().doubted > 0);
    let address = Address::new(&left, &acme, ["a".into()]).unwrap();
    let rows = store.get(&[address], Consistency::Strong).await.unwrap();
    assert_eq!(rows[0].as_ref().and_then(|row| row.int("n")), Some(1));
}

#[tokio::test]
async fn a_refusal_names_the_first_step_that_fails_looked_for_or_not() {
    let namespace = Namespace::new();
    let (left, right) = (counters("left"), counters("right"));
    let store = namespace.open_with(&[&left, &right]).await;
    let acme = tenant("acme");
    store
        .commit(&logged(&acme, "op-0", "a", vec![insert(&left, "a"), insert(&right, "there")]))
        .await
        .unwrap();
    let never = || bump(&left, "a").guard(column("n").gt(5));
    // Before any row that is not looked for: certain at once.
    let first = logged(&acme, "op-1", "a", vec![never(), insert(&right, "there")]);
    assert_eq!(refused(&store.commit(&first).await.unwrap()), (0, false));
    assert_eq!(store.counts().doubted, 0);
    // Behind one that is there: that one is named.
    let second = logged(&acme, "op-2", "a", vec![insert(&right, "there"), never()]);
    assert_eq!(refused(&store.commit(&second).await.unwrap()), (0, true));
    assert_eq!(store.counts().doubted, 1);
    // Behind one that is not.
    let third = logged(&acme, "op-3", "a", vec![insert(&right, "new"), never()]);
    assert_eq!(refused(&store.commit(&third).await.unwrap()), (1, false));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn of_many_inserts_of_the_same_rows_one_is_applied() {
    let mut namespace = Namespace::new();
    namespace.options.writers = 2;
    let (left, right) = (counters("left"), counters("right"));
    let store = Arc::new(namespace.open_with(&[&left, &right]).await);
    let other = Arc::new(namespace.open().await);
    let acme = tenant("acme");
    let (rounds, callers) = (20, 6);
    for round in 0..rounds {
        let mut tasks = JoinSet::new();
        for caller in 0..callers {
            let store = if caller % 2 == 0 { store.clone() } else { other.clone() };
            // Each in an order of its own, and beside a row that only it writes.
            let mut steps = vec![insert(&left, &format!("r{round}")), insert(&right, &format!("r{round}"))];
            if caller % 3 == 0 {
                steps.reverse();
            }
            steps.push(insert(&left, &format!("own-{round}-{caller}")));
            let plan = logged(&acme, &format!("op-{round}-{caller}"), &format!("{caller}"), steps);
            tasks.spawn(async move { store.commit(&plan).await.unwrap() });
        }
        let mut applied = 0;
        while let Some(outcome) = tasks.join_next().await {
            match outcome.unwrap() {
                Commit::Applied(_) => applied += 1,
                // Which of the two rows is seen first is chance: what is not there cannot be locked.
                outcome => assert!(refused(&outcome).0 < 2 && refused(&outcome).1, "{outcome:?}"),
            }
        }
        assert_eq!(applied, 1, "round {round}");
    }
    let rows = raw().await;
    let count = format!("select count(*) from {}.left where id like 'own-%'", namespace.schema());
    let count: i64 = rows.query_one(&count.replace(".left", ".\"left\""), &[]).await.unwrap().get(0);
    assert_eq!(count, rounds, "who was refused has written nothing");
    let counts = (store.counts(), other.counts());
    assert!(counts.0.doubted + counts.1.doubted > 0, "{counts:?}");
}

/// Plans of several steps on few rows, one after the other and many at once in one batch, against the model.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn plans_come_out_as_on_the_model() {
    let mut namespace = Namespace::new();
    namespace.options.writers = 1;
    let tables = [counters("left"), counters("right"), counters("other")];
    let all: Vec<&Arc<Table>> = tables.iter().collect();
    let store = Arc::new(namespace.open_with(&all).await);
    let model = ModelStore::new();
    model.migrate(&schema_of(&all), Migrate::Apply).await.unwrap();
    let acme = tenant("acme");
    let mut random = Random::seeded(7);
    let (mut unread, mut refusals) = (0, 0);
    for round in 0..60 {
        // Fewer and fewer rows are new.
        let plans: Vec<Plan> = (0..1 + random.below(6))
            .map(|number| {
                let mut rows: Vec<(usize, u64)> = Vec::new();
                while rows.len() < 2 + random.below(3) as usize {
                    let row = (random.below(3) as usize, random.below(12));
                    if !rows.contains(&row) {
                        rows.push(row);
                    }
                }
                let step = |(table, row): &(usize, u64)| {
                    let (table, id) = (&tables[*table], row.to_string());
                    match random.below(7) {
                        0..=2 => insert(table, &id),
                        3 => Step::assert_absent(table, [id.into()]),
                        4 => increment(table, &id),
                        5 => Step::remove(table, [id.into()]),
                        _ => bump(table, &id).guard(column("n").lt(3)),
                    }
                };
                let steps: Vec<Step> = rows.iter().map(step).collect();
                // One key is one partition and one lane: plans that are sent in this order are decided in it.
                let entry = Entry::about("counter", "x").event(EventTemplate::named("counter.changed"));
                let plan = Plan::of(&acme, format!("op-{round}-{number}")).steps(steps);
                plan.log(entry).build().unwrap()
            })
            .collect();
        let sent = plans.iter().map(|plan| store.commit(plan));
        let outcomes = futures_in_order(sent.collect()).await;
        for (plan, outcome) in plans.iter().zip(outcomes) {
            let expected = model.commit(plan).await.unwrap();
            refusals += usize::from(matches!(expected, Commit::Refused(_)));
            let shown = |commit: &Commit| match commit {
                Commit::Applied(applied) => format!("{:?}", applied.rows),
                Commit::Refused(refused) => format!("{refused:?}"),
                Commit::Fenced => "fenced".to_owned(),
            };
            assert_eq!(shown(&outcome.unwrap()), shown(&expected), "{plan:?}");
        }
        unread = store.counts().unread;
    }
    let counts = store.counts();
    assert!(unread > 0 && counts.doubted > 0 && refusals > 0, "{counts:?}");
}

/// Polls all of these in their order until all are done.
async fn futures_in_order<T>(futures: Vec<impl Future<Output = T>>) -> Vec<T> {
    let mut waiting: Vec<_> = futures.into_iter().map(Box::pin).collect();
    let mut done: Vec<Option<T>> = waiting.iter().map(|_| None).collect();
    std::future::poll_fn(|context| {
        let mut all = std::task::Poll::Ready(());
        for (future, done) in waiting.iter_mut().zip(&mut done).filter(|(_, done)| done.is_none()) {
            match future.as_mut().poll(context) {
                std::task::Poll::Ready(value) => *done = Some(value),
                std::task::Poll::Pending => all = std::task::Poll::Pending,
            }
        }
        all
    })
    .await;
    done.into_iter().flatten().collect()
}
