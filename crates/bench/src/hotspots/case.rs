//! What a case of the hotspot benchmark consists of, and one run of it.

use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use anyhow::{Context as _, Result, bail, ensure};
use serde_json::Value as Json;
use statehouse::worker::WorkerOptions;
use statehouse::{Code, House, Request};
use statehouse_store::clock::Stopwatch;
use statehouse_store::{Clock as _, Store, SystemClock, Value};
use tokio::task::JoinSet;

use super::engines::{CountingStore, HotspotEngine};
use crate::load;
use crate::site::{Site, Tenancy};

/// The longest that one run may take.
const RUN_MAX: Duration = Duration::from_secs(60);
/// How often a run looks at what workers have done.
const POLL_EVERY: Duration = Duration::from_millis(2);
/// Stands for the settings of a side in a case's blueprint.
const SETTINGS: &str = "SETTINGS";

/// One hotspot of an archetype, and the two conditions that are compared.
#[derive(Clone, Copy)]
pub struct HotspotCase {
    /// The keyword of the archetype.
    pub archetype: &'static str,
    /// The hotspot, as the atlas names it.
    pub hotspot: &'static str,
    /// One operation of the workload, for the report.
    pub operation: &'static str,
    /// What differs between the sides.
    pub compares: Compares,
    /// The blueprint; `SETTINGS` in it stands for the settings of a side.
    pub blueprint: &'static str,
    /// The two sides. The ratio of a run is the rate of the second to that of the first.
    pub sides: [Side; 2],
    /// Operations of one run on memory and SQLite.
    pub operations: u64,
    /// Callers at the same time, unless the workload says otherwise.
    pub callers: u64,
    /// Prepares one run and measures it.
    pub workload: HotspotWorkload,
}

/// What the two sides of a case are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Compares {
    /// A switch, off and on. A ratio above 1 is what the switch gains.
    Switch,
    /// The relief is part of the design and cannot be switched off: a low load and the hot one. A ratio near 1, or above it,
    /// says that the hotspot does not reduce the rate.
    Load,
}

/// Runs one side of a case.
pub type HotspotWorkload = fn(Trial) -> Pin<Box<dyn Future<Output = Result<CaseFigures>> + Send>>;

/// One side of a case.
#[derive(Clone, Copy, Debug)]
pub struct Side {
    /// What reports call it.
    pub name: &'static str,
    /// Lines of the blueprint.
    pub settings: &'static str,
    /// Log partitions of the store, if not the engine's default.
    pub partitions: Option<u32>,
    /// A number that the workload understands: callers, rows of a plan, or whether a switch of the call is on.
    pub level: u64,
}

impl Side {
    /// A side with these lines in the blueprint.
    pub const fn settings(settings: &'static str) -> Side {
        Side { name: settings, settings, partitions: None, level: 0 }
    }

    /// A side that the workload distinguishes by a number.
    pub const fn level(name: &'static str, level: u64) -> Side {
        Side { name, settings: "", partitions: None, level }
    }

    /// A side with so many log partitions.
    pub const fn partitions(name: &'static str, partitions: u32) -> Side {
        Side { name, settings: "", partitions: Some(partitions), level: 0 }
    }

    /// The same side under another name.
    pub const fn named(mut self, name: &'static str) -> Side {
        self.name = name;
        self
    }
}

/// What one run measured.
#[derive(Clone, Copy, Debug)]
pub struct CaseFigures {
    /// How many operations were done.
    pub operations: u64,
    /// In how much time.
    pub elapsed: Duration,
    /// Processor time of this process meanwhile, in seconds. Servers are other processes.
    pub processor: f64,
    /// Requests to the store meanwhile, those of workers included; or to the target of effects.
    pub requests: u64,
}

impl CaseFigures {
    /// Operations per second.
    pub fn rate(&self) -> f64 {
        self.operations as f64 / self.elapsed.as_secs_f64().max(1e-9)
    }

    /// Requests for each operation.
    pub fn requests_each(&self) -> f64 {
        self.requests as f64 / self.operations.max(1) as f64
    }

    /// Microseconds of processor time for each operation.
    pub fn processor_each(&self) -> f64 {
        1e6 * self.processor / self.operations.max(1) as f64
    }
}

/// One run of one side: a house with the side's blueprint on an empty store.
pub struct Trial {
    /// The house, on a store that counts.
    pub house: Tenancy,
    /// The same blueprint on the same store, for looking on without being counted.
    pub observer: Tenancy,
    /// The side.
    pub side: Side,
    /// Operations that are wanted.
    pub operations: u64,
    /// Callers at the same time.
    pub callers: u64,
    /// Operations of the case, of which `operations` is a part.
    of: u64,
    engine: HotspotEngine,
    blueprint: String,
    counting: Arc<CountingStore>,
    counted: Site,
}

impl Trial {
    /// Runs one side of a case on an empty store of an engine.
    pub async fn run(
        case: &HotspotCase,
        side: Side,
        engine: &HotspotEngine,
        operations: u64,
    ) -> Result<CaseFigures> {
        let (store, namespace) = engine.open(side.partitions).await?;
        let trial = Trial::over(store.clone(), case, side, engine, operations).await?;
        let figures = (case.workload)(trial).await;
        // The namespace can go away when its store is closed.
        store.close().await;
        drop(namespace);
        figures
    }

    async fn over(
        store: Arc<dyn Store>,
        case: &HotspotCase,
        side: Side,
        engine: &HotspotEngine,
        operations: u64,
    ) -> Result<Trial> {
        let counting = Arc::new(CountingStore::over(store.clone()));
        let blueprint =
            format!("[house]\nname = \"bench\"\n{}", case.blueprint.replace(SETTINGS, side.settings));
        let counted = Site::over(counting.clone())?;
        let house = counted.house(&blueprint).await?;
        let observer = Site::over(store)?.house(&blueprint).await?;
        let (callers, of, engine) = (case.callers, case.operations, engine.clone());
        Ok(Trial { house, observer, side, operations, callers, of, engine, blueprint, counting, counted })
    }

    /// The same run with so many callers.
    #[must_use]
    pub fn with_callers(mut self, callers: u64) -> Trial {
        self.callers = callers;
        self
    }

    /// The same run with so many times the operations.
    #[must_use]
    pub fn with_times_operations(mut self, times: u64) -> Trial {
        self.operations *= times;
        self
    }

    /// A number of rows, reduced as the operations of this run are; at least one, unless it is none.
    pub fn scaled(&self, rows: u64) -> u64 {
        (rows * self.operations).div_ceil(self.of.max(1)).min(rows)
    }

    /// Another house on the same store, as another process would have, changed before it is used.
    pub async fn another(&self, change: impl FnOnce(House) -> House) -> Result<Tenancy> {
        self.counted.changed_house(&self.blueprint, change).await
    }

    /// Sends requests before the measurement, each as a plan of its own.
    pub async fn fill(&self, requests: impl IntoIterator<Item = Request>) -> Result<()> {
        self.observer.fill(requests.into_iter().map(|request| vec![request])).await
    }

    /// Measures what happens while this future runs.
    pub async fn measure(
        &self,
        operations: u64,
        work: impl Future<Output = Result<()>> + Send,
    ) -> Result<CaseFigures> {
        self.engine.settle().await?;
        let processor = load::processor_seconds().unwrap_or_default();
        let (requests, watch) = (self.counting.requests(), Stopwatch::start());
        tokio::select! {
            done = work => done?,
            () = SystemClock.sleep(RUN_MAX) => bail!("the run takes too long"),
        }
        let elapsed = watch.elapsed();
        let processor = load::processor_seconds().unwrap_or_default() - processor;
        Ok(CaseFigures { operations, elapsed, processor, requests: self.counting.requests() - requests })
    }

    /// Measures the operations of the run, by several callers at once. `work(house, number)` is one of them.
    pub async fn measure_each<F, W>(&self, work: F) -> Result<CaseFigures>
    where
        F: Fn(Tenancy, u64) -> W + Send + Sync + 'static,
        W: Future<Output = Result<()>> + Send + 'static,
    {
        self.measure(self.operations, each(&self.house, self.callers, self.operations, work)).await
    }

    /// Measures one request for each operation; one that met others is sent again.
    pub async fn measure_calls(
        &self,
        of: impl Fn(u64) -> Request + Send + Sync + 'static,
    ) -> Result<CaseFigures> {
        self.measure_each(move |house, number| {
            let request = of(number);
            async move { insist(&house, &request).await.map(|_| ()) }
        })
        .await
    }

    /// Starts the workers and measures until one of them has done so many rows, which count as so many operations.
    pub async fn measure_worker(&self, worker: &str, rows: u64, operations: u64) -> Result<CaseFigures> {
        let figures = self
            .measure(operations, async {
                self.house.house.start_workers(WorkerOptions::default());
                until(|| async { Ok(done_by(&self.house, worker) >= rows) }).await
            })
            .await?;
        self.house.house.stop_workers().await;
        Ok(figures)
    }

    /// Starts the workers and measures until the projection has read everything.
    pub async fn measure_projection(&self, operations: u64) -> Result<CaseFigures> {
        let figures = self
            .measure(operations, async {
                self.house.house.start_workers(WorkerOptions::default());
                self.caught_up().await
            })
            .await?;
        self.house.house.stop_workers().await;
        Ok(figures)
    }

    /// Lets the projection be built and read everything, before the measurement.
    pub async fn project(&self) -> Result<()> {
        self.house.house.start_workers(WorkerOptions::default());
        self.caught_up().await?;
        self.house.house.stop_workers().await;
        Ok(())
    }

    /// Returns when the projection is built and has read everything.
    pub async fn caught_up(&self) -> Result<()> {
        until(|| async {
            let projection = self.observer.house.projections().into_iter().next();
            let status = projection.context("there is no projection")?.status().await?;
            Ok(status.state.live.is_some() && status.live.iter().all(|one| one.records == 0))
        })
        .await
    }
}

/// Runs operations by several callers at once, each taking the next number.
pub async fn each<F, W>(house: &Tenancy, callers: u64, operations: u64, work: F) -> Result<()>
where
    F: Fn(Tenancy, u64) -> W + Send + Sync + 'static,
    W: Future<Output = Result<()>> + Send + 'static,
{
    let (work, next) = (Arc::new(work), Arc::new(AtomicU64::new(0)));
    let mut running = JoinSet::new();
    for _ in 0..callers {
        let (house, work, next) = (house.clone(), work.clone(), next.clone());
        running.spawn(async move {
            loop {
                let number = next.fetch_add(1, Ordering::Relaxed);
                if number >= operations {
                    return anyhow::Ok(());
                }
                work(house.clone(), number).await?;
            }
        });
    }
    while let Some(ended) = running.join_next().await {
        ended??;
    }
    Ok(())
}

/// Asks again and again until it is so.
pub async fn until<F, W>(is_so: F) -> Result<()>
where
    F: Fn() -> W,
    W: Future<Output = Result<bool>>,
{
    let watch = Stopwatch::start();
    while !is_so().await? {
        ensure!(watch.elapsed() < RUN_MAX, "it does not come to an end");
        SystemClock.sleep(POLL_EVERY).await;
    }
    Ok(())
}

/// Sends a request, and again as long as others were in the way.
pub async fn insist(house: &Tenancy, request: &Request) -> Result<Json> {
    loop {
        match house.send(request.clone()).await {
            Ok(answer) => return Ok(answer.body),
            Err(refusal) if refusal.code == Code::Contended => {}
            Err(refusal) => return Err(refusal.into()),
        }
    }
}

/// How many rows a worker of this house has done.
pub fn done_by(house: &Tenancy, worker: &str) -> u64 {
    let figures = house.house.worker_figures();
    figures.iter().filter(|figures| figures.worker == worker).map(|figures| figures.rows).sum()
}

/// A key of one number.
pub fn key(number: u64) -> Vec<Value> {
    vec![int(number)]
}

/// A number as a value of a key.
pub fn int(number: u64) -> Value {
    i64::try_from(number).unwrap_or(i64::MAX).into()
}
