//! Actions that are not one write: several plans, or a call for each item of a list (H7).

use std::fmt::Display;

use futures_util::future::join_all;
use serde_json::{Value as Json, json};
use statehouse_store::{
    Applied, Commit, Entry, EventTemplate, OperationStatus, Plan, Record, Tenant, Type, Value, limits,
};

use super::{House, Operation, Request, UNCHANGED, fenced, reused};
use crate::action::{Answer, Call, Code, Each, Refusal, Several};
use crate::form::Misfit;
use crate::resource::{self, Resource};

/// Calls that are tried as one plan at most. Each has a step, and a subject of its own.
pub(crate) const TOGETHER_MAX: usize =
    limits::PLAN_OPERATIONS_MAX - limits::LOG_ENTRY_OPERATIONS - (limits::LOG_PARTITIONS_COUNTED - 1);

impl House {
    /// Runs an action of several plans, once for each operation id that a caller gives (H7).
    pub(super) async fn several(
        &self,
        resource: &Resource,
        several: &dyn Several,
        call: &Call,
        operation: Operation,
    ) -> Result<Answer, Refusal> {
        let Operation { id, fingerprint } = operation;
        let Some(id) = id else { return several.run(call, &self.desk(0)).await };
        if let Some(record) = self.store.find_operation(&call.tenant, &id).await? {
            return remembered(&record, &fingerprint);
        }
        let answer = several.run(call, &self.desk(0)).await?;
        let event = EventTemplate::named(UNCHANGED).with("answer", json!(answer));
        let entry = Entry::about(&resource.name, resource::key_text(&call.key)).fingerprint(&fingerprint);
        let plan = Plan::of(&call.tenant, &id).log(entry.event(event)).build()?;
        let mut in_doubt = false;
        match self.settle(&plan, &mut in_doubt).await? {
            Commit::Applied(Applied { record: Some(record), .. }) => remembered(&record, &fingerprint),
            Commit::Fenced => Err(fenced(&id)),
            Commit::Applied(_) | Commit::Refused(_) => {
                Err(Refusal::new(Code::Internal, "an answer could not be remembered"))
            }
        }
    }

    /// Calls an action for each item of a list, all at once (H7).
    pub(super) async fn each(
        &self,
        tenant: &Tenant,
        each: &Each,
        call: &Call,
        operation: &Operation,
    ) -> Result<Answer, Refusal> {
        let items = call.input.get(each.list).and_then(Json::as_array).map(Vec::as_slice).unwrap_or_default();
        if items.len() > each.most {
            let detail = format!("at most {} at a time; these are {}", each.most, items.len());
            return Err(Refusal::misfits(vec![Misfit { pointer: format!("/{}", each.list), detail }]));
        }
        let key_of = |item: &Json| item.get(each.key).cloned().unwrap_or_default();
        let request = |item: &Json| {
            let mut input = item.as_object().cloned().unwrap_or_default();
            let key = input.remove(each.key).unwrap_or_default();
            let named = Value::from_json(key, Type::Text).unwrap_or(Value::Null);
            Request { action: each.action.clone(), key: vec![named], input, expected: None }
        };
        let under = |name: &dyn Display| {
            let id = operation.id.as_ref().map(|id| format!("{id}/{name}"));
            Operation { id, fingerprint: operation.fingerprint.clone() }
        };
        let outcome = |key: &Json, refusal: Option<&Refusal>| {
            let (code, message) = (refusal.map(|no| no.code.name()), refusal.map(|no| no.message.as_str()));
            json!({each.key: key, "done": refusal.is_none(), "code": code, "message": message})
        };
        let apart = |first: usize, items: &[Json]| {
            let requests: Vec<_> = items.iter().map(|item| (key_of(item), request(item))).collect();
            self.apart(tenant, first, requests, under, outcome)
        };
        if !each.as_one || items.len() < 2 {
            return Ok(Answer::row(Json::Array(apart(0, items).await)));
        }
        let mut outcomes = Vec::with_capacity(items.len());
        let size = items.len().div_ceil(items.len().div_ceil(TOGETHER_MAX));
        for (number, part) in items.chunks(size).enumerate() {
            let name = if number == 0 { "all".to_owned() } else { format!("all {number}") };
            let together = part.iter().map(request).collect();
            match self.at_once(tenant, together, under(&name), 0).await {
                Ok(_) => outcomes.extend(part.iter().map(|item| outcome(&key_of(item), None))),
                // Nobody can say of any of them that it was refused.
                Err((_, refusal)) if refusal.code == Code::OutcomeUnknown => {
                    outcomes.extend(part.iter().map(|item| outcome(&key_of(item), Some(&refusal))));
                }
                Err(_) => outcomes.extend(apart(number * size, part).await),
            }
        }
        Ok(Answer::row(Json::Array(outcomes)))
    }

    /// Makes calls, each by itself, all at once, and says what came of each. They are numbered from `first` on.
    async fn apart(
        &self,
        tenant: &Tenant,
        first: usize,
        requests: Vec<(Json, Request)>,
        under: impl Fn(&dyn Display) -> Operation,
        outcome: impl Fn(&Json, Option<&Refusal>) -> Json,
    ) -> Vec<Json> {
        let calls = (first..).zip(requests).map(async |(number, (key, request))| {
            let answer = Box::pin(self.call(tenant, request, under(&number))).await;
            outcome(&key, answer.err().as_ref())
        });
        join_all(calls).await
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
