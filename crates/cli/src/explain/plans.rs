//! Golden files of what actions mean: for each action of each archetype the reads and plans that it sends to a store, and
//! for each worker its plans, as text that is the same for every engine. A change of a guard, an assignment or an event is
//! a difference of these files.
//!
//! `STATEHOUSE_BLESS=1 cargo test --workspace --all-features --bin statehouse plans` writes them anew. Read the difference.

use std::collections::BTreeMap;

use statehouse::action::Action;
use statehouse::{Blueprint, Resource, archetypes, resource};
use statehouse_store::{ExplainRequest, Explanation, Plan};

use super::golden::{check, differs};
use super::{RecordedCall, record_action};

mod workers;

/// Resources with settings that change plans; the specimens have only what an archetype requires.
pub(super) const VARIANTS: &str = include_str!("../../tests/golden/plans/variants.toml");

#[tokio::test]
async fn the_plan_of_every_action_and_worker_is_golden() {
    let mut texts: BTreeMap<&'static str, String> = BTreeMap::new();
    for (name, text) in [("specimens", archetypes::specimens().as_str()), ("variants", VARIANTS)] {
        let blueprint = Blueprint::read(name, text).unwrap();
        let resources = resource::declare(&blueprint).unwrap();
        let by_workers = workers::plans(&blueprint, &resources).await;
        for resource in &resources {
            let file = texts.entry(resource.archetype.keyword()).or_default();
            for action in &resource.actions {
                file.push_str(&with_numbered_ids(&action_text(&blueprint, resource, action).await));
                file.push('\n');
            }
            for name in workers::names(resource) {
                let plans = by_workers.get(&name).filter(|plans| !plans.is_empty());
                let plans = plans.unwrap_or_else(|| panic!("the worker {name} has committed no plan"));
                file.push_str(&with_numbered_ids(&format!("worker {name}\n{}\n", plans.concat())));
            }
        }
    }
    check(texts.iter().filter_map(|(keyword, text)| differs(&format!("plans/{keyword}.txt"), text)));
}

/// The reads and plans of one action.
async fn action_text(blueprint: &Blueprint, resource: &Resource, action: &Action) -> String {
    let full = format!("{}.{}", resource.name, action.name);
    let recorded = record_action(blueprint, resource, action).await;
    let (asked, refusal) = recorded.unwrap_or_else(|failure| panic!("{full} is not explained: {failure:?}"));
    let mut section = format!("{full}\n");
    asked.iter().for_each(|asked| write_asked(&mut section, asked));
    if let Some(refusal) = refusal {
        section.push_str(&format!("  refused: {}\n", refusal.code));
    }
    section
}

/// A read or a plan, indented below the name of its action.
fn write_asked(section: &mut String, asked: &RecordedCall) {
    // What Redis gets is pinned by its scripts.
    let purposes = |holds: &Explanation| {
        let purposes: Vec<&str> = holds.requests.iter().map(|request| request.purpose.as_str()).collect();
        purposes.join("\n")
    };
    let text = asked.matched(purposes, |asked| match asked {
        ExplainRequest::Commit(plan) => with_sorted_assignments(plan).to_string(),
        asked => asked.to_string(),
    });
    let (head, indent) =
        if matches!(asked, RecordedCall::Commit(_)) { ("  plan\n", "    ") } else { ("", "  ") };
    section.push_str(head);
    for line in text.lines() {
        section.push_str(indent);
        section.push_str(line);
        section.push('\n');
    }
}

/// The same plan, with assignments in the order of the table's columns: their order within a step has no meaning.
fn with_sorted_assignments(plan: &Plan) -> Plan {
    let mut builder = plan.to_builder();
    for step in &mut builder.steps {
        let table = step.table.clone();
        step.assignments.sort_by_key(|assignment| table.position(&assignment.column));
    }
    builder.build().unwrap()
}

/// Replaces generated ids (UUIDs) by their number of appearance: how many ids a call draws before is no part of a plan.
fn with_numbered_ids(text: &str) -> String {
    const LENGTH: usize = 36;
    let is_id = |candidate: &str| {
        let is_dash = |index| [8, 13, 18, 23].contains(&index);
        let fits =
            |(index, byte): (usize, u8)| if is_dash(index) { byte == b'-' } else { byte.is_ascii_hexdigit() };
        candidate.bytes().enumerate().all(fits)
    };
    let (mut numbered, mut ids, mut rest) = (String::new(), Vec::new(), text);
    while let Some(first) = rest.chars().next() {
        match rest.get(..LENGTH).filter(|candidate| is_id(candidate)) {
            Some(id) => {
                let number = ids.iter().position(|known| *known == id).unwrap_or_else(|| {
                    ids.push(id);
                    ids.len() - 1
                });
                numbered.push_str(&format!("<id {}>", number + 1));
                rest = &rest[LENGTH..];
            }
            None => {
                numbered.push(first);
                rest = &rest[first.len_utf8()..];
            }
        }
    }
    numbered
}

#[test]
fn generated_ids_are_numbered_by_appearance() {
    let (a, b) = ("018bcfe5-6800-7000-8000-0123456789ab", "018bcfe5-6800-7000-8000-0123456789ac");
    assert_eq!(with_numbered_ids(&format!("é {b} {a}:{b}")), "é <id 1> <id 2>:<id 1>");
}
