//! Plans about several subjects: each event is read once, from its own subject's partition, in the order of the writes.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use anyhow::{Context, Result, bail, ensure};
use statehouse_store::faulty::{FaultyStore, Odds};
use statehouse_store::guard::column;
use statehouse_store::limits::PAGE_MAX;
use statehouse_store::log::partition_of;
use statehouse_store::plan::PlanBuilder;
use statehouse_store::{
    Applied, Commit, Entry, EventTemplate, Operand, Plan, Record, Resolution, Step, Store, StoreError,
    SystemClock, Table,
};
use tokio::task::JoinSet;

use crate::harness::engines::TestNamespace;
use crate::harness::sample_inputs::values::counters;
use crate::harness::store_client::{StoreClient, pause, same, whole_log};

/// A step that counts a row up, from nothing.
fn count(table: &Arc<Table>, key: &str) -> Step {
    Step::upsert(table, [key.into()]).set("n", Operand::Coalesce("n".into(), 0.into()).add(1))
}

/// A plan that counts rows up, with an event for each that has the row, about that row.
fn batch(plan: PlanBuilder, table: &Arc<Table>, keys: &[&str]) -> PlanBuilder {
    let first = keys.first().copied().unwrap_or_default();
    let mut entry = Entry::about("row", first).fingerprint("digest");
    for (index, key) in keys.iter().enumerate() {
        let event = EventTemplate::named("row.counted").with("key", *key).with_row_of(index);
        entry = entry.event(if index == 0 { event } else { event.about("row", *key) });
    }
    plan.steps(keys.iter().map(|key| count(table, key))).log(entry)
}

/// The key and the version in each event of a record.
fn told(record: &Record) -> Result<Vec<(String, i64)>> {
    let one = |event: &statehouse_store::Event| {
        let key = event.data["key"].as_str()?.to_owned();
        Some((key, event.data["row"]["version"].as_i64()?))
    };
    let events = record.events.iter().map(one).collect::<Option<Vec<_>>>();
    events.with_context(|| format!("an event without its row: {record:?}"))
}

/// The versions of each row in the order of a reader that goes through one partition after the other. Requires that all
/// events of a row stand in the partition of the row's subject.
fn versions(client: &StoreClient, records: &[Record]) -> Result<BTreeMap<String, Vec<i64>>> {
    let mut versions: BTreeMap<String, Vec<i64>> = BTreeMap::new();
    for record in records {
        let partition = record.position.context("a record in the log has no position")?.partition;
        for (key, version) in told(record)? {
            let own = partition_of(&client.tenant, "row", &key, client.store.partitions());
            same(&format!("the partition of row {key}"), &partition, &own)?;
            versions.entry(key).or_default().push(version);
        }
    }
    Ok(versions)
}

/// Requires the log to have each version of these rows once, in order.
async fn is_complete(client: &StoreClient, table: &Arc<Table>, keys: &[&str]) -> Result<()> {
    let found = versions(client, &whole_log(client.store.as_ref()).await?)?;
    for key in keys {
        let row = client.row(table, [(*key).into()]).await?;
        let expected: Vec<i64> = (1..=row.version()).collect();
        same(&format!("the versions of row {key}"), found.get(*key).unwrap_or(&Vec::new()), &expected)?;
    }
    same("the rows in the log", &found.len(), &keys.len())
}

pub(super) async fn a_rows_events_are_read_in_the_order_of_its_versions(
    namespace: &dyn TestNamespace,
) -> Result<()> {
    let table = counters("batched")?;
    let client = StoreClient::open(namespace, &[&table]).await?;
    for turn in 0..20 {
        client.apply(batch(client.plan(), &table, &["a", "b"])).await?;
        client.apply(batch(client.plan(), &table, &["b"])).await?;
        if turn == 10 {
            is_complete(&client, &table, &["a", "b"]).await?;
        }
    }
    is_complete(&client, &table, &["a", "b"]).await
}

pub(super) async fn each_event_is_read_once_from_its_own_partition(
    namespace: &dyn TestNamespace,
) -> Result<()> {
    let table = counters("spread")?;
    let client = StoreClient::open(namespace, &[&table]).await?;
    let rows: Vec<String> = (0..24).map(|row| format!("row {row}")).collect();
    let keys: Vec<&str> = rows.iter().map(String::as_str).collect();
    let mut operations: BTreeMap<&str, String> = BTreeMap::new();
    for keys in keys.chunks(4) {
        let plan = batch(client.plan(), &table, keys);
        operations.extend(keys.iter().map(|key| (*key, plan.operation.clone())));
        client.apply(plan).await?;
    }
    is_complete(&client, &table, &keys).await?;
    for record in whole_log(client.store.as_ref()).await? {
        let told = told(&record)?;
        let (first, _) = told.first().context("a record without events")?;
        same("the subject of a record", &(record.resource.as_str(), &record.key), &("row", first))?;
        for (key, _) in &told {
            same("the operation of a record", &Some(&record.operation), &operations.get(key.as_str()))?;
        }
        same("the fingerprint", &record.fingerprint.as_str(), &"digest")?;
    }
    Ok(())
}

pub(super) async fn an_event_about_the_entrys_subject_stays_with_it(
    namespace: &dyn TestNamespace,
) -> Result<()> {
    let client = StoreClient::open(namespace, &[]).await?;
    let draft = |name: &str| EventTemplate::named(name).with("key", "x");
    let entry = Entry::about("row", "x").event(draft("first")).event(draft("second").about("row", "x"));
    let plan = client.plan().log(entry.event(draft("third").about("other", "x"))).build()?;
    let Commit::Applied(Applied { record: Some(record), .. }) = client.store.commit(&plan).await? else {
        bail!("a plan without steps was not applied");
    };
    let names = |record: &Record| record.events.iter().map(|event| event.name.clone()).collect::<Vec<_>>();
    same(
        "all events, in their order",
        &names(&record),
        &["first", "second", "third"].map(str::to_owned).to_vec(),
    )?;
    let mut found: BTreeMap<u32, Vec<String>> = BTreeMap::new();
    for record in whole_log(client.store.as_ref()).await? {
        let partition = record.position.context("no position")?.partition;
        found.entry(partition).or_default().extend(names(&record));
    }
    let mut expected: BTreeMap<u32, Vec<String>> = BTreeMap::new();
    for (resource, name) in [("row", "first"), ("row", "second"), ("other", "third")] {
        let partition = partition_of(&client.tenant, resource, "x", client.store.partitions());
        expected.entry(partition).or_default().push(name.to_owned());
    }
    same("the events of each partition", &found, &expected)
}

/// What can be compared of two records of an operation: the one of its commit has positions, others need not.
fn unplaced(record: &Record) -> Record {
    Record { position: None, also_at: Vec::new(), ..record.clone() }
}

pub(super) async fn a_repetition_gets_all_events_of_the_first(namespace: &dyn TestNamespace) -> Result<()> {
    let table = counters("repeated")?;
    let client = StoreClient::open(namespace, &[&table]).await?;
    let keys = ["a", "b", "c", "d"];
    let plan = batch(client.plan(), &table, &keys).build()?;
    let Commit::Applied(Applied { record: Some(first), repeated: false, .. }) =
        client.store.commit(&plan).await?
    else {
        bail!("the batch was not applied");
    };
    same("what the first says", &told(&first)?, &keys.map(|key| (key.to_owned(), 1)).to_vec())?;
    client.apply(batch(client.plan(), &table, &keys)).await?;
    // Before and after the log was read, which gives records their places on some engines.
    for turn in 0..2 {
        let Commit::Applied(Applied { record: Some(again), repeated: true, .. }) =
            client.store.commit(&plan).await?
        else {
            bail!("turn {turn}: the second commit is not a repetition");
        };
        same("a repetition", &unplaced(&again), &unplaced(&first))?;
        let found = client.store.find_operation(&client.tenant, plan.operation()).await?;
        let found = found.context("the operation is not known")?;
        same("a look up", &unplaced(&found), &unplaced(&first))?;
        let Resolution::Applied(resolved) = client.store.resolve(&client.tenant, plan.operation()).await?
        else {
            bail!("turn {turn}: the operation was applied");
        };
        same("what a resolution learns", &unplaced(&resolved), &unplaced(&first))?;
        is_complete(&client, &table, &keys).await?;
    }
    Ok(())
}

pub(super) async fn the_answer_to_a_commit_says_every_place_or_none(
    namespace: &dyn TestNamespace,
) -> Result<()> {
    let table = counters("placed")?;
    let client = StoreClient::open(namespace, &[&table]).await?;
    for turn in 0..10 {
        let keys = [format!("a{turn}"), format!("b{turn}"), format!("c{turn}")];
        let keys: Vec<&str> = keys.iter().map(String::as_str).collect();
        let plan = batch(client.plan(), &table, &keys);
        let operation = plan.operation.clone();
        let record = client.apply(plan).await?.record.context("no record")?;
        let log = whole_log(client.store.as_ref()).await?;
        let places = log.iter().filter(|logged| logged.operation == operation);
        let places: BTreeSet<_> = places.filter_map(|logged| logged.position).collect();
        match record.position {
            Some(position) => {
                let said: BTreeSet<_> = record.also_at.iter().copied().chain([position]).collect();
                same("where the records stand", &said, &places)?;
            }
            None => same("further places", &record.also_at, &Vec::new())?,
        }
    }
    Ok(())
}

pub(super) async fn what_is_not_applied_leaves_nothing_in_any_partition(
    namespace: &dyn TestNamespace,
) -> Result<()> {
    let table = counters("fenced")?;
    let client = StoreClient::open(namespace, &[&table]).await?;
    let keys = ["a", "b", "c"];
    let fenced = batch(client.plan(), &table, &keys).build()?;
    same("a fence", &client.store.resolve(&client.tenant, fenced.operation()).await?, &Resolution::Aborted)?;
    ensure!(matches!(client.store.commit(&fenced).await?, Commit::Fenced), "a fenced batch was applied");
    let mut refused = batch(client.plan(), &table, &keys);
    refused.steps[2] = Step::update(&table, ["c".into()]).guard(column("n").eq(7)).set("n", 8);
    client.refuse(refused).await?;
    let events = |records: Vec<Record>| records.iter().map(|record| record.events.len()).sum::<usize>();
    same("events", &events(whole_log(client.store.as_ref()).await?), &0)?;
    // Under the id of a refused one it can be tried again.
    client.apply(batch(client.plan(), &table, &keys)).await?;
    same("events", &events(whole_log(client.store.as_ref()).await?), &3)
}

pub(super) async fn a_batch_whose_answer_was_lost_is_found(namespace: &dyn TestNamespace) -> Result<()> {
    let table = counters("lost")?;
    let client = StoreClient::open(namespace, &[&table]).await?;
    let odds = Odds { unknown_before: 0.4, unknown_after: 0.4, ..Odds::default() };
    let faulty = FaultyStore::over(client.store.clone(), Arc::new(SystemClock), odds, 7);
    let keys = ["a", "b", "c"];
    for turn in 1..=15 {
        let plan = batch(client.plan(), &table, &keys).build()?;
        let record = loop {
            match faulty.commit(&plan).await {
                Ok(Commit::Applied(Applied { record: Some(record), .. })) => break record,
                Err(StoreError::OutcomeUnknown { .. }) => {}
                other => bail!("expected the batch to be applied, got {other:?}"),
            }
        };
        same("what the batch says", &told(&record)?, &keys.map(|key| (key.to_owned(), turn)).to_vec())?;
    }
    let achieved = faulty.achieved();
    ensure!(achieved.unknown_before > 0 && achieved.unknown_after > 0, "{achieved}");
    is_complete(&client, &table, &keys).await
}

const SHARED: [&str; 6] = ["a", "b", "c", "d", "e", "f"];

/// Commits batches of two to four of the shared rows, and single ones, from several tasks.
async fn write_concurrently(
    client: &StoreClient,
    table: &Arc<Table>,
    tasks: usize,
    each: usize,
) -> Result<()> {
    let mut running: JoinSet<Result<()>> = JoinSet::new();
    for task in 0..tasks {
        let (client, table) = (client.clone(), table.clone());
        running.spawn(async move {
            for turn in 0..each {
                let count = 1 + (task + turn) % 4;
                let keys: Vec<&str> =
                    (0..count).map(|index| SHARED[(task * 5 + turn * 7 + index) % SHARED.len()]).collect();
                client.apply(batch(client.plan(), &table, &keys)).await?;
            }
            Ok(())
        });
    }
    while let Some(done) = running.join_next().await {
        done??;
    }
    Ok(())
}

pub(super) async fn concurrent_batches_are_read_in_the_order_of_versions(
    namespace: &dyn TestNamespace,
) -> Result<()> {
    let table = counters("raced")?;
    let client = StoreClient::open(namespace, &[&table]).await?;
    let done = Arc::new(AtomicBool::new(false));
    let (store, flag) = (client.store.clone(), done.clone());
    // A reader beside the writers, which meets records while others of the same plan are not there yet.
    let reader = tokio::spawn(async move {
        let mut seen: Vec<u64> = vec![0; store.partitions() as usize];
        let mut records: Vec<Record> = Vec::new();
        loop {
            let last = flag.load(Ordering::SeqCst);
            for (partition, after) in (0..).zip(&mut seen) {
                let page = store.read_log(partition, *after, PAGE_MAX).await?;
                for record in page.records {
                    let position = record.position.context("no position")?;
                    ensure!(position.offset == *after + 1, "{position} after {after}");
                    *after = position.offset;
                    records.push(record);
                }
            }
            if last {
                return Ok::<_, anyhow::Error>(records);
            }
            pause().await;
        }
    });
    write_concurrently(&client, &table, 6, 15).await?;
    done.store(true, Ordering::SeqCst);
    let records = reader.await??;
    for (key, versions) in versions(&client, &records)? {
        let row = client.row(&table, [key.as_str().into()]).await?;
        same(&format!("row {key}, while it was written"), &versions, &(1..=row.version()).collect())?;
    }
    is_complete(&client, &table, &SHARED).await
}

pub(super) async fn trimming_a_further_record_forgets_no_operation(
    namespace: &dyn TestNamespace,
) -> Result<()> {
    let table = counters("trimmed")?;
    let client = StoreClient::open(namespace, &[&table]).await?;
    let partitions = client.store.partitions();
    let partition = |key: &str| partition_of(&client.tenant, "row", key, partitions);
    let other = (0..)
        .map(|number: u32| format!("b{number}"))
        .find(|key| partitions == 1 || partition(key) != partition("a"));
    let keys = ["a", &other.context("there is always another")?];
    let plan: Plan = batch(client.plan(), &table, &keys).build()?;
    client.store.commit(&plan).await?;
    client.apply(batch(client.plan(), &table, &keys[1..])).await?;
    let known = async || client.store.find_operation(&client.tenant, plan.operation()).await;
    if partitions > 1 {
        same("the further record's place", &read(&client, partition(keys[1])).await?, &vec![1, 2])?;
        client.store.trim_log(partition(keys[1]), 1).await?;
        same("what is left of it", &read(&client, partition(keys[1])).await?, &vec![2])?;
        let record = known().await?.context("the operation was forgotten")?;
        same("its events", &told(&record)?.len(), &2)?;
    }
    client.apply(batch(client.plan(), &table, &keys[..1])).await?;
    whole_log(client.store.as_ref()).await?;
    client.store.trim_log(partition(keys[0]), 1).await?;
    same("what is known of it", &known().await?, &None)?;
    // The id is free again, and stays so while records of its further partitions are kept.
    for version in [3, 5] {
        client.apply(batch(Plan::of(&client.tenant, plan.operation()), &table, &keys)).await?;
        let row = client.row(&table, [keys[0].into()]).await?;
        same("the version", &row.version(), &version)?;
        client.apply(batch(client.plan(), &table, &keys[..1])).await?;
        let own = client.store.read_log(partition(keys[0]), 0, PAGE_MAX).await?;
        client.store.trim_log(partition(keys[0]), own.head - 1).await?;
        same("what is known of it", &known().await?, &None)?;
    }
    Ok(())
}

/// The versions of the only row that a partition tells of.
async fn read(client: &StoreClient, partition: u32) -> Result<Vec<i64>> {
    let page = client.store.read_log(partition, 0, PAGE_MAX).await?;
    let told = page.records.iter().map(told).collect::<Result<Vec<_>>>()?;
    Ok(told.into_iter().flatten().map(|(_, version)| version).collect())
}

pub(super) async fn the_largest_batch(namespace: &dyn TestNamespace) -> Result<()> {
    let table = counters("largest")?;
    let client = StoreClient::open(namespace, &[&table]).await?;
    // 83 steps, 2 for the log entry, 15 for the other partitions.
    let rows: Vec<String> = (0..84).map(|row| format!("row {row}")).collect();
    let keys: Vec<&str> = rows.iter().map(String::as_str).collect();
    let error = batch(client.plan(), &table, &keys).build().err().context("84 rows were taken")?;
    let said = error.to_string();
    ensure!(said.contains("84 steps") && said.contains("101") && said.contains("100"), "{said}");
    for _ in 0..2 {
        client.apply(batch(client.plan(), &table, &keys[..83])).await?;
    }
    is_complete(&client, &table, &keys[..83]).await
}

/// A plan that changes rows in the same way, with an event for each that has no row.
fn alike(plan: PlanBuilder, keys: &[&str], step: impl Fn(&str) -> Step, turn: i64) -> PlanBuilder {
    let mut entry = Entry::about("row", keys.first().copied().unwrap_or_default());
    for (index, key) in keys.iter().enumerate() {
        let event = EventTemplate::named("row.set").with("key", *key).with("turn", turn);
        entry = entry.event(if index == 0 { event } else { event.about("row", *key) });
    }
    plan.steps(keys.iter().map(|key| step(key))).log(entry).without_rows()
}

/// Engines may have a way of their own for plans of many steps of one shape.
pub(super) async fn steps_of_one_shape_are_told_row_by_row(namespace: &dyn TestNamespace) -> Result<()> {
    let table = counters("alike")?;
    let client = StoreClient::open(namespace, &[&table]).await?;
    let keys = ["a", "b", "c", "d"];
    client.apply(client.plan().steps(keys.map(|key| Step::insert(&table, [key.into()]).set("n", 0)))).await?;
    let set = |from: i64| {
        let table = table.clone();
        move |key: &str| Step::update(&table, [key.into()]).guard(column("n").eq(from)).set("n", from + 1)
    };
    for turn in 0..3 {
        client.refuse(alike(client.plan(), &keys, set(turn + 7), turn)).await?;
        client.apply(alike(client.plan(), &keys, set(turn), turn)).await?;
        // All of them or none: one is ahead of the others.
        client.apply(alike(client.plan(), &keys[..1], set(turn + 1), turn)).await?;
        client.refuse(alike(client.plan(), &keys, set(turn + 1), turn)).await?;
        client.apply(client.plan().step(Step::update(&table, ["a".into()]).set("n", turn + 1))).await?;
    }
    let last = alike(client.plan(), &keys, |key| Step::delete(&table, [key.into()]), 3).build()?;
    let Commit::Applied(Applied { record: Some(first), repeated: false, .. }) =
        client.store.commit(&last).await?
    else {
        bail!("the rows were not deleted");
    };
    let Commit::Applied(Applied { record: Some(again), repeated: true, .. }) =
        client.store.commit(&last).await?
    else {
        bail!("the second commit is not a repetition");
    };
    same("a repetition", &unplaced(&again), &unplaced(&first))?;
    let mut found: BTreeMap<String, Vec<i64>> = BTreeMap::new();
    for record in whole_log(client.store.as_ref()).await? {
        let position = record.position.context("no position")?;
        for event in &record.events {
            let key = event.data["key"].as_str().context("no key")?;
            let own = partition_of(&client.tenant, "row", key, client.store.partitions());
            same(&format!("the partition of row {key}"), &position.partition, &own)?;
            found.entry(key.to_owned()).or_default().push(event.data["turn"].as_i64().context("no turn")?);
        }
        if record.operation == last.operation() && first.position.is_some() {
            let places = first.position.iter().chain(&first.also_at);
            ensure!(places.clone().any(|place| *place == position), "{position} is not in {first:?}");
        }
    }
    for key in keys {
        let expected = if key == "a" { vec![0, 0, 1, 1, 2, 2, 3] } else { vec![0, 1, 2, 3] };
        same(&format!("what is told of row {key}"), found.get(key).unwrap_or(&Vec::new()), &expected)?;
    }
    Ok(())
}
