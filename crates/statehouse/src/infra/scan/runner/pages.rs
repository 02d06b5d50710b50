//! The work on ranges: claiming them, and opening, applying and closing their pages.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use serde_json::Value as Json;
use statehouse_store::guard::{column, now, now_plus};
use statehouse_store::plan::PlanBuilder;
use statehouse_store::{
    Address, Commit, Consistency, Cursor, Guard, Plan, Reason, RetryPolicy, Row, Scan, Segment, Step,
    StoreError, Table, Tenant, Time, Value, commit_known,
};

use super::{
    ADVANCED_AT, AT_BEGIN, CLAIMED, CURSOR, DONE, EXPIRES_AT, HOLDER, LAST_ROWS, PAGE, PAGE_END, PAGE_KEYS,
    PAUSE, PAUSED, PROBLEMS, PROBLEMS_MAX, RATE, READY, ROWS, RUN, RUNNING, RowEffects, RunStep, SCANS,
    SEGMENT, STATE, ScanRunner, ScanTask, TRIES, misuse, problems_of,
};

impl ScanRunner {
    /// One step of a worker, which has a name of its own: it claims a range, or works on the range that it has.
    pub async fn step(&self, run: &str, task: &dyn ScanTask, holder: &str) -> Result<RunStep, StoreError> {
        let parts = self.parts(run).await?;
        let Some((head, ranges)) = parts.split_first() else { return Ok(RunStep::Stopped) };
        match head.get_text(STATE)? {
            RUNNING => {}
            PAUSED => return Ok(RunStep::Waiting(PAUSE)),
            DONE => return Ok(RunStep::Done),
            _ => return Ok(RunStep::Stopped),
        }
        let is_mine = |range: &&Row| range.text(STATE) == Some(CLAIMED) && range.text(HOLDER) == Some(holder);
        match ranges.iter().find(is_mine) {
            None => self.claim(head, ranges, holder).await,
            Some(range) if range.get(PAGE_KEYS).is_some_and(|keys| !keys.is_null()) => {
                self.apply_page(range, task).await
            }
            Some(range) => self.open_page(head, range, task).await,
        }
    }

    /// Claims a range that is ready, or whose holder has not written for the time of its lease (H4).
    async fn claim(&self, head: &Row, ranges: &[Row], holder: &str) -> Result<RunStep, StoreError> {
        let at = self.clock.now();
        let is_free = |range: &&Row| match range.text(STATE) {
            Some(READY) => true,
            Some(CLAIMED) => range.time(EXPIRES_AT).is_some_and(|expires_at| expires_at <= at),
            _ => false,
        };
        let Some(range) = ranges.iter().find(is_free) else {
            if ranges.iter().any(|range| range.text(STATE) != Some(DONE)) {
                return Ok(RunStep::Waiting(PAUSE));
            }
            let run = head.get_text(RUN)?;
            self.turn(run, &[RUNNING], DONE).await?;
            return Ok(RunStep::Worked(0));
        };
        let mut step = self.write(range).set(STATE, CLAIMED).set(HOLDER, holder);
        if range.text(STATE) == Some(CLAIMED) {
            step = step.guard(column(EXPIRES_AT).le(now()));
        }
        // If it is refused, another worker was faster: the next step looks again.
        self.applied([step, running(head)]).await?;
        Ok(RunStep::Worked(0))
    }

    /// Reads the next page of a range and stores its keys, or finishes the range.
    async fn open_page(&self, head: &Row, range: &Row, task: &dyn ScanTask) -> Result<RunStep, StoreError> {
        let wait = throttled_for(head, range, self.clock.now())?;
        if !wait.is_zero() {
            return Ok(RunStep::Waiting(wait));
        }
        let segment = Segment::parse(range.get_text(SEGMENT)?).map_err(misuse)?;
        let mut scan = Scan::all(task.table()).within(segment).and_then(|scan| scan.limit(task.page_rows()));
        let cursor = range.get_text(CURSOR)?;
        if cursor != AT_BEGIN {
            scan = scan.and_then(|scan| scan.after(Cursor::parse(cursor)?));
        }
        let mut scan = scan.map_err(misuse)?;
        let page = loop {
            let page = self.store.scan(&scan).await?;
            match page.next {
                Some(next) if page.rows.is_empty() => scan = scan.after(next).map_err(misuse)?,
                _ => break page,
            }
        };
        let Some(last) = page.rows.last() else {
            let done = self.write(range).set(STATE, DONE).set(HOLDER, Value::Null);
            self.applied([done, running(head)]).await?;
            return Ok(RunStep::Worked(0));
        };
        let end = scan.cursor_at(last).to_string();
        let (mut is_idle, mut problems) = (true, Vec::new());
        for rows in by_tenant(&page.rows).values() {
            if is_idle {
                let effects = task.effects(&*self.store, rows).await?;
                is_idle = effects.steps.is_empty();
                problems.extend(effects.problems);
            }
        }
        if is_idle {
            let step = self.advance(range, &end, page.rows.len(), problems)?;
            self.applied([step, running(head)]).await?;
            return Ok(RunStep::Worked(page.rows.len()));
        }
        let keys: Vec<Json> = page.rows.iter().map(key_json).collect();
        let open = self
            .write(range)
            .set(PAGE_KEYS, Value::Json(keys.into()))
            .set(PAGE_END, end)
            .set(PAGE, range.get_int(PAGE)? + 1);
        self.applied([open, running(head)]).await?;
        Ok(RunStep::Worked(0))
    }

    /// Applies the page that is open, in one plan for each tenant, and closes it.
    async fn apply_page(&self, range: &Row, task: &dyn ScanTask) -> Result<RunStep, StoreError> {
        let addresses = addresses(range, task.table())?;
        let found = self.store.get(&addresses, Consistency::Strong).await?;
        let rows: Vec<Row> = found.into_iter().flatten().collect();
        let mut problems = Vec::new();
        for (tenant, rows) in by_tenant(&rows) {
            problems.extend(self.apply(range, &tenant, rows, task).await?);
        }
        let close = self.advance(range, range.get_text(PAGE_END)?, addresses.len(), problems)?;
        self.applied([close.set(PAGE_KEYS, Value::Null).set(PAGE_END, Value::Null)]).await?;
        Ok(RunStep::Worked(addresses.len()))
    }

    /// Applies the effects on some rows of one tenant, once (H1). Returns the problems of the rows.
    async fn apply(
        &self,
        range: &Row,
        tenant: &Tenant,
        mut rows: Vec<Row>,
        task: &dyn ScanTask,
    ) -> Result<Vec<String>, StoreError> {
        let page = range.get_int(PAGE)?;
        for _ in 0..TRIES {
            let RowEffects { steps, entry, problems } = task.effects(&*self.store, &rows).await?;
            if steps.is_empty() {
                return Ok(problems);
            }
            let mark = Step::upsert(&self.table, range.key().iter().cloned())
                .guard(column(PAGE).lt(Value::Int(page)))
                .set(PAGE, page);
            let plan = Plan::of(tenant, self.ids.next()).step(mark).steps(steps).without_rows();
            let plan = entry.into_iter().fold(plan, PlanBuilder::log);
            let plan = plan.build().map_err(misuse)?;
            match commit_known(&*self.store, &plan, RetryPolicy::WORKER).await? {
                Commit::Applied(_) => return Ok(problems),
                Commit::Refused(refused) if refused.step == 0 => match refused.reason {
                    // It was applied before.
                    Reason::Guard { .. } => return Ok(problems),
                    other => return Err(StoreError::schema(SCANS, format!("{other:?}"))),
                },
                // A row was written since it was read.
                Commit::Refused(_) | Commit::Fenced => {
                    let addresses: Vec<Address> = rows.iter().map(Row::address).collect();
                    let found = self.store.get(&addresses, Consistency::Strong).await?;
                    rows = found.into_iter().flatten().collect();
                }
            }
        }
        let why = format!("rows of {} are written all the time; try again later", task.table());
        Err(StoreError::unavailable(why))
    }

    /// A write of a range as it was read (H3), which extends the claim.
    fn write(&self, range: &Row) -> Step {
        Step::update(&self.table, range.key().iter().cloned())
            .guard(Guard::version(range.version()))
            .set(EXPIRES_AT, now_plus(self.lease))
    }

    fn advance(
        &self,
        range: &Row,
        end: &str,
        rows: usize,
        problems: Vec<String>,
    ) -> Result<Step, StoreError> {
        let count = i64::try_from(rows).unwrap_or(i64::MAX);
        let mut step = self.write(range).set(CURSOR, end).set(ADVANCED_AT, now()).set(LAST_ROWS, count);
        if !problems.is_empty() {
            let all = problems_of(range).into_iter().chain(problems).take(PROBLEMS_MAX);
            step = step.set(PROBLEMS, Value::Json(all.collect::<Vec<String>>().into()));
        }
        Ok(step.set(ROWS, range.get_int(ROWS)?.saturating_add(count)))
    }
}

/// The run is running (H5).
fn running(head: &Row) -> Step {
    Step::assert(head.table(), head.key().iter().cloned()).guard(column(STATE).eq(RUNNING))
}

/// How long a range has to wait: its last page takes as long as the rate says.
fn throttled_for(head: &Row, range: &Row, at: Time) -> Result<Duration, StoreError> {
    let Some(rate) = head.get_optional_int(RATE)? else { return Ok(Duration::ZERO) };
    let micros = range.get_int(LAST_ROWS)?.saturating_mul(1_000_000) / rate.max(1);
    let span = Duration::from_micros(u64::try_from(micros).unwrap_or(0));
    Ok(range.get_time(ADVANCED_AT)?.plus(span).since(at))
}

fn by_tenant(rows: &[Row]) -> BTreeMap<Tenant, Vec<Row>> {
    let mut groups: BTreeMap<Tenant, Vec<Row>> = BTreeMap::new();
    for row in rows {
        groups.entry(row.tenant().clone()).or_default().push(row.clone());
    }
    groups
}

/// Tenant and key of a row.
fn key_json(row: &Row) -> Json {
    let key = row.key().iter().map(Value::to_json);
    std::iter::once(Json::from(row.tenant().as_str())).chain(key).collect()
}

/// The rows of the page that is open (H2).
fn addresses(range: &Row, table: &Arc<Table>) -> Result<Vec<Address>, StoreError> {
    let corrupt = || StoreError::corrupt(SCANS, format!("the page of {range} is no list of keys"));
    let keys = range.json(PAGE_KEYS).and_then(Json::as_array).ok_or_else(corrupt)?;
    let address = |key: &Json| {
        let (tenant, parts) = key.as_array()?.split_first()?;
        let tenant = Tenant::new(tenant.as_str()?).ok()?;
        let kinds = table.key_columns().iter().map(|column| column.kind);
        let parts = parts.iter().zip(kinds).map(|(part, kind)| Value::from_json(part.clone(), kind).ok());
        Address::new(table, &tenant, parts.collect::<Option<Vec<Value>>>()?).ok()
    };
    keys.iter().map(|key| address(key).ok_or_else(corrupt)).collect()
}
