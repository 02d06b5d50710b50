//! Reads: the progress of a scan, its ranges, and the rows of a range.

use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use serde_json::{Value as Json, json};
use statehouse_store::limits::PAGE_MAX;
use statehouse_store::{Query, Row, StoreError, Time, Type};

use super::transitions::NEXT;
use super::{
    CLAIMED, CREATED_AT, CURSOR, DONE, FAILED, FINISHED_AT, LAST_ROWS, RANGE_NO, RATE, READY, ROWS, RUN_ID,
    STATE, ScanResource,
};
use crate::action::{ActionContext, Answer, Call, Code, Read, Refusal};
use crate::declare::read::find_row;
use crate::declare::table::UPDATED_AT;
use crate::form::{Form, Property};
use crate::paging;
use crate::resource::key_text;

const LIMIT: &str = "limit";
const LIMIT_DEFAULT: i64 = 100;
const WAIT_MS: &str = "wait_ms";
const PROGRESS: &str = "progress";
/// A range is skewed if it has so many times the rows of a finished one.
const SKEWED: i64 = 4;

/// Rows in a page.
pub(super) fn limit() -> Property {
    let most = i64::try_from(PAGE_MAX).unwrap_or(i64::MAX);
    Property::optional(LIMIT, Form::Range(1, most), "rows in a page; 100 if not given")
}

/// What `rows` gives.
pub(super) fn rows_form() -> Form {
    let text = || Form::Value(Type::Text);
    Form::Object(vec![
        Property::required(ROWS, Form::List(Box::new(Form::Any)), "the rows after the cursor"),
        Property::required(CURSOR, text(), "where the page begins: `cursor` of `advance`"),
        Property::required(NEXT, text(), "where the page ends: `next` of `advance`"),
        Property::required("end", Form::Value(Type::Bool), "whether no rows follow: then `finish`"),
        Property::required(WAIT_MS, Form::Value(Type::Int), "wait so long: the scan is throttled"),
    ])
}

/// What `read` of a scan gives.
pub(super) fn progress_form(scan: &ScanResource) -> Form {
    let count = |name, about| Property::required(name, Form::Value(Type::Int), about);
    let maybe = |name, kind, about| Property::required(name, Form::Value(kind), about).or_null();
    let progress = Form::Object(vec![
        count("ready", "ranges that can be claimed"),
        count("claimed", "ranges that workers have"),
        count("done", "ranges that are finished"),
        count("failed", "ranges that wait for `retry`"),
        count(ROWS, "rows that were processed"),
        maybe("fraction", Type::Float, "of the work, estimated; null before the first range is done"),
        maybe("seconds_left", Type::Int, "at the rate so far, estimated"),
        Property::required("skewed", Form::List(Box::new(Form::Value(Type::Int))), "ranges worth a `split`"),
    ]);
    match scan.scans.row_form() {
        Form::Object(mut properties) => {
            properties.push(Property::required(PROGRESS, progress, "what its ranges say"));
            Form::Object(properties)
        }
        other => other,
    }
}

/// `rows`.
pub(super) struct RangeRows(pub Arc<ScanResource>);

impl RangeRows {
    /// How long a throttled range has to wait: its last step takes as long as the rate says.
    fn wait(&self, scan: &Row, range: &Row, now: Time) -> Result<Duration, StoreError> {
        let Some(rate) = scan.get_optional_int(RATE)? else { return Ok(Duration::ZERO) };
        let (rows, advanced_at) = (range.get_int(LAST_ROWS)?, range.get_time(UPDATED_AT)?);
        let micros = u64::try_from(rows.saturating_mul(1_000_000) / rate.max(1)).unwrap_or(0);
        Ok(advanced_at.plus(Duration::from_micros(micros)).since(now))
    }
}

#[async_trait]
impl Read for RangeRows {
    async fn read(&self, call: &Call, cx: &ActionContext<'_>) -> Result<Arc<Answer>, Refusal> {
        let scan = &self.0;
        let what = || format!("{} {}", scan.ranges_name, key_text(&call.key));
        let missing = || Refusal::new(Code::NotFound, format!("{} does not exist", what()));
        let range = find_row(&scan.ranges, call, cx).await?.ok_or_else(missing)?;
        let run = call.key.first().cloned().into_iter();
        let run = cx.row(scan.scans.table(), &call.tenant, run).await?.ok_or_else(missing)?;
        let cursor = range.get_text(CURSOR)?;
        let wait = self.wait(&run, &range, cx.clock.now())?;
        let answer = |rows: Vec<Json>, next: &str, end: bool| {
            let wait_ms = u64::try_from(wait.as_micros().div_ceil(1_000)).unwrap_or(u64::MAX);
            let body = json!({ROWS: rows, CURSOR: cursor, NEXT: next, "end": end, WAIT_MS: wait_ms});
            Arc::new(Answer::row(body))
        };
        if !wait.is_zero() {
            return Ok(answer(Vec::new(), cursor, false));
        }
        let limit = call.input.int(LIMIT).unwrap_or(LIMIT_DEFAULT);
        let mut rest = scan.rest(&range)?.limit(usize::try_from(limit).unwrap_or(1))?;
        loop {
            let page = cx.store.scan(&rest).await?;
            let visible = |row: &Row| {
                let mut shown = row.to_json();
                if let Some(fields) = shown.as_object_mut() {
                    scan.source_hidden.iter().for_each(|name| drop(fields.remove(name)));
                }
                shown
            };
            match (page.rows.last(), page.next) {
                // A page of rows of other tenants only.
                (None, Some(next)) => rest = rest.after(next)?,
                (None, None) => return Ok(answer(Vec::new(), cursor, true)),
                (Some(last), next) => {
                    let rows = page.rows.iter().map(visible).collect();
                    return Ok(answer(rows, &rest.cursor_at(last).to_string(), next.is_none()));
                }
            }
        }
    }
}

/// `read` of a scan.
pub(super) struct ScanProgress(pub Arc<ScanResource>);

/// What the ranges of a scan say together.
fn progress(scan: &Row, ranges: &[Row], now: Time) -> Result<Json, StoreError> {
    let ranges = ranges.iter().map(RangeCount::of).collect::<Result<Vec<RangeCount<'_>>, StoreError>>()?;
    let in_state = |state: &'static str| ranges.iter().filter(move |range| range.state == state);
    let rows: i64 = ranges.iter().map(|range| range.rows).sum();
    let done = i64::try_from(in_state(DONE).count()).unwrap_or(i64::MAX);
    // Ranges are cut to nearly equal sizes, so that those that are done tell how large the others are.
    let mean = in_state(DONE).map(|range| range.rows).sum::<i64>() / done.max(1);
    let open = ranges.len() as f64 - done as f64;
    let left: f64 = ranges
        .iter()
        .filter(|range| range.state != DONE)
        .map(|range| (mean - range.rows).max(0) as f64)
        .sum();
    let is_over = scan.get_optional_time(FINISHED_AT)?.is_some();
    let fraction = match (done, rows as f64 + left) {
        _ if is_over || open == 0.0 => Some(1.0),
        (0, _) => None,
        (_, total) if total > 0.0 => Some(rows as f64 / total),
        _ => Some(done as f64 / ranges.len().max(1) as f64),
    };
    let elapsed = now.since(scan.get_time(CREATED_AT)?).as_secs_f64();
    let seconds_left = fraction.filter(|fraction| *fraction > 0.0).map(|f| (elapsed * (1.0 - f) / f).ceil());
    let skewed = ranges.iter().filter(|range| {
        [READY, CLAIMED].contains(&range.state) && done > 0 && range.rows > SKEWED * mean.max(1)
    });
    Ok(json!({
        "ready": in_state(READY).count(),
        "claimed": in_state(CLAIMED).count(),
        "done": done,
        "failed": in_state(FAILED).count(),
        "rows": rows,
        "fraction": fraction,
        "seconds_left": seconds_left.map(|seconds| seconds as i64),
        "skewed": skewed.map(|range| range.number).collect::<Vec<_>>(),
    }))
}

/// What a range says of its progress.
struct RangeCount<'r> {
    number: i64,
    state: &'r str,
    rows: i64,
}

impl RangeCount<'_> {
    fn of(row: &Row) -> Result<RangeCount<'_>, StoreError> {
        Ok(RangeCount {
            number: row.get_int(RANGE_NO)?,
            state: row.get_text(STATE)?,
            rows: row.get_int(ROWS)?,
        })
    }
}

#[async_trait]
impl Read for ScanProgress {
    async fn read(&self, call: &Call, cx: &ActionContext<'_>) -> Result<Arc<Answer>, Refusal> {
        let scan = &self.0;
        let missing =
            || Refusal::new(Code::NotFound, format!("{} {} does not exist", scan.name, key_text(&call.key)));
        let row = find_row(&scan.scans, call, cx).await?.ok_or_else(missing)?;
        let run = row.key().first().cloned().ok_or_else(missing)?;
        let ranges = scan.ranges_of(cx.store, &call.tenant, &run).await?;
        let mut body = scan.scans.row_json(&row);
        if let Some(fields) = body.as_object_mut() {
            fields.insert(PROGRESS.into(), progress(&row, &ranges, cx.clock.now())?);
        }
        Ok(Arc::new(Answer::row(body)))
    }
}

/// `list` of ranges.
pub(super) struct RangeList(pub Arc<ScanResource>);

#[async_trait]
impl Read for RangeList {
    async fn read(&self, call: &Call, cx: &ActionContext<'_>) -> Result<Arc<Answer>, Refusal> {
        let run = call.input.value_or_null(RUN_ID);
        let query = Query::table(self.0.ranges.table(), &call.tenant, [run])?;
        let page = cx.store.query(&paging::page_of(query, call)?).await?;
        let rows = page.rows.iter().map(|row| self.0.ranges.row_json(row));
        Ok(Arc::new(paging::answer(rows, page.next)))
    }
}
