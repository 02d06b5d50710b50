//! The machine of a workflow: its declared transitions, the start, and what is written with each.

use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use serde_json::Value as Json;
use statehouse_store::guard::now as engine_now;
use statehouse_store::{Row, Step, Value};

use super::declaration::{DeclaredTransition, SetField};
use super::outputs::output_key;
use super::{
    AT, BY, ENTERED_AT, FROM, LAST_BY, LAST_OPERATION, LAST_REASON_BYTES_MAX, LAST_TRANSITION, OPERATION,
    REASON, SEQ, START, TIMER, TO, TRANSITION, WorkflowSpec,
};
use crate::action::{ActionContext, Call, Code, Refusal};
use crate::blueprint::settings::Field;
use crate::declare::machine::{
    Gather, Gathered, MachinePart, Scene, Transition, TransitionCase, absent, from, sum,
};
use crate::declare::rule::{Term, bind, col, now, now_plus};
use crate::declare::table::STATE;
use crate::declare::template::{TemplateValues, find};
use crate::declare::{ActionSpec, MachineSpec};
use crate::form::{Form, Property};
use crate::infra::due::DUE_AT;
use crate::resource::key_text;

const FAILURES: &[&str] = &[
    "retry of same transition after commit",
    "invalid transition from stale state",
    "competing transitions",
    "crash after transition but before side effect",
];

/// The transitions of a workflow.
pub(super) fn of(workflow: &Arc<WorkflowSpec>, machine: MachineSpec) -> MachineSpec {
    let machine = machine.transition(start(workflow));
    (0..workflow.transitions.len()).fold(machine, |machine, index| match declared(workflow, index) {
        Some(transition) => machine.transition(transition),
        None => machine,
    })
}

/// The first transition: the row is inserted, in the initial state.
fn start(workflow: &Arc<WorkflowSpec>) -> Transition {
    let inputs = workflow.key.iter().chain(&workflow.fields).map(Field::property);
    let reason =
        Property::optional(REASON, Form::Value(statehouse_store::Type::Text), "why, for the history");
    let action = ActionSpec::create(START, format!("Start a {{name}}, in {}.", workflow.states.initial))
        .takes(inputs.chain([reason.or_null()]))
        .answers(FAILURES);
    let fields: Vec<String> = workflow.fields.iter().map(|field| field.name.clone()).collect();
    let case = absent().to(workflow.states.initial.clone()).event("started").set_given(fields).set(SEQ, 1);
    let case = entered(workflow, case, Some(&workflow.states.initial), START);
    let spec = workflow.clone();
    let case = case.parts([], move |scene| {
        let change = StateChange { transition: START, from: None, to: &spec.states.initial, seq: 1 };
        Ok(change.history(&spec, scene).into_iter().collect())
    });
    described(Transition::call(action, case)).gather(OperationId)
}

/// One transition of the blueprint. There is one for each index.
fn declared(workflow: &Arc<WorkflowSpec>, index: usize) -> Option<Transition> {
    let one = workflow.transitions.get(index)?;
    let name = one.name.clone();
    let origin = from(one.from.clone());
    let case = match &one.to {
        Some(to) => origin.to(to.clone()),
        None => origin.to_same(),
    };
    let case = case.event(name.clone()).set(SEQ, sum(col(SEQ), 1));
    let case = case.set_given(one.set.iter().map(|SetField { field, .. }| field.name.clone()));
    let case = entered(workflow, case, one.to.as_ref(), &name);
    let case = with_condition(case, one);
    let case = refused_elsewhere(workflow, case, one);
    let (spec, before) = (workflow.clone(), one.from.clone());
    let case = case.event_field(FROM, move |scene| match (before.as_slice(), scene.row) {
        ([only], _) => only.as_str().into(),
        (_, Some(row)) => row.get(STATE).map_or(Json::Null, Value::to_json),
        (_, None) => Json::Null,
    });
    let case = case.parts([], move |scene| outputs(&spec, index, scene));
    let reads = workflow.history.is_some() || !one.outputs.is_empty();
    let transition = match one.after {
        Some(_) => Transition::deadline(name, case).bind(BY, |_| Ok(TIMER.into())),
        None => Transition::call(action(one), case).gather(OperationId),
    };
    let transition = described(transition);
    // The key of an effect or a job may be another's.
    let transition =
        if one.outputs.is_empty() { transition } else { transition.codes(&[Code::AlreadyExists]) };
    Some(if reads { transition.reading() } else { transition })
}

fn action(one: &DeclaredTransition) -> ActionSpec {
    let from = one.from.join(" or ");
    let summary = match &one.to {
        Some(to) => format!("Take a {{name}} from {from} to {to}."),
        None => format!("Change a {{name}} that is {from}, and keep its state."),
    };
    ActionSpec::transition(one.name.clone(), summary)
        .takes(one.inputs())
        .scope(one.scope.clone())
        .answers(FAILURES)
}

/// What is stored of every transition; and when the timer of the state that is entered fires.
fn entered(
    workflow: &WorkflowSpec,
    case: TransitionCase,
    to: Option<&String>,
    transition: &str,
) -> TransitionCase {
    let case = case
        .set(LAST_TRANSITION, Value::from(transition))
        .set(LAST_BY, bind(BY))
        .set(LAST_OPERATION, bind(OPERATION))
        .event_field(REASON, |scene| scene.bound(REASON).map_or(Json::Null, Value::to_json));
    let Some(to) = to else { return case };
    let case = case.set(ENTERED_AT, now());
    match workflow.timer_of(to).and_then(|timer| timer.after) {
        Some(after) => case.set(DUE_AT, due_after(after)),
        None => case,
    }
}

fn due_after(after: Duration) -> Term {
    if after.is_zero() { now() } else { now_plus(after) }
}

fn with_condition(case: TransitionCase, one: &DeclaredTransition) -> TransitionCase {
    let Some(condition) = &one.condition else { return case };
    // Braces in a message stand for names.
    let text = condition.text.replace(['{', '}'], "…");
    let message = format!("{{what}} does not fulfil the condition of `{}`: {text}", one.name);
    case.rule("if", condition.rule.clone(), Code::ConditionFailed, message)
}

/// What a caller is told about a row in a state that the transition does not begin with: a caller whose answer was lost sees its own
/// operation.
fn refused_elsewhere(
    workflow: &WorkflowSpec,
    case: TransitionCase,
    one: &DeclaredTransition,
) -> TransitionCase {
    let elsewhere = workflow.states.states.iter().filter(|state| !one.from.contains(state));
    let begins = one.from.join(" or ");
    elsewhere.fold(case, |case, state| {
        let last = format!(
            "since {{{ENTERED_AT}}}, by `{{{LAST_TRANSITION}}}` under the operation {{{LAST_OPERATION}}}"
        );
        let rest = match workflow.is_left(state) {
            true => format!("`{}` begins with {begins}", one.name),
            false => format!("{state} is left by no transition, and `{}` begins with {begins}", one.name),
        };
        let message = format!("{{what}} is {state} {last}; {rest}");
        case.refused_in(state.clone(), Code::WrongState, message)
    })
}

/// What every transition binds: who does it, and why.
fn described(transition: Transition) -> Transition {
    let by = |scene: &Scene<'_>| match (scene.bound(BY), scene.call.and_then(|call| call.actor.as_deref())) {
        (Some(known), _) => Ok(known.clone()),
        (None, Some(actor)) => Ok(actor.into()),
        (None, None) => Ok(Value::Null),
    };
    let reason = |scene: &Scene<'_>| match scene.inputs().and_then(|inputs| inputs.text(REASON)) {
        Some(reason) if reason.len() > LAST_REASON_BYTES_MAX => {
            let detail =
                format!("it has {} bytes, and at most {LAST_REASON_BYTES_MAX} are kept", reason.len());
            Err(Refusal::field(REASON, detail))
        }
        Some(reason) => Ok(reason.into()),
        None => Ok(Value::Null),
    };
    transition.bind(BY, by).bind(REASON, reason)
}

/// Binds the operation id, which the history keeps.
struct OperationId;

#[async_trait]
impl Gather for OperationId {
    async fn gather(&self, _: &Call, cx: &ActionContext<'_>, _: Option<&Row>) -> Result<Gathered, Refusal> {
        let operation = (OPERATION.into(), Value::from(cx.operation));
        Ok(Gathered { binds: vec![operation], ..Gathered::default() })
    }
}

/// One transition of one row.
struct StateChange<'a> {
    transition: &'a str,
    from: Option<&'a str>,
    to: &'a str,
    /// The number of this transition.
    seq: i64,
}

impl StateChange<'_> {
    /// The row of the history (W2).
    fn history(&self, workflow: &WorkflowSpec, scene: &Scene<'_>) -> Option<MachinePart> {
        let table = workflow.history.as_ref()?.table();
        let key = scene.key.iter().cloned().chain([Value::Int(self.seq)]);
        let bound = |name: &str| scene.bound(name).cloned().unwrap_or(Value::Null);
        let step = Step::insert(table, key)
            .set(TRANSITION, self.transition)
            .set(FROM, self.from.map_or(Value::Null, Value::from))
            .set(TO, self.to)
            .set(BY, bound(BY))
            .set(REASON, bound(REASON))
            .set(AT, engine_now())
            .set(OPERATION, bound(OPERATION))
            .label("history");
        Some(step.into())
    }
}

/// The history row, the effects and the jobs of a transition. One without any of them reads nothing.
fn outputs(workflow: &WorkflowSpec, index: usize, scene: &Scene<'_>) -> Result<Vec<MachinePart>, Refusal> {
    let Some(one) = workflow.transitions.get(index) else { return Ok(Vec::new()) };
    if workflow.history.is_none() && one.outputs.is_empty() {
        return Ok(Vec::new());
    }
    let row = scene.loaded_row()?;
    let before = row.get_text(STATE)?;
    let seq = row.get_int(SEQ)?.saturating_add(1);
    let to = one.to.as_deref().unwrap_or(before);
    let change = StateChange { transition: &one.name, from: Some(before), to, seq };
    let mut parts: Vec<MachinePart> = change.history(workflow, scene).into_iter().collect();
    let key = output_key(&workflow.name, &key_text(scene.key), seq);
    let values = RowValues { workflow, one, scene, row, change: &change };
    for output in &one.outputs {
        parts.push(output.part(scene.tenant, &key, &values, scene.now_here)?);
    }
    Ok(parts)
}

/// What the templates of a transition name: the row as the transition leaves it.
struct RowValues<'a> {
    workflow: &'a WorkflowSpec,
    one: &'a DeclaredTransition,
    scene: &'a Scene<'a>,
    row: &'a Row,
    change: &'a StateChange<'a>,
}

impl RowValues<'_> {
    /// A column of the key or a field; a field that the transition sets is as the caller gives it.
    fn column(&self, name: &str) -> Option<Json> {
        let mut declared = self.workflow.key.iter().chain(&self.workflow.fields);
        declared.find(|field| field.name == name)?;
        let is_set = self.one.set.iter().any(|SetField { field, .. }| field.name == name);
        let given = self.scene.inputs().filter(|inputs| is_set && inputs.has(name));
        Some(match given {
            Some(inputs) => inputs.json(name),
            None => self.row.get(name).map_or(Json::Null, Value::to_json),
        })
    }
}

impl TemplateValues for RowValues<'_> {
    fn value(&self, path: &[String]) -> Json {
        let Some((name, rest)) = path.split_first() else { return Json::Null };
        if let Some(value) = self.column(name) {
            return find(&value, rest).clone();
        }
        let bound = |name: &str| self.scene.bound(name).map_or(Json::Null, Value::to_json);
        match name.as_str() {
            "key" => key_text(self.scene.key).into(),
            "state" => self.change.to.into(),
            "transition" => self.change.transition.into(),
            "seq" => self.change.seq.into(),
            "reason" => bound(REASON),
            "by" => bound(BY),
            _ => Json::Null,
        }
    }
}
