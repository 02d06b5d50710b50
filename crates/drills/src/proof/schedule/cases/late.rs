//! Those who looked, paused, and go on when everything has changed.

use super::*;

/// Writes past the actions. No program should; if one does, no third caller loses by it.
pub(super) async fn write(client: &TenantClient, step: Step) -> Result<()> {
    let store_client = client.store_client()?;
    store_client.apply(store_client.one(step)).await.map(drop)
}

pub(super) async fn draft(client: &TenantClient, action: &str, name: &str, input: Json) -> Result<Plan> {
    client.drafted(action, &id(name), input, None).await
}

pub(super) fn failed() -> Json {
    json!({"attempt": 1, "error": "no", "final": true})
}

pub(super) async fn a_paused_caller_comes_too_late(namespace: &dyn TestNamespace) -> Result<()> {
    skip_invariants("writes rows past the actions");
    let (desk, clock) = desk(namespace).await?;
    let jobs = desk.table("jobs")?.clone();
    let run_at = |job: &str, at: Value| Step::update(&jobs, id(job)).set("run_at", at);
    let state = |job: &str, state: &str| Step::update(&jobs, id(job)).set("state", state);
    // It is over, by the same attempt.
    enqueue(&desk, "a", json!({})).await?;
    claim(&desk, 1, 1).await?;
    let fail = draft(&desk, "job.fail", "a", failed()).await?;
    complete(&desk, "a", 1).await?;
    desk.too_late(&fail).await?;

    // One is admitted and another stands in line, or neither is so any more.
    let client = desk.for_tenant("lanes")?;
    for job in ["x0", "x1"] {
        enqueue(&client, job, json!({"order_key": "k"})).await?;
    }
    let admitted = draft(&client, "job.cancel", "x0", json!({})).await?;
    let in_line = draft(&client, "job.cancel", "x1", json!({})).await?;
    let soon = Value::Time(clock.now());
    for (plan, wrong, right) in [
        (&admitted, run_at("x0", Value::Null), run_at("x0", soon.clone())),
        (&in_line, run_at("x1", soon), run_at("x1", Value::Null)),
        (&in_line, state("x1", "COMPLETED"), state("x1", "PENDING")),
    ] {
        write(&client, wrong).await?;
        client.too_late(plan).await?;
        write(&client, right).await?;
    }
    for (job, table) in [("x1", "job_lines"), ("x2", "job_lanes")] {
        if job == "x2" {
            enqueue(&client, job, json!({"order_key": "alone"})).await?;
        }
        let plan = draft(&client, "job.cancel", job, json!({})).await?;
        let gone = plan.steps().iter().find(|step| step.table.name() == table).context("no such step")?;
        write(&client, Step::delete(client.table(table)?, gone.key.iter().cloned())).await?;
        client.too_late(&plan).await?;
    }

    // Two callers that see an empty lane.
    let fresh = |job: &str| json!({"job_id": job, "order_key": "fresh"});
    let late = client.drafted("job.enqueue", &[], fresh("n0"), None).await?;
    client.done("job.enqueue", &[], fresh("n1"), None).await?;
    client.too_late(&late).await?;

    // There was room, or there was none.
    let task = |job: &str| json!({"job_id": job, "order_key": "k"});
    client.done("task.enqueue", &[], task("t0"), None).await?;
    let room = client.drafted("task.enqueue", &[], task("t1"), None).await?;
    client.done("task.enqueue", &[], task("t2"), None).await?;
    client.too_late(&room).await?;
    let line = client.drafted("task.enqueue", &[], task("t3"), None).await?;
    let lines = client.table("task_lines")?;
    let place = line.steps().iter().find(|step| step.table.name() == lines.name()).context("no place")?;
    let place = || place.key.iter().cloned();
    let stray = Step::insert(lines, place()).set("job_id", "other").set("not_before", now());
    write(&client, stray).await?;
    client.too_late(&line).await?;
    write(&client, Step::delete(lines, place())).await?;
    client.done("task.cancel", &id("t0"), json!({}), None).await?;
    client.too_late(&line).await?;

    // Another job has its unique key, or no job has it, or it was brought back to life already.
    let client = desk.for_tenant("keys")?;
    for (job, input) in
        [("u", json!({"unique_key": "u"})), ("v", json!({"unique_key": "v"})), ("w", json!({}))]
    {
        enqueue(&client, job, input).await?;
        same("what was claimed", &claim(&client, 1, 1).await?, &vec![(job.to_owned(), 1)])?;
        client.done("job.fail", &id(job), failed(), None).await?;
        let replay = draft(&client, "job.replay", job, json!({})).await?;
        match job {
            "u" => enqueue(&client, "heir", json!({"unique_key": "u", "after_ms": 3_600_000})).await?,
            "v" => write(&client, Step::delete(client.table("job_uniques")?, id("v"))).await?,
            _ => drop(client.done("job.replay", &id(job), json!({}), None).await?),
        }
        client.too_late(&replay).await?;
    }
    client.done("job.cancel", &id("w"), json!({}), None).await?;
    // A key is free when its job was completed.
    enqueue(&client, "c1", json!({"unique_key": "c"})).await?;
    claim(&client, 1, 1).await?;
    complete(&client, "c1", 1).await?;
    enqueue(&client, "c2", json!({"unique_key": "c"})).await
}

pub(super) async fn a_definition_that_changed_meanwhile_stays_so(
    namespace: &dyn TestNamespace,
) -> Result<()> {
    let (client, clock) = desk(namespace).await?;
    let (store_client, jobs) = (client.store_client()?, client.table("jobs")?.clone());
    let define_it = async || draft(&client, "job_definition.create", "d", every(60)).await;
    let first = define_it().await?;
    define(&client, "d", every(60)).await?;
    client.too_late(&first).await?;
    let mut stale = vec![define_it().await?];
    for action in ["pause", "run", "delete"] {
        stale.push(draft(&client, &format!("job_definition.{action}"), "d", json!({})).await?);
    }
    let run = draft(&client, "job_definition.run", "d", json!({})).await?;
    let taken = run.steps().first().and_then(|step| step.key.first()?.as_text()).context("no job")?;
    enqueue(&client, taken, json!({})).await?;
    client.too_late(&run).await?;
    client.done("job_definition.pause", &id("d"), json!({}), None).await?;
    for plan in &stale {
        client.too_late(plan).await?;
    }
    let resume = draft(&client, "job_definition.resume", "d", json!({})).await?;
    client.done("job_definition.resume", &id("d"), json!({}), None).await?;
    client.too_late(&resume).await?;
    // The job that it would take back was claimed, or does not stand where it stood.
    for (definition, overlap) in [("free", "allow"), ("line", "queue")] {
        let mut input = every(60);
        input["overlap"] = json!(overlap);
        define(&client, definition, input).await?;
    }
    clock.advance(SECOND * 55);
    client.drain_workers().await?;
    let made = all_rows(&client, "jobs").await?;
    let state = |job: &str, state: &str| Step::update(&jobs, id(job)).set("state", state);
    for (definition, in_progress) in [("free", true), ("line", true), ("line", false)] {
        let before = made.iter().find(|row| row.text("definition_id") == Some(definition));
        let before = before.context("nothing was made")?;
        let job = before.text("job_id").context("no id")?;
        let pause = draft(&client, "job_definition.pause", definition, json!({})).await?;
        let wrong = match in_progress {
            true => state(job, "IN_PROGRESS"),
            false => Step::update(&jobs, id(job)).set("run_at", Value::Null),
        };
        write(&client, wrong).await?;
        client.too_late(&pause).await?;
        let at = before.get("run_at").cloned().unwrap_or(Value::Null);
        write(&client, state(job, "PENDING").set("run_at", at)).await?;
        same("the job", &store_client.row(&jobs, id(job)).await?.text("state"), &Some("PENDING"))?;
    }
    // And the definition itself is gone.
    let stale = [define_it().await?, draft(&client, "job_definition.run", "d", json!({})).await?];
    write(&client, Step::delete(client.table("job_definitions")?, id("d"))).await?;
    for plan in &stale {
        client.too_late(plan).await?;
    }
    Ok(())
}

/// Steps of all workers until one of them was paused. An index may lag.
pub(super) async fn works_until_paused(slow: &TenantClient, paused: &Paused) -> Result<()> {
    for _ in 0..LOOKS_MAX {
        slow.work(7).await?;
        if paused.is_over() {
            return Ok(());
        }
        pause().await;
    }
    bail!("no worker found anything to do")
}

/// A desk whose clock moves pauses by itself, and a process that is paused with a plan in its hands.
pub(super) async fn slow_desk(
    namespace: &dyn TestNamespace,
) -> Result<(TenantClient, TenantClient, Arc<Paused>, DrillClock)> {
    let clock = DrillClock::new();
    let store = namespace.open_at(Arc::new(clock.clone())).await?;
    let paused = Arc::new(Paused::default());
    let slow = Arc::new(StoreProxy::new(store.clone(), paused.clone()));
    let client = TenantClient::over(store, BLUEPRINT, Arc::new(clock.clone())).await?;
    let slow = TenantClient::over(slow, BLUEPRINT, Arc::new(clock.clone())).await?;
    Ok((client, slow, paused, clock))
}

pub(super) async fn a_stale_reader_claims_and_fails_nothing(namespace: &dyn TestNamespace) -> Result<()> {
    let (client, slow, paused, clock) = slow_desk(namespace).await?;
    // What others do to the job's one attempt while a worker is about to claim it, or to fail it because its lease is over.
    for (tenant, over, state) in [
        // Its lease is over by the time that the claim comes, which is refused; the next claim sees that.
        ("claimed", false, "FAILED"),
        ("held", true, "IN_PROGRESS"),
        ("replayed", true, "PENDING"),
        ("replayed-and-claimed", true, "IN_PROGRESS"),
    ] {
        let (client, slow) = (client.for_tenant(tenant)?, slow.for_tenant(tenant)?);
        enqueue(&client, "a", json!({"attempts_max": 1})).await?;
        if over {
            claim(&client, 1, 1).await?;
            clock.advance(SECOND * 31);
        }
        let (others, clock) = (client.clone(), clock.clone());
        // What is over cannot be claimed; that it failed is the second thing that is tried.
        let number = if over { 2 } else { 1 };
        paused.before("jobs", number, async move {
            let look = json!({"worker": "other", "limit": 1});
            let ask = async |action: &str, key: &str, input: Json| {
                // If this fails, the job is in another state than the case expects.
                drop(others.done(action, &id(key), input, None).await);
            };
            match tenant {
                "claimed" => {
                    ask("job_queue.claim", "default", look).await;
                    clock.advance(SECOND * 31);
                }
                "held" => {
                    let beat = json!({"jobs": [{"job_id": "a", "attempt": 1}]});
                    ask("job_queue.heartbeat", "default", beat).await;
                }
                _ => {
                    ask("job_queue.claim", "default", look.clone()).await;
                    ask("job.replay", "a", json!({})).await;
                    if tenant != "replayed" {
                        ask("job_queue.claim", "default", look).await;
                        clock.advance(SECOND * 31);
                    }
                }
            }
        });
        let mut claimed = Vec::new();
        for _ in 0..LOOKS_MAX {
            claimed.extend(claim_once(&slow, json!({"limit": 1})).await?);
            if paused.is_over() {
                break;
            }
            pause().await;
        }
        same(tenant, &claimed, &Vec::new())?;
        client.shows("job", &id("a"), &json!({"state": state})).await.context(tenant)?;
    }
    Ok(())
}

pub(super) async fn a_stale_reader_forgets_nothing(namespace: &dyn TestNamespace) -> Result<()> {
    let (client, slow, paused, clock) = slow_desk(namespace).await?;
    enqueue(&client, "dead", json!({"attempts_max": 1})).await?;
    claim(&client, 1, 1).await?;
    client.done("job.fail", &id("dead"), json!({"attempt": 1}), None).await?;
    clock.advance(SECOND * 24 * 3_600);
    let others = client.clone();
    paused.before("jobs", 1, async move {
        // If this fails, the job is not there any more.
        drop(others.done("job.replay", &id("dead"), json!({}), None).await);
    });
    works_until_paused(&slow, &paused).await?;
    client.shows("job", &id("dead"), &json!({"state": "PENDING"})).await?;
    client.done("job.cancel", &id("dead"), json!({}), None).await?;
    clock.advance(SECOND * 3_600);
    client.drain_workers().await?;
    // Its key is another's by now.
    enqueue(&client, "done", json!({"unique_key": "u"})).await?;
    claim(&client, 1, 1).await?;
    complete(&client, "done", 1).await?;
    clock.advance(SECOND * 3_600);
    let others = client.clone();
    paused.before("jobs", 1, async move {
        // If this fails, the key is free.
        drop(enqueue(&others, "heir", json!({"unique_key": "u"})).await);
    });
    works_until_paused(&slow, &paused).await?;
    let third = json!({"job_id": "third", "unique_key": "u"});
    client.refused("job.enqueue", &[], third, None, Code::AlreadyExists).await.map(drop)
}

pub(super) async fn a_stale_reader_makes_nothing(namespace: &dyn TestNamespace) -> Result<()> {
    skip_invariants("writes rows past the actions");
    let (client, slow, paused, clock) = slow_desk(namespace).await?;
    // In which state the first job is when the second is due; what others do before the plan about the second is
    // committed; and how many are made and skipped in the end.
    for (tenant, before, meanwhile, made, skipped) in [
        ("pending", "", "", 1, 1),
        ("retrying", "retry", "", 1, 1),
        ("failed", "fail", "", 2, 0),
        ("cancelled", "cancel", "", 2, 0),
        ("back-to-life", "fail", "replay", 1, 1),
        ("ended", "claim", "complete", 2, 0),
        ("deleted", "claim", "delete", 2, 0),
        ("back-under-its-name", "delete", "enqueue", 1, 1),
    ] {
        let (client, slow) = (client.for_tenant(tenant)?, slow.for_tenant(tenant)?);
        let mut input = every(60);
        input["overlap"] = json!("skip");
        define(&client, "d", input).await?;
        clock.advance(SECOND * 60);
        client.drain_workers().await?;
        let job = all_rows(&client, "jobs").await?;
        let job = job.first().and_then(|row| row.text("job_id")).context("nothing was made")?.to_owned();
        if ["retry", "fail", "claim"].contains(&before) {
            let lease = json!({"limit": 1, "lease_ms": 3_600_000});
            let mut claimed = Vec::new();
            while claimed.is_empty() {
                claimed = claim_once(&client, lease.clone()).await?;
            }
        }
        match before {
            "retry" => drop(client.done("job.fail", &id(&job), json!({"attempt": 1}), None).await?),
            "fail" => drop(client.done("job.fail", &id(&job), failed(), None).await?),
            "cancel" => drop(client.done("job.cancel", &id(&job), json!({}), None).await?),
            "delete" => write(&client, Step::delete(client.table("jobs")?, id(&job))).await?,
            _ => {}
        }
        clock.advance(SECOND * 60);
        if !meanwhile.is_empty() {
            let (others, jobs) = (client.clone(), client.table("jobs")?.clone());
            paused.before("job_definitions", 1, async move {
                // If this fails, another number is made and skipped than the case expects.
                match meanwhile {
                    "replay" => drop(others.done("job.replay", &id(&job), json!({}), None).await),
                    "complete" => drop(complete(&others, &job, 1).await),
                    "enqueue" => drop(enqueue(&others, &job, json!({})).await),
                    _ => drop(write(&others, Step::delete(&jobs, id(&job))).await),
                }
            });
            works_until_paused(&slow, &paused).await?;
        }
        client.drain_workers().await?;
        let shown = client.shown("job_definition", &id("d"), &["made", "skipped"]).await?;
        same(tenant, &shown, &vec![json!(made), json!(skipped)])?;
        client.done("job_definition.delete", &id("d"), json!({}), None).await?;
    }
    // It was defined anew meanwhile, and is due again: what it was before is not made.
    let at = |clock: &DrillClock| json!({"at": clock.now().to_string()});
    define(&client, "anew", json!({"when": at(&clock), "payload": "old"})).await?;
    let (others, when) = (client.clone(), at(&clock));
    paused.before("job_definitions", 1, async move {
        // If this fails, the old one is made.
        drop(define(&others, "anew", json!({"when": when, "payload": "new"})).await);
    });
    works_until_paused(&slow, &paused).await?;
    client.drain_workers().await?;
    let jobs = all_rows(&client, "jobs").await?;
    let payloads: Vec<_> = jobs.iter().filter_map(|row| row.json("payload")).collect();
    same("what was made", &payloads, &vec![&json!("new")])?;
    // A caller has enqueued a job of the name that one would get: it stays as it is.
    let due = clock.now().plus(SECOND * 60);
    enqueue(&client, &format!("taken@{due}.1"), json!({"payload": "mine"})).await?;
    define(&client, "taken", json!({"when": {"at": due.to_string()}, "payload": "its own"})).await?;
    clock.advance(SECOND * 60);
    for _ in 0..3 {
        // The worker says that it cannot.
        drop(client.work(7).await);
    }
    client.shows("job", &id(&format!("taken@{due}.1")), &json!({"payload": "mine"})).await
}

/// A store that cannot be read any more once something was written.
#[derive(Debug, Default)]
struct UnreadableAfterWrite(std::sync::atomic::AtomicBool);

#[async_trait]
impl Interceptor for Arc<UnreadableAfterWrite> {
    async fn commit(&self, inner: &Arc<dyn Store>, plan: &Plan) -> Result<Commit, StoreError> {
        self.0.store(true, std::sync::atomic::Ordering::SeqCst);
        inner.commit(plan).await
    }

    async fn query(&self, inner: &Arc<dyn Store>, query: &Query) -> Result<Page, StoreError> {
        if self.0.load(std::sync::atomic::Ordering::SeqCst) {
            return Err(StoreError::unavailable("the store has gone"));
        }
        inner.query(query).await
    }
}

pub(super) async fn what_was_claimed_is_told_if_the_store_fails_then(
    namespace: &dyn TestNamespace,
) -> Result<()> {
    let clock = DrillClock::new();
    let store = namespace.open_at(Arc::new(clock.clone())).await?;
    let fading = Arc::new(StoreProxy::new(store.clone(), Arc::new(UnreadableAfterWrite::default())));
    let client = TenantClient::over(store, BLUEPRINT, Arc::new(clock.clone())).await?;
    let fading = TenantClient::over(fading, BLUEPRINT, Arc::new(clock)).await?;
    enqueue(&client, "a", json!({})).await?;
    for _ in 0..LOOKS_MAX {
        let claimed = claim_once(&fading, json!({"limit": 5})).await?;
        if !claimed.is_empty() {
            return same("what was claimed", &claimed, &vec![("a".to_owned(), 1)]);
        }
        pause().await;
    }
    bail!("nothing was claimed")
}

/// One queue, with one shard.
const NARROW: &str = r#"
[house]
name = "drill"

[schedule.job]
shards = 1
"#;

pub(super) async fn what_is_late_is_found_before_a_long_queue(namespace: &dyn TestNamespace) -> Result<()> {
    const JOBS: usize = 24;
    const SOON: usize = 12;
    let clock = standing();
    let client = TenantClient::open_at(namespace, NARROW, Arc::new(clock.clone())).await?;
    for number in 0..JOBS {
        enqueue(&client, &format!("job {number:02}"), json!({})).await?;
        clock.advance(SECOND / 1_000);
    }
    // The claimer knows by now where the queue begins.
    let mut claimed = claim(&client, 1, 1).await?;
    claimed.extend(claim(&client, 1, 1).await?);
    enqueue(&client, "late", json!({"at": "2020-01-01T00:00:00Z"})).await?;
    for _ in 0..SOON {
        clock.advance(SECOND);
        pause().await;
        claimed.extend(claim(&client, 1, 1).await?);
    }
    let names: Vec<&str> = claimed.iter().map(|(job, _)| job.as_str()).collect();
    ensure!(names.contains(&"late"), "what should have been done years ago waits behind {names:?}");
    Ok(())
}

pub(super) async fn a_lost_heartbeat_stays_unknown_if_the_retry_is_unavailable(
    namespace: &dyn TestNamespace,
) -> Result<()> {
    let clock = standing();
    let faults = Arc::new(LostThenUnavailable::default());
    let store = Arc::new(StoreProxy::new(namespace.open_at(Arc::new(clock.clone())).await?, faults.clone()));
    let client = TenantClient::over(store, BLUEPRINT, Arc::new(clock.clone())).await?;
    enqueue(&client, "a", json!({})).await?;
    same("the job", &claim(&client, 1, 1).await?, &vec![("a".to_owned(), 1)])?;
    clock.advance(SECOND * 20);
    faults.start();
    let beat = json!({"jobs": [{"job_id": "a", "attempt": 1}]});
    let beat = client.done("job_queue.heartbeat", &id("default"), beat, None).await?;
    same("the heartbeat", &beat.body[0]["code"], &json!("outcome_unknown"))?;
    faults.check_injected()?;
    // The lost attempt was applied: the lease is longer than the claim's own.
    clock.advance(SECOND * 20);
    claims_nothing(&client).await
}
use crate::harness::case_check::skip_invariants;
