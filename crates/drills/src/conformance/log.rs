//! The log: gapless, in the order of the commits, complete, woken, trimmed.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};
use serde_json::json;
use statehouse_store::guard::column;
use statehouse_store::limits::PAGE_MAX;
use statehouse_store::log::partition_of;
use statehouse_store::{
    Clock, Commit, Entry, Event, EventTemplate, ManualClock, Operand, OperationStatus, Plan, Record, Step,
    Store, StoreError, SystemClock, Table, Tenant, Time, Type, Value,
};
use tokio::task::JoinSet;

use crate::harness::engines::TestNamespace;
use crate::harness::sample_inputs::values::{counters, longest_ladder, of_every_type, sample};
use crate::harness::store_client::{StoreClient, fails, pause, same, whole_log};

/// A bound on waiting for something that has to come. Reached only by a store that fails.
const PATIENCE: Duration = Duration::from_secs(30);

pub(super) async fn offsets_count_from_one_in_the_subjects_partition(
    namespace: &dyn TestNamespace,
) -> Result<()> {
    let client = StoreClient::open(namespace, &[]).await?;
    let partitions = client.store.partitions();
    ensure!(partitions > 0, "the log has no partitions");
    let mut expected: BTreeMap<u32, Vec<String>> = BTreeMap::new();
    let tenants = [client.clone(), client.for_tenant("other")?];
    for number in 0..60 {
        let client = &tenants[number % 2];
        let (resource, key) = (["post", "comment"][number % 3 % 2], format!("key {}", number % 7));
        let plan = client.noted(resource, &key, "noted");
        let partition = partition_of(&client.tenant, resource, &key, partitions);
        expected.entry(partition).or_default().push(plan.operation.clone());
        let applied = client.apply(plan).await?;
        if let Some(position) = applied.record.and_then(|record| record.position) {
            same("the partition in the commit's answer", &position.partition, &partition)?;
            let offset = expected[&partition].len() as u64;
            same("the offset in the commit's answer", &position.offset, &offset)?;
        }
    }
    // Offsets and gaps are checked as the log is read.
    let mut found: BTreeMap<u32, Vec<String>> = BTreeMap::new();
    for record in client.exact_log(60).await? {
        let position = record.position.context("a record in the log has no position")?;
        found.entry(position.partition).or_default().push(record.operation);
    }
    same("the operations of each partition", &found, &expected)?;
    for partition in 0..partitions {
        let page = client.store.read_log(partition, 0, PAGE_MAX).await?;
        let count = expected.get(&partition).map_or(0, Vec::len) as u64;
        same("oldest and head", &(page.oldest, page.head), &(1, count))?;
    }
    Ok(())
}

pub(super) async fn records_say_what_was_committed(namespace: &dyn TestNamespace) -> Result<()> {
    let table = counters("subjects")?;
    let at = Time::from_micros(1_700_000_000_000_007);
    let client = StoreClient::open_at(namespace, Arc::new(ManualClock::at(at)), &[&table]).await?;
    let entry = Entry::about("subject", "s/1")
        .fingerprint("0123abcd")
        .event(EventTemplate::named("subject.made").with("by", "ann").with("parts", json!([1, {"a": null}])))
        .event(EventTemplate::named("subject.seen"))
        .event(EventTemplate::named("subject.made").with("by", 2.0));
    let plan = Plan::of(&client.tenant, "operation 1").step(Step::insert(&table, ["x".into()])).log(entry);
    let answered = client.apply(plan).await?.record.context("the outcome has no record")?;
    let log = client.exact_log(1).await?;
    let event = |name: &str, data: serde_json::Value| Event { name: name.into(), data, actor: None };
    let expected = Record {
        also_at: Vec::new(),
        position: log[0].position,
        tenant: client.tenant.clone(),
        operation: "operation 1".into(),
        resource: "subject".into(),
        key: "s/1".into(),
        at,
        fingerprint: "0123abcd".into(),
        status: OperationStatus::Applied,
        events: vec![
            event("subject.made", json!({"by": "ann", "parts": [1, {"a": null}]})),
            event("subject.seen", json!({})),
            event("subject.made", json!({"by": 2})),
        ],
    };
    same("the record in the log", &log[0], &expected)?;
    if answered.position.is_some() {
        same("the record in the answer", &answered, &expected)?;
    }
    same(
        "the record in the answer, apart from its position",
        &Record { position: expected.position, ..answered },
        &expected,
    )
}

/// Whatever the shape of the plan: with rows in events or without, alone or in several partitions.
pub(super) async fn events_say_who_caused_them(namespace: &dyn TestNamespace) -> Result<()> {
    let table = counters("caused")?;
    let client = StoreClient::open(namespace, &[&table]).await?;
    let (actor, other) = (Some("token:ä\"\\1"), Some("key:2"));
    let step = |key: &str| Step::insert(&table, [key.into()]).set("n", 1);
    let event = |name: &str| EventTemplate::named(name).by(actor);
    let plans = [
        client.one(step("a")).log(Entry::about("row", "a").event(event("plain"))),
        client.one(step("b")).log(Entry::about("row", "b").event(event("with row").with_row_of(0))),
        client.one(Step::update(&table, ["a".into()]).set("n", column("n").add(1))).log(
            Entry::about("row", "a").event(event("changed").with_row_of(0)).event(event("also").by(other)),
        ),
        client
            .one(Step::delete(&table, ["b".into()]))
            .log(Entry::about("row", "b").event(event("deleted").with_row_of(0)).event(event("no").by(None))),
        (0..4).fold(client.plan(), |plan, number| plan.step(step(&format!("c{number}")))).log((0..4).fold(
            Entry::about("row", "c0"),
            |entry, number| {
                entry.event(event("one of several").with("n", number).about("row", format!("c{number}")))
            },
        )),
    ];
    let mut expected: Vec<(String, Option<String>)> = Vec::new();
    for plan in plans {
        let actors = plan.entry.iter().flat_map(|entry| &entry.events);
        expected.extend(actors.map(|event| (event.name.clone(), event.actor.clone())));
        let plan = plan.build()?;
        let of = |record: &Record| -> Vec<Option<String>> {
            record.events.iter().map(|event| event.actor.clone()).collect()
        };
        for _ in 0..2 {
            let applied = client.store.commit(&plan).await?.applied().context("it was not applied")?;
            let record = applied.record.context("the outcome has no record")?;
            let found = client.store.find_operation(&client.tenant, plan.operation()).await?;
            let found = found.context("the operation is not found")?;
            same("the actors of the operation", &of(&found), &of(&record))?;
            ensure!(of(&record).iter().flatten().count() > 0, "the answer names no actor: {record:?}");
        }
    }
    let mut found: Vec<(String, Option<String>)> = Vec::new();
    // Engines that number records after their commit show them some moments later.
    for _ in 0..1_000 {
        let records = whole_log(&*client.store).await?.into_iter();
        found = records.flat_map(|record| record.events).map(|event| (event.name, event.actor)).collect();
        if found.len() >= expected.len() {
            break;
        }
        pause().await;
    }
    expected.sort();
    found.sort();
    same("the actors in the log", &found, &expected)
}

pub(super) async fn events_carry_the_rows_of_steps(namespace: &dyn TestNamespace) -> Result<()> {
    let table = counters("carried")?;
    let client = StoreClient::open(namespace, &[&table]).await?;
    let setup = [Step::insert(&table, ["gone".into()]).set("n", 4), Step::insert(&table, ["kept".into()])];
    client.apply(client.plan().steps(setup)).await?;
    let entry = Entry::about("carrier", "x")
        .event(EventTemplate::named("updated").with("why", "test").with_row_of(0))
        .event(EventTemplate::named("deleted").with_row_of(1))
        .event(EventTemplate::named("inserted").with_row_of(2))
        .event(EventTemplate::named("removed nothing").with_row_of(3))
        .event(EventTemplate::named("updated again").with_row_of(0))
        .event(EventTemplate::named("plain").with("row", "the caller's own"));
    let steps = [
        Step::update(&table, ["kept".into()]).set("n", column("n").add(9)),
        Step::delete(&table, ["gone".into()]),
        Step::upsert(&table, ["new".into()]).set("n", 1),
        Step::remove(&table, ["nothing".into()]),
        Step::assert_absent(&table, ["nobody".into()]),
    ];
    // The rows are wanted by the events even where the caller does without them.
    client.apply(client.plan().steps(steps).log(entry).without_rows()).await?;
    let log = client.exact_log(1).await?;
    let data: Vec<serde_json::Value> = log[0].events.iter().map(|event| event.data.clone()).collect();
    let expected = vec![
        json!({"why": "test", "row": {"id": "kept", "n": 9, "version": 2}}),
        json!({"row": {"id": "gone", "n": 4, "version": 1}}),
        json!({"row": {"id": "new", "n": 1, "version": 1}}),
        json!({"row": null}),
        json!({"row": {"id": "kept", "n": 9, "version": 2}}),
        json!({"row": "the caller's own"}),
    ];
    same("the data of the events", &data, &expected)
}

pub(super) async fn rows_in_events_have_every_type(namespace: &dyn TestNamespace) -> Result<()> {
    let table = of_every_type("shown").build()?;
    let client = StoreClient::open(namespace, &[&table]).await?;
    let spelled = Step::insert(&table, [(-1).into()])
        .set("text", "ü'\u{1d11e}")
        .set("int", i64::MIN)
        .set("float", 2.5)
        .set("bool", true)
        .set("bytes", vec![0, 255])
        .set("time", Time::from_micros(-7))
        .set("json", json!({"a": [1, null]}));
    let plan = client.plan().step(spelled);
    client
        .apply(plan.log(Entry::about("shown", "spelled").event(EventTemplate::named("shown").with_row_of(0))))
        .await?;
    let expected = json!({
        "id": -1, "version": 1,
        "text": "ü'\u{1d11e}", "int": i64::MIN, "float": 2.5, "bool": true, "bytes": "AP8=",
        "time": "1969-12-31T23:59:59.999993Z", "json": {"a": [1, null]},
        "other_text": null, "other_int": null, "other_float": null, "other_bool": null, "other_bytes": null,
        "other_time": null, "other_json": null,
    });
    same("a row in an event", &client.exact_log(1).await?[0].events[0].data["row"], &expected)?;
    for place in 0..longest_ladder() {
        let key = [Value::from(place as i64)];
        let mut step = Step::insert(&table, key.clone());
        for kind in Type::ALL {
            step = step.set(kind.name(), sample(kind, place));
        }
        let entry = Entry::about("shown", "ladder").event(EventTemplate::named("shown").with_row_of(0));
        let applied = client.apply(client.plan().step(step).log(entry)).await?;
        let record = applied.record.context("the outcome has no record")?;
        let row = client.row(&table, key).await?;
        same("the row in the answer's event", &record.events[0].data["row"], &row.to_json())?;
    }
    let count = 1 + longest_ladder();
    for record in client.exact_log(count).await?.iter().filter(|record| record.key == "ladder") {
        let shown = &record.events[0].data["row"];
        let id = shown["id"].as_i64().context("the row in the event has no id")?;
        same("the row in the log's event", shown, &client.row(&table, [id.into()]).await?.to_json())?;
    }
    Ok(())
}

/// Commits increments of shared rows from several tasks. Each plan's subject is its first row, and its events carry
/// both rows.
async fn write_concurrently(client: &StoreClient, table: &Arc<Table>, tasks: i64, each: i64) -> Result<()> {
    let mut running: JoinSet<Result<()>> = JoinSet::new();
    for task in 0..tasks {
        let (client, table) = (client.clone(), table.clone());
        running.spawn(async move {
            for turn in 0..each {
                let (a, b) = ((task + turn) % 4, (task + turn + 1 + turn % 3) % 4);
                let count = |key: i64| {
                    let n = Operand::Coalesce("n".into(), 0.into());
                    Step::upsert(&table, [key.to_string().into()]).set("n", n.add(1))
                };
                let entry = Entry::about("row", a.to_string())
                    .event(EventTemplate::named("counted").with_row_of(0))
                    .event(EventTemplate::named("counted").with_row_of(1));
                client.apply(client.plan().steps([count(a), count(b)]).log(entry)).await?;
            }
            Ok(())
        });
    }
    while let Some(done) = running.join_next().await {
        done??;
    }
    Ok(())
}

/// The versions of each row, in the order in which one partition shows them.
fn versions_by_row(records: &[Record]) -> Result<BTreeMap<(u32, String), Vec<i64>>> {
    let mut versions: BTreeMap<(u32, String), Vec<i64>> = BTreeMap::new();
    for record in records {
        let partition = record.position.context("a record in the log has no position")?.partition;
        for event in &record.events {
            let (id, version) = (&event.data["row"]["id"], &event.data["row"]["version"]);
            let (Some(id), Some(version)) = (id.as_str(), version.as_i64()) else {
                bail!("an event without its row: {event:?}");
            };
            versions.entry((partition, id.to_owned())).or_default().push(version);
        }
    }
    Ok(versions)
}

pub(super) async fn versions_of_a_row_stand_in_order_and_none_is_missing(
    namespace: &dyn TestNamespace,
) -> Result<()> {
    let table = counters("contended")?;
    let client = StoreClient::open(namespace, &[&table]).await?;
    write_concurrently(&client, &table, 6, 20).await?;
    let records = client.exact_log(120).await?;
    let by_row = versions_by_row(&records)?;
    for ((partition, id), versions) in &by_row {
        ensure!(
            versions.windows(2).all(|pair| pair[0] < pair[1]),
            "partition {partition} shows the versions of row {id} out of order: {versions:?}"
        );
    }
    // Across the partitions every version of every row was logged exactly once, up to the one that is stored.
    let mut all: BTreeMap<String, Vec<i64>> = BTreeMap::new();
    for ((_, id), versions) in by_row {
        all.entry(id).or_default().extend(versions);
    }
    for (id, mut versions) in all {
        versions.sort_unstable();
        let row = client.row(&table, [id.as_str().into()]).await?;
        same(&format!("the logged versions of row {id}"), &versions, &(1..=row.version()).collect())?;
    }
    Ok(())
}

pub(super) async fn a_reader_by_offset_misses_nothing(namespace: &dyn TestNamespace) -> Result<()> {
    let table = counters("tailed")?;
    let client = StoreClient::open(namespace, &[&table]).await?;
    let done = Arc::new(AtomicBool::new(false));
    let (store, flag) = (client.store.clone(), done.clone());
    let tail = tokio::spawn(async move {
        let mut seen: Vec<u64> = vec![0; store.partitions() as usize];
        let mut records: Vec<Record> = Vec::new();
        let mut idle = 0;
        // After the writers are done the reader goes on until it has everything, or has seen nothing for long.
        while records.len() < 120 && idle < 1_000 {
            let before = records.len();
            for partition in 0..store.partitions() {
                let after = &mut seen[partition as usize];
                let page = store.read_log(partition, *after, 7).await?;
                for record in page.records {
                    *after += 1;
                    let position = record.position.context("a record in the log has no position")?;
                    ensure!(
                        (position.partition, position.offset) == (partition, *after),
                        "expected {partition}:{after} next, got {position}"
                    );
                    records.push(record);
                }
            }
            if records.len() == before && flag.load(Ordering::Relaxed) {
                idle += 1;
                pause().await;
            } else {
                tokio::task::yield_now().await;
            }
        }
        Ok(records)
    });
    let written = write_concurrently(&client, &table, 6, 20).await;
    done.store(true, Ordering::Relaxed);
    let tailed = tail.await??;
    written?;
    let by_place = |mut records: Vec<Record>| {
        records.sort_by_key(|record| record.position);
        records
    };
    let whole = whole_log(client.store.as_ref()).await?;
    same("records that the reader saw", &tailed.len(), &120)?;
    ensure!(
        by_place(tailed) == by_place(whole),
        "what the reader saw while it was written is not what is there now"
    );
    Ok(())
}

pub(super) async fn a_subjects_last_record_matches_its_row(namespace: &dyn TestNamespace) -> Result<()> {
    let table = counters("mirrored")?;
    let client = StoreClient::open(namespace, &[&table]).await?;
    let mut tasks: JoinSet<Result<()>> = JoinSet::new();
    for task in 0..5_i64 {
        let (client, table) = (client.clone(), table.clone());
        tasks.spawn(async move {
            for turn in 0..12_i64 {
                let key = ((task + turn) % 3).to_string();
                let entry =
                    Entry::about("mirror", key.as_str()).event(EventTemplate::named("set").with_row_of(0));
                let step = Step::upsert(&table, [key.as_str().into()]).set("n", task * 100 + turn);
                client.apply(client.plan().step(step).log(entry)).await?;
            }
            Ok(())
        });
    }
    while let Some(done) = tasks.join_next().await {
        done??;
    }
    // A projection that replays the log ends where the table is.
    let mut projected: BTreeMap<String, serde_json::Value> = BTreeMap::new();
    for record in client.exact_log(60).await? {
        projected.insert(record.key.clone(), record.events[0].data["row"].clone());
    }
    same("subjects in the log", &projected.len(), &3)?;
    for (key, row) in projected {
        same("the projected row", &row, &client.row(&table, [key.as_str().into()]).await?.to_json())?;
    }
    Ok(())
}

pub(super) async fn pages_of_the_log_are_bounded(namespace: &dyn TestNamespace) -> Result<()> {
    let client = StoreClient::open(namespace, &[]).await?;
    for _ in 0..5 {
        client.apply(client.noted("page", "one subject", "noted")).await?;
    }
    let log = client.exact_log(5).await?;
    let partition = log[0].position.context("a record in the log has no position")?.partition;
    for (after, limit, expected) in [
        (0, 0, vec![]),
        (0, 2, vec![1, 2]),
        (2, 2, vec![3, 4]),
        (4, 2, vec![5]),
        (5, 2, vec![]),
        (99, 2, vec![]),
    ] {
        let page = client.store.read_log(partition, after, limit).await?;
        let offsets: Vec<u64> =
            page.records.iter().filter_map(|record| Some(record.position?.offset)).collect();
        same(&format!("{limit} records after {after}"), &offsets, &expected)?;
        same("oldest and head", &(page.oldest, page.head), &(1, 5))?;
    }
    let unknown = client.store.partitions();
    let schema = |error: &StoreError| matches!(error, StoreError::Schema { .. });
    fails("reading a partition too far", client.store.read_log(unknown, 0, 1).await, schema)?;
    fails("trimming a partition too far", client.store.trim_log(unknown, 1).await, schema)
}

pub(super) async fn a_page_of_the_log_has_at_most_a_thousand_records(
    namespace: &dyn TestNamespace,
) -> Result<()> {
    const COUNT: usize = PAGE_MAX + 1;
    let client = StoreClient::open(namespace, &[]).await?;
    let mut tasks: JoinSet<Result<()>> = JoinSet::new();
    for task in 0..7 {
        let client = client.clone();
        tasks.spawn(async move {
            for _ in (task..COUNT).step_by(7) {
                client.apply(client.plan().log(Entry::about("page", "one subject"))).await?;
            }
            Ok(())
        });
    }
    while let Some(done) = tasks.join_next().await {
        done??;
    }
    let log = client.exact_log(COUNT).await?;
    let partition = log[0].position.context("a record in the log has no position")?.partition;
    let page = client.store.read_log(partition, 0, usize::MAX).await?;
    ensure!(
        (1..=PAGE_MAX).contains(&page.records.len()),
        "a page has 1 to {PAGE_MAX} records, this one {}",
        page.records.len()
    );
    same("the head", &page.head, &(COUNT as u64))
}

/// Waits for the log, and fails when that takes longer than anything should.
async fn waited(store: &dyn Store, seen: &[u64], at_most: Duration) -> Result<Vec<u64>> {
    tokio::select! {
        heads = store.wait_log(seen, at_most) => Ok(heads?),
        () = SystemClock.sleep(PATIENCE) => bail!("wait_log did not return after {PATIENCE:?}"),
    }
}

pub(super) async fn waiting_ends_with_a_commit(namespace: &dyn TestNamespace) -> Result<()> {
    let client = StoreClient::open(namespace, &[]).await?;
    // An hour is far beyond our patience: only the commit can end the wait.
    let hour = Duration::from_secs(3_600);
    let mut seen = vec![0; client.store.partitions() as usize];
    for round in 0..8 {
        let (store, before) = (client.store.clone(), seen.clone());
        let waiting = tokio::spawn(async move { waited(store.as_ref(), &before, hour).await });
        tokio::task::yield_now().await;
        let plan = client.noted("wake", &round.to_string(), "noted");
        let partition = partition_of(&client.tenant, "wake", &round.to_string(), client.store.partitions());
        client.apply(plan).await?;
        let heads = waiting.await??;
        let mut expected = seen.clone();
        expected[partition as usize] += 1;
        same("the heads after a commit", &heads, &expected)?;
        seen = heads;
    }
    // A fence is a record, too.
    let (store, before) = (client.store.clone(), seen.clone());
    let waiting = tokio::spawn(async move { waited(store.as_ref(), &before, hour).await });
    client.store.resolve(&client.tenant, "nothing").await?;
    let heads = waiting.await??;
    ensure!(heads.iter().sum::<u64>() == 9, "nine records were written, the heads are {heads:?}");
    Ok(())
}

pub(super) async fn waiting_does_not_wait_for_what_is_there(namespace: &dyn TestNamespace) -> Result<()> {
    let client = StoreClient::open(namespace, &[]).await?;
    client.apply(client.noted("wake", "x", "noted")).await?;
    let partitions = client.store.partitions() as usize;
    let hour = Duration::from_secs(3_600);
    // Missing entries count as 0, so the empty list has seen nothing.
    for seen in [vec![], vec![0; partitions]] {
        let heads = waited(client.store.as_ref(), &seen, hour).await?;
        same("partitions", &heads.len(), &partitions)?;
        same("records", &heads.iter().sum::<u64>(), &1)?;
    }
    Ok(())
}

pub(super) async fn waiting_ends_when_its_time_is_up(namespace: &dyn TestNamespace) -> Result<()> {
    let clock = ManualClock::at(Time::from_millis(1_700_000_000_000));
    let client = StoreClient::open_at(namespace, Arc::new(clock.clone()), &[]).await?;
    client.apply(client.noted("wake", "x", "noted")).await?;
    client.log(1).await?;
    let seen = waited(client.store.as_ref(), &[], Duration::from_secs(10)).await?;
    let (store, before) = (client.store.clone(), seen.clone());
    let waiting = tokio::spawn(async move { waited(store.as_ref(), &before, Duration::from_secs(10)).await });
    // No client writes: only the clock can end this wait. It is moved until it does, since the wait may begin late.
    while !waiting.is_finished() {
        clock.advance(Duration::from_secs(11));
        pause().await;
    }
    same("the heads when nothing happened", &waiting.await??, &seen)?;
    let heads = waited(client.store.as_ref(), &seen, Duration::ZERO).await?;
    same("the heads without waiting", &heads, &seen)
}

pub(super) async fn trimming_forgets_records_and_their_ids(namespace: &dyn TestNamespace) -> Result<()> {
    let client = StoreClient::open(namespace, &[]).await?;
    let noted = |id: &str| {
        Plan::of(&client.tenant, id)
            .log(Entry::about("trim", "one subject").event(EventTemplate::named("noted")))
    };
    for id in ["a", "b", "c", "d"] {
        client.apply(noted(id)).await?;
    }
    let log = client.exact_log(4).await?;
    let partition = log[0].position.context("a record in the log has no position")?.partition;
    client.store.trim_log(partition, 2).await?;
    // Again, and less: nothing more goes, and nothing comes back.
    client.store.trim_log(partition, 2).await?;
    client.store.trim_log(partition, 1).await?;
    let kept = client.exact_log(2).await?;
    same("what is kept", &kept, &log[2..].to_vec())?;
    for after in [0, 1, 2] {
        let page = client.store.read_log(partition, after, 1).await?;
        same("oldest and head", &(page.oldest, page.head), &(3, 4))?;
        same("the next record", &page.records, &vec![log[2].clone()])?;
    }
    // A forgotten id can be used again; one that is kept cannot.
    client.apply(noted("a")).await?;
    match client.store.commit(&noted("c").build()?).await? {
        Commit::Applied(applied) if applied.repeated => {}
        other => bail!("operation c is still in the log, and its repetition gives {other:?}"),
    }
    let ids: Vec<String> = client.exact_log(3).await?.into_iter().map(|record| record.operation).collect();
    same("the log after a forgotten id came again", &ids, &vec!["c".to_owned(), "d".into(), "a".into()])
}

pub(super) async fn trimming_keeps_the_newest_record(namespace: &dyn TestNamespace) -> Result<()> {
    let client = StoreClient::open(namespace, &[]).await?;
    let noted = |id: &str| Plan::of(&client.tenant, id).log(Entry::about("trim", "one subject"));
    for id in ["a", "b", "c"] {
        client.apply(noted(id)).await?;
    }
    let log = client.exact_log(3).await?;
    let partition = log[0].position.context("a record in the log has no position")?.partition;
    client.store.trim_log(partition, u64::MAX).await?;
    same("what is left", &client.exact_log(1).await?, &log[2..].to_vec())?;
    client.apply(noted("d")).await?;
    let offsets: Vec<Option<u64>> =
        client.exact_log(2).await?.iter().map(|record| Some(record.position?.offset)).collect();
    same("offsets after trimming", &offsets, &vec![Some(3), Some(4)])?;
    // An empty partition has nothing to forget.
    let empty = (partition + 1) % client.store.partitions();
    if empty != partition {
        client.store.trim_log(empty, 5).await?;
        let page = client.store.read_log(empty, 0, 1).await?;
        same("an empty partition", &(page.records.len(), page.head), &(0, 0))?;
    }
    Ok(())
}

pub(super) async fn a_fence_can_be_forgotten(namespace: &dyn TestNamespace) -> Result<()> {
    let client = StoreClient::open(namespace, &[]).await?;
    client.store.resolve(&client.tenant, "fenced").await?;
    let partitions = client.store.partitions();
    let home = partition_of(&client.tenant, "", "fenced", partitions);
    // Another subject of the same partition, since the newest record of a partition is never forgotten.
    let subject = subject_in(&client.tenant, home, partitions)?;
    client.apply(client.noted("filler", &subject, "noted")).await?;
    client.exact_log(2).await?;
    let plan = Plan::of(&client.tenant, "fenced").log(Entry::about("thing", "x"));
    let outcome = client.store.commit(&plan.clone().build()?).await?;
    same("the outcome while the fence stands", &outcome, &Commit::Fenced)?;
    client.store.trim_log(home, 1).await?;
    client.apply(plan).await?;
    Ok(())
}

/// A key of the resource `filler` whose records go to this partition.
fn subject_in(tenant: &Tenant, partition: u32, partitions: u32) -> Result<String> {
    let mut keys = (0..100_000).map(|number| number.to_string());
    let found = keys.find(|key| partition_of(tenant, "filler", key, partitions) == partition);
    found.with_context(|| format!("no key hashes to partition {partition} of {partitions}"))
}

pub(super) async fn unicode_everywhere(namespace: &dyn TestNamespace) -> Result<()> {
    let table = counters("polyglot")?;
    let client = StoreClient::open(namespace, &[&table]).await?;
    let texts = [
        "Zoë",
        "日本語",
        "\u{1d11e}\u{1f600}",
        "e\u{301}",
        "\u{feff}bom",
        "a\tb\n\u{7f}\u{80}",
        "\u{202e}rtl",
        "'; --",
        "\\u0041",
    ];
    for (place, text) in texts.into_iter().enumerate() {
        let entry = Entry::about(text, text).fingerprint(text).event(
            EventTemplate::named(text).with(text, text).with("nested", json!({text: [text]})).with_row_of(0),
        );
        let step = Step::insert(&table, [text.into()]);
        let applied = client.apply(Plan::of(&client.tenant, text).step(step).log(entry)).await?;
        let row = client.row(&table, [text.into()]).await?;
        same("the key", &row.text("id"), &Some(text))?;
        let record = applied.record.context("the outcome has no record")?;
        let mut data = json!({text: text, "nested": {text: [text]}});
        data["row"] = row.to_json();
        same("the data", &record.events, &vec![Event { name: text.into(), data, actor: None }])?;
        let names = [&record.operation, &record.resource, &record.key, &record.fingerprint];
        ensure!(names.iter().all(|name| *name == text), "{text:?} became {record:?}");
        let log = client.exact_log(place + 1).await?;
        let logged = log.iter().find(|logged| logged.operation == text);
        let logged = logged.with_context(|| format!("no record of operation {text:?} in the log"))?;
        same("the record in the log", &Record { position: record.position, ..logged.clone() }, &record)?;
    }
    Ok(())
}
