//! I03 Due-time release: each due time of each timer once, not early, whatever happens in between.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use serde_json::{Value as Json, json};
use statehouse::worker::WorkerOptions;
use statehouse::{Code, Expected};
use statehouse_store::clock::SkewedClock;
use statehouse_store::faulty::{FaultyStore, Odds};
use statehouse_store::{Clock, ManualClock, Random, Record, Step, Store, SystemClock, Time, Value};

use super::{cases as timer, invariants};
use crate::conformance::{Case, cases};
use crate::harness::case_check::skip_invariants;
use crate::harness::engines::TestNamespace;
use crate::harness::proxy::{Meanwhile, Paused, StoreProxy};
use crate::harness::store_client::{pause, same, whole_log};
use crate::harness::tenant_client::{TenantClient, shows};

pub(crate) const CASES: &[Case] = cases! {
    timer {
        a_timer_lives_its_life(3),
        a_timer_fires_once_and_not_early(3),
        recurring_timers_do_not_drift(3),
        missed_times_are_released_one_by_one_or_as_one(3),
        each_due_time_is_released_once_however_many_scan(3),
        cancelling_and_firing_contend_on_one_row(3),
        a_scanner_whose_clock_is_ahead_fires_nothing_early(3),
        a_clock_that_steps_releases_nothing_twice(3),
        lost_answers_release_nothing_twice(3),
        what_cannot_be_released_does_not_hold_up_the_rest(3),
        a_write_wakes_the_scanner_of_its_process(3),
        processes_share_the_timers_and_survive_each_other(3),
        a_timer_that_is_gone_does_not_come_back(4),
        a_timer_that_is_changed_meanwhile_does_not_fire_as_it_was(3),
    }
};

pub(crate) const BLUEPRINT: &str = r#"
[house]
name = "drill"

[timer.reminder]
key    = { id = "int" }
shards = 3

[timer.tick]
key    = { id = "int" }
shards = 2
missed = "all"
"#;

fn standing() -> ManualClock {
    ManualClock::at(Time::from_millis(1_800_000_000_000))
}

fn key(id: i64) -> [Value; 1] {
    [id.into()]
}

/// A client, and what was released where it lives.
struct TimerFixture {
    client: TenantClient,
}

impl TimerFixture {
    async fn open(namespace: &dyn TestNamespace, clock: &ManualClock) -> Result<TimerFixture> {
        let clock: Arc<dyn Clock> = Arc::new(clock.clone());
        TimerFixture::over(namespace.open_at(clock.clone()).await?, clock).await
    }

    /// The store may stand on another clock than the house.
    async fn over(store: Arc<dyn Store>, clock: Arc<dyn Clock>) -> Result<TimerFixture> {
        Ok(TimerFixture { client: TenantClient::over(store, BLUEPRINT, clock).await? })
    }

    async fn set(&self, resource: &str, id: i64, input: Json) -> Result<()> {
        self.client.done(&format!("{resource}.set"), &key(id), input, None).await.map(drop)
    }

    /// What was released: by tenant and key, the due times in the order of their records.
    async fn released(&self, resource: &str) -> Result<BTreeMap<String, Vec<String>>> {
        invariants::check(&self.client.scope(resource)).await?;
        released(self.client.house.store().as_ref(), resource).await
    }
}

async fn released(store: &dyn Store, resource: &str) -> Result<BTreeMap<String, Vec<String>>> {
    let mut times: BTreeMap<String, Vec<String>> = BTreeMap::new();
    let fired = format!("{resource}.fired");
    let is_fired = |record: &Record| record.events.iter().any(|event| event.name == fired);
    for record in whole_log(store).await?.into_iter().filter(is_fired) {
        let due =
            record.events[0].data["due_at"].as_str().context("a release without its due time")?.to_owned();
        times.entry(format!("{}/{}", record.tenant, record.key)).or_default().push(due);
    }
    Ok(times)
}

async fn a_timer_lives_its_life(namespace: &dyn TestNamespace) -> Result<()> {
    let clock = standing();
    let fixture = TimerFixture::open(namespace, &clock).await?;
    let client = &fixture.client;
    client.refused("reminder.read", &key(1), json!({}), None, Code::NotFound).await?;
    client.refused("reminder.cancel", &key(1), json!({}), None, Code::NotFound).await?;
    for input in [json!({}), json!({"payload": 1}), json!({"every_ms": 10})] {
        client.refused("reminder.set", &key(1), input, None, Code::InvalidInput).await?;
    }
    let both = json!({"due_at": "2030-01-01T00:00:00Z", "after_ms": 1_500});
    let later = client.done("reminder.set", &key(2), both, None).await?;
    shows(&later, &json!({"due_at": "2030-01-01T00:00:01.500000Z"}))?;
    client.done("reminder.cancel", &key(2), json!({}), None).await?;
    let input = json!({"after_ms": 5_000, "payload": {"to": ["ann", 1]}});
    let set = client.done("reminder.set", &key(1), input, None).await?;
    let due = clock.now().plus(Duration::from_secs(5)).to_string();
    shows(
        &set,
        &json!({"status": "SET", "due_at": due, "every_ms": null, "fired": 0, "payload": {"to": ["ann", 1]}, "version": 1}),
    )?;
    client.shows("reminder", &key(1), &json!({"status": "SET"})).await?;
    client.refused("reminder.cancel", &key(1), json!({}), Some(7), Code::VersionConflict).await?;
    let cancelled = client.done("reminder.cancel", &key(1), json!({}), Some(1)).await?;
    shows(&cancelled, &json!({"status": "CANCELLED", "due_at": null}))?;
    for version in [None, Some(2)] {
        client.refused("reminder.cancel", &key(1), json!({}), version, Code::WrongState).await?;
    }
    clock.advance(Duration::from_secs(60));
    same("a cancelled timer", &fixture.client.drain_workers().await?, &0)?;
    // Set anew, also under a version, and at a time instead of after one.
    let soon = clock.now().plus(Duration::from_secs(1)).to_string();
    client.refused("reminder.set", &key(1), json!({"due_at": soon}), Some(1), Code::VersionConflict).await?;
    client.refused("reminder.set", &key(9), json!({"due_at": soon}), Some(1), Code::NotFound).await?;
    let set = client.done("reminder.set", &key(1), json!({"due_at": soon}), Some(2)).await?;
    shows(&set, &json!({"status": "SET", "due_at": soon, "payload": null, "version": 3}))?;
    clock.advance(Duration::from_secs(1));
    same("what is due", &fixture.client.drain_workers().await?, &1)?;
    client.shows("reminder", &key(1), &json!({"status": "FIRED", "fired": 1, "last_due_at": soon})).await?;
    client.refused("reminder.cancel", &key(1), json!({}), None, Code::WrongState).await?;
    for (status, ids) in [("FIRED", vec![1]), ("CANCELLED", vec![2]), ("SET", vec![])] {
        for tries in 0.. {
            let list = client.done("reminder.list", &[], json!({"status": status}), None).await?;
            let found: Vec<i64> = list
                .body
                .as_array()
                .context("no list")?
                .iter()
                .filter_map(|row| row["id"].as_i64())
                .collect();
            if found == ids {
                break;
            }
            ensure!(tries < 1_000, "{status}: expected {ids:?}, got {found:?}");
            pause().await;
        }
    }
    Ok(())
}

async fn a_timer_fires_once_and_not_early(namespace: &dyn TestNamespace) -> Result<()> {
    let clock = standing();
    let fixture = TimerFixture::open(namespace, &clock).await?;
    let due = clock.now().plus(Duration::from_secs(10));
    fixture.set("reminder", 1, json!({"due_at": due.to_string(), "payload": "hello"})).await?;
    clock.advance(Duration::from_micros(9_999_999));
    same("a microsecond early", &fixture.client.drain_workers().await?, &0)?;
    clock.advance(Duration::from_micros(1));
    same("in time", &fixture.client.drain_workers().await?, &1)?;
    clock.advance(Duration::from_secs(3_600));
    same("later", &fixture.client.drain_workers().await?, &0)?;
    let records = fixture.client.store_client()?.exact_log(2).await?;
    let fired =
        records.iter().find(|record| record.events[0].name == "reminder.fired").context("no release")?;
    let data = &fired.events[0].data;
    same("the subject", &(fired.resource.as_str(), fired.key.as_str()), &("reminder", "1"))?;
    same("the event", &(&data["due_at"], &data["number"]), &(&json!(due.to_string()), &json!(1)))?;
    same("its row", &(&data["row"]["status"], &data["row"]["payload"]), &(&json!("FIRED"), &json!("hello")))
}

async fn recurring_timers_do_not_drift(namespace: &dyn TestNamespace) -> Result<()> {
    let clock = standing();
    let fixture = TimerFixture::open(namespace, &clock).await?;
    let start = clock.now();
    fixture.set("reminder", 1, json!({"after_ms": 500, "every_ms": 2_000})).await?;
    fixture.set("tick", 1, json!({"every_ms": 2_000})).await?;
    // Scanned late, a little later each time, and never by as much as a step.
    for late in [1, 400, 900, 1_300] {
        let until = start.plus(Duration::from_millis(2_000 + late));
        clock.advance(until.since(clock.now()));
        fixture.client.drain_workers().await?;
        clock.advance(Duration::from_millis(2_000 - late));
    }
    for (resource, first) in [("reminder", 500), ("tick", 2_000)] {
        let times = fixture.released(resource).await?;
        let times = times.get("acme/1").context("nothing was released")?;
        let expected: Vec<String> = (0..times.len() as u64)
            .map(|number| start.plus(Duration::from_millis(first + 2_000 * number)).to_string())
            .collect();
        ensure!(times.len() >= 2 && *times == expected, "{resource}: expected {expected:?}, got {times:?}");
    }
    Ok(())
}

async fn missed_times_are_released_one_by_one_or_as_one(namespace: &dyn TestNamespace) -> Result<()> {
    let clock = standing();
    let fixture = TimerFixture::open(namespace, &clock).await?;
    for resource in ["reminder", "tick"] {
        fixture.set(resource, 1, json!({"every_ms": 1_000})).await?;
    }
    let start = clock.now();
    clock.advance(Duration::from_millis(5_300));
    fixture.client.drain_workers().await?;
    let at = |seconds: u64| start.plus(Duration::from_secs(seconds)).to_string();
    let released =
        async |resource: &str| Ok::<_, anyhow::Error>(fixture.released(resource).await?.remove("acme/1"));
    same("as one", &released("reminder").await?, &Some(vec![at(1)]))?;
    same("one by one", &released("tick").await?, &Some((1..=5).map(at).collect()))?;
    for resource in ["reminder", "tick"] {
        fixture.client.shows(resource, &key(1), &json!({"status": "SET", "due_at": at(6)})).await?;
    }
    let records = fixture.client.store_client()?.log(8).await?;
    let told =
        records.iter().find(|record| record.events[0].name == "reminder.fired").context("no release")?;
    same("how many were passed over", &told.events[0].data["missed"], &json!(4))
}

async fn each_due_time_is_released_once_however_many_scan(namespace: &dyn TestNamespace) -> Result<()> {
    let clock = standing();
    let fixture = Arc::new(TimerFixture::open(namespace, &clock).await?);
    let (tenants, timers) = (["acme", "bond", "core"], 8);
    for tenant in tenants {
        let client = fixture.client.for_tenant(tenant)?;
        for id in 0..timers {
            client.done("reminder.set", &key(id), json!({"after_ms": 1_000}), None).await?;
            client.done("tick.set", &key(id), json!({"every_ms": 1_000}), None).await?;
        }
    }
    // Three due times have passed when several scanners begin at once, each on every shard.
    clock.advance(Duration::from_millis(3_500));
    let scanners: Vec<_> = (0..4)
        .map(|_| {
            let fixture = fixture.clone();
            tokio::spawn(async move { fixture.client.drain_workers().await })
        })
        .collect();
    for scanner in scanners {
        scanner.await??;
    }
    fixture.client.drain_workers().await?;
    for (resource, each) in [("reminder", 1), ("tick", 3)] {
        let released = fixture.released(resource).await?;
        same("how many timers fired", &released.len(), &(tenants.len() * timers as usize))?;
        for (timer, times) in released {
            let mut sorted = times.clone();
            sorted.sort();
            sorted.dedup();
            ensure!(times.len() == each && sorted == times, "{resource} {timer} released {times:?}");
        }
    }
    Ok(())
}

async fn cancelling_and_firing_contend_on_one_row(namespace: &dyn TestNamespace) -> Result<()> {
    let clock = standing();
    let fixture = Arc::new(TimerFixture::open(namespace, &clock).await?);
    for id in 0..10 {
        fixture.set("reminder", id, json!({"after_ms": 0})).await?;
    }
    let scanner = tokio::spawn({
        let fixture = fixture.clone();
        async move { fixture.client.drain_workers().await }
    });
    let mut cancelled = Vec::new();
    for id in (0..10).rev() {
        match fixture.client.call("reminder.cancel", &key(id), json!({}), None).await {
            Ok(_) => cancelled.push(id),
            Err(refusal) => ensure!(refusal.code == Code::WrongState, "{refusal}"),
        }
    }
    scanner.await??;
    fixture.client.drain_workers().await?;
    let released = fixture.released("reminder").await?;
    for id in 0..10 {
        let fired = released.contains_key(&format!("acme/{id}"));
        ensure!(fired != cancelled.contains(&id), "timer {id}: fired {fired}, cancelled {cancelled:?}");
    }
    Ok(())
}

async fn a_scanner_whose_clock_is_ahead_fires_nothing_early(namespace: &dyn TestNamespace) -> Result<()> {
    let engine = standing();
    let skewed = SkewedClock::over(Arc::new(engine.clone()));
    skewed.skew(600_000_000);
    let fixture =
        TimerFixture::over(namespace.open_at(Arc::new(engine.clone())).await?, Arc::new(skewed.clone()))
            .await?;
    fixture.set("reminder", 1, json!({"after_ms": 1_000})).await?;
    fixture.set("tick", 1, json!({"after_ms": 1_000})).await?;
    same("ten minutes ahead", &fixture.client.drain_workers().await?, &0)?;
    // Ten minutes behind, it is late and loses nothing.
    skewed.skew(-600_000_000);
    engine.advance(Duration::from_secs(2));
    same("ten minutes behind", &fixture.client.drain_workers().await?, &0)?;
    skewed.skew(0);
    same("right", &fixture.client.drain_workers().await?, &2)?;
    // Ahead of the engine, it passes over nothing that is still to come.
    let (start, minute) = (engine.now(), Duration::from_secs(60));
    fixture.set("reminder", 2, json!({"every_ms": 60_000})).await?;
    skewed.skew(600_000_000);
    for _ in 0..3 {
        engine.advance(minute);
        same("each minute", &fixture.client.drain_workers().await?, &1)?;
    }
    let expected: Vec<String> = (1..=3).map(|step| start.plus(minute * step).to_string()).collect();
    same("each due time", &fixture.released("reminder").await?["acme/2"], &expected)
}

async fn a_clock_that_steps_releases_nothing_twice(namespace: &dyn TestNamespace) -> Result<()> {
    let (clock, minute) = (standing(), Duration::from_secs(60));
    let fixture = TimerFixture::open(namespace, &clock).await?;
    let start = clock.now();
    fixture.set("reminder", 1, json!({"after_ms": 60_000})).await?;
    fixture.set("tick", 1, json!({"every_ms": 60_000})).await?;
    // Ten minutes ahead: what would have been due by then is released.
    clock.set(start.plus(minute * 10));
    same("ten minutes ahead", &fixture.client.drain_workers().await?, &11)?;
    // Right again, and ten minutes back: nothing is released a second time.
    for at in [start, start.minus(minute * 10), start.plus(minute * 10)] {
        clock.set(at);
        same("a time that was before", &fixture.client.drain_workers().await?, &0)?;
    }
    clock.set(start.plus(minute * 11));
    same("the next one", &fixture.client.drain_workers().await?, &1)?;
    let expected: Vec<String> = (1..=11).map(|step| start.plus(minute * step).to_string()).collect();
    same("each due time once", &fixture.released("tick").await?["acme/1"], &expected)?;
    same("the one that is due once", &fixture.released("reminder").await?["acme/1"], &expected[..1].to_vec())
}

async fn lost_answers_release_nothing_twice(namespace: &dyn TestNamespace) -> Result<()> {
    let clock = standing();
    let sound = namespace.open_at(Arc::new(clock.clone())).await?;
    let faulty = Arc::new(FaultyStore::over(sound.clone(), Arc::new(SystemClock), Odds::default(), 5));
    let fixture = TimerFixture::over(faulty.clone(), Arc::new(clock.clone())).await?;
    for id in 0..12 {
        fixture.set("tick", id, json!({"every_ms": 1_000})).await?;
    }
    clock.advance(Duration::from_millis(3_500));
    faulty.set_odds(Odds { unknown_before: 0.3, unknown_after: 0.4, unavailable: 0.1, ..Odds::default() });
    for _ in 0..12 {
        // Whatever comes of it: the process may die here as well.
        let _ = fixture.client.work(5).await;
    }
    let achieved = faulty.achieved();
    ensure!(achieved.unknown_after > 0 && achieved.unknown_before > 0, "{achieved}");
    faulty.set_odds(Odds::default());
    fixture.client.drain_workers().await?;
    let times: Vec<String> =
        (1..=3).map(|second| standing().now().plus(Duration::from_secs(second)).to_string()).collect();
    let released = released(sound.as_ref(), "tick").await?;
    same("how many timers fired", &released.len(), &12)?;
    for (timer, got) in released {
        same(&timer, &got, &times)?;
    }
    Ok(())
}

async fn what_cannot_be_released_does_not_hold_up_the_rest(namespace: &dyn TestNamespace) -> Result<()> {
    skip_invariants("writes rows past the actions");
    let clock = standing();
    let fixture = TimerFixture::open(namespace, &clock).await?;
    // With its payload the row just fits; the record of its release, which has the row in it, does not.
    let heavy = "x".repeat(399_000);
    let store_client = fixture.client.store_client()?;
    let table = fixture.client.table("reminders")?.clone();
    for id in 0..5_i64 {
        let step = Step::insert(&table, key(id))
            .set("status", "SET")
            .set("payload", Value::Json(json!(heavy)))
            .set("updated_at", clock.now());
        let step = statehouse::infra::due::set(step, id % 3, clock.now());
        store_client.apply(store_client.one(step)).await?;
    }
    for id in 10..20 {
        fixture.set("reminder", id, json!({"after_ms": 1_000})).await?;
    }
    clock.advance(Duration::from_secs(2));
    let mut done = 0;
    for _ in 0..1_000 {
        let progress = fixture.client.work(2).await?;
        done += progress.iter().map(|progress| progress.rows).sum::<usize>();
        let failed = progress.iter().map(|progress| progress.failures.len()).sum::<usize>();
        if done == 10 {
            ensure!(failed >= 5, "{failed} failures were counted");
            break;
        }
    }
    same("what was released", &released(fixture.client.house.store().as_ref(), "reminder").await?.len(), &10)
}

/// Waits for releases that workers bring about in their own time.
async fn eventually(
    store: &dyn Store,
    resource: &str,
    expected: usize,
) -> Result<BTreeMap<String, Vec<String>>> {
    let mut found = BTreeMap::new();
    for _ in 0..2_000 {
        found = released(store, resource).await?;
        if found.len() >= expected {
            break;
        }
        pause().await;
    }
    ensure!(found.len() == expected, "expected {expected} timers to fire, {} did: {found:?}", found.len());
    Ok(found)
}

fn options(idle_max: Duration) -> WorkerOptions {
    let lease = Duration::from_millis(1_500);
    WorkerOptions { lease, idle_max, random: Random::seeded(1), ..WorkerOptions::default() }
}

async fn a_write_wakes_the_scanner_of_its_process(namespace: &dyn TestNamespace) -> Result<()> {
    let client = TenantClient::open(namespace, BLUEPRINT).await?;
    // A scanner that slept for an hour would sleep through what is set meanwhile.
    client.house.start_workers(options(Duration::from_secs(3_600)));
    for _ in 0..1_000 {
        let figures = client.house.worker_figures();
        if figures.iter().all(|figures| figures.held == figures.shards && figures.steps > 3 * figures.shards)
        {
            break;
        }
        pause().await;
    }
    for id in 0..6 {
        client.done("reminder.set", &key(id), json!({"after_ms": 100 * id}), None).await?;
    }
    eventually(client.house.store().as_ref(), "reminder", 6).await?;
    client.house.stop_workers().await;
    same("who works", &client.house.worker_figures(), &vec![])
}

async fn processes_share_the_timers_and_survive_each_other(namespace: &dyn TestNamespace) -> Result<()> {
    let store = namespace.open().await?;
    let open = async || TenantClient::over(store.clone(), BLUEPRINT, Arc::new(SystemClock)).await;
    let (first, second) = (open().await?, open().await?);
    for client in [&first, &second] {
        client.house.start_workers(options(Duration::from_millis(100)));
    }
    let set = async |client: &TenantClient, ids: std::ops::Range<i64>| -> Result<()> {
        for id in ids {
            client.done("reminder.set", &key(id), json!({"after_ms": 20 * (id % 10)}), None).await?;
        }
        Ok(())
    };
    set(&first, 0..10).await?;
    eventually(store.as_ref(), "reminder", 10).await?;
    // One process is killed with its leases in its hands; what is due then is the other's.
    drop(first);
    set(&second, 10..20).await?;
    let released = eventually(store.as_ref(), "reminder", 20).await?;
    ensure!(released.values().all(|times| times.len() == 1), "{released:?}");
    second.house.stop_workers().await;
    Ok(())
}

async fn a_timer_that_is_changed_meanwhile_does_not_fire_as_it_was(
    namespace: &dyn TestNamespace,
) -> Result<()> {
    let clock = standing();
    let store = namespace.open_at(Arc::new(clock.clone())).await?;
    let fixture = TimerFixture::over(store.clone(), Arc::new(clock.clone())).await?;
    for (id, resource) in [(1, "reminder"), (2, "tick")] {
        fixture.set(resource, id, json!({"after_ms": 1_000, "payload": "old"})).await?;
        clock.advance(Duration::from_secs(2));
        let due = clock.now().minus(Duration::from_millis(500)).to_string();
        let client = fixture.client.clone();
        // Between the scan and the release it is set anew, to a time that has come as well.
        let anew = json!({"due_at": due, "payload": "new"});
        let set = format!("{resource}.set");
        let change = async move { drop(client.call(&set, &key(id), anew, None).await) };
        let meanwhile = Arc::new(Meanwhile::default());
        meanwhile.next(change);
        let slow = Arc::new(StoreProxy::new(store.clone(), meanwhile));
        TimerFixture::over(slow, Arc::new(clock.clone())).await?.client.drain_workers().await?;
        fixture.client.drain_workers().await?;
        let records = whole_log(store.as_ref()).await?;
        let fired = format!("{resource}.fired");
        let events = records.iter().flat_map(|record| &record.events).filter(|event| event.name == fired);
        for event in events {
            let told = (&event.data["due_at"], &event.data["row"]["payload"]);
            same("what was released", &told, &(&json!(due), &json!("new")))?;
        }
    }
    Ok(())
}

async fn a_timer_that_is_gone_does_not_come_back(namespace: &dyn TestNamespace) -> Result<()> {
    skip_invariants("writes rows past the actions");
    let clock = standing();
    let store = namespace.open_at(Arc::new(clock.clone())).await?;
    let paused = Arc::new(Paused::default());
    let slow = Arc::new(StoreProxy::new(store.clone(), paused.clone()));
    let client = TenantClient::over(store, BLUEPRINT, Arc::new(clock.clone())).await?;
    let slow = TenantClient::over(slow, BLUEPRINT, Arc::new(clock.clone())).await?;
    let table = client.table("reminders")?.clone();
    client.done("reminder.set", &key(1), json!({"after_ms": 1_000}), None).await?;
    let cancel = client.drafted("reminder.cancel", &key(1), json!({}), Some(Expected::Version(1))).await?;
    clock.advance(Duration::from_secs(1));
    // A program deletes it past the actions, while it is about to be released.
    let (store_client, reminders) = (client.store_client()?, table.clone());
    paused.before("reminders", 1, async move {
        // If this fails, the row is there.
        drop(store_client.apply(store_client.one(Step::delete(&reminders, key(1)))).await);
    });
    while !paused.is_over() {
        slow.work(7).await?;
        pause().await;
    }
    client.too_late(&cancel).await?;
    same("what is gone", &client.store_client()?.find(&table, key(1)).await?, &None)
}
