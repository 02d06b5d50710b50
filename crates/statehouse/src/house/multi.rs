//! Actions that are not one write: several plans, or a call for each item of a list (H7).

use std::fmt::Display;

use futures_util::future::join_all;
use serde_json::{Value as Json, json};
use statehouse_store::{
    Applied, Bug, Commit, Entry, EventTemplate, OperationStatus, Plan, Record, Type, Value, bug, limits,
};

use super::assemble::{UNCHANGED, fenced, reused};
use super::{ActionRef, CallArguments, House, Operation};
use crate::action::{Answer, Call, Code, ForEach, MultiPlan, Refusal};
use crate::allow::Principal;
use crate::inputs::Input;
use crate::resource::{self, Resource};

/// Calls that are tried as one plan at most. Each has a step, and a subject of its own.
pub(crate) const TOGETHER_MAX: usize =
    limits::PLAN_OPERATIONS_MAX - limits::LOG_ENTRY_OPERATIONS - (limits::LOG_PARTITIONS_COUNTED - 1);

impl House {
    /// Runs an action of several plans, once for each operation id that a caller gives (H7).
    pub(super) async fn run_multi(
        &self,
        resource: &Resource,
        multi: &dyn MultiPlan,
        call: &Call,
        operation: Operation,
    ) -> Result<Answer, Refusal> {
        let Operation { id, fingerprint } = operation;
        let Some(id) = id else { return multi.run(call, &self.context()).await };
        if let Some(record) = self.store.find_operation(&call.tenant, &id).await? {
            return remembered(&record, &fingerprint);
        }
        let answer = multi.run(call, &self.context()).await?;
        let event = EventTemplate::named(UNCHANGED).with("answer", json!(answer)).by(call.actor.as_deref());
        let entry = Entry::about(&resource.name, resource::key_text(&call.key)).fingerprint(&fingerprint);
        let plan = Plan::of(&call.tenant, &id).log(entry.event(event)).build()?;
        let mut in_doubt = false;
        match self.commit_until_known(&plan, &mut in_doubt).await? {
            Commit::Applied(Applied { record: Some(record), .. }) => remembered(&record, &fingerprint),
            Commit::Fenced => Err(fenced(&id)),
            Commit::Applied(_) | Commit::Refused(_) => {
                Err(Refusal::new(Code::Internal, "an answer could not be remembered"))
            }
        }
    }

    /// Calls an action for each item of a list, all at once (H7).
    pub(super) async fn run_for_each(
        &self,
        caller: &Principal,
        each: &ForEach,
        call: &Call,
        operation: &Operation,
    ) -> Result<Answer, Refusal> {
        let items = call.input.list(each.list);
        if items.len() > each.max {
            let detail = format!("at most {} at a time; these are {}", each.max, items.len());
            return Err(Refusal::field(each.list, detail));
        }
        let items = items.iter().map(|item| ForEachItem::of(each, item)).collect::<Result<Vec<_>, Bug>>()?;
        let action = self.find_action(&each.action)?;
        let under = |name: &dyn Display| {
            let id = operation.id.as_ref().map(|id| format!("{id}/{name}"));
            Operation { id, fingerprint: operation.fingerprint.clone() }
        };
        let outcome = |key: &Json, refusal: Option<&Refusal>| {
            let (code, message) = (refusal.map(|no| no.code.name()), refusal.map(|no| no.message.as_str()));
            json!({each.key: key, "done": refusal.is_none(), "code": code, "message": message})
        };
        let separately = |first: usize, items: &[ForEachItem]| {
            let calls = items.iter().map(|item| (item.key.clone(), item.arguments.clone())).collect();
            self.call_separately(caller, (action, first), calls, under, outcome)
        };
        if !each.try_one_plan || items.len() < 2 {
            return Ok(Answer::row(Json::Array(separately(0, &items).await)));
        }
        let mut outcomes = Vec::with_capacity(items.len());
        let size = items.len().div_ceil(items.len().div_ceil(TOGETHER_MAX));
        for (number, part) in items.chunks(size).enumerate() {
            let name = if number == 0 { "all".to_owned() } else { format!("all {number}") };
            let together = part.iter().map(|item| (action, item.arguments.clone())).collect();
            match self.write_batch(caller, together, under(&name), 0).await {
                Ok(_) => outcomes.extend(part.iter().map(|item| outcome(&item.key, None))),
                // None of them can be reported as refused.
                Err(refusal) if refusal.code == Code::OutcomeUnknown => {
                    outcomes.extend(part.iter().map(|item| outcome(&item.key, Some(&refusal))));
                }
                Err(_) => outcomes.extend(separately(number * size, part).await),
            }
        }
        Ok(Answer::row(Json::Array(outcomes)))
    }

    /// Calls an action several times, each by itself, all at once, and says what came of each. They are numbered from `first` on.
    async fn call_separately(
        &self,
        caller: &Principal,
        (action, first): (ActionRef, usize),
        calls: Vec<(Json, CallArguments)>,
        under: impl Fn(&dyn Display) -> Operation,
        outcome: impl Fn(&Json, Option<&Refusal>) -> Json,
    ) -> Vec<Json> {
        let calls = (first..).zip(calls).map(async |(number, (key, arguments))| {
            let answer = Box::pin(self.call_action(caller, action, arguments, under(&number))).await;
            outcome(&key, answer.err().as_ref())
        });
        join_all(calls).await
    }
}

/// One item of a list for which an action is called.
struct ForEachItem {
    /// The key, as the caller gave it.
    key: Json,
    arguments: CallArguments,
}

impl ForEachItem {
    /// Reads an item that the form of the list has admitted: an object with the key.
    fn of(each: &ForEach, item: &Input) -> Result<ForEachItem, Bug> {
        let misses = || bug!("an item of `{}` without `{}` was admitted", each.list, each.key);
        let mut input = item.object().ok_or_else(misses)?.to_map();
        let key = input.remove(each.key).ok_or_else(misses)?;
        let named = Value::from_json(key.clone(), Type::Text).map_err(|_| misses())?;
        Ok(ForEachItem { key, arguments: CallArguments { key: vec![named], input, expected: None } })
    }
}

/// The answer that a record keeps (H7).
fn remembered(record: &Record, fingerprint: &str) -> Result<Answer, Refusal> {
    if record.status == OperationStatus::Aborted {
        return Err(fenced(&record.operation));
    }
    let kept = match record.events.as_slice() {
        [event] if event.name == UNCHANGED && record.fingerprint == fingerprint => event.data.get("answer"),
        _ => None,
    };
    let answer = kept.and_then(|answer| serde_json::from_value(answer.clone()).ok());
    answer.ok_or_else(|| reused(&record.operation))
}
