//! Jobs of one order key: lanes, lines and numbers.

use super::*;

pub(super) async fn jobs_of_one_key_run_in_their_order(namespace: &dyn TestNamespace) -> Result<()> {
    let (client, clock) = desk(namespace).await?;
    for number in 0..5 {
        // Not by their ids, and not by their priorities: by the order in which they came.
        let (job, priority) = (format!("k{}", 9 - number), number % 3);
        enqueue(&client, &job, json!({"order_key": "k", "priority": priority})).await?;
    }
    enqueue(&client, "free", json!({"order_key": "other"})).await?;
    let mut both = claim(&client, 9, 2).await?;
    both.sort();
    same("the first of each key", &both, &vec![("free".to_owned(), 1), ("k9".to_owned(), 1)])?;
    complete(&client, "free", 1).await?;
    // One that rests is still the first of its key.
    client.done("job.fail", &id("k9"), json!({"attempt": 1}), None).await?;
    claims_nothing(&client).await?;
    clock.advance(SECOND * 10);
    same("again", &claim(&client, 9, 1).await?, &vec![("k9".to_owned(), 2)])?;
    complete(&client, "k9", 2).await?;
    same("the second", &claim(&client, 9, 1).await?, &vec![("k8".to_owned(), 1)])?;
    // One whose worker died is, too; one that failed for good is not.
    clock.advance(SECOND * 30);
    same("the second again", &claim(&client, 9, 1).await?, &vec![("k8".to_owned(), 2)])?;
    client.done("job.fail", &id("k8"), json!({"attempt": 2, "final": true}), None).await?;
    same("the third", &claim(&client, 9, 1).await?, &vec![("k7".to_owned(), 1)])?;
    client.done("job.cancel", &id("k7"), json!({}), None).await?;
    same("the fourth", &claim(&client, 9, 1).await?, &vec![("k6".to_owned(), 1)])?;
    // Brought back to life, it stands at the end.
    client.done("job.replay", &id("k8"), json!({}), None).await?;
    for job in ["k6", "k5"] {
        complete(&client, job, 1).await?;
        let next = claim(&client, 9, 1).await?;
        same("the next", &next[0].0.as_str(), &if job == "k6" { "k5" } else { "k8" })?;
    }
    complete(&client, "k8", 3).await?;
    claims_nothing(&client).await?;
    no_job_is_left_in_line(&client, "job").await
}

/// Lanes and lines are gone when all their jobs are over.
pub(super) async fn no_job_is_left_in_line(client: &TenantClient, name: &str) -> Result<()> {
    for table in ["lanes", "lines"] {
        let rows = all_rows(client, &format!("{name}_{table}")).await?;
        ensure!(rows.is_empty(), "{table} are left: {rows:?}");
    }
    invariants::check(&client.scope(name)).await
}

pub(super) async fn of_one_key_so_many_run_at_once(namespace: &dyn TestNamespace) -> Result<()> {
    let (client, _) = desk(namespace).await?;
    for number in 0..5 {
        let input = json!({"job_id": format!("t{number}"), "order_key": "k"});
        client.done("task.enqueue", &[], input, None).await?;
    }
    let names = |jobs: Vec<(String, i64)>| jobs.into_iter().map(|(job, _)| job).collect::<BTreeSet<_>>();
    let set = |jobs: &[&str]| jobs.iter().map(|job| (*job).to_owned()).collect::<BTreeSet<_>>();
    same("two of them", &names(claim_until(&client, "task", 9, 2).await?), &set(&["t0", "t1"]))?;
    let complete =
        async |job: &str| client.done("task.complete", &id(job), json!({"attempt": 1}), None).await;
    complete("t1").await?;
    same("the third", &names(claim_until(&client, "task", 9, 1).await?), &set(&["t2"]))?;
    complete("t0").await?;
    complete("t2").await?;
    same("the rest", &names(claim_until(&client, "task", 9, 2).await?), &set(&["t3", "t4"]))?;
    complete("t3").await?;
    // There is room again, for one.
    for job in ["t5", "t6"] {
        client.done("task.enqueue", &[], json!({"job_id": job, "order_key": "k"}), None).await?;
    }
    same("room for one", &names(claim_until(&client, "task", 9, 1).await?), &set(&["t5"]))?;
    for job in ["t4", "t5"] {
        complete(job).await?;
    }
    claim_until(&client, "task", 9, 1).await?;
    complete("t6").await?;
    no_job_is_left_in_line(&client, "task").await
}

pub(super) async fn a_job_in_line_can_be_cancelled(namespace: &dyn TestNamespace) -> Result<()> {
    let (client, _) = desk(namespace).await?;
    for job in ["a", "b", "c"] {
        enqueue(&client, job, json!({"order_key": "k"})).await?;
    }
    client.shows("job", &id("b"), &json!({"state": "PENDING", "run_at": null})).await?;
    client.done("job.cancel", &id("b"), json!({}), None).await?;
    for job in ["a", "c"] {
        same("the next", &claim(&client, 9, 1).await?, &vec![(job.to_owned(), 1)])?;
        complete(&client, job, 1).await?;
    }
    no_job_is_left_in_line(&client, "job").await
}

pub(super) async fn a_refused_job_leaves_no_lane_behind(namespace: &dyn TestNamespace) -> Result<()> {
    let (client, _) = desk(namespace).await?;
    enqueue(&client, "a", json!({})).await?;
    let again = json!({"job_id": "a", "order_key": "k"});
    client.refused("job.enqueue", &[], again, None, Code::AlreadyExists).await?;
    same("lanes after a refusal", &all_rows(&client, "job_lanes").await?.len(), &0)?;
    // In a lane that is there it leaves a gap, and no job waits for it.
    enqueue(&client, "b", json!({"order_key": "k"})).await?;
    let again = json!({"job_id": "a", "order_key": "k"});
    client.refused("job.enqueue", &[], again, None, Code::AlreadyExists).await?;
    enqueue(&client, "c", json!({"order_key": "k"})).await?;
    let claimed = claim(&client, 9, 2).await?;
    let names: BTreeSet<&str> = claimed.iter().map(|(job, _)| job.as_str()).collect();
    same("those that are admitted", &names, &BTreeSet::from(["a", "b"]))?;
    complete(&client, "b", 1).await?;
    same("the next in line", &claim(&client, 9, 1).await?, &vec![("c".to_owned(), 1)])?;
    complete(&client, "c", 1).await?;
    no_job_is_left_in_line(&client, "job").await
}

/// Lets something happen behind the next commit, before its caller goes on.
#[derive(Default)]
pub(super) struct AfterCommit(Mutex<Option<Pin<Box<dyn Future<Output = ()> + Send>>>>);

impl fmt::Debug for AfterCommit {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Behind")
    }
}

#[async_trait]
impl Interceptor for Arc<AfterCommit> {
    async fn commit(&self, inner: &Arc<dyn Store>, plan: &Plan) -> Result<Commit, StoreError> {
        let outcome = inner.commit(plan).await;
        let event = self.0.lock().unwrap_or_else(PoisonError::into_inner).take();
        if let Some(event) = event {
            event.await;
        }
        outcome
    }
}

pub(super) async fn a_number_of_a_lane_that_is_gone_is_not_used(namespace: &dyn TestNamespace) -> Result<()> {
    let clock = standing();
    let store = namespace.open_at(Arc::new(clock.clone())).await?;
    let client = Arc::new(TenantClient::over(store.clone(), BLUEPRINT, Arc::new(clock.clone())).await?);
    let behind = Arc::new(AfterCommit::default());
    let slow = Arc::new(StoreProxy::new(store, behind.clone()));
    let slow = TenantClient::over(slow, BLUEPRINT, Arc::new(clock.clone())).await?;
    let key = || json!({"order_key": "k"});
    enqueue(&client, "a", key()).await?;
    same("the first", &claim(&client, 9, 1).await?, &vec![("a".to_owned(), 1)])?;
    for job in ["x", "y", "z"] {
        enqueue(&client, job, key()).await?;
        client.done("job.cancel", &id(job), json!({}), None).await?;
    }
    // It has its number, and before it stands in line the lane ends and another one begins.
    let others = client.clone();
    let event = async move {
        // If one of these fails, the order below is another.
        let _ = complete(&others, "a", 1).await;
        let _ = enqueue(&others, "c", json!({"order_key": "k"})).await;
    };
    *behind.0.lock().unwrap_or_else(PoisonError::into_inner) = Some(Box::pin(event));
    enqueue(&slow, "b", key()).await?;
    enqueue(&client, "d", key()).await?;
    for job in ["c", "b", "d"] {
        same("the next", &claim(&client, 9, 1).await?, &vec![(job.to_owned(), 1)])?;
        complete(&client, job, 1).await?;
    }
    no_job_is_left_in_line(&client, "job").await
}

/// What happens in a lane while a worker is paused that is about to leave it.
#[derive(Clone, Copy, Debug)]
pub(super) enum ConcurrentChange {
    /// Another job comes.
    Comes,
    /// Another job ends.
    Ends,
}

pub(super) async fn a_lane_that_changes_meanwhile_is_looked_at_again(
    namespace: &dyn TestNamespace,
) -> Result<()> {
    let clock = Arc::new(DrillClock::new());
    let store = namespace.open_at(clock.clone()).await?;
    let paused = Arc::new(Paused::default());
    let slow = Arc::new(StoreProxy::new(store.clone(), paused.clone()));
    let client = TenantClient::over(store, BLUEPRINT, clock.clone()).await?;
    let slow = TenantClient::over(slow, BLUEPRINT, clock).await?;
    // A worker that completes a job does not read at first, and so leaves the lane with its second plan.
    for (action, plan, input) in [
        ("complete", 2, json!({"attempt": 1})),
        ("fail", 1, json!({"attempt": 1, "error": "no", "final": true})),
        ("cancel", 1, json!({})),
    ] {
        // Of a job one runs at a time, of a task two. So many are admitted before.
        for (number, (resource, before, meantime)) in [
            ("job", 1, ConcurrentChange::Comes),
            ("task", 1, ConcurrentChange::Comes),
            ("task", 2, ConcurrentChange::Comes),
            ("task", 2, ConcurrentChange::Ends),
        ]
        .into_iter()
        .enumerate()
        {
            let tenant = format!("{action}{number}");
            let (client, slow) = (client.for_tenant(&tenant)?, slow.for_tenant(&tenant)?);
            let comes = async |client: &TenantClient, job: &str| {
                let input = json!({"job_id": job, "order_key": "k"});
                client.done(&format!("{resource}.enqueue"), &[], input, None).await
            };
            let ends = async |client: &TenantClient, job: &str| {
                client.done(&format!("{resource}.complete"), &id(job), json!({"attempt": 1}), None).await
            };
            for job in 0..before {
                comes(&client, &format!("x{job}")).await?;
            }
            claim_until(&client, resource, 9, before).await?;
            let other = client.clone();
            let (action_of, job) = match meantime {
                ConcurrentChange::Comes => {
                    (format!("{resource}.enqueue"), json!({"job_id": "z", "order_key": "k"}))
                }
                ConcurrentChange::Ends => (format!("{resource}.complete"), json!({"attempt": 1})),
            };
            paused.before(&format!("{resource}s"), plan, async move {
                let key = id("x1");
                let key = if matches!(meantime, ConcurrentChange::Ends) { &key[..] } else { &[] };
                // If this fails, there is no job to be claimed afterwards, or one is left.
                drop(other.done(&action_of, key, job, None).await);
            });
            slow.done(&format!("{resource}.{action}"), &id("x0"), input.clone(), None).await?;
            // No job is left behind in the wait list, and no room is lost.
            if matches!(meantime, ConcurrentChange::Comes) {
                claim_until(&client, resource, 9, 1).await?;
                if before == 2 {
                    ends(&client, "x1").await?;
                }
                ends(&client, "z").await?;
            }
            no_job_is_left_in_line(&client, resource).await.with_context(|| tenant)?;
        }
    }
    Ok(())
}

pub(super) async fn a_waiting_job_is_not_overtaken(namespace: &dyn TestNamespace) -> Result<()> {
    let store = namespace.open().await?;
    let clock = Arc::new(SystemClock);
    let before = TenantClient::over(store.clone(), BLUEPRINT, clock.clone()).await?;
    let wider = BLUEPRINT.replace("per_key = 2", "per_key = 3");
    let wider = TenantClient::over(store, &wider, clock).await?;
    let input = |job: &str, key: &str| json!({"job_id": job, "order_key": key});
    for job in ["t0", "t1", "t2"] {
        before.done("task.enqueue", &[], input(job, "k"), None).await?;
    }
    // The blueprint has become wider: there would be room, but a job waits for it.
    wider.done("task.enqueue", &[], input("t3", "k"), None).await?;
    wider.shows("task", &id("t3"), &json!({"state": "PENDING", "run_at": null})).await?;
    // A caller saw room and an empty wait list, and then another job stood there.
    for job in ["u0", "u1"] {
        before.done("task.enqueue", &[], input(job, "l"), None).await?;
    }
    let late = wider.drafted("task.enqueue", &[], input("u3", "l"), None).await?;
    before.done("task.enqueue", &[], input("u2", "l"), None).await?;
    wider.too_late(&late).await
}
