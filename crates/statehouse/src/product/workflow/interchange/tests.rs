//! Charts that are written and read back.

use super::*;
use crate::blueprint::Blueprint;
use crate::product::workflow::StateChart;
use crate::resource;

const BLUEPRINT: &str = r#"
[effect.mail]
url = "https://mail.example/"
[schedule.label]
[workflow.order]
key     = { order_id = "text" }
fields  = { total = "int?", payment = "text?" }
initial = "open.new"
final   = ["CLOSED"]
[workflow.order.on]
take   = { from = "open.new", to = "open.taken", scope = "desk" }
pay    = { from = "open.*", to = "PAID", if = "total < 10", set = ["payment", "total?"], send = { mail = { "to" = "{payment}", "n" = [1, true] } } }
ship   = { from = "PAID", to = "CLOSED", enqueue = { label = { "id" = "{order_id}" } } }
touch  = { from = ["PAID", "open.new"] }
expire = { from = "PAID", to = "CLOSED", after = "30m" }
again  = { from = "open.taken", to = "open.taken", after = "1h" }
"#;

fn chart_of(text: &str) -> StateChart {
    let blueprint = Blueprint::read("statehouse.toml", text).unwrap();
    let resources = resource::declare(&blueprint).unwrap_or_else(|problems| panic!("{problems}\n{text}"));
    let workflow = resources.iter().find_map(|resource| resource.state_chart.clone());
    StateChart::clone(&workflow.unwrap())
}

/// The chart with its transitions in the order of their names, and the states of each in order.
fn sorted(mut chart: StateChart) -> StateChart {
    chart.states.sort();
    chart.transitions.iter_mut().for_each(|one| one.from.sort());
    chart.transitions.sort_by(|one, other| one.name.cmp(&other.name));
    chart
}

#[test]
fn what_is_exported_can_be_imported() {
    let chart = chart_of(BLUEPRINT);
    let exported = serde_json::to_string_pretty(&chart.to_xstate()).unwrap();
    let imported = import_xstate(&exported, "order").unwrap_or_else(|problems| panic!("{problems:?}"));
    let with_fields =
        imported.replace("initial =", "fields  = { total = \"int?\", payment = \"text?\" }\ninitial =");
    let besides = "[effect.mail]\nurl = \"https://mail.example/\"\n[schedule.label]\n";
    assert_eq!(sorted(chart_of(&format!("{besides}{with_fields}"))), sorted(chart));
}

#[test]
fn an_xstate_machine_has_nested_states() {
    let machine = chart_of(BLUEPRINT).to_xstate();
    assert_eq!((&machine["id"], &machine["initial"]), (&"order".into(), &"open".into()));
    assert_eq!(machine["states"]["open"]["initial"], "new");
    let pay = &machine["states"]["open"]["states"]["taken"]["on"]["pay"];
    assert_eq!(pay["target"], "#order.PAID");
    assert_eq!(pay["guard"]["params"]["if"], "total < 10");
    assert_eq!(machine["states"]["PAID"]["after"]["1800000"]["meta"]["transition"], "expire");
    assert_eq!(machine["states"]["CLOSED"]["type"], "final");
}

#[test]
fn a_mermaid_diagram_has_every_arrow() {
    let diagram = chart_of(BLUEPRINT).to_mermaid();
    for line in [
        "state \"open\" as open {",
        "state \"new\" as open__new",
        "[*] --> open__new: start",
        "open__new --> open__taken: take",
        "open__taken --> PAID: pay [total < 10]",
        "PAID --> CLOSED: (expire after 30m)",
        "PAID --> PAID: touch",
        "CLOSED --> [*]",
    ] {
        assert!(diagram.lines().any(|written| written.trim() == line), "{line} is not in\n{diagram}");
    }
}

#[test]
fn a_machine_of_the_editor_is_imported() {
    let machine = r##"{
  "id": "toggle",
  "context": {"count": 0, "owner": "", "tags": []},
  "initial": "off",
  "states": {
    "off": {"on": {"TURN_ON": "on", "breakIt": {"target": "#broken"}}},
    "on": {
      "initial": "bright",
      "on": {"TURN_OFF": {"target": "off"}},
      "states": {
        "bright": {"on": {"DIM": [{"target": "dark"}]}},
        "dark": {"after": {"500": {"target": "bright"}}}
      }
    },
    "gone": {"id": "broken", "type": "final"}
  }
}"##;
    let blueprint = import_xstate(machine, "lamp").unwrap();
    let chart = chart_of(&blueprint);
    assert_eq!((chart.initial.as_str(), chart.finals.as_slice()), ("off", &["gone".to_owned()][..]));
    let off = chart.transition("turn_off").unwrap();
    assert_eq!(off.from, ["on.bright", "on.dark"]);
    assert_eq!(chart.transition("turn_on").unwrap().to.as_deref(), Some("on.bright"));
    assert_eq!(chart.transition("break_it").unwrap().to.as_deref(), Some("gone"));
    assert_eq!(chart.timer_of("on.dark").unwrap().to.as_deref(), Some("on.bright"));
    assert!(
        blueprint.contains("fields  = { count = \"int?\", owner = \"text?\", tags = \"json?\" }"),
        "{blueprint}"
    );
}

#[test]
fn one_event_with_several_targets_becomes_several_transitions() {
    let machine = r#"{"initial": "a", "states": {"a": {"on": {"NEXT": "b"}}, "b": {"on": {"NEXT": "c"}}, "c": {"type": "final"}}}"#;
    let chart = chart_of(&import_xstate(machine, "steps").unwrap());
    let arrows: Vec<(&str, &str)> =
        chart.transitions.iter().map(|one| (one.name.as_str(), one.to.as_deref().unwrap())).collect();
    assert_eq!(arrows, [("next", "b"), ("next_b", "c")]);
}

#[test]
fn what_has_no_meaning_is_refused_with_its_line() {
    let machine = r#"{
  "id": "order",
  "initial": "a",
  "states": {
    "a": {
      "entry": ["log"],
      "invoke": {"src": "fetch"},
      "on": {
        "GO": {"target": "b", "guard": "isRich"},
        "ALSO": [{"target": "b", "guard": "x"}, {"target": "a"}],
        "LOST": "nowhere"
      }
    },
    "b": {"type": "parallel", "after": {"SOON": "a"}, "on": {"X": {"actions": ["notify"]}}}
  }
}"#;
    let problems = import_xstate(machine, "order").unwrap_err();
    let told: Vec<(usize, bool)> = [
        (6, "`entry`"),
        (7, "`invoke`"),
        (9, "guard of `GO`"),
        (10, "several targets"),
        (11, "no state of the machine"),
        (14, "two workflows of parallel states"),
        (14, "name of a delay"),
        (14, "name of a function"),
    ]
    .into_iter()
    .map(|(line, text)| (line, problems.iter().any(|one| one.line == line && one.title.contains(text))))
    .collect();
    assert!(told.iter().all(|(_, is_told)| *is_told), "{told:?}\n{problems:?}");
    assert!(import_xstate("{", "x").unwrap_err()[0].title.contains("no JSON"));
    assert!(import_xstate("{}", "x").unwrap_err()[0].title.contains("`initial`"));
}
