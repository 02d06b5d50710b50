//! Many claimers, lost answers, wrong clocks and killed processes.

use super::*;

pub(super) async fn a_unique_key_has_one_job_in_a_race(namespace: &dyn TestNamespace) -> Result<()> {
    let client = TenantClient::open(namespace, BLUEPRINT).await?;
    let mut winner: Option<String> = None;
    for round in 0..6 {
        // The one before fails; then it is replayed while others want its key.
        if let Some(job) = &winner {
            let (_, attempt) = claim(&client, 1, 1).await?[0].clone();
            client.done("job.fail", &id(job), json!({"attempt": attempt, "final": true}), None).await?;
        }
        let mut racers = Vec::new();
        for racer in 0..5 {
            let (client, before) = (client.clone(), winner.clone());
            racers.push(tokio::spawn(async move {
                let job = format!("r{round}-{racer}");
                match before.filter(|_| racer == 0) {
                    Some(before) => {
                        let done = client.call("job.replay", &id(&before), json!({}), None).await;
                        (before, done.map(drop))
                    }
                    None => {
                        let input = json!({"job_id": job, "unique_key": "u"});
                        let done = client.call("job.enqueue", &[], input, None).await;
                        (job, done.map(drop))
                    }
                }
            }));
        }
        let mut winners = Vec::new();
        for racer in racers {
            match racer.await? {
                (job, Ok(())) => winners.push(job),
                (_, Err(refusal)) if [Code::AlreadyExists, Code::Contended].contains(&refusal.code) => {}
                (job, Err(refusal)) => bail!("{job}: {refusal}"),
            }
        }
        let live = all_rows(&client, "jobs").await?;
        let live: Vec<&str> = live
            .iter()
            .filter(|row| row.text("state") == Some("PENDING"))
            .filter_map(|row| row.text("job_id"))
            .collect();
        same(&format!("round {round}: who is live"), &live, &winners.iter().map(String::as_str).collect())?;
        same(&format!("round {round}: winners"), &winners.len(), &1)?;
        winner = winners.pop();
    }
    Ok(())
}

pub(super) async fn many_claimers_never_share_a_job(namespace: &dyn TestNamespace) -> Result<()> {
    let first = TenantClient::open(namespace, BLUEPRINT).await?;
    // Two processes, so that claimers do not only take turns.
    let second = TenantClient::over(first.house.store().clone(), BLUEPRINT, Arc::new(SystemClock)).await?;
    let jobs = 60;
    for job in 0..jobs {
        enqueue(&first, &format!("j{job}"), json!({})).await?;
    }
    let workers: Vec<_> = (0..6)
        .map(|number| {
            let client = if number % 2 == 0 { first.clone() } else { second.clone() };
            tokio::spawn(async move {
                let (mut mine, mut quiet) = (Vec::new(), 0);
                while quiet < 5 {
                    let claimed =
                        claim_once(&client, json!({"worker": format!("w{number}"), "limit": 7})).await?;
                    quiet = if claimed.is_empty() { quiet + 1 } else { 0 };
                    for (job, attempt) in claimed {
                        ensure!(attempt == 1, "{job} was claimed {attempt} times");
                        complete(&client, &job, attempt).await?;
                        mine.push(job);
                    }
                }
                Ok(mine)
            })
        })
        .collect();
    let mut claimed = Vec::new();
    for worker in workers {
        claimed.extend(worker.await??);
    }
    same("how many were claimed", &claimed.len(), &jobs)?;
    same("how many different ones", &claimed.iter().collect::<BTreeSet<_>>().len(), &jobs)?;
    invariants::check(&first.scope("job")).await
}

pub(super) async fn many_keys_keep_their_order_under_load(namespace: &dyn TestNamespace) -> Result<()> {
    let client = TenantClient::open(namespace, BLUEPRINT).await?;
    let (keys, each) = (3, 8);
    let producers: Vec<_> = (0..keys)
        .map(|key| {
            let client = client.clone();
            tokio::spawn(async move {
                for number in 0..each {
                    let (job, key) = (format!("k{key}-{number}"), format!("k{key}"));
                    enqueue(&client, &job, json!({"order_key": key})).await?;
                }
                Ok::<_, anyhow::Error>(())
            })
        })
        .collect();
    let workers: Vec<_> = (0..4)
        .map(|_| {
            let client = client.clone();
            tokio::spawn(async move {
                let mut quiet = 0;
                while quiet < 30 {
                    let claimed = claim_once(&client, json!({"limit": 3})).await?;
                    quiet = if claimed.is_empty() { quiet + 1 } else { 0 };
                    for (job, attempt) in &claimed {
                        complete(&client, job, *attempt).await?;
                    }
                    if claimed.is_empty() {
                        pause().await;
                    }
                }
                Ok::<_, anyhow::Error>(())
            })
        })
        .collect();
    for task in producers.into_iter().chain(workers) {
        task.await??;
    }
    let rows = all_rows(&client, "jobs").await?;
    same("how many", &rows.len(), &(keys * each))?;
    let mut runs: BTreeMap<&str, Vec<(Time, Time, &str)>> = BTreeMap::new();
    for row in &rows {
        let job = row.text("job_id").unwrap_or_default();
        ensure!(row.text("state") == Some("COMPLETED"), "{job} is {:?}", row.text("state"));
        let span = row.time("started_at").zip(row.time("finished_at")).context("a job without its times")?;
        runs.entry(row.text("order_key").unwrap_or_default()).or_default().push((span.0, span.1, job));
    }
    for (key, mut runs) in runs {
        runs.sort();
        for (number, (start, _, job)) in runs.iter().enumerate() {
            same("the order", job, &format!("{key}-{number}").as_str())?;
            let before = number.checked_sub(1).map(|before| runs[before].1);
            ensure!(before.is_none_or(|end| end <= *start), "{job} began at {start}, before {before:?}");
        }
    }
    no_job_is_left_in_line(&client, "job").await
}

pub(super) async fn lost_answers_lose_and_double_nothing(namespace: &dyn TestNamespace) -> Result<()> {
    let sound = namespace.open().await?;
    let faulty = Arc::new(FaultyStore::over(sound.clone(), Arc::new(SystemClock), Odds::default(), 7));
    let client = TenantClient::over(faulty.clone(), BLUEPRINT, Arc::new(SystemClock)).await?;
    let jobs = 24;
    faulty.set_odds(Odds { unknown_before: 0.1, unknown_after: 0.2, unavailable: 0.1, ..Odds::default() });
    for number in 0..jobs {
        let mut input = json!({"job_id": format!("j{number}"), "attempts_max": 500});
        if number % 3 == 0 {
            input["order_key"] = json!(format!("k{}", number % 2));
        }
        for tries in 0.. {
            let operation = format!("enqueue-{number}");
            match client.call_as(&operation, "job.enqueue", &[], input.clone(), None).await {
                Ok(_) => break,
                Err(refusal) => ensure!(tries < 200 && may_pass(refusal.code), "{refusal}"),
            }
        }
    }
    // Each answer that gets lost is a worker that dies: what it claimed comes back when its short lease is over.
    let mut executed: BTreeMap<String, BTreeSet<i64>> = BTreeMap::new();
    let mut acknowledged: BTreeMap<String, i64> = BTreeMap::new();
    for turn in 0.. {
        ensure!(turn < 3_000, "only {} of {jobs} jobs were done: {acknowledged:?}", acknowledged.len());
        if acknowledged.len() == jobs {
            break;
        }
        let input = json!({"worker": "ann", "limit": 4, "lease_ms": 100});
        let Ok(claimed) = client.call("job_queue.claim", &id("default"), input, None).await else {
            continue;
        };
        let claimed = jobs_in(&claimed.body)?;
        if claimed.is_empty() {
            pause().await;
        }
        for (job, attempt) in claimed {
            let fresh = executed.entry(job.clone()).or_default().insert(attempt);
            ensure!(fresh, "{job} was claimed twice as attempt {attempt}");
            let input = json!({"attempt": attempt, "result": {"by": attempt}});
            match client.call("job.complete", &id(&job), input, None).await {
                Ok(_) => {
                    let before = acknowledged.insert(job.clone(), attempt);
                    ensure!(before.is_none(), "{job} was completed by {before:?} and by {attempt}");
                }
                // It may have been done: then no worker gets it again, and the row says so.
                Err(refusal) if refusal.code == Code::OutcomeUnknown => {
                    for _ in 0..200 {
                        let Ok(row) = client.call("job.read", &id(&job), json!({}), None).await else {
                            continue;
                        };
                        if row.body["state"] == json!("COMPLETED") {
                            acknowledged.insert(job.clone(), attempt);
                        }
                        break;
                    }
                }
                Err(refusal) => ensure!(
                    may_pass(refusal.code) || [Code::NotHolder, Code::WrongState].contains(&refusal.code),
                    "{refusal}"
                ),
            }
            // What was completed without an answer is not claimed again: learn it from the row.
            if let Ok(row) = client.call("job.read", &id(&job), json!({}), None).await
                && row.body["state"] == json!("COMPLETED")
            {
                let by = row.body["result"]["by"].as_i64().context("a result without its attempt")?;
                let known = acknowledged.entry(job.clone()).or_insert(by);
                same("whose result it is", known, &by)?;
            }
        }
        // A job that was completed by an attempt whose every answer was lost is found in the rows.
        if turn % 50 == 49 {
            for row in crate::harness::store_client::scan(
                sound.as_ref(),
                Scan::of(client.table("jobs")?, &client.tenant),
            )
            .await?
            {
                if row.text("state") == Some("COMPLETED") {
                    let job = row.text("job_id").unwrap_or_default().to_owned();
                    acknowledged.entry(job).or_insert(row.int("attempt").unwrap_or(0));
                }
            }
        }
    }
    let achieved = faulty.achieved();
    ensure!(achieved.unknown_after > 0 && achieved.unknown_before > 0, "{achieved}");
    let mut completed: BTreeMap<String, usize> = BTreeMap::new();
    for record in whole_log(sound.as_ref()).await? {
        for event in record.events.iter().filter(|event| event.name == "job.completed") {
            *completed.entry(event.data["job_id"].to_string()).or_default() += 1;
        }
    }
    same("jobs with a result in the log", &completed.len(), &jobs)?;
    ensure!(completed.values().all(|times| *times == 1), "{completed:?}");
    no_job_is_left_in_line(&TenantClient::over(sound, BLUEPRINT, Arc::new(SystemClock)).await?, "job").await
}

/// Temporary refusals: they pass with a retry.
pub(super) fn may_pass(code: Code) -> bool {
    [Code::OutcomeUnknown, Code::Unavailable, Code::Contended].contains(&code)
}

pub(super) async fn a_clock_that_steps_breaks_no_claim(namespace: &dyn TestNamespace) -> Result<()> {
    let (client, clock) = desk(namespace).await?;
    enqueue(&client, "a", json!({})).await?;
    claim(&client, 1, 1).await?;
    // Ten minutes back: the lease lasts longer, and its holder is its holder.
    let start = clock.now();
    clock.set(start.minus(SECOND * 600));
    claims_nothing(&client).await?;
    complete(&client, "a", 1).await?;
    // Ten minutes ahead: leases are over, and a former holder is refused as soon as another worker has the job.
    clock.set(start);
    enqueue(&client, "b", json!({})).await?;
    claim(&client, 1, 1).await?;
    clock.set(start.plus(SECOND * 600));
    same("after a step ahead", &claim(&client, 1, 1).await?, &vec![("b".to_owned(), 2)])?;
    clock.set(start);
    client.refused("job.complete", &id("b"), json!({"attempt": 1}), None, Code::NotHolder).await?;
    claims_nothing(&client).await?;
    complete(&client, "b", 2).await?;
    claims_nothing(&client).await
}

pub(super) async fn a_worker_whose_clock_is_wrong_claims_nothing_early(
    namespace: &dyn TestNamespace,
) -> Result<()> {
    let engine = standing();
    let skewed = SkewedClock::over(Arc::new(engine.clone()));
    let store = namespace.open_at(Arc::new(engine.clone())).await?;
    let client = TenantClient::over(store, BLUEPRINT, Arc::new(skewed.clone())).await?;
    enqueue(&client, "later", json!({"after_ms": 60_000})).await?;
    enqueue(&client, "now", json!({})).await?;
    // Ten minutes ahead, it sees both as due. The engine does not, and the one that is due is not held up.
    skewed.skew(600_000_000);
    same("ten minutes ahead", &claim(&client, 9, 1).await?, &vec![("now".to_owned(), 1)])?;
    claims_nothing(&client).await?;
    complete(&client, "now", 1).await?;
    // Ten minutes behind, it is late and loses nothing.
    skewed.skew(-600_000_000);
    engine.advance(SECOND * 60);
    claims_nothing(&client).await?;
    skewed.skew(0);
    same("right", &claim(&client, 9, 1).await?, &vec![("later".to_owned(), 1)])
}

pub(super) async fn a_claim_waits_for_a_job(namespace: &dyn TestNamespace) -> Result<()> {
    let client = TenantClient::open(namespace, BLUEPRINT).await?;
    let waiting = |client: TenantClient| {
        tokio::spawn(async move { claim_once(&client, json!({"limit": 5, "wait_ms": 30_000})).await })
    };
    let claim = waiting(client.clone());
    pause().await;
    ensure!(!claim.is_finished(), "there was nothing to claim");
    enqueue(&client, "a", json!({})).await?;
    same("what it waited for", &claim.await??, &vec![("a".to_owned(), 1)])?;
    // One that becomes due, by itself and by a completion.
    enqueue(&client, "b", json!({"after_ms": 300})).await?;
    same("what became due", &waiting(client.clone()).await??, &vec![("b".to_owned(), 1)])?;
    enqueue(&client, "c", json!({"order_key": "k"})).await?;
    enqueue(&client, "d", json!({"order_key": "k"})).await?;
    same("the first", &waiting(client.clone()).await??, &vec![("c".to_owned(), 1)])?;
    let claim = waiting(client.clone());
    pause().await;
    complete(&client, "c", 1).await?;
    same("the next", &claim.await??, &vec![("d".to_owned(), 1)])?;
    // One that waits in vain gets nothing, and no error.
    same("in vain", &claim_once(&client, json!({"wait_ms": 50})).await?, &vec![])
}

/// A handler that notes whose jobs it did, in which order.
pub(super) struct RecordingHandler {
    notes: Mutex<Vec<(String, String, i64)>>,
    takes: Duration,
}

#[async_trait]
impl JobHandler for RecordingHandler {
    async fn handle(&self, job: &Job) -> Result<Json, JobFailure> {
        let note = (job.tenant.as_str().to_owned(), job.job_id.clone(), job.attempt);
        self.notes.lock().unwrap_or_else(PoisonError::into_inner).push(note);
        match job.payload.as_str() {
            Some("fail") => Err(JobFailure::passing("not today")),
            Some("give up") => Err(JobFailure { error: "never".into(), is_final: true }),
            Some("long") => {
                SystemClock.sleep(self.takes).await;
                Ok(json!("long"))
            }
            _ => Ok(job.payload.clone()),
        }
    }
}

impl RecordingHandler {
    fn taking(takes: Duration) -> Arc<RecordingHandler> {
        Arc::new(RecordingHandler { notes: Mutex::default(), takes })
    }

    fn notes(&self) -> Vec<(String, String, i64)> {
        self.notes.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }
}

/// Waits until so many jobs of a tenant are in a state.
pub(super) async fn until(client: &TenantClient, state: &str, expected: usize) -> Result<()> {
    let mut found = 0;
    for _ in 0..2_000 {
        let rows = all_rows(client, "jobs").await?;
        found = rows.iter().filter(|row| row.text("state") == Some(state)).count();
        if found >= expected {
            break;
        }
        pause().await;
    }
    same(state, &found, &expected)
}

pub(super) async fn handlers_in_rust_do_jobs(namespace: &dyn TestNamespace) -> Result<()> {
    let client = TenantClient::open(namespace, BLUEPRINT).await?;
    let handler = RecordingHandler::taking(Duration::from_secs(4));
    for (job, payload) in [("a", "x"), ("b", "fail"), ("c", "give up"), ("d", "long"), ("e", "y")] {
        let key = if job == "a" || job == "e" { json!("k") } else { Json::Null };
        let mut input = json!({"payload": payload});
        if !key.is_null() {
            input["order_key"] = key;
        }
        enqueue(&client, job, input).await?;
    }
    let options = RunnerOptions { lease: Some(Duration::from_millis(1_500)), ..RunnerOptions::default() };
    let start = |schedule: &str| {
        JobRunner::start(&client.house, schedule, "default", handler.clone(), options.clone())
    };
    ensure!(start("order").is_err() && start("nothing").is_err(), "only schedules have jobs");
    let hands = start("job")?;
    until(&client, "COMPLETED", 3).await?;
    hands.stop().await;
    for (job, expected) in [
        ("a", json!({"state": "COMPLETED", "result": "x", "worker": "house"})),
        ("b", json!({"state": "RETRYING", "error": "not today"})),
        ("c", json!({"state": "FAILED", "error": "never"})),
        // It took three leases, and its heart beat on.
        ("d", json!({"state": "COMPLETED", "result": "long", "attempt": 1})),
        ("e", json!({"state": "COMPLETED", "result": "y"})),
    ] {
        client.shows("job", &id(job), &expected).await?;
    }
    // What was stopped claims nothing more.
    enqueue(&client, "f", json!({})).await?;
    same("who does it", &claim(&client, 1, 1).await?, &vec![("f".to_owned(), 1)])?;
    no_job_is_left_in_line(&client, "job").await
}

pub(super) async fn a_tenant_with_many_jobs_does_not_hold_up_another(
    namespace: &dyn TestNamespace,
) -> Result<()> {
    let many = TenantClient::open(namespace, BLUEPRINT).await?;
    let few = many.for_tenant("zeta")?;
    for job in 0..60 {
        enqueue(&many, &format!("m{job}"), json!({})).await?;
    }
    for job in 0..3 {
        enqueue(&few, &format!("f{job}"), json!({})).await?;
    }
    let handler = RecordingHandler::taking(Duration::ZERO);
    let options = RunnerOptions { at_once: 4, ..RunnerOptions::default() };
    let hands = JobRunner::start(&many.house, "job", "default", handler.clone(), options)?;
    until(&many, "COMPLETED", 60).await?;
    until(&few, "COMPLETED", 3).await?;
    hands.stop().await;
    let notes = handler.notes();
    same("each once", &notes.len(), &63)?;
    let last = notes.iter().rposition(|(tenant, ..)| tenant == "zeta").context("nothing of zeta was done")?;
    ensure!(last < 30, "the last of three jobs was done as number {last} of {}", notes.len());
    Ok(())
}

pub(super) async fn a_process_that_is_killed_loses_no_job(namespace: &dyn TestNamespace) -> Result<()> {
    let store = namespace.open().await?;
    let open = async || TenantClient::over(store.clone(), BLUEPRINT, Arc::new(SystemClock)).await;
    let (first, second) = (open().await?, open().await?);
    for job in 0..20 {
        enqueue(&first, &format!("j{job}"), json!({"payload": "long", "attempts_max": 9})).await?;
    }
    let options = RunnerOptions {
        at_once: 6,
        lease: Some(Duration::from_secs(3)),
        idle_max: Duration::from_millis(50),
        ..RunnerOptions::default()
    };
    // The first never comes to an end with what it has; the second is quick.
    let slow = RecordingHandler::taking(Duration::from_secs(3_600));
    let hands = JobRunner::start(&first.house, "job", "default", slow.clone(), options.clone())?;
    for _ in 0..2_000 {
        if slow.notes().len() >= 6 {
            break;
        }
        pause().await;
    }
    let quick = RecordingHandler::taking(Duration::ZERO);
    let others = JobRunner::start(&second.house, "job", "default", quick.clone(), options)?;
    until(&second, "COMPLETED", 14).await?;
    same("what the first holds", &slow.notes().len(), &6)?;
    // Killed: its tasks end where they are, and their leases by themselves.
    drop(hands);
    until(&second, "COMPLETED", 20).await?;
    others.stop().await;
    let again: BTreeSet<String> =
        quick.notes().into_iter().filter(|(.., attempt)| *attempt == 2).map(|(_, job, _)| job).collect();
    same("what was done again", &again, &slow.notes().into_iter().map(|(_, job, _)| job).collect())
}
