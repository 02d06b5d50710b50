//! The reads of a group: its progress and lag, and polls.

use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use serde_json::{Value as Json, json};
use statehouse_store::limits::PAGE_MAX;
use statehouse_store::table::VERSION;
use statehouse_store::{Record, Tenant};

use super::super::offset_of;
use super::super::parking::ParkedRows;
use super::super::progress::{GroupProgress, LOG_PARTITION, MISSED, PARKED_COUNT, REACHED};
use super::{AFTER, BEHIND_MAX, GroupSpec, LIMIT, POLL_DEFAULT, POLL_PAGES, WAIT_MS, shown};
use crate::action::{ActionContext, Answer, Call, Code, Read, Refusal};
use crate::infra::lease::{EPOCH, EXPIRES_AT, HOLDER};

/// What is read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum GroupQuery {
    One,
    All,
    Poll,
}

pub(super) struct GroupRead {
    pub(super) group: Arc<GroupSpec>,
    pub(super) look: GroupQuery,
}

#[async_trait]
impl Read for GroupRead {
    async fn read(&self, call: &Call, cx: &ActionContext<'_>) -> Result<Arc<Answer>, Refusal> {
        let answer = match self.look {
            GroupQuery::Poll => self.poll(call, cx).await?,
            GroupQuery::One => {
                let partition = self.group.partition(call, cx.store)?;
                Answer::row(self.read_status(&call.tenant, partition, cx).await?)
            }
            GroupQuery::All => {
                let mut all = Vec::new();
                for partition in 0..cx.store.partitions() {
                    all.push(self.read_status(&call.tenant, partition, cx).await?);
                }
                Answer::row(json!(all))
            }
        };
        Ok(Arc::new(answer))
    }
}

impl GroupRead {
    /// How far the group has got, and what lies ahead of it.
    async fn read_status(
        &self,
        tenant: &Tenant,
        partition: u32,
        cx: &ActionContext<'_>,
    ) -> Result<Json, Refusal> {
        let row = self.group.row(tenant, partition, cx.store).await?;
        let reached = GroupProgress::of(row.as_ref())?.reached;
        let page = cx.store.read_log(partition, reached, PAGE_MAX).await?;
        let ahead: Vec<&Record> =
            page.records.iter().filter(|record| self.group.delivery(tenant, record).is_some()).collect();
        let last = page.records.last().map_or(reached.max(page.head), offset_of);
        let behind = ahead.first().map_or(Duration::ZERO, |record| cx.clock.now().since(record.at));
        let mut body = match &row {
            Some(row) => shown(&row.to_json()),
            None => json!({
                LOG_PARTITION: partition, REACHED: 0, PARKED_COUNT: 0, HOLDER: null, EPOCH: 0, EXPIRES_AT: null,
                VERSION: 0,
            }),
        };
        let missed = if row.is_some() { page.oldest.saturating_sub(reached + 1) } else { 0 };
        if let Some(fields) = body.as_object_mut() {
            fields.insert("head".into(), page.head.into());
            let more = page.head.saturating_sub(last);
            fields.insert("lag_records".into(), (ahead.len() as u64 + more).into());
            fields.insert("lag_ms".into(), u64::try_from(behind.as_millis()).unwrap_or(u64::MAX).into());
            fields.insert(MISSED.into(), missed.into());
        }
        Ok(body)
    }

    async fn poll(&self, call: &Call, cx: &ActionContext<'_>) -> Result<Answer, Refusal> {
        let partition = self.group.partition(call, cx.store)?;
        let row = self.group.row(&call.tenant, partition, cx.store).await?;
        let (holder, epoch) = (call.input.text(HOLDER), call.input.int(EPOCH));
        if holder.is_some() || epoch.is_some() {
            let held = row.as_ref();
            let is_own = held.and_then(|row| row.text(HOLDER)) == holder
                && held.and_then(|row| row.int(EPOCH)) == epoch;
            if !is_own {
                let what = self.group.what(call);
                let message = format!("{what} is not the caller's, under this epoch: claim it again");
                return Err(Refusal::new(Code::NotHolder, message).at_version(row.as_ref()));
            }
        }
        let mark = GroupProgress::of(row.as_ref())?;
        let lot = match mark.parked {
            0 => ParkedRows::default(),
            _ => ParkedRows::read(cx.store, &call.tenant, &self.group.name, partition).await?,
        };
        let after = call.input.count(AFTER).unwrap_or(mark.reached);
        let limit = call.input.count(LIMIT).and_then(|limit| usize::try_from(limit).ok());
        let limit = limit.unwrap_or(POLL_DEFAULT);
        let wait = call.input.duration_ms(WAIT_MS).unwrap_or_default();
        let until = cx.clock.uptime() + wait;
        let mut found = PolledRecords { through: after, lot, ..PolledRecords::default() };
        if mark.parked > 0 {
            self.pass_over(call, partition, mark.reached, &mut found, cx).await?;
        }
        loop {
            self.look_on(call, partition, limit, &mut found, cx).await?;
            let left = until.saturating_sub(cx.clock.uptime());
            if !found.records.is_empty() || left.is_zero() {
                break;
            }
            let mut seen = vec![u64::MAX; cx.store.partitions() as usize];
            if let Some(seen) = seen.get_mut(partition as usize) {
                *seen = found.head;
            }
            cx.store.wait_log(&seen, left).await?;
        }
        let missed = if row.is_some() { found.oldest.saturating_sub(after + 1) } else { 0 };
        Ok(Answer::row(json!({
            "records": found.records, "reached": mark.reached, "through": found.through, "head": found.head,
            MISSED: missed,
        })))
    }

    /// Notes what is behind parked records between what was committed and where the poll begins: the keys of these records
    /// wait with them.
    async fn pass_over(
        &self,
        call: &Call,
        partition: u32,
        mut at: u64,
        found: &mut PolledRecords,
        cx: &ActionContext<'_>,
    ) -> Result<(), Refusal> {
        while at < found.through {
            let page = cx.store.read_log(partition, at, PAGE_MAX).await?;
            let Some(last) = page.records.last().map(offset_of) else { return Ok(()) };
            for record in page.records.iter().filter(|record| offset_of(record) <= found.through) {
                let delivery = self.group.delivery(&call.tenant, record);
                if let Some(delivery) = delivery.filter(|delivery| delivery.waits(&found.lot)) {
                    delivery.add_to(&mut found.lot);
                }
            }
            at = last;
        }
        Ok(())
    }

    /// Goes on through the log until there are enough records, or too many were passed over.
    async fn look_on(
        &self,
        call: &Call,
        partition: u32,
        limit: usize,
        found: &mut PolledRecords,
        cx: &ActionContext<'_>,
    ) -> Result<(), Refusal> {
        for _ in 0..POLL_PAGES {
            let page = cx.store.read_log(partition, found.through, PAGE_MAX).await?;
            (found.head, found.oldest) = (page.head, page.oldest);
            if page.records.is_empty() {
                return Ok(());
            }
            for record in &page.records {
                if let Some(delivery) = self.group.delivery(&call.tenant, record) {
                    let (waits, keys) = (delivery.waits(&found.lot), delivery.subjects().len());
                    let is_full = waits && found.behind > 0 && found.behind + keys > BEHIND_MAX;
                    if found.records.len() >= limit || is_full {
                        return Ok(());
                    }
                    if waits {
                        found.behind += keys;
                        delivery.add_to(&mut found.lot);
                    } else {
                        found.records.push(delivery.shown(cx.resources));
                    }
                }
                found.through = offset_of(record);
            }
        }
        Ok(())
    }
}

/// What a poll has found so far.
#[derive(Default)]
struct PolledRecords {
    records: Vec<Json>,
    /// What is parked, or will be when the records on the way are committed.
    lot: ParkedRows,
    /// Keys of records that are withheld, because an older one of theirs is parked.
    behind: usize,
    through: u64,
    head: u64,
    oldest: u64,
}
