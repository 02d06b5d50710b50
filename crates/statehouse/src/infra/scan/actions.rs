//! What can be done with scans and their ranges.

use std::sync::Arc;

use serde_json::json;
use statehouse_store::Type;

use super::read::{RangeList, RangeRows, ScanProgress, progress_form, rows_form};
use super::transitions::{NEXT, RangeActions, ScanActions};
use super::write::RangeClaim;
use super::{
    AT_BEGIN, BY_STATE, CURSOR, EPOCH, ERROR, HOLDER, PARAMS, RATE, ROWS, RUN_ID, RUNNING, SCAN_STATES,
    STATE, ScanResource,
};
use crate::action::{Code, Method, RouteKind, WAIT};
use crate::declare::{ActionSpec, IndexList, RowRead};
use crate::form::{Form, Property};

/// The most rows per second, and rows of one step.
const ROWS_MAX: i64 = 1_000_000_000;

pub(super) fn scan_actions(scan: &ScanResource) -> ScanActions {
    let run = Property::required(RUN_ID, Form::Value(Type::Text), "an id that you choose");
    let rate = |about| Property::optional(RATE, Form::Range(1, ROWS_MAX), about).or_null();
    let of = scan.source.name();
    ScanActions {
        start: ActionSpec::create("start", format!("Start a scan of {of}, cut into ranges."))
            .mechanism("insert of the scan and of its ranges, which tile the table")
            .takes([
                run,
                rate("rows per second that each range may advance over"),
                Property::optional(PARAMS, Form::Any, "for the workers"),
            ]),
        pause: ActionSpec::transition("pause", "Stop all claims, advances and finishes until `resume`."),
        resume: ActionSpec::transition("resume", "Continue a {name} that is paused."),
        cancel: ActionSpec::transition("cancel", "End a {name}. What its workers have done stays."),
        throttle: ActionSpec::transition("throttle", "Set how fast each range may advance.")
            .shape("overwrite")
            .takes([rate("rows per second; null for no limit")]),
    }
}

pub(super) fn scan_reads(scan: &Arc<ScanResource>) -> [ActionSpec; 2] {
    let state = Property::optional(STATE, Form::one_of(&SCAN_STATES), "which ones; RUNNING if not given");
    [
        ActionSpec::read("read", "Read a {name} with its progress and the time that is left.")
            .mechanism("strong read of the scan and its ranges")
            .after(["start"])
            .gives(progress_form(scan))
            .reads(ScanProgress(scan.clone())),
        ActionSpec::list("list", "List {name} rows by state, newest first.")
            .mechanism("range read on the state and time index")
            .after(["start"])
            .reads_index(IndexList::newest_first(&scan.scans).by_or(BY_STATE, state, RUNNING)),
    ]
}

/// The actions that are transitions of a range.
pub(super) fn range_actions(scan: &ScanResource) -> RangeActions {
    let start = format!("{}.start", scan.name);
    let claimed = [start.as_str(), "claim"];
    let epoch = || {
        let about = "the epoch that claim or split returned";
        Property::required(EPOCH, Form::Value(Type::Int), about).example(json!(1))
    };
    let cursor = || {
        let about = "the cursor from which the caller has read; empty at the beginning";
        Property::required(CURSOR, Form::Value(Type::Text), about).example(json!(AT_BEGIN))
    };
    let rows =
        || Property::optional(ROWS, Form::Range(0, ROWS_MAX), "rows that were processed; 0 if not given");
    let next = Property::required(NEXT, Form::Value(Type::Text), "`next` of the page that was processed")
        .example(json!(AT_BEGIN));
    let error = Property::required(ERROR, Form::Value(Type::Text), "what went wrong");
    let action = |name: &'static str, summary: &'static str| {
        ActionSpec::transition(name, summary).after(claimed.iter().copied())
    };
    RangeActions {
        advance: action("advance", "Move the cursor of a range, in one batch with the effects on its rows.")
            .shape("append under compare-and-set")
            .mechanism("update guarded by the version that was read, with epoch and cursor")
            .takes([epoch(), cursor(), next, rows()])
            .answers(&["frontier advanced too far", "already-covered range reprocessed"]),
        finish: action("finish", "Finish a range without rows after its cursor.")
            .mechanism("update guarded by the version that was read, counted in the scan")
            .takes([epoch(), cursor(), rows()])
            .answers(&["frontier advanced too far", "progress not advanced after success"]),
        split: action("split", "Give half of what is left of a range to other workers.")
            .mechanism("one plan replaces a segment by two")
            .takes([epoch()])
            .answers(&["already-covered range reprocessed"]),
        fail: action("fail", "Give a range back, or park it after its last attempt.")
            .takes([epoch(), error])
            .answers(&["progress not advanced after success"]),
        expire: action("expire", "End a claim whose time is up. The server does this by itself.")
            .after([start.as_str(), "claim", WAIT])
            .answers(&["progress not advanced after success"]),
        retry: action("retry", "Make a range that has failed ready again.").after(claimed),
    }
}

/// `claim`, and the reads of ranges.
pub(super) fn claim_and_reads(scan: &Arc<ScanResource>, claim: RangeClaim) -> [ActionSpec; 4] {
    let start = format!("{}.start", scan.name);
    let run = || Property::required(RUN_ID, Form::Value(Type::Text), "which scan");
    let holder = Property::required(HOLDER, Form::Value(Type::Text), "a name of the worker's own");
    [
        ActionSpec::create("claim", "Claim a range that is ready.")
            .shape("state transition")
            .mechanism("guarded exclusive claim with expiry and epoch")
            .takes([run(), holder])
            .creates(false)
            .codes(&[Code::NotFound, Code::WrongState, Code::Held, Code::Contended])
            .answers(&["same range claimed twice"])
            .after([start.as_str()])
            .writes(claim),
        ActionSpec::read("read", "Read a range.")
            .after([start.as_str()])
            .reads_row(RowRead::of(&scan.ranges_name, &scan.ranges)),
        ActionSpec::read("rows", "Read the next rows of a range, from its cursor on.")
            .on(Method::Get, RouteKind::ItemAction)
            .mechanism("strong read of a page of the segment")
            .takes([super::read::limit()])
            .gives(rows_form())
            .after([start.as_str()])
            .reads(RangeRows(scan.clone())),
        ActionSpec::list("list", "List the ranges of a scan by their numbers.")
            .mechanism("strong range read of the run's partition")
            .takes([run()])
            .after([start.as_str()])
            .reads(RangeList(scan.clone())),
    ]
}
