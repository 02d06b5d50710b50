//! Reads `[workflow.NAME]`: what its states and transitions are, as the blueprint says it, with problems that point at the line.

use std::ops::Range;
use std::time::Duration;

use statehouse_store::Type;

use super::outputs::{self, RowScope, TransitionOutput};
use super::states::{Expanded, PlacedText, StateEdge, StateSet};
use super::{LAST_REASON_BYTES_MAX, REASON, RESERVED};
use crate::blueprint::Blueprint;
use crate::blueprint::nearest;
use crate::blueprint::problem::BlueprintProblem;
use crate::blueprint::settings::{Field, parse_duration};
use crate::blueprint::tree::{Node, TreeValue};
use crate::declare::rule::{Rule, RuleColumns, Term};
use crate::declare::{SettingsReader, TableDef};
use crate::form::{Form, Property};
use crate::resource::Resource;

/// The longest time of a state.
const AFTER_MAX: Duration = Duration::from_secs(10 * 366 * 86_400);

/// A transition as it stands in the file.
pub(super) struct TransitionText {
    pub edge: StateEdge,
    condition: Option<PlacedText>,
    set: Vec<PlacedText>,
    send: Option<Node>,
    enqueue: Option<Node>,
    scope: Option<String>,
}

/// A declared transition.
#[derive(Debug)]
pub(super) struct DeclaredTransition {
    pub name: String,
    pub from: Vec<String>,
    /// `None`: the row keeps its state.
    pub to: Option<String>,
    pub condition: Option<TransitionCondition>,
    pub set: Vec<SetField>,
    pub outputs: Vec<TransitionOutput>,
    /// The timer fires it so long after the row has entered the state.
    pub after: Option<Duration>,
    /// The scope that a credential needs.
    pub scope: Option<String>,
}

/// What must hold of the row and the inputs.
#[derive(Debug)]
pub(super) struct TransitionCondition {
    /// As it stands in the file.
    pub text: String,
    pub rule: Rule,
}

/// A field that a transition sets to an input.
#[derive(Debug)]
pub(super) struct SetField {
    pub field: Field,
    /// Whether the caller has to give it.
    pub required: bool,
}

/// The states and the transitions between them, as they stand in the file.
pub(super) struct GraphText {
    pub set: StateSet,
    pub initial: Range<usize>,
    pub edges: Vec<StateEdge>,
    pub from: Expanded,
    pub transitions: Vec<TransitionText>,
    /// States of an older definition, and what they became.
    pub moved: Vec<(String, String)>,
}

impl DeclaredTransition {
    /// What a caller gives.
    pub fn inputs(&self) -> Vec<Property> {
        let fields = self.set.iter().map(|SetField { field, required }| {
            let property = field.property();
            let nullable = field.optional;
            Property { required: *required, nullable, about: "stored with the row".to_owned(), ..property }
        });
        fields.chain([reason()]).collect()
    }
}

/// Why a caller does it.
fn reason() -> Property {
    let about = format!("why, for the history; at most {LAST_REASON_BYTES_MAX} bytes");
    Property::optional(REASON, Form::Value(Type::Text), &about).or_null()
}

/// A text, or a list of texts.
fn texts_of(settings: &mut SettingsReader<'_>, name: &'static str) -> Option<Vec<PlacedText>> {
    let node = settings.node(name)?;
    let nodes = match node.value {
        TreeValue::List(nodes) => nodes,
        _ => vec![node],
    };
    let mut texts = Vec::new();
    for node in nodes {
        match node.value {
            TreeValue::Text(text) => texts.push(PlacedText { text, span: node.span }),
            other => {
                let problem = BlueprintProblem::at(node.span, format!("`{name}`: expected text"));
                settings.add_problem(problem.label(format!("this is {}", other.kind())));
            }
        }
    }
    Some(texts)
}

fn text_of(settings: &mut SettingsReader<'_>, name: &'static str) -> Option<PlacedText> {
    let text = settings.maybe_text(name)?;
    Some(PlacedText { text, span: settings.span_of(name) })
}

/// Reads `after`: a span of time, from nothing on.
fn read_after(settings: &mut SettingsReader<'_>) -> Option<(Duration, Range<usize>)> {
    let PlacedText { text, span } = text_of(settings, "after")?;
    let after = parse_duration(&text).filter(|after| *after <= AFTER_MAX);
    if after.is_none() {
        let advice = "write a span of time like \"30m\" (ms, s, m, h, d), at most ten years";
        settings.problem_with_advice("after", format!("`{text}` cannot be the time of a state"), advice);
    }
    Some((after?, span))
}

/// Reads one transition.
fn read_transition(
    name: &str,
    name_span: Range<usize>,
    settings: &mut SettingsReader<'_>,
) -> Option<TransitionText> {
    let from = texts_of(settings, "from");
    let to = text_of(settings, "to");
    let after = read_after(settings);
    let condition = text_of(settings, "if");
    let set = texts_of(settings, "set").unwrap_or_default();
    let (send, enqueue) = (settings.node("send"), settings.node("enqueue"));
    let scope = settings.maybe_text("scope");
    check_name(name, &name_span, settings);
    if from.as_ref().is_none_or(Vec::is_empty) {
        let advice = "say where it begins: `from = \"PLACED\"`";
        let problem = BlueprintProblem::at(name_span.clone(), format!("`{name}` has no `from`"));
        settings.add_problem(problem.advice(advice));
    }
    if let Some((_, span)) = &after {
        let given = [("if", condition.is_some()), ("set", !set.is_empty()), ("scope", scope.is_some())];
        for (setting, _) in given.into_iter().filter(|(_, is_given)| *is_given) {
            let title = format!("the worker fires `{name}`, so it cannot have `{setting}`");
            let advice = "take out `after`, or declare a second transition for callers";
            settings.add_problem(BlueprintProblem::at(span.clone(), title).advice(advice));
        }
        if to.is_none() {
            let title = format!("the timer `{name}` has no `to`");
            let advice = "a timer leads to a state; it may be the same one, whose time begins anew then";
            settings.add_problem(BlueprintProblem::at(span.clone(), title).advice(advice));
        }
    }
    if let Some(scope) = &scope {
        check_scope(scope, settings);
    }
    let edge = StateEdge { name: name.to_owned(), name_span, from: from?, to, after };
    Some(TransitionText { edge, condition, set, send, enqueue, scope })
}

/// The name of a transition is a part of a path, and of the names of events and scopes.
fn check_name(name: &str, span: &Range<usize>, settings: &mut SettingsReader<'_>) {
    let is_plain = name.starts_with(|c: char| c.is_ascii_lowercase())
        && name.len() <= 48
        && name.chars().all(|c| c.is_ascii_lowercase() || c.is_ascii_digit() || c == '_');
    if !is_plain {
        let title = format!("`{name}` cannot be the name of a transition");
        let problem = BlueprintProblem::at(span.clone(), title);
        settings.add_problem(problem.advice("write at most 48 of a-z, 0-9 and `_`, a letter first"));
    } else if RESERVED.contains(&name) {
        let problem = BlueprintProblem::at(span.clone(), format!("every workflow has `{name}` already"));
        settings.add_problem(problem.advice("give the transition another name"));
    }
}

/// A scope is a word; the general ones and those that name an action are there without being declared.
fn check_scope(scope: &str, settings: &mut SettingsReader<'_>) {
    let is_plain =
        !scope.is_empty() && scope.chars().all(|c| c.is_ascii_lowercase() || c.is_ascii_digit() || c == '_');
    if !is_plain || ["read", "write", "admin"].contains(&scope) {
        let title = format!("`{scope}` cannot be the scope of a transition");
        settings.problem_with_advice("scope", title, "write a word of your own: `scope = \"warehouse\"`");
    }
}

/// Reads the states and what leads from one to another. `None` after a problem.
pub(super) fn read_graph(settings: &mut SettingsReader<'_>) -> Option<GraphText> {
    let before = settings.problem_count();
    let initial = text_of(settings, "initial");
    let finals = texts_of(settings, "final").unwrap_or_default();
    if initial.is_none() && !settings.has("initial") {
        let advice = "name the state that a new row is in: `initial = \"PLACED\"`";
        settings.problem_with_advice("initial", "there is no `initial`", advice);
    }
    let transitions = settings.each("on", read_transition);
    let moved = settings.texts_by_name("moved");
    if transitions.is_empty() && settings.problem_count() == before {
        let advice = "declare one: `[workflow.order.on]` and `pay = { from = \"PLACED\", to = \"PAID\" }`";
        settings.problem_with_advice("on", "there are no transitions", advice);
    }
    if settings.problem_count() > before {
        return None;
    }
    let initial = initial?;
    let edges: Vec<StateEdge> = transitions.iter().map(|one| one.edge.clone()).collect();
    let checked = StateSet::of(&initial, &finals, &edges).and_then(|set| {
        let from = set.expand(&edges)?;
        let problems = set.problems(&edges, &from);
        if problems.is_empty() { Ok((set, from)) } else { Err(problems) }
    });
    let (set, from) = match checked {
        Ok(checked) => checked,
        Err(problems) => {
            problems.into_iter().for_each(|problem| settings.add_problem(problem));
            return None;
        }
    };
    check_moved(settings, &set, &moved);
    Some(GraphText { set, initial: initial.span, edges, from, transitions, moved })
}

/// States of an older definition become states of this one.
fn check_moved(settings: &mut SettingsReader<'_>, set: &StateSet, moved: &[(String, String)]) {
    for (old, new) in moved {
        if set.states.contains(old) {
            let title = format!("{old} is a state of this definition, so its rows are not moved");
            settings.problem_with_advice("moved", title, "take it out of `moved`");
        }
        if !set.states.contains(new) {
            let title = format!("`moved` leads from {old} to `{new}`, which is no state");
            let near = nearest(new, set.states.iter().map(String::as_str));
            let advice = near.map_or_else(
                || format!("there are {}", set.states.join(", ")),
                |near| format!("did you mean {near}?"),
            );
            settings.problem_with_advice("moved", title, advice);
        }
    }
}

/// What a transition is checked against.
pub(super) struct TransitionContext<'a> {
    pub blueprint: &'a Blueprint,
    pub resources: &'a [Resource],
    pub def: &'a TableDef,
    pub key: &'a [Field],
    pub fields: &'a [Field],
}

impl TransitionContext<'_> {
    /// Checks the names in a transition and the types of its templates. `None` after a problem.
    pub fn read(
        &self,
        settings: &mut SettingsReader<'_>,
        one: &TransitionText,
        from: &[String],
    ) -> Option<DeclaredTransition> {
        let before = settings.problem_count();
        let set = one.set.iter().filter_map(|name| self.set_field(settings, name)).collect();
        let mut declared = DeclaredTransition {
            name: one.edge.name.clone(),
            from: from.to_vec(),
            to: one.edge.to.as_ref().map(|to| to.text.clone()),
            condition: None,
            set,
            outputs: Vec::new(),
            after: one.edge.after.as_ref().map(|(after, _)| *after),
            scope: one.scope.clone(),
        };
        declared.condition =
            one.condition.as_ref().and_then(|text| self.condition(settings, text, &declared.inputs()));
        let scope = RowScope { key: self.key, fields: self.fields };
        let places = outputs::OutputPlaces { blueprint: self.blueprint, resources: self.resources };
        declared.outputs.extend(outputs::read_sends(settings, one.send.as_ref(), &places, &scope));
        declared.outputs.extend(outputs::read_jobs(settings, one.enqueue.as_ref(), &places, &scope));
        (settings.problem_count() == before).then_some(declared)
    }

    /// A field that is set: `payment`, or `payment?` if the caller may leave it out.
    fn set_field(&self, settings: &mut SettingsReader<'_>, placed: &PlacedText) -> Option<SetField> {
        let (name, required) = match placed.text.strip_suffix('?') {
            Some(name) => (name, false),
            None => (placed.text.as_str(), true),
        };
        let found = self.fields.iter().find(|field| field.name == name);
        if found.is_none() {
            let problem = BlueprintProblem::at(placed.span.clone(), format!("there is no field `{name}`"));
            let near = nearest(name, self.fields.iter().map(|field| field.name.as_str()));
            settings.add_problem(match near {
                Some(near) => problem.advice(format!("did you mean `{near}`?")),
                None => problem.advice("declare it in `fields`"),
            });
        }
        Some(SetField { field: found?.clone(), required })
    }

    fn condition(
        &self,
        settings: &mut SettingsReader<'_>,
        placed: &PlacedText,
        inputs: &[Property],
    ) -> Option<TransitionCondition> {
        let columns = RuleColumns::from(self.def).visible();
        let rule = match Rule::parse(&placed.text, &columns, inputs) {
            Ok(rule) => rule.rule().clone(),
            Err(error) => {
                let problem = error.problem(&self.blueprint.text, placed.span.clone(), &placed.text);
                settings.add_problem(problem);
                return None;
            }
        };
        let mut names_claim = false;
        rule.terms(&mut |term| names_claim |= matches!(term, Term::Claim(_)));
        if names_claim {
            let title = "a condition of a transition is about the row and the inputs, not about claims";
            let problem = BlueprintProblem::at(placed.span.clone(), title);
            settings.add_problem(problem.advice("write what claims allow in `allow`"));
        }
        Some(TransitionCondition { text: placed.text.clone(), rule })
    }
}
