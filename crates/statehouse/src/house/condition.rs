//! Conditions of callers: `if` on a call is one more guard on the row that the call names.
//!
//! A caller writes a rule over the columns that it sees (`open_loans < 3 and status = 'ACTIVE'`). The rule is checked when the
//! call is validated and becomes a conjunct of the step on the row, behind those of the action. So the engine judges it
//! together with the write, also in a batch and in a race.
//!
//! 1. The row must exist: an action that would create it is refused with `not_found`.
//! 2. An action that has nothing to change still asserts the condition, and the version that it saw.
//! 3. Where a plan has no step on the row, it gets an assertion.
//! 4. The conjuncts of the action are judged first, so that a stale version or a wrong state is reported as such.

use std::sync::Arc;

use async_trait::async_trait;
use serde_json::{Map, Value as Json, json};
use statehouse_store::blank::RESOURCE;
use statehouse_store::guard::column;
use statehouse_store::plan::Expect;
use statehouse_store::{EventTemplate, Guard, Reason, Step, Value};

use super::ValidatedCall;
use super::assemble::UNCHANGED;
use crate::action::{
    Action, ActionContext, ActionHandler, Answer, Call, Code, PlanParts, Prepare, Prepared, Refusal,
    RefusedStep, RouteKind, Verdict,
};
use crate::declare::rule::{CheckedRule, Rule, RuleColumns, RuleValues, Term};
use crate::declare::table::TableDef;
use crate::form::{Form, Property};
use crate::resource::{Resource, key_text};

/// The input that holds the condition of a caller. No field can have this name.
pub const IF: &str = "if";
/// The label of an assertion that only a condition needs.
const LABEL: &str = "if";

/// The condition as an input, for the documents of surfaces.
pub fn condition_property() -> Property {
    let about = "a condition on the row, judged with the write: `version < 9 and status = 'ACTIVE'`";
    Property::optional(IF, Form::Value(statehouse_store::Type::Text), about)
}

/// The definition of the rows that calls of an action can put conditions on. `None` if it is not one plan about one row.
pub fn conditioned<'r>(resource: &'r Resource, action: &Action) -> Option<&'r Arc<TableDef>> {
    let is_write = matches!(action.handler, ActionHandler::Write(_));
    resource.row_def().filter(|_| is_write && action.route.kind != RouteKind::Collection)
}

/// Takes the condition out of the input of a call and checks it.
pub(super) fn take_condition(
    resource: &Resource,
    action: &Action,
    input: &mut Map<String, Json>,
) -> Result<Option<Arc<CheckedRule>>, Refusal> {
    let is_declared = action.input.iter().any(|property| property.name == IF);
    let given = if is_declared { input.get(IF).cloned() } else { input.remove(IF) };
    let Some(given) = given else { return Ok(None) };
    let Some(def) = conditioned(resource, action) else {
        let detail = format!("{}.{} takes no condition", resource.name, action.name);
        return Err(Refusal::field(IF, detail));
    };
    let Json::String(text) = given else { return Err(Refusal::field(IF, "expected a condition as text")) };
    let columns = RuleColumns::from(&**def).visible();
    let rule = Rule::parse(&text, &columns, &[]).map_err(|error| Refusal::field(IF, error.to_string()))?;
    let mut claim = None;
    rule.rule().terms(&mut |term| {
        if let Term::Claim(name) = term {
            claim = Some(name);
        }
    });
    if let Some(name) = claim {
        let detail = format!("`claim.{name}`: a condition names columns, literals and `now`");
        return Err(Refusal::field(IF, detail));
    }
    Ok(Some(Arc::new(rule)))
}

impl ValidatedCall<'_> {
    /// The guard of the caller's condition, and the rows that it is about.
    fn condition(&self) -> Option<(&CheckedRule, &TableDef, Guard)> {
        let rule = self.call.condition.as_deref()?;
        let def = self.resource.row_def()?;
        Some((rule, def, rule.bind(&RuleValues::default())))
    }

    fn what(&self) -> String {
        format!("{} {}", self.resource.name, key_text(&self.call.key))
    }

    fn is_on_row(&self, def: &TableDef, step: &Step) -> bool {
        step.table.name() == def.table().name() && step.key == self.call.key
    }

    /// Adds the caller's condition to what was prepared.
    pub(super) fn with_condition(&self, prepared: Prepared) -> Result<Prepared, Refusal> {
        let Some((_, def, guard)) = self.condition() else { return Ok(prepared) };
        let assertion = || Step::assert(def.table(), self.call.key.iter().cloned()).label(LABEL);
        let mut parts = match prepared {
            Prepared::Write(parts) => parts,
            Prepared::Unchanged(answer) => {
                let seen = answer.version.map_or_else(Guard::always, Guard::version);
                let event = EventTemplate::named(UNCHANGED).with("answer", json!(answer));
                let event = event.with(RESOURCE, self.resource.name.as_str());
                let steps = vec![assertion().guard(seen).guard(guard)];
                return Ok(PlanParts::new(key_text(&self.call.key), steps, event).into());
            }
        };
        match parts.steps.iter_mut().find(|step| self.is_on_row(def, step)) {
            None => parts.steps.push(assertion().guard(guard)),
            Some(step) if step.expect == Expect::Absent => return Err(self.missing()),
            Some(step) => {
                *step = step.clone().guard(guard);
                step.expect = Expect::Present;
            }
        }
        Ok(parts.into())
    }

    fn missing(&self) -> Refusal {
        let message = format!("{} does not exist, so no condition on it holds", self.what());
        Refusal::new(Code::NotFound, message)
    }

    /// What the refused step means, if the caller's condition is the reason.
    pub(super) fn condition_verdict(&self, refused: &RefusedStep<'_>) -> Option<Verdict> {
        let (rule, def, guard) = self.condition()?;
        if !self.is_on_row(def, refused.step) {
            return None;
        }
        match refused.reason {
            Reason::Absent => Some(Verdict::Refuse(self.missing())),
            Reason::Guard { conjunct, .. } => {
                let own = refused.step.guard.conjuncts().len() - guard.conjuncts().len();
                if *conjunct >= own {
                    return Some(Verdict::Refuse(self.condition_failed(rule, refused)));
                }
                // Nothing but the version that was seen, which another caller has changed.
                (refused.label() == LABEL).then_some(Verdict::Retry)
            }
            _ => None,
        }
    }

    fn condition_failed(&self, rule: &CheckedRule, refused: &RefusedStep<'_>) -> Refusal {
        let why = refused
            .row
            .and_then(|row| rule.failure(&RuleValues::default(), row, self.now))
            .map_or_else(|| format!("{rule} did not hold"), |failure| failure.to_string());
        Refusal::new(Code::ConditionFailed, format!("{}: {why}", self.what())).at_version(refused.row)
    }
}

/// `check`: writes nothing and is refused unless the row is there, is live, and the caller's condition holds.
pub(crate) struct RowCheck {
    pub(crate) resource: String,
    pub(crate) def: Arc<TableDef>,
}

impl RowCheck {
    fn what(&self, key: &[Value]) -> String {
        format!("{} {}", self.resource, key_text(key))
    }
}

#[async_trait]
impl Prepare for RowCheck {
    async fn prepare(&self, call: &Call, _: &ActionContext<'_>) -> Result<Prepared, Refusal> {
        let mut step = Step::assert(self.def.table(), call.key.iter().cloned()).label("row");
        if let Some(guard) = self.def.live_guard() {
            step = step.guard(guard);
        }
        let answer = Answer::row(json!({IF: call.input.json(IF)}));
        let event = EventTemplate::named(UNCHANGED).with("answer", json!(answer));
        let event = event.with(RESOURCE, self.resource.as_str());
        Ok(PlanParts::new(key_text(&call.key), vec![step], event).into())
    }

    fn refused(&self, call: &Call, refused: &RefusedStep<'_>) -> Verdict {
        let what = self.what(&call.key);
        match refused.reason {
            Reason::Guard { .. } => {
                let refusal = Refusal::new(Code::Deleted, format!("{what} was deleted"));
                Verdict::Refuse(refusal.at_version(refused.row))
            }
            _ => refused.standard(&what),
        }
    }
}

impl TableDef {
    /// The guard that a row is in a state in which it counts as existing. `None` if it always is.
    pub(crate) fn live_guard(&self) -> Option<Guard> {
        let (state, _) = self.states()?;
        match self.live_states() {
            [] => None,
            [one] => Some(column(state).eq(one.as_ref())),
            several => {
                let states = several.iter().map(|state| Value::from(state.as_ref())).collect();
                Some(Guard::In(state.to_owned(), states))
            }
        }
    }
}
