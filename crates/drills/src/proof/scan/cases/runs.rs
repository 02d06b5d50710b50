//! Scans of the house itself: rows of several tenants, each once, whatever happens to the workers.

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use anyhow::{Result, bail, ensure};
use async_trait::async_trait;
use serde_json::json;
use statehouse::infra::scan::runner::{RowEffects, RunSettings, RunStep, ScanRunner, ScanTask};
use statehouse_store::faulty::{FaultyStore, Odds};
use statehouse_store::{
    Entry, EventTemplate, Guard, Ids, ManualClock, Random, Row, Step, Store, StoreError, SystemClock, Table,
    Time,
};
use tokio::sync::Notify;

use super::{BLUEPRINT, ITEMS};
use crate::harness::engines::TestNamespace;
use crate::harness::recorder::{Actor, on_behalf};
use crate::harness::store_client::same;
use crate::harness::tenant_client::TenantClient;

const TENANTS: [&str; 3] = ["acme", "beta", "zenith"];
const RUN: &str = "count";
const LEASE: Duration = Duration::from_secs(10);

/// Counts each row once more.
#[derive(Debug)]
struct CountRows {
    table: Arc<Table>,
    /// The effects of pages that fail: their numbers, from 1.
    fails: Vec<u32>,
    asked: AtomicU32,
    /// Rows with this count or more need nothing.
    until: i64,
    /// A worker that computed its effects waits here, if there is a place to wait.
    gate: Option<Arc<Gate>>,
}

/// A place where a worker is held up.
#[derive(Debug, Default)]
struct Gate {
    arrived: Notify,
    opened: Notify,
}

#[async_trait]
impl ScanTask for CountRows {
    fn table(&self) -> &Arc<Table> {
        &self.table
    }

    fn page_rows(&self) -> usize {
        5
    }

    async fn effects(&self, _: &dyn Store, rows: &[Row]) -> Result<RowEffects, StoreError> {
        let asked = self.asked.fetch_add(1, Ordering::Relaxed) + 1;
        if self.fails.contains(&asked) {
            return Err(StoreError::unavailable("the worker died"));
        }
        let rows: Vec<&Row> = rows.iter().filter(|row| row.int("n") < Some(self.until)).collect();
        let step = |row: &&Row| {
            let count = row.int("n").unwrap_or_default();
            Step::update(&self.table, row.key().iter().cloned())
                .guard(Guard::version(row.version()))
                .set("n", count + 1)
        };
        let events = rows.iter().zip(1..).map(|(row, number)| {
            let key = row.key()[0].as_int().unwrap_or_default().to_string();
            let event = EventTemplate::named("item.moved").with_row_of(number);
            event.with("subject", key.as_str()).about("item", key.as_str())
        });
        let entry = events.fold(Entry::about("count", RUN), Entry::event);
        let steps: Vec<Step> = rows.iter().map(step).collect();
        if let Some(gate) = &self.gate {
            gate.arrived.notify_one();
            gate.opened.notified().await;
        }
        Ok(RowEffects { entry: (!steps.is_empty()).then_some(entry), steps, problems: Vec::new() })
    }
}

/// A house with items of several tenants, and a clock.
struct RunFixture {
    clients: Vec<TenantClient>,
    clock: ManualClock,
    store: Arc<dyn Store>,
}

impl RunFixture {
    async fn open(namespace: &dyn TestNamespace) -> Result<RunFixture> {
        let clock = ManualClock::at(Time::from_millis(1_800_000_000_000));
        let store = namespace.open_at(Arc::new(clock.clone())).await?;
        let client = TenantClient::over(store.clone(), BLUEPRINT, Arc::new(clock.clone())).await?;
        let clients: Vec<TenantClient> =
            TENANTS.iter().map(|tenant| client.for_tenant(tenant)).collect::<Result<_>>()?;
        for (number, client) in clients.iter().enumerate() {
            for id in 0..ITEMS - number as i64 {
                client.done("item.create", &[], json!({"id": id}), None).await?;
            }
        }
        Ok(RunFixture { clients, clock, store })
    }

    fn task(&self) -> Result<CountRows> {
        let table = self.clients[0].table("items")?.clone();
        let asked = AtomicU32::new(0);
        Ok(CountRows { table, fails: Vec::new(), asked, until: i64::MAX, gate: None })
    }

    fn runner_over(&self, store: &Arc<dyn Store>) -> Result<ScanRunner> {
        let actor = Actor { archetype: "scan", name: "worker house.scan".into() };
        let clock = Arc::new(self.clock.clone());
        let ids = Ids::new(Arc::new(SystemClock), Random::from_entropy());
        Ok(ScanRunner::of(on_behalf(store, actor), clock, ids)?.with_lease(LEASE))
    }

    fn runner(&self) -> Result<ScanRunner> {
        self.runner_over(&self.store)
    }

    async fn started(&self) -> Result<ScanRunner> {
        let runner = self.runner()?;
        runner.start(RUN, &self.task()?, RunSettings { ranges: 3, rate: None }).await?;
        Ok(runner)
    }

    /// Works until the run is over. Claims of workers that have died end meanwhile.
    async fn work(&self, runner: &ScanRunner, task: &CountRows, holder: &str) -> Result<()> {
        for _ in 0..1_000 {
            match runner.step(RUN, task, holder).await {
                Ok(RunStep::Worked(_)) => {}
                Ok(RunStep::Waiting(_)) => self.clock.advance(LEASE),
                Ok(RunStep::Done) => return Ok(()),
                Ok(RunStep::Stopped) => bail!("the run was stopped"),
                Err(error) if error.is_transient() => {}
                Err(error) => return Err(error.into()),
            }
        }
        bail!("{holder} does not come to an end")
    }

    /// Requires each row to be counted so many times, and the run to be over.
    async fn check(&self, runner: &ScanRunner, count: i64) -> Result<()> {
        let mut rows = 0;
        for (number, client) in self.clients.iter().enumerate() {
            for id in 0..ITEMS - number as i64 {
                client.shows("item", &[id.into()], &json!({"n": count})).await?;
                rows += 1;
            }
        }
        let progress = runner.progress(RUN).await?;
        let done =
            progress.map(|progress| (progress.is_done(), progress.done == progress.ranges, progress.rows));
        same("the progress", &done, &Some((true, true, rows)))
    }
}

/// A run is begun once, is paused, throttled, finished and removed; another one begins anew.
pub(super) async fn a_run_of_the_house_lives_its_life(namespace: &dyn TestNamespace) -> Result<()> {
    let fixture = RunFixture::open(namespace).await?;
    let (runner, task) = (fixture.runner()?, fixture.task()?);
    same("a run that is not there", &runner.progress(RUN).await?, &None)?;
    same("its step", &runner.step(RUN, &task, "ann").await?, &RunStep::Stopped)?;
    let settings = RunSettings { ranges: 3, rate: Some(1) };
    for _ in 0..2 {
        runner.start(RUN, &task, settings).await?;
    }
    let progress = runner.progress(RUN).await?.filter(|progress| progress.state == "RUNNING");
    ensure!(progress.is_some_and(|progress| progress.rows == 0 && progress.done == 0), "it has not begun");
    ensure!(runner.pause(RUN).await? && !runner.pause(RUN).await?, "a pause");
    ensure!(matches!(runner.step(RUN, &task, "ann").await?, RunStep::Waiting(_)), "a paused run goes on");
    ensure!(runner.resume(RUN).await? && !runner.resume(RUN).await?, "a resume");
    // A page of five rows at one row per second takes five seconds.
    let mut waited = None;
    for _ in 0..8 {
        if let RunStep::Waiting(wait) = runner.step(RUN, &task, "ann").await? {
            waited = Some(wait);
            break;
        }
    }
    let wait = waited.unwrap_or_default();
    ensure!(wait >= Duration::from_secs(1) && wait <= Duration::from_secs(5), "it waits {wait:?}");
    runner.throttle(RUN, None).await?;
    fixture.work(&runner, &task, "ann").await?;
    fixture.check(&runner, 1).await?;
    ensure!(!runner.stop(RUN).await? && !runner.pause(RUN).await?, "a run that is done was stopped");
    runner.remove(RUN).await?;
    same("a run that was removed", &runner.progress(RUN).await?, &None)?;
    let left =
        fixture.store.scan(&statehouse_store::Scan::all(fixture.clients[0].table("house_scans")?)).await?;
    same("what is left of it", &left.rows.len(), &0)?;
    // The same name again, with pages that need nothing.
    let idle = CountRows { until: 1, ..fixture.task()? };
    runner.start(RUN, &idle, settings).await?;
    runner.throttle(RUN, None).await?;
    fixture.work(&runner, &idle, "ann").await?;
    fixture.check(&runner, 1).await?;
    runner.remove(RUN).await?;
    runner.start(RUN, &task, settings).await?;
    ensure!(runner.stop(RUN).await?, "a stop");
    same("a stopped run", &runner.step(RUN, &task, "ann").await?, &RunStep::Stopped)
}

/// A worker dies before its effects on each tenant's rows, and after them; another one goes on when the claim has ended.
pub(super) async fn a_run_goes_on_after_a_worker_died(namespace: &dyn TestNamespace) -> Result<()> {
    let fixture = RunFixture::open(namespace).await?;
    let runner = fixture.started().await?;
    for death in 1..12 {
        let task = CountRows { fails: vec![death], ..fixture.task()? };
        let holder = format!("worker {death}");
        for _ in 0..4 {
            match runner.step(RUN, &task, &holder).await {
                Ok(RunStep::Waiting(_)) => fixture.clock.advance(LEASE),
                Ok(_) => {}
                Err(_) => break,
            }
        }
    }
    fixture.work(&runner, &fixture.task()?, "last").await?;
    fixture.check(&runner, 1).await
}

/// Answers of the store get lost before and after its commits.
pub(super) async fn a_run_survives_lost_answers(namespace: &dyn TestNamespace) -> Result<()> {
    let fixture = RunFixture::open(namespace).await?;
    let runner = fixture.started().await?;
    let faulty =
        Arc::new(FaultyStore::over(fixture.store.clone(), Arc::new(SystemClock), Odds::default(), 11));
    faulty.set_odds(Odds { unknown_before: 0.2, unknown_after: 0.3, unavailable: 0.1, ..Odds::default() });
    let behind: Arc<dyn Store> = faulty.clone();
    let unlucky = fixture.runner_over(&behind)?;
    let (first, second) = (fixture.task()?, fixture.task()?);
    tokio::try_join!(fixture.work(&unlucky, &first, "ann"), fixture.work(&unlucky, &second, "bob"))?;
    let achieved = faulty.achieved();
    ensure!(achieved.unknown_before + achieved.unknown_after > 0, "no answer was lost: {achieved}");
    fixture.check(&runner, 1).await
}

/// A worker is held up between its reading and its writing, past the end of its claim. Another one does its page and those after it.
pub(super) async fn a_late_worker_of_a_run_writes_nothing(namespace: &dyn TestNamespace) -> Result<()> {
    let fixture = RunFixture::open(namespace).await?;
    let runner = fixture.started().await?;
    let gate = Arc::new(Gate::default());
    let slow = CountRows { gate: Some(gate.clone()), ..fixture.task()? };
    let late = {
        let (runner, gate) = (runner.clone(), gate.clone());
        tokio::spawn(async move {
            // It claims, and opens a page; effects of each tenant are computed once before the page is opened.
            let mut steps = Vec::new();
            for _ in 0..3 {
                steps.push(runner.step(RUN, &slow, "slow").await);
            }
            drop(gate);
            steps
        })
    };
    // Until the page is open: each computation of effects is let through.
    loop {
        gate.arrived.notified().await;
        let is_open = fixture
            .store
            .scan(&statehouse_store::Scan::all(fixture.clients[0].table("house_scans")?))
            .await?
            .rows
            .iter()
            .any(|row| row.get("page_keys").is_some_and(|keys| !keys.is_null()));
        if is_open {
            break;
        }
        gate.opened.notify_one();
    }
    // The claim has not ended yet: only the other ranges can be worked on.
    let task = fixture.task()?;
    for _ in 0..3 {
        runner.step(RUN, &task, "early").await?;
    }
    fixture.clock.advance(LEASE);
    fixture.work(&runner, &task, "next").await?;
    fixture.check(&runner, 1).await?;
    // The one who was held up goes on.
    let opener = {
        let gate = gate.clone();
        tokio::spawn(async move {
            loop {
                gate.opened.notify_one();
                gate.arrived.notified().await;
            }
        })
    };
    let steps = late.await?;
    opener.abort();
    ensure!(steps.iter().all(Result::is_ok), "{steps:?}");
    fixture.check(&runner, 1).await
}

/// Rows are written, deleted and inserted while a run goes over them, and it is paused in between.
pub(super) async fn rows_change_while_a_run_goes_on(namespace: &dyn TestNamespace) -> Result<()> {
    let fixture = RunFixture::open(namespace).await?;
    let runner = fixture.started().await?;
    let task = fixture.task()?;
    let client = &fixture.clients[0];
    let mut steps = 0;
    loop {
        match runner.step(RUN, &task, "ann").await? {
            RunStep::Done => break,
            RunStep::Stopped => bail!("the run was stopped"),
            _ => {}
        }
        // Each row gets another version between the reading of a page and its effects.
        for id in 0..ITEMS {
            client.done("item.mutate", &[id.into()], json!({"increment": {"n": 100}}), None).await?;
        }
        if steps == 2 {
            ensure!(runner.pause(RUN).await?, "a pause");
            runner.step(RUN, &task, "ann").await?;
            runner.resume(RUN).await?;
        }
        steps += 1;
    }
    for id in 0..ITEMS {
        let count = client.shown("item", &[id.into()], &["n"]).await?;
        same(
            "the counts of a row, without those of the writer",
            &(count[0].as_i64().unwrap_or(0) % 100),
            &1,
        )?;
    }
    ensure!(steps > 4, "the run had {steps} steps");
    Ok(())
}
