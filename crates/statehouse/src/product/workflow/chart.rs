//! A declared workflow as data: for checks, for the proof, and for exports.

use std::time::Duration;

use serde_json::{Map, Value as Json};

use super::WorkflowSpec;
use super::declaration::DeclaredTransition;
use super::outputs::output_key;
use crate::blueprint::tree::{Node, TreeValue};

/// The states of a workflow and its transitions, in the order of the blueprint.
#[derive(Clone, Debug, PartialEq)]
pub struct StateChart {
    /// The name of the workflow.
    pub name: String,
    /// The state of a new row.
    pub initial: String,
    /// All states.
    pub states: Vec<String>,
    /// Those that end the life of a row.
    pub finals: Vec<String>,
    /// The transitions.
    pub transitions: Vec<ChartTransition>,
    /// States of an older definition, and what their rows become.
    pub moved: Vec<(String, String)>,
    /// Whether each transition has a row in the history.
    pub has_history: bool,
}

/// A transition of a chart.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct ChartTransition {
    /// Its name.
    pub name: String,
    /// The states that it begins with.
    pub from: Vec<String>,
    /// The state that it leads to; `None` if the row keeps its state.
    pub to: Option<String>,
    /// The condition on the row and the inputs.
    pub condition: Option<String>,
    /// The fields that it sets to inputs, with `?` behind those that may be left out.
    pub set: Vec<String>,
    /// The effects that it sends, each with the template of its body.
    pub sends: Vec<(String, Json)>,
    /// The schedules of the jobs that it enqueues, each with the template of the payload.
    pub jobs: Vec<(String, Json)>,
    /// How long after the row has entered the state the worker does it.
    pub after: Option<Duration>,
    /// The scope that a credential needs for it.
    pub scope: Option<String>,
}

impl StateChart {
    pub(super) fn of(workflow: &WorkflowSpec) -> StateChart {
        StateChart {
            name: workflow.name.clone(),
            initial: workflow.states.initial.clone(),
            states: workflow.states.states.clone(),
            finals: workflow.states.finals.clone(),
            transitions: workflow.transitions.iter().map(ChartTransition::of).collect(),
            moved: workflow.moved.clone(),
            has_history: workflow.history.is_some(),
        }
    }

    /// The key of the effects and jobs of a transition: of the row with this key, and the transition with this number.
    pub fn output_key(&self, key: &str, seq: i64) -> String {
        output_key(&self.name, key, seq)
    }

    /// A transition by its name.
    pub fn transition(&self, name: &str) -> Option<&ChartTransition> {
        self.transitions.iter().find(|one| one.name == name)
    }

    /// The timer of a state.
    pub fn timer_of(&self, state: &str) -> Option<&ChartTransition> {
        let leaves =
            |one: &&ChartTransition| one.after.is_some() && one.from.iter().any(|from| from == state);
        self.transitions.iter().find(leaves)
    }
}

impl ChartTransition {
    fn of(one: &DeclaredTransition) -> ChartTransition {
        let set = one.set.iter().map(|set| match set.required {
            true => set.field.name.clone(),
            false => format!("{}?", set.field.name),
        });
        let outputs = |is_job: bool| {
            let outputs = one.outputs.iter().filter(move |output| output.is_job() == is_job);
            outputs.map(|output| (output.resource.clone(), output.source.clone())).collect()
        };
        ChartTransition {
            name: one.name.clone(),
            from: one.from.clone(),
            to: one.to.clone(),
            condition: one.condition.as_ref().map(|condition| condition.text.clone()),
            set: set.collect(),
            sends: outputs(false),
            jobs: outputs(true),
            after: one.after,
            scope: one.scope.clone(),
        }
    }
}

/// A value of a blueprint as JSON.
pub(super) fn json_of(node: &Node) -> Json {
    match &node.value {
        TreeValue::Text(text) | TreeValue::Time(text) => text.as_str().into(),
        TreeValue::Int(int) => (*int).into(),
        TreeValue::Float(float) => (*float).into(),
        TreeValue::Bool(bool) => (*bool).into(),
        TreeValue::List(items) => items.iter().map(json_of).collect(),
        TreeValue::Table(entries) => {
            let fields = entries.iter().map(|entry| (entry.key.clone(), json_of(&entry.value)));
            Json::Object(fields.collect::<Map<String, Json>>())
        }
    }
}
