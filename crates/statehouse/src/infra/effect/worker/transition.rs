//! Transitions of effects after an attempt: one guarded step, one event.

use super::settle::UNSETTLED_PAUSE;
use super::*;
use crate::action::{PlanParts, RelatedEvent};
use crate::house::with_subject;

/// How many characters of an error are stored.
const DETAIL_CHARS: usize = 500;

/// A transition of a row that is being put together.
#[derive(Clone)]
pub(super) struct EffectTransition {
    effect: String,
    pub(super) row: Row,
    pub(super) status: &'static str,
    pub(super) reason: Option<&'static str>,
    /// None for a step with a fence.
    attempt: Option<i64>,
    step: Step,
    event: EventTemplate,
    answer: Option<String>,
}

impl EffectTransition {
    /// A transition that leaves the state of the row as it is, with a fence in its step.
    pub(super) fn of(
        effect: &str,
        row: &Row,
        step: Step,
        event: EventTemplate,
    ) -> Result<EffectTransition, StoreError> {
        let event = event.with(ATTEMPT, row.get_int(ATTEMPT)?);
        let (row, status, reason, answer) = (row.clone(), "", None, None);
        Ok(EffectTransition {
            effect: effect.to_owned(),
            row,
            status,
            reason,
            attempt: None,
            step,
            event,
            answer,
        })
    }

    /// Under the attempt of this sender, which the row as it was scanned does not know yet.
    pub(super) fn at_attempt(mut self, attempt: i64) -> EffectTransition {
        self.attempt = Some(attempt);
        self
    }

    pub(super) fn guarded(mut self, change: impl FnOnce(Step) -> Step) -> EffectTransition {
        self.step = change(self.step);
        self
    }

    /// With the status of the answer.
    pub(super) fn with_status(mut self, sent: &SendOutcome) -> EffectTransition {
        let SendOutcome::Answered(TargetResponse { status, .. }) = sent else { return self };
        self.step = self.step.set(HTTP_STATUS, i64::from(*status));
        self.event = self.event.with(HTTP_STATUS, *status);
        self
    }

    /// With what the target answered, freed of secrets (I6).
    pub(super) fn with_answer(
        mut self,
        sent: &SendOutcome,
        most: usize,
        cx: &SendContext<'_, '_>,
    ) -> EffectTransition {
        let SendOutcome::Answered(TargetResponse { body, .. }) = sent else { return self };
        if most > 0 && !body.is_empty() {
            let text = String::from_utf8_lossy(body).replace('\0', "\u{fffd}");
            self.answer = Some(cx.secrets.hidden(text));
        }
        self
    }

    pub(super) fn without_answer(mut self) -> EffectTransition {
        self.answer = None;
        self
    }

    /// The outcome alone. A settler has refused to settle it: it is due again for that.
    pub(super) fn unsettled(&self) -> EffectTransition {
        let mut step = self.step.clone();
        step.assignments.retain(|one| ![UNSETTLED_AT, DUE_AT].contains(&one.column.as_str()));
        let step = step.set(UNSETTLED_AT, now()).set(DUE_AT, now_plus(UNSETTLED_PAUSE));
        EffectTransition { step, ..self.clone() }
    }

    /// The step, and its event.
    pub(super) fn parts(&self) -> PlanParts {
        let mut step = self.step.clone();
        let mut event = self.event.clone();
        if let Some(attempt) = self.attempt {
            step = step.guard(column(ATTEMPT).eq(attempt));
            event = event.with(ATTEMPT, attempt);
        }
        if let Some(answer) = &self.answer {
            step = step.set(ANSWER, answer.as_str());
        }
        PlanParts::new(key_text(self.row.key()), vec![step], event)
    }

    /// A plan of these parts.
    pub(super) fn plan(&self, parts: PlanParts, cx: &SendContext<'_, '_>) -> Result<Plan, StoreError> {
        let PlanParts { subject, steps, event, related, .. } = parts;
        let mut entry = Entry::about(&self.effect, subject).event(event);
        for RelatedEvent { resource, key, event } in related {
            let event = with_subject(event, &resource, &key, &entry);
            entry = entry.event(event);
        }
        let plan = Plan::of(self.row.tenant(), cx.context.ids.next()).steps(steps).log(entry).without_rows();
        plan.build().map_err(|error| misuse(&error))
    }
}

impl EffectSpec {
    /// What becomes of a row, guarded by its state and its attempt.
    pub(super) fn moved(
        &self,
        row: &Row,
        from: &str,
        outcome: &EffectOutcome,
    ) -> Result<EffectTransition, StoreError> {
        let EffectOutcome { status, doubt, wait, stuck, reason, detail } = outcome;
        let due: Expr = match (wait, self.keep) {
            (Some(wait), _) => now_plus(*wait).into(),
            (None, Some(keep)) if *status == DELIVERED => now_plus(keep).into(),
            (None, _) => Value::Null.into(),
        };
        let was_stuck = row.get_optional_time(STUCK_AT)?;
        let stuck_at: Expr = match (stuck, was_stuck) {
            (false, _) => Value::Null.into(),
            (true, Some(since)) => since.into(),
            (true, None) => now().into(),
        };
        let detail: String = detail.replace('\0', "\u{fffd}").chars().take(DETAIL_CHARS).collect();
        let mut step = Step::update(&self.table, row.key().iter().cloned())
            .guard(column(STATUS).eq(from))
            .set(STATUS, *status)
            .set(DOUBT, *doubt)
            .set(DUE_AT, due)
            .set(STUCK_AT, stuck_at)
            .set(UNSETTLED_AT, Value::Null)
            .set(REASON, reason.map_or(Value::Null, Value::from))
            .set(DETAIL, detail.as_str())
            .set(UPDATED_AT, now());
        if *status == DELIVERED {
            step = step.set(DELIVERED_AT, now());
        }
        let event = EventTemplate::named(self.event(status))
            .with(KEY, row.get_text(KEY)?)
            .with(TARGET, row.get_text(TARGET)?)
            .with(DOUBT, *doubt)
            .with("stuck", *stuck)
            .with(REASON, reason.map_or(Json::Null, Json::from))
            .with(DETAIL, detail);
        Ok(EffectTransition {
            effect: self.name.clone(),
            row: row.clone(),
            status,
            reason: *reason,
            attempt: Some(row.get_int(ATTEMPT)?),
            step,
            event,
            answer: None,
        })
    }
}
