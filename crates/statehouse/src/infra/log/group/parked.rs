//! What a group has parked: reading, listing and settling it.

use std::sync::Arc;

use async_trait::async_trait;
use serde_json::{Value as Json, json};
use statehouse_store::guard::{column, now};
use statehouse_store::{Query, Reason, Step, Tenant, Value, bug};

use super::super::offset_of;
use super::super::parking::{self, LOG_OFFSET, PARKED_AT, ParkedRecord, ParkedRows, REASON, SUBJECT, TRIES};
use super::super::progress::{ConsumerTables, GroupProgress, LOG_PARTITION, PARKED_COUNT, UPDATED_AT};
use super::{GroupSpec, PROGRESS, SETTLED};
use crate::action::{
    ActionContext, Answer, Call, Code, PlanParts, Prepare, Prepared, Read, Refusal, RefusedStep, Verdict,
};
use crate::paging;
use crate::resource::key_text;
use crate::worker::Wakeup;

pub(super) struct ParkedRead {
    pub(super) group: Arc<GroupSpec>,
    pub(super) list: bool,
}

/// Rows of a list of all partitions.
const LISTED_MAX: usize = 200;

impl ParkedRead {
    /// The oldest of all partitions, as many as fit into one answer.
    async fn list_all(&self, call: &Call, cx: &ActionContext<'_>) -> Result<Arc<Answer>, Refusal> {
        let books = ConsumerTables::open()?;
        let mut rows = Vec::new();
        for partition in 0..cx.store.partitions() {
            let room = LISTED_MAX.saturating_sub(rows.len());
            if room == 0 {
                break;
            }
            let key = ConsumerTables::key(&self.group.name, partition);
            let query = Query::table(&books.parked, &call.tenant, key)?.limit(room)?;
            for row in &cx.store.query(&query).await?.rows {
                rows.push(self.shown(&ParkedRecord::of(row)?, &call.tenant, cx).await?);
            }
        }
        Ok(Arc::new(paging::answer(rows, None)))
    }

    /// A parked record with what the log has of it.
    async fn shown(
        &self,
        parked: &ParkedRecord,
        tenant: &Tenant,
        cx: &ActionContext<'_>,
    ) -> Result<Json, Refusal> {
        let before = parked.offset.saturating_sub(1);
        let page = cx.store.read_log(parked.partition, before, 1).await?;
        let record = page.records.first().filter(|record| offset_of(record) == parked.offset);
        let delivery = record.and_then(|record| self.group.delivery(tenant, record));
        let record = delivery.map(|delivery| delivery.shown(cx.resources));
        Ok(json!({
            LOG_PARTITION: parked.partition, SUBJECT: parked.subject, LOG_OFFSET: parked.offset,
            REASON: parked.reason, TRIES: parked.tries, PARKED_AT: Value::Time(parked.parked_at).to_json(),
            "record": record,
        }))
    }
}

#[async_trait]
impl Read for ParkedRead {
    async fn read(&self, call: &Call, cx: &ActionContext<'_>) -> Result<Arc<Answer>, Refusal> {
        let books = ConsumerTables::open()?;
        if self.list {
            let Some(partition) = call.input.int(LOG_PARTITION) else {
                return self.list_all(call, cx).await;
            };
            let key = [Value::from(self.group.name.as_str()), partition.into()];
            let mut query = Query::table(&books.parked, &call.tenant, key)?;
            if let Some(subject) = call.input.text(SUBJECT) {
                query = query.prefix([subject.into()])?;
            }
            let page = cx.store.query(&paging::page_of(query, call)?).await?;
            let mut rows = Vec::new();
            for row in &page.rows {
                rows.push(self.shown(&ParkedRecord::of(row)?, &call.tenant, cx).await?);
            }
            return Ok(Arc::new(paging::answer(rows, page.next)));
        }
        let key = std::iter::once(Value::from(self.group.name.as_str())).chain(call.key.iter().cloned());
        let row = cx.row(&books.parked, &call.tenant, key).await?;
        let missing = || {
            let message = format!("{} has nothing parked at {}", self.group.name, key_text(&call.key));
            Refusal::new(Code::NotFound, message)
        };
        let parked = ParkedRecord::of(&row.ok_or_else(missing)?)?;
        Ok(Arc::new(Answer::row(self.shown(&parked, &call.tenant, cx).await?)))
    }
}

/// The key and the offset of the record that a call names.
fn named_record(call: &Call) -> Result<(&str, u64), Refusal> {
    let (subject, offset) =
        (call.key.get(1).and_then(Value::as_text), call.key.get(2).and_then(Value::as_int));
    let (Some(subject), Some(offset)) = (subject, offset) else {
        return Err(bug!("a call on a parked record has another key").into());
    };
    // No record is at a negative offset, nor at 0.
    Ok((subject, u64::try_from(offset).unwrap_or(0)))
}

pub(super) struct SettleParked {
    pub(super) group: Arc<GroupSpec>,
}

#[async_trait]
impl Prepare for SettleParked {
    async fn prepare(&self, call: &Call, cx: &ActionContext<'_>) -> Result<Prepared, Refusal> {
        let books = ConsumerTables::open()?;
        let partition = self.group.partition(call, cx.store)?;
        let (subject, offset) = named_record(call)?;
        let what = format!("{} {}", self.group.name, key_text(&call.key));
        let mark = GroupProgress::of(self.group.row(&call.tenant, partition, cx.store).await?.as_ref())?;
        let lot = ParkedRows::read(cx.store, &call.tenant, &self.group.name, partition).await?;
        if !lot.holds(subject, offset) {
            return Err(Refusal::new(Code::NotFound, format!("{what} is not parked")));
        }
        if let Some((key, first)) = lot.before(offset) {
            let message =
                format!("{what}: the record at {first} is older, and is parked as well under {key}");
            return Err(Refusal::new(Code::WrongState, message));
        }
        let keys = lot.keys_at(offset);
        let step = Step::update(&books.progress, ConsumerTables::key(&self.group.name, partition))
            .label(PROGRESS)
            .guard(column(PARKED_COUNT).eq(mark.parked))
            .set(PARKED_COUNT, mark.parked - i64::try_from(keys.len()).unwrap_or(0))
            .set(UPDATED_AT, now());
        let event = self.group.event("settled").with(SETTLED, json!({SUBJECT: subject, LOG_OFFSET: offset}));
        let removed = parking::remove_all(&self.group.name, partition, &keys, offset, books);
        let steps = std::iter::once(step).chain(removed).collect();
        Ok(PlanParts::new(key_text(&call.key), steps, event).into())
    }

    fn refused(&self, call: &Call, refused: &RefusedStep<'_>) -> Verdict {
        match refused.reason {
            // Another caller parked or settled in between.
            _ if refused.label() == PROGRESS => Verdict::Retry,
            Reason::Absent => Verdict::Retry,
            _ => refused.standard(&format!("{} {}", self.group.name, key_text(&call.key))),
        }
    }
}

/// Has the oldest parked record of a key tried again.
pub(super) struct RetryParked {
    pub(super) group: Arc<GroupSpec>,
}

#[async_trait]
impl Prepare for RetryParked {
    async fn prepare(&self, call: &Call, cx: &ActionContext<'_>) -> Result<Prepared, Refusal> {
        let books = ConsumerTables::open()?;
        let group = &self.group.name;
        let partition = self.group.partition(call, cx.store)?;
        let (subject, offset) = named_record(call)?;
        let what = format!("{group} {}", key_text(&call.key));
        let lot = ParkedRows::read(cx.store, &call.tenant, group, partition).await?;
        if !lot.holds(subject, offset) {
            return Err(Refusal::new(Code::NotFound, format!("{what} is not parked")));
        }
        if let Some((key, first)) = lot.before(offset) {
            let message = format!(
                "{what}: the record at {first} is older, and is parked as well under {key}; retry that"
            );
            return Err(Refusal::new(Code::WrongState, message));
        }
        let step = parking::ready_at(group, partition, subject, offset, books);
        let event = self.group.event("retried").with(SETTLED, json!({SUBJECT: subject, LOG_OFFSET: offset}));
        let wakeup = Wakeup { worker: format!("{group}.consume"), shard: partition, at: cx.clock.now() };
        Ok(PlanParts::new(key_text(&call.key), vec![step], event).wakeups([wakeup]).into())
    }

    fn refused(&self, call: &Call, refused: &RefusedStep<'_>) -> Verdict {
        match refused.reason {
            // It was done or given up in between.
            Reason::Absent => Verdict::Retry,
            _ => refused.standard(&format!("{} {}", self.group.name, key_text(&call.key))),
        }
    }
}
