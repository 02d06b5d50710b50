//! XState v5 JSON: what Stately's editor and visualizer read.
//!
//! States with dots become nested states. A condition is a guard of the type `condition` with its text, what a transition sets, sends
//! and enqueues are actions of these types, and its scope and the name of a timer stand in `meta`. [`super::import`] reads them back.

use serde_json::{Map, Value as Json, json};

use super::{CONDITION, ENQUEUE, SEND, SET};
use crate::product::workflow::chart::{ChartTransition, StateChart};

pub(super) fn export(chart: &StateChart) -> Json {
    let mut root = node(chart, "");
    root.insert("id".to_owned(), chart.name.as_str().into());
    Json::Object(root)
}

/// The node of a state, or of one that has sub-states; the root has no name.
fn node(chart: &StateChart, path: &str) -> Map<String, Json> {
    if chart.states.iter().any(|state| state == path) {
        return state_node(chart, path);
    }
    let mut states: Map<String, Json> = Map::new();
    let names = chart.states.iter().filter_map(|state| child_of(path, state));
    let first = names.clone().next();
    for name in names {
        let below = if path.is_empty() { name.to_owned() } else { format!("{path}.{name}") };
        if !states.contains_key(name) {
            states.insert(name.to_owned(), Json::Object(node(chart, &below)));
        }
    }
    // The first sub-state is initial, except on the way to the initial state.
    let initial = child_of(path, &chart.initial).or(first).unwrap_or_default();
    Map::from_iter([("initial".to_owned(), initial.into()), ("states".to_owned(), Json::Object(states))])
}

/// The name below a path on the way to a state.
fn child_of<'s>(path: &str, state: &'s str) -> Option<&'s str> {
    let rest = if path.is_empty() { Some(state) } else { state.strip_prefix(path)?.strip_prefix('.') };
    rest?.split('.').next()
}

fn state_node(chart: &StateChart, state: &str) -> Map<String, Json> {
    let leaves = |one: &&ChartTransition| one.from.iter().any(|from| from == state);
    let exits: Vec<&ChartTransition> = chart.transitions.iter().filter(leaves).collect();
    let (mut on, mut after) = (Map::new(), Map::new());
    for one in &exits {
        match one.after {
            Some(span) => after.insert(span.as_millis().to_string(), transition(chart, one)),
            None => on.insert(one.name.clone(), transition(chart, one)),
        };
    }
    let mut node = Map::new();
    if exits.is_empty() && chart.finals.iter().any(|known| known == state) {
        node.insert("type".to_owned(), "final".into());
    }
    for (name, content) in [("on", on), ("after", after)] {
        if !content.is_empty() {
            node.insert(name.to_owned(), Json::Object(content));
        }
    }
    node
}

fn transition(chart: &StateChart, one: &ChartTransition) -> Json {
    let mut fields = Map::new();
    if let Some(to) = &one.to {
        fields.insert("target".to_owned(), format!("#{}.{to}", chart.name).into());
        // A target that is the state itself, or above it, is left and entered again, as its timer is set anew.
        fields.insert("reenter".to_owned(), true.into());
    }
    if let Some(condition) = &one.condition {
        fields.insert("guard".to_owned(), json!({"type": CONDITION, "params": {"if": condition}}));
    }
    let mut actions: Vec<Json> = Vec::new();
    if !one.set.is_empty() {
        actions.push(json!({"type": SET, "params": {"fields": one.set}}));
    }
    actions.extend(
        one.sends
            .iter()
            .map(|(effect, body)| json!({"type": SEND, "params": {"effect": effect, "body": body}})),
    );
    actions.extend(one.jobs.iter().map(
        |(schedule, payload)| json!({"type": ENQUEUE, "params": {"schedule": schedule, "payload": payload}}),
    ));
    if !actions.is_empty() {
        fields.insert("actions".to_owned(), actions.into());
    }
    let mut meta = Map::new();
    if one.after.is_some() {
        meta.insert("transition".to_owned(), one.name.as_str().into());
    }
    if let Some(scope) = &one.scope {
        meta.insert("scope".to_owned(), scope.as_str().into());
    }
    if !meta.is_empty() {
        fields.insert("meta".to_owned(), Json::Object(meta));
    }
    Json::Object(fields)
}
