//! The failures of I03, on any timer.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use async_trait::async_trait;
use serde_json::{Value as Json, json};
use statehouse::infra::lease::Leases;
use statehouse::resource::key_text;
use statehouse::system;
use statehouse_store::faulty::Odds;
use statehouse_store::{Clock, Page, Query, Store, StoreError};
use tokio::sync::Barrier;

use crate::conformance::CaseFuture;
use crate::harness::drill::{Drill, DrillClock, DrillKind, DrillRun};
use crate::harness::proxy::{Interceptor, StoreProxy};
use crate::harness::store_client::{pause, same, whole_log};
use crate::harness::tenant_client::TenantClient;
use crate::proof::timer::cases::BLUEPRINT;

const fn drill(failure: &'static str, provokes: &'static str, run: crate::harness::drill::DrillFn) -> Drill {
    let kind = DrillKind::AnyResource { blueprint: BLUEPRINT, resource: "reminder", run };
    Drill { archetype: "timer", failure, provokes, largest_plan: 3, kind }
}

pub(crate) const DRILLS: &[Drill] = &[
    drill(
        "due item materialized twice",
        "Several scanners find the same due timers at once, a moment before they are due and then when they are.",
        |run| boxed(materialized_twice(run)),
    ),
    drill(
        "due item never materialized",
        "Scanners fail and die again and again in the midst of releasing, and a later one goes on.",
        |run| boxed(never_materialized(run)),
    ),
    drill(
        "job claimed twice",
        "Two processes claim one part of the work, and both have read the same page before either writes.",
        |run| boxed(claimed_twice(run)),
    ),
    drill(
        "run executed but result not recorded",
        "The answers to releases get lost, and every release is looked for in the log and in its row.",
        |run| boxed(not_recorded(run)),
    ),
];

fn boxed<'a>(run: impl Future<Output = Result<()>> + Send + 'a) -> CaseFuture<'a> {
    Box::pin(run)
}

/// How many timers each round sets.
const TIMERS: i64 = 3;

/// Sets the timers of a round, each to be due in a second, and returns their keys as text.
async fn set(run: &DrillRun, client: &TenantClient, round: i64) -> Result<Vec<String>> {
    let mut keys = Vec::new();
    for number in 0..TIMERS {
        let key = run.key(TIMERS * round + number)?;
        client.done(&run.action("set"), &key, json!({"after_ms": 1_000}), None).await?;
        keys.push(key_text(&key));
    }
    Ok(keys)
}

/// Scans until nothing is left to do. Also where indexes lag: until all of these were released, or it takes too long.
async fn scan(run: &DrillRun, client: &TenantClient, wanted: usize) -> Result<()> {
    for _ in 0..LOOKS_MAX {
        client.drain_workers().await?;
        if released(client.house.store().as_ref(), &run.target.resource).await?.len() >= wanted {
            break;
        }
        pause().await;
    }
    Ok(())
}

const LOOKS_MAX: usize = 300;

/// What was released: by key, the due time and the moment of each release.
pub(crate) async fn released(
    store: &dyn Store,
    resource: &str,
) -> Result<BTreeMap<String, Vec<(String, statehouse_store::Time)>>> {
    let mut found: BTreeMap<String, Vec<(String, statehouse_store::Time)>> = BTreeMap::new();
    let fired = format!("{resource}.fired");
    for record in whole_log(store).await? {
        for event in record.events.iter().filter(|event| event.name == fired) {
            let due = event.data["due_at"].as_str().context("a release without its due time")?;
            found.entry(record.key.clone()).or_default().push((due.to_owned(), record.at));
        }
    }
    Ok(found)
}

/// Requires each of these to have been released once, not early, and the rows to say the same.
async fn check(run: &DrillRun, client: &TenantClient, keys: &[String]) -> Result<()> {
    let releases = released(client.house.store().as_ref(), &run.target.resource).await?;
    let mut known: Vec<&String> = releases.keys().collect();
    let mut expected: Vec<&String> = keys.iter().collect();
    known.sort_unstable();
    expected.sort_unstable();
    same("which timers were released", &known, &expected)?;
    for (key, releases) in &releases {
        ensure!(releases.len() == 1, "{key} was released {} times: {releases:?}", releases.len());
        for (due, at) in releases {
            ensure!(*at >= due.parse()?, "{key} was due at {due} and released at {at}");
        }
        let row = client.done(&run.action("read"), &run.resource()?.parse_key(key)?, json!({}), None).await?;
        let told = (row.body["status"].clone(), row.body["fired"].clone());
        same("what the row says", &told, &(json!("FIRED"), Json::from(releases.len())))?;
    }
    Ok(())
}

async fn materialized_twice(run: &DrillRun) -> Result<()> {
    let clock = DrillClock::new();
    let client = run.house_at(&clock).await?;
    let mut keys = Vec::new();
    for round in run.rounds() {
        keys.extend(set(run, &client, round).await?);
        for span in [Duration::from_micros(999_999), Duration::from_micros(1)] {
            clock.advance(span);
            let scanners: Vec<_> = (0..3)
                .map(|_| {
                    let client = client.clone();
                    tokio::spawn(async move { client.drain_workers().await })
                })
                .collect();
            for scanner in scanners {
                scanner.await??;
            }
        }
        scan(run, &client, keys.len()).await?;
        clock.advance(Duration::from_secs(3_600));
        let again = client.drain_workers_of(&run.target.resource).await?;
        same("released once more", &again, &0)?;
    }
    check(run, &client, &keys).await
}

async fn never_materialized(run: &DrillRun) -> Result<()> {
    let clock = DrillClock::new();
    let store = run.namespace.open_at(Arc::new(clock.clone())).await?;
    let faulty = run.faulty(store.clone());
    let client = run.house_over(store, Arc::new(clock.clone())).await?;
    let dying = run.house_over(faulty.clone(), Arc::new(clock.clone())).await?;
    let mut keys = Vec::new();
    for round in run.rounds() {
        keys.extend(set(run, &client, round).await?);
        clock.advance(Duration::from_secs(1));
        faulty.set_odds(Odds { unavailable: 0.3, crash_before: 0.3, crash_after: 0.3, ..Odds::default() });
        let crashes = || faulty.achieved().crashes_before + faulty.achieved().crashes_after;
        let before = crashes();
        let scanner = tokio::spawn({
            let dying = dying.clone();
            async move { while dying.work(2).await.is_ok_and(|done| done.iter().any(|part| part.rows > 0)) {} }
        });
        while !scanner.is_finished() && crashes() == before {
            pause().await;
        }
        scanner.abort();
        let _ = scanner.await;
        faulty.set_odds(Odds::default());
        scan(run, &client, keys.len()).await?;
    }
    check(run, &client, &keys).await
}

/// Lets two readers of a page wait for one another.
#[derive(Debug)]
struct ReadBarrier(Arc<Barrier>);

#[async_trait]
impl Interceptor for ReadBarrier {
    async fn query(&self, inner: &Arc<dyn Store>, query: &Query) -> Result<Page, StoreError> {
        let page = inner.query(query).await;
        // A page that only one of them reads must not stop it for ever.
        tokio::select! {
            _ = self.0.wait() => {}
            () = statehouse_store::SystemClock.sleep(Duration::from_millis(20)) => {}
        }
        page
    }
}

async fn claimed_twice(run: &DrillRun) -> Result<()> {
    let clock = DrillClock::new();
    let store = run.namespace.open_at(Arc::new(clock.clone())).await?;
    let client = run.house_over(store.clone(), Arc::new(clock.clone())).await?;
    // The claim itself: of several processes one gets the part.
    let (tenant, table) = (system::tenant().context("no tenant")?, system::leases()?);
    let leases = Leases::of(store.clone(), Arc::new(clock.clone()), table, tenant);
    let claim = |process: &'static str| {
        let leases = leases.clone();
        tokio::spawn(async move {
            leases.acquire(&["worker.drill".into(), "0".into()], process, Duration::from_secs(10)).await
        })
    };
    let (one, two) = (claim("one"), claim("two"));
    let (one, two) = (one.await??, two.await??);
    ensure!(one.is_ok() != two.is_ok(), "both or none have the part: {one:?} and {two:?}");
    // And if both believed to have it: each row is released once.
    let barrier = Arc::new(Barrier::new(2));
    let mut scanners = Vec::new();
    for _ in 0..2 {
        let met: Arc<dyn Store> = Arc::new(StoreProxy::new(store.clone(), ReadBarrier(barrier.clone())));
        scanners.push(run.house_over(met, Arc::new(clock.clone())).await?);
    }
    let mut keys = Vec::new();
    for round in run.rounds() {
        keys.extend(set(run, &client, round).await?);
        clock.advance(Duration::from_secs(1));
        let tasks: Vec<_> = scanners
            .iter()
            .map(|scanner| {
                let scanner = scanner.clone();
                tokio::spawn(async move { scanner.work(7).await })
            })
            .collect();
        for task in tasks {
            task.await??;
        }
    }
    scan(run, &client, keys.len()).await?;
    check(run, &client, &keys).await
}

async fn not_recorded(run: &DrillRun) -> Result<()> {
    let clock = DrillClock::new();
    let store = run.namespace.open_at(Arc::new(clock.clone())).await?;
    let faulty = run.faulty(store.clone());
    let client = run.house_over(store, Arc::new(clock.clone())).await?;
    let unlucky = run.house_over(faulty.clone(), Arc::new(clock.clone())).await?;
    let mut keys = Vec::new();
    for round in run.rounds() {
        keys.extend(set(run, &client, round).await?);
        clock.advance(Duration::from_secs(1));
        faulty.set_odds(Odds { unknown_before: 0.3, unknown_after: 0.5, ..Odds::default() });
        for _ in 0..4 {
            // Whatever it says: the row and the log tell what happened.
            let _ = unlucky.work(5).await;
        }
        faulty.set_odds(Odds::default());
        scan(run, &client, keys.len()).await?;
    }
    let achieved = faulty.achieved();
    ensure!(achieved.unknown_before + achieved.unknown_after > 0, "no answer was lost: {achieved}");
    check(run, &client, &keys).await
}
