//! One plan from the parts of several calls, and the answers of the calls from its log record.

use std::borrow::Cow;

use serde_json::{Value as Json, json};
use statehouse_store::blank::{RESOURCE, SUBJECT, is_blank};
use statehouse_store::plan::Expect;
use statehouse_store::{
    Entry, Event, EventTemplate, OperationStatus, Plan, PlanError, Reason, Record, Refused, Step, StoreError,
    Tenant,
};
use tokio::sync::watch;

use super::{ValidatedCall, constrain};
use crate::action::{Answer, Code, PlanParts, Prepared, Refusal, RelatedEvent};
use crate::cache::ReadToken;
use crate::lock::HeldLock;
use crate::prepare::take_field;
use crate::resource::key_text;
use crate::worker::Wakeup;

/// The event of a call in a batch that had nothing to write: it keeps the answer for a repetition.
pub(crate) const UNCHANGED: &str = "unchanged";

/// What an event of a record is about: the resource and the key, as text (H6).
pub fn subject_of<'r>(record: &'r Record, event: &'r Event) -> Option<(&'r str, &'r str)> {
    let (resource, _) = event.name.split_once('.')?;
    let key = event.data.get(SUBJECT).and_then(Json::as_str);
    Some((resource, key.unwrap_or(&record.key)))
}

/// What an event of a record says, without what only tells its subject.
pub fn data_of(event: &Event) -> Cow<'_, Json> {
    if event.data.get(SUBJECT).is_none() {
        return Cow::Borrowed(&event.data);
    }
    let mut event = event.clone();
    drop_subject(&mut event);
    Cow::Owned(event.data)
}

/// An event about the row of a resource with this key, in an entry that may be about another one (H6).
pub(crate) fn with_subject(event: EventTemplate, resource: &str, key: &str, entry: &Entry) -> EventTemplate {
    if resource == entry.resource && key == entry.key {
        return event;
    }
    event.with(SUBJECT, key).about(resource, key)
}

/// Leaves of an event what it says without what only tells its subject.
pub(crate) fn drop_subject(event: &mut Event) {
    if let Some(data) = event.data.as_object_mut() {
        data.remove(SUBJECT);
    }
}

/// What becomes of prepared calls.
pub(super) enum Assembled {
    /// None of them has anything to write; these are the answers.
    Unchanged(Vec<Answer>),
    /// One plan of all of them.
    Plan(Plan, PlannedCalls),
}

/// What a plan was assembled from.
#[derive(Default)]
pub(super) struct PlannedCalls {
    /// For each step of the plan, the steps of calls that it was made of.
    steps: Vec<Vec<StepPart>>,
    /// What becomes due by the write.
    pub(super) wakeups: Vec<Wakeup>,
    /// Tasks that wait for such a write.
    pub(super) notify: Vec<watch::Sender<u64>>,
}

/// A step of a call, alone or merged with others that are about the same row.
pub(super) struct StepPart {
    /// The call.
    pub(super) call: usize,
    /// Its index within the steps of the call.
    pub(super) at: usize,
    /// The step as the call prepared it.
    pub(super) step: Step,
}

impl PlannedCalls {
    /// Adds a step of a call to a plan, and returns its index there. A row can be named once in a plan, so an assertion is
    /// merged with another step on its row: all conditions are judged on the row as it is before the plan.
    fn place(&mut self, steps: &mut Vec<Step>, part: StepPart) -> usize {
        let step = &part.step;
        let twin = steps.iter().position(|other| can_merge(other, step));
        let index = match twin.and_then(|index| Some((index, steps.get_mut(index)?))) {
            Some((index, other)) => {
                *other = merged(other.clone(), step);
                index
            }
            None => {
                steps.push(step.clone());
                self.steps.push(Vec::new());
                steps.len() - 1
            }
        };
        if let Some(parts) = self.steps.get_mut(index) {
            parts.push(part);
        }
        index
    }

    /// The call that a step of the plan belongs to, the first of several. None for the steps that release locks.
    fn call_of(&self, step: usize) -> Option<usize> {
        self.steps.get(step)?.first().map(|part| part.call)
    }

    /// The step of a call that was refused, and the reason in its own terms. None for the steps that release locks.
    pub(super) fn attribute(&self, refused: &Refused) -> Option<(&StepPart, Reason)> {
        let parts = self.steps.get(refused.step)?;
        let Reason::Guard { conjunct, guard } = &refused.reason else {
            // An assertion that demands the row says so too, but the write is what the plan is about.
            let writer = parts.iter().find(|part| part.step.writes()).or(parts.first())?;
            return Some((writer, refused.reason.clone()));
        };
        let mut before = 0;
        let part = parts.iter().find(|part| {
            let own = part.step.guard.conjuncts().len();
            let is_own = *conjunct < before + own;
            before += if is_own { 0 } else { own };
            is_own
        })?;
        Some((part, Reason::Guard { conjunct: conjunct - before, guard: guard.clone() }))
    }
}

/// Whether two steps are about one row, and one of them only asserts or both are of constraints.
fn can_merge(one: &Step, other: &Step) -> bool {
    let fits = !matches!(
        (one.expect, other.expect),
        (Expect::Absent, Expect::Present) | (Expect::Present, Expect::Absent)
    );
    let is_same = one.table.name() == other.table.name() && one.key == other.key;
    let both_write = one.writes() && other.writes();
    is_same && if both_write { constrain::combined(one, other).is_some() } else { fits }
}

/// Both steps as one.
fn merged(one: Step, other: &Step) -> Step {
    if one.writes() && other.writes() {
        return constrain::combined(&one, other).unwrap_or(one);
    }
    let expect = if one.expect == Expect::Either { other.expect } else { one.expect };
    let guard = one.guard.clone().and(other.guard.clone());
    let writer = if other.writes() { other.clone() } else { one };
    Step { guard, expect, ..writer }
}

/// One plan of all calls, with an event for each, that releases the locks.
pub(super) fn assemble(
    tenant: &Tenant,
    calls: &[ValidatedCall<'_>],
    prepared: Vec<Prepared>,
    locks: &[HeldLock],
    operation: &str,
    fingerprint: &str,
) -> Result<Assembled, Refusal> {
    let subjects = calls.iter().zip(&prepared).filter_map(|(one, prepared)| match prepared {
        Prepared::Write(parts) => Some((one.resource.name.as_str(), parts.subject.clone())),
        Prepared::Unchanged(_) => None,
    });
    let subjects: Vec<(&str, String)> = subjects.collect();
    let Some((resource, subject)) = subjects.first() else {
        let answer = |prepared| if let Prepared::Unchanged(answer) = prepared { Some(answer) } else { None };
        return Ok(Assembled::Unchanged(prepared.into_iter().filter_map(answer).collect()));
    };
    if let Some((_, key)) = subjects.iter().find(|(_, key)| is_unnameable(key)) {
        return Err(Refusal::field("key", format!("`{key}` cannot be a key: no path could name the row")));
    }
    let mut plan = Plan::of(tenant, operation).without_rows();
    let mut entry = Entry::about(*resource, subject.as_str()).fingerprint(fingerprint);
    let mut planned = PlannedCalls::default();
    let mut all_related = Vec::new();
    for (call, (one, prepared)) in calls.iter().zip(prepared).enumerate() {
        let actor = one.call.actor.as_deref();
        let event = match prepared {
            Prepared::Unchanged(answer) => {
                // Whose row the answer shows, so that it goes with the row when that is erased.
                let key = answer.created.clone().unwrap_or_else(|| key_text(&one.call.key));
                let event = EventTemplate::named(UNCHANGED).with("answer", json!(answer)).by(actor);
                event.with(RESOURCE, one.resource.name.as_str()).with(SUBJECT, key)
            }
            Prepared::Write(PlanParts { subject, steps, event, related, wakeups, notify }) => {
                let steps = steps.into_iter().enumerate();
                let places: Vec<usize> = steps
                    .map(|(at, step)| planned.place(&mut plan.steps, StepPart { call, at, step }))
                    .collect();
                let placed = |resource: &str, key: &str, mut event: EventTemplate| {
                    event.row_of = event.row_of.and_then(|step| places.get(step).copied());
                    with_subject(event, resource, key, &entry).by(actor)
                };
                all_related.extend(
                    related
                        .into_iter()
                        .map(|RelatedEvent { resource, key, event }| placed(&resource, &key, event)),
                );
                planned.wakeups.extend(wakeups);
                planned.notify.extend(notify);
                placed(&one.resource.name, &subject, event)
            }
        };
        entry = entry.event(event);
    }
    let entry = all_related.into_iter().fold(entry, Entry::event);
    let plan = plan.steps(locks.iter().map(HeldLock::release)).log(entry).build();
    Ok(Assembled::Plan(plan.map_err(|error| unbuilt(error, &planned))?, planned))
}

/// Whether clients and proxies take a key, in a path, for the folder itself or the one above.
fn is_unnameable(key: &str) -> bool {
    ["", ".", ".."].contains(&key)
}

/// Why a plan cannot be built, in terms of the calls that it is made of.
fn unbuilt(error: PlanError, planned: &PlannedCalls) -> Refusal {
    let PlanError::RowTwice { row, first, second } = &error else { return error.into() };
    let step = |index: usize| planned.steps.get(index)?.first().map(|part| &part.step);
    let twice = step(*first).zip(step(*second)).map(|(one, other)| constrain::taken_twice(one, other));
    match twice.transpose() {
        Ok(Some(Some(refusal))) => return Refusal { call: planned.call_of(*second), ..refusal },
        Ok(_) => {}
        Err(bug) => return StoreError::from(bug).into(),
    }
    match (planned.call_of(*first), planned.call_of(*second)) {
        (Some(one), Some(other)) if one != other => {
            let message = format!(
                "calls {one} and {other} of the batch, counted from 0, both write {row}; a batch writes a row once, so \
                 make one call of them or send them one after the other"
            );
            Refusal::new(Code::InvalidInput, message)
        }
        _ => error.into(),
    }
}

/// The answers of calls that were applied, now or before (H2).
pub(super) fn answers(
    calls: &[ValidatedCall<'_>],
    mut record: Record,
    fingerprint: &str,
) -> Result<Vec<Answer>, Refusal> {
    if record.status == OperationStatus::Aborted {
        return Err(fenced(&record.operation));
    }
    if record.fingerprint != fingerprint || record.events.len() < calls.len() {
        return Err(reused(&record.operation));
    }
    let token = ReadToken::text_of(&record);
    let Record { events, key, operation, .. } = &mut record;
    let answer = |(one, event): (&ValidatedCall<'_>, &mut Event)| {
        if is_blank(&event.data) {
            return Err(erased(operation));
        }
        let answer = if event.name == UNCHANGED {
            let kept = take_field(event, "answer")?;
            serde_json::from_value(kept).map_err(|error| {
                StoreError::corrupt(format!("the answer of {operation}"), error.to_string())
            })?
        } else {
            let subject = event.data.get(SUBJECT).and_then(Json::as_str).unwrap_or(key).to_owned();
            one.write.answer.answer(&one.call, &subject, event)?
        };
        Ok(Answer { token: Some(token.clone()), ..answer })
    };
    calls.iter().zip(events).map(answer).collect()
}

/// The answer of an operation whose event was blanked. It was applied, and what it answered cannot be told any more.
fn erased(operation: &str) -> Refusal {
    let message = format!(
        "operation {operation} was applied, and its answer was erased with the row; read the row to see what is there"
    );
    Refusal::new(Code::Erased, message)
}

pub(super) fn reused(operation: &str) -> Refusal {
    let message = format!("operation {operation} was used for another request; use a new id");
    Refusal::new(Code::OperationReused, message)
}

pub(super) fn fenced(operation: &str) -> Refusal {
    let message = format!("operation {operation} was given up before it was applied; use a new id");
    Refusal::new(Code::OperationFenced, message)
}
