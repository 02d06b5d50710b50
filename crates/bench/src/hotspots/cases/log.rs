//! Hotspots of `log`: partitions that many write to, and groups that fall behind.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use anyhow::Result;
use async_trait::async_trait;
use serde_json::json;
use statehouse::Request;
use statehouse::infra::log::{HandlerContext, HandlerError, HandlerWrite, RecordHandler};
use statehouse::worker::WorkerOptions;
use statehouse_store::Record;

use super::super::case::{CaseFigures, Compares, HotspotCase, Side, Trial, until};
use crate::site::request;

const CASE: HotspotCase = HotspotCase {
    archetype: "log",
    hotspot: "",
    operation: "one of 64 callers creates a row",
    compares: Compares::Switch,
    blueprint: "[entity.note]\nkey = { id = \"int\" }\nfields = { n = \"int\" }\nSETTINGS\n",
    sides: [Side::partitions("partitions=1", 1), Side::partitions("partitions=16", 16)],
    operations: 5_000,
    callers: 64,
    workload: |trial| Box::pin(trial_writes(trial)),
};

pub(super) const CASES: &[HotspotCase] = &[
    HotspotCase { hotspot: "hot partitions", ..CASE },
    HotspotCase {
        hotspot: "log I/O",
        operation: "a record is handled, of so many tenants",
        compares: Compares::Load,
        sides: [Side::level("1 tenant", 1), Side::level("16 tenants", 16)],
        workload: |trial| {
            let tenants = trial.side.level;
            Box::pin(handled(trial, Reads { tenants, ..Reads::default() }))
        },
        ..CASE
    },
    HotspotCase {
        hotspot: "lag buildup",
        operation: "a record that waits is handled",
        sides: [Side::level("one record in each plan", 1), Side::level("all that are offered", 1_000)],
        operations: 2_000,
        workload: |trial| {
            let taken = trial.side.level as usize;
            Box::pin(handled(trial, Reads { taken, ..Reads::default() }))
        },
        ..CASE
    },
    HotspotCase {
        hotspot: "rebalance churn",
        operation: "a record that waits is handled, by so many processes in turn",
        compares: Compares::Load,
        sides: [Side::level("1 process", 1), Side::level("4 processes", 4)],
        workload: |trial| {
            let processes = trial.side.level;
            Box::pin(handled(trial, Reads { processes, ..Reads::default() }))
        },
        ..CASE
    },
];

fn create(id: u64) -> Request {
    request("note.create", vec![], json!({"id": id, "n": 1}))
}

async fn trial_writes(trial: Trial) -> Result<CaseFigures> {
    trial.measure_calls(create).await
}

/// How records are written and handled.
struct Reads {
    tenants: u64,
    /// The most records of one plan.
    taken: usize,
    /// Processes that handle records, one after another.
    processes: u64,
}

impl Default for Reads {
    fn default() -> Reads {
        Reads { tenants: 1, taken: usize::MAX, processes: 1 }
    }
}

/// Passes records and counts them.
#[derive(Debug)]
struct CountingHandler {
    taken: usize,
    handled: Arc<AtomicU64>,
}

#[async_trait]
impl RecordHandler for CountingHandler {
    fn group(&self) -> &str {
        "bench"
    }

    async fn handle(&self, records: &[Record], _: &HandlerContext<'_>) -> Result<HandlerWrite, HandlerError> {
        let taken = records.len().min(self.taken);
        self.handled.fetch_add(taken as u64, Ordering::Relaxed);
        Ok(HandlerWrite::of(taken, Vec::new()))
    }
}

/// Writes records, and measures how fast a group in this process passes them.
async fn handled(trial: Trial, reads: Reads) -> Result<CaseFigures> {
    for tenant in 0..reads.tenants {
        let tenant = trial.observer.of_tenant(&format!("tenant-{tenant}"))?;
        let part = (0..trial.operations / reads.tenants).map(|id| vec![create(id)]);
        tenant.fill(part).await?;
    }
    let total = trial.operations / reads.tenants * reads.tenants;
    let handled = Arc::new(AtomicU64::new(0));
    let mut processes = Vec::new();
    for _ in 0..reads.processes {
        let handler = Arc::new(CountingHandler { taken: reads.taken, handled: handled.clone() });
        processes.push(trial.another(|house| house.with_consumer(handler)).await?);
    }
    let work = async {
        for (number, process) in (1..).zip(&processes) {
            process.house.start_workers(WorkerOptions::default());
            let share = total * number / reads.processes;
            until(|| async { Ok(handled.load(Ordering::Relaxed) >= share) }).await?;
            process.house.stop_workers().await;
        }
        Ok(())
    };
    trial.measure(total, work).await
}
