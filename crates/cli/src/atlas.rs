//! `atlas`: the 34 archetypes, and what is built of them.

use serde_json::{Value as Json, json};
use statehouse::action::Action;
use statehouse::archetypes::{self, Archetype};
use statehouse::atlas::{self, AtlasEntry};
use statehouse::{Blueprint, resource};
#[cfg(feature = "proof")]
use statehouse_drills::{coverage, drill::Drill};

use crate::arguments::Atlas;
use crate::output::{CliFailure, Output};

pub(crate) fn run(arguments: &Atlas, output: &Output) -> Result<(), CliFailure> {
    let specimens = resource::declare(&Blueprint::read("specimens", &archetypes::specimens())?)?;
    let actions = |archetype: &AtlasEntry| -> Option<Vec<Action>> {
        let ours = specimens.iter().filter(|resource| resource.archetype.code == archetype.code);
        let actions: Vec<Action> = ours.flat_map(|resource| resource.actions.clone()).collect();
        (!actions.is_empty()).then_some(actions)
    };
    let Some(wanted) = &arguments.archetype else {
        let all: Vec<Json> = atlas::archetypes().iter().map(|a| entry(a, actions(a).as_deref())).collect();
        output.show(&json!(all), || {
            let line = |archetype: &AtlasEntry| {
                let mark = if resource::is_built(archetype) { "built" } else { "not built yet" };
                format!("{}  {:<14} {:<48} {mark}", archetype.code, archetype.keyword(), archetype.name)
            };
            atlas::archetypes().iter().map(line).collect::<Vec<_>>().join("\n")
        });
        return Ok(());
    };
    let found = atlas::archetypes()
        .iter()
        .find(|archetype| archetype.keyword() == wanted || archetype.code.eq_ignore_ascii_case(wanted));
    let Some(archetype) = found else {
        return Err(CliFailure::Usage(format!(
            "there is no archetype `{wanted}`; `statehouse atlas` lists them"
        )));
    };
    let actions = actions(archetype);
    output.show(&entry(archetype, actions.as_deref()), || describe(archetype, actions.as_deref()));
    Ok(())
}

fn entry(archetype: &AtlasEntry, actions: Option<&[Action]>) -> Json {
    let actions: Option<Vec<Json>> = actions.map(|actions| {
        let action = |a: &Action| json!({"name": a.name, "shape": a.shape, "mechanism": a.mechanism});
        actions.iter().map(action).collect()
    });
    let failures = archetype.failures.iter().map(|name| failure(archetype, name));
    let hotspots = archetype.hotspots.iter().map(|name| hotspot(archetype, name));
    json!({
        "code": archetype.code, "name": archetype.name, "kind": archetype.kind(),
        "implemented": resource::is_built(archetype),
        "states": archetype.states, "truth": archetype.truth, "actors": archetype.actors,
        "actions": actions,
        "failures": failures.collect::<Vec<_>>(), "hotspots": hotspots.collect::<Vec<_>>(),
    })
}

#[cfg(feature = "proof")]
fn failure(archetype: &AtlasEntry, name: &str) -> Json {
    let drill = coverage::drill(archetype, name);
    json!({"name": name, "drill": drill.map(Drill::name), "engines": drill.map(coverage::engines)})
}

/// This build knows no drills: what it cannot say is absent. A null would say that there is no drill.
#[cfg(not(feature = "proof"))]
fn failure(_: &AtlasEntry, name: &str) -> Json {
    json!({"name": name})
}

fn hotspot(archetype: &AtlasEntry, name: &str) -> Json {
    let relief = Archetype::relief_of(archetype, name);
    json!({
        "name": name, "switch": relief.map(|relief| relief.switch), "bench": relief.and_then(|relief| relief.bench),
    })
}

fn describe(archetype: &AtlasEntry, actions: Option<&[Action]>) -> String {
    let list = |name: &str, items: &[String]| format!("{name:<10} {}", items.join(", "));
    let mut lines = vec![
        format!("{} {} ({})", archetype.code, archetype.name, archetype.keyword()),
        list("states", &archetype.states),
        list("truth", &archetype.truth),
        list("actors", &archetype.actors),
        list("failures", &archetype.failures),
        list("hotspots", &archetype.hotspots),
        format!("{:<10} {}", "design", archetype.starter_box),
    ];
    match actions {
        None if resource::is_built(archetype) => {
            lines.push(format!("{:<10} none of its own: what is declared stands on it", "actions"));
        }
        None => lines.push(format!("{:<10} not built yet", "actions")),
        Some(actions) => {
            lines.push("actions".into());
            for action in actions {
                let answers = match action.answers {
                    [] => String::new(),
                    answers => format!("; answers: {}", answers.join(", ")),
                };
                lines.push(format!("  {:<9} {}, {}{answers}", action.name, action.shape, action.mechanism));
            }
        }
    }
    lines.join("\n")
}
