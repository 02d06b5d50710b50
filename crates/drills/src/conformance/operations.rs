//! Operation ids: applied once, remembered, and settled when the outcome is unknown.

use anyhow::{Context, Result, bail, ensure};
use statehouse_store::guard::column;
use statehouse_store::limits::NAME_BYTES_MAX;
use statehouse_store::log::partition_of;
use statehouse_store::{
    Applied, Commit, Entry, EventTemplate, Guard, Operand, OperationStatus, Plan, Reason, Record, Resolution,
    Step, Store,
};
use tokio::task::JoinSet;

use crate::harness::engines::TestNamespace;
use crate::harness::sample_inputs::values::counters;
use crate::harness::store_client::{StoreClient, pause, same, shown};

/// A record apart from its position, which an engine may learn only after the commit.
fn placeless(record: &Record) -> Record {
    Record { position: None, ..record.clone() }
}

/// Commits a plan that was applied before, and returns the record that it learns.
async fn repeat(store: &dyn Store, plan: &Plan) -> Result<Record> {
    match store.commit(plan).await? {
        Commit::Applied(Applied { record: Some(record), rows, repeated: true }) => {
            ensure!(rows.is_empty(), "a repetition does not know the rows, and shows {rows:?}");
            Ok(record)
        }
        other => bail!("expected {} to be a repetition, got {other:?}", shown(plan)),
    }
}

pub(super) async fn a_repetition_learns_the_first_outcome(namespace: &dyn TestNamespace) -> Result<()> {
    let table = counters("orders")?;
    let client = StoreClient::open(namespace, &[&table]).await?;
    client.apply(client.one(Step::insert(&table, ["x".into()]))).await?;
    let entry = Entry::about("order", "x")
        .fingerprint("digest")
        .event(EventTemplate::named("order.paid").with("amount", 5).with_row_of(0));
    // After the first time its guard does not hold any more; it is not asked again.
    let step = Step::update(&table, ["x".into()]).guard(Guard::version(1)).set("n", column("n").add(5));
    let builder = Plan::of(&client.tenant, "pay").step(step).log(entry);
    let plan = builder.clone().build()?;
    let first = client.apply(builder).await?.record.context("the outcome has no record")?;
    same("the fingerprint", &first.fingerprint.as_str(), &"digest")?;
    for _ in 0..3 {
        let again = repeat(client.store.as_ref(), &plan).await?;
        same("the record that a repetition learns", &placeless(&again), &placeless(&first))?;
    }
    client.apply(client.one(Step::delete(&table, ["x".into()]))).await?;
    let again = repeat(client.store.as_ref(), &plan).await?;
    same("the record once the row is gone", &placeless(&again), &placeless(&first))?;
    let log = client.exact_log(1).await?;
    same("the record in the log", &placeless(&log[0]), &placeless(&first))
}

pub(super) async fn a_look_up_tells_and_claims_nothing(namespace: &dyn TestNamespace) -> Result<()> {
    let table = counters("sought")?;
    let client = StoreClient::open(namespace, &[&table]).await?;
    let (store, tenant) = (client.store.as_ref(), &client.tenant);
    same("an operation that was not committed", &store.find_operation(tenant, "op").await?, &None)?;
    // Looking it up has not claimed it: it can still be applied.
    let entry =
        Entry::about("sought", "x").fingerprint("digest").event(EventTemplate::named("made").with_row_of(0));
    let plan = Plan::of(tenant, "op").step(Step::insert(&table, ["x".into()])).log(entry);
    let first = client.apply(plan).await?.record.context("the outcome has no record")?;
    let found = store.find_operation(tenant, "op").await?.context("the record is not found")?;
    same("the record that was looked up", &placeless(&found), &placeless(&first))?;
    let other = client.for_tenant("other")?;
    same("the same id of another tenant", &store.find_operation(&other.tenant, "op").await?, &None)?;
    same("an id that was fenced", &store.resolve(tenant, "fenced").await?, &Resolution::Aborted)?;
    let fenced = store.find_operation(tenant, "fenced").await?.context("the fence is not found")?;
    same("the fate of a fenced id", &fenced.status, &OperationStatus::Aborted)
}

pub(super) async fn another_plan_under_the_same_id_is_not_applied(
    namespace: &dyn TestNamespace,
) -> Result<()> {
    let table = counters("intents")?;
    let client = StoreClient::open(namespace, &[&table]).await?;
    let plan = |key: &str, event: &str| {
        let entry = Entry::about("intent", key).fingerprint(event).event(EventTemplate::named(event));
        Plan::of(&client.tenant, "same").step(Step::insert(&table, [key.into()])).log(entry)
    };
    let first = client.apply(plan("a", "first")).await?.record.context("the outcome has no record")?;
    let second = repeat(client.store.as_ref(), &plan("b", "second").build()?).await?;
    same("what the second plan learns", &placeless(&second), &placeless(&first))?;
    same("the row of the second plan", &client.find(&table, ["b".into()]).await?, &None)?;
    client.exact_log(1).await?;
    Ok(())
}

pub(super) async fn a_refusal_is_not_remembered(namespace: &dyn TestNamespace) -> Result<()> {
    let table = counters("attempts")?;
    let client = StoreClient::open(namespace, &[&table]).await?;
    let plan = || {
        let entry = Entry::about("attempt", "x").event(EventTemplate::named("attempted"));
        Plan::of(&client.tenant, "try").step(Step::update(&table, ["x".into()]).set("n", 1)).log(entry)
    };
    client.refuse_as(plan(), 0, &Reason::Absent).await?;
    client.refuse_as(plan(), 0, &Reason::Absent).await?;
    client.apply(client.one(Step::insert(&table, ["x".into()]))).await?;
    client.apply(plan()).await?;
    same("the row", &client.row(&table, ["x".into()]).await?.int("n"), &Some(1))?;
    client.exact_log(1).await?;
    Ok(())
}

pub(super) async fn tenants_have_operation_ids_of_their_own(namespace: &dyn TestNamespace) -> Result<()> {
    let table = counters("owned")?;
    let client = StoreClient::open(namespace, &[&table]).await?;
    let others = [client.for_tenant("other")?, client.for_tenant("Acme")?, client.for_tenant("acme-2")?];
    let plan = |client: &StoreClient| {
        let entry = Entry::about("thing", "x").event(EventTemplate::named("made"));
        Plan::of(&client.tenant, "op").step(Step::insert(&table, ["x".into()])).log(entry)
    };
    client.apply(plan(&client)).await?;
    for other in &others {
        let resolution = other.store.resolve(&other.tenant, "elsewhere").await?;
        same("an unknown operation", &resolution, &Resolution::Aborted)?;
        let record = other.apply(plan(other)).await?.record.context("the outcome has no record")?;
        same("whose record it is", &record.tenant, &other.tenant)?;
    }
    // Fencing an id for one tenant leaves it free for another.
    let mine = Plan::of(&client.tenant, "elsewhere").log(Entry::about("thing", "y"));
    client.apply(mine).await?;
    Ok(())
}

pub(super) async fn ids_are_told_apart_to_the_last_byte(namespace: &dyn TestNamespace) -> Result<()> {
    let client = StoreClient::open(namespace, &[]).await?;
    let long = "i".repeat(NAME_BYTES_MAX);
    let nearly = format!("{}j", "i".repeat(NAME_BYTES_MAX - 1));
    let ids = [
        "a",
        "A",
        "a ",
        " a",
        "á",
        "a\u{301}",
        "\u{1d11e}",
        "\u{fffd}",
        "a/b",
        "a#b",
        "%61",
        "a'b\"",
        "\u{1}",
        &long,
        &nearly,
    ];
    let entry = |id: &str| Entry::about("thing", "x").event(EventTemplate::named("noted").with("id", id));
    for id in ids {
        client.apply(Plan::of(&client.tenant, id).log(entry(id))).await?;
    }
    for id in ids {
        let record =
            repeat(client.store.as_ref(), &Plan::of(&client.tenant, id).log(entry(id)).build()?).await?;
        same("the id of the record", &record.operation.as_str(), &id)?;
        same("the data of the record", &record.events[0].data["id"], &id.into())?;
    }
    client.exact_log(ids.len()).await?;
    Ok(())
}

pub(super) async fn resolving_before_the_commit_fences_it(namespace: &dyn TestNamespace) -> Result<()> {
    let table = counters("fences")?;
    let client = StoreClient::open(namespace, &[&table]).await?;
    let entry = Entry::about("thing", "x").event(EventTemplate::named("made"));
    let plan =
        Plan::of(&client.tenant, "lost").step(Step::insert(&table, ["x".into()])).log(entry).build()?;
    for _ in 0..2 {
        let resolution = client.store.resolve(&client.tenant, "lost").await?;
        same("the fate of an operation that never came", &resolution, &Resolution::Aborted)?;
        let outcome = client.store.commit(&plan).await?;
        same("the outcome of a fenced operation", &outcome, &Commit::Fenced)?;
    }
    same("the row of a fenced operation", &client.find(&table, ["x".into()]).await?, &None)?;
    let log = client.exact_log(1).await?;
    let record = &log[0];
    same(
        "the record of the fence",
        &(record.status, record.operation.as_str()),
        &(OperationStatus::Aborted, "lost"),
    )?;
    ensure!(
        record.resource.is_empty() && record.key.is_empty() && record.events.is_empty(),
        "a fence has no subject and no events: {record:?}"
    );
    let partition = partition_of(&client.tenant, "", "lost", client.store.partitions());
    same("the partition of the fence", &record.position.map(|position| position.partition), &Some(partition))
}

pub(super) async fn resolving_after_the_commit_learns_of_it(namespace: &dyn TestNamespace) -> Result<()> {
    let table = counters("settled")?;
    let client = StoreClient::open(namespace, &[&table]).await?;
    let plan = client.noted("thing", "x", "made").step(Step::insert(&table, ["x".into()]));
    let operation = plan.operation.clone();
    let first = client.apply(plan.clone()).await?.record.context("the outcome has no record")?;
    for _ in 0..2 {
        match client.store.resolve(&client.tenant, &operation).await? {
            Resolution::Applied(record) => {
                same("what resolve learns", &placeless(&record), &placeless(&first))?;
            }
            Resolution::Aborted => bail!("an operation that was applied is called aborted"),
        }
    }
    repeat(client.store.as_ref(), &plan.build()?).await?;
    client.exact_log(1).await?;
    Ok(())
}

pub(super) async fn a_refused_operation_can_be_fenced(namespace: &dyn TestNamespace) -> Result<()> {
    let table = counters("late_fences")?;
    let client = StoreClient::open(namespace, &[&table]).await?;
    let plan = client.noted("thing", "x", "made").step(Step::update(&table, ["x".into()]));
    client.refuse_as(plan.clone(), 0, &Reason::Absent).await?;
    let resolution = client.store.resolve(&client.tenant, &plan.operation).await?;
    same("the fate of a refused operation", &resolution, &Resolution::Aborted)?;
    client.apply(client.one(Step::insert(&table, ["x".into()]))).await?;
    same("its outcome from now on", &client.store.commit(&plan.build()?).await?, &Commit::Fenced)?;
    same("the row", &client.row(&table, ["x".into()]).await?.version(), &1)
}

pub(super) async fn a_plan_without_an_entry_leaves_no_record(namespace: &dyn TestNamespace) -> Result<()> {
    let table = counters("unlogged")?;
    let client = StoreClient::open(namespace, &[&table]).await?;
    let count = Plan::of(&client.tenant, "again")
        .step(Step::upsert(&table, ["x".into()]).set("n", Operand::Coalesce("n".into(), 0.into()).add(1)));
    // Not remembered, so applied as often as it is sent; and another plan under the id is applied as well.
    for expected in 1..=3 {
        let applied = client.apply(count.clone()).await?;
        same("the record", &applied.record, &None)?;
        same("the count", &client.row(&table, ["x".into()]).await?.int("n"), &Some(expected))?;
    }
    client.apply(Plan::of(&client.tenant, "again").step(Step::insert(&table, ["y".into()]))).await?;
    same("the log", &client.exact_log(0).await?, &Vec::new())?;
    let resolution = client.store.resolve(&client.tenant, "again").await?;
    same("what resolve finds of it", &resolution, &Resolution::Aborted)
}

pub(super) async fn an_entry_alone_is_a_plan(namespace: &dyn TestNamespace) -> Result<()> {
    let client = StoreClient::open(namespace, &[]).await?;
    let plan = client.plan().log(Entry::about("request", "42"));
    let applied = client.apply(plan.clone()).await?;
    ensure!(applied.rows.is_empty(), "a plan without steps has no rows, and shows {:?}", applied.rows);
    let first = applied.record.context("the outcome has no record")?;
    ensure!(first.events.is_empty(), "an entry without events gave {:?}", first.events);
    let again = repeat(client.store.as_ref(), &plan.build()?).await?;
    same("the record of the repetition", &placeless(&again), &placeless(&first))
}

pub(super) async fn one_of_many_equal_commits_is_applied(namespace: &dyn TestNamespace) -> Result<()> {
    let table = counters("stampedes")?;
    let client = StoreClient::open(namespace, &[&table]).await?;
    client.apply(client.one(Step::insert(&table, ["x".into()]))).await?;
    for round in 1..=15_i64 {
        let step = Step::update(&table, ["x".into()]).set("n", column("n").add(1));
        let plan = client.noted("thing", "x", "counted").step(step).build()?;
        let mut tasks = JoinSet::new();
        for _ in 0..5 {
            let (store, plan) = (client.store.clone(), plan.clone());
            tasks.spawn(async move { store.commit(&plan).await });
        }
        let (mut firsts, mut records) = (0, Vec::new());
        while let Some(outcome) = tasks.join_next().await {
            let applied = outcome??.applied().context("an equal commit was neither applied nor repeated")?;
            firsts += usize::from(!applied.repeated);
            records.push(placeless(&applied.record.context("the outcome has no record")?));
        }
        same("commits that were the first", &firsts, &1)?;
        ensure!(records.windows(2).all(|pair| pair[0] == pair[1]), "the records differ: {records:?}");
        same("the count", &client.row(&table, ["x".into()]).await?.int("n"), &Some(round))?;
    }
    client.exact_log(15).await?;
    Ok(())
}

pub(super) async fn one_of_many_plans_under_one_id_is_applied(namespace: &dyn TestNamespace) -> Result<()> {
    // The plans name different rows, so nothing but the operation id keeps them apart.
    let table = counters("impostors")?;
    let client = StoreClient::open(namespace, &[&table]).await?;
    for round in 0..15 {
        let mut tasks = JoinSet::new();
        for contender in 0..4 {
            let key = format!("{round}/{contender}");
            let entry = Entry::about("impostor", key.as_str()).fingerprint(key.as_str());
            let plan = Plan::of(&client.tenant, format!("round-{round}"));
            let plan = plan.step(Step::insert(&table, [key.as_str().into()])).log(entry).build()?;
            let store = client.store.clone();
            tasks.spawn(async move { (key, store.commit(&plan).await) });
        }
        let (mut winners, mut fingerprints) = (Vec::new(), Vec::new());
        while let Some(joined) = tasks.join_next().await {
            let (key, outcome) = joined?;
            let applied = outcome?.applied().context("a commit was neither applied nor repeated")?;
            fingerprints.push(applied.record.context("the outcome has no record")?.fingerprint);
            let there = client.find(&table, [key.as_str().into()]).await?.is_some();
            ensure!(
                there != applied.repeated,
                "{key}: repeated is {}, its row is there: {there}",
                applied.repeated
            );
            if !applied.repeated {
                winners.push(key);
            }
        }
        ensure!(winners.len() == 1, "{} plans were applied under one id: {winners:?}", winners.len());
        ensure!(
            fingerprints.iter().all(|fingerprint| *fingerprint == winners[0]),
            "{} won, and the records are of {fingerprints:?}",
            winners[0]
        );
    }
    client.exact_log(15).await?;
    Ok(())
}

pub(super) async fn commit_and_resolve_race_and_all_agree(namespace: &dyn TestNamespace) -> Result<()> {
    let table = counters("duels")?;
    let client = StoreClient::open(namespace, &[&table]).await?;
    for round in 0..40 {
        let key = round.to_string();
        let plan =
            client.noted("duel", &key, "won").step(Step::insert(&table, [key.as_str().into()])).build()?;
        let mut tasks: JoinSet<Result<bool>> = JoinSet::new();
        let commit = {
            let (store, plan) = (client.store.clone(), plan.clone());
            async move {
                match store.commit(&plan).await? {
                    Commit::Applied(_) => Ok(true),
                    Commit::Fenced => Ok(false),
                    Commit::Refused(refused) => bail!("the race was refused: {refused:?}"),
                }
            }
        };
        let resolve = || {
            let (store, plan) = (client.store.clone(), plan.clone());
            async move {
                let resolution = store.resolve(plan.tenant(), plan.operation()).await?;
                Ok(matches!(resolution, Resolution::Applied(_)))
            }
        };
        // Who is started first changes, and sometimes the commit gets a head start, so that both sides get to win.
        if round % 3 == 0 {
            tasks.spawn(resolve());
        }
        tasks.spawn(commit);
        if round % 3 == 1 {
            pause().await;
        }
        tasks.spawn(resolve());
        tasks.spawn(resolve());
        let mut answers = Vec::new();
        while let Some(answer) = tasks.join_next().await {
            answers.push(answer??);
        }
        let there = client.find(&table, [key.as_str().into()]).await?.is_some();
        ensure!(
            answers.iter().all(|answer| *answer == there),
            "round {round}: the answers are {answers:?} (true: applied), and the row is there: {there}"
        );
        // Settled once, settled for good.
        let later =
            matches!(client.store.commit(&plan).await?, Commit::Applied(Applied { repeated: true, .. }));
        same("a commit after the race", &later, &there)?;
    }
    client.exact_log(40).await?;
    Ok(())
}
