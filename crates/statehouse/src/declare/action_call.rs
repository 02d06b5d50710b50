//! A call that a blueprint declares: `do = "mail.send"`, with templates for its key and its inputs.
//!
//! Everything that can be known when the blueprint is read is checked then: the action, the names of its inputs, those that are
//! required, and whether the templates can have the types that it takes. Problems point at the value that is wrong.

use std::fmt;
use std::sync::Arc;

use serde_json::{Map, Value as Json};

use super::settings::SettingsReader;
use super::template::{
    Template, TemplateError, TemplatePart, TemplateScope, TemplateValues, fitted, text_of,
};
use crate::action::{Action, ActionHandler, Code, Expected, Refusal, RouteKind};
use crate::blueprint::nearest;
use crate::blueprint::tree::{Node, TreeEntry, TreeValue};
use crate::form::{Form, Property};
use crate::house::CallArguments;
use crate::resource::Resource;

/// A declared call.
#[derive(Clone)]
pub struct DeclaredCall {
    /// All resources that were declared before it.
    pub resources: Arc<[Resource]>,
    resource: usize,
    action: usize,
    key: Option<Template>,
    inputs: Vec<InputTemplate>,
    version: Option<Template>,
}

#[derive(Clone, Debug)]
struct InputTemplate {
    name: String,
    form: Form,
    is_nullable: bool,
    template: Template,
}

impl fmt::Debug for DeclaredCall {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "DeclaredCall({})", self.name())
    }
}

/// The word that stands for any version.
const ANY: &str = "any";

impl DeclaredCall {
    /// Reads `do`, `key`, `input` and `version`. `None` after a problem.
    pub fn read(
        settings: &mut SettingsReader<'_>,
        resources: &[Resource],
        scope: &dyn TemplateScope,
    ) -> Option<DeclaredCall> {
        let found = read_action(settings, resources);
        let (key, input, version) = (settings.node("key"), settings.node("input"), settings.node("version"));
        let (at, action_at) = found?;
        let resource = resources.get(at)?;
        let action = resource.actions.get(action_at)?;
        let mut call = DeclaredCall {
            resources: resources.into(),
            resource: at,
            action: action_at,
            key: None,
            inputs: Vec::new(),
            version: None,
        };
        let entries = match input {
            None => Vec::new(),
            Some(Node { value: TreeValue::Table(entries), .. }) => entries,
            Some(_) => {
                settings.problem("input", "`input` must be a table: `{ name = \"{row.name}\" }`");
                return None;
            }
        };
        let before = settings.problem_count();
        // The key may stand among the inputs, as in a batch, where the action takes no input of that name.
        let takes = |name: &str| action.input.iter().any(|property| property.name == name);
        let is_key = |entry: &&TreeEntry| names_row(action) && entry.key == "key" && !takes("key");
        let key = key.or_else(|| entries.iter().find(is_key).map(|entry| entry.value.clone()));
        call.key = read_key(settings, action, key, scope);
        for entry in entries.iter().filter(|entry| !is_key(entry)) {
            match action.input.iter().find(|property| property.name == entry.key) {
                Some(property) => match read_input(property, &entry.value, scope) {
                    Ok(input) => call.inputs.push(input),
                    Err(error) => settings.template_problem(error),
                },
                None => settings.template_problem(unknown_input(resource, action, entry)),
            }
        }
        for missing in action.input.iter().filter(|property| property.required) {
            if !entries.iter().any(|entry| entry.key == missing.name) {
                let title = format!("`{}.{}` needs the input `{}`", resource.name, action.name, missing.name);
                settings.problem("input", title);
            }
        }
        call.version = read_version(settings, resource, action, version, scope);
        (settings.problem_count() == before).then_some(call)
    }

    /// The resource of the action.
    pub fn resource(&self) -> Result<&Resource, Refusal> {
        self.resources.get(self.resource).ok_or_else(|| Refusal::new(Code::Internal, "a call of no resource"))
    }

    /// The action.
    pub fn action(&self) -> Result<&Action, Refusal> {
        let action = self.resource()?.actions.get(self.action);
        action.ok_or_else(|| Refusal::new(Code::Internal, "a call of no action"))
    }

    /// The full name of the action.
    pub fn name(&self) -> String {
        match (self.resource(), self.action()) {
            (Ok(resource), Ok(action)) => format!("{}.{}", resource.name, action.name),
            _ => String::new(),
        }
    }

    /// Visits the placeholders of all templates.
    pub fn placeholders<'t>(&'t self, visit: &mut dyn FnMut(&'t [String])) {
        let templates = self.key.iter().chain(&self.version);
        let templates = templates.chain(self.inputs.iter().map(|input| &input.template));
        templates.for_each(|template| template.placeholders(visit));
    }

    /// The arguments for one event or message.
    pub fn arguments(&self, values: &dyn TemplateValues) -> Result<CallArguments, Refusal> {
        let key = match &self.key {
            Some(template) => self.resource()?.parse_key(&key_text(template, values))?,
            None => Vec::new(),
        };
        let mut input = Map::new();
        for InputTemplate { name, form, is_nullable, template } in &self.inputs {
            let value = fitted(template.render(values), form);
            if !value.is_null() || *is_nullable {
                input.insert(name.clone(), value);
            }
        }
        let expected = match self.version.as_ref().map(|template| template.render(values)) {
            None => None,
            Some(Json::String(word)) if word == ANY => Some(Expected::Any),
            Some(value) => {
                let version = fitted(value, &Form::Value(statehouse_store::Type::Int)).as_i64();
                let missing = || Refusal::field("version", "expected a number");
                Some(Expected::Version(version.ok_or_else(missing)?))
            }
        };
        Ok(CallArguments { key, input, expected })
    }
}

fn names_row(action: &Action) -> bool {
    action.route.kind != RouteKind::Collection
}

/// The places of the resource and the action that `do` names.
fn read_action(settings: &mut SettingsReader<'_>, resources: &[Resource]) -> Option<(usize, usize)> {
    let Some(name) = settings.maybe_text("do") else {
        if !settings.has("do") {
            settings.problem_with_advice("do", "there is no `do`", "name an action: `do = \"mail.send\"`");
        }
        return None;
    };
    let (resource_name, action_name) = name.split_once('.').unwrap_or((&name, ""));
    let Some(at) = resources.iter().position(|resource| resource.name == resource_name) else {
        let names = resources.iter().map(|resource| resource.name.as_str());
        let advice = advice(resource_name, names);
        settings.problem_with_advice("do", format!("there is no resource `{resource_name}`"), advice);
        return None;
    };
    let resource = resources.get(at)?;
    // What only asserts something is for batches.
    let is_write =
        |action: &&Action| matches!(action.handler, ActionHandler::Write(_)) && action.shape != "assert";
    let writes = || resource.actions.iter().filter(is_write).map(|action| &*action.name);
    match resource.actions.iter().position(|action| action.name == action_name) {
        Some(index) if resource.actions.get(index).is_some_and(|action| is_write(&action)) => {
            Some((at, index))
        }
        Some(_) => {
            let title = format!("`{name}` is not a write of one plan, and cannot be repeated as a whole");
            let listed: Vec<&str> = writes().collect();
            settings.problem_with_advice("do", title, format!("`{resource_name}` has {}", listed.join(", ")));
            None
        }
        None => {
            let title = format!("`{resource_name}` has no action `{action_name}`");
            settings.problem_with_advice("do", title, advice(action_name, writes()));
            None
        }
    }
}

/// What to write instead of a name that is not known.
pub(crate) fn advice<'n>(word: &str, names: impl Iterator<Item = &'n str>) -> String {
    let names: Vec<&str> = names.collect();
    match nearest(word, names.iter().copied()) {
        Some(near) => format!("did you mean `{near}`?"),
        None => format!("there are {}", names.join(", ")),
    }
}

fn read_key(
    settings: &mut SettingsReader<'_>,
    action: &Action,
    node: Option<Node>,
    scope: &dyn TemplateScope,
) -> Option<Template> {
    match (node, names_row(action)) {
        (None, false) => None,
        (Some(_), false) => {
            let title = format!("`{}` names no row, so it has no `key`", action.name);
            settings.problem("key", title);
            None
        }
        (None, true) => {
            let title = format!("`{}` needs the key of a row", action.name);
            settings.problem_with_advice("do", title, "say which: `key = \"{subject}\"`");
            None
        }
        (Some(node), true) => {
            let template = Template::read(&node).and_then(|template| {
                template.check_names(&node, scope)?;
                match &template {
                    Template::Text(parts) if !parts.is_empty() => Ok(template),
                    Template::Literal(Json::Number(_)) => Ok(template),
                    _ => Err(TemplateError::at(&node.span, "a key is text, such as \"{subject}\"")),
                }
            });
            template.map_err(|error| settings.template_problem(error)).ok()
        }
    }
}

fn read_input(
    property: &Property,
    node: &Node,
    scope: &dyn TemplateScope,
) -> Result<InputTemplate, TemplateError> {
    let template = Template::read(node)?;
    template.check(node, property, scope)?;
    let (form, is_nullable) = (property.form.clone(), property.nullable);
    Ok(InputTemplate { name: property.name.clone(), form, is_nullable, template })
}

fn unknown_input(resource: &Resource, action: &Action, entry: &TreeEntry) -> TemplateError {
    let title = format!("`{}.{}` has no input `{}`", resource.name, action.name, entry.key);
    let names = action.input.iter().map(|property| property.name.as_str());
    TemplateError::at(&entry.key_span, title).advise(advice(&entry.key, names))
}

/// `version`: which version the row must have, `"any"` if it does not matter.
fn read_version(
    settings: &mut SettingsReader<'_>,
    resource: &Resource,
    action: &Action,
    node: Option<Node>,
    scope: &dyn TemplateScope,
) -> Option<Template> {
    let Some(node) = node else {
        if action.needs_version {
            let title =
                format!("`{}.{}` overwrites what others may have written", resource.name, action.name);
            let advice =
                "say which version it may overwrite: `version = \"{row.version}\"`, or `version = \"any\"`";
            settings.problem_with_advice("do", title, advice);
        }
        return None;
    };
    let template = Template::read(&node).and_then(|template| {
        template.check_names(&node, scope)?;
        match &template {
            Template::Text(parts) => match parts.as_slice() {
                [TemplatePart::Placeholder(_)] => Ok(template),
                [TemplatePart::Text(word)] if word == ANY => Ok(template),
                _ => Err(TemplateError::at(&node.span, "`version` is one placeholder, or \"any\"")),
            },
            Template::Literal(Json::Number(_)) => Ok(template),
            _ => Err(TemplateError::at(&node.span, "`version` is one placeholder, or \"any\"")),
        }
    });
    template.map_err(|error| settings.template_problem(error)).ok()
}

/// The text of a key. What a placeholder gives is one part of it, whatever characters it has; `{subject}` is a whole key.
fn key_text(template: &Template, values: &dyn TemplateValues) -> String {
    let Template::Text(parts) = template else { return text_of(&template.render(values)) };
    let part = |part: &TemplatePart| match part {
        TemplatePart::Placeholder(path) if path.first().is_none_or(|name| name != "subject") => {
            part.text(values).replace('%', "%25").replace(',', "%2C")
        }
        part => part.text(values),
    };
    parts.iter().map(part).collect()
}
