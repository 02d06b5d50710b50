//! Rules for callers with claims, where the house runs calls ([`crate::allow`]).

use std::sync::Arc;

use statehouse_store::{Address, Consistency, Event, Record, Row, StoreError};

use super::{House, ValidatedCall, data_of, subject_of};
use crate::action::{Action, ActionHandler, Answer, Call, Code, Read, Refusal};
use crate::allow::Claims;
use crate::allow::judge::{GovernedCall, judge_event};
use crate::resource::Resource;

impl House {
    /// Whether any resource has rules.
    fn has_rules(&self) -> bool {
        self.resources.iter().any(|resource| resource.allow.is_some())
    }

    /// Whether a resource without rules is closed to callers with claims (A1).
    fn is_closed(&self, resource: &Resource) -> bool {
        resource.allow.is_none() && resource.is_derived && self.has_rules()
    }

    /// Judges a call before it is prepared.
    pub(super) async fn authorize(
        &self,
        resource: &Resource,
        action: &Action,
        call: &Call,
    ) -> Result<(), Refusal> {
        if call.claims.is_some() && self.is_closed(resource) {
            let name = &resource.name;
            let message = format!("{name} shows what other resources have, and has no rules for end users");
            return Err(Refusal::new(Code::Forbidden, message));
        }
        let Some(governed) = GovernedCall::of(resource, action, call) else { return Ok(()) };
        let now = self.clock.now();
        match &action.handler {
            ActionHandler::Read(_) => governed.judge_read(now),
            ActionHandler::Write(_) => match governed.named_row() {
                Some(_) => governed.judge_row(self.governed_row(&governed, call).await?.as_ref(), now),
                // A new row is judged when it is prepared.
                None if governed.makes_row() => Ok(()),
                None => governed.judge_call(now),
            },
            ActionHandler::MultiPlan(_) | ActionHandler::ForEach(_) => governed.judge_call(now),
        }
    }

    /// The row that a call names.
    async fn governed_row(&self, governed: &GovernedCall<'_>, call: &Call) -> Result<Option<Row>, Refusal> {
        let Some(def) = governed.named_row() else { return Ok(None) };
        let address = Address::new(def.table(), &call.tenant, call.key.iter().cloned())?;
        Ok(self.store.get(&[address], Consistency::Strong).await?.into_iter().next().flatten())
    }

    /// Reads, and judges the answer.
    pub(super) async fn read_judged(
        &self,
        resource: &Resource,
        action: &Action,
        read: &dyn Read,
        call: &Call,
    ) -> Result<Arc<Answer>, Refusal> {
        let answer = read.read(call, &self.context()).await;
        let projected = |answer| read.project(call, answer);
        let Some(governed) = GovernedCall::of(resource, action, call) else { return answer.map(projected) };
        match answer {
            Ok(answer) => governed.judge_answer(answer, self.clock.now()).map(projected),
            // A refusal that is about the row says that the row exists.
            Err(refusal) if refusal.code.is_conflict() => {
                let row = self.governed_row(&governed, call).await?;
                let sees = row.is_some_and(|row| governed.sees(&row, self.clock.now()));
                Err(if sees { refusal } else { governed.missing() })
            }
            Err(refusal) => Err(governed.masked(refusal)),
        }
    }

    /// Whether a caller with claims may see an event (A5).
    pub async fn may_see(&self, claims: &Claims, record: &Record, event: &Event) -> Result<bool, StoreError> {
        let Some((name, key)) = subject_of(record, event) else { return Ok(false) };
        let Some(resource) = self.resources.iter().find(|resource| resource.name == name) else {
            return Ok(false);
        };
        if resource.allow.is_none() {
            return Ok(!self.is_closed(resource));
        }
        let Ok(key) = resource.parse_key(key) else { return Ok(false) };
        let now = self.clock.now();
        if let Some(is_seen) = judge_event(resource, claims, &key, &data_of(event), now) {
            return Ok(is_seen);
        }
        // The event does not have the columns of the rule: the row as it is now decides.
        let Some(def) = &resource.def else { return Ok(false) };
        let Ok(address) = Address::new(def.table(), &record.tenant, key.iter().cloned()) else {
            return Ok(false);
        };
        let row = self.store.get(&[address], Consistency::Strong).await?.into_iter().next().flatten();
        let data = row.map(|row| serde_json::json!({ "row": row.to_json() })).unwrap_or_default();
        Ok(judge_event(resource, claims, &key, &data, now) == Some(true))
    }
}

impl<'a> ValidatedCall<'a> {
    /// The call, if rules govern it.
    pub(super) fn governed(&self) -> Option<GovernedCall<'_>> {
        GovernedCall::of(self.resource, self.action, &self.call)
    }
}

/// Replaces a refusal that says too much about a row that its caller may not know of.
pub(super) fn masked(calls: &[ValidatedCall<'_>], refusal: Refusal) -> Refusal {
    let call = calls.get(refusal.call.unwrap_or_default());
    match call.and_then(ValidatedCall::governed) {
        Some(governed) => governed.masked(refusal),
        None => refusal,
    }
}
