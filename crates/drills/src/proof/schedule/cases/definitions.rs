//! Definitions: what makes jobs by itself.

use super::*;

pub(super) fn every(seconds: u64) -> Json {
    json!({"when": {"every_ms": seconds * 1_000}})
}

pub(super) async fn define(client: &TenantClient, definition: &str, input: Json) -> Result<Answer> {
    client.done("job_definition.create", &id(definition), input, None).await
}

/// The jobs of a definition that are stored: due times and states, in the order of their due times.
pub(super) async fn made(client: &TenantClient, definition: &str) -> Result<Vec<(Time, String)>> {
    let rows = all_rows(client, "jobs").await?;
    let mut jobs: Vec<(Time, String)> = rows
        .iter()
        .filter(|row| row.text("definition_id") == Some(definition))
        .filter_map(|row| Some((row.time("execution_time")?, row.text("state")?.to_owned())))
        .collect();
    jobs.sort();
    Ok(jobs)
}

pub(super) fn times(jobs: &[(Time, String)]) -> Vec<Time> {
    jobs.iter().map(|(time, _)| *time).collect()
}

pub(super) async fn a_definition_makes_its_jobs_ahead_of_their_time(
    namespace: &dyn TestNamespace,
) -> Result<()> {
    let (client, clock) = desk(namespace).await?;
    let start = clock.now();
    let mut input = every(60);
    input["payload"] = json!({"report": 1});
    input["attempts_max"] = json!(7);
    let created = define(&client, "report", input).await?;
    let first = start.plus(SECOND * 60);
    shows(&created, &json!({"status": "ACTIVE", "next_time": first.to_string(), "made": 0, "revision": 1}))?;
    // Ten seconds ahead, not earlier.
    clock.advance(SECOND * 50 - Duration::from_micros(1));
    same("too early", &client.drain_workers().await?, &0)?;
    clock.advance(Duration::from_micros(1));
    same("ahead of its time", &client.drain_workers().await?, &1)?;
    claims_nothing(&client).await?;
    clock.advance(SECOND * 10);
    let job = format!("report@{first}.1");
    same("the job", &claim(&client, 5, 1).await?, &vec![(job.clone(), 1)])?;
    let expected = json!({"payload": {"report": 1}, "attempts_max": 7, "definition_id": "report", "execution_time": first.to_string()});
    client.shows("job", &id(&job), &expected).await?;
    complete(&client, &job, 1).await?;
    // Late by half a step, the next one is not: it does not drift.
    clock.advance(SECOND * 90);
    same("the next", &client.drain_workers().await?, &1)?;
    let second = start.plus(SECOND * 120);
    same("when", &times(&made(&client, "report").await?), &vec![first, second])?;
    let run = client.done("job_definition.run", &id("report"), json!({}), None).await?;
    shows(&run, &json!({"state": "PENDING", "definition_id": "report", "payload": {"report": 1}}))?;
    for _ in 0..LOOKS_MAX {
        let history = client.done("job_definition.history", &id("report"), json!({}), None).await?;
        if history.body.as_array().is_some_and(|jobs| jobs.len() == 3) {
            same("newest first", &history.body[2]["job_id"], &json!(job))?;
            same("how many can be claimed", &claim(&client, 5, 2).await?.len(), &2)?;
            return Ok(());
        }
        pause().await;
    }
    bail!("the history never had three jobs")
}

pub(super) async fn each_due_time_makes_one_job_however_many_look(
    namespace: &dyn TestNamespace,
) -> Result<()> {
    let (client, clock) = desk(namespace).await?;
    let start = clock.now();
    let tenants = ["acme", "bond"];
    for tenant in tenants {
        for definition in 0..5 {
            let mut input = every(60);
            input["missed"] = json!("all");
            define(&client.for_tenant(tenant)?, &format!("d{definition}"), input).await?;
        }
    }
    // Three due times have passed when several makers begin at once, each on every shard.
    clock.advance(SECOND * 200);
    let makers: Vec<_> = (0..4)
        .map(|_| {
            let client = client.clone();
            tokio::spawn(async move { client.drain_workers().await })
        })
        .collect();
    for maker in makers {
        maker.await??;
    }
    client.drain_workers().await?;
    for tenant in tenants {
        for definition in 0..5 {
            let jobs = made(&client.for_tenant(tenant)?, &format!("d{definition}")).await?;
            let expected: Vec<Time> = (1..=3).map(|step| start.plus(SECOND * 60 * step)).collect();
            same("the due times", &times(&jobs), &expected)?;
        }
    }
    let records = whole_log(client.house.store().as_ref()).await?;
    let events = records.iter().flat_map(|record| &record.events);
    same("what the log says", &events.filter(|event| event.name == "job_definition.made").count(), &30)
}

pub(super) async fn missed_due_times_make_one_job_or_all(namespace: &dyn TestNamespace) -> Result<()> {
    let (client, clock) = desk(namespace).await?;
    let start = clock.now();
    for missed in ["once", "all"] {
        let mut input = every(60);
        input["missed"] = json!(missed);
        define(&client, missed, input).await?;
        let cron = json!({"when": {"cron": "* * * * *"}, "missed": missed});
        define(&client, &format!("cron-{missed}"), cron).await?;
    }
    // No worker ran for five and a half minutes.
    clock.advance(SECOND * 330);
    client.drain_workers().await?;
    let at = |minute: u32| start.plus(SECOND * 60 * minute);
    for (definition, expected) in [("once", vec![at(1)]), ("all", (1..=5).map(at).collect())] {
        for definition in [definition.to_owned(), format!("cron-{definition}")] {
            same(&definition, &times(&made(&client, &definition).await?), &expected)?;
            client
                .shows("job_definition", &id(&definition), &json!({"next_time": at(6).to_string()}))
                .await?;
        }
    }
    Ok(())
}

pub(super) async fn a_definition_for_once_ends(namespace: &dyn TestNamespace) -> Result<()> {
    let (client, clock) = desk(namespace).await?;
    let at = clock.now().plus(SECOND * 60);
    define(&client, "once", json!({"when": {"at": at.to_string()}, "queue": "mail"})).await?;
    clock.advance(SECOND * 60);
    same("made", &client.drain_workers().await?, &1)?;
    clock.advance(SECOND * 600);
    same("once", &client.drain_workers().await?, &0)?;
    same("when", &times(&made(&client, "once").await?), &vec![at])?;
    let expected = json!({"status": "ENDED", "next_time": null, "due_at": null, "made": 1});
    client.shows("job_definition", &id("once"), &expected).await?;
    client.refused("job_definition.pause", &id("once"), json!({}), None, Code::WrongState).await?;
    client.refused("job_definition.resume", &id("once"), json!({}), None, Code::WrongState).await?;
    for input in [
        json!({"when": {}}),
        json!({"when": {"cron": "* * * * *", "every_ms": 1_000}}),
        json!({"when": {"cron": "61 * * * *"}}),
        json!({"when": {"cron": "* * * * *", "zone": "Mars/Base"}}),
        json!({"when": {"every_ms": 1}}),
        json!({"when": {"cron": "0 0 30 2 *"}}),
        json!({"when": {"every_ms": 1_000}, "priority": 3}),
        json!({"when": {"every_ms": 1_000}, "overlap": "mix"}),
    ] {
        client.refused("job_definition.create", &id("bad"), input, None, Code::InvalidInput).await?;
    }
    client.refused("job_definition.read", &id("bad"), json!({}), None, Code::NotFound).await.map(drop)
}

pub(super) async fn cron_means_the_wall_clock_of_its_zone(namespace: &dyn TestNamespace) -> Result<()> {
    let (client, clock) = desk(namespace).await?;
    // Half past two in Berlin, over the night in which there is none: nothing is lost, and nothing comes twice.
    clock.set("2026-03-27T12:00:00Z".parse()?);
    let cron = json!({"when": {"cron": "30 2 * * *", "zone": "Europe/Berlin"}, "missed": "all"});
    define(&client, "night", cron).await?;
    clock.advance(SECOND * 3_600 * 24 * 3);
    client.drain_workers().await?;
    let expected = ["2026-03-28T01:30:00Z", "2026-03-29T01:00:00Z", "2026-03-30T00:30:00Z"];
    let expected = expected.iter().map(|time| Ok(time.parse()?)).collect::<Result<Vec<Time>>>()?;
    same("the due times", &times(&made(&client, "night").await?), &expected)
}

pub(super) async fn a_paused_definition_takes_back_what_waits(namespace: &dyn TestNamespace) -> Result<()> {
    let (client, clock) = desk(namespace).await?;
    let start = clock.now();
    for (definition, overlap) in [("free", "allow"), ("line", "queue")] {
        let mut input = every(60);
        input["overlap"] = json!(overlap);
        define(&client, definition, input).await?;
    }
    clock.advance(SECOND * 55);
    same("made", &client.drain_workers().await?, &2)?;
    let first = start.plus(SECOND * 60);
    for definition in ["free", "line"] {
        let paused = client.done("job_definition.pause", &id(definition), json!({}), None).await?;
        shows(&paused, &json!({"status": "PAUSED", "next_time": null, "due_at": null}))?;
        same("what waited", &made(&client, definition).await?, &vec![(first, "CANCELLED".to_owned())])?;
        client.refused("job_definition.pause", &id(definition), json!({}), None, Code::WrongState).await?;
    }
    no_job_is_left_in_line(&client, "job").await?;
    clock.advance(SECOND * 300);
    same("while it is paused", &client.drain_workers().await?, &0)?;
    claims_nothing(&client).await?;
    let resumed = clock.now();
    for definition in ["free", "line"] {
        client.done("job_definition.resume", &id(definition), json!({}), None).await?;
        client.refused("job_definition.resume", &id(definition), json!({}), None, Code::WrongState).await?;
    }
    clock.advance(SECOND * 60);
    same("made again", &client.drain_workers().await?, &2)?;
    for definition in ["free", "line"] {
        let jobs = made(&client, definition).await?;
        same("from then on", &times(&jobs), &vec![first, resumed.plus(SECOND * 60)])?;
    }
    // What is due already is not taken back.
    for definition in ["free", "line"] {
        client.done("job_definition.pause", &id(definition), json!({}), None).await?;
    }
    claim(&client, 5, 2).await.map(drop)
}

pub(super) async fn a_definition_is_defined_anew_and_deleted(namespace: &dyn TestNamespace) -> Result<()> {
    let (client, clock) = desk(namespace).await?;
    let start = clock.now();
    client.refused("job_definition.delete", &id("d"), json!({}), None, Code::NotFound).await?;
    client.refused("job_definition.create", &id("d"), every(60), Some(1), Code::NotFound).await?;
    define(&client, "d", every(60)).await?;
    client.refused("job_definition.create", &id("d"), every(30), Some(7), Code::VersionConflict).await?;
    clock.advance(SECOND * 55);
    client.drain_workers().await?;
    // The same due time again, under the new definition: the one that waited is taken back.
    let at = start.plus(SECOND * 60);
    let anew = define(&client, "d", json!({"when": {"at": at.to_string()}})).await?;
    shows(&anew, &json!({"status": "ACTIVE", "every_ms": null, "revision": 2}))?;
    client.drain_workers().await?;
    let states: Vec<String> = made(&client, "d").await?.into_iter().map(|(_, state)| state).collect();
    same("one of them is live", &states, &vec!["CANCELLED".to_owned(), "PENDING".to_owned()])?;
    client.done("job_definition.delete", &id("d"), json!({}), None).await?;
    for action in ["read", "pause", "resume", "delete", "run"] {
        let action = format!("job_definition.{action}");
        client.refused(&action, &id("d"), json!({}), None, Code::NotFound).await?;
    }
    clock.advance(SECOND * 600);
    same("after its end", &client.drain_workers().await?, &0)?;
    claims_nothing(&client).await?;
    let back = define(&client, "d", every(60)).await?;
    shows(&back, &json!({"status": "ACTIVE", "revision": 4}))
}

pub(super) async fn what_overlaps_is_skipped_or_stands_in_line(namespace: &dyn TestNamespace) -> Result<()> {
    let (client, clock) = desk(namespace).await?;
    let start = clock.now();
    for overlap in ["allow", "skip", "queue"] {
        let mut input = every(60);
        input["overlap"] = json!(overlap);
        input["missed"] = json!("all");
        define(&client, overlap, input).await?;
    }
    clock.advance(SECOND * 60);
    client.drain_workers().await?;
    let lease = json!({"limit": 9, "lease_ms": 3_600_000});
    let mut claimed = Vec::new();
    for _ in 0..LOOKS_MAX {
        claimed.extend(claim_once(&client, lease.clone()).await?);
        if claimed.len() >= 3 {
            break;
        }
        pause().await;
    }
    same("the first of each", &claimed.len(), &3)?;
    // The second is due while the first runs.
    clock.advance(SECOND * 60);
    client.drain_workers().await?;
    let at = |step: u32| start.plus(SECOND * 60 * step);
    same("skip", &times(&made(&client, "skip").await?), &vec![at(1)])?;
    client.shows("job_definition", &id("skip"), &json!({"made": 1, "skipped": 1})).await?;
    for overlap in ["allow", "queue"] {
        same(overlap, &times(&made(&client, overlap).await?), &vec![at(1), at(2)])?;
    }
    let second = claim(&client, 9, 1).await?;
    ensure!(second[0].0.starts_with("allow@"), "only what may overlap can be claimed, got {second:?}");
    complete(&client, &second[0].0, 1).await?;
    for (job, attempt) in &claimed {
        complete(&client, job, *attempt).await?;
    }
    let next = claim(&client, 9, 1).await?;
    same("what stood in line", &next, &vec![(format!("queue@{}.1", at(2)), 1)])?;
    complete(&client, &next[0].0, 1).await?;
    clock.advance(SECOND * 60);
    client.drain_workers().await?;
    same("skip, when the one before is over", &times(&made(&client, "skip").await?), &vec![at(1), at(3)])
}

pub(super) async fn a_maker_whose_clock_is_ahead_makes_nothing_early(
    namespace: &dyn TestNamespace,
) -> Result<()> {
    let engine = standing();
    let skewed = SkewedClock::over(Arc::new(engine.clone()));
    let store = namespace.open_at(Arc::new(engine.clone())).await?;
    let client = TenantClient::over(store, BLUEPRINT, Arc::new(skewed.clone())).await?;
    define(&client, "d", every(60)).await?;
    skewed.skew(600_000_000);
    same("ten minutes ahead", &client.drain_workers().await?, &0)?;
    skewed.skew(-600_000_000);
    engine.advance(SECOND * 60);
    same("ten minutes behind", &client.drain_workers().await?, &0)?;
    skewed.skew(0);
    same("right", &client.drain_workers().await?, &1)?;
    // Ahead of the engine, it passes over nothing that is still to come.
    let start = engine.now();
    define(&client, "steps", json!({"when": {"every_ms": 60_000}, "overlap": "allow"})).await?;
    define(&client, "pattern", json!({"when": {"cron": "* * * * *"}, "overlap": "allow"})).await?;
    for minute in 1..=3 {
        skewed.skew(600_000_000);
        engine.set(start.plus(SECOND * 60 * minute));
        client.drain_workers().await?;
        skewed.skew(0);
    }
    let steps: Vec<Time> = (1..=3).map(|minute| start.plus(SECOND * 60 * minute)).collect();
    for definition in ["steps", "pattern"] {
        let made = times(&made(&client, definition).await?);
        ensure!(made.starts_with(&steps), "{definition} made its jobs for {made:?}, not for {steps:?}");
    }
    Ok(())
}

pub(super) async fn steps_are_counted_by_the_engines_clock(namespace: &dyn TestNamespace) -> Result<()> {
    let engine = standing();
    let skewed = SkewedClock::over(Arc::new(engine.clone()));
    let store = namespace.open_at(Arc::new(engine.clone())).await?;
    let client = TenantClient::over(store, BLUEPRINT, Arc::new(skewed.clone())).await?;
    let first = engine.now().plus(SECOND * 60).to_string();
    for (definition, skew) in [("ahead", 600_000_000), ("behind", -600_000_000)] {
        skewed.skew(skew);
        let defined = define(&client, definition, json!({"when": {"every_ms": 60_000}})).await?;
        shows(&defined, &json!({"next_time": first}))?;
        client.done("job_definition.pause", &id(definition), json!({}), None).await?;
        let resumed = client.done("job_definition.resume", &id(definition), json!({}), None).await?;
        shows(&resumed, &json!({"next_time": first}))?;
    }
    Ok(())
}

pub(super) async fn a_maker_that_loses_answers_makes_nothing_twice(
    namespace: &dyn TestNamespace,
) -> Result<()> {
    let clock = standing();
    let sound = namespace.open_at(Arc::new(clock.clone())).await?;
    let faulty = Arc::new(FaultyStore::over(sound.clone(), Arc::new(SystemClock), Odds::default(), 5));
    let client = TenantClient::over(faulty.clone(), BLUEPRINT, Arc::new(clock.clone())).await?;
    let start = clock.now();
    for (number, overlap) in ["allow", "skip", "queue", "allow", "queue", "allow"].into_iter().enumerate() {
        let mut input = every(60);
        input["missed"] = json!("all");
        input["overlap"] = json!(overlap);
        define(&client, &format!("d{number}"), input).await?;
    }
    clock.advance(SECOND * 200);
    faulty.set_odds(Odds { unknown_before: 0.3, unknown_after: 0.3, unavailable: 0.1, ..Odds::default() });
    for _ in 0..20 {
        // Whatever comes of it: the process may die here as well.
        let _ = client.work(5).await;
    }
    let achieved = faulty.achieved();
    ensure!(achieved.unknown_after > 0 && achieved.unknown_before > 0, "{achieved}");
    faulty.set_odds(Odds::default());
    client.drain_workers().await?;
    for number in 0..6 {
        let steps = if number == 1 { 1 } else { 3 };
        let expected: Vec<Time> = (1..=steps).map(|step| start.plus(SECOND * 60 * step)).collect();
        same("the due times", &times(&made(&client, &format!("d{number}")).await?), &expected)?;
    }
    Ok(())
}

pub(super) async fn a_paused_definition_and_its_maker_contend_on_one_row(
    namespace: &dyn TestNamespace,
) -> Result<()> {
    let client = TenantClient::open(namespace, BLUEPRINT).await?;
    let soon = |client: &TenantClient| client.house.clock().now().plus(SECOND * 5).to_string();
    for number in 0..8 {
        define(&client, &format!("d{number}"), json!({"when": {"at": soon(&client)}})).await?;
    }
    // What is made within these five seconds is ahead of its time, so a pause takes it back.
    let maker = tokio::spawn({
        let client = client.clone();
        async move { client.drain_workers().await }
    });
    let mut paused = Vec::new();
    for number in (0..8).rev() {
        let definition = format!("d{number}");
        match client.call("job_definition.pause", &id(&definition), json!({}), None).await {
            Ok(_) => paused.push(definition),
            Err(refusal) => ensure!(refusal.code == Code::WrongState, "{refusal}"),
        }
    }
    maker.await??;
    client.drain_workers().await?;
    for number in 0..8 {
        let definition = format!("d{number}");
        let jobs = made(&client, &definition).await?;
        let live = jobs.iter().filter(|(_, state)| state == "PENDING").count();
        same(&format!("{definition}, {jobs:?}"), &live, &usize::from(!paused.contains(&definition)))?;
    }
    Ok(())
}

pub(super) async fn definitions_are_made_by_the_workers_of_any_process(
    namespace: &dyn TestNamespace,
) -> Result<()> {
    let store = namespace.open().await?;
    let open = async || TenantClient::over(store.clone(), BLUEPRINT, Arc::new(SystemClock)).await;
    let (first, second) = (open().await?, open().await?);
    let options = || WorkerOptions {
        lease: Duration::from_millis(1_500),
        idle_max: Duration::from_millis(100),
        random: Random::seeded(1),
        ..WorkerOptions::default()
    };
    for client in [&first, &second] {
        client.house.start_workers(options());
    }
    let due = |client: &TenantClient| json!({"when": {"at": client.house.clock().now().to_string()}});
    for number in 0..4 {
        define(&first, &format!("a{number}"), due(&first)).await?;
    }
    let done = async |expected: usize| -> Result<()> {
        let mut found = Vec::new();
        for _ in 0..2_000 {
            found = all_rows(&second, "jobs").await?;
            if found.len() >= expected {
                break;
            }
            pause().await;
        }
        same("how many were made", &found.len(), &expected)
    };
    done(4).await?;
    // One process is killed with its leases in its hands; what is due then is the other's.
    drop(first);
    for number in 0..4 {
        define(&second, &format!("b{number}"), due(&second)).await?;
    }
    done(8).await?;
    second.house.stop_workers().await;
    Ok(())
}
