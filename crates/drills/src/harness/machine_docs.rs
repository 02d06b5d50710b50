//! The state diagram and the table of transitions that the page of an archetype shows for each machine of its specimen.

use std::fmt::Write as _;

use anyhow::Result;
use statehouse::archetypes::Archetype;
use statehouse::declare::machine::{Edge, EdgeKind};
use statehouse::{Blueprint, Resource};

/// The machines of an archetype's specimen as Markdown; empty if it has none.
pub fn machine_section(archetype: &Archetype) -> Result<String> {
    if !archetype.is_declarable() {
        return Ok(String::new());
    }
    let blueprint = Blueprint::read("specimen", &archetype.specimen_blueprint())?;
    let mut text = String::new();
    let resources = statehouse::resource::declare(&blueprint)?;
    for resource in &resources {
        if resource.archetype.keyword() == archetype.keyword && resource.machine.is_some() {
            text.push_str(&section(resource, &resources));
        }
    }
    Ok(text)
}

/// What fires a transition whose plan is written by hand: an action of its name, of the resource or of one that is declared with it.
fn fired_by_hand(resource: &Resource, resources: &[Resource], transition: &str) -> String {
    if resource.action(transition).is_some() {
        return "a caller".to_owned();
    }
    let of_one_thing =
        |other: &&Resource| other.name.starts_with(&resource.name) || resource.name.starts_with(&other.name);
    let mut others = resources.iter().filter(of_one_thing);
    let firing = others.find(|other| other.action(transition).is_some());
    firing.map_or_else(|| "the server".to_owned(), |other| format!("`{}.{transition}`", other.name))
}

fn section(resource: &Resource, resources: &[Resource]) -> String {
    let Some(machine) = &resource.machine else { return String::new() };
    let graph = machine.graph();
    let mut text = format!("`{}`:\n\n```mermaid\n{}```\n\n", resource.name, graph.mermaid());
    text.push_str(
        "| transition | fired by | from | to | event | refused with |\n|---|---|---|---|---|---|\n",
    );
    let mut rows: Vec<(&Edge, Vec<&str>)> = Vec::new();
    for edge in &graph.edges {
        let from = edge.from.as_deref().unwrap_or("(none)");
        let is_same = |other: &Edge| {
            let both = (other.transition.as_ref(), other.case.as_ref())
                == (edge.transition.as_ref(), edge.case.as_ref());
            both && (other.to == edge.to || (other.from == other.to && edge.from == edge.to))
        };
        match rows.iter_mut().find(|(other, _)| is_same(other)) {
            Some((_, origins)) => origins.push(from),
            None => rows.push((edge, vec![from])),
        }
    }
    for (edge, origins) in &rows {
        let by = match edge.kind {
            EdgeKind::Part if resource.action(&edge.transition).is_some() => "a caller".to_owned(),
            EdgeKind::Call => "a caller".to_owned(),
            EdgeKind::Deadline => "the server, at the deadline".to_owned(),
            EdgeKind::DeadlineOrCall => "the server or a caller, at the deadline".to_owned(),
            EdgeKind::Part => "plans of other rows".to_owned(),
            EdgeKind::ByHand => fired_by_hand(resource, resources, &edge.transition),
        };
        let to = if edge.from == edge.to { "(same)" } else { edge.to.as_deref().unwrap_or("(deleted)") };
        let event = edge.event.as_ref().map_or(String::new(), |event| format!("`{event}`"));
        let codes = resource.action(&edge.transition).map(|action| &action.refusals);
        let codes: Vec<String> = codes.into_iter().flatten().map(|code| format!("`{code}`")).collect();
        let has_cases = rows.iter().filter(|(other, _)| other.transition == edge.transition).count() > 1;
        let case =
            if has_cases && !edge.case.is_empty() { format!(": {}", edge.case) } else { String::new() };
        let _ = writeln!(
            text,
            "| `{}`{case} | {by} | {} | {to} | {event} | {} |",
            edge.transition,
            origins.join(", "),
            codes.join(", ")
        );
    }
    text.push('\n');
    text
}
