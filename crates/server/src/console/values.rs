//! Values on pages: JSON by its form, times, states and links between rows.

use maud::{Markup, html};
use serde_json::{Map, Value as Json};
use statehouse::Resource;
use statehouse::action::{Action, RouteKind};
use statehouse::declare::machine::EdgeKind;
use statehouse::form::{Form, Property};
use statehouse::resource::key_text;
use statehouse_store::{Time, Type, Value};

use super::row_link;

/// Characters of a value in a table; the rest is cut off.
const CELL_CHARS_MAX: usize = 80;

/// What a state means for a person, told by a word and a shape.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum StateKind {
    Ok,
    Waiting,
    Failed,
    Over,
}

impl StateKind {
    fn class(self) -> &'static str {
        match self {
            StateKind::Ok => "ok",
            StateKind::Waiting => "waiting",
            StateKind::Failed => "failed",
            StateKind::Over => "over",
        }
    }

    fn shape(self) -> &'static str {
        match self {
            StateKind::Ok => "●",
            StateKind::Waiting => "◐",
            StateKind::Failed => "✕",
            StateKind::Over => "○",
        }
    }
}

/// Parts of names of states that a person should look at.
const FAILED_WORDS: [&str; 7] = ["FAIL", "DEAD", "PARK", "DIFFER", "STUCK", "UNKNOWN", "DOUBT"];
/// Parts of names of states that nothing leaves.
const OVER_WORDS: [&str; 10] = [
    "DELETED",
    "DONE",
    "COMPLETED",
    "CANCEL",
    "RELEASED",
    "EXPIRED",
    "FIRED",
    "CLOSED",
    "DELIVERED",
    "ENDED",
];
/// Parts of names of states that something will leave by itself.
const WAITING_WORDS: [&str; 5] = ["PENDING", "PROGRESS", "RETRY", "SENDING", "UNCERTAIN"];

/// Whether a state needs a person.
pub(super) fn needs_person(state: &str) -> bool {
    let state = state.to_ascii_uppercase();
    FAILED_WORDS.iter().any(|word| state.contains(word))
}

/// What a state means, from its name and from what the machine of the resource does with it.
pub(super) fn state_kind(resource: Option<&Resource>, state: &str) -> StateKind {
    if needs_person(state) {
        return StateKind::Failed;
    }
    let upper = state.to_ascii_uppercase();
    if OVER_WORDS.iter().any(|word| upper.contains(word)) {
        return StateKind::Over;
    }
    if WAITING_WORDS.iter().any(|word| upper.contains(word)) {
        return StateKind::Waiting;
    }
    let graph = resource.and_then(|resource| resource.machine.as_ref()).map(|machine| machine.graph());
    let Some(graph) = graph else { return StateKind::Ok };
    let leaving = || graph.edges.iter().filter(|edge| edge.from.as_deref() == Some(state));
    let by_itself = leaving().any(|edge| edge.kind != EdgeKind::Call && edge.to.as_deref() != Some(state));
    match leaving().next() {
        None => StateKind::Over,
        Some(_) if by_itself => StateKind::Waiting,
        Some(_) => StateKind::Ok,
    }
}

/// A state with its shape.
pub(super) fn state_mark(resource: Option<&Resource>, state: &str) -> Markup {
    let kind = state_kind(resource, state);
    html! { span class={ "state " (kind.class()) } { span aria-hidden="true" { (kind.shape()) } " " (state) } }
}

/// A state of something that is not a row.
pub(super) fn mark(kind: StateKind, word: &str) -> Markup {
    html! { span class={ "state " (kind.class()) } { span aria-hidden="true" { (kind.shape()) } " " (word) } }
}

/// A time, relative to now; the exact one is its title.
pub(super) fn time(at: Time, now: Time) -> Markup {
    let exact = at.to_string();
    html! { time datetime=(exact) title=(exact) { (relative(at, now)) } }
}

/// A time in words.
pub(super) fn relative(at: Time, now: Time) -> String {
    let (ahead, behind) = (at.since(now), now.since(at));
    if ahead.as_secs() > 0 { format!("in {}", span(ahead)) } else { format!("{} ago", span(behind)) }
}

/// A duration in words.
pub(super) fn span(span: std::time::Duration) -> String {
    match span.as_secs() {
        0 => format!("{} ms", span.as_millis()),
        seconds @ 1..120 => format!("{seconds} s"),
        seconds @ 120..7_200 => format!("{} min", seconds / 60),
        seconds @ 7_200..172_800 => format!("{} h", seconds / 3_600),
        seconds => format!("{} days", seconds / 86_400),
    }
}

/// The time in a value of this form.
pub(super) fn time_of(value: &Json, form: Option<&Form>) -> Option<Time> {
    if form != Some(&Form::Value(Type::Time)) {
        return None;
    }
    match Value::from_json(value.clone(), Type::Time).ok()? {
        Value::Time(time) => Some(time),
        _ => None,
    }
}

/// JSON without quotes around text.
pub(super) fn plain(value: &Json) -> String {
    match value {
        Json::String(text) => text.clone(),
        other => other.to_string(),
    }
}

/// A value on one line.
pub(super) fn cell(value: &Json, form: Option<&Form>, now: Time) -> Markup {
    if let Some(at) = time_of(value, form) {
        return time(at, now);
    }
    match value {
        Json::Null => html! { span class="null" title="null" { "–" } },
        Json::String(text) => html! { (cut(text)) },
        Json::Number(number) => html! { span class="number" { (number) } },
        Json::Bool(is) => html! { (is) },
        nested => html! { code { (cut(&nested.to_string())) } },
    }
}

fn cut(text: &str) -> String {
    match text.char_indices().nth(CELL_CHARS_MAX) {
        Some((end, _)) => format!("{}…", text.get(..end).unwrap_or_default()),
        None => text.to_owned(),
    }
}

/// The form of a named property of an answer.
pub(super) fn form_of<'f>(output: &'f Form, name: &str) -> Option<&'f Form> {
    properties(output).iter().find(|property| property.name == name).map(|property| &property.form)
}

/// The properties of an answer, or of the rows in it.
pub(super) fn properties(output: &Form) -> &[Property] {
    match output {
        Form::Object(properties) => match properties.iter().find(|property| property.name == ROWS) {
            Some(Property { form: Form::List(row), .. }) => row_properties(row),
            _ => properties,
        },
        Form::List(row) => row_properties(row),
        _ => &[],
    }
}

fn row_properties(row: &Form) -> &[Property] {
    if let Form::Object(properties) = row { properties } else { &[] }
}

/// The member of a page of a list that has its rows.
pub(super) const ROWS: &str = "items";

/// The rows in the answer of a list.
pub(super) fn rows_in(body: &Json) -> Option<&Vec<Json>> {
    match body {
        Json::Array(rows) => Some(rows),
        Json::Object(fields) => fields.get(ROWS).and_then(Json::as_array),
        _ => None,
    }
}

/// The key of a row as text, if the row has all of its columns.
pub(super) fn key_in(resource: &Resource, row: &Json) -> Option<String> {
    let part = |(name, kind): &(String, Type)| {
        let value = row.get(name)?.clone();
        Value::from_json(value, *kind).ok().filter(|value| !value.is_null())
    };
    let parts: Option<Vec<Value>> = resource.key.iter().map(part).collect();
    parts.filter(|parts| !parts.is_empty()).map(|parts| key_text(&parts))
}

/// The action that reads one row.
pub(super) fn read_action(resource: &Resource) -> Option<&Action> {
    let reads = |action: &&Action| !action.is_write() && action.route.kind == RouteKind::Item;
    resource.actions.iter().find(reads)
}

/// The action that lists rows.
pub(super) fn list_action(resource: &Resource) -> Option<&Action> {
    let lists = |action: &&Action| !action.is_write() && action.route.kind == RouteKind::Collection;
    resource.actions.iter().find(lists)
}

/// The rows that a row refers to: a column with the name of another resource's only key column, or of the resource itself.
pub(super) fn references(
    resources: &[Resource],
    resource: &Resource,
    row: &Map<String, Json>,
) -> Vec<(String, String, String)> {
    let mut found = Vec::new();
    for (name, value) in row {
        let others =
            resources.iter().filter(|other| other.name != resource.name && read_action(other).is_some());
        for other in others {
            let [(key, kind)] = other.key.as_slice() else { continue };
            if key != name && *name != other.name && *name != format!("{}_{key}", other.name) {
                continue;
            }
            let Ok(value) = Value::from_json(value.clone(), *kind) else { continue };
            if !value.is_null() {
                let text = key_text([&value]);
                found.push((name.clone(), format!("{} {text}", other.name), row_link(&other.name, &text)));
            }
        }
    }
    found
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Duration;

    #[test]
    fn times_are_relative() {
        let now = Time::from_millis(1_700_000_000_000);
        assert_eq!(relative(now.minus(Duration::from_secs(61)), now), "61 s ago");
        assert_eq!(relative(now.plus(Duration::from_secs(7_300)), now), "in 2 h");
        assert_eq!(relative(now, now), "0 ms ago");
    }

    #[test]
    fn states_that_need_a_person_are_known_by_their_names() {
        assert!(needs_person("FAILED") && needs_person("parked") && !needs_person("ACTIVE"));
        assert_eq!(state_kind(None, "DELETED"), StateKind::Over);
    }

    #[test]
    fn long_text_is_cut_at_a_character() {
        assert_eq!(cut(&"ü".repeat(200)).chars().count(), CELL_CHARS_MAX + 1);
    }
}
