//! The transitions of jobs and of definitions, as edges.
//!
//! Their plans are written by hand, because they depend on what the machine does not read: how a job ends depends on the head of its
//! order key's wait list and on its attempts, a claim takes a range of rows in one request, and a definition's next time depends
//! on a pattern and on the clock of this process. The edges give the diagram, the standard drills and the check of log paths.

use std::sync::Arc;

use super::definition::{ACTIVE, DELETED, ENDED, PAUSED};
use super::{CANCELLED, COMPLETED, FAILED, IN_PROGRESS, LIVE, OVER, PENDING, RETRYING, ScheduleSpec};
use crate::action::Code;
use crate::declare::machine::{Transition, absent, absent_or, from};
use crate::declare::{Machine, MachineSpec};

/// The machine of a job's rows.
pub(super) fn of_jobs(schedule: &Arc<ScheduleSpec>) -> MachineSpec {
    let kept = from([IN_PROGRESS]).to(COMPLETED).named("kept").event("completed");
    let complete = if schedule.keep.is_zero() {
        // Rows that were completed under another setting are still there.
        let deleted = from([IN_PROGRESS]).to_deleted().named("deleted").event("completed");
        Transition::by_hand("complete", [kept, deleted])
    } else {
        Transition::by_hand("complete", kept)
    };
    let machine = Machine::of(&schedule.name, &schedule.jobs_def)
        .transition(Transition::by_hand("enqueue", absent().to(PENDING).event("enqueued")))
        .transition(complete)
        .transition(Transition::by_hand(
            "fail",
            [
                from([IN_PROGRESS]).to(RETRYING).named("again").event("retrying"),
                from([IN_PROGRESS]).to(FAILED).named("for good").event("failed"),
            ],
        ))
        .transition(Transition::by_hand("cancel", from(LIVE).to(CANCELLED).event("cancelled")))
        .transition(Transition::by_hand("replay", from([FAILED]).to(PENDING).event("replayed")))
        .transition(Transition::by_hand("forget", from(OVER).to_deleted().event("forgotten")));
    unlogged_job_edges(machine)
}

/// Changes of a job without an event about it: those of claimers, of other jobs of its order key, and of its definition.
fn unlogged_job_edges(machine: MachineSpec) -> MachineSpec {
    machine
        .transition(Transition::by_hand("claim", from(LIVE).to(IN_PROGRESS)).unlogged())
        .transition(Transition::by_hand("heartbeat", from([IN_PROGRESS]).to_same()).unlogged())
        .transition(Transition::by_hand("admit", from([PENDING]).to_same()).unlogged())
        .transition(Transition::by_hand("make", absent().to(PENDING)).unlogged())
        .transition(Transition::by_hand("withdraw", from([PENDING]).to(CANCELLED)).unlogged())
        // I4. A claim finds that the lease of the last attempt is over.
        .transition(Transition::by_hand("exhaust", from([IN_PROGRESS]).to(FAILED).event("failed")))
}

/// The machine of a definition's rows.
pub(super) fn of_definitions(schedule: &Arc<ScheduleSpec>) -> MachineSpec {
    let gone = "{what} does not exist";
    let change = |states: &[&'static str], to: &'static str, event: &'static str| {
        from(states.iter().copied()).to(to).event(event).refused_in(DELETED, Code::NotFound, gone)
    };
    let any_state = [ACTIVE, PAUSED, ENDED, DELETED];
    Machine::of(schedule.definition_resource(), &schedule.definitions_def)
        .transition(Transition::by_hand("create", absent_or(any_state).to(ACTIVE).event("created")))
        .transition(Transition::by_hand("pause", change(&[ACTIVE], PAUSED, "paused")))
        .transition(Transition::by_hand("resume", change(&[PAUSED], ACTIVE, "resumed")))
        .transition(Transition::by_hand("delete", change(&[ACTIVE, PAUSED, ENDED], DELETED, "deleted")))
        .transition(Transition::by_hand(
            "make",
            [
                from([ACTIVE]).to(ACTIVE).named("recurring").event("made"),
                from([ACTIVE]).to(ENDED).named("last").event("made"),
            ],
        ))
        .transition(Transition::by_hand(
            "skip",
            [
                from([ACTIVE]).to(ACTIVE).named("recurring").event("skipped"),
                from([ACTIVE]).to(ENDED).named("last").event("skipped"),
            ],
        ))
}
