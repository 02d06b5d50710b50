//! XState v5 JSON as a blueprint: what has a meaning there, and for all else a problem with its line.

use std::collections::BTreeMap;
use std::fmt::{self, Write as _};
use std::time::Duration;

use serde_json::{Map, Value as Json};

use super::json_place::{line_of, place_of};
use super::{CONDITION, ENQUEUE, SEND, SET};
use crate::declare::settings::duration_text;
use crate::product::workflow::chart::ChartTransition;

/// What cannot stand in a blueprint.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub struct ImportProblem {
    /// The line in the file, from 1.
    pub line: usize,
    /// What it is, and what to do.
    pub title: String,
}

impl fmt::Display for ImportProblem {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "line {}: {}", self.line, self.title)
    }
}

/// Reads an XState v5 machine, and writes the blueprint of a workflow of this name.
///
/// # Errors
/// All that has no meaning in a blueprint.
pub fn import_xstate(text: &str, name: &str) -> Result<String, Vec<ImportProblem>> {
    let root: Json = serde_json::from_str(text).map_err(|error| {
        vec![ImportProblem { line: error.line(), title: format!("this is no JSON: {error}") }]
    })?;
    let mut reader =
        MachineReader { text, root: &root, chart: ImportedChart::default(), problems: Vec::new() };
    let machine_id = root.get("id").and_then(Json::as_str).unwrap_or_default().to_owned();
    reader.chart.id = machine_id;
    reader.read_node(&root, "", &[]);
    reader.chart.initial = reader.initial_of(&root, "");
    reader.chart.fields = reader.fields(&root);
    match reader.problems.is_empty() {
        true => Ok(reader.chart.blueprint(name)),
        false => {
            reader.problems.sort_by_key(|problem| problem.line);
            Err(reader.problems)
        }
    }
}

/// What was read.
#[derive(Default)]
struct ImportedChart {
    id: String,
    initial: String,
    finals: Vec<String>,
    fields: Vec<(String, &'static str)>,
    transitions: Vec<ChartTransition>,
}

struct MachineReader<'t> {
    text: &'t str,
    root: &'t Json,
    chart: ImportedChart,
    problems: Vec<ImportProblem>,
}

type JsonPath = Vec<String>;

fn below(path: &[String], names: &[&str]) -> JsonPath {
    path.iter().cloned().chain(names.iter().map(|name| (*name).to_owned())).collect()
}

/// The fields of an object in the order of the text.
fn in_order<'j>(text: &str, path: &[String], object: &'j Map<String, Json>) -> Vec<(&'j String, &'j Json)> {
    let mut fields: Vec<(&String, &Json)> = object.iter().collect();
    fields.sort_by_key(|(name, _)| place_of(text, &below(path, &[name])));
    fields
}

/// What a state may have; with what is to be done about the others.
const STATE_FIELDS: [&str; 10] =
    ["id", "initial", "states", "on", "after", "always", "type", "description", "meta", "tags"];
const ROOT_FIELDS: [&str; 5] = ["context", "version", "output", "types", "$schema"];

impl MachineReader<'_> {
    fn problem(&mut self, path: &[String], title: impl Into<String>) {
        let line = line_of(self.text, path);
        self.problems.push(ImportProblem { line, title: title.into() });
    }

    /// Reads a state and those below it. The root has no name.
    fn read_node(&mut self, node: &Json, state: &str, path: &[String]) {
        let Some(fields) = node.as_object() else {
            return self.problem(path, "a state is an object");
        };
        for (field, value) in in_order(self.text, path, fields) {
            let is_empty = value.as_array().is_some_and(Vec::is_empty)
                || value.as_object().is_some_and(Map::is_empty)
                || value.is_null();
            let is_known = STATE_FIELDS.contains(&field.as_str())
                || state.is_empty() && ROOT_FIELDS.contains(&field.as_str());
            if !is_known && !is_empty {
                let advice = match field.as_str() {
                    "invoke" => "run it in a job that a transition enqueues",
                    "entry" | "exit" => {
                        "let the transitions that lead there or away send effects and enqueue jobs"
                    }
                    _ => "take it out",
                };
                self.problem(
                    &below(path, &[field]),
                    format!("`{field}` has no meaning in a blueprint: {advice}"),
                );
            }
        }
        match fields.get("type").and_then(Json::as_str) {
            Some("final") => self.chart.finals.push(state.to_owned()),
            Some("parallel") => {
                self.problem(
                    &below(path, &["type"]),
                    "a row is in one state: make two workflows of parallel states",
                );
            }
            Some("history") => {
                self.problem(&below(path, &["type"]), "a row does not go back to an earlier state by itself");
            }
            _ => {}
        }
        if let Some(states) = fields.get("states").and_then(Json::as_object) {
            for (name, child) in in_order(self.text, &below(path, &["states"]), states) {
                let full = if state.is_empty() { name.clone() } else { format!("{state}.{name}") };
                self.read_node(child, &full, &below(path, &["states", name]));
            }
        }
        self.read_exits(fields, state, path);
    }

    /// What leaves a state; of a state with sub-states, what leaves each of them.
    fn read_exits(&mut self, fields: &Map<String, Json>, state: &str, path: &[String]) {
        let from = self.leaves(state);
        if let Some(on) = fields.get("on").and_then(Json::as_object) {
            for (event, given) in in_order(self.text, &below(path, &["on"]), on) {
                self.read_event((event, None), given, (&from, state), &below(path, &["on", event]));
            }
        }
        if let Some(after) = fields.get("after").and_then(Json::as_object) {
            for (delay, given) in in_order(self.text, &below(path, &["after"]), after) {
                let place = below(path, &["after", delay]);
                match delay.parse::<u64>() {
                    Ok(millis) => {
                        let timer = Some(Duration::from_millis(millis));
                        self.read_event(("after", timer), given, (&from, state), &place);
                    }
                    Err(_) => {
                        self.problem(&place, format!("`{delay}` is the name of a delay: write milliseconds"));
                    }
                }
            }
        }
        if let Some(given) = fields.get("always").filter(|given| !given.is_null()) {
            let place = below(path, &["always"]);
            self.read_event(("always", Some(Duration::ZERO)), given, (&from, state), &place);
        }
    }

    /// The states of a node that rows can be in: itself, or those below it.
    fn leaves(&self, state: &str) -> Vec<String> {
        let mut leaves = Vec::new();
        collect_leaves(self.node(state), state, &mut leaves);
        leaves
    }

    fn node(&self, state: &str) -> &Json {
        let names = state.split('.').filter(|name| !name.is_empty());
        names.fold(self.root, |node, name| {
            node.get("states").and_then(|states| states.get(name)).unwrap_or(&Json::Null)
        })
    }

    /// Reads what an event or a timer leads to.
    fn read_event(
        &mut self,
        (event, after): (&str, Option<Duration>),
        given: &Json,
        (from, state): (&[String], &str),
        path: &[String],
    ) {
        let (given, path) = match given.as_array().map(Vec::as_slice) {
            None => (given, path.to_vec()),
            Some([only]) => (only, below(path, &["0"])),
            Some([]) => return,
            Some(_) => {
                let title = format!(
                    "`{event}` has several targets with guards: make each an event of its own, with its guard"
                );
                return self.problem(path, title);
            }
        };
        let plain = Json::Object(Map::new());
        let (target, fields) = match given {
            Json::String(_) => (Some(given), plain.as_object()),
            Json::Object(fields) => (fields.get("target"), Some(fields)),
            _ => (None, None),
        };
        let Some(fields) = fields else {
            return self
                .problem(&path, format!("`{event}` leads to neither a state nor an object with a `target`"));
        };
        let mut one = ChartTransition { from: from.to_vec(), after, ..ChartTransition::default() };
        if let Some(target) = target.filter(|target| !target.is_null()) {
            match self.target(target, state) {
                Some(to) => one.to = Some(to),
                None => self
                    .problem(&path, format!("`{event}` leads to {target}, which is no state of the machine")),
            }
        }
        if after.is_some() && one.to.is_none() {
            self.problem(&path, "a timer leads to a state: give it a `target`");
        }
        self.read_guard(&mut one, event, fields, &path);
        self.read_actions(&mut one, fields, &path);
        let meta = |name: &str| fields.get("meta").and_then(|meta| meta.get(name)).and_then(Json::as_str);
        one.scope = meta("scope").map(str::to_owned);
        let named = meta("transition").map(str::to_owned);
        let base = named.unwrap_or_else(|| match after {
            Some(_) => plain_name(&format!("leave_{state}")),
            None => plain_name(event),
        });
        self.add(one, &base, state);
    }

    /// A guard with the text of a condition; any other is a name of a function.
    fn read_guard(
        &mut self,
        one: &mut ChartTransition,
        event: &str,
        fields: &Map<String, Json>,
        path: &[String],
    ) {
        let Some(guard) = fields.get("guard").filter(|guard| !guard.is_null()) else { return };
        let condition = guard.get("params").and_then(|params| params.get("if")).and_then(Json::as_str);
        match condition.filter(|_| guard.get("type").and_then(Json::as_str) == Some(CONDITION)) {
            Some(condition) if one.after.is_none() => one.condition = Some(condition.to_owned()),
            Some(_) => self.problem(&below(path, &["guard"]), "a timer has no condition"),
            None => {
                let title = format!(
                    "the guard of `{event}` is the name of a function, which a blueprint does not have: write it as \
                     {{\"type\": \"{CONDITION}\", \"params\": {{\"if\": \"total < 100\"}}}}"
                );
                self.problem(&below(path, &["guard"]), title);
            }
        }
    }

    fn read_actions(&mut self, one: &mut ChartTransition, fields: &Map<String, Json>, path: &[String]) {
        let path = below(path, &["actions"]);
        let actions = match fields.get("actions") {
            None | Some(Json::Null) => return,
            Some(Json::Array(actions)) => actions.clone(),
            Some(single) => vec![single.clone()],
        };
        for (index, action) in actions.iter().enumerate() {
            let params = |name: &str| action.get("params").and_then(|params| params.get(name)).cloned();
            let text = |name: &str| params(name).and_then(|value| value.as_str().map(str::to_owned));
            let content = |name: &str| params(name).unwrap_or_default();
            match action.get("type").and_then(Json::as_str) {
                Some(SET) => {
                    let fields = content("fields");
                    let names = fields.as_array().into_iter().flatten().filter_map(Json::as_str);
                    one.set.extend(names.map(str::to_owned));
                }
                Some(SEND) if text("effect").is_some() => {
                    one.sends.push((text("effect").unwrap_or_default(), content("body")));
                }
                Some(ENQUEUE) if text("schedule").is_some() => {
                    one.jobs.push((text("schedule").unwrap_or_default(), content("payload")));
                }
                _ => {
                    let title = format!(
                        "this action is the name of a function, which a blueprint does not have: write actions of the types \
                         `{SET}`, `{SEND}` and `{ENQUEUE}`, as `export` does"
                    );
                    self.problem(&below(&path, &[&index.to_string()]), title);
                }
            }
        }
    }

    /// The state that a target names: beside the state itself, below it, or by `#id`.
    fn target(&self, target: &Json, state: &str) -> Option<String> {
        let text = target.as_str()?;
        let full = match (text.strip_prefix('#'), text.strip_prefix('.')) {
            (Some(absolute), _) => match absolute.strip_prefix(&format!("{}.", self.chart.id)) {
                Some(rest) => rest.to_owned(),
                None => by_id(self.root, "", absolute)?,
            },
            (None, Some(child)) if state.is_empty() => child.to_owned(),
            (None, Some(child)) => format!("{state}.{child}"),
            (None, None) => match state.rsplit_once('.') {
                Some((parent, _)) => format!("{parent}.{text}"),
                None => text.to_owned(),
            },
        };
        if self.node(&full).is_null() { None } else { Some(self.entered(&full)) }
    }

    /// The state that a row is in after a node was entered.
    fn entered(&self, state: &str) -> String {
        let node = self.node(state);
        match node.get("initial").and_then(Json::as_str) {
            Some(initial) if node.get("states").is_some() => self.entered(&format!("{state}.{initial}")),
            _ => state.to_owned(),
        }
    }

    fn initial_of(&mut self, root: &Json, _: &str) -> String {
        match root.get("initial").and_then(Json::as_str) {
            Some(initial) if !self.node(initial).is_null() => self.entered(initial),
            _ => {
                self.problem(
                    &["initial".to_owned()],
                    "the machine has no `initial` that is one of its states",
                );
                String::new()
            }
        }
    }

    /// The fields of the context, as optional fields of the row.
    fn fields(&self, root: &Json) -> Vec<(String, &'static str)> {
        let context = root.get("context").and_then(Json::as_object);
        let fields = context.map(|context| in_order(self.text, &["context".to_owned()], context));
        let kind = |value: &Json| match value {
            Json::Bool(_) => "bool?",
            Json::Number(number) if number.is_i64() => "int?",
            Json::Number(_) => "float?",
            Json::String(_) | Json::Null => "text?",
            Json::Array(_) | Json::Object(_) => "json?",
        };
        fields.into_iter().flatten().map(|(name, value)| (plain_name(name), kind(value))).collect()
    }

    /// Adds a transition. One that is equal but for where it begins is the same; another one of its name gets the state behind it.
    fn add(&mut self, one: ChartTransition, base: &str, state: &str) {
        let same = |known: &&mut ChartTransition| {
            let alike = ChartTransition { name: known.name.clone(), from: known.from.clone(), ..one.clone() };
            alike == **known && (known.name == base || known.name.starts_with(&format!("{base}_")))
        };
        if let Some(known) = self.chart.transitions.iter_mut().find(same) {
            let missing: Vec<String> =
                one.from.iter().filter(|from| !known.from.contains(from)).cloned().collect();
            known.from.extend(missing);
            return;
        }
        let taken = |name: &str| self.chart.transitions.iter().any(|known| known.name == name);
        let mut name = base.to_owned();
        if taken(&name) {
            name = plain_name(&format!("{base}_{state}"));
        }
        let mut number = 2;
        while taken(&name) {
            name = format!("{base}_{number}");
            number += 1;
        }
        self.chart.transitions.push(ChartTransition { name, ..one });
    }
}

fn collect_leaves(node: &Json, state: &str, leaves: &mut Vec<String>) {
    match node.get("states").and_then(Json::as_object) {
        Some(states) if !states.is_empty() => {
            for (name, child) in states {
                let full = if state.is_empty() { name.clone() } else { format!("{state}.{name}") };
                collect_leaves(child, &full, leaves);
            }
        }
        _ => leaves.push(state.to_owned()),
    }
}

/// The state whose node has this id.
fn by_id(node: &Json, state: &str, id: &str) -> Option<String> {
    for (name, child) in node.get("states").and_then(Json::as_object)? {
        let full = if state.is_empty() { name.clone() } else { format!("{state}.{name}") };
        if child.get("id").and_then(Json::as_str) == Some(id) {
            return Some(full);
        }
        if let Some(found) = by_id(child, &full, id) {
            return Some(found);
        }
    }
    None
}

/// A name in small letters, digits and `_`.
fn plain_name(name: &str) -> String {
    let (mut plain, mut before) = (String::new(), ' ');
    for c in name.chars() {
        if c.is_ascii_uppercase() && before.is_ascii_lowercase() {
            plain.push('_');
        }
        before = c;
        plain.push(if c.is_ascii_alphanumeric() { c.to_ascii_lowercase() } else { '_' });
    }
    match plain.starts_with(|c: char| c.is_ascii_lowercase()) {
        true => plain,
        false => format!("do_{plain}"),
    }
}

impl ImportedChart {
    fn blueprint(&self, name: &str) -> String {
        let mut text = format!("[workflow.{name}]\nkey     = {{ {name}_id = \"text\" }}\n");
        if !self.fields.is_empty() {
            let fields: Vec<String> =
                self.fields.iter().map(|(field, kind)| format!("{field} = \"{kind}\"")).collect();
            let _ = writeln!(text, "fields  = {{ {} }}", fields.join(", "));
        }
        let _ = writeln!(text, "initial = {}", quoted(&self.initial));
        if !self.finals.is_empty() {
            let _ = writeln!(text, "final   = {}", list(&self.finals));
        }
        let _ = writeln!(text, "[workflow.{name}.on]");
        let width = self.transitions.iter().map(|one| one.name.len()).max().unwrap_or_default();
        for one in &self.transitions {
            let _ = writeln!(text, "{:width$} = {{ {} }}", one.name, settings(one).join(", "));
        }
        text
    }
}

fn settings(one: &ChartTransition) -> Vec<String> {
    let from = match one.from.as_slice() {
        [only] => quoted(only),
        several => list(several),
    };
    let mut settings = vec![format!("from = {from}")];
    settings.extend(one.to.as_ref().map(|to| format!("to = {}", quoted(to))));
    settings.extend(one.condition.as_ref().map(|condition| format!("if = {}", quoted(condition))));
    if !one.set.is_empty() {
        settings.push(format!("set = {}", list(&one.set)));
    }
    for (setting, outputs) in [("send", &one.sends), ("enqueue", &one.jobs)] {
        let table: BTreeMap<&String, String> =
            outputs.iter().map(|(name, content)| (name, toml_of(content))).collect();
        let fields: Vec<String> =
            table.into_iter().map(|(name, content)| format!("{name} = {content}")).collect();
        if !fields.is_empty() {
            settings.push(format!("{setting} = {{ {} }}", fields.join(", ")));
        }
    }
    settings.extend(one.after.map(|after| format!("after = \"{}\"", duration_text(after))));
    settings.extend(one.scope.as_ref().map(|scope| format!("scope = {}", quoted(scope))));
    settings
}

/// A text of JSON is one of TOML.
fn quoted(text: &str) -> String {
    Json::String(text.to_owned()).to_string()
}

fn list(texts: &[String]) -> String {
    format!("[{}]", texts.iter().map(|text| quoted(text)).collect::<Vec<_>>().join(", "))
}

fn toml_of(value: &Json) -> String {
    match value {
        Json::Object(fields) => {
            let fields: Vec<String> =
                fields.iter().map(|(name, value)| format!("{} = {}", quoted(name), toml_of(value))).collect();
            format!("{{ {} }}", fields.join(", "))
        }
        Json::Array(items) => format!("[{}]", items.iter().map(toml_of).collect::<Vec<_>>().join(", ")),
        Json::Null => "\"\"".to_owned(),
        other => other.to_string(),
    }
}
