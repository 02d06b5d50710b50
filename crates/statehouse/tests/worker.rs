//! The worker runtime under a clock that the tests move: who works where, when, and what survives.

#![expect(
    clippy::unwrap_used,
    clippy::indexing_slicing,
    clippy::panic,
    reason = "helpers of tests fail by panicking, as tests do"
)]

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use async_trait::async_trait;
use statehouse::egress::Egress;
use statehouse::system;
use statehouse::worker::{
    NextStep, PoolConfig, StepContext, StepProgress, Wakeup, WakeupHub, Worker, WorkerOptions, WorkerPool,
};
use statehouse_store::faulty::{FaultyStore, Odds};
use statehouse_store::{
    Clock, Commit, Entry, Ids, ManualClock, Migrate, ModelStore, Plan, Position, Random, Scan, Schema, Step,
    Store, StoreError, Tenant, Time,
};

const SECOND: Duration = Duration::from_secs(1);
const LEASE: Duration = Duration::from_secs(9);

/// A worker that does what its list says, and notes who did it when.
#[derive(Debug)]
struct Clerk {
    shards: u32,
    /// By shard: what the next steps return. Afterwards there is nothing to do.
    script: Mutex<BTreeMap<u32, Vec<Turn>>>,
    /// Shard, epoch and time of every step.
    notes: Mutex<Vec<(u32, i64, Time)>>,
    under_way: AtomicUsize,
}

#[derive(Clone, Debug)]
enum Turn {
    Did(usize, NextStep),
    Fails(StoreError),
    Panics,
    /// Takes this long.
    Takes(Duration),
}

impl Clerk {
    fn of(shards: u32) -> Arc<Clerk> {
        Arc::new(Clerk {
            shards,
            script: Mutex::default(),
            notes: Mutex::default(),
            under_way: AtomicUsize::new(0),
        })
    }

    fn will(&self, shard: u32, turns: impl IntoIterator<Item = Turn>) {
        let mut turns: Vec<Turn> = turns.into_iter().collect();
        turns.reverse();
        self.script.lock().unwrap().insert(shard, turns);
    }

    fn times(&self, shard: u32) -> Vec<i64> {
        let notes = self.notes.lock().unwrap();
        notes.iter().filter(|note| note.0 == shard).map(|note| note.2.micros() / 1_000).collect()
    }
}

#[async_trait]
impl Worker for Clerk {
    fn name(&self) -> &str {
        "clerk.work"
    }

    fn shards(&self) -> u32 {
        self.shards
    }

    async fn step(&self, context: &StepContext<'_>, limit: usize) -> Result<StepProgress, StoreError> {
        assert_eq!(limit, 7);
        self.notes.lock().unwrap().push((context.shard, context.held.epoch(), context.clock.now()));
        let turn = self.script.lock().unwrap().get_mut(&context.shard).and_then(Vec::pop);
        match turn {
            None => Ok(StepProgress::idle()),
            Some(Turn::Did(rows, next)) => Ok(StepProgress { rows, next, ..StepProgress::idle() }),
            Some(Turn::Fails(error)) => Err(error),
            Some(Turn::Panics) => panic!("as the script says"),
            Some(Turn::Takes(span)) => {
                self.under_way.fetch_add(1, Ordering::SeqCst);
                context.clock.sleep(span).await;
                self.under_way.fetch_sub(1, Ordering::SeqCst);
                Ok(StepProgress { rows: 1, ..StepProgress::idle() })
            }
        }
    }
}

/// A store and a clock, and as many processes over them as a test starts.
struct WorkerCluster {
    store: Arc<dyn Store>,
    clock: ManualClock,
    tenant: Tenant,
}

impl WorkerCluster {
    async fn new() -> WorkerCluster {
        let clock = ManualClock::at(Time::from_micros(0));
        WorkerCluster::over(Arc::new(ModelStore::with(Arc::new(clock.clone()), 4)), clock).await
    }

    async fn over(store: Arc<dyn Store>, clock: ManualClock) -> WorkerCluster {
        store.migrate(&Schema::new(system::tables().unwrap()).unwrap(), Migrate::Apply).await.unwrap();
        WorkerCluster { store, clock, tenant: system::tenant().unwrap() }
    }

    fn start(&self, seed: u64, clerk: &Arc<Clerk>) -> (WorkerPool, Arc<WakeupHub>) {
        self.start_all(seed, vec![clerk.clone()])
    }

    /// A process that runs several workers.
    fn start_all(&self, seed: u64, workers: Vec<Arc<dyn Worker>>) -> (WorkerPool, Arc<WakeupHub>) {
        let wakeups = Arc::new(WakeupHub::of(&workers));
        let premises = PoolConfig {
            store: self.store.clone(),
            clock: Arc::new(self.clock.clone()),
            ids: Ids::new(Arc::new(self.clock.clone()), Random::seeded(seed)),
            egress: Egress::default(),
            wakeups: wakeups.clone(),
            leases: system::leases().unwrap(),
            tenant: self.tenant.clone(),
        };
        let options = WorkerOptions {
            lease: LEASE,
            step_rows: 7,
            random: Random::seeded(seed),
            ..WorkerOptions::default()
        };
        (WorkerPool::start(premises, workers, options), wakeups)
    }

    /// Lets time pass in small steps, and everybody do what they can do by then.
    async fn pass(&self, span: Duration) {
        let grain = Duration::from_millis(if span > 2 * LEASE { 100 } else { 10 });
        for _ in 0..span.as_millis() / grain.as_millis() {
            self.clock.advance(grain);
            rest().await;
        }
    }

    async fn leases(&self, scope: &str) -> Vec<(Option<String>, i64)> {
        let rows = self.store.scan(&Scan::all(&system::leases().unwrap())).await.unwrap().rows;
        let held =
            |row: &statehouse_store::Row| (row.text("holder").map(str::to_owned), row.int("epoch").unwrap());
        rows.iter().filter(|row| row.text("scope") == Some(scope)).map(held).collect()
    }
}

async fn rest() {
    for _ in 0..30 {
        tokio::task::yield_now().await;
    }
}

fn held(crew: &WorkerPool) -> u64 {
    crew.stats()[0].held
}

#[tokio::test]
async fn one_process_does_all_the_work() {
    let cluster = WorkerCluster::new().await;
    let clerk = Clerk::of(3);
    // More at once, more at a time, and nothing known.
    let at = Time::from_micros(500_000);
    clerk
        .will(0, [Turn::Did(7, NextStep::Now), Turn::Did(3, NextStep::At(at)), Turn::Did(1, NextStep::Idle)]);
    let (crew, _) = cluster.start(1, &clerk);
    rest().await;
    cluster.pass(SECOND).await;
    assert_eq!(held(&crew), 3);
    let times = clerk.times(0);
    assert_eq!(times[..2], [0, 0]);
    assert_eq!(times[2], 500, "{times:?}");
    assert!(clerk.times(1).len() >= 5 && clerk.times(2).len() >= 5);
    let figures = &crew.stats()[0];
    assert_eq!(
        (figures.worker.as_str(), figures.shards, figures.rows, figures.errors),
        ("clerk.work", 3, 11, 0)
    );
    // Pauses grow, to a second.
    cluster.pass(10 * SECOND).await;
    let late = clerk.times(1).iter().filter(|time| **time > 5_000).count();
    assert!((4..=8).contains(&late), "{:?}", clerk.times(1));
    crew.stop().await;
    assert!(
        cluster
            .leases("worker.clerk.work")
            .await
            .iter()
            .all(|(holder, epoch)| holder.is_none() && *epoch == 1)
    );
    assert_eq!(cluster.leases("members").await, []);
}

#[tokio::test]
async fn processes_share_the_work_and_take_over() {
    let cluster = WorkerCluster::new().await;
    let clerk = Clerk::of(5);
    let (first, _) = cluster.start(1, &clerk);
    cluster.pass(SECOND).await;
    assert_eq!(held(&first), 5);
    let (second, _) = cluster.start(2, &clerk);
    cluster.pass(LEASE).await;
    let mut shares = [held(&first), held(&second)];
    shares.sort_unstable();
    assert_eq!(shares, [2, 3], "each has its share, and together all");
    let (third, _) = cluster.start(3, &clerk);
    cluster.pass(2 * LEASE).await;
    assert_eq!(held(&first) + held(&second) + held(&third), 5);
    assert!([&first, &second, &third].iter().all(|crew| (1..=2).contains(&held(crew))));
    // Stopped, it hands its shards over at once; killed, they are taken when its leases have expired.
    second.stop().await;
    cluster.pass(LEASE / 2).await;
    assert_eq!(held(&first) + held(&third), 5);
    drop(first);
    cluster.pass(3 * LEASE).await;
    assert_eq!(held(&third), 5);
    // Members are not remembered for ever.
    cluster.pass(30 * LEASE).await;
    assert_eq!(cluster.leases("members").await.len(), 1);
    third.stop().await;
    // No two ever worked on a shard under the same epoch at the same time: within a shard, epochs never go back.
    let notes = clerk.notes.lock().unwrap();
    for shard in 0..5 {
        let epochs: Vec<i64> = notes.iter().filter(|note| note.0 == shard).map(|note| note.1).collect();
        assert!(epochs.is_sorted(), "{epochs:?}");
    }
}

/// A worker with nothing to do, that a newer blueprint has added.
#[derive(Debug)]
struct AddedWorker;

#[async_trait]
impl Worker for AddedWorker {
    fn name(&self) -> &str {
        "added.work"
    }

    fn shards(&self) -> u32 {
        6
    }

    async fn step(&self, _: &StepContext<'_>, _: usize) -> Result<StepProgress, StoreError> {
        Ok(StepProgress::idle())
    }
}

/// Processes with an older blueprint run beside one with a newer blueprint: they do not count for workers that they do not run.
#[tokio::test]
async fn a_worker_is_shared_by_the_processes_that_run_it() {
    let cluster = WorkerCluster::new().await;
    let clerk = Clerk::of(6);
    let (first, _) = cluster.start(1, &clerk);
    let (second, _) = cluster.start(2, &clerk);
    cluster.pass(LEASE).await;
    let (newer, _) = cluster.start_all(3, vec![clerk.clone(), Arc::new(AddedWorker)]);
    cluster.pass(2 * LEASE).await;
    let added = |pool: &WorkerPool| pool.stats()[1].held;
    assert_eq!([held(&first), held(&second), held(&newer)], [2, 2, 2]);
    assert_eq!(added(&newer), 6, "no other process runs it");
    let (other, _) = cluster.start_all(4, vec![Arc::new(AddedWorker)]);
    cluster.pass(2 * LEASE).await;
    assert_eq!(([held(&first), held(&second), held(&newer)], held(&other)), ([2, 2, 2], 3));
    assert_eq!(added(&newer), 3);
    for pool in [first, second, newer, other] {
        pool.stop().await;
    }
}

#[tokio::test]
async fn a_step_under_way_is_finished_before_its_shard_is_given_up() {
    let cluster = WorkerCluster::new().await;
    let clerk = Clerk::of(2);
    clerk.will(0, [Turn::Takes(3 * LEASE)]);
    clerk.will(1, [Turn::Takes(3 * LEASE)]);
    let (first, _) = cluster.start(1, &clerk);
    cluster.pass(SECOND).await;
    let (second, _) = cluster.start(2, &clerk);
    // Both steps outlast several leases. They are renewed meanwhile, and no other process begins the same shard.
    cluster.pass(2 * LEASE).await;
    assert_eq!(clerk.under_way.load(Ordering::SeqCst), 2);
    assert_eq!((held(&second), clerk.notes.lock().unwrap().len()), (0, 2));
    cluster.pass(2 * LEASE).await;
    assert_eq!((held(&first), held(&second)), (1, 1));
    // Stopping waits for a step as well.
    clerk.will(0, [Turn::Takes(LEASE)]);
    clerk.will(1, [Turn::Takes(LEASE)]);
    cluster.pass(2 * SECOND).await;
    assert_eq!(clerk.under_way.load(Ordering::SeqCst), 2);
    let stopping = tokio::spawn(first.stop());
    cluster.pass(SECOND).await;
    assert!(!stopping.is_finished());
    cluster.pass(LEASE).await;
    assert!(stopping.is_finished());
    second.stop().await;
}

#[tokio::test]
async fn failures_are_tried_again_after_growing_pauses() {
    let cluster = WorkerCluster::new().await;
    let clerk = Clerk::of(2);
    let down = Turn::Fails(StoreError::unavailable("the script says so"));
    clerk.will(0, std::iter::repeat_n(down, 6));
    clerk.will(1, [Turn::Panics]);
    let (crew, _) = cluster.start(1, &clerk);
    cluster.pass(15 * SECOND).await;
    let times = clerk.times(0);
    let pauses: Vec<i64> = times.windows(2).take(6).map(|pair| pair[1] - pair[0]).collect();
    assert!(
        pauses.iter().zip([50, 100, 200, 400, 800, 1600]).all(|(pause, least)| *pause >= least),
        "{pauses:?}"
    );
    assert!(times.len() > 7, "it goes on afterwards: {times:?}");
    assert!(clerk.times(1).len() > 5, "a panic ends a step, not the work");
    let figures = &crew.stats()[0];
    assert_eq!((figures.errors, held(&crew)), (7, 2));
    assert!(figures.last_error.is_some());
    crew.stop().await;
}

#[tokio::test]
async fn a_write_of_something_due_wakes_its_worker() {
    let cluster = WorkerCluster::new().await;
    let clerk = Clerk::of(2);
    let (crew, wakeups) = cluster.start(1, &clerk);
    // Asleep for a second each, by now.
    cluster.pass(10 * SECOND).await;
    let steps = clerk.times(1).len();
    let at = cluster.clock.now().plus(Duration::from_millis(50));
    wakeups.notify(&Wakeup { worker: "clerk.work".into(), shard: 0, at });
    wakeups.notify(&Wakeup { worker: "clerk.work".into(), shard: 9, at });
    wakeups.notify(&Wakeup { worker: "unknown".into(), shard: 0, at });
    cluster.pass(Duration::from_millis(50)).await;
    assert_eq!(clerk.times(0).last(), Some(&(at.micros() / 1_000)));
    assert!(clerk.times(1).len() <= steps + 1, "the other shard sleeps on");
    crew.stop().await;
}

#[tokio::test]
async fn the_log_wakes_workers_that_wait_for_it() {
    let cluster = WorkerCluster::new().await;
    let clerk = Clerk::of(1);
    let tenant = Tenant::new("acme").unwrap();
    let partition = statehouse_store::log::partition_of(&tenant, "thing", "1", 4);
    let wait = |offset| Turn::Did(0, NextStep::Log(Position { partition, offset }));
    clerk.will(0, [wait(0), wait(1), wait(1)]);
    let (crew, _) = cluster.start(1, &clerk);
    cluster.pass(Duration::from_millis(300)).await;
    assert_eq!(clerk.times(0).len(), 1);
    let note = Plan::of(&tenant, "note").log(Entry::about("thing", "1")).build().unwrap();
    cluster.store.commit(&note).await.unwrap();
    rest().await;
    assert_eq!(clerk.times(0).len(), 2, "woken at once");
    cluster.pass(Duration::from_millis(300)).await;
    assert_eq!(clerk.times(0).len(), 2, "and not again for the same record");
    crew.stop().await;
}

/// A process that was paused for longer than its lease goes on as if nothing had happened; its guard stops it.
#[tokio::test]
async fn a_stale_process_is_fenced() {
    #[derive(Debug)]
    struct Paused(Mutex<Vec<Step>>);
    #[async_trait]
    impl Worker for Paused {
        fn name(&self) -> &str {
            "paused"
        }
        fn shards(&self) -> u32 {
            1
        }
        async fn step(&self, context: &StepContext<'_>, _: usize) -> Result<StepProgress, StoreError> {
            self.0.lock().unwrap().push(context.guard());
            Ok(StepProgress::idle())
        }
    }
    let cluster = WorkerCluster::new().await;
    let worker = Arc::new(Paused(Mutex::default()));
    let start = |seed: u64| {
        let as_worker: Arc<dyn Worker> = worker.clone();
        let premises = PoolConfig {
            store: cluster.store.clone(),
            clock: Arc::new(cluster.clock.clone()),
            ids: Ids::new(Arc::new(cluster.clock.clone()), Random::seeded(seed)),
            egress: Egress::default(),
            wakeups: Arc::new(WakeupHub::of([&as_worker])),
            leases: system::leases().unwrap(),
            tenant: cluster.tenant.clone(),
        };
        WorkerPool::start(
            premises,
            vec![as_worker],
            WorkerOptions { lease: LEASE, ..WorkerOptions::default() },
        )
    };
    let guarded = async |guard: Step| {
        let plan = Plan::of(&cluster.tenant, "effect").step(guard).build().unwrap();
        matches!(cluster.store.commit(&plan).await.unwrap(), Commit::Applied(_))
    };
    let first = start(1);
    cluster.pass(SECOND).await;
    let early = worker.0.lock().unwrap()[0].clone();
    assert!(guarded(early.clone()).await);
    drop(first);
    let second = start(2);
    cluster.pass(3 * LEASE).await;
    let late = worker.0.lock().unwrap().last().unwrap().clone();
    assert!(!guarded(early).await, "the shard has another epoch by now");
    assert!(guarded(late.clone()).await);
    second.stop().await;
    assert!(!guarded(late).await, "and after the release no process holds it");
}

/// Every process loses answers and reaches the store only sometimes; the work is still shared and done.
#[tokio::test]
async fn a_bad_world_does_not_stop_the_work() {
    let clock = ManualClock::at(Time::from_micros(0));
    let model: Arc<dyn Store> = Arc::new(ModelStore::with(Arc::new(clock.clone()), 4));
    let faulty = Arc::new(FaultyStore::over(model, Arc::new(clock.clone()), Odds::default(), 11));
    let cluster = WorkerCluster::over(faulty.clone(), clock).await;
    faulty.set_odds(Odds { unknown_before: 0.05, unknown_after: 0.1, unavailable: 0.1, ..Odds::default() });
    let clerk = Clerk::of(4);
    let crews = [cluster.start(1, &clerk).0, cluster.start(2, &clerk).0];
    cluster.pass(60 * SECOND).await;
    let achieved = faulty.achieved();
    assert!(achieved.unknown_after > 0 && achieved.unavailable > 0, "{achieved}");
    faulty.set_odds(Odds::default());
    cluster.pass(3 * LEASE).await;
    assert_eq!(crews.iter().map(held).collect::<Vec<_>>(), [2, 2]);
    let before = clerk.notes.lock().unwrap().len();
    cluster.pass(5 * SECOND).await;
    assert!(clerk.notes.lock().unwrap().len() >= before + 16);
    for crew in crews {
        crew.stop().await;
    }
}

/// A release takes a while, and meanwhile other steps end: theirs are released all the same (W4).
#[tokio::test]
async fn shards_whose_steps_end_while_others_are_released_are_released_too() {
    let clock = ManualClock::at(Time::from_micros(0));
    let model: Arc<dyn Store> = Arc::new(ModelStore::with(Arc::new(clock.clone()), 4));
    let slow = Arc::new(FaultyStore::over(model, Arc::new(clock.clone()), Odds::default(), 3));
    let cluster = WorkerCluster::over(slow.clone(), clock).await;
    let clerk = Clerk::of(6);
    for shard in 0..6 {
        clerk.will(shard, [Turn::Takes(SECOND + Duration::from_millis(20) * shard)]);
    }
    let (crew, _) = cluster.start(1, &clerk);
    cluster.pass(SECOND / 2).await;
    assert_eq!(clerk.under_way.load(Ordering::SeqCst), 6);
    slow.set_odds(Odds { delay: 1.0, delay_at_most: SECOND / 2, ..Odds::default() });
    tokio::join!(crew.stop(), cluster.pass(LEASE / 2));
    slow.set_odds(Odds::default());
    assert_eq!(cluster.leases("worker.clerk.work").await, vec![(None, 1); 6]);
    assert_eq!(cluster.leases("members").await, []);
}
