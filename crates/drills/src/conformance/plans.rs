//! Plans of several steps, and many plans at once: whole or not at all, one after another.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use anyhow::{Context, Result, bail, ensure};
use statehouse_store::guard::column;
use statehouse_store::{
    Commit, Entry, EventTemplate, Guard, Operand, Plan, Random, Reason, Row, Step, Table, Type, Value,
};
use tokio::task::JoinSet;

use crate::harness::engines::TestNamespace;
use crate::harness::linearize::{RegisterAction, RegisterCall, Written, check};
use crate::harness::sample_inputs::values::counters;
use crate::harness::store_client::{StoreClient, same, shown};

/// Waits for all tasks; the first error, or panic, is the case's.
async fn finished<T: 'static>(mut tasks: JoinSet<Result<T>>) -> Result<Vec<T>> {
    let mut results = Vec::new();
    while let Some(result) = tasks.join_next().await {
        results.push(result??);
    }
    Ok(results)
}

pub(super) async fn a_refused_step_leaves_no_trace_of_the_others(
    namespace: &dyn TestNamespace,
) -> Result<()> {
    let (left, right) = (counters("left_side")?, counters("right_side")?);
    let client = StoreClient::open(namespace, &[&left, &right]).await?;
    for table in [&left, &right] {
        client.apply(client.one(Step::insert(table, ["old".into()]).set("n", 1))).await?;
    }
    let writes = || {
        [
            Step::insert(&left, ["new".into()]),
            Step::update(&left, ["old".into()]).set("n", 2),
            Step::delete(&right, ["old".into()]),
            Step::upsert(&right, ["new".into()]).set("n", 3),
        ]
    };
    let entry = || Entry::about("thing", "x").event(EventTemplate::named("thing.done"));
    let spoilers: [(Step, Reason); 4] = [
        (Step::insert(&left, ["zz".into()]), Reason::Present),
        (Step::update(&right, ["nobody".into()]).set("n", 1), Reason::Absent),
        (Step::assert_absent(&right, ["zz".into()]), Reason::Present),
        (
            Step::assert(&right, ["zz".into()]).guard(column("n").gt(0)),
            Reason::Guard { conjunct: 0, guard: Box::new(column("n").gt(0)) },
        ),
    ];
    for table in [&left, &right] {
        client.apply(client.one(Step::insert(table, ["zz".into()]))).await?;
    }
    for (spoiler, reason) in spoilers {
        // The step that is refused stands last, then first, then in the middle.
        for place in [4, 0, 2] {
            let mut steps = writes().to_vec();
            steps.insert(place, spoiler.clone());
            client.refuse_as(client.plan().steps(steps).log(entry()), place, &reason).await?;
        }
    }
    for table in [&left, &right] {
        same("a row that no plan made", &client.find(table, ["new".into()]).await?, &None)?;
        let old = client.row(table, ["old".into()]).await?;
        same("a row that no plan changed", &(old.int("n"), old.version()), &(Some(1), 1))?;
    }
    // Had a refused plan left a record, it would stand before this one.
    let applied = client.apply(client.plan().steps(writes()).log(entry())).await?;
    let record = applied.record.context("the plan has an entry and its outcome no record")?;
    same("the whole log", &client.exact_log(1).await?[0].operation, &record.operation)?;
    same("the updated row", &client.row(&left, ["old".into()]).await?.int("n"), &Some(2))?;
    same("the deleted row", &client.find(&right, ["old".into()]).await?, &None)
}

pub(super) async fn the_first_refused_step_in_plan_order_is_named(
    namespace: &dyn TestNamespace,
) -> Result<()> {
    let (first, second) = (counters("aa_table")?, counters("zz_table")?);
    let client = StoreClient::open(namespace, &[&first, &second]).await?;
    client.apply(client.one(Step::insert(&second, ["m".into()]).set("n", 5))).await?;
    let full = Reason::Guard { conjunct: 0, guard: Box::new(column("n").lt(5)) };
    let failing: [(Step, Reason); 3] = [
        (Step::update(&second, ["m".into()]).guard(column("n").lt(5)).set("n", 6), full),
        (Step::delete(&first, ["b".into()]), Reason::Absent),
        (Step::update(&first, ["a".into()]).set("n", 1), Reason::Absent),
    ];
    // Every order of the three: whichever the engine locks or checks first, the plan's first is the answer.
    for order in [[0, 1, 2], [0, 2, 1], [1, 0, 2], [1, 2, 0], [2, 0, 1], [2, 1, 0]] {
        let holds = Step::upsert(&first, ["fine".into()]);
        let steps = order.iter().map(|&place| failing[place].0.clone());
        let plan = client.one(holds).steps(steps);
        client.refuse_as(plan, 1, &failing[order[0]].1).await?;
    }
    same("a step that held", &client.find(&first, ["fine".into()]).await?, &None)
}

pub(super) async fn plans_span_tables_and_answer_step_by_step(namespace: &dyn TestNamespace) -> Result<()> {
    let (left, right) = (counters("near")?, counters("far")?);
    let client = StoreClient::open(namespace, &[&left, &right]).await?;
    let setup = [
        Step::insert(&right, ["kept".into()]).set("n", 1),
        Step::insert(&left, ["gone".into()]).set("n", 2),
        Step::insert(&left, ["changed".into()]).set("n", 3),
    ];
    client.apply(client.plan().steps(setup)).await?;
    let plan = client.plan().steps([
        Step::assert(&right, ["kept".into()]).guard(column("n").eq(1)),
        Step::delete(&left, ["gone".into()]),
        Step::update(&left, ["changed".into()]).set("n", column("n").add(1)),
        Step::assert_absent(&right, ["never".into()]),
        Step::insert(&right, ["fresh".into()]),
        Step::remove(&right, ["nothing".into()]),
    ]);
    let applied = client.apply(plan.clone()).await?;
    let numbers: Vec<Option<(Option<i64>, i64)>> =
        applied.rows.iter().map(|row| row.as_ref().map(|row| (row.int("n"), row.version()))).collect();
    let expected = vec![Some((Some(1), 1)), None, Some((Some(4), 2)), None, Some((Some(0), 1)), None];
    same("the row of each step", &numbers, &expected)?;
    let mut stored = Vec::new();
    for address in plan.build()?.addresses() {
        stored.push(client.get(&address).await?);
    }
    same("the rows of the outcome and the stored ones", &applied.rows, &stored)?;
    same("the record of a plan without an entry", &applied.record, &None)
}

pub(super) async fn rows_can_be_done_without(namespace: &dyn TestNamespace) -> Result<()> {
    let table = counters("silent")?;
    let client = StoreClient::open(namespace, &[&table]).await?;
    let step = || Step::upsert(&table, ["x".into()]).set("n", column("n").add(1));
    let first = client.noted("thing", "x", "thing.counted").step(Step::insert(&table, ["x".into()]));
    let applied = client.apply(first.without_rows()).await?;
    ensure!(applied.rows.is_empty(), "no rows were asked for, and {:?} came", applied.rows);
    ensure!(applied.record.is_some(), "the record is wanted even where the rows are not");
    let applied = client.apply(client.one(step()).without_rows()).await?;
    ensure!(applied.rows.is_empty(), "no rows were asked for, and {:?} came", applied.rows);
    let guard = column("n").eq(7);
    let refused = client.one(step().guard(guard.clone())).without_rows();
    client.refuse_as(refused, 0, &Reason::Guard { conjunct: 0, guard: Box::new(guard) }).await?;
    same("the count", &client.row(&table, ["x".into()]).await?.int("n"), &Some(1))
}

pub(super) async fn plans_of_asserts_alone(namespace: &dyn TestNamespace) -> Result<()> {
    let table = counters("witnesses")?;
    let client = StoreClient::open(namespace, &[&table]).await?;
    client.apply(client.one(Step::insert(&table, ["a".into()]).set("n", 1))).await?;
    let asserts = || {
        client.plan().steps([
            Step::assert(&table, ["a".into()]).guard(column("n").eq(1)),
            Step::assert_absent(&table, ["b".into()]),
        ])
    };
    client.apply(asserts()).await?;
    client.apply(asserts().log(Entry::about("witness", "a").event(EventTemplate::named("seen")))).await?;
    client.apply(client.one(Step::insert(&table, ["b".into()]))).await?;
    client.refuse_as(asserts(), 1, &Reason::Present).await?;
    client
        .refuse_as(
            asserts().log(Entry::about("witness", "a").event(EventTemplate::named("seen"))),
            1,
            &Reason::Present,
        )
        .await?;
    client.exact_log(1).await?;
    same("the version of a row that was looked at", &client.row(&table, ["a".into()]).await?.version(), &1)
}

pub(super) async fn one_insert_of_a_key_wins(namespace: &dyn TestNamespace) -> Result<()> {
    let table = counters("seats")?;
    let client = StoreClient::open(namespace, &[&table]).await?;
    for round in 0..10 {
        let mut tasks = JoinSet::new();
        for contender in 0..6_i64 {
            let plan =
                client.one(Step::insert(&table, [round.to_string().into()]).set("n", contender)).build()?;
            let store = client.store.clone();
            tasks.spawn(async move { Ok((contender, store.commit(&plan).await?)) });
        }
        let outcomes = finished(tasks).await?;
        let row = client.row(&table, [round.to_string().into()]).await?;
        let mut winners = Vec::new();
        for (contender, outcome) in outcomes {
            match outcome {
                Commit::Applied(_) => winners.push(Some(contender)),
                Commit::Refused(refused) => {
                    same("why a loser lost", &refused.reason, &Reason::Present)?;
                    same("what a loser is shown", &refused.current, &Some(row.clone()))?;
                }
                Commit::Fenced => bail!("no client resolved anything, and contender {contender} is fenced"),
            }
        }
        same("the winner, and the row's content", &winners, &vec![row.int("n")])?;
    }
    Ok(())
}

pub(super) async fn one_transition_out_of_a_state_wins(namespace: &dyn TestNamespace) -> Result<()> {
    let table = Table::named("bookings").partition("id", Type::Int).required("state", Type::Text).build()?;
    let client = StoreClient::open(namespace, &[&table]).await?;
    for round in 0..20 {
        let key = [Value::from(round)];
        client.apply(client.one(Step::insert(&table, key.clone()).set("state", "HELD"))).await?;
        let mut tasks = JoinSet::new();
        for target in ["CONFIRMED", "EXPIRED", "CANCELLED"] {
            let step = Step::update(&table, key.clone()).guard(column("state").eq("HELD"));
            let plan = client.one(step.set("state", target)).build()?;
            let store = client.store.clone();
            tasks.spawn(async move { Ok((target, store.commit(&plan).await?)) });
        }
        let outcomes = finished(tasks).await?;
        let row = client.row(&table, key).await?;
        let applied: Vec<Option<&str>> = outcomes
            .iter()
            .filter(|(_, outcome)| matches!(outcome, Commit::Applied(_)))
            .map(|(target, _)| Some(*target))
            .collect();
        same("the winner, and the row's state", &applied, &vec![row.text("state")])?;
        same("the writes of the row", &row.version(), &2)?;
        for (_, outcome) in outcomes {
            if let Commit::Refused(refused) = outcome {
                same("the state that a loser is shown", &refused.current, &Some(row.clone()))?;
            }
        }
    }
    Ok(())
}

pub(super) async fn blind_increments_are_never_lost(namespace: &dyn TestNamespace) -> Result<()> {
    const TASKS: i64 = 8;
    const EACH: i64 = 15;
    let table = counters("tills")?;
    let client = StoreClient::open(namespace, &[&table]).await?;
    let mut tasks = JoinSet::new();
    for task in 0..TASKS {
        let (client, table) = (client.clone(), table.clone());
        tasks.spawn(async move {
            let mut versions = Vec::new();
            for turn in 0..EACH {
                let own: Value = format!("own {task} {turn}").into();
                // No client inserts the row first: eight upserts meet where nothing is yet.
                let n = Operand::Coalesce("n".into(), 0.into());
                let steps =
                    [Step::upsert(&table, ["shared".into()]).set("n", n.add(1)), Step::insert(&table, [own])];
                let applied = client.apply(client.plan().steps(steps)).await?;
                let row = applied.rows.into_iter().next().flatten().context("the put left no row")?;
                ensure!(row.int("n") == Some(row.version()), "the count and the version differ: {row:?}");
                versions.push(row.version());
            }
            Ok(versions)
        });
    }
    let mut versions: Vec<i64> = finished(tasks).await?.into_iter().flatten().collect();
    versions.sort_unstable();
    same("the versions that the plans left", &versions, &(1..=TASKS * EACH).collect())
}

pub(super) async fn guarded_increments_take_turns(namespace: &dyn TestNamespace) -> Result<()> {
    const TASKS: i64 = 6;
    const EACH: i64 = 10;
    let table = counters("ledgers")?;
    let client = StoreClient::open(namespace, &[&table]).await?;
    client.apply(client.one(Step::insert(&table, ["x".into()]))).await?;
    let mut tasks = JoinSet::new();
    for _ in 0..TASKS {
        let (client, table) = (client.clone(), table.clone());
        tasks.spawn(async move {
            let mut row = client.row(&table, ["x".into()]).await?;
            let mut done = 0;
            while done < EACH {
                let n = row.int("n").context("the count is missing")?;
                let step = Step::update(&table, ["x".into()]).guard(Guard::version(row.version()));
                let plan = client.one(step.set("n", n + 1)).build()?;
                row = match client.store.commit(&plan).await? {
                    Commit::Applied(applied) => {
                        done += 1;
                        applied.rows.into_iter().next().flatten().context("the put left no row")?
                    }
                    // The refusal shows the row as it was when the guard failed, so it cannot be the one we knew.
                    Commit::Refused(refused) => {
                        let current = refused.current.context("the refusal shows no row")?;
                        ensure!(
                            current.version() > row.version(),
                            "refused at version {} for expecting {}",
                            current.version(),
                            row.version()
                        );
                        current
                    }
                    Commit::Fenced => bail!("no client resolved {}", shown(&plan)),
                };
            }
            Ok(())
        });
    }
    finished(tasks).await?;
    let row = client.row(&table, ["x".into()]).await?;
    same("count and version", &(row.int("n"), row.version()), &(Some(TASKS * EACH), TASKS * EACH + 1))
}

pub(super) async fn plans_in_opposite_orders_do_not_block_each_other(
    namespace: &dyn TestNamespace,
) -> Result<()> {
    const TASKS: i64 = 6;
    const EACH: i64 = 10;
    let table = counters("crossings")?;
    let client = StoreClient::open(namespace, &[&table]).await?;
    let keys = ["a", "b", "c", "d"];
    client.apply(client.plan().steps(keys.map(|key| Step::insert(&table, [key.into()])))).await?;
    let mut tasks = JoinSet::new();
    for task in 0..TASKS {
        let (client, table) = (client.clone(), table.clone());
        tasks.spawn(async move {
            for turn in 0..EACH {
                let mut order = keys;
                order.rotate_left((task + turn) as usize % keys.len());
                if task % 2 == 0 {
                    order.reverse();
                }
                let steps = order.map(|key| Step::update(&table, [key.into()]).set("n", column("n").add(1)));
                client.apply(client.noted("crossing", order[0], "crossed").steps(steps)).await?;
            }
            Ok(())
        });
    }
    finished(tasks).await?;
    for key in keys {
        same(key, &client.row(&table, [key.into()]).await?.int("n"), &Some(TASKS * EACH))?;
    }
    Ok(())
}

pub(super) async fn nobody_sees_half_of_a_plan(namespace: &dyn TestNamespace) -> Result<()> {
    let table = counters("twins")?;
    let client = StoreClient::open(namespace, &[&table]).await?;
    let keys = ["left", "right"];
    client.apply(client.plan().steps(keys.map(|key| Step::insert(&table, [key.into()])))).await?;
    let writing = Arc::new(AtomicBool::new(true));
    let mut tasks = JoinSet::new();
    for _ in 0..2 {
        let (client, table) = (client.clone(), table.clone());
        tasks.spawn(async move {
            for _ in 0..40 {
                let steps = keys.map(|key| Step::update(&table, [key.into()]).set("n", column("n").add(1)));
                client.apply(client.plan().steps(steps)).await?;
            }
            Ok(0_u64)
        });
    }
    // A read of two rows may fall between two plans, so an onlooker asks by a plan: if the left row is still the one
    // that was read, the right one must be its twin. Only the left row may be the reason for a refusal.
    let (onlooker, watched, flag) = (client.clone(), table.clone(), writing.clone());
    let watch = tokio::spawn(async move {
        let mut agreed = 0_u64;
        while flag.load(Ordering::Relaxed) || agreed == 0 {
            let left = onlooker.row(&watched, ["left".into()]).await?;
            let n = left.int("n").context("the count is missing")?;
            let plan = onlooker.plan().steps([
                Step::assert(&watched, ["left".into()]).guard(Guard::version(left.version())),
                Step::assert(&watched, ["right".into()]).guard(column("n").eq(n)),
            ]);
            match onlooker.store.commit(&plan.build()?).await? {
                Commit::Applied(_) => agreed += 1,
                Commit::Refused(refused) => {
                    ensure!(refused.step == 0, "the twins differ: the left is {left:?}, and {refused:?}");
                }
                Commit::Fenced => bail!("no client resolved anything"),
            }
        }
        Ok(agreed)
    });
    let written = finished(tasks).await;
    writing.store(false, Ordering::Relaxed);
    let agreed = watch.await??;
    written?;
    ensure!(agreed > 0, "the onlooker never saw the twins");
    for key in keys {
        same(key, &client.row(&table, [key.into()]).await?.int("n"), &Some(80))?;
    }
    Ok(())
}

pub(super) async fn an_asserted_row_stays_as_it_is_until_the_plan_is_done(
    namespace: &dyn TestNamespace,
) -> Result<()> {
    // Write skew: two plans that each read what the other writes. Either may go first, but not both "first".
    let table = counters("doctors")?;
    let client = StoreClient::open(namespace, &[&table]).await?;
    for round in 0..25 {
        let keys = [format!("a{round}"), format!("b{round}")];
        let insert = |key: &String| Step::insert(&table, [key.as_str().into()]).set("n", 1);
        client.apply(client.plan().steps(keys.iter().map(insert))).await?;
        let mut tasks = JoinSet::new();
        for (own, partner) in [(&keys[0], &keys[1]), (&keys[1], &keys[0])] {
            let plan = client.plan().steps([
                Step::update(&table, [own.as_str().into()]).set("n", 0),
                Step::assert(&table, [partner.as_str().into()]).guard(column("n").eq(1)),
            ]);
            let (store, plan) = (client.store.clone(), plan.build()?);
            tasks.spawn(async move { Ok(store.commit(&plan).await?) });
        }
        let outcomes = finished(tasks).await?;
        let applied = outcomes.iter().filter(|outcome| matches!(outcome, Commit::Applied(_))).count();
        ensure!(applied == 1, "of two plans that exclude each other {applied} were applied: {outcomes:?}");
    }
    Ok(())
}

pub(super) async fn an_absence_that_was_asserted_is_kept(namespace: &dyn TestNamespace) -> Result<()> {
    // The same with rows that are not there: each plan inserts what the other asserts to be absent.
    let table = counters("vacancies")?;
    let client = StoreClient::open(namespace, &[&table]).await?;
    for round in 0..25 {
        let keys = [format!("a{round}"), format!("b{round}")];
        let mut tasks = JoinSet::new();
        for (own, partner) in [(&keys[0], &keys[1]), (&keys[1], &keys[0])] {
            let plan = client.plan().steps([
                Step::insert(&table, [own.as_str().into()]),
                Step::assert_absent(&table, [partner.as_str().into()]),
            ]);
            let (store, plan) = (client.store.clone(), plan.build()?);
            tasks.spawn(async move { Ok(store.commit(&plan).await?) });
        }
        let outcomes = finished(tasks).await?;
        let applied = outcomes.iter().filter(|outcome| matches!(outcome, Commit::Applied(_))).count();
        ensure!(applied == 1, "of two plans that exclude each other {applied} were applied: {outcomes:?}");
    }
    Ok(())
}

pub(super) async fn what_clients_saw_can_have_happened_in_one_order(
    namespace: &dyn TestNamespace,
) -> Result<()> {
    const KEYS: [&str; 3] = ["a", "b", "c"];
    let table = counters("registers")?;
    let client = StoreClient::open(namespace, &[&table]).await?;
    let moments = Arc::new(AtomicU64::new(0));
    let mut tasks = JoinSet::new();
    for task in 0..6_u64 {
        let (client, table, moments) = (client.clone(), table.clone(), moments.clone());
        tasks.spawn(async move {
            let mut random = Random::seeded(task);
            let mut calls = Vec::new();
            let mut known: [Option<i64>; KEYS.len()] = [None; KEYS.len()];
            for turn in 0..40_u64 {
                let place = random.below(KEYS.len() as u64) as usize;
                let key = KEYS[place];
                let invoked = moments.fetch_add(1, Ordering::SeqCst);
                let action = if random.chance(0.4) {
                    let row = client.find(&table, [key.into()]).await?;
                    let observed = row.as_ref().and_then(observed);
                    known[place] = observed.map(|(version, _)| version);
                    RegisterAction::Read { observed }
                } else {
                    let value = (task * 1_000 + turn) as i64;
                    let step = match known[place] {
                        None => Step::insert(&table, [key.into()]),
                        Some(version) => Step::update(&table, [key.into()]).guard(Guard::version(version)),
                    };
                    let plan: Plan = client.one(step.set("n", value)).build()?;
                    let expected = known[place];
                    let written = match client.store.commit(&plan).await? {
                        Commit::Applied(_) => {
                            known[place] = Some(expected.map_or(1, |version| version + 1));
                            Written::Applied
                        }
                        Commit::Refused(refused) => {
                            known[place] = refused.current.as_ref().map(Row::version);
                            Written::Refused
                        }
                        Commit::Fenced => bail!("no client resolved {}", shown(&plan)),
                    };
                    RegisterAction::Write { expected, value, written }
                };
                let returned = Some(moments.fetch_add(1, Ordering::SeqCst));
                calls.push(RegisterCall { key: key.to_owned(), invoked, returned, action });
            }
            Ok(calls)
        });
    }
    let history: Vec<RegisterCall> = finished(tasks).await?.into_iter().flatten().collect();
    let applied = history
        .iter()
        .filter(|call| matches!(call.action, RegisterAction::Write { written: Written::Applied, .. }));
    ensure!(applied.count() >= KEYS.len(), "too few writes were applied to show anything");
    check(&history)?;
    Ok(())
}

fn observed(row: &Row) -> Option<(i64, i64)> {
    Some((row.version(), row.int("n")?))
}

pub(super) async fn explanations_name_the_tables(namespace: &dyn TestNamespace) -> Result<()> {
    let (left, right) = (counters("explained")?, counters("justified")?);
    let client = StoreClient::open(namespace, &[&left, &right]).await?;
    let plans = [
        client.one(Step::insert(&left, ["x".into()])),
        client.one(Step::update(&left, ["x".into()]).guard(column("n").lt(5)).set("n", column("n").add(1))),
        client.one(Step::assert(&left, ["x".into()])).step(Step::delete(&right, ["y".into()])),
        client.noted("thing", "x", "thing.done").step(Step::remove(&left, ["x".into()])),
    ];
    for plan in plans {
        let plan = plan.build()?;
        let explanation = client.store.explain((&plan).into());
        ensure!(!explanation.requests.is_empty(), "{} is explained by nothing", shown(&plan));
        let text = explanation.to_string();
        for step in plan.steps() {
            let name = step.table.name();
            ensure!(text.contains(name), "the explanation of {} does not name {name}: {text}", shown(&plan));
        }
        // Explaining is not doing.
        same("a row that was only explained", &client.find(&left, ["x".into()]).await?, &None)?;
    }
    Ok(())
}
