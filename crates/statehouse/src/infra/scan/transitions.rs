//! The transitions of scans and of their ranges.

use std::sync::Arc;

use serde_json::Value as Json;
use statehouse_store::{Expr, Step, Value, bug, guard};

use super::write::{CheckCursor, CheckEnd, CutRanges, SplitRange};
use super::{
    AT_BEGIN, ATTEMPTS, CANCELLED, CLAIMED, CREATED_AT, CURSOR, DONE, EPOCH, ERROR, EXPIRES_AT, FAILED,
    FINISHED_AT, HOLDER, LAST_ROWS, OPEN, PARAMS, PAUSED, RANGES, RATE, READY, ROWS, RUNNING, SEGMENT, STATE,
    ScanResource,
};
use crate::action::{Code, Refusal};
use crate::declare::machine::{
    MachinePart, PartUse, Scene, Transition, TransitionCase, absent, difference, from, null, sum,
};
use crate::declare::rule::{bind, col, input, now, now_plus};
use crate::declare::table::UPDATED_AT;
use crate::declare::{ActionSpec, Machine, MachineSpec};

/// The position that a range advances to.
pub(super) const NEXT: &str = "next";
/// Bound values: segments that `start` cuts, the two parts of a split, and whether a range is the last one.
pub(super) const SEGMENTS: &str = "segments";
pub(super) const FIRST: &str = "first";
pub(super) const SECOND: &str = "second";
pub(super) const LAST: &str = "last";

/// The transitions of a scan that its ranges fire.
pub(super) struct ScanParts {
    pub running: PartUse,
    pub count: PartUse,
    pub grow: PartUse,
}

/// The actions that are transitions of a scan.
pub(super) struct ScanActions {
    pub start: ActionSpec,
    pub pause: ActionSpec,
    pub resume: ActionSpec,
    pub cancel: ActionSpec,
    pub throttle: ActionSpec,
}

/// The machine of scans.
pub(super) fn of_scans(scan: &Arc<ScanResource>, actions: ScanActions) -> MachineSpec {
    let ScanActions { start, pause, resume, cancel, throttle } = actions;
    let started = absent()
        .to(RUNNING)
        .set(RANGES, bind(RANGES))
        .set(OPEN, bind(RANGES))
        .set(CREATED_AT, now())
        .set_given([RATE, PARAMS])
        .parts([], cut(scan));
    Machine::of(&scan.name, &scan.scans)
        .transition(Transition::call(start, started).gather(CutRanges(scan.clone())))
        .transition(Transition::call(pause, from([RUNNING]).to(PAUSED)))
        .transition(Transition::call(resume, from([PAUSED]).to(RUNNING)))
        .transition(Transition::call(cancel, from([RUNNING, PAUSED]).to(CANCELLED).event("cancelled")))
        .transition(Transition::call(
            throttle,
            from([RUNNING, PAUSED]).to_same().event("throttled").set(RATE, input(RATE)),
        ))
        // S5.
        .transition(Transition::part("running", from([RUNNING]).checked()))
        // S4.
        .transition(Transition::part(
            "count",
            [
                from([RUNNING])
                    .to_same()
                    .named("more")
                    .rule_or_retry("more", col(OPEN).gt(1))
                    .set(OPEN, difference(col(OPEN), 1)),
                from([RUNNING])
                    .to(DONE)
                    .named("last")
                    .event("finished")
                    .rule_or_retry("last", col(OPEN).eq(1))
                    .set(OPEN, 0)
                    .set(FINISHED_AT, now()),
            ],
        ))
        .transition(Transition::part(
            "grow",
            from([RUNNING]).to_same().set(RANGES, sum(col(RANGES), 1)).set(OPEN, sum(col(OPEN), 1)),
        ))
}

/// S1: inserts a range for each segment that was gathered.
fn cut(scan: &Arc<ScanResource>) -> impl Fn(&Scene<'_>) -> Result<Vec<MachinePart>, Refusal> + use<> {
    let scan = scan.clone();
    move |scene| {
        let run = Value::from(scene.key_text()?);
        let segments = match scene.bound(SEGMENTS) {
            Some(Value::Json(Json::Array(segments))) => segments.as_slice(),
            _ => &[],
        };
        let texts = segments.iter().filter_map(Json::as_str);
        let steps = texts.zip(1..).map(|(segment, number)| insert(&scan, &run, number, segment).into());
        Ok(steps.collect())
    }
}

/// The step that inserts a range.
fn insert(scan: &ScanResource, run: &Value, number: i64, segment: &str) -> Step {
    Step::insert(scan.ranges.table(), [run.clone(), number.into()])
        .set(STATE, READY)
        .set(SEGMENT, segment)
        .set(UPDATED_AT, guard::now())
        .label("cut")
}

/// The actions that are transitions of a range.
pub(super) struct RangeActions {
    pub advance: ActionSpec,
    pub finish: ActionSpec,
    pub split: ActionSpec,
    pub fail: ActionSpec,
    pub expire: ActionSpec,
    pub retry: ActionSpec,
}

/// The machine of ranges. `start` and `split` cut them.
pub(super) fn of_ranges(scan: &Arc<ScanResource>, counts: &ScanParts, actions: RangeActions) -> MachineSpec {
    let RangeActions { advance, finish, split, fail, expire, retry } = actions;
    let attempts_max = i64::from(scan.attempts_max);
    let retried = from([FAILED]).to(READY).event("retried").set(ATTEMPTS, 0).set(ERROR, null());
    Machine::of(&scan.ranges_name, &scan.ranges)
        .transition(Transition::by_hand("cut", absent().to(READY)).unlogged())
        .transition(claim(scan, &counts.running))
        .transition(advanced(scan, &counts.running, advance))
        .transition(finished(scan, &counts.count, finish))
        .transition(divided(scan, &counts.grow, split))
        .transition(
            Transition::call(fail, ended(|case| mine(case).event("failed").set(ERROR, input(ERROR))))
                .reading()
                .try_pick(move |scene| parks(scene, attempts_max)),
        )
        .transition(
            Transition::deadline_or_call(expire, ended(|case| case.event("expired").set(ERROR, EXPIRED)))
                .reading()
                .try_pick(move |scene| parks(scene, attempts_max)),
        )
        .transition(Transition::call(retry, retried))
}

const EXPIRED: &str = "the claim ended without progress";

/// S3: a worker claims a range that is ready.
fn claim(scan: &ScanResource, running: &PartUse) -> Transition {
    let case = from([READY])
        .to(CLAIMED)
        .event("claimed")
        .set(HOLDER, bind(HOLDER))
        .set(EPOCH, sum(col(EPOCH), 1))
        .set(ATTEMPTS, sum(col(ATTEMPTS), 1))
        .set(EXPIRES_AT, now_plus(scan.lease))
        .parts([running.clone()], of_scan(running));
    Transition::part("claim", case).reading()
}

/// S2: the holder moves the cursor on.
fn advanced(scan: &Arc<ScanResource>, running: &PartUse, advance: ActionSpec) -> Transition {
    let case = at_cursor(mine(from([CLAIMED]).to_same()))
        .event("advanced")
        .set_with(CURSOR, given(NEXT))
        .set_with(ROWS, rows_added)
        .set_with(LAST_ROWS, |scene| Ok(Value::from(rows_of(scene)).into()))
        .set(ATTEMPTS, 0)
        .set(EXPIRES_AT, now_plus(scan.lease))
        .parts([running.clone()], of_scan(running));
    Transition::call(advance, case).reading().gather(CheckCursor(scan.clone()))
}

/// S2, S4: the holder is done with a range that has no rows left.
fn finished(scan: &Arc<ScanResource>, count: &PartUse, finish: ActionSpec) -> Transition {
    let (uses, count) = (count.clone(), count.clone());
    let case = at_cursor(mine(from([CLAIMED]).to(DONE)))
        .event("finished")
        .set_with(ROWS, rows_added)
        .set(ATTEMPTS, 0)
        .set(EXPIRES_AT, null())
        .parts([uses], move |scene| {
            let is_last = scene.bound(LAST).and_then(Value::as_bool) == Some(true);
            let case = if is_last { "last" } else { "more" };
            Ok(vec![count.at(scene.key.first().cloned()).case(case).into()])
        });
    Transition::call(finish, case).reading().gather(CheckEnd(scan.clone()))
}

/// S1, S4: the holder keeps the first part of what is left, and the second becomes a range of its own.
fn divided(scan: &Arc<ScanResource>, grow: &PartUse, split: ActionSpec) -> Transition {
    let (uses, grow, owner) = (grow.clone(), grow.clone(), scan.clone());
    let case = mine(from([CLAIMED]).to_same())
        .event("split")
        .set(SEGMENT, bind(FIRST))
        .set(CURSOR, AT_BEGIN)
        .set(EPOCH, sum(col(EPOCH), 1))
        .parts([uses], move |scene| {
            let run = Value::from(scene.key_text()?);
            let bound =
                (scene.bound(RANGES).and_then(Value::as_int), scene.bound(SECOND).and_then(Value::as_text));
            let (Some(ranges), Some(second)) = bound else {
                return Err(bug!("a range is split that was not divided").into());
            };
            // Another split may have taken the number: then the insert is refused, and the scan is read again.
            Ok(vec![grow.at([run.clone()]).into(), insert(&owner, &run, ranges + 1, second).into()])
        });
    Transition::call(split, case).reading().gather(SplitRange(scan.clone())).codes(&[Code::WrongState])
}

/// The two ways in which a claim ends without being finished: the range is ready again, or its attempts are used up (S6).
fn ended(change: impl Fn(TransitionCase) -> TransitionCase) -> [TransitionCase; 2] {
    [("again", READY), ("park", FAILED)].map(|(name, state)| {
        change(from([CLAIMED]).to(state).named(name)).set(HOLDER, null()).set(EXPIRES_AT, null())
    })
}

/// Which of the two. The fence keeps it right: the row is as it was read.
fn parks(scene: &Scene<'_>, attempts_max: i64) -> Result<usize, Refusal> {
    Ok(usize::from(scene.loaded_row()?.get_int(ATTEMPTS)? >= attempts_max))
}

/// Only the holder may do it, under the epoch of its claim.
fn mine(case: TransitionCase) -> TransitionCase {
    let released = "{what} is {state}: the claim under epoch {input.epoch} has ended; claim a range again";
    let other = "{what} is at epoch {epoch}, not {input.epoch}: read it, or claim a range again";
    case.rule("mine", col(EPOCH).eq(input(EPOCH)), Code::NotHolder, other)
        .refused_in(READY, Code::NotHolder, released)
        .refused_in(FAILED, Code::NotHolder, released)
}

/// The caller has processed the rows after this position.
fn at_cursor(case: TransitionCase) -> TransitionCase {
    let moved = "{what} is at another cursor than the caller's: read its rows again and process those";
    case.rule("cursor", col(CURSOR).eq(input(CURSOR)), Code::VersionConflict, moved)
}

/// An input as an assigned value.
fn given(name: &'static str) -> impl Fn(&Scene<'_>) -> Result<Expr, Refusal> {
    move |scene| Ok(scene.inputs().map_or(Value::Null, |inputs| inputs.value_or_null(name)).into())
}

/// The rows that were processed before, and those of the call.
fn rows_added(scene: &Scene<'_>) -> Result<Expr, Refusal> {
    let before = scene.loaded_row()?.get_int(ROWS)?;
    Ok(Value::from(before.saturating_add(rows_of(scene))).into())
}

/// The rows that the caller has processed; 0 if not given.
fn rows_of(scene: &Scene<'_>) -> i64 {
    scene.inputs().and_then(|inputs| inputs.int(ROWS)).unwrap_or(0)
}

/// A transition of the scan of a range.
fn of_scan(part: &PartUse) -> impl Fn(&Scene<'_>) -> Result<Vec<MachinePart>, Refusal> + use<> {
    let part = part.clone();
    move |scene| Ok(vec![part.at(scene.key.first().cloned()).into()])
}
