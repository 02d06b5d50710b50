//! I04 Frontier scan: all rows of a table in ranges, which workers claim, advance in the plan of their effects, and finish.
//!
//! ```text
//!  a scan:   start            finish (of the last range)
//!   (none) ────────► RUNNING ────────────────────────────► DONE
//!                     │ ▲  │
//!               pause │ │  └──────────── cancel ─────────► CANCELLED
//!                     ▼ │ resume                              ▲
//!                    PAUSED ────────────── cancel ────────────┘
//!
//!  a range:           claim               finish
//!   (none) ──► READY ────────► CLAIMED ──────────────────► DONE
//!                ▲ ▲ fail, expire │ └─┘ advance, split
//!                │ └──────────────┤
//!                │     retry      ▼ fail, expire (attempts are used up)
//!                └─────────── FAILED
//! ```
//!
//! **Rows.** `reviews(tenant, run_id, state, ranges, open, rate, params, …)`: one for each run. `review_ranges(tenant, run_id,
//! range_no, state, segment, cursor, holder, epoch, expires_at, attempts, rows, error, …)`: one for each range, with the index
//! `due` for claims that end. A segment is what [`statehouse_store::Store::segments`] returned; an empty cursor is its beginning.
//! `open` counts the ranges that are not done.
//!
//! **Invariants.**
//! - S1. The segments of a run tile the table. *They are inserted in the plan of `start`; `split` replaces one by two in one plan.*
//! - S2. A cursor moves only from where the caller read, by the holder, in the plan of the caller's effects. *Guard of advance,
//!   finish and split:* `version = the one that was read`, which has `state = 'CLAIMED'`, `epoch = mine` and `cursor = from`.
//! - S3. A range is claimed by one worker at a time. *Guard of claim:* `version = the one that was read`, which is `READY`. The
//!   claim raises `epoch`, as does a split.
//! - S4. `open` is the number of ranges that are not `DONE`, and a scan is `DONE` when it is 0. *Each finish and split changes it
//!   in its plan; guards:* `open > 1` or `open = 1`; a split inserts a range whose number is free.
//! - S5. No range advances, finishes, splits or is claimed while the scan is not `RUNNING`. *Assertion on the scan's row in each of
//!   these plans.*
//! - S6. A claim ends. *Guard of expire:* `expires_at <= now`, by the engine's clock. After `attempts` claims without progress a
//!   range is `FAILED` and waits for `retry`.
//!
//! **Failures.** *Frontier advanced too far*, *progress not advanced after success*, *already-covered range reprocessed*: S2.
//! *Same range claimed twice*: S3.
//!
//! **Hotspots.** *Frontier contention*: there is no frontier row; each range is a row of its own (`ranges = N`). *Skewed range
//! claims*: `split`. *Checkpoint lag*: the number of rows that a worker reads and advances over at a time. *Bursty batch
//! materialization*: ranges are cut once, at the start, as many as the blueprint says.
//!
//! [`runner`] scans tables on behalf of the house itself, across tenants.

mod actions;
mod archetype;
mod read;
pub mod runner;
mod transitions;
mod write;

pub use archetype::ARCHETYPE;

use std::sync::Arc;
use std::time::Duration;

use statehouse_store::{Cursor, PlanError, Query, Row, Scan, Segment, Store, Table, Tenant, Type, Value};

use crate::action::Refusal;
use crate::declare::table::{CREATED_AT, STATE};
use crate::declare::{Declare, ResourceSpec, SettingsReader, TableDef, TableSpec};
use crate::resource::{Resource, plural};
use crate::view_source::ViewSource;
use transitions::ScanParts;
use write::RangeClaim;

/// The states of a scan.
const SCAN_STATES: [&str; 4] = [RUNNING, PAUSED, DONE, CANCELLED];
const RUNNING: &str = "RUNNING";
const PAUSED: &str = "PAUSED";
const DONE: &str = "DONE";
const CANCELLED: &str = "CANCELLED";
/// The states of a range, besides `DONE`.
const RANGE_STATES: [&str; 4] = [READY, CLAIMED, DONE, FAILED];
const READY: &str = "READY";
const CLAIMED: &str = "CLAIMED";
const FAILED: &str = "FAILED";
/// Columns of both.
const RUN_ID: &str = "run_id";
/// Columns of a scan.
const RANGES: &str = "ranges";
const OPEN: &str = "open";
const RATE: &str = "rate";
const PARAMS: &str = "params";
const FINISHED_AT: &str = "finished_at";
const BY_STATE: &str = "by_state";
/// Columns of a range.
const RANGE_NO: &str = "range_no";
const SEGMENT: &str = "segment";
const CURSOR: &str = "cursor";
const HOLDER: &str = "holder";
const EPOCH: &str = "epoch";
const EXPIRES_AT: &str = "expires_at";
const ATTEMPTS: &str = "attempts";
const ROWS: &str = "rows";
const LAST_ROWS: &str = "last_rows";
const ERROR: &str = "error";
/// The cursor of a range at its beginning.
const AT_BEGIN: &str = "";

const LEASE_DEFAULT: Duration = Duration::from_secs(60);
/// The most ranges that `start` cuts, so that one plan inserts them all.
const RANGES_MAX: u32 = 90;

/// One declared scan.
#[derive(Debug)]
struct ScanResource {
    /// `review`.
    name: String,
    /// `review_range`.
    ranges_name: String,
    /// The table that is scanned, and its columns that callers do not see.
    source: Arc<Table>,
    source_hidden: Vec<String>,
    scans: Arc<TableDef>,
    ranges: Arc<TableDef>,
    lease: Duration,
    /// Into how many ranges `start` cuts the table.
    cut: u32,
    attempts_max: u32,
}

/// Reads `[scan.NAME]`: the runs, and their ranges.
pub(crate) fn declare(cx: &mut Declare<'_>) -> Option<()> {
    let (name, (_, resources)) = (cx.name(), cx.others()?);
    let settings = cx.settings();
    let of = settings.maybe_text("of");
    let table = settings.text("table", plural(name));
    let cut = settings.count("ranges", 16, 1..=RANGES_MAX);
    let lease = settings.duration("lease", LEASE_DEFAULT, Duration::from_millis(1)..=DAY);
    let attempts_max = settings.count("attempts", 5, 1..=1_000);
    let shards = settings.count("shards", 4, 1..=1_024);
    let source = source(settings, name, of.as_deref(), resources)?;
    let ranges_name = format!("{name}_range");
    let scans = cx.build(scans_table(table))?;
    let ranges = cx.build(ranges_table(plural(&ranges_name), shards))?;
    let scan = Arc::new(ScanResource {
        name: name.to_owned(),
        ranges_name,
        source: source.tables.first()?.clone(),
        source_hidden: source.hidden.clone(),
        scans,
        ranges,
        lease,
        cut,
        attempts_max,
    });
    let scans_machine = cx.machine(transitions::of_scans(&scan, actions::scan_actions(&scan)))?;
    let counts = ScanParts {
        running: cx.part(&scans_machine, "running")?,
        count: cx.part(&scans_machine, "count")?,
        grow: cx.part(&scans_machine, "grow")?,
    };
    let ranges_machine = cx.machine(transitions::of_ranges(&scan, &counts, actions::range_actions(&scan)))?;
    let claim = RangeClaim { scan: scan.clone(), claim: cx.part(&ranges_machine, "claim")? };
    let instead = format!("read `{name}`: it has the progress of its ranges");
    cx.resource(
        ResourceSpec::of(name, &scan.scans)
            .telling(ViewSource::nothing("counts of ranges change without an event", instead.as_str()))
            .machine(&scans_machine)
            .actions(actions::scan_reads(&scan)),
    );
    cx.resource(
        ResourceSpec::of(&scan.ranges_name, &scan.ranges)
            .telling(ViewSource::nothing("ranges are cut without an event", instead))
            .actions(actions::claim_and_reads(&scan, claim))
            .machine(&ranges_machine),
    );
    Some(())
}

const DAY: Duration = Duration::from_secs(86_400);

/// The resource that is scanned, or a problem.
fn source<'r>(
    settings: &mut SettingsReader<'_>,
    name: &str,
    of: Option<&str>,
    resources: &'r [Resource],
) -> Option<&'r Resource> {
    let Some(of) = of else {
        let advice = "name a resource: `of = \"profile\"`";
        settings.problem_with_advice("of", format!("`scan.{name}` does not say what it scans"), advice);
        return None;
    };
    let found = resources.iter().find(|resource| resource.name == of && !resource.tables.is_empty());
    if found.is_none() {
        let known: Vec<&str> = resources.iter().map(|resource| resource.name.as_str()).collect();
        let advice = format!("resources with rows that can be scanned: {}", known.join(", "));
        settings.problem_with_advice("of", format!("`{of}` is not a resource with rows"), advice);
    }
    found
}

fn scans_table(table: String) -> TableSpec {
    TableSpec::named(table)
        .partition(RUN_ID, Type::Text)
        .states(&SCAN_STATES)
        .int(RANGES)
        .about("ranges in all")
        .int(OPEN)
        .about("ranges that are not done")
        .int(RATE)
        .null()
        .about("rows per second that each range may advance over; null for no limit")
        .json(PARAMS)
        .null()
        .about("what the caller of `start` gave, for its workers")
        .created_at()
        .updated_at()
        .time(FINISHED_AT)
        .null()
        .about("when its last range was finished")
        .index(BY_STATE, &[STATE], &[CREATED_AT])
}

fn ranges_table(table: String, shards: u32) -> TableSpec {
    TableSpec::named(table)
        .partition(RUN_ID, Type::Text)
        .sort(RANGE_NO, Type::Int)
        .states(&RANGE_STATES)
        .text(SEGMENT)
        .hidden()
        .text(CURSOR)
        .default(AT_BEGIN)
        .about("rows up to here are processed; empty at the beginning")
        .text(HOLDER)
        .null()
        .about("the worker that has claimed it")
        .int(EPOCH)
        .default(0)
        .about("counts claims and splits")
        .time(EXPIRES_AT)
        .null()
        .about("when the claim ends unless the range advances")
        .int(ATTEMPTS)
        .default(0)
        .about("claims since it last advanced")
        .int(ROWS)
        .default(0)
        .about("rows that were processed")
        .int(LAST_ROWS)
        .default(0)
        .hidden()
        .text(ERROR)
        .null()
        .about("why it failed last")
        .updated_at()
        .deadline(&[CLAIMED], EXPIRES_AT, shards)
}

impl ScanResource {
    /// All rows of a tenant that are to be scanned.
    fn whole(&self, tenant: &Tenant) -> Scan {
        Scan::of(&self.source, tenant)
    }

    /// What is left of a range.
    fn rest(&self, range: &Row) -> Result<Scan, Refusal> {
        let segment = Segment::parse(range.get_text(SEGMENT)?)?;
        Ok(self.at(range.tenant(), segment, range.get_text(CURSOR)?)?)
    }

    /// A segment from a cursor on.
    fn at(&self, tenant: &Tenant, segment: Segment, cursor: &str) -> Result<Scan, PlanError> {
        let scan = self.whole(tenant).within(segment)?;
        if cursor == AT_BEGIN { Ok(scan) } else { scan.after(Cursor::parse(cursor)?) }
    }

    /// All ranges of a run, by a strong read, in the order of their numbers.
    async fn ranges_of(&self, store: &dyn Store, tenant: &Tenant, run: &Value) -> Result<Vec<Row>, Refusal> {
        let mut query = Query::table(self.ranges.table(), tenant, [run.clone()])?;
        let mut rows = Vec::new();
        loop {
            let page = store.query(&query).await?;
            rows.extend(page.rows);
            let Some(next) = page.next else { return Ok(rows) };
            query = query.after(next)?;
        }
    }
}
