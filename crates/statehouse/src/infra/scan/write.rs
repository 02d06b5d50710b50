//! What is read before a transition: the segments of a table, the ranges that can be claimed, the rows after a cursor.

use std::sync::Arc;

use async_trait::async_trait;
use serde_json::Value as Json;
use statehouse_store::log::partition_of;
use statehouse_store::{Row, Segment, Value};

use super::transitions::{FIRST, LAST, NEXT, SECOND, SEGMENTS};
use super::{
    AT_BEGIN, CLAIMED, CURSOR, EPOCH, FAILED, HOLDER, OPEN, RANGES, READY, RUN_ID, RUNNING, SEGMENT, STATE,
    ScanResource,
};
use crate::action::{ActionContext, Call, Code, Prepare, Prepared, Refusal, RefusedStep, Verdict};
use crate::declare::machine::{Gather, Gathered, PartUse, part_verdict};
use crate::resource::key_text;

impl ScanResource {
    /// The scan that a range belongs to, which must be running.
    async fn running_scan_of(
        &self,
        range: &Row,
        call: &Call,
        cx: &ActionContext<'_>,
    ) -> Result<Row, Refusal> {
        let run = Value::from(range.get_text(RUN_ID)?);
        self.running(call, cx, &run).await
    }

    /// The scan of that id, which must be running.
    async fn running(&self, call: &Call, cx: &ActionContext<'_>, run: &Value) -> Result<Row, Refusal> {
        let what = format!("{} {}", self.name, key_text([run]));
        let Some(row) = cx.row(self.scans.table(), &call.tenant, [run.clone()]).await? else {
            return Err(Refusal::new(Code::NotFound, format!("{what} does not exist")));
        };
        let state = row.get_text(STATE)?;
        if state == RUNNING {
            return Ok(row);
        }
        let message = format!("{what} is {state}; its ranges change only while it is {RUNNING}");
        Err(Refusal::new(Code::WrongState, message))
    }
}

fn wrong_state(what: String) -> Refusal {
    Refusal::new(Code::WrongState, what)
}

/// `start`: cuts the table into segments.
pub(super) struct CutRanges(pub Arc<ScanResource>);

#[async_trait]
impl Gather for CutRanges {
    async fn gather(
        &self,
        call: &Call,
        cx: &ActionContext<'_>,
        _: Option<&Row>,
    ) -> Result<Gathered, Refusal> {
        let segments = cx.store.segments(&self.0.whole(&call.tenant), self.0.cut as usize).await?;
        let texts: Vec<Json> = segments.iter().map(|segment| segment.to_string().into()).collect();
        let ranges = i64::try_from(texts.len()).unwrap_or(0);
        let binds = vec![(RANGES.into(), ranges.into()), (SEGMENTS.into(), Value::Json(texts.into()))];
        Ok(Gathered { binds, ..Gathered::default() })
    }
}

/// Whether the transition refuses the row anyway, so that there is nothing to gather.
fn is_refused(row: &Row, call: &Call) -> bool {
    let is_moved = call.input.text(CURSOR).is_some_and(|cursor| row.text(CURSOR) != Some(cursor));
    row.text(STATE) != Some(CLAIMED) || row.int(EPOCH) != call.input.int(EPOCH) || is_moved
}

/// `advance`: the position must be one of the range.
pub(super) struct CheckCursor(pub Arc<ScanResource>);

#[async_trait]
impl Gather for CheckCursor {
    async fn gather(
        &self,
        call: &Call,
        _: &ActionContext<'_>,
        row: Option<&Row>,
    ) -> Result<Gathered, Refusal> {
        let next = call.input.get_text(NEXT)?;
        if let Some(row) = row.filter(|row| next != AT_BEGIN && !is_refused(row, call)) {
            let segment = Segment::parse(row.get_text(SEGMENT)?)?;
            let fits = self.0.at(&call.tenant, segment, next);
            fits.map_err(|error| {
                Refusal::field(NEXT, format!("{error}: give `next` of a page of its rows"))
            })?;
        }
        Ok(Gathered::default())
    }
}

/// `finish`: no row may be left after the cursor.
pub(super) struct CheckEnd(pub Arc<ScanResource>);

#[async_trait]
impl Gather for CheckEnd {
    async fn gather(
        &self,
        call: &Call,
        cx: &ActionContext<'_>,
        row: Option<&Row>,
    ) -> Result<Gathered, Refusal> {
        let Some(row) = row.filter(|row| !is_refused(row, call)) else { return Ok(Gathered::default()) };
        let scan = self.0.running_scan_of(row, call, cx).await?;
        let mut rest = self.0.rest(row)?.limit(1)?;
        loop {
            let page = cx.store.scan(&rest).await?;
            if !page.rows.is_empty() {
                let what = format!("{} {}", self.0.ranges_name, key_text(row.key()));
                let message = format!("{what} has rows after its cursor: read, process and advance first");
                return Err(wrong_state(message));
            }
            // A page can be empty where the segment is not, on an engine that reads other tenants' rows in between.
            let Some(next) = page.next else { break };
            rest = rest.after(next)?;
        }
        let is_last = scan.get_int(OPEN)? == 1;
        Ok(Gathered { binds: vec![(LAST.into(), is_last.into())], ..Gathered::default() })
    }
}

/// `split`: divides what is left of a range.
pub(super) struct SplitRange(pub Arc<ScanResource>);

#[async_trait]
impl Gather for SplitRange {
    async fn gather(
        &self,
        call: &Call,
        cx: &ActionContext<'_>,
        row: Option<&Row>,
    ) -> Result<Gathered, Refusal> {
        let Some(row) = row.filter(|row| !is_refused(row, call)) else { return Ok(Gathered::default()) };
        let scan = self.0.running_scan_of(row, call, cx).await?;
        let parts = cx.store.segments(&self.0.rest(row)?, 2).await?;
        let [first, second] = parts.as_slice() else {
            let what = format!("{} {}", self.0.ranges_name, key_text(row.key()));
            let message = format!(
                "{what} cannot be split: it has less than two rows left, or the engine divides by hash"
            );
            return Err(wrong_state(message));
        };
        let binds = vec![
            (FIRST.into(), first.to_string().into()),
            (SECOND.into(), second.to_string().into()),
            (RANGES.into(), scan.get_int(RANGES)?.into()),
        ];
        Ok(Gathered { binds, ..Gathered::default() })
    }
}

/// `claim`: chooses a range that is ready. Workers that claim at once choose different ones if they can.
pub(super) struct RangeClaim {
    pub scan: Arc<ScanResource>,
    pub claim: PartUse,
}

#[async_trait]
impl Prepare for RangeClaim {
    async fn prepare(&self, call: &Call, cx: &ActionContext<'_>) -> Result<Prepared, Refusal> {
        let run = call.input.value_or_null(RUN_ID);
        let holder = call.input.get_text(HOLDER)?;
        if holder.is_empty() {
            return Err(Refusal::field(HOLDER, "the holder must not be empty"));
        }
        self.scan.running(call, cx, &run).await?;
        let ranges = self.scan.ranges_of(cx.store, &call.tenant, &run).await?;
        let is = |state: &'static str| move |row: &&Row| row.text(STATE) == Some(state);
        let ready: Vec<&Row> = ranges.iter().filter(is(READY)).collect();
        let count = u32::try_from(ready.len()).unwrap_or(u32::MAX);
        let chosen = match count {
            0 => None,
            count => ready.get(partition_of(&call.tenant, holder, &cx.ids.next(), count) as usize),
        };
        let Some(row) = chosen else {
            let what = format!("{} {}", self.scan.name, key_text([&run]));
            let claimed = ranges.iter().filter(is(CLAIMED)).count();
            let failed = ranges.iter().filter(is(FAILED)).count();
            return Err(match claimed {
                0 => wrong_state(format!(
                    "{what}: {failed} ranges have failed and no other is left; retry them"
                )),
                _ => Refusal::new(
                    Code::Held,
                    format!("{what}: other workers have the {claimed} ranges that are left; try again later"),
                ),
            });
        };
        let firing = self.claim.on(row).bind(HOLDER, holder);
        Ok(firing.prepare(&call.tenant, cx.clock.now())?.into())
    }

    fn refused(&self, _: &Call, refused: &RefusedStep<'_>) -> Verdict {
        part_verdict(std::slice::from_ref(&self.claim), refused).unwrap_or(Verdict::Retry)
    }
}
