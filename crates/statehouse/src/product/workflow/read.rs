//! The reads: a row, rows by state, the history of a row, and what can be done with it now.

use std::sync::Arc;

use async_trait::async_trait;
use serde_json::{Map, Value as Json, json};
use statehouse_store::{Query, Row, Time, Type, Value};

use super::declaration::{DeclaredTransition, TransitionCondition};
use super::states::StateSet;
use super::{AT, BY, BY_STATE, FROM, OPERATION, REASON, SEQ, START, TO, TRANSITION, WorkflowSpec};
use crate::action::{ActionContext, Answer, Call, Method, Read, Refusal, RouteKind};
use crate::blueprint::nearest;
use crate::declare::read::find_row;
use crate::declare::rule::{CheckedRule, RuleColumns, Term};
use crate::declare::table::STATE;
use crate::declare::{ActionSpec, IndexList, RowRead};
use crate::form::{Form, Property};
use crate::infra::due::DUE_AT;
use crate::paging;
use crate::resource::key_text;

/// The input of `read` that names the states to wait for.
const UNTIL: &str = "until";
/// The input of `history` that says where it goes on.
const AFTER_SEQ: &str = "after_seq";
/// Where an answer has what is shown, beside the row that the rules of the resource judge.
const SHOWN: &str = "$shown";

const TEXT: Form = Form::Value(Type::Text);

/// The reads of a workflow.
pub(super) fn actions(workflow: &Arc<WorkflowSpec>) -> Vec<ActionSpec> {
    let states = workflow.states.states.iter().chain(workflow.moved.iter().map(|(old, _)| old));
    let initial = workflow.states.initial.clone();
    let about = format!("which rows; {initial} if not given");
    let states = Form::OneOf(states.map(|state| state.clone().into()).collect());
    let state = Property::optional(STATE, states, &about);
    let until = "states, with commas between them, or `a.*`: with `Prefer: wait` the answer comes when the row is in one of them";
    let read = ActionSpec::read("read", "Read a {name}.")
        .takes([Property::optional(UNTIL, TEXT, until)])
        .after([START])
        .answers(&["stale status read"])
        .reads(StateRead { workflow: workflow.clone(), row: RowRead::of(&workflow.name, &workflow.def) });
    let list = ActionSpec::list("list", "List {name} rows by state, newest first.")
        .mechanism("range read on the state and time index")
        .after([START])
        .reads_index(IndexList::newest_first(&workflow.def).by_or(BY_STATE, state, initial));
    let can = ActionSpec::read("can", "Read which transitions of a {name} can be done now.")
        .on(Method::Get, RouteKind::ItemAction)
        .gives(can_form())
        .after([START])
        .reads(CanRead(workflow.clone()));
    let mut actions = vec![read, list, can];
    if let Some(history) = &workflow.history {
        let limit = "entries in an answer; 50 if not given";
        let after = "the number after which it goes on, as `next` of the answer before says";
        let action = ActionSpec::read("history", "Read what was done with a {name}, oldest first.")
            .mechanism("strong range read by key")
            .on(Method::Get, RouteKind::ItemAction)
            .takes([
                Property::optional(paging::LIMIT, Form::Range(1, 500), limit),
                Property::optional(AFTER_SEQ, Form::Range(0, i64::MAX), after),
            ])
            .gives(history_form())
            .after([START])
            .reads(HistoryRead { workflow: workflow.clone(), history: history.clone() });
        actions.push(action);
    }
    actions
}

fn can_form() -> Form {
    let time = || Form::Value(Type::Time);
    let transition = Form::Object(vec![
        Property::required(TRANSITION, TEXT, "its name"),
        Property::required(TO, TEXT, "the state that it leads to"),
        Property::required(
            "allowed",
            Form::Value(Type::Bool),
            "whether its condition holds; null if that depends on inputs",
        )
        .or_null(),
        Property::required("condition", TEXT, "its condition").or_null(),
        Property::required("scope", TEXT, "the scope that it needs").or_null(),
        Property::required("inputs", Form::List(Box::new(TEXT)), "the fields that it sets"),
    ]);
    let timer = Form::Object(vec![
        Property::required(TRANSITION, TEXT, "its name"),
        Property::required(TO, TEXT, "the state that it leads to"),
        Property::required(AT, time(), "when the worker does it").or_null(),
    ]);
    Form::Object(vec![
        Property::required(STATE, TEXT, "as it is now"),
        Property::required("version", Form::Value(Type::Int), "raised by every write"),
        Property::required(
            "transitions",
            Form::List(Box::new(transition)),
            "those that begin with this state",
        ),
        Property::required("timer", timer, "the timer of the state").or_null(),
    ])
}

fn history_form() -> Form {
    let entry = Form::Object(vec![
        Property::required(SEQ, Form::Value(Type::Int), "its number, from 1"),
        Property::required(TRANSITION, TEXT, "what was done"),
        Property::required(FROM, TEXT, "the state before").or_null(),
        Property::required(TO, TEXT, "the state after"),
        Property::required(BY, TEXT, "who did it").or_null(),
        Property::required(REASON, TEXT, "why").or_null(),
        Property::required(AT, Form::Value(Type::Time), "when"),
        Property::required(OPERATION, TEXT, "the operation that did it").or_null(),
    ]);
    Form::Object(vec![
        Property::required("history", Form::List(Box::new(entry)), "oldest first"),
        Property::required("next", Form::Value(Type::Int), "where it goes on; null at the end").or_null(),
    ])
}

/// The row of a call, or the refusal that there is none.
async fn row_of(workflow: &WorkflowSpec, call: &Call, cx: &ActionContext<'_>) -> Result<Row, Refusal> {
    let row = find_row(&workflow.def, call, cx).await?;
    row.ok_or_else(|| {
        let message = format!("{} {} does not exist", workflow.name, key_text(&call.key));
        Refusal::new(crate::action::Code::NotFound, message)
    })
}

/// An answer with the row, which the rules judge, and what is shown instead of it.
fn beside(workflow: &WorkflowSpec, row: &Row, shown: Json) -> Arc<Answer> {
    let mut body = workflow.def.row_json(row);
    if let Some(fields) = body.as_object_mut() {
        fields.insert(SHOWN.to_owned(), shown);
    }
    Arc::new(Answer::row(body))
}

/// What is shown of an answer with a row.
fn shown(answer: &Answer) -> Arc<Answer> {
    let body = answer.body.get(SHOWN).cloned().unwrap_or_default();
    Arc::new(Answer { body, ..answer.clone() })
}

/// `read`: a strong read of the row, for which a caller may wait until it is in a state.
struct StateRead {
    workflow: Arc<WorkflowSpec>,
    row: RowRead,
}

#[async_trait]
impl Read for StateRead {
    async fn read(&self, call: &Call, cx: &ActionContext<'_>) -> Result<Arc<Answer>, Refusal> {
        if let Some(until) = call.input.text(UNTIL) {
            check_until(&self.workflow.states, until)?;
        }
        self.row.read(call, cx).await
    }

    async fn show(
        &self,
        rows: &[Row],
        call: &Call,
        cx: &ActionContext<'_>,
    ) -> Result<Option<Vec<Option<Json>>>, Refusal> {
        self.row.show(rows, call, cx).await
    }

    /// A row in a state that no transition leaves is not waited for: it will not change.
    fn is_awaited(&self, input: &Map<String, Json>, answer: &Answer) -> Option<bool> {
        let until = input.get(UNTIL)?.as_str()?;
        let state = answer.body.get(STATE).and_then(Json::as_str).unwrap_or_default();
        let is_named = names_of(until).any(|name| self.workflow.states.matches(name, state));
        Some(is_named || !self.workflow.is_left(state))
    }
}

fn names_of(until: &str) -> impl Iterator<Item = &str> {
    until.split(',').map(str::trim)
}

fn check_until(states: &StateSet, until: &str) -> Result<(), Refusal> {
    for name in names_of(until) {
        if states.states.iter().any(|state| states.matches(name, state)) {
            continue;
        }
        let known = states.states.iter().map(String::as_str);
        let advice = match nearest(name, known) {
            Some(near) => format!("did you mean {near}?"),
            None => format!("there are {}", states.states.join(", ")),
        };
        return Err(Refusal::field(UNTIL, format!("there is no state `{name}`: {advice}")));
    }
    Ok(())
}

/// `history`.
struct HistoryRead {
    workflow: Arc<WorkflowSpec>,
    history: Arc<crate::declare::TableDef>,
}

#[async_trait]
impl Read for HistoryRead {
    async fn read(&self, call: &Call, cx: &ActionContext<'_>) -> Result<Arc<Answer>, Refusal> {
        let row = row_of(&self.workflow, call, cx).await?;
        let query = Query::table(self.history.table(), &call.tenant, call.key.iter().cloned())?;
        let query = match call.input.int(AFTER_SEQ) {
            Some(after) => query.above(after)?,
            None => query,
        };
        let page = cx.store.query(&query.limit(paging::rows(call))?).await?;
        let mut entries = Vec::new();
        for entry in &page.rows {
            let mut shown = Map::new();
            for name in [SEQ, TRANSITION, FROM, TO, BY, REASON, AT, OPERATION] {
                shown.insert(name.to_owned(), entry.get(name).map_or(Json::Null, Value::to_json));
            }
            entries.push(Json::Object(shown));
        }
        let last = page.rows.last().and_then(|entry| entry.int(SEQ));
        let next = last.filter(|_| page.next.is_some());
        Ok(beside(&self.workflow, &row, json!({"history": entries, "next": next})))
    }

    fn project(&self, _: &Call, answer: Arc<Answer>) -> Arc<Answer> {
        shown(&answer)
    }
}

/// `can`.
struct CanRead(Arc<WorkflowSpec>);

#[async_trait]
impl Read for CanRead {
    async fn read(&self, call: &Call, cx: &ActionContext<'_>) -> Result<Arc<Answer>, Refusal> {
        let workflow = &self.0;
        let row = row_of(workflow, call, cx).await?;
        let state = row.get_text(STATE)?;
        let begins = |one: &&DeclaredTransition| one.from.iter().any(|from| from == state);
        let mut transitions = Vec::new();
        for one in workflow.transitions.iter().filter(begins).filter(|one| one.after.is_none()) {
            let inputs: Vec<&str> = one.set.iter().map(|set| set.field.name.as_str()).collect();
            transitions.push(json!({
                TRANSITION: one.name,
                TO: one.to.as_deref().unwrap_or(state),
                "allowed": allowed(workflow, one, &row, cx.clock.now()),
                "condition": one.condition.as_ref().map(|condition| &condition.text),
                "scope": one.scope,
                "inputs": inputs,
            }));
        }
        let timer = workflow.timer_of(state).map(|timer| {
            let at = row.get(DUE_AT).map_or(Json::Null, Value::to_json);
            json!({TRANSITION: timer.name, TO: timer.to, AT: at})
        });
        let shown =
            json!({STATE: state, "version": row.version(), "transitions": transitions, "timer": timer});
        Ok(beside(workflow, &row, shown))
    }

    fn project(&self, _: &Call, answer: Arc<Answer>) -> Arc<Answer> {
        shown(&answer)
    }
}

/// Whether the condition of a transition holds; `None` if it depends on what a caller gives.
fn allowed(workflow: &WorkflowSpec, one: &DeclaredTransition, row: &Row, now: Time) -> Option<bool> {
    let Some(TransitionCondition { rule, .. }) = &one.condition else { return Some(true) };
    let mut needs_input = false;
    rule.terms(&mut |term| needs_input |= matches!(term, Term::Input(_)));
    if needs_input {
        return None;
    }
    let columns = RuleColumns::from(&*workflow.def);
    let checked: CheckedRule = rule.clone().checked(&columns, &[]).ok()?;
    Some(checked.holds(&RowWithoutCall(row), row, now))
}

/// A row without a call.
struct RowWithoutCall<'a>(&'a Row);

impl crate::declare::rule::RuleSource for RowWithoutCall<'_> {
    fn key(&self, index: usize) -> Value {
        self.0.key().get(index).cloned().unwrap_or(Value::Null)
    }
}
