//! Wakes reads that wait for a change of a row (`Prefer: wait`).
//!
//! One task reads the tail of the log and looks up the rows that the records are about. A waiting read therefore costs
//! nothing while other rows change. If the task falls behind the tail it wakes all waiting reads, which read their rows.

use std::collections::HashMap;
use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use statehouse::House;
use statehouse::follow::{Listener, TailRead};
use statehouse::house::subject_of;
use statehouse_store::{Record, Tenant};
use tokio::sync::{Notify, watch};

use crate::metrics::Metrics;

/// Log records per step.
const RECORDS_PER_STEP: usize = 256;

/// A row: tenant, resource and key text.
type RowName = (Tenant, String, String);

/// The rows that reads wait for.
#[derive(Clone)]
pub struct WaitHub {
    state: Arc<Mutex<HubState>>,
    metrics: Arc<Metrics>,
    stopping: watch::Receiver<bool>,
}

#[derive(Default)]
struct HubState {
    rows: HashMap<RowName, RowWaiters>,
    is_running: bool,
}

#[derive(Default)]
struct RowWaiters {
    changed: Arc<Notify>,
    count: usize,
}

/// A read that waits for a row, until this is dropped.
pub struct RowWait {
    hub: WaitHub,
    row: RowName,
    changed: Arc<Notify>,
}

impl WaitHub {
    /// A hub that stops with the server.
    pub fn new(metrics: Arc<Metrics>, stopping: watch::Receiver<bool>) -> WaitHub {
        WaitHub { state: Arc::default(), metrics, stopping }
    }

    fn lock(&self) -> MutexGuard<'_, HubState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Begins to wait for changes of a row. Changes from now on are reported.
    pub fn register(&self, house: &House, tenant: &Tenant, resource: &str, key: &str) -> RowWait {
        let row = (tenant.clone(), resource.to_owned(), key.to_owned());
        let mut state = self.lock();
        if !state.is_running {
            state.is_running = true;
            let listener = house.tail().listen();
            let offsets = listener.reached();
            tokio::spawn(self.clone().run(listener, offsets));
        }
        let waiters = state.rows.entry(row.clone()).or_default();
        waiters.count += 1;
        let changed = waiters.changed.clone();
        drop(state);
        RowWait { hub: self.clone(), row, changed }
    }

    /// Reports changes until the server stops, or until no read waits any more.
    async fn run(self, mut listener: Listener, mut offsets: Vec<u64>) {
        let mut stopping = self.stopping.clone();
        loop {
            for (partition, offset) in offsets.iter_mut().enumerate() {
                self.dispatch(&listener, partition, offset);
            }
            {
                let mut state = self.lock();
                if state.rows.is_empty() || *stopping.borrow() {
                    state.is_running = false;
                    return;
                }
            }
            tokio::select! {
                () = listener.news() => {}
                _ = stopping.changed() => {}
            }
        }
    }

    /// Wakes the reads whose rows the records after an offset are about.
    fn dispatch(&self, listener: &Listener, partition: usize, offset: &mut u64) {
        loop {
            match listener.after(partition, *offset, RECORDS_PER_STEP) {
                TailRead::Nothing => return,
                TailRead::Behind => {
                    *offset = listener.reached().get(partition).copied().unwrap_or(u64::MAX);
                    self.wake(self.lock().rows.values());
                }
                TailRead::Records(records) => {
                    for record in &records {
                        self.wake_for(record);
                    }
                    let last = records.last().and_then(|record| record.position);
                    *offset = last.map_or(u64::MAX, |position| position.offset);
                }
            }
        }
    }

    fn wake_for(&self, record: &Record) {
        let state = self.lock();
        if state.rows.is_empty() {
            return;
        }
        let subjects = record.events.iter().filter_map(|event| subject_of(record, event));
        let rows = subjects.filter_map(|(resource, key)| {
            state.rows.get(&(record.tenant.clone(), resource.to_owned(), key.to_owned()))
        });
        self.wake(rows);
    }

    fn wake<'w>(&self, rows: impl Iterator<Item = &'w RowWaiters>) {
        for row in rows {
            self.metrics.wait_wakeups.fetch_add(row.count as u64, Ordering::Relaxed);
            row.changed.notify_waiters();
        }
    }
}

impl RowWait {
    /// Resolves at the next change. Changes are seen from the creation of this future on.
    pub fn changed(&self) -> tokio::sync::futures::Notified<'_> {
        self.changed.notified()
    }
}

impl Drop for RowWait {
    fn drop(&mut self) {
        let mut state = self.hub.lock();
        if let Some(waiters) = state.rows.get_mut(&self.row) {
            waiters.count -= 1;
            if waiters.count == 0 {
                state.rows.remove(&self.row);
            }
        }
    }
}
