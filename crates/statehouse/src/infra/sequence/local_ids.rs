//! Numbers and ids for programs, drawn in the process: the store is asked once for thousands of them.
//!
//! Both lose what is left when the process ends, and neither ever gives out what another process, or an earlier life of this
//! one, has given out: what they draw from is theirs by a plan that was applied before they begin.

use std::sync::Arc;
use std::time::Duration;

use serde_json::{Map, Value as Json, json};
use statehouse_store::{Tenant, Time, Value};
use tokio::sync::Mutex;

use super::time::{LAYOUT, RESERVED_FROM, RESERVED_UNTIL, WORKER};
use super::time_id::{TimeIdGenerator, TimeIdLayout};
use crate::action::{Answer, Code, Refusal};
use crate::house::{House, Operation, Request};

/// Time-ordered ids of one worker, which is leased when the first id is drawn.
#[derive(Debug)]
pub struct TimeIds {
    house: Arc<House>,
    tenant: Tenant,
    name: String,
    holder: String,
    lease: Mutex<Option<LeasedWorkerId>>,
}

/// A worker id that this process leased.
#[derive(Debug)]
struct LeasedWorkerId {
    worker: i64,
    epoch: i64,
    generator: TimeIdGenerator,
}

impl TimeIds {
    /// Ids of the sequence of that name. The holder's name must be unique among programs, and the same program
    /// must not use it again after a restart.
    pub fn new(house: Arc<House>, tenant: &Tenant, name: &str, holder: &str) -> TimeIds {
        let (tenant, name, holder) = (tenant.clone(), name.to_owned(), holder.to_owned());
        TimeIds { house, tenant, name, holder, lease: Mutex::default() }
    }

    /// The next id. Asks the store only when a span is used up or over.
    pub async fn next(&self) -> Result<i64, Refusal> {
        let mut lease = self.lease.lock().await;
        let clock = self.house.clock();
        let drawn = lease.as_mut().and_then(|lease| lease.generator.next_id(clock.uptime()));
        if let Some(id) = drawn {
            return Ok(id);
        }
        let mut fresh = self.refill(lease.take()).await?;
        // The range was requested just now: it has ended only if the response took longer than the range lasts. An id of
        // its beginning is then valid as well.
        let id = fresh.generator.next_id(clock.uptime()).or_else(|| fresh.generator.next_id(Duration::ZERO));
        *lease = Some(fresh);
        id.ok_or_else(|| {
            Refusal::new(Code::OutOfRange, format!("the time has left the range of {}'s ids", self.name))
        })
    }

    /// A new span: for the worker id that this process has, or for another one, if it has lost it.
    async fn refill(&self, lease: Option<LeasedWorkerId>) -> Result<LeasedWorkerId, Refusal> {
        if let Some(lease) = lease {
            let input = json!({"holder": self.holder, "epoch": lease.epoch});
            match self.ask("reserve", vec![lease.worker.into()], input).await {
                Ok(lease) => return Ok(lease),
                Err(refusal) if matches!(refusal.code, Code::NotHolder | Code::Expired) => {}
                Err(refusal) => return Err(refusal),
            }
        }
        self.ask("lease", Vec::new(), json!({"holder": self.holder})).await
    }

    async fn ask(&self, action: &str, key: Vec<Value>, input: Json) -> Result<LeasedWorkerId, Refusal> {
        // Time passes while the store is asked, and is not lost by that.
        let started = self.house.clock().uptime();
        let answer = call(&self.house, &self.tenant, &self.name, action, key, input).await?;
        let lease = lease(&answer.body, started);
        lease.ok_or_else(|| Refusal::new(Code::Internal, format!("{}.{action} made no sense", self.name)))
    }

    /// Lets go of the worker id, so that another process need not wait for the lease to end.
    pub async fn release(&self) -> Result<(), Refusal> {
        let Some(lease) = self.lease.lock().await.take() else { return Ok(()) };
        let input = json!({"holder": self.holder, "epoch": lease.epoch});
        call(&self.house, &self.tenant, &self.name, "release", vec![lease.worker.into()], input).await?;
        Ok(())
    }
}

fn lease(row: &Json, started: Duration) -> Option<LeasedWorkerId> {
    let int = |from: &Json, name: &str| from.get(name).and_then(Json::as_i64);
    let time = |name: &str| row.get(name).and_then(Json::as_str).and_then(|text| text.parse::<Time>().ok());
    let bits = |name: &str| int(row.get(LAYOUT)?, name).and_then(|bits| u32::try_from(bits).ok());
    let layout = TimeIdLayout {
        epoch_ms: int(row.get(LAYOUT)?, "epoch_ms")?,
        worker_bits: bits("worker_bits")?,
        sequence_bits: bits("sequence_bits")?,
    };
    let (worker, epoch) = (int(row, WORKER)?, int(row, "epoch")?);
    let generator =
        TimeIdGenerator::new(layout, worker, time(RESERVED_FROM)?, time(RESERVED_UNTIL)?, started);
    Some(LeasedWorkerId { worker, epoch, generator })
}

async fn call(
    house: &House,
    tenant: &Tenant,
    name: &str,
    action: &str,
    key: Vec<Value>,
    input: Json,
) -> Result<Answer, Refusal> {
    let input = input.as_object().cloned().unwrap_or_else(Map::new);
    let request = Request { action: format!("{name}.{action}"), key, input, expected: None };
    house.call(tenant, request, Operation::default()).await
}

/// Numbers of one counter, from ranges that are leased one after another.
#[derive(Debug)]
pub struct RangeNumbers {
    house: Arc<House>,
    tenant: Tenant,
    name: String,
    key: Vec<Value>,
    holder: String,
    count: i64,
    range: Mutex<Option<LeasedRange>>,
}

/// What is left of a range.
#[derive(Debug)]
struct LeasedRange {
    next: i64,
    last: i64,
    /// On the clock that counts what has passed; what is left then is given up.
    deadline: Duration,
}

impl RangeNumbers {
    /// Numbers of the counter of that name and key, `count` at a time.
    pub fn new(
        house: Arc<House>,
        tenant: &Tenant,
        name: &str,
        key: Vec<Value>,
        holder: &str,
        count: i64,
    ) -> RangeNumbers {
        let (tenant, name, holder) = (tenant.clone(), name.to_owned(), holder.to_owned());
        RangeNumbers { house, tenant, name, key, holder, count, range: Mutex::default() }
    }

    /// The next number. Asks the store only when a range is used up or its lease is over.
    pub async fn next(&self) -> Result<i64, Refusal> {
        let mut range = self.range.lock().await;
        let uptime = || self.house.clock().uptime();
        if range.as_ref().is_none_or(|range| range.next > range.last || range.deadline <= uptime()) {
            let started = uptime();
            let input = json!({"holder": self.holder, "count": self.count});
            let answer =
                call(&self.house, &self.tenant, &self.name, "lease", self.key.clone(), input).await?;
            *range = leased(&answer.body, started);
        }
        let range = range.as_mut();
        let range = range.ok_or_else(|| Refusal::new(Code::Internal, "a lease without a range"))?;
        let number = range.next;
        range.next += 1;
        Ok(number)
    }
}

fn leased(row: &Json, started: Duration) -> Option<LeasedRange> {
    let int = |name: &str| row.get(name).and_then(Json::as_i64);
    let time = |name: &str| row.get(name).and_then(Json::as_str).and_then(|text| text.parse::<Time>().ok());
    let span = time("expires_at")?.since(time("leased_at")?);
    Some(LeasedRange { next: int("first")?, last: int("last")?, deadline: started + span })
}
