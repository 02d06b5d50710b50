//! Reads the setting `allow` of a declaration.

use std::ops::Range;
use std::sync::Arc;

use statehouse_store::Type;

use super::{ActionRule, AllowRules};
use crate::action::{Action, ActionHandler, RouteKind};
use crate::blueprint::nearest;
use crate::blueprint::problem::{BlueprintProblem, Problems};
use crate::blueprint::tree::{Node, TreeEntry, TreeValue};
use crate::declare::rule::{CheckedRule, Rule, RuleColumns};
use crate::form::{Form, Property};
use crate::resource::Resource;

/// The setting.
pub(crate) const ALLOW: &str = "allow";
/// The rule of all actions.
const ANY: &str = "*";
/// The rule that also says which rows a caller may know of.
const READ: &str = "read";
/// Comparisons in a rule. The guard of a step has the rule twice, `read`, and the conditions of the action itself.
const LEAVES_MAX: usize = 10;

/// One rule as it stands in the file.
struct RuleEntry {
    action: String,
    text: String,
    span: Range<usize>,
    filter: bool,
}

/// Reads the rules of a thing and gives them to its resources.
pub(crate) fn declare(name: &str, node: Node, resources: &mut [Resource], problems: &mut Problems) {
    let TreeValue::Table(entries) = node.value else {
        let title = format!("`{ALLOW}` must be a table of actions and rules, not {}", node.value.kind());
        problems.add(BlueprintProblem::at(node.span, title).advice("write `allow = { read = \"…\" }`"));
        return;
    };
    let mut placed: Vec<(usize, RuleEntry)> = Vec::new();
    for entry in &entries {
        let read = resolve(name, entry, resources).and_then(|(index, action)| {
            let (text, span, filter) = rule_text(&entry.value)?;
            Ok((index, RuleEntry { action, text, span, filter }))
        });
        match read {
            Ok(read) => placed.push(read),
            Err(problem) => problems.add(problem),
        }
    }
    for (index, resource) in resources.iter_mut().enumerate() {
        let entries: Vec<&RuleEntry> =
            placed.iter().filter(|(of, _)| *of == index).map(|(_, entry)| entry).collect();
        let rules = RuleReader { resource, entries: &entries, problems }.read();
        resource.allow = Some(Arc::new(rules));
    }
}

/// The resource that an entry is about, and its action: `read`, or `seat_booking.hold` for a resource beside the thing's own.
fn resolve(
    name: &str,
    entry: &TreeEntry,
    resources: &[Resource],
) -> Result<(usize, String), BlueprintProblem> {
    let (of, action) = entry.key.split_once('.').unwrap_or((name, &entry.key));
    let names = || resources.iter().map(|resource| resource.name.as_str());
    let found = resources.iter().enumerate().find(|(_, resource)| resource.name == of);
    let (index, resource) = found.ok_or_else(|| {
        let known: Vec<&str> = names().collect();
        let problem =
            BlueprintProblem::at(entry.key_span.clone(), format!("`{name}` makes no resource `{of}`"));
        problem.advice(format!("write one of {} and an action: \"NAME.ACTION\"", known.join(", ")))
    })?;
    let is_known = [ANY, READ].contains(&action) || resource.action(action).is_some();
    if !is_known {
        let known: Vec<&str> =
            resource.actions.iter().map(|action| &*action.name).chain([READ, ANY]).collect();
        let problem =
            BlueprintProblem::at(entry.key_span.clone(), format!("`{of}` has no action `{action}`"));
        return Err(match nearest(action, known.iter().copied()) {
            Some(near) => problem.advice(format!("did you mean `{near}`?")),
            None => problem.advice(format!("it has {}", known.join(", "))),
        });
    }
    Ok((index, action.to_owned()))
}

/// The text of a rule, where it stands, and whether a list may leave rows out.
fn rule_text(node: &Node) -> Result<(String, Range<usize>, bool), BlueprintProblem> {
    let wrong = |node: &Node, expected: &str| {
        let problem = BlueprintProblem::at(node.span.clone(), format!("expected {expected}"));
        problem.label(format!("this is {}", node.value.kind()))
    };
    let entries = match &node.value {
        TreeValue::Text(text) => return Ok((text.clone(), node.span.clone(), false)),
        TreeValue::Table(entries) => entries,
        _ => return Err(wrong(node, "a rule, or `{ if = \"…\", filter = true }`")),
    };
    let (mut text, mut filter) = (None, false);
    for entry in entries {
        match (entry.key.as_str(), &entry.value.value) {
            ("if", TreeValue::Text(rule)) => text = Some((rule.clone(), entry.value.span.clone())),
            ("if", _) => return Err(wrong(&entry.value, "a rule")),
            ("filter", TreeValue::Bool(given)) => filter = *given,
            ("filter", _) => return Err(wrong(&entry.value, "true or false")),
            (other, _) => {
                let problem =
                    BlueprintProblem::at(entry.key_span.clone(), format!("a rule has no setting `{other}`"));
                return Err(problem.advice("it has `if` and `filter`"));
            }
        }
    }
    let (text, span) = text.ok_or_else(|| {
        BlueprintProblem::at(node.span.clone(), "the rule has no `if`")
            .advice("write `{ if = \"…\", filter = true }`")
    })?;
    Ok((text, span, filter))
}

/// Reads the rules of one resource.
struct RuleReader<'a> {
    resource: &'a Resource,
    entries: &'a [&'a RuleEntry],
    problems: &'a mut Problems,
}

impl RuleReader<'_> {
    fn read(&mut self) -> AllowRules {
        let find = |action: &str| self.entries.iter().copied().find(|entry| entry.action == action);
        let (any, read) = (find(ANY), find(READ));
        let any = any.and_then(|any| {
            let label = "`*` is for every action: its rule can name claims only";
            self.parse(any, &RuleColumns::named([]), &[], Some(label))
        });
        let mut actions = Vec::new();
        for action in &self.resource.actions {
            if let Some(rule) = self.action_rule(action, any.as_ref()) {
                actions.push((action.name.to_string(), rule));
            }
        }
        let columns = row_columns(self.resource);
        let visible = read.and_then(|read| match self.resource.action(READ) {
            // The action reports what is wrong with it.
            Some(_) => Rule::parse(&read.text, &columns, &[]).ok(),
            None => self.parse(read, &columns, &[], None),
        });
        AllowRules { actions, visible: either(visible, any.as_ref(), &columns, &[]) }
    }

    fn action_rule(&mut self, action: &Action, any: Option<&CheckedRule>) -> Option<ActionRule> {
        let entry = self.entries.iter().copied().find(|entry| entry.action == action.name);
        let columns = judged_columns(self.resource, action);
        let Some(entry) = entry else {
            return Some(ActionRule { rule: any?.clone(), filter: false });
        };
        let rule = self.parse(entry, &columns, &action.input, None)?;
        let is_list = is_list(action);
        if entry.filter && !is_list {
            let title = format!("`{}` is no list: only a list can leave rows out", action.name);
            self.problems.add(BlueprintProblem::at(entry.span.clone(), title));
        }
        let is_collection = action.route.kind == RouteKind::Collection;
        let is_fixed = |name: &str| {
            let is_key = !is_collection && self.resource.key.iter().any(|(key, _)| key == name);
            is_key || action.input.iter().any(|input| input.name == name)
        };
        if let Some(column) = rule.rule().columns().into_iter().find(|name| is_list && !is_fixed(name))
            && !entry.filter
        {
            let title = format!(
                "`{}` of `{}` has no filter `{column}`, so that it cannot be limited to rows that fulfil this rule",
                action.name, self.resource.name
            );
            let advice =
                "write `{ if = \"…\", filter = true }`: other rows are left out, and pages may be short";
            self.problems.add(BlueprintProblem::at(entry.span.clone(), title).advice(advice));
        }
        let rule = either(Some(rule), any, &columns, &action.input)?;
        Some(ActionRule { rule, filter: entry.filter })
    }

    /// Parses a rule, or reports what is wrong with it.
    fn parse(
        &mut self,
        entry: &RuleEntry,
        columns: &RuleColumns,
        inputs: &[Property],
        title: Option<&str>,
    ) -> Option<CheckedRule> {
        match Rule::parse(&entry.text, columns, inputs) {
            Ok(rule) => {
                let mut leaves = 0;
                rule.rule().leaves(&mut |_| leaves += 1);
                if leaves > LEAVES_MAX {
                    let title = format!("this rule has {leaves} comparisons; the limit is {LEAVES_MAX}");
                    self.problems.add(BlueprintProblem::at(entry.span.clone(), title));
                }
                Some(rule)
            }
            Err(error) => {
                let problem = error.problem(self.problems.text(), entry.span.clone(), &entry.text);
                self.problems.add(match title {
                    Some(title) => problem.label(title),
                    None => problem,
                });
                None
            }
        }
    }
}

/// One of two rules, as far as they are given.
fn either(
    rule: Option<CheckedRule>,
    any: Option<&CheckedRule>,
    columns: &RuleColumns,
    inputs: &[Property],
) -> Option<CheckedRule> {
    match (rule, any) {
        (Some(rule), Some(any)) => Rule::from(any.clone()).or(rule.into()).checked(columns, inputs).ok(),
        (rule, any) => rule.or_else(|| any.cloned()),
    }
}

pub(super) fn is_list(action: &Action) -> bool {
    matches!(action.output, Form::List(_)) && !action.is_write()
}

/// The columns of the rows that a resource has.
fn row_columns(resource: &Resource) -> RuleColumns {
    match resource.row_def() {
        Some(def) => RuleColumns::from(&**def),
        None => RuleColumns::named(resource.key.iter().cloned()),
    }
}

/// The columns on which an action is judged.
fn judged_columns(resource: &Resource, action: &Action) -> RuleColumns {
    let is_collection = action.route.kind == RouteKind::Collection;
    let key = resource.key.iter().filter(|_| !is_collection).cloned();
    match (&action.handler, &resource.def) {
        (ActionHandler::Write(_), Some(def)) if is_collection || resource.row_def().is_some() => {
            RuleColumns::from(&**def)
        }
        (ActionHandler::Read(_), _) => {
            let mut columns: Vec<(String, Type)> = key.collect();
            for (name, kind) in answer_columns(&action.output) {
                if !columns.iter().any(|(known, _)| *known == name) {
                    columns.push((name, kind));
                }
            }
            RuleColumns::named(columns)
        }
        _ => RuleColumns::named(key),
    }
}

/// What an answer, or each item of a list, has.
fn answer_columns(form: &Form) -> Vec<(String, Type)> {
    match form {
        Form::Object(properties) => {
            properties.iter().filter_map(|one| Some((one.name.clone(), one.form.kind()?))).collect()
        }
        Form::List(item) => answer_columns(item),
        _ => Vec::new(),
    }
}

#[cfg(test)]
mod tests {
    use crate::resource::check;

    const NOTE: &str = "[entity.note]\nkey = { id = \"int\" }\nfields = { owner = \"text\", public = { type = \"bool\", default = false } }\n";

    fn problems(rules: &str) -> String {
        check("statehouse.toml", &format!("{NOTE}[entity.note.allow]\n{rules}\n")).unwrap_err().render(false)
    }

    #[test]
    fn rules_are_read_for_each_action() {
        let rules = "read = \"row.owner = claims.sub\"\n\"*\" = \"claims.role = 'staff'\"\nlist = { if = \"owner = claim.sub\", filter = true }";
        let (_, resources) =
            check("statehouse.toml", &format!("{NOTE}[entity.note.allow]\n{rules}\n")).unwrap();
        let allow = resources.first().unwrap().allow.as_ref().unwrap();
        let text = |name: &str| allow.action(name).unwrap().rule.rule().to_string();
        assert_eq!(text("read"), "claim.role = 'staff' or owner = claim.sub");
        assert_eq!(text("delete"), "claim.role = 'staff'");
        assert!(allow.action("list").unwrap().filter);
        assert!(allow.visible().is_some());
    }

    #[test]
    fn problems_point_at_the_line() {
        for (rules, expected) in [
            ("reed = \"true\"", "did you mean `read`?"),
            ("read = \"ownr = claim.sub\"", "statehouse.toml:5:9"),
            ("read = 3", "expected a rule"),
            ("\"*\" = \"owner = claim.sub\"", "its rule can name claims only"),
            ("list = \"owner = claim.sub\"", "has no filter `owner`"),
            ("update = { if = \"owner = claim.sub\", filter = true }", "only a list can leave rows out"),
            ("update = { filter = true }", "has no `if`"),
            ("update = { if = \"true\", fliter = true }", "no setting `fliter`"),
            ("\"other.read\" = \"true\"", "makes no resource `other`"),
        ] {
            let found = problems(rules);
            assert!(found.contains(expected), "{rules}\n{found}");
        }
        let said = check("statehouse.toml", &format!("{NOTE}allow = 3\n")).unwrap_err().render(false);
        assert!(said.contains("must be a table"), "{said}");
    }
}
