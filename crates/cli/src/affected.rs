//! What a change of the tables means for those who use the house: callers, consumers of events, and what is declared over the rows.

use std::collections::BTreeMap;

use serde_json::{Value as Json, json};
use statehouse::Resource;
use statehouse::engine::Engine;
use statehouse_store::migration::Difference;
use statehouse_store::{Column, Index, SchemaChange};

/// What the changes of one resource affect, a line each.
#[derive(Debug, Default, PartialEq, Eq)]
pub(crate) struct Affected {
    /// Requests, responses and generated clients.
    pub clients: Vec<String>,
    /// Events, and those who read them.
    pub events: Vec<String>,
    /// Declarations that name the resource.
    pub declarations: Vec<String>,
    /// What holds from now on, or no longer.
    pub guarantees: Vec<String>,
}

impl Affected {
    fn parts(&self) -> [(&'static str, &[String]); 4] {
        [
            ("clients", &self.clients),
            ("events", &self.events),
            ("declared over it", &self.declarations),
            ("guarantees", &self.guarantees),
        ]
    }

    fn is_empty(&self) -> bool {
        self.parts().iter().all(|(_, lines)| lines.is_empty())
    }

    fn to_json(&self) -> Json {
        json!({
            "clients": self.clients, "events": self.events, "declarations": self.declarations,
            "guarantees": self.guarantees,
        })
    }
}

/// What changes affect, by resource. Tables that belong to no declared resource affect none.
pub(crate) fn affected(
    changes: &[SchemaChange],
    resources: &[Resource],
    blueprint: &str,
    engine: Engine,
) -> BTreeMap<String, Affected> {
    let mut all: BTreeMap<String, Affected> = BTreeMap::new();
    for change in changes {
        let owner =
            resources.iter().find(|one| one.tables.iter().any(|table| table.name() == change.table.name()));
        // What is new has no callers yet.
        let Some(resource) = owner.filter(|_| change.difference != Difference::CreateTable) else { continue };
        all.entry(resource.name.clone()).or_default().add(change, resource, engine);
    }
    for (name, affected) in &mut all {
        if !affected.events.is_empty() {
            affected.declarations = declarations_over(name, blueprint);
        }
    }
    all.retain(|_, affected| !affected.is_empty());
    all
}

impl Affected {
    fn add(&mut self, change: &SchemaChange, resource: &Resource, engine: Engine) {
        let is_hidden = |name: &str| resource.hidden.iter().any(|hidden| hidden == name);
        let events = |text: &str| format!("{}.*: {text}", resource.name);
        match &change.difference {
            Difference::AddColumn(Column { name, .. }) if !is_hidden(name) => {
                self.clients
                    .push(format!("requests may have `{name}`, responses have it; generate clients anew"));
                self.events
                    .push(events(&format!("rows have `{name}` from now on; events that are stored do not")));
            }
            Difference::DropColumn(Column { name, .. }) if !is_hidden(name) => {
                self.clients
                    .push(format!("`{name}` is refused in requests and is not in responses any more"));
                self.events
                    .push(events(&format!("rows do not have `{name}` any more; events that are stored do")));
            }
            Difference::RenameColumn { column, to } => {
                let name = &column.name;
                self.clients.push(format!("`{name}` is `{to}` from now on, and refused under its old name"));
                self.events.push(events(&format!(
                    "`{name}` is `{to}` from now on; events that are stored have `{name}`"
                )));
            }
            Difference::RequireColumn(Column { name, .. }) => {
                self.clients.push(format!("requests without `{name}` are refused, if it has no default"));
                self.guarantees.push(format!("`{name}` is never null"));
            }
            Difference::RelaxColumn(Column { name, .. }) => {
                self.clients.push(format!("`{name}` may be null in responses"));
                self.guarantees.push(format!("`{name}` may be null from now on"));
            }
            Difference::ChangeDefault(Column { name, .. }) => {
                self.guarantees
                    .push(format!("new rows get another default of `{name}`; rows that exist keep theirs"));
            }
            Difference::AddIndex(index) if engine == Engine::Dynamodb => {
                self.guarantees.push(format!("lists by {} are eventually consistent", columns(index)));
            }
            Difference::DropIndex(index) => {
                self.clients
                    .push(format!("filters by {} are refused, if no other index has them", columns(index)));
            }
            Difference::SetLayout { number, .. } => {
                self.guarantees.push(format!("`{}` cannot become smaller again", number.name));
            }
            Difference::MoveColumn { column, .. } => {
                self.events
                    .push(events(&format!("each row that has `{}` leaves an event `moved`", column.name)));
            }
            Difference::MoveRows { .. } => self.events.push(events(&change.to_string())),
            Difference::FillTable { .. } => {
                self.guarantees.push(format!("`{}` holds when its rows are filled", change.table.name()));
            }
            Difference::AddColumn(_) | Difference::DropColumn(_) | Difference::AddIndex(_) => {}
            Difference::CreateTable | Difference::DropTable => {}
        }
    }
}

/// The columns of an index, in its order.
fn columns(index: &Index) -> String {
    index.columns().map(|column| format!("`{column}`")).collect::<Vec<_>>().join(", ")
}

/// The declarations whose settings name a resource, one of its events or one of its actions: views, feeds, reactions, groups of the
/// log, references.
fn declarations_over(resource: &str, blueprint: &str) -> Vec<String> {
    let Ok(toml::Value::Table(keywords)) = blueprint.parse::<toml::Table>().map(toml::Value::Table) else {
        return Vec::new();
    };
    let mut found = Vec::new();
    for (keyword, things) in &keywords {
        for (name, settings) in things.as_table().into_iter().flatten() {
            if name != resource && names(settings, resource) {
                found.push(format!("{keyword}.{name}"));
            }
        }
    }
    found
}

fn names(setting: &toml::Value, resource: &str) -> bool {
    match setting {
        toml::Value::String(text) => {
            text == resource || text.strip_prefix(resource).is_some_and(|rest| rest.starts_with(['.', '_']))
        }
        toml::Value::Array(values) => values.iter().any(|value| names(value, resource)),
        toml::Value::Table(table) => table.values().any(|value| names(value, resource)),
        _ => false,
    }
}

/// The JSON of a plan.
pub(crate) fn to_json(all: &BTreeMap<String, Affected>) -> Json {
    all.iter()
        .map(|(name, affected)| (name.clone(), affected.to_json()))
        .collect::<serde_json::Map<_, _>>()
        .into()
}

/// The text of a plan; none if nothing is affected.
pub(crate) fn describe(all: &BTreeMap<String, Affected>) -> Option<String> {
    let mut lines = vec!["What the changes affect:".to_owned()];
    for (name, affected) in all {
        lines.push(format!("  {name}"));
        for (part, texts) in affected.parts() {
            lines.extend(texts.iter().map(|text| format!("    {part}: {text}")));
        }
    }
    (!all.is_empty()).then(|| lines.join("\n"))
}

#[cfg(test)]
mod tests {
    use statehouse::{Blueprint, resource};
    use statehouse_store::migration::planned;
    use statehouse_store::{Migrate, Schema};

    use super::*;

    const BEFORE: &str = r#"
[house]
name = "shop"

[entity.tool]
key     = { id = "int" }
fields  = { name = "text", note = "text?" }

[view.shelf]
of       = "tool"
group_by = ["name"]

[on.new]
event = "tool.created"
do    = "mail.enqueue"
input = { job_id = "{subject}" }

[schedule.mail]
"#;

    /// What an edit of the blueprint affects.
    fn after(edits: &[(&str, &str)]) -> BTreeMap<String, Affected> {
        let declared = |text: &str| {
            let blueprint = Blueprint::read("statehouse.toml", text).unwrap();
            resource::declare(&blueprint).unwrap()
        };
        let schema = |resources: &[Resource]| {
            Schema::new(resources.iter().flat_map(|resource| resource.tables.iter().cloned())).unwrap()
        };
        let mut text = BEFORE.to_owned();
        for (from, to) in edits {
            assert!(text.contains(from), "{from}");
            text = text.replace(from, to);
        }
        let (old, new) = (declared(BEFORE), declared(&text));
        let changes = planned(&schema(&old), &schema(&new), Migrate::Show).unwrap();
        let changes: Vec<SchemaChange> = changes
            .into_iter()
            .map(|(table, difference)| SchemaChange { table, difference, statements: Vec::new() })
            .collect();
        affected(&changes, &new, &text, Engine::Dynamodb)
    }

    #[test]
    fn a_new_field_affects_clients_events_and_what_is_declared_over_the_rows() {
        let all = after(&[(r#"note = "text?""#, r#"note = "text?", price = "int?""#)]);
        let tool = &all["tool"];
        assert_eq!(tool.clients, ["requests may have `price`, responses have it; generate clients anew"]);
        assert_eq!(tool.events, ["tool.*: rows have `price` from now on; events that are stored do not"]);
        assert_eq!(tool.declarations, ["on.new", "view.shelf"]);
        assert_eq!(tool.guarantees, [""; 0]);
        assert_eq!(all.len(), 1);
    }

    #[test]
    fn a_field_that_may_be_null_or_not_changes_a_guarantee() {
        let all = after(&[(r#"note = "text?""#, r#"note = { type = "text", default = "" }"#)]);
        assert!(all["tool"].guarantees.contains(&"`note` is never null".to_owned()), "{all:?}");
        let all = after(&[(r#"name = "text""#, r#"name = "text?""#)]);
        assert_eq!(all["tool"].clients, ["`name` may be null in responses"]);
    }

    #[test]
    fn an_index_on_dynamodb_lags_and_a_new_resource_affects_none() {
        let all = after(&[
            (r#"note = "text?" }"#, "note = \"text?\" }\nindexes = { by_name = [\"name\"] }"),
            ("[schedule.mail]", "[schedule.mail]\n[entity.label]\nkey = { id = \"int\" }"),
        ]);
        assert_eq!(all["tool"].guarantees, ["lists by `status`, `name` are eventually consistent"]);
        assert_eq!(all.len(), 1);
        assert_eq!(describe(&BTreeMap::new()), None);
    }
}
