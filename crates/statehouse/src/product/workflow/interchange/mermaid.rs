//! Mermaid: a state diagram that documents and wikis draw.

use std::collections::BTreeMap;
use std::fmt::Write as _;

use crate::declare::settings::duration_text;
use crate::product::workflow::chart::{ChartTransition, StateChart};

/// Sub-states of a state, by their own names.
#[derive(Default)]
struct StateTree(BTreeMap<String, StateTree>);

impl StateTree {
    fn insert(&mut self, state: &str) {
        let (first, rest) = state.split_once('.').map_or((state, None), |(first, rest)| (first, Some(rest)));
        let below = self.0.entry(first.to_owned()).or_default();
        if let Some(rest) = rest {
            below.insert(rest);
        }
    }

    fn write(&self, text: &mut String, above: &str, depth: usize) {
        let indent = "    ".repeat(depth);
        for (name, below) in self.0.iter().filter(|(_, below)| !below.0.is_empty() || depth > 1) {
            let path = if above.is_empty() { name.clone() } else { format!("{above}.{name}") };
            let id = id_of(&path);
            let _ = match below.0.is_empty() {
                true => writeln!(text, "{indent}state \"{name}\" as {id}"),
                false => writeln!(text, "{indent}state \"{name}\" as {id} {{"),
            };
            if !below.0.is_empty() {
                below.write(text, &path, depth + 1);
                let _ = writeln!(text, "{indent}}}");
            }
        }
    }
}

/// A name without dots, which Mermaid does not take.
fn id_of(state: &str) -> String {
    state.replace('.', "__")
}

/// What stands at the arrow: the name, a timer's time, the condition.
fn label_of(one: &ChartTransition) -> String {
    let condition = one.condition.as_ref().map(|text| format!(" [{}]", text.replace([':', ';', '#'], " ")));
    let condition = condition.unwrap_or_default();
    match one.after {
        Some(after) => format!("({} after {}){condition}", one.name, duration_text(after)),
        None => format!("{}{condition}", one.name),
    }
}

pub(super) fn export(chart: &StateChart) -> String {
    let mut text = String::from("stateDiagram-v2\n");
    let mut tree = StateTree::default();
    chart.states.iter().for_each(|state| tree.insert(state));
    tree.write(&mut text, "", 1);
    let _ = writeln!(text, "    [*] --> {}: start", id_of(&chart.initial));
    for one in &chart.transitions {
        for from in &one.from {
            let to = one.to.as_ref().unwrap_or(from);
            let _ = writeln!(text, "    {} --> {}: {}", id_of(from), id_of(to), label_of(one));
        }
    }
    for state in &chart.finals {
        let _ = writeln!(text, "    {} --> [*]", id_of(state));
    }
    text
}
