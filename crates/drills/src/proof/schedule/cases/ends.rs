//! How jobs end: several at once, and without a trace but in the log.

use std::sync::atomic::{AtomicUsize, Ordering};

use statehouse::house::subject_of;
use statehouse_store::{Address, Consistency};
use tokio::sync::watch;

use super::*;

/// As [`BLUEPRINT`], but nothing that is done is kept.
const SHORT: &str = r#"
[house]
name = "drill"

[schedule.job]
lease   = "30s"
backoff = "10s"
shards  = 2
keep    = "0s"
"#;

/// The events of a name, one list for each record that has any.
async fn told(client: &TenantClient, name: &str) -> Result<Vec<Vec<Json>>> {
    let records = whole_log(client.house.store().as_ref()).await?;
    let of = |record: &statehouse_store::Record| -> Vec<Json> {
        let events = record.events.iter().filter(|event| event.name == name);
        events.map(|event| event.data.clone()).collect()
    };
    Ok(records.iter().map(of).filter(|events| !events.is_empty()).collect())
}

fn ids_in(events: &[Json]) -> Vec<&str> {
    events.iter().filter_map(|event| event["job_id"].as_str()).collect()
}

pub(super) async fn jobs_that_end_together_are_one_plan(namespace: &dyn TestNamespace) -> Result<()> {
    let (client, _) = desk(namespace).await?;
    for job in ["a", "b", "c", "d", "e"] {
        enqueue(&client, job, json!({})).await?;
    }
    claim(&client, 9, 5).await?;
    let queue = id("default");
    let jobs = |ids: &[&str]| {
        let one = |id: &&str| json!({"job_id": id, "attempt": 1, "result": id});
        json!({"jobs": ids.iter().map(one).collect::<Vec<_>>()})
    };
    let call = || client.call_as("three", "job_queue.complete", &queue, jobs(&["c", "a", "b"]), None);
    let first = call().await?;
    same(
        "all of them",
        &first.body.as_array().map(|all| all.iter().all(|one| one["done"] == json!(true))),
        &Some(true),
    )?;
    same("a repetition", &call().await?.body, &first.body)?;
    // One of these is not this worker's any more: then each goes by itself.
    client.done("job_queue.complete", &queue, jobs(&["d", "b", "e"]), None).await?;
    let record = client.house.store().find_operation(&client.tenant, "three/all").await?;
    let record = record.context("the three are no plan")?;
    let all: Vec<Json> = record.events.iter().map(|event| event.data.clone()).collect();
    same("the first plan", &ids_in(&all), &vec!["c", "a", "b"])?;
    let subjects: Vec<&Json> = all.iter().filter_map(|event| event.get("subject")).collect();
    same("whom they are about", &subjects, &vec![&json!("a"), &json!("b")])?;
    let told = told(&client, "job.completed").await?;
    let mut ids: Vec<&str> = told.iter().flat_map(|events| ids_in(events)).collect();
    ids.sort_unstable();
    same("each is told once", &ids, &vec!["a", "b", "c", "d", "e"])?;
    for job in ["a", "b", "c", "d", "e"] {
        let expected = json!({"state": "COMPLETED", "result": job, "run_at": null});
        client.shows("job", &id(job), &expected).await?;
    }
    Ok(())
}

pub(super) async fn what_is_not_kept_goes_when_it_is_done(namespace: &dyn TestNamespace) -> Result<()> {
    let clock = standing();
    let client = TenantClient::open_at(namespace, SHORT, Arc::new(clock.clone())).await?;
    let with_key = || json!({"unique_key": "k"});
    for (job, input) in [
        ("plain", json!({})),
        ("keyed", with_key()),
        ("first", json!({"order_key": "o"})),
        ("second", json!({"order_key": "o"})),
    ] {
        enqueue(&client, job, input).await?;
    }
    claim(&client, 9, 3).await?;
    for job in ["plain", "keyed", "first"] {
        // Another attempt's is not this one's to end, and one that was given back has no worker.
        client.refused("job.complete", &id(job), json!({"attempt": 2}), None, Code::NotHolder).await?;
        client.done("job.fail", &id(job), json!({"attempt": 1}), None).await?;
        client.refused("job.complete", &id(job), json!({"attempt": 1}), None, Code::WrongState).await?;
    }
    clock.advance(SECOND * 10);
    claim(&client, 9, 3).await?;
    let plain = id("plain");
    let input = || json!({"attempt": 2, "result": 7});
    let call = || client.call_as("once", "job.complete", &plain, input(), None);
    let done = call().await?;
    shows(&done, &json!({"job_id": "plain", "state": "COMPLETED", "attempt": 2, "result": 7}))?;
    same("a repetition", &call().await?.body, &done.body)?;
    client.refused("job.complete", &id("plain"), json!({"attempt": 2}), None, Code::NotFound).await?;
    client.refused("job.read", &id("plain"), json!({}), None, Code::NotFound).await?;
    // Its key goes with it, and so does its place in the lane.
    complete(&client, "keyed", 2).await?;
    same("whose keys are left", &all_rows(&client, "job_uniques").await?.len(), &0)?;
    enqueue(&client, "heir", with_key()).await?;
    complete(&client, "first", 2).await?;
    let mut next = claim(&client, 9, 2).await?;
    next.sort();
    same("who comes next", &next, &vec![("heir".to_owned(), 1), ("second".to_owned(), 1)])?;
    let jobs = json!({"jobs": [{"job_id": "second", "attempt": 1}, {"job_id": "heir", "attempt": 1}]});
    let ended = client.done("job_queue.complete", &id("default"), jobs, None).await?;
    same(
        "both",
        &ended.body.as_array().map(|all| all.iter().all(|one| one["done"] == json!(true))),
        &Some(true),
    )?;
    for table in ["jobs", "job_uniques", "job_lanes", "job_lines"] {
        same(table, &all_rows(&client, table).await?.len(), &0)?;
    }
    let told = told(&client, "job.completed").await?;
    let mut ids: Vec<&str> = told.iter().flat_map(|events| ids_in(events)).collect();
    ids.sort_unstable();
    same("what the log tells", &ids, &vec!["first", "heir", "keyed", "plain", "second"])
}

/// Jobs that are kept when they are done, and tasks that are not.
const TWO_KINDS: &str = r#"
[house]
name = "drill"

[schedule.job]
shards = 2

[schedule.task]
shards = 2
keep   = "0s"
"#;

/// Jobs that all end at the same time: when they are let.
struct BlockingHandler {
    under_way: AtomicUsize,
    open: watch::Sender<bool>,
}

#[async_trait]
impl JobHandler for BlockingHandler {
    async fn handle(&self, job: &Job) -> Result<Json, JobFailure> {
        self.under_way.fetch_add(1, Ordering::SeqCst);
        let mut open = self.open.subscribe();
        open.wait_for(|open| *open).await.map_err(|_| JobFailure::passing("the gate is gone"))?;
        Ok(json!(job.job_id))
    }
}

/// Handlers that end at the same time: what they did is recorded together, each job once and under its own name. If something
/// is in the way of one of them, or its end concerns others, that is its own affair.
pub(super) async fn what_handlers_end_together_ends_once(namespace: &dyn TestNamespace) -> Result<()> {
    let client = TenantClient::open(namespace, TWO_KINDS).await?;
    // On a busy machine the handlers of one round may end one after another, each alone.
    let rounds: Vec<Vec<String>> =
        (0..20).map(|round| (0..40).map(|number| format!("m{round}-{number}")).collect()).collect();
    for (schedule, table) in [("job", "jobs"), ("task", "tasks")] {
        let enqueue = async |job: &str, mut input: Json| {
            input["job_id"] = json!(job);
            client.done(&format!("{schedule}.enqueue"), &[], input, None).await
        };
        let start = |gate: &Arc<BlockingHandler>| {
            JobRunner::start(&client.house, schedule, "default", gate.clone(), RunnerOptions::default())
        };
        let finished = async |expected: &[&str]| -> Result<Vec<usize>> {
            let name = format!("{schedule}.completed");
            let (mut told, mut sizes): (Vec<String>, Vec<usize>) = (Vec::new(), Vec::new());
            for record in whole_log(client.house.store().as_ref()).await? {
                let before = told.len();
                for event in record.events.iter().filter(|event| event.name == name) {
                    let job = event.data["job_id"].as_str().context("an event of no job")?;
                    same("whom it is about", &subject_of(&record, event), &Some((schedule, job)))?;
                    same("its result", &event.data["result"], &json!(job))?;
                    told.push(job.to_owned());
                }
                sizes.extend(Some(told.len() - before).filter(|events| *events > 0));
            }
            told.sort_unstable();
            let mut expected = expected.to_vec();
            expected.sort_unstable();
            same("what was completed", &told.iter().map(String::as_str).collect(), &expected)?;
            Ok(sizes)
        };
        // They are independent of other jobs.
        let mut expected: Vec<&str> = Vec::new();
        let mut sizes = Vec::new();
        for many in &rounds {
            for job in many {
                enqueue(job, json!({})).await?;
            }
            let gate = BlockingHandler::closed();
            let hands = start(&gate)?;
            gate.is_reached_by(many.len()).await?;
            gate.opens();
            hands.stop().await;
            expected.extend(many.iter().map(String::as_str));
            sizes = finished(&expected).await?;
            if sizes.len() < expected.len() {
                break;
            }
        }
        ensure!(sizes.len() < expected.len(), "each had a record of its own");
        // One has a key that ends with it, one lets another one go on, and one is taken away meanwhile.
        enqueue("keyed", json!({"unique_key": "k"})).await?;
        enqueue("first", json!({"order_key": "o"})).await?;
        enqueue("second", json!({"order_key": "o"})).await?;
        enqueue("lost", json!({})).await?;
        enqueue("plain", json!({})).await?;
        let gate = BlockingHandler::closed();
        let hands = start(&gate)?;
        gate.is_reached_by(4).await?;
        client.done(&format!("{schedule}.cancel"), &id("lost"), json!({}), None).await?;
        gate.opens();
        gate.is_reached_by(5).await?;
        hands.stop().await;
        expected.extend(["keyed", "first", "second", "plain"]);
        finished(&expected).await?;
        let (lost, kept): (Vec<Row>, Vec<Row>) =
            all_rows(&client, table).await?.into_iter().partition(|row| row.text("job_id") == Some("lost"));
        let states = |rows: &[Row]| -> Vec<Option<String>> {
            rows.iter().map(|row| row.text("state").map(str::to_owned)).collect()
        };
        same("what was lost", &states(&lost), &vec![Some("CANCELLED".to_owned())])?;
        let are_kept = if schedule == "job" { expected.len() } else { 0 };
        same("what is kept", &states(&kept), &vec![Some("COMPLETED".to_owned()); are_kept])?;
        for row in kept {
            same("its result", &row.json("result"), &Some(&json!(row.text("job_id"))))?;
        }
        no_job_is_left_in_line(&client, schedule).await?;
    }
    Ok(())
}

impl BlockingHandler {
    fn closed() -> Arc<BlockingHandler> {
        Arc::new(BlockingHandler { under_way: AtomicUsize::new(0), open: watch::Sender::new(false) })
    }

    async fn is_reached_by(&self, jobs: usize) -> Result<()> {
        for _ in 0..2_000 {
            if self.under_way.load(Ordering::SeqCst) >= jobs {
                break;
            }
            pause().await;
        }
        same("how many are under way", &self.under_way.load(Ordering::SeqCst), &jobs)
    }

    /// Lets those end that are under way, and the others when they come.
    fn opens(&self) {
        self.open.send_replace(true);
    }
}

/// Reads of a table in which one column of every row is damaged.
#[derive(Debug)]
struct DamagedColumn {
    table: &'static str,
    column: &'static str,
    content: Value,
}

#[async_trait]
impl Interceptor for DamagedColumn {
    async fn get(
        &self,
        inner: &Arc<dyn Store>,
        addresses: &[Address],
        consistency: Consistency,
    ) -> Result<Vec<Option<Row>>, StoreError> {
        let damage = |row: Row| match row.table().position(self.column) {
            Some(index) if row.table().name() == self.table => {
                let (table, tenant, version) = (row.table().clone(), row.tenant().clone(), row.version());
                let mut values = row.into_values();
                values.splice(index..=index, [self.content.clone()]);
                Row::new(table, tenant, values, version)
            }
            _ => row,
        };
        let rows = inner.get(addresses, consistency).await?;
        Ok(rows.into_iter().map(|row| row.map(damage)).collect())
    }
}

/// A column that cannot have what it has is reported with the row, whatever it would mean if it were read as empty: a job
/// without attempts left, or one that has not failed.
pub(super) async fn a_damaged_job_is_reported_with_its_key(namespace: &dyn TestNamespace) -> Result<()> {
    let clock = standing();
    let store = namespace.open_at(Arc::new(clock.clone())).await?;
    let client = TenantClient::over(store.clone(), BLUEPRINT, Arc::new(clock.clone())).await?;
    enqueue(&client, "a", json!({})).await?;
    claim(&client, 1, 1).await?;
    let row = Address::new(client.table("jobs")?, &client.tenant, ["a".into()])?;
    for (action, input, column, content, why) in [
        ("job.fail", json!({"attempt": 1}), "attempts_max", Value::Null, "is null"),
        ("job.fail", json!({"attempt": 1}), "attempts_max", "three".into(), "is not of type int"),
        ("job.replay", json!({}), "state", Value::Null, "is null"),
        ("job.cancel", json!({}), "order_key", 7.into(), "is not of type text"),
    ] {
        let damaged = StoreProxy::new(store.clone(), DamagedColumn { table: "jobs", column, content });
        let damaged = TenantClient::over(Arc::new(damaged), BLUEPRINT, Arc::new(clock.clone())).await?;
        let refusal = damaged.refused(action, &id("a"), input, None, Code::Internal).await?;
        let place = format!("{row}.{column}");
        ensure!(refusal.message.contains(&place) && refusal.message.contains(why), "{action}: {refusal}");
    }
    client.shows("job", &id("a"), &json!({"state": "IN_PROGRESS", "attempt": 1, "error": null})).await
}

/// What only the server uses: callers see none of it, in no answer.
const INTERNAL: [&str; 7] =
    ["claim_id", "line_seq", "unique_held", "owner", "run_shard", "due_at", "due_shard"];

fn check_answer(action: &str, body: &Json) -> Result<()> {
    match body {
        Json::Array(items) => items.iter().try_for_each(|item| check_answer(action, item)),
        Json::Object(fields) => fields.iter().try_for_each(|(name, value)| {
            ensure!(!INTERNAL.contains(&name.as_str()), "{action} answers with {name}: {body}");
            check_answer(action, value)
        }),
        _ => Ok(()),
    }
}

pub(super) async fn answers_have_no_internal_fields(namespace: &dyn TestNamespace) -> Result<()> {
    let (client, clock) = desk(namespace).await?;
    let queue = id("default");
    let unique = |job: &str| json!({"job_id": job, "unique_key": job, "order_key": "k", "payload": {"n": 1}});
    let calls: [(&str, &[Value], Json); 3] = [
        ("job.enqueue", &[], unique("a")),
        ("job.enqueue", &[], unique("b")),
        ("job_queue.claim", &queue, json!({"worker": "ann"})),
    ];
    for (action, key, input) in calls {
        check_answer(action, &client.done(action, key, input, None).await?.body)?;
    }
    for (action, input) in
        [("job.read", json!({})), ("job.fail", json!({"attempt": 1, "error": "no"})), ("job.read", json!({}))]
    {
        let answer = client.done(action, &id("a"), input, None).await?;
        ensure!(answer.body.get("job_id").is_some(), "{action}: {}", answer.body);
        check_answer(action, &answer.body)?;
    }
    clock.advance(SECOND * 60);
    let claimed = client.done("job_queue.claim", &queue, json!({"worker": "ann", "limit": 2}), None).await?;
    check_answer("job_queue.claim", &claimed.body)?;
    same("what was claimed", &jobs_in(&claimed.body)?, &vec![("a".to_owned(), 2)])?;
    let one = json!({"job_id": "c", "unique_key": "c", "attempts_max": 1});
    client.done("job.enqueue", &[], one, None).await?;
    client.done("job_queue.claim", &queue, json!({"worker": "ann"}), None).await?;
    for (action, job, input) in [
        ("job.complete", "a", json!({"attempt": 2, "result": 1})),
        ("job.cancel", "b", json!({})),
        ("job.fail", "c", json!({"attempt": 1})),
        ("job.replay", "c", json!({})),
    ] {
        check_answer(action, &client.done(action, &id(job), input, None).await?.body)?;
    }
    for list in [json!({"queue": "default", "state": "COMPLETED"}), json!({"order_key": "k"})] {
        for _ in 0..LOOKS_MAX {
            let listed = client.done("job.list", &[], list.clone(), None).await?.body;
            check_answer("job.list", &listed)?;
            if listed.as_array().is_some_and(|jobs| !jobs.is_empty()) {
                break;
            }
            pause().await;
        }
    }
    // The store has them, and they are what decides.
    let stored = client.store_client()?.row(client.table("jobs")?, id("a")).await?;
    ensure!(stored.int("line_seq").is_some() && stored.text("claim_id").is_some(), "{stored}");
    Ok(())
}
