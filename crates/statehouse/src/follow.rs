//! The one reader of the log in a process, and what it hands on.
//!
//! Many want to know what was written: the cache, every event stream, every caller who waits for a row to change. If
//! each of them read the log, every write would be read as often as there are listeners. So one follower reads it, tells
//! the cache, and keeps the newest records in a [`Tail`] of bounded size for the others.
//!
//! - F1. *Nothing is passed over.* A window of the tail is a run of offsets without a gap. A listener before it is
//!   informed ([`TailRead::Behind`]), reads the store, and meets the window later.
//! - F2. *The cache first.* A record is handed on after the cache has forgotten what it is about. Who reads on hearing of
//!   a write never gets what was there before.
//! - F3. *Bounded.* The tail holds so many bytes and no more, and nothing at all without listeners.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use serde_json::Value as Json;
use statehouse_store::limits::PAGE_MAX;
use statehouse_store::{Clock, Record, Store, StoreError};
use tokio::sync::watch;

use crate::cache::Cache;

/// What the tail holds at most.
const BYTES_MAX: usize = 8 << 20;
/// What a record weighs besides its contents.
const RECORD_BYTES: usize = 400;
/// A pass over so many records means that more come all the time.
const MANY: usize = 16;
/// The follower's pause after such a pass: to read many records at once costs little more than to read a few.
const GATHER: Duration = Duration::from_millis(5);
/// How long the follower waits for news before it confirms that there are none.
const WAIT: Duration = Duration::from_secs(1);
/// The follower's pause after the store failed.
const PAUSE: Duration = Duration::from_millis(250);

/// The newest records of the log, for those who listen.
#[derive(Debug)]
pub struct Tail {
    windows: Mutex<Windows>,
    listeners: AtomicUsize,
    /// Raised whenever the follower has got further.
    news: watch::Sender<u64>,
}

#[derive(Debug)]
struct Windows {
    partitions: Vec<Window>,
    /// The partitions of all records that are held, in the order in which they came.
    order: VecDeque<usize>,
    bytes: usize,
}

#[derive(Debug, Default)]
struct Window {
    /// The follower's place: the offset of the newest record it has seen.
    reached: u64,
    /// The records up to there.
    records: VecDeque<(Arc<Record>, usize)>,
}

/// What follows an offset.
#[derive(Clone, Debug, PartialEq)]
pub enum TailRead {
    /// These records, and perhaps more after them.
    Records(Vec<Arc<Record>>),
    /// Nothing that the follower has seen.
    Nothing,
    /// More than the tail holds: read the store.
    Behind,
}

/// A listener, until this is dropped.
#[derive(Debug)]
pub struct Listener {
    tail: Arc<Tail>,
    news: watch::Receiver<u64>,
}

impl Tail {
    /// An empty tail of a log with so many partitions.
    pub fn of(partitions: u32) -> Tail {
        let partitions = (0..partitions).map(|_| Window::default()).collect();
        let windows = Windows { partitions, order: VecDeque::new(), bytes: 0 };
        Tail { windows: Mutex::new(windows), listeners: AtomicUsize::new(0), news: watch::Sender::new(0) }
    }

    /// Begins to listen. What is written from now on is heard.
    pub fn listen(self: &Arc<Tail>) -> Listener {
        self.listeners.fetch_add(1, Ordering::SeqCst);
        Listener { tail: self.clone(), news: self.news.subscribe() }
    }

    /// How many listen.
    pub fn listeners(&self) -> usize {
        self.listeners.load(Ordering::SeqCst)
    }

    fn windows(&self) -> MutexGuard<'_, Windows> {
        self.windows.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The follower has got to this offset without records to hand on: it begins here, or has lost its place.
    fn jump(&self, partition: usize, offset: u64) {
        self.windows().jump(partition, offset);
    }

    /// The follower has read these records, which follow its place.
    fn push(&self, partition: usize, records: Vec<Record>) {
        let mut windows = self.windows();
        let last = records.last().and_then(|record| record.position).map(|position| position.offset);
        if self.listeners() == 0 {
            if let Some(last) = last {
                windows.jump(partition, last);
            }
            return;
        }
        for record in records {
            windows.push(partition, record);
        }
    }

    /// Tells all who listen that there may be something.
    fn announce(&self) {
        self.news.send_modify(|passes| *passes += 1);
    }
}

impl Windows {
    fn jump(&mut self, partition: usize, offset: u64) {
        let Some(window) = self.partitions.get_mut(partition) else { return };
        window.reached = offset;
        if !window.records.is_empty() {
            self.bytes -= window.records.drain(..).map(|(_, bytes)| bytes).sum::<usize>();
            self.order.retain(|other| *other != partition);
        }
    }

    fn push(&mut self, partition: usize, record: Record) {
        let (Some(window), Some(position)) = (self.partitions.get_mut(partition), record.position) else {
            return;
        };
        let bytes = weight(&record);
        window.reached = position.offset;
        window.records.push_back((Arc::new(record), bytes));
        self.order.push_back(partition);
        self.bytes += bytes;
        while self.bytes > BYTES_MAX
            && let Some(oldest) = self.order.pop_front()
        {
            let dropped = self.partitions.get_mut(oldest).and_then(|window| window.records.pop_front());
            self.bytes -= dropped.map_or(0, |(_, bytes)| bytes);
        }
    }
}

impl Listener {
    /// The follower's place in each partition. What is not yet visible to a read that begins now lies above it.
    pub fn reached(&self) -> Vec<u64> {
        self.tail.windows().partitions.iter().map(|window| window.reached).collect()
    }

    /// Up to `limit` records of a partition after an offset.
    pub fn after(&self, partition: usize, seen: u64, limit: usize) -> TailRead {
        let windows = self.tail.windows();
        let Some(window) = windows.partitions.get(partition) else { return TailRead::Nothing };
        if seen >= window.reached {
            return TailRead::Nothing;
        }
        // A window has no gaps, so the number of its records says where it begins (F1).
        let missing = usize::try_from(window.reached - seen).unwrap_or(usize::MAX);
        match window.records.len().checked_sub(missing) {
            None => TailRead::Behind,
            Some(start) => {
                let records = window.records.iter().skip(start).take(limit);
                TailRead::Records(records.map(|(record, _)| record.clone()).collect())
            }
        }
    }

    /// Returns when the follower has got further since the last time this returned.
    pub async fn news(&mut self) {
        // The tail lives as long as this, so its sender does too.
        let _ = self.news.changed().await;
    }
}

impl Drop for Listener {
    fn drop(&mut self) {
        self.tail.listeners.fetch_sub(1, Ordering::SeqCst);
    }
}

/// About what a record takes in memory.
fn weight(record: &Record) -> usize {
    let events = record.events.iter().map(|event| event.name.len() + json_weight(&event.data));
    RECORD_BYTES + record.key.len() + record.operation.len() + events.sum::<usize>()
}

fn json_weight(value: &Json) -> usize {
    let inside = match value {
        Json::String(text) => text.len(),
        Json::Array(items) => items.iter().map(json_weight).sum(),
        Json::Object(fields) => fields.iter().map(|(name, value)| name.len() + 64 + json_weight(value)).sum(),
        _ => 0,
    };
    inside + size_of::<Json>()
}

/// Follows the log for ever.
pub(crate) async fn follow(store: Arc<dyn Store>, clock: Arc<dyn Clock>, cache: Arc<Cache>, tail: Arc<Tail>) {
    let mut seen = None;
    loop {
        match follow_once(&*store, &*clock, &cache, &tail, &mut seen).await {
            Ok(records) if records >= MANY => clock.sleep(GATHER).await,
            Ok(_) => {}
            Err(_) => clock.sleep(PAUSE).await,
        }
    }
}

/// Reads what is new in the log, hands it on, confirms to the cache that there is nothing else, and returns how many
/// records there were.
pub(crate) async fn follow_once(
    store: &dyn Store,
    clock: &dyn Clock,
    cache: &Cache,
    tail: &Tail,
    seen: &mut Option<Vec<u64>>,
) -> Result<usize, StoreError> {
    let (heads, seen) = match seen {
        // The cache is empty and gives out no ticket before the first confirmation, so what was written before these
        // heads does not matter.
        None => {
            let heads = store.wait_log(&[], Duration::ZERO).await?;
            for (partition, head) in heads.iter().enumerate() {
                tail.jump(partition, *head);
            }
            (heads.clone(), seen.insert(heads))
        }
        Some(seen) => (store.wait_log(seen, WAIT).await?, seen),
    };
    let heads_at = clock.now();
    let (mut news, mut count) = (false, 0);
    for (partition, (head, seen)) in heads.iter().zip(seen.iter_mut()).enumerate() {
        while *seen < *head {
            let page = store.read_log(u32::try_from(partition).unwrap_or(0), *seen, PAGE_MAX).await?;
            if page.oldest > *seen + 1 {
                cache.discard_all();
                tail.jump(partition, page.oldest.saturating_sub(1));
            }
            count += page.records.len();
            cache.discard_subjects(&page.records);
            let last = page.records.last().and_then(|record| record.position);
            *seen = last.map_or(*head, |position| position.offset);
            match last {
                Some(_) => tail.push(partition, page.records),
                None => tail.jump(partition, *seen),
            }
            news = true;
        }
        cache.reach(partition, *seen);
    }
    cache.confirm(heads_at);
    if news {
        tail.announce();
    }
    Ok(count)
}

#[cfg(test)]
mod tests {
    use super::*;
    use statehouse_store::{Entry, ModelStore, Plan, SystemClock, Tenant};

    struct Log {
        store: ModelStore,
        cache: Cache,
        tail: Arc<Tail>,
        seen: Option<Vec<u64>>,
        partition: usize,
        written: usize,
    }

    impl Log {
        async fn new() -> Log {
            let store = ModelStore::new();
            let tenant = Tenant::new("acme").unwrap();
            let partitions = store.partitions();
            let partition = statehouse_store::log::partition_of(&tenant, "thing", "x", partitions) as usize;
            let cache = Cache::holding(1 << 20, partitions, Arc::new(SystemClock));
            let tail = Arc::new(Tail::of(partitions));
            let mut log = Log { store, cache, tail, seen: None, partition, written: 0 };
            log.step().await;
            log
        }

        async fn write(&mut self, key: &str) {
            self.written += 1;
            let plan = Plan::of(&Tenant::new("acme").unwrap(), format!("op {}", self.written));
            let entry = Entry::about("thing", "x")
                .event(statehouse_store::EventTemplate::named("thing.updated").with("key", key));
            self.store.commit(&plan.log(entry).build().unwrap()).await.unwrap();
        }

        async fn step(&mut self) {
            follow_once(&self.store, &SystemClock, &self.cache, &self.tail, &mut self.seen).await.unwrap();
        }

        fn offsets(&self, listener: &Listener, seen: u64) -> Option<Vec<u64>> {
            match listener.after(self.partition, seen, 100) {
                TailRead::Behind => None,
                TailRead::Nothing => Some(Vec::new()),
                TailRead::Records(records) => {
                    Some(records.iter().map(|record| record.position.unwrap().offset).collect())
                }
            }
        }
    }

    #[tokio::test]
    async fn a_subscriber_gets_later_records_and_one_that_lags_is_told() {
        let mut log = Log::new().await;
        log.write("before").await;
        log.step().await;
        let mut listener = log.tail.listen();
        assert_eq!(listener.reached()[log.partition], 1);
        assert_eq!(log.offsets(&listener, 0), None);
        assert_eq!(log.offsets(&listener, 1), Some(vec![]));
        log.write("after").await;
        log.write("after").await;
        log.step().await;
        listener.news().await;
        assert_eq!(log.offsets(&listener, 1), Some(vec![2, 3]));
        assert_eq!(log.offsets(&listener, 2), Some(vec![3]));
        // One who has read the store further than the follower has is not behind.
        assert_eq!(log.offsets(&listener, 9), Some(vec![]));
        assert_eq!(log.offsets(&listener, 0), None);
    }

    #[tokio::test]
    async fn without_subscribers_nothing_is_kept_and_never_more_than_the_bound() {
        let mut log = Log::new().await;
        let listener = log.tail.listen();
        let large = "x".repeat(300_000);
        for (written, seen) in [(20, Some((1..=20).collect())), (40, None)] {
            while log.written < written {
                log.write(&large).await;
            }
            log.step().await;
            assert_eq!(log.offsets(&listener, 0), seen);
        }
        assert_eq!(log.offsets(&listener, 38), Some(vec![39, 40]));
        assert!((BYTES_MAX / 2..=BYTES_MAX).contains(&log.tail.windows().bytes));
        drop(listener);
        log.write("x").await;
        log.step().await;
        assert_eq!((log.tail.windows().bytes, log.tail.listeners()), (0, 0));
        assert_eq!(log.offsets(&log.tail.listen(), 40), None);
    }

    #[tokio::test]
    async fn a_trimmed_log_leaves_no_gap_in_a_window() {
        let mut log = Log::new().await;
        let listener = log.tail.listen();
        log.write("1").await;
        log.step().await;
        for _ in 0..3 {
            log.write("x").await;
        }
        log.store.trim_log(u32::try_from(log.partition).unwrap(), 3).await.unwrap();
        log.step().await;
        assert_eq!((log.offsets(&listener, 0), log.offsets(&listener, 3)), (None, Some(vec![4])));
    }
}
