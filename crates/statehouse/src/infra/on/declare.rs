//! Reads `[on.NAME]`: which event, which action, with what.

use std::sync::Arc;

use statehouse_store::{Table, Type};

use super::cycle;
use super::react::Reaction;
use crate::blueprint::Blueprint;
use crate::declare::action_call::{DeclaredCall, advice};
use crate::declare::rule::{CheckedRule, Rule, RuleColumns};
use crate::declare::template::TemplateScope;
use crate::declare::{Declare, ResourceSpec, SettingsReader};
use crate::infra::log::group;
use crate::resource::Resource;
use crate::view_source::ViewSource;

/// What a reaction's templates may name.
pub(super) struct EventScope<'a> {
    source: &'a Resource,
}

const NAMES: &str = "subject, event, operation, tenant, at, row.COLUMN, key.COLUMN and data.FIELD";

impl TemplateScope for EventScope<'_> {
    fn kind_of(&self, path: &[String]) -> Result<Option<Type>, (String, String)> {
        let names: Vec<&str> = path.iter().map(String::as_str).collect();
        match names.as_slice() {
            ["subject" | "event" | "operation" | "tenant"] => Ok(Some(Type::Text)),
            ["at"] => Ok(Some(Type::Time)),
            ["data", _, ..] => Ok(None),
            ["key", part] => {
                let found = self.source.key.iter().find(|(name, _)| name == part);
                let keys = || self.source.key.iter().map(|(name, _)| name.as_str());
                let title = || format!("the key of `{}` has no `{part}`", self.source.name);
                found.map(|(_, kind)| Some(*kind)).ok_or_else(|| (title(), advice(part, keys())))
            }
            ["row", column, rest @ ..] => match (column_kind(self.source, column), rest.is_empty()) {
                (Ok(kind), true) => Ok(Some(kind)),
                (Ok(Type::Json), false) => Ok(None),
                (Ok(kind), false) => Err((
                    format!("`{column}` is {kind}, which has no parts"),
                    format!("write {{row.{column}}}"),
                )),
                (Err(problem), _) => Err(problem),
            },
            _ => Err((format!("`{{{}}}` names nothing", path.join(".")), format!("there are {NAMES}"))),
        }
    }
}

/// The table whose rows the events of a resource are about, if it has one that its key names.
pub(super) fn table_of(source: &Resource) -> Option<&Arc<Table>> {
    let table = source.tables.first()?;
    let same =
        table.key_columns().iter().map(|column| &column.name).eq(source.key.iter().map(|(name, _)| name));
    same.then_some(table)
}

fn column_kind(source: &Resource, column: &str) -> Result<Type, (String, String)> {
    let Some(table) = table_of(source) else {
        return Err((format!("`{}` has no rows", source.name), format!("there are {NAMES}")));
    };
    if column == statehouse_store::table::VERSION {
        return Ok(Type::Int);
    }
    let visible = |name: &&str| !source.hidden.iter().any(|hidden| hidden == name);
    let found = table.type_of(column).filter(|_| visible(&column));
    found.ok_or_else(|| {
        let names = table.columns().iter().map(|column| column.name.as_str()).filter(visible);
        (format!("`{}` has no column `{column}`", source.name), advice(column, names))
    })
}

/// Reads `[on.NAME]`: the group, and what it has parked.
pub(crate) fn declare(cx: &mut Declare<'_>) -> Option<()> {
    let name = cx.name();
    let (blueprint, resources) = cx.others()?;
    let settings = cx.settings();
    let from_start = settings.choice("from", &["now", "start"]) == "start";
    let event = read_event(settings, resources);
    let Some((source, event)) = event else {
        // What is wrong with the rest cannot be said without the event.
        for name in ["do", "key", "input", "version", "when"] {
            settings.node(name);
        }
        return None;
    };
    let when = read_when(settings, blueprint, source);
    let call = DeclaredCall::read(settings, resources, &EventScope { source });
    if let Some(cycle) = cycle::endless(name, blueprint, resources) {
        let chain: Vec<String> =
            cycle.iter().chain([&name.to_owned()]).map(|name| format!("`on.{name}`")).collect();
        let title = format!("this reaction causes itself, for ever: {}", chain.join(" → "));
        let advice = "react to another event, or say with `when` which of them end it";
        settings.problem_with_advice("do", title, advice);
    }
    let reaction = Reaction::new(name, source, event, call?, when.ok()?, from_start);
    let key = group::parked_key();
    let telling =
        ViewSource::nothing("its rows say what is parked", format!("make the view of `{}`", source.name));
    let resource = ResourceSpec::without_rows(name, key, telling);
    let actions = group::reaction_actions(name, &source.name);
    cx.resource(resource.actions(actions).group(Arc::new(reaction)));
    Some(())
}

/// The resource and the event that `event` names.
fn read_event<'r>(
    settings: &mut SettingsReader<'_>,
    resources: &'r [Resource],
) -> Option<(&'r Resource, String)> {
    let Some(event) = settings.maybe_text("event") else {
        if !settings.has("event") {
            let advice = "name one: `event = \"order.created\"`";
            settings.problem_with_advice("event", "there is no `event`", advice);
        }
        return None;
    };
    let (resource, name) = event.split_once('.').unwrap_or((&event, ""));
    let Some(source) = resources.iter().find(|known| known.name == resource) else {
        let names = resources.iter().map(|known| known.name.as_str());
        let advice = advice(resource, names);
        settings.problem_with_advice("event", format!("there is no resource `{resource}`"), advice);
        return None;
    };
    if source.events.iter().any(|known| known.name == name) {
        return Some((source, event));
    }
    let title = format!("`{resource}` leaves no event `{name}`");
    let advice = match source.events.is_empty() {
        true => "its rows follow from others; react to those".to_owned(),
        false => advice(name, source.events.iter().map(|known| known.name.as_str())),
    };
    settings.problem_with_advice("event", title, advice);
    None
}

/// The condition on the row of the event.
fn read_when(
    settings: &mut SettingsReader<'_>,
    blueprint: &Blueprint,
    source: &Resource,
) -> Result<Option<CheckedRule>, ()> {
    let Some(text) = settings.maybe_text("when") else {
        return if settings.has("when") { Err(()) } else { Ok(None) };
    };
    let Some(table) = table_of(source) else {
        settings.problem("when", format!("`{}` has no rows that a condition could be about", source.name));
        return Err(());
    };
    let columns = RuleColumns::of(table).hide(&source.hidden).visible();
    match Rule::parse(&text, &columns, &[]) {
        Ok(rule) => Ok(Some(rule)),
        Err(error) => {
            let problem = error.problem(&blueprint.text, settings.span_of("when"), &text);
            settings.add_problem(problem);
            Err(())
        }
    }
}

/// The reactions of a blueprint, each as one line: `overdue: due_reminder.fired → mail.send`.
pub fn summaries(blueprint: &Blueprint) -> Vec<String> {
    let reactions = blueprint.things.iter().filter(|thing| thing.keyword == super::ARCHETYPE.keyword);
    let line = |thing: &crate::blueprint::Thing| {
        let (mut settings, mut unread) = (thing.settings.clone(), blueprint.problems());
        let mut text = |name| settings.text(name, &mut unread);
        let (event, action) = (text("event").unwrap_or_default(), text("do").unwrap_or_default());
        let when = text("when").map(|when| format!(" when {when}")).unwrap_or_default();
        format!("{}: {event} → {action}{when}", thing.name)
    };
    reactions.map(line).collect()
}
