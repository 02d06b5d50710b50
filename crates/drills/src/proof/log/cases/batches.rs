//! Batches: readers get each event once, by its own subject and in the order of versions.

use statehouse::house;
use statehouse::{Answer, Request};
use statehouse_store::log::partition_of;

use super::*;

/// A group that remembers what it got: the subject and the version of each event, in order.
#[derive(Debug, Default)]
struct Recorder(Mutex<Vec<(String, i64)>>);

#[async_trait]
impl RecordHandler for Recorder {
    fn group(&self) -> &str {
        "recorder"
    }

    async fn handle(&self, records: &[Record], _: &HandlerContext<'_>) -> Result<HandlerWrite, HandlerError> {
        for record in records {
            self.0.lock().unwrap_or_else(PoisonError::into_inner).extend(told(record));
        }
        Ok(HandlerWrite::of(records.len(), Vec::new()))
    }
}

/// The subject and the version of each event of a record that has a row.
fn told(record: &Record) -> Vec<(String, i64)> {
    let one = |event| {
        let (resource, key) = house::subject_of(record, event)?;
        Some((format!("{resource}/{key}"), event.data["row"]["version"].as_i64()?))
    };
    record.events.iter().filter_map(one).collect()
}

async fn batch(client: &TenantClient, requests: Vec<Request>) -> Result<Vec<Answer>> {
    let answers = client.house.batch(&client.tenant, requests, Operation::default()).await;
    Ok(answers?)
}

fn create(id: i64, n: i64) -> Request {
    TenantClient::request("note.create", &[], &json!({"id": id, "n": n}), None)
}

fn update(id: i64, n: i64) -> Request {
    TenantClient::request("note.update", &[id.into()], &json!({"n": n}), Some(Expected::Any))
}

fn trail(subject: &str) -> Request {
    TenantClient::request("trail.create", &[], &json!({"subject": subject, "steps": "0"}), None)
}

/// Requires each subject's versions to be 1, 2, 3 …, in the order in which a reader got them.
fn in_order(reader: &str, told: &[(String, i64)], expected: &BTreeMap<&str, i64>) -> Result<()> {
    let mut versions: BTreeMap<&str, Vec<i64>> = BTreeMap::new();
    for (subject, version) in told {
        versions.entry(subject).or_default().push(*version);
    }
    let all = expected.iter().map(|(subject, last)| (*subject, (1..=*last).collect())).collect();
    same(&format!("the versions that {reader} gets"), &versions, &all)
}

/// What a program gets of all partitions, by polling.
async fn polled(client: &TenantClient, group: &str) -> Result<Vec<(String, i64)>> {
    let mut found = Vec::new();
    for partition in 0..client.house.store().partitions() {
        let key = [i64::from(partition).into()];
        let poll = client.done(&format!("{group}.poll"), &key, json!({"limit": 500}), None).await?.body;
        for record in poll["records"].as_array().into_iter().flatten() {
            for event in record["events"].as_array().into_iter().flatten() {
                let subject = event["subject"].as_str().context("an event without a subject")?.to_owned();
                found.push((subject, event["data"]["row"]["version"].as_i64().context("no version")?));
            }
        }
    }
    Ok(found)
}

pub(super) async fn a_rows_events_come_in_the_order_of_its_versions(
    namespace: &dyn TestNamespace,
) -> Result<()> {
    let clock = Arc::new(SystemClock);
    let store = namespace.open().await?;
    let client = TenantClient::over(store.clone(), BLUEPRINT, clock.clone()).await?;
    let ids = Ids::new(clock.clone(), Random::from_entropy());
    let house = House::with(store, &Blueprint::read("statehouse.toml", BLUEPRINT)?, clock, ids)?;
    let recorder = Arc::new(Recorder::default());
    let house = Arc::new(house.with_consumer(recorder.clone()));
    let client = TenantClient { house, ..client };
    batch(&client, vec![create(1, 0), create(2, 0), create(3, 0)]).await?;
    client.done("note.update", &[2.into()], json!({"n": 1}), Some(1)).await?;
    for turn in 1..20 {
        let operation = Operation { id: Some(format!("batch {turn}")), fingerprint: "digest".into() };
        let requests = || vec![update(1, turn), update(2, 2 * turn), update(3, turn)];
        let first = client.house.batch(&client.tenant, requests(), operation.clone()).await;
        let first = first?;
        client.done("note.update", &[2.into()], json!({"n": 2 * turn + 1}), Some(2 * turn + 1)).await?;
        // A repetition under the operation id gets the same answers, although the rows have gone on.
        let again = client.house.batch(&client.tenant, requests(), operation).await;
        let again = again?;
        let bodies = |answers: &[Answer]| answers.iter().map(|one| one.body.clone()).collect::<Vec<_>>();
        same("the answers of a repetition", &bodies(&again), &bodies(&first))?;
        same("the version in an answer", &first[1].body["version"], &json!(2 * turn + 1))?;
    }
    let expected = BTreeMap::from([("note/1", 20), ("note/2", 40), ("note/3", 20)]);
    let log: Vec<(String, i64)> =
        whole_log(client.house.store().as_ref()).await?.iter().flat_map(told).collect();
    in_order("a reader of the log", &log, &expected)?;
    in_order("a program", &polled(&client, "audit").await?, &expected)?;
    client.drain_workers().await?;
    let recorded = recorder.0.lock().unwrap_or_else(PoisonError::into_inner).clone();
    in_order("a group of the house", &recorded, &expected)
}

pub(super) async fn a_group_gets_the_events_of_its_resources(namespace: &dyn TestNamespace) -> Result<()> {
    let fixture = LogFixture::open(namespace, 4).await?;
    let client = &fixture.client;
    // Its resource stands second, first, and alone.
    batch(client, vec![trail("a"), create(1, 1)]).await?;
    batch(client, vec![create(2, 1), trail("b")]).await?;
    batch(client, vec![trail("c"), update(1, 2), update(2, 2)]).await?;
    fixture.write("acme", 2, 3).await?;
    batch(client, vec![trail("d"), trail("e")]).await?;
    let notes = BTreeMap::from([("note/1", 2), ("note/2", 3)]);
    in_order("a group of notes", &polled(client, "audit").await?, &notes)?;
    let all = BTreeMap::from([
        ("note/1", 2),
        ("note/2", 3),
        ("trail/a", 1),
        ("trail/b", 1),
        ("trail/c", 1),
        ("trail/d", 1),
        ("trail/e", 1),
    ]);
    in_order("a group of everything", &polled(client, "other").await?, &all)?;
    // What lies ahead is what it would get: a record in each partition that a batch's notes are in.
    let list = client.done("audit.list", &[], json!({}), None).await?.body;
    let ahead: u64 =
        list.as_array().into_iter().flatten().filter_map(|one| one["lag_records"].as_u64()).sum();
    let mut records = 0;
    for record in whole_log(client.house.store().as_ref()).await? {
        records += u64::from(told(&record).iter().any(|(subject, _)| subject.starts_with("note/")));
    }
    same("what lies ahead", &ahead, &records)
}

/// Two notes that stand in one partition, and its number.
fn neighbours(client: &TenantClient) -> (i64, i64, u32) {
    let partitions = client.house.store().partitions();
    let partition = |id: i64| partition_of(&client.tenant, "note", &id.to_string(), partitions);
    let other = (2..).find(|id| partition(*id) == partition(1)).unwrap_or(1);
    (1, other, partition(1))
}

pub(super) async fn a_parked_record_holds_up_each_of_its_keys(namespace: &dyn TestNamespace) -> Result<()> {
    let fixture = LogFixture::open(namespace, 4).await?;
    let client = &fixture.client;
    let (a, b, partition) = neighbours(client);
    let key = [i64::from(partition).into()];
    let names = (format!("note/{a}"), format!("note/{b}"));
    // Alone; both; the other one alone; and a third that nothing holds up.
    fixture.write("acme", a, 1).await?;
    fixture.write("acme", b, 2).await?;
    batch(client, vec![update(b, 3), update(a, 3)]).await?;
    fixture.write("acme", b, 4).await?;
    position_of(client.house.store().as_ref(), "acme", b, 4).await?;
    let epoch = claim_as_me(client, &key).await?;
    let own = |more: Json| {
        let mut input = json!({"holder": "me", "epoch": epoch});
        for (name, value) in more.as_object().into_iter().flatten() {
            input[name] = value.clone();
        }
        input
    };
    let poll = async |more: Json| client.done("audit.poll", &key, own(more), None).await;
    let all = poll(json!({})).await?.body;
    same("at first", &numbers(&all), &vec![1, 2, 3, 4])?;
    let both = &all["records"][2];
    same("the events of the batch", &both["events"].as_array().map(Vec::len), &Some(2))?;
    let park = |record: &Json, subject: &str| {
        own(json!({"subject": subject, "log_offset": record["log_offset"], "reason": "no such unit"}))
    };
    client.refused("audit.park", &key, park(both, "note/none"), None, Code::InvalidInput).await?;
    // The first is parked: the batch waits for it, and what is behind the batch waits too.
    client.done("audit.park", &key, park(&all["records"][0], &names.0), None).await?;
    let rest = poll(json!({})).await?.body;
    same("what is not held up", &numbers(&rest), &vec![2])?;
    let later = poll(json!({"after": rest["through"]})).await?.body;
    same("what is not held up later on", &numbers(&later), &vec![])?;
    let commit = own(json!({"from": 0, "to": later["through"]}));
    shows(&client.done("audit.commit", &key, commit, None).await?, &json!({"parked": 4}))?;
    let of = |record: &Json, subject: &str| -> [Value; 3] {
        [key[0].clone(), subject.into(), record["log_offset"].as_i64().unwrap_or(0).into()]
    };
    let parked = client.done("audit_parked.list", &[], json!({"log_partition": partition}), None).await?.body;
    same("what is parked", &parked.as_array().map(Vec::len), &Some(4))?;
    let records = all["records"].as_array().cloned().unwrap_or_default();
    let [first, _, _, last] = records.as_slice() else { anyhow::bail!("{all}") };
    let settle = "audit_parked.settle";
    client.refused(settle, &of(last, &names.1), json!({}), None, Code::WrongState).await?;
    client.refused(settle, &of(both, &names.1), json!({}), None, Code::WrongState).await?;
    client.done(settle, &of(first, &names.0), json!({}), None).await?;
    // The batch is settled once, under either of its keys.
    client.done(settle, &of(both, &names.1), json!({}), None).await?;
    client.refused(settle, &of(both, &names.0), json!({}), None, Code::NotFound).await?;
    client.done(settle, &of(last, &names.1), json!({}), None).await?;
    shows(&client.done("audit.read", &key, json!({}), None).await?, &json!({"parked": 0}))
}

pub(super) async fn a_record_that_a_handler_cannot_do_holds_up_each_of_its_keys(
    namespace: &dyn TestNamespace,
) -> Result<()> {
    skip_invariants("programs write rows in plans of their own, without events");
    let fixture = LogFixture::open(namespace, 4).await?;
    let client = &fixture.client;
    let (a, b, _) = neighbours(client);
    fixture.write("acme", a, 1).await?;
    fixture.write("acme", b, 2).await?;
    fixture.drain().await?;
    set(&fixture.handler.poison, &[13]);
    batch(client, vec![update(a, 13), update(b, 13)]).await?;
    fixture.write("acme", b, 4).await?;
    fixture.write("acme", a, 5).await?;
    fixture.drain().await?;
    let trail = |steps: &str| (format!("acme/note/{a}"), steps.to_owned());
    let other = |steps: &str| (format!("acme/note/{b}"), steps.to_owned());
    fixture.follows(&BTreeMap::from([trail("1"), other("2")])).await?;
    let parked = fixture.parked("acme").await?;
    same("rows of what is parked", &parked.len(), &4)?;
    // It can be done after all: what was behind it follows, in order. The handler notes a record under its first key.
    set(&fixture.handler.poison, &[]);
    for parked in &parked {
        fixture.group().replay(&client.tenant, parked.partition, &parked.subject).await?;
    }
    for _ in 0..1_000 {
        fixture.drain().await?;
        if fixture.parked("acme").await?.is_empty() {
            break;
        }
        pause().await;
    }
    same("what is parked", &fixture.parked("acme").await?, &Vec::new())?;
    fixture.follows(&BTreeMap::from([trail("1 13 5"), other("2 4")])).await
}

pub(super) async fn the_log_is_kept_for_a_group_that_never_claimed(
    namespace: &dyn TestNamespace,
) -> Result<()> {
    skip_invariants("the log is trimmed");
    let clock = standing();
    let store = namespace.open_at(Arc::new(clock.clone())).await?;
    let blueprint = kept("").replace("\n[log.other]\n", "\n");
    let fixture = LogFixture::over(store.clone(), Arc::new(clock.clone()), &blueprint, 4).await?;
    let client = &fixture.client;
    let partition = one_note(&fixture, &[1, 2, 3]).await?;
    fixture.drain().await?;
    clock.advance(Duration::from_secs(7_200));
    fixture.write("acme", 1, 4).await?;
    fixture.drain().await?;
    same("the oldest, while no program has claimed", &oldest(store.as_ref(), partition).await?, &1)?;
    // It is all there when a program comes.
    let key = [i64::from(partition).into()];
    let claim = json!({"holder": "me", "duration_ms": 3_600_000});
    let epoch = client.done("audit.claim", &key, claim, None).await?.body["epoch"].clone();
    let poll = client.done("audit.poll", &key, json!({}), None).await?.body;
    same("what there is", &numbers(&poll), &vec![1, 2, 3, 4])?;
    fixture.drain().await?;
    same("the oldest, while it is unread", &oldest(store.as_ref(), partition).await?, &1)?;
    let commit = json!({"holder": "me", "epoch": epoch, "from": 0, "to": poll["through"]});
    client.done("audit.commit", &key, commit, None).await?;
    let head = position_of(store.as_ref(), "acme", 1, 4).await?.1;
    eventually_oldest(&fixture, partition, head).await
}
use crate::harness::case_check::skip_invariants;
